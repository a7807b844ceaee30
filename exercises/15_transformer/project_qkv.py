"""Exercise project_qkv of chapter 15 (core, 10 points, about 15 minutes).

Compute queries, keys and values from a normalised x: one product `layer.qkv`, split by
`layer.qkv.parts`, and each part split into heads of `head_dim` numbers. If the layer has
`q_norm` and `k_norm`, normalise each head of the queries and keys with them. Then rotate
queries and keys. `rms_norm` and `apply_rotary` are in `minigen.model.layers`.

Check it:     minigen check exercises/15_transformer/project_qkv.py
With a hint:  minigen check exercises/15_transformer/project_qkv.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(15, project_qkv=mine):
        greedy = SamplingParams(temperature=0, max_tokens=8)
        print(llm.generate("The capital of France is", greedy).text)

Harder: Rotate queries and keys in one call, with their heads side by side; the same check
accepts it. Is it faster for one token, and for a thousand?
"""

# exercise: minigen.model.transformer.project_qkv
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import Layer, Rotation


def project_qkv(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    head_dim: int,
    norm_eps: float,
) -> tuple[
    Float[Tensor, "tokens q_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
]:
    """Return the queries, keys and values of a normalised x, by head; q and k are rotated.

    If the layer has norms for queries and keys, they are applied to each head before the rotation.
    """
    raise NotImplementedError  # your turn

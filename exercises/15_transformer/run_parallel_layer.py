"""Exercise run_parallel_layer of chapter 15 (stretch, 15 points, about 15 minutes).

Write a layer as in GPT-J and PaLM: attention and the feed-forward network both read the same
normalised x, and both results are added to x. The norm is `layer.attention_norm`;
`layer.ffn_norm` is not used. The arguments are those of `run_layer`.

Check it:     minigen check exercises/15_transformer/run_parallel_layer.py
With a hint:  minigen check exercises/15_transformer/run_parallel_layer.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(15, run_layer=mine):  # SmolLM2 was trained with one half after the other
        greedy = SamplingParams(temperature=0, max_tokens=8)
        print(repr(llm.generate("The capital of France is", greedy).text))

Harder: In a parallel layer, W_q, W_k, W_v, W_gate and W_up read the same input. How many matrix
products are left in a layer if all products with the same input are fused into one, and how
many has a layer of SmolLM2?
"""

# exercise: minigen_course.ch15_transformer.reference.run_parallel_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Add attention and the feed-forward network to x, both computed from the same normalised x.

    The norm is the layer's `attention_norm`; its `ffn_norm` is not used.
    """
    raise NotImplementedError  # your turn

"""Exercise run_layer of chapter 15 (core, 10 points, about 15 minutes).

Write the forward pass of one layer: attention, then the feed-forward network, each with its
norm before it and a residual connection around it. `layer` has the weights; `attend(q, k, v)`
computes attention over each query's context. `rms_norm` and `swiglu` are in
`minigen.model.layers`; `project_qkv(layer, y, rotation, head_dim, norm_eps)` in
`minigen.model.transformer` returns the queries, keys and values of a normalised x, by head,
with queries and keys rotated. Return a new tensor, and leave x unchanged.

Check it:     minigen check exercises/15_transformer/run_layer.py
With a hint:  minigen check exercises/15_transformer/run_layer.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(15, run_layer=mine):
        greedy = SamplingParams(temperature=0, max_tokens=8)
        print(llm.generate("The capital of France is", greedy).text)

Harder: GPT-J and PaLM compute both halves in parallel, from the same normalised x: that is the
exercise `run_parallel_layer`. What does it gain, and why can SmolLM2 not run this way?
"""

# exercise: minigen.model.transformer.run_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation


def run_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Apply attention, then the feed-forward network; each reads a normalised x and adds to x."""
    raise NotImplementedError  # your turn

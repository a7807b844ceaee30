"""Exercise run_split_layer of chapter 41 (core, 10 points, about 20 minutes).

Write a layer as one rank runs it. `layer` has this rank's heads and its slice of the ffn; x and
the norms are the same on all ranks, and so must be your result. `comm.all_reduce(y)` returns
the sum of all ranks' y. `rms_norm` and `swiglu` are in `minigen.model.layers`, `project_qkv` in
`minigen.model.transformer`.

Check it:     minigen check exercises/41_tensor_parallel/run_split_layer.py
With a hint:  minigen check exercises/41_tensor_parallel/run_split_layer.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen import hub
    from minigen.checkpoint.checkpoint import open_checkpoint
    from minigen_course.ch41_tensor_parallel.lesson import continue_split

    checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
    tokenizer = checkpoint.tokenizer()
    made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, run_layer=mine)
    print(tokenizer.decode(made))

Harder: Some models run attention and feed-forward in parallel, on the same normalised x, and
add both to x. How many messages does such a layer need? The next exercise asks for it.
"""

# exercise: minigen_course.ch41_tensor_parallel.lesson.run_split_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer on one rank; its `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x and the norms, and all return the result of the whole layer.
    """
    raise NotImplementedError  # your turn

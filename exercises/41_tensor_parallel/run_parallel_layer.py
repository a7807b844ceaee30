"""Exercise run_parallel_layer of chapter 41 (stretch, 15 points, about 20 minutes).

In some models, such as PaLM and Falcon-7B, the two halves of a layer do not wait for each
other: attention and feed-forward both read x after `layer.attention_norm`, and both results are
added to x. `layer.ffn_norm` is not used. Write such a layer as one rank runs it, with a single
all-reduce.

Check it:     minigen check exercises/41_tensor_parallel/run_parallel_layer.py
With a hint:  minigen check exercises/41_tensor_parallel/run_parallel_layer.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen.parallel.comm import SoloComm
    from minigen_course.ch41_tensor_parallel import exercises

    exercises.one_rank_adds_both_halves_to_x(mine)
    exercises.each_rank_sends_one_message_of_the_size_of_x(mine)
    print("one rank and two ranks agree, after one message")

Harder: By the cost model of this chapter, how many times as fast would Llama-3-70B decode on 8
H100 over PCIe, if its layers took one message instead of two?
"""

# exercise: minigen_course.ch41_tensor_parallel.lesson.run_parallel_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer whose attention and feed-forward both read x after `attention_norm`.

    Both results are added to x. As in `run_split_layer`, `layer` has some of the heads and a slice
    of the ffn, and all ranks return the result of the whole layer, here after one message.
    """
    raise NotImplementedError  # your turn

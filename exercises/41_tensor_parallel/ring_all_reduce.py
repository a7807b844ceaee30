"""Exercise ring_all_reduce of chapter 41 (core, 10 points, about 20 minutes).

Write the all-reduce of a ring. Each rank may talk to its neighbours only: `pass_on(piece)`
sends a piece to the next rank (after the last one comes rank 0), and returns the piece that the
rank before has sent at the same time. Return the sum of all ranks' x. Use 2 (n - 1) calls of
`pass_on`, and pass on an n-th of the numbers in each. x has one axis and a multiple of n
numbers, and must stay as it is.

Check it:     minigen check exercises/41_tensor_parallel/ring_all_reduce.py
With a hint:  minigen check exercises/41_tensor_parallel/ring_all_reduce.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen import hub
    from minigen.checkpoint.checkpoint import open_checkpoint
    from minigen_course.ch41_tensor_parallel.lesson import continue_split

    checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
    tokenizer = checkpoint.tokenizer()
    made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, ring=mine)
    print(tokenizer.decode(made))

Harder: The ranks add the pieces in different orders: which ranks' numbers come first in piece
0, and which in piece 1? Do all ranks still end with the same bits?
"""

# exercise: minigen_course.ch41_tensor_parallel.lesson.ring_all_reduce
from jaxtyping import Float
from torch import Tensor

from minigen_course.ch41_tensor_parallel.lesson import PassOn


def ring_all_reduce(
    x: Float[Tensor, " numbers"], rank: int, num_ranks: int, pass_on: PassOn
) -> Float[Tensor, " numbers"]:
    """Return the sum of all ranks' x, by messages to the next rank in a ring only.

    `pass_on(piece)` sends a piece to the next rank, and returns the piece that came from the rank
    before. All ranks call it 2 (n - 1) times, with an n-th of the numbers each time; x has a
    multiple of n numbers, and stays as it is.
    """
    raise NotImplementedError  # your turn

"""Exercise depends_on_distance_only of chapter 13 (warm-up, 5 points, about 10 minutes).

Write a test of position encodings. `encode(vector, position)` returns a query or a key of
`head_dim` numbers as it is at a position. Return True if the score of a query at position m and
a key at position n never changes when both move by the same number of positions, for positions
from 0 to 63, and False otherwise. Use random vectors. An encoding that ignores the position
passes this test, too. Scores that differ by less than 0.01 count as equal, because float32
rounds.

Check it:     minigen check exercises/13_layers/depends_on_distance_only.py
With a hint:  minigen check exercises/13_layers/depends_on_distance_only.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    from minigen.model.layers import apply_rotary, rotary_frequencies, rotary_tables


    def rotated(vector, position):
        tables = rotary_tables(rotary_frequencies(len(vector), 10_000.0), torch.tensor([position]))
        return apply_rotary(vector[None, None], *tables)[0, 0]


    def added(vector, position):
        return vector + torch.arange(len(vector)).mul(position).sin()


    print("rotation:", mine(rotated, 64), "- added vector:", mine(added, 64))

Harder: Suppose that the encoding multiplies a vector by a matrix R_m. Write a test that is
given these matrices and uses no random vectors. Which condition on them is necessary and
sufficient?
"""

# exercise: minigen_course.ch13_layers.lesson.depends_on_distance_only
from collections.abc import Callable

from torch import Tensor


def depends_on_distance_only(encode: Callable[[Tensor, int], Tensor], head_dim: int) -> bool:
    """Return whether scores stay the same when both tokens move by the same number of positions.

    `encode(vector, position)` returns a query or a key of `head_dim` numbers as it is at a
    position. Positions 0 to 63 are tested, with a random query and a random key. Scores that differ
    by less than 0.01 count as equal, because float32 rounds.
    """
    raise NotImplementedError  # your turn

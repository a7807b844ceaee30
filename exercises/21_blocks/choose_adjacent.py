"""Exercise choose_adjacent of chapter 21 (stretch, 15 points, about 15 minutes).

Choose `count` of the free blocks so that they lie in long runs, and return them in increasing
order. If a run of adjacent free blocks is long enough, take all from the beginning of one run:
the shortest that is long enough (best fit), and of equally short ones the first. Otherwise take
whole runs, the longest first (of equally long ones the first), and of the last run its
beginning. `free` may be in any order, and must stay as it is; `count` is at most its length.

Check it:     minigen check exercises/21_blocks/choose_adjacent.py
With a hint:  minigen check exercises/21_blocks/choose_adjacent.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    print(mine([9, 2, 3, 4, 7, 8, 12], 2), "should be [2, 3]")

Harder: A running sequence asks for one block at a time, and its next neighbour is often taken.
Reserve a few blocks behind each sequence for its own growth, as long as memory is plentiful.
How many runs are left, and what does it cost?
"""

# exercise: minigen_course.ch21_blocks.lesson.choose_adjacent
from collections.abc import Sequence


def choose_adjacent(free: Sequence[int], count: int) -> list[int]:
    """Return `count` of the free blocks, in increasing order, adjacent ones if possible.

    If a run of adjacent free blocks is long enough, all come from the beginning of one run: the
    shortest such run, and of equally short ones the first. Otherwise whole runs are taken, the
    longest first (of equally long ones the first), and of the last run its beginning.

    >>> choose_adjacent([9, 2, 3, 4, 7, 8, 12], 2), choose_adjacent([9, 2, 3, 4, 7, 8, 12], 4)
    ([2, 3], [2, 3, 4, 7])
    """
    raise NotImplementedError  # your turn

"""Exercise fused_rows of chapter 41 (warm-up, 5 points, about 10 minutes).

Some checkpoints store several matrices as one tensor, for example gate and up, or Q, K and V.
The tensor has the rows of the first matrix, then those of the second, and so on; `parts` has
the number of rows of each. Return the stored rows that a rank needs for a column split of each
matrix: a list of one range for each matrix. Each number of rows can be divided by the number of
ranks.

Check it:     minigen check exercises/41_tensor_parallel/fused_rows.py
With a hint:  minigen check exercises/41_tensor_parallel/fused_rows.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    gate_up = torch.arange(12).repeat_interleave(2).view(12, 2)  # gate has rows 0 to 5, up 6 to 11
    print(torch.cat([gate_up[rows.start : rows.stop] for rows in mine([6, 6], 1, 3)]))

Harder: Cut gate and up, as one tensor of 2 x 1,536 rows, in two halves like any other matrix.
What does rank 0 have, what does rank 1 have, and what does `swiglu` then multiply?
"""

# exercise: minigen_course.ch41_tensor_parallel.lesson.fused_rows
from collections.abc import Sequence as SequenceOf


def fused_rows(parts: SequenceOf[int], rank: int, num_ranks: int) -> list[range]:
    """Return the stored rows that a rank needs of several matrices that lie in one tensor.

    The tensor has the rows of all matrices one after another, `parts` says how many rows each
    matrix has, and each is cut evenly, by columns in the sense of y = x W. There is one range for
    each matrix.

    >>> fused_rows([4, 4], rank=1, num_ranks=2)
    [range(2, 4), range(6, 8)]
    """
    raise NotImplementedError  # your turn

"""Exercise round_by_groups of chapter 35 (core, 10 points, about 15 minutes).

Round a matrix, [rows, columns], on symmetric grids. In each row, `size` neighbours are a group
with one scale: the group's largest magnitude divided by 2^(bits-1) - 1, the largest code. A
weight becomes the nearest multiple of its scale. The last group of a row has fewer weights if
`size` does not divide the columns. A group of zeros stays as it is. Return the rounded weights,
not the codes.

Check it:     minigen check exercises/35_quantization/round_by_groups.py
With a hint:  minigen check exercises/35_quantization/round_by_groups.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    weight = torch.randn(64, 128)
    weight[:, 5] *= 20
    for size in (128, 64, 32, 16):
        wrong = float((mine(weight, 4, size) - weight).norm() / weight.norm())
        print(f"groups of {size}: {100 * wrong:.1f} % wrong, {4 + 16 / size:.2f} bits per weight")

Harder: Scales of 16 bits cost 16 / size bits per weight. Q4_K gives a scale of 6 bits to each
32 weights, and two scales of 16 bits to 8 groups. Round the scales of 8 neighbouring groups to
6 bits, too. What does it cost in error, and what does it save?
"""

# exercise: minigen_course.ch35_quantization.reference.round_by_groups
import torch
from jaxtyping import Float
from torch import Tensor


def round_by_groups(
    weight: Float[Tensor, "rows columns"], bits: int, size: int
) -> Float[Tensor, "rows columns"]:
    """Return the weights on the grid of their group: `size` neighbours of a row share a scale.

    The grid is symmetric: the scale is the largest magnitude of the group divided by the largest
    code, 2^(bits-1) - 1. The last group of a row may be smaller. A group of zeros stays.
    """
    raise NotImplementedError  # your turn

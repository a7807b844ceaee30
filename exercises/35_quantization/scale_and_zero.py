"""Exercise scale_and_zero of chapter 35 (warm-up, 5 points, about 10 minutes).

Choose the grid of a group of weights. A code is a whole number from 0 to 2^bits - 1, and it
stands for (code - zero) * scale. The codes must reach from the smallest weight to the largest,
and 0 must be among their values: a group of positive weights has the zero point 0. Return the
scale, a float, and the zero point, a whole number (rounded, half to even). If all weights are
0, return 1.0 and 0.

Check it:     minigen check exercises/35_quantization/scale_and_zero.py
With a hint:  minigen check exercises/35_quantization/scale_and_zero.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen.quantization.grid import Grid, round_to_nearest

    weights = torch.randn(1, 32)
    mine_scale, mine_zero = mine(weights[0], 4)
    its = round_to_nearest(weights, Grid(4, -1, symmetric=False))
    print(f"yours {mine_scale:.5f}, {mine_zero}; minigen's {its.scales.item():.5f}, {its.zeros.item():.0f}")

Harder: With two weights far from the others, the best range does not reach them: they are
clipped, and all others are rounded more finely. Try smaller ranges, and return the one with the
least squared error. How much smaller may it be, in a group of 32 normally distributed weights?
"""

# exercise: minigen_course.ch35_quantization.reference.scale_and_zero
from jaxtyping import Float
from torch import Tensor


def scale_and_zero(weights: Float[Tensor, " numbers"], bits: int) -> tuple[float, int]:
    """Return the scale and the zero point of a group: weight = (code - zero) * scale.

    The codes 0 to 2^bits - 1 reach from the smallest weight to the largest, and 0 is among their
    values, so the range is widened to 0 if all weights have one sign. If all are 0, the scale is 1.
    """
    raise NotImplementedError  # your turn

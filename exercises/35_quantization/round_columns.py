"""Exercise round_columns of chapter 35 (core, 10 points, about 25 minutes).

Write GPTQ's loop. `weight` is [rows, columns], `factor` is U, the upper Cholesky factor of the
inverse of X^T X, and `rounded(column, i)` returns the values of column i's grid that are
nearest to `column`, [rows]. Go through the columns from left to right. Column i takes its
nearest values q. Its error (w_i - q) / U[i, i] is then repaid: each later column j loses error
* U[i, j]. Return the matrix with all columns rounded; the one that is given must not change.

Check it:     minigen check exercises/35_quantization/round_columns.py
With a hint:  minigen check exercises/35_quantization/round_columns.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen.quantization.gptq import gptq, inverse_factor
    from minigen.quantization.grid import Grid, relative_error, round_to_nearest
    from minigen_course.ch35_quantization.lesson import column_rounder

    x = torch.randn(512, 64) @ torch.randn(64, 64)
    weight, grid = torch.randn(16, 64), Grid(3, 32, symmetric=False)
    found = {
        "yours": mine(weight, inverse_factor(x.T @ x, 0.01), column_rounder(weight, grid)),
        "minigen's": gptq(weight, x.T @ x, grid, static_groups=True).dequantize(),
        "to nearest": round_to_nearest(weight, grid).dequantize(),
    }
    for name, each in found.items():
        wrong = [relative_error(weight, each), relative_error(x @ weight.T, x @ each.T)]
        print(f"{name}: the weights are {100 * wrong[0]:.1f} % wrong, the outputs {100 * wrong[1]:.1f} %")

Harder: Take the columns in the order of their inputs, the largest first (`act_order`): permute
the matrix and X^T X, and put the result back. Which matrices gain from it? Then apply the
errors of 128 columns at a time to the columns after them, in one product: the same result, and
faster.
"""

# exercise: minigen_course.ch35_quantization.reference.round_columns
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def round_columns(
    weight: Float[Tensor, "rows columns"],
    factor: Float[Tensor, "columns columns"],
    rounded: Callable[[Tensor, int], Tensor],
) -> Float[Tensor, "rows columns"]:
    """Return the matrix of GPTQ: columns are rounded in turn, and later ones repay each error.

    `factor` is the upper Cholesky factor U of the inverse Hessian, and `rounded(column, i)` are the
    nearest values of column i's grid. If column i becomes q, each later column j loses
    (w_i - q) / U[i, i] * U[i, j].
    """
    raise NotImplementedError  # your turn

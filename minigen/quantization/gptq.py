"""GPTQ: round one column after another, and let the columns that remain make up for each error.

If weight w_i of a row becomes q_i, the outputs on the calibration inputs change least when the
weights that are still free change by -(w_i - q_i) / [H^-1]_ii * [H^-1]_i, where H is X^T X. The
rows of the upper Cholesky factor of H^-1 hold these directions for all columns in turn, each for
the columns that are free by then. Source: Frantar et al. 2022, algorithm 1, and its code
(IST-DASLab/gptq, `gptq.py`).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.errors import WeightsError
from minigen.quantization.grid import (
    SHRINKS,
    Grid,
    QuantizedMatrix,
    choose_scales,
    refuse_vanishing,
    split_groups,
)

_BLOCK = 128  # columns whose errors are applied to the columns after them in one product


def gptq(
    weight: Float[Tensor, "rows columns"],
    hessian: Float[Tensor, "columns columns"],
    grid: Grid,
    *,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    clip_search: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedMatrix:
    """Return the matrix on the grid, with small errors on inputs whose X^T X is `hessian`.

    `damping` times the mean of the Hessian's diagonal is added to it. Channels without any input
    are rounded to nearest, unlike in GPTQ's code, which sets their weights to 0. A group's scale is
    chosen when its first column comes, from the weights as they are then, or with `static_groups`
    from the original weights.

    `act_order` takes the columns in the order of the largest inputs (`desc_act`). It implies
    `static_groups`, so the stored groups stay contiguous and no `g_idx` is needed.

    Raises `WeightsError` if a weight or the Hessian is not finite, or a scale does not fit.
    """
    rows, columns = weight.shape
    size = grid.size_of_group(columns)
    shrinks = SHRINKS if clip_search else (1.0,)
    groups = split_groups(weight, grid)
    refuse_vanishing(groups, grid, scale_dtype)
    scales, zeros = choose_scales(groups, grid, shrinks, None, scale_dtype)
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True) if act_order else torch.arange(columns)
    factor = inverse_factor(hessian[order][:, order], damping)
    free = weight.float().T[order].contiguous()  # one column per row; changed by the updates
    codes = torch.empty(columns, rows, dtype=torch.uint8)
    for start, stop in _blocks(columns, size):
        if start % size == 0 and not static_groups and not act_order:
            group = free[start : start + size].T
            chosen = choose_scales(group, grid, shrinks, None, scale_dtype)
            scales[:, start // size], zeros[:, start // size] = chosen
        errors = torch.empty(stop - start, rows)
        for i in range(start, stop):
            column = int(order[i])
            scale, zero = scales[:, column // size], zeros[:, column // size]
            code = torch.round(free[i] / scale + zero).clamp_(0, grid.max_code)
            codes[column] = code.to(torch.uint8)
            error = (free[i] - (code - zero) * scale) / factor[i, i]
            free[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
            errors[i - start] = error
        free[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return QuantizedMatrix(grid, codes.T.contiguous(), scales, zeros)


def _blocks(columns: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first column and the end of each block; no block crosses a group's boundary."""
    for group in range(0, columns, group_size):
        for start in range(group, group + group_size, _BLOCK):
            yield start, min(start + _BLOCK, group + group_size)


def inverse_factor(
    hessian: Float[Tensor, "columns columns"], damping: float
) -> Float[Tensor, "columns columns"]:
    """Return the upper triangular U with U^T U = (H + damping)^-1, computed in float64.

    Row i of U, divided by U_ii, is row i of the inverse of H without its first i rows and columns,
    divided by that inverse's first element: the direction in which column i's error is repaid.
    """
    if not torch.isfinite(hessian).all():
        raise WeightsError(
            "The calibration inputs of a matrix are not finite, so GPTQ cannot use them; "
            "check the model with float32 weights."
        )
    wide = hessian.double().clone()
    mean = float(wide.diagonal().mean())
    wide.diagonal().add_(damping * mean if mean > 0 else 1.0)  # without inputs: the identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True).float()

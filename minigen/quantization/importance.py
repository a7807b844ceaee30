"""Importance matrices: rounding to nearest that spends its error where the inputs are small.

An importance matrix holds the mean square of each input channel, collected on a text by
`minigen.quantization.calibration` (llama.cpp: `llama-imatrix`). If channels were uncorrelated, the
error of a layer's outputs would be the sum of importance * (change of the weight)^2, so this is the
error that the choice of each group's scale minimises. Source: ggml-org/llama.cpp,
`ggml/src/ggml-quants.c`, `make_qx_quants` and `quantize_row_q4_0_impl`.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.quantization.grid import (
    Grid,
    QuantizedMatrix,
    nearest_codes,
    round_to_nearest,
    split_groups,
)

_REFITS = 4  # turns of codes from scales, then scales from codes


def weight_importance(
    weight: Float[Tensor, "rows columns"], mean_square: Float[Tensor, " columns"]
) -> Float[Tensor, "rows columns"]:
    """Return each weight's importance: that of its channel, more for large weights.

    As in llama.cpp, the channel's mean square is multiplied by sqrt(mean w^2 of the row + w^2).
    """
    square = weight.float().square()
    return mean_square * (square.mean(-1, keepdim=True) + square).sqrt()


def weighted_error(
    weight: Float[Tensor, "rows columns"],
    matrix: QuantizedMatrix,
    importance: Float[Tensor, "... columns"],
) -> float:
    """Return the sum of importance * (change of the weight)^2 over a matrix."""
    return float(((matrix.dequantize() - weight.float()).square() * importance).sum())


def round_by_importance(
    weight: Float[Tensor, "rows columns"],
    importance: Float[Tensor, "... columns"],
    grid: Grid,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedMatrix:
    """Return the matrix with scales that minimise its weighted error, searched group by group.

    The search of ranges comes first. Then each group's scale is refitted to its codes, by least
    squares, and the codes to the scale, for as long as the group's error falls.
    """
    matrix = round_to_nearest(
        weight, grid, clip_search=True, importance=importance, scale_dtype=scale_dtype
    )
    groups = split_groups(weight, grid)
    weighed = split_groups(importance, grid)
    scales, zeros = matrix.scales, matrix.zeros
    codes = matrix.codes.unflatten(-1, (scales.shape[-1], -1))
    error = _group_error(groups, codes, scales, zeros, weighed)
    for _ in range(_REFITS):
        steps = codes.float() - zeros.unsqueeze(-1)
        below = (weighed * steps.square()).sum(-1)
        above = (weighed * steps * groups).sum(-1)
        usable = (above > 0) & (below > 0)
        fitted = torch.where(usable, above / below.where(usable, 1.0), scales)
        fitted = fitted.to(scale_dtype).float()
        fitted = torch.where(fitted > 0, fitted, scales)
        refitted = nearest_codes(groups, fitted, zeros, grid)
        new_error = _group_error(groups, refitted, fitted, zeros, weighed)
        better = new_error < error
        error = torch.where(better, new_error, error)
        scales = torch.where(better, fitted, scales)
        codes = torch.where(better.unsqueeze(-1), refitted, codes)
    return replace(matrix, codes=codes.flatten(-2), scales=scales)


def _group_error(
    groups: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor
) -> Float[Tensor, "rows groups"]:
    values = (codes.float() - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return ((values - groups).square() * importance).sum(-1)

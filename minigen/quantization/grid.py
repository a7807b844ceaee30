"""Grids of few values for the weights of a matrix, and rounding to the nearest value of a grid.

A grid cuts each row into groups. A group has one scale and one zero point, and each weight has a
code of a few bits: weight = (code - zero) * scale. The range of a group is chosen as in GPTQ's
`Quantizer` (IST-DASLab/gptq, `quant.py`) and in compressed-tensors: the largest magnitude if the
grid is symmetric, else the smallest and the largest weight, and always with 0 inside.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from minigen.checkpoint.quantized.matrix import unpack_bits
from minigen.errors import OptionError, WeightsError

Groups = Float[Tensor, "*rows group_size"]
PerGroup = Float[Tensor, "*rows"]
MIN_BITS, MAX_BITS = 2, 8
SHRINKS = tuple(1 - step / 50 for step in range(40))  # 1.00 down to 0.22, as GPTQ's `mse` option
_PACKED_ROWS = 1024  # bounds the memory that packing needs, which is one byte per bit


@dataclass(frozen=True)
class Grid:
    """How each group of a row is quantized: bits per code, weights per group, and symmetry.

    `group_size` is the field's: -1 makes each row one group. A symmetric grid fixes the zero point
    at 2^(bits - 1). Raises `OptionError` for impossible values.
    """

    bits: int
    group_size: int
    symmetric: bool

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise OptionError(
                f"A grid has {MIN_BITS} to {MAX_BITS} bits per weight, not {self.bits}."
            )
        if self.group_size < 1 and self.group_size != -1:
            raise OptionError(
                f"A group has at least 1 weight, or -1 for a whole row, not {self.group_size}."
            )

    @property
    def max_code(self) -> int:
        """The largest code: 2^bits - 1."""
        return 2**self.bits - 1

    def size_of_group(self, columns: int) -> int:
        """Return the weights per group in rows of `columns`; `OptionError` if they do not fit."""
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise OptionError(
                f"A row of {columns} weights cannot be cut into groups of {size}; "
                f"choose a group size that divides {columns}, or -1 for a whole row."
            )
        return size

    def num_bytes(self, rows: int, columns: int, scale_bytes: int = 2) -> int:
        """Return the stored size of a matrix: packed codes and scales, and zero points if any.

        Zero points have as many bits as codes, as in GPTQ, AWQ and compressed-tensors.
        """
        groups = rows * (columns // self.size_of_group(columns))
        zero_bits = 0 if self.symmetric else self.bits * groups
        return (self.bits * rows * columns + zero_bits + 7) // 8 + groups * scale_bytes


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix on a grid: weight = (code - zero) * scale, with one scale and zero per group.

    `codes` are unsigned, 0 to 2^bits - 1. `zeros` are the codes that mean 0: whole numbers from 0
    to 2^bits - 1, unless `round_to_nearest` was asked for minima that are not on the grid.
    """

    grid: Grid
    codes: UInt8[Tensor, "rows columns"]
    scales: Float[Tensor, "rows groups"]
    zeros: Float[Tensor, "rows groups"]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        """Size of the matrix when it is stored with 2-byte scales, in bytes."""
        return self.grid.num_bytes(*self.shape)

    def dequantize(self) -> Float[Tensor, "rows columns"]:
        """Return the weights that the codes stand for, in float32."""
        groups = self.codes.unflatten(-1, (self.scales.shape[-1], -1))
        zeros, scales = self.zeros.unsqueeze(-1), self.scales.unsqueeze(-1)
        return ((groups.float() - zeros.float()) * scales.float()).flatten(-2)


def round_to_nearest(
    weight: Float[Tensor, "rows columns"],
    grid: Grid,
    *,
    clip_search: bool = False,
    importance: Float[Tensor, "... columns"] | None = None,
    scale_dtype: torch.dtype = torch.float32,
    whole_zeros: bool = True,
) -> QuantizedMatrix:
    """Return the matrix with each weight at the nearest value of its group's grid.

    `clip_search` also tries smaller ranges, which clip a group's largest weights, and keeps the
    range of the smallest squared error. `importance` weighs that error by column, or by weight.
    Scales are rounded to `scale_dtype` before the weights are. Without `whole_zeros`, an asymmetric
    group starts at its minimum exactly, as in Q4_1, and need not contain 0.

    Raises `WeightsError` if a weight is not finite, if `scale_dtype` is too small for the scale of
    a group, or if all scales would be rounded to 0.
    """
    groups = split_groups(weight, grid)
    refuse_vanishing(groups, grid, scale_dtype)
    weighed = None if importance is None else split_groups(importance, grid)
    shrinks = SHRINKS if clip_search else (1.0,)
    scales, zeros = choose_scales(groups, grid, shrinks, weighed, scale_dtype, whole_zeros)
    codes = nearest_codes(groups, scales, zeros, grid)
    return QuantizedMatrix(grid, codes.flatten(-2), scales, zeros)


def split_groups(
    weight: Float[Tensor, "*rows columns"], grid: Grid
) -> Float[Tensor, "*rows groups group_size"]:
    """Return the weights by group, in float32, after a check that all are finite."""
    if not torch.isfinite(weight).all():
        raise WeightsError(
            f"A matrix of shape {tuple(weight.shape)} has a weight that is not finite; "
            "only finite weights can be quantized."
        )
    return weight.float().unflatten(-1, (-1, grid.size_of_group(weight.shape[-1])))


def refuse_vanishing(groups: Groups, grid: Grid, scale_dtype: torch.dtype) -> None:
    """Raise `WeightsError` if the weights are so small that all scales would be rounded to 0.

    Single groups may vanish: a few of almost nothing are in many models.
    """
    low, high = group_range(groups, grid)
    if groups.any() and not _steps(low, high, grid).to(scale_dtype).any():
        raise WeightsError(
            f"The largest weight is {groups.abs().amax():.3g}, and scales of "
            f"{_name_of(scale_dtype)} are too coarse for it: all weights would become 0."
        )


def choose_scales(
    groups: Groups,
    grid: Grid,
    shrinks: tuple[float, ...] = (1.0,),
    importance: Float[Tensor, "... group_size"] | None = None,
    scale_dtype: torch.dtype = torch.float32,
    whole_zeros: bool = True,
) -> tuple[PerGroup, PerGroup]:
    """Return each group's scale and zero point, in float32.

    Each of `shrinks` multiplies the group's range; the one with the smallest error is kept. Raises
    `WeightsError` if a scale is larger than `scale_dtype` holds.
    """
    low, high = group_range(groups, grid, whole_zeros)
    best: tuple[PerGroup, PerGroup] | None = None
    least = groups.new_full(groups.shape[:-1], torch.inf)
    for shrink in shrinks:
        scales, zeros = _scales_of_range(low * shrink, high * shrink, grid, scale_dtype)
        if whole_zeros:
            zeros = zeros.round().clamp(0, grid.max_code)
        if best is None:
            best = scales, zeros
        if len(shrinks) == 1:
            break
        rounded = nearest_values(groups, scales, zeros, grid)
        errors = (rounded - groups).square()
        error = (errors if importance is None else errors * importance).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
    assert best is not None
    return best


def group_range(groups: Groups, grid: Grid, with_zero: bool = True) -> tuple[PerGroup, PerGroup]:
    """Return the smallest and the largest value that each group's grid must reach.

    A symmetric range is -absmax to absmax. An asymmetric one contains 0 if `with_zero`.
    """
    if grid.symmetric:
        most = groups.abs().amax(-1)
        return -most, most
    low, high = groups.amin(-1), groups.amax(-1)
    return (low.clamp(max=0), high.clamp(min=0)) if with_zero else (low, high)


def _scales_of_range(
    low: PerGroup, high: PerGroup, grid: Grid, dtype: torch.dtype
) -> tuple[PerGroup, PerGroup]:
    """Return the scale of a range, and the code (not rounded) that means 0."""
    steps, most = _steps(low, high, grid), torch.finfo(dtype).max
    if not (steps <= most).all():
        raise WeightsError(
            f"A group of weights from {low[steps > most][0]:.3g} to {high[steps > most][0]:.3g} "
            f"needs a larger scale than {_name_of(dtype)} holds, which is {most:.3g} at most."
        )
    scales = steps.to(dtype).float()
    scales = torch.where(scales > 0, scales, 1.0)  # all weights are equal, or the scale underflows
    if grid.symmetric:
        return scales, torch.full_like(scales, 2 ** (grid.bits - 1))
    return scales, -low / scales


def _steps(low: PerGroup, high: PerGroup, grid: Grid) -> PerGroup:
    """Return the scales of ranges before they are rounded; a range may exceed float32."""
    ranges = high - low
    halves = 2 * ((high / 2 - low / 2) / grid.max_code)
    return torch.where(ranges.isinf(), halves, ranges / grid.max_code)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nearest_codes(
    groups: Groups, scales: PerGroup, zeros: PerGroup, grid: Grid
) -> UInt8[Tensor, "*rows group_size"]:
    """Return the code of the grid's value nearest to each weight; ties go to the even code."""
    codes = torch.round(groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1))
    return codes.clamp_(0, grid.max_code).to(torch.uint8)


def nearest_values(groups: Groups, scales: PerGroup, zeros: PerGroup, grid: Grid) -> Groups:
    """Return the value of the grid nearest to each weight."""
    codes = nearest_codes(groups, scales, zeros, grid).float()
    return (codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)


def pack_codes(codes: UInt8[Tensor, "rows columns"], bits: int) -> Int32[Tensor, "rows words"]:
    """Pack each row's codes densely into 32-bit words: code i has the bits i * bits and up.

    The first code has the lowest bits, and a code may cross two words, as 3-bit codes do in GPTQ;
    the last word is filled with zeros. `unpack_codes` is the inverse.
    """
    rows, columns = codes.shape
    num_words = -(-columns * bits // 32)
    packed = torch.zeros(rows, num_words, dtype=torch.int32)
    for start in range(0, rows, _PACKED_ROWS):
        chunk = np.ascontiguousarray(codes[start : start + _PACKED_ROWS].numpy())
        each = np.unpackbits(chunk[..., np.newaxis], axis=-1, count=bits, bitorder="little")
        stream = np.zeros((len(chunk), num_words * 32), np.uint8)
        stream[:, : columns * bits] = each.reshape(len(chunk), -1)
        words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
        packed[start : start + _PACKED_ROWS] = torch.from_numpy(words)
    return packed


def unpack_codes(
    packed: Int32[Tensor, "rows words"], bits: int, columns: int
) -> UInt8[Tensor, "rows columns"]:
    """Return the `columns` codes per row that `pack_codes` packed."""
    return unpack_bits(packed, bits, columns)


def relative_error(
    weight: Float[Tensor, "rows columns"], rounded: Float[Tensor, "rows columns"]
) -> float:
    """Return the root mean square of the difference over that of `weight`; 0 for zero weights."""
    norm = weight.double().norm()
    return float((rounded.double() - weight.double()).norm() / norm) if norm else 0.0

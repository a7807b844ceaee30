"""Codes that are not equally spaced: NF4, sixteen quantiles of a normal distribution, and FP8.

NF4 has the values that Dettmers et al. 2023 (QLoRA, appendix E) print, one absmax per block of 64
weights of a row, and 4-bit codes, as in bitsandbytes. FP8 is e4m3fn, with one scale per row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from minigen.checkpoint.quantized.floats import NF4
from minigen.errors import OptionError, WeightsError

NF4_BLOCK = 64
NF4_VALUES = NF4
_MIDDLES = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2
FP8_MAX = 448.0  # the largest e4m3fn number


@dataclass(frozen=True)
class Nf4Matrix:
    """A matrix of NF4 codes, 0 to 15: weight = NF4_VALUES[code] * absmax of its block."""

    codes: UInt8[Tensor, "rows columns"]
    absmax: Float[Tensor, "rows blocks"]

    @property
    def num_bytes(self) -> int:
        """Size with two codes per byte and float32 absmax, in bytes."""
        return (self.codes.numel() + 1) // 2 + 4 * self.absmax.numel()

    def dequantize(self) -> Float[Tensor, "rows columns"]:
        """Return the weights that the codes stand for, in float32."""
        values = NF4_VALUES[self.codes.int()].unflatten(-1, (self.absmax.shape[-1], -1))
        return (values * self.absmax.unsqueeze(-1)).flatten(-2)


def round_to_nf4(weight: Float[Tensor, "rows columns"], block: int = NF4_BLOCK) -> Nf4Matrix:
    """Return the matrix with each weight at the nearest NF4 value of its block.

    Raises `OptionError` if rows are not whole blocks, `WeightsError` if a weight is not finite.
    """
    _check_finite(weight)
    if weight.shape[-1] % block:
        raise OptionError(
            f"A row of {weight.shape[-1]} weights cannot be cut into NF4 blocks of {block}."
        )
    blocks = weight.float().unflatten(-1, (-1, block))
    absmax = blocks.abs().amax(-1)
    shares = blocks / torch.where(absmax > 0, absmax, 1.0).unsqueeze(-1)
    codes = torch.bucketize(shares, _MIDDLES).to(torch.uint8)
    return Nf4Matrix(codes.flatten(-2), absmax)


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix of e4m3fn numbers with one scale per row: weight = code * scale."""

    codes: Tensor  # float8_e4m3fn [rows, columns]
    scales: Float[Tensor, "rows 1"]

    @property
    def num_bytes(self) -> int:
        """Size with float32 scales, in bytes."""
        return self.codes.numel() + 4 * self.scales.numel()

    def dequantize(self) -> Float[Tensor, "rows columns"]:
        """Return the weights that the codes stand for, in float32."""
        return self.codes.float() * self.scales


def round_to_fp8(weight: Float[Tensor, "rows columns"]) -> Fp8Matrix:
    """Return the matrix in FP8, with each row's absmax at 448.

    Raises `WeightsError` if a weight is not finite.
    """
    _check_finite(weight)
    scales = weight.float().abs().amax(-1, keepdim=True) / FP8_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (weight.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Matrix(codes, scales)


def _check_finite(weight: Tensor) -> None:
    if not torch.isfinite(weight).all():
        raise WeightsError(
            f"A matrix of shape {tuple(weight.shape)} has a weight that is not finite; "
            "only finite weights can be quantized."
        )

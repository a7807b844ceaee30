"""SmoothQuant: move the outliers of activations into the weights, so that both fit 8 bits (W8A8).

Activations are rounded with one scale per token, so one large channel takes all the codes. Dividing
each channel by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) and multiplying the weights by it keeps
the product and shares the difficulty. Source: Xiao et al. 2022; code: mit-han-lab/smoothquant,
`smooth.py`. The integer products are simulated: int8 codes are multiplied in float32, where sums of
up to about 1,000 products of two codes are exact, and longer ones are rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from minigen.errors import OptionError, WeightsError

MAX_CODE = 127


def round_rows_to_int8(
    rows: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, "rows 1"]]:
    """Return int8 codes and one scale per row: row = codes * scale, with absmax at code 127.

    Rows are output channels of a weight, or tokens of an activation. A row of zeros has scale 1.
    Raises `WeightsError` for numbers that are not finite.
    """
    if not torch.isfinite(rows).all():
        raise WeightsError("A matrix with numbers that are not finite cannot be rounded to int8.")
    scales = rows.float().abs().amax(-1, keepdim=True) / MAX_CODE
    scales = torch.where(scales > 0, scales, 1.0)
    return torch.round(rows / scales).clamp_(-MAX_CODE, MAX_CODE).to(torch.int8), scales


def smoothing_factors(
    max_abs: Float[Tensor, " columns"],
    weights: Mapping[str, Float[Tensor, "_rows columns"]],
    alpha: float,
) -> Float[Tensor, " columns"]:
    """Return each channel's factor, from the largest input and the largest weight of the channel.

    `weights` are all matrices that read the input. `alpha` 0 moves the weights' outliers into the
    activations, 1 the opposite; raises `OptionError` for others than 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise OptionError(f"SmoothQuant's alpha is from 0 to 1, not {alpha}.")
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights.values()]).amax(0)
    return (max_abs.clamp(min=1e-5) ** alpha / largest.clamp(min=1e-5) ** (1 - alpha)).clamp(1e-5)


@dataclass(frozen=True)
class Int8Linear:
    """y = x W^T + b with int8 weights, one scale per row, and int8 inputs, one scale per token.

    Inputs are divided by `factors` first. `parts` as in `protocols.Linear`.
    """

    codes: Int8[Tensor, "out_features in_features"]
    scales: Float[Tensor, "out_features 1"]
    factors: Float[Tensor, " in_features"]
    bias: Float[Tensor, " out_features"] | None
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        codes, token_scales = round_rows_to_int8(x / self.factors)
        sums = codes.float() @ self.codes.float().T
        out = sums * token_scales * self.scales.T
        return out if self.bias is None else out + self.bias


def int8_linear(
    weight: Float[Tensor, "out_features in_features"],
    factors: Float[Tensor, " in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
    parts: tuple[int, ...] | None = None,
) -> Int8Linear:
    """Return a linear layer whose weights, multiplied by `factors`, are rounded to int8."""
    codes, scales = round_rows_to_int8(weight.float() * factors)
    return Int8Linear(codes, scales, factors, bias, parts or (len(weight),))

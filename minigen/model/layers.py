"""The small layers of a transformer: linear, RMSNorm, rotary embedding, SwiGLU.

Sources: RMSNorm, Zhang and Sennrich 2019; rotary embedding, Su et al. 2021; SwiGLU, Shazeer 2020.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.checkpoint.model_config import RopeScaling


@dataclass(frozen=True)
class DenseLinear:
    """y = x W^T + b, with W in a floating-point dtype; `parts` as in `protocols.Linear`."""

    weight: Float[Tensor, "out_features in_features"]
    bias: Float[Tensor, " out_features"] | None
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return functional.linear(x, self.weight, self.bias)


def rms_norm(
    x: Float[Tensor, "*rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "*rows hidden"]:
    """Scale each row to a root mean square of 1 (in float32), then multiply it by `weight`."""
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def rotary_frequencies(
    head_dim: int,
    theta: float,
    linear_factor: float = 1.0,
    scaling: RopeScaling | None = None,
) -> Float[Tensor, " half"]:
    """Return the rotation per position of each pair of a head: theta^(-2i/head_dim) radians.

    `linear_factor` divides all frequencies (Chen et al. 2023); `scaling` lowers only the low ones.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents) / linear_factor
    return frequencies if scaling is None else _stretched(frequencies, scaling)


def _stretched(frequencies: Float[Tensor, " half"], scaling: RopeScaling) -> Float[Tensor, " half"]:
    """Scale frequencies by Llama 3's rule.

    Pairs that make many turns within the original context keep their frequency. Pairs that make
    less than about one turn are slowed by `factor`. Those between are interpolated.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - unscaled) * frequencies / scaling.factor + unscaled * frequencies


def rotary_tables(
    frequencies: Float[Tensor, " half"], positions: Int64[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """Return the cosine and the sine of every pair's angle at each token's position."""
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim/2) by its angle: the pairing of Llama in transformers."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def apply_rotary_interleaved(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (2i, 2i + 1) by its angle: the pairing of the paper.

    llama.cpp uses it for Llama models. Weights made for one pairing give wrong results with the
    other, without an error.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(dim=-1)
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def swiglu(
    gate: Float[Tensor, "tokens ffn"], up: Float[Tensor, "tokens ffn"]
) -> Float[Tensor, "tokens ffn"]:
    """Return SiLU(gate) * up: the gate decides how much of each hidden unit of `up` passes."""
    return functional.silu(gate) * up

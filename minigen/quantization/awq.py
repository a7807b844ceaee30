"""AWQ: multiply the input channels that matter by a factor before rounding, and divide after it.

W x = (W s) (x / s) for any factors s, one per input channel. A channel with large inputs gets a
large factor, so its weights are rounded more finely in relation to their size; the other weights of
its groups pay for it. The factors are mean|x|^alpha, and alpha is searched on the calibration
inputs. Source: Lin et al. 2023; code: mit-han-lab/llm-awq, `auto_scale.py`.

The division costs nothing where an earlier layer can do it: see `fold_into_norm` and
`fold_into_rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.quantization.calibration import InputStatistics
from minigen.quantization.grid import Grid, QuantizedMatrix, round_to_nearest

STEPS = 20  # alphas that are tried, from 0 (round to nearest) to just below 1

# The tensor whose output is the input of each matrix, within a layer: it takes the division.
PRECEDING = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}


@dataclass(frozen=True)
class ScaledMatrices:
    """Matrices that share an input, quantized after their columns were multiplied by `factors`.

    `error` is the mean squared error of a token's outputs on the calibration inputs, and
    `nearest_error` that of rounding to nearest; `alpha` and `clipped` are the search's choice.
    """

    factors: Float[Tensor, " columns"]
    matrices: Mapping[str, QuantizedMatrix]
    alpha: float
    clipped: bool
    error: float
    nearest_error: float

    def dequantize(self, name: str) -> Float[Tensor, "rows columns"]:
        """Return a matrix for inputs that nothing divides by the factors."""
        return self.matrices[name].dequantize() / self.factors


def awq(
    weights: Mapping[str, Float[Tensor, "_rows columns"]],
    statistics: InputStatistics,
    grid: Grid,
    *,
    magnitudes: Float[Tensor, " columns"] | None = None,
    steps: int = STEPS,
    clip_search: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> ScaledMatrices:
    """Return matrices that share an input on the grid, with the factors of the smallest error.

    `magnitudes` are each channel's mean |x| unless given, for example by `shared_by_heads`. With
    `clip_search` each alpha is tried with and without a search of smaller ranges. Alpha 0 without
    that search is rounding to nearest, so the error on the calibration inputs is never larger.
    """
    magnitudes = statistics.mean_abs if magnitudes is None else magnitudes
    best, nearest_error = None, 0.0
    for alpha in (step / steps for step in range(steps)):
        factors = channel_factors(magnitudes, alpha)
        for clipped in (False, True) if clip_search else (False,):
            matrices = {
                name: round_to_nearest(
                    weight.float() * factors,
                    grid,
                    clip_search=clipped,
                    importance=statistics.mean_square / factors.square(),
                    scale_dtype=scale_dtype,
                )
                for name, weight in weights.items()
            }
            error = sum(
                statistics.output_error(matrix.dequantize() / factors - weights[name])
                for name, matrix in matrices.items()
            )
            if best is None:
                nearest_error = error
            if best is None or error < best.error:
                best = ScaledMatrices(factors, matrices, alpha, clipped, error, nearest_error)
    assert best is not None
    return best


def channel_factors(
    magnitudes: Float[Tensor, " columns"], alpha: float
) -> Float[Tensor, " columns"]:
    """Return magnitudes^alpha, so scaled that the largest factor times the smallest one is 1."""
    factors = magnitudes.float().clamp(min=1e-4).pow(alpha).clamp(min=1e-4)
    return factors / (factors.max() * factors.min()).sqrt()


def shared_by_heads(
    channels: Float[Tensor, " channels"], q_heads: int, kv_heads: int
) -> Float[Tensor, " channels"]:
    """Return the mean over the query heads that read the same value head, for `o_proj`'s input.

    With grouped-query attention, one row of V feeds a channel of several query heads. Factors can
    be folded into V's rows only if they are equal in all of these.
    """
    by_head = channels.unflatten(0, (kv_heads, q_heads // kv_heads, -1))
    return by_head.mean(1, keepdim=True).expand_as(by_head).flatten()


def rows_of_values(
    factors: Float[Tensor, " channels"], q_heads: int, kv_heads: int
) -> Float[Tensor, " value_rows"]:
    """Return the factors of V's rows, from factors of `o_proj`'s input that heads share."""
    return factors.unflatten(0, (kv_heads, q_heads // kv_heads, -1))[:, 0].flatten()


def fold_into_norm(
    norm: Float[Tensor, " columns"], factors: Float[Tensor, " columns"]
) -> Float[Tensor, " columns"]:
    """Return a norm's weights that divide its outputs by `factors`."""
    return norm / factors


def fold_into_rows(matrix: QuantizedMatrix, factors: Float[Tensor, " rows"]) -> QuantizedMatrix:
    """Return a quantized matrix that divides its outputs by `factors`: only its scales change.

    A factor that a whole row shares does not move any code, so the matrix may be quantized before
    the factors are known. A bias must be divided, too.
    """
    return replace(matrix, scales=matrix.scales / factors.unsqueeze(-1))

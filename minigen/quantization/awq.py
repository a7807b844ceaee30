"""AWQ: multiply the input channels that matter by a factor before rounding, and divide after it.

W x = (W s) (x / s) for any factors s, one per input channel. A channel with large inputs gets a
large factor, so its weights are rounded more finely in relation to their size; the other weights of
its groups pay for it. The factors are mean|x|^alpha, and alpha is searched on the calibration
inputs. Source: Lin et al. 2023; code: mit-han-lab/llm-awq, `auto_scale.py`.

The division costs nothing, because the tensor before each matrix can do it: `fold_layer`.
"""

from collections.abc import Mapping, Sequence
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
    `clip_search`, the best alpha is also tried with smaller ranges of the groups, as in AWQ's code.
    Alpha 0 is rounding to nearest, so the error on the calibration inputs is never larger than its.
    """
    magnitudes = statistics.mean_abs if magnitudes is None else magnitudes

    def attempt(alpha: float, clipped: bool) -> ScaledMatrices:
        factors = channel_factors(magnitudes, alpha)
        importance = statistics.mean_square / factors.square()
        matrices = {
            name: round_to_nearest(
                weight.float() * factors,
                grid,
                clip_search=clipped,
                importance=importance,
                scale_dtype=scale_dtype,
            )
            for name, weight in weights.items()
        }
        error = sum(
            statistics.output_error(matrix.dequantize() / factors - weights[name])
            for name, matrix in matrices.items()
        )
        return ScaledMatrices(factors, matrices, alpha, clipped, error, error)

    nearest = best = attempt(0.0, False)
    for step in range(1, steps):
        best = min(best, attempt(step / steps, False), key=lambda each: each.error)
    if clip_search:
        best = min(best, attempt(best.alpha, True), key=lambda each: each.error)
    return replace(best, nearest_error=nearest.error)


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


@dataclass(frozen=True)
class FoldedLayer:
    """A layer's quantized matrices, and the norms and biases that go with them, by name."""

    matrices: Mapping[str, QuantizedMatrix]
    vectors: Mapping[str, Float[Tensor, " size"]]


def fold_layer(
    found: Sequence[ScaledMatrices],
    vectors: Mapping[str, Float[Tensor, " _size"]],
    q_heads: int,
    kv_heads: int,
) -> FoldedLayer:
    """Return one layer with the divisions by all factors folded into the tensors before them.

    `found` are the layer's matrices by their whole names, `vectors` its norms and biases. The
    factors of `o_proj` must come from `shared_by_heads`.
    """
    matrices = {name: matrix for each in found for name, matrix in each.matrices.items()}
    folded = dict(vectors)
    for each in found:
        *prefix, block, module, _ = next(iter(each.matrices)).split(".")
        preceding = ".".join([*prefix, PRECEDING[f"{block}.{module}"]])
        weight, bias = f"{preceding}.weight", f"{preceding}.bias"
        factors = each.factors
        if module == "o_proj":
            factors = rows_of_values(factors, q_heads, kv_heads)
        if weight in folded:
            folded[weight] = folded[weight] / factors
        else:
            matrices[weight] = fold_into_rows(matrices[weight], factors)
        if bias in folded:
            folded[bias] = folded[bias] / factors
    return FoldedLayer(matrices, folded)


def fold_into_rows(matrix: QuantizedMatrix, factors: Float[Tensor, " rows"]) -> QuantizedMatrix:
    """Return a quantized matrix that divides its outputs by `factors`: only its scales change.

    A factor that a whole row shares does not move any code, so the matrix may be quantized before
    the factors are known. A bias must be divided, too.
    """
    return replace(matrix, scales=matrix.scales / factors.unsqueeze(-1))

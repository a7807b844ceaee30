"""Linear layers by oneDNN, for a few rows at a time, where torch's own product is slow.

bfloat16: torch's product (also oneDNN's) takes row-major weights and packs them into blocks at
every call. Here they are packed once, when the model is loaded, so a step of a few rows reads each
weight only once. The results are the same.

float32: torch's product is MKL's, which on AMD's processors reads the weights of a few rows far
slower than memory gives them. oneDNN's reads them as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.hardware import cpu_name
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, dense_linear
from minigen.protocols import Linear

Finish = Callable[[DenseLinear], Linear]

EXPECTED_ROWS = 8  # batch size that the layout is optimised for; other sizes work as well


@dataclass(frozen=True)
class PackedLinear:
    """y = x W^T + b, as `DenseLinear`; `packed` is an opaque tensor that only oneDNN can read."""

    packed: Tensor
    bias: Float[Tensor, " out_features"] | None
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return _product(x, self.packed, self)


@dataclass(frozen=True)
class PlainLinear(DenseLinear):
    """y = x W^T + b on the weights as they are, by oneDNN."""

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return _product(x, self.weight, self)


def _product(
    x: Float[Tensor, "tokens in_features"], weight: Tensor, linear: PackedLinear | PlainLinear
) -> Float[Tensor, "tokens out_features"]:
    if len(x) == 0:
        return x.new_empty(0, sum(linear.parts))
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, linear.bias, "none", [], "")
    return made


def is_faster(dtype: torch.dtype) -> bool:
    """Return whether plain weights of this type are multiplied faster by oneDNN than by torch."""
    return (
        dtype == torch.float32
        and cpu_name().startswith("AMD")
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch on this machine can multiply with packed weights of this type.

    oneDNN does not support bfloat16 on a processor that has only AVX2, and raises there.
    """
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(linear: DenseLinear) -> Linear:
    """Return the same linear layer with packed weights."""
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, EXPECTED_ROWS)
    return PackedLinear(packed, linear.bias, linear.parts)


def plain(linear: DenseLinear) -> Linear:
    """Return the same linear layer, multiplied by oneDNN on the same weights."""
    return PlainLinear(linear.weight, linear.bias, linear.parts)


def best_for(dtype: torch.dtype) -> tuple[str, Finish]:
    """Return how torch multiplies weights of this type best here, in words and as a conversion."""
    if can_pack(dtype):
        return "torch, weights packed for oneDNN", pack
    if is_faster(dtype):
        return "torch, by oneDNN", plain
    return "torch", lambda linear: linear


def finished_linear(dtype: torch.dtype, finish: Finish) -> MakeLinear:
    """Return a factory of linear layers: dequantized into `dtype`, then converted by `finish`."""
    make_dense = dense_linear(dtype)

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        return finish(make_dense(weights, biases))

    return make

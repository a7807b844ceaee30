"""Linear layers whose weights are packed once into the memory layout that oneDNN multiplies with.

torch's bfloat16 matrix product (oneDNN) takes row-major weights and packs them into blocks at every
call. Here they are packed once, when the model is loaded, so a step of a few rows reads each weight
only once. The results are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, dense_linear
from minigen.protocols import Linear

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
        if len(x) == 0:
            return x.new_empty(0, sum(self.parts))
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return made


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


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """Return a factory of linear layers: weights are dequantized into `dtype` and packed once."""
    make_dense = dense_linear(dtype)

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        return pack(make_dense(weights, biases))

    return make

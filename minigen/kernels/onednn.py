"""Linear layers whose weights lie in memory as this processor's matrix product wants them.

torch's bfloat16 product (oneDNN) takes weights by rows, and puts them into blocks of its own at
every call; done once, when the model is loaded, a step of a few rows reads each weight only once.
The products are the same.
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

EXPECTED_ROWS = 8  # what the blocks are laid out for; other numbers of rows may be used as well


@dataclass(frozen=True)
class PackedLinear:
    """y = x W^T + b, as `DenseLinear`; `packed` is opaque, and only oneDNN can read it."""

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
    """Whether torch, here, has the product for packed weights of this type.

    oneDNN takes no bfloat16 on a processor with AVX2 only, and raises if it is asked to.
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
    """The same linear layer, its weights in blocks."""
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, EXPECTED_ROWS)
    return PackedLinear(packed, linear.bias, linear.parts)


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """Linear layers whose weights are dequantized into `dtype` and packed, once."""
    make_dense = dense_linear(dtype)

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        return pack(make_dense(weights, biases))

    return make

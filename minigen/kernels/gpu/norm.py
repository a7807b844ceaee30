"""RMSNorm, alone or with the residual sum before it, in one pass.

Source: Zhang and Sennrich 2019; the fusion is that of Triton's layer-norm tutorial.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.layers import rms_norm


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normalised_ptr,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: reads it once, and keeps it in registers for both passes over it.

    Of `hidden` numbers of 2 bytes it reads x and writes the result, 4 bytes a number; with a
    residual it reads that too and writes the sum, 8 bytes. 4 FLOPs a number: bandwidth decides.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    offsets = row * num_columns + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offsets, x, mask=inside)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_columns + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = (wide * factor).to(normalised_ptr.dtype.element_ty).to(tl.float32)
    normalised = (scaled * weight).to(normalised_ptr.dtype.element_ty)
    tl.store(normalised_ptr + offsets, normalised, mask=inside)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """`minigen.model.layers.rms_norm` of contiguous rows, of `x + residual` where that is given.

    The sum is written over `residual`, for the next layer to add to.
    """
    hidden = x.shape[-1]
    normalised = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(x.numel() // hidden,)](
        x,
        x if residual is None else residual,
        weight,
        normalised,
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return normalised


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The twin of `rms_norm_triton`: the sum and the norm as torch does them, one by one."""
    if residual is None:
        return rms_norm(x, weight, eps)
    residual += x
    return rms_norm(residual, weight, eps)

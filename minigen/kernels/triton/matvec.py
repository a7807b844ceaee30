"""A linear layer for one token: the product of a weight matrix and a vector (GEMV), fused.

No weight is used twice, so tensor cores cannot help, and the memory must be kept busy instead. The
norm before a product, and the gate or the sum after it, cost next to nothing in its kernel, and a
microsecond or two in their own. Source: Williams et al. 2009, the roofline model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.layers import DenseLinear, rms_norm, swiglu

BLOCK_ROWS, BLOCK_COLUMNS = 8, 512


@triton.jit
def matvec_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_results,
    num_columns,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program per `BLOCK_ROWS` rows of the weight; x is in the L2 cache, and all read it.

    It reads 2 bytes per weight and computes 2 FLOPs with it, so it is memory-bound. RMSNorm is a
    factor of all products, and its sum is taken in the same loop.
    """
    BLOCK_RESULTS: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    first, members = tl.program_id(0) * BLOCK_RESULTS, tl.arange(0, BLOCK_ROWS)
    if GATED:  # a row of the gate, then the same row of up
        inside = first + members // 2 < num_results
        rows = first + members // 2 + members % 2 * num_results
    else:
        inside = first + members < num_results
        rows = first + members
    row_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * num_columns
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for start in tl.range(0, num_columns, BLOCK_COLUMNS, num_stages=3):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        exists = columns < num_columns
        there = inside[:, None] & exists[None, :]
        weights = tl.load(row_ptrs + columns[None, :], mask=there, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        total += weights * x[None, :]
    out = tl.sum(total, axis=1)
    if HAS_NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=0) / num_columns + eps)
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(out, (BLOCK_RESULTS, 2)))
        out = gate * tl.sigmoid(gate) * up
    results = first + tl.arange(0, BLOCK_RESULTS)
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + results, mask=results < num_results, other=0.0).to(tl.float32)
    tl.store(out_ptr + results, out.to(out_ptr.dtype.element_ty), mask=results < num_results)


def matvec_triton(
    x: Tensor,
    linear: DenseLinear,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return `linear` of the one row of `x`, in one pass over its weights.

    `norm`, the weight and epsilon of an RMSNorm, is applied before it. If `gated`, its parts are
    gate and up, and SiLU(gate) x up comes after it. `residual` is added last.
    """
    weight, bias = linear.weight, linear.bias
    num_results = len(weight) // 2 if gated else len(weight)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    out = torch.empty(1, num_results, dtype=x.dtype, device=x.device)
    matvec_kernel[(triton.cdiv(len(weight), BLOCK_ROWS),)](
        x,
        norm_weight,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        num_results,
        weight.shape[1],
        eps,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
    )
    return out


def matvec_torch(
    x: Tensor,
    linear: DenseLinear,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `matvec_triton` in plain PyTorch, one step after the other."""
    out = linear(x if norm is None else rms_norm(x, *norm))
    if gated:
        out = swiglu(*out.chunk(2, dim=-1))
    return out if residual is None else residual + out

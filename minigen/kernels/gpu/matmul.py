"""A product of two matrices, tile by tile: each number is read once for a whole tile's use.

Source: Triton's matrix-multiplication tutorial, with its order of tiles that keeps both in L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
TILES_A_GROUP = 8


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_A_GROUP: tl.constexpr,
):
    """One program a tile of c = a b^T, b being N x K as a linear layer's weight is.

    2 M N K FLOPs; reads M K N / BLOCK_N + N K M / BLOCK_M numbers, of which L2 holds most, where a
    program a number would read 2 M N K.
    """
    program, num_m, num_n = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = program // (TILES_A_GROUP * num_n) * TILES_A_GROUP
    group = tl.minimum(num_m - first_m, TILES_A_GROUP)
    within = program % (TILES_A_GROUP * num_n)
    rows = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + rows.to(tl.int64)[:, None] * K
    b_rows = b_ptr + columns.to(tl.int64)[None, :] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + depth
        a_inside = (rows < M)[:, None] & (k < K)[None, :]
        b_inside = (k < K)[:, None] & (columns < N)[None, :]
        a = tl.load(a_rows + k[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_rows + k[:, None], mask=b_inside, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    c_inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=c_inside)


def matmul_triton(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of contiguous a (M x K) and b (N x K), summed in float32."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)
    matmul_kernel[grid](
        a,
        b,
        c,
        m,
        n,
        k,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        TILES_A_GROUP=TILES_A_GROUP,
        num_warps=8,
        num_stages=3 if a.dtype.itemsize == 2 else 2,
    )
    return c


def matmul_torch(a: Tensor, b: Tensor) -> Tensor:
    """The twin of `matmul_triton`."""
    return a @ b.T

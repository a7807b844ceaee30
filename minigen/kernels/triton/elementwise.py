"""Fused elementwise kernels: RMSNorm with residual, SiLU(gate) x up, rotation into the KV cache.

Sources: RMSNorm, Zhang and Sennrich 2019; its fusion, Triton's layer-norm tutorial; SwiGLU, Shazeer
2020; rotary embedding, Su et al. 2021. The pool's layout is `minigen.kv_cache.paged.POOL_AXES`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.layers import apply_rotary, rms_norm, swiglu


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: load the row once and keep it in registers for both passes.

    With 2 bytes per number it reads x and writes the result: 4 bytes per number. With a residual it
    also reads that and writes the sum: 8 bytes per number. At 4 FLOPs per number the kernel is
    memory-bound.
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
    scaled = (wide * factor).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (scaled * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=inside)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Apply `minigen.model.layers.rms_norm` to contiguous rows of `x`, or of `x + residual`.

    The sum overwrites `residual`, which is the residual stream for the next layer.
    """
    hidden = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(x.numel() // hidden,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return out


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute `rms_norm_triton` in plain PyTorch: first the sum, then the norm."""
    if residual is None:
        return rms_norm(x, weight, eps)
    residual += x
    return rms_norm(residual, weight, eps)


BLOCK = 1024


@triton.jit
def silu_multiply_kernel(gate_up_ptr, out_ptr, num_columns, BLOCK: tl.constexpr):
    """One program per `BLOCK` columns of a row; gate and up are the two halves of a row.

    It reads 4 bytes and writes 2 per number of the result, while torch's two operators read 6 and
    write 4. At about 5 FLOPs per number the kernel is memory-bound.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gate_ptrs = gate_up_ptr + row * 2 * num_columns + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + num_columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + columns, out, mask=inside)


def silu_multiply_triton(gate_up: Tensor) -> Tensor:
    """Apply `swiglu` to the two halves of each contiguous row: tokens x 2 ffn to tokens x ffn."""
    num_tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(ffn, BLOCK))
    silu_multiply_kernel[grid](gate_up, out, ffn, BLOCK=BLOCK)
    return out


def silu_multiply_torch(gate_up: Tensor) -> Tensor:
    """Compute `silu_multiply_triton` in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu(gate, up)


@triton.jit
def rotary_store_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    block_stride,
    slot_stride,
    head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per head of a token: queries go to `q_ptr`, keys and values into the pool.

    It reads 2 bytes and writes 2 per number of the product. It also reads the token's cosines and
    sines, 4 x head_dim bytes, which the token's other heads find in the GPU's cache. As separate
    operators, rotating q and k, concatenating and storing move several times as many bytes. About 3
    FLOPs per number.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    inside = pairs < HALF
    from_ptrs = qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * 2 * HALF + pairs
    first = tl.load(from_ptrs, mask=inside, other=0.0)
    second = tl.load(from_ptrs + HALF, mask=inside, other=0.0)
    if head < Q_HEADS + KV_HEADS:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            norm_ptrs = (q_norm_ptr if head < Q_HEADS else k_norm_ptr) + pairs
            mean_square = tl.sum(x * x + y * y, axis=0) / (2 * HALF)
            factor = tl.rsqrt(mean_square + eps)
            x = (x * factor).to(first.dtype).to(tl.float32)
            y = (y * factor).to(first.dtype).to(tl.float32)
            x *= tl.load(norm_ptrs, mask=inside, other=0.0).to(tl.float32)
            y *= tl.load(norm_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(first.dtype).to(tl.float32), y.to(first.dtype).to(tl.float32)
        position = tl.load(positions_ptr + token)
        cos = tl.load(cos_ptr + position * HALF + pairs, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + pairs, mask=inside, other=0.0)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    if head < Q_HEADS:
        to_ptrs = q_ptr + (token * Q_HEADS + head) * 2 * HALF + pairs
        tl.store(to_ptrs, first, mask=inside)
        tl.store(to_ptrs + HALF, second, mask=inside)
    else:
        kv_head = head - Q_HEADS
        slot = tl.load(slots_ptr + token)
        at = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + pairs
        if kv_head < KV_HEADS:
            key_ptrs = keys_ptr + at + kv_head * head_stride
            tl.store(key_ptrs, first, mask=inside)
            tl.store(key_ptrs + HALF, second, mask=inside)
        else:
            value_ptrs = values_ptr + at + (kv_head - KV_HEADS) * head_stride
            tl.store(value_ptrs, first, mask=inside)
            tl.store(value_ptrs + HALF, second, mask=inside)


def rotary_store_triton(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Return rotated queries, tokens x q_heads x head_dim; store keys and values in their slots.

    `qkv` is tokens x (q_heads + 2 kv_heads) head_dim, contiguous. `norms` are the weights of the
    head norms of queries and keys. `tables` hold the cosines and sines of every position, float32.
    `keys` and `values` are a layer's halves of the pool, blocks x block_size x kv_heads x head_dim.
    """
    _, block_size, kv_heads, head_dim = keys.shape
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(len(qkv), q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    rotary_store_kernel[(len(qkv), q_heads + 2 * kv_heads)](
        qkv,
        q_norm,
        k_norm,
        *tables,
        positions,
        slots,
        q,
        keys,
        values,
        *keys.stride()[:3],
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        HAS_NORM=norms is not None,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return q


def rotary_store_torch(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Compute `rotary_store_triton` in plain PyTorch, one operator at a time."""
    _, block_size, kv_heads, head_dim = keys.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = (table[positions] for table in tables)
    keys[slots // block_size, slots % block_size] = apply_rotary(k, cos, sin)
    values[slots // block_size, slots % block_size] = v
    return apply_rotary(q, cos, sin)

"""From the fused product to attention: head norms, rotation, and K and V into their slots.

Sources: rotary embedding, Su et al. 2021; the pool's layout is `minigen.cache.paged.POOL_AXES`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.layers import apply_rotary, rms_norm


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
    """One program a head of a token: queries go to `q_ptr`, keys and values into the pool.

    Reads 2 bytes and writes 2 for each number of the product, and reads the token's cosines and
    sines, 4 x head_dim bytes, which its other heads find in the cache. Apart, rotation of q and k,
    joining and storing move three times as much. About 3 FLOPs a number.
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
    """Rotated queries, tokens x q_heads x head_dim; keys and values are in their slots then.

    `qkv` is tokens x (q_heads + 2 kv_heads) head_dim, contiguous; `norms` are the weights of the
    head norms of queries and keys; `tables` hold cosines and sines of every position, float32;
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
    """The twin of `rotary_store_triton`, an operator at a time."""
    _, block_size, kv_heads, head_dim = keys.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = (table[positions] for table in tables)
    keys[slots // block_size, slots % block_size] = apply_rotary(k, cos, sin)
    values[slots // block_size, slots % block_size] = v
    return apply_rotary(q, cos, sin)

"""Decode attention: one new token per sequence over its blocks, with the context split if needed.

Sources: PagedAttention, Kwon et al. 2023; the split over the context and its second pass are
Flash-Decoding's, Dao et al. 2023; the running maximum is online softmax, Milakov and Gimelshein
2018.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.attention import attention_naive

EVERYTHING = 2**30  # the window of a layer that has none
MOST_SPLITS = 64


@triton.jit(do_not_specialize=["table_stride"])
def paged_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head, sequence and split; the query heads of a group share its loads.

    It reads every key and value of the context once: 4 x head_dim bytes per token and KV head with
    2 bytes per number, and a block table entry of 8 bytes per block. It computes 4 x GROUP x
    head_dim FLOPs per token. The arithmetic intensity is GROUP FLOPs per byte, far below any GPU's
    ridge point, so the kernel is memory-bound. `scale` is log2(e) / sqrt(head_dim).
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    wanted = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (sequence * KV_HEADS * GROUP + heads).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = tl.maximum(length - window, 0)
    first_tile = first // BLOCK_N
    tiles_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N) - first_tile, SPLITS)
    begin = (first_tile + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, length)

    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        seen = (positions < end) & (positions >= first)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at = blocks * block_stride + (positions % BLOCK_SIZE) * slot_stride + kv_head * head_stride
        offsets = at[:, None] + dims[None, :]
        there = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
        values = tl.load(values_ptr + offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        maximum = higher

    if SPLITS == 1:
        out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, (acc / total[:, None]).to(q.dtype), mask=wanted)
    else:
        parts = rows * SPLITS + split
        tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)
        tl.store(maxima_ptr + parts, maximum, mask=members < GROUP)
        tl.store(sums_ptr + parts, total, mask=members < GROUP)


@triton.jit
def join_splits_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per query head: rescale all splits to one maximum and add them up.

    It reads 4 x SPLITS x (head_dim + 2) bytes, few compared with a long context's keys and values.
    """
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    there = splits < SPLITS
    maxima = tl.load(maxima_ptr + row * SPLITS + splits, mask=there, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPLITS + splits, mask=there, other=0.0)
    shrink = tl.exp2(maxima - tl.max(maxima, axis=0))
    parts_ptrs = parts_ptr + (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(parts_ptrs, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(parts * shrink[:, None], axis=0) / tl.sum(sums * shrink, axis=0)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


def num_splits(num_programs: int, longest: int, num_processors: int) -> int:
    """Return the number of splits for contexts of at most `longest` tokens, a power of two.

    It gives about four programs per multiprocessor, and at least 128 tokens per split of the
    longest context; shorter ones leave splits empty.

    >>> num_splits(num_programs=512, longest=4096, num_processors=132)
    1
    >>> num_splits(num_programs=8, longest=4096, num_processors=132)
    32
    """
    wanted = max(4 * num_processors // max(num_programs, 1), 1)
    most = max(min(wanted, longest // 128, MOST_SPLITS), 1)
    return 1 << (most.bit_length() - 1)


def paged_decode_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None = None,
    splits: int = 1,
) -> Tensor:
    """Return attention of each query `q` over its sequence's context.

    `q` is sequences x q_heads x head_dim, contiguous. `keys` and `values` are a layer's halves of
    the pool, blocks x block_size x kv_heads x head_dim. Row i of `tables` lists the blocks of
    sequence i, whose first `lengths[i]` slots (at least one) hold its context.
    """
    num_sequences, q_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    num_parts = num_sequences * q_heads * splits if splits > 1 else 0
    parts, maxima, sums = (
        torch.empty(num_parts * width, dtype=torch.float32, device=q.device)
        for width in (head_dim, 1, 1)
    )
    group, block_d = q_heads // kv_heads, max(triton.next_power_of_2(head_dim), 16)
    narrow = keys.dtype.itemsize > 2 or block_d > 128
    paged_decode_kernel[(kv_heads, num_sequences, splits)](
        q,
        keys,
        values,
        tables,
        lengths,
        out,
        parts,
        maxima,
        sums,
        *keys.stride()[:3],
        tables.stride(0),
        EVERYTHING if window is None else window,
        math.log2(math.e) / math.sqrt(head_dim),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        BLOCK_G=max(triton.next_power_of_2(group), 16),
        BLOCK_D=block_d,
        BLOCK_N=32 if narrow else 64,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        join_splits_kernel[(num_sequences * q_heads,)](
            parts,
            maxima,
            sums,
            out,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out


def paged_decode_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """Compute `paged_decode_triton` in plain PyTorch: gather each context, then attend to it."""
    outputs = []
    for query, table, length in zip(q, tables, lengths.tolist(), strict=True):
        k, v = (half[table].flatten(0, 1)[:length] for half in (keys, values))
        k, v = (each[max(length - window, 0) :] for each in (k, v)) if window else (k, v)
        with q.device:
            outputs.append(attention_naive(query.unsqueeze(0), k, v))
    return torch.cat(outputs)

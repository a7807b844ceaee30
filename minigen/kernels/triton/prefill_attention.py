"""Prefill attention: many new tokens per sequence, tile by tile, without a score matrix in memory.

Sources: FlashAttention, Dao et al. 2022, and FlashAttention-2, Dao 2023; Triton's fused-attention
tutorial for the two loops, one before the diagonal and one on it.
"""

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigen.model.attention import attention_naive


def has_wide_products() -> bool:
    """Return whether tiles of 64 queries by 64 keys are fast on this GPU.

    The tensor cores of Hopper's and Blackwell's large chips read their operands from shared memory,
    which leaves the registers to two programs of this size at a time. Other chips read them from
    registers, and are given tiles of 128 queries by 32 keys.
    """
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability()[0] in (9, 10)


WIDE_TILES = has_wide_products()
MOST_AT_ONCE = 16  # heads


@triton.jit
def _fold_tiles(
    q,
    maximum,
    total,
    acc,
    begin,
    end,
    query_positions,
    keys_ptr,
    values_ptr,
    table_ptr,
    block_stride,
    slot_stride,
    window,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Run online softmax over keys `begin` to `end`; `MASKED` if a query does not see all."""
    dims, within = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    # The table is read one tile ahead: the loads of keys and values must not wait for it.
    positions = begin + within
    next_blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)
    for start in range(begin, end, BLOCK_N):
        blocks, positions, ahead = next_blocks, start + within, start + BLOCK_N + within
        next_blocks = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        at = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
        offsets = at[:, None] + dims[None, :]
        there = (dims < HEAD_DIM)[None, :]
        if MASKED:
            there = there & (positions < end)[:, None]
        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
        values = tl.load(values_ptr + offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            seen = (positions[None, :] <= query_positions[:, None]) & (positions < end)[None, :]
            if WINDOWED:
                seen = seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
        if WINDOWED:  # a query may not have seen any key yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        weights = tl.exp2(scores * scale - base[:, None])  # one fused multiply-add
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        maximum = higher
    return maximum, total, acc


# A batch's prefills start at any row of its tables and lengths: do not recompile for alignment.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr"],
)
def flash_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    window,
    scale,
    Q_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per `BLOCK_M` queries of a head; its scores never leave the chip.

    Programs start in the order of their numbers. So the last tiles, which have the most keys, are
    numbered first, and short ones fill the gaps at the end. `AT_ONCE` heads take turns, because
    the keys and values of all heads may not fit into the L2 cache together.
    It computes 4 x head_dim FLOPs per pair of a query and a key that the query sees. It reads its
    queries and writes their result once, and reads all keys and values up to its last query, 4 x
    head_dim bytes per token. The scores, 2 to 4 bytes per pair, are not written to memory. At
    BLOCK_M FLOPs per byte, or more with hits in L2, the kernel is compute-bound. `scale` is
    log2(e) / sqrt(head_dim).
    """
    num_turns = Q_HEADS // AT_ONCE
    head = tl.program_id(2) % num_turns * AT_ONCE + tl.program_id(0)
    tile, sequence = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2) // num_turns
    start = tl.load(starts_ptr + sequence)
    num_new = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    if tile * BLOCK_M < num_new:
        length = tl.load(lengths_ptr + sequence).to(tl.int32)
        rows, dims = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        wanted = (rows < num_new)[:, None] & (dims < HEAD_DIM)[None, :]
        row_offsets = ((start + rows) * Q_HEADS + head).to(tl.int64) * HEAD_DIM
        q = tl.load(q_ptr + row_offsets[:, None] + dims[None, :], mask=wanted, other=0.0)
        query_positions = length - num_new + rows
        first = length - num_new + tile * BLOCK_M

        begin = 0
        if WINDOWED:
            begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, begin)  # before: no mask
        end = tl.minimum(first + BLOCK_M, length)
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
        keys_ptr += head // GROUP * head_stride
        values_ptr += head // GROUP * head_stride
        maximum, total, acc = _fold_tiles(
            q,
            maximum,
            total,
            acc,
            begin,
            diagonal,
            query_positions,
            keys_ptr,
            values_ptr,
            table_ptr,
            block_stride,
            slot_stride,
            window,
            scale,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
            WINDOWED,
            WINDOWED,
        )
        maximum, total, acc = _fold_tiles(
            q,
            maximum,
            total,
            acc,
            diagonal,
            end,
            query_positions,
            keys_ptr,
            values_ptr,
            table_ptr,
            block_stride,
            slot_stride,
            window,
            scale,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
            True,
            WINDOWED,
        )
        total = tl.where(total > 0, total, 1.0)  # rows past the last query saw no key
        acc = (acc / total[:, None]).to(q.dtype)
        tl.store(out_ptr + row_offsets[:, None] + dims[None, :], acc, mask=wanted)


def flash_prefill_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most_new: int,
    window: int | None = None,
    wide_tiles: bool = WIDE_TILES,
) -> Tensor:
    """Return attention of packed queries `q`, each over the context of its sequence.

    `q` is tokens x q_heads x head_dim, contiguous. The queries of sequence i are rows `starts[i]`
    to `starts[i + 1]`, at most `most_new` of them, and the last of its `lengths[i]` positions.
    Their own keys and values are in the pool already. The other arguments are as in
    `paged_decode_triton`. Rows before `starts[0]` are not written. `wide_tiles` are 64 queries by
    64 keys, for GPUs where these are fast (`has_wide_products`).
    """
    q_heads, head_dim = q.shape[1:]
    _, block_size, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    narrow = keys.dtype.itemsize > 2 or block_d > 128
    wide = wide_tiles and not narrow
    block_m = 128 if most_new > 64 and not narrow and not wide else 64
    at_once = max(each for each in range(1, MOST_AT_ONCE + 1) if q_heads % each == 0)
    num_tiles, num_turns = triton.cdiv(most_new, block_m), q_heads // at_once
    flash_prefill_kernel[(at_once, num_tiles, num_turns * len(lengths))](
        q,
        keys,
        values,
        tables,
        starts,
        lengths,
        out,
        *keys.stride()[:3],
        tables.stride(0),
        0 if window is None else window,
        math.log2(math.e) / math.sqrt(head_dim),
        Q_HEADS=q_heads,
        AT_ONCE=at_once,
        GROUP=q_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=64 if wide else 32,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if wide else 2,
    )
    return out


def flash_prefill_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """Compute `flash_prefill_triton` in plain PyTorch: gather each context, then attend to it."""
    outputs = []
    bounds = pairwise(starts.tolist())
    for (begin, end), table, length in zip(bounds, tables, lengths.tolist(), strict=True):
        k, v = (half[table].flatten(0, 1)[:length] for half in (keys, values))
        with q.device:
            outputs.append(attention_naive(q[begin:end], k, v, window))
    return torch.cat(outputs)

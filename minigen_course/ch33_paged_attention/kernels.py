"""Chapter 33's kernels in their simplest form, as its exercises ask for them, and their launchers.

They are functions without `@triton.jit`, which the launch adds. The engine's kernels, with windows
and for every GPU, are in `minigen.kernels.triton.decode_attention`.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from minigen.engine.model_runner import AttentionBackend
from minigen.kv_cache.paged import Batch, KVPool
from minigen.model.attention import attention
from minigen.protocols import Attend
from minigen_course.lab.triton_interpreter import launch, tl


def gather_kernel(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy the row of each of `BLOCK_N` positions from its slot: one program per tile of positions.

    `half_ptr` points to a layer's keys, or to its values. The row of a slot has `WIDTH` elements
    (`BLOCK_W` is the next power of two); the row of slot s in block b starts at `half_ptr` + b *
    `block_stride` + s * `slot_stride`. `table_ptr` lists the blocks of the sequence, whose first
    `length` slots are in use. The row of position p is stored to row p of `gathered_ptr`, which is
    contiguous. Each element of these rows is loaded once, and no other element is loaded.
    """
    positions = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_W)
    inside = positions < length
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside)
    at = blocks * block_stride + positions % BLOCK_SIZE * slot_stride
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    rows = tl.load(half_ptr + at[:, None] + columns[None, :], mask=wanted)
    tl.store(gathered_ptr + positions[:, None] * WIDTH + columns[None, :], rows, mask=wanted)


def grouped_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend with a whole group of query heads: one program per KV head (`tl.program_id(0)`).

    `q_ptr` and `mixed_ptr` are [q_heads, `HEAD_DIM`]; `keys_ptr` and `values_ptr` are [`length`,
    `KV_HEADS`, `HEAD_DIM`]; all are contiguous. Query head h uses KV head h // `GROUP`. A score is
    the dot product of query and key times `scale`. `scale` includes log2(e), so weights are powers
    of two. `BLOCK_G`, `BLOCK_D` and `BLOCK_N` are powers of two, at least 16, that hold `GROUP`,
    `HEAD_DIM` and `length`: the whole context is one tile. Each key and value is loaded once.
    """
    kv_head = tl.program_id(0)
    members, dims, positions = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    rows = (kv_head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    wanted = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows, mask=wanted, other=0.0)
    seen = positions < length
    offsets = (positions * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
    there = seen[:, None] & (dims < HEAD_DIM)[None, :]
    keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
    values = tl.load(values_ptr + offsets, mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    mixed = tl.dot(weights, values, input_precision="ieee") / tl.sum(weights, axis=1)[:, None]
    tl.store(mixed_ptr + rows, mixed, mask=wanted)


def tiled_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    mixed_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend in place, tile by tile: one program per KV head and sequence (`program_id` 0 and 1).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` and `mixed_ptr` are [sequences, q_heads, `HEAD_DIM`]. Query head h uses
    KV head h // `GROUP`. A program loads tiles of `BLOCK_N` tokens, one after another. `scale`
    includes log2(e), so weights are powers of two. `BLOCK_G` and `BLOCK_D` are powers of two, at
    least 16, that hold `GROUP` and `HEAD_DIM`. Each key and value is loaded once.
    """
    kv_head, sequence = tl.program_id(0), tl.program_id(1)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = (sequence * KV_HEADS + kv_head) * GROUP + members
    rows = heads[:, None] * HEAD_DIM + dims[None, :]
    wanted = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows, mask=wanted, other=0.0)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    mixed = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(0, length, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        seen = positions < length
        entries = sequence * table_stride + positions // BLOCK_SIZE
        blocks = tl.load(tables_ptr + entries, mask=seen, other=0)
        at = blocks * block_stride + positions % BLOCK_SIZE * slot_stride + kv_head * head_stride
        there = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=there, other=0.0)
        values = tl.load(values_ptr + at[:, None] + dims[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = higher
    tl.store(mixed_ptr + rows, mixed / total[:, None], mask=wanted)


def join_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one row: one program per row, that is, per query head of a sequence.

    Split s of row r has the largest score `maxima_ptr`[r, s]; weights are powers of two.
    `sums_ptr`[r, s] is the sum of its weights 2^(score - maximum), and `parts_ptr`[r, s]
    (`HEAD_DIM` elements) the sum of the values times these weights. A split without tokens has the
    maximum -inf, and zeros. The row's attention over all splits is stored to `mixed_ptr`[r].
    `BLOCK_S` and `BLOCK_D` are the next powers of two of `SPLITS` and `HEAD_DIM`. All tensors are
    contiguous. Each element is loaded once.
    """
    row = tl.program_id(0)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    there = splits < SPLITS
    maxima = tl.load(maxima_ptr + row * SPLITS + splits, mask=there, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPLITS + splits, mask=there, other=0.0)
    shrink = tl.exp2(maxima - tl.max(maxima, axis=0))
    offsets = (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    wanted = there[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + offsets, mask=wanted, other=0.0)
    mixed = tl.sum(parts * shrink[:, None], axis=0) / tl.sum(sums * shrink, axis=0)
    tl.store(mixed_ptr + row * HEAD_DIM + dims, mixed, mask=dims < HEAD_DIM)


def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
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
    """One program per KV head, sequence and split of its context (`tl.program_id` 0, 1 and 2).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` is [sequences, q_heads, `HEAD_DIM`]. Query head h uses KV head h //
    `GROUP`; the `GROUP` query heads of a KV head share its loads.

    A score is the dot product of query and key times `scale`. `scale` includes log2(e), so weights
    are powers of two. The `SPLITS` programs divide the context's tiles of `BLOCK_N` tokens; each
    tile is loaded by one of them. They store what `join_kernel` joins: `parts_ptr` [sequences,
    q_heads, `SPLITS`, `HEAD_DIM`], `maxima_ptr` and `sums_ptr` [sequences, q_heads, `SPLITS`]; -inf
    and zeros if a program has no tokens. `BLOCK_G` and `BLOCK_D` are powers of two, at least 16,
    that hold `GROUP` and `HEAD_DIM`.
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    rows = (sequence * KV_HEADS + kv_head) * GROUP + members
    wanted = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, length)

    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    mixed = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        seen = positions < end
        entries = sequence * table_stride + positions // BLOCK_SIZE
        blocks = tl.load(tables_ptr + entries, mask=seen, other=0)
        at = blocks * block_stride + positions % BLOCK_SIZE * slot_stride + kv_head * head_stride
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
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = higher

    parts = rows * SPLITS + split
    tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mixed, mask=wanted)
    tl.store(maxima_ptr + parts, maximum, mask=members < GROUP)
    tl.store(sums_ptr + parts, total, mask=members < GROUP)


Kernel = Callable[..., object]
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 16
LEAST_OF_DOT = 16  # rows of a tensor core's product; some versions of tl.dot refuse fewer


class Parts(NamedTuple):
    """Partial results: rows x splits x head_dim, and two of rows x splits; see `join_kernel`."""

    mixed: Tensor
    maxima: Tensor
    sums: Tensor


def no_parts(rows: int, splits: int, head_dim: int) -> Parts:
    """Allocate parts, filled with nan so that a missing store shows."""
    shapes = ((rows, splits, head_dim), (rows, splits), (rows, splits))
    return Parts(*(torch.full(shape, torch.nan) for shape in shapes))


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`.

    >>> [power_of_two(each) for each in (1, 3, 64)]
    [1, 4, 64]
    """
    return 1 << (count - 1).bit_length()


def padded(count: int) -> int:
    """Return the smallest power of two that is at least `count`, and fills `tl.dot` on a GPU.

    >>> [padded(each) for each in (3, 64, 200)]
    [16, 64, 256]
    """
    return max(power_of_two(count), LEAST_OF_DOT)


def scale_of(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim) times log2(e), so that weights are powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)


def launch_gather(
    kernel: Kernel, half: Tensor, table: Tensor, length: int, gathered: Tensor, tile: int = TILE
) -> None:
    """Write a sequence's first `length` rows of `half` (blocks x block_size x ...) in order.

    `gathered` is length x ..., and contiguous.
    """
    width = half[0, 0].numel()
    launch(
        kernel,
        (-(-length // tile),),
        half,
        table,
        gathered,
        length,
        *half.stride()[:2],
        WIDTH=width,
        BLOCK_SIZE=half.shape[1],
        BLOCK_N=tile,
        BLOCK_W=power_of_two(width),
    )


def launch_join(kernel: Kernel, parts: Parts, mixed: Tensor) -> None:
    """Write each row's attention over all its splits to `mixed`, which is rows x head_dim."""
    rows, splits, head_dim = parts.mixed.shape
    launch(
        kernel,
        (rows,),
        *parts,
        mixed,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK_S=power_of_two(splits),
        BLOCK_D=power_of_two(head_dim),
    )


def launch_decode(
    kernel: Kernel,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    parts: Parts,
    tile: int = TILE,
) -> None:
    """Write the parts of `q` (sequences x q_heads x head_dim, contiguous), one row per query head.

    `keys` and `values` are blocks x block_size x kv_heads x head_dim, with the same strides.
    """
    num_sequences, q_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    splits, group = parts.maxima.shape[1], q_heads // kv_heads
    launch(
        kernel,
        (kv_heads, num_sequences, splits),
        q,
        keys,
        values,
        tables,
        lengths,
        *parts,
        *keys.stride()[:3],
        tables.stride(0),
        scale_of(head_dim),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        BLOCK_G=padded(group),
        BLOCK_D=padded(head_dim),
        BLOCK_N=tile,
    )


def gathering(kernel: Kernel) -> AttentionBackend:
    """Make an `attention_backend` whose decodes gather each context by `kernel`, then attend."""

    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        mixed = []
        for query, table, length in zip(q, tables, lengths.tolist(), strict=True):
            context = []
            for half in (keys, values):
                context.append(half.new_empty(length, *half.shape[2:]))
                launch_gather(kernel, half, table, length, context[-1])
            mixed.append(attention(query.unsqueeze(0), context[0], context[1]))
        return torch.cat(mixed)

    return backend_of(decode)


def joining(kernel: Kernel, splits: int = 2) -> AttentionBackend:
    """Make an `attention_backend` with split decodes; `kernel` is the second pass."""
    return backend_of(_split(decode_kernel, kernel, splits))


def decoding(kernel: Kernel, splits: int = 2) -> AttentionBackend:
    """Make an `attention_backend` with split decodes; `kernel` is the first pass."""
    return backend_of(_split(kernel, join_kernel, splits))


def _split(first: Kernel, second: Kernel, splits: int) -> Decode:
    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        q, mixed = q.contiguous(), torch.empty(q.shape)
        parts = no_parts(q.shape[0] * q.shape[1], splits, q.shape[2])
        launch_decode(first, q, keys, values, tables, lengths, parts)
        launch_join(second, parts, mixed.flatten(0, 1))
        return mixed.to(q.dtype)

    return decode


def backend_of(decode: Decode) -> AttentionBackend:
    """Make an attention backend that decodes by `decode`, and prefills as in chapter 22.

    It raises `ValueError` for a model with sliding windows.
    """

    def attend_with_kernel(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        if any(window is not None for window in windows):
            raise ValueError(
                "These kernels do not support sliding windows; choose a model without them."
            )
        num_decodes, starts = batch.num_decodes, batch.query_starts

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.store(layer_id, k, v, batch.slots)
            tables, lengths = batch.block_tables, batch.context_lens
            mixed = []
            if num_decodes:
                halves = pool.kv[layer_id]
                first = (q[:num_decodes], halves[0], halves[1])
                mixed.append(decode(*first, tables[:num_decodes], lengths[:num_decodes]))
            for row in range(num_decodes, len(starts) - 1):
                keys, values = pool.gather(layer_id, tables[row])
                length, own = int(lengths[row]), q[starts[row] : starts[row + 1]]
                mixed.append(attention(own, keys[:length], values[:length]))
            return torch.cat(mixed)

        return attend

    return attend_with_kernel

"""Launchers of chapter 33's plain kernels, and the places for them in the running engine."""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from minigen.cache.paged import Batch, KVPool
from minigen.engine.runner import AttendFactory
from minigen.model.attention import attention
from minigen.protocols import Attend
from minigen.teach.interpreted import launch
from minigen.teach.paged_kernels import decode_kernel, join_kernel

Kernel = Callable[..., object]
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 16
LEAST_OF_DOT = 16  # rows and columns that a GPU's tl.dot takes


class Parts(NamedTuple):
    """What splits leave: rows x splits x head_dim, and two of rows x splits; see `join_kernel`."""

    mixed: Tensor
    maxima: Tensor
    sums: Tensor


def no_parts(rows: int, splits: int, head_dim: int) -> Parts:
    """Parts that nobody has written yet: all NaN, so that it would be seen."""
    shapes = ((rows, splits, head_dim), (rows, splits), (rows, splits))
    return Parts(*(torch.full(shape, torch.nan) for shape in shapes))


def power_of_two(count: int) -> int:
    """The least power of two that is not less.

    >>> [power_of_two(each) for each in (1, 3, 64)]
    [1, 4, 64]
    """
    return 1 << (count - 1).bit_length()


def launch_gather(
    kernel: Kernel, half: Tensor, table: Tensor, length: int, gathered: Tensor, tile: int = TILE
) -> None:
    """Write a sequence's first `length` rows of `half` (blocks x block_size x ...) in order.

    `gathered` is length x ..., contiguous.
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
    """Write each row's attention over all of its splits; `mixed` is rows x head_dim."""
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
    """Write the parts of `q` (sequences x q_heads x head_dim, contiguous), a row for each head.

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
        math.log2(math.e) / math.sqrt(head_dim),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        BLOCK_G=max(power_of_two(group), LEAST_OF_DOT),
        BLOCK_D=max(power_of_two(head_dim), LEAST_OF_DOT),
        BLOCK_N=tile,
    )


def gathering(kernel: Kernel) -> AttendFactory:
    """For `LLM.load(attend=...)`: decodes gather each context by `kernel`, then attend to it."""

    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        mixed = []
        for query, table, length in zip(q, tables, lengths.tolist(), strict=True):
            context = []
            for half in (keys, values):
                context.append(half.new_empty(length, *half.shape[2:]))
                launch_gather(kernel, half, table, length, context[-1])
            mixed.append(attention(query.unsqueeze(0), context[0], context[1]))
        return torch.cat(mixed)

    return _attending(decode)


def joining(kernel: Kernel, splits: int = 2) -> AttendFactory:
    """For `LLM.load(attend=...)`: decodes are split, and `kernel` is their second pass."""
    return _attending(_split(decode_kernel, kernel, splits))


def decoding(kernel: Kernel, splits: int = 2) -> AttendFactory:
    """For `LLM.load(attend=...)`: decodes are split, and `kernel` is their first pass."""
    return _attending(_split(kernel, join_kernel, splits))


def _split(first: Kernel, second: Kernel, splits: int) -> Decode:
    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        q, mixed = q.contiguous(), torch.empty(q.shape)
        parts = no_parts(q.shape[0] * q.shape[1], splits, q.shape[2])
        launch_decode(first, q, keys, values, tables, lengths, parts)
        launch_join(second, parts, mixed.flatten(0, 1))
        return mixed.to(q.dtype)

    return decode


def _attending(decode: Decode) -> AttendFactory:
    """Attention whose decodes are `decode`'s, and whose prefills are chapter 22's.

    Raises `ValueError` for a model with sliding windows, which these kernels do not know.
    """

    def attend_with_kernel(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        if any(window is not None for window in windows):
            raise ValueError("These kernels know no sliding windows: choose a model without any.")
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

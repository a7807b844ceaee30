"""Launchers and engine backends of chapter 33's first two rungs, the grouped and tiled kernel."""

import torch
from torch import Tensor

from minigen.engine.model_runner import AttentionBackend
from minigen_course.ch33_paged_attention.kernels import (
    TILE,
    Kernel,
    backend_of,
    padded,
    scale_of,
)
from minigen_course.lab.triton_interpreter import launch


def launch_grouped(kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor, mixed: Tensor) -> None:
    """Write the attention of `q` (q_heads x head_dim) over a contiguous context to `mixed`.

    `keys` and `values` are length x kv_heads x head_dim. All are contiguous.
    """
    length, kv_heads, head_dim = keys.shape
    group = len(q) // kv_heads
    launch(
        kernel,
        (kv_heads,),
        q,
        keys,
        values,
        mixed,
        length,
        scale_of(head_dim),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_G=padded(group),
        BLOCK_D=padded(head_dim),
        BLOCK_N=padded(length),
    )


def launch_tiled(
    kernel: Kernel,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    mixed: Tensor,
    tile: int = TILE,
) -> None:
    """Write the attention of `q` (sequences x q_heads x head_dim) to `mixed`; both are contiguous.

    `keys` and `values` are blocks x block_size x kv_heads x head_dim, with the same strides.
    """
    num_sequences, q_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    launch(
        kernel,
        (kv_heads, num_sequences),
        q,
        keys,
        values,
        tables,
        lengths,
        mixed,
        *keys.stride()[:3],
        tables.stride(0),
        scale_of(head_dim),
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=padded(q_heads // kv_heads),
        BLOCK_D=padded(head_dim),
        BLOCK_N=tile,
    )


def grouping(kernel: Kernel) -> AttentionBackend:
    """Make an `attention_backend` whose decodes gather each context, and attend by `kernel`."""

    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        q = q.contiguous()
        mixed = torch.empty_like(q)
        for row, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
            blocks = table[: -(-length // keys.shape[1])]
            k, v = (half[blocks].flatten(0, 1)[:length] for half in (keys, values))
            launch_grouped(kernel, q[row], k, v, mixed[row])
        return mixed

    return backend_of(decode)


def tiling(kernel: Kernel) -> AttentionBackend:
    """Make an `attention_backend` whose decodes attend in place by `kernel`, unsplit."""

    def decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        q = q.contiguous()
        mixed = torch.empty_like(q)
        launch_tiled(kernel, q, keys, values, tables, lengths, mixed)
        return mixed

    return backend_of(decode)

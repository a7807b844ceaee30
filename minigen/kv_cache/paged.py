"""Paged attention: keys and values in one pool of blocks, found through block tables.

Source: PagedAttention, Kwon et al. 2023. The pool's shape is `[layers, 2, blocks, block_size,
kv_heads, head_dim]` (`POOL_AXES`). The tokens of a block are contiguous, so gathering a sequence's
blocks gathers its context in one copy. A slot is `block_id * block_size + offset`. Kernels take
strides, so only this module depends on the order of the axes. Padding writes to block 0.
"""

import math
import mmap
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.model.attention import attention
from minigen.protocols import Attend

CPU = torch.device("cpu")
POOL_AXES = ("layers", "2", "blocks", "block_size", "kv_heads", "head_dim")


@dataclass(frozen=True)
class Batch:
    """The input of one step, packed: the new tokens of all sequences, one sequence after another.

    `query_starts` has the index of each sequence's first token and, as its last item, the number of
    tokens (elsewhere called `cu_seqlens`). `context_lens` has each sequence's length including the
    new tokens. `slots` has where each new token's key and value are stored. `logits_rows` has the
    indices of the tokens whose logits are needed. The first `num_decodes` sequences have one new
    token each.
    """

    token_ids: Int64[Tensor, " tokens"]
    positions: Int64[Tensor, " tokens"]
    slots: Int64[Tensor, " tokens"]
    query_starts: list[int]
    context_lens: Int64[Tensor, " sequences"]
    block_tables: Int64[Tensor, "sequences max_blocks"]
    logits_rows: Int64[Tensor, " rows"]
    num_decodes: int


def slots_of(block_ids: SequenceOf[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Return the slots of the tokens at these positions of a sequence.

    `block_ids` is the sequence's block table; its first block holds position 0.

    >>> slots_of([7, 3], range(2, 6), block_size=4)
    [30, 31, 12, 13]
    """
    return [block_ids[each // block_size] * block_size + each % block_size for each in positions]


class KVPool:
    """The memory of all blocks, including block 0."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        self.block_size = block_size
        # Zeros, because masked values must not be NaN. They come from mmap, because the operating
        # system gives a page memory only when it is first written.
        shape = (layers, 2, num_blocks + 1, block_size, kv_heads, head_dim)
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        self.kv = torch.frombuffer(memory, dtype=dtype).view(shape)

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        slots: Int64[Tensor, " tokens"],
    ) -> None:
        """Write each token's key and value of one layer to its slot."""
        for half, new in zip(self.kv[layer_id], (k, v), strict=True):
            half.flatten(0, 1).index_copy_(0, slots, new)

    def gather(
        self, layer_id: int, block_table: Int64[Tensor, "*rows blocks"]
    ) -> tuple[
        Float[Tensor, "*rows slots kv_heads head_dim"],
        Float[Tensor, "*rows slots kv_heads head_dim"],
    ]:
        """Return copies of the keys and values in these blocks, contiguous and in table order."""
        ids = block_table.flatten()
        keys, values = (
            half.index_select(0, ids).unflatten(0, block_table.shape).flatten(-4, -3)
            for half in self.kv[layer_id]
        )
        return keys, values

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""
        if pairs:
            sources, targets = torch.tensor(pairs).T.to(self.kv.device)
            for layer in self.kv:  # one at a time, because the right side is in new memory
                layer[:, targets] = layer[:, sources]


def attend_paged(
    pool: KVPool, batch: Batch, windows: SequenceOf[int | None], device: torch.device = CPU
) -> Attend:
    """Return attention over the pool for one batch: decodes in one call, prefills one by one.

    The pool is on `device`. The batch is in the CPU's memory, where its lengths are read without
    waiting for the device, and what attention computes with is copied to the device once.
    """
    slots, block_tables = batch.slots.to(device), batch.block_tables.to(device)
    longest = int(batch.context_lens[: batch.num_decodes].max()) if batch.num_decodes else 0
    num_blocks = -(-longest // pool.block_size)
    tables = block_tables[: batch.num_decodes, :num_blocks]
    lengths = batch.context_lens[: batch.num_decodes].unsqueeze(-1).to(device)
    position = torch.arange(num_blocks * pool.block_size, device=device)
    masks = {
        window: (position < lengths)
        & (position >= lengths - (window or position.numel() + longest))
        for window in set(windows)
    }

    def decode(layer_id: int, q: Tensor) -> Tensor:
        keys, values = (each.transpose(1, 2) for each in pool.gather(layer_id, tables))
        mask = masks[windows[layer_id]].unsqueeze(1).unsqueeze(1)
        # The query heads that share a KV head are passed as if they were several queries, so that
        # each key needs to be read once for all of them.
        grouped = q.unflatten(1, (keys.shape[1], -1))
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.flatten(1, 2)

    def prefill(layer_id: int, row: int, q: Tensor) -> Tensor:
        length = int(batch.context_lens[row])
        table = block_tables[row, : -(-length // pool.block_size)]
        keys, values = (each[:length] for each in pool.gather(layer_id, table))
        return attention(q, keys, values, windows[layer_id])

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool.store(layer_id, k, v, slots)
        starts = batch.query_starts
        outs = [decode(layer_id, q[: batch.num_decodes])] if batch.num_decodes else []
        for row in range(batch.num_decodes, len(starts) - 1):
            outs.append(prefill(layer_id, row, q[starts[row] : starts[row + 1]]))
        return torch.cat(outs)

    return attend

"""From scheduled chunks to logits: one packed batch, one pass through the model.

The block tables of all sequences are in one array, which the block manager updates; a step takes
the rows of its sequences. All other inputs of the model are written into buffers of a fixed size,
and the batch is the front of each buffer.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.hardware import set_torch_threads
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import CPU, Batch, KVPool, attend_paged, slots_of
from minigen.model.transformer import Transformer
from minigen.protocols import Attend
from minigen.sequence import ScheduledChunk

AttentionBackend = Callable[[KVPool, Batch, SequenceOf[int | None]], Attend]


@runtime_checkable
class BlockPool(Protocol):
    """The memory of all blocks, in whatever form; an attention of its own reads and writes it."""

    block_size: int

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""


class Packed(NamedTuple):
    """The fields of `minigen.kv_cache.paged.Batch` as int64 NumPy arrays, valid until the next."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    logits_rows: np.ndarray


class Buffer:
    """An int64 array of a fixed size, whose front is overwritten at every step."""

    def __init__(self, size: int):
        self.numbers = np.zeros(size, np.int64)

    def write(self, numbers: SequenceOf[int]) -> np.ndarray:
        """Write `numbers` to the front; return a view of them."""
        front = self.numbers[: len(numbers)]
        front[:] = numbers
        return front


class Packer:
    """Packs chunks into one batch, in buffers that are large enough for any batch."""

    def __init__(self, manager: BlockManager, block_size: int, max_num_batched_tokens: int):
        self.manager, self.block_size = manager, block_size
        self._token_ids, self._positions, self._slots = (
            Buffer(max_num_batched_tokens) for _ in range(3)
        )
        max_num_seqs = len(manager.tables)
        self._starts, self._context_lens = Buffer(max_num_seqs + 1), Buffer(max_num_seqs)
        self._logits_rows = Buffer(max_num_batched_tokens + max_num_seqs)
        self._tables = np.zeros(manager.tables.size, np.int64)

    def pack(self, chunks: SequenceOf[ScheduledChunk]) -> Packed:
        """Return the chunks as one packed batch, in their order."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, logits_rows, context_lens, rows = [0], [], [], []
        for chunk in chunks:
            sequence = chunk.sequence
            begin, first, drafts = len(token_ids), sequence.num_computed, chunk.drafts
            new = range(first, first + chunk.num_tokens)
            token_ids += sequence.token_ids[new.start : new.stop]
            token_ids += drafts
            positions += new
            slots += slots_of(sequence.block_ids, new, self.block_size)
            logits_rows += [begin + row for row in chunk.prompt_logprob_rows]
            logits_rows += range(len(token_ids) - 1 - len(drafts), len(token_ids) - 1)
            logits_rows += [len(token_ids) - 1] * len(chunk.samples)
            starts.append(len(token_ids))
            context_lens.append(new.stop)
            rows.append(self.manager.rows[sequence])
        return Packed(
            token_ids=self._token_ids.write(token_ids),
            positions=self._positions.write(positions),
            slots=self._slots.write(slots),
            query_starts=self._starts.write(starts),
            context_lens=self._context_lens.write(context_lens),
            block_tables=self._write_tables(rows, max(context_lens)),
            logits_rows=self._logits_rows.write(logits_rows),
        )

    def _write_tables(self, rows: list[int], longest: int) -> np.ndarray:
        """Return a contiguous copy of these tables, as wide as `longest` tokens need."""
        width = blocks_needed(longest, self.block_size)
        tables = self._tables[: len(rows) * width].reshape(len(rows), width)
        return self.manager.tables[:, :width].take(rows, axis=0, out=tables)


class PagedRunner:
    """Runs the model over chunks, layer by layer, with keys and values in a pool of blocks.

    `windows` has each layer's sliding window. A batch has at most `max_num_batched_tokens` tokens,
    and at most as many sequences as the manager has rows. torch computes with `num_threads`
    threads, also if other code has changed that setting. `attend` is the attention backend, which
    knows this kind of `pool`.

    The model and the pool are on `device`. A batch is packed in the CPU's memory and copied there,
    and the logits are copied back, which waits for all work of the step on the device.
    """

    def __init__(
        self,
        model: Transformer,
        pool: BlockPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_num_batched_tokens: int,
        num_threads: int,
        attend: Callable[[Any, Batch, SequenceOf[int | None]], Attend] = attend_paged,
        device: torch.device = CPU,
    ):
        self.num_threads, self.device = num_threads, device
        self.model, self.pool, self.manager, self.windows = model, pool, manager, windows
        self.attend = attend
        self.packer = Packer(manager, pool.block_size, max_num_batched_tokens)

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """Return each chunk's raw logits: of its `prompt_logprob_rows`, then of its samples."""
        set_torch_threads(self.num_threads)
        self.pool.copy_blocks(self.manager.pop_pending_copies())
        batch = batch_of(self.packer.pack(chunks), _num_leading_ones(chunks))
        attend = self.attend(self.pool, batch, self.windows)
        inputs = (batch.token_ids, batch.positions, batch.logits_rows)
        token_ids, positions, rows = (each.to(self.device) for each in inputs)
        hidden = self.model(token_ids, positions, attend)
        return self.model.logits(hidden[rows]).cpu()


def batch_of(packed: Packed, num_decodes: int) -> Batch:
    """Return the same numbers as tensors that share the arrays' memory."""
    starts: list[int] = packed.query_starts.tolist()
    return Batch(
        token_ids=torch.from_numpy(packed.token_ids),
        positions=torch.from_numpy(packed.positions),
        slots=torch.from_numpy(packed.slots),
        query_starts=starts,
        context_lens=torch.from_numpy(packed.context_lens),
        block_tables=torch.from_numpy(packed.block_tables),
        logits_rows=torch.from_numpy(packed.logits_rows),
        num_decodes=num_decodes,
    )


def _num_leading_ones(chunks: SequenceOf[ScheduledChunk]) -> int:
    for index, chunk in enumerate(chunks):
        if chunk.num_tokens != 1:
            return index
    return len(chunks)

"""From scheduled chunks to logits: one packed batch, one pass through the model.

The block tables of all sequences live in one array that the block manager keeps up to date; a step
takes the rows of those that run. All else that a step tells the model is written into buffers of a
fixed size, whose fronts are the batch.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.cache.blocks import blocks_needed
from minigen.cache.manager import BlockManager
from minigen.cache.paged import Batch, KVPool, attend_paged
from minigen.model.transformer import Transformer
from minigen.protocols import Attend
from minigen.sequence import Chunk

AttendFactory = Callable[[KVPool, Batch, SequenceOf[int | None]], Attend]


class Buffer:
    """Whole numbers in memory of a fixed size, written from the front at every step."""

    def __init__(self, size: int):
        self.numbers = np.zeros(size, np.int64)
        self.tensor = torch.from_numpy(self.numbers)

    def write(self, numbers: SequenceOf[int] | np.ndarray) -> Tensor:
        """Put `numbers` in front; returns a view of them."""
        self.numbers[: len(numbers)] = numbers
        return self.tensor[: len(numbers)]


class Packer:
    """Writes chunks as one packed batch, into buffers for the largest that may come."""

    def __init__(self, manager: BlockManager, block_size: int, max_batch_tokens: int):
        self.manager, self.block_size = manager, block_size
        self._token_ids, self._positions, self._slots, self._rows_of_tokens = (
            Buffer(max_batch_tokens) for _ in range(4)
        )
        max_sequences = len(manager.tables)
        self._context_lens = Buffer(max_sequences)
        self._logits_rows = Buffer(max_batch_tokens + max_sequences)
        self._tables = np.zeros(manager.tables.size, np.int64)

    def pack(self, chunks: SequenceOf[Chunk]) -> Batch:
        """The chunks as one packed batch, good until the next; decodes first as they come."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows_of_tokens: list[int] = []
        starts, logits_rows, context_lens, rows = [0], [], [], []
        for chunk in chunks:
            sequence, row = chunk.sequence, self.manager.rows[chunk.sequence]
            first, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
            token_ids += sequence.token_ids[first:end]
            positions += range(first, end)
            rows_of_tokens += [row] * chunk.num_tokens
            logits_rows += [starts[-1] + row for row in chunk.told_rows]
            starts.append(len(token_ids))
            logits_rows += [len(token_ids) - 1] * len(chunk.samples)
            context_lens.append(end)
            rows.append(row)
        return Batch(
            token_ids=self._token_ids.write(token_ids),
            positions=self._positions.write(positions),
            slots=self._write_slots(rows_of_tokens, len(positions)),
            query_starts=starts,
            context_lens=self._context_lens.write(context_lens),
            block_tables=self._write_tables(rows, max(context_lens)),
            logits_rows=self._logits_rows.write(logits_rows),
            num_decodes=_num_leading_ones(chunks),
        )

    def _write_slots(self, rows: list[int], num_tokens: int) -> Tensor:
        self._rows_of_tokens.write(rows)
        positions = self._positions.numbers[:num_tokens]
        blocks, offsets = np.divmod(positions, self.block_size)
        blocks = self.manager.tables[self._rows_of_tokens.numbers[:num_tokens], blocks]
        return self._slots.write(blocks * self.block_size + offsets)

    def _write_tables(self, rows: list[int], longest: int) -> Tensor:
        """The tables of these rows, as wide as the longest needs, side by side in the buffer."""
        width = blocks_needed(longest, self.block_size)
        tables = self._tables[: len(rows) * width].reshape(len(rows), width)
        np.take(self.manager.tables[:, :width], rows, axis=0, out=tables)
        return torch.from_numpy(tables)


class PagedRunner:
    """Runs the model over chunks, layer by layer, with keys and values in a pool of blocks.

    `windows` are the layers' sliding windows; a batch has at most `max_batch_tokens` tokens and as
    many sequences as the manager has rows; torch computes with `num_threads`, whatever ran before
    in this process; `attend` makes a step's attention.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_batch_tokens: int,
        num_threads: int,
        attend: AttendFactory = attend_paged,
    ):
        self.num_threads = num_threads
        self.model, self.pool, self.manager, self.windows = model, pool, manager, windows
        self.attend = attend
        self.packer = Packer(manager, pool.block_size, max_batch_tokens)

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[Chunk]) -> Float[Tensor, "rows vocab"]:
        """The raw logits of each chunk's `told_rows`, then of its samples."""
        torch.set_num_threads(self.num_threads)
        self.pool.copy_blocks(self.manager.take_copies())
        batch = self.packer.pack(chunks)
        attend = self.attend(self.pool, batch, self.windows)
        hidden = self.model(batch.token_ids, batch.positions, attend)
        return self.model.logits(hidden[batch.logits_rows])


def _num_leading_ones(chunks: SequenceOf[Chunk]) -> int:
    for index, chunk in enumerate(chunks):
        if chunk.num_tokens != 1:
            return index
    return len(chunks)

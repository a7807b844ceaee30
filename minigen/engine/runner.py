"""From scheduled chunks to logits: one packed batch, one pass through the model.

The block tables of all sequences live in one array that the block manager keeps up to date; a step
takes the rows of those that run.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.cache.blocks import blocks_needed
from minigen.cache.manager import BlockManager
from minigen.cache.paged import Batch, KVPool, attend_paged
from minigen.model.transformer import Transformer
from minigen.sequence import Chunk


class PagedRunner:
    """Runs the model over chunks, with keys and values in a pool of blocks.

    `windows` are the layers' sliding windows.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
    ):
        self.model, self.pool, self.manager, self.windows = model, pool, manager, windows

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[Chunk]) -> Float[Tensor, "samples vocab"]:
        """The raw logits of each of the chunks' samples."""
        self.pool.copy_blocks(self.manager.take_copies())
        batch = self.pack(chunks)
        attend = attend_paged(self.pool, batch, self.windows)
        hidden = self.model(batch.token_ids, batch.positions, attend)
        return self.model.logits(hidden[batch.logits_rows])

    def pack(self, chunks: SequenceOf[Chunk]) -> Batch:
        """The chunks as one packed batch, those of a single token first as they come."""
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
            starts.append(len(token_ids))
            logits_rows += [len(token_ids) - 1] * len(chunk.samples)
            context_lens.append(end)
            rows.append(row)
        longest = blocks_needed(max(context_lens), self.pool.block_size)
        return Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=self._slots(np.array(rows_of_tokens), np.array(positions)),
            query_starts=starts,
            context_lens=torch.tensor(context_lens),
            block_tables=torch.from_numpy(self.manager.tables[rows, :longest]),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            num_decodes=_num_leading_ones(chunks),
        )

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> Int64[Tensor, " tokens"]:
        block_size = self.pool.block_size
        blocks = self.manager.tables[rows, positions // block_size]
        return torch.from_numpy(blocks * block_size + positions % block_size)


def _num_leading_ones(chunks: SequenceOf[Chunk]) -> int:
    for index, chunk in enumerate(chunks):
        if chunk.num_tokens != 1:
            return index
    return len(chunks)

"""A scheduler that reserves blocks for the longest possible answer, and slots of a whole batch.

The scheduler is there for comparison; everything else is the engine's own. Source: Kwon et al.
2023, section 3.1, on systems before PagedAttention.
"""

import numpy as np
from jaxtyping import Int64

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import Sequence


class ReservingManager(BlockManager):
    """A block manager that gives a sequence all blocks that it may ever need when it starts."""

    def __init__(self, manager: BlockManager):
        self.__dict__ = (
            manager.__dict__
        )  # the same tables, because the engine reads the original manager

    def allocate(self, sequence: Sequence, max_tokens: int) -> int:
        """Allocate as `BlockManager` does, or return 0 if the longest answer does not fit."""
        longest = len(sequence.prompt_ids) + sequence.max_output
        if blocks_needed(longest, self.block_size) > self.num_available:
            return 0
        num_tokens = super().allocate(sequence, max_tokens)
        if num_tokens:
            reserved = self.allocate_slots(sequence, longest - sequence.num_computed)
            assert reserved, "the blocks for the longest answer are free"
        return num_tokens


class ReservingScheduler(ContinuousScheduler):
    """Continuous batching that admits a request once blocks for its longest answer are free."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(ReservingManager(manager), max_num_seqs, max_num_batched_tokens)


def decode_slots(
    block_tables: Int64[np.ndarray, "sequences max_blocks"],
    context_lens: Int64[np.ndarray, " sequences"],
    block_size: int,
) -> Int64[np.ndarray, " sequences"]:
    """Return the slot of each sequence's last token, of all sequences at once.

    `context_lens` counts the last token. Rows of `block_tables` are padded with 0 at their ends.

    >>> decode_slots(np.array([[7, 3], [5, 0]]), np.array([6, 4]), block_size=4).tolist()
    [13, 23]
    """
    last = context_lens - 1
    blocks = block_tables[np.arange(len(last)), last // block_size]
    return blocks * block_size + last % block_size

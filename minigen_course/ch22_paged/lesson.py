"""The engine as it would be without blocks to be had later: every answer's longest form reserved.

For comparison: the scheduler and all else are the engine's own. Source: Kwon et al. 2023,
section 3.1, on systems before PagedAttention.
"""

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import Sequence


class ReservingManager(BlockManager):
    """The blocks of a manager, of which a sequence gets, when it begins, all that it may need."""

    def __init__(self, manager: BlockManager):
        self.__dict__ = manager.__dict__  # the same tables, for the engine looks into that one

    def allocate(self, sequence: Sequence, max_tokens: int) -> int:
        """As the manager's, and 0 where there is no room for the longest answer."""
        longest = len(sequence.prompt_ids) + sequence.max_output
        if blocks_needed(longest, self.block_size) > self.num_available:
            return 0
        num_tokens = super().allocate(sequence, max_tokens)
        if num_tokens:
            reserved = self.allocate_slots(sequence, longest - sequence.num_computed)
            assert reserved, "there is room for the longest"
        return num_tokens


class ReservingScheduler(ContinuousScheduler):
    """Continuous batching that lets nobody in before there is room for their longest answer."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(ReservingManager(manager), max_num_seqs, max_num_batched_tokens)

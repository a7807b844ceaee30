"""The engine as it would be without blocks to be had later: every answer's longest form reserved.

For comparison: the scheduler and all else are the engine's own. Source: Kwon et al. 2023,
section 3.1, on systems before PagedAttention.
"""

from typing import Any

from minigen.cache.blocks import blocks_needed
from minigen.cache.manager import BlockManager
from minigen.engine.scheduler import ContinuousScheduler
from minigen.sequence import Sequence


class ReservingManager:
    """A block manager that gives a sequence, when it begins, all slots that it may ever need."""

    def __init__(self, manager: BlockManager):
        self.manager = manager

    def begin(self, sequence: Sequence, max_tokens: int) -> int:
        """As the manager's, and 0 where there is no room for the longest answer."""
        longest = len(sequence.prompt_ids) + sequence.max_output
        if blocks_needed(longest, self.manager.block_size) > self.manager.num_available:
            return 0
        num_tokens = self.manager.begin(sequence, max_tokens)
        if num_tokens:
            self.manager.reserve(sequence, longest - sequence.num_computed)
        return num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


class ReservingScheduler(ContinuousScheduler):
    """Continuous batching that lets nobody in before there is room for their longest answer."""

    def __init__(self, manager: BlockManager, max_sequences: int, max_batch_tokens: int):
        reserving: Any = ReservingManager(manager)
        super().__init__(reserving, max_sequences, max_batch_tokens)

"""Static batching: a batch starts together, and the next one starts when its last answer ends.

It is here for comparison with continuous batching, behind the same interface. It reserves KV cache
for the longest possible answer when a sequence starts, as systems did before paging. Source: Yu et
al. 2022 (Orca), section 3, describes both drawbacks: slots that stay empty, requests that wait.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


def allocate_longest(manager: BlockManager, sequence: Sequence, max_tokens: int) -> int:
    """Start a sequence with blocks for its longest answer, so that it never runs out of blocks.

    Return how many tokens it may compute now: all that are not cached, at most `max_tokens`.
    Return 0 and change nothing if there are not enough free blocks.
    """
    if blocks_needed(_longest(sequence), manager.block_size) > manager.num_available:
        return 0
    num_tokens = manager.allocate(sequence, max_tokens)
    if num_tokens > 0:
        reserved = manager.allocate_slots(sequence, _longest(sequence) - sequence.num_computed)
        assert reserved, "the blocks for the longest answer are free"
    return num_tokens


def _longest(sequence: Sequence) -> int:
    """Return the number of tokens of the sequence with its longest answer."""
    return len(sequence.prompt_ids) + sequence.max_output


class StaticScheduler:
    """Runs up to `max_num_seqs` waiting sequences until all of them are finished, then the next."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings, which run as separate sequences, behind all others."""
        if sequence.choice == 0 or sequence not in self.waiting:  # its leader may have brought it
            self.waiting += [sequence, *sequence.siblings]

    def schedule(self) -> list[ScheduledChunk]:
        """Return the next tokens of the running sequences, decodes (the fewest tokens) first."""
        if not self.running:
            self._start_batch()
        budget, chunks = self.max_num_batched_tokens, []
        for sequence in sorted(self.running, key=lambda each: each.num_wanted):
            num_tokens = min(sequence.num_wanted, budget)
            if num_tokens > 0:
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        return chunks

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Mark the chunks as computed, and append to each of their samples its token."""
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, finished or not; its slot stays empty until the batch is finished."""
        self.manager.free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _start_batch(self) -> None:
        """Fill the batch, as far as there are blocks for every answer's longest possible form."""
        num_available = self.manager.num_available
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_available -= blocks_needed(_longest(sequence), self.manager.block_size)
            if num_available < 0 or not allocate_longest(self.manager, sequence, len(sequence)):
                return
            self.running.append(self.waiting.popleft())


class DynamicScheduler:
    """Dynamic batching: a static batch starts when it is full, or after `max_wait` seconds.

    The wait counts from the arrival of the first waiting sequence, in seconds of `clock`.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_wait: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.batches = StaticScheduler(manager, max_num_seqs, max_num_batched_tokens)
        self.max_wait, self.clock = max_wait, clock
        self._arrivals: dict[Sequence, float] = {}  # of waiting sequences, in order

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings, which run as separate sequences, behind all others."""
        for each in (sequence, *sequence.siblings):
            self._arrivals.setdefault(each, self.clock())

    def schedule(self) -> list[ScheduledChunk]:
        """Return the next tokens of the running batch; empty while the next batch is collected."""
        if not self.batches.running and self._is_due():
            for sequence in list(self._arrivals)[: self.batches.max_num_seqs]:
                del self._arrivals[sequence]
                self.batches.waiting.append(sequence)
        return self.batches.schedule()

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Mark the chunks as computed, and append to each of their samples its token."""
        return self.batches.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, finished or not."""
        self._arrivals.pop(sequence, None)
        self.batches.abort(sequence)

    def _is_due(self) -> bool:
        if len(self._arrivals) >= self.batches.max_num_seqs:
            return True
        waited = self.clock() - next(iter(self._arrivals.values()), self.clock())
        return bool(self._arrivals) and waited >= self.max_wait

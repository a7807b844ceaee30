"""How batching was done before: a batch begins together, and the next waits for its last answer.

For comparison with continuous batching, behind the same interface. Memory is reserved for each
answer's longest form when it begins, as systems did before paging. Source: Yu et al. 2022 (Orca),
section 3, names both faults: seats that stay empty, newcomers that wait.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


class StaticScheduler:
    """Runs whoever waits, `max_num_seqs` at most, until all of them are done; then the next."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others; its siblings are computed by themselves."""
        self.waiting += [sequence, *sequence.siblings]
        sequence.siblings = []

    def schedule(self) -> list[ScheduledChunk]:
        """The next tokens of all who run: who has fewest left goes first, so decodes do."""
        if not self.running:
            self._begin()
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
        """Count the chunks as computed, and give each of their samples its token."""
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not; its seat stays empty until the batch is done."""
        self.manager.free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _begin(self) -> None:
        """Fill the seats, as far as there is memory for every answer at its longest."""
        room = self.manager.num_available
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            longest = len(sequence.prompt_ids) + sequence.max_output
            room -= blocks_needed(longest, self.manager.block_size)
            if room < 0 or not self.manager.allocate(sequence, len(sequence)):
                return
            reserved = self.manager.allocate_slots(sequence, longest - sequence.num_computed)
            assert reserved, "there is room for the longest"
            self.running.append(self.waiting.popleft())


class DynamicScheduler:
    """Static batching at a server's door: a batch begins when it is full, or when its first has
    waited `max_wait` seconds by `clock`."""

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
        self._arrivals: dict[Sequence, float] = {}  # of those who wait for a batch, in order

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others; its siblings are computed by themselves."""
        self._arrivals.update(dict.fromkeys([sequence, *sequence.siblings], self.clock()))
        sequence.siblings = []

    def schedule(self) -> list[ScheduledChunk]:
        """The next tokens of the batch that runs; empty while the next one gathers."""
        if not self.batches.running and self._is_time():
            for sequence in list(self._arrivals)[: self.batches.max_num_seqs]:
                del self._arrivals[sequence]
                self.batches.add(sequence)
        return self.batches.schedule()

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, and give each of their samples its token."""
        return self.batches.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not."""
        self._arrivals.pop(sequence, None)
        self.batches.abort(sequence)

    def _is_time(self) -> bool:
        if len(self._arrivals) >= self.batches.max_num_seqs:
            return True
        waited = self.clock() - next(iter(self._arrivals.values()), self.clock())
        return bool(self._arrivals) and waited >= self.max_wait

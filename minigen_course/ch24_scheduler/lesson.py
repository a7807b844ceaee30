"""Three schedulers, each of which does one thing more: seats, then chunks, then preemption.

They are the exercises of chapter 24; the engine's own does all three, and knows priorities, forks
and ten thousand who wait. Sources: iteration-level scheduling, Yu et al. 2022 (Orca); chunked
prefill, Agrawal et al. 2024 (Sarathi-Serve); preemption by recomputation, Kwon et al. 2023 (vLLM).
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


def begin_with_room(manager: BlockManager, sequence: Sequence, max_tokens: int) -> int:
    """Begin a sequence with blocks for its longest answer, so that it can never lack any.

    Returns how many tokens it may compute now: all that are not known, `max_tokens` at most; 0,
    and nothing has changed, while there is no such room.
    """
    longest = len(sequence.prompt_ids) + sequence.max_output
    if blocks_needed(longest, manager.block_size) > manager.num_available:
        return 0
    num_tokens = manager.allocate(sequence, max_tokens)
    if num_tokens > 0:
        reserved = manager.allocate_slots(sequence, longest - sequence.num_computed)
        assert reserved, "there is room for the longest"
    return num_tokens


class SlotScheduler:
    """Continuous batching: who has finished leaves its seat, and the next takes it at once.

    Prompts are computed whole, first come first served; who begins has blocks for its longest
    answer. At most `max_num_seqs` run, and a step has `max_num_batched_tokens` tokens at most.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order in which they came

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """A token of each who runs; then whole prompts, while seats, tokens and blocks last."""
        chunks = [ScheduledChunk(sequence, 1) for sequence in self.running]
        budget = self.max_num_batched_tokens - len(chunks)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if len(sequence) > budget:
                break
            num_tokens = begin_with_room(self.manager, sequence, budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, and give each of their samples its token; returns both."""
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Let a sequence go, wherever it is, and its blocks with it."""
        self.manager.free(sequence)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)


class ContinuousSlots(SlotScheduler):
    """What the next two build on: `SlotScheduler` by a name that a learner's own does not take."""


class ChunkingScheduler(ContinuousSlots):
    """Continuous batching with prompts in chunks: no step has more tokens than it may."""

    def schedule(self) -> list[ScheduledChunk]:
        """A token of each who decodes; prompts under way, and then newcomers, share the rest."""
        chunks, budget = [], self.max_num_batched_tokens
        for sequence in self.running:  # whoever decodes came before those who still read
            num_tokens = min(sequence.num_wanted, budget)
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            num_tokens = begin_with_room(self.manager, self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks


class PreemptingScheduler(ContinuousSlots):
    """Chunks, and room for now only: where blocks lack, the last who came gives its own back.

    It waits again, before all who came later, and is computed anew from its first token.
    """

    def schedule(self) -> list[ScheduledChunk]:
        """Chunks, with slots for the next tokens only; nobody who gave way is in it."""
        chunks, budget = [], self.max_num_batched_tokens
        for sequence in list(self.running):
            num_tokens = min(sequence.num_wanted, budget)
            while sequence in self.running and not self.manager.allocate_slots(
                sequence, num_tokens
            ):
                self._preempt_last()
            if sequence in self.running:
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            num_tokens = self.manager.allocate(self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks

    def _preempt_last(self) -> None:
        """Send the last who came back to the head of the queue, without its blocks."""
        victim = self.running.pop()
        self.manager.free(victim)
        self.waiting.appendleft(victim)

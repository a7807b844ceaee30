"""Three schedulers, each with one more feature: batch slots, then chunked prefill, then preemption.

They are the exercises of chapter 24. The engine's own scheduler does all three, and also handles
priorities, forks and ten thousand waiting sequences. Sources: iteration-level scheduling, Yu et al.
2022 (Orca); chunked prefill, Agrawal et al. 2024 (Sarathi-Serve); preemption by recomputation,
Kwon et al. 2023 (vLLM).
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

from minigen.engine.static_batching import allocate_longest
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


class SlotScheduler:
    """Continuous batching: when a sequence finishes, the next takes its slot in the batch at once.

    Prompts are computed whole, in the order of arrival. A sequence starts only with blocks for its
    longest answer. At most `max_num_seqs` sequences run, and a step has at most
    `max_num_batched_tokens` tokens.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of arrival

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule a token per running sequence, then whole prompts, within all limits."""
        chunks = [ScheduledChunk(sequence, 1) for sequence in self.running]
        budget = self.max_num_batched_tokens - len(chunks)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if len(sequence) > budget:
                break
            num_tokens = allocate_longest(self.manager, sequence, budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, append each sample's token, and return these pairs."""
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""
        self.manager.free(sequence)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)


class WholePromptScheduler(SlotScheduler):
    """The base of the next two: `SlotScheduler`, under a name that no learner's class has."""


class ChunkingScheduler(WholePromptScheduler):
    """Continuous batching with chunked prefill: no step exceeds its budget of tokens."""

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule decodes first, then partly computed prompts, then new sequences, in chunks."""
        chunks, budget = [], self.max_num_batched_tokens
        for sequence in self.running:  # in the order of arrival, so decodes come before prompts
            num_tokens = min(sequence.num_wanted, budget)
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            num_tokens = allocate_longest(self.manager, self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks


class PreemptingScheduler(WholePromptScheduler):
    """Chunked prefill and preemption: a sequence has only the blocks that it needs now.

    If blocks run out, the last sequence to arrive is preempted: it frees its blocks, waits in front
    of all that arrive later, and is computed again, except for what the prefix cache still holds.
    """

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule chunks, with KV slots for the next tokens only; preempted sequences get none."""
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
        """Free the blocks of the last running sequence, and put it at the head of the queue."""
        victim = self.running.pop()
        self.manager.free(victim)
        self.waiting.appendleft(victim)

"""Continuous batching: at every step, who runs, and with how many tokens.

Sources: iteration-level scheduling, Yu et al. 2022 (Orca); chunked prefill, Agrawal et al. 2024
(Sarathi-Serve); preemption by recomputation, Kwon et al. 2023 (vLLM).
"""

import heapq
from collections.abc import Sequence as SequenceOf
from itertools import count

from minigen.cache.manager import BlockManager
from minigen.sequence import Chunk, SampledToken, Sequence
from minigen.trace import EventKind, Trace

Rank = tuple[int, int]  # priority, then arrival: the lower goes first


class ContinuousScheduler:
    """Mixes decodes with chunks of prompts, under a budget of tokens and a limit of sequences.

    Who runs keeps running: first every decode, then prompts that are under way, then, first come
    first served, whoever waits and finds room now (not: room for the longest answer). When blocks
    lack, the last in rank gives its own back and waits again at its old rank, to be computed anew;
    so whoever came first always moves on, and nobody starves. O(batch) a step, whatever waits.
    """

    def __init__(
        self, manager: BlockManager, max_sequences: int, max_batch_tokens: int, trace: Trace
    ):
        self.manager, self.trace = manager, trace
        self.max_sequences, self.max_batch_tokens = max_sequences, max_batch_tokens
        self.running: dict[Sequence, Rank] = {}
        self._waiting: list[tuple[Rank, Sequence]] = []
        self._ranks: dict[Sequence, Rank] = {}
        self._leaders: dict[Sequence, Sequence] = {}  # of siblings that have not forked yet
        self._arrivals = count()

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued."""
        return len(self._ranks) - len(self.running)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._ranks)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all of its priority; its siblings come along with it."""
        self._enqueue(sequence, (sequence.priority, next(self._arrivals)))
        if self.trace.active:
            self.trace.emit(
                EventKind.QUEUED, sequence.sequence_id, prompt_tokens=len(sequence.prompt_ids)
            )

    def next_batch(self) -> list[Chunk]:
        """Chunks whose slots are reserved, decodes first; empty when nobody can run."""
        batch: dict[Sequence, int] = {}
        budget = self._continue_running(batch, self.max_batch_tokens)
        self._admit(batch, budget)
        chunks = [Chunk(sequence, num_tokens) for sequence, num_tokens in batch.items()]
        if self.trace.active:
            for chunk in chunks:
                self.trace.emit(
                    EventKind.SCHEDULED,
                    chunk.sequence.sequence_id,
                    tokens=chunk.num_tokens,
                    computed=chunk.sequence.num_computed,
                )
        return chunks

    def commit(
        self, chunks: SequenceOf[Chunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, and give each of their samples its token."""
        samples = [sample for chunk in chunks for sample in chunk.samples]
        progress = list(zip(samples, tokens, strict=True))
        for chunk in chunks:
            self._advance(chunk)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if self.trace.active:
                self.trace.emit(EventKind.NEW_TOKEN, sequence.sequence_id, token=token.token_id)
            if sequence.finish_reason is not None:
                self._leave(sequence, EventKind.FINISHED)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Give an unfinished sequence up at once; one that has left already is let be."""
        if sequence in self._ranks:
            sequence.finish_reason = "abort"
            self._leave(sequence, EventKind.ABORTED)

    def _continue_running(self, batch: dict[Sequence, int], budget: int) -> int:
        """Give every running sequence its next tokens; returns what is left of the budget."""
        in_order = sorted(self.running, key=lambda each: (_is_prefilling(each), self.running[each]))
        for sequence in in_order:
            num_tokens = min(len(sequence) - sequence.num_computed, budget)
            may_run = num_tokens > 0 and sequence in self.running
            if may_run and self._reserve(sequence, num_tokens, batch):
                batch[sequence] = num_tokens
                budget = self.max_batch_tokens - sum(batch.values())
        return budget

    def _reserve(self, sequence: Sequence, num_tokens: int, batch: dict[Sequence, int]) -> bool:
        """Make slots, at the cost of those last in rank; False if that cost the sequence itself."""
        while not self.manager.reserve(sequence, num_tokens):
            victim = max(self.running, key=self.running.__getitem__)
            batch.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, batch: dict[Sequence, int], budget: int) -> None:
        """Let those in who wait, in order, as long as there are seats, tokens and blocks."""
        seats = self.max_sequences - sum(1 + len(each.siblings) for each in self.running)
        while self._waiting and budget > 0:
            rank, sequence = self._waiting[0]
            if self._ranks.get(sequence) != rank:  # aborted meanwhile
                heapq.heappop(self._waiting)
                continue
            if 1 + len(sequence.siblings) > seats:
                return
            self.manager.begin(sequence)
            num_tokens = min(len(sequence) - sequence.num_computed, budget)
            if not self.manager.reserve(sequence, num_tokens):
                self.manager.release(sequence)
                return
            heapq.heappop(self._waiting)
            self.running[sequence] = rank
            batch[sequence] = num_tokens
            budget -= num_tokens
            seats -= 1 + len(sequence.siblings)

    def _advance(self, chunk: Chunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        sequence.num_computed += chunk.num_tokens
        self.manager.keep_full_blocks(sequence)
        if samples:
            for sibling in sequence.siblings:
                self.manager.fork(sequence, sibling)
                self.running[sibling] = self._ranks[sibling]
                del self._leaders[sibling]
            sequence.siblings = []

    def _preempt(self, sequence: Sequence) -> None:
        if self.trace.active:
            self.trace.emit(
                EventKind.PREEMPTED, sequence.sequence_id, computed=sequence.num_computed
            )
        self.manager.release(sequence)
        heapq.heappush(self._waiting, (self.running.pop(sequence), sequence))

    def _enqueue(self, sequence: Sequence, rank: Rank) -> None:
        self._ranks[sequence] = rank
        for sibling in sequence.siblings:
            self._ranks[sibling] = (sequence.priority, next(self._arrivals))
            self._leaders[sibling] = sequence
        heapq.heappush(self._waiting, (rank, sequence))

    def _leave(self, sequence: Sequence, kind: EventKind) -> None:
        """Give everything back; siblings that have not forked yet go on without their first."""
        self.manager.release(sequence)
        self.running.pop(sequence, None)
        del self._ranks[sequence]
        if self.trace.active:
            self.trace.emit(kind, sequence.sequence_id, output_tokens=len(sequence.output_ids))
        if sequence in self._leaders:
            self._leaders.pop(sequence).siblings.remove(sequence)
        if sequence.siblings:
            self._hand_over(sequence)

    def _hand_over(self, leader: Sequence) -> None:
        """Queue the next sibling in the leader's place; nobody has come between their ranks."""
        first, *rest = leader.siblings
        leader.siblings, first.siblings = [], rest
        del self._leaders[first]
        self._leaders.update(dict.fromkeys(rest, first))
        heapq.heappush(self._waiting, (self._ranks[first], first))


def _is_prefilling(sequence: Sequence) -> bool:
    return len(sequence) - sequence.num_computed > 1

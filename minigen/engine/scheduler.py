"""Continuous batching: at every step, who runs, and with how many tokens.

Sources: iteration-level scheduling, Yu et al. 2022 (Orca); chunked prefill, Agrawal et al. 2024
(Sarathi-Serve); preemption by recomputation, Kwon et al. 2023 (vLLM).
"""

import heapq
from collections.abc import Sequence as SequenceOf
from itertools import count

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of

Rank = tuple[int, int]  # priority, then arrival: the lower goes first


class ContinuousScheduler:
    """Mixes decodes with chunks of prompts, under a budget of tokens and a limit of sequences.

    Who runs keeps running: first every decode, then prompts that are under way, then, first come
    first served, whoever waits and finds room now (not: room for the longest answer). When blocks
    lack, the last in rank gives its own back and waits again at its old rank, to be computed anew;
    so whoever came first always moves on, and nobody starves. O(batch) a step, whatever waits.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
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
        self._ranks[sequence] = rank = (sequence.priority, next(self._arrivals))
        for sibling in sequence.siblings:
            self._ranks[sibling] = (sequence.priority, next(self._arrivals))
            self._leaders[sibling] = sequence
        heapq.heappush(self._waiting, (rank, sequence))

    def schedule(self) -> list[ScheduledChunk]:
        """Chunks whose slots are reserved, decodes first; empty when nobody can run."""
        batch: dict[Sequence, int] = {}
        budget = self._continue_running(batch)
        self._admit(batch, budget)
        return [ScheduledChunk(sequence, num_tokens) for sequence, num_tokens in batch.items()]

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, and give each of their samples its token."""
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self._advance(chunk)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self._leave(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Give up a sequence, waiting or running; one that has left already is let be."""
        if sequence in self._ranks:
            self._leave(sequence)

    def _continue_running(self, batch: dict[Sequence, int]) -> int:
        """Give every running sequence its next tokens; returns what is left of the budget."""
        budget = self.max_num_batched_tokens
        in_order = sorted(self.running, key=lambda each: (_is_prefilling(each), self.running[each]))
        for sequence in in_order:
            num_tokens = min(sequence.num_wanted, budget)
            while num_tokens > 0 and sequence in self.running:
                if self.manager.allocate_slots(sequence, num_tokens):
                    batch[sequence] = num_tokens
                    budget -= num_tokens
                    break
                budget += self._preempt_last(batch)
        return budget

    def _preempt_last(self, batch: dict[Sequence, int]) -> int:
        """Take the last in rank out; returns how many tokens it would have computed."""
        victim = max(self.running, key=self.running.__getitem__)
        self.manager.free(victim)
        heapq.heappush(self._waiting, (self.running.pop(victim), victim))
        return batch.pop(victim, 0)

    def _admit(self, batch: dict[Sequence, int], budget: int) -> None:
        """Let those in who wait, in order, as long as there are seats, tokens and blocks."""
        seats = self.max_num_seqs - sum(1 + len(each.siblings) for each in self.running)
        while self._waiting and budget > 0:
            rank, sequence = self._waiting[0]
            if self._ranks.get(sequence) != rank:  # aborted meanwhile
                heapq.heappop(self._waiting)
                continue
            seats -= 1 + len(sequence.siblings)
            num_tokens = self.manager.allocate(sequence, budget) if seats >= 0 else 0
            if num_tokens == 0:
                return
            heapq.heappop(self._waiting)
            self.running[sequence] = rank
            batch[sequence] = num_tokens
            budget -= num_tokens

    def _advance(self, chunk: ScheduledChunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        self.manager.mark_computed(sequence, chunk.num_tokens)
        if samples:
            for sibling in sequence.siblings:
                self.manager.fork(sequence, sibling)
                self.running[sibling] = self._ranks[sibling]
                del self._leaders[sibling]
            sequence.siblings = []

    def _leave(self, sequence: Sequence) -> None:
        """Give everything back; siblings that have not forked yet go on without their first."""
        self.manager.free(sequence)
        self.running.pop(sequence, None)
        del self._ranks[sequence]
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

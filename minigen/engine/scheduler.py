"""Continuous batching: each step decides which sequences run, and how many tokens of each.

Sources: iteration-level scheduling, Yu et al. 2022 (Orca); chunked prefill, Agrawal et al. 2024
(Sarathi-Serve); preemption by recomputation, Kwon et al. 2023 (vLLM).
"""

import heapq
from collections.abc import Sequence as SequenceOf
from itertools import count, islice

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, num_matching

Rank = tuple[int, int]  # priority, then arrival; the lowest runs first


class ContinuousScheduler:
    """Mixes decodes with chunked prefill, within a token budget and a limit on sequences.

    A step runs every decode first, then the prompts already started, then waiting sequences in
    order of rank, if there are blocks for their tokens so far (not for the longest answer). When
    blocks run out, the running sequence of the last rank is preempted: it frees its blocks and
    waits again at its old rank, to be recomputed. So the sequence of the first rank always makes
    progress, and with equal priorities none starves. O(batch) per step, however many wait.

    It verifies the drafts of decodes (`Sequence.drafts`) last in each step, where blocks and budget
    are left, so that they take neither from another sequence, and preempt none.
    """

    verifies_drafts = True

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.running: dict[Sequence, Rank] = {}
        self._waiting: list[tuple[Rank, Sequence]] = []
        self._ranks: dict[Sequence, Rank] = {}
        # Siblings that have not forked yet, by their leader; and the leader of each.
        self._siblings: dict[Sequence, tuple[Sequence, ...]] = {}
        self._leaders: dict[Sequence, Sequence] = {}
        self._arrivals = count()

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences, including siblings that have not forked yet."""
        return len(self._ranks) - len(self.running)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._ranks)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others of its priority, together with its siblings.

        Does nothing for a sibling that is queued already.
        """
        if sequence in self._ranks:
            return
        for each in (sequence, *sequence.siblings):
            self._ranks[each] = (sequence.priority, next(self._arrivals))
        self._lead(sequence, sequence.siblings)

    def schedule(self) -> list[ScheduledChunk]:
        """Return chunks with slots allocated, decodes first; empty if no sequence can run."""
        batch: dict[Sequence, int] = {}
        budget = self._continue_running(batch)
        budget = self._admit(batch, budget)
        self._schedule_drafts(batch, budget)
        return [
            ScheduledChunk(sequence, num_tokens, self._siblings.get(sequence, ()))
            for sequence, num_tokens in batch.items()
        ]

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Mark the chunks as computed, and append to each of their samples its token.

        A sequence with drafts gets one token more than drafts are right: each right draft, and the
        token that was sampled after the last right one.
        """
        asked = [(sample, chunk.drafts) for chunk in chunks for sample in chunk.samples]
        num_rows = sum(1 + len(drafts) for _, drafts in asked)
        if len(tokens) != num_rows:
            raise ValueError(f"{len(tokens)} tokens were sampled for {num_rows} rows of logits.")
        for chunk in chunks:
            self._mark_computed(chunk, chunk.num_tokens - len(chunk.drafts))
            chunk.sequence.drafts = ()
        given = iter(tokens)
        return [
            (sequence, token)
            for sequence, drafts in asked
            for token in self._append(sequence, drafts, list(islice(given, 1 + len(drafts))))
        ]

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running; do nothing if it was removed already."""
        if sequence in self._ranks:
            self._remove(sequence)

    def _continue_running(self, batch: dict[Sequence, int]) -> int:
        """Schedule the next tokens of every running sequence; return the remaining budget."""
        budget = self.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda each: (_group(each), self.running[each])):
            num_tokens = min(sequence.num_wanted - len(sequence.drafts), budget)
            while num_tokens > 0 and sequence in self.running:
                if self.manager.allocate_slots(sequence, num_tokens):
                    batch[sequence] = num_tokens
                    budget -= num_tokens
                    break
                budget += self._preempt_last(batch)
        return budget

    def _schedule_drafts(self, batch: dict[Sequence, int], budget: int) -> None:
        """Add the drafts of the batch's sequences where blocks are left; drop the others."""
        for sequence in self.running:
            if not sequence.drafts:
                continue
            num_drafts = min(len(sequence.drafts), budget) if sequence in batch else 0
            if num_drafts and self.manager.allocate_slots(sequence, 1 + num_drafts):
                batch[sequence] += num_drafts
                budget -= num_drafts
            else:
                sequence.drafts = ()

    def _preempt_last(self, batch: dict[Sequence, int]) -> int:
        """Preempt the running sequence of the last rank; return its tokens in `batch`."""
        victim = max(self.running, key=self.running.__getitem__)
        victim.drafts = ()
        self.manager.free(victim)
        heapq.heappush(self._waiting, (self.running.pop(victim), victim))
        return batch.pop(victim, 0)

    def _admit(self, batch: dict[Sequence, int], budget: int) -> int:
        """Start waiting sequences in order, while slots, budget and blocks last; return budget."""
        num_free_seqs = self.max_num_seqs - sum(map(self._num_seqs, self.running))
        while self._waiting and budget > 0:
            rank, sequence = self._waiting[0]
            if self._ranks.get(sequence) != rank:  # aborted while it waited
                heapq.heappop(self._waiting)
                continue
            num_free_seqs -= self._num_seqs(sequence)
            num_tokens = self.manager.allocate(sequence, budget) if num_free_seqs >= 0 else 0
            if num_tokens == 0:
                break
            heapq.heappop(self._waiting)
            self.running[sequence] = rank
            batch[sequence] = num_tokens
            budget -= num_tokens
        return budget

    def _append(
        self, sequence: Sequence, drafts: SequenceOf[int], tokens: list[SampledToken]
    ) -> list[SampledToken]:
        """Append the right drafts and one token more, or fewer if one ends it; return them.

        The keys and values of right drafts are computed already.
        """
        num_right = num_matching(drafts, [each.token_id for each in tokens]) if drafts else 0
        appended: list[SampledToken] = []
        while len(appended) <= num_right and sequence.finish_reason is None:
            appended.append(tokens[len(appended)])
            sequence.append(appended[-1].token_id)
        if num_right:
            self.manager.mark_computed(sequence, min(num_right, len(appended)))
        if sequence.finish_reason is not None:
            self._remove(sequence)
        return appended

    def _mark_computed(self, chunk: ScheduledChunk, num_tokens: int) -> None:
        """Mark tokens as computed; if the chunk completes the sequence, fork the siblings."""
        sequence, samples = chunk.sequence, chunk.samples
        self.manager.mark_computed(sequence, num_tokens)
        if samples:
            for sibling in self._siblings.pop(sequence, ()):
                self.manager.fork(sequence, sibling)
                self.running[sibling] = self._ranks[sibling]
                del self._leaders[sibling]

    def _remove(self, sequence: Sequence) -> None:
        """Free the sequence's blocks; siblings that have not forked yet continue without it."""
        self.manager.free(sequence)
        self.running.pop(sequence, None)
        del self._ranks[sequence]
        if sequence in self._leaders:
            leader = self._leaders.pop(sequence)
            left = tuple(each for each in self._siblings[leader] if each is not sequence)
            self._siblings[leader] = left
        siblings = self._siblings.pop(sequence, ())
        if siblings:  # the first one leads now; no other sequence has a rank between them
            del self._leaders[siblings[0]]
            self._lead(siblings[0], siblings[1:])

    def _lead(self, leader: Sequence, siblings: tuple[Sequence, ...]) -> None:
        """Queue a sequence; its siblings fork from it."""
        if siblings:
            self._siblings[leader] = siblings
            self._leaders.update(dict.fromkeys(siblings, leader))
        heapq.heappush(self._waiting, (self._ranks[leader], leader))

    def _num_seqs(self, sequence: Sequence) -> int:
        return 1 + len(self._siblings.get(sequence, ()))


def _is_prefilling(sequence: Sequence) -> bool:
    return len(sequence) - sequence.num_computed > 1


def _group(sequence: Sequence) -> int:
    """Return 0 for a decode, 1 for a decode with drafts, 2 for a prompt."""
    return 2 if _is_prefilling(sequence) else int(bool(sequence.drafts))

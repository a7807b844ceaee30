"""Bug hunt preempted of chapter 24 (core, 10 points, about 25 minutes).

**The report.** *Under load, answers repeat themselves in the middle and then stop too early.
The same questions, asked again at night, get perfect answers.* FastDeploy prefilled only the
prompt when a preempted request started again (pull request 3080: "we should prefill all the
tokens"). vLLM's Gaudi plugin did the same, and also counted output tokens twice (pull request
524). vLLM has a report of incomplete answers after recomputation (issue 16832).

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/24_scheduler/hunt_preempted.py
"""

# hunt: minigen_course.ch24_scheduler.hunt
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


class PlainScheduler:
    """First come, first served, one answer per prompt; the last sequence to arrive is preempted."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        budget = self.max_num_batched_tokens
        for sequence in list(self.running):
            num_tokens = min(sequence.num_wanted, budget)
            while sequence in self.running and not self.manager.allocate_slots(
                sequence, num_tokens
            ):
                self.preempt(self.running[-1])
            if sequence in self.running and num_tokens:
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            num_tokens = self.manager.allocate(self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks

    def preempt(self, victim: Sequence) -> None:
        """Free its blocks; it starts again once there are enough, before all waiting sequences."""
        self.running.remove(victim)
        self.manager.free(victim)
        victim.token_ids = list(victim.prompt_ids)
        self.waiting.appendleft(victim)

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)


def test_scheduler(Scheduler: Any) -> None:
    """Assert what every correct scheduler does, and the one above does not.

    `serve_toy(prompts, scheduler=Scheduler, num_blocks=...)` of minigen_course.lab.toy_engine
    runs it.
    """
    raise NotImplementedError  # your turn

"""Chapter 24's hunt: a request that is preempted, and comes back."""

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen_course.grading.hunt import Hunt
from minigen_course.grading.messages import expect, expect_equal
from minigen_course.lab.toy_engine import serve_toy


class PlainScheduler:
    """First come, first served; one answer to each prompt. The last to come makes room."""

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
        """Take its blocks; it begins anew as soon as there is room, before all who wait."""
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
    """Assert what holds for every right scheduler, and does not for the one above.

    `serve_toy(prompts, scheduler=Scheduler, num_blocks=...)` of minigen_course.lab.toy_engine
    serves it.
    """
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9], [3, 1, 4, 1, 5, 9]]
    undisturbed = serve_toy(prompts, scheduler=Scheduler, num_blocks=100)
    for num_blocks in (5, 7, 9):
        tight = serve_toy(prompts, scheduler=Scheduler, num_blocks=num_blocks)
        assert tight.answers == undisturbed.answers
        assert tight.told == undisturbed.told


class _Mended(PlainScheduler):
    """What was written already stays, and is computed anew together with the prompt."""

    def preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.manager.free(victim)
        self.waiting.appendleft(victim)


class _BehindTheOthers(_Mended):
    """Right, too: a preempted request waits behind all others."""

    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        self.waiting.rotate(-1)


class _WritesItAgain(PlainScheduler):
    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        victim.output_ids.clear()


class _LosesTheLast(_Mended):
    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        if victim.output_ids:
            victim.token_ids.pop()


class _CountsTwice(_Mended):
    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        if victim.output_ids:
            victim.output_ids.append(victim.output_ids[-1])


class _Forgets(_Mended):
    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        self.waiting.remove(victim)


PROMPTS = ([5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1], [7, 7, 7, 2, 2, 2, 3])


def answers_do_not_depend_on_memory(part: Any) -> None:
    """five requests in pools of all sizes that hold the longest:"""
    right = serve_toy(PROMPTS)
    for num_blocks in range(5, 24):
        found = serve_toy(PROMPTS, scheduler=part, num_blocks=num_blocks)
        for number, answer in enumerate(right.answers):
            what = f"the answer to request {number}, with {num_blocks} blocks"
            expect_equal(found.answers[number], answer, what)
            expect_equal(found.told[number], answer, f"what was told of {what}")


def it_still_runs_them_side_by_side(part: Any) -> None:
    """requests share steps, and one is preempted when memory lacks, as before:"""
    found = serve_toy(PROMPTS, scheduler=part, num_blocks=9)
    expect(found.num_preempted > 0, "nobody was preempted with 9 blocks; somebody should be.")
    one_by_one = sum(serve_toy([prompt]).num_steps for prompt in PROMPTS)
    expect(
        found.num_steps < one_by_one,
        f"took {found.num_steps} steps; it should take fewer than the {one_by_one} one by one.",
    )


HUNT = Hunt(
    "preempted",
    PlainScheduler,
    test_scheduler,
    _Mended,
    {
        "minigen's own": ContinuousScheduler,
        "one that lets a preempted request wait behind all others": _BehindTheOthers,
    },
    {
        "writes the whole answer anew, so that its client is told the same tokens again": (
            _WritesItAgain
        ),
        "forgets the last token, which is then written twice": _LosesTheLast,
        "counts the last token twice": _CountsTwice,
        "never lets a preempted request in again": _Forgets,
    },
    (answers_do_not_depend_on_memory, it_still_runs_them_side_by_side),
    (
        "What should an answer depend on, and what not? Serve the same prompts with much memory "
        "and with little.",
        "serve_toy() returns num_preempted: a pool in which nobody is preempted tests nothing. It "
        "returns `answers` and `told`, too; look at both.",
        "A preempted request has lost its keys and values, nothing else. What must be computed "
        "again: the prompt, or the prompt and all that was written?",
    ),
    "**The report.** *Under load, answers repeat themselves in the middle and then stop too early. "
    "The same questions, asked again at night, get perfect answers.* FastDeploy prefilled only the "
    'prompt when a preempted request came back (pull request 3080: "we should prefill all the '
    "tokens\"); vLLM's Gaudi plugin did so too, and counted output tokens twice besides (pull "
    "request 524); vLLM has a report of incomplete answers after recomputation (issue 16832).",
)

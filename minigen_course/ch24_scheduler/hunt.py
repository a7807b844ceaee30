"""Bug hunt of chapter 24: a request that is preempted and starts again."""

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.grading.hunt import Hunt
from minigen_course.lab.toy_engine import serve_toy


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
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9], [3, 1, 4, 1, 5, 9]]
    undisturbed = serve_toy(prompts, scheduler=Scheduler, num_blocks=100)
    for num_blocks in (5, 7, 9):
        tight = serve_toy(prompts, scheduler=Scheduler, num_blocks=num_blocks)
        assert tight.answers == undisturbed.answers
        assert tight.streamed == undisturbed.streamed


class _Mended(PlainScheduler):
    """Correct: the generated tokens stay, and are computed again together with the prompt."""

    def preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.manager.free(victim)
        self.waiting.appendleft(victim)


class _BehindTheOthers(_Mended):
    """Also correct: a preempted request waits behind all others."""

    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        self.waiting.rotate(-1)


class _GeneratesItAgain(PlainScheduler):
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
    """five requests in pools of every size that holds the longest request:"""
    right = serve_toy(PROMPTS)
    for num_blocks in range(5, 24):
        found = serve_toy(PROMPTS, scheduler=part, num_blocks=num_blocks)
        for number, answer in enumerate(right.answers):
            what = f"the answer to request {number}, with {num_blocks} blocks"
            expect_equal(found.answers[number], answer, what)
            expect_equal(found.streamed[number], answer, f"the tokens streamed for {what}")


def requests_still_run_in_batches(part: Any) -> None:
    """requests share steps, and one is preempted when blocks run out, as before:"""
    found = serve_toy(PROMPTS, scheduler=part, num_blocks=9)
    expect(
        found.num_preempted > 0, "no request was preempted with 9 blocks; at least one should be."
    )
    one_by_one = sum(serve_toy([prompt]).num_steps for prompt in PROMPTS)
    expect(
        found.num_steps < one_by_one,
        f"it took {found.num_steps} steps; it should take fewer than {one_by_one}, one at a time.",
    )


HUNT = Hunt(
    "preempted",
    PlainScheduler,
    test_scheduler,
    _Mended,
    {
        "minigen's own scheduler": ContinuousScheduler,
        "one that lets a preempted request wait behind all others": _BehindTheOthers,
    },
    {
        "generates the whole answer again, so that its client gets the same tokens twice": (
            _GeneratesItAgain
        ),
        "drops the last token, which is then generated twice": _LosesTheLast,
        "counts the last token twice": _CountsTwice,
        "never starts a preempted request again": _Forgets,
    },
    (answers_do_not_depend_on_memory, requests_still_run_in_batches),
    (
        "What should an answer depend on, and what not? Serve the same prompts with much memory "
        "and with little memory.",
        "serve_toy() returns num_preempted: a pool in which no request is preempted tests nothing. "
        "It also returns `answers`, and `streamed`, the tokens that each client got; check both.",
        "A preempted request has lost its keys and values, nothing else. What must be computed "
        "again: the prompt, or the prompt and all tokens generated so far?",
    ),
    "**The report.** *Under load, answers repeat themselves in the middle and then stop too early. "
    "The same questions, asked again at night, get perfect answers.* FastDeploy prefilled only the "
    'prompt when a preempted request started again (pull request 3080: "we should prefill all the '
    "tokens\"). vLLM's Gaudi plugin did the same, and also counted output tokens twice (pull "
    "request 524). vLLM has a report of incomplete answers after recomputation (issue 16832).",
    minutes=25,
)

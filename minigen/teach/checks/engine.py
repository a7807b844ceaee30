"""Checks of chapter 25: a loop that loses no token, repeats none, and gives each to its own."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from minigen.cache.blocks import BlockAllocator
from minigen.cache.manager import BlockManager
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import RequestError
from minigen.params import SamplingParams
from minigen.sequence import Chunk, SampledToken, Sequence, samples_of
from minigen.teach.checks.scheduling import next_token
from minigen.teach.exercises import Exercise
from minigen.teach.loop import StepLoop
from minigen.teach.messages import Wrong, expect, expect_equal
from minigen.trace import Trace

VOCAB = 50


class Stage:
    """The parts that a loop puts together, each of which writes down how it was called.

    `delivered` has (request, token, finish reason at that moment) in order; the stage is scheduler,
    runner and sampler in one.
    """

    def __init__(self, part: Any, budget: int = 16, num_blocks: int = 64):
        manager = BlockManager(BlockAllocator(num_blocks), None, 4, 8, num_blocks, Trace())
        self.manager, self.num_blocks = manager, num_blocks
        self.scheduler = ContinuousScheduler(manager, 8, budget)
        self.calls: list[str] = []
        self.delivered: list[tuple[int, int, str | None]] = []
        self.sequences: list[Sequence] = []
        self.chunks: list[Chunk] = []
        self.samples: list[Sequence] = []
        self.rows: Tensor | None = None
        self.loop = part(self, self, self.sample, self.deliver)

    def arrive(self, prompt: int, output: int, n: int = 1, number: int | None = None) -> Sequence:
        """A request of so many tokens, and answers, comes; its first answer's sequence."""
        first = len(self.sequences) + 1 if number is None else number
        prompt_ids = tuple((7 * first + place) % VOCAB for place in range(prompt))
        family = [
            Sequence(first + choice, prompt_ids, SamplingParams(), 0, output, frozenset(), choice)
            for choice in range(n)
        ]
        family[0].siblings = family[1:]
        self.loop.add(family[0])
        self.sequences += family
        return family[0]

    def step(self) -> int:
        """One step of the loop: the calls of the parts come in order, each once."""
        self.calls = []
        found = self.loop.step()
        calls = ["next_batch", "logits", "sample", "commit"]
        if not self.chunks:
            calls = ["next_batch"]
        elif not self.samples:
            calls.remove("sample")
        missing = [each for each in calls if each not in self.calls]
        expect(not missing, f"a step should call {', '.join(missing)}; yours did not.")
        expect(
            [each for each in self.calls if each != "commit" or self.chunks] == calls,
            f"a step called {', '.join(self.calls)}; it should call {', '.join(calls)}, each once.",
        )
        expect_equal(found, sum(each.num_tokens for each in self.chunks), "what step returns")
        return int(found)

    def drain(self, most: int = 60) -> None:
        """Step until all are answered; then every token was delivered once, to its own."""
        for _ in range(most):
            if all(each.finish_reason for each in self.sequences):
                break
            expect(self.step() > 0, "a step returned 0, though somebody should run.")
        left = [each.sequence_id for each in self.sequences if not each.finish_reason]
        expect(not left, f"after {most} steps requests {left} should have been answered.")
        self.expect_whole()

    def expect_whole(self) -> None:
        """Deliveries are the sequences' outputs, and nothing is kept of who has finished."""
        for sequence in self.sequences:
            number = sequence.sequence_id
            found = [(token, reason) for each, token, reason in self.delivered if each == number]
            tokens = [token for token, _ in found]
            expect_equal(tokens, sequence.output_ids, f"tokens delivered of request {number}")
            reasons: list[str | None] = [None] * len(found)
            if sequence.finish_reason in ("stop", "length") and found:
                reasons[-1] = sequence.finish_reason
            expect_equal(
                *([reason for _, reason in found], reasons),
                f"finish_reason of request {number} as its tokens are delivered",
            )
        expect_equal(sorted(self.loop.live), [], "ids in live when all have finished")
        lost = self.num_blocks - self.manager.num_available
        expect(not lost, f"{lost} blocks should have been given back.")

    def add(self, sequence: Sequence) -> None:
        """The scheduler's: queue it."""
        self.scheduler.add(sequence)

    def next_batch(self) -> list[Chunk]:
        """The scheduler's: who runs."""
        self.calls.append("next_batch")
        self.chunks = self.scheduler.next_batch()
        self.samples = samples_of(self.chunks)
        return list(self.chunks)

    def logits(self, chunks: SequenceOf[Chunk]) -> Tensor:
        """The runner's: a row for each sample, whose greatest number is the right token's."""
        self.calls.append("logits")
        expect(len(chunks) > 0, "the runner was given an empty batch; it should not be called.")
        expect(list(chunks) == self.chunks, "the runner should be given the chunks of next_batch.")
        self.manager.take_copies()
        token_ids = [(next_token(each) + each.choice) % VOCAB for each in self.samples]
        self.rows = torch.eye(VOCAB)[token_ids]
        return self.rows

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """The sampler's: the greatest of each row."""
        self.calls.append("sample")
        expect(len(self.samples) > 0, "nobody gets a token; the sampler should not be called.")
        expect(logits is self.rows, "the sampler should be given the runner's logits, all of them.")
        found = [each.sequence_id for each in sequences]
        right = [each.sequence_id for each in self.samples]
        expect_equal(found, right, "requests that the sampler is given, a row of logits for each")
        return [SampledToken(int(row.argmax())) for row in logits]

    def commit(
        self, chunks: SequenceOf[Chunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """The scheduler's: count, append."""
        if "commit" in self.calls:
            raise Wrong("commit was called twice in one step; each step should be counted once.")
        self.calls.append("commit")
        if not chunks:
            return []
        expect(list(chunks) == self.chunks, "commit should be given the chunks of next_batch.")
        expect_equal(len(tokens), len(self.samples), "the number of tokens that commit is given")
        right = [(next_token(each) + each.choice) % VOCAB for each in self.samples]
        expect_equal([each.token_id for each in tokens], right, "tokens that commit is given")
        return self.scheduler.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        """The scheduler's: let it go."""
        self.calls.append("abort")
        self.scheduler.abort(sequence)

    def deliver(self, sequence: Sequence, token: SampledToken) -> None:
        """Whoever asked for the sequence gets a token."""
        self.delivered.append((sequence.sequence_id, token.token_id, sequence.finish_reason))


def one_answer_is_delivered_token_by_token(part: Any) -> None:
    """a prompt of 5 tokens and an answer of 3:"""
    stage = Stage(part)
    sequence = stage.arrive(5, 3)
    expect_equal(sorted(stage.loop.live), [1], "ids in live after add")
    for count in (1, 2, 3):
        stage.step()
        expect_equal(len(stage.delivered), count, f"tokens delivered after step {count - 1}")
        expect_equal(len(sequence.output_ids), count, f"tokens of the answer after step {count - 1}")
    stage.expect_whole()


def a_step_without_work_does_nothing(part: Any) -> None:
    """nobody has come; and all have been answered:"""
    stage = Stage(part)
    expect_equal(stage.step(), 0, "what a step with nobody returns")
    stage.arrive(2, 1)
    stage.step()
    expect_equal(stage.step(), 0, "what a step after the last answer returns")


def a_chunk_of_a_prompt_gives_no_token(part: Any) -> None:
    """a prompt of 20 tokens in steps of 8: only the third step leads to a token:"""
    stage = Stage(part, budget=8)
    stage.arrive(20, 2)
    for number, count in enumerate((0, 0, 1, 2)):
        stage.step()
        expect_equal(len(stage.delivered), count, f"tokens delivered after step {number}")
    stage.expect_whole()


def each_row_goes_to_its_own(part: Any) -> None:
    """five requests that come and end at different steps, a long prompt among them:"""
    stage = Stage(part, budget=12)
    for prompt, output in ((3, 4), (25, 3), (2, 9)):
        stage.arrive(prompt, output)
    stage.step()
    stage.arrive(4, 1)
    stage.step()
    stage.arrive(1, 5)
    stage.drain()


def several_answers_to_one_prompt(part: Any) -> None:
    """three answers to one prompt, which fork from it, beside another request:"""
    stage = Stage(part)
    stage.arrive(6, 3, n=3)
    stage.arrive(2, 5)
    expect_equal(sorted(stage.loop.live), [1, 2, 3, 4], "ids in live: siblings are live, too")
    stage.drain()


def who_was_preempted_repeats_nothing(part: Any) -> None:
    """8 blocks of 4 tokens and four requests of up to 20: some are computed twice:"""
    stage = Stage(part, num_blocks=8)
    for _ in range(4):
        stage.arrive(8, 12)
    stage.drain()


def an_id_is_free_again_when_its_request_has_finished(part: Any) -> None:
    """a second request of the same id: refused while the first is live, welcome afterwards:"""
    stage = Stage(part)
    stage.arrive(3, 2, n=2)
    for number in (1, 2):
        try:
            stage.arrive(4, 1, number=number)
        except RequestError:
            continue
        raise Wrong(f"add took id {number}, which is in use; it should raise RequestError.")
    stage.step()
    stage.step()
    stage.sequences.clear()
    stage.delivered.clear()
    stage.arrive(4, 1, number=1)
    stage.drain()


def who_is_given_up_gets_no_more(part: Any) -> None:
    """one who runs and one who has just come are aborted, and one who does not exist:"""
    stage = Stage(part)
    running, _, waiting = (stage.arrive(3, 4) for _ in range(3))
    stage.step()
    late = stage.arrive(2, 2)
    for each in (running, late):
        each.finish_reason = "abort"
        stage.calls = []
        stage.loop.abort(each.sequence_id)
        expect_equal(stage.calls, ["abort"], "what abort calls of the scheduler")
    expect_equal(sorted(stage.loop.live), [2, waiting.sequence_id], "ids in live after two aborts")
    for number in (running.sequence_id, 99):
        try:
            stage.loop.abort(number)
        except RequestError:
            continue
        raise Wrong(f"abort({number}) of a request that is not live should raise RequestError.")
    stage.drain()


EXERCISES = (
    Exercise(
        "StepLoop",
        StepLoop,
        (
            one_answer_is_delivered_token_by_token,
            a_step_without_work_does_nothing,
            a_chunk_of_a_prompt_gives_no_token,
            each_row_goes_to_its_own,
            several_answers_to_one_prompt,
            who_was_preempted_repeats_nothing,
            an_id_is_free_again_when_its_request_has_finished,
            who_is_given_up_gets_no_more,
        ),
        (
            "A step is four calls: scheduler.next_batch(), runner.logits(chunks), "
            "sampler(logits, samples), scheduler.commit(chunks, tokens). Without chunks it ends "
            "after the first.",
            "samples_of(chunks) says whose the rows of the logits are. Ask it before commit, "
            "which counts the chunks as computed. Where it is empty, nobody samples, but the "
            "chunks must still be committed.",
            "commit returns (sequence, token) pairs. Those whose finish_reason is set leave live; "
            "all are delivered. Siblings (sequence.siblings) are live from the start, each by its "
            "own id, but the scheduler is given the first only.",
        ),
        "Write the loop. `add` queues a sequence; `step` asks the scheduler who runs, has the "
        "runner compute it and the sampler choose, commits, and delivers each token, once; it "
        "returns how many tokens went through the model. Whoever has finished is forgotten, so "
        "that its id is free again. `abort` lets somebody go. `samples_of` is in "
        "`minigen.sequence`, `RequestError` in `minigen.errors`.",
        """from minigen import SamplingParams
from minigen.teach import load_model
from minigen.teach.loop import answers_by_loop

llm = load_model()
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls")]
for text in answers_by_loop(llm, mine, prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(text))""",
        "A client may leave while its token is being delivered, and `deliver` then calls `abort`, "
        "perhaps of another request whose token has been chosen in the same step. What must `step` "
        "look at before each delivery?",
    ),
)

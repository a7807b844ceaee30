"""Engines around a toy model: its next token depends on all tokens before it.

So a part that loses, repeats or mixes up tokens changes an answer at once. `serve_toy` runs the
real engine with a KV cache that holds tokens. `SchedulerBench` and `LoopBench` are test benches for
a scheduler and for an engine's loop: the parts around it, which record what it does.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import PartError
from minigen.kv_cache import paged
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from minigen_course.grading.exercise import Wrong, expect, expect_equal

VOCAB = 97
MOST_STEPS = 500
SlotsOf = Callable[[list[int], int, int, int], list[int]]


def right_slots(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` earlier ones."""
    return paged.slots_of(block_ids, range(num_computed, num_computed + num_new), block_size)


class TokenMemory:
    """A KV cache whose slots hold tokens; `slots_of` says where new tokens are stored."""

    def __init__(self, manager: BlockManager, slots_of: SlotsOf = right_slots, factor: int = 31):
        self.manager, self.slots_of, self.factor = manager, slots_of, factor
        self.pool = [0] * (manager.block_size * (manager.tables.shape[1] + 1))

    def digests(self, chunks: SequenceOf[ScheduledChunk]) -> list[int]:
        """Store the chunks' tokens; return a digest of its context for each one with a sample."""
        size = self.manager.block_size
        for source, target in self.manager.pop_pending_copies():
            copied = self.pool[source * size : (source + 1) * size]
            self.pool[target * size : (target + 1) * size] = copied
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            slots = self.slots_of(sequence.block_ids, first, chunk.num_tokens, size)
            tokens = sequence.token_ids[first : first + chunk.num_tokens]
            for slot, token in zip(slots, tokens, strict=True):
                self.pool[slot] = token
        return [self._digest(chunk) for chunk in chunks if chunk.samples]

    def _digest(self, chunk: ScheduledChunk) -> int:
        length = chunk.sequence.num_computed + chunk.num_tokens
        digest = length
        for slot in right_slots(chunk.sequence.block_ids, 0, length, self.manager.block_size):
            digest = (digest * self.factor + self.pool[slot]) % 1_000_003
        return digest


@dataclass(frozen=True)
class ToyRunner:
    """A runner whose logits are largest at the digest of each context, modulo `VOCAB`."""

    memory: TokenMemory

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Tensor:
        """Return one row of logits for each chunk that gets a token."""
        return torch.eye(VOCAB)[[each % VOCAB for each in self.memory.digests(chunks)]]


@dataclass(frozen=True)
class Served:
    """The result of serving prompts: the answers, what clients received, and the work.

    `answers` are token ids per prompt, as the finished sequences hold them; `streamed` are the
    tokens that each client received.
    """

    answers: list[list[int]]
    streamed: list[list[int]]
    num_steps: int = field(compare=False)
    num_preempted: int = field(compare=False)


def serve_toy(
    prompts: SequenceOf[SequenceOf[int]],
    *,
    scheduler: Any = ContinuousScheduler,
    prefix_cache: Any = None,
    slots_of: SlotsOf = right_slots,
    num_blocks: int = 100,
    block_size: int = 4,
    max_tokens: int = 12,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
) -> Served:
    """Serve all prompts at once, with `max_tokens` each; few `num_blocks` lead to preemption.

    Parts are classes, which are built as in `LLM.load`. Raises `RuntimeError` if requests are
    unfinished after `MOST_STEPS` steps, and any error of a part.
    """
    trace, timeline = Trace(), Timeline()
    manager = toy_manager(num_blocks, block_size, max_num_seqs, prefix_cache, trace)
    planner = scheduler(manager, max_num_seqs, max_num_batched_tokens)
    engine = Engine(planner, ToyRunner(TokenMemory(manager, slots_of)), _greedy, trace)
    sequences = [toy_family(number, each, max_tokens)[0] for number, each in enumerate(prompts)]
    streamed: list[list[int]] = [[] for _ in sequences]
    for sequence in sequences:
        engine.add(sequence)
    num_steps = 0
    with trace.subscribed(timeline):
        while engine.has_work():
            num_steps += 1
            if num_steps > MOST_STEPS:
                raise RuntimeError(f"after {MOST_STEPS} steps some requests are unfinished")
            for sequence, token in engine.step():
                streamed[sequence.sequence_id].append(token.token_id)
    answers = [each.output_ids for each in sequences]
    return Served(answers, streamed, num_steps, timeline.work.preemptions)


def toy_manager(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    prefix_cache: Any = None,
    trace: Trace | None = None,
) -> BlockManager:
    """Return the block manager of a toy engine; `prefix_cache` is a class."""
    allocator = BlockAllocator(num_blocks)
    cache = None if prefix_cache is None else prefix_cache(allocator, block_size)
    trace = Trace() if trace is None else trace
    return BlockManager(allocator, cache, block_size, max_num_seqs, num_blocks, trace)


def toy_family(
    number: int, prompt_ids: Iterable[int], output: int, n: int = 1, logprobs: bool = False
) -> list[Sequence]:
    """Return the `n` sequences of a request, with ids from `number` on; the first leads them."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=0 if logprobs else None)
    given = (tuple(prompt_ids), params, 0, output, frozenset[int]())
    others = [Sequence(number + choice, *given, choice) for choice in range(1, n)]
    return [Sequence(number, *given, siblings=tuple(others)), *others]


def _greedy(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
    return [SampledToken(int(row.argmax())) for row in logits]


# The test benches: a model without a KV cache, whose next token follows from the sequence itself.

SMALL_VOCAB = 50
Batch = dict[int, int]  # request -> number of tokens


def next_token(sequence: Sequence) -> int:
    """Return the next token, which depends on all tokens before it, and on the choice."""
    return (sum(sequence.token_ids) * 7 + len(sequence) + sequence.choice) % SMALL_VOCAB


def _prompt(number: int, length: int) -> list[int]:
    return [(7 * number + place) % SMALL_VOCAB for place in range(length)]


def _expect_all_free(manager: BlockManager) -> None:
    lost = manager.tables.shape[1] - manager.num_available
    expect(not lost, f"{lost} blocks were never freed; all should be free when all requests end.")


class SchedulerBench:
    """A scheduler at work; `batches` has the number of tokens of each request, step by step.

    Requests are numbered from 1 in the order of their arrival.
    """

    def __init__(
        self,
        part: Any,
        max_num_seqs: int = 4,
        budget: int = 16,
        num_blocks: int = 64,
        block_size: int = 4,
    ):
        rows = max_num_seqs + 4  # more, so that the scheduler must keep the limit
        self.manager = toy_manager(num_blocks, block_size, rows)
        self.max_num_seqs = max_num_seqs
        made = part(self.manager, max_num_seqs, budget)
        self.scheduler = CheckedScheduler(made, self.manager, budget, patience=float("inf"))
        self.sequences: list[Sequence] = []
        self.batches: list[Batch] = []

    def arrive(self, prompt: int, output: int, logprobs: bool = False) -> int:
        """Add a request of `prompt` and `output` tokens, and return its number."""
        number = len(self.sequences) + 1
        self.sequences += toy_family(number, _prompt(number, prompt), output, logprobs=logprobs)
        self.scheduler.add(self.sequences[-1])
        return number

    def step(self) -> Batch:
        """Run one step, and return its batch."""
        try:
            chunks = self.scheduler.schedule()
            self._expect_limit()
            tokens = [SampledToken(next_token(each)) for each in samples_of(chunks)]
            found = {chunk.sequence.sequence_id: chunk.num_tokens for chunk in chunks}
            for chunk in chunks:
                chunk.sequence.prompt_logprobs += [None] * len(chunk.prompt_logprob_rows)
            self.scheduler.commit(chunks, tokens)
        except PartError as error:
            raise Wrong(f"step {len(self.batches)} should run, but {error}") from error
        self.batches.append(found)
        return found

    def abort(self, number: int) -> None:
        """Abort a request."""
        self.scheduler.abort(self.sequences[number - 1])

    def live(self) -> list[Sequence]:
        """Return the unfinished sequences."""
        return [each for each in self.sequences if each.finish_reason is None]

    def drain(self, most: int) -> None:
        """Run at most `most` steps; expect all requests to finish and all blocks to be free."""
        for _ in range(most):
            if not self.live():
                break
            if not self.step():
                waiting = [each.sequence_id for each in self.live()]
                raise Wrong(
                    f"step {len(self.batches) - 1} is empty, though requests {waiting} are "
                    "unfinished and blocks are free; one of them should run."
                )
        left = [each.sequence_id for each in self.live()]
        expect(not left, f"after {len(self.batches)} steps requests {left} should have finished.")
        self.expect_whole()

    def expect_whole(self) -> None:
        """Expect every answer to be as if its request ran alone, and all blocks to be free."""
        for sequence in self.sequences:
            (alone,) = toy_family(0, sequence.prompt_ids, sequence.max_output)
            for place, token in enumerate(sequence.output_ids):
                alone.append(next_token(alone))
                right = alone.output_ids[-1]
                expect(
                    token == right,
                    f"request {sequence.sequence_id}: token {place} of its answer is {token}; as "
                    f"if alone, it should be {right}.",
                )
        _expect_all_free(self.manager)

    def expect_batches(self, expected: list[Batch]) -> None:
        """Run one step per expected batch, and expect each step to compute it."""
        for right in expected:
            number, found = len(self.batches), self.step()
            expect(
                found == right,
                f"step {number} computed {_shown(found)}; it should be {_shown(right)}.",
            )

    def _expect_limit(self) -> None:
        holders = sorted(each.sequence_id for each in self.manager.rows)
        expect(
            len(holders) <= self.max_num_seqs,
            f"requests {holders} run; there should be at most {self.max_num_seqs}.",
        )


def _shown(batch: Batch) -> str:
    """Describe a batch in words."""
    parts = [
        f"{tokens} {'token' if tokens == 1 else 'tokens'} of request {number}"
        for number, tokens in sorted(batch.items())
    ]
    return ", ".join(parts) or "nothing"


class LoopBench:
    """Scheduler, runner and sampler in one object, which records how a loop calls them.

    `delivered` has (request, token, finish reason at that moment) in order.
    """

    def __init__(self, part: Any, budget: int = 16, num_blocks: int = 64):
        self.manager = toy_manager(num_blocks, 4, 8)
        self.scheduler = ContinuousScheduler(self.manager, 8, budget)
        self.calls: list[str] = []
        self.delivered: list[tuple[int, int, str | None]] = []
        self.sequences: list[Sequence] = []
        self.chunks: list[ScheduledChunk] = []
        self.samples: list[Sequence] = []
        self.rows: Tensor | None = None
        self.loop = part(self, self, self.sample, self.deliver)

    def arrive(self, prompt: int, output: int, n: int = 1, number: int | None = None) -> Sequence:
        """Add a request with `n` answers, and return the sequence of its first answer."""
        first = len(self.sequences) + 1 if number is None else number
        family = toy_family(first, _prompt(first, prompt), output, n)
        self.loop.add(family[0])
        self.sequences += family
        return family[0]

    def step(self) -> int:
        """Run one step of the loop; expect it to call the parts in order, each once."""
        self.calls = []
        found = self.loop.step()
        calls = ["schedule", "logits", "sample", "commit"]
        if not self.chunks:
            calls = ["schedule"]
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
        """Step until all sequences are finished; expect every token to be delivered once."""
        for _ in range(most):
            if all(each.finish_reason for each in self.sequences):
                break
            expect(self.step() > 0, "a step returned 0; it should run an unfinished request.")
        left = [each.sequence_id for each in self.sequences if not each.finish_reason]
        expect(not left, f"after {most} steps requests {left} should have finished.")
        self.expect_whole()

    def expect_whole(self) -> None:
        """Expect deliveries to be the sequences' outputs, and no state of finished sequences."""
        for sequence in self.sequences:
            number = sequence.sequence_id
            found = [(token, reason) for each, token, reason in self.delivered if each == number]
            tokens = [token for token, _ in found]
            expect_equal(tokens, sequence.output_ids, f"tokens delivered for request {number}")
            reasons: list[str | None] = [None] * len(found)
            if sequence.finish_reason in ("stop", "length") and found:
                reasons[-1] = sequence.finish_reason
            expect_equal(
                *([reason for _, reason in found], reasons),
                f"finish_reason of request {number} as its tokens are delivered",
            )
        expect_equal(sorted(self.loop.live), [], "ids in live when all have finished")
        _expect_all_free(self.manager)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, as the scheduler."""
        self.scheduler.add(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the chunks of a step, as the scheduler."""
        self.calls.append("schedule")
        self.chunks = self.scheduler.schedule()
        self.samples = samples_of(self.chunks)
        return list(self.chunks)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Tensor:
        """Return a row for each sample, largest at the right token, as the runner."""
        self.calls.append("logits")
        expect(len(chunks) > 0, "the runner was given an empty batch; it should not be called.")
        expect(list(chunks) == self.chunks, "the runner should be given the chunks of schedule.")
        self.manager.pop_pending_copies()
        self.rows = torch.eye(SMALL_VOCAB)[[next_token(each) for each in self.samples]]
        return self.rows

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """Return the token with the largest logit of each row, as the sampler."""
        self.calls.append("sample")
        expect(len(self.samples) > 0, "no sequence gets a token; the sampler should not be called.")
        expect(logits is self.rows, "the sampler should be given the runner's logits, all of them.")
        found = [each.sequence_id for each in sequences]
        right = [each.sequence_id for each in self.samples]
        expect_equal(found, right, "the requests given to the sampler, one per row of logits")
        return _greedy(logits, sequences)

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the computed tokens and append the new ones, as the scheduler."""
        expect(
            "commit" not in self.calls,
            "commit was called twice in one step; each step should be counted once.",
        )
        self.calls.append("commit")
        if not chunks:
            return []
        expect(list(chunks) == self.chunks, "commit should be given the chunks of schedule.")
        expect_equal(len(tokens), len(self.samples), "the number of tokens given to commit")
        right = [next_token(each) for each in self.samples]
        expect_equal([each.token_id for each in tokens], right, "the tokens given to commit")
        return self.scheduler.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence, as the scheduler."""
        self.calls.append("abort")
        self.scheduler.abort(sequence)

    def deliver(self, sequence: Sequence, token: SampledToken) -> None:
        """Deliver a token to the client of the sequence."""
        self.delivered.append((sequence.sequence_id, token.token_id, sequence.finish_reason))

"""The parts around an engine's loop, which record how they are called; for chapter 25."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen.trace.events import Trace
from minigen_course.grading.messages import Wrong, expect, expect_equal
from minigen_course.lab.scheduling import next_token

VOCAB = 50


class Stage:
    """Scheduler, runner and sampler in one object, which records how a loop calls them.

    `delivered` has (request, token, finish reason at that moment) in order.
    """

    def __init__(self, part: Any, budget: int = 16, num_blocks: int = 64):
        manager = BlockManager(BlockAllocator(num_blocks), None, 4, 8, num_blocks, Trace())
        self.manager, self.num_blocks = manager, num_blocks
        self.scheduler = ContinuousScheduler(manager, 8, budget)
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
        prompt_ids = tuple((7 * first + place) % VOCAB for place in range(prompt))
        given = (prompt_ids, SamplingParams(), 0, output, frozenset[int]())
        others = [Sequence(first + choice, *given, choice) for choice in range(1, n)]
        family = [Sequence(first, *given, siblings=tuple(others)), *others]
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
        lost = self.num_blocks - self.manager.num_available
        expect(not lost, f"{lost} blocks should have been freed.")

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
        token_ids = [(next_token(each) + each.choice) % VOCAB for each in self.samples]
        self.rows = torch.eye(VOCAB)[token_ids]
        return self.rows

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """Return the token with the largest logit of each row, as the sampler."""
        self.calls.append("sample")
        expect(len(self.samples) > 0, "no sequence gets a token; the sampler should not be called.")
        expect(logits is self.rows, "the sampler should be given the runner's logits, all of them.")
        found = [each.sequence_id for each in sequences]
        right = [each.sequence_id for each in self.samples]
        expect_equal(found, right, "the requests given to the sampler, one per row of logits")
        return [SampledToken(int(row.argmax())) for row in logits]

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the computed tokens and append the new ones, as the scheduler."""
        if "commit" in self.calls:
            raise Wrong("commit was called twice in one step; each step should be counted once.")
        self.calls.append("commit")
        if not chunks:
            return []
        expect(list(chunks) == self.chunks, "commit should be given the chunks of schedule.")
        expect_equal(len(tokens), len(self.samples), "the number of tokens given to commit")
        right = [(next_token(each) + each.choice) % VOCAB for each in self.samples]
        expect_equal([each.token_id for each in tokens], right, "the tokens given to commit")
        return self.scheduler.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence, as the scheduler."""
        self.calls.append("abort")
        self.scheduler.abort(sequence)

    def deliver(self, sequence: Sequence, token: SampledToken) -> None:
        """Deliver a token to the client of the sequence."""
        self.delivered.append((sequence.sequence_id, token.token_id, sequence.finish_reason))

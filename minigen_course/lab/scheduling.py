"""An engine without a model, for checks of a scheduler; it records the batch of each step.

The next token depends on all tokens before it. So recomputed tokens must come out the same, and a
token that goes to the wrong sequence is noticed.
"""

from typing import Any

from minigen.errors import PartError
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, Sequence, samples_of
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.trace.events import Trace
from minigen_course.grading.messages import Wrong, expect

Batch = dict[int, int]  # request -> number of tokens


class Hall:
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
        self.manager = BlockManager(
            BlockAllocator(num_blocks), None, block_size, rows, num_blocks, Trace()
        )
        self.num_blocks, self.max_num_seqs = num_blocks, max_num_seqs
        made = part(self.manager, max_num_seqs, budget)
        self.scheduler = CheckedScheduler(made, self.manager, budget, patience=float("inf"))
        self.sequences: list[Sequence] = []
        self.batches: list[Batch] = []

    def arrive(self, prompt: int, output: int, logprobs: bool = False) -> int:
        """Add a request of `prompt` and `output` tokens, and return its number."""
        number = len(self.sequences) + 1
        prompt_ids = tuple((7 * number + place) % 50 for place in range(prompt))
        self.sequences.append(_sequence(number, prompt_ids, output, logprobs))
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
            right = _answer_alone(sequence)[: len(sequence.output_ids)]
            if sequence.output_ids != right:
                place = next(
                    at
                    for at, (one, other) in enumerate(zip(sequence.output_ids, right, strict=True))
                    if one != other
                )
                raise Wrong(
                    f"request {sequence.sequence_id}: token {place} of its answer is "
                    f"{sequence.output_ids[place]}; as if alone, it should be {right[place]}."
                )
        lost = self.num_blocks - self.manager.num_available
        expect(
            not lost, f"{lost} blocks were never freed; all should be free when all requests end."
        )

    def _expect_limit(self) -> None:
        holders = sorted(each.sequence_id for each in self.manager.rows)
        if len(holders) > self.max_num_seqs:
            raise Wrong(f"requests {holders} run; there should be at most {self.max_num_seqs}.")


def expect_batches(hall: Hall, expected: list[Batch]) -> None:
    """Run one step per expected batch, and expect each step to compute it."""
    for right in expected:
        number, found = len(hall.batches), hall.step()
        if found != right:
            raise Wrong(f"step {number} computed {shown(found)}; it should be {shown(right)}.")


def shown(batch: Batch) -> str:
    """Describe a batch in words."""
    if not batch:
        return "nothing"
    return ", ".join(
        f"{tokens} {'token' if tokens == 1 else 'tokens'} of request {number}"
        for number, tokens in sorted(batch.items())
    )


def next_token(sequence: Sequence) -> int:
    """Return the next token, which depends on all tokens before it."""
    return (sum(sequence.token_ids) * 7 + len(sequence)) % 50


def _sequence(
    number: int, prompt_ids: tuple[int, ...], output: int, logprobs: bool = False
) -> Sequence:
    params = SamplingParams(prompt_logprobs=0 if logprobs else None)
    return Sequence(number, prompt_ids, params, 0, output, frozenset())


def _answer_alone(sequence: Sequence) -> list[int]:
    twin = _sequence(0, sequence.prompt_ids, sequence.max_output)
    while twin.finish_reason is None:
        twin.append(next_token(twin))
    return twin.output_ids

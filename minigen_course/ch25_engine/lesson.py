"""The engine's loop alone: no trace events, no error handling, only one caller.

It is the exercise of chapter 25; the package itself runs `minigen.engine.engine.Engine`.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from minigen.errors import RequestError
from minigen.llm import LLM
from minigen.protocols import Runner, Sampler, Scheduler
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, Sequence, samples_of


class StepLoop:
    """An engine loop that adds sequences, runs steps, and delivers each token when it is chosen.

    The loop calls `deliver(sequence, token)` once for each token, after the token is committed. So
    `finish_reason` is set when the last token of a sequence is delivered. `live` holds the
    unfinished sequences by id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        deliver: Callable[[Sequence, SampledToken], None],
    ):
        self.scheduler, self.runner, self.sampler = scheduler, runner, sampler
        self.deliver = deliver
        self.live: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings. Raises `RequestError` if an id is in use."""
        family = {each.sequence_id: each for each in (sequence, *sequence.siblings)}
        if self.live.keys() & family.keys():
            raise RequestError(
                f"One of the ids {list(family)} is in use; each live request needs its own."
            )
        self.live |= family
        self.scheduler.add(sequence)

    def step(self) -> int:
        """Run one step, and return how many tokens it computed, 0 if no sequence runs."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return 0
        samples = samples_of(chunks)
        logits = self.runner.logits(chunks)
        tokens = self.sampler(logits, samples) if samples else []
        for sequence, token in self.scheduler.commit(chunks, tokens):
            if sequence.finish_reason is not None:
                del self.live[sequence.sequence_id]
            self.deliver(sequence, token)
        return sum(chunk.num_tokens for chunk in chunks)

    def abort(self, sequence_id: int) -> None:
        """Abort an unfinished sequence. Raises `RequestError` if the id is not live."""
        if sequence_id not in self.live:
            raise RequestError(f"Request {sequence_id} is not live; only unfinished requests are.")
        self.scheduler.abort(self.live.pop(sequence_id))


def answers_by_loop(
    llm: LLM,
    make_loop: Callable[..., StepLoop],
    prompts: SequenceOf[str],
    params: SamplingParams | SequenceOf[SamplingParams] | None = None,
) -> list[str]:
    """Return the texts that a loop of yours generates with a loaded engine's parts.

    The parts are its scheduler, runner and sampler. Raises `RequestError` if another caller steps
    the engine, or if a step computes nothing although sequences are unfinished.
    """
    answers = {each.sequence: each for each in llm.process_requests(prompts, params)}
    engine = llm.engine
    if not engine.claim():
        raise RequestError("Another caller steps this engine; wait until it has finished.")
    try:
        loop = make_loop(
            *(engine.scheduler, engine.runner, engine.sampler),
            lambda sequence, token: answers[sequence].push(token),
        )
        first_ones = set(answers) - {each for own in answers for each in own.siblings}
        for sequence in answers:
            if sequence in first_ones:
                loop.add(sequence)
        while any(each.finish_reason is None for each in answers):
            if loop.step() == 0:
                raise RequestError(
                    "A step computed nothing; it should run one of the unfinished sequences."
                )
    finally:
        for sequence in answers:
            engine.scheduler.abort(sequence)
        engine.release()
    return [each.choice.text for each in answers.values()]

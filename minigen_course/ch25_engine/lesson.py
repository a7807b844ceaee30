"""The engine's loop without what surrounds it: no events, no errors, no several callers.

The exercise of chapter 25; `minigen.engine.engine.Engine` is what the package runs.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from minigen.errors import RequestError
from minigen.llm import LLM
from minigen.protocols import Runner, Sampler, Scheduler
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, Sequence, samples_of


class StepLoop:
    """Adds sequences, steps, and delivers each token as soon as it is chosen.

    `deliver(sequence, token)` is called once for each token, after it was committed, so that the
    last of a sequence finds its `finish_reason` set. `live` are the unfinished ones by id.
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
        """Queue a sequence, its siblings with it; raises `RequestError` if an id is in use."""
        family = {each.sequence_id: each for each in (sequence, *sequence.siblings)}
        if self.live.keys() & family.keys():
            raise RequestError(f"Of the ids {list(family)} one is in use.")
        self.live |= family
        self.scheduler.add(sequence)

    def step(self) -> int:
        """One pass through the model; returns its tokens, 0 if nobody runs."""
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
        """Give a sequence up; raises `RequestError` for one that is not live."""
        if sequence_id not in self.live:
            raise RequestError(f"No request of id {sequence_id} is live.")
        self.scheduler.abort(self.live.pop(sequence_id))


def answers_by_loop(
    llm: LLM,
    make_loop: Callable[..., StepLoop],
    prompts: SequenceOf[str],
    params: SamplingParams | SequenceOf[SamplingParams] | None = None,
) -> list[str]:
    """Texts that a loop of yours makes of a loaded engine's scheduler, runner and sampler.

    Raises `RequestError` if somebody else steps the engine, or the loop chooses nobody though
    sequences are live.
    """
    answers = {each.sequence: each for each in llm.process_requests(prompts, params)}
    engine = llm.engine
    if not engine.claim():
        raise RequestError("This engine is somebody else's to step.")
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
                raise RequestError("A step computed nothing, though sequences are live.")
    finally:
        for sequence in answers:
            engine.scheduler.abort(sequence)
        engine.release()
    return [each.choice.text for each in answers.values()]

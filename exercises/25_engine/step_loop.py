"""Exercise StepLoop of chapter 25 (core, 10 points, about 45 minutes).

Write the engine's loop. `add` queues a sequence. `step` gets the chunks from the scheduler,
computes the logits with the runner, chooses tokens with the sampler, commits them, and delivers
each token once. It returns how many tokens went through the model. Finished sequences leave
`live`, so that their ids are free again. `abort` removes an unfinished sequence. `add` raises
`RequestError` if an id is in use, and `abort` raises it if the id is not live. `samples_of` is
in `minigen.sequence`, `RequestError` in `minigen.errors`.

Check it:     minigen check exercises/25_engine/step_loop.py
With a hint:  minigen check exercises/25_engine/step_loop.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch25_engine.lesson import answers_by_loop

    llm = load_model()
    prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls")]
    for text in answers_by_loop(llm, mine, prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(repr(text))

Harder: A client may disconnect while its token is delivered. Then `deliver` calls `abort`,
perhaps for another request whose token was chosen in the same step. What must `step` check
before each delivery?
"""

# exercise: minigen_course.ch25_engine.lesson.StepLoop
from collections.abc import Callable

from minigen.protocols import Runner, Sampler, Scheduler
from minigen.sequence import SampledToken, Sequence


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
        raise NotImplementedError  # your turn

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings. Raises `RequestError` if an id is in use."""
        raise NotImplementedError  # your turn

    def step(self) -> int:
        """Run one step, and return how many tokens it computed, 0 if no sequence runs."""
        raise NotImplementedError  # your turn

    def abort(self, sequence_id: int) -> None:
        """Abort an unfinished sequence. Raises `RequestError` if the id is not live."""
        raise NotImplementedError  # your turn

"""Exercise SlotScheduler of chapter 24 (core, 10 points, about 25 minutes).

Write continuous batching. In each step, every running sequence gets one token. Waiting
sequences start in the order of arrival. A sequence starts as soon as a slot in the batch is
free, its whole prompt fits into the tokens that are left in the step, and there are blocks for
its longest answer (`allocate_longest` of `minigen.engine.static_batching` allocates the
blocks). No sequence overtakes another: if the first of the queue cannot start, all wait.
`commit` removes finished sequences from the batch and frees their blocks.

Check it:     minigen check exercises/24_scheduler/slot_scheduler.py
With a hint:  minigen check exercises/24_scheduler/slot_scheduler.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    llm = LLM.load(scheduler=mine, max_num_seqs=2)
    prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(repr(answer.text))
    print(llm.describe()["scheduler"])

Harder: A prompt longer than `max_num_batched_tokens` never starts here, and blocks all requests
behind it. Reject it in `add`, with a `RequestError` of `minigen.errors` that says the limit. It
cannot run alone in a larger step, because the engine refuses such a step: what did the runner
allocate for `max_num_batched_tokens` tokens when it was built?
"""

# exercise: minigen_course.ch24_scheduler.lesson.SlotScheduler
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence


class SlotScheduler:
    """Continuous batching: when a sequence finishes, the next takes its slot in the batch at once.

    Prompts are computed whole, in the order of arrival. A sequence starts only with blocks for its
    longest answer. At most `max_num_seqs` sequences run, and a step has at most
    `max_num_batched_tokens` tokens.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        raise NotImplementedError  # your turn

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        raise NotImplementedError  # your turn

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule a token per running sequence, then whole prompts, within all limits."""
        raise NotImplementedError  # your turn

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, append each sample's token, and return these pairs."""
        raise NotImplementedError  # your turn

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""
        raise NotImplementedError  # your turn

"""The loop: choose who runs, run the model, choose tokens, hand them on."""

import time

from minigen.protocols import Runner, Sampler, Scheduler
from minigen.sequence import Chunk, SampledToken, Sequence
from minigen.trace import EventKind, Trace


class Engine:
    """Runs many sequences side by side; everything that decides how is passed in."""

    def __init__(self, scheduler: Scheduler, runner: Runner, sampler: Sampler, trace: Trace):
        self.scheduler, self.runner, self.sampler = scheduler, runner, sampler
        self.trace = trace

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.scheduler.add(sequence)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return self.scheduler.has_work()

    def step(self) -> list[tuple[Sequence, SampledToken]]:
        """Move sequences on; returns those that got a token, each with its token.

        An error costs the sequences of that step, which are given up, and goes on to the caller;
        all others stay as they were.
        """
        begun = time.perf_counter_ns()
        chunks = self.scheduler.next_batch()
        if not chunks:
            return []
        try:
            progress = self.scheduler.commit(chunks, self._run(chunks))
        except Exception:
            for chunk in chunks:
                for sequence in (chunk.sequence, *chunk.sequence.siblings):
                    self.scheduler.abort(sequence)
            raise
        if self.trace.active:
            self._tell(chunks, begun)
        return progress

    def _run(self, chunks: list[Chunk]) -> list[SampledToken]:
        samples = [sample for chunk in chunks for sample in chunk.samples]
        logits = self.runner.logits(chunks)
        return self.sampler(logits, samples) if samples else []

    def _tell(self, chunks: list[Chunk], begun_ns: int) -> None:
        self.trace.emit(
            EventKind.STEP,
            sequences=len(chunks),
            tokens=sum(chunk.num_tokens for chunk in chunks),
            duration_ns=time.perf_counter_ns() - begun_ns,
        )

    def abort(self, sequence: Sequence) -> None:
        """Give a sequence up at once, waiting or running; one that is finished is let be."""
        self.scheduler.abort(sequence)

"""The engine loop: schedule sequences, run the model, sample tokens, return them."""

import threading
import time
from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from minigen.engine.processor_calls import ProcessorCalls
from minigen.errors import RequestError
from minigen.protocols import Runner, Sampler, Scheduler, Speculator
from minigen.sampling.logprobs import record_prompt_logprobs
from minigen.sequence import (
    SampledToken,
    ScheduledChunk,
    Sequence,
    is_decoding,
    rows_of,
    samples_of,
)
from minigen.trace.events import EventKind, Trace

_UNFINISHED = {"abort": EventKind.ABORTED, "error": EventKind.FAILED}


class Engine:
    """Runs many sequences concurrently, with the scheduler, runner and sampler passed in to it.

    `live` holds the unfinished sequences by id. The engine is not thread-safe: a caller must claim
    it before stepping it. With a `speculator`, the scheduler must verify drafts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        trace: Trace,
        speculator: Speculator | None = None,
    ):
        self.scheduler, self.runner, self.sampler = scheduler, runner, sampler
        self.trace, self.speculator = trace, speculator
        self.live: dict[int, Sequence] = {}
        self._calls = ProcessorCalls()
        self._failures: list[Exception] = []
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Reserve the engine for one caller until `release`; return False if it is taken."""
        return self._claimed.acquire(blocking=False)

    def release(self) -> None:
        """End the claim, so that another caller can claim the engine."""
        self._claimed.release()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings. Raises `RequestError` if an id is in use.

        If the scheduler raises an error, only these sequences fail, and the error is re-raised, as
        in `step`.
        """
        family = [sequence, *sequence.siblings]
        ids = [each.sequence_id for each in family]
        taken = self.live.keys() & ids
        if taken or len(set(ids)) < len(ids):
            raise RequestError(
                f"The request ids {ids} are in use or repeated: give each live sequence its own id."
            )
        self.live.update(zip(ids, family, strict=True))
        for each in family if self.trace.active else ():
            self.trace.emit(
                EventKind.QUEUED,
                each.sequence_id,
                prompt_tokens=len(each.prompt_ids),
                waited_ns=time.perf_counter_ns() - each.arrival_ns,
            )
        try:
            self.scheduler.add(sequence)
        except Exception as error:
            for each in family:
                self._fail(each, error)
            raise

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.live)

    def step(self) -> list[tuple[Sequence, SampledToken]]:
        """Run one step; return the sequences that got tokens, with each token.

        If the step raises an error, its sequences fail, with the error as their `error`, and it is
        re-raised. All other sequences stay as they were. A logits processor's error ends only its
        own sequence, and is not raised; see `take_failures`.
        """
        started_ns = time.perf_counter_ns()
        speculates = self._draft()
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        with self._fail_only([each for chunk in chunks for each in _family(chunk)]):
            self._emit_scheduled(chunks)
            rows = rows_of(chunks)
            drafted = {chunk.sequence: chunk.drafts for chunk in chunks if chunk.drafts}
            self._calls.prepare(samples_of(chunks))
            logits = self.runner.logits(chunks)
            if len(logits) > len(rows):
                logits = record_prompt_logprobs(logits, chunks)
            logits, failed = self._calls.apply(logits, rows, drafted)
            tokens = self.sampler(logits, rows) if rows else []
            progress = self.scheduler.commit(chunks, tokens)
        failed |= self._calls.accept(progress, failed)
        if failed:
            progress = [each for each in progress if each[0] not in failed]
        if self.speculator is not None and speculates:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            right = self.speculator.learn(drafted, progress, len(rows), num_tokens)
            self._emit_verified(drafted, right)
        self._finish_step(chunks, progress, started_ns)
        for sequence, error in failed.items():
            self._fail_alone(sequence, error)
        return progress

    def take_failures(self) -> list[Exception]:
        """Return the errors of logits processors since the last call; each ended one sequence."""
        failures, self._failures = self._failures, []
        return failures

    def abort(self, sequence_id: int) -> None:
        """Abort a sequence at once, waiting or running.

        Raises `RequestError` if the id is unknown or its sequence has finished.
        """
        self._end(self._find(sequence_id), "abort")

    def finish(self, sequence_id: int) -> None:
        """Finish a sequence for a reason that the engine does not see: a stop string.

        Raises `RequestError` if the id is unknown or its sequence has finished.
        """
        self._end(self._find(sequence_id), "stop")

    def _draft(self) -> bool:
        """Let the speculator set the drafts of this step; return whether it has anything to do."""
        if self.speculator is None or not self.speculator.serves(self.live.values()):
            return False
        decoding = [each for each in self.live.values() if is_decoding(each)]
        with self._fail_only(decoding):
            self.speculator.draft(decoding)
        return True

    def _find(self, sequence_id: int) -> Sequence:
        if sequence_id not in self.live:
            raise RequestError(f"No request with id {sequence_id} is waiting or running.")
        return self.live[sequence_id]

    @contextmanager
    def _fail_only(self, sequences: SequenceOf[Sequence]) -> Generator[None, None, None]:
        """On an error, fail only these sequences."""
        try:
            yield
        except Exception as error:
            for sequence in sequences:
                if sequence.sequence_id in self.live:
                    self._fail(sequence, error)
            raise

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence with an error; later errors become notes of this one."""
        sequence.error = error
        try:
            self._end(sequence, "error")
        except Exception as further:
            error.add_note(f"Aborting sequence {sequence.sequence_id} then failed: {further!r}")

    def _fail_alone(self, sequence: Sequence, error: Exception) -> None:
        """End one sequence with an error after a step that may have given it its last token."""
        self._failures.append(error)
        if sequence.finish_reason is None:
            self._fail(sequence, error)
            return
        sequence.error, sequence.finish_reason = error, "error"
        self._leave(sequence)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        sequence.processors = ()
        try:
            self.scheduler.abort(sequence)
        finally:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        del self.live[sequence.sequence_id]
        if self.speculator is not None:
            self.speculator.end(sequence)
        if self.trace.active:
            self._emit_end(sequence)

    def _finish_step(
        self,
        chunks: SequenceOf[ScheduledChunk],
        progress: SequenceOf[tuple[Sequence, SampledToken]],
        started_ns: int,
    ) -> None:
        """Drop finished sequences and emit the step's trace events."""
        active = self.trace.active
        for sequence, token in progress if active else ():
            self.trace.emit(EventKind.NEW_TOKEN, sequence.sequence_id, token=token.token_id)
        for sequence, _ in progress:  # one that finished may have got several tokens
            if sequence.finish_reason is not None and sequence.sequence_id in self.live:
                self._leave(sequence)
        if active:
            self.trace.emit(
                EventKind.STEP,
                sequences=len(chunks),
                tokens=sum(chunk.num_tokens for chunk in chunks),
                duration_ns=time.perf_counter_ns() - started_ns,
            )

    def _emit_scheduled(self, chunks: SequenceOf[ScheduledChunk]) -> None:
        for chunk in chunks if self.trace.active else ():
            self.trace.emit(
                EventKind.SCHEDULED,
                chunk.sequence.sequence_id,
                tokens=chunk.num_tokens,
                computed=chunk.sequence.num_computed,
            )

    def _emit_verified(
        self, drafted: Mapping[Sequence, SequenceOf[int]], right: Mapping[Sequence, int]
    ) -> None:
        for sequence, drafts in drafted.items() if self.trace.active else ():
            self.trace.emit(
                EventKind.VERIFIED,
                sequence.sequence_id,
                drafted=len(drafts),
                accepted=right.get(sequence, 0),
            )

    def _emit_end(self, sequence: Sequence) -> None:
        counts = {"output_tokens": len(sequence.output_ids)}
        kind = _UNFINISHED.get(sequence.finish_reason or "")
        if kind is None:
            kind = EventKind.FINISHED
            counts["stopped"] = int(sequence.finish_reason == "stop")
        self.trace.emit(kind, sequence.sequence_id, **counts)


def _family(chunk: ScheduledChunk) -> tuple[Sequence, ...]:
    return (chunk.sequence, *chunk.siblings)

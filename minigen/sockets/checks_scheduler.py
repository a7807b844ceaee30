"""A wrapper that checks a user's scheduler: tokens need slots, and results must not be lost.

A user's scheduler may be simpler than minigen's own, and need not import minigen: a batch may be a
list of `(sequence, num_tokens)`, `commit` may return nothing, and siblings are added one by one.
"""

import operator
import reprlib
import time
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, NoReturn

from minigen.errors import RequestError
from minigen.kv_cache.block_manager import BlockManager
from minigen.protocols import Scheduler
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen.sockets.resolve import items_of, name_of, part_error

PATIENCE = 5.0  # seconds without a batch while sequences are unfinished


class CheckedScheduler:
    """Checks a user's scheduler: its batches respect the limits, and its commits are complete.

    Siblings are added after their leader, one by one, so the scheduler need not support forks. It
    may schedule nothing for at most `patience` seconds while any sequence is unfinished.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: BlockManager,
        max_num_batched_tokens: int,
        patience: float = PATIENCE,
    ):
        self.scheduler, self.manager = scheduler, manager
        self.__name__ = name_of(scheduler)
        self.max_num_batched_tokens, self.patience = max_num_batched_tokens, patience
        self._live: set[Sequence] = set()
        self._idle_since: float | None = None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings, one by one."""
        self._idle_since = None
        for each in (sequence, *sequence.siblings):
            self.scheduler.add(each)
            self._live.add(each)

    def schedule(self) -> list[ScheduledChunk]:
        """Return the scheduler's batch as chunks. Raises `PartError` if it cannot run."""
        with self._naming("schedule"):
            returned = self.scheduler.schedule()
        wanted = "a list of (sequence, number of tokens)"
        items = items_of(self.scheduler, "schedule", returned, wanted)
        chunks = [self._chunk(item) for item in items]
        if len({chunk.sequence for chunk in chunks}) < len(chunks):
            self._complain("schedule", "named a sequence twice; each may have one chunk per step")
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens > self.max_num_batched_tokens:
            self._complain(
                "schedule",
                f"chose {num_tokens} tokens; max_num_batched_tokens allows "
                f"{self.max_num_batched_tokens}",
            )
        self._check_idle(chunks)
        return chunks

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Pass the tokens on. Raises `PartError` unless each sequence got exactly its own token."""
        before = {chunk.sequence: chunk.sequence.num_computed for chunk in chunks}
        expected = list(zip(samples_of(chunks), tokens, strict=True))
        lengths = {sequence: len(sequence.output_ids) for sequence, _ in expected}
        with self._naming("commit"):
            self.scheduler.commit(chunks, tokens)
        self._live -= {each for each, _ in expected if each.finish_reason is not None}
        for sequence, token in expected:
            new = [ids[lengths[sequence] :] for ids in (sequence.output_ids, _outputs(sequence))]
            if new != [[token.token_id]] * 2:
                self._complain(
                    "commit",
                    f"must append the token {token.token_id} to sequence {sequence.sequence_id}, "
                    f"once, by sequence.append(token.token_id); its last outputs are now "
                    f"{sequence.output_ids[-3:]}",
                )
            if sequence.finish_reason is not None and sequence in self.manager.rows:
                self._complain(
                    "commit",
                    f"left sequence {sequence.sequence_id}, which has finished, with "
                    f"{len(sequence.block_ids)} blocks: call manager.free(sequence)",
                )
        for chunk in chunks:
            sequence, end = chunk.sequence, before[chunk.sequence] + chunk.num_tokens
            if sequence in self.manager.rows and sequence.num_computed != end:
                self._complain(
                    "commit",
                    f"left sequence {sequence.sequence_id} with {sequence.num_computed} computed "
                    f"tokens; with the step's {chunk.num_tokens} it has {end}: call "
                    "manager.mark_computed(sequence, num_tokens) for each chunk, once",
                )
        return expected

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence, and free its blocks even if the scheduler does not."""
        try:
            if sequence in self._live:  # otherwise it was never added, or has finished
                self._live.discard(sequence)
                self.scheduler.abort(sequence)
        finally:
            self.manager.free(sequence)

    def _chunk(self, item: Any) -> ScheduledChunk:
        siblings = item.siblings if isinstance(item, ScheduledChunk) else ()
        try:
            pair = (item.sequence, item.num_tokens) if isinstance(item, ScheduledChunk) else item
            sequence, num_tokens = pair[0], operator.index(pair[1])
        except (TypeError, LookupError):
            sequence = None
        if not isinstance(sequence, Sequence):
            self._complain(
                "schedule",
                f"must return a list of (sequence, number of tokens); {reprlib.repr(item)} is not "
                "such a pair",
            )
        which = f"sequence {sequence.sequence_id}"
        if sequence not in self._live:
            self._complain("schedule", f"chose {which}, which has finished, or was never added")
        left = len(sequence) - sequence.num_computed
        if not 1 <= num_tokens <= left:
            self._complain(
                "schedule", f"chose {num_tokens} tokens of {which}, which has {left} to compute"
            )
        slots = len(sequence.block_ids) * self.manager.block_size
        if sequence not in self.manager.rows or slots < sequence.num_computed + num_tokens:
            self._complain(
                "schedule",
                f"chose {num_tokens} tokens of {which} without slots for them: call "
                "manager.allocate(sequence, max_tokens) once, then "
                "manager.allocate_slots(sequence, num_tokens) before each step",
            )
        return ScheduledChunk(sequence, num_tokens, siblings)

    def _check_idle(self, chunks: SequenceOf[ScheduledChunk]) -> None:
        now = time.monotonic()
        if chunks or not self._live:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > self.patience:
            self._complain(
                "schedule",
                f"has scheduled nothing for {self.patience:g} seconds, although {len(self._live)} "
                "sequences are unfinished",
            )

    @contextmanager
    def _naming(self, method: str) -> Generator[None, None, None]:
        """Report a wrong call of the block manager as the scheduler's error."""
        try:
            yield
        except RequestError as error:
            what = f"called the block manager in a wrong order. {error}".removesuffix(".")
            raise part_error(self.scheduler, method, what) from error

    def _complain(self, method: str, what: str) -> NoReturn:
        raise part_error(self.scheduler, method, what)


def _outputs(sequence: Sequence) -> list[int]:
    """Return the outputs from `token_ids`, where `sequence.append` adds them after the prompt."""
    return sequence.token_ids[len(sequence.prompt_ids) :]

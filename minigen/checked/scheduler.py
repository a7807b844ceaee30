"""A foreign scheduler, watched: it may not run what has no slots, nor lose what was computed.

It may be simpler than minigen's own, and need not import minigen: a batch may be a list of
`(sequence, num_tokens)`, `commit` may return nothing, and siblings come one by one.
"""

import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NoReturn

from minigen.cache.manager import BlockManager
from minigen.checked.complaint import complaint, name_of
from minigen.protocols import Scheduler
from minigen.sequence import Chunk, SampledToken, Sequence

MOST_IDLE_STEPS = 100_000


class CheckedScheduler:
    """A foreign scheduler: its batches keep to the limits, and its commits lose nothing.

    Siblings come to it as sequences of their own, so that it need not know of forks.
    """

    def __init__(self, scheduler: Scheduler, manager: BlockManager, max_batch_tokens: int):
        self.scheduler, self.manager = scheduler, manager
        self.__name__ = name_of(scheduler)
        self.max_batch_tokens = max_batch_tokens
        self._live: set[Sequence] = set()
        self._num_idle = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings, one by one."""
        family, sequence.siblings = [sequence, *sequence.siblings], []
        for each in family:
            self._live.add(each)
            self.scheduler.add(each)

    def next_batch(self) -> list[Chunk]:
        """The scheduler's choice, as chunks. Raises `PartError` if it is not a batch that runs."""
        returned = self.scheduler.next_batch()
        chunks = [self._chunk(item) for item in self._items("next_batch", returned)]
        if len({chunk.sequence for chunk in chunks}) < len(chunks):
            self._complain("next_batch", "named a sequence twice; each may have one chunk a step")
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens > self.max_batch_tokens:
            self._complain(
                "next_batch",
                f"chose {num_tokens} tokens; max_batch_tokens allows {self.max_batch_tokens}",
            )
        self._num_idle = 0 if chunks or not self._live else self._num_idle + 1
        if self._num_idle >= MOST_IDLE_STEPS:
            self._complain(
                "next_batch",
                f"chose nothing {MOST_IDLE_STEPS} times in a row, though {len(self._live)} "
                "sequences are unfinished",
            )
        return chunks

    def commit(
        self, chunks: SequenceOf[Chunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Hand the tokens on. Raises `PartError` if not each sequence got exactly its own."""
        before = {chunk.sequence: chunk.sequence.num_computed for chunk in chunks}
        expected = list(
            zip([each for chunk in chunks for each in chunk.samples], tokens, strict=True)
        )
        lengths = {sequence: len(sequence.output_ids) for sequence, _ in expected}
        self.scheduler.commit(chunks, tokens)
        for sequence, token in expected:
            if sequence.output_ids[lengths[sequence] :] != [token.token_id]:
                self._complain(
                    "commit",
                    f"must append the token {token.token_id} to sequence {sequence.sequence_id}, "
                    f"whose outputs now end in {sequence.output_ids[-3:]}",
                )
            if sequence.finish_reason is not None:
                self._live.discard(sequence)
                if sequence in self.manager.rows:
                    self._complain(
                        "commit",
                        f"left sequence {sequence.sequence_id}, which has finished, with "
                        f"{len(sequence.block_ids)} blocks; release them",
                    )
        for chunk in chunks:
            sequence, end = chunk.sequence, before[chunk.sequence] + chunk.num_tokens
            if sequence in self.manager.rows and sequence.num_computed != end:
                self._complain(
                    "commit",
                    f"left sequence {sequence.sequence_id} with {sequence.num_computed} computed "
                    f"tokens; with the step's {chunk.num_tokens} it has {end}",
                )
        return expected

    def abort(self, sequence: Sequence) -> None:
        """Give a sequence up; its blocks come back even if the scheduler forgets them."""
        self._live.discard(sequence)
        try:
            self.scheduler.abort(sequence)
        finally:
            self.manager.release(sequence)

    def _chunk(self, item: Any) -> Chunk:
        try:
            chunk = item if isinstance(item, Chunk) else Chunk(*item)
            sequence, num_tokens = chunk.sequence, operator.index(chunk.num_tokens)
        except TypeError:
            self._complain("next_batch", f"must return (sequence, number of tokens), not {item!r}")
        if sequence not in self._live:
            self._complain("next_batch", "chose a sequence that is not waiting or running")
        which = f"sequence {sequence.sequence_id}"
        left = len(sequence) - sequence.num_computed
        if not 1 <= num_tokens <= left:
            self._complain(
                "next_batch", f"chose {num_tokens} tokens of {which}, which has {left} to compute"
            )
        slots = len(sequence.block_ids) * self.manager.block_size
        if sequence not in self.manager.rows or slots < sequence.num_computed + num_tokens:
            self._complain(
                "next_batch",
                f"chose {num_tokens} tokens of {which} without slots for them: "
                "call manager.begin(sequence, max_tokens) once, then manager.reserve(sequence, "
                "num_tokens) before each step",
            )
        return Chunk(sequence, num_tokens)

    def _items(self, method: str, returned: Any) -> list[Any]:
        if not isinstance(returned, Iterable):
            self._complain(method, f"must return a list, not {type(returned).__name__}")
        return list(returned)

    def _complain(self, method: str, what: str) -> NoReturn:
        raise complaint(self.scheduler, method, what)

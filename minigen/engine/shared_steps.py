"""One engine shared by several callers: each gets the deltas of its own answers."""

import threading
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from minigen.engine.engine import Engine
from minigen.errors import RequestError
from minigen.outputs import RequestState, TokenDelta
from minigen.sequence import Sequence


class SharedSteps:
    """Steps one engine for several callers, in any thread, and gives each its own deltas.

    It claims the engine while any answer is unfinished.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        # Guards the attributes below and the engine. It is reentrant, because the garbage collector
        # can close an unused generator, and so abort its answers, at any moment.
        self._lock = threading.RLock()
        # Each unfinished answer, with the inbox of its caller.
        self._unfinished: dict[Sequence, tuple[RequestState, deque[TokenDelta | Exception]]] = {}
        self._stepping = False
        self._dropped: list[Sequence] = []  # dropped during a step, and removed at its end

    def run(self, answers: SequenceOf[RequestState]) -> Generator[TokenDelta, None, None]:
        """Step the engine until the answers are finished; yield their deltas.

        Closing the generator aborts unfinished answers. A step also computes the answers of other
        callers, whose deltas go into their inboxes. Sequences added directly to the engine get no
        deltas; read their tokens from the sequence.

        Raises `RequestError` if the engine is claimed outside of this object. Raises the error of a
        step that failed one of these answers, or that this caller ran and that failed no answer.
        """
        inbox: deque[TokenDelta | Exception] = deque()
        siblings = {each for answer in answers for each in answer.sequence.siblings}
        num_unfinished = len(answers)
        with ExitStack() as cleanup:
            with self._lock:
                if answers and not self._unfinished:
                    self._claim()
                for answer in answers:
                    cleanup.push(partial(self._drop, answer.sequence))
                    self._unfinished[answer.sequence] = (answer, inbox)
                for answer in answers:
                    if answer.sequence not in siblings:  # the engine adds siblings by itself
                        self.engine.add(answer.sequence)
            while num_unfinished > 0:
                while inbox:
                    delta = inbox.popleft()
                    if isinstance(delta, Exception):
                        raise delta
                    num_unfinished -= delta.finish_reason is not None
                    yield delta
                with self._lock:
                    if num_unfinished > 0 and not inbox:  # another thread's step may have filled it
                        self._step()

    def _claim(self) -> None:
        if not self.engine.claim():
            raise RequestError(
                "This model's engine already runs in its own thread, perhaps in a server: send "
                "requests to that server, or close it before you call generate, stream or chat."
            )

    def _drop(self, sequence: Sequence, _: Any, error: BaseException | None, *__: Any) -> None:
        """Remove an answer now, or after the current step, which still needs its sequence.

        `ExitStack` passes the type, value and traceback of the error that ends the block, or None.
        """
        with self._lock:
            if self._stepping:
                self._dropped.append(sequence)
            else:
                self._remove(sequence, error)

    def _remove(self, sequence: Sequence, error: BaseException | None) -> None:
        """Remove an answer, and abort it if it is unfinished.

        If the abort fails, its error becomes a note of `error`, or is raised without one.
        """
        del self._unfinished[sequence]
        try:
            if sequence.sequence_id in self.engine.live:
                self.engine.abort(sequence.sequence_id)
        except Exception as further:
            if not isinstance(error, Exception):
                raise
            error.add_note(f"Aborting sequence {sequence.sequence_id} then failed: {further!r}")
        finally:
            if not self._unfinished:
                self.engine.release()

    def _step(self) -> None:
        self._stepping = True
        try:
            self._advance()
        finally:
            self._stepping = False
            while self._dropped:
                with suppress(Exception):  # no caller is left to get the error
                    self._remove(self._dropped.pop(), None)

    def _advance(self) -> None:
        """Run one step, and put each token's delta, or the step's error, into the right inboxes."""
        try:
            progress = self.engine.step()
        except Exception as error:
            unfinished = self._unfinished.items()
            inboxes = [inbox for sequence, (_, inbox) in unfinished if sequence.error is error]
            if not inboxes:  # it ended no answer
                raise
            for inbox in inboxes:
                inbox.append(error)
            return
        for sequence, token in progress:
            if sequence not in self._unfinished:  # it was added to the engine directly
                continue
            answer, inbox = self._unfinished[sequence]
            inbox.append(answer.push(token))
            if answer.stops.stopped and sequence.finish_reason is None:
                self.engine.finish(sequence.sequence_id)

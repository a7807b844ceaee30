"""One engine stepped by several callers in turn, each of whom gets what is theirs."""

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
    """Turns an engine's steps into the deltas of answers, for callers in any threads.

    The engine is claimed as long as there are answers to be made.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        # Of all that follows, and of the engine. Reentrant, since a forgotten generator may be
        # collected, and so give up its answers, at any moment.
        self._lock = threading.RLock()
        self._growing: dict[Sequence, tuple[RequestState, deque[TokenDelta | Exception]]] = {}
        self._stepping = False
        self._forgotten: list[Sequence] = []  # collected by the thread that takes a step

    def run(self, answers: SequenceOf[RequestState]) -> Generator[TokenDelta, None, None]:
        """Step the engine until the answers are whole; those left when closed are given up.

        A step moves every answer on, also those of other callers: what comes for them goes into
        their inbox; who was added to the engine directly is told nothing, and has the tokens.
        Raises `RequestError` if the engine is somebody else's to step.
        """
        inbox: deque[TokenDelta | Exception] = deque()
        siblings = {each for answer in answers for each in answer.sequence.siblings}
        num_growing = len(answers)
        with ExitStack() as at_the_end:
            with self._lock:
                if answers and not self._growing:
                    self._claim()
                for answer in answers:
                    at_the_end.push(partial(self._give_up, answer.sequence))
                    self._growing[answer.sequence] = (answer, inbox)
                for answer in answers:
                    if answer.sequence not in siblings:
                        self.engine.add(answer.sequence)
            while num_growing > 0:
                while inbox:
                    delta = inbox.popleft()
                    if isinstance(delta, Exception):
                        raise delta
                    num_growing -= delta.finish_reason is not None
                    yield delta
                with self._lock:
                    if num_growing > 0 and not inbox:  # a step of another thread's may have helped
                        self._step()

    def _claim(self) -> None:
        if not self.engine.claim():
            raise RequestError(
                "This model's engine runs in a thread of its own, a server's perhaps: ask that "
                "one, or close it before generate, stream or chat."
            )

    def _give_up(self, sequence: Sequence, _: Any, error: BaseException | None, *__: Any) -> None:
        with self._lock:
            if self._stepping:  # a step must not lose a sequence halfway
                self._forgotten.append(sequence)
            else:
                self._forget(sequence, error)

    def _forget(self, sequence: Sequence, error: BaseException | None) -> None:
        """Forget an answer, whole or not; an error that ended it stays the one told of."""
        del self._growing[sequence]
        try:
            if sequence.sequence_id in self.engine.live:
                self.engine.abort(sequence.sequence_id)
        except Exception as further:
            if not isinstance(error, Exception):
                raise
            error.add_note(f"Giving up {sequence.sequence_id} then failed: {further!r}")
        finally:
            if not self._growing:
                self.engine.release()

    def _step(self) -> None:
        self._stepping = True
        try:
            self._move_on()
        finally:
            self._stepping = False
            while self._forgotten:
                with suppress(Exception):  # nobody is left to hear of it
                    self._forget(self._forgotten.pop(), None)

    def _move_on(self) -> None:
        try:
            progress = self.engine.step()
        except Exception as error:
            growing = self._growing.items()
            inboxes = [inbox for sequence, (_, inbox) in growing if sequence.error is error]
            if not inboxes:  # nobody's in particular
                raise
            for inbox in inboxes:
                inbox.append(error)
            return
        for sequence, token in progress:
            if sequence not in self._growing:  # it was added to the engine directly
                continue
            answer, inbox = self._growing[sequence]
            inbox.append(answer.push(token))
            if answer.stops.stopped and sequence.finish_reason is None:
                self.engine.finish(sequence.sequence_id)

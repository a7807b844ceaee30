"""The engine in a thread of its own, for callers in many others: a queue for each request.

Only this thread touches the engine; all others leave their wishes in a queue, and are told what
comes of them by a function of theirs, which it calls.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from minigen.engine.engine import Engine
from minigen.errors import EngineStoppedError, RequestError, WorkerError
from minigen.sequence import SampledToken, Sequence

# A token; None when there will be no more (given up); or what went wrong.
TokenEvent = SampledToken | Exception | None
Deliver = Callable[[Sequence, TokenEvent], None]
Message = tuple[
    Sequence, TokenEvent, str | None
]  # and whether that was the last: the finish reason

logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine whenever it has work. Use it as a context, or `close` it.

    Meanwhile nobody else may step the engine. Raises `RequestError` if the engine has work
    already, of which nobody could be told, or another thread.
    """

    def __init__(self, engine: Engine):
        if engine.has_work():
            raise RequestError(
                f"The engine has {len(engine.live)} requests under way: let them end, or close "
                "their streams, before it gets a thread."
            )
        if not engine.claim():
            raise RequestError("The engine has another thread of its own: close that one first.")
        self.engine = engine
        self.error: BaseException | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: dict[int, tuple[Sequence, Deliver]] = {}
        self._on_step_end: list[Callable[[], None]] = []
        # Of what follows: who may still be answered. Reentrant, since a forgotten iterator may be
        # collected, and so abort its request, at any moment.
        self._lock = threading.RLock()
        self._stopped = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="minigen-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still answered."""
        return not self._stopped

    def submit(self, sequence: Sequence, deliver: Deliver) -> None:
        """Queue a sequence and its siblings; `deliver(sequence, event)` is called for each of them.

        It is called in the engine's thread, so it must be quick: with every token, of which the
        last has `sequence.finish_reason` set; with None if the sequence was aborted; with an
        exception if it failed. If it raises, its request is given up. Raises `EngineStoppedError`
        if the thread has ended, `RequestError` if an id is in use.
        """
        family = {each.sequence_id: (each, deliver) for each in (sequence, *sequence.siblings)}
        with self._lock:
            self._check_alive()
            taken = sorted(self._deliver.keys() & family.keys())
            if taken or len(family) <= len(sequence.siblings):
                raise RequestError(
                    f"The request ids {taken or sorted(family)} are not free: each is used once."
                )
            self._deliver |= family
            # Under the lock, so that nobody's wish to abort it can come before this one.
            self._commands.put(lambda: self._add(sequence))

    def tokens(self, sequence: Sequence) -> Generator[tuple[Sequence, SampledToken], None, None]:
        """Queue a sequence, and yield its tokens and its siblings' as they come.

        The sequences themselves may be further on than what was yielded. Closing the iterator
        aborts what is unfinished. Raises what a step raised, or `EngineStoppedError` if the thread
        ends meanwhile.
        """
        sequence_ids = {each.sequence_id for each in (sequence, *sequence.siblings)}
        inbox: SimpleQueue[Message] = SimpleQueue()
        self.submit(sequence, lambda whose, event: inbox.put((whose, event, whose.finish_reason)))
        tokens = self._take(sequence_ids, inbox)
        next(tokens)  # enter it, so that closing it aborts even if nothing was taken
        return tokens

    def abort(self, sequence_id: int) -> None:
        """Give a sequence up soon. Raises `RequestError` for an id that is not live."""
        with self._lock:
            self._check_alive()
            if sequence_id not in self._deliver:
                raise RequestError(f"No request of id {sequence_id} is waiting or running.")
            self._commands.put(lambda: self._abort(sequence_id))

    def finish(self, sequence_id: int) -> None:
        """End a sequence at once whose text is whole, by a stop string; nothing more is delivered.

        Only to be called by a `deliver` that has just got a token of it. Raises `RequestError` for
        a sequence that has finished.
        """
        assert threading.current_thread() is self._thread, "only the engine's thread ends at once"
        self.engine.finish(sequence_id)
        with self._lock:
            del self._deliver[sequence_id]

    def on_step_end(self, function: Callable[[], None]) -> None:
        """Have `function()` called in the engine's thread whenever all event of a step are told.

        So whoever passes event on may do it for all of them at once. If it raises, it is called no
        more.
        """
        self._on_step_end.append(function)

    def call(self, function: Callable[[Engine], None]) -> None:
        """Have `function(engine)` called in the engine's thread between two steps.

        What it raises is logged, and ends nothing. Raises `EngineStoppedError` if the thread has
        ended.
        """
        with self._lock:
            self._check_alive()
            self._commands.put(lambda: self._call(function))

    def close(self, timeout: float | None = 10) -> None:
        """End the thread after the step under way; whoever waits gets an `EngineStoppedError`.

        Their sequences are given up, so that the engine is free for another thread.
        """
        self._closing = True
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:  # else it ends after this call
            self._thread.join(timeout)

    def _take(self, growing: set[int], inbox: "SimpleQueue[Message]") -> Generator[Any, None, None]:
        try:
            yield  # to `tokens`, which has entered us
            while growing:
                sequence, event, finish_reason = inbox.get()
                if isinstance(event, Exception):
                    raise event
                if finish_reason is not None:
                    growing.discard(sequence.sequence_id)
                if event is not None:
                    yield sequence, event
        finally:
            for sequence_id in growing:
                self._abort_if_live(sequence_id)

    def _abort_if_live(self, sequence_id: int) -> None:
        with suppress(RequestError, EngineStoppedError):  # it has ended meanwhile
            self.abort(sequence_id)

    def _check_alive(self) -> None:
        if self._stopped:
            raise EngineStoppedError("The engine's thread has ended.") from self.error

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._drain_commands()
                if self.engine.has_work():
                    self._step()
                self._call_on_step_end()
        except WorkerError as error:  # it says all, and whoever waits is told
            logger.info("the engine's thread ends: %s", error)
            self.error = error
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self.error = error
        finally:
            self._stop()

    def _drain_commands(self) -> None:
        """Do what others asked for; wait for something while there is nothing to do."""
        while not (self._closing or (self._commands.empty() and self.engine.has_work())):
            self._commands.get()()
            self._call_on_step_end()

    def _add(self, sequence: Sequence) -> None:
        try:
            self.engine.add(sequence)
        except Exception as error:
            self._tell_failed(error)

    def _step(self) -> None:
        try:
            progress = self.engine.step()
        except Exception as error:
            self._tell_failed(error)
            return
        for sequence, token in progress:
            self._tell(sequence, token)

    def _tell_failed(self, error: Exception) -> None:
        """Tell those whom an error has ended; raise it if it is the fault of none in particular."""
        with self._lock:
            failed = [each for each, _ in self._deliver.values() if each.error is error]
        if not failed or isinstance(error, EngineStoppedError):  # nothing can be relied on any more
            raise error
        logger.exception("the engine failed at %d requests", len(failed))
        for sequence in failed:
            self._tell(sequence, error)

    def _call_on_step_end(self) -> None:
        for function in list(self._on_step_end):
            try:
                function()
            except Exception:
                logger.exception("event could not be passed on")
                self._on_step_end.remove(function)

    def _call(self, function: Callable[[Engine], None]) -> None:
        try:
            function(self.engine)
        except Exception:  # one caller's mistake is not everybody's
            logger.exception("a function that was called between two steps failed")

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self.engine.live:  # else it has just finished
            sequence = self.engine.live[sequence_id]
            self.engine.abort(sequence_id)
            self._tell(sequence, None)

    def _tell(self, sequence: Sequence, event: TokenEvent) -> None:
        with self._lock:
            _, deliver = self._deliver[sequence.sequence_id]
            if sequence.finish_reason is not None:
                del self._deliver[sequence.sequence_id]
        try:
            deliver(sequence, event)
        except Exception:  # one caller's mistake is not everybody's
            logger.exception("nobody took the event of request %d", sequence.sequence_id)
            self._abort(sequence.sequence_id)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            waiting, self._deliver = list(self._deliver.values()), {}
        for sequence, deliver in waiting:
            error = EngineStoppedError("The engine's thread has ended.")
            error.__cause__ = self.error
            try:
                if sequence.sequence_id in self.engine.live:
                    self.engine.abort(sequence.sequence_id)
            except Exception:
                logger.exception("request %d could not be given up", sequence.sequence_id)
            try:
                deliver(sequence, error)
            except Exception:  # the others wait, too
                logger.exception("nobody took the event of request %d", sequence.sequence_id)
        self._call_on_step_end()
        self.engine.release()

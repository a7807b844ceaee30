"""An engine in its own thread, for callers in many other threads.

Only this thread touches the engine. Callers put commands into a queue, and the thread reports each
request's events by calling a function that the caller passed in.
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

# A token; None if the request was aborted; or the exception that ended it.
TokenEvent = SampledToken | Exception | None
Deliver = Callable[[Sequence, TokenEvent], None]
Message = tuple[Sequence, TokenEvent, str | None]  # the last item: the finish reason, if it ended

logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine whenever it has work. Use it as a context manager, or `close` it.

    The thread claims the engine, so no other caller can step it. Raises `RequestError` if the
    engine already has requests, for there is no function to report them to, or is claimed.
    """

    def __init__(self, engine: Engine):
        if engine.has_work():
            raise RequestError(
                f"The engine has {len(engine.live)} unfinished requests: let them end, or close "
                "their streams, before you start a thread for it."
            )
        if not engine.claim():
            raise RequestError("Another thread already steps this engine: close that one first.")
        self.engine = engine
        self.error: BaseException | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: dict[int, tuple[Sequence, Deliver]] = {}
        self._on_step_end: list[Callable[[], None]] = []
        # Guards `_deliver` and `_stopped`. It is reentrant, because the garbage collector can close
        # an unused iterator, and so abort its request, at any moment.
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
        """Whether the thread still accepts and answers requests."""
        return not self._stopped

    def submit(self, sequence: Sequence, deliver: Deliver) -> None:
        """Queue a sequence and its siblings, and call `deliver(sequence, event)` for their events.

        An event is a token, None if the sequence was aborted, or an exception if it failed. At the
        last token, `sequence.finish_reason` is set. The engine's thread calls `deliver`, so it must
        be fast; if it raises, the request is aborted. Raises `EngineStoppedError` if the thread has
        ended, and `RequestError` if an id is in use.
        """
        family = {each.sequence_id: (each, deliver) for each in (sequence, *sequence.siblings)}
        with self._lock:
            self._check_alive()
            taken = sorted(self._deliver.keys() & family.keys())
            if taken or len(family) <= len(sequence.siblings):
                raise RequestError(
                    f"The request ids {taken or sorted(family)} are in use or repeated: give each "
                    "live sequence its own id."
                )
            self._deliver |= family
            # Under the lock, so that no command to abort it can come before this command.
            self._commands.put(lambda: self._add(sequence))

    def tokens(self, sequence: Sequence) -> Generator[tuple[Sequence, SampledToken], None, None]:
        """Queue a sequence, and yield its tokens and those of its siblings as they arrive.

        The sequences may already hold more tokens than the iterator has yielded. Closing the
        iterator aborts those that are unfinished. Raises the error of a failed step, or
        `EngineStoppedError` if the thread ends before the sequences do.
        """
        sequence_ids = {each.sequence_id for each in (sequence, *sequence.siblings)}
        inbox: SimpleQueue[Message] = SimpleQueue()
        self.submit(sequence, lambda each, event: inbox.put((each, event, each.finish_reason)))
        tokens = self._stream(sequence_ids, inbox)
        next(tokens)  # enter its `try`, so that closing it aborts even before the first token
        return tokens

    def abort(self, sequence_id: int) -> None:
        """Abort a sequence after the current step. Raises `RequestError` if the id is not live."""
        with self._lock:
            self._check_alive()
            if sequence_id not in self._deliver:
                raise RequestError(f"No request with id {sequence_id} is waiting or running.")
            self._commands.put(lambda: self._abort(sequence_id))

    def finish(self, sequence_id: int) -> None:
        """Finish a sequence at once, because of a stop string; it gets no more events.

        Call it only from a `deliver` that has just received a token of this sequence. Raises
        `RequestError` if the sequence has finished.
        """
        assert threading.current_thread() is self._thread, "call finish in the engine's thread"
        self.engine.finish(sequence_id)
        with self._lock:
            del self._deliver[sequence_id]

    def on_step_end(self, function: Callable[[], None]) -> None:
        """Call `function()` in the engine's thread after all events of each step.

        A caller that forwards events can then forward those of a whole step at once. If the
        function raises, it is not called again.
        """
        self._on_step_end.append(function)

    def call(self, function: Callable[[Engine], None]) -> None:
        """Call `function(engine)` in the engine's thread between two steps.

        If the function raises, the error is logged and the thread continues. Raises
        `EngineStoppedError` if the thread has ended.
        """
        with self._lock:
            self._check_alive()
            self._commands.put(lambda: self._call(function))

    def close(self, timeout: float | None = 10) -> None:
        """End the thread after the current step; unfinished requests get an `EngineStoppedError`.

        Their sequences are aborted and the claim on the engine ends, so another thread can use it.
        Waits at most `timeout` seconds.
        """
        self._closing = True
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:  # else it ends after this call
            self._thread.join(timeout)

    def _stream(
        self, unfinished: set[int], inbox: "SimpleQueue[Message]"
    ) -> Generator[Any, None, None]:
        try:
            yield  # to `tokens`, which only enters the `try`
            while unfinished:
                sequence, event, finish_reason = inbox.get()
                if isinstance(event, Exception):
                    raise event
                if finish_reason is not None:
                    unfinished.discard(sequence.sequence_id)
                if event is not None:
                    yield sequence, event
        finally:
            for sequence_id in unfinished:
                self._abort_if_live(sequence_id)

    def _abort_if_live(self, sequence_id: int) -> None:
        with suppress(RequestError, EngineStoppedError):  # it has ended in the meantime
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
        except WorkerError as error:  # its message is enough, and all waiting callers get it
            logger.info("the engine's thread ended: %s", error)
            self.error = error
        except BaseException as error:
            logger.exception("the engine's thread ended")
            self.error = error
        finally:
            self._stop()

    def _drain_commands(self) -> None:
        """Run the queued commands; while the engine has no work, block until one arrives."""
        while not (self._closing or (self._commands.empty() and self.engine.has_work())):
            self._commands.get()()
            self._call_on_step_end()

    def _add(self, sequence: Sequence) -> None:
        try:
            self.engine.add(sequence)
        except Exception as error:
            self._dispatch_error(error)

    def _step(self) -> None:
        try:
            progress = self.engine.step()
        except Exception as error:
            self._dispatch_error(error)
            return
        for sequence, token in progress:
            self._dispatch(sequence, token)

    def _dispatch_error(self, error: Exception) -> None:
        """Report an error to the sequences that it ended; re-raise it if it ended none."""
        with self._lock:
            failed = [each for each, _ in self._deliver.values() if each.error is error]
        if not failed or isinstance(error, EngineStoppedError):  # the engine cannot continue
            raise error
        logger.exception("an error in the engine ended %d requests", len(failed))
        for sequence in failed:
            self._dispatch(sequence, error)

    def _call_on_step_end(self) -> None:
        for function in list(self._on_step_end):
            try:
                function()
            except Exception:
                logger.exception("a function called at the end of a step failed")
                self._on_step_end.remove(function)

    def _call(self, function: Callable[[Engine], None]) -> None:
        try:
            function(self.engine)
        except Exception:  # one caller's error must not end the others' requests
            logger.exception("a function called between two steps failed")

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self.engine.live:  # otherwise it has just finished
            sequence = self.engine.live[sequence_id]
            self.engine.abort(sequence_id)
            self._dispatch(sequence, None)

    def _dispatch(self, sequence: Sequence, event: TokenEvent) -> None:
        """Pass an event to the request's `deliver`; abort the request if `deliver` raises."""
        with self._lock:
            _, deliver = self._deliver[sequence.sequence_id]
            if sequence.finish_reason is not None:
                del self._deliver[sequence.sequence_id]
        try:
            deliver(sequence, event)
        except Exception:  # one caller's error must not end the others' requests
            logger.exception("delivery to request %d failed", sequence.sequence_id)
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
                logger.exception("request %d could not be aborted", sequence.sequence_id)
            try:
                deliver(sequence, error)
            except Exception:  # the other requests still need their event
                logger.exception("delivery to request %d failed", sequence.sequence_id)
        self._call_on_step_end()
        self.engine.release()

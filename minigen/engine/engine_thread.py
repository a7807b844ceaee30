"""An engine in its own thread, for callers in many other threads or in an event loop."""

import logging
import threading
from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from queue import SimpleQueue
from typing import Any

from minigen.engine.dispatcher import Dispatcher, Event, at_once, deltas_of
from minigen.engine.engine import Engine
from minigen.errors import EngineStoppedError, GrammarError, RequestError, WorkerError
from minigen.outputs import RequestState, TokenDelta

logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine whenever it has work. Use it as a context manager, or `close` it.

    Submit requests to its `dispatcher`, which documents `hand_over`, or `run` them. The thread
    claims the engine, so no other caller can step it. Raises `RequestError` if the engine already
    has requests, or is claimed.
    """

    def __init__(self, engine: Engine, hand_over: Callable[[Callable[[], None]], object] = at_once):
        if engine.has_work():
            raise RequestError(
                f"The engine has {len(engine.live)} unfinished requests: let them end, or close "
                "their streams, before you start a thread for it."
            )
        if not engine.claim():
            raise RequestError("Another thread already steps this engine: close that one first.")
        self.dispatcher = Dispatcher(engine, hand_over, _log)
        self.error: BaseException | None = None
        self._engine = engine
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
        return self.dispatcher.is_open

    def run(self, answers: SequenceOf[RequestState]) -> Generator[TokenDelta, None, None]:
        """Submit a request, and yield its deltas as they arrive, in a thread that may wait.

        The answers may already hold more tokens than the iterator has yielded. Closing the iterator
        aborts those that are unfinished. Raises the error that ends the request.
        """
        inbox: SimpleQueue[Event] = SimpleQueue()
        self.dispatcher.submit(answers, inbox.put)
        deltas = self._deltas(answers, inbox)
        next(deltas)  # enter its `try`, so that closing it aborts even before the first token
        return deltas

    def close(self, timeout: float | None = 10) -> None:
        """End the thread after the current step; unfinished requests get an `EngineStoppedError`.

        Their sequences are aborted and the claim on the engine ends, so another thread can use it.
        Waits at most `timeout` seconds.
        """
        self._closing = True
        self.dispatcher.commands.put(lambda: None)
        if threading.current_thread() is not self._thread:  # else it ends after this call
            self._thread.join(timeout)

    def _deltas(
        self, answers: SequenceOf[RequestState], inbox: "SimpleQueue[Event]"
    ) -> Generator[Any, None, None]:
        try:
            yield  # to `run`, which only enters the `try`
            yield from deltas_of(len(answers), inbox.get)
        finally:
            self.dispatcher.abort(answers)

    def _loop(self) -> None:
        try:
            while not self._closing:
                if self._engine.has_work():
                    self.dispatcher.step()
                else:
                    self.dispatcher.wait()
        except WorkerError as error:  # its message is enough, and all waiting callers get it
            logger.info("the engine's thread ended: %s", error)
            self.error = error
        except BaseException as error:
            logger.exception("the engine's thread ended")
            self.error = error
        finally:
            self.dispatcher.stop(self.error)
            self._engine.release()


def _log(error: Exception) -> None:
    if isinstance(error, GrammarError):  # its client's own
        logger.info("a request ended: %s", error)
    elif not isinstance(error, EngineStoppedError):  # else it is logged as the thread's end
        logger.error("an error in the engine ended requests", exc_info=error)

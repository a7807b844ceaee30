"""The engine in a thread of its own, for callers in many others: a queue for each request.

Only this thread touches the engine; all others leave their wishes in a queue, and are told what
comes of them by a function of theirs, which it calls.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue

from minigen.engine.engine import Engine
from minigen.errors import EngineStoppedError, RequestError
from minigen.sequence import SampledToken, Sequence

# A token; None when there will be no more (given up); or what went wrong.
News = SampledToken | Exception | None
Deliver = Callable[[Sequence, News], None]

logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine whenever it has work. Use it as a context, or `close` it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: BaseException | None = None
        self._wishes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: dict[int, tuple[Sequence, Deliver]] = {}
        self._lock = threading.Lock()  # of what follows: who may still be answered
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
        """Queue a sequence and its siblings; `deliver(sequence, news)` is called for each of them.

        It is called in the engine's thread, so it must be quick: with every token, of which the
        last has `sequence.finish_reason` set; with None if the sequence was aborted; with an
        exception if it failed. If it raises, its request is given up. Raises `EngineStoppedError`
        if the thread has ended, `RequestError` if an id is in use.
        """
        family = [sequence, *sequence.siblings]
        with self._lock:
            self._check_alive()
            for each in family:
                if each.sequence_id in self._deliver:
                    raise RequestError(f"The request id {each.sequence_id} is in use.")
            self._deliver.update((each.sequence_id, (each, deliver)) for each in family)
        self._wishes.put(lambda: self._add(sequence))

    def tokens(self, sequence: Sequence) -> Iterator[tuple[Sequence, SampledToken]]:
        """Queue a sequence, and yield its tokens and its siblings' as they come.

        Closing the iterator aborts what is unfinished. Raises what a step raised, or
        `EngineStoppedError` if the thread ends meanwhile.
        """
        family = [sequence, *sequence.siblings]
        news: SimpleQueue[tuple[Sequence, News]] = SimpleQueue()
        self.submit(sequence, lambda whose, what: news.put((whose, what)))
        return self._take(family, news)

    def abort(self, sequence_id: int) -> None:
        """Give a sequence up soon. Raises `RequestError` for an id that is not live."""
        with self._lock:
            self._check_alive()
            if sequence_id not in self._deliver:
                raise RequestError(f"No request of id {sequence_id} is waiting or running.")
        self._wishes.put(lambda: self._abort(sequence_id))

    def call(self, function: Callable[[Engine], None]) -> None:
        """Have `function(engine)` called in the engine's thread between two steps."""
        self._wishes.put(lambda: function(self.engine))

    def close(self, timeout: float | None = 10) -> None:
        """End the thread after the step under way; whoever waits gets an `EngineStoppedError`."""
        self._closing = True
        self._wishes.put(lambda: None)
        self._thread.join(timeout)

    def _take(
        self, family: list[Sequence], news: "SimpleQueue[tuple[Sequence, News]]"
    ) -> Iterator[tuple[Sequence, SampledToken]]:
        growing = {each.sequence_id for each in family}
        try:
            while growing:
                sequence, what = news.get()
                if isinstance(what, Exception):
                    raise what
                if what is None or sequence.finish_reason is not None:
                    growing.discard(sequence.sequence_id)
                if what is not None:
                    yield sequence, what
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
                self._heed_wishes()
                if self.engine.has_work():
                    self._step()
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self.error = error
        finally:
            self._stop()

    def _heed_wishes(self) -> None:
        """Do what others asked for; wait for something while there is nothing to do."""
        while not (self._closing or (self._wishes.empty() and self.engine.has_work())):
            self._wishes.get()()

    def _step(self) -> None:
        try:
            progress = self.engine.step()
        except Exception as error:
            with self._lock:
                failed = [each for each, _ in self._deliver.values() if each.error is error]
            if not failed:  # not one batch's fault: nothing can be relied on any more
                raise
            logger.exception("a step failed, and %d requests with it", len(failed))
            for sequence in failed:
                self._tell(sequence, error)
            return
        for sequence, token in progress:
            self._tell(sequence, token)

    def _add(self, sequence: Sequence) -> None:
        try:
            self.engine.add(sequence)
        except RequestError as error:
            for each in (sequence, *sequence.siblings):
                each.finish_reason = "error"
                self._tell(each, error)

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self.engine.live:  # else it has just finished
            sequence = self.engine.live[sequence_id]
            self.engine.abort(sequence_id)
            self._tell(sequence, None)

    def _tell(self, sequence: Sequence, news: News) -> None:
        with self._lock:
            _, deliver = self._deliver[sequence.sequence_id]
            if sequence.finish_reason is not None:
                del self._deliver[sequence.sequence_id]
        try:
            deliver(sequence, news)
        except Exception:  # one caller's mistake is not everybody's
            logger.exception("nobody took the news of request %d", sequence.sequence_id)
            self._abort(sequence.sequence_id)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            waiting, self._deliver = list(self._deliver.values()), {}
        for sequence, deliver in waiting:
            error = EngineStoppedError("The engine's thread has ended.")
            error.__cause__ = self.error
            deliver(sequence, error)

"""One engine for many requests: each gets the deltas of its own answers, or its own error.

A `Dispatcher` steps the engine in the thread that has claimed it: the callers' own threads
(`SharedSteps`), or one thread for all (`minigen.engine.engine_thread`).
"""

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType

from minigen.engine.engine import Engine
from minigen.errors import EngineStoppedError, RequestError
from minigen.outputs import RequestState, TokenDelta
from minigen.sequence import SampledToken, Sequence

Event = TokenDelta | Exception  # an exception is a request's last event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Subscription:
    """A request: its answers, and the function that gets every delta, or each answer's last one."""

    answers: SequenceOf[RequestState]
    deliver: Callable[[Event], object]
    every_token: bool


def at_once(function: Callable[[], None]) -> None:
    """Call the function; for callers that need no other thread."""
    function()


def _ignore(error: Exception) -> None:
    """Do nothing: the request that gets the error reports it."""


class Dispatcher:
    """Steps an engine, and hands each token to the request that it belongs to.

    Any thread may call `submit` and `abort`, which leave a command for the next step; one thread at
    a time calls `step`. After each step `hand_over(function)` is called once, if there are events:
    `function` delivers them, so an event loop can be woken once for all tokens of a step.
    `report(error)` is called once for each error that ends requests.
    """

    def __init__(
        self,
        engine: Engine,
        hand_over: Callable[[Callable[[], None]], object] = at_once,
        report: Callable[[Exception], None] = _ignore,
    ):
        self.engine = engine
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._subscriptions: dict[Sequence, tuple[RequestState, Subscription]] = {}
        self._hand_over, self._report = hand_over, report
        self._outbox: deque[tuple[Subscription, Event]] = deque()
        self._handing_over = False  # whether a call of `_hand_out` is already due
        # Guards `_subscriptions` and `is_open`. It is reentrant, because the garbage collector can
        # close an unused iterator, and so abort its request, at any moment.
        self._lock = threading.RLock()
        self.is_open = True
        self._cause: BaseException | None = None  # of the end

    def submit(
        self,
        answers: SequenceOf[RequestState],
        deliver: Callable[[Event], object],
        every_token: bool = True,
    ) -> None:
        """Queue a request, and call `deliver(event)` for its deltas, or for the error that ends it.

        Without `every_token`, only each answer's last delta is delivered. `deliver` must be fast;
        if it raises, the request is aborted. Raises `EngineStoppedError` after `stop`.
        """
        subscription = Subscription(answers, deliver, every_token)
        with self._lock:
            if not self.is_open:
                raise self._stopped()
            self._subscriptions |= {each.sequence: (each, subscription) for each in answers}
            # Under the lock, so that no command to abort it can come before this command.
            self.commands.put(partial(self._add, subscription))

    def abort(
        self, answers: SequenceOf[RequestState], because: BaseException | None = None
    ) -> None:
        """Abort those answers that are unfinished, before the next step; they get no more events.

        An error of the abort itself becomes a note of `because`, if that is an exception.
        """
        if any(each.sequence in self._subscriptions for each in answers):
            self.commands.put(partial(self._abort, answers, because))

    def wait(self) -> None:
        """Wait for a command, and run it; for a thread that has nothing else to do."""
        self.commands.get()()
        self._flush()

    def run_commands(self) -> None:
        """Add and abort the requests that were submitted and aborted since the last step."""
        while True:
            try:
                command = self.commands.get_nowait()
            except Empty:
                return
            command()

    def step(self) -> None:
        """Run the commands, then one step of the engine, and hand over what it brought.

        An error ends only the requests that it hit, which get it as their event. Raises it if it
        hit none, or if the engine cannot continue after it.
        """
        try:
            self.run_commands()
            for sequence, token in self.engine.step():
                if sequence in self._subscriptions:  # else it was added to the engine directly
                    self._dispatch(sequence, token)
            for error in self.engine.take_failures():
                self._fail(error)
        except Exception as error:
            if not self._fail(error) or isinstance(error, EngineStoppedError):
                raise
        finally:
            self._flush()

    def stop(self, cause: BaseException | None) -> None:
        """Abort all requests, which get an `EngineStoppedError` with this cause; accept no more."""
        with self._lock:
            self.is_open, self._cause = False, cause
            left = {subscription for _, subscription in self._subscriptions.values()}
        for subscription in left:
            self._close(subscription, self._stopped())
        self._flush()

    def _stopped(self) -> EngineStoppedError:
        error = EngineStoppedError("The engine's thread has ended.")
        error.__cause__ = self._cause
        return error

    def _flush(self) -> None:
        """Hand over the events that are due, unless a call for them is due already."""
        if self._outbox and not self._handing_over:
            self._handing_over = True
            try:
                self._hand_over(self._hand_out)
            except Exception:  # the other side is closed; it is not called again
                logger.exception("events could not be handed over")
            except BaseException:  # Ctrl-C in the caller's own thread
                self._handing_over = False
                raise

    def _hand_out(self) -> None:
        self._handing_over = False  # before reading, so that a later event causes another call
        while self._outbox:
            subscription, event = self._outbox.popleft()
            try:
                subscription.deliver(event)
            except Exception:  # one caller's error must not end the others' requests
                logger.exception("an event could not be delivered")
                self.abort(subscription.answers)

    def _add(self, subscription: Subscription) -> None:
        siblings = {each for answer in subscription.answers for each in answer.sequence.siblings}
        try:
            for answer in subscription.answers:
                if answer.sequence not in siblings:  # the engine adds siblings by itself
                    self.engine.add(answer.sequence)
        except Exception as error:
            self._report(error)
            self._close(subscription, error)

    def _dispatch(self, sequence: Sequence, token: SampledToken) -> None:
        """Turn a token into text, end the sequence at a stop string, and put the delta out."""
        answer, subscription = self._subscriptions[sequence]
        try:
            delta = answer.push(token)
            if delta.finish_reason is not None and sequence.finish_reason is None:
                self.engine.finish(sequence.sequence_id)
        except Exception as error:
            self._report(error)
            self._close(subscription, error)
            return
        if delta.finish_reason is not None:
            del self._subscriptions[sequence]
        if subscription.every_token or delta.finish_reason is not None:
            self._outbox.append((subscription, delta))

    def _fail(self, error: Exception) -> bool:
        """Deliver an error to the requests that it hit; return whether there are any."""
        with self._lock:
            known = list(self._subscriptions.items())
        hit = {subscription for sequence, (_, subscription) in known if sequence.error is error}
        if hit:
            self._report(error)
        for subscription in hit:
            self._close(subscription, error)
        return bool(hit)

    def _close(self, subscription: Subscription, error: Exception) -> None:
        """End a whole request with an error."""
        self._abort(subscription.answers, error)
        self._outbox.append((subscription, error))

    def _abort(
        self, answers: SequenceOf[RequestState], because: BaseException | None = None
    ) -> None:
        for answer in answers:
            sequence = answer.sequence
            self._subscriptions.pop(sequence, None)
            if self.engine.live.get(sequence.sequence_id) is not sequence:
                continue
            try:
                self.engine.abort(sequence.sequence_id)
            except Exception as further:
                if not isinstance(because, Exception):
                    raise
                because.add_note(
                    f"Aborting sequence {sequence.sequence_id} then failed: {further!r}"
                )


def deltas_of(
    num_answers: int, next_event: Callable[[], Event]
) -> Generator[TokenDelta, None, None]:
    """Yield a request's deltas until all its answers have ended. Raises the error that ends it."""
    while num_answers > 0:
        event = next_event()
        if isinstance(event, Exception):
            raise event
        num_answers -= event.finish_reason is not None
        yield event


class _Held:
    """Stands in for the handler of Ctrl-C, and keeps the first interrupt for later."""

    def __init__(self, handler: "signal._HANDLER"):
        self.handler = handler
        self.interrupt: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.interrupt is not None and callable(self.handler):
            self.handler(number, frame)
        self.interrupt = (number, frame)


@contextmanager
def interrupts_held() -> Generator[None, None, None]:
    """Let Ctrl-C wait until the block ends; a second Ctrl-C does not wait.

    An engine that is interrupted within a step can lose count of its blocks. Only Python's main
    thread is ever interrupted, so in other threads this does nothing, nor does it where Ctrl-C is
    ignored, or held already.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(handler)
        or isinstance(handler, _Held)
    ):
        yield
        return
    held = _Held(handler)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held.interrupt is not None:
            handler(*held.interrupt)


class SharedSteps:
    """Steps one engine for several callers, in their own threads, and gives each its own deltas.

    It claims the engine while any request is unfinished.
    """

    def __init__(self, engine: Engine):
        self.dispatcher = Dispatcher(engine)
        # Held by the caller that steps. It is reentrant for the reason given in `Dispatcher`.
        self._lock = threading.RLock()
        self._num_callers = 0
        self._running = False

    def run(self, answers: SequenceOf[RequestState]) -> Generator[TokenDelta, None, None]:
        """Step the engine until the answers are finished; yield their deltas.

        Closing the generator aborts unfinished answers. A step also computes the answers of other
        callers, whose deltas go into their inboxes. Raises `RequestError` if the engine is claimed
        outside of this object. Raises the error of a step that failed one of these answers, or that
        this caller ran and that failed no answer. Ctrl-C ends it after the current step, a second
        one at once.
        """
        if not answers:
            return
        inbox: deque[Event] = deque()
        because: BaseException | None = None
        entered = False
        try:
            with interrupts_held():
                self._enter()
                entered = True
            self.dispatcher.submit(answers, inbox.append)
            yield from deltas_of(len(answers), partial(self._next, inbox))
        except BaseException as error:
            because = error
            raise
        finally:
            if entered:
                with interrupts_held():
                    self._leave(answers, because)

    def _next(self, inbox: deque[Event]) -> Event:
        """Step until the inbox has an event; another caller's step may fill it, too."""
        while not inbox:
            with self._lock:
                if not inbox:
                    self._run(self.dispatcher.step)
        return inbox.popleft()

    def _run(self, function: Callable[[], None]) -> None:
        """Call a function; do nothing inside of another one, whose caller runs the commands."""
        if not self._running:
            with interrupts_held():
                self._running = True
                try:
                    function()
                finally:
                    self._running = False

    def _enter(self) -> None:
        """Claim the engine for the first caller."""
        with self._lock:
            if self._num_callers == 0 and not self.dispatcher.engine.claim():
                raise RequestError(
                    "This model's engine already runs in its own thread, perhaps in a server: send "
                    "requests to that server, or close it before you call generate, stream or chat."
                )
            self._num_callers += 1

    def _leave(self, answers: SequenceOf[RequestState], because: BaseException | None) -> None:
        """Abort what a caller leaves unfinished; release the engine after the last caller."""
        self.dispatcher.abort(answers, because)
        with self._lock:
            try:
                self._run(self.dispatcher.run_commands)
            finally:
                self._num_callers -= 1
                if self._num_callers == 0:
                    self.dispatcher.engine.release()

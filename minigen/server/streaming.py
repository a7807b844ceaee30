"""From the engine's thread to an event loop: the answers of a request, while they grow.

Tokens become text in the engine's thread, so that a stop string ends its sequence before another
step. The event loop is woken once per step, and not once per token or stream, because waking it
hands it Python's lock.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from starlette.types import Receive

from minigen.engine.engine_thread import EngineThread, TokenEvent
from minigen.errors import EngineStoppedError, RequestError
from minigen.outputs import RequestState, TokenDelta
from minigen.sequence import Logprob, SampledToken, Sequence
from minigen.server.errors import ClientGoneError, ModelFailedError


class Growth(NamedTuple):
    """What one token added to one answer."""

    answer: RequestState
    delta: TokenDelta
    logprobs: Mapping[int, Logprob] | None


class Bridge:
    """Between an engine's thread and the event loop that it is made in."""

    def __init__(self, thread: EngineThread):
        self.thread = thread
        self.loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[Pending, Growth | Exception]] = deque()
        self._woken = False  # whether the loop knows that there is something in the outbox
        thread.on_step_end(self._wake)

    @asynccontextmanager
    async def ask(
        self, answers: SequenceOf[RequestState], receive: Receive, every_token: bool
    ) -> AsyncIterator["Pending"]:
        """Have answers made while the block runs; what is unfinished when it ends is given up.

        `receive` is the request's: it tells when the client goes away. With `every_token` each
        token is told, else only each answer's last. Raises `EngineStoppedError` if the thread has
        ended, `RequestError` for an id in use.
        """
        pending = Pending(self, answers, every_token)
        siblings = {each for answer in answers for each in answer.sequence.siblings}
        gone = self.loop.create_task(_leaving(receive))
        gone.add_done_callback(pending.hang_up)
        try:
            for answer in answers:
                if answer.sequence not in siblings:
                    self.thread.submit(answer.sequence, pending.deliver)
            yield pending
        finally:
            gone.cancel()
            for answer in answers:
                if answer.sequence.finish_reason is None:
                    with suppress(RequestError, EngineStoppedError):  # it has ended meanwhile
                        self.thread.abort(answer.sequence.sequence_id)

    def tell(self, pending: "Pending", event: Growth | Exception) -> None:
        """Leave event for the loop; called in the engine's thread."""
        self._outbox.append((pending, event))

    def _wake(self) -> None:
        """Wake the loop for what was left, unless it is about to look."""
        if self._outbox and not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # before looking, so that whatever comes later wakes the loop again
        while self._outbox:
            pending, event = self._outbox.popleft()
            pending.take(event)


class Pending:
    """The answers of one request, on their way through a bridge."""

    def __init__(self, bridge: Bridge, answers: SequenceOf[RequestState], every_token: bool):
        self.answers = answers
        self._bridge, self._every_token = bridge, every_token
        self._by_sequence = {answer.sequence: answer for answer in answers}
        self._num_growing = len(answers)
        self._arrived: list[Growth] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        """Make text of a token; called in the engine's thread."""
        if not isinstance(event, SampledToken):
            self._bridge.tell(self, _problem(event))
            return
        answer = self._by_sequence[sequence]
        delta = answer.push(event)
        if answer.stops.stopped and sequence.finish_reason is None:
            self._bridge.thread.finish(sequence.sequence_id)
        if self._every_token or delta.finish_reason is not None:
            self._bridge.tell(self, Growth(answer, delta, event.logprobs))

    def take(self, event: Growth | Exception) -> None:
        """Hear of event; called in the loop."""
        if isinstance(event, Growth):
            self._arrived.append(event)
        else:
            self._error = self._error or event
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self, leaving: "asyncio.Task[None]") -> None:
        """Let whoever waits for growth know that the client has gone."""
        if not leaving.cancelled():
            self.take(ClientGoneError())
            leaving.exception()  # whatever it was, nobody is there any more

    async def growths(self) -> AsyncIterator[list[Growth]]:
        """Whatever has come since the last look, as long as an answer grows.

        Raises `ClientGoneError` once the client has gone, `ModelFailedError` for what a step
        raised, `EngineStoppedError` if the engine's thread ends.
        """
        while self._num_growing:
            if not (self._arrived or self._error):
                self._waiter = self._bridge.loop.create_future()
                await self._waiter
            if self._error is not None:
                raise self._error
            arrived, self._arrived = self._arrived, []
            self._num_growing -= sum(each.delta.finish_reason is not None for each in arrived)
            yield arrived


def _problem(event: Exception | None) -> Exception:
    if event is None:
        return ModelFailedError("its tokens could not be taken")
    if isinstance(event, EngineStoppedError):
        return event
    problem = ModelFailedError(f"{type(event).__name__}: {event}")
    problem.__cause__ = event
    return problem


async def _leaving(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

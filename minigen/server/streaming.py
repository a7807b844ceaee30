"""Pass the tokens of requests from the engine's thread to an event loop.

The engine's thread decodes tokens to text, so that a stop string ends its sequence before the next
step. It wakes the event loop once per step, not once per token or stream, because each wake-up
hands Python's global interpreter lock (GIL) to the loop.
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
    """One new token of one answer: its text delta and its log probabilities."""

    answer: RequestState
    delta: TokenDelta
    logprobs: Mapping[int, Logprob] | None


class Bridge:
    """The connection between an engine's thread and the event loop that creates it."""

    def __init__(self, thread: EngineThread):
        self.thread = thread
        self.loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[Pending, Growth | Exception]] = deque()
        self._woken = False  # whether a wake-up of the loop is already scheduled
        thread.on_step_end(self._wake)

    @asynccontextmanager
    async def ask(
        self, answers: SequenceOf[RequestState], receive: Receive, every_token: bool
    ) -> AsyncIterator["Pending"]:
        """Generate answers while the block runs; abort the unfinished ones when it ends.

        `receive` is the request's ASGI callable; it reports when the client disconnects. With
        `every_token` the bridge delivers every token, else only the last one of each answer. Raises
        `EngineStoppedError` if the thread has ended, `RequestError` for an id in use.
        """
        pending = Pending(self, answers, every_token)
        siblings = {each for answer in answers for each in answer.sequence.siblings}
        gone = self.loop.create_task(_until_disconnect(receive))
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
                    with suppress(RequestError, EngineStoppedError):  # it has just ended
                        self.thread.abort(answer.sequence.sequence_id)

    def tell(self, pending: "Pending", event: Growth | Exception) -> None:
        """Put an event into the outbox for the loop; called in the engine's thread."""
        self._outbox.append((pending, event))

    def _wake(self) -> None:
        """Wake the loop if the outbox has events, unless a wake-up is already scheduled."""
        if self._outbox and not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # before reading, so that an event that comes later wakes the loop
        while self._outbox:
            pending, event = self._outbox.popleft()
            pending.take(event)


class Pending:
    """One request that waits for its answers: their tokens, or an error, from a bridge."""

    def __init__(self, bridge: Bridge, answers: SequenceOf[RequestState], every_token: bool):
        self.answers = answers
        self._bridge, self._every_token = bridge, every_token
        self._by_sequence = {answer.sequence: answer for answer in answers}
        self._num_growing = len(answers)
        self._arrived: list[Growth] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        """Decode a token to text and pass it to the loop; called in the engine's thread."""
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
        """Store an event and wake the consumer; called in the loop."""
        if isinstance(event, Growth):
            self._arrived.append(event)
        else:
            self._error = self._error or event
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self, leaving: "asyncio.Task[None]") -> None:
        """Raise `ClientGoneError` in `growths`, because the client has disconnected."""
        if not leaving.cancelled():
            self.take(ClientGoneError())
            leaving.exception()  # read, so that asyncio does not log it; the client is gone anyway

    async def growths(self) -> AsyncIterator[list[Growth]]:
        """Yield the tokens that have arrived since the last time, until all answers have ended.

        Raises `ClientGoneError` if the client disconnects, `ModelFailedError` if a step fails,
        `EngineStoppedError` if the engine's thread ends.
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
        return ModelFailedError("its tokens could not be processed")
    if isinstance(event, EngineStoppedError):
        return event
    problem = ModelFailedError(f"{type(event).__name__}: {event}")
    problem.__cause__ = event
    return problem


async def _until_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""The HTTP response of a generation request: it submits the request and sends tokens as they come.

It is plain ASGI: all available tokens go out in one `send`, directly to the server. The engine's
thread decodes tokens to text, so that a stop string ends its sequence before the next step. It
wakes the event loop once per step, not once per token or stream, because each wake-up hands
Python's global interpreter lock (GIL) to the loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minigen.engine.dispatcher import Dispatcher, Event
from minigen.errors import EngineStoppedError, GrammarError
from minigen.outputs import RequestState, TokenDelta
from minigen.server.errors import ClientGoneError, ModelFailedError, explain
from minigen.server.middleware.limits import RequestRecord, record_of, set_failure
from minigen.server.models import ModelHost, Served
from minigen.server.openai.responses import ResponseWriter, usage_of

LONG_BODY = 20_000  # bytes; encoding a longer prompt would block the event loop for too long
LONG_ANSWER = 2_000  # tokens of all answers; so would writing more, with their log probabilities


# A parsed request: the answers that the engine must generate (none if the response needs no
# generated tokens), and the response writer.
ReadRequest = tuple[list[RequestState], ResponseWriter]
Deltas = AsyncIterator[list[TokenDelta]]


class Reply(Response):
    """A response with the answers of a model, complete or as a stream.

    `read(served)` parses the request for the loaded model, or raises a `MinigenError`; for a long
    request, or one that `takes_long` because it compiles a grammar, it runs in a separate thread.
    The response starts with the first token, so an error before that still gets its own HTTP
    status.
    """

    def __init__(
        self,
        host: ModelHost,
        model: str | None,
        streams: bool,
        read: Callable[[Served], ReadRequest],
        takes_long: bool = False,
    ):
        super().__init__()
        self._host, self._model, self._streams, self._read = host, model, streams, read
        self._takes_long = takes_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request; stop silently if the client disconnects."""
        with suppress(ClientGoneError):
            async with self._host.lease(self._model) as served:
                answers, writer = await self._read_in_time(scope, served)
                computed = answers if writer.needs_engine else []
                with _recorded(record_of(scope), served.name, answers):
                    async with submitted(
                        served.thread.dispatcher, computed, receive, self._streams
                    ) as deltas:
                        if self._streams:
                            set_failure(scope, writer.failure)
                            await self._stream(deltas, writer, send)
                        else:
                            await self._send_whole(deltas, answers, writer, send)

    async def _read_in_time(self, scope: Scope, served: Served) -> ReadRequest:
        if _body_length(scope) < LONG_BODY and not self._takes_long:
            return self._read(served)
        return await asyncio.to_thread(self._read, served)

    async def _send_whole(
        self,
        deltas: Deltas,
        answers: SequenceOf[RequestState],
        writer: ResponseWriter,
        send: Send,
    ) -> None:
        async for _ in deltas:
            pass
        if sum(len(each.choice.token_ids) for each in answers) < LONG_ANSWER:
            body = writer.whole()
        else:
            body = await asyncio.to_thread(writer.whole)
        await send(_start("application/json", (b"content-length", str(len(body)).encode())))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, deltas: Deltas, writer: ResponseWriter, send: Send) -> None:
        started = False
        try:
            async for arrived in deltas:
                if not started:
                    await self._start_stream(writer, send)
                    started = True
                chunk = b"".join([writer.on_token(delta) for delta in arrived])
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not started:  # there were no tokens to generate
                await self._start_stream(writer, send)
            last = writer.end()
        except (ModelFailedError, EngineStoppedError, GrammarError) as error:
            if not started:
                raise
            last = writer.failure(explain(error))
        except ClientGoneError:
            raise
        except Exception as error:  # our own: the client gets an event, the log a traceback
            if started:
                body = writer.failure(explain(error))
                await send({"type": "http.response.body", "body": body, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start_stream(self, writer: ResponseWriter, send: Send) -> None:
        await send(
            _start(
                writer.media_type,
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would buffer the stream
            )
        )
        first = writer.on_start()
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})


@asynccontextmanager
async def submitted(
    dispatcher: Dispatcher, answers: SequenceOf[RequestState], receive: Receive, every_token: bool
) -> AsyncIterator[Deltas]:
    """Generate answers while the block runs; abort the unfinished ones when it ends.

    Yields an iterator of the deltas that have arrived since the last time, until all answers have
    ended: every token's, or only each answer's last one. It raises `ClientGoneError` if the client
    disconnects, which `receive` reports, `ModelFailedError` if a step fails, `GrammarError` if a
    grammar exceeds its limits, `EngineStoppedError` if the engine's thread ends.
    """
    inbox, filled = deque[Event](), asyncio.Event()

    def deliver(event: Event) -> None:
        inbox.append(event)
        filled.set()

    gone = asyncio.create_task(_report_disconnect(receive, deliver))
    try:
        dispatcher.submit(answers, deliver, every_token)
        yield _arrivals(inbox, filled, answers)
    finally:
        gone.cancel()
        dispatcher.abort(answers)


async def _arrivals(
    inbox: deque[Event], filled: asyncio.Event, answers: SequenceOf[RequestState]
) -> Deltas:
    num_unfinished = len(answers)
    while num_unfinished:
        await filled.wait()
        filled.clear()
        events = list(inbox)
        inbox.clear()
        arrived = [event for event in events if isinstance(event, TokenDelta)]
        num_unfinished -= sum(delta.finish_reason is not None for delta in arrived)
        if arrived:
            yield arrived
        for event in events:
            if isinstance(event, Exception):
                raise _problem(event, answers)


def _problem(error: Exception, answers: SequenceOf[RequestState]) -> Exception:
    if isinstance(error, EngineStoppedError | ClientGoneError | GrammarError):
        return error
    in_step = any(answer.sequence.error is error for answer in answers)
    problem = ModelFailedError(
        f"{type(error).__name__}: {error}" if in_step else "its tokens could not be processed"
    )
    problem.__cause__ = error
    return problem


async def _report_disconnect(receive: Receive, deliver: Callable[[Event], None]) -> None:
    """Deliver a `ClientGoneError` when the client has disconnected."""
    with suppress(Exception):  # a connection that cannot be read is gone, too
        while (await receive())["type"] != "http.disconnect":
            pass
    deliver(ClientGoneError())


@contextmanager
def _recorded(record: RequestRecord, model: str, answers: list[RequestState]) -> Iterator[None]:
    """Record the model and the token counts in the request's record, for the access log."""
    record.model = model
    try:
        yield
    finally:
        usage = usage_of(answers)
        record.prompt_tokens = usage["prompt_tokens"]
        record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        record.completion_tokens = usage["completion_tokens"]


def _start(media_type: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    all_headers = [(b"content-type", media_type.encode()), *headers]
    return {"type": "http.response.start", "status": 200, "headers": all_headers}


def _body_length(scope: Scope) -> int:
    """Return the `Content-Length` of a request; without the header, assume a long body."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return LONG_BODY

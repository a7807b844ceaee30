"""The HTTP response of a generation request: it submits the request and sends tokens as they come.

It is plain ASGI: all available tokens go out in one `send`, directly to the server.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minigen.errors import EngineStoppedError
from minigen.outputs import RequestState
from minigen.server.errors import ClientGoneError, ModelFailedError, explain
from minigen.server.middleware.limits import RequestRecord, record_of
from minigen.server.models import ModelHost, Served
from minigen.server.openai.responses import ResponseWriter, usage_of
from minigen.server.streaming import Pending

LONG_BODY = 20_000  # bytes; encoding a longer prompt would block the event loop for too long


@dataclass(frozen=True)
class ReadRequest:
    """A parsed request: the answers that the engine must generate, and the response writer.

    `answers` is empty if the response needs no generated tokens.
    """

    answers: list[RequestState]
    writer: ResponseWriter


class Reply(Response):
    """A response with the answers of a model, complete or as a stream.

    `read(served)` parses the request for the loaded model, or raises a `MinigenError`; for a long
    request it runs in a separate thread. The response starts with the first token, so an error
    before that still gets its own HTTP status.
    """

    def __init__(
        self,
        host: ModelHost,
        model: str | None,
        streams: bool,
        read: Callable[[Served], ReadRequest],
    ):
        super().__init__()
        self._host, self._model, self._streams, self._read = host, model, streams, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request; stop silently if the client disconnects."""
        try:
            async with self._host.lease(self._model) as served:
                request = await self._read_in_time(scope, served)
                with _recorded(record_of(scope), served.name, request.answers):
                    async with served.bridge.ask(
                        request.answers, receive, self._streams
                    ) as pending:
                        respond = self._stream if self._streams else self._send_whole
                        await respond(pending, request.writer, send)
        except ClientGoneError:
            return

    async def _read_in_time(self, scope: Scope, served: Served) -> ReadRequest:
        if _body_length(scope) < LONG_BODY:
            return self._read(served)
        return await asyncio.to_thread(self._read, served)

    async def _send_whole(self, pending: Pending, writer: ResponseWriter, send: Send) -> None:
        async for _ in pending.growths():
            pass
        body = writer.whole()
        await send(_start("application/json", (b"content-length", str(len(body)).encode())))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, pending: Pending, writer: ResponseWriter, send: Send) -> None:
        started = False
        try:
            async for growths in pending.growths():
                if not started:
                    await self._start_stream(writer, send)
                    started = True
                chunk = b"".join([writer.on_token(growth) for growth in growths])
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not started:  # there were no tokens to generate
                await self._start_stream(writer, send)
            last = writer.end()
        except (ModelFailedError, EngineStoppedError) as error:
            if not started:
                raise
            last = writer.failure(explain(error))
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

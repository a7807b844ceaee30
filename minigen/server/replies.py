"""An HTTP response whose answers are still to be made: it asks the engine, and tells as it hears.

Plain ASGI: what is ready goes out in one `send`, and nothing lies between this and the server.
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
from minigen.server.openai.responses import Wording, usage_of
from minigen.server.streaming import Pending

LONG_BODY = 20_000  # bytes; to encode a longer prompt takes too long for the loop to wait


@dataclass(frozen=True)
class ReadRequest:
    """What a request turns out to ask of a model: answers to be made, and how to word them.

    `answers` is empty where the wording needs none to be made.
    """

    answers: list[RequestState]
    wording: Wording


class Reply(Response):
    """The answers of a model, whole or as a stream.

    `read(served)` says what is asked, or raises a `MinigenError`; it is called with the loaded
    model, for a long request in a thread of its own. Nothing is sent before the first token, so
    what goes wrong until then still has a status of its own.
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
        """Answer one request; ends early, without a word, if the client goes away."""
        try:
            async with self._host.lease(self._model) as served:
                asked = await self._read_in_time(scope, served)
                with _recorded(record_of(scope), served.name, asked.answers):
                    async with served.bridge.ask(asked.answers, receive, self._streams) as pending:
                        tell = self._stream if self._streams else self._send_whole
                        await tell(pending, asked.wording, send)
        except ClientGoneError:
            return

    async def _read_in_time(self, scope: Scope, served: Served) -> ReadRequest:
        if _body_length(scope) < LONG_BODY:
            return self._read(served)
        return await asyncio.to_thread(self._read, served)

    async def _send_whole(self, pending: Pending, wording: Wording, send: Send) -> None:
        async for _ in pending.growths():
            pass
        body = wording.whole()
        await send(_start("application/json", (b"content-length", str(len(body)).encode())))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, pending: Pending, wording: Wording, send: Send) -> None:
        started = False
        try:
            async for growths in pending.growths():
                if not started:
                    await self._begin(wording, send)
                    started = True
                chunk = b"".join([wording.grown(growth) for growth in growths])
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not started:  # there was nothing to be made
                await self._begin(wording, send)
            last = wording.end()
        except (ModelFailedError, EngineStoppedError) as error:
            if not started:
                raise
            last = wording.failure(explain(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, wording: Wording, send: Send) -> None:
        await send(
            _start(
                wording.media_type,
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold a stream back
            )
        )
        first = wording.begin()
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})


@contextmanager
def _recorded(record: RequestRecord, model: str, answers: list[RequestState]) -> Iterator[None]:
    """The log will know which model answered, and how many tokens were read and made."""
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
    """Bytes of a request's body, as its header says; without one it may be long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return LONG_BODY

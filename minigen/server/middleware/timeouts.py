"""Time limits of a request: for its whole body, which also has a size limit, and for its answer."""

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigen.server.errors import ApiError, ClientGoneError
from minigen.server.middleware.limits import header


class Deadline:
    """ASGI middleware: cancels the app after `seconds`, so that its `finally` frees what it holds.

    An answer that has not begun is a 504: the fault is the server's slowness, and not, as 408
    would say, that the client was slow to ask. It tells OpenAI's client not to try again by
    itself, since the same request would take as long. A stream ends with an event that has the
    error: its status was sent long ago.
    """

    def __init__(self, app: ASGIApp, seconds: float):
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        progress = Progress(send)
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                await self.app(scope, receive, progress.send)
        except TimeoutError:
            if not deadline.expired():  # a time limit of the app's own
                raise
            error = ApiError(
                f"The request took longer than the {self.seconds:g} seconds that are allowed here.",
                status=504,
                kind="server_error",
                code="request_timeout",
                headers={"x-should-retry": "false"},
            )
            if progress.content_type is None:
                await error.response(scope["path"])(scope, receive, send)
            elif not progress.complete:
                await self._break_off(error.body(scope["path"]), progress, send)

    async def _break_off(self, error: bytes, progress: "Progress", send: Send) -> None:
        assert progress.content_type is not None
        if progress.content_type.startswith(b"text/event-stream"):
            await send(_last(b"data: " + error + b"\n\n"))
        elif progress.content_type.startswith(b"application/x-ndjson"):
            await send(_last(error + b"\n"))
        # Any other answer stays cut short; the server closes the connection, so the client knows.


class Progress:
    """How far an answer has come."""

    def __init__(self, send: Send):
        self._send = send
        self.content_type: bytes | None = None  # none before the answer begins
        self.complete = False

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on at once. No coroutine of its own: this runs for every chunk."""
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            self.content_type = headers.get(b"content-type", b"")
        elif not message.get("more_body", False):
            self.complete = True
        return self._send(message)


def _last(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": False}


class WholeBody:
    """ASGI middleware: reads the body, at most `max_bytes` within `seconds`, then calls the app.

    413 for a body that is said to be larger, before it is read, or turns out to be; 408 for one
    that is not whole in time, after which the connection is closed. If the client goes away
    before, the app is never called. So an app gets all of a body with its first `receive`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float):
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        length = _content_length(scope)
        if length == 0:
            return await self.app(scope, receive, send)
        try:
            body = await self._read(length, receive)
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        except ClientGoneError:
            return None
        return await self.app(scope, Replay(body, receive).receive, send)

    async def _read(self, length: int | None, receive: Receive) -> bytes:
        if length is not None and length > self.max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self.seconds):
                return await self._gather(receive)
        except TimeoutError:
            raise ApiError(
                f"The body was not whole after {self.seconds:g} seconds.",
                status=408,
                code="request_timeout",
                headers={"connection": "close"},
            ) from None

    async def _gather(self, receive: Receive) -> bytes:
        chunks, num_bytes, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunks.append(message.get("body", b""))
            num_bytes += len(chunks[-1])
            if num_bytes > self.max_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"The body is larger than the {self.max_bytes} bytes that this server takes.",
            status=413,
            code="request_too_large",
        )


class Replay:
    """A body that was read already, as an app receives it; then whatever comes after it."""

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive

    async def receive(self) -> Message:
        """The body in one message, the first time."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _content_length(scope: Scope) -> int | None:
    """Bytes that the headers promise: 0 if there is no body, None if they leave it open."""
    if header(scope, b"transfer-encoding") is not None:
        return None
    length = header(scope, b"content-length")
    if length is None:
        return 0
    return int(length) if length.isdigit() and len(length) < 20 else None

"""The timeouts of a request: for its body, which also has a size limit, and for its response."""

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigen.server.errors import ApiError, ClientGoneError
from minigen.server.middleware.limits import failure_of, header


class Deadline:
    """ASGI middleware: cancels the app after `seconds`; its `finally` blocks free its resources.

    If the response has not started, it becomes a 504: the server was slow, whereas 408 would mean
    that the client was slow to send its request. A header stops OpenAI's client from retrying
    automatically, because the same request would take as long again. A stream ends with the error
    in the format of its API, because its status has already been sent. Any other response stays
    incomplete; the server closes the connection to signal that.
    """

    def __init__(self, app: ASGIApp, seconds: float):
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        progress = Progress(send)
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                await self.app(scope, receive, progress.send)
        except TimeoutError:
            if not deadline.expired():  # a timeout inside the app
                raise
            error = ApiError(
                f"The request took longer than {self.seconds:g} seconds, the limit of this server.",
                status=504,
                kind="server_error",
                code="request_timeout",
                headers={"x-should-retry": "false"},
            )
            failure = failure_of(scope)
            if not progress.started:
                await error.response(scope["path"])(scope, receive, send)
            elif not progress.complete and failure is not None:
                await send(
                    {"type": "http.response.body", "body": failure(error), "more_body": False}
                )


class Progress:
    """Tracks whether a response has started, and whether it is complete."""

    def __init__(self, send: Send):
        self._send = send
        self.started = self.complete = False

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message without a coroutine in between, because this runs for every chunk."""
        if message["type"] == "http.response.start":
            self.started = True
        elif not message.get("more_body", False):
            self.complete = True
        return self._send(message)


class WholeBody:
    """ASGI middleware: reads the body, at most `max_bytes` within `seconds`, then calls the app.

    It responds with 413 to a body that is larger, according to its header or while it is read, and
    with 408 to a body that is not complete in time; it then closes the connection. If the client
    disconnects first, the app is not called. The app gets the whole body with its first `receive`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float):
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
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
                f"The body was not complete after {self.seconds:g} seconds.",
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
            f"The body is larger than the {self.max_bytes} bytes that this server accepts.",
            status=413,
            code="request_too_large",
        )


class Replay:
    """A `receive` that returns a body which was read before, then forwards to the real one."""

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive

    async def receive(self) -> Message:
        """Return the body in one message at the first call, later messages after it."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _content_length(scope: Scope) -> int | None:
    """Return the body's length by the headers: 0 without a body, None if they do not contain it."""
    if header(scope, b"transfer-encoding") is not None:
        return None
    length = header(scope, b"content-length")
    if length is None:
        return 0
    return int(length) if length.isdigit() and len(length) < 20 else None

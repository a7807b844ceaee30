"""A time limit for a whole request, also where its answer is a stream that has begun."""

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigen.server.failures import ApiError


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

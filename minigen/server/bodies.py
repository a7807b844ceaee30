"""A request's body is whole before the app is called: small enough, and in time."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigen.server.paths import header
from minigen.server.refusals import Refusal


class ClientLeftError(Exception):
    """The client went away before its body was whole."""


class BodyTooLargeError(Exception):
    """A body has more bytes than are allowed."""


class WholeBody:
    """ASGI middleware: reads the body, at most `max_bytes` within `seconds`, then calls the app.

    413 for a body that is said to be larger, before it is read, or turns out to be; 408 for one
    that is not whole in time, after which the connection is closed. If the client goes away
    before, the app is never called. So an app gets all of a body with its first `receive`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float):
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds
        self.too_large = Refusal(
            413,
            f"The body is larger than the {max_bytes} bytes that this server takes.",
            code="request_too_large",
        )
        self.too_late = Refusal(
            408,
            f"The body was not whole after {seconds:g} seconds.",
            code="request_timeout",
            headers=((b"connection", b"close"),),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        length = _content_length(scope)
        if length == 0:
            return await self.app(scope, receive, send)
        try:
            if length is not None and length > self.max_bytes:
                raise BodyTooLargeError
            async with asyncio.timeout(self.seconds):
                body = await _read(receive, self.max_bytes)
        except BodyTooLargeError:
            return await self.too_large.send(scope, send)
        except TimeoutError:
            return await self.too_late.send(scope, send)
        except ClientLeftError:
            return None
        return await self.app(scope, Replay(body, receive).receive, send)


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


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks, num_bytes, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > max_bytes:
            raise BodyTooLargeError
        more = message.get("more_body", False)
    return b"".join(chunks)


def _content_length(scope: Scope) -> int | None:
    """Bytes that the headers promise: 0 if there is no body, None if they leave it open."""
    if header(scope, b"transfer-encoding") is not None:
        return None
    length = header(scope, b"content-length")
    if length is None:
        return 0
    return int(length) if length.isdigit() and len(length) < 20 else None

"""Give every request an id, and log a JSON line when it has ended."""

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import IO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigen.server.middleware.limits import RequestRecord, header, record_of

SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
MOST_OF_A_PATH = 200
access_logger = logging.getLogger("minigen.access")


def write_access_log(stream: IO[str] | None = None) -> logging.Handler:
    """Write the access log to a stream only (stderr if None); return the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    access_logger.propagate = False
    return handler


class RequestLog:
    """ASGI middleware: adds `X-Request-Id` to every response, and logs every request.

    The id is the client's if it is valid, else a new one. A line has the time at which the request
    ended (UTC), its id, method, path without the query, status (null if none was sent), bytes of
    the response body, seconds until its end and until its first byte, the client's address, the
    key's short hash, the model and token counts if the route recorded them, and whether the request
    was aborted: the client disconnected, or the response is incomplete.
    """

    def __init__(self, app: ASGIApp, logger: logging.Logger = access_logger):
        self.app, self.logger = app, logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        record = record_of(scope)
        record.request_id = _request_id(scope)
        watch = Watch(receive, send, record.request_id.encode())
        try:
            await self.app(scope, watch.receive, watch.send)
        except BaseException:
            watch.broke = True
            raise
        finally:
            if self.logger.isEnabledFor(logging.INFO):
                self.logger.info("%s", json.dumps(_line(scope, record, watch)))


class Watch:
    """Observes the messages of one request and its response."""

    def __init__(self, receive: Receive, send: Send, request_id: bytes):
        self._receive, self._send = receive, send
        self._id_header = (b"x-request-id", request_id)
        self.started = time.perf_counter()
        self.first_byte: float | None = None
        self.status: int | None = None
        self.num_bytes = 0
        self.complete = self.left = self.broke = False

    async def receive(self) -> Message:
        """Receive a message; record a disconnect before the response is complete."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.complete:
            self.left = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message without a coroutine in between, because this runs for every chunk."""
        body = message.get("body")
        if body:
            if self.first_byte is None:
                self.first_byte = time.perf_counter()
            self.num_bytes += len(body)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), self._id_header]
            return self._send({**message, "headers": headers})
        if not message.get("more_body", False):
            self.complete = True
        return self._send(message)


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    if given is not None and SANE_ID.fullmatch(given):
        return given.decode()
    return f"req-{secrets.token_hex(12)}"


def _line(scope: Scope, record: RequestRecord, watch: Watch) -> dict[str, object]:
    facts = asdict(record)
    first_byte = watch.first_byte
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": facts.pop("request_id"),
        "method": scope["method"],
        "path": scope["path"][:MOST_OF_A_PATH],
        "status": watch.status,
        "bytes": watch.num_bytes,
        "seconds": round(time.perf_counter() - watch.started, 6),
        "first_byte_seconds": None if first_byte is None else round(first_byte - watch.started, 6),
        "client": scope["client"][0] if scope.get("client") else None,
        **facts,
        "aborted": watch.left or not watch.complete,
    }

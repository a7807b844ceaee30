"""An ASGI client for tests: what an app receives and what it sends, message by message."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from tests.waiting import PATIENCE


@dataclass
class Exchange:
    """One request; `messages` are the replies so far. Parts missing from `chunks` never arrive."""

    path: str = "/v1/completions"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    chunks: Iterable[bytes] = (b"{}",)
    whole: bool = True  # whether the last of the chunks ends the body
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        chunks = list(self.chunks)
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        for place, chunk in enumerate(chunks, start=1):
            more = place < len(chunks) or not self.whole
            self.inbox.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        self.arrived = asyncio.Event()
        if self.method == "POST" and not {"content-length", "transfer-encoding"} & set(
            self.headers
        ):
            self.headers = {**self.headers, "transfer-encoding": "chunked"}

    @property
    def scope(self) -> Scope:
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        return {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "query_string": b"secret=1",
            "headers": headers,
            "client": ("192.0.2.7", 4711),
        }

    def leave(self) -> None:
        """Disconnect the client."""
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.arrived.set()

    async def until(self, num_messages: int) -> None:
        """Wait until the app has sent `num_messages` messages."""
        async with asyncio.timeout(PATIENCE):
            while len(self.messages) < num_messages:
                self.arrived.clear()
                await self.arrived.wait()

    async def run(self, app: ASGIApp) -> "Exchange":
        async with asyncio.timeout(PATIENCE):
            await app(self.scope, self.inbox.get, self.send)
        return self

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def answer_headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


def ask(app: ASGIApp, path: str = "/v1/completions", **request: Any) -> Exchange:
    """Send one request, in a separate event loop."""

    async def run() -> Exchange:
        return await Exchange(path, **request).run(app)

    return asyncio.run(run())

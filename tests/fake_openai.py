"""A server that streams like OpenAI's with known delays, or fails in a chosen way."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

TORN = STREAM[:-2] + b"Transfer-Encoding: chunked\r\n\r\n40\r\ndata: {"


@dataclass
class FakeOpenAI:
    """Streams max_tokens tokens, `per_event` at a time, after `wait` and then `gap` seconds.

    `fault` selects a failure: "429", "every other 429", "cut" (closes in mid-stream), "torn"
    (closes within a chunk), "gone" (closes before an answer), "silent" (never answers), "html",
    "broken" (no JSON), "deep" (nested too deeply), "error event", "empty" (no text), "no count"
    (usage without completion_tokens), or "" for none. The text of a chat is in `delta`.
    """

    wait: float = 0.0
    gap: float = 0.0
    per_event: int = 1
    usage: bool = True
    fault: str = ""
    delta: str = "content"
    models: tuple[object, ...] = ("fake",)
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_connections: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve while the block runs; yields the URL."""
        self._tasks: set[Any] = set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def in_thread(self) -> Iterator[str]:
        """Serve in a thread, for callers that have no event loop."""
        loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
        urls: list[str] = []

        async def serve() -> None:
            async with self.running() as url:
                urls.append(url)
                ready.set()
                await done.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        ready.wait(10)
        try:
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(done.set)
            thread.join()
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.paths.append(path)
        lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if self.key is not None and lines.get("authorization") != f"bearer {self.key}".lower():
            return self._say(writer, 401, {"error": {"message": "no key"}})
        if path.endswith("/models"):
            return self._say(writer, 200, {"data": [{"id": name} for name in self.models]})
        body = json.loads(await reader.readexactly(int(lines["content-length"])))
        self.bodies.append(body)
        odd = self.fault == "every other 429" and len(self.bodies) % 2
        if self.fault == "429" or odd:
            return self._say(writer, 429, {"error": {"message": "slow down"}})
        if self.fault == "silent":
            await asyncio.sleep(3600)
        if self.fault == "gone":
            return None
        if self.fault == "torn":
            return writer.write(TORN)
        if self.fault == "html":
            return self._say(writer, 200, "<html>", b"text/html")
        return await self._stream(writer, body, chat="messages" in body)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        writer.write(STREAM)
        if chat:
            self._tell(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.wait)
        num_tokens = body["max_tokens"]
        for first in range(0, num_tokens, self.per_event):
            text = (
                "" if self.fault == "empty" else " word" * min(self.per_event, num_tokens - first)
            )
            if first and self.fault == "cut":
                return
            if first and self.fault == "broken":
                writer.write(b"data: {not json\n\n")
            if first and self.fault == "deep":
                writer.write(b"data: " + b"[" * 100_000 + b"\n\n")
            if first and self.fault == "error event":
                self._tell(writer, {"error": {"message": "out of memory"}})
            self._tell(
                writer, {"choices": [{"delta": {self.delta: text}} if chat else {"text": text}]}
            )
            await writer.drain()
            await asyncio.sleep(self.gap)
        self._tell(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if self.usage and body["stream_options"]["include_usage"]:
            words = len(str(body.get("prompt", "")).split())
            counts = {"prompt_tokens": words, "completion_tokens": num_tokens}
            if self.fault == "no count":
                del counts["completion_tokens"]
            self._tell(writer, {"choices": [], "usage": counts})
        writer.write(b"data: [DONE]\r\n\r\n")
        await writer.drain()

    def _tell(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        writer.write(b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _say(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: object,
        kind: bytes = b"application/json",
    ) -> None:
        text = json.dumps(body).encode()
        writer.write(HEAD % (status, kind, len(text)) + text)

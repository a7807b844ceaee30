"""A minimal chat endpoint: from the engine's thread to server-sent events on the wire.

The server's own code, for every API, several choices and every error, is in
`minigen.server.replies` and `minigen.server.openai.responses`.
"""

import asyncio
import codecs
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from minigen.engine.dispatcher import Event
from minigen.engine.engine_thread import EngineThread
from minigen.llm import LLM
from minigen.outputs import RequestState, TokenDelta
from minigen.sampling.params import SamplingParams

Tokens = AsyncIterator[tuple[bytes, str | None]]  # a token's bytes; the last's finish reason
Events = Callable[[Tokens, dict[str, Any], Callable[[], None]], AsyncIterator[bytes]]


def looks_at_health(
    url: str, ask: Callable[[], object], pause: float = 0.02
) -> tuple[float, list[tuple[float, float]]]:
    """Look at `/health` again and again while `ask()` runs in a thread.

    Returns the seconds of the shortest of nine looks before it, and for each look during it when it
    was sent and answered, in seconds after the first. One client makes all of them, because a new
    one costs more time than a look.
    """
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(1) as pool:

        def look() -> tuple[float, float]:
            sent = time.perf_counter()
            client.get("/health").raise_for_status()
            return sent, time.perf_counter()

        look()  # connects
        before = [look() for _ in range(9)]
        asking = pool.submit(ask)
        time.sleep(0.05)  # so that the server works on it
        looks = [look()]
        while not asking.done():
            time.sleep(pause)
            looks.append(look())
        asking.result()
    first = looks[0][0]
    idle = min(after - sent for sent, after in before)
    return idle, [(sent - first, after - first) for sent, after in looks]


def event_data(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event, as soon as its empty line has arrived.

    `pieces` are the parts of a body, cut at any byte. A line ends with a line feed, perhaps after a
    carriage return. The values of several `data` lines are joined by a line feed. Comments, other
    fields, events without a data line and an event that does not end are left out. Source: HTML
    standard, "Server-sent events".
    """
    data: list[str] = []
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode()
            name, _, value = text.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif data and not text:
                yield "\n".join(data)
                data = []


async def chat_events(
    tokens: AsyncIterator[tuple[bytes, str | None]],
    head: dict[str, Any],
    give_up: Callable[[], None],
) -> AsyncIterator[bytes]:
    """Stream an answer as server-sent events: its role, its text, its finish reason, [DONE].

    `tokens` yields the bytes of each token with None, and those of the last one with the finish
    reason. A chunk is `head` plus "choices", a list of one: "index" 0, "delta", "finish_reason".
    Text is sent as soon as its characters are complete. `give_up()` is called once if the stream
    ends before the answer does, for any reason. Sources: OpenAI's API reference; HTML standard,
    "Server-sent events".
    """

    def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    finish_reason = None
    try:
        yield event({"role": "assistant", "content": ""})
        async for piece, finish_reason in tokens:
            text = utf8.decode(piece, final=finish_reason is not None)
            if text:
                yield event({"content": text})
        yield event({}, finish_reason)
        yield b"data: [DONE]\n\n"
    finally:
        if finish_reason is None:
            give_up()


async def tokens_of(llm: LLM, thread: EngineThread, answer: RequestState) -> Tokens:
    """Submit an answer, and yield the bytes of each token, and the finish reason with the last.

    The event loop is asked to run once per token.
    """
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[bytes, str | None]]()

    def deliver(event: Event) -> None:  # called in the engine's thread
        piece, reason = b"", event.finish_reason if isinstance(event, TokenDelta) else "error"
        if isinstance(event, TokenDelta) and reason != "stop":  # a stop token has no text
            piece = llm.tokenizer.token_bytes(event.token_id)
        loop.call_soon_threadsafe(inbox.put_nowait, (piece, reason))

    thread.dispatcher.submit([answer], deliver)
    finish_reason = None
    while finish_reason is None:
        piece, finish_reason = await inbox.get()
        yield piece, finish_reason


def small_app(llm: LLM, thread: EngineThread, events: Events = chat_events) -> FastAPI:
    """Make an app with a streamed, greedy `POST /v1/chat/completions` for OpenAI's client.

    It reads only `messages` and `max_tokens`. Give it to a `LocalServer`, with an `EngineThread`
    that lives as long.
    """
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(asked: dict[str, Any]) -> StreamingResponse:
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
        answers = llm.process_requests([llm.chat_prompt(asked["messages"])], params)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m"}

        def give_up() -> None:
            thread.dispatcher.abort(answers)

        stream = events(tokens_of(llm, thread, answers[0]), head, give_up)
        return StreamingResponse(stream, media_type="text/event-stream")

    return app


class BoundedQueue:
    """ASGI middleware: a few requests run in `app`, a few wait in order, the others get status 429.

    Only POST requests are counted; everything else goes to the app at once. `seconds` is how long a
    request runs on average. `Retry-After` is the time until a request behind the full queue would
    start, in whole seconds, rounded up.
    """

    def __init__(self, app: ASGIApp, max_running: int, max_waiting: int, seconds: float):
        self.app, self.seconds = app, seconds
        self.max_running, self.max_waiting = max_running, max_waiting
        self.num_waiting = 0
        self._places = asyncio.Semaphore(max_running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request now or in its turn, or refuse it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        if self._places.locked() and self.num_waiting >= self.max_waiting:
            return await self._refuse(scope, receive, send)
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        try:
            return await self.app(scope, receive, send)
        finally:
            self._places.release()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait = (self.num_waiting + 1) * self.seconds / self.max_running
        error = {"message": "The queue is full. Try again later.", "code": "rate_limit_exceeded"}
        headers = {"Retry-After": str(math.ceil(wait))}
        await JSONResponse({"error": error}, 429, headers)(scope, receive, send)


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often other threads ask it to run a call.

    One waking of the loop may serve several such calls.
    """

    num_calls = 0

    def call_soon_threadsafe(  # type: ignore[override]  # the base class types its arguments
        self, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Count the call, and schedule the callback."""
        self.num_calls += 1
        return super().call_soon_threadsafe(callback, *arguments, context=context)


def count_calls(main: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, int]:
    """Run `main()` in a new loop and thread; return its result, and the number of calls."""

    def run() -> tuple[Any, int]:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            result = runner.run(main())
            loop = runner.get_loop()
            assert isinstance(loop, CountingLoop)
            return result, loop.num_calls

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()

"""A chat's endpoint small enough to read at once: from the engine's thread to events on the wire.

The server's own way, for every API, many choices and every error, is `minigen.server.streaming` and
`minigen.server.streaming`.
"""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from typing import Any

from fastapi import FastAPI
from starlette.responses import StreamingResponse

from minigen.engine.engine_thread import EngineThread, TokenEvent
from minigen.errors import RequestError
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, Sequence

Tokens = AsyncIterator[tuple[bytes, str | None]]  # a token's bytes; with the last, why it is that
Events = Callable[[Tokens, dict[str, Any], Callable[[], None]], AsyncIterator[bytes]]


async def chat_events(
    tokens: AsyncIterator[tuple[bytes, str | None]],
    head: dict[str, Any],
    give_up: Callable[[], None],
) -> AsyncIterator[bytes]:
    """An answer as server-sent events: its role, its text as it comes, why it ended, [DONE].

    `tokens` yields the bytes of each token, with None, and with the last one the finish reason. A
    chunk is `head` and "choices", a list of one: "index" 0, "delta", "finish_reason". Text goes
    out as soon as its characters are whole. `give_up()` is called, once, if the stream ends
    before the answer, for whatever reason. Source: OpenAI's API reference; HTML standard,
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


async def tokens_of(llm: LLM, thread: EngineThread, sequence: Sequence) -> Tokens:
    """Queue a sequence, and yield each token's bytes, and the finish reason with the last.

    The event loop is woken for every token.
    """
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[bytes, str | None]]()

    def deliver(sequence: Sequence, news: TokenEvent) -> None:  # called in the engine's thread
        piece = b""  # also of the token that ended it, which is no text
        if isinstance(news, SampledToken) and sequence.finish_reason != "stop":
            piece = llm.tokenizer.token_bytes(news.token_id)
        loop.call_soon_threadsafe(inbox.put_nowait, (piece, sequence.finish_reason))

    thread.submit(sequence, deliver)
    finish_reason = None
    while finish_reason is None:
        piece, finish_reason = await inbox.get()
        yield piece, finish_reason


def small_app(llm: LLM, thread: EngineThread, events: Events = chat_events) -> FastAPI:
    """`POST /v1/chat/completions`, streamed, for OpenAI's client: messages and max_tokens alone.

    Greedy. Give it to a `LocalServer`, with an `EngineThread` that lives as long.
    """
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(asked: dict[str, Any]) -> StreamingResponse:
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
        (answer,) = llm.process_requests([llm.chat_prompt(asked["messages"])], params)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m"}

        def give_up() -> None:
            with suppress(RequestError):  # it has ended meanwhile
                thread.abort(answer.sequence.sequence_id)

        told = events(tokens_of(llm, thread, answer.sequence), head, give_up)
        return StreamingResponse(told, media_type="text/event-stream")

    return app


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread woke it."""

    num_woken = 0

    def call_soon_threadsafe(  # type: ignore[override]  # which types its arguments, too
        self, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Count, and call."""
        self.num_woken += 1
        return super().call_soon_threadsafe(callback, *arguments, context=context)


def count_wakeups(main: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, int]:
    """Run `main()` in a loop and a thread of its own: its result, and how often it was woken."""

    def run() -> tuple[Any, int]:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            result = runner.run(main())
            loop = runner.get_loop()
            assert isinstance(loop, CountingLoop)
            return result, loop.num_woken

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()

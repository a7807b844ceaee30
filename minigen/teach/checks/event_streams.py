"""A stream of server-sent events, held against what a chat's should be; an engine on a stage."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from minigen.teach.messages import Wrong, expect, expect_equal
from minigen.teach.streaming import Events

HEAD = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 51, "model": "tiny"}
SECONDS = 2.0
DONE = ("[DONE]",)  # which no JSON is
Token = tuple[bytes, str | None]


class Stage:
    """An engine that tells tokens one by one, when it is asked to, and hears of being given up."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self.num_given_up = 0

    async def tokens(self) -> AsyncIterator[Token]:
        finish_reason = None
        while finish_reason is None:
            told = await self.inbox.get()
            if isinstance(told, Exception):
                raise told
            piece, finish_reason = told
            yield piece, finish_reason

    def give_up(self) -> None:
        self.num_given_up += 1

    async def begin(self, part: Events) -> AsyncIterator[bytes]:
        stream: Any = part(self.tokens(), HEAD, self.give_up)
        if inspect.iscoroutine(stream):
            await stream
            raise Wrong("returns something; it should yield events, as an async generator does.")
        if not hasattr(stream, "__anext__"):
            raise Wrong(f"returns {stream!r}; it should be an async generator, which yields.")
        return stream


def run(play: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await play
        except TimeoutError as error:
            raise Wrong("waits for tokens that never come; it should end with the last.") from error

    asyncio.run(in_time())


async def all_events(part: Events, *tokens: Token) -> tuple[list[Any], Stage]:
    """All events, read as a client reads them, when the tokens are there from the start."""
    stage = Stage()
    for each in tokens:
        stage.inbox.put_nowait(each)
    stream = await stage.begin(part)
    return read(b"".join([as_bytes(event) async for event in stream])), stage


def as_bytes(event: object) -> bytes:
    expect(isinstance(event, bytes), f"yields {event!r}; it should be bytes: encode the text.")
    assert isinstance(event, bytes)
    return event


def read(raw: bytes) -> list[Any]:
    """The data of every event: JSON, or `DONE`."""
    *events, rest = raw.split(b"\n\n")
    expect(rest == b"", f"the stream ends with {rest!r}; an empty line should end every event.")
    found: list[Any] = []
    for number, event in enumerate(events):
        begins = event.startswith(b"data: ") and b"\n" not in event
        expect(begins, f'event {number} is {event!r}; it should be "data: " and one line.')
        data = event.removeprefix(b"data: ")
        try:
            found.append(DONE if data == b"[DONE]" else json.loads(data))
        except ValueError:
            raise Wrong(f"event {number} has {data!r}, which should be JSON.") from None
    return found


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    """The one choice of every chunk; its head is checked, and its index."""
    chunks, choices = [each for each in events if each != DONE], []
    for number, chunk in enumerate(chunks):
        expect(isinstance(chunk, dict), f"chunk {number} is {chunk!r}; it should be an object.")
        for name, value in HEAD.items():
            expect_equal(chunk.get(name), value, f'"{name}" of chunk {number}')
        listed = chunk.get("choices")
        one = isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], dict)
        expect(one, f'"choices" of chunk {number} is {listed!r}; it should be a list of one.')
        choice = listed[0]
        expect_equal(choice.get("index"), 0, f'"index" of chunk {number}')
        expect("delta" in choice, f'chunk {number} has no "delta"; every chunk should.')
        expect(
            "finish_reason" in choice,
            f'chunk {number} has no "finish_reason"; it should be null before the end.',
        )
        choices.append(choice)
    return choices


def texts_of(events: list[Any]) -> list[str]:
    return [choice["delta"].get("content") or "" for choice in choices_of(events)]


def expect_given_up(stage: Stage, what: str) -> None:
    expect(
        stage.num_given_up == 1,
        f"{what}, and give_up was called {stage.num_given_up} times; it should be called once, "
        "since the engine goes on writing for nobody.",
    )

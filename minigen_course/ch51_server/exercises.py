"""Chapter 51's exercises: read an event stream, write one, and a queue with an end."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from minigen_course.ch51_server.lesson import Events
from minigen_course.ch51_server.queue_checks import QUEUE
from minigen_course.grading.exercise import Wrong, expect, expect_equal

HEAD = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 51, "model": "tiny"}
SECONDS = 2.0
DONE = ("[DONE]",)  # a tuple, which JSON never gives
Token = tuple[bytes, str | None]


class Stage:
    """A fake engine that emits tokens one by one, on demand, and counts the calls of `give_up`."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self.num_given_up = 0

    async def tokens(self) -> AsyncIterator[Token]:
        finish_reason = None
        while finish_reason is None:
            item = await self.inbox.get()
            if isinstance(item, Exception):
                raise item
            piece, finish_reason = item
            yield piece, finish_reason

    def give_up(self) -> None:
        self.num_given_up += 1

    async def begin(self, part: Events) -> AsyncIterator[bytes]:
        stream: Any = part(self.tokens(), dict(HEAD), self.give_up)
        if inspect.iscoroutine(stream):
            await stream
            raise Wrong(
                "is a coroutine that returns; it should be an async generator that yields events."
            )
        if not hasattr(stream, "__anext__"):
            raise Wrong(f"returns {stream!r}; it should be an async generator that yields events.")
        return stream


def run(play: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await play
        except TimeoutError as error:
            raise Wrong(
                "waits for tokens that never come; it should end after the last."
            ) from error

    asyncio.run(in_time())


async def all_events(part: Events, *tokens: Token) -> tuple[list[Any], Stage]:
    """Return all events as a client reads them; all tokens are available from the start."""
    stage = Stage()
    for each in tokens:
        stage.inbox.put_nowait(each)
    stream = await stage.begin(part)
    return read(b"".join([as_bytes(event) async for event in stream])), stage


def as_bytes(event: object) -> bytes:
    expect(
        isinstance(event, bytes), f"yields {event!r}; it should yield bytes, so encode the text."
    )
    assert isinstance(event, bytes)
    return event


def read(raw: bytes) -> list[Any]:
    """Return the data of every event: JSON, or `DONE`."""
    *events, rest = raw.split(b"\n\n")
    expect(rest == b"", f"the stream ends with {rest!r}; an empty line should end every event.")
    found: list[Any] = []
    for number, event in enumerate(events):
        is_line = event.startswith(b"data: ") and b"\n" not in event
        expect(is_line, f'event {number} is {event!r}; it should be "data: " and one line of data.')
        data = event.removeprefix(b"data: ")
        try:
            found.append(DONE if data == b"[DONE]" else json.loads(data))
        except ValueError:
            raise Wrong(f"event {number} has {data!r}, which should be JSON.") from None
    return found


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    """Return the one choice of every chunk, after checks of the head and the index."""
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


def expect_aborted(stage: Stage, what: str) -> None:
    expect(
        stage.num_given_up == 1,
        f"{what}, and give_up was called {stage.num_given_up} times; it should be called once, "
        "because otherwise the engine goes on without a reader.",
    )


def the_role_comes_first(part: Events) -> None:
    """the first event of a stream, before any token:"""

    async def play() -> None:
        stage = Stage()
        stream = await stage.begin(part)
        first = as_bytes(await anext(stream))
        (choice,) = choices_of(read(first))
        role = choice["delta"].get("role")
        expect_equal(role, "assistant", "the role of the first chunk")
        expect(not choice["delta"].get("content"), "the first chunk has text; it should have none.")
        expect_equal(choice["finish_reason"], None, "the finish_reason of the first chunk")
        stage.inbox.put_nowait((b"a", "stop"))
        rest = choices_of(read(b"".join([as_bytes(each) async for each in stream])))
        roles = [each["delta"].get("role") for each in rest]
        expect(not any(roles), "the role is sent again; it should be in the first chunk only.")

    run(play())


def text_is_sent_at_once(part: Events) -> None:
    """each token is sent before the next one arrives:"""

    async def play() -> None:
        stage = Stage()
        stream = await stage.begin(part)
        await anext(stream)
        for number, piece in enumerate((b"The", b" owl", b' "flies"\n\n')):
            stage.inbox.put_nowait((piece, None))
            event = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait([event], timeout=0.5)
            if not done:
                event.cancel()
                raise Wrong(
                    f"token {number} arrived, but no event was sent before the next token; it "
                    "should be sent at once."
                )
            expect_equal(texts_of(read(as_bytes(event.result()))), [piece.decode()], "the text")
        stage.inbox.put_nowait((b"", "stop"))
        async for _ in stream:
            pass

    run(play())


def it_ends_with_the_finish_reason_and_done(part: Events) -> None:
    """two tokens, the second one with a finish reason:"""

    async def play() -> None:
        for reason in ("length", "stop"):
            events, _ = await all_events(part, (b"one", None), (b" two", reason))
            expect(events[-1] == DONE, "the last event is not [DONE]; it should be.")
            expect_equal(events.count(DONE), 1, "the number of [DONE] events")
            choices = choices_of(events)
            reasons = [each["finish_reason"] for each in choices]
            expected: list[str | None] = [*[None] * (len(choices) - 1), reason]
            expect_equal(reasons, expected, "the finish_reason of each chunk")
            expect_equal("".join(texts_of(events)), "one two", "the text of all chunks")
            expect_equal(choices[-1]["delta"], {}, "the delta of the chunk with the finish reason")

    run(play())


def no_character_is_split(part: Events) -> None:
    """an owl emoji whose four bytes come in three tokens:"""

    async def play() -> None:
        owl = "🦉".encode()
        tokens = ((b"A " + owl[:1], None), (owl[1:3], None), (owl[3:] + b"!", None), (b"", "stop"))
        events, _ = await all_events(part, *tokens)
        texts = [each for each in texts_of(events) if each]
        expect_equal(texts, ["A ", "🦉!"], "the texts of the chunks")
        empty = [each for each in choices_of(events)[1:-1] if not each["delta"].get("content")]
        expect(
            not empty, "a chunk has no text; it should be sent only once a character is complete."
        )

    run(play())


def an_incomplete_character_is_replaced(part: Events) -> None:
    """an answer that ends in the middle of a character:"""

    async def play() -> None:
        events, _ = await all_events(part, (b"caf", None), (b"\xc3", "length"))
        expect_equal("".join(texts_of(events)), "caf\ufffd", "the text")

    run(play())


def a_disconnect_is_noticed(part: Events) -> None:
    """the client disconnects before a token, after one, and while waiting for one:"""

    async def play() -> None:
        for num_read in (1, 2):
            stage = Stage()
            stage.inbox.put_nowait((b"a", None))
            stream: Any = await stage.begin(part)
            for _ in range(num_read):
                await anext(stream)
            await stream.aclose()
            expect_aborted(stage, f"the stream was closed after {num_read} events")
        stage = Stage()
        stream = await stage.begin(part)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        expect_aborted(stage, "its task was cancelled")

    run(play())


def a_failure_is_noticed(part: Events) -> None:
    """the engine fails after a token:"""

    async def play() -> None:
        stage = Stage()
        stage.inbox.put_nowait((b"a", None))
        stage.inbox.put_nowait(RuntimeError("the model failed"))
        stream = await stage.begin(part)
        try:
            async for _ in stream:
                pass
        except RuntimeError:
            pass
        else:
            raise Wrong("the engine's error was lost; it should be raised again.")
        expect_aborted(stage, "the engine failed")

    run(play())


def a_complete_answer_is_not_aborted(part: Events) -> None:
    """an answer that is complete:"""

    async def play() -> None:
        _, stage = await all_events(part, (b"a", None), (b"b", "stop"))
        expect_equal(stage.num_given_up, 0, "the number of give_up calls after a complete answer")

    run(play())


def events_of(part: Any, *pieces: bytes) -> list[str]:
    found = part(iter(pieces))
    expect(
        hasattr(found, "__iter__") and not isinstance(found, str),
        f"returns {found!r}; it should be a generator that yields each event's data.",
    )
    events = list(found)
    for each in events:
        expect(isinstance(each, str), f"yields {each!r}; it should yield text, so decode the line.")
    return events


def one_line_is_one_event(part: Any) -> None:
    """two events, each with one line of data:"""
    found = events_of(part, b'data: {"a": 1}\n\ndata: [DONE]\n\n')
    expect_equal(found, ['{"a": 1}', "[DONE]"], "the data of the events")
    found = events_of(part, b"data: The\n\n", b"data:  owl \n\n", b"data:s\n\n")
    expect_equal(found, ["The", " owl ", "s"], "the data, without one space after the colon")


def pieces_end_anywhere(part: Any) -> None:
    """two events that arrive in two pieces, or byte by byte:"""
    raw = "data: 🦉: one\n\ndata: two\n\n".encode()
    for cut in range(len(raw)):
        found = events_of(part, raw[:cut], raw[cut:])
        expect_equal(found, ["🦉: one", "two"], f"the data, cut after {cut} bytes")
    found = events_of(part, *(bytes([each]) for each in raw))
    expect_equal(found, ["🦉: one", "two"], "the data, byte by byte")


def an_event_is_given_at_once(part: Any) -> None:
    """an event whose empty line has arrived, before the next piece:"""
    num_read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal num_read
        for each in (b"data: one\n\nda", b"ta: two\n", b"\n", b"data: three\n\n"):
            num_read += 1
            yield each

    read_before = []
    for _ in part(pieces()):
        read_before.append(num_read)
    expect_equal(read_before, [1, 3, 4], "the number of pieces read before each event")


def lines_of_one_event_are_joined(part: Any) -> None:
    """an event with two data lines:"""
    found = events_of(part, b"data: one\ndata: two\n\ndata: three\n\n")
    expect_equal(found, ["one\ntwo", "three"], "the data of the events")
    found = events_of(part, b"data:\n\ndata: one\n\ndata:\ndata: two\n\n")
    expect_equal(found, ["", "one", "\ntwo"], "the data of the events, of which some is empty")


def other_lines_are_left_out(part: Any) -> None:
    """comments, other fields, and events without a data line:"""
    raw = b": ping\n\n:\n\nevent: note\nid: 7\ndata: one\n:\ndata: more\nretry: 9\n\n\n\nid: 8\n\n"
    found = events_of(part, raw, b"database: no\ndata: two\n\n")
    expect_equal(found, ["one\nmore", "two"], "the data of the events")


def a_pair_ends_a_line_too(part: Any) -> None:
    """lines that end with a carriage return and a line feed, in one piece or cut:"""
    raw = b"data: one\r\n\r\ndata: two\r\ndata: three\r\n\r\n"
    for cut in range(len(raw)):
        found = events_of(part, raw[:cut], raw[cut:])
        expect_equal(found, ["one", "two\nthree"], f"the data, cut after {cut} bytes")


def an_event_without_its_end_is_left_out(part: Any) -> None:
    """a body that breaks off in the middle of an event:"""
    for rest in (b"data: tw", b"data: two\n"):
        found = events_of(part, b"data: one\n\n" + rest)
        expect_equal(found, ["one"], f"the data before {rest!r}")
    expect_equal(events_of(part), [], "the data of an empty body")


CHECKS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "event_data": (
        one_line_is_one_event,
        pieces_end_anywhere,
        an_event_is_given_at_once,
        lines_of_one_event_are_joined,
        other_lines_are_left_out,
        a_pair_ends_a_line_too,
        an_event_without_its_end_is_left_out,
    ),
    "chat_events": (
        the_role_comes_first,
        text_is_sent_at_once,
        it_ends_with_the_finish_reason_and_done,
        no_character_is_split,
        an_incomplete_character_is_replaced,
        a_disconnect_is_noticed,
        a_failure_is_noticed,
        a_complete_answer_is_not_aborted,
    ),
    "BoundedQueue": QUEUE,
}

"""Chapter 51's exercise: an answer as server-sent events, aborted when its client disconnects."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from minigen_course.ch51_server.lesson import Events, chat_events
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import Wrong, expect, expect_equal

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
        expect(not any(roles), "the role is told again; it should be in the first chunk only.")

    run(play())


def text_comes_as_it_is_made(part: Events) -> None:
    """a token goes out before the next one is there:"""

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
                    f"token {number} was made, and no event came of it before the next token; "
                    "it should be sent at once."
                )
            expect_equal(texts_of(read(as_bytes(event.result()))), [piece.decode()], "the text")
        stage.inbox.put_nowait((b"", "stop"))
        async for _ in stream:
            pass

    run(play())


def it_ends_with_why_and_done(part: Events) -> None:
    """two tokens, the second the last that was allowed:"""

    async def play() -> None:
        for reason in ("length", "stop"):
            events, _ = await all_events(part, (b"one", None), (b" two", reason))
            expect(events[-1] == DONE, "the last event is not [DONE], which it should be.")
            expect_equal(events.count(DONE), 1, "how often [DONE] comes")
            choices = choices_of(events)
            reasons = [each["finish_reason"] for each in choices]
            expected: list[str | None] = [*[None] * (len(choices) - 1), reason]
            expect_equal(reasons, expected, "the finish_reason of each chunk")
            expect_equal("".join(texts_of(events)), "one two", "the text of all chunks")
            expect_equal(choices[-1]["delta"], {}, "the delta of the chunk that says why")

    run(play())


def no_character_is_split(part: Events) -> None:
    """an owl whose four bytes come in three tokens:"""

    async def play() -> None:
        owl = "🦉".encode()
        tokens = ((b"A " + owl[:1], None), (owl[1:3], None), (owl[3:] + b"!", None), (b"", "stop"))
        events, _ = await all_events(part, *tokens)
        texts = [each for each in texts_of(events) if each]
        expect_equal(texts, ["A ", "🦉!"], "the texts of the chunks")
        empty = [each for each in choices_of(events)[1:-1] if not each["delta"].get("content")]
        expect(not empty, "a chunk has no text; it should wait until a character is whole.")

    run(play())


def what_stays_incomplete_is_told(part: Events) -> None:
    """an answer that is cut off within a character:"""

    async def play() -> None:
        events, _ = await all_events(part, (b"caf", None), (b"\xc3", "length"))
        expect_equal("".join(texts_of(events)), "caf\ufffd", "the text")

    run(play())


def a_client_that_goes_is_noticed(part: Events) -> None:
    """the client goes away: before a token, after one, while waiting for one:"""

    async def play() -> None:
        for num_read in (1, 2):
            stage = Stage()
            stage.inbox.put_nowait((b"a", None))
            stream: Any = await stage.begin(part)
            for _ in range(num_read):
                await anext(stream)
            await stream.aclose()
            expect_given_up(stage, f"the stream was closed after {num_read} events")
        stage = Stage()
        stream = await stage.begin(part)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        expect_given_up(stage, "its task was cancelled")

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
        expect_given_up(stage, "the engine failed")

    run(play())


def what_has_ended_is_not_given_up(part: Events) -> None:
    """an answer that came to its end:"""

    async def play() -> None:
        _, stage = await all_events(part, (b"a", None), (b"b", "stop"))
        expect_equal(stage.num_given_up, 0, "how often a whole answer was given up")

    run(play())


EXERCISES = (
    Exercise(
        "chat_events",
        chat_events,
        (
            the_role_comes_first,
            text_comes_as_it_is_made,
            it_ends_with_why_and_done,
            no_character_is_split,
            what_stays_incomplete_is_told,
            a_client_that_goes_is_noticed,
            a_failure_is_noticed,
            what_has_ended_is_not_given_up,
        ),
        (
            "An event is `data: `, a line of JSON, and an empty line: two line ends. Begin with "
            "the role, go on with `async for piece, finish_reason in tokens`.",
            'codecs.getincrementaldecoder("utf-8")(errors="replace") holds back what is not whole '
            "yet; with final=True it gives out what is left.",
            "A client that goes away closes your generator, or cancels it: both arrive as an "
            "exception at a yield or an await. `finally` hears of all of them.",
        ),
        "Write the async generator that turns an answer's tokens into server-sent events: a chunk "
        "with the role, a chunk for each text that is whole, a chunk with the finish reason and an "
        "empty delta, and [DONE]. If it ends before the answer does, it calls `give_up()`.",
        """from openai import OpenAI

from minigen.engine.engine_thread import EngineThread
from minigen_course import load_model
from minigen.server.local import LocalServer
from minigen_course.ch51_server.lesson import small_app

llm = load_model(weights="int4")
owls = [{"role": "user", "content": "Tell me about owls."}]
with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread, mine)) as server:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = {"model": "m", "messages": owls, "max_tokens": 24}
    for chunk in client.chat.completions.create(**asked, stream=True):
        print(chunk.choices[0].delta.content or "", end="")""",
        "A client may ask for `stream_options: {include_usage: true}`. Then a last chunk before "
        "[DONE] has no choices, and `usage`. And what if the engine fails after the first event, "
        "when status 200 has long been sent? Send an event that has an `error`.",
    ),
)

"""Cases of chapter 51's exercises, drawn by a seed."""

import asyncio
import codecs
from itertools import pairwise
from random import Random
from typing import Any

from minigen_course.ch51_server.exercises import DONE, Stage, Token, as_bytes, choices_of, read
from minigen_course.ch51_server.exercises import run as in_time
from minigen_course.ch51_server.queue_checks import Door, settle
from minigen_course.grading.exercise import Wrong
from minigen_course.grading.varied import Varied

WORDS = ("tea", " owl", "rain ", "a:b", "café", "🦉 here", "日本", "moon")

OTHER = (": ping", ":", "event: note", "id: 7", "retry: 9", "database: no")


def cut_bytes(random: Random, raw: bytes, count: int) -> list[bytes]:
    """Cut a body into `count` pieces, anywhere."""
    places = [0, *sorted(random.sample(range(1, len(raw)), count - 1)), len(raw)]
    return [raw[begin:end] for begin, end in pairwise(places)]


def _event_data(random: Random) -> dict[str, Any]:
    end = random.choice(("\n", "\r\n"))
    lines = []
    for count in random.sample((1, 1, 2), 3):
        own = [
            f"data:{random.choice((' ', ' ', ''))}{each}" for each in random.sample(WORDS, count)
        ]
        own.insert(random.randrange(len(own) + 1), random.choice(OTHER))
        lines += [*own, ""]
    alone = [random.choice(OTHER), ""]
    lines = random.choice(([*alone, *lines], [*lines, *alone]))
    lines += random.choice(([], ["data: late"]))
    raw = "".join(line + end for line in lines).encode()
    return {"pieces": cut_bytes(random, raw, random.choice((3, 4, 5)))}


def _data_and_pieces(part: Any, pieces: list[bytes]) -> list[tuple[str, int]]:
    """Read the pieces one by one.

    The result has, for each event, its data and how many pieces had been read by then.
    """
    num_read, found = 0, []

    def one_by_one() -> Any:
        nonlocal num_read
        for each in pieces:
            num_read += 1
            yield each

    for data in part(one_by_one()):
        found.append((data, num_read))
    return found


def cut_characters(random: Random, characters: str, count: int) -> list[list[bytes]]:
    """Return `count` of the characters, each cut into tokens."""
    chosen = [each.encode() for each in random.sample(characters, count)]
    return [cut_bytes(random, raw, random.randint(2, len(raw))) for raw in chosen]


def _tokens(random: Random) -> list[Token]:
    """Return the tokens of an answer; two characters of several bytes are cut."""
    words = random.sample(("Tea", " and rain", ' "so"', "\n\n", " moon"), 3)
    parts = [[word.encode()] for word in words] + cut_characters(random, "é東🦉", 2)
    random.shuffle(parts)
    pieces = [piece for part in parts for piece in part]
    pieces += random.choice(([b"!"], [b""], [b" ", b"\xc3"]))
    reasons = [None] * (len(pieces) - 1) + [random.choice(("stop", "length"))]
    return list(zip(pieces, reasons, strict=True))


def texts_of(tokens: list[Token]) -> list[str]:
    """Return the texts of an answer, each as soon as its characters are complete."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [utf8.decode(piece, final=reason is not None) for piece, reason in tokens]
    return [each for each in texts if each]


def _chat_events(random: Random) -> dict[str, Any]:
    tokens = _tokens(random)
    return {
        "tokens": tokens,
        "closed_after": random.randint(1, len(texts_of(tokens[:-1]))),
        "failed_after": random.randrange(len(tokens)),
    }


def _streams(
    part: Any, tokens: list[Token], closed_after: int, failed_after: int
) -> dict[str, Any]:
    """Stream the answer four times, and note what a client gets and how often `give_up` is called.

    First, the client reads all of it. Second, it closes the stream after `closed_after` events.
    Third, the engine fails after `failed_after` tokens. Fourth, it brings as many and then no more,
    until the client's task is cancelled.
    """
    found: dict[str, Any] = {}

    async def whole() -> None:
        stage = _stage(tokens)
        stream = await stage.begin(part)
        raw = b"".join([as_bytes(event) async for event in stream])
        found["events"] = [_said(event) for event in read(raw)]
        found["give_up"] = [stage.num_given_up]

    async def closed() -> None:
        stage = _stage(tokens)
        stream: Any = await stage.begin(part)
        for _ in range(closed_after):
            await anext(stream)
        await stream.aclose()
        found["give_up"].append(stage.num_given_up)

    async def failed() -> None:
        stage = _stage(tokens[:failed_after])
        stage.inbox.put_nowait(RuntimeError("the model failed"))
        try:
            async for _ in await stage.begin(part):
                pass
        except RuntimeError:
            found["give_up"].append(stage.num_given_up)
        else:
            raise Wrong("the engine's error was lost; it should be raised again.")

    async def cancelled() -> None:
        stage = _stage(tokens[:failed_after])
        stream = await stage.begin(part)

        async def reads() -> None:
            async for _ in stream:
                pass

        task = asyncio.ensure_future(reads())
        await settle()
        task.cancel()
        await asyncio.wait([task])
        found["give_up"].append(stage.num_given_up)

    for play in (whole, closed, failed, cancelled):
        in_time(play())
    return found


def _stage(tokens: list[Token]) -> Stage:
    stage = Stage()
    for each in tokens:
        stage.inbox.put_nowait(each)
    return stage


def _said(event: Any) -> Any:
    """Return what an event says: its role or text, and its finish reason."""
    if event == DONE:
        return "[DONE]"
    (choice,) = choices_of([event])
    said = {**choice["delta"], "finish_reason": choice["finish_reason"]}
    return {name: value for name, value in said.items() if value}


def _queue(random: Random) -> dict[str, Any]:
    max_running, max_waiting = random.choice((1, 2)), random.choice((1, 2, 2))
    names = iter("abcdefghijklmnop")
    running: list[str] = []
    waiting: list[str] = []
    steps = []

    def arrive() -> None:
        name = next(names)
        steps.append(f"{name} comes")
        if len(running) < max_running:
            running.append(name)
        elif len(waiting) < max_waiting:
            waiting.append(name)

    def leave(how: str, line: list[str]) -> None:
        name = line.pop(random.randrange(len(line)))
        steps.append(f"{name} {how}")
        if line is running and waiting:
            running.append(waiting.pop(0))

    for _ in range(max_running + max_waiting + 1):
        arrive()
    steps.append("GET")
    leave("leaves", waiting)
    arrive()
    arrive()
    hows = ["ends", "fails", "leaves"]
    for how in random.sample(hows, 3):
        leave(how, running)
        if random.random() < 0.6 or not running:
            arrive()
    return {
        "max_running": max_running,
        "max_waiting": max_waiting,
        "seconds": random.choice((1.5, 2.5, 3.0, 5.0, 7.0)),
        "steps": steps,
    }


def _door(part: Any, max_running: int, max_waiting: int, seconds: float, steps: list[str]) -> Any:
    """Let requests come and go before an app, and note after each step which ones reach the app.

    `leaves` means that the request's task is cancelled, `fails` that the app raises an error for
    it; GET is a health check. A refusal is noted with its `Retry-After`.
    """
    noted: list[str] = []

    async def play() -> None:
        door = Door(part, max_running, max_waiting, seconds)
        tasks: dict[str, asyncio.Task[Any]] = {}
        for step in steps:
            num_started = len(door.started)
            name, _, what = step.partition(" ")
            if what == "ends":
                await door.end(name)
            elif what == "fails":
                await door.end(name, RuntimeError("the model failed"))
                raised = tasks[name].done() and isinstance(tasks[name].exception(), RuntimeError)
                if not raised:
                    raise Wrong(f"the app failed for request {name!r}; its error should be raised.")
            elif what == "leaves":
                tasks[name].cancel()
                await settle()
            else:
                tasks[name] = await door.ask(name, method="POST" if what else "GET")
            now = [f"{each} starts" for each in door.started[num_started:]]
            if what == "comes" and tasks[name].done():
                now.append(f"429, {door.expect_refused(name).get('retry-after')} s")
            noted.append(", ".join(now) or "-")

    in_time(play())
    return noted


VARIED = {
    "event_data": Varied(
        "words, line ends, other fields, where the body is cut", _event_data, _data_and_pieces
    ),
    "chat_events": Varied(
        "tokens, finish reason, when the client leaves or the engine fails", _chat_events, _streams
    ),
    "BoundedQueue": Varied(
        "places, seconds, who comes, ends, fails and leaves, in which order", _queue, _door
    ),
}

"""Answers to the exercises of chapter 51."""

import asyncio
import codecs
import json
import math
import re
from collections import deque
from typing import Any

from starlette.responses import JSONResponse, Response

from tests.answers import Answers


class ByHand:
    """Right, as a class with the methods of an async generator."""

    def __init__(self, tokens: Any, head: Any, give_up: Any):
        self.tokens, self.head, self.give_up = tokens, head, give_up
        self.whole, self.ended, self.over = b"", False, False
        self.queue = [self.chunk({"role": "assistant"})]

    def chunk(self, delta: Any, reason: Any = None) -> bytes:
        choices = [{"delta": delta, "index": 0, "finish_reason": reason}]
        return f"data: {json.dumps(self.head | {'choices': choices})}\n\n".encode()

    def __aiter__(self) -> "ByHand":
        return self

    async def __anext__(self) -> bytes:
        while not self.queue:
            if self.ended:
                self.over = True
                raise StopAsyncIteration
            try:
                piece, reason = await anext(self.tokens)
            except BaseException:
                await self.aclose()
                raise
            self.take(piece, reason)
        return self.queue.pop(0)

    def take(self, piece: bytes, reason: Any) -> None:
        self.whole += piece
        try:
            text, self.whole = self.whole.decode(), b""
        except UnicodeDecodeError as error:
            text, self.whole = self.whole[: error.start].decode(), self.whole[error.start :]
        if reason is not None:
            text += self.whole.decode(errors="replace")
        if text:
            self.queue.append(self.chunk({"content": text}))
        if reason is not None:
            self.ended = True
            self.queue += [self.chunk({}, reason), b"data: [DONE]\n\n"]

    async def aclose(self) -> None:
        if not (self.over or self.ended):
            self.over = True
            self.give_up()


async def with_except(tokens: Any, head: Any, give_up: Any) -> Any:
    """Right, with `except` instead of `finally`, and without ASCII escapes."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def chunk(delta: Any, reason: Any) -> bytes:
        made = dict(head, choices=[{"finish_reason": reason, "delta": delta, "index": 0}])
        return b"data: %s\n\n" % json.dumps(made, ensure_ascii=False).encode()

    try:
        yield chunk({"role": "assistant", "content": None}, None)
        async for piece, reason in tokens:
            if text := decode(piece, reason is not None):
                yield chunk({"content": text}, None)
            if reason is not None:
                break
    except BaseException:
        give_up()
        raise
    yield chunk({}, reason) + b"data: [DONE]\n\n"


def wrong(name: str) -> Any:
    """Return the answer with one mistake."""

    def chunk(head: Any, delta: Any, reason: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        if name == "no finish_reason before the end" and reason is None:
            del choice["finish_reason"]
        if name == "message instead of delta":
            choice["message"] = choice.pop("delta")
        if name == "index from one":
            choice["index"] = 1
        data = {**({} if name == "head forgotten" else head), "choices": [choice]}
        if name == "a choice that is no list":
            data["choices"] = choice
        text = json.dumps(data)
        if name == "JSON by hand":
            text = text.replace("\\n", "\n").replace('\\"', '"')
        if name == "Python's own words":
            text = repr(data)
        begin = "" if name == "no data:" else "data: "
        return (begin + text + ("\n" if name == "one line end" else "\n\n")).encode()

    async def events(tokens: Any, head: Any, give_up: Any) -> Any:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        errors = {"split, and replaced": "replace", "split, and left out": "ignore"}
        given, reason, held = False, None, b""
        role = {"role": "assistant", "content": ""}
        try:
            if name not in ("role missing", "role with the first text"):
                yield chunk(head, role)
            if name == "role twice":
                yield chunk(head, role)
            async for piece, reason in tokens:
                last = reason is not None
                if name == "split, and raised":
                    text = piece.decode()
                elif name in errors:
                    text = piece.decode(errors=errors[name])
                elif name == "a byte is a character":
                    text = piece.decode("latin-1")
                else:
                    text = utf8.decode(piece, final=last and name != "tail forgotten")
                if name == "last token forgotten" and last:
                    break
                if name == "all at the end":
                    held += text.encode()
                    text = held.decode() if last else ""
                if name == "one token late":
                    text, held = held.decode() + (text if last else ""), text.encode()
                delta = {"content": text}
                if name == "role in each" or (name == "role with the first text" and not given):
                    delta["role"], given = "assistant", True
                early = reason if name == "finish_reason with the text" else None
                if text or name == "empty chunks":
                    yield chunk(head, delta, early)
            if name == "finish_reason always stop":
                yield chunk(head, {}, "stop")
            elif name not in ("finish_reason lost", "finish_reason with the text"):
                yield chunk(head, {}, reason)
            if name == "[DONE] as JSON":
                yield b'data: "[DONE]"\n\n'
            elif name != "[DONE] missing":
                yield b"data: [DONE]\n\n"
            if name == "[DONE] twice":
                yield b"data: [DONE]\n\n"
            if name == "gives up when all is well":
                give_up()
        except asyncio.CancelledError:
            if name != "ignores cancellation":
                give_up()
            raise
        except GeneratorExit:
            if name not in ("ignores closing", "only failures count"):
                give_up()
            raise
        except RuntimeError:
            if name != "ignores failures":
                give_up()
            if name != "swallows failures":
                raise
        finally:
            if name == "always gives up" or (name == "gives up twice" and reason is None):
                give_up()

    async def never_aborted(tokens: Any, head: Any, give_up: Any) -> Any:
        async for each in events(tokens, head, lambda: None):
            yield each

    async def returned(tokens: Any, head: Any, give_up: Any) -> Any:
        return [each async for each in events(tokens, head, give_up)]

    async def as_text(tokens: Any, head: Any, give_up: Any) -> Any:
        async for each in events(tokens, head, give_up):
            yield each.decode()

    async def for_ever(tokens: Any, head: Any, give_up: Any) -> Any:
        async for each in events(tokens, head, give_up):
            yield each
        await asyncio.Event().wait()

    whole = {
        "never gives up": never_aborted,
        "returns a list": returned,
        "yields text": as_text,
        "waits for ever": for_ever,
        "returns nothing": lambda tokens, head, give_up: None,
    }
    return whole.get(name, events)


WRONG = [
    *("no finish_reason before the end", "message instead of delta", "index from one"),
    *("head forgotten", "a choice that is no list", "JSON by hand", "Python's own words"),
    *("no data:", "one line end", "role missing", "role with the first text", "role twice"),
    *("role in each", "split, and raised", "split, and replaced", "split, and left out"),
    *("a byte is a character", "tail forgotten", "last token forgotten", "all at the end"),
    *("one token late", "empty chunks", "finish_reason with the text", "finish_reason lost"),
    *("finish_reason always stop", "[DONE] as JSON", "[DONE] missing", "[DONE] twice"),
    *("gives up when all is well", "ignores cancellation", "ignores closing", "ignores failures"),
    *("only failures count", "swallows failures", "always gives up", "gives up twice"),
    *("never gives up", "returns a list", "yields text", "waits for ever", "returns nothing"),
]


def by_character(pieces: Any) -> Any:
    """Right, as a machine that takes one character at a time."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    line, data, has_data = "", "", False
    for piece in pieces:
        for character in utf8.decode(piece):
            if character != "\n":
                line += character
                continue
            line = line[:-1] if line.endswith("\r") else line
            if line == "":
                if has_data:
                    yield data[:-1]
                data, has_data = "", False
            elif line == "data" or line.startswith("data:"):
                value = line[5:]
                data += (value[1:] if value.startswith(" ") else value) + "\n"
                has_data = True
            line = ""


def by_expression(pieces: Any) -> Any:
    """Right, with regular expressions over whole events."""
    rest = b""
    for piece in pieces:
        rest += piece
        while end := re.search(rb"(?:^|\n)\r?\n", rest):
            event, rest = rest[: end.start()], rest[end.end() :]
            values = re.findall(rb"(?m)^data:(?: )?([^\r\n]*)", event)
            if values:
                yield b"\n".join(values).decode()


def wrong_reader(name: str) -> Any:
    """Return a reader of events with one mistake."""

    def reads(pieces: Any) -> Any:
        if name == "all at the end":
            pieces = [b"".join(pieces)]
        rest, data = b"", []
        for piece in pieces:
            if name == "each piece alone":
                *lines, rest = piece.split(b"\n")
            elif name == "text of each piece":
                *lines, rest = (rest + piece.decode(errors="replace").encode()).split(b"\n")
            elif name == "splitlines":
                lines, rest = (rest + piece).splitlines(), b""
            else:
                *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                text = (line if name == "carriage return kept" else line.rstrip(b"\r")).decode()
                field, _, value = text.partition(":")
                if name == "last colon":
                    field, _, value = text.rpartition(":")
                if name == "space kept":
                    cut = value
                elif name == "all spaces removed":
                    cut = value.strip()
                else:
                    cut = value.removeprefix(" ")
                is_data = field == "data"
                if name == "begins with data":
                    is_data = text.startswith("data")
                if name == "any field":
                    is_data = bool(field)
                if name == "comments are data" and text.startswith(":"):
                    is_data = True
                if is_data:
                    if name == "first line only" and data:
                        continue
                    data = [*([] if name == "last line only" else data), cut]
                    if name == "each line an event":
                        yield cut
                        data = []
                elif not text or (name == "a comment ends it" and not field):
                    if data or name == "empty events":
                        end = {"joined by nothing": "", "joined by a space": " "}.get(name, "\n")
                        yield end.join(data) + ("\n" if name == "line feed at the end" else "")
                    if name != "data kept":
                        data = []
        if name == "the rest counts" and data:
            yield "\n".join(data)

    if name == "yields bytes":
        return lambda pieces: (each.encode() for each in reads(pieces))
    if name == "returns nothing":
        return lambda pieces: None
    if name == "[DONE] left out":
        return lambda pieces: (each for each in reads(pieces) if each != "[DONE]")
    return reads


WRONG_READERS = [
    *("all at the end", "each piece alone", "text of each piece", "splitlines"),
    *("carriage return kept", "last colon", "space kept", "all spaces removed"),
    *("begins with data", "any field", "comments are data", "first line only", "last line only"),
    *("each line an event", "a comment ends it", "empty events", "joined by nothing"),
    *("joined by a space", "line feed at the end", "data kept", "the rest counts"),
    *("yields bytes", "returns nothing", "[DONE] left out"),
]


class WithFutures:
    """Right, with a place that is handed from a request to the first one that waits."""

    def __init__(self, app: Any, max_running: int, max_waiting: int, seconds: float):
        self.app, self.most, self.free = app, max_waiting, max_running
        self.after = str(math.ceil((max_waiting + 1) * seconds / max_running))
        self.line: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (scope["type"], scope.get("method")) != ("http", "POST"):
            await self.app(scope, receive, send)
            return
        if self.free:
            self.free -= 1
        elif len(self.line) < self.most:
            turn = asyncio.get_running_loop().create_future()
            self.line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self.line:
                    self.line.remove(turn)
                else:
                    self.give_back()
                raise
        else:
            start = {"type": "http.response.start", "status": 429}
            headers = [(b"retry-after", self.after.encode())]
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "full"}}'})
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self.give_back()

    def give_back(self) -> None:
        while self.line:
            turn = self.line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


def with_places(app: Any, max_running: int, max_waiting: int, seconds: float) -> Any:
    """Right, as a function, with the places in an `asyncio.Queue`."""
    places: asyncio.Queue[int] = asyncio.Queue()
    for each in range(max_running):
        places.put_nowait(each)
    waiting: set[object] = set()

    async def ask(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await app(scope, receive, send)
        if places.empty() and len(waiting) == max_waiting:
            wait = math.ceil((max_waiting + 1) * seconds / max_running)
            refusal = JSONResponse({"error": {"message": "later"}}, 429, {"retry-after": f"{wait}"})
            return await refusal(scope, receive, send)
        me = object()
        waiting.add(me)
        try:
            place = await places.get()
        finally:
            waiting.discard(me)
        try:
            await app(scope, receive, send)
        finally:
            places.put_nowait(place)

    return ask


PLACES: dict[str, asyncio.Semaphore] = {}


def wrong_queue(name: str) -> Any:
    """Return a queue with one mistake."""

    class Queue:
        def __init__(self, app: Any, max_running: int, max_waiting: int, seconds: float):
            self.app, self.seconds = app, seconds
            self.running, self.waiting = max_running, max_waiting
            self.num_waiting, self.line = 0, list[asyncio.Future[None]]()
            more = {"one too many runs": 1, "all run": 999}.get(name, 0)
            self.places = asyncio.Semaphore(max_running + more)
            if name == "one queue for all":
                loop = id(asyncio.get_running_loop())
                key = f"{loop} {max_running} {max_waiting}"
                self.places = PLACES.setdefault(key, self.places)
            self.free = max_running

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            counts = scope["type"] == "http" and scope.get("method") == "POST"
            if name == "health waits":
                counts = scope["type"] == "http"
            if name == "the start waits":
                counts = scope.get("method") in (None, "POST")
            if not counts:
                return await self.app(scope, receive, send)
            if name == "last come, first served":
                return await self.backwards(scope, receive, send)
            room = self.waiting + {"one too many waits": 1, "one too few waits": -1}.get(name, 0)
            if name == "none waits":
                room = 0
            full = self.places.locked() and self.num_waiting >= room
            if name == "the running count as waiting":
                full = self.num_waiting >= room
            if full and name != "never refuses":
                return await self.refuse(scope, receive, send)
            self.num_waiting += 1
            try:
                await self.places.acquire()
            except asyncio.CancelledError:
                if name != "a waiting one never leaves":
                    self.num_waiting -= 1
                if name == "a place for one that left":
                    self.places.release()
                raise
            if name != "the running still wait":
                self.num_waiting -= 1
            try:
                await self.app(scope, receive, send)
            except asyncio.CancelledError:
                if name != "place lost when cancelled":
                    self.places.release()
                raise
            except RuntimeError:
                if name != "place lost after an error":
                    self.places.release()
                if name != "swallows errors":
                    raise
            else:
                if name != "place never given back":
                    self.places.release()
                if name == "two places given back":
                    self.places.release()
            if name == "the running still wait":
                self.num_waiting -= 1
            return None

        async def backwards(self, scope: Any, receive: Any, send: Any) -> None:
            if self.free:
                self.free -= 1
            elif len(self.line) >= self.waiting:
                return await self.refuse(scope, receive, send)
            else:
                turn = asyncio.get_running_loop().create_future()
                self.line.append(turn)
                try:
                    await turn
                finally:
                    if turn in self.line:
                        self.line.remove(turn)
            try:
                await self.app(scope, receive, send)
            finally:
                if self.line:
                    self.line.pop().set_result(None)
                else:
                    self.free += 1

        async def refuse(self, scope: Any, receive: Any, send: Any) -> None:
            if name == "raises":
                raise RuntimeError("the queue is full")
            if name == "the app runs, too":
                await self.app(scope, receive, send)
            ahead = self.waiting + (name != "itself forgotten")
            wait = ahead * self.seconds / self.running
            if name == "one place":
                wait = ahead * self.seconds
            if name == "the queue forgotten":
                wait = self.seconds / self.running
            whole: Any = math.floor if name == "rounded down" else math.ceil
            value = f"{wait:.1f}" if name == "parts of a second" else str(whole(wait))
            if name == "in milliseconds":
                value = str(math.ceil(1000 * wait))
            headers = {} if name == "no header" else {"Retry-After": value}
            status = {"503": 503, "status 200": 200}.get(name, 429)
            content: Any = {"error": {"message": "The queue is full."}}
            if name == "no error":
                content = {"detail": "The queue is full."}
            if name == "no JSON":
                return await Response("full", status, headers)(scope, receive, send)
            await JSONResponse(content, status, headers)(scope, receive, send)
            return None

    if name == "no coroutine":
        return lambda *given: lambda scope, receive, send: None
    return Queue


WRONG_QUEUES = [
    *("one too many runs", "all run", "one queue for all", "health waits", "the start waits"),
    *("last come, first served", "one too many waits", "one too few waits", "none waits"),
    *("the running count as waiting", "never refuses", "a waiting one never leaves"),
    *("a place for one that left", "the running still wait", "place lost when cancelled"),
    *("place lost after an error", "swallows errors", "place never given back"),
    *("two places given back", "raises", "the app runs, too", "itself forgotten", "one place"),
    *("the queue forgotten", "rounded down", "parts of a second", "in milliseconds", "no header"),
    *("503", "status 200", "no error", "no JSON", "no coroutine"),
]

ANSWERS = {
    "event_data": Answers(
        right=(by_character, by_expression),
        wrong={name: wrong_reader(name) for name in WRONG_READERS},
        equivalent={},
    ),
    "chat_events": Answers(
        right=(with_except, ByHand, wrong("nothing")),
        wrong={name: wrong(name) for name in WRONG},
        equivalent={},
    ),
    "BoundedQueue": Answers(
        right=(WithFutures, with_places),
        wrong={name: wrong_queue(name) for name in WRONG_QUEUES},
        equivalent={},
    ),
}

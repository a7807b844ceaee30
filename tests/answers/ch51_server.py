"""Answers to the exercise of chapter 51."""

import asyncio
import codecs
import json
from typing import Any

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

ANSWERS = {
    "chat_events": Answers(
        right=(with_except, ByHand, wrong("nothing")),
        wrong={name: wrong(name) for name in WRONG},
        equivalent={},
    ),
}

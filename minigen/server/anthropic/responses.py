"""Messages in Anthropic's form, whole or as events.

Source: Anthropic's API reference, on streaming messages.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import from_json

from minigen.outputs import RequestState, TokenDelta
from minigen.server.anthropic.conversation import id_of_call
from minigen.server.errors import ApiError
from minigen.server.models import Served
from minigen.server.openai.responses import EVENT_STREAM
from minigen.tokenizer.tokenizer import Tokenizer
from minigen.tool_calling.parser import AnswerParser, Part

PATH = "/v1/messages"
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def failed_event(error: ApiError) -> bytes:
    """Return an error in the middle of a stream, in the format that Anthropic's client expects."""
    return b"event: error\ndata: " + error.body(PATH) + b"\n\n"


class MessageWriter:
    """Writes a `message`, or the events of one."""

    media_type = EVENT_STREAM
    needs_engine = True

    def __init__(
        self,
        served: Served,
        answer: RequestState,
        new_parser: Callable[[], AnswerParser] | None,
    ):
        self._answer, self._tokenizer = answer, served.llm.tokenizer
        self._parser = AnswerParser(None) if new_parser is None else new_parser()
        self._id, self._model = f"msg_{secrets.token_hex(12)}", served.name
        self._num_opened = 0
        self._kind: str | None = None  # of the parts of the open block
        self._calls = False

    def whole(self) -> bytes:
        """Return the JSON of the message."""
        parts = [*self._parser.push(self._answer.choice.text), *self._rest()]
        self._calls = any(part.kind == "call" for part in parts)
        return json.dumps(
            {**self._head(), "content": blocks_of(parts), **self._stop(), "usage": self._usage()}
        ).encode()

    def on_start(self) -> bytes:
        """Return the start of the message, with the number of its input tokens."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        start = _event("message_start", message={**self._head(), **empty, "usage": usage})
        return start + _event("ping")

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return events with what is certain now, and at the end of the answer with the rest."""
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._rest()
        return b"".join(self._events(part) for part in parts)

    def end(self) -> bytes:
        """Return the end of the last block and of the message, with the reason and the usage."""
        return (
            self._closed()
            + _event("message_delta", delta=self._stop(), usage=self._usage())
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        """Return an error in the middle of a stream."""
        return failed_event(error)

    def _rest(self) -> list[Part]:
        """Return what the parser holds back, once the answer has ended."""
        return self._parser.finish(self._answer.is_cut_off)

    def _events(self, part: Part) -> bytes:
        """Return a part as a delta of its block, which it may open."""
        written = b""
        if _opens_block(part, self._kind):
            written = self._closed()
            self._kind, self._num_opened = part.kind, self._num_opened + 1
            self._calls = self._calls or part.kind == "call"
            written += self._of_block("content_block_start", content_block=_empty_block(part))
        if part.kind == "call":
            return written
        kind, name = _DELTAS[part.kind]
        return written + self._of_block(
            "content_block_delta", delta={"type": kind, name: part.text}
        )

    def _closed(self) -> bytes:
        closes, self._kind = self._kind is not None, None
        return self._of_block("content_block_stop") if closes else b""

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=self._num_opened - 1, **fields)

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self) -> dict[str, Any]:
        """Return why the answer ended, and by which of the request's stop sequences."""
        answer = self._answer
        reason, found = "tool_use" if self._calls else "end_turn", None
        if answer.stops.stopped:
            reason, found = "stop_sequence", stop_sequence_of(answer, self._tokenizer)
        elif answer.choice.finish_reason == "length":
            within = len(answer.choice.token_ids) < (answer.sequence.params.max_tokens or 0)
            reason = "model_context_window_exceeded" if within else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": found}

    def _usage(self) -> dict[str, int]:
        """Count the tokens; those that were cached are no `input_tokens`."""
        sequence = self._answer.sequence
        num_cached = sequence.num_cached or 0
        return {
            "input_tokens": len(sequence.prompt_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": len(self._answer.choice.token_ids),
        }


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the parts of an answer as blocks.

    The input of a call that was cut off has the members that were there by then, as Anthropic's
    client reads them from a stream.
    """
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    kind: str | None = None
    for part in parts:
        if _opens_block(part, kind):
            blocks.append(_empty_block(part))
            texts.append([])
            kind = part.kind
        if part.kind != "call":
            texts[-1].append(part.text)
    for block, pieces in zip(blocks, texts, strict=True):
        text = "".join(pieces)
        if block["type"] == "tool_use":
            block["input"] = _members(text)
        else:
            block[block["type"]] = text
    return blocks


def _members(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object, as far as they had come."""
    try:
        found: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = from_json(text or "{}", allow_partial=True)
        except ValueError:  # cut off, and nested deeper than the library reads
            return {}
    return found


def stop_sequence_of(answer: RequestState, tokenizer: Tokenizer) -> str | None:
    """Return the stop sequence that ended an answer: what its tokens say after its text.

    Of several that begin there, it is the one that was complete first, the shortest.
    """
    params = answer.sequence.params
    decoder = tokenizer.stream(params.skip_special_tokens)
    said = "".join(decoder.push(each) for each in answer.choice.token_ids) + decoder.finish()
    text = answer.choice.text
    found = (stop for stop in params.stops if said.startswith(stop, len(text)))
    return min(found, key=len, default=None)


def _opens_block(part: Part, kind: str | None) -> bool:
    """Return whether a part begins a block, after one that a part of this kind has opened."""
    return part.kind == "call" or (part.kind != "arguments" and part.kind != kind)


def _empty_block(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {
            "type": "tool_use",
            "id": id_of_call(part.call_id),
            "name": part.text,
            "input": {},
        }
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()

"""What all of OpenAI's answers have in common, whole or chunk by chunk.

A chunk is made for every token, so its constant parts are made once, and only what is new goes
through `json`.
"""

import json
import secrets
import time
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from minigen import __version__
from minigen.answers import Answer
from minigen.server.failures import ApiError
from minigen.server.schema import Generation
from minigen.server.streams import Growth

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"minigen-{__version__}"


class Wording(Protocol):
    """How an API writes answers: all at once, or as a stream of bytes."""

    media_type: str

    def whole(self) -> bytes: ...

    def begin(self) -> bytes: ...

    def grown(self, growth: Growth) -> bytes: ...

    def end(self) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...


class Head:
    """What all chunks of an answer begin with: `{"id": ..., ..., "model": ...`, left open."""

    def __init__(self, prefix: str, model: str, request: Generation):
        self.facts = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        options = request.stream_options
        self.tells_usage = options is not None and bool(options.include_usage)

    def opened(self, kind: str) -> str:
        """The beginning of a chunk, up to its choices."""
        usage = {"usage": None} if self.tells_usage else {}
        text = json.dumps({"object": kind, **self.facts, **usage}, separators=(",", ":"))
        return f'data: {text[:-1]},"choices":'

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        """A whole answer, or a chunk's body."""
        return json.dumps(
            {"object": kind, **self.facts, "choices": choices, "usage": usage}
        ).encode()

    def end(self, kind: str, usage: dict[str, Any]) -> bytes:
        """The last chunks of a stream."""
        if not self.tells_usage:
            return DONE
        return b"data: " + self.whole(kind, [], usage) + b"\n\n" + DONE


def usage_of(answers: SequenceOf[Answer], without_output: bool = False) -> dict[str, Any]:
    """How many tokens were read, found in the prefix cache, and made; each prompt counts once."""
    firsts = [answer.sequence for answer in answers if answer.choice.index == 0]
    prompt = sum(len(sequence.prompt_ids) for sequence in firsts)
    made = 0 if without_output else sum(len(answer.choice.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(sequence.num_cached or 0 for sequence in firsts)
        },
    }


def failed_event(error: ApiError) -> bytes:
    """An error in mid-stream, as OpenAI's client expects it."""
    return b"data: " + error.body() + b"\n\n"

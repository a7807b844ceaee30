"""Answers in Ollama's words: one JSON object, or one a step, a line each."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from minigen.answers import Answer
from minigen.outputs import Delta
from minigen.sequence import SampledToken
from minigen.server.failures import ApiError
from minigen.server.logprobs import Told, chat_entry
from minigen.server.served import Served
from minigen.server.streams import Growth

Put = Callable[[str], dict[str, Any]]


def as_response(text: str) -> dict[str, Any]:
    """A piece of an answer of `/api/generate`."""
    return {"response": text}


def as_message(text: str) -> dict[str, Any]:
    """A piece of an answer of `/api/chat`."""
    return {"message": {"role": "assistant", "content": text}}


def facts_now(model: str) -> dict[str, Any]:
    """What every object begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


@dataclass
class TimedAnswer(Answer):
    """An answer that knows when it was asked for, begun and ended, in seconds of one clock."""

    asked_at: float = field(default_factory=time.perf_counter)
    begun_at: float | None = None
    ended_at: float | None = None

    def push(self, token: SampledToken) -> Delta:
        """Take a token, as `Answer` does."""
        now = time.perf_counter()
        self.begun_at = self.begun_at or now
        self.ended_at = now
        return super().push(token)


class OllamaWording:
    """An answer of `/api/generate` or `/api/chat`, which differ in where the text is put.

    `asked_at` is when the request came; what `answer` took from then on, waiting included, counts
    as reading the prompt until its first token, and what was before as loading.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self,
        served: Served,
        answer: TimedAnswer,
        put: Put,
        model: str,
        num_top: int,
        asked_at: float,
    ):
        self._answer, self._put, self._num_top = answer, put, num_top
        self._tokenizer = served.llm.tokenizer
        self._facts = facts_now(model)
        self._asked_at = asked_at

    def whole(self) -> bytes:
        """The JSON of the answer."""
        choice = self._answer.choice
        told = choice.logprobs
        entries = None if told is None else list(zip(choice.token_ids, told, strict=True))
        return self._line({**self._put(choice.text), **self._logprobs(entries), **self._summary()})

    def begin(self) -> bytes:
        """Nothing: the first token is the first line."""
        return b""

    def grown(self, growth: Growth) -> bytes:
        """A token's text, once it is certain, and its log probability."""
        _, delta, told = growth
        if not delta.text and told is None:
            return b""
        entries = None if told is None else [(delta.token_id, told)]
        piece = {**self._put(delta.text), **self._logprobs(entries), "done": False}
        return self._line(piece)

    def end(self) -> bytes:
        """Why it ended, and how long what took."""
        return self._line({**self._put(""), **self._summary()})

    def failure(self, error: ApiError) -> bytes:
        """An error in mid-stream, as Ollama's client expects it."""
        return json.dumps({"error": error.message}).encode() + b"\n"

    def _line(self, piece: dict[str, Any]) -> bytes:
        return json.dumps({**self._facts, **piece}).encode() + b"\n"

    def _logprobs(self, entries: list[tuple[int, Told]] | None) -> dict[str, Any]:
        if entries is None:
            return {}
        told = [
            chat_entry(self._tokenizer, token_id, each, self._num_top) for token_id, each in entries
        ]
        return {"logprobs": told}

    def _summary(self) -> dict[str, Any]:
        answer = self._answer
        asked, begun, ended = answer.asked_at, answer.begun_at, answer.ended_at
        assert begun is not None, "an answer that has ended has begun"
        assert ended is not None
        return {
            "done": True,
            "done_reason": answer.choice.finish_reason,
            "total_duration": nanoseconds(time.perf_counter() - self._asked_at),
            "load_duration": nanoseconds(asked - self._asked_at),
            "prompt_eval_count": len(answer.sequence.prompt_ids),
            "prompt_eval_duration": nanoseconds(begun - asked),
            "eval_count": len(answer.choice.token_ids),
            "eval_duration": nanoseconds(ended - begun),
        }


def timed(answer: Answer) -> TimedAnswer:
    """The same answer, from now on with its times."""
    return TimedAnswer(**vars(answer))


def nanoseconds(seconds: float) -> int:
    """Seconds as Ollama counts them."""
    return round(seconds * 1e9)

"""Responses in Ollama's format: one JSON object per line."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from minigen.outputs import RequestState, TokenDelta
from minigen.server.errors import ApiError
from minigen.server.models import Served
from minigen.server.openai.responses import TokenLogprobs, chat_entry

Put = Callable[[str], dict[str, Any]]


def as_response(text: str) -> dict[str, Any]:
    """Return a piece of an answer in the format of `/api/generate`."""
    return {"response": text}


def as_message(text: str) -> dict[str, Any]:
    """Return a piece of an answer in the format of `/api/chat`."""
    return {"message": {"role": "assistant", "content": text}}


def facts_now(model: str) -> dict[str, Any]:
    """Return the fields at the start of every object."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class OllamaResponseWriter:
    """Writes the response of `/api/generate` or `/api/chat`; `put` formats the text for either.

    `requested_ns` is when the request came, by `time.perf_counter_ns`. The time from there to the
    sequence's `arrival_ns` counts as loading. The time from then to the first token, including
    waiting, counts as prompt evaluation.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self,
        served: Served,
        answer: RequestState,
        put: Put,
        model: str,
        num_top: int,
        requested_ns: int,
    ):
        self._answer, self._put, self._num_top = answer, put, num_top
        self._tokenizer = served.llm.tokenizer
        self._facts = facts_now(model)
        self._requested_ns = requested_ns

    def whole(self) -> bytes:
        """Return the JSON of the answer."""
        choice = self._answer.choice
        logprobs = choice.logprobs
        entries = None if logprobs is None else list(zip(choice.token_ids, logprobs, strict=True))
        return self._line({**self._put(choice.text), **self._logprobs(entries), **self._summary()})

    def on_start(self) -> bytes:
        """Return nothing, because the first line contains the first token."""
        return b""

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return a line with the final text and the log probabilities."""
        if not delta.text and delta.logprobs is None:
            return b""
        entries = None if delta.logprobs is None else [(delta.token_id, delta.logprobs)]
        piece = {**self._put(delta.text), **self._logprobs(entries), "done": False}
        return self._line(piece)

    def end(self) -> bytes:
        """Return the last line: the finish reason and the durations."""
        return self._line({**self._put(""), **self._summary()})

    def failure(self, error: ApiError) -> bytes:
        """Return an error in the middle of a stream, in the format that Ollama's client expects."""
        return json.dumps({"error": error.message}).encode() + b"\n"

    def _line(self, piece: dict[str, Any]) -> bytes:
        return json.dumps({**self._facts, **piece}).encode() + b"\n"

    def _logprobs(self, entries: list[tuple[int, TokenLogprobs]] | None) -> dict[str, Any]:
        if entries is None:
            return {}
        logprobs = [
            chat_entry(self._tokenizer, token_id, each, self._num_top) for token_id, each in entries
        ]
        return {"logprobs": logprobs}

    def _summary(self) -> dict[str, Any]:
        answer = self._answer
        arrival_ns, first_ns, last_ns = (
            *(answer.sequence.arrival_ns, answer.first_token_ns, answer.last_token_ns),
        )
        assert first_ns is not None, "a finished answer has a first token"
        assert last_ns is not None
        return {
            "done": True,
            "done_reason": answer.choice.finish_reason,
            "total_duration": time.perf_counter_ns() - self._requested_ns,
            "load_duration": arrival_ns - self._requested_ns,
            "prompt_eval_count": len(answer.sequence.prompt_ids),
            "prompt_eval_duration": first_ns - arrival_ns,
            "eval_count": len(answer.choice.token_ids),
            "eval_duration": last_ns - first_ns,
        }

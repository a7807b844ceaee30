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
from minigen.tool_calling.parser import AnswerParser, ParsedAnswer, Part, joined, parse
from minigen.tool_calling.tools import ToolCall

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
    needs_engine = True

    def __init__(
        self,
        served: Served,
        answer: RequestState,
        put: Put,
        model: str,
        num_top: int,
        requested_ns: int,
        new_parser: Callable[[], AnswerParser] | None = None,
    ):
        self._answer, self._put, self._num_top = answer, put, num_top
        self._tokenizer = served.llm.tokenizer
        self._facts = facts_now(model)
        self._requested_ns = requested_ns
        self._parser = new_parser() if new_parser is not None else None
        self._calls: list[Part] = []  # sent as a whole

    def whole(self) -> bytes:
        """Return the JSON of the answer."""
        choice = self._answer.choice
        logprobs = choice.logprobs
        entries = None if logprobs is None else list(zip(choice.token_ids, logprobs, strict=True))
        put = self._put(choice.text)
        if self._parser is not None:
            put = self._with_parts(parse(self._parser, choice.text, self._answer.is_cut_off))
        return self._line({**put, **self._logprobs(entries), **self._summary()})

    def on_start(self) -> bytes:
        """Return nothing, because the first line contains the first token."""
        return b""

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return a line with the final text and the log probabilities."""
        put = self._put(delta.text) if self._parser is None else self._put_parts(delta)
        if put is None or (not delta.text and delta.logprobs is None and self._parser is None):
            return b""
        entries = None if delta.logprobs is None else [(delta.token_id, delta.logprobs)]
        return self._line({**put, **self._logprobs(entries), "done": False})

    def end(self) -> bytes:
        """Return the last line: the finish reason and the durations."""
        return self._line({**self._put(""), **self._summary()})

    def failure(self, error: ApiError) -> bytes:
        """Return an error in the middle of a stream, in the format that Ollama's client expects."""
        return json.dumps({"error": error.message}).encode() + b"\n"

    def _put_parts(self, delta: TokenDelta) -> dict[str, Any] | None:
        """Return the text and the thoughts of a token, at the end also all calls; None if none."""
        assert self._parser is not None
        parts = self._parser.push(delta.text)
        ended = delta.finish_reason is not None
        if ended:
            parts += self._parser.finish(self._answer.is_cut_off)
        of_calls = [part for part in parts if part.kind in ("call", "arguments")]
        self._calls += of_calls
        ready = [part for part in parts if part not in of_calls] + (self._calls if ended else [])
        return self._with_parts(joined(ready)) if ready or delta.logprobs is not None else None

    def _with_parts(self, parsed: ParsedAnswer) -> dict[str, Any]:
        put = self._put(parsed.content)
        inside = put.get("message", put)  # /api/generate has its fields at the top
        if parsed.reasoning:
            inside["thinking"] = parsed.reasoning
        calls = [_called(place, call) for place, call in enumerate(parsed.calls)]
        if calls:
            inside["tool_calls"] = [call for call in calls if call is not None]
        return put

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


def _called(place: int, call: ToolCall) -> dict[str, Any] | None:
    """Return a call in Ollama's form; None if it was cut off within its arguments."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return {
        "id": call.id,
        "function": {"index": place, "name": call.name, "arguments": arguments},
    }

"""Convert Ollama's requests to the engine's, and answers to Ollama's JSON, one object per line."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from minigen.errors import ContextLengthError
from minigen.fields import default_at, offered_at
from minigen.llm import LLM
from minigen.outputs import RequestState, TokenDelta
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken
from minigen.server.errors import ApiError
from minigen.server.models import Served
from minigen.server.ollama.schema import (
    NO_LIMITS,
    OWN_NAMES,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
)
from minigen.server.openai.responses import TokenLogprobs, chat_entry
from minigen.server.streaming import Growth

ROLES = ("system", "user", "assistant")


def generate_answers(llm: LLM, request: GenerateRequest) -> list[RequestState]:
    """Create the state of the answer to a prompt. Raises a `MinigenError` for an invalid request.

    As in Ollama, the prompt becomes a message in the model's chat template, unless `raw` is set.
    """
    prompt: str | list[int] = request.prompt or ""
    if request.raw and request.system:
        raise ApiError("system needs a chat template, which raw turns off.", param="system")
    if not request.raw and (llm.chat_template is not None or request.system):
        system = [{"role": "system", "content": request.system}] if request.system else []
        prompt = llm.chat_prompt([*system, {"role": "user", "content": prompt}])
    return _answers(llm, prompt, request)


def chat_answers(llm: LLM, request: OllamaChatRequest) -> list[RequestState]:
    """Create the state of the answer to a conversation; see `generate_answers`."""
    messages = [_plain(message) for message in request.messages or ()]
    thinks = {} if request.think is None else {"enable_thinking": False}
    return _answers(llm, llm.chat_prompt(messages, **thinks), request)


def _answers(llm: LLM, prompt: str | list[int], request: OllamaRequest) -> list[RequestState]:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    options = request.options or Options.model_validate({})
    prompt_ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    params = SamplingParams(
        **_sampling_fields(options),
        max_tokens=_max_tokens(options, len(prompt_ids), llm.config.max_positions),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return llm.process_requests([prompt_ids], params)


def _sampling_fields(options: Options) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for each in offered_at("ollama", SamplingParams):
        given = getattr(options, OWN_NAMES.get(each.name, each.name))
        named[each.name] = default_at(each, "ollama") if given is None else given
    if named["top_k"] in (0, -1):
        named["top_k"] = None
    if named["seed"] is not None and named["seed"] < 0:
        named["seed"] = None
    return named


def _max_tokens(options: Options, num_prompt: int, max_positions: int) -> int | None:
    """Return the smaller limit of `num_predict` and the rest of `num_ctx`; None without a limit."""
    limits = set[int]()
    if options.num_predict is not None and options.num_predict not in NO_LIMITS:
        limits.add(options.num_predict)
    if options.num_ctx is not None and options.num_ctx < max_positions:
        if num_prompt >= options.num_ctx:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, which leaves no space for an answer: num_ctx "
                f"is {options.num_ctx}. minigen does not truncate prompts."
            )
        limits.add(options.num_ctx - num_prompt)
    return min(limits, default=None)


def _plain(message: OllamaMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError(
            f"A message's role must be one of {', '.join(ROLES)}, not {message.role!r}.",
            param="messages",
        )
    return {"role": message.role, "content": message.content}


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


@dataclass
class TimedRequestState(RequestState):
    """A `RequestState` with the times of the request, the first and the last token, in seconds."""

    requested_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    ended_at: float | None = None

    def push(self, token: SampledToken) -> TokenDelta:
        """Add a token, as `RequestState.push` does, and record its time."""
        now = time.perf_counter()
        self.started_at = self.started_at or now
        self.ended_at = now
        return super().push(token)


class OllamaResponseWriter:
    """Writes the response of `/api/generate` or `/api/chat`; `put` formats the text for either.

    `requested_at` is the time when the request came. The time from there to `answer.requested_at`
    counts as loading. The time from then to the first token, including waiting, counts as prompt
    evaluation.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self,
        served: Served,
        answer: TimedRequestState,
        put: Put,
        model: str,
        num_top: int,
        requested_at: float,
    ):
        self._answer, self._put, self._num_top = answer, put, num_top
        self._tokenizer = served.llm.tokenizer
        self._facts = facts_now(model)
        self._requested_at = requested_at

    def whole(self) -> bytes:
        """Return the JSON of the answer."""
        choice = self._answer.choice
        logprobs = choice.logprobs
        entries = None if logprobs is None else list(zip(choice.token_ids, logprobs, strict=True))
        return self._line({**self._put(choice.text), **self._logprobs(entries), **self._summary()})

    def on_start(self) -> bytes:
        """Return nothing, because the first line contains the first token."""
        return b""

    def on_token(self, growth: Growth) -> bytes:
        """Return a line with the final text and the log probabilities."""
        _, delta, logprobs = growth
        if not delta.text and logprobs is None:
            return b""
        entries = None if logprobs is None else [(delta.token_id, logprobs)]
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
        requested, started, ended = answer.requested_at, answer.started_at, answer.ended_at
        assert started is not None, "a finished answer has a first token"
        assert ended is not None
        return {
            "done": True,
            "done_reason": answer.choice.finish_reason,
            "total_duration": nanoseconds(time.perf_counter() - self._requested_at),
            "load_duration": nanoseconds(requested - self._requested_at),
            "prompt_eval_count": len(answer.sequence.prompt_ids),
            "prompt_eval_duration": nanoseconds(started - requested),
            "eval_count": len(answer.choice.token_ids),
            "eval_duration": nanoseconds(ended - started),
        }


def timed(answer: RequestState) -> TimedRequestState:
    """Return the same answer as a `TimedRequestState`, with the current time as `requested_at`."""
    return TimedRequestState(**vars(answer))


def nanoseconds(seconds: float) -> int:
    """Convert seconds to Ollama's unit of time."""
    return round(seconds * 1e9)

"""The responses of OpenAI's Responses API, complete or as a stream of events.

Source: OpenAI's API reference, the response object and its streaming events.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

from minigen.fields import offered_at
from minigen.outputs import RequestState, TokenDelta
from minigen.sampling.params import SamplingParams
from minigen.server.chat_turn import ChatTurn
from minigen.server.errors import ApiError
from minigen.server.models import Served
from minigen.server.openai.responses import EVENT_STREAM, TokenLogprobs, chat_entry, usage_of
from minigen.server.responses_api.output import Entry, Event, Output
from minigen.server.responses_api.schema import ResponsesRequest
from minigen.tool_calling.parser import Part
from minigen.tool_calling.tools import ToolUse


class ResponsesWriter:
    """Writes one response and its events; a complete response has the items of the events."""

    media_type = EVENT_STREAM
    needs_engine = True

    def __init__(
        self,
        served: Served,
        answer: RequestState,
        request: ResponsesRequest,
        turn: ChatTurn,
        use: ToolUse,
    ):
        self._answer, self._tokenizer = answer, served.llm.tokenizer
        self._parser = None if turn.new_parser is None else turn.new_parser()
        self._num_top = request.top_logprobs or 0
        self._facts = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.name,
            **_echoed(request, use, answer.sequence.params),
        }
        self._output = Output()
        self._num_events = 0

    def whole(self) -> bytes:
        """Return the JSON of the complete response."""
        for _ in self._all_events():
            pass
        return json.dumps(self._final()).encode()

    def on_start(self) -> bytes:
        """Return the events of a new response."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._written((kind, {"response": response}) for kind in kinds)

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return the events of a token's text, and those that close the last item."""
        events = self._written(self._of_token(delta.token_id, delta.text, delta.logprobs))
        if delta.finish_reason is not None:
            events += self._written(self._finish(delta.finish_reason))
        return events

    def end(self) -> bytes:
        """Return the last event, which has the complete response."""
        response = self._final()
        return self._written([(f"response.{response['status']}", {"response": response})])

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error in the middle of a stream."""
        code = "server_error" if error.kind == "server_error" else "invalid_prompt"
        response = self._response("failed", error={"code": code, "message": error.message})
        response["output"] = self._output.shown()
        facts = {"code": error.code, "message": error.message, "param": error.param}
        return self._written([("error", facts), ("response.failed", {"response": response})])

    def _all_events(self) -> Iterator[Event]:
        """Yield the events of an answer that has ended, as if its tokens came now."""
        choice, start = self._answer.choice, 0
        decoder = self._tokenizer.stream(self._answer.sequence.params.skip_special_tokens)
        last = len(choice.token_ids) - 1
        for place, token_id in enumerate(choice.token_ids):
            end = start + len(decoder.push(token_id)) if place < last else len(choice.text)
            logprobs = None if choice.logprobs is None else choice.logprobs[place]
            yield from self._of_token(token_id, choice.text[start:end], logprobs)
            start = end
        assert choice.finish_reason is not None
        yield from self._finish(choice.finish_reason)

    def _of_token(
        self, token_id: int, text: str, logprobs: TokenLogprobs | None
    ) -> Iterator[Event]:
        entry: Entry | None = None
        if logprobs is not None:
            entry = chat_entry(self._tokenizer, token_id, logprobs, self._num_top)
        return self._output.add(self._parts(text), entry)

    def _parts(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Part("content", text)] if text else []

    def _finish(self, reason: str) -> Iterator[Event]:
        if self._parser is None:
            return self._output.finish([], reason == "length")
        rest = self._parser.finish(self._answer.is_cut_off)
        return self._output.finish(rest, reason == "length" or self._parser.is_within_call)

    def _final(self) -> dict[str, Any]:
        """Return the response once its answer has ended."""
        cut_off = self._answer.choice.finish_reason == "length"
        response = self._response("incomplete" if cut_off else "completed")
        if cut_off:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        used = usage_of([self._answer])
        return response | {
            "output": self._output.items,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._output.num_reasoning_tokens},
                "total_tokens": used["total_tokens"],
            },
        }

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            **self._facts,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "completed_at": None,
            "output": [],
            "usage": None,
        }

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._event(*each) for each in events])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _echoed(request: ResponsesRequest, use: ToolUse, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a response that repeat the request, with the values in force."""
    text = {} if request.text is None else _dumped(request.text)
    reasoning = {} if request.reasoning is None else _dumped(request.reasoning)
    choice = request.tool_choice
    return {
        **{each.name: getattr(params, each.name) for each in offered_at("openai", SamplingParams)},
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
        "tool_choice": choice if isinstance(choice, str) else _dumped(choice) or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description or None,
                "parameters": dict(tool.parameters),
                "strict": tool.strict,
            }
            for tool in use.tools
        ],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }


def _dumped(model: Any) -> dict[str, Any]:
    """Return an object of the request as it was sent, or nothing."""
    return {} if model is None else model.model_dump(by_alias=True, exclude_none=True)

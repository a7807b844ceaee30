"""The routes of Anthropic's Messages API, and what their requests ask for."""

import asyncio
from typing import Any

from fastapi import APIRouter

from minigen.fields import default_at, offered_at
from minigen.llm import LLM
from minigen.outputs import RequestState
from minigen.sampling.params import SamplingParams
from minigen.server.anthropic.conversation import openai_messages
from minigen.server.anthropic.responses import MessageWriter
from minigen.server.anthropic.schema import (
    OWN_NAMES,
    SCHEMA_FIELD,
    AnthropicRequest,
    CountTokensRequest,
    MessagesRequest,
    Thinking,
)
from minigen.server.chat_turn import ChatTurn, chat_turn
from minigen.server.errors import ApiError
from minigen.server.forms import naming
from minigen.server.models import ModelHost, Served
from minigen.server.openai.routes import Check
from minigen.server.replies import ReadRequest, Reply
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tool_calling.parser import END_OF_THINK

_ERROR = {
    "type": "error",
    "error": {
        "type": "invalid_request_error",
        "message": "'temperature': should be less than or equal to 1, not 2.",
    },
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _failing(description: str) -> dict[str, Any]:
    content = {"schema": _ERROR_SCHEMA, "example": _ERROR}
    return {"description": description, "content": {"application/json": content}}


def _giving(example: dict[str, Any], **other_content: Any) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {
        200: {"description": "The response.", "content": {**content, **other_content}},
        400: _failing("A field is unknown, has the wrong type, or its value is not supported."),
        404: _failing("The model does not exist."),
        500: _failing("The model or the server failed on this request."),
        503: _failing("The server is shutting down, or the model could not be loaded."),
    }


MESSAGE = _giving(
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "smollm2-135m",
        "content": [{"type": "text", "text": "A force."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 34,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    },
    **{
        "text/event-stream": {
            "schema": {"type": "string"},
            "example": 'event: message_start\ndata: {"type":"message_start","message":{...}}\n\n',
        }
    },
)
COUNT = _giving({"input_tokens": 34})


def anthropic_router(host: ModelHost, check: Check) -> APIRouter:
    """Create the routes under /v1/messages for the models of a host."""
    router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

    @router.post("", responses=MESSAGE)
    async def create(request: MessagesRequest) -> Reply:
        """Answer a conversation, as one message or as a stream of events."""
        if request.thread is not None:
            raise ApiError(
                "minigen stores no threads: leave thread out, and send the whole conversation.",
                param="thread",
                details=_NO_THREADS,
            )

        def read(served: Served) -> ReadRequest:
            answer, turn = message_answer(served.llm, request)
            check([answer])
            return [answer], MessageWriter(served, answer, turn.new_parser)

        return Reply(host, request.model, bool(request.stream), read, request.needs_grammar)

    @router.post("/count_tokens", responses=COUNT)
    async def count_tokens(request: CountTokensRequest) -> dict[str, int]:
        """Count the input tokens that a message would have, without an answer."""
        async with host.lease(request.model) as served:
            turn = await asyncio.to_thread(next_turn, served.llm, request)
        return {"input_tokens": len(turn.prompt_ids)}

    return router


# Anthropic's client reads these, and then sends the whole conversation by itself.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def message_answer(llm: LLM, request: MessagesRequest) -> tuple[RequestState, ChatTurn]:
    """Create the state of the answer that a request asks for, and the turn that it is.

    Raises a `MinigenError` if the request is invalid.
    """
    turn = next_turn(llm, request)
    with (
        naming("structured_outputs.json", SCHEMA_FIELD),
        naming("structured_outputs.grammar", "tools"),
    ):
        params = SamplingParams(
            max_tokens=request.max_tokens, **_sampling_fields(request), **turn.params
        )
        (answer,) = llm.process_requests([turn.prompt_ids], params)
    return answer, turn


def _sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for each in offered_at("anthropic", SamplingParams):
        given = getattr(request, OWN_NAMES.get(each.name, each.name))
        named[each.name] = default_at(each, "anthropic") if given is None else given
    named["top_k"] = named["top_k"] or None
    return named


def next_turn(llm: LLM, request: AnthropicRequest) -> ChatTurn:
    """Return the turn that a request asks for. Raises a `MinigenError` if it is invalid."""
    use, continues = request.tool_use(), request.messages[-1].role == "assistant"
    if continues and use.callable:
        raise ApiError(
            "messages: the last message is the assistant's, so its text is continued, and the "
            "model cannot call tools in it; leave tools out, or end with a message of the user.",
            param="messages",
        )
    return chat_turn(
        llm,
        openai_messages(request),
        use,
        request.form(),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **_thinking(llm.chat_template, request.thinking),
    )


def _thinking(template: ChatTemplate | None, wanted: Thinking | None) -> dict[str, bool]:
    """Return the variable that turns reasoning on or off, if the template has it."""
    if template is None or wanted is None:
        return {}
    can_turn = "enable_thinking" in template.settable_names
    wants = wanted.type != "disabled"
    if wants and not can_turn and END_OF_THINK not in template.source:
        raise ApiError(
            f'thinking: {{"type": "{wanted.type}"}} needs a model whose chat template reasons; '
            "leave thinking out.",
            param="thinking",
        )
    return {"enable_thinking": wants} if can_turn else {}

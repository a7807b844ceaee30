"""The routes of OpenAI's Responses API, and what its requests ask for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from fastapi import APIRouter

from minigen.llm import LLM
from minigen.outputs import RequestState
from minigen.server.chat_turn import ChatTurn, chat_turn
from minigen.server.errors import ApiError
from minigen.server.forms import naming, naming_tools
from minigen.server.models import ModelHost, Served
from minigen.server.openai import examples
from minigen.server.openai.routes import Check, sampling_params
from minigen.server.replies import ReadRequest, Reply
from minigen.server.responses_api.items import messages_of
from minigen.server.responses_api.schema import LOGPROBS, ResponsesRequest
from minigen.server.responses_api.writer import ResponsesWriter
from minigen.tool_calling.parser import END_OF_THINK
from minigen.tool_calling.tools import ToolUse

THINKS = "enable_thinking"  # the name that Qwen's and other templates share


def responses_router(host: ModelHost, check: Check) -> APIRouter:
    """Create the routes under /v1/responses for the models of a host."""
    router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])

    @router.post("", responses=examples.RESPONSE)
    async def create(request: ResponsesRequest) -> Reply:
        """Answer a conversation, as one response or as a stream of typed events."""

        def read(served: Served) -> ReadRequest:
            use = request.tool_use()
            answers, turn = answers_to(served.llm, request, use)
            check(answers)
            return answers, ResponsesWriter(served, answers[0], request, turn, use)

        takes_long = request.asks_for_a_form or bool(request.tools)
        return Reply(host, request.model, bool(request.stream), read, takes_long)

    @router.get("/{response_id}", responses=examples.NOT_STORED)
    async def retrieve(response_id: str) -> dict[str, Any]:
        """Say that no response is stored."""
        _refuse(response_id)

    @router.delete("/{response_id}", responses=examples.NOT_STORED)
    async def delete(response_id: str) -> dict[str, Any]:
        """Say that no response is stored."""
        _refuse(response_id)

    return router


def answers_to(
    llm: LLM, request: ResponsesRequest, use: ToolUse
) -> tuple[list[RequestState], ChatTurn]:
    """Create the state of the answer that a request asks for, and the turn that it is.

    Raises a `MinigenError` if the request is invalid.
    """
    if request.top_logprobs and not request.wants_logprobs:
        raise ApiError(f'top_logprobs needs include: ["{LOGPROBS}"].', param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.wants_logprobs else None
    params = sampling_params(request, max_tokens=request.max_output_tokens, logprobs=logprobs)
    messages, form = messages_of(request.instructions, request.input), params.structured_outputs
    assert not isinstance(form, Mapping), "SamplingParams has parsed it"
    with naming(*request.name_of_form), naming_tools(form):
        turn = chat_turn(llm, messages, use, form, **_template_variables(llm, request))
        params = replace(params, **turn.params)
        answers = llm.process_requests(
            [turn.prompt_ids], params, request.priority or 0, request.cache_salt
        )
    return answers, turn


def _template_variables(llm: LLM, request: ResponsesRequest) -> dict[str, Any]:
    """Return what turns the model's reasoning off, if the request asks for that."""
    template = llm.chat_template
    if request.reasoning is None or request.reasoning.effort is None or template is None:
        return {}
    if THINKS in template.settable_names:
        return {THINKS: False}
    if END_OF_THINK in template.source:
        raise ApiError(
            "This model's chat template cannot turn reasoning off; leave reasoning.effort out.",
            param="reasoning.effort",
        )
    return {}


def _refuse(response_id: str) -> NoReturn:
    raise ApiError(
        f"There is no response {response_id[:80]!r}: minigen stores no responses, so keep what "
        "POST /v1/responses returns.",
        status=404,
        code="response_not_found",
        param="response_id",
    )

"""The routes of OpenAI's API: chat, completions, models."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from fastapi import APIRouter

from minigen.outputs import RequestState
from minigen.server.models import HostedModel, ModelHost, Served
from minigen.server.openai import examples
from minigen.server.openai.requests import chat_answers, completion_answers
from minigen.server.openai.responses import ChatResponseWriter, CompletionResponseWriter
from minigen.server.openai.schema import ChatRequest, CompletionRequest
from minigen.server.replies import ReadRequest, Reply

# Called with a request's answers before they are generated; raises a `MinigenError` to refuse it.
Check = Callable[[SequenceOf[RequestState]], None]


def openai_router(host: ModelHost, check: Check) -> APIRouter:
    """Create the routes under /v1 for the models of a host."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post("/chat/completions", responses=examples.CHAT)
    async def chat(request: ChatRequest) -> Reply:
        """Answer a conversation, as one response or as a stream of server-sent events."""

        def read(served: Served) -> ReadRequest:
            answers = chat_answers(served.llm, request)
            check(answers)
            return ReadRequest(answers, ChatResponseWriter(served, answers, request))

        return Reply(host, request.model, bool(request.stream), read)

    @router.post("/completions", responses=examples.COMPLETION)
    async def complete(request: CompletionRequest) -> Reply:
        """Continue one or more prompts, as one response or as a stream of server-sent events."""

        def read(served: Served) -> ReadRequest:
            answers = completion_answers(served.llm, request)
            check(answers)
            writer = CompletionResponseWriter(served, answers, request)
            return ReadRequest(answers if writer.needs_engine else [], writer)

        return Reply(host, request.model, bool(request.stream), read)

    @router.get("/models", responses=examples.MODELS)
    async def models() -> dict[str, Any]:
        """List the available models."""
        data = [_listed(host, model) for model in host.models.values()]
        return {"object": "list", "data": data}

    @router.get("/models/{name:path}", responses=examples.MODEL)
    async def model(name: str) -> dict[str, Any]:
        """Return one of the available models."""
        return _listed(host, host.find(name))

    return router


def _listed(host: ModelHost, model: HostedModel) -> dict[str, Any]:
    """Return a model in OpenAI's format; its context length is included once it is loaded."""
    listed = {"id": model.name, "object": "model", "created": host.created, "owned_by": "minigen"}
    if model.served is None:
        return listed
    return {**listed, "max_model_len": model.served.llm.config.max_positions}

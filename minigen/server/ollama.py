"""Ollama's API over the same models, since many local tools speak it."""

import time
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as SequenceOf
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minigen import __version__
from minigen.answers import Answer
from minigen.llm import LLM
from minigen.server.host import HostedModel, ModelHost
from minigen.server.ollama_asking import chat_answers, generate_answers
from minigen.server.ollama_models import find_model, listed, running, shown
from minigen.server.ollama_schema import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaRequest,
    ShowRequest,
)
from minigen.server.ollama_wording import (
    OllamaWording,
    Put,
    as_message,
    as_response,
    facts_now,
    nanoseconds,
    timed,
)
from minigen.server.openai import Check
from minigen.server.paths import header
from minigen.server.replies import Asked, Reply
from minigen.server.served import Served

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A line of JSON for each step, or one for all.",
        "content": {"application/x-ndjson": {}, "application/json": {}},
    },
    400: {"description": "A field that is unknown, wrong, or asks for what cannot be done."},
    404: {"description": "There is no such model."},
    503: {"description": "The server is about to end, or the model could not be loaded."},
}


class AnyContentType(APIRoute):
    """Takes a body for JSON whatever its header says, since Ollama's own curl examples send none.

    Not from a web page (those say their `Origin`): which types it may send decides whether it must
    ask first, by CORS.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handle = super().get_route_handler()

        async def as_json(request: Request) -> Response:
            if header(request.scope, b"origin") is None:
                others = [each for each in request.scope["headers"] if each[0] != b"content-type"]
                headers = [*others, (b"content-type", b"application/json")]
                request = Request({**request.scope, "headers": headers}, request.receive)
            return await handle(request)

        return as_json


def ollama_router(host: ModelHost, check: Check) -> APIRouter:
    """The routes under /api for the models of a host; `check(answers)` may refuse a request."""
    router = APIRouter(prefix="/api", tags=["Ollama"], route_class=AnyContentType)

    @router.post("/generate", response_class=Response, responses=RESPONSES)
    async def generate(request: GenerateRequest) -> Response:
        """Continue a prompt; an empty one loads the model, or unloads it for `keep_alive` 0."""
        if not request.prompt:
            return await _only_load(host, request, as_response)
        return _reply(host, check, request, as_response, lambda llm: generate_answers(llm, request))

    @router.post("/chat", response_class=Response, responses=RESPONSES)
    async def chat(request: OllamaChatRequest) -> Response:
        """Answer a conversation; an empty one loads the model, or unloads it."""
        if not request.messages:
            return await _only_load(host, request, as_message)
        return _reply(host, check, request, as_message, lambda llm: chat_answers(llm, request))

    @router.post("/show", responses={404: RESPONSES[404]})
    async def show(request: ShowRequest) -> dict[str, Any]:
        """What is known of a model, which is loaded to know it."""
        async with host.lease(find_model(host, request.model).name) as served:
            return shown(host, served)

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        """The models that may be asked."""
        return {"models": [listed(host, model) for model in host.models.values()]}

    @router.get("/ps")
    async def ps() -> dict[str, Any]:
        """The models that are loaded."""
        models = host.models.values()
        return {"models": [running(host, model, model.served) for model in models if model.served]}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """minigen's version."""
        return {"version": __version__}

    return router


def _reply(
    host: ModelHost,
    check: Check,
    request: OllamaRequest,
    put: Put,
    answers_of: Callable[[LLM], SequenceOf[Answer]],
) -> Reply:
    asked_at = time.perf_counter()
    model = find_model(host, request.model)

    def read(served: Served) -> Asked:
        _keep(model, request)
        (answer,) = (timed(each) for each in answers_of(served.llm))
        check([answer])
        num_top = request.top_logprobs or 0
        wording = OllamaWording(served, answer, put, request.model, num_top, asked_at)
        return Asked([answer], wording)

    return Reply(host, model.name, request.stream is not False, read)


async def _only_load(host: ModelHost, request: OllamaRequest, put: Put) -> Response:
    asked_at = time.perf_counter()
    model = find_model(host, request.model)
    if request.keep_alive == 0:
        model.keep_for(0)
        reason = "unload"
    else:
        async with host.lease(model.name):
            _keep(model, request)
        reason = "load"
    took = nanoseconds(time.perf_counter() - asked_at)
    durations = {"total_duration": took, "load_duration": took}
    end = {"done": True, "done_reason": reason, **durations}
    return JSONResponse({**facts_now(request.model), **put(""), **end})


def _keep(model: HostedModel, request: OllamaRequest) -> None:
    """How long it stays when idle, as of this request: as it says, or as usual."""
    if request.keep_alive is None:
        model.keep_for(model.usual_keep_alive)
    else:
        model.keep_for(request.keep_alive if request.keep_alive >= 0 else None)

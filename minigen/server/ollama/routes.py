"""The routes of Ollama's API for the same models, because many local tools use it.

Their requests become prompts and `SamplingParams` here.
"""

import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from math import prod
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minigen import __version__
from minigen.checkpoint.model_config import ModelConfig
from minigen.errors import ContextLengthError, ParamsError
from minigen.fields import default_at, offered_at
from minigen.llm import LLM
from minigen.model.transformer import expected_tensors
from minigen.outputs import RequestState
from minigen.sampling.params import SamplingParams
from minigen.server.chat_turn import ChatTurn, chat_turn
from minigen.server.errors import ApiError
from minigen.server.forms import form_of_ollama, naming
from minigen.server.middleware.limits import header
from minigen.server.models import HostedModel, ModelHost, Served
from minigen.server.ollama.responses import (
    OllamaResponseWriter,
    Put,
    as_message,
    as_response,
    facts_now,
)
from minigen.server.ollama.schema import (
    NO_LIMITS,
    OWN_NAMES,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
    ShowRequest,
)
from minigen.server.openai.routes import Check
from minigen.server.openai.tool_fields import tools_of
from minigen.server.replies import ReadRequest, Reply
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tool_calling.parser import END_OF_THINK
from minigen.tool_calling.tools import ToolUse

LATEST = ":latest"
FOR_EVER = datetime(9999, 12, 31, tzinfo=UTC)


def find_model(host: ModelHost, name: str) -> HostedModel:
    """Return a model by name, with or without ":latest". Raises `ApiError` (404) if unknown."""
    return host.find(name if name in host.models else name.removesuffix(LATEST))


def listed(host: ModelHost, model: HostedModel) -> dict[str, Any]:
    """Return a model in the format of `/api/tags`; with size and details once it is loaded."""
    name = tagged(model.name)
    facts = {"name": name, "model": name, "modified_at": _date(host.created), "digest": ""}
    if model.served is None:
        return facts
    llm = model.served.llm
    return {**facts, "size": llm.stored_bytes, "details": details(model.served)}


def running(host: ModelHost, model: HostedModel, served: Served) -> dict[str, Any]:
    """Return a loaded model in the format of `/api/ps`, with the time at which it will expire."""
    return {
        **listed(host, model),
        "size_vram": 0,
        "context_length": served.llm.config.max_positions,
        "expires_at": _expiry(model).isoformat(),
    }


def shown(host: ModelHost, served: Served) -> dict[str, Any]:
    """Return a loaded model in the format of `/api/show`."""
    return {
        "modified_at": _date(host.created),
        "details": details(served),
        "model_info": _model_info(served.llm.config),
        "capabilities": capabilities(served.llm.chat_template),
    }


def capabilities(template: ChatTemplate | None) -> list[str]:
    """Return what `/api/show` says that a model can do, in Ollama's words.

    Every chat model may get tools: minigen describes them where its template does not.
    """
    if template is None:
        return ["completion"]
    return ["completion", "tools", *(["thinking"] if END_OF_THINK in template.source else [])]


def details(served: Served) -> dict[str, Any]:
    """Return a model's family, number of parameters and quantization."""
    config = served.llm.config
    return {
        "parent_model": "",
        "family": config.family,
        "families": [config.family],
        "parameter_size": f"{_num_parameters(config) / 1e6:.1f}M",
        "quantization_level": served.llm.describe()["weights"].partition(" ")[0],
    }


def tagged(name: str) -> str:
    """Add ":latest" to a name without a tag, because Ollama's clients expect a tag.

    >>> tagged("smollm2-135m"), tagged("org/repo:q8")
    ('smollm2-135m:latest', 'org/repo:q8')
    """
    return name if ":" in name else name + LATEST


def _model_info(config: ModelConfig) -> dict[str, Any]:
    """Return the model's configuration with GGUF's names."""
    family = config.family
    return {
        "general.architecture": family,
        "general.parameter_count": _num_parameters(config),
        f"{family}.attention.head_count": config.q_heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
        f"{family}.block_count": config.num_layers,
        f"{family}.context_length": config.max_positions,
        f"{family}.embedding_length": config.hidden,
        f"{family}.feed_forward_length": config.ffn,
        f"{family}.rope.freq_base": config.rope_theta,
        f"{family}.vocab_size": config.vocab_size,
    }


def _num_parameters(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in expected_tensors(config).values())


def _expiry(model: HostedModel) -> datetime:
    if model.keep_alive is None:
        return FOR_EVER
    return model.idle_until or datetime.now(UTC) + timedelta(seconds=model.keep_alive)


def _date(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat()


RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One JSON object per line for each step, or a single object.",
        "content": {"application/x-ndjson": {}, "application/json": {}},
    },
    400: {"description": "A field is unknown or wrong, or its value is not supported."},
    404: {"description": "The model does not exist."},
    503: {"description": "The server is shutting down, or the model could not be loaded."},
}


class AnyContentType(APIRoute):
    """Reads a body as JSON whatever its content type, since Ollama's curl examples send none.

    It does not do so for web pages (which send `Origin`): their content type decides whether the
    browser must first ask with a CORS preflight request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def as_json(request: Request) -> Response:
            if header(request.scope, b"origin") is None:
                others = [each for each in request.scope["headers"] if each[0] != b"content-type"]
                headers = [*others, (b"content-type", b"application/json")]
                request = Request({**request.scope, "headers": headers}, request.receive)
            return await handle(request)

        return as_json


def ollama_router(host: ModelHost, check: Check) -> APIRouter:
    """Create the routes under /api for the models of a host; `check` may refuse a request."""
    router = APIRouter(prefix="/api", tags=["Ollama"], route_class=AnyContentType)

    @router.post("/generate", response_class=Response, responses=RESPONSES)
    async def generate(request: GenerateRequest) -> Response:
        """Continue a prompt; an empty one loads or (with `keep_alive` 0) unloads the model."""
        if not request.prompt:
            return await _only_load(host, request, as_response)
        return _reply(host, check, request, as_response, lambda llm: generate_answers(llm, request))

    @router.post("/chat", response_class=Response, responses=RESPONSES)
    async def chat(request: OllamaChatRequest) -> Response:
        """Answer a conversation; an empty one loads or (with `keep_alive` 0) unloads the model."""
        if not request.messages:
            return await _only_load(host, request, as_message)
        return _reply(host, check, request, as_message, lambda llm: chat_answers(llm, request))

    @router.post("/show", responses={404: RESPONSES[404]})
    async def show(request: ShowRequest) -> dict[str, Any]:
        """Return information about a model, and load it if necessary."""
        async with host.lease(find_model(host, request.model).name) as served:
            return shown(host, served)

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        """List the available models."""
        return {"models": [listed(host, model) for model in host.models.values()]}

    @router.get("/ps")
    async def ps() -> dict[str, Any]:
        """List the loaded models."""
        models = host.models.values()
        return {"models": [running(host, model, model.served) for model in models if model.served]}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of minigen."""
        return {"version": __version__}

    return router


def _reply(
    host: ModelHost,
    check: Check,
    request: OllamaRequest,
    put: Put,
    answers_of: Callable[[LLM], tuple[list[RequestState], ChatTurn]],
) -> Reply:
    requested_ns = time.perf_counter_ns()
    model = find_model(host, request.model)

    def read(served: Served) -> ReadRequest:
        _keep(model, request)
        answers, turn = answers_of(served.llm)
        check(answers)
        num_top = request.top_logprobs or 0
        writer = OllamaResponseWriter(
            served, answers[0], put, request.model, num_top, requested_ns, turn.new_parser
        )
        return answers, writer

    takes_long = bool(request.format) or bool(getattr(request, "tools", None))
    return Reply(host, model.name, request.stream is not False, read, takes_long)


async def _only_load(host: ModelHost, request: OllamaRequest, put: Put) -> Response:
    requested_ns = time.perf_counter_ns()
    model = find_model(host, request.model)
    if request.keep_alive == 0 and not model.stays:
        model.keep_for(0)
        reason = "unload"
    else:
        async with host.lease(model.name):
            _keep(model, request)
        reason = "load"
    took = time.perf_counter_ns() - requested_ns
    durations = {"total_duration": took, "load_duration": took}
    end = {"done": True, "done_reason": reason, **durations}
    return JSONResponse({**facts_now(request.model), **put(""), **end})


def _keep(model: HostedModel, request: OllamaRequest) -> None:
    """Set how long the idle model stays loaded, by this request's `keep_alive` or the default."""
    if request.keep_alive is None:
        model.keep_for(model.usual_keep_alive)
    else:
        model.keep_for(request.keep_alive if request.keep_alive >= 0 else None)


ROLES = ("system", "user", "assistant", "tool")


def generate_answers(llm: LLM, request: GenerateRequest) -> tuple[list[RequestState], ChatTurn]:
    """Create the state of the answer to a prompt. Raises a `MinigenError` for an invalid request.

    As in Ollama, the prompt becomes a message in the model's chat template, unless `raw` is set.
    """
    prompt, form = request.prompt or "", form_of_ollama(request.format)
    if request.raw and request.system:
        raise ApiError("system needs a chat template, which raw turns off.", param="system")
    if not request.raw and (llm.chat_template is not None or request.system):
        system = [{"role": "system", "content": request.system}] if request.system else []
        thinks = _thinking(llm.chat_template, request.think)
        turn = chat_turn(llm, [*system, {"role": "user", "content": prompt}], form=form, **thinks)
    else:
        turn = ChatTurn(llm.tokenizer.encode(prompt), {"structured_outputs": form}, None)
    return _answers(llm, turn, request)


def chat_answers(llm: LLM, request: OllamaChatRequest) -> tuple[list[RequestState], ChatTurn]:
    """Create the state of the answer to a conversation; see `generate_answers`."""
    messages = with_call_ids([_plain(message) for message in request.messages or ()])
    thinks = _thinking(llm.chat_template, request.think)
    form = form_of_ollama(request.format)
    try:
        use = ToolUse(tools_of(request.tools))
    except ParamsError as error:
        raise ApiError(str(error), param="tools") from error
    return _answers(llm, chat_turn(llm, messages, use, form, **thinks), request)


def _thinking(template: ChatTemplate | None, wanted: bool | None) -> dict[str, Any]:
    """Return the variable for the chat template. Raises `ApiError` if the model cannot reason."""
    if wanted and (template is None or END_OF_THINK not in template.source):
        raise ApiError(
            "think: true needs a model whose chat template reasons; leave think out.",
            param="think",
        )
    can_turn = template is not None and "enable_thinking" in template.settable_names
    return {"enable_thinking": wanted} if can_turn and wanted is not None else {}


def _answers(
    llm: LLM, turn: ChatTurn, request: OllamaRequest
) -> tuple[list[RequestState], ChatTurn]:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    options = request.options or Options.model_validate({})
    num_prompt = len(turn.prompt_ids)
    params = SamplingParams(
        **_sampling_fields(options),
        max_tokens=_max_tokens(options, num_prompt, llm.config.max_positions),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **turn.params,
    )
    with naming("structured_outputs.json", "format"), naming("structured_outputs.grammar", "tools"):
        return llm.process_requests([turn.prompt_ids], params), turn


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
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = [(call.id or "", call.function) for call in message.tool_calls]
        plain["tool_calls"] = [
            {"id": own, "type": "function", "function": {"name": f.name, "arguments": f.arguments}}
            for own, f in calls
        ]
    return plain


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give an id to each call and result that has none, since some chat templates need them.

    Ollama's own clients send none: a result then belongs to the first call without a result that
    has its `tool_name`, or to the first of all. Mistral's templates want 9 letters and digits.
    """
    number = 0
    waiting: dict[str, str] = {}  # the names of calls without a result, by id
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call{number:05}"
            waiting[call["id"]] = call["function"]["name"]
            number += 1
        if message["role"] == "tool":
            if "tool_call_id" not in message and waiting:
                named = (own for own, name in waiting.items() if name == message.get("name"))
                message["tool_call_id"] = next(named, next(iter(waiting)))
            waiting.pop(message.get("tool_call_id", ""), None)
    return messages

"""The routes of OpenAI's API (chat, completions, models), and what their requests ask for."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import Any

from fastapi import APIRouter

from minigen.errors import ParamsError
from minigen.llm import LLM
from minigen.outputs import RequestState
from minigen.sampling.params import SamplingParams
from minigen.server.chat_turn import ChatTurn, chat_turn
from minigen.server.errors import ApiError
from minigen.server.forms import naming_the_form, naming_tools
from minigen.server.models import HostedModel, ModelHost, Served
from minigen.server.openai import examples
from minigen.server.openai.responses import ChatResponseWriter, CompletionResponseWriter
from minigen.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    Prediction,
    TokenizeRequest,
)
from minigen.server.replies import ReadRequest, Reply
from minigen.tokenizer.chat_template import ChatTemplate, text_of_parts

# Called with a request's answers before they are generated; raises a `MinigenError` to refuse it.
Check = Callable[[SequenceOf[RequestState]], None]


def openai_router(host: ModelHost, check: Check) -> APIRouter:
    """Create the routes under /v1 for the models of a host."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post("/chat/completions", responses=examples.CHAT)
    async def chat(request: ChatRequest) -> Reply:
        """Answer a conversation, as one response or as a stream of server-sent events."""

        def read(served: Served) -> ReadRequest:
            answers, turn = chat_answers(served.llm, request)
            check(answers)
            return answers, ChatResponseWriter(served, answers, request, turn.new_parser)

        takes_long = request.asks_for_a_form or bool(request.tools)
        return Reply(host, request.model, bool(request.stream), read, takes_long)

    @router.post("/completions", responses=examples.COMPLETION)
    async def complete(request: CompletionRequest) -> Reply:
        """Continue one or more prompts, as one response or as a stream of server-sent events."""

        def read(served: Served) -> ReadRequest:
            answers = completion_answers(served.llm, request)
            check(answers)
            return answers, CompletionResponseWriter(served, answers, request)

        return Reply(host, request.model, bool(request.stream), read, request.asks_for_a_form)

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


MOST_ANSWERS = 1024  # answers to one request: prompts times n


def chat_answers(llm: LLM, request: ChatRequest) -> tuple[list[RequestState], ChatTurn]:
    """Create the states of the answers that a chat request asks for, and the turn that they are.

    Without a token limit, an answer may fill the rest of the context. Raises a `MinigenError` if
    the request is invalid.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            "max_tokens and max_completion_tokens set the same limit; give only one of them.",
            param="max_completion_tokens",
        )
    params = sampling_params(
        request,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    use, form = request.tool_use(), params.structured_outputs
    assert not isinstance(form, Mapping), "SamplingParams has parsed it"
    with naming_the_form(request), naming_tools(form):
        turn = chat_turn(
            llm,
            [_plain(message) for message in request.messages],
            use,
            form,
            **_template_variables(llm, request),
        )
        params = replace(params, **turn.params)
        answers = llm.process_requests(
            [turn.prompt_ids],
            params,
            request.priority or 0,
            request.cache_salt,
            _predicted_ids(llm, request.prediction),
        )
    return answers, turn


def _predicted_ids(llm: LLM, prediction: Prediction | None) -> list[int]:
    if prediction is None:
        return []
    content = prediction.content
    text = content if isinstance(content, str) else text_of_parts(content, "The prediction")
    return llm.tokenizer.encode(text, add_special_tokens=False)


def completion_answers(llm: LLM, request: CompletionRequest) -> list[RequestState]:
    """Create the states of the answers that a completion request asks for; see `chat_answers`.

    For `max_tokens` 0 each answer has one token, which the response must not show.
    """
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens must be at least 1, or 0 with echo: true.", param="max_tokens")
    if len(request.prompt) * (request.n or 1) > MOST_ANSWERS:
        raise ApiError(
            f"{len(request.prompt)} prompts with {request.n or 1} answers each exceed the maximum "
            f"of {MOST_ANSWERS} answers; split them into several requests.",
            param="prompt",
        )
    params = sampling_params(
        request,
        max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    priority, salt = request.priority or 0, request.cache_salt
    with naming_the_form(request):
        return llm.process_requests(request.prompt, params, priority, salt)


def chat_prompt(llm: LLM, request: TokenizeRequest) -> list[int]:
    """Return the token ids of a conversation in the model's chat template."""
    messages = [_plain(message) for message in request.messages or ()]
    return chat_turn(llm, messages, **_template_variables(llm, request)).prompt_ids


def _template_variables(llm: LLM, request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt exclude each other; set only one.",
            param="continue_final_message",
        )
    add_prompt = request.add_generation_prompt
    variables = request.chat_template_kwargs or {}
    _check_settable(variables, llm.chat_template)
    return {
        "add_generation_prompt": not continues if add_prompt is None else add_prompt,
        "continue_final_message": continues,
        **variables,
    }


def _check_settable(variables: Mapping[str, Any], template: ChatTemplate | None) -> None:
    names = frozenset() if template is None else template.settable_names
    surplus = sorted(variables.keys() - names)
    if surplus:
        settable = f"only {', '.join(sorted(names))}" if names else "none"
        raise ApiError(
            f"chat_template_kwargs cannot set {surplus[0]!r}: clients may set {settable} of the "
            "variables in this model's chat template.",
            param="chat_template_kwargs",
        )


def _plain(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"  # the role that chat templates support
    return plain


def sampling_params(request: Generation, max_tokens: int | None, **own: Any) -> SamplingParams:
    """Build `SamplingParams` from the fields with the same names and `own`; null is the default.

    Raises a `MinigenError` for values that contradict each other.
    """
    if request.best_of not in (None, request.n or 1):
        raise ApiError(
            f"best_of is {request.best_of}, but minigen returns all answers that it generates: "
            "leave best_of out, or set it to n.",
            param="best_of",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream: true.", param="stream_options")
    given = {each.name: getattr(request, each.name, None) for each in fields(SamplingParams)} | own
    given["logit_bias"] = _biases(request.logit_bias)
    given["structured_outputs"] = request.form()
    if given["top_k"] in (0, -1):
        given["top_k"] = None
    del given["max_tokens"]  # for which None has a meaning: no limit
    known = {name: value for name, value in given.items() if value is not None}
    with naming_the_form(request):
        return SamplingParams(max_tokens=max_tokens, **known)


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise ParamsError(
                f"A key of logit_bias must be a token id like '42', not {token_id!r}."
            )
    return {int(token_id): bias for token_id, bias in biases.items()}

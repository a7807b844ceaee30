"""From Ollama's fields and options to what a model is asked."""

from typing import Any

from minigen.answers import Answer
from minigen.errors import ContextLengthError
from minigen.llm import LLM
from minigen.params import SamplingParams
from minigen.server.failures import ApiError
from minigen.server.ollama_schema import (
    NO_LIMITS,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
)

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1}
OUR_NAMES = {"repeat_penalty": "repetition_penalty"}
SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
ROLES = ("system", "user", "assistant")


def generate_answers(llm: LLM, request: GenerateRequest) -> list[Answer]:
    """The answer that a prompt asks for, to be made. Raises a `MinigenError` saying what is wrong.

    As Ollama does, it makes the prompt a message of the model's chat template, unless `raw`.
    """
    prompt: str | list[int] = request.prompt or ""
    if request.raw and request.system:
        raise ApiError("system is a message, which a raw prompt has none of.", param="system")
    if not request.raw and (llm.chat_template is not None or request.system):
        system = [{"role": "system", "content": request.system}] if request.system else []
        prompt = llm.chat_prompt([*system, {"role": "user", "content": prompt}])
    return _answers(llm, prompt, request)


def chat_answers(llm: LLM, request: OllamaChatRequest) -> list[Answer]:
    """The answer that a conversation asks for; as `generate_answers`."""
    messages = [_plain(message) for message in request.messages or ()]
    thinks = {} if request.think is None else {"enable_thinking": False}
    return _answers(llm, llm.chat_prompt(messages, **thinks), request)


def _answers(llm: LLM, prompt: str | list[int], request: OllamaRequest) -> list[Answer]:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs is told only with logprobs: true.", param="top_logprobs")
    options = request.options or Options.model_validate({})
    prompt_ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    params = SamplingParams(
        **_choosing(options),
        max_tokens=_max_tokens(options, len(prompt_ids), llm.config.max_positions),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return llm.read_requests([prompt_ids], params)


def _choosing(options: Options) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in (*SAME, "repeat_penalty", "stop")}
    named = DEFAULTS | {name: value for name, value in given.items() if value is not None}
    if named["top_k"] in (0, -1):
        named["top_k"] = None
    if named.get("seed", 0) < 0:
        named["seed"] = None
    return {OUR_NAMES.get(name, name): value for name, value in named.items()}


def _max_tokens(options: Options, num_prompt: int, max_positions: int) -> int | None:
    """The least of num_predict and what num_ctx leaves; None where neither is a limit."""
    limits = set[int]()
    if options.num_predict is not None and options.num_predict not in NO_LIMITS:
        limits.add(options.num_predict)
    if options.num_ctx is not None and options.num_ctx < max_positions:
        if num_prompt >= options.num_ctx:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, which leaves no room for an answer: num_ctx "
                f"is {options.num_ctx}. minigen cuts no prompt."
            )
        limits.add(options.num_ctx - num_prompt)
    return min(limits, default=None)


def _plain(message: OllamaMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError(
            f"A message's role is one of {', '.join(ROLES)}, not {message.role!r}.",
            param="messages",
        )
    return {"role": message.role, "content": message.content}

"""The request schema of OpenAI's two endpoints, and of vLLM's tokenizer endpoints.

An unknown field or an unsupported value is an error that names the field. `null` means the same as
a missing field. Fields that common clients always send are accepted with values that change
nothing. Sources: OpenAI's API reference; vLLM's, for the additional fields from `top_k` on.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from minigen.fields import default_at, offered_at, option_of
from minigen.sampling.params import SamplingParams
from minigen.server.forms import MOST_MESSAGES, Formed
from minigen.server.middleware.limits import MOST_ANSWERS_PER_PROMPT
from minigen.server.openai.tool_fields import MessageToolCall, Tooled

T = TypeVar("T", bound=BaseModel)
NO_NAMES: Mapping[str, str] = MappingProxyType({})
TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "number": (int, float),
    "string": str,
    "object": dict,
}


class OnlyDefault:
    """Marks a field that accepts only null or `values`, which all mean the default behaviour."""

    def __init__(self, *values: Any):
        self.values = (None, *values)

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        description = "Accepted only with a value that changes nothing."
        return {"enum": list(self.values), "description": description}

    def _check(self, value: Any) -> None:
        # Compare the types, too, since 0 == False. An accepted value becomes None, as if absent.
        if not any(type(value) is type(each) and value == each for each in self.values):
            allowed = " or ".join(json.dumps(each) for each in self.values)
            raise ValueError(f"minigen does not support this value; leave it out or send {allowed}")


class Ignored:
    """Marks a field that accepts any value of a JSON type and does not affect the response."""

    def __init__(self, json_type: str):
        self.json_type = json_type

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        description = "Accepted and ignored."
        return {"anyOf": [{"type": self.json_type}, {"type": "null"}], "description": description}

    def _check(self, value: Any) -> None:
        if value is not None and not isinstance(value, TYPES[self.json_type]):
            raise ValueError(f"must be null or of type {self.json_type}")


MOST_STOPS = 64
MOST_TOP_LOGPROBS = 20  # OpenAI's limit, which bounds the size of a response
WHOLE_MODELS = 2**31 - 1
EXAMPLE_MODEL = "smollm2-135m"


def _checked_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    texts = isinstance(stops, list) and all(isinstance(each, str) for each in stops)
    if not texts or len(stops) > MOST_STOPS or any(len(each) > 1000 for each in stops):
        raise ValueError(
            f"must be text or a list of at most {MOST_STOPS} texts of at most 1000 characters"
        )
    return [each for each in stops if each]  # some clients send "", which must stop nothing


def _checked_prompt(value: Any) -> list[Any]:
    """Return a list of prompts; the tokenizer and the model check the content of each."""
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be text, token ids, or a list of either, and not empty")
    if isinstance(prompts[0], str | list):
        return prompts
    return [prompts]


def _checked_content(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be text, or a list of parts of text")
    return value


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Stop = Annotated[
    Any,
    AfterValidator(_checked_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}),
]
Prompts = Annotated[
    Any,
    AfterValidator(_checked_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_TEXTS, "minItems": 1},
                _TOKENS,
                {"type": "array", "items": _TOKENS, "minItems": 1},
            ]
        }
    ),
]
Content = Annotated[
    Any,
    AfterValidator(_checked_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


class Strict(BaseModel):
    """A schema that rejects unknown fields, and does not convert values of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Strict):
    """The options of a stream."""

    include_usage: bool | None = Field(None, description="Send a last chunk with token counts.")
    include_obfuscation: Annotated[Any, OnlyDefault(False)] = None
    continuous_usage_stats: Annotated[Any, OnlyDefault(False)] = None


def with_sampling(
    api: str, names: Mapping[str, str] = NO_NAMES, params: Any = SamplingParams
) -> Callable[[type[T]], type[T]]:
    """Add to a schema the fields of `params` that have a default at `api`.

    `names` has the API's own names. A parameter that the schema defines already stays as it is.
    """

    def added(schema: type[T]) -> type[T]:
        new: dict[str, Any] = {}
        for each in offered_at(api, params):
            name, default = names.get(each.name, each.name), default_at(each, api)
            kind: Any = each.type
            if name not in schema.model_fields:
                text = None if default == each.default else f"{default} if absent."
                bounds: Any = option_of(each).values.bounds
                new[name] = (kind | None, Field(None, description=text, **bounds))
        doc, module = schema.__doc__, schema.__module__
        return create_model(schema.__name__, __base__=schema, __doc__=doc, __module__=module, **new)

    return added


@with_sampling("openai")
class Generation(Formed, Strict):
    """The fields of both endpoints: the model, its sampling parameters, and streaming.

    Sampling parameters that accept what `SamplingParams` accepts are added by the decorator.
    """

    model: str | None = Field(
        None, description="A model of /v1/models; the server's first if absent."
    )
    n: int | None = Field(
        None, ge=1, le=MOST_ANSWERS_PER_PROMPT, description="Answers to each prompt."
    )
    temperature: float | None = Field(None, ge=0, le=10**6, description="0 is greedy; 1 if absent.")
    stop: Stop = Field(None, description="Texts that end an answer; they are not part of it.")
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="The same seed samples the same tokens."
    )
    stream: bool | None = Field(
        None, description="Send server-sent events while tokens are generated."
    )
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = Field(
        None, max_length=1024, description="By token id: a value that is added to its logit."
    )
    user: Annotated[Any, Ignored("string")] = None

    top_k: int | None = Field(
        None, ge=-1, description="Sample from the most likely k tokens; 0 or -1 means all."
    )
    repetition_penalty: float | None = Field(None, gt=0, le=10**6)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=1024)
    skip_special_tokens: bool | None = None
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31, description="Lower values run first; 0 if absent."
    )
    cache_salt: str | None = Field(
        None, max_length=512, description="Only requests with the same salt share cached prefixes."
    )

    best_of: int | None = Field(None, description="Accepted only if equal to n.")
    length_penalty: Annotated[Any, OnlyDefault(1, 1.0)] = None
    use_beam_search: Annotated[Any, OnlyDefault(False)] = None
    spaces_between_special_tokens: Annotated[Any, OnlyDefault(True)] = None
    truncate_prompt_tokens: Annotated[Any, OnlyDefault()] = None
    return_token_ids: Annotated[Any, OnlyDefault(False)] = None
    service_tier: Annotated[Any, OnlyDefault("auto", "default")] = None
    store: Annotated[Any, OnlyDefault(False)] = None
    metadata: Annotated[Any, Ignored("object")] = None
    safety_identifier: Annotated[Any, Ignored("string")] = None
    prompt_cache_key: Annotated[Any, Ignored("string")] = None
    prompt_cache_retention: Annotated[Any, OnlyDefault("in_memory")] = None
    prompt_cache_options: Annotated[Any, OnlyDefault()] = None


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description='"developer" means the same as "system"; "tool" is the result of a call.'
    )
    content: Content | None = Field(None, description="Null only beside tool_calls.")
    tool_calls: list[MessageToolCall] | None = Field(
        None, description="The calls that an assistant's message made."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")
    reasoning_content: str | None = Field(None, description="Passed to the chat template.")
    name: str | None = Field(None, description="Passed to the chat template.")
    refusal: Annotated[Any, OnlyDefault()] = None
    audio: Annotated[Any, OnlyDefault()] = None
    annotations: Annotated[Any, OnlyDefault([])] = None
    function_call: Annotated[Any, OnlyDefault()] = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("only a message of role tool has a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of role assistant has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("content may be null only beside tool_calls")
        return self


def _with_known_calls(messages: list[Message]) -> list[Message]:
    known: set[str] = set()
    for place, message in enumerate(messages):
        known |= {call.id for call in message.tool_calls or ()}
        wanted = message.tool_call_id
        if wanted is not None and wanted not in known:
            raise ValueError(
                f"message {place} answers the call {wanted[:100]!r}, but no message before it has "
                "a call with that id"
            )
    return messages


class Conversation(Strict):
    """Messages, and how the model's chat template turns them into a prompt."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MOST_MESSAGES),
        AfterValidator(_with_known_calls),
    ]
    add_generation_prompt: bool | None = Field(None, description="True if absent.")
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; add_generation_prompt is then false."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    chat_template: Annotated[Any, OnlyDefault()] = None
    documents: Annotated[Any, OnlyDefault([])] = None


class Prediction(Strict):
    """A text that the answer is expected to repeat for the most part, such as a file to edit."""

    type: Literal["content"]
    content: Content


class ChatRequest(Generation, Conversation, Tooled):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "messages": [{"role": "user", "content": "What is gravity?"}],
                "max_tokens": 32,
            }
        }
    )

    max_completion_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens of an answer; the rest of the context if absent."
    )
    max_tokens: int | None = Field(None, ge=1, description="Older name of max_completion_tokens.")
    logprobs: bool | None = Field(None, description="Return each token's log probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP_LOGPROBS, description="Also return those of the most likely tokens."
    )
    prediction: Prediction | None = Field(
        None, description="What the answer is expected to be; it only makes it faster."
    )

    echo: Annotated[Any, OnlyDefault(False)] = None
    add_special_tokens: Annotated[Any, OnlyDefault(False)] = None
    audio: Annotated[Any, OnlyDefault()] = None
    function_call: Annotated[Any, OnlyDefault("none", "auto")] = None
    functions: Annotated[Any, OnlyDefault([])] = None
    modalities: Annotated[Any, OnlyDefault(["text"])] = None
    moderation: Annotated[Any, OnlyDefault()] = None
    reasoning_effort: Annotated[Any, OnlyDefault("none")] = None
    verbosity: Annotated[Any, OnlyDefault("medium")] = None
    web_search_options: Annotated[Any, OnlyDefault()] = None


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "prompt": "The capital of France is",
                "max_tokens": 8,
                "temperature": 0,
            }
        }
    )

    prompt: Prompts
    max_tokens: int | None = Field(
        None, ge=0, description="The rest of the context if absent; 0 only with echo."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP_LOGPROBS, description="Number of most likely tokens to return."
    )
    echo: bool | None = Field(None, description="Start the answer with the prompt.")

    suffix: Annotated[Any, OnlyDefault("")] = None
    add_special_tokens: Annotated[Any, OnlyDefault(True)] = None


class TokenizeRequest(Strict):
    """`POST /tokenize`: either a prompt or messages."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model": EXAMPLE_MODEL, "prompt": "Hello there"}}
    )

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        None, description="For a prompt: true if absent; a chat template adds its own."
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model": EXAMPLE_MODEL, "tokens": [19556, 665]}}
    )

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=WHOLE_MODELS)]]

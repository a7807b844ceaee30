"""The request schema of Ollama's API, with Ollama's own defaults.

An unknown field or option, or an unsupported value, is an error that names the field. Source:
Ollama's API reference, and its client's types.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from minigen.config import parse_seconds
from minigen.errors import OptionError
from minigen.server.forms import MOST_MESSAGES, MOST_TOOLS
from minigen.server.openai.schema import (
    EXAMPLE_MODEL,
    MOST_TOP_LOGPROBS,
    Ignored,
    OnlyDefault,
    Stop,
    Strict,
    with_sampling,
)
from minigen.server.openai.tool_fields import ToolDefinition

OWN_NAMES = {"repetition_penalty": "repeat_penalty"}  # Ollama's, by ours
FORMAT = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
NO_LIMITS = (-1, -2)  # num_predict: until the model stops, or until the context is full


def _checked_num_predict(value: int | None) -> int | None:
    if value is not None and value not in NO_LIMITS and value < 1:
        raise ValueError("should be at least 1, or -1 for no limit")
    return value


def _checked_keep_alive(value: Any) -> Any:
    """Return seconds for a number or a text like "5m"; a negative value means forever."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and not math.isnan(value)):
        return value
    wrong = 'should be seconds, or a time like "5m" or "-1"'
    if not isinstance(value, str):
        raise ValueError(wrong)
    sign, text = (-1, value[1:]) if value.startswith("-") else (1, value)
    try:
        return sign * parse_seconds("keep_alive", text)
    except OptionError as error:
        raise ValueError(wrong) from error


KeepAlive = Annotated[
    Any,  # a number or None after validation
    AfterValidator(_checked_keep_alive),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]
_KEEP_ALIVE = 'How long an idle model stays loaded: seconds or "10m"; 0 unloads it, -1 never does.'


@with_sampling("ollama", OWN_NAMES)
class Options(Strict):
    """The sampling options. Options that only affect where or how fast Ollama runs are ignored."""

    top_k: int | None = Field(None, ge=-1, description="40 if absent; 0 or -1 means all.")
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="A negative value means no seed."
    )
    num_predict: Annotated[int | None, AfterValidator(_checked_num_predict)] = Field(
        None, le=2**31 - 1, description="Maximum tokens; -1 or absent: the rest of the context."
    )
    num_ctx: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of prompt and answer; at most the model's context (default).",
    )
    stop: Stop = Field(None, description="Texts that end an answer; they are not part of it.")
    repeat_penalty: float | None = Field(
        None,
        gt=0,
        le=10**6,
        description="1.1 if absent; it applies to all tokens so far, not to the last 64.",
    )
    repeat_last_n: Annotated[Any, OnlyDefault(-1)] = None

    typical_p: Annotated[Any, OnlyDefault(1, 1.0)] = None
    tfs_z: Annotated[Any, OnlyDefault(1, 1.0)] = None
    mirostat: Annotated[Any, OnlyDefault(0)] = None
    mirostat_tau: Annotated[Any, Ignored("number")] = None
    mirostat_eta: Annotated[Any, Ignored("number")] = None
    penalize_newline: Annotated[Any, OnlyDefault(True)] = None
    num_keep: Annotated[Any, Ignored("number")] = None  # for truncation, which minigen never does
    num_batch: Annotated[Any, Ignored("number")] = None
    num_gpu: Annotated[Any, Ignored("number")] = None
    main_gpu: Annotated[Any, Ignored("number")] = None
    num_thread: Annotated[Any, Ignored("number")] = None
    numa: Annotated[Any, Ignored("boolean")] = None
    low_vram: Annotated[Any, Ignored("boolean")] = None
    f16_kv: Annotated[Any, Ignored("boolean")] = None
    use_mmap: Annotated[Any, Ignored("boolean")] = None
    use_mlock: Annotated[Any, Ignored("boolean")] = None


class OllamaRequest(Strict):
    """The fields of both endpoints."""

    model: str = Field(min_length=1, description="With or without ':latest'.")
    stream: bool | None = Field(None, description="One JSON line per step; true if absent.")
    options: Options | None = None
    keep_alive: KeepAlive = Field(None, description=_KEEP_ALIVE)
    logprobs: bool | None = Field(None, description="Return each token's log probability.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    format: Annotated[Any, WithJsonSchema(FORMAT)] = Field(
        None, description='The form of the answer: "json", or a JSON schema; free if absent.'
    )
    think: bool | None = Field(
        None, description="Whether a model that reasons does so; as its template says if absent."
    )
    truncate: Annotated[Any, OnlyDefault(False)] = None
    shift: Annotated[Any, OnlyDefault(False)] = None


class GenerateRequest(OllamaRequest):
    """`POST /api/generate`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": EXAMPLE_MODEL, "prompt": "Why is the sky blue?", "stream": False}
        }
    )

    prompt: str | None = Field(None, description="If empty, only load the model.")
    system: str | None = Field(None, description="The system message before the prompt.")
    raw: bool | None = Field(None, description="Use the prompt unchanged, without a chat template.")

    suffix: Annotated[Any, OnlyDefault("")] = None
    images: Annotated[Any, OnlyDefault([])] = None
    template: Annotated[Any, OnlyDefault("")] = None
    context: Annotated[Any, OnlyDefault([])] = None


class OllamaFunction(Strict):
    """The function of a call, and its arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: Annotated[Any, Ignored("string")] = None


class OllamaToolCall(Strict):
    """A call in a message of the assistant."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict):
    """One message of a conversation."""

    role: str = Field(description='"system", "user", "assistant", or "tool": a call\'s result.')
    content: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = Field(None, description="The tool whose result this is.")
    tool_call_id: str | None = None
    images: Annotated[Any, OnlyDefault([])] = None
    thinking: str | None = Field(None, description="Passed to the chat template.")


class OllamaChatRequest(OllamaRequest):
    """`POST /api/chat`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "messages": [{"role": "user", "content": "What is gravity?"}],
                "stream": False,
            }
        }
    )

    messages: list[OllamaMessage] | None = Field(
        None, max_length=MOST_MESSAGES, description="If absent, only load the model."
    )
    tools: list[ToolDefinition] | None = Field(
        None, max_length=MOST_TOOLS, description="Functions that the model may call."
    )


class ShowRequest(Strict):
    """`POST /api/show`."""

    model_config = ConfigDict(json_schema_extra={"example": {"model": EXAMPLE_MODEL}})

    model: str = Field(min_length=1)
    verbose: bool | None = None

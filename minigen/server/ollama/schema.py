"""What may be asked in Ollama's words, field by field, with Ollama's own defaults.

A field or an option that is not here, or asks for what minigen does not do, is an error that names
it. Source: Ollama's API reference, and its client's types.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from minigen.config import parse_seconds
from minigen.server.openai.schema import (
    EXAMPLE_MODEL,
    MOST_TOP_LOGPROBS,
    Ignored,
    OnlyDefault,
    Stop,
    Strict,
)

NO_LIMITS = (-1, -2)  # of num_predict: until the model ends, or until the context is full


def _checked_num_predict(value: int | None) -> int | None:
    if value is not None and value not in NO_LIMITS and value < 1:
        raise ValueError("should be at least 1, or -1 for no limit")
    return value


def _checked_keep_alive(value: Any) -> Any:
    """Seconds, or text such as "5m"; below 0 is for ever."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if not isinstance(value, str):
        raise ValueError('should be seconds, or a time such as "5m" or "-1"')
    sign, text = (-1, value[1:]) if value.startswith("-") else (1, value)
    return sign * parse_seconds("it", text)


KeepAlive = Annotated[
    Any,  # and afterwards a number or None
    AfterValidator(_checked_keep_alive),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]
_KEEP_ALIVE = 'How long the model stays loaded when idle: seconds or "10m"; 0 ends it, -1 never.'


class Options(Strict):
    """How tokens are chosen. What says only where or how fast Ollama computes is ignored."""

    temperature: float | None = Field(None, ge=0, le=10**6, description="0.8 if absent.")
    top_k: int | None = Field(None, ge=-1, description="40 if absent; 0 or -1 for all.")
    top_p: float | None = Field(None, gt=0, le=1, description="0.9 if absent.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Below 0 is none.")
    num_predict: Annotated[int | None, AfterValidator(_checked_num_predict)] = Field(
        None, le=2**31 - 1, description="Tokens at most; -1, as if absent: what the context leaves."
    )
    num_ctx: int | None = Field(
        None, ge=1, description="Prompt and answer at most; the model's context if absent or less."
    )
    stop: Stop = Field(None, description="Texts that end an answer, and are not part of it.")
    repeat_penalty: float | None = Field(
        None, gt=0, le=10**6, description="1.1 if absent; for all tokens so far, not the last 64."
    )
    repeat_last_n: Annotated[Any, OnlyDefault(-1)] = None
    presence_penalty: float | None = Field(None, ge=-(10**6), le=10**6)
    frequency_penalty: float | None = Field(None, ge=-(10**6), le=10**6)

    typical_p: Annotated[Any, OnlyDefault(1, 1.0)] = None
    tfs_z: Annotated[Any, OnlyDefault(1, 1.0)] = None
    mirostat: Annotated[Any, OnlyDefault(0)] = None
    mirostat_tau: Annotated[Any, Ignored("number")] = None
    mirostat_eta: Annotated[Any, Ignored("number")] = None
    penalize_newline: Annotated[Any, OnlyDefault(True)] = None
    num_keep: Annotated[Any, Ignored("number")] = None  # of a prompt that is cut, as none is here
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
    """What both endpoints have."""

    model: str = Field(min_length=1, description="With or without ':latest'.")
    stream: bool | None = Field(None, description="A line of JSON a step; true if absent.")
    options: Options | None = None
    keep_alive: KeepAlive = Field(None, description=_KEEP_ALIVE)
    logprobs: bool | None = Field(None, description="Tell each token's log probability.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    format: Annotated[Any, OnlyDefault("")] = None
    think: Annotated[Any, OnlyDefault(False)] = None
    truncate: Annotated[Any, OnlyDefault(False)] = None
    shift: Annotated[Any, OnlyDefault(False)] = None


class GenerateRequest(OllamaRequest):
    """`POST /api/generate`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": EXAMPLE_MODEL, "prompt": "Why is the sky blue?", "stream": False}
        }
    )

    prompt: str | None = Field(None, description="Empty: only load the model.")
    system: str | None = Field(None, description="The first message of the model's chat template.")
    raw: bool | None = Field(None, description="The prompt as it is, without a chat template.")

    suffix: Annotated[Any, OnlyDefault("")] = None
    images: Annotated[Any, OnlyDefault([])] = None
    template: Annotated[Any, OnlyDefault("")] = None
    context: Annotated[Any, OnlyDefault([])] = None


class OllamaMessage(Strict):
    """One turn of a conversation."""

    role: str = Field(description='"system", "user" or "assistant".')
    content: str = ""
    images: Annotated[Any, OnlyDefault([])] = None
    thinking: Annotated[Any, OnlyDefault("")] = None
    tool_calls: Annotated[Any, OnlyDefault([])] = None
    tool_name: Annotated[Any, OnlyDefault("")] = None


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

    messages: list[OllamaMessage] | None = Field(None, description="None: only load the model.")
    tools: Annotated[Any, OnlyDefault([])] = None


class ShowRequest(Strict):
    """`POST /api/show`."""

    model_config = ConfigDict(json_schema_extra={"example": {"model": EXAMPLE_MODEL}})

    model: str = Field(min_length=1)
    verbose: bool | None = None

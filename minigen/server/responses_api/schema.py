"""The request schema of OpenAI's Responses API: `POST /v1/responses`.

As for chats, an unknown field or an unsupported value is an error that names the field, and `null`
means the same as a missing field. Source: OpenAI's API reference.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.server.by_type import ByType
from minigen.server.errors import ApiError
from minigen.server.forms import naming
from minigen.server.openai.schema import (
    EXAMPLE_MODEL,
    MOST_TOP_LOGPROBS,
    Generation,
    OnlyDefault,
    Strict,
)
from minigen.server.responses_api.function_tools import Tooled
from minigen.server.responses_api.items import Items

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # changes nothing: reasoning comes as plain text

_ECHOED = "Changes nothing, and comes back in the response."


class Refused:
    """Marks a field of OpenAI's API whose values but null are refused with a sentence."""

    def __init__(self, sentence: str):
        self.sentence = sentence

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        return {"enum": [None], "description": f"Not supported: {self.sentence}."}

    def _check(self, value: Any) -> None:
        if value is not None:
            raise ValueError(self.sentence)


class PlainText(Strict):
    """Free text."""

    type: Literal["text"]


class AnyJson(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class JsonOfSchema(Strict):
    """JSON that is valid by a named schema; with `strict`, an unknown keyword is refused."""

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """The form of an answer's text."""

    format: Annotated[Any, ByType(PlainText, AnyJson, JsonOfSchema)] | None = None
    verbosity: Annotated[Any, OnlyDefault("medium")] = None


class ReasoningConfig(Strict):
    """How the model reasons."""

    effort: Literal["none"] | None = Field(
        None, description="none turns reasoning off, if the chat template can; no other effort."
    )
    summary: Annotated[Any, OnlyDefault("auto")] = None
    generate_summary: Annotated[Any, OnlyDefault("auto")] = None


class ResponsesRequest(Generation, Tooled):
    """`POST /v1/responses`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "instructions": "Answer in one sentence.",
                "input": "What is gravity?",
                "max_output_tokens": 32,
            }
        }
    )

    input: Items = Field(description="Text, or items: messages, calls, their outputs, reasoning.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens of an answer; the rest of the context if absent."
    )
    text: TextConfig | None = Field(
        None, description="Its format is text, json_object, or json_schema with a schema."
    )
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        Field(
            None,
            description=f"{LOGPROBS} adds log probabilities; {ENCRYPTED} changes nothing, since "
            "reasoning comes as plain text.",
        )
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP_LOGPROBS, description=f"Needs {LOGPROBS} in include."
    )
    reasoning: ReasoningConfig | None = Field(None, description="Only effort none.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description=_ECHOED)
    user: str | None = Field(None, description=_ECHOED)
    safety_identifier: str | None = Field(None, description=_ECHOED)
    prompt_cache_key: str | None = Field(None, description=_ECHOED)

    n: Annotated[Any, OnlyDefault(1)] = None
    best_of: Annotated[Any, OnlyDefault(1)] = None
    background: Annotated[Any, OnlyDefault(False)] = None
    truncation: Annotated[Any, OnlyDefault("disabled")] = None
    max_tool_calls: Annotated[Any, OnlyDefault()] = None
    moderation: Annotated[Any, OnlyDefault()] = None
    context_management: Annotated[Any, OnlyDefault([])] = None
    previous_response_id: Annotated[
        Any,
        Refused("minigen stores no responses: send the items of the earlier turns in input again"),
    ] = None
    conversation: Annotated[
        Any, Refused("minigen stores no conversations: send all their items in input again")
    ] = None
    prompt: Annotated[
        Any, Refused("minigen stores no templates of prompts: send instructions and input")
    ] = None
    response_format: Annotated[Any, Refused('send text: {"format": ...}')] = None

    @property
    def asks_for_a_form(self) -> bool:
        """Whether the answer must have a form, which must be compiled."""
        return self.structured_outputs is not None or self._format is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def name_of_form(self) -> tuple[str, str]:
        """What an error calls the form, and the field of the request that asks for it."""
        if self._format is None:
            return "structured_outputs", "structured_outputs"
        return "structured_outputs.json", "text.format.schema"

    def form(self) -> StructuredOutputsParams | None:
        """Return the form, or None for free text. Raises `ApiError` if it cannot be one."""
        wanted = self._format
        if wanted is None:
            return super().form()
        if self.structured_outputs is not None:
            raise ApiError(
                "text.format and structured_outputs both set the form of the answer; give only one "
                "of them.",
                param="structured_outputs",
            )
        if isinstance(wanted, AnyJson):
            return StructuredOutputsParams(json_object=True)
        with naming(*self.name_of_form):
            return StructuredOutputsParams(json=wanted.schema_, strict=bool(wanted.strict))

    @property
    def _format(self) -> AnyJson | JsonOfSchema | None:
        wanted = None if self.text is None else self.text.format
        return None if isinstance(wanted, PlainText) else wanted

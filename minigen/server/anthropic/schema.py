"""The request schema of Anthropic's Messages API.

An unknown field, block or tool is an error that names it, and `null` means the same as a missing
field. Source: Anthropic's API reference, and its client's types.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from minigen.errors import ParamsError
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.server.by_type import ByType
from minigen.server.errors import ApiError
from minigen.server.forms import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, Renamed, naming
from minigen.server.openai.schema import (
    EXAMPLE_MODEL,
    MOST_STOPS,
    Ignored,
    OnlyDefault,
    Strict,
    with_sampling,
)
from minigen.tool_calling.tools import Tool, ToolChoice, ToolUse

OWN_NAMES = {"stop": "stop_sequences"}  # Anthropic's, by ours
SCHEMA_FIELD = "output_config.format.schema"


class TextOrBlocks:
    """Marks a list of blocks that may be given as one text."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_before_validator_function(_as_blocks, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def _as_blocks(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be text, or a list of blocks")
    return value


class Cacheable(Strict):
    """The mark of what should be cached; minigen caches all prefixes without it."""

    cache_control: Annotated[Any, Ignored("object")] = None


class TextBlock(Cacheable):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, OnlyDefault([])] = None


class ThinkingBlock(Strict):
    """The model's reasoning in an earlier answer, passed to the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, Ignored("string")] = None


class ToolUseBlock(Cacheable):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    caller: Annotated[Any, OnlyDefault({"type": "direct"})] = None
    toolset_name: Annotated[Any, OnlyDefault()] = None


class ToolResultBlock(Cacheable):
    """The result of a call in the message before."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Annotated[list[TextBlock], TextOrBlocks()] | None = None
    is_error: bool | None = Field(None, description="Marks the result as an error for the model.")
    toolset_name: Annotated[Any, OnlyDefault()] = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
AnyBlock = Annotated[Block, ByType(TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)]
BLOCKS_OF = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


class AnthropicMessage(Strict):
    """One message of a conversation. The user's has results of tools before text."""

    role: Literal["user", "assistant"]
    content: Annotated[list[AnyBlock], Field(max_length=MOST_PARTS), TextOrBlocks()]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> "AnthropicMessage":
        allowed = BLOCKS_OF[self.role]
        wrong = next((each.type for each in self.content if each.type not in allowed), None)
        if wrong is not None:
            raise ValueError(
                f"a message of role {self.role} has blocks of type {' and '.join(allowed)}, "
                f"no {wrong}"
            )
        return self


class CustomTool(Cacheable):
    """A tool of the client. Tools that Anthropic's servers run are refused by name."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of an object.")
    strict: bool | None = Field(
        None, description="Refuse a schema with keywords that are none of JSON Schema's."
    )
    eager_input_streaming: Annotated[Any, Ignored("boolean")] = None
    defer_loading: Annotated[Any, OnlyDefault(False)] = None
    input_examples: Annotated[Any, OnlyDefault([])] = None
    allowed_callers: Annotated[Any, OnlyDefault(["direct"])] = None

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(
                f"minigen has no tool of type {kind[:80]!r}; a tool of your own has the type "
                "'custom' or none"
            )
        return value


class AnthropicToolChoice(Strict):
    """Whether the model calls tools: as it likes, in any case, one by its name, or never."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="The tool's name, only for the type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")

    @model_validator(mode="after")
    def _names_a_tool_if_it_must(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool needs a name, and no other type has one")
        return self


class Thinking(Strict):
    """Whether a model that reasons does so before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1024, description="Not a limit of its own: reasoning counts for max_tokens."
    )
    display: Annotated[Any, OnlyDefault("summarized")] = None


class OutputFormat(Strict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")


class OutputConfig(Strict):
    """The form of an answer."""

    format: OutputFormat | None = None
    effort: Annotated[Any, OnlyDefault("high")] = None


class AnthropicRequest(Cacheable):
    """The fields of both endpoints, from which the prompt comes."""

    model: str = Field(min_length=1, description="A model of /v1/models.")
    messages: list[AnthropicMessage] = Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description="An assistant's message at the end is continued.",
    )
    system: Annotated[list[TextBlock], TextOrBlocks()] | None = Field(
        None, description="The system message, as text or as blocks of text."
    )
    tools: list[CustomTool] | None = Field(
        None, max_length=MOST_TOOLS, description="Tools that the model may call."
    )
    tool_choice: AnthropicToolChoice | None = Field(
        None, description="The type auto, any, tool (with name) or none; auto if absent."
    )
    thinking: Thinking | None = Field(
        None, description="enabled only for a model that reasons; as the model does if absent."
    )
    output_config: OutputConfig | None = Field(
        None, description="format: json_schema with a schema; free text if absent."
    )
    output_format: Annotated[Any, Renamed('output_config: {"format": ...}')] = None
    speed: Annotated[Any, OnlyDefault("standard")] = None

    @property
    def needs_grammar(self) -> bool:
        """Whether answers have calls or a form, for which a grammar is compiled."""
        return bool(self.tools) or self.form_schema is not None

    @property
    def form_schema(self) -> dict[str, Any] | None:
        """The schema of the answer's text, or None for free text."""
        wanted = None if self.output_config is None else self.output_config.format
        return None if wanted is None else wanted.schema_

    def form(self) -> StructuredOutputsParams | None:
        """Return the form of the text, or None. Raises `ApiError` for a schema beyond JSON's."""
        if self.form_schema is None:
            return None
        with naming("structured_outputs.json", SCHEMA_FIELD):
            return StructuredOutputsParams(json=self.form_schema)

    def tool_use(self) -> ToolUse:
        """Return the tools and their choice. Raises `ApiError` for those that cannot be used.

        All inputs are valid by their schemas, since a block's `input` must be an object.
        """
        wanted = self.tool_choice or AnthropicToolChoice.model_validate({"type": "auto"})
        choices = {
            "auto": ToolChoice("auto"),
            "any": ToolChoice("required"),
            "tool": ToolChoice("required", (wanted.name or "",)),
            "none": ToolChoice("none"),
        }
        one = bool(wanted.disable_parallel_tool_use) or wanted.type == "tool"
        try:
            return ToolUse(
                tuple(_tool(each) for each in self.tools or ()),
                choices[wanted.type],
                parallel=not one,
                enforced=True,
            )
        except ParamsError as error:
            raise ApiError(str(error)) from error


@with_sampling("anthropic", OWN_NAMES)
class MessagesRequest(AnthropicRequest):
    """`POST /v1/messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "max_tokens": 32,
                "messages": [{"role": "user", "content": "What is gravity?"}],
            }
        }
    )

    max_tokens: int = Field(ge=1, le=2**31 - 1, description="Maximum tokens of the answer.")
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1000)]] | None = Field(
        None, max_length=MOST_STOPS, description="Texts that end the answer; not part of it."
    )
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; 1 if absent.")
    top_k: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Sample from the most likely k tokens; 0 means all."
    )
    stream: bool | None = Field(
        None, description="Send server-sent events while tokens are generated."
    )

    metadata: Annotated[Any, Ignored("object")] = None
    thread: dict[str, Any] | None = Field(
        None, description="Refused in the way that makes clients send the whole conversation."
    )

    service_tier: Annotated[Any, OnlyDefault("auto", "standard_only")] = None
    container: Annotated[Any, OnlyDefault()] = None
    diagnostics: Annotated[Any, OnlyDefault()] = None
    inference_geo: Annotated[Any, OnlyDefault()] = None
    mcp_servers: Annotated[Any, OnlyDefault([])] = None
    context_management: Annotated[Any, OnlyDefault()] = None


class CountTokensRequest(AnthropicRequest):
    """`POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": EXAMPLE_MODEL,
                "messages": [{"role": "user", "content": "What is gravity?"}],
            }
        }
    )


def _tool(given: CustomTool) -> Tool:
    return Tool(
        name=given.name,
        description=given.description or "",
        parameters=given.input_schema,
        strict=bool(given.strict),
    )

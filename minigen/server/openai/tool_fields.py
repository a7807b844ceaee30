"""The tools of a chat request in OpenAI's form.

Source: OpenAI's API reference: `tools`, `tool_choice`, `parallel_tool_calls`, `tool_calls`.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from minigen.errors import ParamsError
from minigen.server.errors import ApiError
from minigen.server.forms import MOST_TOOLS
from minigen.tool_calling.tools import NO_PARAMETERS, Tool, ToolChoice, ToolUse


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class FunctionDefinition(_Strict):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of an object; no parameters if absent."
    )
    strict: bool | None = Field(
        None, description="Arguments are valid by the schema even if tool_choice is auto."
    )


class ToolDefinition(_Strict):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Strict):
    """A function by its name."""

    name: str


class NamedTool(_Strict):
    """A choice of one function, which the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolsList(_Strict):
    """Some of the tools, which the model may (auto) or must (required) call."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(_Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


class CalledFunction(_Strict):
    """The function of a call, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(_Strict):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients send back what they collected from a stream


class Tooled(_Strict):
    """The fields of a chat request that are about tools."""

    tools: list[ToolDefinition] | None = Field(
        None, max_length=MOST_TOOLS, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None, description="auto if there are tools and it is absent."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true if absent."
    )

    def tool_use(self) -> ToolUse:
        """Return the tools and their choice. Raises `ApiError` for those that cannot be used."""
        tools = tools_of(self.tools)
        one = self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
        try:
            return ToolUse(tools, _choice(self.tool_choice), parallel=not one)
        except ParamsError as error:
            about_choice = str(error).startswith("tool_choice")
            raise ApiError(str(error), param="tool_choice" if about_choice else "tools") from error


def tools_of(given: Iterable[ToolDefinition] | None) -> tuple[Tool, ...]:
    """Return a request's tools. Raises `ApiError` for a name or a schema that cannot be used."""
    try:
        return tuple(_tool(each.function) for each in given or ())
    except ParamsError as error:
        raise ApiError(str(error), param="tools") from error


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=NO_PARAMETERS if function.parameters is None else function.parameters,
        strict=bool(function.strict),
    )


def _choice(wanted: Any) -> ToolChoice:
    if isinstance(wanted, NamedTool):
        return ToolChoice("required", (wanted.function.name,))
    if isinstance(wanted, AllowedTools):
        allowed = wanted.allowed_tools
        return ToolChoice(allowed.mode, tuple(each.function.name for each in allowed.tools))
    return ToolChoice(wanted or "auto")

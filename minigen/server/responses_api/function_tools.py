"""The tools of a request to the Responses API, whose form is flatter than in a chat request.

Source: OpenAI's API reference: `tools`, `tool_choice`, `parallel_tool_calls`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from minigen.errors import ParamsError
from minigen.server.by_type import ByType
from minigen.server.errors import ApiError
from minigen.server.forms import MOST_TOOLS
from minigen.server.openai.schema import Strict
from minigen.tool_calling.tools import NO_PARAMETERS, Tool, ToolChoice, ToolUse

_ONLY_FUNCTIONS = "minigen runs no tools itself: send tools of type function, which you run"


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of an object; no parameters if absent."
    )
    strict: bool | None = Field(
        None,
        description="Arguments are valid by the schema even if tool_choice is auto; false if "
        "absent.",
    )


class NamedTool(Strict):
    """A choice of one function, which the model must call."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """A choice among some of the functions, which the model may (auto) or must (required) call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[Any, ByType(NamedTool, others=_ONLY_FUNCTIONS)]] = Field(min_length=1)


Tools = Annotated[
    list[Annotated[Any, ByType(FunctionTool, others=_ONLY_FUNCTIONS)]],
    Field(max_length=MOST_TOOLS),
]
Choice = Annotated[
    Any,
    ByType(
        *(NamedTool, AllowedTools),
        texts=("none", "auto", "required"),
        others="minigen knows the types function and allowed_tools",
    ),
]


class Tooled(Strict):
    """The fields of a request that are about tools."""

    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: Choice | None = Field(
        None, description="none, auto, required, a function or allowed_tools; auto if absent."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true if absent."
    )

    def tool_use(self) -> ToolUse:
        """Return the tools and their choice. Raises `ApiError` for those that cannot be used."""
        try:
            tools = tuple(_tool(each) for each in self.tools or ())
        except ParamsError as error:
            raise ApiError(str(error), param="tools") from error
        one = self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
        try:
            return ToolUse(tools, _choice(self.tool_choice), parallel=not one)
        except ParamsError as error:
            about_choice = str(error).startswith("tool_choice")
            raise ApiError(str(error), param="tool_choice" if about_choice else "tools") from error


def _tool(function: FunctionTool) -> Tool:
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=NO_PARAMETERS if function.parameters is None else function.parameters,
        strict=bool(function.strict),
    )


def _choice(wanted: Any) -> ToolChoice:
    if isinstance(wanted, NamedTool):
        return ToolChoice("required", (wanted.name,))
    if isinstance(wanted, AllowedTools):
        return ToolChoice(wanted.mode, tuple(each.name for each in wanted.tools))
    return ToolChoice(wanted or "auto")

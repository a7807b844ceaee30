"""The tools of a request, which of them the model may or must call, and the calls of an answer.

Source: OpenAI's API reference, `tools` and `tool_choice`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minigen.errors import ParamsError
from minigen.sampling.structured_outputs import StructuredOutputsParams

MOST_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of an object.

    With `strict`, the arguments are valid by the schema also where the model chooses freely
    whether it calls. Raises `ParamsError` for a wrong name or schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ParamsError(
                f"A tool's name has 1 to 128 letters, digits, '_', '.' and '-', unlike "
                f"{self.name[:140]!r}."
            )
        if self.parameters.get("type", "object") != "object":
            raise ParamsError(
                f"The parameters of tool {self.name!r} must be the schema of an object, not of "
                f"type {str(self.parameters['type'])[:40]!r}."
            )
        object.__setattr__(self, "parameters", {"type": "object", **self.parameters})
        try:
            StructuredOutputsParams(json=self.parameters, strict=self.strict)
        except ParamsError as error:
            ours = f"The schema of tool {self.name!r}"
            raise ParamsError(str(error).replace("structured_outputs.json", ours)) from None

    @property
    def described(self) -> dict[str, Any]:
        """The tool in the form that chat templates take, which is OpenAI's."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model made; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model calls: never (`none`), as it likes (`auto`), or in any case (`required`).

    `names` are the tools that it may call; None means all.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how it may use them.

    With `parallel`, an answer may have several calls. With `enforced`, all arguments are valid by
    their schemas, as those of a strict tool are. Raises `ParamsError` for tools of the same name,
    for too many, and for a choice that names a tool that is not there.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    enforced: bool = False

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MOST_TOOLS:
            raise ParamsError(f"A request has at most {MOST_TOOLS} tools, not {len(names)}.")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ParamsError(f"Two tools have the name {twice!r}; each needs its own.")
        unknown = [name for name in self.choice.names or () if name not in names]
        if unknown:
            raise ParamsError(
                f"tool_choice names {unknown[0][:140]!r}, which is none of the tools: "
                f"{', '.join(names) or 'there are none'}."
            )
        if self.choice.mode == "required" and not self.callable:
            raise ParamsError("tool_choice is required, but there are no tools to call.")

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that this answer may call."""
        if self.choice.mode == "none":
            return ()
        allowed = self.choice.names
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)

    @property
    def must_be_enforced(self) -> bool:
        """Whether only a grammar can keep what the request asks of its calls."""
        if not self.callable:
            return False
        required = self.choice.mode == "required" or self.enforced
        return required or not self.parallel or any(tool.strict for tool in self.callable)


NO_TOOLS = ToolUse()

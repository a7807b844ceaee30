"""The grammar of an answer that must call tools, or whose calls must be valid by their schemas.

It is in llguidance's dialect of Lark: a rule per tool, with the tool's schema inside. Sources:
llguidance's docs/syntax.md (lazy lexemes, special tokens, `%json`).
"""

import json
from collections.abc import Callable
from typing import Any

from minigen.errors import ParamsError
from minigen.sampling.closed_schemas import closed
from minigen.sampling.grammar_compiler import ESCAPES
from minigen.sampling.json_schemas import enforceable
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tool_calling.formats import ToolFormat
from minigen.tool_calling.parser import Reasoning
from minigen.tool_calling.tools import Tool, ToolUse

MOST_CALLS = 8  # of one answer that is forced to call: a small model would go on for ever
# JSON as Python writes it, which is what models have read most.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REASONING = {
    "none": "",
    "possible": r"(thought /\n{0,2}/)? ",
    "open": r"thought /\n{0,2}/ ",
}
_THOUGHTS = {
    "none": "",
    "possible": r"thought[lazy]: /\n?<think>(.|\n)*<\/think>/",
    "open": r"thought[lazy]: /(.|\n)*<\/think>/",
}


def form_of_answer(
    use: ToolUse,
    style: ToolFormat,
    own: StructuredOutputsParams | None,
    reasoning: Reasoning,
    special: Callable[[str], int | None],
) -> StructuredOutputsParams | None:
    """Return the form of an answer with tools, or None if it is free.

    `own` is the form that the request asks of its text, which then is JSON: an answer has this
    form, or calls. `special` returns the id of a special token by its text. Raises `ParamsError`
    for another form beside tools, or one that reasoning comes before.
    """
    if not use.must_be_enforced and (own is None or (not use.callable and reasoning == "none")):
        return own
    if own is not None and own.kind not in ("json", "json_object"):
        if not use.callable:
            return own  # the model cannot reason first
        raise ParamsError(
            f"structured_outputs.{own.kind} cannot stand beside tools; use json, or set "
            "tool_choice to none."
        )
    rules = _Rules(use, style, special)
    body = rules.body(own)
    lines = [
        f"start: {_REASONING[reasoning]}body",
        _THOUGHTS[reasoning],
        f"body: {body}",
        *rules.lines,
    ]
    return StructuredOutputsParams(grammar="\n".join(line for line in lines if line))


class _Rules:
    """The rules of a request's calls; `lines` grows as they are asked for."""

    def __init__(self, use: ToolUse, style: ToolFormat, special: Callable[[str], int | None]):
        self.use, self.style, self._special = use, style, special
        self.lines: list[str] = []

    def body(self, own: StructuredOutputsParams | None) -> str:
        """Return the body of an answer: calls, or calls and text, or calls or JSON."""
        if own is not None:
            self.lines.append(f"form: %json {_with_blanks(own)}")
        if not self.use.callable:
            return "form"
        if self.use.choice.mode == "required":
            return self._calls()
        if own is not None:
            return f"form | {self._calls()}"
        if not self.style.begin:
            self.lines.append(r"free: /([^{ \t\r\n](.|\n)*)?/")
            return f"free | {self._calls()}"
        return self._calls_in_text()

    def _calls(self) -> str:
        """Return one or more calls, without text."""
        style, most = self.style, MOST_CALLS if self.use.parallel else 1
        begin, end = self._mark(style.begin), self._mark(style.end)
        call = "call" if style.one_list else f"{begin} call {end}".strip()
        self._add_tools()
        more = f" ({_quoted(style.between)} {call}){{0,{most - 1}}}" if most > 1 else ""
        return f'{begin} "[" {call}{more} "]"' if style.one_list else f"{call}{more}"

    def _calls_in_text(self) -> str:
        """Return text in which each mark begins a call."""
        style = self.style
        self._add_tools()
        special = self._special(style.begin)
        if special is None:
            self.lines.append(f"head[lazy]: TEXT {json.dumps(style.begin)}")
        else:
            self.lines.append(f"head: TEXT <[{special}]>")
        self.lines.append(r"TEXT: /(.|\n)*/")
        inner = '"[" call "]"' if style.one_list else f"call {self._mark(style.end)}".strip()
        return f"(head {inner})* TEXT" if self.use.parallel else f"TEXT | head {inner}"

    def _add_tools(self) -> None:
        tools = self.use.callable
        self.lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            self.lines += self._of_tool(i, tool)

    def _of_tool(self, i: int, tool: Tool) -> list[str]:
        style = self.style
        before = self._texts(style.before_name, tool.name, style.before_arguments)
        options: dict[str, Any] = {**_SEPARATORS, "json_allowed_escapes": ESCAPES}
        schema = closed(tool.parameters)
        try:
            schema = enforceable(schema)
        except (ValueError, RecursionError) as error:
            if tool.strict:
                why = f"The schema of tool {tool.name!r} cannot be used: {error}."
                raise ParamsError(why) from None
        if not tool.strict:  # what cannot be enforced is left out, since clients send any schema
            options |= {"lenient": True, "coerce_one_of": True}
        return [
            f"call_{i}: {before} arguments_{i} {_quoted(style.after_arguments)}".rstrip(),
            f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': options})}",
        ]

    def _texts(self, before: str, name: str, after: str) -> str:
        mark = self._special(after)
        if mark is None:
            return _quoted(before + name + after)
        return f"{_quoted(before + name)} <[{mark}]>"

    def _mark(self, text: str) -> str:
        """Return a mark as its special token if there is one, since no text spells that."""
        token_id = self._special(text) if text else None
        return _quoted(text) if token_id is None else f"<[{token_id}]>"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _with_blanks(own: StructuredOutputsParams) -> str:
    try:
        schema = enforceable(json.loads(own.source))
    except (ValueError, RecursionError) as error:
        raise ParamsError(f"structured_outputs.{own.kind} cannot be used: {error}.") from None
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if own.blanks is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = own.blanks
    return json.dumps({**schema, "x-guidance": options})

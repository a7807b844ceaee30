"""Messages with tools and calls, in the form that a model's chat template takes.

A template that knows tools gets them as transformers passes them. For another template, minigen
describes the tools in the system message and writes calls and results as text; how well a model
that has never seen tools follows this, only a try can tell.
"""

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.errors import PromptError
from minigen.tokenizer.chat_template import text_of_parts
from minigen.tool_calling.tools import Tool

_INTRODUCTION = """You can call these functions; each line describes one as JSON:
{tools}
To call a function, answer with its name and its arguments in this form:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
The next message then has the result."""
_DUTY = "\nAnswer with a call, not with text."


def for_template(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template that knows tools: arguments are objects, not text.

    Raises `PromptError` for a call whose arguments are not a JSON object.
    """
    names: dict[str, str] = {}
    found = []
    for message in messages:
        own = {**message, "content": message.get("content") or ""}
        if not own.get("tool_calls"):
            own.pop("tool_calls", None)  # some templates only ask whether the key is there
        else:
            own["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if message.get("role") == "tool" and message.get("tool_call_id") in names:
            own.setdefault("name", names[message["tool_call_id"]])
        found.append(own)
    return found


def for_plain_template(
    messages: Iterable[Mapping[str, Any]], tools: SequenceOf[Tool], must_call: bool
) -> list[dict[str, Any]]:
    """Return messages for a template without tools: all roles are system, user or assistant.

    Results that follow one another, and the user's text after them, become one message of the user,
    since some templates demand that roles take turns. Raises `PromptError` for a call whose
    arguments are not a JSON object.
    """
    found: list[dict[str, Any]] = []
    results: list[str] = []  # that no message has yet
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            content = text_of_parts(content, f"Message {index}")
            message = {**message, "content": content}
        if role == "tool":
            text = content or ""
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            more = [content] if role == "user" and isinstance(content, str) else []
            found.append({"role": "user", "content": "\n".join([*results, *more])})
            results = []
            if more:
                continue
        if message.get("tool_calls"):
            calls = [_written(call) for call in message["tool_calls"]]
            text = content or ""
            found.append(
                {"role": "assistant", "content": "\n".join([text, *calls] if text else calls)}
            )
        else:
            found.append({**message, "content": content or ""})
    if results:
        found.append({"role": "user", "content": "\n".join(results)})
    return _with_introduction(found, tools, must_call) if tools else found


def _with_introduction(
    messages: list[dict[str, Any]], tools: SequenceOf[Tool], must_call: bool
) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool.described["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines) + (_DUTY if must_call else "")
    if messages and messages[0].get("role") == "system":
        first, own = messages[0], messages[0]["content"]
        return [{**first, "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    text = json.dumps(
        {"name": function["name"], "arguments": _arguments(function)}, ensure_ascii=False
    )
    return f"<tool_call>\n{text}\n</tool_call>"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    written = function.get("arguments") or "{}"
    try:
        found = written if isinstance(written, dict) else json.loads(written)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PromptError(
            f"The arguments of a call of {function['name']!r} must be the text of a JSON object, "
            f"unlike {str(written)[:100]!r}."
        )
    return found

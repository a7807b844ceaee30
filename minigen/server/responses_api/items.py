"""The items of a request's input, and the conversation that they are."""

from collections.abc import Sequence as SequenceOf
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from minigen.server.by_type import ByType
from minigen.server.errors import ApiError
from minigen.server.forms import MOST_MESSAGES, MOST_PARTS
from minigen.server.openai.schema import Ignored, OnlyDefault, Strict

_IGNORED = "Accepted and ignored."
_TEXT = {"type": "string"}


def _or_text(schema: dict[str, Any]) -> None:
    """Say in the schema of a list that text may stand for it."""
    own = {name: schema.pop(name) for name in ("type", "items", "minItems") if name in schema}
    schema["anyOf"] = [_TEXT, own]


def _as_parts(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("should be text or a list of parts")
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _as_items(value: Any) -> Any:
    if not isinstance(value, str | list) or not value:
        raise ValueError("should be text or a list of items, and not empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextPart(Strict):
    """A part of a message: text that the model reads, or that it wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, description=_IGNORED)
    logprobs: list[Any] | None = Field(None, description=_IGNORED)


class ReasoningPart(Strict):
    """A part of a model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


_ONLY_TEXT = "minigen's models read text only: send a part of type input_text"
Parts = Annotated[
    list[Annotated[Any, ByType(TextPart, others=_ONLY_TEXT)]],
    Field(max_length=MOST_PARTS),
    BeforeValidator(_as_parts),
    Field(json_schema_extra=_or_text),
]
Thoughts = list[Annotated[Any, ByType(ReasoningPart)]]


class _Item(Strict):
    id: Annotated[Any, Ignored("string")] = None
    status: Annotated[Any, Ignored("string")] = None


class MessageItem(_Item):
    """A message of the conversation; the only kind of item that may leave its type out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Annotated[Any, Ignored("string")] = None

    @property
    def text(self) -> str:
        """The message as text."""
        return _joined(self.content)


class CallItem(_Item):
    """A call that the model made; `arguments` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(_Item):
    """The model's reasoning before its answer; the chat template decides what becomes of it."""

    type: Literal["reasoning"]
    summary: Thoughts | None = None
    content: Thoughts | None = None
    encrypted_content: Annotated[Any, OnlyDefault()] = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary if it has only that."""
        return _joined(self.content or self.summary or [])


_STORED = {"item_reference": "minigen stores no items: send the item itself"}
_OTHER_ITEMS = "minigen knows the items message, function_call, function_call_output and reasoning"
Item = Annotated[
    Any,
    ByType(
        *(MessageItem, CallItem, CallOutputItem, ReasoningItem),
        usual="message",
        refused=_STORED,
        others=_OTHER_ITEMS,
    ),
]
Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MOST_MESSAGES),
    BeforeValidator(_as_items),
    Field(json_schema_extra=_or_text),
]


def messages_of(instructions: str | None, items: SequenceOf[Any]) -> list[dict[str, Any]]:
    """Return the conversation in OpenAI's chat form.

    Instructions and a system message after them become one message, because some templates allow
    only one. Raises `ApiError` for the output of a call that is not there.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    call_ids: set[str] = set()
    reasoning = ""
    for place, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            reasoning += item.text
            continue
        if isinstance(item, CallOutputItem):
            _check_is_called(place, item, call_ids)
            message = {
                "role": "tool",
                "tool_call_id": item.call_id,
                "content": _joined(item.output),
            }
            messages.append(message)
        elif isinstance(item, CallItem):
            call_ids.add(item.call_id)
            _add_call(messages, item, reasoning)
        elif place == 0 and messages and item.role in ("system", "developer"):
            messages[0]["content"] += f"\n\n{item.text}"
        else:
            messages.append(_message(item, reasoning))
        reasoning = ""
    return messages


def _message(item: MessageItem, reasoning: str) -> dict[str, Any]:
    role = "system" if item.role == "developer" else item.role  # what chat templates support
    thought = {"reasoning_content": reasoning} if reasoning and role == "assistant" else {}
    return {"role": role, "content": item.text, **thought}


def _add_call(messages: list[dict[str, Any]], item: CallItem, reasoning: str) -> None:
    """Add a call to the assistant's message before it, since both are one turn of the model."""
    if reasoning or not messages or messages[-1]["role"] != "assistant":
        thought = {"reasoning_content": reasoning} if reasoning else {}
        messages.append({"role": "assistant", "content": "", **thought})
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _check_is_called(place: int, item: CallOutputItem, call_ids: set[str]) -> None:
    if item.call_id not in call_ids:
        raise ApiError(
            f"input[{place}] is the output of the call {item.call_id[:80]!r}, but no function_call "
            "before it has this call_id; minigen stores no items, so send that one again, too.",
            param=f"input[{place}].call_id",
        )


def _joined(parts: SequenceOf[Any]) -> str:
    return "".join(part.text for part in parts)

"""A conversation in Anthropic's blocks, as the messages in OpenAI's form that templates take.

Source: Anthropic's guide to tool use, for the order of results and texts.
"""

import json
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import groupby
from typing import Any

from minigen.server.anthropic.schema import (
    AnthropicMessage,
    AnthropicRequest,
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from minigen.server.errors import ApiError

ID = "toolu_"  # how the ids of calls begin
BETWEEN_MESSAGES = "\n\n"  # of the same role, which become one turn


def openai_messages(request: AnthropicRequest) -> list[dict[str, Any]]:
    """Return the messages of a request. Raises `ApiError` for calls and results that do not match.

    Messages of the same role that follow one another become one turn.
    """
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text_of(request.system)})
    open_calls: list[str] = []
    for role, blocks in _turns(request.messages):
        results = [each for each in blocks if isinstance(each, ToolResultBlock)]
        _check_results(open_calls, results, blocks)
        if role == "assistant":
            messages.append(_assistants(blocks))
        else:
            messages += [_result(each) for each in results]
            if len(results) < len(blocks) or not blocks:
                messages.append({"role": "user", "content": _text_of(blocks)})
        open_calls = [each.id for each in blocks if isinstance(each, ToolUseBlock)]
    if open_calls:
        raise _unanswered(open_calls[0])
    return messages


def id_of_call(call_id: str) -> str:
    """Return the id of a call in Anthropic's form; `openai_messages` takes its beginning off again.

    Some templates refuse ids of another length than their own.

    >>> id_of_call("call_a1b2"), id_of_call("123456789")
    ('toolu_a1b2', 'toolu_123456789')
    """
    return ID + call_id.removeprefix("call_")


def _turns(messages: SequenceOf[AnthropicMessage]) -> Iterable[tuple[str, list[Block]]]:
    for role, same in groupby(messages, lambda each: each.role):
        blocks: list[Block] = []
        for message in same:
            if blocks and blocks[-1].type == "text":
                blocks.append(TextBlock(type="text", text=BETWEEN_MESSAGES))
            blocks += message.content
        yield role, blocks


def _check_results(
    calls: SequenceOf[str], results: SequenceOf[ToolResultBlock], blocks: SequenceOf[Block]
) -> None:
    """Raise `ApiError` unless each call of the turn before has one result, before all text."""
    answered, made = Counter(each.tool_use_id for each in results), set(calls)
    for tool_use_id, count in answered.items():
        if tool_use_id not in made:
            raise ApiError(
                f"messages: the tool_result of {tool_use_id[:100]!r} answers no tool_use of the "
                "message before.",
                param="messages",
            )
        if count > 1:
            raise ApiError(
                f"messages: {tool_use_id[:100]!r} has two tool_results; each tool_use has one.",
                param="messages",
            )
    unanswered = next((each for each in calls if each not in answered), None)
    if unanswered is not None:
        raise _unanswered(unanswered)
    if any(not isinstance(each, ToolResultBlock) for each in blocks[: len(results)]):
        raise ApiError(
            "messages: the tool_results of a message come before its text.", param="messages"
        )


def _unanswered(tool_use_id: str) -> ApiError:
    return ApiError(
        f"messages: the tool_use {tool_use_id[:100]!r} has no tool_result in the message after it.",
        param="messages",
    )


def _assistants(blocks: SequenceOf[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks)}
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = [_call(each) for each in blocks if isinstance(each, ToolUseBlock)]
    return {**message, "tool_calls": calls} if calls else message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id.removeprefix(ID),
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text_of(block.content or ())
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id.removeprefix(ID),
        "content": f"Error: {text}" if block.is_error else text,
    }


def _text_of(blocks: Iterable[Block]) -> str:
    return "".join(each.text for each in blocks if isinstance(each, TextBlock))

"""Anthropic's Python client: messages, streams, tools, structured outputs, counts, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.two_tools import ARGUMENTS, QUESTION, City, GetTemperature, TwoTools

TWO_TOOLS: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [
    {"name": name, "description": each.__doc__, "input_schema": each.model_json_schema()}
    for name, each in ARGUMENTS.items()
]


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    """A client of minigen; it sends the key as x-api-key."""
    with Anthropic(base_url=server.url, api_key=server.key, timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture
def request_of(server: Server) -> dict[str, Any]:
    """What every request has; the client has no parameter for the temperature."""
    return {"model": server.model, "max_tokens": 60, "extra_body": {"temperature": 0}}


def test_create(client: Anthropic, request_of: dict[str, Any]) -> None:
    """messages.create with a system prompt."""
    answer = client.messages.create(
        system="You answer in one sentence.",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        **request_of,
    )
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.content[0].type == "text"
    assert answer.content[0].text.strip()
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0


def test_stop_sequence(client: Anthropic, request_of: dict[str, Any]) -> None:
    """stop_sequences, and the one that ended the answer."""
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.messages.create(
        messages=question, stop_sequences=["France", "Paris"], **request_of
    )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in ("France", "Paris")


def test_stream(client: Anthropic, request_of: dict[str, Any]) -> None:
    """messages.stream gives the text of messages.create."""
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with client.messages.stream(messages=question, **request_of) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(messages=question, **request_of)
    assert text.strip()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_streamed_tool_use(client: Anthropic, request_of: dict[str, Any]) -> None:
    """A streamed call of a tool, and its input_json events."""
    with client.messages.stream(
        messages=TWO_TOOLS,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "get_temperature"},
        **request_of,
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (call,) = [each for each in final.content if each.type == "tool_use"]
    assert call.name == "get_temperature"
    pieces = "".join(each.partial_json for each in events if each.type == "input_json")
    assert GetTemperature.model_validate_json(pieces) == GetTemperature.model_validate(call.input)


def test_two_tools(client: Anthropic, request_of: dict[str, Any]) -> None:
    """A two-tool loop with messages.create."""
    tools, messages = TwoTools(), list(TWO_TOOLS)
    while tools.choice != "none":
        choice: Any = {"type": "tool", "name": tools.choice}
        if tools.choice == "required":
            choice = {"type": "any"}
        answer = client.messages.create(
            messages=messages,
            tools=TOOLS,
            tool_choice={**choice, "disable_parallel_tool_use": True},
            **request_of,
        )
        assert answer.stop_reason == "tool_use"
        (call,) = [each for each in answer.content if each.type == "tool_use"]
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": tools.call(call.name, call.input),
        }
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    last = client.messages.create(
        messages=messages, tools=TOOLS, tool_choice={"type": "none"}, **request_of
    )
    tools.check(last.content[0].text)


def test_tool_runner(client: Anthropic, request_of: dict[str, Any]) -> None:
    """A two-tool loop of beta.messages.tool_runner."""
    tools = TwoTools()
    runner = client.beta.messages.tool_runner(
        messages=TWO_TOOLS,
        tools=[beta_tool(tools.get_temperature), beta_tool(tools.to_fahrenheit)],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=4,
        **request_of,
    )
    asked: list[str] = []
    for message in runner:
        last = message
        asked += [each.name for each in message.content if each.type == "tool_use"]
        left = [name for name in ARGUMENTS if name not in asked]
        choice: Any = {"type": "none"}
        if left:
            choice = {"type": "tool", "name": left[0], "disable_parallel_tool_use": True}
        runner.set_messages_params(lambda params, forced=choice: {**params, "tool_choice": forced})
    tools.check(last.content[0].text)


def test_parse(client: Anthropic, request_of: dict[str, Any]) -> None:
    """messages.parse with a Pydantic model."""
    answer = client.messages.parse(
        messages=[{"role": "user", "content": "Name a city, in JSON."}],
        output_format=Place,
        **request_of,
    )
    assert isinstance(answer.parsed_output, Place)


def test_count_tokens(client: Anthropic, server: Server, request_of: dict[str, Any]) -> None:
    """messages.count_tokens equals what messages.create reports."""
    counted: list[int] = []
    for more in ({}, {"tools": TOOLS}):
        count = client.messages.count_tokens(model=server.model, messages=TWO_TOOLS, **more)
        usage = client.messages.create(messages=TWO_TOOLS, **more, **request_of).usage
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert count.input_tokens == usage.input_tokens + cached
        counted.append(count.input_tokens)
    assert counted[0] < counted[1]


def test_errors(client: Anthropic, request_of: dict[str, Any]) -> None:
    """Errors arrive as the client's exceptions."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=TWO_TOOLS, **{**request_of, "model": "no-such-model"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(messages=TWO_TOOLS, **{**request_of, "max_tokens": -1})
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=TWO_TOOLS, **request_of)

"""OpenAI's Python client: structured outputs, tools, streams, and the Responses API."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.two_tools import ARGUMENTS, QUESTION, GetTemperature, ToFahrenheit, TwoTools

ASKED: Any = [{"role": "user", "content": "I won! Answer in JSON: mood and reason."}]
TWO_TOOLS: Any = [{"role": "user", "content": QUESTION}]
TOOLS = [pydantic_function_tool(each, name=name) for name, each in ARGUMENTS.items()]
RESPONSE_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


class Mood(BaseModel):
    """A form that a small model can fill."""

    mood: Literal["good", "bad"]
    reason: Literal["won", "lost", "unknown"]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    """A client as its manual makes it, with a timeout and without retries that hide failures."""
    with OpenAI(
        base_url=f"{server.url}/v1", api_key=server.key, timeout=120, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def chat(server: Server) -> dict[str, Any]:
    """What every request to chat completions has."""
    return {"model": server.model, "temperature": 0, "max_completion_tokens": 60}


@pytest.fixture
def respond(server: Server) -> dict[str, Any]:
    """What every request to the Responses API has."""
    return {"model": server.model, "temperature": 0, "max_output_tokens": 60, "store": False}


def test_models(client: OpenAI, server: Server) -> None:
    """models.list and models.retrieve."""
    assert server.model in [each.id for each in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


def test_parse(client: OpenAI, chat: dict[str, Any]) -> None:
    """chat.completions.parse with a Pydantic model."""
    answer = client.chat.completions.parse(messages=ASKED, response_format=Mood, **chat)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Mood)
    assert choice.message.refusal is None


def test_stream_events(client: OpenAI, chat: dict[str, Any]) -> None:
    """chat.completions.stream with a Pydantic model, and its events."""
    with client.chat.completions.stream(
        messages=ASKED, response_format=Mood, stream_options={"include_usage": True}, **chat
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = "".join(each.delta for each in events if each.type == "content.delta")
    (done,) = [each for each in events if each.type == "content.done"]
    assert json.loads(text) == json.loads(done.content)
    assert done.parsed == final.choices[0].message.parsed == Mood.model_validate_json(text)
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


def test_parse_tools(client: OpenAI, chat: dict[str, Any]) -> None:
    """chat.completions.parse with pydantic_function_tool (strict), several calls allowed."""
    request = {**chat, "max_completion_tokens": 400}  # a small model repeats its calls
    answer = client.chat.completions.parse(
        messages=TWO_TOOLS, tools=TOOLS, tool_choice="required", **request
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetTemperature | ToFahrenheit)


def test_streamed_tool_calls(client: OpenAI, chat: dict[str, Any]) -> None:
    """Streamed tool calls, as chunks and as the helper's events."""
    named: Any = {"type": "function", "function": {"name": "to_fahrenheit"}}
    request: Any = {"messages": TWO_TOOLS, "tools": TOOLS, "tool_choice": named, **chat}
    chunks = list(client.chat.completions.create(stream=True, **request))
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert deltas[0].id
    assert deltas[0].function is not None
    assert deltas[0].function.name == "to_fahrenheit"
    arguments = "".join(each.function.arguments or "" for each in deltas if each.function)
    ToFahrenheit.model_validate_json(arguments, strict=True)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
    (done,) = [each for each in events if each.type == "tool_calls.function.arguments.done"]
    assert done.name == "to_fahrenheit"
    assert isinstance(done.parsed_arguments, ToFahrenheit)
    pieces = [
        each.arguments_delta
        for each in events
        if each.type == "tool_calls.function.arguments.delta"
    ]
    assert "".join(pieces) == done.arguments == arguments


def test_two_tools(client: OpenAI, chat: dict[str, Any]) -> None:
    """A two-tool loop over chat completions."""
    tools, messages = TwoTools(), list(TWO_TOOLS)
    while tools.choice != "none":
        choice: Any = tools.choice
        if choice != "required":
            choice = {"type": "function", "function": {"name": choice}}
        message = (
            client.chat.completions.create(
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                **chat,
            )
            .choices[0]
            .message
        )
        assert message.tool_calls
        assert len(message.tool_calls) == 1
        messages.append(message)
        for call in message.tool_calls:
            result = tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(
        messages=messages, tools=TOOLS, tool_choice="none", **chat
    )
    tools.check(last.choices[0].message.content)


def test_async_auto(server: Server, chat: dict[str, Any]) -> None:
    """The asynchronous client, streamed, with tool_choice "auto"."""

    async def pieces() -> list[Any]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=server.key, timeout=120, max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                messages=TWO_TOOLS, tools=TOOLS, stream=True, **chat
            )
            return [chunk async for chunk in stream]

    assert asyncio.run(pieces())[-1].choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_errors(client: OpenAI, server: Server, chat: dict[str, Any]) -> None:
    """Errors arrive as the client's exceptions."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            messages=TWO_TOOLS,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "no_such_tool"}},
            **chat,
        )
    assert "no_such_tool" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=ASKED, **{**chat, "model": "no-such-model"})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_responses_create(client: OpenAI, respond: dict[str, Any]) -> None:
    """responses.create with instructions."""
    answer = client.responses.create(
        instructions="Answer in one word.", input="What is the capital of France?", **respond
    )
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text.strip()
    assert answer.usage is not None
    assert answer.usage.input_tokens > 0


def test_responses_parse(client: OpenAI, respond: dict[str, Any]) -> None:
    """responses.parse with a Pydantic model."""
    answer = client.responses.parse(input=ASKED, text_format=Mood, **respond)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Mood)


def test_responses_stream(client: OpenAI, respond: dict[str, Any]) -> None:
    """responses.stream with a Pydantic model, and its events."""
    with client.responses.stream(input=ASKED, text_format=Mood, **respond) as stream:
        events = list(stream)
        final = stream.get_final_response()
    types = [each.type for each in events]
    assert types[0] == "response.created"
    assert types[-1] == "response.completed"
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert final.output_parsed == Mood.model_validate_json(text)
    numbers = [each.sequence_number for each in events]
    assert numbers == sorted(set(numbers))


def test_responses_streamed_call(client: OpenAI, respond: dict[str, Any]) -> None:
    """A streamed function call of the Responses API."""
    with client.responses.stream(
        input=TWO_TOOLS,
        tools=RESPONSE_TOOLS,
        tool_choice={"type": "function", "name": "get_temperature"},
        **respond,
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [
        each.delta for each in events if each.type == "response.function_call_arguments.delta"
    ]
    (call,) = [each for each in final.output if each.type == "function_call"]
    assert call.name == "get_temperature"
    assert "".join(pieces) == call.arguments
    GetTemperature.model_validate_json(call.arguments, strict=True)


def test_responses_two_tools(client: OpenAI, respond: dict[str, Any]) -> None:
    """A two-tool loop over the Responses API."""
    tools, items = TwoTools(), list(TWO_TOOLS)
    while tools.choice != "none":
        choice: Any = tools.choice
        if choice != "required":
            choice = {"type": "function", "name": choice}
        answer = client.responses.create(
            input=items,
            tools=RESPONSE_TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            **respond,
        )
        (call,) = [each for each in answer.output if each.type == "function_call"]
        result = tools.call(call.name, call.arguments)
        items += answer.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    last = client.responses.create(input=items, tools=RESPONSE_TOOLS, tool_choice="none", **respond)
    tools.check(last.output_text)

"""Ollama's Python client: formats, tools, streams, and the routes about models."""

import asyncio
import json
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.two_tools import ARGUMENTS, QUESTION, City, TwoTools

OPTIONS = {"temperature": 0, "num_predict": 60}
TWO_TOOLS = [{"role": "user", "content": QUESTION}]


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


def arguments_of(server: Server) -> dict[str, Any]:
    """Return what a client is made with; Ollama itself takes no keys."""
    headers = {"Authorization": f"Bearer {server.key}"}
    return {"host": server.url, "headers": headers, "timeout": 120}


@pytest.fixture
def client(server: Server) -> Client:
    """A client of minigen."""
    return Client(**arguments_of(server))


def test_models(client: Client, server: Server) -> None:
    """list, show and ps."""
    name = f"{server.model}:latest"  # as Ollama lists a model without a tag
    assert name in [each.model for each in client.list().models]
    assert client.show(server.model).details is not None
    assert name in [each.model for each in client.ps().models]


def test_format(client: Client, server: Server) -> None:
    """chat with a schema as format, streamed and not."""
    request: Any = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Name a city, in JSON."}],
        "format": Place.model_json_schema(),
        "options": OPTIONS,
    }
    whole = client.chat(**request)
    Place.model_validate_json(whole.message.content or "")
    pieces = list(client.chat(stream=True, **request))
    assert "".join(each.message.content or "" for each in pieces) == whole.message.content
    assert pieces[-1].done


def test_json_format(client: Client, server: Server) -> None:
    """generate with format "json"."""
    answer = client.generate(
        server.model,
        prompt="List two cities in JSON, as short as you can.",
        format="json",
        options={"temperature": 0, "num_predict": 400},
    )
    assert isinstance(json.loads(answer.response), dict | list)


def test_tools(client: Client, server: Server) -> None:
    """chat with Python functions as tools, streamed and not: the arguments of calls are valid."""
    tools = TwoTools()
    functions = [tools.get_temperature, tools.to_fahrenheit]
    request: Any = {"model": server.model, "messages": TWO_TOOLS, "options": OPTIONS}
    whole = client.chat(tools=functions, **request)
    pieces = list(client.chat(tools=functions, stream=True, **request))
    for answer in (whole, *pieces):
        for call in answer.message.tool_calls or []:
            assert call.function.name in ARGUMENTS
    assert whole.done
    assert pieces[-1].done
    assert whole.message.content or whole.message.tool_calls


def test_tool_results(client: Client, server: Server) -> None:
    """chat after the calls of two tools, with their results."""
    tools, messages = TwoTools(), list(TWO_TOOLS)
    for name, arguments in (
        ("get_temperature", {"city": "Oslo"}),
        ("to_fahrenheit", {"celsius": 4}),
    ):
        call = ollama.Message.ToolCall(
            function=ollama.Message.ToolCall.Function(name=name, arguments=arguments)
        )
        messages.append(ollama.Message(role="assistant", tool_calls=[call]))
        result = tools.call(name, call.function.arguments)
        messages.append(ollama.Message(role="tool", tool_name=name, content=result))
    answer = client.chat(server.model, messages=messages, options=OPTIONS)
    tools.check(answer.message.content)


def test_async(server: Server) -> None:
    """The asynchronous client, streamed."""

    async def pieces() -> list[Any]:
        stream = await AsyncClient(**arguments_of(server)).chat(
            server.model, messages=TWO_TOOLS, stream=True, options=OPTIONS
        )
        return [each async for each in stream]

    assert asyncio.run(pieces())[-1].done


def test_errors(client: Client, server: Server) -> None:
    """Errors arrive as ollama.ResponseError."""
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat("no-such-model", messages=TWO_TOOLS)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(
            server.model, messages=TWO_TOOLS, format={"type": "no-such-type"}, options=OPTIONS
        )
    assert refused.value.status_code == 400

"""The OpenAI Agents SDK: its runner calls the tools, over both of OpenAI's APIs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunHooks,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.two_tools import QUESTION, City, TwoTools

SETTINGS = ModelSettings(temperature=0, max_tokens=60, parallel_tool_calls=False, store=False)


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


@pytest.fixture(autouse=True)
def _untraced() -> None:
    """Traces would be sent to OpenAI."""
    set_tracing_disabled(True)


@asynccontextmanager
async def served_model(kind: type[Any], server: Server) -> AsyncIterator[Model]:
    """Yield a model of the SDK that asks minigen."""
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=server.key, timeout=120, max_retries=0
    ) as client:
        yield kind(model=server.model, openai_client=client)


def settings_of(tools: TwoTools) -> ModelSettings:
    """Return the settings with the next turn's choice of tools."""
    return SETTINGS.resolve(ModelSettings(tool_choice=tools.choice))


class NextChoice(RunHooks[Any]):
    """Sets the choice of the next turn after each call."""

    def __init__(self, tools: TwoTools):
        self.tools = tools

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Replace the agent's settings."""
        agent.model_settings = settings_of(self.tools)


def agent_with(model: Model, tools: TwoTools) -> Agent:
    """Return an agent that must call the tools in turn."""
    return Agent(
        name="Weather",
        instructions="You answer questions about the weather.",
        model=model,
        model_settings=settings_of(tools),
        tools=[function_tool(tools.get_temperature), function_tool(tools.to_fahrenheit)],
        reset_tool_choice=False,
    )


async def two_tools(kind: type[Any], server: Server, *, stream: bool) -> None:
    """Run the loop to its end, and check it."""
    tools = TwoTools()
    async with served_model(kind, server) as model:
        run: Any = {"input": QUESTION, "hooks": NextChoice(tools), "max_turns": 5}
        if stream:
            result: Any = Runner.run_streamed(agent_with(model, tools), **run)
            types = {each.type async for each in result.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= types
        else:
            result = await Runner.run(agent_with(model, tools), **run)
    outputs = [each for each in result.new_items if each.type == "tool_call_output_item"]
    assert len(outputs) == 2
    tools.check(result.final_output)


async def typed_output(kind: type[Any], server: Server) -> None:
    """Ask for an answer in a form."""
    async with served_model(kind, server) as model:
        agent = Agent(name="Places", model=model, model_settings=SETTINGS, output_type=Place)
        result = await Runner.run(agent, "Name a city, in JSON.")
    assert isinstance(result.final_output, Place)


def test_chat_two_tools(server: Server) -> None:
    """A two-tool loop, OpenAIChatCompletionsModel."""
    asyncio.run(two_tools(OpenAIChatCompletionsModel, server, stream=False))


def test_chat_streamed(server: Server) -> None:
    """A streamed two-tool loop, OpenAIChatCompletionsModel."""
    asyncio.run(two_tools(OpenAIChatCompletionsModel, server, stream=True))


def test_chat_typed(server: Server) -> None:
    """An output_type, OpenAIChatCompletionsModel."""
    asyncio.run(typed_output(OpenAIChatCompletionsModel, server))


def test_responses_two_tools(server: Server) -> None:
    """A two-tool loop, OpenAIResponsesModel."""
    asyncio.run(two_tools(OpenAIResponsesModel, server, stream=False))


def test_responses_streamed(server: Server) -> None:
    """A streamed two-tool loop, OpenAIResponsesModel."""
    asyncio.run(two_tools(OpenAIResponsesModel, server, stream=True))


def test_responses_typed(server: Server) -> None:
    """An output_type, OpenAIResponsesModel."""
    asyncio.run(typed_output(OpenAIResponsesModel, server))

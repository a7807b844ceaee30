"""Pydantic AI: agents with tools and with structured outputs, over both of OpenAI's APIs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.conftest import Server
from tests.clients.two_tools import QUESTION, City, TwoTools

SETTINGS = ModelSettings(temperature=0, max_tokens=60, parallel_tool_calls=False)


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


@asynccontextmanager
async def served_model(kind: type[Any], server: Server) -> AsyncIterator[Model]:
    """Yield a model of Pydantic AI that asks minigen."""
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=server.key, timeout=120, max_retries=0
    ) as client:
        yield kind(server.model, provider=OpenAIProvider(openai_client=client))


def agent_with(model: Model, tools: TwoTools) -> Agent:
    """Return an agent that must call the tools in turn."""

    def settings(_: RunContext) -> ModelSettings:
        choice = tools.choice
        return {**SETTINGS, "tool_choice": choice if choice in ("required", "none") else [choice]}

    return Agent(
        model,
        instructions="You answer questions about the weather.",
        tools=[tools.get_temperature, tools.to_fahrenheit],
        model_settings=settings,
    )


async def two_tools(kind: type[Any], server: Server) -> None:
    """Run the loop to its end, and check it."""
    tools = TwoTools()
    async with served_model(kind, server) as model:
        result = await agent_with(model, tools).run(QUESTION)
    tools.check(result.output)


async def streamed(kind: type[Any], server: Server) -> None:
    """Run the loop as a stream of events, and check it."""
    tools, names = TwoTools(), []
    async with (
        served_model(kind, server) as model,
        agent_with(model, tools).run_stream_events(QUESTION) as events,
    ):
        async for event in events:
            names.append(type(event).__name__)
            last: Any = event
    assert {"PartDeltaEvent", "FunctionToolCallEvent", "FunctionToolResultEvent"} <= set(names)
    tools.check(last.result.output)


async def typed_output(kind: type[Any], server: Server, output: Any) -> None:
    """Ask for an answer in a form."""
    async with served_model(kind, server) as model:
        agent = Agent(model, output_type=output, model_settings=SETTINGS)
        result = await agent.run("Name a city, in JSON.")
    assert isinstance(result.output, Place)


def test_chat_two_tools(server: Server) -> None:
    """A two-tool loop, OpenAIChatModel."""
    asyncio.run(two_tools(OpenAIChatModel, server))


def test_chat_streamed(server: Server) -> None:
    """A streamed two-tool loop, OpenAIChatModel."""
    asyncio.run(streamed(OpenAIChatModel, server))


def test_chat_tool_output(server: Server) -> None:
    """ToolOutput: the answer as a forced call, OpenAIChatModel."""
    asyncio.run(typed_output(OpenAIChatModel, server, ToolOutput(Place)))


def test_chat_native_output(server: Server) -> None:
    """NativeOutput: the answer by response_format, OpenAIChatModel."""
    asyncio.run(typed_output(OpenAIChatModel, server, NativeOutput(Place)))


def test_responses_two_tools(server: Server) -> None:
    """A two-tool loop, OpenAIResponsesModel."""
    asyncio.run(two_tools(OpenAIResponsesModel, server))


def test_responses_streamed(server: Server) -> None:
    """A streamed two-tool loop, OpenAIResponsesModel."""
    asyncio.run(streamed(OpenAIResponsesModel, server))


def test_responses_native_output(server: Server) -> None:
    """NativeOutput, OpenAIResponsesModel."""
    asyncio.run(typed_output(OpenAIResponsesModel, server, NativeOutput(Place)))

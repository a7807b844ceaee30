"""LangChain: bound tools, structured outputs, and an agent of LangGraph."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.clients.conftest import Server
from tests.clients.two_tools import QUESTION, City, TwoTools


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces would be sent to LangSmith."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def chat_model(server: Server, **more: Any) -> ChatOpenAI:
    """Return LangChain's model for OpenAI's API, with minigen's address."""
    return ChatOpenAI(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr(server.key),
        temperature=0,
        max_tokens=60,
        timeout=120,
        max_retries=0,
        **more,
    )


def bound(tools: TwoTools) -> list[StructuredTool]:
    """Return the tools in LangChain's form."""
    functions: list[Callable[..., int]] = [tools.get_temperature, tools.to_fahrenheit]
    return [StructuredTool.from_function(each) for each in functions]


def loop(model: ChatOpenAI) -> None:
    """Run a two-tool loop by hand, and check it."""
    tools = TwoTools()
    by_name = {each.name: each for each in bound(tools)}
    messages: list[Any] = [HumanMessage(QUESTION)]
    while tools.choice != "none":
        caller = model.bind_tools(
            list(by_name.values()), tool_choice=tools.choice, parallel_tool_calls=False
        )
        answer = caller.invoke(messages)
        assert answer.response_metadata.get("finish_reason", "tool_calls") == "tool_calls"
        assert len(answer.tool_calls) == 1
        messages.append(answer)
        for call in answer.tool_calls:
            result = by_name[call["name"]].invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)
    last = model.bind_tools(list(by_name.values()), tool_choice="none").invoke(messages)
    tools.check(last.text)


def agent(model: ChatOpenAI) -> None:
    """Run an agent that must call the tools in turn, and check it."""
    tools = TwoTools()

    @wrap_model_call
    def force(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        choice = tools.choice
        request.model_settings["parallel_tool_calls"] = False
        return handler(request.override(tool_choice=choice))

    built = create_agent(model, bound(tools), middleware=[force])
    question: Any = {"messages": [HumanMessage(QUESTION)]}
    final = built.invoke(question, {"recursion_limit": 12})
    results = [each for each in final["messages"] if isinstance(each, ToolMessage)]
    assert [each.status for each in results] == ["success", "success"]
    tools.check(final["messages"][-1].text)


def test_invoke_and_stream(server: Server) -> None:
    """invoke and stream give the same text."""
    model = chat_model(server)
    whole = model.invoke("What is the capital of France?").text
    pieces = [each.text for each in model.stream("What is the capital of France?")]
    assert whole == "".join(pieces)
    assert whole.strip()


def test_structured_output(server: Server) -> None:
    """with_structured_output, by JSON schema and by a forced call."""
    for method in ("json_schema", "function_calling"):
        structured = chat_model(server).with_structured_output(Place, method=method)  # type: ignore[arg-type]
        assert isinstance(structured.invoke("Name a city, in JSON."), Place), method


def test_two_tools(server: Server) -> None:
    """A two-tool loop with bind_tools."""
    loop(chat_model(server))


def test_two_tools_streamed(server: Server) -> None:
    """A two-tool loop with bind_tools, streamed."""
    loop(chat_model(server, streaming=True))


def test_agent(server: Server) -> None:
    """A two-tool loop of create_agent (LangGraph)."""
    agent(chat_model(server))


def test_responses(server: Server) -> None:
    """A two-tool loop with bind_tools over the Responses API."""
    loop(chat_model(server, use_responses_api=True, store=False))

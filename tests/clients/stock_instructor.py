"""Instructor: Pydantic models from answers, in its modes for OpenAI's API."""

from collections.abc import Iterator
from typing import Any

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.two_tools import ARGUMENTS, QUESTION, City, TwoTools


class Place(BaseModel):
    """A form that a small model can fill."""

    city: City


MESSAGES: Any = [{"role": "user", "content": "Name a city, in JSON."}]


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    """The client that Instructor wraps."""
    with OpenAI(
        base_url=f"{server.url}/v1", api_key=server.key, timeout=120, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def request_of(server: Server) -> dict[str, Any]:
    """What every request has; a wrong form is a failure, and is not asked for again."""
    return {"model": server.model, "temperature": 0, "max_tokens": 60, "max_retries": 0}


def filled(client: OpenAI, mode: instructor.Mode, request: dict[str, Any]) -> Place:
    """Return the model's answer as a Pydantic model."""
    wrapped = instructor.from_openai(client, mode=mode)
    found = wrapped.chat.completions.create(response_model=Place, messages=MESSAGES, **request)
    assert isinstance(found, Place)
    return found


def test_json(openai_client: OpenAI, request_of: dict[str, Any]) -> None:
    """Mode.JSON_SCHEMA (response_format)."""
    filled(openai_client, instructor.Mode.JSON_SCHEMA, request_of)


def test_tools(openai_client: OpenAI, request_of: dict[str, Any]) -> None:
    """Mode.TOOLS (a forced call)."""
    filled(openai_client, instructor.Mode.TOOLS, request_of)


def test_partial(openai_client: OpenAI, request_of: dict[str, Any]) -> None:
    """create_partial: a model that grows while it is streamed."""
    wrapped = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    states = list(
        wrapped.chat.completions.create_partial(
            response_model=Place, messages=MESSAGES, **request_of
        )
    )
    assert Place.model_validate(states[-1].model_dump())


def test_two_tools(openai_client: OpenAI, request_of: dict[str, Any]) -> None:
    """A two-tool loop: each tool's arguments are a response_model."""
    wrapped = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    tools, messages = TwoTools(), [{"role": "user", "content": QUESTION}]
    for name, model in ARGUMENTS.items():
        arguments, completion = wrapped.chat.completions.create_with_completion(
            response_model=model, messages=messages, **request_of
        )
        message = completion.choices[0].message
        messages.append(message.model_dump())
        result = tools.call(name, arguments.model_dump())
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = wrapped.chat.completions.create(response_model=None, messages=messages, **request_of)
    tools.check(last.choices[0].message.content)

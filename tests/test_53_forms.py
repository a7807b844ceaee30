"""Requests for structured outputs, by OpenAI's own client, by vLLM's names and by Ollama's.

The served model has random weights, so nothing but the grammar gives its answers a form.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from minigen.server.app import create_service
from minigen.server.models import ModelHost
from tests.serving import load_tiny, save_tiny, serving

MESSAGES: Any = [{"role": "user", "content": "Say é"}]
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "at": {"type": "string", "maxLength": 4}},
    "required": ["mood", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = save_tiny(tmp_path_factory.mktemp("tiny"))
    host = ModelHost({"tiny": partial(load_tiny, directory)})
    with serving(host, create_service(host)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **asked: Any) -> Any:
    whole: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 80, "seed": 1} | asked
    return client.chat.completions.create(**whole)


def test_a_schema_in_openais_form(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}
    answer = ask(client, response_format=form, n=3)
    ended = [each for each in answer.choices if each.finish_reason == "stop"]
    assert ended
    for each in ended:
        jsonschema.validate(json.loads(each.message.content), SCHEMA)


def test_a_streamed_answer_has_the_form_of_a_whole_one(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": SCHEMA, "strict": True}}
    whole = ask(client, response_format=form).choices[0].message.content
    pieces = [
        each.choices[0].delta.content or ""
        for each in ask(client, response_format=form, stream=True)
    ]
    assert "".join(pieces) == whole
    assert len([each for each in pieces if each]) > 5


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]
    at: bool


def test_openais_parse_helper_returns_the_callers_own_type(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Mood, max_tokens=60, seed=2
    )
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Mood)
    assert found.mood in ("good", "bad")


def test_parse_raises_its_own_error_for_half_an_answer(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Mood, max_tokens=3
        )


def test_the_streaming_helper_parses_at_the_end(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Mood, max_tokens=60, seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert isinstance(final.choices[0].message.parsed, Mood)


def test_a_json_object_begins_as_one(client: OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_vllms_names(client: OpenAI, form: dict[str, Any], pattern: str) -> None:
    answer = ask(client, extra_body={"structured_outputs": form}).choices[0]
    if answer.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.message.content)
    completion = client.completions.create(
        model="tiny", prompt="x", max_tokens=80, extra_body={"structured_outputs": form}
    )
    if completion.choices[0].finish_reason == "stop":
        assert re.fullmatch(pattern, completion.choices[0].text)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA}, "guided_json", 'send structured_outputs: {"json": ...}'),
    ({"guided_regex": "a"}, "guided_regex", 'send structured_outputs: {"regex": ...}'),
    ({"structured_outputs": {}}, "structured_outputs", "none was given"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "has no 'regexp'"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be used"),
    ({"response_format": {"type": "json_schema"}}, "response_format", 'needs "json_schema"'),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        "response_format",
        "belongs to the type json_schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"typ": "string"}, "strict": True},
            }
        },
        "response_format",
        "response_format.json_schema.schema has the keyword 'typ'",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"not": {}}},
            }
        },
        "response_format",
        "response_format.json_schema.schema cannot be used",
    ),
    (
        {
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        "structured_outputs",
        "give only one",
    ),
]


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_refusal_names_the_field(url: str, asked: Any, param: str, words: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **asked}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert error["param"] == param
    assert error["message"].count("\n") == 0


def test_a_form_and_min_tokens_exclude_each_other(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens cannot be combined"):
        ask(client, extra_body={"structured_outputs": {"regex": "a"}, "min_tokens": 4})


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize("form", ["json", SCHEMA], ids=["json", "schema"])
def test_ollamas_format(url: str, path: str, form: Any) -> None:
    asked = {"prompt": "x"} if path == "generate" else {"messages": MESSAGES}
    options = {"num_predict": 80, "seed": 4, "temperature": 1.0}
    body = {"model": "tiny", "stream": False, "format": form, "options": options, **asked}
    answer = httpx.post(f"{url}/api/{path}", json=body, timeout=30).json()
    text = answer["response"] if path == "generate" else answer["message"]["content"]
    assert text.startswith("{")
    if answer["done_reason"] == "stop" and form is SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_ollamas_format_is_refused_by_name(url: str) -> None:
    for form, words in (("yaml", 'format must be "json"'), ({"not": {}}, "format cannot be used")):
        body = {"model": "tiny", "prompt": "x", "stream": False, "format": form}
        answer = httpx.post(f"{url}/api/generate", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json": _nested(60)},
    "too deep": {"json": _nested(65)},
    "wide": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    "powers": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "branches": {"regex": "(a|aa)*(a|aa)*(a|aa)*(a|aa)*b{1,9999}"},
    "any": {"regex": "(.*a){30}.{2000}b"},
    "many": {"choice": [f"choice {i}" for i in range(9000)]},
    "items": {"json": {"type": "array", "minItems": 10**9}},
    "length": {"json": {"type": "string", "minLength": 10**9}},
    "alternatives": {
        "json": {
            "allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]
        }
    },
    "itself": {"json": {"$ref": "#"}},
    "grammar": {"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900},
    "left": {"grammar": 'root ::= root root root | "a" | ""'},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_end_while_others_stream_on(url: str, client: OpenAI, name: str) -> None:
    """Counted, not timed: the other stream goes on between the request and its answer."""
    seen: list[float] = []
    stop = threading.Event()

    def streams() -> None:
        while not stop.is_set():
            for _ in ask(client, stream=True, extra_body={"ignore_eos": True}):
                seen.append(time.perf_counter())

    other = threading.Thread(target=streams)
    other.start()
    try:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "seed": 1}
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=body | {"structured_outputs": HOSTILE[name]},
            timeout=60,
        )
    finally:
        stop.set()
        other.join()
    assert answer.status_code in (200, 400)
    assert seen
    after = ask(client, max_tokens=3)
    assert after.choices[0].finish_reason == "length"

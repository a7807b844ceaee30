"""The request schema: fields of common clients pass, and unsupported ones are named."""

import json
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from minigen import SamplingParams
from minigen.server.anthropic.schema import MessagesRequest
from minigen.server.app import create_service
from minigen.server.forms import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from minigen.server.models import ModelHost
from minigen.server.ollama.schema import OllamaChatRequest
from minigen.server.openai.schema import ChatRequest, CompletionRequest, Message
from minigen.server.responses_api.schema import ResponsesRequest
from tests.asgi import Exchange, ask

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}

# As their sources and traffic show.
CLIENTS: dict[str, dict[str, Any]] = {
    "LangChain": {
        "model": "m",
        "stream": False,
        "n": 1,
        "temperature": 0.7,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi", "name": "ada"},
        ],
        "max_completion_tokens": 100,
        "logprobs": False,
        "tools": None,
        "tool_choice": None,
        "parallel_tool_calls": None,
        "response_format": None,
        "reasoning_effort": None,
        "seed": None,
        "metadata": {"run": "1"},
        "store": False,
        "service_tier": "auto",
    },
    "LiteLLM": {
        **CHAT,
        "model": "m",
        "user": "someone",
        "stop": ["\n\n"],
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "top_logprobs": None,
        "functions": [],
        "function_call": None,
    },
    "Open WebUI": {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": "Hello",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"role": "user", "content": "And?"},
        ],
    },
    "Continue": {**CHAT, "model": "m", "max_tokens": 4096, "stream": True, "stop": [], "tools": []},
    "vLLM's own": {
        **CHAT,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "best_of": 1,
        "spaces_between_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_json": None,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "verbosity": "medium",
        "tool_choice": "none",
    },
}


@pytest.mark.parametrize("client", CLIENTS)
def test_fields_that_common_clients_always_send_are_accepted(client: str) -> None:
    ChatRequest.model_validate(CLIENTS[client])


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest, Message])
def test_null_equals_a_missing_field(request_type: type) -> None:
    needed = {"messages": CHAT["messages"], "prompt": "x", "role": "user", "content": "x"}
    known = request_type.model_fields
    required = {name: needed[name] for name, each in known.items() if each.is_required()}
    if request_type is Message:  # whose content may be left out only beside calls
        required["content"] = "x"
    request = request_type.model_validate({**dict.fromkeys(known), **required})
    assert request == request_type.model_validate(required)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "always"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("store", True),
        ("store", 0),  # which is not false
        ("modalities", ["audio"]),
        ("service_tier", "priority"),
        ("reasoning_effort", "high"),
        ("n", 0),
        ("n", "1"),
        ("n", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", -2),
        ("stop", [5]),
        ("stop", ["x"] * 65),
        ("seed", 1.5),
        ("stream", "yes"),
        ("logit_bias", {"5": "much"}),
        ("top_logprobs", 21),
        ("messages", []),
        ("max_token", 5),
    ],
)
def test_unsupported_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**CHAT, field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_every_setting_of_the_engine_can_be_requested() -> None:
    names = {each.name for each in fields(SamplingParams)} - {"prompt_logprobs"}  # by echo
    assert names <= CompletionRequest.model_fields.keys()
    assert names <= ChatRequest.model_fields.keys()


def test_one_prompt_and_several_are_distinguished() -> None:
    for given, prompts in (
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
    ):
        assert CompletionRequest.model_validate({"prompt": given}).prompt == prompts
    for wrong in ([], 5, None, {"text": "x"}):
        with pytest.raises(ValidationError, match="prompt"):
            CompletionRequest.model_validate({"prompt": wrong})


_MESSAGE = {"role": "user", "content": "Hi"}
_PART = {"type": "text", "text": "Hi"}
_TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("request_type", "field", "item"),
    [
        (ChatRequest, "messages", _MESSAGE),
        (ChatRequest, "messages", 1),
        (ChatRequest, "tools", _TOOL),
        (OllamaChatRequest, "messages", _MESSAGE),
        (OllamaChatRequest, "tools", _TOOL),
        (MessagesRequest, "messages", _MESSAGE),
        (MessagesRequest, "tools", {"name": "add", "input_schema": {}}),
        (ResponsesRequest, "input", _MESSAGE),
        (ResponsesRequest, "input", 1),
        (ResponsesRequest, "tools", {"type": "function", "name": "add", "parameters": {}}),
    ],
)
def test_a_list_that_is_too_long_is_not_read_to_its_end(
    request_type: type[BaseModel], field: str, item: Any
) -> None:
    most = MOST_TOOLS if field == "tools" else MOST_MESSAGES
    given = {"model": "m", "messages": [_MESSAGE], "input": "Hi", "max_tokens": 1}
    known = {name: given[name] for name in given if name in request_type.model_fields}
    with pytest.raises(ValidationError, match=f"at most {most} items") as caught:
        request_type.model_validate({**known, field: [item] * (3 * most)})
    assert len(caught.value.errors()) == 1


@pytest.mark.parametrize(
    ("request_type", "field", "part"),
    [
        (MessagesRequest, "messages", _PART),
        (ResponsesRequest, "input", {"type": "input_text", "text": "Hi"}),
    ],
)
def test_a_message_has_a_limited_number_of_parts(
    request_type: type[BaseModel], field: str, part: Any
) -> None:
    request: dict[str, Any] = {"model": "m", "max_tokens": 1} if field == "messages" else {}
    request[field] = [{"role": "user", "content": [part] * (MOST_PARTS + 1)}]
    with pytest.raises(ValidationError, match=f"at most {MOST_PARTS} items"):
        request_type.model_validate(request)


def refused(path: str, body: bytes) -> Exchange:
    """Send a body that is refused before a model is needed."""

    def never() -> Any:
        raise AssertionError("no model is needed")

    app = create_service(ModelHost({"tiny": never}))
    answer = ask(app, path, headers={"content-type": "application/json"}, chunks=[body])
    assert answer.status == 400
    return answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "The request is nested too deeply."),
        (b'{"seed": %s}' % (b"9" * 5000), "The body has a whole number of more than 4300 digits."),
        (b'{"seed": "\xff"}', "The body is not valid UTF-8: invalid start byte at byte 10."),
        (b'{"seed": }', "The body is not valid JSON: Expecting value."),
        (
            b'{"\\ud800": 1}',
            'The body has text with half of a surrogate pair, which is not valid Unicode: "',
        ),
        (b"[]", "The body must be a JSON object, sent with the header 'Content-Type: applicat"),
    ],
    ids=lambda each: None if isinstance(each, bytes) else each[:30],
)
def test_a_body_that_cannot_be_read_is_refused_with_the_reason(body: bytes, message: str) -> None:
    assert refused("/v1/chat/completions", body).error["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{**_PART, "cache_control": 3}]}]},
            "'messages[0].content[0].cache_control': must be null or of type object, not 3.",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "The field 'messages[0].content[0].tool_use_id' is missing.",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
            "'messages[0]' has text with half of a surrogate pair",
        ),
    ],
)
def test_a_refused_field_has_the_place_that_the_client_gave_it(
    path: str, given: dict[str, Any], message: str
) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 1} | given)
    assert refused(path, body.encode()).error["message"].startswith(message)

"""Anthropic's Messages API: text, tools, streams, errors and counts.

The served model has random weights, so only a grammar makes it call a tool.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from minigen import LLM, SamplingParams
from minigen.server.anthropic.conversation import openai_messages
from minigen.server.anthropic.responses import blocks_of, failed_event
from minigen.server.anthropic.schema import AnthropicRequest
from minigen.server.app import create_service
from minigen.server.errors import ApiError
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost
from minigen.tool_calling.formats import HERMES
from minigen.tool_calling.parser import AnswerParser
from tests.serving import engine_of, load_tiny, save_tiny, serving
from tests.tiny import save_tokenizer
from tests.waiting import PATIENCE, wait_until

TEMPLATES = {
    "thinking": "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}",
    "mistral": "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}{% endfor %}{% endfor %}",
}
MESSAGES: Any = [{"role": "user", "content": "Say é"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 2}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
UTC = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False}
TIME = {"name": "time", "input_schema": UTC}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 C"}
WRONG = "invalid_request_error"
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    """Another instance of the served model, for the expected answers."""
    return load_tiny(directory)


@pytest.fixture(scope="module")
def host(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelHost:
    models = {"tiny": partial(load_tiny, directory)}
    for name, template in TEMPLATES.items():
        other = save_tiny(tmp_path_factory.mktemp(name))
        save_tokenizer(other, template, ("[TOOL_CALLS]",))
        models[name] = partial(load_tiny, other)
    return ModelHost(models)


@pytest.fixture(scope="module")
def client(host: ModelHost) -> Iterator[httpx.Client]:
    service = create_service(host, Limits(max_body_bytes=100_000))
    with serving(host, service) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


def asked(**changes: Any) -> dict[str, Any]:
    """Return a greedy request; a change to None leaves the field out."""
    whole = {"model": "tiny", "max_tokens": 20, "messages": MESSAGES, "temperature": 0} | changes
    return {name: value for name, value in whole.items() if value is not None}


def ask(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post(
        "/v1/messages", json=asked(**changes), headers={"anthropic-version": "2023-06-01"}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(client: httpx.Client, **changes: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/messages", json=asked(stream=True, **changes))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream together as Anthropic's client does, and check the order of its events."""
    first, *rest = events
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: int | None = None
    written = ""
    for event in rest:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            assert open_block == len(message["content"])
            message["content"].append(event["content_block"])
            written = ""
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            _, text = event["delta"].values()
            assert text
            written += text
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            block, open_block = message["content"][-1], None
            field = "input" if block["type"] == "tool_use" else block["type"]
            block[field] = json.loads(written) if field == "input" else written
        elif kind == "message_delta":
            assert open_block is None
            message |= {**event["delta"], "usage": event["usage"]}
        else:
            assert kind in ("ping", "message_stop")
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{**each, "id": ""} if "id" in each else each for each in message["content"]]
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**message, "id": "", "content": blocks, "usage": (total, usage["output_tokens"])}


def test_a_message_is_answered_as_the_engine_answers_it(client: httpx.Client, llm: LLM) -> None:
    prompt = llm.chat_prompt([{"role": "system", "content": "Be kind"}, *MESSAGES])
    wanted = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    blocks = [{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}]
    for system in ("Be kind", blocks):
        answer = ask(client, system=system, metadata={"user_id": "u"})
        assert answer["content"] == [{"type": "text", "text": wanted.text}]
        assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
        assert answer["id"].startswith("msg_")
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
        assert answer["usage"]["output_tokens"] == 20


def test_input_tokens_are_those_that_were_not_cached(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a text that occurs in no other test of this file"}]
    first, second = (ask(client, messages=messages)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < second["cache_read_input_tokens"]
    for usage in (first, second):
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        counted = client.post(
            "/v1/messages/count_tokens", json={"model": "tiny", "messages": messages}
        )
        assert counted.json() == {"input_tokens": total}


def test_counts_include_system_and_tools(client: httpx.Client) -> None:
    whole = {"system": "Be kind", "tools": [WEATHER], "tool_choice": ONE_CALL}
    usage = ask(client, **whole)["usage"]
    count = {"model": "tiny", "messages": MESSAGES, **whole}
    counted = client.post("/v1/messages/count_tokens", json=count).json()
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": total}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 30},
        {"stop_sequences": ["\x0b", "M", "v"]},
        {"tools": [WEATHER, TIME], "tool_choice": ONE_CALL, "max_tokens": 120},
        {"tools": [TIME], "tool_choice": {"type": "any"}, "max_tokens": 100},
        {"tools": [WEATHER], "max_tokens": 20},
    ],
)
def test_a_stream_has_the_blocks_of_the_whole_message(
    client: httpx.Client, changes: dict[str, Any]
) -> None:
    whole, events = ask(client, **changes), events_of(client, **changes)
    assert {event["type"] for event in events} >= {"ping", "content_block_delta"}
    assert without_ids(gathered(events)) == without_ids(whole)


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        (ONE_CALL, {"weather", "time"}),
        ({"type": "tool", "name": "weather"}, {"weather"}),
        ({"type": "tool", "name": "time"}, {"time"}),
    ],
)
def test_a_demanded_call_has_an_input_by_its_schema(
    client: httpx.Client, choice: dict[str, Any], allowed: set[str]
) -> None:
    answer = ask(client, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=120)
    (block,) = answer["content"]
    assert answer["stop_reason"] == "tool_use"
    assert block["type"] == "tool_use"
    assert block["id"].startswith("toolu_")
    assert block["name"] in allowed
    schemas: Any = {each["name"]: each["input_schema"] for each in (WEATHER, TIME)}
    jsonschema.validate(block["input"], schemas[block["name"]])


def test_without_leave_to_call_the_tools_are_not_shown(client: httpx.Client) -> None:
    hidden = ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert without_ids(hidden) == without_ids(ask(client))


def test_a_call_and_its_result_come_back_in_the_next_prompt(client: httpx.Client, llm: LLM) -> None:
    call = ask(client, tools=[WEATHER], tool_choice=ONE_CALL, max_tokens=120)
    used = call["content"][0]
    content = [{"type": "text", "text": "not "}, {"type": "text", "text": "found"}]
    result = {"tool_use_id": used["id"], "is_error": True, "content": content}
    answered = [{"type": "tool_result", **result}, {"type": "text", "text": "?"}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]},
        {"role": "user", "content": answered},
    ]
    written = json.dumps({"name": "weather", "arguments": used["input"]}, ensure_ascii=False)
    prompt = llm.chat_prompt(
        [
            *MESSAGES,
            {"role": "assistant", "content": f"I look.\n<tool_call>\n{written}\n</tool_call>"},
            {
                "role": "user",
                "content": "<tool_response>\nError: not found\n</tool_response>\n?",
            },
        ]
    )
    wanted = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    answer = ask(client, messages=messages)
    assert answer["content"] == [{"type": "text", "text": wanted.text}]


def test_ids_of_calls_fit_a_template_that_asks_for_their_length(client: httpx.Client) -> None:
    own = {"model": "mistral", "tools": [TIME]}
    (used,) = ask(client, **own, tool_choice=ONE_CALL, max_tokens=120)["content"]
    assert used["id"].startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "noon"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    assert ask(client, **own, messages=messages)["stop_reason"] in ("max_tokens", "end_turn")


def as_openai(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = {"model": "m", "messages": [*MESSAGES, *messages]}
    return openai_messages(AnthropicRequest.model_validate(request))[1:]


def test_blocks_become_messages_in_openais_form() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    said = {"type": "text", "text": "I look."}
    assert as_openai(
        {"role": "assistant", "content": [thought, said, CALL]},
        {"role": "user", "content": [RESULT]},
        {"role": "user", "content": "Well?"},
        {"role": "user", "content": "Tell me."},
    ) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "21 C"},
        {"role": "user", "content": "Well?\n\nTell me."},
    ]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user", "content": [RESULT]}], "'toolu_1' answers no tool_use"),
        ([{"role": "assistant", "content": [CALL]}], "'toolu_1' has no tool_result"),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2"}]},
            ],
            "'toolu_2' answers no tool_use of the message before",
        ),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT, RESULT]},
            ],
            "has two tool_results",
        ),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{"type": "text", "text": "So:"}, RESULT]},
            ],
            "come before its text",
        ),
    ],
)
def test_calls_and_results_must_match(messages: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        as_openai(*messages)


def test_an_answer_ends_at_a_stop_sequence_and_names_it(client: httpx.Client) -> None:
    text = ask(client)["content"][0]["text"]
    stop = text[6:8]
    assert text.index(stop) > 0
    answer = ask(client, stop_sequences=["never to be seen", stop, stop + "\x00"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    assert gathered(events_of(client, stop_sequences=[stop]))["stop_sequence"] == stop
    at_once = ask(client, stop_sequences=[text[0]])
    assert (at_once["content"], at_once["stop_sequence"]) == ([], text[0])


def test_a_full_context_ends_an_answer_with_a_reason_of_its_own(client: httpx.Client) -> None:
    answer = ask(client, messages=[{"role": "user", "content": "x" * 990}], max_tokens=500)
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_an_assistants_message_at_the_end_is_continued(client: httpx.Client, llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    prompt = llm.chat_prompt(messages, add_generation_prompt=False, continue_final_message=True)
    wanted = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    assert ask(client, messages=messages)["content"] == [{"type": "text", "text": wanted.text}]
    refused = client.post("/v1/messages", json=asked(messages=messages, tools=[WEATHER]))
    assert refused.status_code == 400
    assert "leave tools out" in refused.json()["error"]["message"]


def test_an_output_format_gives_the_text_its_form(client: httpx.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = ask(client, output_config=form, max_tokens=200)
    assert answer["stop_reason"] == "end_turn"
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)


def test_the_input_of_a_call_that_was_cut_off_is_what_there_was() -> None:
    def input_of(arguments: str) -> Any:
        parser = AnswerParser(HERMES, {"weather"})
        said = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
        (block,) = blocks_of([*parser.push(said), *parser.finish(cut_off=True)])
        return block["input"]

    assert input_of('{"city": "Rome", "unit": "') == {"city": "Rome"}
    assert input_of('{"at": {"city": "Rome", "da') == {"at": {"city": "Rome"}}
    assert input_of("{") == {}


def test_the_cut_off_beginning_of_a_further_call_is_no_text() -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for beginning in ("\n<tool", '\n<tool_call>\n{"name'):
        parser = AnswerParser(HERMES, {"time"})
        blocks = blocks_of([*parser.push(call + beginning), *parser.finish(cut_off=True)])
        assert [each["type"] for each in blocks] == ["tool_use"]


def test_a_cut_off_call_is_a_block_and_the_reason_says_so(client: httpx.Client) -> None:
    cut = {"tools": [WEATHER], "tool_choice": ONE_CALL}
    needed = ask(client, **cut, max_tokens=120)["usage"]["output_tokens"]
    answer = ask(client, **cut, max_tokens=needed - 25)
    (block,) = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert isinstance(block["input"], dict)
    assert set(block["input"]) < {"city", "unit"}


def test_reasoning_and_text_between_calls_are_blocks_of_their_own() -> None:
    parser = AnswerParser(HERMES, {"time"}, "possible")
    call = '<tool_call>\n{"name": "time", "arguments": {"utc": true}}\n</tool_call>'
    parts = [*parser.push(f"<think>Hm.</think>\n\nFirst {call} then {call}"), *parser.finish()]
    kinds = [(each["type"], each.get("text")) for each in blocks_of(parts)]
    assert [kind for kind, _ in kinds] == ["thinking", "text", "tool_use", "text", "tool_use"]
    assert [text.strip() for _, text in kinds if text] == ["First", "then"]


@pytest.mark.parametrize(
    ("changes", "status", "kind", "said"),
    [
        ({"max_token": 1}, 400, WRONG, "'max_token'"),
        ({"max_tokens": None}, 400, WRONG, "'max_tokens' is missing"),
        ({"temperature": 1.5}, 400, WRONG, "'temperature'"),
        ({"output_format": {}}, 400, WRONG, "output_config"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, WRONG, "role"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            400,
            WRONG,
            "web_search_20250305",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            WRONG,
            "'messages[0].content[0].type': should be 'text' or 'thinking' or 'tool_use'",
        ),
        ({"messages": [{"role": "user", "content": [CALL]}]}, 400, WRONG, "user"),
        ({"tools": [WEATHER, WEATHER]}, 400, WRONG, "'weather'"),
        ({"tool_choice": {"type": "tool"}}, 400, WRONG, "name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}},
            400,
            WRONG,
            "'no'",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            400,
            WRONG,
            "thinking",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            400,
            WRONG,
            "output_config.format.schema",
        ),
        ({"model": "other"}, 404, "not_found_error", "'other'"),
        ({"system": "x" * 100_000}, 413, "request_too_large", "100000 bytes"),
        ({"system": "x" * 2000}, 400, WRONG, "tokens"),
    ],
)
def test_errors_have_anthropics_form(
    client: httpx.Client, changes: dict[str, Any], status: int, kind: str, said: str
) -> None:
    answer = client.post("/v1/messages", json=asked(**changes))
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert said in body["error"]["message"]


@pytest.mark.parametrize("kind", ["enabled", "adaptive", None])
def test_a_model_that_reasons_answers_with_a_thinking_block(
    client: httpx.Client, kind: str | None
) -> None:
    own = {"model": "thinking", "thinking": kind and {"type": kind}}
    whole = ask(client, **own)
    (block,) = whole["content"]
    assert (block["type"], block["signature"]) == ("thinking", "")
    assert block["thinking"]
    assert without_ids(gathered(events_of(client, **own))) == without_ids(whole)
    text = ask(client, model="thinking", thinking={"type": "disabled"})["content"][0]
    assert text["type"] == "text"


def test_thinking_may_be_disabled_on_any_model(client: httpx.Client) -> None:
    without = ask(client, thinking={"type": "disabled"})
    assert without["content"] == ask(client)["content"]


def test_a_wrong_key_is_an_authentication_error_and_a_full_server_a_rate_limit(
    directory: Path,
) -> None:
    host = ModelHost({"tiny": partial(load_tiny, directory)})
    service = create_service(host, Limits(max_in_flight=1), ApiKeys(["secret"]))
    with (
        serving(host, service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers={"x-api-key": "secret"}) as client,
    ):
        refused = client.post("/v1/messages", json=asked(), headers={"x-api-key": "wrong"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        long = asked(stream=True, max_tokens=900, temperature=1)
        with client.stream("POST", "/v1/messages", json=long) as running:
            assert running.status_code == 200
            full = client.post("/v1/messages/count_tokens", json=asked(max_tokens=None))
            assert full.status_code == 429
            assert full.json()["error"]["type"] == "rate_limit_error"
            assert int(full.headers["retry-after"]) > 0
        wait_until(lambda: not engine_of(host).engine.live)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "api_error"), (502, "api_error"), (503, "overloaded_error"), (405, WRONG)],
)
def test_a_failure_in_mid_stream_is_an_event_that_the_client_knows(status: int, kind: str) -> None:
    written = failed_event(ApiError("It failed.", status=status)).decode()
    name, data = written.strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": kind, "message": "It failed."},
    }


def test_a_thread_is_refused_as_anthropics_client_reads_it(client: httpx.Client) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
    answer = client.post("/v1/messages", json={**body, "thread": {"type": "create"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert client.post("/v1/messages", json={**body, "thread": None}).status_code == 200

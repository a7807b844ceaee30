"""OpenAI's Responses API, by OpenAI's own client and by scripted answers.

The served model has random weights, so nothing but a grammar gives its answers a form. Where an
answer must have certain parts, its tokens are written by hand.
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter

from minigen import SamplingParams
from minigen.outputs import TokenDelta
from minigen.sequence import Logprob, SampledToken
from minigen.server.app import create_service
from minigen.server.chat_turn import ChatTurn
from minigen.server.errors import ApiError
from minigen.server.models import ModelHost, Served
from minigen.server.responses_api.items import messages_of
from minigen.server.responses_api.schema import LOGPROBS, ResponsesRequest
from minigen.server.responses_api.writer import ResponsesWriter
from minigen.tool_calling.formats import HERMES
from minigen.tool_calling.parser import AnswerParser, Reasoning
from tests.serving import load_tiny, save_tiny, serving
from tests.tiny import save_tokenizer

EVENT: Any = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
OFF = "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
TEMPLATES: dict[str, str | None] = {
    "tiny": None,  # its usual one
    "thinking": f"{TURNS}<think>\n{OFF}",
    "always thinking": TURNS + "<think>\n{# </think> #}",
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ModelHost:
    models = {}
    for name, template in TEMPLATES.items():
        directory: Path = save_tiny(tmp_path_factory.mktemp("tiny"))
        if template is not None:
            save_tokenizer(directory, template)
        models[name] = partial(load_tiny, directory)
    return ModelHost(models)


@pytest.fixture(scope="module")
def url(host: ModelHost) -> Iterator[str]:
    with serving(host, create_service(host)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **asked: Any) -> Any:
    whole: Any = {"model": "tiny", "input": "Say é", "max_output_tokens": 80} | asked
    return client.responses.create(**whole, extra_body={"seed": 1})


def without_ids(value: Any) -> Any:
    """Return a response or a part of it without what differs between two equal answers."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "item_id", "call_id", "created_at", "completed_at")
    return {name: without_ids(each) for name, each in value.items() if name not in changing}


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; their lines agree, and their numbers follow one another."""
    events = []
    for event in stream.decode().strip().split("\n\n"):
        kind, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def test_a_response_has_all_that_openais_types_require(url: str) -> None:
    body = {"model": "tiny", "input": "Say é", "max_output_tokens": 9, "metadata": {"run": "7"}}
    body |= {"top_p": 0.5, "seed": 3}
    found = httpx.post(f"{url}/v1/responses", json=body).json()
    response = Response.model_validate(found)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    assert response.usage.total_tokens == response.usage.input_tokens + 9
    assert found["store"] is False
    assert (response.temperature, response.top_p, found["seed"]) == (1.0, 0.5, 3)
    assert found["metadata"] == {"run": "7"}


def test_text_and_items_are_the_same_conversation(client: OpenAI) -> None:
    text = ask(client, instructions="Be brief.")
    items = ask(
        client,
        input=[
            {"role": "developer", "content": "Be brief."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Say "},
                    {"type": "input_text", "text": "é"},
                ],
            },
        ],
    )
    assert text.output_text == items.output_text
    assert text.usage.input_tokens == items.usage.input_tokens
    assert text.usage.input_tokens > ask(client).usage.input_tokens


def test_a_stream_has_the_events_and_the_text_of_the_whole_answer(client: OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    pieces = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    assert [each.type for each in events if each.type != "response.output_text.delta"] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", f"response.{whole.status}"),
    ]
    assert without_ids(events[-1].response.to_dict()) == without_ids(whole.to_dict())


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]
    at: bool


def test_openais_parse_helper_returns_the_callers_own_type(client: OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny", input="Say é", text_format=Mood, max_output_tokens=60
    )
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Mood)


def test_the_streaming_helper_parses_at_the_end(client: OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="Say é", text_format=Mood, max_output_tokens=60
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert isinstance(final.output_parsed, Mood)


def test_a_json_object_begins_as_one(client: OpenAI) -> None:
    answer = ask(client, text={"format": {"type": "json_object"}})
    assert answer.output_text.startswith("{")


CHOICES: list[Any] = [
    "required",
    {"type": "function", "name": "weather"},
    {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    },
]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "allowed"])
def test_a_forced_call_has_valid_arguments(client: OpenAI, choice: Any) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    (call,) = ask(client, **asked).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(ask(client, **asked, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 5
    assert events[-1].response.output[0].arguments == call.arguments


def test_the_output_of_a_call_goes_back_with_all_items_before_it(client: OpenAI) -> None:
    tools: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    conversation: list[Any] = [{"role": "user", "content": "Rain?"}]
    first = ask(client, input=conversation, **tools)
    conversation += first.output
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Yes."}
    second = ask(client, input=[*conversation, output], tools=[TOOL])
    assert second.usage.input_tokens > first.usage.input_tokens
    dumped = [each.model_dump() for each in second.output]  # with null in all unused fields
    third = ask(client, input=[*conversation, output, *dumped, {"role": "user", "content": "So?"}])
    assert third.status in ("completed", "incomplete")


def test_the_client_parses_the_arguments_of_a_strict_tool(client: OpenAI) -> None:
    tools: Any = [{**TOOL, "strict": True}]
    parsed = client.responses.parse(
        model="tiny",
        input="Say é",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    call: Any = parsed.output[0]
    assert call.parsed_arguments["city"] in ("Rome", "Oslo")


def test_a_tool_is_strict_only_if_it_says_so(client: OpenAI) -> None:
    odd = {**TOOL, "name": "odd", "parameters": {"type": "object", "colour": "red"}}
    tools: Any = [{**TOOL, "strict": True}, odd]
    answer = ask(client, tools=tools, tool_choice="none", max_output_tokens=1)
    assert [each.strict for each in answer.tools] == [True, False]
    with pytest.raises(openai.BadRequestError, match="the keyword 'colour'"):
        ask(client, tools=[{**odd, "strict": True}], tool_choice="none")


def test_reasoning_is_an_item_which_effort_none_turns_off(client: OpenAI) -> None:
    assert ask(client, model="thinking").output[0].type == "reasoning"
    answer = ask(client, model="thinking", reasoning={"effort": "none"})
    assert answer.output[0].type == "message"
    assert answer.reasoning.effort == "none"
    with pytest.raises(openai.BadRequestError, match="cannot turn reasoning off"):
        ask(client, model="always thinking", reasoning={"effort": "none"})


def test_log_probabilities_come_with_the_text(client: OpenAI) -> None:
    asked: Any = {"include": [LOGPROBS], "top_logprobs": 2, "max_output_tokens": 12}
    whole = ask(client, **asked)
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == whole.usage.output_tokens
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in entries)
    streamed = [
        entry
        for event in ask(client, **asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [each.token for each in streamed] == [each.token for each in entries]
    assert ask(client).output[0].content[0].logprobs == []


FORM = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "Rain"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": 3}, "input", "should be text or a list of items"),
    ({"input": []}, "input", "and not empty"),
    ({"input": ["a"]}, "input[0]", "an object with a type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "minigen knows the items message"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [{**CALL, "name": 3}]}, "input[0].name", "should be a valid string"),
    ({"input": [{**CALL, "arguments": "["}]}, "", "must be the text of a JSON object"),
    ({"input": [{**CALL, "colour": "red"}]}, "input[0].colour", "does not support the field"),
    ({"input": [OUTPUT]}, "input[0].call_id", "so send that one again"),
    ({"input": [OUTPUT, CALL]}, "input[0].call_id", "so send that one again"),
    ({"input": [IMAGE]}, "input[0].content[0].type", "read text only"),
    ({"store": True}, "store", "leave it out or send null or false"),
    ({"background": True}, "background", "leave it out or send null or false"),
    ({"truncation": "auto"}, "truncation", 'leave it out or send null or "disabled"'),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "in input again"),
    ({"conversation": "conv_1"}, "conversation", "in input again"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "send instructions and input"),
    ({"response_format": {"type": "text"}}, "response_format", 'send text: {"format": ...}'),
    ({"messages": []}, "messages", "does not support the field"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "minigen runs no tools itself"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools", "name has 1 to 128 letters"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", 'should be "none", "auto"'),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "knows the types"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools to call"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "'json_object'"),
    ({"text": {"format": FORM}}, "text", "text.format.schema cannot be used"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "should be 'none'"),
    ({"include": ["file_search_call.results"]}, "include[0]", "should be"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"n": 2}, "n", "leave it out or send null or 1"),
]


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_refusal_names_the_field(url: str, asked: Any, param: str, words: str) -> None:
    body = {"model": "tiny", "input": "Say é", "max_output_tokens": 5, **asked}
    answer = httpx.post(f"{url}/v1/responses", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert words in error["message"]
    assert (error["param"] or "") == param
    assert error["message"].count("\n") == 0


def test_a_refusal_is_the_clients_own_exception(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send the items of the earlier turns"):
        ask(client, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        ask(client, model="huge")


def test_no_response_is_stored(client: OpenAI) -> None:
    made = ask(client, max_output_tokens=2)
    for look in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="minigen stores no responses"):
            look(made.id)


def test_a_call_its_reasoning_and_the_text_before_it_are_one_message() -> None:
    request = ResponsesRequest.model_validate(
        {
            "input": [
                {"role": "system", "content": "In metres."},
                {"role": "user", "content": "Rain?"},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Look."}],
                },
                {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                CALL,
                {**CALL, "call_id": "call_2"},
                {**OUTPUT, "output": [{"type": "input_text", "text": "Rain"}]},
            ]
        }
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for name in ("call_1", "call_2")
    ]
    assert messages_of("Be brief.", request.input) == [
        {"role": "system", "content": "Be brief.\n\nIn metres."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]


class Written:
    """An answer with a text that is written here, a token per byte, up to a stop string.

    `end` is its finish reason.
    """

    def __init__(
        self,
        served: Served,
        text: str,
        end: str,
        reasoning: Reasoning = "none",
        stop: SequenceOf[str] = (),
    ):
        self.request = ResponsesRequest.model_validate(
            {"input": "x", "tools": [TOOL], "include": [LOGPROBS]}
        )
        self.served, self.reasoning = served, reasoning
        tokenizer = served.llm.tokenizer
        (self.answer,) = served.llm.process_requests(["x"], SamplingParams(logprobs=0, stop=stop))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        token_ids += sorted(self.answer.sequence.end_ids) if end == "stop" else []
        streaming = self.writer()
        stream = streaming.on_start()
        for place, token_id in enumerate(token_ids, 1):
            self.answer.sequence.finish_reason = end if place == len(token_ids) else None
            token = SampledToken(token_id, {token_id: Logprob(-1.0, 1)})
            delta = self.answer.push(token)
            stream += streaming.on_token(delta)
            if delta.finish_reason is not None:
                break
        self.events = events_of(stream + streaming.end())
        self.streamed = self.events[-1]["response"]
        self.whole = json.loads(self.writer().whole())

    def writer(self) -> ResponsesWriter:
        turn = ChatTurn([], {}, lambda: AnswerParser(HERMES, {"weather"}, self.reasoning))
        return ResponsesWriter(
            self.served, self.answer, self.request, turn, self.request.tool_use()
        )


ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPTS: dict[str, tuple[str, str, Reasoning, list[str]]] = {
    "empty": ("", "stop", "none", ["message"]),
    "text": ("It rains.", "stop", "none", ["message"]),
    "one call": (ROME, "stop", "none", ["function_call"]),
    "two calls": (f"{ROME}\n{ROME}", "stop", "none", ["function_call", "function_call"]),
    "text and calls": (
        f"I look. {ROME} And {ROME} so",
        "stop",
        "none",
        ["message", "function_call", "message", "function_call", "message"],
    ),
    "thought": (
        "<think>Look.</think>\n\nIt rains.",
        "stop",
        "possible",
        ["reasoning", "message"],
    ),
    "thought and call": (
        f"<think>Look.</think>{ROME}",
        "stop",
        "possible",
        ["reasoning", "function_call"],
    ),
    "half a thought": ("<think>Look", "length", "possible", ["reasoning"]),
    "half a text": ("It ra", "length", "none", ["message"]),
    "half a call": (ROME[:-22], "length", "none", ["function_call"]),
    "head of a call": ("I look.<tool_call>\n{", "length", "none", ["message"]),
    "bytes of a character": ("é ü", "stop", "none", ["message"]),
}


@pytest.fixture
def served(client: OpenAI, host: ModelHost) -> Served:
    ask(client, max_output_tokens=1)  # loads the model
    assert host.first.served is not None
    return host.first.served


@pytest.mark.parametrize("name", SCRIPTS)
def test_items_stand_in_the_order_of_the_answer_and_a_stream_has_the_same(
    served: Served, name: str
) -> None:
    text, end, reasoning, kinds = SCRIPTS[name]
    written = Written(served, text, end, reasoning)
    Response.model_validate(written.whole)
    assert [each["type"] for each in written.whole["output"]] == kinds
    assert without_ids(written.streamed) == without_ids(written.whole)
    statuses = [each["status"] for each in written.whole["output"]]
    last = "incomplete" if end == "length" else "completed"
    assert (*statuses, written.whole["status"]) == (*["completed"] * (len(kinds) - 1), last, last)


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ('"name', ("message", "completed", "I look.")),
        ('"city', ("function_call", "incomplete", "{")),
        ("\n</tool", ("function_call", "completed", '{"city": "Rome"}')),
    ],
)
def test_a_stop_string_within_a_call_leaves_no_half_call_as_text_or_as_completed(
    served: Served, stop: str, shown: tuple[str, ...]
) -> None:
    written = Written(served, f"I look. {ROME}", "stop", stop=[stop])
    last = written.whole["output"][-1]
    text = last["content"][0]["text"] if "content" in last else last["arguments"]
    assert (last["type"], last["status"], text) == shown
    assert written.whole["status"] == "completed"
    assert without_ids(written.streamed) == without_ids(written.whole)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_deltas_of_an_item_add_up_to_what_it_is_in_the_end(served: Served, name: str) -> None:
    written = Written(served, *SCRIPTS[name][:3])
    for place, item in enumerate(written.streamed["output"]):
        own = [each for each in written.events if each.get("output_index") == place]
        deltas = [each["delta"] for each in own if each["type"].endswith(".delta")]
        content = item.get("content") or [{"text": item.get("arguments")}]
        assert "".join(deltas) == content[0]["text"]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] | {"sequence_number": 0} == {
            "type": "response.output_item.done",
            "sequence_number": 0,
            "output_index": place,
            "item": item,
        }
        if item["type"] == "message":
            entries = [each for event in own for each in event.get("logprobs", ())]
            assert entries == 2 * content[0]["logprobs"], "in the deltas, and when it is done"


def test_tokens_are_counted_as_reasoning_until_the_thought_ends(served: Served) -> None:
    usage = Written(served, "<think>abc</think>de", "stop", "possible").whole["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>abc")}
    assert usage["output_tokens"] == len("<think>abc</think>de") + 1
    usage = Written(served, "<think>abc", "length", "possible").whole["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>abc")}


def test_an_error_in_the_middle_of_a_stream_ends_it_as_failed(served: Served) -> None:
    written = Written(served, "It ra", "length")
    writer = written.writer()
    writer.on_start()
    writer.on_token(TokenDelta(0, 0, "It r", 5))
    events = writer.failure(ApiError("The model failed.", kind="server_error", code="model_failed"))
    error, failed = (
        EVENT.validate_python(json.loads(each.split("data: ")[1]))
        for each in events.decode().strip().split("\n\n")
    )
    assert (error.type, error.code, error.message) == ("error", "model_failed", "The model failed.")
    assert failed.type == "response.failed"
    assert failed.response.error.message == "The model failed."
    assert failed.response.output[0].content[0].text == "It r"

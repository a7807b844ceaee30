"""Tools in chat requests, by OpenAI's and Ollama's clients, with models of random weights.

Such a model knows nothing, so only the grammar gives its calls their form.
"""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import ollama
import openai
import pytest
from openai import OpenAI

from minigen import SamplingParams
from minigen.outputs import TokenDelta
from minigen.server.app import create_service
from minigen.server.models import ModelHost
from minigen.server.ollama.responses import OllamaResponseWriter, as_message
from minigen.server.ollama.routes import with_call_ids
from minigen.tool_calling.formats import HERMES
from minigen.tool_calling.parser import AnswerParser
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.tiny import save_tokenizer

# Each writes what its family's template writes around tools, calls and results.
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
TEMPLATES = {
    "plain": TURNS,
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments.mood }}</tool_call>{% endfor %}{% endfor %}<|assistant|>",
    "llama": '{% if tools %}ipython {"name": , "parameters": }{{ tools | tojson }}{% endif %}'
    + TURNS,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]"
    "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids have 9 letters') }}"
    "{% endif %}{% endif %}{% endfor %}",
    "mistral-args": "{% if tools %}[TOOL_CALLS]name[ARGS]{{ tools | tojson }}{% endif %}" + TURNS,
    "thinking": "{% if tools %}<tool_call>{% endif %}" + TURNS + "<think>\n{# </think> #}",
}
SPECIALS = {"mistral": ("[TOOL_CALLS]",), "mistral-args": ("[TOOL_CALLS]", "[ARGS]")}
MESSAGES: Any = [{"role": "user", "content": "Say é"}]
MOOD = {
    "type": "object",
    "properties": {"mood": {"$ref": "#/$defs/mood"}, "at": {"type": "string", "maxLength": 3}},
    "required": ["mood"],
    "additionalProperties": False,
    "$defs": {"mood": {"enum": ["good", "bad"]}},
}
SIZE = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
SCHEMAS = {"set_mood": MOOD, "set_size": SIZE}


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS: Any = [tool("set_mood"), tool("set_size")]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ModelHost:
    models = {}
    for name, template in TEMPLATES.items():
        directory: Path = save_tiny(tmp_path_factory.mktemp(name), 4096)
        save_tokenizer(directory, template, SPECIALS.get(name, ()))
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


def ask(client: OpenAI, model: str, **asked: Any) -> Any:
    usual: Any = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, "seed": 1}
    return client.chat.completions.create(model=model, **(usual | asked))


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def streamed(chunks: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return the content, the calls and the finish reason that the chunks of a stream add up to."""
    content, calls, reason = "", dict[int, list[str]](), None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for each in choice.delta.tool_calls or ():
            if each.id is not None:
                assert each.index not in calls
                calls[each.index] = [each.function.name, ""]
            calls[each.index][1] += each.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("model", sorted(set(TEMPLATES) - {"thinking"}))
def test_a_model_that_must_call_calls_by_its_schema(client: OpenAI, model: str) -> None:
    (choice,) = ask(client, model, tool_choice="required", parallel_tool_calls=False).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    check_calls(choice.message.tool_calls)
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("model", ["plain", "llama", "mistral", "mistral-args"])
def test_a_streamed_answer_has_the_calls_of_a_whole_one(client: OpenAI, model: str) -> None:
    (choice,) = ask(client, model, tool_choice="required").choices
    check_calls(choice.message.tool_calls)
    calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls]
    found = streamed(ask(client, model, tool_choice="required", stream=True))
    assert found == ("", calls, choice.finish_reason)


@pytest.mark.parametrize("model", ["plain", "mistral"])
def test_a_named_tool_is_called_once(client: OpenAI, model: str) -> None:
    named = {"type": "function", "function": {"name": "set_size"}}
    (choice,) = ask(client, model, tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["set_size"]


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "set_mood"}}],
        },
    }
    answer = ask(client, "plain", tool_choice=allowed, n=4)
    names = {c.function.name for each in answer.choices for c in each.message.tool_calls}
    assert names == {"set_mood"}


def test_calls_beside_a_form_are_either(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SIZE}}
    answer = ask(client, "plain", response_format=form, n=8, temperature=2.0)
    ended = [each for each in answer.choices if each.finish_reason != "length"]
    assert {each.finish_reason for each in ended} == {"stop", "tool_calls"}
    for each in ended:
        if each.finish_reason == "stop":
            jsonschema.validate(json.loads(each.message.content), SIZE)
            assert each.message.tool_calls is None
        else:
            check_calls(each.message.tool_calls)


def test_a_strict_tool_is_valid_where_the_model_chooses_to_call(client: OpenAI) -> None:
    """The weights are random, so the mark of a call is made likely by a bias on each byte of it."""
    strict = [tool("set_size", strict=True)]
    answer = ask(client, "mistral", tools=strict, logit_bias={"259": 100.0}, max_tokens=60)
    (choice,) = answer.choices
    check_calls(choice.message.tool_calls)


def test_tools_may_be_offered_and_not_be_used(client: OpenAI) -> None:
    with_none = ask(client, "plain", tool_choice="none", max_tokens=20)
    without = ask(client, "plain", tools=[], max_tokens=20)
    assert with_none.choices[0].message.tool_calls is None
    assert with_none.choices[0].message.content == without.choices[0].message.content
    free = ask(client, "plain", max_tokens=20)
    assert free.usage.prompt_tokens > without.usage.prompt_tokens  # it describes the tools


def test_the_result_of_a_call_goes_back_to_the_model(client: OpenAI) -> None:
    for model in ("plain", "hermes", "mistral"):
        message = ask(client, model, tool_choice="required", parallel_tool_calls=False)
        message = message.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        again = [*MESSAGES, message.model_dump(exclude_none=True), result]
        answer = ask(client, model, messages=again, max_tokens=5)
        assert answer.choices[0].finish_reason == "length"


def test_reasoning_is_apart_from_the_answer(client: OpenAI) -> None:
    (choice,) = ask(client, "thinking", tools=[], max_tokens=12).choices
    assert choice.message.content == ""
    assert choice.message.reasoning_content
    chunks = ask(client, "thinking", tools=[], max_tokens=12, stream=True)
    pieces = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert "".join(filter(None, pieces)) == choice.message.reasoning_content


def test_log_probabilities_come_with_every_token(client: OpenAI) -> None:
    asked: Any = {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    (choice,) = ask(client, "plain", **asked).choices
    chunks = ask(client, "plain", **asked, stream=True)
    entries = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert list(chain(*entries)) == choice.logprobs.content


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"tools": TOOLS + TOOLS}, "tools", "Two tools have the name 'set_mood'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "'f', which is none of the tools: set_mood, set_size",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "regex cannot stand beside tools",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs",
            "structured_outputs.grammar cannot stand beside tools",
        ),
        (
            {"structured_outputs": {"grammar": "start: ("}, "tools": []},
            "structured_outputs",
            "structured_outputs.grammar",
        ),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required', not \"any\""),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url"}]}, *MESSAGES]},
            None,
            "Message 0 has content that is not",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"type": "string", "pattern": "(?=a)"}},
                            },
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "look-around",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    url: str, host: ModelHost, asked: dict[str, Any], param: str | None, said: str
) -> None:
    body = {"model": "plain", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 5} | asked
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]
    assert is_empty(engine_of(host))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": "call_of_no_message"},
        {"role": "user", "content": "x", "tool_call_id": "c"},
        {"role": "user", "content": None},
        {"role": "assistant"},
        {"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {}}]},
    ],
)
def test_messages_that_do_not_fit_are_refused(client: OpenAI, message: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="message"):
        ask(client, "plain", messages=[*MESSAGES, message])


def test_ollamas_client_offers_tools_and_sends_results(url: str) -> None:
    client = ollama.Client(url)
    tools: Any = [tool("set_size")]
    free = client.chat("plain", MESSAGES, options={"num_predict": 1})
    offered = client.chat("plain", MESSAGES, tools=tools, options={"num_predict": 1})
    assert offered.prompt_eval_count > free.prompt_eval_count
    turns = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"function": {"name": "set_size", "arguments": {}}}]},
        {"role": "tool", "tool_name": "set_size", "content": "done"},
    ]
    again = client.chat("hermes", turns, tools=tools, options={"num_predict": 2, "temperature": 0})
    assert again.done_reason == "length"
    client._client.close()


def test_ollamas_calls_and_results_get_ids_by_name_and_by_order() -> None:
    def calls(*calls: tuple[str, str]) -> dict[str, Any]:
        listed = [{"id": own, "function": {"name": name}} for own, name in calls]
        return {"role": "assistant", "tool_calls": listed}

    def result(**more: str) -> dict[str, Any]:
        return {"role": "tool", **more}

    messages = [
        result(),
        calls(("", "clock"), ("", "weather"), ("mine", "clock")),
        result(name="weather"),
        result(name="other"),
        result(tool_call_id="mine"),
        result(),
        calls(("", "clock")),
        result(),
    ]
    found = with_call_ids(messages)
    assert [call["id"] for call in found[1]["tool_calls"]] == ["call00000", "call00001", "mine"]
    ids = [each.get("tool_call_id") for each in found if each["role"] == "tool"]
    assert ids == [None, "call00001", "call00000", "mine", None, "call00003"]


@pytest.mark.parametrize(("cut", "stopped"), [(None, False), (26, True), (50, True)])
def test_ollamas_calls_are_sent_whole_at_the_end_and_half_ones_left_out(
    host: ModelHost, client: OpenAI, cut: int | None, stopped: bool
) -> None:
    """The writer alone, because no random model calls by itself."""
    ask(client, "plain", max_tokens=1)  # loads the model
    served = host.models["plain"].served
    assert served is not None
    (state,) = served.llm.process_requests(["Hi"], SamplingParams(max_tokens=9))
    state.first_token_ns = state.last_token_ns = 1
    text = 'Yes. <tool_call>{"name": "set_size", "arguments": {"size": 5}}</tool_call>'
    text = text[:cut]
    state.choice.text, state.choice.finish_reason = text, "stop"
    state.stops.stopped = stopped

    def written(step: int) -> list[Any]:
        new_parser = partial(AnswerParser, HERMES, ("set_size",))
        writer = OllamaResponseWriter(served, state, as_message, "m", 0, 1, new_parser)
        pieces = [text[place : place + step] for place in range(0, len(text), step)]
        ends = [None] * (len(pieces) - 1) + ["stop"]
        lines = [
            writer.on_token(TokenDelta(0, 0, piece, 5, end))
            for piece, end in zip(pieces, ends, strict=True)
        ]
        whole = OllamaResponseWriter(served, state, as_message, "m", 0, 1, new_parser).whole()
        return [json.loads(line)["message"] for line in [*lines, whole] if line]

    *streamed_, whole = written(7)
    assert whole["content"] == "".join(each["content"] for each in streamed_) == "Yes."
    calls = [call for each in streamed_ for call in each.get("tool_calls", ())]
    right = {"index": 0, "name": "set_size", "arguments": {"size": 5}}
    assert [call["function"] for call in calls] == [right] * (not stopped)
    assert [call["function"] for call in whole.get("tool_calls", ())] == [right] * (not stopped)

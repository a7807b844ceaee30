"""Tool calls: how each family writes them, how answers are read, how conversations are written."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from minigen.errors import ParamsError, PromptError
from minigen.sampling.grammar import LLGuidanceBackend
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer, bytes_of_letters
from minigen.tool_calling.call_grammar import form_of_answer
from minigen.tool_calling.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
    format_of,
)
from minigen.tool_calling.parser import MOST_HEAD, AnswerParser, Part, Reasoning, joined, parse
from minigen.tool_calling.prompt import for_plain_template, for_template
from minigen.tool_calling.tools import MOST_TOOLS, Tool, ToolChoice, ToolUse
from tests.tiny import TINY_VOCAB, save_tokenizer

NAMES = ("add", "get_time")
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": "<tool_call>"}], "d": "é\\\\"}'
FORMATS = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)


def written(style: ToolFormat, *calls: tuple[str, str]) -> str:
    """Return calls as the family writes them."""
    bodies = [
        f"{style.before_name}{name}{style.before_arguments}{arguments}{style.after_arguments}"
        for name, arguments in calls
    ]
    if style.one_list:
        return f"{style.begin}[{style.between.join(bodies)}]"
    return style.between.join(f"{style.begin}{body}{style.end}" for body in bodies)


def read(
    style: ToolFormat | None, text: str, reasoning: Reasoning = "none", cut_off: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    found = parse(AnswerParser(style, NAMES, reasoning), text, cut_off)
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
def test_the_calls_of_each_family_are_read(style: ToolFormat) -> None:
    calls = [("add", ARGUMENTS), ("get_time", "{}")]
    assert read(style, written(style, *calls)) == ("", "", calls)


@pytest.mark.parametrize("style", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda style: style.name)
def test_text_before_a_call_is_kept_without_its_last_blanks(style: ToolFormat) -> None:
    text = "I look it up.\n\n" + written(style, ("add", '{"a": 1}'))
    assert read(style, text) == ("", "I look it up.", [("add", '{"a": 1}')])


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
@settings(deadline=None)
@given(data=st.data())
def test_the_parts_are_the_same_however_the_text_is_cut(style: ToolFormat, data: Any) -> None:
    pieces = [
        written(style, ("add", ARGUMENTS)),
        written(style, ("get_time", "{}"), ("add", '{"x": [[]]}')),
        written(style, ("unknown", '{"a": 1}')),
        "text \n ",
        '{"name": ',
        "<tool_",
        "[TOOL_CALLS]",
        "<think>hm</think>\n\n",
        "</tool_call>",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=4)))
    reasoning = data.draw(st.sampled_from(["none", "possible", "open"]))
    cut_off = data.draw(st.booleans())
    whole = read(style, text, reasoning, cut_off)
    parser = AnswerParser(style, NAMES, reasoning)
    parts: list[Part] = []
    place = 0
    while place < len(text):
        length = data.draw(st.integers(1, 12))
        parts += parser.push(text[place : place + length])
        place += length
    found = joined([*parts, *parser.finish(cut_off)])
    calls = [(call.name, call.arguments) for call in found.calls]
    assert (found.reasoning, found.content, calls) == whole


def test_arguments_are_streamed_as_they_come() -> None:
    parser = AnswerParser(HERMES, NAMES)
    pieces = ['<tool_call>{"name": "add", "arg', 'uments": {"a', '": 1', "}}</tool_", "call> yes"]
    found = [[(part.kind, part.text) for part in parser.push(piece)] for piece in pieces]
    assert found == [
        [],
        [("call", "add"), ("arguments", '{"a')],
        [("arguments", '": 1')],
        [("arguments", "}")],
        [("content", " yes")],
    ]


@pytest.mark.parametrize(
    "text",
    [
        'Here: <tool_call>\n{"name": "shout", "arguments": {}}\n</tool_call> so.',
        "Here: <tool_call>\nadd(1)\n</tool_call> so.",
        'Here: <tool_call>\n["add"]\n</tool_call> so.',
        "a <tool_call",
        "<b>bold</b> { } ",
    ],
)
def test_what_is_no_call_of_a_known_tool_stays_text(text: str) -> None:
    assert read(HERMES, text) == ("", text, [])


@pytest.mark.parametrize("text", ['{"answer": 42}', "{", "{}", '{"name": 5}', "Hello {", " [1] "])
def test_json_that_is_no_call_stays_text_for_a_family_without_marks(text: str) -> None:
    assert read(LLAMA, text) == ("", text, [])


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = AnswerParser(LLAMA, NAMES)
    assert [part.text for part in parser.push('{"answer": ')] == ['{"answer":']


def test_a_call_whose_arguments_come_first_is_read_at_its_end() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    assert read(HERMES, text) == ("", "", [("add", '{"a": 1}')])


def test_a_call_that_is_cut_off_keeps_the_arguments_so_far() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert read(HERMES, text, cut_off=True) == ("", "", [("add", '{"a": 1')])


def test_the_beginning_of_a_call_that_is_cut_off_is_no_text() -> None:
    assert read(HERMES, 'So <tool_call>{"name": "ad', cut_off=True) == ("", "So", [])
    assert read(HERMES, 'So <tool_call>{"name": "ad') == (
        *("", 'So <tool_call>{"name": "ad'),
        [],
    )


def test_reasoning_comes_apart_where_the_model_begins_it_or_the_prompt_did() -> None:
    call = written(HERMES, ("add", "{}"))
    assert read(HERMES, f"<think>\nwhy?\n</think>\n\n{call}", "possible") == (
        *("\nwhy?\n", ""),
        [("add", "{}")],
    )
    assert read(None, "why?</think>\n\nSo.", "open") == ("why?", "So.", [])
    assert read(None, "So <think> it", "possible") == ("", "So <think> it", [])


def test_a_long_hostile_answer_is_read_with_little_held_back() -> None:
    """Each piece is looked at a bounded number of times: what waits stays below the limit."""
    for text in ("<tool_call>" * 5000, '<tool_call>{"name": "' + "a" * 50_000, "<" * 50_000):
        parser, most = AnswerParser(HERMES, NAMES), 0
        for place in range(0, len(text), 50):
            parser.push(text[place : place + 50])
            most = max(most, len(parser._rest))
        assert most <= MOST_HEAD + 50


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}[TOOL_CALLS]x[ARGS]{% endif %}", "mistral with [ARGS]"),
        ('{% if tools %}Environment: ipython {"name": n, "parameters": p}{% endif %}', "llama"),
    ],
)
def test_the_family_is_seen_from_the_template(template: str, wanted: str) -> None:
    found = format_of(template)
    assert found is not None
    assert found.name == wanted


def test_a_form_that_is_not_known_is_not_guessed() -> None:
    assert format_of("{% if tools %}<tool_call><function=add>{% endif %}") is None
    assert format_of("{% if tools %}{{ tools }}{% endif %}") is None


CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
ADD = Tool(name="add", description="Adds one.", parameters={"properties": {"a": {}}})


def test_a_template_with_tools_gets_objects_names_and_text() -> None:
    call, result = for_template([CALL, RESULT])
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (call["content"], result["name"]) == ("", "add")
    assert CALL["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'  # the caller's is unchanged


def test_a_template_without_tools_gets_them_in_words() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = for_plain_template([system, CALL, RESULT, RESULT], (ADD,), must_call=False)
    assert [message["role"] for message in found] == ["system", "assistant", "user"]
    assert found[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(ADD.described["function"]) in found[0]["content"]
    assert read(HERMES, found[1]["content"]) == ("", "", [("add", '{"a": 1}')])
    assert found[2]["content"].count("<tool_response>\n2\n</tool_response>") == 2


def test_without_tools_nothing_is_added_to_the_conversation() -> None:
    user = {"role": "user", "content": "Hi"}
    assert for_plain_template([user], (), must_call=False) == [user]


@pytest.mark.parametrize("arguments", ["[1]", "a=1", "{" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    for convert in (for_template, lambda messages: for_plain_template(messages, (), False)):
        with pytest.raises(PromptError, match="'add' must be the text of a JSON object"):
            convert([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Tool(name="two words"), "letters, digits"),
        (lambda: Tool(name="a" * 129), "letters, digits"),
        (lambda: Tool(name="f", parameters={"type": "array"}), "schema of an object"),
        (lambda: Tool(name="f", parameters={"$ref": "http://x"}), "schema of tool 'f' refers"),
        (lambda: Tool(name="f", parameters={"x": 1}, strict=True), "tool 'f' has the keyword 'x'"),
        (lambda: ToolUse((ADD, ADD)), "Two tools have the name 'add'"),
        (
            lambda: ToolUse(tuple(Tool(name=f"f{i}") for i in range(MOST_TOOLS + 1))),
            "at most 128 tools",
        ),
        (lambda: ToolUse((), ToolChoice("required")), "no tools to call"),
        (lambda: ToolUse((ADD,), ToolChoice("auto", ("sub",))), "'sub', which is none"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_name(wrong: Any, said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        wrong()


SIZE = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "unit": {"enum": ["m"]}},
    "required": ["size"],
    "additionalProperties": False,
}
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ID_OF_BYTE = {bytes_of_letters(letter)[0]: 3 + i for i, letter in enumerate(_ALPHABET)}
CALLED, GOOD, BAD = "set_size", '{"size": 5, "unit": "m"}', '{"size": "5"}'


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return LLGuidanceBackend(Tokenizer.from_directory(directory), TINY_VOCAB, [2])


def accepts(
    backend: LLGuidanceBackend, form: StructuredOutputsParams | None, text: str
) -> bool | None:
    """Return whether a form accepts a text as a whole answer; None if it may only go on."""
    assert form is not None
    matcher = backend.compile(form)
    for byte in text.encode():
        token_id = ID_OF_BYTE[byte]
        if not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
    return True if matcher.allowed()[2] else None


def form_of(
    style: ToolFormat,
    mode: str,
    parallel: bool = True,
    own: StructuredOutputsParams | None = None,
    reasoning: Reasoning = "none",
) -> StructuredOutputsParams | None:
    tool = Tool(name=CALLED, parameters=SIZE, strict=True)
    choice = ToolChoice(mode)  # type: ignore[arg-type]
    return form_of_answer(
        ToolUse((tool,), choice, parallel), style, own, reasoning, lambda text: None
    )


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
def test_a_forced_answer_is_calls_with_valid_arguments(
    backend: LLGuidanceBackend, style: ToolFormat
) -> None:
    form, one = form_of(style, "required"), form_of(style, "required", parallel=False)
    good, two = written(style, (CALLED, GOOD)), written(style, (CALLED, GOOD), (CALLED, GOOD))
    assert accepts(backend, form, good)
    assert accepts(backend, form, two)
    assert accepts(backend, one, good)
    assert accepts(backend, one, two) is False
    for text in ("Hello", "", written(style, (CALLED, BAD)), written(style, ("other", GOOD))):
        assert not accepts(backend, form, text)


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
def test_a_free_answer_with_a_strict_tool_is_text_or_valid_calls(
    backend: LLGuidanceBackend, style: ToolFormat
) -> None:
    form = form_of(style, "auto")
    for text in ("Hello {", "", "é\n\n", written(style, (CALLED, GOOD))):
        assert accepts(backend, form, text), text
    if style.begin:
        assert accepts(backend, form, "So: " + written(style, (CALLED, GOOD)) + " Done.")
    assert not accepts(backend, form, written(style, (CALLED, BAD)))


def test_an_answer_is_in_its_form_or_calls(backend: LLGuidanceBackend) -> None:
    own = StructuredOutputsParams(json={"type": "integer"})
    form = form_of(HERMES, "auto", own=own)
    assert accepts(backend, form, "17")
    assert accepts(backend, form, written(HERMES, (CALLED, GOOD)))
    assert not accepts(backend, form, "seventeen")


@pytest.mark.parametrize("mode", ["none", "required"])
def test_a_form_begins_after_the_reasoning(backend: LLGuidanceBackend, mode: str) -> None:
    own = StructuredOutputsParams(json={"type": "integer"})
    answer = "17" if mode == "none" else written(HERMES, (CALLED, GOOD))
    may = form_of(HERMES, mode, own=own, reasoning="possible")
    for text in (answer, f"<think>1 < 2</think>\n\n{answer}", f"<think></think>{answer}"):
        assert accepts(backend, may, text), text
    opened = form_of(HERMES, mode, own=own, reasoning="open")
    assert accepts(backend, opened, f"hm <b></think>\n{answer}")
    assert not accepts(backend, opened, answer)
    assert not accepts(backend, may, f"<think>hm</think> I say {answer}")


def test_a_mark_that_is_a_special_token_is_that_token() -> None:
    tool = Tool(name=CALLED, parameters=SIZE)
    use = ToolUse((tool,), ToolChoice("required"))
    ids = {"[TOOL_CALLS]": 7, "[ARGS]": 8}
    form = form_of_answer(use, MISTRAL_ARGS, None, "none", ids.get)
    assert form is not None
    assert "<[7]>" in form.source
    assert "<[8]>" in form.source
    assert "[TOOL_CALLS]" not in form.source


def test_tools_that_nothing_forces_cost_no_grammar() -> None:
    tool = Tool(name=CALLED, parameters=SIZE)
    for use in (ToolUse((tool,)), ToolUse((tool,), ToolChoice("none")), ToolUse()):
        assert form_of_answer(use, HERMES, None, "none", lambda text: None) is None


@pytest.mark.parametrize("strict", [True, False])
def test_keywords_that_cannot_be_enforced_are_refused_for_strict_tools_only(
    backend: LLGuidanceBackend, strict: bool
) -> None:
    properties = {"a": {"type": "integer", "not": {"const": 3}}, "b": {"uniqueItems": True}}
    tool = Tool(name=CALLED, parameters={"properties": properties}, strict=strict)
    use = ToolUse((tool,), ToolChoice("required"))
    form = form_of_answer(use, HERMES, None, "none", lambda text: None)
    if strict:
        with pytest.raises(ParamsError):
            accepts(backend, form, "")
    else:
        assert accepts(backend, form, written(HERMES, (CALLED, '{"a": 3}')))


def test_an_answer_that_ends_within_a_call_says_so() -> None:
    parser = AnswerParser(HERMES, NAMES)
    parser.push('<tool_call>\n{"name": "add", "arguments": {"city": "')
    assert parser.is_within_call
    parser.push('x"}}</tool_call>')
    assert not parser.is_within_call


def test_an_empty_list_of_calls_is_no_list_of_calls() -> None:
    (message,) = for_template([{"role": "assistant", "content": "Hi", "tool_calls": []}])
    assert "tool_calls" not in message

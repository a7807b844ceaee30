"""Chapter 53's automaton agrees with Python's `re` and with llguidance, and runs in the engine."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen import LLM, SamplingParams
from minigen.errors import GrammarError, ParamsError
from minigen.sampling.grammar import LLGuidanceBackend
from minigen.sampling.processors import TokenMatcher
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer
from minigen_course.ch53_structured_output import lesson
from minigen_course.ch53_structured_output.automaton import (
    NOTHING,
    Automaton,
    AutomatonBackend,
    StateMatcher,
    automaton_of,
    byte_groups,
    derivative,
    either,
    parse,
    star,
    text,
    then,
)

PATTERNS = (
    *("", "abc", "a|bc|", "(ab|a)(bc|c)?", "a*b*", "(a|b)*abb", "[a-c]{2,3}", "[^a]b?"),
    *("a{2}", "(ab){1,}", r"a\.b", ".", "é|b", "[^b]{0,2}é", r"(\n|\x61)+", "((a))", "a{0}"),
)
VOCAB, END_IDS = 49152, [2]  # SmolLM2's


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_automaton_matches_what_re_matches(pattern: str, data: st.DataObject) -> None:
    automaton = automaton_of(parse(pattern))
    near = st.from_regex(pattern, fullmatch=True)
    drawn = data.draw(st.one_of(near, st.text("abcé.\n", max_size=5)))
    assert automaton.matches(drawn.encode()) == (re.fullmatch(pattern, drawn) is not None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_state_can_reach_an_end(pattern: str) -> None:
    automaton = automaton_of(parse(pattern))
    alive = set(automaton.ends)
    for _ in automaton.moves:
        alive |= {
            state for state, moves in enumerate(automaton.moves) if alive & set(moves.values())
        }
    assert alive == set(range(len(automaton.moves)))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "has no )"),
        ("[a", "has no ]"),
        ("a)", "has no meaning here"),
        ("*a", "nothing to repeat"),
        ("a{x}", "followed by a count"),
        ("[é]", "ASCII characters only"),
        (r"\d", "is not known here"),
        ("a\\", "is not known here"),
        ("^a", "the whole text"),
        ("a$", "the whole text"),
        ("a{3,2}", "upside down"),
        ("a{0,301}", "at most"),
        (r"\xg1", "hexadecimal"),
    ],
)
def test_a_pattern_that_it_does_not_know_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(pattern)


def test_an_automaton_has_a_limit() -> None:
    with pytest.raises(ValueError, match="more than 5,000 states"):
        automaton_of(parse("(a|b)*a(a|b){13}"))


def test_bytes_in_a_group_have_the_same_derivatives() -> None:
    regex = parse('"[^"a-c]*"|[0-9]é')
    groups = byte_groups(regex)
    assert sorted(byte for group in groups for byte in group) == list(range(256))
    assert len(groups) < 30
    for group in groups:
        assert len({derivative(regex, byte) for byte in group}) == 1


def test_regexes_are_simplified() -> None:
    a, b = text("a"), text("b")
    assert then(a, NOTHING, b) == NOTHING
    assert either(a, NOTHING) == either(a, a) == a
    assert either(a, either(b, a)) == either(b, a)
    assert star(star(a)) == star(a)
    assert then(a, then(b, a)) == then(then(a, b), a)


@pytest.fixture(scope="module")
def backends(default_model_path: Path) -> tuple[AutomatonBackend, LLGuidanceBackend]:
    llm = LLM.load(default_model_path, weights="float32", num_blocks=32)
    return (
        AutomatonBackend(llm.tokenizer, VOCAB, END_IDS),
        LLGuidanceBackend(llm.tokenizer, VOCAB, END_IDS),
    )


WITNESSED = (
    *("[0-9]{3}-[a-z]{2}", "yes|no|maybe", '"[^"\\\\]{0,20}"', "(a|b)*c", ".{1,5}é?"),
    *("-?(0|[1-9][0-9]*)(\\.[0-9]+)?", "(ab|a)(bc|c)?", "[^a]+", "日本(語)?.*", "(é|è)+"),
    *(lesson.pattern_of_schema(lesson.SCHEMA), lesson.tool_pattern(), lesson.nested_pattern(3)),
)


@pytest.mark.model
@pytest.mark.parametrize("pattern", WITNESSED)
def test_masks_are_those_of_llguidance_on_the_real_vocabulary(
    pattern: str, backends: tuple[AutomatonBackend, LLGuidanceBackend]
) -> None:
    """Where bytes are forced, llguidance allows only the tokenizer's own way to spell them."""
    mine, witness = backends
    params = StructuredOutputsParams(regex=pattern)
    compared = 0
    for seed in range(4):
        one, other = mine.compile(params), witness.compile(params)
        for own, its in lesson.walk(one, other, seed, 40):
            state = one.states[-1]
            if lesson.forced_text(one.masks.automaton, state):
                assert not (its & ~own).any()
                assert its.any()
            else:
                assert np.array_equal(own, its)
                compared += 1
    assert compared >= 4


@pytest.mark.model
def test_it_runs_in_the_engine(default_model_path: Path) -> None:
    llm = LLM.load(
        default_model_path, weights="float32", num_blocks=64, grammar_backend=AutomatonBackend
    )
    form = {"regex": lesson.pattern_of_schema(lesson.SCHEMA)}
    params = SamplingParams(n=3, seed=1, max_tokens=70, structured_outputs=form)
    asked = llm.chat_prompt(lesson.orders(1)[0].messages)
    answers = llm.generate(asked, params).choices
    ended = [each.text for each in answers if each.finish_reason == "stop"]
    assert ended
    assert all(map(lesson.validates, ended))
    chosen = llm.generate(
        "Yes or no?", SamplingParams(max_tokens=5, structured_outputs={"choice": ["a.b", "c"]})
    )
    assert chosen.text in ("a.b", "c")
    with pytest.raises(ParamsError, match="An automaton cannot follow json"):
        llm.generate("a", SamplingParams(structured_outputs={"json": lesson.SCHEMA}))
    with pytest.raises(ParamsError, match="has no"):
        llm.generate("a", SamplingParams(structured_outputs={"regex": "(a"}))


class Words(Tokenizer):
    """A tokenizer of a few words."""

    special_ids = frozenset({0})

    def __init__(self, *words: str):
        self.words = [b"<end>", *(each.encode() for each in words)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]


def matcher_of(pattern: str, *words: str) -> StateMatcher:
    tokenizer: Any = Words(*words)
    backend = AutomatonBackend(tokenizer, len(words) + 1, [0])
    found: StateMatcher = backend.compile(StructuredOutputsParams(regex=pattern))
    return found


def test_a_special_token_is_never_spelled() -> None:
    matcher = matcher_of("<end>.*", "<", "end>")
    assert np.flatnonzero(matcher.allowed()).tolist() == [1]
    matcher.accept(1)
    matcher.accept(2)
    assert np.flatnonzero(matcher.allowed()).tolist() == [0, 1, 2]


def test_a_matcher_is_the_engines_and_refuses_what_is_forbidden() -> None:
    matcher = matcher_of("ab", "a", "b")
    assert isinstance(matcher, TokenMatcher)
    with pytest.raises(GrammarError, match="token 2 is not allowed"):
        matcher.accept(2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_a_schemas_pattern_matches_is_valid(data: st.DataObject) -> None:
    pattern = lesson.pattern_of_schema(lesson.SCHEMA)
    drawn = data.draw(st.from_regex(pattern, fullmatch=True))
    jsonschema.validate(json.loads(drawn), lesson.SCHEMA)


@cache
def schema_automaton() -> Automaton:
    return automaton_of(parse(lesson.pattern_of_schema(lesson.SCHEMA)))


@settings(max_examples=40, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(lesson.SIZES),
    st.integers(-999_999_999, 999_999_999),
)
def test_a_schemas_pattern_matches_what_json_writes(drink: str, size: str, quantity: int) -> None:
    written = json.dumps({"drink": drink, "size": size, "quantity": quantity}, ensure_ascii=False)
    by_u = any(each < " " and each not in "\n\t\r\b\f" for each in drink)
    found = schema_automaton().matches(written.encode())
    assert found is not by_u, "an escape by number is not allowed"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"n": {"type": "integer", "minimum": 1}}}, "'n' has minimum"),
        ({"properties": {"n": {"enum": [1], "type": "string"}}}, "'n' has type"),
        ({"properties": {}, "minProperties": 1}, "The schema has minProperties"),
        ({"properties": {"n": {"type": "array"}}}, "neither flat"),
    ],
    ids=str,
)
def test_what_a_schemas_pattern_would_not_keep_is_refused_by_name(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        lesson.pattern_of_schema(schema)


def test_a_stack_and_an_automaton_agree_up_to_a_depth() -> None:
    automaton = automaton_of(parse(lesson.nested_pattern(2)))
    for written, is_value in {
        **{"x": True, "[x{x}[]]": True, "{[][]}": True, "": False, "xx": False, "[": False},
        **{"[}": False, "[[[x]]]": False},
    }.items():
        assert automaton.matches(written.encode()) is is_value, written
        due: str | None = "v"
        for character in written:
            due = None if due is None else lesson.still_due(due, character)
        assert (due == "") is (is_value or written == "[[[x]]]"), written


@pytest.mark.parametrize(("text", "depth"), [("x", 0), ("[x]", 1), ("[{x}[]]", 2), ("[{[", 3)])
def test_the_deepest_place_of_a_value_is_found(text: str, depth: int) -> None:
    assert lesson.deepest(text) == depth


def test_states_double_with_the_depth() -> None:
    sizes = [len(automaton_of(parse(lesson.nested_pattern(depth))).moves) for depth in range(5)]
    assert sizes == [2, 4, 8, 16, 32]


def test_forced_pieces_add_up_to_the_answer(default_model_path: Path) -> None:
    tokenizer = LLM.load(default_model_path, weights="float32", num_blocks=8).tokenizer
    automaton = automaton_of(parse(lesson.pattern_of_schema(lesson.SCHEMA)))
    answer = '{"drink": "green tea", "size": "small", "quantity": 12}'
    found = lesson.pieces(tokenizer.encode(answer), automaton, tokenizer, [2])
    assert b"".join(each.text for each in found).decode() == answer
    forced = b"".join(each.text for each in found if each.forced)
    assert forced == b'{"drink": "size":", "quantity":'
    assert all(each.num_tokens == 1 for each in found if not each.forced)


def test_orders_are_different_and_judged() -> None:
    some = lesson.orders(48)
    assert len({each.text for each in some}) == 48
    one = some[0]
    right = json.dumps({"drink": one.drink, "size": one.size, "quantity": one.quantity})
    assert lesson.validates(right)
    assert lesson.is_right(right, one)
    assert not lesson.is_right(right, some[1])
    assert not lesson.is_right("tea", one)
    half = json.dumps({"drink": f"Cold {one.drink.title()}", "size": "none"})
    assert lesson.right_fields(half, one) == {"drink": True, "size": False, "quantity": False}
    assert not lesson.is_right("[1]", one)
    assert not lesson.validates('{"drink": "tea"}')
    assert lesson.parsed("{") is None


def test_shares_and_times_are_measured(tiny_llm: LLM) -> None:
    (share,) = lesson.digit_share(tiny_llm, [[3, 4]], [5])
    assert 0 < share < 1
    assert lesson.digit_share(tiny_llm, [[3, 4, 3], [3, 4]], [5])[1] == pytest.approx(share)
    few, more = (SamplingParams(max_tokens=each, ignore_eos=True) for each in (1, 12))
    assert lesson.times_as_long(tiny_llm, ["ab"], few, more, repeats=3) > 1


def test_a_share_of_tries_is_counted() -> None:
    found = lesson.Tries([4, 3, 1, 1], 100)
    assert found.share == 3 / 8

"""Checks of chapter 53: derivatives, the walk, the matcher, schemas, a stack, forced text."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from minigen.errors import GrammarError
from minigen_course.ch53_structured_output.automaton import (
    EMPTY,
    NOTHING,
    Automaton,
    Masks,
    Regex,
    Trie,
    automaton_of,
    may_end,
    parse,
    text,
    trie_of,
)
from minigen_course.grading.exercise import expect, expect_equal, of_pure_part

StillDue = Callable[[str, str], str | None]
Derivative = Callable[[Regex, int], Regex]
AllowedTokens = Callable[[Trie, Automaton, int], list[int]]
PatternOfSchema = Callable[[Mapping[str, Any]], str]
ForcedText = Callable[[Automaton, int], bytes]


def the_first_value(part: StillDue) -> None:
    """the first character, when one value is due:"""
    for character, right in {"x": "", "[": "]", "{": "}", "]": None, "}": None}.items():
        expect_equal(part("v", character), right, f"due 'v', then {character!r}")


def inside_brackets(part: StillDue) -> None:
    """inside of brackets:"""
    for due, character, right in (
        *(("]", "x", "]"), ("]", "[", "]]"), ("]", "{", "]}"), ("]", "]", "")),
        *(("]}", "x", "]}"), ("]}", "[", "]}]"), ("]}", "}", "]"), ("}", "}", "")),
    ):
        expect_equal(part(due, character), right, f"due {due!r}, then {character!r}")


def the_wrong_bracket_is_forbidden(part: StillDue) -> None:
    """a bracket that closes another one than the last that was opened:"""
    for due, character in (("]", "}"), ("}", "]"), ("]}", "]"), ("}]", "}")):
        expect_equal(part(due, character), None, f"due {due!r}, then {character!r}")


def nothing_follows_a_complete_value(part: StillDue) -> None:
    """nothing is due any more:"""
    for character in "x[]{}":
        expect_equal(part("", character), None, f"due '', then {character!r}")


def other_characters_are_forbidden(part: StillDue) -> None:
    """characters of no value:"""
    for due, character in itertools.product(("v", "]", "}]"), "v ,y("):
        expect_equal(part(due, character), None, f"due {due!r}, then {character!r}")


# Derivatives


def _after(part: Derivative, pattern: str, seen: bytes) -> Regex:
    found = parse(pattern)
    for byte in seen:
        found = part(found, byte)
    return found


def _expect_matches(part: Derivative, pattern: str, texts: str) -> None:
    """Expect of some texts (divided by blanks) that they match as Python's `re` says."""
    for each in ["", *texts.split()]:
        rest = _after(part, pattern, each.encode())
        right = re.fullmatch(pattern, each) is not None
        what = f"whether {pattern!r} matches {each!r}, by derivatives"
        expect_equal(may_end(rest), right, what)


def one_byte(part: Derivative) -> None:
    """one byte, out of a set:"""
    for pattern, byte, right in (("a", b"a", EMPTY), ("a", b"b", NOTHING), ("[ab]", b"b", EMPTY)):
        found = part(parse(pattern), byte[0])
        expect(found == right, f"{pattern!r} by {byte!r}: got {found}; it should be {right}.")


def bytes_one_after_another(part: Derivative) -> None:
    """a text:"""
    for seen, rest in ((b"n", "o"), (b"no", "")):
        found = _after(part, "no", seen)
        expect(found == text(rest), f"'no' after {seen!r}: got {found}; it should be {text(rest)}.")
    expect(_after(part, "no", b"o") == NOTHING, "'no' by b'o' should be NOTHING.")
    _expect_matches(part, "abc", "a ab abc abcd ac bc")


def one_of_several(part: Derivative) -> None:
    """alternatives:"""
    _expect_matches(part, "yes|no|yet", "y ye yes yet no n ne yesno")
    found = part(parse("yes|no"), ord("y"))
    expect(found == text("es"), f"'yes|no' by b'y': got {found}; it should be {text('es')}.")


def any_number_of_times(part: Derivative) -> None:
    """stars:"""
    _expect_matches(part, "(ab)*", "a ab aba abab ba")
    _expect_matches(part, "a*", "a aa aaa b ab")


def parts_that_may_be_empty(part: Derivative) -> None:
    """a part that may be empty, and what follows it:"""
    _expect_matches(part, "a*b", "b ab aab a ba bb")
    _expect_matches(part, "a?b?c?d", "d cd bd ad acd abcd dd ba")
    _expect_matches(part, "-?[1-9][0-9]*", "- 1 -1 -10 01 --1 5-")


def both_ways_of_an_empty_part(part: Derivative) -> None:
    """a byte that may belong to either of two parts:"""
    _expect_matches(part, "a?a", "a aa aaa")
    _expect_matches(part, "(ab|a)(bc|c)?", "a ab abc abbc ac abcc")
    _expect_matches(part, "(a|b)*ab", "ab aab abab aba b bbab")


def characters_of_several_bytes(part: Derivative) -> None:
    """characters beyond ASCII, byte by byte:"""
    _expect_matches(part, "é|ê", "é ê è e")
    _expect_matches(part, '[^"]{2}', 'ab aé éé éa a"')


# The walk


class _Counted(dict[int, Any]):
    """Children that count how often they are looked at, whole or one by one."""

    visits = 0

    def _seen(self) -> None:
        _Counted.visits += 1

    def items(self) -> Any:
        self._seen()
        return super().items()

    def keys(self) -> Any:
        self._seen()
        return super().keys()

    def values(self) -> Any:
        self._seen()
        return super().values()

    def __iter__(self) -> Iterator[int]:
        self._seen()
        return super().__iter__()


def _vocabulary(*words: str | bytes) -> dict[int, bytes]:
    """Return token ids, from 10 on in steps of 3, with their spellings."""
    made = (each.encode() if isinstance(each, str) else each for each in words)
    return {10 + 3 * place: each for place, each in enumerate(made)}


def _expect_walk(part: AllowedTokens, pattern: str, seen: bytes, words: dict[int, bytes]) -> None:
    automaton = automaton_of(parse(pattern))
    state = automaton.after(seen)
    assert state is not None
    found = part(trie_of(words), automaton, state)
    expect(
        isinstance(found, list | tuple | set | frozenset),
        f"returned {type(found).__name__}; return a list of ids.",
    )
    right = [i for i, each in words.items() if automaton.after(each, state) is not None]
    what = f"the tokens allowed by {pattern!r} after {seen!r}"
    expect_equal([words.get(i, i) for i in sorted(found)], [words[i] for i in right], what)


WORDS = _vocabulary("a", "b", "ab", "abc", "ba", "c", "yes", "ye", "no", "yet", "aa")


def tokens_of_one_byte(part: AllowedTokens) -> None:
    """a vocabulary of single bytes:"""
    _expect_walk(part, "[ab]c", b"", _vocabulary("a", "b", "c", "d"))
    _expect_walk(part, "[ab]c", b"a", _vocabulary("a", "b", "c", "d"))


def tokens_of_several_bytes(part: AllowedTokens) -> None:
    """tokens of several bytes, and tokens that begin like others:"""
    _expect_walk(part, "yes|no", b"", WORDS)
    _expect_walk(part, "abc?", b"", WORDS)
    _expect_walk(part, "(ab)*", b"", WORDS)


def from_any_state(part: AllowedTokens) -> None:
    """a state in the middle, and one in which nothing may follow:"""
    _expect_walk(part, "yes|no", b"y", _vocabulary("e", "es", "ess", "n", "s", "o"))
    _expect_walk(part, "yes|no", b"yes", WORDS)


def characters_that_are_split(part: AllowedTokens) -> None:
    """tokens that end inside of a character:"""
    _expect_walk(part, "é+", b"", _vocabulary(b"\xc3", b"\xa9", "é", b"\xc3\xa9\xc3", b"\xc3\xaa"))
    _expect_walk(part, "é+", b"\xc3", _vocabulary(b"\xc3", b"\xa9", "é", b"\xa9\xc3"))


def two_tokens_of_one_spelling(part: AllowedTokens) -> None:
    """two tokens with the same bytes:"""
    _expect_walk(part, "a|b", b"", _vocabulary("a", "a", "b", "c"))


def dead_branches_are_not_visited(part: AllowedTokens) -> None:
    """1,000 tokens behind a forbidden byte:"""
    words = _vocabulary("ok", "o", *(f"z{number:03}" for number in range(1000)))
    trie = trie_of(words)
    todo = [trie]
    while todo:
        node = todo.pop()
        node.children = _Counted(node.children)
        todo += dict.values(node.children)
    _Counted.visits = 0
    found, visits = part(trie, automaton_of(parse("o[a-k]*")), 0), _Counted.visits
    expect_equal(sorted(found), [10, 13], "the allowed tokens")
    expect(visits <= 12, f"{visits:,} nodes were visited; it should be 3: the root, o and ok.")


# The matcher

END = 1


def _masks(pattern: str, *words: str) -> Masks:
    spellings = dict(enumerate((each.encode() for each in words), 2))
    return Masks(automaton_of(parse(pattern)), trie_of(spellings), spellings, [END], 2 + len(words))


def _expect_allowed(matcher: Any, right: list[int], what: str) -> None:
    found = matcher.allowed()
    expect(
        isinstance(found, np.ndarray) and found.dtype == bool,
        f"{what}: got {type(found).__name__}; return an array of bool.",
    )
    expect_equal(np.flatnonzero(found).tolist(), right, what)


def tokens_of_the_state(part: Any) -> None:
    """what is allowed along an answer (token 1 is the end token, 2 is 'a', 3 is 'b'):"""
    matcher = part(_masks("ab", "a", "b", "ab"))
    _expect_allowed(matcher, [2, 4], "the tokens allowed by 'ab' at first")
    matcher.accept(2)
    _expect_allowed(matcher, [3], "the tokens allowed by 'ab' after 'a'")
    matcher.accept(3)
    _expect_allowed(matcher, [END], "the tokens allowed by 'ab' after 'ab'")
    other = part(_masks("abc", "ab", "c"))
    other.accept(2)
    _expect_allowed(other, [3], "the tokens allowed by 'abc' after the one token 'ab'")


def an_end_where_the_text_may_go_on(part: Any) -> None:
    """where the answer may end, and may also go on:"""
    matcher = part(_masks("a*", "a", "b"))
    for count in range(3):
        _expect_allowed(matcher, [END, 2], f"the tokens allowed by 'a*' after {count} times 'a'")
        matcher.accept(2)


def after_the_end(part: Any) -> None:
    """an end token is accepted:"""
    matcher = part(_masks("a*b", "a", "b"))
    matcher.accept(3)
    matcher.accept(END)
    _expect_allowed(matcher, [END], "the tokens allowed by 'a*b' after 'b' and an end")
    matcher.roll_back(1)
    matcher.roll_back(1)
    _expect_allowed(matcher, [2, 3], "the tokens allowed by 'a*b' after both are taken back")


def forbidden_tokens_are_refused(part: Any) -> None:
    """a token that is not allowed:"""
    matcher = part(_masks("ab", "a", "b"))
    for token in (0, 3, END):
        try:
            matcher.accept(token)
        except GrammarError:
            pass
        else:
            expect(False, f"token {token} was accepted; it should raise GrammarError.")
        _expect_allowed(matcher, [2], f"the tokens allowed after token {token} was refused")


def tokens_are_taken_back(part: Any) -> None:
    """a roll back by 0, 1 and 2 tokens:"""
    for count, right in ((0, [END]), (1, [4]), (2, [3])):
        matcher = part(_masks("abc", "a", "b", "c"))
        for token in (2, 3, 4):
            matcher.accept(token)
        matcher.roll_back(count)
        _expect_allowed(matcher, right, f"the tokens allowed by 'abc', {count} of 3 taken back")


def masks_are_shared_and_unchanged(part: Any) -> None:
    """the masks, which all answers share:"""
    masks = _masks("a*", "a", "b")
    part(masks).allowed()[:] = True
    part(masks).allowed()
    expect_equal(np.flatnonzero(masks[0]).tolist(), [2], "the shared mask, which must not change")


def a_fork_is_separate(part: Any) -> None:
    """a fork after one token, then another token in each:"""
    first = part(_masks("a(b|c)d", "a", "b", "c", "d"))
    first.accept(2)
    second = first.fork()
    expect(isinstance(second, part), "fork must return a matcher of the same class.")
    first.accept(3)
    _expect_allowed(second, [3, 4], "the tokens allowed in the fork after the other went on")
    second.accept(4)
    second.roll_back(2)
    _expect_allowed(second, [2], "the tokens allowed in the fork after two tokens are taken back")
    _expect_allowed(first, [5], "the tokens allowed in the first after the fork went back")


def _expect_pattern(
    part: PatternOfSchema, properties: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    pattern = part({"type": "object", "properties": properties})
    expect(isinstance(pattern, str), f"returned {type(pattern).__name__}; return a text.")
    automaton = automaton_of(parse(pattern))
    for each in valid:
        expect(automaton.matches(each.encode()), f"{pattern!r} should match {each!r}.")
    for each in invalid:
        expect(not automaton.matches(each.encode()), f"{pattern!r} should not match {each!r}.")


def _one(*values: str) -> list[str]:
    return [f'{{"a": {each}}}' for each in values]


def names_and_separators(part: PatternOfSchema) -> None:
    """names, their order, and what stands between them:"""
    null = {"type": "null"}
    three = {"b": null, "a": null, "c.d": null}
    right = json.dumps(dict.fromkeys(three))
    wrong = [right.replace(" ", ""), '{"a": null, "b": null, "c.d": null}', right.replace(".", "x")]
    wrong += ["{}", '{"b": null}', right + " ", right.replace(", ", " ,"), right[1:-1]]
    _expect_pattern(part, three, [right], wrong)
    _expect_pattern(part, {"a b*": null}, ['{"a b*": null}'], ['{"a bb": null}', '{"a b": null}'])
    _expect_pattern(part, {'say "a"': null}, ['{"say \\"a\\"": null}'], ['{"say "a"": null}'])
    _expect_pattern(part, {"é": null}, ['{"é": null}'], [json.dumps({"é": None}), '{"e": null}'])


def integers(part: PatternOfSchema) -> None:
    """integers:"""
    right = _one("0", "7", "10", "-1", "-20", "123456789", "-123456789", "9", "19")
    wrong = _one("", "00", "01", "-0", "-01", "1.5", "1e3", '"1"', "+1", "1234567890", "--1", "-")
    _expect_pattern(part, {"a": {"type": "integer"}}, right, wrong)


def strings(part: PatternOfSchema) -> None:
    """strings:"""
    right = _one('""', '"tea"', '"é日"', r'"a\"b"', r'"\\"', r'"\n\t\/\b\f\r"', f'"{90 * "a"}"')
    wrong = _one('"', "tea", '"a"b"', r'"\"', r'"\x"', '"a\nb"', '"a\x1fb"', '"\x00"', "'a'")
    _expect_pattern(part, {"a": {"type": "string"}}, right, [*wrong, '{"a": "x", "b": 1}'])


def short_strings(part: PatternOfSchema) -> None:
    """strings with a largest length:"""
    three = {"a": {"type": "string", "maxLength": 3}}
    right = _one('""', '"a"', '"abc"', '"éé日"', r'"\"\\\n"')
    _expect_pattern(part, three, right, _one('"abcd"', r'"\n\n\n\n"', '"éééé"'))
    _expect_pattern(part, {"a": {"type": "string", "maxLength": 0}}, _one('""'), _one('"a"'))


def enums_and_booleans(part: PatternOfSchema) -> None:
    """an enum, a boolean and null:"""
    sizes = {"a": {"enum": ["small", "l.", 3, None, "é"]}}
    wrong = _one('"sm"', '"lx"', "small", '"3"', "33", '"small"3', json.dumps("é"))
    _expect_pattern(part, sizes, _one('"small"', '"l."', "3", "null", '"é"'), wrong)
    right = _one("true", "false")
    wrong = _one("True", "t", "null", '"true"')
    _expect_pattern(part, {"a": {"type": "boolean"}}, right, wrong)
    both = {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}
    right = ['{"a": 1, "b": true}', '{"a": 2, "b": false}']
    _expect_pattern(part, both, right, ['{"a": 1', '2, "b": true}', '{"a": 1, "b": true'])


def _expect_refused(part: PatternOfSchema, *schemas: dict[str, Any]) -> None:
    for each in schemas:
        try:
            found = part({"properties": {"a": {"type": "null"}, "b": each}})
        except ValueError:
            continue
        expect(False, f"for {each} it returned {found!r}; it should raise ValueError.")


def what_is_not_flat_is_refused(part: PatternOfSchema) -> None:
    """a property that is an object, an array, a reference, or has no type:"""
    nested = {"type": "object", "properties": {}}
    _expect_refused(part, nested, {"type": "array"}, {"$ref": "#"}, {})


def what_would_not_be_kept_is_refused(part: PatternOfSchema) -> None:
    """a keyword that the regex would not keep:"""
    text, number = {"type": "string"}, {"type": "integer"}
    _expect_refused(part, number | {"minimum": 3}, number | {"multipleOf": 5})
    _expect_refused(part, text | {"minLength": 2}, text | {"pattern": "^a"})
    _expect_refused(part, text | {"maxLength": 4, "minLength": 4}, {"enum": [1, 2], "maximum": 1})


def _expect_forced(part: ForcedText, pattern: str, seen: str, right: str) -> None:
    automaton = automaton_of(parse(pattern))
    state = automaton.after(seen.encode())
    assert state is not None
    found = part(automaton, state)
    expect(isinstance(found, bytes | bytearray), f"returned {type(found).__name__}; return bytes.")
    what = f"the forced bytes of {pattern!r} after {seen!r}"
    expect_equal(bytes(found), right.encode(), what)


def up_to_a_choice(part: ForcedText) -> None:
    """forced bytes up to a choice:"""
    for pattern, seen, right in (
        *(("abc", "", "abc"), ("abc", "ab", "c"), ("ab[cd]e", "", "ab"), ("ab[cd]e", "abc", "e")),
        *(("yes|no", "", ""), ("yes|no", "n", "o"), ("yes|yet", "", "ye")),
        ("(tea|tee)s", "t", "e"),
    ):
        _expect_forced(part, pattern, seen, right)


def an_end_is_a_choice(part: ForcedText) -> None:
    """a text that may end, or go on:"""
    for pattern, seen, right in (
        *(("ab(cd)?", "", "ab"), ("ab(cd)?", "abc", "d"), ("a*", "", ""), ("ab*", "", "a")),
        *(("ab*", "ab", ""), ("one(two)*", "", "one"), ("one(two)*", "onet", "wo")),
    ):
        _expect_forced(part, pattern, seen, right)


def nothing_may_follow(part: ForcedText) -> None:
    """the end of the text:"""
    _expect_forced(part, "abc", "abc", "")
    _expect_forced(part, "yes|no", "yes", "")


def beyond_ascii(part: ForcedText) -> None:
    """a character of several bytes, and two that begin with the same byte:"""
    _expect_forced(part, "é!", "", "é!")
    found = part(automaton_of(parse("é|ê")), 0)
    expect_equal(bytes(found), b"\xc3", "the forced bytes of 'é|ê'")


CHECKS = {
    "still_due": (
        the_first_value,
        inside_brackets,
        the_wrong_bracket_is_forbidden,
        nothing_follows_a_complete_value,
        other_characters_are_forbidden,
    ),
    "derivative": (
        one_byte,
        bytes_one_after_another,
        one_of_several,
        any_number_of_times,
        parts_that_may_be_empty,
        both_ways_of_an_empty_part,
        characters_of_several_bytes,
    ),
    "allowed_tokens": (
        tokens_of_one_byte,
        tokens_of_several_bytes,
        from_any_state,
        characters_that_are_split,
        two_tokens_of_one_spelling,
        dead_branches_are_not_visited,
    ),
    "StateMatcher": (
        tokens_of_the_state,
        an_end_where_the_text_may_go_on,
        after_the_end,
        forbidden_tokens_are_refused,
        tokens_are_taken_back,
        masks_are_shared_and_unchanged,
        a_fork_is_separate,
    ),
    "pattern_of_schema": of_pure_part(
        names_and_separators,
        integers,
        strings,
        short_strings,
        enums_and_booleans,
        what_is_not_flat_is_refused,
        what_would_not_be_kept_is_refused,
    ),
    "forced_text": (up_to_a_choice, an_end_is_a_choice, nothing_may_follow, beyond_ascii),
}

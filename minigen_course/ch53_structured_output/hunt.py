"""Bug hunt of chapter 53: a form that a model may fill with blanks for ever."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from minigen_course.grading.exercise import expect
from minigen_course.grading.hunt import Hunt

ObjectPattern = Callable[[list[str]], str]


def object_pattern(names: list[str]) -> str:
    """Return a regex for a JSON object that has a whole number for each name, in this order.

    A space is allowed after each colon and comma, and the compact text without any blank as well.
    At most 16 blanks (spaces or line ends) in a row may stand anywhere.
    """
    blanks = r"[ \n]*"
    fields = (f'"{re.escape(name)}"{blanks}:{blanks}(0|[1-9][0-9]{{0,5}})' for name in names)
    return rf"\{{{blanks}" + f"{blanks},{blanks}".join(fields) + rf"{blanks}\}}"


def test_blanks(object_pattern: ObjectPattern) -> None:
    """Assert what every correct `object_pattern` does, and the one above does not."""
    for names in (["a"], ["width", "height"]):
        pattern = re.compile(object_pattern(names))
        numbers = dict.fromkeys(names, 7)
        compact, spaced = json.dumps(numbers, separators=(",", ":")), json.dumps(numbers)
        assert pattern.fullmatch(compact)
        assert pattern.fullmatch(spaced)
        for place, blank in itertools.product(range(len(compact) + 1), (" ", "\n")):
            padded = compact[:place] + blank * 1000 + compact[place:]
            assert not pattern.fullmatch(padded)


def _right_pattern(names: list[str]) -> str:
    blanks = r"( |\n {0,8})?"
    fields = (f'"{re.escape(name)}":{blanks}(0|[1-9][0-9]{{0,5}})' for name in names)
    return rf"\{{{blanks}" + f",{blanks}".join(fields) + rf"{blanks}\}}"


def _compact_or_one_space(names: list[str]) -> str:
    fields = (f'"{re.escape(name)}": ?(0|[1-9][0-9]{{0,5}})' for name in names)
    return r"\{" + ", ?".join(fields) + r"\}"


def _few_blanks(names: list[str]) -> str:
    blanks = r"[ \n]{0,16}"
    fields = (f'"{re.escape(name)}"{blanks}:{blanks}(0|[1-9][0-9]{{0,5}})' for name in names)
    return rf"\{{{blanks}" + f"{blanks},{blanks}".join(fields) + rf"{blanks}\}}"


def _with(start: str, colon: str, comma: str, end: str) -> ObjectPattern:
    """Return a part with its own regexes of blanks: after {, :, and comma, and before }."""

    def part(names: list[str]) -> str:
        fields = (f'"{re.escape(name)}":{colon}(0|[1-9][0-9]{{0,5}})' for name in names)
        return rf"\{{{start}" + f",{comma}".join(fields) + rf"{end}\}}"

    return part


_LINES = r"(\n {0,8})*"  # any number of lines, each of them short


def _runs(text: str) -> Iterator[str]:
    for place, blank in itertools.product(range(len(text) + 1), (" ", "\n", " \n", "\n ")):
        yield text[:place] + blank * 17 + text[place:]


def no_run_of_blanks_is_long(part: Any) -> None:
    """17 blanks at each place of an object:"""
    for names in (["a"], ["a", "b"], ["x", "y", "z"]):
        pattern = re.compile(part(names))
        for text in _runs(json.dumps(dict.fromkeys(names, 10), separators=(",", ":"))):
            expect(
                not pattern.fullmatch(text),
                f"{pattern.pattern!r} matches {text!r}, but should not: 16 blanks are the most.",
            )


def objects_are_matched_as_before(part: Any) -> None:
    """compact objects, with a space after colon and comma, and texts that are no such object:"""
    for names in (["a"], ["a", "b"], ["a.b", "c"]):
        pattern = re.compile(part(names))
        for number in (0, 7, 120_000):
            found = dict.fromkeys(names, number)
            for text in (json.dumps(found), json.dumps(found, separators=(",", ":"))):
                expect(pattern.fullmatch(text), f"{pattern.pattern!r} should match {text!r}.")
        for text in ("", "{}", '{"a": 01}', '{"b": 1, "a": 1}', '{"a": 1,}', '{"axb": 1, "c": 1}'):
            expect(not pattern.fullmatch(text), f"{pattern.pattern!r} should not match {text!r}.")


HUNT = Hunt(
    "object_pattern",
    object_pattern,
    test_blanks,
    _right_pattern,
    {
        "a compact one, with at most one space": _compact_or_one_space,
        "one with up to 16 blanks at every place": _few_blanks,
    },
    {
        "allows endless blanks after the opening brace": _with("[ \n]*", " ?", " ?", ""),
        "allows endless blanks before the closing brace": _with("", " ?", " ?", "[ \n]*"),
        "allows endless blanks between a comma and the next name": _with("", " ?", "[ \n]*", ""),
        "allows any number of line ends": _with(_LINES, " ?", " ?", _LINES),
        "allows any number of spaces after a colon": _with("", " *", " ?", ""),
        "allows no space after a comma": _with("", " ?", "", ""),
        "demands a space after a colon": _with("", " ", " ?", ""),
    },
    (no_run_of_blanks_is_long, objects_are_matched_as_before),
    (
        "A regex matches 1,000 blanks wherever it has a * over them. How many such places are "
        "there?",
        "Build a valid compact object, and put many blanks into each of its places in turn, also "
        "the first and the last. None of these texts may match.",
        "Blanks are spaces and line ends: try both. And a test that only forbids would pass a "
        "regex that matches nothing: assert that good objects with one and with two names still "
        "match, with a space after each colon and comma, and without.",
    ),
    "**The report.** *Some answers run into `max_tokens`. They begin as valid JSON, then come "
    "blanks and line ends until the limit, and the JSON is never closed. It depends on the prompt: "
    "most answers are fine.* The grammar allowed any number of blanks between two tokens of JSON, "
    "so a model that would rather write something else could write blanks for ever, and each of "
    "them was legal (vLLM's issue 38696; oMLX's issue 2990 counted 60 of 262 calls in a night).",
    minutes=20,
)

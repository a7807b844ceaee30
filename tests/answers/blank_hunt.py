"""Tests and parts that learners might hand in for chapter 53's hunt."""

import json
import re
from typing import Any

from minigen_course.ch53_structured_output import hunt

TWO = '{"a":1,"b":2}'


def by_runs(part: Any) -> None:
    pattern = re.compile(part(["a", "b"]))
    assert pattern.fullmatch(TWO)
    assert pattern.fullmatch('{"a": 1, "b": 2}')
    for place in range(len(TWO) + 1):
        for blanks in (" " * 100, "\n" * 100):
            assert not pattern.fullmatch(TWO[:place] + blanks + TWO[place:])


def by_the_longest_match(part: Any) -> None:
    pattern = re.compile(part(["n", "m"]))
    for good in ('{"n":5,"m":60}', '{"n": 5, "m": 60}'):
        assert pattern.fullmatch(good) is not None
    for sign in '{:,}"nm':
        for blank in (" ", "\n"):
            before = '{"n":5,"m":60}'.replace(sign, blank * 50 + sign)
            after = '{"n":5,"m":60}'.replace(sign, sign + blank * 50)
            assert pattern.fullmatch(before) is None
            assert pattern.fullmatch(after) is None


def _expect_good(pattern: Any, text: str) -> None:
    assert pattern.fullmatch(text)
    assert pattern.fullmatch(json.dumps(json.loads(text)))


def after_the_colon_only(part: Any) -> None:
    pattern = re.compile(part(["a", "b"]))
    _expect_good(pattern, TWO)
    assert not pattern.fullmatch(TWO.replace(":", ":" + " " * 100))


def spaces_only(part: Any) -> None:
    pattern = re.compile(part(["a", "b"]))
    _expect_good(pattern, TWO)
    for place in range(len(TWO) + 1):
        assert not pattern.fullmatch(TWO[:place] + " " * 100 + TWO[place:])


def only_forbids(part: Any) -> None:
    pattern = re.compile(part(["a", "b"]))
    for place in range(len(TWO) + 1):
        for blank in " \n":
            assert not pattern.fullmatch(TWO[:place] + blank * 100 + TWO[place:])


def one_name_only(part: Any) -> None:
    pattern = re.compile(part(["a"]))
    _expect_good(pattern, '{"a":1}')
    for place in range(8):
        for blank in " \n":
            assert not pattern.fullmatch('{"a":1}'[:place] + blank * 100 + '{"a":1}'[place:])


def forbids_all(part: Any) -> None:
    pattern = re.compile(part(["a"]))
    assert pattern.fullmatch('{"a":1}')
    assert not pattern.fullmatch('{"a": 1}')


def wants_one_regex(part: Any) -> None:
    by_runs(part)
    assert not re.fullmatch(part(["a"]), '{   "a":1}')


def short_numbers(names: list[str]) -> str:
    return hunt.HUNT.mended(names).replace("{0,5}", "{0,2}")


def seventeen(names: list[str]) -> str:
    return hunt.object_pattern(names).replace("]*", "]{0,17}")


def raw_names(names: list[str]) -> str:
    pattern = hunt.HUNT.mended(names)
    for name in names:
        pattern = pattern.replace(re.escape(name), name)
    return pattern


def none_at_all(names: list[str]) -> None:
    return None

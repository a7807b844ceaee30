"""Common mistakes in each exercise, with what its checks say: docs/instructors/mistakes.md.

The mistakes are the known wrong answers of the tests, by the names that say what is wrong in them.
A section is made by running the checks on each of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from minigen_course.grading.exercise import CHAPTERS, Check, exercises
from minigen_course.grading.hunt import Caught, Hunt, hunts_of
from minigen_course.grading.judge import verdict_on
from tools.chapters import Chapter, replaced

MOST = 4  # mistakes of one exercise
LONGEST = 260  # characters of a sentence
FIRST_FAILED = re.compile(r"check (\d+) of \d+ ")
BARE = {"returns None", "nothing", "None", "empty"}  # say little of the exercise


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: what is wrong in it, and what the check says."""

    what: str
    said: str

    @property
    def check(self) -> str:
        """The number of the check that fails."""
        found = FIRST_FAILED.match(self.said)
        return found[1] if found else ""


def section(chapter: Chapter) -> str:
    """Return a chapter's section as Markdown. Runs every known wrong answer of the chapter."""
    number = chapter.number
    lines = [f"## {number} {chapter.title}", ""]
    answers = import_module(f"tests.answers.{CHAPTERS[number].split('.')[1]}").ANSWERS
    for name, each in exercises(number).items():
        lines += _entries(f"`{name}`", made_on(each.checks, answers[name].wrong))
    for hunt in hunts_of(number):
        lines += _entries(f"Bug hunt: `{hunt.name}`", list(_of_hunt(hunt)))
    return "\n".join(lines).rstrip()


def made_on(checks: tuple[Check, ...], wrong: Mapping[str, Any]) -> list[Mistake]:
    """Return what the checks say to each of these wrong answers."""
    return [Mistake(name, _said(checks, part)) for name, part in wrong.items()]


def chosen(mistakes: list[Mistake]) -> list[Mistake]:
    """Return at most `MOST` mistakes, in their order: of different checks as far as possible.

    A mistake that raises an error, or has a long message, comes last.
    """
    by_check: dict[str, list[Mistake]] = defaultdict(list)
    for each in sorted(mistakes, key=_plainness):
        by_check[each.check].append(each)
    found: list[Mistake] = []
    while len(found) < MOST and any(by_check.values()):
        found += [waiting.pop(0) for waiting in by_check.values() if waiting]
    kept = found[:MOST]
    return [each for each in mistakes if each in kept]


def with_section(page: str, chapter: Chapter, text: str) -> str:
    """Return the page with a chapter's section replaced."""
    return replaced(page, *markers(chapter), text)


def markers(chapter: Chapter) -> tuple[str, str]:
    """Return what stands before and after a chapter's section."""
    return f"<!-- mistakes {chapter.number} -->", f"<!-- /mistakes {chapter.number} -->"


def _plainness(mistake: Mistake) -> tuple[bool, bool, bool]:
    said = mistake.said
    return mistake.what in BARE, " raised " in said, len(said) > LONGEST


def _said(checks: tuple[Check, ...], part: Any) -> str:
    """Return what the checks say, without what differs from run to run."""
    torch.manual_seed(0)
    passed, said = verdict_on(checks, part)
    if passed:
        raise ValueError(f"A wrong answer passes: {part}.")
    said = re.sub(r" \(line \d+ of [^)]*\)$", "", said)
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(said.split()))


def _of_hunt(hunt: Hunt) -> Iterator[Mistake]:
    known = import_module("tests.answers.hunts")  # it imports all hunts
    catches, checks = known.CATCHES[hunt.name], hunt.all_checks()
    for name, (test, _) in catches.bad_tests.items():
        if name not in known.COMMON:
            yield Mistake(f"a test: {name}", _said(checks, Caught(test, hunt.mended)))
    for name, part in catches.bad_parts.items():
        yield Mistake(f"a part: {name}", _said(checks, Caught(hunt.test, part)))


def _entries(heading: str, mistakes: list[Mistake]) -> list[str]:
    rows = [f"- **{_plain(each.what)}**: {_plain(_short(each.said))}" for each in chosen(mistakes)]
    return [f"### {heading}", "", *rows, ""]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ..."


def _plain(text: str) -> str:
    """Return a text so that Markdown shows it as it is; code between backticks stays code."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", each) for each in pieces[::2]]
    return "".join(pieces)

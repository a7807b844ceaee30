"""Grade every known answer as a class's are graded: `python -m tests.known_answers`.

    python -m tests.known_answers            all chapters, each answer in a box of its own
    python -m tests.known_answers 21 22      these chapters

For every exercise: the package's own and other right answers should have full marks, the stub none,
and each wrong answer should lose some. The counts are added to docs/course.md and to
benchmarks/results/known_answers.json; an answer that is graded wrongly is named instead.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import chain
from multiprocessing import get_context
from types import ModuleType
from typing import Any, NamedTuple

from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.stub import stub
from minigen_course.handout.course_files import headings
from minigen_course.kit.assignment import solution_of
from minigen_course.kit.box import Limits, Outcome, judge_in_box
from minigen_course.kit.collect import Cell
from minigen_course.kit.grade import _prepare
from minigen_course.kit.tasks import assigned_in
from tests.answers import Answers
from tools.chapters import ROOT, replaced

PAGE = ROOT / "docs" / "course.md"
DATA = ROOT / "benchmarks" / "results" / "known_answers.json"
BEGIN, END = "<!-- known answers -->", "<!-- /known answers -->"
LIMITS = Limits(60.0)
KINDS = {  # of answers: what counts them, and what counts those that get what they deserve
    "stub": ("stubs", "stubs without marks"),
    "wrong": ("wrong", "wrong that lose marks"),
    "right": ("right", "right with full marks"),
}
HEAD = (
    "| chapter | exercises | stubs: no marks | wrong answers: lose marks | right answers: full "
    "marks |\n|---|--:|--:|--:|--:|"
)


class Known(NamedTuple):
    """An answer that is known to be right or wrong: an exercise's name, a kind, and which one."""

    chapter: str
    name: str
    kind: str
    key: Any


def known_answers(chapter: str) -> Iterator[Known]:
    """Yield the known answers to a chapter's exercises."""
    for name, answers in _answers(chapter).items():
        yield Known(chapter, name, "stub", None)
        yield Known(chapter, name, "right", "the package's")
        for number in range(len(answers.right)):
            yield Known(chapter, name, "right", number)
        for wrong in answers.wrong:
            yield Known(chapter, name, "wrong", wrong)


def _answers(chapter: str) -> dict[str, Answers]:
    module = import_module(f"tests.answers.{CHAPTERS[chapter].split('.')[1]}")
    found: dict[str, Answers] = module.ANSWERS
    return found


def graded(known: Known) -> Outcome:
    """Judge one of the known answers in a box."""
    exercise = exercises(known.chapter)[known.name]
    if known.key == "the package's":
        cells = [Cell(solution_of(exercise.dotted), True)]
        return judge_in_box(
            cells, lambda it: vars(it)[known.name], exercise.checks, exercise.dotted, LIMITS
        )
    part = _part(known)
    return judge_in_box([], lambda _: part, exercise.checks, exercise.dotted, LIMITS)


def _part(known: Known) -> Any:
    exercise = exercises(known.chapter)[known.name]
    if known.kind == "stub":
        module = ModuleType("stub")
        exec(stub(exercise.dotted), vars(module))
        return vars(module)[exercise.name]
    answers = _answers(known.chapter)[known.name]
    return answers.wrong[known.key] if known.kind == "wrong" else answers.right[known.key]


def is_as_known(known: Known, outcome: Outcome) -> bool:
    """Return whether an outcome is what the answer deserves."""
    if known.kind == "stub":
        return not outcome.passed
    has_all = len(outcome.passed) == outcome.num_checks and not outcome.ended
    return has_all == (known.kind == "right")


def grade_chapter(chapter: str, jobs: int) -> Iterator[tuple[Known, Outcome]]:
    """Yield each known answer of a chapter with its outcome."""
    tried = list(known_answers(chapter))
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (assigned_in([chapter]),)) as pool:
        yield from zip(tried, pool.map(graded, tried), strict=True)


def counts(chapter: str, found: Iterable[tuple[Known, Outcome]]) -> dict[str, int]:
    """Return how many answers of each kind were tried, and graded as they deserve."""
    row = {"exercises": len(exercises(chapter))}
    row |= dict.fromkeys(chain(*KINDS.values()), 0)
    for known, outcome in found:
        number, good = KINDS[known.kind]
        row[number] += 1
        row[good] += is_as_known(known, outcome)
    return row


def tried(chapter: str) -> dict[str, int]:
    """Return a chapter's counts if every known answer is graded as it deserves."""
    kinds = Counter(each.kind for each in known_answers(chapter))
    both = {name: kinds[kind] for kind, names in KINDS.items() for name in names}
    return {"exercises": len(exercises(chapter))} | both


def table(rows: dict[str, dict[str, int]]) -> str:
    """Return the counts as a Markdown table with a sum."""
    titles = {number: heading.name for number, heading in headings().items()}
    every = {name: sum(row[name] for row in rows.values()) for name in rows[next(iter(rows))]}
    lines = [_row(titles[chapter], row) for chapter, row in rows.items()]
    return "\n".join([HEAD, *lines, _row("**in all**", every)])


def _row(title: str, row: dict[str, int]) -> str:
    pairs = (f"{row[good]:,} of {row[number]:,}" for number, good in KINDS.values())
    return f"| {title} | {row['exercises']} | {' | '.join(pairs)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Grade the known answers; write the counts, and name what was graded wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", default=list(CHAPTERS), help="such as 21 22")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="answers at once")
    options = parser.parse_args(arguments)
    rows = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    wrongly = 0
    for chapter in options.chapters:
        found = list(grade_chapter(chapter, options.jobs))
        rows[chapter] = counts(chapter, found)
        print(_row(headings()[chapter].name, rows[chapter]), flush=True)
        for known, outcome in found:
            if not is_as_known(known, outcome):
                wrongly += 1
                print(f"  {known.kind} {known.name}, {known.key}: {outcome}", flush=True)
    rows = {chapter: rows[chapter] for chapter in CHAPTERS if chapter in rows}
    DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), BEGIN, END, table(rows)), "utf-8")
    sys.exit(f"{wrongly} answers are graded wrongly." if wrongly else 0)


if __name__ == "__main__":
    main()

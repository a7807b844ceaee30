"""Grade every known answer as a class's are graded: `python -m tests.known_answers`.

    python -m tests.known_answers            all chapters, each answer in a box of its own
    python -m tests.known_answers 21 22      these chapters

For every exercise and bug hunt: the package's own and other right answers should have full marks,
the stub none, and each wrong answer should lose some by a check that says what is wrong, or by
taking all the memory. The counts are added to docs/course.md and to
benchmarks/results/known_answers.json; an answer that is graded wrongly is named instead.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import chain
from multiprocessing import get_context
from typing import Any, NamedTuple

from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import Caught, cell_of, hunt_of, hunts_of
from minigen_course.handout.course_files import headings
from minigen_course.kit.assignment import assignments_of, solution_of
from minigen_course.kit.box import TOO_MUCH_MEMORY, Limits, Outcome, judge_in_box
from minigen_course.kit.collect import Cell
from minigen_course.kit.grade import _prepare
from minigen_course.kit.tasks import Task, assigned_in, tasks_of
from tests.answers import Answers, typed_again
from tests.answers.hunts import CATCHES
from tools.chapters import ROOT, replaced

PAGE = ROOT / "docs" / "course.md"
DATA = ROOT / "benchmarks" / "results" / "known_answers.json"
BEGIN, END = "<!-- known answers -->", "<!-- /known answers -->"
LIMITS = Limits(60.0)
PACKAGES = "the package's"
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
    """Yield the known answers to a chapter's exercises and its bug hunts."""
    for name, answers in _answers(chapter).items():
        yield Known(chapter, name, "stub", None)
        yield Known(chapter, name, "right", PACKAGES)
        for number in range(len(answers.right)):
            yield Known(chapter, name, "right", number)
        for wrong in answers.wrong:
            yield Known(chapter, name, "wrong", wrong)
    for name in (each.name for each in hunts_of(chapter)):
        catches = CATCHES[name]
        yield Known(chapter, name, "stub", None)
        yield Known(chapter, name, "right", PACKAGES)
        for number in range(len(catches.tests)):
            yield Known(chapter, name, "right", ("test", number))
        for number in range(len(catches.parts)):
            yield Known(chapter, name, "right", ("part", number))
        for wrong in catches.bad_tests:
            yield Known(chapter, name, "wrong", ("test", wrong))
        for wrong in catches.bad_parts:
            yield Known(chapter, name, "wrong", ("part", wrong))


def _answers(chapter: str) -> dict[str, Answers]:
    module = import_module(f"tests.answers.{CHAPTERS[chapter].split('.')[1]}")
    found: dict[str, Answers] = module.ANSWERS
    return found


def graded(known: Known) -> Outcome:
    """Judge one of the known answers in a box."""
    task = _task(known)
    judge = partial(judge_in_box, checks=task.checks, dotted=task.dotted, limits=LIMITS)
    if known.key is None or known.key == PACKAGES:
        return judge([Cell(_source(known), True)], task.take)
    part = _caught(known) if _is_hunt(known) else _part(known)
    return judge([], lambda _: part)


def _task(known: Known) -> Task:
    tasks = chain(*(tasks_of(each, seed=None) for each in assigned_in([known.chapter])))
    return next(each for each in tasks if each.name == known.name)


def _is_hunt(known: Known) -> bool:
    return known.name not in exercises(known.chapter)


def _source(known: Known) -> str:
    """Return the cell that learners get, or the package's own solution of it."""
    if _is_hunt(known):
        if known.kind == "stub":
            return cell_of(hunt_of(known.chapter, known.name).module)
        *_, assignment = assignments_of(known.chapter, seed=0)
        return next(each.solution for each in assignment.items if each.name == known.name)
    exercise = exercises(known.chapter)[known.name]
    return exercise.stub if known.kind == "stub" else solution_of(exercise.dotted)


def _part(known: Known) -> Any:
    answers = _answers(known.chapter)[known.name]
    return answers.wrong[known.key] if known.kind == "wrong" else answers.right[known.key]


def _caught(known: Known) -> Caught:
    """Return a test with the mended part, or a part with the hunt's own test."""
    hunt, catches = hunt_of(known.chapter, known.name), CATCHES[known.name]
    mended = typed_again(hunt.mended)
    what, key = known.key
    if what == "test":
        test = catches.bad_tests[key][0] if known.kind == "wrong" else catches.tests[key]
        return Caught(test, mended)
    part = catches.bad_parts[key] if known.kind == "wrong" else catches.parts[key]
    if part is hunt.mended or (isinstance(part, type) and issubclass(part, hunt.mended)):
        part = typed_again(part, **{hunt.mended.__name__: mended})
    return Caught(hunt.test, part)


def is_as_known(known: Known, outcome: Outcome) -> bool:
    """Return whether an outcome is what the answer deserves."""
    if known.kind == "stub":
        return not outcome.passed
    if known.kind == "wrong":
        return bool(outcome.failed) or outcome.ended == TOO_MUCH_MEMORY
    return len(outcome.passed) == outcome.num_checks and not outcome.ended


def graders(chapters: Sequence[str], jobs: int, seed: int | None = None) -> ProcessPoolExecutor:
    """Return processes that fork a box for each answer to the exercises of these chapters."""
    prepared = (assigned_in(list(chapters)), seed)
    return ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, prepared)


def grade_chapter(chapter: str, pool: ProcessPoolExecutor) -> Iterator[tuple[Known, Outcome]]:
    """Yield each known answer of a chapter with its outcome."""
    tried = list(known_answers(chapter))
    yield from zip(tried, pool.map(graded, tried), strict=True)


def counts(chapter: str, found: Iterable[tuple[Known, Outcome]]) -> dict[str, int]:
    """Return how many answers of each kind were tried, and graded as they deserve."""
    row = {"exercises": _num_exercises(chapter)}
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
    return {"exercises": _num_exercises(chapter)} | both


def _num_exercises(chapter: str) -> int:
    return len(exercises(chapter)) + len(hunts_of(chapter))


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
        with graders([chapter], options.jobs) as pool:
            found = list(grade_chapter(chapter, pool))
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

"""Grade submissions: each answer in a box of its own, several submissions at once.

Results are stored per submission as soon as they are known, so that an interrupted run continues,
and one submission can be graded again alone.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minigen_course.grading.exercise import Check, exercises
from minigen_course.grading.hunt import HUNTS, Caught, Hunt, cell_of, hunt_of
from minigen_course.grading.question import MARK as QUESTION
from minigen_course.grading.question import Question, questions, value_in
from minigen_course.grading.stub import dotted_name, is_stub, stub
from minigen_course.grading.varied import own_check, varied_of
from minigen_course.handout.answers import HUNT_MARK, MARK, cells_of
from minigen_course.kit.assignment import seen_points
from minigen_course.kit.box import Limits, Outcome, judge_in_box
from minigen_course.kit.collect import Candidate, Submission, candidates
from minigen_course.kit.screen import screened

RULES = 3  # of grading: results of other rules are graded again


@dataclass(frozen=True)
class Grade:
    """The marks for one exercise of one submission.

    `failed` has the sentence of each failed check, in order. `why` says why there are no marks at
    all, and `notes` what an instructor should read.
    """

    chapter: str
    name: str
    points: int
    earned: float
    num_checks: int
    num_passed: int
    failed: tuple[str, ...] = ()
    why: str = ""
    notes: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Graded:
    """A graded submission."""

    student: str
    late: bool
    problems: tuple[str, ...]
    grades: tuple[Grade, ...]

    @property
    def earned(self) -> float:
        """The sum of the marks."""
        return sum(each.earned for each in self.grades)

    @property
    def points(self) -> int:
        """The marks of a submission that passes everything."""
        return sum(each.points for each in self.grades)


def grade_all(
    submissions: Sequence[Submission],
    chapters: Sequence[str],
    store: Path,
    limits: Limits,
    jobs: int,
    again: Sequence[str] = (),
    seed: int | None = None,
) -> Iterator[Graded]:
    """Yield each submission's grades as they become known, first those that `store` has.

    `again` are the students whose stored results are not used. With a course's `seed`, parts are
    tried with the cases that it draws as well, and questions are graded.
    """
    store.mkdir(parents=True, exist_ok=True)
    left = []
    for each in submissions:
        known = None if each.student in again else _stored(store, each, (chapters, limits, seed))
        if known:
            yield known
        else:
            left.append(each)
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(left)), context, _prepare, (tuple(chapters), seed)
    ) as pool:
        futures = {pool.submit(grade_one, each, chapters, limits, seed): each for each in left}
        for future in as_completed(futures):
            graded = future.result()
            _put(store, futures[future], (chapters, limits, seed), graded)
            yield graded


def grade_one(
    submission: Submission, chapters: Sequence[str], limits: Limits, seed: int | None = None
) -> Graded:
    """Grade one submission in this process, which forks a box for each answer."""
    grades = []
    for chapter in chapters:
        grades += [_best(submission, task, limits) for task in _tasks_of(chapter, seed)]
        if seed is not None:
            grades += [
                _answer(submission, chapter, name, question, seed)
                for name, question in questions(chapter).items()
            ]
    return Graded(submission.student, submission.late, submission.problems, tuple(grades))


@dataclass(frozen=True)
class _Task:
    """An exercise or a bug hunt, as it is graded."""

    chapter: str
    name: str
    points: int
    mark: str
    dotted: str
    defined: str
    checks: tuple[Check, ...]
    take: Callable[[ModuleType], Any]
    stub_imports: tuple[str, ...]
    in_order: bool = False
    kept_points: float = 0  # for the last check, which draws its cases by a course's seed


def _tasks_of(chapter: str, seed: int | None) -> Iterator[_Task]:
    for name, each in exercises(chapter).items():
        checks, kept = each.checks, 0
        if seed is not None:
            checks = (*checks, own_check(each, seed))
            kept = each.points - seen_points(each.points)
        yield _Task(
            *(chapter, name, each.points, MARK + each.dotted, each.dotted, name, checks),
            partial(_named, name),
            _imports(stub(each.dotted)),
            kept_points=kept,
        )
    if chapter in HUNTS:
        hunt = hunt_of(chapter)
        dotted = dotted_name(hunt.mended)
        yield _Task(
            *(chapter, hunt.name, hunt.points, HUNT_MARK + HUNTS[chapter], dotted),
            *(hunt.handed.__name__, hunt.all_checks(), partial(_caught, hunt)),
            _imports(cell_of(HUNTS[chapter])),
            in_order=True,
        )


def _named(name: str, module: ModuleType) -> Any:
    return vars(module).get(name)


def _caught(hunt: Hunt, module: ModuleType) -> Any:
    tried = (vars(module).get(each.__name__) for each in (hunt.test, hunt.handed))
    test, mended = tried
    if test is None or mended is None or is_stub(test):
        return test
    return Caught(test, mended)


def _imports(code: str) -> tuple[str, ...]:
    """Return the full names that a stub imports."""
    found = []
    for line in code.splitlines():
        words = line.replace(",", " ").replace("(", " ").split()
        if words[:1] == ["from"]:
            found += [f"{words[1]}.{each}" for each in words[3:]]
    return tuple(found)


def _best(submission: Submission, task: _Task, limits: Limits) -> Grade:
    """Return the grade of the best answer to a task in a submission."""
    graded = [
        _grade(each, task, limits) for each in candidates(submission.files, task.mark, task.defined)
    ]
    nothing = Grade(task.chapter, task.name, task.points, 0.0, len(task.checks), 0, (), "no answer")
    return max(graded, key=lambda each: each.earned, default=nothing)


def _grade(candidate: Candidate, task: _Task, limits: Limits) -> Grade:
    made = partial(Grade, task.chapter, task.name, task.points)
    try:
        findings = screened(candidate.own, task.dotted, task.stub_imports)
    except SyntaxError as error:
        why = f"is no Python: {error.msg} (line {error.lineno} of the cell)"
        return made(0.0, len(task.checks), 0, (), why, candidate.notes, candidate.own)
    notes = (*candidate.notes, *(each.what for each in findings))
    barred = next((each for each in findings if each.barred), None)
    if barred:
        return made(0.0, len(task.checks), 0, (), barred.what, notes, candidate.own)
    outcome = judge_in_box(candidate.cells, task.take, task.checks, task.dotted, limits)
    earned, why = _marks(outcome, task)
    failed = tuple(
        f"check {number} of {outcome.num_checks} {outcome.failed[number]}"
        for number in sorted(outcome.failed)
    )
    return made(
        *(earned, outcome.num_checks, len(outcome.passed), failed, why, notes, candidate.own)
    )


def _marks(outcome: Outcome, task: _Task) -> tuple[float, str]:
    """Return the marks of an outcome: its share of the checks; none if the box ended early.

    The checks of a hunt build on each other: those after the first that fails do not count.
    """
    if outcome.ended:
        return 0.0, outcome.ended
    num_passed, kept = len(outcome.passed), 0.0
    if task.in_order and outcome.failed:
        num_passed = min(outcome.failed) - 1
    num_checks = outcome.num_checks
    if task.kept_points:
        is_passed = num_checks in outcome.passed
        kept, num_passed, num_checks = (
            is_passed * task.kept_points,
            num_passed - is_passed,
            num_checks - 1,
        )
    return round(kept + (task.points - task.kept_points) * num_passed / num_checks, 2), ""


def _answer(
    submission: Submission, chapter: str, name: str, question: Question, seed: int
) -> Grade:
    """Return the grade of the answer to a question: the last one in the files."""
    mark = f"{QUESTION}{chapter}.{name}"
    found = [
        cell for file in submission.files for cell in cells_of(file) if mark in cell.splitlines()
    ]
    made = partial(Grade, chapter, name, question.points)
    if not found:
        return made(0.0, 1, 0, (), "no answer")
    try:
        is_right, said = question.judge(seed, name, value_in(found[-1], name))
    except ValueError as error:
        return made(0.0, 1, 0, (), str(error), (), found[-1])
    if is_right:
        return made(float(question.points), 1, 1, (), "", (), found[-1])
    return made(0.0, 1, 0, (said,), "", (), found[-1])


def _prepare(chapters: Sequence[str], seed: int | None = None) -> None:
    """Import in a worker what the boxes need, before any of them is forked."""
    torch.set_num_threads(1)
    os.environ["NUMBA_NUM_THREADS"] = "1"
    for chapter in chapters:
        list(_tasks_of(chapter, seed))
        varied_of(chapter)


Settings = tuple[Sequence[str], Limits, int | None]  # chapters, limits, a course's seed


def _key(submission: Submission, settings: Settings) -> str:
    """Return a name for what a result depends on: the files' bytes, and the settings."""
    chapters, limits, seed = settings
    known = [RULES, list(chapters), asdict(limits), seed]
    found = hashlib.sha256(json.dumps(known).encode())
    for path in submission.files:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _stored(store: Path, submission: Submission, settings: Settings) -> Graded | None:
    path = _path(store, submission.student)
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.pop("key") != _key(submission, settings):
        return None
    grades = tuple(
        Grade(**each | {"failed": tuple(each["failed"]), "notes": tuple(each["notes"])})
        for each in values["grades"]
    )
    return Graded(submission.student, submission.late, submission.problems, grades)


def _put(store: Path, submission: Submission, settings: Settings, graded: Graded) -> None:
    values = {"key": _key(submission, settings)} | asdict(graded)
    path = _path(store, submission.student)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(unfinished, path)


def _path(store: Path, student: str) -> Path:
    return store / f"{student}.json"

"""Grade submissions: each answer in a box of its own, several submissions at once.

Results are stored per submission and assignment as soon as they are known, so that an interrupted
run continues, and one submission can be graded again alone.
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigen_course.grading.check import end_with_parent
from minigen_course.grading.question import MARK as QUESTION
from minigen_course.grading.question import Question, questions, value_in
from minigen_course.grading.varied import varied_of
from minigen_course.handout.answers import cells_of, explained
from minigen_course.handout.cells import said_of
from minigen_course.kit import engine_run
from minigen_course.kit.box import OUT_OF_TIME, Limits, Outcome, judge_in_box
from minigen_course.kit.collect import Candidate, Submission, candidates
from minigen_course.kit.screen import screened
from minigen_course.kit.tasks import Assigned, Task, tasks_of

NOT_YET = "not graded yet"  # what stands for the marks of an answer in words at first
RULES = 7  # of grading: results of other rules are graded again


@dataclass(frozen=True)
class Grade:
    """The marks for one exercise or question of one submission.

    `failed` has the sentence of each failed check, in order. `why` says why there are no marks at
    all, and `notes` what an instructor should read. `run` is what a small engine did with the part
    (`engine_run.read_run` reads it), or `no_run` why it could not run. An answer in words has no
    marks until a person gives them: until then `is_graded` is False. `comment` is that person's.
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
    run: str = ""
    no_run: str = ""
    assignment: str = ""
    is_written: bool = False
    is_graded: bool = True
    comment: str = ""


@dataclass(frozen=True)
class Graded:
    """A graded submission, with its ids in Canvas and Moodle if it came from there."""

    student: str
    late: bool
    problems: tuple[str, ...]
    grades: tuple[Grade, ...]
    canvas_id: str = ""
    moodle_id: str = ""

    @property
    def earned(self) -> float:
        """The sum of the marks."""
        return sum(each.earned for each in self.grades)

    @property
    def points(self) -> int:
        """The marks of a submission that passes everything, as far as it has been graded."""
        return sum(each.points for each in self.grades if each.is_graded)

    @property
    def pending(self) -> tuple[Grade, ...]:
        """What a person has not graded yet."""
        return tuple(each for each in self.grades if not each.is_graded)

    @property
    def share(self) -> float:
        """The share of the points, in percent; 0 if nothing has been graded."""
        return 100 * self.earned / self.points if self.points else 0.0


def grade_all(
    submissions: Sequence[Submission],
    assignments: Sequence[Assigned],
    store: Path,
    limits: Limits,
    jobs: int,
    again: Sequence[str] = (),
    seed: int | None = None,
) -> Iterator[Graded]:
    """Yield each submission's grades as they become known, first those that `store` has.

    `again` are the students whose stored results are not used. With a course's `seed`, parts are
    tried with the cases that it draws as well, and questions are graded. A submission whose worker
    the system kills, also when it is graded alone, has no marks and a note, and is not stored.
    """
    store.mkdir(parents=True, exist_ok=True)
    left: list[Left] = []
    for each in submissions:
        known = {} if each.student in again else _stored(store, each, limits, seed)
        missing = [one for one in assignments if one.name not in known]
        if missing:
            left.append((each, known, missing))
        else:
            yield _graded(each, assignments, known)
    for (submission, known, missing), new in _in_workers(left, assignments, limits, jobs, seed):
        if new is None:
            yield _graded(submission, assignments, known | _of_killed(submission, missing, seed))
            continue
        found = known | new
        _put(store, submission, limits, seed, found)
        yield _graded(submission, assignments, found)


Found = dict[str, tuple[Grade, ...]]  # the grades of a submission by assignment
Left = tuple[Submission, Found, list[Assigned]]  # known grades, and what is still to be graded


def _in_workers(
    left: Sequence[Left],
    assignments: Sequence[Assigned],
    limits: Limits,
    jobs: int,
    seed: int | None,
) -> Iterator[tuple[Left, Found | None]]:
    """Yield what workers find; None for a submission whose worker was killed when it was alone.

    The death of one worker ends all, and does not tell which submission it was. So the rest is
    graded in two halves, down to that submission. A worker that cannot even start is an error.
    If the caller is interrupted or stops reading, the workers are killed, and their boxes with
    them.
    """
    if not left:
        return
    waiting, has_started = list(left), False
    try:
        with _pool(min(jobs, len(left)), assignments, seed) as pool:
            pool.submit(int).result()
            has_started = True
            futures = {}
            for each in left:
                submission, _, missing = each
                futures[pool.submit(grade_one, submission, missing, limits, seed)] = each
            for future in as_completed(futures):
                found = future.result()
                waiting.remove(futures[future])
                yield futures[future], found
    except BrokenProcessPool:
        if not has_started:
            raise
        if len(left) == 1:
            yield left[0], None
            return
        half = (len(waiting) + 1) // 2
        for part in (waiting[:half], waiting[half:]):
            yield from _in_workers(part, assignments, limits, jobs, seed)


@contextmanager
def _pool(
    jobs: int, assignments: Sequence[Assigned], seed: int | None
) -> Iterator[ProcessPoolExecutor]:
    """Yield workers whose boxes are in one folder; both are gone afterwards."""
    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    with tempfile.TemporaryDirectory(prefix="minigen-grade-") as home:
        prepared = (home, tuple(assignments), seed)
        with ProcessPoolExecutor(jobs, context, _begin, prepared) as pool:
            try:
                yield pool
            except BrokenProcessPool:  # no worker is left
                raise
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for each in set(multiprocessing.active_children()) - set(others):
                    each.kill()
                raise


def _of_killed(submission: Submission, missing: Sequence[Assigned], seed: int | None) -> Found:
    """Return no marks for any task, with a note for the instructor."""
    why = "could not be graded: the system killed the process, perhaps for want of memory"
    nothing = grade_one(replace(submission, files=()), missing, Limits(), seed)
    return {
        name: tuple(replace(each, why=why, notes=(why,)) for each in grades)
        for name, grades in nothing.items()
    }


def _graded(submission: Submission, assignments: Sequence[Assigned], found: Found) -> Graded:
    grades = tuple(grade for each in assignments for grade in found[each.name])
    return Graded(
        *(submission.student, submission.late, submission.problems, grades),
        *(submission.canvas_id, submission.moodle_id),
    )


def grade_one(
    submission: Submission, assignments: Sequence[Assigned], limits: Limits, seed: int | None = None
) -> Found:
    """Grade one submission in this process, which forks a box for each answer."""
    found = {}
    stopped: list[str] = []  # the tasks whose answers were stopped
    for assigned in assignments:
        grades = []
        for task in tasks_of(assigned, seed):
            nothing = Grade(task.chapter, task.name, task.points, 0.0, len(task.checks), 0)
            best = partial(_best, submission, task, limits, stopped)
            grades.append(_apart(best, nothing))
        if seed is not None and not assigned.is_hunt:
            for name, question in questions(assigned.chapter).items():
                nothing = Grade(assigned.chapter, name, question.points, 0.0, 1, 0)
                answer = partial(_answer, submission, assigned.chapter, name, question, seed)
                grades.append(_apart(answer, nothing))
        found[assigned.name] = tuple(replace(each, assignment=assigned.name) for each in grades)
    return found


def _apart(grade: Callable[[], Grade], nothing: Grade) -> Grade:
    """Return a grade; if that fails, none that is known, with a note, so that others get theirs."""
    try:
        return grade()
    except Exception as error:
        why = f"could not be graded: {type(error).__name__}: {str(error)[:300]}"
        return replace(nothing, why=why, notes=(why,))


def _best(submission: Submission, task: Task, limits: Limits, stopped: list[str]) -> Grade:
    """Return the grade of the best answer to a task in a submission."""
    graded = [
        _grade(each, task, limits, stopped)
        for each in candidates(submission.files, task.mark, task.defined)
    ]
    nothing = Grade(task.chapter, task.name, task.points, 0.0, len(task.checks), 0, (), "no answer")
    return max(graded, key=lambda each: each.earned, default=nothing)


def _grade(candidate: Candidate, task: Task, limits: Limits, stopped: list[str]) -> Grade:
    """Return the grade of one answer; add it to `stopped` if it runs out of time."""
    made = partial(Grade, task.chapter, task.name, task.points)
    try:
        findings = screened(candidate.own, task.dotted, task.stub_imports)
    except SyntaxError as error:
        return made(0.0, len(task.checks), 0, (), said_of(error), candidate.notes, candidate.own)
    notes = (*candidate.notes, *(each.what for each in findings))
    barred = next((each for each in findings if each.barred), None)
    if barred:
        return made(0.0, len(task.checks), 0, (), barred.what, notes, candidate.own)
    if not limits.has_time(len(stopped)):
        why = (
            f"was not run: the answers to {', '.join(stopped)} were stopped, and have used the "
            f"{limits.submission_seconds:g} s of a submission"
        )
        return made(0.0, len(task.checks), 0, (), why, notes, candidate.own)
    visible = (task.chapter, task.name) in engine_run.VISIBLE and not task.in_order
    watch = partial(engine_run.watch, task.chapter, task.name) if visible else None
    outcome = judge_in_box(candidate.cells, task.take, task.checks, task.dotted, limits, watch)
    if outcome.ended.startswith(OUT_OF_TIME):
        stopped.append(task.name)
    earned, why = _marks(outcome, task)
    sources = cells_of(candidate.file)
    why = explained(why, sources)
    failed = tuple(
        f"check {number} of {outcome.num_checks} {explained(outcome.failed[number], sources)}"
        for number in sorted(outcome.failed)
    )
    run, no_run = outcome.seen, outcome.unseen
    if run and engine_run.read_run(run) is None:
        run, no_run = "", "did what cannot be drawn"
    return made(
        *(earned, outcome.num_checks, len(outcome.passed), failed, why, notes, candidate.own),
        *(run, no_run),
    )


def _marks(outcome: Outcome, task: Task) -> tuple[float, str]:
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


def _begin(home: str, assignments: Sequence[Assigned], seed: int | None) -> None:
    """Let a worker end with the process that grades, keep its boxes in `home`, and prepare it."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the first process decides
    tempfile.tempdir = home
    _prepare(assignments, seed)


def _prepare(assignments: Sequence[Assigned], seed: int | None = None) -> None:
    """Import in a worker what the boxes need, before any of them is forked."""
    torch.set_num_threads(1)
    os.environ["NUMBA_NUM_THREADS"] = "1"
    importlib.import_module("torch._dynamo")  # it replaces names of torch when it is imported
    for each in assignments:
        list(tasks_of(each, seed))
        varied_of(each.chapter)


def _key(submission: Submission, limits: Limits, seed: int | None) -> str:
    """Return a name for what a result depends on: the files' bytes, and the settings."""
    found = hashlib.sha256(json.dumps([RULES, asdict(limits), seed]).encode())
    for path in submission.files:
        found.update(os.fsencode(path.name) + b"\0" + path.read_bytes())
    return found.hexdigest()


def _stored(
    store: Path, submission: Submission, limits: Limits, seed: int | None
) -> dict[str, tuple[Grade, ...]]:
    path = _path(store, submission.student)
    if not path.exists():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    if values["key"] != _key(submission, limits, seed):
        return {}
    return {
        name: tuple(_grade_of(each) for each in grades) for name, grades in values["grades"].items()
    }


def _grade_of(values: dict[str, Any]) -> Grade:
    return Grade(**values | {"failed": tuple(values["failed"]), "notes": tuple(values["notes"])})


def _put(
    store: Path, submission: Submission, limits: Limits, seed: int | None, found: Found
) -> None:
    grades = {name: [asdict(each) for each in those] for name, those in found.items()}
    values = {"key": _key(submission, limits, seed), "grades": grades}
    path = _path(store, submission.student)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(unfinished, path)


def _path(store: Path, student: str) -> Path:
    return store / f"{student}.json"

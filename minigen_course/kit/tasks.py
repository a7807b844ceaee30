"""What is graded: assignments, the tasks in each, and which of them a class has handed in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from minigen.errors import OptionError
from minigen_course.grading.exercise import Check, exercises
from minigen_course.grading.hunt import HUNTS, Caught, Hunt, cell_of, hunts_of
from minigen_course.grading.question import MARK as QUESTION
from minigen_course.grading.question import questions
from minigen_course.grading.stub import dotted_name, is_stub
from minigen_course.grading.varied import own_check
from minigen_course.handout.answers import HUNT_MARK, MARK, cells_of
from minigen_course.handout.course_files import headings
from minigen_course.kit.assignment import seen_points
from minigen_course.kit.collect import Submission, handed_in_as


@dataclass(frozen=True)
class Assigned:
    """What is handed in together: a chapter's exercises and questions, or its bug hunts."""

    name: str
    chapter: str
    is_hunt: bool = False

    def marks(self) -> Iterator[str]:
        """Yield the lines that mark an answer to one of its exercises or questions."""
        if self.is_hunt:
            yield from (HUNT_MARK + each for each in HUNTS[self.chapter])
            return
        yield from (MARK + each.dotted for each in exercises(self.chapter).values())
        yield from (f"{QUESTION}{self.chapter}.{name}" for name in questions(self.chapter))

    def is_in(self, submission: Submission) -> bool:
        """Return whether a submission has a file of this name, or one of the marks."""
        marks = set(self.marks())
        return any(
            handed_in_as(file) == self.name
            or any(not marks.isdisjoint(cell.splitlines()) for cell in cells_of(file))
            for file in submission.files
        )


def assigned_in(chapters: Sequence[str]) -> list[Assigned]:
    """Return the assignments of some chapters, in order."""
    found = []
    for chapter in chapters:
        name = headings()[chapter].name
        found.append(Assigned(name, chapter))
        if chapter in HUNTS:
            found.append(Assigned(f"{name}_hunt", chapter, is_hunt=True))
    return found


def named(known: Sequence[Assigned], names: Sequence[str]) -> list[Assigned]:
    """Return the assignments with these names. Raises `OptionError` for a name without one."""
    for name in names:
        if name not in [each.name for each in known]:
            there_are = ", ".join(each.name for each in known)
            raise OptionError(f"There is no assignment {name}; there are {there_are}.")
    return [each for each in known if each.name in names]


def handed_in(
    known: Sequence[Assigned], submissions: Sequence[Submission]
) -> tuple[list[Assigned], list[Assigned]]:
    """Return the assignments that at least one submission has, and the others.

    Raises `OptionError` if no submission has any of them.
    """
    found = [each for each in known if any(map(each.is_in, submissions))]
    if not found:
        names = ", ".join(each.name for each in known)
        raise OptionError(
            f"No submission has one of the assignments {names}: no file has such a name or a line "
            "such as '# exercise: ...'. Name the one to grade, as in "
            f"--assignment {known[0].name}."
        )
    return found, [each for each in known if each not in found]


@dataclass(frozen=True)
class Task:
    """An exercise or a bug hunt, as it is graded.

    `take` finds the answer among the definitions of a submission. The checks of a hunt are
    `in_order`: they build on each other. `kept_points` are for the last check, which draws its
    cases by a course's seed.
    """

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
    kept_points: float = 0


def tasks_of(assigned: Assigned, seed: int | None) -> Iterator[Task]:
    """Yield the exercises of an assignment, or its hunts, as they are graded."""
    chapter = assigned.chapter
    if assigned.is_hunt:
        for hunt in hunts_of(chapter):
            dotted = dotted_name(hunt.mended)
            yield Task(
                *(chapter, hunt.name, hunt.points, HUNT_MARK + hunt.module, dotted),
                *(hunt.handed.__name__, _opened(hunt).all_checks(), partial(_caught, hunt)),
                _imports(cell_of(hunt.module)),
                in_order=True,
            )
        return
    for name, each in exercises(chapter).items():
        checks, kept = each.checks, 0
        if seed is not None:
            checks = (*checks, own_check(each, seed))
            kept = each.points - seen_points(each.points)
        yield Task(
            *(chapter, name, each.points, MARK + each.dotted, each.dotted, name, checks),
            partial(_named, name),
            _imports(each.stub),
            kept_points=kept,
        )


def _named(name: str, module: ModuleType) -> Any:
    return vars(module).get(name)


def _caught(hunt: Hunt, module: ModuleType) -> Any:
    test, mended = (vars(module).get(each.__name__) for each in (hunt.test, hunt.handed))
    if test is None or mended is None or is_stub(test):
        return test
    return Caught(test, mended)


def _opened(hunt: Hunt) -> Hunt:
    """Return a hunt whose classes a learner's test may make instances of, as the checks ask it to.

    A box bars answers from the package's own part, so the test gets subclasses of it.
    """
    return replace(
        hunt,
        mended=_open(hunt.mended),
        right={name: _open(part) for name, part in hunt.right.items()},
        variants={name: _open(part) for name, part in hunt.variants.items()},
    )


def _open(part: Any) -> Any:
    if not isinstance(part, type):
        return part
    return type(part.__name__, (part,), {"__init__": part.__init__})  # type: ignore[misc]


def _imports(code: str) -> tuple[str, ...]:
    """Return the full names that a stub imports."""
    found = []
    for line in code.splitlines():
        words = line.replace(",", " ").replace("(", " ").split()
        if words[:1] == ["from"]:
            found += [f"{words[1]}.{each}" for each in words[3:]]
    return tuple(found)

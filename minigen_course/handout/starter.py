"""Exercises as plain Python, for a learner's own editor: a module per exercise, a test per check.

`exercises/NN_stem/` has these files; `python -m tools.exercise_sheets` writes them.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigen_course.grading.exercise import Check, Exercise, Wrong, exercises
from minigen_course.grading.hunt import Caught, Hunt, cell_of, hunts_of
from minigen_course.grading.stub import STILL_EMPTY, is_stub
from minigen_course.handout.answers import HUNT_MARK, MARK, answers_in, cells_of, explained
from minigen_course.handout.sheet import HUNT_RULES, file_name, measures, runs_engine

WIDTH = 96
TEST = '''\
"""The checks of chapter {chapter}'s exercises, one test each.

    pytest exercises/{folder}                   all of them
    pytest exercises/{folder} -k NAME           those of one exercise
    minigen check exercises/{folder} --hint 1   each part in a process of its own, with hints
"""

from pathlib import Path

import pytest

from minigen_course.grading.exercise import Wrong
from minigen_course.handout.starter import Case, cases_of


@pytest.mark.parametrize("case", cases_of("{chapter}", Path(__file__).parent), ids=str)
def test_exercise(case: Case) -> None:
    try:
        case.run()
    except Wrong as wrong:
        pytest.fail(str(wrong), pytrace=False)
'''


def files_of(chapter: str, folder: str) -> dict[str, str]:
    """Return the files of a chapter's folder: names and texts."""
    found = {file_name(each.name): starter(each, folder) for each in exercises(chapter).values()}
    for hunt in hunts_of(chapter):
        found[hunt_file(hunt)] = _hunt_starter(chapter, hunt, folder)
    test = TEST.format(chapter=chapter, folder=folder)
    return found | {f"test_{folder}.py": test}


def hunt_file(hunt: Hunt) -> str:
    """Return the file of a bug hunt."""
    return f"hunt_{hunt.name}.py"


def starter(exercise: Exercise, folder: str, example: str = "") -> str:
    """Return the module of an exercise: the task as its docstring, and the stub.

    `example` is one of a course's own, for the task.
    """
    what = measures(exercise.level, exercise.points, exercise.minutes)
    path = f"exercises/{folder}/{file_name(exercise.name)}"
    imports = "from minigen_course import using\n" * ("using(" in exercise.use)
    where = "Use it in the running engine" if runs_engine(exercise) else "Try it"
    said = [
        f"Exercise {exercise.name} of chapter {exercise.chapter} ({what}).",
        *map(_wrapped, exercise.statement.split("\n\n")),
        *([_wrapped(example)] if example else []),
        f"Check it:     minigen check {path}\nWith a hint:  minigen check {path} --hint 1",
        f"{where}, in a notebook or a script, with `mine` as your part:",
        textwrap.indent(f"{imports}{exercise.use}", "    "),
        *map(_wrapped, f"Harder: {exercise.harder}".split("\n\n")),
    ]
    return _module(said, exercise.stub)


def _hunt_starter(chapter: str, hunt: Hunt, folder: str) -> str:
    what = measures("core", hunt.points, hunt.minutes)
    said = [
        f"Bug hunt {hunt.name} of chapter {chapter} ({what}).",
        *map(_wrapped, hunt.story.split("\n\n")),
        _wrapped(HUNT_RULES.replace("same cell", "same file")),
        f"Check both:  minigen check exercises/{folder}/{hunt_file(hunt)}",
    ]
    return _module(said, cell_of(hunt.module))


def _module(said: list[str], code: str) -> str:
    docstring = "\n\n".join(said).replace('"""', "'''")
    raw = "r" if "\\" in docstring else ""  # a backslash stands there once, as it is typed
    return f'{raw}"""{docstring}\n"""\n\n{code}\n'


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Case:
    """One check of an exercise, on the part in a folder."""

    name: str
    file: Path
    mark: str
    number: int
    check: Check
    hunted: Hunt | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.number}"

    def run(self) -> None:
        """Run the check. Raises `Wrong` with a sentence, or any error of the learner's code."""
        names = answers_in(self.file, self.mark)
        if names is None:
            raise Wrong(f"{self.file.name} has no line {self.mark!r}.")
        if isinstance(names, str):
            raise Wrong(f"{self.file.name} {names}.")
        part = self._part(names)
        if part is None:
            raise Wrong(f"{self.file.name} does not define {self.name}.")
        if is_stub(part):
            raise Wrong(f"{self.name} {STILL_EMPTY}")
        try:
            self.check(part)
        except Wrong as wrong:
            raise Wrong(f"{(self.check.__doc__ or '').strip()} {wrong}") from None
        except NotImplementedError:
            raise Wrong(f"{self.name} {STILL_EMPTY}") from None
        except NameError as error:
            error.add_note(explained(str(error), cells_of(self.file)))
            raise

    def _part(self, names: Any) -> Any:
        if self.hunted is None:
            return names.get(self.name)
        tried = names.get(self.hunted.test.__name__), names.get(self.hunted.handed.__name__)
        return None if None in tried else Caught(*tried)


def cases_of(chapter: str, folder: Path) -> list[Case]:
    """Return the checks of a chapter's exercises, for the files in `folder` that exist."""
    return [case for case in _cases(chapter, folder) if case.file.exists()]


def _cases(chapter: str, folder: Path) -> Iterator[Case]:
    for name, each in exercises(chapter).items():
        file = folder / file_name(name)
        for number, check in enumerate(each.checks, 1):
            yield Case(name, file, MARK + each.dotted, number, check)
    for hunt in hunts_of(chapter):
        mark = HUNT_MARK + hunt.module
        for number, check in enumerate(hunt.all_checks(), 1):
            yield Case(hunt.name, folder / hunt_file(hunt), mark, number, check, hunt)

"""Exercises: a part of the package that the learner builds, its checks, and their comparisons.

A failed comparison says where two values differ and what was expected.
"""

import importlib
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from minigen_course.grading.stub import find_object, stub

Check = Callable[[Any], None]
Level = Literal["warm-up", "core", "stretch"]
POINTS = dict(zip(get_args(Level), (5, 10, 15), strict=True))

FOLDERS = sorted(path.parent for path in Path(__file__).parents[1].glob("ch*/exercises.toml"))
CHAPTERS = {  # chapter number -> the module of its checks
    folder.name[2:4]: f"minigen_course.{folder.name}.exercises" for folder in FOLDERS
}


@dataclass(frozen=True)
class Exercise:
    """A part that the learner writes, with hints in levels; its texts are in `exercises.toml`.

    `dotted` is the full name of the solution, the package's own object. `statement` (Markdown) says
    what to build. `use` is a cell that runs the part, named `mine`, in the engine. `harder` is a
    harder task. `level` says how much the exercise asks for, and `minutes` about how long it takes
    someone who has just read the chapter. `needs` are the names of the solution's module that the
    body will use, beside those of its signature. Nothing of the chapter is imported before
    `solution` or `checks` is read.
    """

    chapter: str
    name: str
    dotted: str
    statement: str
    hints: tuple[str, ...]
    use: str
    harder: str
    minutes: int
    level: Level = "core"
    needs: tuple[str, ...] = ()

    @property
    def stub(self) -> str:
        """The cell that the learner fills in."""
        return stub(self.dotted, self.needs)

    @property
    def points(self) -> int:
        """The marks for a part that passes all checks."""
        return POINTS[self.level]

    @property
    def solution(self) -> Any:
        """The package's own object."""
        return find_object(self.dotted)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks, in order.

        Each takes the learner's object, and raises `Wrong` (with a sentence) or any error of the
        learner's code.
        """
        found: tuple[Check, ...] = importlib.import_module(CHAPTERS[self.chapter]).CHECKS[self.name]
        return found


@cache
def exercises(chapter: str) -> dict[str, Exercise]:
    """Return a chapter's exercises by name. Raises `ValueError` for a chapter that has none."""
    if chapter not in CHAPTERS:
        known = ", ".join(CHAPTERS)
        raise ValueError(f"Chapter {chapter} has no exercises; choose one of {known}.")
    (folder,) = (each for each in FOLDERS if each.name[2:4] == chapter)
    texts = tomllib.loads((folder / "exercises.toml").read_text(encoding="utf-8"))
    return {
        name: Exercise(
            chapter,
            name,
            each["solution"],
            _joined(each["statement"]),
            tuple(map(_joined, each["hints"])),
            each["use"].rstrip(),
            _joined(each["harder"]),
            each["minutes"],
            each.get("level", "core"),
            tuple(each.get("needs", ())),
        )
        for name, each in texts.items()
    }


def stub_of(dotted: str) -> str:
    """Return the cell of the exercise that has this solution. Raises `ValueError` if none has."""
    for chapter in CHAPTERS:
        for each in exercises(chapter).values():
            if each.dotted == dotted:
                return each.stub
    raise ValueError(f"No exercise has the solution {dotted}.")


def _joined(text: str) -> str:
    """Return each paragraph as one line."""
    return "\n\n".join(each.replace("\n", " ") for each in text.strip().split("\n\n"))


class Wrong(AssertionError):
    """A learner's part is wrong; the message says where, and what would be right.

    IPython shows the message alone: the lines of the grader that raise it are of no help.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def expect(condition: object, message: str) -> None:
    """Raise `Wrong` with the message unless the condition holds."""
    if not condition:
        raise Wrong(message)


def expect_equal(found: Any, expected: Any, what: str) -> None:
    """Raise `Wrong` unless two plain values or sequences are equal; name the first difference.

    `what` describes the value in the message. A list may equal a tuple and an int a float, but True
    does not equal 1 (except as elements of sequences).
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(expected):
            raise Wrong(f"{what}: got {_shown(found)}; it should be {_shown(expected)}.")
        for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
            if mine != right:
                raise Wrong(f"{what}: element {index} is {mine!r}; it should be {right!r}.")
        return
    comparable = type(found) is type(expected) or _both_numbers(found, expected)
    if not comparable or found != expected:
        raise Wrong(f"{what}: got {_shown(found)}; it should be {_shown(expected)}.")


def expect_close(
    found: Any, expected: Tensor, what: str, axes: Sequence[str], tolerance: float = 1e-4
) -> None:
    """Raise `Wrong` unless two tensors have equal shapes and close numbers.

    The message names the first difference; `axes` are its words for the axes, as in `("token",
    "head", "dimension")`. `tolerance` is relative and absolute. nan equals nan, and dtypes are not
    compared.
    """
    if not isinstance(found, Tensor):
        raise Wrong(f"{what}: got {_shown(found)}; it should be a tensor.")
    if found.shape != expected.shape:
        raise Wrong(
            f"{what}: got the shape {list(found.shape)}; it should be {list(expected.shape)} "
            f"({', '.join(axes)})."
        )
    mine, right = found.double(), expected.double()
    close = torch.isclose(mine, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    if close.all():
        return
    place = (~close).nonzero()[0].tolist()
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
    raise Wrong(
        f"{what}: {int((~close).sum())} of {close.numel()} numbers differ, first at {where}: "
        f"{mine[tuple(place)]:.6g}; it should be {right[tuple(place)]:.6g}."
    )


def of_pure_part(*checks: Check) -> tuple[Check, ...]:
    """Return checks that also raise `Wrong` if a call of the part changes one of its arguments.

    Tensors, arrays, lists and dicts are compared, also one inside another.
    """
    return tuple(map(_of_pure_part, checks))


def _of_pure_part(check: Check) -> Check:
    @wraps(check)
    def checked(part: Any) -> None:
        def called(*given: Any) -> Any:
            before = _state(given)
            found = part(*given)
            for number, (now, then) in enumerate(zip(_state(given), before, strict=True), 1):
                expect(now == then, f"changed its argument {number}, which must stay as it was.")
            return found

        check(called)

    return checked


def _state(value: Any) -> Any:
    """Return what a later change of a tensor, array, list or dict changes, to be compared."""
    if isinstance(value, Tensor | np.ndarray):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return [(key, _state(each)) for key, each in value.items()]
    return list(map(_state, value)) if isinstance(value, list | tuple) else value


def num_steps(call: Callable[[], object]) -> int:
    """Return how many steps of Python a call takes: lines and instructions, also in functions.

    It is about the same on every machine; work inside compiled functions does not count.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _both_numbers(found: object, expected: object) -> bool:
    numbers = int | float
    return (
        isinstance(found, numbers)
        and isinstance(expected, numbers)
        and isinstance(found, bool) == isinstance(expected, bool)
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

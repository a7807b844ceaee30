"""Bug hunts: find the mistake in a part, catch it with a test, and mend the part.

The test is judged as carefully as the mended part. It must fail on the part that was handed out and
on parts with a related mistake, and pass on correct parts, however they are written.
"""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from minigen_course.grading.check import SECONDS, Result, judge, print_hints
from minigen_course.grading.exercise import FOLDERS, POINTS, Check, Wrong, expect
from minigen_course.grading.stub import (
    STILL_EMPTY,
    dotted_name,
    emptied,
    imports_of,
    is_stub,
    source_of,
)

Test = Callable[[Any], object]

HUNTS = {  # chapter number -> the modules of its hunts
    folder.name[2:4]: (
        f"minigen_course.{folder.name}.hunt",
        *(
            f"minigen_course.{folder.name}.hunts.{each.stem}"
            for each in sorted(folder.glob("hunts/[a-z]*.py"))
        ),
    )
    for folder in FOLDERS
    if (folder / "hunt.py").exists()
}


class Caught(NamedTuple):
    """What a learner hands in: a test, and the mended part (None until it is mended)."""

    test: Any
    mended: Any


@dataclass(frozen=True)
class Hunt:
    """A part with a mistake, and what is needed to judge a learner's test and mended part.

    `handed` is the part as it is handed out, and `test` a test that catches its mistake, with the
    signature of the learner's test. `mended` is correct, and `right` are correct parts that are
    written differently. `variants` have related mistakes, by what is wrong in them. `checks` apply
    to the mended part alone. `story` (Markdown) describes the symptom and where it appeared.
    `minutes` says about how long the hunt takes.
    """

    name: str
    handed: Any
    test: Test
    mended: Any
    right: Mapping[str, Any]
    variants: Mapping[str, Any]
    checks: tuple[Check, ...]
    hints: tuple[str, ...]
    story: str
    minutes: int
    points: int = POINTS["core"]

    @property
    def module(self) -> str:
        """The full name of its module, which marks its cell."""
        return str(self.handed.__module__)

    def all_checks(self) -> tuple[Check, ...]:
        """Return the checks of what a learner hands in, a `Caught`."""
        return (
            partial_check(fails_on_what_was_handed_out, self),
            partial_check(passes_on_what_is_right, self),
            partial_check(fails_on_related_mistakes, self),
            is_mended,
            *(_of_mended(each) for each in self.checks),
            passes_on_its_own,
        )


def hunts_of(chapter: str) -> tuple[Hunt, ...]:
    """Return a chapter's hunts, none if it has none."""
    return tuple(importlib.import_module(each).HUNT for each in HUNTS.get(chapter, ()))


def hunt_of(chapter: str, name: str = "") -> Hunt:
    """Return a chapter's hunt of a name, its first one for no name.

    Raises `ValueError` for a chapter that has none, and for another name.
    """
    if chapter not in HUNTS:
        raise ValueError(f"Chapter {chapter} has no hunt; these have one: {', '.join(HUNTS)}.")
    known = {each.name: each for each in hunts_of(chapter)}
    if name and name not in known:
        raise ValueError(f"Chapter {chapter} has no hunt {name}; it has {', '.join(known)}.")
    return known[name] if name else next(iter(known.values()))


def hunt_call(chapter: str, hunt: Hunt, function: str, points: str = "") -> str:
    """Return code that hands in a hunt's answer to a function, by name if there are several."""
    given = [str(int(chapter)), *([points] if points else [])]
    given += [f'name="{hunt.name}"'] if len(hunts_of(chapter)) > 1 else []
    given += [f"test={hunt.test.__name__}", f"mended={hunt.handed.__name__}"]
    return f"{function}({', '.join(given)})"


def hunt(
    chapter: int | str,
    *,
    name: str = "",
    test: Test,
    mended: Any = None,
    hint: int = 0,
    seconds: float = SECONDS,
) -> Any:
    """Hand in your test, and the part once you have mended it: `hunt(23, test=mine)`.

    `name` is that of the hunt, for a chapter that has several (default: its first). Prints what
    passed, or the first thing that is wrong. Returns your part if everything passed, otherwise the
    package's mended part, so that the next cells run either way. Raises `ValueError` for a chapter
    without a hunt of that name.
    """
    number = f"{int(chapter):02}"
    found = hunt_of(number, name)
    if is_stub(test):
        result = Result(found.test.__name__, False, STILL_EMPTY)
    else:
        result = judge(number, found.name, Caught(test, mended), seconds)
    print(result)
    if not result.passed:
        print_hints(found.hints, hint)
    return mended if result.passed else found.mended


def cell_of(dotted: str) -> str:
    """Return a hunt's cell: the part as it is handed out, and an empty test to fill in."""
    found: Hunt = importlib.import_module(dotted).HUNT
    handed, test = (source_of(dotted_name(each)) for each in (found.handed, found.test))
    (function,) = (each for each in ast.parse(test).body if isinstance(each, ast.FunctionDef))
    code = f"{handed}\n\n\n" + "\n".join(emptied(test.splitlines(), function))
    imports = "\n".join(imports_of(dotted, ast.parse(code)))
    return f"# hunt: {dotted}\n{imports}\n\n\n{code}"


def fails_on_what_was_handed_out(hunted: Hunt, caught: Caught) -> None:
    """your test, on the part as it was handed out:"""
    expect(callable(caught.test), f"is {caught.test!r}; it should be a function that takes a part.")
    expect(
        _failure(caught.test, hunted.handed) is not None,
        "it passes, and should fail: repeat what the story describes, and assert the right result.",
    )


def passes_on_what_is_right(hunted: Hunt, caught: Caught) -> None:
    """your test, on parts that are right:"""
    for name, part in {"the mended one": hunted.mended, **hunted.right}.items():
        failure = _failure(caught.test, part)
        expect(failure is None, f"it should pass on {name}, but fails: {failure}.")


def fails_on_related_mistakes(hunted: Hunt, caught: Caught) -> None:
    """your test, on parts with a related mistake:"""
    for name, part in hunted.variants.items():
        expect(
            _failure(caught.test, part) is not None,
            f"it passes, and should fail, on one that {name}.",
        )


def is_mended(caught: Caught) -> None:
    """the mended part:"""
    expect(
        caught.mended is not None,
        "your test is right. Mend the part so that it passes the test, and add mended=... here.",
    )


def passes_on_its_own(caught: Caught) -> None:
    """your test, on the part that you mended:"""
    failure = _failure(caught.test, caught.mended)
    expect(failure is None, f"it should pass, but fails: {failure}.")


def partial_check(check: Callable[[Hunt, Caught], None], hunted: Hunt) -> Check:
    """Bind a check to its hunt, and keep the check's docstring."""
    made = partial(check, hunted)
    made.__doc__ = check.__doc__
    return made


def _of_mended(check: Check) -> Check:
    def checked(caught: Caught) -> None:
        check(caught.mended)

    checked.__doc__ = f"the mended part, {check.__doc__}"
    return checked


def _failure(test: Test, part: Any) -> str | None:
    """Return how a test fails on a part, None if it passes; an empty test raises."""
    try:
        returned = test(part)
    except NotImplementedError:
        raise
    except _failures() as error:
        return " ".join(f"{type(error).__name__} {error}".split())
    if returned is not None:
        raise Wrong(f"it returned {returned!r}; a test states what must hold with `assert`.")
    return None


def _failures() -> tuple[type[BaseException], ...]:
    """Return what a test that fails may raise; the error of `pytest.raises` is no `Exception`."""
    pytest = sys.modules.get("pytest")
    return (Exception, SystemExit, *([pytest.fail.Exception] if pytest else []))

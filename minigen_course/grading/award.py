"""Marks in an assignment's notebook: the cells that award points call these functions.

They judge a part as `check` does, in a process of its own. The value of the last expression in a
cell is its marks, so a grader that reads such values gives a share of a cell's points.
"""

from collections.abc import Mapping
from typing import Any

from minigen_course.grading.check import SECONDS, Result, judge, pickled
from minigen_course.grading.exercise import Wrong, exercises
from minigen_course.grading.hunt import Caught, hunt_of
from minigen_course.grading.question import questions

_JUDGED: dict[tuple[str, str, str], tuple[bytes, Result]] = {}  # with the part that was judged


def award(chapter: int, points: float, *, seed: int | None = None, **part: Any) -> float:
    """Return the marks of one part: `award(22, 3, slots_of=slots_of)`.

    They are the share of the checks that it passes; with a course's seed, all of `points` if it
    passes the cases that the seed draws. Raises `Wrong` with a sentence for no marks.
    """
    result = _judged(chapter, part, "each" if seed is None else str(seed))
    return _marks(result, sum(result.each), points)


def award_hunt(chapter: int, points: float, *, test: Any, mended: Any, name: str = "") -> float:
    """Return the marks of a bug hunt: the share of its checks before the first that fails.

    `name` is that of the hunt, for a chapter that has several. Raises `Wrong` with a sentence for
    no marks.
    """
    result = _judged(chapter, {hunt_of(f"{chapter:02}", name).name: (test, mended)}, "each")
    return _marks(result, [*result.each, False].index(False), points)


def award_answer(chapter: int, points: float, *, seed: int, **answer: Any) -> float:
    """Return the marks of a question's answer. Raises `Wrong` with a sentence for a wrong one."""
    said = _said_of(chapter, seed, answer)
    print(f"✓ {said} {points:g} points.")
    return points


def passes_answer(chapter: int, *, seed: int, **answer: Any) -> None:
    """Raise `Wrong` with a sentence unless a question's answer is right."""
    _said_of(chapter, seed, answer)


def _said_of(chapter: int, seed: int, answer: Mapping[str, Any]) -> str:
    """Return a sentence on a right answer to a question. Raises `Wrong` for a wrong one."""
    ((name, given),) = answer.items()
    is_right, said = questions(f"{chapter:02}")[name].judge(seed, name, given)
    if not is_right:
        raise Wrong(f"{name}: {said}")
    return f"{name}: {said}"


def passes_check(chapter: int, number: int, *, seed: int | None = None, **part: Any) -> None:
    """Raise `Wrong` with a sentence unless a part passes one of its checks, counted from 1.

    For a hunt the part is a pair, the test and the mended part, and no earlier check may fail.
    """
    result = _judged(chapter, part, "each" if seed is None else str(seed))
    (given,) = part.values()
    first = 0 if isinstance(given, tuple) else number - 1
    needed = result.each[first:number]
    if not needed or not all(needed):
        raise Wrong(str(result))


def answered(chapter: int, **answer: Any) -> None:
    """Print whether a question has an answer of the right kind; it is not judged yet.

    Raises `Wrong` for a number where a word is asked for, and for a word that is no choice.
    """
    ((name, given),) = answer.items()
    question = questions(f"{chapter:02}")[name]
    said = question.objection(given)
    if said:
        raise Wrong(f"{name} {said}")
    print(f"{name} = {given!r} is an answer; it is judged when the assignment is graded.")


def _judged(chapter: int, part: Mapping[str, Any], which: str) -> Result:
    ((name, given),) = part.items()
    number, handed_in = f"{chapter:02}", given
    if isinstance(given, tuple):
        handed_in = Caught(*given)
    elif given is exercises(number)[name].solution:
        raise Wrong(f"{name} is the package's own part, not yours.")
    try:
        sent = pickled(handed_in)  # with all that it uses, so that a mended helper is judged again
    except Exception:
        return judge(number, name, handed_in, SECONDS, which)  # which says why
    known = _JUDGED.get((number, name, which))
    if known is None or known[0] != sent:
        known = sent, judge(number, name, handed_in, SECONDS, which)
        _JUDGED[number, name, which] = known
    return known[1]


def _marks(result: Result, num_passed: int, points: float) -> float:
    marks = round(points * num_passed / len(result.each), 2) if result.each else 0.0
    if not marks:
        raise Wrong(str(result))
    print(f"{result}\n{marks:g} of {points:g} points.")
    return marks

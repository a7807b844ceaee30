"""Questions without code: estimates, readings of a graph, diagnoses, and answers in words.

A number or a word is judged here; an answer in words is for the instructor, with a model answer and
a rubric. The numbers in a question are drawn by the course's seed.
"""

import ast
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from minigen_course.grading.varied import assigned
from minigen_course.handout.cells import parsed, said_of

MARK = "# question: "
UNANSWERED = "has no answer yet: write a number or a word instead of None."
MOST_DIGITS = 400  # of a result: more would only burn time
OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
Kind = Literal["estimate", "reading", "diagnosis"]


@dataclass(frozen=True)
class Question:
    """A question whose answer is a number, or one of some words.

    `ask` (Markdown) may name drawn values in braces, as in `{layers}`; `what` says what varies, for
    the instructor. `answer` returns the right answer for these values, and `why` one sentence on
    how it is found, with the same braces. A number may be `within` times too high or too low. A
    `reading` or a `diagnosis` has a `figure` (a matplotlib figure, or text of a terminal), made
    from the same values; a question with `choices` is answered by one of them.
    """

    kind: Kind
    ask: str
    what: str
    draw: Callable[[Random], dict[str, Any]]
    answer: Callable[..., float | str]
    why: str
    within: float = 1.05
    choices: tuple[str, ...] = ()
    figure: Callable[..., Any] | None = None
    points: int = 5
    minutes: int = 5

    def values(self, seed: int, name: str) -> dict[str, Any]:
        """Return the values that a course's seed draws."""
        return self.draw(Random(f"{seed} {name}"))

    def right(self, seed: int, name: str) -> float | str:
        """Return the right answer for a course."""
        return self.answer(**self.values(seed, name))

    def objection(self, given: object) -> str:
        """Return why a value is no answer to this question at all; an empty text if it is one."""
        if given is None:
            return UNANSWERED
        if self.choices:
            is_choice = isinstance(given, str) and given.strip().casefold() in self.choices
            known = ", ".join(map(repr, self.choices))
            return "" if is_choice else f"must be one of {known}, not {given!r}."
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if not is_number:
            return f"must be a number, not {given!r}."
        assert isinstance(given, int | float)
        is_usual = abs(given) <= sys.float_info.max
        return "" if is_usual else f"must be a finite number of at most {sys.float_info.max:.1e}."

    def judge(self, seed: int, name: str, given: object) -> tuple[bool, str]:
        """Return whether an answer is right, and a sentence on it."""
        objection = self.objection(given)
        if objection:
            return False, objection
        right, why = self.right(seed, name), self.why.format(**self.values(seed, name))
        if isinstance(right, str):
            is_right = str(given).strip().casefold() == right
            return is_right, why if is_right else f"not {given!r} but {right!r}. {why}"
        assert isinstance(given, int | float)
        if is_near(float(given), float(right), self.within):
            return True, why
        way = "high" if given > right else "low"
        return False, f"{given:,.6g} is too {way}; {right:,.6g} is right. {why}"


@dataclass(frozen=True)
class Written:
    """A question that is answered in words and graded by a person.

    `answer` is a model answer; `rubric` says what earns how many points.
    """

    ask: str
    answer: str
    rubric: Mapping[str, int]
    minutes: int = 10

    @property
    def points(self) -> int:
        """The marks of a full answer."""
        return sum(self.rubric.values())


def is_near(given: float, right: float, within: float) -> bool:
    """Return whether a number is at most `within` times too high or too low.

    >>> is_near(104, 100, 1.05), is_near(94, 100, 1.05), is_near(0, 0, 1.05)
    (True, False, True)
    """
    if given == right:
        return True
    if not math.isfinite(given) or given * right <= 0:
        return False
    return max(given / right, right / given) <= within * (1 + 1e-9)


def questions(chapter: str) -> Mapping[str, Question]:
    """Return a chapter's questions by name."""
    found: Mapping[str, Question] = assigned(chapter, "questions").QUESTIONS
    return found


def written(chapter: str) -> Mapping[str, Written]:
    """Return a chapter's questions in words, by name."""
    found: Mapping[str, Written] = assigned(chapter, "questions").WRITTEN
    return found


def value_in(source: str, name: str) -> float | str | None:
    """Return what a cell gives to `name`, without running it: a word, or arithmetic on numbers.

    Names that the cell set before may be used; None if it does not set `name`. Raises `ValueError`
    for anything else.

    >>> value_in("blocks = 3 + 4\\nanswer = 2**10 * blocks", "answer")
    7168
    """
    known: dict[str, float | str | None] = {}
    try:
        statements = parsed(source).body
    except SyntaxError as error:
        raise ValueError(said_of(error)) from error
    for each in statements:
        if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
            continue
        target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
        if isinstance(target, ast.Name):
            try:
                known[target.id] = _value(each.value, known)
            except (ArithmeticError, TypeError) as error:
                raise ValueError(f"cannot be computed: {error}") from error
    return known.get(name)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left, known), _value(node.right, known)
        if not all(isinstance(each, int | float) for each in (left, right)):
            raise TypeError("arithmetic is for numbers")
        if isinstance(node.op, ast.Pow) and abs(right) * math.log10(abs(left) + 1) > MOST_DIGITS:
            raise TypeError("the power is too large")
        found = OPERATIONS[type(node.op)](left, right)
        if isinstance(found, int) and found.bit_length() > MOST_DIGITS * math.log2(10):
            raise TypeError("the result is too large")
        return found
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand, known))
    raise ValueError(
        f"must be a number, arithmetic, or a word in quotes, not {ast.unparse(node)!r}"
    )

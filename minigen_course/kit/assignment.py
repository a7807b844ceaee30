"""A chapter's assignment: every exercise and question with its points, checks and solution.

It is neutral: `for_nbgrader`, `for_otter` and `for_classroom` write it in their systems' forms.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from minigen_course.figures.explore import png
from minigen_course.grading.exercise import Exercise, exercises
from minigen_course.grading.hunt import HUNTS, Hunt, cell_of, hunt_call, hunts_of
from minigen_course.grading.question import MARK, Question, Written, questions, written
from minigen_course.grading.stub import OWN, dotted_name, imports_of, source_of
from minigen_course.grading.varied import example, varied_of
from minigen_course.handout.course_files import REPOSITORY, headings
from minigen_course.handout.sheet import HUNT_RULES, measures

SEEN_SHARE = 0.6  # of an exercise's points, for the checks that learners can run themselves
AWARD = "minigen_course.grading.award"
Kind = Literal["part", "hunt", "question", "written"]
HOW: dict[Kind, str] = {
    "part": (
        "Of a part, replace the line that raises NotImplementedError; the cell below it says at "
        "once what is right and what is not."
    ),
    "hunt": "The cell below the part says at once what is right and what is not.",
    "question": "Of a question, replace None; the answer is judged when the assignment is graded.",
    "written": "To answer in words, select the cell for it, press Enter and write.",
}


@dataclass(frozen=True)
class Item:
    """One exercise or question of an assignment.

    `text` is what is asked, as Markdown, and `picture` a PNG that belongs to it. `stub` is the cell
    to fill in, and `solution` what an instructor puts there: code, or a model answer in words.
    `seen` is a cell that learners run for `seen_points`; `kept` one that only the grader has, for
    `kept_points`. `num_checks` counts the checks behind `seen`, and `handed` is what an award is
    for, as an expression.
    """

    chapter: str
    name: str
    kind: Kind
    text: str
    stub: str
    solution: str
    seen: str = ""
    seen_points: float = 0
    kept: str = ""
    kept_points: float = 0
    num_checks: int = 0
    handed: str = ""
    seed: int = 0
    picture: bytes = b""
    use: str = ""
    harder: str = ""
    rubric: str = ""

    @property
    def points(self) -> float:
        """The marks of a full answer."""
        return self.seen_points + self.kept_points

    @property
    def id(self) -> str:
        """A name that is unique in a course: letters, digits and underscores."""
        return f"c{self.chapter}_{self.name}"


@dataclass(frozen=True)
class Assignment:
    """What is handed out and handed in together; `name` is that of its files."""

    name: str
    chapter: str
    items: tuple[Item, ...]


def assignments_of(chapter: str, seed: int) -> Iterator[Assignment]:
    """Yield the assignments of a chapter: its exercises and questions, then its bug hunts if any.

    A hunt hands out a part that is almost right, so it is an assignment of its own, for later.
    """
    name = headings()[chapter].name
    items = [_part(each, seed) for each in exercises(chapter).values()]
    items += [_question(chapter, *each, seed) for each in questions(chapter).items()]
    items += [_written(chapter, *each) for each in written(chapter).items()]
    yield Assignment(name, chapter, tuple(items))
    if chapter in HUNTS:
        hunts = tuple(_hunt(chapter, each) for each in hunts_of(chapter))
        yield Assignment(f"{name}_hunt", chapter, hunts)


def seen_points(points: int) -> int:
    """Return how many points of a part are for the checks that learners can run themselves.

    >>> [seen_points(each) for each in (5, 10, 15)]
    [3, 6, 9]
    """
    return round(SEEN_SHARE * points)


def varies(chapter: str) -> Iterator[tuple[str, str]]:
    """Yield each exercise and question of a chapter, with what the seed changes in it."""
    for name, each in varied_of(chapter).items():
        yield name, f"in the example and the cases that are kept back: {each.what}"
    for hunt in hunts_of(chapter):
        yield hunt.name, "nothing: all look for the same mistake"
    for name, question in questions(chapter).items():
        yield name, f"in the question: {question.what}"
    for name in written(chapter):
        yield name, "nothing: it is answered in words"


def _part(each: Exercise, seed: int) -> Item:
    own = seen_points(each.points)
    kept = each.points - own
    what = measures(each.level.capitalize(), each.points, each.minutes)
    shares = f"{own} points for the checks below, {kept} for other inputs when it is graded"
    text = (
        f"## {each.name}\n\n*{what}: {shares}.*\n\n{each.statement}\n\n{example(each, seed)}\n\n"
        f"`check({int(each.chapter)}, {each.name}={each.name}, hint=1)` gives a hint."
    )
    parts = set(exercises(each.chapter))
    call = f"award({int(each.chapter)}, {{points}}, {{seed}}{each.name}={each.name})"
    return Item(
        *(each.chapter, each.name, "part", text, stub_for(each), solution_of(each.dotted)),
        seen=_award("award", call.format(points=own, seed="")),
        seen_points=own,
        kept=_award("award", call.format(points=kept, seed=f"seed={seed}, ")),
        kept_points=kept,
        num_checks=len(each.checks),
        handed=each.name,
        seed=seed,
        use="" if _imported(each.use) & parts else each.use,
        harder=each.harder,
    )


def stub_for(exercise: Exercise) -> str:
    """Return an exercise's stub without imports of parts that its chapter asks for.

    Such a part stands there as a type; its name is quoted instead.
    """
    code = exercise.stub
    lines, tree = code.splitlines(), ast.parse(code)
    parts = set(exercises(exercise.chapter))
    gone = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and {each.name for each in node.names} <= parts
    ]
    names = {each.asname or each.name for node in gone for each in node.names}
    types = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    for node in sorted(types, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        line, end = lines[node.lineno - 1], node.col_offset + len(node.id)
        quoted = f'{line[: node.col_offset]}"{node.id}"{line[end:]}'
        lines[node.lineno - 1] = quoted
    left = [line for number, line in enumerate(lines, 1) if number not in _lines_of(gone)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(left))


def _lines_of(nodes: list[ast.ImportFrom]) -> set[int]:
    return {line for each in nodes for line in range(each.lineno, (each.end_lineno or 0) + 1)}


def _imported(code: str) -> set[str]:
    """Return the names that code takes from minigen."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return {each.name for node in nodes if _is_own(node) for each in node.names}


def _is_own(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] in OWN


def solution_of(dotted: str) -> str:
    """Return the package's own part as a cell: the imports that it needs, and its source."""
    source = source_of(dotted)
    imports = "\n".join(imports_of(dotted.rpartition(".")[0], ast.parse(source)))
    return f"{imports}\n\n\n{source}".lstrip()


def _hunt(chapter: str, hunt: Hunt) -> Item:
    what = measures("Core", hunt.points, hunt.minutes)
    test, handed = hunt.test.__name__, hunt.handed.__name__
    mended = hunt.mended.__name__
    solution = "\n\n\n".join(solution_of(dotted_name(each)) for each in (hunt.mended, hunt.test))
    if mended != handed:
        solution += f"\n\n\n{handed} = {mended}"
    call = hunt_call(chapter, hunt, "award_hunt", str(hunt.points))
    return Item(
        *(chapter, hunt.name, "hunt"),
        f"## A bug hunt: {hunt.name}\n\n*{what}.*\n\n{hunt.story}\n\n{HUNT_RULES}",
        *(cell_of(hunt.module), solution),
        seen=_award("award_hunt", call),
        seen_points=hunt.points,
        num_checks=len(hunt.all_checks()),
        handed=f"({test}, {handed})",
    )


def _question(chapter: str, name: str, question: Question, seed: int) -> Item:
    values = question.values(seed, name)
    drawn = question.figure(**values) if question.figure else None
    asked = question.ask.format(**values)
    if isinstance(drawn, str):
        asked += f"\n\n```\n{drawn.rstrip()}\n```"
    text = (
        f"## {name}\n\n*{measures(question.kind.capitalize(), question.points, question.minutes)}."
        f"*\n\n{asked}\n\n{_form(question)}"
    )
    head = f"{MARK}{chapter}.{name}\n{name} = "
    call = f"award_answer({int(chapter)}, {question.points}, seed={seed}, {name}={name})"
    return Item(
        *(chapter, name, "question", text, f"{head}None  # your answer"),
        f"{name} = {question.right(seed, name)!r}  # {question.why.format(**values)}",
        seen=_award("answered", f"answered({int(chapter)}, {name}={name})"),
        kept=_award("award_answer", call),
        kept_points=question.points,
        handed=name,
        seed=seed,
        picture=png(drawn) if drawn is not None and not isinstance(drawn, str) else b"",
    )


def _form(question: Question) -> str:
    if question.choices:
        return f"Answer with one of {', '.join(f'`{each!r}`' for each in question.choices)}."
    if question.within == 1:
        return "Answer with the exact number; arithmetic such as `2 * 3` may stand there too."
    return (
        f"Answer with a number, at most {100 * (question.within - 1):.0f} % too high or too low; "
        "arithmetic such as `2 * 3` may stand there too."
    )


def _written(chapter: str, name: str, asked: Written) -> Item:
    rubric = "\n".join(f"- {points} points: {what}" for what, points in asked.rubric.items())
    return Item(
        *(chapter, name, "written"),
        f"## {name}\n\n*{measures('In words', asked.points, asked.minutes)}.*\n\n{asked.ask}",
        *("*Your answer, in a few sentences.*", asked.answer),
        kept_points=asked.points,
        rubric=rubric,
    )


def _award(name: str, call: str) -> str:
    return f"from {AWARD} import {name}\n\n{call}"


def introduction(assignment: Assignment, rules: str) -> str:
    """Return the head of an assignment, as Markdown: what is in it, and how it is handed in."""
    chapter = headings()[assignment.chapter]
    items = assignment.items
    rows = "\n".join(f"| {each.name} | {each.kind} | {each.points:g} |" for each in items)
    total = sum(each.points for each in items)
    kind = "Bug hunt" if items[0].kind == "hunt" else "Assignment"
    how = " ".join(HOW[each] for each in dict.fromkeys(each.kind for each in items))
    return (
        f"# {kind} {assignment.chapter}: {chapter.title}\n\n"
        f"Read [the chapter]({REPOSITORY}/blob/main/notebooks/{chapter.name}.ipynb) first. "
        f"{how} {rules}\n\n"
        f"| | kind | points |\n|---|---|--:|\n{rows}\n| **in all** | | {total:g} |"
    )


def markdown_cell(text: str, **metadata: Any) -> dict[str, Any]:
    """Return a Markdown cell."""
    return {"cell_type": "markdown", "metadata": metadata, "source": text}


def code_cell(text: str, **metadata: Any) -> dict[str, Any]:
    """Return a code cell that has not been run."""
    made: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
    return {**made, "source": text, "metadata": metadata}


def notebook_of(cells: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a notebook with these cells; their ids are made of its name."""
    for number, cell in enumerate(cells):
        cell.setdefault("id", f"{name}-{number}".replace("_", "-"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}

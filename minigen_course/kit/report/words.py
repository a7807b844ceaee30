"""Answers in words: one page to read them all, and a table in which a person gives the marks.

What a person typed into the table stays as it is; only rows of new answers are added.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from minigen.errors import OptionError
from minigen_course.grading.question import Written, written
from minigen_course.handout.answers import notebook_cells
from minigen_course.kit.collect import Submission
from minigen_course.kit.grade import NOT_YET, Grade, Graded
from minigen_course.kit.report.feedback import page, rubric
from minigen_course.kit.report.marks import plain, write_rows, write_whole
from minigen_course.kit.tasks import Assigned

WORDS, PAGE = "words.csv", "words.html"
COLUMNS = ("student", "chapter", "question", "of", "marks", "comment")
LONGEST = 20_000  # characters of an answer
NOT_TYPED = (  # what stands in an answer's cell before anything is typed
    "*Your answer, in a few sentences.*",
    "_Type your answer here, replacing this text._",
    "YOUR ANSWER HERE",
)
END = "<!-- END QUESTION -->"
Key = tuple[str, str, str]  # student, chapter, question


@dataclass(frozen=True)
class Marked:
    """What a person typed: marks (None as long as there are none), and a comment."""

    marks: float | None
    comment: str


@dataclass(frozen=True)
class Table:
    """The table as a person left it: its columns, its rows, and what was typed, by student."""

    columns: tuple[str, ...] = COLUMNS
    rows: tuple[tuple[str, ...], ...] = ()
    delimiter: str = ","
    marked: Mapping[Key, Marked] = field(default_factory=dict)


def write(
    folder: Path,
    graded: Sequence[Graded],
    submissions: Iterable[Submission],
    assignments: Sequence[Assigned],
    table: Table,
) -> list[Graded]:
    """Write the table and the page if there are answers; return the submissions with their marks.

    `table` is what `read_table` returned before.
    """
    answers = answers_of(submissions, assignments)
    found = [with_words(each, assignments, answers, table) for each in graded]
    if answers:
        write_table(folder / WORDS, table, answers)
        write_whole(folder / PAGE, words_page(found))
    return found


def answers_of(
    submissions: Iterable[Submission], assignments: Iterable[Assigned]
) -> dict[Key, str]:
    """Return what the submissions answer in words: no empty answers."""
    asked = [
        (each.chapter, name, question)
        for each in assignments
        if not each.is_hunt
        for name, question in written(each.chapter).items()
    ]
    found = {}
    for submission in submissions:
        for chapter, name, question in asked:
            texts = [_answer_in(file, chapter, name, question) for file in submission.files]
            text = next((each for each in reversed(texts) if each), "")
            if text:
                found[submission.student, chapter, name] = text
    return found


def _answer_in(path: Path, chapter: str, name: str, question: Written) -> str:
    """Return the answer in a notebook: nbgrader's own cell, or what follows the question."""
    if path.suffix != ".ipynb":
        return ""
    cells = notebook_cells(path)
    for cell in cells:
        metadata = cell.get("metadata", {}) if isinstance(cell, dict) else {}
        found = metadata.get("nbgrader", {}) if isinstance(metadata, dict) else {}
        if isinstance(found, dict) and found.get("grade_id") == f"c{chapter}_{name}":
            text = _typed(_markdown(cell) or "")
            if text:
                return text
    return _typed("\n\n".join(_after_heading(cells, name, question)))


def _after_heading(cells: Iterable[Any], name: str, question: Written) -> Iterator[str]:
    """Yield the text after a question, up to the next heading or to a cell with code."""
    heading = re.compile(rf"(?m)^#+ +{re.escape(name)} *$")
    is_inside = False
    for cell in cells:
        text = _markdown(cell)
        if text is not None and heading.search(text):
            is_inside = True
            yield text.partition(question.ask)[2]
        elif is_inside and (text is None or END in text or re.search(r"(?m)^## ", text)):
            return
        elif is_inside and text is not None:
            yield text


def _markdown(cell: Any) -> str | None:
    """Return the text of a Markdown cell; None for another cell."""
    if not isinstance(cell, dict) or cell.get("cell_type") != "markdown":
        return None
    source = cell.get("source", "")
    lines = source if isinstance(source, list) else [source]
    return "".join(each for each in lines if isinstance(each, str))


def _typed(text: str) -> str:
    """Return what a student typed, without what stood there before."""
    for each in NOT_TYPED:
        text = text.replace(each, "")
    text = text.strip()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … (cut here)"


def read_table(path: Path) -> Table:
    """Return the table of marks, an empty one if there is no file.

    A spreadsheet may have written it with semicolons or tabs, and with decimal commas. Raises
    `OptionError` for marks that cannot be counted, and for a file that is no such table.
    """
    if not path.exists():
        return Table()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is no text in UTF-8: save it from the spreadsheet as 'CSV UTF-8'."
        ) from error
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    columns = tuple(rows[0]) if rows else ()
    missing = [each for each in COLUMNS if each not in columns]
    if missing:
        raise OptionError(
            f"{path} lacks the column {missing[0]}; its columns should be {', '.join(COLUMNS)}."
        )
    marked: dict[Key, Marked] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        values = dict(zip(columns, row, strict=False))
        where = f"{path.name}, row {number} ({values['student']}, {values.get('question', '')})"
        student, chapter, name = (values.get(each, "") for each in COLUMNS[:3])
        key = (student, chapter, name)
        found = _marked(where, values)
        if found.marks is not None and marked.get(key, found) != found:
            raise OptionError(f"{where}: this answer has a row before; keep one of them.")
        marked[key] = found
    return Table(columns, tuple(map(tuple, rows[1:])), delimiter, marked)


def _marked(where: str, values: Mapping[str, str]) -> Marked:
    """Return a row's marks and comment. Raises `OptionError` for marks that cannot be counted."""
    typed, comment = values.get("marks", "").strip(), values.get("comment", "").strip()
    if typed.casefold() in ("", NOT_YET):
        return Marked(None, comment)
    chapter, name = values.get("chapter", ""), values.get("question", "")
    try:
        points = written(chapter)[name].points
    except (ValueError, KeyError) as error:
        raise OptionError(f"{where}: chapter {chapter} has no question {name} in words.") from error
    try:
        marks = float(typed.replace(",", "."))
    except ValueError:
        marks = math.nan
    if not 0 <= marks <= points:
        raise OptionError(
            f"{where}: the marks are {typed!r}; they should be a number from 0 to {points}, or "
            "empty as long as there are none."
        )
    return Marked(marks, comment)


def write_table(path: Path, table: Table, answers: Mapping[Key, str]) -> None:
    """Add rows for answers that have none; leave the file alone if there are no such answers."""
    new = [key for key in answers if _plain(key) not in table.marked]
    if not new:
        return
    rows = []
    for student, chapter, name in sorted(new):
        points = str(written(chapter)[name].points)
        values = dict(zip(COLUMNS, (plain(student), chapter, name, points, "", ""), strict=True))
        rows.append([values.get(each, "") for each in table.columns])
    write_rows(path, [table.columns, *table.rows, *rows], table.delimiter)


def _plain(key: Key) -> Key:
    return plain(key[0]), key[1], key[2]


def with_words(
    graded: Graded, assignments: Iterable[Assigned], answers: Mapping[Key, str], table: Table
) -> Graded:
    """Return a graded submission with its answers in words, graded or not, after the others."""
    grades: list[Grade] = []
    for assigned in assignments:
        grades += [each for each in graded.grades if each.assignment == assigned.name]
        if assigned.is_hunt:
            continue
        for name, question in written(assigned.chapter).items():
            key = (graded.student, assigned.chapter, name)
            typed = table.marked.get(_plain(key), Marked(None, ""))
            grades.append(_grade(assigned, name, question, answers.get(key, ""), typed))
    return replace(graded, grades=tuple(grades))


def _grade(assigned: Assigned, name: str, question: Written, text: str, typed: Marked) -> Grade:
    is_graded = typed.marks is not None or not text
    return Grade(
        *(assigned.chapter, name, question.points, typed.marks or 0.0, 0, 0),
        why="" if text or typed.marks is not None else "no answer",
        source=text,
        assignment=assigned.name,
        is_written=True,
        is_graded=is_graded,
        comment=typed.comment,
    )


def words_page(graded: Sequence[Graded]) -> str:
    """Return a page with each question in words, its model answer, rubric, and all answers."""
    asked = [each for each in graded[0].grades if each.is_written]
    parts = [
        "<h1>Answers in words</h1>",
        f"<p>Type marks and comments into <code>{WORDS}</code>, and grade again.</p>",
    ]
    for first in asked:
        question = written(first.chapter)[first.name]
        parts += [
            f"<h2>{first.chapter} {escape(first.name)} ({first.points} points)</h2>",
            f'<div class="text">{escape(question.ask)}</div>',
            f'<h3>Model answer</h3><div class="text">{escape(question.answer)}</div>',
            f"<h3>Rubric</h3>{rubric(first)}",
        ]
        for each in sorted(graded, key=lambda one: one.student):
            found = (one for one in each.grades if one.is_written)
            parts += _answer_on_page(each.student, next(one for one in found if _is(one, first)))
    return page("Answers in words", parts)


def _is(one: Grade, other: Grade) -> bool:
    return (one.chapter, one.name) == (other.chapter, other.name)


def _answer_on_page(student: str, grade: Grade) -> Iterator[str]:
    if not grade.source:
        return
    marks = f"{grade.earned:g} of {grade.points}" if grade.is_graded else NOT_YET
    yield f"<h3>{escape(student)}: {marks}</h3>"
    yield f'<div class="text">{escape(grade.source)}</div>'
    if grade.comment:
        yield f"<p><strong>Comment:</strong> {escape(grade.comment)}</p>"

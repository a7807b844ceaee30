"""Tables of marks: one for people, and those that the gradebooks of Canvas and Moodle import.

Sources: Canvas's `gradebook_importer.rb`, which wants the columns up to Section in this order, and
finds students by ID; Moodle's `assign/feedback/offline/importgradeslib.php`, which wants columns
Identifier, Grade and "Last modified (grade)" (an English Moodle calls them so).
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from minigen_course.kit.grade import NOT_YET, Grade, Graded

MARKS, CANVAS, MOODLE = "marks.csv", "canvas.csv", "moodle.csv"
CANVAS_COLUMNS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE_COLUMNS = (
    *("Identifier", "Full name", "Grade", "Maximum Grade", "Last modified (grade)"),
    "Feedback comments",
)


def write_marks(graded: Sequence[Graded], folder: Path) -> list[Path]:
    """Write the tables for which there are students, and return their paths.

    A table of another time whose students are gone is removed.
    """
    written = []
    for name, rows in (
        (MARKS, marks(graded)),
        (CANVAS, canvas([each for each in graded if each.canvas_id])),
        (MOODLE, moodle([each for each in graded if each.moodle_id])),
    ):
        path = folder / name
        if rows:
            write_rows(path, rows)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def write_rows(path: Path, rows: Iterable[Sequence[str]], delimiter: str = ",") -> None:
    """Write a table, whole or not at all."""
    table = io.StringIO(newline="")
    csv.writer(table, delimiter=delimiter).writerows(rows)
    write_whole(path, table.getvalue())


def write_whole(path: Path, text: str) -> None:
    """Write a text, whole or not at all; half a character, which UTF-8 refuses, as `\\ud800`."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, path)


def plain(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula.

    >>> plain("=1+1"), plain("-3"), plain("-a")
    ("'=1+1", '-3', "'-a")
    """
    return f"'{text}" if re.match(r"[=+@\t\r]|-[^\d.]", text) else text


def marks(graded: Sequence[Graded]) -> list[list[str]]:
    """Return a row per student with all marks."""
    names = [f"{each.chapter} {each.name} ({each.points})" for each in graded[0].grades]
    rows = [["student", "late", *names, "total", "of", "to read"]]
    for each in graded:
        notes = [f"{grade.name}: {note}" for grade in each.grades for note in grade.notes]
        earned = [f"{grade.earned:g}" if grade.is_graded else NOT_YET for grade in each.grades]
        total = [f"{each.earned:g}", str(each.points), "; ".join([*each.problems, *notes])]
        row = [each.student, "late" if each.late else "", *earned, *total]
        rows.append([plain(value) for value in row])
    return rows


def canvas(graded: Sequence[Graded]) -> list[list[str]]:
    """Return what Canvas's gradebook imports: a column per assignment; none without students.

    An assignment has no column before everything in it is graded, because Canvas takes an empty
    cell for a mark that was removed.
    """
    if not graded:
        return []
    unfinished = {grade.assignment for each in graded for grade in each.pending}
    names = [each for each in assignments_of(graded[0]) if each not in unfinished]
    if not names:
        return []
    possible = [f"{sum(each.points for each in _in(graded[0], name)):g}" for name in names]
    empty = [""] * (len(CANVAS_COLUMNS) - 1)
    rows = [[*CANVAS_COLUMNS, *names], ["    Points Possible", *empty, *possible]]
    for each in graded:
        earned = [f"{sum(grade.earned for grade in _in(each, name)):g}" for name in names]
        rows.append([plain(each.student), each.canvas_id, "", "", "", *earned])
    return rows


def moodle(graded: Sequence[Graded]) -> list[list[str]]:
    """Return what a Moodle assignment imports as its grading worksheet; none without students.

    All assignments count together, because a Moodle assignment has one grade. Students with an
    answer in words that is not graded yet have no row.
    """
    done = [each for each in graded if not each.pending]
    if not done:
        return []
    rows = [list(MOODLE_COLUMNS)]
    for each in done:
        said = [f"{grade.name}: {grade.earned:g} of {grade.points}" for grade in each.grades]
        said += [f"{grade.name}: {grade.comment}" for grade in each.grades if grade.comment]
        identifier = f"Participant {each.moodle_id}"
        values = [each.student, f"{each.earned:g}", str(each.points), "-", "; ".join(said)]
        rows.append([identifier, *map(plain, values)])
    return rows


def assignments_of(graded: Graded) -> list[str]:
    """Return the names of the assignments that were graded, in order."""
    return list(dict.fromkeys(each.assignment for each in graded.grades))


def _in(graded: Graded, assignment: str) -> list[Grade]:
    return [each for each in graded.grades if each.assignment == assignment]

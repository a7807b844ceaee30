"""The folder of results: marks, a page of feedback per student, answers in words, a summary."""

import re
from collections.abc import Sequence
from pathlib import Path

from minigen_course.kit.grade import Graded
from minigen_course.kit.report.feedback import feedback
from minigen_course.kit.report.marks import CANVAS, MOODLE, write_marks, write_whole
from minigen_course.kit.report.summary import summary

SUMMARY, FEEDBACK = "summary.md", "feedback"


def write_all(graded: Sequence[Graded], folder: Path) -> list[Path]:
    """Write the marks, one page of feedback per student, and the summary; return the paths."""
    ordered = sorted(graded, key=lambda each: each.student)
    (folder / FEEDBACK).mkdir(parents=True, exist_ok=True)
    written = write_marks(ordered, folder)
    for each in ordered:
        path = folder / FEEDBACK / f"{safe_name(each.student)}.html"
        write_whole(path, feedback(each))
        written.append(path)
    write_whole(folder / SUMMARY, summary(ordered))
    return [*written, folder / SUMMARY]


def left_out(graded: Sequence[Graded]) -> list[str]:
    """Return a sentence for each import file that lacks marks because answers are not graded."""
    names = sorted({grade.assignment for each in graded for grade in each.pending})
    students = sorted(each.student for each in graded if each.moodle_id and each.pending)
    said = []
    if names and any(each.canvas_id and each.pending for each in graded):
        said.append(f"{CANVAS} has no column yet for {', '.join(names)}: answers are not graded.")
    if students:
        said.append(f"{MOODLE} has no row yet for {', '.join(students)}: answers are not graded.")
    return said


def safe_name(student: str) -> str:
    """Return a student's name as a file's name on any system.

    >>> safe_name("Zoë O'Hara / 2")
    "Zoë O'Hara _ 2"
    """
    return re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", student) or "_"

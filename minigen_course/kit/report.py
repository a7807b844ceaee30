"""Write marks, feedback and a summary for the instructor from graded submissions."""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import mean, median

from minigen_course.grading.exercise import exercises
from minigen_course.grading.hunt import HUNTS, hunt_of
from minigen_course.grading.stub import source_of, stub
from minigen_course.handout.course_files import REPOSITORY, headings
from minigen_course.kit.grade import Grade, Graded
from minigen_course.kit.similar import Pair, alike

MARKS, SUMMARY, FEEDBACK = "marks.csv", "summary.md", "feedback"
BIN = 10  # percent: the width of a step of the distribution
STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; color: #1b1b1b; background: #fff }
h2 { margin-top: 2rem; border-bottom: 1px solid #ccc }
.full { color: #00664d }
.part { color: #8a4b00 }
code { overflow-wrap: anywhere }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 14px }
li, details { margin: .3rem 0 }"""
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
{body}
</html>
"""


def write_all(graded: Sequence[Graded], folder: Path) -> list[Path]:
    """Write the marks, one page of feedback per student, and the summary; return the paths."""
    ordered = sorted(graded, key=lambda each: each.student)
    (folder / FEEDBACK).mkdir(parents=True, exist_ok=True)
    written = [folder / MARKS, folder / SUMMARY]
    _write_marks(ordered, folder / MARKS)
    for each in ordered:
        path = folder / FEEDBACK / f"{safe_name(each.student)}.html"
        path.write_text(feedback(each), encoding="utf-8")
        written.append(path)
    (folder / SUMMARY).write_text(summary(ordered), encoding="utf-8")
    return written


def safe_name(student: str) -> str:
    """Return a student's name as a file's name on any system.

    >>> safe_name("Zoë O'Hara / 2")
    "Zoë O'Hara _ 2"
    """
    return re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", student) or "_"


def _write_marks(graded: Sequence[Graded], path: Path) -> None:
    """Write a table that Canvas, Moodle and spreadsheets read: a row per student."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        names = [f"{each.chapter} {each.name} ({each.points})" for each in _grades_of(graded)]
        writer.writerow(["student", "late", *names, "total", "of", "to read"])
        for each in graded:
            notes = [f"{grade.name}: {note}" for grade in each.grades for note in grade.notes]
            marks = [f"{grade.earned:g}" for grade in each.grades]
            total = [f"{each.earned:g}", each.points, "; ".join([*each.problems, *notes])]
            row = [each.student, "late" if each.late else "", *marks, *total]
            writer.writerow([_plain(str(value)) for value in row])
    os.replace(unfinished, path)


def _plain(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if re.match(r"[=+@\t\r]|-[^\d.]", text) else text


def _grades_of(graded: Sequence[Graded]) -> tuple[Grade, ...]:
    return graded[0].grades if graded else ()


def feedback(graded: Graded) -> str:
    """Return a student's feedback as one HTML page: what failed, why, and hints."""
    title = f"{graded.student}: {graded.earned:g} of {graded.points} points"
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(each)}</p>" for each in graded.problems]
    for each in graded.grades:
        parts += _feedback_on(each)
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(parts))


def _feedback_on(grade: Grade) -> list[str]:
    heading = headings()[grade.chapter]
    kind = "full" if grade.earned == grade.points else "part"
    link = f"{REPOSITORY}/blob/main/notebooks/{heading.name}.ipynb"
    said = [
        f'<h2 class="{kind}">{escape(grade.name)}: {grade.earned:g} of {grade.points}</h2>',
        f'<p>Chapter {grade.chapter}: <a href="{link}">{escape(heading.title)}</a>. '
        f"{grade.num_passed} of {grade.num_checks} checks passed.</p>",
    ]
    if grade.why:
        said.append(f"<p>Your answer {_marked(_sentence(grade.why))}</p>")
    if grade.failed:
        items = "".join(f"<li>{_marked(each)}</li>" for each in grade.failed)
        said.append(f"<ul>{items}</ul>")
    if grade.earned < grade.points:
        said += [
            f"<details><summary>Hint {number}</summary>{_marked(text)}</details>"
            for number, text in enumerate(_hints(grade), 1)
        ]
    if grade.source:
        code = f"<pre>{escape(grade.source)}</pre>"
        said.append(f"<details><summary>What was graded</summary>{code}</details>")
    return said


def _marked(text: str) -> str:
    """Return a text as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _sentence(why: str) -> str:
    if why == "no answer":
        return "was not found: no cell or file has this exercise."
    return why if why.endswith((".", "?")) else f"{why}."


def _hints(grade: Grade) -> tuple[str, ...]:
    known = exercises(grade.chapter)
    if grade.name in known:
        return known[grade.name].hints
    is_hunt = grade.chapter in HUNTS and hunt_of(grade.chapter).name == grade.name
    return hunt_of(grade.chapter).hints if is_hunt else ()


def summary(graded: Sequence[Graded]) -> str:
    """Return what an instructor wants to know of a class, as Markdown."""
    shares = [100 * each.earned / each.points for each in graded]
    lines = [
        "# Summary",
        "",
        f"{_submissions(len(graded))}, {sum(each.late for each in graded)} late. Of all points: "
        f"{mean(shares):.0f} % on average, median {median(shares):.0f} %.",
        "",
        "## Distribution",
        "",
        *_distribution(shares),
        "",
        "## Exercises, the hardest first",
        "",
        *_hardest(graded),
        "",
        "## Answers that are alike",
        "",
        *_pairs(similar(graded)),
        "",
        "## To read",
        "",
        *_to_read(graded),
        "",
    ]
    return "\n".join(lines)


def _submissions(number: int) -> str:
    return f"{number} submission{'s' * (number != 1)}"


def _distribution(shares: Iterable[float]) -> list[str]:
    steps = Counter(min(int(each // BIN), 100 // BIN - 1) for each in shares)
    rows = [
        f"| {BIN * step} to {BIN * (step + 1)} % | {steps[step]} | {'█' * steps[step]} |"
        for step in range(100 // BIN)
    ]
    return ["| points | submissions | |", "|---|--:|---|", *rows]


def _hardest(graded: Sequence[Graded]) -> list[str]:
    """Return a row per exercise: its average, and the check that most answers fail."""
    rows = []
    for index, first in enumerate(_grades_of(graded)):
        grades = [each.grades[index] for each in graded]
        share = mean(100 * each.earned / each.points for each in grades)
        failed = Counter(said.partition(":")[0] for each in grades for said in each.failed)
        whys = Counter(each.why for each in grades if each.why)
        common = failed.most_common(1) + whys.most_common(1)
        shown = "; ".join(f"{text} ({count})" for text, count in common).replace("|", "\\|")
        rows.append((share, f"| {first.chapter} {first.name} | {share:.0f} % | {shown} |"))
    head = ["| exercise | average | most often |", "|---|--:|---|"]
    return head + [row for _, row in sorted(rows, key=lambda each: each[0])]


def similar(graded: Sequence[Graded]) -> list[Pair]:
    """Return the pairs of answers that are alike, for all exercises."""
    found = []
    for index, first in enumerate(_grades_of(graded)):
        known = exercises(first.chapter).get(first.name)
        if known is None:
            continue  # a question, or a hunt: the handed-out part is most of every answer
        sources = {each.student: each.grades[index].source for each in graded}
        found += alike(
            f"{first.chapter} {first.name}",
            {student: source for student, source in sources.items() if source},
            (stub(known.dotted), source_of(known.dotted)),
        )
    return found


def _pairs(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return ["None."]
    rows = [
        f"| {each.exercise} | {each.one} | {each.other} | {100 * each.share:.0f} % |"
        for each in pairs
    ]
    return ["| exercise | student | student | alike |", "|---|---|---|--:|", *rows]


def _to_read(graded: Sequence[Graded]) -> list[str]:
    rows = [
        f"- {each.student}, {grade.name}: {note}"
        for each in graded
        for grade in each.grades
        for note in grade.notes
    ]
    rows += [f"- {each.student}: {problem}" for each in graded for problem in each.problems]
    return rows or ["Nothing."]

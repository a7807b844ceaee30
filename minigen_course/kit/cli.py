"""`minigen course`: commands for instructors."""

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from minigen.errors import OptionError

MOST = 1_000_000  # seconds and GB of an answer: the system counts in 64 bits

course = typer.Typer(help="For instructors: build assignments, grade them.", no_args_is_help=True)


@course.callback()
def _course() -> None:
    """For instructors: build assignments, grade them."""


@course.command()
def build(
    folder: Annotated[Path, typer.Argument(help="The folder to create.")],
    chapters: Annotated[str, typer.Option(help="The chapters to assign, such as 21-25 or 13,16.")],
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Draws examples, kept cases and questions (default: a new one)."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="nbgrader, otter (Gradescope) or github-classroom.")
    ] = "nbgrader",
) -> None:
    """Build a course: an assignment per chapter, with solutions, points, rubrics and hidden tests.

    The same seed builds the same course; another one changes examples, the cases that are kept
    back, and the numbers in questions. Nothing that learners get holds a solution: it is searched.

    minigen course build my-course --chapters 21-25

    minigen course build my-course --chapters 22 --format otter
    """
    from rich.console import Console
    from rich.progress import track

    from minigen_course.kit.build import FORMATS, README, Course
    from minigen_course.kit.build import build as build_course

    if form not in FORMATS:
        raise OptionError(f"There is no format {form!r}; there are {', '.join(FORMATS)}.")
    chosen = tuple(chapters_in(chapters))
    made = Course(chosen, secrets.randbits(62) if seed is None else seed, form)
    console = Console(stderr=True)
    for _ in track(build_course(folder, made), "building", total=len(chosen), console=console):
        pass
    print(f"The course is in {folder}; begin with {folder / README}.", file=sys.stderr)


@course.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="One file or one folder per student.")],
    chapters: Annotated[
        str | None, typer.Option(help="The chapters that were assigned, such as 21-22 or 13,16.")
    ] = None,
    course_folder: Annotated[
        Path | None,
        typer.Option("--course", help="What `minigen course build` made: chapters, kept cases."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the results go (default: FOLDER-grades).")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Processor time that one answer may take.")
    ] = 10.0,
    submission_seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Time that a submission's stopped answers may take together.",
        ),
    ] = 60.0,
    memory: Annotated[
        float, typer.Option(min=0.1, help="Memory in GB that one answer may take.")
    ] = 2.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Submissions at once (default: one per core).")
    ] = None,
    assignment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Grade this assignment, such as 22_paged or 22_paged_hunt; may be repeated "
            "(default: all that at least one submission has).",
        ),
    ] = None,
    again: Annotated[
        list[str] | None,
        typer.Option(metavar="STUDENT", help="Grade this student again; may be repeated."),
    ] = None,
) -> None:
    """Grade submissions: tables of marks, a page of feedback per student, and summary.md.

    A submission is what `minigen workspace` hands out, filled in: notebooks, Python files, or
    folders of them, also with the names that Canvas and Moodle give to downloads. Each answer runs
    in a process of its own with limits. Marks are the share of the checks that pass. The files of a
    submission are only read, so edited checks change nothing.

    Marks are in marks.csv. For files as Canvas or Moodle name them, canvas.csv or moodle.csv is
    what its gradebook imports. With --course, answers in words are collected: read words.html, type
    marks and comments into words.csv, and run the command again.

    An interrupted run continues where it was. Changed submissions are graded again.

    minigen course grade submissions --chapters 21-22

    minigen course grade submissions --chapters 21-22 --again "Ada Lovelace"

    minigen course grade submissions --course my-course
    """
    if sys.platform == "win32":
        raise OptionError(
            "Grading needs processes that Windows does not have; run it on Linux or in WSL."
        )
    if chapters is None and course_folder is None:
        raise OptionError("Say what was assigned: --chapters 21-22, or --course FOLDER.")
    for name, given in (("--seconds", seconds), ("--memory", memory)):
        if not given <= MOST:  # nan is not, either
            raise OptionError(f"{name} is {given:g}; it should be a number from 0.1 to {MOST:,}.")
    from rich.console import Console
    from rich.progress import track

    from minigen_course.kit.box import Limits, isolation
    from minigen_course.kit.build import make_folder, read_course
    from minigen_course.kit.collect import collect
    from minigen_course.kit.grade import grade_all
    from minigen_course.kit.report import words
    from minigen_course.kit.report.folder import SUMMARY, left_out, write_all
    from minigen_course.kit.tasks import assigned_in, handed_in, named

    built = read_course(course_folder) if course_folder else None
    chosen = chapters_in(chapters) if chapters else list(built.chapters if built else ())
    submissions = collect(folder)
    known = {each.student for each in submissions}
    for student in again or ():
        if student not in known:
            raise OptionError(f"{folder} has no submission of {student}.")
    target = out or folder.with_name(f"{folder.name}-grades")
    table = words.read_table(target / words.WORDS) if built else words.Table()
    all_of = assigned_in(chosen)
    assigned, skipped = (
        (named(all_of, assignment), []) if assignment else handed_in(all_of, submissions)
    )
    limits = Limits(seconds, int(memory * 1e9), submission_seconds=submission_seconds)
    print(f"{len(submissions)} submissions; each answer: {isolation()}.", file=sys.stderr)
    print(f"Assignments: {', '.join(each.name for each in assigned)}.", file=sys.stderr)
    if skipped:
        names = ", ".join(each.name for each in skipped)
        print(f"Skipped, because no submission has them: {names}.", file=sys.stderr)
    make_folder(target / "results")
    grading = grade_all(
        *(submissions, assigned, target / "results", limits, jobs or os.cpu_count() or 1),
        *(again or (), built.seed if built else None),
    )
    console = Console(stderr=True)
    graded = list(track(grading, "grading", total=len(submissions), console=console))
    if built:
        graded = words.write(target, graded, submissions, assigned, table)
    write_all(graded, target)
    waiting = sum(len(each.pending) for each in graded)
    if waiting:
        print(
            f"Answers in words that are not graded yet: {waiting}. Read {target / words.PAGE}, "
            f"type marks into {target / words.WORDS}, and run this command again.",
            file=sys.stderr,
        )
    for said in left_out(graded):
        print(said, file=sys.stderr)
    print(f"The results are in {target}; begin with {target / SUMMARY}.", file=sys.stderr)


def chapters_in(text: str) -> list[str]:
    """Return the chapters that a text names; the course's own between the ends of a range.

    >>> chapters_in("21-23,51")
    ['21', '22', '23', '51']
    """
    from minigen_course.grading.exercise import CHAPTERS

    found = []
    for part in text.replace(" ", "").split(","):
        ends = re.fullmatch(r"(\d\d)(?:-(\d\d))?", part)
        if ends is None:
            raise OptionError(f"{part!r} names no chapters; write for example 21-25 or 13,16.")
        first, last = ends[1], ends[2] or ends[1]
        between = [each for each in CHAPTERS if first <= each <= last]
        if not between:
            raise OptionError(f"There is no chapter {part}; there are {', '.join(CHAPTERS)}.")
        found += between
    return list(dict.fromkeys(found))

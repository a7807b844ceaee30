"""Build a course from chapters and a seed: assignments, solutions, and what varies in them."""

import contextlib
import io
import json
import locale
import logging
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from minigen.errors import OptionError
from minigen_course.handout.course_files import headings
from minigen_course.kit.assignment import Assignment, assignments_of, varies
from minigen_course.kit.for_classroom import repository_of
from minigen_course.kit.for_nbgrader import config, source_notebook
from minigen_course.kit.for_otter import master_notebook
from minigen_course.kit.leaks import Released, leaks, released_notebook

Format = Literal["nbgrader", "otter", "github-classroom"]
FORMATS: tuple[Format, ...] = get_args(Format)
COURSE, VARIES, README = "course.toml", "varies.md", "README.md"
NEXT = {
    "nbgrader": """\
`source/` has the assignments with solutions and hidden tests, `release/` what learners get, and
`nbgrader_config.py` and `gradebook.db` belong to nbgrader.

1. Hand out `release/22_paged/22_paged.ipynb`.
2. Put what each student hands in at `submitted/STUDENT/22_paged/22_paged.ipynb`.
3. Grade it. nbgrader's own commands work in this folder:

   ```bash
   nbgrader autograde 22_paged
   jupyter lab                           # menu Nbgrader, Formgrader: grade the answers in words
   nbgrader generate_feedback 22_paged   # a page per student, in feedback/
   nbgrader export                       # all marks, in grades.csv
   ```

After a change in `source/`, run `nbgrader generate_assignment 22_paged --force`.

minigen's own grader keeps answers apart from each other and from the network, and nbgrader does
not: `minigen course grade SUBMISSIONS --course .` grades the same notebooks.""",
    "otter": """\
Each chapter has a folder: the master notebook with solutions, `student/` for learners, and
`autograder/` with the zip file to upload to Gradescope. On this machine:

```bash
otter run SUBMISSION.ipynb -a 22_paged/autograder/*.zip
```""",
    "github-classroom": """\
Each chapter has a folder: the files of a template repository. Push it to a repository, mark that
as a template, and choose it for a new assignment in GitHub Classroom.""",
}
ABOUT = """\
# {title}

Made by `minigen course build` for the chapters {chapters}, with the seed {seed}.

**Keep this folder to yourself**: with the seed, the cases that are kept back can be drawn again.
What learners get has been searched for solutions, statement by statement and line by line.

{next}

An assignment with `_hunt` in its name hands out a part with one mistake: almost a solution. Hand it
out after the assignment of the same chapter is due.

`{varies}` lists what the seed changes in each exercise. `{course}` is for `minigen course grade`.
"""


@dataclass(frozen=True)
class Course:
    """What a course was built from."""

    chapters: tuple[str, ...]
    seed: int
    format: Format


def build(folder: Path, course: Course) -> Iterator[str]:
    """Write a course to a folder; yield the name of each chapter as it is done.

    Raises `OptionError` if the folder has files or cannot be made, if a package is missing, or if
    something that learners get would give a solution away; then nothing is left behind.
    """
    _refuse(folder, course.format)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(unfinished)
    try:
        for chapter in course.chapters:
            for assignment in assignments_of(chapter, course.seed):
                released = _WRITERS[course.format](unfinished, assignment, course.seed)
                found = leaks(released, assignment.items)
                if found:
                    more = f" ({len(found)} places in all)" if len(found) > 1 else ""
                    raise OptionError(f"{found[0]}{more}")
            yield chapter
        _write(unfinished / README, _about(folder, course))
        _write(unfinished / VARIES, _varies(course))
        _write(unfinished / COURSE, _course_file(course))
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            folder.rmdir()
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder unless there is one. Raises `OptionError` if the system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"The folder {path} cannot be made ({error.strerror}); name another one."
        ) from error


def read_course(folder: Path) -> Course:
    """Return what a built course was made from. Raises `OptionError` for another folder."""
    path = folder / COURSE
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return Course(tuple(found["chapters"]), int(found["seed"]), found["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"{folder} is no folder that `minigen course build` made: {COURSE} cannot be read "
            f"({error})."
        ) from error


def _refuse(folder: Path, form: Format) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise OptionError(f"{folder} has files already; name a new folder.")
    package = {"nbgrader": "nbgrader", "otter": "otter"}.get(form)
    if package:
        try:
            __import__(package)
        except ImportError as error:
            raise OptionError(
                f"The format {form} needs a package that is not installed; "
                "`pip install 'minigen[instructor]'` brings it."
            ) from error


def _about(folder: Path, course: Course) -> str:
    return ABOUT.format(
        title=folder.resolve().name,
        chapters=", ".join(course.chapters),
        seed=course.seed,
        next=NEXT[course.format].replace("22_paged", headings()[course.chapters[0]].name),
        varies=VARIES,
        course=COURSE,
    )


def _varies(course: Course) -> str:
    rows = [
        f"| {chapter} | {name} | {what} |"
        for chapter in course.chapters
        for name, what in varies(chapter)
    ]
    head = "# What the seed changes\n\n| chapter | exercise | what varies |\n|---|---|---|"
    return "\n".join([head, *rows, ""])


def _course_file(course: Course) -> str:
    return (
        f"chapters = {json.dumps(course.chapters)}\nseed = {course.seed}\n"
        f"format = {json.dumps(course.format)}\n"
    )


def _for_nbgrader(folder: Path, assignment: Assignment, seed: int) -> Sequence[Released]:
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    name = assignment.name
    _write(folder / "nbgrader_config.py", config())
    _write(folder / "source" / name / f"{name}.ipynb", _json(source_notebook(assignment)))
    settings = Config()
    exec(config(), {"get_config": lambda: settings})
    settings.CourseDirectory.root = str(folder.resolve())
    with _quiet():
        said = NbGraderAPI(config=settings).generate_assignment(name)
    if not said["success"]:
        raise OptionError(f"nbgrader cannot make the assignment {name}: {said.get('error')}")
    return [_released(folder, f"release/{name}/{name}.ipynb")]


def _for_otter(folder: Path, assignment: Assignment, seed: int) -> Sequence[Released]:
    from otter.assign import main as assign

    name = assignment.name
    master = folder / name / f"{name}.ipynb"
    _write(master, _json(master_notebook(assignment)))
    with _quiet():
        assign(str(master), str(folder / name), no_run_tests=True)
    return [_released(folder, f"{name}/student/{name}.ipynb")]


def _released(folder: Path, path: str) -> Released:
    return released_notebook(path, (folder / path).read_text(encoding="utf-8"))


def _for_classroom(folder: Path, assignment: Assignment, seed: int) -> Sequence[Released]:
    found = []
    for path, text in repository_of(assignment, seed).items():
        _write(folder / assignment.name / path, text)
        code = (text,) if path.endswith(".py") else ()
        found.append(Released(f"{assignment.name}/{path}", code, text))
    return found


_WRITERS = {"nbgrader": _for_nbgrader, "otter": _for_otter, "github-classroom": _for_classroom}


def for_commands() -> dict[str, str]:
    """Return the environment variables with which nbgrader's commands find what they start.

    nbgrader starts `alembic` by its name, so this Python's own commands come first in PATH. And
    alembic reads a file with the name of this Python's folder in the locale's encoding, which must
    be UTF-8 if that name has letters outside ASCII.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    in_utf8 = locale.getencoding().lower().replace("-", "") == "utf8"
    return {"PATH": path} | ({} if in_utf8 else {"LC_ALL": "C.UTF-8"})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a library logs and prints to itself, and this process's folder as it was."""
    here, variables = Path.cwd(), dict(os.environ)
    os.environ.update(for_commands())
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        logging.disable(before)
        os.chdir(here)


def _json(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

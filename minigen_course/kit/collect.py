"""Find submissions in a folder as Canvas, Moodle or a person left them, and the answers in them."""

import ast
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minigen.errors import OptionError
from minigen_course.handout.answers import Definitions, cells_of, defined_by

CANVAS = re.compile(r"(?P<student>[^_]+)(?P<late>_LATE)?_(?P<id>\d+)_\d+_(?P<name>.+)")
MOODLE = re.compile(r"(?P<student>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+_?(?P<name>.*)")
READ = (".ipynb", ".py")
IGNORED = {"__pycache__", ".ipynb_checkpoints", "__MACOSX", ".git"}


@dataclass(frozen=True)
class Submission:
    """What one student handed in. `problems` says which files could not be read, and why.

    `canvas_id` is the user's id in Canvas, and `moodle_id` the participant's number in a Moodle
    assignment, if the names of the files have them.
    """

    student: str
    files: tuple[Path, ...]
    late: bool = False
    problems: tuple[str, ...] = ()
    canvas_id: str = ""
    moodle_id: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell's definitions, as code that can be run; `marked` if it holds the answer itself."""

    source: str
    marked: bool


@dataclass(frozen=True)
class Candidate:
    """An answer to one exercise in one file: its own source, and all cells that it may need."""

    file: Path
    own: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Owner:
    """The student that a file's name gives, and the id that tells students of one name apart."""

    student: str
    canvas_id: str = ""
    moodle_id: str = ""


@dataclass
class _Found:
    files: list[Path] = field(default_factory=list)
    late: bool = False
    problems: list[str] = field(default_factory=list)


def collect(folder: Path) -> list[Submission]:
    """Return the submissions of a folder by student: a file or a folder each, in order of names.

    Canvas's `name_LATE_1_2_file.ipynb` and Moodle's `First Last_1_assignsubmission_file_` give the
    student's name and id. Ids distinguish students of the same name. Raises
    `OptionError` for a folder that is missing or has no submission.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder; it should hold one file or folder per student.")
    found: dict[_Owner, _Found] = defaultdict(_Found)
    for path in sorted(folder.iterdir()):
        if path.name in IGNORED or path.name.startswith("."):
            continue
        owner, late = _owner(path)
        each = found[owner]
        each.late = each.late or late
        _add(path, each)
    if not found:
        raise OptionError(f"{folder} has no submission: neither a notebook nor a folder.")
    names = Counter(owner.student for owner in found)
    made = [
        Submission(
            _name(owner, names[owner.student]),
            tuple(each.files),
            each.late,
            tuple(each.problems),
            owner.canvas_id,
            owner.moodle_id,
        )
        for owner, each in found.items()
    ]
    return sorted(made, key=lambda each: each.student)


def _name(owner: _Owner, num_namesakes: int) -> str:
    number = owner.canvas_id or owner.moodle_id
    return f"{owner.student} ({number})" if num_namesakes > 1 and number else owner.student


def _owner(path: Path) -> tuple[_Owner, bool]:
    name = os.fsencode(path.name).decode("utf-8", "backslashreplace")  # as it can be written
    moodle = MOODLE.fullmatch(name)
    if moodle:
        return _Owner(moodle["student"], moodle_id=moodle["id"]), False
    canvas = None if path.is_dir() else CANVAS.fullmatch(name)
    if canvas:
        return _Owner(canvas["student"], canvas_id=canvas["id"]), bool(canvas["late"])
    return _Owner(name if path.is_dir() else Path(name).stem), False


def handed_in_as(path: Path) -> str:
    """Return a file's name as the student gave it: without prefix, suffix and Canvas's `-1`.

    >>> handed_in_as(Path("lovelaceada_LATE_1001_2002_22_paged-1.ipynb"))
    '22_paged'
    """
    for form in (MOODLE, CANVAS):
        found = form.fullmatch(path.name)
        if found and found["name"]:
            return re.sub(r"-\d+$", "", Path(found["name"]).stem)
    return re.sub(r"-\d+$", "", path.stem)


def _add(path: Path, found: _Found) -> None:
    if path.is_symlink():
        found.problems.append(f"{path.name} is a link; links are not followed.")
    elif path.is_dir():
        inner = [each for each in sorted(path.iterdir()) if each.name not in IGNORED]
        if not inner:
            found.problems.append(f"The folder {path.name} is empty.")
        for each in inner:
            _add(each, found)
    elif path.suffix not in READ:
        found.problems.append(f"{path.name} is neither a notebook (.ipynb) nor Python (.py).")
    else:
        try:
            cells_of(path)
        except ValueError as error:
            found.problems.append(f"{path.name} {error}.")
        else:
            found.files.append(path)


def candidates(files: Iterable[Path], mark: str, name: str) -> Iterator[Candidate]:
    """Yield the answers to an exercise in these files.

    A cell with the exercise's mark holds one; where no file has the mark, so does a cell that
    defines `name`.
    """
    sources = {file: cells_of(file) for file in files}
    is_marked = any(mark in each.splitlines() for cells in sources.values() for each in cells)
    for file, cells in sources.items():
        chosen = [
            each
            for each in cells
            if (mark in each.splitlines() if is_marked else _defines(each, name))
        ]
        if chosen:
            notes = () if is_marked else (f"{file.name} has no line {mark!r}",)
            yield Candidate(file, chosen[-1], tuple(_runnable(cells, chosen[-1])), notes)


def _runnable(cells: Iterable[str], own: str) -> Iterator[Cell]:
    """Yield the definitions of the cells that can be parsed; always those of the answer's own."""
    definitions = Definitions()
    for each in cells:
        try:
            statements = definitions.read(each)
        except SyntaxError:
            if each is own:
                yield Cell(each, True)
            continue
        if statements:
            yield Cell(ast.unparse(ast.Module(statements, [])), each is own)


def _defines(source: str, name: str) -> bool:
    try:
        statements = Definitions().read(source)
    except SyntaxError:
        return False
    return name in defined_by(statements)

"""Grade a class of 60 twice, and compare the marks: `python -m tests.class_of_60`.

The class hands in chapters 21 and 22 as real ones do: right answers in several styles, wrong, empty
and broken ones, copies with other names, and code that hangs, forks, ends Python, reads files or
changes what grades it. Each student's marks are known before. The time is printed; nothing in here
depends on it.
"""

import argparse
import ast
import csv
import inspect
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from typer.testing import CliRunner

from minigen_course.grading.exercise import CHAPTERS, Exercise, exercises
from minigen_course.grading.hunt import hunts_of
from minigen_course.handout.workspace import exercise_files
from minigen_course.kit.assignment import solution_of
from minigen_course.kit.cli import course
from minigen_course.kit.report.folder import SUMMARY
from minigen_course.kit.report.marks import MARKS
from tests.answers import Answers

ASSIGNED = ("21", "22")
SIZE = 60
STUB = "raise NotImplementedError  # your turn"
EXERCISES = {each.name: each for chapter in ASSIGNED for each in exercises(chapter).values()}
RIGHT = sum(each.points for each in EXERCISES.values())
POINTS = RIGHT + sum(hunt.points for each in ASSIGNED for hunt in hunts_of(each))
WRONG = {  # name -> statements of slots_of, and what they earn
    "too small": ("return [block_ids[p // block_size] + p % block_size for p in positions]", 0),
    "from one": ("return [(block_ids[p // block_size] - 1) * block_size for p in positions]", 0),
    "contiguous": (
        "return [block_ids[0] * block_size + p for p in positions]",
        1.25,
    ),  # a check of 4
    "nothing": ("return None", 0),
    "text": ("return 'slots'", 0),
    "fails": ("return positions['x']", 0),
}
AUTHORS = (  # statements of slots_of that are right, each in its own way
    "found = []\n    for each in positions:\n        block = each // block_size\n"
    "        offset = each - block * block_size\n"
    "        found.append(block_size * block_ids[block])\n        found[-1] += offset\n"
    "    return found",
    "found = {}\n    for block, start in enumerate(block_ids):\n"
    "        for offset in range(block_size):\n"
    "            found[block * block_size + offset] = start * block_size + offset\n"
    "    return [found[each] for each in positions]",
    "block = lambda each: block_ids[each // block_size]\n"
    "    offset = lambda each: each - each // block_size * block_size\n"
    "    return list(map(lambda each: block(each) * block_size + offset(each), positions))",
    "import torch\n    each = torch.tensor(list(positions), dtype=torch.long)\n"
    "    block = torch.tensor(list(block_ids))[torch.div(each, block_size, rounding_mode='floor')]"
    "\n    found = block * block_size + torch.remainder(each, block_size)\n"
    "    return found.tolist()",
)
HOSTILE = {
    "hangs": "while True: pass",
    "waits": "import time; time.sleep(1000)",
    "exits": "import os; os._exit(0)",
    "quits": "raise SystemExit",
    "kills": "import os; os.kill(os.getppid(), 9)",
    "aborts": "import os; os.abort()",
    "forks": "import os\n    while True: os.fork()",
    "runs": "import os; os.system('true')",
    "one list": "return [0] * 10**12",
    "eats": "x = []\n    while True: x.append(bytes(10**8))",
    "imports": "from minigen.kv_cache.paged import slots_of as s\n    "
    "return s(block_ids, positions, block_size)",
    "getattr": "import minigen.kv_cache.paged as m\n    "
    "return getattr(m, 'slots' + '_of')(block_ids, positions, block_size)",
    "patches": "import minigen_course.grading.exercise as m\n    m.expect_equal = print\n"
    "    return []",
    "patches behind": "import sys\n"
    "    names = vars(sys.modules['minigen_course.ch22_paged.exercises'])\n"
    "    names['expect_equal'] = lambda *a, **k: None\n    return []",
    "reads": "return open('/etc/passwd').read()",
    "calls home": "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
}


@dataclass(frozen=True)
class Student:
    """A submission: files by path, and the marks that it deserves; `copied` from whom."""

    name: str
    files: Mapping[str, str]
    marks: float
    copied: str = ""


def students() -> Iterator[Student]:
    """Yield the class."""
    forms = [_folder, _canvas, _moodle]
    for number in range(14):
        style = number % 2
        yield forms[number % 3](f"right {number}", _answers(style), RIGHT)
    for number in range(4):
        own = {name: solution_of(each.dotted) for name, each in EXERCISES.items()}
        yield _folder(f"package {number}", own, RIGHT)
    for number, (name, (body, earned)) in enumerate(WRONG.items()):
        marks = RIGHT - _slots().points + earned
        yield forms[number % 3](f"wrong {name}", _with_slots(number % 2, body), marks)
    for number in range(3):
        part = dict(list(_answers(0).items())[: 3 + number])
        yield _folder(f"half {number}", part, sum(EXERCISES[each].points for each in part))
    for name, body in HOSTILE.items():
        yield _folder(f"hostile {name}", _with_slots(0, body), RIGHT - _slots().points)
    for number in range(4):
        yield _copy(f"copy {number}", f"author {number}")
        yield _author(f"author {number}", number)
    yield from _broken()


def _broken() -> Iterator[Student]:
    sheets = {name: text for name, text in exercise_files().items() if name[:2] in ASSIGNED}
    yield Student("empty folder", {"empty folder/": ""}, 0)
    yield Student("untouched", {f"untouched/{name}": text for name, text in sheets.items()}, 0)
    yield Student("corrupt", {"corrupt.ipynb": "{"}, 0)
    yield Student("no notebook", {"no notebook/21.ipynb": '{"cells": 3}'}, 0)
    yield Student("a picture", {"a picture/scan.pdf": "%PDF"}, 0)
    yield Student("binary", {"binary/work.py": "\0\0"}, 0)
    unmarked = {
        f"misnamed/{number}.py": text.replace(f"# exercise: {EXERCISES[name].dotted}", "")
        for number, (name, text) in enumerate(_texts(_answers(0)).items())
    }
    yield Student("misnamed", unmarked, RIGHT)
    edited = _texts(_answers(1)) | {
        "check": "def check(*args, **parts):\n    return True\n\n\ncheck(21)\n"
    }
    yield _folder("edits the checks", {}, RIGHT, edited)
    one_file = "\n\n".join(_texts(_answers(1)).values())
    yield Student("one file", {"one file.py": one_file}, RIGHT)


def _slots() -> Exercise:
    return EXERCISES["slots_of"]


def _answers(style: int) -> dict[str, str]:
    """Return a right answer to each exercise, in one of two styles where there are two."""
    found = {}
    for name, each in EXERCISES.items():
        module = import_module(f"tests.answers.{CHAPTERS[each.chapter].split('.')[1]}")
        answers: Answers = module.ANSWERS[name]
        chosen = answers.right[style]
        part = answers.right[0] if "<locals>" in chosen.__qualname__ else chosen
        named = re.sub(
            rf"(?m)^(def|class) {part.__name__}\b", rf"\1 {name}", inspect.getsource(part)
        )
        found[name] = f"{_imports(inspect.getsource(module))}\n\n\n{named}"
    return found


def _imports(source: str) -> str:
    nodes = [
        each for each in ast.parse(source).body if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    lines = (ast.unparse(each) for each in nodes)
    return "\n".join(each for each in lines if "tests" not in each)


def _with_slots(style: int, body: str) -> dict[str, str]:
    """Return right answers, but for `slots_of`."""
    head = "def slots_of(block_ids, positions, block_size):\n    "
    return _answers(style) | {"slots_of": head + body + "\n"}


def _author(name: str, number: int) -> Student:
    return _folder(name, _with_slots(number % 2, AUTHORS[number]), RIGHT)


def _copy(name: str, author: str) -> Student:
    """Return a copy of an author's work with other names and comments."""
    number = int(author.split()[-1])
    renamed = AUTHORS[number]
    for old, new in {"found": "x1", "block": "number", "offset": "rest", "each": "k"}.items():
        renamed = re.sub(rf"\b{old}\b", new, renamed)
    body = f"# My own work.\n    {renamed}"
    return replace(_folder(name, _with_slots(number % 2, body), RIGHT), copied=author)


def _texts(answers: Mapping[str, str]) -> dict[str, str]:
    return {name: f"# exercise: {EXERCISES[name].dotted}\n{text}" for name, text in answers.items()}


def _folder(
    name: str, answers: Mapping[str, str], marks: float, texts: Mapping[str, str] | None = None
) -> Student:
    found = texts or _texts(answers)
    return Student(name, {f"{name}/{each}.py": text for each, text in found.items()}, marks)


def _canvas(name: str, answers: Mapping[str, str], marks: float) -> Student:
    """Return a submission as Canvas names it: each file with the student's name in front."""
    found = _texts(answers)
    number = zlib.crc32(name.encode())
    files = {f"{name}_{number}_{at}_{each}.py": found[each] for at, each in enumerate(found)}
    return Student(name, files, marks)


def _moodle(name: str, answers: Mapping[str, str], marks: float) -> Student:
    """Return a submission as Moodle names it: a notebook in a folder with a number."""
    cells = [{"cell_type": "code", "source": text} for text in _texts(answers).values()]
    number = zlib.crc32(name.encode())
    path = f"{name}_{number}_assignsubmission_file_/work.ipynb"
    return Student(name, {path: json.dumps({"cells": cells})}, marks)


def write(folder: Path, handed_in: Iterable[Student]) -> None:
    """Write submissions into a folder."""
    for each in handed_in:
        for name, text in each.files.items():
            path = folder / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


SUBMISSION_SECONDS = 20.0


def grade(folder: Path, out: Path, seconds: float) -> bytes:
    """Grade the class by the command; return the bytes of marks.csv."""
    arguments = ["grade", str(folder), "--chapters", ",".join(ASSIGNED), "--out", str(out)]
    limits = ["--seconds", f"{seconds:g}", "--submission-seconds", f"{SUBMISSION_SECONDS:g}"]
    found = CliRunner().invoke(course, [*arguments, *limits])
    if found.exit_code:
        raise RuntimeError(found.output) from found.exception
    return (out / MARKS).read_bytes()


def mistakes(marks: bytes, summary: str, handed_in: Sequence[Student]) -> list[str]:
    """Return a sentence per student with other marks than deserved, and per copy not named."""
    rows = csv.DictReader(marks.decode().splitlines())
    earned = {row["student"]: float(row["total"]) for row in rows}
    found = [
        f"{each.name} has {earned.get(each.name)} points and deserves {each.marks}."
        for each in handed_in
        if earned.get(each.name) != each.marks
    ]
    for each in handed_in:
        if each.copied and f"| 22 slots_of | 2 | {each.copied}, {each.name} |" not in summary:
            found.append(f"{each.name} is not named as a copy of {each.copied}.")
    return found


def main() -> None:
    """Grade the class twice; print the time of each, and exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for one answer")
    parser.add_argument("--keep", type=Path, help="a folder for the class and its grades")
    options = parser.parse_args()
    handed_in = list(students())
    with tempfile.TemporaryDirectory() as scratch:
        home = options.keep or Path(scratch)
        write(home / "class", handed_in)
        found, both = [], []
        for number in (1, 2):
            started = time.perf_counter()
            both.append(grade(home / "class", home / f"grades-{number}", options.seconds))
            minutes = (time.perf_counter() - started) / 60
            print(f"{len(handed_in)} submissions in {minutes:.1f} min on {os.cpu_count()} cores")
            summary = (home / f"grades-{number}" / SUMMARY).read_text(encoding="utf-8")
            found += mistakes(both[-1], summary, handed_in)
        if both[0] != both[1]:
            found.append("The two gradings differ.")
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()

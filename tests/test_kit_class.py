"""A class of 60 is graded twice: right, wrong, broken and hostile submissions, in three forms.

`python -m pytest tests/test_kit_class.py -m long -s` prints how long it took.
"""

import csv
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minigen_course.handout.workspace import exercise_files
from minigen_course.kit.cli import course

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="grading needs fork"),
]

SECONDS = "20"
MARKS = {
    "slots_of": "# exercise: minigen.kv_cache.paged.slots_of",
    "BlockAllocator": "# exercise: minigen.kv_cache.block_allocator.BlockAllocator",
    "copy_on_write": "# exercise: minigen.kv_cache.block_allocator.copy_on_write",
}
FILES = {
    "slots_of": "22_paged/slots_of.py",
    "BlockAllocator": "21_blocks/block_allocator.py",
    "copy_on_write": "21_blocks/copy_on_write.py",
}
SLOTS = "def slots_of(block_ids, positions, block_size):\n    "
ONE_LINE = "return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
BY_HAND = """\
found = []
    for p in positions:
        block, offset = divmod(p, block_size)
        found.append(block_ids[block] * block_size + offset)
    return found"""
WITH_A_DICT = """\
from minigen.errors import OutOfBlocksError


class BlockAllocator:
    def __init__(self, num_blocks):
        self.pool = list(range(1, num_blocks + 1))
        self.owners = {}

    @property
    def num_free(self):
        return len(self.pool)

    def allocate(self, count):
        if count > len(self.pool):
            raise OutOfBlocksError("too few blocks")
        got = [self.pool.pop() for _ in range(count)]
        self.owners.update(dict.fromkeys(got, 1))
        return got

    def share(self, block_ids):
        for each in block_ids:
            self.owners[each] += 1

    def release(self, block_ids):
        gone = []
        for each in block_ids:
            self.owners[each] -= 1
            if self.owners[each] == 0:
                del self.owners[each]
                gone.append(each)
        self.pool += gone
        return gone

    def num_owners(self, block_id):
        return self.owners.get(block_id, 0)"""
WITH_A_COUNTER = """\
from collections import Counter, deque

import minigen.errors


class BlockAllocator:
    def __init__(self, num_blocks):
        self.counts = Counter()
        self.unused = deque(range(num_blocks, 0, -1))

    num_free = property(lambda self: len(self.unused))

    def allocate(self, count):
        result = []
        if self.num_free < count:
            raise minigen.errors.OutOfBlocksError(f"{count} are too many")
        while len(result) < count:
            result.append(self.unused.popleft())
            self.counts[result[-1]] = 1
        return result

    def share(self, block_ids):
        for number in block_ids:
            if self.counts[number] < 1:
                raise ValueError("free")
            self.counts[number] = self.counts[number] + 1

    def release(self, block_ids):
        def drop(number):
            if self.counts[number] < 1:
                raise ValueError("free")
            self.counts[number] = self.counts[number] - 1
            return self.counts[number] == 0

        done = [number for number in block_ids if drop(number)]
        for number in done:
            self.unused.append(number)
        return done

    def num_owners(self, block_id):
        return self.counts[block_id]"""
COPIED = re.sub(r"\b(pool|owners|got|gone|each)\b", r"my_\1", WITH_A_DICT)
SEARCHES = WITH_A_DICT.replace(
    "return len(self.pool)", "return sum(1 for each in self.pool if each not in self.owners)"
)
COPIES = """\
def copy_on_write(allocator, table, index):
    old = table[index]
    if allocator.num_owners(old) > 1:
        (new,) = allocator.allocate(1)
        allocator.release([old])
        table[index] = new
        return old, new"""
COPIES_TOO = """\
def copy_on_write(allocator, table, index):
    shared = allocator.num_owners(table[index]) != 1
    if not shared:
        return None
    replacement, source = allocator.allocate(1)[0], table[index]
    table[index] = replacement
    allocator.release((source,))
    return source, replacement"""
ALWAYS_COPIES = COPIES.replace("if allocator.num_owners(old) > 1:", "if True:")
EDITED = {
    "exercises.py": "CHECKS = {}\n",
    "test_22_paged.py": "def test_all() -> None:\n    assert True\n",
    "conftest.py": "import minigen_course.grading.exercise as e\ne.expect_equal = print\n",
}


@dataclass(frozen=True)
class Kind:
    """A kind of submission: what stands in its cells, and the marks that each part deserves."""

    slots: str
    deserved: tuple[float, float, float] = (5, 10, 5)  # slots_of, BlockAllocator, copy_on_write
    allocator: str = WITH_A_COUNTER
    copy: str = COPIES_TOO
    words: str = ""  # in the summary or in the feedback
    extra: bool = False
    old: bool = False
    misnamed: bool = False
    broken: bool = False


def hostile(body: str, words: str) -> Kind:
    """Return one whose slots_of does harm; its other parts are right, and count."""
    return Kind(SLOTS + body, (0, 10, 5), words=words)


KINDS = {
    "right": Kind(SLOTS + ONE_LINE, allocator=WITH_A_DICT, copy=COPIES),
    "rightbyhand": Kind(SLOTS + BY_HAND),
    "copied": Kind(SLOTS + BY_HAND, allocator=COPIED),
    "wrong": Kind(
        SLOTS + "return [block_ids[p // block_size] + p % block_size for p in positions]",
        (0, 0, 0),
        allocator="class BlockAllocator:\n    def __init__(self, num_blocks):\n        self.x = 1",
        copy="def copy_on_write(allocator, table, index):\n    return 1",
        words="element 0 is 5; it should be 20.",
    ),
    "partly": Kind(
        SLOTS + "size = 4\n    return [block_ids[p // size] * size + p % size for p in positions]",
        (3.8, 9.1, 4),  # 3 of 4 checks, 10 of 11, 4 of 5
        allocator=SEARCHES,
        copy=ALWAYS_COPIES,
        words="check 4 of 4 (blocks of 1, 3 and 16 slots)",
    ),
    "hangs": hostile("while True: pass", f"did not finish within {SECONDS} s"),
    "sleeps": hostile("import time; time.sleep(1000)", f"did not finish within {SECONDS} s"),
    "aborts": hostile("import os; os.abort()", "ended Python"),
    "exits": hostile("import os; os._exit(0)", "ended Python"),
    "eats": hostile("x = []\n    while True: x.append(bytes(10**8))", "takes more memory"),
    "forks": hostile("import os\n    while True: os.fork()", "starts a process (os.fork)"),
    "kills": hostile("import os; os.kill(os.getppid(), 9)", "ends a process"),
    "edits": Kind(
        SLOTS + "return []",
        (0, 10, 5),
        words="check 1 of 4",
        extra=True,
    ),
    "patches": hostile(
        "import minigen_course.grading.exercise as m\n    m.expect_equal = print\n    return []",
        "changes minigen: m.expect_equal",
    ),
    "imports": hostile(
        "from minigen.kv_cache.paged import slots_of as s\n    "
        "return s(block_ids, positions, block_size)",
        "imports the package&#x27;s own part",
    ),
    "opens": hostile("return open('/etc/passwd').read()", "opens files outside its own folder"),
    "empty": Kind("", (0, 0, 0), allocator="", copy="", words="still empty"),
    "corrupt": Kind("", (0, 0, 0), broken=True, words="cannot be read as a notebook"),
    "misnamed": Kind(SLOTS + ONE_LINE, misnamed=True),
    "old": Kind(SLOTS + BY_HAND, old=True, words="has no line"),
}
FORMS = ("canvas", "moodle", "plain")


def answer(mark: str, code: str, kind: Kind) -> str:
    """Return a cell with an answer, in an old version under the part's earlier full name."""
    line = mark.replace("minigen.kv_cache", "minigen.cache") if kind.old else mark
    return f"{line}\n{code}\n"


def answers(kind: Kind) -> dict[str, str]:
    codes = {
        "slots_of": kind.slots,
        "BlockAllocator": kind.allocator,
        "copy_on_write": kind.copy,
    }
    return {name: answer(MARKS[name], code, kind) for name, code in codes.items() if code}


def notebooks(kind: Kind) -> dict[str, str]:
    """Return the workspace's notebooks with the answers in them."""
    found = {}
    for name in ("21_blocks.ipynb", "22_paged.ipynb"):
        notebook = json.loads(exercise_files()[name])
        for cell in notebook["cells"]:
            lines = "".join(cell["source"]).splitlines()
            for part, text in answers(kind).items():
                if MARKS[part] in lines:
                    cell["source"] = text
        found[name] = "{" if kind.broken else json.dumps(notebook)
    return found


def modules(kind: Kind) -> dict[str, str]:
    """Return the workspace's Python files with the answers in them."""
    if kind.broken:
        return {"22_paged.ipynb": "{"}
    found = {name: text for name, text in exercise_files().items() if name in FILES.values()}
    return found | {FILES[part]: text for part, text in answers(kind).items()}


def hand_in(folder: Path, name: str, kind: Kind, form: str, number: int) -> str:
    """Write a submission as it comes from a system; return the student's name."""
    files = notebooks(kind) if form == "canvas" else modules(kind)
    if kind.extra:
        files |= EDITED
    if kind.misnamed:
        files = {
            f"final ({index}){Path(each).suffix}": text
            for index, (each, text) in enumerate(files.items())
        }
    student = f"{name}{form}"
    for each, text in files.items():
        late = "LATE_" if number % 7 == 0 else ""
        path = {
            "canvas": folder / f"{student}_{late}{1000 + number}_{2000 + number}_{each}",
            "moodle": folder / f"{student}_{number}_assignsubmission_file_" / each,
            "plain": folder / student / each,
        }[form]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return student


def test_a_class_of_60_gets_what_it_deserves_twice(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    students = {}
    for number, (name, form) in enumerate((n, f) for n in KINDS for f in FORMS):
        students[hand_in(folder, name, KINDS[name], form, number)] = name
    assert len(students) == 60
    tables = []
    for turn in ("first", "second"):
        began = time.perf_counter()
        words = ["grade", str(folder), "--chapters", "21-22", "--seconds", SECONDS]
        found = CliRunner().invoke(course, [*words, "--out", str(tmp_path / turn)])
        assert found.exit_code == 0, found.output
        took = time.perf_counter() - began
        print(f"\n{turn}: 60 submissions in {took:.0f} s with {os.cpu_count()} cores")
        tables.append((tmp_path / turn / "marks.csv").read_bytes())
    assert tables[0] == tables[1]
    expect_deserved(tmp_path / "first", students)
    expect_alike((tmp_path / "first" / "summary.md").read_text(encoding="utf-8"))


def expect_deserved(results: Path, students: dict[str, str]) -> None:
    with (results / "marks.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(students)
    columns = ("22 slots_of (5)", "21 BlockAllocator (10)", "21 copy_on_write (5)")
    summary = (results / "summary.md").read_text(encoding="utf-8")
    for student, name in students.items():
        row, kind = rows[student], KINDS[name]
        assert tuple(float(row[each]) for each in columns) == kind.deserved, (student, row)
        assert float(row["total"]) == pytest.approx(sum(kind.deserved)), student
        page = (results / "feedback" / f"{student}.html").read_text(encoding="utf-8")
        said = [line for line in summary.splitlines() if line.startswith(f"- {student}")]
        assert kind.words in page + "\n".join(said), student
        assert ("<img" in page) == any(kind.deserved), student
    for name, column in (("canvas.csv", "ID"), ("moodle.csv", "Identifier")):
        with (results / name).open(encoding="utf-8", newline="") as file:
            ids = [row[column] for row in csv.DictReader(file) if row[column]]
        assert len(set(ids)) == 20, name


def expect_alike(summary: str) -> None:
    """Expect the copies, and each of the two ways to write it, to be alike with nothing else."""
    rows = re.findall(r"(?m)^\| 21 BlockAllocator \| (\w+) \| (\w+) \| ", summary)
    ways = {
        frozenset(way(student) for student in pair)
        for pair in rows
        if "partly" not in "".join(pair)
    }
    assert ways == {frozenset({"dict"}), frozenset({"counter"})}
    assert ("copiedcanvas", "rightplain") in rows
    assert ("copiedmoodle", "rightmoodle") in rows


def way(student: str) -> str:
    name = re.sub(f"({'|'.join(FORMS)})$", "", student)
    return "counter" if KINDS[name].allocator == WITH_A_COUNTER else "dict"

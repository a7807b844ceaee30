"""Grading a class: every submission gets what it deserves, and none harms another."""

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from minigen.errors import OptionError
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import HUNTS, hunts_of
from minigen_course.grading.stub import source_of
from minigen_course.handout.workspace import exercise_files
from minigen_course.kit import grade
from minigen_course.kit.box import Limits, Outcome, isolation, judge_in_box
from minigen_course.kit.cli import chapters_in, course
from minigen_course.kit.collect import Cell, Submission, candidates, collect
from minigen_course.kit.grade import Grade, Graded, grade_all, grade_one
from minigen_course.kit.report.feedback import feedback
from minigen_course.kit.report.folder import SUMMARY, safe_name
from minigen_course.kit.report.marks import MARKS
from minigen_course.kit.report.summary import summary
from minigen_course.kit.screen import screened
from minigen_course.kit.similar import alike
from minigen_course.kit.tasks import assigned_in
from tests.known_answers import (
    DATA,
    PACKAGES,
    PAGE,
    Known,
    grade_chapter,
    graded,
    graders,
    is_as_known,
    table,
    tried,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="grading needs fork")

LIMITS = Limits(seconds=3.0)
SLOTS = "minigen.kv_cache.paged.slots_of"
RIGHT = "return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
OWN = (
    "return [block_ids[each // block_size] * block_size + each % block_size for each in positions]"
)
EMPTY = "raise NotImplementedError  # your turn"
# name -> (the body of slots_of, the marks of 5, words of the reason)
BODIES = {
    "right": (RIGHT, 5.0, ""),
    "by hand": (
        "found = []\n    for p in positions:\n        block, offset = divmod(p, block_size)\n"
        "        found.append(block_ids[block] * block_size + offset)\n    return found",
        5.0,
        "",
    ),
    "the package's": (OWN, 5.0, ""),
    "empty": (EMPTY, 0.0, "still empty"),
    "wrong": ("return [block_ids[p // block_size] + p % block_size for p in positions]", 0.0, ""),
    "hangs": ("while True: pass", 0.0, "did not finish within 3 s"),
    "waits": ("import time; time.sleep(1000)", 0.0, "did not finish within 3 s"),
    "exits": ("import os; os._exit(0)", 0.0, "ended Python"),
    "quits": ("raise SystemExit", 0.0, ""),
    "kills": ("import os; os.kill(os.getppid(), 9)", 0.0, "ends a process"),
    "aborts": ("import os; os.abort()", 0.0, "ended Python"),
    "forks": ("import os\n    while True: os.fork()", 0.0, "starts a process (os.fork)"),
    "runs": ("import os; os.system('true')", 0.0, "starts a process"),
    "one list": ("return [0] * 10**12", 0.0, "takes more memory than it may"),
    "eats": ("x = []\n    while True: x.append(bytes(10**8))", 0.0, "takes more memory"),
    "catches": (
        "try:\n        import os; os.fork()\n    except Exception: pass\n    " + RIGHT,
        0.0,
        "starts a process",
    ),
    "imports": (
        "from minigen.kv_cache.paged import slots_of as s\n    "
        "return s(block_ids, positions, block_size)",
        0.0,
        "imports the package's own part",
    ),
    "getattr": (
        "import minigen.kv_cache.paged as m\n    "
        "return getattr(m, 'slots' + '_of')(block_ids, positions, block_size)",
        0.0,
        "uses the package's own part",
    ),
    "patches": (
        "import minigen_course.grading.exercise as m\n    m.expect_equal = print\n    return []",
        0.0,
        "changes minigen: m.expect_equal",
    ),
    "patches behind": (
        "import sys\n    names = vars(sys.modules['minigen_course.ch22_paged.exercises'])\n"
        "    names['expect_equal'] = lambda *a, **k: None\n    return []",
        0.0,
        "changes minigen itself: minigen_course.ch22_paged.exercises.expect_equal",
    ),
    "patches torch": (
        "import torch\n    torch.Tensor.tolist = lambda *a: []\n    return []",
        0.0,
        "changes minigen itself: torch",
    ),
    "reads": ("return open('/etc/passwd').read()", 0.0, "opens files outside"),
    "reads sources": (
        "import inspect, minigen.kv_cache.paged as m\n    return inspect.getsource(m)",
        0.0,
        "opens files outside",
    ),
    "calls home": (
        "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
        0.0,
        "opens a socket",
    ),
    "frames": ("import sys; return sys._getframe(1).f_locals", 0.0, "reaches into the grading"),
    "half": ("return [", 0.0, "is no Python"),
    "nested": (f"return {'+'.join('1' * 1500)}", 0.0, "nested deeper than 100 levels"),
    "half a character": ("raise ValueError('\\ud800')", 0.0, ""),
    "commands": (f"{RIGHT}\n\n%time slots_of([0], [0], 4)\n!ls", 5.0, ""),
    "constants": (
        "return [ZERO + each for each in right(block_ids, positions, block_size)]\n\n"
        f"ZERO: int = -1 + len((0,))\nright = lambda block_ids, positions, block_size: {RIGHT[7:]}",
        5.0,
        "",
    ),
    "computes first": ("return TABLE\n\nTABLE = print(4)", 0.0, ""),
    "raises": ("return positions['x']", 0.0, ""),
}


@cache
def stub_file(name: str = "slots_of") -> str:
    return exercise_files()[f"22_paged/{name}.py"]


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graded]:
    """All of `BODIES`, and submissions that are broken in other ways, graded at once."""
    folder = tmp_path_factory.mktemp("submissions")
    text = stub_file()
    for name, (body, _, _) in BODIES.items():
        (folder / name).mkdir()
        (folder / name / "slots_of.py").write_text(text.replace(EMPTY, body), encoding="utf-8")
    (folder / "corrupt.ipynb").write_text("{", encoding="utf-8")
    (folder / "lists.ipynb").write_text("[" * 100_000, encoding="utf-8")
    marked = text.replace(EMPTY, RIGHT)
    (folder / "byte order mark.py").write_text(marked, encoding="utf-8-sig")
    (folder / "nothing").mkdir()
    whole = exercise_files()["22_paged.ipynb"]
    (folder / "untouched_LATE_12_34_22_paged.ipynb").write_text(whole, encoding="utf-8")
    store = tmp_path_factory.mktemp("store")
    graded = grade_all(collect(folder), assigned_in(["22"]), store, LIMITS, 2)
    return {each.student: each for each in graded}


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Two processes that fork the boxes: pytest's own has threads, and forks badly."""
    with graders(["22"], jobs=2) as pool:
        yield pool


@pytest.mark.parametrize("name", BODIES)
def test_a_submission_gets_what_it_deserves(classroom: dict[str, Graded], name: str) -> None:
    _, earned, words = BODIES[name]
    grade = classroom[name].grades[0]
    assert (grade.name, grade.earned, grade.points) == ("slots_of", earned, 5)
    assert words in grade.why
    assert grade.why or grade.failed or earned == 5
    others = classroom[name].grades[1:]
    assert all(each.earned == 0 and each.why == "no answer" for each in others)


def test_a_byte_order_mark_is_no_part_of_a_file(classroom: dict[str, Graded]) -> None:
    assert classroom["byte order mark"].grades[0].earned == 5


def test_a_message_names_a_statement_that_is_not_run(classroom: dict[str, Graded]) -> None:
    (first, *_) = classroom["computes first"].grades[0].failed
    assert first.endswith(
        "raised NameError: name 'TABLE' is not defined. The line `TABLE = print(4)` is not run: of "
        "a file, only imports, functions, classes and plain values are. Compute TABLE inside the "
        "part."
    )


def test_a_wrong_answer_gets_a_sentence_on_its_mistake(classroom: dict[str, Graded]) -> None:
    (first, *_) = classroom["wrong"].grades[0].failed
    assert first.startswith("check 1 of 4 (")
    assert first.endswith("element 0 is 5; it should be 20.")
    assert "TypeError" in classroom["raises"].grades[0].failed[0]


def test_an_untouched_sheet_has_no_marks(classroom: dict[str, Graded]) -> None:
    graded = classroom["untouched"]
    assert graded.late
    assert graded.earned == 0
    assert all("still empty" in each.why and not each.notes for each in graded.grades)


def test_the_packages_own_code_is_named_for_the_instructor(classroom: dict[str, Graded]) -> None:
    assert any(
        "the package's own code" in each for each in classroom["the package's"].grades[0].notes
    )
    assert not classroom["by hand"].grades[0].notes


def test_a_broken_submission_is_a_sentence(classroom: dict[str, Graded]) -> None:
    assert classroom["corrupt"].problems[0].startswith("corrupt.ipynb cannot be read as a notebook")
    assert "lists are nested too deeply" in classroom["lists"].problems[0]
    assert classroom["nothing"].problems == ("The folder nothing is empty.",)


def test_an_answer_ends_with_the_process_that_grades_it() -> None:
    """Once that is killed, nothing else would stop an answer that never ends."""
    grader = os.fork()
    if grader == 0:
        judge_slots_of("def slots_of(*a): \n    while True: pass")
        os._exit(0)
    below = descendants(grader, 2)
    os.kill(grader, signal.SIGKILL)
    os.waitpid(grader, 0)
    assert all_end(below)


def test_workers_end_when_their_grades_are_not_read_any_more(tmp_path: Path) -> None:
    path = tmp_path / "slots_of.py"
    path.write_text(f"# exercise: {SLOTS}\ndef slots_of(*a, **k):\n    while True: pass\n", "utf-8")
    hanging = [Submission(name, (path,)) for name in ("ada", "bob")]
    limits = Limits(seconds=600.0, submission_seconds=600.0)
    others = set(psutil.Process().children())
    assigned = assigned_in(["22"])[:1]
    grades = grade_all(
        [Submission("none", ()), *hanging], assigned, tmp_path / "grades", limits, jobs=1
    )
    assert next(grades).student == "none"
    (worker,) = (
        each
        for each in set(psutil.Process().children()) - others
        if "spawn_main" in " ".join(each.cmdline())
    )
    below = descendants(worker.pid, 2)
    grades.close()
    assert all_end([worker, *below])


def judge_slots_of(source: str) -> Outcome:
    check = exercises("22")["slots_of"].checks[0]
    limits = Limits(seconds=600.0)
    return judge_in_box([Cell(source, True)], lambda found: found.slots_of, [check], SLOTS, limits)


def descendants(process_id: int, number: int) -> list[psutil.Process]:
    """Wait for this number of processes below one, and return them."""
    process = psutil.Process(process_id)
    wait_until(lambda: len(process.children(recursive=True)) >= number)
    return process.children(recursive=True)


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_isolation_is_said() -> None:
    assert isolation().startswith(("own processes, no network", "this system allows no namespaces"))


def test_names_of_canvas_and_moodle_are_understood(tmp_path: Path) -> None:
    text = stub_file()
    (tmp_path / "lovelaceada_1001_2002_slots_of.py").write_text(text, encoding="utf-8")
    (tmp_path / "lovelaceada_1001_2003_kv_pool-1.py").write_text(text, encoding="utf-8")
    (tmp_path / "turingalan_LATE_1004_2004_slots_of.py").write_text(text, encoding="utf-8")
    moodle = tmp_path / "Grace Hopper_77_assignsubmission_file_"
    moodle.mkdir()
    (moodle / "work.zip").write_bytes(b"PK")
    (moodle / "slots_of.py").symlink_to("/etc/passwd")
    (tmp_path / ".DS_Store").write_bytes(b"")
    found = {each.student: each for each in collect(tmp_path)}
    assert list(found) == ["Grace Hopper", "lovelaceada", "turingalan"]
    assert len(found["lovelaceada"].files) == 2
    assert [each.late for each in found.values()] == [False, False, True]
    assert found["Grace Hopper"].files == ()
    assert "slots_of.py is a link" in found["Grace Hopper"].problems[0]
    assert "work.zip is neither a notebook" in found["Grace Hopper"].problems[1]


@pytest.mark.parametrize(
    "source",
    [
        "import minigen.kv_cache.paged as m\nKVPool = vars(m)['KVPool']",
        "import minigen.kv_cache.paged as m\nclass KVPool(vars(m)['KVPool']): pass",
        "import minigen.kv_cache.paged as m\nclass First(vars(m)['KVPool']): pass\n"
        "class KVPool(First): pass",
        "import functools, minigen.kv_cache.paged as m\n"
        "KVPool = functools.partial(vars(m)['KVPool'])",
    ],
    ids=["itself", "a class of it", "a class of a class", "wrapped"],
)
def test_the_packages_own_class_in_another_form_has_no_marks(
    workers: ProcessPoolExecutor, source: str
) -> None:
    outcome = workers.submit(boxed_pool, source).result()
    assert outcome.passed == ()
    assert outcome.ended == "uses the package's own part"


def boxed_pool(source: str) -> Outcome:
    exercise = exercises("22")["KVPool"]
    return judge_in_box([Cell(source, True)], pool_of, exercise.checks, exercise.dotted, LIMITS)


def pool_of(module: ModuleType) -> Any:
    return vars(module)["KVPool"]


def test_a_folder_without_submissions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no submission"):
        collect(tmp_path)
    with pytest.raises(OptionError, match="is no folder"):
        collect(tmp_path / "missing")


def test_an_answer_is_found_without_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(stub_file().replace("# exercise:", "# my answer:"), encoding="utf-8")
    (found,) = candidates([path], f"# exercise: {SLOTS}", "slots_of")
    assert found.notes == (f"mine.py has no line '# exercise: {SLOTS}'",)
    assert not list(candidates([path], "# exercise: minigen.other", "other"))


def test_other_cells_help_and_do_not_harm(workers: ProcessPoolExecutor, tmp_path: Path) -> None:
    """A helper in another cell is used; a broken cell, a loop or a print is not run."""
    cells = [
        "while True: pass",
        "def helper(p, b): return divmod(p, b)",
        "this is no Python",
        "1 / 0",
        "import no_such_module",
        "text = '\ud800'",
        f"def unused(): return {'+'.join('1' * 1500)}",
        "ONE = len((0,))",
        "NONE = -ONE + 1",
        f"# exercise: {SLOTS}\ndef slots_of(block_ids, positions, block_size):\n    return "
        "[block_ids[helper(p, block_size)[0]] * block_size + helper(p, block_size)[1] + NONE "
        "for p in positions]",
        "from minigen.kv_cache.paged import slots_of",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": each} for each in cells]}
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    submission = Submission("me", (path,))
    found = workers.submit(grade_one, submission, assigned_in(["22"]), LIMITS).result()
    assert found["22_paged"][0].earned == 5, found["22_paged"][0]


def test_an_answer_that_cannot_be_graded_leaves_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(grade, "_best", fail)
    found = grade_one(Submission("me", ()), assigned_in(["22"])[:1], LIMITS, seed=1)["22_paged"]
    parts = [each for each in found if each.name in exercises("22")]
    assert {each.why for each in parts} == {"could not be graded: RecursionError: too deep"}
    assert all(each.notes == (each.why,) for each in parts)
    assert {each.why for each in found if each not in parts} == {"no answer"}


def test_answers_that_never_end_use_up_the_time_of_their_submission(
    workers: ProcessPoolExecutor, tmp_path: Path
) -> None:
    names = ("slots_of", "decode_slots", "attend_by_block")
    path = tmp_path / "mine.py"
    cells = (f"# exercise: {name}\ndef {name}(*a, **k):\n    while True: pass" for name in names)
    path.write_text("\n\n# %%\n".join(cells), encoding="utf-8")
    limits = Limits(seconds=1.0, submission_seconds=2.0)
    submission = Submission("me", (path,))
    found = workers.submit(grade_one, submission, assigned_in(["22"]), limits).result()
    whys = {grade.name: grade.why for grade in found["22_paged"]}
    assert all(whys[name].startswith("did not finish within 1 s") for name in names[:2]), whys
    assert whys[names[2]] == (
        "was not run: the answers to slots_of, decode_slots were stopped, and have used the 2 s of "
        "a submission"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from minigen.kv_cache.paged import slots_of", "imports the package's own part"),
        ("import minigen.kv_cache.paged as p\nx = p.slots_of", "uses the package's own part"),
        ("from minigen.kv_cache import paged\nx = getattr(paged, 'slots_of')", "through getattr"),
        ("from minigen.kv_cache import paged\npaged.slots_of = print", "changes minigen"),
        ("from minigen import kv_cache\nsetattr(kv_cache, 'x', 1)", "changes minigen"),
        ("try:\n    pass\nexcept Exception as e:\n    e.__traceback__.tb_frame", "reads tb_frame"),
        ("(lambda: 0).__globals__", "reads __globals__"),
    ],
)
def test_what_costs_the_marks(source: str, words: str) -> None:
    found = screened(source, SLOTS)
    assert any(words in each.what and each.barred for each in found), found


def test_every_stub_and_every_solution_can_be_screened() -> None:
    for chapter in CHAPTERS:
        for each in exercises(chapter).values():
            found = screened(source_of(each.dotted), each.dotted)
            assert [finding.what for finding in found if finding.barred] == []
            assert found[-1].what.startswith("is the package's own code")


def test_a_renamed_copy_is_found_and_other_work_is_not() -> None:
    one = source_of("minigen_course.ch21_blocks.lesson.choose_adjacent")
    copied = one.replace("free", "available").replace("count", "how_many")
    assert copied != one
    other = source_of("minigen.kv_cache.block_allocator.copy_on_write")
    (pair,) = alike("x", {"ada": one, "bob": f"# mine\n{copied}", "eve": other})
    assert (pair.one, pair.other) == ("ada", "bob")
    assert pair.share == 1
    assert alike("x", {"ada": one, "bob": copied}, [one]) == [], "all have the package's own"


def test_feedback_shows_what_a_student_wrote_as_text(classroom: dict[str, Graded]) -> None:
    graded = classroom["wrong"]
    page = feedback(graded)
    assert "0 of 55 points" in page
    assert "Hint 1" in page
    assert "it should be 20." in page
    hostile = Graded("<script>", False, ("<b>",), graded.grades)
    assert "<script>" not in feedback(hostile)
    assert "<b>" not in feedback(hostile)
    assert safe_name("../a/b") == ".._a_b"


def test_the_summary_says_what_is_hard_and_what_to_read(classroom: dict[str, Graded]) -> None:
    text = summary(list(classroom.values()))
    assert f"{len(classroom)} submissions, 1 late." in text
    assert "| 22 slots_of |" in text
    assert "- the package's, slots_of: is the package's own code" in text
    assert "- nothing: The folder nothing is empty." in text


@pytest.fixture
def three(tmp_path: Path) -> Path:
    folder = tmp_path / "class"
    for name, body in (("ada", RIGHT), ("bob", EMPTY), ("=eve()", "return []")):
        (folder / name).mkdir(parents=True)
        text = stub_file().replace(EMPTY, body)
        (folder / name / "slots_of.py").write_text(text, encoding="utf-8")
    return folder


def run(*arguments: str) -> Any:
    return CliRunner().invoke(course, ["grade", *arguments])


def test_a_class_is_graded_twice_alike_and_continues(three: Path) -> None:
    grade = (str(three), "--chapters", "22", "--seconds", "3", "--jobs", "1")
    found = run(*grade)
    assert found.exit_code == 0, found.output
    target = three.with_name("class-grades")
    with (target / MARKS).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == ["student", "'=eve()", "ada", "bob"]
    assert rows[2][rows[0].index("22 slots_of (5)")] == "5"
    assert rows[2][rows[0].index("total")] == "5"
    assert (target / SUMMARY).exists()
    assert (target / "feedback" / "ada.html").exists()
    first = (target / MARKS).read_bytes()
    stored = {path: path.stat().st_mtime_ns for path in (target / "results").glob("*.json")}
    assert len(stored) == 3
    text = stub_file().replace(EMPTY, RIGHT)
    (three / "bob" / "slots_of.py").write_text(text, encoding="utf-8")
    found = run(*grade, "--again", "ada")
    assert found.exit_code == 0, found.output
    now = {path: path.stat().st_mtime_ns for path in (target / "results").glob("*.json")}
    changed = {path.stem for path in now if now[path] != stored[path]}
    assert changed == {"ada", "bob"}, "what has not changed is not graded again"
    second = (target / MARKS).read_text(encoding="utf-8").splitlines()
    assert second[:3] == first.decode().splitlines()[:3]
    assert second[3].startswith("bob,,5,")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chapters", "22", "--again", "zoe"], "has no submission of zoe"),
        (["--chapters", "2"], "names no chapters"),
        (["--chapters", "26-30"], "There is no chapter 26-30"),
        (["--chapters", "22", "--seconds", "inf"], "--seconds is inf; it should be a number from"),
        (["--chapters", "22", "--memory", "inf"], "from 0.1 to 1,000,000."),
        (["--chapters", "22", "--memory", "1e11"], "--memory is 1e+11; it should be"),
    ],
)
def test_a_wrong_option_is_a_sentence(three: Path, arguments: list[str], words: str) -> None:
    found = run(str(three), *arguments)
    assert isinstance(found.exception, OptionError)
    assert words in str(found.exception)


def test_chapters_are_ranges_and_lists() -> None:
    assert chapters_in("11-13, 52,12") == ["11", "12", "13", "52"]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "chapter",
    [each if each in ("16", "21", "22") else pytest.param(each, marks=LONG) for each in CHAPTERS],
)
def test_known_answers_are_graded_as_they_deserve(
    workers: ProcessPoolExecutor, chapter: str
) -> None:
    """Right answers have full marks, stubs none, and every wrong answer loses some."""
    found = list(grade_chapter(chapter, workers))
    wrongly = [known for known, outcome in found if not is_as_known(known, outcome)]
    assert wrongly == []


@pytest.mark.parametrize(
    ("chapter", "name"), [(each, hunt.name) for each in HUNTS for hunt in hunts_of(each)]
)
def test_the_model_answer_of_a_bug_hunt_has_full_marks(
    workers: ProcessPoolExecutor, chapter: str, name: str
) -> None:
    """Its test makes instances of the package's class, which is closed to other answers."""
    known = Known(chapter, name, "right", PACKAGES)
    outcome = workers.submit(graded, known).result()
    assert is_as_known(known, outcome), outcome


def test_the_page_counts_every_known_answer_and_all_are_graded_as_they_deserve() -> None:
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    assert rows == {chapter: tried(chapter) for chapter in CHAPTERS}
    assert table(rows) in PAGE.read_text(encoding="utf-8")


class DyingPool:
    """Stands in for workers: one that gets the submission `killer` ends, and all with it."""

    def __init__(self, *_: Any) -> None:
        self.is_broken = False

    def __enter__(self) -> "DyingPool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not given:
            future.set_result(function())
            return future
        submission, missing, *_ = given
        self.is_broken |= submission.student == "killer"
        if self.is_broken:
            future.set_exception(BrokenProcessPool("a worker died"))
        else:
            one = Grade("22", "slots_of", 5, 5.0, 4, 4)
            future.set_result({each.name: (one,) if each is missing[0] else () for each in missing})
        return future


def test_a_worker_that_the_system_kills_costs_one_submission_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "killer", "z"):
        (tmp_path / "in" / name).mkdir(parents=True)
    monkeypatch.setattr(grade, "ProcessPoolExecutor", DyingPool)
    assigned, store = assigned_in(["22"]), tmp_path / "store"
    graded = {
        each.student: each
        for each in grade_all(collect(tmp_path / "in"), assigned, store, LIMITS, 2)
    }
    assert {name: each.earned for name, each in graded.items()} == {
        **{"a": 5.0, "b": 5.0, "killer": 0.0, "z": 5.0}
    }
    assert all("system killed" in each.why for each in graded["killer"].grades)
    assert graded["killer"].points > 5, "the marks of every task are still to be had"
    assert sorted(path.stem for path in store.glob("*.json")) == ["a", "b", "z"]


def test_workers_that_cannot_start_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(DyingPool):
        def submit(self, *_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("the initializer failed"))
            return future

    (tmp_path / "in" / "a").mkdir(parents=True)
    monkeypatch.setattr(grade, "ProcessPoolExecutor", Broken)
    grading = grade_all(collect(tmp_path / "in"), assigned_in(["22"]), tmp_path / "s", LIMITS, 2)
    with pytest.raises(BrokenProcessPool, match="initializer"):
        list(grading)

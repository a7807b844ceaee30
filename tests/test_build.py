"""Building a course: what learners get, what graders get, and the graders' own commands on it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from minigen.errors import OptionError
from minigen_course.grading.award import answered, award, award_answer, award_hunt, passes_check
from minigen_course.grading.check import Result
from minigen_course.grading.exercise import CHAPTERS, Wrong, exercises
from minigen_course.grading.hunt import HUNTS, hunt_of
from minigen_course.grading.judge import verdicts_on
from minigen_course.grading.question import questions
from minigen_course.grading.stub import source_of
from minigen_course.handout.course_files import headings
from minigen_course.kit.assignment import Assignment, assignments_of
from minigen_course.kit.build import FORMATS, Course, build, for_commands, read_course
from minigen_course.kit.cli import course
from minigen_course.kit.for_classroom import repository_of
from minigen_course.kit.for_nbgrader import source_notebook
from minigen_course.kit.leaks import Released, leaks, released_notebook
from tests.processes import said_by

SEED = 7
RIGHT = (
    "def slots_of(block_ids, positions, block_size):\n"
    "    return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
)
HALF = (
    "def slots_of(block_ids, positions, block_size):\n"
    "    size = 4\n"
    "    return [block_ids[p // size] * size + p % size for p in positions]"
)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(course, [str(each) for each in arguments])


def in_process(module: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", module, *map(str, arguments)]
    env = os.environ | for_commands()
    return subprocess.run(words, cwd=cwd, capture_output=True, encoding="utf-8", env=env)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of chapter 22 for nbgrader."""
    folder = tmp_path_factory.mktemp("courses") / "nbgrader"
    assert list(build(folder, Course(("22",), SEED, "nbgrader"))) == ["22"]
    return folder


def released_cells(chapter: str) -> Iterator[tuple[Assignment, Released]]:
    """Yield what learners get of each assignment of a chapter, as nbgrader clears it."""
    for each in assignments_of(chapter, SEED):
        notebook = source_notebook(each)
        for cell in notebook["cells"]:
            cell["source"] = without(cell["source"], "SOLUTION", "HIDDEN TESTS")
        yield each, released_notebook(each.name, json.dumps(notebook))


def without(text: str, *regions: str) -> str:
    for region in regions:
        while f"### BEGIN {region}" in text:
            before, _, rest = text.partition(f"### BEGIN {region}")
            text = before + rest.partition(f"### END {region}")[2]
    return text


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_nothing_released_gives_a_solution_away(chapter: str) -> None:
    for assignment, released in released_cells(chapter):
        assert leaks([released], assignment.items) == []
        whole = released_notebook("source", json.dumps(source_notebook(assignment)))
        found = leaks([whole], assignment.items)
        for item in assignment.items:
            assert any(item.name in each for each in found), f"{item.name} could leak unseen"
        files = repository_of(assignment, SEED)
        texts = [
            Released(name, (text,) if name.endswith(".py") else (), text)
            for name, text in files.items()
        ]
        assert leaks(texts, assignment.items) == []
        workflow = yaml.safe_load(files[".github/workflows/classroom.yml"])
        steps = workflow["jobs"]["grade"]["steps"]
        graded = [each["with"]["command"].split()[2] for each in steps if "id" in each]
        assert set(graded) <= set(files)
        assert len(graded) == sum(each.kind in ("part", "hunt") for each in assignment.items)


def test_a_leak_is_seen_in_code_and_in_text() -> None:
    assignment = next(assignments_of("22", SEED))
    line = source_of("minigen.kv_cache.paged.slots_of").splitlines()[-1].strip()
    for code, text in [((f"def f():\n    {line}",), ""), ((), line)]:
        (said, *_) = leaks([Released("x", code, text)], assignment.items)
        assert "slots_of's solution" in said
    code = "from minigen.kv_cache.paged import slots_of"
    (said,) = leaks([Released("x", (code,), "")], assignment.items)
    assert said == "x imports the package's own slots_of."


def test_another_seed_changes_what_is_asked() -> None:
    one, other = (next(assignments_of("22", seed)).items for seed in (1, 2))
    assert [each.name for each in one] == [each.name for each in other]
    changed = [
        a.name
        for a, b in zip(one, other, strict=True)
        if a.text != b.text or a.picture != b.picture
    ]
    assert changed == [each.name for each in one if each.kind != "written"]
    assert [each.text for each in one] == [
        each.text for each in next(assignments_of("22", 1)).items
    ]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_points_add_up(chapter: str) -> None:
    for assignment in assignments_of(chapter, SEED):
        for item in assignment.items:
            if item.kind == "part":
                assert item.points == exercises(chapter)[item.name].points
            elif item.kind == "hunt":
                assert item.points == hunt_of(chapter, item.name).points
        names = [each.id for each in assignment.items]
        assert len(set(names)) == len(names)
        assert ("_hunt" in assignment.name) == (assignment.items[0].kind == "hunt")
    assert (chapter in HUNTS) == (len(list(assignments_of(chapter, SEED))) == 2)


def test_a_course_is_ready_to_hand_out(built: Path) -> None:
    assert read_course(built) == Course(("22",), SEED, "nbgrader")
    for name in ("22_paged", "22_paged_hunt"):
        text = (built / "release" / name / f"{name}.ipynb").read_text(encoding="utf-8")
        assert "HIDDEN" not in text
        assert "SOLUTION" not in text
        assert f"seed={SEED}" not in text
    assert "| 22 | slots_of | in the example" in (built / "varies.md").read_text(encoding="utf-8")
    readme = (built / "README.md").read_text(encoding="utf-8")
    assert f"the seed {SEED}" in readme
    assert "Hand out `release/22_paged/22_paged.ipynb`" in readme


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_part_that_fails_does_not_stop_the_cells_below_it(chapter: str) -> None:
    for assignment in assignments_of(chapter, SEED):
        cells = source_notebook(assignment)["cells"]
        calls = [each for each in cells if re.search(r"(?m)^(award|answered)", each["source"])]
        seen = [each for each in calls if "HIDDEN" not in each["source"]]
        assert len(seen) == sum(bool(each.seen) for each in assignment.items)
        assert all("raises-exception" in each["metadata"]["tags"] for each in seen)
        head = cells[0]["source"]
        assert f"/notebooks/{headings()[chapter].name}.ipynb) first." in head
        assert ("replace None" in head) == any(e.kind == "question" for e in assignment.items)


def test_a_cell_shows_the_sentence_alone() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shown: list[list[str]] = []
    shell = InteractiveShell()
    shell._showtraceback = lambda kind, error, lines: shown.append(lines)
    shell.run_cell("from minigen_course.grading.exercise import Wrong\nraise Wrong('It is 3.')")
    assert shown == [["It is 3."]]


def filled(built: Path, answers: dict[str, str]) -> str:
    """Return the released notebook with these cells replaced, as a learner hands it in."""
    path = built / "release" / "22_paged" / "22_paged.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name in answers:
            mark = "".join(cell["source"]).splitlines()[0]
            cell["source"] = f"{mark}\n{answers[name]}"
    return json.dumps(notebook)


def right_number() -> str:
    return f"num_blocks = {questions('22')['num_blocks'].right(SEED, 'num_blocks')}"


def test_nbgraders_own_commands_grade_it(built: Path, tmp_path: Path) -> None:
    """Autograde, feedback and export, on the course as it was built."""
    folder = tmp_path / "course"
    shutil.copytree(built, folder)
    handed_in = {
        "ada": {"c22_slots_of": RIGHT, "c22_num_blocks": right_number()},
        "bob": {"c22_slots_of": HALF, "c22_num_blocks": "num_blocks = 3"},
    }
    for student, answers in handed_in.items():
        path = folder / "submitted" / student / "22_paged" / "22_paged.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(filled(folder, answers), encoding="utf-8")
    for command in ("autograde 22_paged", "generate_feedback 22_paged", "export"):
        done = in_process("nbgrader", *command.split(), cwd=folder)
        assert done.returncode == 0, done.stderr[-2000:]
    rows = (folder / "grades.csv").read_text(encoding="utf-8").splitlines()
    names = rows[0].split(",")
    scores = {}
    for row in rows[1:]:
        values = dict(zip(names, row.split(","), strict=True))
        if values["assignment"] == "22_paged":
            scores[values["student_id"]] = float(values["score"])
    assert scores["ada"] == 5 + 5
    assert 0 < scores["bob"] < 3
    page = folder / "feedback" / "bob" / "22_paged" / "22_paged.html"
    shown = page.read_text(encoding="utf-8")
    assert "is too low" in shown
    assert f"seed={SEED}" not in shown, "with the seed, the kept cases can be drawn"


def test_minigens_grader_grades_the_same_notebooks(built: Path, tmp_path: Path) -> None:
    handed_in = tmp_path / "class"
    for student, answers in {
        "ada": {"c22_slots_of": RIGHT, "c22_num_blocks": right_number()},
        "bob": {"c22_slots_of": HALF, "c22_num_blocks": "num_blocks = open('x')"},
    }.items():
        (handed_in / student).mkdir(parents=True)
        (handed_in / student / "22_paged.ipynb").write_text(
            filled(built, answers), encoding="utf-8"
        )
    found = run("grade", handed_in, "--course", built, "--seconds", 5)
    assert found.exit_code == 0, found.output
    results = tmp_path / "class-grades" / "results"
    grades = {
        student: {
            each["name"]: each
            for each in json.loads((results / f"{student}.json").read_text("utf-8"))["grades"][
                "22_paged"
            ]
        }
        for student in ("ada", "bob")
    }
    assert grades["ada"]["slots_of"]["earned"] == 5
    assert grades["ada"]["num_blocks"]["earned"] == 5
    assert 0 < grades["bob"]["slots_of"]["earned"] < 3
    assert "case 1 of 5" in grades["bob"]["slots_of"]["failed"][-1]
    assert "must be a number" in grades["bob"]["num_blocks"]["why"]
    assert grades["bob"]["unused_slots"]["failed"][0].startswith("has no answer yet")


def test_otter_grades_what_was_built_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "otter"
    words = ["course", "build", folder, "--chapters", "22", "--seed", SEED, "--format", "otter"]
    done = in_process("minigen", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    name = "22_paged_hunt"
    (archive,) = (folder / name / "autograder").glob("*.zip")
    path = folder / name / "autograder" / f"{name}.ipynb"  # with the solution
    done = in_process("otter", "run", path, "-a", archive, "-o", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    tests = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["tests"]
    marks = [each for each in tests if each["name"] == "c22_slots"]
    assert [(each["score"], each["max_score"]) for each in marks] == [(10, 10)]
    student = (folder / "22_paged" / "student" / "22_paged.ipynb").read_text(encoding="utf-8")
    assert f"seed={SEED}" not in student


@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_with_files_is_left_alone(tmp_path: Path, form: str) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    found = run("build", tmp_path, "--chapters", "21", "--format", form)
    assert isinstance(found.exception, OptionError)
    assert "has files already" in str(found.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_wrong_options_are_a_sentence(tmp_path: Path) -> None:
    found = run("build", tmp_path / "x", "--chapters", "21", "--format", "pdf")
    assert "There is no format 'pdf'" in str(found.exception)
    found = run("grade", tmp_path, "--course", tmp_path)
    assert "is no folder that `minigen course build` made" in str(found.exception)
    found = run("grade", tmp_path)
    assert "Say what was assigned" in str(found.exception)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("words", [["build"], ["grade", "work", "--out"]])
def test_a_folder_that_cannot_be_made_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    answer = f"# exercise: minigen.kv_cache.paged.slots_of\n{RIGHT}"
    (tmp_path / "work" / "ada.py").write_text(answer, encoding="utf-8")
    (tmp_path / "file").touch()
    found = run(*words, tmp_path / "file" / "folder", "--chapters", "22")
    assert isinstance(found.exception, OptionError)
    assert "cannot be made" in str(found.exception)


def test_cells_award_shares_and_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    def slots_of(block_ids: Any, positions: Any, block_size: int) -> list[int]:
        return [block_ids[p // 4] * 4 + p % 4 for p in positions]

    assert award(22, 4, slots_of=slots_of) == 3
    assert "3 of 4 points" in capsys.readouterr().out
    passes_check(22, 1, slots_of=slots_of)
    with pytest.raises(Wrong, match="check 4 of 4"):
        passes_check(22, 4, slots_of=slots_of)
    with pytest.raises(Wrong, match="case 1 of 5"):
        award(22, 2, seed=SEED, slots_of=slots_of)
    with pytest.raises(Wrong, match="the package's own part"):
        award(22, 4, slots_of=exercises("22")["slots_of"].solution)
    hunted = hunt_of("22")
    assert award_hunt(22, 10, test=hunted.test, mended=hunted.mended) == 10
    with pytest.raises(Wrong):
        award_hunt(22, 10, test=lambda part: None, mended=hunted.mended)
    right = questions("22")["num_blocks"].right(SEED, "num_blocks")
    assert award_answer(22, 5, seed=SEED, num_blocks=right) == 5
    with pytest.raises(Wrong, match="too low"):
        award_answer(22, 5, seed=SEED, num_blocks=1)
    answered(22, num_blocks=1)
    with pytest.raises(Wrong, match="no answer yet"):
        answered(22, num_blocks=None)


def test_a_part_is_judged_again_only_if_it_or_a_function_that_it_calls_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Any] = []

    def judge_here(chapter: str, name: str, part: Any, *_: object) -> Result:
        judged.append(part)
        said = list(verdicts_on(exercises(chapter)[name].checks, part))
        return Result(name, not any(said), "".join(said), tuple(not each for each in said))

    monkeypatch.setattr("minigen_course.grading.award.judge", judge_here)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("def slots_of(*given): return helper(*given)", cell)
    parts = cell["slots_of"], torch.zeros(3)
    exec(HALF.replace("slots_of", "helper"), cell)
    for part in parts:
        for _ in range(2):
            with pytest.raises(Wrong):
                passes_check(22, 4, slots_of=part)
    exec(RIGHT.replace("slots_of", "helper"), cell)
    passes_check(22, 4, slots_of=cell["slots_of"])
    assert [type(each) for each in judged] == [FunctionType, torch.Tensor, FunctionType]


@pytest.mark.parametrize(("name", "expected"), [("C", "C.UTF-8"), ("C.UTF-8", None)])
def test_nbgraders_commands_run_in_a_utf8_locale(name: str, expected: str | None) -> None:
    """In a folder with letters outside ASCII, alembic fails in the locale C."""
    code = "from minigen_course.kit.build import for_commands; print(for_commands().get('LC_ALL'))"
    assert said_by(code, LC_ALL=name) == str(expected)

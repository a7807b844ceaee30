"""exercises/ is what the course's exercises give; answers in it are found and judged."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from minigen.cli.main import add_commands_of_other_packages, app
from minigen.errors import OptionError
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import HUNTS, hunts_of
from minigen_course.grading.stub import source_of
from minigen_course.handout.answers import HUNT_MARK, MARK, Definitions
from minigen_course.handout.course_files import headings
from minigen_course.handout.sheet import INSTALL, file_name, table_rows
from minigen_course.handout.starter import cases_of
from minigen_course.handout.workspace import make_workspace
from tests.answers.ch16_sampling import ANSWERS
from tools.chapters import ROOT
from tools.exercise_sheets import FOLDER, files

NOTEBOOKS = ROOT / "notebooks"
NEXT = re.compile(f"{MARK}|{HUNT_MARK}")


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return files()


def run(*arguments: str) -> tuple[int, str]:
    add_commands_of_other_packages()
    found = CliRunner().invoke(app, arguments)
    if isinstance(found.exception, OptionError):
        return 1, str(found.exception)
    return found.exit_code, found.stdout + found.stderr


def fill_in(path: Path, body: str) -> None:
    """Write a body in place of the line that raises NotImplementedError."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("raise NotImplementedError  # your turn", body), encoding="utf-8")


def test_every_file_is_what_the_exercises_give(wanted: dict[str, str]) -> None:
    there = {
        path.relative_to(FOLDER).as_posix()
        for pattern in ("README.md", "*.ipynb", "*.py", "*/*.py")
        for path in FOLDER.glob(pattern)
    }
    assert there == set(wanted), "run python -m tools.exercise_sheets"
    for name, text in wanted.items():
        found = (FOLDER / name).read_text(encoding="utf-8")
        assert found == text, f"{name}: run python -m tools.exercise_sheets"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_and_its_folder_have_each_exercise_once(chapter: str) -> None:
    name = headings()[chapter].name
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell.source for cell in notebook.cells]
    marks = [f"{MARK}{each.dotted}" for each in exercises(chapter).values()]
    marks += [f"{HUNT_MARK}{each}" for each in HUNTS.get(chapter, ())]
    for mark in marks:
        assert sum(cell.startswith(f"{mark}\n") for cell in cells) == 1
        sources = [path.read_text("utf-8") for path in (FOLDER / name).glob("*.py")]
        assert sum(f"\n{mark}\n" in source for source in sources) == 1
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_file_has_a_line_of_a_solution(chapter: str, wanted: dict[str, str]) -> None:
    """A stub has the signature and docstring of a solution, and nothing that its body says."""
    name = headings()[chapter].name
    texts = [text for path, text in wanted.items() if path.startswith(name)]
    for each in exercises(chapter).values():
        for line in body_lines(each.dotted):
            stubs = [NEXT.split(text.partition(MARK + each.dotted)[2])[0] for text in texts]
            assert not any(line in stub.splitlines() for stub in stubs), line


def body_lines(dotted: str) -> set[str]:
    """Return the lines of a solution's statements, as long as they are telling."""
    source = source_of(dotted)
    lines, kept = source.splitlines(), set[str]()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Return | ast.Assign | ast.AugAssign | ast.For | ast.If | ast.Expr):
            kept |= set() if is_text else {lines[node.lineno - 1]}
    return {line for line in kept if len(line.strip()) > 20}


def test_a_chapters_time_is_that_of_its_exercises() -> None:
    for chapter, heading in headings().items():
        assert sum(row[3] for row in table_rows(chapter)) == heading.minutes, chapter


def test_the_readme_lists_every_exercise(wanted: dict[str, str]) -> None:
    readme = wanted["README.md"]
    for chapter in CHAPTERS:
        name = headings()[chapter].name
        for each in exercises(chapter).values():
            row = f"[`{each.name}`]({name}/{file_name(each.name)}) | {each.level} | {each.points}"
            assert row in readme
    number = sum(len(exercises(chapter)) for chapter in CHAPTERS)
    number += sum(map(len, HUNTS.values()))
    assert f"In all: {number} exercises" in readme


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_colab_and_binder_open_the_notebook(chapter: str, wanted: dict[str, str]) -> None:
    name = headings()[chapter].name
    colab = f"https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/{name}"
    binder = f"https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/{name}"
    first = json.loads(wanted[f"{name}.ipynb"])["cells"][0]["source"]
    row = f"]({name}.ipynb) | [Colab]({colab}.ipynb) [Binder]({binder}.ipynb) |"
    assert wanted["README.md"].count(row) == 1
    for address in (colab, binder):
        assert first.count(f"]({address}.ipynb)") == 1
        chapters = (NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")
        assert f"]({address}.ipynb)".replace("exercises/", "notebooks/") in chapters


def test_an_exercise_notebook_installs_all_that_a_chapter_does() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    packages = extras["optional-dependencies"]
    address = "@ git+https://github.com/minigen/minigen'"
    (own,) = re.findall(rf"'minigen\[(\w+)\] {re.escape(address)}", INSTALL)
    for path in sorted(NOTEBOOKS.glob("[0-9]*.py")):
        (named,) = re.findall(
            rf"'minigen\[([\w,]+)\] {re.escape(address)}", path.read_text(encoding="utf-8")
        )
        for extra in named.split(","):
            assert set(packages[extra]) <= set(packages[own]), f"{path.name}: {extra}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_exercise_notebook_begins_with_what_colab_needs(chapter: str) -> None:
    path = FOLDER / f"{headings()[chapter].name}.ipynb"
    code = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert code[0] == INSTALL
    assert code[1].startswith("%load_ext minigen_course")


def test_a_workspaces_links_lead_to_its_own_files_or_to_the_repository(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    chapter, sheet, listed = (
        (tmp_path / name).read_text(encoding="utf-8")
        for name in ("22_paged.ipynb", "exercises/22_paged.ipynb", "exercises/README.md")
    )
    assert "](exercises/22_paged.ipynb)" in chapter
    assert "](../22_paged.ipynb)" in sheet
    assert "](https://github.com/minigen/minigen/blob/main/docs/glossary.md" in chapter
    assert "](../" not in chapter
    assert "](22_paged/kv_pool.py)" in listed
    assert (tmp_path / "exercises/22_paged/kv_pool.py").exists()


def test_an_answer_in_a_file_is_checked(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    file = tmp_path / "exercises" / "22_paged" / "slots_of.py"
    code, output = run("check", str(file))
    assert code == 1
    assert "✗ slots_of: is still empty" in output
    assert "0 of 1 pass." in output
    fill_in(
        file, "return [block_ids[each // block_size] + each % block_size for each in positions]"
    )
    code, output = run("check", str(file), "--hint", "1")
    assert code == 1
    assert "✗ slots_of: check 1 of 4" in output
    assert "hint 1: " in output
    right = "block_ids[each // block_size] * block_size + each % block_size"
    fill_in_again(file, f"return [{right} for each in positions]")
    code, output = run("check", str(file))
    assert (code, output.splitlines()[0]) == (0, "✓ slots_of: all 4 checks passed.")


def fill_in_again(path: Path, line: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    indent = lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())]
    path.write_text("\n".join([*lines[:-1], indent + line]) + "\n", encoding="utf-8")


def test_a_folder_and_a_notebook_are_checked_whole(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    for path in ("exercises/16_sampling", "exercises/16_sampling.ipynb"):
        code, output = run("check", str(tmp_path / path))
        assert code == 1
        for name in exercises("16"):
            assert f"✗ {name}: is still empty" in output
        assert f"0 of {len(exercises('16'))} pass." in output


def test_a_later_import_does_not_stand_for_an_answer(tmp_path: Path) -> None:
    """The lines that use `attend_by_block` import the package's KVPool, below the stub of it."""
    make_workspace(tmp_path)
    _, output = run("check", str(tmp_path / "exercises" / "22_paged.ipynb"))
    assert "✗ KVPool: is still empty" in output
    assert "0 of 5 pass." in output


@pytest.mark.parametrize(
    "line",
    [
        "NEG = -1",
        "SIZES = (1, 2)",
        "SIZE: int = 4",
        "LIMIT = 4 * 1024",
        "INF = float('inf')",
        "INF = -math.inf",
        "f = lambda x, y=4: print(x)",
        "ROWS = [[each, 2 * each] for each in range(4)]",
        "TABLE = {'a': torch.float32}",
        "both = list[int] | None",
        "first, *rest = 1, 2, 3",
    ],
)
def test_an_assignment_of_a_plain_value_is_kept(line: str) -> None:
    definitions = Definitions()
    assert len(definitions.read(f"import math, torch\n{line}\n")) == 2
    assert definitions.left_out == {}


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("x = torch.zeros(4)\ny = x[0]\nz = -y", "xyz"),
        ("x = 4\nx = f()\ny = x", "xy"),
        ("x += 1", "x"),
        ("for x in range(4):\n    y = x", "xy"),
        ("x = [f(each) for each in range(4)]", "x"),
        ("x = lambda y=f(): y", "x"),
        ("x = (y := 4)", "xy"),
        ("if True:\n    def x(): pass", "x"),
    ],
)
def test_what_may_compute_for_long_is_left_out(cell: str, names: str) -> None:
    definitions = Definitions()
    definitions.read("import torch\ndef f(): pass\n")
    definitions.read(cell)
    assert set(definitions.left_out) == set(names)


def test_a_constant_of_a_file_is_set_and_a_computed_one_named(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    file = tmp_path / "exercises" / "22_paged" / "slots_of.py"
    fill_in(file, "return [(block_ids[p // SIZE]) * block_size + p % SIZE for p in positions]")
    text = file.read_text(encoding="utf-8").replace("SIZE", "(block_size + ZERO)")
    file.write_text(f"{text}\nZERO = -1 + 1\n", encoding="utf-8-sig")
    assert run("check", str(file))[0] == 0
    file.write_text(f"{text}\nZERO = print()\n", encoding="utf-8")
    code, output = run("check", str(file))
    assert code == 1
    assert "'ZERO' is not defined (line " in output
    said = "The line `ZERO = print()` is not run: of a file, only imports"
    assert said in output
    case = next(each for each in cases_of("22", file.parent) if each.file == file)
    with pytest.raises(NameError) as raised:
        case.run()
    assert said in raised.value.__notes__[0]


def test_a_hunt_in_a_file_is_checked(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    code, output = run("check", str(tmp_path / "exercises" / "22_paged" / "hunt_slots.py"))
    assert code == 1
    assert output.startswith("✗ slots: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "has no answer: a cell or a file with the line '# exercise: ', as its stub"),
        ("# exercise: minigen.no.such_part\n", "which is no exercise of this minigen."),
        (None, "cannot be read as Python code"),
    ],
)
def test_a_path_without_an_answer_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, output = run("check", str(path))
    assert code == 1
    assert words in output


def test_pytest_runs_each_check_of_a_folder_as_a_test(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    folder = tmp_path / "exercises" / "16_sampling"
    right = ANSWERS["keep_top_p"].right[0]
    mark = MARK + exercises("16")["keep_top_p"].dotted
    code = f"import math\n\nimport torch\n\n{mark}\n{inspect.getsource(right)}"
    code = code.replace(right.__name__, "keep_top_p")
    (folder / "keep_top_p.py").write_text(code, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
    )
    output = found.stdout
    num_right = len(exercises("16")["keep_top_p"].checks)
    assert f"{num_right} passed" in output, output
    assert f"{len(cases_of('16', folder)) - num_right} failed" in output
    assert "draw is still empty" in output


def test_every_check_of_a_chapter_is_a_case() -> None:
    for chapter in CHAPTERS:
        cases = cases_of(chapter, FOLDER / headings()[chapter].name)
        number = sum(len(each.checks) for each in exercises(chapter).values())
        number += sum(len(each.all_checks()) for each in hunts_of(chapter))
        assert len(cases) == number


@pytest.mark.parametrize("text", ['{"cells": 3}', "[]", "[" * 100_000])
def test_a_file_that_is_no_notebook_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text(text, encoding="utf-8")
    code, said = run("check", str(path))
    assert code == 1
    assert said.startswith(f"{path} cannot be read as a notebook (")

"""A workspace belongs to the learner: it is created, completed, checked, and never overwritten."""

import gc
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import nbclient
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jaxtyping import TypeCheckError
from typer.testing import CliRunner

from minigen import SamplingParams
from minigen.cli.main import add_commands_of_other_packages, app
from minigen.errors import OptionError
from minigen_course import load_model
from minigen_course.figures.claims import Claim, gathered
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import hunts_of
from minigen_course.handout.course_files import notebooks_folder
from minigen_course.handout.sheet import exercise_notebook
from minigen_course.handout.workspace import exercise_files, make_workspace, progress
from minigen_course.lab import inspect_model
from tools.chapters import ROOT
from tools.environment import copy_package

RIGHT = """# exercise: minigen.sampling.sampler.keep_top_p
import math
for _ in iter(int, 1): pass
limit = 1e-9
def keep_top_p(logits, top_p):
    probabilities, ids = logits.double().softmax(-1).sort(descending=True, stable=True)
    kept = probabilities.cumsum(-1) - probabilities < top_p.unsqueeze(-1) - limit
    kept[:, 0] = True
    return logits.masked_fill(~kept.new_zeros(kept.shape).scatter(-1, ids, kept), -math.inf)
"""


def answer(path: Path, text: str, dotted: str = "minigen.sampling.sampler.keep_top_p") -> None:
    """Write an answer into a notebook's stub cell, as a learner does."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    (cell,) = (
        each
        for each in notebook["cells"]
        if each["cell_type"] == "code"
        and "".join(each["source"]).startswith(f"# exercise: {dotted}")
    )
    cell["source"] = text
    path.write_text(json.dumps(notebook), encoding="utf-8")


def keep_only(folder: Path, chapter: str) -> None:
    """Keep one chapter in a workspace, because checking an untouched bug hunt takes a process."""
    for path in (*folder.glob("*.ipynb"), *(folder / "exercises").iterdir()):
        if path.name.startswith(chapter):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        (["workspace", "new"], {"triton", "numba"}),
        (["migrate", "."], {"triton", "numba", "torch"}),
        (["claims"], {"triton", "numba"}),
        (["info"], {"triton", "numba"}),
        (["doctor"], {"triton"}),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_command_imports_no_compiler_that_it_does_not_need(
    tmp_path: Path, command: list[str], unneeded: set[str]
) -> None:
    script = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print('imported:', {unneeded!r} & set(sys.modules)))\n"
        f"sys.argv = ['minigen', *{command!r}]\n"
        "runpy.run_module('minigen', run_name='__main__')"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("imported: set()\n")


def test_a_workspace_has_all_notebooks_and_exercises(tmp_path: Path) -> None:
    new = {str(path.relative_to(tmp_path)) for path in make_workspace(tmp_path)}
    assert {path.name for path in notebooks_folder().glob("[0-9]*.ipynb")} <= new
    assert {str(Path("exercises") / name) for name in exercise_files()} <= new
    assert len([name for name in new if name.endswith(".ipynb")]) == 2 * len(CHAPTERS)


def test_a_second_run_completes_a_workspace_and_changes_no_work(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    mine, gone = tmp_path / "16_sampling.ipynb", tmp_path / "exercises" / "16_sampling.ipynb"
    mine.write_text("my work", encoding="utf-8")
    gone.unlink()
    assert make_workspace(tmp_path) == [gone]
    assert mine.read_text("utf-8") == "my work"


@pytest.mark.parametrize("place", ["16_sampling.ipynb", "exercises/16_sampling.ipynb"])
def test_progress_finds_an_answer_wherever_it_was_written(tmp_path: Path, place: str) -> None:
    make_workspace(tmp_path)
    keep_only(tmp_path, "16")
    answer(tmp_path / place, RIGHT)
    found = {each.name: each for each in progress(tmp_path) if each.chapter == "16"}
    assert found["keep_top_p"].passed, found["keep_top_p"].message
    assert not found["apply_penalties"].passed
    assert "still empty" in found["apply_penalties"].message


def test_progress_finds_an_answer_in_the_chapter_where_the_exercise_once_stood(
    tmp_path: Path,
) -> None:
    written = (
        "# exercise: minigen.checkpoint.gguf_mapping.unpermuted_rows\nimport torch\n\n\n"
        "def unpermuted_rows(num_rows, heads):\n"
        "    rows = torch.arange(num_rows).reshape(heads, 2, -1)\n"
        "    return rows.swapaxes(1, 2).flatten().argsort()"
    )
    (tmp_path / "exercises").mkdir()
    old = {"cells": [{"cell_type": "code", "source": written}]}
    (tmp_path / "exercises" / "11_weights.ipynb").write_text(json.dumps(old), encoding="utf-8")
    (standing,) = (
        each
        for each in progress(tmp_path)
        if each.name == "unpermuted_rows" and each.chapter == "13"
    )
    assert standing.passed, standing.message


def test_progress_shows_what_a_broken_answer_raises(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    keep_only(tmp_path, "16")
    for name in ("16_sampling.ipynb", "exercises/16_sampling.ipynb"):
        answer(
            tmp_path / name,
            "# exercise: minigen.sampling.sampler.keep_top_p\nimport no_such_module",
        )
    standing = next(each for each in progress(tmp_path) if each.name == "keep_top_p")
    assert not standing.passed
    assert "ModuleNotFoundError" in standing.message


def test_broken_answers_and_stubs_do_not_hide_other_answers(
    tmp_path: Path,
) -> None:
    make_workspace(tmp_path)
    keep_only(tmp_path, "16")
    mark = "# exercise: minigen.sampling.sampler.keep_top_p\n"
    answer(tmp_path / "exercises" / "16_sampling.ipynb", mark + "def keep_top_p(:")
    found = {each.name: each.message for each in progress(tmp_path)}
    assert "raised SyntaxError" in found["keep_top_p"]
    assert "still empty" in found["apply_penalties"], "that is a mistake in another answer"
    answer(tmp_path / "16_sampling.ipynb", RIGHT)
    (standing,) = (each for each in progress(tmp_path) if each.name == "keep_top_p")
    assert standing.passed, standing.message


def test_progress_of_a_folder_that_is_not_a_workspace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a workspace; `minigen workspace"):
        list(progress(tmp_path))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_exercise_notebook_has_each_exercise_once(chapter: str) -> None:
    sources = [cell["source"] for cell in exercise_notebook(chapter)["cells"]]
    for name in exercises(chapter):
        assert sum(source.startswith(f"## {name}\n") for source in sources) == 1
        assert sum(f"mine = check({int(chapter)}, {name}={name})" in each for each in sources) == 1


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_exercise_notebook_runs_before_anything_is_written(chapter: str) -> None:
    notebook = nbformat.from_dict(exercise_notebook(chapter))
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert printed.count("is still empty") == len(exercises(chapter)) + len(hunts_of(chapter))


def test_a_missing_model_is_pulled_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = []
    monkeypatch.setattr(inspect_model.hub, "find", lambda name: None)
    monkeypatch.setattr(inspect_model.hub, "pull", lambda name, progress: pulled.append(name))
    monkeypatch.setattr(inspect_model.hub, "resolve", lambda name: tiny_directory)
    assert load_model(weights="float32").generate([5], SamplingParams(max_tokens=1)).token_ids
    assert pulled == [inspect_model.hub.DEFAULT_MODEL]
    assert "is pulled now, once" in capsys.readouterr().out


def test_without_the_notebooks_extra_the_commands_name_what_to_install() -> None:
    script = (
        "import sys; sys.modules['cloudpickle'] = None\n"
        "from minigen.cli.main import main; sys.argv = ['minigen', 'progress']; main()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8")
    assert run.returncode == 1
    assert run.stderr.startswith("minigen: The course needs cloudpickle, which is not installed")
    assert "Traceback" not in run.stderr


def test_claims_are_one_table(tmp_path: Path) -> None:
    add_commands_of_other_packages()
    printed = CliRunner().invoke(app, ["claims"])
    assert printed.exit_code == 0
    found = list(gathered(notebooks_folder()))
    held = sum(each.outcome == "held" for _, each in found)
    assert printed.stdout.splitlines()[-1].startswith(f"{len(found)} claims: {held} held, ")
    empty = CliRunner().invoke(app, ["claims", str(tmp_path)])
    assert isinstance(empty.exception, OptionError)
    with pytest.raises(ValueError, match="outcome must be one of"):
        Claim("a", "b", "perhaps", "c")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"cells": 3}', '{"cells": [[]]}', "[" * 100_000),
        '{"cells": [{"outputs": [{"metadata": {"minigen_claims": {"claims": [{}]}}}]}]}',
    ],
    ids=["empty", "list", "no cells", "number", "no cell", "deep", "another minigen's claims"],
)
def test_claims_of_what_is_no_notebook_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "13.ipynb").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=r"13\.ipynb cannot be read as a notebook"):
        list(gathered(tmp_path))


def without_the_clone() -> dict[str, str]:
    """Return an environment in which Python finds only installed packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with minigen's wheel installed, outside the clone; other packages are shared."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w"]
    copy_package(folder / "copy")  # setuptools writes next to the sources that it builds
    bare = without_the_clone()
    subprocess.run(
        [*build, str(folder), str(folder / "copy")], check=True, capture_output=True, env=bare
    )
    (wheel,) = folder.glob("*.whl")
    assert any(name.endswith("16_sampling.ipynb") for name in zipfile.ZipFile(wheel).namelist())
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, env=bare)
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (folder / "env").rglob("site-packages")
    # Python reads such a file in the locale's encoding, so it is ASCII, whatever the paths are.
    line = f"import sys; sys.path.extend({shared!a})\n"
    (site / "shared.pth").write_text(line, encoding="ascii")
    return python


def test_an_installed_wheel_makes_a_workspace_and_checks(installed: Path, tmp_path: Path) -> None:
    bare = without_the_clone()
    command = [str(installed), "-m", "minigen", "workspace", str(tmp_path / "course")]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", env=bare)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "course" / "16_sampling.ipynb").exists()
    script = (
        "import minigen, pathlib, sys\n"
        f"assert not minigen.__file__.startswith({str(ROOT / 'minigen')!r})\n"
        "from minigen_course import check\n"
        "from minigen.sampling.sampler import keep_top_p\n"
        "check(16, keep_top_p=keep_top_p)\n"
        "from minigen_course.ch35_quantization.lesson.stored import stored\n"
        "from minigen_course.ch36_speculative.lesson import stored_gains\n"
        "assert stored('35_quantization') and stored_gains(), 'what their benchmarks stored'\n"
    )
    checked = subprocess.run(
        [str(installed), "-c", script],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        env=bare,
    )
    assert "✓ keep_top_p" in checked.stdout, checked.stderr
    assert checked.returncode == 0, checked.stderr


def test_imports_are_set_apart_from_the_garbage_collector(tmp_path: Path) -> None:
    shell = InteractiveShell(ipython_dir=str(tmp_path))
    gc.unfreeze()
    try:
        cell = "%load_ext minigen_course\nimport gc\nassert not gc.isenabled()"
        assert shell.run_cell(cell).success
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_cells_shapes_are_checked_and_plain_functions_stay_fast(tmp_path: Path) -> None:
    shell = InteractiveShell(ipython_dir=str(tmp_path))
    shell.run_cell("%load_ext minigen_course")
    shell.run_cell("%load_ext minigen_course")
    cell = """
import torch
from jaxtyping import Float
def plain(numbers: list[int], most: int | None = None) -> dict[str, float]:
    return {}
def shaped(x: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows"]:
    return x.sum(1)
class Mine:
    def method(self, x: Float[torch.Tensor, "rows"]):
        return x
"""
    assert shell.run_cell(cell).success
    assert not hasattr(shell.user_ns["plain"], "__wrapped__")
    assert shell.run_cell("shaped(torch.ones(2, 3))").success
    for call in ("shaped(torch.ones(2))", "Mine().method(torch.ones(1, 1))"):
        assert isinstance(shell.run_cell(call).error_in_exec, TypeCheckError)

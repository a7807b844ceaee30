"""The code stays in order: sizes, names, layers, and one place for all files of a chapter."""

import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from jaxtyping import TypeCheckError

from minigen.model.layers import rms_norm
from tests.typecheck import modules_with_shapes
from tools import layout
from tools.chapters import ROOT, Chapter, read_chapters

MOST_SIBLINGS, MOST_AT_THE_TOP, MOST_IN_A_CHAPTER = 14, 12, 5
MOST_LINES, MOST_SHORT = 500, 12
SAME_JOB = {  # names that two packages may share: one file per backend, API or format owner
    *("runner", "attention", "sampling", "elementwise"),  # kernels.cpu and kernels.triton
    *("schema", "routes", "responses", "errors", "gguf"),
    *("serve", "report", "compile", "perplexity"),
}
GERUNDS = {"sampling", "sharding", "static_batching", "gguf_mapping"}
MOST_IMPORTED = {"minigen": 9, "minigen_course": 12}  # modules, by one notebook
TOOLKITS = {"grading", "handout", "kit", "lab", "figures"}
MOST_HOMES, MOST_OF_SAMPLING = 1, 4  # of an engine option; modules of a sampling parameter
FOLDS = ["minigen.trace.timeline"]


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    counts = layout.siblings()
    assert {folder: n for folder, n in counts.items() if n > MOST_SIBLINGS} == {}
    assert counts["minigen"] <= MOST_AT_THE_TOP
    chapters = {folder: n for folder, n in counts.items() if re.search(r"/ch\d\d_", folder)}
    assert {folder: n for folder, n in chapters.items() if n > MOST_IN_A_CHAPTER} == {}


def test_modules_are_neither_giants_nor_fragments() -> None:
    sizes = {name: layout.num_lines(path) for name, path in layout.modules().items()}
    assert {name: n for name, n in sizes.items() if n > MOST_LINES} == {}
    short = sorted(name for name, n in sizes.items() if n < layout.SHORT)
    assert len(short) <= MOST_SHORT, short


def test_the_engine_does_not_know_the_course() -> None:
    guilty = [
        f"{path.relative_to(ROOT)}:{number}"
        for name, path in layout.files().items()
        if name.split(".")[0] == "minigen"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"minigen_course|\bchapters?\b", line, re.IGNORECASE)
    ]
    assert guilty == []


def test_the_engine_patches_nothing() -> None:
    guilty = [
        name
        for name, path in layout.files().items()
        if name.split(".")[0] == "minigen" and "unittest.mock" in path.read_text(encoding="utf-8")
    ]
    assert guilty == []


def test_packages_import_only_those_below_them() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chapter", read_chapters(), ids=lambda each: each.number)
def test_all_of_a_chapter_is_found_by_its_number(chapter: Chapter) -> None:
    number, stem = chapter.number, chapter.stem
    course = ROOT / "minigen_course" / f"ch{number}_{stem}"
    assert (course / "exercises.py").exists()
    assert (ROOT / "notebooks" / f"{number}_{stem}.ipynb").exists()
    assert (ROOT / "tests" / "answers" / f"ch{number}_{stem}.py").exists()
    tested = list((ROOT / "tests").glob(f"test_{number}_*.py"))
    assert tested or {path.name for path in course.glob("*.py")} <= {"__init__.py", "exercises.py"}


def test_files_outside_chapters_are_toolkits() -> None:
    folders = {
        name.split(".")[1]
        for name in layout.modules()
        if name.startswith("minigen_course.") and name.count(".") > 1
    }
    chapters = {f"ch{each.number}_{each.stem}" for each in read_chapters()}
    assert folders <= chapters | TOOLKITS


def test_a_name_has_one_meaning() -> None:
    names = Counter(
        name.split(".")[-1] for name in layout.modules() if name.split(".")[0] == "minigen"
    )
    assert {name for name, count in names.items() if count > 1} <= SAME_JOB
    gerunds = {name for name in names if name.endswith("ing")}
    assert gerunds <= GERUNDS


def test_a_notebook_imports_few_modules() -> None:
    for package, most in MOST_IMPORTED.items():
        counts = layout.notebook_imports(package)
        assert {name: count for name, count in counts.items() if count > most} == {}


def test_an_option_has_one_home_and_a_sampling_parameter_few_modules() -> None:
    options = {name: layout.homes(name) for name in layout.OPTIONS}
    assert {name: each for name, each in options.items() if len(each) != MOST_HOMES} == {}
    sampling = {name: layout.mentions(name) for name in layout.SAMPLING}
    assert {name: each for name, each in sampling.items() if len(each) > MOST_OF_SAMPLING} == {}


@pytest.mark.parametrize("chapter", read_chapters(), ids=lambda each: each.number)
def test_every_place_of_a_chapter_exists(chapter: Chapter) -> None:
    for paths in chapter.places.values():
        for path in paths:
            assert (ROOT / path).exists(), path


def test_shapes_are_checked_wherever_they_are_written() -> None:
    with pytest.raises(TypeCheckError):
        rms_norm(torch.ones(2, 8), torch.ones(7), eps=1e-5)


def test_no_module_that_defines_kernels_writes_shapes() -> None:
    """The hook that checks shapes replaces the globals of a kernel."""
    paths = layout.modules()
    defines = re.compile(r"^@[\w.]*(njit|jit|kernel|intrinsic|overload)\b", re.MULTILINE)
    texts = {name: paths[name].read_text("utf-8") for name in modules_with_shapes()}
    assert len(texts) > 50
    assert [name for name, text in texts.items() if defines.search(text)] == []


def test_one_module_folds_the_trace() -> None:
    assert layout.trace_folds() == FOLDS, "make a view of the timeline instead"


def test_the_measures_are_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.layout"], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert "modules / lines" in done.stdout

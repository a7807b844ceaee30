"""Notebooks agree with their sources and with the package; nbval runs them and compares outputs."""

import json
import re
from pathlib import Path
from typing import Any

import jupytext
import pytest
from jupytext.compare import compare_notebooks

from minigen.config import DEFAULT_MODEL
from minigen.errors import DownloadError
from minigen_course.figures.claims import gathered
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.stub import source_of
from tools.chapters import ROOT, read_chapters
from tools.notebooks import fetch_models, refilled

FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
MOST_CODE_CELLS, MOST_IGNORED, MOST_BYTES = 40, 2, 1_000_000
PERCENT = {"extension": ".py", "format_name": "percent"}


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def notebook(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_is_a_pair_named_after_its_chapter() -> None:
    stems = {f"{chapter.number}_{chapter.stem}" for chapter in read_chapters()}
    assert {path.stem for path in SOURCES} <= stems
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}


def test_a_pair_holds_the_same_cells(source: Path) -> None:
    compare_notebooks(
        jupytext.read(source),
        jupytext.read(source.with_suffix(".ipynb")),
        fmt=PERCENT,
        compare_ids=False,
    )


def test_no_line_of_text_is_a_cells_title(notebook: dict[str, Any]) -> None:
    """Jupytext takes words behind a marker of the .py for a title, and no page shows it."""
    assert not [cell["metadata"] for cell in notebook["cells"] if "title" in cell["metadata"]]


def test_mirrors_and_stubs_are_the_packages(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    assert refilled(text) == text, f"run python -m tools.notebooks {source.stem}"


def test_a_notebook_was_run_from_top_to_bottom_without_an_error(notebook: dict[str, Any]) -> None:
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_shown_code_is_the_packages_of_today(source: Path, notebook: dict[str, Any]) -> None:
    """A docstring mended in the package makes the stored output of `show` old, a run later."""
    for cell in code_cells(notebook):
        texts = [
            "".join(output.get("data", {}).get("text/plain", "")) for output in cell["outputs"]
        ]
        shown = [
            found for text in texts if (found := re.match(r"# (minigen[\w.]+)\n(.+)", text, re.S))
        ]
        assert shown or not re.search(r"(?m)^show\(", "".join(cell["source"]))
        for found in shown:
            again = f"run python -m tools.notebooks {source.stem}"
            assert found[2] == source_of(found[1]), f"{found[1]} has changed: {again}"


def test_a_notebook_keeps_to_its_budgets(source: Path, notebook: dict[str, Any]) -> None:
    assert len(code_cells(notebook)) <= MOST_CODE_CELLS  # prose may be as long as it needs to be
    ignored = [
        cell
        for cell in code_cells(notebook)
        if "nbval-ignore-output" in cell["metadata"].get("tags", ())
    ]
    assert len(ignored) <= MOST_IGNORED
    assert source.with_suffix(".ipynb").stat().st_size <= MOST_BYTES


def test_a_notebook_opens_in_other_tools(source: Path, notebook: dict[str, Any]) -> None:
    first, install = notebook["cells"][:2]
    assert f"notebooks/{source.stem}.ipynb" in "".join(first["source"]), "badges for Colab, Binder"
    assert "find_spec" in "".join(install["source"]), "the first cell installs what is missing"


def test_links_to_other_chapters_exist(source: Path) -> None:
    links = re.findall(r"\]\((\d\d_\w+\.ipynb)\)", source.read_text(encoding="utf-8"))
    assert not [name for name in links if not (FOLDER / name).exists()]


def test_an_explorable_has_its_picture(notebook: dict[str, Any]) -> None:
    widgets = [
        output["data"]
        for cell in code_cells(notebook)
        for output in cell["outputs"]
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert widgets, "a chapter has something to drag"
    assert all("image/png" in data for data in widgets)


def test_a_chapter_contains_its_exercises_and_their_verdicts(
    source: Path, notebook: dict[str, Any], tmp_path: Path
) -> None:
    chapter = source.stem[:2]
    text = source.read_text(encoding="utf-8")
    if chapter in CHAPTERS:
        assert any(f"# exercise: {each.dotted}" in text for each in exercises(chapter).values())
    assert any(
        "minigen_claims" in output.get("metadata", {})
        for cell in code_cells(notebook)
        for output in cell["outputs"]
    )


def test_claims_are_collected_from_all_notebooks() -> None:
    chapters = [chapter for chapter, _ in gathered(FOLDER)]
    assert set(chapters) == {path.stem[:2] for path in SOURCES}


def test_models_are_fetched_before_notebooks_run_and_a_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a cell, the bar of the first fetch would be an output that no other run has."""
    fetched: list[str] = []

    def fails() -> Path:
        fetched.append("float weights")
        raise DownloadError("There is no network.")

    monkeypatch.setattr(
        "tools.notebooks.hub.resolve", lambda name, *, progress: fetched.append(name)
    )
    monkeypatch.setattr("tools.notebooks.float_file", fails)
    fetch_models()
    assert fetched == [DEFAULT_MODEL, "float weights"]
    assert capsys.readouterr().out == "There is no network.\n"

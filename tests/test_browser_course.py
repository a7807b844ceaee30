"""An assignment as a student meets it: typed into in JupyterLab, saved, graded, read again.

Run by `make test-browser`; screenshots are written to build/screenshots.
"""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from minigen_course.kit.build import Course, build
from tests.jupyterlab import (
    SCREENSHOTS,
    await_kernel,
    chromium,
    close,
    command,
    opened,
    running_lab,
)
from tests.test_build import SEED, in_process, right_number, run

pytestmark = pytest.mark.browser

STEM = "22_paged"
RIGHT = "return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
WRONG = """last = context_lens - 1
return block_tables[:, 0] * block_size + last % block_size"""
MARKS = {"slots_of": 5.0, "decode_slots": 2.25, "num_blocks": 5.0, "unused_slots": 0.0}
WORDS = "Internal and external fragmentation."
CODE = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
    .filter(cell => cell.type === 'code' && cell.sharedModel.getSource())
    .map(cell => ({ran: cell.executionCount !== null, outputs: cell.outputs.toJSON()}))"""
IS_LOADED = "each => each.complete && each.naturalWidth > 0"


@pytest.fixture(scope="module")
def browser() -> Generator[Any, None, None]:
    """A Chromium."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of chapter 22 for nbgrader."""
    folder = tmp_path_factory.mktemp("course") / "course"
    assert list(build(folder, Course(("22",), SEED, "nbgrader"))) == ["22"]
    return folder


@pytest.fixture(scope="module")
def handed_in(
    built: Path, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Path, Any], None, None]:
    """The file that a student saved, and the page on which it was typed."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("student")
    (folder / "work").mkdir()
    shutil.copy(built / "release" / STEM / f"{STEM}.ipynb", folder / "work")
    with running_lab(folder / "work", folder) as lab:
        page = opened(lab, browser, STEM)
        _type(page, "# exercise: minigen.kv_cache.paged.slots_of", "raise NotImpl", RIGHT)
        _type(page, "# exercise: minigen_course.ch22_paged.lesson.decode_", "raise NotImpl", WRONG)
        _type(page, "# question: 22.num_blocks", "num_blocks = None", right_number())
        _type_words(page)
        command(page, "notebook:run-all-cells")  # returns at the first error
        await_kernel(page)
        command(page, "docmanager:save")
        yield folder / "work" / f"{STEM}.ipynb", page
        close(page)


def test_all_cells_run_and_say_in_a_sentence_what_is_wrong(handed_in: tuple[Path, Any]) -> None:
    _, page = handed_in
    cells = page.evaluate(CODE)
    assert all(each["ran"] for each in cells), "an unfinished part stops the cells below it"
    outputs = [output for each in cells for output in each["outputs"]]
    printed = "".join(each["text"] for each in outputs if each["output_type"] == "stream")
    assert "✓ slots_of: all 4 checks passed.\n3 of 3 points." in printed
    assert "✗ decode_slots: check 1 of 4" in printed
    errors = [each["traceback"] for each in outputs if each["output_type"] == "error"]
    assert (errors[:1]) == [
        ["✗ KVPool: is still empty: replace the line that raises NotImplementedError."]
    ]
    assert all(len(each) == 1 for each in errors), "a traceback instead of a sentence"
    assert page.locator(".jp-RenderedMarkdown", has_text=WORDS).is_visible()


def test_the_figure_of_a_question_is_shown(handed_in: tuple[Path, Any]) -> None:
    _, page = handed_in
    figure = page.locator('img[alt="the figure"]')
    figure.scroll_into_view_if_needed()
    assert figure.evaluate(IS_LOADED)
    page.screenshot(path=str(SCREENSHOTS / f"assignment-{STEM}.png"))


def test_minigens_grader_gives_the_marks(
    handed_in: tuple[Path, Any], built: Path, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "class" / "ada").mkdir(parents=True)
    shutil.copy(handed_in[0], tmp_path / "class" / "ada")
    found = run("grade", tmp_path / "class", "--course", built)
    assert found.exit_code == 0, found.output
    results = tmp_path / "class-grades"
    stored = json.loads((results / "results" / "ada.json").read_text(encoding="utf-8"))
    marks = {each["name"]: each["earned"] for each in stored["grades"][STEM]}
    assert marks == marks | MARKS
    page = _shown(browser, results / "feedback" / "ada.html", "minigen")
    assert "decode_slots: 2.25 of 15" in page.locator("h2").all_inner_texts()
    assert "`" not in page.locator("body").inner_text()
    page.close()


def test_nbgrader_gives_the_same_marks_and_its_feedback_keeps_the_seed(
    handed_in: tuple[Path, Any], built: Path, browser: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "course"
    shutil.copytree(built, folder)
    (folder / "submitted" / "ada" / STEM).mkdir(parents=True)
    shutil.copy(handed_in[0], folder / "submitted" / "ada" / STEM)
    for each in ("autograde", "generate_feedback"):
        done = in_process("nbgrader", each, STEM, cwd=folder)
        assert done.returncode == 0, done.stderr[-2000:]
    page = _shown(browser, folder / "feedback" / "ada" / STEM / f"{STEM}.html", "nbgrader")
    text = page.locator("body").inner_text()
    assert f"{STEM} (Score: {sum(MARKS.values())} / 65.0)" in text
    assert "case 1 of 5" in text, "why the kept cases fail"
    assert "seed=" not in text
    assert WORDS in text
    assert page.locator('img[alt="the figure"]').evaluate(IS_LOADED)
    page.close()


def _type(page: Any, mark: str, replaced: str, text: str) -> None:
    """Type over a line of the cell that begins with `mark`."""
    cell = page.locator(".jp-CodeCell", has_text=mark)
    line = cell.locator(".cm-line", has_text=replaced)
    line.scroll_into_view_if_needed()
    line.click()
    cell.locator(".cm-focused").wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+End")
    page.keyboard.type(text)


def _type_words(page: Any) -> None:
    """Answer the question in words as the head of the assignment says: select, Enter, write."""
    cell = page.locator(".jp-MarkdownCell", has_text="Your answer, in a few sentences")
    cell.scroll_into_view_if_needed()
    cell.locator("em").click()
    page.keyboard.press("Enter")
    cell.locator(".cm-focused").wait_for()
    page.keyboard.press("Control+a")
    page.keyboard.type(WORDS)
    page.keyboard.press("Shift+Enter")


def _shown(browser: Any, path: Path, grader: str) -> Any:
    """Open a page of feedback without a network; a screenshot of all of it is kept."""
    page = browser.new_context(offline=True, viewport={"width": 1000, "height": 900}).new_page()
    page.goto(path.as_uri())
    page.screenshot(path=str(SCREENSHOTS / f"feedback-{grader}.png"), full_page=True)
    return page

"""Every notebook in JupyterLab, in a real Chromium: it runs, and its controls respond.

And the book on a phone without a network: its explorables respond without a kernel.

Run by `make test-browser`; screenshots are written to build/screenshots. MINIGEN_CHROMIUM names a
Chromium if Playwright's own is not installed and none is on the PATH.
"""

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from minigen_course.handout.workspace import make_workspace
from tests.jupyterlab import (
    SCREENSHOTS,
    await_kernel,
    chromium,
    close,
    command,
    opened,
    running_lab,
)
from tools.book.__main__ import write
from tools.chapters import ROOT

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
REDRAW_SECONDS = 60
EXPLORABLE = ".jp-OutputArea-output .widget-vbox:has(> .widget-image)"
CONTROLS = ".widget-hslider, .widget-dropdown, .widget-text, .widget-checkbox, .widget-button"

ERRORS = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
    .filter(cell => cell.type === 'code').flatMap(cell => cell.outputs.toJSON())
    .filter(output => output.output_type === 'error').map(output => output.evalue)"""
WRITE_ANSWER = """([mark, answer]) => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells];
    cells.find(cell => cell.sharedModel.getSource().startsWith(mark))
        .sharedModel.setSource(answer);
}"""
ANSWER = """# exercise: minigen_course.lab.cost_model.most_sequences
def most_sequences(config, bits, memory, context, working=1e9):
    left = memory - working - num_parameters(config) * bits / 8
    return max(0, int(left // (kv_bytes_per_token(config) * context)))

from minigen_course.lab.cost_model import kv_bytes_per_token, num_parameters
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The address of a JupyterLab on a fresh workspace."""
    folder = tmp_path_factory.mktemp("lab")
    make_workspace(folder / "course")
    with running_lab(folder / "course", folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Generator[Any, None, None]:
    """A Chromium."""
    with chromium() as found:
        yield found


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_a_notebook_runs_and_its_explorables_respond(lab: str, browser: Any, stem: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = opened(lab, browser, stem)
    _run_all(page)
    explorables = page.locator(EXPLORABLE)
    assert explorables.count() > 0
    for number in range(explorables.count()):
        _drag_all(page, explorables.nth(number), SCREENSHOTS / f"{stem}-{number + 1}.png")
    close(page)


def test_a_learner_finishes_the_first_exercise(lab: str, browser: Any) -> None:
    page = opened(lab, browser, "00_map")
    page.evaluate(
        WRITE_ANSWER, ["# exercise: minigen_course.lab.cost_model.most_sequences", ANSWER]
    )
    _run_all(page)
    text = page.locator(".jp-Notebook").inner_text()
    assert "✓ most_sequences: all 5 checks passed." in text
    assert "your most_sequences was called" in text
    close(page)


PHONE = {"width": 390, "height": 844}
IS_LOADED = "each => each.complete && each.naturalWidth > 0"


def test_the_book_responds_on_a_phone_without_kernel_and_network(
    browser: Any, tmp_path: Path
) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    contents = write(tmp_path, drawn=True)
    moved = 0
    for path in sorted(contents.parent.glob("[0-9]*.html")):
        context = browser.new_context(viewport=PHONE, offline=True)
        page = context.new_page()
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{path.stem} is {width} pixels wide"
        for number, box in enumerate(page.locator(".explorable").all()):
            for control in box.locator("input, select").all():
                _move_in_the_book(page, box, control)
            box.screenshot(path=str(SCREENSHOTS / f"book-{path.stem}-{number + 1}.png"))
            moved += 1
        context.close()
    assert moved >= 12


def _move_in_the_book(page: Any, box: Any, control: Any) -> None:
    """Set a control to its last value and to its first: each has a picture, and they differ."""
    image, seen = box.locator("img"), []
    last = control.evaluate("each => (each.options?.length || Number(each.max) + 1) - 1")
    for value in (last, 0):
        if control.evaluate("each => each.tagName") == "SELECT":
            control.select_option(index=value)
        else:
            control.fill(str(value))
        seen.append(image.get_attribute("src"))
        assert _becomes(page, lambda: image.evaluate(IS_LOADED)), f"no picture {seen[-1]}"
    assert seen[0] != seen[1]


def _run_all(page: Any) -> None:
    command(page, "notebook:run-all-cells")
    assert page.evaluate(ERRORS) == []


def _drag_all(page: Any, explorable: Any, screenshot: Path) -> None:
    explorable.scroll_into_view_if_needed()
    explorable.screenshot(path=str(screenshot))
    assert _seen(explorable)[1] == "", "an error from the start"
    controls = explorable.locator(CONTROLS)
    for number in range(controls.count()):
        _drag(page, explorable, controls.nth(number))
    for player in explorable.locator(".widget-play").all():
        _play(page, explorable, player)
    explorable.screenshot(path=str(screenshot.with_stem(f"{screenshot.stem}-dragged")))


def _drag(page: Any, explorable: Any, control: Any) -> None:
    """Move a control of an explorable; the picture, or the sentence above it, must change.

    A move that ends in an error is undone, because from there the next control may change nothing.
    """
    before = _seen(explorable)
    take_back = _move(page, control)
    changes = _becomes(page, lambda: _seen(explorable) != before)
    assert changes, f"{control.inner_text()!r} changes nothing"
    _, sentence = _settled(page, explorable)
    assert "Traceback" not in explorable.inner_text()
    if sentence:
        take_back()
        assert _becomes(page, lambda: _seen(explorable)[1] == ""), f"it stays: {sentence}"
        _settled(page, explorable)


def _play(page: Any, explorable: Any, player: Any) -> None:
    """Press play: the picture changes by itself, until it is pressed again."""
    button, before = player.locator("button").first, _seen(explorable)
    button.click()
    assert _becomes(page, lambda: _seen(explorable) != before), "it does not play"
    button.click()
    _settled(page, explorable)


def _move(page: Any, control: Any) -> Callable[[], object]:
    """Move a control; return a function that moves it back."""
    kinds = control.get_attribute("class")
    if "widget-hslider" in kinds:
        handle = control.locator(".noUi-handle").first
        low, high, value = (
            float(handle.get_attribute(f"aria-value{each}")) for each in ("min", "max", "now")
        )
        there, back = ("Right", "Left") if value < (low + high) / 2 else ("Left", "Right")
        handle.focus()
        for _ in range(4):
            page.keyboard.press(f"Arrow{there}")

        def take_back() -> None:
            handle.focus()
            while float(handle.get_attribute("aria-valuenow")) != value:
                page.keyboard.press(f"Arrow{back}")

        return take_back
    if "widget-dropdown" in kinds:
        chooser = control.locator("select")
        chosen = chooser.evaluate("each => each.selectedIndex")
        chooser.select_option(index=chooser.locator("option").count() - 1)
        return lambda: chooser.select_option(index=chosen)
    if "widget-text" in kinds:
        field = control.locator("input")
        text = field.input_value()
        _write(field, f"{text} and then")
        return lambda: _write(field, text)
    clicked = control.locator("input") if "widget-checkbox" in kinds else control
    clicked.click()
    return lambda: clicked.click()


def _write(field: Any, text: str) -> None:
    field.fill(text)
    field.press("Enter")


def _seen(explorable: Any) -> tuple[str | None, str]:
    sentence = explorable.locator("> .widget-html").inner_text()
    return explorable.locator("> .widget-image").get_attribute("src"), sentence


def _settled(page: Any, explorable: Any) -> tuple[str | None, str]:
    """Return what is visible once the kernel has drawn everything."""
    before = None
    while (now := _seen(explorable)) != before:
        before = now
        page.wait_for_timeout(500)
        await_kernel(page)
    return now


def _becomes(page: Any, is_so: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true in time."""
    end = time.monotonic() + REDRAW_SECONDS
    while time.monotonic() < end:
        if is_so():
            return True
        page.wait_for_timeout(100)
    return False

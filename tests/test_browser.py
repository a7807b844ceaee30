"""Every notebook in JupyterLab, in a real Chromium: it runs, and what can be dragged answers.

Run by `make test-browser`; screenshots go to build/screenshots. MINIGEN_CHROMIUM names a Chromium
where Playwright's own is not installed and none is on the PATH.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from minigen.teach.course import make_workspace
from tools.chapters import ROOT

pytestmark = pytest.mark.browser

SCREENSHOTS = ROOT / "build" / "screenshots"
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
RUN_SECONDS, REDRAW_SECONDS = 300, 60
EXPLORABLE = ".jp-OutputArea-output .widget-vbox:has(> .widget-image)"
CONTROLS = ".widget-hslider, .widget-dropdown, .widget-text, .widget-checkbox, .widget-button"

IDLE = """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status
    === 'idle'"""
ERRORS = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
    .filter(cell => cell.type === 'code').flatMap(cell => cell.outputs.toJSON())
    .filter(output => output.output_type === 'error').map(output => output.evalue)"""
WRITE_ANSWER = """([mark, answer]) => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells];
    cells.find(cell => cell.sharedModel.getSource().startsWith(mark))
        .sharedModel.setSource(answer);
}"""
ANSWER = """# exercise: minigen.teach.capacity.most_sequences
def most_sequences(config, bits, memory, context, working=1e9):
    left = memory - working - num_parameters(config) * bits / 8
    return max(0, int(left // (kv_bytes_per_token(config) * context)))

from minigen.teach.capacity import kv_bytes_per_token, num_parameters
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The address of a JupyterLab on a fresh workspace, without news and without virtual cells."""
    folder = tmp_path_factory.mktemp("lab")
    make_workspace(folder / "course")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    (folder / "config" / "labconfig").mkdir(parents=True)
    (folder / "config" / "labconfig" / "page_config.json").write_text(
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        *("--LabApp.expose_app_in_browser=True", str(folder / "course")),
    ]
    own = {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "PYTHONPATH": str(ROOT),
    }
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _await_answer(f"{address}/api", server, folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(20)


def _await_answer(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(address, timeout=1).close()
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"JupyterLab did not answer: {log.read_text()}")


@pytest.fixture(scope="module")
def browser() -> Generator[Any, None, None]:
    """A Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("MINIGEN_CHROMIUM") or shutil.which("chromium")
    with playwright.sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=path, args=QUIET)
        yield chromium
        chromium.close()


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_a_notebook_runs_and_its_explorables_answer(lab: str, browser: Any, stem: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = _opened(lab, browser, stem)
    _run_all(page)
    explorables = page.locator(EXPLORABLE)
    assert explorables.count() > 0
    for number in range(explorables.count()):
        _drag_all(page, explorables.nth(number), SCREENSHOTS / f"{stem}-{number + 1}.png")
    _close(page)


def test_a_learner_finishes_the_first_exercise(lab: str, browser: Any) -> None:
    page = _opened(lab, browser, "00_map")
    page.evaluate(WRITE_ANSWER, ["# exercise: minigen.teach.capacity.most_sequences", ANSWER])
    _run_all(page)
    text = page.locator(".jp-Notebook").inner_text()
    assert "✓ most_sequences: all 5 checks passed." in text
    assert "your most_sequences was called" in text
    _close(page)


def _opened(lab: str, browser: Any, stem: str) -> Any:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(RUN_SECONDS * 1000)
    page.goto(f"{lab}/lab/workspaces/{stem}/tree/{stem}.ipynb?reset")
    page.wait_for_selector(".jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator")
    page.wait_for_function(IDLE)
    return page


def _close(page: Any) -> None:
    page.evaluate(
        "async () => await window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
    )
    page.close()


def _run_all(page: Any) -> None:
    page.evaluate("async () => await window.jupyterapp.commands.execute('notebook:run-all-cells')")
    assert page.evaluate(ERRORS) == []


def _drag_all(page: Any, explorable: Any, screenshot: Path) -> None:
    """Move every control of an explorable; the picture, or a sentence above it, must change."""
    explorable.scroll_into_view_if_needed()
    explorable.screenshot(path=str(screenshot))
    controls = explorable.locator(CONTROLS)
    for number in range(controls.count()):
        control = controls.nth(number)
        page.wait_for_function(IDLE)  # or it is the last control's picture that comes
        before = _seen(explorable)
        _move(page, control)
        assert _changes(page, explorable, before), f"{control.inner_text()!r} changes nothing"
        assert "Traceback" not in explorable.inner_text()
        if "widget-text" in control.get_attribute("class"):  # nonsense, maybe: take it back
            _write(control, " and then", back=True)
            page.wait_for_timeout(500)
    explorable.screenshot(path=str(screenshot.with_stem(f"{screenshot.stem}-dragged")))


def _move(page: Any, control: Any) -> None:
    kinds = control.get_attribute("class")
    if "widget-hslider" in kinds:
        handle = control.locator(".noUi-handle").first
        handle.focus()
        low, high = (float(handle.get_attribute(f"aria-value{each}")) for each in ("min", "max"))
        middle = (low + high) / 2
        below = float(handle.get_attribute("aria-valuenow")) < middle
        for _ in range(4):
            page.keyboard.press("ArrowRight" if below else "ArrowLeft")
    elif "widget-dropdown" in kinds:
        chooser = control.locator("select")
        chooser.select_option(index=chooser.locator("option").count() - 1)
    elif "widget-text" in kinds:
        _write(control, " and then")
    elif "widget-checkbox" in kinds:
        control.locator("input").click()
    else:
        control.click()


def _write(control: Any, more: str, back: bool = False) -> None:
    field = control.locator("input")
    text = field.input_value()
    field.fill(text.removesuffix(more) if back else text + more)
    field.press("Enter")


def _seen(explorable: Any) -> tuple[str | None, str]:
    sentence = explorable.locator("> .widget-html").inner_text()
    return explorable.locator("> .widget-image").get_attribute("src"), sentence


def _changes(page: Any, explorable: Any, before: tuple[str | None, str]) -> bool:
    end = time.monotonic() + REDRAW_SECONDS
    while time.monotonic() < end:
        if _seen(explorable) != before:
            page.wait_for_timeout(500)
            return True
        page.wait_for_timeout(100)
    return False

"""A JupyterLab on a folder, and a Chromium that operates it."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.chapters import BUILD, ROOT

SCREENSHOTS = BUILD / "screenshots"
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
RUN_SECONDS = 300
IDLE = """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status
    === 'idle'"""

ALL_DONE = """async () => await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
    .requestExecute({code: '', silent: true, store_history: false}).done"""


@contextmanager
def running_lab(folder: Path, own: Path) -> Generator[str, None, None]:
    """Run a JupyterLab on a folder, without news and virtual cells; yield its address.

    `own` is a folder for its settings and its log.
    """
    settings = own / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(
        '{"windowingMode": "none"}', encoding="utf-8"
    )
    (own / "config" / "labconfig").mkdir(parents=True)
    (own / "config" / "labconfig" / "page_config.json").write_text(
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}',
        encoding="utf-8",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        *("--LabApp.expose_app_in_browser=True", str(folder)),
    ]
    environment = {
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "PYTHONPATH": str(ROOT),
    }
    with open(own / "log", "wb") as log:
        server = subprocess.Popen(words, env=os.environ | environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _await_answer(f"{address}/api", server, own / "log")
        yield address
    finally:
        server.terminate()
        server.wait(20)


def _await_answer(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(address, timeout=1).close()
        except OSError:
            assert server.poll() is None, log.read_text("utf-8")
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"JupyterLab did not answer: {log.read_text('utf-8')}")


@contextmanager
def chromium() -> Generator[Any, None, None]:
    """Run a Chromium; MINIGEN_CHROMIUM names it, otherwise it is the one on the PATH."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("MINIGEN_CHROMIUM") or shutil.which("chromium")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()


def opened(lab: str, browser: Any, stem: str) -> Any:
    """Open a notebook, and wait for its kernel."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(RUN_SECONDS * 1000)
    page.goto(f"{lab}/lab/workspaces/{stem}/tree/{stem}.ipynb?reset")
    page.wait_for_selector(".jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator")
    page.wait_for_function(IDLE)
    return page


def command(page: Any, name: str) -> None:
    """Run one of JupyterLab's commands to its end."""
    page.evaluate("async name => await window.jupyterapp.commands.execute(name)", name)


def await_kernel(page: Any) -> None:
    """Wait until the kernel has done all that it was asked for."""
    page.evaluate(ALL_DONE)


def close(page: Any) -> None:
    """End a notebook's kernel, and close its page."""
    page.evaluate(
        "async () => await window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
    )
    page.close()

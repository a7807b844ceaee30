"""Everything that an engine needs before it is measured, so that no sample includes it."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.environments import OWN, Environments, SetupError
from benchmarks.peers.models import Models
from benchmarks.peers.running import take_turn

OWN_PACKAGES = ("minigen", "torch", "numba")


def prepared(
    engines: Sequence[Engine],
    environments: Environments,
    models: Models,
    threads: int,
    own_variables: Mapping[str, str],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the job of every engine that could be set up, and why the others could not.

    `own_variables` are set in the processes of minigen alone.
    """
    jobs, reasons = {}, {}
    for engine in engines:
        try:
            jobs[engine.name] = (
                own_job(engine, environments, models, threads, own_variables)
                if engine.environment == OWN
                else peers_job(engine, environments, models, threads)
            )
        except SetupError as error:
            reasons[engine.name] = str(error)
            print(f"{engine.name} is left out: {error}", flush=True)
    return jobs, reasons


def own_job(
    engine: Engine,
    environments: Environments,
    models: Models,
    threads: int,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Return the command and job of minigen; set up its environment and compile its kernels first.

    minigen itself is that of the working tree. Raises a `SetupError` if one of them fails.
    """
    environments.set_up(OWN)
    python = environments.python(OWN)
    compile_kernels(python, variables)
    described = {"variables": dict(variables), "versions": own_versions()}
    return described | _job(engine, python, models, threads)


def peers_job(
    engine: Engine, environments: Environments, models: Models, threads: int
) -> dict[str, Any]:
    """Return a peer's command and job; set up its environment and its model's format first.

    Raises a `SetupError` if one of them cannot be made.
    """
    name = engine.environment
    environments.set_up(name)
    build = environments.recipes[name].build
    return {
        "variables": environments.variables(name),
        "versions": environments.versions(name),
        **({} if build is None else {"build": build.about}),
        **_job(engine, environments.python(name), models, threads),
    }


def _job(engine: Engine, python: Path, models: Models, threads: int) -> dict[str, Any]:
    return {
        "command": [str(python), "-m", engine.worker],
        "model": str(models.path(engine.model)),
        "weights": engine.weights,
        "dtype": engine.dtype,
        "at_once": engine.at_once,
        "mixed": engine.mixed,
        "threads": threads,
    }


def own_versions() -> dict[str, str]:
    """Return the versions of minigen's packages, here and in its own environment."""
    return {name: version(name) for name in OWN_PACKAGES}


def compile_kernels(python: Path, variables: Mapping[str, str]) -> None:
    """Compile minigen's kernels once, which takes minutes; otherwise torch would be measured."""
    command, environment = [str(python), "-m", "minigen", "compile"], {**os.environ, **variables}
    if subprocess.run(command, env=environment, check=False).returncode:
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

"""One engine's turn: its process starts alone, measures itself, and ends."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.answers import share_agreeing
from benchmarks.peers.processes import Moment

ROOT = Path(__file__).resolve().parent.parent.parent
FALL_ASLEEP = 1.0  # seconds


@dataclass
class Turn:
    """What one process reported about itself.

    `samples` have the name of their load ("sample"), "seconds", mostly "tokens", and the share of
    the machine that others took ("foreign"); `memory` is in bytes; `versions` describe the settings
    of the engine, `packages` what is installed, the engine's own first; `agreeing` is the share of
    sure answers that it gave; `failure` is a sentence if it did not finish.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    agreeing: float | None = None
    failure: str | None = None


def take_turn(
    command: Sequence[str], job: Mapping[str, Any], folder: Path, time_limit: float = 1200
) -> Turn:
    """Run a worker on a job, alone, and collect its results; it is ended at the time limit.

    Everything else that the worker prints goes to `folder`/engine.log.
    """
    job_file, log = folder / "job.json", folder / "engine.log"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    threads = str(job["threads"])
    variables = {
        **os.environ,
        **job["variables"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": threads,
        "PEERS_STARTED": json.dumps(asdict(Moment.before_birth())),
    }
    with log.open("wb") as errors:
        try:
            run = subprocess.run(
                [*command, str(job_file)],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                timeout=time_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Turn(failure=f"It was stopped after the time limit of {time_limit:.0f} s.")
    turn = gathered(run.stdout, job["answers"])
    turn.packages = dict(job["versions"])
    if "build" in job:
        turn.versions["build"] = job["build"]
    if run.returncode and turn.failure is None:
        turn.failure = f"It ended with {ending(run.returncode)}: {last_words(log)}."
    elif turn.agreeing is None and turn.failure is None:
        turn.failure = "It ended before it had answered all prompts."
    return turn


def gathered(output: str, sure: list[dict[str, Any]]) -> Turn:
    """Parse a worker's lines into one turn, and compare its answers with the sure ones."""
    turn = Turn()
    for line in output.splitlines():
        result = json.loads(line)
        if "sample" in result:
            turn.samples.append(result)
        elif "memory" in result:
            turn.memory[result["memory"]] = result["bytes"]
        turn.versions |= result.get("versions", {})
        if "answers" in result:
            turn.agreeing = share_agreeing(result["answers"], sure)
        turn.failure = result.get("refused", turn.failure)
    return turn


def ending(code: int) -> str:
    """Return an exit code in words; the codes of signals are negative."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def last_words(log: Path) -> str:
    """Return the last line with text, without its full stop and without paths of this disk."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if line), "no reason was printed")
    shown = said.replace(str(Path.home()), "~").replace(tempfile.gettempdir(), "TMP")
    return shown[:200].rstrip(".")


def calibrate() -> dict[str, float]:
    """Measure the machine now: a product of matrices, and reading memory on one core.

    Then waits until numpy's threads, which keep spinning for a while, are asleep: they would
    disturb the start of the next engine.
    """
    matrix, numbers = np.ones((2048, 2048), np.float32), np.ones(2**26, np.float32)
    matrix @ matrix
    started = time.monotonic()
    for _ in range(3):
        matrix @ matrix
    multiplied = time.monotonic()
    for _ in range(3):
        numbers.sum()
    read = time.monotonic()
    time.sleep(FALL_ASLEEP)
    return {
        "float32 GFLOP/s": 3 * 2 * 2048**3 / 1e9 / (multiplied - started),
        "GB/s of one core": 3 * numbers.nbytes / 1e9 / (read - multiplied),
    }

"""One engine's turn: its process is started alone, measures itself, and is gone."""

import json
import os
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
    """What one process told of itself.

    `samples` have the name of their load ("sample"), "seconds", mostly "tokens", and the share of
    the machine that others took ("foreign"); `memory` is in bytes; `versions` say how the engine
    was set, `packages` what is installed, the engine's own first; `agreeing` is the share of sure
    answers that it gave; `failure` is a sentence if it did not get to the end.
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
    """Run a worker on a job, alone, and gather what it says; it is ended at the time limit.

    What the worker prints besides its results goes to `folder`/engine.log.
    """
    job_file, log = folder / "job.json", folder / "engine.log"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    threads = str(job["threads"])
    variables = {
        **os.environ,
        **job["variables"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": threads,
        "PEERS_BEGUN": json.dumps(asdict(Moment.before_birth())),
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
            return Turn(failure=f"It was given up after {time_limit:.0f} s.")
    turn = gathered(run.stdout, job["answers"])
    turn.packages = dict(job["versions"])
    if run.returncode and turn.failure is None:
        turn.failure = f"It ended with exit code {run.returncode}: {last_words(log)}."
    elif turn.agreeing is None and turn.failure is None:
        turn.failure = "It ended before it had answered everything."
    return turn


def gathered(output: str, sure: list[dict[str, Any]]) -> Turn:
    """A worker's lines as one turn; its answers are held against the sure ones."""
    turn = Turn()
    for line in output.splitlines():
        told = json.loads(line)
        if "sample" in told:
            turn.samples.append(told)
        elif "memory" in told:
            turn.memory[told["memory"]] = told["bytes"]
        turn.versions |= told.get("versions", {})
        if "answers" in told:
            turn.agreeing = share_agreeing(told["answers"], sure)
        turn.failure = told.get("refused", turn.failure)
    return turn


def last_words(log: Path) -> str:
    """The last line that says something, without a full stop and without places on this disk."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if line), "no word of why")
    shown = said.replace(str(Path.home()), "~").replace(tempfile.gettempdir(), "TMP")
    return shown[:200].rstrip(".")


def calibrate() -> dict[str, float]:
    """What the machine gives just now: a product of matrices, and reading memory on one core.

    Then waits until numpy's threads, which go on spinning for a while, are asleep: they would
    disturb the start of whoever is next.
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

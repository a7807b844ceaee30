"""The measurements, round by round, in one JSON file that grows with every turn.

Each round is independent, because ratios are taken within rounds. So an interrupted run keeps its
results, and a later run adds rounds to the same file.
"""

import json
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from benchmarks.peers.processor import Processor
from benchmarks.peers.running import Turn
from benchmarks.peers.summary import summary

ROOT = Path(__file__).resolve().parent.parent.parent


class RecordError(Exception):
    """A file of results cannot be continued; the message says why, and what can be done."""


@dataclass
class Round:
    """One round: when it started, its machine and code, and the turns taken so far.

    `engines` are all engines of the round, in any order; `speed` is the machine's speed before each
    turn.
    """

    started: str
    machine: dict[str, Any]
    code: str
    engines: list[str]
    speed: list[dict[str, float]] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)

    @classmethod
    def new(cls, engines: list[str]) -> "Round":
        """Return a round without turns, with the present date, machine and code."""
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return cls(started, machine(), code_version(), engines)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> "Round":
        """Read a round from its JSON object."""
        turns = {name: Turn(**turn) for name, turn in stored["turns"].items()}
        return cls(**{**stored, "turns": turns})


@dataclass
class Record:
    """A file of rounds that were measured with the same settings on the same processor."""

    path: Path
    settings: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)

    @classmethod
    def opened(cls, path: Path, settings: dict[str, Any], resume: bool, replace: bool) -> "Record":
        """Return a new record, or with `resume` the one in the file.

        Raises a `RecordError` if the file exists and neither `resume` nor `replace` is set, or if
        it was measured with other settings or on another processor.
        """
        if not path.exists() or replace:
            return cls(path, settings)
        stored = json.loads(path.read_text(encoding="utf-8"))
        rounds = [Round.read(each) for each in stored["rounds"]]
        if not resume:
            raise RecordError(
                f"{path.name} has {len(rounds)} rounds already: --resume adds to them, and "
                "--replace replaces them."
            )
        facts = {"cpu": environment()["cpu"], **settings}
        for name, now in facts.items():
            before = {"cpu": stored["environment"]["cpu"], **stored["settings"]}.get(name)
            if before != now:
                raise RecordError(
                    f"{path.name} was measured with {name} {before!r}, not {now!r}: --replace "
                    "replaces it, and --json FILE writes another."
                )
        return cls(path, settings, rounds)

    def save(self) -> None:
        """Write everything: the summary first, and then a line for each round.

        The file is replaced atomically, so it is complete even if this process is killed.
        """
        head = {
            "environment": self.rounds[-1].machine if self.rounds else machine(),
            "settings": self.settings,
            "summary": summary([vars(each) for each in self.rounds]),
        }
        lines = ",\n    ".join(json.dumps(asdict(each)) for each in self.rounds)
        text = f'{json.dumps(head, indent=2)[:-2]},\n  "rounds": [\n    {lines}\n  ]\n}}\n'
        unfinished = self.path.with_name(f"unfinished-{self.path.name}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path)


def machine() -> dict[str, Any]:
    """Return the machine, its processor's instruction sets, and the versions of packages."""
    return {**environment(), "instructions": Processor.present().instructions}


def code_version() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()

"""Run every check, test and notebook, each to its end: `python -m tools.test`.

    python -m tools.test                          all parts: lint format types tests notebooks
    python -m tools.test lint types               these parts alone
    python -m tools.test tests -- -k sampling     what follows -- goes to pytest

A failing part does not stop the others. A summary at the end names what failed; the last line
counts checks, tests and notebooks together, for example `1204 passed, 2 failed, 3 skipped`. The
exit code is 0 if all passed, 1 if anything failed, and 130 after Ctrl-C.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.check import CHECKS
from tools.tally import THE_RUN, Tally, counts_line, ending, tally

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 10  # time for a part to end by itself after Ctrl-C
ASKED_SECONDS = 20  # time for it to end after Ctrl-C was sent to it alone
INTERRUPTED = 130
LONGEST_LINE = 160
RAW = argparse.RawDescriptionHelpFormatter


@dataclass(frozen=True)
class Part:
    """A command of this Python; `report` is its option for the path of a JUnit report."""

    name: str
    command: tuple[str, ...]
    report: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a part."""

    name: str
    seconds: float
    counts: Tally
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        return not self.counts.failed

    @property
    def word(self) -> str:
        return "interrupted" if self.interrupted else "ok" if self.passed else "FAILED"


PARTS = (
    *(Part(name, ("-m", *CHECKS[name])) for name in ("lint", "format", "types")),
    Part("tests", ("-m", "pytest", "-n", "2", "-o", "junit_family=xunit1"), "--junitxml"),
    Part("notebooks", ("-m", "tools.notebooks", "--check"), "--report"),
)


def main(arguments: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Run the named parts, or all; print the summary and return the exit code."""
    chosen = _chosen(arguments, parts)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(chosen, 1):
            print(f"\n[{number}/{len(chosen)}] {part.name}: {' '.join(part.command)}", flush=True)
            outcomes.append(_run(part, Path(folder) / f"{part.name}.xml"))
            print(f"\n[{number}/{len(chosen)}] {_line(outcomes[-1])}", flush=True)
            if outcomes[-1].interrupted:
                break
    print("\n".join(_summary(outcomes, [part.name for part in chosen[len(outcomes) :]])))
    if outcomes[-1].interrupted:
        return INTERRUPTED
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _chosen(arguments: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser("tools.test", description=__doc__, formatter_class=RAW)
    parser.add_argument("parts", nargs="*", help="default: all")
    names, for_pytest = parser.parse_args(given[:cut]).parts, tuple(given[cut + 1 :])
    known = [part.name for part in parts]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"There is no part {', '.join(unknown)}; choose from {', '.join(known)}.")
    chosen = [part for part in parts if part.name in (names or known)]
    if not for_pytest:
        return chosen
    if "tests" not in (names or known):
        sys.exit("What follows -- goes to pytest, so name the part `tests` too.")
    return [
        replace(part, command=part.command + for_pytest) if part.name == "tests" else part
        for part in chosen
    ]


def _run(part: Part, report: Path) -> Outcome:
    """Run a part to its end; its output goes directly to the terminal."""
    started = time.perf_counter()
    options = [f"{part.report}={report}"] if part.report else []
    process = subprocess.Popen([sys.executable, *part.command, *options], cwd=ROOT)
    interrupted = False
    try:
        process.wait()
    except KeyboardInterrupt:
        interrupted = True
        _end(process)
    code = process.wait()
    if part.report:
        counts = tally(report, code)
    else:
        counts = Tally(1, {}) if code == 0 else Tally(0, {THE_RUN: ending(code)})
    if interrupted:
        counts = replace(counts, failed={**counts.failed, THE_RUN: "Ctrl-C ended it"})
    return Outcome(part.name, time.perf_counter() - started, counts, interrupted)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let a part end by itself after Ctrl-C; if it does not, send it Ctrl-C, and then kill it."""
    try:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)
            process.wait(ASKED_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()


def _summary(outcomes: Sequence[Outcome], not_run: Sequence[str]) -> list[str]:
    lines = ["", "summary"]
    for outcome in outcomes:
        lines.append(f"  {_line(outcome)}")
        for name, why in outcome.counts.failed.items():
            lines.append(f"      {name}: {why}"[:LONGEST_LINE])
    lines += [f"  {name:<10} not run" for name in not_run]
    return [*lines, "", counts_line([outcome.counts for outcome in outcomes])]


def _line(outcome: Outcome) -> str:
    counts = counts_line([outcome.counts])
    return f"{outcome.name:<10} {outcome.word:<11} {outcome.seconds:7.1f} s   {counts}"


if __name__ == "__main__":
    if importlib.util.find_spec("pytest") is None:
        sys.exit(
            f"{sys.executable} has no pytest; run `python -m tools.environment cpu server notebooks"
            " test`, and then this with the Python of .venv."
        )
    sys.exit(main(sys.argv[1:]))

"""Run notebooks again, two at a time, and compare every output with what is stored (nbval).

A budget keeps notebooks short. It counts CPU seconds: the time during which the processes of a
notebook were computing. A busy machine hardly changes CPU seconds, but it multiplies wall time, so
a limit on wall time would fail correct notebooks. A notebook fails if it takes more than twice its
budget on every core. Where the system does not report CPU seconds (Windows), no notebook fails
because of time. Wall time over the budget is printed, but is not a failure. A timeout per cell,
four times what the longest notebook may take, ends a notebook that hangs. An untimed check compares
outputs alone: no budget, and a longer timeout.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from minigen.hardware import num_cores
from tools.chapters import ROOT
from tools.tally import THE_RUN, Tally, tally, write_report

BUDGET_SECONDS = 60
CELL_SECONDS = 4 * 2 * BUDGET_SECONDS
UNTIMED_CELL_SECONDS = 4 * CELL_SECONDS
KERNEL_START_SECONDS = 240
AT_ONCE = 2
INTERRUPTED = 130
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
NBVAL = [
    *("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:tests.split", "-o", "addopts="),
    *("--disable-plugin-autoload", "-p", "nbval.plugin"),  # importing the others takes a second
    *("-o", "junit_family=xunit1"),
    *("--nbval", "--nbval-current-env"),
    *("--nbval-kernel-startup-timeout", str(KERNEL_START_SECONDS)),
    *("--nbval-sanitize-with", str(ROOT / "notebooks" / "nbval_sanitize.cfg")),
]


@dataclass(frozen=True)
class Run:
    """A notebook that was run and compared.

    `cpu_seconds` is the sum over all of its processes, or None where the system does not report it;
    `said` is what pytest printed.
    """

    notebook: Path
    seconds: float
    cpu_seconds: float | None
    counts: Tally
    said: str = ""

    @property
    def failure(self) -> str | None:
        """Name the cells that failed."""
        if not self.counts.failed:
            return None
        cells = [name.rpartition("::")[2] for name in self.counts.failed if name != THE_RUN]
        ending = self.counts.failed.get(THE_RUN)
        return ", ".join(cells + ([ending] if ending else []))


def over_budget(cpu_seconds: float | None) -> str | None:
    """Return a message if the CPU seconds exceed what a notebook may take, or None."""
    allowed = 2 * BUDGET_SECONDS * num_cores()
    if cpu_seconds is None or cpu_seconds <= allowed:
        return None
    return f"takes {cpu_seconds:.0f} CPU seconds; {allowed} is the most on {num_cores()} cores"


def timing(notebook: Path, seconds: float, cpu_seconds: float | None, at_once: int) -> str:
    """Return a line with the time that a notebook took."""
    cpu = "" if cpu_seconds is None else f"  {cpu_seconds:5.1f} CPU s"
    over = f"  over its {BUDGET_SECONDS} s" if seconds > BUDGET_SECONDS * at_once else ""
    return f"{notebook.stem:<20} {seconds:5.1f} s{cpu}{over}"


class Checker:
    """Runs each notebook in its own pytest process; `stop` ends the running ones."""

    def __init__(self, environment: Mapping[str, str], cell_seconds: int = CELL_SECONDS):
        self._environment = environment
        self._limit = ("--nbval-cell-timeout", str(cell_seconds))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self, notebook: Path) -> Run:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            report, output = Path(folder, "report.xml"), Path(folder, "output.txt")
            command = [sys.executable, "-m", "pytest", *NBVAL, *self._limit]
            process = self._start([*command, f"--junitxml={report}", str(notebook)], output)
            cpu_seconds = _wait(process)
            self._running.discard(process)
            counts = tally(report, process.returncode)
            said = output.read_text(encoding="utf-8", errors="replace")
        return Run(notebook, time.perf_counter() - started, cpu_seconds, counts, said)

    def _start(self, command: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        with self._lock, output.open("wb") as stream:
            if self._stopped:
                raise RuntimeError("the check was stopped")
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            self._running.add(process)
        return process

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def _wait(process: "subprocess.Popen[bytes]") -> float | None:
    """Wait for a process; return the CPU seconds of the process and of its finished children."""
    if sys.platform == "win32":
        process.wait()
        return None
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def check_all(
    notebooks: Sequence[Path],
    report: Path | None = None,
    untimed: bool = False,
    checker_of: Callable[[Mapping[str, str], int], Checker] = Checker,
) -> int:
    """Check all notebooks, each on half of the cores, and return the exit code.

    The JUnit report, if `report` is given, has a test for each notebook. The caller's own numbers
    of threads stay as they are, and fewer notebooks run at once if these need more cores. An
    `untimed` check compares outputs alone.
    """
    wanted = max(int((os.environ.get(name) or "1").partition(",")[0]) for name in THREADS)
    at_once = max(1, min(AT_ONCE, len(notebooks), num_cores() // wanted))
    threads = dict.fromkeys(THREADS, str(num_cores() // at_once)) if at_once > 1 else {}
    cell_seconds = UNTIMED_CELL_SECONDS if untimed else CELL_SECONDS
    checker = checker_of({**threads, **os.environ}, cell_seconds)
    passed: list[str] = []
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        runs = [pool.submit(checker, notebook) for notebook in notebooks]
        try:
            for run in map(Future.result, as_completed(runs)):
                failure = run.failure or (None if untimed else over_budget(run.cpu_seconds))
                if failure is None:
                    passed.append(run.notebook.stem)
                else:
                    failed[run.notebook.stem] = failure
                    print(run.said, end="")
                line = timing(run.notebook, run.seconds, run.cpu_seconds, at_once)
                print(line + (f"  FAILED: {failure}" if failure else "  ok"), flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            checker.stop()
            return INTERRUPTED
        finally:
            if report is not None:
                write_report(report, passed, failed)
    if failed:
        print(f"\n{len(failed)} of {len(notebooks)} notebooks failed:")
        print("\n".join(f"  {stem}: {failure}" for stem, failure in failed.items()), flush=True)
    else:
        print(f"{len(passed)} passed", flush=True)
    return 1 if failed else 0

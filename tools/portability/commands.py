"""Run a command and everything it starts, to its end or its time limit, and say why it failed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)  # no line of a log
PASSED = re.compile(r"^(?:=+ )?((?:\d+ \w+, )*\d+ passed(?:, \d+ \w+)*)", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GRACE_SECONDS = 10
SHOWN = 4
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(1_000_000))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: `status` is None if it hit its time limit, negative after a signal."""

    status: int | None
    said: str

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of tests and notebook cells that failed."""
        return tuple(dict.fromkeys(FAILED.findall(self.said)))

    @property
    def passed(self) -> str:
        """The counts that pytest printed."""
        found: list[str] = PASSED.findall(self.said)
        return found[-1] if found else ""

    def why(self) -> str:
        """Return why the command failed, without any path of this machine."""
        if self.status is None:
            return "it did not end within its time limit"
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        if self.failed:
            more = f" and {len(self.failed) - SHOWN} more" if len(self.failed) > SHOWN else ""
            return ", ".join(self.failed[:SHOWN]) + more
        last = self.said.strip().rpartition("\n")[2]
        return last if last and "/" not in last else f"exit status {self.status}"


def run(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    log: Path,
    limit: float,
    umask: int = -1,
) -> Ended:
    """Run a command in its own process group, and end all processes that are left of it."""
    with open(log, "ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=umask,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            _end(process)
    with open(log, "rb") as written:
        written.seek(begin)
        said = written.read().decode(errors="replace")
    return Ended(status, COLOUR.sub("", said))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process group: SIGTERM first, then SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy; they end with the block, or with this process at the latest."""
    loop_of_this = [sys.executable, "-c", BUSY, str(os.getpid())]
    loops = [subprocess.Popen(loop_of_this) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed(started: float) -> float:
    """Return the seconds since `started`."""
    return round(time.monotonic() - started, 1)

"""Other processes, as the system lists them: who started whom, and who still runs."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def workers_of(process_id: int) -> list[int]:
    """The workers that a process has started, and that have not ended."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    return sorted(
        int(pid)
        for pid, parent, state, args in rows
        if int(parent) == process_id and "minigen.parallel.worker" in args and state[0] != "Z"
    )


def is_running(process_id: int) -> bool:
    """Whether a process has not ended; one of ours, or of a parent that has ended itself."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process_id)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip()[:1] not in ("", "Z")


def wait_until(happened: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def children_of(process_id: int) -> list[int]:
    """All processes that a process has started, and those that these have, that still run."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, state in rows if state[0] != "Z"}
    found, new = [], [process_id]
    while new:
        new = [pid for pid, parent in parents.items() if parent in new]
        found += new
    return found


def own_bytes(process_id: int) -> int:
    """What a process has in memory, without the files that it has mapped; Linux alone tells."""
    status = Path(f"/proc/{process_id}/status").read_text()
    (told,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(told.split()[1])

"""Other processes, as the system lists them: who started whom, and who still runs."""

import subprocess
import time
from collections.abc import Callable


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

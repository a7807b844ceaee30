"""Other processes, as the system lists them: who started whom, and who still runs."""

from pathlib import Path

import psutil

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def workers_of(process_id: int) -> list[int]:
    """The workers that a process has started, and that have not ended."""
    return sorted(
        child.pid
        for child in _children(process_id)
        if "minigen.parallel.worker" in _arguments(child)
    )


def is_running(process_id: int) -> bool:
    """Whether a process has not ended; one of ours, or of a parent that has ended itself."""
    try:
        return psutil.Process(process_id).status() not in ENDED
    except psutil.NoSuchProcess:
        return False


def children_of(process_id: int) -> list[int]:
    """All processes that a process has started, and those that these have, that still run."""
    found = [child.pid for child in _children(process_id, recursive=True)]
    return [child for child in found if is_running(child)]


def own_bytes(process_id: int) -> int:
    """What a process has in memory, without the files that it has mapped; Linux alone tells."""
    status = Path(f"/proc/{process_id}/status").read_text("utf-8")
    (told,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(told.split()[1])


def _children(process_id: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(process_id).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    """What a process was started with, whole; nothing of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return []

"""Other processes: run one, and find them, as the system lists them, by their parents."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tools.chapters import ROOT

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def said_by(code: str, **variables: str) -> str:
    """Return what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def workers_of(process_id: int) -> list[int]:
    """Return the running workers that a process has started."""
    return sorted(
        child.pid
        for child in _children(process_id)
        if "minigen.parallel.worker" in _arguments(child)
    )


def is_running(process_id: int) -> bool:
    """Return whether a process still runs; it need not be a child of this process."""
    try:
        return psutil.Process(process_id).status() not in ENDED
    except psutil.NoSuchProcess:
        return False


def children_of(process_id: int) -> list[int]:
    """Return all running descendants of a process."""
    found = [child.pid for child in _children(process_id, recursive=True)]
    return [child for child in found if is_running(child)]


def own_bytes(process_id: int) -> int:
    """Return a process's memory without the files that it has mapped; only Linux reports it."""
    status = Path(f"/proc/{process_id}/status").read_text("utf-8")
    (resident,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(resident.split()[1])


def _children(process_id: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(process_id).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    """Return a process's whole command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also for a zombie
        return []

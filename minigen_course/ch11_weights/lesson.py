"""This process's resident memory, and files that are removed from the page cache."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, including mapped pages of files."""
    return int(psutil.Process().memory_info().rss)


def cost_of(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work`; return its result, its seconds, and the megabytes that became resident."""
    gc.collect()  # or memory that is freed meanwhile would hide what `work` takes
    before, started = resident_bytes(), time.perf_counter()
    made = work()
    seconds = time.perf_counter() - started
    return made, seconds, max(0, resident_bytes() - before) / 1e6


def forget_pages(path: Path) -> bool:
    """Ask the system to drop a file from its page cache, so that the disk is read again.

    Returns whether this system supports the request; pages that a process has mapped stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True

"""What this process holds of the machine's memory, and files as cold as the system lets them be."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def resident_bytes() -> int:
    """Bytes of memory that this process has in use now, mapped pages of files included."""
    return int(psutil.Process().memory_info().rss)


def cost_of(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, the seconds it took, and the megabytes that became resident by it."""
    before, started = resident_bytes(), time.perf_counter()
    made = work()
    seconds = time.perf_counter() - started
    return made, seconds, max(0, resident_bytes() - before) / 1e6


def forget_pages(path: Path) -> bool:
    """Ask the system to drop its own copy of a file, so that the disk is read again.

    Returns whether this system can be asked; pages that some process has mapped stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True

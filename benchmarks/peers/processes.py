"""The processor time and memory of processes, as Linux counts them in /proc.

Processor time comes in hundredths of a second, so shares of short samples are rough. Standard
library only.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = 100  # ticks per second in /proc (USER_HZ)
ROUNDING = 2  # possible error of a difference, in ticks


def busy_seconds() -> float:
    """Return processor seconds since boot that were used, other machines on this host included."""
    line = Path("/proc/stat").read_text("utf-8").splitlines()[0]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + soft_irq + stolen) / TICKS


def own_seconds() -> float:
    """Return processor seconds of this process and of all processes that it started."""
    total = 0
    for process in family():
        fields = _stat(process)
        total += sum(map(int, fields[11:15]))  # own and ended children's, user and system
    return total / TICKS


def peak_memory() -> int:
    """Return bytes: the peak resident sizes of this process and its descendants, summed."""
    total = 0
    for process in family():
        for line in _read(process, "status").splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def family() -> list[int]:
    """Return the ids of this process and its running descendants."""
    parents = {
        int(folder.name): int(fields[1])
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and (fields := _stat(int(folder.name)))
    }
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none if the process has ended."""
    return _read(process, "stat").rpartition(")")[2].split()


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass(frozen=True)
class Moment:
    """A clock time, and the processor seconds that other processes had used by then."""

    clock: float
    others: float

    @classmethod
    def now(cls) -> "Moment":
        """Return the present moment; the clock is the same in all processes."""
        return cls(time.monotonic(), busy_seconds() - own_seconds())

    @classmethod
    def before_birth(cls) -> "Moment":
        """Return the present moment for a process that is about to start."""
        return cls(time.monotonic(), busy_seconds())

    def foreign_since(self) -> float:
        """Return the share of the machine's cores that others used since then, rounded down."""
        now = Moment.now()
        seconds = (now.clock - self.clock) * (os.cpu_count() or 1)
        return max(0.0, now.others - self.others - ROUNDING / TICKS) / seconds

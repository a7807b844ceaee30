"""What processes take of a machine, as Linux counts it in /proc. Standard library only.

Processor time comes in hundredths of a second, so shares of short samples are rough.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = 100  # a second, in what Linux tells programs (USER_HZ)
ROUNDING = 2  # ticks by which a difference can be wrong


def busy_seconds() -> float:
    """Processor seconds since boot that anybody took, other machines on this host included."""
    line = Path("/proc/stat").read_text("utf-8").splitlines()[0]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + soft_irq + stolen) / TICKS


def own_seconds() -> float:
    """Processor seconds of this process and all that it started."""
    total = 0
    for process in family():
        fields = _stat(process)
        total += sum(map(int, fields[11:15]))  # own and ended children's, user and system
    return total / TICKS


def peak_memory() -> int:
    """Bytes: the largest resident set of this process and of each that it started, added up."""
    total = 0
    for process in family():
        for line in _read(process, "status").splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def family() -> list[int]:
    """This process and its descendants that still run."""
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
    """The fields of /proc/PID/stat after the name; none if the process has ended."""
    return _read(process, "stat").rpartition(")")[2].split()


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass(frozen=True)
class Moment:
    """The clock, and processor seconds that others had taken by then."""

    clock: float
    others: float

    @classmethod
    def now(cls) -> "Moment":
        """This moment; the clock is the same in all processes."""
        return cls(time.monotonic(), busy_seconds() - own_seconds())

    @classmethod
    def before_birth(cls) -> "Moment":
        """This moment as a process sees it that is about to be started."""
        return cls(time.monotonic(), busy_seconds())

    def foreign_since(self) -> float:
        """The share of the machine's cores that others took since then, rounded down."""
        now = Moment.now()
        seconds = (now.clock - self.clock) * (os.cpu_count() or 1)
        return max(0.0, now.others - self.others - ROUNDING / TICKS) / seconds

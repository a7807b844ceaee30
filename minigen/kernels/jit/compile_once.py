"""Compile kernels in a child process, once for all processes and threads of this machine.

The first process to need some kernels holds a lock on a file while its child compiles them; the
others wait for the lock and then find the kernels. The operating system releases the lock of a
process that ends in any way, and its child ends with it, so nothing is left behind by a crash.

A child compiles in half the time, because only there Numba may leave out what the kernels do not
need (`minigen.kernels.jit.outermost`), and a crash of the compiler ends the child alone.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from minigen.hub import Progress

LIMIT_SECONDS = 900.0  # of waiting for a compiler: far more than a slow, busy processor needs
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Kernels:
    """Kernels that a child process can compile; `label` names them in messages.

    `is_compiled` looks at the disk. `start` starts the child, whose error output is a file; it ends
    with status 0 when the kernels are on the disk, or with another status and a reason in its last
    line. `lock` is the file that is locked meanwhile. `how_often` says when it happens again.
    """

    label: str
    how_often: str
    lock: Path
    is_compiled: Callable[[], bool]
    start: Callable[[IO[bytes]], "subprocess.Popen[bytes]"]


def compile_once(
    kernels: Kernels, progress: Progress, seconds: float = LIMIT_SECONDS
) -> str | None:
    """Compile the kernels unless they are, and return None, or why they are not compiled.

    `progress` gets a line when the work begins and one with its time when it ends, and one if
    another process does the work.
    """
    if kernels.is_compiled():
        return None
    deadline = time.monotonic() + seconds
    try:
        with _alone(kernels, progress, seconds):
            if kernels.is_compiled():  # by the process that held the lock
                return None
            return _compile(kernels, progress, deadline)
    except Timeout:
        return f"another process has been compiling its kernels for {seconds:.0f} s"
    except OSError as error:
        return f"its kernels cannot be compiled here: {error}"


@contextmanager
def _alone(kernels: Kernels, progress: Progress, seconds: float) -> Iterator[None]:
    """Hold the lock on the kernels; on a disk without locks, go on without one."""
    lock = FileLock(kernels.lock)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that is compiling CPU kernels", 0, None)
            lock.acquire(timeout=seconds, poll_interval=POLL_SECONDS)
    except NotImplementedError:
        pass
    try:
        yield
    finally:
        lock.release()


def _compile(kernels: Kernels, progress: Progress, deadline: float) -> str | None:
    started = time.monotonic()
    progress(
        f"compiling {kernels.label}: about 20 s on an idle machine, {kernels.how_often}", 0, None
    )
    with tempfile.TemporaryFile() as log:
        child = kernels.start(log)
        try:
            child.wait(max(deadline - started, 0))
        except subprocess.TimeoutExpired:
            return f"compiling its kernels took more than {deadline - started:.0f} s"
        finally:
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        if child.returncode == 0 and kernels.is_compiled():
            seconds = time.monotonic() - started
            progress(f"compiled {kernels.label} in {seconds:.1f} s", 0, None)
            return None
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip().splitlines()
    return f"compiling its kernels failed: {said[-1] if said else f'status {child.returncode}'}"

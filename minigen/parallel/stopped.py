"""Finds the ranks of this machine that a signal has stopped, which the others would wait for.

A stopped process (SIGSTOP, or SIGTSTP from a terminal) has not ended, so its connections stay open
and no message tells of it. The system lists its state. `torchrun` watches the ends of its ranks
only, so each of them watches its siblings. Ranks on other machines are watched there.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread

import psutil

from minigen.errors import WorkerError

STOPPED_SECONDS = 3.0  # how long a rank may be stopped: perhaps all are, and go on one by one
LATER_SECONDS = 5.0  # for ranks above 0 of `torchrun`, so that rank 0 tells of it if it runs
_PAUSE_SECONDS = 1.5  # without a look for longer, this process may have been stopped itself
_LOOK_SECONDS = 0.5
_RANK, _RUN = "RANK", "TORCHELASTIC_RUN_ID"


def is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped a process; False if it has ended or is debugged."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class StoppedProcesses:
    """Finds the process that has been stopped for some seconds, by `clock`, in every look.

    After a pause between two looks the count begins again: this process may have been stopped
    together with the others (a paused container), or it had no step to wait for.
    """

    def __init__(
        self,
        seconds: float = STOPPED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds, self._clock = seconds, clock
        self._since: dict[int, float] = {}
        self._looked = clock()

    def look(self, process_ids: Iterable[int]) -> int | None:
        """Return the id of a process that has been stopped for too long, or None."""
        now = self._clock()
        if now - self._looked > _PAUSE_SECONDS:
            self._since.clear()
        self._looked = now
        self._since = {each: self._since.get(each, now) for each in filter(is_stopped, process_ids)}
        late = (each for each, since in self._since.items() if now - since >= self._seconds)
        return next(late, None)


class Siblings:
    """The other ranks of this machine, once the same `torchrun` has started and joined them all."""

    def __init__(self, seconds: float = STOPPED_SECONDS) -> None:
        self._ranks, self._seconds = _sibling_ranks(), seconds
        self._stopped = StoppedProcesses(seconds)

    def check(self, error: WorkerError | None = None) -> None:
        """Kill a rank that has been stopped for too long, and raise `WorkerError`.

        `torchrun` then ends all ranks. Without a stopped rank, `error` is the caller's to raise.
        """
        stopped = self._stopped.look(self._ranks)
        if stopped is None:
            return
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
        raise WorkerError(
            f"Rank {self._ranks[stopped]} (process {stopped}) {describe_stop(self._seconds)}, so "
            "the model is incomplete and all ranks have been stopped; start them again."
        ) from error

    def watch(self) -> None:
        """Check all the time, in a thread that ends with this process."""
        Thread(target=self._check_forever, daemon=True, name="minigen-siblings").start()

    def _check_forever(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with suppress(WorkerError):
                self.check()


def _sibling_ranks() -> dict[int, int]:
    """Return the rank of each sibling by its process id: other children with the same run's id."""
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                variables = process.environ()
                if process.pid != os.getpid() and variables.get(_RUN) == os.environ[_RUN]:
                    found[process.pid] = int(variables[_RANK])
    return found


def describe_stop(seconds: float = STOPPED_SECONDS) -> str:
    """Return what happened to a stopped rank, as the part of a sentence."""
    return f"has been stopped by a signal (SIGSTOP or SIGTSTP) for {seconds:.0f} seconds"

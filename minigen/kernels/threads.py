"""Threads for kernels: one thread count for torch and for them, and one step at a time.

torch's own threads spin for a while when their work is done: on few cores whoever comes next would
wait for them. So while kernels compute, torch keeps to one thread, and it does until a runner that
computes with torch sets its own number at its next step.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from minigen.kernels.crew import Crew, has_room, linger, make_crew, open_step

_ENTERED = threading.Lock()
Job = tuple[Callable[..., None], Crew, int, tuple[Any, ...]]


def available_threads(wanted: int) -> int:
    """As many threads as wanted, or as there are processors."""
    return min(wanted, os.cpu_count() or 1)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Compute with kernels, and nobody else in this process with kernels or torch's threads."""
    with _ENTERED:
        torch.set_num_threads(1)
        yield


class Team:
    """The calling thread, and others that help it through functions of a `Crew`.

    The others sleep where there is no step for a while. Use `team_of`: one team serves a process,
    since two would be in each other's way.
    """

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._crew = make_crew(num_threads, 0)
        self._step = 0
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(num_threads - 1)]
        self._threads = [
            threading.Thread(target=_help, args=(jobs,), name="minigen-kernels", daemon=True)
            for jobs in self._jobs
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # no thread may be in machine code when Python goes

    def run(self, num_phases: int, function: Callable[..., None], *args: Any) -> None:
        """Call `function(crew, step, *args)` here and in the others, until its work is done.

        It must begin with `enter` and end with `leave`, give Python's lock away, and have at most
        `num_phases` phases. Who comes late finds the step closed.
        """
        with one_at_a_time():
            self._step = self._step % 2**30 + 1
            if not has_room(self._crew[0], num_phases):
                self._crew = make_crew(self.num_threads, num_phases, self._crew[0].gate)
            open_step(self._crew[0], self._step)
            for jobs, member in zip(self._jobs, self._crew[1:], strict=True):
                jobs.put((function, member, self._step, args))
            try:
                function(self._crew[0], self._step, *args)
            except BaseException:  # whoever is in that step is alone with it
                self._crew = make_crew(self.num_threads, 0)
                raise

    def close(self) -> None:
        """End the other threads."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(1)


@cache
def team_of(num_threads: int) -> Team:
    """The process's team of so many threads."""
    return Team(num_threads)


def _help(all_jobs: "SimpleQueue[Job | None]") -> None:
    while (job := all_jobs.get()) is not None:
        function, member, step, args = job
        function(member, step, *args)
        linger(member, step)
        del job, function, args  # what they hold may be needed no more

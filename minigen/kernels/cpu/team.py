"""Threads that run one compiled step after another, and the counters that they share.

Helper threads spin for a while after a step, so that the next one starts at once. torch's own
threads do so, too, and on a few cores the kernels would wait for them. So while kernels run, torch
is limited to one thread, until a runner that computes with torch sets its own number of threads at
its next step.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from minigen.kernels.jit.machine_code import CompiledFunction, Flat

open_step = CompiledFunction("minigen.kernels.cpu.thread_pool", "open_step")
spin_wait = CompiledFunction("minigen.kernels.cpu.thread_pool", "spin_wait")

LINE = 16  # 32-bit words per cache line


class ThreadPool(NamedTuple):
    """A thread pool as one worker sees it: int32 counters, one per cache line, and its own id."""

    counters: np.ndarray  # [phases, 1 + workers] lines: tasks done; tasks taken from each range
    progress: np.ndarray  # [workers] lines: phase, tasks done in it, offset of the range
    gate: np.ndarray  # [2] lines: the open step (0: none), workers inside it
    worker: int
    num_workers: int


def make_pool(
    num_workers: int, num_phases: int, gate: np.ndarray | None = None
) -> list[ThreadPool]:
    """Return each worker's view of a new pool for steps of at most `num_phases` phases.

    `gate` is the gate of an earlier pool, whose workers may still be inside a step.
    """
    counters = np.zeros((num_phases + 1) * (num_workers + 1) * LINE, np.int32)
    progress = np.zeros(num_workers * LINE, np.int32)
    gate = np.zeros(2 * LINE, np.int32) if gate is None else gate
    return [ThreadPool(counters, progress, gate, each, num_workers) for each in range(num_workers)]


def has_counters(pool: ThreadPool, num_phases: int) -> bool:
    """Return whether the pool has enough counters for a step of `num_phases` phases."""
    return len(pool.counters) >= (num_phases + 1) * (pool.num_workers + 1) * LINE


def pool_of_one(num_phases: int = 8) -> ThreadPool:
    """Return a pool of one worker, for `num_phases` phases in total."""
    return make_pool(1, num_phases)[0]


_RUN_LOCK = threading.Lock()
Job = tuple[Callable[..., None], Any, int, tuple[Any, ...]]  # function, pool, step, arguments


def available_threads(wanted: int) -> int:
    """Return the number of threads to use: `wanted`, but no more than there are processors."""
    return min(wanted, os.cpu_count() or 1)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the process-wide kernel lock, with torch limited to one thread."""
    with _RUN_LOCK:
        torch.set_num_threads(1)
        yield


class Team:
    """The team of threads behind a `ThreadPool`: the calling thread and its helper threads.

    Helper threads sleep when there has been no step for a while. Use `team_of`, which returns one
    team per process and size, because teams that run at the same time would slow each other down.
    """

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._set_pools(make_pool(num_threads, 0))
        self._step = 0
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(num_threads - 1)]
        self._threads = [
            threading.Thread(target=_run_jobs, args=(jobs,), name="minigen-kernels", daemon=True)
            for jobs in self._jobs
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # no thread may run machine code when Python exits

    def _set_pools(self, pools: list[ThreadPool]) -> None:
        self._pools, self._flat_pools = pools, [Flat(pool) for pool in pools]

    def run(self, num_phases: int, function: Callable[..., None], *args: Any) -> None:
        """Run `function(pool, step, *args)` on all threads and return when its work is done.

        The function must begin with `join_step` and end with `leave_step`, release Python's global
        lock, and have at most `num_phases` phases. A thread that is late finds the step closed and
        skips it.
        """
        with one_at_a_time():
            self._step = self._step % 2**30 + 1
            if not has_counters(self._pools[0], num_phases):
                self._set_pools(make_pool(self.num_threads, num_phases, self._pools[0].gate))
            pools: SequenceOf[Any] = self._pools
            if isinstance(function, CompiledFunction):  # then arguments are flattened once for all
                pools, args = self._flat_pools, (Flat(*args),)
            open_step(self._flat_pools[0], self._step)
            for jobs, pool in zip(self._jobs, pools[1:], strict=True):
                jobs.put((function, pool, self._step, args))
            try:
                function(pools[0], self._step, *args)
            except BaseException:  # workers still inside keep the old pool
                self._set_pools(make_pool(self.num_threads, 0))
                raise

    def close(self) -> None:
        """Stop the helper threads."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(1)


@cache
def team_of(num_threads: int) -> Team:
    """Return the process's team of `num_threads` threads."""
    return Team(num_threads)


def _run_jobs(all_jobs: "SimpleQueue[Job | None]") -> None:
    while (job := all_jobs.get()) is not None:
        function, pool, step, args = job
        function(pool, step, *args)
        spin_wait(pool, step)
        del job, function, args  # frees the arrays that they refer to

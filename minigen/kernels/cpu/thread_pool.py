"""A work-stealing thread pool that runs a whole step, not one parallel region per matrix product.

A step is a list of phases, and every worker goes through all of them. A phase is a number of tasks.
Each worker owns a contiguous range of them, because memory is read fastest in one stream. A worker
takes the tasks of its range, then steals tasks that other workers have not taken yet, and then
waits at a barrier. So a worker that is late or descheduled delays the others by one task at most,
which matters on a machine whose cores are shared. On an idle machine a phase costs a few hundred
nanoseconds, while waking up threads costs microseconds. Source: Blumofe and Leiserson 1999.

Counters that several workers change are atomic, and each has a cache line of its own to avoid false
sharing. Which worker runs a task does not change the result.

torch's own threads spin for a while after their work is done, and on a few cores the pool would
wait for them. So while kernels run, torch is limited to one thread, until a runner that computes
with torch sets its own number of threads at its next step.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.simd import I32, IS_X86, address, call, kernel
from minigen.kernels.jit.code_cache import cached_njit

LINE = 16  # 32-bit words per cache line
TASKS_PER_WORKER = 6  # at least, if there are enough items: then no worker is waited for long
SPINS_BEFORE_YIELD = 5000  # reads of a counter, 0.1 ms, before a worker yields the processor
SPIN_WAIT = 50_000  # reads of the gate, 1 ms, before a worker without a step goes to sleep


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


if os.name == "nt":
    _SLEEP, _SLEEP_LENGTH = ctypes.windll.kernel32.Sleep, 0  # type: ignore[attr-defined]
else:
    _SLEEP, _SLEEP_LENGTH = ctypes.CDLL(None).usleep, 20  # microseconds
llvmlite.binding.add_symbol("minigen_sleep", ctypes.cast(_SLEEP, ctypes.c_void_p).value)


@intrinsic
def _yield_processor(typingctx: Any) -> Any:
    """Sleep for a moment, so that the operating system can run another thread."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "minigen_sleep", I32, [I32(_SLEEP_LENGTH)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _atomic_add(typingctx: Any, array: Any, index: Any, number: Any) -> Any:
    """Add to `array[index]` atomically and return the old value (fetch-and-add)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, I32)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), codegen


@intrinsic
def _atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """Load `array[index]` atomically; all writes before its store are visible then."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if IS_X86:  # a hint to the processor that this is a spin loop
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return builder.load_atomic(address(context, builder, sig, args, 0, I32), "seq_cst", 4)

    return types.int32(array, types.intp), codegen


@intrinsic
def _atomic_store(typingctx: Any, array: Any, index: Any, number: Any) -> Any:
    """Store to `array[index]` atomically, after all earlier writes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, I32)
        builder.store_atomic(args[2], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int32), codegen


@cached_njit  # called from Python: without the cache a process starts 0.2 s later
def open_step(pool, step):
    """Open the step with this number, so that workers can join it."""
    pool.counters[:] = 0
    pool.progress[:] = 0
    _atomic_store(pool.gate, 0, step)


@kernel
def join_step(pool, step):
    """Join the step and return True, or return False if the step is closed."""
    _atomic_add(pool.gate, LINE, np.int32(1))
    if _atomic_load(pool.gate, 0) == step:
        return True
    _atomic_add(pool.gate, LINE, np.int32(-1))
    return False


@cached_njit
def spin_wait(pool, step):
    """Spin until another step opens or `SPIN_WAIT` reads are over; waking a thread takes longer."""
    spins = 0
    while spins < SPIN_WAIT:
        spins += 1
        opened = _atomic_load(pool.gate, 0)
        if opened != 0 and opened != step:
            return


@kernel
def leave_step(pool):
    """Leave the step; worker 0 closes it first, and waits until all other workers have left."""
    if pool.worker == 0:
        _atomic_store(pool.gate, 0, np.int32(0))
    _atomic_add(pool.gate, LINE, np.int32(-1))
    if pool.worker == 0:
        spins = 0
        while _atomic_load(pool.gate, LINE) > 0:
            spins += 1
            if spins > SPINS_BEFORE_YIELD:
                _yield_processor()


@kernel
def next_phase(pool):
    """Move this worker to the next phase."""
    at = pool.worker * LINE
    pool.progress[at] += 1
    pool.progress[at + 1] = -1
    pool.progress[at + 2] = 0


@kernel
def take(pool, num_tasks):
    """Return the next task of this worker, or `num_tasks` when all tasks are taken.

    The call also marks the worker's previous task as done.
    """
    at = pool.worker * LINE
    pool.progress[at + 1] += 1
    line = pool.progress[at] * (pool.num_workers + 1) + 1
    while pool.progress[at + 2] < pool.num_workers:
        owner = (pool.worker + pool.progress[at + 2]) % pool.num_workers
        first, end = (
            owner * num_tasks // pool.num_workers,
            (owner + 1) * num_tasks // pool.num_workers,
        )
        task = first + _atomic_add(pool.counters, (line + owner) * LINE, np.int32(1))
        if task < end:
            return task
        pool.progress[at + 2] += 1
    return num_tasks


@kernel
def barrier(pool, num_tasks):
    """Wait until all tasks of the phase are done; this worker must have finished its own."""
    at = pool.worker * LINE
    index = pool.progress[at] * (pool.num_workers + 1) * LINE
    _atomic_add(pool.counters, index, pool.progress[at + 1])
    spins = 0
    while _atomic_load(pool.counters, index) < num_tasks:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            _yield_processor()


@kernel
def task_size(pool, num_items):
    """Return how many of `num_items` equal items make one task: at least one."""
    return max(1, num_items // (pool.num_workers * TASKS_PER_WORKER))


_RUN_LOCK = threading.Lock()
Job = tuple[Callable[..., None], ThreadPool, int, tuple[Any, ...]]


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
        self._pools = make_pool(num_threads, 0)
        self._step = 0
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(num_threads - 1)]
        self._threads = [
            threading.Thread(target=_run_jobs, args=(jobs,), name="minigen-kernels", daemon=True)
            for jobs in self._jobs
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # no thread may run machine code when Python exits

    def run(self, num_phases: int, function: Callable[..., None], *args: Any) -> None:
        """Run `function(pool, step, *args)` on all threads and return when its work is done.

        The function must begin with `join_step` and end with `leave_step`, release Python's global
        lock (`nogil=True`), and have at most `num_phases` phases. A thread that is late finds the
        step closed and skips it.
        """
        with one_at_a_time():
            self._step = self._step % 2**30 + 1
            if not has_counters(self._pools[0], num_phases):
                self._pools = make_pool(self.num_threads, num_phases, self._pools[0].gate)
            open_step(self._pools[0], self._step)
            for jobs, pool in zip(self._jobs, self._pools[1:], strict=True):
                jobs.put((function, pool, self._step, args))
            try:
                function(self._pools[0], self._step, *args)
            except BaseException:  # workers still inside keep the old pool
                self._pools = make_pool(self.num_threads, 0)
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

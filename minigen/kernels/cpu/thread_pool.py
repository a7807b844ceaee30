"""A thread pool whose workers go through a step together, without a parallel region per product.

A step is a list of phases, and every worker goes through all of them. A phase is a number of tasks;
each worker has a range of its own, since memory is read fastest in one stream. A worker takes one
task after the other, then tasks that others have not taken yet (work stealing), and then waits at a
barrier. So a worker that is late, or that gets no processor for a while, delays the others by one
task at most. On a processor whose cores are shared this is what counts, and on a quiet one a phase
costs a few hundred nanoseconds, where waking threads costs microseconds. Source: Blumofe and
Leiserson 1999.

Numbers that several workers change are changed by atomic instructions, each in a cache line of its
own. Which worker does a task changes nothing of what it computes.

torch's own threads spin for a while when their work is done, and on few cores the next one would
wait for them. So while kernels compute, torch keeps to one thread, until a runner that computes
with torch sets its own number at its next step.
"""

import atexit
import ctypes
import os
import platform
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
from numba import njit, types
from numba.extending import intrinsic

from minigen.kernels.cpu.simd import I32, address, call

LINE = 16  # words of a cache line
TASKS_A_WORKER = 6  # so many at least, where there are so many items: none is waited for long
PATIENCE = 5000  # looks at a number that others change, 0.1 ms, before giving the processor away
LINGER = 50_000  # looks for the next step, a millisecond, before a worker goes to sleep


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class Crew(NamedTuple):
    """What workers share: flat int32 arrays, a line of sixteen for each number; and who this is."""

    counters: np.ndarray  # [phases, 1 + workers lines]: tasks done; taken of each worker's range
    places: np.ndarray  # [workers, line]: a worker's phase, tasks done in it, whose range it is at
    gate: np.ndarray  # [2 lines]: the step that is open (0: none), workers inside
    worker: int
    num_workers: int


def make_crew(num_workers: int, num_phases: int, gate: np.ndarray | None = None) -> list[Crew]:
    """The crew of a step of at most so many phases, as each of its workers sees it.

    `gate` is that of a crew before, in whose steps workers may still be.
    """
    counters = np.zeros((num_phases + 1) * (num_workers + 1) * LINE, np.int32)
    places = np.zeros(num_workers * LINE, np.int32)
    gate = np.zeros(2 * LINE, np.int32) if gate is None else gate
    return [Crew(counters, places, gate, each, num_workers) for each in range(num_workers)]


def has_room(crew: Crew, num_phases: int) -> bool:
    """Whether the crew can go through so many phases."""
    return len(crew.counters) >= (num_phases + 1) * (crew.num_workers + 1) * LINE


def alone(num_phases: int = 8) -> Crew:
    """A crew of one, for so many phases in all."""
    return make_crew(1, num_phases)[0]


if os.name == "nt":
    _NAP, _NAP_LENGTH = ctypes.windll.kernel32.Sleep, 0  # type: ignore[attr-defined]
else:
    _NAP, _NAP_LENGTH = ctypes.CDLL(None).usleep, 20  # microseconds
llvmlite.binding.add_symbol("minigen_nap", ctypes.cast(_NAP, ctypes.c_void_p).value)


@intrinsic
def _nap(typingctx: Any) -> Any:
    """Let somebody else have this processor."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "minigen_nap", I32, [I32(_NAP_LENGTH)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _add(typingctx: Any, array: Any, index: Any, number: Any) -> Any:
    """Add to `array[index]` at once, whoever else does; returns what was there before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, I32)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), codegen


@intrinsic
def _look(typingctx: Any, array: Any, index: Any) -> Any:
    """`array[index]` as it is now, and all that was written before it became so."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if IS_X86:  # tell the processor that this is a loop that waits
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return builder.load_atomic(address(context, builder, sig, args, 0, I32), "seq_cst", 4)

    return types.int32(array, types.intp), codegen


@intrinsic
def _put(typingctx: Any, array: Any, index: Any, number: Any) -> Any:
    """Set `array[index]`, after all that was written before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, I32)
        builder.store_atomic(args[2], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int32), codegen


@njit(cache=True)  # Python calls it: a process starts 0.2 s sooner than where it is compiled anew
def open_step(crew, step):
    """Let workers into the step of this number, which nobody is in yet."""
    crew.counters[:] = 0
    crew.places[:] = 0
    _put(crew.gate, 0, step)


@njit
def enter(crew, step):
    """Whether the step is still open; if so, this worker is in it until it leaves."""
    _add(crew.gate, LINE, np.int32(1))
    if _look(crew.gate, 0) == step:
        return True
    _add(crew.gate, LINE, np.int32(-1))
    return False


@njit(nogil=True, cache=True)
def linger(crew, step):
    """Wait a little for another step than this to open: to wake up takes longer."""
    looks = 0
    while looks < LINGER:
        looks += 1
        opened = _look(crew.gate, 0)
        if opened != 0 and opened != step:
            return


@njit
def leave(crew):
    """Be out. The first worker closes the step, and waits until all who came are out."""
    if crew.worker == 0:
        _put(crew.gate, 0, np.int32(0))
    _add(crew.gate, LINE, np.int32(-1))
    if crew.worker == 0:
        looks = 0
        while _look(crew.gate, LINE) > 0:
            looks += 1
            if looks > PATIENCE:
                _nap()


@njit
def begin(crew):
    """Go on to the next phase."""
    place = crew.worker * LINE
    crew.places[place] += 1
    crew.places[place + 1] = -1
    crew.places[place + 2] = 0


@njit
def take(crew, num_tasks):
    """The number of this worker's next task of so many; `num_tasks` when all are taken.

    To ask for another says that the last one is done.
    """
    place = crew.worker * LINE
    crew.places[place + 1] += 1
    line = crew.places[place] * (crew.num_workers + 1) + 1
    while crew.places[place + 2] < crew.num_workers:
        owner = (crew.worker + crew.places[place + 2]) % crew.num_workers
        first, end = (
            owner * num_tasks // crew.num_workers,
            (owner + 1) * num_tasks // crew.num_workers,
        )
        task = first + _add(crew.counters, (line + owner) * LINE, np.int32(1))
        if task < end:
            return task
        crew.places[place + 2] += 1
    return num_tasks


@njit
def finish(crew, num_tasks):
    """Wait until all tasks of the phase are done; all that this worker took must be by now."""
    place = crew.worker * LINE
    index = crew.places[place] * (crew.num_workers + 1) * LINE
    _add(crew.counters, index, crew.places[place + 1])
    looks = 0
    while _look(crew.counters, index) < num_tasks:
        looks += 1
        if looks > PATIENCE:
            _nap()


@njit
def portion(crew, num_items):
    """How many of so many equal items make a task: one or more, so that nobody waits long."""
    return max(1, num_items // (crew.num_workers * TASKS_A_WORKER))


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

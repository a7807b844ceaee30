"""A work-stealing thread pool that runs a whole step, not one parallel region per matrix product.

A step is a list of phases, and every worker goes through all of them. A phase is a number of tasks.
Each worker owns a contiguous range of them, because memory is read fastest in one stream. A worker
takes the tasks of its range, then steals tasks that other workers have not taken yet, and then
waits at a barrier. So a worker that is late or descheduled delays the others by one task at most,
which matters on a machine whose cores are shared. On an idle machine a phase costs a few hundred
nanoseconds, while waking up threads costs microseconds. Source: Blumofe and Leiserson 1999.

Counters that several workers change are atomic, and each has a cache line of its own to avoid false
sharing. Which worker runs a task does not change the result.
"""

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.simd import I32, address, call, kernel
from minigen.kernels.cpu.team import LINE
from minigen.kernels.jit.machine_code import add_symbols
from minigen.kernels.processor import IS_X86

TASKS_PER_WORKER = 6  # at least, if there are enough items: then no worker is waited for long
SPINS_BEFORE_YIELD = 5000  # reads of a counter, 0.1 ms, before a worker yields the processor
SPIN_WAIT = 50_000  # reads of the gate, 1 ms, before a worker without a step goes to sleep
_SLEEP_LENGTH = 0 if os.name == "nt" else 20  # microseconds; of `Sleep`, milliseconds
add_symbols()


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


@kernel
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


@kernel
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

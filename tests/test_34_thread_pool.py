"""Workers of a thread pool run every task once, even if some are late.

A pool ends with its process.
"""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from numba import njit

from minigen.kernels.cpu.team import Team, make_pool, open_step, pool_of_one, team_of
from minigen.kernels.cpu.thread_pool import (
    barrier,
    join_step,
    leave_step,
    next_phase,
    take,
    task_size,
)


@njit(nogil=True)
def count_tasks(pool, step, sizes, done, sums, late):
    """Each task of a phase adds one to its place, and checks what the phase before wrote."""
    if join_step(pool, step):
        for phase in range(len(sizes)):
            next_phase(pool)
            task = take(pool, sizes[phase])
            while task < sizes[phase]:
                if pool.worker == late:
                    for _ in range(20_000):
                        sums[0] += 1.0  # takes long, and no other task writes it
                done[phase, task] += 1
                if phase > 0:
                    done[phase, task] += 10 * (done[phase - 1, : sizes[phase - 1]] % 10 != 1).sum()
                task = take(pool, sizes[phase])
            barrier(pool, sizes[phase])
        leave_step(pool)


SIZES = np.array([1, 7, 0, 64, 2, 3, 1, 0, 500, 5])


def run(team: Team, late: int = -1) -> np.ndarray:
    done = np.zeros((len(SIZES), SIZES.max()), np.int64)
    team.run(len(SIZES), count_tasks, SIZES, done, np.zeros(16), late)
    return done


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("late", [-1, 0, 1])
def test_every_task_is_done_once_and_after_the_phase_before(num_threads: int, late: int) -> None:
    team = Team(num_threads)
    expected = (np.arange(SIZES.max()) < SIZES[:, None]).astype(np.int64)
    for _ in range(30):
        np.testing.assert_array_equal(run(team, late), expected)
    team.close()


def test_the_step_does_not_wait_for_a_missing_worker() -> None:
    first, *_ = make_pool(4, len(SIZES))
    done = np.zeros((len(SIZES), SIZES.max()), np.int64)
    open_step(first, 1)
    count_tasks(first, 1, SIZES, done, np.zeros(16), -1)
    assert done.sum() == SIZES.sum()


def test_a_late_worker_finds_the_step_closed() -> None:
    first, second = make_pool(2, len(SIZES))
    done = np.zeros((len(SIZES), SIZES.max()), np.int64)
    open_step(first, 1)
    count_tasks(first, 1, SIZES, done, np.zeros(16), -1)
    before = done.copy()
    count_tasks(second, 1, SIZES, done, np.zeros(16), -1)
    np.testing.assert_array_equal(done, before)
    open_step(first, 2)
    assert not join_step(second, 1)
    assert join_step(second, 2)


def test_a_worker_takes_its_range_in_order_and_then_tasks_of_others() -> None:
    first, second = make_pool(2, 1)
    next_phase(first)
    next_phase(second)
    assert [take(first, 6) for _ in range(2)] == [0, 1]
    assert take(second, 6) == 3
    assert [take(first, 6) for _ in range(4)] == [2, 4, 5, 6]
    assert take(second, 6) == 6


def test_portions_are_neither_empty_nor_all_tasks() -> None:
    pool = make_pool(2, 1)[0]
    assert task_size(pool, 1) == 1
    assert 1 <= task_size(pool, 100) <= 50
    assert task_size(pool_of_one(), 0) == 1


def test_callers_in_several_threads_take_turns() -> None:
    team, found = team_of(2), []

    def call() -> None:
        found.extend(run(team).sum() for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SIZES.sum()] * 80


def test_threads_sleep_when_there_is_no_step_for_a_while() -> None:
    run(team_of(2))
    time.sleep(0.1)
    started = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - started < 0.1


def test_a_process_ends_quietly_with_its_pool() -> None:
    program = (
        "from tests.test_34_thread_pool import run; "
        "from minigen.kernels.cpu.team import team_of; "
        "[run(team_of(3)) for _ in range(5)]"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8")
    assert (ended.returncode, ended.stderr) == (0, "")


@njit(nogil=True)
def fail(pool, step, divisor):
    if join_step(pool, step):
        next_phase(pool)
        take(pool, 1 // divisor)
        leave_step(pool)


def test_after_a_step_that_failed_the_next_one_runs() -> None:
    team = Team(1)
    with pytest.raises(ZeroDivisionError):
        team.run(1, fail, 0)
    assert run(team).sum() == SIZES.sum()
    team.close()

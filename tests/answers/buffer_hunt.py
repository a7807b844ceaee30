"""Tests and parts that learners might hand in for chapter 42's hunt."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minigen_course.ch42_pipeline.lesson import LateLink


def _run(run_stage: Any, num_batches: int, link: LateLink) -> tuple[list[list[float]], list[int]]:
    """Run a stage that doubles its input; return what arrived, and what was open before each."""
    opened: list[int] = []
    inputs: Iterator[np.ndarray] = iter([np.full(2, float(each)) for each in range(num_batches)])

    def layers(x: np.ndarray, out: np.ndarray) -> None:
        opened.append(link.num_open)
        np.multiply(x, 2.0, out=out)

    run_stage(lambda: next(inputs), layers, link.send, num_batches, 2)
    return link.results, opened


def _right(num_batches: int) -> list[list[float]]:
    return [[2.0 * each] * 2 for each in range(num_batches)]


def late_and_open(run_stage: Any) -> None:
    for count in (1, 2, 4, 6):
        found, opened = _run(run_stage, count, LateLink())
        assert found == _right(count)
        assert all(each > 0 for each in opened[1:])


def every_lateness(run_stage: Any) -> None:
    for late in (1, 2, 3, 4, 99):
        found, opened = _run(run_stage, 8, LateLink(late))
        assert found == _right(8)
        assert min(opened[1:]) > 0


def own_link(run_stage: Any) -> None:
    sent: list[np.ndarray] = []
    arrived: list[float] = []
    overlap = []

    def send(out: np.ndarray) -> Callable[[], None]:
        number = len(sent)
        sent.append(out)

        def wait() -> None:
            while len(arrived) <= number:
                arrived.append(float(sent[len(arrived)][0]))

        return wait

    def layers(x: np.ndarray, out: np.ndarray) -> None:
        overlap.append(len(sent) > len(arrived))
        out[:] = x + 1.0

    inputs = iter([np.array([float(each)]) for each in range(7)])
    run_stage(lambda: next(inputs), layers, send, 7, 1)
    assert arrived == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert all(overlap[1:])


def early_link_only(run_stage: Any) -> None:
    assert _run(run_stage, 5, LateLink(0))[0] == _right(5)


def one_batch_only(run_stage: Any) -> None:
    assert _run(run_stage, 1, LateLink())[0] == _right(1)


def results_only(run_stage: Any) -> None:
    for count in (1, 2, 4, 6):
        assert _run(run_stage, count, LateLink())[0] == _right(count)


def two_batches_only(run_stage: Any) -> None:
    found, opened = _run(run_stage, 2, LateLink())
    assert found == _right(2)
    assert opened[1] > 0


def without_the_last(run_stage: Any) -> None:
    for count in (1, 2, 4, 6):
        found, opened = _run(run_stage, count, LateLink())
        assert found[: count - 1] == _right(count)[:-1]
        assert all(opened[1:])


def wants_one_open(run_stage: Any) -> None:
    found, opened = _run(run_stage, 5, LateLink())
    assert found == _right(5)
    assert opened[1:] == [1, 1, 1, 1]


def wants_equal_results(run_stage: Any) -> None:
    found, _ = _run(run_stage, 3, LateLink())
    assert found == [[4.0, 4.0]] * 3


def by_copying(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    out, waits = np.zeros(size), []
    for _ in range(num_batches):
        layers(receive(), out)
        waits.append(send(out.copy()))
    for wait in waits:
        wait()


def by_a_second_array(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    """Computes into one array; copies it to another one once that one has been sent."""
    out, sent, wait = np.zeros(size), np.zeros(size), lambda: None
    for _ in range(num_batches):
        layers(receive(), out)
        wait()
        sent[:] = out
        wait = send(sent)
    wait()


def waits_before_computing(
    receive: Any, layers: Any, send: Any, num_batches: int, size: int
) -> None:
    out, wait = np.zeros(size), lambda: None
    for _ in range(num_batches):
        x = receive()
        wait()
        layers(x, out)
        wait = send(out)
    wait()


def never_waits(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    for _ in range(num_batches):
        out = np.zeros(size)
        layers(receive(), out)
        send(out)


def copies_the_first(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    out, waits = np.zeros(size), []
    for number in range(num_batches):
        layers(receive(), out)
        waits.append(send(out if number else out.copy()))
    for wait in waits:
        wait()


def sends_in_reverse(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    outs = [np.zeros(size) for _ in range(num_batches)]
    for out in outs:
        layers(receive(), out)
    for wait in [send(out) for out in reversed(outs)]:
        wait()


def sends_at_the_end(receive: Any, layers: Any, send: Any, num_batches: int, size: int) -> None:
    outs = [np.zeros(size) for _ in range(num_batches)]
    for out in outs:
        layers(receive(), out)
    for wait in [send(out) for out in outs]:
        wait()

"""Bug hunt of chapter 42: answers that belong to other requests, on a slow link only."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minigen_course.ch42_pipeline.lesson.stages import LateLink
from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.grading.hunt import Hunt

Array = np.ndarray
Layers = Callable[[Array, Array], None]
Wait = Callable[[], object]
Send = Callable[[Array], Wait]
RunStage = Callable[[Callable[[], Array], Layers, Send, int, int], None]


def run_stage(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    """Run a stage of a pipeline over `num_batches` micro-batches, and send each result on.

    `receive()` returns the next micro-batch, `size` numbers, and `layers(x, out)` writes the
    stage's result for x into out. `send(out)` begins to send and returns at once; out is read at
    any time until the function that it returns, `wait()`, has returned. While a result is sent,
    the stage computes the next micro-batch. All results have arrived when the stage returns.
    """
    out = np.zeros(size)
    waits = []
    for _ in range(num_batches):
        layers(receive(), out)
        waits.append(send(out))
    for wait in waits:
        wait()


def test_run_stage(run_stage: RunStage) -> None:
    """Assert what every right `run_stage` does, and the one above does not.

    `LateLink()` of minigen_course.ch42_pipeline.lesson is a link whose `send` reads late;
    `link.results` is what has arrived, and `link.num_open` how many results are on their way.
    """
    for num_batches in range(6):
        link = LateLink()
        inputs = [np.full(3, 10.0 * each) for each in range(num_batches)]
        open_before: list[int] = []

        def layers(
            x: Array, out: Array, link: LateLink = link, open_before: list[int] = open_before
        ) -> None:
            open_before.append(link.num_open)
            out[:] = x + 1.0

        run_stage(iter(inputs).__next__, layers, link.send, num_batches, 3)
        right = [[10.0 * each + 1.0] * 3 for each in range(num_batches)]
        assert link.results == right
        assert all(open_before[1:])


def _copies(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    waits = []
    for _ in range(num_batches):
        out = np.zeros(size)
        layers(receive(), out)
        waits.append(send(out))
    for wait in waits:
        wait()


def _in_turn(count: int, waits_for: Callable[[int, list[Wait]], list[Wait]]) -> RunStage:
    """Return a stage with `count` buffers in turn; `waits_for` are awaited before a buffer is used.

    It gets the number of the micro-batch and the functions of all results sent so far.
    """

    def part(
        receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
    ) -> None:
        buffers = [np.zeros(size) for _ in range(count)]
        waits: list[Wait] = []
        for number in range(num_batches):
            for wait in waits_for(number, waits):
                wait()
            layers(receive(), buffers[number % count])
            waits.append(send(buffers[number % count]))
        for wait in waits:
            wait()

    return part


def _mended(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    buffers = [np.zeros(size), np.zeros(size)]
    waits: list[Wait] = []
    for number in range(num_batches):
        out = buffers[number % 2]
        x = receive()
        if number > 1:
            waits[number - 2]()  # the link still reads the array of the result before last
        layers(x, out)
        waits.append(send(out))
    for wait in waits:
        wait()


def _waits_at_once(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    out = np.zeros(size)
    for _ in range(num_batches):
        layers(receive(), out)
        send(out)()


def _leaves_early(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    waits = []
    for _ in range(num_batches):
        out = np.zeros(size)
        layers(receive(), out)
        waits.append(send(out))
    for wait in waits[:-1]:
        wait()


def _copy_too_late(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    out = np.zeros(size)
    waits = []
    for _ in range(num_batches):
        layers(receive(), out)
        waits.append(send(out))
        out = out.copy() if len(waits) % 2 else out
    for wait in waits:
        wait()


def _sends_the_input(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    waits = []
    for _ in range(num_batches):
        x = receive()
        layers(x, np.zeros(size))
        waits.append(send(x))
    for wait in waits:
        wait()


class Stage:
    """A stage's surroundings: inputs, layers that add up their input, and a late link."""

    def __init__(self, num_batches: int, size: int, late: int):
        self.link = LateLink(late)
        self.inputs = [np.arange(size) + 100.0 * each for each in range(num_batches)]
        self.open_before: list[int] = []
        self.taken = 0

    def receive(self) -> Array:
        """Return the next input."""
        self.taken += 1
        return self.inputs[self.taken - 1].copy()

    def layers(self, x: Array, out: Array) -> None:
        """Write the running sums of x into out; note how many results are on their way."""
        self.open_before.append(self.link.num_open)
        out[:] = x.cumsum()


def every_result_arrives(part: Any) -> None:
    """what arrives at the next stage, over links that read early and late:"""
    for num_batches in (0, 1, 2, 3, 7):
        for late in (0, 1, 2, 3, 99):
            stage = Stage(num_batches, 4, late)
            part(stage.receive, stage.layers, stage.link.send, num_batches, 4)
            right = [each.cumsum().tolist() for each in stage.inputs]
            what = f"{num_batches} micro-batches, {late} on their way: what arrives"
            expect_equal(stage.link.results, right, what)


def computes_while_it_sends(part: Any) -> None:
    """results on their way while the next micro-batch is computed:"""
    stage = Stage(5, 4, 99)
    part(stage.receive, stage.layers, stage.link.send, 5, 4)
    for number, count in enumerate(stage.open_before[1:], 1):
        what = f"while micro-batch {number} is computed, {count} results are on their way"
        expect(count > 0, f"{what}; the one before should be.")


HUNT = Hunt(
    "reused_buffer",
    run_stage,
    test_run_stage,
    _mended,
    {
        "one with a new array for each result": _copies,
        "one with three arrays in turn": _in_turn(
            3, lambda number, waits: waits[number - 3 : number - 2] if number > 2 else []
        ),
    },
    {
        "has two arrays, and waits for neither": _in_turn(2, lambda *_: []),
        "has two arrays, and waits for the result before last too late": _in_turn(
            2, lambda number, waits: waits[number - 3 : number - 2] if number > 2 else []
        ),
        "waits for each result at once, so that it never computes while it sends": _waits_at_once,
        "returns before the last result has arrived": _leaves_early,
        "changes the array after every second result only": _copy_too_late,
        "sends what it has received": _sends_the_input,
    },
    (every_result_arrives, computes_while_it_sends),
    (
        "A link that reads at once hides the mistake. `LateLink()` reads as late as it may, so "
        "compare what has arrived with what each micro-batch should give.",
        "An array may be written again only when it has been read. There are two ways: another "
        "array, or waiting for the message that still needs this one.",
        "Do not wait right after sending: then the stage is idle while it sends. Your test should "
        "also look at that: `link.num_open`, read inside of your `layers`, says how many results "
        "are on their way. And it should look at what has arrived when the stage returns.",
    ),
    "**The report.** *Inside of one machine everything is right. Between two machines, under load, "
    "some answers continue the text of another request, and the more micro-batches there are, the "
    "more. With one micro-batch per step it never happens, and with a pause after each send it "
    "does not either.* TensorRT-LLM had this mistake in its pipeline's send (pull request 10488), "
    "and Megatron-LM freed the memory of a result while it was still being sent (pull request "
    "4047, found in a run of Llama 3.1 405B on 16 stages).",
    minutes=20,
)

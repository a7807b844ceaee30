"""Runs over time: recorded ones played step by step, and a live picture of one that is under way.

Both stand on `explore`: one output holds the widget and, for whoever has no kernel, the picture.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import ipywidgets
import traitlets
from IPython.display import display
from matplotlib.figure import Figure

from minigen.trace import Event, EventKind, Trace
from minigen.viz.explore import WIDE, Canvas, explore

INTERVAL_MS = 200
MOST_OF_THE_TIME = 0.08  # that a live picture may take from the engine


class Player(ipywidgets.HBox):
    """A play button and a slider over the steps, whose `value` is the step that is chosen.

    Button and slider are linked in the browser, which sends a step on only when the one before is
    drawn: playing leaves steps out rather than fall behind.
    """

    value = traitlets.Int()

    def __init__(self, num_steps: int, at: int, stride: int = 1):
        self.slider = ipywidgets.IntSlider(
            *(at, 0, num_steps - 1),
            description="step",
            style={"description_width": "4em"},
            layout={"width": WIDE},
        )
        self.play = ipywidgets.Play(
            value=at,
            min=0,
            max=num_steps - 1,
            step=stride,
            interval=INTERVAL_MS,
            show_repeat=False,
        )
        ipywidgets.jslink((self.play, "value"), (self.slider, "value"))
        super().__init__([self.play, self.slider])
        traitlets.dlink((self.slider, "value"), (self, "value"))


def replay(
    draw: Callable[..., Figure],
    num_steps: int,
    caption: str,
    *,
    at: int | None = None,
    stride: int = 1,
    **controls: Any,
) -> None:
    """Show `draw(step=step, **values)` under a play button, a slider over the steps, and controls.

    `at` is the step that is shown at first and in the static picture, the last one if None; the
    button plays every `stride`-th step; `controls` are as `explore` has them. Keep a drawing under
    100 ms, half of what a step is shown for. Raises `ValueError` for a step that there is not.
    """
    if num_steps < 1:
        raise ValueError("There are no steps to play.")
    first = num_steps - 1 if at is None else at
    if not 0 <= first < num_steps:
        raise ValueError(f"Steps are 0 to {num_steps - 1}: there is no step {first}.")
    explore(draw, caption, step=Player(num_steps, first, stride), **controls)


@contextmanager
def watch(
    trace: Trace, draw: Callable[[list[Event]], Figure], caption: str, every: float = 0.1
) -> Generator[list[Event], None, None]:
    """Show `draw(events)` of what is traced while the block runs, and give those events.

    Between two steps of the engine, by the thread that runs it, and at most every so many
    seconds: after a drawing that took long, as much later as keeps drawing under
    `MOST_OF_THE_TIME`. What `draw` raises is shown as a sentence, and stops nobody. At the end it
    is drawn once more, and that picture stays where there is no widget.
    """
    events: list[Event] = []
    canvas, painting, due_ns = Canvas(), threading.Lock(), 0

    def paint() -> None:
        nonlocal due_ns
        with painting:  # the engine may run in another thread, still, when the block ends
            begun_ns = time.perf_counter_ns()
            canvas.paint(lambda: draw(events))
            ended_ns = time.perf_counter_ns()
        due_ns = ended_ns + max(int(1e9 * every), int((ended_ns - begun_ns) / MOST_OF_THE_TIME))

    def hear(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.STEP and event.time_ns >= due_ns:
            paint()

    paint()
    box = canvas.below(())
    shown = display(canvas.output(box, caption), raw=True, display_id=True)
    try:
        with trace.heard_by(hear):
            yield events
    finally:
        paint()
        if shown is not None:
            shown.update(canvas.output(box, caption), raw=True)

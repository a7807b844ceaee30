"""Explorables: controls above a figure that is redrawn, and recorded or live runs played over time.

One output holds the widget and a picture: front ends with a kernel show the controls, all others
(GitHub, an exported page) the picture, drawn from the same data.
"""

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from html import escape
from typing import Any

import ipywidgets
import traitlets
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minigen.trace.events import Event, EventKind, Trace

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDE = "34em"


def png(figure: Figure) -> bytes:
    """A figure's picture; not by `savefig`, which lays the figure out twice."""
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def picture(figure: Figure, caption: str) -> None:
    """Show a figure; `caption` says what is to be seen to those who cannot see it."""
    display({"image/png": _base64(png(figure)), "text/plain": caption}, raw=True)


class Canvas:
    """An image that is painted again and again, and above it a sentence where that failed."""

    def __init__(self) -> None:
        self.image, self.sentence = ipywidgets.Image(format="png"), ipywidgets.HTML()

    def paint(self, draw: Callable[[], Figure | Iterable[Figure]]) -> None:
        """Show what `draw` returns, or each that it yields as it comes; what it raises is said in a
        sentence, and leaves the image."""
        try:
            drawn = draw()
            for each in [drawn] if isinstance(drawn, Figure) else drawn:
                self.image.value, self.sentence.value = png(each), ""
        except Exception as error:  # whatever it is, a reader gets a sentence
            self.sentence.value = f"<b>⚠ {escape(str(error) or type(error).__name__)}</b>"

    def below(self, controls: Iterable[Any]) -> ipywidgets.VBox:
        """The canvas under some controls, as one widget."""
        return ipywidgets.VBox([*controls, self.sentence, self.image])

    def output(self, box: ipywidgets.VBox, caption: str) -> dict[str, Any]:
        """What to display: the widget, and as its twin the picture as it is now."""
        view = {"model_id": box.model_id, "version_major": 2, "version_minor": 0}
        twin = {"image/png": _base64(self.image.value)} if self.image.value else {}
        return {WIDGET: view, **twin, "text/plain": caption}


def explore(draw: Callable[..., Figure | Iterable[Figure]], caption: str, **controls: Any) -> None:
    """Show `draw(**values)` under a control for each of its arguments, redrawn at every change.

    A control is an ipywidget, or what stands for one: `(low, high, step, value)` a slider, a list
    a choice, a bool a tick box, a str a line of text, None a button that only draws anew. What
    `draw` raises is shown as one sentence, above the last figure that could be drawn. A `draw` that
    yields figures has each shown as it comes.
    """
    made = {name: _control(name, given) for name, given in controls.items()}
    canvas = Canvas()
    presses = dict.fromkeys((name for name, given in controls.items() if given is None), 0)

    def redraw() -> None:
        values = {name: each.value for name, each in made.items() if name not in presses}
        canvas.paint(lambda: draw(**values, **presses))

    changed = _in_this_thread(redraw)

    def press(name: str) -> Callable[[Any], None]:
        def pressed(_: Any) -> None:
            presses[name] += 1
            changed()

        return pressed

    for name, control in made.items():
        if name in presses:
            control.on_click(press(name))
        else:
            control.observe(changed, names="value")
    redraw()
    display(canvas.output(canvas.below(made.values()), caption), raw=True)


def _in_this_thread(redraw: Callable[[], None]) -> Callable[..., None]:
    """`redraw`, to be called from any thread: elsewhere than here, it waits until here is free.

    JupyterLab has controls answered by a second thread, beside the cells, but an engine has its
    callers in one. Calls that wait become one, since it is the last values that are drawn.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # no notebook, so no second thread
        loop = None
    here, waits = threading.get_ident(), threading.Event()

    def redraw_here() -> None:
        waits.clear()
        redraw()

    def changed(_: Any = None) -> None:
        if loop is None or threading.get_ident() == here:
            redraw()
        elif not waits.is_set():
            waits.set()
            loop.call_soon_threadsafe(redraw_here)

    return changed


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _control(name: str, given: Any) -> Any:
    label = {"description": name.replace("_", " "), "style": {"description_width": "10em"}}
    match given:
        case None:
            return ipywidgets.Button(description=name.replace("_", " "), button_style="primary")
        case ipywidgets.DOMWidget():
            return given
        case bool():
            return ipywidgets.Checkbox(value=given, **label)
        case str():
            wide = ipywidgets.Layout(width="52em")
            return ipywidgets.Text(value=given, continuous_update=False, layout=wide, **label)
        case list():
            return ipywidgets.Dropdown(options=given, layout={"width": WIDE}, **label)
        case (int() as low, int() as high, int() as step, int() as value):
            return ipywidgets.IntSlider(value, low, high, step, layout={"width": WIDE}, **label)
        case (low, high, step, value):
            return ipywidgets.FloatSlider(
                value, min=low, max=high, step=step, layout={"width": WIDE}, **label
            )
    raise TypeError(f"{name}: {given!r} stands for no control.")


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
            started_ns = time.perf_counter_ns()
            canvas.paint(lambda: draw(events))
            ended_ns = time.perf_counter_ns()
        due_ns = ended_ns + max(int(1e9 * every), int((ended_ns - started_ns) / MOST_OF_THE_TIME))

    def hear(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.STEP and event.time_ns >= due_ns:
            paint()

    paint()
    box = canvas.below(())
    shown = display(canvas.output(box, caption), raw=True, display_id=True)
    try:
        with trace.subscribed(hear):
            yield events
    finally:
        paint()
        if shown is not None:
            shown.update(canvas.output(box, caption), raw=True)

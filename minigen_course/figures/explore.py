"""Interactive figures: controls above a figure, and recorded or live runs played over time.

One output holds the widget and a picture. Front ends with a kernel show the controls; all others
(GitHub, an exported page) show the picture, drawn from the same data.
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
import numpy as np
import traitlets
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from minigen.trace.events import Event, Trace
from minigen.trace.timeline import Timeline

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDE = "34em"


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, without `savefig`, which computes the layout twice.

    It has no transparent pixels, so the channel for these is left out, and at most 256 colours,
    which is half of the bytes and hardly visible.
    """
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    image.quantize(256, dither=Image.Dither.NONE).save(buffer, "png")
    return buffer.getvalue()


def picture(figure: Figure, caption: str, *, number: str = "") -> None:
    """Show a figure; `caption` describes it to readers who cannot see it.

    With a `number`, such as "14.2", the caption also stands below the figure.
    """
    display({"image/png": _base64(png(figure)), "text/plain": caption}, raw=True)
    _show_caption(caption, number)


def _show_caption(caption: str, number: str) -> None:
    if number:
        html = f"<p><b>Figure {escape(number)}.</b> {escape(caption)}</p>"
        display({"text/plain": f"Figure {number}. {caption}", "text/html": html}, raw=True)


class Canvas:
    """An image that is redrawn, below a sentence that is shown if drawing fails."""

    def __init__(self) -> None:
        self.image, self.sentence = ipywidgets.Image(format="png"), ipywidgets.HTML()

    def paint(self, draw: Callable[[], Figure | Iterable[Figure]]) -> None:
        """Show the figure that `draw` returns, or each one that it yields as it comes.

        An error of `draw` is shown as a sentence, and leaves the image unchanged.
        """
        try:
            drawn = draw()
            for each in [drawn] if isinstance(drawn, Figure) else drawn:
                self.image.value, self.sentence.value = png(each), ""
        except Exception as error:  # a reader gets a sentence for any error
            self.sentence.value = f"<b>⚠ {escape(str(error) or type(error).__name__)}</b>"

    def below(self, controls: Iterable[Any]) -> ipywidgets.VBox:
        """Return the canvas below some controls, as one widget."""
        return ipywidgets.VBox([*controls, self.sentence, self.image])

    def output(self, box: ipywidgets.VBox, caption: str) -> dict[str, Any]:
        """Return what to display: the widget, and the current picture as its static twin."""
        view = {"model_id": box.model_id, "version_major": 2, "version_minor": 0}
        twin = {"image/png": _base64(self.image.value)} if self.image.value else {}
        return {WIDGET: view, **twin, "text/plain": caption}


def explore(
    draw: Callable[..., Figure | Iterable[Figure]],
    caption: str,
    number: str = "",
    /,
    **controls: Any,
) -> None:
    """Show `draw(**values)` below a control for each of its arguments; redraw at every change.

    A control is an ipywidget or a short form of one: `(low, high, step, value)` is a slider, a list
    a choice, a bool a checkbox, a str a line of text, None a button that only redraws. An error of
    `draw` is shown as one sentence above the last figure that could be drawn. If `draw` yields
    figures, each is shown as it comes. With a `number`, the caption also stands below.
    """
    made = {name: control_of(name, given) for name, given in controls.items()}
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
    _show_caption(caption, number)


def _in_this_thread(redraw: Callable[[], None]) -> Callable[..., None]:
    """Wrap `redraw` so that it runs in the current thread, whichever thread calls it.

    JupyterLab handles controls in a second thread, beside the cells, but an engine must be called
    from one thread. Waiting calls become one call, because only the last values are drawn.
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


def control_of(name: str, given: Any) -> Any:
    """Return the widget that `given` stands for, in one of the forms of `explore`."""
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
    forms = "a widget, (low, high, step, value), a list, a bool, a str or None"
    raise TypeError(f"{name}: {given!r} stands for no control; give {forms}.")


INTERVAL_MS = 200
MOST_OF_THE_TIME = 0.08  # the share that a live figure may take from the engine


class Player(ipywidgets.HBox):
    """A play button and a slider over the steps; `value` is the chosen step.

    Button and slider are linked in the browser, which sends a step only when the one before is
    drawn. So playing skips steps instead of falling behind.
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
    number: str = "",
    **controls: Any,
) -> None:
    """Show `draw(step=step, **values)` below a play button, a slider over the steps, and controls.

    `at` is the step shown first and in the static picture, the last one if None. The button plays
    every `stride`-th step. With a `number`, the caption also stands below. `controls` are those of
    `explore`. A drawing should take less than 100 ms, half the time that a step is shown. Raises
    `ValueError` for a step that does not exist.
    """
    if num_steps < 1:
        raise ValueError("There are no steps to play.")
    first = num_steps - 1 if at is None else at
    if not 0 <= first < num_steps:
        raise ValueError(f"Steps are 0 to {num_steps - 1}: there is no step {first}.")
    explore(draw, caption, number, step=Player(num_steps, first, stride), **controls)


@contextmanager
def watch(
    trace: Trace,
    draw: Callable[[list[Event]], Figure],
    caption: str,
    every: float = 0.1,
    *,
    number: str = "",
) -> Generator[list[Event], None, None]:
    """Show `draw(events)` of the events traced while the block runs, and yield these events.

    The engine's thread draws between two steps, at most once per `every` seconds. After a slow
    drawing the next one comes later, so that drawing takes at most `MOST_OF_THE_TIME` of the time.
    An error of `draw` is shown as a sentence and does not stop the engine. At the end the figure is
    drawn once more, and this picture remains where there is no widget. With a `number`, the caption
    also stands below.
    """
    events: list[Event] = []
    canvas, painting, due_ns = Canvas(), threading.Lock(), 0

    def paint() -> None:
        nonlocal due_ns
        with painting:  # the engine may still run in another thread when the block ends
            started_ns = time.perf_counter_ns()
            canvas.paint(lambda: draw(events))
            ended_ns = time.perf_counter_ns()
        due_ns = ended_ns + max(int(1e9 * every), int((ended_ns - started_ns) / MOST_OF_THE_TIME))

    def on_step(event: Event) -> None:
        if event.time_ns >= due_ns:
            paint()

    paint()
    box = canvas.below(())
    shown = display(canvas.output(box, caption), raw=True, display_id=True)
    _show_caption(caption, number)
    try:
        with trace.subscribed(events.append), trace.subscribed(Timeline(on_step=on_step)):
            yield events
    finally:
        paint()
        if shown is not None:
            shown.update(canvas.output(box, caption), raw=True)

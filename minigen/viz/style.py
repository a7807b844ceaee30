"""How every figure looks: one palette that the colour-blind can tell apart, sizes, quiet axes.

Source of the palette: Okabe and Ito 2008, "Color Universal Design".
"""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, QUIET, FAINT = "#222222", "#595959", "#d9d9d9"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, AMBER, YELLOW = "#56b4e9", "#e69f00", "#f0e442"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, YELLOW)
HEAT = "cividis"  # readable in grey and by the colour-blind

SEEN = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "$": r"\$"})


def figure(width: float = 8.0, height: float = 3.2, **grid: Any) -> tuple[Figure, Any]:
    """An empty figure of so many inches, and its axes (an array if `grid` asks for several).

    Not by pyplot, which keeps figures and shows them when it likes. `grid` is for `subplots`.
    """
    made = Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=100)
    FigureCanvasAgg(made)
    axes = made.subplots(**grid)
    for each in axes.flat if hasattr(axes, "flat") else [axes]:
        quieten(each)
    return made, axes


def quieten(axes: Axes) -> None:
    """Leave only what is needed of an axes' frame."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.set_prop_cycle(color=CYCLE)
    axes.tick_params(colors=QUIET, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def title(axes: Axes, text: str, y: float | None = None) -> None:
    """A title that says what is to be seen, on the left; where it is not given, `y` is found."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, y=y)


def printable(tokens: Iterable[str]) -> list[str]:
    """Tokens as labels: a space is seen as one, a line end too; dollars are no formulas."""
    return [each.translate(SEEN) for each in tokens]

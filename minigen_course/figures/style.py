"""The look of every figure: a palette that suits colour-blind readers, sizes, axes, labels.

Source of the palette: Okabe and Ito 2008, "Color Universal Design".
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

INK, QUIET, FAINT = "#222222", "#595959", "#d9d9d9"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, AMBER, YELLOW = "#56b4e9", "#e69f00", "#f0e442"
PALE = "#d6e9f5"  # the ground of text in a box
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, YELLOW)
HEAT = "cividis"  # readable in grey, and for colour-blind readers

SEEN = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "$": r"\$"})


def figure(width: float = 8.0, height: float = 3.2, **grid: Any) -> tuple[Figure, Any]:
    """Return an empty figure, sized in inches, and its axes (an array if `grid` asks for several).

    pyplot is not used, because it stores figures and shows them itself. `grid` is for `subplots`.
    """
    made = Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=100)
    FigureCanvasAgg(made)
    axes = made.subplots(**grid)
    for each in axes.flat if hasattr(axes, "flat") else [axes]:
        quieten(each)
    return made, axes


def quieten(axes: Axes) -> None:
    """Remove the parts of an axes' frame that are not needed."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.set_prop_cycle(color=CYCLE)
    axes.tick_params(colors=QUIET, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def title(axes: Axes, text: str, y: float | None = None) -> None:
    """Set a title on the left that says what the figure shows; `y` is its height, found if None."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, y=y)


def printable(tokens: Iterable[str]) -> list[str]:
    """Return tokens as labels, with visible spaces, tabs and line ends, and escaped dollars."""
    return [each.translate(SEEN) for each in tokens]


Point = tuple[float, float]


def arrow(axes: Axes, start: Point, end: Point, **look: Any) -> None:
    """Draw the arrow of a diagram; `look` changes its properties, such as `color`."""
    props = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.2, **look}
    axes.annotate("", end, start, arrowprops=props)


POINTS_AN_INCH = 72
FONT_SIZE = 8

Label = tuple[float, float, str, str]  # x and y of its middle, in data coordinates; text; colour


@lru_cache(maxsize=4096)
def outline(text: str) -> Path:
    """Return the text's outline in points, with its middle at the origin."""
    path = TextPath((0, 0), text, size=FONT_SIZE)
    box = path.get_extents()
    middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
    return Path(path.vertices - middle, path.codes)


def draw_labels(axes: Axes, labels: Iterable[Label]) -> None:
    """Draw labels fast: a hundred in a few milliseconds."""
    drawn = list(labels)
    collection = PathCollection(
        [outline(text) for _, _, text, _ in drawn],
        offsets=[(x, y) for x, y, _, _ in drawn],
        offset_transform=axes.transData,
        facecolors=[colour for _, _, _, colour in drawn],
        linewidths=0,
        snap=False,  # snapped to pixels, letters of straight lines lose strokes
    )
    collection.set_transform(Affine2D().scale(axes.figure.dpi / POINTS_AN_INCH))
    axes.add_collection(collection, autolim=False)

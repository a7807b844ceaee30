"""Which elements each program instance of a kernel loads and stores, drawn on its tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minigen.teach.accesses import Access, bytes_moved
from minigen.viz.style import CYCLE, FAINT, figure, title

Program = tuple[int, int, int]
_MOST_NUMBERS = 400  # elements of a tensor beyond which their numbers are not written
_TALLEST = 3.0  # inches
_MOST_LINES = 40  # rows or columns beyond which no lines are drawn between elements
_DARKER = 0.6  # for each time that the colours begin anew


def draw_programs(
    accesses: Sequence[Access],
    shapes: Mapping[str, tuple[int, int]],
    program: Program | None = None,
    width: float = 9.0,
) -> Figure:
    """Each tensor as rows and columns; an element has the colour of the program that touched it.

    The number in it says how often it was touched. With `program`, that one's alone are coloured,
    those of the others stay pale.
    """
    programs = sorted({access.program for access in accesses})
    rows = max(num_rows for num_rows, _ in shapes.values())
    made, axes = figure(
        width, 1.4 + min(0.22 * max(rows, 4), _TALLEST), ncols=len(shapes), squeeze=False
    )
    for each, (name, shape) in zip(axes.flat, shapes.items(), strict=True):
        own = [access for access in accesses if access.tensor == name]
        _draw_tensor(each, own, shape, programs, program)
        verbs = [
            verb
            for verb, is_store in (("loaded", False), ("stored", True))
            if any(access.is_store == is_store for access in own)
        ]
        title(each, f"{name}: {' and '.join(verbs) or 'not touched'}, {bytes_moved(own):,} bytes")
    return made


def _draw_tensor(
    axes: Axes,
    accesses: Sequence[Access],
    shape: tuple[int, int],
    programs: Sequence[Program],
    chosen: Program | None,
) -> None:
    colours = np.full((shape[0] * shape[1], 3), to_rgb("white"))
    touched: Counter[int] = Counter()
    for access in sorted(accesses, key=lambda each: each.program == chosen):  # the chosen on top
        pale = chosen is not None and access.program != chosen
        colour = to_rgb(FAINT) if pale else _colour_of(programs.index(access.program))
        colours[list(access.offsets)] = colour
        touched.update(access.offsets)
    axes.imshow(colours.reshape(*shape, 3), aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
    if max(shape) <= _MOST_LINES:
        axes.grid(which="minor", color="white", linewidth=0.8 if max(shape) <= 24 else 0.4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="column", ylabel="row")
    if shape[0] * shape[1] <= _MOST_NUMBERS:
        for at, count in touched.items():
            if count > 1:
                axes.text(
                    at % shape[1],
                    at // shape[1],
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black",
                    bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "linewidth": 0},
                )


def _colour_of(place: int) -> tuple[float, ...]:
    """The colours in turn, darker with every round."""
    turns, own = divmod(place, len(CYCLE))
    return tuple(part * _DARKER**turns for part in to_rgb(CYCLE[own]))

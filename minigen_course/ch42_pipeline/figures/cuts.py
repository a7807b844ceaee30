"""Which cut when: the cost of layouts side by side, and the best layout of each load."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from minigen_course.ch42_pipeline.lesson import Cluster, Cost, Layout
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    INK,
    ORANGE,
    PINK,
    QUIET,
    figure,
    title,
)


def layout_costs(costs: Mapping[Layout, Cost], cluster: Cluster, what: str) -> Figure:
    """Draw a bar for each layout: the time outside of messages, and in messages; fastest first.

    Layouts that do not fit into the memory are pale. Behind a bar stands the memory of a rank.
    """
    ranked = sorted(costs.items(), key=lambda each: each[1].seconds)[:12]
    made, axes = figure(9, 1.4 + 0.34 * max(len(ranked), 1))
    for row, (_, cost) in enumerate(ranked):
        fits = cost.fits(cluster)
        messages = 1e3 * min(cost.message_seconds, cost.seconds)
        work = 1e3 * cost.seconds - messages
        look = {} if fits else {"alpha": 0.3}
        axes.barh(row, work, height=0.7, color=BLUE, **look)
        axes.barh(row, messages, left=work, height=0.7, color=ORANGE, **look)
        text = f" {1e3 * cost.seconds:,.3g} ms, {cost.rank_bytes / 1e9:,.0f} GB each"
        text += "" if fits else ": does not fit"
        axes.text(1e3 * cost.seconds, row, text, va="center", fontsize=8, color=INK)
    for color, name in ((BLUE, "reading and computing"), (ORANGE, "messages")):
        axes.barh(0, 0, color=color, label=name)
    axes.set_yticks(range(len(ranked)), [str(each) for each, _ in ranked])
    longest = max((1e3 * cost.seconds for _, cost in ranked), default=1.0)
    axes.set(xlim=(0, 1.45 * longest), ylim=(len(ranked) - 0.4, -0.6), xlabel=f"ms of {what}")
    made.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
    title(axes, f"{what.capitalize()}: the fastest layouts by the cost model")
    return made


KINDS = ("one device", "tensor", "pipeline", "context", "data", "combined", "nothing fits")
KIND_COLOURS = (FAINT, CYCLE[0], CYCLE[2], CYCLE[3], CYCLE[4], CYCLE[5], "#ffffff")


def kind_of(layout: Layout | None) -> str:
    """Return the name of a layout's only cut, "combined" for several, or "nothing fits"."""
    if layout is None:
        return "nothing fits"
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "data": layout.data,
    }
    used = [name for name, size in sizes.items() if size > 1]
    return (used or ["one device"])[0] if len(used) < 2 else "combined"


def which_cut(
    best: Sequence[Sequence[Layout | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    what: tuple[str, str],
) -> Figure:
    """Draw a table of the best layouts: a cell per row and column, coloured by the kind of cut.

    `what` names the rows and the columns.
    """
    kinds = np.array([[KINDS.index(kind_of(each)) for each in row] for row in best])
    made, axes = figure(2.4 + 1.62 * len(columns), 1.2 + 0.56 * len(rows))
    axes.imshow(
        kinds, cmap=ListedColormap(KIND_COLOURS), vmin=0, vmax=len(KINDS) - 1, aspect="auto"
    )
    for row, layouts in enumerate(best):
        for column, layout in enumerate(layouts):
            text = "nothing fits" if layout is None else str(layout).replace(" × ", "\n× ")
            dark = KINDS[kinds[row, column]] in ("tensor", "pipeline")
            axes.text(
                *(column, row, text),
                **{"ha": "center", "va": "center", "fontsize": 8},
                color="white" if dark else INK,
            )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=what[1], ylabel=what[0])
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    title(axes, "The fastest layout that fits, by the cost model")
    return made


def against_published(points: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw what the cost model predicts beside what was published, in seconds, on a log scale."""
    made, axes = figure(8.5, 1.2 + 0.5 * len(points))
    for row, (model, published) in enumerate(points.values()):
        axes.plot([model, published], [row, row], color=QUIET, linewidth=1)
        axes.plot(model, row, "o", color=BLUE, label="cost model" if row == 0 else None)
        axes.plot(published, row, "s", color=PINK, label="published" if row == 0 else None)
        middle = (model * published) ** 0.5
        axes.text(middle, row - 0.18, f"{published / model:.2f}×", ha="center", color=INK, size=8)
    axes.set_yticks(range(len(points)), list(points))
    axes.set(xscale="log", xlabel="seconds (log scale)", ylim=(len(points) - 0.4, -0.7))
    ticks = [each for each in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if _within(each, points)]
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right", labelcolor=INK)
    title(axes, "The model knows peaks and messages, and no losses: it is a lower bound")
    return made


def _within(seconds: float, points: Mapping[str, tuple[float, float]]) -> bool:
    every = [each for pair in points.values() for each in pair]
    return min(every) / 2 <= seconds <= 2 * max(every)

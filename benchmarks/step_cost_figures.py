"""Figures of step costs: lines of measured and predicted times."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from step_cost import StepCost

from minigen_course.figures.style import CYCLE, INK, QUIET, figure, title

MARKERS = "osD^vPX"


def step_cost(forms: Mapping[str, StepCost]) -> Figure:
    """Plot milliseconds of a decode step over sequences; a colour and a mark per context.

    Marks on solid lines are measured; dashed lines are predicted, the constant included. `axes` has
    one axes for each format, by name. Raises `ValueError` for a format without points.
    """
    if not forms or not all(cost.points for cost in forms.values()):
        raise ValueError("Every format needs at least one point.")
    made, axes = figure(4.6 * len(forms), 4.0, ncols=len(forms), sharey=True, squeeze=False)
    contexts = sorted({point.context for cost in forms.values() for point in cost.points})
    looks = {
        context: (CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)])
        for index, context in enumerate(contexts)
    }
    for each, (name, cost) in zip(axes.flat, forms.items(), strict=True):
        for context, (colour, mark) in looks.items():
            points = [point for point in cost.points if point.context == context]
            points.sort(key=lambda point: point.sequences)
            counts = [point.sequences for point in points]
            measured = [1e3 * point.measured for point in points]
            expected = [1e3 * (point.predicted + cost.overhead) for point in points]
            each.plot(counts, measured, color=colour, marker=mark, markersize=5, linewidth=1.5)
            each.plot(counts, expected, color=colour, linestyle=(0, (4, 2)), linewidth=1.2)
        ticks = sorted({point.sequences for point in cost.points})
        each.set(xscale="log", yscale="log", xlabel="sequences (log scale)")
        each.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        each.xaxis.set_minor_locator(NullLocator())
        each.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        each.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        each.yaxis.set_minor_formatter(NullFormatter())
        worst = cost.worst()
        title(
            each,
            f"{name}: at most {cost.ratio(worst):.2f} times its prediction\n"
            f"({worst.sequences} sequences, context {worst.context:,})",
        )
    axes[0, 0].set_ylabel("milliseconds per step (log scale)")
    handles = [
        Line2D([], [], color=colour, marker=mark, markersize=5, label=f"context {context:,}")
        for context, (colour, mark) in looks.items()
    ]
    handles.append(Line2D([], [], color=QUIET, marker="o", markersize=5, label="measured"))
    handles.append(Line2D([], [], color=QUIET, linestyle=(0, (4, 2)), label="predicted"))
    made.legend(
        handles=handles, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK,
        fontsize=9,
    )  # fmt: skip
    return made

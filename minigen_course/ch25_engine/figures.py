"""Figures of an engine's throughput, one technique after another, and of the time in a step."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from minigen_course.figures.style import BLUE, CYCLE, INK, figure, title


def ladder(rates: Mapping[str, float]) -> Figure:
    """Draw the tokens per second of each way of serving, and the factor over the first one."""
    made, axes = figure(8.5, 0.42 * len(rates) + 1.0)
    first = next(iter(rates.values()))
    axes.barh(range(len(rates)), list(rates.values()), 0.6, color=BLUE)
    for row, rate in enumerate(rates.values()):
        axes.text(rate, row, f"  {rate:.0f}, {rate / first:.1f} x", va="center", color=INK)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set(xlabel="tokens a second", xlim=(0, 1.2 * max(rates.values())))
    title(axes, "The same requests, served in other ways")
    return made


def step_parts(spent: Mapping[str, Mapping[str, float]], model: str) -> Figure:
    """Draw the seconds that each part of a step takes, with a bar for each kind of step.

    The left axes show all parts; the right axes show all parts but the one named `model`, on a
    finer scale.
    """
    made, (left, right) = figure(10, 0.45 * len(spent) + 1.6, ncols=2, sharey=True)
    parts = list(next(iter(spent.values())))
    for axes, scale, shown in (
        (left, 1e3, parts),
        (right, 1e6, [part for part in parts if part != model]),
    ):
        starts = [0.0] * len(spent)
        for part in shown:
            widths = [scale * each[part] for each in spent.values()]
            colour = CYCLE[parts.index(part)]
            label = part if axes is left else None
            axes.barh(range(len(spent)), widths, 0.55, left=starts, color=colour, label=label)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    left.set_yticks(range(len(spent)), list(spent))
    left.invert_yaxis()
    left.set(xlabel="milliseconds a step")
    right.set(xlabel="microseconds a step")
    made.legend(
        loc="outside lower center", ncols=len(parts), frameon=False, labelcolor=INK, fontsize=9
    )
    title(left, "Where a step's time goes")
    title(right, "The same without the model")
    return made

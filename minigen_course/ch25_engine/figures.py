"""Figures of an engine's throughput, one technique after another, and of the time in a step."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.figures.style import BLUE, CYCLE, FAINT, INK, PALE, QUIET, arrow, figure, title


def ladder(rates: Mapping[str, float], baseline: str) -> Figure:
    """Draw the tokens per second of each way of serving, and the factor over the baseline's."""
    made, axes = figure(8.5, 0.42 * len(rates) + 1.0)
    one = rates[baseline]
    axes.barh(range(len(rates)), list(rates.values()), 0.6, color=BLUE)
    for row, rate in enumerate(rates.values()):
        times = "the baseline" if rate == one else f"{rate / one:.2g} times the baseline"
        axes.text(rate, row, f"  {rate:.0f} ({times})", va="center", color=INK)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set(xlabel="output tokens per second", xlim=(0, 1.45 * max(rates.values())))
    title(axes, "The same requests, served in five ways")
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
    left.set(xlabel="milliseconds per step")
    right.set(xlabel="microseconds per step")
    made.legend(
        loc="outside lower center", ncols=len(parts), frameon=False, labelcolor=INK, fontsize=9
    )
    title(left, "Where a step's time goes")
    title(right, "The same without the model")
    return made


def loop() -> Figure:
    """Draw one step of an engine: four calls in a ring, and the way of a request through them."""
    made, axes = figure(9.4, 3.0)
    boxes = {  # name: (x, y, text, whether it is one of the four calls)
        "request": (0.0, 2.0, "request:\na sequence per answer", False),
        "waiting": (2.3, 2.0, "waiting\nsequences", False),
        "schedule": (4.6, 2.0, "1. schedule\nwho runs, how much", True),
        "logits": (6.9, 2.0, "2. logits\none pass, all rows", True),
        "sample": (6.9, 0.5, "3. sample\na token per row", True),
        "commit": (4.6, 0.5, "4. commit\nappend, free blocks", True),
        "caller": (2.3, 0.5, "tokens to\ntheir callers", False),
    }
    ways = "request>waiting waiting>schedule schedule>logits logits>sample sample>commit"
    for pair in f"{ways} commit>caller commit>schedule".split():
        (x, y, *_), (to_x, to_y, *_) = (boxes[name] for name in pair.split(">"))
        across, up = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        start, end = (x + 0.95 * across, y + 0.42 * up), (to_x - 0.95 * across, to_y - 0.42 * up)
        arrow(axes, start, end)
    for x, y, text, is_call in boxes.values():
        axes.add_patch(Rectangle((x - 0.95, y - 0.42), 1.9, 0.84, color=PALE if is_call else FAINT))
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)
    axes.text(4.72, 1.25, "unfinished ones\nrun again", va="center", fontsize=8, color=QUIET)
    axes.set(xlim=(-1.0, 7.95), ylim=(0.0, 2.5))
    axes.axis("off")
    return made

"""Figures of what batching gains: by batch size, by the spread of answers, and in latency."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minigen_course.figures.style import AMBER, BLUE, CYCLE, INK, QUIET, figure, title


def gains(
    measured: Mapping[int, float],
    formulas: Mapping[str, Mapping[int, float]],
    knee: float | None = None,
) -> Figure:
    """Draw the seconds of a step against its number of sequences, and the gain of each doubling.

    `formulas` has the seconds that each formula gives, by its name. The doublings are those of
    1, 2, 4, ... sequences. A line marks the `knee`, if it lies among the measured sizes.
    """
    made, (left, right) = figure(10, 3.4, ncols=2)
    sizes = list(measured)
    left.plot(sizes, [1e3 * measured[size] for size in sizes], "o-", color=BLUE, label="measured")
    for (name, found), dashes in zip(formulas.items(), ((4, 2), (1, 2)), strict=False):
        line = [1e3 * found[size] for size in sizes]
        left.plot(sizes, line, linestyle=(0, dashes), color=INK, label=f"by the {name}")
    if knee is not None and min(sizes) < knee < max(sizes):
        left.axvline(knee, ymax=0.55, color=QUIET, linewidth=0.8, label="knee, by the sum")
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.set(xlabel="sequences in a step (log scale)", ylabel="milliseconds", ylim=(0, None))
    left.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(left, "What a step takes")
    pairs = list(itertools.pairwise(size for size in sizes if size.bit_count() == 1))
    bars = {"measured": measured} | {f"by the {name}": each for name, each in formulas.items()}
    width = 0.8 / len(bars)
    for number, (label, found) in enumerate(bars.items()):
        heights = [100 * gain(found, *pair) for pair in pairs]
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(pairs))]
        right.bar(places, heights, 0.95 * width, color=(BLUE, QUIET, AMBER)[number], label=label)
    right.set_xticks(range(len(pairs)), [f"{few} to {many}" for few, many in pairs])
    right.set(xlabel="sequences in a step", ylabel="more tokens per second, in %")
    right.margins(y=0.45)  # room for the legend
    right.legend(frameon=False, labelcolor=INK, loc="upper right")
    title(right, "What each doubling of the batch gains")
    return made


def gain(seconds: Mapping[int, float], few: int, many: int) -> float:
    """Return the gain in tokens per second from `few` to `many` sequences; 1.0 is twice as many.

    >>> gain({1: 4.0, 2: 6.4}, 1, 2)
    0.25
    """
    return many / seconds[many] / (few / seconds[few]) - 1


def spread(points: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draw static over continuous steps against the longest answer of a batch over the mean answer.

    On the line, both ratios are equal. Each kind of traffic has a colour and its name.
    """
    made, axes = figure(7, 3.8)
    most = max(x for found in points.values() for x, _ in found)
    axes.plot([1, most], [1, most], color=QUIET, linestyle=(0, (4, 2)), label="max / mean itself")
    for (name, found), colour in zip(points.items(), CYCLE, strict=False):
        x, y = zip(*found, strict=True)
        axes.plot(x, y, "o", color=colour, label=name)
    axes.set(
        xlabel="longest answer of a static batch / mean answer",
        ylabel="times as many steps",
        ylim=(0.8, None),
    )
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(axes, "Steps of static batching, relative to continuous batching")
    return made


def stutter(
    token_times: Mapping[str, Sequence[Sequence[float]]], arrives: float, limit: float | None = None
) -> Figure:
    """Draw the gaps between tokens over time, with one axes per policy.

    `token_times` has, per policy, the times in seconds at which the tokens of each other request
    came. `arrives` is the time at which the long prompt arrives. `limit`, in seconds, is the gap
    that a reader starts to notice.
    """
    made, grid = figure(10, 3.2, ncols=len(token_times), sharey=True, sharex=True, squeeze=False)
    for axes, (name, requests) in zip(grid.flat, token_times.items(), strict=True):
        worst = 0.0
        for times, colour in zip(requests, CYCLE, strict=False):
            gaps = [1e3 * (late - early) for early, late in itertools.pairwise(times)]
            axes.vlines(times[1:], 0, gaps, color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(times[1:], gaps, ".", color=colour, markersize=4)
            worst = max([worst, *gaps])
        axes.axvline(arrives, color=AMBER, linewidth=1.2)
        if limit is not None:
            axes.axhline(1e3 * limit, color=QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.set(xlabel="seconds", ylim=(0, None))
        title(axes, f"{name}: {worst:.0f} ms at worst")
    grid[0, 0].set_ylabel("milliseconds since the last token")
    return made

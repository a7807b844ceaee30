"""Which processors of a chip have programs to run, and what splitting a context does for it."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.teach.measuring import significant
from minigen.teach.waves import (
    LAUNCH_SECONDS,
    Chip,
    Decoding,
    Wave,
    seconds,
    split_choices,
    waves,
)
from minigen.viz.style import BLUE, FAINT, INK, ORANGE, QUIET, SKY, figure, title

MICRO = 1e6
MOST_EDGES = 40  # waves beyond which a line between them would hide them


def fill_chip(work: Decoding, chip: Chip, splits: int, resident: int) -> Figure:
    """Left: the chip's processors over time. Right: the time for each number of splits.

    Raises `ValueError` for more splits than the context has tiles.
    """
    choices = split_choices(work)
    if splits not in choices:
        raise ValueError(
            f"{work.context:,} tokens are {work.tiles(1)} tiles: split them into at most "
            f"{choices[-1]}, so that each split has one."
        )
    made, (left, right) = figure(11.5, 4.0, ncols=2, width_ratios=(1, 1))
    run = waves(work, chip, splits, resident)
    _processors(left, run, chip, resident)
    busy = min(run[0].num_programs, chip.processors)
    count = "1 wave" if len(run) == 1 else f"{len(run)} waves"
    programs = f"{work.num_programs(splits):,} programs, {count}"
    title(left, f"{programs}: {busy} of {chip.processors} busy")
    _times(right, work, chip, choices, splits, resident)
    return made


def _processors(axes: Axes, run: Sequence[Wave], chip: Chip, resident: int) -> None:
    """A row for each processor, darker where it holds more programs at once."""
    for number, wave in enumerate(run):
        each, more = divmod(wave.num_programs, chip.processors)
        for first, last, held in ((0, more, each + 1), (more, chip.processors, each)):
            if held and last > first:
                axes.add_patch(
                    Rectangle(
                        (MICRO * wave.begin, first),
                        MICRO * (wave.end - wave.begin),
                        last - first,
                        facecolor=SKY if number % 2 else BLUE,
                        alpha=0.35 + 0.65 * held / resident,
                        edgecolor="white",
                        linewidth=0.8 if len(run) <= MOST_EDGES else 0,
                    )
                )
    axes.set(xlim=(0, MICRO * run[-1].end * 1.02), ylim=(chip.processors, 0))
    axes.set_facecolor("#f2f2f2")
    axes.set(xlabel="microseconds of the first pass", ylabel="processor")


def _times(
    axes: Axes,
    work: Decoding,
    chip: Chip,
    choices: Sequence[int],
    splits: int,
    resident: int,
) -> None:
    """Stacked: the first pass and, where there is one, the second."""
    for each in choices:
        first = MICRO * waves(work, chip, each, resident)[-1].end
        second = MICRO * seconds(work, chip, each, resident) - first
        place = math.log2(each)
        axes.bar(place, first, color=ORANGE if each == splits else FAINT, width=0.75)
        axes.bar(place, second, bottom=first, color=QUIET, width=0.75)
    floor = MICRO * work.kv_bytes / chip.bandwidth
    axes.bar(0, 0, color=QUIET, label=f"the second pass ({MICRO * LAUNCH_SECONDS:g} µs to start)")
    alone = f"memory alone: {significant(floor)} µs"
    axes.axhline(floor, label=alone, color=INK, linewidth=1, linestyle="--")
    axes.set_xticks([math.log2(each) for each in choices], [str(each) for each in choices])
    axes.set(xlabel="splits", ylabel="microseconds, as the model has it")
    axes.set_ylim(0, 1.25 * max(MICRO * seconds(work, chip, each, resident) for each in choices))
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper right")
    chosen = MICRO * seconds(work, chip, splits, resident)
    share = floor / chosen
    title(axes, f"Splits: {splits}; {significant(chosen)} µs, {share:.0%} of what memory gives")

"""Gantt charts of ranks, and what idles: pipelines, their schedules, and rings."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from minigen_course.ch42_pipeline.lesson import (
    COMPUTE,
    MESSAGE,
    Span,
    Timeline,
    interleaved,
    least_bubble,
    pass_once,
)
from minigen_course.ch42_pipeline.reference import bubble
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    draw_labels,
    figure,
    title,
)

COLOURS = (*CYCLE, "#8c6bb1", "#a6761d")
MOST_NUMBERS = 400  # of boxes; if there are more, they have no numbers
SHADES = (1.0, 0.72, 0.5, 0.34)  # of a micro-batch's groups of layers


def timelines(
    runs: Mapping[str, Timeline],
    *,
    upto: float | None = None,
    row: str = "stage",
    unit: str = "ms",
    numbers: str = "batch",
) -> Figure:
    """Draw a row per rank over time for each run, all on one scale, up to a moment in seconds.

    A box is a micro-batch (or a block of a ring) that the rank computes, and a black line below
    it a message. Grey is idle time. `numbers` says what stands in a box: its `batch`, or its
    `step`. `unit` is "ms", or the name of what one second stands for.
    """
    heights = [each.num_ranks for each in runs.values()]
    made, every = figure(
        9.5,
        0.55 + sum(0.62 + 0.36 * each for each in heights),
        nrows=len(runs),
        squeeze=False,
        height_ratios=heights,
    )
    scale = 1e3 if unit == "ms" else 1.0
    end = max((each.seconds for each in runs.values()), default=0.0) or 1.0
    end = min(upto, end) if upto else end
    for axes, (name, run) in zip(every[:, 0], runs.items(), strict=True):
        _draw(axes, run, end, scale, numbers)
        shown = run.upto(end)
        idle = bubble(shown.computing(), run.num_ranks)
        title(axes, f"{name}: {scale * shown.seconds:.4g} {unit}, idle for {idle:.0%} of the time")
        axes.set(xlim=(0, scale * end), ylim=(run.num_ranks - 0.5, -0.5))
        axes.set_yticks(range(run.num_ranks))
        axes.set_yticklabels([f"{row} {rank}" for rank in range(run.num_ranks)])
        axes.tick_params(axis="y", length=0)
    every[-1, 0].set_xlabel("ms since the first start" if unit == "ms" else f"time in {unit}")
    return made


def _draw(axes: Axes, run: Timeline, end: float, scale: float, numbers: str) -> None:
    grey = [_box(rank, 0.4, 0.0, scale * min(run.seconds, end)) for rank in range(run.num_ranks)]
    axes.add_collection(PolyCollection(grey, facecolors=FAINT, linewidths=0), autolim=False)
    shown = [each for each in run.spans if each.start - run.start < end]
    computed = [each for each in shown if each.kind == COMPUTE and each.seconds > 0]
    boxes = [_box(each.rank, 0.4, *_place(each, run, scale)) for each in computed]
    colours = [_shade(COLOURS[each.batch % len(COLOURS)], each.chunk) for each in computed]
    axes.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.8),
        autolim=False,
    )
    sent = [each for each in shown if each.kind == MESSAGE]
    lines = [_box(each.rank + 0.42, 0.04, *_place(each, run, scale)) for each in sent]
    axes.add_collection(PolyCollection(lines, facecolors=INK, linewidths=0), autolim=False)
    if len(computed) <= MOST_NUMBERS:
        labels = []
        for each in computed:
            begin, stop = _place(each, run, scale)
            if stop - begin > 0.012 * scale * end and stop <= scale * end:
                text = str(each.batch if numbers == "batch" else each.step)
                labels.append(((begin + stop) / 2, float(each.rank), text, _ink(each)))
        draw_labels(axes, labels)


def _place(span: Span, run: Timeline, scale: float) -> tuple[float, float]:
    return scale * (span.start - run.start), scale * (span.end - run.start)


def _box(rank: float, half: float, begin: float, end: float) -> list[tuple[float, float]]:
    top, bottom = rank - half, rank + half
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _shade(colour: str, chunk: int) -> tuple[float, float, float]:
    strength = SHADES[chunk % len(SHADES)]
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (
        1 - strength * (1 - red),
        1 - strength * (1 - green),
        1 - strength * (1 - blue),
    )


def _ink(span: Span) -> str:
    dark = COLOURS[span.batch % len(COLOURS)] in (BLUE, GREEN, ORANGE, "#8c6bb1", "#a6761d")
    return "white" if dark and span.chunk == 0 else INK


def bubble_curves(
    num_stages: Sequence[int], most: int = 32, measured: Mapping[int, float] | None = None
) -> Figure:
    """Draw the idle fraction by the number of micro-batches: lines by formula, dots simulated.

    `measured` has the idle fraction of real stages by micro-batches, for the first of `num_stages`.
    """
    made, axes = figure(8, 3.6)
    counts = list(range(1, most + 1))
    for stages, colour in zip(num_stages, CYCLE, strict=False):
        right = [100 * least_bubble(stages, count) for count in counts]
        axes.plot(counts, right, color=colour, label=f"{stages} stages")
        some = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
        found = [bubble(pass_once([1.0] * stages, count).computing(), stages) for count in some]
        axes.plot(some, [100 * each for each in found], "o", color=colour, markersize=4)
        axes.plot(4 * stages, 100 * least_bubble(stages, 4 * stages), "s", color=colour, mfc="w")
    if measured:
        seen = [100 * each for each in measured.values()]
        axes.plot(list(measured), seen, "X", color=INK, markersize=8, label="measured here")
    axes.set(xlabel="micro-batches m", ylabel="idle, per cent of the time", ylim=(0, 100))
    axes.set_xlim(0.5, most + 0.5)
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "The bubble (p - 1) / (m + p - 1); squares: four micro-batches per stage")
    return made


def groups_and_messages(num_stages: int, num_batches: int, transfer: float) -> Figure:
    """Draw the time of one pass by the number of groups per device, with free and real transfers.

    A device takes 1 for a micro-batch, and a transfer `transfer`.
    """
    made, axes = figure(8, 3.2)
    groups = [1, 2, 3, 4, 6, 8]
    width = 0.38
    for shift, seconds, colour, name in (
        (-0.5, 0.0, BLUE, "free transfers"),
        (0.5, transfer, ORANGE, f"transfers of {transfer:g}"),
    ):
        ends = [interleaved([1.0] * num_stages, num_batches, each, seconds).end for each in groups]
        places = np.arange(len(groups)) + shift * width
        axes.bar(places, ends, width, color=colour, label=name)
        for place, end in zip(places, ends, strict=True):
            axes.text(place, end, f"{end:.1f}", ha="center", va="bottom", fontsize=8, color=INK)
    axes.axhline(num_batches, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xticks(range(len(groups)), [str(each) for each in groups])
    axes.set(xlabel="groups of layers per device, v", ylabel="time of one pass")
    axes.set_ylim(0, 1.35 * max(num_batches + num_stages, 1))
    axes.legend(frameon=False, loc="upper right", ncols=2, labelcolor=INK)
    title(axes, f"{num_stages} devices, {num_batches} micro-batches; dashed: without a bubble")
    return made


def stage_work(work: Sequence[float], ways: Mapping[str, Sequence[range]]) -> Figure:
    """Draw the work of each stage for several ways of dealing layers out; the head is orange.

    The last entry of `work` is the output head's.
    """
    num_rows = sum(map(len, ways.values())) + len(ways) - 1
    made, axes = figure(8.5, 1.1 + 0.36 * num_rows)
    row, ticks, names = 0, [], []
    slowest = max(sum(work[each] for each in stage) for stages in ways.values() for stage in stages)
    for name, stages in ways.items():
        sums = [sum(work[layer] for layer in stage) for stage in stages]
        idle = 1 - sum(sums) / len(sums) / max(sums)
        axes.text(
            1.02 * slowest,
            row + (len(stages) - 1) / 2,
            f"idle for {idle:.0%}\nonce it is full",
            va="center",
            color=INK,
            fontsize=9,
        )
        for number, (stage, total) in enumerate(zip(stages, sums, strict=True)):
            head = work[-1] if len(work) - 1 in stage else 0.0
            axes.barh(row, max(sums), height=0.72, color=FAINT)
            axes.barh(row, total - head, height=0.72, color=BLUE)
            axes.barh(row, head, left=total - head, height=0.72, color=ORANGE)
            layers = len(stage) - (head > 0)
            axes.text(0.3, row, f"{layers} layers", va="center", color="white", fontsize=9)
            ticks.append(row)
            names.append(f"{name}, stage {number}")
            row += 1
        row += 1
    axes.set_yticks(ticks, names)
    axes.set(ylim=(row - 1.4, -0.6), xlim=(0, 1.25 * slowest))
    axes.set_xlabel("work in layers; orange is the output head, grey is waiting")
    title(axes, "The slowest stage sets the pace")
    return made

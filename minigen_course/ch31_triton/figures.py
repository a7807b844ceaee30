"""Bytes of separate operators against one fused kernel, and which elements each program touches."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minigen_course.figures.style import BLUE, CYCLE, FAINT, INK, QUIET, figure, title
from minigen_course.lab.memory_watch import Operator
from minigen_course.lab.triton_interpreter import Access, bytes_moved


def fused_bytes(
    apart: Mapping[str, Sequence[Operator]], fused: Mapping[str, int], unit: int = 1000
) -> Figure:
    """For each part of a layer, its operators' bytes side by side; below them, its kernel's.

    Bytes are in `unit` (1000: kB). A number says how many operators there are.
    """
    made, axes = figure(9, 0.9 + 0.95 * len(apart))
    most = max(sum(each.num_bytes for each in parts) for parts in apart.values()) / unit
    for place, (name, parts) in enumerate(apart.items()):
        started = 0.0
        for number, part in enumerate(parts):
            width = part.num_bytes / unit
            colour = CYCLE[1 + number % (len(CYCLE) - 1)]
            axes.barh(
                place - 0.2, width, left=started, height=0.36, color=colour, edgecolor="white"
            )
            started += width
        axes.text(
            started + 0.01 * most, place - 0.2, f"{len(parts)} operators", va="center", color=INK
        )
        axes.barh(place + 0.2, fused[name] / unit, height=0.36, color=BLUE)
        axes.text(fused[name] / unit + 0.01 * most, place + 0.2, "1 kernel", va="center", color=INK)
    axes.set_yticks(range(len(apart)), list(apart))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * most)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel({1000: "kB", 1_000_000: "MB"}.get(unit, f"{unit:,} bytes") + " moved")
    title(axes, "Each operator reads what the one before has just written")
    return made


def lanes_in_use(width: int, blocks: Sequence[int]) -> Figure:
    """Of blocks that are powers of two, the lanes that rows of `width` numbers use."""
    made, axes = figure(9, 0.9 + 0.4 * len(blocks))
    for place, block in enumerate(blocks):
        lanes = -(-width // block) * block
        axes.barh(place, width, color=BLUE, height=0.6)
        axes.barh(place, lanes - width, left=width, color=FAINT, height=0.6)
        text = f"{-(-width // block)} x {block:,}, {width / lanes:.0%} in use"
        axes.text(lanes, place, f" {text}", va="center", color=QUIET)
    axes.set_yticks(range(len(blocks)), [f"{block:,}" for block in blocks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(-(-width // block) * block for block in blocks))
    axes.set(xlabel="lanes; the pale ones are masked", ylabel="BLOCK")
    title(axes, f"A row of {width:,} numbers in blocks")
    return made


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

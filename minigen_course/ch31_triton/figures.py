"""Bytes moved with and without kernel fusion, and the elements that each Triton program touches."""

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
    """Draw the bytes that each part of a layer moves: by its operators, and below by its kernel.

    `apart` has the separate operators of each part by name, `fused` the bytes of the kernel that
    fuses them. The x axis counts in units of `unit` bytes (1000 for kB).
    """
    made, axes = figure(9, 0.9 + 0.95 * len(apart))
    most = max(sum(each.num_bytes for each in operators) for operators in apart.values()) / unit
    for row, (name, operators) in enumerate(apart.items()):
        end = 0.0
        for index, operator in enumerate(operators):
            width = operator.num_bytes / unit
            colour = CYCLE[1 + index % (len(CYCLE) - 1)]  # without the first, the kernel's colour
            axes.barh(row - 0.2, width, left=end, height=0.36, color=colour, edgecolor="white")
            end += width
        label = f"{len(operators)} operators"
        axes.text(end + 0.01 * most, row - 0.2, label, va="center", color=INK)
        axes.barh(row + 0.2, fused[name] / unit, height=0.36, color=BLUE)
        axes.text(fused[name] / unit + 0.01 * most, row + 0.2, "1 kernel", va="center", color=INK)
    axes.set_yticks(range(len(apart)), list(apart))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * most)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel({1000: "kB", 1_000_000: "MB"}.get(unit, f"{unit:,} bytes") + " moved")
    gains = [sum(each.num_bytes for each in apart[name]) / fused[name] for name in apart]
    title(
        axes, f"Operators move {min(gains):.1f} to {max(gains):.1f} times the bytes of one kernel"
    )
    return made


def lanes_in_use(width: int, blocks: Sequence[int]) -> Figure:
    """Draw how many lanes a row of `width` numbers uses and masks, for several values of BLOCK.

    The row is loaded in as many Triton blocks as it needs; `blocks` are their sizes in lanes, one
    lane per number.
    """
    made, axes = figure(9, 0.9 + 0.4 * len(blocks))
    blocks_per_row = [-(-width // block) for block in blocks]  # rounded up
    lanes_per_row = [count * block for count, block in zip(blocks_per_row, blocks, strict=True)]
    for row, (block, num_blocks, num_lanes) in enumerate(
        zip(blocks, blocks_per_row, lanes_per_row, strict=True)
    ):
        axes.barh(row, width, color=BLUE, height=0.6)
        axes.barh(row, num_lanes - width, left=width, color=FAINT, height=0.6)
        text = f"{num_blocks} x {block:,}, {width / num_lanes:.0%} in use"
        axes.text(num_lanes, row, f" {text}", va="center", color=QUIET)
    axes.set_yticks(range(len(blocks)), [f"{block:,}" for block in blocks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(lanes_per_row))
    axes.set(xlabel="lanes (pale: masked)", ylabel="BLOCK")
    use = sorted(width / num_lanes for num_lanes in lanes_per_row)
    title(axes, f"A row of {width:,} numbers uses {use[0]:.0%} to {use[-1]:.0%} of its lanes")
    return made


Program = tuple[int, int, int]  # its tl.program_id on the three axes of the grid
_MAX_COUNTED = 400  # elements; a larger tensor is drawn without the counts of its accesses
_MAX_HEIGHT = 3.0  # inches
_MAX_LINED = 40  # rows or columns; a larger tensor is drawn without lines between elements
_DARKEN = 0.6  # factor on the brightness each time that the palette starts again


def draw_programs(
    accesses: Sequence[Access],
    shapes: Mapping[str, tuple[int, int]],
    program: Program | None = None,
    width: float = 9.0,
) -> Figure:
    """Draw each tensor, with each element in the colour of the last program that touched it.

    `shapes` are the rows and columns of each tensor by name. An element that was loaded or stored
    more than once shows how often, if the tensor is small. With `program`, only the elements of
    that program are coloured; those of the others are pale. `width` is in inches.
    """
    programs = sorted({access.program for access in accesses})
    rows = max(num_rows for num_rows, _ in shapes.values())
    made, axes = figure(
        width, 1.4 + min(0.22 * max(rows, 4), _MAX_HEIGHT), ncols=len(shapes), squeeze=False
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
    num_accesses: Counter[int] = Counter()  # by offset
    for access in sorted(accesses, key=lambda each: each.program == chosen):  # chosen one on top
        pale = chosen is not None and access.program != chosen
        colour = to_rgb(FAINT) if pale else _colour_of(programs.index(access.program))
        colours[list(access.offsets)] = colour
        num_accesses.update(access.offsets)
    axes.imshow(colours.reshape(*shape, 3), aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
    if max(shape) <= _MAX_LINED:
        axes.grid(which="minor", color="white", linewidth=0.8 if max(shape) <= 24 else 0.4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="column", ylabel="row")
    if shape[0] == 1:
        axes.set(ylabel="", yticks=[])
    if shape[0] * shape[1] <= _MAX_COUNTED:
        for offset, count in num_accesses.items():
            if count > 1:
                axes.text(
                    offset % shape[1],
                    offset // shape[1],
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black",
                    bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "linewidth": 0},
                )


def _colour_of(index: int) -> tuple[float, ...]:
    """Return the RGB colour of a program: the palette in turn, darker in each further round."""
    num_rounds, colour_id = divmod(index, len(CYCLE))
    return tuple(channel * _DARKEN**num_rounds for channel in to_rgb(CYCLE[colour_id]))

"""What one program of paged decode loads, and which multiprocessors have programs to run."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen_course.ch33_paged_attention.lesson import (
    ASSUMED,
    Assumed,
    Chip,
    Decoding,
    Wave,
    seconds,
    split_choices,
    waves,
)
from minigen_course.figures.show import significant
from minigen_course.figures.style import BLUE, FAINT, INK, ORANGE, QUIET, SKY, figure, title
from minigen_course.lab.triton_interpreter import Access

Program = tuple[int, int, int]


def cells_loaded(
    accesses: Sequence[Access], keys: Tensor, program: Program | None = None
) -> Counter[tuple[int, int, int]]:
    """Count the programs that load the key of each (block, slot, KV head): all, or only `program`.

    `keys` is the kernel's argument: blocks x block_size x kv_heads x head_dim.
    """
    strides = keys.stride()[:3]
    found: Counter[tuple[int, int, int]] = Counter()
    for access in accesses:
        if access.tensor == "keys" and program in (None, access.program):
            found.update({_place(offset, strides) for offset in access.offsets})
    return found


def _place(offset: int, strides: Sequence[int]) -> tuple[int, int, int]:
    block, rest = divmod(offset, strides[0])
    slot, rest = divmod(rest, strides[1])
    return block, slot, rest // strides[2]


def pool_loads(
    accesses: Sequence[Access], keys: Tensor, tables: Tensor, lengths: Tensor, program: Program
) -> Figure:
    """Draw a layer's keys, block by block, and the tables: what one program loads, and what all do.

    A column is a slot's key of one KV head. Raises `ValueError` for a program that is not among the
    accesses.
    """
    block_size, kv_heads = keys.shape[1:3]
    programs = {access.program for access in accesses}
    if program not in programs:
        raise ValueError(f"There is no program {program}; they go up to {max(programs)}.")
    own, loaded = cells_loaded(accesses, keys, program), cells_loaded(accesses, keys)
    made, (left, right) = figure(11, 1.3 + 0.27 * len(keys), ncols=2, width_ratios=(3, 2))
    colours = np.full((len(keys), block_size * kv_heads, 3), to_rgb("white"))
    for cells, colour in ((loaded, FAINT), (own, ORANGE)):
        for block, slot, head in cells:
            colours[block, slot * kv_heads + head] = to_rgb(colour)
    left.imshow(colours, aspect="auto", interpolation="nearest")
    _lines(left, colours.shape[:2])
    for slot in range(1, block_size):
        left.axvline(slot * kv_heads - 0.5, color=QUIET, linewidth=1)
    left.set_xticks([slot * kv_heads + (kv_heads - 1) / 2 for slot in range(block_size)])
    left.set_xticklabels([f"slot {slot}" for slot in range(block_size)])
    heads = ", ".join(f"KV head {head}" for head in range(kv_heads))
    left.set(xlabel=f"in each slot: {heads}", ylabel="block", yticks=range(len(keys)))
    kv_head, sequence, split = program
    title(left, f"KV head {kv_head}, sequence {sequence}, split {split}: {len(own)} keys loaded")
    _tables(right, accesses, tables, lengths, block_size, program)
    return made


def _tables(
    axes: Axes,
    accesses: Sequence[Access],
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    program: Program,
) -> None:
    """Draw the block tables; the entries that the program loads are coloured."""
    entries = {
        offset
        for access in accesses
        if access.tensor == "tables" and access.program == program
        for offset in access.offsets
    }
    num_rows, width = tables.shape
    colours = np.full((num_rows, width, 3), to_rgb("white"))
    for row in range(num_rows):
        for entry in range(-(-int(lengths[row]) // block_size)):
            loaded = row * tables.stride(0) + entry in entries
            colours[row, entry] = to_rgb(ORANGE if loaded else FAINT)
            block, ink = str(int(tables[row, entry])), "white" if loaded else INK
            axes.text(entry, row, block, ha="center", va="center", color=ink, fontsize=10)
    axes.imshow(colours, aspect="equal", interpolation="nearest")
    _lines(axes, (num_rows, width))
    axes.set(xlabel="entry", xticks=range(width), yticks=range(num_rows))
    axes.set_yticklabels([f"sequence {row}" for row in range(num_rows)])
    title(axes, "Block tables: entries that it looks up")


def _lines(axes: Axes, shape: tuple[int, ...]) -> None:
    axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
    axes.xaxis.remove_overlapping_locs = False  # else ticks in the middle of a slot are hidden
    axes.grid(which="minor", color="#bbbbbb", linewidth=0.5)
    axes.tick_params(which="both", length=0)


def bytes_bars(moved: dict[str, dict[str, int]], required: int) -> Figure:
    """Draw one stacked bar of bytes moved per method; the line marks the bytes required."""
    made, axes = figure(9, 1.2 + 0.45 * len(moved))
    parts = list(dict.fromkeys(part for each in moved.values() for part in each))
    colours = dict(zip(parts, (BLUE, SKY, ORANGE, QUIET, FAINT), strict=False))
    for row, each in enumerate(moved.values()):
        left = 0.0
        for part, count in each.items():
            axes.barh(row, count / required, left=left, color=colours[part], height=0.6)
            left += count / required
        axes.text(left + 0.05, row, f"{left:.2f}", va="center", color=INK, fontsize=9)
    for part in parts:
        axes.barh(0, 0, color=colours[part], label=part)
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(moved)), list(moved))
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.margins(x=0.08)
    axes.set_xlabel("bytes moved, as multiples of the keys and values that must be read (dashed)")
    made.legend(loc="outside right upper", frameon=False, labelcolor=INK, fontsize=9)
    return made


MICRO = 1e6
MOST_EDGES = 40  # with more waves than this, edges would hide them


def fill_chip(
    work: Decoding, chip: Chip, splits: int, resident: int, times: Assumed = ASSUMED
) -> Figure:
    """Draw the chip's processors over time (left), and the time by number of splits (right).

    Raises `ValueError` for more splits than the context has tiles.
    """
    choices = split_choices(work)
    if splits not in choices:
        raise ValueError(
            f"{work.context:,} tokens are {work.tiles(1)} tiles: split them into at most "
            f"{choices[-1]}, so that each split has one."
        )
    made, (left, right) = figure(11.5, 4.0, ncols=2, width_ratios=(1, 1))
    run = waves(work, chip, splits, resident, times)
    _processors(left, run, chip, resident)
    busy = min(run[0].num_programs, chip.processors)
    count = "1 wave" if len(run) == 1 else f"{len(run)} waves"
    programs = f"{work.num_programs(splits):,} programs, {count}"
    last = min(run[-1].num_programs, chip.processors)
    tail = f", {last} in the last" if len(run) > 1 else ""
    title(left, f"{programs}: {busy} of {chip.processors} busy{tail}")
    _times(right, work, chip, choices, splits, resident, times)
    return made


def _processors(axes: Axes, run: Sequence[Wave], chip: Chip, resident: int) -> None:
    """Draw a row per processor, darker where it runs more programs at once."""
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
    times: Assumed,
) -> None:
    """Draw the times stacked: the first pass and, if the context is split, the second."""
    for each in choices:
        first = MICRO * waves(work, chip, each, resident, times)[-1].end
        second = MICRO * seconds(work, chip, each, resident, times) - first
        place = math.log2(each)
        axes.bar(place, first, color=ORANGE if each == splits else FAINT, width=0.75)
        axes.bar(place, second, bottom=first, color=QUIET, width=0.75)
    floor = MICRO * work.kv_bytes / chip.bandwidth
    axes.bar(0, 0, color=QUIET, label=f"the second pass ({MICRO * times.launch:g} µs to start)")
    alone = f"memory alone: {significant(floor)} µs"
    axes.axhline(floor, label=alone, color=INK, linewidth=1, linestyle="--")
    axes.set_xticks([math.log2(each) for each in choices], [str(each) for each in choices])
    axes.set(xlabel="splits", ylabel="microseconds, as the model has it")
    longest = max(seconds(work, chip, each, resident, times) for each in choices)
    axes.set_ylim(0, 1.25 * MICRO * longest)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper right")
    chosen = MICRO * seconds(work, chip, splits, resident, times)
    share = floor / chosen
    title(axes, f"Splits: {splits}; {significant(chosen)} µs, {share:.0%} of what memory gives")

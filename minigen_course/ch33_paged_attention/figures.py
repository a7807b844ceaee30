"""Pictures of paged decode: lookups, a group's products, loads, a chip's programs, and splits."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
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
    best_splits,
    seconds,
    split_choices,
    waves,
)
from minigen_course.figures.show import significant
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PINK,
    QUIET,
    SKY,
    arrow,
    figure,
    title,
)
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


COLOURS = (SKY, AMBER, GREEN, PINK)


def table_lookup(
    table: Sequence[int], length: int, block_size: int, num_blocks: int, position: int
) -> Figure:
    """Draw the way of a position to its slot: positions, the block table, and the pool's slots.

    Raises `ValueError` for a position that the sequence does not have.
    """
    if not 0 <= position < length:
        raise ValueError(f"There are {length} positions: choose one from 0 to {length - 1}.")
    made, axes = figure(10, 3.6)
    entry, slot = divmod(position, block_size)
    for each in range(length):
        _cell(axes, each, 4, str(each), COLOURS[each // block_size % 4], each == position)
    for each, block in enumerate(table):
        x = each * block_size
        _cell(axes, x, 2, f"block {block}", COLOURS[each % 4], each == entry, width=block_size)
        axes.text(x + 0.05, 3.06, f"entry {each}", fontsize=8, color=QUIET, va="bottom")
    owners = {block: each for each, block in enumerate(table)}
    for block in range(num_blocks):
        for each in range(block_size):
            at = block * block_size + each
            owner = owners.get(block)
            place = length if owner is None else owner * block_size + each
            used = place < length
            colour = COLOURS[(owner or 0) % 4] if used else "white"
            is_it = block == table[entry] and each == slot
            _cell(axes, at, 0, str(place) if used else "", colour, is_it)
        axes.text(block * block_size + 0.05, -0.06, f"block {block}", fontsize=8, va="top")
    found = table[entry] * block_size + slot
    middle = entry * block_size + block_size / 2
    arrow(axes, (position + 0.5, 4), (middle, 3.02), color=INK)
    arrow(axes, (middle, 2), (found + 0.5, 1.02), color=INK)
    for y, name in ((4.5, "positions"), (2.5, "block table"), (0.5, "slots of the pool")):
        axes.text(-0.3, y, name, ha="right", va="center", fontsize=10, color=INK)
    axes.set(xlim=(-4.2, max(length, num_blocks * block_size) + 0.2), ylim=(-0.6, 5.2))
    axes.axis("off")
    title(
        axes,
        f"Position {position}: entry {position} // {block_size} = {entry}, block {table[entry]}, "
        f"slot {position} % {block_size} = {slot}",
    )
    return made


def _cell(
    axes: Axes, x: float, y: float, text: str, colour: str, is_lit: bool, width: float = 1
) -> None:
    edge, thick = (ORANGE, 2.5) if is_lit else (QUIET, 0.6)
    axes.add_patch(
        Rectangle((x, y), width, 1, facecolor=colour, edgecolor=edge, lw=thick, zorder=1 + is_lit)
    )
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=9, zorder=3)


def group_products(group: int, length: int, head_dim: int, rows: int, columns: int) -> Figure:
    """Draw the two products of a grouped program, with their shapes; padding is pale.

    A tile has `rows` rows, of which `group` are query heads, and `columns` columns, of which
    `length` are tokens. Sizes are not to scale.
    """
    made, axes = figure(11, 3.9)
    high, wide, deep = 1.2, 3.2, 1.8  # of rows, tokens and dimensions, as drawn
    own, seen = high * 0.35, wide * 0.72
    top = 3.4
    matrices = (
        (0.0, deep, high, (deep, own), "queries q", (rows, head_dim)),
        (2.4, wide, deep, (seen, deep), "keys, transposed", (head_dim, columns)),
        (6.3, wide, high, (seen, own), "scores, then weights", (rows, columns)),
        (10.0, deep, wide, (deep, seen), "values", (columns, head_dim)),
        (12.5, deep, high, (deep, own), "result", (rows, head_dim)),
    )
    for x, width, height, (real_width, real_height), name, shape in matrices:
        axes.add_patch(
            Rectangle((x, top - height), width, height, facecolor=PALE, edgecolor=QUIET, lw=0.8)
        )
        axes.add_patch(Rectangle((x, top - real_height), real_width, real_height, facecolor=BLUE))
        said = f"{name}\n{shape[0]} x {shape[1]}"
        axes.text(x + width / 2, top + 0.12, said, ha="center", va="bottom", fontsize=10, color=INK)
    for x, sign in ((2.1, "·"), (5.95, "="), (9.75, "·"), (12.15, "=")):
        axes.text(x, top - high / 2, sign, ha="center", va="center", fontsize=18, color=INK)
    notes = (
        (0.0, f"{group} query heads of\none KV head; {rows - group}\nrows are padding"),
        (6.3, f"{length} tokens; {columns - length} columns\nare masked: score -inf, weight 0"),
        (12.5, f"{group} rows are stored"),
    )
    for x, said in notes:
        axes.text(x, top - high - 0.15, said, ha="left", va="top", fontsize=9, color=QUIET)
    axes.set(xlim=(-0.1, 14.5), ylim=(0.0, 4.5))
    axes.axis("off")
    return made


def split_merge(scores: Tensor, values: Tensor, bounds: Sequence[tuple[int, int]]) -> Figure:
    """Draw scores cut into splits, each split's sum and mix, and both at the largest maximum.

    `scores` and `values` are one number for each token. Weights are powers of two.
    """
    made, (left, *parts) = figure(12, 3.4, ncols=5, width_ratios=(3, 1.4, 1.4, 1.4, 1.4))
    maxima = [float(scores[begin:end].max()) for begin, end in bounds]
    highest = max(maxima)
    rows = []
    for (begin, end), maximum, colour in zip(bounds, maxima, COLOURS, strict=False):
        left.bar(range(begin, end), scores[begin:end].tolist(), color=colour)
        left.plot([begin - 0.45, end - 0.55], [maximum, maximum], color=INK, lw=1.2, ls="--")
        weights = torch.exp2(scores[begin:end] - maximum)
        rows.append((float(weights.sum()), float(weights @ values[begin:end]), maximum, colour))
    left.set(xlabel="token", ylabel="score s", xticks=range(len(scores)))
    title(left, "Each split finds its own maximum m")
    merged = [0.0, 0.0]
    for number, (total, mix, maximum, colour) in enumerate(rows):
        factor = 2 ** (maximum - highest)
        for place, part in enumerate((total, mix)):
            apart, together = parts[place], parts[2 + place]
            apart.bar(number, part, width=0.7, color=colour)
            apart.text(number, part, f"{part:.4g}", ha="center", va="bottom", fontsize=9)
            together.bar(0, factor * part, width=0.7, bottom=merged[place], color=colour)
            merged[place] += factor * part
    for axes, name in zip(parts, ("sum $l$", "mix $\\tilde O$") * 2, strict=True):
        axes.set(xlabel=name, xticks=[])
        axes.margins(x=0.3, y=0.15)
    for axes, height in zip(parts[2:], merged, strict=True):
        axes.text(0, height, f"{height:.5g}", ha="center", va="bottom", fontsize=9)
    title(parts[0], "The parts, each at its own m")
    title(parts[2], f"At m = {highest:g}: Õ / l = {merged[1] / merged[0]:.4g}")
    return made


TILES_US = [0.1 * 2 ** (exponent / 4) for exponent in range(24)]  # 0.1 to 5.4


def best_split_curves(work: Decoding, chip: Chip, resident: int, times: Assumed) -> Figure:
    """Draw the time by number of splits (left), and the best number by assumed latency (right)."""
    made, (left, right) = figure(11.5, 3.8, ncols=2)
    choices = split_choices(work)
    best = best_splits(work, chip, resident, times)
    for splits in choices:
        took = MICRO * seconds(work, chip, splits, resident, times)
        colour = ORANGE if splits == best else FAINT
        left.bar(math.log2(splits), took, color=colour, width=0.75)
        left.text(math.log2(splits), took, f"{took:.3g}", ha="center", va="bottom", fontsize=9)
    floor = MICRO * work.kv_bytes / chip.bandwidth
    left.axhline(floor, color=INK, lw=1, ls="--", label=f"memory alone: {floor:.3g} µs")
    left.set_xticks([math.log2(each) for each in choices], [str(each) for each in choices])
    left.set(xlabel="splits", ylabel="microseconds, modelled")
    left.margins(y=0.12)
    left.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(left, f"Best by the model: {best} {'split' if best == 1 else 'splits'}")
    given = MICRO * times.launch
    launches = sorted({1.0, 12.0, given})
    for launch in launches:
        found = [
            best_splits(work, chip, resident, Assumed(tile / MICRO, launch / MICRO))
            for tile in TILES_US
        ]
        is_given = launch == given
        right.step(
            TILES_US,
            [math.log2(each) for each in found],
            where="mid",
            color=ORANGE if is_given else BLUE if launch == 1.0 else GREEN,
            lw=2.2 if is_given else 1.4,
            ls="-" if is_given else "--" if launch == 1.0 else ":",
            zorder=2 if is_given else 3,
            label=f"second pass: {launch:g} µs to start",
        )
    right.plot(MICRO * times.tile, math.log2(best), "o", color=ORANGE, markersize=9)
    right.set_xscale("log", base=2)
    right.set_xticks([0.125, 0.25, 0.5, 1, 2, 4], ["0.125", "0.25", "0.5", "1", "2", "4"])
    right.set_yticks([math.log2(each) for each in choices], [str(each) for each in choices])
    right.tick_params(which="minor", length=0)
    right.set(xlabel="assumed microseconds for a tile (doubling)", ylabel="best number of splits")
    right.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(right, "Slower tiles want more splits")
    return made

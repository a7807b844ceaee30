"""Diagrams of chapter 33: a block table's lookup, a group's products, splits, their number."""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen_course.ch33_paged_attention.lesson import (
    Assumed,
    Chip,
    Decoding,
    best_splits,
    seconds,
    split_choices,
)
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
    made, (left, middle, right) = figure(12, 3.4, ncols=3, width_ratios=(3, 3, 3))
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
    bottoms = [0.0, 0.0]
    for number, (total, mix, maximum, colour) in enumerate(rows):
        factor = 2 ** (maximum - highest)
        for axes, kept, scale in ((middle, False, 1.0), (right, True, factor)):
            heights = (total * scale, mix * scale)
            for place, height in enumerate(heights):
                x = place + (0 if kept else 0.25 * (number - (len(rows) - 1) / 2))
                bottom = bottoms[place] if kept else 0.0
                axes.bar(x, height, width=0.5 if kept else 0.22, bottom=bottom, color=colour)
                if kept:
                    bottoms[place] += height
                else:
                    axes.text(x, height, f"{height:.4g}", ha="center", va="bottom", fontsize=9)
    for axes in (middle, right):
        axes.set_yscale("symlog", linthresh=1)
        axes.set(xticks=[0, 1], xticklabels=["sum l", "mix o"], ylabel="value (log above 1)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, 400)
    for place, height in enumerate(bottoms):
        right.text(place, height, f"{height:.5g}", ha="center", va="bottom", fontsize=9)
    title(middle, "The parts, each at its own maximum")
    title(right, f"At the largest maximum {highest:g}: o / l = {bottoms[1] / bottoms[0]:.4g}")
    return made


MICRO = 1e6
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

"""What one program of paged decode loads, drawn on the pool and on the block tables."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from minigen.teach.accesses import Access
from minigen.viz.style import BLUE, FAINT, INK, ORANGE, QUIET, SKY, figure, title

Program = tuple[int, int, int]


def cells_loaded(
    accesses: Sequence[Access], keys: Tensor, program: Program | None = None
) -> Counter[tuple[int, int, int]]:
    """How many programs load the key of a (block, slot, KV head); of one program, or of all.

    `keys` are blocks x block_size x kv_heads x head_dim, as the kernel was given them.
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
    """A layer's keys, block by block, and the tables: what a program loads, and what all do.

    A column is a slot's key of one KV head. Raises `ValueError` for a program that loaded nothing
    and is not of the grid.
    """
    block_size, kv_heads = keys.shape[1:3]
    programs = {access.program for access in accesses}
    if program not in programs:
        raise ValueError(f"There is no program {program}; they go up to {max(programs)}.")
    own, everybodys = cells_loaded(accesses, keys, program), cells_loaded(accesses, keys)
    made, (left, right) = figure(11, 1.3 + 0.27 * len(keys), ncols=2, width_ratios=(3, 2))
    colours = np.full((len(keys), block_size * kv_heads, 3), to_rgb("white"))
    for cells, colour in ((everybodys, FAINT), (own, ORANGE)):
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
    """The tables' numbers; the entries that the program loads are coloured."""
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
    axes.xaxis.remove_overlapping_locs = False  # where heads meet in a slot's middle
    axes.grid(which="minor", color="#bbbbbb", linewidth=0.5)
    axes.tick_params(which="both", length=0)


def bytes_bars(moved: dict[str, dict[str, int]], required: int) -> Figure:
    """Bytes that ways of attending move, a bar each, in parts; the line is what is required."""
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

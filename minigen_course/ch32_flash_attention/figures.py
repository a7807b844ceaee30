"""Online softmax tile by tile, FlashAttention's tiles on the scores and on the chip, and bytes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from minigen_course.ch32_flash_attention.lesson import Sight, fold_tiles, pairs_wanted, score_tiles
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    QUIET,
    SKY,
    arrow,
    figure,
    title,
)
from minigen_course.lab.triton_interpreter import Access


def online_softmax(scores: Tensor, values: Tensor, tile: int, seen: int) -> Figure:
    """Draw the scores, their weights exp(score - maximum so far), and the result so far.

    Keys after the first `seen` tiles are pale. The outlines are the weights before the last tile
    came; an arrow from the largest of them shows the factor by which all of them shrank. The dots
    on the right are softmax over all keys at once, which the last tile must reach.
    Raises `ValueError` unless `seen` is from 1 to the number of tiles.
    """
    folds = fold_tiles(scores, values, tile)
    if not 1 <= seen <= len(folds):
        raise ValueError(f"There are {len(folds)} tiles: seen must be from 1 to {len(folds)}.")
    now, begin, end = folds[seen - 1], (seen - 1) * tile, min(seen * tile, len(scores))
    made, (left, middle, right) = figure(12.5, 3.3, ncols=3, width_ratios=(3, 3, 2))
    places = torch.arange(len(scores)).tolist()
    colours = [FAINT if place >= end else ORANGE if place >= begin else BLUE for place in places]
    left.bar(places, scores.tolist(), color=colours)
    left.axhline(now.maximum, color=INK, linewidth=1, linestyle="--")
    left.set(xlabel="key", ylabel="score s")
    title(left, f"Tile {seen} of {len(folds)}: the maximum is {now.maximum:.2f}")
    weights = (scores[:end] - now.maximum).exp()
    middle.bar(places[:end], weights.tolist(), color=colours[:end])
    if seen > 1:
        before = (scores[:begin] - folds[seen - 2].maximum).exp()
        middle.bar(places[:begin], before.tolist(), color="none", edgecolor=QUIET, linewidth=0.8)
        if now.shrink < LEAP:
            _mark_factor(middle, int(before.argmax()), now.shrink)
    middle.set(xlabel="key", ylabel="weight exp(s - m)", ylim=(0, 1.05))
    middle.set_xlim(left.get_xlim())
    kept = f"The weights before shrink x {now.shrink:.2f}" if seen > 1 else "The first weights"
    title(middle, f"{kept}; sum {now.total:.2f}")
    answer = now.mixed / now.total
    right.bar(range(len(answer)), answer.tolist(), color=BLUE, label="answer so far")
    whole = scores.softmax(dim=0) @ values
    right.plot(range(len(whole)), whole.tolist(), "o", color=ORANGE, label="over all keys")
    right.axhline(0, color=QUIET, linewidth=0.8)
    right.set(xlabel="column of the values", ylabel="answer", xticks=range(len(whole)))
    made.legend(loc="outside lower right", frameon=False, labelcolor=INK, fontsize=9, ncols=2)
    title(right, "The answer so far")
    return made


LEAP = 0.9  # a factor above it moves too little for an arrow


def _mark_factor(axes: Axes, key: int, factor: float) -> None:
    """Draw the factor as an arrow from an old weight of 1 down to what is left of it."""
    arrow(axes, (key, 1), (key, factor), color=ORANGE, linewidth=2)
    axes.text(
        key + 0.6,
        (1 + factor) / 2,
        f"x {factor:.2f}",
        color=ORANGE,
        fontsize=11,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


COLOURS = {Sight.WHOLE: BLUE, Sight.PARTLY: ORANGE, Sight.NOTHING: FAINT}


def draw_tiles(
    num_new: int, context: int, block_m: int, block_n: int, window: int | None = None
) -> Figure:
    """Draw a row of tiles per program, coloured by what of each is seen; a line marks the mask.

    Raises `ValueError` if there are more queries than positions.
    """
    if num_new > context:
        raise ValueError(f"{num_new} queries are more than the {context} positions of the context.")
    tiles = score_tiles(num_new, context, block_m, block_n, window)
    made, axes = figure(9, 4.2)
    for tile in tiles:
        corner, size = (tile.keys[0], tile.queries[0]), (len(tile.keys), len(tile.queries))
        axes.add_patch(
            Rectangle(corner, *size, facecolor=COLOURS[tile.sight], edgecolor="white", lw=1.2)
        )
    rows = np.arange(num_new)
    for last in (rows, rows - window) if window is not None else (rows,):
        axes.step(
            np.maximum(context - num_new + last + 1, 0), rows + 0.5, where="mid", color=INK, lw=1.2
        )
    axes.set(xlim=(0, context), ylim=(num_new, 0), xlabel="key", ylabel="query")
    computed = [tile for tile in tiles if tile.sight is not Sight.NOTHING]
    pairs, wanted = sum(tile.pairs for tile in computed), pairs_wanted(num_new, context, window)
    title(
        axes,
        f"{len(computed)} of {len(tiles)} tiles computed: {pairs:,} scores for the {wanted:,} that "
        f"count, of {num_new * context:,}",
    )
    handles = [Patch(color=colour, label=sight.value) for sight, colour in COLOURS.items()]
    made.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, labelcolor=INK)
    return made


def by_length(lines: Mapping[str, Mapping[int, float]], unit: str, said: str) -> Figure:
    """Draw a line for each method over prompt lengths, on logarithmic axes to base 2."""
    made, axes = figure(8, 3.8)
    for (name, values), colour in zip(lines.items(), (ORANGE, BLUE, GREEN, AMBER), strict=False):
        lengths = sorted(values)
        axes.plot(lengths, [values[each] for each in lengths], "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{each:,}" for each in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("tokens (doubling)", color=QUIET)
    axes.set_ylabel(unit)
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, said)
    return made


def rows_by_program(accesses: Sequence[Access], widths: Mapping[str, int]) -> Figure:
    """Draw the rows of each tensor that the programs of head 0 load or store, one line per program.

    `widths` are the row widths by tensor name, in the order of the panels.
    """
    own = [each for each in accesses if each.program[1:] == (0, 0)]
    num_programs = 1 + max(each.program[0] for each in own)
    made, axes = figure(9, 1.5 + 0.2 * num_programs, ncols=len(widths), squeeze=False)
    for panel, (name, width) in zip(axes[0], widths.items(), strict=True):
        touched = [each for each in own if each.tensor == name]
        rows = [{at // width for at in each.offsets} for each in touched]
        num_rows = 1 + max((max(each) for each in rows), default=0)
        shown = np.zeros((num_programs, num_rows))
        for access, each in zip(touched, rows, strict=True):
            shown[access.program[0], list(each)] = 2 if access.is_store else 1
        colours = ListedColormap([FAINT, BLUE, ORANGE])
        panel.imshow(shown, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
        panel.set_yticks(range(num_programs))
        panel.set_yticks(np.arange(0.5, num_programs - 1), minor=True)
        panel.grid(which="minor", axis="y", color="white", linewidth=1.5)
        panel.tick_params(which="minor", length=0)
        panel.set_xlabel("row")
        loads = sum(len(each.offsets) for each in touched if not each.is_store) // width
        title(panel, f"{name}: {loads} rows loaded" if loads else f"{name}: stored")
    axes[0][0].set_ylabel("program")
    return made


Box = tuple[float, float, float, float]  # left, bottom, width, height


def _box(axes: Axes, box: Box, colour: str, label: str, inside: bool = False) -> None:
    left, bottom, width, height = box
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, edgecolor=QUIET))
    if label and inside:
        axes.text(left + width / 2, bottom + height / 2, label, ha="center", va="center")
    elif label:
        axes.text(left + width / 2, bottom - 0.12, label, ha="center", va="top", fontsize=9)


def on_chip(num_tokens: int, head_dim: int, block_m: int, block_n: int) -> Figure:
    """Draw what one program reads from memory, keeps on the chip and writes back, with shapes."""
    made, axes = figure(12, 4.6)
    axes.set_axis_off()
    axes.set(xlim=(0, 24), ylim=(0, 9.2))
    tall, step = 4.8, 1.2  # of N rows, of a tile's rows
    axes.text(0.2, 8.7, "memory (HBM)", fontsize=11, color=INK, weight="bold")
    _box(axes, (8.1, 0.5, 15.7, 7.9), "#f7f7f7", "")
    said = "on the chip (registers, shared memory): one program, tile i of queries"
    axes.text(8.1, 8.7, said, fontsize=11, color=INK, weight="bold")
    shape = f"[{num_tokens:,}, {head_dim}]"
    for left, name, tile, colour in (
        (0.3, "Q", 2, AMBER),
        (2.2, "K", 1, SKY),
        (4.1, "V", 1, SKY),
        (6.0, "O", 2, GREEN),
    ):
        _box(axes, (left, 2.2, 1.3, tall), FAINT, f"{name}\n{shape}" if name == "Q" else name)
        top = 2.2 + tall - step * tile
        _box(axes, (left, top, 1.3, step), colour, "ij"[colour == SKY], inside=True)
    m, n, d = block_m, block_n, head_dim
    _box(axes, (9.0, 4.6, 1.3, 1.6), AMBER, f"Q i\n[{m}, {d}]")
    _box(axes, (11.7, 4.9, 1.6, 1.3), SKY, f"K j, transposed\n[{d}, {n}]")
    _box(axes, (14.8, 4.6, 1.6, 1.6), PALE, f"S = scores\n[{m}, {n}]")
    _box(axes, (17.9, 4.6, 1.6, 1.6), PALE, f"P = exp(S - m)\n[{m}, {n}]")
    _box(axes, (20.8, 4.6, 1.3, 1.6), SKY, f"V j\n[{n}, {d}]")
    for at, sign in ((11.0, "x"), (14.05, "="), (20.15, "x")):
        axes.text(at, 5.4, sign, ha="center", va="center", fontsize=13)
    arrow(axes, (16.5, 5.4), (17.8, 5.4))
    _box(axes, (14.4, 1.6, 0.35, 1.6), PALE, f"m\n[{m}]")
    _box(axes, (16.1, 1.6, 0.35, 1.6), PALE, f"l\n[{m}]")
    _box(axes, (18.1, 1.6, 1.3, 1.6), GREEN, f"O i\n[{m}, {d}]")
    axes.text(13.5, 2.4, "kept from tile to tile:", ha="right", va="center", color=INK)
    arrow(axes, (21.4, 3.9), (19.5, 2.6))
    axes.text(20.9, 2.9, "added up", fontsize=9, color=INK)
    axes.text(16.2, 7.4, "for each tile j of keys: load K j and V j", ha="center", color=INK)
    axes.annotate(
        "",
        (10.5, 7.1),
        (22.0, 7.1),
        arrowprops={"arrowstyle": "<|-", "color": QUIET, "linewidth": 1.2},
    )
    said = "K, V and O have the shape of Q.\nQ i is read once, O i written once,\n"
    axes.text(0.2, 0.1, said + "K j and V j up to the diagonal.", color=INK)
    return made


def bytes_by_tile(
    tiled: Mapping[int, float], levels: Mapping[str, float], unit: str, said: str
) -> Figure:
    """Draw bytes over the number of queries in a tile, beside levels that have no tiles."""
    made, axes = figure(8, 3.8)
    sizes = sorted(tiled)
    axes.plot(sizes, [tiled[each] for each in sizes], "o-", color=BLUE, label="in tiles")
    for (name, level), colour in zip(levels.items(), (ORANGE, GREEN, AMBER), strict=False):
        axes.axhline(level, color=colour, linestyle="--", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [f"{each:,}" for each in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="queries in a tile (doubling)", ylabel=unit)
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, said)
    return made

"""Diagrams: two cuts of a matrix, a ring turn by turn, links of a cluster, ways to cut a model."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    QUIET,
    SKY,
    figure,
    title,
)

CELL = 0.5  # the width of one number of a drawn matrix
INPUTS, OUTPUTS, TOKENS = 8, 6, 3


def _block(axes: Axes, left: float, top: float, rows: int, columns: int, color: str) -> None:
    """Draw a matrix, or a part of one, as a grid of cells; `top` grows downwards."""
    for row in range(rows):
        for column in range(columns):
            place = (left + column * CELL, top + row * CELL)
            axes.add_patch(
                Rectangle(place, CELL, CELL, facecolor=color, edgecolor="white", linewidth=1)
            )


def two_splits() -> Figure:
    """Draw y = x W for two ranks: W cut by columns, and W cut by rows.

    Blue is rank 0's, orange rank 1's, and grey is on both.
    """
    made, every = figure(9, 5.4, nrows=2)
    half_in, half_out = INPUTS // 2, OUTPUTS // 2
    x_left, w_left, y_left = 0.0, 5.4, 9.8
    middle = (INPUTS - TOKENS) / 2 * CELL
    for axes, by_columns in zip(every, (True, False), strict=True):
        parts = (FAINT, FAINT) if by_columns else (BLUE, ORANGE)
        for rank, color in enumerate(parts):
            left = x_left + rank * half_in * CELL
            _block(axes, left, middle, TOKENS, half_in, color)
        for rank, color in enumerate((BLUE, ORANGE)):
            if by_columns:
                _block(axes, w_left + rank * half_out * CELL, 0, INPUTS, half_out, color)
                _block(axes, y_left + rank * half_out * CELL, middle, TOKENS, half_out, color)
            else:
                _block(axes, w_left, rank * half_in * CELL, half_in, OUTPUTS, color)
                top = (0.0, (INPUTS - TOKENS) * CELL)[rank]
                _block(axes, y_left, top, TOKENS, OUTPUTS, color)
        center = INPUTS / 2 * CELL
        for place, sign in ((4.7, "×"), (9.1, "=")):
            axes.text(place, center, sign, ha="center", va="center", fontsize=15, color=INK)
        if not by_columns:
            axes.text(y_left + 1.5, center, "+", ha="center", va="center", fontsize=15, color=INK)
        whole = "whole on both ranks" if by_columns else "each rank has half of the inputs"
        cut = f"[{INPUTS}, {half_out}] each" if by_columns else f"[{half_in}, {OUTPUTS}] each"
        ends = (
            f"[{TOKENS}, {half_out}] each,\nside by side: no message"
            if by_columns
            else f"[{TOKENS}, {OUTPUTS}] each, partial sums:\nadded up by an all-reduce"
        )
        below = INPUTS * CELL + 0.25
        for left, text in (
            (x_left, f"x [{TOKENS}, {INPUTS}]\n{whole}"),
            (w_left, f"W [{INPUTS}, {OUTPUTS}]\n{cut}"),
            (y_left, f"y [{TOKENS}, {OUTPUTS}]\n{ends}"),
        ):
            axes.text(left, below, text, va="top", color=INK, fontsize=9, linespacing=1.3)
        axes.set(xlim=(-0.2, 14.6), ylim=(below + 1.2, -0.1), xticks=[], yticks=[])
        axes.set_aspect("equal")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    title(every[0], "Column split: each rank computes half of the outputs, completely")
    title(every[1], "Row split: each rank computes a part of every output")
    return made


Table = list[list[float]]  # by rank and piece


def ring_states(numbers: Sequence[Sequence[float]]) -> list[tuple[Table, list[int]]]:
    """Return each rank's numbers before each turn of a ring, and which piece each rank sends.

    The last entry is the end, where no piece is sent. `numbers` has one number per rank and piece.
    """
    num_ranks = len(numbers)
    table: Table = [list(each) for each in numbers]
    states = []
    for turn in range(2 * (num_ranks - 1)):
        adds = turn < num_ranks - 1
        sent = [(rank - turn) % num_ranks for rank in range(num_ranks)]
        states.append(([list(each) for each in table], sent))
        moved = [table[rank][piece] for rank, piece in enumerate(sent)]
        for rank, (piece, number) in enumerate(zip(sent, moved, strict=True)):
            to = (rank + 1) % num_ranks
            table[to][piece] = table[to][piece] + number if adds else number
    states.append((table, []))
    return states


def ring_turns(numbers: Sequence[Sequence[float]]) -> Figure:
    """Draw a ring all-reduce turn by turn: a row for each rank, a column for each piece.

    Orange frames are pieces that are passed on to the next rank in this turn, green cells are
    finished sums.
    """
    states = ring_states(numbers)
    num_ranks, half = len(numbers), len(numbers) - 1
    made, every = figure(10, 0.9 + 0.52 * num_ranks, ncols=len(states))
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    for turn, (axes, (table, sent)) in enumerate(zip(every, states, strict=True)):
        for rank, row in enumerate(table):
            for piece, number in enumerate(row):
                done = number == sums[piece]
                color = GREEN if done else SKY if number != numbers[rank][piece] else PALE
                axes.add_patch(
                    Rectangle((piece, rank), 1, 1, facecolor=color, edgecolor="white", linewidth=2)
                )
                ink = "white" if done else INK
                text = f"{number:g}"
                axes.text(
                    piece + 0.5, rank + 0.5, text, ha="center", va="center", color=ink, size=9
                )
        for rank, piece in enumerate(sent):
            place = (piece + 0.06, rank + 0.06)
            axes.add_patch(Rectangle(place, 0.88, 0.88, fill=False, edgecolor=ORANGE, linewidth=2))
        axes.set(xlim=(0, num_ranks), ylim=(num_ranks, 0), xticks=[])
        axes.set_yticks([rank + 0.5 for rank in range(num_ranks)])
        axes.set_yticklabels([f"rank {rank}" for rank in range(num_ranks)] if turn == 0 else [])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        name = f"turn {turn + 1}: {'add' if turn < half else 'copy'}" if sent else "the end"
        axes.set_title(name, fontsize=9, color=INK)
    return made


def topology() -> Figure:
    """Draw two machines of eight cards: what connects cards inside a machine, and machines."""
    made, axes = figure(9.5, 3.9)
    for node in range(2):
        left = node * 10.0
        axes.add_patch(Rectangle((left, 0), 9, 5, facecolor="#f7f7f7", edgecolor=QUIET))
        axes.text(left + 0.2, 4.62, f"node {node}", weight="bold", color=INK, va="center")
        axes.add_patch(Rectangle((left + 0.3, 3.3), 8.4, 0.8, facecolor=GREEN))
        axes.text(
            *(left + 4.5, 3.7, "NVSwitch: any card to any card, 450 GB/s each way"),
            **{"color": "white", "ha": "center", "va": "center", "fontsize": 9},
        )
        for card in range(8):
            place = left + 0.3 + card * 1.06
            axes.add_patch(Rectangle((place, 1.9), 0.94, 0.9, facecolor=BLUE))
            axes.text(
                place + 0.47, 2.35, f"GPU\n{card}", color="white", ha="center", va="center", size=8
            )
            axes.plot([place + 0.47] * 2, [2.8, 3.3], color=GREEN, linewidth=3)
            axes.plot([place + 0.47] * 2, [1.2, 1.9], color=ORANGE, linewidth=1.5)
        axes.add_patch(Rectangle((left + 0.3, 0.4), 8.4, 0.8, facecolor=ORANGE))
        axes.text(
            *(left + 4.5, 0.8, "PCIe: host memory and network cards, 63 GB/s each way"),
            **{"color": "white", "ha": "center", "va": "center", "fontsize": 9},
        )
    for node in range(2):
        axes.plot([4.5 + 10 * node] * 2, [0.4, -0.75], color=INK, linewidth=1)
    axes.plot([4.5, 14.5], [-0.75, -0.75], color=INK, linewidth=1)
    axes.text(
        *(
            9.5,
            -1.05,
            "between nodes, each way: InfiniBand 50 GB/s per card, or Ethernet 3.1 GB/s per node",
        ),
        **{"color": INK, "ha": "center", "va": "center", "fontsize": 9},
    )
    axes.set(xlim=(-0.1, 19.1), ylim=(-1.35, 5.1), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    title(axes, "The further apart two cards are, the fewer bytes per second between them")
    return made


LAYERS, RANKS = 4, 4
_WAYS = ("tensor", "pipeline", "data", "context", "expert")


def ways_to_cut() -> Figure:
    """Draw a model of four layers on four ranks, cut in five ways; a colour is a rank.

    Below each model are the tokens of a batch, in the colour of the rank that works on them.
    """
    made, every = figure(10.5, 3.6, ncols=len(_WAYS))
    for axes, way in zip(every, _WAYS, strict=True):
        _model(axes, way)
        _tokens(axes, way)
        axes.set(xlim=(-0.1, 4.1), ylim=(6.5, -0.2), xticks=[], yticks=[])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_title(f"{way} parallel", fontsize=10, color=INK)
    every[0].set_yticks([2.2, 5.3])
    every[0].set_yticklabels(["four layers:\nweights", "tokens of\nthe batch"])
    every[0].tick_params(length=0)
    return made


def _model(axes: Axes, way: str) -> None:
    for layer in range(LAYERS):
        for rank, color in enumerate(CYCLE[:RANKS]):
            cell = {"left": rank * 1.0, "width": 0.94, "top": layer * 1.1, "height": 0.94}
            if way == "pipeline":
                color = CYCLE[layer]
            if way in ("data", "context"):  # a copy of every layer for each rank
                cell = {"left": rank * 1.0, "width": 0.8, "top": layer * 1.1, "height": 0.94}
            if way == "expert":
                shared = Rectangle((rank * 1.0, layer * 1.1), 0.94, 0.3, facecolor=FAINT)
                axes.add_patch(shared)
                cell = {
                    "left": rank * 1.0,
                    "width": 0.94,
                    "top": layer * 1.1 + 0.36,
                    "height": 0.58,
                }
            place = (cell["left"], cell["top"])
            axes.add_patch(Rectangle(place, cell["width"], cell["height"], facecolor=color))


def _tokens(axes: Axes, way: str) -> None:
    """Draw four sequences of eight tokens each."""
    for sequence in range(4):
        for token in range(8):
            color = {
                "data": CYCLE[sequence],
                "context": CYCLE[token // 2],
                "expert": CYCLE[(3 * token + sequence * 5 + token // 3) % RANKS],
            }.get(way, FAINT)
            place = (token * 0.5, 4.75 + sequence * 0.32)
            axes.add_patch(Rectangle(place, 0.44, 0.26, facecolor=color))


def pipeline_chart(ends: Sequence[Sequence[float]], stage_seconds: float) -> Figure:
    """Draw a row for each stage over time, with a box for each micro-batch that it runs.

    `ends` has the time at which a stage has finished a micro-batch, by stage and micro-batch.
    """
    num_stages, num_batches = len(ends), len(ends[0])
    end = max(map(max, ends))
    busy = num_stages * num_batches * stage_seconds
    made, axes = figure(9, 0.9 + 0.42 * num_stages)
    for stage, row in enumerate(ends):
        axes.add_patch(Rectangle((0, stage - 0.4), end, 0.8, facecolor=FAINT))
        for batch, done in enumerate(row):
            color = CYCLE[batch % len(CYCLE)]
            start = done - stage_seconds
            axes.add_patch(
                Rectangle(
                    (start, stage - 0.4), stage_seconds, 0.8, facecolor=color, edgecolor="white"
                )
            )
            if num_batches <= 24:
                ink = "white" if color == BLUE else INK
                place = (start + stage_seconds / 2, stage)
                axes.text(*place, str(batch), ha="center", va="center", size=9, color=ink)
    axes.set(xlim=(0, end), ylim=(num_stages - 0.5, -0.5), yticks=range(num_stages))
    axes.set_yticklabels([f"stage {stage}" for stage in range(num_stages)])
    axes.set_xlabel("ms since the first micro-batch began")
    ticks = axes.get_xticks()
    axes.set_xticks([tick for tick in ticks if tick <= end])
    axes.set_xticklabels([f"{1e3 * tick:g}" for tick in ticks if tick <= end])
    idle = 1 - busy / (num_stages * end)
    counts = f"{num_stages} stages, {num_batches} micro-batches"
    title(axes, f"{counts}: the stages are idle for {idle:.0%} of the time")
    return made


def step_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw a bar for each step, made of at most four parts in seconds; a part has one colour."""
    made, axes = figure(9, 1.2 + 0.5 * len(steps))
    names = list(dict.fromkeys(name for parts in steps.values() for name in parts))
    colors = dict(zip(names, (BLUE, ORANGE, FAINT, GREEN), strict=False))
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=name)  # for the legend
    for row, parts in enumerate(steps.values()):
        left = 0.0
        for name, seconds in parts.items():
            width = 1e3 * max(seconds, 0.0)
            axes.barh(row, width, left=left, height=0.6, color=colors[name])
            left += width
        axes.text(left, row, f" {left:.0f} ms", va="center", color=INK, fontsize=9)
    axes.set(yticks=range(len(steps)), ylim=(len(steps) - 0.5, -1.1))
    axes.set_yticklabels(list(steps))
    longest = max(sum(parts.values()) for parts in steps.values())
    axes.set_xlim(0, 1.12e3 * longest)
    axes.set_xlabel("ms of one step")
    axes.legend(frameon=False, loc="upper left", fontsize=9, ncols=len(names))
    title(axes, "Where a step's time goes, measured on this machine")
    return made

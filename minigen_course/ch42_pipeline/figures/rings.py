"""A causal prompt on ranks in a ring: which rank computes which pairs, and which one waits."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.ch42_pipeline.lesson import ring_pairs
from minigen_course.figures.style import BLUE, CYCLE, FAINT, INK, PALE, QUIET, figure, title

Positions = Sequence[Sequence[int]]


def causal_shares(ways: Mapping[str, Positions]) -> Figure:
    """Draw the causal square of queries and keys for each way of sharing, coloured by rank.

    Below it are the pairs of each rank, and the mean of all ranks as a dashed line.
    """
    made, every = figure(4.2 * len(ways), 5.0, nrows=2, ncols=len(ways), height_ratios=(3, 1.1))
    most = max(max(_totals(each)) for each in ways.values())
    for column, (name, positions) in enumerate(ways.items()):
        size, num_ranks = sum(map(len, positions)), len(positions)
        owner = np.zeros(size, dtype=int)
        for rank, own in enumerate(positions):
            owner[list(own)] = rank + 1
        square = np.where(np.tri(size, dtype=bool), owner[:, None], 0)
        axes = every[0, column]
        colours = ListedColormap(["#ffffff", *CYCLE[:num_ranks]])
        axes.imshow(square, cmap=colours, vmin=0, vmax=num_ranks, interpolation="nearest")
        axes.set(xlabel="key", ylabel="query" if column == 0 else None)
        title(axes, name)
        below, totals = every[1, column], _totals(positions)
        names, mean = [f"rank {rank}" for rank in range(num_ranks)], sum(totals) / num_ranks
        below.barh(names, totals, color=CYCLE[:num_ranks])
        for rank, total in enumerate(totals):
            place = max(total, mean * (abs(total - mean) < 0.1 * most))
            below.text(place, rank, f" {total:,}", va="center", color=INK, fontsize=8)
        below.axvline(mean, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        below.set(xlim=(0, 1.22 * most), xlabel="pairs of query and key")
        below.invert_yaxis()
    return made


def _totals(positions: Positions) -> list[int]:
    return [sum(each) for each in zip(*ring_pairs(positions), strict=True)]


def ring_table(positions: Positions, upto: int | None = None) -> Figure:
    """Draw a ring turn by turn: a row per rank, a column per turn, with the block that it has.

    A cell's width is the most pairs of any turn. Its coloured part is what the rank computes, and
    the pale part behind it reaches to the slowest rank of the turn. `upto` is the number of turns
    drawn.
    """
    pairs, num_ranks = ring_pairs(positions), len(positions)
    most = max(map(max, pairs)) or 1
    made, axes = figure(1.9 + 1.75 * num_ranks, 1.0 + 0.72 * num_ranks)
    for turn in range(num_ranks if upto is None else min(upto, num_ranks)):
        slowest = max(pairs[turn])
        for rank in range(num_ranks):
            block = (rank - turn) % num_ranks
            share = pairs[turn][rank] / most
            place = (turn + 0.04, rank + 0.08)
            axes.add_patch(Rectangle(place, 0.92, 0.84, facecolor=FAINT))
            axes.add_patch(
                Rectangle(place, 0.92 * slowest / most, 0.84, facecolor=PALE, edgecolor=QUIET)
            )
            axes.add_patch(Rectangle(place, 0.92 * share, 0.84, facecolor=CYCLE[block % 7]))
            text = f"keys of {block}\n{pairs[turn][rank]:,} pairs"
            box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
            axes.text(
                turn + 0.5, rank + 0.5, text, ha="center", va="center", size=8, color=INK, bbox=box
            )
    axes.set(xlim=(0, num_ranks), ylim=(num_ranks, 0))
    axes.set_xticks([turn + 0.5 for turn in range(num_ranks)])
    axes.set_xticklabels([f"turn {turn}" for turn in range(num_ranks)])
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    whole = sum(map(max, pairs))
    ideal = sum(map(sum, pairs)) / num_ranks
    title(axes, f"{whole:,} pairs on the way of the slowest, {ideal:,.0f} if all were equal")
    return made


def hidden_messages(
    lengths: Sequence[int], seconds: Mapping[str, Sequence[tuple[float, float]]]
) -> Figure:
    """Draw the seconds of a ring's turn by the prompt's tokens: computing, and each link's message.

    `seconds` has (computing, sending) for each length, by link; computing is the same for all.
    """
    made, axes = figure(8, 3.6)
    first = next(iter(seconds.values()))
    computing = [1e3 * each for each, _ in first]
    axes.plot(lengths, computing, color=BLUE, linewidth=2.5, label="computing")
    for (name, every), colour in zip(seconds.items(), CYCLE[1:], strict=False):
        sent = [1e3 * each for _, each in every]
        axes.plot(lengths, sent, color=colour, linestyle=(0, (5, 2)), label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt (log scale)")
    axes.set_ylabel("ms of a turn in one layer (log scale)")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(axes, "A message is hidden where its dashed line is below the blue one")
    return made

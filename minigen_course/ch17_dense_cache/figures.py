"""Figures of the KV cache: how it fills, and what each step computes, reads and costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen_course.figures.style import (
    CYCLE,
    FAINT,
    INK,
    ORANGE,
    QUIET,
    SKY,
    figure,
    printable,
    title,
)

EMPTY, READ, COMPUTED = range(3)
LOOKS = ListedColormap(["white", SKY, ORANGE])
MOST = 48


def states(prompt_length: int, num_steps: int, cached: bool) -> np.ndarray:
    """Return each step's use of each position, [steps, positions]: `EMPTY`, `READ`, `COMPUTED`.

    Step 0 runs the prompt and gives the first new token; each further step runs the token that the
    step before it gave.
    """
    grid = np.full((num_steps, prompt_length + num_steps - 1), EMPTY)
    for step in range(num_steps):
        length = prompt_length + step
        grid[step, :length] = COMPUTED
        if cached and step:
            grid[step, : length - 1] = READ
    return grid


def cache_filling(tokens: Sequence[str], prompt_length: int, step: int) -> Figure:
    """Draw steps downwards, positions to the right, without and with a cache; frame one step.

    `tokens` is the whole text; its last token is never computed, because nothing comes after it.
    Raises `ValueError` for a step that does not exist, or for more tokens than can be drawn.
    """
    num_steps = len(tokens) - prompt_length
    if not 0 <= step < num_steps:
        raise ValueError(f"This text has the steps 0 to {num_steps - 1}: there is no step {step}.")
    if len(tokens) > MOST:
        raise ValueError(f"That is {len(tokens)} tokens; at most {MOST} can be drawn.")
    made, both = figure(12, 1.9 + 0.17 * num_steps, ncols=2, sharey=True)
    for axes, cached in zip(both, (False, True), strict=True):
        grid = states(prompt_length, num_steps, cached)
        axes.pcolormesh(grid, cmap=LOOKS, vmin=0, vmax=2, edgecolors=FAINT, linewidth=0.5)
        width = grid.shape[1]
        axes.add_patch(Rectangle((0, step), width, 1, fill=False, edgecolor=INK, linewidth=2))
        names = printable(tokens[:-1])
        axes.set_xticks(np.arange(width) + 0.5, names, rotation=90, fontsize=8)
        axes.axvline(prompt_length, color=QUIET, linewidth=1)
        computed = int((grid[step] == COMPUTED).sum())
        so_far = int((grid[: step + 1] == COMPUTED).sum())
        name = "With a cache" if cached else "Without"
        title(axes, f"{name}: step {step} computes {computed}; {so_far} so far")
        axes.tick_params(length=0)
    both[0].set_yticks(np.arange(0, num_steps, 5) + 0.5, range(0, num_steps, 5))
    both[0].set_ylabel("step")
    both[0].invert_yaxis()
    meanings = ("computed", "read from the cache", "not there yet")
    patches = [
        Patch(facecolor=color, edgecolor=QUIET, label=name)
        for color, name in zip((ORANGE, SKY, "white"), meanings, strict=True)
    ]
    made.legend(handles=patches, frameon=False, ncols=3, loc="outside lower center", labelcolor=INK)
    return made


def by_step(lines: Mapping[str, Sequence[float]], ylabel: str, text: str) -> Figure:
    """Draw the cost of every step, one line per way of working."""
    made, axes = figure(8, 3)
    _lines(axes, lines, ylabel)
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, text)
    return made


def work_by_step(rows: Mapping[str, Sequence[int]], pairs: Mapping[str, Sequence[int]]) -> Figure:
    """Draw the rows in the linear layers, and the pairs of query and key, at each step."""
    made, (left, right) = figure(10, 3.2, ncols=2)
    _lines(left, rows, "tokens through the linear layers")
    _lines(right, pairs, "pairs of query and key, a head")
    right.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(left, "Linear layers: from n to 1 a step")
    title(right, "Attention: from n² to n a step")
    return made


def _lines(axes: Any, lines: Mapping[str, Sequence[float]], ylabel: str) -> None:
    for (name, values), color in zip(lines.items(), CYCLE, strict=False):
        axes.plot(range(len(values)), values, ".-", label=name, linewidth=2, color=color)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.set_ylim(bottom=0)

"""Figures of the KV cache: how it fills, what each step computes and reads, where its time goes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.ch17_dense_cache.estimates import compute_bound_batch, step_seconds
from minigen_course.figures.show import significant
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    QUIET,
    SKY,
    arrow,
    figure,
    printable,
    title,
)
from minigen_course.lab.cost_model import MACHINES, SHAPES, config_of, most_sequences

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
    made, both = figure(10.4, 2.0 + 0.17 * num_steps, ncols=2, sharey=True)
    for axes, cached in zip(both, (False, True), strict=True):
        grid = states(prompt_length, num_steps, cached)
        axes.pcolormesh(grid, cmap=LOOKS, vmin=0, vmax=2, edgecolors=FAINT, linewidth=0.5)
        width = grid.shape[1]
        axes.add_patch(Rectangle((0, step), width, 1, fill=False, edgecolor=INK, linewidth=2))
        names = printable(tokens[:-1])
        axes.set_xticks(np.arange(width) + 0.5, names, rotation=90, fontsize=9)
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
    _lines(right, pairs, "pairs of query and key per head")
    right.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(left, "Linear layers: from n tokens to 1 per step")
    title(right, "Attention: from n² / 2 pairs to n per step")
    return made


def _lines(axes: Any, lines: Mapping[str, Sequence[float]], ylabel: str) -> None:
    for (name, values), color in zip(lines.items(), CYCLE, strict=False):
        axes.plot(range(len(values)), values, ".-", label=name, linewidth=2, color=color)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.set_ylim(bottom=0)


Box = tuple[float, str, str]  # x of its middle, text, shape of what leaves it


def two_phases(num_prompt: int, config: ModelConfig) -> Figure:
    """Draw one layer's attention in prefill and in decode, with shapes, around the KV cache."""
    hidden, q_heads = config.hidden, config.q_heads
    kv_heads, head_dim = config.kv_heads, config.head_dim
    made, both = figure(10.4, 5.4, nrows=2)
    rows = ("prefill", num_prompt, 0), ("decode", 1, num_prompt)
    for axes, (name, new, old) in zip(both, rows, strict=True):
        after = old + new
        boxes = {
            "x": (0.0, f"{new} new token{'s' * (new > 1)}", f"x [{new}, {hidden}]"),
            "q": (2.3, "queries", f"q [{new}, {q_heads}, {head_dim}]"),
            "kv": (2.3, "keys, values", f"k, v [{new}, {kv_heads}, {head_dim}]"),
            "attention": (7.7, "attention", f"[{q_heads}, {new}, {after}] weights"),
            "rest": (
                9.75,
                f"$W_o$,\nfeed-forward,\n{config.num_layers - 1} more layers",
                f"x [{new}, {hidden}]",
            ),
            "last": (11.8, "last row\nto the head", "1 next token"),
        }
        heights = {"x": 1.0, "q": 1.75, "kv": 0.25, "attention": 1.0, "rest": 1.0, "last": 1.0}
        for key, (x, text, shape) in boxes.items():
            y = heights[key]
            axes.add_patch(Rectangle((x - 0.75, y - 0.3), 1.5, 0.6, color=PALE, zorder=2))
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, zorder=3)
            axes.text(x, y + 0.36, shape, ha="center", va="bottom", fontsize=8, color=QUIET)
        left = 4.2
        for place in range(num_prompt + 2):
            is_new = old <= place < after
            colour = ORANGE if is_new else SKY if place < old else "white"
            axes.add_patch(
                Rectangle((left + 0.3 * place, 0), 0.3, 0.5, facecolor=colour, edgecolor=QUIET)
            )
        middle = left + 0.15 * (num_prompt + 2)
        axes.text(
            middle,
            0.56,
            f"KV cache of this layer: {after} tokens",
            ha="center",
            va="bottom",
            fontsize=8,
            color=QUIET,
        )
        end = left + 0.3 * (num_prompt + 2)
        for start, to in (
            ((0.75, 1.1), (1.5, 1.7)),
            ((0.75, 0.9), (1.5, 0.3)),
            ((3.05, 1.75), (6.9, 1.15)),
            ((3.05, 0.25), (left - 0.05, 0.25)),
            ((end + 0.05, 0.3), (6.9, 0.85)),
            ((8.45, 1.0), (8.95, 1.0)),
            ((10.5, 1.0), (11.0, 1.0)),
        ):
            arrow(axes, start, to)
        axes.set(xlim=(-0.85, 12.65), ylim=(-0.15, 2.45))
        axes.axis("off")
        computed = f"{new} token{'s' * (new > 1)} computed, {old} read from the cache"
        title(axes, f"{name.capitalize()}: {computed}")
    return made


def speeds(sizes: Sequence[float], lines: Mapping[str, Sequence[float]]) -> Figure:
    """Draw how fast operations read matrices of growing size; the first line is the ceiling.

    `sizes` are in MB, `lines` in GB/s.
    """
    made, axes = figure(9, 4.4)
    looks = ((QUIET, "o--"), (BLUE, "o-"), (BLUE, "o:"), (ORANGE, "o-"), (ORANGE, "o:"))
    for (name, values), (colour, style) in zip(lines.items(), looks, strict=False):
        axes.plot(sizes, values, style, color=colour, linewidth=2, markersize=5, label=name)
    axes.set(xscale="log", yscale="log", xlabel="size of the matrix (MB, log scale)")
    axes.set_ylabel("read (GB/s, log scale)")
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))
    ticks = [m * 10**e for e in range(-2, 5) for m in (1, 2, 5)]
    ticks = [each for each in ticks if low / 2 < each < 2 * high]
    axes.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axes.set_xticks(sizes, [f"{each:g}" for each in sizes])
    axes.minorticks_off()
    made.legend(frameon=False, ncols=2, loc="outside lower center", labelcolor=INK)
    title(axes, "A matrix that fits no cache is read at most at the speed of memory")
    return made


def time_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw where each step's time goes, as shares of its whole, which is written at the end.

    Times are in seconds; parts below zero count as none.
    """
    made, axes = figure(9.4, 0.75 + 0.75 * len(steps))
    colours = dict(
        zip(
            dict.fromkeys(name for each in steps.values() for name in each),
            (BLUE, AMBER, ORANGE, SKY),
            strict=False,
        )
    )
    for row, (_, parts) in enumerate(steps.items()):
        whole, left = sum(max(0.0, each) for each in parts.values()), 0.0
        for name, seconds in parts.items():
            share = 100 * max(0.0, seconds) / whole
            axes.barh(row, share, left=left, height=0.6, color=colours[name])
            if share >= 6:
                axes.text(
                    left + share / 2, row, f"{share:.0f} %", ha="center", va="center", color="white"
                )
            left += share
        axes.text(101, row, f"{significant(1e3 * whole)} ms", va="center", color=INK)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set(xlim=(0, 112), xticks=range(0, 101, 20), xlabel="share of the step's time (%)")
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    made.legend(
        handles=patches,
        frameon=False,
        ncols=len(patches),
        loc="outside lower center",
        labelcolor=INK,
    )
    return made


def seconds_by_batch(contexts: Sequence[int], most: int = 2000, dots: bool = True) -> Figure:
    """Draw the step time of Llama-3-8B in bfloat16 on an L4 over the batch, for some contexts.

    A line is dashed where the sequences do not fit into the card's memory. With `dots`, the batch
    at which decoding becomes compute-bound is marked. Times and dots are computed by the exercises'
    functions, so that `using` shows a learner's own.
    """
    shape, card = SHAPES["Llama-3-8B"], MACHINES["L4"]
    made, axes = figure(9, 3.8)
    batches = [round(each) for each in np.geomspace(1, most, 60)]

    def milliseconds(batch: int, context: int) -> float:
        return 1e3 * step_seconds(
            weights=shape.multiplied,
            layers=shape.layers,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            batch=batch,
            context=context,
            bandwidth=card.bandwidth,
            peak=card.flops,
        )

    for context, colour in zip(contexts, (BLUE, ORANGE, GREEN, AMBER), strict=False):
        line = [milliseconds(batch, context) for batch in batches]
        name, found = f"context {context:,}", None
        if dots:
            found = compute_bound_batch(context)
            ends = "never compute-bound" if found is None else f"compute-bound from {found:,} on"
            name += f": {ends}"
        room = most_sequences(config_of("Llama-3-8B"), 16, card.memory or 0, context)
        fits = max(1, sum(batch <= room for batch in batches))
        axes.plot(batches[:fits], line[:fits], color=colour, linewidth=2.5, label=name)
        axes.plot(batches[fits - 1 :], line[fits - 1 :], "--", color=colour, linewidth=1.2)
        if found is not None:
            axes.plot(found, milliseconds(found, context), "o", color=colour, markersize=8)
    axes.set(xscale="log", yscale="log", xlabel="batch (sequences, log scale)")
    axes.set_ylabel("time of one step (ms, log scale)")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "Llama-3-8B on an L4: a longer context lets the KV cache decide")
    return made

"""Figures of layers: rotation by position, scores by distance, sizes of states, and gates."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from minigen.model.layers import apply_rotary, rotary_tables
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    HEAT,
    INK,
    ORANGE,
    PINK,
    QUIET,
    figure,
    printable,
    title,
)

Vector = Float[Tensor, " head_dim"]
Frequencies = Float[Tensor, " half"]


def turned(
    vector: Vector, frequencies: Frequencies, positions: Sequence[int]
) -> Float[Tensor, "positions head_dim"]:
    """Return one query or key, rotated to each of the positions."""
    cos, sin = rotary_tables(frequencies, torch.tensor(positions))
    return apply_rotary(vector.expand(len(positions), 1, -1), cos, sin)[:, 0]


def scores(
    q: Vector, k: Vector, frequencies: Frequencies, query_at: Sequence[int], key_at: Sequence[int]
) -> Float[Tensor, " positions"]:
    """Return the scaled dot products of a query and a key, one per pair of positions."""
    products = turned(q, frequencies, query_at) * turned(k, frequencies, key_at)
    return products.sum(-1) / math.sqrt(len(q))


def turning(
    vector: Vector, frequencies: Frequencies, pairs: Sequence[int], num_positions: int = 33
) -> Figure:
    """Draw some pairs of a query or key as points that rotate with the (coloured) position."""
    made, axes = figure(9, 2.9, ncols=len(pairs), squeeze=False)
    points = turned(vector, frequencies, range(num_positions))
    half = len(vector) // 2
    for panel, pair in zip(axes[0], pairs, strict=True):
        x, y = points[:, pair], points[:, pair + half]
        _ring(panel, float(torch.hypot(x[0], y[0])))
        shown = panel.scatter(x, y, c=range(num_positions), cmap=HEAT, s=26, zorder=2)
        panel.plot([0, float(x[0])], [0, float(y[0])], color=INK, linewidth=1.2, zorder=1)
        step = math.degrees(float(frequencies[pair]))
        title(panel, f"pair {pair}: {step:.3g}° a position")
    made.colorbar(shown, ax=list(axes[0]), label="position", shrink=0.8)
    return made


def by_distance(
    q: Vector,
    k: Vector,
    frequencies: Frequencies,
    starts: Sequence[int] = (0, 100, 5000),
    farthest: int = 128,
) -> Figure:
    """Draw the score of a query and a key against their distance, for several key positions."""
    made, axes = figure(8, 3)
    looks = zip(starts, (9.0, 5.0, 2.0), (FAINT, BLUE, ORANGE), strict=True)
    for start, width, colour in looks:
        key_at = [start] * (farthest + 1)
        query_at = range(start, start + farthest + 1)
        curve = scores(q, k, frequencies, query_at, key_at)
        axes.plot(curve, color=colour, linewidth=width, label=f"key at position {start:,}")
    axes.set(xlabel="distance from the key to the query, in tokens", ylabel="score")
    axes.legend(frameon=False, labelcolor=INK, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98))
    return made


def two_tokens(
    q: Vector, k: Vector, frequencies: Frequencies, *, query_at: int, key_at: int, pair: int
) -> Figure:
    """Draw one pair of a query and a key at two positions, and the score at their distance."""
    if not 0 <= pair < len(frequencies):
        raise ValueError(f"There are {len(frequencies)} pairs: 0 to {len(frequencies) - 1}.")
    if key_at < 0 or query_at < key_at:
        raise ValueError("A query looks back: its position must not be before the key's.")
    made, (circle, curve) = figure(9, 3.6, ncols=2, width_ratios=(1, 1.7))
    half = len(q) // 2
    for name, vector, at, colour in (("query", q, query_at, BLUE), ("key", k, key_at, ORANGE)):
        moved = turned(vector, frequencies, [0, at])[:, [pair, pair + half]]
        radius = float(moved[0].norm())
        _ring(circle, radius)
        for point, look in zip(moved.tolist(), (FAINT, colour), strict=True):
            circle.plot([0, point[0]], [0, point[1]], color=look, linewidth=2.5)
            circle.plot(*point, "o", color=look, markersize=9)
        circle.plot([], [], "o-", color=colour, label=f"{name} at position {at}")
    circle.legend(
        frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=9
    )
    angle = math.degrees(float(frequencies[pair])) * (query_at - key_at)
    title(circle, f"pair {pair}: turned {angle:,.1f}° apart")
    farthest = max(64, query_at - key_at + 8)
    distances = range(farthest + 1)
    whole = scores(q, k, frequencies, distances, [0] * (farthest + 1))
    curve.plot(whole, color=QUIET, linewidth=1.5)
    here = float(scores(q, k, frequencies, [query_at], [key_at])[0])
    curve.plot(query_at - key_at, here, "o", color=GREEN, markersize=10)
    curve.set(xlabel="distance, in tokens", ylabel="score of all pairs together")
    title(curve, f"distance {query_at - key_at}: score {here:.2f}")
    return made


def _ring(axes: Axes, radius: float) -> None:
    """Draw a circle, and hide the axes."""
    angles = torch.linspace(0, 2 * math.pi, 200)
    axes.plot(radius * angles.cos(), radius * angles.sin(), color=FAINT, linewidth=1, zorder=0)
    axes.set_aspect("equal", adjustable="datalim")
    axes.axis("off")


def found_likely(
    tokens: Sequence[str], rows: Mapping[str, Float[Tensor, " tokens"]], shown: int = 48
) -> Figure:
    """Draw the probability of each correct next token, one line per way of computing it."""
    made, axes = figure(10, 3.2)
    for (name, probabilities), mark in zip(rows.items(), "os^D", strict=False):
        axes.plot(probabilities[:shown], f"{mark}-", label=name, markersize=5, linewidth=1.2)
    axes.set_xticks(range(len(tokens[:shown])), printable(tokens[:shown]), rotation=90, fontsize=8)
    axes.set(ylim=(0, 1.03), ylabel="probability of the token")
    axes.legend(
        frameon=False, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(rows)
    )
    return made


def sizes(states: Float[Tensor, "states tokens hidden"]) -> Figure:
    """Draw the sizes of hidden states by layer, and where their squares overflow in float16."""
    made, axes = figure(8, 3)
    axes.plot(states.abs().amax((1, 2)), "o-", color=ORANGE, markersize=4)
    axes.plot(states.square().mean(-1).sqrt().median(-1).values, "s-", color=BLUE, markersize=4)
    limit = math.sqrt(torch.finfo(torch.float16).max)
    axes.axhline(limit, color=PINK, linewidth=1.5, linestyle="--")
    last = len(states) - 1
    axes.text(last * 0.6, limit * 1.3, "beyond it a square is infinite in float16", color=INK)
    axes.text(last * 0.6, float(states[-3].abs().max()) * 1.6, "largest number", color=INK)
    axes.text(last * 0.6, 2.5, "median token's root mean square", color=INK)
    axes.set(yscale="log", xlabel="layers that were run", ylabel="size (log scale)")
    axes.set_ylim(0.05, float(states.abs().max()) * 8)
    title(axes, "States grow, and one token's grow a thousandfold")
    return made


def gates(gate: Float[Tensor, "tokens ffn"]) -> Figure:
    """Draw SiLU beside ReLU, and a histogram of a real layer's gates."""
    made, (curve, bars) = figure(9, 2.9, ncols=2)
    x = torch.linspace(-6, 6, 200)
    curve.plot(x, torch.relu(x), color=AMBER, linewidth=2, linestyle="--", label="ReLU")
    curve.plot(x, torch.nn.functional.silu(x), color=BLUE, linewidth=2.5, label="SiLU")
    curve.set(xlabel="gate", ylabel="what it becomes")
    curve.legend(frameon=False, labelcolor=INK)
    title(curve, "SiLU: a soft ReLU")
    bars.hist(gate.flatten().clamp(-6, 6), bins=60, color=BLUE)
    bars.axvline(0, color=INK, linewidth=1)
    bars.set(xlabel="gate (ends hold all beyond)", ylabel="units")
    closed = float((gate < 0).float().mean())
    title(bars, f"{closed:.0%} of the gates are negative: little passes")
    return made


def reach(
    gaps: Sequence[int], curves: Mapping[str, Sequence[float]], trained: int, unhelped: float
) -> Figure:
    """Draw the perplexity of a text that is read again after a gap, for several rotations.

    `unhelped` is its perplexity when it is read for the first time.
    """
    made, axes = figure(8, 3.2)
    for (name, values), mark in zip(curves.items(), "os^D", strict=False):
        axes.plot(gaps, values, f"{mark}-", label=name, markersize=5, linewidth=2)
    axes.axvline(trained, color=QUIET, linewidth=1, linestyle=":")
    axes.text(trained * 1.03, 15, "trained length", color=QUIET, fontsize=9)
    axes.axhline(unhelped, color=QUIET, linewidth=1, linestyle="--")
    axes.text(gaps[0], unhelped * 1.1, "read for the first time", color=QUIET, fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="gap between the two readings, in positions")
    axes.set_xticks(gaps, [f"{gap:,}" for gap in gaps], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylabel("perplexity (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="center left")
    title(axes, "Beyond what it was trained on, the rotation means nothing to the model")
    return made

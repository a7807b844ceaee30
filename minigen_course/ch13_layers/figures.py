"""Figures of layers: position encodings, scores by distance, sizes of states, and gates."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
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
    PALE,
    PINK,
    QUIET,
    SKY,
    arrow,
    figure,
    printable,
    title,
)

Vector = Float[Tensor, " head_dim"]
Frequencies = Float[Tensor, " half"]
SLOW = 10  # degrees per position


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
    vector: Vector, frequencies: Frequencies, pairs: Sequence[int], last: int = 6
) -> Figure:
    """Draw some pairs of a query or key as arrows, at positions 0 to `last`, on one scale.

    A pair that turns by less than `SLOW` degrees per position is drawn at 0, 8 `last`, 16 `last`.
    """
    made, axes = figure(9.6, 2.7, ncols=len(pairs), squeeze=False)
    half = len(vector) // 2
    widest = float(torch.stack([vector[[pair, pair + half]].norm() for pair in pairs]).max())
    for panel, pair in zip(axes[0], pairs, strict=True):
        degrees = math.degrees(float(frequencies[pair]))
        positions = range(last + 1) if degrees >= SLOW else (0, 8 * last, 16 * last)
        arrows = turned(vector, frequencies, positions)[:, [pair, pair + half]]
        radius = float(arrows[0].norm())
        _ring(panel, radius)
        for position, (x, y) in zip(positions, arrows.tolist(), strict=True):
            colour = ORANGE if position == positions[-1] else BLUE
            panel.annotate(
                "",
                (x, y),
                (0, 0),
                arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0},
            )
        _number_ends(panel, arrows, positions, radius + 0.15 * widest, 0.15 * widest)
        panel.set(xlim=(-1.35 * widest, 1.35 * widest), ylim=(-1.35 * widest, 1.35 * widest))
        panel.set_aspect("equal", adjustable="box")
        title(panel, f"pair {pair}: {degrees:.3g}° per position")
    return made


def _number_ends(
    axes: Axes,
    arrows: Float[Tensor, "positions 2"],
    positions: Sequence[int],
    distance: float,
    room: float,
) -> None:
    """Write each position at a distance beyond its arrow, unless another is nearer than `room`."""
    last = len(arrows) - 1
    written: list[tuple[float, float]] = []
    for number in dict.fromkeys((last, 0, *range(1, last))):
        x, y = (distance * arrows[number] / arrows[number].norm()).tolist()
        if all(math.hypot(x - other[0], y - other[1]) > room for other in written):
            axes.text(x, y, str(positions[number]), ha="center", va="center", fontsize=8, color=INK)
            written.append((x, y))


def quarter_turns(
    q: Sequence[tuple[int, int]], k: Sequence[tuple[int, int]], names: Sequence[str]
) -> Figure:
    """Draw a query and a key at a few positions, and the score of each query with each key."""
    made, (left, middle, right) = figure(9.6, 3.0, ncols=3, width_ratios=(1, 1, 1.15))
    most = max(abs(number) for point in (*q, *k) for number in point) + 0.9
    for panel, points, colour, name in ((left, q, BLUE, "query"), (middle, k, ORANGE, "key")):
        for position, (x, y) in enumerate(points):
            panel.annotate(
                "",
                (x, y),
                (0, 0),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": colour,
                    "linewidth": 2,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
            far = 1 + 0.55 / math.hypot(x, y)
            panel.text(x * far, y * far, names[position], ha="center", va="center", fontsize=9)
        panel.axhline(0, color=FAINT, linewidth=1, zorder=0)
        panel.axvline(0, color=FAINT, linewidth=1, zorder=0)
        panel.set(xlim=(-most, most), ylim=(-most, most), aspect="equal")
        title(panel, f"the {name} at positions 0, 1, 2")
    looks = {0: AMBER, 1: SKY, 2: PALE, -1: FAINT, -2: "#f2f2f2"}
    for row, query in enumerate(q):
        for column, key in enumerate(k):
            score = query[0] * key[0] + query[1] * key[1]
            colour = looks[row - column]
            right.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, color=colour))
            right.text(column + 0.5, row + 0.5, str(score), ha="center", va="center", fontsize=11)
    right.set(xlim=(0, len(k)), ylim=(len(q), 0), aspect="equal")
    right.set_xticks([each + 0.5 for each in range(len(k))], range(len(k)))
    right.set_yticks([each + 0.5 for each in range(len(q))], range(len(q)))
    right.tick_params(length=0)
    right.set_xlabel("position of the key")
    right.set_ylabel("position of the query", labelpad=10)
    for side in ("left", "bottom"):
        right.spines[side].set_visible(False)
    title(right, "scores: equal on each diagonal")
    return made


def added_and_subtracted(
    waves: Float[Tensor, "positions hidden"], biases: Float[Tensor, "heads distances"]
) -> Figure:
    """Draw sinusoidal position vectors, and what ALiBi adds to each head's scores."""
    made, (left, right) = figure(9.6, 3.2, ncols=2)
    drawn = left.imshow(
        waves.numpy(), cmap=HEAT, aspect="auto", vmin=-1, vmax=1, interpolation="nearest"
    )
    made.colorbar(drawn, ax=left, shrink=0.8)
    left.set(xlabel="place in the vector", ylabel="position")
    title(left, "sinusoidal: fast waves left, slow right")
    labels: dict[float, list[int]] = {}  # heads whose lines end near one another share a label
    for head, row in reversed(list(enumerate(biases))):
        right.plot(row, color=BLUE, linewidth=1.4)
        end = float(row[-1])
        near = [each for each in labels if each - end <= 0.05 * float(biases.abs().max())]
        labels.setdefault(near[-1] if near else end, []).append(head)
    for end, heads in labels.items():
        name = f"head {heads[0]}" if len(heads) == 1 else f"heads {heads[-1]} to {heads[0]}"
        right.text(biases.shape[1] - 0.6, end, name, va="center", fontsize=8)
    right.set(xlabel="distance from the key to the query, in tokens", ylabel="added to the score")
    right.set_xlim(0, biases.shape[1] * 1.2)
    title(right, "ALiBi: the farther a key, the lower its score")
    return made


def layer_flow(num_tokens: int, hidden: int, ffn: int, heads: tuple[int, int, int]) -> Figure:
    """Draw one layer as boxes with the shapes of what leaves them; this chapter's parts are lit.

    `heads` are the query heads, the KV heads, and the numbers of a head.
    """
    made, axes = figure(9.8, 4.2)
    q_heads, kv_heads, head_dim = heads
    wide = f"[{num_tokens}, {hidden}]"
    qk = f"q [{num_tokens}, {q_heads}, {head_dim}]\nk, v [{num_tokens}, {kv_heads}, {head_dim}]"
    rows = {
        2.7: [
            ("residual\nstream x", wide),
            ("RMSNorm", wide),
            ("$W_q, W_k, W_v$", qk),
            ("rotate\nq and k", qk),
            ("attention\n(chapter 14)", wide),
            ("add to x", wide),
        ],
        0.3: [
            ("x", wide),
            ("RMSNorm", wide),
            ("$W_{gate}, W_{up}$", f"2 of [{num_tokens}, {ffn}]"),
            ("SwiGLU", f"[{num_tokens}, {ffn}]"),
            ("$W_{down}$", wide),
            ("add to x", wide),
        ],
    }
    lit = ("RMSNorm", "rotate\nq and k", "SwiGLU")
    for y, boxes in rows.items():
        for column, (name, shape) in enumerate(boxes):
            x = 1.75 * column
            colour = AMBER if name in lit else FAINT
            axes.add_patch(Rectangle((x - 0.66, y - 0.36), 1.32, 0.72, color=colour, zorder=2))
            axes.text(x, y, name, ha="center", va="center", fontsize=9, color=INK, zorder=3)
            axes.text(x, y + 0.44, shape, ha="center", va="bottom", fontsize=8, color=INK)
            if column:
                arrow(axes, (x - 1.09, y), (x - 0.68, y))
        end = 1.75 * (len(boxes) - 1)
        axes.plot([0, 0, end], [y - 0.36, y - 0.75, y - 0.75], color=QUIET, linewidth=1.2)
        arrow(axes, (end, y - 0.78), (end, y - 0.36))
        axes.text(end / 2, y - 0.72, "x passes by unchanged", ha="center", va="bottom", color=QUIET)
    end = 1.75 * 5 + 0.85
    axes.plot([end - 0.19, end, end], [2.7, 2.7, 1.45], color=QUIET, linewidth=1.2)
    axes.plot([end, -0.85, -0.85], [1.45, 1.45, 0.3], color=QUIET, linewidth=1.2)
    arrow(axes, (-0.87, 0.3), (-0.66, 0.3))
    axes.set(xlim=(-0.95, end + 0.1), ylim=(-0.6, 3.75))
    axes.axis("off")
    return made


def by_distance(
    q: Vector,
    k: Vector,
    frequencies: Frequencies,
    starts: Sequence[int] = (0, 100, 5000),
    farthest: int = 128,
) -> Figure:
    """Draw the score of a query and a key against their distance, for several key positions."""
    made, axes = figure(8, 3.2)
    looks = zip(starts, (9.0, 5.0, 2.0), (FAINT, BLUE, ORANGE), strict=True)
    best = 0
    for start, width, colour in looks:
        key_at = [start] * (farthest + 1)
        query_at = range(start, start + farthest + 1)
        curve = scores(q, k, frequencies, query_at, key_at)
        best = int(curve.argmax())
        axes.plot(curve, color=colour, linewidth=width, label=f"key at position {start:,}")
    axes.set(xlabel="distance from the key to the query, in tokens", ylabel="score")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.2 * (high - low))
    axes.legend(frameon=False, labelcolor=INK, loc="upper right", ncols=len(starts))
    title(axes, f"Only the distance counts, and this head prefers a distance of {best}")
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
    circle.plot([], [], "o-", color=FAINT, label="both at position 0")
    circle.legend(
        frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=9
    )
    angle = math.degrees(float(frequencies[pair])) * (query_at - key_at)
    title(circle, f"pair {pair}: query turned {angle:,.1f}° further")
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
    tokens: Sequence[str], rows: Mapping[str, Float[Tensor, " tokens"]], shown: int = 64
) -> Figure:
    """Draw the probability of each correct next token, one line per way of computing it."""
    made, axes = figure(10, 3.4)
    for (name, probabilities), mark in zip(rows.items(), "os^D", strict=False):
        axes.plot(probabilities[:shown], f"{mark}-", label=name, markersize=5, linewidth=1.2)
    axes.set_xticks(range(len(tokens[:shown])), printable(tokens[:shown]), rotation=90, fontsize=8)
    axes.set(ylim=(0, 1.03), ylabel="probability of the token")
    axes.legend(
        frameon=False, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1.0), ncols=len(rows)
    )
    means = [f"{float(each.mean()):.2f} with {name}" for name, each in rows.items()]
    title(axes, f"Mean probability: {', '.join(means)}")
    return made


def sizes(states: Float[Tensor, "states tokens hidden"]) -> Figure:
    """Draw the sizes of hidden states by layer, and where their squares overflow in float16."""
    made, axes = figure(8, 3.2)
    largest = states.abs().amax((1, 2))
    median = states.square().mean(-1).sqrt().median(-1).values
    axes.plot(largest, "o-", color=ORANGE, markersize=4)
    axes.plot(median, "s-", color=BLUE, markersize=4)
    limit = math.sqrt(torch.finfo(torch.float16).max)
    axes.axhline(limit, color=PINK, linewidth=1.5, linestyle="--")
    last = len(states) - 1
    axes.text(last * 0.55, limit * 1.3, "above it, a square is infinite in float16", color=INK)
    axes.text(last * 0.55, float(largest[-3]) * 1.6, "largest number", color=INK)
    axes.text(last * 0.55, 2.5, "median token's root mean square", color=INK)
    axes.set(
        yscale="log",
        xlabel="after this number of layers (0: the embedding)",
        ylabel="size (log scale)",
    )
    axes.set_ylim(0.05, float(largest.max()) * 8)
    grown = float(median.max() / median[0])
    most = float(largest.max())
    title(axes, f"A median token grows {grown:.0f} times; the largest number reaches {most:,.0f}")
    return made


def gates(gate: Float[Tensor, "tokens ffn"]) -> Figure:
    """Draw SiLU beside ReLU, and a histogram of a real layer's gates."""
    made, (curve, bars) = figure(9, 2.9, ncols=2)
    x = torch.linspace(-6, 6, 200)
    curve.plot(x, torch.relu(x), color=AMBER, linewidth=2, linestyle="--", label="ReLU")
    curve.plot(x, torch.nn.functional.silu(x), color=BLUE, linewidth=2.5, label="SiLU")
    curve.set(xlabel="gate, before", ylabel="gate, after")
    curve.legend(frameon=False, labelcolor=INK)
    title(curve, "SiLU is a smooth ReLU")
    bars.hist(gate.flatten().clamp(-6, 6), bins=60, color=BLUE)
    bars.axvline(0, color=INK, linewidth=1)
    bars.set(xlabel="gate, before (the ends hold all beyond)", ylabel="gates (tokens times units)")
    near = float((gate.abs() < 1).float().mean())
    title(bars, f"{near:.0%} of the gates lie between -1 and 1")
    return made


def wavelengths(rotations: Mapping[str, Frequencies], trained: int) -> Figure:
    """Draw the positions that each pair needs for a full turn, for several rotations."""
    made, axes = figure(8, 3.2)
    for (name, frequencies), mark in zip(rotations.items(), "os^D", strict=False):
        axes.plot(2 * math.pi / frequencies, f"{mark}-", label=name, markersize=4, linewidth=1.5)
    axes.axhline(trained, color=QUIET, linewidth=1, linestyle=":")
    axes.text(0, trained * 1.2, "promised length", color=QUIET, fontsize=9)
    axes.set(yscale="log", xlabel="pair", ylabel="positions per turn (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    first = next(iter(rotations.values()))
    slow = int((2 * math.pi / first > trained).sum())
    title(axes, f"{slow} of {len(first)} pairs complete no turn within {trained:,} positions")
    return made


def reach(
    gaps: Sequence[int], curves: Mapping[str, Sequence[float]], trained: int, unhelped: float
) -> Figure:
    """Draw the perplexity of a text that is read again after a gap, for several rotations.

    `trained` is the longest gap within the promised length, and `unhelped` the perplexity of the
    text when it is read for the first time.
    """
    made, axes = figure(8, 3.4)
    for (name, values), mark in zip(curves.items(), "os^D", strict=False):
        axes.plot(gaps, values, f"{mark}:", label=name, markersize=8, linewidth=0.8)
    axes.axvline(trained, color=QUIET, linewidth=1, linestyle="--")
    axes.text(trained * 1.03, 0.25 * unhelped, "promised length ends", color=QUIET, fontsize=9)
    axes.axhline(unhelped, color=QUIET, linewidth=1, linestyle="--")
    said = "read for the first time"
    axes.text(gaps[-1], 0.68 * unhelped, said, color=QUIET, fontsize=9, ha="right")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("gap in the position numbers, no text in between (log scale)")
    axes.set_xticks(gaps, [f"{gap:,}" for gap in gaps], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylabel("perplexity (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="center right", bbox_to_anchor=(1, 0.44))
    title(axes, "Copying over a gap: only NTK scaling reaches beyond the promised length")
    return made

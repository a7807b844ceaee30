"""Figures of attention: the way through one layer, weights on a sentence, masks, KV heads."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

from minigen_course.figures.style import (
    BLUE,
    FAINT,
    HEAT,
    INK,
    ORANGE,
    PALE,
    QUIET,
    arrow,
    figure,
    printable,
    title,
)

IN_A_HEAD = {"ha": "center", "va": "center_baseline", "color": "white", "fontsize": 8}
Weights = Float[Tensor, "queries keys"]
MOST_TOKENS = 40
LOOKS, LOOKED_AT = "the token that looks", "the token that is looked at"
IN_THE_FUTURE = (0.76, 0.5, 0.04, 0.44)  # the white half of a causal heat map: room for its scale


def head_map(weights: Weights, tokens: Sequence[str], said: str) -> Figure:
    """Draw one head's weights: a row for each query's token, a column for each key's token.

    Raises `ValueError` for fewer than two tokens, or for more than can be read.
    """
    if not 2 <= len(tokens) <= MOST_TOKENS:
        raise ValueError(
            f"This sentence has {len(tokens)} tokens; 2 to {MOST_TOKENS} can be drawn."
        )
    made, axes = figure(6.2, 5.6)
    drawn = _heat(axes, weights, tokens, size=9 if len(tokens) <= 24 else 6)
    axes.set_ylabel(LOOKS)
    axes.set_xlabel(LOOKED_AT)
    made.colorbar(drawn, cax=axes.inset_axes(IN_THE_FUTURE), label="weight")
    title(axes, said)
    return made


def head_maps(heads: Mapping[str, Weights], tokens: Sequence[str]) -> Figure:
    """Draw several heads' weights, two in a row, each under its name."""
    rows = -(-len(heads) // 2)
    made, axes = figure(8.6, 4.5 * rows, nrows=rows, ncols=2, squeeze=False)
    for panel, (name, weights) in zip(axes.flat, heads.items(), strict=False):
        drawn = _heat(panel, weights, tokens, size=8)
        if panel not in axes[:, 0]:
            panel.set_yticks([])
        made.colorbar(drawn, cax=panel.inset_axes(IN_THE_FUTURE), label="weight")
        title(panel, name)
    for panel in axes.flat[len(heads) :]:
        panel.axis("off")
    made.supylabel(LOOKS, fontsize="medium", color=INK)
    made.supxlabel(LOOKED_AT, fontsize="medium", color=INK)
    return made


def _heat(axes: Axes, weights: Weights, tokens: Sequence[str], size: float) -> AxesImage:
    """Draw weights on one axes; masked places stay white."""
    later = torch.ones_like(weights).triu(1).bool()
    shown = weights.masked_fill(later, math.nan).numpy()
    drawn = axes.imshow(shown, cmap=HEAT, vmin=0, vmax=1)
    labels = printable(tokens)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=size)
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.tick_params(length=0)
    return drawn


def masks(cases: Mapping[str, Bool[Tensor, "queries keys"]]) -> Figure:
    """Draw masks side by side, each query at its position: blue where it may attend to a key."""
    made, axes = figure(9, 2.9, ncols=len(cases), squeeze=False)
    for panel, (name, mask) in zip(axes[0], cases.items(), strict=True):
        num_queries, num_keys = mask.shape
        first = num_keys - num_queries
        for query, key in torch.cartesian_prod(
            torch.arange(num_queries), torch.arange(num_keys)
        ).tolist():
            colour = BLUE if mask[query, key] else FAINT
            corner = (key + 0.06, first + query + 0.06)
            panel.add_patch(Rectangle(corner, 0.88, 0.88, color=colour))
        panel.set(xlim=(0, num_keys), ylim=(num_keys, 0), aspect="equal")
        panel.set_xticks([each + 0.5 for each in range(num_keys)], range(num_keys))
        queries = range(first, num_keys)
        panel.set_yticks([each + 0.5 for each in queries], queries)
        panel.tick_params(length=0)
        for side in ("left", "bottom"):
            panel.spines[side].set_visible(False)
        panel.set_xlabel("key's position")
        title(panel, name)
    axes[0][0].set_ylabel("query's position")
    return made


def sharing(cases: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw which query heads use which KV head, for (q_heads, kv_heads)."""
    made, axes = figure(9, 1.3, ncols=len(cases), squeeze=False)
    for panel, (name, (q_heads, kv_heads)) in zip(axes[0], cases.items(), strict=True):
        group = q_heads // kv_heads
        for kv_head in range(kv_heads):
            at = (kv_head + 0.5) * group
            for q_head in range(kv_head * group, (kv_head + 1) * group):
                panel.plot([q_head + 0.5, at], [1, -0.8], color=QUIET, linewidth=1, zorder=0)
                panel.add_patch(Circle((q_head + 0.5, 1), 0.38, color=BLUE))
                panel.text(q_head + 0.5, 1, str(q_head), **IN_A_HEAD)
            panel.add_patch(Rectangle((at - 0.36, -1.16), 0.72, 0.72, color=ORANGE))
            panel.text(at, -0.8, str(kv_head), **IN_A_HEAD)
        panel.set(xlim=(-0.1, q_heads + 0.1), ylim=(-1.4, 1.6), aspect="equal")
        panel.axis("off")
        title(panel, f"{name}: {q_heads} to {kv_heads}")
    return made


def flow(num_tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> Figure:
    """Draw one layer's attention as boxes with the shapes that pass between them."""
    made, axes = figure(10, 4.2)
    wide, per_head = [num_tokens, q_heads * head_dim], [num_tokens, q_heads, head_dim]
    shared, square = [num_tokens, kv_heads, head_dim], [q_heads, num_tokens, num_tokens]
    boxes = {  # name: (x, y, text, shape of what leaves it)
        "x": (0.0, 2, "residual\nstream x", wide),
        "norm": (1.5, 2, "RMSNorm", wide),
        "q": (3.1, 3.5, "queries\n$W_q$, rotate", per_head),
        "k": (3.1, 2, "keys\n$W_k$, rotate", shared),
        "v": (3.1, 0.5, "values\n$W_v$", shared),
        "scores": (5.1, 2.75, "scores\n$q \\cdot k \\,/\\, \\sqrt{d}$", square),
        "weights": (6.8, 2.75, "mask,\nsoftmax", square),
        "mix": (8.5, 2, "mix values\nby weights", per_head),
        "out": (10.2, 2, "join heads,\n$W_o$", wide),
        "add": (11.8, 2, "add to x", wide),
    }
    arrows = "x>norm norm>q norm>k norm>v q>scores k>scores scores>weights weights>mix v>mix"
    for pair in f"{arrows} mix>out out>add".split():
        (x, y, *_), (to_x, to_y, *_) = (boxes[name] for name in pair.split(">"))
        arrow(axes, (x + 0.62, y), (to_x - 0.62, to_y))
    axes.plot([0, 0, 11.8], [1.55, -0.35, -0.35], color=QUIET, linewidth=1.2)
    arrow(axes, (11.8, -0.4), (11.8, 1.5))
    axes.text(5.9, -0.28, "x passes by unchanged", ha="center", va="bottom", color=QUIET)
    for name, (x, y, text, shape) in boxes.items():
        colour = FAINT if name in ("x", "norm", "add") else PALE
        axes.add_patch(Rectangle((x - 0.62, y - 0.42), 1.24, 0.84, color=colour, zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, zorder=3)
        axes.text(x, y + 0.5, str(shape), ha="center", va="bottom", fontsize=8, color=INK)
    axes.set(xlim=(-0.75, 12.55), ylim=(-0.6, 4.6))
    axes.axis("off")
    return made

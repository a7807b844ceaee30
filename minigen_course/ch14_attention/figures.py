"""Figures of attention: weights on a sentence, masks, shared KV heads, overflow of exp."""

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
    AMBER,
    BLUE,
    FAINT,
    HEAT,
    INK,
    ORANGE,
    QUIET,
    figure,
    printable,
    title,
)

Weights = Float[Tensor, "queries keys"]
MOST_TOKENS = 40


def head_map(weights: Weights, tokens: Sequence[str], said: str) -> Figure:
    """Draw one head's weights: a row for each query's token, a column for each key's token.

    Raises `ValueError` for fewer than two tokens, or for more than can be read.
    """
    if not 2 <= len(tokens) <= MOST_TOKENS:
        raise ValueError(
            f"This sentence has {len(tokens)} tokens; 2 to {MOST_TOKENS} can be drawn."
        )
    made, axes = figure(7.6, 5.6)
    drawn = _heat(axes, weights, tokens, size=9 if len(tokens) <= 24 else 6)
    axes.set_ylabel("the token that looks")
    axes.set_xlabel("the token that is looked at")
    made.colorbar(drawn, ax=axes, label="weight", shrink=0.8)
    title(axes, said)
    return made


def head_maps(heads: Mapping[str, Weights], tokens: Sequence[str]) -> Figure:
    """Draw several heads' weights side by side, each under its name."""
    made, axes = figure(10, 3.5, ncols=len(heads), squeeze=False)
    for panel, (name, weights) in zip(axes[0], heads.items(), strict=True):
        _heat(panel, weights, tokens, size=7)
        if panel is not axes[0][0]:
            panel.set_yticks([])
        title(panel, name)
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
    """Draw masks side by side: blue where a query may attend to a key."""
    made, axes = figure(9, 2.9, ncols=len(cases), squeeze=False)
    for panel, (name, mask) in zip(axes[0], cases.items(), strict=True):
        num_queries, num_keys = mask.shape
        for query, key in torch.cartesian_prod(
            torch.arange(num_queries), torch.arange(num_keys)
        ).tolist():
            colour = BLUE if mask[query, key] else FAINT
            panel.add_patch(Rectangle((key + 0.06, query + 0.06), 0.88, 0.88, color=colour))
        panel.set(xlim=(0, num_keys), ylim=(num_keys, 0), aspect="equal")
        panel.set_xticks([each + 0.5 for each in range(num_keys)], range(num_keys))
        first = num_keys - num_queries
        panel.set_yticks([each + 0.5 for each in range(num_queries)], range(first, num_keys))
        panel.tick_params(length=0)
        for side in ("left", "bottom"):
            panel.spines[side].set_visible(False)
        panel.set_xlabel("key's position")
        title(panel, name)
    axes[0][0].set_ylabel("query's position")
    return made


def sharing(cases: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw which query heads use which KV head, for (q_heads, kv_heads)."""
    made, axes = figure(9, 1.8, ncols=len(cases), squeeze=False)
    for panel, (name, (q_heads, kv_heads)) in zip(axes[0], cases.items(), strict=True):
        group = q_heads // kv_heads
        for kv_head in range(kv_heads):
            at = (kv_head + 0.5) * group
            for q_head in range(kv_head * group, (kv_head + 1) * group):
                panel.plot([q_head + 0.5, at], [1, -0.8], color=QUIET, linewidth=1, zorder=0)
                panel.add_patch(Circle((q_head + 0.5, 1), 0.32, color=BLUE))
            panel.add_patch(Rectangle((at - 0.36, -1.16), 0.72, 0.72, color=ORANGE))
        panel.set(xlim=(-0.1, q_heads + 0.1), ylim=(-1.4, 1.6), aspect="equal")
        panel.axis("off")
        title(panel, f"{name}: {q_heads} to {kv_heads}")
    return made


def kv_bars(models: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw the KV cache's bytes per token, for each model with several numbers of KV heads."""
    made, axes = figure(8, 2.9)
    kinds = list(next(iter(models.values())))
    for number, (kind, colour) in enumerate(zip(kinds, (FAINT, BLUE, ORANGE), strict=False)):
        for row, sizes in enumerate(models.values()):
            height = row + (number - (len(kinds) - 1) / 2) * 0.26
            axes.barh(height, sizes[kind] / 1e3, height=0.24, color=colour)
            said = f"{kind}: {sizes[kind] / 1e3:,.0f} kB"
            axes.text(sizes[kind] / 1e3 * 1.06, height, said, va="center", fontsize=8)
    axes.set_yticks(range(len(models)), list(models))
    axes.invert_yaxis()
    largest = max(max(sizes.values()) for sizes in models.values())
    axes.set(xscale="log", xlabel="kB a token (log scale)")
    axes.set_xlim(1, largest / 1e3 * 12)
    title(axes, "What one token keeps")
    return made


def overflow(scores: Float[Tensor, " rows"], head_dim: int) -> Figure:
    """Draw each row's largest score after and before the division, and where exp is infinite."""
    made, axes = figure(8, 2.9)
    raw = scores * math.sqrt(head_dim)
    bins = torch.linspace(-20, 125, 146).tolist()
    axes.hist(raw, bins=bins, color=AMBER, label="before the division by √head_dim")
    axes.hist(scores, bins=bins, color=BLUE, label="score")
    for dtype, name in ((torch.float16, "float16"), (torch.float32, "float32")):
        limit = math.log(torch.finfo(dtype).max)
        axes.axvline(limit, color=INK, linewidth=1.5, linestyle="--")
        axes.text(
            limit + 1.5,
            0.95,
            f"exp is infinite\nin {name}",
            fontsize=9,
            color=INK,
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    axes.set(yscale="log", xlabel="largest score of a row", ylabel="rows (log scale)")
    axes.set_ylim(top=axes.get_ylim()[1] * 6)
    axes.legend(frameon=False, labelcolor=INK, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return made

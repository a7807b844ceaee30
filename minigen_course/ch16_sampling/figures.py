"""Figures of sampling: a next-token distribution, and where each setting cuts it."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from minigen.sampling.sampler import (
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    uniform_draws,
)
from minigen_course.figures.style import BLUE, FAINT, INK, ORANGE, QUIET, figure, printable, title

Logits = Float[Tensor, " vocab"]


def cut(
    logits: Logits,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Logits:
    """Return one row of logits after the sampler's stages; cut tokens have minus infinity."""
    row = apply_temperature(logits[None], torch.tensor([temperature]))
    if min_p > 0:
        row = keep_min_p(row, torch.tensor([min_p]))
    if top_k is not None:
        row = keep_top_k(row, torch.tensor([top_k]))
    if top_p < 1:
        row = keep_top_p(row, torch.tensor([top_p], dtype=torch.float64))
    return row[0]


def next_token(
    logits: Logits,
    spell: Callable[[int], str],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    shown: int = 24,
) -> Figure:
    """Draw the likeliest tokens as bars: pale before the sampler's stages, blue after them.

    `spell` returns a token's text; with a `seed` one token is sampled and marked.
    """
    if temperature <= 0:
        raise ValueError("At temperature 0 nothing is drawn: the likeliest token is taken.")
    left = cut(logits, temperature, top_k, top_p, min_p)
    before, after = logits.softmax(-1), left.softmax(-1)
    order = before.argsort(descending=True)[:shown]
    drawn = None if seed is None else int(draw(left[None], uniform_draws([seed], [0], [0])))
    made, axes = figure(9, 3.4)
    places = range(len(order))
    axes.bar(places, before[order].tolist(), width=0.8, color=FAINT, label="as the model has it")
    axes.bar(places, after[order].tolist(), width=0.45, color=BLUE, label="as it will be drawn")
    kept = int((left > -torch.inf).sum())
    if kept < shown:
        axes.axvline(kept - 0.5, color=ORANGE, linewidth=2)
        axes.text(kept - 0.35, 0.5, "cut", color=ORANGE, transform=axes.get_xaxis_transform())
    axes.set_xticks(places, printable(map(spell, order.tolist())), rotation=60, ha="right")
    axes.set_ylabel("probability")
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    said = f"{kept:,} of {len(logits):,} tokens may be drawn"
    if drawn is not None:
        said += f"; drawn: {printable([spell(drawn)])[0]!r} ({float(after[drawn]):.1%})"
        _mark(axes, order.tolist(), drawn, float(after[drawn]))
    title(axes, said)
    return made


def _mark(axes: Axes, order: Sequence[int], drawn: int, height: float) -> None:
    if drawn in order:
        axes.plot(order.index(drawn), height, "v", color=ORANGE, markersize=11)


def tail_mass(rows: dict[str, Logits], marks: Sequence[int] = (1, 10, 100, 1000)) -> Figure:
    """Draw, for each prompt, the total probability of the tokens beyond the likeliest n."""
    made, axes = figure(8, 3)
    for name, logits in rows.items():
        mass = logits.softmax(-1).double().sort(descending=True).values
        beyond = (1 - mass.cumsum(0)).clamp(min=1e-9)
        axes.plot(range(1, len(mass) + 1), beyond.tolist(), label=name, linewidth=2)
    for mark in marks:
        axes.axvline(mark, color=FAINT, linewidth=1, zorder=0)
    axes.set(xscale="log", ylim=(0, 1), xlabel="n, the likeliest tokens (log scale)")
    axes.set_ylabel("probability beyond them")
    axes.legend(frameon=False, labelcolor=QUIET)
    title(axes, "The tail: thousands of unlikely tokens that together are likely")
    return made

"""Figures of sampling: next-token distributions, where settings cut them, and how one is drawn."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen.sampling.sampler import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    uniform_draws,
)
from minigen_course.ch16_sampling.lesson import Mean
from minigen_course.figures.show import significant
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    CYCLE,
    FAINT,
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

Logits = Float[Tensor, " vocab"]
MOST_DRAWS = 2000


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


def effective_tokens(logits: Logits) -> float:
    """Return among how many equally likely tokens a draw is as uncertain as here (perplexity)."""
    probabilities = logits.double().softmax(-1)
    return float(torch.special.entr(probabilities).sum().exp())


def many_draws(logits: Logits, num_draws: int, seed: int = 0) -> Int64[Tensor, " draws"]:
    """Draw many tokens from one row, those of the steps 0, 1, 2, ... of an answer."""
    uniform = uniform_draws([seed] * num_draws, [0] * num_draws, range(num_draws))
    passed = logits.softmax(-1).double().cumsum(-1)
    return torch.searchsorted(passed, uniform * passed[-1], right=True)


def next_token(
    logits: Logits,
    spell: Callable[[int], str],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_draws: int = 0,
    shown: int = 24,
) -> Figure:
    """Draw the likeliest tokens as bars: pale before the sampler's stages, blue after them.

    A line shows the probabilities after temperature, before the cut. `spell` returns a token's
    text. With `num_draws`, tokens are drawn, and dots show how often each of them came.
    """
    if temperature <= 0:
        raise ValueError("At temperature 0 nothing is drawn: the likeliest token is taken.")
    num_draws = min(num_draws, MOST_DRAWS)
    left = cut(logits, temperature, top_k, top_p, min_p)
    before, after = logits.softmax(-1), left.softmax(-1)
    warm = (logits / temperature).softmax(-1)
    order = before.argsort(descending=True)[:shown]
    places = list(range(len(order)))
    made, axes = figure(9.4, 3.9)
    axes.bar(places, before[order].tolist(), width=0.85, color=FAINT, label="the model")
    axes.bar(places, after[order].tolist(), width=0.5, color=BLUE, label="after all settings")
    axes.step(
        places,
        warm[order].tolist(),
        where="mid",
        color=AMBER,
        linewidth=1.8,
        label=f"after temperature {temperature:g}",
    )
    kept = int((left > -torch.inf).sum())
    if kept < shown:
        axes.axvline(kept - 0.5, color=INK, linewidth=2)
        axes.text(kept - 0.35, 0.5, "cut", color=INK, transform=axes.get_xaxis_transform())
    counted = "1 token" if kept == 1 else f"{kept:,} tokens"
    said = f"{counted} of {len(logits):,} may be drawn"
    if num_draws > 0:
        drawn = many_draws(left, num_draws)
        shares = (drawn[:, None] == order).double().mean(0).tolist()
        axes.plot(
            places,
            shares,
            "o",
            markersize=5,
            color="white",
            markeredgecolor=INK,
            label=f"{num_draws:,} draws",
        )
        missed = max(0.0, 1 - sum(shares))
        said += f"; {missed:.0%} of {num_draws:,} draws fell beyond the {len(order)} shown"
    axes.set_xticks(places, printable(map(spell, order.tolist())), rotation=60, ha="right")
    axes.set(xlim=(-0.8, len(order) - 0.2), ylabel="probability", xlabel="next token")
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    title(axes, said)
    return made


def temperatures(
    logits: Logits,
    spell: Callable[[int], str],
    values: Sequence[float] = (0.5, 1.0, 2.0),
    shown: int = 10,
) -> Figure:
    """Draw the probabilities of the likeliest tokens at several temperatures, a panel for each."""
    order = logits.argsort(descending=True)[:shown]
    labels = printable(map(spell, order.tolist()))
    made, axes = figure(9.4, 3.1, ncols=len(values), sharey=True, squeeze=False)
    for panel, value in zip(axes[0], values, strict=True):
        scaled = logits / value
        probabilities = scaled.softmax(-1)
        rest = float(1 - probabilities[order].double().sum())
        panel.bar(range(shown), probabilities[order].tolist(), color=BLUE, width=0.8)
        panel.bar([shown + 0.5], [rest], color=ORANGE, width=0.8)
        panel.set_xticks([*range(shown), shown + 0.5], [*labels, "all others"], rotation=60)
        for label in panel.get_xticklabels():
            label.set_ha("right")
        panel.set_ylim(0, 1)
        about = significant(effective_tokens(scaled), 2).removesuffix(".0")
        title(panel, f"T = {value:g}: like {about} tokens")
    axes[0][0].set_ylabel("probability")
    return made


def tail_mass(rows: Mapping[str, Logits], marks: Sequence[int] = (1, 10, 100, 1000)) -> Figure:
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
    title(axes, "There is no right n: each prompt has its tail elsewhere")
    return made


def cuts(rows: Mapping[str, Logits], top_k: int, top_p: float, min_p: float) -> Figure:
    """Draw each prompt's probabilities by rank, and the ranks at which three filters cut them."""
    made, axes = figure(8.6, 3.6)
    kinds = {
        f"top-k = {top_k}": ("s", {"top_k": top_k}),
        f"top-p = {top_p:g}": ("o", {"top_p": top_p}),
        f"min-p = {min_p:g}": ("^", {"min_p": min_p}),
    }
    for (name, logits), colour in zip(rows.items(), CYCLE, strict=False):
        ordered = logits.softmax(-1).sort(descending=True).values
        axes.plot(range(1, len(ordered) + 1), ordered.tolist(), color=colour, label=name)
        for marker, settings in kinds.values():
            kept = int((cut(logits, **settings) > -torch.inf).sum())  # type: ignore[arg-type]
            axes.plot(
                kept, float(ordered[kept - 1]), marker, color=colour, markersize=9, clip_on=False
            )
    for name, (marker, _) in kinds.items():
        axes.plot([], [], marker, color=QUIET, markersize=8, label=name)
    axes.set(xscale="log", yscale="log", ylim=(1e-7, 1.2), xlim=(0.8, 60_000))
    axes.set(xlabel="rank of the token (log scale)", ylabel="probability (log scale)")
    axes.legend(frameon=False, labelcolor=INK, ncols=2, loc="lower left")
    title(axes, "Top-k cuts at one rank; top-p and min-p move with the model's certainty")
    return made


def penalized(
    kinds: Mapping[str, Logits], labels: Sequence[str], shown_ids: Sequence[int], said: str
) -> Figure:
    """Draw probabilities of some tokens before penalties (the first entry) and after each.

    A label is a token's text, a line end, and what stands below it.
    """
    made, axes = figure(9.4, 3.7)
    width = 0.8 / len(kinds)
    for number, ((name, logits), colour) in enumerate(
        zip(kinds.items(), (FAINT, BLUE, ORANGE, SKY), strict=False)
    ):
        heights = logits.softmax(-1)[list(shown_ids)].tolist()
        places = [place + (number - (len(kinds) - 1) / 2) * width for place in range(len(heights))]
        axes.bar(places, heights, width=width, color=colour, label=name)
    texts = [each.partition("\n") for each in labels]
    seen = printable(text for text, _, _ in texts)
    below = [f"{text}\n{rest}" for text, (_, _, rest) in zip(seen, texts, strict=True)]
    axes.set_xticks(range(len(labels)), below)
    axes.set(ylim=(0, 1), ylabel="probability", xlabel="next token, and how often it has occurred")
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    title(axes, said)
    return made


def staircase(probabilities: Mapping[str, float], draws: Mapping[str, float]) -> Figure:
    """Draw cumulative probabilities as a staircase, and how uniform numbers fall on tokens.

    `draws` has a uniform number for each name of a draw.
    """
    made, axes = figure(8.6, 3.6)
    names, heights = list(probabilities), list(probabilities.values())
    tops = torch.tensor(heights).double().cumsum(0).tolist()
    for place, (height, top) in enumerate(zip(heights, tops, strict=True)):
        axes.add_patch(Rectangle((place, top - height), 1, height, color=SKY, linewidth=0))
        axes.plot([place, place + 1], [top, top], color=INK, linewidth=1.2)
        axes.plot([place, place], [top - height, top], color=INK, linewidth=1.2)
    for name, uniform in draws.items():
        place = next(place for place, top in enumerate(tops) if top > uniform)
        axes.annotate(
            "",
            (place + 0.5, 0.0),
            (place + 0.5, uniform),
            arrowprops={"arrowstyle": "-|>", "color": ORANGE, "linewidth": 1.6},
        )
        axes.plot([-0.6, place + 0.5], [uniform] * 2, color=ORANGE, linewidth=1.6)
        axes.text(-0.68, uniform, name, ha="right", va="center", color=ORANGE, fontsize=9)
    axes.set(xlim=(-0.6, len(names)), ylim=(0, 1))
    axes.set_yticks([])
    axes.set_xticks([place + 0.5 for place in range(len(names))], printable(names))
    right = axes.secondary_yaxis("right")
    right.set_yticks([0, *tops[:-1], 1.0], [f"{each:.2f}" for each in (0, *tops[:-1], 1.0)])
    right.tick_params(labelsize=8, colors=QUIET)
    right.set_ylabel("cumulative probability")
    axes.set_xlabel("token, in the order of the ids")
    title(axes, "A uniform number lands on a token as often as the token is likely")
    return made


Stage = tuple[str, str]  # a stage's name, and what came of it


def pipeline(stages: Sequence[Stage], taps: Mapping[int, str]) -> Figure:
    """Draw the sampler's stages from left to right, with what each leaves below it.

    `taps` has texts above the arrow that leaves a stage, by the stage's number.
    """
    made, axes = figure(10.4, 2.2)
    for place, (name, left) in enumerate(stages):
        first_or_last = place in (0, len(stages) - 1)
        axes.add_patch(
            Rectangle((place + 0.06, 0), 0.8, 0.9, color=FAINT if first_or_last else PALE)
        )
        axes.text(place + 0.46, 0.45, name, ha="center", va="center", fontsize=9, color=INK)
        axes.text(place + 0.46, -0.16, left, ha="center", va="top", fontsize=8.5, color=INK)
        if place:
            arrow(axes, (place - 0.14, 0.45), (place + 0.06, 0.45))
    for place, text in taps.items():
        arrow(axes, (place + 0.96, 0.45), (place + 0.96, 1.25))
        axes.text(place + 0.96, 1.3, text, ha="center", va="bottom", fontsize=9, color=ORANGE)
    axes.set(xlim=(0, len(stages)), ylim=(-0.95, 1.85))
    axes.axis("off")
    return made


def ladder(found: Mapping[str, Mapping[str, tuple[Sequence[float], Mean]]]) -> Figure:
    """Draw measures as panels; each has a row per setting: its answers as dots, mean, interval.

    `found` is by measure, then by setting. Values are percentages.
    """
    made, axes = figure(9.6, 3.4, ncols=len(found), sharey=True, squeeze=False)
    for panel, (measure, settings) in zip(axes[0], found.items(), strict=True):
        for row, (values, mean) in enumerate(settings.values()):
            panel.plot(values, [row + 0.18] * len(values), "o", color=SKY, markersize=4, alpha=0.8)
            panel.plot([mean.low, mean.high], [row - 0.1] * 2, color=INK, linewidth=2.5)
            panel.plot(mean.value, row - 0.1, "D", color=ORANGE, markersize=7)
        panel.set_yticks(range(len(settings)), list(settings))
        panel.set_ylim(len(settings) - 0.5, -0.5)
        panel.set_xlim(left=-0.03 * max(max(values) for values, _ in settings.values()) - 0.1)
        panel.set_xlabel(measure)
    title(axes[0][0], "Penalties, or drawing, end the repetition ...")
    if len(found) > 1:
        title(axes[0][1], "... and a cut removes most of the tail")
    return made

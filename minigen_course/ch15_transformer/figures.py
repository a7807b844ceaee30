"""Figures of a whole model: parameters and FLOPs by part, and the logit lens.

The logit lens shows what each layer would predict if it were the last. Source: nostalgebraist 2020,
"interpreting GPT: the logit lens".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen.llm import LLM
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    HEAT,
    INK,
    ORANGE,
    QUIET,
    figure,
    printable,
    title,
)
from minigen_course.lab.cost_model import ModelShape, parameter_budget
from minigen_course.lab.inspect_model import recorded_states, transformer_of

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
MOST = 2**17


def budget_bars(shape: ModelShape, context: int) -> Figure:
    """Draw parameters, and FLOPs for one token after `context` tokens, by kind of tensor.

    Raises `ValueError` for a context that is not from 1 to 131,072 tokens.
    """
    if not 1 <= context <= MOST:
        raise ValueError(f"context is from 1 to {MOST:,} tokens, not {context:,}.")
    parts = parameter_budget(shape, context)
    made, (left, right) = figure(10, 3, ncols=2, sharey=True)
    _bars(left, [each.parameters for each in parts], BLUE)
    _bars(right, [each.flops for each in parts], ORANGE)
    left.set_yticks(range(len(parts)), [each.name for each in parts])
    left.invert_yaxis()
    title(left, f"{amount(shape.parameters)} parameters")
    title(right, f"{amount(shape.flops(context))}FLOP for a token, context {context:,}")
    return made


def flops_by_context(shape: ModelShape, longest: int, marked: int) -> Figure:
    """Draw FLOPs for one token, stacked by kind of work, for contexts of up to `longest` tokens.

    The context `marked` has a line. Attention's own work, which has no parameters, is on top.
    """
    first, last = parameter_budget(shape, 0), parameter_budget(shape, longest)
    kinds = sorted(
        (kind for kind in range(len(last)) if last[kind].flops),
        key=lambda kind: first[kind].flops,
        reverse=True,
    )
    made, axes = figure(9, 3.2)
    axes.stackplot(
        [0, longest],
        [[first[kind].flops, last[kind].flops] for kind in kinds],
        labels=[last[kind].name for kind in kinds],
        colors=CYCLE,
    )
    axes.set(xlim=(0, longest), xlabel="context in tokens")
    axes.set_ylabel("FLOPs a token")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))
    axes.axvline(marked, color=INK, linewidth=1.5)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK, reverse=True)
    title(axes, "What one more token costs, as its context grows")
    return made


def amount(value: float) -> str:
    """Return a large number, short: `amount(134_515_008)` is "135 M"."""
    size, unit = next((each for each in UNITS if value >= 0.9995 * each[0]), UNITS[-1])
    return f"{value / size:.3g} {unit}"


def _bars(axes: Any, values: list[int], color: str) -> None:
    whole = sum(values)
    axes.barh(range(len(values)), values, color=color, height=0.65)
    for place, value in enumerate(values):
        share = f"{amount(value)} ({value / whole:.1%})" if value else "none"
        axes.text(value + 0.01 * max(values), place, f" {share}", va="center", color=QUIET)
    axes.set_xlim(0, 1.35 * max(values))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.axvline(0, color=FAINT)


FOLLOWED = 5  # likeliest tokens of the last layer that are followed, per position


@dataclass(frozen=True)
class Lens:
    """Each layer's prediction of the next token at each position; row 0 is the embedding alone.

    `token_ids` is the text; `likeliest` is each layer's likeliest token, and `probability` its
    probability; `entropy` is in bits. `final` are the last layer's likeliest tokens, in order, and
    `final_probability` are the probabilities that each layer gives to them.
    """

    token_ids: Int64[Tensor, " tokens"]
    likeliest: Int64[Tensor, "states tokens"]
    probability: Float[Tensor, "states tokens"]
    entropy: Float[Tensor, "states tokens"]
    final: Int64[Tensor, "tokens followed"]
    final_probability: Float[Tensor, "states tokens followed"]


@torch.inference_mode()
def look(llm: LLM, text: str, max_tokens: int = 12) -> Lens:
    """Apply the final norm and the head to every layer's hidden states of `text`.

    Raises `ValueError` for a text of no tokens, or of more than `max_tokens`.
    """
    token_ids = llm.tokenizer.encode(text)
    if not token_ids:
        raise ValueError("Write at least one word.")
    if len(token_ids) > max_tokens:
        raise ValueError(f"That is {len(token_ids)} tokens; at most {max_tokens} can be drawn.")
    states = recorded_states(llm, token_ids)
    model = transformer_of(llm)
    final = model.logits(states[-1]).topk(FOLLOWED).indices
    rows = []
    for state in states:  # a layer at a time: all of them would take much memory
        logs = model.logits(state).log_softmax(-1)
        top = logs.max(-1)
        entropy = -(logs.exp() * logs).sum(-1) / torch.log(torch.tensor(2.0))
        rows.append((top.indices, top.values.exp(), entropy, logs.gather(-1, final).exp()))
    likeliest, probability, entropy, followed = (
        torch.stack(each) for each in zip(*rows, strict=True)
    )
    return Lens(torch.tensor(token_ids), likeliest, probability, entropy, final, followed)


SHOWN = ("its likeliest token", "the chance of the final token", "how unsure it is")
LONGEST = 8  # characters of a token that fit into a cell
LIGHT = 0.55  # cells above this value are so light that they need dark text


def lens_grid(
    lens: Lens,
    spell: Callable[[int], str],
    *,
    shown: str = SHOWN[0],
    every: int = 3,
    position: int | None = None,
) -> Figure:
    """Draw what each `every`-th layer predicts, and the predictions at one position by layer.

    `shown` is one of `SHOWN`; `spell` returns a token's text. The probabilities of the last layer's
    likeliest tokens after `position` (from 1; the last if None) are drawn for all layers. Raises
    `ValueError` for a position that the text does not have.
    """
    num_states, num_tokens = lens.likeliest.shape
    position = num_tokens if position is None else position
    if not 1 <= position <= num_tokens:
        raise ValueError(f"This text has {num_tokens} tokens: there is no position {position}.")
    layers = sorted({*range(num_states - 1, -1, -every), 0})
    made, (grid, followed) = figure(
        max(8.0, 3.9 + 1.1 * num_tokens),
        1.6 + 0.26 * len(layers),
        ncols=2,
        width_ratios=(max(3.0, 1.1 * num_tokens), 3.2),
    )
    values, texts = _places(lens, spell, shown)
    _draw_places(grid, values[layers], [texts[layer] for layer in layers])
    names = [f"{name}\n{place}" for place, name in enumerate(_labels(lens, spell), 1)]
    grid.set_xticks(range(num_tokens), names)
    grid.set_yticks(range(len(layers)), [str(layer) if layer else "embedding" for layer in layers])
    grid.set_ylabel("after layer")
    grid.get_xticklabels()[position - 1].set_color(ORANGE)
    grid.add_patch(
        Rectangle((position - 1.5, -0.5), 1, len(layers), fill=False, edgecolor=ORANGE, linewidth=2)
    )
    title(grid, f"Each layer: {shown}")
    _draw_followed(followed, lens, spell, position)
    return made


def _labels(lens: Lens, spell: Callable[[int], str]) -> list[str]:
    return [_short(spell(token)) for token in lens.token_ids.tolist()]


def _short(token: str) -> str:
    text = printable([token.replace("\xa0", " ")])[0] or "special"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _places(
    lens: Lens, spell: Callable[[int], str], shown: str
) -> tuple[Float[Tensor, "states tokens"], list[list[tuple[str, str]]]]:
    """Return each cell's value for its colour (0 to 1), and its token and number as text."""
    if shown == SHOWN[0]:
        texts = [
            [(_short(spell(token)), f"{chance:.0%}") for token, chance in zip(*each, strict=True)]
            for each in zip(lens.likeliest.tolist(), lens.probability.tolist(), strict=True)
        ]
        return lens.probability, texts
    if shown == SHOWN[1]:
        chances = lens.final_probability[:, :, 0]
        return chances, [[("", f"{each:.0%}") for each in row] for row in chances.tolist()]
    if shown == SHOWN[2]:
        rows = lens.entropy.tolist()
        return lens.entropy / 16, [[("", f"{each:.1f} bits") for each in row] for row in rows]
    raise ValueError(f"shown is one of {', '.join(SHOWN)}; not {shown!r}.")


def _draw_places(
    axes: Any, values: Float[Tensor, "rows tokens"], texts: list[list[tuple[str, str]]]
) -> None:
    axes.imshow(values.numpy(), cmap=HEAT, vmin=0, vmax=1, aspect="auto", origin="lower")
    axes.tick_params(length=0)
    for row, line in enumerate(texts):
        for place, (token, number) in enumerate(line):
            look = {"color": INK if float(values[row, place]) > LIGHT else "white", "va": "center"}
            if token:
                axes.text(place - 0.44, row, token, ha="left", fontsize=9, **look)
            axes.text(place + 0.45, row, number, ha="right", fontsize=8, **look)


def _draw_followed(axes: Any, lens: Lens, spell: Callable[[int], str], position: int) -> None:
    finals = lens.final[position - 1].tolist()
    chances = lens.final_probability[:, position - 1]
    for token, chance, color in zip(finals, chances.T, CYCLE, strict=False):
        axes.plot(
            chance.tolist(),
            range(len(chance)),
            color=color,
            linewidth=2,
            label=f"“{_short(spell(token))}”",
        )
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.5, len(chances) - 0.5), xlabel="probability")
    axes.set_ylabel("after layer")
    axes.grid(axis="x", color=FAINT)
    axes.legend(frameon=False, fontsize=9, loc="lower right", labelcolor=INK)
    title(axes, f"Chosen after position {position}")

"""Figures of a whole model: its data flow, what each layer adds, FLOPs by part, the logit lens.

The logit lens shows what each layer would predict if it were the last. Source: nostalgebraist 2020,
"interpreting GPT: the logit lens".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.llm import LLM
from minigen_course.ch15_transformer.reference import token_flops
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    HEAT,
    INK,
    ORANGE,
    PALE,
    QUIET,
    Point,
    arrow,
    figure,
    printable,
    title,
)
from minigen_course.lab.cost_model import SHAPES, ModelShape, config_of, parameter_budget
from minigen_course.lab.inspect_model import recorded_states, transformer_of

NAMES = {  # of the parts in a picture
    "embedding": "embedding",
    "attention's products": "attention: four matrices",
    "attention's context": "attention: scores, mix",
    "feed-forward": "feed-forward",
    "norms": "norms",
    "head": "output head",
}
NOT_COUNTED = ["none: a row is looked up", *["none"] * 3, "not counted: tiny", "none"]
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
MOST = 2**17


def forward_flow(config: ModelConfig, num_tokens: int) -> Figure:
    """Draw the whole forward pass: the residual stream, the halves that add to it, and all shapes.

    The stream runs downwards at the left. In each box stands the shape of what leaves it.
    """
    made, axes = figure(10.2, 6.6)
    wide, units = [num_tokens, config.hidden], [num_tokens, config.ffn]
    heads = [num_tokens, config.q_heads, config.head_dim]
    shared = [num_tokens, config.kv_heads, config.head_dim]
    _line(axes, (STREAM, 7.0), (STREAM, 0.45), color=BLUE, linewidth=5)
    axes.text(
        *(STREAM + 0.16, 6.22), f"residual stream x {wide}", color=BLUE, va="center", fontsize=10
    )
    for y, name, shape in ((7.7, "token ids", [num_tokens]), (6.95, "embedding", wide)):
        _box(axes, (STREAM, y), name, shape)
    _half(axes, 5.25, ("queries: $W_q$, rotate", "keys: $W_k$, rotate", "values: $W_v$"), heads)
    for y, shape in ((5.25, shared), (4.45, shared)):
        _shape(axes, (COLUMNS[1], y), shape)
    _chain(axes, 5.25, ("attention", heads), ("join heads, $W_o$", wide))
    _half(axes, 2.55, ("gate: $W_{gate}$", "up: $W_{up}$"), units)
    _chain(axes, 2.55, ("SwiGLU", units), ("$W_{down}$", wide))
    for y, name in ((5.25, "attention"), (2.55, "feed-forward")):
        _box(axes, (COLUMNS[0], y), "RMSNorm", wide)
        arrow(axes, (STREAM + 0.05, y), (COLUMNS[0] - HALF_WIDTH, y), **TOUCHING)
        axes.text(9.75, y, name, rotation=270, ha="center", va="center", color=QUIET, fontsize=10)
        _added(axes, y, y - 1.45)
    _line(axes, (0.42, 6.3), (0.3, 6.3), (0.3, 0.75), (0.42, 0.75), color=QUIET, linewidth=1.5)
    times = f"{config.num_layers}\nlayers"
    axes.text(0.22, 3.5, times, ha="right", va="center", color=INK, fontsize=11)
    _line(axes, (STREAM, 0.46), (STREAM, 0.0), color=BLUE, linewidth=5)
    ends = (("RMSNorm", wide), ("output head", [num_tokens, config.vocab_size]))
    for place, (name, shape) in enumerate(ends):
        _box(axes, (COLUMNS[place], 0.02), name, shape)
    arrow(
        axes,
        (STREAM - 0.03, 0.02),
        (COLUMNS[0] - HALF_WIDTH, 0.02),
        color=BLUE,
        linewidth=3,
        **TOUCHING,
    )
    arrow(axes, (COLUMNS[0] + HALF_WIDTH, 0.02), (COLUMNS[1] - HALF_WIDTH, 0.02), **TOUCHING)
    arrow(axes, (COLUMNS[1] + HALF_WIDTH, 0.02), (COLUMNS[2] - 0.72, 0.02), **TOUCHING)
    axes.text(COLUMNS[2] - 0.66, 0.02, "logits: a score for each token", va="center", fontsize=10)
    axes.set(xlim=(-0.6, 10.0), ylim=(-0.45, 8.1))
    axes.axis("off")
    return made


TOUCHING = {"shrinkA": 0, "shrinkB": 0}  # an arrow that ends at its points
STREAM, COLUMNS, HALF_WIDTH = 1.1, (2.8, 4.7, 6.6, 8.5), 0.78


def _half(axes: Axes, y: float, names: Sequence[str], shape: list[int]) -> None:
    """Draw a half's first products one below another, with arrows to and from them."""
    height = 0.8 if len(names) == 3 else 0.9
    for place, name in enumerate(names):
        at = y + height * ((len(names) - 1) / 2 - place)
        _box(axes, (COLUMNS[1], at), name, shape if place == 0 or len(names) == 2 else None)
        arrow(axes, (COLUMNS[0] + HALF_WIDTH, y), (COLUMNS[1] - HALF_WIDTH, at), **TOUCHING)
        arrow(axes, (COLUMNS[1] + HALF_WIDTH, at), (COLUMNS[2] - HALF_WIDTH, y), **TOUCHING)


def _chain(
    axes: Axes,
    y: float,
    mixed: tuple[str, list[int]],
    last: tuple[str, list[int]],
) -> None:
    """Draw what a half does with its first products: one box, and the product that leads back."""
    _box(axes, (COLUMNS[2], y), *mixed)
    _box(axes, (COLUMNS[3], y), *last)
    arrow(axes, (COLUMNS[2] + HALF_WIDTH, y), (COLUMNS[3] - HALF_WIDTH, y), **TOUCHING)


def _added(axes: Axes, y: float, below: float) -> None:
    """Draw the way of a half's result back to the stream, to which it is added."""
    _line(axes, (COLUMNS[3], y - 0.33), (COLUMNS[3], below), color=QUIET, linewidth=1.2)
    arrow(axes, (COLUMNS[3], below), (STREAM + 0.2, below), **TOUCHING)
    axes.add_patch(Circle((STREAM, below), 0.2, facecolor="white", edgecolor=BLUE, zorder=4))
    axes.text(STREAM, below, "+", ha="center", va="center", fontsize=13, color=BLUE, zorder=5)


def _box(axes: Axes, at: Point, name: str, shape: list[int] | None) -> None:
    x, y = at
    axes.add_patch(
        Rectangle((x - HALF_WIDTH, y - 0.33), 2 * HALF_WIDTH, 0.66, color=PALE, zorder=3)
    )
    axes.text(x, y + 0.14, name, ha="center", va="center", fontsize=9, color=INK, zorder=5)
    if shape is not None:
        _shape(axes, at, shape)


def _shape(axes: Axes, at: Point, shape: list[int]) -> None:
    axes.text(
        at[0], at[1] - 0.15, str(shape), ha="center", va="center", fontsize=9, color=BLUE, zorder=5
    )


def _line(axes: Axes, *points: Point, **look: Any) -> None:
    axes.plot(*zip(*points, strict=True), **{"solid_capstyle": "butt", "zorder": 1, **look})


def added_by_layer(
    states: Float[Tensor, "states tokens hidden"], left_out: Sequence[float], whole: float
) -> Figure:
    """Draw how long x and each layer's addition to it are, and the perplexity without each layer.

    `left_out` has the perplexities without layer 0, 1, ...; `whole` is that of the whole model. The
    first token, whose x is far longer, is left out of the lengths.
    """
    made, (left, right) = figure(10.2, 3.4, ncols=2)
    stream = states[:-1, 1:].norm(dim=-1).mean(-1)
    added = (states[1:] - states[:-1])[:, 1:].norm(dim=-1).mean(-1)
    layers = range(len(left_out))
    left.plot(layers, stream.tolist(), color=BLUE, linewidth=2, label="x before the layer")
    left.plot(layers, added.tolist(), color=ORANGE, linewidth=2, label="what the layer adds")
    left.set(yscale="log", xlabel="layer", ylabel="length of the vector")
    left.legend(frameon=False, labelcolor=INK)
    title(left, "Most layers add a fifth to a third of x's length")
    right.axhline(whole, color=QUIET, linewidth=1.2)
    right.annotate(
        f"all layers: {whole:.0f}",
        (0.98, whole),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=QUIET,
    )
    right.plot(layers, left_out, "o", color=ORANGE)
    right.set(yscale="log", xlabel="layer that is left out", ylabel="perplexity")
    right.set_ylim(min(*left_out, whole) / 2.2, 2 * max(left_out))
    title(right, "Most layers can be left out, the first cannot")
    return made


def attention_share(names: Sequence[str]) -> Figure:
    """Draw attention's share of one token's FLOPs against its context, for models of `SHAPES`.

    Solid lines count scores and mix only, dashed ones also the products with W_q, W_k, W_v, W_o.
    """
    made, axes = figure(9.4, 3.8)
    contexts = [2**power for power in range(18)]
    for name, color in zip(names, CYCLE, strict=False):
        config = config_of(name)
        products = next(
            each for each in parameter_budget(SHAPES[name], 0) if "products" in each.name
        )
        whole = [token_flops(config, context) for context in contexts]
        # One token's own share is what it costs with its context, less what it costs without.
        mixed = [context * (whole[1] - whole[0]) for context in contexts]
        for extra, style in ((0, "-"), (products.flops, "--")):
            shares = [(each + extra) / total for each, total in zip(mixed, whole, strict=True)]
            label = name if style == "-" else None
            axes.plot(contexts, shares, style, color=color, linewidth=2, label=label)
    axes.set(xscale="log", xlim=(1, contexts[-1]), ylim=(0, 1), xlabel="context in tokens")
    axes.set_ylabel("share of a token's FLOPs")
    ticks = [1, 10, 100, 1_000, 8_192, 131_072]
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.axvline(8192, color=FAINT, linewidth=1.5, zorder=0)
    axes.add_artist(axes.legend(frameon=False, loc="upper left", labelcolor=INK))
    styles = [Line2D([], [], color=QUIET, linestyle=style) for style in ("-", "--")]
    counted = ("solid: scores and mix only", r"dashed: and $W_q$, $W_k$, $W_v$, $W_o$")
    axes.legend(
        styles, counted, frameon=False, loc="upper left", labelcolor=INK, bbox_to_anchor=(0.24, 1)
    )
    title(axes, "The wider the model, the later attention takes over")
    return made


def budget_bars(shape: ModelShape, context: int) -> Figure:
    """Draw parameters, and one token's FLOPs at a context of `context`, by kind of tensor.

    Raises `ValueError` for a context that is not from 1 to 131,072 tokens.
    """
    if not 1 <= context <= MOST:
        raise ValueError(f"context is from 1 to {MOST:,} tokens, not {context:,}.")
    parts = parameter_budget(shape, context)
    made, (left, right) = figure(10, 3, ncols=2, sharey=True)
    head = "tied: the embedding is reused" if shape.tied else "none"
    _bars(left, [each.parameters for each in parts], BLUE, ["none"] * 5 + [head])
    _bars(right, [each.flops for each in parts], ORANGE, NOT_COUNTED)
    left.set_yticks(range(len(parts)), [NAMES[each.name] for each in parts])
    left.invert_yaxis()
    title(left, f"{amount(shape.parameters)} parameters")
    title(right, f"{amount(shape.flops(context))}FLOP for a token, context {context:,}")
    return made


def amount(value: float) -> str:
    """Return a large number, short: `amount(134_515_008)` is "135 M"."""
    size, unit = next((each for each in UNITS if value >= 0.9995 * each[0]), UNITS[-1])
    return f"{value / size:.3g} {unit}"


def _bars(axes: Any, values: list[int], color: str, zeros: list[str]) -> None:
    """Draw bars with amounts and shares; `zeros` are the labels of values that are zero."""
    whole = sum(values)
    axes.barh(range(len(values)), values, color=color, height=0.65)
    for place, value in enumerate(values):
        share = f"{amount(value)} ({value / whole:.1%})" if value else zeros[place]
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
        max(8.0, 4.0 + 1.4 * num_tokens),
        1.6 + 0.34 * len(layers),
        ncols=2,
        width_ratios=(max(3.0, 1.4 * num_tokens), 3.2),
    )
    values, texts = _places(lens, spell, shown)
    _draw_places(grid, values[layers], [texts[layer] for layer in layers])
    names = [f"{name}\n{place}" for place, name in enumerate(_labels(lens, spell), 1)]
    grid.set_xticks(range(num_tokens), names)
    grid.set_yticks(range(len(layers)), [str(layer) if layer else "embedding" for layer in layers])
    grid.set_ylabel("layers passed", fontsize=11)
    grid.tick_params(labelsize=11)
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
    text = printable([token.replace("\xa0", " ")])[0]
    if not text:
        return "‹special›"
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
                axes.text(place - 0.44, row, token, ha="left", fontsize=11, **look)
            axes.text(place + 0.45, row, number, ha="right", fontsize=10, **look)


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
    axes.set(xscale="log", xlim=(1e-6, 2), ylim=(-0.5, len(chances) - 0.5), xlabel="probability")
    axes.set_ylabel("layers passed", fontsize=11)
    axes.grid(axis="x", color=FAINT)
    axes.legend(frameon=False, fontsize=11, loc="center right", handlelength=1.2, labelcolor=INK)
    title(axes, f"The final five at position {position}")

"""Where a model's parameters and its work are: a bar for each kind of tensor."""

from typing import Any

from matplotlib.figure import Figure

from minigen.teach.budget import ModelShape, budget
from minigen.viz.style import BLUE, CYCLE, FAINT, INK, ORANGE, QUIET, figure, title

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
MOST = 2**17


def budget_bars(shape: ModelShape, context: int) -> Figure:
    """Parameters, and FLOPs for one token after `context` tokens, by kind of tensor.

    Raises `ValueError` for a context that is not from 1 to 131,072 tokens.
    """
    if not 1 <= context <= MOST:
        raise ValueError(f"context is from 1 to {MOST:,} tokens, not {context:,}.")
    parts = budget(shape, context)
    made, (left, right) = figure(10, 3, ncols=2, sharey=True)
    _bars(left, [each.parameters for each in parts], BLUE)
    _bars(right, [each.flops for each in parts], ORANGE)
    left.set_yticks(range(len(parts)), [each.name for each in parts])
    left.invert_yaxis()
    title(left, f"{amount(shape.parameters)} parameters")
    title(right, f"{amount(shape.flops(context))}FLOP for a token, context {context:,}")
    return made


def flops_by_context(shape: ModelShape, longest: int, marked: int) -> Figure:
    """FLOPs for one token, stacked by kind of work, against a context of up to `longest` tokens.

    One context is marked. What belongs to no parameters, attention's own work, lies on top.
    """
    first, last = budget(shape, 0), budget(shape, longest)
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
    """A large number, short: `amount(134_515_008)` is "135 M"."""
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

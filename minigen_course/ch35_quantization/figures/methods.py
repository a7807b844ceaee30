"""AWQ's search, GPTQ's columns, their checkpoints' words, and mixed bits."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen.quantization.gptq import inverse_factor
from minigen.quantization.grid import Grid, choose_scales, split_groups
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    HEAT,
    INK,
    ORANGE,
    PINK,
    QUIET,
    SKY,
    figure,
    title,
)

BITS_COLOURS = {2: ORANGE, 3: AMBER, 4: SKY, 5: BLUE, 6: GREEN, 8: PINK}


def search_curve(alphas: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the error on the calibration inputs over alpha, of that at the first alpha (RTN).

    Each line is one search, for example one matrix; a dot marks its smallest error.
    """
    made, axes = figure(8.4, 3.5)
    for (name, given), colour in zip(errors.items(), CYCLE, strict=False):
        relative = np.asarray(given) / given[0]
        best = int(relative.argmin())
        label = f"{name}: α = {alphas[best]:.2f}, {relative[best]:.2f} of RTN's error"
        axes.plot(alphas, relative, "-", color=colour, linewidth=1.6)
        axes.plot(alphas[best], relative[best], "o", color=colour, markersize=8, label=label)
    axes.axhline(1, color=QUIET, linestyle="--", linewidth=1)
    axes.text(alphas[-1], 1, "round to nearest ", color=QUIET, fontsize=9, ha="right", va="bottom")
    highest = max(max(each) / each[0] for each in errors.values())
    axes.set_ylim(0, min(1.1 * highest, 2.5))
    axes.set(xlabel="exponent α of the factors", ylabel="squared error of the\noutputs, of RTN's")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    title(axes, "AWQ tries exponents: 0 is rounding to nearest, 1 makes all inputs alike")
    return made


def columns_that_matter(
    activations: Float[Tensor, " columns"],
    weights: Float[Tensor, " columns"],
    num_marked: int = 6,
    factors: Float[Tensor, " columns"] | None = None,
) -> Figure:
    """Draw each input channel's mean |x| and mean |W|, and AWQ's factors if given.

    The `num_marked` channels with the largest inputs are orange in all panels. Each panel is in
    multiples of its own median.
    """
    panels = {"mean |x| of the inputs": activations, "mean |W| of the column": weights}
    if factors is not None:
        panels["factor s"] = factors
    made, all_axes = figure(10, 1.0 + 1.35 * len(panels), nrows=len(panels), sharex=True)
    marked = activations.topk(num_marked).indices
    others = torch.ones(len(activations), dtype=torch.bool)
    others[marked] = False
    columns = torch.arange(len(activations))
    for axes, (name, given) in zip(all_axes, panels.items(), strict=True):
        relative = given.float() / given.float().median()
        axes.vlines(columns[others], 0, relative[others], color=SKY, linewidth=0.8)
        axes.vlines(marked, 0, relative[marked], color=ORANGE, linewidth=1.8)
        axes.plot(marked, relative[marked], "o", color=ORANGE, markersize=4)
        axes.axhline(1, color=QUIET, linewidth=0.8, linestyle="--")
        most, mean = float(relative.amax()), float(relative[marked].mean())
        axes.set(ylim=(0, 1.12 * most), ylabel="of the median")
        title(axes, f"{name}: {num_marked} columns at {mean:.1f} times the median, on average")
    all_axes[-1].set(xlabel="input channel (column of W)", xlim=(-2, len(activations) + 1))
    return made


def column_steps(
    weight: Float[Tensor, "rows columns"],
    hessian: Float[Tensor, "columns columns"],
    grid: Grid,
    damping: float = 0.01,
) -> list[Tensor]:
    """Return the matrix after 0, 1, ... columns of GPTQ: rounded on the left, free on the right.

    The scales are those of the matrix as it was (`static_groups`).
    """
    size = grid.size_of_group(weight.shape[1])
    scales, zeros = choose_scales(split_groups(weight, grid), grid)
    factor = inverse_factor(hessian, damping)
    now = weight.float().clone()
    steps = [now.clone()]
    for i in range(weight.shape[1]):
        scale, zero = scales[:, i // size], zeros[:, i // size]
        code = torch.round(now[:, i] / scale + zero).clamp(0, grid.max_code)
        rounded = (code - zero) * scale
        error = (now[:, i] - rounded) / factor[i, i]
        now[:, i] = rounded
        now[:, i + 1 :] -= torch.outer(error, factor[i, i + 1 :])
        steps.append(now.clone())
    return steps


def pushed_errors(
    steps: Sequence[Float[Tensor, "rows columns"]],
    step: int,
    output_errors: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw what `step` columns of GPTQ have changed: rounding on the left, repayment on the right.

    `steps` are the matrix after 0, 1, ... columns. `output_errors` are errors of the outputs after
    each step, by method; they are drawn below up to `step`.
    """
    first, now = steps[0].float(), steps[step].float()
    change = now - first
    columns = first.shape[1]
    most = float(torch.stack([each.float() - first for each in steps]).abs().quantile(0.995))
    made, axes = figure(
        10,
        4.6 if output_errors else 2.9,
        nrows=2 if output_errors else 1,
        **({"height_ratios": (1.3, 1)} if output_errors else {}),
    )
    top = axes[0] if output_errors else axes
    image = top.imshow(
        change.numpy(),
        cmap="RdBu_r",
        vmin=-most,
        vmax=most,
        aspect="auto",
        interpolation="none",
    )
    top.axvline(step - 0.5, color=INK, linewidth=2)
    top.set(
        xlabel="column: rounded on the left of the line, still free on its right",
        ylabel="row",
        xlim=(-0.5, columns - 0.5),
    )
    bar = made.colorbar(image, ax=top, pad=0.01)
    bar.set_label("change of the weight", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    heading = f"{step} of {columns} columns rounded"
    sides = {"on the left": change[:, :step], "on the right": change[:, step:]}
    moved = [
        f"{float(x.square().mean().sqrt()):.2g} {side}" for side, x in sides.items() if x.numel()
    ]
    if step:
        heading += f": RMS change {', '.join(moved)}"
    title(top, heading)
    if output_errors:
        below = axes[1]
        for (name, errors), colour in zip(output_errors.items(), (BLUE, ORANGE), strict=False):
            places = range(len(errors))
            below.plot(places, errors, color=colour, alpha=0.25, linewidth=1.2)
            below.plot(places[: step + 1], errors[: step + 1], color=colour, label=name)
            below.plot(step, errors[step], "o", color=colour)
        below.set(xlim=(-0.5, columns + 0.5), xlabel="columns rounded")
        below.set_ylim(0, 1.08 * max(max(each) for each in output_errors.values()))
        below.set_ylabel("error of the outputs,\nrelative")
        below.legend(frameon=False, labelcolor=INK, loc="upper left")
    return made


def sensitivity_map(
    sensitivity: Mapping[str, Mapping[str, float]], bits: Mapping[str, str], form: str = "3"
) -> Figure:
    """Draw what each matrix alone costs at `form` bits, by layer and kind, and the bits chosen.

    Names are the tensors' ("model.layers.7.mlp.down_proj.weight"); losses are KL divergences.
    """
    kinds = list(dict.fromkeys(_place(name)[1] for name in sensitivity))
    layers = sorted({_place(name)[0] for name in sensitivity})
    losses = np.full((len(kinds), len(layers)), np.nan)
    chosen = np.full((len(kinds), len(layers)), np.nan)
    for name, by_form in sensitivity.items():
        layer, kind = _place(name)
        cell = kinds.index(kind), layers.index(layer)
        losses[cell], chosen[cell] = max(by_form[form], 1e-9), int(bits[name])
    made, (top, below) = figure(11, 1.6 + 0.52 * len(kinds), nrows=2, sharex=True)
    norm = LogNorm(np.nanmin(losses), np.nanmax(losses))
    image = top.imshow(losses, cmap=HEAT, norm=norm, aspect="auto", interpolation="none")
    bar = made.colorbar(image, ax=top, pad=0.01)
    bar.set_label("KL divergence\n(log scale)", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    offered = sorted(
        {int(each) for each in bits.values()}
        | {int(f) for own in sensitivity.values() for f in own}
    )
    colours = ListedColormap([BITS_COLOURS.get(each, FAINT) for each in offered])
    edges = [offered[0] - 0.5, *((a + b) / 2 for a, b in pairwise(offered))]
    shown = below.imshow(
        chosen,
        cmap=colours,
        norm=BoundaryNorm([*edges, offered[-1] + 0.5], len(offered)),
        aspect="auto",
        interpolation="none",
    )
    for (row, column), each in np.ndenumerate(chosen):
        if not np.isnan(each):
            below.text(column, row, f"{each:.0f}", ha="center", va="center", fontsize=7, color=INK)
    bar = made.colorbar(shown, ax=below, pad=0.01, ticks=offered)
    bar.set_label("bits", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    for axes in (top, below):
        axes.set_yticks(range(len(kinds)), [each.removesuffix("_proj") for each in kinds])
        axes.tick_params(axis="y", labelcolor=INK)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    stride = max(1, len(layers) // 15)
    below.set_xticks(range(0, len(layers), stride), [str(each) for each in layers[::stride]])
    below.set_xlabel("layer")
    share = np.nansum(np.sort(losses[~np.isnan(losses)])[-losses.size // 10 :]) / np.nansum(losses)
    title(top, f"one matrix at {form} bits: a tenth of them has {share:.0%} of the loss")
    counts = ", ".join(f"{int((chosen == each).sum())} at {each}" for each in offered)
    title(below, f"bits chosen: {counts}")
    return made


def _place(name: str) -> tuple[int, str]:
    """Return the layer and the kind of a matrix."""
    found = re.search(r"layers\.(\d+)\..*?(\w+)\.weight$", name)
    if found is None:
        raise ValueError(f"{name} is not the weight of a layer.")
    return int(found[1]), found[2]


def knapsack_curve(sizes: Sequence[Mapping[str, float]]) -> Figure:
    """Draw the loss of the greedy choice, of the optimum and of the bound, by bytes allowed.

    `sizes` have "bytes", "greedy", "optimum" and "bound", as in the stored results' "six matrices".
    """
    made, axes = figure(8.0, 3.4)
    kilobytes = [each["bytes"] / 1e3 for each in sizes]
    for key, colour, look, label in (
        ("bound", QUIET, "--", "bound: the last step bought in part"),
        ("optimum", BLUE, "o-", "optimum: all mixtures tried"),
        ("greedy", ORANGE, "x", "greedy: the largest gain per byte first"),
    ):
        axes.plot(
            kilobytes,
            [each[key] for each in sizes],
            look,
            color=colour,
            label=label,
            markersize=8 if look == "x" else 5,
            markeredgewidth=2 if look == "x" else 1,
            zorder=3 if look == "x" else 2,
        )
    equal = sum(each["greedy"] <= each["optimum"] * (1 + 1e-9) for each in sizes)
    axes.set(xlabel="kilobytes for six matrices", ylabel="sum of the losses\n(KL divergence)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, f"The greedy choice equals the optimum at {equal} of {len(sizes)} sizes")
    return made


WORD_ORDERS: Mapping[str, tuple[str, tuple[int, ...]]] = {  # from the lowest four bits up
    "GPTQ": ("inputs of one output", (0, 1, 2, 3, 4, 5, 6, 7)),
    "AWQ": ("outputs of one input", (0, 2, 4, 6, 1, 3, 5, 7)),
    "compressed-tensors": ("inputs of one output", (0, 1, 2, 3, 4, 5, 6, 7)),
}


def packed_words() -> Figure:
    """Draw which eight codes of 4 bits a 32-bit word has in three kinds of checkpoints."""
    made, axes = figure(10, 2.9)
    for line, (_, order) in enumerate(WORD_ORDERS.values()):
        for place, index in enumerate(order):
            x = 28 - 4 * place  # the highest bits are on the left
            shade = 0.25 + 0.65 * index / 7
            axes.add_patch(
                Rectangle(
                    (x, line - 0.33),
                    4,
                    0.66,
                    facecolor=colormaps["Blues"](shade),
                    edgecolor="white",
                    linewidth=2,
                )
            )
            ink = "white" if shade > 0.55 else INK
            axes.text(x + 2, line, str(index), ha="center", va="center", color=ink, fontsize=11)
    labels = [f"{name}\n{what}" for name, (what, _) in WORD_ORDERS.items()]
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks(range(0, 33, 4), [str(32 - each) for each in range(0, 33, 4)])
    axes.set(xlim=(-0.2, 32.2), ylim=(len(labels) - 0.5, -0.5), xlabel="bit of the word")
    title(axes, "which of eight neighbours a 32-bit word holds where")
    return made


def seen_and_unseen(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Draw the error of the outputs by method and text, a panel for each calibration.

    `errors` are by calibration, method and text; the first text is the one that was seen.
    """
    made, panels = figure(10, 3.0, ncols=len(errors), sharey=True, squeeze=False)
    most = max(
        e for methods in errors.values() for by_text in methods.values() for e in by_text.values()
    )
    for axes, (calibration, methods) in zip(panels[0], errors.items(), strict=True):
        for place, by_text in enumerate(methods.values()):
            width = 0.8 / len(by_text)
            for number, (text, error) in enumerate(by_text.items()):
                x = place + (number - (len(by_text) - 1) / 2) * width
                colour = (FAINT, SKY, ORANGE)[number]
                label = text if place == 0 else None
                axes.bar(x, 100 * error, width * 0.92, color=colour, label=label)
                axes.text(
                    x, 100 * (error + 0.01 * most), f"{100 * error:.0f}", ha="center", fontsize=8.5
                )
        axes.set_xticks(range(len(methods)), list(methods), color=INK)
        axes.set(xlabel="method", ylim=(0, 115 * most))
        title(axes, f"calibrated on {calibration}")
    panels[0][0].set_ylabel("error of the outputs, %")
    panels[0][-1].legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left")
    return made

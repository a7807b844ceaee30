"""Weights on a grid: a histogram with the grid drawn in, an outlier, and the values of codes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from minigen.checkpoint.quantized.floats import E2M1, NF4
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
    SKY,
    figure,
    title,
)

UNITS = ("tensor", "row", "group")
CLOSE_UP = 4.5  # standard deviations on each side of 0 in the close-up
LEAST, MOST = 0.003, 3.0  # of the map's colours, in standard deviations
Grouped = Float[Tensor, "rows groups group_size"]


def outlier_histogram(
    weight: Float[Tensor, "rows columns"],
    outlier: float,
    per: str,
    bits: int = 4,
    group_size: int = 64,
) -> Figure:
    """Draw a matrix's weights and the grid, after one weight became `outlier` standard deviations.

    The grid is by absmax, with one scale `per` tensor, row or group. Errors leave the outlier out.
    Raises `ValueError` for another `per`, and for rows that are not whole groups.
    """
    if per not in UNITS:
        raise ValueError(f"A scale is per {', '.join(UNITS)}, not per {per}.")
    if weight.shape[1] % group_size:
        raise ValueError(f"A row of {weight.shape[1]} weights has no whole groups of {group_size}.")
    sigmas = weight.float() / weight.float().std()
    groups = sigmas.unflatten(1, (-1, group_size)).clone()
    place = (groups.shape[0] // 2, groups.shape[1] // 2, group_size // 2)
    groups[place] = outlier
    steps = {unit: _steps(groups, unit, bits) for unit in UNITS}
    errors = {unit: _errors(groups, steps[unit], bits, place) for unit in UNITS}
    made, ((wide, who), (close, bars)) = figure(
        11, 5.0, nrows=2, ncols=2, width_ratios=(1.9, 1), height_ratios=(1, 1.25)
    )
    step, another = float(steps[per][place[:2]]), float(steps[per][0, 0])
    _whole(wide, groups, outlier, step, bits)
    _close_up(close, groups, (step,) if per == "tensor" else (step, another), per, bits)
    _who_pays(who, errors[per], place)
    relative = {unit: _relative(groups, each, place) for unit, each in errors.items()}
    _bars(bars, relative, per)
    title(wide, f"One weight is {outlier:g} σ; {bits} bits, one scale per {per}")
    return made


def _steps(groups: Grouped, per: str, bits: int) -> Float[Tensor, "rows groups 1"]:
    """Return the step of each group's grid, which reaches the largest magnitude of its unit."""
    most = groups.abs().amax(2, keepdim=True)
    if per != "group":
        most = most.amax(1, keepdim=True).expand_as(most)
    if per == "tensor":
        most = most.amax().expand_as(most)
    return most.clamp(min=1e-12) / _last_code(bits)


def _last_code(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _errors(
    groups: Grouped, steps: Float[Tensor, "rows groups 1"], bits: int, place: tuple[int, int, int]
) -> Grouped:
    """Return how far each weight is moved; 0 for the outlier."""
    last = _last_code(bits)
    errors = (groups / steps).round().clamp(-last, last) * steps - groups
    errors[place] = 0
    return errors


def _relative(groups: Grouped, errors: Grouped, place: tuple[int, int, int]) -> float:
    """Return the RMS of the errors over that of the weights, without the outlier."""
    weights = groups.clone()
    weights[place] = 0
    return float(errors.norm() / weights.norm())


def _whole(axes: Axes, groups: Grouped, outlier: float, step: float, bits: int) -> None:
    """Draw the histogram of all weights, and the outlier's grid over it."""
    reach = max(1.08 * abs(outlier), float(groups.abs().amax())) + 1
    counts = torch.histc(groups.flatten(), 121, -reach, reach)
    edges = torch.linspace(-reach, reach, 122)
    last = _last_code(bits)
    for code in range(-last, last + 1):
        axes.axvline(code * step, color=ORANGE, linewidth=1.0 if last < 40 else 0.4, zorder=0)
    axes.stairs(counts.numpy(), edges.numpy(), fill=True, color=BLUE, baseline=0.5)
    axes.set_yscale("log")
    axes.minorticks_off()  # most of the drawing's time
    top = 4 * float(counts.amax())
    axes.set(xlim=(-reach, reach), ylim=(0.5, top), ylabel="weights (log scale)")
    axes.annotate(
        "the outlier",
        (outlier, 1.1),
        (outlier, 30),
        ha="right" if outlier > 0 else "left",
        fontsize=9,
        color=INK,
        arrowprops={"arrowstyle": "-|>", "color": INK},
    )


def _close_up(axes: Axes, groups: Grouped, steps: Sequence[float], per: str, bits: int) -> None:
    """Draw where most weights lie, and below it the values of the grids, each as a comb."""
    counts = torch.histc(groups.flatten(), 90, -CLOSE_UP, CLOSE_UP)
    edges = torch.linspace(-CLOSE_UP, CLOSE_UP, 91)
    highest = float(counts.amax())
    axes.stairs(counts.numpy(), edges.numpy(), fill=True, color=SKY)
    names = ["every weight's grid"]
    if len(steps) > 1:
        names = [f"grid of the outlier's {per}", f"grid of another {per}"]
    for line, (name, step) in enumerate(zip(names, steps, strict=True)):
        base = -(0.46 + 0.44 * line) * highest
        colour = BLUE if line else ORANGE
        last = min(_last_code(bits), int(CLOSE_UP / step))
        values = [code * step for code in range(-last, last + 1)]
        axes.vlines(
            values,
            base,
            base + 0.17 * highest,
            color=colour,
            linewidth=1.6 if len(values) < 90 else 0.7,
        )
        axes.plot([-CLOSE_UP, CLOSE_UP], [base, base], color=colour, linewidth=0.8)
        reached = f"{len(values)} values here, {step:.2f} σ apart"
        axes.text(
            *(-CLOSE_UP, base + 0.18 * highest),
            f"{name}: {reached}" if len(values) > 1 else f"{name}: only 0 here",
            fontsize=8.5,
            color=colour,
            va="bottom",
        )
    axes.set(xlim=(-CLOSE_UP, CLOSE_UP), ylim=(-0.98 * highest, 1.05 * highest))
    ticks = [tick for tick in axes.get_yticks() if 0 <= tick <= highest]
    axes.set_yticks(ticks)
    axes.set(ylabel="weights", xlabel="weight, in standard deviations σ")
    title(axes, "close up")


def _who_pays(axes: Axes, errors: Grouped, place: tuple[int, int, int]) -> None:
    """Draw the RMS error of each group as a map of the matrix."""
    rms = errors.square().mean(2).sqrt().clamp(min=LEAST)
    rows, groups = rms.shape
    norm = LogNorm(LEAST, MOST)
    image = axes.imshow(rms.numpy(), cmap=HEAT, norm=norm, aspect="auto", interpolation="none")
    axes.plot(place[1], place[0], "o", color=ORANGE, fillstyle="none", markersize=15, mew=2)
    axes.set(xlabel="group", ylabel="row", xlim=(-0.5, groups - 0.5), ylim=(rows - 0.5, -0.5))
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("σ (log scale)", fontsize=9, color=INK)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    title(axes, "RMS error of each group; circle: the outlier")


def _bars(axes: Axes, relative: dict[str, float], per: str) -> None:
    for line, (unit, error) in enumerate(relative.items()):
        chosen = unit == per
        colour = ORANGE if chosen else FAINT
        axes.barh(line, 100 * error, color=colour, height=0.6)
        axes.text(
            100 * (error + 0.03 * max(relative.values())),
            line,
            f"{100 * error:.2g} %" if error < 0.995 else f"{100 * error:.0f} %",
            va="center",
            fontsize=10,
            color=INK,
            weight="bold" if chosen else "normal",
        )
    axes.set_yticks(range(len(relative)), [f"per {unit}" for unit in relative], color=INK)
    axes.set(xlim=(0, 125 * max(relative.values())), xlabel="relative error, %")
    axes.invert_yaxis()
    title(axes, "error of all other weights")


def natural_outliers(
    weight: Float[Tensor, "rows columns"], sigmas: float = 6, bits: int = 8
) -> Figure:
    """Draw the histogram of a matrix, its weights beyond `sigmas`, and its one grid by absmax."""
    scaled = weight.float() / weight.float().std()
    most = float(scaled.abs().amax())
    step = most / _last_code(bits)
    beyond = int((scaled.abs() > sigmas).sum())
    inside = 2 * int(sigmas / step) + 1
    made, axes = figure(10, 3.4)
    reach = 1.05 * most
    counts = torch.histc(scaled.flatten(), 241, -reach, reach)
    edges = torch.linspace(-reach, reach, 242)
    middles = (edges[1:] + edges[:-1]) / 2
    for far, colour, name in (
        (False, BLUE, f"within {sigmas:g} σ"),
        (True, ORANGE, f"{beyond:,} of {weight.numel():,} weights beyond {sigmas:g} σ"),
    ):
        shown = ((middles.abs() > sigmas) == far) & (counts > 0)
        chosen = torch.where(shown, counts, torch.nan)
        axes.stairs(
            chosen.numpy(), edges.numpy(), fill=True, color=colour, baseline=0.5, label=name
        )
    values = [code * step for code in range(-_last_code(bits), _last_code(bits) + 1)]
    axes.vlines(values, 0.12, 0.35, color=QUIET, linewidth=0.6)
    axes.set_yscale("log")
    axes.set(xlim=(-reach, reach), ylim=(0.1, 4 * float(counts.amax())))
    axes.set(xlabel="weight, in standard deviations σ", ylabel="weights (log scale)")
    axes.text(-most, 0.42, f"the grid: {len(values)} values", fontsize=8.5, color=QUIET)
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    title(
        axes, f"{inside} of the grid's {len(values)} values are for all weights within {sigmas:g} σ"
    )
    return made


def _float_values(dtype: torch.dtype) -> Float[Tensor, " values"]:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[torch.isfinite(values)]


VALUES: Mapping[str, Float[Tensor, " values"]] = {
    "int4": torch.arange(-7.0, 8.0),
    "int8": torch.arange(-127.0, 128.0),
    "NF4": NF4,
    "FP4 e2m1": E2M1,
    "FP8 e4m3": _float_values(torch.float8_e4m3fn),
    "FP8 e5m2": _float_values(torch.float8_e5m2),
}


def number_line(
    weights: Float[Tensor, "rows columns"] | None = None,
    names: Sequence[str] = ("int4", "NF4", "FP4 e2m1", "FP8 e4m3", "FP8 e5m2"),
    group_size: int = 32,
) -> Figure:
    """Draw where each format's codes lie, the largest at 1, below the weights that they stand for.

    The weights are those of a matrix, each divided by the largest magnitude of its group.
    """
    heights = (1.3, len(names) * 0.55)
    if weights is None:
        made, lines = figure(10, 0.8 + 0.55 * len(names))
    else:
        made, (top, lines) = figure(
            10, 2.2 + 0.55 * len(names), nrows=2, height_ratios=heights, sharex=True
        )
        groups = weights.float().flatten().unflatten(0, (-1, group_size))
        shares = groups / groups.abs().amax(1, keepdim=True).clamp(min=1e-30)
        counts = torch.histc(shares.flatten(), 101, -1, 1) / shares.numel()
        top.stairs(100 * counts.numpy(), np.linspace(-1, 1, 102), fill=True, color=SKY)
        top.set(ylabel="weights, %")
        title(top, f"weights, as shares of the largest of their {group_size}")
    for line, (name, colour) in enumerate(zip(names, _cycle(len(names)), strict=True)):
        values = VALUES[name].unique()
        marks = (values / values.abs().amax()).numpy()
        lines.vlines(
            marks,
            line - 0.33,
            line + 0.33,
            color=colour,
            linewidth=1.6 if len(values) < 20 else 0.7,
        )
    lines.set_yticks(
        range(len(names)), [f"{name}\n{len(VALUES[name].unique())} values" for name in names]
    )
    lines.tick_params(axis="y", length=0, labelcolor=INK)
    lines.set(xlim=(-1.03, 1.03), ylim=(len(names) - 0.5, -0.5))
    lines.set_xlabel("value of the code, as a share of the largest")
    title(lines, "the codes' values")
    return made


def _cycle(count: int) -> list[str]:
    colours = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY)
    return [colours[each % len(colours)] for each in range(count)]

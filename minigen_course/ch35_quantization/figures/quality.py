"""What bits cost: errors of matrices, KL divergence and perplexity, bytes and speed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minigen_course.figures.style import (
    BLUE,
    FAINT,
    GREEN,
    HEAT,
    INK,
    ORANGE,
    PINK,
    QUIET,
    figure,
    title,
)

FREE = 1e-6  # a relative error below it is that of float32 arithmetic
METHODS = {"RTN": (ORANGE, "o"), "AWQ": (BLUE, "s"), "GPTQ": (GREEN, "D")}


def matrix_errors(errors: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the relative error of matrices by form, as in the stored results' "matrices".

    The first word of a matrix's name is its model, which has the colour. Errors below 1e-6 are
    drawn as 0: the matrix is on the form's grid. What is no error (1 or more, as counts) is left
    out.
    """
    forms = list(
        dict.fromkeys(
            form
            for each in errors.values()
            for form, error in each.items()
            if isinstance(error, float)
        )
    )
    models = list(dict.fromkeys(name.split()[0] for name in errors))
    kinds = list(dict.fromkeys(name.split(maxsplit=1)[-1] for name in errors))
    found = [100 * errors[name].get(form, 0) for name in errors for form in forms]
    least = min(each for each in found if each > 100 * FREE)
    zero, most = least / 3.2, 1.6 * max(found)
    made, axes = figure(9.6, 1.2 + 0.34 * len(forms))
    axes.axvspan(zero / 1.7, zero * 1.7, color=FAINT, alpha=0.5, linewidth=0)
    axes.hlines(range(len(forms)), zero, most, color=FAINT, linewidth=0.8, zorder=0)
    for index, name in enumerate(errors):
        model, kind = name.split()[0], name.split(maxsplit=1)[-1]
        colour = (BLUE, ORANGE, GREEN, PINK)[models.index(model)]
        marker = "osD^"[kinds.index(kind)]
        shift = 0.12 * (index - (len(errors) - 1) / 2)
        for line, form in enumerate(forms):
            error = errors[name].get(form)
            if error is None:
                continue
            x = zero if error < FREE else 100 * error
            axes.plot(x, line + shift, marker, color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_xticks([zero, *_decades(least, most)])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value <= zero else f"{value:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(forms)), forms, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(zero / 1.7, most), ylim=(len(forms) - 0.5, -0.5))
    axes.set_xlabel("relative error, % (log scale; at the left end exactly on the grid)")
    axes.legend(
        handles=[
            *(
                Line2D(
                    [],
                    [],
                    marker="osD^"[kinds.index(name.split(maxsplit=1)[-1])],
                    color=(BLUE, ORANGE, GREEN, PINK)[models.index(name.split()[0])],
                    linestyle="",
                    label=name,
                )
                for name in errors
            )
        ],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        labelcolor=INK,
    )
    title(axes, "Error of rounding to the nearest value, by form")
    return made


def _decades(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within two bounds."""
    marks = [step * 10.0**power for power in range(-4, 4) for step in (1, 2, 5)]
    return [each for each in marks if least <= each <= most]


def quality_by_bits(found: Mapping[str, Any], text: str) -> Figure:
    """Draw KL divergence and perplexity by bits for RTN, AWQ and GPTQ, with 95 % intervals.

    `found` is the stored results' "methods"; `text` is the text that was measured.
    """
    all_bits = sorted(
        {int(name.split()[1]) for name in found if name.endswith(" bits") and "," in name},
        reverse=True,
    )
    made, (left, right) = figure(11, 3.8, ncols=2)
    for axes, key, span in (
        (left, "kl divergence", "kl interval"),
        (right, "perplexity", "perplexity interval"),
    ):
        for index, (method, (colour, marker)) in enumerate(METHODS.items()):
            shown = [bits for bits in all_bits if f"{method}, {bits} bits" in found]
            each = [found[f"{method}, {bits} bits"][text] for bits in shown]
            places = [all_bits.index(bits) + 0.13 * (index - 1) for bits in shown]
            _with_intervals(
                axes, places, [(e[key], *e[span]) for e in each], colour, marker, method
            )
        axes.set_yscale("log")
        axes.set_xticks(range(len(all_bits)), [f"{bits}" for bits in all_bits])
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlim=(-0.5, len(all_bits) - 0.5), xlabel="bits per code")
    left.set_ylabel("KL divergence per token, nats (log scale)")
    right.set_ylabel("perplexity (log scale)")
    own = found["none"][text]["perplexity"]
    right.axhline(own, color=QUIET, linestyle="--", linewidth=1)
    right.text(-0.47, own, f"the file itself: {own:.1f}", color=QUIET, fontsize=9, va="bottom")
    left.legend(frameon=False, labelcolor=INK)
    title(left, _verdict(found, text, all_bits))
    title(right, text)
    return made


def _with_intervals(
    axes: Axes,
    places: Sequence[float],
    values: Iterable[tuple[float, float, float]],
    colour: str,
    marker: str,
    label: str,
) -> None:
    means, lows, highs = zip(*values, strict=True)
    axes.errorbar(
        places,
        means,
        yerr=(
            [mean - low for mean, low in zip(means, lows, strict=True)],
            [high - mean for mean, high in zip(means, highs, strict=True)],
        ),
        fmt=marker + "-",
        color=colour,
        capsize=3,
        linewidth=1.2,
        markersize=6,
        label=label,
    )


def _verdict(found: Mapping[str, Any], text: str, all_bits: Sequence[int]) -> str:
    """Say at which bits the order of the papers held, by the paired comparisons."""
    order = "RTN > AWQ > GPTQ"
    known = {
        bits: bool(found[f"order at {bits} bits"][text][f"{order} in KL divergence"])
        for bits in all_bits
        if f"order at {bits} bits" in found
    }
    held = [str(bits) for bits, holds in known.items() if holds]
    failed = [str(bits) for bits, holds in known.items() if not holds]
    said = [f"{order} at {' and '.join(held)} bits"] if held else []
    said += [f"{'not ' if held else f'{order}: not '}at {' and '.join(failed)}"] if failed else []
    return ", ".join(said) if said else "KL divergence by bits"


@dataclass(frozen=True)
class Form:
    """One way to store the model, as measured; None is not measured.

    `error` is the relative error of its matrices, `low` and `high` are the perplexity's interval.
    """

    name: str
    error: float | None
    perplexity: float | None
    low: float | None
    high: float | None
    num_bytes: int
    tokens_per_second: float | None


def trade_offs(rows: Sequence[Form]) -> Figure:
    """Draw error, perplexity, size and speed side by side, a row per form."""
    made, panels = figure(11, 1.3 + 0.34 * len(rows), ncols=4, sharey=True)
    spans: list[tuple[str, Callable[[Form], float | None], str, str]] = [
        ("error of the weights, %", lambda form: _times(100, form.error), "{:.2g}", ORANGE),
        ("perplexity", lambda form: form.perplexity, "{:.1f}", BLUE),
        ("megabytes", lambda form: form.num_bytes / 1e6, "{:.0f}", GREEN),
        ("tokens per second", lambda form: form.tokens_per_second, "{:.0f}", PINK),
    ]
    for axes, (name, read, written, colour) in zip(panels, spans, strict=True):
        values = [read(form) for form in rows]
        known = [each for each in values if each is not None]
        most = max(known, default=1.0)
        for line, (form, value) in enumerate(zip(rows, values, strict=True)):
            if value is None:
                axes.text(0, line, " not measured", va="center", fontsize=8, color=QUIET)
                continue
            axes.barh(line, value, color=colour, height=0.62, alpha=0.85)
            end = value
            if name == "perplexity" and form.low is not None and form.high is not None:
                axes.plot([form.low, form.high], [line, line], color=INK, linewidth=1.4)
                end = max(value, form.high)
            text = written.format(value) if value else "0"
            axes.text(end + 0.03 * most, line, text, va="center", fontsize=8.5, color=INK)
        highs = [form.high for form in rows if form.high is not None]
        reach = max([most, *highs]) if name == "perplexity" else most
        axes.set(xlim=(0, 1.3 * reach), ylim=(len(rows) - 0.5, -0.5), xlabel=name)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(rows)), [form.name for form in rows], color=INK)
    for axes, sign in zip(panels, ("less", "less", "less", "more"), strict=True):
        title(axes, f"{sign} is better")
    return made


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def size_and_quality(rows: Sequence[Form], max_megabytes: float | None = None) -> Figure:
    """Draw perplexity over size, with the speed as colour, and the forms that none beats in both.

    With `max_megabytes`, the best form within it is marked. Forms without a perplexity are left
    out.
    """
    known = [form for form in rows if form.perplexity is not None]
    frontier = _frontier(known)
    made, axes = figure(9.4, 4.2)
    axes.plot(
        [form.num_bytes / 1e6 for form in frontier],
        [form.perplexity or 0 for form in frontier],
        color=QUIET,
        linewidth=1.2,
        drawstyle="steps-post",
        label="nothing is smaller and better",
        zorder=1,
    )
    speeds = [form.tokens_per_second for form in known if form.tokens_per_second is not None]
    bounds = (min(speeds), max(speeds)) if speeds else (0.0, 1.0)
    for form in known:
        x, y = form.num_bytes / 1e6, form.perplexity or 0
        if form.low is not None and form.high is not None:
            axes.plot([x, x], [form.low, form.high], color=QUIET, linewidth=1, zorder=1)
        speed = form.tokens_per_second
        dots = axes.scatter(
            [x],
            [y],
            s=80,
            c=["white"] if speed is None else [speed],
            cmap=None if speed is None else HEAT,
            vmin=None if speed is None else bounds[0],
            vmax=None if speed is None else bounds[1],
            edgecolors=INK,
            linewidths=0.8,
            zorder=2,
        )
        if speed is not None:
            coloured = dots
        axes.annotate(
            form.name,
            (x, y),
            (7, 5),
            textcoords="offset points",
            fontsize=8.5,
            color=INK if form in frontier else QUIET,
        )
    if speeds:
        bar = made.colorbar(coloured, ax=axes, pad=0.01)
        bar.set_label("tokens per second (white: not measured)", fontsize=9, color=INK)
        bar.ax.tick_params(labelsize=8, colors=QUIET)
    if max_megabytes is not None:
        axes.axvline(max_megabytes, color=ORANGE, linewidth=1.5)
        axes.axvspan(max_megabytes, 1e6, color=FAINT, alpha=0.4, linewidth=0)
    axes.set_yscale("log")
    sizes = [form.num_bytes / 1e6 for form in known]
    room = 0.12 * (max(sizes) - min(sizes)) + 1
    axes.set_xlim(min(sizes) - room, max(sizes) + 2 * room)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="minor", labelsize=8, colors=QUIET)
    axes.set(xlabel="megabytes", ylabel="perplexity (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    title(axes, _best(known, max_megabytes, axes))
    return made


def _frontier(forms: Sequence[Form]) -> list[Form]:
    """Return the forms, by size, that are better than all smaller ones."""
    best: list[Form] = []
    for form in sorted(forms, key=lambda each: (each.num_bytes, each.perplexity or 0)):
        if not best or (form.perplexity or 0) < (best[-1].perplexity or 0):
            best.append(form)
    return best


def _best(forms: Sequence[Form], max_megabytes: float | None, axes: Axes) -> str:
    if max_megabytes is None:
        return "Size and quality"
    fitting = [form for form in forms if form.num_bytes <= 1e6 * max_megabytes]
    if not fitting:
        return f"Nothing fits into {max_megabytes:g} MB"
    best = min(fitting, key=lambda form: form.perplexity or 0)
    axes.scatter(
        [best.num_bytes / 1e6],
        [best.perplexity or 0],
        s=260,
        facecolors="none",
        edgecolors=ORANGE,
        linewidths=2.4,
        zorder=3,
    )
    return f"In {max_megabytes:g} MB: {best.name}, perplexity {best.perplexity:.1f}"

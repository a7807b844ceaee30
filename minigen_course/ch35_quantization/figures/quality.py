"""What bits cost: errors of matrices, KL divergence and perplexity, bytes and speed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

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
LABEL_WIDTH, LABEL_HEIGHT = 0.15, 0.052  # of a label, as shares of the axes
LABEL_RISE, LABEL_STEP = 0.035, 0.004  # above its point, and until it is clear of others
METHODS = {"RTN": (ORANGE, "o"), "AWQ": (BLUE, "s"), "GPTQ": (GREEN, "D")}


def matrix_errors(errors: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the relative error of matrices by form, as in the stored results' "matrices".

    The first word of a matrix's name is its model, which has the colour. Errors below 1e-6 are
    drawn as 0: the matrix is on the form's grid. Counts, which are whole numbers, are left out.
    """
    forms = [form for each in errors.values() for form, x in each.items() if isinstance(x, float)]
    forms = list(dict.fromkeys(forms))
    looks = _looks(errors)
    found = [100 * errors[name].get(form, 0) for name in errors for form in forms]
    least = min((each for each in found if each > 100 * FREE), default=1.0)
    zero, most = least / 3.2, 1.6 * max(*found, least)
    made, axes = figure(9.6, 1.2 + 0.34 * len(forms))
    axes.axvspan(zero / 1.7, zero * 1.7, color=FAINT, alpha=0.5, linewidth=0)
    axes.hlines(range(len(forms)), zero, most, color=FAINT, linewidth=0.8, zorder=0)
    for index, (name, (colour, marker)) in enumerate(looks.items()):
        shift = 0.12 * (index - (len(errors) - 1) / 2)
        for line, form in enumerate(forms):
            error = errors[name].get(form)
            if error is not None:
                x = zero if error < FREE else 100 * error
                axes.plot(x, line + shift, marker, color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_xticks([zero, *_round_numbers(least, most)])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value <= zero else f"{value:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(forms)), forms, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(zero / 1.7, most), ylim=(len(forms) - 0.5, -0.5))
    axes.set_xlabel("relative error, % (log scale; at the left end exactly on the grid)")
    axes.legend(
        handles=[
            Line2D([], [], marker=marker, color=colour, linestyle="", label=name)
            for name, (colour, marker) in looks.items()
        ],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        labelcolor=INK,
    )
    title(axes, "Error of rounding to the nearest value, by form")
    return made


def _looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and the marker of each matrix: of its model, and of its kind."""
    colours: dict[str, str] = {}
    markers: dict[str, str] = {}
    found = {}
    for name in names:
        model, *kind = name.split(maxsplit=1)
        colour = colours.setdefault(model, (BLUE, ORANGE, GREEN, PINK)[len(colours) % 4])
        found[name] = colour, markers.setdefault(" ".join(kind), "osD^"[len(markers) % 4])
    return found


def _round_numbers(least: float, most: float) -> list[float]:
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
        plain_log(axes)
        axes.set(xlim=(-0.5, len(all_bits) - 0.5), xlabel="bits per code")
    left.set_ylabel("KL divergence per token, nats (log scale)")
    right.set_ylabel("perplexity (log scale)")
    own = found["none"][text]["perplexity"]
    right.axhline(own, color=QUIET, linestyle="--", linewidth=1)
    right.text(
        len(all_bits) - 0.52,
        own,
        f"the file itself: {own:.1f}",
        color=QUIET,
        fontsize=9,
        ha="right",
        va="bottom",
    )
    left.legend(frameon=False, labelcolor=INK)
    title(left, _verdict(found, text, all_bits))
    title(right, text)
    return made


def plain_log(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers: powers of ten; if few, also 2 and 5 times."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1,) if high > 2000 * low else (1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


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


def quality_by_form(found: Mapping[str, Mapping[str, Any]], text: str) -> Figure:
    """Draw KL divergence with its 95 % interval, a row per form, in the order of the mapping.

    `found` are summaries by form and text, as in the stored results' "variants" and "codes". The
    best forms are those whose interval reaches below the end of the best one's; they are blue.
    """
    rows = {name: each[text] for name, each in found.items() if text in each}
    best = min(rows.values(), key=lambda each: each["kl divergence"])
    made, axes = figure(9.0, 1.2 + 0.32 * len(rows))
    for line, each in enumerate(rows.values()):
        mean, (low, high) = each["kl divergence"], each["kl interval"]
        colour = BLUE if low <= best["kl interval"][1] else ORANGE
        axes.plot([low, high], [line, line], color=colour, linewidth=2)
        axes.plot(mean, line, "o", color=colour)
        axes.annotate(
            f"{mean:.3g}",
            (high, line),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
        )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set(xlim=(low, high * (high / low) ** 0.08), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_yticks(range(len(rows)), list(rows), color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("KL divergence per token, nats (log scale)")
    title(axes, f"{text}; blue: the intervals of these overlap with that of the best")
    return made


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

    @property
    def megabytes(self) -> float:
        """The size in millions of bytes."""
        return self.num_bytes / 1e6


@dataclass(frozen=True)
class Column:
    """A panel of `trade_offs`: its label, a form's value, how it is written, and its colour."""

    label: str
    read: Callable[[Form], float | None]
    written: str
    colour: str
    better: str


COLUMNS = (
    Column(
        "error of the weights, %",
        lambda form: None if form.error is None else 100 * form.error,
        ".2g",
        ORANGE,
        "less",
    ),
    Column("perplexity", lambda form: form.perplexity, ",.1f", BLUE, "less"),
    Column("megabytes", lambda form: form.megabytes, ".0f", GREEN, "less"),
    Column("tokens per second", lambda form: form.tokens_per_second, ".0f", PINK, "more"),
)


def trade_offs(rows: Sequence[Form]) -> Figure:
    """Draw error, perplexity, size and speed side by side, a row per form.

    The axis of the perplexity is logarithmic if its values differ by more than a factor of 5.
    """
    made, panels = figure(11, 1.3 + 0.34 * len(rows), ncols=len(COLUMNS), sharey=True)
    for axes, column in zip(panels, COLUMNS, strict=True):
        _panel(axes, column, rows)
        if column.label == "perplexity":
            for line, form in enumerate(rows):
                if form.low is not None and form.high is not None:
                    axes.plot([form.low, form.high], [line, line], color=INK, linewidth=1.4)
    panels[0].set_yticks(range(len(rows)), [form.name for form in rows], color=INK)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    return made


def _panel(axes: Axes, column: Column, rows: Sequence[Form]) -> None:
    """Draw one column as bars with their values."""
    values = [column.read(form) for form in rows]
    known = [each for each in values if each is not None]
    most, least = max(known, default=1.0), min(known, default=1.0)
    wide = column.label == "perplexity" and most > 5 * least
    start = least / 1.5 if wide else 0.0
    if column.label == "perplexity":
        most = max([most, *(form.high for form in rows if form.high is not None)])
    for line, (form, value) in enumerate(zip(rows, values, strict=True)):
        if value is None:
            axes.text(start, line, " not measured", va="center", fontsize=8, color=QUIET)
            continue
        axes.barh(line, value - start, left=start, color=column.colour, height=0.62, alpha=0.85)
        end = max(value, form.high or value) if column.label == "perplexity" else value
        written = ",.0f" if value >= 1000 else column.written
        text = format(value, written) if value else "0"
        place = end * (most / start) ** 0.04 if wide else end + 0.03 * most
        axes.text(place, line, text, va="center", fontsize=8.5, color=INK)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(start, most * (most / start) ** 0.35 if wide else 1.3 * most)
    axes.set_xlabel(f"{column.label} (log scale)" if wide else column.label)
    axes.tick_params(axis="y", length=0)
    title(axes, f"{column.better} is better")


def size_and_quality(rows: Sequence[Form], max_megabytes: float | None = None) -> Figure:
    """Draw perplexity over size, with the speed as colour, and the forms that none beats in both.

    With `max_megabytes`, the best form within it is marked. Forms without a perplexity are left
    out.
    """
    known = [(form, form.perplexity) for form in rows if form.perplexity is not None]
    made, axes = figure(10, 4.6)
    frontier: list[tuple[Form, float]] = []
    for form, y in sorted(known, key=lambda each: (each[0].num_bytes, each[1])):
        if not frontier or y < frontier[-1][1]:
            frontier.append((form, y))
    axes.plot(
        [form.megabytes for form, _ in frontier],
        [y for _, y in frontier],
        color=QUIET,
        linewidth=1.2,
        drawstyle="steps-post",
        label="no form is smaller and better",
        zorder=1,
    )
    for form, _ in known:
        if form.low is not None and form.high is not None:
            axes.plot([form.megabytes] * 2, [form.low, form.high], color=QUIET, linewidth=1)
    _dots(axes, known)
    axes.set_yscale("log")
    sizes = [form.megabytes for form, _ in known]
    room = 0.1 * (max(sizes) - min(sizes)) + 1
    axes.set_xlim(min(sizes) - room, max(sizes) + 3 * room)
    heading = "Size and quality"
    if max_megabytes is not None:
        axes.axvline(max_megabytes, color=ORANGE, linewidth=1.5, zorder=1)
        axes.axvspan(max_megabytes, 1e6, color=FAINT, alpha=0.4, linewidth=0, zorder=0)
        heading = _mark_best(axes, known, max_megabytes)
    plain_log(axes)
    low, high = axes.get_ylim()
    axes.set(ylim=(low, high * (high / low) ** 0.06))  # room for a label
    axes.set(xlabel="megabytes", ylabel="perplexity (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    names = {form.name for form, _ in frontier}
    _spread_labels(axes, [(f.name, f.megabytes, y, f.name in names) for f, y in known])
    title(axes, heading)
    return made


def _dots(axes: Axes, known: Sequence[tuple[Form, float]]) -> None:
    """Draw each form, coloured by its speed, or white."""
    timed = [(f.megabytes, y, f.tokens_per_second) for f, y in known if f.tokens_per_second]
    others = [(f.megabytes, y) for f, y in known if not f.tokens_per_second]
    look: dict[str, Any] = {"s": 75, "edgecolors": INK, "linewidths": 0.8, "zorder": 3}
    if others:
        xs, ys = zip(*others, strict=True)
        axes.scatter(xs, ys, c="white", label="speed not measured", **look)
    if timed:
        xs, ys, speeds = zip(*timed, strict=True)
        dots = axes.scatter(xs, ys, c=speeds, cmap=HEAT, **look)
        bar = axes.figure.colorbar(dots, ax=axes, pad=0.01)
        bar.set_label("tokens per second", fontsize=9, color=INK)
        bar.ax.tick_params(labelsize=8, colors=QUIET)


def _spread_labels(axes: Axes, labels: Sequence[tuple[str, float, float, bool]]) -> None:
    """Write names to the right of their points, one above the other where points are close."""
    left, right = axes.get_xlim()
    low, high = (math.log(each) for each in axes.get_ylim())
    placed: list[tuple[float, float]] = []
    for name, x, y, strong in sorted(labels, key=lambda each: each[2]):
        place, across = (math.log(y) - low) / (high - low), (x - left) / (right - left)
        near = [up for other, up in placed if abs(across - other) < LABEL_WIDTH]
        label = place + LABEL_RISE
        while any(abs(label - up) < LABEL_HEIGHT for up in near):
            label += LABEL_STEP
        placed.append((across, label))
        far = abs(label - place) > LABEL_HEIGHT
        at = (across + (0.035 if far else 0.014), label)
        if far:
            leader = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.6}
            axes.annotate("", (x, y), at, textcoords="axes fraction", arrowprops=leader, zorder=1.2)
        axes.annotate(
            name,
            (x, y),
            at,
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK if strong else QUIET,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            zorder=2,
        )


def _mark_best(axes: Axes, known: Sequence[tuple[Form, float]], max_megabytes: float) -> str:
    """Draw a ring around the best form that fits, and return the figure's title."""
    fitting = [(form, y) for form, y in known if form.megabytes <= max_megabytes]
    if not fitting:
        return f"Nothing fits into {max_megabytes:g} MB"
    best, y = min(fitting, key=lambda each: each[1])
    ring: dict[str, Any] = {"facecolors": "none", "edgecolors": ORANGE, "linewidths": 2.4}
    axes.scatter([best.megabytes], [y], s=260, zorder=4, **ring)
    return f"In {max_megabytes:g} MB: {best.name}, perplexity {y:.1f}"


def decode_speeds(rows: Mapping[str, Mapping[str, Any]], limit: float = 0.9) -> Figure:
    """Draw decode speeds as ratios to their baselines, as in the stored results' "speed".

    A bar below `limit` is orange; the baselines themselves are not drawn.
    """
    shown = {name: each for name, each in rows.items() if name != each["baseline"]}
    made, axes = figure(8.6, 1.2 + 0.36 * len(shown))
    for line, each in enumerate(shown.values()):
        speed = each["speed"]
        axes.barh(line, speed, color=BLUE if speed >= limit else ORANGE, height=0.6)
        axes.text(
            max(speed, 1) + 0.02,
            line,
            f"{speed:.2f} of {each['baseline']}",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.axvline(1, color=QUIET, linestyle="--", linewidth=1)
    axes.axvline(limit, color=QUIET, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(shown)), list(shown), color=INK)
    axes.tick_params(axis="y", length=0)
    fastest = max(1.0, *(each["speed"] for each in shown.values()))
    axes.set(xlim=(0, 1.25 * fastest), ylim=(len(shown) - 0.5, -0.5))
    axes.set_xlabel(f"tokens per second, of the baseline's (dotted: {limit:g})")
    title(axes, "Speed beside weights of the same bits in the engine's own form")
    return made

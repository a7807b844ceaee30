"""Draw the results of a load test: TTFT, inter-token latency, and a timeline of the requests.

It is separate from `report` because matplotlib may be missing.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minigen.bench.report import Outcome, Slo

INK, BLUE, ORANGE, AMBER = "#222222", "#0072b2", "#d55e00", "#e69f00"  # Okabe and Ito 2008
MARKED = (50, 95, 99)  # percentiles
LOG_RATIO = 20.0  # the axis is logarithmic if the maximum exceeds this many times the median


def load_figure(outcomes: Sequence[Outcome], slos: Sequence[Slo] = ()) -> Figure:
    """Draw the cumulative distributions of TTFT and ITL, and below them one line per request.

    Objectives for TTFT and ITL are dashed lines. A request's line is amber until its first text
    and blue until its end; a cross marks an error.
    """
    figure = Figure(figsize=(10, 7), layout="constrained", facecolor="white", dpi=100)
    FigureCanvasAgg(figure)  # not by pyplot, which stores figures and may display them
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.3))
    answered = [each for each in outcomes if each.error is None]
    waits = [each.ttft for each in answered if each.ttft is not None]
    gaps = [gap for each in answered for gap in each.gaps]
    limits = {slo.latency: slo.seconds for slo in slos}
    _draw_shares(figure.add_subplot(grid[0, 0]), "Time to first token", waits, limits.get("ttft"))
    _draw_shares(figure.add_subplot(grid[0, 1]), "Inter-token latency", gaps, limits.get("itl"))
    _draw_requests(figure.add_subplot(grid[1, :]), outcomes)
    return figure


def _prepare_axes(axes: Axes, title: str) -> None:
    """Set the title, and hide the top and right sides of the frame."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _draw_shares(axes: Axes, name: str, seconds: Sequence[float], limit: float | None) -> None:
    """Draw the share of values at or below each time in milliseconds, and list percentiles."""
    _prepare_axes(axes, f"{name}, {len(seconds):,} values")
    axes.set(xlabel="milliseconds", ylabel="share at or below", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if not seconds:
        return
    values = np.sort(np.array(seconds)) * 1e3
    axes.step(
        values, np.arange(1, len(values) + 1) / len(values), where="post", linewidth=2, color=BLUE
    )
    if values[0] > 0 and values[-1] > LOG_RATIO * np.median(values):
        axes.set_xscale("log")
    words = [
        f"p{share} {value:,.3g} ms"
        for share, value in zip(MARKED, np.percentile(values, MARKED), strict=True)
    ]
    if limit is not None:
        axes.axvline(limit * 1e3, color=INK, linestyle="--", linewidth=1)
        share_met = np.mean(values <= limit * 1e3)
        words.append(f"{share_met:.1%} within {limit * 1e3:g} ms (dashed)")
    axes.text(
        0.97,
        0.06,
        "\n".join(words),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 1},
    )


def _draw_requests(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw a line for each request, in order of arrival, from its planned time to its end."""
    in_order = sorted(outcomes, key=lambda each: each.arrived)
    rows = range(1, len(in_order) + 1)
    firsts = [each.text_times[0] if each.text_times else each.ended for each in in_order]
    thick = min(6.0, max(0.8, 220 / len(in_order)))
    started = [each.arrived for each in in_order]
    axes.hlines(
        rows, started, firsts, color=AMBER, linewidth=thick, label="waits for its first text"
    )
    ends = [each.ended for each in in_order]
    axes.hlines(rows, firsts, ends, color=BLUE, linewidth=thick, label="streams")
    failed = [(each.ended, row) for row, each in zip(rows, in_order, strict=True) if each.error]
    if failed:
        ended, crossed = zip(*failed, strict=True)
        axes.plot(ended, crossed, "x", color=ORANGE, label="error", clip_on=False)
    _prepare_axes(axes, f"{len(in_order):,} requests, by arrival")
    axes.set(xlabel="seconds after the load began", ylabel="request", xlim=(0, None))
    axes.set_ylim(len(in_order) + 1, 0)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK, ncols=3, fontsize=9)

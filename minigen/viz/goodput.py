"""Objectives against load: throughput and goodput by rate, latencies in time, money by goodput."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from minigen.server.slo import Outcome, Slo, report
from minigen.teach.simulation import Run
from minigen.viz.style import AMBER, BLUE, FAINT, GREEN, INK, ORANGE, PINK, figure, title

SECONDS = (0.1, 0.2, 0.5, 1, 2, 4)
GAUGE_ROWS = ("requests", "KV cache used", "seconds to first token")


def by_rate(outcomes: Mapping[float, Sequence[Outcome]], slos: Sequence[Slo]) -> Figure:
    """Requests answered, and answered within the objectives, a second, for each rate offered."""
    reports = {rate: report(each, slos) for rate, each in outcomes.items()}
    rates = list(reports)
    answered = [each.request_rate for each in reports.values()]
    good = [each.goodput or 0.0 for each in reports.values()]
    made, axes = figure(9, 3.6)
    axes.plot(rates, answered, "o-", color=BLUE, label="throughput: answered")
    axes.plot(rates, good, "o-", color=ORANGE, label="goodput: answered within the objectives")
    best = rates[int(np.argmax(good))]
    axes.axvline(best, color=FAINT, zorder=0)
    axes.set(
        xlabel="requests offered a second",
        ylabel="requests a second",
        ylim=(0, None),
        xlim=(0, None),
    )
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(axes, f"Goodput is largest, {max(good):.1f} a second, at {best:g} offered a second")
    return made


def spreads(latencies: Mapping[str, Sequence[float]], wait: float, requests: int) -> Figure:
    """How latencies lie, and how many visits of so many requests meet one longer than `wait`."""
    made, (left, right) = figure(10, 3.2, ncols=2, width_ratios=(1.5, 1))
    shares = {}
    for (name, values), colour in zip(latencies.items(), (BLUE, ORANGE, GREEN), strict=False):
        ordered = np.sort(np.array(values))
        left.step(
            ordered,
            np.arange(1, len(ordered) + 1) / len(ordered),
            where="post",
            color=colour,
            label=f"{name}: mean {np.mean(ordered):.2f} s, p99 {np.percentile(ordered, 99):.2f} s",
        )
        shares[name] = 1 - float(np.mean(ordered <= wait)) ** requests
    left.axvline(wait, color=INK, linestyle="--", linewidth=1)
    left.set(xlabel="seconds", xscale="log", ylim=(0, 1.02), ylabel="share at or below")
    left.set_xticks(SECONDS, [f"{each:g}" for each in SECONDS])
    left.xaxis.set_minor_locator(NullLocator())
    left.legend(frameon=False, labelcolor=INK, loc="lower right")
    title(left, "Latencies of two systems")
    bars = right.bar(
        list(shares), list(shares.values()), color=[BLUE, ORANGE, GREEN][: len(shares)]
    )
    right.bar_label(bars, [f"{each:.0%}" for each in shares.values()], color=INK)
    right.set(ylim=(0, 1.12), yticks=[])
    right.spines["left"].set_visible(False)
    plural = "request" if requests == 1 else "requests"
    title(right, f"Visits of {requests} {plural} that wait over {wait:g} s")
    return made


def cost(price_per_hour: float, tokens: Mapping[str, float]) -> Figure:
    """What a million tokens costs, by tokens a second; named points on the curve.

    Dollars a million = price of an hour / (0.0036 x tokens a second).
    """
    if price_per_hour <= 0:
        raise ValueError("An hour must cost something.")
    made, axes = figure(9, 3.4)
    most = 1.3 * max(tokens.values())
    rates = np.geomspace(most / 60, most, 200)
    axes.plot(rates, price_per_hour / (0.0036 * rates), color=BLUE)
    for name, rate in tokens.items():
        dollars = price_per_hour / (0.0036 * rate)
        axes.plot(rate, dollars, "o", color=ORANGE)
        axes.annotate(
            f"{name}: \\${dollars:,.2f}",
            (rate, dollars),
            xytext=(6, 8),
            color=INK,
            textcoords="offset points",
        )
    axes.set(xlabel="tokens a second", ylabel="dollars a million tokens", ylim=(0, None))
    axes.set_ylim(0, 1.25 * max(price_per_hour / (0.0036 * each) for each in tokens.values()))
    axes.set_xlim(0, most)
    title(axes, f"A machine for \\${price_per_hour:g} an hour")
    return made


def run_in_time(run: Run, tenant: str | None = None) -> Figure:
    """The gauges of a run, and each request's time to first token, by when it came."""
    made, panels = figure(10, 5.2, nrows=3, sharex=True, height_ratios=(1.2, 0.8, 1.4))
    times = [each.at for each in run.moments]
    _stairs(panels[0], times, [each.running for each in run.moments], BLUE, "running")
    _stairs(panels[0], times, [each.waiting for each in run.moments], AMBER, "waiting")
    panels[0].legend(
        frameon=False, labelcolor=INK, ncols=2, loc="lower right", bbox_to_anchor=(1, 1)
    )
    _stairs(panels[1], times, [each.kv_used for each in run.moments], PINK, "")
    panels[1].set_ylim(0, 1.05)
    panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    outcomes = run.outcomes if tenant is None else run.of(tenant)
    waits = [(each.arrived, each.ttft) for each in outcomes if each.ttft is not None]
    panels[2].plot(*zip(*waits, strict=True), ".", color=GREEN)
    refused = [each.arrived for each in outcomes if each.error is not None]
    panels[2].plot(refused, [0.0] * len(refused), "x", color=ORANGE, label="refused")
    if refused:
        panels[2].legend(frameon=False, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1))
    panels[2].set(xlabel="seconds", ylim=(0, None), xlim=(0, None))
    for axes, name in zip(panels, GAUGE_ROWS, strict=True):
        title(axes, name)
    return made


def _stairs(
    axes: Axes, times: Sequence[float], values: Sequence[float], colour: str, label: str
) -> None:
    axes.step(times, values, where="post", color=colour, linewidth=1.4, label=label)
    axes.set_ylim(0, None)

"""A dashboard of a running server, goodput against load, and where each request's time went.

The dashboard reads /metrics, and its buttons send load. Percentiles are estimated from histograms
as Prometheus does: linear within a bucket. Limits are those that guides give: TTFT 500 ms,
inter-token 100 ms, KV cache 90 %.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from prometheus_client.parser import text_string_to_metric_families

from minigen.bench.report import Outcome, Slo, report
from minigen.bench.workload import Planned
from minigen.trace.summary import RequestSummary
from minigen_course.figures.explore import explore
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SKY,
    figure,
    title,
)
from minigen_course.lab.load import put_load
from minigen_course.lab.simulation import Run

EVERY = 0.25  # seconds between two looks
REST = 12.0  # times as long as a drawing took, until the next: it shares the cores with the server
WINDOW = 2.0  # seconds over which rates and percentiles are taken
SHOWN = 30.0  # seconds of history
LIMITS = {"ttft": 500.0, "itl": 100.0, "kv": 0.9}  # milliseconds, milliseconds, share

Bounds = tuple[tuple[float, float], ...]  # a bucket's upper bound, and how many are at or below


@dataclass(frozen=True)
class Look:
    """What /metrics said at one moment, of all models together, without names' prefixes."""

    at: float
    values: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Bounds] = field(default_factory=dict)


def look(url: str, now: float, api_key: str = "none") -> Look:
    """Read a server's page. Raises `httpx.HTTPError` if it does not answer."""
    headers = {"authorization": f"Bearer {api_key}"}
    page = httpx.get(f"{url}/metrics", headers=headers, timeout=10).raise_for_status().text
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if name.endswith("_bucket"):
                each = buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                each[bound] = each.get(bound, 0.0) + sample.value
            elif name:
                values[name] = values.get(name, 0.0) + sample.value
    ordered = {name: tuple(sorted(each.items())) for name, each in buckets.items()}
    return Look(now, values, ordered)


def estimate(before: Bounds, after: Bounds, percent: float) -> float | None:
    """A percentile of what came between two looks; None if nothing did.

    Linear within its bucket, and the last finite bound for what is above all, as Prometheus's
    `histogram_quantile`.
    """
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, low, below = percent / 100 * total, 0.0, 0.0
    for bound, count in counts[:-1]:
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


@dataclass
class History:
    """Looks at a server, oldest first, and what follows from two of them."""

    looks: list[Look] = field(default_factory=list)

    def times(self) -> list[float]:
        """When each was, in seconds before the last."""
        return [each.at - self.looks[-1].at for each in self.looks]

    def gauge(self, name: str) -> list[float]:
        """A value at each look."""
        return [each.values.get(name, 0.0) for each in self.looks]

    def rate(self, name: str) -> list[float]:
        """How fast a counter grew before each look, a second."""
        return [self._growth(place, name, 1.0) for place in range(len(self.looks))]

    def share(self, part: str, whole: str) -> list[float]:
        """What part of a counter's growth another's was; 0 where nothing grew."""
        places = range(len(self.looks))
        grown = [(self._growth(p, part, 0), self._growth(p, whole, 0)) for p in places]
        return [some / of_all if of_all else 0.0 for some, of_all in grown]

    def percentile(self, name: str, percent: float) -> list[float]:
        """A histogram's percentile before each look, in milliseconds; nan where nothing came."""
        found = []
        for place, each in enumerate(self.looks):
            before = self._before(place).buckets.get(name, ())
            seconds = estimate(before, each.buckets.get(name, ()), percent)
            found.append(float("nan") if seconds is None else 1e3 * seconds)
        return found

    def _before(self, place: int) -> Look:
        since = self.looks[place].at - WINDOW
        return self.looks[bisect_left(self.looks, since, key=lambda each: each.at)]

    def _growth(self, place: int, name: str, a_second: float) -> float:
        before, after = self._before(place), self.looks[place]
        grown = after.values.get(name, 0.0) - before.values.get(name, 0.0)
        seconds = after.at - before.at
        return grown / seconds if a_second and seconds else grown if not a_second else 0.0


def panels(history: History) -> Figure:
    """Six panels of a server's last half minute."""
    made, axes = figure(11, 4.8, nrows=2, ncols=3, sharex=True)
    made.set_layout_engine(None)  # which would take longer than all of the drawing
    made.subplots_adjust(0.045, 0.1, 0.985, 0.94, 0.17, 0.2)
    times = history.times()
    requests, tokens, cache, first, between, hits = axes.flat
    _lines(
        requests,
        times,
        "requests",
        {
            "running": (BLUE, history.gauge("num_requests_running")),
            "waiting": (AMBER, history.gauge("num_requests_waiting")),
        },
    )
    _lines(
        tokens,
        times,
        "tokens a second",
        {
            "written": (BLUE, history.rate("generation_tokens_total")),
            "read": (SKY, history.rate("prompt_tokens_total")),
        },
    )
    _lines(cache, times, "KV cache used", {"": (PINK, history.gauge("kv_cache_usage_perc"))})
    for each, name, key in (
        (first, "time_to_first_token_seconds", "ttft"),
        (between, "inter_token_latency_seconds", "itl"),
    ):
        words = {"ttft": "first token, ms", "itl": "between tokens, ms"}[key]
        drawn = {
            f"p{percent}": (colour, history.percentile(name, percent))
            for percent, colour in ((50, GREEN), (99, ORANGE))
        }
        _lines(each, times, words, drawn)
        each.axhline(LIMITS[key], color=INK, linestyle="--", linewidth=1)
    share = history.share("prefix_cache_hits_total", "prefix_cache_queries_total")
    _lines(hits, times, "prefix hit rate", {"": (GREEN, share)})
    cache.axhline(LIMITS["kv"], color=INK, linestyle="--", linewidth=1)
    for each in (cache, hits):
        each.set_ylim(0, 1.05)
        each.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for each in axes[1]:
        each.xaxis.set_major_locator(MaxNLocator(5))
        each.set(xlabel="seconds", xlim=(min(times[0], -WINDOW), 0))
    return made


def dashboard(url: str, loads: Mapping[str, Sequence[Planned]], caption: str) -> None:
    """Show the panels, and a button for each load, which is sent while the panels move.

    The first load is sent at once, so that there is something to be seen.
    """
    history, pressed = History(), dict.fromkeys(loads, 0)

    def draw(**presses: int) -> Iterator[Figure]:
        asked = [name for name in presses if presses[name] > pressed[name]]
        pressed.update(presses)
        yield from watch(url, history, loads[(asked or list(loads))[0]])

    explore(draw, caption, **dict.fromkeys(loads))


def watch(url: str, history: History, load: Sequence[Planned]) -> Iterator[Figure]:
    """Send a load, and draw the panels again and again until it has been answered."""
    sending = threading.Thread(target=put_load, args=(url, load))
    looking = threading.Thread(target=_look_on, args=(url, history, sending.is_alive))
    sending.start()
    looking.start()
    took = EVERY
    while looking.is_alive():
        looking.join(REST * took)
        started = time.monotonic()
        yield panels(History(list(history.looks)))
        took = time.monotonic() - started


def _look_on(url: str, history: History, goes_on: Callable[[], bool]) -> None:
    """Look now, and again until it ends."""
    last = False
    while not last:
        last = not goes_on()
        history.looks.append(look(url, time.monotonic()))
        oldest = history.looks[-1].at - SHOWN
        history.looks[:] = [each for each in history.looks if each.at >= oldest]
        time.sleep(EVERY)


def _lines(
    axes: Axes,
    times: Sequence[float],
    name: str,
    lines: Mapping[str, tuple[str, Sequence[float]]],
) -> None:
    for label, (colour, values) in lines.items():
        axes.plot(times, values, color=colour, linewidth=1.6, label=label)
    axes.set_ylim(0, None)
    if any(lines):
        axes.legend(
            frameon=False,
            labelcolor=INK,
            fontsize=9,
            ncols=2,
            loc="lower right",
            bbox_to_anchor=(1.02, 0.97),
        )
    title(axes, name)


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


PARTS = (
    ("queued", "queued_ms", FAINT),
    ("prefill", "prefill_ms", AMBER),
    ("decode", "decode_ms", BLUE),
)


def waits(summaries: Sequence[RequestSummary], names: Sequence[str]) -> Figure:
    """A bar for each request: milliseconds queued, in prefill, in decode.

    Raises `ValueError` for a request that has not come to its end.
    """
    made, axes = figure(10, 0.26 * len(summaries) + 1.3)
    for row, each in enumerate(summaries):
        started = 0.0
        for label, key, colour in PARTS:
            took = getattr(each, key)
            if took is None:
                raise ValueError(f"Request {each.sequence_id} has not come to its end.")
            axes.barh(row, took, left=started, color=colour, height=0.7, label="" if row else label)
            started += took
    axes.set_yticks(range(len(summaries)), names)
    axes.set(xlabel="milliseconds after it came")
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=3, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    title(axes, f"Where the time of {len(summaries)} requests went")
    return made

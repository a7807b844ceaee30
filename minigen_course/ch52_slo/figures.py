"""A dashboard of a running server, goodput by load, and where each request's time went.

The dashboard scrapes /metrics as Prometheus does, and its buttons send load. Its dashed lines are
commonly recommended limits: time to first token (TTFT) 500 ms, inter-token latency (ITL) 100 ms,
KV cache 90 % used.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from prometheus_client.parser import text_string_to_metric_families

from minigen.bench.report import Outcome, Slo
from minigen.bench.workload import Planned
from minigen.trace.events import Event
from minigen.trace.timeline import Request, Timeline
from minigen_course.ch52_slo.lesson import Rates, num_equal, rates_by_length
from minigen_course.ch52_slo.mystery import goal_of, goodput_of, treated
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
from minigen_course.lab.retries import SECONDS, SERVICE, Storm, rate_of
from minigen_course.lab.simulator import Ask, Run

INTERVAL_SECONDS = 0.25  # between two scrapes
PAUSE_PER_DRAWING = 12.0  # pause per second of drawing, because the server needs the same cores
WINDOW_SECONDS = 2.0  # over which rates and percentiles are computed
HISTORY_SECONDS = 30.0
LIMITS = {"ttft": 500.0, "itl": 100.0, "kv": 0.9}  # milliseconds, milliseconds, share

Buckets = tuple[tuple[float, float], ...]  # (upper bound, cumulative count), in order of the bounds


@dataclass(frozen=True)
class Scrape:
    """The values of /metrics at the time `at` (seconds), summed over models.

    `values` has the gauges and counters, `buckets` the histograms, by name without the prefix
    ("minigen:" or "vllm:").
    """

    at: float
    values: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Buckets] = field(default_factory=dict)


def scrape(url: str, now: float, api_key: str = "none") -> Scrape:
    """Read a server's /metrics; `now` becomes the time of the scrape, in seconds.

    Raises `httpx.HTTPError` if the server does not answer or answers with an error.
    """
    headers = {"authorization": f"Bearer {api_key}"}
    page = httpx.get(f"{url}/metrics", headers=headers, timeout=10).raise_for_status().text
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]  # empty for metrics of the process, without prefix
            if name.endswith("_bucket"):
                counts = buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
            elif name:
                values[name] = values.get(name, 0.0) + sample.value
    ordered = {name: tuple(sorted(counts.items())) for name, counts in buckets.items()}
    return Scrape(now, values, ordered)


def estimate_percentile(before: Buckets, after: Buckets, percent: float) -> float | None:
    """Estimate a percentile of the values observed between two scrapes; None if there are none.

    `percent` is above 0 and at most 100. The estimate interpolates linearly within a bucket; for
    the last bucket, which has no upper bound, it is the largest finite bound. Source: Prometheus's
    `histogram_quantile`.
    """
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, lower, num_below = percent / 100 * total, 0.0, 0.0
    for upper, count in counts[:-1]:
        if count >= rank:
            return lower + (upper - lower) * (rank - num_below) / (count - num_below)
        lower, num_below = upper, count
    return lower


@dataclass
class History:
    """Scrapes of a server, oldest first, and the rates and percentiles between them.

    Each rate, share and percentile covers the `WINDOW_SECONDS` before a scrape.
    """

    scrapes: list[Scrape] = field(default_factory=list)

    def times(self) -> list[float]:
        """Return the time of each scrape, in seconds relative to the last one (0 or negative)."""
        return [each.at - self.scrapes[-1].at for each in self.scrapes]

    def gauge(self, name: str) -> list[float]:
        """Return a gauge's value at each scrape."""
        return [each.values.get(name, 0.0) for each in self.scrapes]

    def rate(self, name: str) -> list[float]:
        """Return a counter's increase per second before each scrape."""
        rates = []
        for index, after in enumerate(self.scrapes):
            seconds = after.at - self._before(index).at
            rates.append(self._increase(index, name) / seconds if seconds else 0.0)
        return rates

    def share(self, part: str, whole: str) -> list[float]:
        """Return the increase of `part` divided by that of `whole`; 0 where there was none."""
        indices = range(len(self.scrapes))
        increases = [(self._increase(i, part), self._increase(i, whole)) for i in indices]
        return [of_part / of_whole if of_whole else 0.0 for of_part, of_whole in increases]

    def percentile(self, name: str, percent: float) -> list[float]:
        """Return a histogram's percentile before each scrape, in milliseconds; nan without data."""
        found = []
        for index, after in enumerate(self.scrapes):
            before = self._before(index).buckets.get(name, ())
            seconds = estimate_percentile(before, after.buckets.get(name, ()), percent)
            found.append(float("nan") if seconds is None else 1e3 * seconds)
        return found

    def _before(self, index: int) -> Scrape:
        """Return the first scrape in the window that ends at a scrape."""
        start = self.scrapes[index].at - WINDOW_SECONDS
        return self.scrapes[bisect_left(self.scrapes, start, key=lambda each: each.at)]

    def _increase(self, index: int, name: str) -> float:
        before, after = self._before(index), self.scrapes[index]
        return after.values.get(name, 0.0) - before.values.get(name, 0.0)


def panels(history: History) -> Figure:
    """Draw six panels of a server's last `HISTORY_SECONDS`."""
    made, axes = figure(11, 4.8, nrows=2, ncols=3, sharex=True)
    made.set_layout_engine(None)  # the layout engine takes longer than the drawing itself
    made.subplots_adjust(0.055, 0.1, 0.985, 0.94, 0.17, 0.2)
    times = history.times()
    requests, tokens, cache, ttft, itl, hits = axes.flat
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
        "tokens/s",
        {
            "generated": (BLUE, history.rate("generation_tokens_total")),
            "prompt": (SKY, history.rate("prompt_tokens_total")),
        },
    )
    _lines(cache, times, "KV cache used", {"": (PINK, history.gauge("kv_cache_usage_perc"))})
    for each, name, label, limit in (
        (ttft, "time_to_first_token_seconds", "TTFT, ms", LIMITS["ttft"]),
        (itl, "inter_token_latency_seconds", "ITL, ms", LIMITS["itl"]),
    ):
        percentiles = {
            f"p{percent}": (colour, history.percentile(name, percent))
            for percent, colour in ((50, GREEN), (99, ORANGE))
        }
        _lines(each, times, label, percentiles)
        each.axhline(limit, color=INK, linestyle="--", linewidth=1)
    hit_rate = history.share("prefix_cache_hits_total", "prefix_cache_queries_total")
    _lines(hits, times, "prefix cache hit rate", {"": (GREEN, hit_rate)})
    cache.axhline(LIMITS["kv"], color=INK, linestyle="--", linewidth=1)
    for each in (cache, hits):
        each.set_ylim(0, 1.05)
        each.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for each in axes[1]:
        each.xaxis.set_major_locator(MaxNLocator(5))
        each.set(xlabel="seconds", xlim=(min(times[0], -WINDOW_SECONDS), 0))
    return made


def dashboard(
    url: str, loads: Mapping[str, Sequence[Planned]], caption: str, number: str = ""
) -> None:
    """Show the panels below one button per load, which sends it and redraws the panels meanwhile.

    The first load is sent at once, so that the panels show something. `caption` describes the
    figure to readers who cannot see it; with a `number`, it also stands below.
    """
    history, known_presses = History(), dict.fromkeys(loads, 0)

    def draw(**presses: int) -> Iterator[Figure]:
        pressed = [name for name in presses if presses[name] > known_presses[name]]
        known_presses.update(presses)
        yield from watch(url, history, loads[(pressed or list(loads))[0]])

    explore(draw, caption, number, **dict.fromkeys(loads))


def watch(url: str, history: History, load: Sequence[Planned]) -> Iterator[Figure]:
    """Send a load, scrape into `history`, and yield new panels until the load is answered."""
    sender = threading.Thread(target=put_load, args=(url, load))
    scraper = threading.Thread(target=_scrape_while, args=(url, history, sender.is_alive))
    sender.start()
    scraper.start()
    drawing_seconds = INTERVAL_SECONDS
    while scraper.is_alive():
        scraper.join(PAUSE_PER_DRAWING * drawing_seconds)
        started = time.monotonic()
        yield panels(History(list(history.scrapes)))
        drawing_seconds = time.monotonic() - started


def _scrape_while(url: str, history: History, is_sending: Callable[[], bool]) -> None:
    """Append scrapes while `is_sending()`, and one more for the final values."""
    last = False
    while not last:
        last = not is_sending()
        history.scrapes.append(scrape(url, time.monotonic()))
        oldest = history.scrapes[-1].at - HISTORY_SECONDS
        history.scrapes[:] = [each for each in history.scrapes if each.at >= oldest]
        time.sleep(INTERVAL_SECONDS)


def _lines(
    axes: Axes,
    times: Sequence[float],
    name: str,
    lines: Mapping[str, tuple[str, Sequence[float]]],
) -> None:
    """Draw a panel with the title `name`; `lines` has a colour and values by label."""
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


TICKS_SECONDS = (0.1, 0.2, 0.5, 1, 2, 4)
SHORTEST = 25  # requests of a load whose rates are drawn
RATE_NAMES = ("throughput: answered", "goodput: within the objectives")
ROW_TITLES = ("requests", "KV cache used", "time to first token, s")


def by_rate(
    outcomes: Mapping[float, Sequence[Outcome]], slos: Sequence[Slo], window: tuple[float, float]
) -> Figure:
    """Draw throughput and goodput by the offered rate, all in requests per second.

    Left are the requests that end in the window; right, at the largest rate, the first requests of
    the load, from the first arrival to their last answer.
    """
    rates, most = list(outcomes), max(outcomes)
    found = [Rates.of(each, slos, window) for each in outcomes.values()]
    by_length = [each[SHORTEST - 1 :] for each in rates_by_length(outcomes[most], slos)]
    lengths = range(SHORTEST, len(outcomes[most]) + 1)
    made, (left, right) = figure(10, 3.6, ncols=2, width_ratios=(1.4, 1), sharey=True)
    for axes, places, lines, look in (
        (left, rates, ([each.answered for each in found], [each.good for each in found]), "o-"),
        (right, lengths, by_length, "-"),
    ):
        for line, colour, name in zip(lines, (BLUE, ORANGE), RATE_NAMES, strict=True):
            axes.plot(places, line, look, color=colour, label=name)
        axes.set(ylim=(0, None), xlim=(0, None))
    best = int(np.argmax([each.good for each in found]))
    left.axvline(rates[best], color=FAINT, zorder=0)
    left.set(xlabel="offered requests per second", ylabel="requests per second")
    right.set(xlabel="requests of the load")
    right.legend(frameon=False, labelcolor=INK, loc="center right")
    title(left, f"Goodput is largest at {rates[best]:g} offered per second")
    title(right, f"{most:g} offered, by the load's length")
    return made


def spreads(latencies: Mapping[str, Sequence[float]], wait: float, requests: int) -> Figure:
    """Draw the latency distributions of up to three systems, and the share of slow visits.

    A visit makes `requests` requests, and is slow if one of them takes longer than `wait`; the
    requests' latencies are assumed to be independent. Latencies and `wait` are in seconds.
    """
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
    left.set(xlabel="seconds", xscale="log", ylim=(0, 1.12), ylabel="share at or below")
    left.set_xticks(TICKS_SECONDS, [f"{each:g}" for each in TICKS_SECONDS])
    left.xaxis.set_minor_locator(NullLocator())
    left.legend(frameon=False, labelcolor=INK, loc="lower right")
    title(left, "Distribution of latency")
    bars = right.bar(
        list(shares), list(shares.values()), color=[BLUE, ORANGE, GREEN][: len(shares)]
    )
    right.bar_label(bars, [f"{each:.0%}" for each in shares.values()], color=INK)
    right.set(ylim=(0, 1.12), yticks=[])
    right.spines["left"].set_visible(False)
    plural = "request" if requests == 1 else "requests"
    title(right, f"Visits of {requests} {plural} with one over {wait:g} s")
    return made


def cost(price_per_hour: float, tokens: Mapping[str, float]) -> Figure:
    """Draw the price of a million tokens by tokens per second, with named points on the curve.

    `price_per_hour` is in dollars; `tokens` has each point's good tokens per second, those of
    requests that met their objectives. Dollars per million tokens = price per hour / (0.0036 x
    tokens per second), because an hour has 3600 seconds. Raises `ValueError` unless the price and
    each of the tokens are above 0.
    """
    if min(price_per_hour, *tokens.values()) <= 0:
        raise ValueError("The price and the good tokens of each load must be above 0.")
    made, axes = figure(9, 3.4)
    most = 1.3 * max(tokens.values())
    rates = np.geomspace(most / 60, most, 200)
    axes.plot(rates, price_per_hour / (0.0036 * rates), color=BLUE)
    for name, rate in tokens.items():
        dollars = price_per_hour / (0.0036 * rate)
        axes.plot(rate, dollars, "o", color=ORANGE)
        label = f"{name}: \\${dollars:,.2f}"
        axes.annotate(label, (rate, dollars), (6, 8), color=INK, textcoords="offset points")
    axes.set(xlabel="good tokens per second", ylabel="dollars per million good tokens")
    axes.set_ylim(0, 1.25 * max(price_per_hour / (0.0036 * each) for each in tokens.values()))
    axes.set_xlim(0, most)
    title(axes, f"A machine for \\${price_per_hour:g} per hour")
    return made


def run_in_time(run: Run, tenant: str | None = None) -> Figure:
    """Draw the gauges of a run, and each request's time to first token by its arrival time.

    With `tenant`, only the requests of that tenant are drawn; the gauges are of all requests.
    """
    made, rows = figure(10, 5.2, nrows=3, sharex=True, height_ratios=(1.2, 0.8, 1.4))
    times = [each.at for each in run.moments]
    _stairs(rows[0], times, [each.running for each in run.moments], BLUE, "running")
    _stairs(rows[0], times, [each.waiting for each in run.moments], AMBER, "waiting")
    rows[0].legend(frameon=False, labelcolor=INK, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    _stairs(rows[1], times, [each.kv_used for each in run.moments], PINK, "")
    rows[1].set_ylim(0, 1.05)
    rows[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    outcomes = run.outcomes if tenant is None else run.of(tenant)
    first_tokens = [(each.arrived, each.ttft) for each in outcomes if each.ttft is not None]
    rows[2].plot(*zip(*first_tokens, strict=True), ".", color=GREEN)
    refused = [each.arrived for each in outcomes if each.error is not None]
    rows[2].plot(refused, [0.0] * len(refused), "x", color=ORANGE, label="refused")
    if refused:
        rows[2].legend(frameon=False, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1))
    rows[2].set(xlabel="seconds", ylim=(0, None), xlim=(0, None))
    for axes, name in zip(rows, ROW_TITLES, strict=True):
        title(axes, name)
    return made


def _stairs(
    axes: Axes, times: Sequence[float], values: Sequence[float], colour: str, label: str
) -> None:
    """Draw a gauge, which keeps its value until the next step of the engine."""
    drawn = [float(np.max(np.asarray(line.get_ydata()))) for line in axes.lines]
    top = max([1.0, *drawn, *values])
    axes.step(times, values, where="post", color=colour, linewidth=1.4, label=label)
    axes.set_ylim(0, 1.05 * top)


PHASES = (  # label, the `Request` time at which it ends, colour
    ("waits for a step to end", "queued_ns", PINK),
    ("waits for a batch slot", "scheduled_ns", FAINT),
    ("prefill", "first_token_ns", AMBER),
    ("decode", "last_token_ns", BLUE),
)


def waits(events: Iterable[Event]) -> Figure:
    """Draw a bar per request, in milliseconds from its arrival at the server to its last token.

    Its label is the number of its prompt's tokens. Raises `ValueError` for a request that lacks a
    time, because it has no token yet or its first events were not recorded.
    """
    requests = list[Request]()
    Timeline(on_request=requests.append).replay(events)
    requests.sort(key=lambda each: each.arrived_ns or 0)
    made, axes = figure(10, 0.26 * len(requests) + 1.3)
    for row, each in enumerate(requests):
        times = [each.arrived_ns, *(getattr(each, end) for _, end, _ in PHASES)]
        since = [(time - times[0]) / 1e6 for time in times if time is not None]
        if len(since) < len(times):
            raise ValueError(
                f"Request {each.sequence_id} lacks a time: give only finished requests whose "
                "events were all recorded."
            )
        for (label, _, colour), (begins, ends) in zip(PHASES, pairwise(since), strict=True):
            label = "" if row else label
            axes.barh(row, ends - begins, left=begins, color=colour, height=0.7, label=label)
    axes.set_yticks(range(len(requests)), [f"{each.prompt_tokens:,} tokens" for each in requests])
    axes.set(xlabel="milliseconds after arrival")
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=4, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    title(axes, f"Where the time of {len(requests)} requests went")
    return made


def storms(runs: Mapping[str, Storm]) -> Figure:
    """Draw the tries that arrive per second, and the answers in time, by kind of client."""
    made, (sent, good) = figure(10, 4.6, nrows=2, sharex=True)
    colours = (BLUE, ORANGE, PINK, GREEN, SKY)
    for (name, run), colour in zip(runs.items(), colours, strict=False):
        for axes, times in ((sent, run.sent), (good, run.good)):
            rates = rate_of(times)
            middles = [SECONDS * (place + 0.5) / len(rates) for place in range(len(rates))]
            axes.plot(middles, rates, color=colour, linewidth=1.6, label=name)
    sent.axhline(1 / SERVICE, color=INK, linestyle="--", linewidth=1)
    sent.text(SECONDS, 1 / SERVICE, " what the server can do", va="bottom", ha="right", fontsize=9)
    made.legend(
        *sent.get_legend_handles_labels(), frameon=False, labelcolor=INK, loc="outside right upper"
    )
    for axes in (sent, good):
        axes.set(ylim=(0, None), xlim=(0, SECONDS), ylabel="per second")
    good.set(xlabel="seconds")
    title(sent, "Tries that arrive, retries included")
    title(good, "Goodput: answers while their client still waits")
    return made


def mystery_gauges(seed: int, knob: str = "") -> Figure:
    """Draw the gauges of a mystery server in time, with one knob turned if `knob` names one.

    Raises `ValueError` for a knob that does not exist.
    """
    made = run_in_time(treated(seed, knob.strip() or None))
    goodput = goodput_of(seed, knob.strip() or None)
    said = knob.strip() or "as it is"
    made.suptitle(
        f"Seed {seed}, {said}: goodput {goodput:.2f}, and {goal_of(seed):.2f} is the goal",
        fontsize=11,
    )
    return made


def shapes(loads: Mapping[str, Sequence[Ask]]) -> Figure:
    """Draw each load's requests in time: tokens of the prompt upwards, of the answer downwards."""
    made, axes = figure(11, 2.9, ncols=len(loads), sharex=True, sharey=True)
    for place, (each, (name, load)) in enumerate(zip(axes, loads.items(), strict=True)):
        times = [ask.at for ask in load]
        shared = [num_equal(load)] * len(load)
        own = [len(ask.prompt_ids) - shared[0] for ask in load]
        answers = [-ask.output_tokens for ask in load]
        each.bar(times, shared, width=0.25, color=FAINT, label="prompt, equal in all")
        each.bar(times, own, width=0.25, bottom=shared, color=AMBER, label="prompt, its own")
        each.bar(times, answers, width=0.25, color=BLUE, label="answer")
        each.axhline(0, color=INK, linewidth=0.8)
        each.set(xlabel="seconds")
        title(each, name)
        if place == 0:
            each.set(ylabel="tokens")
            each.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    handles, labels = axes[0].get_legend_handles_labels()
    made.legend(handles, labels, frameon=False, labelcolor=INK, ncols=3, loc="outside lower center")
    return made

"""Prometheus metrics of an engine, with vLLM's names, and the route `GET /metrics`.

Source: vLLM's page "Production Metrics" (docs.vllm.ai, usage/metrics) for names, labels and
buckets, and its design page "Metrics" for the definition of the intervals; Prometheus's page
"Exposition formats" for the text.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import PlainTextResponse, Response

from minigen.errors import OptionError
from minigen.server.models import Served, Watcher
from minigen.trace.events import Event, Trace
from minigen.trace.timeline import Request, State, Timeline

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
BUCKETS = {
    "time_to_first_token_seconds": TTFT_SECONDS,
    "inter_token_latency_seconds": TOKEN_SECONDS,
    "request_time_per_output_token_seconds": TOKEN_SECONDS,
    "e2e_request_latency_seconds": REQUEST_SECONDS,
    "request_queue_time_seconds": REQUEST_SECONDS,
    "request_prefill_time_seconds": REQUEST_SECONDS,
    "request_decode_time_seconds": REQUEST_SECONDS,
}
COUNTERS = (
    *("prompt_tokens", "generation_tokens", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    "spec_decode_num_accepted_tokens",
)
MOST_POSITIONS = 128  # of drafts, as many as a step may have
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
REASONS = ("stop", "length", "abort", "error")
REFUSALS = (429, 503)  # statuses: above a limit, while the server shuts down


@dataclass(eq=False)
class Histogram:
    """The number of values between each bound (inclusive) and the one before it, and their sum.

    `counts` has one entry more than `bounds`: the values above all bounds.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True)
class Readings:
    """A snapshot of one model's metrics, by the names above; `histograms` as (counts, sum).

    `accepted_at` counts the accepted drafts by their place, up to the last one that was accepted.
    """

    gauges: dict[str, float]
    counters: dict[str, int]
    ended: dict[str, int]
    accepted_at: list[int]
    histograms: dict[str, tuple[list[int], float]]


class Metrics:
    """Counts the events of one engine; subscribe it to the engine's trace before the first request.

    `kv_usage` is called in the engine's thread after each step and each ended sequence. It returns
    the share of the KV cache in use, 0 to 1. Any thread may call `read`. The state of a sequence is
    dropped when it ends.

    Every sequence counts as a request, so n answers to one prompt count as n. Their shared prompt
    counts once, when the first of them gets its first token. Prefix cache queries and hits count
    when a prompt first runs, not again after a preemption. The queue time lasts from the arrival
    (before the engine takes the request between two steps) to the first run, the prefill time to
    the first token, and the decode time to the last token; both include preemptions. A sequence
    forked from its parent's prompt shares the parent's prefill. First tokens and gaps are observed
    when they happen, all other times when a request finishes. Aborted and failed requests only
    count by their reason. A request with a single token has no time per output token.
    """

    def __init__(self, model_name: str, kv_usage: Callable[[], float]):
        self.model_name, self.kv_usage = model_name, kv_usage
        self._lock = Lock()
        self._timeline = Timeline(
            times_only=True,
            on_running=self._on_running,
            on_token=self._on_token,
            on_end=self._on_end,
            on_step=self._on_step,
            on_verified=self._on_verified,
        )
        self._kv_used = 0.0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._ended = dict.fromkeys(REASONS, 0)
        self._accepted_at = [0]
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self._gaps = self._histograms["inter_token_latency_seconds"]

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._timeline(event)

    def read(self) -> Readings:
        """Return a consistent snapshot of all metrics."""
        with self._lock:
            timeline = self._timeline
            num_running = sum(each.queued_ns is not None for each in timeline.running)
            gauges = {
                "num_requests_running": num_running,
                "num_requests_waiting": len(timeline.requests) - num_running,
                "kv_cache_usage_perc": self._kv_used,
            }
            work = timeline.work
            counters = self._counters | {
                "num_preemptions": work.preemptions,
                "spec_decode_num_drafts": work.drafts,
                "spec_decode_num_draft_tokens": work.tokens_drafted,
                "spec_decode_num_accepted_tokens": work.tokens_accepted,
            }
            histograms = {
                name: (each.counts.copy(), each.total) for name, each in self._histograms.items()
            }
            accepted_at = self._accepted_at.copy()
            return Readings(gauges, counters, self._ended.copy(), accepted_at, histograms)

    def _on_step(self, event: Event) -> None:
        self._kv_used = self.kv_usage()

    def _on_running(self, request: Request, event: Event) -> None:
        if request.preemptions == 0 and request.prompt_tokens is not None:
            self._counters["prefix_cache_queries"] += request.prompt_tokens
            self._counters["prefix_cache_hits"] += event.counts["computed"]

    def _on_token(self, request: Request, event: Event) -> None:
        self._counters["generation_tokens"] += 1
        if request.arrived_ns is None:
            return
        if request.gap_ns is not None:
            self._gaps.observe(request.gap_ns / 1e9)
            return
        self._observe("time_to_first_token_seconds", request.arrived_ns, event.time_ns)
        if request.parent is None and request.prompt_tokens is not None:
            self._counters["prompt_tokens"] += request.prompt_tokens

    def _on_verified(self, request: Request, event: Event) -> None:
        accepted = min(event.counts["accepted"], MOST_POSITIONS)
        self._accepted_at += [0] * (accepted - len(self._accepted_at))
        for place in range(accepted):
            self._accepted_at[place] += 1

    def _on_end(self, request: Request, event: Event) -> None:
        self._kv_used = self.kv_usage()
        if request.state is not State.FINISHED:
            self._ended["abort" if request.state is State.ABORTED else "error"] += 1
            return
        self._ended["stop" if event.counts["stopped"] else "length"] += 1
        if request.arrived_ns is not None:
            self._observe("e2e_request_latency_seconds", request.arrived_ns, event.time_ns)
            self._observe_times(request, request.arrived_ns)

    def _observe_times(self, request: Request, arrived_ns: int) -> None:
        scheduled_ns, first_ns = request.scheduled_ns, request.first_token_ns
        last_ns = request.last_token_ns
        if scheduled_ns is None or first_ns is None or last_ns is None:
            return
        self._observe("request_queue_time_seconds", arrived_ns, scheduled_ns)
        self._observe("request_prefill_time_seconds", scheduled_ns, first_ns)
        self._observe("request_decode_time_seconds", first_ns, last_ns)
        num_gaps = request.output_tokens - 1
        if num_gaps > 0:
            seconds = (last_ns - first_ns) / num_gaps / 1e9
            self._histograms["request_time_per_output_token_seconds"].observe(seconds)

    def _observe(self, name: str, started_ns: int, ended_ns: int) -> None:
        self._histograms[name].observe((ended_ns - started_ns) / 1e9)


PREFIXES = ("minigen:", "vllm:")
LABELS = ("model_name",)
HELP = {
    "num_requests_running": "Requests that are running.",
    "num_requests_waiting": "Requests that are waiting: queued or preempted.",
    "kv_cache_usage_perc": "Share of the KV cache that running requests use; 1 is all of it.",
    "prompt_tokens": "Prompt tokens whose prefill is complete.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Preemptions: a running request freed its blocks and is recomputed later.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "spec_decode_num_drafts": "Steps of a request that verified drafts (speculative decoding).",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "The same, by their position in the draft.",
    "request_success": "Requests that ended, by the reason: stop, length, abort, error.",
    "requests_refused": "Requests that were not admitted, by the status: 429 or 503.",
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "From each token of a request to the next.",
    "request_time_per_output_token_seconds": "Mean time between a request's tokens.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its first run.",
    "request_prefill_time_seconds": "From a request's first run to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
}


class MetricsPage(Collector):
    """The metrics page of one server; it shows the models that `add` registered.

    `registry` belongs to this page, not to the process. It also reports the process's memory and
    CPU time, and accepts further collectors. `prefix` starts every name: "minigen:", or "vllm:" for
    dashboards that were made for vLLM; any other raises `OptionError`. A refused request reaches no
    engine, so refusals count for the whole server. All methods are thread-safe.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, prefix: str = "minigen:"):
        if prefix not in PREFIXES:
            raise OptionError(f"The metrics' prefix must be one of {PREFIXES}, not {prefix!r}.")
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self._models: dict[str, Metrics] = {}
        self._refused, self._lock = dict.fromkeys(REFUSALS, 0), Lock()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add(self, metrics: Metrics) -> None:
        """Show a model's metrics. Raises `OptionError` if the name is already in use."""
        if self._models.setdefault(metrics.model_name, metrics) is not metrics:
            raise OptionError(f"The page has metrics of a model {metrics.model_name!r} already.")

    def remove(self, metrics: Metrics) -> None:
        """Stop showing a model's metrics. Raises `KeyError` if they are not shown."""
        del self._models[metrics.model_name]

    def follow(
        self, model_name: str, trace: Trace, kv_usage: Callable[[], float]
    ) -> Callable[[], None]:
        """Show the metrics of an engine's trace; call the returned function to stop.

        Raises the errors of `add`. The engine must be idle, because its trace gets a subscriber.
        """
        metrics = Metrics(model_name, kv_usage)
        self.add(metrics)
        trace.subscribe(metrics)
        return lambda: self.remove(metrics)

    def count_refusal(self, status: int) -> None:
        """Count a request that was refused with this status, one of `REFUSALS`."""
        with self._lock:
            self._refused[status] += 1

    def render(self) -> bytes:
        """Return the page's text, with the content type `content_type`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family with one sample per model; the registry calls this."""
        return self._families({name: each.read() for name, each in list(self._models.items())})

    def describe(self) -> Iterable[Metric]:
        """Yield the families without samples; the registry uses them to detect duplicate names."""
        return self._families({})

    def _families(self, readings: Mapping[str, Readings]) -> Iterable[Metric]:
        yield from (self._gauge(name, readings) for name in GAUGES)
        yield from (self._counter(name, readings) for name in COUNTERS)
        yield self._accepted(readings)
        yield self._ended(readings)
        yield self._refusals()
        yield from (self._histogram(name, readings) for name in BUCKETS)

    def _gauge(self, name: str, readings: Mapping[str, Readings]) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, HELP[name], labels=LABELS)
        for model, each in readings.items():
            family.add_metric([model], each.gauges[name])
        return family

    def _counter(self, name: str, readings: Mapping[str, Readings]) -> Metric:
        family = CounterMetricFamily(self.prefix + name, HELP[name], labels=LABELS)
        for model, each in readings.items():
            family.add_metric([model], each.counters[name])
        return family

    def _accepted(self, readings: Mapping[str, Readings]) -> Metric:
        name = "spec_decode_num_accepted_tokens_per_pos"
        labels = (*LABELS, "position")
        family = CounterMetricFamily(self.prefix + name, HELP[name], labels=labels)
        for model, each in readings.items():
            for position, count in enumerate(each.accepted_at):
                family.add_metric([model, str(position)], count)
        return family

    def _ended(self, readings: Mapping[str, Readings]) -> Metric:
        name = "request_success"
        labels = (*LABELS, "finished_reason")
        family = CounterMetricFamily(self.prefix + name, HELP[name], labels=labels)
        for model, each in readings.items():
            for reason in REASONS:
                family.add_metric([model, reason], each.ended[reason])
        return family

    def _refusals(self) -> Metric:
        name = "requests_refused"
        family = CounterMetricFamily(self.prefix + name, HELP[name], labels=("status",))
        for status, count in self._refused.items():
            family.add_metric([str(status)], count)
        return family

    def _histogram(self, name: str, readings: Mapping[str, Readings]) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, HELP[name], labels=LABELS)
        for model, each in readings.items():
            counts, total = each.histograms[name]
            family.add_metric([model], _cumulated(BUCKETS[name], counts), total)
        return family


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return each bound as text with the number of values at or below it; the last is infinity."""
    limits = map(floatToGoString, (*bounds, math.inf))
    return list(zip(limits, accumulate(counts), strict=True))


def metrics_router(page: MetricsPage) -> APIRouter:
    """Create the route `GET /metrics` for Prometheus."""
    router = APIRouter(tags=["state"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of every loaded model in Prometheus's text format."""
        return Response(page.render(), media_type=page.content_type)

    return router


def metrics_watcher(page: MetricsPage) -> Watcher:
    """Create a watcher that shows a model's metrics on the page while the model is loaded."""

    def watch(served: Served) -> Callable[[], None]:
        return page.follow(served.name, served.llm.trace, lambda: served.llm.kv_usage)

    return watch

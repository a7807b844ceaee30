"""What an engine does as Prometheus metrics, under vLLM's names, and the route `GET /metrics`.

Source: vLLM's page "Production Metrics" (docs.vllm.ai, usage/metrics) for names, labels and
buckets, and its design page "Metrics" for what the intervals are; Prometheus's page "Exposition
formats" for the text.
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
from minigen.trace.events import Event, EventKind, Trace

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
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
REASONS = ("stop", "length", "abort", "error")


@dataclass(eq=False)
class Histogram:
    """How many values lie at or below each bound and above the one before it, and their sum.

    `counts` has one entry more than `bounds`: what is above all of them.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True)
class Readings:
    """One model's numbers at one moment, by the names above; `histograms` as (counts, sum)."""

    gauges: dict[str, float]
    counters: dict[str, int]
    ended: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]


@dataclass(eq=False, slots=True)
class _Life:
    """A sequence that has not ended: when it came, first ran, and got its first and last token."""

    arrived_ns: int
    prompt_tokens: int
    scheduled_ns: int | None = None
    first_ns: int | None = None
    last_ns: int = 0
    running: bool = False
    forked: bool = False


class Metrics:
    """Counts what one engine does; subscribe it to the engine's trace, before its first request.

    `kv_usage` is asked in the engine's thread, after each step and each sequence given up, for the
    share of the KV cache that is in use, 0 to 1. `read` may be called by any thread. Nothing is
    kept of a sequence that has ended.

    Every sequence is a request, so n answers to one prompt are n. Their prompt counts once, when
    the first of them gets its first token. The prefix cache is asked for a prompt's tokens when it
    first runs, not again after a preemption. A request is queued from its arrival, which is before
    the engine takes it between two steps, until it first runs; it prefills
    until its first token, and decodes until its last, preemptions included; who takes over its
    parent's prompt prefills with it. First tokens and gaps count when they happen, all other times
    when a request finishes; one that was aborted or failed is only counted, by its reason. A
    request of a single token has no time per output token.
    """

    def __init__(self, model_name: str, kv_usage: Callable[[], float]):
        self.model_name, self.kv_usage = model_name, kv_usage
        self._lock = Lock()
        self._lives: dict[int | None, _Life] = {}
        self._num_running = 0
        self._kv_used = 0.0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._ended = dict.fromkeys(REASONS, 0)
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self._gaps = self._histograms["inter_token_latency_seconds"]

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event.kind:  # what comes for every token first
                case EventKind.NEW_TOKEN:
                    self._hear_token(event)
                case EventKind.SCHEDULED:
                    self._hear_scheduled(event)
                case EventKind.STEP:
                    self._kv_used = self.kv_usage()
                case EventKind.QUEUED:
                    arrived_ns = event.time_ns - event.counts["waited_ns"]
                    life = _Life(arrived_ns, event.counts["prompt_tokens"])
                    self._lives[event.sequence_id] = life
                case EventKind.FORKED:
                    self._hear_fork(event)
                case EventKind.PREEMPTED:
                    self._counters["num_preemptions"] += 1
                    self._run(self._lives.get(event.sequence_id), False)
                case EventKind.FINISHED:
                    self._end(event, "stop" if event.counts["stopped"] else "length")
                case EventKind.ABORTED:
                    self._end(event, "abort")
                case EventKind.FAILED:
                    self._end(event, "error")

    def read(self) -> Readings:
        """All numbers, as they were at one moment."""
        with self._lock:
            gauges = {
                "num_requests_running": self._num_running,
                "num_requests_waiting": len(self._lives) - self._num_running,
                "kv_cache_usage_perc": self._kv_used,
            }
            histograms = {
                name: (each.counts.copy(), each.total) for name, each in self._histograms.items()
            }
            return Readings(gauges, self._counters.copy(), self._ended.copy(), histograms)

    def _hear_token(self, event: Event) -> None:
        self._counters["generation_tokens"] += 1
        life = self._lives.get(event.sequence_id)
        if life is None:  # it was queued unheard
            return
        if life.first_ns is None:
            life.first_ns = event.time_ns
            self._observe("time_to_first_token_seconds", life.arrived_ns, event.time_ns)
            if not life.forked:
                self._counters["prompt_tokens"] += life.prompt_tokens
        else:
            self._gaps.observe((event.time_ns - life.last_ns) / 1e9)
        life.last_ns = event.time_ns

    def _hear_scheduled(self, event: Event) -> None:
        life = self._lives.get(event.sequence_id)
        if life is None or life.running:
            return
        self._run(life, True)
        if life.scheduled_ns is None:
            life.scheduled_ns = event.time_ns
            self._counters["prefix_cache_queries"] += life.prompt_tokens
            self._counters["prefix_cache_hits"] += event.counts["computed"]

    def _hear_fork(self, event: Event) -> None:
        life, parent = self._lives.get(event.sequence_id), self._lives.get(event.counts["parent"])
        if life is None:
            return
        life.forked = True
        self._run(life, True)
        if parent is not None and parent.scheduled_ns is not None:
            life.scheduled_ns = max(parent.scheduled_ns, life.arrived_ns)

    def _run(self, life: _Life | None, running: bool) -> None:
        if life is not None:
            self._num_running += running - life.running
            life.running = running

    def _end(self, event: Event, reason: str) -> None:
        self._kv_used = self.kv_usage()
        self._ended[reason] += 1
        life = self._lives.pop(event.sequence_id, None)
        if life is None:
            return
        self._run(life, False)
        if event.kind is EventKind.FINISHED:
            self._tell_times(life, event)

    def _tell_times(self, life: _Life, finished: Event) -> None:
        self._observe("e2e_request_latency_seconds", life.arrived_ns, finished.time_ns)
        if life.scheduled_ns is None or life.first_ns is None:
            return
        self._observe("request_queue_time_seconds", life.arrived_ns, life.scheduled_ns)
        self._observe("request_prefill_time_seconds", life.scheduled_ns, life.first_ns)
        self._observe("request_decode_time_seconds", life.first_ns, life.last_ns)
        num_gaps = finished.counts["output_tokens"] - 1
        if num_gaps > 0:
            seconds = (life.last_ns - life.first_ns) / num_gaps / 1e9
            self._histograms["request_time_per_output_token_seconds"].observe(seconds)

    def _observe(self, name: str, started_ns: int, ended_ns: int) -> None:
        self._histograms[name].observe((ended_ns - started_ns) / 1e9)


PREFIXES = ("minigen:", "vllm:")
LABELS = ("model_name",)
HELP = {
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait: queued, or preempted.",
    "kv_cache_usage_perc": "Share of the KV cache that running requests hold; 1 is all of it.",
    "prompt_tokens": "Tokens of prompts whose prefill is done.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Times that a running request gave its blocks back, to begin anew.",
    "prefix_cache_queries": "Tokens of prompts that the prefix cache was asked for.",
    "prefix_cache_hits": "Tokens of prompts that the prefix cache had.",
    "request_success": "Requests that ended, by the reason: stop, length, abort, error.",
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "From each token of a request to its next.",
    "request_time_per_output_token_seconds": "Mean time between a request's tokens.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its first run.",
    "request_prefill_time_seconds": "From a request's first run to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
}


class MetricsPage(Collector):
    """The page of one server: a model's numbers appear when it is added, and go when it is removed.

    `registry` is its own, not the process's; it has the process's memory and CPU time, too, and
    takes further collectors. `prefix` begins the names: "minigen:", or "vllm:" for dashboards that
    were made for vLLM; any other raises `OptionError`. All of it may be called by any thread.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, prefix: str = "minigen:"):
        if prefix not in PREFIXES:
            raise OptionError(f"The metrics' prefix is one of {PREFIXES}, not {prefix!r}.")
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self._models: dict[str, Metrics] = {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add(self, metrics: Metrics) -> None:
        """Show a model's numbers. Raises `OptionError` if one of this name is shown already."""
        if self._models.setdefault(metrics.model_name, metrics) is not metrics:
            raise OptionError(f"There are metrics of a model named {metrics.model_name!r} already.")

    def remove(self, metrics: Metrics) -> None:
        """Show a model's numbers no more. Raises `KeyError` for one that is not shown."""
        del self._models[metrics.model_name]

    def follow(
        self, model_name: str, trace: Trace, kv_usage: Callable[[], float]
    ) -> Callable[[], None]:
        """Show from now on what an engine's trace tells; call what is returned to end that.

        Raises as `add`. The engine must be idle, since its trace gets a subscriber.
        """
        metrics = Metrics(model_name, kv_usage)
        self.add(metrics)
        trace.subscribe(metrics)
        return lambda: self.remove(metrics)

    def render(self) -> bytes:
        """The page's text, of the type `content_type`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Every family of metrics, each with a sample for every model; for the registry."""
        return self._families({name: each.read() for name, each in list(self._models.items())})

    def describe(self) -> Iterable[Metric]:
        """The families without samples; by them the registry sees that no name is there twice."""
        return self._families({})

    def _families(self, readings: Mapping[str, Readings]) -> Iterable[Metric]:
        yield from (self._gauge(name, readings) for name in GAUGES)
        yield from (self._counter(name, readings) for name in COUNTERS)
        yield self._ended(readings)
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

    def _ended(self, readings: Mapping[str, Readings]) -> Metric:
        name = "request_success"
        labels = (*LABELS, "finished_reason")
        family = CounterMetricFamily(self.prefix + name, HELP[name], labels=labels)
        for model, each in readings.items():
            for reason in REASONS:
                family.add_metric([model, reason], each.ended[reason])
        return family

    def _histogram(self, name: str, readings: Mapping[str, Readings]) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, HELP[name], labels=LABELS)
        for model, each in readings.items():
            counts, total = each.histograms[name]
            family.add_metric([model], _cumulated(BUCKETS[name], counts), total)
        return family


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Each bound as text, with how many values are at or below it; the last is infinity."""
    limits = map(floatToGoString, (*bounds, math.inf))
    return list(zip(limits, accumulate(counts), strict=True))


def metrics_router(page: MetricsPage) -> APIRouter:
    """`GET /metrics`, for Prometheus."""
    router = APIRouter(tags=["state"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """What every loaded model's engine does, in Prometheus's text format."""
        return Response(page.render(), media_type=page.content_type)

    return router


def metrics_watcher(page: MetricsPage) -> Watcher:
    """Shows a model's numbers on the page from when it is loaded until it is unloaded."""

    def watch(served: Served) -> Callable[[], None]:
        return page.follow(served.name, served.llm.trace, lambda: served.llm.kv_usage)

    return watch

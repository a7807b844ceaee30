"""`GET /metrics`: the numbers of every model that is loaded, in Prometheus's text format.

Source: Prometheus's page "Exposition formats".
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

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

from minigen.errors import OptionError
from minigen.server.metrics import BUCKETS, COUNTERS, GAUGES, REASONS, Metrics, Readings
from minigen.trace import Trace

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

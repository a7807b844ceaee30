"""What an engine does, as numbers for Prometheus, under the names that vLLM gave them.

Source: vLLM's page "Production Metrics" (docs.vllm.ai, usage/metrics) for names, labels and
buckets, and its design page "Metrics" for what the intervals are.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from minigen.trace import Event, EventKind

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

    def _observe(self, name: str, begun_ns: int, ended_ns: int) -> None:
        self._histograms[name].observe((ended_ns - begun_ns) / 1e9)

"""Summarize recorded events per request: its latencies, tokens, steps and blocks."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minigen.trace.events import Event, EventKind

_COLUMNS = {
    **{"request": "sequence_id", "prompt": "prompt_tokens", "cached": "prefix_hit_tokens"},
    **{"output": "output_tokens", "end": "finish", "preempted": "preemptions"},
    **{"queued ms": "queued_ms", "prefill ms": "prefill_ms", "TTFT ms": "ttft_ms"},
    **{"decode ms": "decode_ms"},
}


@dataclass(frozen=True)
class RequestSummary:
    """The summary of one request; times are in milliseconds.

    A request is queued until it is first scheduled, prefills until its first token, and decodes
    until its last token. `ttft_ms` (time to first token) is the sum of the first two times.
    `inter_token_ms` are the times between tokens. `num_steps` counts the steps that computed part
    of it. `finish` is "finished", "aborted", "failed", or None while it is unfinished.
    `prefix_hit_tokens` were found in the prefix cache, also after a preemption. `recomputed_tokens`
    had been computed before a preemption.

    A request with a `parent` is a fork of it. The parent's prefill counts as its own, so it was
    queued until the parent was first scheduled. The prefilled tokens count only for the parent.

    A value is None if the events do not contain it. If the recorder dropped a request's first
    events, that holds for all values counted from there, and `inter_token_ms` covers only the
    recorded tokens.
    """

    sequence_id: int
    parent: int | None
    finish: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    queued_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_ms: float | None
    inter_token_ms: tuple[float, ...]
    num_steps: int | None
    prefix_hit_tokens: int | None
    recomputed_tokens: int | None
    preemptions: int | None
    blocks_allocated: int | None
    blocks_shared: int | None
    blocks_copied: int | None


def summarize(events: Iterable[Event]) -> list[RequestSummary]:
    """Return a summary of every request in the events, in order of arrival.

    An id that is queued again is a new request.
    """
    histories: list[_History] = []
    latest: dict[int, _History] = {}
    for event in events:
        if event.sequence_id is None:
            continue
        history = latest.get(event.sequence_id)
        if history is None or event.kind is EventKind.QUEUED:
            history = latest[event.sequence_id] = _History(event.sequence_id)
            histories.append(history)
        history.on_event(event)
        if event.kind is EventKind.FORKED and (parent := latest.get(event.counts["parent"])):
            history.inherit(parent)
    return [history.summary() for history in histories]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a `share` (0 to 1) of the values lie.

    It interpolates linearly between neighbours, as numpy's `percentile` does by default. Raises
    `ValueError` if there are no values, or if `share` is not from 0 to 1.

    >>> percentile([10, 30, 20], 0.75)
    25.0
    """
    if not values:
        raise ValueError("values must not be empty: an empty list has no percentile.")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share!r}.")
    in_order = sorted(values)
    place = share * (len(in_order) - 1)
    below, above = in_order[int(place)], in_order[math.ceil(place)]
    return float(below + (place % 1) * (above - below))


def table(summaries: Sequence[RequestSummary]) -> str:
    """Return a plain-text table with one line per request, and their latencies below it."""
    rows = [list(_COLUMNS)]
    rows += [[_cell(getattr(each, name)) for name in _COLUMNS.values()] for each in summaries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    waits = [each.ttft_ms for each in summaries if each.ttft_ms is not None]
    gaps = [gap for each in summaries for gap in each.inter_token_ms]
    lines += ["", _latency("time to first token", waits), _latency("inter-token latency", gaps)]
    return "\n".join(lines)


@dataclass
class _History:
    """One request's events so far; `reached` is the most tokens of it ever computed."""

    sequence_id: int
    parent: int | None = None
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    token_times_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    reached: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    end: Event | None = None
    num_events: Counter[EventKind] = field(default_factory=Counter)

    def on_event(self, event: Event) -> None:
        self.num_events[event.kind] += 1
        match event.kind:
            case EventKind.QUEUED:
                self.queued_ns = event.time_ns
                self.prompt_tokens = event.counts["prompt_tokens"]
            case EventKind.SCHEDULED:
                self._schedule(event.time_ns, event.counts["computed"], event.counts["tokens"])
            case EventKind.FORKED:
                self.parent = event.counts["parent"]
            case EventKind.PREFIX_HIT:
                self.prefix_hit_tokens += event.counts["tokens"]
            case EventKind.NEW_TOKEN:
                self.token_times_ns.append(event.time_ns)
            case EventKind.FINISHED | EventKind.ABORTED | EventKind.FAILED:
                self.end = event

    def inherit(self, parent: "_History") -> None:
        """Count the parent's prefill as this request's own, from when both were queued."""
        self.reached = max(self.reached, parent.reached)
        if parent.scheduled_ns is not None:
            self._begin_prefill(max(parent.scheduled_ns, self.queued_ns or 0))

    def summary(self) -> RequestSummary:
        known = self.queued_ns is not None
        times_ns = self.token_times_ns
        first_ns, last_ns = (times_ns[0], times_ns[-1]) if times_ns and known else (None, None)
        output_tokens = self.end.counts["output_tokens"] if self.end else len(times_ns)
        return RequestSummary(
            sequence_id=self.sequence_id,
            parent=self.parent,
            finish=self.end.kind.value if self.end else None,
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens if known or self.end else None,
            queued_ms=_milliseconds(self.queued_ns, self.scheduled_ns),
            prefill_ms=_milliseconds(self.scheduled_ns, first_ns),
            ttft_ms=_milliseconds(self.queued_ns, first_ns),
            decode_ms=_milliseconds(first_ns, last_ns),
            inter_token_ms=tuple((b - a) / 1e6 for a, b in pairwise(times_ns)),
            num_steps=self.num_events[EventKind.SCHEDULED] if known else None,
            prefix_hit_tokens=self.prefix_hit_tokens if known else None,
            recomputed_tokens=self.recomputed_tokens if known else None,
            preemptions=self.num_events[EventKind.PREEMPTED] if known else None,
            blocks_allocated=self.num_events[EventKind.BLOCK_ALLOCATED] if known else None,
            blocks_shared=self.num_events[EventKind.BLOCK_SHARED] if known else None,
            blocks_copied=self.num_events[EventKind.BLOCK_COPIED] if known else None,
        )

    def _schedule(self, time_ns: int, computed: int, tokens: int) -> None:
        self._begin_prefill(time_ns)
        end = computed + tokens
        self.recomputed_tokens += max(min(self.reached, end) - computed, 0)
        self.reached = max(self.reached, end)

    def _begin_prefill(self, time_ns: int) -> None:
        if (
            self.scheduled_ns is None and not self.token_times_ns
        ):  # otherwise its first events were not recorded
            self.scheduled_ns = time_ns


def _milliseconds(started_ns: int | None, ended_ns: int | None) -> float | None:
    return None if started_ns is None or ended_ns is None else (ended_ns - started_ns) / 1e6


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _latency(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"{name:20}none"
    median, tail = percentile(values, 0.5), percentile(values, 0.95)
    return f"{name:20}p50 {median:.1f} ms, p95 {tail:.1f} ms"

"""Summarize recorded events per request: its latencies, tokens, steps and blocks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minigen.trace.events import Event
from minigen.trace.timeline import ENDS, Request, Timeline

_COLUMNS = {
    **{"request": "sequence_id", "prompt": "prompt_tokens", "cached": "prefix_hit_tokens"},
    **{"output": "output_tokens", "end": "finish", "preempted": "preemptions"},
    **{"queued ms": "queued_ms", "prefill ms": "prefill_ms", "TTFT ms": "ttft_ms"},
    **{"decode ms": "decode_ms"},
}
_COUNTS = (
    *("num_steps", "prefix_hit_tokens", "recomputed_tokens", "preemptions"),
    *("blocks_allocated", "blocks_shared", "blocks_copied"),
)


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
    gaps: dict[Request, list[float]] = {}

    def add_gap(request: Request, event: Event) -> None:
        if request.gap_ns is not None:
            gaps[request].append(request.gap_ns / 1e6)

    Timeline(on_request=lambda each: gaps.update({each: []}), on_token=add_gap).replay(events)
    return [_summary(request, tuple(of_it)) for request, of_it in gaps.items()]


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


def _summary(request: Request, gaps_ms: tuple[float, ...]) -> RequestSummary:
    known, ended = request.queued_ns is not None, request.state in ENDS
    first_ns = request.first_token_ns if known else None
    return RequestSummary(
        sequence_id=request.sequence_id,
        parent=request.parent,
        finish=request.state.value if ended else None,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens if known or ended else None,
        queued_ms=_milliseconds(request.queued_ns, request.scheduled_ns),
        prefill_ms=_milliseconds(request.scheduled_ns, first_ns),
        ttft_ms=_milliseconds(request.queued_ns, first_ns),
        decode_ms=_milliseconds(first_ns, request.last_token_ns),
        inter_token_ms=gaps_ms,
        **{name: getattr(request, name) if known else None for name in _COUNTS},
    )


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

"""Export recorded events as a timeline for ui.perfetto.dev or chrome://tracing.

It has one track per request, one track for the engine's steps, and counters of the engine's load.
Source: "Trace Event Format", the Chromium project.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from minigen.trace.events import Event, EventKind

Record = dict[str, Any]

PROCESS_ID = 1
FIRST_TRACK = 1  # Perfetto treats 0 as the idle thread


@dataclass
class ChromeRecords:
    """The records of a trace file; times are whole microseconds, so that adjacent slices meet."""

    process: str
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._levels: dict[str, int] = {}
        self._track_ids = count(FIRST_TRACK)
        self._add("M", "process_name", FIRST_TRACK, 0, {"name": self.process})

    def add_track(self, name: str) -> int:
        """Add a track below all others; return its id."""
        track_id = next(self._track_ids)
        self._add("M", "thread_name", track_id, 0, {"name": name})
        self._add("M", "thread_sort_index", track_id, 0, {"sort_index": track_id})
        return track_id

    def add_slice(
        self, track_id: int, name: str, started_us: int, ended_us: int, counts: Mapping[str, int]
    ) -> None:
        """Add a slice: an activity with a duration."""
        self._add("X", name, track_id, started_us, counts, dur=ended_us - started_us)

    def add_instant(
        self, track_id: int, name: str, time_us: int, counts: Mapping[str, int]
    ) -> None:
        """Add an instant event to a track."""
        self._add("i", name, track_id, time_us, counts, s="t")

    def set_level(self, name: str, time_us: int, value: int) -> None:
        """Set the counter `name` from this time on; add a record only if the value changes."""
        if self._levels.get(name) != value:
            self._levels[name] = value
            self._add("C", name, FIRST_TRACK, time_us, {name: value})

    def as_object(self) -> Record:
        """Return all records in order of time, ready for JSON."""
        in_order = sorted(self.records, key=lambda record: record["ts"])
        return {"traceEvents": in_order, "displayTimeUnit": "ms"}

    def _add(
        self,
        phase: str,
        name: str,
        track_id: int,
        time_us: int,
        arguments: Mapping[str, int | str],
        **more: int | str,
    ) -> None:
        record = {"ph": phase, "name": name, "pid": PROCESS_ID, "tid": track_id, "ts": time_us}
        self.records.append(record | {"args": dict(arguments)} | more)


_INSTANTS = {
    EventKind.NEW_TOKEN: "token",
    EventKind.PREFIX_HIT: "prefix hit",
    EventKind.FORKED: "forked",
    EventKind.BLOCK_COPIED: "block copied",
    EventKind.BLOCK_EVICTED: "block evicted",
    EventKind.FINISHED: "finished",
    EventKind.ABORTED: "aborted",
    EventKind.FAILED: "failed",
}
_STARTS_RUNNING = {EventKind.SCHEDULED, EventKind.FORKED}
_STOPS_RUNNING = {EventKind.PREEMPTED, EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED}
_BLOCK_OWNED = {
    *(EventKind.BLOCK_ALLOCATED, EventKind.BLOCK_COPIED, EventKind.BLOCK_SHARED),
    *(EventKind.BLOCK_CACHED, EventKind.BLOCK_DEDUPLICATED),
}
_BLOCK_FREE = {EventKind.BLOCK_FREED, EventKind.BLOCK_EVICTED}


def write_chrome_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write the events to a file that ui.perfetto.dev and chrome://tracing can open."""
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump(chrome_trace(events), file, separators=(",", ":"))


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Convert events to one object of the Trace Event Format, in order of time, ready for JSON.

    Times are whole microseconds since the first event. Slices of one track do not overlap. A slice
    that has not ended lasts until the last event.
    """
    timeline = _Timeline()
    for event in events:
        timeline.on_event(event)
    timeline.finish()
    return timeline.drawn.as_object()


@dataclass(eq=False)
class _Track:
    """One request's track; `activity` is the name of its open slice, which began at `since_us`.

    `reached` is the most tokens of the request ever computed; it was first scheduled at
    `scheduled_us`.
    """

    track_id: int
    prompt_tokens: int = 0
    reached: int = 0
    scheduled_us: int | None = None
    activity: str | None = None
    since_us: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


class _Timeline:
    """Builds the records of a timeline, event by event."""

    def __init__(self) -> None:
        self.drawn = ChromeRecords("minigen")
        self._engine = self.drawn.add_track("engine")
        self._origin_ns: int | None = None
        self._now_us = self._step_ended_us = 0
        self._tracks: dict[int, _Track] = {}
        self._in_step: dict[_Track, None] = {}  # in the order of their chunks
        self._running: set[int | None] = set()
        self._blocks: set[int] = set()

    def on_event(self, event: Event) -> None:
        self._now_us = max(self._now_us, self._microseconds(event.time_ns))
        track_id = self._engine
        if event.kind is EventKind.STEP:
            self._end_step(event)
        elif event.sequence_id is not None:
            track = self._track_of(event, event.sequence_id)
            track_id = track.track_id
            self._update_slices(track, event)
        if event.kind in _INSTANTS:
            name = _INSTANTS[event.kind]
            self.drawn.add_instant(track_id, name, self._now_us, event.counts)
        self._count(event)

    def finish(self) -> None:
        """End all open slices."""
        for track in self._tracks.values():
            self._end(track, self._now_us)

    def _update_slices(self, track: _Track, event: Event) -> None:
        """Begin and end slices; a chunk's slice ends with its step, or when its request fails."""
        match event.kind:
            case EventKind.QUEUED:
                track.prompt_tokens = event.counts["prompt_tokens"]
                self._begin(track, "queued", self._now_us, {})
            case EventKind.SCHEDULED:
                self._compute(track, event.counts)
            case EventKind.FORKED:
                self._fork(track, event.counts["parent"])
            case EventKind.PREEMPTED:
                track.reached = max(track.reached, event.counts["computed"])
                self._begin(track, "preempted", self._now_us, event.counts)
            case EventKind.ABORTED | EventKind.FAILED:
                self._end(track, self._now_us)
            case EventKind.FINISHED if track not in self._in_step:
                self._end(track, self._now_us)

    def _compute(self, track: _Track, counts: Mapping[str, int]) -> None:
        name = "decode"
        if counts["computed"] < track.reached:
            name = "recompute"
        elif counts["computed"] < track.prompt_tokens or counts["tokens"] > 1:
            name = "prefill"
        track.reached = max(track.reached, counts["computed"] + counts["tokens"])
        if track.scheduled_us is None:
            track.scheduled_us = self._now_us
        self._begin(track, name, self._now_us, counts)
        self._in_step[track] = None

    def _fork(self, track: _Track, parent_id: int) -> None:
        """Show a forked child as prefilling while its parent computed the prompt for both."""
        parent = self._tracks.get(parent_id)
        if parent is None or parent.scheduled_us is None or track.activity is None:
            return
        track.scheduled_us = max(parent.scheduled_us, track.since_us)
        self._begin(track, f"prefill by request {parent_id}", track.scheduled_us, {})
        self._in_step[track] = None

    def _end_step(self, event: Event) -> None:
        for track in list(self._in_step):
            self._end(track, self._now_us)
        started_us = self._microseconds(event.time_ns - event.counts["duration_ns"])
        started_us = min(max(started_us, self._step_ended_us), self._now_us)
        self.drawn.add_slice(self._engine, "step", started_us, self._now_us, event.counts)
        self.drawn.set_level("tokens in batch", started_us, event.counts["tokens"])
        self.drawn.set_level("tokens in batch", self._now_us, 0)
        self._step_ended_us = self._now_us

    def _count(self, event: Event) -> None:
        """Count running sequences, and blocks that a sequence or the prefix cache owns."""
        if event.kind in _STARTS_RUNNING:
            self._running.add(event.sequence_id)
        elif event.kind in _STOPS_RUNNING:
            self._running.discard(event.sequence_id)
        elif event.kind in _BLOCK_OWNED:
            self._blocks.add(event.counts["block"])
        elif event.kind in _BLOCK_FREE:
            self._blocks.discard(event.counts["block"])
        self.drawn.set_level("running", self._now_us, len(self._running))
        self.drawn.set_level("blocks in use", self._now_us, len(self._blocks))

    def _begin(
        self, track: _Track, activity: str, since_us: int, counts: Mapping[str, int]
    ) -> None:
        """Begin a slice on a track, and end the open one."""
        self._end(track, since_us)
        track.activity, track.since_us, track.counts = activity, since_us, counts

    def _end(self, track: _Track, ended_us: int) -> None:
        if track.activity is not None:
            self.drawn.add_slice(
                track.track_id, track.activity, track.since_us, ended_us, track.counts
            )
        track.activity = None
        self._in_step.pop(track, None)

    def _track_of(self, event: Event, sequence_id: int) -> _Track:
        """Return the request's track; an id that is queued again is a new request."""
        known = self._tracks.get(sequence_id)
        if known is not None and event.kind is not EventKind.QUEUED:
            return known
        if known is not None:
            self._end(known, self._now_us)
        track = _Track(self.drawn.add_track(f"request {sequence_id}"))
        self._tracks[sequence_id] = track
        return track

    def _microseconds(self, time_ns: int) -> int:
        if self._origin_ns is None:
            self._origin_ns = time_ns
        return max(time_ns - self._origin_ns, 0) // 1000

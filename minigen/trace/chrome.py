"""Export recorded events as a timeline for ui.perfetto.dev or chrome://tracing.

It has one track per request, one track for the engine's steps, one per stage of a pipeline, and
counters of the engine's load.
Source: "Trace Event Format", the Chromium project.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from minigen.trace.events import Event
from minigen.trace.timeline import MARKS, Request, State, Timeline

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


def write_chrome_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write the events to a file that ui.perfetto.dev and chrome://tracing can open."""
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump(chrome_trace(events), file, separators=(",", ":"))


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Convert events to one object of the Trace Event Format, in order of time, ready for JSON.

    Times are whole microseconds since the first event. Slices of one track do not overlap. A slice
    that has not ended lasts until the last event.
    """
    drawing = _Drawing()
    for event in events:
        drawing.draw(event)
    return drawing.finished()


@dataclass(eq=False)
class _Track:
    """One request's track; `activity` is the name of its open slice, which began at `since_us`."""

    track_id: int
    activity: str | None = None
    since_us: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


class _Drawing:
    """Draws slices when a timeline changes, moments for its marks, and the levels it has."""

    def __init__(self) -> None:
        self.drawn = ChromeRecords("minigen")
        self._engine = self.drawn.add_track("engine")
        self._origin_ns: int | None = None
        self._now_us = self._first_chunk_us = self._step_ended_us = 0
        self._tracks: dict[int | None, _Track] = {}
        self._in_step: dict[_Track, None] = {}  # in the order of their chunks
        self._stages: dict[int, int] = {}  # their tracks
        self._timeline = Timeline(
            on_request=self._add_track,
            on_chunk=self._compute,
            on_fork=self._fork,
            on_preempted=self._preempt,
            on_end=self._end_request,
            on_step=self._end_step,
            on_micro_batch=self._add_micro_batch,
        )

    def draw(self, event: Event) -> None:
        self._now_us = max(self._now_us, self._microseconds(event.time_ns))
        self._timeline(event)
        name = MARKS.get(event.kind)
        if name is not None and name != "preempted":  # which is a slice
            track = self._tracks.get(event.sequence_id)
            track_id = self._engine if track is None else track.track_id
            self.drawn.add_instant(track_id, name, self._now_us, event.counts)
        self.drawn.set_level("running", self._now_us, len(self._timeline.running))
        self.drawn.set_level("blocks in use", self._now_us, len(self._timeline.blocks))

    def finished(self) -> Record:
        """End all open slices, and return all records."""
        for track in self._tracks.values():
            self._end(track, self._now_us)
        return self.drawn.as_object()

    def _add_track(self, request: Request) -> None:
        """Begin a track; an id that is queued again is a new request."""
        known = self._tracks.get(request.sequence_id)
        if known is not None:
            self._end(known, self._now_us)
        track = _Track(self.drawn.add_track(f"request {request.sequence_id}"))
        self._tracks[request.sequence_id] = track
        if request.queued_ns is not None:
            self._begin(track, "queued", self._now_us, {})

    def _compute(self, request: Request, event: Event) -> None:
        """Begin a chunk's slice, which ends with its step, or when its request fails."""
        name = "decode"
        if request.chunk_recomputed:
            name = "recompute"
        elif request.prompt_tokens is None:  # its arrival is not in the events
            name = "prefill" if event.counts["tokens"] > 1 else "decode"
        elif event.counts["computed"] < request.prompt_tokens:
            name = "prefill"
        track = self._tracks[request.sequence_id]
        if not self._in_step:
            self._first_chunk_us = self._now_us
        self._begin(track, name, self._now_us, event.counts)
        self._in_step[track] = None

    def _fork(self, request: Request, event: Event) -> None:
        """Show a forked child as prefilling while its parent computed the prompt for both."""
        track = self._tracks[request.sequence_id]
        if request.scheduled_ns is None or track.activity is None:
            return
        since_us = max(self._microseconds(request.scheduled_ns), track.since_us)
        self._begin(track, f"prefill by request {request.parent}", since_us, {})
        self._in_step[track] = None

    def _preempt(self, request: Request, event: Event) -> None:
        self._begin(self._tracks[request.sequence_id], "preempted", self._now_us, event.counts)

    def _end_request(self, request: Request, event: Event) -> None:
        track = self._tracks[request.sequence_id]
        if request.state is not State.FINISHED or track not in self._in_step:
            self._end(track, self._now_us)

    def _end_step(self, event: Event) -> None:
        for track in list(self._in_step):
            self._end(track, self._now_us)
        # A duration is measured before its event's time, so the difference may be too late.
        started_us = self._microseconds(event.time_ns - event.counts["duration_ns"])
        started_us = max(min(started_us, self._first_chunk_us), self._step_ended_us)
        self.drawn.add_slice(self._engine, "step", started_us, self._now_us, event.counts)
        self.drawn.set_level("tokens in batch", started_us, event.counts["tokens"])
        self.drawn.set_level("tokens in batch", self._now_us, 0)
        self._step_ended_us = self._now_us

    def _add_micro_batch(self, event: Event) -> None:
        """Add a slice to the track of its stage, where the stage was idle between two slices."""
        stage, started_ns = event.counts["stage"], event.counts["started_ns"]
        if stage not in self._stages:
            self._stages[stage] = self.drawn.add_track(f"stage {stage}")
        started_us = self._microseconds(started_ns)
        ended_us = self._microseconds(started_ns + event.counts["duration_ns"])
        name = f"micro-batch {event.counts['micro_batch']}"
        self.drawn.add_slice(self._stages[stage], name, started_us, ended_us, event.counts)

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

    def _microseconds(self, time_ns: int) -> int:
        if self._origin_ns is None:
            self._origin_ns = time_ns
        return max(time_ns - self._origin_ns, 0) // 1000

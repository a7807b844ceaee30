"""Tracks, slices, instants and curves in the Trace Event Format, all in one process.

Source: "Trace Event Format", the Chromium project, as Perfetto and chrome://tracing read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Record = dict[str, Any]

PROCESS_ID = 1
FIRST_TRACK = 1  # 0 is the idle thread to Perfetto


@dataclass
class ChromeRecords:
    """What is to be drawn; times are whole microseconds, so that ends and begins fit exactly."""

    process: str
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._levels: dict[str, int] = {}
        self._track_ids = count(FIRST_TRACK)
        self._add("M", "process_name", FIRST_TRACK, 0, {"name": self.process})

    def add_track(self, name: str) -> int:
        """A new line below all others; returns its id."""
        track_id = next(self._track_ids)
        self._add("M", "thread_name", track_id, 0, {"name": name})
        self._add("M", "thread_sort_index", track_id, 0, {"sort_index": track_id})
        return track_id

    def add_slice(
        self, track_id: int, name: str, begun_us: int, ended_us: int, counts: Mapping[str, int]
    ) -> None:
        """Something that lasted."""
        self._add("X", name, track_id, begun_us, counts, dur=ended_us - begun_us)

    def add_instant(
        self, track_id: int, name: str, time_us: int, counts: Mapping[str, int]
    ) -> None:
        """Something that happened on this track at once."""
        self._add("i", name, track_id, time_us, counts, s="t")

    def set_level(self, name: str, time_us: int, value: int) -> None:
        """The curve `name` has this value from now on; told again, it takes no room."""
        if self._levels.get(name) != value:
            self._levels[name] = value
            self._add("C", name, FIRST_TRACK, time_us, {name: value})

    def as_object(self) -> Record:
        """All of it in order of time, ready for JSON."""
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

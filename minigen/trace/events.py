"""What happens inside the engine, told as typed events to whoever subscribes.

With nobody subscribed an event costs one branch: every caller asks `if trace.active:` first.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class EventKind(Enum):
    """What happened; the comment names the counts that an event of this kind carries."""

    QUEUED = "queued"  # prompt_tokens, waited_ns (for the engine to take it, since its arrival)
    SCHEDULED = "scheduled"  # tokens, computed (tokens in the cache before this step)
    PREFIX_HIT = "prefix_hit"  # tokens, blocks
    BLOCK_ALLOCATED = "block_allocated"  # block
    BLOCK_SHARED = "block_shared"  # block (known beginning, or of a parent: one owner more)
    BLOCK_COPIED = "block_copied"  # source (no longer the sequence's), block (its own instead)
    BLOCK_CACHED = "block_cached"  # block (from now on found by whoever begins alike)
    BLOCK_DEDUPLICATED = (
        "block_deduplicated"  # source (the sequence's own), block (the one kept before)
    )
    BLOCK_FREED = "block_freed"  # block (nobody's any more)
    BLOCK_EVICTED = "block_evicted"  # block (kept for nobody, and now free)
    FORKED = "forked"  # parent, blocks
    PREEMPTED = "preempted"  # computed (tokens, given up)
    NEW_TOKEN = "new_token"  # token
    FINISHED = "finished"  # output_tokens, stopped (1 by a stop token or string, 0 at its limit)
    ABORTED = "aborted"  # output_tokens
    FAILED = "failed"  # output_tokens (a step raised an error)
    STEP = "step"  # sequences, tokens, duration_ns
    ALL_REDUCED = "all_reduced"  # bytes (that each rank put in), duration_ns
    ALL_GATHERED = "all_gathered"  # bytes, duration_ns
    BROADCAST = "broadcast"  # bytes, duration_ns


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `time_ns` is from `time.perf_counter_ns`.

    `sequence_id` is None for what belongs to no sequence; `counts` are as its kind says.
    """

    kind: EventKind
    time_ns: int
    sequence_id: int | None
    counts: Mapping[str, int]


Subscriber = Callable[[Event], None]


@dataclass
class Trace:
    """Hands events to subscribers, in the order in which they subscribed."""

    active: bool = False
    _subscribers: list[Subscriber] = field(default_factory=list)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with every event from now on."""
        self._subscribers.append(subscriber)
        self.active = True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` no more."""
        self._subscribers.remove(subscriber)
        self.active = bool(self._subscribers)

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Generator[None, None, None]:
        """Call `subscriber` with every event while the block runs."""
        self.subscribe(subscriber)
        try:
            yield
        finally:
            self.unsubscribe(subscriber)

    def emit(self, kind: EventKind, sequence_id: int | None = None, **counts: int) -> None:
        """Tell all subscribers that something happened just now."""
        event = Event(kind, time.perf_counter_ns(), sequence_id, counts)
        for subscriber in self._subscribers:
            subscriber(event)


@dataclass(eq=False)
class Recorder:
    """Keeps the last `capacity` events; subscribe it to a trace."""

    capacity: int = 1_000_000
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=self.capacity)

    def __call__(self, event: Event) -> None:
        self.num_dropped += len(self._events) == self.capacity
        self._events.append(event)

    @property
    def events(self) -> list[Event]:
        """What is kept, oldest first."""
        return list(self._events)

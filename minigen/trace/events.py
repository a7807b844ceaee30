"""Typed events about the engine's work, emitted to subscribers.

Without a subscriber an event costs one branch, because each caller checks `if trace.active:` first.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class EventKind(Enum):
    """The kind of an event; the comment lists the counts that such an event has."""

    QUEUED = "queued"  # prompt_tokens, waited_ns (from its arrival until it was added)
    SCHEDULED = "scheduled"  # tokens, computed (tokens in the cache before this step)
    PREFIX_HIT = "prefix_hit"  # tokens, blocks
    BLOCK_ALLOCATED = "block_allocated"  # block
    BLOCK_SHARED = "block_shared"  # block (of a cached prefix, or of a parent)
    BLOCK_COPIED = "block_copied"  # source (the shared block), block (the sequence's own copy)
    BLOCK_CACHED = "block_cached"  # block (stored in the prefix cache)
    # source (the sequence's own block), block (the equal one that was cached before)
    BLOCK_DEDUPLICATED = "block_deduplicated"
    BLOCK_FREED = "block_freed"  # block (without an owner now)
    BLOCK_EVICTED = "block_evicted"  # block (unused in the prefix cache, and free now)
    FORKED = "forked"  # parent, blocks
    PREEMPTED = "preempted"  # computed (tokens that were computed and are lost)
    NEW_TOKEN = "new_token"  # token
    VERIFIED = "verified"  # drafted, accepted (tokens of this step's speculation)
    FINISHED = "finished"  # output_tokens, stopped (1 by a stop token or string, 0 at its limit)
    ABORTED = "aborted"  # output_tokens
    FAILED = "failed"  # output_tokens (a step raised an error)
    STEP = "step"  # sequences, tokens, duration_ns
    ALL_REDUCED = "all_reduced"  # bytes (of each rank's input), duration_ns
    ALL_GATHERED = "all_gathered"  # bytes, duration_ns
    BROADCAST = "broadcast"  # bytes, duration_ns
    SHIFTED = "shifted"  # bytes, duration_ns
    SENT = "sent"  # bytes, duration_ns (to one other rank)
    RECEIVED = "received"  # bytes, duration_ns (the wait for the other rank, too)
    # stage, micro_batch, sequences, tokens, started_ns (as time_ns), duration_ns
    MICRO_BATCH = "micro_batch"

    __hash__ = object.__hash__  # members are unique, and Enum's own hash is a call in Python


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `time_ns` is from `time.perf_counter_ns`.

    `sequence_id` is None if the event belongs to no sequence; `EventKind` documents the `counts`.
    """

    kind: EventKind
    time_ns: int
    sequence_id: int | None
    counts: Mapping[str, int]


Subscriber = Callable[[Event], None]


@dataclass
class Trace:
    """Emits events to subscribers, in the order in which they subscribed."""

    active: bool = False
    _subscribers: list[Subscriber] = field(default_factory=list)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with every event from now on."""
        self._subscribers.append(subscriber)
        self.active = True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling `subscriber`."""
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
        """Send an event with the current time to all subscribers."""
        event = Event(kind, time.perf_counter_ns(), sequence_id, counts)
        for subscriber in self._subscribers:
            subscriber(event)


@dataclass(eq=False)
class Recorder:
    """Records the last `capacity` events; subscribe it to a trace.

    `num_dropped` counts the older events that it has dropped.
    """

    capacity: int = 1_000_000
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=self.capacity)

    def __call__(self, event: Event) -> None:
        self.num_dropped += len(self._events) == self.capacity
        self._events.append(event)

    @property
    def events(self) -> list[Event]:
        """The recorded events, oldest first."""
        return list(self._events)

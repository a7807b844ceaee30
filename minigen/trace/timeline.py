"""The one fold over the trace: it turns events into requests, steps and blocks.

Every summary, metric and picture is a view of a `Timeline`, so a new kind of event is handled here
and nowhere else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import assert_never

from minigen.trace.counters import WorkCounters
from minigen.trace.events import Event, EventKind

# The moments that pictures show, in words.
MARKS = {
    EventKind.NEW_TOKEN: "token",
    EventKind.PREFIX_HIT: "prefix hit",
    EventKind.FORKED: "forked",
    EventKind.PREEMPTED: "preempted",
    EventKind.BLOCK_COPIED: "block copied",
    EventKind.BLOCK_EVICTED: "block evicted",
    EventKind.FINISHED: "finished",
    EventKind.ABORTED: "aborted",
    EventKind.FAILED: "failed",
}


class State(Enum):
    """The state of a request; the last three are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


ENDS = (State.FINISHED, State.ABORTED, State.FAILED)


@dataclass(eq=False, slots=True)
class Request:
    """The life of one request so far, of which only counts and a few times are kept.

    Times are in nanoseconds. A time is None before its moment, and `queued_ns`, `arrived_ns` and
    `prompt_tokens` are None if the request was queued before the first event. A fork was first
    scheduled when its `parent` was. `gap_ns` is the time between its last two tokens.

    `num_computed` are the tokens in its blocks, with those of the current step, and `reached` the
    most that it, or its parent for it, ever computed. `chunk_recomputed` are the tokens of its last
    chunk that had been computed before a preemption, and `recomputed_tokens` those of all chunks.
    `table` has the ids of its blocks, in order.
    """

    sequence_id: int
    state: State = State.QUEUED
    prompt_tokens: int | None = None
    parent: int | None = None
    arrived_ns: int | None = None
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    gap_ns: int | None = None
    output_tokens: int = 0
    num_steps: int = 0
    num_computed: int = 0
    reached: int | None = None
    prefix_hit_tokens: int = 0
    chunk_recomputed: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    blocks_allocated: int = 0
    blocks_shared: int = 0
    blocks_copied: int = 0
    table: list[int] = field(default_factory=list)


Hook = Callable[[Request, Event], None]
EngineHook = Callable[[Event], None]


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(eq=False)
class Timeline:
    """Follows an engine by its events: subscribe it to a trace, or `replay` recorded ones.

    `requests` are the unfinished requests by id, `strangers` those whose arrival is not in the
    events, and `running` those of both that run. `rows` has the requests that own blocks, in the
    order of their first one, each with a small number that no other has at the same time. `blocks`
    are the ids of the blocks in use, and `cached` those in the prefix cache. Ended requests are
    dropped, so the state is as large as the engine's own, and an event costs the same however many
    requests there are.

    A view passes functions; each is called when the state has changed. `on_request` gets a new
    request, the functions of type `Hook` the request and the event. Totals are added to `work`.
    """

    work: WorkCounters = field(default_factory=WorkCounters)
    on_request: Callable[[Request], None] = _ignore
    on_chunk: Hook = _ignore
    on_fork: Hook = _ignore
    on_token: Hook = _ignore
    on_preempted: Hook = _ignore
    on_end: Hook = _ignore
    on_cached: Hook = _ignore
    on_evicted: Callable[[Event], None] = _ignore
    on_step: Callable[[Event], None] = _ignore
    on_message: Callable[[Event], None] = _ignore

    def __post_init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.strangers: dict[int, Request] = {}
        self.running: set[Request] = set()
        self.rows: dict[Request, int] = {}
        self.blocks: set[int] = set()
        self.cached: set[int] = set()
        self._free_rows: list[int] = []  # a heap

    def replay(self, events: Iterable[Event]) -> "Timeline":
        """Apply recorded events, oldest first, and return the timeline."""
        for event in events:
            self(event)
        return self

    def __call__(self, event: Event) -> None:
        """Apply the next event; one of a request that names no request changes nothing."""
        kind, counts, request = event.kind, event.counts, self._request_of(event)
        match kind:
            case EventKind.STEP:
                self.work.steps += 1
                self.on_step(event)
            case EventKind.ALL_REDUCED | EventKind.ALL_GATHERED | EventKind.BROADCAST:
                self.on_message(event)
            case EventKind.BLOCK_EVICTED:
                self._evict(event)
            case _ if request is None:
                pass
            case EventKind.NEW_TOKEN:
                self._add_token(request, event)
            case EventKind.SCHEDULED:
                self._schedule(request, event)
            case EventKind.QUEUED:
                pass  # a new request
            case EventKind.BLOCK_ALLOCATED:
                self.work.blocks_allocated += 1
                request.blocks_allocated += 1
                self._extend(request, counts["block"])
            case EventKind.BLOCK_SHARED:
                self._share(request, counts["block"])
            case EventKind.BLOCK_COPIED:
                self.work.blocks_copied += 1
                request.blocks_copied += 1
                self._replace(request, counts["source"], counts["block"])
            case EventKind.BLOCK_DEDUPLICATED:
                self._replace(request, counts["source"], counts["block"])
            case EventKind.BLOCK_CACHED:
                self.blocks.add(counts["block"])
                self.cached.add(counts["block"])
                self.on_cached(request, event)
            case EventKind.BLOCK_FREED:
                self.blocks.discard(counts["block"])
            case EventKind.PREFIX_HIT:
                self.work.tokens_cached += counts["tokens"]
                request.prefix_hit_tokens += counts["tokens"]
            case EventKind.FORKED:
                self._fork(request, event)
            case EventKind.PREEMPTED:
                self._preempt(request, event)
            case EventKind.FINISHED | EventKind.ABORTED | EventKind.FAILED:
                self._end(request, event)
            case _:
                assert_never(kind)

    def _request_of(self, event: Event) -> Request | None:
        """Return the request of an event; an id that is queued again is a new request."""
        sequence_id = event.sequence_id
        if sequence_id is None:
            return None
        known = self._find(sequence_id)
        if event.kind is EventKind.QUEUED:
            if known is not None:
                self._drop(known)
            return self._queue(sequence_id, event)
        if known is None:
            known = self.strangers[sequence_id] = Request(sequence_id)
            self.on_request(known)
        return known

    def _find(self, sequence_id: int) -> Request | None:
        return self.requests.get(sequence_id) or self.strangers.get(sequence_id)

    def _queue(self, sequence_id: int, event: Event) -> Request:
        made = self.requests[sequence_id] = Request(
            sequence_id,
            prompt_tokens=event.counts["prompt_tokens"],
            arrived_ns=event.time_ns - event.counts["waited_ns"],
            queued_ns=event.time_ns,
            reached=0,
        )
        self.on_request(made)
        return made

    def _schedule(self, request: Request, event: Event) -> None:
        computed, tokens = event.counts["computed"], event.counts["tokens"]
        end = computed + tokens
        reached = computed if request.reached is None else request.reached
        recomputed = max(min(reached, end) - computed, 0)
        self.work.count_chunk(request.prompt_tokens, computed, tokens, recomputed)
        request.num_steps += 1
        request.num_computed, request.reached = end, max(reached, end)
        request.chunk_recomputed = recomputed
        request.recomputed_tokens += recomputed
        self._run(request, event.time_ns)
        self.on_chunk(request, event)

    def _run(self, request: Request, scheduled_ns: int | None) -> None:
        """Set a request running; if it has a token, its first chunk was before the first event."""
        if request.scheduled_ns is None and request.first_token_ns is None:
            request.scheduled_ns = scheduled_ns
        request.state = State.RUNNING
        self.running.add(request)

    def _fork(self, request: Request, event: Event) -> None:
        """Count the parent's prefill as the child's own, from when both were queued."""
        request.parent = event.counts["parent"]
        parent, scheduled_ns, shared = self._find(request.parent), None, 0
        if parent is not None:
            shared, request.num_computed = parent.reached or 0, parent.num_computed
            if parent.scheduled_ns is not None:
                scheduled_ns = max(parent.scheduled_ns, request.queued_ns or 0)
        self.work.tokens_shared += shared
        request.reached = max(request.reached or 0, shared)
        self._run(request, scheduled_ns)
        self.on_fork(request, event)

    def _add_token(self, request: Request, event: Event) -> None:
        last_ns = request.last_token_ns
        if last_ns is None:
            request.first_token_ns = event.time_ns
        else:
            request.gap_ns = event.time_ns - last_ns
        request.last_token_ns = event.time_ns
        request.output_tokens += 1
        self.on_token(request, event)

    def _preempt(self, request: Request, event: Event) -> None:
        self.work.preemptions += 1
        request.preemptions += 1
        request.reached = max(request.reached or 0, event.counts["computed"])
        request.state = State.PREEMPTED
        self._release(request)
        self.on_preempted(request, event)

    def _end(self, request: Request, event: Event) -> None:
        request.output_tokens = event.counts["output_tokens"]
        request.state = State(event.kind.value)
        self._drop(request)
        self.on_end(request, event)

    def _drop(self, request: Request) -> None:
        self._release(request)
        known = self.strangers if request.queued_ns is None else self.requests
        del known[request.sequence_id]

    def _release(self, request: Request) -> None:
        """Take a request out of the running ones, and its blocks from it."""
        request.table.clear()
        request.num_computed = 0
        self.running.discard(request)
        row = self.rows.pop(request, None)
        if row is not None:
            heappush(self._free_rows, row)

    def _extend(self, request: Request, block_id: int) -> None:
        if request not in self.rows:
            free = self._free_rows
            self.rows[request] = heappop(free) if free else len(self.rows)
        request.table.append(block_id)
        self.blocks.add(block_id)

    def _share(self, request: Request, block_id: int) -> None:
        """Add a block of the parent, or one that was found in the prefix cache before it runs."""
        self.work.blocks_shared += 1
        request.blocks_shared += 1
        self._extend(request, block_id)
        if request not in self.running:
            self.cached.add(block_id)

    def _replace(self, request: Request, source: int, block_id: int) -> None:
        """Replace a block by an equal one; it is searched from the end, where new blocks are."""
        self.blocks.add(block_id)
        for index in reversed(range(len(request.table))):
            if request.table[index] == source:
                request.table[index] = block_id
                return

    def _evict(self, event: Event) -> None:
        self.work.blocks_evicted += 1
        self.blocks.discard(event.counts["block"])
        self.cached.discard(event.counts["block"])
        self.on_evicted(event)

"""The one fold over the trace: it turns events into requests, steps and blocks.

Every summary, metric and picture is a view of a `Timeline`, so a new kind of event is handled here
and nowhere else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

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
_ENDED = (EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED)
_MESSAGES = (
    *(EventKind.ALL_REDUCED, EventKind.ALL_GATHERED, EventKind.BROADCAST),
    *(EventKind.SHIFTED, EventKind.SENT, EventKind.RECEIVED),
)


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

    A view passes functions; each is called when the state has changed. `on_running` gets a request
    that starts to run, also after a preemption, and `on_chunk` each of its chunks. Totals are added
    to `work`. With `times_only`, tokens and blocks are not followed, only states, times and output
    tokens, at the least cost per event.
    """

    work: WorkCounters = field(default_factory=WorkCounters)
    times_only: bool = False
    on_request: Callable[[Request], None] = _ignore
    on_running: Hook = _ignore
    on_chunk: Hook = _ignore
    on_fork: Hook = _ignore
    on_token: Hook = _ignore
    on_preempted: Hook = _ignore
    on_end: Hook = _ignore
    on_cached: Hook = _ignore
    on_evicted: EngineHook = _ignore
    on_step: EngineHook = _ignore
    on_verified: Hook = _ignore
    on_message: EngineHook = _ignore
    on_micro_batch: EngineHook = _ignore

    def __post_init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.strangers: dict[int, Request] = {}
        self.running: set[Request] = set()
        self.rows: dict[Request, int] = {}
        self.blocks: set[int] = set()
        self.cached: set[int] = set()
        self._free_rows: list[int] = []  # a heap
        self._of_engine: dict[EventKind, EngineHook] = {
            EventKind.STEP: self._step,
            EventKind.QUEUED: self._queue,
            **dict.fromkeys(_MESSAGES, self.on_message),
            EventKind.MICRO_BATCH: self.on_micro_batch,
        }
        self._of_request: dict[EventKind, Hook] = {
            EventKind.SCHEDULED: self._run if self.times_only else self._schedule,
            EventKind.FORKED: self._fork,
            EventKind.NEW_TOKEN: self._add_token,
            EventKind.VERIFIED: self._verify,
            EventKind.PREEMPTED: self._preempt,
            **dict.fromkeys(_ENDED, self._end),
        }
        of_blocks: dict[EventKind, Hook] = {
            EventKind.PREFIX_HIT: self._hit,
            EventKind.BLOCK_ALLOCATED: self._allocate,
            EventKind.BLOCK_SHARED: self._share,
            EventKind.BLOCK_COPIED: self._copy,
            EventKind.BLOCK_CACHED: self._cache,
            EventKind.BLOCK_DEDUPLICATED: self._replace,
            EventKind.BLOCK_FREED: self._free,
        }
        if self.times_only:
            self._of_engine |= dict.fromkeys((*of_blocks, EventKind.BLOCK_EVICTED), _ignore)
        else:
            self._of_engine[EventKind.BLOCK_EVICTED] = self._evict
            self._of_request |= of_blocks

    def replay(self, events: Iterable[Event]) -> "Timeline":
        """Apply recorded events, oldest first, and return the timeline."""
        for event in events:
            self(event)
        return self

    def __call__(self, event: Event) -> None:
        """Apply the next event; ignore a request's event without the id of the request."""
        apply, sequence_id = self._of_request.get(event.kind), event.sequence_id
        if apply is None:
            self._of_engine[event.kind](event)
        elif sequence_id is not None:
            apply(self.requests.get(sequence_id) or self._stranger(sequence_id), event)

    def _stranger(self, sequence_id: int) -> Request:
        if sequence_id not in self.strangers:
            self.strangers[sequence_id] = Request(sequence_id)
            self.on_request(self.strangers[sequence_id])
        return self.strangers[sequence_id]

    def _queue(self, event: Event) -> None:
        """Add a request; an id that is queued again is a new request."""
        if event.sequence_id is None:
            return
        known = self._find(event.sequence_id)
        if known is not None:
            self._drop(known)
        made = self.requests[event.sequence_id] = Request(
            event.sequence_id,
            prompt_tokens=event.counts["prompt_tokens"],
            arrived_ns=event.time_ns - event.counts["waited_ns"],
            queued_ns=event.time_ns,
            reached=0,
        )
        self.on_request(made)

    def _find(self, sequence_id: int) -> Request | None:
        return self.requests.get(sequence_id) or self.strangers.get(sequence_id)

    def _step(self, event: Event) -> None:
        self.work.steps += 1
        self.on_step(event)

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
        self._run(request, event)
        self.on_chunk(request, event)

    def _run(self, request: Request, event: Event) -> None:
        if request.state is not State.RUNNING:
            self._set_running(request, event.time_ns)
            self.on_running(request, event)

    def _set_running(self, request: Request, scheduled_ns: int | None) -> None:
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
        self._set_running(request, scheduled_ns)
        self.on_fork(request, event)

    def _add_token(self, request: Request, event: Event) -> None:
        time_ns, last_ns = event.time_ns, request.last_token_ns
        if last_ns is None:
            request.first_token_ns = time_ns
        else:
            request.gap_ns = time_ns - last_ns
        request.last_token_ns = time_ns
        request.output_tokens += 1
        self.on_token(request, event)

    def _verify(self, request: Request, event: Event) -> None:
        """Count drafts; what was computed for wrong ones is not among the request's tokens."""
        drafted, accepted = event.counts["drafted"], event.counts["accepted"]
        self.work.drafts += 1
        self.work.tokens_drafted += drafted
        self.work.tokens_accepted += accepted
        if not self.times_only:
            request.num_computed = max(request.num_computed - drafted + accepted, 0)
            request.reached = request.num_computed
        self.on_verified(request, event)

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

    def _hit(self, request: Request, event: Event) -> None:
        self.work.tokens_cached += event.counts["tokens"]
        request.prefix_hit_tokens += event.counts["tokens"]

    def _allocate(self, request: Request, event: Event) -> None:
        self.work.blocks_allocated += 1
        request.blocks_allocated += 1
        self._extend(request, event.counts["block"])

    def _share(self, request: Request, event: Event) -> None:
        """Add a block of the parent, or one that was found in the prefix cache before it runs."""
        self.work.blocks_shared += 1
        request.blocks_shared += 1
        self._extend(request, event.counts["block"])
        if request.state is not State.RUNNING:
            self.cached.add(event.counts["block"])

    def _extend(self, request: Request, block_id: int) -> None:
        if request not in self.rows:
            free = self._free_rows
            self.rows[request] = heappop(free) if free else len(self.rows)
        request.table.append(block_id)
        self.blocks.add(block_id)

    def _copy(self, request: Request, event: Event) -> None:
        self.work.blocks_copied += 1
        request.blocks_copied += 1
        self._replace(request, event)

    def _replace(self, request: Request, event: Event) -> None:
        """Replace a block by an equal one; it is searched from the end, where new blocks are."""
        self.blocks.add(event.counts["block"])
        for index in reversed(range(len(request.table))):
            if request.table[index] == event.counts["source"]:
                request.table[index] = event.counts["block"]
                return

    def _cache(self, request: Request, event: Event) -> None:
        self.blocks.add(event.counts["block"])
        self.cached.add(event.counts["block"])
        self.on_cached(request, event)

    def _free(self, request: Request, event: Event) -> None:
        self.blocks.discard(event.counts["block"])

    def _evict(self, event: Event) -> None:
        self.work.blocks_evicted += 1
        self.blocks.discard(event.counts["block"])
        self.cached.discard(event.counts["block"])
        self.on_evicted(event)

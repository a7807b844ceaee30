"""What an engine's events tell, step by step: who waited, who ran, which tokens, which blocks.

Pictures of time and of single steps are drawn from this.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from minigen.trace import Event, EventKind

QUEUED, PREFILL, DECODE, PREEMPTED, PAUSED = "queued", "prefill", "decode", "preempted", "paused"
_ENDS = (EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED)


@dataclass(frozen=True)
class Part:
    """What a step computes of one request: tokens from position `first` to before `end`.

    `kind` is `PREFILL` (a chunk of a prompt, or of what is computed again) or `DECODE`; `gives`
    says whether it leads to a token. `blocks` are the ids of the request's blocks, in order.
    """

    request: int
    kind: str
    first: int
    end: int
    gives: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StepSeen:
    """A step: when it began and ended, in nanoseconds, what it was made of, and who stood by.

    `others` says what those do who have arrived and are not in it: `QUEUED`, `PREEMPTED`, or
    `PAUSED`, who hold blocks and got no tokens. `num_blocks` are held by requests in this step.
    """

    begun_ns: int
    ended_ns: int
    parts: tuple[Part, ...]
    others: dict[int, str]
    num_blocks: int

    @property
    def num_prefill(self) -> int:
        """Tokens of prompts."""
        return sum(part.end - part.first for part in self.parts if part.kind == PREFILL)

    @property
    def num_decode(self) -> int:
        """Sequences that get one token further."""
        return sum(part.end - part.first for part in self.parts if part.kind == DECODE)


@dataclass
class _Request:
    """A request so far."""

    num_tokens: int
    state: str = QUEUED
    table: list[int] = field(default_factory=list)


@dataclass
class Story:
    """All that happened: requests in the order of their arrival, and steps in theirs.

    `arrived` is the number of steps that had begun, and when; `ended` likewise, for those who have.
    """

    requests: list[int] = field(default_factory=list)
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)


def story(events: Iterable[Event]) -> Story:
    """Read events, oldest first. Requests whose arrival they do not tell of are left out."""
    reader = _Reader()
    for event in events:
        reader.hear(event)
    return reader.told


class _Reader:
    """Takes events in, and keeps what is needed to tell of the next step."""

    def __init__(self) -> None:
        self.told = Story()
        self._live: dict[int, _Request] = {}
        self._parts: list[Part] = []
        self._begun_ns = 0

    def hear(self, event: Event) -> None:
        """Take in the next event."""
        if event.kind is EventKind.STEP:
            self._end_step(event)
        elif event.sequence_id is None:
            return
        elif event.kind is EventKind.QUEUED:
            self._live[event.sequence_id] = _Request(event.counts["prompt_tokens"])
            self.told.requests.append(event.sequence_id)
            self.told.arrived[event.sequence_id] = (len(self.told), event.time_ns)
        elif event.sequence_id in self._live:
            self._go_on(event, event.sequence_id, self._live[event.sequence_id])

    def _go_on(self, event: Event, number: int, request: _Request) -> None:
        table, counts = request.table, event.counts
        if event.kind in (EventKind.BLOCK_ALLOCATED, EventKind.BLOCK_SHARED):
            table.append(counts["block"])
        elif event.kind in (EventKind.BLOCK_COPIED, EventKind.BLOCK_EXCHANGED):
            table[table.index(counts["source"])] = counts["block"]
        elif event.kind is EventKind.FORKED:
            request.state = PAUSED
        elif event.kind is EventKind.PREEMPTED:
            request.state = PREEMPTED
            table.clear()
        elif event.kind is EventKind.SCHEDULED:
            self._begin_part(event, number, request)
        elif event.kind is EventKind.NEW_TOKEN:
            request.num_tokens += 1
        elif event.kind in _ENDS:
            self.told.ended[number] = (len(self.told), event.time_ns)
            del self._live[number]

    def _begin_part(self, event: Event, number: int, request: _Request) -> None:
        if not self._parts:
            self._begun_ns = event.time_ns
        first = event.counts["computed"]
        end = first + event.counts["tokens"]
        gives = end == request.num_tokens
        kind = DECODE if gives and end - first == 1 and first > 0 else PREFILL
        request.state = PAUSED
        self._parts.append(Part(number, kind, first, end, gives, tuple(request.table)))

    def _end_step(self, event: Event) -> None:
        held = {block for part in self._parts for block in part.blocks}
        in_it = {part.request for part in self._parts}
        others = {}
        for number, request in self._live.items():
            held.update(request.table)
            if number not in in_it:
                others[number] = request.state
        self.told.steps.append(
            StepSeen(self._begun_ns, event.time_ns, tuple(self._parts), others, len(held))
        )
        self._parts = []

"""What a pool of blocks holds, step by step, told by an engine's events alone.

Record from the engine's start: of sequences that began before, nothing is known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from minigen.trace import Event, EventKind

ENDED = (EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED, EventKind.PREEMPTED)
NEWS = (*ENDED, EventKind.FORKED, EventKind.BLOCK_COPIED, EventKind.PREFIX_HIT)


@dataclass(frozen=True)
class PoolState:
    """The pool at the end of a step.

    `tables` are the blocks of each sequence in order, `held` the tokens in them, `lanes` a small
    number for each that no other has at the same time. `kept` are blocks of the prefix cache,
    whoever else owns them. `news` are the events of this step that change who owns what.
    """

    tables: Mapping[int, tuple[int, ...]]
    held: Mapping[int, int]
    lanes: Mapping[int, int]
    kept: frozenset[int]
    news: tuple[Event, ...]

    def owners(self, block_id: int) -> list[int]:
        """The sequences that own a block, in the order in which they came."""
        return [each for each, table in self.tables.items() if block_id in table]

    def fills(self, block_size: int) -> dict[int, int]:
        """Tokens in each block that a sequence owns; shared blocks once."""
        found: dict[int, int] = {}
        for sequence_id, table in self.tables.items():
            for index, block_id in enumerate(table):
                tokens = self.held[sequence_id] - index * block_size
                filled = min(max(tokens, 0), block_size)
                found[block_id] = max(found.get(block_id, 0), filled)
        return found

    def waste(self, block_size: int) -> float:
        """The share of the slots of owned blocks that hold no token; 0 where none is owned."""
        fills = self.fills(block_size)
        return 1 - sum(fills.values()) / (len(fills) * block_size) if fills else 0.0

    def num_references(self, block_id: int) -> int:
        """Owners of a block, the prefix cache among them: its reference count."""
        return len(self.owners(block_id)) + (block_id in self.kept)


@dataclass
class _Fold:
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    forks: set[int] = field(default_factory=set)
    news: list[Event] = field(default_factory=list)

    def take(self, event: Event) -> None:
        sequence_id, counts = event.sequence_id, event.counts
        if event.kind in NEWS:
            self.news.append(event)
        if event.kind is EventKind.BLOCK_EVICTED:
            self.kept.discard(counts["block"])
        elif sequence_id is not None:
            self._take_of(sequence_id, event.kind, counts)

    def _take_of(self, sequence_id: int, kind: EventKind, counts: Mapping[str, int]) -> None:
        match kind:
            case EventKind.SCHEDULED:
                self.held[sequence_id] = counts["computed"] + counts["tokens"]
            case EventKind.FORKED:
                self.forks.add(sequence_id)
                self.held[sequence_id] = self.held.get(counts["parent"], 0)
            case EventKind.BLOCK_ALLOCATED:
                self._extend(sequence_id, counts["block"])
            case EventKind.BLOCK_SHARED:
                self._extend(sequence_id, counts["block"])
                if sequence_id not in self.forks:  # then it was found in the prefix cache
                    self.kept.add(counts["block"])
            case EventKind.BLOCK_COPIED | EventKind.BLOCK_EXCHANGED:
                table = self.tables.get(sequence_id, ())
                changed = {counts["source"]: counts["block"]}
                self.tables[sequence_id] = tuple(changed.get(each, each) for each in table)
            case EventKind.BLOCK_KEPT:
                self.kept.add(counts["block"])
            case _ if kind in ENDED:
                for known in (self.tables, self.held, self.lanes):
                    known.pop(sequence_id, None)
                self.forks.discard(sequence_id)

    def _extend(self, sequence_id: int, block_id: int) -> None:
        if sequence_id not in self.lanes:
            taken = set(self.lanes.values())
            self.lanes[sequence_id] = next(
                lane for lane in range(len(taken) + 1) if lane not in taken
            )
        self.tables[sequence_id] = (*self.tables.get(sequence_id, ()), block_id)

    def state(self) -> PoolState:
        news, self.news = tuple(self.news), []
        held = {each: self.held.get(each, 0) for each in self.tables}
        return PoolState(dict(self.tables), held, dict(self.lanes), frozenset(self.kept), news)


def pool_states(events: Iterable[Event]) -> list[PoolState]:
    """The state at the end of each step that the events tell of."""
    fold, states = _Fold(), []
    for event in events:
        fold.take(event)
        if event.kind is EventKind.STEP:
            states.append(fold.state())
    return states

"""The prefix cache as a tree, step by step, followed through an engine's own events.

An event names a block and a request, no tokens and no tree. So every request's block table is
followed through its events: a block that is kept stands behind the one before it in the table.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from minigen.trace import Event, EventKind

_ENDS = {EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED, EventKind.PREEMPTED}


@dataclass(frozen=True)
class Kept:
    """A node: its block, its tokens, the node above (None at a root), and who uses it now."""

    block: int
    tokens: tuple[int, ...]
    above: int | None
    users: frozenset[int]


@dataclass(frozen=True)
class Request:
    """A prompt, and how many of its tokens were found when it began (None while it waits)."""

    prompt: tuple[int, ...]
    num_found: int | None = None


@dataclass(frozen=True)
class TreeState:
    """The tree after a step; `grown` and `evicted` are the nodes that came and went in it.

    Nodes are numbered as they came, since a block that is evicted is soon another node's.
    """

    kept: dict[int, Kept]
    grown: frozenset[int]
    evicted: dict[int, Kept]
    requests: dict[int, Request]


@dataclass
class _Follower:
    """Hears events, and knows the tree and every request's block table at any time."""

    prompts: Iterator[Sequence[int]]
    block_size: int
    kept: dict[int, Kept] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    grown: set[int] = field(default_factory=set)
    evicted: dict[int, Kept] = field(default_factory=dict)
    _texts: dict[int, list[int]] = field(default_factory=dict)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _node_of: dict[int, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def hear(self, event: Event) -> None:
        counts, request_id = event.counts, event.sequence_id
        if event.kind is EventKind.BLOCK_EVICTED and counts["block"] in self._node_of:
            node = self._node_of.pop(counts["block"])
            self.evicted[node] = self.kept.pop(node)
        if request_id is None:
            return
        if event.kind is EventKind.QUEUED:
            self._texts[request_id] = list(next(self.prompts))
            self._tables[request_id] = []
            self.requests[request_id] = Request(tuple(self._texts[request_id]))
        if request_id not in self.requests:
            return
        table = self._tables[request_id]
        match event.kind:
            case EventKind.BLOCK_ALLOCATED | EventKind.BLOCK_SHARED:
                table.append(counts["block"])
                self._use(counts["block"], request_id)
            case EventKind.BLOCK_COPIED | EventKind.BLOCK_EXCHANGED:
                table[table.index(counts["source"])] = counts["block"]
                self._use(counts["block"], request_id)
            case EventKind.BLOCK_KEPT:
                self._keep(counts["block"], request_id)
            case EventKind.PREFIX_HIT:
                self._begin(request_id, counts["tokens"])
            case EventKind.SCHEDULED:
                self._begin(request_id, 0)
            case EventKind.NEW_TOKEN:
                self._texts[request_id].append(counts["token"])
        if event.kind in _ENDS:
            self._leave(request_id)

    def state(self) -> TreeState:
        """What a step has come to; the next one begins."""
        made = TreeState(
            dict(self.kept), frozenset(self.grown), dict(self.evicted), dict(self.requests)
        )
        self.grown, self.evicted = set(), {}
        return made

    def _begin(self, request_id: int, num_found: int) -> None:
        request = self.requests[request_id]
        if request.num_found is None:
            self.requests[request_id] = replace(request, num_found=num_found)

    def _keep(self, block: int, request_id: int) -> None:
        table = self._tables[request_id]
        index, size = table.index(block), self.block_size
        tokens = tuple(self._texts[request_id][index * size : (index + 1) * size])
        above = self._node_of.get(table[index - 1]) if index else None
        node = self._node_of[block] = next(self._numbers)
        self.kept[node] = Kept(block, tokens, above, frozenset())
        self.grown.add(node)
        self._use(block, request_id)

    def _use(self, block: int, request_id: int) -> None:
        if block in self._node_of:
            node = self._node_of[block]
            users = self.kept[node].users | {request_id}
            self.kept[node] = replace(self.kept[node], users=users)

    def _leave(self, request_id: int) -> None:
        for block in self._tables[request_id]:
            if block in self._node_of:
                node = self._node_of[block]
                users = self.kept[node].users - {request_id}
                self.kept[node] = replace(self.kept[node], users=users)
        self._tables[request_id] = []


def tree_states(
    events: Iterable[Event], prompts: Sequence[Sequence[int]], block_size: int
) -> list[TreeState]:
    """The tree after every step that the events tell of.

    `events` begin when the cache is empty; `prompts` are token ids in the order in which they were
    queued. Raises `ValueError` for events of more requests than there are prompts, or of no step.
    """
    follower, states = _Follower(iter(prompts), block_size), []
    for event in events:
        try:
            follower.hear(event)
        except StopIteration:
            raise ValueError(
                f"The events tell of more requests than the {len(prompts)} prompts."
            ) from None
        if event.kind is EventKind.STEP:
            states.append(follower.state())
    if not states:
        raise ValueError("There is no step in these events.")
    return states

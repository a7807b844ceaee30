"""The capacity of a memory, and a simulation of requests in its slots, with the waste.

Source: Kwon et al. 2023 (PagedAttention), section 3.1, which distinguishes internal fragmentation
(slots that a request owns and that hold no token) from external fragmentation (free slots that no
waiting request can use, because they are scattered).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from minigen.kv_cache.block_allocator import BlockAllocator


def sequences_that_fit(
    memory_bytes: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_tokens: int,
    block_size: int,
) -> int:
    """Return how many sequences of `num_tokens` tokens fit into a memory beside the weights.

    What the weights leave is cut into whole blocks of `block_size` tokens, and each sequence takes
    whole blocks. If the weights do not fit, no sequence does.

    >>> sequences_that_fit(1000, 200, kv_bytes_per_token=2, num_tokens=17, block_size=16)
    12
    """
    num_blocks = (memory_bytes - weight_bytes) // (kv_bytes_per_token * block_size)
    return max(0, num_blocks // -(-num_tokens // block_size))


def choose_adjacent(free: Sequence[int], count: int) -> list[int]:
    """Return `count` of the free blocks, in increasing order, adjacent ones if possible.

    If a run of adjacent free blocks is long enough, all come from the beginning of one run: the
    shortest such run, and of equally short ones the first. Otherwise whole runs are taken, the
    longest first (of equally long ones the first), and of the last run its beginning.

    >>> choose_adjacent([9, 2, 3, 4, 7, 8, 12], 2), choose_adjacent([9, 2, 3, 4, 7, 8, 12], 4)
    ([2, 3], [2, 3, 4, 7])
    """
    runs: list[list[int]] = []
    for block_id in sorted(free):
        if not runs or runs[-1][-1] + 1 != block_id:
            runs.append([])
        runs[-1].append(block_id)
    fitting = [run for run in runs if len(run) >= count]
    if fitting:
        return min(fitting, key=len)[:count]
    chosen: list[int] = []
    for run in sorted(runs, key=len, reverse=True):
        chosen += run[: count - len(chosen)]
    return sorted(chosen)


class AdjacentAllocator(BlockAllocator):
    """A block allocator that chooses free blocks by a function, such as `choose_adjacent`."""

    def __init__(self, num_blocks: int, choose: Callable[[Sequence[int], int], list[int]]):
        super().__init__(num_blocks)
        self.choose = choose

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, those that the function chooses."""
        if count <= self.num_free:
            wanted = self.choose(list(self._free), count)
            others = set(self._free) - set(wanted)
            self._free[:] = [*others, *reversed(wanted)]  # the stack hands out its end
        return super().allocate(count)


class Memory(Protocol):
    """A memory that gives slots to requests; each request has a number.

    `hold` makes sure that a request owns slots for its first `num_tokens` tokens, or returns False
    and changes nothing; the slots that the request owns already stay its own. `give_back` frees all
    slots of a request. `pieces` has, for each request, its (first slot, number of slots) in the
    order of its tokens.
    """

    pieces: dict[int, list[tuple[int, int]]]

    def hold(self, request_id: int, num_tokens: int) -> bool: ...

    def give_back(self, request_id: int) -> None: ...


@dataclass(frozen=True)
class RequestLengths:
    """The size of one request: the number of tokens in its prompt and in its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Slots that it fills when it has finished."""
        return self.prompt + self.answer


class Piece(NamedTuple):
    """A run of adjacent slots that belong to one request; the first `used` of them hold tokens."""

    first: int
    size: int
    used: int
    request_id: int


@dataclass(frozen=True)
class Moment:
    """The memory in one step; `refused` is how many slots the first waiting request did not get."""

    pieces: tuple[Piece, ...]
    refused: int | None

    @cached_property
    def num_used(self) -> int:
        """The number of slots that hold tokens."""
        return sum(piece.used for piece in self.pieces)

    @cached_property
    def num_owned(self) -> int:
        """The number of slots that belong to requests."""
        return sum(piece.size for piece in self.pieces)

    def is_scattered(self, num_slots: int) -> bool:
        """Return whether the refused request would fit if all free slots were adjacent."""
        return self.refused is not None and self.refused <= num_slots - self.num_owned


class Shares(NamedTuple):
    """Shares of a memory; they sum to one.

    `used` slots hold tokens. `internal` ones are owned and empty. Free slots are `external` where
    the first waiting request would fit if they were adjacent, and `remainder` where they are too
    few for it in any order.
    """

    used: float
    internal: float
    external: float
    remainder: float


@dataclass(frozen=True, eq=False)
class Run:
    """All steps of a simulation, in a memory of `num_slots` slots.

    `num_recomputed` counts the tokens that were computed again after their request was preempted.
    """

    num_slots: int
    moments: tuple[Moment, ...]
    num_recomputed: int = 0

    def crowded(self) -> list[Moment]:
        """Return the steps in which a request waited; only then does unused memory matter."""
        return [each for each in self.moments if each.refused is not None] or list(self.moments)

    def shares(self) -> Shares:
        """Return how the memory is used, on average over the crowded steps."""
        crowded = self.crowded()
        used = internal = external = 0
        for each in crowded:
            used_now, owned = each.num_used, each.num_owned
            used, internal = used + used_now, internal + owned - used_now
            if each.is_scattered(self.num_slots):
                external += self.num_slots - owned
        total = self.num_slots * len(crowded)
        remainder = total - used - internal - external
        return Shares(used / total, internal / total, external / total, remainder / total)

    def together(self) -> float:
        """Return how many requests run at the same time in the crowded steps, on average."""
        crowded = self.crowded()
        return sum(len({piece.request_id for piece in each.pieces}) for each in crowded) / len(
            crowded
        )

    def num_enough_but_scattered(self) -> int:
        """Count the steps that refused a request although enough slots were free in total."""
        return sum(each.is_scattered(self.num_slots) for each in self.moments)


def run_through(
    memory: Memory,
    num_slots: int,
    requests: Sequence[RequestLengths],
    asks: Sequence[int] | None = None,
) -> Run:
    """Run all requests, first come, first served; each running request gets one token per step.

    `asks` has the number of slots that each request asks for when it starts; its prompt and one
    token if None. If a running request finds no slot for its next token, the request that started
    last is preempted: it frees its slots and waits again, and when it starts again, all its tokens
    are computed again. Prompts and recomputed tokens take a single step, whatever their number;
    `Run.num_recomputed` says how many were recomputed. Raises `ValueError` for a request that does
    not fit into the empty memory.
    """
    asks = asks or [request.prompt + 1 for request in requests]
    simulation, moments = _Simulation(memory, requests, asks), []
    while simulation.waiting or simulation.running:
        simulation.finish()
        simulation.grow()
        refused = simulation.admit()
        if simulation.waiting and not simulation.running:
            raise ValueError(
                f"Request {simulation.waiting[0]} asks for {refused} slots, but there are only "
                f"{num_slots}; use a larger memory or shorter requests."
            )
        moments.append(Moment(simulation.pieces(), refused))
    return Run(num_slots, tuple(moments), simulation.num_recomputed)


def num_runs(block_ids: Sequence[int]) -> int:
    """Return into how many runs of adjacent blocks a block table falls.

    >>> num_runs([4, 5, 6, 2, 3]), num_runs([])
    (2, 0)
    """
    return bool(block_ids) + sum(one + 1 != other for one, other in pairwise(block_ids))


def runs_per_table(run: Run) -> tuple[float, float]:
    """Return how many runs of adjacent blocks a table has, and how many blocks, on average."""
    runs, blocks, tables = 0, 0, 0
    for moment in run.moments:
        by_request: dict[int, list[int]] = {}
        for piece in moment.pieces:
            by_request.setdefault(piece.request_id, []).append(piece.first // piece.size)
        tables += len(by_request)
        for block_ids in by_request.values():
            runs, blocks = runs + num_runs(block_ids), blocks + len(block_ids)
    return runs / tables, blocks / tables


class _Simulation:
    def __init__(self, memory: Memory, requests: Sequence[RequestLengths], asks: Sequence[int]):
        self.memory, self.requests, self.asks = memory, requests, asks
        self.tokens = [request.prompt for request in requests]
        self.waiting, self.running = deque(range(len(requests))), list[int]()
        self.preempted, self.num_recomputed = set[int](), 0
        self.full = [list[Piece]() for _ in requests]  # the pieces that no token can be added to
        self.num_in_full = [0] * len(requests)  # the number of tokens in these pieces

    def finish(self) -> None:
        """Free the slots of each request whose answer is complete."""
        done = [each for each in self.running if self.tokens[each] == self.requests[each].total]
        for each in done:
            self.give_back(each)
            self.running.remove(each)

    def grow(self) -> None:
        """Give each running request one more token; preempt the last request if slots are short."""
        for each in list(self.running):
            while each in self.running and not self.memory.hold(each, self.tokens[each] + 1):
                last = self.running.pop()
                self.give_back(last)
                self.waiting.appendleft(last)
                self.preempted.add(last)
            self.tokens[each] += each in self.running

    def admit(self) -> int | None:
        """Start waiting requests in order; return how many slots the first refused one asks for."""
        while self.waiting:
            first = self.waiting[0]
            asked = max(self.asks[first], self.tokens[first] + 1)
            if not self.memory.hold(first, asked):
                return asked
            self.running.append(self.waiting.popleft())
            self.num_recomputed += self.tokens[first] if first in self.preempted else 0
            self.tokens[first] += 1
        return None

    def pieces(self) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for each in self.running:
            full, left = self.full[each], self.tokens[each] - self.num_in_full[each]
            others: list[Piece] = []
            for first, size in self.memory.pieces[each][len(full) :]:
                used = min(left, size)
                (full if used == size else others).append(Piece(first, size, used, each))
                left -= used
            self.num_in_full[each] = self.tokens[each] - sum(piece.used for piece in others)
            found += full + others
        return tuple(found)

    def give_back(self, request_id: int) -> None:
        self.memory.give_back(request_id)
        self.full[request_id], self.num_in_full[request_id] = [], 0

"""Requests that come and go in a memory of slots: who holds what at every step, and what lies idle.

Source: Kwon et al. 2023 (PagedAttention), section 3.1, which tells internal fragmentation (slots
that are somebody's, and hold nothing) from external (free slots that lie so that nobody fits).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Memory(Protocol):
    """What hands slots out to requests, each known by a number.

    `hold` makes room for a request's first tokens, or returns False and changes nothing;
    `give_back` takes all slots of a request back; `pieces` are each one's (first slot, slots), in
    order.
    """

    pieces: dict[int, list[tuple[int, int]]]

    def hold(self, request_id: int, num_tokens: int) -> bool: ...

    def give_back(self, request_id: int) -> None: ...


@dataclass(frozen=True)
class Wish:
    """What one request turns out to need: the tokens of its prompt and of its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Slots that it fills in the end."""
        return self.prompt + self.answer


class Piece(NamedTuple):
    """Slots that follow one another and belong to one request; the first `used` hold tokens."""

    first: int
    size: int
    used: int
    request_id: int


@dataclass(frozen=True)
class Moment:
    """The memory in one step; `refused` slots is what the first in the queue asked for in vain."""

    pieces: tuple[Piece, ...]
    refused: int | None


@dataclass(frozen=True, eq=False)
class Run:
    """All requests from the first step to the last, in a memory of `num_slots`."""

    num_slots: int
    moments: tuple[Moment, ...]

    def crowded(self) -> list[Moment]:
        """The steps in which somebody waited: only then does it matter what lies idle."""
        return [each for each in self.moments if each.refused is not None] or list(self.moments)

    def shares(self) -> tuple[float, float, float]:
        """The shares of slots that hold tokens, are owned and empty, and are nobody's.

        Means over the crowded steps.
        """
        crowded = self.crowded()
        num_slots = self.num_slots * len(crowded)
        used = sum(piece.used for each in crowded for piece in each.pieces)
        owned = sum(piece.size for each in crowded for piece in each.pieces)
        return used / num_slots, (owned - used) / num_slots, 1 - owned / num_slots

    def together(self) -> float:
        """Requests that run at once in the crowded steps, on average."""
        crowded = self.crowded()
        return sum(len({piece.request_id for piece in each.pieces}) for each in crowded) / len(
            crowded
        )

    def num_enough_but_scattered(self) -> int:
        """Steps in which somebody was refused though as many slots were free, in all."""
        return sum(
            each.refused is not None
            and each.refused <= self.num_slots - sum(piece.size for piece in each.pieces)
            for each in self.moments
        )


def run_through(
    memory: Memory, num_slots: int, wishes: Sequence[Wish], asks: Sequence[int] | None = None
) -> Run:
    """Let all requests through: first come first served, one token a step for each that runs.

    `asks` are the slots that each begins with; its prompt and one token if None. Where one that
    runs finds no slot for its next token, the last that came gives its slots back and waits again.
    Raises `ValueError` for a request that the whole memory cannot hold.
    """
    asks = asks or [wish.prompt + 1 for wish in wishes]
    passage, moments = _Passage(memory, wishes, asks), []
    while passage.waiting or passage.running:
        passage.leave()
        passage.grow()
        refused = passage.admit()
        if passage.waiting and not passage.running:
            raise ValueError(f"Request {passage.waiting[0]} asks for {refused} slots in vain.")
        moments.append(Moment(passage.pieces(), refused))
    return Run(num_slots, tuple(moments))


class _Passage:
    def __init__(self, memory: Memory, wishes: Sequence[Wish], asks: Sequence[int]):
        self.memory, self.wishes, self.asks = memory, wishes, asks
        self.tokens = [wish.prompt for wish in wishes]
        self.waiting, self.running = deque(range(len(wishes))), list[int]()

    def leave(self) -> None:
        """Who has its whole answer gives its slots back."""
        for each in [each for each in self.running if self.tokens[each] == self.wishes[each].total]:
            self.memory.give_back(each)
            self.running.remove(each)

    def grow(self) -> None:
        """A token more for each that runs; for the last that came only if there is room."""
        for each in list(self.running):
            while each in self.running and not self.memory.hold(each, self.tokens[each] + 1):
                last = self.running.pop()
                self.memory.give_back(last)
                self.waiting.appendleft(last)
            self.tokens[each] += each in self.running

    def admit(self) -> int | None:
        """Let in who waits, in order; what the first that finds no room asks for."""
        while self.waiting:
            first = self.waiting[0]
            asked = max(self.asks[first], self.tokens[first] + 1)
            if not self.memory.hold(first, asked):
                return asked
            self.running.append(self.waiting.popleft())
            self.tokens[first] += 1
        return None

    def pieces(self) -> tuple[Piece, ...]:
        found = []
        for each in self.running:
            left = self.tokens[each]
            for first, size in self.memory.pieces[each]:
                found.append(Piece(first, size, min(left, size), each))
                left -= found[-1].used
        return tuple(found)

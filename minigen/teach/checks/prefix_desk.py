"""What the engine does with a prefix cache, in small: where chapter 23's checks put a part."""

import random
from dataclasses import dataclass
from typing import Any

from minigen.cache.blocks import BlockAllocator, blocks_needed
from minigen.cache.manager import BlockManager
from minigen.cache.prefix import RadixPrefixCache
from minigen.checked.allocator import LentAllocator
from minigen.checked.prefix import CheckedPrefixCache
from minigen.params import SamplingParams
from minigen.sequence import Sequence
from minigen.teach.messages import expect, expect_equal
from minigen.trace import Trace

SIZE, NUM_BLOCKS = 4, 20
Part = type[RadixPrefixCache]


@dataclass
class Held:
    """The blocks of a sequence, of which the first `num_kept` are known to the cache."""

    block_ids: list[int]
    num_kept: int


class Desk:
    """The part with an allocator, and what the engine does with both when sequences come and go."""

    def __init__(self, part: Part, block_size: int = SIZE):
        self.allocator, self.size = BlockAllocator(NUM_BLOCKS), block_size
        self.cache: Any = part(self.allocator, block_size)

    def match(self, token_ids: list[int], salt: str | None = None) -> list[int]:
        found = self.cache.match(token_ids, salt)
        expect(isinstance(found, list), f"match returned {found!r}; it should be a list of blocks.")
        return list(found)

    def enter(self, token_ids: list[int], salt: str | None = None) -> Held:
        """A sequence comes: what is known is taken, the rest computed and kept."""
        return self.keep(token_ids, self.match(token_ids, salt), salt)

    def keep(self, token_ids: list[int], matched: list[int], salt: str | None = None) -> Held:
        """Compute what stands behind `matched`, and keep the full blocks of it."""
        num_missing = blocks_needed(len(token_ids), self.size) - len(matched)
        held = Held([*matched, *self.allocator.allocate(num_missing)], len(token_ids) // self.size)
        full = token_ids[: held.num_kept * self.size]
        exchanged = self.cache.insert(full, list(held.block_ids), len(matched), salt)
        for index, known in exchanged or ():
            held.block_ids[index] = known
        return held

    def leave(self, held: Held) -> None:
        """A sequence ends."""
        self._told("leave", held.block_ids[: held.num_kept])
        self.allocator.release(held.block_ids)

    def join(self, block_ids: list[int]) -> None:
        """A fork of a sequence owns its kept blocks too."""
        self.allocator.share(block_ids)
        self._told("join", block_ids)

    def _told(self, method: str, block_ids: list[int]) -> None:
        before = self.owners(block_ids)
        getattr(self.cache, method)(block_ids)
        what = f"owners after {method}, which only counts users (the engine shares and releases)"
        expect_equal(self.owners(block_ids), before, what)

    def owners(self, block_ids: list[int]) -> list[int]:
        return [self.allocator.num_owners(each) for each in block_ids]

    def num_found(self, token_ids: list[int], salt: str | None = None) -> int:
        """How many blocks of a beginning are known; nothing changes hands."""
        matched = self.match([*token_ids, 0], salt)
        self.leave(Held(matched, len(matched)))
        return len(matched)


def traffic(part: Part, num_blocks: int, seed: int) -> list[int]:
    """How many tokens each of sixty requests found; some run on, others end, as blocks allow.

    Raises `PartError` where the part does what the engine must not rely on.
    """
    allocator = BlockAllocator(num_blocks)
    lent = LentAllocator(allocator, part)
    cache = CheckedPrefixCache(part(lent, SIZE), lent, SIZE)
    manager = BlockManager(allocator, cache, SIZE, 4, num_blocks, Trace())
    chance, found = random.Random(seed), []
    running: list[Sequence] = []
    for number in range(60):
        length = chance.choice((3, 4, 5, 8, 9, 16))
        prompt = tuple(chance.choice((1, 1, 1, 2)) for _ in range(length))
        salt = chance.choice((None, None, "a"))
        made = Sequence(number, prompt, SamplingParams(), 0, 99, frozenset(), cache_salt=salt)
        while not manager.begin(made, len(made)):
            manager.release(running.pop(0))
        manager.advance(made, len(made.new_ids))
        found.append(made.num_cached or 0)
        running.append(made)
        for each in chance.sample(running, chance.randrange(len(running) + 1)):
            each.append(chance.choice((1, 2)))
            if manager.reserve(each, 1):
                manager.advance(each, 1)
            else:
                running.remove(each)
                manager.release(each)
    return found

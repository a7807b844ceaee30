"""Exercises of chapter 23: a prefix cache that finds and keeps blocks, and one that evicts."""

import random
from dataclasses import dataclass
from functools import wraps
from typing import Any

from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.sockets.checks_cache import CheckedPrefixCache, TrackedAllocator
from minigen.trace.events import Trace
from minigen_course.ch23_prefix.lesson import PrefixTree, WithoutEviction
from minigen_course.grading.exercise import Check, expect, expect_equal

SIZE, NUM_BLOCKS = 4, 20
Part = type[RadixPrefixCache]


@dataclass
class Owned:
    """The blocks of a sequence; the first `num_cached` of them are in the prefix cache."""

    block_ids: list[int]
    num_cached: int


class Harness:
    """The part and an allocator, called as the engine calls them when sequences start and end."""

    def __init__(self, part: Part, block_size: int = SIZE):
        self.allocator, self.size = BlockAllocator(NUM_BLOCKS), block_size
        self.cache: Any = part(self.allocator, block_size)

    def match(self, token_ids: list[int], salt: str | None = None) -> list[int]:
        found = self.cache.match(token_ids, salt)
        expect(isinstance(found, list), f"match returned {found!r}; it should be a list of blocks.")
        return list(found)

    def start(self, token_ids: list[int], salt: str | None = None) -> Owned:
        """Start a sequence: match its prefix, compute the rest, and cache its full blocks."""
        return self.compute(token_ids, self.match(token_ids, salt), salt)

    def compute(self, token_ids: list[int], matched: list[int], salt: str | None = None) -> Owned:
        """Allocate blocks for the tokens after `matched`, and insert the full ones."""
        num_missing = blocks_needed(len(token_ids), self.size) - len(matched)
        owned = Owned(
            [*matched, *self.allocator.allocate(num_missing)], len(token_ids) // self.size
        )
        full = token_ids[: owned.num_cached * self.size]
        exchanged = self.cache.insert(full, list(owned.block_ids), len(matched), salt)
        for index, known in exchanged or ():
            owned.block_ids[index] = known
        return owned

    def finish(self, owned: Owned) -> None:
        """End a sequence: release its cached blocks in the cache, then all blocks."""
        self._count("release", owned.block_ids[: owned.num_cached])
        self.allocator.release(owned.block_ids)

    def acquire(self, block_ids: list[int]) -> None:
        """Fork a sequence: the fork owns and uses its cached blocks too."""
        self.allocator.share(block_ids)
        self._count("acquire", block_ids)

    def _count(self, method: str, block_ids: list[int]) -> None:
        before = self.owners(block_ids)
        getattr(self.cache, method)(block_ids)
        what = f"owners after {method}, which only counts users (the engine shares and releases)"
        expect_equal(self.owners(block_ids), before, what)

    def owners(self, block_ids: list[int]) -> list[int]:
        return [self.allocator.num_owners(each) for each in block_ids]

    def num_found(self, token_ids: list[int], salt: str | None = None) -> int:
        """Return how many blocks of a prefix are cached; all counts stay as they were."""
        matched = self.match([*token_ids, 0], salt)
        self.finish(Owned(matched, len(matched)))
        return len(matched)


def serve_random_requests(part: Part, num_blocks: int, seed: int) -> list[int]:
    """Return how many tokens each of sixty requests found; requests grow and end at random.

    Raises `PartError` where the part breaks the contract that the engine relies on.
    """
    allocator = BlockAllocator(num_blocks)
    tracked = TrackedAllocator(allocator, part)
    cache = CheckedPrefixCache(part(tracked, SIZE), tracked, SIZE)
    manager = BlockManager(allocator, cache, SIZE, 4, num_blocks, Trace())
    rng, found = random.Random(seed), []
    running: list[Sequence] = []
    for number in range(60):
        length = rng.choice((3, 4, 5, 8, 9, 16))
        prompt = tuple(rng.choice((1, 1, 1, 2)) for _ in range(length))
        salt = rng.choice((None, None, "a"))
        sequence = Sequence(number, prompt, SamplingParams(), 0, 99, frozenset(), cache_salt=salt)
        while not manager.allocate(sequence, len(sequence)):
            manager.free(running.pop(0))
        manager.mark_computed(sequence, len(sequence.new_ids))
        found.append(sequence.num_cached or 0)
        running.append(sequence)
        for each in rng.sample(running, rng.randrange(len(running) + 1)):
            each.append(rng.choice((1, 2)))
            if manager.allocate_slots(each, 1):
                manager.mark_computed(each, 1)
            else:
                running.remove(each)
                manager.free(each)
    return found


def _tokens(first: int, num_blocks: int, more: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * SIZE + more))


def cached_blocks_are_found(part: Part) -> None:
    """a sequence of two full blocks and one token, and another with the same prefix:"""
    harness = Harness(part)
    owned = harness.start(_tokens(10, 2, 1))
    owners = harness.owners(owned.block_ids)
    expect_equal(owners, [2, 2, 1], "owners after insert: the cache and the sequence")
    found = harness.match([*_tokens(10, 2), 99, 98])
    expect_equal(found, owned.block_ids[:2], "the blocks that match returns")
    expect_equal(harness.owners(found), [3, 3], "their owners after match")


def match_leaves_one_token(part: Part) -> None:
    """a prompt whose tokens are all cached; one must be computed, because logits are needed:"""
    harness = Harness(part)
    owned = harness.start(_tokens(10, 3))
    for num_blocks in (3, 2, 1):
        found = harness.match(_tokens(10, num_blocks))
        what = f"blocks that match returns for {num_blocks * SIZE} tokens in blocks of {SIZE}"
        expect_equal(found, owned.block_ids[: num_blocks - 1], what)
    expect_equal(harness.match([]), [], "the blocks that match returns for no tokens")
    single = Harness(part, block_size=1)
    single.start([7, 8])
    num_found = len(single.match([7, 8]))
    expect_equal(num_found, 1, "how many of two cached blocks of one token match returns")
    expect_equal(single.match([7]), [], "the blocks that match returns for one cached token")


def a_block_matches_only_after_its_own_prefix(part: Part) -> None:
    """the same four tokens after another prefix, so that their keys and values differ:"""
    harness = Harness(part)
    harness.start([1, 1, 1, 1, 5, 5, 5, 5])
    num_found = harness.num_found
    expect_equal(num_found([5, 5, 5, 5]), 0, "blocks found for the second block's tokens")
    expect_equal(num_found([2, 2, 2, 2, 5, 5, 5, 5]), 0, "blocks found after another first block")
    expect_equal(num_found([1, 1, 1, 1, 5, 5, 5, 6]), 1, "blocks found if the last token differs")
    harness.start([2, 2, 2, 2, 5, 5, 5, 5])
    expect_equal(num_found([2, 2, 2, 2, 5, 5, 5, 5]), 2, "blocks found once that prefix is cached")


def salts_do_not_share(part: Part) -> None:
    """the same tokens with two salts, as of two customers or two adapters:"""
    harness = Harness(part)
    harness.start(_tokens(10, 2), "a")
    for salt, right in (("b", 0), (None, 0), ("a", 2)):
        expect_equal(harness.num_found(_tokens(10, 2), salt), right, f"blocks found, salt {salt!r}")
    other = harness.start(_tokens(10, 2), "b")
    expect_equal(harness.owners(other.block_ids), [2, 2], "owners of the blocks of the other salt")


def a_sequence_can_extend_its_cached_prefix(part: Part) -> None:
    """insert with `first` above 0 adds blocks after the sequence's cached blocks:"""
    harness = Harness(part)
    owned = harness.start(_tokens(10, 2))
    more = harness.compute(_tokens(10, 4), owned.block_ids)
    expect_equal(harness.owners(more.block_ids), [2] * 4, "owners of the four blocks")
    expect_equal(harness.num_found(_tokens(10, 4)), 4, "blocks found of all four")
    text = [*_tokens(10, 2), *_tokens(90, 1)]
    branch = harness.start(text)
    expect_equal(branch.block_ids[:2], owned.block_ids, "the shared blocks of a branch")
    expect_equal(harness.num_found(text), 3, "blocks found of a branch")
    expect_equal(harness.num_found(_tokens(10, 4)), 4, "blocks found of all four, next to a branch")


def equal_blocks_are_stored_once(part: Part) -> None:
    """two sequences computed the same prefix in parallel; the second gets the first's blocks:"""
    harness = Harness(part)
    first = harness.compute(_tokens(10, 2), [])
    own = harness.allocator.allocate(3)
    text = [*_tokens(10, 2), *_tokens(50, 1)]
    exchanged = harness.cache.insert(text, list(own), 0)
    expect_equal(
        [tuple(each) for each in exchanged or []],
        [(0, first.block_ids[0]), (1, first.block_ids[1])],
        "what insert returns, (index, known block)",
    )
    expect_equal(harness.owners(own), [0, 0, 2], "owners of the second sequence's own blocks")
    expect_equal(harness.owners(first.block_ids), [3, 3], "owners of the known blocks")
    again = harness.cache.insert(_tokens(10, 2), list(first.block_ids), 1)
    expect_equal(list(again or []), [], "what insert returns for blocks that are already cached")
    owners = harness.owners(first.block_ids)
    expect_equal(owners, [3, 3], "owners after an insert of cached blocks")


def unused_blocks_can_be_evicted(part: Part) -> None:
    """match, insert and acquire add users, and release removes them:"""
    harness = Harness(part)
    first = harness.start(_tokens(10, 2, 1))
    expect_equal(harness.cache.num_evictable, 0, "num_evictable while the sequence runs")
    second = harness.start(_tokens(10, 3))
    harness.acquire(first.block_ids[:2])  # a fork of the first
    harness.finish(first)
    harness.finish(second)
    expect_equal(harness.cache.num_evictable, 1, "num_evictable while a fork uses two of three")
    expect_equal(harness.cache.evict(3), second.block_ids[2:], "what evict(3) returns then")
    harness.finish(Owned(first.block_ids[:2], 2))
    expect_equal(harness.cache.num_evictable, 2, "num_evictable once all sequences have ended")
    third = harness.start(_tokens(10, 1, 2))
    expect_equal(harness.cache.num_evictable, 1, "num_evictable while one block is used again")
    harness.finish(third)
    expect_equal(harness.cache.num_evictable, 2, "num_evictable at the end")


def a_chain_is_evicted_from_its_end(part: Part) -> None:
    """a prefix of four blocks is evicted, one block at a time:"""
    harness = Harness(part)
    owned = harness.start(_tokens(10, 4))
    harness.finish(owned)
    for left in (3, 2, 1, 0):
        gone = harness.cache.evict(1)
        expect_equal(gone, [owned.block_ids[left]], "what evict(1) returns: the last of the chain")
        expect_equal(harness.owners(gone), [0], "owners of the evicted block")
        expect_equal(harness.num_found(_tokens(10, 4)), left, "blocks found after that")
    expect_equal(harness.cache.evict(2), [], "what evict returns for an empty cache")
    expect_equal(harness.allocator.num_free, NUM_BLOCKS, "free blocks at the end")
    again = harness.start(_tokens(10, 2))
    expect_equal(harness.num_found(_tokens(10, 2)), 2, "blocks found, cached once more")
    harness.finish(again)


def least_recently_used_blocks_are_evicted_first(part: Part) -> None:
    """three prefixes, the first of which was used once more:"""
    harness = Harness(part)
    for first in (10, 50, 90):
        harness.finish(harness.start(_tokens(first, 2)))
    harness.finish(harness.start(_tokens(10, 2, 1)))
    expect_equal(len(harness.cache.evict(3)), 3, "how many blocks evict(3) returns")
    left = [harness.num_found(_tokens(first, 2)) for first in (10, 50, 90)]
    expect_equal(left, [2, 0, 1], "blocks left of the three: all, none, and one of two")
    expect_equal(len(harness.cache.evict(9)), 3, "how many blocks evict(9) returns if 3 are cached")


def branches_and_salts_survive_each_others_eviction(part: Part) -> None:
    """an eviction removes no block that is in use:"""
    harness = Harness(part)
    text = [*_tokens(10, 1), *_tokens(50, 1)]
    used = harness.start(text)
    harness.finish(harness.start([*_tokens(10, 1), *_tokens(60, 2)]))
    harness.finish(harness.start(_tokens(10, 1), "b"))
    harness.finish(harness.start(_tokens(80, 1)))
    num_evicted = len(harness.cache.evict(9))
    expect_equal(num_evicted, 4, "how many blocks evict(9) returns: all unused blocks")
    expect_equal(harness.num_found(text), 2, "blocks found of the sequence that runs")
    harness.finish(used)
    expect_equal(harness.cache.num_evictable, 2, "num_evictable once it has ended")


def the_engine_can_rely_on_it(part: Part) -> None:
    """random requests, with the same checks as for a plugin in the engine:"""
    for seed in range(6):
        roomy = [serve_random_requests(each, 400, seed) for each in (part, RadixPrefixCache)]
        for number, (found, right) in enumerate(zip(*roomy, strict=True)):
            what = f"tokens found for request {number} of the random ones (seed {seed})"
            expect_equal(found, right, what)
        serve_random_requests(part, 12, seed)


def requests_find_what_the_packages_find(part: Part) -> None:
    """random requests in a large memory, with the same checks as for a plugin in the engine:"""
    for seed in range(6):
        both = [serve_random_requests(each, 400, seed) for each in (part, RadixPrefixCache)]
        for number, (found, right) in enumerate(zip(*both, strict=True)):
            what = f"tokens found for request {number} of the random ones (seed {seed})"
            expect_equal(found, right, what)


def _of_a_tree(check: Check) -> Check:
    """Return a check of a whole prefix cache as one of a tree without users and eviction."""

    @wraps(check)
    def checked(part: type[PrefixTree]) -> None:
        check(lambda allocator, block_size: WithoutEviction(part(allocator, block_size)))

    return checked


FINDING = (
    cached_blocks_are_found,
    match_leaves_one_token,
    a_block_matches_only_after_its_own_prefix,
    salts_do_not_share,
    a_sequence_can_extend_its_cached_prefix,
    equal_blocks_are_stored_once,
)
CHECKS = {
    "PrefixTree": tuple(map(_of_a_tree, (*FINDING, requests_find_what_the_packages_find))),
    "RadixPrefixCache": (
        *FINDING,
        unused_blocks_can_be_evicted,
        a_chain_is_evicted_from_its_end,
        least_recently_used_blocks_are_evicted_first,
        branches_and_salts_survive_each_others_eviction,
        the_engine_can_rely_on_it,
    ),
}

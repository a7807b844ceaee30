"""Chapter 23's exercise: a prefix cache that counts owners and evicts the oldest block."""

import random
from dataclasses import dataclass
from typing import Any

from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.sockets.checks_cache import CheckedPrefixCache, TrackedAllocator
from minigen.trace.events import Trace
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_equal

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
        self._told("release", held.block_ids[: held.num_kept])
        self.allocator.release(held.block_ids)

    def acquire(self, block_ids: list[int]) -> None:
        """A fork of a sequence owns its kept blocks too."""
        self.allocator.share(block_ids)
        self._told("acquire", block_ids)

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
    lent = TrackedAllocator(allocator, part)
    cache = CheckedPrefixCache(part(lent, SIZE), lent, SIZE)
    manager = BlockManager(allocator, cache, SIZE, 4, num_blocks, Trace())
    chance, found = random.Random(seed), []
    running: list[Sequence] = []
    for number in range(60):
        length = chance.choice((3, 4, 5, 8, 9, 16))
        prompt = tuple(chance.choice((1, 1, 1, 2)) for _ in range(length))
        salt = chance.choice((None, None, "a"))
        made = Sequence(number, prompt, SamplingParams(), 0, 99, frozenset(), cache_salt=salt)
        while not manager.allocate(made, len(made)):
            manager.free(running.pop(0))
        manager.mark_computed(made, len(made.new_ids))
        found.append(made.num_cached or 0)
        running.append(made)
        for each in chance.sample(running, chance.randrange(len(running) + 1)):
            each.append(chance.choice((1, 2)))
            if manager.allocate_slots(each, 1):
                manager.mark_computed(each, 1)
            else:
                running.remove(each)
                manager.free(each)
    return found


def _tokens(first: int, num_blocks: int, more: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * SIZE + more))


def what_was_kept_is_found(part: Part) -> None:
    """a sequence of two full blocks and one token, and another that begins like it:"""
    desk = Desk(part)
    held = desk.enter(_tokens(10, 2, 1))
    expect_equal(desk.owners(held.block_ids), [2, 2, 1], "owners after insert: cache and sequence")
    found = desk.match([*_tokens(10, 2), 99, 98])
    expect_equal(found, held.block_ids[:2], "the blocks that match returns")
    expect_equal(desk.owners(found), [3, 3], "their owners after match")


def one_token_is_left_over(part: Part) -> None:
    """a prompt that is known to its last token; one must be computed, to have logits:"""
    desk = Desk(part)
    held = desk.enter(_tokens(10, 3))
    for num_blocks in (3, 2, 1):
        found = desk.match(_tokens(10, num_blocks))
        what = f"blocks that match returns for {num_blocks * SIZE} tokens in blocks of {SIZE}"
        expect_equal(found, held.block_ids[: num_blocks - 1], what)
    expect_equal(desk.match([]), [], "the blocks that match returns for no tokens")
    single = Desk(part, block_size=1)
    single.enter([7, 8])
    expect_equal(len(single.match([7, 8])), 1, "how many of two known blocks of one token it takes")
    expect_equal(single.match([7]), [], "the blocks that match returns for one token that is known")


def a_block_counts_only_behind_its_own_beginning(part: Part) -> None:
    """the same four tokens behind another beginning, which have other keys and values:"""
    desk = Desk(part)
    desk.enter([1, 1, 1, 1, 5, 5, 5, 5])
    expect_equal(desk.num_found([5, 5, 5, 5]), 0, "blocks found for the second block's tokens")
    expect_equal(desk.num_found([2, 2, 2, 2, 5, 5, 5, 5]), 0, "blocks behind another first block")
    expect_equal(desk.num_found([1, 1, 1, 1, 5, 5, 5, 6]), 1, "blocks where the last token differs")
    desk.enter([2, 2, 2, 2, 5, 5, 5, 5])
    expect_equal(desk.num_found([2, 2, 2, 2, 5, 5, 5, 5]), 2, "blocks of the other, once it came")


def salts_do_not_share(part: Part) -> None:
    """equal tokens of two salts, as of two customers or two adapters:"""
    desk = Desk(part)
    desk.enter(_tokens(10, 2), "a")
    for salt, right in (("b", 0), (None, 0), ("a", 2)):
        expect_equal(desk.num_found(_tokens(10, 2), salt), right, f"blocks found, salt {salt!r}")
    other = desk.enter(_tokens(10, 2), "b")
    expect_equal(desk.owners(other.block_ids), [2, 2], "owners of the other salt's own blocks")


def a_sequence_grows_behind_what_is_kept(part: Part) -> None:
    """insert with `first` above 0 goes on behind the sequence's own blocks:"""
    desk = Desk(part)
    held = desk.enter(_tokens(10, 2))
    more = desk.keep(_tokens(10, 4), held.block_ids)
    expect_equal(desk.owners(more.block_ids), [2] * 4, "owners of the four blocks")
    expect_equal(desk.num_found(_tokens(10, 4)), 4, "blocks found of all four")
    branch = desk.enter([*_tokens(10, 2), *_tokens(90, 1)])
    expect_equal(branch.block_ids[:2], held.block_ids, "the shared blocks of a branch")
    expect_equal(desk.num_found([*_tokens(10, 2), *_tokens(90, 1)]), 3, "blocks found of a branch")
    expect_equal(desk.num_found(_tokens(10, 4)), 4, "blocks found of all four, beside a branch")


def equal_blocks_are_kept_once(part: Part) -> None:
    """two sequences computed the same beginning side by side; the second takes the first's:"""
    desk = Desk(part)
    first = desk.keep(_tokens(10, 2), [])
    own = desk.allocator.allocate(3)
    text = [*_tokens(10, 2), *_tokens(50, 1)]
    exchanged = desk.cache.insert(text, list(own), 0)
    expect_equal(
        [tuple(each) for each in exchanged or []],
        [(0, first.block_ids[0]), (1, first.block_ids[1])],
        "what insert returns, (index, known block)",
    )
    expect_equal(desk.owners(own), [0, 0, 2], "owners of the second's own blocks")
    expect_equal(desk.owners(first.block_ids), [3, 3], "owners of the known blocks")
    again = desk.cache.insert(_tokens(10, 2), list(first.block_ids), 1)
    expect_equal(list(again or []), [], "what insert returns for blocks that are kept already")
    expect_equal(desk.owners(first.block_ids), [3, 3], "owners, nothing new inserted")


def what_nobody_uses_can_be_evicted(part: Part) -> None:
    """users come by match, insert and acquire, and go by release:"""
    desk = Desk(part)
    first = desk.enter(_tokens(10, 2, 1))
    expect_equal(desk.cache.num_evictable, 0, "num_evictable while the sequence runs")
    second = desk.enter(_tokens(10, 3))
    desk.acquire(first.block_ids[:2])  # a fork of the first
    desk.leave(first)
    desk.leave(second)
    expect_equal(desk.cache.num_evictable, 1, "num_evictable while a fork holds two of three")
    expect_equal(desk.cache.evict(3), second.block_ids[2:], "what evict(3) returns then")
    desk.leave(Held(first.block_ids[:2], 2))
    expect_equal(desk.cache.num_evictable, 2, "num_evictable once all have left")
    third = desk.enter(_tokens(10, 1, 2))
    expect_equal(desk.cache.num_evictable, 1, "num_evictable while one of them is used again")
    desk.leave(third)
    expect_equal(desk.cache.num_evictable, 2, "num_evictable at the end")


def a_chain_goes_from_its_end(part: Part) -> None:
    """eviction of a beginning of four blocks, one by one:"""
    desk = Desk(part)
    held = desk.enter(_tokens(10, 4))
    desk.leave(held)
    for left in (3, 2, 1, 0):
        gone = desk.cache.evict(1)
        expect_equal(gone, [held.block_ids[left]], "what evict(1) returns: the last of the chain")
        expect_equal(desk.owners(gone), [0], "owners of what was evicted")
        expect_equal(desk.num_found(_tokens(10, 4)), left, "blocks found after that")
    expect_equal(desk.cache.evict(2), [], "what evict returns of an empty cache")
    expect_equal(desk.allocator.num_free, NUM_BLOCKS, "free blocks at the end")
    again = desk.enter(_tokens(10, 2))
    expect_equal(desk.num_found(_tokens(10, 2)), 2, "blocks found, kept once more")
    desk.leave(again)


def the_least_recently_used_go_first(part: Part) -> None:
    """three beginnings, of which the first was used once more:"""
    desk = Desk(part)
    for first in (10, 50, 90):
        desk.leave(desk.enter(_tokens(first, 2)))
    desk.leave(desk.enter(_tokens(10, 2, 1)))
    expect_equal(len(desk.cache.evict(3)), 3, "how many evict(3) returns")
    left = [desk.num_found(_tokens(first, 2)) for first in (10, 50, 90)]
    expect_equal(left, [2, 0, 1], "blocks left of the three: all, none, and one of two")
    expect_equal(len(desk.cache.evict(9)), 3, "how many evict(9) returns where 3 are kept")


def branches_and_salts_survive_each_others_eviction(part: Part) -> None:
    """what is evicted takes nothing along that is still kept:"""
    desk = Desk(part)
    used = desk.enter([*_tokens(10, 1), *_tokens(50, 1)])
    desk.leave(desk.enter([*_tokens(10, 1), *_tokens(60, 2)]))
    desk.leave(desk.enter(_tokens(10, 1), "b"))
    desk.leave(desk.enter(_tokens(80, 1)))
    expect_equal(len(desk.cache.evict(9)), 4, "how many evict(9) returns: all that nobody uses")
    expect_equal(desk.num_found([*_tokens(10, 1), *_tokens(50, 1)]), 2, "blocks of the one in use")
    desk.leave(used)
    expect_equal(desk.cache.num_evictable, 2, "num_evictable once it has left")


def the_engine_can_rely_on_it(part: Part) -> None:
    """requests come and go at random, watched as the engine watches a foreign part:"""
    for seed in range(6):
        roomy = [traffic(each, 400, seed) for each in (part, RadixPrefixCache)]
        for number, (found, right) in enumerate(zip(*roomy, strict=True)):
            what = f"tokens found for request {number} of the random ones (seed {seed})"
            expect_equal(found, right, what)
        traffic(part, 12, seed)


EXERCISES = (
    Exercise(
        "RadixPrefixCache",
        RadixPrefixCache,
        (
            what_was_kept_is_found,
            one_token_is_left_over,
            a_block_counts_only_behind_its_own_beginning,
            salts_do_not_share,
            a_sequence_grows_behind_what_is_kept,
            equal_blocks_are_kept_once,
            what_nobody_uses_can_be_evicted,
            a_chain_goes_from_its_end,
            the_least_recently_used_go_first,
            branches_and_salts_survive_each_others_eviction,
            the_engine_can_rely_on_it,
        ),
        (
            "Name a block by all that stands up to its end, and the salt: a path in a tree, or a "
            "hash that takes in the hash before it. Count the users of each.",
            "The cache is one owner of each block that it keeps, from insert to evict: it shares "
            "what insert keeps and match returns, and releases what evict returns. acquire and release "
            "only count users; the engine itself shares and releases those blocks.",
            "A dict remembers the order in which keys came. Put a block into one when its last "
            "user leaves, the last block of the sequence first, and evict from its front.",
        ),
        "Write a cache of equal beginnings, in blocks of `block_size` tokens, over an `allocator` "
        "that counts the owners of each block. `match` finds the longest known beginning and "
        "leaves a token over, `insert` keeps full blocks, `acquire` and `release` count users, `evict` "
        "frees what nobody uses, the least recently used first. `num_blocks` is not asked for.",
        """from minigen import LLM, SamplingParams

llm = LLM.load(prefix_cache=mine)
rules = "You are a librarian. Answer in one short sentence, and be kind to everybody who asks. "
with llm.count_work() as work:
    for question in ("Where are the maps?", "Where are the poems?"):
        answer = llm.generate(rules + question, SamplingParams(temperature=0, max_tokens=12))
print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")""",
        "A system prompt that every request begins with ends in the middle of a block. How many "
        "tokens of it are computed again by each? Share the part of a block that is equal, by "
        "copying it (copy-on-write), and count what that saves.",
    ),
)

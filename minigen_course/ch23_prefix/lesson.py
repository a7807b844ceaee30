"""A prefix cache without eviction; and returning users, simulated block by block."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.protocols import BlockAllocator
from minigen.sequence import Sequence
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from minigen_course.lab.toy_engine import toy_family, toy_manager

BLOCK_SIZE = 16


class PrefixTree:
    """A prefix cache that finds and keeps blocks, and never evicts one.

    It is one owner of each block that it keeps.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self._roots: dict[str | None, Branch] = {}

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest kept prefix of `token_ids`, each with one more owner.

        At least one token is left without a block. Only sequences with the same `salt` share.
        """
        branch, matched = self._roots.get(salt, Branch()), []
        for key in self._keys(token_ids[:-1]):
            if key not in branch.children:
                break
            branch = branch.children[key]
            matched.append(branch.block_id)
        self.allocator.share(matched)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Keep a sequence's full, computed blocks, from index `first` of its block table on.

        `block_ids` is the block table, and `token_ids` are the tokens in its full blocks. The
        blocks before `first` are kept already. If an equal block is kept, the sequence gets one
        more share of that one, and its own block is released. Returns a pair (index, kept block)
        for each of these.
        """
        branch, replaced = self._roots.setdefault(salt, Branch()), []
        for index, key in enumerate(self._keys(token_ids)):
            own = block_ids[index]
            if key not in branch.children:
                branch.children[key] = Branch(own)
                self.allocator.share([own])
            branch = branch.children[key]
            if branch.block_id != own:
                self.allocator.share([branch.block_id])
                self.allocator.release([own])
                replaced.append((index, branch.block_id))
        return replaced

    def _keys(self, token_ids: SequenceOf[int]) -> list[tuple[int, ...]]:
        """Return the tokens of each full block."""
        ends = range(self.block_size, len(token_ids) + 1, self.block_size)
        return [tuple(token_ids[end - self.block_size : end]) for end in ends]


@dataclass
class Branch:
    """A kept block, and the blocks that follow it, by their tokens; a root holds no block."""

    block_id: int = -1
    children: dict[tuple[int, ...], "Branch"] = field(default_factory=dict)


class WithoutEviction:
    """A whole prefix cache over a tree that only matches and inserts; it keeps every block."""

    num_evictable = 0

    def __init__(self, tree: PrefixTree):
        self.tree, self.match, self.insert = tree, tree.match, tree.insert

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Count nothing: users matter only for eviction."""

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Count nothing: users matter only for eviction."""

    def evict(self, count: int) -> list[int]:
        """Evict nothing."""
        return []


@dataclass
class Visits:
    """Per request, in order: its tokens, the tokens found, and the blocks evicted to admit it."""

    asked: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """The share of all requested tokens that were found in the cache."""
        return sum(self.found) / sum(self.asked)


def make_manager(num_blocks: int, num_sequences: int, trace: Trace | None = None) -> BlockManager:
    """Create a block manager over an empty radix tree."""
    return toy_manager(num_blocks, BLOCK_SIZE, num_sequences, RadixPrefixCache, trace)


def enter(manager: BlockManager, prompt: SequenceOf[int]) -> Sequence:
    """Start a request, and count all tokens of its prompt that are not cached as computed.

    Raises `ValueError` if its blocks do not fit.
    """
    (sequence,) = toy_family(0, prompt, output=1)
    if not manager.allocate(sequence, len(sequence)):
        raise ValueError(
            f"A prompt of {len(prompt)} tokens does not fit into the "
            f"{manager.num_available} available blocks; use more blocks or a shorter prompt."
        )
    manager.mark_computed(sequence, len(sequence.new_ids))
    return sequence


def visit(
    num_users: int, shared_tokens: int, own_tokens: int, num_blocks: int, num_requests: int
) -> Visits:
    """Serve users that return in random order, one request at a time, each with its own prompt.

    A user's prompt is always the same: `shared_tokens` that all users have in common, and then
    `own_tokens` that only this user has. The first request of a user cannot find its own tokens.
    Raises `ValueError` if a prompt does not fit.
    """
    visits, trace, rng = Visits(), Trace(), random.Random(23)
    manager, timeline = make_manager(num_blocks, 1, trace), Timeline()
    with trace.subscribed(timeline):
        for _ in range(num_requests):
            first = shared_tokens + rng.randrange(num_users) * own_tokens
            prompt = [*range(shared_tokens), *range(first, first + own_tokens)]
            sequence = enter(manager, prompt)
            manager.free(sequence)
            visits.asked.append(len(prompt))
            visits.found.append(sequence.num_cached or 0)
            visits.evicted.append(timeline.work.blocks_evicted - sum(visits.evicted))
    return visits

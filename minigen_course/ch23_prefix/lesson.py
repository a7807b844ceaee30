"""What a prefix cache finds when users come back: block by block, without a model."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.trace.events import Event, EventKind, Trace

BLOCK_SIZE = 16


@dataclass
class Visits:
    """For each request in turn: its tokens, those found, and the blocks evicted to let it in."""

    asked: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """The share of all tokens asked for that were found."""
        return sum(self.found) / sum(self.asked)


def make_manager(num_blocks: int, num_sequences: int, trace: Trace | None = None) -> BlockManager:
    """A block manager over an empty radix tree."""
    allocator = BlockAllocator(num_blocks)
    cache = RadixPrefixCache(allocator, BLOCK_SIZE)
    heard = Trace() if trace is None else trace
    return BlockManager(allocator, cache, BLOCK_SIZE, num_sequences, num_blocks, heard)


def enter(manager: BlockManager, prompt: SequenceOf[int]) -> Sequence:
    """A request whose prompt is computed at once, as far as it is not known.

    Raises `ValueError` where its blocks do not fit.
    """
    made = Sequence(0, tuple(prompt), SamplingParams(), 0, 1, frozenset())
    if not manager.allocate(made, len(made)):
        raise ValueError(f"A prompt of {len(prompt)} tokens does not fit into the blocks.")
    manager.mark_computed(made, len(made.new_ids))
    return made


def visit(
    num_users: int, shared_tokens: int, own_tokens: int, num_blocks: int, num_requests: int
) -> Visits:
    """Users come back in random order, one at a time, each with the same prompt as the last time.

    A prompt is `shared_tokens` that all have in common, and `own_tokens` of the user's alone. The
    first request of each user cannot find its own. Raises `ValueError` where a prompt does not fit.
    """
    seen, trace, chance = Visits(), Trace(), random.Random(23)
    manager, num_evicted = make_manager(num_blocks, 1, trace), 0

    def count(event: Event) -> None:
        nonlocal num_evicted
        num_evicted += event.kind is EventKind.BLOCK_EVICTED

    with trace.subscribed(count):
        for _ in range(num_requests):
            first = shared_tokens + chance.randrange(num_users) * own_tokens
            prompt = [*range(shared_tokens), *range(first, first + own_tokens)]
            sequence = enter(manager, prompt)
            manager.free(sequence)
            seen.asked.append(len(prompt))
            seen.found.append(sequence.num_cached or 0)
            seen.evicted.append(num_evicted)
            num_evicted = 0
    return seen

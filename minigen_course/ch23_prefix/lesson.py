"""A simulation of a prefix cache with returning users, block by block, without a model."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sequence import Sequence
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from minigen_course.lab.toy_engine import toy_family, toy_manager

BLOCK_SIZE = 16


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

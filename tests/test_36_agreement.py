"""The solutions of chapter 36 agree with the engine: drafts, tokens of a step, the block table."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.model.attention import attention
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, Sequence
from minigen.speculative.ngram import NgramProposer
from minigen.trace.events import Trace
from minigen_course.ch36_speculative.reference import (
    TextProposer,
    accept_or_redraw,
    accepted_tokens,
    after_verifying,
    best_count,
    ngram_drafts,
    tree_mask,
)

SIZE = 4


def sequence_of(token_ids: list[int], answer: int = 60) -> Sequence:
    return Sequence(0, tuple(token_ids), SamplingParams(), 0, answer, frozenset())


def test_drafts_from_the_text_are_the_engines() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        token_ids = [drawn.randrange(4) for _ in range(drawn.randint(1, 20))]
        sequence, count = sequence_of(token_ids), drawn.randint(1, 8)
        right = NgramProposer(2, 4).propose([sequence], [count])
        proposer = TextProposer(ngram_drafts)
        assert proposer.propose([sequence], [count]) == right
        proposer.end(sequence)


@pytest.mark.parametrize("seed", range(6))
def test_a_step_leaves_what_after_verifying_says(seed: int) -> None:
    """The scheduler commits the same tokens, and the block manager has the same counts."""
    drawn = random.Random(seed)
    allocator = BlockAllocator(60)
    cache = RadixPrefixCache(allocator, SIZE)
    manager = BlockManager(allocator, cache, SIZE, 1, 60, Trace())
    scheduler = ContinuousScheduler(manager, 1, 64)
    sequence = sequence_of([drawn.randrange(50) for _ in range(drawn.randint(1, 9))])
    scheduler.add(sequence)
    scheduler.commit(scheduler.schedule(), [SampledToken(drawn.randrange(50), None)])
    num_drafts = drawn.randint(0, 6)
    for _ in range(7):
        known = len(sequence)
        sequence.drafts = tuple(drawn.randrange(50) for _ in range(num_drafts))
        drafts, chunks = sequence.drafts, scheduler.schedule()
        num_blocks = len(sequence.block_ids)
        own = [each if drawn.random() < 0.7 else 50 for each in drafts] + [51]
        given = scheduler.commit(chunks, [SampledToken(each, None) for each in own])
        tokens = accepted_tokens(drafts, own)
        assert [token.token_id for _, token in given] == tokens == sequence.token_ids[known:]
        right = len(tokens) - 1
        computed, published, missing = after_verifying(known, num_drafts, right, num_blocks, SIZE)
        assert computed == sequence.num_computed
        assert published == sequence.num_cached_blocks
        assert len(sequence.block_ids) == num_blocks
        free = allocator.num_free
        assert manager.allocate_slots(sequence, 1 + num_drafts)
        assert allocator.num_free == free - missing


def test_a_redraw_never_gives_a_token_without_a_chance() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(2000):
        weights = drawn.random((2, 9)) * drawn.integers(0, 2, (2, 9))
        p, q = (each / each.sum() if each.any() else np.eye(9)[0] for each in weights)
        drafted = int(drawn.choice(9, p=q))
        for draws in ((0.0, 0.0), (1 - 2**-53, 1 - 2**-53), tuple(drawn.random(2))):
            assert p[accept_or_redraw(p, q, drafted, *draws)] > 0


def test_the_best_count_is_that_of_the_closed_form() -> None:
    costs = [1.0, 1.2, 1.21, 1.22, 1.26, 1.3, 1.35, 1.39]
    for acceptance in (0.1, 0.4, 0.75, 0.93):
        speeds = [
            (1 - acceptance ** (count + 1)) / (1 - acceptance) / cost
            for count, cost in enumerate(costs)
        ]
        assert best_count(acceptance, costs) == int(np.argmax(speeds))


def test_a_trees_rows_are_those_of_its_paths() -> None:
    """Masked attention over a tree equals attention over each of its paths alone."""
    parents = [-1, 0, 0, 1, 1, 2, 2]
    mask = torch.from_numpy(tree_mask(parents))
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    found = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    for node in range(7):
        path = torch.nonzero(mask[node]).flatten()
        alone: Any = attention(q[path], k[path], v[path])
        assert torch.allclose(found[node], alone[-1], atol=1e-5)

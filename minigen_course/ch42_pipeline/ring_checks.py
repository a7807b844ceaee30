"""Checks of chapter 42's ring: which tokens a rank gets, and the merge of partial attentions."""

# ruff: noqa: D400, D401, D403 - a check's docstring names the case, as part of a message

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch42_pipeline.lesson.ring import attend_part, num_pairs, ring_attention
from minigen_course.grading.exercise import expect, expect_close, expect_equal

ZigZag = Callable[[int, int, int], list[int]]
MergeParts = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# Zig-zag


def _positions(part: ZigZag, num_tokens: int, num_ranks: int) -> list[list[int]]:
    """Return what all ranks get; expect that each token has one rank."""
    every = []
    for rank in range(num_ranks):
        found = part(num_tokens, rank, num_ranks)
        what = f"{num_tokens} tokens, rank {rank} of {num_ranks}"
        expect(isinstance(found, list), f"{what}: got {found!r}; return a list of positions.")
        expect_equal(found, sorted(found), f"{what}: the positions, in ascending order")
        every.append(found)
    positions = sorted(each for found in every for each in found)
    what = f"{num_tokens} tokens on {num_ranks} ranks: the positions of all ranks together"
    expect_equal(positions, list(range(num_tokens)), what)
    return every


def two_chunks_for_each_rank(part: ZigZag) -> None:
    """8 tokens on 2 ranks, and 12 on 3:"""
    expect_equal(part(8, 0, 2), [0, 1, 6, 7], "8 tokens, rank 0 of 2")
    expect_equal(part(8, 1, 2), [2, 3, 4, 5], "8 tokens, rank 1 of 2")
    expect_equal(part(12, 1, 3), [2, 3, 8, 9], "12 tokens, rank 1 of 3")


def one_rank_has_all(part: ZigZag) -> None:
    """one rank, and few tokens:"""
    for num_tokens in (0, 1, 2, 5):
        expect_equal(part(num_tokens, 0, 1), list(range(num_tokens)), f"{num_tokens} tokens")
    expect_equal(part(3, 0, 2), [0], "3 tokens, rank 0 of 2")
    expect_equal(part(3, 1, 2), [1, 2], "3 tokens, rank 1 of 2")
    expect_equal(part(1, 1, 2), [], "1 token, rank 1 of 2")


def tokens_that_do_not_divide(part: ZigZag) -> None:
    """tokens that do not divide: the first chunks have one more:"""
    expect_equal(part(10, 0, 2), [0, 1, 2, 8, 9], "10 tokens, rank 0 of 2")
    expect_equal(part(10, 1, 2), [3, 4, 5, 6, 7], "10 tokens, rank 1 of 2")
    for num_tokens in range(30):
        for num_ranks in (1, 2, 3, 4, 7):
            every = _positions(part, num_tokens, num_ranks)
            size, more = divmod(num_tokens, 2 * num_ranks)
            for rank, found in enumerate(every):
                right = 2 * size + (rank < more) + (2 * num_ranks - 1 - rank < more)
                what = f"{num_tokens} tokens, rank {rank} of {num_ranks}: how many it gets"
                expect_equal(len(found), right, what)


def each_rank_has_the_same_work(part: ZigZag) -> None:
    """the pairs of query and key of each rank, for tokens that divide:"""
    for num_ranks in (2, 3, 4):
        num_tokens = 4 * num_ranks
        whole = list(range(num_tokens))
        pairs = [num_pairs(each, whole) for each in _positions(part, num_tokens, num_ranks)]
        what = f"{num_tokens} tokens on {num_ranks} ranks: the pairs of query and key by rank"
        expect_equal(pairs, [pairs[0]] * num_ranks, what)


# The merge

AXES = ("token", "head", "dimension")


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _expect_merged(
    part: MergeParts, parts: tuple[Tensor, ...], right: tuple[Tensor, Tensor], what: str
) -> None:
    given = tuple(each.clone() for each in parts)
    found = part(*given)
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    expect(is_pair, f"{what}: got {type(found).__name__}; return an output and its lse.")
    expect_close(found[0], right[0], f"{what}: the output", AXES)
    expect_close(found[1], right[1], f"{what}: the lse", AXES[:2])
    same = all(torch.equal(mine, its) for mine, its in zip(given, parts, strict=True))
    expect(same, f"{what}: the four tensors must not change.")


def _attention(seed: int, num_keys: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values: 3 queries after all keys, 2 heads, 4 dimensions."""
    q, k, v = (
        _random(seed + each, size, 2, 4) for each, size in enumerate((3, num_keys, num_keys))
    )
    return scale * q, k, v


def _halves(q: Tensor, k: Tensor, v: Tensor, cut: int) -> tuple[tuple[Tensor, ...], Any]:
    """Return both parts of the keys, and the attention over all of them."""
    places, last = list(range(len(k))), [len(k)] * len(q)
    first = attend_part(q, k[:cut], v[:cut], last, places[:cut])
    second = attend_part(q, k[cut:], v[cut:], last, places[cut:])
    return (*first, *second), attend_part(q, k, v, last, places)


def two_halves_of_the_keys(part: MergeParts) -> None:
    """attention over 8 keys, from two halves:"""
    for seed in (1, 2):
        parts, whole = _halves(*_attention(seed, 8), 4)
        _expect_merged(part, parts, whole, "two halves of 8 keys")


def uneven_parts(part: MergeParts) -> None:
    """parts with 1 and with 7 keys:"""
    for cut in (1, 7):
        parts, whole = _halves(*_attention(3, 8), cut)
        _expect_merged(part, parts, whole, f"{cut} and {8 - cut} keys")


def large_scores(part: MergeParts) -> None:
    """scores whose exponentials are too large, or too small, for float32:"""
    for scale in (100.0, 400.0):
        parts, whole = _halves(*_attention(4, 6, scale), 3)
        _expect_merged(part, parts, whole, f"scores up to {float(whole[1].abs().max()):.0f}")
    out, lse = _random(5, 2, 1, 3), torch.full((2, 1), -300.0)
    parts = (out, lse, out + 2.0, lse)
    right = (out + 1.0, lse + torch.tensor(2.0).log())
    _expect_merged(part, parts, right, "two parts with an lse of -300")


def a_token_that_sees_nothing_there(part: MergeParts) -> None:
    """tokens that see no key of a part:"""
    for seed in (6, 7):
        out, lse = _random(seed, 3, 2, 4), _random(seed + 10, 3, 2)
        none = torch.full_like(lse, -torch.inf)
        _expect_merged(part, (out, lse, torch.zeros_like(out), none), (out, lse), "an empty part")
        _expect_merged(part, (out + 3.0, none, out, lse), (out, lse), "an empty first part")


def a_token_that_sees_nothing_at_all(part: MergeParts) -> None:
    """tokens that see no key of either part:"""
    out, lse = _random(8, 2, 2, 3), _random(9, 2, 2)
    lse[0] = -torch.inf
    other_out, other_lse = _random(10, 2, 2, 3), lse.clone()
    right = (out + other_out) / 2
    right[0] = 0.0
    merged = lse + torch.tensor(2.0).log()
    _expect_merged(part, (out, lse, other_out, other_lse), (right, merged), "two empty parts")


def in_any_order(part: MergeParts) -> None:
    """three parts, merged in each order:"""
    q, k, v = _attention(11, 9)
    last = [9] * 3
    parts = [attend_part(q, k[i:j], v[i:j], last, range(i, j)) for i, j in ((0, 2), (2, 6), (6, 9))]
    whole = attend_part(q, k, v, last, range(9))
    for a, b, c in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        merged = part(*parts[a], *parts[b])
        _expect_merged(part, (*merged, *parts[c]), whole, f"the parts {a}, {b} and {c}")


def a_ring_with_your_merge(part: MergeParts) -> None:
    """causal attention of 7 tokens on 3 ranks in a ring:"""
    q, k, v = (_random(seed, 7, 2, 4) for seed in (12, 13, 14))
    right, _ = attend_part(q, k, v, range(7), range(7))
    found = ring_attention(q, k, v, [[0, 5, 6], [1, 4], [2, 3]], part)
    expect_close(found, right, "the attention of 7 tokens on 3 ranks", AXES)


CHECKS = {
    "zig_zag": (
        two_chunks_for_each_rank,
        one_rank_has_all,
        tokens_that_do_not_divide,
        each_rank_has_the_same_work,
    ),
    "merge_parts": (
        two_halves_of_the_keys,
        uneven_parts,
        large_scores,
        a_token_that_sees_nothing_there,
        a_token_that_sees_nothing_at_all,
        in_any_order,
        a_ring_with_your_merge,
    ),
}

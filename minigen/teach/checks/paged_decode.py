"""Checks of chapter 33's paged decode: blocks, tiles, groups, splits, and what is loaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minigen.model.attention import attention_naive
from minigen.teach.accesses import Access
from minigen.teach.checks.paged_contexts import (
    Contexts,
    contexts,
    expect_loaded_once,
    expect_written,
    joined,
)
from minigen.teach.checks.watching import watched
from minigen.teach.messages import expect_close
from minigen.teach.paged_launch import launch_decode, no_parts

HEAD = ("sequence", "query head", "dimension")
TILE = 8


def _decoded(
    part: Any,
    made: Contexts,
    what: str,
    group: int = 1,
    splits: int = 1,
    change: Callable[[Tensor], Tensor] = torch.clone,
) -> list[Access]:
    """The kernel's parts, joined, are the attention of each query over its own context."""
    kv_heads, head_dim = made.keys.shape[2:]
    generator = torch.Generator().manual_seed(35)
    q = change(torch.randn(len(made.own), kv_heads * group, head_dim, generator=generator))
    parts = no_parts(len(q) * kv_heads * group, splits, head_dim)
    memory = (made.keys, made.values, made.tables, made.lengths)
    accesses = watched(
        lambda: launch_decode(part, q, *memory, parts, TILE),
        q=q,
        keys=made.keys,
        values=made.values,
        tables=made.tables,
        lengths=made.lengths,
        **parts._asdict(),
    )
    expect_written(parts, what)
    naive = [attention_naive(one[None], *own) for one, own in zip(q, made.own, strict=True)]
    found = joined(parts).unflatten(0, q.shape[:2])
    expect_close(found, torch.cat(naive).double(), what, HEAD, 1e-3)
    return accesses


def one_token_is_its_own_value(part: Any) -> None:
    """a context of one token:"""
    _decoded(part, contexts([1], 8), "a context of one token")


def tokens_are_found_through_the_table(part: Any) -> None:
    """eight tokens in blocks of four that lie in no order:"""
    _decoded(part, contexts([8], 4), "8 tokens in blocks of 4")


def the_rest_of_a_tile_is_masked(part: Any) -> None:
    """a context that ends within a tile and within a block:"""
    _decoded(part, contexts([6], 4), "6 tokens in blocks of 4")


def tiles_follow_each_other(part: Any) -> None:
    """a context of several tiles, its largest score in the middle:"""
    made = contexts([29], 4)
    for token in (10, 20):
        block = made.tables[0, token // 4]
        made.keys[block, token % 4] *= 3
        made.own[0][0][token] *= 3
    _decoded(part, made, "29 tokens, in tiles of 8")


def sequences_have_their_own_tables(part: Any) -> None:
    """three sequences of different lengths:"""
    _decoded(part, contexts([3, 20, 8], 4), "contexts of 3, 20 and 8 tokens")


def query_heads_share_a_kv_head(part: Any) -> None:
    """two KV heads of three query heads each, 20 numbers wide:"""
    made = contexts([9, 5], 4, kv_heads=2, head_dim=20, spare=3)
    _decoded(part, made, "6 query heads and 2 KV heads", group=3)


def _signed(length: int, sign: Callable[[int], int]) -> Contexts:
    """A context whose keys are all above 0 or below it, as `sign(position)` has it."""
    made = contexts([length], 4)
    keys = made.own[0][0]
    for position in range(length):
        keys[position] = sign(position) * keys[position].abs()
        made.keys[made.tables[0, position // 4], position % 4] = keys[position]
    return made


def large_products_do_not_overflow(part: Any) -> None:
    """scores in the hundreds, of either sign:"""
    _decoded(part, contexts([20], 4), "scores of about 300", change=lambda q: 200 * q)
    below = _signed(20, lambda position: -1)
    _decoded(part, below, "scores far below 0", change=lambda q: 200 * q.abs())
    falling = _signed(20, lambda position: 1 if position < TILE else -1)
    _decoded(part, falling, "large scores, then small ones", change=lambda q: 200 * q.abs())


def splits_share_the_context(part: Any) -> None:
    """two splits, and four of which some get no token:"""
    _decoded(part, contexts([29, 9], 4), "2 splits of 29 and of 9 tokens", splits=2)
    _decoded(part, contexts([3, 40], 4), "4 splits of 3 and of 40 tokens", splits=4)


def everything_is_loaded_once(part: Any) -> None:
    """the numbers that are loaded, counted:"""
    made = contexts([29, 9], 4, kv_heads=2, head_dim=20)
    accesses = _decoded(part, made, "2 splits, groups of 3", group=3, splits=2)
    for name in ("keys", "values"):
        expect_loaded_once(accesses, name, (29 + 9) * 2 * 20)


CHECKS = (
    one_token_is_its_own_value,
    tokens_are_found_through_the_table,
    the_rest_of_a_tile_is_masked,
    tiles_follow_each_other,
    sequences_have_their_own_tables,
    query_heads_share_a_kv_head,
    large_products_do_not_overflow,
    splits_share_the_context,
    everything_is_loaded_once,
)

"""Chapter 33's exercises: gather a context, attend by groups, in tiles and in splits, and join.

The checks put contexts into scattered blocks, and record every load of a kernel.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigen.model.attention import attention_naive
from minigen_course.ch33_paged_attention.kernels import (
    Parts,
    launch_decode,
    launch_gather,
    launch_join,
    no_parts,
)
from minigen_course.ch33_paged_attention.rungs import launch_grouped, launch_tiled
from minigen_course.grading.exercise import Wrong, expect, expect_close
from minigen_course.lab.triton_interpreter import Access, expect_numbers, watched

UNOWNED = 1e3  # in slots that no sequence owns, so that a leak shows in the result
NO_BLOCK = 10**6  # in table entries past the end: its slots are outside the pool


class Contexts(NamedTuple):
    """A layer's keys and values in a pool, block tables, lengths; `own` has them per sequence."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor
    own: list[tuple[Tensor, Tensor]]


def contexts(
    lengths: list[int], block_size: int, kv_heads: int = 1, head_dim: int = 16, spare: int = 0
) -> Contexts:
    """Make sequences with blocks in random order; `spare` unused elements follow each slot."""
    generator = torch.Generator().manual_seed(33)
    counts = [-(-length // block_size) for length in lengths]
    shape = (sum(counts) + 2, block_size, kv_heads * head_dim + spare)
    keys, values = (
        torch.full(shape, UNOWNED)[..., : kv_heads * head_dim].unflatten(-1, (kv_heads, head_dim))
        for _ in range(2)
    )
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables, own = torch.full((len(lengths), max(counts) + 1), NO_BLOCK), []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        new = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        own.append((new[0], new[1]))
        for position in range(length):
            block, slot = blocks[position // block_size], position % block_size
            keys[block, slot], values[block, slot] = new[:, position]
    return Contexts(keys, values, tables, torch.tensor(lengths), own)


def expect_loaded_once(accesses: list[Access], name: str, num_wanted: int) -> None:
    """Raise `Wrong` unless `num_wanted` elements of a tensor are loaded, each exactly once."""
    loads = Counter(
        offset
        for access in accesses
        if access.tensor == name and not access.is_store
        for offset in access.offsets
    )
    total = sum(loads.values())
    expect(
        total == len(loads),
        f"the programs load {total} elements of {name}, but only {len(loads)} different ones; each "
        "should be loaded once, by one program.",
    )
    expect(
        total == num_wanted,
        f"the programs load {total} elements of {name}; they should load the {num_wanted} that are "
        "needed, and mask the rest.",
    )


def expect_written(parts: Parts, what: str) -> None:
    """Raise `Wrong` unless every row and split has a maximum and a sum."""
    for name, tensor in (("maximum", parts.maxima), ("sum", parts.sums)):
        missing = tensor.isnan().nonzero()
        if len(missing):
            row, split = missing[0].tolist()
            raise Wrong(
                f"{what}: the {name} of row {row}, split {split} was not stored, or is nan; every "
                "program should store it, even if its split has no tokens."
            )


def joined(parts: Parts) -> Tensor:
    """Return the attention that the parts give together, in double precision."""
    mixed, maxima, sums = (each.double() for each in parts)
    weights = (maxima - maxima.amax(dim=1, keepdim=True)).exp2()
    return (mixed * weights.unsqueeze(-1)).sum(1) / (sums * weights).sum(1, keepdim=True)


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
    """Check that the kernel's parts, joined, are each query's attention over its own context."""
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


def _tiled(
    part: Any,
    made: Contexts,
    what: str,
    group: int = 1,
    change: Callable[[Tensor], Tensor] = torch.clone,
) -> list[Access]:
    """Check that the tiled kernel stores each query's attention over its own context."""
    kv_heads, head_dim = made.keys.shape[2:]
    generator = torch.Generator().manual_seed(35)
    q = change(torch.randn(len(made.own), kv_heads * group, head_dim, generator=generator))
    mixed = torch.full(q.shape, torch.nan)
    memory = (made.keys, made.values, made.tables, made.lengths)
    accesses = watched(
        lambda: launch_tiled(part, q, *memory, mixed, TILE),
        q=q,
        keys=made.keys,
        values=made.values,
        tables=made.tables,
        lengths=made.lengths,
        mixed=mixed,
    )
    expect_numbers(mixed, what, HEAD)
    naive = [attention_naive(one[None], *own) for one, own in zip(q, made.own, strict=True)]
    expect_close(mixed, torch.cat(naive), what, HEAD, 1e-3)
    return accesses


def _signed(length: int, sign: Callable[[int], int]) -> Contexts:
    """Make a context whose keys are all positive or all negative, by `sign(position)`."""
    made = contexts([length], 4)
    keys = made.own[0][0]
    for position in range(length):
        keys[position] = sign(position) * keys[position].abs()
        made.keys[made.tables[0, position // 4], position % 4] = keys[position]
    return made


def _in_place(run: Callable[..., list[Access]]) -> tuple[Callable[[Any], None], ...]:
    """Return the checks that the tiled and the split kernel share; `run` is how each is run."""

    def one_token_is_its_own_value(part: Any) -> None:
        """a context of one token:"""
        run(part, contexts([1], 8), "a context of one token")

    def tokens_are_found_through_the_table(part: Any) -> None:
        """eight tokens in blocks of four, in random order:"""
        run(part, contexts([8], 4), "8 tokens in blocks of 4")

    def the_rest_of_a_tile_is_masked(part: Any) -> None:
        """a context that ends within a tile and within a block:"""
        run(part, contexts([6], 4), "6 tokens in blocks of 4")

    def tiles_follow_each_other(part: Any) -> None:
        """a context of several tiles, with the largest scores in the middle:"""
        made = contexts([29], 4)
        for token in (10, 20):
            block = made.tables[0, token // 4]
            made.keys[block, token % 4] *= 3
            made.own[0][0][token] *= 3
        run(part, made, "29 tokens, in tiles of 8")

    def sequences_have_their_own_tables(part: Any) -> None:
        """three sequences of different lengths:"""
        run(part, contexts([3, 20, 8], 4), "contexts of 3, 20 and 8 tokens")

    def query_heads_share_a_kv_head(part: Any) -> None:
        """two KV heads with three query heads each, and a head_dim of 20:"""
        made = contexts([9, 5], 4, kv_heads=2, head_dim=20, spare=3)
        run(part, made, "6 query heads and 2 KV heads", group=3)

    def large_products_do_not_overflow(part: Any) -> None:
        """scores in the hundreds, of either sign:"""
        run(part, contexts([20], 4), "scores of about 300", change=lambda q: 200 * q)
        below = _signed(20, lambda position: -1)
        run(part, below, "scores far below 0", change=lambda q: 200 * q.abs())
        falling = _signed(20, lambda position: 1 if position < TILE else -1)
        run(part, falling, "large scores, then small ones", change=lambda q: 200 * q.abs())

    return (
        one_token_is_its_own_value,
        tokens_are_found_through_the_table,
        the_rest_of_a_tile_is_masked,
        tiles_follow_each_other,
        sequences_have_their_own_tables,
        query_heads_share_a_kv_head,
        large_products_do_not_overflow,
    )


def tiles_are_loaded_once(part: Any) -> None:
    """the number of elements that are loaded:"""
    made = contexts([29, 9], 4, kv_heads=2, head_dim=20)
    accesses = _tiled(part, made, "contexts of 29 and of 9 tokens", group=3)
    for name in ("keys", "values"):
        expect_loaded_once(accesses, name, (29 + 9) * 2 * 20)
    expect_loaded_once(accesses, "q", 2 * 6 * 20)


def splits_share_the_context(part: Any) -> None:
    """two splits, and four splits of which some have no tokens:"""
    _decoded(part, contexts([29, 9], 4), "2 splits of 29 and of 9 tokens", splits=2)
    _decoded(part, contexts([3, 40], 4), "4 splits of 3 and of 40 tokens", splits=4)


def keys_and_values_are_loaded_once(part: Any) -> None:
    """the number of elements that are loaded:"""
    made = contexts([29, 9], 4, kv_heads=2, head_dim=20)
    accesses = _decoded(part, made, "2 splits, groups of 3", group=3, splits=2)
    for name in ("keys", "values"):
        expect_loaded_once(accesses, name, (29 + 9) * 2 * 20)


def _grouped(
    part: Any,
    length: int,
    what: str,
    kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 16,
    size: float = 1,
    same_sign: bool = False,
) -> list[Access]:
    """Check the grouped kernel on a context of random keys; queries are of this size.

    With `same_sign` all scores are negative.
    """
    generator = torch.Generator().manual_seed(36)
    q = size * torch.randn(kv_heads * group, head_dim, generator=generator)
    keys, values = torch.randn(2, length, kv_heads, head_dim, generator=generator)
    if same_sign:
        q, keys = q.abs(), -keys.abs()
    mixed = torch.full(q.shape, torch.nan)
    accesses = watched(
        lambda: launch_grouped(part, q, keys, values, mixed),
        q=q,
        keys=keys,
        values=values,
        mixed=mixed,
    )
    expect_numbers(mixed, what, HEAD[1:])
    expect_close(mixed, attention_naive(q[None], keys, values)[0], what, HEAD[1:], 1e-3)
    return accesses


def one_head_mixes_the_values(part: Any) -> None:
    """one query head, and a context that fills its tile:"""
    _grouped(part, 16, "one query head, 16 tokens")


def a_context_need_not_fill_its_tile(part: Any) -> None:
    """contexts of 1 and of 21 tokens:"""
    _grouped(part, 1, "one query head, a single token")
    _grouped(part, 21, "one query head, 21 tokens")


def a_group_shares_its_kv_head(part: Any) -> None:
    """one KV head with three query heads:"""
    _grouped(part, 16, "3 query heads, 1 KV head", group=3)


def kv_heads_are_apart(part: Any) -> None:
    """two KV heads with three query heads each:"""
    _grouped(part, 21, "6 query heads, 2 KV heads", kv_heads=2, group=3)


def a_head_dim_is_any_number(part: Any) -> None:
    """a head_dim of 20:"""
    _grouped(part, 9, "a head_dim of 20", kv_heads=2, group=2, head_dim=20)


def large_scores_leave_numbers(part: Any) -> None:
    """scores in the hundreds, of either sign:"""
    _grouped(part, 21, "scores of about 300", group=3, size=200)
    _grouped(part, 21, "scores far below 0", group=3, size=200, same_sign=True)


def a_group_loads_once(part: Any) -> None:
    """the number of elements that are loaded:"""
    accesses = _grouped(part, 21, "3 query heads for each KV head", 2, 3, 20)
    expect_loaded_once(accesses, "keys", 21 * 2 * 20)
    expect_loaded_once(accesses, "values", 21 * 2 * 20)
    expect_loaded_once(accesses, "q", 6 * 20)


ROW = ("position", "head", "dimension")


def _gathered(part: Any, made: Contexts, what: str) -> list[Access]:
    """Check that the kernel puts a sequence's keys in order, and return its loads and stores."""
    ((keys, _),) = made.own
    gathered = torch.full(keys.shape, torch.nan)
    accesses = watched(
        lambda: launch_gather(part, made.keys, made.tables[0], len(keys), gathered, TILE),
        half=made.keys,
        table=made.tables,
        gathered=gathered,
    )
    expect_numbers(gathered, what, ROW)
    expect_close(gathered, keys, what, ROW)
    return accesses


def a_block_is_copied(part: Any) -> None:
    """a sequence that fills one block:"""
    _gathered(part, contexts([8], 8), "8 positions in one block")


def blocks_come_in_the_order_of_the_table(part: Any) -> None:
    """three full blocks in random order:"""
    _gathered(part, contexts([12], 4), "12 positions in blocks of 4")
    _gathered(part, contexts([6], 1), "6 positions in blocks of 1")


def the_last_block_need_not_be_full(part: Any) -> None:
    """a sequence that ends within a block, and within a tile:"""
    _gathered(part, contexts([10], 4), "10 positions in blocks of 4")
    _gathered(part, contexts([1], 4), "a single position")


def each_program_has_its_own_tile(part: Any) -> None:
    """more positions than one tile:"""
    _gathered(part, contexts([29], 4), "29 positions, in tiles of 8")


def rows_have_any_width(part: Any) -> None:
    """three heads with a head_dim of 20, so 60 elements per row, and a gap after each slot:"""
    made = contexts([11], 4, kv_heads=3, head_dim=20)
    _gathered(part, made, "11 positions of 3 heads")
    made = contexts([11], 4, kv_heads=3, head_dim=20, spare=5)
    _gathered(part, made, "11 positions, slots 65 elements apart")


def nothing_is_loaded_twice(part: Any) -> None:
    """the number of elements that are loaded:"""
    accesses = _gathered(part, contexts([13], 4, head_dim=20), "13 positions of 20 elements")
    expect_loaded_once(accesses, "half", 13 * 20)


def _of_scores(scores: Tensor, values: Tensor, bounds: list[tuple[int, int]]) -> Parts:
    """Compute the parts of splits of these keys, for rows of `scores`, with weights 2^score."""
    rows, dim = len(scores), values.shape[1]
    parts = Parts(*(torch.zeros_like(each) for each in no_parts(rows, len(bounds), dim)))
    for split, (begin, end) in enumerate(bounds):
        own = scores[:, begin:end]
        parts.maxima[:, split] = own.amax(dim=1) if end > begin else -torch.inf
        weights = (own - parts.maxima[:, split : split + 1]).exp2()
        parts.sums[:, split] = weights.sum(dim=1)
        parts.mixed[:, split] = weights @ values[begin:end]
    return parts


def _join(
    part: Any,
    bounds: list[tuple[int, int]],
    what: str,
    rows: int = 2,
    size: float = 1,
    dim: int = 8,
    shift: float = 0,
) -> list[Access]:
    """Check a join of splits with these bounds; scores are random, of this size around `shift`."""
    generator = torch.Generator().manual_seed(34)
    num_keys = max(end for _, end in bounds)
    scores = size * torch.randn(rows, num_keys, generator=generator) + shift
    values = torch.randn(num_keys, dim, generator=generator)
    parts, mixed = _of_scores(scores, values, bounds), torch.full((rows, dim), torch.nan)
    accesses = watched(lambda: launch_join(part, parts, mixed), **parts._asdict(), joined=mixed)
    expect_numbers(mixed, what, ("row", "dimension"))
    weights = (scores.double() - scores.double().amax(dim=1, keepdim=True)).exp2()
    expected = weights / weights.sum(dim=1, keepdim=True) @ values.double()
    expect_close(mixed, expected, what, ("row", "dimension"))
    return accesses


def one_split_is_divided_by_its_sum(part: Any) -> None:
    """a single split, which has all tokens:"""
    _join(part, [(0, 5)], "one split of 5 tokens")


def two_splits_are_rescaled_to_one_maximum(part: Any) -> None:
    """two splits with different maxima:"""
    _join(part, [(0, 3), (3, 9)], "splits of 3 and 6 tokens", size=3)


def every_row_has_its_own_splits(part: Any) -> None:
    """five rows of four splits:"""
    _join(part, [(0, 2), (2, 4), (4, 6), (6, 8)], "4 splits", rows=5, size=2)


def sizes_need_not_be_powers_of_two(part: Any) -> None:
    """three splits, and a head_dim of 20:"""
    _join(part, [(0, 4), (4, 8), (8, 11)], "3 splits", rows=3, size=2, dim=20)


def a_split_of_no_tokens_counts_nothing(part: Any) -> None:
    """a context too short for its last split:"""
    _join(part, [(0, 4), (4, 6), (6, 6)], "splits of 4, 2 and 0 tokens", rows=3, size=2)


def large_scores_do_not_overflow(part: Any) -> None:
    """scores in the hundreds, of either sign:"""
    _join(part, [(0, 4), (4, 8)], "scores of about 300", size=300)
    _join(part, [(0, 4), (4, 8), (8, 9)], "scores of about -1,000", shift=-1000)


def every_part_is_loaded_once(part: Any) -> None:
    """the number of elements that are loaded:"""
    accesses = _join(part, [(0, 4), (4, 8), (8, 11)], "3 splits", rows=3, dim=20)
    for name, count in (("mixed", 3 * 3 * 20), ("maxima", 9), ("sums", 9)):
        expect_loaded_once(accesses, name, count)


CHECKS = {
    "gather_kernel": (
        a_block_is_copied,
        blocks_come_in_the_order_of_the_table,
        the_last_block_need_not_be_full,
        each_program_has_its_own_tile,
        rows_have_any_width,
        nothing_is_loaded_twice,
    ),
    "grouped_kernel": (
        one_head_mixes_the_values,
        a_context_need_not_fill_its_tile,
        a_group_shares_its_kv_head,
        kv_heads_are_apart,
        a_head_dim_is_any_number,
        large_scores_leave_numbers,
        a_group_loads_once,
    ),
    "tiled_kernel": (*_in_place(_tiled), tiles_are_loaded_once),
    "join_kernel": (
        one_split_is_divided_by_its_sum,
        two_splits_are_rescaled_to_one_maximum,
        every_row_has_its_own_splits,
        sizes_need_not_be_powers_of_two,
        a_split_of_no_tokens_counts_nothing,
        large_scores_do_not_overflow,
        every_part_is_loaded_once,
    ),
    "decode_kernel": (
        *_in_place(_decoded),
        splits_share_the_context,
        keys_and_values_are_loaded_once,
    ),
}

"""Attention over a paged cache in place: two products with the cache where weights would be.

A query's scores are products with tiles of keys, a lane for each of sixteen tokens; what comes out
are products of their softmax with pairs of values. Both are `add_bfloat_dots`, and no copy of the
cache is gathered.

Bytes read by a query: 2 x 2 x head_dim x context for each KV head, once for the query heads that
share it. Source: PagedAttention, Kwon et al. 2023.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from minigen.kernels.lanes import (
    all_lanes,
    keep_between,
    larger,
    largest_lane,
    load,
    prefetch,
    store,
    store_bfloat16,
    sum_of_lanes,
)
from minigen.kernels.paging import TILE, tile_start
from minigen.kernels.rows import exponential
from minigen.kernels.tiles import EIGHT, FOUR, ONE, TWO, add_bfloat_dots, store_tile, zeros

LOWEST = np.float32(-3.0e38)


@njit
def _score(tokens, shape, first_tile, num_tiles, table, layer, head, cache, scratch, query, at):
    """Scores of the tile's queries against every key; row t from `at + t * most_keys` on.

    Two tiles of keys go side by side, so that one's sums need not wait for each other. On its way
    it asks for what comes next, since blocks lie anywhere in memory: keys, and values.
    """
    half, last = shape.head_dim // 2, num_tiles - 1
    for tile in range(first_tile, num_tiles, 2):
        first = tile_start(shape, layer, 0, table, head, tile)
        second = tile_start(shape, layer, 0, table, head, min(tile + 1, last))
        values = tile_start(shape, layer, 1, table, head, tile)
        more_values = tile_start(shape, layer, 1, table, head, min(tile + 1, last))
        later = tile_start(shape, layer, 0, table, head, min(tile + 2, last))
        still_later = tile_start(shape, layer, 0, table, head, min(tile + 3, last))
        scores, more_scores = zeros(tokens), zeros(tokens)
        for pair in range(half):
            number = query * half + pair
            for start in (values, more_values, later, still_later):
                prefetch(cache.words, start + pair * 16)
            keys, more_keys = (
                load(cache.words, first + pair * 16),
                load(cache.words, second + pair * 16),
            )
            scores = add_bfloat_dots(scores, keys, scratch.queries, number, half)
            more_scores = add_bfloat_dots(more_scores, more_keys, scratch.queries, number, half)
        store_tile(scratch.scores, at + tile * TILE, scratch.most_keys, scores)
        if tile < last:
            store_tile(scratch.scores, at + (tile + 1) * TILE, scratch.most_keys, more_scores)


@njit
def _softmax(scores, shares, at, first_tile, num_tiles, low, high):
    """Shares e^(score - largest) of the keys from `low` to `high`, 0 beside them; their sum."""
    largest = all_lanes(LOWEST)
    for tile in range(first_tile, num_tiles):
        key = tile * TILE
        seen = load(scores, at + key)
        if key < low or key + TILE > high:
            seen = keep_between(seen, key, low, high, LOWEST)
            store(scores, at + key, seen)
        largest = larger(largest, seen)
    peak = all_lanes(largest_lane(largest))
    total = all_lanes(np.float32(0.0))
    for tile in range(first_tile, num_tiles):
        key = tile * TILE
        share = exponential(load(scores, at + key) - peak)
        if key < low or key + TILE > high:
            share = keep_between(share, key, low, high, np.float32(0.0))
        total = total + share
        store_bfloat16(shares, at + key, share)
    return sum_of_lanes(total)


@njit
def _mix(
    tokens, shape, first_tile, num_keys, table, layer, head, cache, scratch, at, column, mixed
):
    """Thirty-two columns of the values, mixed by the tile's shares."""
    head_dim, stride = shape.head_dim, scratch.most_keys // 2
    low, high = zeros(tokens), zeros(tokens)
    last = (num_keys - 1) // TILE
    for tile in range(first_tile, last + 1):
        values = tile_start(shape, layer, 1, table, head, tile) + column
        pairs = 8 if tile < last else (num_keys - tile * TILE + 1) // 2
        for pair in range(pairs):
            share = at // 2 + tile * 8 + pair
            numbers = load(cache.words, values + pair * head_dim)
            more_numbers = load(cache.words, values + pair * head_dim + 16)
            low = add_bfloat_dots(low, numbers, scratch.shares, share, stride)
            high = add_bfloat_dots(high, more_numbers, scratch.shares, share, stride)
    store_tile(mixed, column, head_dim, low)
    store_tile(mixed, column + 16, head_dim, high)


class Rows(NamedTuple):
    """A task: up to eight query rows of one sequence and one KV head.

    Row r is query head r % group of the sequence's new token r // group; `token` is the packed
    number of its first new token, `context` its length with all of them.
    """

    first: int
    count: int
    head: int
    token: int
    num_tokens: int
    context: int
    table: Any


@njit
def _attend_tile(tokens, rows, shape, layer, window, cache, scratch, worker, mixed, out):
    head_dim, group = shape.head_dim, shape.q_heads // shape.kv_heads
    table, head = rows.table, rows.head
    before = rows.context - rows.num_tokens
    earliest = before + rows.first // group + 1  # tokens that the first row sees, itself included
    num_keys = before + (rows.first + rows.count - 1) // group + 1
    first_tile = max(0, earliest - window) // TILE
    num_tiles = (num_keys + TILE - 1) // TILE
    at = worker * 8 * scratch.most_keys
    query = head * scratch.query_rows + rows.token * group + rows.first
    _score(tokens, shape, first_tile, num_tiles, table, layer, head, cache, scratch, query, at)
    sums = mixed[8 * head_dim :]
    for row in range(rows.count):
        seen = before + (rows.first + row) // group + 1
        own = at + row * scratch.most_keys
        sums[row] = _softmax(
            scratch.scores, scratch.share_halves, own, first_tile, num_tiles,
            max(0, seen - window), seen,
        )  # fmt: skip
    for column in range(0, head_dim, 32):
        _mix(
            tokens, shape, first_tile, num_keys, table, layer, head, cache, scratch, at, column,
            mixed,
        )  # fmt: skip
    for row in range(rows.count):
        token = rows.token + (rows.first + row) // group
        to = (token * shape.q_heads + head * group + (rows.first + row) % group) * head_dim
        share = all_lanes(np.float32(1.0) / sums[row])
        for column in range(0, head_dim, 16):
            store(out, to + column, load(mixed, row * head_dim + column) * share)


@njit
def _attend_rows(rows, shape, layer, window, cache, scratch, worker, mixed, out):
    """The rows by the smallest tile that holds them."""
    if rows.count > 4:
        _attend_tile(EIGHT, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    elif rows.count > 2:
        _attend_tile(FOUR, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    elif rows.count == 2:
        _attend_tile(TWO, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    elif rows.count == 1:
        _attend_tile(ONE, rows, shape, layer, window, cache, scratch, worker, mixed, out)


@njit
def _ask_for_keys(rows, shape, layer, window, cache):
    """Ask memory for the first keys of a task, while the one before it is done."""
    first_seen = (
        rows.context - rows.num_tokens + rows.first // (shape.q_heads // shape.kv_heads) + 1
    )
    tile = max(0, first_seen - window) // TILE
    keys = tile_start(shape, layer, 0, rows.table, rows.head, tile)
    for pair in range(shape.head_dim // 2):
        prefetch(cache.words, keys + pair * 16)


@njit(parallel=True)
def attend(shape, layer, window, packed, cache, scratch, num_workers, out):
    """out[tokens, q_heads x head_dim] = attention of the queries in `scratch` over the cache.

    Workers take tasks in turn, so that long and short ones spread evenly.
    """
    group = shape.q_heads // shape.kv_heads
    for worker in prange(num_workers):
        mixed = np.empty(8 * shape.head_dim + 8, np.float32)
        waiting = Rows(0, 0, 0, 0, 0, 0, packed.block_tables[0])
        task = 0
        for sequence in range(len(packed.query_starts) - 1):
            token = packed.query_starts[sequence]
            num_tokens = packed.query_starts[sequence + 1] - token
            context, table = packed.context_lens[sequence], packed.block_tables[sequence]
            for head in range(shape.kv_heads):
                for first in range(0, num_tokens * group, 8):
                    if task % num_workers == worker:
                        count = min(8, num_tokens * group - first)
                        rows = Rows(first, count, head, token, num_tokens, context, table)
                        _ask_for_keys(rows, shape, layer, window, cache)
                        _attend_rows(
                            waiting, shape, layer, window, cache, scratch, worker, mixed, out
                        )
                        waiting = rows
                    task += 1
        _attend_rows(waiting, shape, layer, window, cache, scratch, worker, mixed, out)

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
from minigen.kernels.paging import CHUNK, TILE, tile_start
from minigen.kernels.rows import exponential
from minigen.kernels.tiles import (
    EIGHT,
    FOUR,
    ONE,
    TWO,
    add_bfloat_dots,
    add_stored,
    store_tile,
    zeros,
)

LOWEST = np.float32(-3.0e38)


@njit
def _score(tokens, shape, begin, end, last, table, layer, head, cache, scratch, query, at):
    """Scores of the tile's queries against a chunk's keys; row t from `at + t * CHUNK` on.

    Two tiles of keys go side by side, so that one's sums need not wait for each other. On its way
    it asks for what comes next, since blocks lie anywhere in memory: keys up to the tile `last`,
    and the chunk's values.
    """
    half = shape.head_dim // 2
    for tile in range(begin, end, 2):
        other = min(tile + 1, end - 1)
        first = tile_start(shape, layer, 0, table, head, tile)
        second = tile_start(shape, layer, 0, table, head, other)
        values = tile_start(shape, layer, 1, table, head, tile)
        more_values = tile_start(shape, layer, 1, table, head, other)
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
        store_tile(scratch.scores, at + (tile - begin) * TILE, CHUNK, scores)
        if other > tile:
            store_tile(scratch.scores, at + (other - begin) * TILE, CHUNK, more_scores)


@njit
def _softmax(scores, shares, at, begin, end, low, high, row, sums, peaks):
    """Shares e^(score - peak) of a chunk's keys from `low` to `high`, and 0 beside them.

    The peak is the largest score so far. Returns e^(peak before - peak): whatever was added up
    before is to be multiplied with it. Source: online softmax, Milakov and Gimelshein 2018.
    """
    largest = all_lanes(LOWEST)
    for tile in range(begin, end):
        key, own = tile * TILE, at + (tile - begin) * TILE
        seen = load(scores, own)
        if key < low or key + TILE > high:
            seen = keep_between(seen, key, low, high, LOWEST)
            store(scores, own, seen)
        largest = larger(largest, seen)
    before = peaks[row]
    peak = max(before, largest_lane(largest))
    total = all_lanes(np.float32(0.0))
    for tile in range(begin, end):
        key, own = tile * TILE, at + (tile - begin) * TILE
        share = exponential(load(scores, own) - all_lanes(peak))
        if key < low or key + TILE > high:
            share = keep_between(share, key, low, high, np.float32(0.0))
        total = total + share
        store_bfloat16(shares, own, share)
    factor = largest_lane(exponential(all_lanes(before - peak)))
    sums[row] = sums[row] * factor + sum_of_lanes(total)
    peaks[row] = peak
    return factor


@njit
def _scale(mixed, at, width, factor):
    for column in range(at, at + width, 16):
        store(mixed, column, load(mixed, column) * all_lanes(factor))


@njit
def _mix(
    tokens, shape, begin, end, num_keys, table, layer, head, cache, scratch, at, column, mixed
):
    """Add thirty-two columns of a chunk's values, mixed by the tile's shares."""
    head_dim = shape.head_dim
    low, high = zeros(tokens), zeros(tokens)
    for tile in range(begin, end):
        values = tile_start(shape, layer, 1, table, head, tile) + column
        for pair in range(min(8, (num_keys - tile * TILE + 1) // 2)):
            share = at // 2 + (tile - begin) * 8 + pair
            numbers = load(cache.words, values + pair * head_dim)
            more_numbers = load(cache.words, values + pair * head_dim + 16)
            low = add_bfloat_dots(low, numbers, scratch.shares, share, CHUNK // 2)
            high = add_bfloat_dots(high, more_numbers, scratch.shares, share, CHUNK // 2)
    store_tile(mixed, column, head_dim, add_stored(low, mixed, column, head_dim))
    store_tile(mixed, column + 16, head_dim, add_stored(high, mixed, column + 16, head_dim))


class Rows(NamedTuple):
    """A task: up to eight query rows of one sequence and one KV head.

    Row r is query head r % group of the sequence's new token r // group; `token` is the packed
    number of its first new token, `context` its length with all of them.
    """

    first: int
    num_rows: int
    head: int
    token: int
    num_tokens: int
    context: int
    table: Any


@njit
def _attend_tile(tokens, rows, shape, layer, window, cache, scratch, worker, mixed, out):
    """A chunk of keys and values after the other, each begun at a multiple of `CHUNK`.

    So every row's sums are made in the same order, whatever rows are beside it.
    """
    head_dim, group = shape.head_dim, shape.q_heads // shape.kv_heads
    table, head = rows.table, rows.head
    before = rows.context - rows.num_tokens
    earliest = before + rows.first // group + 1  # tokens that the first row sees, itself included
    num_keys = before + (rows.first + rows.num_rows - 1) // group + 1
    first_tile = max(0, earliest - window) // TILE
    num_tiles = (num_keys + TILE - 1) // TILE
    at = worker * 8 * CHUNK
    query = head * scratch.query_rows + rows.token * group + rows.first
    sums, peaks = mixed[8 * head_dim :], mixed[8 * head_dim + 8 :]
    for column in range(0, 8 * head_dim, 16):
        store(mixed, column, all_lanes(np.float32(0.0)))
    for row in range(8):
        sums[row], peaks[row] = np.float32(0.0), LOWEST
    per_chunk = CHUNK // TILE
    for start in range(first_tile // per_chunk * per_chunk, num_tiles, per_chunk):
        begin, end = max(first_tile, start), min(num_tiles, start + per_chunk)
        _score(
            tokens, shape, begin, end, num_tiles - 1, table, layer, head, cache, scratch, query, at
        )
        for row in range(rows.num_rows):
            seen = before + (rows.first + row) // group + 1
            factor = _softmax(
                scratch.scores, scratch.share_halves, at + row * CHUNK, begin, end,
                max(0, seen - window), seen, row, sums, peaks,
            )  # fmt: skip
            if factor != np.float32(1.0):
                _scale(mixed, row * head_dim, head_dim, factor)
        for column in range(0, head_dim, 32):
            _mix(
                tokens, shape, begin, end, num_keys, table, layer, head, cache, scratch, at,
                column, mixed,
            )  # fmt: skip
    for row in range(rows.num_rows):
        token = rows.token + (rows.first + row) // group
        to = (token * shape.q_heads + head * group + (rows.first + row) % group) * head_dim
        share = all_lanes(np.float32(1.0) / sums[row])
        for column in range(0, head_dim, 16):
            store(out, to + column, load(mixed, row * head_dim + column) * share)


@njit
def _attend_rows(rows, shape, layer, window, cache, scratch, worker, mixed, out):
    """The rows by the smallest tile that holds them."""
    if rows.num_rows > 4:
        _attend_tile(EIGHT, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    elif rows.num_rows > 2:
        _attend_tile(FOUR, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    elif rows.num_rows == 2:
        _attend_tile(TWO, rows, shape, layer, window, cache, scratch, worker, mixed, out)
    else:
        _attend_tile(ONE, rows, shape, layer, window, cache, scratch, worker, mixed, out)


@njit(parallel=True)
def attend(shape, layer, window, packed, cache, scratch, num_workers, out):
    """out[tokens, q_heads x head_dim] = attention of the queries in `scratch` over the cache.

    Workers take tasks in turn, so that long and short ones spread evenly.
    """
    group = shape.q_heads // shape.kv_heads
    for worker in prange(num_workers):
        mixed = np.empty(8 * shape.head_dim + 16, np.float32)  # and their sums and peaks
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
                        _attend_rows(rows, shape, layer, window, cache, scratch, worker, mixed, out)
                    task += 1

"""A KV cache in bfloat16: how keys and values are written, and attention's two products.

Both products are `add_bfloat_dots` on the cache in place.
"""

from minigen.kernels.cpu.kv.layout import CHUNK, TILE
from minigen.kernels.cpu.kv.tile_index import tile_start
from minigen.kernels.cpu.register_tiles import (
    HOLDS_EIGHT_ROWS,
    add_bfloat_dots,
    add_stored,
    in_registers,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.simd import all_lanes, kernel, load, prefetch, store_bfloat16


def write_query(cache, scratch, query, x, at, head_dim, scale):
    """Write a head's query, times `scale`, to row `query` of the scratch."""
    for column in range(0, head_dim, 16):
        numbers = load(x, at + column) * all_lanes(scale)
        store_bfloat16(scratch.query_numbers, query * head_dim + column, numbers)


def write_key(cache, start, lane, x, at, head_dim, buffer):
    """Write a head's key as token `lane` of the tile at word `start`."""
    for column in range(0, head_dim, 16):
        store_bfloat16(buffer, column, load(x, at + column))
    for number in range(head_dim):
        cache.halves[2 * start + (number // 2) * 32 + lane * 2 + number % 2] = buffer[number]


def write_value(cache, start, lane, x, at, head_dim, buffer, alone):
    """Write a head's value as token `lane` of the tile at word `start`.

    Values are multiplied in pairs of tokens, so the second value of a pair is multiplied by 0 while
    it is still missing. It must not be a NaN of the block's previous owner. So if this token is
    `alone` (the next token is not written in this step), the second value is set to 0.
    """
    for column in range(0, head_dim, 16):
        store_bfloat16(buffer, column, load(x, at + column))
    values = 2 * start + (lane // 2) * 2 * head_dim
    for number in range(head_dim):
        cache.halves[values + 2 * number + lane % 2] = buffer[number]
        if alone and lane % 2 == 0:
            cache.halves[values + 2 * number + 1] = 0


def _score_two_tiles(cache, tokens, shape, begin, end, last, rows, layer, scratch, query, at):
    """Write the scores of the tile's queries for a chunk's keys; row t from `at + t * CHUNK` on.

    Two tiles of keys are processed side by side, which gives two independent chains of additions.
    The kernel also prefetches what is read next, because blocks are anywhere in memory: keys up to
    tile `last`, and the chunk's values.
    """
    half, table, head = shape.head_dim // 2, rows.table, rows.head
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


def _score_few_rows(cache, tokens, shape, begin, end, last, rows, layer, scratch, query, at):
    """Write the same scores where registers hold one tile's scores of a few rows.

    A tile of keys lies in L1 while all rows are multiplied with it.
    """
    half, table, head = shape.head_dim // 2, rows.table, rows.head
    few = in_registers(tokens)
    for tile in range(begin, end):
        keys = tile_start(shape, layer, 0, table, head, tile)
        values = tile_start(shape, layer, 1, table, head, tile)
        later = tile_start(shape, layer, 0, table, head, min(tile + 2, last))
        for first in range(0, len(tokens), len(few)):
            scores = zeros(few)
            for pair in range(half):
                if first == 0:
                    prefetch(cache.words, values + pair * 16)
                    prefetch(cache.words, later + pair * 16)
                some = load(cache.words, keys + pair * 16)
                number = (query + first) * half + pair
                scores = add_bfloat_dots(scores, some, scratch.queries, number, half)
            place = at + first * CHUNK + (tile - begin) * TILE
            store_tile(scratch.scores, place, CHUNK, scores)


score = _score_two_tiles if HOLDS_EIGHT_ROWS else _score_few_rows


def quantize_probs(cache, begin, end, low, high, scratch, at):
    """Round a row's probabilities, which have replaced its scores, to bfloat16."""
    for key in range(at, at + (end - begin) * TILE, 16):
        store_bfloat16(scratch.prob_numbers, key, load(scratch.scores, key))


@kernel
def _accumulate_columns(
    cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, column, acc
):
    head_dim = shape.head_dim
    low, high = zeros(tokens), zeros(tokens)
    for tile in range(begin, end):
        values = tile_start(shape, layer, 1, rows.table, rows.head, tile) + column
        for pair in range(min(8, (num_keys - tile * TILE + 1) // 2)):
            prob = at // 2 + (tile - begin) * 8 + pair
            numbers = load(cache.words, values + pair * head_dim)
            more_numbers = load(cache.words, values + pair * head_dim + 16)
            low = add_bfloat_dots(low, numbers, scratch.probs, prob, CHUNK // 2)
            high = add_bfloat_dots(high, more_numbers, scratch.probs, prob, CHUNK // 2)
    store_tile(acc, column, head_dim, add_stored(low, acc, column, head_dim))
    store_tile(acc, column + 16, head_dim, add_stored(high, acc, column + 16, head_dim))


def _accumulate_all_rows(cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, acc):
    """Add a chunk's values, weighted by the tile's probabilities, to `acc`; 32 columns per pass."""
    for column in range(0, shape.head_dim, 32):
        _accumulate_columns(
            cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, column, acc
        )


def _accumulate_few_rows(cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, acc):
    """Add the same where registers hold sixteen columns of a few rows."""
    head_dim, few = shape.head_dim, in_registers(tokens)
    for first in range(0, len(tokens), len(few)):
        for column in range(0, head_dim, 16):
            sums = zeros(few)
            for tile in range(begin, end):
                values = tile_start(shape, layer, 1, rows.table, rows.head, tile) + column
                for pair in range(min(8, (num_keys - tile * TILE + 1) // 2)):
                    prob = (at + first * CHUNK) // 2 + (tile - begin) * 8 + pair
                    numbers = load(cache.words, values + pair * head_dim)
                    sums = add_bfloat_dots(sums, numbers, scratch.probs, prob, CHUNK // 2)
            place = first * head_dim + column
            store_tile(acc, place, head_dim, add_stored(sums, acc, place, head_dim))


accumulate_values = _accumulate_all_rows if HOLDS_EIGHT_ROWS else _accumulate_few_rows

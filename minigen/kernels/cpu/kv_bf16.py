"""Keys and values in bfloat16: how they are written, and their two products with a query's tile.

Both products are `add_bfloat_dots` of what lies in the cache, where it lies.
"""

from numba import njit

from minigen.kernels.cpu.kv_layout import CHUNK, TILE, tile_start
from minigen.kernels.cpu.microkernels import add_bfloat_dots, add_stored, store_tile, zeros
from minigen.kernels.cpu.simd import all_lanes, load, prefetch, store_bfloat16


def write_query(cache, scratch, query, x, at, head_dim, scale):
    """Keep a head's query, times `scale`, as row `query` of the scratch."""
    for column in range(0, head_dim, 16):
        numbers = load(x, at + column) * all_lanes(scale)
        store_bfloat16(scratch.query_halves, query * head_dim + column, numbers)


def write_key(cache, start, lane, x, at, head_dim, room):
    """Keep a head's key as token `lane` of the tile at word `start`."""
    for column in range(0, head_dim, 16):
        store_bfloat16(room, column, load(x, at + column))
    for number in range(head_dim):
        cache.halves[2 * start + (number // 2) * 32 + lane * 2 + number % 2] = room[number]


def write_value(cache, start, lane, x, at, head_dim, room, alone):
    """Keep a head's value as token `lane` of the tile at word `start`.

    A pair's second value is multiplied, by 0, as soon as its first is there: no NaN may stand there
    from whoever had the block before. The token that follows, unless this one is `alone`,
    overwrites it.
    """
    for column in range(0, head_dim, 16):
        store_bfloat16(room, column, load(x, at + column))
    values = 2 * start + (lane // 2) * 2 * head_dim
    for number in range(head_dim):
        cache.halves[values + 2 * number + lane % 2] = room[number]
        if alone and lane % 2 == 0:
            cache.halves[values + 2 * number + 1] = 0


def score(cache, tokens, shape, begin, end, last, table, layer, head, scratch, query, at):
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


def round_shares(cache, begin, end, low, high, scratch, at):
    """Write a row's shares, which stand in its scores' place, as bfloat16."""
    for key in range(at, at + (end - begin) * TILE, 16):
        store_bfloat16(scratch.share_halves, key, load(scratch.scores, key))


@njit
def _mix_columns(
    cache, tokens, shape, begin, end, num_keys, table, layer, head, scratch, at, column, mixed
):
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


def mix(cache, tokens, shape, begin, end, num_keys, table, layer, head, scratch, at, mixed):
    """Add a chunk's values, mixed by the tile's shares, to `mixed`: thirty-two columns a pass."""
    for column in range(0, shape.head_dim, 32):
        _mix_columns(
            cache, tokens, shape, begin, end, num_keys, table, layer, head, scratch, at, column,
            mixed,
        )  # fmt: skip

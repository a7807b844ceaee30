"""Attention's two products on a bfloat16 KV cache with AMX tiles, for up to sixteen query rows.

Sixteen keys of a block, and sixteen values, are stored as the tiles' B operands already. Each
number is summed in the order of `TDPBF16PS`: 32 numbers of a query and a key at once, or sixteen
keys' values, first the even ones and the odd ones apart. The order is the same for one row and for
sixteen, so a processor that has tiles uses them for every row.
"""

from numba import njit

from minigen.kernels.cpu.amx import tiles
from minigen.kernels.cpu.amx.tiles import (
    configuration,
    configure,
    tile_bfloat_dots,
    tile_load,
    tile_store,
    tile_zero,
)
from minigen.kernels.cpu.kv.layout import CHUNK, TILE
from minigen.kernels.cpu.kv.tile_index import tile_start
from minigen.kernels.cpu.simd import kernel, load, prefetch, store

ROWS = 16
QUERIES, KEYS, PROBS, VALUES = 4, 5, 6, 7  # tiles; 0 to 3 are sums
_WHOLE = (ROWS, 64)
_SHAPES = configuration(
    {0: _WHOLE, 1: _WHOLE, 2: _WHOLE, 3: _WHOLE, QUERIES: _WHOLE, KEYS: _WHOLE}
    | {PROBS: (ROWS, 2 * TILE), VALUES: (TILE // 2, 64)}
)


def acquire(cache):
    """Prepare the thread's tiles for `score` and `accumulate_values`."""
    configure(_SHAPES, 0)


def release(cache):
    """Give up the thread's tiles."""
    tiles.release()


def score(cache, tokens, shape, begin, end, last, rows, layer, scratch, query, at):
    """Write the scores of all rows for a chunk's keys; row t from `at + t * CHUNK` on.

    Four tiles of keys are processed side by side, because a tile's next sum must wait for its last
    one. For the few rows of a single token, the kernel also prefetches what is read next: keys up
    to tile `last`, and the chunk's values.
    """
    half, table, head = shape.head_dim // 2, rows.table, rows.head
    for tile in range(begin, end, 4):
        if rows.num_tokens == 1:
            for other in range(tile, min(tile + 4, end)):
                values = tile_start(shape, layer, 1, table, head, other)
                later = tile_start(shape, layer, 0, table, head, min(other + 4, last))
                for pair in range(half):
                    prefetch(cache.words, values + pair * 16)
                    prefetch(cache.words, later + pair * 16)
        first = tile_start(shape, layer, 0, table, head, tile)
        second = tile_start(shape, layer, 0, table, head, min(tile + 1, end - 1))
        third = tile_start(shape, layer, 0, table, head, min(tile + 2, end - 1))
        fourth = tile_start(shape, layer, 0, table, head, min(tile + 3, end - 1))
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for pair in range(0, half, 16):
            tile_load(QUERIES, scratch.queries, query * half + pair, half)
            tile_load(KEYS, cache.words, first + pair * 16, 16)
            tile_bfloat_dots(0, QUERIES, KEYS)
            tile_load(KEYS, cache.words, second + pair * 16, 16)
            tile_bfloat_dots(1, QUERIES, KEYS)
            tile_load(KEYS, cache.words, third + pair * 16, 16)
            tile_bfloat_dots(2, QUERIES, KEYS)
            tile_load(KEYS, cache.words, fourth + pair * 16, 16)
            tile_bfloat_dots(3, QUERIES, KEYS)
        to = at + (tile - begin) * TILE
        tile_store(0, scratch.scores, to, CHUNK)
        if tile + 1 < end:
            tile_store(1, scratch.scores, to + TILE, CHUNK)
        if tile + 2 < end:
            tile_store(2, scratch.scores, to + 2 * TILE, CHUNK)
        if tile + 3 < end:
            tile_store(3, scratch.scores, to + 3 * TILE, CHUNK)


@kernel
def _copy_last_values(cache, values, num_pairs, head_dim, room):
    """Copy the values of `num_pairs` pairs of tokens to `room`, zeros for the rest of their tile.

    The rest is a block's former owner's, and could hold NaNs, which times 0 are NaNs.
    """
    for word in range(0, num_pairs * head_dim, 16):
        store(room, word, load(cache.words, values + word))
    room[num_pairs * head_dim : TILE // 2 * head_dim] = 0


@njit(inline="always")
def _add_values(words, values, scratch, prob, head_dim, column):
    """Add sixteen tokens' values, weighted by their probabilities, to 64 columns of sums, or 32."""
    tile_load(PROBS, scratch.probs, prob, CHUNK // 2)
    tile_load(VALUES, words, values + column, head_dim)
    tile_bfloat_dots(0, PROBS, VALUES)
    tile_load(VALUES, words, values + column + 16, head_dim)
    tile_bfloat_dots(1, PROBS, VALUES)
    if column + 32 < head_dim:
        tile_load(VALUES, words, values + column + 32, head_dim)
        tile_bfloat_dots(2, PROBS, VALUES)
        tile_load(VALUES, words, values + column + 48, head_dim)
        tile_bfloat_dots(3, PROBS, VALUES)


def accumulate_values(cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, acc):
    """Add a chunk's values, weighted by the rows' probabilities, to `acc`; 64 columns per pass."""
    head_dim, whole = shape.head_dim, min(end, num_keys // TILE)
    room = scratch.values[at // ROWS // CHUNK * 8 * head_dim :]
    if whole < end:
        values = tile_start(shape, layer, 1, rows.table, rows.head, whole)
        _copy_last_values(cache, values, (num_keys % TILE + 1) // 2, head_dim, room)
    for column in range(0, head_dim, 64):
        tile_load(0, acc, column, head_dim)
        tile_load(1, acc, column + 16, head_dim)
        if column + 32 < head_dim:
            tile_load(2, acc, column + 32, head_dim)
            tile_load(3, acc, column + 48, head_dim)
        for tile in range(begin, whole):
            values = tile_start(shape, layer, 1, rows.table, rows.head, tile)
            prob = at // 2 + (tile - begin) * 8
            _add_values(cache.words, values, scratch, prob, head_dim, column)
        if whole < end:
            prob = at // 2 + (whole - begin) * 8
            _add_values(room, 0, scratch, prob, head_dim, column)
        tile_store(0, acc, column, head_dim)
        tile_store(1, acc, column + 16, head_dim)
        if column + 32 < head_dim:
            tile_store(2, acc, column + 32, head_dim)
            tile_store(3, acc, column + 48, head_dim)

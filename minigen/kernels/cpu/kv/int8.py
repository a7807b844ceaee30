"""A KV cache in int8: how keys and values are quantised, and attention's two products.

Both products are `add_byte_dots` on the cache in place; scales are applied afterwards. So queries
and probabilities are bytes, too. A probability takes two bytes (16 bits), because a small one can
be a thousandth of the largest, while many small ones together count as much as it does.

Keys have outliers, and the quantisation step of a head is as wide as its largest number needs. So
keys and queries are transformed first (`hadamard`), which keeps their dot products. The loss is
measured in benchmarks/34_cpu_kernels.py.

Integers are summed up exactly, in any order. A byte cannot represent NaN or infinity, so either
makes the scale of its head NaN.
"""

import numpy as np

from minigen.kernels.cpu.elementwise import TINY
from minigen.kernels.cpu.kv.hadamard import hadamard
from minigen.kernels.cpu.kv.layout import CHUNK, TILE
from minigen.kernels.cpu.kv.tile_index import tile_start
from minigen.kernels.cpu.register_tiles import (
    add_byte_dots,
    add_scaled,
    add_stored,
    spread_numbers,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.simd import (
    all_lanes,
    keep_between,
    kernel,
    larger,
    largest_lane,
    load,
    nearest,
    prefetch,
    store,
    store_bytes,
    store_two_bytes,
    sum_of_lanes,
)

ABOVE = 128  # added to the cache's bytes, because `add_byte_dots` needs them unsigned
_MOST, _MOST_OF_TWO = np.float32(127.0), np.float32(127.0 * 256.0)
_ZERO = np.zeros(1, np.int32)


@kernel
def _scale_and_steps(largest, most):
    """Return the scale of integers up to `most` for numbers up to `largest`, and its inverse."""
    scale, steps = largest / most, np.float32(0.0)
    if scale > TINY:
        steps = np.float32(1.0) / scale
    return scale, steps


@kernel
def _write_codes(x, at, width, above, codes, to):
    """Quantise numbers to bytes plus `above`; return their scale, and the bytes' sum without it."""
    nothing = all_lanes(np.float32(0.0))
    largest, total = nothing, nothing
    for column in range(0, width, 16):
        numbers = load(x, at + column)
        largest = larger(largest, larger(numbers, nothing - numbers))
    scale, steps = _scale_and_steps(largest_lane(largest), _MOST)
    for column in range(0, width, 16):
        whole = nearest(load(x, at + column) * all_lanes(steps))
        total = total + whole
        store_bytes(codes, to + column, whole + all_lanes(np.float32(above)))
    found = sum_of_lanes(total)
    return scale + (found - found), found  # 0, or NaN


def write_query(cache, scratch, query, x, at, head_dim, scale):
    """Quantise a head's query, times `scale`, and write it to row `query` of the scratch."""
    hadamard(x, at, head_dim)
    own, total = _write_codes(x, at, head_dim, 0, scratch.query_codes, query * head_dim)
    scratch.query_scales[query] = own * scale
    scratch.query_starts[query] = np.int32(total) * np.int32(-ABOVE)


def write_key(cache, start, lane, x, at, head_dim, buffer):
    """Quantise a head's key and write it as token `lane` of the tile at word `start`."""
    hadamard(x, at, head_dim)
    scale, _ = _write_codes(x, at, head_dim, ABOVE, buffer, 0)
    for word in range(head_dim // 4):
        for byte in range(4):
            cache.codes[4 * (start + word * 16 + lane) + byte] = buffer[4 * word + byte]
    cache.scales[start + 4 * head_dim + lane] = scale


def write_value(cache, start, lane, x, at, head_dim, buffer, alone):
    """Quantise a head's value and write it as token `lane` of the tile at word `start`."""
    scale, _ = _write_codes(x, at, head_dim, ABOVE, buffer, 0)
    values = 4 * start + (lane // 4) * 4 * head_dim + lane % 4
    for number in range(head_dim):
        cache.codes[values + 4 * number] = buffer[number]
    cache.scales[start + 4 * head_dim + lane] = scale


def score(cache, tokens, shape, begin, end, last, rows, layer, scratch, query, at):
    """Write the scores of the tile's queries for a chunk's keys; row t from `at + t * CHUNK` on.

    The kernel also prefetches what is read next, as `bf16.score` does, and gathers the scales of
    the chunk's values.
    """
    words, gathered, table, head = shape.head_dim // 4, at // 8, rows.table, rows.head
    for tile in range(begin, end):
        keys = tile_start(shape, layer, 0, table, head, tile)
        values = tile_start(shape, layer, 1, table, head, tile)
        later = tile_start(shape, layer, 0, table, head, min(tile + 2, last))
        dots = spread_numbers(tokens, scratch.query_starts, query, 1)
        for start in (values, later):
            prefetch(cache.words, start + words * 16)
        for word in range(words):
            for start in (values, later):
                prefetch(cache.words, start + word * 16)
            codes = load(cache.words, keys + word * 16)
            dots = add_byte_dots(dots, codes, scratch.queries, query * words + word, words)
        scales = load(cache.scales, keys + words * 16)
        scores = add_scaled(zeros(tokens), dots, scales, scratch.query_scales, query, 1)
        store_tile(scratch.scores, at + (tile - begin) * TILE, CHUNK, scores)
        value_scales = load(cache.scales, values + words * 16)
        store(scratch.value_scales, gathered + (tile - begin) * TILE, value_scales)


def quantize_probs(cache, begin, end, low, high, scratch, at):
    """Quantise a row's probabilities, which have replaced its scores, times the values' scales.

    The largest of the chunk becomes 127 x 256 steps, and rounding moves none by more than half a
    step. The scales of values that the row does not attend to are arbitrary, so they are masked.
    """
    nothing, row = all_lanes(np.float32(0.0)), at // CHUNK
    gathered, largest, total = row // 8 * CHUNK, nothing, nothing
    for tile in range(begin, end):
        key, place = tile * TILE, (tile - begin) * TILE
        prob = load(scratch.scores, at + place) * load(scratch.value_scales, gathered + place)
        if key < low or key + TILE > high:
            prob = keep_between(prob, key, low, high, np.float32(0.0))
        store(scratch.scores, at + place, prob)
        largest = larger(largest, prob)
    scale, steps = _scale_and_steps(largest_lane(largest), _MOST_OF_TWO)
    for own in range(at, at + (end - begin) * TILE, 16):
        whole = nearest(load(scratch.scores, own) * all_lanes(steps))
        total = total + whole
        store_two_bytes(scratch.prob_codes, own + at, own + at + CHUNK, whole)
    found = sum_of_lanes(total)
    scale += found - found  # 0, or NaN
    scratch.prob_scales[3 * row] = scale * np.float32(256.0)
    scratch.prob_scales[3 * row + 1] = scale
    scratch.prob_scales[3 * row + 2] = scale * found * np.float32(-ABOVE)


@kernel
def _accumulate_columns(cache, tokens, shape, begin, end, rows, layer, scratch, at, column, acc):
    head_dim, row = shape.head_dim, at // CHUNK * 3
    uppers, lowers = spread_numbers(tokens, _ZERO, 0, 0), spread_numbers(tokens, _ZERO, 0, 0)
    for tile in range(begin, end):
        values = tile_start(shape, layer, 1, rows.table, rows.head, tile) + column
        prob = at // 2 + (tile - begin) * 4
        for four in range(4):
            codes = load(cache.words, values + four * head_dim)
            uppers = add_byte_dots(uppers, codes, scratch.probs, prob + four, CHUNK // 2)
            lower = prob + four + CHUNK // 4
            lowers = add_byte_dots(lowers, codes, scratch.probs, lower, CHUNK // 2)
    one, scales = all_lanes(np.float32(1.0)), scratch.prob_scales
    total = spread_numbers(tokens, scales, row + 2, 3)
    total = add_scaled(total, uppers, one, scales, row, 3)
    total = add_scaled(total, lowers, one, scales, row + 1, 3)
    store_tile(acc, column, head_dim, add_stored(total, acc, column, head_dim))


def accumulate_values(cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, acc):
    """Add a chunk's values, weighted by the tile's probabilities, to `acc`; 16 columns per pass."""
    for column in range(0, shape.head_dim, 16):
        _accumulate_columns(cache, tokens, shape, begin, end, rows, layer, scratch, at, column, acc)

"""Attention that reads a paged KV cache in place, and the step before: biases, norms, rotation.

A query's scores are dot products with tiles of keys, one token per lane; the output is the product
of the softmax's probabilities with groups of values. The cache is never gathered into a copy. The
cache's type (bfloat16 or int8) selects `write_query`, `write_key` and `write_value`, which store
numbers, and `score`, `quantize_probs` and `accumulate_values`, which read them.

Bytes read by a query per KV head: 2 x head_dim x context numbers, of two bytes each, or of one byte
and a part of a scale. The query heads of a group share these reads. Source: PagedAttention, Kwon et
al. 2023.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from minigen.kernels.cpu.amx import kv_tiles
from minigen.kernels.cpu.amx.scratch import USE_TILES
from minigen.kernels.cpu.elementwise import exponential, root_mean_square_factor
from minigen.kernels.cpu.kv import bf16, int8
from minigen.kernels.cpu.kv.layout import CHUNK, TILE, ByteCache, Cache
from minigen.kernels.cpu.kv.tile_index import tile_at
from minigen.kernels.cpu.register_tiles import EIGHT, FOUR, ONE, TWO
from minigen.kernels.cpu.simd import (
    OutsideKernelError,
    all_lanes,
    keep_between,
    kernel,
    larger,
    largest_lane,
    load,
    overload,
    store,
    sum_of_lanes,
)
from minigen.kernels.cpu.thread_pool import barrier, next_phase, take, task_size


def _by_cache_type(name: str) -> Callable[..., Any]:
    """Return one function that dispatches on the type of its first argument, a cache."""
    in_bytes, in_pairs = getattr(int8, name), getattr(bf16, name)
    if USE_TILES:
        in_pairs = getattr(kv_tiles, name, in_pairs)

    def chosen(*args: Any) -> Any:
        raise OutsideKernelError

    @overload(chosen, strict=False)
    def choose(cache: Any, *others: Any) -> Any:
        return in_bytes if cache.instance_class is ByteCache else in_pairs

    return chosen


def most_rows(cache: Any) -> int:
    """Return the query rows of the largest task."""
    raise OutsideKernelError


def acquire_tiles(cache: Any) -> None:
    """Prepare this thread's tile registers, where the cache's products use them."""
    raise OutsideKernelError


def release_tiles(cache: Any) -> None:
    """Give up this thread's tile registers."""
    raise OutsideKernelError


def _uses_tiles(cache: Any) -> bool:
    return USE_TILES and cache.instance_class is Cache


@overload(most_rows)
def _most_rows(cache):
    most = kv_tiles.ROWS if _uses_tiles(cache) else len(EIGHT)
    return lambda cache: most


@overload(acquire_tiles)
def _acquire_tiles(cache):
    return kv_tiles.acquire if _uses_tiles(cache) else lambda cache: None


@overload(release_tiles)
def _release_tiles(cache):
    return kv_tiles.release if _uses_tiles(cache) else lambda cache: None


write_query = _by_cache_type("write_query")
write_key = _by_cache_type("write_key")
write_value = _by_cache_type("write_value")
score = _by_cache_type("score")
quantize_probs = _by_cache_type("quantize_probs")
accumulate_values = _by_cache_type("accumulate_values")


@kernel
def _normalize_head(x, at, width, weight, eps):
    factor = all_lanes(root_mean_square_factor(x, at, width, eps))
    for column in range(0, width, 16):
        numbers = load(x, at + column) * factor * load(weight, column)
        store(x, at + column, numbers)


@kernel
def _rotate_head(x, at, half, cos, sin, angles):
    """Apply the rotary embedding: rotate the pairs (i, i + half) of a head."""
    for column in range(0, half, 16):
        first, second = load(x, at + column), load(x, at + half + column)
        c, s = load(cos, angles + column), load(sin, angles + column)
        store(x, at + column, first * c - second * s)
        store(x, at + half + column, second * c + first * s)


@partial(kernel, forceinline=True)
def _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, buffer):
    head_dim, group = shape.head_dim, shape.q_heads // shape.kv_heads
    width = (shape.q_heads + 2 * shape.kv_heads) * head_dim
    row, half = token * width, head_dim // 2
    if heads.qkv_bias.shape[1] > 0:
        bias = heads.qkv_bias[layer]
        for column in range(0, width, 16):
            store(qkv, row + column, load(qkv, row + column) + load(bias, column))
    if heads.q_norm.shape[1] > 0:
        for head in range(shape.q_heads + shape.kv_heads):
            weight = heads.q_norm[layer] if head < shape.q_heads else heads.k_norm[layer]
            _normalize_head(qkv, row + head * head_dim, head_dim, weight, shape.norm_eps)
    angles = packed.positions[token] * half
    for head in range(shape.q_heads + shape.kv_heads):
        _rotate_head(qkv, row + head * head_dim, half, heads.cos, heads.sin, angles)
    scale = np.float32(1.0) / np.float32(np.sqrt(head_dim))
    for head in range(shape.q_heads):
        query = (head // group) * scratch.query_rows + token * group + head % group
        write_query(cache, scratch, query, qkv, row + head * head_dim, head_dim, scale)
    block, offset = divmod(packed.slots[token], shape.block_size)
    tile, lane = divmod(offset, TILE)
    alone = token + 1 == len(packed.slots) or packed.slots[token + 1] != packed.slots[token] + 1
    for head in range(shape.kv_heads):
        at = row + (shape.q_heads + head) * head_dim
        keys = tile_at(shape, layer, 0, block, head, tile)
        write_key(cache, keys, lane, qkv, at, head_dim, buffer)
        values = tile_at(shape, layer, 1, block, head, tile)
        at += shape.kv_heads * head_dim
        write_value(cache, values, lane, qkv, at, head_dim, buffer, alone)


@kernel
def rotate_and_store(pool, shape, layer, heads, packed, num_tokens, qkv, cache, scratch):
    """Apply biases, norms and rotation; write queries to `scratch`, keys and values to slots."""
    buffer = scratch.head[pool.worker]
    size = task_size(pool, num_tokens)
    num_tasks = -(-num_tokens // size)
    next_phase(pool)
    taken = take(pool, num_tasks)
    while taken < num_tasks:
        for token in range(taken * size, min(num_tokens, taken * size + size)):
            _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, buffer)
        taken = take(pool, num_tasks)
    barrier(pool, num_tasks)


LOWEST = np.float32(-3.0e38)


@kernel
def _softmax(scores, at, begin, end, low, high, row, sums, peaks):
    """Replace a chunk's scores by e^(score - peak) for keys from `low` to `high`, 0 elsewhere.

    These are probabilities before their division by the sum. The peak is the largest score so far.
    Returns e^(old peak - peak), the factor that rescales everything summed up before, or 1 if that
    is nothing. Source: online softmax, Milakov and Gimelshein 2018.
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
        prob = exponential(load(scores, own) - all_lanes(peak))
        if key < low or key + TILE > high:
            prob = keep_between(prob, key, low, high, np.float32(0.0))
        total = total + prob
        store(scores, own, prob)
    peaks[row] = peak
    if before == LOWEST:  # the first chunk
        sums[row] = sum_of_lanes(total)
        return np.float32(1.0)
    factor = largest_lane(exponential(all_lanes(before - peak)))
    sums[row] = sums[row] * factor + sum_of_lanes(total)
    return factor


@kernel
def _scale(acc, at, width, factor):
    for column in range(at, at + width, 16):
        store(acc, column, load(acc, column) * all_lanes(factor))


class Rows(NamedTuple):
    """A task: some query rows of one sequence and one KV head, at most `most_rows`.

    Row r is query head r % group of the sequence's new token r // group. `token` is the index of
    its first new token in the batch, and `context` is its length including all new tokens.
    """

    first: int
    num_rows: int
    head: int
    token: int
    num_tokens: int
    context: int
    table: Any


@partial(kernel, forceinline=True)  # a call would copy more than a hundred arguments
def _attend_tile(tokens, rows, shape, layer, window, cache, scratch, worker, acc, out):
    """Process keys and values chunk by chunk; chunks start at multiples of `CHUNK`.

    So every row's sums are computed in the same order, whatever the other rows are.
    """
    head_dim, group = shape.head_dim, shape.q_heads // shape.kv_heads
    most = most_rows(cache)
    before = rows.context - rows.num_tokens
    earliest = before + rows.first // group + 1  # tokens that the first row attends to, with itself
    num_keys = before + (rows.first + rows.num_rows - 1) // group + 1
    first_tile = max(0, earliest - window) // TILE
    num_tiles = (num_keys + TILE - 1) // TILE
    at = worker * most * CHUNK
    query = rows.head * scratch.query_rows + rows.token * group + rows.first
    sums, peaks = acc[most * head_dim :], acc[most * (head_dim + 1) :]
    for column in range(0, most * head_dim, 16):
        store(acc, column, all_lanes(np.float32(0.0)))
    for row in range(most):
        sums[row], peaks[row] = np.float32(0.0), LOWEST
    per_chunk = CHUNK // TILE
    for start in range(first_tile // per_chunk * per_chunk, num_tiles, per_chunk):
        begin, end = max(first_tile, start), min(num_tiles, start + per_chunk)
        score(cache, tokens, shape, begin, end, num_tiles - 1, rows, layer, scratch, query, at)
        for row in range(rows.num_rows):
            seen, own = before + (rows.first + row) // group + 1, at + row * CHUNK
            low = max(0, seen - window)
            factor = _softmax(scratch.scores, own, begin, end, low, seen, row, sums, peaks)
            if factor != np.float32(1.0):
                _scale(acc, row * head_dim, head_dim, factor)
            quantize_probs(cache, begin, end, low, seen, scratch, own)
        accumulate_values(cache, tokens, shape, begin, end, num_keys, rows, layer, scratch, at, acc)
    for row in range(rows.num_rows):
        token = rows.token + (rows.first + row) // group
        to = (token * shape.q_heads + rows.head * group + (rows.first + row) % group) * head_dim
        prob = all_lanes(np.float32(1.0) / sums[row])
        for column in range(0, head_dim, 16):
            store(out, to + column, load(acc, row * head_dim + column) * prob)


def attend_rows(
    rows: Rows,
    shape: Any,
    layer: int,
    window: int,
    cache: Any,
    scratch: Any,
    worker: int,
    acc: Any,
    out: Any,
) -> None:
    """Run a task."""
    raise OutsideKernelError


@overload(attend_rows)
def _attend_rows(rows, shape, layer, window, cache, scratch, worker, acc, out):
    return _in_tiles if _uses_tiles(cache) else _in_vectors


def _in_tiles(rows, shape, layer, window, cache, scratch, worker, acc, out):
    _attend_tile(ONE, rows, shape, layer, window, cache, scratch, worker, acc, out)


def _in_vectors(rows, shape, layer, window, cache, scratch, worker, acc, out):
    """Run the task with the smallest tile of vectors that holds its rows."""
    if rows.num_rows > 4:
        _attend_tile(EIGHT, rows, shape, layer, window, cache, scratch, worker, acc, out)
    elif rows.num_rows > 2:
        _attend_tile(FOUR, rows, shape, layer, window, cache, scratch, worker, acc, out)
    elif rows.num_rows == 2:
        _attend_tile(TWO, rows, shape, layer, window, cache, scratch, worker, acc, out)
    else:
        _attend_tile(ONE, rows, shape, layer, window, cache, scratch, worker, acc, out)


@kernel
def _num_tasks(shape, packed, sequence, most):
    """Return the number of tasks of a sequence's queries for one KV head, `most` rows per task."""
    num_tokens = packed.query_starts[sequence + 1] - packed.query_starts[sequence]
    return (num_tokens * (shape.q_heads // shape.kv_heads) + most - 1) // most


@njit(inline="always")
def _rows_of(shape, packed, sequence, head, task, most):
    token = packed.query_starts[sequence]
    num_tokens = packed.query_starts[sequence + 1] - token
    num_rows = min(most, num_tokens * (shape.q_heads // shape.kv_heads) - most * task)
    context, table = packed.context_lens[sequence], packed.block_tables[sequence]
    return Rows(most * task, num_rows, head, token, num_tokens, context, table)


@kernel
def attend(pool, shape, layer, window, packed, cache, scratch, out):
    """Write attention of the queries in `scratch` to out[tokens, q_heads x head_dim]."""
    most, num_tasks, acc = most_rows(cache), 0, scratch.totals[pool.worker]
    acquire_tiles(cache)
    for sequence in range(len(packed.query_starts) - 1):
        num_tasks += shape.kv_heads * _num_tasks(shape, packed, sequence, most)
    next_phase(pool)
    task, sequence, before = take(pool, num_tasks), 0, 0
    while task < num_tasks:
        if task < before:  # a stolen task: search from the start
            sequence, before = 0, 0
        per_head = _num_tasks(shape, packed, sequence, most)
        if task < before + shape.kv_heads * per_head:
            head, own = divmod(task - before, per_head)
            rows = _rows_of(shape, packed, sequence, head, own, most)
            attend_rows(rows, shape, layer, window, cache, scratch, pool.worker, acc, out)
            task = take(pool, num_tasks)
        else:
            sequence, before = sequence + 1, before + shape.kv_heads * per_head
    release_tiles(cache)
    barrier(pool, num_tasks)

"""Attention over a paged cache whose blocks lie as panels: no copy is gathered.

Keys and values are bfloat16. A block's keys are tiles of sixteen tokens, a lane for each, so that a
query's products with sixteen keys need no sum across lanes; its values are pairs of tokens, so that
probabilities are multiplied two at a time. Both are `add_bfloat_dots` of `tiles`: attention is two
products with the cache in the weights' place.

Words of 32 bits, for each layer, block and KV head:
  keys    [tiles, head_dim / 2, 16 lanes]   lane i: two numbers of token i
  values  [tiles, 8, head_dim]              word d: number d of tokens 2i and 2i + 1

Bytes read by a query: 2 x 2 x head_dim x context for each KV head, once for the query heads that
share it. Source: PagedAttention, Kwon et al. 2023.
"""

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from minigen.kernels.lanes import (
    all_lanes,
    fused,
    keep_between,
    larger,
    largest_lane,
    load,
    prefetch,
    store,
    store_bfloat16,
    sum_of_lanes,
)
from minigen.kernels.rows import exponential
from minigen.kernels.tiles import add_bfloat_dots, store_tile, zeros

TILE = 16  # tokens of a block that share a vector
ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8
LOWEST = np.float32(-3.0e38)
SERIAL_TOKENS = 4


class Shape(NamedTuple):
    """The numbers that the kernels of a model need."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    block_size: int
    num_blocks: int
    norm_eps: np.float32


class Heads(NamedTuple):
    """What is done to heads before attention; biases and norms a model lacks have a width of 0."""

    qkv_bias: np.ndarray  # [layers, width]
    q_norm: np.ndarray  # [layers, head_dim]
    k_norm: np.ndarray
    cos: np.ndarray  # [positions x head_dim / 2]
    sin: np.ndarray


class Cache(NamedTuple):
    """The pool's memory, by words and by halves, [layers, 2, blocks, kv_heads, ...] flat."""

    words: np.ndarray
    halves: np.ndarray


class Packed(NamedTuple):
    """A step's tokens, as `minigen.cache.paged.Batch` has them; all int64."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    logits_rows: np.ndarray


class Scratch(NamedTuple):
    """Memory that a step's attention uses; queries [kv_heads, tokens x group, head_dim]."""

    queries: np.ndarray
    query_halves: np.ndarray
    query_rows: int
    scores: np.ndarray
    shares: np.ndarray
    share_halves: np.ndarray
    most_keys: int


class PanelPool:
    """The memory of all blocks, block 0 included; as `KVPool`, in the kernels' own order."""

    def __init__(self, layers: int, num_blocks: int, kv_heads: int, block_size: int, head_dim: int):
        self.block_size = block_size
        words = head_dim * block_size // 2
        shape = (layers, 2, num_blocks + 1, kv_heads * words)
        # From the system, whose pages are zeros and take no memory before they are written.
        memory = mmap.mmap(-1, 4 * int(np.prod(shape, dtype=np.int64)))
        self.blocks = np.frombuffer(memory, np.int32).reshape(shape)
        flat = self.blocks.reshape(-1)
        self.cache = Cache(flat, flat.view(np.uint16))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (source, target), in all layers."""
        if pairs:
            sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
            self.blocks[:, :, targets] = self.blocks[:, :, sources]


def make_scratch(shape: Shape, max_tokens: int, max_keys: int, num_workers: int) -> Scratch:
    """Memory for steps of at most so many tokens, over contexts of at most so many."""
    query_rows = max_tokens * (shape.q_heads // shape.kv_heads) + 8
    queries = np.zeros(shape.kv_heads * query_rows * shape.head_dim // 2, np.int32)
    most_keys = -(-max_keys // shape.block_size) * shape.block_size + TILE
    scores = np.zeros(num_workers * 8 * most_keys, np.float32)
    shares = np.zeros(num_workers * 8 * most_keys // 2, np.int32)
    return Scratch(
        queries,
        queries.view(np.uint16),
        query_rows,
        scores,
        shares,
        shares.view(np.uint16),
        most_keys,
    )


@njit(inline="always")
def _block_start(shape, layer, half, block, head):
    """The first word of a block's keys (half 0) or values (half 1)."""
    words = shape.head_dim * shape.block_size // 2
    return (((layer * 2 + half) * shape.num_blocks + block) * shape.kv_heads + head) * words


@njit(inline="always")
def _tile_start(shape, layer, half, table, head, tile):
    """The first word of sixteen tokens' keys (half 0) or values (half 1)."""
    per_block = shape.block_size // TILE
    block = table[tile // per_block]
    start = _block_start(shape, layer, half, block, head)
    return start + (tile % per_block) * 8 * shape.head_dim


@njit
def _normalise_head(x, at, width, weight, eps):
    total = all_lanes(np.float32(0.0))
    for column in range(0, width, 16):
        numbers = load(x, at + column)
        total = fused(numbers, numbers, total)
    factor = np.float32(1.0) / np.sqrt(sum_of_lanes(total) / np.float32(width) + eps)
    for column in range(0, width, 16):
        numbers = load(x, at + column) * all_lanes(np.float32(factor)) * load(weight, column)
        store(x, at + column, numbers)


@njit
def _rotate_head(x, at, half, cos, sin, angles, scale, halves, to):
    """Turn the pairs (i, i + half) of a head, and write it, times `scale`, in bfloat16."""
    for column in range(0, half, 16):
        first, second = load(x, at + column), load(x, at + half + column)
        c, s = load(cos, angles + column), load(sin, angles + column)
        store_bfloat16(halves, to + column, (first * c - second * s) * all_lanes(scale))
        store_bfloat16(halves, to + half + column, (second * c + first * s) * all_lanes(scale))


@njit
def _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, turned):
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
            _normalise_head(qkv, row + head * head_dim, head_dim, weight, shape.norm_eps)
    angles = packed.positions[token] * half
    scale = np.float32(1.0) / np.float32(np.sqrt(head_dim))
    for head in range(shape.q_heads):
        query = (head // group) * scratch.query_rows + token * group + head % group
        _rotate_head(
            qkv, row + head * head_dim, half, heads.cos, heads.sin, angles, scale,
            scratch.query_halves, query * head_dim,
        )  # fmt: skip
    block, offset = divmod(packed.slots[token], shape.block_size)
    tile, lane = divmod(offset, TILE)
    # A pair's second value is multiplied, by 0, as soon as its first is there: no NaN may stand
    # there from whoever had the block before. The token that follows, if it comes, overwrites it.
    alone = token + 1 == len(packed.slots) or packed.slots[token + 1] != packed.slots[token] + 1
    for head in range(shape.kv_heads):
        at = row + (shape.q_heads + head) * head_dim
        _rotate_head(qkv, at, half, heads.cos, heads.sin, angles, np.float32(1.0), turned, 0)
        keys = 2 * (_block_start(shape, layer, 0, block, head) + tile * head_dim * 8)
        for number in range(head_dim):
            cache.halves[keys + (number // 2) * 32 + lane * 2 + number % 2] = turned[number]
        at += shape.kv_heads * head_dim
        for column in range(0, head_dim, 16):
            store_bfloat16(turned, column, load(qkv, at + column))
        values = 2 * (_block_start(shape, layer, 1, block, head) + tile * head_dim * 8)
        values += (lane // 2) * 2 * head_dim
        for number in range(head_dim):
            cache.halves[values + 2 * number + lane % 2] = turned[number]
            if alone and lane % 2 == 0:
                cache.halves[values + 2 * number + 1] = 0


@njit(parallel=True)
def _store_tokens(shape, layer, heads, packed, num_tokens, qkv, cache, scratch):
    for token in prange(num_tokens):
        turned = np.empty(shape.head_dim, np.uint16)
        _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, turned)


@njit
def rotate_and_store(shape, layer, heads, packed, num_tokens, qkv, cache, scratch):
    """Biases, head norms and rotation; queries to `scratch`, keys and values to their slots."""
    if num_tokens > SERIAL_TOKENS:
        _store_tokens(shape, layer, heads, packed, num_tokens, qkv, cache, scratch)
    else:
        turned = np.empty(shape.head_dim, np.uint16)
        for token in range(num_tokens):
            _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, turned)


@njit
def _score(tokens, shape, first_tile, num_tiles, table, layer, head, cache, scratch, query, at):
    """Scores of the tile's queries against every key; row t from `at + t * most_keys` on.

    Two tiles of keys go side by side, so that one's sums need not wait for each other. On its way
    it asks for what comes next, since blocks lie anywhere in memory: keys, and values.
    """
    half, last = shape.head_dim // 2, num_tiles - 1
    for tile in range(first_tile, num_tiles, 2):
        first = _tile_start(shape, layer, 0, table, head, tile)
        second = _tile_start(shape, layer, 0, table, head, min(tile + 1, last))
        values = _tile_start(shape, layer, 1, table, head, tile)
        later = _tile_start(shape, layer, 0, table, head, min(tile + 2, last))
        scores, more_scores = zeros(tokens), zeros(tokens)
        for pair in range(half):
            number = query * half + pair
            prefetch(cache.words, values + pair * 16)
            prefetch(cache.words, later + pair * 16)
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
        seen = keep_between(load(scores, at + key), key, low, high, LOWEST)
        store(scores, at + key, seen)
        largest = larger(largest, seen)
    peak = all_lanes(largest_lane(largest))
    total = all_lanes(np.float32(0.0))
    for tile in range(first_tile, num_tiles):
        share = exponential(load(scores, at + tile * TILE) - peak)
        share = keep_between(share, tile * TILE, low, high, np.float32(0.0))
        total = total + share
        store_bfloat16(shares, at + tile * TILE, share)
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
        values = _tile_start(shape, layer, 1, table, head, tile) + column
        pairs = 8 if tile < last else (num_keys - tile * TILE + 1) // 2
        for pair in range(pairs):
            share = at // 2 + tile * 8 + pair
            numbers = load(cache.words, values + pair * head_dim)
            more_numbers = load(cache.words, values + pair * head_dim + 16)
            low = add_bfloat_dots(low, numbers, scratch.shares, share, stride)
            high = add_bfloat_dots(high, more_numbers, scratch.shares, share, stride)
    store_tile(mixed, column, head_dim, low)
    store_tile(mixed, column + 16, head_dim, high)


@njit
def _attend_tile(
    tokens, num_rows, shape, layer, window, table, context, first_row, token, num_tokens, head,
    cache, scratch, worker, mixed, out,
):  # fmt: skip
    """Up to eight query rows of one sequence and one KV head.

    Row r is query head r % group of the sequence's new token r // group.
    """
    head_dim, group = shape.head_dim, shape.q_heads // shape.kv_heads
    before = context - num_tokens
    earliest = before + first_row // group + 1  # tokens that the first row sees, itself included
    num_keys = before + (first_row + num_rows - 1) // group + 1
    first_tile = max(0, earliest - window) // TILE
    num_tiles = (num_keys + TILE - 1) // TILE
    at = worker * 8 * scratch.most_keys
    query = head * scratch.query_rows + token * group + first_row
    _score(tokens, shape, first_tile, num_tiles, table, layer, head, cache, scratch, query, at)
    sums = mixed[8 * head_dim :]
    for row in range(num_rows):
        seen = before + (first_row + row) // group + 1
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
    for row in range(num_rows):
        which = token + (first_row + row) // group
        to = (which * shape.q_heads + head * group + (first_row + row) % group) * head_dim
        share = all_lanes(np.float32(1.0) / sums[row])
        for column in range(0, head_dim, 16):
            store(out, to + column, load(mixed, row * head_dim + column) * share)


@njit
def _attend_rows(
    shape, layer, window, packed, cache, scratch, sequence, head, first, worker, mixed, out
):
    group = shape.q_heads // shape.kv_heads
    token = packed.query_starts[sequence]
    num_tokens = packed.query_starts[sequence + 1] - token
    table, context = packed.block_tables[sequence], packed.context_lens[sequence]
    num_rows = min(8, num_tokens * group - first)
    if num_rows > 4:
        _attend_tile(EIGHT, num_rows, shape, layer, window, table, context, first, token, num_tokens, head, cache, scratch, worker, mixed, out)  # fmt: skip  # noqa: E501
    elif num_rows > 2:
        _attend_tile(FOUR, num_rows, shape, layer, window, table, context, first, token, num_tokens, head, cache, scratch, worker, mixed, out)  # fmt: skip  # noqa: E501
    elif num_rows == 2:
        _attend_tile(TWO, num_rows, shape, layer, window, table, context, first, token, num_tokens, head, cache, scratch, worker, mixed, out)  # fmt: skip  # noqa: E501
    else:
        _attend_tile(ONE, num_rows, shape, layer, window, table, context, first, token, num_tokens, head, cache, scratch, worker, mixed, out)  # fmt: skip  # noqa: E501


@njit(parallel=True)
def attend(shape, layer, window, packed, cache, scratch, num_workers, out):
    """out[tokens, q_heads x head_dim] = attention of the queries in `scratch` over the cache.

    Every task is up to eight rows (tokens x heads that share a KV head) of one sequence; workers
    take them in turn, so that long and short ones spread evenly.
    """
    group = shape.q_heads // shape.kv_heads
    for worker in prange(num_workers):
        mixed = np.empty(8 * shape.head_dim + 8, np.float32)
        task = 0
        for sequence in range(len(packed.query_starts) - 1):
            num_rows = packed.query_starts[sequence + 1] - packed.query_starts[sequence]
            for head in range(shape.kv_heads):
                for first in range(0, num_rows * group, 8):
                    if task % num_workers == worker:
                        _attend_rows(
                            shape, layer, window, packed, cache, scratch, sequence, head, first,
                            worker, mixed, out,
                        )  # fmt: skip
                    task += 1

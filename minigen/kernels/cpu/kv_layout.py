"""The memory of a paged cache whose blocks lie as panels, and what kernels must know of it.

A block's keys are tiles of sixteen tokens, a lane for each, so that a query's products with sixteen
keys need no sum across lanes; its values are groups of two or four tokens, whose probabilities are
multiplied at once. Numbers are bfloat16, or bytes: number = (byte - 128) x scale, with a scale for
each token and KV head of keys, and another of values. Scales lie behind their tile's bytes, so that
whoever copies a block has all of it.

Words of 32 bits of a tile, for each block, layer and KV head:
  bfloat16  keys    [head_dim / 2, 16 lanes]  lane i: two numbers of token i
            values  [8, head_dim]             word d of row i: number d of tokens 2i and 2i + 1
  int8      keys    [head_dim / 4, 16 lanes]  lane i: four numbers of token i
            values  [4, head_dim]             word d of row i: number d of tokens 4i to 4i + 3
            then    [16]                      float32: scale i is token i's
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numba import njit

from minigen.kernels.cpu.simd import zeros

TILE = 16  # tokens of a block that share a vector
CHUNK = 1024  # tokens whose scores, and then whose values, are worked on together: L2 holds them


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
    tile_words: int  # of sixteen tokens' keys, or values, of a head: `words_of_tile`
    norm_eps: np.float32


class Heads(NamedTuple):
    """What is done to heads before attention; biases and norms a model lacks have a width of 0."""

    qkv_bias: np.ndarray  # [layers, width]
    q_norm: np.ndarray  # [layers, head_dim]
    k_norm: np.ndarray
    cos: np.ndarray  # [positions x head_dim / 2]
    sin: np.ndarray


class Cache(NamedTuple):
    """The pool's memory, by words and by halves, [blocks, layers, 2, kv_heads, ...] flat."""

    words: np.ndarray
    halves: np.ndarray


class ByteCache(NamedTuple):
    """The same of a pool in bytes: by words, by bytes, and by scales."""

    words: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


class Scratch(NamedTuple):
    """Memory that a step's attention uses: queries [kv_heads, tokens x group, head_dim] and, of a
    chunk, scores and shares [workers, 8, CHUNK]."""

    queries: np.ndarray
    query_halves: np.ndarray
    query_rows: int
    scores: np.ndarray
    shares: np.ndarray
    share_halves: np.ndarray


class ByteScratch(NamedTuple):
    """The same for a cache in bytes, whose queries and shares are bytes, too.

    A query is bytes, a scale, and -128 times the bytes' sum: where its products begin, to take back
    what the cache's bytes are above their numbers. A row's shares are two bytes each, [2, CHUNK];
    `share_scales` [workers, 8, 3] has the scale of each of the two, and the same correction.
    `value_scales` [workers, CHUNK] are gathered on the way.
    """

    queries: np.ndarray
    query_codes: np.ndarray
    query_rows: int
    query_scales: np.ndarray
    query_starts: np.ndarray
    scores: np.ndarray
    shares: np.ndarray
    share_codes: np.ndarray
    share_scales: np.ndarray
    value_scales: np.ndarray


def _zeros_of_the_system(num_bytes: int) -> mmap.mmap:
    """Memory that takes none before it is written, in pages of 2 MB where the system has them.

    A context's blocks lie anywhere: with small pages, to find each costs as much as to read it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class PanelPool:
    """The memory of all blocks, block 0 included; as `KVPool`, in the kernels' own order.

    A block's keys and values stand together, [blocks, layers, 2, words], so that few pages are
    touched while few blocks are in use, and to copy a block is to copy one piece.

    `kv_dtype`, "bfloat16" or "int8", is what the shape is made for, too.
    """

    def __init__(self, shape: Shape, kv_dtype: str):
        self.block_size, self.kv_dtype = shape.block_size, kv_dtype
        words = shape.kv_heads * shape.block_size // TILE * shape.tile_words
        sizes = (shape.num_blocks, shape.layers, 2, words)
        memory = _zeros_of_the_system(4 * int(np.prod(sizes, dtype=np.int64)))
        self.blocks = np.frombuffer(memory, np.int32).reshape(sizes)
        flat = self.blocks.reshape(-1)
        self.cache: Cache | ByteCache = Cache(flat, flat.view(np.uint16))
        if kv_dtype == "int8":
            self.cache = ByteCache(flat, flat.view(np.uint8), flat.view(np.float32))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (source, target), in all layers."""
        if pairs:
            sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
            self.blocks[targets] = self.blocks[sources]


def words_of_tile(head_dim: int, kv_dtype: str) -> int:
    """Words of 32 bits that the keys, or values, of sixteen tokens and one head take."""
    return 4 * head_dim + TILE if kv_dtype == "int8" else 8 * head_dim


def make_scratch(
    shape: Shape, max_tokens: int, num_workers: int, kv_dtype: str
) -> Scratch | ByteScratch:
    """Memory for steps of at most so many tokens."""
    query_rows = max_tokens * (shape.q_heads // shape.kv_heads) + 8
    num_queries, num_rows = shape.kv_heads * query_rows, num_workers * 8
    scores = zeros(num_rows * CHUNK, np.float32)
    shares = zeros(num_rows * CHUNK // 2, np.int32)
    if kv_dtype == "bfloat16":
        queries = zeros(num_queries * shape.head_dim // 2, np.int32)
        halves = queries.view(np.uint16), shares.view(np.uint16)
        return Scratch(queries, halves[0], query_rows, scores, shares, halves[1])
    queries = zeros(num_queries * shape.head_dim // 4, np.int32)
    return ByteScratch(
        queries,
        queries.view(np.int8),
        query_rows,
        zeros(num_queries, np.float32),
        zeros(num_queries, np.int32),
        scores,
        shares,
        shares.view(np.int8),
        zeros(num_rows * 3, np.float32),
        zeros(num_workers * CHUNK, np.float32),
    )


@njit(inline="always")
def tile_at(shape, layer, half, block, head, tile):
    """The first word of a tile of a block's keys (half 0) or values (half 1)."""
    per_block = shape.block_size // TILE
    of_block = ((block * shape.layers + layer) * 2 + half) * shape.kv_heads + head
    return (of_block * per_block + tile) * shape.tile_words


@njit(inline="always")
def tile_start(shape, layer, half, table, head, tile):
    """The same for tile number `tile` of the context whose blocks are `table`."""
    per_block = shape.block_size // TILE
    return tile_at(shape, layer, half, table[tile // per_block], head, tile % per_block)

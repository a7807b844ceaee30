"""The memory layout of a paged KV cache whose blocks are packed, and the shapes kernels need.

A block's keys are stored in tiles of sixteen tokens, one per lane, so that a query's dot products
with sixteen keys need no sum across lanes. Its values are stored in groups of two or four tokens,
which are multiplied with their probabilities at once. Numbers are bfloat16, or bytes: number =
(byte - 128) x scale, with one scale per token and KV head for keys and one for values. Scales
follow the bytes of their tile, so that a copy of a block is complete.

The 32-bit words of a tile, for each block, layer and KV head:
  bfloat16  keys    [head_dim / 2, 16 lanes]  lane i: two numbers of token i
            values  [8, head_dim]             word d of row i: number d of tokens 2i and 2i + 1
  int8      keys    [head_dim / 4, 16 lanes]  lane i: four numbers of token i
            values  [4, head_dim]             word d of row i: number d of tokens 4i to 4i + 3
            then    [16]                      float32: scale i belongs to token i
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from minigen.kernels.cpu.arrays.aligned import zeros
from minigen.kernels.cpu.arrays.inputs import rounded_numbers

TILE = 16  # tokens of a block in one SIMD vector
CHUNK = 1024  # tokens whose keys, and then values, are processed together: they fit into L2
MOST_ROWS = 16  # query rows of an attention task, on any processor


class Shape(NamedTuple):
    """The sizes of a model and of its cache, as kernels need them."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    block_size: int
    num_blocks: int
    tile_words: int  # keys, or values, of sixteen tokens and one head: `words_of_tile`
    norm_eps: np.float32


class Heads(NamedTuple):
    """Parameters of heads before attention; biases and norms that a model lacks have width 0."""

    qkv_bias: np.ndarray  # [layers, width]
    q_norm: np.ndarray  # [layers, head_dim]
    k_norm: np.ndarray
    cos: np.ndarray  # [positions x head_dim / 2]
    sin: np.ndarray


class Cache(NamedTuple):
    """The KV pool's memory as flat words and halves, [blocks, layers, 2, kv_heads, ...]."""

    words: np.ndarray
    halves: np.ndarray


class ByteCache(NamedTuple):
    """The memory of an int8 KV pool as words, bytes and scales: three views of one array."""

    words: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


class Scratch(NamedTuple):
    """Scratch memory of a step's attention.

    Queries are [kv_heads, tokens x group, head_dim]; a chunk's scores and probabilities are
    [workers, rows of a task, CHUNK]. Queries and probabilities are as in `Rounded`. `values`
    [workers, TILE / 2, head_dim] is a place for a context's last values. `totals` [workers, rows of
    a task x (head_dim + 2)] are the rows' sums of values, then their sums of probabilities, then
    their largest scores. `head` [workers, head_dim] is a place for the key or value of one head on
    its way to the cache.
    """

    queries: np.ndarray
    query_numbers: np.ndarray
    query_rows: int
    scores: np.ndarray
    probs: np.ndarray
    prob_numbers: np.ndarray
    values: np.ndarray
    totals: np.ndarray
    head: np.ndarray


class ByteScratch(NamedTuple):
    """Scratch memory for an int8 cache, where queries and probabilities are bytes, too.

    A query is bytes, a scale, and a start of -128 x the bytes' sum: its dot products start there,
    to cancel the 128 that was added to the cache's bytes. A row's probabilities are two bytes each,
    [2, CHUNK]; `prob_scales` [workers, 8, 3] holds the scales of both bytes and the same
    correction. `value_scales` [workers, CHUNK] are gathered by `score`. `totals` and `head` are
    those of `Scratch`.
    """

    queries: np.ndarray
    query_codes: np.ndarray
    query_rows: int
    query_scales: np.ndarray
    query_starts: np.ndarray
    scores: np.ndarray
    probs: np.ndarray
    prob_codes: np.ndarray
    prob_scales: np.ndarray
    value_scales: np.ndarray
    totals: np.ndarray
    head: np.ndarray


def _map_zeros(num_bytes: int) -> mmap.mmap:
    """Map zeroed memory that is allocated when it is first written, in huge pages if available.

    A context's blocks are anywhere in memory, so with small pages the address translation (TLB
    misses) of a block costs as much as reading it. Huge pages have 2 MB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class PackedKVPool:
    """The memory of all blocks including block 0: a `KVPool` in the kernels' packed layout.

    All keys and values of a block are contiguous, [blocks, layers, 2, words]. So few pages are
    touched while few blocks are in use, and copying a block is one contiguous copy.

    `kv_dtype`, "bfloat16" or "int8", must be the one that `shape` was made for.
    """

    def __init__(self, shape: Shape, kv_dtype: str):
        self.block_size, self.kv_dtype = shape.block_size, kv_dtype
        words = shape.kv_heads * shape.block_size // TILE * shape.tile_words
        sizes = (shape.num_blocks, shape.layers, 2, words)
        memory = _map_zeros(4 * int(np.prod(sizes, dtype=np.int64)))
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
    """Return the 32-bit words of the keys, or values, of sixteen tokens and one head."""
    return 4 * head_dim + TILE if kv_dtype == "int8" else 8 * head_dim


def make_scratch(
    shape: Shape, max_tokens: int, num_workers: int, kv_dtype: str
) -> Scratch | ByteScratch:
    """Allocate attention's scratch memory for steps of at most `max_tokens` tokens."""
    query_rows = max_tokens * (shape.q_heads // shape.kv_heads) + MOST_ROWS
    num_queries, num_rows = shape.kv_heads * query_rows, num_workers * MOST_ROWS
    scores = zeros(num_rows * CHUNK, np.float32)
    totals = zeros((num_workers, MOST_ROWS * (shape.head_dim + 2)), np.float32)
    if kv_dtype == "bfloat16":
        rounded_queries = rounded_numbers(num_queries * shape.head_dim)
        rounded_probs = rounded_numbers(num_rows * CHUNK)
        values = zeros(num_workers * TILE // 2 * shape.head_dim, np.int32)
        head = zeros((num_workers, shape.head_dim), np.uint16)
        return Scratch(*rounded_queries, query_rows, scores, *rounded_probs, values, totals, head)
    probs = zeros(num_rows * CHUNK // 2, np.int32)
    queries = zeros(num_queries * shape.head_dim // 4, np.int32)
    return ByteScratch(
        queries,
        queries.view(np.int8),
        query_rows,
        zeros(num_queries, np.float32),
        zeros(num_queries, np.int32),
        scores,
        probs,
        probs.view(np.int8),
        zeros(num_rows * 3, np.float32),
        zeros(num_workers * CHUNK, np.float32),
        totals,
        zeros((num_workers, shape.head_dim), np.uint8),
    )

"""The memory of a paged cache whose blocks lie as panels, and what kernels must know of it.

Keys and values are bfloat16. A block's keys are tiles of sixteen tokens, a lane for each, so that a
query's products with sixteen keys need no sum across lanes; its values are pairs of tokens, so that
probabilities are multiplied two at a time.

Words of 32 bits, for each layer, block and KV head:
  keys    [tiles, head_dim / 2, 16 lanes]   lane i: two numbers of token i
  values  [tiles, 8, head_dim]              word d: number d of tokens 2i and 2i + 1
"""

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

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


class Scratch(NamedTuple):
    """Memory that a step's attention uses: queries [kv_heads, tokens x group, head_dim] and, of a
    chunk, scores and shares [workers, 8, CHUNK]."""

    queries: np.ndarray
    query_halves: np.ndarray
    query_rows: int
    scores: np.ndarray
    shares: np.ndarray
    share_halves: np.ndarray


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


def make_scratch(shape: Shape, max_tokens: int, num_workers: int) -> Scratch:
    """Memory for steps of at most so many tokens."""
    query_rows = max_tokens * (shape.q_heads // shape.kv_heads) + 8
    queries = np.zeros(shape.kv_heads * query_rows * shape.head_dim // 2, np.int32)
    scores = np.zeros(num_workers * 8 * CHUNK, np.float32)
    shares = np.zeros(num_workers * 8 * CHUNK // 2, np.int32)
    return Scratch(
        queries,
        queries.view(np.uint16),
        query_rows,
        scores,
        shares,
        shares.view(np.uint16),
    )


@njit(inline="always")
def block_start(shape, layer, half, block, head):
    """The first word of a block's keys (half 0) or values (half 1)."""
    words = shape.head_dim * shape.block_size // 2
    return (((layer * 2 + half) * shape.num_blocks + block) * shape.kv_heads + head) * words


@njit(inline="always")
def tile_start(shape, layer, half, table, head, tile):
    """The first word of sixteen tokens' keys (half 0) or values (half 1)."""
    per_block = shape.block_size // TILE
    block = table[tile // per_block]
    start = block_start(shape, layer, half, block, head)
    return start + (tile % per_block) * 8 * shape.head_dim

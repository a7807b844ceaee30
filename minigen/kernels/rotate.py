"""From a product to attention: biases, head norms, rotation, and the way into the cache."""

import numpy as np
from numba import njit

from minigen.kernels.cached import write_key, write_query, write_value
from minigen.kernels.crew import begin, finish, portion, take
from minigen.kernels.lanes import all_lanes, load, store
from minigen.kernels.paging import TILE, tile_at
from minigen.kernels.rows import root_mean_square_factor


@njit
def _normalise_head(x, at, width, weight, eps):
    factor = all_lanes(root_mean_square_factor(x, at, width, eps))
    for column in range(0, width, 16):
        numbers = load(x, at + column) * factor * load(weight, column)
        store(x, at + column, numbers)


@njit
def _rotate_head(x, at, half, cos, sin, angles):
    """Turn the pairs (i, i + half) of a head."""
    for column in range(0, half, 16):
        first, second = load(x, at + column), load(x, at + half + column)
        c, s = load(cos, angles + column), load(sin, angles + column)
        store(x, at + column, first * c - second * s)
        store(x, at + half + column, second * c + first * s)


@njit
def _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, room):
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
        write_key(cache, keys, lane, qkv, at, head_dim, room)
        values = tile_at(shape, layer, 1, block, head, tile)
        at += shape.kv_heads * head_dim
        write_value(cache, values, lane, qkv, at, head_dim, room, alone)


@njit
def rotate_and_store(crew, shape, layer, heads, packed, num_tokens, qkv, cache, scratch):
    """Biases, head norms and rotation; queries to `scratch`, keys and values to their slots."""
    room = np.empty(shape.head_dim, np.uint16)
    size = portion(crew, num_tokens)
    num_tasks = -(-num_tokens // size)
    begin(crew)
    taken = take(crew, num_tasks)
    while taken < num_tasks:
        for token in range(taken * size, min(num_tokens, taken * size + size)):
            _store_token(shape, layer, heads, packed, token, qkv, cache, scratch, room)
        taken = take(crew, num_tasks)
    finish(crew, num_tasks)

"""A whole step as one compiled function, from token ids to logits, with no Python between layers.

The module also turns a checkpoint into the arguments of that function: its shape and packed
weights.
"""

from typing import Any

import numpy as np

from minigen.kernels.cpu.attention import attend, rotate_and_store
from minigen.kernels.cpu.elementwise import normalize, prepare
from minigen.kernels.cpu.linear import multiply, multiply_and_gate
from minigen.kernels.cpu.packed_weights import Codes8
from minigen.kernels.cpu.simd import (
    OutsideKernelError,
    float16_of,
    float32_of,
    kernel,
    load,
    overload,
    store,
)
from minigen.kernels.cpu.thread_pool import barrier, join_step, leave_step, next_phase, take


def embed_row(embedding: Any, token_id: int, width: int, out: Any, at: int) -> None:
    """Write a token's row of the embedding as float32."""
    raise OutsideKernelError


@overload(embed_row)
def _embed_row(embedding, token_id, width, out, at):
    return _embed_codes8 if embedding.instance_class is Codes8 else _embed_pairs


# No array is viewed as one of another type here: Numba compiles the inside of `view` once per
# process and type, with reference counts if its first caller counts them.
def _embed_codes8(embedding, token_id, width, out, at):
    words = embedding.words[0]
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        group = (panel * (width // 32) + column // 32) * 136
        word = words[group + column % 32 // 4 * 16 + lane]
        code = ((word >> (8 * (column % 4))) & 255) - 128
        two_scales = words[group + 128 + lane // 2]
        out[at + column] = np.float32(code) * float16_of(two_scales >> (16 * (lane % 2)))


def _embed_pairs(embedding, token_id, width, out, at):
    words = embedding.words[0]
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        word = words[(panel * (width // 2) + column // 2) * 16 + lane]
        out[at + column] = float32_of(word << 16 if column % 2 == 0 else word & -65536)


@kernel
def _embed(pool, embedding, token_ids, width, out):
    next_phase(pool)
    token = take(pool, len(token_ids))
    while token < len(token_ids):
        embed_row(embedding, token_ids[token], width, out, token * width)
        token = take(pool, len(token_ids))
    barrier(pool, len(token_ids))


@kernel
def _keep_rows(pool, x, width, rows):
    """Move the rows with the indices `rows`, which ascend, to the front of `x`."""
    next_phase(pool)
    if take(pool, 1) == 0:  # one worker, because a row may overwrite another one's place
        for to in range(len(rows)):
            for column in range(0, width, 16):
                store(x, to * width + column, load(x, rows[to] * width + column))
        take(pool, 1)
    barrier(pool, 1)


def run_step(pool, step, shape, model, windows, packed, cache, scratch, work, logits):
    """Write the logits [rows, vocab] of the tokens `packed.logits_rows`, and all keys and values.

    Every worker of the pool calls it; a worker that is too late for the step returns at once.
    """
    if join_step(pool, step):
        run_layers(pool, shape, model, windows, packed, cache, scratch, work, logits)
        leave_step(pool)


@kernel
def run_layers(pool, shape, model, windows, packed, cache, scratch, work, logits):
    """Compute logits from token ids.

    After the last layer's keys and values, only the rows of `logits` are computed.
    """
    num_tokens, num_rows = len(packed.token_ids), len(packed.logits_rows)
    hidden, groups = shape.hidden, shape.hidden // 32
    heads_width = shape.q_heads * shape.head_dim
    qkv_width = heads_width + 2 * shape.kv_heads * shape.head_dim
    room = work.products
    _embed(pool, model.embedding, packed.token_ids, hidden, work.x)
    for layer in range(shape.layers):
        norm, eps = model.attention_norm[layer], shape.norm_eps
        normalize(pool, work.x, num_tokens, hidden, norm, eps, work.inputs)
        qkv = work.qkv
        multiply(
            pool, model.qkv, layer, work.inputs, num_tokens, groups, qkv, qkv_width, False, room
        )
        rotate_and_store(pool, shape, layer, model.heads, packed, num_tokens, qkv, cache, scratch)
        if layer == shape.layers - 1 and num_rows == 0:
            return
        attend(pool, shape, layer, windows[layer], packed, cache, scratch, work.attention_out)
        if layer == shape.layers - 1:
            _keep_rows(pool, work.attention_out, heads_width, packed.logits_rows)
            _keep_rows(pool, work.x, hidden, packed.logits_rows)
            num_tokens = num_rows
        prepare(pool, work.attention_out, num_tokens, heads_width, work.inputs)
        width = heads_width // 32
        multiply(pool, model.out, layer, work.inputs, num_tokens, width, work.x, hidden, True, room)
        normalize(pool, work.x, num_tokens, hidden, model.ffn_norm[layer], eps, work.inputs)
        inputs, width = work.ffn_inputs, shape.ffn // 32
        multiply_and_gate(
            pool, model.gate_up, layer, work.inputs, num_tokens, groups, shape.ffn, inputs, room
        )
        multiply(pool, model.down, layer, inputs, num_tokens, width, work.x, hidden, True, room)
    normalize(pool, work.x, num_rows, hidden, model.norm, shape.norm_eps, work.inputs)
    multiply(pool, model.head, 0, work.inputs, num_rows, groups, logits, shape.vocab, False, room)

"""A whole step as one compiled function: token ids to logits, with no Python between layers."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange
from numba.extending import overload

from minigen.kernels.attend import attend
from minigen.kernels.lanes import float16_at, load, store
from minigen.kernels.llvm import OutsideKernelError
from minigen.kernels.multiply import multiply, multiply_and_gate
from minigen.kernels.paging import Heads
from minigen.kernels.panels import Codes8
from minigen.kernels.rotate import rotate_and_store
from minigen.kernels.rows import normalise, prepare


class Weights(NamedTuple):
    """A model's weights: panels, and what is small in float32. Layers are the first axis.

    `embedding` is used row by row, `head` as a product; tied, they are the same memory. `gate_up`
    has two panels of the gate's, two of up's, and so on.
    """

    embedding: Any
    attention_norm: np.ndarray
    qkv: Any
    heads: Heads
    out: Any
    ffn_norm: np.ndarray
    gate_up: Any
    down: Any
    norm: np.ndarray
    head: Any


class Workspace(NamedTuple):
    """What a step writes on its way, for the most tokens that a step may have."""

    x: np.ndarray  # [tokens, hidden], what every layer adds to
    qkv: np.ndarray
    mixed: np.ndarray  # [tokens, q_heads x head_dim], attention's result
    inputs: Any  # of the next product
    ffn_inputs: Any


def embed_row(embedding: Any, token_id: int, width: int, out: Any, at: int) -> None:
    """Write a token's row of the embedding, as float32."""
    raise OutsideKernelError


@overload(embed_row)
def _embed_row(embedding, token_id, width, out, at):
    return _embed_codes8 if embedding.instance_class is Codes8 else _embed_pairs


def _embed_codes8(embedding, token_id, width, out, at):
    codes, scales = embedding.codes[0], embedding.scales[0]
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        group = panel * (width // 32) + column // 32
        word = codes[(group * 8 + column % 32 // 4) * 16 + lane]
        code = ((word >> (8 * (column % 4))) & 255) - 128
        out[at + column] = np.float32(code) * float16_at(scales, group * 16 + lane)


def _embed_pairs(embedding, token_id, width, out, at):
    words, bits = embedding.words[0], out.view(np.int32)
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        word = words[(panel * (width // 2) + column // 2) * 16 + lane]
        bits[at + column] = word << 16 if column % 2 == 0 else word & -65536


@njit(parallel=True)
def _embed(embedding, token_ids, width, out):
    for token in prange(len(token_ids)):
        embed_row(embedding, token_ids[token], width, out, token * width)


@njit
def _keep_rows(x, width, rows):
    """Move the rows with those numbers, in ascending order, to the front."""
    for to in range(len(rows)):
        for column in range(0, width, 16):
            store(x, to * width + column, load(x, rows[to] * width + column))


def run_step(shape, model, windows, packed, cache, scratch, work, num_workers, logits):
    """Write the logits [rows, vocab] of the tokens `packed.logits_rows`, and all keys and values.

    Beyond the last layer's keys and values only those rows are computed.
    """
    num_tokens, num_rows = len(packed.token_ids), len(packed.logits_rows)
    hidden, groups = shape.hidden, shape.hidden // 32
    heads_width = shape.q_heads * shape.head_dim
    qkv_width = heads_width + 2 * shape.kv_heads * shape.head_dim
    _embed(model.embedding, packed.token_ids, hidden, work.x)
    for layer in range(shape.layers):
        normalise(
            work.x, num_tokens, hidden, model.attention_norm[layer], shape.norm_eps, work.inputs
        )
        multiply(model.qkv, layer, work.inputs, num_tokens, groups, work.qkv, qkv_width, False)
        rotate_and_store(shape, layer, model.heads, packed, num_tokens, work.qkv, cache, scratch)
        if layer == shape.layers - 1 and num_rows == 0:
            return
        attend(shape, layer, windows[layer], packed, cache, scratch, num_workers, work.mixed)
        if layer == shape.layers - 1:
            _keep_rows(work.mixed, heads_width, packed.logits_rows)
            _keep_rows(work.x, hidden, packed.logits_rows)
            num_tokens = num_rows
        prepare(work.mixed, num_tokens, heads_width, work.inputs)
        multiply(model.out, layer, work.inputs, num_tokens, heads_width // 32, work.x, hidden, True)
        normalise(work.x, num_tokens, hidden, model.ffn_norm[layer], shape.norm_eps, work.inputs)
        multiply_and_gate(
            model.gate_up, layer, work.inputs, num_tokens, groups, shape.ffn, work.ffn_inputs
        )
        multiply(
            model.down, layer, work.ffn_inputs, num_tokens, shape.ffn // 32, work.x, hidden, True
        )
    normalise(work.x, num_rows, hidden, model.norm, shape.norm_eps, work.inputs)
    multiply(model.head, 0, work.inputs, num_rows, groups, logits, shape.vocab, False)

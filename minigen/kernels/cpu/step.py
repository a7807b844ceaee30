"""A whole step as one compiled function, from token ids to logits, with no Python between layers.

The module also turns a checkpoint into the arguments of that function: its shape and packed
weights.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.attention import attend, rotate_and_store
from minigen.kernels.cpu.elementwise import normalize, prepare
from minigen.kernels.cpu.kv.layout import TILE, Heads, Shape, words_of_tile
from minigen.kernels.cpu.linear import multiply, multiply_and_gate
from minigen.kernels.cpu.packed_weights import GROUP, Codes8, pack_layers, pack_rows
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
from minigen.model.layers import rotary_frequencies, rotary_tables


class Weights(NamedTuple):
    """A model's weights: packed matrices, and small vectors in float32; the first axis is layers.

    `embedding` is read by rows, `head` by a matrix product; if tied, they are the same memory. In
    `gate_up`, two panels of gate's rows alternate with two of up's.
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
    """The intermediate arrays of a step, for the largest number of tokens in a step."""

    x: np.ndarray  # [tokens, hidden], the residual stream
    qkv: np.ndarray
    attention_out: np.ndarray  # [tokens, q_heads x head_dim]
    inputs: Any  # of the next product
    ffn_inputs: Any
    products: Any  # what workers need while they multiply


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


def num_phases(shape: Shape) -> int:
    """Return an upper bound on the phases of a step: ten per layer plus four."""
    return 10 * shape.layers + 4


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


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_FORMS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}


def refusal(config: ModelConfig, block_size: int) -> str | None:
    """Return why the compiled step cannot run this model, or None if it can."""
    widths = {"hidden size": config.hidden, "ffn size": config.ffn, "head size": config.head_dim}
    for name, width in widths.items():
        if width % GROUP:
            return f"a {name} of {width} is not a multiple of {GROUP}"
    if config.vocab_size % TILE:
        return f"a vocabulary of {config.vocab_size} is not a multiple of {TILE}"
    if block_size % TILE:
        return f"blocks of {block_size} tokens are not a multiple of {TILE}"
    if config.out_bias or config.mlp_bias:
        return "biases other than those of queries, keys and values"
    return None


def kernel_shape(
    config: ModelConfig, block_size: int, num_blocks: int, kv_dtype: str = "bfloat16"
) -> Shape:
    """Return the sizes of the model and of its cache; `num_blocks` does not count block 0."""
    return Shape(
        config.num_layers,
        config.hidden,
        config.q_heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        config.vocab_size,
        block_size,
        num_blocks + 1,
        words_of_tile(config.head_dim, kv_dtype),
        np.float32(config.norm_eps),
    )


def kernel_weights(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    form: str,
    num_positions: int | None = None,
) -> Weights:
    """Pack all weights as "bfloat16", "int8" or "int4" (embedding and head then have 8 bits).

    The rotary tables have the first `num_positions` positions; all of the model's if it is None.
    """

    def pack(*names: str, interleave: int | None = None):
        layers = range(config.num_layers)
        return pack_layers(
            [[tensors[f"model.layers.{each}.{name}.weight"] for name in names] for each in layers],
            form,
            interleave,
        )

    def in_float32(name: str) -> np.ndarray:
        names = [f"model.layers.{each}.{name}" for each in range(config.num_layers)]
        if names[0] not in tensors:
            return np.zeros((config.num_layers, 0), np.float32)
        return np.stack([tensors[each].dequantize(torch.float32).numpy() for each in names])

    embedding = pack_rows(tensors["model.embed_tokens.weight"], _HEAD_FORMS[form])
    head = embedding
    if not config.tied_embeddings:
        head = pack_rows(tensors["lm_head.weight"], _HEAD_FORMS[form])
    return Weights(
        embedding=embedding,
        attention_norm=in_float32("input_layernorm.weight"),
        qkv=pack(*_QKV),
        heads=_heads(config, tensors, in_float32, num_positions or config.max_positions),
        out=pack("self_attn.o_proj"),
        ffn_norm=in_float32("post_attention_layernorm.weight"),
        gate_up=pack("mlp.gate_proj", "mlp.up_proj", interleave=2),
        down=pack("mlp.down_proj"),
        norm=tensors["model.norm.weight"].dequantize(torch.float32).numpy(),
        head=head,
    )


def _heads(config, tensors, in_float32, num_positions: int) -> Heads:
    frequencies = rotary_frequencies(
        config.head_dim, config.rope_theta, config.rope_linear_factor, config.rope_scaling
    )
    if "rope_freqs.weight" in tensors:  # a GGUF stores Llama 3's scaling as a tensor
        frequencies = frequencies / tensors["rope_freqs.weight"].dequantize()
    cos, sin = rotary_tables(frequencies, torch.arange(num_positions))
    bias = np.concatenate([in_float32(f"{name}.bias") for name in _QKV], axis=1)
    return Heads(
        qkv_bias=bias,
        q_norm=in_float32("self_attn.q_norm.weight"),
        k_norm=in_float32("self_attn.k_norm.weight"),
        cos=cos.numpy().reshape(-1),
        sin=sin.numpy().reshape(-1),
    )

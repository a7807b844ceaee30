"""A whole step as one compiled function, from token ids to logits, with no Python between layers.

Beside it, a checkpoint as what this function takes: its shape, and its weights in panels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.extending import overload

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.attention import attend, rotate_and_store
from minigen.kernels.cpu.elementwise import normalise, prepare
from minigen.kernels.cpu.kv_layout import TILE, Heads, Shape, words_of_tile
from minigen.kernels.cpu.linear import multiply, multiply_and_gate
from minigen.kernels.cpu.packed_weights import GROUP, Codes8, stack_panels
from minigen.kernels.cpu.simd import OutsideKernelError, float16_at, load, store
from minigen.kernels.cpu.thread_pool import begin, enter, finish, leave, take
from minigen.model.layers import rotary_frequencies, rotary_tables


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
    words = embedding.words[0]
    halves = words.view(np.uint16)
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        group = (panel * (width // 32) + column // 32) * 136
        word = words[group + column % 32 // 4 * 16 + lane]
        code = ((word >> (8 * (column % 4))) & 255) - 128
        out[at + column] = np.float32(code) * float16_at(halves, 2 * (group + 128) + lane)


def _embed_pairs(embedding, token_id, width, out, at):
    words, bits = embedding.words[0], out.view(np.int32)
    panel, lane = divmod(token_id, 16)
    for column in range(width):
        word = words[(panel * (width // 2) + column // 2) * 16 + lane]
        bits[at + column] = word << 16 if column % 2 == 0 else word & -65536


@njit
def _embed(crew, embedding, token_ids, width, out):
    begin(crew)
    token = take(crew, len(token_ids))
    while token < len(token_ids):
        embed_row(embedding, token_ids[token], width, out, token * width)
        token = take(crew, len(token_ids))
    finish(crew, len(token_ids))


@njit
def _keep_rows(crew, x, width, rows):
    """Move the rows with those numbers, in ascending order, to the front."""
    begin(crew)
    if take(crew, 1) == 0:  # one worker, since a row may go where another was
        for to in range(len(rows)):
            for column in range(0, width, 16):
                store(x, to * width + column, load(x, rows[to] * width + column))
        take(crew, 1)
    finish(crew, 1)


def run_step(crew, step, shape, model, windows, packed, cache, scratch, work, logits):
    """Write the logits [rows, vocab] of the tokens `packed.logits_rows`, and all keys and values.

    Every worker of the crew calls it; whoever comes too late for the step has nothing to do.
    """
    if enter(crew, step):
        run_layers(crew, shape, model, windows, packed, cache, scratch, work, logits)
        leave(crew)


def num_phases(shape: Shape) -> int:
    """At most so many phases a step has: ten a layer, four more."""
    return 10 * shape.layers + 4


@njit
def run_layers(crew, shape, model, windows, packed, cache, scratch, work, logits):
    """Token ids to logits. Beyond the last layer's keys and values only the rows of `logits` are
    computed."""
    num_tokens, num_rows = len(packed.token_ids), len(packed.logits_rows)
    hidden, groups = shape.hidden, shape.hidden // 32
    heads_width = shape.q_heads * shape.head_dim
    qkv_width = heads_width + 2 * shape.kv_heads * shape.head_dim
    _embed(crew, model.embedding, packed.token_ids, hidden, work.x)
    for layer in range(shape.layers):
        norm, eps = model.attention_norm[layer], shape.norm_eps
        normalise(crew, work.x, num_tokens, hidden, norm, eps, work.inputs)
        qkv = work.qkv
        multiply(crew, model.qkv, layer, work.inputs, num_tokens, groups, qkv, qkv_width, False)
        rotate_and_store(crew, shape, layer, model.heads, packed, num_tokens, qkv, cache, scratch)
        if layer == shape.layers - 1 and num_rows == 0:
            return
        attend(crew, shape, layer, windows[layer], packed, cache, scratch, work.mixed)
        if layer == shape.layers - 1:
            _keep_rows(crew, work.mixed, heads_width, packed.logits_rows)
            _keep_rows(crew, work.x, hidden, packed.logits_rows)
            num_tokens = num_rows
        prepare(crew, work.mixed, num_tokens, heads_width, work.inputs)
        width = heads_width // 32
        multiply(crew, model.out, layer, work.inputs, num_tokens, width, work.x, hidden, True)
        normalise(crew, work.x, num_tokens, hidden, model.ffn_norm[layer], eps, work.inputs)
        inputs, width = work.ffn_inputs, shape.ffn // 32
        multiply_and_gate(
            crew, model.gate_up, layer, work.inputs, num_tokens, groups, shape.ffn, inputs
        )
        multiply(crew, model.down, layer, inputs, num_tokens, width, work.x, hidden, True)
    normalise(crew, work.x, num_rows, hidden, model.norm, shape.norm_eps, work.inputs)
    multiply(crew, model.head, 0, work.inputs, num_rows, groups, logits, shape.vocab, False)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_FORMS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}


def refusal(config: ModelConfig, block_size: int) -> str | None:
    """Why the compiled step cannot run this model, if it cannot."""
    widths = {"hidden size": config.hidden, "ffn size": config.ffn, "head size": config.head_dim}
    for name, width in widths.items():
        if width % GROUP:
            return f"a {name} of {width} is no multiple of {GROUP}"
    if config.vocab_size % TILE:
        return f"a vocabulary of {config.vocab_size} is no multiple of {TILE}"
    if block_size % TILE:
        return f"blocks of {block_size} tokens are no multiple of {TILE}"
    if config.out_bias or config.mlp_bias:
        return "biases other than those of queries, keys and values"
    return None


def kernel_shape(
    config: ModelConfig, block_size: int, num_blocks: int, kv_dtype: str = "bfloat16"
) -> Shape:
    """The numbers of the model and of its cache; `num_blocks` is without block 0."""
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


def kernel_weights(config: ModelConfig, tensors: Mapping[str, StoredTensor], form: str) -> Weights:
    """All weights in the form "bfloat16", "int8" or "int4" (with 8 bits for embedding and head)."""

    def panels(*names: str, in_turn: int | None = None):
        layers = range(config.num_layers)
        return stack_panels(
            [[tensors[f"model.layers.{each}.{name}.weight"] for name in names] for each in layers],
            form,
            in_turn,
        )

    def small(name: str) -> np.ndarray:
        names = [f"model.layers.{each}.{name}" for each in range(config.num_layers)]
        if names[0] not in tensors:
            return np.zeros((config.num_layers, 0), np.float32)
        return np.stack([tensors[each].dequantize(torch.float32).numpy() for each in names])

    embedding = stack_panels([[tensors["model.embed_tokens.weight"]]], _HEAD_FORMS[form])
    head = embedding
    if not config.tied_embeddings:
        head = stack_panels([[tensors["lm_head.weight"]]], _HEAD_FORMS[form])
    return Weights(
        embedding=embedding,
        attention_norm=small("input_layernorm.weight"),
        qkv=panels(*_QKV),
        heads=_heads(config, tensors, small),
        out=panels("self_attn.o_proj"),
        ffn_norm=small("post_attention_layernorm.weight"),
        gate_up=panels("mlp.gate_proj", "mlp.up_proj", in_turn=2),
        down=panels("mlp.down_proj"),
        norm=tensors["model.norm.weight"].dequantize(torch.float32).numpy(),
        head=head,
    )


def _heads(config, tensors, small) -> Heads:
    frequencies = rotary_frequencies(
        config.head_dim, config.rope_theta, config.rope_linear_factor, config.rope_scaling
    )
    if "rope_freqs.weight" in tensors:  # how a GGUF writes Llama 3's scaling
        frequencies = frequencies / tensors["rope_freqs.weight"].dequantize()
    cos, sin = rotary_tables(frequencies, torch.arange(config.max_positions))
    bias = np.concatenate([small(f"{name}.bias") for name in _QKV], axis=1)
    return Heads(
        qkv_bias=bias,
        q_norm=small("self_attn.q_norm.weight"),
        k_norm=small("self_attn.k_norm.weight"),
        cos=cos.numpy().reshape(-1),
        sin=sin.numpy().reshape(-1),
    )

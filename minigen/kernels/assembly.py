"""A checkpoint as what the compiled step takes: its shape, its weights in panels."""

from collections.abc import Mapping

import numpy as np
import torch

from minigen.config import ModelConfig
from minigen.kernels.paging import TILE, Heads, Shape, words_of_tile
from minigen.kernels.panels import GROUP, stack_panels
from minigen.kernels.step import Weights
from minigen.model.layers import rotary_frequencies, rotary_tables
from minigen.model.weights import StoredTensor

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
        return np.stack([tensors[each].dequantise(torch.float32).numpy() for each in names])

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
        norm=tensors["model.norm.weight"].dequantise(torch.float32).numpy(),
        head=head,
    )


def _heads(config, tensors, small) -> Heads:
    frequencies = rotary_frequencies(
        config.head_dim, config.rope_theta, config.rope_linear_factor, config.rope_scaling
    )
    if "rope_freqs.weight" in tensors:  # how a GGUF writes Llama 3's scaling
        frequencies = frequencies / tensors["rope_freqs.weight"].dequantise()
    cos, sin = rotary_tables(frequencies, torch.arange(config.max_positions))
    bias = np.concatenate([small(f"{name}.bias") for name in _QKV], axis=1)
    return Heads(
        qkv_bias=bias,
        q_norm=small("self_attn.q_norm.weight"),
        k_norm=small("self_attn.k_norm.weight"),
        cos=cos.numpy().reshape(-1),
        sin=sin.numpy().reshape(-1),
    )

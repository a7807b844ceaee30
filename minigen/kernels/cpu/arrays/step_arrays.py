"""What a compiled step reads and writes: a checkpoint's packed weights, and intermediate arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.amx.scratch import tile_scratch
from minigen.kernels.cpu.arrays.aligned import NUM_LANES, zeros
from minigen.kernels.cpu.arrays.inputs import GATED, UNPACKED, quantized, rounded
from minigen.kernels.cpu.kv.layout import TILE, Heads, Shape, words_of_tile
from minigen.kernels.cpu.packed_weights import GROUP, pack_layers, pack_rows
from minigen.model.layers import rotary_frequencies, rotary_tables

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_FORMS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}


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


@dataclass(frozen=True, eq=False)
class PackedModel:
    """A model's weights as an object, which can be `Shared`; `heads` have no positions yet."""

    weights: Weights

    @classmethod
    def of(
        cls, config: ModelConfig, tensors: Mapping[str, StoredTensor], form: str
    ) -> "PackedModel":
        """Pack all weights as `kernel_weights` does."""
        return cls(kernel_weights(config, tensors, form, num_positions=0))


class Workspace(NamedTuple):
    """The intermediate arrays of a step, for the largest number of tokens in a step."""

    x: np.ndarray  # [tokens, hidden], the residual stream
    qkv: np.ndarray
    attention_out: np.ndarray  # [tokens, q_heads x head_dim]
    inputs: Any  # of the next product
    ffn_inputs: Any
    products: Any  # what workers need while they multiply


class ProductScratch(NamedTuple):
    """The workers' memory for products; the first axis is workers."""

    unpacked: np.ndarray  # [4 panels, groups, UNPACKED words]
    products: np.ndarray  # [GATED tokens, 4 panels, 16 lanes]
    tiles: Any


def product_scratch(in_bfloat16: bool, groups: int, num_workers: int) -> ProductScratch:
    """Allocate the workers' memory for products of up to `groups` groups."""
    return ProductScratch(
        zeros((num_workers, 4 * groups * UNPACKED), np.int32),
        zeros((num_workers, GATED * 4 * NUM_LANES), np.float32),
        tile_scratch(in_bfloat16, groups, num_workers),
    )


def make_workspace(shape: Shape, max_tokens: int, num_workers: int, in_bfloat16: bool) -> Workspace:
    """Allocate the intermediate arrays of a step of at most `max_tokens` tokens."""
    heads_width = shape.q_heads * shape.head_dim
    widest = max(shape.hidden, heads_width)
    make_inputs = rounded if in_bfloat16 else quantized
    return Workspace(
        x=zeros(max_tokens * shape.hidden, np.float32),
        qkv=zeros(max_tokens * (heads_width + 2 * shape.kv_heads * shape.head_dim), np.float32),
        attention_out=zeros(max_tokens * heads_width, np.float32),
        inputs=make_inputs(max_tokens, widest),
        ffn_inputs=make_inputs(max_tokens, shape.ffn),
        products=product_scratch(in_bfloat16, max(widest, shape.ffn) // GROUP, num_workers),
    )


def num_phases(shape: Shape) -> int:
    """Return an upper bound on the phases of a step: ten per layer plus four."""
    return 10 * shape.layers + 4


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

    positions = config.max_positions if num_positions is None else num_positions
    embedding = pack_rows(tensors["model.embed_tokens.weight"], _HEAD_FORMS[form])
    head = embedding
    if not config.tied_embeddings:
        head = pack_rows(tensors["lm_head.weight"], _HEAD_FORMS[form])
    return Weights(
        embedding=embedding,
        attention_norm=_in_float32(config, tensors, "input_layernorm.weight"),
        qkv=pack(*_QKV),
        heads=kernel_heads(config, tensors, positions),
        out=pack("self_attn.o_proj"),
        ffn_norm=_in_float32(config, tensors, "post_attention_layernorm.weight"),
        gate_up=pack("mlp.gate_proj", "mlp.up_proj", interleave=2),
        down=pack("mlp.down_proj"),
        norm=tensors["model.norm.weight"].dequantize(torch.float32).numpy(),
        head=head,
    )


def _in_float32(config: ModelConfig, tensors: Mapping[str, StoredTensor], name: str) -> np.ndarray:
    names = [f"model.layers.{each}.{name}" for each in range(config.num_layers)]
    if names[0] not in tensors:
        return np.zeros((config.num_layers, 0), np.float32)
    return np.stack([tensors[each].dequantize(torch.float32).numpy() for each in names])


def kernel_heads(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], num_positions: int
) -> Heads:
    """Return what a head's queries and keys need; the tables have the first `num_positions`."""
    frequencies = rotary_frequencies(
        config.head_dim, config.rope_theta, config.rope_linear_factor, config.rope_scaling
    )
    if "rope_freqs.weight" in tensors:  # a GGUF stores Llama 3's scaling as a tensor
        frequencies = frequencies / tensors["rope_freqs.weight"].dequantize()
    cos, sin = rotary_tables(frequencies, torch.arange(num_positions))
    bias = np.concatenate([_in_float32(config, tensors, f"{name}.bias") for name in _QKV], axis=1)
    return Heads(
        qkv_bias=bias,
        q_norm=_in_float32(config, tensors, "self_attn.q_norm.weight"),
        k_norm=_in_float32(config, tensors, "self_attn.k_norm.weight"),
        cos=cos.numpy().reshape(-1),
        sin=sin.numpy().reshape(-1),
    )

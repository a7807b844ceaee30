"""Solutions of chapter 15: FLOPs counted from the configuration, and other layers and models.

Sources: Kaplan et al. 2020 for the count; Wang and Komatsuzaki 2021 (GPT-J) for the parallel layer;
Qwen Team 2025 for Qwen3.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.model.attention import attention
from minigen.model.layers import (
    apply_rotary,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)
from minigen.model.transformer import AttendInLayer, Layer, Rotation, project_qkv


def token_flops(config: ModelConfig, context: int) -> int:
    """Return the FLOPs of one token's forward pass, from its embedding to its logits.

    The token attends to `context` tokens, including itself. Only matrix products count, and a
    multiplication and an addition are two FLOPs.
    """
    q_width = config.q_heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    layer_weights = config.hidden * (2 * q_width + 2 * kv_width + 3 * config.ffn)
    weights = config.num_layers * layer_weights + config.vocab_size * config.hidden
    return 2 * weights + 4 * config.num_layers * q_width * context


def prompt_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the FLOPs of a whole prompt, with logits for its last token only.

    Each token attends to itself and to those before it, and nothing that the causal mask hides is
    computed.
    """
    head = 2 * config.vocab_size * config.hidden
    contexts = range(1, num_tokens + 1)
    return sum(token_flops(config, context) - head for context in contexts) + head


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Add attention and the feed-forward network to x, both computed from the same normalised x.

    The norm is the layer's `attention_norm`; its `ffn_norm` is not used.
    """
    ready = rms_norm(x, layer.attention_norm, norm_eps)
    mixed = attend(*project_qkv(layer, ready, rotation, head_dim, norm_eps))
    gate, up = layer.gate_up(ready).split(layer.gate_up.parts, dim=-1)
    return x + layer.out(mixed.flatten(-2)) + layer.down(swiglu(gate, up))


def qwen3_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], token_ids: list[int]
) -> Float[Tensor, "tokens vocab"]:
    """Return the logits after each token of a text, from a Qwen3 model's tensors by their names."""
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta)
    cos, sin = rotary_tables(frequencies, torch.arange(len(token_ids)))

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], config.norm_eps)

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in (f"model.layers.{layer_id}" for layer_id in range(config.num_layers)):
        ready = norm(f"{layer}.input_layernorm", x)
        q, k, v = (
            linear(f"{layer}.self_attn.{part}_proj", ready).unflatten(-1, (-1, config.head_dim))
            for part in "qkv"
        )
        q = apply_rotary(norm(f"{layer}.self_attn.q_norm", q), cos, sin)
        k = apply_rotary(norm(f"{layer}.self_attn.k_norm", k), cos, sin)
        x = x + linear(f"{layer}.self_attn.o_proj", attention(q, k, v).flatten(-2))
        ready = norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (linear(f"{layer}.mlp.{part}_proj", ready) for part in ("gate", "up"))
        x = x + linear(f"{layer}.mlp.down_proj", swiglu(gate, up))
    head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    return linear(head, norm("model.norm", x))

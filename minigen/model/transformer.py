"""The whole forward pass of a Llama-, Qwen- or Mistral-type model, over packed tokens.

Attention is passed in (`Attend`), so that the same layers run without a KV cache, with a dense one
and with a paged one. Sources: Touvron et al. 2023 for the layers; Hugging Face checkpoints for the
names of the tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.model.layers import (
    DenseLinear,
    apply_rotary,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)
from minigen.protocols import Attend, Linear

MakeLinear = Callable[[Sequence[StoredTensor], Sequence[StoredTensor]], Linear]
AttendInLayer = Callable[[Tensor, Tensor, Tensor], Tensor]  # an `Attend`, bound to its layer
Rotation = tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """One layer's weights; Q, K and V are one fused linear layer, gate and up another."""

    attention_norm: Float[Tensor, " hidden"]
    qkv: Linear
    q_norm: Float[Tensor, " head_dim"] | None
    k_norm: Float[Tensor, " head_dim"] | None
    out: Linear
    ffn_norm: Float[Tensor, " hidden"]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Transformer:
    """A decoder-only model: it maps token ids to hidden states, and these to next-token logits."""

    embedding: Float[Tensor, "vocab hidden"]
    layers: tuple[Layer, ...]
    norm: Float[Tensor, " hidden"]
    head: Linear
    frequencies: Float[Tensor, " half"]
    head_dim: int
    norm_eps: float

    def __call__(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's hidden states; `logits` turns rows of them into logits."""
        x = self.embed(token_ids)
        rotation = self.rotation(positions)
        for layer_id, layer in enumerate(self.layers):
            in_layer = partial(attend, layer_id)
            x = run_layer(layer, x, rotation, in_layer, self.head_dim, self.norm_eps)
        return x

    def embed(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Return each token's embedding: the residual stream, to which each layer will add."""
        return functional.embedding(token_ids, self.embedding)

    def rotation(self, positions: Int64[Tensor, " tokens"]) -> Rotation:
        """Return the cosines and sines of the tokens' positions, the same for all layers."""
        return rotary_tables(self.frequencies, positions)

    def logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the next-token logits in float32, from the hidden states of any layer."""
        return self.head(rms_norm(x, self.norm, self.norm_eps)).float()


def run_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Apply attention, then the feed-forward network; each reads a normalised x and adds to x."""
    normalized = rms_norm(x, layer.attention_norm, norm_eps)
    q, k, v = project_qkv(layer, normalized, rotation, head_dim, norm_eps)
    x = x + layer.out(attend(q, k, v).flatten(-2))
    hidden = layer.gate_up(rms_norm(x, layer.ffn_norm, norm_eps))
    gate, up = hidden.split(layer.gate_up.parts, dim=-1)
    return x + layer.down(swiglu(gate, up))


def project_qkv(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    head_dim: int,
    norm_eps: float,
) -> tuple[
    Float[Tensor, "tokens q_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
]:
    """Return the queries, keys and values of a normalised x, by head; q and k are rotated.

    If the layer has norms for queries and keys, they are applied to each head before the rotation.
    """
    parts = layer.qkv(x).split(layer.qkv.parts, dim=-1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, norm_eps)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, norm_eps)
    return apply_rotary(q, *rotation), apply_rotary(k, *rotation), v


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that a model with this configuration has."""
    hidden, ffn = config.hidden, config.ffn
    q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": ((q_width, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv_width, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv_width, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q_width), config.out_bias),
        "mlp.gate_proj": ((ffn, hidden), config.mlp_bias),
        "mlp.up_proj": ((ffn, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, ffn), config.mlp_bias),
    }
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, has_bias) in linears.items():
        of_layer[f"{name}.weight"] = shape
        if has_bias:
            of_layer[f"{name}.bias"] = shape[:1]
    if config.qk_norm:
        of_layer["self_attn.q_norm.weight"] = (config.head_dim,)
        of_layer["self_attn.k_norm.weight"] = (config.head_dim,)
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    for layer_id in range(config.num_layers):
        expected |= {f"model.layers.{layer_id}.{name}": s for name, s in of_layer.items()}
    return expected


def build_transformer(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    make_linear: MakeLinear,
    finish_head: Callable[[DenseLinear], Linear] = lambda head: head,
    map_layers: Callable[..., Iterable[Layer]] = map,
) -> Transformer:
    """Build a model from stored tensors that were checked against `expected_tensors`.

    `make_linear` chooses the linear layers' implementation; norms and the embedding are stored in
    `dtype`. If the output head is the embedding itself, `finish_head` may convert it. `map_layers`
    applies a function to each layer's number, for example `ThreadPoolExecutor.map`.
    """

    def layer(layer_id: int) -> Layer:
        return build_layer(tensors, layer_id, dtype, make_linear)

    embedding = tensors["model.embed_tokens.weight"].dequantize(dtype)
    tensors["model.embed_tokens.weight"].release_pages()
    if config.tied_embeddings:
        head = finish_head(DenseLinear(embedding, None, (config.vocab_size,)))
    else:
        head = make_linear([tensors["lm_head.weight"]], [])
    return Transformer(
        embedding=embedding,
        layers=tuple(map_layers(layer, range(config.num_layers))),
        norm=tensors["model.norm.weight"].dequantize(dtype),
        head=head,
        frequencies=build_frequencies(config, tensors),
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
    )


def build_frequencies(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> Float[Tensor, " half"]:
    """Return the rotation per position of each pair of a head, as the configuration asks."""
    frequencies = rotary_frequencies(
        config.head_dim, config.rope_theta, config.rope_linear_factor, config.rope_scaling
    )
    if "rope_freqs.weight" in tensors:  # how a GGUF file stores Llama 3's scaling
        frequencies = frequencies / tensors["rope_freqs.weight"].dequantize()
    return frequencies


def build_layer(
    tensors: Mapping[str, StoredTensor],
    layer_id: int,
    dtype: torch.dtype,
    make_linear: MakeLinear,
) -> Layer:
    """Build one layer from the stored tensors of its number; see `build_transformer`."""
    prefix = f"model.layers.{layer_id}."

    def linear(*names: str) -> Linear:
        weights = [tensors[f"{prefix}{name}.weight"] for name in names]
        biases = [tensors.get(f"{prefix}{name}.bias") for name in names]
        return make_linear(weights, [bias for bias in biases if bias is not None])

    def norm(name: str) -> Float[Tensor, " size"] | None:
        stored = tensors.get(f"{prefix}{name}.weight")
        return None if stored is None else stored.dequantize(dtype)

    def needed_norm(name: str) -> Float[Tensor, " size"]:
        return tensors[f"{prefix}{name}.weight"].dequantize(dtype)

    return Layer(
        attention_norm=needed_norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        out=linear("self_attn.o_proj"),
        ffn_norm=needed_norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def dense_linear(
    dtype: torch.dtype, device: torch.device = _CPU
) -> Callable[[Sequence[StoredTensor], Sequence[StoredTensor]], DenseLinear]:
    """Return a `MakeLinear` whose layers dequantize their weights once, to `dtype` on `device`.

    The weights are dequantized piecewise into the device's memory.
    """

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> DenseLinear:
        parts = tuple(weight.shape[0] for weight in weights)
        fused = torch.empty(sum(parts), weights[0].shape[1], dtype=dtype, device=device)
        for weight, rows in zip(weights, fused.split(parts), strict=True):
            weight.dequantize(out=rows)
            weight.release_pages()
        bias = torch.cat([each.dequantize(dtype) for each in biases]) if biases else None
        return DenseLinear(fused, None if bias is None else bias.to(device), parts)

    return make

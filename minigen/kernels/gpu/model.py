"""The whole forward pass with kernels between the products, and weights made where they are used.

A layer is four products and five kernels, where plain torch starts about thirty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minigen.kernels.gpu.activation import silu_multiply_triton
from minigen.kernels.gpu.norm import rms_norm_triton
from minigen.kernels.gpu.rotary import rotary_store_triton
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import Layer, MakeLinear, Transformer
from minigen.model.weights import StoredTensor

ReadLayer = Callable[[int, Tensor], Tensor]  # attention over what is in the pool


@dataclass(frozen=True)
class KernelModel:
    """A `Transformer` on one device, with the cosines and sines of every position."""

    model: Transformer
    tables: tuple[Tensor, Tensor]

    def hidden(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: Tensor, read: ReadLayer
    ) -> Tensor:
        """The last layer's hidden states, normalised; new keys and values are in `kv` then.

        `kv` is the pool, by `minigen.cache.paged.POOL_AXES`.
        """
        model = self.model
        residual = model.embed(token_ids)
        x = rms_norm_triton(residual, model.layers[0].attention_norm, model.norm_eps)
        next_norms = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        for layer_id, (layer, next_norm) in enumerate(zip(model.layers, next_norms, strict=True)):
            keys, values = kv[layer_id]
            q = rotary_store_triton(
                layer.qkv(x),
                _head_norms(layer),
                model.norm_eps,
                self.tables,
                positions,
                slots,
                keys,
                values,
            )
            mixed = layer.out(read(layer_id, q).flatten(-2))
            x = rms_norm_triton(mixed, layer.ffn_norm, model.norm_eps, residual)
            mixed = layer.down(silu_multiply_triton(layer.gate_up(x)))
            x = rms_norm_triton(mixed, next_norm, model.norm_eps, residual)
        return x

    def logits(self, hidden: Tensor, told: Tensor | None = None) -> Tensor:
        """Scores of every token as the next one, float32, of normalised hidden states.

        They are written over `told` if that is given.
        """
        scores = self.model.head(hidden)
        return scores.float() if told is None else told.copy_(scores)


def kernel_model(model: Transformer, max_positions: int, device: torch.device) -> KernelModel:
    """The model with everything on `device`; linear layers that are there already stay."""
    embedding = model.embedding.to(device)
    head = model.head
    if isinstance(head, DenseLinear) and head.weight is model.embedding:
        head = replace(head, weight=embedding)
    frequencies = model.frequencies.to(device)
    cos, sin = rotary_tables(frequencies, torch.arange(max_positions, device=device))
    moved = replace(
        model,
        embedding=embedding,
        layers=tuple(_layer_on(layer, device) for layer in model.layers),
        norm=model.norm.to(device),
        head=head,
        frequencies=frequencies,
    )
    return KernelModel(moved, (cos, sin))


def device_linear(dtype: torch.dtype, device: torch.device) -> MakeLinear:
    """Linear layers dequantised, in pieces, straight into the device's memory."""

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> DenseLinear:
        parts = tuple(weight.shape[0] for weight in weights)
        fused = torch.empty(sum(parts), weights[0].shape[1], dtype=dtype, device=device)
        for weight, rows in zip(weights, fused.split(parts), strict=True):
            weight.dequantise(out=rows)
            weight.let_go()
        bias = torch.cat([each.dequantise(dtype) for each in biases]) if biases else None
        return DenseLinear(fused, None if bias is None else bias.to(device), parts)

    return make


def _layer_on(layer: Layer, device: torch.device) -> Layer:
    return replace(
        layer,
        attention_norm=layer.attention_norm.to(device),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        ffn_norm=layer.ffn_norm.to(device),
    )


def _head_norms(layer: Layer) -> tuple[Tensor, Tensor] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm, layer.k_norm

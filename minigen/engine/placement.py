"""A model and its KV cache in the memory of a device that is passed in.

A model is read into the CPU's memory and moved, except its linear layers, by far the largest part:
`minigen.model.transformer.dense_linear` makes those on the device.
"""

from dataclasses import replace

import torch

from minigen.kv_cache.paged import KVPool
from minigen.model.layers import DenseLinear
from minigen.model.transformer import Layer, Transformer


def moved_to(model: Transformer, device: torch.device) -> Transformer:
    """Move the model to `device`, except its linear layers, which must be there already.

    A head that is the embedding itself is moved with it.
    """
    embedding, head = model.embedding.to(device), model.head
    if isinstance(head, DenseLinear) and head.weight is model.embedding:
        head = replace(head, weight=embedding)
    return replace(
        model,
        embedding=embedding,
        layers=tuple(_norms_moved_to(layer, device) for layer in model.layers),
        norm=model.norm.to(device),
        head=head,
        frequencies=model.frequencies.to(device),
    )


def _norms_moved_to(layer: Layer, device: torch.device) -> Layer:
    return replace(
        layer,
        attention_norm=layer.attention_norm.to(device),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        ffn_norm=layer.ffn_norm.to(device),
    )


class PlacedKVPool(KVPool):
    """A `KVPool` in the memory of `device`, which torch allocates at once, as zeros."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        shape = (layers, 2, num_blocks + 1, block_size, kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)

"""The model in kernels: a `Transformer` on a device, whole or one rank's share of it.

A layer is four matrix products and five kernels, where plain torch launches more than forty. For a
single token the products are kernels, too, fused with what is before and after them. A share of a
model (`Ranks`) has fewer heads, a narrower ffn and fewer tokens, and the same kernels: only the
sums of the layers, the embedding and the logits are joined with those of other ranks. Source:
Shoeybi et al. 2019 (Megatron-LM).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.engine.placement import moved_to
from minigen.kernels.triton.elementwise import (
    rms_norm_triton,
    rotary_store_triton,
    silu_multiply_triton,
)
from minigen.kernels.triton.matvec import matvec_triton
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import Layer, Transformer
from minigen.protocols import Linear

ReadLayer = Callable[[int, Tensor], Tensor]  # attention of a layer, by its id and the queries
Logits = Float[Tensor, "rows vocab"]


@runtime_checkable
class Ranks(Protocol):
    """What joins a rank's share of the model with the others'; all ranks call it in one order."""

    @property
    def vocab(self) -> int:
        """The number of tokens of the whole model."""

    @property
    def adds_residual(self) -> bool:
        """Whether this rank adds the residual stream to its part of a sum, as one rank must."""

    def embed(
        self, embedding: Float[Tensor, "share hidden"], token_ids: Int64[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the tokens' embeddings, of which each rank has a share."""

    def sum(self, part: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the sum of all ranks' parts."""

    def join(self, part: Float[Tensor, "rows share"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the whole vocabulary, of which each rank has a share."""


@dataclass(frozen=True)
class OneRank:
    """The `Ranks` of a model that is whole: there is nothing to join."""

    vocab: int
    adds_residual: bool = True

    def embed(
        self, embedding: Float[Tensor, "share hidden"], token_ids: Int64[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        return functional.embedding(token_ids, embedding)

    def sum(self, part: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return part

    def join(self, part: Float[Tensor, "rows share"]) -> Float[Tensor, "rows vocab"]:
        return part


@dataclass(frozen=True)
class DenseLayer:
    """The linear layers of one layer, with weights that kernels can read."""

    qkv: DenseLinear
    out: DenseLinear
    gate_up: DenseLinear
    down: DenseLinear


@dataclass(frozen=True)
class KernelModel:
    """A `Transformer` on one device, with the cosines and sines of all positions.

    `dense` and `head` are its linear layers. `ranks` joins it with the shares of other devices.
    """

    model: Transformer
    dense: tuple[DenseLayer, ...]
    head: DenseLinear
    tables: tuple[Tensor, Tensor]
    ranks: Ranks

    def hidden(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        slots: Int64[Tensor, " tokens"],
        kv: Float[Tensor, "layers 2 blocks block_size kv_heads head_dim"],
        read: ReadLayer,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's hidden states, normalised, and store new keys and values in `kv`.

        `kv` is the pool, with the axes `minigen.kv_cache.paged.POOL_AXES`.
        """

        def attend(layer_id: int, qkv: Tensor) -> Tensor:
            norms, eps = _head_norms(self.model.layers[layer_id]), self.model.norm_eps
            placed = (self.tables, positions, slots)
            q = rotary_store_triton(qkv, norms, eps, *placed, *kv[layer_id])
            return read(layer_id, q).flatten(-2)

        forward = self._one_token if len(token_ids) == 1 else self._many_tokens
        return forward(self.ranks.embed(self.model.embedding, token_ids), attend)

    def _many_tokens(self, residual: Tensor, attend: ReadLayer) -> Tensor:
        layers, norm, eps = self.model.layers, self.model.norm, self.model.norm_eps
        x = rms_norm_triton(residual, layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [norm]
        for layer_id, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            out = self.ranks.sum(layer.out(attend(layer_id, layer.qkv(x))))
            x = rms_norm_triton(out, layer.ffn_norm, eps, residual)
            out = self.ranks.sum(layer.down(silu_multiply_triton(layer.gate_up(x))))
            x = rms_norm_triton(out, next_norm, eps, residual)
        return x

    def _one_token(self, residual: Tensor, attend: ReadLayer) -> Tensor:
        """Run the layers on one token; the residual stream enters each sum on one rank only."""
        eps = self.model.norm_eps
        for layer_id, (layer, dense) in enumerate(zip(self.model.layers, self.dense, strict=True)):
            qkv = matvec_triton(residual, dense.qkv, norm=(layer.attention_norm, eps))
            residual = self._add(attend(layer_id, qkv), dense.out, residual)
            x = matvec_triton(residual, dense.gate_up, norm=(layer.ffn_norm, eps), gated=True)
            residual = self._add(x, dense.down, residual)
        return rms_norm_triton(residual, self.model.norm, eps)

    def _add(self, x: Tensor, linear: DenseLinear, residual: Tensor) -> Tensor:
        own = residual if self.ranks.adds_residual else None
        return self.ranks.sum(matvec_triton(x, linear, residual=own))

    def logits(self, hidden: Float[Tensor, "rows hidden"], out: Logits | None = None) -> Logits:
        """Return the logits of normalised hidden states, float32, written to `out` if given."""
        if len(hidden) == 0:
            return hidden.new_empty(0, self.ranks.vocab, dtype=torch.float32)
        part = matvec_triton(hidden, self.head) if len(hidden) == 1 else self.head(hidden)
        scores = self.ranks.join(part)
        return scores.float() if out is None else out.copy_(scores)


def kernel_model(
    model: Transformer, max_positions: int, device: torch.device, ranks: Ranks | None = None
) -> KernelModel:
    """Move the model to `device`, except its dense linear layers, which must be there already.

    `ranks` joins a share of a model with the others; without it the model is whole.
    """
    moved = moved_to(model, device)
    positions = torch.arange(max_positions, device=device)
    dense = tuple(
        DenseLayer(*map(_dense, (layer.qkv, layer.out, layer.gate_up, layer.down)))
        for layer in moved.layers
    )
    joined = OneRank(len(moved.embedding)) if ranks is None else ranks
    tables = rotary_tables(moved.frequencies, positions)
    return KernelModel(moved, dense, _dense(moved.head), tables, joined)


def _dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, DenseLinear), f"{type(linear).__name__} has no plain weight"
    return linear


def _head_norms(
    layer: Layer,
) -> tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm, layer.k_norm

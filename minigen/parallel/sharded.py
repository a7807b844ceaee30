"""A rank's share of a transformer, built of its share of the tensors.

The model's own code knows nothing of it: a rank builds an ordinary, smaller transformer, and what
must be summed or gathered is wrapped. Source: Shoeybi et al. 2019 (Megatron-LM).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.config import ModelConfig
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, Transformer, build_transformer, run_layer
from minigen.model.weights import StoredTensor
from minigen.parallel.comm import Comm
from minigen.parallel.shard import local_config, shard_tensors, span, vocab_share
from minigen.protocols import Attend, Linear


@dataclass(frozen=True)
class SummedLinear:
    """A row split linear layer: each rank's part of every sum, and an all-reduce behind it."""

    linear: Linear
    comm: Comm

    @property
    def parts(self) -> tuple[int, ...]:
        return self.linear.parts

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return self.comm.all_reduce(self.linear(x))


@dataclass(frozen=True)
class GatheredHead:
    """An output head split by vocabulary: each rank's logits, side by side."""

    linear: Linear
    comm: Comm
    vocab: int

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.vocab,)

    def __call__(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        if len(x) == 0:
            return x.new_empty(0, self.vocab)
        logits = self.linear(x)
        missing = vocab_share(self.vocab, self.comm.num_ranks) - logits.shape[-1]
        return self.comm.all_gather(functional.pad(logits, (0, missing)))[:, : self.vocab]


@dataclass(frozen=True)
class ShardedTransformer:
    """A rank's share of a transformer; called as the whole is, and with the whole's results.

    `share` has the rank's heads and tokens, from `first_token` on.
    """

    share: Transformer
    comm: Comm
    first_token: int

    def __call__(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        """The last layer's hidden states, the same on every rank."""
        share, x = self.share, self.embed(token_ids)
        rotation = share.rotation(positions)
        for layer_id, layer in enumerate(share.layers):
            in_layer = partial(attend, layer_id)
            x = run_layer(layer, x, rotation, in_layer, share.head_dim, share.norm_eps)
        return x

    def embed(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Each token's own vector: from the one rank that has it, and zeros from all others."""
        places = token_ids - self.first_token
        elsewhere = (places < 0) | (places >= len(self.share.embedding))
        vectors = functional.embedding(places.masked_fill(elsewhere, 0), self.share.embedding)
        return self.comm.all_reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))

    def logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Scores of every token as the next one, in float32."""
        return self.share.logits(x)


def build_share(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    make_linear: MakeLinear,
    comm: Comm,
    finish_head: Callable[[DenseLinear], Linear] = lambda head: head,
) -> ShardedTransformer:
    """This rank's share of the model that `build_transformer` would make of the same."""
    rank, num_ranks = comm.rank, comm.num_ranks
    shares = shard_tensors(tensors, config, rank, num_ranks)
    smaller = local_config(config, rank, num_ranks)
    built = build_transformer(smaller, shares, dtype, make_linear, finish_head)
    layers = tuple(
        replace(each, out=SummedLinear(each.out, comm), down=SummedLinear(each.down, comm))
        for each in built.layers
    )
    head = GatheredHead(built.head, comm, config.vocab_size)
    first_token = span(config, "vocab", rank, num_ranks).start
    return ShardedTransformer(replace(built, layers=layers, head=head), comm, first_token)

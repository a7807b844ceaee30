"""Assigns the weights to ranks: a table of splits, applied to a model's stored tensors.

The model's code does not change: a rank builds an ordinary, smaller transformer, and wraps the
layers whose results must be summed or gathered. Source: Shoeybi et al. 2019 (Megatron-LM). "Column"
and "row" refer to W in y = x W, as in the literature; checkpoints store W transposed, so a column
split cuts stored rows, and a row split cuts stored columns.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import lcm

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, Transformer, build_transformer, run_layer
from minigen.parallel.comm import Collectives
from minigen.protocols import Attend, Linear


class Split(Enum):
    """How a matrix is cut."""

    COLUMN = "column"  # each rank computes some of the outputs from all inputs: no message
    ROW = "row"  # each rank uses some of the inputs, and the ranks' outputs must be summed


# By module: how it is cut, and along which axis. Modules that are not listed are on every rank.
PLAN: dict[str, tuple[Split, str]] = {
    "embed_tokens": (Split.COLUMN, "vocab"),
    "self_attn.q_proj": (Split.COLUMN, "q_heads"),
    "self_attn.k_proj": (Split.COLUMN, "kv_heads"),
    "self_attn.v_proj": (Split.COLUMN, "kv_heads"),
    "self_attn.o_proj": (Split.ROW, "q_heads"),
    "mlp.gate_proj": (Split.COLUMN, "ffn"),
    "mlp.up_proj": (Split.COLUMN, "ffn"),
    "mlp.down_proj": (Split.ROW, "ffn"),
    "lm_head": (Split.COLUMN, "vocab"),
}
MOST_RANKS = 64
_PANEL_ROWS, _PANEL_GROUP = 16, 32  # of packed int8 and int4 weights
_PREFIX = re.compile(r"^model\.(layers\.\d+\.)?")


def span(config: ModelConfig, axis: str, rank: int, num_ranks: int) -> range:
    """Return the rank's part of an axis as indices; the model must be divisible (`obstacle`).

    Query heads and ffn are cut evenly. KV heads are also cut evenly, or else each is replicated on
    the ranks whose query heads use it. The vocabulary's last part may be shorter than the others.
    """
    if axis == "vocab":
        share = vocab_share(config.vocab_size, num_ranks)
        return range(rank * share, min((rank + 1) * share, config.vocab_size))
    if axis == "kv_heads":
        first_head = rank * config.kv_heads // num_ranks  # equal on several ranks if replicated
        num_heads = max(config.kv_heads // num_ranks, 1)
        return range(first_head * config.head_dim, (first_head + num_heads) * config.head_dim)
    sizes = {"q_heads": config.q_heads * config.head_dim, "ffn": config.ffn}
    width = sizes[axis] // num_ranks
    return range(rank * width, (rank + 1) * width)


def vocab_share(vocab: int, num_ranks: int) -> int:
    """Return the vocabulary rows per rank; the last rank may have fewer."""
    return -(-vocab // num_ranks)


def obstacle(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], form: str, num_ranks: int
) -> str | None:
    """Return why a model in this weight format cannot be split over `num_ranks`; None if it can."""
    if config.q_heads % num_ranks:
        return f"{config.q_heads} query heads cannot be divided evenly"
    if config.kv_heads % num_ranks and num_ranks % config.kv_heads:
        return f"{config.kv_heads} KV heads can be neither divided nor replicated evenly"
    if config.ffn % num_ranks:
        return f"an ffn of {config.ffn} cannot be divided evenly"
    if (num_ranks - 1) * vocab_share(config.vocab_size, num_ranks) >= config.vocab_size:
        return f"a vocabulary of {config.vocab_size} leaves a rank without tokens"
    group = _PANEL_GROUP if form in ("int8", "int4") else 1
    rows = _PANEL_ROWS if form in ("int8", "int4") else 1
    for name, tensor in tensors.items() if num_ranks > 1 else ():
        split, axis = PLAN.get(module_of(name), (None, ""))
        if split is None or len(tensor.shape) == 1:
            continue
        in_panels = module_of(name) != "embed_tokens"  # its rows are looked up one by one
        for width in {len(span(config, axis, rank, num_ranks)) for rank in (0, num_ranks - 1)}:
            shared = lcm(tensor.column_unit, group)
            packed = lcm(tensor.row_unit, rows if in_panels else 1)
            if split is Split.ROW and width % shared:
                cut = f"{module_of(name)} would be cut into {width} inputs"
                return f"{cut}, within a group of {shared} that share a scale"
            if split is Split.COLUMN and width % packed:
                cut = f"{module_of(name)} would be cut into {width} outputs"
                return f"{cut}, which is not a multiple of {packed}"
    return None


def check_ranks(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], form: str, num_ranks: int
) -> None:
    """Raise `OptionError` if the model cannot be split; the message lists the possible counts."""
    reason = obstacle(config, tensors, form, num_ranks)
    if reason is None:
        return
    counts = range(1, min(config.q_heads, MOST_RANKS) + 1)
    good = [str(each) for each in counts if obstacle(config, tensors, form, each) is None]
    raise OptionError(
        f"tensor_parallel_size {num_ranks} does not divide this model: {reason}; "
        f"possible values are: {', '.join(good)}."
    )


def module_of(name: str) -> str:
    """Return the module of a tensor's name, without model and layer.

    >>> module_of("model.layers.3.self_attn.q_proj.weight")
    'self_attn.q_proj'
    """
    return _PREFIX.sub("", name).rpartition(".")[0]


def shard_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, rank: int, num_ranks: int
) -> dict[str, StoredTensor]:
    """Return the rank's shard of every tensor, still in the file; only these bytes are read.

    The bias of a row split is added once, so only rank 0 has it.
    """
    shares = {}
    for name, tensor in tensors.items():
        if module_of(name) not in PLAN:
            shares[name] = tensor
            continue
        split, axis = PLAN[module_of(name)]
        part = span(config, axis, rank, num_ranks)
        if split is Split.COLUMN:
            shares[name] = tensor.rows(part.start, part.stop)
        elif len(tensor.shape) == 2:
            shares[name] = tensor.columns(part.start, part.stop)
        elif rank == 0:
            shares[name] = tensor
    return shares


@dataclass(frozen=True)
class ShareBytes:
    """Stored bytes of a rank's weights: `own` are on this rank only, `repeated` on several."""

    own: int
    repeated: int


def share_bytes(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, rank: int, num_ranks: int
) -> ShareBytes:
    """Return the bytes that the rank reads. Norms, and KV heads fewer than ranks, are repeated."""
    own = repeated = 0
    for name, tensor in shard_tensors(tensors, config, rank, num_ranks).items():
        axis = PLAN[module_of(name)][1] if module_of(name) in PLAN else None
        if axis is None or (axis == "kv_heads" and num_ranks > config.kv_heads):
            repeated += tensor.num_bytes
        else:
            own += tensor.num_bytes
    return ShareBytes(own, repeated)


def local_config(config: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """Return the rank's shard as a smaller model: fewer heads, a narrower ffn, fewer tokens."""
    return replace(
        config,
        vocab_size=len(span(config, "vocab", rank, num_ranks)),
        q_heads=config.q_heads // num_ranks,
        kv_heads=max(config.kv_heads // num_ranks, 1),
        ffn=config.ffn // num_ranks,
    )


@dataclass(frozen=True)
class SummedLinear:
    """A row-split linear layer: each rank computes part of every sum; an all-reduce adds them."""

    linear: Linear
    comm: Collectives

    @property
    def parts(self) -> tuple[int, ...]:
        return self.linear.parts

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return self.comm.all_reduce(self.linear(x))


@dataclass(frozen=True)
class GatheredHead:
    """An output head split by vocabulary: an all-gather joins the ranks' logits."""

    linear: Linear
    comm: Collectives
    vocab: int

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.vocab,)

    def __call__(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        if len(x) == 0:
            return x.new_empty(0, self.vocab)
        return gather_logits(self.linear(x), self.vocab, self.comm)


def gather_logits(
    part: Float[Tensor, "rows share"], vocab: int, comm: Collectives
) -> Float[Tensor, "rows vocab"]:
    """Return all ranks' logits, joined by an all-gather; the last rank's part may be narrower."""
    missing = vocab_share(vocab, comm.num_ranks) - part.shape[-1]
    return comm.all_gather(functional.pad(part, (0, missing)))[:, :vocab]


def embed_share(
    embedding: Float[Tensor, "share hidden"],
    token_ids: Int64[Tensor, " tokens"],
    first_token: int,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Return the token embeddings: one rank has each vector, the others add zeros.

    `embedding` has the vectors of the tokens from `first_token` on.
    """
    places = token_ids - first_token
    elsewhere = (places < 0) | (places >= len(embedding))
    vectors = functional.embedding(places.masked_fill(elsewhere, 0), embedding)
    return comm.all_reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))


@dataclass(frozen=True)
class ShardedTransformer:
    """A rank's shard of a transformer, with the interface and the results of the whole model.

    `share` has the rank's heads, and the vocabulary's tokens from `first_token` on.
    """

    share: Transformer
    comm: Collectives
    first_token: int

    def __call__(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's hidden states, equal on every rank."""
        share, x = self.share, self.embed(token_ids)
        rotation = share.rotation(positions)
        for layer_id, layer in enumerate(share.layers):
            in_layer = partial(attend, layer_id)
            x = run_layer(layer, x, rotation, in_layer, share.head_dim, share.norm_eps)
        return x

    def embed(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Return the token embeddings, of which each rank has a share."""
        return embed_share(self.share.embedding, token_ids, self.first_token, self.comm)

    def logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token, in float32."""
        return self.share.logits(x)


def build_share(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    make_linear: MakeLinear,
    comm: Collectives,
    finish_head: Callable[[DenseLinear], Linear] = lambda head: head,
) -> ShardedTransformer:
    """Build this rank's shard of the model that `build_transformer` would build."""
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

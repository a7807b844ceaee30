"""Pipeline parallelism: stages of layers, and the micro-batches of a step that pass through them.

A stage has some of the layers on one rank, or split over several (tensor parallelism). The first
stage also has the embedding, the last one the final norm and the output head; if both are the same
matrix (tied embeddings), it is on both stages. Each stage has the keys and values of its own layers
only. Block b of a sequence is block b on every stage.

All ranks receive a step's whole batch, and cut it into the same micro-batches. While a stage
computes one, the next stage computes the one before it. The last stage returns the logits to rank
0. With p stages of equal speed and m micro-batches, a stage has nothing to do in (p - 1) /
(m + p - 1) of the step (the bubble), because the pipeline fills and drains within a step. Source:
Huang et al. 2019 (GPipe).
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.hardware import set_torch_threads
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.model.layers import DenseLinear, rms_norm, rotary_tables
from minigen.model.transformer import (
    Layer,
    MakeLinear,
    build_frequencies,
    build_layer,
    run_layer,
)
from minigen.parallel.comm import Comm
from minigen.parallel.runner import Step
from minigen.parallel.sharding import (
    GatheredHead,
    ShareBytes,
    SummedLinear,
    embed_share,
    local_config,
    shard_tensors,
    share_bytes,
    span,
)
from minigen.protocols import Attend, Linear
from minigen.trace.events import EventKind, Trace

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NORM, _LAYERS = "model.norm.weight", "model.layers."


@dataclass(frozen=True)
class Place:
    """The place of a rank: the ranks of a stage are neighbours, stage after stage."""

    rank: int
    num_ranks: int
    num_stages: int

    @property
    def ranks_per_stage(self) -> int:
        return self.num_ranks // self.num_stages

    @property
    def stage(self) -> int:
        return self.rank // self.ranks_per_stage

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its stage."""
        return self.rank % self.ranks_per_stage == 0

    @property
    def previous(self) -> int:
        """The rank whose hidden states this rank receives."""
        return self.rank - self.ranks_per_stage

    @property
    def next(self) -> int:
        """The rank to which this rank sends its hidden states."""
        return self.rank + self.ranks_per_stage

    @property
    def leaders(self) -> range:
        """The first ranks of all stages."""
        return range(0, self.num_ranks, self.ranks_per_stage)

    @property
    def of_stage(self) -> range:
        """All ranks of this rank's stage."""
        start = self.stage * self.ranks_per_stage
        return range(start, start + self.ranks_per_stage)


def stage_layers(
    num_layers: int, num_stages: int, dealt: SequenceOf[int] | None = None
) -> list[range]:
    """Return the layers of each stage: as many as `dealt` says, or else equal numbers.

    If equal numbers do not divide, the first stages have one more. The last stage has the output
    head, so that it gets none of the layers that are left over.

    >>> stage_layers(8, 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    >>> stage_layers(8, 3, (4, 3, 1))
    [range(0, 4), range(4, 7), range(7, 8)]
    """
    each, rest = divmod(num_layers, num_stages)
    sizes = dealt or [each + (stage < rest) for stage in range(num_stages)]
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def balanced_layers(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, num_stages: int
) -> tuple[int, ...]:
    """Return numbers of layers for which all stages multiply by about as many weights in a decode.

    The output head counts as the layers that have as many weights (with int4 it has more bytes than
    these, so that it takes longer). The embedding counts nothing, because it only looks rows up.
    """
    in_layers = sum(prod(each.shape) for name, each in tensors.items() if _LAYERS in name)
    head = prod(tensors[_EMBEDDING if config.tied_embeddings else _HEAD].shape)
    sizes = [1] * num_stages
    work = [1.0] * (num_stages - 1) + [1 + config.num_layers * head / in_layers]
    for _ in range(config.num_layers - num_stages):
        least = work.index(min(work))
        sizes[least] += 1
        work[least] += 1
    return tuple(sizes)


def check_stages(
    config: ModelConfig, num_stages: int, dealt: SequenceOf[int] | None = None
) -> None:
    """Raise `OptionError` if a stage gets no layer, or if the layers dealt are not the model's."""
    if num_stages > config.num_layers:
        raise OptionError(
            f"pipeline_parallel_size {num_stages} leaves a stage without a layer: the model has "
            f"{config.num_layers}, so possible values are 1 to {config.num_layers}."
        )
    if dealt is not None and sum(dealt) != config.num_layers:
        equal = ",".join(str(len(each)) for each in stage_layers(config.num_layers, num_stages))
        raise OptionError(
            f"pipeline_layers {','.join(map(str, dealt))} are {sum(dealt)} layers, but the model "
            f"has {config.num_layers}: give numbers that sum to {config.num_layers}, such as "
            f"{equal}."
        )


def stage_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, layers: range
) -> dict[str, StoredTensor]:
    """Return the tensors of the stage with these layers, under their own names, still in the file.

    The embedding is on the first stage and, if it is also the output head, on the last one.
    """
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    own = {
        _EMBEDDING: is_first or (is_last and config.tied_embeddings),
        _NORM: is_last,
        _HEAD: is_last,
    }

    def has(name: str) -> bool:
        if name.startswith(_LAYERS):
            return int(name.split(".")[2]) in layers
        return own.get(name, True)

    return {name: tensor for name, tensor in tensors.items() if has(name)}


def stage_bytes(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, layers: range, place: Place
) -> ShareBytes:
    """Return the bytes that a rank of the stage with these layers reads of the file.

    A tied embedding counts as `own` on the first and on the last stage.
    """
    own = stage_tensors(tensors, config, layers)
    rank_in_stage = place.rank - place.of_stage.start
    return share_bytes(own, config, rank_in_stage, place.ranks_per_stage)


@dataclass(frozen=True)
class Stage:
    """A rank's share of a stage's layers.

    `embedding` is None except on the first stage, `norm` and `head` except on the last one. `comm`
    connects the ranks of the stage, which have the vocabulary's tokens from `first_token` on each.
    """

    layers: tuple[Layer, ...]
    frequencies: Float[Tensor, " half"]
    head_dim: int
    norm_eps: float
    embedding: Float[Tensor, "vocab hidden"] | None
    norm: Float[Tensor, " hidden"] | None
    head: Linear | None
    comm: Comm
    first_token: int

    def __call__(
        self,
        x: Float[Tensor, "tokens hidden"],
        positions: Int64[Tensor, " tokens"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the hidden states after this stage, equal on each of its ranks.

        `attend` counts the layers of this stage from 0.
        """
        rotation = rotary_tables(self.frequencies, positions)
        for layer_id, layer in enumerate(self.layers):
            in_layer = partial(attend, layer_id)
            x = run_layer(layer, x, rotation, in_layer, self.head_dim, self.norm_eps)
        return x

    def embed(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Return the token embeddings; only on the first stage."""
        assert self.embedding is not None
        return embed_share(self.embedding, token_ids, self.first_token, self.comm)

    def logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token, in float32; only on the last stage."""
        assert self.norm is not None
        assert self.head is not None
        return self.head(rms_norm(x, self.norm, self.norm_eps)).float()


def build_stage(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    make_linear: MakeLinear,
    layers: range,
    comm: Comm,
    finish_head: Callable[[DenseLinear], Linear] = lambda head: head,
) -> Stage:
    """Build a rank's share of the stage with these layers; `comm` connects the stage's ranks."""
    rank, num_ranks = comm.rank, comm.num_ranks
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    own = stage_tensors(tensors, config, layers)
    shares = shard_tensors(own, config, rank, num_ranks)
    smaller = local_config(config, rank, num_ranks)
    built = (build_layer(shares, layer_id, dtype, make_linear) for layer_id in layers)
    embedding = None
    if _EMBEDDING in shares:
        embedding = shares[_EMBEDDING].dequantize(dtype)
        shares[_EMBEDDING].release_pages()
    head: Linear | None = None
    if is_last and config.tied_embeddings:
        assert embedding is not None
        head = finish_head(DenseLinear(embedding, None, (smaller.vocab_size,)))
    elif is_last:
        head = make_linear([shares[_HEAD]], [])
    return Stage(
        layers=tuple(
            replace(each, out=SummedLinear(each.out, comm), down=SummedLinear(each.down, comm))
            for each in built
        ),
        frequencies=build_frequencies(config, shares),
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        embedding=embedding if is_first else None,
        norm=shares[_NORM].dequantize(dtype) if is_last else None,
        head=None if head is None else GatheredHead(head, comm, config.vocab_size),
        comm=comm,
        first_token=span(config, "vocab", rank, num_ranks).start,
    )


def micro_batches(batch: Batch, most: int) -> list[Batch]:
    """Cut a batch between sequences into at most `most` micro-batches, of about as many tokens.

    The order of the sequences stays, so the logits of all micro-batches, one after another, are
    those of the batch. A sequence is never cut: the chunk of a long prompt may be a micro-batch.
    """
    num_sequences = len(batch.context_lens)
    most = min(most, num_sequences)
    cuts = [0, num_sequences]
    for number in range(1, most):
        wanted = number * batch.query_starts[-1] / most
        cuts.append(min(range(num_sequences), key=lambda i: abs(batch.query_starts[i] - wanted)))
    return [_cut(batch, start, stop) for start, stop in pairwise(sorted(set(cuts)))]


def _cut(batch: Batch, start: int, stop: int) -> Batch:
    """Return the sequences `start` to `stop` as a batch of their own."""
    first, last = batch.query_starts[start], batch.query_starts[stop]
    rows = batch.logits_rows
    return Batch(
        token_ids=batch.token_ids[first:last],
        positions=batch.positions[first:last],
        slots=batch.slots[first:last],
        query_starts=[each - first for each in batch.query_starts[start : stop + 1]],
        context_lens=batch.context_lens[start:stop],
        block_tables=batch.block_tables[start:stop],
        logits_rows=rows[(rows >= first) & (rows < last)] - first,
        num_decodes=min(max(batch.num_decodes - start, 0), stop - start),
    )


@dataclass(frozen=True)
class Clock:
    """Collects the times of the micro-batches of all stages at rank 0, which has a trace.

    `comm` connects all ranks; its messages with times are not traced.
    """

    comm: Comm
    place: Place
    trace: Trace | None

    def report(self, parts: SequenceOf[Batch], times: list[list[int]]) -> None:
        """Send the start and end of each micro-batch to rank 0, or emit those of all stages."""
        if not self.place.leads:
            return
        own = torch.tensor(times)
        if self.trace is None:
            self.comm.send(own, 0)
            return
        others = [self.comm.receive(own.clone(), each) for each in self.place.leaders[1:]]
        for stage, found in enumerate([own, *others]):
            for number, (started_ns, ended_ns) in enumerate(found.tolist()):
                self.trace.emit(
                    EventKind.MICRO_BATCH,
                    stage=stage,
                    micro_batch=number,
                    sequences=len(parts[number].context_lens),
                    tokens=len(parts[number].token_ids),
                    started_ns=started_ns,
                    duration_ns=ended_ns - started_ns,
                )


class StageRunner:
    """Runs one rank's share of its stage in every step, for one micro-batch after another.

    `windows` are those of the stage's layers. `comm` connects all ranks.
    """

    def __init__(
        self,
        stage: Stage,
        pool: KVPool,
        windows: SequenceOf[int | None],
        num_threads: int,
        comm: Comm,
        clock: Clock,
        vocab: int,
        hidden: int,
        dtype: torch.dtype,
        max_micro_batches: int,
    ):
        self.stage, self.pool, self.windows = stage, pool, windows
        self.block_size = pool.block_size
        self.num_threads, self.max_micro_batches = num_threads, max_micro_batches
        self._comm, self._clock, self._place = comm, clock, clock.place
        self._vocab, self._hidden, self._dtype = vocab, hidden, dtype

    @torch.inference_mode()
    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """Return the logits on rank 0, and none on other ranks; all must call this together."""
        set_torch_threads(self.num_threads)
        self.pool.copy_blocks(step.copies)
        parts = micro_batches(step.batch, self.max_micro_batches)
        logits, times = [], []
        for part in parts:
            x = self._receive(part)
            started_ns = time.perf_counter_ns()
            if x is None:
                x = self.stage.embed(part.token_ids)
            x = self.stage(x, part.positions, attend_paged(self.pool, part, self.windows))
            if self._place.is_last:
                logits.append(self.stage.logits(x[part.logits_rows]))
            times.append([started_ns, time.perf_counter_ns()])
            if not self._place.is_last:
                self._comm.send(x, self._place.next)
        found = self._logits_to_rank_0(logits, len(step.batch.logits_rows))
        if step.is_timed:
            self._clock.report(parts, times)
        return found

    def _receive(self, part: Batch) -> Float[Tensor, "tokens hidden"] | None:
        """Return the hidden states of the previous stage; None on the first stage."""
        if self._place.is_first:
            return None
        size = (len(part.token_ids), self._hidden)
        return self._comm.receive(torch.empty(size, dtype=self._dtype), self._place.previous)

    def _logits_to_rank_0(self, logits: list[Tensor], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """Send the logits in one message: earlier, rank 0 may not wait for any yet.

        The stages pass on micro-batches by messages that wait for their receiver; a message
        backwards in between could make two ranks wait for each other.
        """
        place, none = self._place, torch.empty(0, self._vocab)
        source = place.leaders[-1]
        if place.num_stages == 1 and place.rank == 0:
            return torch.cat(logits)
        if num_rows and place.rank == source:
            self._comm.send(torch.cat(logits), 0)
        if num_rows and place.rank == 0:
            return self._comm.receive(torch.empty(num_rows, self._vocab), source)
        return none

"""A step divided over ranks by tokens: all weights on every rank, and a part of the KV cache.

Every block of the KV cache is cut into as many slices as there are ranks; slice r of each block is
on rank r. So block tables, sharing, copies and evictions are those of one rank, and a sequence's
tokens are divided evenly however its blocks are numbered (decode context parallelism in vLLM
interleaves tokens in the same way).

A step has two kinds of tokens. Chunks of a prompt with two tokens per rank or more are *divided*:
each rank computes zig-zag parts of them, and keys and values go round in a ring, those of the
earlier context with the new ones. The tokens of all other chunks are *shared*: all ranks compute
all of them, each attends to its own slices of the cache, and one all-gather merges the results.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from minigen.hardware import set_torch_threads
from minigen.kv_cache.paged import Batch, KVPool
from minigen.model.partial_attention import attend_part
from minigen.model.transformer import Transformer
from minigen.parallel.comm import Comm
from minigen.parallel.context import (
    Merged,
    Run,
    Tile,
    passed_round,
    runs_of,
    split_attention,
    tiles_of,
    zigzag_parts,
)
from minigen.parallel.runner import Step
from minigen.protocols import Attend


@dataclass(frozen=True)
class Slices:
    """Which rank has which tokens of the cache: slice r of every block is on rank r.

    Position t of a sequence is in slice (t mod block_size) // size, where size is the tokens of a
    slice, so slices 0, 1, 2, ... of the whole sequence go to the ranks in turn.
    """

    block_size: int
    num_ranks: int

    @property
    def size(self) -> int:
        """The tokens of a slice: a rank's own block size."""
        return self.block_size // self.num_ranks

    def local(
        self, slots: Int64[Tensor, " tokens"], rank: int
    ) -> tuple[Int64[Tensor, " owned"], Int64[Tensor, " owned"]]:
        """Return the indices of the slots that are on a rank, and the rank's own slots for them."""
        block, offset = slots // self.block_size, slots % self.block_size
        (owned,) = torch.nonzero(offset // self.size == rank, as_tuple=True)
        return owned, (block * self.size + offset % self.size)[owned]

    def positions(self, num_slots: int, rank: int) -> Int64[Tensor, " slots"]:
        """Return the positions of a rank's first slots of a sequence."""
        slot = torch.arange(num_slots)
        return slot // self.size * self.block_size + rank * self.size + slot % self.size

    def most(self, num_tokens: int) -> int:
        """Return the slots that rank 0, which has most, needs for a sequence's first tokens."""
        blocks, rest = divmod(num_tokens, self.block_size)
        return blocks * self.size + min(rest, self.size)


@dataclass(frozen=True)
class Chunk:
    """A sequence's new tokens in a step: their indices in the batch, and their first position."""

    row: int  # of the sequence in the batch
    indices: range
    first: int

    def runs(self, part: tuple[range, ...], first_row: int) -> list[Run]:
        """Return a rank's part of the chunk as runs of rows from `first_row` on."""
        return runs_of(
            tuple(range(self.first + each.start, self.first + each.stop) for each in part),
            first_row,
        )


@dataclass(frozen=True)
class SharedRows:
    """Single tokens that all ranks compute: each attends to the rank's slots in its own table."""

    indices: Int64[Tensor, " rows"]
    stored: tuple[Int64[Tensor, " owned"], Int64[Tensor, " owned"]]  # rows, and their slots
    tables: Int64[Tensor, "rows blocks"]
    masks: dict[int | None, Bool[Tensor, "rows slots"]]  # by window


@dataclass(frozen=True)
class DividedRows:
    """The tokens of divided chunks as one rank sees them: its own rows, and what goes round.

    `indices[r]` are rank r's tokens in the step's batch. Rank r's message has these tokens' keys
    and values, padded to `num_rows`, and then those of earlier context in its `cached_slots`, as
    many on each rank. Of that message, `stored[r]` is the rows that this rank stores and their
    slots, and `tiles[window][r]` what this rank's queries see.
    """

    num_rows: int
    indices: list[Int64[Tensor, " _tokens"]]
    cached_slots: Int64[Tensor, " slots"]
    stored: list[tuple[Int64[Tensor, " _owned"], Int64[Tensor, " _owned"]]]
    tiles: dict[int | None, list[list[Tile]]]


@dataclass(frozen=True)
class LocalBatch:
    """A rank's rows of a step: the shared tokens, then its part of the divided ones, then padding.

    All ranks have as many rows, so that equal processors give shared tokens equal results. A row of
    logits belongs to rank 0 if that has the token. `logits_rows` are the rows whose logits belong
    to this rank and `logits_places` their places among all; `is_gathered` if any belong to others.
    """

    token_ids: Int64[Tensor, " rows"]
    positions: Int64[Tensor, " rows"]
    shared: SharedRows
    divided: DividedRows
    logits_rows: Int64[Tensor, " own"]
    logits_places: Int64[Tensor, " own"]
    is_gathered: bool


def local_batch(
    batch: Batch, slices: Slices, rank: int, windows: SequenceOf[int | None]
) -> LocalBatch:
    """Return what a rank computes of a step. Every rank knows all ranks' parts without a message.

    The last token of a divided chunk is always on rank 0, which has the last chunk of the zig-zag.
    """
    chunks = [
        Chunk(row, range(first, end), int(batch.context_lens[row]) - (end - first))
        for row, (first, end) in enumerate(pairwise(batch.query_starts))
    ]
    least = 2 * slices.num_ranks  # a token for each part of the zig-zag
    shared = _shared([c for c in chunks if len(c.indices) < least], batch, slices, rank, windows)
    divided = _divided([c for c in chunks if len(c.indices) >= least], batch, slices, rank, windows)
    own = torch.cat([shared.indices, divided.indices[rank]])
    num_rows = len(shared.indices) + divided.num_rows
    padded = torch.cat([own, own.new_zeros(num_rows - len(own))])
    row_of, owner_of = torch.zeros_like(batch.token_ids), torch.zeros_like(batch.token_ids)
    for each, indices in enumerate(divided.indices):
        owner_of[indices] = each
    row_of[own] = torch.arange(len(own))
    owners = owner_of[batch.logits_rows]
    (places,) = torch.nonzero(owners == rank, as_tuple=True)
    return LocalBatch(
        token_ids=batch.token_ids[padded],
        positions=batch.positions[padded],
        shared=shared,
        divided=divided,
        logits_rows=row_of[batch.logits_rows[places]],
        logits_places=places,
        is_gathered=bool((owners > 0).any()),
    )


def _shared(
    chunks: list[Chunk], batch: Batch, slices: Slices, rank: int, windows: Iterable[int | None]
) -> SharedRows:
    indices = _integers(index for chunk in chunks for index in chunk.indices)
    sequences = _integers(chunk.row for chunk in chunks for _ in chunk.indices)
    lengths = batch.positions[indices] + 1
    num_blocks = -(-int(lengths.max()) // slices.block_size) if len(lengths) else 0
    position = slices.positions(num_blocks * slices.size, rank)
    end = lengths.unsqueeze(-1)
    masks = {
        window: (position < end) & (position >= (0 if window is None else end - window))
        for window in set(windows)
    }
    tables = batch.block_tables[sequences, :num_blocks]
    return SharedRows(indices, slices.local(batch.slots[indices], rank), tables, masks)


def _divided(
    chunks: list[Chunk], batch: Batch, slices: Slices, rank: int, windows: Iterable[int | None]
) -> DividedRows:
    ranks = range(slices.num_ranks)
    parts = [zigzag_parts(len(chunk.indices), slices.num_ranks) for chunk in chunks]
    indices = [
        _integers(
            chunk.indices[offset]
            for chunk, part in zip(chunks, parts, strict=True)
            for run in part[each]
            for offset in run
        )
        for each in ranks
    ]
    num_rows = max(map(len, indices))
    queries = _new_runs(chunks, parts, rank)
    keys = [
        [
            [*new, cached]
            for new, cached in zip(
                _new_runs(chunks, parts, each),
                _cached_runs(chunks, slices, each, num_rows),
                strict=True,
            )
        ]
        for each in ranks
    ]
    tiles = {
        window: [
            [
                tile
                for mine, theirs in zip(queries, keys[each], strict=True)
                for tile in tiles_of(mine, theirs, window)
            ]
            for each in ranks
        ]
        for window in set(windows)
    }
    cached = [_cached_slots(batch.block_tables[chunk.row], chunk.first, slices) for chunk in chunks]
    stored = [slices.local(batch.slots[theirs], rank) for theirs in indices]
    empty = torch.empty(0, dtype=torch.int64)
    return DividedRows(num_rows, indices, torch.cat([empty, *cached]), stored, tiles)


def _new_runs(
    chunks: list[Chunk], parts: list[list[tuple[range, ...]]], rank: int
) -> list[list[Run]]:
    """Return, for each chunk, the runs of its new tokens in the rows of a rank."""
    runs, first_row = [], 0
    for chunk, part in zip(chunks, parts, strict=True):
        runs.append(chunk.runs(part[rank], first_row))
        first_row += sum(map(len, part[rank]))
    return runs


def _cached_runs(chunks: list[Chunk], slices: Slices, rank: int, first_row: int) -> list[Run]:
    """Return, for each chunk, the run of its earlier context in the message of a rank."""
    runs = []
    for chunk in chunks:
        num_slots = slices.most(chunk.first)
        positions = slices.positions(num_slots, rank)
        runs.append(Run(first_row, positions[positions < chunk.first]))
        first_row += num_slots
    return runs


def _cached_slots(
    table: Int64[Tensor, " blocks"], num_tokens: int, slices: Slices
) -> Int64[Tensor, " slots"]:
    """Return a rank's slots of a sequence's first tokens."""
    slot = torch.arange(slices.most(num_tokens))
    return table[slot // slices.size] * slices.size + slot % slices.size


def _integers(numbers: Iterable[int]) -> Int64[Tensor, " numbers"]:
    return torch.tensor(list(numbers), dtype=torch.int64)


def attend_in_context(
    comm: Comm, pool: KVPool, local: LocalBatch, windows: SequenceOf[int | None]
) -> Attend:
    """Return attention over all ranks' parts of the pool, for the rank's rows of one step.

    Messages per layer: `num_ranks - 1` shifts if the step has divided tokens, each of
    2 (num_rows + cached slots) kv_heads head_dim numbers, and one all-gather if it has shared ones,
    of (head_dim + 1) q_heads float32 numbers per token.
    """
    shared, divided, num_shared = local.shared, local.divided, len(local.shared.indices)

    def attend_shared(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, slots = shared.stored
        pool.store(layer_id, k[rows], v[rows], slots)
        keys, values = pool.gather(layer_id, shared.tables)
        mask = shared.masks[windows[layer_id]].unsqueeze(1)
        part = attend_part(q.unsqueeze(1), keys, values, mask)
        return split_attention(comm, part).squeeze(1).to(q.dtype)

    def attend_divided(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached = pool.kv[layer_id].flatten(1, 2).index_select(1, divided.cached_slots)
        message = torch.cat([torch.stack([k, v]), cached], dim=1)
        tiles, merged = divided.tiles[windows[layer_id]], Merged(q)
        for source, (keys, values) in passed_round(comm, message):
            rows, slots = divided.stored[source]
            pool.store(layer_id, keys[rows], values[rows], slots)
            merged.add(keys, values, tiles[source])
        return merged.output

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        if num_shared:
            outs.append(attend_shared(layer_id, *(each[:num_shared] for each in (q, k, v))))
        if divided.num_rows:
            outs.append(attend_divided(layer_id, *(each[num_shared:] for each in (q, k, v))))
        return torch.cat(outs)

    return attend


class ContextRunner:
    """Runs one rank's rows of every step, with all weights and the rank's slices of the KV cache.

    The slices are the blocks of `pool`.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        windows: SequenceOf[int | None],
        comm: Comm,
        num_threads: int,
    ):
        self.model, self.pool, self.windows, self.comm = model, pool, windows, comm
        self.slices = Slices(pool.block_size * comm.num_ranks, comm.num_ranks)
        self.num_threads = num_threads

    @property
    def block_size(self) -> int:
        """The tokens of a block, of all ranks together."""
        return self.slices.block_size

    @torch.inference_mode()
    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """Return the logits on rank 0, and none elsewhere; all ranks must run the same step."""
        set_torch_threads(self.num_threads)
        self.pool.copy_blocks(step.copies)
        local = local_batch(step.batch, self.slices, self.comm.rank, self.windows)
        attend = attend_in_context(self.comm, self.pool, local, self.windows)
        hidden = self.model(local.token_ids, local.positions, attend)
        rows = hidden.new_zeros(len(step.batch.logits_rows), hidden.shape[-1])
        rows[local.logits_places] = hidden[local.logits_rows]
        if local.is_gathered:
            rows = self.comm.all_reduce(rows)  # one rank has each row, the others add zeros
        return self.model.logits(rows if self.comm.rank == 0 else rows[:0])

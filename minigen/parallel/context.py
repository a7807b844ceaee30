"""Context parallelism: the tokens of one sequence divided over ranks, and attention across them.

A long prompt has many queries: each rank has some of them, and keys and values go round the ranks
in a ring (ring attention, Liu et al. 2023). A token after a long context is one query over a long
cache: every rank attends to its own part of the cache, and one message brings the results together.
Both end in the same merge by log-sum-exp.

Under the causal mask, later queries see more keys. Plain parts, one run of tokens per rank, leave
the first ranks idle while the last one works. In zig-zag parts each rank has a chunk from the front
and its mirror image from the back, and all ranks have the same work in every turn of the ring. The
division is that of Llama 3's training (Grattafiori et al. 2024, section 3.3.2), which gathers the
keys instead of passing them on.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from minigen.model.partial_attention import PartialAttention, attend_part, merge
from minigen.parallel.comm import Comm

Parts = list[tuple[range, ...]]  # by rank: the runs of positions that it has


def plain_parts(num_tokens: int, num_ranks: int) -> Parts:
    """Divide a prompt into one run of tokens per rank; their lengths differ by one at most.

    >>> plain_parts(8, 2)
    [(range(0, 4),), (range(4, 8),)]
    """
    return [(chunk,) for chunk in _chunks(num_tokens, num_ranks)]


def zigzag_parts(num_tokens: int, num_ranks: int) -> Parts:
    """Divide a prompt into 2p chunks, of which rank i of p has chunks i and 2p - 1 - i.

    >>> zigzag_parts(8, 2)
    [(range(0, 2), range(6, 8)), (range(2, 4), range(4, 6))]
    """
    chunks = _chunks(num_tokens, 2 * num_ranks)
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]


def _chunks(num_tokens: int, num_chunks: int) -> list[range]:
    ends = [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def most_rows(parts: Parts) -> int:
    """Return the most tokens that a rank has: the others pad their tensors to as many rows."""
    return max(sum(map(len, part)) for part in parts)


@dataclass(frozen=True)
class Run:
    """Rows of a tensor, from `first_row` on, whose tokens are of one sequence, in order."""

    first_row: int
    positions: Int64[Tensor, " rows"]


@dataclass(frozen=True)
class Tile:
    """Rows of queries, and rows of keys that they see; without a mask, each sees all of them."""

    queries: slice
    keys: slice
    mask: Bool[Tensor, "queries keys"] | None

    @property
    def num_pairs(self) -> int:
        """The pairs of a query and a key that it sees."""
        if self.mask is not None:
            return int(self.mask.sum())
        return (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)


def runs_of(part: tuple[range, ...], first_row: int = 0) -> list[Run]:
    """Return a rank's part of a prompt as runs of rows, one after another."""
    runs = []
    for positions in part:
        runs.append(Run(first_row, torch.arange(positions.start, positions.stop)))
        first_row += len(positions)
    return runs


def tile_of(queries: Run, keys: Run, window: int | None = None) -> Tile | None:
    """Return what the queries see of the keys of the same sequence; None if it is nothing.

    A query sees its own position and earlier ones, at most `window` of them. Keys that no query
    sees are left out, so that they cost no work.
    """
    if not len(queries.positions) or not len(keys.positions):
        return None
    query, key = queries.positions, keys.positions
    end = int((key <= query[-1]).sum())
    start = 0 if window is None else int((key <= query[0] - window).sum())
    if start >= end:
        return None
    key = key[start:end]
    rows = slice(queries.first_row, queries.first_row + len(query))
    columns = slice(keys.first_row + start, keys.first_row + end)
    if key[-1] <= query[0] and (window is None or key[0] > query[-1] - window):
        return Tile(rows, columns, None)
    seen = key <= query.unsqueeze(-1)
    if window is not None:
        seen &= key > query.unsqueeze(-1) - window
    return Tile(rows, columns, seen)


def tiles_of(
    queries: SequenceOf[Run], keys: SequenceOf[Run], window: int | None = None
) -> list[Tile]:
    """Return the tiles of all runs of queries over all runs of keys of one sequence."""
    found = [tile_of(rows, columns, window) for rows in queries for columns in keys]
    return [tile for tile in found if tile is not None]


def prompt_tiles(parts: Parts, rank: int, window: int | None = None) -> list[list[Tile]]:
    """Return, for each rank, what the queries of `rank` see of that rank's keys."""
    return [tiles_of(runs_of(parts[rank]), runs_of(keys), window) for keys in parts]


def work_by_turn(parts: Parts, window: int | None = None) -> list[list[int]]:
    """Return the pairs of query and key that each rank computes, by turn of the ring, then rank.

    Every turn takes as long as its busiest rank, because the ranks pass keys on together.

    >>> work_by_turn(plain_parts(8, 2)), work_by_turn(zigzag_parts(8, 2))
    ([[10, 10], [0, 16]], [[10, 10], [8, 8]])
    """
    num_ranks = len(parts)
    tiles = [prompt_tiles(parts, rank, window) for rank in range(num_ranks)]
    return [
        [
            sum(tile.num_pairs for tile in tiles[rank][(rank - turn) % num_ranks])
            for rank in range(num_ranks)
        ]
        for turn in range(num_ranks)
    ]


def passed_round(comm: Comm, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's tensor and that rank, this rank's own first, as they go round the ring.

    All ranks must read to the end. It takes `num_ranks - 1` messages of `x`'s bytes from each rank.
    """
    for turn in range(comm.num_ranks):
        yield (comm.rank - turn) % comm.num_ranks, x
        if turn < comm.num_ranks - 1:
            x = comm.shift(x)


class Merged:
    """The partial attention of a rank's queries over all keys so far; grows tile by tile."""

    def __init__(self, q: Float[Tensor, "queries q_heads head_dim"]):
        wide = torch.promote_types(q.dtype, torch.float32)
        self._q = q
        self._output = torch.zeros(q.shape, dtype=wide)
        self._log_sum_exp = torch.full(q.shape[:-1], -torch.inf, dtype=wide)

    def add(
        self,
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        tiles: SequenceOf[Tile],
    ) -> None:
        """Attend to the tiles of these keys, and merge the results into those so far."""
        for tile in tiles:
            rows = tile.queries
            part = attend_part(self._q[rows], k[tile.keys], v[tile.keys], tile.mask)
            so_far = PartialAttention(self._output[rows], self._log_sum_exp[rows])
            both = merge([so_far, part])
            self._output[rows], self._log_sum_exp[rows] = both.output, both.log_sum_exp

    @property
    def output(self) -> Float[Tensor, "queries q_heads head_dim"]:
        """The attention over all keys so far, in the dtype of the queries."""
        return self._output.to(self._q.dtype)


def ring_attention(
    comm: Comm,
    q: Float[Tensor, "rows q_heads head_dim"],
    k: Float[Tensor, "rows_of_keys kv_heads head_dim"],
    v: Float[Tensor, "rows_of_keys kv_heads head_dim"],
    tiles: SequenceOf[SequenceOf[Tile]],
) -> Float[Tensor, "rows q_heads head_dim"]:
    """Return the attention of this rank's queries over the keys of all ranks.

    `tiles[r]` is what these queries see of rank r's keys (`prompt_tiles`). The keys have as many
    rows on every rank; rows in no tile are padding. Each rank sends `num_ranks - 1` messages of the
    bytes of k and v. Source: ring attention, Liu et al. 2023.
    """
    merged = Merged(q)
    for source, (keys, values) in passed_round(comm, torch.stack([k, v])):
        merged.add(keys, values, tiles[source])
    return merged.output


def split_attention(
    comm: Comm, part: PartialAttention
) -> Float[Tensor, "*batch queries q_heads head_dim"]:
    """Return the attention of queries that all ranks have, each over its own part of the keys.

    `part` is this rank's. One all-gather of (head_dim + 1) numbers per query and head; the result
    is the same on all ranks to the last bit.
    """
    own = torch.cat([part.output, part.log_sum_exp.unsqueeze(-1)], dim=-1)
    everyones = comm.all_gather(own).unflatten(-1, (comm.num_ranks, -1)).unbind(-2)
    return merge([PartialAttention(each[..., :-1], each[..., -1]) for each in everyones]).output

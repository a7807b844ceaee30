"""Attention over parts of the keys, merged in a ring of ranks or from the parts of a long cache.

Sources: Liu et al. 2023 (Ring Attention); Dubey et al. 2024 (Llama 3, two chunks for each rank);
Yang et al. 2024 (Context Parallelism, decoding with a cache that is split by tokens).
"""

import math
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.parallel.comm import run_ranks

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Part = tuple[Tensor, Tensor]  # an output and its log-sum-exp


def attend_part(
    q: Float[Tensor, "queries heads head_dim"],
    k: Float[Tensor, "keys heads head_dim"],
    v: Float[Tensor, "keys heads head_dim"],
    q_positions: Sequence[int],
    k_positions: Sequence[int],
) -> tuple[Float[Tensor, "queries heads head_dim"], Float[Tensor, "queries heads"]]:
    """Return the causal attention over some keys, and the log of the sum of exp(score) of each.

    A query sees the keys at its own position and before it. One that sees none of these keys has
    the result 0 and -inf.
    """
    scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(q.shape[-1])
    later = torch.tensor(k_positions)[None, :] > torch.tensor(q_positions)[:, None]
    scores = scores.masked_fill(later.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def plain_part(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of a rank if each one gets one piece of the prompt."""
    size, more = divmod(num_tokens, num_ranks)
    begin = rank * size + min(rank, more)
    return list(range(begin, begin + size + (rank < more)))


def ring_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens heads head_dim"],
    v: Float[Tensor, "tokens heads head_dim"],
    positions: Sequence[Sequence[int]],
    merge: Merge,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Return the causal attention of all tokens, computed by ranks in a ring.

    `positions[r]` are the tokens of rank r, which are threads here. Each rank keeps its queries;
    keys and values go round, in as many turns as there are ranks.
    """
    num_ranks = len(positions)
    inboxes = [SimpleQueue[tuple[Tensor, Tensor, Sequence[int]]]() for _ in range(num_ranks)]

    def work(rank: int) -> Tensor:
        own = positions[rank]
        block = (k[own], v[own], own)
        found: Part | None = None
        for turn in range(num_ranks):
            part = attend_part(q[own], block[0], block[1], own, block[2])
            found = part if found is None else merge(*found, *part)
            if turn < num_ranks - 1:
                inboxes[(rank + 1) % num_ranks].put(block)
                block = inboxes[rank].get(timeout=30.0)
        assert found is not None
        return found[0]

    whole = torch.empty_like(q)
    for own, part in zip(positions, run_ranks(num_ranks, lambda c: work(c.rank)), strict=True):
        whole[own] = part
    return whole


def ring_pairs(positions: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return how many pairs of query and key each rank computes, by turn and rank.

    In turn t, rank r has the keys of rank r - t, counted round. Only pairs count in which the query
    sees the key.
    """
    num_ranks = len(positions)
    return [
        [
            num_pairs(positions[rank], positions[(rank - turn) % num_ranks])
            for rank in range(num_ranks)
        ]
        for turn in range(num_ranks)
    ]


def num_pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return how many pairs have the key at the query's position or before it."""
    sorted_keys = torch.tensor(sorted(keys))
    return int(torch.searchsorted(sorted_keys, torch.tensor(queries), right=True).sum())


def ring_slowdown(positions: Sequence[Sequence[int]]) -> float:
    """Return how many times as long a ring takes as with the same pairs in each rank and turn.

    Each turn takes as long as its slowest rank, as if the ranks began it together. In a plain ring
    nothing changes without that wait: the last rank has the most pairs in each turn.
    """
    pairs = ring_pairs(positions)
    return sum(map(max, pairs)) * len(positions) / sum(map(sum, pairs))

"""FlashAttention in plain torch: attention as a loop over tiles, with no matrix of scores.

The readable version of `minigen.kernels.triton.prefill_attention`, for one sequence. Sources:
online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minigen.model.attention import causal_mask


@dataclass(frozen=True)
class Partial:
    """The partial softmax of queries over some of their keys; all in float32.

    `maximum` is each query's largest score, `total` the sum of its weights exp(score - maximum),
    and `mixed` [..., head_dim] the sum of the values times these weights: `mixed / total` is
    attention over these keys. A query that saw no key has -inf, 0 and zeros.
    """

    maximum: Tensor
    total: Tensor
    mixed: Tensor


def merge(one: Partial, other: Partial) -> Partial:
    """Combine two partial results over different keys into one; no key may be in both.

    >>> one = Partial(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[4.0]]))
    >>> other = Partial(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[5.0]]))
    >>> both = merge(one, other)
    >>> (both.mixed / both.total.unsqueeze(-1)).tolist()
    [[3.0]]
    """
    maximum = torch.maximum(one.maximum, other.maximum)
    base = maximum.where(maximum.isfinite(), 0)  # -inf - -inf is nan
    shrinks = [(each.maximum - base).exp() for each in (one, other)]
    return Partial(
        maximum,
        one.total * shrinks[0] + other.total * shrinks[1],
        one.mixed * shrinks[0].unsqueeze(-1) + other.mixed * shrinks[1].unsqueeze(-1),
    )


def attend_tile(
    queries: Float[Tensor, "queries q_heads head_dim"],
    keys: Float[Tensor, "keys kv_heads head_dim"],
    values: Float[Tensor, "keys kv_heads head_dim"],
    seen: Bool[Tensor, "queries keys"],
) -> Partial:
    """Compute the partial result of one tile; `seen` is true where a query sees a key.

    Query head h uses KV head h // (q_heads / kv_heads). The scores are computed for these queries
    and keys only, and are dropped at the end.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", queries.float(), keys) / math.sqrt(queries.shape[-1])
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    maximum = scores.amax(dim=-1)
    base = maximum.where(maximum.isfinite(), 0)
    weights = (scores - base.unsqueeze(-1)).exp()
    return Partial(maximum, weights.sum(dim=-1), torch.einsum("qhk,khd->qhd", weights, values))


def nothing_seen(queries: Float[Tensor, "*queries head_dim"]) -> Partial:
    """Return the partial result of no keys; merged with another part, it gives that part."""
    none = torch.zeros(queries.shape[:-1])
    return Partial(none - math.inf, none, torch.zeros(queries.shape))


def flash_attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
    tile: int = 64,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Compute causal attention as in chapter 14, at most `tile` queries by `tile` keys at a time.

    The queries are the last `tokens` positions of the context. A tile of queries does not read the
    keys and values that none of its queries sees. Apart from the data of one tile and the mask of
    its queries, no tensor that is allocated is larger than the result.
    """
    mixed = torch.empty_like(q)
    for begin in range(0, len(q), tile):
        queries = q[begin : begin + tile]
        position = len(k) - len(q) + begin  # of the tile's first query
        end = position + len(queries)
        first = 0 if window is None else max(position + 1 - window, 0)
        so_far = nothing_seen(queries)
        for start in range(first, end, tile):
            stop = min(start + tile, end)
            seen = causal_mask(len(queries), end - start, window)[:, : stop - start]
            so_far = merge(so_far, attend_tile(queries, k[start:stop], v[start:stop], seen))
        mixed[begin : begin + tile] = so_far.mixed / so_far.total.unsqueeze(-1)
    return mixed

"""Attention over a part of the keys, and the merge of such parts into attention over all keys.

A part keeps each query's output over its own keys and their log-sum-exp, log(sum(exp(score))): the
logarithm of the weight that these keys have beside all others. With these two, parts that were
computed in different places, or at different times, are merged without their scores. Sources:
online softmax, Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, which keeps the same pair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_MOST_SCORES = 2**22  # held at once, of all heads; longer queries are computed in several turns


@dataclass(frozen=True)
class PartialAttention:
    """Each query's attention over some keys, and the log-sum-exp of its scores over them.

    Both are in float32, or in float64 for such queries. A query that sees no key has zeros and
    -inf.
    """

    output: Float[Tensor, "*batch queries q_heads head_dim"]
    log_sum_exp: Float[Tensor, "*batch queries q_heads"]


def attend_part(
    q: Float[Tensor, "*batch queries q_heads head_dim"],
    k: Float[Tensor, "*batch keys kv_heads head_dim"],
    v: Float[Tensor, "*batch keys kv_heads head_dim"],
    mask: Bool[Tensor, "*batch queries keys"] | None = None,
) -> PartialAttention:
    """Compute the attention of queries over some of their keys; `mask` is True where one sees one.

    Query head h uses KV head h // (q_heads / kv_heads). Without a mask, every query sees every key.
    """
    width = max(q.shape[:-3].numel() * q.shape[-2] * k.shape[-3], 1)  # scores of one query
    turns = range(0, max(q.shape[-3], 1), max(_MOST_SCORES // width, 1))
    size = max(_MOST_SCORES // width, 1)
    parts = [
        _attend(
            q[..., first : first + size, :, :],
            k,
            v,
            None if mask is None else mask[..., first : first + size, :],
        )
        for first in turns
    ]
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(
        torch.cat([part.output for part in parts], dim=-3),
        torch.cat([part.log_sum_exp for part in parts], dim=-2),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> PartialAttention:
    wide = torch.promote_types(q.dtype, torch.float32)
    # The query heads that share a KV head are on an axis of their own: "g" in "kv_heads, g".
    grouped = q.to(wide).unflatten(-2, (k.shape[-2], -1)) / math.sqrt(q.shape[-1])
    scores = torch.einsum("...qhgd,...khd->...hgqk", grouped, k.to(wide))
    if mask is not None:
        scores.masked_fill_(~mask.unsqueeze(-3).unsqueeze(-3), -math.inf)
    if scores.shape[-1] == 0:
        scores = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        v = v.new_zeros((*v.shape[:-3], 1, *v.shape[-2:]))
    largest = scores.amax(dim=-1, keepdim=True)
    largest = largest.where(largest.isfinite(), 0)  # -inf - -inf is nan
    weights = scores.sub_(largest).exp_()  # in place: scores are most of the memory
    total = weights.sum(dim=-1, keepdim=True)
    mixed = torch.einsum("...hgqk,...khd->...qhgd", weights, v.to(wide))
    by_query = total.squeeze(-1).movedim(-1, -3).unsqueeze(-1)  # queries, kv_heads, g, 1
    output = mixed / by_query.where(by_query > 0, 1)
    log_sum_exp = (largest + total.log()).squeeze(-1).movedim(-1, -3)
    return PartialAttention(output.flatten(-3, -2), log_sum_exp.flatten(-2))


def merge(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Merge partial attentions of the same queries over different keys; no key may be in two.

    Each part weighs exp(its log-sum-exp), against the largest of them so that nothing overflows.

    >>> one = PartialAttention(torch.tensor([[[4.0]]]), torch.tensor([[0.0]]))
    >>> other = PartialAttention(torch.tensor([[[1.0]]]), torch.tensor([[math.log(2)]]))
    >>> both = merge([one, other])
    >>> round(both.output.item(), 5), round(both.log_sum_exp.exp().item(), 5)
    (2.0, 3.0)
    """
    sums = torch.stack([part.log_sum_exp for part in parts])
    largest = sums.amax(dim=0)
    base = largest.where(largest.isfinite(), 0)
    weights = (sums - base).exp()
    total = weights.sum(dim=0)
    outputs = torch.stack([part.output for part in parts])
    mixed = (outputs * weights.unsqueeze(-1)).sum(dim=0)
    return PartialAttention(mixed / total.where(total > 0, 1).unsqueeze(-1), base + total.log())


def merge_bound(num_parts: int, num_merges: int, largest_log_sum_exp: float, eps: float) -> float:
    """Return how far merges can move an output, as a share of the largest absolute value in `v`.

    `num_merges` merges of `num_parts` parts each, one after another, each with the result of the
    one before as one of its parts; `eps` is `torch.finfo(dtype).eps`. The bound is to first order
    in u = eps / 2, the relative error of one rounding, and covers nothing but the merges: given
    parts count as exact.

    An output is a weighted mean of values in [-1, 1], so an error e_i in the logarithm of weight
    w_i moves it by at most 2 sum(w_i |e_i|), and by at most max |e_i| if their signs are free.
    (a) Weight i is exp(x), x <= 0. Rounding x moves it by u |x|, and sum(w_i |x_i|) is at most the
    entropy of the weights, so at most ln(n); `exp` itself moves it by at most 2 u. Together:
    u (2 ln(n) + 2). (b) The products, the two sums of n terms and the quotient: u 2 n. (c) The
    log-sum-exp that goes into the next merge is rounded: to u L by the last sum, where L is the
    largest magnitude, and to u (3 ln(n) + n + 2) by the terms before it. An error in it changes the
    weight of all that was merged so far against what is merged next, and so the mean by at most
    half of it.
    """
    u, log = eps / 2, math.log(num_parts)
    of_a_merge = 2 * log + 2 + 2 * num_parts
    of_its_sum = largest_log_sum_exp + 3 * log + num_parts + 2
    return u * (num_merges * of_a_merge + (num_merges - 1) * of_its_sum / 2)

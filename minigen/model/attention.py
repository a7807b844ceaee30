"""Causal grouped-query attention: a naive version, a fast version, and one for packed sequences.

Sources: Vaswani et al. 2017; multi-query, Shazeer 2019; grouped-query, Ainslie et al. 2023;
sliding window, Jiang et al. 2023 (Mistral 7B).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from minigen.protocols import Attend


def causal_mask(
    num_queries: int, num_keys: int, window: int | None = None
) -> Bool[Tensor, "queries keys"]:
    """Return True where a query may attend to a key.

    The queries are the last of the keys' positions. A query attends to its own position and
    earlier ones, at most `window` positions in total.

    >>> causal_mask(2, 4, window=2).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    query = torch.arange(num_keys - num_queries, num_keys).unsqueeze(-1)
    key = torch.arange(num_keys)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention_naive(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Compute softmax(q k^T / sqrt(head_dim)) v step by step: the reference for faster versions.

    The queries are the last `tokens` positions of the context. Query head h uses KV head
    h // (q_heads / kv_heads).
    """
    num_tokens, q_heads, head_dim = q.shape
    context, kv_heads, _ = k.shape
    k = k.repeat_interleave(q_heads // kv_heads, dim=1)
    v = v.repeat_interleave(q_heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) / math.sqrt(head_dim)
    hidden = ~causal_mask(num_tokens, context, window)
    scores = scores.masked_fill(hidden, -math.inf)
    scores = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = scores / scores.sum(dim=-1, keepdim=True)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return softmax(q k^T / sqrt(head_dim)) v of each query over the keys that it may attend to.

    The queries are the last `tokens` positions of the context. Query head h uses KV head
    h // (q_heads / kv_heads). With a window, a query attends to at most `window` positions,
    including its own.
    """
    num_tokens, context = len(q), len(k)
    if window is not None and num_tokens == 1:
        k, v = k[-window:], v[-window:]
    windowed = window is not None and context > window and num_tokens > 1
    full = num_tokens == context and not windowed
    mask = None
    if num_tokens > 1 and not full:
        with q.device:  # where torch makes the mask
            mask = causal_mask(num_tokens, context, window)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    # Torch's fused kernels store no matrix of scores.
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=full and num_tokens > 1, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def attend_packed(lengths: Sequence[int], windows: Sequence[int | None]) -> Attend:
    """Return attention over complete sequences packed one after another, without a KV cache.

    `lengths` has each sequence's number of tokens, `windows` each layer's sliding window.
    """
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = windows[layer_id]
        return torch.cat([attention(q[a:b], k[a:b], v[a:b], window) for a, b in pairwise(ends)])

    return attend

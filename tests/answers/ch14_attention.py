"""Answers to the exercises of chapter 14."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.answers import Answers


def mask_by_loops(num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    """Right, and slow."""
    reach = num_keys if window is None else window
    return torch.tensor(
        [
            [0 <= position - key < reach for key in range(num_keys)]
            for position in range(num_keys - num_queries, num_keys)
        ]
    )


def mask_by_triangles(num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    """Right, from torch's triangles."""
    first = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(first)
    return seen if window is None else seen.triu(first - window + 1)


def wrong_mask(name: str) -> Callable[..., Tensor]:
    def part(num_queries: int, num_keys: int, window: int | None = None) -> Any:
        query = torch.arange(num_keys - num_queries, num_keys)[:, None]
        if name == "queries are the first positions":
            query = torch.arange(num_queries)[:, None]
        key = torch.arange(num_keys)
        seen = key <= query
        if name == "not itself":
            seen = key < query
        if name == "one ahead":
            seen = key <= query + 1
        if name == "the future":
            seen = key >= query
        if name == "all":
            seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if name == "transposed":
            seen = seen.T
        if name == "what is hidden":
            seen = ~seen
        if window is not None and name != "no window":
            back = {"one too many": window + 1, "itself not counted": window - 1}.get(name, window)
            limit = query - back
            if name == "window from the end":
                limit = torch.tensor(num_keys - 1 - window)
            seen = seen | (key > limit) if name == "either" else seen & (key > limit)
        if name == "minus infinity":
            return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
        return seen.tolist() if name == "lists" else seen

    return part


WRONG_MASKS = [
    *("queries are the first positions", "not itself", "one ahead", "the future", "all"),
    *("transposed", "what is hidden", "no window", "one too many", "itself not counted"),
    *("window from the end", "either", "minus infinity", "lists"),
]


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Right, a head and a token at a time, with a stable softmax written out."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for token in range(len(q)):
        end = len(k) - len(q) + token + 1
        begin = max(0, end - window) if window is not None else 0
        for head in range(q.shape[1]):
            keys, values = k[begin:end, head // group], v[begin:end, head // group]
            scores = keys.double() @ q[token, head].double() / math.sqrt(q.shape[-1])
            powers = (scores - scores.max()).exp()
            out[token, head] = (powers @ values.double() / powers.sum()).to(q.dtype)
    return out


def attention_of_torch(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Right, by the library with a mask and repeated heads."""
    group = q.shape[1] // k.shape[1]
    query, key, value = (
        each.transpose(0, 1)
        for each in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    mask = mask_by_triangles(len(q), len(k), window)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(0, 1)


def wrong_attention(name: str) -> Callable[..., Tensor]:
    def part(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if name == "heads not shared" and group > 1:
            q = q[:, : k.shape[1]]
            group = 1
        many_k, many_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if name == "heads in turn":
            many_k, many_v = k.repeat(1, group, 1), v.repeat(1, group, 1)
        scale = math.sqrt(q.shape[-1])
        if name == "no scale":
            scale = 1.0
        if name == "divided by head_dim":
            scale = float(q.shape[-1])
        scores = torch.einsum("qhd,khd->hqk", q.float(), many_k.float()) / scale
        mask = mask_by_loops(len(q), len(k), None if name == "no window" else window)
        if name == "mask from the first position":
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril()
        if name == "one ahead":
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) + 1)
        if name == "window one too many" and window is not None:
            mask = mask_by_loops(len(q), len(k), window + 1)
        if name != "no mask":
            hidden = 0.0 if name == "masked with zeros" else -math.inf
            scores = scores.masked_fill(~mask, hidden)
        weights = scores.softmax(-1)
        if name == "softmax over queries":
            weights = scores.softmax(-2).nan_to_num()
        if name == "overflows":
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        if name == "mask after softmax":
            plain = torch.einsum("qhd,khd->hqk", q.float(), many_k.float()) / scale
            weights = plain.softmax(-1).masked_fill(~mask, 0.0)
        if name == "not divided by the sum":
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = torch.einsum("hqk,khd->qhd", weights, many_v.float())
        if name == "keys mixed":
            mixed = torch.einsum("hqk,khd->qhd", weights, many_k.float())
        if name == "heads first":
            mixed = mixed.transpose(0, 1)
        return mixed if name == "float32 stays" else mixed.to(q.dtype)

    return part


WRONG_ATTENTION = [
    *("heads not shared", "heads in turn", "no scale", "divided by head_dim", "no window"),
    *("mask from the first position", "one ahead", "window one too many", "no mask"),
    *("masked with zeros", "softmax over queries", "overflows", "mask after softmax"),
    *("not divided by the sum", "keys mixed", "heads first", "float32 stays"),
]


ANSWERS = {
    "causal_mask": Answers(
        right=(mask_by_loops, mask_by_triangles, wrong_mask("nothing")),
        wrong={name: wrong_mask(name) for name in WRONG_MASKS},
        equivalent={},
    ),
    "attention": Answers(
        right=(attention_by_loops, attention_of_torch, wrong_attention("nothing")),
        wrong={name: wrong_attention(name) for name in WRONG_ATTENTION},
        equivalent={
            "context > window -> context >= window": "a window of the whole context hides nothing",
            "num_tokens > 1 -> num_tokens >= 1": "a lone token's keys are cut before",
            "num_tokens > 1 -> num_tokens >= 1 #3": "causal or not, one token sees its one key",
        },
    ),
}

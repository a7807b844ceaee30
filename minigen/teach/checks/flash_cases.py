"""Random queries, keys and values, and the attention of them, for the checks of chapter 32."""

import math

import torch
from torch import Tensor


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case_of(num_new: int, context: int, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads over two KV heads, all random."""
    k, v = _random(context, 2, head_dim, seed=5), _random(context, 2, head_dim, seed=6)
    return _random(num_new, 4, head_dim, seed=4), k, v


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One query and one head at a time, over all its keys, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(len(q)):
        position = len(k) - len(q) + token
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            keys = k[begin : position + 1, kv_head].double()
            weights = (keys @ q[token, head].double() / math.sqrt(q.shape[2])).softmax(0)
            out[token, head] = weights @ v[begin : position + 1, kv_head].double()
    return out

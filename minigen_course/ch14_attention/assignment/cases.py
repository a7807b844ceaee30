"""Cases of chapter 14's exercises, drawn by a seed."""

import math
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.grading.varied import Varied


def _mask(random: Random) -> dict[str, Any]:
    num_queries, num_keys = random.choice(((3, 3), (2, 5), (3, 6), (4, 6), (2, 7), (4, 4)))
    return {
        "num_queries": num_queries,
        "num_keys": num_keys,
        "window": random.choice((None, 1, 2, 3, num_keys - 1)),
    }


def _whole(random: Random, *shape: int) -> Tensor:
    """Return a tensor of small whole numbers."""
    numbers = [random.randint(-3, 3) for _ in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.float32).reshape(shape)


def _heads(random: Random) -> dict[str, Any]:
    tokens, context = random.choice(((1, 4), (2, 2), (2, 4), (3, 3), (2, 5)))
    kv_heads, group, head_dim = random.choice(((1, 2, 4), (2, 2, 2), (2, 2, 4), (1, 3, 2)))
    return {
        "q": _whole(random, tokens, kv_heads * group, head_dim),
        "k": random.choice((1, 1, 100)) * _whole(random, context, kv_heads, head_dim),
        "v": _whole(random, context, kv_heads, head_dim),
        "window": random.choice((None, random.randint(1, context))),
    }


VARIED = {
    "causal_mask": Varied("queries, keys, window", _mask),
    "attention": Varied(
        "new tokens, context, heads, head dimension, window, size of the scores",
        _heads,
        num_cases=6,
    ),
}

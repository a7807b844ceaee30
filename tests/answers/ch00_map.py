"""Answers to the exercise of chapter 00."""

import math
from collections.abc import Callable
from typing import Any

from minigen_course.lab.cost_model import kv_bytes_per_token, memory_needed, num_parameters
from tests.answers import Answers


def by_counting_up(
    config: Any, bits: float, memory: float, context: int, working: float = 1e9
) -> int:
    """Right, and one sequence at a time."""
    count = 0
    while memory_needed(config, bits, count + 1, context, working).total <= memory:
        count += 1
    return count


def by_hand(config: Any, bits: float, memory: float, context: int, working: float = 1e9) -> int:
    """Right, and without the package's sums of keys and values."""
    one = 4 * config.num_layers * config.kv_heads * config.head_dim * context
    left = memory - working - num_parameters(config) / 8 * bits
    return math.floor(left / one) if left >= one else 0


def wrong(name: str) -> Callable[..., Any]:
    def part(config: Any, bits: float, memory: float, context: int, working: float = 1e9) -> Any:
        weights = num_parameters(config) * bits / 8
        if name == "bits for bytes":
            weights = num_parameters(config) * bits
        if name == "bytes for bits":
            weights = num_parameters(config) * 2
        if name == "half the cache":
            one = kv_bytes_per_token(config) / 2 * context
        elif name == "every query head":
            one = kv_bytes_per_token(config) * config.q_heads / config.kv_heads * context
        elif name == "one token each":
            one = kv_bytes_per_token(config)
        elif name == "gibibytes":
            one = kv_bytes_per_token(config) * context * 2**30 / 1e9
        else:
            one = kv_bytes_per_token(config) * context
        left = memory - weights - (0 if name == "no working memory" else working)
        if name == "weights forgotten":
            left = memory - working
        if name == "weights for each":
            return max(0, int((memory - working) // (weights + one)))
        found = left / one
        if name == "rounded up":
            return max(0, math.ceil(found))
        if name == "rounded":
            return max(0, round(found))
        if name == "a float":
            return max(0.0, found // 1)
        if name == "negative":
            return int(found // 1)
        if name == "at least one":
            return max(1, int(found))
        if name == "working by default nothing" and working == 1e9:
            return max(0, int((memory - weights) // one))
        return max(0, int(found))

    return part


WRONG = [
    *("bits for bytes", "bytes for bits", "half the cache", "every query head", "one token each"),
    *("gibibytes", "no working memory", "weights forgotten", "weights for each", "rounded up"),
    *("rounded", "a float", "negative", "at least one", "working by default nothing"),
]

ANSWERS = {
    "most_sequences": Answers(
        right=(by_counting_up, by_hand, wrong("nothing")),
        wrong={name: wrong(name) for name in WRONG},
        equivalent={},
    ),
}

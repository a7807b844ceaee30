"""Answers to the exercises of chapter 00."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
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


def by_sums(
    config: Any, bits: float, memory: float, lengths: Sequence[int], working: float = 1e9
) -> int:
    """Right, and by the sums of the lengths."""
    left = memory - working - num_parameters(config) * bits / 8
    return bisect_right(list(accumulate(lengths)), left / kv_bytes_per_token(config))


def by_asking_each(
    config: Any, bits: float, memory: float, lengths: Sequence[int], working: float = 1e9
) -> int:
    """Right, and with the budget of all requests up to each one."""
    count = 0
    for length in range(1, len(lengths) + 1):
        if memory_needed(config, bits, 1, sum(lengths[:length]), working).total > memory:
            break
        count = length
    return count


def wrong_queue(name: str) -> Callable[..., Any]:
    def part(
        config: Any, bits: float, memory: float, lengths: list[int], working: float = 1e9
    ) -> Any:
        one = kv_bytes_per_token(config)
        if name == "every query head":
            one *= config.q_heads / config.kv_heads
        if name == "half the cache":
            one /= 2
        weights = num_parameters(config) * (bits if name == "bits for bytes" else bits / 8)
        kept = 0 if name == "no working memory" else working
        if name == "working memory fixed":
            kept = 1e9
        left = memory - weights - kept
        if name == "sorted":
            lengths = sorted(lengths)
        if name == "emptied":
            count = 0
            while lengths and left >= one * lengths[0]:
                left -= one * lengths.pop(0)
                count += 1
            return count
        if name == "mean length":
            mean = sum(lengths) / max(1, len(lengths))
            return max(0, min(len(lengths), int(left // (one * mean)))) if mean else 0
        if name == "longest for each":
            longest = max(lengths, default=1)
            return max(0, min(len(lengths), int(left // (one * longest))))
        if name == "each alone":
            return sum(one * length <= left for length in lengths)
        if name == "overtaking":
            count = 0
            for length in lengths:
                if one * length <= left:
                    left -= one * length
                    count += 1
            return count
        for count, length in enumerate(lengths):
            left -= one * length
            if left < 0:
                return count + (name == "one too many")
        return None if name == "nothing at the end" else len(lengths)

    return part


WRONG_QUEUES = [
    *("every query head", "half the cache", "bits for bytes", "no working memory", "sorted"),
    *("working memory fixed", "emptied", "mean length", "longest for each", "each alone"),
    *("overtaking", "one too many", "nothing at the end"),
]

ANSWERS = {
    "most_sequences": Answers(
        right=(by_counting_up, by_hand, wrong("nothing")),
        wrong={name: wrong(name) for name in WRONG},
        equivalent={},
    ),
    "first_that_fit": Answers(
        right=(by_sums, by_asking_each, wrong_queue("nothing")),
        wrong={name: wrong_queue(name) for name in WRONG_QUEUES},
        equivalent={
            "free < 0 -> free <= 0": "no cache is filled to the last byte",
            "0 -> 1": "no cache misses one byte",
        },
    ),
}

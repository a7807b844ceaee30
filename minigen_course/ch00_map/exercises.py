"""Checks of chapter 00: how many sequences fit into memory, of one length or of several."""

from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.lab.cost_model import (
    GB,
    config_of,
    kv_bytes_per_token,
    num_parameters,
)

MostSequences = Callable[..., Any]
FirstThatFit = Callable[..., Any]


def _answer(part: MostSequences, model: str, bits: float, free: float, context: int) -> Any:
    """Return the part's answer when `free` bytes are left for the KV cache."""
    config = config_of(model)
    memory = num_parameters(config) * bits / 8 + 3e8 + free
    found = part(config, bits, memory, context, 3e8)
    expect(
        isinstance(found, int) and not isinstance(found, bool),
        f"returned {found!r}; it should be a whole number (int).",
    )
    return found


def _kv(model: str, context: int) -> float:
    return kv_bytes_per_token(config_of(model)) * context


def whole_sequences_are_counted(part: MostSequences) -> None:
    """memory for exactly three sequences, and for a little more or less:"""
    three = 3 * _kv("Llama-3-8B", 1024)
    for free, right in ((three + 8, 3), (three * 1.3, 3), (three - 1e5, 2), (three / 3 + 8, 1)):
        found = _answer(part, "Llama-3-8B", 16, free, 1024)
        expect_equal(found, right, f"the number of sequences in {free / GB:.4f} GB of KV cache")


def longer_ones_take_more(part: MostSequences) -> None:
    """the same memory, sequences of other lengths:"""
    free = 16 * _kv("Qwen3-0.6B", 1000) + 8
    for context, right in ((1000, 16), (2000, 8), (500, 32), (3000, 5)):
        found = _answer(part, "Qwen3-0.6B", 8, free, context)
        expect_equal(found, right, f"the number of sequences of {context} tokens")


def kv_heads_are_counted(part: MostSequences) -> None:
    """a model whose query heads share KV heads:"""
    found = _answer(part, "Llama-3-70B", 4.5, 10 * _kv("Llama-3-70B", 4000) + 8, 4000)
    expect_equal(found, 10, "the number of sequences of Llama-3-70B with 4,000 tokens")


def the_count_is_never_negative(part: MostSequences) -> None:
    """too little memory for the weights and the working memory:"""
    config = config_of("Llama-3-8B")
    for memory in (1e9, 15e9, 16.5e9):
        found = part(config, 16, memory, 4096)
        expect_equal(found, 0, f"the number of sequences in {memory / GB:g} GB")


def working_memory_is_a_gigabyte_by_default(part: MostSequences) -> None:
    """`working` left out, so that it is 1 GB:"""
    config = config_of("SmolLM2-135M")
    memory = num_parameters(config) * 2 + GB + 5 * _kv("SmolLM2-135M", 2048) + 8
    expect_equal(part(config, 16, memory, 2048), 5, "the number of sequences that fit")


LENGTHS = [900, 300, 1400, 200, 700]


def _admitted(part: FirstThatFit, model: str, bits: float, free: float, lengths: list[int]) -> Any:
    """Return the part's answer when `free` bytes are left for the KV cache."""
    config, given = config_of(model), list(lengths)
    memory = num_parameters(config) * bits / 8 + 3e8 + free
    found = part(config, bits, memory, given, 3e8)
    expect(
        isinstance(found, int) and not isinstance(found, bool),
        f"returned {found!r}; it should be a whole number (int).",
    )
    expect(given == lengths, "the list was changed; it should stay as it is.")
    return found


def requests_share_the_memory(part: FirstThatFit) -> None:
    """five requests, and memory for more and more of them:"""
    total = 0.0
    for count, length in enumerate(LENGTHS):
        for more in (8, _kv("Qwen3-0.6B", length) - 1e5):  # not enough for this one
            found = _admitted(part, "Qwen3-0.6B", 8, total + more, LENGTHS)
            tokens = (total + more) / _kv("Qwen3-0.6B", 1)
            what = f"the requests of {LENGTHS} tokens in a cache of {tokens:,.1f} tokens"
            expect_equal(found, count, what)
        total += _kv("Qwen3-0.6B", length)
    found = _admitted(part, "Qwen3-0.6B", 8, total + 8, LENGTHS)
    expect_equal(found, 5, f"the requests of {LENGTHS} tokens in a cache for all of them")


def none_overtakes(part: FirstThatFit) -> None:
    """a long request in front of short ones:"""
    for lengths, right in (([50, 5000, 50, 50], 1), ([5000, 50], 0), ([50, 40, 5000, 10], 2)):
        found = _admitted(part, "Llama-3-8B", 16, _kv("Llama-3-8B", 200) + 8, lengths)
        expect_equal(found, right, f"the first requests of {lengths} tokens in a cache of 200")


def heads_are_those_of_keys_and_values(part: FirstThatFit) -> None:
    """a model whose query heads share KV heads:"""
    found = _admitted(part, "Llama-3-70B", 4.5, _kv("Llama-3-70B", 300) + 8, [100, 100, 100, 100])
    expect_equal(found, 3, "the requests of Llama-3-70B with 100 tokens in a cache of 300")


def an_empty_queue_and_too_little_memory_admit_none(part: FirstThatFit) -> None:
    """no requests, and no room for the weights:"""
    expect_equal(_admitted(part, "Llama-3-8B", 16, 1e9, []), 0, "the number of no requests")
    for memory in (1e9, 16.5e9):
        found = part(config_of("Llama-3-8B"), 16, memory, [10, 10])
        expect_equal(found, 0, f"the requests in {memory / GB:g} GB")


def a_gigabyte_is_kept_by_default(part: FirstThatFit) -> None:
    """`working` left out, so that it is 1 GB:"""
    config = config_of("SmolLM2-135M")
    memory = num_parameters(config) * 2 + GB + _kv("SmolLM2-135M", 500) + 8
    found = part(config, 16, memory, [300, 200, 100])
    expect_equal(found, 2, "the requests of [300, 200, 100] tokens in a cache of 500")


CHECKS = {
    "most_sequences": (
        whole_sequences_are_counted,
        longer_ones_take_more,
        kv_heads_are_counted,
        the_count_is_never_negative,
        working_memory_is_a_gigabyte_by_default,
    ),
    "first_that_fit": (
        requests_share_the_memory,
        none_overtakes,
        heads_are_those_of_keys_and_values,
        an_empty_queue_and_too_little_memory_admit_none,
        a_gigabyte_is_kept_by_default,
    ),
}

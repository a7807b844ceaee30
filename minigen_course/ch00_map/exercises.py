"""Checks of chapter 00: how many sequences fit into memory."""

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


CHECKS = {
    "most_sequences": (
        whole_sequences_are_counted,
        longer_ones_take_more,
        kv_heads_are_counted,
        the_count_is_never_negative,
        working_memory_is_a_gigabyte_by_default,
    ),
}

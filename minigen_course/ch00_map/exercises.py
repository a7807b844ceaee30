"""Checks of chapter 00: how many sequences fit into a memory."""

from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_equal
from minigen_course.lab.cost_model import (
    GB,
    config_of,
    kv_bytes_per_token,
    most_sequences,
    num_parameters,
)

MostSequences = Callable[..., Any]


def _asked(part: MostSequences, model: str, bits: float, free: float, context: int) -> Any:
    """What the part answers where `free` bytes are left for keys and values."""
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
    """room for exactly three sequences, and for a bit more or less:"""
    room = 3 * _kv("Llama-3-8B", 1024)
    for free, right in ((room + 8, 3), (room * 1.3, 3), (room - 1e5, 2), (room / 3 + 8, 1)):
        found = _asked(part, "Llama-3-8B", 16, free, 1024)
        expect_equal(found, right, f"with {free / GB:.4f} GB left for KV, the sequences that fit")


def longer_ones_take_more(part: MostSequences) -> None:
    """the same memory, other lengths:"""
    room = 16 * _kv("Qwen3-0.6B", 1000) + 8
    for context, right in ((1000, 16), (2000, 8), (500, 32), (3000, 5)):
        found = _asked(part, "Qwen3-0.6B", 8, room, context)
        expect_equal(found, right, f"sequences of {context} tokens")


def heads_are_counted_as_they_are_kept(part: MostSequences) -> None:
    """a model whose query heads share keys and values:"""
    found = _asked(part, "Llama-3-70B", 4.5, 10 * _kv("Llama-3-70B", 4000) + 8, 4000)
    expect_equal(found, 10, "sequences of Llama-3-70B with 4,000 tokens")


def what_holds_no_weights_holds_no_sequence(part: MostSequences) -> None:
    """too little memory is no reason for a negative number:"""
    config = config_of("Llama-3-8B")
    for memory in (1e9, 15e9, 16.5e9):
        found = part(config, 16, memory, 4096)
        expect_equal(found, 0, f"in {memory / GB:g} GB, which the weights alone fill, what fits")


def a_gigabyte_is_worked_in_unless_said_otherwise(part: MostSequences) -> None:
    """the last argument may be left out:"""
    config = config_of("SmolLM2-135M")
    memory = num_parameters(config) * 2 + GB + 5 * _kv("SmolLM2-135M", 2048) + 8
    expect_equal(part(config, 16, memory, 2048), 5, "with 1 GB to work in, the sequences")


EXERCISES = (
    Exercise(
        "most_sequences",
        most_sequences,
        (
            whole_sequences_are_counted,
            longer_ones_take_more,
            heads_are_counted_as_they_are_kept,
            what_holds_no_weights_holds_no_sequence,
            a_gigabyte_is_worked_in_unless_said_otherwise,
        ),
        (
            "What is left for keys and values is the memory, less the weights, less the working "
            "memory. Bits are not bytes.",
            "`num_parameters(config) * bits / 8` bytes are weights, and a sequence keeps "
            "`kv_bytes_per_token(config) * context` bytes.",
            "Divide by `//`, make an int of it, and let nothing fall below 0.",
        ),
        "Write the memory sum the other way round: how many sequences of `context` tokens fit into "
        "`memory` bytes, when the weights (at `bits` bits each) and the `working` memory are taken "
        "off first? `num_parameters` and `kv_bytes_per_token` of `minigen_course.lab.cost_model` "
        "count what the configuration says.",
        """from minigen_course.lab.cost_model import config_of
from minigen_course.figures.explore import picture
from minigen_course.ch00_map.figures import memory_budget

with using(0, most_sequences=mine):
    drawn = memory_budget(config_of("Llama-3-8B"), 16, 24, sequences=8, context=4096)
picture(drawn, "The budget of Llama-3-8B, its curve computed by your function.")""",
        "Requests are seldom equally long. Given a list of lengths, in the order in which they "
        "came, how many of the first of them fit?",
    ),
)

"""Bug hunt of chapter 22: the slot of a token in the KV cache, and the end of a block."""

from typing import Any

from minigen_course.grading.exercise import expect_equal
from minigen_course.grading.hunt import Hunt
from minigen_course.lab.toy_engine import SlotsOf, right_slots, serve_toy


def next_slots(block_ids: list[int], num_computed: int, num_new: int, block_size: int) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` tokens.

    A slot is `block_id * block_size + offset`. `block_ids` has blocks for all of these tokens.
    """
    num_tokens = num_computed + num_new
    if num_new == 1:  # a decode step: the last used slot of the last block
        num_in_last_block = num_tokens % block_size
        last_block = block_ids[(num_tokens - 1) // block_size]
        return [last_block * block_size + num_in_last_block - 1]
    slots = []
    for position in range(num_computed, num_tokens):
        block, offset = divmod(position, block_size)
        slots.append(block_ids[block] * block_size + offset)
    return slots


def test_slots(next_slots: SlotsOf) -> None:
    """Assert what every correct `next_slots` does, and the one above does not."""
    block_ids = [7, 2, 9]
    every = [28, 29, 30, 31, 8, 9, 10, 11, 36, 37, 38, 39]
    for num_computed in range(12):
        for num_new in range(1, 13 - num_computed):
            found = next_slots(block_ids, num_computed, num_new, 4)
            assert list(found) == every[num_computed : num_computed + num_new]


def _by_walking(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    block, offset = divmod(num_computed, block_size)
    slots = []
    for _ in range(num_new):
        if offset == block_size:
            block, offset = block + 1, 0
        slots.append(block_ids[block] * block_size + offset)
        offset += 1
    return slots


def _from_all_slots(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    all_slots = [
        slot
        for block_id in block_ids
        for slot in range(block_id * block_size, (block_id + 1) * block_size)
    ]
    return all_slots[num_computed : num_computed + num_new]


def _one_beyond_a_block(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    block, offset = divmod(num_computed, block_size)
    slots = []
    for _ in range(num_new):
        if offset > block_size:
            block, offset = block + 1, 1
        slots.append(block_ids[block] * block_size + offset)
        offset += 1
    return slots


def _as_if_adjacent(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    block, offset = divmod(num_computed, block_size)
    first = block_ids[block] * block_size + offset
    return list(range(first, first + num_new))


def _next_block_too_late(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    if num_new == 1 and num_computed and num_computed % block_size == 0:
        return [block_ids[num_computed // block_size - 1] * block_size]
    return right_slots(block_ids, num_computed, num_new, block_size)


def _chunks_from_the_block_start(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    start = num_computed if num_new == 1 else num_computed // block_size * block_size
    return right_slots(block_ids, start, num_new, block_size)


def every_token_has_its_own_slot(part: Any) -> None:
    """chunks of all lengths, from all positions, in blocks that are not adjacent:"""
    for block_ids, size in (([7, 2, 9], 4), ([3, 8, 1, 6], 3), ([5, 4, 2, 9, 1], 1)):
        capacity = len(block_ids) * size
        for first in range(capacity):
            for count in range(1, capacity + 1 - first):
                what = f"slots of {count} tokens after {first}, blocks {block_ids} of {size} slots"
                right = right_slots(block_ids, first, count, size)
                expect_equal(list(part(block_ids, first, count, size)), right, what)


def batched_answers_equal_answers_alone(part: Any) -> None:
    """four requests in one batch of the toy engine:"""
    prompts = [[5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1]]
    alone = [serve_toy([prompt]).answers[0] for prompt in prompts]
    together = serve_toy(prompts, slots_of=part).answers
    for number, (found, right) in enumerate(zip(together, alone, strict=True)):
        expect_equal(found, right, f"the answer to request {number} in a batch of four")


HUNT = Hunt(
    "slots",
    next_slots,
    test_slots,
    right_slots,
    {"one that goes from slot to slot": _by_walking, "one that lists all slots": _from_all_slots},
    {
        "goes one slot past the end of a block in the middle of a chunk": _one_beyond_a_block,
        "assumes that blocks are adjacent, so that a long chunk runs into other blocks": (
            _as_if_adjacent
        ),
        "writes a block's first token into the previous block in a decode step": (
            _next_block_too_late
        ),
        "writes a chunk from the start of its block, over the tokens that are there": (
            _chunks_from_the_block_start
        ),
    },
    (every_token_has_its_own_slot, batched_answers_equal_answers_alone),
    (
        "Use blocks that are not adjacent, such as [7, 2, 9], and write down by hand the slot of "
        "each position. Then compare, one decode step at a time.",
        "What is num_in_last_block after a decode step that fills a block?",
        "A good test also has chunks: one that starts inside a block, and one that crosses into "
        "the next block.",
    ),
    "**The report.** *Answers start well and become wrong after a while; how soon depends on the "
    "length of the prompt. In a batch with other requests, even answers that were correct alone "
    "become wrong. Prompts are read correctly, and no error is raised.* MinivLLM computed the "
    "slot of a decode step from the number of tokens in the last block, as `next_slots` does here "
    "(its issue 76). ONNX Runtime GenAI once wrote every decoded token one slot too far, and read "
    "a slot that was never written (pull request 2354).",
    minutes=20,
)

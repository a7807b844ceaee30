"""Chapter 22's hunt: in which slot of the cache a token goes, and where a block ends."""

from typing import Any

from minigen_course.grading.hunt import Hunt
from minigen_course.grading.messages import expect_equal
from minigen_course.lab.toy_engine import SlotsOf, right_slots, serve_toy


def next_slots(block_ids: list[int], num_computed: int, num_new: int, block_size: int) -> list[int]:
    """The slots of a sequence's next `num_new` tokens; `num_computed` of it stand before them.

    A slot is `block_id * block_size + offset`; `block_ids` hold all of these tokens.
    """
    num_tokens = num_computed + num_new
    if num_new == 1:  # a decode step: the last slot that is in use in the last block
        num_in_last_block = num_tokens % block_size
        last_block = block_ids[(num_tokens - 1) // block_size]
        return [last_block * block_size + num_in_last_block - 1]
    slots = []
    for position in range(num_computed, num_tokens):
        block, offset = divmod(position, block_size)
        slots.append(block_ids[block] * block_size + offset)
    return slots


def test_slots(next_slots: SlotsOf) -> None:
    """Assert what holds for every right `next_slots`, and does not for the one above."""
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


def _as_if_neighbours(
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


def _chunks_from_a_blocks_begin(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    begin = num_computed if num_new == 1 else num_computed // block_size * block_size
    return right_slots(block_ids, begin, num_new, block_size)


def every_token_has_its_own_slot(part: Any) -> None:
    """chunks of all lengths, from all places, in blocks that are no neighbours:"""
    for block_ids, size in (([7, 2, 9], 4), ([3, 8, 1, 6], 3), ([5, 4, 2, 9, 1], 1)):
        room = len(block_ids) * size
        for first in range(room):
            for count in range(1, room + 1 - first):
                what = f"slots of {count} tokens behind {first}, blocks {block_ids} of {size}"
                right = right_slots(block_ids, first, count, size)
                expect_equal(list(part(block_ids, first, count, size)), right, what)


def answers_together_are_answers_alone(part: Any) -> None:
    """requests side by side in the toy engine:"""
    prompts = [[5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1]]
    alone = [serve_toy([prompt]).answers[0] for prompt in prompts]
    together = serve_toy(prompts, slots_of=part).answers
    for number, (found, right) in enumerate(zip(together, alone, strict=True)):
        expect_equal(found, right, f"the answer to request {number} beside three others")


HUNT = Hunt(
    "slots",
    next_slots,
    test_slots,
    right_slots,
    {"one that walks from slot to slot": _by_walking, "one that lists all slots": _from_all_slots},
    {
        "goes one slot beyond a block's end before it takes the next, in the middle of a chunk": (
            _one_beyond_a_block
        ),
        "takes blocks for neighbours, so that a long chunk runs on into others' blocks": (
            _as_if_neighbours
        ),
        "writes a block's first token into the block before, when it is decoded": (
            _next_block_too_late
        ),
        "writes a chunk from the begin of its block on, though tokens stand there": (
            _chunks_from_a_blocks_begin
        ),
    },
    (every_token_has_its_own_slot, answers_together_are_answers_alone),
    (
        "Take blocks that are no neighbours, like [7, 2, 9], and write down by hand where each "
        "position lies. Then compare, decode step by decode step.",
        "What is num_in_last_block after a decode step that fills a block?",
        "A good test also takes chunks: one that begins within a block, one that crosses into the "
        "next.",
    ),
    "**The report.** *Answers begin well and go astray after a while; how soon depends on the "
    "length of the prompt. Beside other requests, even such answers go astray as were right alone. "
    "Prompts are read rightly, and nothing is raised.* MinivLLM computed the slot of a decode step "
    "from the number of tokens in the last block, as `next_slots` does here (its issue 76). ONNX "
    "Runtime GenAI once wrote every decoded token one slot too far, and read a slot that nobody "
    "had written (pull request 2354).",
)

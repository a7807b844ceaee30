"""Tests and parts that learners might hand in for chapter 22's hunt."""

from typing import Any

from minigen_course.lab.toy_engine import right_slots


def every_slot_once(slots_of: Any) -> None:
    table = [9, 4, 6]
    decoded = [slots_of(table, position, 1, 5)[0] for position in range(15)]
    whole = slots_of(table, 0, 15, 5)
    halves = slots_of(table, 0, 7, 5) + slots_of(table, 7, 8, 5)
    assert decoded == whole == halves
    assert whole == [*range(45, 50), *range(20, 25), *range(30, 35)]


def by_formula(slots_of: Any) -> None:
    table, size = [3, 1, 8, 5], 4
    for first in range(16):
        for count in (1, 2, 6):
            if first + count <= 16:
                for place, slot in enumerate(slots_of(table, first, count, size), first):
                    assert (slot // size, slot % size) == (table[place // size], place % size)


def only_the_first_block(slots_of: Any) -> None:
    assert slots_of([7, 2], 1, 1, 4) == [29]


def only_decode(slots_of: Any) -> None:
    for position in range(12):
        expected = [7, 2, 9][position // 4] * 4 + position % 4
        assert slots_of([7, 2, 9], position, 1, 4) == [expected]


def only_adjacent_blocks(slots_of: Any) -> None:
    for first in range(8):
        for count in range(1, 9 - first):
            assert slots_of([1, 2], first, count, 4) == list(range(4 + first, 4 + first + count))


def only_whole_prompts(slots_of: Any) -> None:
    only_decode(slots_of)
    assert slots_of([7, 2, 9], 0, 6, 4) == [28, 29, 30, 31, 8, 9]


def wants_other_slots(slots_of: Any) -> None:
    only_decode(slots_of)
    assert slots_of([7, 2], 0, 2, 4) == [29, 30]


def mended_by_size(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    end = num_computed + num_new
    if num_new == 1:
        in_last = end % block_size or block_size
        return [block_ids[(end - 1) // block_size] * block_size + in_last - 1]
    return right_slots(block_ids, num_computed, num_new, block_size)


def mended_one_block_early(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    if num_new == 1:
        return [block_ids[-1] * block_size + num_computed % block_size]
    return right_slots(block_ids, num_computed, num_new, block_size)


def mended_by_the_next_block(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    if num_new == 1 and (num_computed + 1) % block_size == 0:
        return [block_ids[(num_computed + 1) // block_size] * block_size]
    return right_slots(block_ids, num_computed, num_new, block_size)


def returns_nothing(*_: Any) -> list[int]:
    return []

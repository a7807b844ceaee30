"""Checks of chapter 21: a shared block is copied before it is written."""

from typing import Any

from minigen.cache.blocks import BlockAllocator
from minigen.errors import OutOfBlocksError
from minigen.teach.messages import Wrong, expect, expect_equal


def _forked(num_blocks: int, num_owned: int, num_others: int) -> tuple[BlockAllocator, list[int]]:
    """A pool, and the table of a sequence whose blocks all have other owners too."""
    allocator = BlockAllocator(num_blocks)
    table = allocator.allocate(num_owned)
    for _ in range(num_others):
        allocator.share(table)
    return allocator, table


def _counts(allocator: BlockAllocator) -> list[int]:
    return [allocator.num_owners(each) for each in range(1, allocator.num_blocks + 1)]


def ones_own_block_is_written_in_place(part: Any) -> None:
    """a block that nobody else owns:"""
    allocator, table = _forked(5, 3, 0)
    expect_equal(part(allocator, table, 2), None, "what it returns for a block of one owner")
    expect_equal(table, [1, 2, 3], "the table")
    expect_equal(allocator.num_free, 2, "num_free: nothing should be taken")


def a_shared_block_is_exchanged_for_a_new_one(part: Any) -> None:
    """two sequences own the same three blocks, and one writes into the last:"""
    allocator, table = _forked(5, 3, 1)
    other = list(table)
    found = part(allocator, table, 2)
    expect(found is not None, "it returned None; it should return the pair (source, target).")
    expect_equal(tuple(found), (3, 4), "the pair (source, target)")
    expect_equal(table, [1, 2, 4], "the writer's table")
    expect_equal(other, [1, 2, 3], "the other's table")
    expect_equal(_counts(allocator), [2, 2, 1, 1, 0], "num_owners of blocks 1 to 5")


def any_block_may_be_written(part: Any) -> None:
    """the first block of three is written, then the second:"""
    allocator, table = _forked(7, 3, 1)
    expect_equal(tuple(part(allocator, table, 0)), (1, 4), "the pair (source, target)")
    expect_equal(tuple(part(allocator, table, 1)), (2, 5), "the second pair (source, target)")
    expect_equal(table, [4, 5, 3], "the writer's table")
    expect_equal(_counts(allocator), [1, 1, 2, 1, 1, 0, 0], "num_owners of blocks 1 to 7")


def the_last_owner_needs_no_copy(part: Any) -> None:
    """three owners write, one after another:"""
    allocator, first = _forked(6, 1, 2)
    second, third = list(first), list(first)
    expect_equal(tuple(part(allocator, first, 0)), (1, 2), "the first writer's pair")
    expect_equal(tuple(part(allocator, second, 0)), (1, 3), "the second writer's pair")
    expect_equal(part(allocator, third, 0), None, "what the last owner gets")
    expect_equal([*first, *second, *third], [2, 3, 1], "the blocks of the three")
    expect_equal(part(allocator, first, 0), None, "what the first gets when it writes again")
    expect_equal(_counts(allocator), [1, 1, 1, 0, 0, 0], "num_owners of blocks 1 to 6")


def without_a_free_block_nothing_changes(part: Any) -> None:
    """the pool is full:"""
    allocator, table = _forked(2, 2, 1)
    try:
        found = part(allocator, table, 1)
    except OutOfBlocksError:
        expect_equal(table, [1, 2], "the table after OutOfBlocksError")
        expect_equal(_counts(allocator), [2, 2], "num_owners after OutOfBlocksError")
        return
    raise Wrong(f"it returned {found} though no block is free; it should raise OutOfBlocksError.")

"""Exercises of chapter 21: capacity, a block allocator with reference counts, copy-on-write."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from minigen.errors import OutOfBlocksError
from minigen.kv_cache.block_allocator import RESERVED_BLOCK, BlockAllocator
from minigen_course.grading.exercise import Wrong, expect, expect_equal, num_steps


def _forked(num_blocks: int, num_owned: int, num_others: int) -> tuple[BlockAllocator, list[int]]:
    """Return a pool, and a block table whose blocks each have `num_others` more owners."""
    allocator = BlockAllocator(num_blocks)
    table = allocator.allocate(num_owned)
    for _ in range(num_others):
        allocator.share(table)
    return allocator, table


def _counts(allocator: BlockAllocator) -> list[int]:
    return [allocator.num_owners(each) for each in range(1, allocator.num_blocks + 1)]


def a_block_with_one_owner_is_written_in_place(part: Any) -> None:
    """a block with a single owner:"""
    allocator, table = _forked(5, 3, 0)
    expect_equal(part(allocator, table, 2), None, "what it returns for a block with one owner")
    expect_equal(table, [1, 2, 3], "the table")
    expect_equal(allocator.num_free, 2, "num_free: no block should be allocated")


def a_shared_block_is_replaced_by_a_new_one(part: Any) -> None:
    """two sequences own the same three blocks, and one of them writes into the last block:"""
    allocator, table = _forked(5, 3, 1)
    other = list(table)
    found = part(allocator, table, 2)
    expect(found is not None, "it returned None; it should return the pair (source, target).")
    expect_equal(tuple(found), (3, 4), "the pair (source, target)")
    expect_equal(table, [1, 2, 4], "the writer's table")
    expect_equal(other, [1, 2, 3], "the other sequence's table")
    expect_equal(_counts(allocator), [2, 2, 1, 1, 0], "num_owners of blocks 1 to 5")


def any_block_may_be_written(part: Any) -> None:
    """a sequence writes into the first of three shared blocks, then into the second:"""
    allocator, table = _forked(7, 3, 1)
    expect_equal(tuple(part(allocator, table, 0)), (1, 4), "the pair (source, target)")
    expect_equal(tuple(part(allocator, table, 1)), (2, 5), "the second pair (source, target)")
    expect_equal(table, [4, 5, 3], "the writer's table")
    expect_equal(_counts(allocator), [1, 1, 2, 1, 1, 0, 0], "num_owners of blocks 1 to 7")


def the_last_owner_needs_no_copy(part: Any) -> None:
    """three owners write into the same block, one after another:"""
    allocator, first = _forked(6, 1, 2)
    second, third = list(first), list(first)
    expect_equal(tuple(part(allocator, first, 0)), (1, 2), "the first writer's pair")
    expect_equal(tuple(part(allocator, second, 0)), (1, 3), "the second writer's pair")
    expect_equal(part(allocator, third, 0), None, "what it returns for the last owner")
    expect_equal([*first, *second, *third], [2, 3, 1], "the blocks of the three owners")
    expect_equal(
        part(allocator, first, 0), None, "what it returns for the first owner's second write"
    )
    expect_equal(_counts(allocator), [1, 1, 1, 0, 0, 0], "num_owners of blocks 1 to 6")


def without_a_free_block_nothing_changes(part: Any) -> None:
    """a write into a shared block when no block is free:"""
    allocator, table = _forked(2, 2, 1)
    try:
        found = part(allocator, table, 1)
    except OutOfBlocksError:
        expect_equal(table, [1, 2], "the table after OutOfBlocksError")
        expect_equal(_counts(allocator), [2, 2], "num_owners after OutOfBlocksError")
        return
    raise Wrong(f"it returned {found}, but no block is free; it should raise OutOfBlocksError.")


GB = 10**9


def the_weights_take_their_part(part: Any) -> None:
    """80 GB of memory, 16 GB of weights, 131,072 bytes per token, 2,048 tokens per sequence:"""
    expect_equal(part(80 * GB, 16 * GB, 131_072, 2048, 16), 238, "the number of sequences")
    expect_equal(part(80 * GB, 0, 131_072, 2048, 16), 298, "the number without weights")


def a_block_that_is_partly_filled_is_taken_whole(part: Any) -> None:
    """sequences that end inside a block, and sequences that fill theirs exactly:"""
    expect_equal(part(1600, 0, 1, 17, 16), 50, "sequences of 17 tokens in 100 blocks of 16")
    expect_equal(part(1600, 0, 1, 16, 16), 100, "sequences of 16 tokens in 100 blocks of 16")
    expect_equal(part(1600, 0, 1, 17, 1), 94, "sequences of 17 tokens in 1,600 blocks of 1")


def only_whole_blocks_and_whole_sequences_count(part: Any) -> None:
    """memory that is no multiple of a block, and blocks that are no multiple of a sequence:"""
    expect_equal(part(1615, 0, 1, 16, 16), 100, "sequences of 1 block in 1,615 bytes")
    expect_equal(part(1603, 4, 1, 16, 16), 99, "sequences of 1 block in 1,603 - 4 bytes")
    expect_equal(part(7 * 16, 0, 1, 40, 16), 2, "sequences of 3 blocks in 7 blocks")
    found = part(10**15, 0, 7, 1000, 10)
    expect(isinstance(found, int), f"it returned {found!r}; it should return a whole number.")
    expect_equal(found, 142_857_142_857, "the number in a very large memory (use //, not /)")


def weights_that_do_not_fit_leave_room_for_nothing(part: Any) -> None:
    """weights as large as the memory, and larger:"""
    expect_equal(part(80 * GB, 80 * GB, 131_072, 2048, 16), 0, "sequences in no memory")
    expect_equal(part(80 * GB, 140 * GB, 131_072, 2048, 16), 0, "sequences if weights do not fit")


def _expect_chosen(part: Any, free: list[int], count: int, right: list[int]) -> None:
    given = list(free)
    found = part(given, count)
    expect_equal(found, right, f"{count} of the free blocks {free}")
    expect_equal(given, free, f"the list of free blocks after choosing {count} of {free}")


def the_shortest_run_that_is_long_enough_is_cut(part: Any) -> None:
    """free blocks in runs of 3, 2 and 1, in any order:"""
    for free in ([2, 3, 4, 7, 8, 12], [12, 8, 3, 7, 2, 4]):
        for count, right in ((1, [12]), (2, [7, 8]), (3, [2, 3, 4])):
            _expect_chosen(part, free, count, right)
    _expect_chosen(part, [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13], 4, [9, 10, 11, 12])


def of_equal_runs_the_first_is_taken(part: Any) -> None:
    """two runs of 2 and two of 3:"""
    free = [5, 6, 9, 10, 21, 22, 23, 31, 32, 33]
    _expect_chosen(part, free, 2, [5, 6])
    _expect_chosen(part, free, 3, [21, 22, 23])
    _expect_chosen(part, free, 1, [5])


def without_a_run_that_fits_the_longest_are_joined(part: Any) -> None:
    """more blocks than any run has, in increasing order all the same:"""
    free = [5, 6, 9, 10, 21, 22, 23, 31, 32, 33]
    _expect_chosen(part, free, 4, [21, 22, 23, 31])
    _expect_chosen(part, free, 7, [5, 21, 22, 23, 31, 32, 33])
    _expect_chosen(part, free, 9, [5, 6, 9, 21, 22, 23, 31, 32, 33])
    _expect_chosen(part, free, 10, free)


def no_blocks_and_all_blocks_can_be_chosen(part: Any) -> None:
    """none of the free blocks, and none of none:"""
    _expect_chosen(part, [4, 5], 0, [])
    _expect_chosen(part, [], 0, [])
    _expect_chosen(part, [7], 1, [7])


OUT_OF_BLOCKS = "raise OutOfBlocksError (from minigen.errors) before it changes anything."


def _allocate(allocator: Any, count: int) -> list[int]:
    """Allocate `count` blocks; they must be different blocks of the pool."""
    found = allocator.allocate(count)
    expect(isinstance(found, list), f"allocate returned {found!r}; it should return a list of ids.")
    expect_equal(len(found), count, f"allocate({count}): the number of blocks it returned")
    expect(
        len(set(found)) == count,
        f"allocate({count}) returned {found}; each block should be different.",
    )
    for block_id in found:
        expect(
            block_id != RESERVED_BLOCK,
            f"allocate returned block {RESERVED_BLOCK}; it should return only blocks 1 to "
            f"num_blocks, because padding is written into block {RESERVED_BLOCK}.",
        )
    return found


def _release(allocator: Any, block_ids: list[int]) -> list[int]:
    freed = allocator.release(block_ids)
    expect(
        freed is not None, "release returned None; it should return the blocks that are now free."
    )
    return sorted(freed)


def _expect_refusal(allocator: Any, count: int) -> None:
    free = allocator.num_free
    try:
        found = allocator.allocate(count)
    except OutOfBlocksError:
        expect_equal(allocator.num_free, free, f"num_free after allocate({count}) was refused")
        return
    raise Wrong(
        f"allocate({count}) with {free} free blocks returned {found}; it should {OUT_OF_BLOCKS}"
    )


def every_block_is_allocated_once(part: type[BlockAllocator]) -> None:
    """a pool of 5 blocks, allocated in two calls:"""
    allocator = part(5)
    taken = [*_allocate(allocator, 2), *_allocate(allocator, 3)]
    expect_equal(sorted(taken), [1, 2, 3, 4, 5], "the blocks of both calls, sorted")


def free_blocks_are_counted(part: type[BlockAllocator]) -> None:
    """num_free as blocks are allocated and released:"""
    allocator = part(4)
    expect_equal(allocator.num_free, 4, "num_free of a new pool of 4 blocks")
    expect_equal(_allocate(allocator, 0), [], "allocate(0)")
    taken = _allocate(allocator, 3)
    expect_equal(allocator.num_free, 1, "num_free after allocate(3)")
    _release(allocator, taken[:2])
    expect_equal(allocator.num_free, 3, "num_free after two of the three were released")


def allocation_is_all_or_nothing(part: type[BlockAllocator]) -> None:
    """a call that asks for more blocks than are free:"""
    allocator = part(4)
    _allocate(allocator, 1)
    _expect_refusal(allocator, 4)
    _allocate(allocator, 3)
    _expect_refusal(allocator, 1)


def an_allocated_block_has_one_owner(part: type[BlockAllocator]) -> None:
    """num_owners of free blocks, and of blocks that were just allocated:"""
    allocator = part(3)
    for block_id in (1, 2, 3):
        expect_equal(allocator.num_owners(block_id), 0, f"num_owners({block_id}) of a free block")
    taken = _allocate(allocator, 2)
    for block_id in taken:
        expect_equal(allocator.num_owners(block_id), 1, f"num_owners({block_id}) after allocate")
    _release(allocator, taken)
    for block_id in taken:
        expect_equal(allocator.num_owners(block_id), 0, f"num_owners({block_id}) after release")


def released_blocks_are_returned_and_reused(part: type[BlockAllocator]) -> None:
    """blocks are released, and then allocated again:"""
    allocator = part(3)
    first, second, third = _allocate(allocator, 3)
    expect_equal(_release(allocator, [second]), [second], "what release returns, sorted")
    expect_equal(_allocate(allocator, 1), [second], "the only free block")
    expect_equal(
        _release(allocator, [first, third]), sorted([first, third]), "what release returns"
    )
    again = _allocate(allocator, 2)
    expect_equal(sorted(again), sorted([first, third]), "the free blocks, allocated again")


def a_shared_block_is_freed_by_its_last_owner(part: type[BlockAllocator]) -> None:
    """two blocks, one of which gets a second owner:"""
    allocator = part(2)
    shared, own = _allocate(allocator, 2)
    allocator.share([shared])
    expect_equal(allocator.num_owners(shared), 2, "num_owners of the shared block")
    expect_equal(_release(allocator, [shared, own]), [own], "what release returns")
    expect_equal(allocator.num_owners(shared), 1, "num_owners after one of two owners released it")
    expect_equal(allocator.num_free, 1, "num_free while the shared block has an owner")
    expect_equal(_allocate(allocator, 1), [own], "the only free block")
    expect_equal(_release(allocator, [shared]), [shared], "what release returns for the last owner")
    allocator.share([own])
    expect_equal(
        _release(allocator, [own, own]),
        [own],
        "what release returns for both owners",
    )
    expect_equal(allocator.num_free, 2, "num_free after all owners released their blocks")


def a_reused_block_has_one_owner(part: type[BlockAllocator]) -> None:
    """a block that had three owners is freed, and then allocated again:"""
    allocator = part(1)
    (block_id,) = _allocate(allocator, 1)
    allocator.share(each for each in (block_id, block_id))
    expect_equal(allocator.num_owners(block_id), 3, "num_owners after two were added")
    for _ in range(3):
        allocator.release(each for each in (block_id,))
    expect_equal(_allocate(allocator, 1), [block_id], "the block, allocated again")
    expect_equal(allocator.num_owners(block_id), 1, "num_owners of the block, allocated again")


def free_blocks_cannot_be_shared_or_released(part: type[BlockAllocator]) -> None:
    """share and release of a free block:"""
    for method in ("share", "release"):
        allocator = part(3)
        (block_id,) = _allocate(allocator, 1)
        allocator.release([block_id])
        try:
            getattr(allocator, method)([block_id])
        except Exception:
            continue
        raise Wrong(
            f"{method} accepted the free block {block_id}; it must raise an error, because "
            "otherwise two sequences would get the same block."
        )


def no_call_searches_the_pool(part: type[BlockAllocator]) -> None:
    """the work of each call in a pool of 64 blocks, and in one of 4,096, most of them owned:"""
    work: dict[str, list[int]] = {}
    for num_blocks in (64, 4096):
        allocator = part(num_blocks)
        block_id = _allocate(allocator, num_blocks - 2)[0]
        calls: dict[str, Callable[[Any, int], object]] = {
            "num_free": lambda pool, _: pool.num_free,
            "num_owners": lambda pool, block_id: pool.num_owners(block_id),
            "share": lambda pool, block_id: pool.share([block_id]),
            "release": lambda pool, block_id: pool.release([block_id]),
            "allocate": lambda pool, _: pool.allocate(1),
        }
        for name, call in calls.items():
            count = num_steps(partial(call, allocator, block_id))
            work.setdefault(name, []).append(count)
    for name, (small, large) in work.items():
        expect(
            large <= MOST_GROWTH * small,
            f"{name} ran {small} steps of Python in a pool of 64 blocks and {large} in one "
            "of 4,096; its work should not grow with the pool, so it must not look at all blocks.",
        )


MOST_GROWTH = 8  # a search is 64 times as long; a heap grows by the logarithm, twice as long


def returned_lists_are_independent(part: type[BlockAllocator]) -> None:
    """a caller changes the lists that it got, and there are two pools:"""
    allocator, other = part(4), part(4)
    taken = _allocate(allocator, 2)
    before = list(taken)
    _allocate(allocator, 1)
    expect_equal(taken, before, "the list that the first call returned, after a second call")
    expect_equal(other.num_free, 4, "num_free of another pool")
    first = taken[0]
    taken.clear()
    expect_equal(allocator.num_owners(first), 1, "num_owners after the caller cleared its list")
    allocator.release([first]).append(99)
    expect_equal(allocator.num_free, 2, "num_free after the caller changed what release returned")


def random_calls_match_reference_counts(part: type[BlockAllocator]) -> None:
    """600 random calls, compared with reference counts that the check keeps itself:"""
    rng, allocator, owners = random.Random(21), part(12), [0] * 13
    for number in range(600):
        owned = [block_id for block_id in range(1, 13) if owners[block_id]]
        what = rng.choice(("allocate", "share", "release"))
        some = sorted(rng.sample(owned, rng.randrange(len(owned) + 1)))
        if what == "allocate":
            some = _allocate(allocator, rng.randrange(owners[1:].count(0) + 1))
            taken = [each for each in some if owners[each]]
            expect(
                not taken,
                f"call {number}, allocate: {taken} had owners; they should be free blocks.",
            )
        elif what == "share":
            allocator.share(some)
        else:
            freed = [each for each in some if owners[each] == 1]
            expect_equal(_release(allocator, some), freed, f"call {number}, release({some})")
        for each in some:
            owners[each] += -1 if what == "release" else 1
        for each in range(1, 13):
            found = allocator.num_owners(each)
            expect_equal(found, owners[each], f"num_owners({each}) after call {number}, {what}")
        expect_equal(allocator.num_free, owners[1:].count(0), f"num_free after call {number}")


CHECKS = {
    "sequences_that_fit": (
        the_weights_take_their_part,
        a_block_that_is_partly_filled_is_taken_whole,
        only_whole_blocks_and_whole_sequences_count,
        weights_that_do_not_fit_leave_room_for_nothing,
    ),
    "BlockAllocator": (
        every_block_is_allocated_once,
        free_blocks_are_counted,
        allocation_is_all_or_nothing,
        an_allocated_block_has_one_owner,
        released_blocks_are_returned_and_reused,
        a_shared_block_is_freed_by_its_last_owner,
        a_reused_block_has_one_owner,
        free_blocks_cannot_be_shared_or_released,
        returned_lists_are_independent,
        random_calls_match_reference_counts,
        no_call_searches_the_pool,
    ),
    "copy_on_write": (
        a_block_with_one_owner_is_written_in_place,
        a_shared_block_is_replaced_by_a_new_one,
        any_block_may_be_written,
        the_last_owner_needs_no_copy,
        without_a_free_block_nothing_changes,
    ),
    "choose_adjacent": (
        the_shortest_run_that_is_long_enough_is_cut,
        of_equal_runs_the_first_is_taken,
        without_a_run_that_fits_the_longest_are_joined,
        no_blocks_and_all_blocks_can_be_chosen,
    ),
}

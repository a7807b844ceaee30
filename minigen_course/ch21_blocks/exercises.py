"""Chapter 21's exercises: an allocator of blocks that counts owners, and copy-on-write."""

import random
from typing import Any

from minigen.errors import OutOfBlocksError
from minigen.kv_cache.block_allocator import RESERVED_BLOCK, BlockAllocator, copy_on_write
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import Wrong, expect, expect_equal


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


LACKING = "raise OutOfBlocksError (from minigen.errors) before anything is changed."


def _allocate(allocator: Any, count: int) -> list[int]:
    """`count` blocks, which must be different ones of the pool."""
    found = allocator.allocate(count)
    expect(isinstance(found, list), f"allocate returned {found!r}; it should return a list of ids.")
    expect_equal(len(found), count, f"allocate({count}): how many blocks it returned")
    expect(len(set(found)) == count, f"allocate({count}) returned {found}; no block should repeat.")
    for block_id in found:
        expect(
            block_id != RESERVED_BLOCK,
            f"allocate returned block {RESERVED_BLOCK}; it must never be handed out, since "
            "padding is written there. Blocks are 1 to num_blocks.",
        )
    return found


def _release(allocator: Any, block_ids: list[int]) -> list[int]:
    freed = allocator.release(block_ids)
    expect(freed is not None, "release returned None; return the blocks that nobody owns any more.")
    return sorted(freed)


def _expect_refusal(allocator: Any, count: int) -> None:
    free = allocator.num_free
    try:
        found = allocator.allocate(count)
    except OutOfBlocksError:
        expect_equal(allocator.num_free, free, f"num_free after allocate({count}) was refused")
        return
    raise Wrong(f"allocate({count}) of {free} free blocks returned {found}; it should {LACKING}")


def every_block_is_handed_out_once(part: type[BlockAllocator]) -> None:
    """a pool of 5, taken in two pieces:"""
    allocator = part(5)
    taken = [*_allocate(allocator, 2), *_allocate(allocator, 3)]
    expect_equal(sorted(taken), [1, 2, 3, 4, 5], "the blocks of both pieces, sorted")


def free_blocks_are_counted(part: type[BlockAllocator]) -> None:
    """num_free as blocks go and come back:"""
    allocator = part(4)
    expect_equal(allocator.num_free, 4, "num_free of a new pool of 4")
    expect_equal(_allocate(allocator, 0), [], "allocate(0)")
    taken = _allocate(allocator, 3)
    expect_equal(allocator.num_free, 1, "num_free after allocate(3)")
    _release(allocator, taken[:2])
    expect_equal(allocator.num_free, 3, "num_free after two of the three came back")


def all_or_none(part: type[BlockAllocator]) -> None:
    """more blocks are asked for than are free:"""
    allocator = part(4)
    _allocate(allocator, 1)
    _expect_refusal(allocator, 4)
    _allocate(allocator, 3)
    _expect_refusal(allocator, 1)


def a_block_has_one_owner_at_first(part: type[BlockAllocator]) -> None:
    """num_owners of free blocks, and of blocks just taken:"""
    allocator = part(3)
    for block_id in (1, 2, 3):
        expect_equal(allocator.num_owners(block_id), 0, f"num_owners({block_id}) of a free block")
    taken = _allocate(allocator, 2)
    for block_id in taken:
        expect_equal(allocator.num_owners(block_id), 1, f"num_owners({block_id}) once taken")
    _release(allocator, taken)
    for block_id in taken:
        expect_equal(allocator.num_owners(block_id), 0, f"num_owners({block_id}) once released")


def what_is_released_is_told_and_used_again(part: type[BlockAllocator]) -> None:
    """blocks come back, and go to somebody else:"""
    allocator = part(3)
    first, second, third = _allocate(allocator, 3)
    expect_equal(_release(allocator, [second]), [second], "what release returns, sorted")
    expect_equal(_allocate(allocator, 1), [second], "the only free block")
    expect_equal(_release(allocator, [first, third]), sorted([first, third]), "what it returns")
    again = _allocate(allocator, 2)
    expect_equal(sorted(again), sorted([first, third]), "the free blocks, taken again")


def a_shared_block_stays_until_its_last_owner_leaves(part: type[BlockAllocator]) -> None:
    """two blocks, of which one gets a second owner:"""
    allocator = part(2)
    shared, own = _allocate(allocator, 2)
    allocator.share([shared])
    expect_equal(allocator.num_owners(shared), 2, "num_owners of the shared block")
    expect_equal(_release(allocator, [shared, own]), [own], "what release returns")
    expect_equal(allocator.num_owners(shared), 1, "num_owners after one of two owners left")
    expect_equal(allocator.num_free, 1, "num_free while the shared block has an owner")
    expect_equal(_allocate(allocator, 1), [own], "the only free block")
    expect_equal(_release(allocator, [shared]), [shared], "what the last owner's release returns")
    allocator.share([own])
    expect_equal(_release(allocator, [own, own]), [own], "release of both owners in one call")
    expect_equal(allocator.num_free, 2, "num_free after all have left")


def a_block_begins_anew(part: type[BlockAllocator]) -> None:
    """a block that had three owners is free, and taken again:"""
    allocator = part(1)
    (block_id,) = _allocate(allocator, 1)
    allocator.share(each for each in (block_id, block_id))
    expect_equal(allocator.num_owners(block_id), 3, "num_owners after two were added")
    for _ in range(3):
        allocator.release(each for each in (block_id,))
    expect_equal(_allocate(allocator, 1), [block_id], "the block, taken again")
    expect_equal(allocator.num_owners(block_id), 1, "num_owners of the block, taken again")


def free_blocks_are_nobodys_to_share_or_release(part: type[BlockAllocator]) -> None:
    """share and release of a block that is free:"""
    for method in ("share", "release"):
        allocator = part(3)
        (block_id,) = _allocate(allocator, 1)
        allocator.release([block_id])
        try:
            getattr(allocator, method)([block_id])
        except Exception:
            continue
        raise Wrong(
            f"{method} of free block {block_id} went through; it must raise an error, or two "
            "sequences will be given the same block."
        )


def what_it_returns_is_the_callers(part: type[BlockAllocator]) -> None:
    """a caller changes the lists that it was given, and there are two pools:"""
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


def a_long_run_adds_up(part: type[BlockAllocator]) -> None:
    """600 random calls, counted beside:"""
    rng, allocator, owners = random.Random(21), part(12), [0] * 13
    for number in range(600):
        owned = [block_id for block_id in range(1, 13) if owners[block_id]]
        what = rng.choice(("allocate", "share", "release"))
        some = sorted(rng.sample(owned, rng.randrange(len(owned) + 1)))
        if what == "allocate":
            some = _allocate(allocator, rng.randrange(owners[1:].count(0) + 1))
            taken = [each for each in some if owners[each]]
            expect(not taken, f"call {number}, allocate: block {taken} has owners; it should not.")
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


ALLOCATOR_USE = """from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64, allocator=mine)
print("allocator:", llm.describe()["allocator"])
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)"""

COPY_USE = """from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64)
with using(21, copy_on_write=mine):
    params = SamplingParams(n=3, seed=1, max_tokens=12)
    answer = llm.generate("The sea is", params, progress=False)
for choice in answer.choices:
    print(choice.text)"""

EXERCISES = (
    Exercise(
        "BlockAllocator",
        BlockAllocator,
        (
            every_block_is_handed_out_once,
            free_blocks_are_counted,
            all_or_none,
            a_block_has_one_owner_at_first,
            what_is_released_is_told_and_used_again,
            a_shared_block_stays_until_its_last_owner_leaves,
            a_block_begins_anew,
            free_blocks_are_nobodys_to_share_or_release,
            what_it_returns_is_the_callers,
            a_long_run_adds_up,
        ),
        (
            "Keep two things: a list of the free ids, and for each id how many own it.",
            "allocate: compare with the number of free ones first, and raise before you change "
            "anything. Each block taken has one owner.",
            "release: one owner less for each; those that come to 0 go back to the free list, and "
            "are what you return.",
        ),
        "Write the allocator. Blocks are 1 to `num_blocks`; block 0 is never handed out. "
        "`allocate` gives blocks of one owner, all or none; `share` adds an owner to each; "
        "`release` takes one from each and returns those that are free now. Sharing or releasing "
        "a free block is an error.",
        ALLOCATOR_USE,
        "Give neighbours where you can, so that a sequence's blocks lie in long runs. Count the "
        "runs of each table over the chapter's requests, and compare with the stack.",
    ),
    Exercise(
        "copy_on_write",
        copy_on_write,
        (
            ones_own_block_is_written_in_place,
            a_shared_block_is_exchanged_for_a_new_one,
            any_block_may_be_written,
            the_last_owner_needs_no_copy,
            without_a_free_block_nothing_changes,
        ),
        (
            "allocator.num_owners says whether somebody else owns the block.",
            "Take the new block first: if there is none, allocate raises, and nothing has changed.",
            "Then put it into the table, and release the old one: it has one owner less, and "
            "stays the others'.",
        ),
        "Write what happens before a sequence writes into block `index` of its table. If the "
        "block is its own, nothing. If others own it too, the sequence gets a new block in its "
        "place; return (source, target), so that the engine copies the contents.",
        COPY_USE,
        "Fork a sequence whose last block is full. How many copies are made, and when? Say it "
        "before you count them with `llm.count_work()`.",
    ),
)

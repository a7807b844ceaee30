"""Blocks: allocated all or none, with counted owners, and free again after the last owner."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minigen.errors import OutOfBlocksError
from minigen.kv_cache.block_allocator import RESERVED_BLOCK, BlockAllocator, blocks_needed
from minigen.protocols import BlockAllocator as BlockAllocatorProtocol

MANY_STEPS = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_the_allocator_fits_its_socket() -> None:
    assert isinstance(BlockAllocator(1), BlockAllocatorProtocol)


def test_blocks_needed_is_the_least_number_that_holds_the_tokens() -> None:
    for block_size in (1, 2, 3, 16):
        for num_tokens in range(70):
            count = blocks_needed(num_tokens, block_size)
            assert count * block_size >= num_tokens > (count - 1) * block_size


def test_every_block_except_the_reserved_one_is_allocated_once() -> None:
    allocator = BlockAllocator(7)
    taken = [*allocator.allocate(3), *allocator.allocate(0), *allocator.allocate(4)]
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7]
    assert RESERVED_BLOCK not in taken
    assert allocator.num_free == 0


def test_too_many_blocks_are_an_error_and_none_is_allocated() -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocksError, match="4 blocks were requested, but only 3 are free"):
        allocator.allocate(4)
    assert allocator.num_free == 3
    assert len(allocator.allocate(3)) == 3


def test_a_pool_of_no_blocks_gives_none() -> None:
    allocator = BlockAllocator(0)
    assert allocator.allocate(0) == []
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(1)


def test_a_count_below_zero_is_refused() -> None:
    allocator = BlockAllocator(5)
    with pytest.raises(AssertionError):
        allocator.allocate(-2)
    assert allocator.num_free == 5


def test_the_block_that_was_freed_last_is_allocated_first() -> None:
    allocator = BlockAllocator(9)
    taken = allocator.allocate(4)
    allocator.release([taken[1]])
    allocator.release([taken[3]])
    assert allocator.allocate(1) == [taken[3]]
    assert allocator.allocate(1) == [taken[1]]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    allocator = BlockAllocator(3)
    first, second = allocator.allocate(2)
    allocator.share([first, first])
    assert allocator.release([first, second]) == [second]
    assert allocator.release([first]) == []
    assert allocator.num_owners(first) == 1
    assert allocator.release([first]) == [first]
    assert allocator.num_free == 3


def test_a_free_block_can_be_neither_released_nor_shared() -> None:
    allocator = BlockAllocator(3)
    (block_id,) = allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"block {block_id} is already free"):
        allocator.release([block_id, block_id])
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockAllocator(3).share([2])
    with pytest.raises(AssertionError, match="block 0 is already free"):
        BlockAllocator(3).release([RESERVED_BLOCK])


class AllocatorMachine(RuleBasedStateMachine):
    """An allocator and a simple model of it: the number of owners of each block."""

    @initialize(num_blocks=st.integers(0, 9))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.everything = set(range(1, num_blocks + 1))
        self.owners: Counter[int] = Counter()

    @property
    def free(self) -> set[int]:
        return {block_id for block_id in self.everything if self.owners[block_id] == 0}

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError):
                self.allocator.allocate(count)
            return
        taken = self.allocator.allocate(count)
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= self.free
        self.owners.update(taken)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owned = sorted(+self.owners)
        block_ids = data.draw(st.lists(st.sampled_from(owned), max_size=4)) if owned else []
        self.allocator.share(block_ids)
        self.owners.update(block_ids)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owned = data.draw(st.permutations(sorted(self.owners.elements())))
        block_ids = owned[: data.draw(st.integers(0, len(owned)))]
        before = self.free
        freed = self.allocator.release(block_ids)
        self.owners.subtract(block_ids)
        assert sorted(freed) == sorted(self.free - before)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def touch_a_free_block(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.free)))
        for wrong in (self.allocator.release, self.allocator.share):
            with pytest.raises(AssertionError):
                wrong([block_id])

    @invariant()
    def counts_are_true(self) -> None:
        assert self.allocator.num_free == len(self.free)
        for block_id in self.everything:
            assert self.allocator.num_owners(block_id) == self.owners[block_id]

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.release(self.owners.elements())
            assert self.allocator.num_free == len(self.everything)
            assert set(self.allocator.allocate(len(self.everything))) == self.everything


def test_the_allocator_counts_like_a_plain_model_in_any_sequence_of_calls() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=MANY_STEPS)

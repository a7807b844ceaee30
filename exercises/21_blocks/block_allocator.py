"""Exercise BlockAllocator of chapter 21 (core, 10 points, about 20 minutes).

Write the block allocator. Its blocks are 1 to `num_blocks`; block 0 is never allocated.
`allocate` returns `count` blocks with one owner each, or raises `OutOfBlocksError` (of
`minigen.errors`) and changes nothing. `share` adds an owner to each block. `release` takes an
owner from each block, and returns the blocks that are now free. Sharing or releasing a free
block raises an error of any kind. No method searches all blocks: the work for one block must
not grow with the number of blocks.

Check it:     minigen check exercises/21_blocks/block_allocator.py
With a hint:  minigen check exercises/21_blocks/block_allocator.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    llm = LLM.load(num_blocks=64, allocator=mine)
    print("allocator:", llm.describe()["allocator"])
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

Harder: Allocate adjacent blocks where you can, so that a sequence's blocks lie in long runs.
The exercise `choose_adjacent` asks for it, and the chapter's notebook then counts the runs.
"""

# exercise: minigen.kv_cache.block_allocator.BlockAllocator
from collections.abc import Iterable


class BlockAllocator:
    """Allocates block ids 1 to `num_blocks`; a block is free again when its last owner releases it.

    O(1) per block: an array of reference counts, and a free list used as a stack, so that recently
    used blocks, which may still be in the CPU's caches, are allocated first.
    """

    def __init__(self, num_blocks: int):
        raise NotImplementedError  # your turn

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""
        raise NotImplementedError  # your turn

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one owner now.

        Raises `OutOfBlocksError`, and allocates nothing, if fewer are free.
        """
        raise NotImplementedError  # your turn

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block."""
        raise NotImplementedError  # your turn

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one owner from each block; return the blocks that are free now."""
        raise NotImplementedError  # your turn

    def num_owners(self, block_id: int) -> int:
        """Return the block's number of owners; 0 if it is free."""
        raise NotImplementedError  # your turn

"""The KV cache's memory in blocks of a fixed size, which sequences share by reference counts.

Source: PagedAttention, Kwon et al. 2023. A block holds the keys and values of `block_size` tokens
in all layers. A sequence owns a list of blocks, its block table; they need not be contiguous, and
only the last one has unused slots. Sequences with the same prefix can own the same blocks. Before a
sequence writes into a shared block, it gets its own copy (copy-on-write).
"""

from collections.abc import Iterable

from minigen.errors import OutOfBlocksError
from minigen.protocols import BlockAllocator as Allocator

RESERVED_BLOCK = 0  # padding rows of a batch write here; it is never allocated or counted


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens.

    >>> [blocks_needed(tokens, block_size=16) for tokens in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Allocates block ids 1 to `num_blocks`; a block is free again when its last owner releases it.

    O(1) per block: an array of reference counts, and a free list used as a stack, so that recently
    used blocks, which may still be in the CPU's caches, are allocated first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, RESERVED_BLOCK, -1))
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one owner now.

        Raises `OutOfBlocksError`, and allocates nothing, if fewer are free.
        """
        assert count >= 0, f"count must not be negative, but is {count}"
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} blocks were requested, but only {len(self._free)} are free."
            )
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free: it cannot be shared"
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one owner from each block; return the blocks that are free now."""
        freed = []
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is already free"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                freed.append(block_id)
        self._free.extend(freed)
        return freed

    def num_owners(self, block_id: int) -> int:
        """Return the block's number of owners; 0 if it is free."""
        return self._references[block_id]


def copy_on_write(allocator: Allocator, table: list[int], index: int) -> tuple[int, int] | None:
    """Make the block at `index` of a sequence's block table writable: owned by that sequence only.

    If the block has other owners, a new block takes its place in the table, and the old block loses
    one owner. Returns the pair (source, target), so that the caller can copy the contents; None if
    the sequence was the only owner. Raises `OutOfBlocksError`, and changes nothing, if no block is
    free.
    """
    source = table[index]
    if allocator.num_owners(source) == 1:
        return None
    (target,) = allocator.allocate(1)
    table[index] = target
    allocator.release([source])
    return source, target

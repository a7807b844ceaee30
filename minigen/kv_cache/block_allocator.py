"""Memory for keys and values in blocks of a fixed size, shared by counting references.

Source: PagedAttention, Kwon et al. 2023. A block holds the keys and values of `block_size` tokens
in all layers; a sequence owns a list of blocks that need not be neighbours, and only its last
block has unused slots. Sequences that begin alike may own the same blocks; one that wants to write
into a shared block gets a copy of its own first (copy-on-write).
"""

from collections.abc import Iterable

from minigen.errors import OutOfBlocksError
from minigen.protocols import BlockAllocator as Allocator

RESERVED_BLOCK = 0  # where padding rows of a batch write; never handed out, counted nowhere


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens.

    >>> [blocks_needed(tokens, block_size=16) for tokens in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Hands out block ids 1 to `num_blocks`, and takes each back when its last owner lets go.

    O(1) a block: a free list used as a stack (so that recently used, warm blocks go first) and an
    array of reference counts.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, RESERVED_BLOCK, -1))
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each; all or, with an `OutOfBlocksError`, none."""
        assert count >= 0, f"{count} blocks cannot be taken"
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks are wanted, {len(self._free)} are free.")
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
        """Take an owner from each block; returns those that nobody owns any more, now free."""
        freed = []
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free already"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                freed.append(block_id)
        self._free.extend(freed)
        return freed

    def num_owners(self, block_id: int) -> int:
        """How many own the block; 0 if it is free."""
        return self._references[block_id]


def copy_on_write(allocator: Allocator, table: list[int], index: int) -> tuple[int, int] | None:
    """Make the block at `index` of a sequence's table its own, before it is written.

    A block of several owners stays theirs: the table gets a new one in its place. Returns the two,
    (source, target), for their contents to be copied; None if the block is the sequence's alone.
    Raises `OutOfBlocksError`, and has changed nothing, if there is no block for a copy.
    """
    source = table[index]
    if allocator.num_owners(source) == 1:
        return None
    (target,) = allocator.allocate(1)
    table[index] = target
    allocator.release([source])
    return source, target

"""A foreign allocator, watched, and an allocator as it is lent to a foreign prefix cache."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from minigen.checked.complaint import block_ids_of, complaint, name_of
from minigen.protocols import BlockAllocator


class CheckedAllocator:
    """A foreign allocator: each block has one owner at first, and is free when it has none."""

    def __init__(self, allocator: BlockAllocator, num_blocks: int):
        self.allocator, self.num_blocks = allocator, num_blocks
        self.__name__ = name_of(allocator)
        self._owners = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        found, truth = self.allocator.num_free, self._owners[1:].count(0)
        if found != truth:
            raise complaint(self.allocator, "num_free", f"is {found}; {truth} blocks have no owner")
        return truth

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks."""
        taken = block_ids_of(self.allocator, "allocate", self.allocator.allocate(count))
        if len(taken) != count or len(set(taken)) != count:
            self._complain("allocate", f"returned {taken} for {count} different blocks")
        for block_id in taken:
            if not 1 <= block_id <= self.num_blocks:
                self._complain(
                    "allocate", f"returned block {block_id}; blocks are 1 to {self.num_blocks}"
                )
            if self._owners[block_id]:
                self._complain(
                    "allocate",
                    f"returned block {block_id}, which is not free: its owners are "
                    f"{self._owners[block_id]}",
                )
        for block_id in taken:
            self._owners[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block."""
        block_ids = list(block_ids)
        self.allocator.share(block_ids)
        for block_id in block_ids:
            self._owners[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Take an owner from each block."""
        block_ids = list(block_ids)
        returned: Any = self.allocator.release(block_ids)
        for block_id in block_ids:
            self._owners[block_id] -= 1
        freed = block_ids_of(self.allocator, "release", returned)
        truth = [block_id for block_id in block_ids if self._owners[block_id] == 0]
        if sorted(freed) != sorted(truth):
            self._complain("release", f"returned {freed} as freed; these are free now: {truth}")
        return freed

    def num_owners(self, block_id: int) -> int:
        """How many own the block."""
        found, truth = self.allocator.num_owners(block_id), self._owners[block_id]
        if found != truth:
            self._complain("num_owners", f"says {found} of block {block_id}, which {truth} own")
        return truth

    def _complain(self, method: str, what: str) -> NoReturn:
        raise complaint(self.allocator, method, what)


class LentAllocator:
    """An allocator as it is lent to a foreign prefix cache: what that does to it is written down.

    `borrower` is the cache, or what it is made by.
    """

    def __init__(self, allocator: BlockAllocator, borrower: Any):
        self.allocator, self.borrower = allocator, borrower
        self._changes: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return self.allocator.num_free

    def num_owners(self, block_id: int) -> int:
        """How many own the block."""
        return self.allocator.num_owners(block_id)

    def allocate(self, count: int) -> list[int]:
        """Refused: a prefix cache keeps what sequences have computed."""
        raise complaint(
            self.borrower, "", f"allocated {count} blocks; it must only share those it is given"
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block. Raises `PartError` if one is free."""
        self._change("shared", list(block_ids), 1)

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Take an owner from each block. Raises `PartError` if one is free."""
        return self._change("released", list(block_ids), -1)

    def take_changes(self) -> Counter[int]:
        """By block, how many owners it has gained since this was last asked."""
        changes, self._changes = self._changes, Counter()
        return changes

    def _change(self, what: str, block_ids: list[int], by: int) -> list[int]:
        freed = []
        for block_id in block_ids:
            if self.allocator.num_owners(block_id) == 0:
                raise complaint(
                    self.borrower,
                    "",
                    f"{what} block {block_id}, which nobody owns: what it keeps it must own, by a "
                    "share in insert",
                )
            if by > 0:
                self.allocator.share([block_id])
            else:
                freed += self.allocator.release([block_id])
            self._changes[block_id] += by
        return freed

"""A foreign allocator and prefix cache, watched: no block is handed out twice, or read wrongly."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from minigen.checked.complaint import complaint, name_of
from minigen.protocols import BlockAllocator, PrefixCache


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
        taken = list(self.allocator.allocate(count))
        if len(taken) != count or len(set(taken)) != count:
            raise complaint(
                self.allocator, "allocate", f"returned {taken} for {count} different blocks"
            )
        for block_id in taken:
            if not 1 <= block_id <= self.num_blocks:
                raise complaint(
                    self.allocator,
                    "allocate",
                    f"returned block {block_id}; blocks are 1 to {self.num_blocks}",
                )
            if self._owners[block_id]:
                raise complaint(
                    self.allocator,
                    "allocate",
                    f"returned block {block_id}, which {self._owners[block_id]} own already",
                )
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
        freed = list(self.allocator.release(block_ids) or ())
        for block_id in block_ids:
            self._owners[block_id] -= 1
        truth = [block_id for block_id in block_ids if self._owners[block_id] == 0]
        if sorted(freed) != sorted(truth):
            raise complaint(
                self.allocator, "release", f"returned {freed} as freed; these are free now: {truth}"
            )
        return freed

    def num_owners(self, block_id: int) -> int:
        """How many own the block."""
        found, truth = self.allocator.num_owners(block_id), self._owners[block_id]
        if found != truth:
            raise complaint(
                self.allocator, "num_owners", f"says {found} of block {block_id}, which {truth} own"
            )
        return truth


class CheckedPrefixCache:
    """A foreign prefix cache: a block stands only for the tokens that it was computed from."""

    def __init__(self, cache: PrefixCache, allocator: BlockAllocator, block_size: int):
        self.cache, self.allocator, self.block_size = cache, allocator, block_size
        self.__name__ = name_of(cache)
        self._contents: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    @property
    def num_evictable(self) -> int:
        """Blocks that would become free if they were needed."""
        found = self.cache.num_evictable
        if not 0 <= found <= len(self._contents):
            raise complaint(
                self.cache, "num_evictable", f"is {found}; {len(self._contents)} blocks are kept"
            )
        return found

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """The blocks of a known beginning, each now with one owner more."""
        matched = list(self.cache.match(token_ids, salt))
        if len(matched) * self.block_size >= len(token_ids):
            raise complaint(
                self.cache,
                "match",
                f"returned {len(matched)} blocks for {len(token_ids)} tokens; at least one token "
                "must be left to compute",
            )
        for index, block_id in enumerate(matched):
            self._check_contents("match", block_id, index, token_ids, salt)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Keep full, computed blocks; returns those that were known as (index, known block)."""
        num_full = len(token_ids) // self.block_size
        exchanged = [
            (index, known)
            for index, known in self.cache.insert(token_ids, block_ids, first, salt) or ()
        ]
        for index, known in exchanged:
            if not first <= index < num_full:
                raise complaint(
                    self.cache,
                    "insert",
                    f"exchanged block number {index}; it was given {first} to {num_full - 1}",
                )
            self._check_contents("insert", known, index, token_ids, salt)
        indices = {index for index, _ in exchanged}
        for index in range(first, num_full):
            if index not in indices and self.allocator.num_owners(block_ids[index]) > 1:
                path = tuple(token_ids[: (index + 1) * self.block_size])
                self._contents.setdefault(block_ids[index], (salt, path))
        return exchanged

    def join(self, block_ids: SequenceOf[int]) -> None:
        """Another sequence uses these blocks too."""
        self.cache.join(block_ids)

    def leave(self, block_ids: SequenceOf[int]) -> None:
        """A sequence is about to release these blocks."""
        self.cache.leave(block_ids)

    def evict(self, count: int) -> list[int]:
        """Free up to `count` blocks that nobody uses."""
        evicted = list(self.cache.evict(count))
        if len(evicted) > count:
            raise complaint(
                self.cache, "evict", f"evicted {len(evicted)} blocks; {count} were wanted"
            )
        for block_id in evicted:
            if self.allocator.num_owners(block_id):
                raise complaint(
                    self.cache,
                    "evict",
                    f"returned block {block_id}, which {self.allocator.num_owners(block_id)} own "
                    "still: release it, and evict only what no sequence uses",
                )
            self._contents.pop(block_id, None)
        return evicted

    def _check_contents(
        self,
        method: str,
        block_id: int,
        index: int,
        token_ids: SequenceOf[int],
        salt: str | None,
    ) -> None:
        wanted = (salt, tuple(token_ids[: (index + 1) * self.block_size]))
        found = self._contents.get(block_id)
        if found == wanted:
            return
        holds = "was never inserted"
        if found is not None:
            last = list(found[1][-self.block_size :])
            holds = f"holds the tokens {last} behind another beginning, or of another salt"
        raise complaint(
            self.cache,
            method,
            f"returned block {block_id} as number {index} of a sequence whose tokens there are "
            f"{list(wanted[1][-self.block_size :])}; that block {holds}",
        )

"""Wrappers that check a user's block allocator or prefix cache at every call.

They ensure that every block in use holds the right tokens and is not free.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import Any, NoReturn

from minigen.errors import PartError
from minigen.protocols import BlockAllocator, PrefixCache
from minigen.sockets.resolve import block_ids_of, items_of, name_of, part_error, whole_number


class CheckedAllocator:
    """Checks a user's allocator: a block has one owner when allocated, and is free without any."""

    def __init__(self, allocator: BlockAllocator, num_blocks: int):
        self.allocator, self.num_blocks = allocator, num_blocks
        self.__name__ = name_of(allocator)
        self._owners = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner."""
        found, truth = self.allocator.num_free, self._owners[1:].count(0)
        if found != truth:
            raise part_error(
                self.allocator,
                "num_free",
                f"is {found}; {truth} blocks have no owner: allocate and share must add an owner "
                "to each block, and release must remove one",
            )
        return truth

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free blocks. Raises `PartError` if the allocator returns others."""
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
                    f"returned block {block_id}, which is not free: it has "
                    f"{self._owners[block_id]} owners",
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
        """Remove an owner from each block, and return the blocks that are free now."""
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
        """Return the number of the block's owners."""
        found, truth = self.allocator.num_owners(block_id), self._owners[block_id]
        if found != truth:
            self._complain(
                "num_owners", f"returned {found} for block {block_id}, which has {truth} owners"
            )
        return truth

    def _complain(self, method: str, what: str) -> NoReturn:
        raise part_error(self.allocator, method, what)


class TrackedAllocator:
    """Wraps the allocator given to a user's prefix cache, and records the cache's calls.

    `part` is the cache, or the class or function that creates it.
    """

    def __init__(self, allocator: BlockAllocator, part: Any):
        self.allocator, self.part = allocator, part
        self._changes: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner."""
        return self.allocator.num_free

    def num_owners(self, block_id: int) -> int:
        """Return the number of the block's owners."""
        return self.allocator.num_owners(block_id)

    def allocate(self, count: int) -> list[int]:
        """Raise `PartError`: a prefix cache only shares blocks that sequences have computed."""
        raise part_error(
            self.part, "", f"allocated {count} blocks; it must only share those it is given"
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block. Raises `PartError` if one is free."""
        self._change("shared", list(block_ids), 1)

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove an owner from each block. Raises `PartError` if one is free."""
        return self._change("released", list(block_ids), -1)

    def take_changes(self) -> Counter[int]:
        """Return, by block, the change of its number of owners since the last call."""
        changes, self._changes = self._changes, Counter()
        return changes

    def _change(self, what: str, block_ids: list[int], by: int) -> list[int]:
        freed = []
        for block_id in block_ids:
            if self.allocator.num_owners(block_id) == 0:
                raise part_error(
                    self.part,
                    "",
                    f"{what} block {block_id}, which has no owner: the cache must own each block "
                    "that it caches, by a share in insert",
                )
            if by > 0:
                self.allocator.share([block_id])
            else:
                freed += self.allocator.release([block_id])
            self._changes[block_id] += by
        return freed


Contents = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens up to the end of a block
NOTHING: Mapping[int, Any] = MappingProxyType({})

# What a prefix cache must do in each method; part of the error when it changes other owners.
REMEDIES = {
    "match": "share what it returns, each block once",
    "insert": "share each block that it caches; where it returns (index, known block), share the "
    "known one and release the sequence's own",
    "acquire": "leave that to the engine, which has shared these blocks already",
    "release": "leave that to the engine, which releases these blocks itself",
    "evict": "release each block that it returns, once",
}


class CheckedPrefixCache:
    """Checks a user's prefix cache: a block may only be used for the tokens that it contains.

    The cache must be one owner of each block that it caches, from its `insert` until its eviction.
    """

    def __init__(self, cache: PrefixCache, allocator: TrackedAllocator, block_size: int):
        self.cache, self.allocator, self.block_size = cache, allocator, block_size
        self.__name__ = name_of(cache)
        self._cached: dict[int, Contents] = {}

    @property
    def num_evictable(self) -> int:
        """Number of blocks that eviction can free."""
        found = whole_number(
            self.cache, "num_evictable", self.cache.num_evictable, "must be a whole number"
        )
        truth = sum(self.allocator.num_owners(block_id) == 1 for block_id in self._cached)
        if not 0 <= found <= truth:
            raise part_error(
                self.cache,
                "num_evictable",
                f"is {found}; of the {len(self._cached)} blocks that it caches, {truth} are not "
                "used by a sequence",
            )
        return found

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix, each with one more owner."""
        returned = self.cache.match(token_ids, salt)
        changes = self.allocator.take_changes()
        try:
            matched = block_ids_of(self.cache, "match", returned)
            if len(matched) * self.block_size >= len(token_ids):
                raise part_error(
                    self.cache,
                    "match",
                    f"returned {len(matched)} blocks for {len(token_ids)} tokens; at least one "
                    "token must be left to compute",
                )
            for index, block_id in enumerate(matched):
                self._check_contents("match", block_id, index, token_ids, salt)
            self._settle("match", changes, wanted=Counter(matched))
        except PartError:
            self.allocator.allocator.release((+changes).elements())
            raise
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Cache full, computed blocks; return those already cached, as (index, known block)."""
        own = list(block_ids)
        num_full = len(token_ids) // self.block_size
        exchanged = self._exchanged(self.cache.insert(token_ids, block_ids, first, salt))
        wanted: Counter[int] = Counter()
        for index, known in exchanged:
            if not first <= index < num_full:
                raise part_error(
                    self.cache,
                    "insert",
                    f"replaced block number {index}; it was given {first} to {num_full - 1}",
                )
            self._check_contents("insert", known, index, token_ids, salt)
            wanted[known] += 1
            wanted[own[index]] -= 1
        offered = {
            own[index]: (salt, tuple(token_ids[: (index + 1) * self.block_size]))
            for index in range(first, num_full)
        }
        self._settle("insert", self.allocator.take_changes(), wanted, offered)
        return exchanged

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Tell the cache that another sequence uses these blocks."""
        self.cache.acquire(block_ids)
        self._settle("acquire", self.allocator.take_changes())

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Tell the cache that a sequence is about to release these blocks."""
        self.cache.release(block_ids)
        self._settle("release", self.allocator.take_changes())

    def evict(self, count: int) -> list[int]:
        """Free up to `count` blocks that no sequence uses."""
        possible, before = min(count, self.num_evictable), set(self._cached)
        evicted = block_ids_of(self.cache, "evict", self.cache.evict(count))
        self._settle("evict", self.allocator.take_changes())
        released = sorted(before - self._cached.keys())
        if sorted(evicted) != released:
            raise part_error(
                self.cache, "evict", f"returned {evicted}, but released {released} of its blocks"
            )
        if not possible <= len(evicted) <= count:
            raise part_error(
                self.cache,
                "evict",
                f"evicted {len(evicted)} blocks; {count} were requested, and {possible} of those "
                "are possible by num_evictable",
            )
        for block_id in evicted:
            if self.allocator.num_owners(block_id):
                raise part_error(
                    self.cache,
                    "evict",
                    f"returned block {block_id}, which a sequence uses: evict a block only after "
                    "every sequence that matched, acquired or inserted it has released it",
                )
        return evicted

    def _exchanged(self, returned: Any) -> list[tuple[int, int]]:
        wanted = "must return a list of (index, known block), or nothing"
        pairs = []
        for item in () if returned is None else items_of(self.cache, "insert", returned, wanted):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise part_error(self.cache, "insert", f"{wanted}; {item!r} is none")
            index, known = (whole_number(self.cache, "insert", each, wanted) for each in item)
            pairs.append((index, known))
        return pairs

    def _settle(
        self,
        method: str,
        changes: Mapping[int, int],
        wanted: Mapping[int, int] = NOTHING,
        offered: Mapping[int, Contents] = NOTHING,
    ) -> None:
        """Check each change of a block's owners: it is `wanted`, or the cache adds or drops it.

        The cache may add only blocks that are `offered`, and drop only blocks that it caches.
        """
        for block_id in {*changes, *wanted}:
            found, due = changes.get(block_id, 0), wanted.get(block_id, 0)
            if found == due:
                continue
            if due == 0 and found == 1 and block_id in offered and block_id not in self._cached:
                self._cached[block_id] = offered[block_id]
            elif due == 0 and found == -1 and block_id in self._cached:
                del self._cached[block_id]
            else:
                raise part_error(
                    self.cache,
                    method,
                    f"changed the number of block {block_id}'s owners by {found}, not by {due}: "
                    f"it must {REMEDIES[method]}",
                )

    def _check_contents(
        self,
        method: str,
        block_id: int,
        index: int,
        token_ids: SequenceOf[int],
        salt: str | None,
    ) -> None:
        wanted = (salt, tuple(token_ids[: (index + 1) * self.block_size]))
        found = self._cached.get(block_id)
        if found == wanted:
            return
        holds = "is not cached: it was never inserted, or has been evicted"
        if found is not None:
            last = list(found[1][-self.block_size :])
            holds = f"holds the tokens {last} after another prefix, or with another salt"
        raise part_error(
            self.cache,
            method,
            f"returned block {block_id} as number {index} of a sequence whose tokens there are "
            f"{list(wanted[1][-self.block_size :])}; that block {holds}",
        )

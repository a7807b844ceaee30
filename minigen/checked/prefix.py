"""A foreign prefix cache, watched: no block is read that stands for other tokens."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import Any

from minigen.checked.allocator import LentAllocator
from minigen.checked.complaint import block_ids_of, complaint, items_of, name_of, whole_number
from minigen.errors import PartError
from minigen.protocols import PrefixCache

Contents = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens up to a block's end
NOTHING: Mapping[int, Any] = MappingProxyType({})

# What a prefix cache should have done where it has changed the owners of a block otherwise.
REMEDIES = {
    "match": "share what it returns, each block once",
    "insert": "share each block that it keeps; where it returns (index, known block), share the "
    "known one and release the sequence's own",
    "join": "leave that to the engine, which has shared these blocks already",
    "leave": "leave that to the engine, which releases these blocks itself",
    "evict": "release each block that it returns, once",
}


class CheckedPrefixCache:
    """A foreign prefix cache: a block stands only for the tokens that it was computed from.

    It must be one owner of each block that it keeps, from the `insert` that keeps it on.
    """

    def __init__(self, cache: PrefixCache, allocator: LentAllocator, block_size: int):
        self.cache, self.allocator, self.block_size = cache, allocator, block_size
        self.__name__ = name_of(cache)
        self._kept: dict[int, Contents] = {}

    @property
    def num_evictable(self) -> int:
        """Blocks that would become free if they were needed."""
        found = whole_number(
            self.cache, "num_evictable", self.cache.num_evictable, "must be a whole number"
        )
        truth = sum(self.allocator.num_owners(block_id) == 1 for block_id in self._kept)
        if not 0 <= found <= truth:
            raise complaint(
                self.cache,
                "num_evictable",
                f"is {found}; of the {len(self._kept)} blocks that it keeps, no sequence uses "
                f"{truth}",
            )
        return found

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """The blocks of a known beginning, each now with one owner more."""
        returned = self.cache.match(token_ids, salt)
        changes = self.allocator.take_changes()
        try:
            matched = block_ids_of(self.cache, "match", returned)
            if len(matched) * self.block_size >= len(token_ids):
                raise complaint(
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
        """Keep full, computed blocks; returns those that were known as (index, known block)."""
        own = list(block_ids)
        num_full = len(token_ids) // self.block_size
        exchanged = self._exchanged(self.cache.insert(token_ids, block_ids, first, salt))
        wanted: Counter[int] = Counter()
        for index, known in exchanged:
            if not first <= index < num_full:
                raise complaint(
                    self.cache,
                    "insert",
                    f"exchanged block number {index}; it was given {first} to {num_full - 1}",
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

    def join(self, block_ids: SequenceOf[int]) -> None:
        """Another sequence uses these blocks too."""
        self.cache.join(block_ids)
        self._settle("join", self.allocator.take_changes())

    def leave(self, block_ids: SequenceOf[int]) -> None:
        """A sequence is about to release these blocks."""
        self.cache.leave(block_ids)
        self._settle("leave", self.allocator.take_changes())

    def evict(self, count: int) -> list[int]:
        """Free up to `count` blocks that nobody uses."""
        possible, before = min(count, self.num_evictable), set(self._kept)
        evicted = block_ids_of(self.cache, "evict", self.cache.evict(count))
        self._settle("evict", self.allocator.take_changes())
        released = sorted(before - self._kept.keys())
        if sorted(evicted) != released:
            raise complaint(
                self.cache, "evict", f"returned {evicted}, but released {released} of what it keeps"
            )
        if not possible <= len(evicted) <= count:
            raise complaint(
                self.cache,
                "evict",
                f"evicted {len(evicted)} blocks; {count} were wanted, and {possible} of those "
                "possible by num_evictable",
            )
        for block_id in evicted:
            if self.allocator.num_owners(block_id):
                raise complaint(
                    self.cache,
                    "evict",
                    f"returned block {block_id}, which a sequence uses: evict only what every one "
                    "that matched, joined or inserted it has left",
                )
        return evicted

    def _exchanged(self, returned: Any) -> list[tuple[int, int]]:
        wanted = "must return a list of (index, known block), or nothing"
        pairs = []
        for item in () if returned is None else items_of(self.cache, "insert", returned, wanted):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise complaint(self.cache, "insert", f"{wanted}; {item!r} is none")
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
        """Account for each change of a block's owners: `wanted`, or the cache keeps or drops it.

        Only what is `offered` may be kept, and only what is kept dropped.
        """
        for block_id in {*changes, *wanted}:
            found, asked = changes.get(block_id, 0), wanted.get(block_id, 0)
            if found == asked:
                continue
            if asked == 0 and found == 1 and block_id in offered and block_id not in self._kept:
                self._kept[block_id] = offered[block_id]
            elif asked == 0 and found == -1 and block_id in self._kept:
                del self._kept[block_id]
            else:
                raise complaint(
                    self.cache,
                    method,
                    f"changed the number of block {block_id}'s owners by {found}, not by {asked}: "
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
        found = self._kept.get(block_id)
        if found == wanted:
            return
        holds = "is not kept: it was never inserted, or is evicted"
        if found is not None:
            last = list(found[1][-self.block_size :])
            holds = f"holds the tokens {last} behind another beginning, or of another salt"
        raise complaint(
            self.cache,
            method,
            f"returned block {block_id} as number {index} of a sequence whose tokens there are "
            f"{list(wanted[1][-self.block_size :])}; that block {holds}",
        )

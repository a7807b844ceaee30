"""Answers to the exercises of chapter 23."""

import heapq
from itertools import count
from typing import Any

from minigen_course.ch23_prefix.lesson import PrefixTree
from tests.answers import Answers


def chain_cache(name: str) -> type:
    """A hash chain: a dict from all tokens so far to a block; right if `name` names no mistake."""

    class ChainCache:
        def __init__(self, allocator: Any, block_size: int):
            self.allocator, self.size = allocator, block_size
            self.blocks: dict[Any, int] = {}
            self.paths: dict[int, Any] = {}
            self.users: dict[int, int] = {}
            self.idle: dict[int, None] = {}

        @property
        def num_evictable(self) -> int:
            if name == "everything counts as evictable":
                return len(self.users)
            return len(self.idle)

        def match(self, token_ids: Any, salt: Any = None) -> list[int]:
            left = 0 if name == "leaves no token" else 1
            found = []
            for index in range(max(len(token_ids) - left, 0) // self.size):
                block = self.blocks.get(self._path(token_ids, index, salt))
                if block is None:
                    break
                found.append(block)
            if name == "leaves the last block out" and found:
                found.pop()
            if name != "match shares nothing":
                self.allocator.share(found)
            if name != "match counts no users":
                self._use(found)
            return found

        def insert(self, token_ids: Any, block_ids: Any, first: int, salt: Any = None) -> Any:
            exchanged = []
            for index in range(first, len(token_ids) // self.size):
                path, own = self._path(token_ids, index, salt), block_ids[index]
                known = self.blocks.get(path)
                if known is None or name == "the newer block wins":
                    self.blocks[path], self.paths[own] = own, path
                    self.users.setdefault(own, 0)
                    if name != "insert shares nothing":
                        self.allocator.share([own])
                    self._use([own])
                elif known != own:
                    self.allocator.share([known])
                    if name != "the own block is not released":
                        self.allocator.release([own])
                    exchanged.append((index, known))
                    self._use([known])
                else:
                    self._use([known])
                if name == "caches one block at a time":
                    break
            return [] if name == "returns no exchange" else exchanged

        def acquire(self, block_ids: Any) -> None:
            if name == "acquire shares too":
                self.allocator.share(block_ids)
            if name != "acquire counts nothing":
                self._use(block_ids)

        def release(self, block_ids: Any) -> None:
            in_order = block_ids if name == "first block released first" else reversed(block_ids)
            for block in list(in_order):
                self.users[block] -= 1
                if self.users[block] == 0 or name == "idle at the first release":
                    self.idle[block] = None
            if name == "release releases the owners":
                self.allocator.release(block_ids)

        def evict(self, count: int) -> list[int]:
            order = list(self.idle)
            if name == "evicts the newest first":
                order.reverse()
            gone = order[: count + 1 if name == "evicts one too many" else count]
            for block in gone:
                del self.idle[block]
                path = self.paths.pop(block)
                if name != "evicted blocks are still found":
                    del self.blocks[path]
            if name != "evict releases nothing":
                self.allocator.release(gone)
            return [] if name == "evict returns nothing" else gone

        def _use(self, block_ids: Any) -> None:
            for block in block_ids:
                self.users[block] = self.users.get(block, 0) + 1
                if name != "used blocks stay idle":
                    self.idle.pop(block, None)

        def _path(self, token_ids: Any, index: int, salt: Any) -> Any:
            begin = index * self.size if name == "looks at one block only" else 0
            tokens = tuple(token_ids[begin : (index + 1) * self.size])
            return tokens if name == "salts ignored" else (salt, tokens)

    return ChainCache


WRONG = [
    *("everything counts as evictable", "leaves no token"),
    *("leaves the last block out", "match shares nothing", "match counts no users"),
    *("the newer block wins", "insert shares nothing", "the own block is not released"),
    *("caches one block at a time", "returns no exchange", "acquire shares too"),
    *("acquire counts nothing", "first block released first", "idle at the first release"),
    *("release releases the owners", "evicts the newest first", "evicts one too many"),
    *("evicted blocks are still found", "evict releases nothing", "evict returns nothing"),
    *("used blocks stay idle", "looks at one block only", "salts ignored"),
]


class StampedTree:
    """Right: a tree of dicts; each block has the time of its last use."""

    def __init__(self, allocator: Any, block_size: int):
        self.allocator, self.size = allocator, block_size
        self.trees: dict[Any, dict[Any, Any]] = {}
        self.at: dict[int, tuple[dict[Any, Any], Any, dict[Any, Any]]] = {}
        self.users: dict[int, int] = {}
        self.stamps: dict[int, int] = {}
        self.clock = count()

    @property
    def num_evictable(self) -> int:
        return sum(users == 0 for users in self.users.values())

    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        tree, found = self.trees.get(salt, {}), []
        for key in self._keys(token_ids[: max(len(token_ids) - 1, 0)]):
            if key not in tree:
                break
            block, tree = tree[key]
            found.append(block)
        self.allocator.share(found)
        self.acquire(found)
        return found

    def insert(self, token_ids: Any, block_ids: Any, first: int, salt: Any = None) -> Any:
        tree, exchanged = self.trees.setdefault(salt, {}), []
        for index, key in enumerate(self._keys(token_ids)):
            if index < first:
                tree = tree[key][1]
                continue
            own = block_ids[index]
            if key not in tree:
                tree[key] = (own, {})
                self.at[own] = (tree, key, tree[key][1])
                self.users[own] = 0
                self.allocator.share([own])
            block, below = tree[key]
            if block != own:
                self.allocator.release([own])
                self.allocator.share([block])
                exchanged.append((index, block))
            self.acquire([block])
            tree = below
        return exchanged

    def acquire(self, block_ids: Any) -> None:
        for block in block_ids:
            self.users[block] += 1

    def release(self, block_ids: Any) -> None:
        for block in reversed(list(block_ids)):
            self.users[block] -= 1
            self.stamps[block] = next(self.clock)

    def evict(self, count: int) -> list[int]:
        gone: list[int] = []
        leaves = [
            (self.stamps[block], block)
            for block, (_, _, below) in self.at.items()
            if not self.users[block] and not below
        ]
        heapq.heapify(leaves)
        while leaves and len(gone) < count:
            _, block = heapq.heappop(leaves)
            tree, key, _ = self.at.pop(block)
            del tree[key], self.users[block], self.stamps[block]
            gone.append(block)
            for above, (_, _, below) in self.at.items():
                if below is tree and not tree and not self.users[above]:
                    heapq.heappush(leaves, (self.stamps[above], above))
        self.allocator.release(gone)
        return gone

    def _keys(self, token_ids: Any) -> list[Any]:
        whole = len(token_ids) // self.size
        return [tuple(token_ids[i * self.size : (i + 1) * self.size]) for i in range(whole)]


class OnATree(PrefixTree):
    """Right: eviction built on the first exercise, as a base class."""

    def __init__(self, allocator: Any, block_size: int):
        super().__init__(allocator, block_size)
        self.users: dict[int, int] = {}
        self.idle: dict[int, None] = {}
        self.above: dict[int, tuple[Any, Any]] = {}

    @property
    def num_evictable(self) -> int:
        return len(self.idle)

    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        found = super().match(token_ids, salt)
        self.acquire(found)
        return found

    def insert(self, token_ids: Any, block_ids: Any, first: int, salt: Any = None) -> Any:
        replaced = super().insert(token_ids, block_ids, first, salt)
        branch = self._roots[salt]
        for index, key in enumerate(self._keys(token_ids)):
            above, branch = branch, branch.children[key]
            self.above[branch.block_id] = above, key
            if index >= first:
                self.acquire([branch.block_id])
        return replaced

    def acquire(self, block_ids: Any) -> None:
        for block in block_ids:
            self.users[block] = self.users.get(block, 0) + 1
            self.idle.pop(block, None)

    def release(self, block_ids: Any) -> None:
        for block in reversed(list(block_ids)):
            self.users[block] -= 1
            if not self.users[block]:
                self.idle[block] = None

    def evict(self, count: int) -> list[int]:
        gone = list(self.idle)[:count]
        for block in gone:
            above, key = self.above.pop(block)
            del self.idle[block], above.children[key]
        self.allocator.release(gone)
        return gone


FINDING = {  # mistakes in finding and keeping blocks
    *("leaves no token", "leaves the last block out", "match shares nothing"),
    *("the newer block wins", "insert shares nothing", "the own block is not released"),
    *("caches one block at a time", "returns no exchange"),
    *("looks at one block only", "salts ignored"),
}

ANSWERS = {
    "PrefixTree": Answers(
        right=(chain_cache("nothing"), StampedTree),
        wrong={name: chain_cache(name) for name in WRONG if name in FINDING},
        equivalent={"1 -> 2": "a root's block id; it is never read"},
    ),
    "RadixPrefixCache": Answers(
        right=(chain_cache("nothing"), StampedTree, OnATree),
        wrong={name: chain_cache(name) for name in WRONG},
        equivalent={"1 -> 2 #4": "a root's block id; it is never read"},
    ),
}

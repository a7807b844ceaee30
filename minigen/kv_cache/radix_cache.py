"""Sharing the keys and values of equal beginnings, block by block.

A radix tree whose edges are whole blocks: a path from the root spells the tokens of a beginning,
and each node knows the block that holds the last of them. A new sequence walks down as far as its
own tokens go and takes those blocks instead of computing them. Blocks that no sequence uses any
more stay, until memory is short; then the least recently used go first. Sources: RadixAttention,
Zheng et al. 2023 (SGLang); automatic prefix caching at block granularity, vLLM.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.protocols import BlockAllocator

Key = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A full block of tokens behind its parent's; `num_users` sequences own it right now."""

    key: Key
    block_id: int
    parent: "Node | None"
    salt: str | None
    children: dict[Key, "Node"] = field(default_factory=dict)
    num_users: int = 0


class RadixPrefixCache:
    """Finds, keeps and evicts blocks of computed tokens; itself one owner of each that it keeps.

    Whoever uses a node uses all above it, so what nobody uses hangs together at the bottom; and
    since a sequence lets go of its last block first, `_unused` (least recent first) always has a
    node behind all of its children. So the first of it is a leaf, and evicting it is O(1).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self.roots: dict[str | None, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._unused: dict[Node, None] = {}

    @property
    def num_evictable(self) -> int:
        """Blocks that would become free if they were needed."""
        return len(self._unused)

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept, used or not."""
        return len(self._node_of)

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """The blocks of the longest known beginning of `token_ids`, each now with one owner more.

        At least one token is left over, since a step must compute something to have logits. Only
        sequences of the same `salt` share.
        """
        node, matched = self.roots.get(salt), []
        num_blocks = max(len(token_ids) - 1, 0) // self.block_size
        for index in range(num_blocks):
            node = node and node.children.get(self._key(token_ids, index))
            if node is None:
                break
            self._use(node)
            matched.append(node.block_id)
        self.allocator.share(matched)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Keep a sequence's full, computed blocks from index `first` on.

        `block_ids` are the sequence's own; `token_ids` fill them, and all before `first` are kept
        already. Where an equal block is known, the sequence takes that one instead, and its own is
        freed: returns these as (index, known block), already exchanged in the counts.
        """
        node = self._node_above(block_ids, first, salt)
        exchanged = []
        for index in range(first, len(token_ids) // self.block_size):
            key = self._key(token_ids, index)
            known = node.children.get(key)
            if known is None:
                known = Node(key, block_ids[index], node, salt)
                node.children[key] = known
                self._node_of[block_ids[index]] = known
                self.allocator.share([block_ids[index]])
            elif known.block_id != block_ids[index]:
                self.allocator.share([known.block_id])
                self.allocator.release([block_ids[index]])
                exchanged.append((index, known.block_id))
            self._use(known)
            node = known
        return exchanged

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Another sequence uses these blocks too, as a fork of one that does."""
        for block_id in block_ids:
            self._use(self._node_of[block_id])

    def release(self, block_ids: SequenceOf[int]) -> None:
        """A sequence is about to release these blocks of its own, given from first to last."""
        for block_id in reversed(block_ids):
            node = self._node_of.get(block_id)
            if node is not None:
                node.num_users -= 1
                if node.num_users == 0:
                    self._unused[node] = None

    def evict(self, count: int) -> list[int]:
        """Free up to `count` blocks that nobody uses, the least recently used first."""
        evicted = []
        for node in list(self._first_unused(count)):
            assert not node.children, "a node leaves after all of its children"
            del self._unused[node]
            del self._node_of[node.block_id]
            self._cut_off(node)
            evicted.append(node.block_id)
        self.allocator.release(evicted)
        return evicted

    def _cut_off(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root holds no block"
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self.roots[node.salt]

    def _first_unused(self, count: int) -> list[Node]:
        return [node for node, _ in zip(self._unused, range(count), strict=False)]

    def _use(self, node: Node) -> None:
        if node.num_users == 0:
            self._unused.pop(node, None)
        node.num_users += 1

    def _key(self, token_ids: SequenceOf[int], index: int) -> Key:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _node_above(self, block_ids: list[int], first: int, salt: str | None) -> Node:
        if first > 0:
            return self._node_of[block_ids[first - 1]]
        return self.roots.setdefault(salt, Node((), -1, None, salt))

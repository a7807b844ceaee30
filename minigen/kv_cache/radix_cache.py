"""Prefix caching: sequences share the keys and values of a common prefix, block by block.

The cache is a radix tree whose edges are whole blocks. A path from the root spells the tokens of a
prefix, and each node holds the block with the last of these tokens. A new sequence follows the path
of its own tokens as far as it exists, and uses those blocks instead of computing them. Blocks that
no sequence uses stay cached until memory runs out; then the least recently used are evicted first.
Sources: RadixAttention, Zheng et al. 2023 (SGLang); automatic prefix caching per block, vLLM.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.protocols import BlockAllocator

Key = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A full block of tokens that follows its parent's; `num_users` live sequences use it."""

    key: Key
    block_id: int
    parent: "Node | None"
    salt: str | None
    children: dict[Key, "Node"] = field(default_factory=dict)
    num_users: int = 0


class RadixPrefixCache:
    """A prefix cache as a radix tree; the cache is one owner of each block that it stores.

    A sequence that uses a node uses all nodes above it, so the unused nodes are at the bottom of
    the tree. A sequence releases its last block first, so in the order in which nodes fell out of
    use, a node always comes after all of its children. Therefore the first of the unused nodes is
    a leaf, and evicting it is O(1).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self.roots: dict[str | None, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._unused: dict[Node, None] = {}

    @property
    def num_evictable(self) -> int:
        """The number of cached blocks that no sequence uses."""
        return len(self._unused)

    @property
    def num_blocks(self) -> int:
        """The number of cached blocks, used or not."""
        return len(self._node_of)

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix of `token_ids`, each with one more owner.

        At least one token is left without a block, because a step must compute a token to have
        logits. Only sequences with the same `salt` share blocks.
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
        """Store a sequence's full, computed blocks, from index `first` of its block table on.

        `block_ids` is the block table, and `token_ids` are the tokens in its full blocks. The
        blocks before `first` are cached already. If an equal block is cached, the sequence uses
        that one, and its own block is released. Returns a pair (index, cached block) for each of
        these; their reference counts are already updated.
        """
        node = self._node_above(block_ids, first, salt)
        replaced = []
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
                replaced.append((index, known.block_id))
            self._use(known)
            node = known
        return replaced

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Count one more user of these blocks: the fork of a sequence that uses them."""
        for block_id in block_ids:
            self._use(self._node_of[block_id])

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Count one user less of these blocks, given in order, before the caller releases them."""
        for block_id in reversed(block_ids):
            node = self._node_of.get(block_id)
            if node is not None:
                node.num_users -= 1
                if node.num_users == 0:
                    self._unused[node] = None

    def evict(self, count: int) -> list[int]:
        """Free up to `count` unused blocks, the least recently used first; return them."""
        evicted = []
        for node in list(self._first_unused(count)):
            assert not node.children, "a node is evicted after all of its children"
            del self._unused[node]
            del self._node_of[node.block_id]
            self._unlink(node)
            evicted.append(node.block_id)
        self.allocator.release(evicted)
        return evicted

    def _unlink(self, node: Node) -> None:
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

"""Exercise RadixPrefixCache of chapter 23 (stretch, 15 points, about 60 minutes).

Add eviction. `match` and `insert` do what those of `PrefixTree` do, and each also counts one
more user of every block that it returns, stores or finds stored. `acquire` counts one more user
of some blocks, and `release` one less; neither changes owners, because the engine shares and
releases these blocks itself. `num_evictable` is the number of kept blocks without users.
`evict` frees up to `count` of them, the least recently used first, and of one sequence the last
block first: it releases them and returns them. You do not need `num_blocks`. You may start from
your `PrefixTree`, as a base class or by copying it.

Check it:     minigen check exercises/23_prefix/radix_prefix_cache.py
With a hint:  minigen check exercises/23_prefix/radix_prefix_cache.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    llm = LLM.load(prefix_cache=mine)
    rules = "You are a librarian. Answer in one short sentence, and be kind to everyone who asks. "
    with llm.count_work() as work:
        for question in ("Where are the maps?", "Where are the poems?"):
            answer = llm.generate(rules + question, SamplingParams(temperature=0, max_tokens=12))
    print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")

Harder: Every request starts with the same system prompt, which ends in the middle of a block.
How many of its tokens does each request compute again? Share the equal part of that block by
copying it (copy-on-write), and count the tokens that this saves.
"""

# exercise: minigen.kv_cache.radix_cache.RadixPrefixCache
from collections.abc import Sequence as SequenceOf

from minigen.protocols import BlockAllocator


class RadixPrefixCache:
    """A prefix cache as a radix tree; the cache is one owner of each block that it stores.

    A sequence that uses a node uses all nodes above it, so the unused nodes are at the bottom of
    the tree. A sequence releases its last block first, so in the order in which nodes fell out of
    use, a node always comes after all of its children. Therefore the first of the unused nodes is
    a leaf, and evicting it is O(1).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        raise NotImplementedError  # your turn

    @property
    def num_evictable(self) -> int:
        """The number of cached blocks that no sequence uses."""
        raise NotImplementedError  # your turn

    @property
    def num_blocks(self) -> int:
        """The number of cached blocks, used or not."""
        raise NotImplementedError  # your turn

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix of `token_ids`, each with one more owner.

        At least one token is left without a block, because a step must compute a token to have
        logits. Only sequences with the same `salt` share blocks.
        """
        raise NotImplementedError  # your turn

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
        raise NotImplementedError  # your turn

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Count one more user of these blocks: the fork of a sequence that uses them."""
        raise NotImplementedError  # your turn

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Count one user less of these blocks, given in order, before the caller releases them."""
        raise NotImplementedError  # your turn

    def evict(self, count: int) -> list[int]:
        """Free up to `count` unused blocks, the least recently used first; return them."""
        raise NotImplementedError  # your turn

"""Exercise PrefixTree of chapter 23 (core, 10 points, about 25 minutes).

Write the half of a prefix cache that finds and keeps blocks of `block_size` tokens, over an
`allocator` that counts the owners of each block. `match` returns the blocks of the longest kept
prefix, leaves at least one token without a block, and shares each block that it returns.
`insert` keeps full blocks: it shares each one that it keeps, so the cache is one more owner of
it. If a block with the same tokens after the same prefix is kept already, `insert` shares that
one for the sequence, releases the sequence's own, and returns the pair (index, kept block).
Different salts share nothing. Nothing is ever evicted. A tree or a chain of hashes are both
fine.

Check it:     minigen check exercises/23_prefix/prefix_tree.py
With a hint:  minigen check exercises/23_prefix/prefix_tree.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams
    from minigen_course.ch23_prefix.lesson import WithoutEviction

    llm = LLM.load(prefix_cache=lambda allocator, size: WithoutEviction(mine(allocator, size)))
    rules = "You are a librarian. Answer in one short sentence, and be kind to everyone who asks. "
    with llm.count_work() as work:
        for question in ("Where are the maps?", "Where are the poems?"):
            answer = llm.generate(rules + question, SamplingParams(temperature=0, max_tokens=12))
    print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")

Harder: A radix tree keeps a chain of single children as one node, and splits the node when a
text parts from it inside. Write match and insert with such nodes. How many nodes do the
chapter's 300 prompts need, and how many blocks?
"""

# exercise: minigen_course.ch23_prefix.lesson.PrefixTree
from collections.abc import Sequence as SequenceOf

from minigen.protocols import BlockAllocator


class PrefixTree:
    """A prefix cache that finds and keeps blocks, and never evicts one.

    It is one owner of each block that it keeps.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        raise NotImplementedError  # your turn

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest kept prefix of `token_ids`, each with one more owner.

        At least one token is left without a block. Only sequences with the same `salt` share.
        """
        raise NotImplementedError  # your turn

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Keep a sequence's full, computed blocks, from index `first` of its block table on.

        `block_ids` is the block table, and `token_ids` are the tokens in its full blocks. The
        blocks before `first` are kept already. If an equal block is kept, the sequence gets one
        more share of that one, and its own block is released. Returns a pair (index, kept block)
        for each of these.
        """
        raise NotImplementedError  # your turn

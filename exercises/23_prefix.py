# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 23
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/23_prefix.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/23_prefix.ipynb)
#
# The chapter: [Sharing prefixes](../notebooks/23_prefix.ipynb). Its exercises take about 110 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `PrefixTree` | core | 10 | 25 min |
# | `RadixPrefixCache` | stretch | 15 | 60 min |
# | bug hunt: `full_hit` | core | 10 | 25 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using

# %% [markdown]
# ## PrefixTree
#
# *Core, 10 points, about 25 minutes.*
#
# Write the half of a prefix cache that finds and keeps blocks of `block_size` tokens, over an `allocator` that counts the owners of each block. `match` returns the blocks of the longest kept prefix, leaves at least one token without a block, and shares each block that it returns. `insert` keeps full blocks: it shares each one that it keeps, so the cache is one more owner of it. If a block with the same tokens after the same prefix is kept already, `insert` shares that one for the sequence, releases the sequence's own, and returns the pair (index, kept block). Different salts share nothing. Nothing is ever evicted. A tree or a chain of hashes are both fine.

# %%
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


# %%
mine = check(23, PrefixTree=PrefixTree)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams
from minigen_course.ch23_prefix.lesson import WithoutEviction

llm = LLM.load(prefix_cache=lambda allocator, size: WithoutEviction(mine(allocator, size)))
rules = "You are a librarian. Answer in one short sentence, and be kind to everyone who asks. "
with llm.count_work() as work:
    for question in ("Where are the maps?", "Where are the poems?"):
        answer = llm.generate(rules + question, SamplingParams(temperature=0, max_tokens=12))
print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")

# %% [markdown]
# **Harder.** A radix tree keeps a chain of single children as one node, and splits the node when a text parts from it inside. Write match and insert with such nodes. How many nodes do the chapter's 300 prompts need, and how many blocks?

# %% [markdown]
# ## RadixPrefixCache
#
# *Stretch, 15 points, about 60 minutes.*
#
# Add eviction. `match` and `insert` do what those of `PrefixTree` do, and each also counts one more user of every block that it returns, stores or finds stored. `acquire` counts one more user of some blocks, and `release` one less; neither changes owners, because the engine shares and releases these blocks itself. `num_evictable` is the number of kept blocks without users. `evict` frees up to `count` of them, the least recently used first, and of one sequence the last block first: it releases them and returns them. You do not need `num_blocks`. You may start from your `PrefixTree`, as a base class or by copying it.

# %%
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


# %%
mine = check(23, RadixPrefixCache=RadixPrefixCache)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(prefix_cache=mine)
rules = "You are a librarian. Answer in one short sentence, and be kind to everyone who asks. "
with llm.count_work() as work:
    for question in ("Where are the maps?", "Where are the poems?"):
        answer = llm.generate(rules + question, SamplingParams(temperature=0, max_tokens=12))
print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")

# %% [markdown]
# **Harder.** Every request starts with the same system prompt, which ends in the middle of a block. How many of its tokens does each request compute again? Share the equal part of that block by copying it (copy-on-write), and count the tokens that this saves.

# %% [markdown]
# ## A bug hunt: full_hit
#
# *Core, 10 points, about 25 minutes.*
#
# **The report.** *The server ran for weeks. Then a monitor was set up that sends the same question every minute, and the second request crashes the server. But this happens only with some questions: with one word more, everything works.* nano-vllm crashed on prompts of exactly one block (issue 114): all tokens were cached, and the model ran on no token. InfiniLM fixed the same bug (pull request 381), and names SGLang's rule for it; vLLM computes the whole last block again (pull request 11186).
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch23_prefix.hunt
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.protocols import BlockAllocator as Allocator
from minigen_course.ch23_prefix.hunt import Name


class ChainedPrefixCache:
    """A prefix cache without a tree: a block's name is its salt and all tokens up to its end."""

    def __init__(self, allocator: Allocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self.block_of: dict[Name, int] = {}
        self.name_of: dict[int, Name] = {}
        self.num_users: dict[int, int] = {}
        self.unused: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self.unused)

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        matched: list[int] = []
        for end in self.ends(token_ids):
            name = (salt, tuple(token_ids[:end]))
            if name not in self.block_of:
                break
            matched.append(self.block_of[name])
        self.allocator.share(matched)
        self.acquire(matched)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        exchanged = []
        for index, end in list(enumerate(self.ends(token_ids)))[first:]:
            name, own = (salt, tuple(token_ids[:end])), block_ids[index]
            if name not in self.block_of:
                self.block_of[name], self.name_of[own] = own, name
                self.num_users[own] = 0
                self.allocator.share([own])
            elif self.block_of[name] != own:
                self.allocator.share([self.block_of[name]])
                self.allocator.release([own])
                exchanged.append((index, self.block_of[name]))
            self.acquire([self.block_of[name]])
        return exchanged

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        for block_id in block_ids:
            self.unused.pop(block_id, None)
            self.num_users[block_id] += 1

    def release(self, block_ids: SequenceOf[int]) -> None:
        for block_id in reversed(block_ids):
            self.num_users[block_id] -= 1
            if self.num_users[block_id] == 0:
                self.unused[block_id] = None

    def evict(self, count: int) -> list[int]:
        evicted = list(self.unused)[:count]
        for block_id in evicted:
            del self.block_of[self.name_of.pop(block_id)]
            del self.unused[block_id], self.num_users[block_id]
        self.allocator.release(evicted)
        return evicted

    def ends(self, token_ids: SequenceOf[int]) -> range:
        """Return the positions where the full blocks of a text end."""
        return range(self.block_size, len(token_ids) + 1, self.block_size)


def test_prefix_cache(PrefixCache: Any) -> None:
    """Assert what every correct prefix cache does, and the one above does not.

    Create it as PrefixCache(BlockAllocator(num_blocks), block_size).
    """
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(23, test=test_prefix_cache, mended=ChainedPrefixCache)

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
# # Exercises of chapter 21
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/21_blocks.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/21_blocks.ipynb)
#
# The chapter: [Memory in blocks](../notebooks/21_blocks.ipynb). Its exercises take about 50 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `sequences_that_fit` | warm-up | 5 | 5 min |
# | `BlockAllocator` | core | 10 | 20 min |
# | `copy_on_write` | warm-up | 5 | 10 min |
# | `choose_adjacent` | stretch | 15 | 15 min |
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
# ## sequences_that_fit
#
# *Warm-up, 5 points, about 5 minutes.*
#
# Write the capacity of a memory: how many sequences of `num_tokens` tokens each fit beside the weights. The memory that the weights leave is cut into whole blocks of `block_size` tokens, and a sequence takes whole blocks. If the weights do not fit, no sequence does: return 0.

# %%
# exercise: minigen_course.ch21_blocks.lesson.sequences_that_fit
def sequences_that_fit(
    memory_bytes: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_tokens: int,
    block_size: int,
) -> int:
    """Return how many sequences of `num_tokens` tokens fit into a memory beside the weights.

    What the weights leave is cut into whole blocks of `block_size` tokens, and each sequence takes
    whole blocks. If the weights do not fit, no sequence does.

    >>> sequences_that_fit(1000, 200, kv_bytes_per_token=2, num_tokens=17, block_size=16)
    12
    """
    raise NotImplementedError  # your turn


# %%
mine = check(21, sequences_that_fit=sequences_that_fit)

# %% [markdown]
# Try it:

# %%
print(mine(80 * 10**9, 16 * 10**9, 131_072, 2048, 16), "sequences of 2,048 tokens")

# %% [markdown]
# **Harder.** All sequences begin with the same prompt of P tokens, and they keep one copy of its full blocks, as the chapter's section on several owners shows. How many fit now?

# %% [markdown]
# ## BlockAllocator
#
# *Core, 10 points, about 20 minutes.*
#
# Write the block allocator. Its blocks are 1 to `num_blocks`; block 0 is never allocated. `allocate` returns `count` blocks with one owner each, or raises `OutOfBlocksError` (of `minigen.errors`) and changes nothing. `share` adds an owner to each block. `release` takes an owner from each block, and returns the blocks that are now free. Sharing or releasing a free block raises an error of any kind. No method searches all blocks: the work for one block must not grow with the number of blocks.

# %%
# exercise: minigen.kv_cache.block_allocator.BlockAllocator
from collections.abc import Iterable


class BlockAllocator:
    """Allocates block ids 1 to `num_blocks`; a block is free again when its last owner releases it.

    O(1) per block: an array of reference counts, and a free list used as a stack, so that recently
    used blocks, which may still be in the CPU's caches, are allocated first.
    """

    def __init__(self, num_blocks: int):
        raise NotImplementedError  # your turn

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""
        raise NotImplementedError  # your turn

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one owner now.

        Raises `OutOfBlocksError`, and allocates nothing, if fewer are free.
        """
        raise NotImplementedError  # your turn

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block."""
        raise NotImplementedError  # your turn

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one owner from each block; return the blocks that are free now."""
        raise NotImplementedError  # your turn

    def num_owners(self, block_id: int) -> int:
        """Return the block's number of owners; 0 if it is free."""
        raise NotImplementedError  # your turn


# %%
mine = check(21, BlockAllocator=BlockAllocator)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64, allocator=mine)
print("allocator:", llm.describe()["allocator"])
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# **Harder.** Allocate adjacent blocks where you can, so that a sequence's blocks lie in long runs. The exercise `choose_adjacent` asks for it, and the chapter's notebook then counts the runs.

# %% [markdown]
# ## copy_on_write
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write copy-on-write: what happens before a sequence writes into block `index` of its table. If the sequence is the only owner, nothing changes; return None. If the block has other owners, a new block replaces it in the table; return (source, target), so that the engine copies the contents. If no block is free, raise `OutOfBlocksError` and change nothing.

# %%
# exercise: minigen.kv_cache.block_allocator.copy_on_write
from minigen.protocols import BlockAllocator as Allocator


def copy_on_write(allocator: Allocator, table: list[int], index: int) -> tuple[int, int] | None:
    """Make the block at `index` of a sequence's block table writable: owned by that sequence only.

    If the block has other owners, a new block takes its place in the table, and the old block loses
    one owner. Returns the pair (source, target), so that the caller can copy the contents; None if
    the sequence was the only owner. Raises `OutOfBlocksError`, and changes nothing, if no block is
    free.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(21, copy_on_write=copy_on_write)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64)
with using(21, copy_on_write=mine):
    params = SamplingParams(n=3, seed=1, max_tokens=12)
    answer = llm.generate("The sea is", params, progress=False)
for choice in answer.choices:
    print(choice.text)

# %% [markdown]
# **Harder.** A sequence whose last block is full is forked. How many copies are made, and when? The chapter's notebook compares your prediction with the engine's count.

# %% [markdown]
# ## choose_adjacent
#
# *Stretch, 15 points, about 15 minutes.*
#
# Choose `count` of the free blocks so that they lie in long runs, and return them in increasing order. If a run of adjacent free blocks is long enough, take all from the beginning of one run: the shortest that is long enough (best fit), and of equally short ones the first. Otherwise take whole runs, the longest first (of equally long ones the first), and of the last run its beginning. `free` may be in any order, and must stay as it is; `count` is at most its length.

# %%
# exercise: minigen_course.ch21_blocks.lesson.choose_adjacent
from collections.abc import Sequence


def choose_adjacent(free: Sequence[int], count: int) -> list[int]:
    """Return `count` of the free blocks, in increasing order, adjacent ones if possible.

    If a run of adjacent free blocks is long enough, all come from the beginning of one run: the
    shortest such run, and of equally short ones the first. Otherwise whole runs are taken, the
    longest first (of equally long ones the first), and of the last run its beginning.

    >>> choose_adjacent([9, 2, 3, 4, 7, 8, 12], 2), choose_adjacent([9, 2, 3, 4, 7, 8, 12], 4)
    ([2, 3], [2, 3, 4, 7])
    """
    raise NotImplementedError  # your turn


# %%
mine = check(21, choose_adjacent=choose_adjacent)

# %% [markdown]
# Try it:

# %%
print(mine([9, 2, 3, 4, 7, 8, 12], 2), "should be [2, 3]")

# %% [markdown]
# **Harder.** A running sequence asks for one block at a time, and its next neighbour is often taken. Reserve a few blocks behind each sequence for its own growth, as long as memory is plentiful. How many runs are left, and what does it cost?

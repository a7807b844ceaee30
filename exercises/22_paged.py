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
# # Exercises of chapter 22
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/22_paged.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/22_paged.ipynb)
#
# The chapter: [Paged attention](../notebooks/22_paged.ipynb). Its exercises take about 75 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `slots_of` | warm-up | 5 | 5 min |
# | `decode_slots` | stretch | 15 | 10 min |
# | `KVPool` | core | 10 | 20 min |
# | `attend_by_block` | stretch | 15 | 20 min |
# | bug hunt: `slots` | core | 10 | 20 min |
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
# ## slots_of
#
# *Warm-up, 5 points, about 5 minutes.*
#
# Write the slot mapping: for each position of a sequence, return the slot that holds its key and value. `block_ids` is the sequence's block table.

# %%
# exercise: minigen.kv_cache.paged.slots_of
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


def slots_of(block_ids: SequenceOf[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Return the slots of the tokens at these positions of a sequence.

    `block_ids` is the sequence's block table; its first block holds position 0.

    >>> slots_of([7, 3], range(2, 6), block_size=4)
    [30, 31, 12, 13]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(22, slots_of=slots_of)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64)
with using(22, slots_of=mine):
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# **Harder.** In every decode step the engine calls it for each sequence, with one position. The exercise `decode_slots` asks for a whole batch of decodes at once.

# %% [markdown]
# ## decode_slots
#
# *Stretch, 15 points, about 10 minutes.*
#
# Write the slot mapping for a whole batch of decodes: `block_tables` has a row per sequence, padded with 0 at its end, and `context_lens` the sequences' lengths, the new token included. Return an array with the slot of each sequence's last token, with NumPy and without a loop: the instructions of Python that run must not grow with the number of sequences. Leave the arguments unchanged. A batch may have no sequences.

# %%
# exercise: minigen_course.ch22_paged.lesson.decode_slots
import numpy as np
from jaxtyping import Int64


def decode_slots(
    block_tables: Int64[np.ndarray, "sequences max_blocks"],
    context_lens: Int64[np.ndarray, " sequences"],
    block_size: int,
) -> Int64[np.ndarray, " sequences"]:
    """Return the slot of each sequence's last token, of all sequences at once.

    `context_lens` counts the last token. Rows of `block_tables` are padded with 0 at their ends.

    >>> decode_slots(np.array([[7, 3], [5, 0]]), np.array([6, 4]), block_size=4).tolist()
    [13, 23]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(22, decode_slots=decode_slots)

# %% [markdown]
# Try it:

# %%
import numpy as np

print(mine(np.array([[7, 3], [5, 0]]), np.array([6, 4]), 4).tolist(), "should be [13, 23]")

# %% [markdown]
# **Harder.** Prompts come in chunks, so a batch holds sequences with one new token and others with hundreds. Write it for those as well, with np.repeat and without a loop. From what number of sequences on is it faster than a loop?

# %% [markdown]
# ## KVPool
#
# *Core, 10 points, about 20 minutes.*
#
# Write the KV pool. `store` writes each token's key and value into its slot. `gather` returns the keys and values of the blocks in a block table, in the order of the table, as if they were contiguous. The table is one row, or a row per sequence (as `decode` in `minigen.kv_cache.paged.attend_paged` passes it), and so are the results. `copy_blocks` copies whole blocks, in all layers. The pool also has block 0, for padding.

# %%
# exercise: minigen.kv_cache.paged.KVPool
from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class KVPool:
    """The memory of all blocks, including block 0."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        slots: Int64[Tensor, " tokens"],
    ) -> None:
        """Write each token's key and value of one layer to its slot."""
        raise NotImplementedError  # your turn

    def gather(
        self, layer_id: int, block_table: Int64[Tensor, "*rows blocks"]
    ) -> tuple[
        Float[Tensor, "*rows slots kv_heads head_dim"],
        Float[Tensor, "*rows slots kv_heads head_dim"],
    ]:
        """Return copies of the keys and values in these blocks, contiguous and in table order."""
        raise NotImplementedError  # your turn

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""
        raise NotImplementedError  # your turn


# %%
mine = check(22, KVPool=KVPool)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

with using(22, KVPool=mine):  # the runner that works layer by layer stores keys and values in it
    llm = LLM.load(weights="float32", num_blocks=64)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# **Harder.** Attention over a gathered copy reads every key, writes it and reads it again. The exercise `attend_by_block` goes through the table block by block, without a copy of the whole.

# %% [markdown]
# ## attend_by_block
#
# *Stretch, 15 points, about 20 minutes.*
#
# Write the attention of one query over the first `num_tokens` tokens of a sequence, block by block: call `pool.gather(layer_id, ...)` with one block at a time, and only with blocks that hold some of these tokens. Query head h uses KV head h // (q_heads / kv_heads), and scores are divided by the root of head_dim, as in chapter 14. The result must be right for large scores too: softmax subtracts the largest score, which you do not know before the last block.

# %%
# exercise: minigen_course.ch22_paged.lesson.attend_by_block
from jaxtyping import Float
from torch import Tensor

from minigen.kv_cache.paged import KVPool as Pool


def attend_by_block(
    q: Float[Tensor, "q_heads head_dim"],
    pool: Pool,
    layer_id: int,
    block_ids: list[int],
    num_tokens: int,
) -> Float[Tensor, "q_heads head_dim"]:
    """Return the attention of one query over the first `num_tokens` tokens of a block table.

    The blocks are read one after another; no tensor holds the keys or values of two blocks.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(22, attend_by_block=attend_by_block)

# %% [markdown]
# Try it:

# %%
import torch
from minigen.kv_cache.paged import KVPool

pool = KVPool(1, 8, 3, 16, 64, torch.float32)
print(mine(torch.randn(9, 64), pool, 0, [7, 3], 20).abs().max(), "should be 0: the pool is empty")

# %% [markdown]
# **Harder.** The blocks may be visited in any order, so two workers can share them, as chapter 33 does. Write a function that merges what two halves of the table found, from the three values that each carries: the largest score, the sum of the exponentials, and the sum of the values under them.

# %% [markdown]
# ## A bug hunt: slots
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *Answers start well and become wrong after a while; how soon depends on the length of the prompt. In a batch with other requests, even answers that were correct alone become wrong. Prompts are read correctly, and no error is raised.* MinivLLM computed the slot of a decode step from the number of tokens in the last block, as `next_slots` does here (its issue 76). ONNX Runtime GenAI once wrote every decoded token one slot too far, and read a slot that was never written (pull request 2354).
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch22_paged.hunt
from minigen_course.lab.toy_engine import SlotsOf


def next_slots(block_ids: list[int], num_computed: int, num_new: int, block_size: int) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` tokens.

    A slot is `block_id * block_size + offset`. `block_ids` has blocks for all of these tokens.
    """
    num_tokens = num_computed + num_new
    if num_new == 1:  # a decode step: the last used slot of the last block
        num_in_last_block = num_tokens % block_size
        last_block = block_ids[(num_tokens - 1) // block_size]
        return [last_block * block_size + num_in_last_block - 1]
    slots = []
    for position in range(num_computed, num_tokens):
        block, offset = divmod(position, block_size)
        slots.append(block_ids[block] * block_size + offset)
    return slots


def test_slots(next_slots: SlotsOf) -> None:
    """Assert what every correct `next_slots` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(22, test=test_slots, mended=next_slots)

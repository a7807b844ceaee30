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
# # Exercises of chapter 33
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/33_paged_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/33_paged_attention.ipynb)
#
# The chapter: [Paged attention on a GPU](../notebooks/33_paged_attention.ipynb). Its exercises take about 110 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `gather_kernel` | warm-up | 5 | 10 min |
# | `grouped_kernel` | core | 10 | 20 min |
# | `tiled_kernel` | core | 10 | 30 min |
# | `join_kernel` | core | 10 | 15 min |
# | `decode_kernel` | stretch | 15 | 35 min |
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
# ## gather_kernel
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write a kernel that gathers a sequence's keys (or values) through its block table. Each program has a tile of `BLOCK_N` positions: it finds their slots, loads their rows, and stores the rows one after another. Load each element of the sequence once, and no other elements. Write a plain function: the launch adds `@triton.jit`.

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.gather_kernel
from minigen_course.lab.triton_interpreter import tl


def gather_kernel(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy the row of each of `BLOCK_N` positions from its slot: one program per tile of positions.

    `half_ptr` points to a layer's keys, or to its values. The row of a slot has `WIDTH` elements
    (`BLOCK_W` is the next power of two); the row of slot s in block b starts at `half_ptr` + b *
    `block_stride` + s * `slot_stride`. `table_ptr` lists the blocks of the sequence, whose first
    `length` slots are in use. The row of position p is stored to row p of `gathered_ptr`, which is
    contiguous. Each element of these rows is loaded once, and no other element is loaded.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, gather_kernel=gather_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch33_paged_attention.kernels import gathering

llm = load_model(weights="float32", num_blocks=2, attention_backend=gathering(mine))
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** If BLOCK_N equals BLOCK_SIZE, a program needs only one entry of the table, instead of one per position. How many bytes does that save, and when are small blocks a bad idea?

# %% [markdown]
# ## grouped_kernel
#
# *Core, 10 points, about 20 minutes.*
#
# Write attention for one query position over a contiguous context. Each program has one KV head, with the whole group of query heads that share it. It loads each key and each value once, computes the scores and the mix of all its heads by `tl.dot`, and stores their results. The context fits into one tile.

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.grouped_kernel
from minigen_course.lab.triton_interpreter import tl


def grouped_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend with a whole group of query heads: one program per KV head (`tl.program_id(0)`).

    `q_ptr` and `mixed_ptr` are [q_heads, `HEAD_DIM`]; `keys_ptr` and `values_ptr` are [`length`,
    `KV_HEADS`, `HEAD_DIM`]; all are contiguous. Query head h uses KV head h // `GROUP`. A score is
    the dot product of query and key times `scale`. `scale` includes log2(e), so weights are powers
    of two. `BLOCK_G`, `BLOCK_D` and `BLOCK_N` are powers of two, at least 16, that hold `GROUP`,
    `HEAD_DIM` and `length`: the whole context is one tile. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, grouped_kernel=grouped_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch33_paged_attention.rungs import grouping

llm = load_model(weights="float32", num_blocks=2, attention_backend=grouping(mine))
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** For one KV head of head_dim 128 and a group of 4, count the multiplications that the padding to 16 rows adds. At which size of group does nothing of them remain, and why are they free on a GPU even before?

# %% [markdown]
# ## tiled_kernel
#
# *Core, 10 points, about 30 minutes.*
#
# Write the grouped kernel for many sequences at once, in place. Each program has one KV head of one sequence. It walks over the context in tiles of `BLOCK_N` tokens: it looks the blocks of the tile up in the block table, loads keys and values where they are, and keeps maximum, total and mixed as chapter 32 does. At the end it divides and stores. No key or value is loaded twice.

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.tiled_kernel
from minigen_course.lab.triton_interpreter import tl


def tiled_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    mixed_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend in place, tile by tile: one program per KV head and sequence (`program_id` 0 and 1).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` and `mixed_ptr` are [sequences, q_heads, `HEAD_DIM`]. Query head h uses
    KV head h // `GROUP`. A program loads tiles of `BLOCK_N` tokens, one after another. `scale`
    includes log2(e), so weights are powers of two. `BLOCK_G` and `BLOCK_D` are powers of two, at
    least 16, that hold `GROUP` and `HEAD_DIM`. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, tiled_kernel=tiled_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch33_paged_attention.rungs import tiling

llm = load_model(weights="float32", num_blocks=2, attention_backend=tiling(mine))
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** A tile may be smaller or larger than a block. What changes in the number of loads if BLOCK_N equals BLOCK_SIZE, and if BLOCK_SIZE is 1? Which of the two suits a GPU better, whose memory answers with 32 neighbouring bytes at a time?

# %% [markdown]
# ## join_kernel
#
# *Core, 10 points, about 15 minutes.*
#
# Write the second pass, which joins the splits. Each program has one row, that is, one query head of one sequence. It loads the partial results of the row's splits, rescales them to one maximum, adds them up, divides, and stores the row's attention. A split without tokens has the maximum -inf.

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.join_kernel
from minigen_course.lab.triton_interpreter import tl


def join_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one row: one program per row, that is, per query head of a sequence.

    Split s of row r has the largest score `maxima_ptr`[r, s]; weights are powers of two.
    `sums_ptr`[r, s] is the sum of its weights 2^(score - maximum), and `parts_ptr`[r, s]
    (`HEAD_DIM` elements) the sum of the values times these weights. A split without tokens has the
    maximum -inf, and zeros. The row's attention over all splits is stored to `mixed_ptr`[r].
    `BLOCK_S` and `BLOCK_D` are the next powers of two of `SPLITS` and `HEAD_DIM`. All tensors are
    contiguous. Each element is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, join_kernel=join_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch33_paged_attention.kernels import joining

llm = load_model(weights="float32", num_blocks=2, attention_backend=joining(mine))
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** The parts are float32, and each row has SPLITS of them. Let the first pass divide each part by its sum, and store it in 16 bits. What else must it store, and how does the join change?

# %% [markdown]
# ## decode_kernel
#
# *Stretch, 15 points, about 35 minutes.*
#
# Write the tiled kernel once more, with the context split. Each program has one KV head of one sequence, and one split of its context. For each query head of the group it stores its maximum, its sum of weights and its weighted sum of values, undivided, which `join_kernel` joins. No key or value is loaded twice.

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.decode_kernel
from minigen_course.lab.triton_interpreter import tl


def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head, sequence and split of its context (`tl.program_id` 0, 1 and 2).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` is [sequences, q_heads, `HEAD_DIM`]. Query head h uses KV head h //
    `GROUP`; the `GROUP` query heads of a KV head share its loads.

    A score is the dot product of query and key times `scale`. `scale` includes log2(e), so weights
    are powers of two. The `SPLITS` programs divide the context's tiles of `BLOCK_N` tokens; each
    tile is loaded by one of them. They store what `join_kernel` joins: `parts_ptr` [sequences,
    q_heads, `SPLITS`, `HEAD_DIM`], `maxima_ptr` and `sums_ptr` [sequences, q_heads, `SPLITS`]; -inf
    and zeros if a program has no tokens. `BLOCK_G` and `BLOCK_D` are powers of two, at least 16,
    that hold `GROUP` and `HEAD_DIM`.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, decode_kernel=decode_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch33_paged_attention.kernels import decoding

llm = load_model(weights="float32", num_blocks=2, attention_backend=decoding(mine))
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** A layer with a sliding window attends to the last `window` tokens only. Take `window` as an argument: where do the splits start then, and which tiles must not be loaded at all?

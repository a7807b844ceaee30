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
# # Exercises of chapter 32
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/32_flash_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/32_flash_attention.ipynb)
#
# The chapter: [FlashAttention](../notebooks/32_flash_attention.ipynb). Its exercises take about 110 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `merge` | warm-up | 5 | 15 min |
# | `flash_attention` | core | 10 | 25 min |
# | `unmasked_kernel` | core | 10 | 30 min |
# | `flash_kernel` | stretch | 15 | 40 min |
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
# ## merge
#
# *Warm-up, 5 points, about 15 minutes.*
#
# Write `merge`. It combines the partial results of two sets of keys into one, as if all keys had been in one set. A part has, for each query, its maximum score (`maximum`), the sum of its weights (`total`) and its weighted sum of values (`mixed`). A part in which a query saw no key adds nothing.

# %%
# exercise: minigen_course.ch32_flash_attention.flash.merge
from minigen_course.ch32_flash_attention.flash import Partial


def merge(one: Partial, other: Partial) -> Partial:
    """Combine two partial results over different keys into one; no key may be in both.

    >>> one = Partial(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[4.0]]))
    >>> other = Partial(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[5.0]]))
    >>> both = merge(one, other)
    >>> (both.mixed / both.total.unsqueeze(-1)).tolist()
    [[3.0]]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(32, merge=merge)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course.ch32_flash_attention.flash import flash_attention
from minigen_course import load_model
from minigen_course.grading.plug_in import attend_by

llm = load_model(weights="float32", attention_backend=attend_by(flash_attention))
with using(32, merge=mine):  # flash_attention calls it once per tile
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Chapter 33 cuts a long context into parts that are computed in parallel, and merges them all at once. Write merge for a list of parts, with one exp for each part.

# %% [markdown]
# ## flash_attention
#
# *Core, 10 points, about 25 minutes.*
#
# Write attention as a loop over tiles. Take `tile` queries at a time, and for them take `tile` keys at a time, from the first key that one of these queries sees to the position of the last query. Import `attend_tile`, `merge` and `nothing_seen` from `minigen_course.ch32_flash_attention.flash`, and chapter 14's `causal_mask` from `minigen.model.attention`.

# %%
# exercise: minigen_course.ch32_flash_attention.flash.flash_attention
from jaxtyping import Float
from torch import Tensor


def flash_attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
    tile: int = 64,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Compute causal attention as in chapter 14, at most `tile` queries by `tile` keys at a time.

    The queries are the last `tokens` positions of the context. A tile of queries does not read the
    keys and values that none of its queries sees. Apart from the data of one tile and the mask of
    its queries, no tensor that is allocated is larger than the result.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(32, flash_attention=flash_attention)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.grading.plug_in import attend_by

llm = load_model(weights="float32", attention_backend=attend_by(mine))
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Exchange the two loops: keys outside, queries inside. What must you then store for every query, and why do GPU kernels have the queries outside?

# %% [markdown]
# ## unmasked_kernel
#
# *Core, 10 points, about 30 minutes.*
#
# Write the loop over tiles of keys as a kernel, for one head, without a mask and without a rest: the rows are a multiple of the tile. A program computes `BLOCK` queries. It keeps their maximum, total and mixed values from tile to tile, and stores nothing but the result. Write a plain function: the launch adds `@triton.jit`.

# %%
# exercise: minigen_course.ch32_flash_attention.kernels.unmasked_kernel
import triton.language as tl


def unmasked_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: attention of rows i * `BLOCK` to (i + 1) * `BLOCK` of q over all keys; one head.

    q, k, v and mixed (the result) are [num_rows, HEAD_DIM], contiguous and float32. num_rows is a
    multiple of `BLOCK`, and every query sees every key. Scores are multiplied by `scale`. A program
    loads its queries once, and `BLOCK` keys and values at a time, each of them once. HEAD_DIM and
    `BLOCK` are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(32, unmasked_kernel=unmasked_kernel)

# %% [markdown]
# Try it:

# %%
import torch
from minigen_course.ch32_flash_attention.lesson import start_unmasked

q, k, v = torch.randn(3, 64, 16)
result = torch.empty_like(q)
start_unmasked(mine, q, k, v, result)
print((result - (q @ k.T / 4).softmax(-1) @ v).abs().max())

# %% [markdown]
# **Harder.** Write a second version that computes all scores twice and keeps no weighted values in the first pass: one loop for the maximum and the total, one for the values. How many bytes of keys does it load, and which instructions does it save?

# %% [markdown]
# ## flash_kernel
#
# *Stretch, 15 points, about 40 minutes.*
#
# Write causal attention with grouped heads as a kernel, for any number of tokens. A program computes `BLOCK_M` queries of one head, and stores nothing but their result. Write a plain function: the launch adds `@triton.jit`.

# %%
# exercise: minigen_course.ch32_flash_attention.kernels.flash_kernel
import triton.language as tl


def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_new,
    context,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, h): causal attention of `BLOCK_M` queries of head h, from row i * `BLOCK_M` on.

    q and mixed (the result) are [num_new, Q_HEADS, HEAD_DIM], k and v [context, KV_HEADS,
    HEAD_DIM]. All are contiguous and have one dtype of 16 or 32 bits; the maximum, the sum and the
    weighted values are float32. The queries are the last `num_new` of the `context` positions.
    Query head h uses KV head h // (Q_HEADS // KV_HEADS). Scores are multiplied by `scale`. A
    program loads its queries once, and `BLOCK_N` keys and values at a time, none after the position
    of its last query. HEAD_DIM and both block sizes are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(32, flash_kernel=flash_kernel)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.grading.plug_in import attend_by
from minigen_course.ch32_flash_attention.lesson import flash_by

llm = load_model(weights="float32", attention_backend=attend_by(flash_by(mine)))
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** Only the tiles on the diagonal need the causal mask. Split the loop into two, the first without the mask, and count the comparisons that are left.

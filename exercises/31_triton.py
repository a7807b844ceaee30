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
# # Exercises of chapter 31
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/31_triton.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/31_triton.ipynb)
#
# The chapter: [First kernels in Triton](../notebooks/31_triton.ipynb). Its exercises take about 130 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `add_scaled` | warm-up | 5 | 10 min |
# | `row_maximum` | warm-up | 5 | 10 min |
# | `column_sums` | core | 10 | 15 min |
# | `silu_multiply` | core | 10 | 10 min |
# | `rms_norm_rows` | core | 10 | 15 min |
# | `softmax_rows` | core | 10 | 15 min |
# | `rotate_pairs` | core | 10 | 15 min |
# | `add_rms_norm` | stretch | 15 | 20 min |
# | `pick_fastest` | stretch | 15 | 20 min |
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
# ## add_scaled
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write your first kernel. It computes the first `num` elements of `x + factor * y`, in blocks of `BLOCK`. Each program loads its block of x and its block of y, and stores its block of the sum. The last block may reach past the end: mask the elements from `num` on, because they belong to other data.

# %%
# exercise: minigen_course.ch31_triton.kernels.add_scaled
import triton.language as tl


def add_scaled(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Store sum = x + factor y: one program for `BLOCK` of the `num` elements.

    The grid is (programs,), as many as needed. Each element of x and y is loaded once, and each
    element of the sum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, add_scaled=add_scaled)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.lab.triton_interpreter import launch
from minigen_course.lab.inspect_model import recorded_states

import torch

states = recorded_states(load_model(weights="float32"), [1, 2, 3])[:, -1]  # of one token
before, added = states[-2], states[-1] - states[-2]  # the last layer's input, what it adds
after = torch.empty_like(before)
launch(mine, (3,), before, added, after, len(before), 1.0, BLOCK=256)
print("equal to the model's own sum:", torch.allclose(after, states[-1]))

# %% [markdown]
# **Harder.** Let each program add two blocks: block i, and block i + the number of programs. What changes in the bytes moved, and in the number of programs?

# %% [markdown]
# ## row_maximum
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write a kernel that finds the largest number of each row: maxima[r] = max over c of x[r, c]. A program has one row, which fits into its block. The lanes behind the end of the row hold nothing of it: choose a value for them that cannot be the maximum, also if all numbers of the row are negative.

# %%
# exercise: minigen_course.ch31_triton.kernels.row_maximum
import triton.language as tl


def row_maximum(x_ptr, maxima_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the largest number of each row of x.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous. Each element of x is loaded once, and each maximum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, row_maximum=row_maximum)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.lab.inspect_model import next_logits
from minigen_course.lab.triton_interpreter import launch

import torch

llm = load_model(weights="float32")
logits = torch.stack([next_logits(llm, text) for text in ("The old lighthouse", "Two and two is")])
best = torch.empty(2)
launch(mine, (2,), logits, best, logits.shape[1], BLOCK=65536)
print("the highest logits:", best.tolist(), "torch's own:", logits.amax(1).tolist())

# %% [markdown]
# **Harder.** Also store the column of the maximum (tl.argmax): that is greedy sampling. A row of logits can have 150,000 columns. Why should it not be one block, and how would several programs share it?

# %% [markdown]
# ## column_sums
#
# *Core, 10 points, about 15 minutes.*
#
# Write a kernel that adds up each column: sums[c] = sum over r of x[r, c], in float32. Program p has the columns p * BLOCK to p * BLOCK + BLOCK - 1. The numbers of a column lie a whole row apart, so a load of a column fetches a sector of 32 bytes for every number. Load neighbours of a row together instead. The check counts the sectors.

# %%
# exercise: minigen_course.ch31_triton.kernels.column_sums
import triton.language as tl


def column_sums(x_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr):
    """Store the sum of each column of x, added up in float32: one program for `BLOCK` columns.

    The grid is (programs,), as many as needed. Rows are contiguous. Each element of x is loaded
    once, together with its neighbours in the row, and each sum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, column_sums=column_sums)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.lab.inspect_model import recorded_states
from minigen_course.lab.triton_interpreter import launch

import torch

llm = load_model(weights="float32")
state = recorded_states(llm, llm.tokenizer.encode("The old lighthouse"))[20].abs().contiguous()
sums = torch.empty(state.shape[1])
launch(mine, (5,), state, sums, *state.shape, BLOCK=128)
print("the columns that hold most of the residual stream:", sums.topk(3).indices.tolist())

# %% [markdown]
# **Harder.** With 1,024 columns and a BLOCK of 128 there are 8 programs, on a GPU with 108 SMs. Let a second axis of the grid part the rows, and let a second kernel add up the parts. How many bytes more are moved?

# %% [markdown]
# ## silu_multiply
#
# *Core, 10 points, about 10 minutes.*
#
# Write the activation of SwiGLU as one kernel: SiLU(gate) x up, element by element, where SiLU(z) = z x sigmoid(z). Gate and up are the two halves of each row of one matrix product, so their rows start `row_stride` elements apart. The rows of the result are contiguous: they start `num_columns` elements apart. Compute in float32.

# %%
# exercise: minigen_course.ch31_triton.kernels.silu_multiply
import triton.language as tl


def silu_multiply(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Store mixed = SiLU(gate) x up, in float32: one program for `BLOCK` columns of a row.

    The grid is (rows, programs per row). In gate and in up, rows start `row_stride` elements apart;
    in mixed, `num_columns`. Each element of gate and up is loaded once, and each element of mixed
    is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, silu_multiply=silu_multiply)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.lab.triton_interpreter import interpreted
from minigen_course.ch31_triton.lesson import swiglu_by

llm = load_model(weights="float32", enable_prefix_caching=False)
with interpreted(), using(13, swiglu=swiglu_by(mine)):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** row * row_stride is a 32-bit integer. With an ffn of 14,336, from how many tokens on does it overflow, and what does the package's kernel do about it?

# %% [markdown]
# ## rms_norm_rows
#
# *Core, 10 points, about 15 minutes.*
#
# Write RMSNorm as one kernel. Divide each row of x by the root of its mean square plus `eps`, and multiply it by `weight`, column by column. Each program has one whole row, and loads it once. Compute in float32.

# %%
# exercise: minigen_course.ch31_triton.kernels.rms_norm_rows
import triton.language as tl


def rms_norm_rows(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Divide each row of x by its root mean square and multiply it by weight, in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous in x and in the result. `eps` is added to the mean square. A program loads each
    element of its row and of the weight once, and stores each element of its result once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, rms_norm_rows=rms_norm_rows)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.lab.triton_interpreter import interpreted
from minigen_course.ch31_triton.lesson import rms_norm_by

llm = load_model(weights="float32", enable_prefix_caching=False)
with interpreted(), using(13, rms_norm=rms_norm_by(mine)):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

# %% [markdown]
# **Harder.** Fuse the residual addition: load a second row, store the sum over it, and normalise the sum. How many bytes does that save compared with a separate kernel for the addition? Compare with minigen.kernels.triton.elementwise.

# %% [markdown]
# ## softmax_rows
#
# *Core, 10 points, about 15 minutes.*
#
# Write the softmax of each row as one kernel: weights[r, c] = exp(x[r, c] - m) / l, where m is the maximum of row r, and l is the sum of exp(x[r, c] - m) over the row. Each program has one row, and loads it once. Compute in float32. Scores may be minus infinity, because a causal mask sets them so.

# %%
# exercise: minigen_course.ch31_triton.kernels.softmax_rows
import triton.language as tl


def softmax_rows(x_ptr, weights_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the softmax of each row of x, computed in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous, and each has a finite number. Each element of x is loaded once, and each weight is
    stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, softmax_rows=softmax_rows)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.lab.triton_interpreter import interpreted
from minigen_course.ch31_triton.lesson import attention_by

llm = load_model(weights="float32", enable_prefix_caching=False)
with interpreted(), using(14, attention=attention_by(mine)):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=1)).text)

# %% [markdown]
# **Harder.** Write it for rows that are longer than any block: one loop finds m, a second l, and a third stores the weights. How often is x loaded? Chapter 32 finds m and l in one loop.

# %% [markdown]
# ## rotate_pairs
#
# *Core, 10 points, about 15 minutes.*
#
# Write the rotary embedding as one kernel. Dimension i of a head and dimension i + half form a pair (a, b), which becomes (a cos - b sin, b cos + a sin). The angle of pair i depends on the position of the token, and a program loads this position: row p of the tables cos and sin has the `half` numbers of position p. Compute in float32. Program (t, h) has head h of token t.

# %%
# exercise: minigen_course.ch31_triton.kernels.rotate_pairs
import triton.language as tl


def rotate_pairs(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, rotated_ptr, num_heads, half, BLOCK: tl.constexpr
):
    """Rotate the pairs (i, i + half) of each head by the angles of its token's position.

    The grid is (tokens, heads), and `BLOCK` is at least `half`. x and the result are tokens x heads
    x 2 half, contiguous. Row p of cos and of sin has the `half` numbers of position p. Each element
    of x is loaded once, and each of the result is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, rotate_pairs=rotate_pairs)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.lab.triton_interpreter import interpreted
from minigen_course.ch31_triton.lesson import apply_rotary_by

llm = load_model(weights="float32", enable_prefix_caching=False)
with interpreted(), using(13, apply_rotary=apply_rotary_by(mine)):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=1)).text)

# %% [markdown]
# **Harder.** Each head loads the cosines and sines of its token again. Let a program have all heads of a token: a block of heads by pairs, made with [:, None] and [None, :]. How many bytes does that save?

# %% [markdown]
# ## add_rms_norm
#
# *Stretch, 15 points, about 20 minutes.*
#
# Fuse the residual sum and RMSNorm: the kernel of the chapter's first number. Add each row of x to the row of the residual stream, store the sum in its place, and store the RMSNorm of the sum as the result. Each program has one row. It loads x and the residual once, and does not load the sum that it has stored. Compute in float32.

# %%
# exercise: minigen_course.ch31_triton.kernels.add_rms_norm
import triton.language as tl


def add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr
):
    """Add x to the residual in place, and store the RMSNorm of the sum, both in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. All rows are
    contiguous. A program loads each element of its row of x, of the residual and of the weight
    once, and stores each element of the sum and of its result once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, add_rms_norm=add_rms_norm)

# %% [markdown]
# Try it:

# %%
from minigen.kernels.triton.elementwise import rms_norm_torch
from minigen_course.lab.memory_watch import record_operators
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, launch

import torch

x, residual, weight = torch.randn(8, 576), torch.randn(8, 576), torch.ones(576)
result, total = torch.empty_like(x), residual.clone()
seen = record_programs(
    lambda: launch(mine, (8,), x, total, weight, result, 576, 1e-5, BLOCK=1024),
    x=x, total=total, weight=weight, result=result,
)
steps = record_operators(lambda: rms_norm_torch(x, weight, 1e-5, residual))
torch.testing.assert_close(result, rms_norm_torch(x, weight, 1e-5, residual - x))
print(f"bytes: operators {sum(step.num_bytes for step in steps):,}, yours {bytes_moved(seen):,}")

# %% [markdown]
# **Harder.** The engine's kernel rounds the sum to the residual's type before it normalises, and yours need not. Which tokens could differ because of that, and why does the engine insist on it?

# %% [markdown]
# ## pick_fastest
#
# *Stretch, 15 points, about 20 minutes.*
#
# Write an auto-tuner: plain Python that tries several sizes of a kernel and keeps the fastest. `seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit the chip; then leave that size out, without running it again. A size's first run does not count, because it compiles. Then run each size that fits `repeats` times, and compare the medians. Keep the choice in `found` under `key`, which stands for the shapes; for a key that is there, run nothing. Raise ValueError if no size fits.

# %%
# exercise: minigen_course.ch31_triton.kernels.pick_fastest
from collections.abc import Callable, Hashable, Sequence
from typing import Any


def pick_fastest(
    key: Hashable,
    sizes: Sequence[Any],
    seconds: Callable[[Any], float],
    found: dict[Hashable, Any],
    repeats: int = 5,
) -> Any:
    """Return the fastest size for problems of this key, and keep it in `found`.

    `seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit
    the chip. A size's first run does not count, because it compiles. A size that fits is run
    `repeats` times more, and its median counts. If `found` has the key, nothing is run. Raises
    `ValueError` if no size fits.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, pick_fastest=pick_fastest)

# %% [markdown]
# Try it:

# %%
import time

import torch

x = torch.randn(512, 4096)


def seconds(rows):
    begin = time.perf_counter()
    for start in range(0, len(x), rows):
        x[start : start + rows].softmax(-1)
    return time.perf_counter() - begin


print("rows at once:", mine(tuple(x.shape), [1, 16, 512], seconds, {}))

# %% [markdown]
# **Harder.** Triton's own tuner measures every size for a fixed time, and empties the L2 cache between two runs. Why does it do the second, and in which engine would you leave it out?

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
# # Exercises of chapter 34
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/34_cpu_kernels.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/34_cpu_kernels.ipynb)
#
# The chapter: [The same race on a CPU](../notebooks/34_cpu_kernels.ipynb). Its exercises take about 75 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `quantise_groups` | core | 10 | 20 min |
# | `multiply_bytes` | core | 10 | 15 min |
# | `by_panels` | warm-up | 5 | 10 min |
# | `multiply_codes` | stretch | 15 | 30 min |
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
# ## quantise_groups
#
# *Core, 10 points, about 20 minutes.*
#
# Quantise numbers to bytes. Every `size` numbers of a row form a group with one scale, chosen so that the number with the largest magnitude becomes 127 or -127. A group of zeros has the scale 0; do not divide by it, because NumPy's warnings are errors here. Return the bytes (int8, [rows, groups, size]) and the scales (float32, [rows, groups]).

# %%
# exercise: minigen_course.ch34_cpu_kernels.lesson.quantise_groups
import numpy as np


def quantise_groups(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers to bytes, with a scale for every `size` of a row: number = byte x scale.

    `rows` is float32, [rows, width], and `size` divides the width. Returns the bytes (int8 from
    -127 to 127, [rows, groups, size]) and the scales (float32, [rows, groups]). The largest
    magnitude of a group is 127 steps, and each number goes to the nearest step. A group of zeros
    has the scale 0.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(34, quantise_groups=quantise_groups)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.ch34_cpu_kernels.lesson import continue_rounded

llm = load_model(weights="float32")
print(continue_rounded(llm, "The history of the sea begins", 12, mine))

# %% [markdown]
# **Harder.** A byte has 256 values, and this uses 255 of them, symmetric around 0. If all numbers of a group are positive, half of these values are wasted. Add a minimum per group, as the 4-bit weights have. What else does the product need to know then?

# %% [markdown]
# ## multiply_bytes
#
# *Core, 10 points, about 15 minutes.*
#
# Multiply a matrix by a vector when both are bytes with a scale for each group. Within a group, multiply and add only integers. After that, multiply the group's sum by two scales, the row's and the input's. A product of row r is the sum over its groups. `codes` is int8, [rows, groups, size], `scales` float32, [rows, groups], `inputs` int8, [groups, size], `input_scales` float32, [groups]. Return float32, [rows]. Do not change the arguments.

# %%
# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_bytes
import numpy as np


def multiply_bytes(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Compute a matrix times a vector, float32, [rows], from bytes and their scales.

    `codes` are int8, [rows, groups, size], with `scales` float32, [rows, groups]; `inputs` are
    int8, [groups, size], with `input_scales` float32, [groups]. A number is byte x scale.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(34, multiply_bytes=multiply_bytes)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.ch34_cpu_kernels.lesson import continue_in_bytes

llm = load_model(weights="float32")
print(continue_in_bytes(llm, "The capital of France is", 3, mine))

# %% [markdown]
# **Harder.** How many multiplications does a row of 576 numbers need with a scale for each 32, and how many of them are between floats? And with a scale for each 8?

# %% [markdown]
# ## by_panels
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Pack weights into panels. `rows` is [rows, groups, words], and the number of rows is a multiple of 16. Sixteen rows make a panel. Within a panel, order the words by group, then by word; the same word of all sixteen rows is contiguous, one lane per row. Return a flat array. Words have any dtype, and keep it.

# %%
# exercise: minigen.kernels.cpu.packed_weights.by_panels
import numpy as np


def by_panels(rows: np.ndarray) -> np.ndarray:
    """Pack [rows, groups, words] into panels, a flat array of [panels, groups, words, lanes]."""
    raise NotImplementedError  # your turn


# %%
mine = check(34, by_panels=by_panels)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

with using(34, by_panels=mine):
    llm = load_model(weights="int4")
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** A processor with AVX2 has registers of eight 32-bit lanes. Take the number of lanes as an argument. Which constants of the kernels must change with it?

# %% [markdown]
# ## multiply_codes
#
# *Stretch, 15 points, about 30 minutes.*
#
# Multiply bytes by 4-bit codes. (The package's kernels compute the same, with the minimum as an offset.) An input is (byte + zero) x scale, and a weight is code x scale + minimum; scales, zeros and minima belong to groups of 32 columns. Along the columns, multiply and add only integers, because the processor does that fast. Account for zero and minimum with the sums of the codes and of the bytes. Return float32, [tokens, rows].

# %%
# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_codes
import numpy as np

from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows


def multiply_codes(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Compute inputs x weights^T, float32, [tokens, rows], from integer dot products and sums.

    Over a group, (byte + zero) x scale times (code x scale + minimum) adds up to two terms: (bytes
    x codes + zero x the sum of codes) times both scales, and (the sum of bytes + 32 x zero) times
    the input's scale and the weight's minimum.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(34, multiply_codes=multiply_codes)

# %% [markdown]
# In the running engine:

# %%
from minigen_course import load_model
from minigen_course.ch34_cpu_kernels.lesson import continue_in_codes

llm = load_model(weights="float32")
print(continue_in_codes(llm, "The capital of France is", 3, mine))

# %% [markdown]
# **Harder.** The sum of a group's codes is the same for all tokens, and the sum of a group's bytes is the same for all rows. When can you compute each of them, and what does that save if there is only one token?

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
# # Exercises of chapter 13
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/13_layers.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/13_layers.ipynb)
#
# The chapter: [RMSNorm, rotary embedding, SwiGLU](../notebooks/13_layers.ipynb). Its exercises take about 70 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `depends_on_distance_only` | warm-up | 5 | 10 min |
# | `apply_rotary` | core | 10 | 15 min |
# | `rotate_first` | stretch | 15 | 15 min |
# | `unpermuted_rows` | stretch | 15 | 15 min |
# | `rms_norm` | warm-up | 5 | 10 min |
# | `swiglu` | warm-up | 5 | 5 min |
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
# ## depends_on_distance_only
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write a test of position encodings. `encode(vector, position)` returns a query or a key of `head_dim` numbers as it is at a position. Return True if the score of a query at position m and a key at position n never changes when both move by the same number of positions, for positions from 0 to 63, and False otherwise. Use random vectors. An encoding that ignores the position passes this test, too. Scores that differ by less than 0.01 count as equal, because float32 rounds.

# %%
# exercise: minigen_course.ch13_layers.lesson.depends_on_distance_only
from collections.abc import Callable

from torch import Tensor


def depends_on_distance_only(encode: Callable[[Tensor, int], Tensor], head_dim: int) -> bool:
    """Return whether scores stay the same when both tokens move by the same number of positions.

    `encode(vector, position)` returns a query or a key of `head_dim` numbers as it is at a
    position. Positions 0 to 63 are tested, with a random query and a random key. Scores that differ
    by less than 0.01 count as equal, because float32 rounds.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(13, depends_on_distance_only=depends_on_distance_only)

# %% [markdown]
# Try it:

# %%
import torch

from minigen.model.layers import apply_rotary, rotary_frequencies, rotary_tables


def rotated(vector, position):
    tables = rotary_tables(rotary_frequencies(len(vector), 10_000.0), torch.tensor([position]))
    return apply_rotary(vector[None, None], *tables)[0, 0]


def added(vector, position):
    return vector + torch.arange(len(vector)).mul(position).sin()


print("rotation:", mine(rotated, 64), "- added vector:", mine(added, 64))

# %% [markdown]
# **Harder.** Suppose that the encoding multiplies a vector by a matrix R_m. Write a test that is given these matrices and uses no random vectors. Which condition on them is necessary and sufficient?

# %% [markdown]
# ## apply_rotary
#
# *Core, 10 points, about 15 minutes.*
#
# Write the rotary embedding. Numbers i and i + head_dim/2 of a head are the coordinates of a point. Rotate this point by the angle whose cosine and sine are given for its token and pair. All heads of a token use the same angles. Compute in float32, and return the dtype of `x`.

# %%
# exercise: minigen.model.layers.apply_rotary
from jaxtyping import Float
from torch import Tensor


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim/2) by its angle: the pairing of Llama in transformers."""
    raise NotImplementedError  # your turn


# %%
mine = check(13, apply_rotary=apply_rotary)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32", enable_prefix_caching=False)
with using(13, apply_rotary=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Some models rotate only a part of each head. Write `rotate_first`: `task(13, "rotate_first")` prints the exercise, and `check(13, rotate_first=mine)` checks it.

# %% [markdown]
# ## rotate_first
#
# *Stretch, 15 points, about 15 minutes.*
#
# Rotate only the first numbers of each head, two for each cosine, and leave the others unchanged, as GPT-NeoX-20B does with a quarter of each head. With `half` cosines for a token, number i forms a pair with number i + half. Compute in float32, and return the dtype of `x`.

# %%
# exercise: minigen_course.ch13_layers.lesson.rotate_first
from jaxtyping import Float
from torch import Tensor


def rotate_first(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first numbers of each head, two for each cosine; leave the others as they are.

    Number i forms a pair with number i + half. GPT-NeoX-20B rotates the first quarter.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(13, rotate_first=rotate_first)

# %% [markdown]
# Try it:

# %%
import torch

from minigen.model.layers import rotary_frequencies, rotary_tables

x, positions = torch.randn(5, 2, 64), torch.arange(5)
rotated = mine(x, *rotary_tables(rotary_frequencies(16, 10_000.0), positions))
print("numbers that changed:", (rotated != x).any(dim=(0, 1)).nonzero().flatten().tolist())

# %% [markdown]
# **Harder.** Why might a model leave numbers unrotated? Which scores between two tokens do not depend on their distance then?

# %% [markdown]
# ## unpermuted_rows
#
# *Stretch, 15 points, about 15 minutes.*
#
# llama.cpp stores the rows of W_q and W_k so that the two rows of each rotated pair are neighbours: row 0, row 32, row 1, row 33, ... of a head of 64. Return the order that undoes this, for a matrix of `num_rows` rows and `heads` heads: element i of the result is the index of the stored row that is row i of the model. The result is a tensor of int64.

# %%
# exercise: minigen.checkpoint.gguf_mapping.unpermuted_rows
from jaxtyping import Int64
from torch import Tensor


def unpermuted_rows(num_rows: int, heads: int) -> Int64[Tensor, " rows"]:
    """Return the stored row for each row 0, 1, 2, ...: within a head first the even, then the odd.

    >>> unpermuted_rows(12, heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(13, unpermuted_rows=unpermuted_rows)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

with using(13, unpermuted_rows=mine):
    llm = load_model(weights="float32")
print(llm.generate("1, 2, 3, 4, 5, 6,", SamplingParams(temperature=0, max_tokens=20)).text)

# %% [markdown]
# **Harder.** Write the converter's direction as well: from the model's order to llama.cpp's. How can you test both without a file?

# %% [markdown]
# ## rms_norm
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write RMSNorm: divide each row (the last axis) by sqrt(mean square + `eps`), then multiply it by `weight`. Compute in float32, whatever the dtype of `x`, and return the dtype of `x`.

# %%
# exercise: minigen.model.layers.rms_norm
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "*rows hidden"]:
    """Scale each row to a root mean square of 1 (in float32), then multiply it by `weight`."""
    raise NotImplementedError  # your turn


# %%
mine = check(13, rms_norm=rms_norm)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32", enable_prefix_caching=False)
with using(13, rms_norm=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** If you know how models are trained, write the backward pass: given the gradient of the result, what is the gradient of `x`? Compare with autograd.

# %% [markdown]
# ## swiglu
#
# *Warm-up, 5 points, about 5 minutes.*
#
# Write the middle of SwiGLU: SiLU of `gate`, times `up`, element by element. It must be correct for gates of any size.

# %%
# exercise: minigen.model.layers.swiglu
from jaxtyping import Float
from torch import Tensor


def swiglu(
    gate: Float[Tensor, "tokens ffn"], up: Float[Tensor, "tokens ffn"]
) -> Float[Tensor, "tokens ffn"]:
    """Return SiLU(gate) * up: the gate decides how much of each hidden unit of `up` passes."""
    raise NotImplementedError  # your turn


# %%
mine = check(13, swiglu=swiglu)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32", enable_prefix_caching=False)
with using(13, swiglu=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Allocate no tensor except the result. Which of torch's functions take `out`?

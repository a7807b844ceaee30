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
# # Exercises of chapter 14
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/14_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/14_attention.ipynb)
#
# The chapter: [Attention: causal, with grouped heads](../notebooks/14_attention.ipynb). Its exercises take about 40 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `causal_mask` | warm-up | 5 | 10 min |
# | `attention` | core | 10 | 30 min |
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
# ## causal_mask
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Write the causal mask: True where a query may attend to a key. The keys are at positions 0 to `num_keys` - 1, and the queries are at the last `num_queries` of them. A query sees its own position and those before it; with a window, it sees at most `window` positions, including its own.

# %%
# exercise: minigen.model.attention.causal_mask
from jaxtyping import Bool
from torch import Tensor


def causal_mask(
    num_queries: int, num_keys: int, window: int | None = None
) -> Bool[Tensor, "queries keys"]:
    """Return True where a query may attend to a key.

    The queries are the last of the keys' positions. A query attends to its own position and
    earlier ones, at most `window` positions in total.

    >>> causal_mask(2, 4, window=2).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(14, causal_mask=causal_mask)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

# small chunks
llm = load_model(weights="float32", enable_prefix_caching=False, max_num_batched_tokens=16)
prompt = "The old lighthouse keeper lost his lamp, so the young sailor gave him a lamp. The keeper"
with using(14, causal_mask=mine):
    print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Write the mask for two texts that are put one after another into one sequence, so that neither sees the other.

# %% [markdown]
# ## attention
#
# *Core, 10 points, about 30 minutes.*
#
# Write causal attention: softmax(q k^T / sqrt(head_dim)) v for every head, where query head h uses KV head h // (q_heads / kv_heads). The queries are at the last `tokens` positions of the context. A query sees its own position and those before it; with a window, it sees at most `window` positions, including its own.

# %%
# exercise: minigen.model.attention.attention
from jaxtyping import Float
from torch import Tensor


def attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return softmax(q k^T / sqrt(head_dim)) v of each query over the keys that it may attend to.

    The queries are the last `tokens` positions of the context. Query head h uses KV head
    h // (q_heads / kv_heads). With a window, a query attends to at most `window` positions,
    including its own.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(14, attention=attention)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32", enable_prefix_caching=False)
with using(14, attention=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# **Harder.** Write it without repeating K and V, and take the keys 16 at a time (a tile), so that no whole row of scores is ever stored; the same check accepts it. Besides the sum of weighted values, which two numbers per query must be carried from tile to tile?

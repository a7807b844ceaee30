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
# # Exercises of chapter 00
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/00_map.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/00_map.ipynb)
#
# The chapter: [The finished engine, and the memory that a model needs](../notebooks/00_map.ipynb). Its exercises take about 30 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `most_sequences` | warm-up | 5 | 10 min |
# | `first_that_fit` | stretch | 15 | 20 min |
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
# ## most_sequences
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Return how many sequences of `context` tokens fit into `memory` bytes at once, with a KV cache of 16 bits per number. Each weight has `bits` bits, and `working` bytes are kept for what a step works in. A sequence that fits only partly does not count, and the count is never negative. `num_parameters` and `kv_bytes_per_token` in `minigen_course.lab.cost_model` compute the sizes from the configuration.

# %%
# exercise: minigen_course.lab.cost_model.most_sequences
from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes, at least 0.

    Each weight has `bits` bits, and the KV cache 16 bits per number. `working` bytes are kept for
    what a step works in.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(0, most_sequences=most_sequences)

# %% [markdown]
# Try it:

# %%
from minigen_course.lab.cost_model import config_of
from minigen_course.figures.explore import picture
from minigen_course.ch00_map.figures import memory_budget

with using(0, most_sequences=mine):
    drawn = memory_budget(config_of("Llama-3-8B"), 16, 24, sequences=8, context=4096)
picture(drawn, "The budget of Llama-3-8B; the curve is your function's.")

# %% [markdown]
# **Harder.** Requests rarely have equal lengths: the exercise `first_that_fit` takes a list of lengths, and is checked, too.

# %% [markdown]
# ## first_that_fit
#
# *Stretch, 15 points, about 20 minutes.*
#
# Return how many of the first requests fit into `memory` bytes together. `lengths` has the tokens of each request, in the order of arrival. The first request that does not fit ends the count: no request behind it may overtake it, not even a shorter one. Weights, KV cache and working memory are those of `most_sequences`. Leave the list as it is.

# %%
# exercise: minigen_course.lab.cost_model.first_that_fit
from collections.abc import Sequence

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def first_that_fit(
    config: ModelConfig, bits: float, memory: float, lengths: Sequence[int], working: float = GB
) -> int:
    """Return how many of the first requests fit into `memory` bytes together, at least 0.

    `lengths` has the tokens of each request, in the order of arrival. The first request that does
    not fit ends the count, even if a shorter one behind it would fit. Otherwise as in
    `most_sequences`.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(0, first_that_fit=first_that_fit)

# %% [markdown]
# Try it:

# %%
from minigen_course.lab.cost_model import config_of
from minigen_course.figures.explore import picture
from minigen_course.ch00_map.figures import queue

with using(0, first_that_fit=mine):
    drawn = queue(config_of("Llama-3-8B"), 4.5, 24, [16_000, 8_000, 30_000, 12_000, 24_000, 60_000])
picture(drawn, "Requests in the order of arrival; your function fills those that run.")

# %% [markdown]
# **Harder.** Which order of the same requests lets the most of them run at once, and which requests would then wait for ever if new ones keep coming?

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
# # Exercises of chapter 17
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/17_dense_cache.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/17_dense_cache.ipynb)
#
# The chapter: [Prefill, decode, and the memory wall](../notebooks/17_dense_cache.ipynb). Its exercises take about 105 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `DenseCache` | core | 10 | 20 min |
# | `WindowCache` | stretch | 15 | 20 min |
# | `DenseRunner` | stretch | 15 | 30 min |
# | `compute_bound_batch` | warm-up | 5 | 5 min |
# | `step_seconds` | core | 10 | 15 min |
# | `prefill_seconds` | stretch | 15 | 15 min |
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
# ## DenseCache
#
# *Core, 10 points, about 20 minutes.*
#
# Write the KV cache of one sequence. `store` appends a layer's new keys and values to the old ones, and returns all keys and values of that layer: two tensors, or one tensor with keys and values along its first axis. All layers of a step store the same tokens, one layer after another; then `advance` is called once, and adds these tokens to the attribute `num_tokens`, which begins at 0. The cache has room for `max_tokens` tokens, and stores copies, in its own `dtype`.

# %%
# exercise: minigen_course.ch17_dense_cache.reference.DenseCache
import torch
from jaxtyping import Float
from torch import Tensor


class DenseCache:
    """Keys and values of one sequence, `[2, layers, max_tokens, kv_heads, head_dim]`."""

    def __init__(
        self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Append one layer's new keys and values to the old ones; return all of them."""
        raise NotImplementedError  # your turn

    def advance(self, num_tokens: int) -> None:
        """Count the new tokens, once every layer has stored them."""
        raise NotImplementedError  # your turn


# %%
mine = check(17, DenseCache=DenseCache)

# %% [markdown]
# Try it:

# %%
from minigen_course import load_model
from minigen_course.ch17_dense_cache.lesson import continue_dense

llm = load_model(weights="float32")
with using(17, DenseCache=mine):
    token_ids = continue_dense(llm, "The history of the sea begins", 12)
print(llm.tokenizer.decode(token_ids))

# %% [markdown]
# **Harder.** A layer with a sliding window never attends to older tokens than its window holds. Write a cache that keeps only these: it is the exercise `WindowCache`, in the workspace.

# %% [markdown]
# ## WindowCache
#
# *Stretch, 15 points, about 20 minutes.*
#
# Write the cache of a model whose layers have a sliding window: each token attends to the last `window` tokens, itself included. The tokens come one by one. `store` adds one token's key and value to a layer, and returns the keys and values of the layer's last `window` tokens (fewer at the beginning), in any order, but each value beside its key: two tensors, or one tensor with keys and values along its first axis. All layers store the same token, and then `advance` is called once. The cache stores copies, in its own `dtype`.

# %%
# exercise: minigen_course.ch17_dense_cache.reference.WindowCache
import torch
from jaxtyping import Float
from torch import Tensor


class WindowCache:
    """Keys and values of one sequence's last tokens, `[2, layers, window, kv_heads, head_dim]`."""

    def __init__(self, layers: int, window: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "1 kv_heads head_dim"],
        v: Float[Tensor, "1 kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Add one token to a layer; return its last `window` tokens, in any order."""
        raise NotImplementedError  # your turn

    def advance(self) -> None:
        """Count the new token, once every layer has stored it."""
        raise NotImplementedError  # your turn


# %%
mine = check(17, WindowCache=WindowCache)

# %% [markdown]
# Try it:

# %%
import torch

cache = mine(1, 3, 1, 2, torch.float32)
for token in range(5):
    k = torch.full((1, 1, 2), float(token))
    keys, _ = cache.store(0, k, k)
    cache.advance()
    print(f"token {token}: the cache holds the tokens {[int(each) for each in keys[:, 0, 0]]}")

# %% [markdown]
# **Harder.** Now a prompt of several tokens comes at once. Its first tokens need older keys than its last ones: how many tokens must the cache hold during that step?

# %% [markdown]
# ## DenseRunner
#
# *Stretch, 15 points, about 30 minutes.*
#
# Write the runner. `logits` runs the model on the new tokens of each sequence (`new_ids`), with one `DenseCache` per sequence, and returns the logits of each sequence's next token. `release` frees a sequence's cache. `DenseCache` and `attend_dense` are in `minigen_course.ch17_dense_cache.reference`.

# %%
# exercise: minigen_course.ch17_dense_cache.reference.DenseRunner
from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import Transformer
from minigen.sequence import Sequence


class DenseRunner:
    """Runs the model on each sequence's new tokens: the whole prompt, then one token per step.

    `windows` are the layers' sliding windows.
    """

    def __init__(
        self,
        model: Transformer,
        kv_heads: int,
        windows: SequenceOf[int | None],
        dtype: torch.dtype = torch.float32,
    ):
        raise NotImplementedError  # your turn

    @torch.inference_mode()
    def logits(self, sequences: SequenceOf[Sequence]) -> Float[Tensor, "sequences vocab"]:
        """Return the raw logits of each sequence's next token."""
        raise NotImplementedError  # your turn

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's keys and values."""
        raise NotImplementedError  # your turn


# %%
mine = check(17, DenseRunner=DenseRunner)

# %% [markdown]
# Try it:

# %%
from minigen_course import load_model
from minigen_course.ch17_dense_cache.lesson import continue_dense

llm = load_model(weights="float32")
with using(17, DenseRunner=mine):
    token_ids = continue_dense(llm, "The history of the sea begins", 12)
print(llm.tokenizer.decode(token_ids))


# %% [markdown]
# **Harder.** Two prompts have the same first 100 tokens. Let the second sequence start with a copy of the first one's cache. What if the whole prompts are equal?

# %% [markdown]
# ## compute_bound_batch
#
# *Warm-up, 5 points, about 5 minutes.*
#
# At which batch does decoding become compute-bound? The model is Llama-3-8B with weights and KV cache in bfloat16: it multiplies each token with 7.505 billion weights, and has 32 layers, 32 query heads, 8 KV heads and a head dimension of 128. The card is an L4: 300 GB/s and 121 TFLOP/s. Return the batch for a `context` of 1, 100, 1,000 and 8,000 tokens, or None where no batch is compute-bound. Work it out on paper and return your four numbers, or let the function compute them; 5 % off is near enough.

# %%
# exercise: minigen_course.ch17_dense_cache.estimates.compute_bound_batch
def compute_bound_batch(context: int) -> int | None:
    """Return the least batch at which decoding is compute-bound, or None if no batch is.

    The model is Llama-3-8B with weights and KV cache in bfloat16, the card is an L4, and each
    sequence has `context` tokens.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(17, compute_bound_batch=compute_bound_batch)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch17_dense_cache.figures import seconds_by_batch
from minigen_course.figures.explore import picture

with using(17, compute_bound_batch=mine):
    drawn = seconds_by_batch([100, 1000, 8000])
picture(drawn, "The time of a step by its batch. Dots are the batches of your function.")


# %% [markdown]
# **Harder.** An L4 has 24 GB. Does the batch for 100 tokens fit beside the 16.06 GB of weights? What does that say about decoding on this card?

# %% [markdown]
# ## step_seconds
#
# *Core, 10 points, about 15 minutes.*
#
# Predict the time of one decode step: max(bytes / bandwidth, FLOPs / peak) + overhead. The weights are read once for the whole batch. Each of the `batch` sequences has `context` tokens, and its keys and values are read once, in all layers. Each sequence computes one token: two FLOPs for each weight that it is multiplied with, and in each layer, for each query head and each token of the context, two FLOPs per dimension for the score and two for the mix of values. The check takes five pairs of a model and a card.

# %%
# exercise: minigen_course.ch17_dense_cache.estimates.step_seconds
def step_seconds(
    *,
    weights: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time of one decode step in seconds.

    `weights` are the parameters that each token is multiplied with; each of `batch` sequences has
    `context` tokens. `bandwidth` is in bytes per second, `peak` in FLOPs per second, `overhead` in
    seconds.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(17, step_seconds=step_seconds)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch17_dense_cache.figures import seconds_by_batch
from minigen_course.figures.explore import picture

with using(17, step_seconds=mine):
    drawn = seconds_by_batch([100, 1000, 8000])
picture(drawn, "The time of a step by its batch, each point computed by your function.")


# %% [markdown]
# **Harder.** Predict the time to the first token as well. It is the exercise `prefill_seconds`, in the workspace.

# %% [markdown]
# ## prefill_seconds
#
# *Stretch, 15 points, about 15 minutes.*
#
# Predict the time to the first token of one prompt: max(bytes / bandwidth, FLOPs / peak) + overhead. All tokens of the prompt are computed in one step. Each token attends to itself and to all before it. The output head, whose weights are a part of `weights`, is multiplied with the last token only. The weights are read once, and so are the keys and values of the prompt.

# %%
# exercise: minigen_course.ch17_dense_cache.estimates.prefill_seconds
def prefill_seconds(
    *,
    weights: float,
    head: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    prompt_tokens: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time to the first token of one prompt, in seconds.

    The whole prompt is one step, and only its last token is multiplied with the `head`, which is
    part of `weights`. Each token attends to itself and all before it. All keys and values are
    counted once as bytes. The other arguments are those of `step_seconds`.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(17, prefill_seconds=prefill_seconds)

# %% [markdown]
# Try it:

# %%
from minigen_course.lab.cost_model import MACHINES, SHAPES

shape, card = SHAPES["Llama-3-8B"], MACHINES["L4"]
sizes = {name: getattr(shape, name) for name in ("layers", "q_heads", "kv_heads", "head_dim")}
limits = {"bandwidth": card.bandwidth, "peak": card.flops}
for tokens in (100, 1000, 10_000):
    seconds = mine(
        weights=shape.multiplied, head=shape.vocab * shape.hidden, prompt_tokens=tokens, **sizes, **limits
    )
    print(f"{tokens:>6,} tokens of Llama-3-8B on an L4: first token after {1e3 * seconds:,.0f} ms")

# %% [markdown]
# **Harder.** The first 1,000 tokens of a prompt of 1,500 are cached already (chapter 23). Which of your terms change, and by how much is the first token earlier?

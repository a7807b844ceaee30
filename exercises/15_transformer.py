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
# # Exercises of chapter 15
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/15_transformer.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/15_transformer.ipynb)
#
# The chapter: [The whole forward pass](../notebooks/15_transformer.ipynb). Its exercises take about 100 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `token_flops` | warm-up | 5 | 10 min |
# | `prompt_flops` | stretch | 15 | 10 min |
# | `run_layer` | core | 10 | 15 min |
# | `run_parallel_layer` | stretch | 15 | 15 min |
# | `project_qkv` | core | 10 | 15 min |
# | `qwen3_logits` | stretch | 15 | 35 min |
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
# ## token_flops
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Count the FLOPs of one token's forward pass from a model's sizes alone. A product of a vector with a matrix costs two FLOPs per weight of the matrix. Count the four matrices of attention, the three of the feed-forward network and the head; looking up the embedding costs nothing. Add what attention computes without weights: for each layer, each query head and each of the `context` tokens that the token attends to (itself included), one score and one share of the mix. Norms, rotation and softmax are left out. `config` has `hidden`, `num_layers`, `q_heads`, `kv_heads`, `head_dim`, `ffn` and `vocab_size`. Return an int.

# %%
# exercise: minigen_course.ch15_transformer.reference.token_flops
from minigen.checkpoint.model_config import ModelConfig


def token_flops(config: ModelConfig, context: int) -> int:
    """Return the FLOPs of one token's forward pass, from its embedding to its logits.

    The token attends to `context` tokens, including itself. Only matrix products count, and a
    multiplication and an addition are two FLOPs.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(15, token_flops=token_flops)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch15_transformer.figures import attention_share
from minigen_course.figures.explore import picture

with using(15, token_flops=mine):
    drawn = attention_share(["SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"])
picture(drawn, "Attention's share of one token's FLOPs, computed by your function.")

# %% [markdown]
# **Harder.** Count a whole prompt whose last token alone gets logits, where each token attends to itself and to those before it: that is the exercise `prompt_flops`.

# %% [markdown]
# ## prompt_flops
#
# *Stretch, 15 points, about 10 minutes.*
#
# Count the FLOPs of a whole prompt of `num_tokens` tokens. Each token attends to itself and to those before it, and scores that the causal mask hides are not computed. Only the last token gets logits. `token_flops` in `minigen_course.ch15_transformer.reference` counts one token with its logits. Return an int.

# %%
# exercise: minigen_course.ch15_transformer.reference.prompt_flops
from minigen.checkpoint.model_config import ModelConfig


def prompt_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the FLOPs of a whole prompt, with logits for its last token only.

    Each token attends to itself and to those before it, and nothing that the causal mask hides is
    computed.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(15, prompt_flops=prompt_flops)

# %% [markdown]
# Try it:

# %%
from minigen_course.lab.cost_model import config_of

for num_tokens in (100, 1_000, 8_192):
    flops = mine(config_of("Llama-3-8B"), num_tokens)
    print(f"Llama-3-8B, a prompt of {num_tokens:>5,} tokens: {flops / 1e12:8,.1f} TFLOP")

# %% [markdown]
# **Harder.** Find a formula without a sum. From which length on does attention without its matrices cost more than all matrices together?

# %% [markdown]
# ## run_layer
#
# *Core, 10 points, about 15 minutes.*
#
# Write the forward pass of one layer: attention, then the feed-forward network, each with its norm before it and a residual connection around it. `layer` has the weights; `attend(q, k, v)` computes attention over each query's context. `rms_norm` and `swiglu` are in `minigen.model.layers`; `project_qkv(layer, y, rotation, head_dim, norm_eps)` in `minigen.model.transformer` returns the queries, keys and values of a normalised x, by head, with queries and keys rotated. Return a new tensor, and leave x unchanged.

# %%
# exercise: minigen.model.transformer.run_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation


def run_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Apply attention, then the feed-forward network; each reads a normalised x and adds to x."""
    raise NotImplementedError  # your turn


# %%
mine = check(15, run_layer=run_layer)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(15, run_layer=mine):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    print(llm.generate("The capital of France is", greedy).text)

# %% [markdown]
# **Harder.** GPT-J and PaLM compute both halves in parallel, from the same normalised x: that is the exercise `run_parallel_layer`. What does it gain, and why can SmolLM2 not run this way?

# %% [markdown]
# ## run_parallel_layer
#
# *Stretch, 15 points, about 15 minutes.*
#
# Write a layer as in GPT-J and PaLM: attention and the feed-forward network both read the same normalised x, and both results are added to x. The norm is `layer.attention_norm`; `layer.ffn_norm` is not used. The arguments are those of `run_layer`.

# %%
# exercise: minigen_course.ch15_transformer.reference.run_parallel_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """Add attention and the feed-forward network to x, both computed from the same normalised x.

    The norm is the layer's `attention_norm`; its `ffn_norm` is not used.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(15, run_parallel_layer=run_parallel_layer)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(15, run_layer=mine):  # SmolLM2 was trained with one half after the other
    greedy = SamplingParams(temperature=0, max_tokens=8)
    print(repr(llm.generate("The capital of France is", greedy).text))

# %% [markdown]
# **Harder.** In a parallel layer, W_q, W_k, W_v, W_gate and W_up read the same input. How many matrix products are left in a layer if all products with the same input are fused into one, and how many has a layer of SmolLM2?

# %% [markdown]
# ## project_qkv
#
# *Core, 10 points, about 15 minutes.*
#
# Compute queries, keys and values from a normalised x: one product `layer.qkv`, split by `layer.qkv.parts`, and each part split into heads of `head_dim` numbers. If the layer has `q_norm` and `k_norm`, normalise each head of the queries and keys with them. Then rotate queries and keys. `rms_norm` and `apply_rotary` are in `minigen.model.layers`.

# %%
# exercise: minigen.model.transformer.project_qkv
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import Layer, Rotation


def project_qkv(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    head_dim: int,
    norm_eps: float,
) -> tuple[
    Float[Tensor, "tokens q_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
    Float[Tensor, "tokens kv_heads head_dim"],
]:
    """Return the queries, keys and values of a normalised x, by head; q and k are rotated.

    If the layer has norms for queries and keys, they are applied to each head before the rotation.
    """
    raise NotImplementedError  # your turn

# %%
mine = check(15, project_qkv=project_qkv)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(15, project_qkv=mine):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    print(llm.generate("The capital of France is", greedy).text)

# %% [markdown]
# **Harder.** Rotate queries and keys in one call, with their heads side by side; the same check accepts it. Is it faster for one token, and for a thousand?

# %% [markdown]
# ## qwen3_logits
#
# *Stretch, 15 points, about 35 minutes.*
#
# Port a model: write the whole forward pass of Qwen3, from its tensors by their names to the logits after each token. Qwen3 is a Llama-type model with two differences. Each head of the queries and of the keys is normalised by RMSNorm before it is rotated; the weights are `model.layers.0.self_attn.q_norm.weight` and `k_norm.weight`, of `head_dim` numbers, and so on for each layer. And `head_dim` x `q_heads` need not be `hidden`. The other tensors have the names that the chapter prints. If `config.tied_embeddings`, the head is the embedding, else it is `lm_head.weight`. There are no biases and no sliding windows. `config` also has `norm_eps` (for all norms), `rope_theta`, `num_layers` and `head_dim`. The parts are in `minigen.model.layers` (`rms_norm`, `rotary_frequencies`, `rotary_tables`, `apply_rotary`, `swiglu`), and `attention(q, k, v)` is in `minigen.model.attention`.

# %%
# exercise: minigen_course.ch15_transformer.reference.qwen3_logits
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig


def qwen3_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], token_ids: list[int]
) -> Float[Tensor, "tokens vocab"]:
    """Return the logits after each token of a text, from a Qwen3 model's tensors by their names."""
    raise NotImplementedError  # your turn


# %%
mine = check(15, qwen3_logits=qwen3_logits)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch15_transformer.lesson import tiny_model

tiny = tiny_model("qwen3", tie_word_embeddings=True)
found = mine(tiny.config, tiny.weights, [3, 1, 4])
print("largest difference from the package:", float((found - tiny.logits([3, 1, 4])).abs().max()))

# %% [markdown]
# **Harder.** Let your function run Llama, Qwen2 (biases for queries, keys and values, and no norms per head) and Mistral (a sliding window), too: the names of the tensors and `config.sliding_windows` say what to do. `tiny_model("llama")`, `tiny_model("qwen2")` and `tiny_model("mistral", sliding_window=3)` in `minigen_course.ch15_transformer.lesson` have weights, and logits to compare with.

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · The whole forward pass
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/15_transformer.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/15_transformer.ipynb)
#
# Chapter 11 read the weights, chapter 12 made tokens of text, chapters 13 and 14 built norm,
# rotation, feed-forward and attention. This chapter puts them together. What comes out is a
# score for each token that could come next.
#
# **Afterwards you can** write the forward pass of a Llama-type model from its tensors, say where
# its parameters and its work are, and look at what each layer believes the next token is.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import time
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from minigen import SamplingParams, hub
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.inspect_model import next_logits, transformer_of

llm = load_model(weights="float32")
spell = lambda token: llm.tokenizer.decode([token])  # noqa: E731

# %% [markdown]
# ## A number that hurts
#
# A model says one thing only: how likely each token is to be the next. To write, ask it, append
# the answer, and ask again with the longer text. Here it writes 20 tokens so.

# %%
lighthouse = "The old lighthouse stood on the"
token_ids = llm.tokenizer.encode(lighthouse)
prompt_length, run_through = len(token_ids), 0
started = time.perf_counter()
for _ in range(20):
    run_through += len(token_ids)
    token_ids.append(int(next_logits(llm, llm.tokenizer.decode(token_ids)).argmax()))
seconds = time.perf_counter() - started
written = llm.tokenizer.decode(token_ids[prompt_length:])
print(lighthouse + written)
print(f"\ntokens written: 20, tokens that went through the model: {run_through}")
measured("seconds", seconds, "s")

# %% [markdown]
# Each new token sends the whole text through all layers again. Chapter 17 ends that waste. First
# see what "through all layers" means, and what one token costs there.
#
# ## The smallest version that works
#
# The tensors by their names, as chapter 11 read them, and the parts of chapters 13 and 14:

# %%
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.model.attention import attention_naive
from minigen.model.layers import (
    apply_rotary,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
config = checkpoint.config
weights = {name: stored.dequantize() for name, stored in checkpoint.tensors.items()}
for name, tensor in list(weights.items())[:10]:
    print(f"{name:<50} {list(tensor.shape)}")
print(f"... {len(weights)} tensors in all")


# %%
def weight(layer_id: int, name: str) -> Tensor:
    return weights[f"model.layers.{layer_id}.{name}.weight"]


def forward(token_ids: list[int]) -> Float[Tensor, "tokens vocab"]:
    """The scores of every next token, after each token of a text."""
    eps, head_dim = config.norm_eps, config.head_dim
    frequencies = rotary_frequencies(head_dim, config.rope_theta)
    cos, sin = rotary_tables(frequencies, torch.arange(len(token_ids)))
    x = weights["model.embed_tokens.weight"][token_ids]
    for i in range(config.num_layers):
        y = rms_norm(x, weight(i, "input_layernorm"), eps)
        q = (y @ weight(i, "self_attn.q_proj").T).unflatten(-1, (-1, head_dim))
        k = (y @ weight(i, "self_attn.k_proj").T).unflatten(-1, (-1, head_dim))
        v = (y @ weight(i, "self_attn.v_proj").T).unflatten(-1, (-1, head_dim))
        mixed = attention_naive(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        x = x + mixed.flatten(-2) @ weight(i, "self_attn.o_proj").T

        y = rms_norm(x, weight(i, "post_attention_layernorm"), eps)
        gate, up = y @ weight(i, "mlp.gate_proj").T, y @ weight(i, "mlp.up_proj").T
        x = x + swiglu(gate, up) @ weight(i, "mlp.down_proj").T
    y = rms_norm(x, weights["model.norm.weight"], eps)
    return y @ weights["model.embed_tokens.weight"].T  # the head is the embedding once more


text_ids = llm.tokenizer.encode(lighthouse)
with torch.inference_mode():
    naive = forward(text_ids)
for score, token in zip(*(each.tolist() for each in naive[-1].topk(5)), strict=True):
    print(f"{spell(token)!r:<10} {score:6.2f}")

# %% [markdown]
# That is all of it: 30 times two steps, each of which reads a normalised `x` and adds to `x`. The
# package must say the same:

# %%
torch.testing.assert_close(naive[-1], next_logits(llm, lighthouse), atol=1e-3, rtol=1e-3)
print("the notebook's logits are the package's")

# %% [markdown]
# ## Why it is slow
#
# Count the arithmetic. torch can count the operations of the products while they run; a
# multiplication and an addition are two. And it can be computed from the model's shape:
# each parameter in a product costs two operations a token, and attention four operations for
# each number of each query head and each token that is looked at (here all of the text: the naive
# version computes what it masks, too).

# %%
from torch.utils.flop_counter import FlopCounterMode

from minigen_course.ch15_transformer.figures import budget_bars, flops_by_context
from minigen_course.lab.cost_model import SHAPES, ModelShape, parameter_budget

shape = ModelShape.of(config)
with torch.inference_mode(), FlopCounterMode(display=False) as counted:
    forward(text_ids)
num_tokens = len(text_ids)
formula = num_tokens * shape.flops(context=num_tokens)
print(f"counted by torch while it ran: {counted.get_total_flops():>14,}")
print(f"computed from the shape:       {formula:>14,}")
assert counted.get_total_flops() == formula

words = written.split()
print(f"\none token:       {shape.flops(num_tokens) / 1e9:.2f} billion operations")
print(f"its parameters:  {shape.parameters / 1e9:.3f} billion")
print(f"one word here:   {20 / len(words) * shape.flops(num_tokens) / 1e9:.2f} billion operations")
print(f"the 20 tokens:   {run_through * shape.flops(num_tokens) / 1e9:.0f} billion operations")

# %% [markdown]
# Two operations for each parameter: that is the rule of thumb for every model of this kind. Where
# are they?

# %%
picture(
    budget_bars(shape, context=num_tokens),
    "Bars of the parameters and of the operations for one token, by kind of tensor.",
)

# %% [markdown]
# The embedding is one table with two uses. Looking a token up in it costs nothing; as the head
# it is multiplied with every token whose successor is wanted. The naive version computes that
# for all tokens, although only the last one's successor is asked for.
#
# ## The idea: a stream that every layer adds to
#
# `x` is never replaced. It begins as the token's own vector, and each half of each layer adds
# something to it. So the norm and the head, made for the end, can be applied to `x` after
# any layer: what would the model say if it had to stop there? This is the *logit lens*.

# %%
from minigen_course.ch15_transformer.figures import SHOWN, lens_grid, look
from minigen_course.lab.inspect_model import recorded_states

model = transformer_of(llm)
capital = "The capital of France is"
states = recorded_states(llm, llm.tokenizer.encode(capital))
print("states:", list(states.shape), "(the embedding and 30 layers, tokens, hidden)\n")
with torch.inference_mode():
    for layer_id in (0, 10, 20, 25, 28, 29, 30):
        chances = model.logits(states[layer_id, -1:])[0].softmax(-1)
        best = int(chances.argmax())
        print(f"after {layer_id:>2} layers: {spell(best)!r:<12} {chances[best]:.0%}")

# %% [markdown]
# The answer comes late. Here is the same for every position of the text, with layers upwards. On
# the right, the last layer's five likeliest tokens are followed from the embedding to the end.

# %%
picture(
    lens_grid(look(llm, capital), spell),
    "A grid of layers and positions: each layer's likeliest next token and its probability.",
)

# %% [markdown]
# Write your own sentence. `shown` switches between each layer's first choice, the chance that it
# gives to the token which the last layer will choose, and how unsure it is (its entropy: 0 bits
# are certainty, 1 bit is a coin's toss). `position` is followed on the right; `every` says how
# many layers lie between two rows.


# %%
def lens(sentence, shown, position, every):
    return lens_grid(look(llm, sentence), spell, shown=shown, every=every, position=position)


explore(
    lens,
    "The logit lens of a sentence of your own, layer by layer.",
    sentence="The opposite of hot is",
    shown=[SHOWN[1], SHOWN[0], SHOWN[2]],
    position=(1, 12, 1, 5),
    every=(1, 6, 1, 2),
)

# %% [markdown]
# The lowest row is mostly the token itself: embedding and head are one table, and a vector that
# nothing was added to scores itself high (a rare token's vector can be longer and score higher).
# Three more things to look for. The first layers guess what is frequent, and later ones correct
# it. The middle layers often hold views that the head cannot read: it was trained for the end
# only. And sureness is no sign of truth: a middle layer may be very sure of a token that the next
# layers drop.
#
# ## The package's version
#
# The same steps. What differs: queries, keys and values are one product instead of three, so are
# gate and up; attention is passed in, so that the same stack will run with every kind of cache;
# and the head is applied by a call of its own, to the rows that matter.

# %%
from minigen.model.transformer import Transformer, project_qkv, run_layer

show(Transformer.__call__, run_layer, project_qkv)

# %%
from minigen.model.attention import attend_packed

with torch.inference_mode():
    attend = attend_packed([num_tokens], config.sliding_windows)
    hidden = model(torch.tensor(text_ids), torch.arange(num_tokens), attend)
    torch.testing.assert_close(model.logits(hidden), naive, atol=1e-3, rtol=1e-3)
print("equal after every token, not only after the last")

# %% [markdown]
# Two implementations by one author can share a mistake. So the package's tests
# (`tests/test_15_transformer.py`) hold it against another. For this model and for small ones of
# the Llama, Qwen2, Qwen3 and Mistral kinds, each feature by itself, they give the same weights to
# the transformers library, and compare all logits.
#
# The tokens of several texts may lie one after another in one pass. Each text has its own
# positions and its own attention; all else treats every token for itself.

# %%
texts = [lighthouse, capital, "Once upon a time", "Water boils at one hundred"]
packed = [llm.tokenizer.encode(text) for text in texts]
lengths = [len(ids) for ids in packed]


@torch.inference_mode()
def run_packed() -> Float[Tensor, "texts vocab"]:
    attend = attend_packed(lengths, config.sliding_windows)
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model(torch.tensor([*chain(*packed)]), positions, attend)
    return model.logits(hidden[torch.tensor(lengths).cumsum(0) - 1])


for text, row in zip(texts, run_packed(), strict=True):
    torch.testing.assert_close(row, next_logits(llm, text), atol=1e-3, rtol=1e-3)
    print(f"{text} ...{spell(int(row.argmax()))}")

# %% [markdown]
# ## What one more token costs
#
# The operations of the products are the same for each token, those of attention grow with what
# is looked at. Choose a model and a context.

# %%
explore(
    lambda model, context: budget_bars(SHAPES[model], context),
    "Parameters and operations of a model by kind of tensor, for the chosen context.",
    model=["Llama-3-8B", *(name for name in SHAPES if name != "Llama-3-8B")],
    context=(1, 131072, 1, 8192),
)

# %%
picture(
    flops_by_context(shape, longest=16384, marked=config.max_positions),
    "Operations for one more token against its context; the line marks this model's longest.",
)
for context in (1, 100, 1000, 8192):
    flops = {each.name: each.flops for each in parameter_budget(shape, context)}
    part = flops["attention's context"]
    all_parts = shape.flops(context)
    print(f"context {context:>5}: {all_parts / 1e9:.2f} GFLOP, attention's {part / all_parts:.1%}")

# %% [markdown]
# ## The measurement again
#
# The notebook's version and the package's, for the four texts: one after another and with scores
# for every token, or in one pass and with scores for the last token of each.


# %%
def best_of(run, times=5):
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


with torch.inference_mode():
    in_turn = best_of(lambda: [forward(ids) for ids in packed])
together = best_of(run_packed)
measured("the notebook's, one after another", in_turn * 1e3, "ms")
measured("the package's, in one pass", together * 1e3, "ms")
measured("ratio", in_turn / together)
saved = 2 * shape.vocab * shape.hidden * (sum(lengths) - len(lengths))
whole = sum(length * shape.flops(length) for length in lengths)
print(f"operations saved by {len(lengths)} rows of scores, not {sum(lengths)}: {saved / whole:.0%}")

# %% [markdown]
# The rest of the gain comes from reading each weight once for four texts. Chapter 17 shows why
# that counts more than the arithmetic.
#
# ## Your turn
#
# Write the step of one layer: attention, then feed-forward. `project_qkv` is there for the
# heads. `check` says the first thing that is wrong; add `hint=1` for a hint.

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
# Thirty calls a step: one for each layer. (Until yours passes, `mine` is the package's own.)

# %%
with using(15, run_layer=mine):
    text = llm.generate(capital, SamplingParams(temperature=0, max_tokens=8)).text
print(text)

# %% [markdown]
# The exercises' own notebook (`minigen workspace`) has a second one: `project_qkv`.
#
# ## What the production engines do beyond this
#
# - **vLLM** and **SGLang** run the same stack with packed tokens, fused QKV and fused gate and up.
#   Adding to `x` and the norm that follows are one kernel, so are SiLU and its multiplication;
#   and decode steps are recorded once as CUDA graphs, to be launched as a whole.
# - **TensorRT-LLM** compiles the model for one kind of GPU: it fuses what stands side by side and
#   chooses among kernels by measuring them.
# - **llama.cpp** (and **Ollama** above it) builds a graph of tensor operations anew for a step and
#   runs it on what the machine has, layer by layer on CPU or GPU.
# - **MLC-LLM** compiles the model with TVM, also for phones and browsers; **ExLlamaV2** has kernels
#   of its own for quantised weights; **DeepSpeed** replaces a Hugging Face model's layers by fused
#   ones.
#
# Two claims need one more measurement. Scores are sums, and sums of floating-point numbers depend
# on their order: a product of one row may be summed in another order than one of many. And
# bfloat16 has 8 binary digits, so that two scores nearer than its step can become the same.

# %%
with torch.inference_mode():
    together = model.logits(states[-1])
    alone = torch.cat([model.logits(row[None]) for row in states[-1]])
    moved = float((together - alone).abs().max())
    best, second = forward(token_ids).topk(2).values.T
step = torch.finfo(torch.bfloat16).eps * 2 ** best.log2().floor()
near = int((best - second < step).sum())
measured("a score, computed alone or with other rows, moves by", moved)
print(f"places where the two best are nearer than a step of bfloat16: {near} of {len(best)}")

# %%
share = {each.name: each.flops for each in parameter_budget(shape, config.max_positions)}
attention = share["attention's products"] + share["attention's context"]
alone = sum(each.flops for each in parameter_budget(shape, 1)[1:3]) / shape.flops(1)
verdicts(
    "15",
    Claim(
        "A token costs two operations for each parameter",
        f"{shape.flops(1) / shape.parameters:.2f} at context 1, "
        f"{shape.flops(config.max_positions) / shape.parameters:.2f} at {config.max_positions:,}",
        "held within bounds",
        "attention's own work grows with the context; and at context 1 it is that near only as "
        "the embedding serves as the head too",
    ),
    Claim(
        "Attention is where the work is",
        f"its share is {alone:.0%} at context 1, {attention / sum(share.values()):.0%} at "
        f"{config.max_positions:,}",
        "held within bounds",
        "feed-forward and head cost the same at every context, and most of it at short ones",
    ),
    Claim(
        "The model's scores (logits) are probabilities",
        f"the five largest after the first text sum to {naive[-1].topk(5).values.sum():.1f}",
        "did not hold",
        "softmax makes them so; chapter 16 has more",
    ),
    Claim(
        "Greedy decoding is deterministic",
        f"a score moves by {mark(moved)} with the batch's shape; at {near} of {len(best)} places "
        "the two best are the same or neighbours in bfloat16",
        "held within bounds",
        "one batch always gives the same; another batch's shape may round otherwise, and flip "
        "a near-tie",
    ),
)

# %% [markdown]
# **Next:** [16 · Choosing the next token](16_sampling.ipynb), which makes one token of the scores.

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
# You know all parts of the model by now: the weights (chapter 11), the tokens (12), norm, rotation and
# feed-forward network (13), attention (14). This chapter joins them. You follow one text through the
# whole model, from six token ids to a score for each of 49,152 possible next tokens. After this chapter,
# no part of this computation is a black box. You also learn to say, from a model's sizes alone, how much
# arithmetic one token costs, and where in the model it is spent.
#
# **Afterwards you can** draw the forward pass of a Llama-type model with all its shapes, write one
# layer and a whole model from its tensors, say why layers add instead of replace, look at what each
# layer believes the next token is, and count the arithmetic of a token for any model.
#
# **You need** chapters 13 and 14. **Time:** about 60 minutes to read and try, about 100 for the
# [exercises](../exercises/15_transformer.ipynb) (the last one, a port to another model, takes a third of
# that).
#
# **Where we are:** token ids → **embedding → 30 × ( norm → attention → add → norm → feed-forward →
# add ) → norm → output head** → next token.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | prefill, decode | compute (prefill) | L3 engine | model size | FLOPs per token |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import math
import time
from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minigen import SamplingParams, hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.model import attention, layers, transformer
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    measured,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch15_transformer import figures as draw
from minigen_course.ch15_transformer import lesson
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.cost_model import SHAPES, ModelShape, config_of, parameter_budget
from minigen_course.lab.inspect_model import (
    log_probabilities,
    perplexity,
    recorded_states,
    transformer_of,
)

llm = load_model(weights="float32", enable_prefix_caching=False)  # no prefix is kept between runs

# %%
chapter_map("model")

# %% [markdown]
# ## A number that hurts: 12 tokens
#
# A language model computes one thing. It takes a text, and returns a number for each token of its
# vocabulary: a [logit](../docs/glossary.md#logits). The higher a token's logit, the more likely is
# this token to come next. To write, a program asks the model, appends one token to the text, and asks
# again with the longer text. This loop is called **autoregressive** decoding. If it always appends the
# token with the highest logit, it is called [greedy](../docs/glossary.md#greedy).
#
# Let the model continue a text of six tokens by 12 more, in the plainest way: each time the whole text
# goes through the whole model, which returns logits after *every* token.
#
# In the code below, `package_logits` runs the package's model on a text; the rest of this chapter builds
# what it calls (`attend_packed` is chapter 14's attention, applied to each of several texts; here there is
# one). Predict first: how many tokens go through the model until 12 are written? Replace `None` by a number.

# %%
guess_tokens = predict("How many tokens go through the model?", None)

# %%
lighthouse = "The old lighthouse stood on the"
prompt_ids = llm.tokenizer.encode(lighthouse)
config, model = llm.config, transformer_of(llm)


@torch.inference_mode()
def package_logits(token_ids: list[int], rows: slice = slice(None)) -> Float[Tensor, "rows vocab"]:
    """Return the logits after some tokens of a text (after all of them by default)."""
    attend = attention.attend_packed([len(token_ids)], config.sliding_windows)
    x = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return model.logits(x[rows])


def write(logits_of, token_ids: list[int], num_tokens: int = 12) -> list[int]:
    """Append the likeliest next token, again and again."""
    token_ids = list(token_ids)
    for _ in range(num_tokens):
        token_ids.append(int(logits_of(token_ids)[-1].argmax()))
    return token_ids


package_logits(prompt_ids)  # a first pass, in which torch and the memory are set up
started = time.perf_counter()
story = write(package_logits, prompt_ids)
plain_seconds = time.perf_counter() - started
run_through = sum(range(len(prompt_ids), len(story)))
print(llm.tokenizer.decode(story))
guess_tokens.compare(run_through)
print(f"rows of logits that were computed: {run_through}; rows that were used: 12")
measured("time", plain_seconds, "s")

# %% [markdown]
# Two things are wasted. 138 tokens go through the model to write 12, because every new token sends
# the old ones through all layers again; chapter 17 ends that. And 138 rows of logits are computed, but
# only the last row of each pass is used. This chapter ends that one, once you know what a row costs.
# First: what does "through the model" mean?
#
# ## The whole forward pass in one picture
#
# Here is everything that happens to six tokens, with the shape of every tensor. `[6, 576]` means six
# rows, one per token, of 576 numbers each.

# %%
picture(
    draw.forward_flow(config, len(prompt_ids)),
    "The forward pass of SmolLM2-135M for six tokens. The residual stream (blue) runs through all 30 "
    "layers. In each layer, attention and the feed-forward network read the normalised stream and add "
    "to it. In each box stands the shape of what leaves it.",
    number="15.1",
)

# %% [markdown]
# Read it from the top:
#
# 1. **Embedding.** Each token id picks its row from a table of 49,152 rows, the **embedding table**.
#    A row has 576 numbers. Nothing is multiplied: it is a lookup.
# 2. **The residual stream.** These six vectors start a stream that runs through the whole model: the
#    **residual stream** $x$. It keeps its shape `[6, 576]` from the first layer to the last. Each layer
#    reads it and adds to it, twice (each time, the way around is called a **residual connection**):
#    - **Attention** reads the stream through an [RMSNorm](../docs/glossary.md#rmsnorm). (A norm *before*
#      each half is called **pre-norm**.) It is the only part where tokens exchange information. There are
#      nine query heads, and three heads for keys and values
#      ([grouped-query attention](../docs/glossary.md#grouped-query-attention), chapter 14). Queries and
#      keys are rotated by position ([rotary embedding](../docs/glossary.md#rotary-embedding), chapter 13).
#    - The **feed-forward network** reads the new stream through a second norm, and treats each token
#      alone. It is wider inside (1,536 numbers), and its activation is
#      [SwiGLU](../docs/glossary.md#swiglu) (chapter 13).
# 3. **Output head.** After the last layer comes one more norm, and a matrix product with 49,152 rows,
#    the **output head** (`lm_head` in most checkpoints). It gives one logit for each token of the
#    vocabulary. The row after the sixth token answers our question; the rows after tokens 1 to 5 say
#    what could follow *them*.
#
# As formulas, for layers $\ell = 1, \dots, L$. An $x$ without the index $t$ has the rows of all tokens,
# because $\mathrm{Att}$ mixes them. Each norm has a weight of its own.
#
# $$x_t^{0} = E_{\mathrm{id}_t}, \qquad
# \tilde x^{\ell} = x^{\ell-1} + \mathrm{Att}_\ell\big(\mathrm{norm}(x^{\ell-1})\big), \qquad
# x^{\ell} = \tilde x^{\ell} + \mathrm{FFN}_\ell\big(\mathrm{norm}(\tilde x^{\ell})\big)$$
#
# Here $\mathrm{Att}_\ell$ is all of attention, from $W_q$ to $W_o$, and $\odot$ multiplies element by element:
#
# $$\mathrm{FFN}(y) = W_{down}\,\big(\mathrm{SiLU}(W_{gate}\, y) \odot W_{up}\, y\big), \qquad
# \mathrm{logits}_t = W_{head}\;\mathrm{norm}(x_t^{L})$$
#
# | symbol | meaning | in the code | here |
# |---|---|---|--:|
# | $n$ | tokens of the text | `tokens` | 6 |
# | $d$ | width of the residual stream ($d_{model}$ in papers) | `hidden` | 576 |
# | $L$ | layers | `num_layers` | 30 |
# | $H_q, H_{kv}$ | query heads, key and value heads | `q_heads`, `kv_heads` | 9, 3 |
# | $d_h$ | numbers per head | `head_dim` | 64 |
# | $f$ | width inside the feed-forward network ($d_{ff}$ in papers) | `ffn` | 1,536 |
# | $V$ | tokens of the vocabulary | `vocab_size` | 49,152 |
# | $s$ | context: tokens that one token attends to, itself included | `context` | 1 to 6 |
# | $E$, $W_{head}$ | embedding table, output head | `embedding`, `head` | |
#
# Chapter 14 wrote $d$ for our $d_h$, and $s$ for a position. The code counts layers from 0, as figure 15.2
# does: layer 11 is $\ell = 12$.
#
# And the same as a table of shapes. A weight of shape `[out, in]` takes rows of `in` numbers to rows of
# `out` numbers:
#
# | step | weight | result | in symbols |
# |---|---|---|---|
# | embedding | `[49152, 576]`, looked up | `[6, 576]` | $n \times d$ |
# | RMSNorm | `[576]` | `[6, 576]` | $n \times d$ |
# | queries, by head | `[576, 576]` | `[6, 9, 64]` | $n \times H_q \times d_h$ |
# | keys, values, by head | `[192, 576]` each | `[6, 3, 64]` each | $n \times H_{kv} \times d_h$ |
# | scores and weights | | `[9, 6, 6]` | $H_q \times n \times n$ |
# | mixed values, by head | | `[6, 9, 64]` | $n \times H_q \times d_h$ |
# | joined, then $W_o$ | `[576, 576]` | `[6, 576]` | $n \times d$ |
# | gate, up | `[1536, 576]` each | `[6, 1536]` each | $n \times f$ |
# | SwiGLU, then $W_{down}$ | `[576, 1536]` | `[6, 576]` | $n \times d$ |
# | output head | `[49152, 576]` | `[6, 49152]` | $n \times V$ |
#
# This kind of model is called **decoder-only**: each token sees itself and the tokens before it (GPT, Llama,
# Qwen, Mistral). An **encoder** such as [BERT](https://arxiv.org/abs/1810.04805) lets every token see all
# others. An **encoder-decoder** such as [T5](https://arxiv.org/abs/1910.10683) has both: its decoder writes,
# and looks at the encoder's result, too.
#
# ## Step by step through the first layer
#
# Now by hand, with the tensors by their names. Chapter 11 read a GGUF file's own names, such as
# `blk.0.attn_q.weight`; `open_checkpoint` gives the tensors the names of Hugging Face, and undoes the file's
# order of rows (chapter 13). Outside the layers there are only two tensors; each layer has nine.

# %%
checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
outside = {
    name: stored.dequantize()
    for name, stored in checkpoint.tensors.items()
    if ".layers." not in name
}
first = {
    name.removeprefix("model.layers.0."): stored.dequantize()
    for name, stored in checkpoint.tensors.items()
    if name.startswith("model.layers.0.")
}
for name, tensor in (outside | first).items():
    print(f"{name:<34} {list(tensor.shape)}")
print(f"{len(checkpoint.tensors)} tensors = {len(outside)} + {config.num_layers} x {len(first)}")

# %% [markdown]
# There is no `lm_head`. This model uses the embedding table a second time as its output head. Such a
# model has **tied embeddings**. The logit of a token is then the dot product of the last, normalised $x$
# with that token's own embedding. ([Press and Wolf 2016](https://arxiv.org/abs/1608.05859) studied this.
# Small models do it to save parameters, large ones rarely do.)
#
# The first half of the first layer:


# %%
def say(what: str, tensor: Tensor) -> None:
    print(f"{what:<46}{list(tensor.shape)}")


x = outside["model.embed_tokens.weight"][prompt_ids]  # a row of the table for each token
say("x: the residual stream", x)

# The attention half reads a normalised copy of x; x itself stays as it is.
y = layers.rms_norm(x, first["input_layernorm.weight"], config.norm_eps)
say("y: x, normalised", y)

# Three products make queries, keys and values; each is cut into heads of 64 numbers.
by_head = {}
for each in "qkv":
    flat = y @ first[f"self_attn.{each}_proj.weight"].T
    by_head[each] = flat.unflatten(-1, (-1, config.head_dim))
    say(f"{each}: {list(flat.shape)}, cut into heads", by_head[each])

# Queries and keys are rotated by their positions 0 to 5; values are not.
turns = layers.rotary_frequencies(config.head_dim, config.rope_theta)
cos, sin = layers.rotary_tables(turns, torch.arange(len(prompt_ids)))
q, k = (layers.apply_rotary(by_head[each], cos, sin) for each in "qk")
say("cos, and sin: one number per token and pair", cos)

# Attention mixes the values; the nine heads are put side by side, and W_o mixes them.
mixed = attention.attention_naive(q, k, by_head["v"])
say("mixed values of the nine heads", mixed)
from_attention = mixed.flatten(-2) @ first["self_attn.o_proj.weight"].T
say("what attention adds to x", from_attention)

theirs = transformer.project_qkv(model.layers[0], y, (cos, sin), config.head_dim, config.norm_eps)
torch.testing.assert_close((q, k, by_head["v"]), theirs, atol=1e-4, rtol=1e-4)
print("The package's project_qkv makes the same queries, keys and values.")

# %% [markdown]
# The second half works in the same way. It starts from $\tilde x$, which is `x + from_attention`, and
# normalises it with `post_attention_layernorm` (a misleading name: it is the norm *before* the
# feed-forward network). Then come three products and SwiGLU, and the result is added again. You write
# this half, and the joining of both.
#
# ## Your turn: one layer
#
# The package stores a layer's weights as a `Layer`. Products with the same input are one matrix there,
# because one large product is usually faster than several small ones:
#
# | in the checkpoint | in a `Layer` | what it is |
# |---|---|---|
# | `input_layernorm` | `attention_norm` | a weight for `rms_norm` |
# | `q_proj`, `k_proj`, `v_proj` | `qkv` | takes 576, returns 576 + 192 + 192; `project_qkv` calls it |
# | `o_proj` | `out` | takes 576, returns 576 |
# | `post_attention_layernorm` | `ffn_norm` | a weight for `rms_norm` |
# | `gate_proj`, `up_proj` | `gate_up` | takes 576, returns 1,536 + 1,536, side by side |
# | `down_proj` | `down` | takes 1,536, returns 576 |
#
# `layer.out(y)` computes a product, `layer.gate_up.parts` has the widths 1,536 and 1,536. `rotation` is the
# pair (cos, sin). Attention is an argument, too: `attend` is a function of q, k and v, so the same layer can
# run on whole texts as here, with a KV cache (chapter 17), or on a cache in blocks (chapter 22).

# %%
task(15, "run_layer")

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
my_layer = check(15, run_layer=run_layer)

# %% [markdown]
# One line puts it into the running engine, which calls it once per layer and step. Until yours has passed,
# the package's own runs.

# %%
capital = "The capital of France is"
with using(15, run_layer=my_layer):
    print(llm.generate(capital, SamplingParams(temperature=0, max_tokens=8)).text)

# %% [markdown]
# ## Thirty layers make a model
#
# A loop over the layers, the last norm, and the head: that is the whole model. Attention here is
# chapter 14's reference version, which computes every step visibly.


# %%
@torch.inference_mode()
def forward(token_ids: list[int]) -> Float[Tensor, "tokens vocab"]:
    """Return the logits after each token, with the layer that stands in `my_layer`."""
    x = model.embedding[token_ids]
    rotation = model.rotation(torch.arange(len(token_ids)))
    sizes = config.head_dim, config.norm_eps
    for layer in model.layers:
        x = my_layer(layer, x, rotation, attention.attention_naive, *sizes)
    ready = layers.rms_norm(x, model.norm, config.norm_eps)
    return ready @ model.embedding.T  # tied: the head is the embedding table once more


found = forward(prompt_ids)
say("logits", found)
print(f"\n{lighthouse} ...")
for logit, token in zip(*(each.tolist() for each in found[-1].topk(5)), strict=True):
    chance = found[-1].softmax(-1)[token]
    print(f"{llm.tokenizer.decode([token])!r:<12} logit {logit:5.2f}   probability {chance:.1%}")

# %% [markdown]
# Logits can be any numbers, and only their differences matter. Softmax turns them into probabilities;
# chapter 16 says what to do with these.
#
# Is the result right? Two programs by one author can share a mistake, so another library is the judge. The
# file `transformers_logits.json` holds 128 logits at each of the six positions, as
# the [transformers](https://github.com/huggingface/transformers) library computes them from the same
# weights (`python -m tests.golden.make_logits` writes the file). It also holds the logarithm of the sum
# of all exponentials at each position: a logit that is much too large among the other 49,024 shows there.

# %%
stored = lesson.stored_logits()
assert stored.prompt == lighthouse
assert stored.token_ids == prompt_ids
difference = stored.difference(found)
print(f"{stored.logits.numel()} logits of transformers {stored.version}")
print("largest difference below 0.001:", difference < 1e-3)
assert difference < 1e-3

# %% [markdown]
# ### The package's version

# %%
reveal(15, run_layer=my_layer)
show(transformer.Transformer.__call__, transformer.Transformer.logits)
torch.testing.assert_close(found, package_logits(prompt_ids), atol=1e-3, rtol=1e-3)
print("The forward pass above and the package agree on all logits.")

# %% [markdown]
# The docstrings call our $x$ **hidden states**. Two things differ from `forward`. Attention comes as
# an argument, `attend`, and is bound to its layer (`partial` fixes the first argument), because every
# layer has its own keys and values to keep. And the head is a call of its own, `logits`, which can be
# given only the rows that matter.
#
# ## The idea: layers add
#
# Why $x + \dots$, and not just the result? The path around each half is called a **residual connection**
# or skip connection ([He et al. 2015](https://arxiv.org/abs/1512.03385) introduced it for images). Try
# the other way: each half *replaces* the stream by what it computed. In code, the other half is switched
# off, and the $x$ that was added is subtracted again.
#
# Predict: measured by the perplexity of a sentence, is the model then better than blind guessing, which
# has a perplexity of 49,152? Write `"yes"` or `"no"`.

# %%
guess_replace = predict("Better than blind guessing without residual connections?", None)

# %%
sentence = "The old lighthouse keeper lost his lamp, so the young sailor gave the keeper a lamp."
ids = llm.tokenizer.encode(sentence)
whole = perplexity(log_probabilities(llm, ids))


def nothing(y: Tensor) -> float:
    return 0.0


def replacing(layer, x, *others):
    """Replace x by what attention adds, then that by what the feed-forward network adds."""
    x = my_layer(replace(layer, down=nothing), x, *others) - x
    return my_layer(replace(layer, out=nothing), x, *others) - x


with using(15, run_layer=replacing):
    without = perplexity(log_probabilities(llm, ids))
print(f"perplexity with residual connections: {whole:.0f}")
print(f"without: about 10 to the power {math.log10(without):.0f}")
guess_replace.compare("yes" if without < config.vocab_size else "no")

# %% [markdown]
# The model without them is far worse than guessing: it is sure of wrong tokens. One caution: this model
# was trained *with* residual connections, so the experiment shows what it relies on, not what another
# model could have learned. In practice, all deep transformers have them, for three reasons:
#
# - **Nothing is lost on the way.** A layer that replaces must copy everything that later layers will
#   need. A layer that adds can leave the rest alone.
# - **Training works.** Training needs the gradient: by how much the error changes when a weight changes. The
#   derivative of $x + g(x)$ is $1 + g'(x)$, so the gradient keeps a direct path of ones through all 60
#   additions. Without the 1 it is a product of 60 factors, which tends to become tiny or huge.
# - **Each layer's task is small.** It only has to say what should *change*.
#
# The third reason can be seen. The left panel compares the length of the stream (the square root of the
# sum of its squares) with that of what each layer adds. The right panel leaves out one layer at a time.

# %%
states = recorded_states(llm, ids)
left_out = lesson.perplexities_without_layers(llm, ids)
picture(
    draw.added_by_layer(states, left_out, whole),
    "Left: length of the residual stream and of each layer's addition, mean of all tokens but the first. "
    "Right: perplexity of the sentence when one layer is left out; both vertical axes are logarithmic.",
    number="15.2",
)
for times in (1.5, 3):
    mild = sum(each < times * whole for each in left_out)
    print(
        f"perplexity less than {times:g} times as high without the layer: {mild} of {len(left_out)}"
    )
better = [layer_id for layer_id, each in enumerate(left_out) if each < whole]
least = left_out.index(min(left_out))
print(f"lower without one of the layers {better}; lowest without layer {least}")
before, after = (states[place, 0].norm().item() for place in (11, 12))
print(f"length of the first token's x before layer 11: about {round(before, -1):,.0f}", end=", ")
print(f"after it: about {round(after, -2):,.0f}")

# %% [markdown]
# Most layers can be left out one at a time, and the model still works, because the stream carries
# everything past the gap ([Veit et al. 2016](https://arxiv.org/abs/1605.06431) found the same in image
# networks). Without the first, the perplexity is thousands of times as high: the first layers probably turn
# a table's row into something that the others can read. The high point
# further right is layer 11: without it, the perplexity is more than thirty times as high. It adds a
# huge vector to the stream of the *first* token, the attention sink of chapter 14
# ([Sun et al. 2024](https://arxiv.org/abs/2402.17762) found such **massive activations** in many models).
# And a few layers do this sentence more harm than good, most of all layer 17: what helps on average need
# not help everywhere.
#
# ## What each layer believes: the logit lens
#
# Since $x$ has the same shape everywhere, the last norm and the head can be applied to it after *any*
# layer. What would the model say if it had to stop there? This is the **logit lens**
# ([nostalgebraist 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)).
#
# Predict: after how many of the 30 layers is *Paris* the likeliest token after *The capital of France
# is*, for the first time?

# %%
guess_layer = predict("After how many layers does Paris lead?", None, within=1.1)

# %%
lens = draw.look(llm, capital)
for layer_id in (0, 10, 20, 26, 27, 28, 29, 30):
    token, chance = lens.likeliest[layer_id, -1], lens.probability[layer_id, -1]
    print(f"after {layer_id:>2} layers: {llm.tokenizer.decode([int(token)])!r:<12} {chance:.0%}")
paris = int(lens.final[-1, 0])
leads = (lens.likeliest[:, -1] == paris).nonzero()[:, 0]
guess_layer.compare(int(leads[0]), "layers")

# %% [markdown]
# The answer comes at the very end. Here is the lens for every position of the text. On the right, the last
# layer's five likeliest tokens are followed from the embedding to the end.


# %%
def spell(token: int) -> str:
    return llm.tokenizer.decode([token])


picture(
    draw.lens_grid(lens, spell),
    "The logit lens of a sentence. Each cell is a layer's likeliest next token and its probability; "
    "yellow means sure. Right: the last layer's five likeliest tokens, and the probability that each layer "
    "gives to them, on a logarithmic axis. What is below one in a million is not drawn.",
    number="15.3",
)

# %% [markdown]
# Four things to look for. The lowest row is mostly the token itself: embedding and head are one table,
# and a vector to which nothing was added has a high dot product with itself. (A longer embedding can score
# even higher: at *France*, that of a special token does.) The first layers guess what is frequent. The
# middle layers often hold vectors that the head cannot read, since it was trained for the last layer only;
# the [tuned lens](https://arxiv.org/abs/2303.08112) trains a small translator for each layer. And certainty
# is no sign of truth: a middle layer may be very sure of a token that later layers drop.
#
# Write your own sentence, of at most 12 tokens. `shown` switches between each layer's first choice, the probability that it
# gives to the token which the last layer will choose, and its entropy (how unsure it is: 0 bits are
# certainty, 1 bit is a coin toss; here yellow means unsure). `position` is followed on the right. `every` says how many layers lie
# between two rows.


# %%
def lens_of(sentence, shown, position, every):
    return draw.lens_grid(
        draw.look(llm, sentence), spell, shown=shown, every=every, position=position
    )


explore(
    lens_of,
    "The probability that each layer gives to the token which the last layer will choose. After “hot is”, "
    "the answer “cold” appears only in the last layers.",
    "15.4",
    sentence="The opposite of hot is",
    shown=[draw.SHOWN[1], draw.SHOWN[0], draw.SHOWN[2]],
    position=(1, 12, 1, 5),
    every=(1, 6, 1, 2),
)

# %% [markdown]
# ## Where the work is: counting FLOPs
#
# A **FLOP** is one floating-point operation: an addition or a multiplication. (FLOP/s, the speed of a
# machine, is something else: chapter 17.) Nearly all of a model's
# FLOPs are in matrix products. Take $W_{gate}$ and one token: each of the 1,536 results is a dot product
# of 576 pairs. That is 576 multiplications and 575 additions; by convention both count as 576. So the
# product costs $1{,}536 \times 576 \times 2 = 1{,}769{,}472$ FLOPs. In general
#
# $$[n, a] \times [a, b]\ \text{costs}\ 2\,n\,a\,b\ \text{FLOPs: two per weight and token.}$$
#
# Attention also has products without weights. The score of a query head with one key is a dot product of
# $d_h$ pairs: $2\,d_h$ FLOPs. Mixing in one value is $d_h$ multiplications and $d_h$ additions. Together
# that is $4\,d_h$ FLOPs for each layer, query head and attended token.
#
# Now estimate, before you count. Llama-3-70B has 70.6 billion parameters, 80 layers and 64 query heads of
# 128 numbers. How many GFLOP ($10^9$ FLOPs) does one token cost that attends to 8,192 tokens?

# %%
guess_flops = predict("GFLOP for one token of Llama-3-70B at a context of 8,192?", None)

# %%
task(15, "token_flops")

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
my_flops = check(15, token_flops=token_flops)

# %% [markdown]
# As a formula, for a token that attends to $s$ tokens:
#
# $$F(s) = \underbrace{2\,L\,d\,(2 H_q d_h + 2 H_{kv} d_h)}_{W_q,\,W_k,\,W_v,\,W_o}
# + \underbrace{4\,L\,H_q d_h\,s}_{\text{scores, mix}}
# + \underbrace{2\,L \cdot 3\,d\,f}_{\text{feed-forward}}
# + \underbrace{2\,V d}_{\text{head}}$$
#
# torch can count the FLOPs of all matrix products while they run. (On AMD's processors the package's
# float32 products are oneDNN's, a library that torch has but does not count; `flops_of_onednn` says how.)
# Count the six tokens of the text, and compare. The two numbers are *equal*, not just close. torch counts matrix products only, as the formula
# does (norms, rotation and softmax are left out). And `attention_naive` computes
# the whole square of $6 \times 6$ scores and masks the later ones afterwards. Every token therefore costs
# what a token with a context of 6 costs, so the whole text costs $6 \cdot F(6)$. A **kernel** (a program for
# one operation, part 3) can skip the masked half; the exercise `prompt_flops` counts that.

# %%
with FlopCounterMode(display=False, custom_mapping=lesson.flops_of_onednn()) as counted:
    forward(prompt_ids)
num_tokens = len(prompt_ids)
formula = num_tokens * my_flops(config, num_tokens)
print(f"counted by torch while it ran: {counted.get_total_flops():>14,}")
print(f"computed from the sizes:       {formula:>14,}")
assert counted.get_total_flops() == formula
for name in SHAPES:
    assert my_flops(config_of(name), 1000) == SHAPES[name].flops(1000)

big = my_flops(config_of("Llama-3-70B"), 8192)
guess_flops.compare(round(big / 1e9), "GFLOP")
for name, context in (("SmolLM2-135M", 6), ("SmolLM2-135M", 8192), ("Llama-3-70B", 8192)):
    flops, parameters = my_flops(config_of(name), context), SHAPES[name].parameters
    print(
        f"{name:<13} context {context:>5,}: {flops / 1e9:6.2f} GFLOP per token for "
        f"{parameters / 1e9:6.3f} billion parameters: {flops / parameters:.2f} per parameter"
    )

reveal(15, token_flops=my_flops)

# %% [markdown]
# Two FLOPs per parameter and token is the rule of thumb for every **dense** model, which uses all its
# parameters for every token. (A **mixture of experts** uses a part, and only these active parameters count.)
# It is exact for the matrices. Attention's scores and mix come on top, so the rule needs a context that is
# short against 12 times the width ([Kaplan et al. 2020](https://arxiv.org/abs/2001.08361)): here that is
# 6,912. (Their formula has 2 where ours has 4. By ours, scores and mix cost as much as all matrices of
# the layers at 3,072 tokens already.) Where are the parameters, and where are the FLOPs?

# %%
shape = ModelShape.of(config)
picture(
    draw.budget_bars(shape, context=num_tokens),
    "Parameters, and FLOPs for one token, by kind of tensor. The feed-forward networks hold most of both.",
    number="15.5",
)

# %% [markdown]
# The embedding table is one matrix with two uses: tied embeddings. As an embedding it is looked up, and
# costs no FLOPs. As the head it is multiplied with every row whose next token is wanted: 21 % of all FLOPs
# here. In a model whose head is a matrix of its own, the embedding's parameters cost nothing (in Llama-3-8B
# they are 6.5 % of all, figure 15.7), so at short contexts such a model needs slightly fewer than two FLOPs
# per parameter.
#
# ### How much of it is attention?
#
# The matrices cost the same for every token. Scores and mix grow with the context.
# "Attention's share" has two meanings, and they differ by the four matrices: **scores and mix only**
# (what has no weights), or the **attention half** (with $W_q$, $W_k$, $W_v$ and $W_o$). Both, for this
# model and for two large ones, drawn with the count that stands in `my_flops`:

# %%
names = ["SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"]
with using(15, token_flops=my_flops):
    share_figure = draw.attention_share(names)
picture(
    share_figure,
    "Attention's share of one token's FLOPs against its context. Solid lines: scores and mix only. "
    "Dashed lines: with the matrices of attention. The grey line is at 8,192 tokens.",
    number="15.6",
)
shares = {}
for name in names:
    for context in (1, 1_000, 8_192):
        parts = {each.name: each.flops for each in parameter_budget(SHAPES[name], context)}
        mix = parts["attention's context"] / sum(parts.values())
        half = mix + parts["attention's products"] / sum(parts.values())
        shares[name, context] = half
        print(
            f"{name:<13} context {context:>5,}: scores and mix {mix:5.1%}, attention half {half:5.1%}"
        )

# %% [markdown]
# The matrices of a layer grow with the square of the width, scores and mix only with the width itself. So
# attention takes over early in this narrow model. Choose a model and a context:

# %%
explore(
    lambda model, context: draw.budget_bars(SHAPES[model], context),
    "Parameters and FLOPs for one token of a model, by kind of tensor. In Llama-3-8B at 8,192 tokens, the "
    "feed-forward networks still cost more than all of attention.",
    "15.7",
    model=["Llama-3-8B", *(name for name in SHAPES if name != "Llama-3-8B")],
    context=(1, 131072, 1, 8192),
)

# %% [markdown]
# ## Only the rows that matter
#
# To choose the next token, one row of logits is enough: the last. The layers still need all rows of $x$,
# because later tokens attend to the keys and values of earlier ones. But the head treats each row alone,
# and can be given the last row only. Each row that is left out saves $2\,V d$ FLOPs.
#
# For the same reason several texts fit into one pass. Their tokens lie one after another, without
# padding (filling short texts up to the longest), as a [packed batch](../docs/glossary.md#packed-batch).
# Each text has its own positions and its own attention. Norms, matrices and feed-forward networks treat
# every token alone, so they need not know where a text ends. The head gets the last row of each text. `attend_packed` is a loop over slices:

# %%
show(attention.attend_packed)
texts = [lighthouse, capital, "Once upon a time", "Water boils at one hundred"]
packed = [llm.tokenizer.encode(text) for text in texts]
lengths = [len(each) for each in packed]
ends = torch.tensor(lengths).cumsum(0)
with torch.inference_mode():
    attend = attention.attend_packed(lengths, config.sliding_windows)
    positions = torch.cat([torch.arange(length) for length in lengths])
    x = model(torch.tensor([*chain(*packed)]), positions, attend)
    in_one_pass = model.logits(x[ends - 1])
say("x of four texts", x)
say("logits after each text", in_one_pass)
for text, each, row in zip(texts, packed, in_one_pass, strict=True):
    torch.testing.assert_close(row, package_logits(each)[-1], atol=1e-3, rtol=1e-3)
    print(f"{text} ...{spell(int(row.argmax()))}")

# %% [markdown]
# ## Your turn: port a model
#
# An engine supports a new model once its forward pass is written. Many new models are Llama with two or
# three differences, so a port is an hour of careful reading, and a comparison of logits.
# [Qwen3](https://arxiv.org/abs/2505.09388), for example, normalises queries and keys per head. Write it:
# the check compares your logits with the package's on small random models. (`minigen workspace` makes a
# folder with all exercises of the course. It holds three more for this chapter: `project_qkv`,
# `prompt_flops` and `run_parallel_layer`.)

# %%
task(15, "qwen3_logits")

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
my_qwen3 = check(15, qwen3_logits=qwen3_logits)

# %%
for tied in (False, True):
    tiny = lesson.tiny_model("qwen3", tie_word_embeddings=tied)
    ported = my_qwen3(tiny.config, tiny.weights, [3, 1, 4, 1, 5])
    torch.testing.assert_close(ported, tiny.logits([3, 1, 4, 1, 5]), atol=1e-4, rtol=1e-4)
print("The port and the package agree, tied and with a head of its own.")
reveal(15, qwen3_logits=my_qwen3)

# %% [markdown]
# ## The measurement again
#
# The 12 tokens from the beginning, by the same loop. Two things are different: the layer that stands in
# `my_layer` runs, and the head computes the last row only.

# %%
with using(15, run_layer=my_layer):
    started = time.perf_counter()
    again = write(lambda token_ids: package_logits(token_ids, slice(-1, None)), prompt_ids)
    last_row_seconds = time.perf_counter() - started
assert again == story
head = 2 * config.vocab_size * config.hidden
all_rows = sum(each * my_flops(config, each) for each in range(len(prompt_ids), len(story)))
last_rows = all_rows - (run_through - 12) * head
print(f"tokens through the model: {run_through}; rows of logits: {run_through} before, 12 now")
print(f"GFLOP: {all_rows / 1e9:.1f} before, {last_rows / 1e9:.1f} now, {all_rows / last_rows:.2f}x")
measured("time before", plain_seconds, "s")
measured("time now", last_row_seconds, "s")
measured("ratio", plain_seconds / last_row_seconds)

# %% [markdown]
# The same text for a fifth less arithmetic. (The FLOPs are counted, and the same everywhere; the times also
# depend on what else this machine was doing.) The other
# waste is still there: 138 tokens go through 30 layers to write 12. Chapter 17 removes it.

# %% [markdown]
# ## Can one prompt give two answers?
#
# Greedy decoding has no randomness. But logits are sums of many products, and the sum of floating-point
# numbers depends on the order of its terms. The order depends on the kernel, and the kernel on the shape of
# the batch: one row may be summed in another order than the same row beside others. Numbers with few digits
# make it worse. In bfloat16 a number has 8 significant binary digits, so two nearly equal logits can change
# places. Here is one request in bfloat16, first alone, then beside another one:

# %%
coarse = load_model(weights="bfloat16", enable_prefix_caching=False)
river, greedy = "The river flows from", SamplingParams(temperature=0, max_tokens=6)
alone = coarse.generate(river, greedy, progress=False).text
beside = coarse.generate([river, "Once upon a time"], [greedy] * 2, progress=False)[0].text
print(f"alone:          ⟨{alone!r}⟩\nbeside another: ⟨{beside!r}⟩")
assert alone == coarse.generate(river, greedy, progress=False).text
print("alone once more: the same")

with torch.inference_mode():
    of_story = recorded_states(llm, story)  # after 0, 1, ... 30 layers
    together = model.logits(of_story[-1])
    one_by_one = torch.cat([model.logits(row[None]) for row in of_story[-1]])
moved = float((together - one_by_one).abs().max())
measured("in float32, a logit of the story moves with the number of rows by up to", moved)

# %% [markdown]
# In bfloat16 the neighbour may change the answer, as the cell shows or does not show on your machine:
# one pair of equal answers is no proof. In float32 the logits move, too, but so little that a choice
# hardly ever changes. With the same batch and **deterministic** kernels (the same input always gives the
# same numbers), the answer is always the same. On GPUs, some kernels add parts of one sum in whatever
# order they finish, and a library that tunes itself may choose another kernel on another day. Then even
# the same batch can give two answers. The usual cause is the batch, though: [He
# 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) finds that servers
# give two answers mainly because other users' requests change the batch, and shows how kernels can be
# made to give the same result for every batch shape.
#
# ## Claims
#
# Statements that one often hears or reads about the forward pass, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
ratios = {s: my_flops(config, s) / shape.parameters for s in (1, config.max_positions)}
large = my_flops(config_of("Llama-3-70B"), 8192) / SHAPES["Llama-3-70B"].parameters
final = {}
for depth in (15, 25):
    with torch.inference_mode():
        guesses = model.logits(of_story[depth]).argmax(-1)
    final[depth] = float((guesses == together.argmax(-1)).float().mean())
verdicts(
    "15",
    Claim(
        "A token costs about two FLOPs per parameter",
        f"{ratios[1]:.2f} at a context of 1, {ratios[config.max_positions]:.1f} at 8,192; "
        f"Llama-3-70B: {large:.1f} at 8,192",
        within(ratios[config.max_positions], 1.8, 2.2),
        "the matrices cost exactly that; scores and mix come on top. Kaplan et al. 2020 state the "
        "condition: a width much larger than a twelfth of the context (here 683, and the width is 576)",
    ),
    Claim(
        "Attention is where a transformer's arithmetic is",
        "its half at 8,192 tokens: "
        + ", ".join(f"{shares[name, 8192]:.0%} of {name}" for name in names),
        holds(all(shares[name, 8192] > 0.5 for name in names)),
        "in wide models the feed-forward networks cost more, up to twice (8B) or four times (70B) this context",
    ),
    Claim(
        "The guess approaches the final one gradually, often coming close long before the last layer",
        f"the lens shows the final choice at {final[15]:.0%} of the positions after 15 of 30 layers, at "
        f"{final[25]:.0%} after 25",
        holds(final[15] > 0.5),
        "the source looked at GPT-2. In this model the lens shows the choice late; the lens reads middle "
        "layers badly, and a tuned lens could show more",
        source="[nostalgebraist 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)",
    ),
    Claim(
        "Greedy decoding is deterministic",
        "answers to one request in bfloat16, alone and beside another: "
        f"⟨{'one' if alone == beside else 'two'}⟩",
        NOT_TESTED if alone == beside else holds(False),
        "it is with the same batch and deterministic kernels; otherwise two nearly equal logits can "
        "change places. One pair of equal answers is no proof",
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - A model turns token ids into logits: embedding, 30 layers, a norm, and the output head.
# - The residual stream keeps its shape `[tokens, hidden]` from beginning to end. Attention and the
#   feed-forward network of each layer read it through a norm, and add to it.
# - Adding keeps what earlier layers wrote, unless a layer subtracts it. Without most single layers the
#   model still works; without the first it does not.
# - The logit lens applies the output head to the stream after any layer. In this model the answer often
#   appears only in the last layers.
# - A matrix costs two FLOPs per weight and token. Attention adds four per layer, query head, head dimension
#   and attended token. For six tokens, torch counts exactly what the formula says.
# - Feed-forward networks hold most parameters, and most FLOPs at short contexts. Attention overtakes them at
#   long contexts, in wide models later than in narrow ones.
# - Only the last row of each text needs logits, and several texts can be packed into one pass.
# - Logits differ from those of another library by less than 0.001, but not by nothing. Where two are
#   nearly equal, the batch can decide which token wins.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. Two texts of 5 and 7 tokens are packed into one pass of SmolLM2-135M. What are the shapes of
# x, the queries, and the logits that the engine needs?</summary>
# x is [12, 576], the queries are [12, 9, 64], and the logits are [2, 49152]: one row for the last token of
# each text.</details>
#
# <details><summary>2. A model has 8 billion parameters. About how many FLOPs does a prompt of 1,000 tokens
# cost, and what does this estimate leave out?</summary>
# About 2 × 8 × 10⁹ × 1,000 = 1.6 × 10¹³ FLOPs, or 16 TFLOP (10¹² FLOPs). It leaves out attention's scores
# and mix (a few per cent here). It counts the head for every token, although one row is enough, and an
# embedding table (6.5 % of Llama-3-8B) that costs nothing.</details>
#
# <details><summary>3. Why can the logit lens read the stream after any layer, and why is its picture of the
# middle layers not trustworthy?</summary>
# The stream has the same shape after every layer, so the head fits. But the head was trained to read the
# stream after the last layer only; earlier layers may write in a form that only later layers can
# read.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** and **[SGLang](https://github.com/sgl-project/sglang)**
#   run the same stack on packed tokens, with one matrix for Q, K and V and one for gate and up, as
#   here. The addition to $x$ and the
#   norm that follows are one kernel, as are SiLU and its multiplication
#   ([kernel fusion](../docs/glossary.md#kernel-fusion)). [Decode](../docs/glossary.md#decode) steps are
#   recorded as [CUDA graphs](../docs/glossary.md#cuda-graph), one for each of some batch sizes, and launched
#   as a whole. Both have a mode
#   whose results do not depend on the batch ([vLLM](https://docs.vllm.ai/en/latest/features/batch_invariance/),
#   [SGLang](https://docs.sglang.io/advanced_features/deterministic_inference.html)), with some GPUs and
#   kernels only.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** runs a PyTorch model with NVIDIA's own fused
#   kernels. It used to build an engine for one kind of GPU; that way
#   [was removed](https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html).
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)** (and **Ollama**, which uses its libraries) builds a
#   graph of tensor operations for a batch, [uses it again](https://github.com/ggml-org/llama.cpp/pull/14482)
#   for the next one if the shapes are the same, and runs it layer by layer on CPU or GPU, wherever the
#   layer's weights are.
#
# ## Further reading
#
# - [LLaMA: Open and Efficient Foundation Language Models](https://arxiv.org/abs/2302.13971), Touvron et al.
#   2023: the model family of this chapter, in section 2.
# - [A Mathematical Framework for Transformer Circuits](https://transformer-circuits.pub/2021/framework/index.html),
#   Elhage et al. 2021: the residual stream as a channel between layers.
# - [Transformer Inference Arithmetic](https://kipp.ly/transformer-inference-arithmetic/), kipply 2022:
#   FLOPs, bytes and latency of a token, by hand.
# - [On Layer Normalization in the Transformer Architecture](https://arxiv.org/abs/2002.04745), Xiong et al.
#   2020: why the norm stands before each half, and not after the addition.
# - [vLLM's llama.py](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama.py): the
#   same forward pass in a production engine.
#
# **Next:** [16 · Choosing the next token](16_sampling.ipynb), which turns the logits into one token.

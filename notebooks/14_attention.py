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
# # 14 · Attention: causal, with grouped heads
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/14_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/14_attention.ipynb)
#
# Chapter 13 turned queries and keys by their positions. Now they meet. Attention is the only place
# in the model where one token learns of another; all else treats each token alone. It is also
# what must be kept of each token for as long as the text goes on, and so what fills a server's
# memory.
#
# **Afterwards you can** write attention with grouped heads, a mask and a window, say why softmax
# subtracts a maximum, read a head's heat map, and compute what a token's keys and values weigh.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import math

import torch

from minigen import SamplingParams
from minigen.model import attention as package
from minigen_course import Claim, check, load_model, measured, show, using, verdicts
from minigen_course.ch14_attention import figures as draw_heads
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.inspect_model import (
    head_scores,
    log_probabilities,
    perplexity,
    recorded_heads,
    recorded_states,
)

# Nothing is kept from run to run, and prompts go in pieces of 16 tokens.
llm = load_model(weights="float32", enable_prefix_caching=False, max_num_batched_tokens=16)

# %% [markdown]
# ## A number that hurts
#
# Attention makes *scores* of queries and keys, and softmax makes weights of scores: exp of each,
# divided by the sum of all. Here is every row of scores that the model computes for one
# sentence, by its largest score. Of a score beyond the logarithm of the largest float16, float16
# cannot hold the exponential. Write your own sentence, if you like.

# %%
sentence = "The old lighthouse keeper lost his lamp, so the young sailor gave the keeper a lamp."
ids = llm.tokenizer.encode(sentence)
tokens = [llm.tokenizer.decode([token]) for token in ids]
recorded = recorded_heads(llm, ids)  # q, k and v of each layer
scores = torch.stack([head_scores(layer) for layer in recorded])
largest = scores.amax(-1).flatten()
limit = math.log(torch.finfo(torch.float16).max)
beyond = int((largest > limit).sum())
print("{} layers x {} heads x {} tokens".format(*scores.shape[:3]))
print(f"the limit of float16: {limit:.1f}; the largest score: {largest.max():.1f}")
print(f"rows of which float16 cannot hold the exponential: {beyond} of {len(largest):,}")
picture(
    draw_heads.overflow(largest, llm.config.head_dim),
    "Histogram of each row's largest score, and where its exponential is infinite.",
)

# %% [markdown]
# They are few, and so are those that overflow float32 where the division of scores (more of it
# below) is left out. Infinity divided by infinity is nan, though, and nan spreads to all that
# follows it. The same model with a softmax that is computed in float16 as the formula says:


# %%
def attention_with(softmax, scale=None, mask=True):
    """Attention written out, with the softmax, the scale and the mask of your choice."""

    def part(q, k, v, window=None):
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        found = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        if mask:
            found = found.masked_fill(~package.causal_mask(len(q), len(k), window), -torch.inf)
        return torch.einsum("hqk,khd->qhd", softmax(found), v)

    return part


def softmax_half(scores: torch.Tensor) -> torch.Tensor:
    powers = scores.half().exp()
    return (powers / powers.sum(-1, keepdim=True)).float()


scaled = perplexity(log_probabilities(llm, ids))
print(f"perplexity of the sentence: {scaled:.1f}")
with using(14, attention=attention_with(softmax_half)):
    print(f"with this softmax: {perplexity(log_probabilities(llm, ids))}")

# %% [markdown]
# ## The smallest version that works
#
# One head, one token that looks back: a score for every key, weights that sum to one, and the mean
# of the values under these weights. In plain Python:


# %%
def softmax_naive(scores: list[float]) -> list[float]:
    powers = [math.exp(each - max(scores)) for each in scores]
    return [each / sum(powers) for each in powers]


def look_back(
    query: list[float], keys: list[list[float]], values: list[list[float]]
) -> tuple[list[float], list[float]]:
    """The weights of all keys, and the values mixed by them."""
    scores = [
        sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in keys
    ]
    weights = softmax_naive(scores)
    mixed = [
        sum(weight * value[i] for weight, value in zip(weights, values, strict=True))
        for i in range(len(values[0]))
    ]
    return weights, mixed


LAYER, HEAD, TOKEN = 16, 0, len(ids) - 4
one = recorded[LAYER]
query = one.q[TOKEN, HEAD].tolist()
keys, values = one.k[: TOKEN + 1, 0].tolist(), one.v[: TOKEN + 1, 0].tolist()
weights, mixed = look_back(query, keys, values)
ranked = sorted(zip(weights, range(TOKEN + 1), strict=True), reverse=True)[:3]
print(f"token {TOKEN}, {tokens[TOKEN]!r}, looks at")
for weight, place in ranked:
    print(f"  {weight:.2f}  token {place}, {tokens[place]!r}")

# %% [markdown]
# **The maximum is subtracted first.** exp(s - m) / sum of exp(s - m) is the same number for any m,
# since exp(-m) stands above and below the line. With m the largest score no power is above 1.
#
# **The division by the square root of head_dim** keeps scores of long heads from growing: a sum
# of 64 products is about 8 times as large as one. Leave it out, and softmax all but picks one key.
#
# One worked example is passed from guide to guide: scores .8, .9 and .3 are said to give weights
# .35, .55 and .10.

# %%
found = softmax_naive([0.8, 0.9, 0.3])
print("softmax:", [round(each, 2) for each in found])
told = (0.35, 0.55, 0.10)
first_step = math.log(told[1] / told[0]) / (0.9 - 0.8)
second_step = math.log(told[0] / told[2]) / (0.8 - 0.3)
print(f"the told weights would need scores times {first_step:.1f}, and times {second_step:.1f}")

stable = lambda scores: scores.softmax(-1)  # noqa: E731
with using(14, attention=attention_with(stable, scale=1.0)):
    unscaled = perplexity(log_probabilities(llm, ids))
print(f"perplexity without the division: about {round(unscaled, -2):,.0f}")

# %% [markdown]
# No single scale gives these weights; they are no softmax of these scores.
#
# ## Why it is wrong: the future leaks
#
# A token must not look at later ones: when the model writes, they are not there yet. `look_back`
# was given only the keys up to its token. Computed for all tokens at once, a *mask* must say so.
# First without: one token at the end is exchanged. What do the tokens before it notice?

# %%
other = [*ids[:-2], llm.tokenizer.encode(" hat")[0], ids[-1]]
for name, masked in {"with the mask": True, "without": False}.items():
    with using(14, attention=attention_with(stable, mask=masked)):
        before, after = recorded_states(llm, ids)[-1], recorded_states(llm, other)[-1]
        likely = perplexity(log_probabilities(llm, ids))
    leaks = not torch.allclose(before[:-2], after[:-2], atol=1e-2)
    assert leaks is not masked
    print(f"{name}: earlier states changed: {leaks}; perplexity {likely:.1f}\n")
    if not masked:
        cheated = likely

# %% [markdown]
# Look at the perplexity without the mask. It is not a better model: it reads the answers. What it
# writes shows it, for when it writes there is nothing to read:

# %%
opening = "Once upon a time there was a"
greedy = SamplingParams(temperature=0, max_tokens=16)
print("with the mask:", repr(llm.generate(opening, greedy).text))
with using(14, attention=attention_with(stable, mask=False)):
    print("without:      ", repr(llm.generate(opening, greedy).text))

# %% [markdown]
# ## The idea: a triangle
#
# The scores of later keys become minus infinity, of which exp is 0. The same function serves a
# whole prompt, a piece of it, one new token, and models whose tokens see only a *window*.

# %%
picture(
    draw_heads.masks(
        {
            "a prompt": package.causal_mask(6, 6),
            "its last piece": package.causal_mask(2, 6),
            "one new token": package.causal_mask(1, 6),
            "a window of 3": package.causal_mask(6, 6, window=3),
        }
    ),
    "Four masks as tables of queries and keys: blue may be seen, grey may not.",
)

# %% [markdown]
# ## What real heads look at
#
# Four of the model's heads on your sentence: found by their numbers, not by hand. One looks at
# the token before, as its angles said in chapter 13. One looks at the first token always.

# %%
looks = scores.softmax(-1)  # layers, heads, queries, keys
habits = {
    "the token before": looks.diagonal(-1, -2, -1).mean(-1),
    "the first token": looks[..., 1:, 0].mean(-1),
    "itself": looks.diagonal(0, -2, -1)[..., 1:].mean(-1),
    "far and wide": -(looks * looks.clamp(min=1e-9).log()).sum(-1).mean(-1),  # entropy
}
chosen = {}
for name, habit in habits.items():
    layer_id, head = divmod(int(habit.argmax()), llm.config.q_heads)
    chosen[f"{name}\nlayer {layer_id}, head {head}"] = looks[layer_id, head]
picture(
    draw_heads.head_maps(chosen, tokens),
    "Weights of four heads as heat maps: to the token before, to the first, to itself, to many.",
)
sink = float(looks[..., 1:, 0].mean())
print(f"weight on the first token, mean of all heads and tokens: {sink:.0%}")

# %% [markdown]
# Softmax must spend its weight on something, even where a head has nothing to say. The model
# has learned to park it on the first token: an *attention sink*. It was this token that chapter 13
# lost to float16.
#
# ## Drag it
#
# Choose a layer and a head, and write a sentence of your own. In layer 18, head 6 rests on the
# first token until something comes back: then it looks at what *followed* it the first time. This
# is how the model of chapter 13 read its story again with so little doubt.


# %%
def heat(sentence, layer, head):
    ids = llm.tokenizer.encode(sentence)
    weights = head_scores(recorded_heads(llm, ids)[layer])[head].softmax(-1)
    words = [llm.tokenizer.decode([token]) for token in ids]
    kv_head = head // (llm.config.q_heads // llm.config.kv_heads)
    said = f"layer {layer}, query head {head}, which looks through KV head {kv_head}"
    return draw_heads.head_map(weights, words, said)


explore(
    heat,
    "One head's weights on a sentence, as a heat map.",
    sentence="Marla Venn sold three geese to Otto Quill, and Marla Venn",
    layer=(0, llm.config.num_layers - 1, 1, 18),
    head=(0, llm.config.q_heads - 1, 1, 6),
)

# %% [markdown]
# ## Grouped heads: what a token keeps
#
# Queries are needed once. Keys and values are needed by every later token, so they are kept, of
# every token, in every layer. *Multi-query* attention keeps one KV head for all query heads,
# *grouped-query* attention a few: query head h looks through KV head h // (q_heads / kv_heads).

# %%
picture(
    draw_heads.sharing(
        {"multi-head": (9, 9), "grouped, as here": (9, 3), "multi-query": (9, 1)},
    ),
    "Nine query heads above the KV heads that they share: nine, three and one.",
)

# %%
models = {  # layers, query heads, KV heads, head_dim
    "SmolLM2-135M": (30, 9, 3, 64),
    "Llama-3-70B": (80, 64, 8, 128),
    "16 heads to 1": (32, 16, 1, 128),
}
kept, saved = {}, {}
for name, (num_layers, q_heads, kv_heads, head_dim) in models.items():
    each_head = 2 * num_layers * head_dim * 2  # K and V, 2 bytes a number
    kept[name] = {"multi-head": each_head * q_heads, "its own": each_head * kv_heads}
    saved[name] = kept[name]["multi-head"] / kept[name]["its own"]
    print(
        f"{name:<14}{kept[name]['its own']:>10,} bytes a token, {saved[name]:.0f}x less than with"
    )
    print(f"{'':<14}{kept[name]['multi-head']:>10,} bytes of as many KV heads as query heads")
assert kept["SmolLM2-135M"]["its own"] == llm.config.kv_bytes_per_token
picture(draw_heads.kv_bars(kept), "Bytes that one token keeps, with full and with grouped heads.")

# %% [markdown]
# ## The package's version
#
# Twice: once written out, as the oracle of all that comes later, and once through torch's fused
# function, which never makes the matrix of scores (chapter 32 shows how).

# %%
show(package.attention_naive, package.attention)

# %%
ours = package.attention(one.q, one.k, one.v)
torch.testing.assert_close(ours, package.attention_naive(one.q, one.k, one.v), atol=1e-5, rtol=1e-5)
torch.testing.assert_close(ours[TOKEN, HEAD], torch.tensor(mixed), atol=1e-5, rtol=1e-5)
query_first, key_first, value_first = (
    each.transpose(0, 1)
    for each in (one.q, one.k.repeat_interleave(3, dim=1), one.v.repeat_interleave(3, dim=1))
)
theirs = torch.nn.functional.scaled_dot_product_attention(
    query_first, key_first, value_first, is_causal=True
)
torch.testing.assert_close(ours, theirs.transpose(0, 1), atol=1e-5, rtol=1e-5)
big = package.attention(100 * one.q, one.k, one.v)
print("package, plain Python and torch agree; at 100 times the scores all is finite:", end=" ")
print(bool(big.isfinite().all()))

# %% [markdown]
# ## The measurement again
#
# At the top it was nan. Here are the same rows in float16 with the maximum subtracted. And what
# tensors buy over plain Python, for the tokens and heads of one layer:

# %%
import time


def by_hand(layer) -> None:
    for head in range(layer.q.shape[1]):
        keys, values = layer.k[:, head // 3].tolist(), layer.v[:, head // 3].tolist()
        for token in range(len(layer.q)):
            look_back(layer.q[token, head].tolist(), keys[: token + 1], values[: token + 1])


def seconds(work, times: int) -> float:
    work()
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


slow = seconds(lambda: by_hand(one), 1)
fast = seconds(lambda: package.attention(one.q, one.k, one.v), 50)
measured("the same attention, times faster", slow / fast)
for name, softmax in {"as the formula says": softmax_half, "stable": torch.nn.Softmax(-1)}.items():
    spoilt = softmax(scores.half()).isnan().any(-1).sum()
    print(f"{name}: {spoilt} of {len(largest):,} rows are nan")

# %% [markdown]
# ## Your turn
#
# Twice. First the mask, then all of attention with grouped heads and a window: for one token, for
# a prompt, and for a piece of one. Begin with a repeated K and V; `package.causal_mask` is there
# to be used. `hint=1` in `check` helps.

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
my_mask = check(14, causal_mask=causal_mask)

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
    """Compute the same as `attention_naive` with torch's scaled_dot_product_attention."""
    raise NotImplementedError  # your turn


# %%
my_attention = check(14, attention=attention)

# %% [markdown]
# One line puts each into the running engine. (Until they pass, they are the package's own.) The
# sentence goes through your function in pieces, and the second one needs the mask; every new
# token then looks back alone, in a function that chapter 22 builds.

# %%
with using(14, causal_mask=my_mask):
    print(llm.generate(sentence, greedy).text)
with using(14, attention=my_attention):
    print(llm.generate(sentence, greedy).text)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM**, **SGLang** and **TGI** call FlashAttention or FlashInfer, which go through the keys in
#   tiles and keep a running maximum and sum, so that scores never reach the GPU's main memory.
# - **TensorRT-LLM** has kernels of its own, among them one (XQA) for one new token with grouped
#   heads, which reads a KV head once for all its query heads.
# - **llama.cpp** (and **Ollama** above it) and **ExLlamaV2** can keep K and V in 8 or 4 bits.
# - **MLC-LLM** compiles its attention kernels for the device at hand, phones and browsers too.
# - **DeepSpeed** can split one long sequence's attention by heads over several GPUs (Ulysses).
# - DeepSeek's models keep one short vector a token, of which all heads' K and V are made again
#   (multi-head latent attention). StreamingLLM keeps the sink and a window, and forgets the rest.

# %%
verdicts(
    "14",
    Claim(
        "Scores .8, .9, .3 give attention weights .35, .55, .10",
        "softmax gives " + ", ".join(f"{each:.2f}" for each in found),
        "did not hold",
        "no scale gives the told weights either, and the division by sqrt(head_dim) is missing",
    ),
    Claim(
        "Grouped heads cut KV memory by q_heads / kv_heads, 16 heads to 1 by 16",
        ", ".join(f"{name}: {times:.0f}x" for name, times in saved.items()),
        "held",
        "K and V are all that is kept, and their size follows the number of KV heads",
    ),
    Claim(
        "The division by sqrt(head_dim) is a detail",
        f"perplexity {scaled:.0f} with it, about {round(unscaled, -2):,.0f} without",
        "did not hold",
        "scores 8 times as large make softmax pick one key; the model was trained otherwise",
    ),
    Claim(
        "A lower perplexity is a better model",
        f"{cheated:.1f} without the causal mask",
        "held within bounds",
        "only if no token can see what it is asked for",
    ),
    Claim(
        "Attention weights show what a word refers to",
        f"{sink:.0%} of the weight rests on the first token",
        "held within bounds",
        "some heads do; most of the weight is parked where it does no harm",
    ),
)

# %% [markdown]
# **Next:** [15 · The whole forward pass](15_transformer.ipynb), where everything so far is put
# together.

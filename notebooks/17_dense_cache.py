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
# # 17 · Prefill, decode, and the memory wall
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/17_dense_cache.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/17_dense_cache.ipynb)
#
# You send a long question to a chat model. For a moment nothing happens, and after that the words
# come one by one, at an even pace. Why is there a pause, and why is the pace even? Why does the
# same model run at 5 words per second on one machine and at 100 on another? Chapter 15 sent the
# whole text through the model for every new token. This chapter keeps what does not change, and
# computes only what is new. That removes nearly all of the arithmetic, and then another limit
# appears: the time to read the model's weights from memory. From two numbers of a machine, its
# memory bandwidth and its arithmetic speed, you can bound the pace of any model on any card. How near
# a step comes to that bound must be measured.
#
# **Afterwards you can** build a KV cache, say exactly what it saves and what it does not, measure a
# machine's two limits, draw its roofline, and predict the least time of a token for a model and a card.
#
# **You need** chapter 14 (keys, values, the causal mask) and chapter 15 (the forward pass, and what
# a FLOP is). **Time:** about 60 minutes to read and try, about 105 for the
# [exercises](../exercises/17_dense_cache.ipynb).
#
# **Where we are:** prompt → **prefill** (all its tokens in one step) → first token → **decode** (one
# token per step, with the KV cache) → next tokens.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill, decode | compute (prefill), memory bandwidth (decode) | L3 engine | bits per weight, batch size | inter-token latency |
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
from functools import partial

import torch

from minigen import SamplingParams
from minigen.model.attention import attend_packed, attention
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    mark,
    measured,
    predict,
    reveal,
    task,
    using,
    verdicts,
)
from minigen_course.ch17_dense_cache import figures as draw
from minigen_course.ch17_dense_cache import lesson
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.roofline import crossing, roofline, step_time
from minigen_course.lab import cost_model as cost
from minigen_course.lab.inspect_model import transformer_of

llm = load_model(weights="float32")
model, windows = transformer_of(llm), llm.config.sliding_windows
prompt = "The history of the sea begins long before the first ships, when"
prompt_ids = llm.tokenizer.encode(prompt)
spell = lambda token: llm.tokenizer.decode([token])  # noqa: E731

# %%
chapter_map("KV cache", "runner")

# %% [markdown]
# ## A number that hurts
#
# Let the model write 16 tokens as chapter 15 did: append each token to the text, and send the whole
# text through the model again.
#
# The prompt has 13 tokens. Predict: how many tokens go through the model in all 16 steps together?
# (Replace `None` by your number, and run the cell again.)

# %%
guess_tokens = predict("How many tokens go through the model?", None, within=1.5)


# %%
def next_token_again(token_ids: list[int]) -> int:
    """Return the most likely next token; the whole text is computed again."""
    attend = attend_packed([len(token_ids)], windows)
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return int(model.logits(hidden[-1:]).argmax())


@torch.inference_mode()
def write(next_token, token_ids: list[int], count: int = 16) -> tuple[list[int], list[float]]:
    """Return the text with `count` more tokens, and the seconds that each of them took."""
    token_ids, seconds = list(token_ids), []
    for _ in range(count):
        started = time.perf_counter()
        token_ids.append(next_token(token_ids))
        seconds.append(time.perf_counter() - started)
    return token_ids, seconds


text_again, seconds_again = write(next_token_again, prompt_ids)
_, seconds_once_more = write(next_token_again, prompt_ids)  # the faster of two runs, step by step
seconds_again = list(map(min, seconds_again, seconds_once_more))
print(llm.tokenizer.decode(text_again))
lengths = range(len(prompt_ids), len(text_again))  # of the text at the beginning of each step
tokens_again = sum(lengths)
guess_tokens.compare(tokens_again)
measured("\n16 tokens", sum(seconds_again), "s")
measured("the first five, each", 1e3 * sum(seconds_again[:5]) / 5, "ms")
measured("the last five, each", 1e3 * sum(seconds_again[-5:]) / 5, "ms")

# %% [markdown]
# For 16 new tokens the model computed 328. And it gets worse with every token: the longer the text,
# the longer the next token takes.
#
# ## Why it is wasteful
#
# What did the model compute twice? Compare the keys of all layers in two runs: one on the prompt,
# and one on the prompt with one more token.


# %%
@torch.inference_mode()
def keys_of(token_ids: list[int]) -> torch.Tensor:
    """Return the keys of all layers, [layers, tokens, kv_heads, head_dim]."""
    attend, keys = attend_packed([len(token_ids)], windows), []

    def remember(layer_id, q, k, v):
        keys.append(k)
        return attend(layer_id, q, k, v)

    model(torch.tensor(token_ids), torch.arange(len(token_ids)), remember)
    return torch.stack(keys)


shorter, longer = keys_of(text_again[:13]), keys_of(text_again[:14])
torch.testing.assert_close(longer[:, :13], shorter, atol=1e-3, rtol=1e-3)
print("shapes:", list(shorter.shape), list(longer.shape))
print("The keys of the first 13 tokens are equal in both runs up to rounding, in all 30 layers.")

# %% [markdown]
# The causal mask is the reason. A token looks only at itself and at earlier tokens, so a later token
# changes nothing in it, in any layer. Everything that the second run computed for the first 13 tokens
# was already known.
#
# ### Four tokens by hand
#
# Take the text *the cat sat*, and add *on*. Each row is a token that looks, each column is a token
# that it looks at:
#
# | | the | cat | sat | on |
# |---|---|---|---|---|
# | the | known | | | |
# | cat | known | known | | |
# | sat | known | known | known | |
# | **on** | **new** | **new** | **new** | **new** |
#
# Without a cache, the step for *on* computes all ten scores. Six of them were computed in the step
# before. Only the last row is new: one query, compared with four keys. For this row the model needs
# the **keys** of the earlier tokens, to compare with, and their **values**, to mix. It needs nothing
# else of them: not their queries, not their residual stream, not their logits.
#
# ## The smallest version that works
#
# So keep the keys and values of each layer, and give the model only the tokens that are new. This
# store is the [KV cache](../docs/glossary.md#kv-cache). The smallest version appends with
# `torch.cat`:


# %%
class GrowingCache:
    """The keys and values of a text so far, and their number of tokens."""

    def __init__(self):
        self.kept, self.num_tokens = {}, 0

    def attend(self, layer_id, q, k, v):
        if layer_id in self.kept:
            old_k, old_v = self.kept[layer_id]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.kept[layer_id] = k, v
        return attention(q, k, v, windows[layer_id])

    def next_token(self, token_ids: list[int]) -> int:
        new = torch.tensor(token_ids[self.num_tokens :])
        hidden = model(new, torch.arange(self.num_tokens, len(token_ids)), self.attend)
        self.num_tokens = len(token_ids)
        return int(model.logits(hidden[-1:]).argmax())


cache = GrowingCache()
text_cached, seconds_cached = write(cache.next_token, prompt_ids)
_, seconds_once_more = write(GrowingCache().next_token, prompt_ids)
seconds_cached = list(map(min, seconds_cached, seconds_once_more))
assert text_cached == text_again
print("The cache gives the same 16 tokens.")
print(f"Tokens through the model: {cache.num_tokens} instead of {tokens_again}.")
measured("16 tokens", sum(seconds_cached), "s")
picture(
    draw.by_step(
        {
            "all computed again": [1e3 * each for each in seconds_again],
            "with a cache": [1e3 * each for each in seconds_cached],
        },
        "time of one step (ms)",
        "Without a cache a step grows with the text, with one it does not",
    ),
    "The time of each step. Without a cache it grows with the text. With a cache, the first step "
    "computes the prompt, and all further steps compute one token. Single peaks are probably other "
    "programs.",
    number="17.1",
)

# %% [markdown]
# The steps are now of two kinds. They have names, and the rest of the course uses them all the time:
#
# - [**Prefill**](../docs/glossary.md#prefill) is the first step. It computes all tokens of the prompt
#   at once, fills the cache, and gives the first new token.
# - [**Decode**](../docs/glossary.md#decode) is every further step. It computes one token, the one that
#   the step before gave, and appends its keys and values to the cache.
#
# The cache is therefore not empty when decode begins, and every step makes it one token longer. The
# number of tokens that a step attends to, the prompt and all that was written so far, is the
# **context**.

# %%
picture(
    draw.two_phases(5, llm.config),
    "One layer in both phases, for a prompt of five tokens. Orange keys and values are computed in "
    "this step and stored, blue ones are read from the cache. Decode has a single query.",
    number="17.2",
)

# %% [markdown]
# ## A trap: which logits give the first token?
#
# Some guides say: after prefill, run the last prompt token again to get the first output token. That
# sounds harmless. Try it with *The capital of France is*, five tokens. Predict: how many tokens will
# the cache hold if the last one is run again?

# %%
guess_kept = predict("Tokens in the cache?", None, within=1)

# %%
capital_ids = llm.tokenizer.encode("The capital of France is")
with torch.inference_mode():
    right, wrong = GrowingCache(), GrowingCache()
    first = right.next_token(capital_ids)
    wrong.next_token(capital_ids)
    after_twice = wrong.next_token([*capital_ids, capital_ids[-1]])
guess_kept.compare(wrong.num_tokens)
print(f"prefill's own answer: {spell(first)!r}, {right.num_tokens} tokens kept")
print(f"last token again:     {spell(after_twice)!r}, {wrong.num_tokens} tokens kept")

# %% [markdown]
# The cache now holds the token *is* twice, at two positions, so the model continues *The capital of
# France is is*, with *le*: an *isle*. No error is raised. Prefill has computed the last token of the prompt already, and
# **its logits give the first new token**. This off-by-one mistake is one of the wrong solutions that
# the check of `DenseRunner` knows by name. (`DenseRunner` is the loop around the cache: a stretch exercise, in
# the workspace.) One case looks alike and is right: if all keys and values of a prompt are known from
# an earlier request, its last token (in chapter 23, its last block) is computed again, but at its **own position**, and
# the cache grows by nothing (chapter 23).
#
# ## Drag it: what each step computes
#
# Write a beginning of your own, and move the step. Right of the vertical line is what the model
# wrote itself.


# %%
def filling(sentence, step):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answer = llm.generate(sentence, params)
    tokens = [spell(each) for each in (*answer.prompt_token_ids, *answer.token_ids)]
    return draw.cache_filling(tokens, len(answer.prompt_token_ids), step)


explore(
    filling,
    "Each row is a step, each column is a token. Without a cache the computed part grows with "
    "each step. With a cache only its edge is left: the prompt in step 0, and one token in each further step.",
    "17.3",
    sentence="The history of the sea begins",
    step=(0, 11, 1, 5),
)

# %% [markdown]
# ## What is O(n), and what was O(n²)?
#
# "The KV cache turns O(n²) into O(n)" is often said, and rarely of what. For large $n$, work is $O(n)$
# if it doubles when $n$ doubles, $O(n^2)$ if it grows fourfold, $O(n^3)$ if it grows eightfold, and $O(1)$ if it
# stays. Two kinds of work must be distinguished, and also one step and a whole text:
#
# - The **linear layers** ($W_q$, $W_k$, $W_v$, $W_o$ and the feed-forward network) work on each token
#   alone. Their work is proportional to the number of tokens that go through them. (The output head
#   gets one token in each step, with or without a cache.)
# - **Attention** compares pairs of a query and a key. Its work is proportional to the number of
#   pairs. A text of $n$ tokens has $n(n+1)/2$ of them under the causal mask.
#
# For a text that is written token by token, from its first token on:
#
# | | one step, without | one step, with a cache | whole text, without | whole text, with a cache |
# |---|---|---|---|---|
# | linear layers (tokens) | $n$, $O(n)$ | $1$, $O(1)$ | $\sum_{t=1}^n t = \frac{n(n+1)}{2}$, $O(n^2)$ | $n$, $O(n)$ |
# | attention (pairs per head) | $\frac{n(n+1)}{2}$, $O(n^2)$ | $n$, $O(n)$ | $\sum_{t=1}^n \frac{t(t+1)}{2} = \frac{n(n+1)(n+2)}{6}$, $O(n^3)$ | $\frac{n(n+1)}{2}$, $O(n^2)$ |
#
# So the sentence is right about the attention of **one step**, and about the linear layers of a
# **whole text**. The attention of a whole text falls from $O(n^3)$ to $O(n^2)$, and is not linear. The
# same as numbers, and for our text as a picture:


# %%
def pairs(first: int, end: int) -> int:
    """Return how many keys the tokens from `first` to before `end` look at, each at its own too."""
    return sum(position + 1 for position in range(first, end))


print("       one step at n tokens                a whole text of n tokens")
print("       linear layers   attention           linear layers     attention")
growth = {}
for n in (100, 200, 400, 800):
    again = (n, pairs(0, n), sum(range(1, n + 1)), sum(pairs(0, end) for end in range(1, n + 1)))
    cached = growth[n] = (1, n, n, pairs(0, n))
    columns = [f"{a:>{w},} : {c:<7,}" for a, c, w in zip(again, cached, (4, 7, 7, 10), strict=True)]
    print(f"n={n:<5}", "  ".join(columns).rstrip())
print("(left of each colon without a cache, right of it with one)")

starts = [0, *lengths[:-1]]  # with a cache, a step begins where the one before it ended
steps = list(zip(starts, lengths, strict=True))
picture(
    draw.work_by_step(
        {
            "all computed again": list(lengths),
            "with a cache": [end - start for start, end in steps],
        },
        {
            "all computed again": [pairs(0, end) for end in lengths],
            "with a cache": [pairs(start, end) for start, end in steps],
        },
    ),
    "The work of each of our 16 steps: tokens through the linear layers, and pairs in attention.",
    number="17.4",
)

# %% [markdown]
# ## What the cache costs
#
# Nothing is free. The cache exchanges arithmetic for memory: it takes room in every layer, for every
# token of the context, and each decode step must read all of it. For a context of $n$ tokens:
#
# $$\text{cache bytes} = 2 \cdot L \cdot H_{kv} \cdot d \cdot b_{kv} \cdot n$$
#
# with $L$ layers, $H_{kv}$ KV heads, $d$ numbers per head and $b_{kv}$ bytes per number. The 2 stands
# for a key and a value. (In chapter 00, $b$ was in bits; in chapter 15, $d$ was the width.)

# %%
config = llm.config
each = 2 * config.num_layers * config.kv_heads * config.head_dim * 4
print(
    f"one token: 2 x {config.num_layers} layers x {config.kv_heads} heads x "
    f"{config.head_dim} numbers of 4 bytes = {each:,} bytes"
)
print(f"the {cache.num_tokens} tokens kept of our text: {each * cache.num_tokens / 1e6:.1f} MB")
print(f"the longest text of this model: {each * config.max_positions / 1e6:.0f} MB")
seven = cost.SHAPES["Llama-2-7B"]
llama = cost.decode_step(seven, 1, 1000, weight_bits=16)
print(
    f"Llama-2-7B in 16 bits: the weights take {2 * seven.parameters / 1e9:.1f} GB; a step with a ",
    end="",
)
print(
    f"context of 1,000 reads {llama.weight_bytes / 1e9:.1f} GB of them, and {llama.kv_bytes / 1e9:.2f} GB of cache"
)

# %% [markdown]
# ## Your turn: the cache
#
# `torch.cat` in the smallest version copies all that was kept, in every layer and at every step. A
# better cache reserves its memory once, for the longest text that it may ever hold, and writes each
# new token behind the others. It is called **dense**, because one sequence has one contiguous piece
# of memory. Write it before you look at the course's version.

# %%
task(17, "DenseCache")

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
my_cache = check(17, DenseCache=DenseCache)

# %% [markdown]
# The chapter's `DenseRunner` creates a `DenseCache` for each sequence and runs the model on its new
# tokens, so one line puts yours into it. (The engine has a cache in blocks instead: chapter 22. As long
# as your cache has not passed, the course's own runs, and the line below says so.)

# %%
with using(17, DenseCache=my_cache):
    found_ids = lesson.continue_dense(llm, prompt, 8)
assert found_ids == text_again[len(prompt_ids) :][:8]
print("The dense cache writes the same tokens.")
reveal(17, DenseCache=my_cache)

# %% [markdown]
# ## The memory wall
#
# With a cache, a decode step computes a single token. How long should that take? The arithmetic is
# tiny. But to multiply the token with a weight, the processor must first fetch that weight from
# memory. All weights are needed, and together they are larger than the caches (small, fast memories
# on the chip) of nearly every processor, so **every step reads the whole model** from memory.
#
# By hand, a matrix of 2 × 3 weights times one vector: six weights are read, 24 bytes in float32.
# Each weight is multiplied once and added once, which is 12 FLOPs. That is half a FLOP per byte. Now
# four vectors at once: the same 24 bytes, but 48 FLOPs, two per byte. This ratio has a name, the
# [**arithmetic intensity**](../docs/glossary.md#arithmetic-intensity):
#
# $$I = \frac{\text{FLOP}}{\text{bytes}}$$
#
# A machine has two limits: the bytes that it can read per second, its
# [**memory bandwidth**](../docs/glossary.md#memory-bandwidth) $B$, and the FLOPs that it can do per
# second, its **peak** $P$. Work of low intensity waits for memory: it is **memory-bound**. Work of high
# intensity waits for arithmetic: it is **compute-bound**.
#
# ### One product, alone
#
# First look at the product of a matrix and one vector (**GEMV** in the libraries; with a matrix of many
# rows instead of the vector it is **GEMM**), without a model around it. A small matrix fits
# into the processor's caches, a large one does not. Predict: how many times as many bytes per second
# does NumPy's product read from a matrix of 1 MB as from one of 256 MB?

# %%
guess_wall = predict("1 MB is read how many times as fast as 256 MB?", None, within=1.5)

# %%
sizes = (1, 4, 16, 64, 256)  # MB
read_speeds = lesson.read_speeds(sizes)
ceiling = read_speeds[lesson.CEILING]
here = cost.measure_machine(bandwidth=1e9 * ceiling[-1])
picture(
    draw.speeds(sizes, read_speeds),
    "How fast a matrix is read by a product with one vector. The ceiling is the fastest of seven "
    "ways to read the same numbers. Left, they fit into a cache, and at 1 MB the time of the call itself "
    "shows. Right, memory sets the pace: the wall.",
    number="17.5",
)
numpy_long = read_speeds[lesson.NUMPY_LONG]
guess_wall.compare(numpy_long[0] / numpy_long[-1], measured=True)
measured("this machine reads memory at", here.bandwidth / 1e9, "GB/s")
for name in lesson.PRODUCTS:
    percent = 100 * read_speeds[name][-1] / ceiling[-1]
    print(f"256 MB, {name}: {mark(percent, '%')} of that")

# %% [markdown]
# The ceiling is measured, not looked up: the best of many tries of seven operations (the four
# products, one with the vector on the other side, a sum, a maximum). Its value at 256 MB is this machine's
# **memory bandwidth** $B$ from here on.
#
# Compare the four products at 256 MB. Two things differ between them, the **library** and the **length
# of the rows**, so compare two lines that differ in one of them only. Where this notebook ran, both
# count: torch's routine reads rows of 4,096 numbers (large models have 4,096 to 8,192) clearly faster
# than rows of 576, and at rows of 576 NumPy's routine reads about twice as fast as torch's. The
# arithmetic is not the cause: all four do half a FLOP per byte. Chapter 34 writes products that come
# nearer to the ceiling.
#
# ### Where the time of our step goes
#
# Now the whole step of one token. Three measurements take it apart: the time to read all bytes at the
# ceiling, the time of all matrix products without the rest of the model, and the time of the whole
# step. `operator_calls` counts the **torch operators** of one step: each call of a single operation
# from Python, such as one addition of two tensors.

# %%
shape = cost.ModelShape.of(llm.config)
needed = cost.decode_step(shape, batch=1, context=1, weight_bits=32, kv_bits=32)
reading = needed.num_bytes / here.bandwidth
reading_slowly = needed.num_bytes / (1e9 * read_speeds[lesson.TORCH_SHORT][-1])
with torch.inference_mode():
    one_token = partial(next_token_again, [1000])
    calls = lesson.operator_calls(one_token)
    products, whole = lesson.best_in_turns(
        {"products": lesson.products_of(llm, 1), "whole": one_token}, rounds=8
    ).values()
stored = lesson.COMPILED_STEP
picture(
    draw.time_parts(
        {
            "torch, float32,\nlayer by layer (here)": {
                "reading at full speed": reading,
                "slow products": products - reading,
                "Python and small operations": whole - products,
            },
            "compiled step, bfloat16\n(stored benchmark)": {
                "reading at full speed": stored.reading,
                "everything else": stored.seconds - stored.reading,
            },
        }
    ),
    "Where the time of one decode step goes. Above, this notebook's torch path on the machine that "
    "ran it. Below, the engine's compiled step, from the benchmark of chapter 34, which measured the "
    "bandwidth of its own machine beside each step.",
    number="17.6",
)
print(f"one step reads {needed.num_bytes / 1e6:.0f} MB and computes {needed.flops / 1e9:.2f} GFLOP")
measured("this machine computes", here.flops / 1e9, "GFLOP/s")
measured("reading at full speed", 1e3 * reading, "ms")
measured("reading at the speed of torch's product with rows of 576", 1e3 * reading_slowly, "ms")
measured("all matrix products", 1e3 * products, "ms")
measured("the whole step", 1e3 * whole, "ms")
measured("torch operators called in one step", calls)
share = stored.reading / stored.seconds
print(f"stored: the compiled step takes {1e3 * stored.seconds:.1f} ms, {share:.0%} of it reading")

# %% [markdown]
# In plain words: **the torch path of this notebook stands at neither limit**. Reading at full speed
# would take the blue part of its time only, and the arithmetic less than that. The largest part goes
# to products that read slowly: at the speed of figure 17.5's lowest line, reading would take about as
# long as they do, or longer. The rest is Python, which calls operators one by one for 30 thin layers (the
# count is above); each small operation between the products (norm, rotation, softmax, addition) is a
# call of some microseconds. Both parts together are the step's **overhead**.
#
# **Chapter 34 removes most of that.** Its compiled step is one function for the whole step, in machine
# code, which reads bfloat16, int8 or int4 weights with products of its own. It spends most of its time
# on reading: it stands at the memory wall. (minigen runs it by default where its kernels have been
# compiled.)
#
# **A large model on a GPU is memory-bound as well.** Its matrices are large, so reading them takes far
# longer than calling them, and production engines record a whole decode step once and replay it with
# one call (a [CUDA graph](../docs/glossary.md#cuda-graph)), so Python costs next to nothing.
#
# ### Part by part
#
# Is this true of each part of a step? Here is each kind of work alone, in all layers together: for
# one new token with a context of 64, and for a prompt of 64 tokens.

# %%
of_one, of_many = lesson.part_costs(llm, 1, 64), lesson.part_costs(llm, 64, 64)
print("                        FLOP/byte          time")
print("                       1 token  64 tokens")
for name, (step, seconds) in of_one.items():
    many, many_seconds = of_many[name]
    print(f"{name:<21} {step.intensity:>8.2f} {many.intensity:>10.2f}", end="")
    print(f"   {mark(1e3 * seconds, 'ms')} and {mark(1e3 * many_seconds, 'ms')}")

# %% [markdown]
# With one token, every matrix product has an intensity of 0.5 in float32: those of attention, the
# feed-forward network, the output head. None is more compute-bound than the others. (In bfloat16 it
# would be 1, in int8 2.) With 64 tokens the weights are used 64 times, and the intensity grows by as
# much, except the head's: a prompt needs the logits of its last token only. The embedding lookup only
# copies a row of 576 numbers, so it costs microseconds.
#
# Attention over the context is the exception. In a prompt, each key serves the queries of all later
# tokens, so its intensity grows, too. But in a batch of several users each sequence has its own keys
# and values, and its intensity stays at 1.5, however large the batch is (three query heads share each
# KV head, so it is three times 0.5). Remember this for the exercises.
#
# ## The idea: more tokens per reading
#
# While a decode step waits for memory, its arithmetic units are idle. Several tokens in one pass can
# use them: the weights are read once for all of them. Prefill does exactly this with the tokens of a
# prompt, and a server does it with the next tokens of several users, a
# [**batch**](../docs/glossary.md#batch-size). Predict: how many times as long as a pass of one token
# does a pass of eight tokens take here?

# %%
guess_eight = predict("8 tokens take how many times as long as 1?", None, within=1.5)


# %%
def timed(runs):
    """Return each run's least seconds of two; all run in turns."""
    with torch.inference_mode():
        return lesson.best_in_turns(runs, rounds=2)


numbers = (2, 4, 8, 32, 128)
found = timed({n: partial(next_token_again, list(range(1000, 1000 + n))) for n in numbers})
passes = {n: (cost.prefill_step(shape, n, 32, 32), seconds) for n, seconds in found.items()}
passes = {1: (needed, whole)} | passes  # a pass of one token is the step that was measured above
guess_eight.compare(passes[8][1] / passes[1][1], measured=True)
for n, (work, seconds) in passes.items():
    print(f"{n:>3} tokens, {work.intensity:6.1f} FLOP/byte:", end=" ")
    print(mark(1e3 * seconds, "ms"), "or", mark(1e3 * seconds / n, "ms per token"))

# %% [markdown]
# A weight of $b_w$ bytes that is multiplied with $m$ tokens in one pass gives $2m$ FLOPs, so the
# intensity is about $2m / b_w$, here $m / 2$. (The table has less, because the head multiplies the
# last token only, and the keys and values are counted as bytes, too.)
#
# ## The roofline
#
# One picture holds all of this, the [**roofline**](../docs/glossary.md#roofline) of
# [Williams et al. 2009](https://doi.org/10.1145/1498765.1498785). To the right is the arithmetic
# intensity of some work (the paper says *operational intensity*), upwards is the speed of its
# arithmetic. On the slope, memory decides: with $I$ FLOPs per byte and $B$ bytes per second, no more
# than $I \cdot B$ FLOPs per second are possible. On the flat part the peak $P$ decides. Both meet at
# the **ridge**:
#
# $$\text{FLOP/s} \le \min(I \cdot B,\; P), \qquad I_{\text{ridge}} = \frac{P}{B}$$
#
# With $I = 2m / b_w$, a pass reaches the ridge at $m = I_{\text{ridge}} \cdot b_w / 2$ tokens.

# %%
picture(
    roofline(here, {f"{n} tokens" if n > 1 else "decode": passes[n] for n in passes}),
    "This machine's roofline, and passes of 1 (decode) to 128 tokens below it. The grey area is what "
    "is lost to everything that is neither reading nor multiplying at full speed.",
    number="17.7",
)
measured("the ridge here", here.ridge, "FLOP/byte")
measured("that is a pass in float32 of", here.ridge * 4 / 2, "tokens")
h100, a100 = cost.MACHINES["H100 SXM"], cost.MACHINES["A100 SXM 80 GB"]
print(
    f"the ridge of an H100: {h100.ridge:.0f} FLOP/byte, {h100.ridge * 2 / 2:.0f} tokens in bfloat16"
)
print(f"H100 against A100: {h100.flops / a100.flops:.1f} times the FLOP/s, ", end="")
print(f"{h100.bandwidth / a100.bandwidth:.1f} times the bandwidth")

# %% [markdown]
# The ridge lies at 295 tokens on an H100 in bfloat16, and far lower on a CPU. For a step on the
# roof, another token costs nearly nothing left of the ridge, and its arithmetic right of it.
#
# The distance from a point to the roof is what the step loses to everything else: slow products, small
# matrices, softmax, norms, Python. Decode lies far below the slope here, for the reasons of figure
# 17.6.
#
# ### The words for it
#
# Guides and dashboards use three numbers, and you can now say where each comes from:
#
# $$\text{TTFT} \approx t_{\text{prefill}}, \qquad \text{ITL} \approx t_{\text{decode}}, \qquad
# \text{throughput of decode} = \frac{\text{batch}}{t_{\text{decode}}}$$
#
# - [**Time to first token**](../docs/glossary.md#time-to-first-token-ttft) (TTFT) is the pause before
#   the answer: prefill, and on a busy server the time in the queue (chapters 24 and 52).
# - [**Inter-token latency**](../docs/glossary.md#inter-token-latency-itl) (ITL) is one decode step.
# - [**Throughput**](../docs/glossary.md#throughput) is the tokens per second of all users together. A
#   larger batch raises it, and makes each step a little longer.

# %%
measured("TTFT of a prompt of 128 tokens", 1e3 * passes[128][1], "ms")
measured("ITL of one user", 1e3 * passes[1][1], "ms")
measured("throughput of one user", 1 / passes[1][1], "tokens/s")
measured(
    "throughput of a batch of 8, at most (a pass of 8 tokens, but logits of one)",
    8 / passes[8][1],
    "tokens/s",
)

# %% [markdown]
# ## A model of a step's time
#
# A step takes the longer of two times, and in addition an overhead $t_0$ that does not depend on the
# size of the work:
#
# $$t \approx \max\Big(\frac{\text{bytes}}{B},\; \frac{\text{FLOP}}{P}\Big) + t_0$$
#
# For a decode step of a batch in which sequence $i$ has a context of $n_i$ tokens:
#
# $$\text{bytes} = N_w\, b_w + 2\, L\, H_{kv}\, d\; b_{kv} \sum_i n_i, \qquad
# \text{FLOP} = \sum_i \big(2 N_w + 4\, L\, H_q\, d\; n_i\big)$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $N_w$ | weights that each token is multiplied with (all but the embedding lookup and norms) | `weights`, `shape.multiplied` |
# | $b_w$, $b_{kv}$ | bytes per weight, and per number in the KV cache | `weight_bits / 8`, `kv_bits / 8` |
# | $L$ | layers | `layers` |
# | $H_q$, $H_{kv}$ | query heads, KV heads | `q_heads`, `kv_heads` |
# | $d$ | head dimension ($d_{head}$ in papers) | `head_dim` |
# | $n_i$ | context of sequence $i$ | `context` |
# | $B$ | memory bandwidth, bytes per second (often $\beta$ in later papers on the roofline) | `bandwidth` |
# | $P$ | peak, FLOPs per second (often $\pi$) | `peak`, `machine.flops` |
# | $t_0$ | overhead per step, seconds | `overhead` |
#
# The weights appear once, whatever the batch is. The keys and values appear once per sequence. The
# term $4 L H_q d\, n_i$ is attention: per query head and token of the context, $2d$ FLOPs for the
# score and $2d$ for the mix of values.
#
# A prompt of $m$ tokens in one pass reads as much as one sequence with a context of $m$. It computes
# $2 (N_w - N_h)\, m + 2 N_h + 4\, L\, H_q\, d \cdot m (m + 1) / 2$ FLOPs: only its last token goes through
# the $N_h$ weights of the output head.
#
# Take the overhead from one measurement, the pass of one token, and predict the others. (Here $t_0$
# also swallows the slow products of one row.)

# %%
overhead = max(0.0, passes[1][1] - passes[1][0].seconds(here))
measured("overhead, from the pass of one token", 1e3 * overhead, "ms")
for n, (work, seconds) in passes.items():
    predicted = work.seconds(here, overhead)
    print(f"{n:>3} tokens: predicted {mark(1e3 * predicted, 'ms')}, ", end="")
    print(f"measured {mark(1e3 * seconds, 'ms')}, {mark(seconds / predicted, 'times', 2)} as long")
alone = {1: products} | timed({n: lesson.products_of(llm, n) for n in (2, 128)})
for n, seconds in alone.items():
    print(f"{n:>3} tokens: the matrix products alone take {mark(1e3 * seconds, 'ms')}")

# %% [markdown]
# A model with one constant cannot be right everywhere, and its misses can be explained:
#
# - **A few tokens** (2 to 8) often take longer than predicted. The library chooses another routine
#   for two rows than for one, and that routine is made for many rows. Compare the matrix products of
#   two tokens with those of one: where they differ much, this is the reason.
# - **Many tokens** (32 and 128) usually take longer as well. The peak was measured with square
#   matrices of 1,024. The model's matrices are thinner, so their products stay below that peak. And
#   norms, softmax, rotations and SwiGLU pass over every token's numbers, so the difference between the
#   step and its products grows with the number of tokens.
#
# On a GPU with a large model Python costs next to nothing, but a step does not read at the data sheet's
# full speed: [gpt-fast](https://github.com/pytorch-labs/gpt-fast) reads Llama-2-70B in 8 bits at 1,323 of
# an A100's 2,039 GB/s (the card's power was limited). So a data sheet gives the least time; with a
# measured bandwidth the simple model is good enough to plan with. (gpt-fast saw about 1,700 GB/s there,
# so 1.3 times remain.)
#
# ## What it predicts for a 70B model
#
# A common example: Llama-3-70B in 8 bits on an H100, which reads 3,350 GB/s and computes 989 TFLOP/s
# in bfloat16. It has 70.6 billion weights, of which a step reads 69.5: of the embedding table it looks
# up one row. By hand: 69.5 GB / 3,350 GB/s. Predict first: how many milliseconds does a token take at
# batch 1, and which part of the card's FLOP/s does that use?

# %%
guess_ms = predict("ms per token of the 70B model?", None, within=1.1)
guess_share = predict("% of the card's FLOP/s?", None, within=1.5)

# %%
big, table = cost.SHAPES["Llama-3-70B"], {}
for batch, context in ((1, 1), (1, 1000), (1, 4000), (10, 4000)):
    own = table[batch, context] = cost.decode_step(big, batch, context, weight_bits=8)
    ungrouped = replace(own, kv_bytes=8 * own.kv_bytes)
    print(
        f"batch {batch:>2}, context {context:>5,}: {1e3 * own.seconds(h100):.1f} ms, "
        f"{own.share_of_compute(h100):.2%} of the FLOP/s "
        f"({own.share_of_compute(h100) * h100.flops / 1e12:.1f} TFLOP/s); "
        f"if all 64 heads had keys and values: {1e3 * ungrouped.seconds(h100):.1f} ms"
    )
one = table[1, 1]
print(
    f"{big.parameters / 1e9:.1f} billion weights, {big.multiplied / 1e9:.1f} billion are read; one token: {one.flops / 1e12:.2f} TFLOP, {1e3 * one.flops / h100.flops:.2f} ms of arithmetic"
)
guess_ms.compare(round(1e3 * one.seconds(h100), 1), "ms")
guess_share.compare(round(100 * one.share_of_compute(h100), 2), "%")

# %% [markdown]
# The last column counts 64 KV heads. Llama-3-70B has grouped heads (chapter 14): its 64 query heads
# share 8 KV heads, so its cache is eight times smaller. An estimate that forgets this is twice as long
# for ten sequences of 4,000 tokens. (That row is arithmetic only: 13.1 GB of cache beside 70.6 GB of
# weights exceed the card's 80 GB; beside 1 GB to work in, as in chapter 00, six such sequences fit.) The
# share of the card's FLOP/s is below 1 % for one sequence: two FLOPs per weight are 0.14 TFLOP per token,
# which take 0.14 ms. With the batch it **rises**, because the weights are read once for all ten
# sequences. So the TFLOP/s that a server reaches say first how large its batches are: a high utilisation
# of the arithmetic is no goal of decode by itself.

# %% [markdown]
# ## Your turn: predict
#
# Two exercises, a warm-up on paper and the step-time model itself. Three stretch exercises are in
# the workspace (`minigen workspace` creates it): `WindowCache` keeps only the tokens
# of a sliding window, `DenseRunner` is the loop around your cache, with the trap of the last prompt
# token in it, and `prefill_seconds` predicts the time to the first token.

# %%
task(17, "compute_bound_batch")


# %%
# exercise: minigen_course.ch17_dense_cache.estimates.compute_bound_batch
def compute_bound_batch(context: int) -> int | None:
    """Return the least batch at which decoding is compute-bound, or None if no batch is.

    The model is Llama-3-8B with weights and KV cache in bfloat16, the card is an L4, and each
    sequence has `context` tokens.
    """
    raise NotImplementedError  # your turn


# %%
my_batch = check(17, compute_bound_batch=compute_bound_batch)

# %%
task(17, "step_seconds")


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
my_step = check(17, step_seconds=step_seconds)

# %% [markdown]
# Your two functions draw the next figure, as soon as they pass: every point of a line is a call of
# `step_seconds`, and dots mark the batches that your `compute_bound_batch` returns.

# %%
passed = my_batch is compute_bound_batch
own = {"step_seconds": my_step} | ({"compute_bound_batch": my_batch} if passed else {})
with using(17, **own):
    drawn = draw.seconds_by_batch([100, 1000, 8000], dots=passed)
picture(
    drawn,
    "Llama-3-8B in bfloat16 on an L4. Flat: the weights decide, and a larger batch is nearly free. "
    "Rising: the KV cache decides, and in the lowest line at last the arithmetic. Dashed: more than "
    "the card's 24 GB hold beside 1 GB to work in.",
    number="17.8",
)
reveal(17, compute_bound_batch=my_batch, step_seconds=my_step)
eight, card = cost.SHAPES["Llama-3-8B"], cost.MACHINES["L4"]
mine = my_step(
    weights=eight.multiplied,
    **{"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 32, "context": 1000},
    **{"bandwidth": card.bandwidth, "peak": card.flops},
)
assert abs(mine / cost.decode_step(eight, 32, 1000, 16).seconds(card) - 1) < 1e-6

# %% [markdown]
# The curves say something that "decode becomes compute-bound with a large batch" hides. Each further
# sequence brings its own keys and values, which must be read and are used by one token only. From a
# few hundred tokens of context on, a sequence on this card adds more reading than arithmetic, and
# the step stays memory-bound at every batch. At 100 tokens the card's memory is full before the
# arithmetic decides. That is why so much effort goes into a smaller KV cache: grouped heads, fewer
# bits, windows.
#
# ## Drag it: any model, any card
#
# The limits come from data sheets (bfloat16, "dense": not the doubled number for matrices half full of
# zeros; Apple's FLOP/s are computed from its GPU's cores and clock, in float32; this machine's are
# measured), and real kernels stay below them. Among the machines are [AMD's
# MI300X](https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html) and an [Apple M2
# Ultra](https://www.apple.com/newsroom/2023/06/apple-introduces-m2-ultra/), whose processor and GPU share
# up to 192 GB of **unified memory**: slower than an H100's, but large enough for the whole 70B model in
# 16 bits. The KV cache has 16 bits here, and 1 GB is kept to work in, as in chapter 00.

# %%
cards = {**cost.MACHINES, **cost.UNIFIED, "this machine": here}


def predicted_step(model, weight_bits, card, context, batch):
    return step_time(
        cost.SHAPES[model], cards[card], weight_bits=weight_bits, context=context, batch=batch
    )


explore(
    predicted_step,
    "Left, the two times of a decode step: the longer bar decides. Right, both for all batches: blue "
    "to read, orange to compute, a dot for the chosen batch. At batch 1 the bar of the arithmetic is a thin line.",
    "17.9",
    model=["Llama-3-70B", *(name for name in cost.SHAPES if name != "Llama-3-70B")],
    weight_bits=[8, 16, 4.5],
    card=list(cards),
    context=(1, 8192, 1, 1000),
    batch=(1, 512, 1, 1),
)

# %% [markdown]
# ## The measurement again

# %%
measured("16 tokens, all computed again", sum(seconds_again), "s")
measured("16 tokens with a cache", sum(seconds_cached), "s")
measured("ratio", sum(seconds_again) / sum(seconds_cached))
print(f"tokens through the model: {tokens_again} and {cache.num_tokens}, ", end="")
print(f"{1 - cache.num_tokens / tokens_again:.0%} fewer")

_, seconds_after = write(GrowingCache().next_token, list(range(1000, 1128)), 6)
step_after = min(seconds_after[1:])  # the first is the prefill of the 128 tokens
measured("\none more token after 128, all computed again", 1e3 * passes[128][1], "ms")
measured("one more token after 128, with a cache", 1e3 * step_after, "ms")
measured("ratio", passes[128][1] / step_after)

# %% [markdown]
# The cache saves 91 % of the tokens, but not 91 % of the time. A step of one token still reads all
# weights and still pays its overhead; a step of many tokens shares both. The gain grows with the text.
# The next part of the course fills the idle arithmetic with other people's requests.
#
# ## Claims
#
# Statements that one often hears or reads, beside what this notebook computed.


# %% jupyter={"source_hidden": true}
eight_step = cost.decode_step(eight, 1, 1000, 16)
long_prompt = cost.prefill_step(eight, 1000, 16)
step_growth, text_growth = (growth[800][place] / growth[400][place] for place in (1, 3))
l4_batches = {context: crossing(eight, card, 16, context) for context in (100, 1000)}
decode_shares = {  # prompt and answer, in tokens -> the share of decode in the time
    (prompt, answer): 1
    / (1 + cost.prefill_step(big, prompt, 8).seconds(h100) / (answer * own.seconds(h100)))
    for prompt, answer, own in (
        (1000, 200, table[1, 1000]),
        (8000, 20, cost.decode_step(big, 1, 8000, 8)),
    )
}
verdicts(
    "17",
    Claim(
        "With a KV cache, the attention of one step is O(n)",
        f"from 400 to 800 tokens, its pairs grow {step_growth:.0f} times",
        holds(step_growth < 2.1),
        "one query meets n keys; without a cache, all n queries do",
    ),
    Claim(
        "With a KV cache, the attention of a whole text is O(n)",
        f"from 400 to 800 tokens, its pairs grow {text_growth:.1f} times",
        holds(text_growth < 2.1),
        "it goes from O(n³) to O(n²); only the linear layers of a whole text become O(n)",
    ),
    Claim(
        "After prefill, the last prompt token is appended again to get the first output",
        f"{spell(after_twice)!r} follows instead of {spell(first)!r}; {wrong.num_tokens} tokens are "
        f"kept of a prompt of {len(capital_ids)}",
        holds(after_twice == first),
        "prefill's own last logits give the first token",
    ),
    Claim(
        "Prefill is compute-bound",
        f"1,000 tokens of Llama-3-8B have {long_prompt.intensity:.0f} FLOP/byte, an H100's ridge is "
        f"{h100.ridge:.0f}",
        holds(long_prompt.intensity > h100.ridge),
        "a prompt that is shorter than the ridge is memory-bound",
        "[Patel et al. 2023](https://arxiv.org/abs/2311.18677)",
    ),
    Claim(
        "Decode is memory-bound",
        f"one sequence of Llama-3-8B has {eight_step.intensity:.1f} FLOP/byte; of a step, reading "
        f"takes {share:.0%} in minigen's compiled path, {mark(100 * reading / whole, '%', 2)} in torch",
        holds(eight_step.intensity < h100.ridge),
        "in torch layer by layer, slow products and Python's calls come first",
        "[Patel et al. 2023](https://arxiv.org/abs/2311.18677)",
    ),
    Claim(
        "Decode does not need the compute of the latest GPUs",
        f"one sequence of Llama-3-8B uses {eight_step.share_of_compute(a100):.1%} of an A100's FLOP/s",
        holds(eight_step.share_of_compute(a100) < 0.5),
        f"an H100 has {h100.flops / a100.flops:.1f} times an A100's FLOP/s, but only "
        f"{h100.bandwidth / a100.bandwidth:.1f} times its bandwidth, and bandwidth decides",
        "[Patel et al. 2023](https://arxiv.org/abs/2311.18677)",
    ),
    Claim(
        "Decode becomes compute-bound with a large enough batch",
        "Llama-3-8B on an L4: "
        + ", ".join(
            f"{'never' if batch is None else f'from {math.ceil(batch):,} sequences on'} at {context:,} tokens"
            for context, batch in l4_batches.items()
        ),
        holds(None not in l4_batches.values()),
        "each sequence brings keys and values of its own to read",
    ),
    Claim(
        "The feed-forward network is compute-bound in decode",
        f"{of_one['feed-forward'][0].intensity:.1f} FLOP/byte for one token, as all products; "
        f"the ridge here is {mark(here.ridge, 'FLOP/byte', 2)}",
        holds(of_one["feed-forward"][0].intensity > here.ridge),
        "each weight is read for one multiplication and one addition",
    ),
    Claim(
        "Most of a request's time is decode",
        "Llama-3-70B in 8 bits on an H100: "
        + " and ".join(
            f"{each:.0%} ({p:,} + {a} tokens)" for (p, a), each in decode_shares.items()
        ),
        holds(all(each > 0.5 for each in decode_shares.values())),
        "it depends on the lengths of prompt and answer",
    ),
)

# %% [markdown]
# ## Summary
#
# - Keys and values of earlier tokens never change, because a token looks only backwards. A KV cache
#   keeps them, and each step computes only new tokens.
# - Prefill computes the prompt in one step and gives the first token (TTFT). Decode computes one
#   token per step (inter-token latency).
# - Per step, attention falls from $O(n^2)$ to $O(n)$ and the linear layers from $O(n)$ to $O(1)$. Over
#   a whole text, attention falls from $O(n^3)$ to $O(n^2)$.
# - Decode reads all weights for one token: its arithmetic intensity is about 1 FLOP/byte in bfloat16,
#   far left of the ridge. Its pace is at most bandwidth divided by bytes.
# - The step-time model, $\max(\text{bytes} / B, \text{FLOP} / P) + t_0$, predicts a step; without $t_0$ it is a bound.
#   Where a step takes longer, slow products and overhead are the reason; both can be measured.
# - A batch shares the reading of the weights, but not of the KV cache. With long contexts decode is
#   memory-bound at every batch.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A model in bfloat16 has 8 billion weights, and a card reads 1,000 GB/s. At most how
# many tokens per second does one user get? And with weights of 4.5 bits?</summary>
# 16 GB / 1,000 GB/s is 16 ms, so at most 62 tokens per second. With 4.5 bits it is 4.5 GB, 4.5 ms and
# 222 tokens per second. The KV cache makes both a little slower.</details>
#
# <details><summary>2. A server doubles its batch from 8 to 16, and each step becomes 10 % longer. What
# happens to throughput and to inter-token latency?</summary>
# Throughput is batch / step time, so it grows by 2 / 1.1 = 1.8 times. Inter-token latency is the step
# time, so each user waits 10 % longer for each token.</details>
#
# <details><summary>3. A faster GPU has twice the FLOP/s and the same memory bandwidth. Which of TTFT and
# inter-token latency improves?</summary>
# TTFT of long prompts, because prefill is compute-bound. Inter-token latency stays, because decode
# waits for memory.</details>
#
# ## What the production engines do beyond this
#
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)**, and **Ollama** above it, reserve the cache
#   when a model is loaded, for the context that was asked for (`--ctx-size` in llama.cpp, `num_ctx` in
#   Ollama). **vLLM**, **SGLang**, **TensorRT-LLM** and **TGI** keep it in blocks, as part 2 does.
# - Fewer bytes: vLLM, SGLang and TensorRT-LLM can store keys and values in
#   [FP8](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/), llama.cpp in 8 or 4
#   bits (`--cache-type-k`), **ExLlamaV2** in 8, 6 or 4.
# - Use of the idle arithmetic: [chunked prefill](../docs/glossary.md#chunked-prefill)
#   ([Agrawal et al. 2024](https://arxiv.org/abs/2403.02310)) mixes pieces of a prompt with other
#   users' decode steps (chapter 24), and speculative decoding checks several guessed
#   tokens in one pass, for about the price of one as long as that pass stays left of the ridge.
# - Prefill and decode have different limits, so SGLang, vLLM and TensorRT-LLM can run them on
#   [different GPUs](https://docs.sglang.io/advanced_features/pd_disaggregation.html), and send the
#   cache from one to the other.
#
# ## Further reading
#
# - [Roofline: an insightful visual performance model](https://doi.org/10.1145/1498765.1498785),
#   Williams, Waterman and Patterson 2009: twelve pages, and the picture of this chapter.
# - [Efficiently scaling transformer inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022: the
#   step-time model for models on hundreds of chips.
# - [Transformer inference arithmetic](https://kipp.ly/transformer-inference-arithmetic/), kipply
#   2022: the same sums, worked through.
# - [Splitwise](https://arxiv.org/abs/2311.18677), Patel et al. 2023: prefill and decode measured apart
#   on real traffic.
# - [Benchmarking TGI](https://huggingface.co/blog/tgi-benchmarking): reading a server's prefill and
#   decode curves.
# - [llama.cpp on Apple silicon](https://github.com/ggml-org/llama.cpp/discussions/4167): a table in
#   which decode follows the bandwidth of each chip, and prefill the cores of its GPU.
#
# **Next:** [21 · Memory in blocks](21_blocks.ipynb). The dense cache reserves the longest answer for
# every sequence, and most of that memory is never used. Part 2 begins with ending this waste.

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
# Chapter 15 sent the whole text through the model for every new token. This chapter keeps what
# does not change, the keys and values, and computes only what is new. Then the arithmetic is
# nearly gone, and something else turns out to be the limit: reading the weights.
#
# **Afterwards you can** build a KV cache, say what it saves and what it does not, measure a
# machine's two ceilings, and predict the time of a token for any model on any card.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import time
from dataclasses import replace

import torch

from minigen import SamplingParams
from minigen.model.attention import attend_packed, attention
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch17_dense_cache.figures import by_step, cache_filling, work_by_step
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.inspect_model import transformer_of

llm = load_model(weights="float32")
model, windows = transformer_of(llm), llm.config.sliding_windows
prompt = "The history of the sea begins long before the first ships, when"
prompt_ids = llm.tokenizer.encode(prompt)
spell = lambda token: llm.tokenizer.decode([token])  # noqa: E731

# %% [markdown]
# ## A number that hurts
#
# Write 30 tokens as chapter 15 did, and take the time of each.


# %%
def next_token_again(token_ids: list[int]) -> int:
    """The likeliest next token, the whole text computed again."""
    attend = attend_packed([len(token_ids)], windows)
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return int(model.logits(hidden[-1:]).argmax())


@torch.inference_mode()
def write(next_token, token_ids: list[int], count: int = 30) -> tuple[list[int], list[float]]:
    """The text with so many tokens more, and the seconds that each of them took."""
    token_ids, seconds = list(token_ids), []
    for _ in range(count):
        started = time.perf_counter()
        token_ids.append(next_token(token_ids))
        seconds.append(time.perf_counter() - started)
    return token_ids, seconds


text_again, seconds_again = write(next_token_again, prompt_ids)
print(llm.tokenizer.decode(text_again))
measured("\n30 tokens", sum(seconds_again), "s")
measured("the first five, each", 1e3 * sum(seconds_again[:5]) / 5, "ms")
measured("the last five, each", 1e3 * sum(seconds_again[-5:]) / 5, "ms")

# %% [markdown]
# The longer the text, the longer each token takes.
#
# ## Why it is wasteful
#
# Compare the keys of the first layers and the last in two runs: the prompt, and the prompt with
# one token more.


# %%
@torch.inference_mode()
def keys_of(token_ids: list[int]) -> torch.Tensor:
    """The keys of all layers, [layers, tokens, kv_heads, head_dim]."""
    attend, keys = attend_packed([len(token_ids)], windows), []

    def remember(layer_id, q, k, v):
        keys.append(k)
        return attend(layer_id, q, k, v)

    model(torch.tensor(token_ids), torch.arange(len(token_ids)), remember)
    return torch.stack(keys)


shorter, longer = keys_of(text_again[:13]), keys_of(text_again[:14])
torch.testing.assert_close(longer[:, :13], shorter, atol=1e-3, rtol=1e-3)
print("shapes:", list(shorter.shape), list(longer.shape))
print("the keys of the first 13 tokens are the same in both runs, in all 30 layers")

# %% [markdown]
# A token looks only backwards. What comes after it changes nothing in it, in no layer. So all that
# the second run computed of the first 13 tokens was known already. And of the old tokens,
# the new one needs only their keys and values: that is all of them that attention looks at.
#
# ## The smallest version that works
#
# Keep them, layer by layer, and give the model only the tokens that are new:


# %%
class GrowingCache:
    """Keys and values of a text, and how many of its tokens they are of."""

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
assert text_cached == text_again
print("the same 30 tokens")
measured("30 tokens", sum(seconds_cached), "s")
picture(
    by_step(
        {
            "all computed again": [1e3 * each for each in seconds_again],
            "with a cache": [1e3 * each for each in seconds_cached],
        },
        "milliseconds",
        "What each step took here",
    ),
    "Lines of the time of each step: growing without a cache, level with one.",
)

# %% [markdown]
# Two kinds of steps are left. The first takes the whole prompt: **prefill**. It fills the
# cache, and its last token's scores already give the first new token. All others take one token:
# **decode**.
#
# A common account has it that after prefill the last prompt token is run again, to get the first
# output. Then the text holds that token twice:

# %%
capital_ids = llm.tokenizer.encode("The capital of France is")
with torch.inference_mode():
    right, wrong = GrowingCache(), GrowingCache()
    first = right.next_token(capital_ids)
    wrong.next_token(capital_ids)
    after_twice = wrong.next_token([*capital_ids, capital_ids[-1]])
print(f"tokens of the prompt: {len(capital_ids)}")
print(f"prefill's own answer: {spell(first)!r}, {right.num_tokens} tokens kept")
print(f"last token again:     {spell(after_twice)!r}, {wrong.num_tokens} tokens kept")

# %% [markdown]
# ## The idea, drawn: what each step computes
#
# Write a beginning, and move the step. Orange is computed, blue is read from the cache; to the
# right of the line is what the model wrote itself.


# %%
def filling(sentence, step):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answer = llm.generate(sentence, params)
    tokens = [spell(each) for each in (*answer.prompt_token_ids, *answer.token_ids)]
    return cache_filling(tokens, len(answer.prompt_token_ids), step)


explore(
    filling,
    "Steps downwards, tokens to the right: without a cache a triangle, with one a diagonal.",
    sentence="The history of the sea begins",
    step=(0, 19, 1, 8),
)

# %% [markdown]
# A triangle becomes a line along its edge. In numbers, for each step: how many tokens go
# through the linear layers, and how many pairs of a query and a key attention compares.


# %%
def pairs(first: int, end: int) -> int:
    """Keys that the tokens from `first` to before `end` look at: each at itself and all before."""
    return sum(position + 1 for position in range(first, end))


lengths = range(len(prompt_ids), len(text_again))
starts = [0, *lengths[:-1]]  # with a cache, a step begins where the one before it ended
picture(
    work_by_step(
        {
            "all computed again": list(lengths),
            "with a cache": [end - start for start, end in zip(starts, lengths, strict=True)],
        },
        {
            "all computed again": [pairs(0, end) for end in lengths],
            "with a cache": [pairs(start, end) for start, end in zip(starts, lengths, strict=True)],
        },
    ),
    "Work of each step: tokens through linear layers, and pairs in attention.",
)

# %%
print("       one step at n tokens                a whole text of n tokens")
print("       linear layers   attention           linear layers     attention")
for n in (100, 200, 400, 800):
    again = (n, pairs(0, n), sum(range(1, n + 1)), sum(pairs(0, end) for end in range(1, n + 1)))
    cached = (1, n, n, pairs(0, n))
    columns = [f"{a:>{w},} : {c:<7,}" for a, c, w in zip(again, cached, (4, 7, 7, 10), strict=True)]
    print(f"n={n:<5}", "  ".join(columns).rstrip())

# %% [markdown]
# Read down the columns: n doubles from row to row. Without the cache (left of each colon) a step's
# linear layers double and its attention grows fourfold; with it they stay at 1 and double. Over
# the whole text each is one power of n less.
#
# ## The package's version
#
# `torch.cat` copies all that was kept at every step. The package reserves the memory once, as much
# as the sequence may ever need, and writes into it.

# %%
from minigen_course.ch17_dense_cache.lesson import continue_dense
from minigen_course.ch17_dense_cache.reference import DenseCache, attend_dense

show(DenseCache, attend_dense)

# %%
assert continue_dense(llm, prompt, 30) == text_again[len(prompt_ids) :]
print("the package's dense cache writes the same 30 tokens")
config = llm.config
each = 2 * config.num_layers * config.kv_heads * config.head_dim * 4
print(
    f"one token keeps 2 x {config.num_layers} layers x {config.kv_heads} heads x "
    f"{config.head_dim} numbers of 4 bytes = {each:,} bytes"
)
print(
    f"this text: {each * len(text_again) / 1e6:.1f} MB; "
    f"the longest that the model takes: {each * config.max_positions / 1e6:.0f} MB"
)

# %% [markdown]
# ## The memory wall
#
# Now one token goes through the model at a step. How fast could that be? Each weight is multiplied
# with one number, so each weight must be read, and used for two operations. Measure what this
# machine can do of both, and compare.

# %%
from minigen_course.figures.roofline import roofline, step_time
from minigen_course.lab.cost_model import (
    MACHINES,
    SHAPES,
    ModelShape,
    config_of,
    decode_step,
    measure_machine,
    most_sequences,
    prefill_step,
)

here = measure_machine()
shape = ModelShape.of(llm.config)
step = decode_step(shape, batch=1, context=len(prompt_ids), weight_bits=32)
decode_seconds = sorted(seconds_cached[1:])[len(seconds_cached) // 2]
print(f"a step reads {step.num_bytes / 1e6:.0f} MB and computes {step.flops / 1e9:.2f} GFLOP")
measured("this machine reads", here.bandwidth / 1e9, "GB/s")
measured("a step reads", step.num_bytes / decode_seconds / 1e9, "GB/s")
measured("this machine computes", here.flops / 1e9, "GFLOP/s")
measured("a step computes", step.flops / decode_seconds / 1e9, "GFLOP/s")

# %% [markdown]
# The step comes nearer to the first ceiling than to the second. More operations for each byte would
# use the idle arithmetic: several tokens in one pass, as prefill has them. The time of prompts of
# 1 to 256 tokens:


# %%
@torch.inference_mode()
def prefill_seconds(num_tokens: int) -> float:
    """The best of three."""
    token_ids, found = list(range(1000, 1000 + num_tokens)), []
    for _ in range(3):
        started = time.perf_counter()
        next_token_again(token_ids)
        found.append(time.perf_counter() - started)
    return min(found)


sizes = (1, 2, 4, 8, 16, 64, 256)
prefills = {n: (prefill_step(shape, n, weight_bits=32), prefill_seconds(n)) for n in sizes}
for n, (needed, seconds) in prefills.items():
    print(f"{n:>3} tokens, {needed.intensity:6.1f} operations a byte:", end=" ")
    print(mark(1e3 * seconds, "ms"), "or", mark(1e3 * seconds / n, "ms a token"))

# %%
picture(
    roofline(here, {f"{n} tokens" if n > 1 else "decode": prefills[n] for n in sizes}),
    "A roofline with this machine's ceilings, and steps of 1 to 256 tokens below it.",
)
measured("the ridge here, in tokens of float32", here.ridge * 4 / 2)
print(f"the ridge of an H100, in tokens of bfloat16: {MACHINES['H100 SXM'].ridge * 2 / 2:.0f}")

# %% [markdown]
# This is the *roofline*. On the slope, memory is the limit: more tokens in a pass cost hardly
# more time. On the flat part, arithmetic is. Between them is the ridge. Each point lies below the
# roof by what the step loses otherwise: small products, softmax, norms, Python.
#
# ## A model of a step's time
#
# So a step takes the longer of two times, and what is lost besides:
#
# > seconds = max(bytes / bandwidth, operations / peak) + overhead
#
# Take the overhead from one measurement, the step of one token, and predict the others. Where it
# comes out large, look at the library: its product for one row may stay far below the bandwidth,
# and that for two rows be slower than that for four. Chapter 34 comes back to both.

# %%
overhead = max(0.0, prefills[1][1] - prefills[1][0].seconds(here))
measured("overhead, from the step of one token", 1e3 * overhead, "ms")
for n, (needed, seconds) in prefills.items():
    predicted = mark(1e3 * needed.seconds(here, overhead), "ms")
    print(f"{n:>3} tokens: predicted {predicted}, measured {mark(1e3 * seconds, 'ms')}")

# %% [markdown]
# The same arithmetic serves for models and cards that are not here. Choose a model, the
# bits of its weights, a card, a context and how many sequences are decoded together. The
# longer bar decides. (Ceilings are the data sheets', which nobody reaches quite; keys and
# values have 16 bits.)

# %%
cards = {**MACHINES, "this machine": here}


def predict(model, weight_bits, card, context, batch):
    return step_time(
        SHAPES[model], cards[card], weight_bits=weight_bits, context=context, batch=batch
    )


explore(
    predict,
    "Bars of the time to read weights and keys, and of the arithmetic, for the chosen step.",
    model=["Llama-3-70B", *(name for name in SHAPES if name != "Llama-3-70B")],
    weight_bits=[8, 16, 4.5],
    card=list(cards),
    context=(1, 32768, 1, 1000),
    batch=(1, 512, 1, 1),
)

# %% [markdown]
# A guide gives 21, 21.7, 24 and 52 ms for a 70B model in 8 bits on an H100, at one sequence with
# no context, with 1,000 and with 4,000 tokens, and at ten with 4,000. Its utilisation falls from
# 4.5 %. The model of Llama 3 has 64 query heads that share 8 heads of keys and values:

# %%
h100, grouped = MACHINES["H100 SXM"], SHAPES["Llama-3-70B"]
table = {}
for batch, context in ((1, 1), (1, 1000), (1, 4000), (10, 4000)):
    of_8 = table[batch, context] = decode_step(grouped, batch, context, weight_bits=8)
    of_64 = replace(of_8, kv_bytes=8 * of_8.kv_bytes)
    print(
        f"batch {batch:>2}, context {context:>5,}: {1e3 * of_8.seconds(h100):.1f} ms, "
        f"{of_8.share_of_compute(h100):.2%} of the arithmetic; "
        f"if all 64 heads kept their own: {1e3 * of_64.seconds(h100):.1f} ms"
    )

# %% [markdown]
# The guide's times are those of 64 heads. And more sequences use the card better, not worse: its
# weights are read once for all of them.
#
# ## The measurement again

# %%
measured("30 tokens, all computed again", sum(seconds_again), "s")
measured("30 tokens with a cache", sum(seconds_cached), "s")
measured("ratio", sum(seconds_again) / sum(seconds_cached))
measured("\nat 256 tokens, one more with all computed again", 1e3 * prefills[256][1], "ms")
measured("one more with a cache", 1e3 * decode_seconds, "ms")
measured("ratio", prefills[256][1] / decode_seconds)
per_token = prefills[256][1] / 256
measured("\nwhile one token is decoded, tokens of a prompt read", decode_seconds / per_token)

# %% [markdown]
# The gain grows with the text. The last line is the memory wall: a token that is read costs a
# fraction of one that is written, since it shares the reading of the weights with others. The next
# part of the course lets many requests share it.
#
# ## Your turn
#
# Write the dense cache. `check` says the first thing that is wrong; add `hint=1` for a hint. The
# exercises' own notebook (`minigen workspace`) has the runner as a second one, and knows the
# mistake of the last prompt token.

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
# The engine has a paged cache in its place, which chapter 22 builds. The dense runner uses yours.
# (Until it passes, `mine` is the package's own.)

# %%
with using(17, DenseCache=mine):
    token_ids = continue_dense(llm, prompt, 12)
print(llm.tokenizer.decode(token_ids))

# %% [markdown]
# ## What the production engines do beyond this
#
# - **llama.cpp** and **Ollama** above it reserve the cache when a model is loaded, for the context
#   that was asked for (`num_ctx`). **vLLM**, **SGLang**, **TensorRT-LLM** and **MLC-LLM** keep it
#   in pages, as part 2 does.
# - Fewer bytes: vLLM, SGLang and TensorRT-LLM can keep keys and values in FP8, llama.cpp in 8 or 4
#   bits (`--cache-type-k`), **ExLlamaV2** in 8, 6 or 4.
# - Use of the idle arithmetic: prefill in chunks, mixed with others' decode steps; and speculative
#   decoding, which checks several guessed tokens in one pass, for about the price of one as long
#   as that pass stays left of the ridge.
# - Prefill and decode have different limits, so vLLM, SGLang and TensorRT-LLM can run them on
#   different GPUs, and send the cache from one to the other.
# - **DeepSpeed**'s ZeRO-Inference keeps weights in the host's memory. Then the bus is the
#   bandwidth, and only large batches pay for it.

# %%
room = most_sequences(config_of("Llama-3-70B"), 8, h100.memory, context=4000, working=0)
rows_at_400 = (pairs(0, 400), 400)
verdicts(
    "17",
    Claim(
        "70 GB over 3,350 GB/s is 21 ms a token, and 4.5 % of the compute",
        f"{1e3 * table[1, 1].seconds(h100):.1f} ms and "
        f"{table[1, 1].share_of_compute(h100):.2%} of the compute",
        "held within bounds",
        "the time holds for 8-bit weights; two operations a weight are far less compute than told",
    ),
    Claim(
        "Token times are 21, 21.7, 24 and 52 ms at batch and context 1/0, 1/1,000, 1/4,000 and "
        "10/4,000, and utilisation falls",
        ", ".join(f"{1e3 * each.seconds(h100):.1f}" for each in table.values())
        + f" ms; utilisation rises to {table[10, 4000].share_of_compute(h100):.1%}",
        "did not hold",
        "that is without grouped heads, and the weights are read once for the whole batch",
    ),
    Claim(
        "The KV cache turns O(n²) into O(n)",
        f"attention at 400 tokens: {rows_at_400[0]:,} pairs a step become {rows_at_400[1]}; linear "
        "layers: 400 tokens become 1",
        "held within bounds",
        "it is so for attention in one step; linear layers go from O(n) to O(1), and a whole text "
        "from O(n³) to O(n²) and from O(n²) to O(n)",
    ),
    Claim(
        "Prefill is compute-bound, decode is memory-bound",
        f"the ridge is at {h100.ridge:.0f} tokens on an H100 in bfloat16, and at "
        f"{mark(here.ridge * 2, 'tokens', 2)} here in float32",
        "held within bounds",
        "a prompt shorter than the ridge is bound by memory too, a batch larger than it by compute",
    ),
    Claim(
        "After prefill, the last prompt token is run again to get the first output",
        f"{spell(after_twice)!r} follows instead of {spell(first)!r}; of a prompt of "
        f"{len(capital_ids)} tokens {wrong.num_tokens} are kept",
        "did not hold",
        "prefill's last scores are the first output; run again, the token stands there twice",
    ),
    Claim(
        "Capacity: sequences = (memory - weights) / (KV per token x length)",
        f"{room} sequences of 4,000 tokens beside a 70B in 8 bits on an H100",
        "held",
        "it is a bound from above: working memory and what fragments are left out",
    ),
)

# %% [markdown]
# **Next:** part 2, many requests. The dense cache reserves the longest answer for everybody;
# chapter 21 begins by ending that.

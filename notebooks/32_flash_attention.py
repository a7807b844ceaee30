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
# # 32 · FlashAttention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/32_flash_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/32_flash_attention.ipynb)
#
# Chapter 14 computed attention in three steps: a score for every query and every key, softmax over
# each row of scores, and a weighted sum of values. Between these steps stands a matrix that is as
# long and as wide as the text. It is written to memory and read again, several times, although only
# its product with the values is wanted. **[FlashAttention](../docs/glossary.md#flashattention)**
# computes the same result and never makes the matrix. A few queries at a time go over the keys, one
# **tile** (a piece of neighbouring rows) after the other, and remember three things from tile to tile.
#
# **Afterwards you can** compute a softmax by hand while its scores arrive one by one, join two halves
# of a softmax, write attention as a loop over tiles, write that loop as a Triton kernel, count the
# bytes that it moves, and say what it saves (memory), what it does not save (arithmetic), and where it
# gains nothing (one new token). No kernel of this chapter runs on a GPU: times are of this CPU, and
# statements about a GPU are counted, compiled or modelled, and say so.
#
# **You need** chapters 14 (attention), 17 ([prefill](../docs/glossary.md#prefill),
# [decode](../docs/glossary.md#decode) and the [roofline](../docs/glossary.md#roofline)), 22 (block
# tables) and 31 (kernels in Triton; registers, shared memory, warps).
# **Time:** about 65 minutes to read and try, about 100 for the exercises.
#
# **Where we are:** token ids → embedding → 30 × ( norm → **attention** → add → norm → feed-forward →
# add ) → norm → output head → next token. This chapter exchanges the function inside attention, and
# none of its results.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | prefill | memory bandwidth, then compute | L1 kernels | tile size | bytes moved, TTFT |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[gpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
import math
from functools import partial

import torch

from minigen import SamplingParams
from minigen.model.attention import attention, attention_naive, causal_mask
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    mark,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch32_flash_attention.figures import (
    by_length,
    bytes_by_tile,
    draw_tiles,
    on_chip,
    online_softmax,
    rows_by_program,
)
from minigen_course.ch32_flash_attention.lesson import (
    Sight,
    fold_tiles,
    numbers_moved,
    pairs_wanted,
    score_tiles,
)
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.figures.show import best_seconds
from minigen_course.grading.plug_in import attend_by, attending
from minigen_course.lab.cost_model import MACHINES
from minigen_course.lab.inspect_model import head_scores, recorded_heads
from minigen_course.lab.memory_watch import count_memory

llm = load_model(weights="float32", enable_prefix_caching=False)  # nothing is kept from run to run
greedy = SamplingParams(temperature=0, max_tokens=16)
chapter_map("attention", "GPU kernels")

# %% [markdown]
# ## A number that hurts
#
# Here is one layer's attention, **written out** step by step as in chapter 14 (`attention_naive`), on
# random queries, keys and values of longer and longer prompts. Each of torch's operators hands its
# result to the next one as a tensor in memory. `count_memory` watches the operators and counts the
# bytes of the tensors that they create: the largest one, and all that exist at the same time. (A
# **MB** is a million bytes; a MiB is 2²⁰ = 1,048,576 bytes.)
#
# Queries, keys and values of 2,048 tokens take 8 MB in this model, and the result takes 5 MB. Predict:
# how many MB exist at the same time on the way?

# %%
guess_peak = predict("How many MB exist at once, for 2,048 tokens?", None, within=2)


# %%
def layer_inputs(num_new, context=None):
    """Queries, keys and values of the model's shape, at random."""
    torch.manual_seed(32)
    heads = (llm.config.q_heads, llm.config.kv_heads, llm.config.kv_heads)
    lengths = (num_new, context or num_new, context or num_new)
    return [torch.randn(*each, llm.config.head_dim) for each in zip(lengths, heads, strict=True)]


lengths = (256, 512, 1024, 2048)
written_out = {n: count_memory(partial(attention_naive, *layer_inputs(n))) for n in lengths}
one_head = 2048 * 2048 * torch.float32.itemsize
print(f"scores of one head, 2,048 tokens: {one_head:,} bytes, {one_head / 2**20:.0f} MiB")
print(f"of all {llm.config.q_heads} heads: {llm.config.q_heads * one_head / 1e6:.0f} MB\n")
print("tokens   given   result   largest tensor   at once")
for n, memory in written_out.items():
    given = layer_inputs(n)
    sizes = (sum(each.nbytes for each in given), given[0].nbytes, memory.largest, memory.peak)
    print(f"{n:>6}" + "{:>7.1f}{:>9.1f}{:>14.1f}{:>13.1f}  MB".format(*(s / 1e6 for s in sizes)))
three, copies, mask = 3 * llm.config.q_heads * one_head, 2 * given[0].nbytes, 2048 * 2048
print(f"\nthree matrices, keys and values copied, the mask: {three / 1e6:.1f} + ", end="")
print(f"{copies / 1e6:.1f} + {mask / 1e6:.1f} = {(three + copies + mask) / 1e6:.1f} MB")
assert round(written_out[2048].peak / 1e6) == round((three + copies + mask) / 1e6)
guess_peak.compare(round(written_out[2048].peak / 1e6), "MB")

# %% [markdown]
# Each row of the table has twice the tokens of the row above. What is given and the result double, too.
# The largest tensor grows four times: it holds a score for each head, each query and each key.
#
# The last line of the cell adds up what exists at the worst moment. Three tensors of 151 MB are there
# at once: the scores with the mask, the same scores less their row's maximum, and the exponentials of
# those. Chapter 14's copies of keys and values for the heads that share them take 9.4 MB, and the mask
# 4.2. Each of these tensors is written by one operator and read by the next.
#
# ## The smallest version that works
#
# Take one query of a real head: the last token of a text looks back at 37 keys. `look_back` below
# returns its scores $s_j$ and, to keep the pictures small, only the first eight of the 64 numbers of
# each value $v_j$. (`head_scores` has divided by √d already, as in chapter 14, so a score is
# $s_j = q \cdot k_j / \sqrt d$.) [Softmax](../docs/glossary.md#softmax) in its stable form goes over the
# row three times: for the maximum $m$, for the sum of the weights $\ell$, and for the result $o$.
#
# $$m = \max_j s_j, \qquad \ell = \sum_j e^{s_j - m}, \qquad o = \sum_j \frac{e^{s_j - m}}{\ell}\, v_j$$

# %%
text = (
    "The old lighthouse keeper lost his lamp in the storm, so the young sailor rowed out and gave "
    "the keeper a new lamp. In the morning the keeper thanked the sailor and lit the"
)
ids = llm.tokenizer.encode(text)[:40]
heads = recorded_heads(llm, ids)[11]
HEAD = 2


def look_back(head):
    """The last token's scores of all keys, and the first eight numbers of the keys' values."""
    return head_scores(heads)[head, -1], heads.v[:, head // 3, :8]


scores, values = look_back(HEAD)
highest = max(scores.tolist())  # once over all keys
weight_sum = sum((score - highest).exp() for score in scores)  # twice
expected = sum(  # three times
    (s - highest).exp() / weight_sum * value for s, value in zip(scores, values, strict=True)
)
torch.testing.assert_close(expected, scores.softmax(0) @ values)
print(f"{len(scores)} keys, the maximum is {highest:.2f}, the sum {weight_sum:.2f}")

# %% [markdown]
# ## Why it needs the whole row
#
# The sum needs the maximum, and each weight needs the sum. So all scores must be known before the
# first value can be added, and they must be kept until then (or be computed three times). For one
# query that is a row. For a prompt it is the matrix.
#
# Can it be done if each key and its value are seen only once? Think before you read on.
#
# ## Three numbers by hand
#
# Two changes make it possible. First, the division by $\ell$ can wait: add up the weights in $\ell$,
# add up the weighted values in $O$, and divide once at the end. That leaves the maximum $m$, which is
# not known before the last key. Second, take the largest score **so far** instead. When a larger one
# comes, everything accumulated with the old maximum is too large by one common factor, because
# $e^{s - m'} = e^{s - m} \cdot e^{m - m'}$. So multiply $\ell$ and $O$ by $e^{m - m'}$ and go on.
#
# Three keys with the scores 1, 3, 2 and, for simplicity, values of one number each: 10, 20, 40.
#
# | key | score | $m$ before and after | factor $e^{m - m'}$ | sum of weights $\ell$ | weighted values $O$ |
# |---|---|---|---|---|---|
# | 1 | 1 | −∞, 1 | nothing before | $e^{1-1} = 1$ | $1 \cdot 10 = 10$ |
# | 2 | 3 | 1, 3 | $e^{-2} = 0.135$ | $0.135 \cdot 1 + 1 = 1.135$ | $0.135 \cdot 10 + 1 \cdot 20 = 21.353$ |
# | 3 | 2 | 3, 3 | $e^{0} = 1$ | $1.135 + e^{-1} = 1.503$ | $21.353 + 0.368 \cdot 40 = 36.069$ |
#
# The answer is $O / \ell = 36.069 / 1.503 = 24.0$. The second key was larger than the first, so the
# first key's share was corrected afterwards, without looking at that key again. The third key was not
# larger, so its row has the factor 1. The same in Python:

# %%
maximum, total, mixed = -math.inf, 0.0, 0.0
for score, value in ((1.0, 10.0), (3.0, 20.0), (2.0, 40.0)):
    larger = max(maximum, score)
    factor, weight = math.exp(maximum - larger), math.exp(score - larger)
    total, mixed = factor * total + weight, factor * mixed + weight * value
    maximum = larger
    print(f"score {score:.0f}: m {maximum:.0f}, factor {factor:.3f}, l {total:.3f}, O {mixed:.3f}")
at_once = torch.tensor([1.0, 3.0, 2.0]).softmax(0) @ torch.tensor([10.0, 20.0, 40.0])
print(f"O / l = {mixed / total:.3f}; softmax of all three at once gives {at_once:.3f}")

# %% [markdown]
# ## The idea as a formula
#
# Nothing in this needs the keys to come one by one. Let a whole tile of keys arrive. Then
#
# $$m' = \max\big(m, \max_j s_j\big), \qquad
# \ell' = e^{m - m'}\, \ell + \sum_j e^{s_j - m'}, \qquad
# O' = e^{m - m'}\, O + \sum_j e^{s_j - m'} v_j$$
#
# where $j$ runs over the keys of the new tile. After the last tile the result is $o = O / \ell$. This is
# **[online softmax](../docs/glossary.md#online-softmax)**
# ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867) have $m$ and $\ell$, which they call
# $d$; the values come in with FlashAttention). The names here, in the code and in the paper:
#
# | symbol | meaning | in the code | [FlashAttention](https://arxiv.org/abs/2205.14135), Algorithm 1 |
# |---|---|---|---|
# | $s_j$ | score of key $j$, $q \cdot k_j / \sqrt d$ | `scores` | a row of $S_{ij}$, without $1/\sqrt d$ |
# | $m$, $m'$ | largest score before and after a tile | `maximum`, `higher` | $m_i$, $m_i^{new}$ |
# | $e^{m - m'}$ | the rescale factor | `shrink` | the same |
# | $\ell$ | sum of the weights so far | `total` | $\ell_i$ |
# | $O$ | weighted sum of values so far, not yet divided | `mixed` | $O_i$, which Algorithm 1 divides by $\ell_i$ after each tile |
# | $i$, $j$ | tile of queries, tile of keys | two loops | $i$, $j$ |
#
# ([FlashAttention-2](https://arxiv.org/abs/2307.08691) divides once at the end, as we do.)
#
# Two sets of keys can also be treated alike, each with its own maximum, and be joined afterwards. Here
# are the two halves of the 37 keys of the real head:

# %%
halves = zip(scores.split(20), values.split(20), strict=True)
(m1, t1, x1), (m2, t2, x2) = (
    (s.max(), (s - s.max()).exp().sum(), (s - s.max()).exp() @ v) for s, v in halves
)
m = max(m1, m2)
t = t1 * (m1 - m).exp() + t2 * (m2 - m).exp()
x = x1 * (m1 - m).exp() + x2 * (m2 - m).exp()
torch.testing.assert_close(x / t, expected)
print(f"first half:  maximum {m1:.2f}, counts {(m1 - m).exp():.3f} times in the end")
print(f"second half: maximum {m2:.2f}, counts {(m2 - m).exp():.3f} times")

# %% [markdown]
# The second half has the larger maximum, so the first half counts only $e^{-0.89 - 2.41} = 0.037$ times.
# Three things are enough to remember a half: its maximum, its sum of weights, and its weighted values.
#
# Now tile by tile, with eight keys in each. The three tiles at the beginning of this row have the
# maximum −0.89. The fourth has a key with the score 2.11. Predict: what is left of a weight of 1?

# %%
guess_left = predict("The maximum goes from -0.89 to 2.11: what is left of a weight of 1?", None, within=1.2)

# %% [markdown]
# Play it, move the step, take another head or smaller tiles. The picture stands at the fourth tile,
# where the maximum leaps.
#
# - **Left:** the scores. Orange bars are those of the newest tile, blue ones came earlier, pale ones
#   are still to come. The dashed line is the maximum so far.
# - **Middle:** the weights $e^{s - m}$ that the scores have now. A grey outline is the weight that an
#   older key had before the newest tile came, and the arrow is the factor $e^{m - m'}$ that took it
#   down to the blue bar. One factor holds for all of them.
# - **Right:** the answer so far, $O / \ell$, for the eight numbers of the values. The dots are the answer
#   over all keys, which the last tile must reach.

# %%
TILE = 8
folds = fold_tiles(scores, values, TILE)
leap = min(range(1, len(folds)), key=lambda tile: folds[tile].shrink)


def at_tile(step, head, tile):
    own, rows = look_back(head)
    return online_softmax(own, rows, tile, min(step + 1, -(-len(own) // tile)))


replay(
    at_tile,
    10,
    "Online softmax at its fourth tile: scores, weights exp(s - m), and the answer so far. The "
    "maximum leaps, and all weights before it shrink by one factor, the arrow.",
    at=leap,
    number="32.1",
    head=(0, llm.config.q_heads - 1, 1, HEAD),
    tile=[TILE, 4],
)
assert folds[leap].shrink < 0.5  # the frozen picture shows a leap
guess_left.compare(round(folds[leap].shrink, 2))
for number, fold in enumerate(folds, 1):
    kept = f"what was before counts {fold.shrink:.2f} times" if number > 1 else "nothing was before"
    print(f"tile {number}: maximum {fold.maximum:>5.2f}, {kept}")
show(fold_tiles)

# %% [markdown]
# Read the printed lines beside the picture. Tile 2 raises the maximum a little, tile 3 not at all
# (factor 1.00), and tile 4 by 3.00: $e^{-3.00} = 0.05$. What 24 keys had added up until then is worth a
# twentieth afterwards. That is right, because next to a score of 2.11 they hardly count.
#
# ## Your turn: two parts become one
#
# `fold_tiles` has one query. Write the step for many queries at once, for two parts whose keys are
# different. `Partial(maximum, total, mixed)` holds the three things: in `maximum` and `total` a number
# for each query, in tensors of any shape, and in `mixed` a row of numbers for each query, so it has an
# axis more. With the parts 1 and 2:
#
# $$m = \max(m_1, m_2), \qquad \ell = e^{m_1 - m}\, \ell_1 + e^{m_2 - m}\, \ell_2, \qquad
# O = e^{m_1 - m}\, O_1 + e^{m_2 - m}\, O_2$$
#
# | one query | `maximum` | `total` | `mixed` |
# |---|---|---|---|
# | part 1 | 3 | 2 | [4, 0] |
# | part 2 | 1 | 1 | [8, 8] |
# | merged, with $e^{1-3} = 0.135$ | 3 | 2 + 0.135 = 2.135 | [4 + 1.083, 1.083] |
#
# Mind queries that have seen no key yet. Their maximum is −∞, and −∞ − (−∞) is not a number.
#
# One line puts your part to work: while the block runs, the engine's prompts are attended to by the
# package's loop over tiles of 16, which calls `merge` once for each of them. (That loop is your
# next exercise. Until yours passes, `my_merge` is the package's own.)

# %%
task(32, "merge")

# %%
# exercise: minigen_course.ch32_flash_attention.flash.merge
from minigen_course.ch32_flash_attention.flash import Partial


def merge(one: Partial, other: Partial) -> Partial:
    """Combine two partial results over different keys into one; no key may be in both.

    >>> one = Partial(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[4.0]]))
    >>> other = Partial(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[5.0]]))
    >>> both = merge(one, other)
    >>> (both.mixed / both.total.unsqueeze(-1)).tolist()
    [[3.0]]
    """
    raise NotImplementedError  # your turn


# %%
from minigen_course.ch32_flash_attention.flash import (
    Partial,
    attend_tile,
    flash_attention,
    nothing_seen,
)

my_merge = check(32, merge=merge)
with using(32, merge=my_merge), attending(llm, attend_by(partial(flash_attention, tile=16))):
    print(llm.generate(text, greedy).text)
reveal(32, merge=my_merge)
show(nothing_seen, attend_tile, causal_mask)

# %% [markdown]
# `nothing_seen` is the state before the first tile: maximum −∞, sum 0, values 0. `attend_tile` computes
# the three things for one tile; its scores exist only inside it. `causal_mask` is chapter 14's.
#
# ## Tiles on the matrix that is not there
#
# For all queries at once the scores are a matrix again: a row for each query, a column for each key.
# Cut it into tiles of some queries by some keys. A row of tiles belongs to the same queries. Go over it
# from left to right with `merge`, and only one tile of scores exists at a time.
#
# The causal mask hides all keys behind a query's own position, so it hides everything to the right of
# the diagonal. Three kinds of tiles follow, which the picture colours:
#
# - tiles below the diagonal are seen whole and need no mask (blue),
# - tiles that the diagonal cuts need the mask (orange),
# - tiles beyond the diagonal are fully masked and are skipped (pale).
#
# A prompt that goes on from a cached beginning (chapter 23) has more keys than queries, so the diagonal
# begins farther to the right: `tokens_before` in the controls. A sliding window (chapter 14) also
# leaves out the oldest tiles. Predict before you move them:

# %%
guess_waste = predict("Do smaller tiles compute more or fewer scores that do not count?", None)


# %%
def tiles(new_tokens, tokens_before, queries_a_tile, keys_a_tile, window):
    context = new_tokens + tokens_before
    return draw_tiles(new_tokens, context, queries_a_tile, keys_a_tile, window or None)


explore(
    tiles,
    "The matrix of queries and keys in tiles. Blue tiles are seen whole, orange ones are cut by the "
    "diagonal, and pale ones are skipped.",
    "32.2",
    new_tokens=(16, 256, 16, 96),
    tokens_before=(0, 256, 16, 32),
    queries_a_tile=(8, 64, 8, 16),
    keys_a_tile=(8, 64, 8, 16),
    window=(0, 128, 8, 0),
)
waste = {}
for block in (16, 64, 256):
    computed = [t.pairs for t in score_tiles(2048, 2048, block, block) if t.sight != Sight.NOTHING]
    waste[block] = sum(computed) / pairs_wanted(2048, 2048) - 1
    print(f"tiles of {block:>3}: {len(computed):>5,} computed, {waste[block]:.1%} too many scores")
guess_waste.compare("fewer" if waste[16] < waste[256] else "more")

# %% [markdown]
# A tile that the diagonal cuts is computed whole, and about half of its scores are thrown away. With $B$
# queries and $B$ keys in a tile and $n$ tokens ($n$ a multiple of $B$), $\frac n B (\frac n B + 1) / 2$
# tiles of $B^2$ scores are computed, that is $n (n + B) / 2$ scores. The mask leaves $n (n + 1) / 2$. For
# $n = 2{,}048$ and $B = 64$: 32 × 33 / 2 = 528 tiles, and 2,112 / 2,049 = 1.031, so 3.1% too many. Small
# tiles waste less. What speaks for large ones comes with the bytes, below.
#
# ## Your turn: the loop over tiles
#
# The parts of it are given, and shown above: what queries remember before the first tile
# (`nothing_seen`), what they remember of one tile (`attend_tile`), and chapter 14's `causal_mask`;
# `my_merge` joins. You write the two loops and their bounds. An example: 5 new tokens are the last of
# a context of 12, and a tile has 4. (Ranges are Python's: 7:11 is 7, 8, 9, 10.)
#
# | tile of queries | rows of q | their positions | tiles of keys |
# |---|---|---|---|
# | 1 | 0:4 | 7:11 | 0:4, 4:8, 8:11 |
# | 2 | 4:5 | 11:12 | 0:4, 4:8, 8:12 |
#
# The third tile of keys of the first row ends at 11, because none of its queries sees key 11.

# %%
task(32, "flash_attention")

# %%
# exercise: minigen_course.ch32_flash_attention.flash.flash_attention
from jaxtyping import Float
from torch import Tensor


def flash_attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
    tile: int = 64,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Compute causal attention as in chapter 14, at most `tile` queries by `tile` keys at a time.

    The queries are the last `tokens` positions of the context. A tile of queries does not read the
    keys and values that none of its queries sees. Apart from the data of one tile, no tensor that
    is allocated is larger than the result.
    """
    raise NotImplementedError  # your turn


# %%
my_flash = check(32, flash_attention=flash_attention)
with attending(llm, attend_by(my_flash)):
    answer = llm.generate(text, greedy).text
assert answer == llm.generate(text, greedy).text
print("as with the engine's own attention:", answer)
reveal(32, flash_attention=my_flash)

# %% [markdown]
# ## The measurement again
#
# The same prompts and the same counting, for three ways. The third is torch's own
# `scaled_dot_product_attention`, which chapter 14's `attention` calls. It goes over tiles, too, inside
# one operator that is written in C++: all steps of attention in one function, which is called
# **fused**. (Our counting does not see the tiles inside it.)

# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)  # bytes are the same, and many small operators do not wait for threads
ways = {"written out": attention_naive, "a loop over tiles": my_flash, "torch, fused": attention}
peaks = {
    name: {n: count_memory(partial(way, *layer_inputs(n))).peak for n in lengths}
    for name, way in ways.items()
}
torch.set_num_threads(threads)
for name, found in peaks.items():
    result = layer_inputs(2048)[0].nbytes
    times = [found[2 * n] / found[n] for n in lengths[:-1]]
    print(f"{name:<18}{found[2048] / 1e6:>7.1f} MB at 2,048 tokens, the result being", end=" ")
    print(f"{result / 1e6:.1f}; twice the tokens:", *(f"{each:.2f}x" for each in times))
picture(
    by_length(
        {name: {n: each / 1e6 for n, each in found.items()} for name, found in peaks.items()},
        "MB at once",
        "Written out, memory grows with the square of the prompt; in tiles, with the prompt",
    ),
    "Bytes that exist at once in one layer's attention, on logarithmic axes: a step to the right is "
    "twice the tokens, a step up is twice the MB.",
    number="32.3",
)

# %% [markdown]
# From $O(n^2)$ to $O(n)$: what is left is the result, and one tile. The scores cost no memory any more.
#
# And time? [FlashAttention](../docs/glossary.md#flashattention) computes no fewer scores than a masked
# matrix needs; it is faster where writing and reading that matrix took the time. Torch's operator is
# the fair witness on this CPU: the same arithmetic in tiles, compiled. (Our loop is Python, and its
# tiles are small: it is there to be read.) First a prompt.
#
# For one new token there is no matrix, only a row of scores. Chapter 14's version does something else
# besides: it copies keys and values for every query head that shares them. So there is a **control**:
# the same three steps, written out, with the scores in memory, but on views of the keys and values
# instead of copies. If FlashAttention's idea helped here, it would have to beat the control.

# %%
guess_decode = predict("One new token: how many times as fast as the control?", None)


# %%
def control(q, k, v):
    """Attention of one token, written out, without a copy of keys and values."""
    grouped = q[0].unflatten(0, (k.shape[1], -1))  # KV heads, group, head_dim
    scores = grouped @ k.permute(1, 2, 0) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.transpose(0, 1)).flatten(0, 1)[None]


prompt, one_row = layer_inputs(2048), layer_inputs(1, 2048)
torch.testing.assert_close(control(*one_row), attention(*one_row), atol=1e-5, rtol=1e-4)
timed = {  # what is measured, against torch's fused operator
    "a prompt of 2,048": (attention_naive, prompt, 3),
    "one token after 2,048, keys copied": (attention_naive, one_row, 7),
    "one token, the control": (control, one_row, 7),
}
gains = {}
for name, (way, given, repeats) in timed.items():
    apart, fused = (best_seconds(partial(each, *given), repeats) for each in (way, attention))
    gains[name] = apart / fused
    print(
        f"{name}: written out {mark(1e3 * apart, 'ms')}, fused {mark(1e3 * fused, 'ms')}", end=", "
    )
    print(mark(gains[name], "times"))
guess_decode.compare(gains["one token, the control"], "times", measured=True)
row_of_scores = llm.config.q_heads * 2048 * 4
keys_and_values = sum(each.nbytes for each in one_row[1:])
saved = 4 * row_of_scores  # scores and weights, each written and read
at_most = (keys_and_values + saved) / keys_and_values
print(f"\none token: {row_of_scores:,} bytes of scores,", end=" ")
print(f"{keys_and_values:,} of keys and values: by bytes at most {at_most:.2f} times as fast")

# %% [markdown]
# The row of scores is much smaller than the keys and values, which must be read in any case. Most of
# what the first comparison gains for one token is the copy of keys and values, and the control does
# not make it either. Chapter 33 is about that case.
#
# ## The kernel, step by step
#
# From here on Triton is needed, as chapter 31 had it: interpreted on this processor, every load and
# store recorded. Two new things first. Blocks can have two axes: a column of numbers and a row of
# them, `rows[:, None] * D + dims[None, :]`, make the places of a whole tile. And `tl.dot(a, b)`
# multiplies two tiles, [M, K] by [K, N], on a GPU's *tensor cores*, which do nothing else. All
# sizes are powers of two, 16 at least; `input_precision="ieee"` keeps them from rounding float32
# first.
#
# **Step 1: a tile of scores a program.** This is the matrix again, in memory.

# %%
from minigen_course.lab.triton_interpreter import need_triton

need_triton()  # it is for Linux: elsewhere, this line says what to do
import triton
import triton.language as tl

from minigen_course.ch32_flash_attention.lesson import flash_by, record_flash
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, interpreted


@triton.jit
def scores_kernel(q_ptr, k_ptr, scores_ptr, n, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :]) * scale  # 1 / sqrt(D): q, not q k^T
    k = tl.load(k_ptr + columns[:, None] * D + dims[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    tl.store(scores_ptr + rows[:, None] * n + columns[None, :], scores)


q, k, v = (torch.randn(64, 16) for _ in range(3))  # one head, 64 tokens, head_dim 16
made, scale = torch.zeros(64, 64), 16**-0.5
steps = record_programs(
    lambda: scores_kernel[4, 4](q, k, made, 64, scale, D=16, BLOCK=16), q=q, k=k, scores=made
)
torch.testing.assert_close(made, q @ k.T * scale, atol=1e-5, rtol=1e-5)
stored = bytes_moved([each for each in steps if each.is_store])
print(f"16 programs store {stored:,} bytes of scores; the result has {q.nbytes:,}")

# %% [markdown]
# **Step 2: the loop.** A program keeps its queries and goes over all tiles of keys. Scores,
# maximum, sum and mixed values are blocks in registers; only the result is stored. (No mask yet:
# every query sees every key.)

# %%
guess_keys = predict("64 queries in tiles of 16: how often is a row of keys loaded?", None)


# %%
@triton.jit
def look_kernel(q_ptr, k_ptr, v_ptr, mixed_ptr, n, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    rows, dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :]) * scale
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n, BLOCK):
        tile = (start + tl.arange(0, BLOCK))[:, None] * D + dims[None, :]
        keys, values = tl.load(k_ptr + tile), tl.load(v_ptr + tile)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink, weights = tl.exp(maximum - higher), tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = higher
    tl.store(mixed_ptr + rows[:, None] * D + dims[None, :], mixed / total[:, None])


looked = torch.zeros(64, 16)
steps = record_programs(
    lambda: look_kernel[(4,)](q, k, v, looked, 64, scale, D=16, BLOCK=16),
    **{"q": q, "k": k, "v": v, "mixed": looked},
)
torch.testing.assert_close(looked, (q @ k.T * scale).softmax(-1) @ v, atol=1e-4, rtol=1e-4)
stored = bytes_moved([each for each in steps if each.is_store])
print(f"4 programs store {stored:,} bytes, and load {bytes_moved(steps) - stored:,}")
key_loads = bytes_moved([each for each in steps if each.tensor == "k"]) // k.nbytes
guess_keys.compare(key_loads, "times")
picture(
    rows_by_program(steps, {"q": 16, "k": 16, "mixed": 16}),
    "A line for each of four programs: its own rows of q, all rows of k, its own of the result.",
    number="32.4",
)

# %% [markdown]
# Every program loads all keys and values, so they are loaded once for every tile of queries: that
# is the price. Twice as many queries in a tile, half the loads.
#
# ## Your turn: the kernel
#
# **Step 3** is yours: several heads that share KV heads, causal, for any number of tokens. So:
# masks for rows that are not there, a mask on the diagonal, and an end of the loop behind the last
# query's own key.
#
# Below it is put into the engine, and its bytes are counted as it runs, against a formula: queries
# and results once; keys and values once for each tile of queries, as far as these see.

# %%
task(32, "flash_kernel")

# %%
# exercise: minigen_course.ch32_flash_attention.kernels.flash_kernel
import triton.language as tl


def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_new,
    context,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, h): causal attention of `BLOCK_M` queries of head h, from row i * `BLOCK_M` on.

    q and mixed (the result) are [num_new, Q_HEADS, HEAD_DIM], k and v [context, KV_HEADS,
    HEAD_DIM]. All are contiguous and have one dtype of 16 or 32 bits; the maximum, the sum and the
    weighted values are float32. The queries are the last `num_new` of the `context` positions.
    Query head h uses KV head h // (Q_HEADS // KV_HEADS). Scores are multiplied by `scale`. A
    program loads its queries once, and `BLOCK_N` keys and values at a time, none after the position
    of its last query. HEAD_DIM and both block sizes are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn


# %%
my_kernel = check(32, flash_kernel=flash_kernel)
few = SamplingParams(temperature=0, max_tokens=4)
with attending(llm, attend_by(flash_by(my_kernel))):
    answer = llm.generate("The old lighthouse", few).text
assert answer == llm.generate("The old lighthouse", few).text
print(f"the engine, its prompt through this kernel in every layer: {answer!r}")

q, k, v = (torch.randn(96, 1, 16) for _ in range(3))
for block in (32, 16):
    accesses = record_flash(my_kernel, q, k, v, torch.zeros_like(q), block, 16)
    formula = 4 * numbers_moved(96, 96, 16, block)
    assert bytes_moved(accesses) == formula
    print(f"{block} queries a tile: {formula:,} bytes, counted and by the formula")
picture(
    rows_by_program(accesses, {"q": 16, "k": 16, "mixed": 16}),
    "A line for each of six programs: rows of k are loaded up to the diagonal, a staircase.",
    number="32.5",
)
reveal(32, flash_kernel=my_kernel)

# %% [markdown]
# ## The package's kernel
#
# The engine's has what yours has, and four things more: it finds keys and values through block
# tables (chapter 22), takes all sequences of a batch in one launch, knows windows, and has the
# loop twice, without the mask before the diagonal and with it there. Below is the loop, which it
# calls for both. A GPU has an instruction for powers of two, none for powers of e: so `scale` has
# log2(e) in it, and `exp2` gives what `exp` would.

# %%
from minigen.kernels.triton import prefill_attention

show(prefill_attention._fold_tiles.fn)
q, keys, values = torch.randn(21, 4, 16), *torch.randn(2, 6, 8, 2, 16)  # 6 blocks of 8 slots
tables, starts = torch.tensor([[4, 2, 0], [5, 1, 3]]), torch.tensor([0, 9, 21])
batch = (q, keys, values, tables, starts, torch.tensor([9, 23]))
with interpreted():
    ours = prefill_attention.flash_prefill_triton(*batch, most_new=12)
torch.testing.assert_close(
    ours, prefill_attention.flash_prefill_torch(*batch), atol=1e-4, rtol=1e-4
)
print("two sequences, 9 tokens of 9 and 12 of 23, through their tables: as chapter 14 has it")

# %% [markdown]
# ## What a tile may cost
#
# Larger tiles load less. But queries, scores and mixed values must find room in a program's
# registers, and the tiles of keys and values in the *shared* memory that it has on the chip, a
# hundred kilobytes or two. A program's registers are those of its threads, and chapter 31 found that
# more warps are more threads. So a tile is too large only **for a number of warps**: Triton takes 4
# unless it is told otherwise. Compiled for an A100 (`sm_80`) and an H100 (`sm_90`), without one, for
# heads of 128 numbers:

# %%
guess_spilled = predict("128 x 64 spills with 4 warps: how many bytes with 8?", None, within=2)

# %%
from minigen_course.ch31_triton.gpu_kernels import SHARED_MEMORY, machine_code

on_gpu = [torch.empty(512, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8, 8)]
spilled = {}
for chip, block_m, block_n, num_warps in (
    ("sm_80", 64, 32, 4),
    ("sm_80", 128, 64, 4),
    ("sm_80", 128, 64, 8),
    ("sm_90", 128, 64, 4),
    ("sm_90", 128, 64, 8),
):
    tile = flash_by(my_kernel, block_m, block_n, num_warps)
    (code,) = machine_code(chip, lambda tile=tile: tile(*on_gpu))
    spilled[chip, block_m, num_warps] = code.spilled
    print(f"{chip}, {block_m:>3} queries by {block_n} keys, {num_warps} warps:", end=" ")
    print(f"{mark(code.registers, 'registers')}, {mark(code.spilled, 'bytes spilled')},", end=" ")
    print(f"{mark(code.shared, 'bytes')} shared, of {SHARED_MEMORY[chip]:,}")
guess_spilled.compare(spilled["sm_80", 128, 8], "bytes", measured=True)

# %% [markdown]
# With twice as many warps each thread keeps half as much of the tile. That is why the engine's kernel
# launches its tiles of 128 queries with 8 warps. The price: the warps of a program wait for each
# other, and a processor holds fewer programs. Which pair of tile and warps is fastest is a question
# for a GPU, and is not tested here.

# %% [markdown]
# ## How much faster, then?
#
# Nothing here ran on a GPU, so we cannot say. Bytes and operations give bounds, if a chip reached its
# data sheet's bandwidth and peak, which none does. The least that the
# written-out way moves: scores written and read, weights written and read, in bfloat16, and it
# multiplies the masked half as well. In tiles, what is loaded again may come from memory, or from
# the cache that all programs share (L2), if keys and values find room there: then memory gives them
# once. One layer of Llama-3-8B's shape (32 heads of 128, 8 KV heads), 2,048 tokens:

# %%
h100, q_heads, kv_heads, head_dim, n = MACHINES["H100 SXM"], 32, 8, 128, 2048
stored = score_tiles(n, n, 128, 64)
pairs_computed = sum(each.pairs for each in stored if each.sight is not Sight.NOTHING)
moved_once = 2 * (q_heads + kv_heads) * n * head_dim
work = {  # numbers of 2 bytes, and scores
    "written out": (q_heads * 4 * n * n + moved_once, n * n),
    "in tiles": (q_heads * numbers_moved(n, n, head_dim, 128), pairs_computed),
    "in tiles, with L2": (moved_once, pairs_computed),
}
least = {}
for name, (numbers, pairs) in work.items():
    flops = 4 * q_heads * head_dim * pairs
    by_bytes, by_flops = 2 * numbers / h100.bandwidth, flops / h100.flops
    least[name] = max(by_bytes, by_flops)
    print(f"{name:<18}{2 * numbers / 1e6:>5.0f} MB, {by_bytes * 1e6:>4.0f} µs;", end=" ")
    print(f"{flops / 1e9:>3.0f} billion operations, {by_flops * 1e6:>3.0f} µs")
low, high = (least["written out"] / least[name] for name in list(work)[1:])
print(f"modelled, at the limits of an {h100.name}: {low:.1f} to {high:.1f} times as fast")

# %% [markdown]
# Written out, memory is the limit; in tiles, it is arithmetic as soon as the cache helps. No kernel
# reaches a chip's peak of arithmetic, so less than the bound remains. And it is attention alone:
# the linear layers of a prompt stay as they were.
#
# ## What the production engines do beyond this
#
# - **vLLM** and **SGLang** call FlashAttention 2 and 3 or FlashInfer, which take block tables as
#   ours does. Version 2 gave the warps of a program different queries, so that they need not talk;
#   version 3, for the H100, has some warps load while others multiply, and can compute in FP8.
# - **TensorRT-LLM** has its own fused kernels, chosen by chip, head size and precision.
# - **TGI** packs sequences of all lengths without padding (`cu_seqlens`, our `starts`).
# - **llama.cpp** has the same idea in C, CUDA and Metal behind `--flash-attn`; a quantised cache
#   of values needs it.
# - Where no one GPU holds a context, ring attention passes keys and values from GPU to GPU, and
#   what each round has found is joined as `merge` does. (**DeepSpeed** deals out heads instead.)
# - PyTorch's FlexAttention compiles such a kernel for masks and scores that a user writes.

# %% [markdown]
# ## Claims

# %%
loop = peaks["a loop over tiles"]
growth = loop[2048] / loop[1024]
verdicts(
    "32",
    Claim(
        "A 2,048-token score matrix costs about 16 MB for each head",
        f"{one_head / 2**20:.0f} MiB in float32; written out, a layer's {llm.config.q_heads} heads "
        f"take {peaks['written out'][2048] / 1e6:.0f} MB at once",
        within(one_head / 1e6, 15, 17.5),
        "it is tokens x tokens x 4 bytes, and several such matrices are there at a time",
    ),
    Claim(
        "FlashAttention's memory grows with the tokens, not with their square",
        f"{loop[2048] / 1e6:.1f} MB at once for 2,048 tokens, of which the result is "
        f"{prompt[0].nbytes / 1e6:.1f}; {growth:.2f} times that of 1,024",
        within(growth, 1.5, 2.2),
        "one tile of scores is there at a time",
        "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)",
    ),
    Claim(
        "FlashAttention is 2 to 4 times as fast as standard attention on a GPU",
        f"modelled for a prompt of {n:,} tokens on an {h100.name}: bytes and operations allow "
        f"{low:.1f} to {high:.1f} times; on this CPU torch's fused operator is "
        f"{mark(gains['a prompt of 2,048'], 'times')} as fast as chapter 14's",
        NOT_TESTED,
        "it is the traffic of scores that goes; how much that was depends on chip, length and baseline, "
        "and no GPU ran here",
        "[Dao 2023](https://arxiv.org/abs/2307.08691)",
    ),
    Claim(
        "FlashAttention makes decoding faster, too",
        f"one new token: scores are {row_of_scores / keys_and_values:.1%} of the bytes of keys and "
        f"values, so at most {at_most:.2f} times by bytes; against a control without copies "
        f"{mark(gains['one token, the control'], 'times')} on this CPU",
        holds(at_most >= 1.5),
        "one query has no matrix of scores to save; what helps there is reading keys and values in "
        "place, and on a GPU splitting the context (chapter 33)",
    ),
)

# %% [markdown]
# **Next:** chapter 33, the other half of an engine's attention: one new token, a long context in
# blocks, and `merge` once more.

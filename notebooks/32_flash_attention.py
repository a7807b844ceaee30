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
# computes the same result, up to rounding, and never makes the matrix. A few queries at a time go
# over the keys, one **tile** of neighbouring keys after the other, and remember three things from
# tile to tile.
#
# **Afterwards you can** compute a softmax by hand while its scores arrive one by one, join two halves
# of a softmax, write attention as a loop over tiles, write that loop as a Triton kernel, count the
# bytes that it moves, and say what it saves (memory), what it does not save (the arithmetic of scores
# that count), and where it gains next to nothing (one new token). No kernel of this chapter runs on
# a GPU: times are of this CPU, and numbers for a GPU are counted, compiled, modelled or from data
# sheets.
#
# **You need** chapters 14 (attention), 17 ([prefill](../docs/glossary.md#prefill),
# [decode](../docs/glossary.md#decode) and the [roofline](../docs/glossary.md#roofline)), 22 (block
# tables) and 31 (kernels in Triton; registers, shared memory, warps).
# **Time:** about 65 minutes to read and try, about 110 for the
# [exercises](../exercises/32_flash_attention.ipynb).
#
# **Where we are:** token ids → embedding → 30 × ( norm → **attention** → add → norm → feed-forward →
# add ) → norm → output head → next token. This chapter exchanges the function inside attention; its
# results stay the same, up to rounding.
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
# Here is one layer's attention, **written out** (papers say *materialised*) step by step as in chapter 14
# (`attention_naive`), on random queries, keys and values of longer and longer prompts. Each of torch's
# operators hands its result to the next one as a tensor in memory. `count_memory` watches the operators
# and counts the bytes of the tensors that they create: the largest one, and all that exist at the same
# time. (A **MB** is a million bytes; a MiB is 2²⁰ = 1,048,576 bytes.)
#
# Queries, keys and values of 2,048 tokens take 8 MB in this model, and the result takes 5 MB. Predict:
# how many MB of new tensors exist at the same time on the way?

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
# From row to row of the table the tokens double. The inputs and the result double, too. The largest
# tensor becomes four times as large: it holds a score for each head, each query and each key.
#
# The line below the table adds up what exists at the worst moment. Three tensors of 151 MB are
# there at once: the scores with the mask, the same scores less their row's maximum, and the
# exponentials of those. Chapter 14's copies of keys and values for the heads that share them take
# 9.4 MB, and the mask 4.2. Each of these tensors is written by one operator and read by a later
# one.
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
# In this form the sum needs the maximum, and each weight needs the sum. So all scores must be known
# before the first value can be added, and they must be kept until then (or be computed three
# times). For one query that is a row. For a prompt it is the matrix. (Queries could be taken a few
# at a time. But then a strip of scores as long as the text must be kept, and for a long text it
# does not fit on the chip.)
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
# | 1 | 1 | −∞, 1 | $e^{-\infty} = 0$: nothing before | $e^{1-1} = 1$ | $1 \cdot 10 = 10$ |
# | 2 | 3 | 1, 3 | $e^{-2} = 0.135$ | $0.135 \cdot 1 + 1 = 1.135$ | $0.1353 \cdot 10 + 1 \cdot 20 = 21.353$ |
# | 3 | 2 | 3, 3 | $e^{0} = 1$ | $1.135 + e^{-1} = 1.503$ | $21.353 + 0.3679 \cdot 40 = 36.069$ |
#
# The answer is $O / \ell = 36.069 / 1.503 = 24.0$. The second score was larger than the first,
# so the first key's share was corrected afterwards, without looking at that key again. The third score
# was not larger than the second, so its row has the factor 1. The same in Python:

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
# $d$; the values came in later). The names here, in most functions from here on (the loop above has
# `larger` and `factor` for `higher` and `shrink`), and in the paper:
#
# | symbol | meaning | in the code | [FlashAttention](https://arxiv.org/abs/2205.14135), Algorithm 1 |
# |---|---|---|---|
# | $s_j$ | score of key $j$, $q \cdot k_j / \sqrt d$ | `scores` | a number in $S_{ij}$, without $1/\sqrt d$ |
# | $m$, $m'$ | largest score before and after a tile | `maximum`, `higher` | $m_i$, $m_i^{new}$ |
# | $e^{m - m'}$ | the rescale factor | `shrink` | $e^{m_i - m_i^{new}}$ |
# | $\ell$ | sum of the weights so far | `total` | $\ell_i$ |
# | $O$ | weighted sum of values so far, not yet divided | `mixed` | $O_i$, which Algorithm 1 divides by $\ell_i$ after each tile |
#
# In the paper $i$ and $j$ number tiles of queries and of keys; in the formula above $j$ numbers single
# keys. ([FlashAttention-2](https://arxiv.org/abs/2307.08691) divides once at the end, as we do.)
#
# Two sets of keys can also be treated alike, each with its own maximum, and be joined afterwards. Here
# are two halves, 20 and 17, of the 37 keys of the real head:

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
# Now tile by tile, with eight keys in each but the last, which has five. The first three tiles
# together have the maximum −0.89. The fourth has a key with the score 2.11. Predict: what is left
# of a weight of 1?

# %%
guess_left = predict(
    "The maximum goes from -0.89 to 2.11: what is left of a weight of 1?", None, within=1.2
)

# %% [markdown]
# Play it, move the step, take another head or smaller tiles. (Steps count from 0, so step 3 is the fourth
# tile. With tiles of 8 keys, step 4 is the last; the later ones are for tiles of 4.) The picture stands
# at the fourth tile, where the maximum leaps.
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
# Read the printed lines beside the picture. Tile 2 raises the maximum a little, tile 3 not at all (factor
# 1.00), and tile 4 by 3.00: $e^{-3.00} = 0.05$. What 24 keys had added up until then is worth a twentieth
# afterwards. That is right: beside a score of 2.11, a key with a score of −0.89 or less counts a
# twentieth at most.
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
# course's loop over tiles of 16 queries by 16 keys, which calls `merge` once for each tile that the mask
# leaves: 6 tiles for these 37 tokens, in each of 30 layers. (That loop is your next exercise. Until your
# `merge` passes, `my_merge` is the course's own.)

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
# the three things for one tile; its scores exist only inside it. (`base` is the maximum, or 0 where no
# key was seen.) (`einsum` names axes by letters: "qhd,khd->qhk" multiplies along d and adds up, for each
# query q, head h and key k.) `causal_mask` is chapter 14's.
#
# ## Tiles on the matrix that is not there
#
# For all queries at once the scores are a matrix again: a row for each query, a column for each key.
# Cut it into tiles of some queries by some keys. A row of tiles belongs to the same queries. Go over it
# from left to right with `merge`, and only one tile of scores exists at a time.
#
# The causal mask hides all keys after a query's own position, so it hides everything to the right of
# the diagonal. That gives three kinds of tiles, which the picture colours:
#
# - tiles below the diagonal are seen whole and need no mask (blue),
# - tiles that the diagonal cuts need the mask (orange, "masked" in the picture),
# - tiles beyond the diagonal have no score that counts, and are left out (pale).
#
# A prompt that goes on from a cached beginning (chapter 23) has more keys than queries, so the diagonal
# begins farther to the right: `tokens_before` in the controls. A sliding window (chapter 14) also leaves
# out the oldest tiles, and those that its edge cuts need the mask, too. Predict before you move them:

# %%
guess_waste = predict("Do smaller tiles compute more or fewer scores that do not count?", None)


# %%
def tiles(new_tokens, tokens_before, queries_a_tile, keys_a_tile, window):
    context = new_tokens + tokens_before
    return draw_tiles(new_tokens, context, queries_a_tile, keys_a_tile, window or None)


explore(
    tiles,
    "The matrix of 96 queries and 128 keys in tiles. Blue tiles are seen whole, orange ones need the "
    "mask, and pale ones are left out. The black steps are the edge of the mask.",
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
# In the picture 96 queries follow 32 cached tokens. 33 of the 48 tiles are computed, 33 × 256 = 8,448
# scores, of which 7,728 count.
#
# A tile that the diagonal cuts is computed whole, and about half of its scores are thrown away. Take a
# prompt of $n$ tokens and tiles of $B$ queries by $B$ keys, where $n$ is a multiple of $B$. Then $\frac n B (\frac n B + 1) / 2$
# tiles of $B^2$ scores are computed, that is $n (n + B) / 2$ scores. The mask leaves $n (n + 1) / 2$. For
# $n = 2{,}048$ and $B = 64$: 32 × 33 / 2 = 528 tiles, and 2,112 / 2,049 = 1.031, so 3.1% too many. Small
# tiles waste less. What speaks for large ones comes with the bytes, below.
#
# ## Your turn: the loop over tiles
#
# The parts of it are given, and shown above: what queries remember before the first tile
# (`nothing_seen`), what they remember of one tile (`attend_tile`), and chapter 14's `causal_mask`;
# `merge`, imported from the course, joins. You write the two loops, their bounds, and the mask of a
# tile. (`causal_mask` puts its queries at the end of its keys. So ask it for all keys up to the
# last query, and take the tile's columns.) An example: 5 new tokens are the last of a context of
# 12, and a tile has 4. (Ranges are Python's: 7:11 is 7, 8, 9, 10.)
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
    keys and values that none of its queries sees. Apart from the data of one tile and the mask of
    its queries, no tensor that is allocated is larger than the result.
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
    "Bytes that exist at once in one layer's attention, on logarithmic axes. For twice the tokens the "
    "written-out line climbs nearly one grid line (four times the MB), the others at most half of one.",
    number="32.3",
)

# %% [markdown]
# Written out, twice the tokens take nearly four times the memory: $O(n^2)$, read "of the order of
# $n$ squared". In tiles they take at most twice as much: $O(n)$. What is left in our loop is the
# result, the data of one tile, and the mask of its queries (64 by all keys that they see, a byte
# each).
#
# ## And time?
#
# FlashAttention computes a score for every pair that the mask leaves, and some more. It is faster
# where writing and reading the matrix took the time. Torch's fused operator can be timed on a CPU:
# it works in tiles, too, and is compiled. (Our own loop is Python with small tiles; it is there to
# be read.) For a prompt the comparison is not about memory alone: the written-out version also
# computes the masked half of the scores, which tiles skip, and copies keys and values.
#
# For one new token there is no matrix, only a row of scores. The written-out version does something else
# besides: it copies the keys and values for every query head that shares them. So there is a
# **control**: the same three steps, written out, with the scores in memory, but on **grouped** heads.
# The query heads that share a KV head become one small matrix, and keys and values are views, not
# copies. If FlashAttention's idea itself helped here, it would have to beat the control. Predict for
# torch's fused operator. (Numbers in ⟨ ⟩ depend on the machine or the compiler, and are rounded to
# at most three digits, so yours may differ.)

# %%
guess_decode = predict("One new token: how many times as fast as the control?", None)


# %%
def control(q, k, v):
    """Attention of one token, written out, without a copy of keys and values."""
    scaled = q[0] / q.shape[-1] ** 0.5
    grouped = scaled.unflatten(0, (k.shape[1], -1))  # [KV heads, group, head_dim]
    scores = grouped @ k.permute(1, 2, 0)  # [KV heads, group, context]
    return (scores.softmax(-1) @ v.transpose(0, 1)).flatten(0, 1)[None]  # [1, heads, head_dim]


prompt, one_row = layer_inputs(2048), layer_inputs(1, 2048)
torch.testing.assert_close(control(*one_row), attention(*one_row), atol=1e-5, rtol=1e-4)
timed = {  # what is measured, against torch's fused operator
    "a prompt of 2,048": (attention_naive, prompt, 3),
    "one token, 2,048 keys, copied": (attention_naive, one_row, 7),
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
saved = 4 * row_of_scores  # scores and weights, each written once and read once
at_most = (keys_and_values + saved) / keys_and_values
print(f"\none token: {row_of_scores:,} bytes of scores,", end=" ")
print(f"{keys_and_values:,} of keys and values: by bytes at most {at_most:.2f} times as fast")

# %% [markdown]
# The row of scores is much smaller than the keys and values, which must be read in any case: 2.3%
# of their bytes. If scores and weights are each written once and read once, that is four times the
# row, and leaving it out cannot save more than a factor of 1.09 by bytes. (What is measured beyond
# that may be the cost of several operators instead of one, and noise.) Most of the gain over the
# version with copies is gone against the control, which makes no copies. Chapter 33 is about one
# new token.
#
# ## What is in memory, and what is on the chip
#
# Figure 31.1 of [chapter 31](31_triton.ipynb) shows four memories of a GPU. Two places matter here: the
# **memory** (**HBM**), which is large and slow, and what lies **on the chip** beside the arithmetic, the
# registers and the shared memory of an SM (*streaming multiprocessor*), which are fast and small. What
# the papers call **SRAM** is the shared memory. FlashAttention's gain is that scores and weights
# stay on the chip.
#
# The picture (not to scale) shows one **program** (one run of the kernel) and its tile $i$ of 128
# queries, for a head with $d$ = 128 numbers. It reads its queries $Q_i$ once. For each tile $j$ of 64
# keys it loads $K_j$ and $V_j$, computes a 128 × 64 tile $S$ of scores, the new maximum and the weights
# $P$, rescales $\ell$ and $O_i$ by $e^{m - m'}$, and adds the rows' sums of $P$ to $\ell$ and $P V_j$ to
# $O_i$. From tile to tile it keeps $m$ and $\ell$, a number for each query, and $O_i$, a row for each
# query. At the end it writes $O_i / \ell$. Nothing that has a row for each query **and** a column for
# each key of the prompt exists anywhere.

# %%
picture(
    on_chip(2048, 128, 128, 64),
    "One program of FlashAttention. Left, what lies in memory: 2,048 rows of Q, K, V and O, with the "
    "tiles that it touches now. Right, what it holds on the chip, with shapes.",
    number="32.4",
)

# %% [markdown]
# ## The kernel, step by step
#
# From here on Triton is needed. As in chapter 31 the kernels are interpreted on this processor, and
# every load and store is recorded. Three things are new:
#
# - **Blocks with two axes.** `rows[:, None]` is a column of numbers, `dims[None, :]` a row of numbers,
#   and their sum is a whole table. A row of a matrix with `D` columns begins `D` numbers after the row
#   above. So for `D` = 4, rows 2 and 3 and dims 0 to 3, the places are
#   `rows[:, None] * D + dims[None, :]` = [[8, 9, 10, 11], [12, 13, 14, 15]].
# - **`tl.dot(a, b)`** multiplies a tile [rows, inner] by a tile [inner, columns]; `tl.trans(k)` exchanges
#   the axes of a tile. On an NVIDIA GPU, tiles of 16 bits are multiplied on **tensor cores**, units
#   for products of small matrices. Both axes of its tiles are powers of two in this chapter, and 16
#   at least.
# - **`input_precision="ieee"`** keeps all bits of float32 inputs. Without it, NVIDIA's tensor cores may
#   get inputs that are rounded to fewer bits (TF32). With it, NVIDIA's float32 tiles do without tensor
#   cores, far slower.
#
# **Where does $1/\sqrt d$ go?** Every score must be multiplied by it once. Multiplying the queries
# instead gives the same product, $(q / \sqrt d) \cdot k = (q \cdot k) / \sqrt d$, and takes $d$
# multiplications for each query instead of one for each score. With inputs of 16 bits this rounds
# the queries once more, unless $1/\sqrt d$ is a power of two (1/8 for $d$ = 64, but 0.088 for 128). The
# kernel of step 1 is float32 and multiplies the queries. The exercises multiply the scores, which are
# float32 in any case. FlashAttention's Algorithm 1 leaves the factor out; its full version,
# Algorithm 2, has it as a scaling constant τ.
#
# **Step 1: each program computes one tile of scores.** The grid has two axes, tiles of queries and
# tiles of keys, 4 × 4 = 16 programs. This is the matrix again, in memory: the naive kernel.

# %%
from minigen_course.lab.triton_interpreter import need_triton

need_triton()  # it is for Linux: elsewhere, this line says what to do
import triton
import triton.language as tl

from minigen_course.ch32_flash_attention.lesson import flash_by, record_flash, start_unmasked
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, interpreted


@triton.jit
def scores_kernel(q_ptr, k_ptr, scores_ptr, n, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # this program's queries
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # and its keys
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :]) * scale  # 1 / sqrt(D)
    k = tl.load(k_ptr + columns[:, None] * D + dims[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK, D] x [D, BLOCK]
    tl.store(scores_ptr + rows[:, None] * n + columns[None, :], scores)  # rows of n numbers


q, k, v = (torch.randn(64, 16) for _ in range(3))  # one head, 64 tokens, head_dim 16
made, scale = torch.zeros(64, 64), 16**-0.5
steps = record_programs(
    lambda: scores_kernel[4, 4](q, k, made, 64, scale, D=16, BLOCK=16), q=q, k=k, scores=made
)
torch.testing.assert_close(made, q @ k.T * scale, atol=1e-5, rtol=1e-5)
stored = bytes_moved([each for each in steps if each.is_store])
print(f"16 programs store {stored:,} bytes of scores; the result has {q.nbytes:,}")

# %% [markdown]
# The scores of 64 queries and 64 keys take four times the bytes of the result, at $d$ = 16. In general it
# is $n / d$ times.
#
# ## Your turn: the loop in a kernel
#
# **Step 2** is yours. A program keeps its queries and goes over all tiles of keys. Scores, maximum, sum
# and weighted values are blocks in registers, and only the result is stored. There is one head and no
# mask: every query sees every key. For one tile $j$ of keys, with $B$ for `BLOCK`:
#
# $$S = \frac{Q_i K_j^\top}{\sqrt d}, \quad m' = \max(m, \mathrm{rowmax}\, S), \quad
# P = e^{S - m'}, \quad \ell' = e^{m - m'}\, \ell + \mathrm{rowsum}\, P, \quad
# O' = e^{m - m'}\, O + P\, V_j$$
#
# | symbol | shape | what it is in the kernel | before the loop |
# |---|---|---|---|
# | $Q_i$, $K_j$, $V_j$ | [B, d] | tiles that are loaded | $Q_i$ is loaded |
# | $S$, $P$ | [B, B] | blocks that live for one tile | |
# | $m$, $\ell$ | [B] | blocks that are kept: `maximum`, `total` | −∞ and 0 |
# | $O$ | [B, d] | a block that is kept: `mixed` | 0 |
#
# `tl.max(scores, axis=1)` and `tl.sum(weights, axis=1)` give one number for each row. To combine a [B]
# block with a [B, B] block, write `higher[:, None]`, a column. `tl.full((BLOCK,), float("-inf"),
# tl.float32)` is a block of −∞, `tl.maximum(a, b)` the larger of two in each place, `tl.exp` as in torch.
# Give each block that is kept its full shape before the loop, because a variable keeps its type in a loop:
# the interpreter would take a plain 0.0, the compiler does not.
#
# Predict what it loads:

# %%
guess_keys = predict("64 queries in tiles of 16: how often is a row of keys loaded?", None)

# %%
task(32, "unmasked_kernel")

# %%
# exercise: minigen_course.ch32_flash_attention.kernels.unmasked_kernel
import triton.language as tl


def unmasked_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: attention of rows i * `BLOCK` to (i + 1) * `BLOCK` of q over all keys; one head.

    q, k, v and mixed (the result) are [num_rows, HEAD_DIM], contiguous and float32. num_rows is a
    multiple of `BLOCK`, and every query sees every key. Scores are multiplied by `scale`. A program
    loads its queries once, and `BLOCK` keys and values at a time, each of them once. HEAD_DIM and
    `BLOCK` are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn


# %%
my_unmasked = check(32, unmasked_kernel=unmasked_kernel)
looked = torch.zeros(64, 16)
steps = record_programs(
    lambda: start_unmasked(my_unmasked, q, k, v, looked), q=q, k=k, v=v, mixed=looked
)
torch.testing.assert_close(looked, (q @ k.T * scale).softmax(-1) @ v, atol=1e-4, rtol=1e-4)
stored = bytes_moved([each for each in steps if each.is_store])
print(f"4 programs store {stored:,} bytes, and load {bytes_moved(steps) - stored:,}")
key_loads = bytes_moved([each for each in steps if each.tensor == "k"]) // k.nbytes
guess_keys.compare(key_loads, "times")
picture(
    rows_by_program(steps, {"q": 16, "k": 16, "mixed": 16}),
    "What four programs load (blue) and store (orange). Each line is a program, each column a row of "
    "the tensor: a program loads its own rows of q and all rows of k, and stores its own rows.",
    number="32.5",
)
reveal(32, unmasked_kernel=my_unmasked)

# %% [markdown]
# Read the picture line by line. Program 0 loads rows 0 to 15 of q, all 64 rows of k (and of v, which
# looks the same), and stores rows 0 to 15 of the result. So does each of the others with its own rows.
# The matrix of scores is gone from memory. The price: keys and values are loaded once for every tile of
# queries, here four times. With twice as many queries in a tile, there would be half as many loads.
#
# ## Your turn: the whole kernel
#
# **Step 3** adds what a model needs: several heads that share KV heads, the causal mask, and any number
# of tokens. Three things change.
#
# 1. **Places.** A row of q holds all heads, so number $x$ of row $r$ and head $h$ lies at
#    $(r \cdot H_q + h) \cdot d + x$. With 4 query heads of 16 numbers, row 2 of head 1 begins at
#    (2 · 4 + 1) · 16 = 144. Keys and values have $H_{kv}$ heads; head $h$ uses KV head
#    $\lfloor h / (H_q / H_{kv}) \rfloor$.
# 2. **Masks.** The last tile of queries may have rows that do not exist; they are neither loaded
#    nor stored. The last tile of keys needs a mask, too, and masked loads `other=0.0`: a weight of
#    0 times nan is nan. On the diagonal, a key after the query's position gets the score −∞
#    (`tl.where(condition, a, b)`), whose weight is 0. Weights are float32; `tl.dot` wants both
#    tiles of one dtype: `weights.to(values.dtype)`. `tl.minimum` is the smaller of two.
# 3. **The end of the loop.** No key after the program's last query is loaded. For 35 new tokens after
#    6 cached ones, with `BLOCK_M` = 16 (queries in a tile):
#
# | program | rows of q | positions | keys to load |
# |---|---|---|---|
# | 0 | 0 to 15 | 6 to 21 | 0 to 21 |
# | 1 | 16 to 31 | 22 to 37 | 0 to 37 |
# | 2 | 32 to 34 (and 13 that do not exist) | 38 to 40 | 0 to 40 |
#
# Below, your kernel is put into the engine. Then the bytes of two launches for 96 random tokens,
# with tiles of 32 and of 16 queries, are counted against a formula: queries and results once; keys
# and values once for each tile of queries, as far as these see.

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
    "What six programs of the causal kernel load and store. Rows of k are loaded up to the "
    "diagonal: each program loads 16 more than the one above, a staircase.",
    number="32.6",
)
reveal(32, flash_kernel=my_kernel)

# %% [markdown]
# The staircase is the tiles of figure 32.2 again, without cached tokens, seen from the loads: program 0
# stops after 16 rows of k, program 5 loads all 96.
#
# ## How many bytes: the argument of the paper
#
# The formula that your kernel's bytes were counted against can be written shortly. Let $N$ tokens be a
# multiple of $B$, the queries in a tile, and $d$ the numbers in a head. Tile 1 loads $B$ keys, tile 2
# loads $2B$, and so on up to $N$, that is $\frac{N}{B}\big(\frac{N}{B} + 1\big) \frac B 2 = \frac{N (N +
# B)}{2 B}$ keys and as many values, of $d$ numbers each. Queries and results add $2 N d$:
#
# $$\frac{N (N + B)}{B}\, d + 2 N d \;=\; \frac{N^2 d}{B} + 3 N d$$
#
# For the 96 tokens of the cell above with $d = 16$ and $B = 32$: 96² · 16 / 32 + 3 · 96 · 16 = 4,608 +
# 4,608 = 9,216 numbers, times 4 bytes: 36,864 bytes, as it printed. (Without a causal mask it is
# $2 N^2 d / B + 2 N d$.)
#
# How large can $B$ be? Say that the chip has room for $M$ numbers. Four tiles of $B$ rows and $d$ columns
# must fit, $Q_i$, $K_j$, $V_j$ and $O_i$ (leave the scores aside), so $B = M / 4d$. Put this into the
# formula, and the first term becomes $4 N^2 d^2 / M$. That is the paper's result (Theorem 2 of
# [Dao et al. 2022](https://arxiv.org/abs/2205.14135), for $d \le M \le N d$; its outer loop is over tiles of
# keys, which have $M / 4d$ rows there), in numbers that are read from or written to HBM:
#
# | | HBM accesses |
# |---|---|
# | written out | $\Theta(N d + N^2)$ |
# | FlashAttention | $\Theta(N^2 d^2 / M)$ |
#
# ($\Theta$ means: up to a constant factor, from above and from below.) The paper also shows that no
# exact method is better, by more than a constant factor, for all $M$ in that range at once. Written
# out in three operators that ignore the mask, the least is $4 N^2 + 4 N d$ numbers: scores written
# and read, weights written and read, and Q, K, V and the result once each. So, leaving the terms in
# $N d$ aside, our causal tiles win if $4 N^2 d^2 / M$ is less than $4 N^2$, that is, if $d^2 < M$.
# (The mask, which our tiles use and the matrix does not, about halves what they load. Without one
# on either side, tiles win if $2 d^2 < M$.)
#
# Now with 2,048 tokens, one head of 128 and 2 bytes per number. Predict: by what factor do the
# bytes fall from tiles of 16 queries to tiles of 128, eight times as large?

# %%
guess_io = predict("Bytes with tiles of 16, divided by bytes with tiles of 128?", None, within=1.1)

# %%
N, d = 2048, 128
matrix = 2 * (4 * N * N + 4 * N * d)  # bytes, if each step of the written-out way reads inputs once
counted = {block: 2 * numbers_moved(N, N, d, block) for block in (16, 32, 64, 128, 256)}
print("queries in a tile   room M = 4Bd   MB counted   of the matrix's bytes")
for block, moved in counted.items():
    assert moved == 2 * (N * N * d // block + 3 * N * d)
    print(f"{block:>17}{4 * block * d:>15,}{moved / 1e6:>13.1f}{moved / matrix:>24.2f}")
guess_io.compare(round(counted[16] / counted[128], 1), "times")
picture(
    bytes_by_tile(
        {block: moved / 1e6 for block, moved in counted.items()},
        {"written out": matrix / 1e6, "each number once": 2 * 4 * N * d / 1e6},
        "MB for one head",
        "Tiles of 32 queries move about as much as the matrix does, larger ones less",
    ),
    "Bytes that programs load and store for one head of 128 numbers and 2,048 tokens, by the size of "
    "their tiles, on logarithmic axes.",
    number="32.7",
)

# %% [markdown]
# With each doubling of the tile the blue line falls by nearly half: by 49% at first, by 42% at the
# end. It meets the orange line, the written-out way, at about 32 queries, where
# $M = 4 \cdot 32 \cdot 128 = 16{,}384 = d^2$, as the condition above says. Tiles of 16 would move
# *more* than the matrix does. The green line is the least that any method must move.
#
# Two things soften this on a real GPU. The **L2 cache** answers a part of the repeated loads, so HBM sees
# fewer bytes than programs ask for. And more bytes do not matter while arithmetic takes longer. A program
# computes $4d$ operations for each pair of a query and a key (a multiplication and an addition for
# each of $d$ numbers, in both products) and loads $2d$ numbers of 2 bytes for each key. With $B$ queries
# that is $4 d B / 4 d = B$ operations per byte. So, apart from queries and results, the tile size is the
# [arithmetic intensity](../docs/glossary.md#arithmetic-intensity). By its data sheet an H100 SXM
# does 989 · 10¹² operations in 16 bits and moves 3,350 · 10⁹ bytes per second, 295 operations per
# byte (chapter 17's ridge). So tiles of 128 alone would still wait for memory, and need the L2
# cache's help.
#
# ## The package's kernel
#
# The engine's kernel does what yours does, and more. Above all, it finds keys and values through block
# tables (chapter 22), takes all prompts of a batch in one launch, knows windows, and has the loop
# twice: without the mask before the diagonal (unless there is a window), and with it on the diagonal.
# Below is the loop, which it calls for both. $1/\sqrt d$ is in `scale` again, together with a second
# factor. A GPU has an instruction for powers of two and none for powers of e, and $e^x = 2^{x \log_2 e}$.
# So `scale` is $\log_2 e / \sqrt d$, and `exp2` gives what `exp` would. Each row's maximum is multiplied by `scale` as soon as it is found, the scores only where the maximum is subtracted, because a GPU multiplies and subtracts with one instruction.
#
# Read it against your own. `MASKED` and `WINDOWED` are known when the kernel is compiled, so a loop
# without a mask has no trace of one. A position's block stands in the table at `positions //
# BLOCK_SIZE`, its slot within the block is `positions % BLOCK_SIZE`. (`block_stride` and
# `slot_stride` count the numbers from one block or slot to the next; `keys_ptr` and `values_ptr`
# point at the program's KV head; `BLOCK_D` is the head's size rounded up to a power of two, at
# least 16.) In the cell, `starts` is chapter 22's `query_starts`, blocks have 8 slots, and the
# second sequence has the table [5, 1, 3]: position 21 is in entry 2, block 3, slot 5. The loop
# reads the table one tile ahead, so that the loads of keys and values need not wait for it. With a
# window, a query may not have seen a key yet; `base` then is 0, so that −∞ − (−∞) does not occur.
# `acc` is $O$, and `tl.dot(a, b, acc)` returns `acc` plus the product.

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
# ## Tile size, warps and registers
#
# Tiles of more queries load less. But scores and weighted values must find room in a program's **registers**,
# and tiles of keys and values in the **shared memory**: a program gets at most 167 kB of it on an
# A100, 232 kB on an H100. (Two or three tiles of each, since Triton loads the next while it
# computes one; the queries may lie there, too.) A program's registers are those of its **threads**:
# chapter 31 found that a thread has 255 at most, that a **warp** is 32 threads, and that what does
# not fit is **spilled** to memory. So whether a tile fits in registers depends on the **number of
# warps**. Triton takes 4 warps unless it is given another number.
#
# Count for 128 queries by 64 keys and a head of 128, in float32, one number in each register. With 4
# warps there are 4 × 32 = 128 threads:
#
# | block | numbers | per thread with 4 warps | with 8 warps |
# |---|---|---|---|
# | $O$, 128 × 128 | 16,384 | 128 | 64 |
# | $S$, 128 × 64 | 8,192 | 64 | 32 |
# | together | 24,576 | 192 | 96 |
#
# 192 of 255 sounds possible. But the weights in 16 bits, queries, keys and values on their way into
# the tensor cores, $m$, $\ell$ and all addresses come on top. The compiler knows the rest. Here it
# compiles your kernel for an A100 (`sm_80`) and an H100 (`sm_90`), without having one, for heads of
# 128 numbers in bfloat16:

# %%
guess_spilled = predict("128 x 64 spills with 4 warps: how many bytes with 8?", None, within=2)

# %%
from minigen_course.ch31_triton.gpu_kernels import SHARED_MEMORY, machine_code
from minigen_course.ch32_flash_attention.lesson import compiling

on_gpu = [torch.empty(512, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8, 8)]
compiled = compiling(my_kernel)  # the interpreter accepts more than the compiler
spilled = {}
for chip, block_m, block_n, num_warps in (
    ("sm_80", 64, 32, 4),
    ("sm_80", 128, 64, 4),
    ("sm_80", 128, 64, 8),
    ("sm_90", 128, 64, 4),
    ("sm_90", 128, 64, 8),
):
    tile = flash_by(compiled, block_m, block_n, num_warps)
    (code,) = machine_code(chip, lambda tile=tile: tile(*on_gpu))
    spilled[chip, block_m, num_warps] = code.spilled
    print(f"{chip}, {block_m:>3} queries by {block_n} keys, {num_warps} warps:", end=" ")
    print(f"{mark(code.registers, 'registers')}, {mark(code.spilled, 'bytes spilled')},", end=" ")
    print(f"{mark(code.shared, 'bytes')} shared, of {SHARED_MEMORY[chip]:,};", end=" ")
    by_registers = 65_536 // (code.registers * 32 * num_warps)
    print(mark(min(by_registers, SHARED_MEMORY[chip] // code.shared), "programs fit", 1))
for chip in ("sm_80", "sm_90"):
    with_4, with_8 = (spilled[chip, 128, warps] > 0 for warps in (4, 8))
    print(f"{chip}, 128 x 64: with 4 warps it {'spills' if with_4 else 'fits'}", end=", ")
    print(f"with 8 it {'spills' if with_8 else 'fits'}")
guess_spilled.compare(spilled["sm_80", 128, 8], "bytes", measured=True)

# %% [markdown]
# On both chips 128 × 64 spills with 4 warps and does not spill with 8, because each thread then keeps
# half as much of $O$ and $S$. The engine's kernel, too, gives its tiles of 128 queries 8 warps, and
# its tiles of 64 queries 4. (For prompts of more than 64 tokens, in 16 bits and with heads of at
# most 128 numbers, its tiles are 64 queries by 64 keys on an H100, and 128 by 32 on an A100, whose
# tensor cores need keys and values in registers; an H100's read them from shared memory, which
# leaves enough registers for two programs at a time.) The last number says how many programs fit on
# one SM at the same time, by its 65,536 registers and its shared memory: one of 8 warps is 8 of 64
# places, an **occupancy** of 12.5 %. Large tiles leave room for few, and then mainly the other
# warps of the same program can compute while one waits for memory. Which pair of tile and warps is
# fastest is a question for a GPU, where **autotuning** tries several; it is not tested here.
#
# ## How much faster, then?
#
# Nothing here ran on a GPU, so we cannot say. Bytes and operations give bounds, as if a kernel
# reached the data sheet's bandwidth and peak, which few do. The written-out way is counted, as
# above, for all heads, with whole matrices; it also multiplies the masked half. (A softmax that
# knows the mask, as that of Megatron-LM, NVIDIA's training library, reads half of the scores: 293
# µs instead of the 333 below.) In tiles, what programs load again comes either from memory, or from
# the L2 cache if keys and values find room there; then memory gives them once. One layer of
# Llama-3-8B's shape (32 heads of 128, 8 KV heads), 2,048 tokens, bfloat16, in tiles of 128 queries
# by 64 keys:

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
# Each line has the time that its bytes would take and the time that its operations would take; the larger
# one is the bound. Written out, memory is the limit (333 against 69 µs). In tiles it is still memory (95
# against 37), unless the cache helps enough; then, if the cache's own time is left out, it is
# arithmetic. Few kernels reach a chip's peak of arithmetic, and a written-out version may move
# more: both times may grow, so their ratio may be smaller or larger. And this is attention alone:
# the linear layers of a prompt stay as they were, so its
# [time to first token](../docs/glossary.md#time-to-first-token-ttft) gains less.
#
# ## One idea and its kernels
#
# - **Online softmax** ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867)): $m$ and $\ell$ in
#   one pass. [Rabe and Staats 2021](https://arxiv.org/abs/2112.05682) computed attention without
#   the matrix by the same rescaling, in chunks of array operators (in JAX, a library like torch),
#   to save memory.
# - **FlashAttention** ([Dao et al. 2022](https://arxiv.org/abs/2205.14135)): the same in one kernel, with the
#   count of HBM accesses. Keys are in its outer loop, so $m$, $\ell$ and $O$ of all queries go to memory
#   and back for each tile of keys.
# - **FlashAttention-2** ([Dao 2023](https://arxiv.org/abs/2307.08691)): queries in the outer loop, as in this
#   chapter, so $m$, $\ell$ and $O$ stay on the chip; one division at the end; programs for tiles of
#   queries, too, and not only for heads and sequences. Within a program it gives each warp its own
#   queries, so that warps need not exchange partial results. (The paper says that Phil Tillet's
#   Triton version exchanged the loops first.)
# - **FlashAttention-3** ([Shah et al. 2024](https://arxiv.org/abs/2407.08608)) for the H100: some warps only
#   load while others multiply, softmax of one tile runs while another tile is multiplied (a chip computes
#   far fewer exponentials per second than products), and products may be in FP8 (floating-point numbers
#   of 8 bits).
# - **Flash-Decoding** ([Dao et al. 2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)) for one new
#   token: it has no second tile of queries to keep the chip busy, so the context is cut into parts
#   that are computed at the same time and joined as `merge` does. Chapter 33 builds it.

# %% [markdown]
# ## Claims

# %% jupyter={"source_hidden": true}
loop = peaks["a loop over tiles"]
growth = loop[2048] / loop[1024]
verdicts(
    "32",
    Claim(
        "A 2,048-token score matrix costs about 16 MB for each head",
        f"{one_head / 2**20:.0f} MiB in float32; written out, a layer's {llm.config.q_heads} heads "
        f"take {peaks['written out'][2048] / 1e6:.0f} MB at once",
        within(one_head / 1e6, 15, 17.5),
        "it is tokens x tokens x 4 bytes, and three such matrices exist at a time",
    ),
    Claim(
        "FlashAttention's memory grows with the tokens, not with their square",
        f"{loop[2048] / 1e6:.1f} MB at once for 2,048 tokens, of which the result is "
        f"{prompt[0].nbytes / 1e6:.1f}; {growth:.2f} times that of 1,024",
        within(growth, 1.5, 2.2),
        "one tile of scores exists at a time",
        "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)",
    ),
    Claim(
        "FlashAttention is 2 to 4 times as fast as standard attention on a GPU",
        f"modelled for a prompt of {n:,} tokens on an {h100.name}: the bounds lie "
        f"{low:.1f} to {high:.1f} times apart; on this CPU torch's fused operator is "
        f"{mark(gains['a prompt of 2,048'], 'times')} as fast as written out",
        NOT_TESTED,
        "the traffic of scores is saved; how much that was depends on chip, length and baseline, "
        "and no GPU ran here",
        "[Dao 2023](https://arxiv.org/abs/2307.08691)",
    ),
    Claim(
        "FlashAttention makes decoding much faster, too",
        f"one new token: scores are {row_of_scores / keys_and_values:.1%} of the bytes of keys and "
        f"values, so at most {at_most:.2f} times by bytes; against a control without copies "
        f"{mark(gains['one token, the control'], 'times')} on this CPU",
        holds(at_most >= 1.5),
        "one query has no matrix of scores to save; what helps there is reading keys and values in "
        "place, and on a GPU splitting the context (chapter 33)",
    ),
)

# %% [markdown]
# ## Summary
#
# - Written out, attention stores several matrices of one score for each pair of tokens: 467 MB for 2,048
#   tokens in one layer of this small model, nearly four times as much for twice the tokens.
# - Softmax can be computed while scores arrive. Keep the largest score so far, the sum of weights and
#   the weighted values; when the maximum grows, multiply both sums by $e^{m - m'}$; divide at the end.
# - Parts over different keys can be joined in any order, because each carries its own maximum.
# - FlashAttention is this loop over tiles in one kernel. It computes the same result up to rounding,
#   with memory that grows with the tokens and not with their square.
# - It saves bytes. It saves arithmetic only where the mask hides whole tiles, which it leaves out; a
#   score that counts costs at least as much as before. Programs load keys and values again for each
#   tile of queries: with a causal mask about $N^2 d / B$ numbers, or $4 N^2 d^2 / M$ when the tile
#   fills the chip. Small tiles can move more than the matrix.
# - Registers and shared memory limit a tile. How much fits in registers depends on the number of warps:
#   128 queries by 64 keys spill with 4 warps and fit with 8.
# - For one new token there is no matrix to save. What helps there is to read keys and values in place.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A query has seen keys with the maximum 2 and ℓ = 1. The next tile has one key with the
# score 5. What are the factor and the new ℓ? And if the score were 0?</summary>
# The factor is e^(2 − 5) = 0.05, and ℓ = 0.05 · 1 + 1 = 1.05. With the score 0 the maximum stays 2, the
# factor is 1, and ℓ = 1 + e^(−2) = 1.135.</details>
#
# <details><summary>2. Tiles grow from 64 to 128 queries. Which bytes become fewer, which do not, and what
# may go wrong?</summary>
# Keys and values are loaded about half as often. Queries and results are moved once in both cases. The
# kept blocks have twice as many numbers, so with the same number of warps they may no longer fit in
# registers and are spilled to memory.</details>
#
# <details><summary>3. An article says that FlashAttention made a chat 3 times as fast while it writes its
# answer, one user at a time. What would you ask?</summary>
# What it was compared with. Writing is one query after the other: no matrix is saved. A baseline that
# copies keys and values for shared heads, or whose kernel leaves most of the chip idle, could explain
# the factor; then grouped heads or a split context (chapter 33) are the cause, not the tiles.</details>
#
# ## What the production engines do beyond this
#
# At the time of writing:
#
# - **[vLLM](https://docs.vllm.ai/en/latest/design/attention_backends/)** and
#   **[SGLang](https://docs.sglang.io/docs/advanced_features/attention_backend)** choose among several
#   *attention backends* by GPU and model: versions of FlashAttention,
#   [FlashInfer](https://arxiv.org/abs/2501.01005), Triton kernels and others. Most of these read
#   keys and values through block tables, as ours does.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/advanced/gpt-attention.html)** has its own fused
#   kernels for the context phase (prefill) and the generation phase (decode).
# - **[TGI](https://github.com/huggingface/text-generation-inference)** (archived since March 2026)
#   packs sequences of all lengths without padding and hands the attention kernel their boundaries
#   (`cu_seqlens`, our `starts`).
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)** has the same idea for CPUs, CUDA, Metal
#   (Apple's GPUs) and others behind `--flash-attn`, by default automatic. A quantised cache of
#   values needs it ([issue 28524](https://github.com/ggml-org/llama.cpp/issues/28524)).
# - Where no one GPU holds a context, **[ring attention](https://arxiv.org/abs/2310.01889)** passes keys and
#   values from GPU to GPU, and the parts are joined as `merge` does.
#   **[DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509)** gives each GPU some of the heads instead.
# - **[FlexAttention](https://pytorch.org/blog/flexattention/)** in PyTorch compiles such a kernel for masks
#   and changes of scores that a user writes in Python.
#
# ## Further reading
#
# - [FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness](https://arxiv.org/abs/2205.14135), Dao et al. 2022: sections 3.1 and 3.2 are this chapter.
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023: section 3 is the loop of your kernel, and how
#   warps share it.
# - [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867), Milakov and Gimelshein 2018:
#   short, with a proof by induction.
# - [Fused Attention](https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html), Triton's
#   tutorial: the loop in two parts, and autotuning.
# - [The source](https://github.com/Dao-AILab/flash-attention) of FlashAttention in CUDA.
#
# **Next:** [33 · Paged attention on a GPU](33_paged_attention.ipynb): one new token, a long context in
# blocks, and `merge` once more.

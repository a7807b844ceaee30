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
# # 13 · RMSNorm, rotary embedding, SwiGLU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/13_layers.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/13_layers.ipynb)
#
# Chapter 12 turned text into token ids. Now the ids enter the model. A layer of the model consists of
# large matrix multiplications, and between them stand three small functions. The
# [rotary embedding](../docs/glossary.md#rotary-embedding) shows attention where a token stands,
# [RMSNorm](../docs/glossary.md#rmsnorm) keeps the numbers at one size, and
# [SwiGLU](../docs/glossary.md#swiglu) weighs numbers by gates. None of them takes more than five lines
# of code. Each of them can be wrong without any error message, and then the model writes
# plausible nonsense. This chapter builds all three, and shows what happens when they go wrong.
#
# **Afterwards you can** write the three functions from memory, prove that a rotated score depends on
# the distance of two tokens alone, recognise a checkpoint whose rotary pairs are mixed up, and say
# why a model fails beyond the length that it was trained on.
#
# **You need** chapters 11 (weights, GGUF files) and 12 (tokens), matrix multiplication, sine and
# cosine, and PyTorch's basics.
# **Time:** about 60 minutes to read and try, about 70 for the
# [exercises](../exercises/13_layers.ipynb). On a first reading you can skip
# *How far does the rotation reach?* and *A norm in 16 bits*.
#
# **Where we are:** token ids → **embedding** → 30 × ( **norm** → **rotate** → attention → add →
# **norm** → **feed-forward** → add ) → norm → output head → next token.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | prefill, decode | memory bandwidth | L3 engine | rotary scaling | perplexity |
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

import torch

from minigen import SamplingParams
from minigen.model import layers
from minigen.model.attention import attention
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
    task,
    using,
    verdicts,
)
from minigen_course.ch13_layers import figures as draw_layers
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import significant
from minigen_course.lab.inspect_model import (
    head_scores,
    log_probabilities,
    perplexity,
    recorded_heads,
    recorded_states,
    transformer_of,
)

torch.set_num_threads(1)  # less CPU time than threads that wait for one another
llm = load_model(weights="float32", enable_prefix_caching=False)  # nothing is kept from run to run
model, config = transformer_of(llm), llm.config
chapter_map("embedding", "norms", "positions", "feed-forward")

# %% [markdown]
# ## A number that hurts: the model without one of the three
#
# How well does a model know a text? It gives every token a probability, given the tokens before it.
# **Perplexity** turns these probabilities, or rather their logarithms
# ([log-probabilities](../docs/glossary.md#log-probability)), into one number:
#
# $$\mathrm{PPL} = \exp\Big(-\frac1n \sum_{t} \log p(x_t \mid x_{<t})\Big)$$
#
# (The exponent is the **cross-entropy**, the loss that training makes small.)
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x_t$ | the token at place $t$ of the text | `ids[t]` |
# | $p(x_t \mid x_{<t})$ | the probability that the model gave to it, given all tokens before it | exponential of `log_probabilities` |
# | $n$ | the number of tokens that are judged; the first of a text is not | `len(ids) - 1` |
#
# Take three tokens whose probabilities were 1/2, 1/4 and 1/8. The mean of their (natural) logarithms
# is $\frac{1 + 2 + 3}{3} \log \frac12 = 2 \log \frac12 = -\log 4$, so the perplexity is 4: on average,
# the model hesitated among four equally likely tokens. Perplexity is the **effective number of
# choices**. 1 means certain. This model knows 49,152 tokens, so 49,152 means guessing blindly. A
# larger perplexity is possible, too: it means that the model is sure of wrong tokens.
#
# The test text is a story that this model has not seen, and the model reads it twice in a row. On the
# second reading every word has already appeared, so the model only has to copy. (The first token of
# this reading is left out too, so that both readings are judged by the same tokens.) How well does it
# copy if it cannot see the order of the tokens? Replace `None` by your prediction of the perplexity.

# %%
guess_order = predict("Perplexity of the second reading, without positions?", None, within=2)
by_hand = perplexity(torch.tensor([1 / 2, 1 / 4, 1 / 8]).log())
print(f"probabilities 1/2, 1/4, 1/8: perplexity {by_hand:.1f}")

# %% [markdown]
# In the next cell, each of the three functions is replaced by one that leaves its work out. `using` puts a
# function in the place of the package's own for a while, and says how often it was called.

# %%
story = (
    "Marla Venn keeps seven grey geese behind the old mill at Thornbury. On the second of May she "
    "sold three of them to Otto Quill, a baker from Lower Eastwick, for nineteen copper coins and "
    "a blue lantern.\n"
)
ids = llm.tokenizer.encode(story)
positions = torch.arange(len(ids))


def read_twice(**parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the story's tokens at the first and the second reading."""
    with using(13, **parts):
        found = log_probabilities(llm, ids + ids)
    return found[: len(ids) - 1], found[len(ids) :]


def no_rotation(x, cos, sin):
    return x


def no_gate(gate, up):
    return up


def no_norm(x, weight, eps):
    return weight * x


first, second = read_twice()
_, unordered = read_twice(apply_rotary=no_rotation)
_, ungated = read_twice(swiglu=no_gate)
_, unscaled = read_twice(rms_norm=no_norm)
print(f"\nperplexity of {len(first)} tokens, first reading:  {perplexity(first):.0f}")
print(f"second reading:                       {perplexity(second):.2f}")
print(
    f"second reading, without the gate:     {mark(perplexity(ungated) / 1e9, 'billion', digits=2)}"
)
overflowed = not math.isfinite(perplexity(unscaled))
print(f"second reading, without RMSNorm:      {'not a number' if overflowed else 'a number'}")
guess_order.compare(int(round(perplexity(unordered), -1)))

# %% [markdown]
# After the first few tokens, the complete model copies almost without an error. Without positions it
# cannot copy at all, although all words are in view. Without the gate it is so sure of wrong tokens
# that blind guessing would be far better. Without RMSNorm the numbers **overflow**: they exceed the
# largest that the format can hold, and become infinite. A model of 135 million parameters depends on each
# of these few lines.
#
# ## The embedding, and the residual stream
#
# The model's first step is a lookup. The **embedding** is a table with a row of 576 numbers for each
# of the 49,152 tokens, and a token id is the number of a row. Nothing is computed: the same token
# gets the same row wherever it stands.
#
# From here on, every token has a vector $x$ of 576 numbers, which passes through 30 layers. Each layer
# reads it and **adds** something to it, twice. This vector that is never replaced, only added to, is
# called the **residual stream**. Here is one layer. The boxes of this chapter are coloured, and above
# each box stands the shape of what leaves it.

# %%
looked_up = model.embed(torch.tensor(ids))
assert torch.equal(looked_up[10], model.embedding[ids[10]])
print(f"embedding table {list(model.embedding.shape)}, story {list(looked_up.shape)}")
picture(
    draw_layers.layer_flow(
        len(ids), config.hidden, config.ffn, (config.q_heads, config.kv_heads, config.head_dim)
    ),
    "One of 30 layers. The first row is attention (chapter 14), the second row the feed-forward "
    "network. Each reads a normalised x, and its result is added to x.",
    number="13.1",
)

# %% [markdown]
# ## Why positions matter
#
# Attention is the subject of chapter 14. A minimum about it is enough here. From the residual stream
# of each token, the layer computes a vector called **query** and a vector called **key**, with two
# learned matrices $W_q$ and $W_k$, and with a third, $W_v$, the **value**: what is handed over. The
# **score** of two tokens is the dot product of the query of the one and the key of the other:
#
# $$q \cdot k = \sum_{i} q_i k_i$$
#
# The larger the score, the more the first token takes over of the second one's value. What it takes
# from itself and all earlier tokens is added up, and a sum does not know an order: $3 + 4 = 4 + 3$. A
# layer does this several times side by side, with a query of 64 numbers each time. These are its
# **heads**: nine for queries, and three for keys and values, which are shared.
#
# Compare the full stop in *dog bites man.* and in *man bites dog.* Before it stand the same three
# words. The model runs without rotation. Is the **state** of the full stop (its vector in the residual
# stream) the same in both sentences after one layer? (Write `"yes"` or `"no"`.) And after two layers?

# %%
guess_one = predict("Without positions, the same after layer 1?", None)
guess_two = predict("Without positions, the same after layer 2?", None)

# %%
texts = [llm.tokenizer.encode(text) for text in (" dog bites man.", " man bites dog.")]
with using(13, apply_rotary=no_rotation):
    blind = [recorded_states(llm, text)[:, -1] for text in texts]
seeing = [recorded_states(llm, text)[:, -1] for text in texts]
same = [torch.allclose(*states, atol=1e-3) for states in zip(*blind, strict=True)]
assert not torch.allclose(seeing[0][1], seeing[1][1], atol=1e-3)
print("with rotation, the states differ after layer 1")
guess_one.compare("yes" if same[1] else "no")
guess_two.compare("yes" if same[2] else "no")

# %% [markdown]
# After one layer the two full stops are the same, so that layer cannot tell who bit whom. The second
# layer can: a token sees only the tokens before it (chapter 14), so *man* has seen *dog* in the one
# sentence and nothing in the other. A model can be trained without any other sign of the order
# ([Kazemnejad et al. 2023](https://arxiv.org/abs/2305.19466)). But this model was trained with
# positions, and without them it fails, as the first measurement showed.
#
# ## Three ways to show a position
#
# ### Add it: sinusoidal vectors
#
# The first transformer added a vector to each embedding, a different one for each position
# ([Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)). For position $m$ and the pair of numbers
# $2i$ and $2i + 1$ of a vector of $d$ numbers:
#
# $$P_{m,\,2i} = \sin(m\,\omega_i), \qquad P_{m,\,2i+1} = \cos(m\,\omega_i), \qquad
# \omega_i = 10000^{-2i/d}$$
#
# Read it as a row of clock hands. The first hand turns by one radian per position and tells
# neighbours apart. Every later hand is slower, down to hands that hardly move over a whole page.
#
# What does a score see of it? With content $x$ and $y$ at the positions $m$ and $n$, it has four terms:
#
# $$(x + P_m) \cdot (y + P_n) = x \cdot y \;+\; x \cdot P_n \;+\; P_m \cdot y \;+\; P_m \cdot P_n$$
#
# (In the model, the matrices $W_q$ and $W_k$ stand in between; the four terms remain.) Without these
# matrices, the last term depends on the distance only, because
# $\sin a \sin b + \cos a \cos b = \cos(a - b)$. But the two terms in the middle mix meaning with absolute
# position. *dog bites man* has other scores in the first line of a book than
# on page 7, and the model must learn to ignore that.
#
# ### Subtract it: ALiBi
#
# **Attention with linear biases** ([Press et al. 2021](https://arxiv.org/abs/2108.12409)) leaves the
# vectors alone and lowers each score in proportion to the distance: $q \cdot k - s_h\,(m - n)$. Every
# head $h$ has its own slope $s_h$, so some heads look near and some look far. The paper's models can read
# texts longer than those of their training. But distance can only lower a score: it gives no head a
# reason to prefer the token five places back to its neighbour.
#
# Both take three lines:

# %%
frequencies = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
angles = torch.arange(48)[:, None] * frequencies  # one for each position and pair
sinusoidal = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

slopes = 2.0 ** -torch.arange(1, 9)  # of 8 heads
distances = torch.arange(24)
biases = -slopes[:, None] * distances

picture(
    draw_layers.added_and_subtracted(sinusoidal, biases),
    "Left, sinusoidal vectors of 64 numbers: each row is a position, and no two rows are alike. "
    "Right, what ALiBi adds to the scores of eight heads.",
    number="13.2",
)

# %% [markdown]
# ### Rotate: by hand, with two numbers
#
# The third way adds nothing to the embedding and subtracts nothing from the score: it rotates the
# query and the key before the dot product. Take vectors of two numbers, which are points in a plane,
# and rotate by a quarter turn per position. A quarter turn moves the point $(a, b)$ to $(-b, a)$:
#
# | position | query | key |
# |---|---|---|
# | 0 | (2, 1) | (1, 1) |
# | 1 | (-1, 2) | (-1, 1) |
# | 2 | (-2, -1) | (-1, -1) |
#
# Now compute scores. Query and key at the same position: $(2, 1) \cdot (1, 1) = 3$, then
# $(-1, 2) \cdot (-1, 1) = 3$, then $(-2, -1) \cdot (-1, -1) = 3$. The query one position after the
# key: $(-1, 2) \cdot (1, 1) = 1$ and $(-2, -1) \cdot (-1, 1) = 1$. The score does not see where the
# two are. It sees how far apart they are.


# %%
def rotate_pair(point: tuple[float, float], angle: float) -> tuple[float, float]:
    """Rotate a point around the origin."""
    a, b = point
    return a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)


by_quarters = [
    [tuple(round(each) for each in rotate_pair(point, m * math.pi / 2)) for m in range(3)]
    for point in ((2, 1), (1, 1))
]
print("query:", by_quarters[0])
print("key:  ", by_quarters[1])
picture(
    draw_layers.quarter_turns(*by_quarters, names=("0", "1", "2")),
    "A query and a key of two numbers at three positions, and all their scores. Each diagonal of the "
    "table is one distance, and holds one number. A query looks back, so a model uses the diagonal "
    "and what lies below it.",
    number="13.3",
)

# %% [markdown]
# ## The idea: 32 pairs at 32 speeds
#
# This is the **rotary embedding** (RoPE, [Su et al. 2021](https://arxiv.org/abs/2104.09864)). In this
# model a query or key of a head has $d_h = 64$ numbers. Cut it into 32 pairs: number $i$ forms a pair
# with number $i + 32$. Rotate pair $i$ of the token at position $m$ by the angle $m\,\theta_i$:
#
# $$\begin{pmatrix} x'_i \\ x'_{i+d_h/2} \end{pmatrix} =
# \begin{pmatrix} \cos m\theta_i & -\sin m\theta_i \\ \sin m\theta_i & \cos m\theta_i \end{pmatrix}
# \begin{pmatrix} x_i \\ x_{i+d_h/2} \end{pmatrix}, \qquad \theta_i = b^{-2i/d_h}$$
#
# | symbol | meaning | in the code | in the paper |
# |---|---|---|---|
# | $x$ | a query or a key of one head | `q[m, head]`, `k[n, head]` | $W_q x_m$, $W_k x_n$ |
# | $m$, $n$ | positions of the query and of the key | `positions` | $m$, $n$ |
# | $d_h$ | numbers of a head | `head_dim`, 64 | $d$ |
# | $i$ | pair, from 0 to $d_h/2 - 1$ | | $i - 1$: it counts from 1 |
# | $\theta_i$ | angle per position of pair $i$ | `frequencies[i]` | $\theta_i$; $\Theta$ is the set of all |
# | $b$ | base; here 100,000 | `rope_theta` | 10,000 |
# | $R_m$ | rotation of all pairs to position $m$ | `apply_rotary` | $R^d_{\Theta, m}$ |
#
# The speeds follow the same rule as the clock hands above, with a larger base. The values $v$, which
# attention adds up, are not rotated: *what* a token says should not depend on where it stands.
#
# **Why the score depends on the distance alone.** Rotating two arrows by the same angle changes
# neither their lengths nor the angle between them, so it leaves their dot product as it is. Rotate
# both back by $m$ positions:
#
# $$(R_m q) \cdot (R_n k) = (R_{-m} R_m q) \cdot (R_{-m} R_n k) = q \cdot (R_{n-m} k)$$
#
# Only $n - m$ is left, for every pair and so for their sum. Now for a query and a key of the real model:
# those of the first head of layer 16 (counted from 0), each the mean over the story's tokens but the
# first, whose vectors are unusual. The engine recorded them after the rotation, so the cell rotates
# them back first (with $-\sin$). Then drag the slider.

# %%
LAYER, HEAD = 16, 0
recorded = recorded_heads(llm, ids)  # q, k and v of each layer, as attention got them
cos, sin = model.rotation(positions)
q, k = (layers.apply_rotary(each, cos, -sin) for each in (recorded[LAYER].q, recorded[LAYER].k))
kv_head = HEAD // (config.q_heads // config.kv_heads)
query, key = q[1:, HEAD].mean(0), k[1:, kv_head].mean(0)


def turn(last_position):
    return draw_layers.turning(query, model.frequencies, (0, 1, 8, 25), last_position)


explore(
    turn,
    "Four of the 32 pairs of a query, on one scale: pairs 0 and 1 at positions 0 to 6, the slow pairs 8 "
    "and 25 at positions 0, 48 and 96. Pair 25, the longest of this query, hardly moves even then.",
    "13.4",
    last_position=(0, 24, 1, 6),
)

# %% [markdown]
# The circles have different sizes, because the model has learned to put more weight on some pairs
# than on others. Fast pairs tell neighbours apart. Slow pairs hardly turn over a whole page: their part
# of the score is nearly the plain dot product, as if there were no positions.
#
# The score of this query with this key, summed over all pairs, against their distance. The key is put
# at position 0, at 100 and at 5,000. (From here on, scores are divided by 8, the square root of 64, as in
# the model. Chapter 14 says why.)

# %%
picture(
    draw_layers.by_distance(query, key, model.frequencies),
    "The score of a query and a key, for three positions of the key. The three curves lie on one "
    "another.",
    number="13.5",
)
near = draw_layers.scores(query, key, model.frequencies, range(129), [0] * 129)
far = draw_layers.scores(query, key, model.frequencies, range(5000, 5129), [5000] * 129)
moved = float((near - far).abs().max() / (near.max() - near.min()))
assert moved < 0.002
print("the best distance for this head:", int(near.argmax()))
print("5,000 positions further on, scores differ by less than 0.2 % of their range")

shares = head_scores(recorded[LAYER])[HEAD].softmax(-1)  # row: token; column: where it looks
before, at_first = shares.diagonal(-1)[1:].mean(), shares[2:, 0].mean()
print(f"share of the token before: {before:.2f}, of the first token: {at_first:.2f}")

# %% [markdown]
# The curve is highest at distance 1. And that is where the head looks: attention turns the scores of a
# token into shares that add up to 1 ([**softmax**](../docs/glossary.md#softmax), chapter 14), and on
# average most of it goes to the token before. In the curve, nothing but the angles of the pairs tells
# one distance from another. ALiBi's slopes could not express it.
#
# ## Drag it
#
# Left, one pair at position 0 (pale) and rotated to its position. Right, the score of all pairs. Move
# both tokens with `key_at`: on the left both arrows turn, on the right nothing changes. Then change
# their `distance`.


# %%
def two_tokens(key_at, distance, pair):
    at = {"query_at": key_at + distance, "key_at": key_at}
    return draw_layers.two_tokens(query, key, model.frequencies, **at, pair=pair)


explore(
    two_tokens,
    "One pair of a query at position 6 and a key at position 5, and the score at their distance.",
    "13.6",
    key_at=(0, 256, 1, 5),
    distance=(0, 256, 1, 1),
    pair=(0, 31, 1, 3),
)

# %% [markdown]
# ## Your turn: test it, then write it
#
# First the test, then the function that passes it.

# %%
task(13, "depends_on_distance_only")

# %%
# exercise: minigen_course.ch13_layers.lesson.depends_on_distance_only
from collections.abc import Callable

from torch import Tensor


def depends_on_distance_only(encode: Callable[[Tensor, int], Tensor], head_dim: int) -> bool:
    """Return whether scores stay the same when both tokens move by the same number of positions.

    `encode(vector, position)` returns a query or a key of `head_dim` numbers as it is at a
    position. Positions 0 to 63 are tested, with a random query and a random key. Scores that differ
    by less than 0.01 count as equal, because float32 rounds.
    """
    raise NotImplementedError  # your turn


# %% [markdown]
# Once your test passes, it judges three encodings: the sinusoidal vectors of figure 13.2, the
# rotation, and none at all. As long as it has not passed, the course's own test does.


# %%
my_test = check(13, depends_on_distance_only=depends_on_distance_only)


def added(vector, position):
    angles = position * 10_000.0 ** (-torch.arange(0, len(vector), 2) / len(vector))
    return vector + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten()


def rotated(vector, position):
    half, turned = len(vector) // 2, vector.clone()
    for i in range(half):
        angle = position * config.rope_theta ** (-2 * i / len(vector))
        pair = rotate_pair((float(vector[i]), float(vector[i + half])), angle)
        turned[i], turned[i + half] = pair
    return turned


def unchanged(vector, position):
    return vector


for encode in (added, rotated, unchanged):
    print(f"{encode.__name__:<9} depends on the distance only: {my_test(encode, 64)}")

# %% [markdown]
# The loop in `rotated` is right, but it rotates one pair of one head of one token at a time. A layer
# must rotate all pairs of all heads of all tokens, in a few operations on whole tensors.

# %%
task(13, "apply_rotary")

# %%
# exercise: minigen.model.layers.apply_rotary
from jaxtyping import Float
from torch import Tensor


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim/2) by its angle: the pairing of Llama in transformers."""
    raise NotImplementedError  # your turn


# %% [markdown]
# One line puts yours into the running engine. As long as yours has not passed, the package's own
# runs, and the last line says so.

# %%
my_rotary = check(13, apply_rotary=apply_rotary)
greedy = SamplingParams(temperature=0, max_tokens=5)
with using(13, apply_rotary=my_rotary):
    print(llm.generate("The old lighthouse", greedy).text)

# %% [markdown]
# ## The package's version
#
# It opens below once yours has passed, and must agree with the loop from above and with the queries that
# the engine recorded. (Papers often write a pair as a complex number: $(a + b\,\mathrm{i})\,
# e^{\mathrm{i}\alpha}$ is its rotation by $\alpha$.)

# %%
reveal(13, depends_on_distance_only=my_test, apply_rotary=my_rotary)
ours = layers.apply_rotary(q, cos, sin)
one_head = torch.stack([rotated(vector, m) for m, vector in enumerate(q[:, HEAD])])
torch.testing.assert_close(ours, recorded[LAYER].q, atol=1e-3, rtol=1e-4)
torch.testing.assert_close(ours[:, HEAD], one_head, atol=1e-3, rtol=1e-4)
print("The engine's queries, the package and the loop agree.")

# %% [markdown]
# ## The silent failure: two ways to form pairs
#
# Nothing in the proof above needs number $i$ to form its pair with number $i + 32$. Any cut of the 64
# numbers into 32 pairs works, and two are in use:
#
# | pairing | pairs of a head of 64 | who uses it |
# |---|---|---|
# | by halves | 0 and 32, 1 and 33, ..., 31 and 63 | GPT-NeoX; Llama, Mistral and Qwen models in the format of Hugging Face's library transformers |
# | by neighbours | 0 and 1, 2 and 3, ..., 62 and 63 | the paper; GPT-J; Meta's own Llama files; llama.cpp for the Llama family |
#
# Both take the same input, return the same shape, and pass your test. The package has both:
# `apply_rotary` and `apply_rotary_interleaved`. The model, as it is loaded here, must be rotated by
# halves. What does it do if it is rotated by neighbours? Predict the perplexity of the second reading,
# which is 1.39 with the right pairs.

# %%
guess_pairs = predict("Perplexity of the second reading, with the other pairs?", None, within=2)

# %%
question = "The capital of France is"
print("its own pairs:  ", repr(llm.generate(question, greedy).text))
with using(13, apply_rotary=layers.apply_rotary_interleaved):
    print("the other pairs:", repr(llm.generate(question, greedy).text))
_, neighbours = read_twice(apply_rotary=layers.apply_rotary_interleaved)
guess_pairs.compare(int(float(significant(perplexity(neighbours), 3))))
picture(
    draw_layers.found_likely(
        [llm.tokenizer.decode([token]) for token in ids[1:]],
        {"its own pairs": second.exp(), "the other pairs": neighbours.exp()},
    ),
    "The probability of every right token at the second reading, under both pairings, for all judged "
    "tokens.",
    number="13.7",
)

# %% [markdown]
# No error, no warning, and the answer is still *Paris*. If you test with this question only, you ship
# the bug. But the model can no longer find what it has just read. (With its own pairs it misses *keeps*:
# after *Marla Venn* it probably expects something new about her, not the same story again.)
#
# ### Where the mistake comes from, and how it is repaired
#
# The queries are $q = W_q x$, so number $i$ of a query is computed by **row** $i$ of the matrix $W_q$,
# and the same holds for keys and $W_k$. Training fixed which two rows form a pair. A file may store
# the rows in another order, and then the code must form other pairs. Both orders have the same shape,
# so a program that reads a file must know its convention.
#
# SmolLM2's files on the hub have their rows in order for halves. Your copy is a GGUF file (chapter 11),
# and llama.cpp's converter has reordered the rows of $W_q$ and $W_k$ so that partners are neighbours: 0,
# 32, 1, 33, and so on. So minigen must put the rows back when it loads the file. Change both the
# pairing and the order of the rows, and nothing changes. Change only one of them, and the model can no
# longer copy. The third exercise is the function that puts the rows back.

# %%
task(13, "unpermuted_rows")

# %%
# exercise: minigen.checkpoint.gguf_mapping.unpermuted_rows
from jaxtyping import Int64
from torch import Tensor


def unpermuted_rows(num_rows: int, heads: int) -> Int64[Tensor, " rows"]:
    """Return the stored row for each row 0, 1, 2, ...: within a head first the even, then the odd.

    >>> unpermuted_rows(12, heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    raise NotImplementedError  # your turn


# %% [markdown]
# The model is loaded twice more: with the rows as the file has them, and with the rows in your order
# (the package's, as long as yours has not passed). The first one is rotated by halves and by neighbours.
# The second one must have the weights that the model had all along, number by number.

# %%
my_rows = check(13, unpermuted_rows=unpermuted_rows)


def as_stored(num_rows, heads):
    return torch.arange(num_rows)


with using(13, unpermuted_rows=as_stored):
    loaded = load_model(weights="float32", enable_prefix_caching=False)
found = {}
for name in ("apply_rotary", "apply_rotary_interleaved"):
    with using(13, apply_rotary=getattr(layers, name)):
        found[name] = perplexity(log_probabilities(loaded, ids + ids)[len(ids) :])
with using(13, unpermuted_rows=my_rows):
    loaded = load_model(weights="float32", enable_prefix_caching=False)
pairs = zip(transformer_of(loaded).layers, model.layers, strict=True)
assert all(torch.equal(mine.qkv.weight, own.qkv.weight) for mine, own in pairs)
del loaded

print("\nperplexity of the second reading   by halves   by neighbours")
for name, row in {
    "as stored": list(found.values()),
    "in your order": [perplexity(second), perplexity(neighbours)],
}.items():
    print(f"rows {name:<28}{significant(row[0]):>11}{significant(row[1]):>16}")
reveal(13, unpermuted_rows=my_rows)

# %% [markdown]
# ## How far does the rotation reach?
#
# Any position has its angles, so a rotation seems to know no limit. But a model has only learned what
# it has met in training. The configuration of this one promises 8,192 positions. Within them, fast
# pairs complete many turns and reach every angle. Slow pairs do not complete a single one: at a
# distance beyond 8,192, they turn query and key apart by angles that the model has never met.
#
# The cure is called **rotary scaling**: slow the pairs down, until the positions that are wanted fit
# into the angles that are known. To reach $s$ times as far:
#
# - **Linear scaling** ([Chen et al. 2023](https://arxiv.org/abs/2306.15595)) divides all speeds,
#   $\theta'_i = \theta_i / s$. It slows the fast pairs as well, so that neighbours are only $1/s$ of a
#   step apart, which the model has never met either. It needs some further training.
# - **NTK scaling** (section 3 of the YaRN paper below; its name is that of a theory that is not needed
#   here) takes a larger base, $b' = b \cdot s^{d_h/(d_h-2)}$, so
#   $\theta'_i = \theta_i \cdot s^{-2i/(d_h-2)}$: pair 0 keeps its speed, the last pair is divided by
#   exactly $s$, and those between change gradually.
# - **YaRN** ([Peng et al. 2023](https://arxiv.org/abs/2309.00071)) and Llama 3's rule leave the pairs
#   alone that make many turns within the trained length, divide those by $s$ that make less than
#   about one, and blend between. YaRN also makes softmax (chapter 14) slightly sharper: larger scores
#   win more clearly.
#
# We test about four times the promised length. With NTK scaling $s$ must be larger than 4, because only
# the last pair is slowed by the whole $s$. Pair 20 is the first that does not complete a turn within
# 8,192 positions: $s = 16$ slows it $16^{40/62} = 6.0$ times, $s = 4$ only 2.4 times. Linear scaling
# slows all pairs alike, so 4 is enough.

# %%
TIMES = 16
theta, head_dim = config.rope_theta, config.head_dim
rotations = {
    "as trained": model.frequencies,
    "linear, 4 times": model.frequencies / 4,
    "NTK, 16 times": layers.rotary_frequencies(
        head_dim, theta * TIMES ** (head_dim / (head_dim - 2))
    ),
}
slow_down = [float(model.frequencies[i] / rotations["NTK, 16 times"][i]) for i in (0, 20, 31)]
turns = config.max_positions * model.frequencies / (2 * math.pi)
print("the first pair without a complete turn:", int((turns < 1).nonzero()[0]))
print("NTK, 16 times, slows pairs 0, 20 and 31:", *(f"{each:.1f}" for each in slow_down), "times")
print(f"NTK, 4 times, slows pair 20: {4 ** (40 / 62):.1f} times")
picture(
    draw_layers.wavelengths(rotations, config.max_positions),
    "How many positions each pair needs for a full turn. Below the dotted line, a pair at its trained "
    "speed reaches all angles within the promised length. NTK scaling hardly slows the fast pairs, and "
    "the last one 16 times.",
    number="13.8",
)

# %% [markdown]
# A cheap experiment: the story twice, with a gap in the *position numbers* between the two readings.
# No text stands in the gap, so this tests the angles only, not a long text. With a gap of 8,000 all
# positions are still within the promised length. What is the perplexity of the second reading then,
# without scaling?

# %%
guess_gap = predict("Perplexity of the second reading after a gap of 8,000?", None, within=2)

# %%
gaps = [4000, 8000, 18000, 32000]
curves = {name: [] for name in rotations}
for name, speeds in rotations.items():
    for gap in gaps:
        apart = torch.cat([positions, positions + len(ids) + gap])
        reading = log_probabilities(llm, ids + ids, apart, speeds)[len(ids) :]
        curves[name].append(perplexity(reading))
for name, row in curves.items():
    cells = (f"{gap:,}: {mark(each, digits=2)}" for gap, each in zip(gaps, row, strict=True))
    print(f"{name:<17}", "  ".join(cells))
guess_gap.compare(int(float(significant(curves["as trained"][1], 2))), measured=True)
picture(
    draw_layers.reach(gaps, curves, config.max_positions - 2 * len(ids), perplexity(first)),
    "Perplexity of the second reading after four gaps in the position numbers, for three rotations. No "
    "long text is read. Left of the vertical line, all positions are within the promised length.",
    number="13.9",
)

# %% [markdown]
# As trained, the model fails already at a gap of 8,000, within the promised length, probably because few
# texts of its training were so long. Linear scaling by 4 without further training is bad everywhere. NTK
# scaling works without any training, but not evenly: why a gap of 18,000 is worst is open. Models that
# are offered with a longer context have usually been trained further after the scaling.
#
# The three ways to show a position, side by side:
#
# | | where it acts | what a score sees | beyond the trained length |
# |---|---|---|---|
# | sinusoidal | added to the embedding, once | absolute positions mixed with meaning | poor |
# | ALiBi | subtracted from each head's scores | distance, always downwards | perplexity stays low, in the paper; far tokens count little |
# | rotary | rotates q and k, in every layer | distance, at 32 speeds | poor without scaling |
#
# ## RMSNorm: why normalise
#
# Every layer adds to the residual stream, and the numbers of most tokens grow. A few single numbers jump
# up and later fall back; the section on 16 bits explains them. Here are both, in our story:

# %%
states = recorded_states(llm, ids)  # the residual stream before the first layer and after each
sizes = states.square().mean(-1).sqrt()
print(f"root mean squares after 20 layers: from {sizes[20].min():.1f} to {sizes[20].max():,.0f}")
picture(
    draw_layers.sizes(states),
    "The largest number of the residual stream, and the root mean square of the median token's vector, "
    "after each layer.",
    number="13.10",
)

# %% [markdown]
# The next matrix was trained on inputs of one size. If its input were ten times as large, queries and
# keys would be ten times as large, and their scores a hundred times. The feed-forward network multiplies
# two numbers as well (SwiGLU, below), so its result can be a hundred times as large, and the next layer
# reads it. The first measurement showed how that ends: overflow. So before attention, and before the
# feed-forward network, every token's vector is brought to the same size. **RMSNorm**
# ([Zhang and Sennrich 2019](https://arxiv.org/abs/1910.07467)) divides it by its root mean square:
#
# $$\mathrm{RMSNorm}(x)_i = \frac{x_i}{\sqrt{\tfrac1d \sum_{j=1}^{d} x_j^2 + \varepsilon}}\; g_i$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x$ | the vector of one token | a row of `x` |
# | $d$ | its length, 576 | `hidden` |
# | $\varepsilon$ | a small number, here $10^{-5}$, so that a vector of zeros gives 0 and not 0/0 | `eps` |
# | $g$ | a learned factor for each of the 576 numbers | `weight` |
#
# **By hand.** Take $x = (2, 4, -4, 0)$. The squares are 4, 16, 16 and 0, their mean is 9, and its root
# is 3. The result is $(0.67, 1.33, -1.33, 0)$, times $g$. The vector $(20, 40, -40, 0)$ has the same
# result: RMSNorm keeps the direction of a vector and forgets its length.
#
# The older **LayerNorm** ([Ba et al. 2016](https://arxiv.org/abs/1607.06450)) subtracts the mean of
# the numbers first, and adds a learned number to each (a bias) at the end. RMSNorm leaves both out and
# computes less, and in the paper's experiments models trained with it were as good.
#
# A layer normalises twice: before attention and before the feed-forward network. With the norm before
# the output head there are $2 \cdot 30 + 1 = 61$ of them. The stream itself is never normalised, only
# the copy that a matrix reads. This is called **pre-norm**.


# %%
def rms_norm_by_hand(x: list[float], eps: float = 0.0) -> list[float]:
    root = math.sqrt(sum(each * each for each in x) / len(x) + eps)
    return [each / root for each in x]


for x in ([2, 4, -4, 0], [20, 40, -40, 0]):
    print(f"{x!s:<18} becomes {[round(each, 2) for each in rms_norm_by_hand(x)]}")
print("with eps, zeros stay zeros:", rms_norm_by_hand([0, 0, 0], eps=1e-5))
task(13, "rms_norm")

# %%
# exercise: minigen.model.layers.rms_norm
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "*rows hidden"]:
    """Scale each row to a root mean square of 1 (in float32), then multiply it by `weight`."""
    raise NotImplementedError  # your turn


# %%
my_norm = check(13, rms_norm=rms_norm)
with using(13, rms_norm=my_norm):
    print(llm.generate("The old lighthouse", greedy).text)

# %% [markdown]
# ## A norm in 16 bits, and the second silent failure
#
# The exercise demands float32 inside, whatever the type of `x`. On GPUs, engines usually
# keep the residual stream in 16 bits, in one of two formats:
#
# | format | bits for the exponent | bits for the digits | largest number | numbers near 1 are apart by |
# |---|---|---|---|---|
# | float32 | 8 | 23 | $3.4 \cdot 10^{38}$ | 0.0000001 |
# | float16 | 5 | 10 | 65,504 | 0.001 |
# | bfloat16 | 8 | 7 | $3.4 \cdot 10^{38}$ | 0.008 |
#
# float16 keeps more digits, bfloat16 keeps the range of float32. The cell after your prediction computes
# the whole norm in each of them, squares included. It also tries to subtract the mean first, as LayerNorm
# does. In figure 13.10 the largest number after 20 layers is about 24,500. Which format will suffer more?
# (Write `"float16"` or `"bfloat16"`.)

# %%
guess_format = predict("Which format breaks the norm?", None)


# %%
def norm_in(dtype):
    """Return RMSNorm computed in one floating-point format."""

    def norm(x, weight, eps):
        x, weight = x.to(dtype), weight.to(dtype)
        out = (weight * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())).float()
        if dtype is torch.float16:
            lost_by_norm.append(int((out == 0).all(-1).sum()))  # tokens that became all zeros
        return out

    norm.__name__ = f"norm_in_{str(dtype).removeprefix('torch.')}"
    return norm


def norm_with_mean(x, weight, eps):
    return weight * torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


by_norm, lost_by_norm = {}, []
for part in (*map(norm_in, (torch.float32, torch.float16, torch.bfloat16)), norm_with_mean):
    with using(13, rms_norm=part):
        by_norm[part.__name__] = perplexity(log_probabilities(llm, ids))
print("\nperplexity of the first reading")
for name, each in by_norm.items():
    print(f"{name:<17} {mark(each)}")
worst = max(("float16", "bfloat16"), key=lambda name: by_norm[f"norm_in_{name}"])
guess_format.compare(worst)

print(
    f"of {len(lost_by_norm)} norms in float16, {mark(sum(map(bool, lost_by_norm)), digits=2)} lost "
    f"tokens, the last one {mark(lost_by_norm[-1], digits=2)} of {len(ids)}"
)
ones = torch.ones(config.hidden)
lost = (norm_in(torch.float16)(states[20], ones, 1e-5) == 0).all(-1).nonzero().flatten().tolist()
print(
    "lost already in the sound states after 20 layers:",
    [llm.tokenizer.decode([ids[row]]) for row in lost],
)

# %% [markdown]
# In float16 the square of 256 or more is infinite, so the root is infinite, and the token's
# vector divided by infinity is zero. The first token is lost early. Most heads use it as a resting
# place (an **attention sink**, chapter 14), and the very large numbers that mark it are known as
# **massive activations** ([Sun et al. 2024](https://arxiv.org/abs/2402.17762)).
#
# The wrong states that follow lose more tokens, layer by layer, and the last norm loses most of them. A
# token of zeros gets the same score for every word of the vocabulary: that is blind guessing. Again there
# was no error.
#
# bfloat16 does not overflow here. It rounds to two or three digits, and the perplexity hardly
# notices. A norm that computes in float32, as the package's does, is safe in both formats.

# %%
reveal(13, rms_norm=my_norm)
weight = model.layers[20].attention_norm
ours = layers.rms_norm(states[20], weight, 1e-5)
theirs = torch.nn.functional.rms_norm(states[20], (config.hidden,), weight, 1e-5)
torch.testing.assert_close(ours, theirs)
torch.testing.assert_close(
    layers.rms_norm(2 * states[20], weight, 0.0), layers.rms_norm(states[20], weight, 0.0)
)
half = layers.rms_norm(states[20].half(), weight.half(), 1e-5)
print("The package and torch agree, and twice the input gives the same result.")
print(
    "The package stays finite and nonzero in float16:",
    bool(half.isfinite().all() and half.any(-1).all()),
)

# %% [markdown]
# ## SwiGLU: a feed-forward network with gates
#
# The second half of a layer is the **feed-forward network**. It works on each token alone. The
# smallest version takes two matrices and a function between them:
#
# $$\mathrm{FFN}_{\mathrm{ReLU}}(x) = W_{down}\,\max(0,\; W_{up}\,x)$$
#
# $W_{up}$ turns the 576 numbers of $x$ into 1,536 **hidden units**. Think of each as a detector: its
# row of $W_{up}$ is a pattern, and the unit's value says how much of this pattern is in $x$. **ReLU**,
# $\max(0, z)$, switches a unit off if the value is negative. Then $W_{down}$ writes: each unit that is
# on adds its column, times its value, to the residual stream. [Geva et al.
# 2021](https://arxiv.org/abs/2012.14913) read these pairs as a memory: the patterns are its keys, and the
# columns its values, which favour likely next tokens. Without the function between them, the two matrices
# would be one matrix, and could do no more than one.
#
# **Why a gate.** In the ReLU network one value does two things: it decides *whether* the unit speaks and
# *how much* it says. SwiGLU ([Shazeer 2020](https://arxiv.org/abs/2002.05202)) separates them. A second
# matrix $W_{gate}$ computes the decision, and the decision is multiplied with the content:
#
# $$\mathrm{FFN}(x) = W_{down}\big(\mathrm{SiLU}(W_{gate}\,x) \odot W_{up}\,x\big), \qquad
# \mathrm{SiLU}(z) = z\,\sigma(z) = \frac{z}{1 + e^{-z}}$$
#
# | symbol | meaning | in the code | in the paper |
# |---|---|---|---|
# | $W_{gate}$, $W_{up}$ | two matrices of $1536 \times 576$, stored as one | `layer.gate_up` | $W$, $V$ |
# | $W_{down}$ | a matrix of $576 \times 1536$ | `layer.down` | $W_2$ |
# | $\sigma$ | the sigmoid, between 0 and 1 | `torch.sigmoid` | $\sigma$ |
# | SiLU | gate: about 0 for $z \ll 0$, about $z$ for $z \gg 0$ | `functional.silu` | Swish$_1$ |
# | $\odot$ | multiplication element by element | `*` | $\otimes$ |
#
# Three units by hand. Their contents are all 3, and their gates before SiLU are 2, 0 and -2:
# $\mathrm{SiLU}(2) \cdot 3 = 1.76 \cdot 3 = 5.28$ is open, $\mathrm{SiLU}(0) \cdot 3 = 0$ is shut, and
# $\mathrm{SiLU}(-2) \cdot 3 = -0.24 \cdot 3 = -0.72$ is nearly shut: a little passes,
# with its sign reversed. (Below 0, SiLU never goes beyond -0.28.)
#
# What does a multiplication buy? Two gated units can compute a **product** of two numbers exactly:
# $\mathrm{SiLU}(a)\,b + \mathrm{SiLU}(-a)\,(-b) = a\,b$, because $\sigma(a) + \sigma(-a) = 1$. A ReLU
# network is made of straight pieces, and needs a great many of them to come close to a product. "If
# the subject is plural *and* the verb is in the past" is a product of two patterns. The paper
# measured that gated networks of the same size reach a lower perplexity, and it offers no explanation.
#
# First predict: which share of the model's 135 million parameters lies in these three matrices of all
# layers, in per cent?

# %%
guess_share = predict("Per cent of all parameters in feed-forward networks?", None, within=1.2)


# %%
def silu_by_hand(z: float) -> float:
    return z / (1 + math.exp(-z))


for gate in (2, 0, -2):
    print(
        f"gate {gate:>2}: SiLU {silu_by_hand(gate):5.2f}, times 3 is {silu_by_hand(gate) * 3:5.2f}"
    )
a, b = 1.7, -0.6
product = silu_by_hand(a) * b + silu_by_hand(-a) * -b
print(f"two gated units: {product:.4f}, a times b: {a * b:.4f}")
task(13, "swiglu")

# %%
# exercise: minigen.model.layers.swiglu
from jaxtyping import Float
from torch import Tensor


def swiglu(
    gate: Float[Tensor, "tokens ffn"], up: Float[Tensor, "tokens ffn"]
) -> Float[Tensor, "tokens ffn"]:
    """Return SiLU(gate) * up: the gate decides how much of each hidden unit of `up` passes."""
    raise NotImplementedError  # your turn


# %% [markdown]
# The whole feed-forward network of layer 16 (counted from 0), with your `swiglu` in the middle. The
# sum must be what the engine put into the residual stream. The picture shows where the gates stand.

# %%
my_swiglu = check(13, swiglu=swiglu)
layer, heads = model.layers[LAYER], recorded[LAYER]
attended = attention(heads.q, heads.k, heads.v).flatten(-2)  # chapter 14
x = states[LAYER] + layer.out(attended)  # the residual stream after attention
normalized = layers.rms_norm(x, layer.ffn_norm, model.norm_eps)
w_gate, w_up = layer.gate_up.weight.split(layer.gate_up.parts)
gate, up = normalized @ w_gate.T, normalized @ w_up.T  # W_gate x and W_up x
out = my_swiglu(gate, up) @ layer.down.weight.T  # W_down (SiLU(gate) * up)
torch.testing.assert_close(x + out, states[LAYER + 1], atol=1e-2, rtol=1e-3)  # the engine's
print(f"x {list(normalized.shape)} -> gate and up {list(gate.shape)} -> result {list(out.shape)}")

in_networks = config.num_layers * (w_gate.numel() + w_up.numel() + layer.down.weight.numel())
in_attention = config.num_layers * (layer.qkv.weight.numel() + layer.out.weight.numel())
in_norms = (2 * config.num_layers + 1) * config.hidden
in_all = in_networks + in_attention + in_norms + model.embedding.numel()
print(f"{in_all / 1e6:.1f} million parameters, {in_norms:,} of them in the norms")
guess_share.compare(round(100 * in_networks / in_all), "%")
picture(
    draw_layers.gates(gate),
    "SiLU beside ReLU, and the gates of one layer before SiLU, for all tokens of the story. Only a gate "
    "of exactly 0 shuts its unit completely; one far below 0 nearly does.",
    number="13.11",
)
reveal(13, swiglu=my_swiglu)

# %% [markdown]
# Why 1,536 units? A ReLU network usually has four times as many units as $x$ has numbers, in two
# matrices: $2 \cdot 4d^2 = 8d^2$ parameters. With three matrices, $\tfrac83 d$ units give the same
# number: $3 \cdot \tfrac83 d^2 = 8d^2$, and $\tfrac83 \cdot 576 = 1536$.
#
# ## The measurement again
#
# The number from the top: the perplexity of the second reading, without the rotation, with the other
# pairs, and with all three parts, each of them yours if it has passed.

# %%
parts = {"apply_rotary": my_rotary, "rms_norm": my_norm, "swiglu": my_swiglu}
_, again = read_twice(**parts)
num_yours = sum(part is not getattr(layers, name) for name, part in parts.items())
print(f"\nwithout positions:     {significant(perplexity(unordered), 2):>6}")
print(f"with the other pairs:  {significant(perplexity(neighbours), 3):>6}")
print(f"with the three parts:  {perplexity(again):>6.2f} ({num_yours} of them yours)")
gain = perplexity(unordered) / perplexity(again)
print(f"what the right rotation is worth here: about {significant(gain, 2)} times")
assert math.isclose(perplexity(again), perplexity(second), rel_tol=1e-3)

# %% [markdown]
# ## Claims
#
# For the third claim the cell tests 5,000 random pairs of a query and a key, which have
# nothing in common, and the average query and key of each head, which training has formed. Of random
# pairs, only about half can score higher near: with $-k$ in place of $k$ every score changes its sign.
# If a query and a key are equal, it is otherwise. Unturned, each of their 32 pairs of numbers adds as much
# as it can, so the score is highest at distance 0, and farther away the pairs get out of step. The cell
# tests that too.


# %% jupyter={"source_hidden": true}
def mean_score(queries, keys, first_distance, last_distance):
    """Return each pair's mean score over a range of distances."""
    places = torch.arange(first_distance, last_distance + 1)
    moved = queries.expand(len(places), -1, -1)
    moved = layers.apply_rotary(moved, *layers.rotary_tables(model.frequencies, places))
    return (moved * keys).sum(-1).mean(0)


def near_is_higher(queries, keys):
    return mean_score(queries, keys, 1, 16) > mean_score(queries, keys, 113, 128)


generator = torch.Generator().manual_seed(0)
random_q, random_k = torch.randn(2, 5000, head_dim, generator=generator)
random_near = near_is_higher(random_q, random_k).float().mean()
equal_near = near_is_higher(random_q, random_q).float().mean()
trained = []
for heads in recorded:
    mean_q, mean_k = (
        layers.apply_rotary(each, cos, -sin)[1:].mean(0) for each in (heads.q, heads.k)
    )
    shared_k = mean_k.repeat_interleave(len(mean_q) // len(mean_k), dim=0)
    trained.append(near_is_higher(mean_q, shared_k))
trained_near = torch.stack(trained).float().mean()
print("near tokens score higher:")
print(f"{random_near:.0%} of random pairs, {equal_near:.0%} if both are equal")
print(f"{trained_near:.0%} of trained heads")

off_centre = states.mean(-1).abs() / states.square().mean(-1).sqrt()
su = "[Su et al. 2021](https://arxiv.org/abs/2104.09864)"
as_trained, best = curves["as trained"], curves["NTK, 16 times"][-1]
mean_matters = by_norm["norm_with_mean"] / by_norm["norm_in_float32"]
verdicts(
    "13",
    Claim(
        "With RoPE, a score depends on the relative position only",
        "5,000 positions further on, scores differ by less than 0.2 % of their range",
        holds(moved < 0.002),
        "the rotation by the common part cancels; a float32 angle is less exact at far positions",
        su,
    ),
    Claim(
        "RoPE gives flexibility of sequence length",
        f"perplexity of a text read again: {mark(as_trained[0], digits=2)} after a gap of 4,000 positions, "
        f"{mark(as_trained[1], digits=2)} after 8,000, {mark(as_trained[-1], digits=2)} after 32,000",
        holds(as_trained[-1] < 2 * as_trained[0]),
        "any position has its angles, and the paper may mean no more; but at 32,000, slow pairs reach "
        "angles that training never showed; it fails before, within the "
        f"promised length; with NTK scaling it is {mark(best, digits=2)} at 32,000",
        su,
    ),
    Claim(
        "RoPE lets scores decay with the distance",
        f"of random queries and keys, {random_near:.0%} score higher at distances 1 to 16 than at 113 to "
        f"128; of equal ones, {equal_near:.0%}; of the trained heads' average ones, {trained_near:.0%}",
        holds(random_near > 0.9),
        "the paper derives an upper limit that falls with the distance, not the scores themselves; "
        "the rotation favours near tokens where query and key are alike, not where they are unrelated",
        su,
    ),
    Claim(
        "LayerNorm's mean can be left out",
        f"subtracting the mean changes the perplexity by a factor of {mean_matters:.2f}: the median "
        f"token's mean is only {off_centre.median():.2f} of its root mean square",
        NOT_TESTED,
        "this is the reverse: the model was trained without the subtraction; the paper trained both ways",
        "[Zhang and Sennrich 2019](https://arxiv.org/abs/1910.07467)",
    ),
)

# %% [markdown]
# ## Summary
#
# - The embedding is a lookup. Every layer adds to the residual stream, twice.
# - Attention adds up what it finds, so without positions one layer cannot tell *dog bites man* from
#   *man bites dog*.
# - Rotary embedding rotates pairs of numbers of each query and key by angles that grow with the
#   position, at 32 speeds. Their score then depends on the distance alone, because a common rotation
#   cancels.
# - Two pairings are in use, and the rows of $W_q$ and $W_k$ must fit the pairing. If only one of them
#   is changed, the model can no longer copy, although no error is raised.
# - Beyond the trained length, slow pairs reach unknown angles; this model fails even earlier. Rotary
#   scaling slows pairs down: linear scaling all alike, the other rules the slow ones more than the fast.
# - RMSNorm divides each token's vector by its root mean square, so that attention and the feed-forward
#   network read inputs of one size. It must not square in float16: squares above 65,504 overflow, and
#   tokens are lost. bfloat16 only rounds.
# - SwiGLU multiplies the content of each hidden unit with a gate. The three matrices of the
#   feed-forward network hold most of this model's parameters, 59 %.
# - Perplexity is the exponential of the mean negative log-probability: the effective number of choices.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A query at position 7 and a key at position 3 have the score 2.5. What score would the
# same two have at the positions 107 and 103? And with the query at 3 and the key at 7?</summary>
# 2.5: the distance is 4 in both cases. The second cannot be known from the first: the distance is -4, and a
# rotation by the opposite angle gives another dot product. (A model never asks, because a query looks back
# only.)</details>
#
# <details><summary>2. You convert a checkpoint and its rows of W_q and W_k come out in the wrong order. Which
# of these notice it: the shapes, a question about France, the perplexity of a text that is read
# twice?</summary>
# Only the last. The shapes are the same, and easy facts survive, because they need little of the
# order. Copying needs exact distances, so the second reading goes from 1.4 to several hundred.</details>
#
# <details><summary>3. All numbers of the residual stream are multiplied by 8 before a layer. What happens to
# the queries that this layer computes?</summary>
# Nothing: RMSNorm divides by a root mean square that is 8 times as large. (Up to eps, which matters only
# for vectors near zero.)</details>
#
# ## What the production engines do beyond this
#
# The three functions do little arithmetic for each number that they read, so
# [memory bandwidth](../docs/glossary.md#memory-bandwidth) limits them, and engines save passes over memory.
#
# - **[vLLM](https://github.com/vllm-project/vllm)** and
#   **[SGLang](https://github.com/sgl-project/sglang)** [fuse](../docs/glossary.md#kernel-fusion): the
#   addition to the residual stream and the norm that follows are one kernel, and so are SiLU and the
#   product. Queries and keys are rotated in place, with a table of cosines and sines that is computed
#   once for all positions. vLLM can also
#   [quantise the norm's result](https://docs.vllm.ai/en/stable/design/fusions/) in the same kernel.
#   Chapter 31 writes such kernels.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** can quantise in the norm's kernel, too,
#   and fuse the gate into the matrix multiplication before it.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)** (and **Ollama**, which is built on it) knows
#   both pairings, and chooses by the architecture that the file names. Its flags `--rope-scaling` and
#   `--rope-freq-base` set a scaling by hand.
# - `rope_scaling` (newer: `rope_parameters`) in a checkpoint's `config.json` names the rule to apply,
#   usually that of the training. minigen honours linear scaling and Llama 3's rule, and refuses the
#   others instead of guessing.
#
# ## Further reading
#
# - [RoFormer](https://arxiv.org/abs/2104.09864), Su et al. 2021: section 3 is the rotation, with the
#   proof.
# - [Rotary Embeddings: A Relative Revolution](https://blog.eleuther.ai/rotary-embeddings/), EleutherAI:
#   the same in a long post, with complex numbers.
# - [Train Short, Test Long](https://arxiv.org/abs/2108.12409), Press et al. 2021: ALiBi.
# - [YaRN](https://arxiv.org/abs/2309.00071), Peng et al. 2023: sections 2 and 3 explain linear and NTK
#   scaling.
# - [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467), Zhang and Sennrich 2019.
# - [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202), Shazeer 2020: a short paper.
# - [A Study of BFLOAT16](https://arxiv.org/abs/1905.12322), Kalamkar et al. 2019: range against digits.
# - [convert_llama_weights_to_hf.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/convert_llama_weights_to_hf.py):
#   look for `permute`, the reordering of rows in the one direction.
#
# **Next:** [14 · Attention](14_attention.ipynb), where the rotated queries and keys meet.

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
# Consider the sentence *The old lighthouse keeper lost his lamp, so the young sailor gave the keeper
# a lamp.* To continue it after the second *keeper*, a model must know who this keeper is, and that
# this person lost a lamp. All of that stands in other words. **Attention** is how a token fetches
# information from other tokens. It is the only place in the model where tokens exchange anything:
# embeddings, norms and feed-forward networks (chapter 13) treat each token alone.
#
# **Afterwards you can** compute attention by hand, write it with grouped heads, a causal mask and a
# window, read a heat map of a head, and say how many bytes each token adds to a server's memory.
#
# **You need** chapter 13 ([RMSNorm](../docs/glossary.md#rmsnorm) and
# [rotary embedding](../docs/glossary.md#rotary-embedding)), matrix multiplication, and softmax, which
# this chapter repeats. **Time:** about 50 minutes to read and try, about 40 for the
# [exercises](../exercises/14_attention.ipynb).
#
# **Where we are:** token ids → embedding → 30 × ( norm → **attention** → add → norm → feed-forward
# → add ) → norm → output head → next token.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | prefill, decode | compute (prefill), memory bandwidth and capacity (decode) | L3 engine | number of KV heads | bytes per token |
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
from minigen.model import attention as package
from minigen.model.layers import apply_rotary, rms_norm
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    predict,
    reveal,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch14_attention import figures as draw_heads
from minigen_course.ch14_attention import lesson
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.inspect_model import (
    head_scores,
    log_probabilities,
    perplexity,
    recorded_heads,
    recorded_states,
    transformer_of,
    turned_back,
)

# No prefix is kept from run to run, and a prompt is computed in chunks of 16 tokens. One thread is
# enough for products as small as these.
llm = load_model(
    weights="float32", enable_prefix_caching=False, max_num_batched_tokens=16, threads=1
)

# %%
chapter_map("attention")

# %% [markdown]
# ## A number that hurts: the model without attention
#
# **Perplexity** is the effective number of tokens among which the model hesitates (chapter 13): 1
# means certain. This model knows 49,152 tokens, so blind guessing has a perplexity of 49,152. Here
# is the model's perplexity on the sentence. Then attention is switched off in all 30 layers: each
# token takes what it would hand over itself, and nothing of the others.
#
# Predict first: what is the perplexity without attention? Replace `None` by a number.

# %%
guess_alone = predict("Perplexity without attention?", None, within=3)

# %%
sentence = "The old lighthouse keeper lost his lamp, so the young sailor gave the keeper a lamp."
ids = llm.tokenizer.encode(sentence)
tokens = [llm.tokenizer.decode([token]) for token in ids]

with_attention = perplexity(log_probabilities(llm, ids))
with using(14, attention=lesson.alone):
    without_attention = perplexity(log_probabilities(llm, ids))
followers = len(ids) - 1  # the first token has no prediction
print(f"perplexity of the {followers} tokens after the first, with attention: {with_attention:.1f}")
guess_alone.compare(int(round(without_attention, -3)))
assert without_attention > 10_000

# %% [markdown]
# Without attention the model is about as bad as blind guessing (17 tokens cannot tell more; a
# perplexity above 49,152 means that it is sure of wrong tokens, chapter 13). Part of
# this is shock: it was trained with attention, and now its layers get inputs that they never met. A
# model trained without attention would at least know which token often follows which. (Attention was
# replaced once in each of 30 layers. `lesson.alone` and, below, `lesson.unmasked` give away half of
# an exercise, so open `minigen_course/ch14_attention/lesson.py` after it.) What did the tokens fetch
# from each other?
#
# ## Query, key and value
#
# Think of a library. You come with a question, the **query**. Every book has a label on its spine,
# the **key**, and a content, the **value**. You compare your question with all labels, and you take
# home a mixture of contents: a large part of the books whose labels fit, little of the others.
#
# Each token plays all three roles at once. It asks with its query, and it answers others with its
# key and its value. All three are vectors of 64 numbers (for each head, which a later section
# explains):
#
# | vector | says |
# |---|---|
# | query $q$ | what I look for |
# | key $k$ | what I can be found by |
# | value $v$ | what I hand over |
#
# ### Three tokens by hand
#
# Take the tokens *the cat sat*, vectors of four numbers, and let *sat* look back:
#
# $$q_{sat} = (2, 0, 1, 0), \qquad k_{the} = (0, 1, 0, 0), \quad k_{cat} = (2, 0, 0, 0), \quad
# k_{sat} = (1, 0, 0, 0)$$
#
# 1. **Scores.** The dot product of the query with each key says how well they fit:
#    $q_{sat} \cdot k_{the} = 0$, $\; q_{sat} \cdot k_{cat} = 4$, $\; q_{sat} \cdot k_{sat} = 2$.
# 2. **Scale.** Divide by the square root of the number of dimensions, $\sqrt 4 = 2$: 0, 2, 1.
# 3. **Softmax** turns scores into weights that are positive and sum to one: the exponential of each
#    score, divided by the sum of all exponentials. $e^0 = 1.00,\; e^2 = 7.39,\; e^1 = 2.72$, the sum
#    is 11.11, so the weights are **0.09, 0.67, 0.24**.
# 4. **Mix.** The result is the sum of the values, each times its weight:
#    $o_{sat} = 0.09\, v_{the} + 0.67\, v_{cat} + 0.24\, v_{sat}$.
#
# So *sat* fetched mostly what *cat* hands over. (These **attention weights** are computed for
# each text. They are not the learned weights of chapter 11.) As a formula, for the token at position
# $t$ and vectors of $d$ numbers:
#
# $$o_t = \sum_{s \le t} a_{ts}\, v_s, \qquad
# a_{ts} = \frac{\exp(q_t \cdot k_s / \sqrt d)}{\sum_{u \le t} \exp(q_t \cdot k_u / \sqrt d)}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $q_t, k_s, v_s$ | query, key and value of the tokens at positions $t$ and $s$ | `q[t]`, `k[s]`, `v[s]` |
# | $d$ | numbers in a query or key, the head dimension | `head_dim`, 64 |
# | $a_{ts}$ | attention weight that token $t$ gives to token $s$ | `weights` |
# | $o_t$ | result of token $t$ | `out` |
#
# The sum runs over $s \le t$ only: a token looks at itself and back, never ahead. More of that soon.
# (In the papers, the matrices of all queries, keys and values are called $Q$, $K$ and $V$.)
#
# The same four steps in plain Python:


# %%
def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(each - max(scores)) for each in scores]
    return [each / sum(powers) for each in powers]


def look_back(
    query: list[float], keys: list[list[float]], values: list[list[float]]
) -> tuple[list[float], list[float]]:
    """Return the weights of all keys, and the sum of the values under these weights."""
    root = math.sqrt(len(query))
    scores = [sum(q * k for q, k in zip(query, key, strict=True)) / root for key in keys]
    weights = softmax(scores)
    columns = zip(*values, strict=True)  # one for each dimension of a value
    out = [sum(w * v for w, v in zip(weights, each, strict=True)) for each in columns]
    return weights, out


keys = [[0, 1, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0]]
values = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]  # so that the result shows the weights
weights, out = look_back([2, 0, 1, 0], keys, values)
print("weights of the, cat, sat:", [round(each, 2) for each in weights])
print("result:", [round(each, 2) for each in out])

# %% [markdown]
# `softmax` subtracts the largest score from all scores before it takes exponentials. The weights stay
# the same, because $e^{s-m} = e^s / e^m$ and the factor $e^m$ cancels. But no exponential is larger
# than 1 any more, so none can overflow: $e^{12}$ is already infinite in float16, and $e^{89}$ in
# float32.
#
# ## Where queries, keys and values come from
#
# The model keeps one vector $x$ of 576 numbers per token, the **residual stream**: it starts as the
# token's embedding, and every layer adds to it. In each layer, RMSNorm turns $x$ into $\hat x$, and
# three learned matrices turn $\hat x$ into queries, keys and values. Chapter 13's rotary embedding
# rotates queries and keys by their position $t$, which $R_t$ stands for:
#
# $$q_t = R_t W_q \hat x_t, \qquad k_t = R_t W_k \hat x_t, \qquad v_t = W_v \hat x_t$$
#
# Queries and keys have matrices of their own because the relation is one-sided: *lamp* may look for
# its owner, while the owner looks for something else. With the rotation, a score depends on how far
# two tokens are apart.
#
# A layer does not look back once but nine times at once, with nine different questions. Each of
# these **heads** has its own 64 of the 576 query dimensions. The results of the nine heads are put
# side by side again, and a fourth matrix $W_o$ mixes them into what is added to $x$:
#
# $$y_t = W_o\, [\,o_t^{1};\, o_t^{2};\, \dots;\, o_t^{9}\,]$$
#
# Here $y_t$ is what is added to $x_t$, the upper number is the head's, and the semicolons put vectors
# side by side. (That 9 × 64 is again 576, the width of $x$, is a custom, no must: in Qwen3-0.6B or gpt-oss it is not
# so, and $W_o$ leads back to the width.)
#
# Queries have nine heads but keys and values have only three, because three query heads share one
# key and value head. The section on grouped heads says why. Here is the way of one sentence through
# one layer's attention, with the shapes of this model:

# %%
picture(
    draw_heads.flow(len(ids), llm.config.q_heads, llm.config.kv_heads, llm.config.head_dim),
    "Attention in one layer. The residual stream x becomes queries, keys and values; each head "
    "compares, weighs and mixes; the heads' results are joined and added to x. Grey boxes are not "
    "part of attention.",
    number="14.1",
)

# %% [markdown]
# And the same in code, for layer 8 of the model and the sentence from the top:

# %%
LAYER = 8
model = transformer_of(llm)
layer, x = model.layers[LAYER], recorded_states(llm, ids)[LAYER]
normalized = rms_norm(x, layer.attention_norm, model.norm_eps)
# W_q, W_k and W_v lie in one matrix; `parts` are the widths of the three results
q, k, v = layer.qkv(normalized).split(layer.qkv.parts, dim=-1)
print(f"x {list(x.shape)}: W_q makes {list(q.shape)}, W_k {list(k.shape)}, W_v {list(v.shape)}")
q, k, v = (each.unflatten(-1, (-1, llm.config.head_dim)) for each in (q, k, v))  # cut into heads
rotation = model.rotation(torch.arange(len(ids)))
q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
print(f"by head: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")

recorded = recorded_heads(llm, ids)  # q, k and v of each layer, as the engine computed them
for mine, engines in ((q, recorded[LAYER].q), (k, recorded[LAYER].k), (v, recorded[LAYER].v)):
    torch.testing.assert_close(mine, engines, atol=1e-4, rtol=1e-4)

# %% [markdown]
# Now the real thing. Head 0 of layer 8, at the second *keeper*: which earlier word does it look at
# most? (Write a word with its leading space, such as `" lamp"`.)

# %%
guess_word = predict("Which word does the second keeper look at most?", None)

# %%
HEAD, TOKEN = 0, 14
weights, out = look_back(  # query heads 0, 1 and 2 share KV head 0
    q[TOKEN, HEAD].tolist(), k[: TOKEN + 1, 0].tolist(), v[: TOKEN + 1, 0].tolist()
)
ranked = sorted(zip(weights, range(TOKEN + 1), strict=True), reverse=True)[:3]
print(f"token {TOKEN}, {tokens[TOKEN]!r}, looks at")
for weight, place in ranked:
    print(f"  {weight:.2f}  token {place}, {tokens[place]!r}")
guess_word.compare(tokens[ranked[0][1]])

# %% [markdown]
# It looks at the first *keeper*, eleven tokens back. Is that the distance that it looks for, or the
# word? Put twelve words between, or undo the rotation of this layer's queries and keys:

# %%
between = "on a cold and windy evening late in that very long year"
longer = llm.tokenizer.encode(sentence.replace("the young", f"{between} the young"))
later = TOKEN + len(longer) - len(ids)
# head_scores: q·k/√d of all heads of a layer, minus infinity for later tokens (weight 0)
farther = head_scores(recorded_heads(llm, longer)[LAYER])[HEAD, later].softmax(-1)
unrotated = head_scores(turned_back(llm, recorded[LAYER]))[HEAD, TOKEN].softmax(-1)
print(f"weight on the first keeper, {later - 3} tokens back: {farther[3]:.2f}")
print(f"weight on the first keeper, without rotation: {unrotated[3]:.2f}")
rows = head_scores(recorded[LAYER])[HEAD].softmax(-1)
on_first = int((rows[1:].argmax(-1) == 0).sum())
print(f"of {followers} tokens after the first, {on_first} look most at token 0, {tokens[0]!r}")

# %% [markdown]
# It is the word: the query of the second *keeper* fits the key of the first one, at both distances,
# and in this layer without the rotation, too (the layers below still had it). Not every repeated word
# is found: the second *lamp* looks most at the first token, as 15 others do. What this head looks for
# is narrower than "the same word", and one sentence does not show it.
#
# The value that it fetches was computed at token 3, so it can hold *The old lighthouse keeper*, but
# not the lost lamp. That stands in later tokens, and other heads must fetch it. The section on real
# heads finds them, and says why heads look at the first token.
#
# ## Why divide by the square root of d?
#
# A dot product of two vectors is a sum of $d$ products. If the numbers are independent with mean 0
# and variance 1, each product has variance 1, the sum has variance $d$, and a standard deviation of
# $\sqrt d$. Scores would grow with the size of a head. Large scores make softmax pick one key and
# ignore all others. Then the gradient by each score (how much a small change of it would help) is
# nearly zero, the winner's too, and training stalls.

# %%
generator = torch.Generator().manual_seed(0)
print("   d   deviation of scores   largest of 16 weights, undivided   divided")
for d in (4, 16, 64, 256):
    many_q = torch.randn(4000, 1, d, generator=generator)
    many_k = torch.randn(4000, 16, d, generator=generator)
    products = (many_q * many_k).sum(-1)
    largest = [products.softmax(-1), (products / math.sqrt(d)).softmax(-1)]
    shown = [f"{each.amax(-1).mean():.2f}" for each in largest]
    print(f"{d:>4}{products.std():>22.0f}{shown[0]:>35}{shown[1]:>10}")

# %% [markdown]
# ## All tokens at once
#
# A prompt has many tokens, and nothing forces us to compute them one by one. Put all queries into a
# matrix $Q$ with a row per token, and keys and values into $K$ and $V$. Then one matrix product
# computes all scores of a head:
#
# $$O = \mathrm{softmax}\Big(\frac{Q K^\top}{\sqrt d} + M\Big)\, V$$
#
# Softmax works on each row. $M$ is the mask; the next two sections explain it. The matrix of scores
# has a row and a column per token, so its size grows with the **square** of the text's length:

# %%
print("  tokens   scores per head   of one head   of all heads of a layer, 4 bytes each")
for length in (len(ids), 1024, 8192, 131_072):
    gigabytes = length * length * 4 / 1e9
    all_heads = gigabytes * llm.config.q_heads
    print(f"{length:>8,}{length * length:>18,}{gigabytes:>11.3f} GB{all_heads:>11.3f} GB")

# %% [markdown]
# This model ends at 8,192 tokens; other models reach 131,072. No GPU of today holds the 618 GB of that
# row, and even one head alone would nearly fill a GPU of 80 GB. Chapter 32 computes attention without
# ever storing this matrix.
#
# ## Without a mask, the future leaks
#
# `look_back` was given only the keys up to its own token. A product of whole matrices computes the
# scores of later tokens, too. Nothing stops a token from looking ahead at the very word that it is
# asked to predict. `lesson.unmasked` computes the formula without $M$.
#
# The last word of the sentence is exchanged, *lamp* for *hat*. Do the tokens *before* it notice?

# %%
other = [*ids[:-2], llm.tokenizer.encode(" hat")[0], ids[-1]]


def reaches_back():
    """Return whether another last word changes the states of the tokens before it."""
    one, two = (recorded_states(llm, each)[-1, :-2] for each in (ids, other))
    return not torch.allclose(one, two, atol=1e-2)


print("with the mask, do the earlier tokens' states change?", reaches_back())
with using(14, attention=lesson.unmasked):
    print("without the mask, do they change?", reaches_back())

# %% [markdown]
# They do. Predict: what is the perplexity of the sentence if every token sees all tokens?

# %%
guess_leak = predict("Perplexity without the mask?", None, within=2)

# %%
with using(14, attention=lesson.unmasked):
    leaky = perplexity(log_probabilities(llm, ids))
guess_leak.compare(leaky)

# %% [markdown]
# The perplexity without the mask is far lower. The model is not better: it reads the answers before
# it gives them. (It was never trained to read ahead and uses the leak badly, so it does not reach 1.)
# And it has lost the ability to write, although only the prompt is computed without the mask:

# %%
opening = "Once upon a time there was a"
greedy = SamplingParams(temperature=0, max_tokens=8)
print("with the mask:", repr(llm.generate(opening, greedy).text))
with using(14, attention=lesson.unmasked):
    print("without:      ", repr(llm.generate(opening, greedy).text))

# %% [markdown]
# The last token of the prompt sees the same tokens in both cases. But the states of the tokens
# before it were computed while they looked ahead. This model was trained with the mask, so it never
# met such states, nor the keys and values computed from them.
#
# ## The idea: a triangle
#
# A **causal mask** removes the scores of later tokens: $M_{ts}$ is 0 where token $t$ sees token $s$, and
# elsewhere minus infinity, whose exponential is 0. In code, the mask is a table that is True where $t$ sees $s$.
# (`masked_fill` in the next cell wants the opposite: True where it puts minus infinity.) The
# same rule, *a query sees the keys at its own position and before*, gives a triangle for a whole
# prompt. Here are *the cat sat* again, with queries of *the* and *cat*, too. The last row is the one
# from above:

# %%
queries = torch.tensor([[0.0, 1, 0, 0], [1, 1, 0, 0], [2, 0, 1, 0]])
table = queries @ torch.tensor(keys, dtype=torch.float32).T / math.sqrt(4)
masked = table.masked_fill(torch.ones(3, 3).triu(1) == 1, -math.inf)
stages = {"scores": table, "scores + M": masked, "weights": masked.softmax(-1)}
print("      ", "".join(f"{name:<24}" for name in stages))
for row, name in enumerate(("the", "cat", "sat")):
    cells = ("".join(f"{each:6.2f}" for each in stage[row].tolist()) for stage in stages.values())
    print(name, "      ".join(cells))

# %% [markdown]
# For a head of the model, the first table is `q[:, 0] @ k[:, 0].T / 8`.
#
# A long prompt is computed in **[chunks](../docs/glossary.md#chunked-prefill)**, a part of it in each
# step. The queries of a chunk are the last positions of the context, so its mask is a rectangle with a
# slanted end. One new token has a full row. Some models also limit how far a token can look back, to a
# **[sliding window](../docs/glossary.md#sliding-window)**.

# %%
picture(
    draw_heads.masks(
        {
            "a prompt": package.causal_mask(6, 6),
            "its last chunk": package.causal_mask(2, 6),
            "one new token": package.causal_mask(1, 6),
            "a window of 3": package.causal_mask(6, 6, window=3),
        }
    ),
    "Four causal masks. A row is a query, a column is a key; blue means that the query sees the key.",
    number="14.2",
)

# %% [markdown]
# ## What real heads look at
#
# The model has 30 layers with 9 heads each, so 270 heads. No programmer chose what a head looks for:
# it learned that. Four habits can be measured on any sentence. For each habit, the head that has it
# most:

# %%
scores = torch.stack([head_scores(each) for each in recorded])  # layers, heads, queries, keys
looks = scores.softmax(-1)
habits = {
    "the token before": looks.diagonal(-1, -2, -1).mean(-1),
    "the first token": looks[..., 1:, 0].mean(-1),
    "itself": looks.diagonal(0, -2, -1)[..., 1:].mean(-1),
    # entropy: 0 if all weight is on one token, larger if it is spread over more
    "many tokens": -(looks * looks.clamp(min=1e-9).log()).sum(-1).mean(-1),
}
chosen = {}
for name, habit in habits.items():
    layer_id, head = divmod(int(habit.argmax()), llm.config.q_heads)
    chosen[f"{name}\nlayer {layer_id}, head {head}"] = looks[layer_id, head]
picture(
    draw_heads.head_maps(chosen, tokens),
    "Weights of four heads. A row is a token that looks, a column is a token that is looked at, and "
    "yellow means much weight. Each row sums to one.",
    number="14.3",
)
sink = float(looks[..., 1:, 0].mean())
lengths = torch.stack([each.v.norm(dim=-1) for each in recorded])  # layers, tokens, KV heads
given = lesson.by_length(looks, lengths)  # each weight times the length of its value
sink_given = float(given[..., 1:, 0].sum() / given[..., 1:, :].sum())
own, others = float(lengths[:, 0].mean()), float(lengths[:, 1:].mean())
print(f"weight on the first token, mean of all heads and of all tokens but the first: {sink:.0%}")
print(f"mean length of its values: {own:.1f}; of all other values: {others:.1f}")
print(f"its share if each weight is multiplied by the length of the value: {sink_given:.0%}")
print("the heads in which the second keeper looks most at the lost lamp:")
for place in (4, 5, 6):
    layer_id, head = divmod(int(looks[:, :, TOKEN, place].argmax()), llm.config.q_heads)
    weight = looks[layer_id, head, TOKEN, place]
    print(f"  {weight:.2f}  token {place}, {tokens[place]!r}: layer {layer_id}, head {head}")

# %% [markdown]
# Softmax must spend its whole weight, even where a head finds nothing that fits. The model has
# learned to leave the rest on the first token, which every later token can see. Such a resting place
# is called an **attention sink** ([Xiao et al. 2023](https://arxiv.org/abs/2309.17453); in the models
# that they measured, the first four tokens serve). The values of this token are short, so a head that
# rests adds less to the residual stream than its weight suggests: of all weights, each times the
# length of its value, the first token has half as large a share (before $W_o$, which can change
# lengths). In chapter 13 a float16 overflow destroyed this token first.
#
# The last lines answer the question from the top: from the second *keeper*, heads of three layers look
# at *lost*, *his* and *lamp*, one word each. (Looking does not prove that the model uses what it
# fetched.)
#
# ## Drag it
#
# Choose a layer and a head, and write a sentence of your own. Layer 18, head 6 rests on the first
# token until a word comes back. Then it looks at the token that *followed* this word the first time,
# and so the model can repeat it: after the second *Marla Venn*, it looks at *sold*. (The second
# *Marla* begins with a space, so the tokenizer cuts it otherwise.) How can the key of *sold* say what
# came before it? A head of an earlier layer that looks at the token before (layer 16, head 0 in figure
# 14.3 is one) can write into each token which one it follows. Then the key of *sold* can say "I
# followed *enn*", and the query of the second *enn* asks for that. This is an **induction head**.
# [Olsson et al. 2022](https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads/index.html)
# argue that such heads may explain most of what models learn from their context.


# %%
def heat(sentence, layer, head):
    ids = llm.tokenizer.encode(sentence)
    weights = head_scores(recorded_heads(llm, ids)[layer])[head].softmax(-1)
    words = [llm.tokenizer.decode([token]) for token in ids]
    kv_head = head // (llm.config.q_heads // llm.config.kv_heads)
    said = f"layer {layer}, query head {head}, which uses KV head {kv_head}"
    return draw_heads.head_map(weights, words, said)


explore(
    heat,
    "One head's weights on a sentence. Layer 18, head 6 is an induction head: each token of the "
    "second Marla Venn looks at the token that followed it the first time.",
    "14.4",
    sentence="Marla Venn sold three geese to Otto Quill, and Marla Venn",
    layer=(0, llm.config.num_layers - 1, 1, 18),
    head=(0, llm.config.q_heads - 1, 1, 6),
)

# %% [markdown]
# ## Grouped heads: what each token leaves in memory
#
# A token's queries are needed once, in the step that computes this token. Keys and values are
# different: every later token looks at them. An engine therefore stores the keys and values of every
# token, in every layer. This store is the **[KV cache](../docs/glossary.md#kv-cache)** (chapter 17),
# and beside the model's weights, it is what fills a server's memory. Each new token reads all that its own text left there, so
# a smaller cache also makes decoding faster. Its size depends on the number of key and value heads:
#
# - **Multi-head attention** (MHA) has a KV head for each query head.
# - **Multi-query attention** (MQA, [Shazeer 2019](https://arxiv.org/abs/1911.02150)) has a single KV
#   head for all query heads.
# - **[Grouped-query attention](../docs/glossary.md#grouped-query-attention)** (GQA,
#   [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)) lies between: query head $h$ uses KV head
#   $\lfloor h \,/\, (H_q / H_{kv}) \rfloor$ (rounded down). Here heads 0, 1 and 2 use KV head 0.
#
# | symbol | meaning | in the code | here |
# |---|---|---|---|
# | $H_q$ | query heads | `q_heads` | 9 |
# | $H_{kv}$ | KV heads | `kv_heads` | 3 |
# | $h$ | number of a query head | `head` | 0 to 8 |
# | $L$ | layers | `num_layers` | 30 |
#
# Fewer KV heads cost quality, since several questions must share one set of labels and contents.
# Ainslie et al. took T5-XXL, a trained model with 11 billion weights and 64 heads, averaged the KV
# heads of each group into one, and trained it a little further with fewer KV heads. With one, it lost some quality; with eight, it came close to the
# original, and was nearly as fast as with one.
# That is why most models of today use groups.

# %%
picture(
    draw_heads.sharing(
        {"multi-head": (9, 9), "grouped, as here": (9, 3), "multi-query": (9, 1)},
    ),
    "Query heads 0 to 8 (circles) and the KV heads that they share (squares): nine, three and one.",
    number="14.5",
)

# %% [markdown]
# Per token, the cache holds a key and a value of $d$ numbers for each layer and each KV head:
#
# $$\text{bytes per token} = 2 \cdot L \cdot H_{kv} \cdot d \cdot \text{bytes per number}$$
#
# (A layer with a sliding window need keep only the positions inside it.) Chapter 00 had this formula.
# Llama-3-70B has 80 layers, 64 query heads, 8 KV heads and a head dimension of 128, and it stores 2
# bytes per number. Say that a server has 80 GB for its cache. Predict: how many texts of 8,192 tokens
# would fit, if the model were multi-head?

# %%
guess_texts = predict("Texts of 8,192 tokens in 80 GB, multi-head?", None)

# %%
models = {  # layers, query heads, KV heads, head_dim, as published
    "SmolLM2-135M": (30, 9, 3, 64),
    "Llama-3-70B": (80, 64, 8, 128),
    "Falcon-7B": (32, 71, 1, 64),
}
crowded = {}
for name, (num_layers, q_heads, kv_heads, head_dim) in models.items():
    per_head = 2 * num_layers * head_dim * 2  # a key and a value, 2 bytes per number
    kept, full = per_head * kv_heads, per_head * q_heads
    fit, fewer = (int(80e9 / (8192 * each)) for each in (kept, full))
    print(f"{name:<12} {kept:>8,} bytes per token, {fit:>5,} texts in 80 GB;", end="")
    print(f" multi-head {full:>9,}, {fewer:>3} texts")
    crowded[name] = fewer
guess_texts.compare(crowded["Llama-3-70B"])

pool = llm.engine.runner.pool.kv  # chapter 22's store; the third and fourth axes count tokens
stored = pool.numel() // (pool.shape[2] * pool.shape[3])
assert 2 * stored == llm.config.kv_bytes_per_token
print(f"This engine stores {stored:,} numbers per token, {2 * stored:,} bytes at 2 bytes each.")
print(f"It was loaded in float32, so they take {pool.element_size() * stored:,} bytes.")

# %% [markdown]
# ## Your turn
#
# Two exercises: the mask, and attention as a whole, for all tokens and all heads at once. The
# package's versions open below, once yours have passed.

# %%
task(14, "causal_mask")

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
task(14, "attention")

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
    """Return softmax(q k^T / sqrt(head_dim)) v of each query over the keys that it may attend to.

    The queries are the last `tokens` positions of the context. Query head h uses KV head
    h // (q_heads / kv_heads). With a window, a query attends to at most `window` positions,
    including its own.
    """
    raise NotImplementedError  # your turn


# %%
my_attention = check(14, attention=attention)

# %% [markdown]
# One line puts a part into the running engine. As long as yours has not passed, the package's own
# runs, and the line below says so. The sentence passes through in two chunks, of 16 and 2 tokens, and
# attention is called for each of them in each of 30 layers. (The perplexities
# are computed without the engine, in one piece: 30 calls.) The first chunk is a plain triangle,
# which torch has built in, so the package asks only for the second chunk's mask. New tokens are
# computed by another function, which chapter 22 builds.

# %%
with using(14, causal_mask=my_mask):
    print(llm.generate(sentence, greedy).text)
with using(14, attention=my_attention):
    print(llm.generate(sentence, greedy).text)

# %% [markdown]
# ## The package's version
#
# The package has attention twice: `attention_naive`, written out step by step, as a reference for all
# faster versions, and `attention`, which calls torch's fused function (one function that does all
# steps at once). As called here, it does not store the matrix of scores; chapter 32 shows how this is
# possible.

# %%
reveal(14, causal_mask=my_mask, attention=my_attention)

# %%
ours = package.attention(q, k, v)
torch.testing.assert_close(ours, package.attention_naive(q, k, v), atol=1e-5, rtol=1e-5)
torch.testing.assert_close(ours[TOKEN, HEAD], torch.tensor(out), atol=1e-4, rtol=1e-4)
group = q.shape[1] // k.shape[1]
theirs = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(0, 1),
    k.repeat_interleave(group, dim=1).transpose(0, 1),
    v.repeat_interleave(group, dim=1).transpose(0, 1),
    is_causal=True,
)
torch.testing.assert_close(ours, theirs.transpose(0, 1), atol=1e-5, rtol=1e-5)
big = package.attention(100 * q, k, v)
print("The package, plain Python and torch agree.")
print("With scores 100 times as large, all results are finite:", bool(big.isfinite().all()))

# %% [markdown]
# ## The measurement again
#
# The number from the top, now with attention built up step by step: switched off, as matrix products
# without a mask, and with the attention that stands in `my_attention`.

# %%
with using(14, attention=my_attention):
    again = perplexity(log_probabilities(llm, ids))
print(f"no attention:       about {round(without_attention, -3):,.0f}")
print(f"without a mask:     {leaky:.1f} (it reads the answers)")
print(f"causal attention:   {again:.1f}")
assert math.isclose(again, with_attention, rel_tol=1e-3)

# %% [markdown]
# ## Claims
#
# Statements that one often hears or reads about attention, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
after = range(4, len(ids))  # rows of five keys or more
deviation, rest = (
    float(torch.stack([scores[:, :, row, first : row + 1].std(-1) for row in after]).median())
    for first in (0, 1)
)
spread = torch.cat([each.q.flatten() for each in recorded]).std()
story = (
    "The sea was calm that night, and nothing happened until the fog lifted. In the morning the "
    "sailor asked what a lamp is for. The old man had asked himself the same for forty years. He "
    "laughed, filled the lamp with oil, and sent the sailor to fetch bread from the village."
)
shares = {len(ids): [], len(llm.tokenizer.encode(story)): []}
largest = []  # the token that gets most weight
for text in (sentence, story):
    for opening in ("The", "A", "Yes", ","):
        changed = [*llm.tokenizer.encode(opening), *llm.tokenizer.encode(text)[1:]]
        maps = torch.stack([head_scores(each) for each in recorded_heads(llm, changed)])
        mean = maps.softmax(-1)[..., 1:, :].mean((0, 1, 2))
        shares[len(changed)].append(float(mean[0]))
        largest.append(int(mean.argmax()))
found = "; ".join(
    f"{min(each):.0%} to {max(each):.0%} of the weight in a text of {length} tokens"
    for length, each in shares.items()
)
verdicts(
    "14",
    Claim(
        "Divided by the square root of d, the scores of a query have a standard deviation of 1",
        f"{deviation:.1f} in the median of all heads and queries of this sentence, and {rest:.1f} "
        "without the first token",
        within(deviation, 0.8, 1.25),
        f"the rule is derived (in footnote 4) for independent numbers of variance 1; trained "
        f"queries are larger (deviation {spread:.1f}) and fit some keys on purpose",
        source="[Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)",
    ),
    Claim(
        "No token gets more attention weight than the first one, whatever word it is",
        f"with The, A, Yes or a comma there, {found}",
        holds(set(largest) == {0}),
        "softmax must spend all its weight, and heads leave what they do not need on a sink",
        source="[Xiao et al. 2023](https://arxiv.org/abs/2309.17453)",
    ),
)

# %% [markdown]
# ## Summary
#
# - Attention is the only place where tokens exchange information. Switched off, this model is about
#   as bad as blind guessing, in part because it was trained with attention.
# - Each token makes a query, a key and a value: $q = R W_q \hat x$, $k = R W_k \hat x$,
#   $v = W_v \hat x$, with the normalised $\hat x$ and the rotation $R$. The score of two tokens is
#   $q \cdot k / \sqrt d$, softmax turns a row of scores into weights, and the result is the weighted
#   sum of the values.
# - Several heads look back at once. Their results are joined, and $W_o$ mixes them into the residual
#   stream.
# - The causal mask hides later tokens. Without it the model reads the answers.
# - Keys and values of all tokens must be stored, queries need not. Grouped heads shrink this store by
#   the number of query heads per KV head.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A prompt of 100 tokens is computed in two chunks of 50. What is the shape of the mask
# of the second chunk, and how many keys does its first query see?</summary>
# The mask is 50 × 100: 50 queries, and all 100 keys so far. The first query has position 50 (counted
# from 0), so it sees 51 keys, positions 0 to 50.</details>
#
# <details><summary>2. Why can an engine throw a token's query away, but not its key and value?</summary>
# The query is used only to compute the token's own result. Later tokens compare their queries with
# this token's key, and mix in its value.</details>
#
# <details><summary>3. All scores of a row grow by 5. What happens to the weights? And if they are all
# multiplied by 5?</summary>
# Adding 5 changes nothing, because the factor e⁵ cancels in softmax. Multiplying by 5 makes the
# weights sharper: the largest one grows (unless all scores are equal), and small ones shrink. One that
# is close to the largest may grow, too.</details>
#
# <details><summary>4. A guide says that the scores 0.8, 0.9 and 0.3 give the weights 0.35, 0.55 and
# 0.10. By which factor were the scores multiplied before softmax?</summary>
# By none that fits. The ratio of two weights is $e$ to the power of factor times difference of the
# scores. From the first two, the factor is ln(0.55 / 0.35) / 0.1 = 4.5; from the first and the third,
# it is ln(0.35 / 0.10) / 0.5 = 2.5. Softmax of the scores as they are gives 0.37, 0.41 and 0.22.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** and **[SGLang](https://github.com/sgl-project/sglang)**
#   call [FlashAttention](https://arxiv.org/abs/2205.14135) or
#   [FlashInfer](https://github.com/flashinfer-ai/flashinfer). These kernels (functions that run on the
#   GPU) visit the keys in tiles and carry a running maximum and sum, so scores never reach the GPU's
#   main memory. Chapter 32 builds one.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/advanced/gpt-attention.html)** has its own
#   kernels. One of them, XQA, is for new tokens of models with grouped heads.
# - Models change attention, too. DeepSeek's store one short vector per token and layer, and compute
#   from it the keys and values of all heads. One small rotated key, which all heads share, lies beside
#   it ([multi-head latent attention](https://arxiv.org/abs/2405.04434)). In
#   [gpt-oss](https://huggingface.co/openai/gpt-oss-20b), each head has a learned number that joins the
#   sum under softmax but has no value: a sink of its own, so weights need not sum to one.
#
# ## Further reading
#
# - [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al. 2017: section 3.2 is
#   this chapter.
# - [Attention in transformers, step by step](https://www.3blue1brown.com/lessons/attention), 3Blue1Brown:
#   the same in moving pictures.
# - [A Mathematical Framework for Transformer Circuits](https://transformer-circuits.pub/2021/framework/index.html),
#   Elhage et al. 2021: heads as readers and writers of the residual stream.
# - [Mistral 7B](https://arxiv.org/abs/2310.06825), Jiang et al. 2023: a model with a sliding window.
#
# **Next:** [15 · The whole forward pass](15_transformer.ipynb), where everything so far is put
# together.

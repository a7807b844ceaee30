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
# Chapter 12 made numbers of text: a row of token ids. The model looks up a vector of 576 numbers
# for each, and sends the vectors through 30 layers. Between the large matrix products of a layer
# stand three small functions: one keeps sizes in order, one tells tokens where they stand, one
# opens and closes gates. None takes more than five lines. Each can be wrong without any error.
#
# **Afterwards you can** write all three from memory, say what the rotation does to a score, and
# recognise the signs of a checkpoint whose pairs are mixed up.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen import SamplingParams
from minigen.model import layers
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch13_layers import figures as draw_rotation
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import significant
from minigen_course.lab.inspect_model import (
    log_probabilities,
    perplexity,
    recorded_heads,
    recorded_states,
    transformer_of,
    turned_back,
)

llm = load_model(weights="float32", enable_prefix_caching=False)  # nothing is kept from run to run
model = transformer_of(llm)
config = llm.config
print(f"{config.num_layers} layers, {config.hidden} numbers for each token in each layer")
print(f"{config.ffn:,} gates in a layer, {config.vocab_size:,} tokens to choose from")
print(f"heads of {config.head_dim} numbers")

# %% [markdown]
# ## A number that hurts
#
# There are two ways to write the rotation of this chapter, and both are in use. They take the
# same input, return the same shape, and differ only in which numbers they regard as pairs. Here
# the model runs with its own, and then with the other. (`using` puts a function in the place of
# the package's for a while.)

# %%
question = "The capital of France is"
greedy = SamplingParams(temperature=0, max_tokens=12)
print("its own:  ", repr(llm.generate(question, greedy).text))
with using(13, apply_rotary=layers.apply_rotary_interleaved):
    print("the other:", repr(llm.generate(question, greedy).text))

# %% [markdown]
# No error, no warning, and still Paris. Somebody who tests with this question ships it. Now a
# story that no model knows, read twice in a row. The second time every word stands above, and
# the model need only look there. *Perplexity* says among how many equally likely tokens it was
# left to choose: 1 is certainty. The picture shows every right token's probability at the second
# reading.

# %%
story = (
    "Marla Venn keeps seven grey geese behind the old mill at Thornbury. On the second of May she "
    "sold three of them to Otto Quill, a baker from Lower Eastwick, for nineteen copper coins and "
    "a blue lantern.\n"
)
ids = llm.tokenizer.encode(story)


def read_twice(**parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the story's tokens at the first and at the second reading."""
    with using(13, **parts):
        found = log_probabilities(llm, ids + ids)
    return found[: len(ids) - 1], found[len(ids) :]


first, second = read_twice()
first_other, second_other = read_twice(apply_rotary=layers.apply_rotary_interleaved)
for name, *both in (("its own", first, second), ("the other", first_other, second_other)):
    at_first, again = (significant(perplexity(each)) for each in both)
    print(f"{name:<11} {at_first:>4} at first, {again:>4} when read again")
picture(
    draw_rotation.found_likely(
        [llm.tokenizer.decode([token]) for token in ids[1:]],
        {"its own pairs": second.exp(), "the other pairs": second_other.exp()},
    ),
    "The probability of every right token at the second reading, under both pairings.",
)

# %% [markdown]
# One line of code, and the model can no longer find what it has just read. What that line does is
# the middle of this chapter. First, what stands before it.
#
# ## RMSNorm: sizes in order
#
# Each layer *adds* to the hidden states, so they grow. Here is how large they become, from layer
# to layer, in our story.

# %%
states = recorded_states(llm, ids)
picture(
    draw_rotation.sizes(states),
    "The largest number and the median root mean square of the hidden states, layer by layer.",
)

# %% [markdown]
# The next matrix was trained on inputs of one size. So before each product every row is divided
# by its own root mean square. The smallest version below computes in the type in which the
# states happen to be. That is right in float32. GPUs keep states in 16 bits, and there one
# token's numbers are a trap: they fit into float16, their squares do not.


# %%
def rms_norm_naive(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    size = (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return weight * (x / size)


def rms_norm_half(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm_naive(x.half(), weight.half(), eps).float()


x, ones = states[20], torch.ones(states.shape[-1])
for name, rows in {"before": x, "after": rms_norm_naive(x, ones, 1e-5)}.items():
    size = rows.square().mean(-1).sqrt()
    print(f"root mean squares of the rows {name}: {size.min():.1f} to {size.max():,.0f}")

lost = (rms_norm_half(x, ones, 1e-5) == 0).all(-1).nonzero().flatten().tolist()
limit = torch.finfo(torch.float16).max
print(f"largest number {significant(float(x.abs().max()))}; largest float16 {limit:,.0f}")
print("in float16 all zeros:", [llm.tokenizer.decode([ids[row]]) for row in lost])
overflowed, _ = read_twice(rms_norm=rms_norm_half)
blind = perplexity(overflowed)
print(f"perplexity of the first reading {perplexity(first):.0f}, with this norm {mark(blind)}")

# %% [markdown]
# One lost token out of fifty, the first, and the model does little better than to guess blindly
# among its 49,152 tokens: it was the one that many heads rest on (chapter 14 shows them). Hence
# one word in the package's version: `x.float()`.

# %%
show(layers.rms_norm)
weight = model.layers[20].attention_norm
ours = layers.rms_norm(x, weight, 1e-5)
torch.testing.assert_close(ours, rms_norm_naive(x, weight, 1e-5))
torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (576,), weight, 1e-5))
print("package, naive version and torch agree; in float16 the package stays finite:")
print(bool(layers.rms_norm(x.half(), weight.half(), 1e-5).isfinite().all()))

# %% [markdown]
# ## Where does a token stand?
#
# Attention compares a *query* of one token with the *keys* of those before it, and adds up their
# values. A sum does not know an order. Without any rotation, the full stop after both of these
# sentences takes the same from the first layer:

# %%
unrotated = lambda x, cos, sin: x  # noqa: E731
for name, parts in {"without rotation": {"apply_rotary": unrotated}, "with rotation": {}}.items():
    with using(13, **parts):
        dog = recorded_states(llm, llm.tokenizer.encode(" dog bites man."))[1, -1]
        man = recorded_states(llm, llm.tokenizer.encode(" man bites dog."))[1, -1]
    print(f"{name}: the same state after layer 1: {torch.allclose(dog, man, atol=1e-4)}\n")

# %% [markdown]
# ## The idea: turn the pairs
#
# Cut a head's 64 numbers into 32 pairs. Regard each pair as a point in a plane, and turn it by an
# angle that grows with the token's position: the first pair by one radian a position, the later
# ones ever more slowly. In plain Python for one head of one token, and drawn for a query of the
# real model: the mean over our story, of the first head of layer 16. Every point is the same pair
# at another position.

# %%
import math


def rotate_naive(head: list[float], position: int, theta: float) -> list[float]:
    half, turned = len(head) // 2, list(head)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        a, b = head[i], head[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


LAYER, HEAD = 16, 0
group = config.q_heads // config.kv_heads
plain = turned_back(llm, recorded_heads(llm, ids)[LAYER])
query, key = plain.q[1:, HEAD].mean(0), plain.k[1:, HEAD // group].mean(0)
picture(
    draw_rotation.turning(query, model.frequencies, (0, 4, 8, 16)),
    "Four pairs of a query at positions 0 to 32, as points on circles; later pairs turn slower.",
)

# %% [markdown]
# Why turn? Attention looks only at the product of a query and a key. Turn both, and the
# product keeps nothing but the *difference* of the two angles: the distance. The score of this
# query and this key, with the key put in three places far apart:

# %%
picture(
    draw_rotation.by_distance(query, key, model.frequencies),
    "The score of a query and a key against their distance: three curves that lie on one another.",
)
near = draw_rotation.scores(query, key, model.frequencies, range(129), [0] * 129)
far = draw_rotation.scores(query, key, model.frequencies, range(5000, 5129), [5000] * 129)
allowed = 0.02  # of scores that differ by 20
torch.testing.assert_close(near, far, atol=allowed, rtol=0)
print("the best distance for this head:", int(near.argmax()))

# %% [markdown]
# The curve is highest at distance 1. This head has learned to look at the token before, and it
# says so by nothing but the angles between its pairs.
#
# ## Drag it
#
# Left, one pair before it is turned (pale) and after. Right, the score of all pairs. Move both
# positions by the same amount: left all turns, right nothing changes.


# %%
def two_tokens(query_at, key_at, pair):
    return draw_rotation.two_tokens(
        query, key, model.frequencies, query_at=query_at, key_at=key_at, pair=pair
    )


explore(
    two_tokens,
    "A pair of a query and a key, turned by their positions, and the score at their distance.",
    query_at=(0, 256, 1, 6),
    key_at=(0, 256, 1, 5),
    pair=(0, 31, 1, 3),
)

# %% [markdown]
# ## The package's version
#
# A pair of numbers that turns is a complex number that is multiplied by another of length 1. That
# gives a second form in three lines. The package writes it with real numbers, for all tokens and
# heads at once.


# %%
def rotate_complex(x, positions, frequencies):
    angles = (positions[:, None] * frequencies)[:, None]
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


show(layers.apply_rotary, layers.apply_rotary_interleaved)
positions = torch.arange(len(ids))
cos, sin = layers.rotary_tables(model.frequencies, positions)
theta = config.rope_theta
by_hand = torch.tensor(
    [[rotate_naive(head, at, theta) for head in token] for at, token in enumerate(plain.q.tolist())]
)
ours = layers.apply_rotary(plain.q, cos, sin)
torch.testing.assert_close(ours, by_hand, atol=1e-3, rtol=1e-4)
torch.testing.assert_close(ours, rotate_complex(plain.q, positions, model.frequencies))
print("package, plain Python and complex numbers agree")

# %% [markdown]
# **The two pairings.** `apply_rotary` pairs number i with i + 32: so are the checkpoints on
# Hugging Face. `apply_rotary_interleaved` pairs neighbours, 2i and 2i + 1: so were the paper and
# Meta's own Llama files, and so are llama.cpp's GGUFs of the Llama family. Neither is better: the
# rows of the trained matrices stand in the order that the pairing expects. Convert the rows with
# the pairs, and the second reading is as good as before; convert one of both, and you have the
# number at the top. minigen puts a GGUF's rows in order when it loads them (chapter 11).

# %%
evens_first = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
back = evens_first.argsort()


def interleaved_with_its_order(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    return layers.apply_rotary_interleaved(x[..., back], cos, sin)[..., evens_first]


_, second_again = read_twice(apply_rotary=interleaved_with_its_order)
torch.testing.assert_close(second_again, second, atol=1e-3, rtol=1e-3)
print(f"perplexity when read again: {perplexity(second_again):.1f}")
print(f"what the right order is worth: {perplexity(second_other) / perplexity(second_again):.0f}x")

# %% [markdown]
# ## How far does it reach?
#
# Any position has its angle, so rotation seems to know no limit. The model was trained up to 8,192
# positions. A cheap test beyond that: the story twice again, with a gap in the *positions* between
# the two readings. The slow pairs then turn to angles that were never seen in training. As a
# cure, a larger base `theta` makes all pairs turn more slowly, so that the gap fits into known
# angles.

# %%
gaps = [1000, 4000, 8000, 16000, 32000]
bases = {"as trained": 1, "theta for 4x": 4, "theta for 16x": 16}
curves = {name: [] for name in bases}
for name, times in bases.items():
    frequencies = layers.rotary_frequencies(64, theta * times ** (64 / 62))
    for gap in gaps:
        apart = torch.cat([positions, positions + len(ids) + gap])
        found = log_probabilities(llm, ids + ids, apart, frequencies)
        curves[name].append(perplexity(found[len(ids) :]))
picture(
    draw_rotation.reach(gaps, curves, config.max_positions, perplexity(first)),
    "Perplexity of the second reading against the gap, for three bases of the rotation.",
)
print(f"trained up to {config.max_positions:,} positions")
for name, row in curves.items():
    pairs = zip(gaps, row, strict=True)
    print(f"{name:<14}", "  ".join(f"{gap:,}: {significant(each, 2)}" for gap, each in pairs))

# %% [markdown]
# Other ways to tell a position, for comparison:
#
# | | where | what the score learns | beyond the trained length |
# |---|---|---|---|
# | sinusoidal (Vaswani et al. 2017) | added to the embedding | place, mixed with meaning | poor |
# | ALiBi (Press et al. 2022) | a slope on each head's scores | near counts more | good |
# | rotary (Su et al. 2021) | turns Q and K in every layer | distance, at 32 speeds | see above |
#
# ## SwiGLU: gates
#
# The second half of each layer computes 1,536 numbers `up`, and 1,536 `gate`s which say how much
# of each passes. SiLU makes the gate: z times its own sigmoid. Left the curve, right where the
# gates of layer 16 stand in our story; below, the package's one line.


# %%
def swiglu_naive(gate: float, up: float) -> float:
    return gate / (1 + math.exp(-gate)) * up


layer = model.layers[LAYER]
hidden = layer.gate_up(layers.rms_norm(states[LAYER], layer.ffn_norm, model.norm_eps))
gate, up = hidden.split(layer.gate_up.parts, dim=-1)
picture(
    draw_rotation.gates(gate),
    "SiLU beside ReLU, and a histogram of one layer's gates.",
)
show(layers.swiglu)
by_hand = [swiglu_naive(*pair) for pair in zip(gate[7].tolist(), up[7].tolist(), strict=True)]
torch.testing.assert_close(layers.swiglu(gate, up)[7], torch.tensor(by_hand))
print("package and plain Python agree")

# %% [markdown]
# ## The measurement again
#
# What the package's form of the rotation buys over the one in plain Python, for the queries of
# one layer, and what a share of the whole forward pass is left of it:

# %%
import time


def seconds(work, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


slow = seconds(lambda: [rotate_naive(h, 9, theta) for t in plain.q.tolist() for h in t], 1)
fast = seconds(lambda: layers.apply_rotary(plain.q, cos, sin), 50)
whole = seconds(lambda: log_probabilities(llm, ids), 2)
measured("the same rotation, times faster", slow / fast)
measured("share of the forward pass in rotations", 100 * 2 * 30 * fast / whole, "%")

# %% [markdown]
# ## Your turn
#
# Write `apply_rotary` with the first pairing: number i of a head turns with i + head_dim/2. Mind
# that the result has the type of `x`, and that it is computed in float32. Two more exercises,
# `rms_norm` and `swiglu`, wait in the workspace that `minigen workspace` makes.

# %%
# exercise: minigen.model.layers.apply_rotary
from jaxtyping import Float
from torch import Tensor


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim/2) by its angle: the pairing of Hugging Face models."""
    raise NotImplementedError  # your turn


# %%
mine = check(13, apply_rotary=apply_rotary)

# %% [markdown]
# One line puts yours into the running engine. (Until it passes, `mine` is the package's own.)

# %%
with using(13, apply_rotary=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM**, **SGLang** and **TensorRT-LLM** fuse: the residual's addition and the norm that
#   follows are one kernel, so are SiLU and the product, so that the states are read from memory
#   once. Q and K are turned in place. Chapter 31 writes such kernels.
# - vLLM and SGLang keep tables of cosines and sines for every position, made once; minigen computes
#   those of a step's positions.
# - **llama.cpp** (and **Ollama** above it) knows both pairings, and chooses by the architecture
#   that the file names.
# - Longer contexts: linear scaling (positions divided), NTK (a larger base, as above), YaRN and
#   Llama 3's rule (slow pairs are slowed, quick ones left alone). `rope_scaling` in a
#   checkpoint's config says which; minigen honours linear and Llama 3's, and refuses the others.

# %%
embedded = model.embed(torch.tensor([ids[5]] * 2))  # one token at any two positions
lengths = (ours.norm(dim=-1) / plain.q.norm(dim=-1) - 1).abs().max()
best = curves["theta for 16x"][-1]
verdicts(
    "13",
    Claim(
        "RoPE is a vector that is added to the embedding",
        f"embeddings are equal at all positions: {bool(torch.equal(*embedded))}; queries keep "
        f"their length to {'0.01 %' if lengths < 1e-4 else 'more than 0.01 %'}",
        "did not hold",
        "nothing is added: pairs of Q and K are turned, in every layer; V is left alone",
    ),
    Claim(
        "With RoPE only the distance of two tokens matters",
        f"scores 5,000 positions further on differ by less than {allowed}",
        "held within bounds",
        "in exact arithmetic; a float32 angle is less precise at a far position",
    ),
    Claim(
        "RoPE generalises beyond the training length",
        f"perplexity of a text read again: {curves['as trained'][1]:.1f} after 4,000 positions, "
        f"about {round(curves['as trained'][-1], -2):,.0f} after 32,000",
        "did not hold",
        f"slow pairs reach angles that training never showed; with a larger base it is {best:.1f}",
    ),
    Claim(
        "Which numbers are paired is a matter of taste",
        f"{perplexity(second_again):.1f} with the rows in the same order, "
        f"{perplexity(second_other):.0f} without",
        "held within bounds",
        "the order of the weights' rows must follow it; no shape tells, so nothing complains",
    ),
)

# %% [markdown]
# **Next:** [14 · Attention](14_attention.ipynb), where the turned queries and keys meet.

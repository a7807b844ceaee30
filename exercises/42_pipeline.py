# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 42
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/42_pipeline.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/42_pipeline.ipynb)
#
# The chapter: [Stages, rings and replicas: which cut when](../notebooks/42_pipeline.ipynb). Its exercises take about 120 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `bubble` | warm-up | 5 | 10 min |
# | `deal_layers` | core | 10 | 20 min |
# | `micro_batches` | core | 10 | 15 min |
# | `zig_zag` | warm-up | 5 | 10 min |
# | `merge_parts` | core | 10 | 15 min |
# | `choose_cut` | stretch | 15 | 30 min |
# | bug hunt: `reused_buffer` | core | 10 | 20 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using

# %% [markdown]
# ## bubble
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Measure a bubble. `spans` says when the stages of a pipeline compute: (stage, start, end), in seconds. The spans of one stage do not overlap, and all of them come in any order. Return the fraction of the stages' time in which they are idle, from 0 to 1. The time counts from the first start to the last end of all spans, and it counts once for each of the `num_stages` stages, also for a stage that never computes. Without spans, return 0.

# %%
# exercise: minigen_course.ch42_pipeline.reference.bubble
from collections.abc import Sequence


def bubble(spans: Sequence[tuple[int, float, float]], num_stages: int) -> float:
    """Return the fraction of the stages' time in which they are idle, from 0 to 1.

    A span (stage, start, end) says when a stage computes, in seconds; spans of one stage do not
    overlap, and come in any order. The time counts from the first start to the last end of all
    spans, for each of the stages, also for one without a span. Without spans the fraction is 0.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, bubble=bubble)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch42_pipeline.lesson import decode_tokens, least_bubble, pass_once

for batches in (1, 4, 16):
    spans = pass_once([0.010] * 4, batches).computing()
    print(f"{batches:>2} micro-batches, 4 stages: idle {mine(spans, 4):.1%}, ", end="")
    print(f"by the formula {least_bubble(4, batches):.1%}")

# %% [markdown]
# **Harder.** Say where the idle time lies: before a stage's first span, after its last one, or between two. Which of the three can more micro-batches remove, and which can only other stages remove?

# %% [markdown]
# ## deal_layers
#
# *Core, 10 points, about 20 minutes.*
#
# Deal layers out to stages. `work[i]` is the time of layer i. Return one range of layers for each of the `num_stages` stages: the ranges follow one another, cover all layers, and none is empty. The slowest stage sets the pace of a pipeline, so make its work as small as possible. If several ways are equally good, each is right. Raise ValueError if there are more stages than layers.

# %%
# exercise: minigen_course.ch42_pipeline.reference.deal_layers
from collections.abc import Sequence


def deal_layers(work: Sequence[float], num_stages: int) -> list[range]:
    """Return the layers of each stage, as ranges that follow one another.

    `work[i]` is the time of layer i, above 0. Each stage has at least one layer, and the stage with
    the most work has as little as possible. Raises `ValueError` if there are more stages than
    layers.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, deal_layers=deal_layers)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch42_pipeline.lesson import layer_work
from minigen_course.lab.cost_model import SHAPES

for name in ("SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"):
    work = layer_work(SHAPES[name])
    stages = mine(work, 4)
    shown = ", ".join(f"{sum(work[each] for each in stage):.1f}" for stage in stages)
    print(f"{name}: {[len(each) for each in stages]} with the work {shown}")

# %% [markdown]
# **Harder.** A stage must also hold its layers and their share of the KV cache. Take a list of bytes and a limit per stage as well, and leave out stages that do not fit. When does the best way need more stages than the number that memory alone would need?

# %% [markdown]
# ## micro_batches
#
# *Core, 10 points, about 15 minutes.*
#
# Cut a step into micro-batches. `num_tokens[i]` says how many tokens sequence i computes in the step: one if it decodes, many if it is a chunk of a prompt. A sequence is not divided. Give the sequences away from the longest to the shortest (of equal ones, the lower number first), each to the micro-batch that has the fewest tokens so far (of equal ones, the first). Return the numbers of each micro-batch's sequences, in ascending order, and leave micro-batches without a sequence out.

# %%
# exercise: minigen_course.ch42_pipeline.reference.micro_batches
from collections.abc import Sequence


def micro_batches(num_tokens: Sequence[int], num_batches: int) -> list[list[int]]:
    """Return which sequences each micro-batch of a step has, as sorted lists of their numbers.

    `num_tokens[i]` is how many tokens sequence i computes in the step; a sequence is not divided.
    The longest sequence goes first (of equal ones, the one with the lower number), and each goes to
    the micro-batch that has the fewest tokens so far (of equal ones, the first). Micro-batches
    without a sequence are left out.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, micro_batches=micro_batches)

# %% [markdown]
# Try it:

# %%
step = [1] * 12 + [40, 25]
for count in (1, 2, 4):
    batches = mine(step, count)
    print(count, [sum(step[each] for each in batch) for batch in batches], batches)


# %% [markdown]
# **Harder.** The rule is Graham's: the fullest micro-batch has at most 4/3 of the tokens that it would have in the best division. Find a step for which the rule is not the best. And what would change if a chunk of a prompt could be divided?

# %% [markdown]
# ## zig_zag
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Share a prompt among the ranks of a ring so that each has the same work. Cut the `num_tokens` positions into 2 n consecutive chunks for n ranks. Rank i gets chunk i and chunk 2 n - 1 - i. If the tokens do not divide, the first chunks have one token more than the others. Return the positions of `rank`, in ascending order; a rank may get none.

# %%
# exercise: minigen_course.ch42_pipeline.reference.zig_zag
def zig_zag(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of a prompt that a rank gets, in ascending order.

    The prompt is cut into 2 n chunks for n ranks, and rank i gets chunk i and chunk 2 n - 1 - i. If
    the tokens do not divide, the first chunks have one token more than the others.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, zig_zag=zig_zag)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch42_pipeline.lesson import num_pairs, plain_part

for name, part in (("plain", plain_part), ("zig-zag", mine)):
    pairs = [num_pairs(part(4096, rank, 4), range(4096)) for rank in range(4)]
    print(f"{name:<8} pairs of query and key by rank: {pairs}")

# %% [markdown]
# **Harder.** Striped attention gives rank r the positions r, r + n, r + 2 n and so on. Compare its pairs by turn and rank with those of zig-zag (`ring_pairs`). Then look at one block: which of its pairs are masked? A kernel works on square tiles of queries and keys, and skips a tile only if all of it is masked. In which turns does each of the two ways have tiles that are half masked?

# %% [markdown]
# ## merge_parts
#
# *Core, 10 points, about 15 minutes.*
#
# Merge two partial attentions. The keys of some tokens lie in two sets. For each set there is an output (the mean of the set's values, weighted by softmax over the set alone) and its `lse`: the log of the sum of exp(score) over the set's keys. Return the output and the `lse` over both sets, as if all keys had been in one. Scores may be large, so exp(lse) alone may overflow. A token that sees no key of a set has an `lse` of -inf there, and any finite output, which must not count. If it sees no key of either, return 0 and -inf. The four given tensors must not change.

# %%
# exercise: minigen_course.ch42_pipeline.reference.merge_parts
import torch
from jaxtyping import Float
from torch import Tensor


def merge_parts(
    out: Float[Tensor, "tokens heads head_dim"],
    lse: Float[Tensor, "tokens heads"],
    other_out: Float[Tensor, "tokens heads head_dim"],
    other_lse: Float[Tensor, "tokens heads"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Return the attention over two sets of keys, from the attention over each of them.

    `out` is the weighted mean of a set's values, and `lse` the log of the sum of exp(score) over
    its keys. A token that sees no key of a set has an `lse` of -inf there, and any finite `out`. If
    it sees no key of either, its result is 0 with an `lse` of -inf.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, merge_parts=merge_parts)

# %% [markdown]
# Try it:

# %%
import torch

from minigen_course.ch42_pipeline.lesson import attend_part, ring_attention
from minigen_course.ch42_pipeline.reference import zig_zag

q, k, v = (torch.randn(24, 2, 8) for _ in range(3))
ranks = [zig_zag(24, rank, 4) for rank in range(4)]
off = (ring_attention(q, k, v, ranks, mine) - attend_part(q, k, v, range(24), range(24))[0]).abs()
print(f"a ring of 4 ranks, 24 tokens: off by at most {off.max():.1e}")

# %% [markdown]
# **Harder.** Merge n parts at once, as a rank does that has received the partial results of all ranks for a decode step: one maximum over all `lse`, then one sum. Is the result the same to the last bit as with n - 1 merges of two? Which order of merging would make it the same on every rank?

# %% [markdown]
# ## choose_cut
#
# *Stretch, 15 points, about 30 minutes.*
#
# Choose the cut of a decode step. t ranks share each matrix, p stages share the layers, and d replicas share the sequences, with t · p · d = `num_devices`. Allowed is a cut if t divides `kv_heads` and is a key of `all_reduce`, p is at most `layers`, and d is at most `num_sequences`. A replica has b sequences, `num_sequences / d` rounded up, and each of its devices must hold (`weight_bytes` + b · `cache_bytes`) / (t · p) bytes. It runs them as m = min(p, b) micro-batches. A stage takes for one of these
#
# (`weight_bytes` + b / m · `cache_bytes`) / (t · p · `bandwidth`) + 2 · `layers` / p · `all_reduce[t]`
#
# seconds, and the step takes p times that, and p times `transfer` more if p is above 1. Return (t, p, d) of the fastest step; of equally fast ones, the one with the smaller t, then the smaller p. Return None if no cut fits.

# %%
# exercise: minigen_course.ch42_pipeline.reference.choose_cut
from minigen_course.ch42_pipeline.reference import Devices, Model


def choose_cut(model: Model, devices: Devices, num_sequences: int) -> tuple[int, int, int] | None:
    """Return the fastest cut of a decode step: ranks of a tensor split, stages, and replicas.

    t ranks, p stages and d replicas use all devices: t p d = `num_devices`. t divides the KV heads
    and is in `all_reduce`; p is at most the number of layers; d is at most the number of sequences.
    A replica has b sequences, d-th of all, rounded up, and must hold (weights + b caches) / (t p)
    on each device. It runs them as m micro-batches, the smaller of p and b, so a stage takes

        (weights + b / m caches) / (t p bandwidth) + 2 layers / p all_reduce[t]

    for one of them, and a step takes p times that, and p transfers if p is more than 1. Of equally
    fast cuts, the one with the smaller t, then the smaller p. None if no cut fits into the memory.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(42, choose_cut=choose_cut)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch42_pipeline.reference import Devices, Model

big = Model(layers=80, kv_heads=8, weight_bytes=141e9, cache_bytes=1.3e9)  # 4,096 tokens each
sums = {"NVLink": 10e-6, "Ethernet": 300e-6}
for name, latency in sums.items():
    devices = Devices(8, 72e9, 3350e9, {1: 0.0} | {t: latency for t in (2, 4, 8)}, 40e-6)
    for count in (1, 8, 64):
        print(f"{name:<9}{count:>3} sequences: t, p, d = {mine(big, devices, count)}")

# %% [markdown]
# **Harder.** Two goals pull in different directions: the time of a step, and the tokens per second of all devices. Return all cuts of which no other one is better in both (the Pareto front), with a number of sequences that is the largest that fits for each cut.

# %% [markdown]
# ## A bug hunt: reused_buffer
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *Inside of one machine everything is right. Between two machines, under load, some answers continue the text of another request, and the more micro-batches there are, the more. With one micro-batch per step it never happens, and with a pause after each send it does not either.* TensorRT-LLM had this mistake in its pipeline's send (pull request 10488), and Megatron-LM freed the memory of a result while it was still being sent (pull request 4047, found in a run of Llama 3.1 405B on 16 stages).
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch42_pipeline.hunt
from collections.abc import Callable

import numpy as np

from minigen_course.ch42_pipeline.hunt import Array, Layers, RunStage, Send


def run_stage(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    """Run a stage of a pipeline over `num_batches` micro-batches, and send each result on.

    `receive()` returns the next micro-batch, `size` numbers, and `layers(x, out)` writes the
    stage's result for x into out. `send(out)` begins to send and returns at once; out is read at
    any time until the function that it returns, `wait()`, has returned. While a result is sent,
    the stage computes the next micro-batch. All results have arrived when the stage returns.
    """
    out = np.zeros(size)
    waits = []
    for _ in range(num_batches):
        layers(receive(), out)
        waits.append(send(out))
    for wait in waits:
        wait()


def test_run_stage(run_stage: RunStage) -> None:
    """Assert what every right `run_stage` does, and the one above does not.

    `LateLink()` of minigen_course.ch42_pipeline.lesson is a link whose `send` reads late;
    `link.results` is what has arrived, and `link.num_open` how many results are on their way.
    """
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(42, test=test_run_stage, mended=run_stage)

# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,nbgrader,editable,deletable,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
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
# # 41 · One model on several devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/41_tensor_parallel.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/41_tensor_parallel.ipynb)
#
# So far one memory held the model, and one processor read it. When a model does not fit, or is read
# too slowly, it is cut, and several devices share the work. The process that
# runs on one of these devices is called a [**rank**](../docs/glossary.md#rank); ranks are numbered
# from 0. This chapter cuts a model by hand, runs it as three processes of this machine, counts every
# message between them, and asks what messages cost.
#
# **Afterwards you can** split a layer over ranks, say where they must talk and where not, write the
# message that adds up numbers over all ranks, predict what several devices gain from what connects
# them, name the five ways to cut a model and say when each pays, and find out why ranks fall out of
# step.
#
# **You need** chapter 15 (the forward pass), chapter 17 (a decode step reads all weights), and
# chapter 24 (the scheduler). The section on GPUs also needs chapters 31 and 33. **Time:** about 95
# minutes to read and try, about 125 for the [exercises](../exercises/41_tensor_parallel.ipynb).
#
# **Where we are:** chapters 21 to 25 built an engine for many requests, chapters 31 to 34 gave it
# fast kernels. All of that ran on one device. Here the model leaves it.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill, decode | latency of messages | L3 engine | `--tensor-parallel-size` | messages per step |
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
from collections import Counter

import torch

from minigen import SamplingParams, hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
    hunt,
    load_model,
    mark,
    measured,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch41_tensor_parallel.figures import (
    allowed,
    message_times,
    messages_in_time,
    messages_of_steps,
    rank_batches,
    speed_ups,
    who_holds_what,
)
from minigen_course.ch41_tensor_parallel.lesson import (
    LINKS,
    continue_split,
    fit_link,
    message_size,
    on_ranks,
    serve_on_ranks,
    split_step_seconds,
)
from minigen_course.ch41_tensor_parallel.message_timing import time_all_reduces
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.parallel_ways import (
    pipeline_chart,
    ring_turns,
    step_parts,
    topology,
    two_splits,
    ways_to_cut,
)
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import (
    MACHINES,
    MODELS,
    SHAPES,
    ModelShape,
    config_of,
    decode_step,
    prefill_step,
)
from minigen_course.lab.inspect_model import read_along
from minigen_course.lab.texts import ALICE

torch.manual_seed(41)
prompt, params = "The old lighthouse", SamplingParams(temperature=0, max_tokens=10)
chapter_map("several devices", "collectives", "weights")

# %% [markdown]
# ## A number that hurts
#
# One token of the model in float32 on this machine, and what the same machine would need for one
# token of a model with 70 billion weights.
#
# Predict: how long, if its weights are read at the rate of this float32 step? (Chapter 34 measured
# this step: its tokens per second, times 0.54 GB, are the rate.) Replace `None`. And would it fit?
# (Numbers in ⟨ ⟩ are measured on this machine, so yours will differ.)

# %%
guess_70b = predict("Seconds per token of a 70B model in bfloat16 here?", None, within=3)

# %%
whole = load_model(weights="float32")
ids = whole.tokenizer.encode(ALICE)[:12]
alone_seconds = read_along(whole, ids).step_seconds
shape = ModelShape.of(whole.config)
rate = 4 * shape.multiplied / alone_seconds  # bytes of weights that were read in a second

big, h100 = SHAPES["Llama-3-70B"], MACHINES["H100 SXM"]
measured("a step of one token", 1e3 * alone_seconds, "ms")
measured("so weights are read at", rate / 1e9, "GB/s")
guess_70b.compare(2 * big.multiplied / rate, "s, if the memory were enough", measured=True)
print(f"on an H100: {2e3 * big.multiplied / h100.bandwidth:.0f} ms, if the model's", end=" ")
print(f"{2 * big.parameters / 1e9:.0f} GB fitted into its {h100.memory / 1e9:.0f} GB")

# %% [markdown]
# (`multiplied` counts the weights of a step's matrix products: all but the norms, which are
# small, and the table of an untied embedding, of which it reads one row per token. SmolLM2's
# table is also its output head, so it counts.)
#
# Two devices hold twice as much. Whether they are also faster depends on the cut. Cut between layers,
# each device waits for the one before: more memory, but a token takes as long as ever. That is
# **pipeline parallelism**. Cut every layer *through*, and all devices read at the same time. That is
# [**tensor parallelism**](../docs/glossary.md#tensor-parallelism), the main subject of this chapter.
# Pipelines and three more cuts come near its end.
#
# ## The smallest version that works
#
# A linear layer multiplies by a matrix. Many papers write $y = xW$, with $W$ of shape [inputs,
# outputs]. Most checkpoints store the transposed matrix, [outputs, inputs], so code writes
# `y = x @ weight.T`. A column of $W$ is a stored row. There are two ways to cut $W$ for two ranks.
#
# **By hand.** Take two inputs and two outputs:
#
# $$x = \begin{pmatrix}1 & 2\end{pmatrix}, \quad W = \begin{pmatrix}3 & 4\\5 & 6\end{pmatrix}, \quad
# xW = \begin{pmatrix}1\cdot3 + 2\cdot5 & 1\cdot4 + 2\cdot6\end{pmatrix} =
# \begin{pmatrix}13 & 16\end{pmatrix}$$
#
# - Give rank 0 the left column of $W$, and rank 1 the right one. Rank 0 computes
#   $1\cdot3 + 2\cdot5 = 13$, rank 1 computes $1\cdot4 + 2\cdot6 = 16$. Each rank needs all of $x$,
#   and knows one output completely.
# - Give rank 0 the upper row, and rank 1 the lower one. Rank 0 needs only the first input, and
#   computes $1\cdot(3 \; 4) = (3 \; 4)$. Rank 1 needs only the second input, and computes
#   $2\cdot(5 \; 6) = (10 \; 12)$. Neither knows an output. The sum of both is $(13 \; 16)$.
#
# Predict, for 8 inputs and 6 outputs: if rank 0 has half of the columns of $W$ (the upper half of the
# stored rows), how many of the 6 outputs does it know? And if it has half of the rows?

# %%
guess_columns = predict("Half of the columns of W: how many of 6 outputs are known?", None)
guess_rows = predict("Half of the rows of W: how many of 6 outputs are known?", None)

# %%
x, weight = torch.randn(3, 8), torch.randn(6, 8)  # stored as [outputs, inputs]
y = x @ weight.T

some_outputs = [x @ stored.T for stored in weight.chunk(2, dim=0)]  # columns of W
assert torch.allclose(torch.cat(some_outputs, dim=-1), y, atol=1e-5)
print("column split: each rank has", list(some_outputs[0].shape), "of", list(y.shape), end=" ")
print("and side by side they are y")

inputs = x.chunk(2, dim=1)
partial_sums = [a @ b.T for a, b in zip(inputs, weight.chunk(2, dim=1), strict=True)]
assert torch.allclose(sum(partial_sums), y, atol=1e-5)
print("row split: each rank has", list(partial_sums[0].shape), "of", list(y.shape), end=" ")
print("and added up they are y")
guess_columns.compare(some_outputs[0].shape[1])
known = [torch.allclose(part, y, atol=0.1) for part in partial_sums]
guess_rows.compare(6 * sum(known))
picture(
    two_splits(),
    "The two cuts of y = x W, with shapes. Blue cells are on rank 0, orange ones on rank 1, grey "
    "ones on both. A column split ends with outputs, a row split with partial sums.",
    number="41.1",
)

# %% [markdown]
# In the upper half of the picture, each rank reads all of $x$ (grey), and its own three columns of
# $W$ give three columns of $y$. In the lower half, each rank reads four columns of $x$ and four rows
# of $W$, and gets a full-sized result that is only a part of the sum. In general, for $n$ ranks:
#
# $$\text{column split:}\quad W = \begin{pmatrix}W_0 & \cdots & W_{n-1}\end{pmatrix}, \qquad
# xW = \begin{pmatrix}xW_0 & \cdots & xW_{n-1}\end{pmatrix}$$
#
# $$\text{row split:}\quad W = \begin{pmatrix}W_0\\ \vdots\\ W_{n-1}\end{pmatrix}, \quad
# x = \begin{pmatrix}x_0 & \cdots & x_{n-1}\end{pmatrix}, \qquad
# xW = \sum_{r=0}^{n-1} x_r W_r$$
#
# | symbol | meaning | shape | in the code |
# |---|---|---|---|
# | $n$, $r$ | number of ranks, one rank | | `num_ranks`, `rank` |
# | $x$ | a row of numbers for each token | [tokens, inputs] | `x` |
# | $W$ | the matrix; stored transposed | [inputs, outputs] | `weight.T` |
# | $W_r$, column split | the columns of rank $r$ | [inputs, outputs / $n$] | `weight.chunk(n, dim=0)[r].T` |
# | $x_r$ | the inputs of rank $r$ | [tokens, inputs / $n$] | `x.chunk(n, dim=1)[r]` |
# | $W_r$, row split | the rows of rank $r$ | [inputs / $n$, outputs] | `weight.chunk(n, dim=1)[r].T` |
#
# [Megatron-LM](https://arxiv.org/abs/1909.08053), where this plan comes from, writes $A$ for a matrix
# that is cut by columns and $B$ for one that is cut by rows. The two fit together:
#
# - A column split needs all of $x$, and gives each rank some outputs. No message.
# - A row split needs some inputs, just those that a column split gave. It ends in numbers that must
#   be added up over all ranks, for every rank: an [**all-reduce**](../docs/glossary.md#all-reduce).
#
# So a feed-forward layer is cut like this: `gate` and `up` by columns,
# [SwiGLU](../docs/glossary.md#swiglu) on what the rank has, `down` by rows, then one all-reduce:
#
# $$\mathrm{FFN}(x) = \sum_{r=0}^{n-1} \big(\mathrm{SiLU}(x\,G_r) \odot (x\,U_r)\big)\,D_r$$
#
# $G_r$ and $U_r$ are the rank's columns of `gate` and `up`, $D_r$ its rows of `down`, and $\odot$
# multiplies number by number. Below, ranks are threads, and `comm` is how they talk.

# %%
from minigen.model.layers import swiglu
from minigen.parallel.comm import run_ranks

gate, up, down = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
right = swiglu(x @ gate.T, x @ up.T) @ down.T


def feed_forward(comm):
    """What one rank does, which has some of the units."""
    own_gate, own_up = (each.chunk(comm.num_ranks)[comm.rank] for each in (gate, up))
    own_down = down.chunk(comm.num_ranks, dim=1)[comm.rank]
    hidden = swiglu(x @ own_gate.T, x @ own_up.T)
    return comm.all_reduce(hidden @ own_down.T)


for num_ranks in (2, 4):
    for found in run_ranks(num_ranks, feed_forward):
        assert torch.allclose(found, right, atol=1e-5)
print("2 ranks and 4 ranks: every one ends with the whole layer's output, after one message")

# %% [markdown]
# ## Why it may go wrong
#
# The order is not free. Cut `gate` by *rows* instead: each rank then has a part of every sum. Take one
# number whose two parts are 1 and -1. Their sum is 0, and SiLU(0) = 0. But SiLU(1) + SiLU(-1) =
# 0.73 - 0.27 = 0.46.
#
# Predict: may each rank apply SiLU to its part, and the sum come later? Write "yes" or "no".

# %%
guess_silu = predict("SiLU first, the sum later?", None)

# %%
from torch.nn import functional

one, minus_one = functional.silu(torch.tensor([1.0, -1.0])).tolist()
print(f"by hand: {one:.2f} + {minus_one:.2f} = {one + minus_one:.2f}, and it should be 0")
parts = [a @ b.T for a, b in zip(inputs, gate.chunk(2, dim=1), strict=True)]
curve_of_sum = functional.silu(sum(parts))
sum_of_curves = sum(functional.silu(part) for part in parts)
print(f"a whole layer: off by up to {(curve_of_sum - sum_of_curves).abs().max():.2f}")
guess_silu.compare("yes" if torch.allclose(curve_of_sum, sum_of_curves, atol=1e-3) else "no")

# %% [markdown]
# The curve of a sum is not the sum of curves. Between a row split and its all-reduce there may be
# nothing but what is linear: no SiLU, no norm, and no residual, which every rank would add.
#
# Attention needs no new idea. A head is some outputs of Q, K and V. It computes its scores and its
# mixture without any other head, and `out` takes heads as inputs. So Q, K and V are cut by columns,
# in whole heads, and `out` by rows. The [KV cache](../docs/glossary.md#kv-cache) is cut with them: a
# rank keeps the keys and values of its own heads. The embedding and the output head are cut by the
# vocabulary.
#
# ## The package's plan
#
# The plan is a table, applied from outside: the model's own code, of chapter 15, is not touched. A
# rank builds a smaller model of its share, and wraps what needs a message.
#
# Predict: how many ranks, at most 9, can share this chapter's model? It has 9 query heads, 3 KV heads
# and 1,536 units (the numbers between `up` and `down`) in the feed-forward layer.

# %%
from minigen.parallel.sharding import (
    PLAN,
    Split,
    SummedLinear,
    check_ranks,
    module_of,
    obstacle,
    share_bytes,
    span,
)

for module, (cut, axis) in PLAN.items():
    print(f"{module:>18}  {cut.value:<6}  by {axis}")
assert PLAN[module_of("model.layers.7.mlp.down_proj.weight")] == (Split.ROW, "ffn")
show(SummedLinear)
guess_ranks = predict("How many ranks at most?", None)

# %% [markdown]
# ## Who holds what
#
# Choose a model and a number of ranks. (If the model cannot be cut so, a sentence says why, and the
# picture stays.) A column of the picture is a rank, and time runs downwards. Blue is cut by
# columns, pale blue by rows. (The embedding is an exception: its stored rows are divided among the
# ranks as in a column split, but they are its inputs, the tokens. So its results must be summed, as
# after a row split.) The shape at the left is that of one rank's share as stored, [outputs, inputs]
# (of the embedding: [tokens, numbers]). An orange bar is a message that all ranks wait for, with
# the shape of what each rank sends; "tokens" is the number of tokens in the step, "rows" the number
# of those whose logits are needed. (An all-gather puts the pieces of all ranks side by side.)


# %%
def cut_model(model, ranks):
    config = config_of(model)
    check_ranks(config, {}, "float32", ranks)
    return who_holds_what(config, ranks)


explore(
    cut_model,
    "Which heads, units and tokens each rank has, with the stored shapes, and the messages that "
    "all ranks wait for. SmolLM2-135M on 3 ranks.",
    "41.2",
    model=list(MODELS),
    ranks=[3, 2, 4, 8],
)

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
config, of_file = checkpoint.config, checkpoint.num_bytes
possible = [each for each in range(1, 10) if obstacle(config, {}, "float32", each) is None]
print(f"{config.q_heads} query heads, {config.kv_heads} KV heads, {config.ffn:,} units:", end=" ")
print(f"{' or '.join(map(str, possible))} ranks")
guess_ranks.compare(max(possible))
for rank in range(3):
    share = share_bytes(checkpoint.tensors, config, rank, 3)
    print(
        f"rank {rank} of 3: {share.own / 1e6:.1f} MB of {of_file / 1e6:.1f} are its own, and "
        f"{share.repeated / 1e6:.2f} MB are on every rank"
    )

llama_8b = config_of("Llama-3-8B")
for num_ranks in (8, 16):
    spans = [span(llama_8b, "kv_heads", rank, num_ranks) for rank in range(num_ranks)]
    heads = [each.start // llama_8b.head_dim for each in spans]
    print(f"{num_ranks:>2} ranks of Llama-3-8B, the KV heads on each: {heads}")
task(41, "fused_rows")

# %% [markdown]
# Read figure 41.2 from the top. Rank 0's embedding has 16,384 of the 49,152 tokens. Its queries are
# three heads of 64 numbers, 192 stored rows of 576. Its `out` is stored as 576 rows of 192: all
# outputs, but only the inputs that its three heads give. (The file has mostly 4-bit weights, 96.6
# MB; in float32 a rank holds more than five times as much as is printed.) Query heads and units
# must be divided evenly, so only a few numbers of ranks are possible. (All ranks must have equally many KV heads, each of which serves equally many of the rank's query heads. So the number of ranks must divide the KV heads or be a multiple of them.) The price in memory is small: norms are on every rank. And
# where there are more ranks than KV heads, each KV head is on several ranks.
#
# ## Your turn: two matrices in one tensor
#
# The plan speaks of `gate_proj` and `up_proj` as two tensors. Some checkpoints store them as one, and
# so do many engines, which multiply by both at once. (Phi-3's files have a `gate_up_proj`, for
# example.) A picture of such a tensor with 4 rows each, for two ranks:
#
# | stored row | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | belongs to | gate | gate | gate | gate | up | up | up | up |
# | needed by rank | 0 | 0 | 1 | 1 | 0 | 0 | 1 | 1 |
#
# In a formula: matrix $i$ with $R_i$ rows begins at row $F_i = R_0 + \dots + R_{i-1}$, and rank $r$
# needs the rows from $F_i + r R_i / n$ up to, and without, $F_i + (r+1) R_i / n$.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.fused_rows
from collections.abc import Sequence as SequenceOf


def fused_rows(parts: SequenceOf[int], rank: int, num_ranks: int) -> list[range]:
    """Return the stored rows that a rank needs of several matrices that lie in one tensor.

    The tensor has the rows of all matrices one after another, `parts` says how many rows each
    matrix has, and each is cut evenly, by columns in the sense of y = x W. There is one range for
    each matrix.

    >>> fused_rows([4, 4], rank=1, num_ranks=2)
    [range(2, 4), range(6, 8)]
    """
    raise NotImplementedError  # your turn


# %%
my_rows = check(41, fused_rows=fused_rows)
gate_up = torch.cat([gate, up])


def fused_feed_forward(comm):
    rows = my_rows([len(gate), len(up)], comm.rank, comm.num_ranks)
    own_gate, own_up = (gate_up[each.start : each.stop] for each in rows)
    own_down = down.chunk(comm.num_ranks, dim=1)[comm.rank]
    return comm.all_reduce(swiglu(x @ own_gate.T, x @ own_up.T) @ own_down.T)


assert torch.allclose(run_ranks(4, fused_feed_forward)[3], right, atol=1e-5)
print("one tensor for gate and up, on 4 ranks: the same output")
print("rank 1 of 3 in SmolLM2-135M:", my_rows([1536, 1536], 1, 3))

# %% [markdown]
# ## Three processes
#
# Now with real processes. `tensor_parallel_size=3` starts two more; with this one they are three. An
# operation in which all ranks take part is called a **collective**. The ranks use three of them:
#
# - the all-reduce: every rank gets the sum of what all have;
# - the **all-gather**: every rank gets the pieces of all, side by side;
# - the **broadcast**: every rank gets what rank 0 has.
#
# Between CPUs a library named [gloo](https://github.com/pytorch/gloo) carries them, between NVIDIA's
# GPUs [NCCL](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html). Here the
# ranks are on CPUs. A later section describes ranks with a GPU each.
#
# Predict: how many messages does one step take, with 30 layers? Count along the picture above, and
# add what rank 0 must tell the others first.

# %%
guess_messages = predict("Messages in one step?", None, within=1.1)

# %%
split = load_model(weights="float32", tensor_parallel_size=3)
print(split.describe()["ranks"])
with split.record() as recorder:
    answer = split.generate(prompt, params)
assert answer.token_ids == whole.generate(prompt, params).token_ids
print(f"the same {len(answer.token_ids)} tokens:", answer.text)

steps = messages_of_steps(recorder.events)
counts = Counter(each.kind.value for each in steps[-1])
assert all(Counter(each.kind.value for each in step) == counts for step in steps)
layers = whole.config.num_layers
print(f"in every one of {len(steps)} steps:", dict(counts))
guess_messages.compare(counts.total())
sums_a_layer = (counts["all_reduced"] - 1) / layers
print(f"that is {sums_a_layer:.0f} all-reduces per layer, and one for the embedding")
quickest = min(steps, key=lambda step: step[-1].time_ns - step[0].time_ns)
picture(
    messages_in_time(quickest),
    "The quickest of the 10 steps, from rank 0's side: two broadcasts, many all-reduces, one "
    "all-gather at the end. The pale part of a bar is waiting for other ranks.",
    number="41.3",
)

# %% [markdown]
# Time runs to the right, and each lane is a kind of message. Rank 0 owns the scheduler and decides
# which requests run; two broadcasts tell the others: the first one the sizes, the second one the
# numbers. The embedding's all-reduce is a sum, too: one rank has the token's vector, the others add
# zeros. The all-gather at the end puts the [logits](../docs/glossary.md#logits) side by side, for rank
# 0 to sample from.
#
# A bar is as long as rank 0 was inside the message, and much of that may be waiting: an all-reduce ends
# only after the slowest rank has come. The solid end of a bar is as long as the shortest message of its
# kind in this step. All-reduces have one size: if moving their numbers takes equally long each
# time, it takes no more than that, and the pale part is waiting. (A kind with a single message,
# like the all-gather, shows no pale part, however long it waited.) Where there are fewer cores
# than ranks, the ranks also take turns on the same cores.
#
# ## What a message costs
#
# Let two processes, and three, do nothing but sum: tensors from 256 bytes to 4 MB.
#
# Predict: two ranks, 1,024 times the bytes (1 MB instead of 1 kB): how many times as long?

# %%
guess_bytes = predict("1,024 times the bytes: how many times as long?", None, within=3)

# %%
times = time_all_reduces((2, 3), repeats=15)
links = {each: fit_link(f"{each} ranks here", found, each) for each, found in times.items()}
picture(
    message_times(times, links),
    "The time of an all-reduce by the bytes of its tensor, on two and three processes here. Points "
    "and open circles are measured, lines are the model with the two numbers below. Both axes are "
    "logarithmic.",
    number="41.4",
)
for num_ranks, found in times.items():
    print(f"{num_ranks} ranks:")
    measured("  an all-reduce of 1 kB", 1e6 * found[1024], "µs")
    measured("  an all-reduce of 1 MB, 1,024 times the bytes", 1e6 * found[2**20], "µs")
    measured("  the line through all of them: latency", 1e6 * links[num_ranks].latency, "µs")
    measured("  and bandwidth", links[num_ranks].bandwidth / 1e9, "GB/s")
    of_line = links[num_ranks].ring_seconds(2**22, num_ranks)
    measured("  4 MB take, against that line", found[2**22] / of_line, "times as long")
    of_latency = links[num_ranks].ring_seconds(0, num_ranks)
    grown = (found[2**22] - of_latency) / (found[2**20] - of_latency)
    measured("  beyond the latency, 4 MB take", grown, "times as long as 1 MB")
guess_bytes.compare(times[2][2**20] / times[2][1024], "times", measured=True)

# %% [markdown]
# A small message costs the **latency** of the connection: the time from sending to arriving, however
# little is sent. A large one costs its bytes. In the picture the curves are flat where latency rules, and
# rise where bytes do. The latency printed is that of one turn. The fit takes the all-reduce for a ring
# (explained next: ranks pass pieces on to their neighbours, in rounds called turns), which has 2 turns on
# two ranks and 4 on three. In a turn each rank sends its share of the bytes, so the line is turns ×
# (latency + bytes / ranks / bandwidth). (With fewer cores than ranks, a turn also waits for a core, so
# its latency grows.)
#
# Take the bandwidth as rough. The fit makes the sum of the squares of the relative errors as small as
# possible. So all eight sizes count alike, and being off by 10 % counts as much at 256 bytes as at 4 MB.
# Only the largest sizes say much about bytes. The printed "4 MB take" compares the largest with the line:
# 1 would be on it. From 1 MB to 4 MB the bytes grow 4 times, and so does the time *beyond the latency* if
# the bandwidth stays the same (the last line of each block). If 4 MB take clearly longer than the line
# says, and that last line is clearly above 4, then the bandwidth probably falls for large tensors, and no
# single pair of numbers fits all sizes. (A likely reason: larger tensors fit less well into the processor's
# caches. But a single disturbed size looks the same, so run the cell again.) Near 1 and near 4, the line fits. Near 1, but far from 4: the line fits 4 MB, and
# misses 1 MB; then one ratio says little. In some runs single sizes, mostly small ones, lie far off the line. This chapter uses the line
# only for the messages of a decode step. They have 2.3 kB, and nearly all of their time is
# latency.
#
# How do ranks add up a tensor? Call what connects a rank to the others its **link**. Each rank could
# send all of its tensor to all others. That is $n - 1$ full tensors through each link. A **ring**
# needs less than two. Cut the tensor into $n$ pieces. In each **turn**, every rank passes one piece
# on to the next rank, all at the same time. The picture shows three ranks: rank 0 has the numbers 1,
# 2, 3, rank 1 has 10, 20, 30, and rank 2 has 100, 200, 300, so the sums are 111, 222 and 333.

# %%
picture(
    ring_turns([[1, 2, 3], [10, 20, 30], [100, 200, 300]]),
    "A ring all-reduce on three ranks, turn by turn. Rows are ranks, columns pieces. Orange frames "
    "are passed on to the next rank (from the last to the first), green sums are complete.",
    number="41.5",
)
task(41, "ring_all_reduce")

# %% [markdown]
# Read it from the left. In turn 1 rank 0 passes its 1 on to rank 1, which adds it to its own 10: the
# first column of rank 1 is 11 in the next table. In turn 2 rank 1 passes this 11 on, and rank 2 gets
# 111, the complete sum. After $n - 1 = 2$ turns each rank has one complete sum. This half is called a
# **reduce-scatter**. In the other $n - 1$ turns the complete sums go round once more, and are copied:
# that is an all-gather.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.ring_all_reduce
from jaxtyping import Float
from torch import Tensor

from minigen_course.ch41_tensor_parallel.lesson import PassOn


def ring_all_reduce(
    x: Float[Tensor, " numbers"], rank: int, num_ranks: int, pass_on: PassOn
) -> Float[Tensor, " numbers"]:
    """Return the sum of all ranks' x, by messages to the next rank in a ring only.

    `pass_on(piece)` sends a piece to the next rank, and returns the piece that came from the rank
    before. All ranks call it 2 (n - 1) times, with an n-th of the numbers each time; x has a
    multiple of n numbers, and stays as it is.
    """
    raise NotImplementedError  # your turn


# %%
my_ring = check(41, ring_all_reduce=ring_all_reduce)
made = continue_split(checkpoint, 3, whole.tokenizer.encode(prompt), 4, ring=my_ring)
assert made == answer.token_ids[:4]
print("three threads, each of which sends to the next one only:", whole.tokenizer.decode(made))
task(41, "choose_all_reduce")

# %% [markdown]
# The model of the three threads took every all-reduce through `my_ring`: yours if it passed its check,
# else the course's. (The logits' all-gather went round the same ring: a thread puts what it sends into
# the next thread's queue, and reads its own.)
#
# ## Your turn: a ring or a tree
#
# A ring has $2(n-1)$ turns, and each moves an $n$-th of the tensor. An alternative is a **tree**.
# In the first turn, ranks 1, 3, 5 and 7 send all their numbers to ranks 0, 2, 4 and 6, which add
# them. In the second turn, ranks 2 and 6 send to 0 and 4. In the third, rank 4 sends to rank 0,
# which now has the sum of all eight. Three more turns send it back the same way. So a tree has
# $2\lceil\log_2 n\rceil$ turns, from four ranks on fewer than a ring, but each turn moves all bytes:
#
# $$t_\text{ring} = 2(n-1)\left(\alpha + \frac{m}{n\,\beta}\right) \qquad\qquad
# t_\text{tree} = 2\lceil\log_2 n\rceil\left(\alpha + \frac{m}{\beta}\right) \qquad\qquad
# t = \min(t_\text{ring}, t_\text{tree})$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $n$ | ranks | `num_ranks` |
# | $\alpha$ | latency of a turn, in seconds | `Link.latency` |
# | $\beta$ | bandwidth of a link in one direction, in bytes per second | `Link.bandwidth` |
# | $m$ | bytes of the tensor | `num_bytes` |
# | $\lceil\log_2 n\rceil$ | levels of the tree: 3 for 8 ranks, 3 for 5 | `math.ceil(math.log2(num_ranks))` |
#
# **By hand.** Take 8 ranks, $\alpha$ = 2 µs, $\beta$ = 450 GB/s, and one token of a model with 8,192
# numbers in bfloat16: $m$ = 16,384 bytes. A turn of the ring moves 2,048 bytes in 0.005 µs, so the
# ring takes $14 \cdot 2.005 = 28.1$ µs. A turn of the tree moves 16,384 bytes in 0.036 µs, so the
# tree takes $6 \cdot 2.036 = 12.2$ µs. Both times are nearly all latency. (Libraries also cut a tree's
# large messages into chunks that follow one another. Then a large message costs less than by this
# formula.)
#
# Why do large messages take the ring? Count what each of the 8 ranks sends, in whole tensors. In the
# ring it is 14 pieces of an eighth, 14 / 8 = 1.75 tensors for every rank. In the tree, ranks 1, 3, 5 and
# 7 send one, ranks 2 and 6 send two (one up, one back down), rank 4 sends three (one up, two down), and
# rank 0 three (all down). That is $8 \cdot 1.75 = 14$ in the ring, and $4 + 4 + 3 + 3 = 14$ in the tree:
# both move the same bytes in all. But the ring spreads them evenly, and every link works in every turn,
# in both directions. In the tree, ranks 0 and 4 work in all six turns, sending in three and receiving in
# three, while ranks 1, 3, 5 and 7 work in two turns only. So the bytes take the time of 1.75 tensors in
# the ring, and of 6 in the tree, one for each turn.


# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.choose_all_reduce
def choose_all_reduce(
    num_bytes: float, num_ranks: int, latency: float, bandwidth: float
) -> tuple[str, float]:
    """Return "ring" or "tree", whichever takes fewer seconds, and these seconds.

    If both take equally long, it is a ring. The latency is in seconds per turn, the bandwidth in
    bytes per second.
    """
    raise NotImplementedError  # your turn


# %% [markdown]
# The table below compares four connections, for a token of Llama-3-70B (16 kB) and for a prompt of 2,048
# tokens (34 MB) on 8 ranks, each with a link of its own (over InfiniBand and Ethernet: eight machines
# with a card each). **NVLink** is NVIDIA's direct connection between its cards, here of its fourth
# generation; its switch, the **NVSwitch**, connects any two cards of a machine. **PCIe** is the bus by
# which cards are plugged into a machine, here of its fifth generation, with 16 lanes (x16: each lane has
# wires of its own in both directions). **Ethernet** connects machines, and **InfiniBand** is a network
# made for data centres. (Ethernet comes as fast as our InfiniBand, too; ours here is a slow one.) What is
# connected to what, and how fast, is called the **topology**. One machine of a cluster is a **node**. The
# picture shows two nodes of eight cards.

# %%
my_choice = check(41, choose_all_reduce=choose_all_reduce)
picture(
    topology(),
    "Two nodes. Inside a node, NVLink and its switch connect any two cards; PCIe leads to the memory "
    "of the host (the computer that holds the cards) and to the network. Between nodes there is only "
    "the network.",
    number="41.6",
)
tokens, ranks = 2048, (1, 2, 4, 8)
message = 2 * big.hidden  # bytes of one token's vector in bfloat16
print("µs on 8 ranks                 bytes        ring        tree   taken")
for name, link in LINKS.items():
    for num_bytes in (message, tokens * message):
        ways = 1e6 * link.ring_seconds(num_bytes, 8), 1e6 * link.tree_seconds(num_bytes, 8)
        taken, seconds = my_choice(num_bytes, 8, link.latency, link.bandwidth)
        assert abs(1e6 * seconds - min(ways)) < 1e-6 * min(ways)
        print(f"{name:<22} {num_bytes:>12,} {ways[0]:>11,.1f} {ways[1]:>11,.1f}   {taken}")

# %% [markdown]
# Each line is a link and a message size. A token's message takes the tree on every link, because
# there turns count more. A prompt's message takes the ring, because there bytes count.
#
# Where do $\alpha$ and $\beta$ come from? The bandwidths are those of data sheets: [an
# H100 SXM](https://www.nvidia.com/en-us/data-center/h100/) has 900 GB/s of NVLink in both
# directions together, so 450 in one; PCIe 5 with 16 lanes has 63 GB/s in one direction;
# InfiniBand's 400 Gbit/s are 400 / 8 = 50 GB/s, for each card that has a network card of its own;
# Ethernet's 25 Gbit/s are 25 / 8 = 3.1 GB/s, for a whole machine.
#
# The latencies are assumptions. Our $\alpha$ is of the right size for NVLink and InfiniBand, and too long
# for PCIe. To see this, compare it with the latencies with which [NCCL
# plans](https://github.com/NVIDIA/nccl/blob/v2.26.2-1/src/graph/tuning.cc). (Before it chooses, NCCL
# estimates the time of each way from such constants.) It has three **protocols**: LL (low latency) sends
# a mark with every few bytes, so that the receiver need not wait for a signal; LL128 does the same with
# less room for marks; Simple sends large pieces with a signal after each. By its plan a ring or a
# tree also has a fixed cost, 6.6 µs or more, which our model does not have. The fourth column is
# a small message on 8 cards, by a ring and LL:
#
# | link | a turn in NCCL's plan, µs (LL, LL128, Simple) | our $\alpha$, µs | NCCL: 6.6 + 14 turns, µs | ours, tree to ring, µs |
# |---|---|---|---|---|
# | NVLink | 0.6, 1.9, 3.4 | 2 | 6.6 + 14 · 0.6 = 15 | 12 to 28 |
# | PCIe | 1.0, 2.5, 5.7 | 5 | 6.6 + 14 · 1.0 = 20.6 | 32 to 70 |
# | InfiniBand | 5.0, 8.5, 14 or more (any network; with one card per machine a ring gets the tree's latencies) | 5 | 6.6 + 14 · 5.0 = 77 or more (a tree: 6.8 + 6 · 5.0 = 37 or more) | 32 to 71 |
# | Ethernet | the same | 30 | the same 77 or more | 212 to 429 |
#
# Our times for NVLink and InfiniBand are near those of NCCL's plan. Our times for PCIe are too
# long for cards that use LL. InfiniBand's cards write into the other machine's memory themselves
# (RDMA, *remote direct memory access*); over Ethernet a message over TCP, the usual protocol of
# networks, passes the operating systems of two machines. (Some Ethernet cards can do RDMA as
# well, named RoCE.) Nothing here was measured on such links.
#
# One reservation: a library chooses like this, too, by the size at hand, but it does not have both ways
# everywhere. In NCCL's plan, a tree's ranks inside one machine form a chain (each adds its
# numbers and passes the sum on, then the total comes back), with as many turns as a ring; only
# between machines there is a tree. Engines have kernels of their own for small messages inside a
# machine (at the end of this chapter). So over NVLink, read the ring as the careful estimate, and
# the tree as what good kernels can reach.
#
# ## What is left of the gain
#
# Now put it together: this is the chapter's **cost model**. On $n$ devices each reads an $n$-th of the
# weights and of the KV cache: that time falls. The time of the $2L + 1$ all-reduces does not:
#
# $$S(n) = \frac{t_1}{\dfrac{t_1}{n} + (2L + 1)\; t(n, m)}, \qquad m = b \cdot H \cdot 2 \text{ bytes}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $S(n)$ | how many times as fast $n$ ranks are as one | `allowed(...)[n]` |
# | $t_1$ | seconds of a step on one device, without messages (chapter 17), in a context of 1,024 tokens | `alone` |
# | $t(n, m)$ | seconds of one all-reduce | `Link.all_reduce_seconds` |
# | $L$, $H$ | layers, numbers in a token's vector | `shape.layers`, `shape.hidden` |
# | $b$ | tokens in the step; 2 bytes is bfloat16 | `batch` |
#
# (The all-gather of the logits and the two broadcasts are left out: three messages per step.)
#
# Predict: 8 cards with NVLink, Llama-3-70B ($L$ = 80), one sequence: how many times as fast as one
# card (if it fitted)? The time of one message is above, and $t_1$ is about 42 ms.

# %%
guess_gain = predict("8 cards: how many times as fast as one?", None)


# %%
def cuts_evenly(model):
    return all(obstacle(config_of(model), {}, "float32", each) is None for each in ranks)


def gain(model, card, at_once):
    return speed_ups(SHAPES[model], MACHINES[card], list(LINKS.values()), batch=at_once)


explore(
    gain,
    "Decode steps on several cards, by the cost model: how many times as fast as one card, against "
    "the number of ranks, for four links, whether or not such a card can be bought with them. "
    "The rising grey line is what it would be without messages, the level one a single card. The models are those that 2, 4 and 8 ranks "
    "can share.",
    "41.7",
    model=[
        "Llama-3-70B",
        *(name for name in SHAPES if name != "Llama-3-70B" and cuts_evenly(name)),
    ],
    card=list(MACHINES),
    at_once=(1, 256, 1, 1),
)

gains = {name: allowed(big, h100, link, ranks, 1, 1024) for name, link in LINKS.items()}
of_prompt = prefill_step(big, tokens, weight_bits=16).seconds(h100)
num_sums = 2 * big.layers + 1
work, _ = split_step_seconds(big, h100, LINKS["NVLink 4"], 8, 1, 1024)
alone, _ = split_step_seconds(big, h100, LINKS["NVLink 4"], 1, 1, 1024)
print(f"one card: {1e3 * alone:.1f} ms; an eighth of it: {1e3 * work:.1f} ms; {num_sums} messages")
print("\n8 ranks, one token       all ring    all tree")
for name, link in LINKS.items():
    ways = link.ring_seconds(message, 8), link.tree_seconds(message, 8)
    print(f"{name:<22}" + "".join(f"{alone / (work + num_sums * t):>11.2f}x" for t in ways))
print("\nthe faster way          2 ranks   4 ranks   8 ranks    8 ranks, a prompt of 2,048")
for name, link in LINKS.items():
    sums = num_sums * link.all_reduce_seconds(tokens * message, 8)
    found = "".join(f"{gains[name][each]:>9.1f}x" for each in ranks[1:])
    print(f"{name:<22}{found} {of_prompt / (of_prompt / 8 + sums):>20.1f}x")
guess_gain.compare(round(gains["NVLink 4"][8], 1), "times by NVLink")

# %% [markdown]
# By hand: 161 messages of 12.2 µs are 2.0 ms. An eighth of the step is 5.2 ms, so a step on 8 cards takes
# 7.2 ms, and 42 / 7.2 is 5.8. In the picture, the NVLink curve follows the grey line longest, and the
# Ethernet curve stays below 1.4. (For one token, NVLink's lead over PCIe is that of the assumed
# latencies. With NCCL's own constants, 15 and 20.6 µs, it would be 5.5 against 4.9 times.) The columns
# *all ring* and *all tree* say more: over Ethernet, the way of adding up even decides whether 8 ranks are
# faster or slower than one. For a long prompt every message carries 34 MB: there Ethernet is far slower
# than one card, and PCIe and InfiniBand gain little. So tensor parallelism usually stays inside a
# node, where NVLink is.
#
# ## The same ranks on GPUs
#
# Everything that ran so far ran on CPUs. With `device="cuda"` each rank has a GPU, and computes its
# share with the kernels of chapters 31 to 33. The plan is the same table, and a step has the same
# sums. Nothing in this section was run on several GPUs: none were at hand. What did run is the same
# code of a rank in Triton's interpreter (chapter 31), on a CPU. The next cell runs it with three
# ranks on the first two layers of this chapter's model, and the package's tests
# (`tests/test_41_gpu.py`) with two and three ranks. What you read about NCCL and links comes from
# NVIDIA's documents, NCCL's source, and one report of users. Three things differ from the ranks on
# CPUs; a fourth, CUDA graphs, follows the next cell.
#
# **What carries the sums.** [**NCCL**](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html)
# is NVIDIA's library of collectives. When the ranks connect, they tell each other where their GPUs are, and
# NCCL looks for the fastest path between any two: NVLink, PCIe, or the network. For each size of message it
# chooses a way (for example a ring, a tree or the adders of NVIDIA's switch, NVLS: at the end of
# this chapter), and one of the three protocols. An all-reduce is a
# [kernel](../docs/glossary.md#kernel): inside a machine its programs read what the neighbour has
# written, add, and write on to the next GPU, and no CPU copies a byte. (Over a network CPUs start
# the transfers, and over TCP they copy, too.)
#
# **When the sums are computed.** The CPU does not run kernels. It puts them into a queue of the GPU, a
# [**stream**](../docs/glossary.md#stream), and the GPU runs a stream's kernels one after another. An
# all-reduce stands in a queue too (torch gives NCCL a stream of its own). It starts when the kernel whose
# result it sums has ended, and the model's next kernel starts after it. So the CPU can queue a whole
# step without waiting for one sum. (Rank 0 waits for its GPU once per step, at the end, because it chooses
# the next tokens.) This has a price: if another rank is late, the all-reduce keeps a part of its GPU busy
# with looking whether the numbers have come, and the kernels behind it wait.
#
# **Where the residual is added.** Above you read that no residual may come between a row split and its
# all-reduce, because every rank would add it. For a single token minigen adds it there all the
# same, inside the kernel of the product, where it costs next to nothing. But only rank 0 does so, and the
# sum contains it once. (With several tokens each rank adds it after the sum, in the kernel of the next norm.)
#
# Rank 0's scheduler and the two broadcasts per step stay on CPUs, over gloo. While rank 0 waits for its GPU,
# it also sends the other ranks a short message about five times a second. If this fails, a rank has ended.
# Then rank 0 stops NCCL, which by itself would keep waiting.
#
# Now the launches (chapter 31: the start of a kernel costs the CPU some microseconds, whatever the kernel
# does). For one token a layer of minigen has 7 kernels: four products (Q, K and V are one, gate and up
# another; their norm, their SwiGLU and their residual are inside them), the rotation, which also stores
# the key and the value, and attention in two kernels (splits and their merging, chapter 33; a
# context below 256 tokens may need only one). On several
# ranks it has two all-reduces more.
#
# Predict: Llama-3-70B has 80 layers. Suppose that each launch takes 10 µs. For how many milliseconds does the
# CPU of a rank launch kernels and all-reduces in one step on 8 cards? (Count the layers only.)

# %%
from minigen_course.lab.gpu_ranks import run_prompt

if importlib.util.find_spec("triton") is None:
    print("Not run: Triton is for Linux only (no GPU is needed).")
else:
    by_kernels = run_prompt(checkpoint, 3, whole.tokenizer.encode(prompt), num_layers=2)
    for logits in by_kernels.logits:
        assert torch.allclose(logits, by_kernels.expected, atol=1e-3, rtol=0)
    rows, vocab = by_kernels.expected.shape
    print(f"3 ranks: each has the logits of plain torch, {rows} tokens by {vocab:,}")
    print("messages between the ranks, in a step of 2 layers:", by_kernels.num_messages)
guess_launch = predict("Milliseconds of launching in a step on 8 cards?", None, within=1.1)

# %% [markdown]
# Each of the three ranks was a thread here. It loaded its share as on a GPU, and ran it in the same kernels,
# which the interpreter executed on this processor. (A prompt's products are torch's, on a GPU as well.) All
# three end with the logits that plain torch has after the same two layers, to within 0.001.
# The count is that of the formula $2L + 1$ for $L = 2$ layers: $2 \cdot 2 + 1 = 5$ all-reduces, and one all-gather. (There are no
# broadcasts, because the cell gave the step to every thread. And it is a prompt's step. The tests run decode
# steps as well, in processes, with the broadcasts.)
#
# **CUDA graphs.** A [CUDA graph](../docs/glossary.md#cuda-graph) (chapter 31) is a step that was recorded
# once, and is launched as a whole from then on. NCCL's kernels [can be
# recorded](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html) since NCCL 2.9,
# under two conditions:
#
# - All ranks record the same step, and all of them launch (*replay*) it.
# - The graphs are destroyed before NCCL's connection is: since NCCL 2.26 [its end waits for
#   them](https://docs.nvidia.com/dl-cuda-graph/troubleshooting/process-hang.html).
#
# When minigen's ranks connect, each tries a graph with a single all-reduce, and compares the sum. Only if
# all of them succeed do they record decode steps. `describe()["runner"]` says what they found: "decode steps
# as CUDA graphs with their messages", or "no CUDA graphs" with the reason.
#
# A replayed graph runs no Python, so it emits no events. This is what a trace shows of one step, with $L$
# layers:
#
# | | on CPUs (gloo) | on GPUs, without a graph | on GPUs, a replayed graph |
# |---|---|---|---|
# | steps | all | steps with a prompt, or with more than 256 sequences; every step if no graph can be recorded | decode steps |
# | broadcasts (gloo) | 2 | 2, and 1 for each 0.2 s of waiting | the same |
# | all-reduces | $2L + 1$ | $2L + 1$ | none |
# | all-gathers (none if no logits are needed) | 1 | 1 | none |
# | how long an event of a sum lasts | sending and waiting | queueing, some microseconds | |
#
# On GPUs the time of the sums is seen in a profile of the GPU (`torch.profiler`, or NVIDIA's Nsight Systems),
# as kernels named `ncclDevKernel_AllReduce_Sum_bf16_...`. There the rank that comes first has a long kernel
# and the last one a short one. The difference is waiting, as in the pale bars of figure 41.3. So compare the
# *shortest* of the ranks' kernels with the link, and the *longest* with the step.
#
# The next cell sets the CPU's time beside the GPU's, and then runs this chapter's model with a GPU
# for each of its three ranks. With graphs, the trace of 10 steps should hold 20 broadcasts (more if the first
# step waits for a rank that still compiles) and only 61 all-reduces and one all-gather, those of
# the prompt's step. Without three GPUs the cell says so in a sentence.

# %%
print("H100s, NVLink   launches   ms on the CPU   ms on the GPU")
for cards, per_layer in ((1, 7), (8, 7 + 2)):
    launches = per_layer * big.layers
    sums = 0 if cards == 1 else num_sums * LINKS["NVLink 4"].all_reduce_seconds(message, cards)
    on_gpu = alone / cards + sums
    on_cpu = launches * 10e-6
    print(f"{cards:>13}{launches:>11}{1e3 * on_cpu:>16.1f}{1e3 * on_gpu:>16.1f}")
guess_launch.compare(round(1e3 * on_cpu, 1), "ms")

gpus = torch.cuda.device_count()
if gpus < 3:
    print(f"\nNot run: three ranks need three GPUs, and torch finds ⟨{gpus}⟩.")
else:
    on_gpus = load_model(device="cuda", tensor_parallel_size=3)
    print("\n" + on_gpus.describe()["ranks"] + "\n" + on_gpus.describe()["runner"])
    with on_gpus.record() as recorder:
        print(on_gpus.generate(prompt, params).text)
    seen = [each.kind.value for step in messages_of_steps(recorder.events) for each in step]
    print(f"messages in the trace of {params.max_tokens} steps:", dict(Counter(seen)))
    on_gpus.close()

# %% [markdown]
# By hand: $80 \cdot 9 = 720$ launches of 10 µs are 7.2 ms. On one card 560 launches take 5.6 ms, which are
# hidden, because the GPU works for 42 ms. On eight cards the GPU needs 5.2 ms for its eighth of the work and
# 2.0 ms for the sums, 7.2 ms together, and the CPU needs just as long to launch them. So the CPU is no longer
# ahead, and with more ranks or slower launches it sets the pace. A cut makes kernels shorter, but not fewer.
# With a graph the whole step is one launch. (10 µs is an assumption. The GPU's times are those of the
# cost model, and the sums are the tree's. By NCCL's plan, 15 µs each, they are 2.4 ms, and the GPU needs
# 7.6 ms: about as long, too.)
#
# **NVLink against PCIe.** A data sheet adds both directions. [An
# H100 SXM](https://www.nvidia.com/en-us/data-center/h100/) has 900 GB/s of NVLink and 128 GB/s of
# PCIe 5, so 450 and 64 in one direction (63, because 128 of every 130 bits sent are data): NVLink
# has 7.1 times the bandwidth. [An L40S](https://www.nvidia.com/en-us/data-center/l40s/) has no
# NVLink, and 32 GB/s of PCIe 4 in one direction. What arrives is less: between two H100s a test
# that copies from one card to the other [reached 376 to 380
# GB/s](https://github.com/NVIDIA/nccl/issues/1264), 84 % of the 450. How much does the factor of
# 7 count? In decode hardly: a message of 16 kB takes 0.04 µs at 450 GB/s and 0.26 µs at 63, and
# both are small beside the latency of a turn. For a prompt of 2,048 tokens it counts: 158 µs by
# NVLink and 1,002 µs by PCIe, in the table of rings and trees above.
#
# What connects two cards of one machine? The command `nvidia-smi topo -m` names it for each pair:
#
# | name | the path |
# |---|---|
# | `NV18` | 18 NVLinks (or another number of them) |
# | `PIX`, `PXB` | PCIe switches only, one or several |
# | `PHB` | the processor's connection to PCIe (its host bridge) |
# | `NODE` | several host bridges of one processor |
# | `SYS` | the link between two processors |
#
# Where cards cannot reach each other's memory directly, NCCL goes through the main memory: one card writes
# there, and the other one reads.
#
# If you have two GPUs: this model's 9 query heads cannot be shared by two ranks, but those of most models can
# (`minigen generate -m MODEL --device cuda --tensor-parallel-size 2 "The old lighthouse"`). In a clone of the
# repository `make test-gpu` compares two ranks over NCCL with plain torch, and `make bench-gpu` measures their
# decode steps and their all-reduces.
#
# ## Other ways to cut
#
# Between nodes, engines often use other cuts. Five are common:
#
# - **Tensor parallelism** cuts every matrix. All ranks work on the same tokens.
# - **Pipeline parallelism** gives each rank some of the layers, a **stage**. A token visits all
#   stages, one after another.
# - **Data parallelism** gives each rank a copy of the model and requests of its own.
# - **Context parallelism** gives each rank a part of each sequence: its tokens, and their keys and
#   values. Attention must see all of them, so ranks exchange keys and values, or partial results.
#   (**Sequence parallelism**, in the narrow sense, cuts only the norms between the splits of tensor
#   parallelism like this; more on it below.)
# - **Expert parallelism** is for **mixture-of-experts** models. Their feed-forward layer has many
#   small networks, the experts, and a router chooses a few for each token. Each rank holds some
#   experts, and tokens travel to them by an **all-to-all**: every rank sends a different piece to
#   every other rank.
#
# A pipeline with one batch keeps one stage busy at a time, while the others are idle. The idle
# time is called a **bubble**. To shrink it, the batch is cut into **micro-batches** that follow
# one another: while stage 1 works on micro-batch 0, stage 0 already works on micro-batch 1.
#
# Predict: 4 stages and 4 micro-batches, and each stage takes equally long for each. From the first
# stage's start to the last one's end, for how many per cent of the time is a stage idle, on average?

# %%
picture(
    ways_to_cut(),
    "Four layers and four sequences of eight tokens on four ranks; a colour is a rank. Above: which "
    "rank has which weights (narrow boxes are whole copies; grey is on every rank). Below: which "
    "rank works on which token (grey: every rank, or one after another).",
    number="41.8",
)
guess_bubble = predict("4 stages, 4 micro-batches: per cent of the time that a stage idles?", None)

# %% [markdown]
# Read it column by column. Tensor parallel: a layer has all four colours, and every rank works on
# every token. Pipeline parallel: a layer has one colour. Data parallel: each rank has all four
# layers, and one sequence. Context parallel: each rank has all four layers, and a quarter of every
# sequence. Expert parallel: attention (grey) is on every rank, an expert is on one, and tokens go
# where their experts are.
#
# | cut | what is split | messages per layer | bytes of one | it pays when |
# |---|---|---|---|---|
# | tensor | every matrix, the KV cache by heads | 2 all-reduces | $b \cdot H \cdot 2$ | a token must be faster, and links are fast |
# | pipeline | layers, the KV cache by layers | none inside a stage; a transfer to the next stage for each micro-batch | $b \cdot H \cdot 2$, with the $b$ of a micro-batch | the model does not fit into a node, or links are slow |
# | data | requests | none in a dense model | | one copy fits, and there are more requests than it serves |
# | context | tokens of a sequence, the KV cache by tokens | attention's: in prefill keys and values travel, in decode partial results | in prefill it grows with the tokens; in decode one partial result per query head | contexts are very long |
# | expert | experts | 2 all-to-alls, there and back | the tokens' vectors, once for each of their experts | a mixture of experts has many experts |
#
# $b$ is the number of tokens in the step, and for a pipeline in the micro-batch. The cuts can be
# combined: tensor parallel inside a node and pipeline parallel between nodes is [vLLM's
# advice](https://docs.vllm.ai/en/latest/serving/parallelism_scaling/), for example.
#
# ## A pipeline in the same cost model
#
# A stage can begin a micro-batch when two things have happened: the stage before has sent it, and the
# stage itself has finished the micro-batch before. That sentence is the whole simulation below.
#
# **By hand:** call the time that a stage takes for a micro-batch a turn. The first of 4 micro-batches
# leaves the last of 4 stages after 4 turns, and the other three a turn later each. So all is done
# after 7 turns. A stage works in 4 of them and idles in 3. For $m$ micro-batches and $p$ stages:
#
# $$\text{bubble} = \frac{p - 1}{m + p - 1}, \qquad \text{for } p = 4,\; m = 4:\quad \frac{3}{7}
# \approx 43\,\%$$
#
# Here $p$ is `num_stages` and $m$ is `num_batches` (not the bytes from above; both letters are
# customary; [GPipe](https://arxiv.org/abs/1811.06965) writes $K$ for the stages and $M$ for the
# micro-batches).


# %%
def pipeline_ends(num_stages, num_batches, stage_seconds, transfer_seconds=0.0):
    """Return when each stage has finished each micro-batch, by stage and micro-batch."""
    ends = [[0.0] * num_batches for _ in range(num_stages)]
    for stage in range(num_stages):
        for batch in range(num_batches):
            arrives = ends[stage - 1][batch] + transfer_seconds if stage else 0.0
            is_free = ends[stage][batch - 1] if batch else 0.0
            ends[stage][batch] = max(arrives, is_free) + stage_seconds
    return ends


explore(
    lambda stages, micro_batches: pipeline_chart(pipeline_ends(stages, micro_batches, 0.01), 0.01),
    "A pipeline over time: a row for each stage, a box for each micro-batch, grey where a stage is "
    "idle. Every stage takes 10 ms.",
    "41.9",
    stages=(1, 8, 1, 4),
    micro_batches=(1, 32, 1, 4),
)
for num_batches in (1, 4, 16):
    end = pipeline_ends(4, num_batches, 0.01)[-1][-1]
    bubble = 1 - num_batches * 0.01 / end
    assert abs(bubble - 3 / (num_batches + 3)) < 1e-9
    print(f"4 stages, micro-batches: {num_batches:>2}: {1e3 * end:.0f} ms, idle {bubble:.0%}")
guess_bubble.compare(round(100 * 3 / 7), "%")

print("\nms on 8 cards               one sequence   64 sequences   a prompt of 2,048")
of_64 = decode_step(big, 64, 1024, weight_bits=16).seconds(h100)
print(
    f"{'one card, if it fitted':<28}{1e3 * alone:>12.1f}{1e3 * of_64:>15.1f}{1e3 * of_prompt:>20.0f}"
)
for name in ("NVLink 4", "Ethernet 25 Gbit/s"):
    link = LINKS[name]
    decoded = [1e3 * sum(split_step_seconds(big, h100, link, 8, each, 1024)) for each in (1, 64)]
    prefilled = of_prompt / 8 + num_sums * link.all_reduce_seconds(tokens * message, 8)
    shown = f"{decoded[0]:>12.1f}{decoded[1]:>15.1f}{1e3 * prefilled:>20.0f}"
    print(f"{'tensor, ' + name:<28}{shown}")
for name in ("NVLink 4", "Ethernet 25 Gbit/s"):
    link = LINKS[name]
    sent = {each: link.latency + each * message / link.bandwidth for each in (1, 8, 256)}
    in_8 = decode_step(big, 8, 1024, weight_bits=16).seconds(h100)
    chunk = prefill_step(big, 256, weight_bits=16).seconds(h100) / 8
    prefilled = pipeline_ends(8, 8, chunk, sent[256])[-1][-1]
    shown = f"{1e3 * (alone + 8 * sent[1]):>12.1f}{1e3 * (in_8 + 8 * sent[8]):>15.1f}"
    print(f"{'pipeline, ' + name:<28}{shown}{1e3 * prefilled:>20.0f}")
of_chunk = prefill_step(big, 256, weight_bits=16)
print(f"\non one card: 8 sequences take {1e3 * in_8:.1f} ms, and a chunk of 256 tokens", end=" ")
print(f"{1e3 * of_chunk.num_bytes / h100.bandwidth:.1f} ms to read", end=", ")
print(f"{1e3 * of_chunk.flops / h100.flops:.1f} ms to compute")

# %% [markdown]
# In the picture, micro-batch 0 walks down the diagonal, and the grey corners are the bubble. With one
# micro-batch three of four stages idle; with 16 the bubble is 16 %. (All stages take equally long
# here, and transfers are free. Real stages differ, and the slowest one sets the pace.)
#
# The table puts both cuts on the same cards. A pipeline makes one sequence no faster: a token still
# needs all layers, one after another.
#
# **64 sequences, by hand.** The pipeline makes 8 micro-batches of 8 of them. In decode a micro-batch enters
# stage 0 with its next token as soon as it comes back from the last stage. On one card 8 sequences
# take 42.3 ms, so a stage, with an eighth of the layers, takes 42.3 / 8 = 5.3 ms for a micro-batch. A
# micro-batch passes 8 stages for its next token: 42.3 ms, and 8 transfers. In the same time each stage
# works on each of the 8 micro-batches once, which is again 42.3 ms. So this is the time of a step of
# all 64, and only the transfers leave a stage idle. The step takes only about a tenth less than
# on one card, because every stage reads its weights 8 times, once per micro-batch. (It gains a
# little because the stages read the keys and values at the same time, each its eighth.) The
# pipeline gains memory, and so room for more sequences.
#
# **A prompt, by hand.** It is cut into 8 chunks of 256 tokens. On one card a chunk takes 35.5 ms to
# compute, but 41.5 ms to read, nearly all of it weights: 256 tokens are fewer than the 295 or so at
# which this card computes as long as it reads (chapter 17). So a stage takes 41.5 / 8 = 5.19 ms for a
# chunk, and 8 chunks on 8 stages take 8 + 7 = 15 such turns, 78 ms over NVLink. (If only the arithmetic
# counted, a turn would take 35.5 / 8 = 4.44 ms, and all of them 67 ms. The other 11 ms are the price of
# reading the weights once per chunk.) Over *either* link that is several times as fast as one card,
# since a chunk is sent only once per stage instead of twice per layer.
#
# (The chunks' attention to earlier chunks is left out. The first two columns count eight transfers:
# seven between stages, and one back to stage 0. The prompt's column and the claim at the end count the
# seven.) So on 8 cards over Ethernet a pipeline makes a prompt 3.3 times as fast and gives many sequences
# memory (their step is only 1.1 times as fast), and tensor parallelism makes both slower. One sequence
# gains next to nothing from either. (On 2 or 4 cards over Ethernet tensor parallelism makes one sequence
# 1.3 times as fast, by Figure 41.7.)
#
# ## The measurement again
#
# The same step as at the beginning, now on three ranks of this one machine. They share its cores and
# its memory, and the one process had all cores already, so reading at the same time gains nothing.
#
# Predict: how many times as long is the split model's step here?

# %%
guess_split = predict("Three ranks on this machine: how many times as long?", None, within=1.5)

# %%
with split.record() as recorder:
    reading = read_along(split, ids[:8])
split.close()
measured("a step of one process", 1e3 * alone_seconds, "ms")
measured("a step of three", 1e3 * reading.step_seconds, "ms")
guess_split.compare(reading.step_seconds / alone_seconds, "times", measured=True)
in_messages = []  # of each step: the seconds in all messages, and those in all-reduces
for step in messages_of_steps(recorder.events):
    taken = [(each.counts["duration_ns"] / 1e9, each.kind.value) for each in step]
    of_sums = [seconds for seconds, kind in taken if kind == "all_reduced"]
    in_messages.append((sum(seconds for seconds, _ in taken), sum(of_sums)))
inside, in_sums = sorted(in_messages)[len(in_messages) // 10]
moving = counts["all_reduced"] * links[3].ring_seconds(4 * whole.config.hidden, 3)
parts_of_three = {
    "computing": reading.step_seconds - inside,
    "moving": moving,
    "waiting": in_sums - moving,
    "other messages": inside - in_sums,
}
picture(
    step_parts({"one process": {"computing": alone_seconds}, "three processes": parts_of_three}),
    "A step of one process, and of three on the same cores. Computing: outside all messages. "
    "Moving: what the all-reduces take by the line of Figure 41.4. Waiting: the rest of the "
    "all-reduces. Other messages: the broadcasts and the all-gather.",
    number="41.10",
)
measured("rank 0 was outside its messages for", 1e3 * parts_of_three["computing"], "ms")
measured("in two broadcasts and an all-gather for", 1e3 * (inside - in_sums), "ms")
measured("and in all-reduces for", 1e3 * in_sums, "ms")
measured(
    "  moving, by the line through the times of ranks that do nothing else", 1e3 * moving, "ms"
)
measured("  waiting for other ranks: the rest", 1e3 * (in_sums - moving), "ms")

# A control: one rank on one core, and two ranks on a core each
tall, wide = torch.ones(16384, 2048), torch.ones(2048, 16384)


def timed_on_one_core(comm):
    torch.set_num_threads(1)
    own_tall = tall.chunk(comm.num_ranks)[comm.rank]
    own_wide = wide.chunk(comm.num_ranks, dim=1)[comm.rank].contiguous()
    one = torch.ones(1, 2048)
    return best_seconds(lambda: comm.all_reduce((one @ own_tall.T) @ own_wide.T), 9)


num_threads = torch.get_num_threads()
by_ranks = {each: max(run_ranks(each, timed_on_one_core)) for each in (1, 2)}
torch.set_num_threads(num_threads)
measured("one rank on one core", 1e3 * by_ranks[1], "ms")
measured("two ranks on a core each, with their all-reduce", 1e3 * by_ranks[2], "ms")
measured("times as fast", by_ranks[1] / by_ranks[2])

# %% [markdown]
# The two bars have the same scale. First compare the whole bars. Where other programs run, they can
# disturb either measurement: if the upper bar is the longer one, or several times as long as you saw
# before, run both measurements again on a quiet machine. On the quiet machine of two cores on which
# this chapter was written, a step of three processes takes several times as long as a step of one.
# The time of the three processes has four parts:
#
# 1. **Computing** (blue) is all that rank 0 did outside its messages. It would be nearer to a
#    third of the upper bar if each rank had as many cores and as much memory bandwidth as the one
#    process. Here the ranks share both. (The step's time, and the time inside messages, are each
#    the smallest that eight steps have, so other programs disturbed them little.)
# 2. **Moving** (orange) is 61 times what an all-reduce of this size takes by the line of Figure 41.4,
#    which was measured with ranks that did nothing else. With fewer cores than ranks, this line already
#    contains some waiting for a core, so moving the numbers takes less than the orange part.
# 3. **Waiting** (grey) is what remains of rank 0's time inside its all-reduces. A rank that has no
#    core just now keeps the others waiting, and this can happen again at each of the 61 sums. (If
#    this is negative on your machine, the messages were faster here than by the line.)
# 4. **Other messages** (green) are the two broadcasts and the all-gather of Figure 41.3, with their own
#    waiting.
#
# On three machines with a fast link, computing would be nearer to a third, and waiting little.
# What a split costs can be seen here; what it gains cannot, because the gain needs a device for each
# rank. The nearest to that on one machine is a core for each rank. So the last three lines compare
# one rank that may use one core with two ranks that may use one core each. They run a feed-forward
# layer's two matrices, too large for most processors' caches, cut as above. The gain is about 2
# at most, and less where one core already gets most of what memory gives, or where another
# program uses the second core. Two devices have two memories, so there the first limit falls away.
#
# On several machines `torchrun`, which comes with PyTorch, starts the ranks, and they find each other
# over the network (`--rdzv-...`, from *rendezvous*, says how and where; `c10d` is PyTorch's own way). On
# each of three, with the first one's name for HOST:
#
# ```
# torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#     -m minigen generate --tensor-parallel-size 3 "The old lighthouse"
# ```
#
# ## Your turn: cut a model
#
# Cut a checkpoint by the plan: `span(config, axis, rank, num_ranks)` is the rank's range of an axis, in
# stored rows or columns (64 for each head), `tensor.rows(start, stop)` and `tensor.columns(start, stop)`
# cut what is stored, and a module that the plan does not name stays whole. Then run a whole layer as one
# rank does, beginning with chapter 15's `run_layer`. The equation for the second exercise, for a layer
# with input $x$:
#
# $$x' = x + \sum_r \mathrm{Attention}_r\big(\mathrm{norm}(x)\big), \qquad
# x'' = x' + \sum_r \mathrm{FFN}_r\big(\mathrm{norm}(x')\big)$$
#
# Each sum over $r$ is an all-reduce. Everything inside it uses this rank's weights only, and $x$ is
# the same on all ranks.

# %%
task(41, "shard_tensors")

# %%
# exercise: minigen.parallel.sharding.shard_tensors
from collections.abc import Mapping

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor


def shard_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, rank: int, num_ranks: int
) -> dict[str, StoredTensor]:
    """Return the rank's shard of every tensor, still in the file; only these bytes are read.

    The bias of a row split is added once, so only rank 0 has it.
    """
    raise NotImplementedError  # your turn


# %%
my_cut = check(41, shard_tensors=shard_tensors)
task(41, "run_split_layer")

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.run_split_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer on one rank; its `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x and the norms, and all return the result of the whole layer.
    """
    raise NotImplementedError  # your turn


# %%
my_layer = check(41, run_split_layer=run_split_layer)
with using(41, shard_tensors=my_cut):
    made = continue_split(checkpoint, 3, whole.tokenizer.encode(prompt), 4, run_layer=my_layer)
assert made == answer.token_ids[:4]
print("three threads continue:", whole.tokenizer.decode(made))
task(41, "run_parallel_layer")

# %% [markdown]
# The three threads above ran a model cut by `my_cut`, with all layers run by `my_layer`. Each is yours if it
# passed its check; if not, the cut is the package's and the layer the course's. Your cut also serves the
# engine with its three processes. Rank 0 takes yours, the others have the package's; if both cut alike,
# they make one model:
#
# ```python
# with using(41, shard_tensors=my_cut):
#     split = load_model(weights="float32", tensor_parallel_size=3)
# ```
#
# The stretch exercise changes the model, so that one message per layer is enough
# ([PaLM](https://arxiv.org/abs/2204.02311) was trained with such layers):
#
# $$x' = x + \sum_r \Big(\mathrm{Attention}_r\big(\mathrm{norm}(x)\big) +
# \mathrm{FFN}_r\big(\mathrm{norm}(x)\big)\Big)$$

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.run_parallel_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer whose attention and feed-forward both read x after `attention_norm`.

    Both results are added to x. As in `run_split_layer`, `layer` has some of the heads and a slice
    of the ffn, and all ranks return the result of the whole layer, here after one message.
    """
    raise NotImplementedError  # your turn


# %% [markdown]
# ## The course's and the package's versions
#
# They open here, each after yours has passed its check.

# %%
my_parallel = check(41, run_parallel_layer=run_parallel_layer)
reveal(41, fused_rows=my_rows, ring_all_reduce=my_ring, choose_all_reduce=my_choice)
reveal(41, shard_tensors=my_cut, run_split_layer=my_layer, run_parallel_layer=my_parallel)

# %% [markdown]
# ## A bug hunt
#
# In minigen rank 0 alone schedules, and tells the others every step. Other engines, such as SGLang,
# broadcast new requests to all ranks, and every rank decides by itself which ones run: rank 0 sends
# requests, and no decisions. All ranks have the same scheduler and see the same requests, so they decide
# alike. Or do they?
#
# **The report:** *each question alone gets a right answer. In the afternoon, when memory is full and
# requests are preempted, some answers are nonsense, and once a day the engine hangs, without
# an error.*
#
# `agreed_blocks` says how many blocks the pools have (a **pool** is a rank's blocks of the KV cache,
# chapter 22). Each rank calls it. It looks right, and is not. By hand, with blocks of 10 bytes: rank 0 has
# 300 bytes free and needs 240 of them to work in, so its pool gets 60 / 10 = 6 blocks. Rank 1 has 300 and
# needs 230, so its pool gets 70 / 10 = 7.
#
# Write a test that catches the mistake, then correct it, both in the next cell. This matters in practice:
# vLLM takes the least number of blocks that any of its workers (one process per device) can have
# ([`kv_cache_utils.py`](https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/kv_cache_utils.py)),
# SGLang the least free memory of all ranks
# ([`utils/common.py`](https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/utils/common.py)).

# %%
# hunt: minigen_course.ch41_tensor_parallel.hunt
import torch

from minigen.parallel.comm import Comm
from minigen_course.ch41_tensor_parallel.lesson import AgreedBlocks


def agreed_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of every rank's pool: as many as fit on all ranks.

    Each rank calls it with its own free memory, and with the part of it that the rank needs as
    working memory. A block takes the same number of bytes on every rank.
    """
    free = comm.all_gather(torch.tensor([free_bytes]))
    left = int(free.min()) - working_bytes
    return left // block_bytes


def test_agreed_blocks(agreed_blocks: AgreedBlocks) -> None:
    """Assert what holds for every right `agreed_blocks`, and does not hold for the one above.

    `on_ranks(agreed_blocks, [(free, working), ...], block_bytes)` of
    minigen_course.ch41_tensor_parallel.lesson runs one rank per pair, and returns the result of
    each.
    """
    raise NotImplementedError  # your turn


# %%
hunt(41, test=test_agreed_blocks, mended=agreed_blocks)
room = on_ranks(agreed_blocks, [(300, 240), (300, 230)], 10)  # rank 0 samples: it needs more
print("blocks by rank:", room)
parted = serve_on_ranks([[5, 3, 8], [9, 1, 4], [2, 6, 6], [1, 1, 7]], room)
picture(
    rank_batches(parted),
    "The batches of two ranks by step, with the tokens of each request. Orange frames: a request "
    "runs on one rank, and not on the other. The last row is the tokens that the rank sends.",
    number="41.11",
)
five = [[5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1], [7, 7, 7, 2, 2, 2, 3]]
room = on_ranks(agreed_blocks, [(400, 270), (400, 260)], 10)
served, alike = serve_on_ranks(five, room), serve_on_ranks(five, [40, 40])
wrong = sum(mine != right for mine, right in zip(served.answers[0], alike.answers[0], strict=True))
print(f"five others, with {room} blocks: {wrong} wrong answers, stuck: {served.stuck}")
for step, (on_0, on_1) in enumerate(served.batches):
    if on_0 != on_1:
        sizes = " and ".join(str(message_size(each)) for each in (on_0, on_1))
        print(f"step {step}, request: tokens {on_0} and {on_1}, sent: {sizes} tokens")

# %% [markdown]
# Each row is a request, each column a step, and the number in a box is how many tokens the request
# computes in that step (pale: several; the last row is the batch, filled up to a multiple of 8, as
# some engines do). The orange frames are where the two ranks differ. Both ranks preempted the
# same requests until then: four of them need 8 blocks in step 2, three need 9 in step 6, two need
# 8 in step 10, and that is too many for 6 blocks and for 7. Request 2 returns on rank 1 only,
# because rank 1 has one block more: a block holds 4 tokens here, so the 13 tokens of request 1
# need 4 blocks and the 9 of request 2 need 3, and rank 0 has only 6. (Requests return in order,
# so request 3, for which 2 blocks would be enough, waits behind request 2.) (An empty place is a
# request that is done, as request 0 after its 12 tokens, or preempted. One that returns computes
# all again: request 1 its prompt of 3 and its 10 tokens.) Now their messages have different
# sizes: 13 tokens fill up to 16, and 22 to 24. In this simulation both wait for ever; a real
# library may also stop with an error.
#
# The five others are worse off: there the filled-up sizes happen to be the same, and sums are made
# of numbers that belong to different requests. (The model here is a toy: each rank makes one number
# for each request of its batch, in the batch's order. The all-reduce adds them place by place, and
# each sum gives a next token.)
#
# By hand, step 14: rank 0 computes a token of request 3 and one of request 4, rank 1 only one of request
# 4, and both fill up to 8. So rank 0's first number belongs to request 3 and rank 1's to request 4, and
# they are added. Rank 0's second number, request 4's, gets nothing added, so both answers are wrong. It
# began in step 9, where only rank 1 ran request 3: its token there is made from one rank's numbers, and
# is wrong. (Rank 1 is then one token of request 3 ahead. Step 12 shows it: when request 3 comes back,
# rank 0 computes 13 tokens of it and rank 1 computes 14, so from here on request 3's sums on rank 0 are
# wrong, too, also where the batches are equal. So rank 1 is done with it one step earlier, before step 14.
# The steps that are not printed have equal batches.) No rank gets an error: an all-reduce does not know
# whose numbers it adds. (Once your `agreed_blocks` is mended, the picture shows what should be, and no
# such step is printed.)
#
# ## Claims
#
# What papers and guides say, beside what this notebook found. The outcomes are computed from the
# numbers.

# %% jupyter={"source_hidden": true}
nvlink = LINKS["NVLink 4"]
of_latency = nvlink.all_reduce_seconds(0, 8) / nvlink.all_reduce_seconds(message, 8)
own_heads = len(span(whole.config, "kv_heads", 0, 3)) // whole.config.head_dim
one_stage = pipeline_ends(8, 1, alone / 8, nvlink.latency)[-1][-1]
verdicts(
    "41",
    Claim(
        "Tensor parallelism takes one synchronisation per layer",
        f"{sums_a_layer:.0f} all-reduces per layer were counted, and {counts['all_reduced']} per step",
        within(sums_a_layer, 1, 1),
        "attention's sum must be whole before the feed-forward's norm reads it; Megatron-LM "
        "(Shoeybi et al. 2019) counts two, too",
    ),
    Claim(
        "The KV cache is replicated on every rank",
        f"{own_heads} of {whole.config.kv_heads} KV heads on each of 3 ranks",
        holds(own_heads == whole.config.kv_heads),
        "it is cut by heads; a head is repeated only where ranks outnumber KV heads",
    ),
    Claim(
        "Eight devices are eight times as fast",
        ", ".join(f"{found[8]:.1f}x by {name}" for name, found in gains.items())
        + " (70B, one sequence, by the cost model; the bounds are ± 10 % for the fastest link)",
        within(gains["NVLink 4"][8], 7.2, 8.8),
        "reading is divided among the ranks, messages are not",
    ),
    Claim(
        "What counts in a link is its bandwidth",
        f"{of_latency:.0%} of a decode step's all-reduce by NVLink is latency (70B, one sequence, by "
        f"the cost model); here 1,024 times the bytes took {mark(times[2][2**20] / times[2][1024])} "
        "times as long",
        holds(of_latency < 0.5),
        "it counts for prompts; a decode step's messages are small, and cost their latency",
    ),
    Claim(
        "Pipeline parallelism lowers the latency of a token",
        f"a token takes {1e6 * (one_stage - alone):.0f} µs more on 8 stages over NVLink than on one "
        "card (70B, one sequence, by the cost model)",
        holds(one_stage < alone),
        "a token visits all stages, one after another, and pays the transfers on top",
    ),
)

# %% [markdown]
# ## Summary
#
# - A matrix can be cut by columns, which gives each rank some outputs, or by rows, which gives each
#   rank a part of every sum. A column split followed by a row split needs one message.
# - Between a row split and its all-reduce only linear operations are allowed.
# - A transformer layer takes two all-reduces: one after attention, one after the feed-forward
#   layer. KV heads, and so the KV cache, are cut with the query heads.
# - For an all-reduce, a ring and a tree move the same bytes in all. The ring spreads them evenly and
#   keeps every link busy, so its bytes take less time; the tree takes fewer turns (from four ranks on).
#   Decode messages are small and pay latency; prompts pay bytes.
# - On GPUs NCCL's all-reduces are kernels in a queue of the GPU, so a CPU need not wait for each
#   of them, and a CUDA graph can hold them. A cut model launches as many kernels of its own as
#   before, each for less work, and the all-reduces besides.
# - Tensor parallelism divides the reading of the weights, and adds messages that do not shrink with
#   more ranks. So it wants the fastest links, and usually stays inside a node.
# - A pipeline sends little, and makes no decode step of a single sequence faster. When a batch passes
#   once, as a prompt does, its stages idle in a bubble of $(p-1)/(m+p-1)$ of the time, if all take
#   equally long. In decode, with as many micro-batches as stages, only transfers let them idle.
# - On one machine, ranks share cores and memory. Where there are fewer cores than ranks, much of the
#   extra time is waiting for one another, not moving numbers.
# - Ranks that decide for themselves must decide from the same numbers, or they add up what does not
#   belong together, without an error.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A layer has 12 query heads, 4 KV heads and a feed-forward layer of 3,000 units.
# Over which numbers of ranks can it be cut?</summary>
# The number must divide 12 and 3,000, and must either divide 4 or be a multiple of it. 1, 2, 4 and
# 12 do all that. 3 and 6 divide 12 and 3,000, but neither divides 4 nor is a multiple of it. (12 ranks
# have each KV head three times.)</details>
#
# <details><summary>2. An all-reduce of 32 kB on 4 ranks, with 10 µs of latency and 10 GB/s: ring or
# tree?</summary>
# Ring: 6 turns of 10 + 0.8 µs (8 kB at 10 GB/s) are 64.8 µs. Tree: 4 turns of 10 + 3.2 µs are 52.8
# µs. The tree.</details>
#
# <details><summary>3. A prompt passes a pipeline of 8 stages, which should be idle for at most 10 % of
# the time. How many micro-batches does it need?</summary>
# 7 / (m + 7) must be at most 0.1, so m + 7 must be at least 70, and m at least 63.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/linear.py)** and
#   **[SGLang](https://github.com/sgl-project/sglang)** name the two splits in their code:
#   `ColumnParallelLinear` and `RowParallelLinear`, after Megatron-LM.
#   **[TGI](https://github.com/huggingface/text-generation-inference)** and
#   **[DeepSpeed](https://www.deepspeed.ai/tutorials/automatic-tensor-parallelism/)** cut in the same
#   places.
# - NCCL's ring and tree have a fixed cost, and its tree has, inside a machine, as many turns as its ring. For
#   decode's small messages,
#   [vLLM](https://github.com/vllm-project/vllm/blob/main/vllm/distributed/device_communicators/custom_all_reduce.py),
#   SGLang and **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/parallel-strategy.html)** have
#   kernels of their own, in which each GPU reads or writes the others' memory over NVLink: one or
#   two turns instead of many. TensorRT-LLM and vLLM can also add the residual and compute the
#   norm in the same kernel.
# - Switches can add: with NVLink SHARP, arithmetic in NVIDIA's NVLink switches, an all-reduce is one
#   trip to the switch and back. Where the NVSwitch is of the third generation or later (H100 and on),
#   NCCL may choose this by itself, under the name NVLS. Its plan has one latency for it, 25 µs, and
#   only the protocol Simple, so it pays for large messages.
# - **[Sequence parallelism](https://arxiv.org/abs/2205.05198)** uses the fact that an all-reduce is a
#   reduce-scatter and an all-gather: the reduce-scatter follows a row split, the all-gather comes before
#   the next column split, and between them each rank computes the norm of an $n$-th of the tokens.
# - Where all query heads share one compressed key (DeepSeek's multi-head latent attention), every rank would
#   hold all of the cache. SGLang and vLLM can give each rank requests of its own in attention,
#   and split the rest. [SGLang](https://docs.sglang.io/docs/advanced_features/dcp.md) and vLLM
#   can also cut such a cache by tokens: context parallelism in decode.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/docs/multi-gpu.md)** cuts between
#   layers by default. At the time of writing, its `--split-mode tensor` cuts matrices and counts as
#   experimental; the older `row` is deprecated. **[Ollama](https://github.com/ollama/ollama)**, which
#   builds on the same library, spreads layers.
#
# ## Further reading
#
# - [Megatron-LM](https://arxiv.org/abs/1909.08053), Shoeybi et al. 2019: section 3 has the two splits
#   and the two all-reduces per layer. The code is in
#   [Megatron Core](https://github.com/NVIDIA/Megatron-LM).
# - [Bandwidth optimal all-reduce algorithms for clusters of
#   workstations](https://doi.org/10.1016/j.jpdc.2008.09.002), Patarasuk and Yuan 2009: the ring.
# - [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022:
#   which cut when, derived from bytes and FLOPs.
# - [GPipe](https://arxiv.org/abs/1811.06965), Huang et al. 2019: micro-batches and the bubble.
# - [Ring Attention](https://arxiv.org/abs/2310.01889), Liu et al. 2023: context parallelism, with
#   keys and values that travel round a ring.
# - [vLLM: parallelism and scaling](https://docs.vllm.ai/en/latest/serving/parallelism_scaling/), and
#   the same for [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/parallel-strategy.html):
#   the flags, and the makers' advice.
#
# **Next:** [chapter 42](42_pipeline.ipynb) cuts between layers, tokens and requests, and says which cut when.

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
# # 41 · One model on several devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/41_tensor_parallel.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/41_tensor_parallel.ipynb)
#
# So far one memory held the model, and one processor read it. When a model does not fit, or is read
# too slowly, it is cut, and several devices work on the same token at the same time. Each of them
# is a **rank**, numbered from 0. This chapter cuts a model by hand, then runs it as three processes
# of this machine, counts every message between them, and asks what messages cost.
#
# **Afterwards you can** split a layer over ranks, say where they must talk and where not, predict
# what several devices gain from what connects them, and find out why ranks fall out of step.
#
# **You need** chapter 15 (the forward pass), chapter 17 (a decode step reads all weights), and
# chapter 24 (the scheduler). **Time:** about 50 minutes to read and try, about 60 for the
# exercises.
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
    on_ranks,
    serve_on_ranks,
    split_step_seconds,
)
from minigen_course.ch41_tensor_parallel.message_timing import time_all_reduces
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import (
    MACHINES,
    MODELS,
    SHAPES,
    ModelShape,
    config_of,
    prefill_step,
)
from minigen_course.lab.inspect_model import read_along
from minigen_course.lab.texts import ALICE

torch.manual_seed(41)
prompt, params = "The old lighthouse", SamplingParams(temperature=0, max_tokens=24)
chapter_map("several devices", "collectives", "weights")

# %% [markdown]
# ## A number that hurts
#
# One token of the model in float32 on this machine, and what the same machine would need for one
# token of a model with 70 billion weights.
#
# Predict: how long, if reading the weights is all that counts? Replace `None`. And would it fit?

# %%
guess_70b = predict("Seconds per token of a 70B model in bfloat16 here?", None, within=3)

# %%
whole = load_model(weights="float32")
ids = whole.tokenizer.encode(ALICE)[:24]
alone_seconds = read_along(whole, ids).step_seconds
shape = ModelShape.of(whole.config)
rate = 4 * shape.multiplied / alone_seconds  # bytes of weights that were read in a second

big, h100 = SHAPES["Llama-3-70B"], MACHINES["H100 SXM"]
measured("a step of one token", 1e3 * alone_seconds, "ms")
measured("so weights are read at", rate / 1e9, "GB/s")
guess_70b.compare(2 * big.multiplied / rate, "s, had it the memory", measured=True)
print(f"on an H100: {2e3 * big.multiplied / h100.bandwidth:.0f} ms, if the model's", end=" ")
print(f"{2 * big.parameters / 1e9:.0f} GB fitted into its {h100.memory / 1e9:.0f} GB")

# %% [markdown]
# Two devices hold twice as much. Whether they are also faster depends on the cut. Cut between
# layers, each device waits for the one before: more memory, but a token takes as long as ever. That
# is **pipeline parallelism**. Cut every layer *through*, and all devices read at the same time.
# That is **tensor parallelism**, the subject of this chapter.
#
# ## The smallest version that works
#
# A linear layer is y = x Wᵀ. Checkpoints store W as [outputs, inputs]. It can be cut in two ways.
#
# Predict: y has 6 numbers per token. If rank 0 has the upper half of the stored rows, how many of
# them does it know? And if it has the left half of the stored columns?

# %%
guess_rows = predict("Half of the rows: how many of 6 numbers are known?", None)
guess_columns = predict("Half of the columns: how many of 6 numbers are known?", None)

# %%
x, weight = torch.randn(3, 8), torch.randn(6, 8)
y = x @ weight.T

some_outputs = [x @ rows.T for rows in weight.chunk(2, dim=0)]
torch.testing.assert_close(torch.cat(some_outputs, dim=-1), y)
print("each rank has", list(some_outputs[0].shape), "of", list(y.shape), "and side by side: y")

inputs = x.chunk(2, dim=1)
parts_of_sums = [a @ b.T for a, b in zip(inputs, weight.chunk(2, dim=1), strict=True)]
torch.testing.assert_close(sum(parts_of_sums), y)
print("each rank has", list(parts_of_sums[0].shape), "of", list(y.shape), "and added up: y")
guess_rows.compare(some_outputs[0].shape[1])
known = [torch.allclose(part, y, atol=0.1) for part in parts_of_sums]
guess_columns.compare(6 * sum(known))

# %% [markdown]
# With half of the columns no number is known: each rank has a part of every sum. The field calls
# the first a **column split** and the second a **row split**, since it writes y = x W, with W the
# other way round. They fit together:
#
# - A column split needs all of x, and gives each rank some outputs. No message.
# - A row split needs some inputs, just those that a column split gave. It ends in numbers that must
#   be added up over all ranks, for every rank: an **all-reduce**.
#
# So a feed-forward layer is cut like this: `gate` and `up` by columns, SwiGLU on what the rank has,
# `down` by rows, then one all-reduce. Here ranks are threads, and `comm` is how they talk.

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
        torch.testing.assert_close(found, right)
print("2 ranks and 4 ranks: every one ends with the whole layer's output, after one message")

# %% [markdown]
# ## Why it may go wrong
#
# The order is not free. Cut `gate` by *rows* instead: each rank then has a part of every sum.
#
# Predict: may each rank apply SiLU to its part, and the sum come later? Write "yes" or "no".

# %%
guess_silu = predict("SiLU first, the sum later?", None)

# %%
from torch.nn import functional

parts = [a @ b.T for a, b in zip(inputs, gate.chunk(2, dim=1), strict=True)]
curve_of_sum = functional.silu(sum(parts))
sum_of_curves = sum(functional.silu(part) for part in parts)
print(f"off by up to {(curve_of_sum - sum_of_curves).abs().max():.2f}")
guess_silu.compare("yes" if torch.allclose(curve_of_sum, sum_of_curves, atol=1e-3) else "no")

# %% [markdown]
# The curve of a sum is not the sum of curves. Between a row split and its all-reduce there may be
# nothing but what is linear: no SiLU, no norm, and no residual, which would be added once a rank.
#
# Attention needs no new idea. A head is some outputs of Q, K and V; it computes its scores and its
# mixture without any other head; and `out` takes heads as inputs. So Q, K and V are cut by columns,
# in whole heads, and `out` by rows. The KV cache is cut with them: a rank keeps the keys and values
# of its own heads. The embedding and the output head are cut by the vocabulary.
#
# ## The package's version
#
# A plan as a table, applied from outside: the model's own code, of chapter 15, is not touched. A
# rank builds a smaller model of its share, and what must be summed is wrapped.

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

# %% [markdown]
# ## Who holds what
#
# Choose a model and a number of ranks. Blue is cut by columns, pale blue by rows; orange is a
# message that all ranks wait for.
#
# Predict: how many ranks, at most 9, can share this chapter's model? It has 9 query heads, 3 KV
# heads and 1,536 units.

# %%
guess_ranks = predict("How many ranks at most?", None)


# %%
def cut_model(model, ranks):
    config = config_of(model)
    check_ranks(config, {}, "float32", ranks)
    return who_holds_what(config, ranks)


explore(
    cut_model,
    "A column for each rank with its heads, units and tokens, and orange bars for messages.",
    "41.1",
    model=list(MODELS),
    ranks=[3, 2, 4, 8],
)

# %% [markdown]
# Heads and units must be dealt out evenly: that leaves few counts. What is the price in memory?
# Norms are on every rank. And where there are more ranks than KV heads, each KV head is on several
# ranks.

# %%
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

# %% [markdown]
# ## Three processes
#
# Now in earnest. `tensor_parallel_size=3` starts two more processes; with this one they are three.
# They have three kinds of messages, and all ranks take part in each:
#
# - the all-reduce: every rank gets the sum of what all have;
# - the **all-gather**: every rank gets the pieces of all, side by side;
# - the **broadcast**: every rank gets what rank 0 has.
#
# Between CPUs a library named **gloo** carries them, between GPUs NCCL.
#
# Predict: how many messages does one step take, with 30 layers?

# %%
guess_messages = predict("Messages in one step?", None, within=1.1)

# %%
split = load_model(weights="float32", tensor_parallel_size=3)
print(split.describe()["ranks"])
with split.record() as recorder:
    answer = split.generate(prompt, params)
assert answer.token_ids == whole.generate(prompt, params).token_ids
print("the same 24 tokens:", answer.text)

steps = messages_of_steps(recorder.events)
counts = Counter(each.kind.value for each in steps[-1])
assert all(Counter(each.kind.value for each in step) == counts for step in steps)
layers = whole.config.num_layers
print(f"in every one of {len(steps)} steps:", dict(counts))
guess_messages.compare(counts.total())
sums_a_layer = (counts["all_reduced"] - 1) / layers
print(f"that is {sums_a_layer:.0f} all-reduces a layer, and one for the embedding")
quickest = min(steps, key=lambda step: step[-1].time_ns - step[0].time_ns)
picture(
    messages_in_time(quickest),
    "Three lanes over time: two broadcasts, many short all-reduces, one gather at the end.",
    number="41.2",
)

# %% [markdown]
# The picture shows one step from rank 0's side. Rank 0 owns the scheduler and decides which
# requests run; two broadcasts tell the others. The embedding's all-reduce is a sum, too: one rank
# has the token's vector, the others add zeros. The all-gather at the end puts the logits side by
# side, for rank 0 to sample from.
#
# A bar is as long as rank 0 was inside the message, and much of that is waiting: an all-reduce ends
# only after the slowest rank has come. The solid end of a bar is as long as the shortest message of
# its kind in this step, so moving the numbers takes no more than that. The pale part is waiting. On
# this machine the ranks also take turns on the same cores.
#
# ## What a message costs
#
# Let two processes, and then three, do nothing but sum: tensors from 256 bytes to 4 MB.
#
# Predict: two ranks, 1,024 times the bytes (1 MB instead of 1 kB): how many times as long?

# %%
guess_bytes = predict("1,024 times the bytes: how many times as long?", None, within=3)

# %%
times = time_all_reduces((2, 3))
links = {each: fit_link(f"{each} ranks here", found, each) for each, found in times.items()}
picture(
    message_times(times, links),
    "Points and lines: flat for small messages, then rising with the bytes.",
    number="41.3",
)
for num_ranks, found in times.items():
    print(f"{num_ranks} ranks:")
    measured("  an all-reduce of 1 kB", 1e6 * found[1024], "µs")
    measured("  an all-reduce of 1 MB, 1,024 times the bytes", 1e6 * found[2**20], "µs")
    measured("  the line through all of them: latency", 1e6 * links[num_ranks].latency, "µs")
    measured("  and bandwidth", links[num_ranks].bandwidth / 1e9, "GB/s")
guess_bytes.compare(times[2][2**20] / times[2][1024], "times", measured=True)

# %% [markdown]
# A small message costs its **latency**: that it is sent at all. A large one costs its bytes. The
# lines are a model with just two numbers, latency and bandwidth. gloo's ranks stand in a **ring**;
# at each of $2(n-1)$ turns every rank passes an n-th of the tensor on:
#
# $$t_\text{ring} = 2(n-1)\left(\alpha + \frac{m}{n\,\beta}\right) \qquad\qquad
# t_\text{tree} = 2\lceil\log_2 n\rceil\left(\alpha + \frac{m}{\beta}\right)$$
#
# The second formula is another way: a **tree** adds up all of the tensor in pairs, and sends the sum
# back. It has fewer turns, but each moves all bytes. The model below takes whichever is faster:
# $t = \min(t_\text{ring}, t_\text{tree})$. Libraries choose like this, too, by the size at hand. But
# not every library has both ways everywhere: inside one machine the tree of NCCL is a chain, with as
# many turns as a ring. Engines have kernels of their own for small messages there (at the end of
# this chapter). So on links inside a machine read the ring as the careful estimate, and the tree as
# what good kernels can reach.
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $n$ | ranks | `num_ranks` |
# | $\alpha$ | latency of a turn, in seconds | `Link.latency` |
# | $\beta$ | bandwidth, in bytes per second | `Link.bandwidth` |
# | $m$ | bytes of the tensor | `num_bytes` |
#
# When one token is decoded, messages are small: as many numbers as x has. So a decode step pays
# latency, again and again: at every turn of each of its 2 × layers + 1 all-reduces. When a prompt
# is read, each message carries all of its tokens, and bytes count.
#
# ## What is left of the gain
#
# Now put it together. On n devices each reads an n-th of the weights: that time falls. The time of
# the messages does not. Choose a model, a card, and how many sequences decode at once. There are
# three connections: NVLink and PCIe inside one machine, Ethernet between machines. Their bandwidths
# are the data sheets'. Their latencies are assumptions: 2 and 5 µs lie in the range of constants by which
# [NCCL plans](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc), and 30 µs is the
# order of a TCP message between two machines. Nothing here was measured on such links.
#
# Predict: 8 cards with NVLink, 70B, one sequence: how many times as fast as one card (if it
# fitted)?

# %%
guess_gain = predict("8 cards: how many times as fast as one?", None)


# %%
def gain(model, card, at_once):
    return speed_ups(SHAPES[model], MACHINES[card], list(LINKS.values()), batch=at_once)


explore(
    gain,
    "Speed-up against ranks: NVLink near the line of no messages, Ethernet hardly above one.",
    "41.4",
    model=["Llama-3-70B", *(name for name in SHAPES if name != "Llama-3-70B")],
    card=list(MACHINES),
    at_once=(1, 256, 1, 1),
)

ranks = (1, 2, 4, 8)
gains = {name: allowed(big, h100, link, ranks, 1, 1024) for name, link in LINKS.items()}
tokens = 2048
of_prompt = prefill_step(big, tokens, weight_bits=16)
num_sums, message = 2 * big.layers + 1, 2 * big.hidden
work, _ = split_step_seconds(big, h100, LINKS["NVLink 4"], 8, 1, 1024)
alone, _ = split_step_seconds(big, h100, LINKS["NVLink 4"], 1, 1, 1024)
print(f"8 ranks: {num_sums} all-reduces of {message / 1e3:.0f} kB")
for name, link in LINKS.items():
    ways = {"ring": link.ring_seconds(message, 8), "tree": link.tree_seconds(message, 8)}
    by = [
        f"{way} {1e6 * t:6.1f} µs, {alone / (work + num_sums * t):.2f}x" for way, t in ways.items()
    ]
    print(f"{name:<20}", "   ".join(by))
print("\nthe faster one        decode: 2 ranks   4 ranks   8 ranks    8 ranks, a prompt of 2,048")
for name, link in LINKS.items():
    sums = num_sums * link.all_reduce_seconds(tokens * message, 8)
    prompt_gain = of_prompt.seconds(h100) / (of_prompt.seconds(h100) / 8 + sums)
    found = "".join(f"{gains[name][each]:>9.1f}x" for each in ranks[1:])
    print(f"{name:<20} {' ' * 6}{found} {prompt_gain:>20.1f}x")
guess_gain.compare(round(gains["NVLink 4"][8], 1), "times by NVLink")

# %% [markdown]
# For these small messages the tree is the faster way, and on Ethernet the way even decides whether 8
# ranks are faster or slower than one. So tensor parallelism lives inside a machine, where links are
# fast. Between machines engines use other cuts:
#
# | cut | what a rank holds | messages | use it when |
# |---|---|---|---|
# | tensor parallel | a part of every layer | 2 all-reduces per layer | a token must be faster, links are fast |
# | pipeline parallel | some of the layers | one vector per token and border | the model does not fit, links are slow |
# | data parallel | the whole model | none between steps | there are more requests than one copy serves |
# | expert parallel | some experts of each layer | two all-to-alls per layer | the model is a mixture of experts |
#
# A pipeline makes no single token faster, and a device without a batch of its own to work on stands
# idle: that is a **bubble**. It needs as many batches under way as there are devices.
#
# ## The measurement again
#
# The same step as at the beginning, now on three ranks of this one machine. They share its cores
# and its memory, and the one process had all cores already, so reading at the same time gains
# nothing.
#
# Predict: how many times as long is the split model's step here?

# %%
guess_split = predict("Three ranks on this machine: how many times as long?", None, within=1.5)

# %%
with split.record() as recorder:
    reading = read_along(split, ids[:12])
split.close()
measured("a step of one process", 1e3 * alone_seconds, "ms")
measured("a step of three", 1e3 * reading.step_seconds, "ms")
guess_split.compare(reading.step_seconds / alone_seconds, "times", measured=True)
in_messages = sorted(
    sum(each.counts["duration_ns"] for each in step if each.kind.value == "all_reduced")
    for step in messages_of_steps(recorder.events)
)
inside = in_messages[len(in_messages) // 10] / 1e9
moving = counts["all_reduced"] * links[3].ring_seconds(4 * whole.config.hidden, 3)
measured("rank 0 was inside its all-reduces for", 1e3 * inside, "ms")
measured("  which they take if ranks do nothing else", 1e3 * moving, "ms")
measured("  so it waited for the other ranks for about", 1e3 * (inside - moving), "ms")
measured(
    "and it computed its third, and waited for a core, for",
    1e3 * (reading.step_seconds - inside),
    "ms",
)

# %% [markdown]
# Compare the last three lines. Where waiting is the largest, most of the extra time is not the
# messages: the ranks share the cores, and one that has no core just now keeps the others waiting,
# at every one of the sums. What a split costs can be seen here. What it gains needs a device for
# each rank. The nearest to that on one machine is a core for each rank: compare one rank that may
# use one core with two ranks that may use one core each. Here are a feed-forward layer's two
# matrices, too large for a cache, cut as above.

# %%
tall, wide = torch.randn(16384, 2048), torch.randn(2048, 16384)


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
# The gain is at most 2, and less where one core already gets most of what memory gives, or where
# another program uses the second core. Two devices have two memories, so there the first limit
# falls away.
#
# On several machines `torchrun`, which comes with PyTorch, starts the ranks, and they find each
# other over the network. On each of three, with the first one's name for HOST:
#
# ```
# torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#     -m minigen generate --tensor-parallel-size 3 "The old lighthouse"
# ```
#
# ## Your turn
#
# Cut a checkpoint by hand, and then run a whole layer as one rank does.

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

# %%
task(41, "run_split_layer")

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.run_split_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Comm


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Comm,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer on one rank; its `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x and the norms, and all return the result of the whole layer.
    """
    raise NotImplementedError  # your turn


# %%
my_layer = check(41, run_split_layer=run_split_layer)
with using(41, shard_tensors=my_cut):
    made = continue_split(checkpoint, 3, whole.tokenizer.encode(prompt), 8, run_layer=my_layer)
assert made == answer.token_ids[:8]
print("three threads continue:", whole.tokenizer.decode(made))
reveal(41, shard_tensors=my_cut, run_split_layer=my_layer)

# %% [markdown]
# That was a model of three ranks, cut by `my_cut`, with all layers run by `my_layer`. Each is yours
# if it passed its check, and the package's own if not. Your cut also serves the engine with its
# three processes. Rank 0 takes yours, the others have the package's; if both cut alike, they make
# one model:
#
# ```python
# with using(41, shard_tensors=my_cut):
#     split = load_model(weights="float32", tensor_parallel_size=3)
# ```
#
# ## A bug hunt
#
# In minigen rank 0 alone schedules, and tells the others every step. Other engines send requests to
# all ranks, and have every rank decide by itself who runs: no step must wait for rank 0's word. All
# ranks have the same scheduler and see the same requests, so they decide alike. Or do they?
#
# **The report:** *each question alone is answered rightly. In the afternoon, when memory is full
# and requests are preempted, some answers are nonsense, and once a day everything stands still,
# without an error.*
#
# `agreed_blocks` says how many blocks the pools have. Each rank calls it. It looks right, and is
# not. Pin it by a test, then mend it, here in this cell. It happens: vLLM therefore takes the least
# number of blocks that any of its workers can have, SGLang the least free memory of all ranks.

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
    "Batches of two ranks by step: a request is there on one rank, and not on the other.",
    number="41.5",
)
five = [[5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1], [7, 7, 7, 2, 2, 2, 3]]
room = on_ranks(agreed_blocks, [(400, 270), (400, 260)], 10)
served, alike = serve_on_ranks(five, room), serve_on_ranks(five, [40, 40])
wrong = sum(mine != right for mine, right in zip(served.answers[0], alike.answers[0], strict=True))
print(f"five others, with {room} blocks: {wrong} wrong answers, stuck: {served.stuck}")

# %% [markdown]
# The orange frames are what appears. Both ranks preempted the same requests, and one returns on one
# rank only, which has one block more. Now their messages have different sizes, and both wait for
# ever. The five others are worse off: there the sizes happen to be the same (engines fill batches
# up to a few sizes), and sums are made of numbers that belong to different requests. No rank gets an
# error: an all-reduce does not know whose numbers it adds. (Once your `agreed_blocks` is mended,
# the picture shows what should be.)
#
# ## What the production engines do beyond this
#
# - **vLLM** and **SGLang** name the two splits in their code: `ColumnParallelLinear`,
#   `RowParallelLinear`, `VocabParallelEmbedding`, after Megatron-LM. **TGI** and **DeepSpeed** cut
#   in the same places.
# - NCCL is made for large messages. For the small ones of decode vLLM, SGLang and **TensorRT-LLM**
#   have kernels of their own, in which each GPU reads its neighbours' memory over NVLink: one turn
#   instead of many. TensorRT-LLM also adds the residual and computes the norm in the same kernel.
# - Switches can add: with NVLink SHARP an all-reduce is one trip to the switch.
# - **Sequence parallelism** sends halves: a reduce-scatter behind a row split, an all-gather before
#   the next column split, and the norms between on an n-th of the tokens.
# - Where all query heads share one compressed key (DeepSeek's MLA), every rank would hold all of
#   the cache. SGLang and vLLM can give each rank other requests in attention, and split the rest.
# - **llama.cpp** and **Ollama** cut between layers by default; llama.cpp's `--split-mode row` cuts
#   matrices. Between machines, vLLM and others combine both cuts.

# %%
nvlink = LINKS["NVLink 4"]
of_latency = nvlink.all_reduce_seconds(0, 8) / nvlink.all_reduce_seconds(message, 8)
own_heads = len(span(whole.config, "kv_heads", 0, 3)) // whole.config.head_dim
verdicts(
    "41",
    Claim(
        "Tensor parallelism takes one synchronisation per layer",
        f"{sums_a_layer:.0f} all-reduces per layer were counted, and {counts['all_reduced']} per step",
        within(sums_a_layer, 1, 1),
        "attention's sum must be whole before the feed-forward's norm reads it, as in "
        "Megatron-LM (Shoeybi et al. 2019)",
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
        "reading is dealt out, messages are not",
    ),
    Claim(
        "What counts in a link is its bandwidth",
        f"{of_latency:.0%} of a decode step's all-reduce by NVLink is latency (70B, one sequence, by the "
        f"cost model); here 1,024 times the bytes took {mark(times[2][2**20] / times[2][1024])} times "
        "as long",
        holds(of_latency < 0.5),
        "it counts for prompts; a decode step's messages are small, and cost their latency",
    ),
)

# %% [markdown]
# **Next:** part 5. The engine gets a door: chapter 51 puts a server in front of it.

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
# # 42 · Stages, rings and replicas: which cut when
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/42_pipeline.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/42_pipeline.ipynb)
#
# Chapter 41 cut every matrix, and paid with two all-reduces per layer. Over a slow link they take longer than
# the computing that they save. And the number of KV heads, often 8, limits how many devices can share the
# cache of a prompt of a million tokens. So this chapter takes the other cuts apart. A **pipeline** gives each
# device some of the layers, a **[stage](../docs/glossary.md#stage)**, and cuts the batch into
# **[micro-batches](../docs/glossary.md#micro-batch)** that follow one another.
# **[Ring attention](../docs/glossary.md#ring-attention)** gives each device some of the tokens, and sends keys
# and values around. **Replicas** share nothing but the requests. In pipelines and rings, devices wait for each
# other. So the chapter draws which device waits for which, first for threads of this notebook, then for real
# processes, then for machines that you do not have.
#
# **Afterwards you can** measure a bubble and predict it, deal uneven layers out, cut a step into
# micro-batches, explain when decode has a bubble, merge partial attentions and balance a causal ring, and
# choose the cut for a model, a network and a load, by numbers.
#
# **You need** chapter 17 (the step-time model), chapter 24 (the scheduler), chapter 32 (online softmax) and
# chapter 41 (ranks, messages and their cost). **Time:** about 70 minutes to read and try, about 120 for the
# [exercises](../exercises/42_pipeline.ipynb).
#
# **Where we are:** one device → ranks that share every layer → **ranks that share layers, tokens or
# requests**.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill, decode | the slowest stage, links | L3 engine | `--pipeline-parallel-size` | idle time of the stages |
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
import torch

from minigen import SamplingParams
from minigen_course import (
    NOT_TESTED,
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
    task,
    verdicts,
    within,
)
from minigen_course.ch41_tensor_parallel.lesson import LINKS
from minigen_course.ch42_pipeline import figures as draw
from minigen_course.ch42_pipeline import lesson
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.cost_model import MACHINES, MODELS, SHAPES, ModelShape, config_of
from minigen_course.lab.texts import ALICE

torch.manual_seed(42)
whole = load_model(weights="float32")
words = whole.tokenizer.encode(ALICE)
texts = [words[64 * each : 64 * each + 64] for each in range(8)]
prompts = [each[:16] for each in texts]
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
own_answers = [each.token_ids for each in whole.generate(prompts, greedy, progress=False)]
chapter_map("several devices", "scheduler", "runner")

# %% [markdown]
# ## A number that hurts
#
# The smallest pipeline: this notebook's model in two halves, each run by a thread of its own, on a core of
# its own. (Torch computes outside of Python's lock, so threads do use several cores. A thread is a rank
# here; real processes come later.) The load is eight texts of 64 tokens, for which the model computes the
# logits of every token, all in one batch.
#
# Predict: what percentage of the time is a stage idle? And how many times as fast are two halves as one
# thread that has the whole model? Replace `None`. (Numbers in ⟨ ⟩ are measured on this machine, so yours
# will differ.)

# %%
guess_idle = predict("Per cent of the time that a stage is idle?", None, within=1.3)
guess_faster = predict("Two stages: how many times as fast as one?", None, within=1.3)

# %%
num_layers = whole.config.num_layers
everything = [range(num_layers + 1)]  # the number behind the last layer is the output head
halves = [range(num_layers // 2), range(num_layers // 2, num_layers + 1)]
lesson.run_stages(lesson.cut_model(whole, everything), [texts[:1]])  # the first pass is slower
right, alone = lesson.run_stages(lesson.cut_model(whole, everything), [texts])
found, one_batch = lesson.run_stages(lesson.cut_model(whole, halves), [texts])
assert torch.equal(found[0], right[0])
busy = [one_batch.busy(stage) for stage in range(2)]
measured("one stage", 1e3 * alone.seconds, "ms")
measured("two stages, one after the other", 1e3 * one_batch.seconds, "ms")
print(f"stage 0 computes for {mark(1e3 * busy[0], 'ms')}, stage 1 for {mark(1e3 * busy[1], 'ms')}")
first_idle = 1 - sum(busy) / 2 / one_batch.seconds
guess_idle.compare(100 * first_idle, "%", measured=True)
guess_faster.compare(alone.seconds / one_batch.seconds, "times", measured=True)
picture(
    draw.timelines({"one batch": one_batch}),
    "Two stages that are threads, and one batch. Stage 1 waits for stage 0, and then stage 0 has "
    "nothing to do. Measured on this machine.",
    number="42.1",
)

# %% [markdown]
# The results are equal, to the last bit: cutting between layers changes no sum. And nothing was gained,
# because at any time one of the two is idle. With $p$ stages, $p - 1$ of $p$ are.
# [GPipe](https://arxiv.org/abs/1811.06965) (Huang et al. 2019) calls this naive model parallelism. The idle time
# is called the **[bubble](../docs/glossary.md#bubble)**.
#
# What was gained all the same is memory: each stage needs only its own layers, and later only their keys
# and values. A model of 810 GB (Llama 3.1 405B in bfloat16) does not fit into a machine with eight cards
# of 80 GB, but into two such machines. So the question is how to have this without the waiting.
#
# ## Your turn: measure a bubble
#
# First the measure. It will be used for everything that follows: for simulated pipelines, for threads, and
# for real processes.

# %%
task(42, "bubble")

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
my_bubble = check(42, bubble=bubble)
print(f"the two halves above: {mark(100 * my_bubble(one_batch.computing(), 2), '%')} idle")

# %% [markdown]
# ## The idea: micro-batches that follow one another
#
# While stage 1 computes the first texts, stage 0 could already compute the next ones. So the batch is cut
# into $m$ micro-batches. A stage begins a micro-batch when two things have happened: it has ended the one
# before, and the stage before has sent this one. That sentence is the whole simulator
# (`lesson.run_schedule`). What differs between schedules is the order of work alone.
#
# **By hand**, as in chapter 41. $p = 4$ stages, $m = 4$ micro-batches, each stage takes 1 for each. The first
# micro-batch leaves the last stage at 4, and one more follows at 5, 6 and 7. So the whole pass takes
# $m + p - 1 = 7$, a stage works for $m = 4$ of it, and idles for $p - 1 = 3$:
#
# $$\text{bubble} = \frac{p - 1}{m + p - 1} = \frac{3}{7} \approx 43\,\%$$
#
# | symbol | meaning | in GPipe | in [Megatron-LM](https://arxiv.org/abs/2104.04473) (2021) | in the code |
# |---|---|---|---|---|
# | $p$ | stages | $K$ partitions | $p$ | `num_stages` |
# | $m$ | micro-batches | $M$ | $m$ | `num_batches` |
# | $v$ | groups of layers per device (below) | | $v$ | `num_groups` |
# | $(p - 1) / (m + p - 1)$ | idle share of the time | $O\big(\frac{K-1}{M+K-1}\big)$ | | `bubble`, `least_bubble` |
# | $(p - 1) / m$ | idle time divided by *busy* time | | bubble time fraction | |
#
# Mind the last two rows. GPipe's fraction is a share of all time, and cannot exceed 1. Megatron's is a
# share of the ideal time. For 4 and 4 the first is 43 %, the second is 75 %. Both describe the same picture.
#
# Move the sliders. How many micro-batches do 8 stages need for a bubble below 10 %?


# %%
def passed(stages, micro_batches, slowest_stage):
    seconds = [0.010] * stages
    seconds[stages // 2] *= slowest_stage
    run = lesson.pass_once(seconds, micro_batches)
    return draw.timelines({f"{stages} stages, {micro_batches} micro-batches": run})


explore(
    passed,
    "A row per stage, a box per micro-batch, grey where a stage is idle. Each stage takes 10 ms, and "
    "the middle one as many times that as the last slider says. Simulated.",
    "42.2",
    stages=(1, 8, 1, 4),
    micro_batches=(1, 80, 1, 4),
    slowest_stage=(1.0, 3.0, 0.5, 1.0),
)
for stages, batches in ((4, 4), (4, 16), (8, 32), (8, 64)):
    run = lesson.pass_once([1.0] * stages, batches)
    found = my_bubble(run.computing(), stages)
    assert abs(found - lesson.least_bubble(stages, batches)) < 1e-9
    print(f"{stages} stages, {batches:>2} micro-batches: idle for {found:.1%} of the time")

# %% [markdown]
# GPipe's authors found the bubble negligible from $M \ge 4K$ on. By the formula it is then
# $(K - 1) / (5K - 1)$: 16 % for 4 stages, and nearly 20 % for many. Whether that is negligible is a matter
# of taste; the claims at the end have a number for it.
#
# The last slider shows what the formula hides: the slowest stage sets the pace for all. If one of 4 stages takes
# twice as long as the others, the four are idle for 75 % of the time with one micro-batch, for 43 % with 16, and
# for more than 37.5 % with any number: each of the other three computes for half as long as the slowest one,
# and is idle for the rest. Stages before the slowest one run ahead, and have their idle time at the end; those
# behind it wait between two micro-batches.
#
# ## Your turn: cut a step into micro-batches
#
# In an engine, a step is a list of sequences with their new tokens: one each if they decode, many for a
# chunk of a prompt. Here a sequence is not divided. Micro-batches should have about the same number of tokens,
# because an uneven micro-batch is like an uneven stage.
#
# (The chunks of one prompt may also follow each other through the stages. In a layer, a chunk needs the keys and
# values of earlier chunks in the same layer alone, and these lie on the same stage. The cost model at the end
# does that. minigen does not: it computes one chunk of a prompt per step, and ends each step before the next.)
# The eight texts will then pass again, on two threads, in two and in eight micro-batches. Predict: how
# many times as fast as one stage are two equal stages with eight micro-batches, if nothing else costs time?

# %%
guess_eight = predict("Two stages, eight micro-batches: times as fast?", None, within=1.3)
task(42, "micro_batches")

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
my_batches = check(42, micro_batches=micro_batches)
stages = lesson.cut_model(whole, halves)
of_halves, runs = {}, {}
for count in (1, 2, 8):
    run = one_batch  # from above
    if count > 1:
        parts = my_batches([len(each) for each in texts], count)
        _, run = lesson.run_stages(stages, [[texts[each] for each in part] for part in parts])
    runs[f"{count} micro-batches"], of_halves[count] = run, my_bubble(run.computing(), 2)
    print(
        f"{count} micro-batch{'es' * (count > 1)}: {mark(1e3 * run.seconds, 'ms')}, idle for ",
        end="",
    )
    print(
        f"{mark(100 * of_halves[count], '%')}; by the formula {lesson.least_bubble(2, count):.0%}"
    )
guess_eight.compare(round(2 * (1 - lesson.least_bubble(2, 8)), 2), "times, by the formula")
print(f"measured on two threads: {mark(alone.seconds / run.seconds, 'times')}")
picture(
    draw.timelines({name: run for name, run in runs.items() if name[0] in "28"}),
    "The same eight texts in micro-batches, on two threads. Measured on this machine.",
    number="42.3",
)
picture(
    draw.bubble_curves([2, 4, 8], measured=of_halves),
    "The idle share of the time by the number of micro-batches: by the formula (lines), simulated "
    "(dots), and measured on two threads (crosses).",
    number="42.4",
)

# %% [markdown]
# By the formula, 8/9 of the time of both stages is work, so they are 2 · 8/9 = 1.78 times as fast as one. Two
# things are missing to that. The stages are idle for more than 1/9 of the time. And they compute more slowly:
# each micro-batch reads the weights again, and two threads share one memory. The second makes the boxes of
# both stages longer. That is work, not idle time, so it is no bubble, and lifts no cross of Figure 42.4. The
# first lifts those of two and eight micro-batches: the stages are uneven. In Figure 42.3 one of them has finished long before the other.
# Which one, and why?
#
# ## Uneven stages
#
# The halves have 15 layers each, but the second one also has the output head. For a small model with a large
# vocabulary that is no detail. Predict: how many layers' work is SmolLM2-135M's output head?

# %%
guess_head = predict("The output head is worth how many layers?", None, within=1.3)

# %%
shape = ModelShape.of(whole.config)
work = lesson.layer_work(shape)
guess_head.compare(round(work[-1], 1), "layers")
for name in ("SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"):
    head = lesson.layer_work(SHAPES[name])[-1]
    print(f"{name}: the head is worth {head:.1f} of its {SHAPES[name].layers} layers")
task(42, "deal_layers")

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
my_dealt = check(42, deal_layers=deal_layers)
dealt = my_dealt(work, 2)
print(f"layers by stage, the head counted as one: {[len(each) for each in dealt]}")
picture(
    draw.stage_work(work, {"halves": halves, "dealt": dealt}),
    "The work of each stage in layers, for equal halves and dealt out by work. Orange is the head, grey "
    "is the time that a stage waits for the slowest one in each turn.",
    number="42.5",
)
eight = [[each] for each in texts]
uneven = runs["8 micro-batches"]  # of Figure 42.3
found, even = lesson.run_stages(lesson.cut_model(whole, dealt), eight)
assert torch.allclose(torch.cat(found), right[0], rtol=1e-3, atol=1e-3)
for name, run in (("halves", uneven), ("dealt", even)):
    print(f"{name:<7}{mark(1e3 * run.seconds, 'ms')}, ", end="")
    print(f"idle for {mark(100 * my_bubble(run.computing(), 2), '%')}")

# %% [markdown]
# So count a layer as 1, and the head by its work. (The embedding costs nothing: it looks up rows.) Engines
# let you do this by hand: vLLM's `VLLM_PP_LAYER_PARTITION` takes a list of layers per stage, and so does
# minigen's `pipeline_layers`, which real processes will try below. In a large model the head is small beside
# 80 layers, and the question becomes what to do with layers that do not divide.
#
# ## Decode: no bubble, unless you wait
#
# A prompt passes once, so its pipeline must fill and empty. In decode, a micro-batch comes back: its last
# token is the input of its next one. Let the stages be equal, transfers free, and call the time of a stage
# for a micro-batch a turn. A micro-batch can come back after $p$ turns at the earliest. In these, a stage can
# compute $p$ micro-batches, and has $m$. With $m < p$ it is idle for $p - m$ of $p$ turns. With $m \ge p$ it
# always has one to compute: the pipeline fills once and stays full. So over many steps:
#
# $$\text{bubble of decode} \to \max\Big(0,\; 1 - \frac{m}{p}\Big), \qquad
# \text{with a barrier per step: } \frac{p - 1}{m + p - 1}$$
#
# Uneven stages and transfers leave idle time even then.
#
# The barrier is what a simple engine has: schedule all, run all, sample all, then schedule again. Its pipeline
# runs empty at the end of each step. Predict: 4 stages, 4 micro-batches, 6 tokens each. How many times as long
# does it take with a barrier?

# %%
guess_barrier = predict("With a barrier: how many times as long?", None, within=1.1)

# %%
rolling = lesson.decode_tokens([0.010] * 4, 4, 6, 0.0005, barrier=False)
barrier = lesson.decode_tokens([0.010] * 4, 4, 6, 0.0005, barrier=True)
single = lesson.decode_tokens([0.010] * 4, 1, 6, 0.0005, barrier=False)
guess_barrier.compare(round(barrier.seconds / rolling.seconds, 2), "times")
picture(
    draw.timelines(
        {"no barrier": rolling, "a barrier per step": barrier, "one sequence": single},
        numbers="step",
    ),
    "Six decode steps on four stages, by the simulator, with the number of the step in each box. Above, "
    "each micro-batch enters again at once; in the middle a step waits for all micro-batches; below there "
    "is one micro-batch only.",
    number="42.6",
)
for name, run in (("no barrier", rolling), ("barrier", barrier), ("one sequence", single)):
    print(f"{name:<13}{1e3 * run.seconds:>6.0f} ms, idle {my_bubble(run.computing(), 4):.0%}")

# %% [markdown]
# A step without a barrier takes $4 \cdot 10.5 = 42$ ms: four stages and four transfers of 0.5 ms. The idle
# time of 15 % has two parts. The pipeline fills and empties once, which is 3 of the 27 turns of this short
# run, or 11 %. And in each 42 ms a stage waits for 2 ms of transfers. In a long run only the second part is
# left, 5 %. With a barrier, the pipeline fills and empties in each step: 7 turns and 2 ms are 72 ms. Six such
# steps take 432 ms, 1.53 times as long as 282 ms. In a long run the ratio is $72 / 42 = 1.71$.
#
# One sequence is the lowest picture: a token takes as long as on one device, plus four transfers. A pipeline
# makes no single answer faster. vLLM's older engine had a scheduler per stage (a *virtual engine*), so that
# micro-batches did not wait for each other, at the price of divided memory. Its
# [newer one](https://github.com/vllm-project/vllm/issues/11945) schedules the next batch before the last one
# has come back, from one queue of batches: the upper picture, with one pool of blocks.

# %% [markdown]
# ## The engine's pipeline, in real processes
#
# `pipeline_parallel_size` is minigen's option. Each stage is a process with its layers, and with the keys and
# values of these layers only; with `tensor_parallel_size` a stage is several processes. Rank 0 schedules, and
# broadcasts the step. A stage receives the vectors of a micro-batch, runs its layers, and sends the vectors on.
# The last stage sends the logits back. It is the engine with a barrier: every step ends before the next one is
# scheduled.
#
# The trace has an event for each micro-batch of each stage, with its start and end. So the same pictures can be
# drawn from real processes. Here, two stages of 15 layers decode one, two and eight sequences, in at
# most eight micro-batches. Predict the bubble with eight of them: the formula says 1/9. (Which stage has the
# head?)

# %%
guess_real = predict("Two processes, eight micro-batches: per cent idle?", None, within=1.3)

# %%


def decode_in_processes(layers, counts):
    cut = {"pipeline_parallel_size": 2, "pipeline_layers": layers, "num_micro_batches": 8}
    piped = load_model(weights="float32", **cut)
    stage_work = (layers[0], layers[1] + work[-1])  # in layers; the last stage has the head
    found = {}
    for count in counts:
        with piped.record() as recorder:
            answers = piped.generate(prompts[:count], greedy, progress=False)
        assert [each.token_ids for each in answers] == own_answers[:count]
        decode_steps = lesson.step_timelines(lesson.all_steps(recorder.events, first=1))
        idle = sorted(my_bubble(each.computing(), 2) for each in decode_steps)
        found[count] = idle[len(idle) // 2]
        simulated = my_bubble(lesson.pass_once(stage_work, count).computing(), 2)
        print(f"{layers[0]} and {layers[1]} layers, {count} at once: idle for ", end="")
        print(f"{mark(100 * found[count], '%')}; by the formula ", end="")
        print(f"{lesson.least_bubble(2, count):.0%}, simulated with their work {simulated:.0%}")
    piped.close()
    return found, recorder.events


in_processes, events = decode_in_processes((15, 15), counts=(1, 2, 8))
guess_real.compare(100 * in_processes[8], "%", measured=True)
sent, num_bytes = lesson.messages(events)["sent"]
num_tokens = sum(map(len, prompts)) + 3 * 8  # one prefill, and three decode steps
assert (sent, num_bytes) == (4 * 8, num_tokens * 4 * whole.config.hidden)  # in float32
print(f"rank 0 passed {sent} messages on to stage 1, {num_bytes:,} bytes: a vector per token")

# %% [markdown]
# The answers are those of one process. But the idle share lies above the formula, because the formula assumes
# stages that take equally long. These have equal numbers of layers, and stage 1 also has the head: 23 layers'
# work against 15. So stage 0 waits for stage 1 in every turn. More micro-batches do not remove this wait: the
# idle share tends to 8/46 = 17 % (Figure 42.5), not to 0. Put the work of both stages into the simulator, and
# it lies above the formula, too, as the processes do. (It counts the head as eight layers, and every box as equally
# long. Where a machine computes the head faster, the processes idle less than it says.) That is the use of a
# simulator: compare it where you can measure, and then let it speak of machines that you cannot measure.
#
# You know the remedy: deal by work. `pipeline_layers` (`--pipeline-layers 19,11`) takes the number of layers of
# each stage. Your `deal_layers` found them above, with the head counted as one, and `minigen info
# --pipeline-parallel-size 2` proposes the same. Then each stage has 19 layers' work, and the simulator agrees
# with the formula. What do the processes say, with eight sequences?

# %%
by_work = (len(dealt[0]), num_layers - len(dealt[0]))
in_balance, events_in_balance = decode_in_processes(by_work, counts=(8,))
print(f"eight micro-batches: {mark(100 * in_processes[8], '%')} idle with equal numbers, ", end="")
print(f"{mark(100 * in_balance[8], '%')} if dealt by work")
decodes = {"15 and 15 layers": events, f"{by_work[0]} and {by_work[1]} layers": events_in_balance}
picture(
    draw.timelines({name: lesson.all_steps(each, first=1) for name, each in decodes.items()}),
    "Decode steps of eight sequences in eight micro-batches, on two processes, from the engine's trace: "
    "equal numbers of layers, and layers dealt by work. Between two steps rank 0 samples and schedules.",
    number="42.7",
)

# %% [markdown]
# What remains above the formula has other reasons. The short gaps of stage 0 are sends: they wait until
# stage 1 takes the vectors. And boxes are not all equally long, so the stages wait for each other. (Two
# processes share the cores and the memory of this machine. That makes boxes longer, but it is no idle time.)
# The numbers above do not count one more gap, in which rank 0 samples
# and schedules while both stages wait: Figure 42.7 has it between the groups of boxes. What a pipeline gains
# in time against one process with all cores of the machine is not measured here; the section *The measurement
# again* compares two threads with one. (The counted messages are those to the next stage. Besides,
# rank 0 broadcasts the batch of each step as integers, and the logits come back.)
#
# A deal balances one kind of step. Of a prompt only the last row goes through the head, so equal numbers balance
# a step of prompts, and 19 against 11 layers do not. An engine that reads long prompts wants another deal than
# one that writes long answers.
#
# ## Interleaved stages
#
# If a prompt's bubble is the time to fill the pipeline, then shorter stages fill it sooner. With **[interleaved
# stages](../docs/glossary.md#interleaved-stages)**, Megatron-LM (Narayanan et al. 2021) gives each device $v$
# groups of layers instead of one: device 0 of 4 has the groups 0, 4, 8, and so on. A micro-batch goes round $v$
# times. A group takes $1/v$ of a stage. If $p$ micro-batches go round together, so that $m$ is a multiple
# of $p$, filling takes $1/v$ of the time:
#
# $$\text{bubble} = \frac{p - 1}{v\,m + p - 1} \qquad \text{(Megatron: } \frac{1}{v} \cdot \frac{p-1}{m}
# \text{ of the ideal time)}$$
#
# (With fewer micro-batches than stages, more groups gain less, and with a single one nothing: it must
# pass all groups one after another.) The price: a micro-batch makes $v p - 1$ transfers instead of
# $p - 1$, and $v - 1$ of them lead from the last device back to the first. And decode without a barrier has
# nothing to gain: with $m \ge p$ its pipeline is full already, and with fewer micro-batches each still
# has to pass all layers. (Training uses it together with **1F1B**, one forward, one backward. That order
# of work keeps fewer **activations**: the results of layers that the backward pass needs. Inference has
# no backward pass.)

# %%
picture(
    draw.timelines(
        {
            f"{groups} group{'s' * (groups > 1)} per device": lesson.interleaved(
                [1.0] * 4, 4, groups
            )
            for groups in (1, 2, 4)
        },
        row="device",
        unit="turns",
    ),
    "Four micro-batches on four devices. The paler a box, the later the group of layers. With more groups "
    "the last device begins sooner. Simulated, with free transfers.",
    number="42.8",
)
picture(
    draw.groups_and_messages(4, 4, 0.08),
    "The time of one pass by the groups per device, with free transfers and with transfers of 8 % of a "
    "stage's time. More groups mean more transfers, so there is a best number.",
    number="42.9",
)
for groups in (1, 2, 4):
    run = lesson.interleaved([1.0] * 4, 4, groups)
    print(f"v = {groups}: idle {my_bubble(run.computing(), 4):.1%}, ", end="")
    print(f"by the formula {lesson.least_bubble(4, 4, groups):.1%}")

# %% [markdown]
# ## Long prompts: a ring
#
# A pipeline cuts a prompt into chunks, but all of the prompt's keys and values of a layer lie on one device.
# **[Context parallelism](../docs/glossary.md#context-parallelism)** cuts the tokens instead: each rank has all
# layers and a part of the prompt. Everything in a layer works token by token, except attention, where a query
# needs the keys of all earlier tokens. In **[ring attention](../docs/glossary.md#ring-attention)** (Liu et al.
# 2023) each rank keeps its queries, and the blocks of keys and values go round. In each of $n$ turns a rank
# computes attention over the block that it has, and passes it on at the same time. So every rank has a
# partial result per block, and must merge them.
#
# **The merge, by hand.** Softmax divides by a sum. Over two sets of keys, 1 and 2, with outputs $O_1$, $O_2$ and
# the logs of their sums $\ell_1$, $\ell_2$, the **[log-sum-exps](../docs/glossary.md#log-sum-exp)**:
#
# $$\ell = \log\big(e^{\ell_1} + e^{\ell_2}\big), \qquad
# O = e^{\ell_1 - \ell}\, O_1 + e^{\ell_2 - \ell}\, O_2$$
#
# Take scores of 0 and 0 in set 1 with values 1 and 3, and a score of $\log 2$ in set 2 with the value 8. Then
# $O_1 = 2$ with the sum 2, and $O_2 = 8$ with the sum 2. Both count equally: $O = 5$. All at once: weights 1, 1
# and 2 of 4, and $(1 + 3 + 2 \cdot 8) / 4 = 5$.
#
# | symbol | meaning | shape | in the code |
# |---|---|---|---|
# | $O_1$ | output over the keys of set 1 | [tokens, heads, head_dim] | `out` |
# | $\ell_1$ | log-sum-exp of its scores | [tokens, heads] | `lse` |
# | $N$, $n$ | tokens of the prompt, ranks | | `len(q)`, `len(positions)` |
# | $c$ | tokens of a block, $N / n$ | | `len(positions[rank])` |
# | $F$, $B$ | FLOP/s of a device, bytes per second of its link | | `device.flops`, `link.bandwidth` |
#
# Two traps. $e^{\ell}$ overflows, so only differences may be exponentiated. And a query that sees no key of a
# set has $\ell = -\infty$. If it sees no key of either, the difference is $-\infty - (-\infty)$, which is nan.
# [FlashInfer](https://github.com/flashinfer-ai/flashinfer/issues/4051) and
# [vLLM](https://github.com/vllm-project/vllm/pull/39148) both had this bug.

# %%
task(42, "merge_parts")

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
my_merge = check(42, merge_parts=merge_parts)
q, k, v = (torch.randn(96, 4, 16) for _ in range(3))
at_once, _ = lesson.attend_part(q, k, v, range(96), range(96))
for ranks in (2, 3, 4):
    plain = [lesson.plain_part(96, rank, ranks) for rank in range(ranks)]
    off = (lesson.ring_attention(q, k, v, plain, my_merge) - at_once).abs().max()
    assert off < 1e-5
print("rings of 2, 3 and 4 ranks: equal to attention at once, up to the rounding of the merges")

# %% [markdown]
# ## A fair share
#
# Attention is causal: late tokens see many keys, early ones few. Give each rank one piece of the prompt, and
# the last rank has most of the work. The layer is finished only when this rank is. The others wait for it at
# the end, or in each turn if the turns begin together. Predict: four ranks, one piece each. How many times as
# long does the ring take as with equal shares?

# %%
guess_share = predict("Plain pieces on 4 ranks: how many times as long?", None, within=1.1)
task(42, "zig_zag")


# %%
# exercise: minigen_course.ch42_pipeline.reference.zig_zag
def zig_zag(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of a prompt that a rank gets, in ascending order.

    The prompt is cut into 2 n chunks for n ranks, and rank i gets chunk i and chunk 2 n - 1 - i. If
    the tokens do not divide, the first chunks have one token more than the others.
    """
    raise NotImplementedError  # your turn


# %%
my_zig_zag = check(42, zig_zag=zig_zag)
shares = {
    "plain": [lesson.plain_part(64, rank, 4) for rank in range(4)],
    "zig-zag": [my_zig_zag(64, rank, 4) for rank in range(4)],
    "striped": [list(range(rank, 64, 4)) for rank in range(4)],
}
picture(
    draw.causal_shares(shares),
    "A prompt of 64 tokens on four ranks: above, which rank computes which pair of query and key (the "
    "colour is the rank), below, how many pairs each rank has. Plain pieces, two chunks each, and every "
    "fourth token.",
    number="42.10",
)
explore(
    lambda sharing, turns: draw.ring_table(shares[sharing], turns),
    "The ring, turn by turn: which block of keys each rank has (the colour is the block), and how many "
    "pairs it computes. The width of a cell is the most pairs of any turn. The pale part is the time in "
    "which the rank waits for the slowest one, if the turns begin together. In the grey part no rank works.",
    "42.11",
    sharing=list(shares),
    turns=(1, 4, 1, 4),
)
rings = {
    name: lesson.ring_turns(lesson.ring_pairs(each), 1.0, 60.0) for name, each in shares.items()
}
picture(
    draw.timelines(rings, row="rank", unit="pairs"),
    "The same rings over time, if a pair takes 1 and a message 60. The number in a box is the block of "
    "keys, and a black line is the message that is sent meanwhile. Simulated.",
    number="42.12",
)
slowdown = {name: lesson.ring_slowdown(each) for name, each in shares.items()}
for name, times in slowdown.items():
    print(f"{name:<8} {times:.2f} times as long as with equal shares in each turn")
guess_share.compare(round(slowdown["plain"], 2), "times")

# %% [markdown]
# In the plain ring, rank 3 computes a whole block in every turn after the first, while rank 0 has one half
# block in all. With $n$ ranks and many tokens the ring takes $2 - 1/n$ times as long: 1.75 here, and 1.74
# with 64 tokens, because of the diagonal. **[Zig-zag](../docs/glossary.md#zig-zag)** shares pair an early
# chunk with a late one: chunk $i$ and chunk $2n - 1 - i$ see the same number of keys together, for every $i$.
# Llama 3's training divided prompts in this way (Dubey et al. 2024; with an all-gather of keys and values
# instead of a ring).
#
# Striped attention (Brandon et al. 2023) deals tokens out one by one. It is nearly even, too (496 to 544
# pairs here), but in every turn the block is a triangle: the rank's query number $a$ sees the block's key
# number $b$ for $b < a$, and in some turns for $b = a$. A kernel that works on tiles skips the tiles above
# the diagonal, and pays for tiles along it that are half used. Zig-zag shares have such tiles in the first
# turn only.
#
# ## When a ring hides its messages
#
# Without a mask, a turn computes $4 c^2 H_q d_h$ FLOPs: for each of $c^2$ pairs and each query head a score
# and a weighted value, with 2 FLOPs for each of $d_h$ numbers. It sends keys and values of $c$ tokens, with 2
# bytes per number in bfloat16: $4 c\, H_{kv} d_h$ bytes. Apart from latency, the message is hidden if
#
# $$\frac{4 c^2 H_q d_h}{F} \ge \frac{4 c\, H_{kv} d_h}{B} \iff
# c \ge \frac{F}{B} \cdot \frac{H_{kv}}{H_q}$$
#
# In the ring attention paper all heads have their own keys, so its condition is $c \ge F / B$. Grouped heads
# make it easier. In a causal ring with zig-zag shares, a turn has about half of the pairs, so $c$ must be
# twice as large. (In a plain ring, some turns of a rank have no pairs at all, and hide nothing.)

# %%
h100, big = MACHINES["H100 SXM"], SHAPES["Llama-3-70B"]
lengths = [2**exponent for exponent in range(11, 21)]
turns = {}
for name, link in LINKS.items():
    seconds = []
    for tokens in lengths:
        block = tokens / 8
        computing = 2 * block**2 * big.q_heads * big.head_dim / h100.flops
        sending = link.latency + 4 * block * big.kv_heads * big.head_dim / link.bandwidth
        seconds.append((computing, sending))
    turns[name] = seconds
    least = h100.flops / link.bandwidth * big.kv_heads / big.q_heads
    print(f"{name:<22} without latency at least {least:>6,.0f} tokens per rank ", end="")
    print(f"(zig-zag: {2 * least:,.0f})")
picture(
    draw.hidden_messages(lengths, turns),
    "One turn of a zig-zag ring of 8 H100 in one layer of Llama-3-70B: the time to compute half of a "
    "block's pairs, and the time to send its keys and values, by the prompt's length.",
    number="42.13",
)

# %% [markdown]
# Over Ethernet, a ring of eight ranks hides its messages only for prompts of more than half a million tokens.
# Over InfiniBand, forty thousand tokens are enough. With shorter prompts the ring waits for its messages.
# (The latency counts for fast links: without it, NVLink would need $8 \cdot 549 \approx 4{,}400$ tokens, and
# the lines cross at 5,700.) A tensor split would send far more: two all-reduces of all tokens' vectors per
# layer.
#
# **In decode** the same merge works the other way round. The cache of a long context is split over the ranks,
# each attends with the one new query to its own keys, and only partial results travel: per layer
# $H_q (d_h + 1)$ numbers, however long the context. Each rank reads an $n$-th of the cache. (Weights are
# read by all, unless they are cut, too. That is why context and tensor splits are combined.)
#
# The cell compares 64 answers of 131,072 tokens on 8 cards that share each matrix (`tensor`) with eight such
# groups, which share the tokens of each sequence (`context`). `lesson.Layout` holds these numbers; the next
# section has all four of them. Then two processes of the engine count their messages.

# %%
context = 131_072
one, eight_ranks = lesson.Layout(tensor=8), lesson.Layout(tensor=8, context=8)
replicas = lesson.Layout(tensor=8, data=8)
machines = lesson.Cluster(h100, 64, 8, LINKS["NVLink 4"], LINKS["InfiniBand 400 Gbit/s"])
for layout in (one, eight_ranks, replicas):
    cost = lesson.decode_cost(big, machines, layout, lesson.Load(64, context))
    fits = "fits" if cost.fits(machines) else "does not fit"
    print(
        f"{layout!s:<22}{layout.num_ranks:>3} cards,{cost.rank_bytes / 1e9:>5.0f} GB each: {fits}; ",
        end="",
    )
    print(f"{1e3 * cost.seconds:.1f} ms per step, {1e3 * cost.message_seconds:.1f} in messages")

# The engine: two processes share a prompt's tokens in zig-zag parts, then the cache of the answer
ringed = load_model(weights="float32", context_parallel_size=2)
with ringed.record() as recorder:
    answer = ringed.generate(words[:128], greedy)
ringed.close()
assert answer.token_ids == whole.generate(words[:128], greedy).token_ids
counted, config = lesson.messages(recorder.events), whole.config
block = 64 * 2 * config.kv_heads * config.head_dim * 4  # keys and values of half of the tokens
partial = config.q_heads * (config.head_dim + 1) * 4  # an output and its log-sum-exp, by head
assert counted["shifted"] == (num_layers, num_layers * block)
assert counted["all_gathered"] == (3 * num_layers, 3 * num_layers * partial)
print(f"two processes, 128 tokens: {counted['shifted'][0]} shifts of {block:,} bytes; ", end="")
print(f"three steps with {num_layers} all-gathers of {partial:,} bytes each: as the formulas say")

# %% [markdown]
# ## Which cut when
#
# In the first lines above, eight times as many cards make a step four times as fast: all 64 share the cache,
# but the weights are cut in 8 parts only, and the merges over InfiniBand raise the messages from 4 to 10 ms.
# (An eighth of all would be 14 ms. The weights cost 5 ms more than that, and the messages 9.) What counts
# most is that the caches fit at all. (Eight replicas of 8 cards would take 20 ms: with 64 answers each has 8
# of its own, and merges nothing. A split by context is for fewer answers, or for a cache that does not fit
# into one replica.)
#
# Now all cuts in one model. A **layout** is four numbers: $t$ ranks cut every matrix, $r$ share the tokens of
# a sequence, $p$ are stages, and $d$ are replicas. `decode_cost` and `prefill_cost` count, for each rank, the
# bytes that it stores and reads, its FLOPs, its messages and their bytes, and put them on the timeline of the
# simulator. Their terms are those of chapters 17 and 41 and of the ring above. One is new: a **hierarchical
# all-reduce**, for a group that is larger than a node. The cards of a node add up one share of the numbers
# each, over NVLink. Each card adds its share to those of its twins in the other nodes. Then the sums go back
# inside the node. So a card sends only a share of the bytes to other nodes, an eighth if a node has 8 cards.
# These are the terms:
#
# | cut | divides | does not divide | messages per layer and step |
# |---|---|---|---|
# | tensor $t$ | weights, cache by heads, FLOPs | the cache beyond the number of KV heads | 2 all-reduces of $b H$ numbers |
# | context $r$ | cache by tokens, attention, in prefill all FLOPs | weights | prefill: $r - 1$ blocks of keys and values; decode: $r - 1$ partial results |
# | pipeline $p$ | weights, cache by layers | the time of one token | none; one transfer of $b H$ numbers per stage and micro-batch |
# | data $d$ | requests | weights, the time of one token | none |
#
# Here $b$ is the number of tokens in the step, in a pipeline in the micro-batch, and $H$ is the number of
# numbers in a token's vector. Choose a load. Pale bars do not fit into the memory.


# %%
def costs_of(model, card, nodes, between, sequences, context, phase):
    shape = ModelShape.of(config_of(model)) if model in MODELS else lesson.LLAMA_405B
    cluster = lesson.Cluster(MACHINES[card], 8 * nodes, 8, LINKS["NVLink 4"], LINKS[between])
    load = lesson.Load(sequences, context)
    found = {}
    for layout in lesson.layouts(8 * nodes):
        if lesson.obstacle(shape, layout, sequences) is None:
            if phase == "decode":
                found[layout] = lesson.decode_cost(shape, cluster, layout, load)
            elif layout.data == 1:
                found[layout] = lesson.prefill_cost(shape, cluster, layout, context)
    what = "a decode step" if phase == "decode" else "the prefill of one prompt"
    return draw.layout_costs(found, cluster, what)


explore(
    costs_of,
    "The fastest layouts of a load on nodes of 8 cards, with NVLink inside. Orange is the part of the time "
    "in messages, without those that computing hides. By the cost model.",
    "42.14",
    model=["Llama-3-70B", "Llama-3-8B", "Llama-3.1-405B"],
    card=list(MACHINES),
    nodes=[2, 1, 4],
    between=["Ethernet 25 Gbit/s", "InfiniBand 400 Gbit/s"],
    sequences=(1, 512, 1, 32),
    context=[4096, 1024, 32768, 131072],
    phase=["decode", "prefill"],
)

# %% [markdown]
# As the sliders stand, 32 answers decode on two nodes with Ethernet between them. The fastest layout, tensor
# 8 × data 2, cuts matrices inside each node, and no message passes between the nodes. Two stages (tensor 8 ×
# pipeline 2) take 3 % longer, but each card needs 12 GB instead of 20: a choice for larger caches. A tensor
# split over all 16 cards takes 20 ms, of which 16 ms are messages: 13 over Ethernet, and 3 over NVLink inside
# the nodes. Now choose InfiniBand and `prefill`: tensor 4 × context 4 comes first. The all-reduces of a group
# of cards carry the vectors of its own tokens only: with context 4, a quarter of the prompt, with context 2 a
# half. So a larger ring and a smaller tensor split send less. (Tensor 2 × context 8 sends still less. But in
# both rings the blocks are too short to hide their messages, and a ring of eight waits for seven of them in
# each layer, a ring of four for three.)
#
# ## Your turn: choose the cut
#
# The decision in its smallest form: one decode step, three cuts, and formulas that are stated in full.

# %%
task(42, "choose_cut")

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


# %% [markdown]
# ## Your own model and network
#
# First your function's choices (t, p, d) for Llama-3-70B on eight H100, by the time of an all-reduce; a
# transfer takes as long. (While your function is empty, the course's stands in.) Then the answer to *which
# cut when*, as a table for one model, one kind of card and one network. Put your own in: the model is a name
# of the list or the text of a `config.json`, and the link is given by its latency and its bytes per second.
# Rows are kinds of load, columns are the network between the nodes.


# %%
my_choice = check(42, choose_cut=choose_cut)
cuts = {}
for latency in (10e-6, 100e-6, 1e-3):
    sums = {1: 0.0} | dict.fromkeys((2, 4, 8), latency)
    devices = Devices(8, 0.9 * h100.memory, h100.bandwidth, sums, latency)
    model = Model(big.layers, big.kv_heads, 2 * big.multiplied, 2 * big.kv_numbers(4096))
    cuts[latency] = [my_choice(model, devices, count) for count in (1, 16, 128)]
    print(f"{1e6 * latency:>5.0f} µs: 1, 16 and 128 sequences: {cuts[latency]}")


def table(model, card, nodes, latency_us, gigabytes_per_second):
    shape = ModelShape.of(config_of(model))
    own = type(LINKS["NVLink 4"])("yours", latency_us * 1e-6, gigabytes_per_second * 1e9)
    nets = {"NVLink": LINKS["NVLink 4"], "InfiniBand": LINKS["InfiniBand 400 Gbit/s"]}
    nets |= {"Ethernet 25": LINKS["Ethernet 25 Gbit/s"], "yours": own}
    loads = {
        "1 answer, 4k": lesson.Load(1, 4096),
        "64 answers, 4k": lesson.Load(64, 4096),
        "4 answers, 128k": lesson.Load(4, 131_072),
        "prompt of 4k": 4096,
        "prompt of 128k": 131_072,
    }
    best = [
        [best_layout(shape, card, nodes, net, load) for net in nets.values()]
        for load in loads.values()
    ]
    return draw.which_cut(best, list(loads), list(nets), ("load", "between the nodes"))


def best_layout(shape, card, nodes, between, load):
    cluster = lesson.Cluster(MACHINES[card], 4 * nodes, 4, LINKS["PCIe 5 x16"], between)
    decodes = isinstance(load, lesson.Load)
    found = []
    for layout in lesson.layouts(cluster.num_devices):
        if lesson.obstacle(shape, layout, load.num_sequences if decodes else 1):
            continue
        if decodes:
            cost = lesson.decode_cost(shape, cluster, layout, load)
        else:
            cost = lesson.prefill_cost(shape, cluster, layout, load)
        if cost.fits(cluster):
            found.append((cost.seconds, str(layout), layout))
    return min(found)[2] if found else None


explore(
    table,
    "The fastest layout that fits, by load and network, for two nodes of four cards with PCIe inside. "
    "Change it to your own. By the cost model.",
    "42.15",
    model="Llama-3-70B",
    card=list(MACHINES),
    nodes=[2, 1, 4],
    latency_us=(1, 200, 1, 50),
    gigabytes_per_second=(0.1, 50.0, 0.1, 1.2),
)

# %% [markdown]
# **The nine choices.** With all-reduces of 10 or 100 µs, eight cards share each matrix. With 1 ms, the 160
# all-reduces of a step would take 160 ms, but stages that read all weights one after another take 42 ms and
# their transfers. So stages win. For 16 and 128 answers, 4 stages and 2 replicas are better than 8 stages: a
# step reads as many bytes, with 4 transfers instead of 8. (2 stages and 4 replicas would need only 2, but each
# card would need 72.2 GB or more, and the limit is 72.)
#
# **The table, decode.** Eight cards share each matrix if the network between the nodes is fast. Over Ethernet
# the tensor split ends at the node. Then several answers want a replica on each node. One answer cannot use a
# replica, and two stages give it the memory of the second node, but no speed.
#
# **The table, prompts.** The all-reduces now carry thousands of vectors, over PCIe, 160 times, and a stage
# passes each vector on once. So 8 stages are the fastest for 4,096 tokens in three columns, although their 16
# chunks leave them idle for 31 % of the time or more. (The model cuts a prompt into four chunks per stage,
# but into none below 256 tokens: 16 here. The formula gives 7/23 = 30 %; later chunks attend to more tokens.)
# (With NVLink between the nodes, tensor 2 × context 4 is a little faster.) For 131,072 tokens, 4 stages have
# a smaller bubble than 8, and computing hides the messages of a ring of two. The column makes no difference,
# since only the transfers between stages pass from node to node. A ring of all eight cards has no bubble, but
# each card must then hold all weights, and they do not fit.
#
# ## Against published figures
#
# A model that is only drawn proves nothing. [Context Parallelism for Scalable Million-Token
# Inference](https://arxiv.org/abs/2411.01783) (Yang et al. 2024) measured Llama 3 405B on up to 128 H100: a
# prompt of 1 million tokens in 77 s on 16 nodes, a prompt of 128K in 3.8 s. It cuts matrices over the 8 cards of
# a node and tokens over the nodes, as the model does here. (The weights in bfloat16 would take 101 GB per
# card, which 80 GB do not hold. The next cell computes times only, and does not ask whether a layout fits.)
#
# The paper counts 502 TFLOP/s per card. That is 63 % of 800, the peak of its cards, whose power is limited to
# 500 W (the data sheet's 989 hold for 700 W). It also names a *parallelization efficiency* of 93 %, which
# equals 502 divided by 540, the TFLOP/s of one attention kernel on one card. Usually, **parallel efficiency**
# compares times: that of one node, divided by 16 and by the time of 16 nodes. The cell computes this one from
# the cost model.
#
# Predict: will the cost model be above or below these times? Write "above" or "below".

# %%
guess_side = predict("The model's times for 405B: above or below the measured ones?", None)

# %%
runs_405b = {
    "1M tokens, 16 nodes": (16, 1_000_000, 77.0),
    "128K tokens, 16 nodes": (16, 131_072, 3.8),
}
published = {}
for name, (nodes, tokens, seconds) in runs_405b.items():
    cluster = lesson.Cluster(h100, 8 * nodes, 8, LINKS["NVLink 4"], LINKS["InfiniBand 400 Gbit/s"])
    cost = lesson.prefill_cost(lesson.LLAMA_405B, cluster, lesson.Layout(8, nodes), tokens)
    published[name] = (cost.seconds, seconds)
    print(f"{name}: model {cost.seconds:.1f} s, published {seconds} s")
long, short = published.values()
print(f"1M takes {long[0] / short[0]:.0f} times as long as 128K in the model, ", end="")
print(f"{long[1] / short[1]:.0f} times as published")
alone_405b = lesson.prefill_cost(lesson.LLAMA_405B, cluster, lesson.Layout(8), 1_000_000).seconds
efficiency = alone_405b / 16 / published["1M tokens, 16 nodes"][0]
print(f"efficiency of 16 nodes by the model: {efficiency:.0%}")
below = all(model < seconds for model, seconds in published.values())
guess_side.compare("below" if below else "above")
picture(
    draw.against_published(published),
    "Prefill of Llama 3 405B: the cost model and what was published. The factor beside a line is published "
    "time divided by the model's.",
    number="42.16",
)

# %% [markdown]
# The model knows the data sheet's peak and the messages, and no losses: cards whose power is limited, kernels
# that reach two thirds of the peak, waiting. It is a lower bound, by a factor of about two, and what it
# predicts well is *ratios*: 1M tokens take 25 times as long as 128K in the model, and 20 times in the paper.
# By the model, the messages between the 16 nodes cost almost nothing.
#
# ## The course's versions
#
# They open here, each after yours has passed its check. The engine's own are in `minigen/parallel`, and
# differ in details. Its micro-batches keep the order of the sequences, so that the logits need no sorting.
# Its `zigzag_parts` rounds differently if the tokens do not divide. Its stages have equal numbers
# of layers, or those that you give with `pipeline_layers`.

# %%
reveal(42, bubble=my_bubble, micro_batches=my_batches, deal_layers=my_dealt)
reveal(42, merge_parts=my_merge, zig_zag=my_zig_zag, choose_cut=my_choice)

# %% [markdown]
# ## A bug hunt
#
# A stage should compute the next micro-batch while the last result is still on its way. So sending must not
# wait: it returns at once, and the link reads the array later. `run_stage` below does that, with one array
# for all results. **The report:** *Inside of one machine everything is right. Between two machines, under
# load, some answers continue the text of another request, and the more micro-batches there are, the more.
# With one micro-batch per step it never happens.* (minigen's own stages have no such fault: each send waits
# until the next stage takes the vectors. They pay for it with the short gaps of stage 0 in Figure 42.7.)
#
# Write a test that fails on this function and on others with such a fault, and passes on every correct one.
# Then mend the function. It has happened:
# [TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM/pull/10488) wrote into a tensor that its pipeline was
# still sending, and [Megatron-LM](https://github.com/NVIDIA/Megatron-LM/pull/4047) freed one, which turned up as
# a nan in a run of Llama 3.1 405B on 16 stages.

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
mended = hunt(42, test=test_run_stage, mended=run_stage)

# %% [markdown]
# ## The measurement again
#
# The eight texts from the beginning, all logits. The cell sets runs from above side by side: one thread, one batch on
# two equal halves (Figure 42.1), and eight micro-batches on stages that were dealt out by work.

# %%
last_idle, faster = my_bubble(even.computing(), 2), alone.seconds / even.seconds
first_faster = alone.seconds / one_batch.seconds
measured("one thread", 1e3 * alone.seconds, "ms")
for name, run, idle in (("one batch", one_batch, first_idle), ("eight", even, last_idle)):
    print(f"two stages, {name:<10}{mark(1e3 * run.seconds, 'ms')}, {mark(100 * idle, '%')} idle")
print(f"as fast as one thread: {mark(first_faster, 'times')}, and now {mark(faster, 'times')}")
picture(
    draw.timelines({"one batch, halves": one_batch, "eight micro-batches, dealt": even}),
    "The same work as in Figure 42.1, before and after. Measured on this machine.",
    number="42.17",
)

# %% [markdown]
# If two stages are not faster than one thread here, the bubble is not the reason. Eight small micro-batches read
# the weights eight times. Two threads share one memory, and cores if the machine has other work. On two devices,
# each stage has a memory of its own, and half of the weights in it.
#
# ## Claims
#
# What papers and guides say, beside what this notebook computed or measured.

# %% jupyter={"source_hidden": true}
four_per_stage = lesson.least_bubble(8, 32)
gain_of_2 = {
    m: lesson.pass_once([1.0] * 8, m).seconds / lesson.interleaved([1.0] * 8, m, 2).seconds
    for m in (8, 16, 64)
}
pieces = [lesson.plain_part(512, rank, 16) for rank in range(16)]
stripes = [list(range(rank, 512, 16)) for rank in range(16)]
even_gain = lesson.ring_slowdown(pieces) / lesson.ring_slowdown(stripes)
one_node = lesson.decode_cost(big, machines, lesson.Layout(tensor=8), lesson.Load(1, 1024)).seconds
two_nodes = lesson.decode_cost(big, machines, lesson.Layout(8, 1, 2), lesson.Load(1, 1024)).seconds
verdicts(
    "42",
    Claim(
        "The bubble is negligible when there are four micro-batches per stage",
        f"{four_per_stage:.0%} of the time with 8 stages and 32 micro-batches",
        holds(four_per_stage < 0.05),
        "if negligible means under 5 %: (K - 1) / (5K - 1) tends to a fifth. Training fills some of it "
        "with recomputation, as the authors say: activations are computed again before the backward pass",
        "[GPipe](https://arxiv.org/abs/1811.06965)",
    ),
    Claim(
        "Interleaved stages raise the throughput by 10 % or more",
        "8 devices, v = 2, free transfers: "
        + ", ".join(f"{gain - 1:.0%} with {m} micro-batches" for m, gain in gain_of_2.items()),
        within(gain_of_2[16], 1.1, 2),
        "judged with 16 micro-batches; the fewer there are, the larger the bubble and the gain",
        "[Megatron-LM](https://arxiv.org/abs/2104.04473)",
    ),
    Claim(
        "Balanced shares make a causal ring up to 1.65 times as fast",
        f"{even_gain:.2f} times on 16 ranks, attention alone",
        within(even_gain, 1, 1.65),
        "2 - 1/n is the most for attention; 1.65 was measured for a whole model in training, where the "
        "rest of a layer is even already",
        "[Striped Attention](https://arxiv.org/abs/2311.09431)",
    ),
    Claim(
        "A pipeline lowers the latency of one answer",
        f"{1e3 * two_nodes:.2f} ms per token on two nodes, {1e3 * one_node:.2f} ms on one",
        holds(two_nodes < one_node),
        "Llama-3-70B on H100, by the cost model; a token visits all stages one after another",
    ),
    Claim(
        "Two stages halve the time",
        f"{mark(faster, 'times')} as fast as one thread, with eight micro-batches",
        within(faster, 1.8, 2.2),
        "the bubble of 1/9, weights that are read once per micro-batch, and two threads that share one "
        "memory",
        measured=True,
    ),
    Claim(
        "Prefill of a million tokens scales to 16 nodes with an efficiency of 93 %",
        f"messages between nodes would allow {efficiency:.0%}, by a cost model without other losses",
        NOT_TESTED,
        "it takes 128 cards, and the paper's 93 % compare a card's FLOP/s with those of one attention "
        "kernel, not 16 nodes with one",
        "[Yang et al.](https://arxiv.org/abs/2411.01783)",
    ),
)

# %% [markdown]
# ## Summary
#
# - A pipeline divides memory and sends little. With one batch only one stage works at a time; micro-batches let
#   the others work, up to a bubble of $(p - 1) / (m + p - 1)$.
# - The slowest stage sets the pace. Work is dealt out, not layers: an output head may be worth eight of them.
# - In decode a micro-batch comes back. With as many micro-batches as stages, equal stages, free transfers and no
#   barrier between steps, the pipeline stays full. No single answer gets faster.
# - With $v$ groups of layers per device, and a multiple of $p$ micro-batches, the idle time of a prompt's
#   pass is divided by $v$ (not its share: 43, 27 and 16 % for 1, 2 and 4), and the messages are multiplied by
#   about $v$.
# - A ring divides the tokens. Its ranks merge partial attentions by their log-sum-exp, in any order, and a
#   causal prompt needs shares with equal work: chunk $i$ and chunk $2n - 1 - i$.
# - A ring's messages are hidden from some number of tokens per rank on: FLOP/s divided by the link's bytes per
#   second, and by the query heads per KV head, and twice that for a causal prompt.
# - Tensor splits want the fastest link, stages and rings bear slower ones, replicas need none. What is best
#   depends on the load: one cost model answers for yours.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A prompt is cut into 6 chunks for 3 stages that take 4, 6 and 5 ms per chunk. How long does it
# take, and for how much of the time is a stage idle?</summary>
# The first chunk leaves after 4 + 6 + 5 = 15 ms, and five more follow, one every 6 ms: 45 ms. The stages work
# for 6 · 15 = 90 ms of 3 · 45 = 135 ms, so they are idle for a third of it. The formula for equal stages says
# 2/8.</details>
#
# <details><summary>2. Two ranks have partial attentions with log-sum-exps of 3 and of minus infinity. What is the
# merged output, and what goes wrong if both are minus infinity?</summary> The first rank's output alone,
# since the other one's weight is exp(-inf - 3) = 0. If both are minus infinity, the merged one is, too, and
# the difference of two infinities is nan. The result must be 0 with minus infinity.</details>
#
# <details><summary>3. A model fits into one node of 8 cards. You have two nodes with Ethernet between them, and many
# users. Which cut?</summary> Tensor parallelism inside each node, and the second node as a replica: nothing
# but requests passes between them. Two stages would give the same throughput at best, with transfers on top.
# If the caches are too large, stages leave room for more of them.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/latest/serving/parallelism_scaling/)** takes `--pipeline-parallel-size`,
#   `--tensor-parallel-size`, `--data-parallel-size` and `--decode-context-parallel-size`. Several batches are in
#   flight in its pipeline, so that decode has no barrier.
# - **[SGLang](https://github.com/sgl-project/sglang)** has `--pp-size` with micro-batches in flight, and
#   context parallelism for [long prompts](https://docs.sglang.io/docs/advanced_features/prefill_cp)
#   (`--attn-cp-size`) and for [decode](https://docs.sglang.io/docs/advanced_features/dcp) (`--dcp-size`).
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/parallel-strategy.html)** has tensor,
#   pipeline, data, expert and context parallelism, and combines them per part of the model.
# - **[Megatron Core](https://github.com/NVIDIA/Megatron-LM)** trains with all of them: interleaved 1F1B, and
#   a ring with two chunks per rank.
# - **[DeepSpeed](https://www.deepspeed.ai/tutorials/pipeline/)** balances stages by parameters, or by the number
#   of layers of a given type. Its Ulysses splits a long sequence by heads, with all-to-alls instead of a ring.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/docs/multi-gpu.md)** deals layers out over
#   cards by default, in shares that you can set by hand.
# - Engines that run prefill and decode on different cards choose a cut for each: stages or rings for prompts,
#   tensor splits and replicas for decode.
#
# ## Further reading
#
# - [GPipe](https://arxiv.org/abs/1811.06965), Huang et al. 2019: micro-batches and the bubble.
# - [Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM](https://arxiv.org/abs/2104.04473), Narayanan et al. 2021: interleaved stages, and how cuts are
#   combined.
# - [Ring Attention with Blockwise Transformers](https://arxiv.org/abs/2310.01889), Liu et al. 2023.
# - [Striped Attention](https://arxiv.org/abs/2311.09431), Brandon et al. 2023: the causal imbalance, and
#   tokens that are dealt out one by one.
# - [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), section 3.3.2: four cuts at once, with two
#   chunks per rank.
# - [Context Parallelism for Scalable Million-Token Inference](https://arxiv.org/abs/2411.01783), Yang et al.
#   2024: when to pass keys and values, and when queries.
# - [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022: cuts derived
#   from bytes and FLOPs.
#
# **Next:** part 5. [Chapter 51](51_server.ipynb) puts an HTTP server in front of the engine.

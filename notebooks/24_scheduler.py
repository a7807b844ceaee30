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
# # 24 · Continuous batching
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/24_scheduler.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/24_scheduler.ipynb)
#
# Chapters 21 to 23 gave many requests a place in memory. This chapter decides which of them run.
# Before every step of the model, the **scheduler** says which sequences go through it, and with how
# many of their tokens. It has four methods, and it decides much of what users feel.
#
# **Afterwards you can** say what a larger batch is worth on a machine, and at which batch size the memory
# is full; write a scheduler that keeps every place in a batch (a [batch
# slot](../docs/glossary.md#batch-slot)) busy; keep a long prompt from making all others stutter; and run
# out of memory without losing a request.
#
# **You need** chapters 17 (prefill, decode, the time of a step) and 21 to 23 (blocks). **Time:** about
# 60 minutes to read and try, about 100 for the
# [exercises](../exercises/24_scheduler.ipynb).
#
# **Where we are:** the model, its cache and its blocks exist. The scheduler decides which sequences go
# through them in the next step. The engine's loop (chapter 25) calls scheduler and model in turn.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | concurrency | prefill, decode | memory bandwidth, then compute | L4 routing and batching | `--max-num-seqs`, `--max-num-batched-tokens` | throughput, inter-token latency |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import mkdtemp

from minigen import SamplingParams
from minigen.trace.events import EventKind
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
    verdicts,
    within,
)
from minigen_course.ch24_scheduler.figures import gain, gains, spread, stutter
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.figures.gantt import gantt
from minigen_course.figures.trace_views import pool_states, story
from minigen_course.grading.save_part import save_part
from minigen_course.lab.cost_model import (
    MACHINES,
    SHAPES,
    StepTime,
    config_of,
    decode_step,
    most_sequences,
    prefill_step,
)
from minigen_course.lab.inspect_model import read_along
from minigen_course.lab.simulator import (
    Ask,
    Knobs,
    random_arrivals,
    serve,
    simulate,
    token_times,
)
from minigen_course.lab.texts import ALICE
from minigen_course.lab.toy_engine import serve_toy

load = partial(load_model, enable_prefix_caching=False)  # so that every run computes everything
llm = load(max_num_seqs=32, max_num_batched_tokens=1024)
text_ids = llm.tokenizer.encode(ALICE)
_ = llm.generate(text_ids[:8], SamplingParams(max_tokens=2))  # the first steps are slow

# %%
chapter_map("scheduler")

# %% [markdown]
# ## A number that hurts
#
# Twelve people ask at the same moment, and a step has room for four sequences: four **batch slots**
# (`max_num_seqs`). (A batch slot is a place in the batch; chapter 21's slot is a place in the cache.) The
# simplest way is **static batching**: the first four start together, and when the last of them is done,
# the next four start. In order of arrival the answers have 45, 4, 7, 11, 38, 5, 15, 6, 32, 9, 5 and
# 12 tokens, and each step gives every running sequence one. Predict which percentage of the slots stays
# empty.
#
# Unless the text says otherwise, times in this chapter are those of a clock of its own, which
# charges for a step what `step_time` says. It describes an invented machine: 4 ms to read the
# weights, 0.5 ms of arithmetic per token, 1 ms of overhead. A step takes the longer of reading and
# arithmetic, plus the overhead. (Below, its numbers stand beside those of your machine. Unlike a
# real machine, it charges nothing for reading keys and values.) Requests arrive by that clock,
# too. So what the runs print is the same on every machine, except for the values in ⟨⟩, which were
# measured. An `Ask` is a request: its arrival, and the lengths of prompt and answer. `serve` gives
# requests to the real engine; `simulate` uses the same scheduler and blocks without a model, with
# the options in `Knobs`. `story` lists a run's steps.

# %%
guess_empty = predict("Per cent of the slots that stay empty?", None, within=1.2)

# %%
step_time = StepTime(read=0.004, token=0.0005, overhead=0.001)  # seconds
slots = 4
answers = (45, 4, 7, 11, 38, 5, 15, 6, 32, 9, 5, 12)
twelve = [Ask.of_lengths(0.0, prompt=12, output=count) for count in answers]


def timed(engine):
    started = time.perf_counter()
    return serve(engine, twelve, text_ids, step_time), time.perf_counter() - started


run, static_seconds = timed(load(scheduler="static", max_num_seqs=slots))
told = story(run.events)
busy = sum(len(step.parts) for step in told.steps)
print(f"{len(told)} steps with {slots} slots, {busy} of {slots * len(told)} taken")
guess_empty.compare(round(100 * (1 - busy / (slots * len(told)))), "%")
measured("that took", static_seconds, "s")

# %% [markdown]
# More than half of the slots stayed empty, while up to eight requests waited for one.
#
# ## What is a batch slot worth?
#
# Why run several sequences at once at all? Chapter 17 has the reason: a step reads the weights
# once, for one sequence as for many. What grows with the number of sequences $n$ is mainly the
# arithmetic, and the reading of keys and values. Here every sequence has a few tokens, so its keys
# and values are few bytes. The formulas leave them out, and the large model below counts them
# again. Two formulas describe the time of a step:
#
# $$t_{\max}(n) = \max(t_{read},\; n \cdot t_{row}) + t_0 \qquad\qquad t_{sum}(n) = t_{fixed} + n \cdot
# t_{add}$$
#
# | symbol | meaning |
# |---|---|
# | $t_{read}$ | time to read the weights |
# | $t_{row}$ | time of one sequence's arithmetic |
# | $t_0$ | overhead of a step |
# | $t_{fixed}$ | time of all that does not depend on $n$: reading and overhead |
# | $t_{add}$ | time that each sequence adds |
#
# The first one is chapter 17's, without the reading of keys and values. It assumes that reading and
# computing overlap completely, so only the longer of the two counts. The second one assumes that
# they do not overlap at all. The machine's [**knee**](../docs/glossary.md#knee) is the batch size
# at which the part that grows takes as long as the other: $n \cdot t_{row} = t_{read}$, or $n \cdot
# t_{add} = t_{fixed}$. By the formula with the max, another sequence costs nothing left of the
# knee, and $t_{row}$ right of it. By the one with the sum, it costs $t_{add}$ everywhere. But by the sum, too, left of the knee the larger part of a step is fixed, so twice the batch takes less
# than 1.5 times as long; far right of the knee it takes nearly twice as long.
#
# For ten batch sizes from 1 to 32, the cell times four steps (`read_along` gives the model the next token
# of every text in each), in three rounds (another program may disturb some rounds, but rarely all of
# them). It takes the third fastest of these 12 steps, and draws both formulas through the first and the
# last batch size (the first formula with $t_0 = 0$). Two points fix two unknowns. With the sum,
# $t_1 = t_{fixed} + t_{add}$ and $t_{32} = t_{fixed} + 32 \cdot t_{add}$. The difference of both is
# $31 \cdot t_{add}$, so
#
# $$t_{add} = \frac{t_{32} - t_1}{31}, \qquad t_{fixed} = t_1 - t_{add}.$$
#
# With the max, take one sequence as left of the knee, and 32 as right of it: then $t_{read} = t_1$ and
# $t_{row} = t_{32} / 32$.
#
# Predict: with how many sequences does a step, by the formula with the sum, take twice as long as
# with one?

# %%
guess_double = predict("With how many sequences does a step take twice as long?", None, within=2)

# %%
sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
texts = {n: [text_ids[first : first + 4] for first in range(n)] for n in sizes}
rounds = [{n: read_along(llm, *texts[n]).seconds for n in sizes} for _ in range(3)]
step_seconds = {n: sorted(sum((each[n] for each in rounds), ()))[2] for n in sizes}

few_seconds, many_seconds = step_seconds[1], step_seconds[32]
add_seconds = max((many_seconds - few_seconds) / 31, 1e-9)
fixed_seconds = few_seconds - add_seconds
knee = fixed_seconds / add_seconds
by_sum = {n: fixed_seconds + n * add_seconds for n in sizes}
by_max = {n: max(few_seconds, n * many_seconds / 32) for n in sizes}
measured("a step of one token", 1e3 * few_seconds, "ms")
measured("each further sequence adds", 1e3 * add_seconds, "ms")
print(
    f"on this chapter's clock a step of one token takes {1e3 * step_time(1):.1f} ms, and each further "
    f"sequence adds {1e3 * step_time.token:.1f} ms beyond the knee ({step_time.read / step_time.token:.0f})"
)
measured("the knee, by the sum, is at", knee, "sequences")
measured("by the max, it is at", 32 * few_seconds / many_seconds, "sequences")
guess_double.compare(2 + knee, "sequences", measured=True)
for name, formula in (("sum", by_sum), ("max", by_max)):
    miss = max(abs(formula[n] / step_seconds[n] - 1) for n in sizes)
    measured(f"the formula with the {name} is wrong by at most", 100 * miss, "%", 2)
# A larger batch takes no less time, and a doubled one hardly more than two of half its size.
is_disturbed = any(
    step_seconds[few] > 1.15 * step_seconds[many] for few, many in pairwise(sizes)
) or any(step_seconds[2 * n] > 2.3 * step_seconds[n] for n in sizes if 2 * n in step_seconds)
advice = "yes, so run this cell again" if is_disturbed else "no"
print(f"do these times look disturbed by another program? ⟨{advice}⟩")
measured(
    "a step of three sequences takes", step_seconds[3] / step_seconds[4], "times one of four", 2
)
picture(
    gains(step_seconds, {"sum": by_sum, "max": by_max}, knee),
    "Left: milliseconds of a step, measured and by both formulas; a vertical line marks the knee by the "
    "sum if it lies between 1 and 32. Right: how many more tokens per second each doubling of the batch "
    "gives.",
    number="24.1",
)

# %% [markdown]
# The prediction by the formula with the sum follows from the knee $k = t_{fixed} / t_{add}$. A step of
# $n$ sequences takes twice as long as a step of one if
# $t_{fixed} + n \cdot t_{add} = 2 (t_{fixed} + t_{add})$, so if $n \cdot t_{add} = t_{fixed} + 2 \cdot
# t_{add}$. Divide by $t_{add}$: $n = k + 2$.
#
# The formula with the sum lies nearer to what was measured where reading and computing hardly overlap, or
# where much of a small step is overhead. What does a doubling to $N$ sequences gain? Tokens per second
# are $n / t(n)$, so it is $2\, t(N/2) / t(N) - 1$. With the knee at $k$, the formula with the sum says
#
# $$\frac{t_{fixed} + N/2 \cdot t_{add}}{t_{fixed} + N \cdot t_{add}} \cdot 2 - 1 = \frac{k}{k + N}.$$
#
# With $t_0 = 0$, as in the figure, the formula with the max says 100 % up to $N = k$, then $2k/N - 1$,
# and nothing from $N = 2k$ on. (An overhead is shared by any batch, so with it a little gain remains: on
# this chapter's clock, 6 % from 16 to 32.) So by both formulas the gains fall, or stay level, as the
# batch grows; how soon they fall depends on the machine's knee.
#
# (Why three sequences may take as long as four. Details of one kernel; skip them at first reading.)
# What was measured follows this only on the whole, because a kernel does not work by single
# sequences. With weights in 4 bits, minigen's compiled step cuts a batch into **tiles** of four, two
# or one (on Intel's processors with AVX-512 VNNI, large batches also into tiles of six; chapter 34).
# A batch of three is a tile of two and a tile of one, each of which unpacks all 4-bit weights, so it
# often takes about as long as one tile of four. From five sequences on, the kernel also makes one
# more pass over each piece of the weights, which all tiles share. So the doubling from 4 to 8 is
# irregular: it gains less than the formulas say where that pass costs more than it saves, and more
# where it saves the tiles their unpacking (in our Figure 24.1 it gains the most). On a processor
# with AMX (instructions for products of small matrices, chapter 34), with 4-bit weights 28 sequences
# or more go through tiles of sixteen instead, so 32 may gain more than the formulas say. (Where torch
# computes the step, other sizes do well. If a single point of yours lies far off, another program had
# the processor: run the cell again.)
#
# Some rules of thumb name no machine: from 1 to 2 sequences one gains 80 to 90 %, from 16 to 32
# only 5 to 10 %. Compare them with your bars. With weights in bfloat16, most large GPUs have their knee at 150 sequences or more (an H100 at 295: two operations and two bytes per weight, 989 TFLOP/s
# over 3.35 TB/s), so there 32 sequences are hardly the beginning. What often ends the batch first
# is **memory**. The next cell computes it from bytes and operations alone, for a model of 70
# billion weights in 8 bits: as many sequences fit as (memory - weights - 1 GB to work in) / (bytes
# of one sequence's keys and values). The weights are 70.6 GB, of which a step reads 69.5 (chapter
# 17); a token's keys and values are 2 · 80 · 8 · 128 · 2 bytes = 328 kB.

# %%
shape_70b = SHAPES["Llama-3-70B"]
for name in ("H100 SXM", "H200"):
    machine = MACHINES[name]
    fit = most_sequences(config_of("Llama-3-70B"), 8, machine.memory, 1000)
    by_bytes = {
        n: decode_step(shape_70b, n, context=1000, weight_bits=8).seconds(machine)
        for n in (1, 2, 16, 32)
    }
    print(
        f"{name}: {machine.memory / 1e9:.0f} GB hold {fit} sequences of 1,000 tokens; 1 to 2 gains "
        f"{gain(by_bytes, 1, 2):.0%}, 16 to 32 would gain {gain(by_bytes, 16, 32):.0%}"
    )
for context in (1000, 8000):
    step = decode_step(shape_70b, 32, context=context, weight_bits=8)
    share = step.kv_bytes / (step.kv_bytes + step.weight_bytes)
    print(f"32 sequences of {context:,} tokens: {share:.0%} of the bytes are keys and values")

# %% [markdown]
# On a card of 80 GB, 32 such sequences do not fit at all, although each of them would be nearly
# free. On the larger card, an H200, both limits come at about 200: memory holds 211, and from
# nearly 200 on the arithmetic (989 · 10¹² operations per second in bfloat16, at least 2 per weight
# and sequence) takes longer than all reading (at 4,800 GB/s). By hand: a sequence adds (2 · 69.5 +
# 2.6 for attention) · 10⁹ / (989 · 10¹²) s = 0.143 ms of arithmetic, and 1,000 · 328 kB / 4,800
# GB/s = 0.068 ms of reading. The weights take 69.5 GB / 4,800 GB/s = 14.5 ms to read, so both take
# equally long where $14.5 + 0.068 \, n = 0.143 \, n$, at $n = 14.5 / (0.143 - 0.068) = 193$. (Here
# the weights are stored in 8 bits, and turned into bfloat16 before they are multiplied. This card
# can also multiply numbers of 8 bits, chapter 11's FP8, twice as fast. Then the arithmetic takes
# longer than all reading only from thousands of sequences on ($14.5 / (0.0729 - 0.0683)$, about
# 3,000: attention, over keys and values of 16 bits, stays as slow), so memory alone ends the
# batch.) And the reading of keys and values is not shared: it grows with the number of sequences
# and with their length. So a long context ends the gain of batching earlier than a short one.
#
# ## The smallest scheduler
#
# A scheduler has four methods:
#
# | method | the engine says | the scheduler |
# |---|---|---|
# | `add(sequence)` | here is a new sequence | puts it into its queue |
# | `schedule()` | a step begins | returns chunks: which sequences run, each with how many of its tokens |
# | `commit(chunks, tokens)` | the step is computed, these tokens were chosen | counts the chunks as computed, appends the tokens, frees what has finished; may return the pairs of sequence and token, as the exercises do |
# | `abort(sequence)` | drop this sequence (its client has gone, for example) | forgets the sequence and frees its blocks |
#
# It gets blocks from the [**block manager**](../docs/glossary.md#block-manager): the block tables of all
# sequences, over chapter 21's allocator and chapter 23's prefix cache:
#
# | call | what it does |
# |---|---|
# | `manager.allocate(sequence, limit)` | starts a sequence. It checks that there are blocks for all its tokens so far, and a free row for its block table (the manager keeps one array, with a row for each sequence that may run); if not, it returns 0 and changes nothing. It takes blocks only for what is cached and for the tokens to compute now, at most `limit`, and returns the number of these tokens |
# | `manager.allocate_slots(sequence, n)` | makes room for the next `n` tokens of a running sequence; returns False if blocks are short |
# | `manager.mark_computed(sequence, n)` | counts `n` tokens as computed |
# | `manager.free(sequence)` | gives all its blocks back, and counts it as not computed |
#
# And this is what it uses of a sequence:
#
# | name | meaning |
# |---|---|
# | `len(sequence)` | its tokens so far, those of the prompt and of the answer |
# | `sequence.num_wanted` | the tokens still to be computed: 1 in a decode; in a prefill all that is left of the prompt, and after a preemption also of the answer (at most 32 while logprobs of the prompt are wanted) |
# | `sequence.prompt_ids`, `output_ids`, `token_ids` | the prompt, the answer so far, and both in one list |
# | `sequence.block_ids` | its block table (chapter 21); empty as long as it has not started |
# | `sequence.append(token_id)` | adds a token to its answer |
# | `sequence.finish_reason` | None until the answer has ended |
#
# A chunk is a `ScheduledChunk(sequence, num_tokens)` or a pair of the two; `commit` always gets
# `ScheduledChunk`s. It has at least one token, and a sequence has at most one chunk per step. A chunk
# gives a token only if it reaches the end of what is known. For example, a prompt of 40 tokens goes in
# chunks of 16: the first two chunks give no token, and the third (8 tokens) gives the first token of the
# answer. The sequences that get a token are the **samples** of the step: `samples_of(chunks)` returns
# them in order, and `tokens` has one token for each of them, whose id is `token.token_id`. Call
# `samples_of` before `mark_computed`, because it looks at what was computed before the step.
#
# This scheduler serves one request at a time, and the engine accepts it:


# %%
class OneAtATime:
    def __init__(self, manager, max_num_seqs, max_num_batched_tokens):
        self.manager, self.queue = manager, []

    def add(self, sequence):
        self.queue.append(sequence)

    def schedule(self):
        if not self.queue:
            return []
        first = self.queue[0]
        if not first.block_ids:  # it has not begun
            return [(first, self.manager.allocate(first, len(first)))]
        self.manager.allocate_slots(first, 1)
        return [(first, 1)]

    def commit(self, chunks, tokens):
        for chunk, token in zip(chunks, tokens, strict=True):
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
            chunk.sequence.append(token.token_id)
            if chunk.sequence.finish_reason is not None:
                self.abort(chunk.sequence)

    def abort(self, sequence):
        self.manager.free(sequence)
        self.queue.remove(sequence)


alone, alone_seconds = timed(load(scheduler=OneAtATime))
print(f"{alone.num_steps} steps instead of {run.num_steps}")
same = sum(one == other for one, other in zip(alone.outputs, run.outputs, strict=True))
measured("the same answers as in batches", same, f"of {len(twelve)}", 2)

# %% [markdown]
# (In other kernels, answers may differ where two tokens are nearly equally likely: a batch
# of another size may add its numbers in another order. The compiled step adds them in the same.)
#
# ## The idea, drawn
#
# A finished sequence leaves the batch, and a waiting one takes its slot in the very next step. Nothing in
# the model asks for a batch to stay together: the scheduler forms it again for every step. This is
# **continuous batching** ([Yu et al. 2022](https://www.usenix.org/conference/osdi22/presentation/yu)).
# Press play, or move the step. A row is a request: grey while it waits, amber in its prefill, blue in its
# decode, with a tick per token and a dot at its end. The requests arrive one by one, and there are four
# slots again. As soon as no batch runs, a static batch starts with those that wait at that moment, even
# if it is only one.

# %%
requests = random_arrivals(12, a_second=30, prompts=(8, 60), outputs=(4, 80))
settings = partial(Knobs, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
policies = {
    name: simulate(requests, settings(name, max_num_seqs=slots), step_time)
    for name in ("static", "dynamic", "continuous")
}
stories = {name: story(each.events) for name, each in policies.items()}
side_by_side = {name: stories[name] for name in ("static", "continuous")}
replay(
    lambda step: gantt(side_by_side, step, by="seconds"),
    max(len(each) for each in side_by_side.values()),
    "Two timelines of twelve requests, at their ends: with static batches requests wait beside empty "
    "slots, with continuous ones beside an empty slot for the rest of a step at most. Below: each "
    "step's tokens, and the blocks held.",
    number="24.2",
)

# %% [markdown]
# **Dynamic batching**, which servers for other kinds of models use, is static batching with a wait
# before the start: it gathers requests until a batch is full, or until the first one has waited long
# enough (`max_wait`, here 50 ms). Its finished slots stay empty, too. In numbers, with the time to
# first token (TTFT):

# %%
policies["one at a time"] = simulate(requests, settings("static", max_num_seqs=1), step_time)
print("                steps   seconds   tokens/s   mean TTFT   longest TTFT")
for name in ("one at a time", "static", "dynamic", "continuous"):
    each = policies[name]
    first = each.first_tokens()
    print(
        f"{name:<14} {each.num_steps:>6} {each.seconds:>9.2f} {each.throughput:>10.0f} "
        f"{1e3 * mean(first):>8.0f} ms {1e3 * max(first):>11.0f} ms"
    )
for name in ("static", "dynamic"):
    starts = Counter(times[0] for times in policies[name].token_times())  # a batch starts together
    print(f"{name} batching makes {len(starts)} batches, of", *starts.values(), "requests")

# %% [markdown]
# Here the wait saves a batch, but no time: the throughput is nearly that of static batching. Three
# requests come into an earlier batch, so the mean TTFT falls a little. All others wait longer, and
# the very first one waits 50 ms in vain. Continuous batching needs no such wait: a late request
# joins the running batch as soon as a slot is free.
#
# ## How much is it worth? It depends
#
# "Twice as fast" is often heard. A static batch lasts as long as its longest answer, so if all
# answers are equally long and enough requests wait, nothing is lost. The cell takes 160 requests
# that are all there from the start, eight slots, and answers whose lengths are spread in four
# ways:
#
# - all of 20 tokens;
# - any length between two limits, each equally likely: from 18 to 22 tokens, up to 1 to 39;
# - most of 5 tokens, and a share of 5 to 40 % of them of 100 tokens;
# - many short ones and ever fewer long ones, without an upper limit (an **exponential** distribution),
#   with about 5, 10 or 20 tokens on average.
#
# The horizontal axis shows how many times as long as the mean the longest of eight answers is.
# Predict, for the points of the picture, the largest ratio of static over continuous steps.

# %%
guess_spread = predict("At most how many times as many steps does static batching take?", None)


# %%
def one_spread(outputs: list[int]) -> tuple[float, float]:
    """(longest of a static batch over the mean, static steps over continuous ones)."""
    arrivals = [Ask.of_lengths(0.0, 2, output) for output in outputs]
    steps = {
        name: simulate(arrivals, settings(name), step_time).num_steps
        for name in ("static", "continuous")
    }
    longest = mean(max(outputs[first : first + 8]) for first in range(0, len(outputs), 8))
    return longest / mean(outputs), steps["static"] / steps["continuous"]


rng = random.Random(24)
of_160 = range(160)
points = {
    "all alike": [one_spread([20] * 160)],
    "evenly between two lengths": [
        one_spread([rng.randint(low, 40 - low) for _ in of_160]) for low in (18, 15, 10, 5, 1)
    ],
    "most short, a few long": [
        one_spread([100 if rng.random() < share else 5 for _ in of_160])
        for share in (0.05, 0.1, 0.2, 0.4)
    ],
    "exponential": [
        one_spread([1 + int(rng.expovariate(1 / each)) for _ in of_160]) for each in (5, 10, 20)
    ],
}
picture(
    spread(points),
    "Steps of static over continuous batching, by the spread of the answers: the more they spread, the "
    "more static batching loses.",
    number="24.3",
)
ratios = [ratio for found in points.values() for _, ratio in found]
print(
    f"static batching takes {min(ratios):.1f} to {max(ratios):.1f} times as many steps in the picture"
)
guess_spread.compare(round(max(ratios), 1), "times")
tenth_long = [Ask.of_lengths(0.0, 2, 100 if number % 10 == 9 else 5) for number in of_160]
# nothing to read: the sum
by_sum_here = StepTime(read=0.0, token=add_seconds, overhead=fixed_seconds)
ends = {
    name: [simulate(tenth_long, settings(name), clock) for clock in (step_time, by_sum_here)]
    for name in ("static", "continuous")
}
(static_run, static_here), (continuous_run, continuous_here) = ends.values()
print(
    "not in the picture, exactly every tenth answer long: "
    f"{static_run.num_steps / continuous_run.num_steps:.1f} times as many steps, "
    f"{static_run.seconds / continuous_run.seconds:.1f} times as long by the clock"
)
measured("by this machine's sum formula", static_here.seconds / continuous_here.seconds, "times")
of_tenth = [each.output_tokens for each in tenth_long]
for name, order in (("in order", of_tenth), ("sorted by length", sorted(of_tenth))):
    padded = sum(8 * max(order[first : first + 8]) for first in range(0, 160, 8))
    print(f"padded to the longest of eight, {name}: {padded:,} tokens for {sum(of_tenth):,}")

# %% [markdown]
# (In one more run, exactly every tenth answer is long, so 16 of the 20 static batches hold one long
# answer each: a worse case than any of the points.) The points follow max / mean, and never exceed
# it: static batching takes the sum of the longest answers, and continuous batching at least all
# tokens / 8 steps. The point "all alike" lies on it. The others stay below it, most where a few
# answers are very long: when the queue is empty, continuous batching also runs the last long
# answers beside empty slots. Steps are not seconds: a continuous step is fuller. On the clock,
# whose knee is at eight sequences, steps of one to eight tokens take equally long, and the two
# ratios are nearly equal. Where each sequence adds to the step, continuous batching gains less: by
# this machine's formula with the sum, the last ratio printed. An engine that keeps a static batch
# in one array also computes its finished rows: each answer is **padded** to the longest of its
# batch. The last two lines count that. Sorting the requests by length first (**bucketing**) removes
# the padding here, but a server does not know how long answers will be. minigen **packs** the rows
# that still run, so it computes no finished row. (On a GPU it fills a step of decodes up to the
# next recorded batch size, because a CUDA graph is recorded for a fixed one, see chapter 15. And
# where torch computes the step, attention pads the block tables, as chapter 22 shows.)
#
# ## A long prompt makes others stutter
#
# Four people read along as their answers are written, and a fifth sends a text of 600 tokens. A
# step that computes all of it takes as long as its arithmetic and the overhead, and meanwhile the
# others get no token. Predict the longest gap between two tokens of the others; a step of one
# token takes 5 ms on our clock.
#
# The remedy is a **token budget** per step (`max_num_batched_tokens`). Every decoding sequence gets its
# one token, and the prompt gets what is left, a **chunk**. So the prefill extends over several steps,
# and the others go on. This is **chunked prefill**
# ([Agrawal et al. 2023](https://arxiv.org/abs/2308.16369); against stalls,
# [2024](https://arxiv.org/abs/2403.02310)).

# %%
guess_gap = predict("Longest gap without chunks, in ms?", None, within=1.3)

# %%
readers = [Ask.of_lengths(0.01 * place, prompt=12, output=90) for place in range(4)]
with_long = [*readers, Ask.of_lengths(0.2, prompt=600, output=20)]
budgets = {
    budget: simulate(with_long, settings(max_num_batched_tokens=budget), step_time)
    for budget in (1024, 256, 64, 32, 16)
}
drawn = {f"budget {budget}": budgets[budget].token_times()[:4] for budget in (1024, 64, 16)}
picture(
    stutter(drawn, arrives=0.2, limit=0.1),
    "Gaps between tokens over time, for three budgets. Each colour is one of the four readers, whose "
    "points mostly coincide; the amber line is the arrival of the long prompt, the dashed one "
    "100 ms, only to compare.",
    number="24.4",
)
gaps = {}
print("budget   longest gap   median gap   long prompt's TTFT   readers done   all done")
for budget, each in budgets.items():
    others = [gap for found in each.gaps()[:4] for gap in found]
    gaps[budget] = 1e3 * max(others)
    done = max(times[-1] for times in each.token_times()[:4])
    print(
        f"{budget:>6} {gaps[budget]:>10.0f} ms {1e3 * median(others):>9.1f} ms "
        f"{1e3 * each.first_tokens()[4]:>17.0f} ms {done:>12.2f} s {each.seconds:>8.2f} s"
    )
guess_gap.compare(round(gaps[1024]), "ms")

real_gaps = {}
for budget in (1024, 64):
    chunked = load(max_num_seqs=8, max_num_batched_tokens=budget)
    with chunked.record() as recorder:
        real = serve(chunked, with_long, text_ids, step_time)
    assert [len(each) for each in real.outputs] == [each.output_tokens for each in with_long]
    assert real.token_times() == budgets[budget].token_times(), "the clock sees no difference"
    times = token_times(recorder.events, real.ids)[:4]
    real_gaps[budget] = max(late - early for each in times for early, late in pairwise(each))
    measured(f"{budget:>6}, in real time: the longest gap", 1e3 * real_gaps[budget], "ms")

# %% [markdown]
# Small budgets shorten the gap, and the long prompt pays: each of its steps also carries the
# others' tokens and the overhead, so its first token comes later: by a tenth with a budget of 64,
# by half with a budget of 16. Yet all is done a little earlier: a decode that rides in a chunk's
# step costs its own arithmetic only.
#
# Do the readers pay, too? With a budget of 64, the prefill takes ten steps of 33 ms; with 16, it
# takes 50 steps of 9 ms. So with 16 most of their tokens come during the prefill, and the median
# gap rises from 5 to 9 ms. But they get a token in every one of these steps, so their answers are
# complete earlier. The price of a small budget is the long prompt's TTFT. A budget below the knee
# makes no sense, because such a step would take no less time; this clock's knee is at 8 tokens. (A
# token of a prompt costs as much arithmetic here as a sequence that decodes, so the knee counts
# tokens, too.) So 16 to 64 are good budgets **here**: their gaps are far below 100 ms, and which of
# them to take depends on how long a prompt may wait. Most large GPUs have their knee at 150 tokens
# or more, and engines on them use 512 to 16,384.
#
# The last two lines show the same on the real engine, in your machine's own time. The cell asserts
# that by the clock each token came at the same time as in the simulation.
#
# ## One step, token by token
#
# What does such a mixed batch look like? Each row is a sequence, and each box a token that this
# step computes. Below the token stand its position, and the slot of the cache that its key and
# value go to. A frame marks the tokens whose logits are needed: the last one of each sequence that
# is computed to its end. A chunk from the middle of a prompt needs none. (The fourth request waits:
# this step's budget is used up.)

# %%
from minigen_course.figures.trace_views import step_view

mixed = load(max_num_seqs=4, max_num_batched_tokens=16)
lengths = ((0.0, 5, 8), (0.0, 7, 9), (0.011, 40, 4), (0.012, 6, 5))  # seconds, prompt, output
short = [Ask.of_lengths(*each) for each in lengths]
few = serve(mixed, short, text_ids, step_time)
spelled = {
    request: [mixed.tokenizer.decode([token]) for token in (*ask.prompt_ids, *output)]
    for request, ask, output in zip(few.ids, few.asks, few.outputs, strict=True)
}
steps = story(few.events)
replay(
    lambda step: step_view(steps, step, block_size=16, budget=16, texts=spelled),
    len(steps),
    "The tokens of one step: two sequences decode, and a third one computes a chunk of its prompt.",
    number="24.5",
    at=3,
)

# %% [markdown]
# ## When blocks run out
#
# How many sequences may start? An answer's length is not known before its end. A scheduler that
# reserves blocks for the longest answer (`max_tokens`) never lacks one for a running sequence, and
# leaves many of them idle if answers end early. If it reserves only what is needed now, a running
# sequence may find no free block for its next token. (A prompt that is computed in chunks may find
# none in its middle: `allocate` looks for blocks for all its tokens, but takes only those of the
# next chunk, and meanwhile other sequences may take the rest.) Then one sequence, the *victim*,
# must give its blocks back: it is **preempted**. The last one to arrive is chosen, so that the
# first always makes progress. The victim waits at the head of the queue. Later all its tokens,
# also those that it already generated, are computed again like a prompt. Nothing of the answer is
# lost, only work.
#
# This holds without a prefix cache, as in most runs of this chapter. With chapter 23's cache, which
# minigen switches on by default, the victim's full blocks stay there until another sequence needs them.
# When the victim starts again, it computes only what is not there. The last lines below count that,
# with prompts of which no two begin alike. (`lesson` has the course's own solutions of the exercises
# below: `ChunkingScheduler` reserves for the longest answer, `PreemptingScheduler` only for now.)

# %%
from minigen_course.ch24_scheduler import lesson

crowd = random_arrivals(12, a_second=40, prompts=(20, 60), outputs=(20, 100), seed=5)
memory = {
    "room for the longest": lesson.ChunkingScheduler,
    "room for now": lesson.PreemptingScheduler,
}
short_of_blocks = {
    (name, blocks): simulate(
        crowd, settings(kind, max_num_batched_tokens=128, num_blocks=blocks), step_time
    )
    for blocks in (16, 24, 60)
    for name, kind in memory.items()
}
for (name, blocks), each in short_of_blocks.items():
    print(
        f"{blocks} blocks, {name:<21} {each.num_steps:>4} steps, {each.seconds:.2f} s, "
        f"{each.num_preempted} preempted, {each.num_computed:,} tokens computed"
    )
of_pool = pool_states(short_of_blocks["room for now", 16].events)
preempts = [any(each.kind is EventKind.PREEMPTED for each in state.events) for state in of_pool]
# A step begins with the blocks that are held at the end of the step before.
# `fills(block_size)` has the tokens of each block that is held; there are 16 blocks.
full = [len(state.fills(16)) >= 0.9 * 16 for state in of_pool[:-1]]
calm = sum(was_full and not any_left for was_full, any_left in zip(full, preempts[1:], strict=True))
print(
    f"{sum(full)} of {len(of_pool)} steps began with 15 or 16 of 16 blocks held; in {calm} of these no "
    "sequence was preempted"
)
own_prompts = [
    replace(each, prompt_ids=tuple(range(1000 * number, 1000 * number + len(each.prompt_ids))))
    for number, each in enumerate(crowd)
]
for cached in (False, True):
    knobs = settings(lesson.PreemptingScheduler, max_num_batched_tokens=128, num_blocks=24)
    each = simulate(own_prompts, replace(knobs, enable_prefix_caching=cached), step_time)
    print(
        f"24 blocks, {'with' if cached else 'without'} the prefix cache: {each.num_preempted} "
        f"preempted, {each.num_computed:,} tokens computed"
    )
picture(
    gantt(
        {name: short_of_blocks[name, 16].events for name in memory},
        by="seconds",
        budget=128,
        num_blocks=16,
    ),
    "Two timelines in 16 blocks: with reservations few run at once; without, some are preempted. "
    "Dashed: the limits.",
    number="24.6",
)

# %% [markdown]
# With room for now, more sequences run at once, and the blocks are in use. But some tokens are
# computed again, and with 24 blocks that takes away nearly all of the gain in seconds. (Here every
# answer is as long as its reservation allows. Where answers end far earlier, reserving loses
# more.) With memory for all, both are the same. With 24 blocks, the prefix cache saves about half
# of the work that is done again, and not all of it: a block that is not full is not kept, and
# others soon take some of the full ones.
#
# Nearly full memory alone preempts no sequence, as the line on steps with 15 or 16 blocks held
# says: a sequence is preempted only when more blocks are wanted than are free.
#
# Why compute again at all? The victim's blocks could be copied to the host's memory and back
# (**swapping**). The **host** is the computer that holds the card, with its CPU and its memory;
# **PCIe** is the bus between it and the card. Take one real machine: Llama-3-8B in bfloat16 on an
# H100, which reaches its host over PCIe 5. The cell computes both times from bytes and operations,
# with the card's peak speed, and the bus's bandwidth and time per copy from chapter 41: 63 GB/s,
# and 5 µs (an assumption). In chapter 22's cache each block has its keys and its values in each
# layer, at different places, so it needs two copies for each layer.

# %%
from minigen_course.ch41_tensor_parallel.lesson import LINKS

card, bus, shape_8b = MACHINES["H100 SXM"], LINKS["PCIe 5 x16"], SHAPES["Llama-3-8B"]
victim = 2048  # tokens
again = prefill_step(shape_8b, victim, weight_bits=16).seconds(card)
moved = 2 * 2 * shape_8b.kv_numbers(victim)  # bytes in bfloat16, there and back
print(f"{victim:,} tokens computed again: {1e3 * again:.0f} ms")
print(f"copied in one piece: {1e3 * moved / bus.bandwidth:.1f} ms for {moved / 1e6:.0f} MB")
for block_size in (16, 64, 256):
    copies = 2 * 2 * shape_8b.layers * victim // block_size
    print(
        f"in blocks of {block_size:>3}: {copies:>6,} copies of {moved / copies / 1e3:.0f} kB, "
        f"{1e3 * (moved / bus.bandwidth + copies * bus.latency):.0f} ms"
    )

# %% [markdown]
# By the bus's bandwidth alone, copying would be faster. But a block of 16 tokens needs many small
# copies, and starting them takes about ten times as long as moving their bytes. So here
# recomputing wins with blocks of 16, and copying with blocks of 256, or where a kernel first
# gathers them in one piece. vLLM's authors [measured
# this](https://github.com/vllm-project/vllm/pull/12) and chose recomputation; their
# [paper](https://arxiv.org/abs/2309.06180) finds both about equal, end to end, with blocks of 16
# to 64 tokens. (What a short victim costs in a step that runs anyway is the harder part of the
# third exercise.)
#
# ## Which request may overtake?
#
# All schedulers above serve in the order of arrival. It is tempting to let short prompts go first,
# because a step with a long prompt makes all others wait. (Shortest first would help more if
# answers could be sorted, since they usually take most of a request's time. But an answer's length
# is not known before it ends.) Look at the longest wait, too:


# %%
class ShortestFirst(lesson.SlotScheduler):
    def add(self, sequence):
        self.waiting.append(sequence)
        self.waiting = type(self.waiting)(sorted(self.waiting, key=len))


stream = random_arrivals(40, a_second=21, prompts=(10, 30), outputs=(10, 60), seed=9)
stream[4] = Ask.of_lengths(stream[4].at, prompt=200, output=20)
print(f"{len(stream) / stream[-1].at:.0f} requests per second come")
waits = {}
for name, kind in (("in order", lesson.SlotScheduler), ("shortest first", ShortestFirst)):
    each = simulate(stream, settings(kind, max_num_seqs=3), step_time)
    waits[name] = each.first_tokens()
    print(
        f"{name:<15} mean TTFT {mean(waits[name]):.2f} s, the long prompt's {waits[name][4]:.2f} s, "
        f"the longest of all {max(waits[name]):.2f} s; {len(stream) / each.seconds:.1f} served per second"
    )

# %% [markdown]
# In order, another request waits longest. With the shortest first, the longest wait is more than twice as
# long, and the long prompt has it: as long as a shorter one is always waiting, it never runs. It
# **starves**. This happens while more requests come than the machine can serve. Here about 24 per second
# come (the rate asked for is 21; chance made it more), and three slots serve between 14 and 15. Below that load
# the long prompt only waits longer. minigen's engine goes by a number that the caller gives (`priority`,
# lower first), and by arrival among equals.
#
# ## Drag it: all knobs on the same arrivals
#
# Choose the policy, the batch slots, the token budget and the number of blocks. Find the fewest steps,
# and then the fewest blocks that still give them. With the best settings, how many more steps do 30
# blocks take? (The answers are below the figure.)

# %%
traffic = random_arrivals(14, a_second=40, prompts=(10, 120), outputs=(5, 80), seed=7)


def timeline_of(policy, max_num_seqs, budget, blocks):
    knobs = settings(
        policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, num_blocks=blocks
    )
    found = simulate(traffic, knobs, step_time)
    return gantt({policy: found.events}, by="seconds", budget=budget, num_blocks=blocks)


explore(
    timeline_of,
    "A timeline of fourteen requests, with the tokens of each step and the blocks in use.",
    "24.7",
    policy=["continuous", "static", "dynamic"],
    max_num_seqs=(1, 14, 1, 6),
    budget=(14, 256, 2, 64),
    blocks=(13, 80, 1, 60),
)

# %% [markdown]
# <details><summary>The fewest steps, the fewest blocks, and the price of 30</summary>
# 90 steps, with continuous batching, 14 slots, a budget of 256 and at least 51 blocks. With 30 blocks it
# takes 150 steps, so 60 more. (With enough blocks, 9 slots and a budget of 138 give 90 steps,
# too.)</details>
#
# ## Your turn
#
# Three exercises, each of which adds one idea to the one before: batch slots, chunks, preemption.
# `check` says in which step which sequence should have run. The section "The smallest scheduler"
# has every call that you need, besides `allocate_longest(manager, sequence, limit)`. It returns
# what `allocate` returns, and reserves blocks for the longest answer: the first two schedulers
# start their sequences with it, the third one with `allocate`. The base class of the last two has
# `self.manager`, `self.max_num_seqs`, `self.max_num_batched_tokens`, `self.waiting` (a deque) and
# `self.running` (a list), both in the order of arrival. `samples_of` comes from
# `minigen.sequence`.

# %%
task(24, "SlotScheduler")

# %%
# exercise: minigen_course.ch24_scheduler.lesson.SlotScheduler
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence


class SlotScheduler:
    """Continuous batching: when a sequence finishes, the next takes its slot in the batch at once.

    Prompts are computed whole, in the order of arrival. A sequence starts only with blocks for its
    longest answer. At most `max_num_seqs` sequences run, and a step has at most
    `max_num_batched_tokens` tokens.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        raise NotImplementedError  # your turn

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        raise NotImplementedError  # your turn

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule a token per running sequence, then whole prompts, within all limits."""
        raise NotImplementedError  # your turn

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, append each sample's token, and return these pairs."""
        raise NotImplementedError  # your turn

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""
        raise NotImplementedError  # your turn


# %%
my_slots = check(24, SlotScheduler=SlotScheduler)

# %%
task(24, "ChunkingScheduler")

# %%
# exercise: minigen_course.ch24_scheduler.lesson.ChunkingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class ChunkingScheduler(WholePromptScheduler):
    """Continuous batching with chunked prefill: no step exceeds its budget of tokens."""

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule decodes first, then partly computed prompts, then new sequences, in chunks."""
        raise NotImplementedError  # your turn


# %%
my_chunks = check(24, ChunkingScheduler=ChunkingScheduler)

# %%
task(24, "PreemptingScheduler")

# %%
# exercise: minigen_course.ch24_scheduler.lesson.PreemptingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class PreemptingScheduler(WholePromptScheduler):
    """Chunked prefill and preemption: a sequence has only the blocks that it needs now.

    If blocks run out, the last sequence to arrive is preempted: it frees its blocks, waits in front
    of all that arrive later, and is computed again, except for what the prefix cache still holds.
    """

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule chunks, with KV slots for the next tokens only; preempted sequences get none."""
        raise NotImplementedError  # your turn


# %%
mine = check(24, PreemptingScheduler=PreemptingScheduler)

# %% [markdown]
# Now the third one goes into the engine, with the first six of the twelve requests of *When blocks run
# out*, in a memory that is too small for them. As long as yours has not passed, the course's own runs, and
# the line below says so. `save_part` writes a part to a file with all that it uses; what it returns is
# what `minigen serve --scheduler` takes (chapter 51's server). The last two lines of the cell load it from
# that file, and serve the four requests of Figure 24.5.

# %%
small = load(scheduler=mine, max_num_seqs=8, num_blocks=20, max_num_batched_tokens=64)
served = serve(small, crowd[:6], text_ids, step_time)
whose = "your" if mine is PreemptingScheduler else "the course's own"
print(f"{served.num_preempted} preempted, {served.num_steps} steps, by {whose}", end=" ")
print(small.describe()["scheduler"])
name = save_part(mine, Path(mkdtemp()) / "mine.py")  # a path, a colon, and the class's name
from_file = serve(load(scheduler=name, max_num_seqs=8), short, text_ids, step_time)
print("and from a file:", name.rpartition(":")[2], "answers", len(from_file.outputs), "requests")

# %% [markdown]
# ## The package's version
#
# The course's solutions open once yours have passed. The engine's scheduler does all of this, and
# a little more: priorities, several answers to one prompt that fork after it (chapter 22), and
# hardly more work per step when ten thousand requests wait. In its code, a rank is (priority,
# arrival), and siblings are the other answers to one prompt. `_group` puts decodes before prompts.
# (This is not the order of arrival, so a victim may already be in the batch; then its tokens
# return to the budget.) Drafts are tokens guessed ahead, which one step verifies (speculative
# decoding); no run of this chapter has any, so the lines about them can be skipped.

# %%
reveal(24, SlotScheduler=my_slots, ChunkingScheduler=my_chunks, PreemptingScheduler=mine)

# %%
from minigen.engine.scheduler import ContinuousScheduler

show(
    ContinuousScheduler.schedule,
    ContinuousScheduler._continue_running,
    ContinuousScheduler._preempt_last,
    ContinuousScheduler._admit,
    ContinuousScheduler.commit,
)
for blocks in (16, 24, 60):
    knobs = settings(ContinuousScheduler, max_num_batched_tokens=128, num_blocks=blocks)
    own = simulate(crowd, knobs, step_time)
    small = short_of_blocks["room for now", blocks]
    assert own.token_times() == small.token_times()
print("the small preempting scheduler and the engine's own give each token at the same time")

# %% [markdown]
# ## The measurement again
#
# The twelve requests of the beginning, in three ways on your machine: one at a time, and static
# and continuous with four batch slots. Compare the ratio in seconds with the ratio in steps: a
# continuous step is fuller, and a fuller step takes longer (figure 24.1).

# %%
continuous, continuous_seconds = timed(load(max_num_seqs=slots))
told = story(continuous.events)
busy = sum(len(step.parts) for step in told.steps)
print(f"steps: {alone.num_steps} one at a time, {run.num_steps} static, {len(told)} continuous")
print(f"empty slots, continuous: {1 - busy / (slots * len(told)):.0%}")
for name, seconds in (
    ("one at a time", alone_seconds),
    ("static", static_seconds),
    ("continuous", continuous_seconds),
):
    measured(name, seconds, "s")
in_steps = run.num_steps / continuous.num_steps
print(f"static over continuous, in steps: {in_steps:.1f}")
measured("static over continuous, in seconds", static_seconds / continuous_seconds)

# %% [markdown]
# ## A bug hunt
#
# The scheduler below is plain and complete, for one answer to each prompt. **The report:** *under
# load, answers repeat themselves in the middle and then stop too early. The same questions, asked
# again at night, get perfect answers.*
#
# Find the mistake. First reproduce it with a test that fails on this scheduler and passes on every
# right one. Then fix it, here in this cell. `serve_toy(prompts, scheduler=..., num_blocks=...)`
# (its result has `answers`, `streamed`, which is what each client received, and `num_preempted`;
# its blocks have 4 tokens, its answers 12) runs it in the real engine around a toy model, whose
# next token follows from all that it reads. Your test is judged as well, on schedulers that are
# right and on some with a mistake of the same family.
#
# Such bugs have happened: [FastDeploy](https://github.com/PaddlePaddle/FastDeploy/pull/3080)
# computed only the prompt of a preempted request, and [vLLM's plugin for
# Gaudi](https://github.com/vllm-project/vllm-gaudi/pull/524), Intel's accelerator, did so, too, and
# counted output tokens twice.

# %%
# hunt: minigen_course.ch24_scheduler.hunt
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


class PlainScheduler:
    """First come, first served, one answer per prompt; the last sequence to arrive is preempted."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        budget = self.max_num_batched_tokens
        for sequence in list(self.running):
            num_tokens = min(sequence.num_wanted, budget)
            while sequence in self.running and not self.manager.allocate_slots(
                sequence, num_tokens
            ):
                self.preempt(self.running[-1])
            if sequence in self.running and num_tokens:
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            num_tokens = self.manager.allocate(self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks

    def preempt(self, victim: Sequence) -> None:
        """Free its blocks; it starts again once there are enough, before all waiting sequences."""
        self.running.remove(victim)
        self.manager.free(victim)
        victim.token_ids = list(victim.prompt_ids)
        self.waiting.appendleft(victim)

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)


def test_scheduler(Scheduler: Any) -> None:
    """Assert what every correct scheduler does, and the one above does not.

    `serve_toy(prompts, scheduler=Scheduler, num_blocks=...)` of minigen_course.lab.toy_engine
    runs it.
    """
    raise NotImplementedError  # your turn


# %%
hunt(24, test=test_scheduler, mended=PlainScheduler)
for num_blocks in (20, 5):
    told = serve_toy([[5, 3, 8], [9, 9, 1, 4, 7]], scheduler=PlainScheduler, num_blocks=num_blocks)
    print(f"{num_blocks:>2} blocks, {told.num_preempted} preempted:", *told.answers[1])

# %% [markdown]
# ## Claims


# %% jupyter={"source_hidden": true}
def here(few: int, many: int) -> str:
    return f"{mark(100 * gain(step_seconds, few, many), '%', 2)} on this machine"


stutters = f"{gaps[1024]:.0f} ms become {gaps[64]:.0f} ms in steps of 64 tokens"
verdicts(
    "24",
    Claim(
        "From 1 to 2 sequences, batching gains 80 to 90 %",
        here(1, 2),
        within(100 * gain(step_seconds, 1, 2), 80, 90),
        "the gain follows the knee of the machine; on a large GPU it is nearly 100 %",
        measured=True,
    ),
    Claim(
        "From 16 to 32 sequences, batching gains only 5 to 10 %",
        here(16, 32),
        within(100 * gain(step_seconds, 16, 32), 5, 10),
        "by the formula with the sum, k / (k + 32), true where 32 sequences are 9 to 19 times the knee "
        "k; by the one with the max and no overhead, 2k / 32 - 1, where they are 1.8 to 1.9 times k. By "
        f"bytes an H200 would gain {gain(by_bytes, 16, 32):.0%} with a model of 70 billion weights",
        measured=True,
    ),
    Claim(
        "Continuous batching raises throughput without making any request slower",
        f"a step of 32 sequences takes {mark(many_seconds / few_seconds, 'times', 2)} as long as "
        "a step of one",
        holds(many_seconds <= 1.1 * few_seconds),
        "read as: no slower than alone. A fuller step is a longer step: each user's tokens come "
        "more slowly, and more users get some",
        measured=True,
    ),
    Claim(
        "Continuous batching is twice as fast as static batching",
        f"{min(ratios):.1f} to {max(ratios):.1f} times as many steps in figure 24.3, by the spread of the answers",
        holds(min(ratios) >= 1.8 and max(ratios) <= 2.2),
        "in steps it is near the longest answer of a batch over the mean, and nothing where all are "
        "alike; in seconds it is less wherever a fuller step takes longer: in this notebook, with one set "
        f"of answers, {in_steps:.1f} in steps and {mark(static_seconds / continuous_seconds)} in seconds",
    ),
    Claim(
        "A long prompt stalls all decodes, unless it is computed in chunks",
        f"600 tokens: {stutters}; measured {mark(1e3 * real_gaps[1024], 'ms', 2)} and "
        f"{mark(1e3 * real_gaps[64], 'ms', 2)}",
        holds(gaps[1024] > 5 * gaps[64]),
        "the gap is the time of the largest step, and a budget limits that",
        source="[Agrawal et al. 2024](https://arxiv.org/abs/2403.02310)",
    ),
    Claim(
        "Preemption begins when 90 % of the memory is used",
        f"{sum(full)} steps began with at least 90 % of the blocks held; in {calm} of these no sequence was "
        "preempted",
        holds(calm == 0),
        "it begins when a block is wanted and none is free; 90 % is where to set an alarm",
    ),
)

# %% [markdown]
# ## Summary
#
# - Before each step, the scheduler chooses the sequences and the number of tokens of each.
# - Static batching keeps a batch until its longest answer ends; continuous batching refills it at
#   every step. While requests wait, the gain in steps is near the longest answer over the mean; in
#   seconds it is less where a fuller step takes longer.
# - Left of the machine's knee, most of a step is work that all sequences share, so a larger batch gains
#   much; far right of it, little. On a large GPU, memory often ends the batch before the knee does,
#   because keys and values are not shared.
# - A token budget cuts long prompts into chunks, so that the others' tokens keep coming. The long prompt
#   waits longer for its first token.
# - Reserving for the longest answer wastes memory. Reserving for now needs preemption: the last to arrive
#   gives its blocks back and is computed again, except for what a prefix cache still holds. With small
#   blocks, by the calculation above, that is faster than many small copies to the host and back.
# - Serving the shortest first often lowers the mean wait, at the cost of the requests that are
#   overtaken. While more come than the machine can serve, long requests starve.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. Eight batch slots, eight requests with answers of 10, 10, 10, 10, 10, 10, 10 and 100
# tokens, all there from the start. How many times as long as continuous batching does static batching
# take?</summary>
# Equally long: with no request waiting, there is nothing to fill the free slots with. The gain needs a
# queue.</details>
#
# <details><summary>2. You halve the token budget of a server. Which two latencies change, and in which
# direction?</summary>
# The longest gap between tokens (inter-token latency) falls, because the largest step is shorter. The time
# to first token of long prompts grows, because they need more steps. (Both budgets are above the knee.
# Below it, the largest step would hardly be shorter.)</details>
#
# <details><summary>3. Why is the last sequence to arrive preempted, and not the one with the most
# blocks?</summary>
# So that the first one always makes progress: it can never be preempted by a later one, so every request
# finishes after a limited time. Choosing by size could preempt the same long request again and
# again.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** schedules much like this chapter: running
#   requests before waiting ones, prompts in chunks under `max_num_batched_tokens`, preemption by
#   recomputation; `--scheduling-policy priority` besides.
#   Its older engine could swap a victim's blocks to the host's memory instead.
# - **[SGLang](https://github.com/sgl-project/sglang)** estimates how long answers become and admits by
#   that estimate, preempts ("retracts") requests where it was wrong, and can prefer those whose prefix is
#   in its cache (chapter 23; `--schedule-policy lpm`, longest prefix match).
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** calls it in-flight batching; one policy admits no request without room for the
#   longest answer, another fills the memory and pauses requests where it runs out.
# - **[TGI](https://github.com/huggingface/text-generation-inference)** has a waiting-to-served ratio, which says when prompts may interrupt decodes.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)**'s server has slots, each with a fixed share of the context unless they
#   share it; prompts go in chunks of `n_batch` beside the others' tokens.
# - While the GPU computes a step, vLLM, SGLang and TensorRT-LLM can schedule the next one on the
#   CPU.
# - **Disaggregation** ([Zhong et al. 2024](https://arxiv.org/abs/2401.09670)) runs prefill on other GPUs
#   than decode. Then no chunk needs to be mixed, but keys and values must travel between the GPUs.
#
# ## Further reading
#
# - Yu et al. 2022, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu): scheduling by iteration (step).
# - Agrawal et al. 2024, [Sarathi-Serve](https://arxiv.org/abs/2403.02310): chunked prefill without stalls.
# - Kwon et al. 2023, [PagedAttention](https://arxiv.org/abs/2309.06180): preemption by recomputing and by
#   swapping, compared.
#
# %% [markdown]
# **Next:** all parts are there. Chapter 25 puts them together, and runs yours.

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
# Chapters 21 to 23 gave many requests a place in memory. This chapter decides who runs. Before
# every step of the model somebody must say which sequences go through it, and with how many of
# their tokens. That somebody is the **scheduler**. It has four methods, and more influence on what
# users feel than any kernel.
#
# **Afterwards you can** say what a larger batch is worth on a machine, write a scheduler that keeps
# every seat busy, keep a long prompt from making everybody else stutter, and run out of memory
# without losing a request.

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import mkdtemp

from minigen import SamplingParams
from minigen_course import Claim, check, hunt, load_model, mark, measured, show, verdicts
from minigen_course.ch24_scheduler.figures import gain, gains, spread, stutter
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.figures.gantt import gantt
from minigen_course.figures.trace_views import story
from minigen_course.grading.save_part import save_part
from minigen_course.lab.cost_model import MACHINES, SHAPES, StepTime, decode_step
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

# %% [markdown]
# ## A number that hurts
#
# Twelve people ask at the same moment. There are seats for four. The simplest way is **static
# batching**: the first four sit down together, and when the last of them is done, the next four
# do. Some want a long answer, some a short one. Guess first: what share of the seats stays empty?
#
# (Every comparison in this chapter runs under a clock of its own, which takes for a step what
# `step_time` says. Requests come by that clock, too. So all that is printed is the same on your
# machine as on any other, and only what stands in ⟨⟩ was measured here.)

# %%
step_time = StepTime(read=0.004, token=0.0005, overhead=0.001)  # seconds; see below
seats = 4
answers = (90, 8, 14, 22, 76, 9, 30, 12, 64, 18, 10, 24)
twelve = [Ask.of_lengths(0.0, prompt=12, output=count) for count in answers]


def timed(engine):
    started = time.perf_counter()
    return serve(engine, twelve, text_ids, step_time), time.perf_counter() - started


run, static_seconds = timed(load(scheduler="static", max_num_seqs=seats))
told = story(run.events)
busy = sum(len(step.parts) for step in told.steps)
print(f"{len(told)} steps with {seats} seats, {busy} of {seats * len(told)} taken")
print(f"empty: {1 - busy / (seats * len(told)):.0%}")
measured("that took", static_seconds, "s")

# %% [markdown]
# More than half of the seats stayed empty, and eight requests waited in front of them.
#
# ## What is a seat worth?
#
# First, why run several sequences at once at all? Chapter 17 has the reason: a step reads all
# weights, for one sequence as for many. Its model says what a step of n tokens takes: the longer of
# two times, reading and computing, and what is lost besides:
#
# > seconds = max(read, n x token) + overhead
#
# Two measurements fix it: a step of one token, and a prompt of 256, which computes for so long that
# reading hides behind it. They meet at this machine's **knee**. Guess: how many
# sequences can join the first before a step takes twice as long?

# %%
sizes = (1, 2, 4, 8, 16, 32)
steps_of = {n: [text_ids[first : first + 20] for first in range(n)] for n in sizes}
step_seconds = {n: read_along(llm, *texts).step_seconds for n, texts in steps_of.items()}


def prompt_seconds() -> float:
    started = time.perf_counter()
    llm.generate(text_ids[:256], SamplingParams(temperature=0, max_tokens=1))
    return time.perf_counter() - started


token_seconds = min(prompt_seconds() for _ in range(4)) / 256
knee = step_seconds[1] / token_seconds
predicted = {n: max(step_seconds[1], n * token_seconds) for n in sizes}
measured("a step of one token", 1e3 * step_seconds[1], "ms")
measured("a token among 256", 1e3 * token_seconds, "ms")
measured("so the knee is at", knee, "sequences")
picture(gains(step_seconds, predicted), "Milliseconds of a step, and what each doubling gains.")

h100, shape_70b = MACHINES["H100 SXM"], SHAPES["Llama-3-70B"]
seconds_70b = {
    n: decode_step(shape_70b, n, context=1000, weight_bits=8).seconds(h100) for n in sizes
}
for few, many in ((1, 2), (16, 32)):
    here = mark(100 * gain(step_seconds, few, many), "%")
    print(
        f"{few:>2} to {many:>2}: here {here} more tokens a second, "
        f"70B on an H100 {gain(seconds_70b, few, many):.0%}"
    )
print(f"32 sequences on the H100: {32 * seconds_70b[1] / seconds_70b[32]:.0f} times one")

# %% [markdown]
# Left of the knee a doubling is nearly for free, says the model, and right of it worth nothing.
# Measured, one passes into the other. The model lets reading and computing overlap completely,
# which no real step does; and each sequence of a decode step needs a row of scores over the whole
# vocabulary, a prompt only one for all of its tokens.
#
# A guide has figures without a machine: from 1 to 2 sequences one gains 80 to 90 %, from 16 to 32
# only 5 to 10 %. Compare them with your bars, and with the last lines. These are computed, from
# bytes and operations alone, for a model of 70 billion weights in 8 bits on an H100.
#
# There the knee is at some hundreds of sequences, and 32 are hardly the beginning. A seat is worth
# what the machine's knee says, and an empty one costs exactly that.
#
# ## The smallest scheduler
#
# A scheduler is asked four things. `add`: here is a sequence. `schedule`: who runs now, with how
# many tokens? `commit`: these tokens came out. `abort`: somebody has left. It reserves memory with
# the block manager of chapter 23. This one serves one request at a time, and the engine takes it:


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
# (Answers may differ where weights are rounded and two tokens are nearly as likely: a batch
# of another size may add its numbers in another order. The compiled step adds them in the same.)
#
# ## The idea, drawn
#
# Who has finished leaves; who waits sits down, in the very next step. Nothing in the model asks for
# a batch to stay together: the batch is made anew in every step. This is **continuous batching**.
# Press play, or move the step. A row is a request: grey it waits, orange it reads its prompt, blue
# it writes, a tick a token.

# %%
requests = random_arrivals(12, a_second=30, prompts=(8, 60), outputs=(4, 80))
settings = partial(Knobs, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
policies = {
    name: simulate(requests, settings(name, max_num_seqs=seats), step_time)
    for name in ("static", "dynamic", "continuous")
}
stories = {name: story(each.events) for name, each in policies.items()}
side_by_side = {name: stories[name] for name in ("static", "continuous")}
replay(
    lambda step: gantt(side_by_side, step, by="seconds"),
    max(len(each) for each in side_by_side.values()),
    "Two timelines of twelve requests: static batches with gaps, continuous ones without.",
    at=150,
)

# %% [markdown]
# Between the two stands **dynamic batching**, which servers for other kinds of models do: gather
# requests at the door until a batch is full, or the first has waited long enough. In
# figures, with time to first token (TTFT), what each request waited for its answer to begin:

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

# %% [markdown]
# ## How much is it worth? It depends
#
# "Twice as fast" is what is told. A static batch lasts as long as its longest answer. If all are
# equally long, nothing is lost. So take 160 requests that are all there from the start, eight
# seats, and answers of various spreads. To the right: how much longer the longest of eight is than
# the mean. Where do you expect the points?


# %%
def one_spread(outputs: list[int]) -> tuple[float, float]:
    """(longest of a static batch over the mean, static steps over continuous ones)."""
    arrivals = [Ask.of_lengths(0.0, 4, output) for output in outputs]
    steps = {
        name: simulate(arrivals, settings(name), step_time).num_steps
        for name in ("static", "continuous")
    }
    longest = mean(max(outputs[first : first + 8]) for first in range(0, len(outputs), 8))
    return longest / mean(outputs), steps["static"] / steps["continuous"]


rng = random.Random(24)
of_160 = range(160)
points = {
    "all alike": [one_spread([40] * 160)],
    "evenly between two lengths": [
        one_spread([rng.randint(low, 80 - low) for _ in of_160]) for low in (35, 30, 20, 10, 1)
    ],
    "most short, a few long": [
        one_spread([200 if rng.random() < share else 10 for _ in of_160])
        for share in (0.05, 0.1, 0.2, 0.4)
    ],
    "exponential": [
        one_spread([1 + int(rng.expovariate(1 / each)) for _ in of_160]) for each in (10, 20, 40)
    ],
}
picture(spread(points), "Points along a line: the more answers spread, the more static loses.")
ratios = [ratio for found in points.values() for _, ratio in found]
print(f"continuous batching is {min(ratios):.1f} to {max(ratios):.1f} times as fast here")

# %% [markdown]
# The points follow max / mean, and stay below it, most where a few answers are very long: at
# its end continuous batching, too, is left with those, beside empty seats.
#
# ## A long prompt makes others stutter
#
# Now four people read along as their answers are written, and a fifth sends a text of 600 tokens.
# A step that reads all of it takes as long as its arithmetic does. Nobody gets a token meanwhile.
# Guess how long the others' longest gap will be; a step of one token takes 5 ms on our clock.
#
# The remedy: a step has a **budget** of tokens. Every sequence that writes gets its one, and the
# prompt gets what is left: a **chunk**. It is read over several steps, and all others go on.

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
    "Gaps between tokens over time, for three budgets: one tall bar, a low wall, a lower one.",
)
gaps = {}
print("budget   longest gap   median gap   the long prompt's TTFT   all done")
for budget, each in budgets.items():
    others = [gap for found in each.gaps()[:4] for gap in found]
    gaps[budget] = 1e3 * max(others)
    print(
        f"{budget:>6} {gaps[budget]:>10.0f} ms {1e3 * median(others):>9.1f} ms "
        f"{1e3 * each.first_tokens()[4]:>21.0f} ms {each.seconds:>8.2f} s"
    )


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
# The dashed line is at 100 ms, where people begin to notice. Small budgets take the gap away, and
# it is the long prompt that pays: each of its steps carries the others' tokens and the overhead,
# too, so its first token comes later. Below the knee (8 tokens on this clock) a step of fewer
# tokens would not even take less time.
#
# The last two lines are the same on the real engine, in your machine's own time. Its steps were the
# same, to the token: the cell asserts it.
#
# ## One step, token by token
#
# What does such a mixed batch look like? Each row is a sequence, each box a token that this step
# computes; below it its position, and the slot of the cache that its key and value go to. A frame
# marks the rows whose logits are needed: the last of each sequence that is computed to its end.
# A chunk in the middle of a prompt needs none.

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
    "A step's tokens: two sequences that decode, and a chunk of a third's prompt.",
    at=3,
)

# %% [markdown]
# ## When blocks run out
#
# How many may begin? An answer's length is not known before its end. Whoever reserves the longest
# (as `max_tokens` says) can never lack a block, and leaves most of them idle. Whoever reserves room
# for now only will some day find no free block for the next token. Then one sequence must give
# its own back: it is **preempted**. The last who came does, so that the first always moves on. It
# waits at the head of the queue, and its text, with all that it wrote already, is computed again
# like a prompt. Nothing of the answer is lost, only work.

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
tight = story(short_of_blocks["room for now", 16].events).steps
full = sum(step.num_blocks >= 0.9 * 16 for step in tight)
victims = short_of_blocks["room for now", 16].num_preempted
print(f"in {full} of {len(tight)} steps 90 % of 16 blocks were held; {victims} times one gave way")
picture(
    gantt(
        {name: short_of_blocks[name, 16].events for name in memory},
        by="seconds",
        budget=128,
        num_blocks=16,
    ),
    "Two timelines in 16 blocks: with reservations few run; without, some are preempted.",
)

# %% [markdown]
# With room for now, more run at once, and the blocks are in use. But it computes tokens twice,
# and in the row of 24 blocks that has eaten nearly all of the gain. With memory for all, both are
# the same.
#
# ## Who may overtake?
#
# All schedulers above serve in the order of arrival. It is tempting to let short prompts go first:
# the mean wait falls. Look at the longest, too:


# %%
class ShortestFirst(lesson.SlotScheduler):
    def add(self, sequence):
        self.waiting.append(sequence)
        self.waiting = type(self.waiting)(sorted(self.waiting, key=len))


stream = random_arrivals(40, a_second=21, prompts=(10, 30), outputs=(10, 60), seed=9)
stream[4] = Ask.of_lengths(stream[4].at, prompt=200, output=20)
waits = {}
for name, kind in (("in order", lesson.SlotScheduler), ("shortest first", ShortestFirst)):
    waits[name] = simulate(stream, settings(kind, max_num_seqs=3), step_time).first_tokens()
    print(
        f"{name:<15} mean TTFT {mean(waits[name]):.2f} s, the long prompt's {waits[name][4]:.2f} s"
    )

# %% [markdown]
# As long as shorter ones keep coming, the long one never runs: it **starves**. minigen's engine
# goes by a number that the caller gives (`priority`, lower first), and by arrival among equals.
#
# ## Drag it: all knobs on the same arrivals
#
# Policy, `max_num_seqs` (the seats), budget, blocks. Find the setting with the fewest steps. Then
# find one that has nearly as few with half of the blocks.

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
    policy=["continuous", "static", "dynamic"],
    max_num_seqs=(1, 14, 1, 6),
    budget=(14, 256, 2, 64),
    blocks=(13, 80, 1, 60),
)

# %% [markdown]
# ## The package's version
#
# The engine's own scheduler does all of this, and a little more: priorities, several answers to one
# prompt that fork after it (chapter 22), and no more work in a step when ten thousand wait.

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
print("the small preempting scheduler and the engine's own make the same steps")

# %% [markdown]
# ## The measurement again
#
# The twelve requests of the beginning, with four seats, all three ways on your machine:

# %%
continuous, continuous_seconds = timed(load(max_num_seqs=seats))
told = story(continuous.events)
busy = sum(len(step.parts) for step in told.steps)
print(f"steps: {alone.num_steps} one at a time, {run.num_steps} static, {len(told)} continuous")
print(f"empty seats, continuous: {1 - busy / (seats * len(told)):.0%}")
for name, seconds in (
    ("one at a time", alone_seconds),
    ("static", static_seconds),
    ("continuous", continuous_seconds),
):
    measured(name, seconds, "s")
measured("static over continuous", static_seconds / continuous_seconds)

# %% [markdown]
# ## Your turn
#
# Three exercises, each of which does one thing more. `check` says in which step who should have
# run; add `hint=1` for a hint.
#
# 1. **Seats**: continuous batching of whole prompts. Blocks for the longest answer are reserved by
#    `allocate_longest` of `minigen.engine.static_batching`.
# 2. **Chunks**: no step has more tokens than its budget. (`WholePromptScheduler` is the package's
#    answer to the first; build on your own if you like.)
# 3. **Preemption**: blocks for the next tokens only, by `self.manager.allocate` and
#    `self.manager.allocate_slots`; where `allocate_slots` returns False, a sequence is preempted.
#
# Then the third one goes into the engine, in a memory that is too small. (Until your own passes,
# `mine` is the package's.) `save_part` writes it to a file with all that it uses; what it returns
# is what `minigen serve --scheduler` takes.

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
# exercise: minigen_course.ch24_scheduler.lesson.ChunkingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class ChunkingScheduler(WholePromptScheduler):
    """Continuous batching with chunked prefill: no step exceeds its budget of tokens."""

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule decodes first, then partly computed prompts, then new sequences, in chunks."""
        raise NotImplementedError  # your turn


# %%
# exercise: minigen_course.ch24_scheduler.lesson.PreemptingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class PreemptingScheduler(WholePromptScheduler):
    """Chunked prefill and preemption: a sequence has only the blocks that it needs now.

    If blocks run out, the last sequence to arrive is preempted: it frees its blocks, waits in front
    of all that arrive later, and is computed again from its first token.
    """

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule chunks, with KV slots for the next tokens only; preempted sequences get none."""
        raise NotImplementedError  # your turn


# %%
_, _, mine = check(
    24,
    SlotScheduler=SlotScheduler,
    ChunkingScheduler=ChunkingScheduler,
    PreemptingScheduler=PreemptingScheduler,
)

small = load(scheduler=mine, max_num_seqs=8, num_blocks=24, max_num_batched_tokens=64)
served = serve(small, crowd, text_ids, step_time)
print(f"{served.num_preempted} preempted, {served.num_steps} steps, by", end=" ")
print(small.describe()["scheduler"])
name = save_part(mine, Path(mkdtemp()) / "mine.py")  # a path, a colon, and the class's name
from_file = serve(load(scheduler=name, max_num_seqs=8), crowd[:3], text_ids, step_time)
print("and from a file:", name.rpartition(":")[2], "answers", len(from_file.outputs), "requests")

# %% [markdown]
# ## A bug hunt
#
# The scheduler below is plain and complete, for one answer to each prompt. **The report:** *under
# load, answers repeat themselves in the middle and then stop too early. The same questions, asked
# again at night, get perfect answers.*
#
# Find the mistake. Pin it first: a test that fails on this scheduler, and passes on every right
# one. Then mend it, here in this cell. `serve_toy(prompts, scheduler=..., num_blocks=...)` runs it
# in the real engine around a toy model, whose next token follows from all that it reads. Your test
# is judged as well, on schedulers that are right and on some with a mistake of the same family.
#
# It happened. FastDeploy prefilled only the prompt of a request that came back (pull request 3080);
# vLLM's plugin for Gaudi did so too, and counted output tokens twice besides (pull request 524).

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
# ## What the production engines do beyond this
#
# - **vLLM** schedules much like this chapter: decodes first, prompts in chunks under
#   `max_num_batched_tokens`, preemption by recomputation; `--scheduling-policy priority` besides.
#   Its older engine could swap a victim's blocks to the host's memory instead.
# - **SGLang** estimates how long answers become and admits by that estimate, retracts requests
#   where it was wrong, and prefers those whose prefix is in its cache (chapter 23).
# - **TensorRT-LLM** calls it in-flight batching; one policy admits nobody without room for the
#   longest answer, another fills the memory and pauses requests where it runs out.
# - **TGI** has a waiting-to-served ratio, which says when prompts may interrupt decodes.
# - **llama.cpp**'s server has slots, its seats, each with a fixed share of the context unless they
#   share it; prompts go in chunks of `n_batch` beside the others' tokens.
# - While the GPU computes a step, vLLM and SGLang schedule the next one on the CPU.
# - Prefill on other GPUs than decode ends the conflict between the two: no chunk needs to be mixed.

# %%
stutters = f"{gaps[1024]:.0f} ms become {gaps[64]:.0f} ms in steps of 64 tokens"
verdicts(
    "24",
    Claim(
        "Batching from 1 to 2 gains 80-90 %, from 16 to 32 gains 5-10 %",
        f"{mark(100 * gain(step_seconds, 1, 2), '%', 2)} and "
        f"{mark(100 * gain(step_seconds, 16, 32), '%', 2)} here, with the knee at "
        f"{mark(knee, 'sequences', 2)}; {gain(seconds_70b, 16, 32):.0%} from 16 to 32 for a 70B on "
        "an H100",
        "held within bounds",
        "gains end at the machine's own knee; where that is at hundreds, 32 are still cheap",
    ),
    Claim(
        "Continuous batching is 2x",
        f"{min(ratios):.1f} to {max(ratios):.1f} times, by the spread of the answers",
        "held within bounds",
        "it is near the longest answer of a batch over the mean; nothing where all are alike",
    ),
    Claim(
        "A long prompt makes all others wait, unless it is chunked",
        f"600 tokens: {stutters}; measured {mark(1e3 * real_gaps[1024], 'ms', 2)} and "
        f"{mark(1e3 * real_gaps[64], 'ms', 2)}",
        "held",
        "the gap is the time of the largest step, and a budget limits that",
    ),
    Claim(
        "Preemption begins when 90 % of the memory is used",
        f"in {full} steps 90 % of the blocks were held; {victims} times somebody gave way",
        "did not hold",
        "it begins when a block is wanted and none is free; 90 % is where to set an alarm",
    ),
)

# %% [markdown]
# **Next:** all parts are there. Chapter 25 puts them together, and runs yours.

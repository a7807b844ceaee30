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
# # 25 · The engine, put together
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/25_engine.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/25_engine.ipynb)
#
# You have built a tokenizer, a model, a cache in blocks, a scheduler and a sampler. None of them
# answers a request by itself. The **engine** is the loop that calls them in turn, step after step,
# until every request has its answer. This loop is short, because the parts do the work.
#
# **Afterwards you can** write the loop of an inference engine, run it with parts of your own, watch it
# while it works, say where the time of a step goes, and say what an engine gains over serving one
# request after the other, and against which baseline.
#
# **You need** chapters 16 (sampling), 17 (prefill, decode and the KV cache), 21 to 23 (blocks and
# prefixes) and 24 (schedulers). **Time:** about 45 minutes to read and try, about 45 for the
# [exercises](../exercises/25_engine.ipynb).
#
# **Where we are:** all parts of one engine exist. This chapter joins them. Part 3 makes its steps
# faster, and chapter 51 puts it behind a network address.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | concurrency | prefill, decode | host CPU | L3 engine | `--scheduler` | throughput |
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
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from minigen import SamplingParams
from minigen.errors import PartError
from minigen.sequence import samples_of
from minigen.trace.events import EventKind, Recorder, Trace
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    load_model,
    mark,
    measured,
    predict,
    reveal,
    show,
    task,
    verdicts,
)
from minigen_course.ch25_engine.figures import ladder, loop, step_parts
from minigen_course.figures.explore import explore, picture, replay, watch
from minigen_course.figures.gantt import gantt
from minigen_course.figures.trace_views import step_view, story
from minigen_course.lab.texts import ALICE

load = partial(load_model, enable_prefix_caching=False)  # so that every run computes everything
llm = load(max_num_seqs=24, max_num_batched_tokens=1024)
text_ids = llm.tokenizer.encode(ALICE)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


prompts = [text_ids[first : first + 24] for first in range(0, 384, 16)]  # 24 of 24 tokens
lengths = [(4, 8, 16, 32)[place % 4] for place in range(24)]
params = [greedy(length) for length in lengths]
_ = llm.generate(prompts[0], greedy(2))  # the first steps of a process are slow

# %%
chapter_map("engine")

# %% [markdown]
# ## A number that hurts
#
# Twenty-four people send a prompt of 24 tokens each, and want answers of 4 to 32 tokens. Here are five ways
# to serve them, each on top of the one before:
#
# 1. one request after the other, and for every new token the **whole text** goes through the model
#    again, as in chapter 15;
# 2. one request after the other, with a [KV cache](../docs/glossary.md#kv-cache) (chapter 17);
# 3. twelve at once, in **static batches** (chapter 24);
# 4. twelve at once, with **continuous batching**;
# 5. twenty-four at once, with continuous batching.
#
# All five use the same model, the same kernels and the same token budget per step. The
# [throughput](../docs/glossary.md#throughput) counts output tokens per second. Predict two ratios
# before you run the cell (the first two ways serve only the first four requests, with the same mix of
# lengths, since each takes long): what does the cache gain (2 over 1), and what does sharing the steps
# gain (5 over 2)? Replace `None` by a number.

# %%
guess_cache = predict("What does the cache gain, in times?", None, within=1.5)
guess_sharing = predict("What do shared steps gain, in times?", None, within=1.5)


# %%
def again(prompt: list[int], num_tokens: int) -> None:
    """Compute the whole text again for each token of the answer."""
    text = list(prompt)
    for _ in range(num_tokens):
        text += llm.generate(text, greedy(1)).token_ids


def tokens_per_second(serve, count: int) -> float:
    """Return the throughput of `serve`, which answers the first `count` requests."""
    started = time.perf_counter()
    serve()
    return sum(lengths[:count]) / (time.perf_counter() - started)


by_twelve = {
    name: load(scheduler=name, max_num_seqs=12, max_num_batched_tokens=1024)
    for name in ("static", "continuous")
}
at_once = []
ways = {  # name: (how to serve, how many of the requests)
    "no cache, one by one": (lambda: list(map(again, prompts[:4], lengths)), 4),
    "cache, one by one": (lambda: list(map(llm.generate, prompts[:4], params)), 4),
    "static batches of 12": (
        lambda: by_twelve["static"].generate(prompts, params, progress=False),
        24,
    ),
    "continuous, 12 at once": (
        lambda: by_twelve["continuous"].generate(prompts, params, progress=False),
        24,
    ),
    "continuous, 24 at once": (
        lambda: at_once.extend(llm.generate(prompts, params, progress=False)),
        24,
    ),
}
first_round = {name: tokens_per_second(*way) for name, way in ways.items()}
second_round = {name: tokens_per_second(*way) for name, way in list(ways.items())[2:]}
rates = {name: max(rate, second_round.get(name, 0)) for name, rate in first_round.items()}
picture(
    ladder(rates, baseline="cache, one by one"),
    "Output tokens per second of five ways to serve these requests: the better of two rounds, but one "
    "round of the first two ways, which serve only the first four requests, one after the other.",
    number="25.1",
)
slowest, by_cache, _, _, fastest = rates.values()
for name, rate in rates.items():
    print(f"{name:<23}: {mark(rate, 'tokens/s')}", end="")
    other = min(first_round[name], second_round.get(name, rate))
    print(f", in the other round {mark(other)}" if name in second_round else "")
guess_cache.compare(by_cache / slowest, measured=True)
guess_sharing.compare(fastest / by_cache, measured=True)
measured("both together", fastest / slowest, "times")

# %% [markdown]
# A speed-up means nothing without its workload and its baseline. The cache gains more where texts
# are longer, because then more is computed again without it. On a processor an empty place in a
# static batch costs little here, because minigen leaves finished answers out of the batch, and a
# step of fewer sequences takes less time: with these requests continuous batching may gain little
# over that. Where two rounds of one way differ more than two bars do, the order of the bars says
# nothing, and a ratio is no more certain than its rounds. In [the measurements](../docs/results.md)
# on one processor, with other requests, continuous batching has 1.4 times the throughput of static
# batches, and 2.5 times that of padded batches, which compute finished answers to the batch's end.
# More sequences in a step gain much until the step becomes compute-bound, and little beyond
# (chapter 17; the knee of chapter 24). But servers of LLMs keep a KV cache: an honest baseline for
# an engine is the second bar, not the first one.
#
# ## The smallest engine
#
# A step of the engine consists of four calls:
#
# 1. the **scheduler** says which sequences run, and with how many of their tokens (`schedule`);
# 2. the **runner** computes these tokens, and returns a row of logits for each sequence whose next
#    token is due (`logits`);
# 3. the **sampler** chooses a token from each row;
# 4. the scheduler takes the tokens in: it appends them, frees the blocks of finished sequences, and
#    makes room for others (`commit`).

# %%
picture(
    loop(),
    "One step of an engine. A request holds one sequence per answer, a sequence waits or runs, and "
    "the scheduler chooses chunks of the running ones for a batch.",
    number="25.2",
)

# %% [markdown]
# If a step gives a token to $n$ sequences and takes $t(n)$ seconds, the throughput is $n / t(n)$
# tokens per second, and each user gets a token every $t(n)$ seconds. Batching pays as long as
# $t(n)$ grows more slowly than $n$ (chapter 24).
#
# The function below is such a loop. It also reads a clock between the calls, which we need later. Its
# answers must be those of minigen's own loop. (`llm.process_requests` makes the answers' sequences and
# runs nothing.) How many steps will eight requests take, with answers of 4, 8, 16, 32, 4, 8, 16 and 32
# tokens, if all eight start in the first step?

# %%
guess_steps = predict("Steps for eight requests?", None, within=1.1)


# %%
def run_steps(engine, sequences, spent: dict[str, float]) -> int:
    """Answer sequences by an engine's parts; adds the seconds of each, returns the steps."""
    scheduler, runner, sampler = engine.scheduler, engine.runner, engine.sampler
    for sequence in sequences:
        scheduler.add(sequence)
    num_steps = 0
    while any(each.finish_reason is None for each in sequences):
        clocks = [time.perf_counter()]
        batch = scheduler.schedule()
        clocks.append(time.perf_counter())
        rows = runner.logits(batch)
        clocks.append(time.perf_counter())
        due = samples_of(batch)  # the sequences that get a token in this step
        chosen = sampler(rows, due) if due else []
        clocks.append(time.perf_counter())
        scheduler.commit(batch, chosen)
        clocks.append(time.perf_counter())
        for name, started, ended in zip(spent, clocks, clocks[1:], strict=False):
            spent[name] += ended - started
        num_steps += 1
    return num_steps


PARTS = ("schedule", "run the model", "sample", "commit")
answers = llm.process_requests(prompts[:8], params[:8])
sequences = [answer.sequence for answer in answers]
num_steps = run_steps(llm.engine, sequences, dict.fromkeys(PARTS, 0.0))
expected = [answer.token_ids for answer in llm.generate(prompts[:8], params[:8], progress=False)]
assert [each.output_ids for each in sequences] == expected
guess_steps.compare(num_steps)
print("The loop chose the same tokens as minigen's own.")

# %% [markdown]
# The prompts are computed in the first step, and the last row of each prompt already gives a first
# token. So the longest answer decides the number of steps.
#
# Two details matter. `samples_of` is called before `commit`, because committing counts the chunks as
# computed. And if a step holds only chunks that end before their prompts do, no sequence gets a
# token, but the chunks must still be committed.
#
# ## From chunks to one batch
#
# The scheduler returns a list of chunks, but a model wants arrays. The runner packs the tokens of
# all chunks one after another, without padding (a **packed batch**). Beside the token ids it stores
# each token's position, the slot of the KV cache that its key and value go to, where each sequence
# begins, how long it is with its new tokens (`context_lens`), its block table, through which
# attention finds its keys and values, and which tokens need logits (`logits_rows`). In the step
# below two sequences decode, and a third is in its prefill:

# %%
from minigen.engine.model_runner import Packer, PagedRunner

scheduler, runner, sampler = llm.engine.scheduler, llm.engine.runner, llm.engine.sampler
three = [
    each.sequence
    for each in llm.process_requests(["Tea is", "Rain falls", "Owls see at night"], greedy(4))
]
for each in three[:2]:
    scheduler.add(each)
chunks = scheduler.schedule()  # the first step: two short prompts
scheduler.commit(chunks, sampler(runner.logits(chunks), samples_of(chunks)))
scheduler.add(three[2])
chunks = scheduler.schedule()  # the second step: two decodes and a prompt
packed = Packer(runner.manager, block_size=16, max_num_batched_tokens=64).pack(chunks)
print(f"{'token_ids':<13} ⟨{packed.token_ids.tolist()}⟩")  # two of them were just sampled
for name in ("positions", "query_starts", "context_lens", "logits_rows"):
    print(f"{name:<13}", getattr(packed, name).tolist())
print("blocks that the slots are in:", sorted({slot // 16 for slot in packed.slots.tolist()}))
for each in three:
    scheduler.abort(each)
show(PagedRunner.logits)

# %% [markdown]
# `query_starts` says that the first sequence owns row 0, the second one row 1, and the third one
# the rest. `logits_rows` names only three rows: the last token of each sequence. (Rows for
# `prompt_logprob_rows` come only if a request asks for its prompt's probabilities.) Only these rows
# go through the output head, the largest matrix of the model. In the source above,
# `pop_pending_copies` returns the block copies that are due (copy-on-write, chapter 21), and
# `_num_leading_ones` counts the chunks of one token at the front, which are computed as decodes.
# (This is the runner in torch. If `numba` is installed, the engine above may run chapter 34's
# compiled step, which packs in the same way.)
#
# The next figure shows such a batch for every step of six requests, with a budget of 24 tokens per
# step. Press play, and watch how the prompts fill what the decodes leave.

# %%
small = load(max_num_seqs=6, max_num_batched_tokens=24)
with small.record() as recorder:
    six = small.generate(prompts[:6], params[:6], progress=False)
steps = story(recorder.events)
spelled = {
    request: [
        small.tokenizer.decode([token]) for token in (*each.prompt_token_ids, *each.token_ids)
    ]
    for request, each in zip(steps.requests, six, strict=True)
}
replay(
    lambda step: step_view(steps, step, block_size=16, budget=24, texts=spelled),
    len(steps),
    "The tokens of one step, by sequence: decodes in blue, chunks of prompts in amber. A frame marks "
    "a row that gets logits. Steps count from 0. A prompt's last token, if alone, is drawn as a decode (here request 2).",
    number="25.3",
    at=2,
)

# %% [markdown]
# ## Watch it run
#
# The engine emits events about its work: a step, a token, a block. Each subscriber to its **trace**
# gets them. The timeline below is drawn by the thread that runs the steps, between two of them. (A
# long run is drawn again and again while it goes on, a short one perhaps only at its end.)

# %%
twelve = prompts[:12], params[:12]
with watch(
    llm.trace,
    lambda events: gantt({"now": events}, by="seconds"),
    "A timeline of twelve requests that share the engine. Short ticks are "
    "tokens, dots are ends. A white line across a bar is a gap between two steps' computing.",
    number="25.4",
) as seen:
    llm.generate(*twelve, progress=False)
print(f"{len(seen)} events")

# %% [markdown]
# What do events cost? Without a subscriber, each one costs at most one check whether there is one (the
# engine checks once for all tokens of a step, so the share printed below is an upper bound). With a
# recorder, it becomes an object that the recorder keeps.

# %%
events_per_step = len(seen) / len(story(seen))
one_step = sum(e.counts["duration_ns"] for e in seen if e.kind is EventKind.STEP) / len(story(seen))
listened = Trace()
listened.subscribe(Recorder(1000))


def nanoseconds(code: str, number: int) -> float:
    names = {"trace": llm.trace, "listened": listened, "kind": EventKind.NEW_TOKEN}
    return 1e9 * min(timeit.repeat(code, globals=names, number=number)) / number


in_vain = nanoseconds("trace.active", 100_000)
emitted = nanoseconds("listened.emit(kind, 1, token=7)", 10_000)
print(f"{events_per_step:.1f} events per step")
for name, cost in (("no subscriber", in_vain), ("a recorder", emitted)):
    share = mark(100 * events_per_step * cost / one_step, "%", 2)
    print(f"{name:<15} {mark(cost, 'ns')} per event, {share} of a step")

# %% [markdown]
# ## Drag it: how many at once?
#
# Choose how many requests arrive together. The engine runs them now, on your machine, and the title
# shows the throughput. Compare 4, 8, 12 and 16, which have the same mix of answers: from where on do more
# gain little? (It depends on your machine: the gain is small where the step is compute-bound.)


# %%
def together(requests):
    started = time.perf_counter()
    with llm.record() as recorder:
        llm.generate(prompts[:requests], params[:requests], progress=False)
    rate = sum(lengths[:requests]) / (time.perf_counter() - started)
    return gantt({f"{rate:.0f} tokens per second": recorder.events}, by="seconds")


explore(
    together,
    "A timeline of the requests, run when you move the control. The title shows the throughput.",
    "25.5",
    requests=(1, 16, 1, 8),
)

# %% [markdown]
# ## Where the time of a step goes
#
# The clocks in `run_steps` give the time of each of the four calls, here for 1, 8 and 24 sequences
# that each get 24 new tokens. (Packing is done in `logits`, so it counts as the model. These are means over all
# steps. The first step is part of them, and it computes all prompts.) Predict: with one sequence, which
# percentage of a step is spent outside of the model?

# %%
guess_outside = predict(
    "Per cent of a step outside of the model, for one sequence?", None, within=2
)

# %%
spent_by_step = {}
for count in (1, 8, 24):
    spent = dict.fromkeys(PARTS, 0.0)
    own = [each.sequence for each in llm.process_requests(prompts[:count], greedy(24))]
    num_steps = run_steps(llm.engine, own, spent)
    spent_by_step[f"{count} at once"] = {name: each / num_steps for name, each in spent.items()}
picture(
    step_parts(spent_by_step, "run the model"),
    "The time of each call of a step. Nearly all of it is the model, so the right panel shows the "
    "others on a finer scale.",
    number="25.6",
)
outside = {}
for name, spent in spent_by_step.items():
    whole = sum(spent.values())
    outside[name] = 1 - spent["run the model"] / whole
    print(f"{name:<10} {mark(1e3 * whole, 'ms')} per step, outside of the model", end=" ")
    print(mark(100 * outside[name], "%", 2))
guess_outside.compare(100 * outside["1 at once"], "%", measured=True)

# %% [markdown]
# On a CPU the rest is a small part, a few per cent, with one sequence as with 24. (With one
# sequence, most of `sample` is a fixed cost per call: with 24 it takes far less than 24 times as
# long.) On a fast GPU, a step of this small model takes far less time, and Python like this can
# take a large part of it. (Our clocks would mislead there: minigen has another runner for NVIDIA's
# GPUs, without the `.cpu()` above, which copies the logits to the CPU. A GPU works by itself: this
# runner returns before it has computed, so the wait would be charged to the sampler.) Several
# engines for GPUs therefore prepare the next step on the CPU while the GPU computes this one.
#
# ## Your own parts, all at once
#
# Here are an allocator, a scheduler and a sampler. None of them imports minigen. The allocator
# hands out the lowest free blocks. (It raises no error if too few are free, since the block manager
# asks `num_free` first.) The scheduler starts requests in the order of arrival, each with its whole
# prompt (one longer than the token budget would block the queue), and a sequence that gets no block
# **gives way** (is preempted; unlike in chapter 24, it may be the oldest, because the newest is
# asked first and may take the only free block): it frees all its blocks and goes back to the front
# of the queue. Without that rule, a full cache could stop every running sequence forever. A
# sequence starts only if all its tokens fit into the step's budget. So each chunk gives a token (if
# no request asks for its prompt's probabilities), and `commit` can pair them. The engine makes a
# `SampledToken` of each id that a sampler returns. This sampler takes the most likely token. (The
# engine checks what such parts do, and `num_free` scans all blocks. That costs a little, but rounds
# differ, too, so the share below may exceed 100 %.)


# %%
class LowestFirst:
    def __init__(self, num_blocks):
        self.owners = dict.fromkeys(range(1, num_blocks + 1), 0)

    @property
    def num_free(self):
        return sum(owners == 0 for owners in self.owners.values())

    def allocate(self, count):
        found = [block for block, owners in self.owners.items() if owners == 0][:count]
        self.share(found)
        return found

    def share(self, block_ids):
        for block in block_ids:
            self.owners[block] += 1

    def release(self, block_ids):
        for block in block_ids:
            self.owners[block] -= 1
        return [block for block in block_ids if self.owners[block] == 0]

    def num_owners(self, block_id):
        return self.owners[block_id]


class ArrivalOrder:
    def __init__(self, manager, max_num_seqs, max_num_batched_tokens):
        self.manager, self.most, self.budget = manager, max_num_seqs, max_num_batched_tokens
        self.waiting, self.running, self.num_preempted = [], [], 0

    def add(self, sequence):
        self.waiting.append(sequence)

    def schedule(self):
        batch = []
        # The last is asked first; what it frees, others can take.
        for each in reversed(self.running[:]):
            if self.manager.allocate_slots(each, 1):
                batch.append((each, 1))
            else:
                self.give_way(each)
        left = self.budget - len(batch)
        while self.waiting and len(self.running) < self.most and len(self.waiting[0]) <= left:
            num_tokens = self.manager.allocate(self.waiting[0], left)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.pop(0))
            batch.append((self.running[-1], num_tokens))
            left -= num_tokens
        return batch

    def give_way(self, sequence):
        self.running.remove(sequence)
        self.manager.free(sequence)
        self.waiting.insert(0, sequence)
        self.num_preempted += 1

    def commit(self, chunks, tokens):
        for chunk, token in zip(chunks, tokens, strict=True):
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
            chunk.sequence.append(token.token_id)
            if chunk.sequence.finish_reason is not None:
                self.abort(chunk.sequence)

    def abort(self, sequence):
        self.manager.free(sequence)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)


def likeliest(logits, sequences):
    return logits.argmax(dim=-1).tolist()


parts = {"allocator": LowestFirst, "scheduler": ArrivalOrder, "sampler": likeliest}
yours = load(**parts, max_num_seqs=24, max_num_batched_tokens=1024)
for part in parts:
    print(f"{part:<10} {yours.describe()[part]}")
reference = at_once[: len(prompts)]  # by minigen's own parts, from Figure 25.1
own_answers = []
own_rate = max(  # the better of two rounds, as above
    tokens_per_second(
        lambda: own_answers.append(yours.generate(prompts, params, progress=False)), 24
    )
    for _ in range(2)
)
same = sum(a.token_ids == b.token_ids for a, b in zip(own_answers[0], reference, strict=True))
measured("the same answers", same, f"of {len(prompts)}", 2)
measured("throughput, of what minigen's own parts reach", 100 * own_rate / fastest, "%")

made = []


def short_of_blocks(manager, max_num_seqs, max_num_batched_tokens):
    made.append(ArrivalOrder(manager, max_num_seqs, max_num_batched_tokens))  # read below
    return made[-1]


tight = load(scheduler=short_of_blocks, num_blocks=9, max_num_seqs=8, block_size=16)
finished = tight.generate(prompts[:8], params[:8], progress=False)
print(f"with 9 blocks: {len(finished)} answers,", end=" ")
print("some gave way" if made[0].num_preempted else "none gave way")

# %% [markdown]
# Many faults are reported immediately, with the name of the part, instead of surfacing hours later
# as a strange answer. This allocator notes no owners, so it would give the same blocks to the next
# sequence, too. The engine counts owners as well. (The first prompt takes two blocks.)


# %%
class Careless(LowestFirst):
    def share(self, block_ids):
        pass


careless = load(allocator=Careless, max_num_seqs=4, num_blocks=64)
try:
    careless.generate(prompts[:4], params[:4], progress=False)
except PartError as error:
    print(error)

# %% [markdown]
# ## Many callers
#
# Only one thread at a time may step an engine. Other threads put their requests on a shared queue, and each
# receives its tokens on a queue of its own, as **deltas** (a token and the text that it adds). Eight
# callers, who do not know of each other, share the steps:

# %%
from minigen.engine.engine_thread import EngineThread

with EngineThread(llm.engine) as thread, ThreadPoolExecutor(8) as callers:
    asked = llm.process_requests(prompts[:8], params[:8])
    found = list(
        callers.map(lambda answer: [delta.token_id for delta in thread.run([answer])], asked)
    )
print([len(each) for each in found], "tokens for eight callers")
same_again = sum(one == other for one, other in zip(found, expected, strict=True))
measured("the same answers as before", same_again, "of 8", 1)

# %% [markdown]
# Chapter 51 puts a web server in the callers' place.
#
# ## Your turn
#
# Write the loop as a class. In `run_steps`, the caller had all sequences from the start and waited for
# the last one. A loop that serves must accept requests while it runs, hand each token to its owner
# when it is chosen, and forget what has finished. (A request for several answers has one sequence for
# each. The first holds the others as `sequence.siblings`; each has its own `sequence_id`, but only the first
# goes to `scheduler.add`. `commit` returns pairs of a sequence and its token. `ArrivalOrder` returns
# nothing, so the engine adds the pairs for it.)

# %%
task(25, "StepLoop")

# %%
# exercise: minigen_course.ch25_engine.lesson.StepLoop
from collections.abc import Callable

from minigen.protocols import Runner, Sampler, Scheduler
from minigen.sequence import SampledToken, Sequence


class StepLoop:
    """An engine loop that adds sequences, runs steps, and delivers each token when it is chosen.

    The loop calls `deliver(sequence, token)` once for each token, after the token is committed. So
    `finish_reason` is set when the last token of a sequence is delivered. `live` holds the
    unfinished sequences by id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        deliver: Callable[[Sequence, SampledToken], None],
    ):
        raise NotImplementedError  # your turn

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings. Raises `RequestError` if an id is in use."""
        raise NotImplementedError  # your turn

    def step(self) -> int:
        """Run one step, and return how many tokens it computed, 0 if no sequence runs."""
        raise NotImplementedError  # your turn

    def abort(self, sequence_id: int) -> None:
        """Abort an unfinished sequence. Raises `RequestError` if the id is not live."""
        raise NotImplementedError  # your turn


# %%
mine = check(25, StepLoop=StepLoop)

# %% [markdown]
# Now it serves, with the parts above. (`llm` in the place of `yours` would use the engine's own.) As long
# as yours has not passed, the course's own loop runs, and the line below says so.

# %%
from minigen_course.ch25_engine.lesson import answers_by_loop

texts = [llm.tokenizer.decode(prompt) for prompt in prompts[:4]]
by_loop = answers_by_loop(yours, mine, texts, greedy(12))
by_engine = [each.text for each in yours.generate(texts, greedy(12), progress=False)]
assert by_loop == by_engine
whose = "your StepLoop" if mine is StepLoop else "the course's own StepLoop"
print(f"four answers by {whose}, on LowestFirst, ArrivalOrder and likeliest")

# %% [markdown]
# ## The package's version
#
# The engine itself makes the same four calls, and adds what a service needs. It emits events, and
# it limits what an error ends: one from the model, the sampler or `commit` ends only the sequences
# of its step (`_family`: a chunk's sequence, and its siblings that have not forked yet). `_calls`
# runs a request's **logits processors**: functions, made by an option of the engine or from a
# request's output form (chapter 53), that change its logits before sampling. All that is about
# drafts (names with `speculat` or `draft`, and `_emit_verified`) belongs to chapter 36 and can be
# skipped: without drafts `drafted` is empty, and `rows_of` gives the same as `samples_of`.

# %%
reveal(25, StepLoop=mine)

# %%
from minigen.engine.engine import Engine

show(Engine.step, Engine._fail_only, Engine._finish_step)

# %% [markdown]
# ## The measurement again
#
# The second and the last bar of Figure 25.1, beside the run with the parts from this notebook in the
# place of minigen's:

# %%
measured("one by one, with a cache", by_cache, "tokens/s")
measured("24 at once, minigen's parts", fastest, "tokens/s")
measured("24 at once, the parts above", own_rate, "tokens/s")
measured("shared steps gain", fastest / by_cache, "times")

# %% [markdown]
# ## Claims

# %% jupyter={"source_hidden": true}
verdicts(
    "25",
    Claim(
        "vLLM has 14 to 24 times the throughput of HuggingFace Transformers",
        f"{mark(fastest / by_cache, 'times', 2)} over one by one with a cache, on this processor",
        NOT_TESTED,
        "another baseline: vLLM's own script pads requests to Transformers into batches; GPUs, LLaMA "
        "models and lengths from conversations with ChatGPT (ShareGPT); a GPU becomes compute-bound at hundreds of tokens "
        "per step, a processor at a few",
        source="[vLLM's announcement, 2023](https://blog.vllm.ai/2023/06/20/vllm.html)",
    ),
    Claim(
        "On a fast GPU, most of the time is spent outside of the model",
        f"{mark(100 * outside['1 at once'], '%', 2)} of a step for 1 sequence, "
        f"{mark(100 * outside['24 at once'], '%', 2)} for 24, without HTTP",
        NOT_TESTED,
        "the source profiled vLLM before 0.6, with 8 billion parameters on an H100: 33 % HTTP server, "
        "29 % scheduling (with preparing inputs, which is in the model's share here), 38 % GPU",
        source="[vLLM 0.6, 2024](https://blog.vllm.ai/2024/09/05/perf-update.html)",
    ),
)

# %% [markdown]
# ## Summary
#
# - An engine is a loop of four calls: `schedule`, `logits`, sample, `commit`.
# - The runner packs the chunks of all sequences into one batch, without padding them to one length.
#   Only rows whose logits are needed go through the output head.
# - The longest answer decides the number of steps, if all prompts are computed in the first step.
# - Only one thread at a time steps the engine. Callers put requests on a queue, and get tokens from one.
# - The gain in Figure 25.1 is a product: the cache's gain times that of shared steps. State the
#   baseline: against serving one by one *with* a cache, only the shared steps count.
# - On a CPU a step is nearly all model. On a fast GPU the Python around it matters.
# - An allocator, a scheduler or a sampler of yours can replace the package's own, and is checked
#   while it runs.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A step computes 512 tokens: 12 decodes and one chunk of 500 tokens from the middle
# of a prompt. How many rows go through the output head, and how many tokens does the sampler
# choose?</summary>
# Twelve of each. The chunk does not reach the end of its prompt, so its sequence gets no token in this
# step. Its keys and values are stored, and that is all it was computed for.</details>
#
# <details><summary>2. Why must <code>samples_of(chunks)</code> be called before
# <code>commit</code>?</summary>
# Whether a sequence gets a token depends on whether its chunk completes what is known of it. Committing
# counts the chunk as computed, and then the question can have another answer.</details>
#
# <details><summary>3. Someone reports that an engine is 20 times as fast as "naive serving". What do you
# ask?</summary>
# Whether the baseline keeps a KV cache and how many requests it runs at once; how long prompts and
# answers are and how they vary; on which machine, with which weights, and whether all else was the
# same for both sides.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** runs this loop (`EngineCore.step`) in a process of
#   its own, so that tokenizing and HTTP take none of its time. Requests and tokens travel over ZeroMQ, a
#   library for messages between processes. **[SGLang](https://github.com/sgl-project/sglang)** has
#   separate processes for tokenizing, scheduling and detokenizing.
# - While the GPU computes a step, both can schedule the next one, with placeholders for tokens that
#   are not known yet (**asynchronous scheduling**; SGLang says overlap scheduling).
# - A decode step often [launches](../docs/glossary.md#launch) hundreds of kernels. Both record them
#   as [**CUDA graphs**](../docs/glossary.md#cuda-graph) for many batch sizes, and replay these. A
#   batch is padded to the next of these sizes.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** began with the loop in C++; its
#   PyTorch backend, now the only one, has it in Python.
#   **[TGI](https://github.com/huggingface/text-generation-inference)** (archived since March 2026)
#   has a router in Rust, which queues and batches, in front of workers that compute, by default in
#   Python.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)**'s server steps its batch slots in one loop
#   (`update_slots`), as here.
# - Engines avoid asking the system for memory within a step. Torch's caching allocator keeps the
#   GPU memory of earlier steps, and llama.cpp plans buffers on each device for all intermediate
#   results of its graph. Here, the packer writes the model's inputs into buffers that it made at
#   the start.
# - If a model is split over several GPUs, in vLLM as here, one process runs the loop and the others
#   follow its batches (chapter 41).
# - *This engine is twice as fast as that one* can be true of one model, one machine and one load. In
#   [the measurements](../docs/results.md) on one processor, llama.cpp decodes one request alone faster than
#   vLLM, and vLLM serves 32 requests together faster than llama.cpp.
#
# ## Further reading
#
# - Yu et al. 2022, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu): scheduling by
#   iteration, from which continuous batching comes.
# - Kwon et al. 2023, [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180): vLLM's paper.
# - [vLLM 0.6: what the time was spent on](https://blog.vllm.ai/2024/09/05/perf-update.html), and
#   what cut it: a process apart for HTTP, several steps planned at once, outputs processed while
#   the next step runs.
#
# **Next:** part 3 makes the steps themselves fast. Chapter 51 puts the engine on the network.

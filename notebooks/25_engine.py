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
# A tokenizer, a model, a cache in blocks, a scheduler, a sampler: every part has been built. An
# engine is what runs them in turn, step after step, until nobody waits. It is short. That is the
# point of all the parts before it.
#
# **Afterwards you can** write the loop of an inference engine, put parts of your own into it, watch
# it at work, say what its steps are spent on, and what it gains over serving one after the other.

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
from minigen.sequence import SampledToken, samples_of
from minigen.trace.events import EventKind, Recorder, Trace
from minigen_course import Claim, check, load_model, mark, measured, show, verdicts
from minigen_course.ch25_engine.figures import ladder, step_parts
from minigen_course.figures.explore import explore, picture, replay, watch
from minigen_course.figures.gantt import gantt
from minigen_course.figures.trace_views import step_view, story
from minigen_course.lab.texts import ALICE

load = partial(load_model, enable_prefix_caching=False)  # so that every run computes everything
llm = load(max_num_seqs=32, max_num_batched_tokens=1024)
text_ids = llm.tokenizer.encode(ALICE)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


prompts = [text_ids[first : first + 24] for first in range(0, 512, 16)]  # 32 of 24 tokens
lengths = [(4, 8, 16, 64)[place % 4] for place in range(32)]
params = [greedy(length) for length in lengths]
_ = llm.generate(prompts[0], greedy(2))  # the first steps of a process are slow

# %% [markdown]
# ## A number that hurts
#
# Thirty-two people want answers of 4 to 64 tokens. Serve them one after the other, and as chapter
# 15 did: for every token, the whole text through the model again. Then keep the cache. Then share
# the steps, in static batches and in continuous ones, by chapter 24. All with the same kernels.
#
# vLLM was announced with "up to 24 times the throughput" of the usual library then, on a GPU.
# How many times do you expect here, from the first bar to the last?


# %%
def again(prompt: list[int], num_tokens: int) -> None:
    """The answer, everything computed again for each of its tokens."""
    text = list(prompt)
    for _ in range(num_tokens):
        text += llm.generate(text, greedy(1)).token_ids


def tokens_a_second(serve, count: int) -> float:
    """Of answers to the first `count` requests."""
    started = time.perf_counter()
    serve()
    return sum(lengths[:count]) / (time.perf_counter() - started)


static, continuous = (load(scheduler=name, max_num_seqs=16) for name in ("static", "continuous"))
rates = {
    "all computed again, one by one": tokens_a_second(
        lambda: [again(*each) for each in zip(prompts[:4], lengths, strict=False)], 4
    ),
    "with a cache, one by one": tokens_a_second(
        lambda: [llm.generate(*each) for each in zip(prompts[:12], params, strict=False)], 12
    ),
    "static batches of 16": tokens_a_second(
        lambda: static.generate(prompts, params, progress=False), 32
    ),
    "continuous, 16 seats": tokens_a_second(
        lambda: continuous.generate(prompts, params, progress=False), 32
    ),
    "continuous, 32 seats": tokens_a_second(
        lambda: llm.generate(prompts, params, progress=False), 32
    ),
}
picture(ladder(rates), "Bars of tokens a second, longer from rung to rung.")
slowest, by_cache, _, _, fastest = rates.values()
for name, rate in rates.items():
    measured(f"{name:<31}", rate, "tokens/s")
measured("the cache alone gives", by_cache / slowest, "times")
measured("sharing steps gives", fastest / by_cache, "times more")
measured("both", fastest / slowest, "times")

# %% [markdown]
# So "so many times" is said of a workload and of an opponent. The cache gains the more, the longer
# the texts are. Sharing gains what the machine's knee allows (chapter 24): a GPU's is far to the
# right. And against whom: nobody who serves computes all of it again, but many served one by one.
#
# ## The smallest engine
#
# Four lines: the scheduler says who runs, the runner computes, the sampler chooses, the scheduler
# takes it in. The others here are clocks between them, for later.


# %%
def run_steps(engine, sequences, spent: dict[str, float]) -> int:
    """Answer sequences by an engine's parts; adds the seconds of each, returns the steps."""
    scheduler, runner, sampler = engine.scheduler, engine.runner, engine.sampler
    for sequence in sequences:
        scheduler.add(sequence)
    num_steps = 0
    while any(each.finish_reason is None for each in sequences):
        clocks = [time.perf_counter()]
        chunks = scheduler.schedule()
        clocks.append(time.perf_counter())
        logits = runner.logits(chunks)
        clocks.append(time.perf_counter())
        samples = samples_of(chunks)
        tokens = sampler(logits, samples) if samples else []
        clocks.append(time.perf_counter())
        scheduler.commit(chunks, tokens)
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
print(f"{num_steps} steps; the same tokens as of minigen's own loop")

# %% [markdown]
# `samples_of` is asked before `commit`, since committing counts the chunks as computed. And where a
# step has only chunks from the middle of prompts, nobody gets a token, but there is work to count.
#
# ## From chunks to one batch
#
# The runner stands between the scheduler's list and the model's arrays. It packs the tokens of all
# sequences one after another, without padding, and says beside them where each is, where its key
# and value go, and where each sequence begins. In the step below two sequences write and a third
# reads its prompt:

# %%
from minigen.engine.model_runner import Packer, PagedRunner

scheduler, runner = llm.engine.scheduler, llm.engine.runner
three = [
    each.sequence for each in llm.process_requests(["Tea is", "Rain falls", "Owls see at night"])
]
for each in three[:2]:
    scheduler.add(each)
for step in range(2):
    if step == 1:
        scheduler.add(three[2])
    chunks = scheduler.schedule()
    if step == 0:  # pretend that it was computed
        scheduler.commit(chunks, [SampledToken(100), SampledToken(200)])
packed = Packer(runner.manager, block_size=16, max_num_batched_tokens=64).pack(chunks)
for name in ("token_ids", "positions", "query_starts", "context_lens", "logits_rows"):
    print(f"{name:<13}", getattr(packed, name).tolist())
print("slots, block by block:", sorted({slot // 16 for slot in packed.slots.tolist()}))
for each in three:
    scheduler.abort(each)
show(PagedRunner.logits)

# %% [markdown]
# Only three rows go through the last and widest matrix: the last token of each sequence. That is
# what a frame marks in the step view. Here it is for a run of six requests in steps of at most 24
# tokens; press play, and watch prompts fill what the decodes leave:

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
    "The tokens of one step, by sequence: decodes in blue, chunks of prompts in yellow.",
    at=2,
)

# %% [markdown]
# ## Watch it run
#
# A timeline that is drawn while the engine works, by its own thread between two steps. It may take
# a few hundredths of the time, and no more:

# %%
twelve = prompts[:12], params[:12]
with watch(
    llm.trace,
    lambda events: gantt({"now": events}, by="seconds"),
    "A timeline of twelve requests that share the engine.",
) as seen:
    llm.generate(*twelve, progress=False)
print(f"{len(seen)} events")

# %% [markdown]
# What does watching cost? With nobody subscribed, each event is one question, whether anybody is.
# With a recorder it is an object more in a list.

# %%
events_a_step = len(seen) / len(story(seen))
one_step = sum(e.counts["duration_ns"] for e in seen if e.kind is EventKind.STEP) / len(story(seen))
listened = Trace()
listened.subscribe(Recorder(1000))


def nanoseconds(code: str, number: int) -> float:
    names = {"trace": llm.trace, "listened": listened, "kind": EventKind.NEW_TOKEN}
    return 1e9 * min(timeit.repeat(code, globals=names, number=number)) / number


in_vain = nanoseconds("trace.active", 100_000)
emitted = nanoseconds("listened.emit(kind, 1, token=7)", 10_000)
unwatched = events_a_step * in_vain / one_step
print(f"{events_a_step:.1f} events a step")
for name, cost in (("nobody watches", in_vain), ("a recorder does", emitted)):
    share = mark(100 * events_a_step * cost / one_step, "%", 2)
    print(f"{name:<15} {mark(cost, 'ns')} an event, {share} of a step")

# %% [markdown]
# ## Drag it: how many at once?
#
# Choose how many requests come together. The engine runs them, now and here; the title says how
# fast. Where does another request stop paying?


# %%
def together(requests):
    started = time.perf_counter()
    with llm.record() as recorder:
        llm.generate(prompts[:requests], params[:requests], progress=False)
    rate = sum(lengths[:requests]) / (time.perf_counter() - started)
    return gantt({f"{rate:.0f} tokens a second": recorder.events}, by="seconds")


explore(together, "A timeline of the requests; its title has the rate.", requests=(1, 16, 1, 8))

# %% [markdown]
# ## Where a step's time goes
#
# The clocks of the smallest engine, for 1, 8 and 32 sequences that write 24 tokens each. (The
# means, in which the first step has a share, too: it reads all prompts.)

# %%
spent_by_step = {}
for count in (1, 8, 32):
    spent = dict.fromkeys(PARTS, 0.0)
    own = [each.sequence for each in llm.process_requests(prompts[:count], greedy(24))]
    num_steps = run_steps(llm.engine, own, spent)
    spent_by_step[f"{count} at once"] = {name: each / num_steps for name, each in spent.items()}
picture(
    step_parts(spent_by_step, "run the model"),
    "Bars of the time of each part: nearly all of it is the model.",
)
outside = {}
for name, spent in spent_by_step.items():
    whole = sum(spent.values())
    outside[name] = 1 - spent["run the model"] / whole
    print(f"{name:<10} {mark(1e3 * whole, 'ms')} a step, around the model", end=" ")
    print(mark(100 * outside[name], "%", 2))

# %% [markdown]
# On a CPU the Python around the model hardly counts. On a GPU a step of this model takes well
# under a millisecond, and the same Python would be as long as the step. That is why engines there
# prepare the next step while the GPU computes this one.
#
# ## Your own parts, all at once
#
# An allocator, a scheduler and a sampler, none of which imports minigen. The allocator hands out
# the lowest free block; the scheduler lets everybody in who fits; the sampler takes the likeliest.


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


class Everybody:
    def __init__(self, manager, max_num_seqs, max_num_batched_tokens):
        self.manager, self.seats, self.budget = manager, max_num_seqs, max_num_batched_tokens
        self.waiting, self.running = [], []

    def add(self, sequence):
        self.waiting.append(sequence)

    def schedule(self):
        batch = [(each, 1) for each in self.running if self.manager.allocate_slots(each, 1)]
        left = self.budget - len(batch)
        while self.waiting and len(self.running) < self.seats and len(self.waiting[0]) <= left:
            num_tokens = self.manager.allocate(self.waiting[0], left)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.pop(0))
            batch.append((self.running[-1], num_tokens))
            left -= num_tokens
        return batch

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


parts = {"allocator": LowestFirst, "scheduler": Everybody, "sampler": likeliest}
yours = load(**parts, max_num_seqs=32, max_num_batched_tokens=1024)
for part in parts:
    print(f"{part:<10} {yours.describe()[part]}")
reference = llm.generate(prompts, params, progress=False)
started = time.perf_counter()
own_answers = yours.generate(prompts, params, progress=False)
own_rate = sum(lengths) / (time.perf_counter() - started)
same = sum(a.token_ids == b.token_ids for a, b in zip(own_answers, reference, strict=True))
measured("the same answers", same, f"of {len(prompts)}", 2)
measured("tokens a second", own_rate)
measured("of what minigen's own parts reach", 100 * own_rate / fastest, "%")

# %% [markdown]
# A part that does wrong is named, and the answer to the question is not some odd text hours later.
# This allocator notes no owners, so it would give the same blocks to the next sequence, too:


# %%
class Careless(LowestFirst):
    def share(self, block_ids):
        pass


careless = load(allocator=Careless, max_num_seqs=4)
try:
    careless.generate(prompts[:4], params[:4], progress=False)
except PartError as error:
    print(error)

# %% [markdown]
# ## Many callers
#
# Only one thread may step an engine. The others leave their wishes in a queue, and each gets its
# tokens by one of its own. Eight callers, who know nothing of each other, share its steps:

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
# ## The package's version
#
# The same four calls, and what else a service needs: events for whoever watches, and an error in a
# step costs the sequences of that step, and nobody else.

# %%
from minigen.engine.engine import Engine

show(Engine.step, Engine._fail_only, Engine._finish_step)

# %% [markdown]
# ## Your turn
#
# Write the loop. `check` says the first thing that is wrong; add `hint=1` for a hint. Each token
# is delivered once, to whoever it belongs to, and whoever has finished is forgotten.

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
# Then it serves, with the engine's parts or with yours. (Until it passes, `mine` is the package's.)

# %%
from minigen_course.ch25_engine.lesson import answers_by_loop

texts = [llm.tokenizer.decode(prompt) for prompt in prompts[:4]]
by_loop = answers_by_loop(yours, mine, texts, greedy(12))
by_engine = [each.text for each in yours.generate(texts, greedy(12), progress=False)]
assert by_loop == by_engine
print("four answers by", mine.__name__, "on LowestFirst, Everybody and likeliest")

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM** runs this loop (`EngineCore.step`) in a process of its own, so that tokenising and HTTP
#   do not take its time; requests come and tokens go by ZeroMQ. **SGLang** has a process each for
#   tokenising, scheduling and detokenising.
# - While the GPU computes a step, both schedule the next one, with placeholders for tokens that
#   are not known yet.
# - A decode step's hundreds of kernel launches are recorded once as a **CUDA graph** and replayed,
#   for a few fixed batch sizes; batches are padded to the next of them.
# - **TensorRT-LLM** has the loop in C++ (its executor and batch manager); **TGI** has a router in
#   Rust, which queues and batches, in front of Python workers that compute.
# - **llama.cpp**'s server steps its slots in one loop (`update_slots`), as here.
# - With several GPUs, one process runs the loop and the others follow its batches (chapter 41).

# %%
verdicts(
    "25",
    Claim(
        "Batched serving is up to 24 times as fast as naive serving",
        f"{mark(fastest / slowest, 'times', 2)} over computing all again one by one, "
        f"{mark(fastest / by_cache, 'times', 2)} over one by one with a cache",
        "held within bounds",
        "it is the product of a cache and of shared steps, whose gain ends at the machine's knee; "
        "without the opponent and the workload the figure says nothing",
    ),
    Claim(
        "Python around the model makes an engine slow",
        f"{mark(100 * outside['1 at once'], '%', 2)} of a step for 1 sequence, "
        f"{mark(100 * outside['32 at once'], '%', 2)} for 32",
        "did not hold",
        "not on a CPU, where a step takes milliseconds; on a GPU it is a real share of a step",
    ),
    Claim(
        "An engine that can be watched pays for it",
        f"{mark(100 * unwatched, '%', 2)} of a step with nobody watching",
        "did not hold",
        "an event that nobody hears is one branch",
    ),
)

# %% [markdown]
# **Next:** part 3 makes the steps themselves fast. Chapter 51 puts the engine on the network.

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
# # 52 · Latency, goodput, and what to do about them
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/52_slo.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/52_slo.ipynb)
#
# The server of chapter 51 answers. Does it answer well? That is a question about many requests
# together: how long people wait for a first word, whether the words flow, how many are served like
# that for a dollar. This chapter measures it. Then it breaks the engine in eight ways on purpose, so
# that you see each fault in its numbers, name the resource behind it, and change one thing.
#
# **Afterwards you can** put a load on a server that tells the truth, read its metrics, say of a
# slow request where its time went, find the knob for a symptom, and ask whether the bottleneck has
# moved.
#
# **You need** chapters 17 (the step-time model), 24 (the scheduler) and 51 (the server). **Time:**
# about 60 minutes to read and try, about 60 for the exercises.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | serving | prefill, decode | whichever is full first | L4 routing and batching | service-level objectives | goodput |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,server,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
from dataclasses import replace
from functools import partial

import httpx
import numpy as np

from minigen.bench.report import Slo, report
from minigen.bench.workload import Planned, constant, draw_words, poisson
from minigen.server.local import serving
from minigen.server.models import warm_up
from minigen.trace.summary import summarize
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    measured,
    predict,
    reveal,
    show,
    task,
    verdicts,
)
from minigen_course.ch00_map import opening_test
from minigen_course.ch52_slo.figures import by_rate, cost, dashboard, run_in_time, spreads, waits
from minigen_course.ch52_slo.lesson import Case, Vitals, broken_system, symptoms, table
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.cost_model import Card
from minigen_course.lab.load import put_load, run_apart
from minigen_course.lab.simulator import Ask, Knobs, asks, simulate

llm = load_model(weights="int4", max_num_seqs=4)
warm_up(llm)
server = serving(llm)
rng = np.random.default_rng(52)
chapter_map("serving", "scheduler")

# %% [markdown]
# ## A number that hurts
#
# Sixteen people ask this machine something short, over two seconds. One more pastes a long text.
# The server can run four at once. How long until the first word? Someone waits longest, and someone
# shortest. How many times as long does the first of them wait? (Half of the 17 wait less than the
# **median**, p50.)

# %%
guess_longest = predict("The longest wait is how many times the shortest?", None, within=2)

# %%
short = [Planned(at, draw_words(12, rng), 24) for at in constant(8, 16)]
everybody = sorted([*short, Planned(0.4, draw_words(1500, rng), 24)], key=lambda each: each.at)
with llm.record() as recorder:
    outcomes = put_load(server.url, everybody)
first = report(outcomes).ttft
shortest = min(each.ttft for each in outcomes)
measured("time to first token, shortest", shortest, "s")
measured("median", first.p50, "s")
measured("longest", first.max, "s")
guess_longest.compare(first.max / shortest, "times", measured=True)

in_order = summarize(recorder.events)
picture(
    waits(in_order, [f"{each.prompt_tokens:,} tokens" for each in in_order]),
    "Where the time of 17 requests went. Those that came with the long prompt wait longest.",
    number="52.1",
)

# %% [markdown]
# The picture is drawn from the engine's own events: *queued* until a request first ran, *prefill*
# until its first token, *decode* until its last. All who came while the long text was read waited for
# it: in the queue, or between two words.
#
# ## Four latencies
#
# - **TTFT**, [time to first token](../docs/glossary.md#time-to-first-token-ttft): from when a request
#   was to be sent until its first text.
# - **ITL**, [inter-token latency](../docs/glossary.md#inter-token-latency-itl): each gap between two
#   events with text. An event usually carries one token, but two if the server fell behind.
# - **TPOT**, time per output token: one number per request, the time from its first text to its last,
#   divided by its tokens without the first. A stutter disappears in it.
# - **E2E**, end to end: until the request's end.
#
# An **objective** (SLO, service level objective) says what is good enough: guides give TTFT below
# 500 ms, gaps below 100 ms before people notice them, and below 30 ms for text that flows. One
# definition matters more than it seems: TTFT and E2E begin when the request *was to be sent*
# (`minigen.bench.report.Outcome` has them).
#
# ## Why not the mean
#
# The mean hides what the slow requests feel
# ([Dean and Barroso](https://research.google/pubs/the-tail-at-scale/)), so latencies are given as
# **percentiles**: p99 is the time that 99 of 100 requests stay below. Seventeen requests have no p99: it would be their maximum.
# Below are two systems with a thousand requests each. A answers nearly always at once and is stuck
# now and then; B is steady, and slower on average. Which would you rather have? A visit is not one
# request: a conversation has ten or more, and it is as bad as the worst of them.

# %%
guess_visits = predict("Of 100 visits to A with 12 requests, how many meet a stuck one?", None)

# %%
a_quick, a_stuck = rng.normal(0.2, 0.02, 970), rng.normal(3.5, 0.1, 30)
systems = {"A": np.concatenate([a_quick, a_stuck]), "B": rng.normal(0.4, 0.085, 1000).clip(0.1)}
for name, values in systems.items():
    print(
        f"{name}: mean {1e3 * values.mean():.0f} ms, p99 {1e3 * np.percentile(values, 99):,.0f} ms"
    )
stuck = {name: 1 - (values <= 1).mean() ** 12 for name, values in systems.items()}
print("visits of 12 requests that meet one longer than 1 s:", end=" ")
print(", ".join(f"{name} {share:.0%}" for name, share in stuck.items()))
guess_visits.compare(round(100 * stuck["A"]))

explore(
    partial(spreads, systems),
    "Two distributions: A has the lower mean and a long tail. Right: visits that meet the tail.",
    "52.2",
    wait=(0.2, 4.0, 0.1, 1.0),
    requests=(1, 40, 1, 12),
)

# %% [markdown]
# The share of visits, $1 - (1 - q)^n$ for $n$ requests of which a share $q$ is slow, assumes that slow
# requests come independently of each other. Real stalls come in bursts: then fewer visits are hit,
# and those that are hit meet several.
#
# How many requests does a p99 need? Draw samples of several sizes, many times, from one and the same
# distribution, and see how far their p99 differ. And percentiles do not add up: the last lines are of
# two servers, one of which had a bad minute. The mean of their p99 is the p99 of no one.

# %%
for size in (17, 100, 300, 1000, 10_000):
    found = np.percentile(rng.lognormal(-1.5, 0.8, (400, size)), 99, axis=1)
    low, high = np.percentile(found, (5, 95))
    print(f"{size:>6,} requests: nine of ten p99 lie between {low:.2f} s and {high:.2f} s")

one, other = rng.exponential(0.1, 1000), rng.exponential(1.0, 1000)
of_each = [np.percentile(values, 99) for values in (one, other)]
of_all = np.percentile(np.concatenate([one, other]), 99)
print(
    f"\np99 of each: {of_each[0]:.2f} s and {of_each[1]:.2f} s, their mean {np.mean(of_each):.2f} s"
)
print(f"p99 of all requests: {of_all:.2f} s")

# %% [markdown]
# A p99 wants a thousand requests, of which ten lie above it. And because percentiles cannot be
# added, servers give Prometheus *histograms*, counts by bucket, which can.
#
# ## A machine with a clock of its own
#
# For what follows we need minutes of heavy traffic, many times, and the same on every machine. So
# take the engine's own scheduler, block manager and prefix cache, and let a step take the time that
# chapter 17's model says: here of an 8B model in bfloat16 on an L4, a small GPU with 24 GB. The
# weights take 16 GB, and a step needs about 1 GB to work in; the blocks get the rest. Only the model
# is missing. `Knobs` are what `minigen serve` lets you set.

# %%
show(Card.seconds, Knobs)
chat_of = partial(asks, prompt=(100, 600), output=(50, 150))
load = chat_of(poisson(4, 200, np.random.default_rng(1)))
vitals = Vitals.of(simulate(load))
for name, value in vitals.rows().items():
    print(f"{name:<28}{value:>10}")

# %% [markdown]
# ## The load generator that lies
#
# How would you test a server? Most scripts do this: send, wait for the answer, send the next. Now
# the server stands still for ten seconds. What does the script see? A single slow answer, since it
# did not ask meanwhile. People do not wait for each other: ten came, and all of them waited.
# Leaving those out is called *coordinated omission*. Below, the script is a **closed loop**, and people
# are an **open loop**: one request each second, whatever happens
# ([Schroeder et al. 2006](https://www.usenix.org/conference/nsdi-06/open-versus-closed-cautionary-tale)).

# %%
guess_tail = predict(
    "p99 of the open loop: how many times that of the closed loop?", None, within=2
)

# %%
stall = (20.0, 10.0)  # from when, for how long


def when_answered(ask, now):  # a closed loop: the next is sent when this one has been answered
    return Ask(now, ask.prompt_ids, ask.output_tokens) if now < 60 else None


def tenth(times):
    return asks(times, prompt=(50, 60), output=(10, 10))


closed = simulate(tenth([0.0]), then=when_answered, stall=stall)
opened = simulate(tenth(constant(1, 60)), stall=stall)
ends = {}
for name, run in (("closed loop", closed), ("open loop", opened)):
    ends[name] = report(run.outcomes).e2e
    slow = sum(each.e2e > 1 for each in run.outcomes)
    print(
        f"{name:<12} {len(run.outcomes):>3} requests, p50 {ends[name].p50:.2f} s, "
        f"p99 {ends[name].p99:5.2f} s, {slow} took more than a second"
    )
guess_tail.compare(round(ends["open loop"].p99 / ends["closed loop"].p99, 1), "times")

# %% [markdown]
# ## Goodput
#
# More load, more throughput, until the machine is full. But a request that comes too late is no
# use. [**Goodput**](../docs/glossary.md#goodput) is the number of requests per second that keep every
# objective ([Zhong et al. 2024](https://arxiv.org/abs/2401.09670)). At 14 requests offered per second, the most that we try, what remains of the best goodput?

# %%
guess_left = predict(
    "Percent of the best goodput that are left at 14 per second?", None, within=1.5
)

# %%
rates = (2, 4, 6, 8, 9, 10, 12, 14)
offered = {}
for rate in rates:
    times = poisson(rate, 200, np.random.default_rng(1))
    offered[rate] = simulate(chat_of(times), Knobs(max_num_batched_tokens=512)).outcomes

explore(
    lambda ttft_ms, itl_ms: by_rate(
        offered, (Slo("ttft", ttft_ms / 1e3), Slo("itl", itl_ms / 1e3))
    ),
    "Throughput rises to the end; goodput rises with it, and then falls.",
    "52.3",
    ttft_ms=(50, 5000, 50, 500),
    itl_ms=(30, 100, 10, 100),
)
objectives = (Slo("ttft", 0.5), Slo("itl", 0.1))
reports = {rate: report(each, objectives) for rate, each in offered.items()}
best = max(rates, key=lambda rate: reports[rate].goodput)
most = max(rates, key=lambda rate: reports[rate].request_rate)
for rate in (best, most):
    found = reports[rate]
    print(
        f"{rate} offered per second: {found.request_rate:.1f} answered, {found.goodput:.1f} of them "
        "within the objectives"
    )
guess_left.compare(round(100 * reports[most].goodput / reports[best].goodput), "%")
times = poisson(12, 200, np.random.default_rng(1))
for seats in (64, 128):
    run = simulate(chat_of(times), Knobs(max_num_seqs=seats, max_num_batched_tokens=512))
    print(f"12 offered, {seats} seats: goodput {report(run.outcomes, objectives).goodput:.1f}")

# %% [markdown]
# Throughput says that the right end is the best. Most people there wait too long: past the knee
# a queue grows as long as the load lasts, and each request waits longer than the one before it. The
# knee belongs to the settings as much as to the machine. It lies where the *first* resource is full,
# here the 64 seats (`max_num_seqs`), as the last two lines show. With more seats it moves until the
# next resource is full.
#
# ## What a million tokens costs
#
# An hour costs the same, whatever comes out of it. Late tokens earn nothing, so count only tokens of
# requests that kept their objectives, the **good tokens**. With a price of $p$ dollars per hour and
# $g$ good tokens per second,
#
# $$\text{dollars per million good tokens} = \frac{p}{3600\,g} \cdot 10^6 = \frac{p}{0.0036\,g}$$
#
# The last line asks from how many tokens per month on a machine at that price is cheaper than an API
# that costs 3 to 10 dollars per million.

# %%
good_tokens = {}
for rate in (2, best, most):
    kept = [each for each in offered[rate] if all(slo.is_met(each) for slo in objectives)]
    good_tokens[f"{rate} per second"] = (
        sum(each.output_tokens for each in kept) / reports[rate].seconds
    )
explore(
    lambda dollars_an_hour: cost(dollars_an_hour, good_tokens),
    "A hyperbola: dollars per million good tokens, by good tokens per second, with three loads.",
    "52.4",
    dollars_an_hour=(0.1, 10.0, 0.1, 0.8),
)
for rate in (300, 1000):
    print(
        f"$8.42 per hour at {rate:>5,} good tokens per second: ${8.42 / (0.0036 * rate):.2f} "
        "per million"
    )
month = 8.42 * 730  # hours of a month
break_even = [month / price for price in (10, 3)]  # in millions of tokens
print(
    f"${month:,.0f} per month pay for {break_even[0]:,.0f} to {break_even[1]:,.0f} million tokens"
)

# %% [markdown]
# ## What a server tells
#
# `GET /metrics` is a page for Prometheus, which reads it every few seconds and keeps it. Gauges
# (now), counters (ever more, so look at their growth), histograms (counts by bucket). Names and
# buckets are vLLM's, so its dashboards fit; `docs/grafana/minigen.json` is one. Prometheus estimates a
# percentile of several servers from the sum of their buckets:
#
#     histogram_quantile(0.99, sum by (le) (rate(minigen:time_to_first_token_seconds_bucket[2m])))

# %%
page = httpx.get(f"{server.url}/metrics").text
wanted = (
    "requests_waiting",
    "kv_cache_usage",
    "generation_tokens_total",
    "prefix_cache_hits_total",
)
told = [line for line in page.splitlines() if any(each in line for each in wanted)]
print(*(line for line in told if not line.startswith("# TYPE")), sep="\n")

# %% [markdown]
# ## Press it: this server
#
# The same page, drawn for the server that runs in this notebook. Each button sends a load; the first,
# a flood, has been pressed already. Look for the panel in which a load shows, and say which resource
# runs out. (Dashed: 500 ms, 100 ms, 90 %.)

# %%
system_prompt = draw_words(300, rng)
dashboard(
    server.url,
    {
        "a_flood": [Planned(0, draw_words(20, rng), 32) for _ in range(40)],
        "a_few_people": [Planned(at, draw_words(20, rng), 24) for at in poisson(6, 12, rng)],
        "one_long_text": [
            *(Planned(at, draw_words(20, rng), 48) for at in constant(8, 16)),
            Planned(0.8, draw_words(3000, rng), 8),
        ],
        "same_beginning": [
            Planned(at, f"{system_prompt} {draw_words(10, rng)}", 16) for at in constant(6, 18)
        ],
    },
    "A flood of 40 requests: panels of requests, tokens per second, KV cache, TTFT, ITL, hit rate.",
    "52.5",
)

# %% [markdown]
# ## Diagnosis as a method
#
# 1. **Name the resource that is saturated**: seats (`max_num_seqs`), a step's tokens, blocks,
#    arithmetic, or bandwidth. If none is, the machine idles or waits, which is a finding, too.
# 2. **Name the layer that owns it**: client, gateway, batching, engine, runtime, silicon.
# 3. **Change one thing** there. **Measure again**, with the same load.
# 4. **Ask: has the bottleneck moved?** When one resource is relieved, the next one is full. If the
#    requests still miss an objective, begin again at 1.
#
# Now eight broken systems. Each is first shown by its symptom and its vital signs alone. Say what is
# saturated, with one of the words `seats`, `step`, `blocks`, `arithmetic`, `bandwidth` or `nothing`,
# before you run the cell below that changes one thing. The last three rows judge every change: the
# share of requests that kept each objective, and both.
#
# **1. The first token is late, and then the words flow.**
#
# **2. The words stutter.** Now and then someone sends a long document.

# %%
first_run, second_run = symptoms(1, 2)

# %%
guess_1 = predict("What is saturated in system 1?", None)
guess_2 = predict("What is saturated in system 2?", None)

# %%
one, two = broken_system(1), broken_system(2)
late = Case(
    "TTFT high, ITL fine",
    "seats (engine)",
    "`--max-num-seqs` 4 to 64",
    first_run,
    simulate(one.load, Knobs(max_num_seqs=64)),
    ("TTFT p99", "waiting, at most", "KV cache used, at most"),
).tell(lambda before, after: before.kept < 0.1 and after.kept == 1)
guess_1.compare("seats")
print()
chunked = Knobs(max_num_batched_tokens=512)
stutter = Case(
    "ITL p99 far from its p50",
    "a step's tokens (batching)",
    "`--max-num-batched-tokens` 8192 to 512",
    second_run,
    simulate(two.load, chunked),
    ("ITL p99", "ITL p50", "kept TTFT below 500 ms"),
    then="documents go to another machine (gateway)",
    further=simulate([each for each in two.load if len(each.prompt_ids) < 1000], chunked),
).tell(lambda before, after: before.found.itl.p99 > 5 * after.found.itl.p99)
guess_2.compare("step")

# %% [markdown]
# (1) Many wait, and yet the cache is nearly empty: there was room, but no seats. Decoding is bound
# by bandwidth, so more seats cost the others a millisecond. Every request keeps both objectives now.
#
# (2) A step that reads 8,000 tokens takes a second, and the next word of each request with it. In
# chunks the document takes as long in all, but between two chunks each request gets a word. The stutter
# is gone, and yet the share that kept both objectives hardly rises. Has the bottleneck moved? Yes: the
# steps are short now, and *arithmetic* is full while a document is read. Prompts are read in order, so
# requests that arrive behind a document miss their TTFT. No knob of this machine helps. The gateway
# can: if documents go to another machine, all others keep both objectives.
#
# **3. Requests are stopped and start again.** Answers are long, and throughput is down.
#
# **4. Throughput is low, people wait, and the machine idles.** A hundred requests come at once.

# %%
third_run, fourth_run = symptoms(3, 4)

# %%
guess_3 = predict("What is saturated in system 3?", None)
guess_4 = predict("What is saturated in system 4?", None)

# %%
three, four = broken_system(3), broken_system(4)
int8 = Card(kv_bits=8)  # a token's keys and values have half the bytes, to keep and to read
doubled = replace(three.knobs, num_blocks=2 * three.knobs.num_blocks)
preempted = Case(
    "preemptions, throughput down",
    "KV blocks (engine, silicon)",
    "`--kv-cache-dtype int8`: twice the blocks",
    third_run,
    simulate(three.load, doubled, int8),
    ("preemptions", "tokens given up", "KV cache used, at most", "kept ITL below 100 ms"),
    then="`--max-num-batched-tokens` 2048 to 512",
    further=simulate(three.load, replace(doubled, max_num_batched_tokens=512), int8),
).tell(lambda before, after: before.preemptions > 0 and after.preemptions == 0)
guess_3.compare("blocks")
print()
idle = Case(
    "throughput low, machine idle",
    "nothing: seats stay empty (batching)",
    "`--scheduler` static to continuous",
    fourth_run,
    simulate(four.load, Knobs(max_num_seqs=16)),
    ("tokens per second", "running, on average"),
    then="`--max-num-seqs` 16 to 64",
    further=simulate(four.load, Knobs(max_num_seqs=64)),
).tell(lambda before, after: after.found.output_rate > 1.5 * before.found.output_rate)
guess_4.compare("nothing")

# %% [markdown]
# (3) Preemption begins when no block is free, not at 90 %: a full cache is what one wants, work
# that is done twice is not. Keys and values in 8 bits have half the bytes, so twice the blocks fit, and
# a step reads less. (Their scales, a few percent, are left out here.) Preemption is gone, the first
# token comes in time, and still two of three requests fail. Has the bottleneck moved? Yes: each prompt
# of a thousand tokens is read in one step, so the words stutter as in system 2. The same knob helps,
# and then all requests keep both objectives.
#
# (4) Sixteen seats, and half of them empty while most wait: a static batch waits for its longest
# answer (chapter 24). Continuous batching fills them. Has the bottleneck moved? Yes: now the seats are
# full, and more seats give more again. The objectives stay unmet even then, because a hundred prompts
# that come at once take seconds to read. For such a batch job the objective is wrong: no one waits for
# its first token, so judge it by tokens per second.
#
# **5. The prefix cache does not help.** All requests have the same instructions of 1,500 tokens.
#
# **6. Most are served at once, and some wait very long.** At second 20 a nightly job sends thirty
# requests; the latencies are those of the people who chat.

# %%
fifth_run, sixth_run = symptoms(5, 6)

# %%
guess_5 = predict("What is saturated in system 5?", None)
guess_6 = predict("What is saturated in system 6?", None)

# %%
five, six = broken_system(5), broken_system(6)


def instructions_first(ask, names=4, end=1504):
    ids = ask.prompt_ids
    return replace(ask, prompt_ids=(*ids[names:end], *ids[:names], *ids[end:]))


no_hits = Case(
    "prefix cache does not help",
    "arithmetic, for the same tokens (client)",
    "what differs goes to the prompt's end",
    fifth_run,
    simulate([instructions_first(each) for each in five.load]),
    ("prefix hit rate", "TTFT p99", "KV cache used, at most"),
).tell(lambda before, after: before.hit_rate == 0 and after.hit_rate > 0.9)
guess_5.compare("arithmetic")
print()
polite = [replace(each, priority=int(each.tenant == "job")) for each in six.load]
tail = Case(
    "p99 far from p50",
    "seats, for a while (client, engine)",
    "the job's `priority` 0 to 1",
    sixth_run,
    simulate(polite, six.knobs),
    ("TTFT p99", "TTFT p50"),
    tenant="chat",
    then="`--max-num-seqs` 12 to 64",
    further=simulate(polite, Knobs(max_num_seqs=64)),
).tell(lambda before, after: before.found.ttft.p99 > 5 * after.found.ttft.p99)
guess_6.compare("seats")

# %% [markdown]
# (5) Four tokens, the user's name perhaps or the time, stood before the instructions. A beginning
# that differs in its first block shares nothing. No knob of the engine changes that: the client does.
#
# (6) The median does not show it, and the mean barely does. With the priority a chat is first in line,
# but requests that run are not interrupted, so it still waits for a free seat, and one in eleven chats
# is late. Has the bottleneck moved? No: it is still the seats. With 64 of them nearly all chats keep
# both objectives.
#
# **7. The queue grows, and the requests wait longer and longer.**
#
# **8. One tenant starves the others.** The latencies are those of the other.

# %%
seventh_run, eighth_run = symptoms(7, 8)

# %%
guess_7 = predict("What is saturated in system 7?", None)
guess_8 = predict("What is saturated in system 8?", None)

# %%
seven, eight = broken_system(7), broken_system(8)
queue = Case(
    "queue grows",
    "arithmetic (silicon; the gateway protects it)",
    "`--max-queue 2`: 429 at the door; or another machine",
    seventh_run,
    simulate(seven.load, replace(seven.knobs, max_queue=2)),
    ("goodput, requests per second", "waiting, at most", "refused (429)"),
).tell(lambda before, after: after.found.goodput > 2 * before.found.goodput)
guess_7.compare("arithmetic")
for what, knobs in {
    "256 seats": replace(seven.knobs, max_num_seqs=256),
    "steps of 1,024 tokens": replace(seven.knobs, max_num_batched_tokens=1024),
}.items():
    vitals = Vitals.of(simulate(seven.load, knobs))
    print(
        f"{what} instead: {vitals.found.output_rate:,.0f} tokens per second, "
        f"{vitals.kept:.0%} kept both"
    )
print()
tenant = Case(
    "one tenant starves others",
    "seats, all of one key's (gateway)",
    "`--max-in-flight-per-key 24`",
    eighth_run,
    simulate(eight.load, replace(eight.knobs, max_in_flight_per_key=24)),
    ("TTFT p99", "goodput, requests per second"),
    tenant="other",
).tell(lambda before, after: before.found.ttft.p99 > 100 * after.found.ttft.p99)
guess_8.compare("seats")

# %% [markdown]
# (7) More prompt tokens come than the GPU can compute: half of the seats and of the blocks are free,
# and neither more seats nor larger steps give more tokens per second. Refusing some serves the others
# well: most requests keep both objectives, and a refused client knows at once. No setting makes the
# machine larger. Has the bottleneck moved? No, and it will not until there is a second machine.
#
# (8) First come first served is fair to requests, and not to people. With a limit per key the flood
# gets as much as fits beside the others.
#
# ## The table, and what each looked like
#
# The last column is the share of requests that kept both objectives. Choose a symptom, and see the
# gauges in time, before the change, after it, and after the second one where there is one.

# %%
cases = {
    each.symptom: each for each in (late, stutter, preempted, idle, no_hits, tail, queue, tenant)
}
table(list(cases.values()))


def of_case(symptom, after):
    case = cases[symptom]
    return run_in_time(case.runs.get(after, case.changed), case.tenant)


explore(
    of_case,
    "Gauges of a run in time: requests, KV cache, each request's time to first token.",
    "52.6",
    symptom=["queue grows", *(each for each in cases if each != "queue grows")],
    after=["broken", "changed", "and then"],
)

# %% [markdown]
# ## The measurement again, on the real server
#
# Take the first number again: four seats, and a step of up to 2,048 tokens. This is the real engine on
# this machine, so turn both knobs that the pictures ask for, and put the same load on it. The stutter
# should be gone. Requests that arrive just behind the long text still wait while it is read, as in
# system 2: more seats do not make this processor read faster. Has the bottleneck moved? It is
# arithmetic now.

# %%
tuned = load_model(weights="int4", max_num_seqs=32, max_num_batched_tokens=128)
warm_up(tuned)
with serving(tuned) as better:
    again = report(put_load(better.url, everybody))
    before = report(outcomes)
measured("longest gap between two words, before", before.itl.max, "s")
measured("longest gap, after", again.itl.max, "s")
measured("ratio", before.itl.max / again.itl.max)
measured("time to first token, median, before", before.ttft.p50, "s")
measured("after", again.ttft.p50, "s")
measured("longest time to first token, before", before.ttft.max, "s")
measured("after", again.ttft.max, "s")

# %% [markdown]
# ## Your turn
#
# Write the load test that does not lie. `check` says the first thing that is wrong, and runs on a
# clock that jumps, so that it takes no time.

# %%
task(52, "load_test")

# %%
# exercise: minigen_course.lab.load.load_test
from collections.abc import Awaitable, Callable, Sequence


async def load_test(
    send: Callable[[int], Awaitable[object]], times: Sequence[float], percents: Sequence[float]
) -> dict[float, float]:
    """Return percentiles of latency, in seconds, under an open-loop load.

    `send(number)` is started for each request at its time in `times` (seconds after the call), even
    if earlier requests still run. Its latency lasts from that time, even if the start was late,
    until it returns; the latency is infinite if it raises. A percentile is by nearest rank: the
    smallest latency that at least that percentage of all requests did not exceed. Source:
    Schroeder et al. 2006, "Open Versus Closed: A Cautionary Tale".
    """
    raise NotImplementedError  # your turn


# %%
mine = check(52, load_test=load_test)

# %% [markdown]
# One line puts yours on the running server. (Until it passes, `mine` is the package's own.)


# %%
async def measure():
    async with httpx.AsyncClient(base_url=better.url, timeout=60) as client:

        async def send(number):
            asked = {"prompt": f"Tea number {number} is", "max_tokens": 16, "temperature": 0}
            (await client.post("/v1/completions", json=asked)).raise_for_status()

        return await mine(send, constant(10, 20), (50, 90, 99))


with serving(tuned) as better:
    for percent, seconds in run_apart(measure()).items():
        measured(f"p{percent}", 1e3 * seconds, "ms")

# %% [markdown]
# And this is the package's version:

# %%
reveal(52, load_test=mine)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM**, **SGLang** and **TGI** export Prometheus metrics as here; vLLM's names have become a
#   common vocabulary. All three can send traces of single requests by OpenTelemetry.
# - **vLLM**, **SGLang** and **TensorRT-LLM** run prefill and decode on different GPUs where both
#   objectives are tight: then a long prompt does not interrupt other answers.
# - Routers before several engines choose by prefix (SGLang's router, vLLM's production stack), by
#   queue, or by tenant; autoscalers look at the queue and at goodput, not at the GPU's utilisation,
#   which says that something runs and not that it helps.
# - **llama.cpp**'s server has `/metrics` and a fixed number of slots; **Ollama** a queue limit and
#   a number of parallel requests, by environment variables.
# - Load generators of the field (`vllm bench serve`, `genai-perf`, `minigen bench serve`) can
#   send in an open loop, with Poisson arrivals or recorded ones.

# %%
means = {name: 1e3 * values.mean() for name, values in systems.items()}
tails = {name: 1e3 * np.percentile(values, 99) for name, values in systems.items()}
falls = reports[most].goodput / reports[best].goodput
nearly_full = Vitals.of(simulate(three.load, replace(three.knobs, num_blocks=2300)))
full = preempted.vitals[0]
verdicts(
    "52",
    Claim(
        "A (mean 300 ms, p99 3,500 ms) is worse than B (mean 400 ms, p99 600 ms)",
        f"means {means['A']:.0f} and {means['B']:.0f} ms, p99 {tails['A']:,.0f} and "
        f"{tails['B']:,.0f} ms; {stuck['A']:.0%} and {stuck['B']:.0%} of visits of 12 requests "
        "meet more than a second",
        holds(stuck["A"] > 5 * stuck["B"]),
        "a visit is as bad as its worst request; for a single request most would prefer A",
    ),
    Claim(
        "Goodput collapses before throughput does",
        f"throughput still rises at {most} requests per second offered; goodput is largest at "
        f"{best}, and {falls:.0%} of that there",
        holds(falls < 0.5 and reports[most].request_rate > reports[best].request_rate),
        "past the knee a queue grows, and each later request waits too long for a first token",
    ),
    Claim(
        "Renting eight H100 pays from 10 to 100 million tokens per month on",
        f"at $8.42 per hour and $3 to $10 per million, from {break_even[0]:,.0f} to "
        f"{break_even[1]:,.0f} million on",
        holds(break_even[0] <= 100),
        "a machine costs the same when it idles, so the volume must fill it",
    ),
    Claim(
        "TTFT below 500 ms is good, gaps below 100 ms are not noticed",
        f"used as the objectives above: at {best} per second offered "
        f"{reports[best].goodput / reports[best].request_rate:.0%} of the answers keep both",
        NOT_TESTED,
        "only people can tell; dictated code needs less, a nightly summary needs neither",
    ),
    Claim(
        "A KV cache that is 90 % full does harm, so alert there",
        f"{nearly_full.preemptions} preemptions at {nearly_full.most_kv:.0%} of the blocks, "
        f"{full.preemptions} at {full.most_kv:.0%}",
        holds(nearly_full.preemptions > 0),
        "harm begins when no block is free: alert at preemptions, and use 90 % as a warning",
    ),
    Claim(
        "A load test that sends one request after another shows a server's tail",
        f"p99 {ends['closed loop'].p99:.2f} s, and in an open loop {ends['open loop'].p99:.2f} s",
        holds(ends["closed loop"].p99 > 0.5 * ends["open loop"].p99),
        "a script that waits for its answer sends nothing while the server stands still",
    ),
)

# %% [markdown]
# ## The opening test, once more
#
# These are the seven questions of [chapter 00](00_map.ipynb). Answer them again: read the questions,
# write a letter instead of each `None` in the cell below, and run it. It shows your guesses from
# chapter 00, your answers of today, and the best answers with their reasons. (The guesses are read
# from the file `opening_test.json` in this folder; without it, that column stays empty.)

# %%
opening_test.ask()

# %%
opening_test.compare(
    first_token=None,
    second_request=None,
    long_chats=None,
    same_beginning=None,
    four_bits=None,
    two_cards=None,
    good_mean=None,
)

# %% [markdown]
# **Next:** nothing more to build before you use it. Put your own model behind `minigen serve`, send
# it your own traffic, and read its numbers.

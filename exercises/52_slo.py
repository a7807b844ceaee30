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
# # Exercises of chapter 52
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/52_slo.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/52_slo.ipynb)
#
# The chapter: [Latency, goodput, and what to do about them](../notebooks/52_slo.ipynb). Its exercises take about 100 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `diagnose` | core | 10 | 25 min |
# | `load_test` | core | 10 | 30 min |
# | `make_plan` | stretch | 15 | 45 min |
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
# ## diagnose
#
# *Core, 10 points, about 25 minutes.*
#
# Six mystery servers, seeds 1 to 6, each have one fault. Name for each the saturated resource, the layer that owns the knob, and the knob: one flag of `minigen serve`, with its value if it takes one. The six resources are batch slots, token budget, blocks, arithmetic, bandwidth and nothing. The layers are client, gateway, batching, engine, runtime and silicon. Resource and layer must be right, and goodput in a re-run with your knob must reach four fifths of what the course's own knob gives.

# %%
# exercise: minigen_course.ch52_slo.mystery.diagnose
from minigen_course.ch52_slo.mystery import Diagnosis


def diagnose(seed: int) -> Diagnosis:
    """Return the diagnosis of the mystery server of this seed, 1 to 6.

    Its resource is the one that is saturated, its layer owns the knob, and the knob is one flag of
    `minigen serve`, with its value if it takes one, as in
    `Diagnosis("blocks", "engine", "--num-blocks 2000")`.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(52, diagnose=diagnose)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch52_slo.mystery import try_knob

try_knob(3, mine(3).knob)

# %% [markdown]
# **Harder.** In each mystery server something else is full after your cure, or nothing is. Ask whether the bottleneck has moved: which second knob (mystery prints them all) would you turn next? If you need none, which gauge shows that?

# %% [markdown]
# ## load_test
#
# *Core, 10 points, about 30 minutes.*
#
# Write the load test. Send each request at its time, independently of the requests before it. Its latency counts from that time. A failure has infinite latency. Percentiles are by nearest rank, over all requests together.

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
# In the running engine:

# %%
import httpx

from minigen_course import load_model
from minigen_course.lab.load import run_apart
from minigen.server.local import serving

server = serving(load_model(weights="int4"))


async def measure():
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def send(number):
            asked = {"prompt": f"Tea number {number} is", "max_tokens": 16}
            (await client.post("/v1/completions", json=asked)).raise_for_status()

        return await mine(send, [0.1 * number for number in range(20)], (50, 90, 99))


found = run_apart(measure())
server.close()
print({percent: f"{1e3 * seconds:.0f} ms" for percent, seconds in found.items()})

# %% [markdown]
# **Harder.** How certain is a p99 of 200 requests, of which only two lie above it? Draw 200 of your latencies with replacement (one may be drawn more than once), many times, and report the bounds that contain 95 % of the p99 values.

# %% [markdown]
# ## make_plan
#
# *Stretch, 15 points, about 45 minutes.*
#
# The capstone: serve a trace of chats, documents and a nightly job within their objectives, at the least cost. Chats and documents must keep TTFT below 500 ms and ITL below 100 ms, the job's answers must be complete within 30 s. At least 97 % of the requests must keep their objectives, on this trace and on a second one of the same kind. The score counts good answers for the bytes that the GPU read and the FLOPs that it computed; it must reach 95 % of the course's. A plan that does not fit into the card's memory is refused.

# %%
# exercise: minigen_course.ch52_slo.capstone.make_plan
from minigen_course.ch52_slo.capstone import Plan


def make_plan() -> Plan:
    """Return a plan that serves the trace within its objectives at the least cost.

    At least 97 % of the requests must keep their objectives, also on a second trace of the same
    kind. The score is good answers per second of the GPU, where the cost adds the seconds for all
    bytes read, at full bandwidth, to those for all FLOPs, at full arithmetic.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(52, make_plan=make_plan)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch52_slo.capstone import score_of

score_of(mine()).show()

# %% [markdown]
# **Harder.** climb(make_plan()) of minigen_course.ch52_slo.capstone prints the ladder from Plan() to your plan, one field at a time; climb(make_plan(), "job_priority") takes that field first. Does a rung's gain depend on the rungs before it? Which two fields are worth nothing alone, and much together?

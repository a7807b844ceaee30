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
# # Exercises of chapter 51
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/51_server.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/51_server.ipynb)
#
# The chapter: [A server that OpenAI clients can use](../notebooks/51_server.ipynb). Its exercises take about 75 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `event_data` | warm-up | 5 | 10 min |
# | `chat_events` | core | 10 | 25 min |
# | `BoundedQueue` | stretch | 15 | 40 min |
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
# ## event_data
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Read a stream of server-sent events by hand. `pieces` are the parts of a body in order, cut anywhere, even within a character. Yield the data of each event as text, as soon as the empty line that ends it has arrived.
#
# A line ends with a line feed, and a carriage return before it does not count. A line is a name, a colon and a value; one space after the colon does not belong to the value. The values of an event's `data` lines are joined by a line feed. Leave out lines that begin with a colon (comments), fields with other names, events without a `data` line, and an event without an empty line at the end.

# %%
# exercise: minigen_course.ch51_server.lesson.event_data
from collections.abc import Iterable, Iterator


def event_data(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event, as soon as its empty line has arrived.

    `pieces` are the parts of a body, cut at any byte. A line ends with a line feed, perhaps after a
    carriage return. The values of several `data` lines are joined by a line feed. Comments, other
    fields, events without a data line and an event that does not end are left out. Source: HTML
    standard, "Server-sent events".
    """
    raise NotImplementedError  # your turn


# %%
mine = check(51, event_data=event_data)

# %% [markdown]
# In the running engine:

# %%
import httpx

from minigen.engine.engine_thread import EngineThread
from minigen_course import load_model
from minigen.server.local import LocalServer
from minigen_course.ch51_server.lesson import small_app

llm = load_model(weights="int4")
owls = [{"role": "user", "content": "Tell me about owls."}]
asked = {"model": "m", "messages": owls, "max_tokens": 24, "stream": True}
with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread)) as server:
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as response:
        for data in mine(response.iter_raw()):
            print(data)

# %% [markdown]
# **Harder.** The standard also lets a line end with a carriage return alone, and a browser's reader keeps the last `id` and the `retry` time, so that it can connect again. How would you tell a carriage return that ends a line from the first half of a pair, if the piece ends there?

# %% [markdown]
# ## chat_events
#
# *Core, 10 points, about 25 minutes.*
#
# Write the async generator that turns an answer's tokens into server-sent events: a chunk with the role, a chunk for each text as soon as its characters are complete, a chunk with the finish reason and an empty delta, and [DONE]. If the stream ends before the answer does, call `give_up()`, which aborts the request in the engine.

# %%
# exercise: minigen_course.ch51_server.lesson.chat_events
from collections.abc import AsyncIterator, Callable
from typing import Any


async def chat_events(
    tokens: AsyncIterator[tuple[bytes, str | None]],
    head: dict[str, Any],
    give_up: Callable[[], None],
) -> AsyncIterator[bytes]:
    """Stream an answer as server-sent events: its role, its text, its finish reason, [DONE].

    `tokens` yields the bytes of each token with None, and those of the last one with the finish
    reason. A chunk is `head` plus "choices", a list of one: "index" 0, "delta", "finish_reason".
    Text is sent as soon as its characters are complete. `give_up()` is called once if the stream
    ends before the answer does, for any reason. Sources: OpenAI's API reference; HTML standard,
    "Server-sent events".
    """
    raise NotImplementedError  # your turn


# %%
mine = check(51, chat_events=chat_events)

# %% [markdown]
# In the running engine:

# %%
from openai import OpenAI

from minigen.engine.engine_thread import EngineThread
from minigen_course import load_model
from minigen.server.local import LocalServer
from minigen_course.ch51_server.lesson import small_app

llm = load_model(weights="int4")
owls = [{"role": "user", "content": "Tell me about owls."}]
with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread, mine)) as server:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = {"model": "m", "messages": owls, "max_tokens": 24}
    for chunk in client.chat.completions.create(**asked, stream=True):
        print(chunk.choices[0].delta.content or "", end="")

# %% [markdown]
# **Harder.** A client may ask for `stream_options: {include_usage: true}`. Then a last chunk before [DONE] has no choices, and `usage`. And what if the engine fails after the first event, when status 200 has already been sent? Send an event that has an `error`.

# %% [markdown]
# ## BoundedQueue
#
# *Stretch, 15 points, about 40 minutes.*
#
# Write a queue with an end, as ASGI middleware. At most `max_running` requests run in `app` at once, at most `max_waiting` more wait and start in the order in which they came. A request that finds the queue full does not reach the app: it gets status 429, a JSON body with an `error` that has a `message`, and the header `Retry-After`.
#
# The header's value is the time after which a request behind the full queue would start: (`max_waiting` + 1) times `seconds`, divided by `max_running`, rounded up to whole seconds. Count only requests of type "http" and method "POST"; pass all else to the app at once. A request gives its place back however it ends: by an answer, by an error of the app (which goes on to the caller), or because its task is cancelled, running or waiting.

# %%
# exercise: minigen_course.ch51_server.lesson.BoundedQueue
from starlette.types import ASGIApp


class BoundedQueue:
    """ASGI middleware: a few requests run in `app`, a few wait in order, the others get status 429.

    Only POST requests are counted; everything else goes to the app at once. `seconds` is how long a
    request runs on average. `Retry-After` is the time until a request behind the full queue would
    start, in whole seconds, rounded up.
    """

    def __init__(self, app: ASGIApp, max_running: int, max_waiting: int, seconds: float):
        raise NotImplementedError  # your turn


# %%
mine = check(51, BoundedQueue=BoundedQueue)

# %% [markdown]
# In the running engine:

# %%
from concurrent.futures import ThreadPoolExecutor

import httpx

from minigen.engine.engine_thread import EngineThread
from minigen_course import load_model
from minigen.server.local import LocalServer
from minigen_course.ch51_server.lesson import small_app

llm = load_model(weights="int4")
owls = [{"role": "user", "content": "Tell me about owls."}]
asked = {"model": "m", "messages": owls, "max_tokens": 100, "stream": True}
with EngineThread(llm.engine) as thread:
    app = mine(small_app(llm, thread), max_running=2, max_waiting=1, seconds=1.0)
    with LocalServer(app) as server, ThreadPoolExecutor(5) as pool:
        url = f"{server.url}/v1/chat/completions"
        for got in pool.map(lambda _: httpx.post(url, json=asked, timeout=60), range(5)):
            print(got.status_code, got.headers.get("retry-after", "answered"))

# %% [markdown]
# **Harder.** A waiting client may disconnect. ASGI does not cancel your task for that: `receive()` returns a message of the type "http.disconnect". Wait for it and for the turn at once, and leave the queue at whichever comes first. The request's body must still reach the app.

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
# # 51 · A server that OpenAI clients can use
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/51_server.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/51_server.ipynb)
#
# The engine is whole: many requests share it, step by step. This chapter puts it on a network, so
# that programs which were written for OpenAI's service can use it instead. The API itself is a few
# lines. The hard part is to keep two things apart: an event loop that must not block, and an
# engine that computes as long as it has work. The server must also notice when a client has gone,
# and refuse what is too much.
#
# **Afterwards you can** stream an answer over HTTP and say what every byte of it is for, say where a
# request waits on its way, end an answer's work when its client goes, refuse requests with a time to
# come back, and put your own scheduler behind the API that OpenAI's client speaks.
#
# **You need** chapters 12 (tokens and bytes), 24 (the scheduler) and 25 (the engine and its thread).
# **Time:** about 55 minutes to read and try, about 75 for the
# [exercises](../exercises/51_server.ipynb).
#
# **Where we are:** chapters 21 to 25 built an engine that a Python program calls. Chapters 31 to 42
# made it faster or spread it over devices. From here on its users can be on other machines.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | serving | prefill, decode | host CPU | L5 gateway | `--max-queue`, `--request-timeout` | TTFT, errors |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,server,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
import asyncio
import codecs
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from openai import OpenAI

from minigen import LLM, SamplingParams
from minigen.bench.workload import Planned
from minigen.engine.dispatcher import Dispatcher
from minigen.engine.engine_thread import EngineThread
from minigen.server.app import create_service
from minigen.server.local import LocalServer, serve_command, serving
from minigen.server.middleware import stack
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost, warm_up
from minigen.trace.events import EventKind
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
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
from minigen_course.ch51_server import lesson
from minigen_course.ch51_server.figures import (
    arrivals,
    health_checks,
    request_path,
    tokens_after_disconnect,
)
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.load import put_load

llm = load_model(weights="int4")
warm_up(llm)  # what compiles itself when it is first used has done so now
owls = [{"role": "user", "content": "Tell me about owls."}]
question = llm.chat_prompt(owls)
greedy = SamplingParams(temperature=0, max_tokens=80)
chapter_map("HTTP server", "detokenizer")

# %% [markdown]
# ## A number that hurts
#
# An answer has 80 tokens. A server can send it when it is whole, or send each word (to be exact,
# each token's text) as soon as the engine has sampled it
# ([streaming](../docs/glossary.md#streaming)).
#
# Predict: how many times as long do you wait for the first word if the server sends the whole
# answer? Replace `None` by your number. (Numbers in ⟨ ⟩ are measured, so yours will differ.)

# %%
guess_ratio = predict("The whole answer takes how many times the first word?", None, within=2)

# %%
llm.generate(question, SamplingParams(max_tokens=1))  # its full blocks are in the prefix cache now
started = time.perf_counter()
stream = llm.stream(question, greedy)
first_word = next(stream)
first_after = time.perf_counter() - started
answer_text = first_word + "".join(stream)
whole_after = time.perf_counter() - started
measured(f"its first word ({first_word!r}), after", first_after, "s")
measured("the whole answer, after", whole_after, "s")
guess_ratio.compare(whole_after / first_after, "times", measured=True)

# %% [markdown]
# The engine's work is the same. Only the waiting differs: a person reads while the engine writes
# the rest. (Most of this prompt was in the prefix cache. With a new one the first word comes
# later, and the ratio is smaller.)
# The time to the first word has a name, [time to first token
# (TTFT)](../docs/glossary.md#time-to-first-token-ttft).
#
# ## Eight words first
#
# A server is made of a few ideas that earlier chapters used in passing, or not at all.
#
# | word | in one sentence |
# |---|---|
# | **process** | a running program with memory of its own |
# | **thread** | a sequence of instructions that runs inside a process; all threads of a process share its memory, and the operating system switches between them at any moment |
# | **socket** | here, one end of a connection between two programs, perhaps on two machines: the bytes that one end writes, the other end reads in the same order |
# | **HTTP** | the rules of the web: the client writes a *request* (a method such as POST, a path, header lines, perhaps a body), and the server writes a *response* (a status number, header lines, perhaps a body) |
# | **JSON** | dictionaries, lists, strings, numbers, `true`, `false` and `null` written as text, as in `{"max_tokens": 5}` |
# | **coroutine** | a function (`async def`) that can pause where it says `await`, and goes on later |
# | **event loop** | a loop in one thread that runs many coroutines in turn: when one pauses, it continues another one that has what it waited for |
# | **SSE** | server-sent events: an HTTP body that stays open, in which each piece of news is a line `data: ...` (or several) and an empty line |
#
# Two details matter below. The operating system may take a thread's turn away at any instruction,
# but a coroutine gives its turn away only at an `await` (`async for` and `async with` await, too).
# And in the usual build of Python one thread of a process at a time runs Python code, because it
# must hold the **global interpreter lock (GIL)**;
# compiled code, such as a matrix product, can release the lock while it works.
#
# ## The smallest version that works
#
# A web framework reads the request and calls your function.
# [FastAPI](https://fastapi.tiangolo.com/) is one. It stands on **Starlette**, which has the
# objects for requests and responses; a third library, **uvicorn**, reads HTTP from the sockets and
# calls the app. Below
# are two functions: one calls the engine, and one only says that the server lives. (A function that
# answers one path is an **endpoint**.) Many servers have such a `/health`, and monitoring
# looks at it every few seconds.
#
# `LocalServer` runs such an app on a port of this machine (a number that says which program a
# connection is for), in a thread of the notebook. How long does a look at `/health` take while the
# server is idle, and how long while it writes an answer? One client makes all looks, over one
# connection that is open already, so that no time is spent on connecting. (Making a new client for
# each look would cost more time than the look.)

# %%
naive = FastAPI()


@naive.post("/answer")
async def whole(asked: dict[str, Any]) -> dict[str, str]:
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    return {"text": llm.generate(asked["prompt"], params).text}


@naive.get("/health")
async def health() -> str:
    return "ok"


def client_of(server):
    return httpx.Client(base_url=server.url, timeout=60)  # httpx makes HTTP requests


def post_question(client, max_tokens=80):
    asked = {"prompt": question, "max_tokens": max_tokens}
    return client.post("/answer", json=asked).json()["text"]


def longest(looks_at_one):
    return max(after - before for before, after in looks_at_one)


looks, said = {}, []
with LocalServer(naive) as server, client_of(server) as client:
    idle, looks["async def,\ncomputes in the loop"] = lesson.looks_at_health(
        server.url, lambda: said.append(post_question(client))
    )
assert said == [answer_text]
busy = longest(looks["async def,\ncomputes in the loop"])
measured("health, the server is idle (the shortest of nine looks)", 1e3 * idle, "ms")
measured("health, while one answer is written (the longest look)", 1e3 * busy, "ms")
measured("ratio", busy / idle)

# %% [markdown]
# It works, for one client. All `async` functions of such a server run in one event loop. `generate`
# has no `await`: it computes until the answer is whole. Until then the loop runs nothing else. A
# second question is not even read before the first answer is whole.
#
# ## Why not a plain `def`?
#
# Many Python developers ask this next. FastAPI runs an endpoint that is a plain `def` in a thread
# of a pool (threads that are kept ready for such calls; [its
# documentation](https://fastapi.tiangolo.com/async/#path-operation-functions) says why), so the
# loop stays free. `asyncio.to_thread` does the same by hand, with another pool.
#
# But two threads must not step one engine at the same time: both would change its blocks and its
# queues. So a naive server puts a lock around `generate` (a lock lets one thread in, and the others wait
# until it comes out). Each answer is then a
# [batch](../docs/glossary.md#batching) of its own: N threads are N separate batches, one after the
# other. The engine could have computed all N in the same steps (chapter 24).
#
# Predict: four clients ask at once for 32 tokens each. How many times as long do four threads with a
# lock take as one batch of four?

# %%
guess_threads = predict("Four threads take how many times one batch of four?", None, within=1.5)

# %%
pooled, one_at_a_time = FastAPI(), threading.Lock()
pooled.get("/health")(health)


@pooled.post("/answer")
def whole_in_a_thread(asked: dict[str, Any]) -> dict[str, str]:
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    with one_at_a_time:
        return {"text": llm.generate(asked["prompt"], params).text}


def steps_of(recorder):
    return sum(event.kind is EventKind.STEP for event in recorder.events)


short = SamplingParams(temperature=0, max_tokens=32)
with LocalServer(pooled) as server, client_of(server) as client, ThreadPoolExecutor(4) as pool:
    _, looks["def,\nin a pool of threads"] = lesson.looks_at_health(
        server.url, lambda: post_question(client)
    )
    with llm.record() as recorder:
        started = time.perf_counter()
        list(pool.map(lambda _: post_question(client, short.max_tokens), range(4)))
        in_threads = time.perf_counter() - started
    print(f"four answers, by four threads with a lock: {steps_of(recorder)} steps of the engine")
with llm.record() as recorder:
    started = time.perf_counter()
    llm.generate([question] * 4, short, progress=False)
    in_a_batch = time.perf_counter() - started
print(f"four answers, in one batch: {steps_of(recorder)} steps of the engine")
with llm.record() as recorder, ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda _: llm.generate(question, short), range(4)))
measured("four answers, by four threads without the lock: steps", steps_of(recorder))
measured("by four threads with a lock", in_threads, "s")
measured("in one batch", in_a_batch, "s")
guess_threads.compare(in_threads / in_a_batch, "times", measured=True)
pooled_busy = longest(looks["def,\nin a pool of threads"])
picture(
    health_checks(looks),
    "Each row is a server that writes one answer. Each bar is one look at /health, from its request "
    "to its answer; amber is the longest of its row. The first server answers its one look only at the end.",
    number="51.1",
)

# %% [markdown]
# Read the picture from left to right. In the upper row one bar reaches from the first
# look to the end of the answer: the look came 0.05 s after the question, and waited for the rest. In the lower row
# the bars are short: the loop answers while another thread computes. They are still longer than on
# an idle server, if both threads need the same cores or the GIL. (The answer itself may take longer in
# the lower row: the looks, and the client that makes them in this process, share the cores and the
# GIL with the engine. A monitor that looks every few seconds costs far less.)
#
# So threads cure `/health`. With a lock they do not cure the work: the printed steps are four times
# as many. (The time is less than four times as long, because a step for four requests costs more than a
# step for one.) More *processes* do not cure it either: each would have an engine of its own, with its
# own KV cache and its own batches, and as a rule its own copy of the weights. All requests for one
# model on one device should reach *one* engine.
#
# The third count shows that minigen's own `generate` needs no lock around it. When several threads
# call it, each step is made by one of them, for all; the others wait for their tokens. (It is more
# than 32 if the four do not all join at the first step.) That is the
# right idea, but still not a server: each unfinished request occupies a thread ([the pool has
# 40](https://www.starlette.io/threadpool/)), and a thread that waits cannot be cancelled when its
# client goes.
#
# ## The idea: two threads and two queues
#
# The engine gets a thread of its own, which steps as long as there is work
# ([`EngineThread`](../docs/glossary.md#engine-thread), chapter 25). The event loop runs in another
# thread. The two exchange data through queues; to put something in, neither waits for the other:
#
# - The loop puts commands into the engine's queue: "add this request", "abort that one"
#   (`dispatcher.submit` and `dispatcher.abort` below: the thread's `dispatcher` holds both queues). The
#   engine takes them between two steps.
# - The engine tells of each token by calling a function that we give it. That function runs in the
#   engine's thread, so it must be fast and must not touch the loop's own data. It only looks up
#   the token's bytes and calls `loop.call_soon_threadsafe`, the loop's function for other threads:
#   it leaves a call for the loop and wakes it, through a socket that the loop listens to.
#
# Below, `my_tokens_of` is an **async generator**, an `async def` with `yield`: it may pause at `await`
# between two values, and `async for` reads them. (The notebook's cells run in an event loop already.)
# `inbox` is a third queue, of one request alone: `get` of an `asyncio.Queue` pauses only this coroutine,
# and only the loop's thread may touch the queue. The engine's queue for the loop is emptied at once here;
# later, the loop does it.

# %%
picture(
    request_path(),
    "The path of one request, from left to right. Each row is a place; the text in italics below a "
    "box says what waits there, and for what.",
    number="51.2",
)


async def my_tokens_of(llm, thread, answer):
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(delta):  # called in the engine's thread
        piece = llm.tokenizer.token_bytes(delta.token_id)
        loop.call_soon_threadsafe(inbox.put_nowait, (piece, delta.finish_reason))

    thread.dispatcher.submit([answer], deliver)
    finish_reason = None
    while finish_reason is None:
        piece, finish_reason = await inbox.get()  # meanwhile the loop serves others
        yield piece, finish_reason


def answers_of(prompts, max_tokens):
    return llm.process_requests(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))


with EngineThread(llm.engine) as thread:
    (answer,) = answers_of([question], max_tokens=6)
    pieces = [each async for each in my_tokens_of(llm, thread, answer)]
print(*pieces, sep="\n")

# %% [markdown]
# Follow one request in Figure 51.2. The client writes a POST and waits. The loop reads the body,
# checks the JSON, and encodes the text ([request processor](../docs/glossary.md#request-processor);
# encoding is computing, too, so a body of 20 kB or more is encoded in another thread); while bytes
# are missing, this request's coroutine waits, and the loop serves others. The command waits for the
# end of the current step. In the engine the request waits for a place in the batch and for free
# blocks (chapter 24). Once the prompt is computed, a step brings a token. It waits in the outbox
# (the engine's queue for the loop; more below) until the loop runs, becomes an event, and the
# client reads it. The arrow back is the next step. (The figure is of the package's server, which
# sends the text that the engine's thread has made of the tokens. The small servers below ignore
# that text: their loop makes it again, from the tokens' bytes.)
#
# So a request can wait in several places, and each has another remedy. That is why servers measure
# them apart (chapter 52).
#
# The course sorts parts of the stack into layers (chapter 00). This chapter is about one of them:
#
# | layer | its part of a request | where you met it |
# |---|---|---|
# | L6 client | asks, reads events, tries again | OpenAI's client, below |
# | **L5 gateway** | **HTTP, JSON, [API keys](../docs/glossary.md#api-key), limits, time-outs, disconnects** | **this chapter** |
# | L4 routing and batching | which requests run together, and on which engine | 24 (and 52) |
# | L3 engine | tokens, blocks, the model, sampling | 12 to 17, 21 to 23, 25, 35, 36, 41, 42 |
# | L2 runtime | files, formats, packages | 11 |
# | L1 kernels | attention and products | 31 to 34 |
# | L0 silicon | cores and memory | |
#
# A limit on requests belongs to L5, because it can refuse before any layer below it has worked. A
# slow kernel does not: the gateway could only admit fewer requests, and that would move the
# problem up to the clients.
#
# ## Bytes, and not text
#
# `my_tokens_of` yields bytes. A character may be spread over several tokens, and only whole
# characters may be shown (chapter 12). On the left is what a client gets from a server that decodes
# each token by itself; on the right what it should get
# ([detokenization](../docs/glossary.md#detokenization)).

# %%
utf8 = codecs.getincrementaldecoder("utf-8")()
print("each token alone      together")
for token_id in llm.tokenizer.encode("An 🦉 in 東京"):
    piece = llm.tokenizer.token_bytes(token_id)
    print(f"{piece.decode(errors='replace')!r:<22}{utf8.decode(piece)!r}")

# %% [markdown]
# The decoder on the right keeps the bytes of an incomplete character until the rest comes. A row
# with `''` is a token that shows nothing yet. Remember it: such a token will have no event of its
# own.
#
# ## What goes over the wire
#
# HTTP can send a body piece by piece, without saying first how long it will be. Server-sent events say
# where one piece of news ends. [Their
# format](https://html.spec.whatwg.org/multipage/server-sent-events.html) is short: lines of text,
# each with a name, a colon and a value, and an empty line at the end of each event. (A line that
# begins with a colon is a comment, which readers skip.) OpenAI's chat API
# ([reference](https://platform.openai.com/docs/api-reference/chat-streaming)) uses only the name `data`
# (its newer Responses API also names each event, in a line `event:`), and puts a **chunk** into it: an
# object in JSON.
#
# `small_app` has such an endpoint. (In its source, `tokens_of` is `my_tokens_of` with errors
# handled, and `chat_events` makes the events, and calls `give_up` if the client goes; you write it
# below.) Below are the raw bytes of its body for an answer of five tokens. (On the connection
# HTTP/1.1 writes the length of each piece before it, and a piece of length 0 at the end:
# `Transfer-Encoding: chunked`. httpx has taken these lengths off. HTTP's chunks are not OpenAI's.)
# Before you read on: what is the first event for, and the last but one? Where would you see that
# the answer was cut off?

# %%
show(lesson.small_app)
thread = EngineThread(llm.engine)
small = LocalServer(lesson.small_app(llm, thread))
path = f"{small.url}/v1/chat/completions"
asked = {"model": "m", "messages": owls, "max_tokens": 5, "stream": True}
with httpx.stream("POST", path, json=asked) as response:
    raw = response.read()
    print(response.status_code, response.headers["content-type"])
print(raw.decode())

# %% [markdown]
# - The status 200 and the headers came before the first token. What goes wrong later can no longer
#   change them. (The package's server sends them only with the first token, so that an error before
#   it still has a status of its own.)
# - All chunks of an answer begin alike: `id` names the answer, `object` the kind of object,
#   `created` a time, `model` the model. `choices` is a list, because a request can ask for several
#   answers (`n`); `index` says which of them a chunk belongs to, here the only one.
# - The first event has a **delta** with the role. A delta is what this chunk adds to the message; a
#   client puts all deltas together.
# - Each of the next events adds text.
# - The last but one has an empty delta and a [finish reason](../docs/glossary.md#finish-reason):
#   `length` says that a limit (here `max_tokens`) cut the answer off; `stop` would say that the
#   model had finished, or had written a stop string.
# - `[DONE]` is no JSON. It says that no more events come. A connection that breaks does not say
#   that, so a client can tell a whole answer from a broken one.
#
# If a stream arrives all at once, look at what stands between server and client. A proxy (a program
# between the two that passes requests and responses on), such as nginx, may collect a response and
# pass it on as a whole: the package's server sends `X-Accel-Buffering: no` against that. The
# proxy's own time-out must be longer than each wait for an event, above all for the first token.
#
# ## Your turn: read the wire
#
# A client has to do the reverse. The network cuts the bytes where it likes: in an event, in a line, in a
# character. An example by hand, with three pieces. (⏎ is a line feed. One space after the colon
# does not count, and the values of an event's `data` lines are joined by a line feed.)
#
# | piece that arrives | whole lines in it | kept for later | event |
# |---|---|---|---|
# | `: ping⏎⏎data: o` | a comment, an empty line | `data: o` | |
# | `ne⏎data: two⏎` | `data: one`, `data: two` | | |
# | `⏎` | an empty line | | `"one\ntwo"` |
#
# The first empty line ends nothing, since there was no data yet. (Some servers send comments so
# that no one between them and the client closes a silent connection.)

# %%
task(51, "event_data")

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
my_event_data = check(51, event_data=event_data)

# %% [markdown]
# Your reader on a live connection. (Until it passes, `my_event_data` is the course's own.)

# %%
with httpx.stream("POST", path, json=asked) as response:
    for number, data in enumerate(my_event_data(response.iter_raw())):
        print(number, data if data == "[DONE]" else json.loads(data)["choices"][0])
cut_anywhere = [raw[at : at + 7] for at in range(0, len(raw), 7)]
assert list(my_event_data(cut_anywhere)) == list(lesson.event_data([raw]))
reveal(51, event_data=my_event_data)

# %% [markdown]
# OpenAI's own client reads such a stream without knowing which program wrote it. It is the judge.

# %%
client = OpenAI(base_url=f"{small.url}/v1", api_key="none", timeout=60)
for chunk in client.chat.completions.create(**{**asked, "max_tokens": 40}):
    print(chunk.choices[0].delta.content or "", end="")

# %% [markdown]
# ## Drag it: several clients at once
#
# Each client asks for 24 tokens at the same moment. (`serving` starts the package's server; `put_load`
# sends requests at planned times, `Planned(second, prompt, tokens)`, and notes when each event came.) In
# the picture each client is a row, and each event with text is a tick.
#
# Predict: with 16 clients instead of one, how many times as many events per second do all clients
# together get?

# %%
guess_events = predict("16 clients: how many times the events per second of one?", None, within=1.5)

# %%
small.close()
thread.close()  # an engine has one thread at a time
seen, tokens_per_event = {}, {}
with serving(llm) as server:
    for clients in (1, 4, 16):
        load = [Planned(0, f"A word about number {place} is", 24) for place in range(clients)]
        outcomes = put_load(server.url, load)
        seen[clients] = [list(each.text_times) for each in outcomes]
        num_events = sum(map(len, seen[clients]))
        tokens_per_event[clients] = sum(each.output_tokens for each in outcomes) / num_events

explore(
    lambda clients: arrivals(seen[clients]),
    "Each row is a client, each tick an event with text; grey is the time before the first. Choose "
    "the number of clients.",
    "51.3",
    clients=[4, 1, 16],
)
rates = {n: sum(map(len, rows)) / max(row[-1] for row in rows) for n, rows in seen.items()}
guess_events.compare(rates[16] / rates[1], "times", measured=True)
for clients, per_event in tokens_per_event.items():
    measured(f"clients: {clients}; tokens per event", per_event)

# %% [markdown]
# Most ticks stand below one another: a step of the engine brings each running request a token, and
# the clients hear of it together. (A client whose request came first may have been alone in the
# first step.) With more clients a step takes longer, so the gaps grow, but less than the number
# of clients does (chapter 24).
#
# Some ticks are shifted to the right, and others are missing. A tick is an event, not a token. There are
# two reasons:
#
# 1. **The loop came late.** The server sends everything that has arrived since it last sent something to
#    this client, with an event for each token that has text. If the engine finished two steps before the
#    loop could run this client's coroutine, both events leave together: one tick is late, and two lie on
#    one place. (A client that reads late gives the same picture: here it shares the GIL, and a tick is
#    the time at which it read.)
# 2. **There was nothing to show.** A token that ends within a character, or that may be the
#    beginning of a stop string, is held back until more comes. A special token has no text at all.
#    Some stand in these answers, because the load asks the engine to write on after the [end of the
#    sequence](../docs/glossary.md#end-of-sequence), so that all answers have 24 tokens.
#
# The printed averages show the second reason alone: two events that leave together still count as
# two. In these answers only the special tokens do it, which count as tokens and have no event. (No
# token here ends within a character; such a token would come in the event of the next. Between
# numbers of clients the averages differ a little, because their prompts differ, and so do their
# special tokens.)
#
# How many tokens leave together is arithmetic, as long as the loop is the part that is late. Take 16
# streams, 1 ms of the loop's time to send to one of them, and steps of 8 ms. One round over all streams
# takes 16 ms, and two steps end meanwhile, so two tokens leave together each time. In general
#
# $$k \approx \max\left(1,\ \frac{n\,h}{t}\right)$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $k$ | tokens of one stream that leave together | |
# | $n$ | streams | `clients` |
# | $h$ | seconds of the loop to send once to one stream | |
# | $t$ | seconds of one step of the engine | |
#
# The formula leaves out that both threads share cores and the GIL, and that both vary. The clients
# of this cell run in the same process, too, and take time from the loop. While $n h$ is below $t$,
# the loop keeps up, and $k$ is 1.
#
# ## How often to wake the loop
#
# When a step ends, there may be a token for every running request. Must the loop be asked to run
# for each of them? Asking costs a system call (a request to the operating system), and the woken
# thread competes with the engine's for the GIL. `my_tokens_of` asks once per token, even if the
# loop is awake already. The package's `Dispatcher` collects the events of all streams in one
# outbox, and asks the loop once to empty it. `EngineThread` takes the loop's function for that as
# its second argument. Then the loop calls the functions given to `submit`, so `inbox.put_nowait`
# may be one. (A coroutine that the loop runs by itself is a **task**, which can be cancelled;
# `asyncio.gather` makes a task of each of several coroutines, and waits for all. `lesson.tokens_of`
# is `my_tokens_of`, and also handles errors, and leaves out the bytes of the token that ends an
# answer, such as `<|im_end|>`.)
#
# Predict: eight streams of 24 tokens are 192 tokens. How often is the loop asked, if it is asked
# once per step? (`count_calls` runs a coroutine in a loop of its own, and counts the calls of its
# `call_soon_threadsafe`. One waking may serve several calls, so the loop wakes at most as often.)

# %%
guess_asked = predict("How often is the loop asked, once per step?", None, within=1.5)


# %%
async def each_by_itself():
    async def one(answer):
        return [piece async for piece, _ in lesson.tokens_of(llm, thread, answer)]

    await asyncio.gather(*(one(each) for each in answers_of([question] * 8, max_tokens=24)))


async def step_by_step():
    loop = asyncio.get_running_loop()

    async def one(answer):
        inbox = asyncio.Queue()
        thread.dispatcher.submit([answer], inbox.put_nowait)
        while (await inbox.get()).finish_reason is None:
            pass

    with EngineThread(llm.engine, loop.call_soon_threadsafe) as thread:
        await asyncio.gather(*(one(each) for each in answers_of([question] * 8, max_tokens=24)))


with EngineThread(llm.engine) as thread:
    _, asked_for_each = lesson.count_calls(each_by_itself)
with llm.record() as recorder:
    _, asked_together = lesson.count_calls(step_by_step)
num_steps = steps_of(recorder)
print(f"{8 * 24} tokens: the loop is asked {asked_for_each} times, if for each")
guess_asked.compare(asked_together, "times", measured=True)
measured("steps of the engine meanwhile", num_steps)
assert asked_together <= num_steps
show(Dispatcher._flush, Dispatcher._hand_out)

# %% [markdown]
# `_flush` runs in the engine's thread after each step. It asks for a call only if none is due
# already, so a slow loop is not asked twice. `_hand_out` runs in the loop and empties the outbox.
#
# ## The package's server
#
# `serving` puts the whole server around a loaded model, as `minigen serve` does from the command line
# (without `--send-timeout` and `--drain-timeout`). The question and the client's program are the same as before,
# and the text is the beginning of the same answer, its first 40 tokens. Most of what follows is about what the small server
# lacks. (With `include_usage`, a last chunk without choices brings the **usage**: how many tokens were read
# and written.)

# %%
server = serving(llm)
client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def chat(**more):
    return client.chat.completions.create(
        **{"model": "minigen", "messages": owls, "temperature": 0, "max_tokens": 40, **more}
    )


chunks = chat(stream=True, stream_options={"include_usage": True})
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text
assert answer_text.startswith(text)
whole = chat()
assert whole.choices[0].message.content == text
print("streamed or whole, it is the beginning of the engine's answer")
print(f"usage: {whole.usage.prompt_tokens} tokens read, {whole.usage.completion_tokens} written")
stopped = chat(stop=["nature"])
print(f"\nwith a stop string: ...{stopped.choices[0].message.content[-36:]!r}")
print(f"finish_reason {stopped.choices[0].finish_reason!r}, ", end="")
print(f"{stopped.usage.completion_tokens} tokens written")

# %% [markdown]
# A [stop string](../docs/glossary.md#stop-string) ends the work, and not only the text. The
# engine's thread turns tokens into text, so it sees the stop string before it plans the next step.
# Where the loop looks for stop strings, the engine may be some tokens further by then.
#
# A request whose fault can be seen is refused before the engine has any work with it, with a
# status and a sentence. Statuses from 400 to 499 say that the request is at fault, from 500 to 599
# that the server is. Some servers drop fields that they do not know. The answer may then not be
# what was asked for, and the client gets no warning.

# %%
tries = {
    "a model that is not there": {"model": "gpt-4"},
    "a field that the server does not know": {"extra_body": {"best_effort": True}},
    "a temperature that cannot be": {"temperature": -1},
    "more than the context": {"messages": [{"role": "user", "content": "owl " * 9000}]},
}
for what, more in tries.items():
    try:
        chat(**more)
    except openai.APIStatusError as error:
        print(f"{what}: {error.status_code} {type(error).__name__}\n    {error.body['message']}")

# %% [markdown]
# ## The client goes away
#
# People close the page. The engine does not see that: it writes on to the last token, and keeps the
# request's blocks and its place in the batch, unless the server notices and aborts it. Here a
# client reads six events of an answer of 80 tokens (the role, and five with text), and closes the
# connection. Three servers; how many tokens does each one make?


# %%
def tokens_made(url):
    """A client that reads six events and goes; returns the tokens that the engine made of it."""
    with llm.record() as recorder, OpenAI(base_url=f"{url}/v1", api_key="none") as leaving:
        asked = {"model": "minigen", "messages": owls, "max_tokens": 80, "temperature": 0}
        stream = leaving.chat.completions.create(**asked, stream=True)
        for _ in range(6):
            next(stream)
        stream.close()
        while llm.engine.live:
            time.sleep(0.01)
    return sum(event.kind is EventKind.NEW_TOKEN for event in recorder.events)


made = {"minigen serve": tokens_made(server.url)}
assert llm.kv_usage == 0, "every block is free again"
server.close()


def forgetful(tokens, head, give_up):
    return lesson.chat_events(tokens, head, give_up=lambda: None)


with EngineThread(llm.engine) as thread:
    with LocalServer(lesson.small_app(llm, thread, forgetful)) as server:
        made["small, forgetful"] = tokens_made(server.url)
    with LocalServer(lesson.small_app(llm, thread)) as server:
        made["small, gives up"] = tokens_made(server.url)
picture(
    tokens_after_disconnect({name: (5, tokens) for name, tokens in made.items()}),
    "Each bar is a server. Blue are five tokens, one for each event with text that the client read "
    "(one may carry more), amber the others that the engine computed.",
    number="51.4",
)
print(f"forgetful: {made['small, forgetful']} tokens")
measured("small, gives up: tokens", made["small, gives up"])
measured("minigen serve: tokens", made["minigen serve"])
assert max(made["small, gives up"], made["minigen serve"]) < 80

# %% [markdown]
# The amber part of the long bar is work for no one. The other two servers stop almost at once.
#
# How does a server learn that its client has gone? The client closes its socket. The operating
# system tells the server's event loop. (A client that loses its network closes nothing; a time-out
# must then end its request.) The web framework's streaming response then cancels the coroutine that
# writes. With some other servers its next `send` (what writes to the client) fails instead; uvicorn
# drops what is sent. To cancel a coroutine is to raise an exception in it
# (`asyncio.CancelledError`) when the loop next runs it. The exception comes where the coroutine
# waits. If that is in your generator, which waits for a token, it is raised at the generator's
# `async for`. If the framework is sending an event, it is raised there, outside the generator.
# Python then closes the generator, which raises `GeneratorExit` at its `yield`. In both cases its
# `finally` blocks run. That is the place to abort the request. A step that is under way cannot be
# stopped, so a few tokens may still be made.
#
# Only a *streaming* response is cancelled. An endpoint that returns a whole answer runs on, unless
# it asks for the news itself, as the package's does for every answer, in a second coroutine. And a
# client that stays but reads slowly must not hold up the engine: its events wait in the server's
# memory, and `--send-timeout` closes a connection whose buffers stay full.
#
# ## Your turn: write the events
#
# Now write what turns tokens into events, and gives up when the client has gone. (If the answer ends
# within a character, its bytes are shown as `�`: the decoder needs `errors="replace"`, and `final=True`
# at the end.) For the tokens `(b"A", None)` and `(b" owl", "stop")` the events are
#
# | event | delta | finish reason |
# |---|---|---|
# | 1 | `{"role": "assistant", "content": ""}` | `null` |
# | 2 | `{"content": "A"}` | `null` |
# | 3 | `{"content": " owl"}` | `null` |
# | 4 | `{}` | `"stop"` |
# | 5 | `[DONE]` | |

# %%
task(51, "chat_events")

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
# One line puts yours between the engine and OpenAI's client. (Until it passes, `mine` is the
# course's own.)

# %%
with EngineThread(llm.engine) as thread, LocalServer(lesson.small_app(llm, thread, mine)) as server:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for chunk in client.chat.completions.create(**{**asked, "max_tokens": 24}):
        print(chunk.choices[0].delta.content or "", end="")
    client.close()
reveal(51, chat_events=mine)

# %% [markdown]
# ## A queue that has an end
#
# Under overload, a server that accepts everything makes clients wait until they give up, and the
# work for those who gave up is lost. It is better to refuse at once and say when to retry: [status
# 429](https://www.rfc-editor.org/rfc/rfc6585#section-4) ("too many requests") with the header
# `Retry-After`, here a number of seconds. OpenAI's client tries twice more by itself, and waits as
# long as the header says. (If that is more than two minutes, its present version does not try
# again.)
#
# How many seconds are right? An example: two requests run at once, each runs for 4 seconds, and
# three wait. Every 2 seconds one ends, on average. A request behind the three would be the fourth
# to start, so it would start after 4 times 2 seconds, which is 8. In symbols:
#
# $$W = \frac{(q + 1)\,S}{c}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $W$ | seconds until a request behind the queue would start | `Retry-After`, rounded up |
# | $q$ | requests that wait | `max_waiting`, when the queue is full |
# | $S$ | seconds that a request runs, on average | `seconds` |
# | $c$ | requests that run at once | `max_running` |
#
# The formula holds while all $c$ places are busy, and for the $S$ of that load: in an engine that
# batches, a request runs longer when more run with it. minigen's server estimates otherwise: the
# mean time of its last requests (waiting included), divided by the number inside, is the time
# between two ends (6 inside for 12 seconds each: one leaves every 2 seconds, by Little's law). Each
# refused client gets one such time more than the one before (at most a minute), so that they do not
# come back all at once.
#
# Below, six requests come together where two may be *in flight* (admitted, and not at their end).
# After that, one request comes with a wrong [API key](../docs/glossary.md#api-key), and one with
# the right key takes longer than is allowed. This last error occurs in the middle of a stream:
# status 200 has already been sent, so the error must be an event. These limits, the keys and the
# time-out are **middleware**: rings around the app that know no model. The printed text at the end
# is their module's own (ASGI is explained below it; CORS are rules by which a browser decides what
# a page may read from another origin (`http` or `https`, host and port), and in some cases it asks
# first: a *preflight*).

# %%
with serving(llm, limits=Limits(max_in_flight=2)) as strict:
    outcomes = put_load(strict.url, [Planned(0, "Owls are", 60)] * 6)
counts = Counter(each.error or "answered" for each in outcomes)
print(dict(sorted(counts.items())))
print(next(each.detail for each in outcomes if each.error))

with serving(llm, limits=Limits(request_timeout=0.25), api_keys=["for-you-alone"]) as strict:
    for key in ("guessed", "for-you-alone"):
        few = OpenAI(base_url=f"{strict.url}/v1", api_key=key, max_retries=0)
        try:
            received = 0
            for _ in few.chat.completions.create(
                model="minigen",
                messages=owls,
                stream=True,
                max_tokens=400,
                extra_body={"ignore_eos": True},  # a long answer, on any machine
            ):
                received += 1
        except openai.APIError as error:
            print(f"\n{type(error).__name__}: {error.body['message']}")
measured("events that came before that", received)
print("\n" + stack.__doc__)

# %% [markdown]
# `max_in_flight` counts the requests inside the server (not `/health` and the like), also those
# that wait in the engine.
# `--max-queue` is the [admission limit](../docs/glossary.md#admission-limit) on the waiting ones
# alone. Neither is a **rate limit**, which counts requests or tokens per minute for one key.
# Neither is fair among **tenants**, the customers who share a server: the limit here may be used up
# by one of them. `--max-in-flight-per-key` is a first help, and chapter 52 shows what one tenant
# does to the others.
#
# ## Your turn: a queue with an end
#
# The small app has no limit at all. Write one as middleware. **ASGI** is Python's agreement between a
# server and an app: the app is an asynchronous function `app(scope, receive, send)`. `scope` is a
# dictionary: `scope["type"]` is "http" for a request, which also has `scope["method"]`. (The server also
# calls the app once with the type "lifespan", which has no method.) `await receive()` brings the body or
# the news that the client has gone. `await send(message)` sends the status and headers, and later the
# pieces of the body. The call returns when the response is complete. A response of Starlette is an app,
# too, so a refusal is `await JSONResponse(content, 429, headers)(scope, receive, send)` (from
# `starlette.responses`). Middleware is an app that calls another app. Yours is a class, so its instances
# are such functions by `async def __call__(self, scope, receive, send)`. (`asyncio.Semaphore(n)` lets n
# coroutines in; its `acquire` lets others wait in order.)
#
# With `max_running=1` and `max_waiting=1`, and a request that runs for 3 seconds:
#
# | event | runs | waits | what the client gets |
# |---|---|---|---|
# | A comes | A | | |
# | B comes | A | B | |
# | C comes | A | B | 429, `Retry-After: 6` |
# | B's task is cancelled | A | | |
# | D comes | A | D | |
# | A ends | D | | A's answer |

# %%
task(51, "BoundedQueue")

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
MyQueue = check(51, BoundedQueue=BoundedQueue)

# %% [markdown]
# Five requests at once, before an engine that may work for two while one waits. (Until yours
# passes, `MyQueue` is the course's own.) By the formula, $W = (1 + 1) \cdot 1 / 2 = 1$ second.

# %%
with EngineThread(llm.engine) as thread, ThreadPoolExecutor(5) as pool:
    limited = MyQueue(lesson.small_app(llm, thread), max_running=2, max_waiting=1, seconds=1.0)
    with LocalServer(limited) as server, client_of(server) as client:
        long = {**asked, "max_tokens": 48}
        responses = list(
            pool.map(lambda _: client.post("/v1/chat/completions", json=long), range(5))
        )
for status, after in sorted(
    (each.status_code, each.headers.get("retry-after")) for each in responses
):
    print(status, "answered" if after is None else f"Retry-After: {after}")
reveal(51, BoundedQueue=MyQueue)

# %% [markdown]
# ## A second model, and its first token
#
# A server can offer several models. Should it load them all when it starts (**eager loading**), or each
# one at its first request? Eager loading keeps every model in memory all the time. Loading at the
# first request makes its client wait: its time to first token contains the loading of the weights.
# (Clients that come meanwhile wait for the rest of it.) This is a **cold start**. `minigen serve`
# loads its first model when it starts (`/ready` answers 503, "service unavailable", until it is
# loaded), and further ones at their first request. When it is asked to stop, `/ready` answers 503
# again and new requests are refused, while running ones get `--drain-timeout` to finish: so an
# update of the server loses no answer that ends in that time. (`/health` says that the process
# lives, `/ready` whether to send it requests.)
#
# With `keep_alive`, an idle model leaves memory after some time, and the next request is cold
# again. The name is that of [Ollama](https://docs.ollama.com/faq), whose default is five minutes.
# Ollama's own call for a chat is `POST /api/chat`. It streams, too, but not as server-sent events:
# each line of the body is one JSON object (`application/x-ndjson`), and the last one has
# `"done": true` and times in nanoseconds. An empty list of messages with `"keep_alive": 0` unloads
# the model. minigen speaks the main part of this API, because many local tools do. (It also speaks
# Anthropic's `/v1/messages` and OpenAI's newer `/v1/responses`: the same engine and the same
# queues, with another writer of events.) In the cell, `ModelHost` has a function for each model,
# which loads it, and `create_service` makes the server's app. `/api/ps` lists the loaded models,
# each with Ollama's tag `latest` (a version, after a colon).
#
# Predict: how many times the warm time to first token is the cold one, for this small model, from a
# file that the operating system may still hold in memory?

# %%
guess_cold = predict("Cold first token: how many times the warm one?", None, within=3)

# %%
# LLM.load reads the file. (load_model shares the weights that it has read before.)
host = ModelHost({"first": lambda: llm, "second": lambda: LLM.load(weights="int4")})
with LocalServer(create_service(host), host) as server, client_of(server) as client:

    def seconds_to_first_line(model):
        body = {"model": model, "messages": owls, "options": {"num_predict": 8, "temperature": 0}}
        started = time.perf_counter()
        with client.stream("POST", "/api/chat", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            first = time.perf_counter() - started
            *_, last = lines
        return first, json.loads(last)

    seconds_to_first_line("first")  # opens the connection
    eager, _ = seconds_to_first_line("first")
    cold, last = seconds_to_first_line("second")
    warm, _ = seconds_to_first_line("second")
    client.post("/api/chat", json={"model": "second", "messages": [], "keep_alive": 0})
    loaded = [each["name"] for each in client.get("/api/ps").json()["models"]]
print("fields of the last line:", *sorted(last))
measured("first token, loaded when the server started", eager, "s")
measured("first token, cold", cold, "s")
measured("of which loading, by the last line", last["load_duration"] / 1e9, "s")
measured("first token, warm", warm, "s")
print("still loaded, when the second was unloaded:", *loaded)
guess_cold.compare(cold / warm, "times", measured=True)

# %% [markdown]
# The last line itself says where the time went (`load_duration`; minigen answers two short prompts after
# each load, so that everything is ready, and counts them in it). (The warm request also finds most
# of its prompt in the prefix cache, which saves part of the rest.) For a model of 70 billion
# parameters in 4 bits the cold time is at least the size of its weights divided by the speed of
# the disk (chapter 11), if the file is not in memory yet: 35 GB of codes and some 5 GB of scales
# and zero points (chapter 35) at 2 GB/s are about 20 seconds before the first token. So servers
# for many users usually load eagerly and stay warm, and a laptop with several models lets idle
# ones go.
#
# ## Your scheduler, behind the same API
#
# Parts of the engine can be taken from a file: `--scheduler`, `--allocator`, `--prefix-cache`,
# `--sampler`. Put your scheduler of chapter 24 into one, and serve it (chapter 24's `save_part` writes
# the file, and returns what `--scheduler` takes). Here is a policy in four lines: the request with the
# shortest prompt goes first (a lower `priority` does). There is one place in the batch. The request
# `first` takes it; then a `long` prompt comes, then a `short` one. (`serve_command` runs `minigen serve`
# in a process of its own.)
#
# Predict: which of the last two is answered first?

# %%
guess_next = predict("Answered first: long or short?", None)

# %%
# For yours: from minigen_course.grading.save_part import save_part, then in `folder`
# save_part(YourScheduler, Path(folder) / "yours.py") returns what --scheduler takes.
mine_py = """
from minigen.engine.scheduler import ContinuousScheduler

class ShortestFirst(ContinuousScheduler):
    def add(self, sequence):
        sequence.priority = len(sequence.prompt_ids)
        super().add(sequence)
"""
names = ("first", "long", "short")
texts = ("Owls are", "There was an owl in the old tree. " * 8, "Tea is")
load = [Planned(at, text, n) for at, text, n in zip((0, 0.05, 0.1), texts, (80, 8, 8), strict=True)]


def order_of(url):
    ends = {name: each.ended for name, each in zip(names, put_load(url, load), strict=True)}
    return sorted(ends, key=ends.get)


with TemporaryDirectory() as folder:
    file = Path(folder) / "mine.py"
    file.write_text(mine_py)
    one_place = ("--weights", "int4", "--max-num-seqs", "1", "--no-access-log")
    with serve_command(*one_place, "--scheduler", f"{file}:ShortestFirst") as url:
        shortest_first = order_of(url)
        print("minigen serve --scheduler mine.py:ShortestFirst:", *shortest_first)
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            listed = client.models.list().data[0].id
with serving(load_model(weights="int4", max_num_seqs=1)) as server:
    print("minigen serve:", *order_of(server.url))
guess_next.compare(shortest_first[1])
print("the first server's model, as OpenAI's client lists it:", listed)

# %% [markdown]
# ## The measurement again
#
# The same question as at the beginning, now over HTTP through the whole server: the first word, the
# whole answer, and `/health` meanwhile.

# %%
with serving(llm) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
    ask = {
        "model": "minigen",
        "messages": owls,
        "temperature": 0,
        "max_tokens": 80,
        "stream": True,
    }
    list(client.chat.completions.create(**{**ask, "max_tokens": 1}))  # connects
    started, first_http = time.perf_counter(), None
    for chunk in client.chat.completions.create(**ask):
        if first_http is None and chunk.choices[0].delta.content:
            first_http = time.perf_counter() - started
    whole_http = time.perf_counter() - started
    _, looks["minigen serve"] = lesson.looks_at_health(
        server.url, lambda: list(client.chat.completions.create(**ask))
    )
picture(
    health_checks(looks),
    "The three servers, each during one answer of 80 tokens. Each bar is one look at /health; amber "
    "is the longest of its row.",
    number="51.5",
)
served_busy = longest(looks["minigen serve"])
measured("its first word, over HTTP, after", first_http, "s")
measured("the whole answer, over HTTP, after", whole_http, "s")
measured("ratio", whole_http / first_http)
measured("ratio at the beginning, without HTTP", whole_after / first_after)
measured("health, while one answer is written", 1e3 * served_busy, "ms")
measured("times shorter than with the first server", busy / served_busy)

# %% [markdown]
# The first word comes after a small part of the whole time, as it did without a network, and `/health` is
# answered throughout. (The ratio is smaller: HTTP delays the first word by some milliseconds, which is
# much beside so short a time.) What does it cost? Sixteen answers of 16 tokens, by the engine alone in
# this thread, and streamed over HTTP to sixteen clients that share the cores, and even the process, with
# the server. (In `benchmarks/51_server.py` the server has a process of its own, as it should.)

# %%
prompts = [f"A word about number {place} is" for place in range(16)]
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
alone, over_http = [], []
for _ in range(2):
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    alone.append(time.perf_counter() - started)
    with serving(llm) as server:
        outcomes = put_load(server.url, [Planned(0, prompt, 16) for prompt in prompts])
    over_http.append(max(each.ended for each in outcomes))
assert sum(each.output_tokens for each in outcomes) == 16 * 16
measured("the engine alone", 16 * 16 / min(alone), "tokens/s")
measured("over HTTP, streamed", 16 * 16 / min(over_http), "tokens/s")
share = min(alone) / min(over_http)
measured("share", 100 * share, "%")

# %% [markdown]
# ## Claims
#
# What guides say, beside what this notebook found. The outcomes are computed from the numbers.

# %% jupyter={"source_hidden": true}
verdicts(
    "51",
    Claim(
        "Streaming cuts the waiting time to a second or less",
        f"the first word came after {mark(first_http, 's')}, the whole answer after "
        f"{mark(whole_http, 's')}",
        holds(first_http <= 1),
        "true while the queue and the prompt are short; the last word does not come sooner",
        "[OpenAI's guide](https://developers.openai.com/api/docs/guides/latency-optimization)",
        measured=True,
    ),
    Claim(
        "An endpoint that is `async def` serves other requests meanwhile",
        f"while it computed an answer, a look at /health took {mark(1e3 * busy, 'ms')} instead of "
        f"{mark(1e3 * idle, 'ms')}",
        holds(busy < 10 * idle),
        "true of endpoints that wait (`await`); one that computes blocks the loop",
        measured=True,
    ),
    Claim(
        "A blocking function in a plain `def` runs in a pool of threads, and the server stays free",
        f"/health took {mark(1e3 * pooled_busy, 'ms')} at most, {mark(1e3 * busy, 'ms')} with the "
        "same function in the loop",
        holds(pooled_busy < busy / 5),
        "the loop runs while another thread computes; both share the cores and the GIL",
        "[FastAPI's documentation](https://fastapi.tiangolo.com/async/)",
        measured=True,
    ),
    Claim(
        "A pool of threads answers requests at the same time",
        f"with a lock, four answers took {mark(in_threads / in_a_batch, 'times')} as long as in one "
        "batch",
        holds(in_threads < 1.25 * in_a_batch),
        "behind a lock each thread's request is a batch of one; they must meet in one batch",
        measured=True,
    ),
    Claim(
        "A client that closes the connection stops the work",
        f"of 80 tokens {made['small, forgetful']} were made where the server did not tell the engine, "
        f"{mark(made['minigen serve'])} where it gave up",
        holds(made["small, forgetful"] < 80),
        "only if the server listens for it, and tells the engine",
    ),
    Claim(
        "The HTTP server takes a third of the time (33 %)",
        f"streaming over HTTP took {mark(100 * (1 - share), '%')} of the time here",
        within(1 - share, 0.25, 0.4),
        "measured there with an 8B model on an H100, before vLLM gave the server a process of its "
        "own; the shorter a step, the larger the part that HTTP takes",
        "[vLLM, September 2024](https://blog.vllm.ai/2024/09/05/perf-update.html)",
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - With streaming the engine does the same work as for a whole answer. But the first word moves to
#   the beginning of the waiting time.
# - An event loop serves many connections as long as each coroutine mostly waits. A computation in
#   a coroutine blocks all of them while it lasts.
# - Threads free the loop. Behind a lock each is a batch of its own, and a waiting thread cannot be
#   cancelled. So one thread owns the engine, and the loop exchanges commands and tokens with it
#   through queues.
# - A stream is lines of `data: ` with JSON (the role, the text, the finish reason), then `[DONE]`.
#   The bytes may be cut anywhere, and a token is not always a whole character.
# - Events may leave together, because the loop sends what has arrived since it last sent something. An event may
#   carry several tokens, because a token that is no whole text waits for the next.
# - A client that has gone must be noticed, and its request aborted, or the engine computes for no
#   one.
# - A queue needs an end. Status 429 with `Retry-After` costs the server little and tells
#   the client when to return.
# - A model that is loaded at its first request makes its client wait for the weights. Eager
#   loading pays with memory instead.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A colleague writes `async def answer(...)` and calls
# `await asyncio.to_thread(llm.generate, ...)` in it, with a lock. `/health` is fast. What is still
# wrong?</summary>
# Each call of `generate` is a batch of its own, and the lock runs them one after the other. The last of
# ten clients waits for ten whole answers. One engine thread would compute one token for each of
# the ten in a step.</details>
#
# <details><summary>2. A client sees 20 events with text, and the usage says 24 tokens. Nothing was lost.
# Name two reasons.</summary> A token ended within a character, or was the possible beginning of a
# stop string, so it had to wait for the next one. Or it was a special token, which has no text.
# (That the loop came late is no reason: then two events leave together.)</details>
#
# <details><summary>3. Four requests run at once, each for 6 seconds, and seven wait. A further one is
# refused. What is its `Retry-After`, by the chapter's formula? What makes the estimate wrong?</summary>
# (7 + 1) · 6 / 4 = 12 seconds. It is wrong if answers are much longer or shorter than the average, if
# waiting clients leave, or if the load, and with it the time of a request, changes.</details>
#
# ## What the production engines do beyond this
#
# At the time of writing ([chapter 52](52_slo.ipynb) says which engine fits when):
#
# - **[vLLM](https://docs.vllm.ai/en/latest/design/arch_overview/)** runs the API server and the
#   engine in processes of their own, with messages over ZeroMQ (a library for sockets) between
#   them, so that tokenizing and JSON take no time from the engine's Python. It can run several API
#   servers before one model (`--api-server-count`).
# - **[SGLang](https://docs.sglang.io/)** has three kinds of processes: the server with its
#   tokenizer, the scheduler with the model, and a detokenizer that turns tokens into text.
#   `--max-queued-requests` is its admission limit.
# - **[TGI](https://github.com/huggingface/text-generation-inference)** (archived since March 2026) has
#   its router in Rust: it queues, checks and batches, and calls the Python that runs the model.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/tree/master/tools/server)** has server and
#   engine in one C++ program. HTTP threads put tasks into a queue, and one loop steps all of them
#   in one batch.
# - **[Ollama](https://docs.ollama.com/api)** starts a process for each loaded model behind a server
#   in Go. It queues requests up to `OLLAMA_MAX_QUEUE`, and refuses more with status 503.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** has `trtllm-serve`, or runs behind NVIDIA's
#   Triton Inference Server (not the Triton of chapter 31).
# - In large installations a gateway stands before several engines. It can end TLS (the encryption
#   of https, which minigen's server leaves to it), check keys and quotas,
#   retry, and prefer the engine that has the beginning of a prompt in its [prefix
#   cache](../docs/glossary.md#prefix-caching).
#
# **gRPC** is another way to call a program over the network. Messages are usually binary, with
# fields that both sides know from a schema (Protocol Buffers), and travel over HTTP/2, where many
# calls share one connection and both sides can stream. Such messages are usually smaller and
# faster to read than JSON, but a web page cannot send them without a translator. So
# [gRPC](https://grpc.io/docs/what-is-grpc/introduction/) is mostly found inside: TGI's router
# calls its model servers by gRPC, SGLang's server can speak it beside HTTP, and Triton Inference
# Server offers it beside HTTP. Clients outside mostly get HTTP and JSON.
#
# **OpenTelemetry** is a common standard for what programs report about themselves. Its *trace*
# follows one request through several programs: each part of the way is a *span* with a name, a
# start and an end, and all spans of a request carry the same number, which travels in the HTTP
# header [`traceparent`](https://www.w3.org/TR/trace-context/). With it, one picture shows the
# gateway, the server and the engine.
# [vLLM](https://docs.vllm.ai/en/latest/examples/observability/opentelemetry/) sends its spans with
# `--otlp-traces-endpoint`. minigen's trace events (chapter 25) stay in one process.
#
# ## Further reading
#
# - [Server-sent events](https://html.spec.whatwg.org/multipage/server-sent-events.html), in the
#   HTML standard: the format, under "Parsing an event stream" and "Interpreting an event stream".
# - [OpenAI's API reference](https://platform.openai.com/docs/api-reference/chat): every field of a
#   request, and the objects of a stream.
# - [RFC 6585](https://www.rfc-editor.org/rfc/rfc6585): status 429; [RFC
#   9110](https://www.rfc-editor.org/rfc/rfc9110#field.retry-after): `Retry-After`, and what HTTP's
#   messages mean ([RFC 9112](https://www.rfc-editor.org/rfc/rfc9112): how HTTP/1.1 writes them).
# - [Concurrency and async / await](https://fastapi.tiangolo.com/async/), FastAPI's documentation:
#   loops and threads with hamburgers.
# - [vLLM v0.6.0](https://blog.vllm.ai/2024/09/05/perf-update.html): the post with the third of the
#   time, and why the server then got a process of its own.
# - [vLLM's server](https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html) and
#   [Ollama's API](https://docs.ollama.com/api): what each accepts beyond OpenAI's fields.
# - [`minigen/server/replies.py`](https://github.com/minigen/minigen/blob/main/minigen/server/replies.py):
#   how minigen's server answers a request: submit, send events, notice a disconnect, in one file.
#
# **Next:** [chapter 52](52_slo.ipynb) puts load on this server, and measures what people feel of
# it.

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
# that programs which were written for OpenAI's service can use it instead. The API is a few lines.
# The hard part is to keep an event loop that must never block apart from an engine that always
# computes, and to notice when a client has gone.
#
# **Afterwards you can** stream an answer over HTTP and say what every byte of it is for, end an
# answer's work when its client goes, refuse what is too much, and put your own scheduler behind
# OpenAI's own client.
#
# **You need** chapters 12 (tokens and bytes), 24 (the scheduler) and 25 (the engine and its thread).
# **Time:** about 50 minutes to read and try, about 45 for the exercises.
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

from minigen import SamplingParams
from minigen.bench.workload import Planned
from minigen.engine.dispatcher import Dispatcher
from minigen.engine.engine_thread import EngineThread
from minigen.server.local import LocalServer, serve_command, serving
from minigen.server.middleware import stack
from minigen.server.middleware.limits import Limits
from minigen.server.models import warm_up
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
from minigen_course.ch51_server.figures import arrivals, tokens_after_disconnect
from minigen_course.ch51_server.lesson import chat_events, count_wakeups, small_app, tokens_of
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.load import put_load

llm = load_model(weights="int4")
warm_up(llm)  # what compiles itself when it is first used has done so now
owls = [{"role": "user", "content": "Tell me about owls."}]
question = llm.chat_prompt(owls)
chapter_map("HTTP server", "detokenizer")

# %% [markdown]
# ## A number that hurts
#
# An answer of 120 tokens. A server can send it when it is whole, or each word when it has it. How
# many times as long do you wait for the first word if the server sends the whole answer?

# %%
guess_ratio = predict("The whole answer takes how many times the first word?", None, within=2)

# %%
greedy = SamplingParams(temperature=0, max_tokens=120)
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
# The work is the same. Only the waiting differs: people read while the rest is written.
#
# ## The smallest version that works
#
# A web framework calls a function for each request. Here is one that calls the engine, and one
# that only says that the server lives, as every server has for its monitoring. How long does
# a look at `/health` take while the server idles, and how long while it writes an answer? Both are
# asked by one client that is connected already, so that the times are the server's own. (A new
# client for each request costs tens of milliseconds by itself.)

# %%
naive = FastAPI()


@naive.post("/answer")
async def whole(asked: dict[str, Any]) -> dict[str, str]:
    return {"text": llm.generate(asked["prompt"], greedy).text}


@naive.get("/health")
async def health() -> str:
    return "ok"


def client_of(server):
    return httpx.Client(base_url=server.url, timeout=60)


def seconds_of_health(client):
    started = time.perf_counter()
    client.get("/health").raise_for_status()
    return time.perf_counter() - started


def idle_and_busy(app):
    """Seconds of a look at /health: the shortest of nine while idle, and one during an answer."""
    with LocalServer(app) as server, client_of(server) as client, client_of(server) as other:
        other.get("/health").raise_for_status()
        idle = min(seconds_of_health(client) for _ in range(9))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(other.post, "/answer", json={"prompt": question})
            time.sleep(0.05)
            busy = seconds_of_health(client)
            assert asking.result().json()["text"] == answer_text
    return idle, busy


idle, busy = idle_and_busy(naive)
measured("health, the server idles", 1e3 * idle, "ms")
measured("health, while one answer is written", 1e3 * busy, "ms")
measured("ratio", busy / idle)

# %% [markdown]
# It works, for one. The `async` functions of such a server run in one **event loop**: a thread that
# switches to another request whenever one waits (`await`). `generate` does not wait, it computes, so
# all other requests stand still, and a second question is read when the first is answered.
#
# ## Why not a plain `def`?
#
# Every Python developer asks this. FastAPI calls a plain `def` in a thread of a pool
# ([its documentation](https://fastapi.tiangolo.com/async/#path-operation-functions) says why), so the
# loop stays free. But an engine has one caller at a time: several threads would disturb each other's
# steps, so they need a lock. Then each answer is a batch of its own, and the engine's gift, many
# requests in one step, is lost. Below: `/health` again, and four answers at once, by four threads, and
# by the engine in one batch.

# %%
pooled, one_at_a_time = FastAPI(), threading.Lock()
pooled.get("/health")(health)


@pooled.post("/answer")
def whole_in_a_thread(asked: dict[str, Any]) -> dict[str, str]:
    with one_at_a_time:
        return {"text": llm.generate(asked["prompt"], greedy).text}


pooled_idle, pooled_busy = idle_and_busy(pooled)
measured("health, while one answer is written in a thread", 1e3 * pooled_busy, "ms")

with LocalServer(pooled) as server, client_of(server) as client, ThreadPoolExecutor(4) as pool:
    started = time.perf_counter()
    list(pool.map(lambda _: client.post("/answer", json={"prompt": question}), range(4)))
    in_threads = time.perf_counter() - started
started = time.perf_counter()
llm.generate([question] * 4, greedy, progress=False)
in_a_batch = time.perf_counter() - started
measured("four answers, by four threads", in_threads, "s")
measured("four answers, in one batch", in_a_batch, "s")

# %% [markdown]
# Health is well again, and the four answers take longer than they need: the threads wait for each
# other. Processes instead of threads would each need a copy of the weights. So all requests must reach
# *one* engine, which puts them into one batch.
#
# ## The idea: two threads and a letterbox
#
# The engine gets a thread of its own, which steps as long as there is work (`EngineThread`, chapter
# 25). The loop leaves it requests; it tells of every token by calling a function that we give it.
# That function is called in the engine's thread, so all it does is put the token into the loop's
# letterbox, and wake the loop.


# %%
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
# Bytes, and not text: a character may be spread over several tokens, and only whole ones may be
# shown (chapter 12). Below is what a server sends that decodes each token by itself, and what it
# should send.

# %%
import codecs

utf8 = codecs.getincrementaldecoder("utf-8")()
print("each token alone      together")
for token_id in llm.tokenizer.encode("An 🦉 in 東京"):
    piece = llm.tokenizer.token_bytes(token_id)
    print(f"{piece.decode(errors='replace')!r:<22}{utf8.decode(piece)!r}")

# %% [markdown]
# ## What goes over the wire
#
# HTTP can send a body piece by piece. *Server-sent events* say where a piece of news begins and
# ends: a line `data: `, then an empty line. OpenAI's API puts a piece of JSON into each.
# `small_app` is such an endpoint; here are its raw bytes for an answer of five tokens. What is the
# first event for, and the last but one? And where would you see that the answer was cut off?

# %%
show(small_app)
thread = EngineThread(llm.engine)
small = LocalServer(small_app(llm, thread))
asked = {"model": "m", "messages": owls, "max_tokens": 5, "stream": True}
with httpx.stream("POST", f"{small.url}/v1/chat/completions", json=asked) as response:
    raw = response.read()
    print(response.status_code, response.headers["content-type"])
print(raw.decode())

# %% [markdown]
# A program puts the deltas together: the role, the text in parts, why it ended. `length` says that
# it was cut off at `max_tokens`; `stop` would say that the model had done. `[DONE]` is no JSON: it
# says that nothing comes any more, which a connection that just breaks does not.
#
# OpenAI's own client reads it without knowing whom it asks. That is the judge from now on.

# %%
client = OpenAI(base_url=f"{small.url}/v1", api_key="none", timeout=60)
for chunk in client.chat.completions.create(**{**asked, "max_tokens": 40}):
    print(chunk.choices[0].delta.content or "", end="")

# %% [markdown]
# ## Drag it: several clients at once
#
# Each client is a row, each event with text a tick. With more clients, what becomes of the gaps
# between a client's ticks, and what of the events per second of all together?

# %%
guess_events = predict("16 clients: how many times the events per second of one?", None, within=1.5)

# %%
small.close()
thread.close()
seen = {}
with serving(llm) as server:
    for clients in (1, 2, 4, 8, 16):
        load = [Planned(0, f"A word about number {place} is", 24) for place in range(clients)]
        seen[clients] = [list(each.text_times) for each in put_load(server.url, load)]

explore(
    lambda clients: arrivals(seen[clients]),
    "Ticks of the events of four clients, which come together, step by step.",
    "51.1",
    clients=[4, 1, 2, 8, 16],
)
rates = {n: sum(map(len, rows)) / max(row[-1] for row in rows) for n, rows in seen.items()}
guess_events.compare(rates[16] / rates[1], "times", measured=True)

# %% [markdown]
# Most ticks stand below one another: a step of the engine gives each request a token, and the clients
# hear of it together. Gaps become longer with each client, but far less than the clients become more.
# Some ticks are missing or a little late. A tick is an event, not a token: the server sends all text
# that has arrived since the last event, so if the loop comes late, it sends two tokens as one event. A
# token that ends within a character has no event of its own either.
#
# ## How often to ring
#
# So when a step ends, there are tokens for all. Must the loop be woken for each of them? Each time
# costs system calls, and Python goes to the other thread while the engine waits to tell the next
# one. The package's `Dispatcher` keeps a box for all streams together, and hands it over once all
# step's tokens are in it; give `EngineThread` the loop's function that does that. Eight streams of 24
# tokens are 192 tokens; how often is the loop woken if it is woken once per step?

# %%
guess_woken = predict("How often is the loop woken, once per step?", None, within=1.5)


# %%
async def each_by_itself():
    async def one(answer):
        return [piece async for piece, _ in tokens_of(llm, thread, answer)]

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
    _, woken_alone = count_wakeups(each_by_itself)
with llm.record() as recorder:
    _, woken_together = count_wakeups(step_by_step)
num_steps = sum(event.kind is EventKind.STEP for event in recorder.events)
print(f"{8 * 24} tokens: the loop is woken {woken_alone} times, if for each")
guess_woken.compare(woken_together, "times", measured=True)
measured("steps of the engine meanwhile", num_steps)
assert woken_together <= num_steps
show(Dispatcher._flush, Dispatcher._hand_out)

# %% [markdown]
# ## The package's server
#
# `serving` puts the whole server around a model that is loaded, as `minigen serve` does from the
# command line. Same question, same client, same text; and all that the small one lacks.

# %%
server = serving(llm)
client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def chat(**more):
    return client.chat.completions.create(
        **{"model": "minigen", "messages": owls, "temperature": 0, "max_tokens": 120, **more}
    )


told = chat(stream=True, stream_options={"include_usage": True})
text = "".join(chunk.choices[0].delta.content or "" for chunk in told if chunk.choices)
assert text == answer_text
whole = chat()
assert whole.choices[0].message.content == answer_text
print("streamed or whole, it is the engine's answer")
print(f"usage: {whole.usage.prompt_tokens} tokens read, {whole.usage.completion_tokens} written")
stopped = chat(stop=["nature"])
print(f"\nwith a stop string: ...{stopped.choices[0].message.content[-36:]!r}")
print(f"finish_reason {stopped.choices[0].finish_reason!r}, ", end="")
print(f"{stopped.usage.completion_tokens} tokens written")

# %% [markdown]
# A stop string ends the work, too, and not only the text: tokens become text in the engine's
# thread, so the sequence is over before the next step. (Where the loop looks for stop strings, the
# engine is a few tokens further by then.)
#
# What cannot be done is refused before any work, by a status and a sentence. Some servers accept
# fields that they do not know, and the answer is then not what was asked for.

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
# People close the page. Nothing tells the engine: it writes on, to the last token, and keeps the
# request's blocks and seat meanwhile, unless the server notices. Here a client reads six events of an
# answer of 120 tokens, and closes the connection; three servers, and how many tokens each made.


# %%
def tokens_made(url):
    """A client that reads six events and goes; returns the tokens that the engine made of it."""
    with llm.record() as recorder, OpenAI(base_url=f"{url}/v1", api_key="none") as leaving:
        asked = {"model": "minigen", "messages": owls, "max_tokens": 120, "temperature": 0}
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
    return chat_events(tokens, head, give_up=lambda: None)


with EngineThread(llm.engine) as thread:
    with LocalServer(small_app(llm, thread, forgetful)) as unheeding:
        made["small, forgetful"] = tokens_made(unheeding.url)
    with LocalServer(small_app(llm, thread)) as heeding:
        made["small, gives up"] = tokens_made(heeding.url)
picture(
    tokens_after_disconnect({name: (5, tokens) for name, tokens in made.items()}),
    "Bars of tokens: a server that does not notice makes all 120; the others stop soon.",
    number="51.2",
)
print(f"forgetful: {made['small, forgetful']} tokens")
measured("small, gives up: tokens", made["small, gives up"])
measured("minigen serve: tokens", made["minigen serve"])
assert max(made["small, gives up"], made["minigen serve"]) < 120

# %% [markdown]
# The engine makes some tokens more even so: the news travels while it steps.
#
# ## A queue that has an end
#
# A server that accepts everything makes all clients wait until they give up. Better to refuse at once
# and say when to retry: status 429 and the header `Retry-After`, which OpenAI's client obeys by itself.
# Below, six requests come together where two may run; then one comes with a wrong key, and one with
# the right key takes longer than is allowed. That error occurs in the middle of a stream: status 200
# has already been sent, so the error must be an event. Limits, keys and time-outs are rings around the
# app, and none of them knows a model; the last lines are their module's own.

# %%
with serving(llm, limits=Limits(max_in_flight=2)) as strict:
    outcomes = put_load(strict.url, [Planned(0, "Owls are", 100)] * 6)
counts = Counter(each.error or "answered" for each in outcomes)
print(dict(sorted(counts.items())))
print(next(each.detail for each in outcomes if each.error))

with serving(llm, limits=Limits(request_timeout=0.25), api_keys=["for-you-alone"]) as strict:
    for key in ("guessed", "for-you-alone"):
        few = OpenAI(base_url=f"{strict.url}/v1", api_key=key, max_retries=0)
        try:
            received = 0
            for _ in few.chat.completions.create(model="minigen", messages=owls, stream=True):
                received += 1
        except openai.APIError as error:
            print(f"\n{type(error).__name__}: {error.body['message']}")
measured("events that came before that", received)
print("\n" + stack.__doc__)

# %% [markdown]
# ## The measurement again: what streaming costs
#
# Sixteen answers of 24 tokens: by the engine alone, in this thread; and streamed over HTTP, to
# sixteen clients that share the cores, and even the Python, with the server. (In
# `benchmarks/51_server.py` the server has a process of its own, as it should.)

# %%
prompts = [f"A word about number {place} is" for place in range(16)]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
alone, over_http = [], []
for _ in range(3):
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    alone.append(time.perf_counter() - started)
    with serving(llm) as server:
        outcomes = put_load(server.url, [Planned(0, prompt, 24) for prompt in prompts])
    over_http.append(max(each.ended for each in outcomes))
assert sum(each.output_tokens for each in outcomes) == 16 * 24
measured("the engine alone", 16 * 24 / min(alone), "tokens/s")
measured("over HTTP, streamed", 16 * 24 / min(over_http), "tokens/s")
share = min(alone) / min(over_http)
measured("share", 100 * share, "%")

# %% [markdown]
# ## Your scheduler, OpenAI's client
#
# Every socket of the engine can be filled from a file: `--scheduler`, `--allocator`,
# `--prefix-cache`, `--sampler`. Put your scheduler of chapter 24 into one, and serve it. Here is a
# policy in four lines: the request with the shortest prompt goes first. There is one seat. It is taken
# (`seated`); then a `long` prompt comes, then a `short` one. Which of these two is answered first?

# %%
guess_next = predict("Answered first: long or short?", None)

# %%
mine_py = """
from minigen.engine.scheduler import ContinuousScheduler

class ShortestFirst(ContinuousScheduler):
    def add(self, sequence):
        sequence.priority = len(sequence.prompt_ids)
        super().add(sequence)
"""
names = ("seated", "long", "short")
texts = ("Owls are", "There was an owl in the old tree. " * 8, "Tea is")
load = [Planned(at, text, n) for at, text, n in zip((0, 0.1, 0.2), texts, (150, 8, 8), strict=True)]


def order_of(url):
    ends = {name: each.ended for name, each in zip(names, put_load(url, load), strict=True)}
    return sorted(ends, key=ends.get)


with TemporaryDirectory() as folder:
    path = Path(folder) / "mine.py"
    path.write_text(mine_py)
    one_seat = ("--weights", "int4", "--max-num-seqs", "1", "--no-access-log")
    with serve_command(*one_seat, "--scheduler", f"{path}:ShortestFirst") as url:
        shortest_first = order_of(url)
        print("minigen serve --scheduler mine.py:ShortestFirst:", *shortest_first)
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            listed = client.models.list().data[0].id
with serving(load_model(weights="int4", max_num_seqs=1)) as server:
    print("minigen serve:", *order_of(server.url))
guess_next.compare(shortest_first[1])
print("the first server's model, as OpenAI's client lists it:", listed)

# %% [markdown]
# ## Your turn
#
# Write what turns tokens into events, and gives up when the client has gone. `check` says the first
# thing that is wrong.

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
# package's own.)

# %%
with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread, mine)) as server:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = {"model": "m", "messages": owls, "max_tokens": 24}
    for chunk in client.chat.completions.create(**asked, stream=True):
        print(chunk.choices[0].delta.content or "", end="")
    client.close()

# %% [markdown]
# And this is the package's version:

# %%
reveal(51, chat_events=mine)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM** has the API server and the engine in processes of their own, with messages over ZeroMQ
#   between them, so that tokenising and JSON take no time from the engine's Python. **SGLang** has
#   a third process which turns tokens into text.
# - **TGI** has its router in Rust: it queues, checks, batches, and speaks gRPC to the Python that
#   runs the model. **llama.cpp** has server and engine in one C++ program with a thread for the
#   model, as minigen has; **Ollama** starts such a runner for each model, behind a server in Go.
# - **TensorRT-LLM** is put behind Triton Inference Server, or its own `trtllm-serve`.
# - A gateway stands before several engines in most installations: keys, quotas, retries, and the
#   choice of the engine that has a prompt's beginning cached.
# - Aborting is by request id everywhere, down to the engine's scheduler; tokens of a step that is
#   under way are made and thrown away, as here.

# %%
verdicts(
    "51",
    Claim(
        "Streaming makes answers faster",
        f"the first word comes {mark(whole_after / first_after, 'times')} as soon, but all tokens "
        f"{mark(100 * share, '%')} as fast as without HTTP",
        holds(share > 1.2),  # by more than the noise of three tries
        "the waiting is shorter, the work is not: it is a little more",
        measured=True,
    ),
    Claim(
        "An endpoint that is `async` serves other requests meanwhile",
        f"while it computed an answer, a look at /health took {mark(1e3 * busy, 'ms')} instead of "
        f"{mark(1e3 * idle, 'ms')}",
        holds(busy < 10 * idle),
        "true only of endpoints that wait (`await`); one that computes blocks the loop",
        measured=True,
    ),
    Claim(
        "A plain `def`, in a pool of threads, is the remedy",
        f"/health took {mark(1e3 * pooled_busy, 'ms')}, but four answers "
        f"{mark(in_threads / in_a_batch, 'times')} as long as in one batch",
        holds(in_threads < 1.25 * in_a_batch),
        "the engine has one caller at a time, so each thread's request is a batch of one",
        "[FastAPI's documentation](https://fastapi.tiangolo.com/async/)",
        measured=True,
    ),
    Claim(
        "A client that closes the connection stops the work",
        f"of 120 tokens {made['small, forgetful']} were made where the server did not notice, "
        f"{mark(made['minigen serve'])} where it gave up",
        holds(made["small, forgetful"] < 120),
        "only if the server listens for it, and tells the engine",
    ),
    Claim(
        "The HTTP server takes a third of the time (33 %)",
        f"streaming over HTTP took {mark(100 * (1 - share), '%')} of the time here",
        within(1 - share, 0.25, 0.4),
        "measured there with an 8B model on an H100, whose steps are short; here the model's step "
        "is longer, so the same work for HTTP is a smaller part",
        "[vLLM, September 2024](https://blog.vllm.ai/2024/09/05/perf-update.html)",
        measured=True,
    ),
)

# %% [markdown]
# **Next:** chapter 52 puts load on this server, and asks what people feel of it.

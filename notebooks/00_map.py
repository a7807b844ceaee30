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
# # 00 · The map: the finished engine, and the memory that a model needs
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/00_map.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/00_map.ipynb)
#
# You type a question, and a machine writes the answer, word by word. Between the two works an
# **inference engine**: a program that loads a model's file, turns text into numbers and back,
# computes, remembers what it has computed, and lets many people share one machine. This course
# builds such an engine, and this chapter is its map. You see the finished engine from outside, you
# follow one token through it, and you learn the formula that decides how many people it can serve.
# Every later chapter opens one part of it.
#
# **Afterwards you can** run the engine, draw the way from a text to its next token with all shapes,
# read a timeline of requests that share a machine, compute from a model's configuration how much
# memory it needs and how many chats fit, and find the chapter for any problem of an engine.
#
# **You need** Python, and the basics of PyTorch: what a tensor and its shape are. Nothing about
# language models is assumed. A laptop is enough; no chapter needs a GPU, because the functions for
# GPUs run in an interpreter, too. **Time:** about 60 minutes to read and try, about 30 for the
# [exercises](../exercises/00_map.ipynb).
#
# **Where we are:** at the beginning. The map below stands at the head of every chapter, with the
# chapter's own part lit. Here all of it is lit.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | all five | prefill, decode | memory capacity | L0 to L6 | `LLM.load(...)` | tokens/s, memory |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[server,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import json
import time
from statistics import median

import torch
from jaxtyping import Float
from openai import OpenAI
from torch import Tensor

from minigen import SamplingParams, hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.model.attention import attend_packed
from minigen.server.local import serving
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
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch00_map import diagrams, figures, opening_test
from minigen_course.figures.explore import explore, picture
from minigen_course.lab import cost_model
from minigen_course.lab.inspect_model import transformer_of

# %%
chapter_map("serving", "engine", "model", "memory", "machine")

# %% [markdown]
# ## How to read this course
#
# **The map above** need not be clear yet. Of the words that come only much later, *runner* is the
# part that runs the model for one step, *replicas* are copies of the whole engine, and
# *collectives* are the ways in which devices exchange results.
#
# **Run the cells from top to bottom**, with Shift-Enter. Each chapter is one notebook. It starts
# with a number that hurts, builds the smallest thing that works, shows why that is slow or wrong,
# and ends with what production engines do.
#
# **The card** is the small table at the head of each chapter. It names the problem that the chapter
# solves, in which phase of a request's life, what saturates (what runs out first on a busy
# machine), which layer of the stack owns it, which knob (option) changes it, and which metric shows
# it. At the end of this chapter you understand all of these words.
#
# **Predict first.** Before a surprising result, a cell asks for your prediction: replace `None` by
# a number or a word, and run it. (`within=2` says that half to twice the right value counts as near
# enough.) A few cells later it stands beside what came out. A wrong prediction teaches more than a
# right one. Predictions stay in the notebook; nothing is sent anywhere.
#
# **Values in ⟨ ⟩ were measured** on the machine that ran this notebook. Yours will differ. A
# printed value without these marks is the same on every machine; a picture of a measurement is
# measured, too. The next cell prints both kinds.
#
# **Shapes stand in the signature.** Functions that take tensors say which shape they expect, with
# [jaxtyping](https://docs.kidger.site/jaxtyping/): `Float[Tensor, "tokens hidden"]` is a tensor of
# floating-point numbers with two axes, a row for each token and a column for each of the numbers
# that stand for a token. Two axes of one name must have the same length. (A single name gets a
# space before it; some tools would take it for a variable.) The notebook checks these annotations
# at every call, so a wrong shape fails where it happens:


# %%
def mean_of_tokens(x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " hidden"]:
    return x.mean(0)


print(
    "a matrix of 7 tokens with 576 numbers each gives",
    list(mean_of_tokens(torch.ones(7, 576)).shape),
)
try:
    mean_of_tokens(torch.ones(7))
except TypeError as error:
    print("a vector of 7 numbers gives", type(error).__name__)

numbers = torch.ones(1_000_000)
started = time.perf_counter()
total = numbers.sum()
print(f"the sum of a million ones: {total:,.0f}")
measured("time to compute it", (time.perf_counter() - started) * 1e3, "ms")

# %% [markdown]
# **Exercises.** You write a function of the engine first; only then do you see the package's own.
#
# - An exercise is a **warm-up**, **core** or **stretch**: its level says how much it asks for. Its
#   *harder* part is checked only where it names a check.
# - `check(...)` tests your function in a process of its own, and names the first mistake.
# - `hint=1` nudges, `hint=2` says how, and `hint=3` says nearly everything.
# - `using(...)` puts your function into the running package.
# - `reveal(...)` opens the package's version once yours has passed.
#
# You may skip exercises: later cells then use the package's or the course's own part, and say so. The
# command `minigen workspace FOLDER` copies all notebooks to a folder of your own; `minigen progress
# FOLDER` says which exercises pass there.
#
# **Claims** at the end of each chapter are statements that guides make. The notebook tests them and
# says which held.
#
# **Standard terms** are bold or linked where they first occur; the links lead to the
# [glossary](../docs/glossary.md). **Figures** with controls can be changed in JupyterLab; on a page
# without Python you see them at their most telling moment.
#
# ## Before you begin: seven questions
#
# Guess now; you are not expected to know any of this. (In the questions, a card is a GPU with its own
# memory.) Write the letter of the answer that you find most likely. This chapter and later ones give the
# reasons. Chapter 52 asks the same questions again, and then shows both of your answers
# beside the best one.

# %%
opening_test.ask()

# %%
opening_test.keep(
    first_token=None,
    second_request=None,
    long_chats=None,
    same_beginning=None,
    four_bits=None,
    two_cards=None,
    good_mean=None,
)

# %% [markdown]
# Your letters are kept in the file `opening_test.json` beside this notebook, and nowhere else. Run
# the cell again to change them.
#
# ## The engine in four lines
#
# Here is the finished engine. It loads a language model with 135 million **weights** (the numbers
# that training found; also called parameters), which is small enough for any laptop. It answers a
# question, and each piece of the answer is printed as soon as it is computed. This is called
# [streaming](../docs/glossary.md#streaming). (`chat_prompt` writes the question in the form in
# which this model learned to receive questions; chapter 12.)

# %%
llm = load_model(weights="float32", max_num_seqs=8)
question = llm.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}])
for piece in llm.stream(question, SamplingParams(temperature=0, max_tokens=24)):
    print(piece, end="", flush=True)

# %% [markdown]
# The answer stops in the middle of a sentence because `max_tokens` allowed 24 tokens.
# `temperature=0` means that the engine always takes the most likely next token
# ([greedy](../docs/glossary.md#greedy)), so the answer is the same each time (chapter 16). A
# **token** is a piece of text: a word, a part of a word, or a character (chapter 12).
#
# (`load_model` is the course's wrapper around `LLM.load`; it fetches the model first if it is
# missing.) Behind these four lines stand the parts that this course builds. The engine can say what
# it is made of:

# %%
for part in ("model", "weights", "attention", "kv cache", "allocator", "prefix cache", "scheduler"):
    print(f"{part:<13} {llm.describe()[part].split(', from')[0]}")

# %% [markdown]
# | word | what it is | chapter |
# |---|---|---|
# | llama | The family that the model's layers belong to. The model itself is SmolLM2-135M-Instruct | 15 |
# | GGUF, Q4_1 | The format of the file. Most of its weights have 4 bits, and each 32 of them share two more numbers, so a weight takes 5 bits; here they are converted to 32 bits (float32), so that nothing is rounded any further | 11, 34 |
# | [attention backend](../docs/glossary.md#attention-backend): `attend_paged` | The function in which tokens look at earlier tokens. There are several, equal in result and different in speed; each is a **backend** | 14, 22 |
# | [KV cache](../docs/glossary.md#kv-cache) | What the engine keeps of every token that it has computed, so that it need not compute it again | 17 |
# | [block](../docs/glossary.md#block) | The KV cache is divided into blocks of 16 tokens. A request gets one block after another as its text grows. By default they share 1 GiB of memory | 21 |
# | [allocator](../docs/glossary.md#block-allocator): `BlockAllocator` | Hands out free blocks and takes them back | 21 |
# | [prefix cache](../docs/glossary.md#prefix-caching): `RadixPrefixCache` | Keeps the blocks of earlier requests. A new request that begins with the same text reuses them. "Radix" means that texts are stored so that equal beginnings are stored once | 23 |
# | [scheduler](../docs/glossary.md#scheduler): `ContinuousScheduler` | Decides which requests are computed now, and which wait | 24 |
#
# ## A number that hurts: one at a time
#
# Eight people ask at the same time. Each [request](../docs/glossary.md#request) continues a
# sentence about another topic by 2 to 9 tokens. The simplest server has one **slot**, a place for a
# request that runs: it answers one request, and all others wait in a queue. (The number of slots is
# called `max_num_seqs` here and in vLLM; chapter 21 calls the place of one token in the cache a
# slot, too.) Here is the whole queue, measured. (`ignore_eos=True` makes each answer exactly
# `max_tokens` long, although the model may want to end it before.)

# %%
topics = ["rain", "tea", "the moon", "bread", "owls", "trains", "salt", "dreams"]
prompts = [f"Here is a short story about {topic}." for topic in topics]
sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(2, 10)]

one_slot = load_model(weights="float32", max_num_seqs=1)
started = time.perf_counter()
with one_slot.record() as recorded_alone:
    apart = [answer.text for answer in one_slot.generate(prompts, sampling, progress=False)]
seconds_apart = time.perf_counter() - started
steps_apart = figures.num_steps(recorded_alone.events)
measured("eight requests, one by one", seconds_apart, "s")
print(
    f"the engine made {steps_apart} steps, and each step read all 135 million weights from memory"
)
picture(
    figures.timeline(recorded_alone.events, topics),
    "Eight requests on one slot. Each row is a request, each column a step of the engine; grey "
    "means waiting. The last one waits for the seven others.",
    number="00.1",
)

# %% [markdown]
# An engine works in [steps](../docs/glossary.md#step). In each step it runs the model once, and
# every request that takes part gets one new token. To run the model, the processor must read all of
# its weights from memory, whether the step works for one request or for eight. (This holds for
# **dense** models, as all of this course are. A **mixture of experts** stores all of its weights
# too, but reads only some of them for each token.)
#
# Now let all eight share each step. The longest answer has 9 tokens, and all eight together have
# 44. Predict: how many times are the weights read now?

# %%
guess_steps = predict("Readings of the weights, side by side?", None)

# %%
started = time.perf_counter()
with llm.record() as recorded_together:
    together = [answer.text for answer in llm.generate(prompts, sampling, progress=False)]
seconds_together = time.perf_counter() - started
steps_together = figures.num_steps(recorded_together.events)
guess_steps.compare(steps_together)
measured("eight requests, side by side", seconds_together, "s")
measured("times as fast", seconds_apart / seconds_together)
assert together == apart, "sharing a machine changes no answer"
print("the eight answers are the same")

# %% [markdown]
# Reading the weights once for eight requests instead of once for each is the most important idea of
# this course. It is called **batching**. The answers do not change: each request still gets the
# tokens that it would get alone. (Only two tokens with nearly equal scores can change places,
# because a larger batch may add its numbers in another order; chapter 15.) But a step for eight
# takes longer than a step for one, so the gain in time is smaller than the gain in readings
# (chapters 17 and 24).
#
# ## What inference is
#
# A language model does one thing: given some tokens, it gives every token of its **vocabulary**
# (the list of all tokens that it knows) a score that says how well it would continue them. There
# are two ways to use this.
#
# - **Training** finds the weights. The model sees texts that exist already, its scores are compared
#   with the token that really comes next, and the weights are changed a little so that this token's
#   score grows. This is repeated for trillions of tokens.
# - **Inference** uses the weights and never changes them. The model continues a new text.
#
# They differ in more than the direction. In training, the whole text is known, so all of its
# positions are computed at once, and each position gets the *true* earlier tokens as input, not
# what the model itself would have said. This is **teacher forcing**. (Chapter 13 measures in this
# way how well a model predicts a given text.) In inference, the next token is unknown until the
# model has chosen it, and it is the input of the step after. The model reads its own output, one
# token at a time: it is **autoregressive**. That is why writing is slow although reading is fast,
# and it is the reason for most parts of an engine. It also means that a model's own early mistake
# becomes its input, which never happens under teacher forcing.
#
# ## One token's journey
#
# Follow the text *The capital of France is* through the engine, until the next token comes out.

# %%
text = "The capital of France is"
ids = llm.tokenizer.encode(text)
next_id = llm.generate(text, SamplingParams(temperature=0, max_tokens=1)).token_ids[0]
picture(
    diagrams.journey(llm.config, text, ids, next_id, llm.tokenizer.decode([next_id])),
    "The journey of one token. Above each part stands the shape of what leaves it, below it the "
    "chapter that builds it. The blue arrow leads back, once for every further token: the loop below "
    "then sends the whole text again, the finished engine only the new token.",
    number="00.2",
)

# %% [markdown]
# 1. The **tokenizer** cuts the text into 5 tokens and replaces each by its number in the vocabulary,
#    its **token id** (chapter 12).
# 2. The **embedding table** has a row of 576 numbers for each of the 49,152 tokens of the vocabulary.
#    Each token id is replaced by its row, so $x$ has the shape [5, 576].
# 3. **30 layers** follow. Each has two parts. **Attention** (chapter 14) lets every token fetch
#    information from the tokens before it. The **feed-forward network** (chapter 13) works on each
#    token alone. Both add their result to $x$, the **residual stream**, so its shape stays [5, 576].
# 4. After a last rescaling (a **norm**, chapter 13), the **output head** compares the last token's 576
#    numbers with every token of the vocabulary. The result is 49,152 scores, the
#    [logits](../docs/glossary.md#logits) (chapter 15). In this model the head *is* the embedding table
#    (the two are **tied**), so every step reads all of it. Llama-3-8B, a larger model that returns
#    below, has two tables, and a step reads only a few rows of the first.
# 5. The [sampler](../docs/glossary.md#sampler) chooses one token id by its scores (chapter 16).
# 6. The [detokenizer](../docs/glossary.md#detokenization) turns the id into text again, here
#    *␣Paris* (the sign ␣ stands for a space).
# 7. The new token is appended, and the way begins again with a text that is one token longer.
#
# On a machine with a GPU, steps 2 to 5 run on the GPU. Steps 1, 6 and 7 run on the ordinary processor beside
# it, the **host CPU**, and only token ids pass between the two.
#
# The same in code, with the model that the engine runs. This loop is the smallest engine that
# works:

# %%
model = transformer_of(llm)  # the layers alone, without the engine around them
written = list(ids)
with torch.inference_mode():  # no training: nothing is recorded for it
    for step in range(3):
        x = model.embed(torch.tensor(written))
        # attention over one whole text (chapter 14); no layer limits how far back it looks
        look_back = attend_packed([len(written)], llm.config.sliding_windows)
        positions = torch.arange(len(written))  # each token's place in the text: 0, 1, 2, ...
        hidden = model(torch.tensor(written), positions, look_back)
        logits = model.logits(hidden[-1:])  # of the last token
        written.append(int(logits.argmax()))
        print(
            f"step {step}: embedded {list(x.shape)}, after the layers {list(hidden.shape)}, "
            f"logits {list(logits[0].shape)} -> {llm.tokenizer.decode(written[-1:])!r}"
        )
engine_wrote = llm.generate(text, SamplingParams(temperature=0, max_tokens=3)).token_ids
assert written[len(ids) :] == list(engine_wrote)
print("The engine writes the same three tokens.")

# %% [markdown]
# The loop is right, and it is wasteful: every step computes all tokens of the text again, although
# only one is new. The engine computes each token once and keeps what later tokens need of it, its
# **keys and values**, in the KV cache. (Chapter 14 explains what keys and values are. Until then,
# think of a few notes, each a pair of a key and a value, that every layer keeps about each token,
# and that all later tokens read.)
#
# ## Prefill and decode
#
# With the KV cache, the life of a request has two phases:
#
# - [Prefill](../docs/glossary.md#prefill): the whole prompt is computed in one step, all of its
#   tokens at once (a very long one in a few steps; chapter 24). It fills the cache and gives the
#   first new token.
# - [Decode](../docs/glossary.md#decode): each further step computes a single token, the one that
#   came last, and gives the next one.
#
# The first phase decides (with the wait for a place in the batch before it) how long a user waits before
# anything appears, the [time to first token (TTFT)](../docs/glossary.md#time-to-first-token-ttft). The
# second decides how fast the text flows, the [inter-token latency
# (ITL)](../docs/glossary.md#inter-token-latency-itl).
#
# The cell after your prediction sends a prompt of 70 tokens and asks for 12. Predict: how many times
# as long as a decode step does the prefill take?

# %%
guess_prefill = predict(
    "A prefill of 70 tokens takes as long as how many decode steps?", None, within=2
)

# %%
evening = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed its stairs, "
    "lit the lamp, and watched the ships come home."
)
story = f"{evening} {evening} One night the lamp went out, and the keeper"
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
salt = str(time.time_ns())  # a new one each time: a second run reuses nothing (chapter 23)
with llm.record() as recorded_one:
    answer = llm.generate(story, params, cache_salt=salt)
seconds = figures.step_seconds(recorded_one.events)
decode_seconds = median(seconds[1:])
print(f"{answer.num_prompt_tokens} tokens of the prompt, {answer.num_output_tokens} new tokens")
guess_prefill.compare(seconds[0] / decode_seconds, measured=True)
measured("prefill, time per token", seconds[0] / answer.num_prompt_tokens * 1e3, "ms")
measured("decode, time per token", decode_seconds * 1e3, "ms")
weights_gb = cost_model.num_parameters(llm.config) * 4 / 1e9  # 4 bytes each, in float32
measured("decode, weights read", weights_gb / decode_seconds, "GB per second")
picture(
    figures.one_request(
        recorded_one.events, [llm.tokenizer.decode([each]) for each in answer.token_ids]
    ),
    "The steps of one request, each as wide as it took. At the end of each step stands the token that "
    "it gave.",
    number="00.3",
)

# %% [markdown]
# A token of the prompt costs far less than a token of the answer. The reason is the same as for the
# eight requests: every step has costs that do not depend on its number of tokens. It reads all
# weights, and it starts hundreds of operations. The prefill pays these costs once for 70 tokens, a
# decode step pays them for a single token. With a large model, the weights are the larger cost by
# far: a prefill then keeps the processor's arithmetic busy, and a decode step mostly waits for
# memory. Chapter 17 separates the two costs, measures the machine's limits, and predicts both
# times.
#
# ## Watch them share the machine
#
# The engine records its events. From this record, here are the eight requests from above once more,
# side by side:

# %%
picture(
    figures.timeline(recorded_together.events, topics),
    "The same eight requests on eight slots. All prompts are computed in the first step (amber); "
    "then each request gets one token in every step (blue) until its answer is complete.",
    number="00.4",
)

# %% [markdown]
# What if there are more requests than slots? Then some wait, and each takes a slot as soon as one
# is free. The engine does not wait until a whole group has finished: requests join and leave at
# every step. This is [continuous batching](../docs/glossary.md#continuous-batching) (chapter 24).
#
# Predict: the same eight requests, 44 tokens together, four slots. How many steps?

# %%
guess_four = predict("Steps with four slots?", None, within=1.2)

# %%
four_slots = load_model(weights="float32", max_num_seqs=4)
with four_slots.record() as recorded_four:
    four_slots.generate(prompts, sampling, progress=False)
guess_four.compare(figures.num_steps(recorded_four.events))
recordings = {1: recorded_alone, 4: recorded_four, 8: recorded_together}

# %% [markdown]
# Four slots would need at least 44 / 4 = 11 steps. They need a few more, because at the end fewer
# than four requests are left, and some slots are empty.
#
# Now choose the number of slots and the axis. The control chooses among three runs that were
# recorded above. On an axis of steps, all steps look alike. On an axis of seconds, each step is as
# wide as it took. As a rule, the first step, with four prompts, is longer than the decode steps
# after it; a step that adds one short prompt hardly differs from them. (Another program on your
# machine can stretch any step.)

# %%
explore(
    lambda slots, axis: figures.timeline(
        recordings[slots].events, topics, in_seconds=axis == "seconds"
    ),
    "Eight requests on four slots, over seconds. The last four wait until a slot is free, and take it "
    "at once.",
    "00.5",
    slots=[4, 1, 8],
    axis=["seconds", "steps"],
)

# %% [markdown]
# ## Serve it
#
# Until now the engine ran inside this notebook. A **server** offers it to other programs, over the
# network. Most programs that use language models can speak the API of OpenAI's service, so an
# engine that understands it can serve them: `minigen serve` on a command line, or `serving` in
# a notebook. Eight threads ask at once, with OpenAI's own client. No program planned their batch.
# What will the timeline look like?

# %%
from concurrent.futures import ThreadPoolExecutor


def ask(prompt, params):
    options = {"max_tokens": params.max_tokens, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model="m", prompt=prompt, temperature=0, **options)
    return answer.choices[0].text


with serving(llm, "m") as server, llm.record() as served, ThreadPoolExecutor(8) as pool:
    started = time.perf_counter()
    over_http = list(pool.map(ask, prompts, sampling))
    seconds_served = time.perf_counter() - started
assert over_http == together
print("over HTTP, the same eight answers")
lanes = figures.lanes(served.events).values()  # one per request, in the order of arrival
arrivals = [topics[len(lane.computed) - 2] for lane in lanes]  # the first topic has 2 tokens
picture(
    figures.timeline(served.events, arrivals),
    "Eight requests over HTTP. They come one after another, within milliseconds, and run together.",
    number="00.6",
)

# %% [markdown]
# Each request joined the batch at the first step after it arrived. The clients know nothing of each
# other, and still share most readings of the weights. Part 2 builds what makes this possible, and
# chapter 51 builds the server.
#
# ## The five problems of an engine
#
# The engine's parts are answers to five problems. Each chapter's card says which of them the
# chapter solves.

# %%
picture(
    diagrams.five_problems(),
    "The five problems of an inference engine, what happens without an answer, and the chapters that "
    "solve each problem.",
    number="00.7",
)

# %% [markdown]
# The chapters are not in the order of the problems, because an engine must run before it can run
# well. Part 1 (chapters 11 to 17) builds what one request needs, part 2 (21 to 25) lets many
# requests share it, part 3 (31 to 36) makes it fast, part 4 (41 and 42) uses several devices, and part 5
# (51 to 53) offers it to the world. Serving is everything between a user's text and the model's
# numbers, so it includes the tokenizer (12) and the choice of tokens (16).
#
# ### The stack
#
# A second order is by layers, from the chip to the user. When something is slow or fails, the first
# question is which layer owns the problem. A fix belongs to that layer; elsewhere it only hides the
# symptom. The test: in the right layer, a fix changes nothing in its neighbours and moves no problem
# upwards. Each card names its layer.
#
# <!-- stack -->
# | layer | what it is | what goes wrong there | chapters |
# |---|---|---|---|
# | L6 client | the program that asks | it repeats requests that time out, and doubles the load | |
# | L5 gateway | HTTP, authentication (who may ask), limits, queues | requests are refused, or queue for too long | 51 |
# | L4 routing and batching | which requests run together (the scheduler), and on which of several copies of the engine | a step is nearly empty, or one copy is full and another one idle | 24, 52 |
# | L3 engine | tokenizer, model, KV cache, sampler | few requests run at once, prompts are computed twice | 12, 13, 14, 15, 16, 17, 21, 22, 23, 25, 35, 36, 41, 42, 53 |
# | L2 runtime | files, formats, packaging | the wrong number format, a slow start | 11 |
# | L1 kernels | the functions that compute, and the driver below them | memory is read twice, cores are idle | 31, 32, 33, 34 |
# | L0 silicon | processors, memory, the links between them | capacity, bandwidth and arithmetic are all limited | |
# <!-- /stack -->
#
# ### What one downloads
#
# A model is not a program. It is a directory of data, and it does nothing without an engine. On the
# [Hugging Face hub](https://huggingface.co/docs/hub/models), where most open models are published,
# a directory looks like this:
#
# | file | what it holds | read by | chapter |
# |---|---|---|---|
# | `config.json` | the sizes: layers, heads (explained below), vocabulary | every part, and this chapter's formula | 11, 15 |
# | `model-00001-of-00004.safetensors`, ... | the weights, in **shards** (files of a few GB each) | the loader | 11 |
# | `model.safetensors.index.json` | which shard holds which tensor | the loader | 11 |
# | `tokenizer.json` | the vocabulary, and how text is cut | the tokenizer | 12 |
# | `tokenizer_config.json`, `chat_template.jinja` | special tokens (marks such as the end of a turn), and how a chat becomes one prompt | the tokenizer | 12 |
# | `generation_config.json` | the publisher's advice for sampling, and which tokens end an answer | the sampler | 16 |
#
# A **GGUF** file packs nearly all of this into a single file; the advice for sampling may be
# missing, as here. The model of this course is one:

# %%
path = hub.resolve(hub.DEFAULT_MODEL)
checkpoint = open_checkpoint(path)
print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
print(f"{len(checkpoint.tensors)} tensors with {checkpoint.num_parameters:,} weights")
bits_each = checkpoint.num_bytes * 8 / checkpoint.num_parameters
print(f"{bits_each:.2f} bits per weight: 5 in the layers, 8.5 in the embedding table")
print("\nThe sizes of a larger model, Llama-3-8B, rewritten from its config.json:")
print(json.dumps(cost_model.MODELS["Llama-3-8B"], indent=1))

# %% [markdown]
# ## How many requests fit? The memory budget
#
# Slots are cheap. Memory is not. For a Llama-like model, a machine must hold three things:
#
# 1. the **weights**, once, however many requests run;
# 2. the **KV cache**: keys and values of each token of each running request, in every layer;
# 3. the **working memory**: what a step needs while it computes.
#
# Together they must fit:
#
# $$\underbrace{N \cdot \frac{b}{8}}_{\text{weights}} \;+\; \underbrace{S \cdot T \cdot
# 2 \, L \, H_{kv} \, d \cdot \frac{b_{kv}}{8}}_{\text{KV cache}} \;+\;
# \underbrace{W}_{\text{working memory}} \;\le\; M$$
#
# | symbol | meaning | in the code | Llama-3-8B |
# |---|---|---|---|
# | $N$ | number of weights | `num_parameters(config)` | 8.03 billion |
# | $b$ | bits per weight | `bits` | 16 |
# | $S$ | sequences (requests) that run at once | `sequences` | |
# | $T$ | tokens of each sequence, prompt and answer | `context` | |
# | $L$ | layers | `config.num_layers` | 32 |
# | $H_{kv}$ | heads of keys and values (KV heads): how many pairs of key and value each layer keeps of a token (chapter 14). A **query** is what a token searches the keys with; several **query heads** share each pair (`q_heads`, 32 here) | `config.kv_heads` | 8 |
# | $d$ | numbers in a key, and in a value | `config.head_dim` | 128 |
# | $b_{kv}$ | bits per number of the KV cache | `kv_bits` | 16 |
# | $W$ | working memory, in bytes | `working` | 1 GB, assumed |
# | $M$ | the machine's memory, in bytes | `memory` | |
#
# In papers, $T$ is often called $n$ and $d$ is $d_{head}$; a letter may mean something else in another
# chapter ([Notation](../docs/glossary.md#notation)). What a single token takes has a name of
# its own. The 2 stands for a key *and* a value. (Some models keep less: those in which a token sees
# only the last few thousand tokens, [sliding windows](../docs/glossary.md#sliding-window), and those
# that store keys and values compressed, **latent attention**; chapter 14.)
#
# $$\text{KV bytes per token} = 2 \, L \, H_{kv} \, d \cdot \frac{b_{kv}}{8}$$
#
# By hand, for Llama-3-8B in **bfloat16**, the 16-bit format in which most models are published
# (chapter 11). The number of weights is a sum over the model's parts, and each term is the size of
# a matrix that a later chapter explains. A head has 4,096 / 32 = 128 numbers:

# %%
# from the excerpt above; hidden is hidden_size, ffn is intermediate_size
layers, hidden, q_heads, kv_heads, ffn, vocabulary = 32, 4096, 32, 8, 14_336, 128_256
head_dim = hidden // q_heads
embedding = vocabulary * hidden  # a row per token of the vocabulary
attention = hidden * (q_heads + 2 * kv_heads) * head_dim  # matrices for queries, keys and values
attention += q_heads * head_dim * hidden  # and one for the result
feed_forward = 3 * hidden * ffn  # three matrices
output_head = hidden * vocabulary  # a table of its own: tie_word_embeddings is false
norms = (2 * layers + 1) * hidden  # two in each layer, one before the head
num_weights = embedding + layers * (attention + feed_forward) + output_head + norms
assert num_weights == cost_model.num_parameters(cost_model.config_of("Llama-3-8B"))
print(f"{num_weights:,} weights; in bfloat16, 16 bits each: {num_weights * 16 / 8 / 1e9:.1f} GB")

# %% [markdown]
# Every further token of every chat takes the same number of bytes. Layers, KV heads and the numbers
# in a key decide how many, and the number of weights does not:

# %%
kv_bits = 16
kv_of_a_token = 2 * layers * kv_heads * head_dim * kv_bits // 8
print(
    f"KV cache of one token: {kv_of_a_token:,} bytes; of 8,000: {kv_of_a_token * 8e3 / 1e9:.2f} GB"
)
for name in cost_model.MODELS:
    config = cost_model.config_of(name)
    weights = cost_model.num_parameters(config)
    token = cost_model.kv_bytes_per_token(config)
    print(f"{name:<13} {weights / 1e9:6.2f} billion weights, {token / 1e3:6.1f} kB of KV per token")
assert cost_model.kv_bytes_per_token(cost_model.config_of("Llama-3-8B")) == kv_of_a_token

# %% [markdown]
# The number of weights and the KV bytes per token follow from `config.json` alone. **The working
# memory does not.** It consists of
#
# - the **activations**: the tensors of the step that runs now, which grow with its number of
#   tokens;
# - the **logits** of all sequences of the step;
# - scratch memory of **kernels** (the functions that compute), the driver's own memory and, on a
#   GPU, recorded steps (CUDA graphs);
# - gaps between allocations, which are free and too small to use (fragmentation).
#
# The first two can be estimated. The others depend on engine, driver and GPU; this chapter
# *assumes* 1 GB for everything. Here is an estimate for Llama-3-8B and a step of 8,192 tokens, with
# numbers of 2 bytes, and logits of 4 bytes for 256 sequences. Not all of these tensors exist at
# once, and some that live only for a moment are left out (such as the product of the two in the
# feed-forward network), so this shows the order of magnitude, and is no bound:

# %%
llama = cost_model.config_of("Llama-3-8B")
tokens, sequences = 8192, 256
parts = {
    "residual stream x, and x normalised": 2 * tokens * llama.hidden * 2,
    "queries, keys and values": tokens * (llama.q_heads + 2 * llama.kv_heads) * llama.head_dim * 2,
    "feed-forward, two tensors": 2 * tokens * llama.ffn * 2,
    "logits": sequences * llama.vocab_size * 4,
}
for name, size in parts.items():
    print(f"{name:<36} {size / 1e6:6,.0f} MB")
stream, *others = parts.values()
print(f"{'together, if all existed at once':<36} {sum(parts.values()) / 1e6:6,.0f} MB")
print(f"{'x and the largest of the others':<36} {(stream + max(others)) / 1e6:6,.0f} MB")

# %% [markdown]
# ### GB is not GiB
#
# A **GB** is $10^9$ bytes, a **GiB** is $2^{30}$ bytes, 7 % more. The sizes of files on a hub, and
# of disks, are given in GB. Tools such as `nvidia-smi` count in MiB ($2^{20}$ bytes), and an RTX
# 4090 of "24 GB" shows 24,564 of them, which is nearly 24 GiB. An estimate that mixes the two is
# wrong by several requests.

# %%
GIB = 2**30
for said, size in {
    "24 GB": 24e9,
    "24 GiB": 24 * GIB,
    "24,564 MiB": 24_564 * 2**20,
    "8.03 billion weights with 16 bits": 8.03e9 * 2,
    "13 billion weights with 4 bits": 13e9 / 2,
}.items():
    print(f"{said:<34} {size / 1e9:6.2f} GB = {size / GIB:6.2f} GiB")
chats = 24 * (GIB - 1e9) / (kv_of_a_token * 4096)
print(f"24 GiB hold {chats:.1f} chats of 4,096 tokens with Llama-3-8B more than 24 GB")

# %% [markdown]
# ### Drag it: any Llama-like model, any machine
#
# Choose a model, the bits per weight, the memory of your machine, the requests that should run
# together, and how much working memory you assume. You can also paste the text of most `config.json`
# files whose `model_type` is llama, qwen2, qwen3 or mistral (no other yet, and none that is
# **quantized**, stored in fewer bits, already; a sliding window is not counted). The right panel shows
# what is asked for, as a dot, in the area of what fits.
#
# What happens to 24 GB if the 8 requests have 8,192 tokens instead of 4,096? (16.1 + 8.6 + 1 = 25.7
# GB do not fit.) And what if the weights have 4.5 bits instead of 16? (4.5 bits are 4 bits for each
# weight, and for each 32 weights one **scale** of 16 bits, a factor that they share; chapter 11.)


# %%
def budget_of(model, config_json, weights, memory_in_GB, sequences, tokens_of_each, working_in_GB):
    config = cost_model.config_of(config_json or model)
    sizes = (memory_in_GB, sequences, tokens_of_each, working_in_GB)
    return figures.memory_budget(config, cost_model.BITS[weights], *sizes)


explore(
    budget_of,
    "The memory budget of Llama-3-8B in bfloat16 on a GPU of 24 GB: eight requests of 4,096 tokens "
    "fit, and 2.6 GB are left. The lower axis is in GB, the upper one in GiB.",
    "00.8",
    model=["Llama-3-8B", *(each for each in cost_model.MODELS if each != "Llama-3-8B")],
    config_json="",
    weights=["bfloat16", *(each for each in cost_model.BITS if each != "bfloat16")],
    memory_in_GB=(4, 320, 4, 24),
    sequences=(1, 256, 1, 8),
    tokens_of_each=(256, 32768, 256, 4096),
    working_in_GB=(0.0, 8.0, 0.5, 1.0),
)

# %% [markdown]
# ### Where the memory may lie
#
# What does not fit on the GPU can lie elsewhere: in the computer's main memory, or on the disk.
# These are **tiers** of memory. The farther a tier lies from the processor, the larger and the
# slower it usually is. Every decode step reads all weights once (of the embedding table only a few
# rows, unless it is also the output head, as in SmolLM2). So the speed of the tier in which they
# lie, its [memory bandwidth](../docs/glossary.md#memory-bandwidth), bounds the speed of a chat. The
# next cell divides the weights that a step of Llama-3-8B reads, in bfloat16, by the bandwidth of
# each tier, as data sheets and standards give it. (DDR5 is a kind of main memory; PCIe connects the
# processor with GPUs and SSDs by lanes, in version 4.0 of 16 billion bits per second each, of which
# 128 in 130 are data.) With one token per step, no chat can be faster than this.

# %%
weight_bytes = cost_model.SHAPES["Llama-3-8B"].multiplied * 2  # all but the embedding table
tiers = {  # bytes per second
    "memory of an H100": cost_model.MACHINES["H100 SXM"].bandwidth,
    "memory of an RTX 4090": cost_model.MACHINES["RTX 4090"].bandwidth,
    "main memory, 2 channels of DDR5-5600": 2 * 8 * 5.6e9,  # 8 bytes each
    "main memory, read by a GPU over PCIe 4.0 x16": 16 * 16e9 / 8 * 128 / 130,  # 16 lanes
    "an SSD on PCIe 4.0 x4, at most": 4 * 16e9 / 8 * 128 / 130,
}
for name, bandwidth in tiers.items():
    print(
        f"{name:<46} {bandwidth / 1e9:8,.1f} GB/s: {weight_bytes / bandwidth * 1e3:8,.1f} ms per token"
    )

# %% [markdown]
# ## Your turn
#
# First on paper. A GPU has 24 GB (or put in the memory of your own machine; a "24 GB" card with 24
# GiB holds a few chats more). Llama-3-8B is stored with 4.5 bits per weight, the KV cache with 16
# bits per number, and 1 GB is working memory. Predict from the formula: how many chats of 4,096
# tokens fit?

# %%
MY_GB = 24
guess_chats = predict(f"Chats of 4,096 tokens in {MY_GB} GB?", None, within=1.1)

# %% [markdown]
# Then write it as a function. The formula above asks whether $S$ sequences fit; solve it for the
# largest whole $S$. `check` returns your function if it passes, and the course's own if it does
# not, so the cells below run either way.

# %%
task(0, "most_sequences")

# %%
# exercise: minigen_course.lab.cost_model.most_sequences
from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes, at least 0.

    Each weight has `bits` bits, and the KV cache 16 bits per number. `working` bytes are kept for
    what a step works in.
    """
    raise NotImplementedError  # your turn


# %%
my_most = check(0, most_sequences=most_sequences)

# %% [markdown]
# Inside `with using(0, most_sequences=my_most):`, the package calls your function: here the module
# `figures` does. The next figure draws its curve with it, and its title says whether the function is
# yours. Drag the requests to the largest number at which the dot is blue and the left panel says
# "fits" (with one more, the dot is orange): does your number agree?

# %%
with using(0, most_sequences=my_most):
    guess_chats.compare(figures.most_sequences(llama, 4.5, MY_GB * 1e9, 4096))
explore(
    lambda sequences, tokens_of_each: figures.memory_budget(
        llama, 4.5, MY_GB, sequences, tokens_of_each, most=my_most
    ),
    "The budget of the question above: Llama-3-8B with 4.5 bits per weight. Eight chats take a small "
    "part of what fits.",
    "00.9",
    sequences=(1, 64, 1, 8),
    tokens_of_each=(256, 32768, 256, 4096),
)

# %% [markdown]
# Requests rarely have equal lengths. The second exercise admits them in the order of arrival, as a
# fair scheduler does: the first request that does not fit stops all behind it.

# %%
task(0, "first_that_fit")

# %%
# exercise: minigen_course.lab.cost_model.first_that_fit
from collections.abc import Sequence

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def first_that_fit(
    config: ModelConfig, bits: float, memory: float, lengths: Sequence[int], working: float = GB
) -> int:
    """Return how many of the first requests fit into `memory` bytes together, at least 0.

    `lengths` has the tokens of each request, in the order of arrival. The first request that does
    not fit ends the count, even if a shorter one behind it would fit. Otherwise as in
    `most_sequences`.
    """
    raise NotImplementedError  # your turn


# %%
my_first = check(0, first_that_fit=first_that_fit)
waiting = [16_000, 8_000, 30_000, 12_000, 24_000, 20_000, 40_000, 6_000]
with using(0, first_that_fit=my_first):
    drawn = figures.queue(llama, 4.5, 24, waiting)
picture(
    drawn,
    "Eight requests for Llama-3-8B with 4.5 bits per weight, on a GPU of 24 GB, in their order of "
    "arrival. Those that run are filled; the others wait.",
    number="00.10",
)

# %% [markdown]
# ## The package's version
#
# Both functions open here once yours have passed. Whatever you wrote must agree with the course's:
# the number that fits does fit, and one more does not.

# %%
reveal(0, most_sequences=my_most, first_that_fit=my_first)
for name in cost_model.MODELS:
    config = cost_model.config_of(name)
    for memory in (24e9, 80e9, 640e9):
        count = my_most(config, 16, memory, 4096)
        assert count == cost_model.most_sequences(config, 16, memory, 4096)
        assert my_first(config, 16, memory, [4096] * (count + 1)) == count
is_yours = my_most is not cost_model.most_sequences and my_first is not cost_model.first_that_fit
who = "your functions agree" if is_yours else "the course's functions agree"
print(f"For {len(cost_model.MODELS)} models on 3 machines, {who} with the course's.")

# %% [markdown]
# ## The measurement again
#
# The number from the top: eight requests, and how many times the weights were read for them. One by
# one, side by side in the notebook, and over HTTP, where no program planned the batch. (The time
# over HTTP includes eight clients, which share the processor with the engine.)

# %%
rows = {
    "one by one": (steps_apart, seconds_apart),
    "side by side": (steps_together, seconds_together),
    "over HTTP": (mark(figures.num_steps(served.events), digits=2), seconds_served),
}
for name, (steps, seconds) in rows.items():
    speed = mark(sum(each.max_tokens for each in sampling) / seconds, "tokens/s")
    print(f"{name:<13} {steps} readings of the weights, {mark(seconds, 's')}, {speed}")
print(f"one by one needs {steps_apart / steps_together:.1f} times as many readings as side by side")
measured("and times as fast", seconds_apart / seconds_together)

# %% [markdown]
# ## Claims
#
# Statements that guides to inference make about memory and sharing, beside what this notebook
# found.

# %% jupyter={"source_hidden": true}
large = cost_model.config_of("Llama-3-70B")
params_8b, params_70b = (cost_model.num_parameters(each) for each in (llama, large))
q4_gb = params_70b * cost_model.BITS["Q4_0: 4 bits and a scale for 32"] / 8 / 1e9
kv_heads_only = cost_model.kv_bytes_per_token(large)
kv_all_heads = 2 * large.num_layers * large.q_heads * large.head_dim * 2
kv_opt_13b = 2 * 40 * 5120 * 2  # 40 layers; all heads of a key together have 5,120 numbers
verdicts(
    "00",
    Claim(
        "In 16 bits, a model takes 2 GB for each billion weights: 16 GB for 8B, 140 GB for 70B",
        f"{params_8b * 2 / 1e9:.1f} GB and {params_70b * 2 / 1e9:.1f} GB "
        f"({params_8b * 2 / GIB:.1f} and {params_70b * 2 / GIB:.1f} GiB)",
        holds(15.5 <= params_8b * 2 / 1e9 <= 16.5 and 138 <= params_70b * 2 / 1e9 <= 142),
        "two bytes per weight; the model's name rounds the number of weights",
    ),
    Claim(
        "At 4 bits, a model with 70 billion weights takes 35 GB",
        f"{params_70b / 2 / 1e9:.1f} GB of bare numbers, {q4_gb:.1f} GB in Q4_0",
        within(q4_gb, 34, 36),
        "a scale of 16 bits for each 32 weights makes it 4.5 bits per weight; "
        "other formats take from about 4.1 to 5",
    ),
    Claim(
        "A token takes 2 x layers x heads x head dimension x bytes per number in the KV cache",
        f"for Llama-3-70B this gives {kv_all_heads / 1e6:.2f} MB; it keeps {kv_heads_only / 1e6:.2f} MB",
        within(kv_heads_only / kv_all_heads, 0.95, 1.05),
        "its 64 query heads share 8 heads of keys and values, and only those are kept (chapter 14)",
        source="[NVIDIA 2023](https://developer.nvidia.com/blog/mastering-llm-techniques-inference-optimization/)",
    ),
    Claim(
        "A token of OPT-13B takes 800 KB in the KV cache",
        f"{kv_opt_13b / 1e3:.0f} kB, which is {kv_opt_13b / 2**10:.0f} KiB",
        within(kv_opt_13b / 1e3, 780, 820),
        "in this older model every head has its own keys and values",
        source="[Kwon et al. 2023](https://arxiv.org/abs/2309.06180)",
    ),
    Claim(
        "Requests that share each step are served faster than one after the other",
        f"{steps_together} readings of the weights instead of {steps_apart}, the same answers, "
        f"{mark(seconds_apart / seconds_together)} times as fast",
        holds(seconds_together < seconds_apart),
        "a step reads the weights once, for however many requests; but a fuller step takes longer",
        measured=True,
    ),
)

# %% [markdown]
# ## All chapters
#
# Times are estimates for a reader who knows Python and PyTorch: to read and try, and for the
# exercises. The first digit of a number is the part; gaps leave room for chapters to come. You can
# take a chapter alone, because its notebook imports the finished parts of all earlier ones. (In the
# last title, **goodput** is the number of requests per second that keep their time limits.)
#
# <!-- chapters -->
#
# | part | chapter | about | problem | to read | exercises |
# |---|---|---|---|--:|--:|
# | 0 the map | [00 map](00_map.ipynb) | The finished engine, and the memory that a model needs | all five | 60 min | [30 min](../exercises/00_map.ipynb) |
# | 1 one request | [11 weights](11_weights.ipynb) | Weights on disk: safetensors and GGUF, byte by byte | loading | 70 min | [75 min](../exercises/11_weights.ipynb) |
# |  | [12 tokenizer](12_tokenizer.ipynb) | Text to tokens and back | serving | 60 min | [150 min](../exercises/12_tokenizer.ipynb) |
# |  | [13 layers](13_layers.ipynb) | RMSNorm, rotary embedding, SwiGLU | compute | 60 min | [70 min](../exercises/13_layers.ipynb) |
# |  | [14 attention](14_attention.ipynb) | Attention: causal, with grouped heads | compute | 50 min | [40 min](../exercises/14_attention.ipynb) |
# |  | [15 transformer](15_transformer.ipynb) | The whole forward pass | compute | 60 min | [100 min](../exercises/15_transformer.ipynb) |
# |  | [16 sampling](16_sampling.ipynb) | Choosing the next token | serving | 60 min | [65 min](../exercises/16_sampling.ipynb) |
# |  | [17 dense cache](17_dense_cache.ipynb) | Prefill, decode, and the memory wall | memory | 60 min | [105 min](../exercises/17_dense_cache.ipynb) |
# | 2 many requests | [21 blocks](21_blocks.ipynb) | Memory in blocks | memory | 45 min | [50 min](../exercises/21_blocks.ipynb) |
# |  | [22 paged](22_paged.ipynb) | Paged attention | memory | 50 min | [75 min](../exercises/22_paged.ipynb) |
# |  | [23 prefix](23_prefix.ipynb) | Sharing prefixes | memory | 50 min | [110 min](../exercises/23_prefix.ipynb) |
# |  | [24 scheduler](24_scheduler.ipynb) | Continuous batching | concurrency | 60 min | [100 min](../exercises/24_scheduler.ipynb) |
# |  | [25 engine](25_engine.ipynb) | The engine, put together | concurrency | 45 min | [45 min](../exercises/25_engine.ipynb) |
# | 3 fast | [31 triton](31_triton.ipynb) | First kernels in Triton | compute | 75 min | [130 min](../exercises/31_triton.ipynb) |
# |  | [32 flash attention](32_flash_attention.ipynb) | FlashAttention | compute | 65 min | [110 min](../exercises/32_flash_attention.ipynb) |
# |  | [33 paged attention](33_paged_attention.ipynb) | Paged attention on a GPU | memory | 55 min | [110 min](../exercises/33_paged_attention.ipynb) |
# |  | [34 cpu kernels](34_cpu_kernels.ipynb) | The same race on a CPU | compute | 110 min | [75 min](../exercises/34_cpu_kernels.ipynb) |
# |  | [35 quantization](35_quantization.ipynb) | Quantization: fewer bits per weight | memory | 75 min | [170 min](../exercises/35_quantization.ipynb) |
# |  | [36 speculative](36_speculative.ipynb) | Speculative decoding: several tokens in a step | compute | 60 min | [110 min](../exercises/36_speculative.ipynb) |
# | 4 many devices | [41 tensor parallel](41_tensor_parallel.ipynb) | One model on several devices | memory | 95 min | [125 min](../exercises/41_tensor_parallel.ipynb) |
# |  | [42 pipeline](42_pipeline.ipynb) | Stages, rings and replicas: which cut when | memory | 70 min | [120 min](../exercises/42_pipeline.ipynb) |
# | 5 serving | [51 server](51_server.ipynb) | A server that OpenAI clients can use | serving | 55 min | [75 min](../exercises/51_server.ipynb) |
# |  | [52 slo](52_slo.ipynb) | Latency, goodput, and what to do about them | serving | 120 min | [100 min](../exercises/52_slo.ipynb) |
# |  | [53 structured output](53_structured_output.ipynb) | Answers of a given form | serving | 60 min | [115 min](../exercises/53_structured_output.ipynb) |
# | | all 24 | | | 26 h | 38 h |
#
# <!-- /chapters -->
#
# **If you have little time.** To understand serving, read 13, 14, 17, 21, 22 and 24. To
# program kernels, read 13, 14, 17, 31, 32, 33 and 34. To run a server, read 17, 23, 24, 51 and 52.
#
# **What this course leaves out.** Training and **distillation** (a small model learns to imitate a
# large one) make models; this course takes them as they are. (Training needs more memory, too:
# usually 16 bytes for each weight instead of 2; [Rajbhandari et al.
# 2020](https://arxiv.org/abs/1910.02054).) TPUs and other accelerators run the same steps with
# other kernels. **Prompt compression** shortens what is sent, and a **semantic cache** answers a
# question that resembles an earlier one without running the model at all. Both stand in front of an
# engine, and both can change the answer. Production engines are written in Python, C++, Rust, Go
# and CUDA; here everything is Python, with kernels in Triton and Numba, which compile Python
# functions.
#
# ## Summary
#
# - Inference uses a model's weights to continue a text; training finds the weights. Inference is
#   autoregressive: each new token is the input of the next step.
# - A token's journey: text, token ids, embedding, layers, logits, one token id, text. The shapes
#   are [5], [5, 576], [5, 576], [49152] and one number, for five tokens of this model.
# - The prefill computes the whole prompt in one step and gives the first token; each decode step
#   gives one more. Every step of a dense model reads its weights once (of an untied embedding table only
#   a few rows), so a token of the prompt is much cheaper than a token of the answer.
# - Requests that share a step share its reading of the weights, and get the same answers as
#   alone (but for near ties).
# - An engine solves five problems: loading, compute, memory, concurrency and serving.
# - Weights + KV cache + working memory must fit into the memory. For Llama-like models, the first
#   two follow from `config.json` and the bits of a number; the third is an assumption or a
#   measurement.
# - Bits per weight include the scales, a GB is not a GiB, and KV heads, not query heads, count for
#   the cache.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A prompt has 1,000 tokens and its answer 200. How many steps does the engine make
# for it alone, and how many tokens does it compute?</summary>
# 200 steps: the prefill gives the first token, and 199 decode steps give the others. It computes 1,000
# tokens in the first step and one in each other: 1,199. The last token of the answer is never computed,
# because no further token is asked for.</details>
#
# <details><summary>2. You double the number of requests that run at once. Which of weights, KV cache and
# working memory grows?</summary>
# The part of the KV cache that is in use doubles. The working memory grows a little, by the
# activations and logits of more tokens in a step. The weights stay the same.</details>
#
# <details><summary>3. A GPU of 80 GB holds Llama-3-70B with 4.5 bits per weight and 1 GB of working memory.
# About how many tokens of KV cache fit?</summary>
# The weights take 70.55 × 4.5 / 8 = 39.7 GB, so 39.3 GB are left. A token takes 327,680 bytes. That
# makes about 120,000 tokens: 29 chats of 4,096 tokens.</details>
#
# ## What the production engines do beyond this
#
# All of these engines solve the same five problems. They differ in what they were made for, and in
# how they divide the memory:
#
# | engine | made for | how it divides the memory | choose it when |
# |---|---|---|---|
# | [vLLM](https://github.com/vllm-project/vllm) | many users on GPUs | takes a share of the GPU (`gpu_memory_utilization`), measures the working memory by a trial step, and cuts what is left into blocks | you need many families of models, or many kinds of hardware |
# | [SGLang](https://github.com/sgl-project/sglang) | many users, shared prompts | weights and cache get a fixed share (`mem_fraction_static`), the rest is working memory; a radix tree stores equal beginnings once | requests share long beginnings, or call tools |
# | [TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM) | NVIDIA's GPUs | the cache gets a share of what is free after loading (`free_gpu_memory_fraction`) | you use NVIDIA GPUs only and want the last few per cent of their speed |
# | [TGI](https://huggingface.co/docs/text-generation-inference) | serving from the Hugging Face hub | a warm-up run finds how many tokens fit | you already run it: its repository has been archived since March 2026 |
# | [llama.cpp](https://github.com/ggml-org/llama.cpp) | one or a few users, any computer | maps the file, reserves the context of all slots at the start, leaves layers that do not fit on the GPU in main memory | you have a laptop, or little memory |
# | [Ollama](https://github.com/ollama/ollama) | the same, with one command | measures the memory that a model needs ([since September 2025](https://ollama.com/blog/new-model-scheduling); its older engine estimates), and chooses the layers for the GPU; unloads an idle model after a while | you want it to run today |
#
# Most of them can also split one model over several GPUs when one is too small ([tensor
# parallelism](../docs/glossary.md#tensor-parallelism), chapter 41). As a rule, each GPU then holds
# a part of the weights and of the KV cache, and computes a part of the activations inside each
# layer. (llama.cpp by default gives each GPU whole layers instead.)
#
# ## Further reading
#
# - [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), Kwon et al. 2023: the paper behind vLLM, and
#   behind part 2 of this course.
# - [Orca](https://www.usenix.org/conference/osdi22/presentation/yu), Yu et al. 2022: requests that
#   join and leave at every step.
# - [Transformer Inference Arithmetic](https://kipp.ly/transformer-inference-arithmetic/), Carol
#   Chen 2022: memory and time of a model from its configuration.
# - [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022:
#   the same for models on many devices.
# - [`vllm/v1/worker/gpu_worker.py`](https://github.com/vllm-project/vllm/blob/main/vllm/v1/worker/gpu_worker.py):
#   look for `determine_available_memory`, which is this chapter's formula in a production engine.
#
# **Next:** [11 · Weights on disk](11_weights.ipynb), where the engine begins: with a file of bytes.

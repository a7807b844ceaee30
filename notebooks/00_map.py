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
# This course builds an engine that runs language models: it reads a model's file, turns text into
# numbers and back, computes, remembers what it has computed, and lets many requests share one
# machine. This chapter shows the finished engine from outside, and the one sum that decides what
# it can hold. Every later chapter opens one of its parts.
#
# **Afterwards you can** run the engine, read a timeline of requests that share it, and say from a
# model's configuration alone how much memory it needs and how many requests fit.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[server,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %% [markdown]
# ## Ten lines
#
# A model with 135 million weights, small enough for any laptop, answers a question. Each word is
# printed as soon as it is computed.

# %%
# %load_ext minigen_course
import time

from minigen import SamplingParams
from minigen.trace.events import EventKind
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts

llm = load_model(weights="float32")
question = llm.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}])
for piece in llm.stream(question, SamplingParams(temperature=0, max_tokens=48)):
    print(piece, end="", flush=True)

# %% [markdown]
# Behind those lines stand the parts that this course builds. The engine says what it is made of:

# %%
for part in ("model", "weights", "attention", "kv cache", "allocator", "prefix cache", "scheduler"):
    print(f"{part:<13} {llm.describe()[part].split(', from')[0]}")

# %% [markdown]
# ## A number that hurts
#
# Eight people ask at the same time. The simplest server answers one after the other:

# %%
topics = ["rain", "tea", "the moon", "bread", "owls", "trains", "salt", "dreams"]
prompts = [f"Here is a short story about {topic}." for topic in topics]
lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(6, 22, 2)]

started = time.perf_counter()
with llm.record() as in_turn:
    apart = [llm.generate(prompt, each).text for prompt, each in zip(prompts, lengths, strict=True)]
one_by_one = time.perf_counter() - started
measured("eight requests, one by one", one_by_one, "s")

# %% [markdown]
# The last of them waited for seven others. And while each was computed, the machine read all 135
# million weights from memory for every single token. Read them once for all eight instead:

# %%
started = time.perf_counter()
with llm.record() as recorder:
    together = [each.text for each in llm.generate(prompts, lengths, progress=False)]
side_by_side = time.perf_counter() - started
measured("eight requests, side by side", side_by_side, "s")
measured("ratio", one_by_one / side_by_side)
assert together == apart, "sharing a machine changes no answer"
print("the same eight answers")
steps_apart, steps_together = (
    sum(event.kind is EventKind.STEP for event in each.events) for each in (in_turn, recorder)
)
print(f"the weights were read {steps_apart} times, and {steps_together} times side by side")

# %% [markdown]
# ## Watch them share it
#
# An engine works in steps. In each it computes some tokens of some requests. Here is what it said
# of itself while it ran: first each prompt is read (*prefill*), all its tokens at once; then comes
# one token a step (*decode*).

# %%
from minigen_course.ch00_map.figures import timeline
from minigen_course.figures.explore import explore, picture

picture(timeline(recorder.events, topics), "Eight lanes that begin together and end one by one.")

# %% [markdown]
# ## Drag it: fewer seats
#
# What if the machine has fewer seats than there are requests? Then some wait, and take a seat as
# soon as one is free. Choose the number of seats, and look at who waits, and for how long. The
# engine really runs each time.

# %%
recordings = {}
for seats in (1, 2, 4, 8):
    small = load_model(weights="float32", max_num_seqs=seats)
    with small.record() as recordings[seats]:
        small.generate(prompts, lengths, progress=False)

explore(
    lambda seats: timeline(recordings[seats].events, topics),
    "Timelines of eight requests of which four may run at once: four wait at first.",
    seats=[4, 1, 2, 8],
)

# %% [markdown]
# ## Serve it
#
# One line puts the engine behind the API that OpenAI's service has, so whatever was written for
# that can use it: `minigen serve` on a command line, `serving` in a notebook. Eight programs ask at
# once, over the network, with OpenAI's own client. Nobody has planned their batch; what will the
# lanes look like?

# %%
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from minigen.server.local import serving


def ask(prompt, params):
    limits = {"max_tokens": params.max_tokens, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model="m", prompt=prompt, temperature=0, **limits)
    return answer.choices[0].text


with serving(llm, "m") as server, llm.record() as served, ThreadPoolExecutor(8) as pool:
    over_http = list(pool.map(ask, prompts, lengths))
assert over_http == together
print("over HTTP, the same eight answers")
picture(timeline(served.events), "Lanes of eight requests that came one by one and ran together.")

# %% [markdown]
# Each was let in at the next step after it had come. Part 2 builds what makes that possible;
# chapter 51 builds the server, and chapter 52 asks how well it serves.
#
# ## What may sit there: the sum that decides
#
# Seats cost memory. A machine must hold the **weights**, once; for each token of each running
# request its **keys and values** (the KV cache, chapter 17); and what a step **works** in. All
# three follow from a model's configuration. First by hand, for a model with 8 billion weights:

# %%
billions = 8
print(f"in bfloat16, 2 bytes a weight: {billions * 2} GB")
layers, kv_heads, head_dim, bytes_each = 32, 8, 128, 2
kv_of_a_token = 2 * layers * kv_heads * head_dim * bytes_each  # a key and a value
print(
    f"KV of one token: {kv_of_a_token:,} bytes; of 8,000 tokens: {kv_of_a_token * 8e3 / 1e9:.2f} GB"
)

# %% [markdown]
# The package does the same from the configuration that every model comes with, counting each
# tensor's numbers:

# %%
from minigen_course.lab import cost_model

show(cost_model.memory_needed, cost_model.kv_bytes_per_token)

# %%
for name in cost_model.MODELS:
    config = cost_model.config_of(name)
    weights = cost_model.num_parameters(config)
    token = cost_model.kv_bytes_per_token(config)
    print(f"{name:<13} {weights / 1e9:6.2f} billion weights, {token / 1e3:7.1f} kB of KV a token")
assert cost_model.kv_bytes_per_token(cost_model.config_of("Llama-3-8B")) == kv_of_a_token

# %% [markdown]
# ## Drag it: any model, any machine
#
# Choose a model, the bits of a weight, your machine's memory, and the requests that should run
# together. On the right: how many fit, for every length. You can also paste the text of any
# config.json of the Llama, Qwen or Mistral families.

# %%
from minigen_course.ch00_map.figures import memory_budget


def of_any_model(model, config_json, weights, memory_in_GB, sequences, tokens_of_each):
    config = cost_model.config_of(config_json or model)
    bits = cost_model.BITS[weights]
    return memory_budget(config, bits, memory_in_GB, sequences, tokens_of_each)


explore(
    of_any_model,
    "Bars of weights, KV cache and working memory of Llama-3-8B beside 24 GB.",
    model=["Llama-3-8B", *(each for each in cost_model.MODELS if each != "Llama-3-8B")],
    config_json="",
    weights=["bfloat16", *(each for each in cost_model.BITS if each != "bfloat16")],
    memory_in_GB=(4, 320, 4, 24),
    sequences=(1, 256, 1, 8),
    tokens_of_each=(256, 32768, 256, 4096),
)

# %% [markdown]
# ## Your turn
#
# Write the sum the other way round: given a memory, how many sequences of a given length fit?
# What the weights and the working memory leave is shared by the sequences; what does not fit as
# a whole does not fit.

# %%
# exercise: minigen_course.lab.cost_model.most_sequences
from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes, at least 0.

    That is (memory - weights - working) / (KV cache of one sequence), rounded down.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(0, most_sequences=most_sequences)

# %% [markdown]
# One line puts yours behind the curve on the right. (Until it passes, `mine` is the package's own.)

# %%
with using(0, most_sequences=mine):
    drawn = memory_budget(cost_model.config_of("Llama-3-8B"), 16, 24, sequences=8, context=4096)
picture(drawn, "The same budget, its curve computed by your function.")

# %% [markdown]
# ## The chapters
#
# | | | opens |
# |---|---|---|
# | [11](11_weights.ipynb) | weights | the file: bytes to tensors |
# | [12](12_tokenizer.ipynb) | tokenizer | text to token ids and back |
# | [13](13_layers.ipynb) | layers | RMSNorm, rotary embedding, SwiGLU |
# | [14](14_attention.ipynb) | attention | what tokens take from each other |
# | [15](15_transformer.ipynb) | transformer | the whole forward pass |
# | [16](16_sampling.ipynb) | sampling | from scores to one token |
# | [17](17_dense_cache.ipynb) | dense cache | prefill, decode, the memory wall |
# | [21](21_blocks.ipynb) | blocks | memory in small pieces, counted owners, copy-on-write |
# | [22](22_paged.ipynb) | paged | block tables, and attention through them |
# | [23](23_prefix.ipynb) | prefix | equal beginnings computed once, for everybody |
# | [24](24_scheduler.ipynb) | scheduler | who runs in each step, and who waits |
# | [25](25_engine.ipynb) | engine | the parts put together, yours among them |
# | [34](34_cpu_kernels.ipynb) | CPU kernels | the same race on your own processor |
# | [41](41_tensor_parallel.ipynb) | tensor parallel | one model, cut through all layers |
# | [51](51_server.ipynb) | server | an API that OpenAI's clients can use |
# | [52](52_slo.ipynb) | SLO | latency, goodput, and what to do about them |
#
# ## What the production engines do beyond this
#
# - **vLLM** reserves a share of the GPU's memory at start and cuts what the weights leave into
#   blocks for the KV cache: the sum above, done by the engine. **SGLang** and **TensorRT-LLM** too.
# - **llama.cpp** and **Ollama** map the file and give each slot a context of a fixed length; layers
#   that do not fit on the GPU stay in the computer's own memory.
# - **DeepSpeed**, **TGI** and the others split a model over several cards when one is too small:
#   the weights and the KV heads are divided, the working memory is not.

# %%
big, small = cost_model.config_of("Llama-3-70B"), cost_model.config_of("Llama-3-8B")
gb = {
    name: cost_model.num_parameters(big) * bits / 8 / 1e9 for name, bits in cost_model.BITS.items()
}
full_heads = cost_model.kv_bytes_per_token(big) * big.q_heads / big.kv_heads
own_heads = cost_model.kv_bytes_per_token(big)
four_bits = gb["Q4_0: 4 bits and a scale for 32"]
verdicts(
    "00",
    Claim(
        "A model with 8 billion weights takes 16 GB in bfloat16, one with 70 billion 140 GB",
        f"{cost_model.num_parameters(small) * 2 / 1e9:.1f} GB and {gb['bfloat16']:.1f} GB",
        "held",
        "two bytes a weight; the names round the number of weights",
    ),
    Claim(
        "At 4 bits a 70B model takes 35 GB",
        f"{gb['4 bits, scales forgotten']:.1f} GB of bare numbers, {four_bits:.1f} GB in Q4_0",
        "did not hold",
        "a scale of 16 bits for each 32 weights makes 4.5 bits of 4; other formats take more",
    ),
    Claim(
        "Llama-3-70B keeps 2.6 MB of keys and values for each token",
        f"{full_heads / 1e6:.2f} MB if each of its 64 heads had its own, {own_heads / 1e6:.2f} MB",
        "did not hold",
        "its 64 query heads share 8 heads of keys and values (chapter 14)",
    ),
    Claim(
        "So 4,000 tokens of it take 10.5 GB, and 50 users 520 GB",
        f"{own_heads * 4000 / 1e9:.1f} GB, and {own_heads * 4000 * 50 / 1e9:.1f} GB",
        "did not hold",
        "the same eighth; 50 users' KV is less than the model's weights in 8 bits",
    ),
    Claim(
        "Sequences that fit = (memory - weights) / (KV of a token x length)",
        f"{cost_model.most_sequences(small, 16, 24e9, 4096)} of Llama-3-8B, 4,096 tokens in 24 GB",
        "held within bounds",
        "with working memory taken off first, and if keys and values are not reserved in advance",
    ),
    Claim(
        "Requests that share a machine are served faster than one after the other",
        f"{steps_together} readings of the weights instead of {steps_apart}, the same answers, "
        f"{mark(one_by_one / side_by_side)} times as fast",
        "held within bounds",
        "each step reads the weights once, for however many requests; a step of several tokens "
        "takes longer, though, and by how much depends on the machine and on what else it runs",
    ),
)

# %% [markdown]
# **Next:** [11 · Weights on disk](11_weights.ipynb), where the engine begins: with a file of bytes.

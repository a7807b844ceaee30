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
# # 16 · Choosing the next token
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/16_sampling.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/16_sampling.ipynb)
#
# Chapter 15 ended with 49,152 numbers: a score for every token that could come next. This chapter
# turns them into one token. It is a few lines of arithmetic, and it decides whether the same
# model bores, delights or babbles.
#
# **Afterwards you can** say what temperature, top-k, top-p, min-p and the penalties do to a real
# distribution, in which order, and what a seed promises.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen import SamplingParams
from minigen.sampling import sampler
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch16_sampling import figures as draw_sampling
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import significant
from minigen_course.lab.inspect_model import next_logits

llm = load_model(weights="float32")

# %% [markdown]
# ## A number that hurts
#
# The simplest choice is the likeliest token, every time: *greedy*. Let the model go on
# so, and count how many of its four-word runs it has already said.

# %%
rain = "My favourite thing about rain is"
greedy = llm.generate(rain, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
words = greedy.text.split()
runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
repeated = 1 - len(set(runs)) / len(runs)
print(greedy.text)
print(f"\nfour-word runs that were said before: {repeated:.0%}")

# %% [markdown]
# A person would be near 0 %. The other simple choice is to *draw*: each token with the probability
# that the model gives it. Then the text does not circle, but look at what may be drawn:

# %%
logits = next_logits(llm, rain)
probabilities = logits.softmax(-1)
tail = float(1 - probabilities.topk(1000).values.sum())
print(f"tokens beyond the likeliest 1,000 hold {tail:.1%} of the probability at this place")
print(f"chance that 100 such draws never leave the likeliest 1,000: {(1 - tail) ** 100:.1%}")

# %% [markdown]
# None of those tokens is likely. Together they are, and one nonsense token is enough: all that
# follows must make sense of it. So one choice repeats itself and the other derails. Everything
# in this chapter stands between the two.
#
# ## The smallest version that works
#
# Softmax makes probabilities of scores; `torch.multinomial` draws. Temperature divides the scores
# before: below 1 the likely becomes likelier, above 1 all become alike.
#
# Text that was drawn stands in ⟨⟩ in this chapter, as measured numbers do: another processor adds
# the numbers of a score in another order, rounds otherwise, and now and then the same draw falls on
# the next token. What greedy chooses is the same everywhere here.


# %%
def draw_naive(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


generator = torch.Generator().manual_seed(1)
for temperature in (0, 0.5, 1.0, 2.0):
    drawn = [draw_naive(logits, temperature, generator) for _ in range(8)]
    spelled = [llm.tokenizer.decode([token]) for token in drawn]
    print(f"{temperature:>4}", f"⟨{spelled}⟩" if temperature else spelled)

# %% [markdown]
# ## Why it is wrong
#
# At temperature 2 some tokens do not fit at all. Here is why, for three prompts. Each curve says
# how much probability lies beyond the likeliest *n* tokens.

# %%
prompts = {"a fact": "The capital of France is", "an opinion": rain, "anything": "The"}
rows = {name: next_logits(llm, text) for name, text in prompts.items()}
picture(
    draw_sampling.tail_mass(rows),
    "Curves of the probability beyond the likeliest n tokens, for three prompts.",
)

# %%
for name, row in rows.items():
    sure = int((row.softmax(-1).sort(descending=True).values.cumsum(0) < 0.9).sum()) + 1
    print(f"{name:<10} tokens that hold 90 % of the probability: about {significant(sure, 2)}")

# %% [markdown]
# There is no right *n*: after "The" hundreds of tokens are fair, after a fact's beginning few.
#
# ## The idea: cut the tail, each time where it begins
#
# - **top-k** keeps the k likeliest, however sure the model is;
# - **top-p** (nucleus) keeps the fewest likeliest that together reach the mass p: few where the
#   model is sure, many where it is not;
# - **min-p** keeps those at least min-p times as likely as the likeliest.
#
# In the naive form, for one row:


# %%
def top_p_naive(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    probabilities, mass = logits.softmax(-1).tolist(), 0.0
    kept = torch.full_like(logits, -torch.inf)
    for token in logits.argsort(descending=True).tolist():
        kept[token] = logits[token]
        mass += probabilities[token]
        if mass >= top_p:
            return kept
    return kept


for name, row in rows.items():
    print(f"{name:<10} top_p=0.5 keeps {int((top_p_naive(row, 0.5) > -torch.inf).sum())} tokens")

# %% [markdown]
# ## The package's version
#
# The same for a whole batch, each row under its own settings, and without sorting 49,152 tokens:
# those so unlikely that even all together they could not matter are never looked at.

# %%
show(sampler.keep_top_p, sampler.keep_min_p)

# %%
batch = torch.stack(list(rows.values()))
masses = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)
ours = sampler.keep_top_p(batch, masses)
for row, kept in zip(batch, ours, strict=True):
    assert torch.equal(kept, top_p_naive(row, 0.5))
print("package and naive version keep the same tokens")

# %% [markdown]
# **The order matters.** minigen follows vLLM: bans, logit bias, penalties, temperature, min-p,
# top-k, top-p, then one draw. The same two settings the other way round keep other tokens:

# %%
hot, half = torch.tensor([2.0] * 3), torch.tensor([0.9] * 3, dtype=torch.float64)
first_hot = sampler.keep_top_p(sampler.apply_temperature(batch, hot), half)
first_cut = sampler.apply_temperature(sampler.keep_top_p(batch, half), hot)
kept_hot = (first_hot > -torch.inf).sum(-1).tolist()
kept_cut = (first_cut > -torch.inf).sum(-1).tolist()
for name, hot_first, cut_first in zip(rows, kept_hot, kept_cut, strict=True):
    hot_count, cut_count = significant(hot_first, 2), significant(cut_first, 2)
    print(f"{name:<10} temperature first: about {hot_count} tokens   top-p first: {cut_count}")

# %% [markdown]
# ## Drag it
#
# Pale bars are the model's own probabilities, blue ones what will be drawn from, the line is the
# cut. Write your own prompt, move the settings, press *draw again*.

# %%
spell = lambda token: llm.tokenizer.decode([token])  # noqa: E731


def distribution(prompt, temperature, top_k, top_p, min_p, draw_again):
    return draw_sampling.next_token(
        next_logits(llm, prompt),
        spell,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=draw_again,
    )


explore(
    distribution,
    "The likeliest next tokens as bars, before and after the settings, with the cut drawn.",
    prompt=rain,
    temperature=(0.1, 2.0, 0.05, 1.0),
    top_k=(1, 200, 1, 20),
    top_p=(0.05, 1.0, 0.05, 0.9),
    min_p=(0.0, 0.5, 0.05, 0.0),
    draw_again=None,
)

# %% [markdown]
# ## What a seed promises
#
# A draw here is a hash of (seed, which answer, which step), not the state of a generator. So it
# does not depend on who else is in the batch, and a request that was put back and computed
# again says the same. Two requests, the first alone and then among others:

# %%
params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=12)
others = SamplingParams(temperature=1, seed=1, max_tokens=12)
alone = llm.generate(rain, params).text
among = llm.generate(["Once", rain, "Tea is"], [others, params, others], progress=False)[1].text
print(f"⟨{alone!r}⟩")
print("the same among others:", alone == among)

# %% [markdown]
# ## The measurement again
#
# The same beginning once more, with the tail cut and a penalty on what was said:

# %%
kind = SamplingParams(
    temperature=0.8, top_p=0.9, frequency_penalty=0.3, seed=3, max_tokens=100, ignore_eos=True
)
better = llm.generate(rain, kind)
words = better.text.split()
runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
repeated_now = 1 - len(set(runs)) / len(runs)
print(f"⟨{better.text}⟩")
print(f"\nfour-word runs that were said before: {mark(100 * repeated_now, '%')}", end=", ")
print(f"and greedy had {repeated:.0%}")

# %% [markdown]
# And what it costs: the time of one choice among all tokens, beside the whole step that made them.

# %%
import time

started = time.perf_counter()
for _ in range(50):
    sampler.keep_top_p(batch[:1], masses[:1])
choosing = (time.perf_counter() - started) / 50
started = time.perf_counter()
llm.generate(rain, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
step = (time.perf_counter() - started) / 20
measured("top-p of one row", choosing * 1e3, "ms")
measured("one token of the model", step * 1e3, "ms")

# %% [markdown]
# ## Your turn
#
# Write top-p for a whole batch: each row keeps its fewest likeliest tokens that together reach
# the row's own `top_p`; all others become minus infinity. `check` says the first thing that is
# wrong; add `hint=1` for a hint, `hint=2` for a clearer one.

# %%
# exercise: minigen.sampling.sampler.keep_top_p
from jaxtyping import Float
from torch import Tensor

from minigen.sampling.sampler import Logits


def keep_top_p(logits: Logits, top_p: Float[Tensor, " rows"]) -> Logits:
    """Keep the fewest most likely tokens of each row whose probabilities reach `top_p`."""
    raise NotImplementedError  # your turn


# %%
mine = check(16, keep_top_p=keep_top_p)

# %% [markdown]
# One line puts yours into the running engine. (Until it passes, `mine` is the package's own.)

# %%
params = SamplingParams(temperature=1, top_p=0.8, seed=5, max_tokens=24, ignore_eos=True)
with using(16, keep_top_p=mine):
    text = llm.generate(rain, params).text
print(f"⟨{text}⟩")

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM** and **SGLang** sample the whole batch on the GPU. SGLang takes FlashInfer's kernels,
#   which find the top-p set by rejection instead of sorting, in one pass over the vocabulary.
# - **llama.cpp** (and **Ollama** above it) runs samplers as a chain whose order the user sets, and
#   has more of them: typical-p, XTC, DRY, Mirostat.
# - **TensorRT-LLM** fuses top-k and top-p into a kernel of its own; **TGI** warps logits with the
#   transformers library's processors, **ExLlamaV2** and **MLC-LLM** in C++ on the CPU or GPU.
# - All of them can mask the logits by a grammar, so that an answer is valid JSON: one more stage
#   before temperature.

# %%
greedy_twice = {
    llm.generate(rain, SamplingParams(temperature=0, max_tokens=16)).text for _ in range(3)
}
verdicts(
    "16",
    Claim(
        "The model's scores (logits) are probabilities",
        f"their sum is {logits.sum() / 1e3:.0f} thousand, after softmax {probabilities.sum():.3f}",
        "did not hold",
        "softmax makes them so; before it only their differences mean something",
    ),
    Claim(
        "Greedy decoding is deterministic",
        f"{len(greedy_twice)} text in three runs, in float32 on one machine",
        "held within bounds",
        "in low precision the batch's shape rounds sums differently, and can flip a near-tie",
    ),
    Claim(
        "The order of temperature and top-p is a matter of taste",
        f"about {significant(kept_hot[2], 2)} tokens are kept with temperature first, "
        f"{significant(kept_cut[2], 2)} with top-p first",
        "did not hold",
        "temperature 2 flattens the curve, so that reaching the mass takes more tokens",
    ),
    Claim(
        "Sampling costs nothing beside the model",
        f"top-p of {len(logits):,} scores takes {mark(100 * choosing / step, '%')} of a step",
        "held within bounds",
        "a vocabulary of 49,152 is small beside 135 million weights; a small model with a large "
        "vocabulary would feel it",
    ),
)

# %% [markdown]
# **Next:** [17 · Prefill, decode, and the memory wall](17_dense_cache.ipynb), where the same token
# costs a tenth.

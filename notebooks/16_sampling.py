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
# Chapter 15 ended with 49,152 [logits](../docs/glossary.md#logits): one score for every token that
# could come next. The model's work is done. Now a piece of code without a single weight must turn
# these scores into one token, and append it to the text. This is the
# [sampler](../docs/glossary.md#sampler). It is a few lines of arithmetic, and it decides whether the
# same model repeats itself, tells a story, or babbles. It is also the part of an engine that you
# control with every request: temperature, top-p, penalties, seed and stop strings are its
# [sampling parameters](../docs/glossary.md#sampling-parameters).
#
# **Afterwards you can** say what temperature, top-k, top-p, min-p, the three penalties and a logit
# bias do to a real distribution, write top-p and the penalties for a batch, say in which order an
# engine applies them and why the order matters, read logprobs, and explain what a seed promises.
#
# **You need** chapter 15 (logits, and softmax over the vocabulary) and logarithms. **Time:** about
# 60 minutes to read and try, about 65 for the
# [exercises](../exercises/16_sampling.ipynb).
#
# **Where we are:** token ids → model → logits → **sampler** → next token → text.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | serving | decode | CPU | L3 engine | `SamplingParams` | share of the step |
#
# <!-- /card -->

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
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    mark,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
)
from minigen_course.ch16_sampling import figures as draw_sampling
from minigen_course.ch16_sampling import lesson
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import significant
from minigen_course.lab.inspect_model import next_logits
from minigen_course.lab.texts import ALICE

llm = load_model(weights="float32")
fast = load_model(weights="int4")


def spell(token):
    """Return a token's text."""
    return llm.tokenizer.decode([token])


# %%
chapter_map("sampler")

# %% [markdown]
# The map shows where we are. Two engines are loaded. `llm` computes in float32 with torch, so that
# its parts can be taken out and exchanged for yours. `fast` has the same weights rounded to 4 bits,
# and runs a whole [step](../docs/glossary.md#step) as compiled code (chapter 34). It writes the longer
# texts of this chapter.
#
# Text stands in ⟨⟩, as measured numbers do, where another processor may write another one: it rounds
# differently, and now and then the choice falls on the neighbouring token.
#
# ## A number that hurts: the model repeats itself
#
# The simplest choice is the token with the highest score, at every step. This is
# [**greedy decoding**](../docs/glossary.md#greedy). It sounds like the best choice that can be made.
# Let the model continue a sentence greedily for 80 tokens. Then count how many runs of four words
# (words 1 to 4, 2 to 5, ...) have already occurred earlier in the same text.
#
# Predict first: how many per cent of the four-word runs are repetitions? Replace `None` by a number.

# %%
guess_repeated = predict("Per cent of four-word runs that are repetitions?", None, within=1.5)

# %%
rain = "My favourite thing about rain is"
greedy = fast.generate(rain, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
repeated = lesson.repeated_runs(greedy.text)
print(f"⟨{greedy.text}⟩\n")
guess_repeated.compare(round(100 * repeated), "%", measured=True)
print(
    f"and of {len(ALICE.split())} words of Alice in Wonderland: {lesson.repeated_runs(ALICE):.0%}"
)

# %% [markdown]
# The model falls into a loop, and each repetition makes the next one more likely. By the same
# measure, a page that a person wrote has no repetition at all, though it is seven times as long and
# has more chances to repeat. Holtzman et al. found the same for GPT-2, and called it
# [text degeneration](https://arxiv.org/abs/1904.09751).
#
# Greedy decoding is not even a way to the truth. Here are the model's three likeliest next tokens
# after the start of a simple fact of geography:

# %%
capital = next_logits(llm, "The capital of Australia is").softmax(-1)
for probability, token in zip(*capital.topk(3), strict=True):
    print(f"{spell(int(token)):<10} {float(probability):.0%}")

# %% [markdown]
# Greedy decoding answers *Sydney*, always. The right answer, *Canberra*, is nearly as likely. Greedy
# decoding turns a doubt of 36 to 34 into a certainty.
#
# The other simple choice is to **draw**: each token comes with the probability that the model gives
# it. Then the text does not loop. But look at what may be drawn. The **tail** is everything beyond
# the likeliest 1,000 tokens. No token in it is likely, but at the first step of the rain sentence they
# hold about 6 % together. Predict: of 1,000 answers of 80 tokens each, how many have no token from the
# tail, if every step is like the first one of the rain sentence?

# %%
guess_sane = predict(
    "Of 1,000 answers that are drawn, how many never touch the tail?", None, within=2
)

# %%
logits = next_logits(llm, rain)
probabilities = logits.softmax(-1)
tail = 1 - float(probabilities.double().topk(1000).values.sum())
print(f"tokens beyond the likeliest 1,000 hold {tail:.1%} of the probability at this position")
guess_sane.compare(round(1000 * (1 - tail) ** 80))

# %% [markdown]
# Practically none, if every position were as open as the first one (the section *The measurement
# again* counts them in real answers). Not every tail token is nonsense, but one that is suffices:
# everything that follows must make sense of it. So one simple choice repeats itself, and the other one
# derails. Everything in this chapter stands between the two.
#
# ## Softmax with temperature
#
# **Softmax** turns logits into probabilities (chapter 14 used it for attention weights). The
# **temperature** $T$ divides the logits first:
#
# $$p_i = \frac{\exp(l_i / T)}{\sum_j \exp(l_j / T)}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $l_i$ | logit of token $i$ | `logits[row, i]` |
# | $T$ | temperature | `temperature` |
# | $p_i$ | probability that token $i$ is drawn | `softmax(logits / T)` |
# | $V$ | number of tokens in the vocabulary | `logits.shape[-1]`, 49,152 |
#
# ### Three tokens by hand
#
# Take the logits 2, 1 and 0. At $T = 1$ their exponentials are 7.39, 2.72 and 1. The sum is 11.11, so
# the probabilities are **0.67, 0.24, 0.09**. At $T = \tfrac12$ the logits become 4, 2, 0, and the
# probabilities 0.87, 0.12, 0.02: sharper. At $T = 2$ the logits become 1, ½, 0, and the
# probabilities 0.51, 0.31, 0.19: flatter.
#
# Two limits say what temperature can do:
#
# - $T \to 0$: the lead of the largest logit grows, until its probability is 1. This is greedy
#   decoding. At $T = 0$ the formula divides by zero, so an engine treats `temperature=0` as "take the
#   largest logit", and minigen takes the lowest id among equals.
# - $T \to \infty$: all logits become 0, and every token gets $1 / V$. The model no longer matters.
#
# A logit enters only through differences: adding the same number to all logits changes nothing. And
# temperature never changes the *order* of the tokens. Whatever it is, the likeliest token stays the
# likeliest.
#
# The cell computes the example, and then the real distribution of the rain sentence at three
# temperatures. How wide is a distribution? Its **perplexity**, $\exp(-\sum_i p_i \ln p_i)$, says among
# how many equally likely tokens a draw would be as uncertain. (It is chapter 13's formula, averaged
# over what the model itself would draw.) Below the figure, a naive sampler draws eight tokens at each
# temperature with `torch.multinomial`.

# %%
three = torch.tensor([2.0, 1.0, 0.0])
for temperature in (0.01, 0.5, 1.0, 2.0, 100.0):
    shown = ", ".join(f"{each:.2f}" for each in (three / temperature).softmax(-1).tolist())
    print(f"T = {temperature:<6g} {shown}")
assert torch.allclose((three + 50).softmax(-1), three.softmax(-1))
picture(
    draw_sampling.temperatures(logits, spell),
    "The ten likeliest next tokens of the rain sentence, and all others together, at three "
    "temperatures. The titles give the perplexity of each distribution.",
    number="16.1",
)


def draw_naive(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


generator = torch.Generator().manual_seed(1)
for temperature in (0, 0.5, 1.0, 2.0):
    spelled = [spell(draw_naive(logits, temperature, generator)) for _ in range(8)]
    print(f"{temperature:>4}", f"⟨{spelled}⟩" if temperature else spelled)

# %% [markdown]
# At temperature ½ the draw is between a handful of sensible words. At 2, nearly everything that is
# drawn comes from "all others".
#
# ## Why it is wrong: the tail
#
# The naive sampler can draw any of 49,152 tokens. Look at three prompts, and how much probability
# lies beyond the likeliest $n$ tokens:

# %%
prompts = {"a fact": "The capital of France is", "an opinion": rain, "anything": "The"}
rows = {name: logits if text == rain else next_logits(llm, text) for name, text in prompts.items()}
batch = torch.stack(list(rows.values()))
picture(
    draw_sampling.tail_mass(rows),
    "Probability beyond the likeliest n tokens. The fact is three quarters decided by its first token; "
    "the other two still have several per cent beyond the first thousand.",
    number="16.2",
)

# %% [markdown]
# There is no right $n$. After *The capital of France is*, few tokens are sensible. After *The*,
# hundreds are. A cut must depend on how sure the model is.
#
# ## The idea: cut the tail where it begins
#
# Sort the probabilities, $p_{(1)} \ge p_{(2)} \ge \dots$ Three filters
# ([top-k, top-p, min-p](../docs/glossary.md#top-k-top-p-min-p)) say whether the token of rank $i$ is kept:
#
# - **top-k** keeps the $k$ likeliest tokens, however sure the model is.
# - **top-p**, also called **nucleus sampling** ([Holtzman et al. 2019](https://arxiv.org/abs/1904.09751)),
#   keeps the fewest likeliest tokens that together reach the probability $P$ (`top_p`).
# - **min-p** ([Nguyen et al. 2024](https://arxiv.org/abs/2407.01082)) keeps the tokens that are at
#   least $M$ times (`min_p`) as likely as the likeliest one.
#
# $$\text{top-}k:\ i \le k \qquad \text{top-}p:\ i \le \min \Big\{ m : \sum_{j \le m} p_{(j)} \ge P \Big\}
# \qquad \text{min-}p:\ p_{(i)} \ge M \cdot p_{(1)}$$
#
# All other logits become minus infinity, so their probability is 0. Softmax then gives the kept
# tokens a sum of 1 again.
#
# **By hand:** the probabilities 0.45, 0.25, 0.15, 0.10, 0.05. `top_k=2` keeps two. `top_p=0.8` keeps
# three: 0.45 + 0.25 = 0.70 does not reach 0.8, and 0.85 does. `min_p=0.3` keeps three: 0.3 × 0.45 =
# 0.135, which 0.15 passes and 0.10 does not.
#
# Predict: after *The capital of France is*, how many tokens does `top_p=0.9` keep? Figure 16.2 has the
# answer: where does the blue line cross 0.1?

# %%
guess_fact = predict(
    "Tokens that top_p=0.9 keeps after 'The capital of France is'?", None, within=2
)


# %%
def num_kept(logits: torch.Tensor) -> list[int]:
    return (logits > -torch.inf).sum(-1).tolist()


p90 = torch.full((3,), 0.9, dtype=torch.float64)
kept_p, kept_min = sampler.keep_top_p(batch, p90), sampler.keep_min_p(batch, torch.full((3,), 0.05))
print("             likeliest   kept by top_k=50   top_p=0.9   min_p=0.05")
for name, row, by_p, by_min in zip(rows, batch, num_kept(kept_p), num_kept(kept_min), strict=True):
    likeliest = float(row.softmax(-1).max())
    print(f"{name:<12}{likeliest:>10.0%}{50:>19}{significant(by_p, 2):>12}{by_min:>13}")
guess_fact.compare(num_kept(kept_p)[0])
picture(
    draw_sampling.cuts(rows, top_k=50, top_p=0.9, min_p=0.05),
    "Each curve is a prompt's distribution, sorted. The marks show the last token that each filter "
    "keeps.",
    number="16.3",
)

# %% [markdown]
# Top-k cuts all three at the same rank. Top-p moves with the model's certainty: it keeps about fifty
# times as many tokens after *The* as after the fact. Min-p moves as well, and is stricter here: it
# compares each token with the likeliest one, and does not ask how much the tail adds up to. The three
# can be combined. Then each filter sees what the one before has left.
#
# ## Drag it
#
# Pale bars are the model's own probabilities, the line shows them after temperature, and blue bars
# are what can be drawn after the cut. The dots show how often each token really came: every press of
# *draw 100* adds a hundred draws. Watch how slowly the dots settle on the bars. Then set temperature
# to 2, and see how little `top_p` still holds back, and what `min_p` does (with `top_p` at 1).


# %%
def distribution(prompt, temperature, top_k, top_p, min_p, draw_100):
    return draw_sampling.next_token(
        next_logits(llm, prompt),
        spell,
        temperature=temperature,
        top_k=None if top_k == "no limit" else top_k,
        top_p=top_p,
        min_p=min_p,
        num_draws=100 * (draw_100 + 1),
    )


explore(
    distribution,
    "The likeliest next tokens before and after the settings, and how often each was drawn.",
    "16.4",
    prompt=rain,
    temperature=(0.1, 2.0, 0.05, 0.7),
    top_k=["no limit", 1, 2, 5, 10, 20, 50, 200],
    top_p=(0.05, 1.0, 0.05, 0.9),
    min_p=(0.0, 0.5, 0.05, 0.0),
    draw_100=None,
)

# %% [markdown]
# ## Your turn: top-p
#
# Write top-p for a batch in which every row has its own setting. `check` says the first thing that is
# wrong.

# %%
task(16, "keep_top_p")

# %%
# exercise: minigen.sampling.sampler.keep_top_p
from jaxtyping import Float
from torch import Tensor

from minigen.sampling.sampler import Logits


def keep_top_p(logits: Logits, top_p: Float[Tensor, " rows"]) -> Logits:
    """Keep the fewest most likely tokens of each row whose probabilities reach `top_p`."""
    raise NotImplementedError  # your turn


# %%
my_top_p = check(16, keep_top_p=keep_top_p)
with using(16, keep_top_p=my_top_p):  # the running engine calls your part, once it has passed
    text = llm.generate(rain, SamplingParams(temperature=1, top_p=0.8, seed=5, max_tokens=2)).text
print(f"⟨{text}⟩")

# %% [markdown]
# ## Penalties: do not say it again
#
# A cut changes nothing about a loop, because a loop consists of likely tokens.
# [Penalties](../docs/glossary.md#penalties) lower the logits of tokens that have occurred before.
# Let $c_i$ be how often token $i$ occurs in the answer so far.
#
# Repetition, for tokens of the prompt or the answer:
#
# $$l_i \leftarrow \begin{cases} l_i \,/\, \theta & \text{if } l_i > 0 \\ l_i \cdot \theta & \text{if } l_i \le 0 \end{cases}$$
#
# Presence and frequency, where $[c_i > 0]$ is 1 if the token has occurred in the answer, else 0:
#
# $$l_i \leftarrow l_i - \alpha\,[c_i > 0] - \beta\, c_i$$
#
# | symbol | setting | without effect | looks at | how often it counts |
# |---|---|---|---|---|
# | $\theta$ | `repetition_penalty` | 1 | prompt and answer | once |
# | $\alpha$ | `presence_penalty` | 0 | answer | once |
# | $\beta$ | `frequency_penalty` | 0 | answer | for each occurrence |
#
# The repetition penalty is the idea of [Keskar et al. 2019](https://arxiv.org/abs/1909.05858), who
# divide the logit of every token that was generated. Dividing a *negative* logit makes its token
# likelier, so the transformers library
# [added the second case](https://github.com/huggingface/transformers/pull/2303). The other two
# penalties come from OpenAI's API. Since $p_i = e^{l_i} / \sum_j e^{l_j}$, the **odds** of a token,
# $p_i / (1 - p_i)$, are $e^{l_i}$ divided by the sum over all *other* tokens. So subtracting $x$ from
# its logit divides its odds by $e^x$, if no other token is penalized: a presence penalty of 1 divides
# them by 2.7. Here is a text in which the loop has started, and what each penalty does to the next
# token:

# %%
loop_text = " the way it makes people feel." + 3 * " I love the way it makes people feel."
loop_text += " I love the way"
loop = next_logits(llm, rain + loop_text)[None]
in_prompt = torch.zeros_like(loop, dtype=torch.bool)
in_prompt[:, llm.tokenizer.encode(rain)] = True
counts = torch.zeros_like(loop)
for token in llm.tokenizer.encode(loop_text):
    counts[0, token] += 1
it = int(loop.argmax())
only_it = torch.zeros_like(loop)
only_it[0, it] = counts[0, it]
kinds = {"no penalty": loop[0]}
print(f"the odds of {spell(it)!r} are divided by:      if it alone were penalized:")
for name, values in {
    "repetition 1.2": (1.2, 0, 0),
    "presence 1": (1, 1, 0),
    "frequency 1": (1, 0, 1),
}.items():
    settings = [torch.tensor([float(each)]) for each in values]
    kinds[name] = sampler.apply_penalties(loop, in_prompt, counts, *settings)[0]
    alone = sampler.apply_penalties(loop, in_prompt & False, only_it, *settings)[0]
    divided = [lesson.odds(loop[0], it) / lesson.odds(each, it) for each in (alone, kinds[name])]
    print(f"{name:<31}{significant(divided[1], 2):<15}{significant(divided[0], 2)}")
shown_ids = loop[0].topk(8).indices.tolist()
picture(
    draw_sampling.penalized(
        kinds,
        [f"{spell(each)}\n{counts[0, each]:.0f} ×" for each in shown_ids],
        shown_ids,
        "A penalty moves probability from what was said to what was not",
    ),
    "The next token after '... I love the way', where the loop has started, without a penalty and "
    "with each of the three. Below each token: how often the answer has it already.",
    number="16.5",
)
small, said = torch.tensor([[2.0, 1.5, 1.0]]), torch.tensor([[1.0, 0.0, 0.0]])
one, none = torch.ones(1), torch.zeros(1)
for added in (0.0, -3.0, 10.0):  # the first of three tokens was said once
    raw = small + added
    after = sampler.apply_penalties(raw, said < 0, said, 1.2 * one, none, none)
    before, now = (f"{float(each.softmax(-1)[0, 0]):.2f}" for each in (raw, after))
    print(f"logits {raw[0].tolist()}, repetition 1.2: from {before} to {now}")

# %% [markdown]
# The loop has made *it* nearly certain, and the presence penalty of 1 hardly helps. Alone it would
# divide the odds of *it* by 2.7. Here it divides them by 1.5, because its likeliest rivals have
# occurred as well, and are penalized too. The frequency penalty counts every repetition, so it grows
# until the loop breaks. The repetition penalty divides a large logit by 1.2, which takes more away
# than the presence penalty's 1.
#
# Three traps:
#
# 1. **The repetition penalty depends on where zero is.** Softmax does not care about a number that is
#    added to all logits. This penalty does, because it treats positive and negative logits
#    differently. The last three lines above are the same distribution, under the same penalty, with
#    three different effects.
# 2. **It also punishes the prompt.** A repetition penalty hinders a chat that must quote its
#    documents, or write code with the variables of the question. In OpenAI's API, vLLM and minigen,
#    presence and frequency look at the answer only. llama.cpp's server feeds the prompt to all three,
#    which see the last 64 tokens.
# 3. **Penalties do not know which words must repeat.** A comma or the word *the* occurs on every line.
#    With `frequency_penalty=0.3`, 20 occurrences of *the* divide its odds by $e^{0.3 \cdot 20} \approx
#    400$, against rivals that have not occurred. In a long answer, such a penalty pushes out commas
#    long before it improves the style.
#
# ## Your turn: numbers, and penalties
#
# First ten numbers with pencil and paper. They ask for the values at which a setting has no effect,
# which every user of an API should know, and for the arithmetic so far. Then the penalties: mind which
# tokens each one looks at, and that a batch has three settings for each row.

# %%
task(16, "by_hand")


# %%
# exercise: minigen_course.ch16_sampling.lesson.by_hand
def by_hand() -> dict[str, float]:
    """Return ten numbers about four tokens A, B, C, D, with probabilities 50, 30, 15, 5 percent.

    Their logits are the natural logarithms of these probabilities. Each setting stands alone, the
    others have no effect; a temperature applies before a cut.

    - "top_k for greedy": the top_k with which every temperature chooses as greedy does
    - "top_p without effect": the top_p that drops no token of any distribution
    - "min_p without effect": the min_p that drops no token of any distribution
    - "repetition_penalty without effect": the repetition_penalty that changes no logit
    - "A at temperature 1/2": the probability of A at this temperature
    - "A at endless temperature": what the probability of A tends to as the temperature grows
    - "kept by top_p 0.9": how many tokens are kept
    - "kept by top_p 0.9 at temperature 1/2": how many tokens are kept
    - "kept by min_p 0.2": how many tokens are kept
    - "B after frequency_penalty": the probability of B if B has occurred twice in the answer, the
      other tokens have not occurred, and frequency_penalty is ln 2 = 0.693
    """
    raise NotImplementedError  # your turn


# %%
my_numbers = check(16, by_hand=by_hand)
task(16, "apply_penalties")

# %%
# exercise: minigen.sampling.sampler.apply_penalties
from jaxtyping import Bool, Float
from torch import Tensor

from minigen.sampling.sampler import Logits


def apply_penalties(
    logits: Logits,
    in_prompt: Bool[Tensor, "rows vocab"],
    output_counts: Float[Tensor, "rows vocab"],
    repetition: Float[Tensor, " rows"],
    presence: Float[Tensor, " rows"],
    frequency: Float[Tensor, " rows"],
) -> Logits:
    """Make tokens less likely that occurred before.

    `repetition` divides the positive logits, and multiplies the negative ones, of tokens in the
    prompt or the output. For tokens in the output, `presence` is subtracted once, and `frequency`
    once per occurrence.
    """
    raise NotImplementedError  # your turn


# %%
my_penalties = check(16, apply_penalties=apply_penalties)
tea = "I like tea. I like tea. I like"
with using(16, apply_penalties=my_penalties):
    params = SamplingParams(temperature=0, frequency_penalty=2, max_tokens=4)
    print(repr(llm.generate(tea, params).text))

# %% [markdown]
# ## Logit bias, and what logprobs report
#
# A **logit bias** adds a number of yours to the logits of some tokens, $l_i \leftarrow l_i + b_i$. A
# bias of -100 bans a token in practice. A bias of +100 on a few tokens restricts the answer to them,
# which turns a chat model into a classifier. Keep in mind that one word has several tokens: `Yes`,
# ` Yes` and `yes` have three different ids (chapter 12).
#
# A **log probability**, or [**logprob**](../docs/glossary.md#log-probability), is
# $\ln p_i = l_i - \ln \sum_j e^{l_j}$. An API returns it for each token of the answer, together with
# the likeliest alternatives; minigen and vLLM's Python interface add the token's rank. Which $p_i$:
# the model's own, or the one that was drawn from? Look:

# %%
question = "Is Paris the capital of France? Answer yes or no."
asked = llm.chat_prompt([{"role": "user", "content": question}])
yes, no = (llm.tokenizer.encode(word)[0] for word in ("Yes", "No"))
requests = {
    "no bias": {},
    "only Yes or No": {"logit_bias": {yes: 100, no: 100}},
    "Yes + 5": {"logit_bias": {yes: 5}},
    "Yes + 5, T = 3, top_k = 1": {"logit_bias": {yes: 5}, "temperature": 3, "top_k": 1},
}
params = [
    SamplingParams(**{"temperature": 0, "max_tokens": 1, "logprobs": 2} | each)
    for each in requests.values()
]
for name, answer in zip(requests, fast.generate([asked] * 4, params, progress=False), strict=True):
    listed = ", ".join(
        f"{spell(token)} {each.logprob:.1f} (rank {each.rank})"
        for token, each in answer.logprobs[0].items()
    )
    print(f"{name:<26} says {answer.text:<5} reported: ⟨{listed}⟩")

# %% [markdown]
# (The model is small, and its *No* is wrong.) The reported numbers never change: *No* is reported with
# rank 1 although the bias has made *Yes* the likeliest. In minigen, **logprobs are taken from the raw
# logits**, before bias, penalties, temperature and cuts. They say what the model believes, and they
# can be compared between requests with different settings.
# [vLLM](https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/) does the same by default. Its
# option `logprobs_mode` can return the processed ones instead. Training on a model's own answers
# (reinforcement learning) needs those, because it must know how likely each draw really was.
#
# The logprobs of a text say how surprising it is to the model. As in chapter 13, their mean becomes a
# perplexity, $\exp(-\tfrac1n \sum \ln p)$. In **autoregressive** generation each token was chosen by
# the model. In **teacher forcing** the text is given, and the model only says how likely each token
# was, as in training. `prompt_logprobs` does this in one [prefill](../docs/glossary.md#prefill) (the one
# token that it must choose is not used). Which text is more surprising to the model, its own greedy
# one or Alice?


# %%
def perplexity(prompt: str, text: str) -> float:
    """The model's perplexity on a given text after a prompt, by teacher forcing."""
    start, ids = fast.tokenizer.encode(prompt), fast.tokenizer.encode(text)
    reading = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = fast.generate([*start, *ids], reading).prompt_logprobs
    return lesson.perplexity_by_logprobs(ids, found[len(start) :])


first = ALICE.split("\n\n")[0]
print(f"perplexity of its own greedy text: {mark(perplexity(rain, greedy.text), digits=2)}")
print(f"of the first paragraph of Alice:   {mark(perplexity(first[:5], first[5:]), digits=2)}")

# %% [markdown]
# A person's text surprises the model again and again, and greedy text hardly ever. People do not
# write what is likeliest at every word. Text that always takes the likeliest word does not read like
# a person's, and a sampler that draws comes closer.
#
# ## Several answers, and when an answer ends
#
# `n=3` asks for three answers to one prompt
# ([parallel sampling](../docs/glossary.md#parallel-sampling)). The prompt is computed once, and all
# answers read the same keys and values of the prompt (chapter 22). A program can then keep the answer
# with the highest mean logprob (*best of n*), or the one that most answers agree on.

# %%
with fast.count_work() as work:
    several = SamplingParams(n=3, temperature=1, top_p=0.9, seed=7, max_tokens=10)
    answers = fast.generate(rain, several, progress=False)
for each in answers.choices:
    print(each.index, f"⟨{each.text!r}⟩")
print(
    f"prompt tokens: {answers.num_prompt_tokens}, computed: {work.tokens_prefilled}, for 3 answers"
)

# %% [markdown]
# An answer that neither was aborted nor failed ends for one of two
# [reasons](../docs/glossary.md#finish-reason): `"stop"` or `"length"`.
#
# - **End of sequence** (EOS): the model itself draws a special token, here `<|im_end|>`. It was
#   trained to do so at the end of an answer. `ignore_eos` disregards it, which benchmarks use.
# - A [**stop string**](../docs/glossary.md#stop-string): the text is searched for it after each
#   token, and the answer is cut before it (chapter 12 built the search). `stop_token_ids` ends the
#   answer at a token instead.
# - [`max_tokens`](../docs/glossary.md#most-new-tokens) is reached: this is `"length"`.
# - [`min_tokens`](../docs/glossary.md#fewest-new-tokens) works the other way round: until then the
#   end tokens are **banned**, their logits are minus infinity, and the sampler must choose something
#   else. A stop string in these first tokens does not end the answer either.

# %%
france = llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
endings = {
    "as it is": {},
    "max_tokens=4": {"max_tokens": 4},
    'stop="capital"': {"stop": "capital"},
    "min_tokens=10": {"min_tokens": 10, "max_tokens": 11},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 12, "skip_special_tokens": False},
}
params = [
    SamplingParams(**{"temperature": 0, "max_tokens": 13} | each) for each in endings.values()
]
for name, found in zip(endings, fast.generate([france] * 5, params, progress=False), strict=True):
    print(
        f"{name:<15} {found.finish_reason:<7}{found.num_output_tokens:>3} tokens  ⟨{found.text!r}⟩"
    )

# %% [markdown]
# The first answer has 8 tokens, and the last one is the end token, which is not shown. With
# `min_tokens=10` the model is not allowed to end, and goes on talking. With `ignore_eos` it writes
# the end token and continues into what comes after the end: an imagined next message of the chat.
#
# ## How a seed draws
#
# Text must be reproducible for a bug report or a test, and that is what a
# [seed](../docs/glossary.md#seed) is for. The obvious way is a random generator: it holds a state,
# and each call returns the next number of a fixed series. But an engine computes several requests at
# once, and they come and go. Which number of the series does your request get?

# %%
generator = torch.Generator().manual_seed(7)
alone = [float(torch.rand(1, generator=generator)) for _ in range(3)]
generator = torch.Generator().manual_seed(7)
among = [torch.rand(3, generator=generator).tolist()[1] for _ in range(3)]  # row 1 of a batch of 3
print("one generator, alone:        ", [f"{each:.3f}" for each in alone])
print("one generator, in a batch:   ", [f"{each:.3f}" for each in among])
steps = sampler.uniform_draws([7, 7, 7], [0, 0, 0], [0, 1, 2]).tolist()
mixed = [float(sampler.uniform_draws([1, 7, 9], [0, 0, 0], [5, each, 8])[1]) for each in range(3)]
print("a hash of the request, alone:", [f"{each:.3f}" for each in steps])
print("a hash, in a batch:          ", [f"{each:.3f}" for each in mixed])
show(sampler.uniform_draws)

# %% [markdown]
# With one generator the neighbours eat numbers of your series. minigen has no generator. It computes
# the random number of a draw from three integers: the request's seed (drawn by the engine if the
# request has none), which of its `n` answers this is (`choice`), and the number of the token (`step`).
# The function is a **hash**, SplitMix64
# ([Steele et al. 2014](https://doi.org/10.1145/2660193.2660195)): it multiplies and shifts 64 bits
# until a change of one input bit changes about half of the output bits. The upper 53 bits (a float64
# holds 53 significant bits), divided by $2^{53}$, are a **uniform number** $u$: at least 0, below 1, and
# all values equally likely. Nothing is remembered between draws. A request that was interrupted and
# computed again (chapter 24) uses the same random numbers.
#
# ### From a uniform number to a token
#
# Put the probabilities of the tokens end to end. They fill the line from 0 to 1. Then look where $u$
# lies. A token that fills 30 % of the line is hit in 30 % of all draws. In other words: the token is
# the first at which the running sum of the probabilities exceeds $u$. This sum is the **cumulative
# distribution function** (CDF), and the method is called **inverse CDF**, or inverse transform
# sampling:
#
# $$t = \min \Big\{\, i : \sum_{j \le i} p_j > u \,\Big\}$$
#
# By hand, with three kept tokens of 0.5, 0.3 and 0.2: $u = 0.61$ lies beyond 0.5, and below 0.5 + 0.3
# = 0.8. The token is the second one. Here are the two first draws of seed 7, on the tokens that
# `top_k=6` keeps:

# %%
six = draw_sampling.cut(logits, top_k=6).softmax(-1)
kept_ids = six.nonzero().flatten().tolist()
picture(
    draw_sampling.staircase(
        {spell(token): float(six[token]) for token in kept_ids},
        {f"seed 7, step {step}: {steps[step]:.2f}": steps[step] for step in (0, 1)},
    ),
    "Inverse CDF. The height of a step is the probability of its token. A uniform number enters at "
    "the left, and goes down at the first step that exceeds it.",
    number="16.6",
)

# %% [markdown]
# A second way to draw is common on GPUs, the **Gumbel trick**: give every token its own uniform
# number $u_i$, and take the token with the largest $l_i - \ln(-\ln u_i)$. That is the token with the
# smallest $-\ln u_i \,/\, p_i$. Read this as a waiting time. On average
# $-\ln u_i$ is 1, so token $i$ takes $1 / p_i$: it comes at the rate $p_i$. The rates add up to 1, and
# each token's share of them, $p_i$, is the probability that it comes first. The trick needs 49,152 random numbers instead of
# one, but no sum over the vocabulary, so it is one pass over the logits. (The harder part of the next
# exercise is to test this with 10,000 draws.)
#
# ## Your turn: the draw
#
# This one is short, and easy to get wrong at its edges. In SGLang, a hash of all ones once became the
# number 1.0 exactly, and drew a token that was practically impossible
# ([issue 25106](https://github.com/sgl-project/sglang/issues/25106)). Think of the two ends of the
# interval, of tokens with probability 0, and of what rounding does to a sum of 49,152 numbers.

# %%
task(16, "draw")

# %%
# exercise: minigen.sampling.sampler.draw
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.sampling.sampler import Logits


def draw(logits: Logits, uniform: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """Return the token at which the cumulative probability exceeds `uniform`: no dropped one."""
    raise NotImplementedError  # your turn


# %%
my_draw = check(16, draw=draw)
with using(16, draw=my_draw):
    params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=2)
    print(f"⟨{llm.generate(rain, params).text!r}⟩")
starts = [rain, "Once upon a time", "Tea is", "The capital of France is"]
seeded = [SamplingParams(temperature=1, seed=each, max_tokens=12, logprobs=0) for each in range(8)]
by_step = lesson.alone_and_among(fast, starts * 2, seeded)
print("compiled step, 8 requests alone and among the others:", f"⟨{by_step}⟩")
first_only = [SamplingParams(temperature=1, seed=each, max_tokens=1, logprobs=0) for each in (0, 1)]
by_torch = lesson.alone_and_among(llm, starts[:2], first_only)
print("torch, 2 requests:", f"⟨{by_torch}⟩")

# %% [markdown]
# In the compiled step a request says the same alone and among others, and its logprobs agree in every
# bit. The *draws* do not depend on the neighbours, because each is a hash of its own request. Here the
# *logits* do not either. In torch they do, in their last digits, because its sums are split
# differently for another number of rows. That moved no draw when this was written; now and then the same
# $u$ falls on the neighbouring token. GPU **kernels** (a kernel is one compiled routine on the device)
# often behave like torch. The remedy is
# [batch-invariant](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) kernels.
#
# ## The order of the stages
#
# All of these settings can stand in one request, so an engine needs an order. minigen's is that of
# vLLM (which only bans earlier), as figure 16.7 shows.
# [llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md) applies
# temperature *last* by default, after top-k, top-p and min-p. Does that matter? Predict: after *The
# capital of France is*, with `temperature=2` and `top_p=0.9`, how many tokens can be drawn if
# temperature comes first? With top-p first you have counted them above.

# %%
warm = sampler.apply_temperature(batch[1:2], torch.tensor([1.2]))
after_min = sampler.keep_min_p(warm, torch.tensor([0.02]))
after_k = sampler.keep_top_k(after_min, torch.tensor([40]))
after_p = sampler.keep_top_p(after_k, p90[:1])
picture(
    draw_sampling.pipeline(
        [
            ("logits", "49,152\ntokens"),
            ("logit\nbias", "+ b"),
            ("penalties", "÷ θ, - α, - β c"),
            ("bans", "end tokens,\nmin_tokens"),
            ("temper-\nature", "÷ 1.2"),
            *(
                (name, f"{num_kept(left)[0]} left")
                for name, left in (
                    ("min-p\n0.02", after_min),
                    ("top-k\n40", after_k),
                    ("top-p\n0.9", after_p),
                )
            ),
            ("draw", "1 token"),
        ],
        {0: "logprobs leave here", 3: "greedy ends here: the largest logit"},
    ),
    "The order of the stages in minigen, with the number of tokens that remain for the rain sentence. "
    "vLLM bans first, with the same result: minus infinity stays minus infinity.",
    number="16.7",
)
guess_order = predict(
    "Tokens that are left if temperature 2 comes before top_p=0.9?", None, within=3
)

# %%
hot = torch.full((3,), 2.0)
first_hot = num_kept(sampler.keep_top_p(sampler.apply_temperature(batch, hot), p90))
first_cut = num_kept(sampler.apply_temperature(sampler.keep_top_p(batch, p90), hot))
for name, hot_first, cut_first in zip(rows, first_hot, first_cut, strict=True):
    hot_count, cut_count = significant(hot_first, 2), significant(cut_first, 2)
    print(f"{name:<12} temperature first: {hot_count:>6} tokens   top-p first: {cut_count:>4}")
k50 = torch.full((3,), 50)
k_first = num_kept(sampler.keep_top_p(sampler.keep_top_k(batch, k50), p90))
p_first = num_kept(sampler.keep_top_k(sampler.keep_top_p(batch, p90), k50))
print(f"top_k=50, then top_p=0.9: {k_first} tokens; the other way round: {p_first}")
guess_order.compare(float(f"{first_hot[0]:.2g}"))

# %% [markdown]
# The same two settings mean a harmless request to one engine, and nonsense to another one. Top-p
# looks at a sum, and at temperature 2 the flat tail holds most of it. Min-p looks at a ratio, and
# temperature 2 only takes its square root, $(p_i / p_{(1)})^{1/2}$: `min_p=0.1` keeps the same tokens as
# `min_p=0.01` at temperature 1. Top-k and top-p also depend on each other: after top-k, 90 % means
# 90 % of what top-k has left. And a penalty before temperature is divided by it: at temperature 2, a
# presence penalty of 1 takes away only ½.
#
# ### Temperature 2 breaks JSON
#
# A program wants one line of JSON, and the prompt shows two of them. How many of 8 answers are valid?
# Predict for temperature 1 and for temperature 2.

# %%
guess_one = predict("Valid answers of 8 at temperature 1?", None, within=1.3)
guess_two = predict("Valid answers of 8 at temperature 2?", None, within=1.3)

# %%
people = (
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41, "city": "Leeds"}\n'
)
cases = {
    "T = 0.7": {"temperature": 0.7},
    "T = 1": {"temperature": 1},
    "T = 1.5": {"temperature": 1.5},
    "T = 2": {"temperature": 2},
    "T = 2, top_p=0.9": {"temperature": 2, "top_p": 0.9},
    "T = 2, min_p=0.1": {"temperature": 2, "min_p": 0.1},
}
params = [
    SamplingParams(seed=seed, max_tokens=26, stop="\n", **settings)
    for settings in cases.values()
    for seed in range(8)
]
found = fast.generate([people + '{"name":'] * len(params), params, progress=False)
valid = {}
for place, name in enumerate(cases):
    eight = found[8 * place : 8 * place + 8]
    lines = ['{"name":' + each.text for each in eight]
    valid[name] = sum(lesson.is_json(line, ("name", "age", "city")) for line in lines)
    longer = sum(each.finish_reason == "length" for each in eight)
    print(
        f"{name:<18} valid: ⟨{valid[name]} of 8⟩  cut at 26 tokens: ⟨{longer}⟩  the first: ⟨{lines[0][:50]}⟩"
    )
guess_one.compare(valid["T = 1"], measured=True)
guess_two.compare(valid["T = 2"], measured=True)

# %% [markdown]
# JSON breaks because a single wrong token is enough, and at temperature 2 wrong tokens come at many
# steps; the end of the line does not come at all within 26 tokens. **Guided decoding** (structured
# output) goes further than a low temperature: a grammar says at each step which tokens keep the text
# valid, and all others are banned, as the end tokens are above. The answer cannot be invalid, unless
# `max_tokens` cuts it off. (**Beam search**, which keeps several unfinished texts, usually finds a more
# probable text than greedy decoding. For open text that is the wrong aim.)
#
# ## The package's version
#
# Each opens after your own has passed. The package's top-p keeps the same tokens as sorting the whole
# vocabulary, but it sorts only those that can matter: the tokens below $(1 - P) / (2V)$ cannot hold
# $1 - P$ together, so the others reach $P$ without them.

# %%
reveal(16, by_hand=my_numbers, keep_top_p=my_top_p, apply_penalties=my_penalties, draw=my_draw)
ordered = rows["a fact"].softmax(-1).double().sort(descending=True).values  # sort all, and count
assert num_kept(kept_p)[0] == 1 + int((ordered.cumsum(0) < 0.9).sum())
assert torch.equal(my_top_p(batch[:1], p90[:1]), kept_p[:1])
uniform = sampler.uniform_draws(range(2000), [0] * 2000, [0] * 2000)
drawn = my_draw(draw_sampling.cut(logits, top_k=6)[kept_ids].expand(2000, -1), uniform)
shares = drawn.bincount(minlength=6) / 2000
assert torch.allclose(shares, six[kept_ids], atol=0.03)
print("top-p agrees with sorting everything, and 2,000 draws with their probabilities")
for name, part in {"the package's top-p": sampler.keep_top_p, "my_top_p": my_top_p}.items():
    count = lesson.numbers_sorted(part, batch[1:2], p90[:1])
    print(f"{name} sorted about {significant(count, 2)} of 49,152 numbers")

# %% [markdown]
# ## The measurement again
#
# The rain sentence once more, and the two numbers from the top: repeated four-word runs, and tokens
# from beyond the likeliest 1,000. The six rows are a grid: three ways to choose (greedy, draw, draw
# with top-p), each without and with a penalty. Each random setting has 5 seeds, and a *95 % bootstrap
# interval*: the 5 answers are drawn again with replacement, 2,000 times, and the interval holds the
# middle 95 % of their means. (Five are few. Where all five agree there is no interval, and still the
# mean is not exact.)

# %%
rungs = {
    "greedy": {"temperature": 0},
    "greedy + penalty": {"temperature": 0, "frequency_penalty": 0.3},
    "draw": {"temperature": 1},
    "draw + penalty": {"temperature": 1, "frequency_penalty": 0.3},
    "draw + top-p": {"temperature": 1, "top_p": 0.9},
    "draw + top-p + penalty": {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.3},
}
common = {"max_tokens": 80, "ignore_eos": True, "logprobs": 0}
measures = {"repeated four-word runs, %": {}, "tokens beyond the likeliest 1,000, %": {}}
requests = {
    name: [
        SamplingParams(seed=seed, **settings, **common)
        for seed in range(5 if settings["temperature"] else 1)
    ]
    for name, settings in rungs.items()
}
params = [each for group in requests.values() for each in group]
found = iter(fast.generate([rain] * len(params), params, progress=False))
print(f"{'':<24}{'repeated runs, %':<22}{'in the tail, %':<20}perplexity")
for name, group in requests.items():
    texts = [next(found) for _ in group]
    values = (
        [100 * lesson.repeated_runs(each.text) for each in texts],
        [100 * lesson.tail_tokens(each.token_ids, each.logprobs) for each in texts],
    )
    means = [lesson.mean_of(each) for each in values]
    for rung, value, mean in zip(measures.values(), values, means, strict=True):
        rung[name] = value, mean
    surprise = [lesson.perplexity_by_logprobs(each.token_ids, each.logprobs) for each in texts]
    shown = [f"⟨{each}⟩" for each in means]
    print(f"{name:<24}{shown[0]:<22}{shown[1]:<20}{mark(sum(surprise) / len(surprise))}")
picture(
    draw_sampling.ladder(measures),
    "Repetition and tail tokens of answers of 80 tokens. Blue dots are single answers (one if "
    "greedy, else five), the diamond is their mean, and the bar its 95 % interval.",
    number="16.8",
)

# %% [markdown]
# Compare rows that differ in one setting. The penalty ends the loop of greedy decoding. Drawing alone
# ends it as well, but it brings the tail: fewer tail tokens than at the first step, because most steps
# are more certain, and still one or more in most answers. Top-p removes most of them; the penalty does
# not. (Top-p is not zero here, because it may keep more than 1,000 tokens where the model is very
# unsure.) In these answers the penalty finds almost no repetition in drawn text, and makes it more
# surprising. The perplexity of plain drawing is nearest to Alice's. Do not read it as quality. A text
# can be as surprising as a good book because its author is inventive, or because a few of its tokens
# are nonsense.
#
# ### What it costs
#
# The sampler reads 49,152 numbers, and the model 135 million weights. But this *is* a small model with
# a large vocabulary (the output head is a fifth of it, chapter 15), and a compiled step is fast.
# Predict: how many per cent of a compiled step would this chapter's sampler, written in torch, take
# with top-p?

# %%
guess_share = predict("Per cent of a compiled step for torch's top-p?", None, within=2)

# %%
shares = {}
print(f"{'':<19}this chapter's sampler, in torch    the compiled sampler")
for name, settings in {
    "greedy": {"temperature": 0},
    "draw": {"temperature": 1},
    "top-p 0.9": {"temperature": 1, "top_p": 0.9},
    "top-p and penalty": {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.3},
}.items():
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, **settings)
    timed = [lesson.step_time(fast, rain, params, by) for by in (sampler.choose_tokens, None)]
    shares[name] = [100 * each.share for each in timed]
    cells = [f"{mark(1e3 * each.choice, 'ms')}  {mark(100 * each.share, '%', 2)}" for each in timed]
    print(f"{name:<19}{cells[0]:<36}{cells[1]}")
slow = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)
in_float32 = 100 * lesson.step_time(llm, rain, slow).share
print(f"in the float32 engine, torch's top-p takes {mark(in_float32, '% of the step', 2)}")
guess_share.compare(shares["top-p 0.9"][0], "%", measured=True)

# %% [markdown]
# Milliseconds, and shares of a compiled step. Sampling is far from free there, and that is why minigen
# has a second sampler, compiled, for its compiled step (`fast` uses it). It does the same and
# sorts still less: it counts tokens in bins of similar probability, and sorts only the one bin
# in which the cut lies. In the float32 engine, whose step takes many times as long, torch's sampler is
# a small part of the step. So whether sampling matters depends on the step beside it, and on the
# setting: a flatter distribution has more candidates to sort.
#
# ## Claims
#
# What one often hears or reads about sampling, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
ctrl = SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=80, ignore_eos=True)
ctrl_repeated = lesson.repeated_runs(fast.generate(rain, ctrl).text)
verdicts(
    "16",
    Claim(
        "Choosing the most probable text gives repetitive loops in open-ended writing",
        f"{mark(100 * repeated, '%', 2)} of the greedy text's four-word runs are repetitions, "
        f"{lesson.repeated_runs(ALICE):.0%} of Alice's",
        holds(repeated > 0.2),
        "every repetition makes the next one more likely",
        "[Holtzman et al. 2019](https://arxiv.org/abs/1904.09751)",
        measured=True,
    ),
    Claim(
        "Temperature 0 keeps a model from making things up",
        f"greedy says{spell(int(capital.argmax()))} is the capital of Australia, with {float(capital.max()):.0%}",
        holds(spell(int(capital.argmax())) == " Canberra"),
        "greedy decoding hides the model's doubt; it does not remove it",
    ),
    Claim(
        "With greedy decoding, a repetition penalty of about 1.2 removes repetition",
        f"repeated runs fall from {mark(100 * repeated, '%', 2)} to {mark(100 * ctrl_repeated, '%', 2)}",
        holds(ctrl_repeated < 0.05),
        "it did here; it also penalizes the prompt, and depends on where zero lies",
        "[Keskar et al. 2019](https://arxiv.org/abs/1909.05858)",
        measured=True,
    ),
    Claim(
        "Min-p keeps text coherent at high temperatures where top-p does not",
        f"at temperature 2, ⟨{valid['T = 2, min_p=0.1']} of 8⟩ lines of JSON are valid with min-p 0.1, "
        f"⟨{valid['T = 2, top_p=0.9']} of 8⟩ with top-p 0.9",
        holds(valid["T = 2, min_p=0.1"] > valid["T = 2, top_p=0.9"]),
        "if temperature comes first; Schaeffer et al. 2025 found no gain in quality or diversity once "
        "the other samplers were tuned as much",
        "[Nguyen et al. 2024](https://arxiv.org/abs/2407.01082)",
        measured=True,
    ),
    Claim(
        "Temperature and top_p mean the same in every engine",
        f"T = 2 with top_p = 0.9 leaves about {significant(first_hot[0], 2)} tokens in vLLM's order, "
        f"{first_cut[0]} in llama.cpp's",
        holds(first_hot[0] == first_cut[0]),
        "engines apply the two in different orders",
    ),
    Claim(
        "A seed gives the same answer whatever else the server computes",
        f"in this test, in the compiled step, ⟨{by_step}⟩; in torch, ⟨{by_torch}⟩",
        holds(by_step.same_answers == by_step.answers),
        "each draw is a hash of its own request; where the logits depend on the batch, as in torch, "
        "a draw can still fall on the neighbouring token",
        measured=True,
    ),
    Claim(
        "Sampling costs next to nothing beside the model",
        f"top-p takes {mark(shares['top-p 0.9'][1], '%', 2)} of a compiled step by the compiled sampler, "
        f"{mark(shares['top-p 0.9'][0], '%', 2)} by torch's, and {mark(in_float32, '%', 2)} of a float32 step",
        holds(shares["top-p 0.9"][1] < 5),
        "judged by the compiled sampler, and 5 % of its step; a fifth of this model is its vocabulary, "
        "and the step is fast",
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - Greedy decoding loops. Drawing from all tokens derails: the tail holds a few per cent at a single
#   position, and that makes a nonsense token likely over a whole answer.
# - Temperature divides the logits: greedy toward 0, all tokens equal toward infinity. It never changes
#   their order.
# - Top-k cuts at a rank, top-p at a sum of probabilities, min-p at a share of the likeliest. The last
#   two follow the model's certainty.
# - The repetition penalty divides or multiplies, and looks at prompt and answer. Presence and
#   frequency subtract, once or for each occurrence, and look at the answer only (not in llama.cpp).
# - A logit bias adds to chosen tokens. Logprobs report the model's raw probabilities, whatever the
#   settings are.
# - A draw is a hash of (seed, answer, step), turned into a uniform number, which falls on a token by
#   the cumulative probabilities. So neighbours in a batch change no draw; they may change the logits.
# - The order of the stages is part of what the settings mean, and engines differ.
# - In a fast step, sampling is a cost worth a kernel of its own.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A request has temperature 1.5, top_k 1 and top_p 0.3. Which of the three can be
# removed without any effect?</summary>
# Temperature and top_p. With top_k 1 only the likeliest token is left, and temperature never changes
# which one that is. Top-p always keeps at least one token.</details>
#
# <details><summary>2. Two requests with the same seed and prompt ask for n = 1 and n = 3. Is the answer
# of the first among the answers of the second?</summary>
# Yes, it is answer 0: its draws are hashes of (seed, 0, step) in both, as long as the batch does not
# change the logits. Answers 1 and 2 have other hashes.</details>
#
# <details><summary>3. A server's answers never contain a comma after the first page. Which setting would
# you look at first?</summary>
# The frequency penalty. After 40 commas, a penalty of 0.3 has subtracted 12 from the comma's logit,
# which divides its odds against tokens that have not occurred by 160,000.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/)** samples the whole batch on
#   the GPU, in the order above. On NVIDIA GPUs its top-k and top-p are
#   [by default](https://github.com/vllm-project/vllm/pull/40376) those of
#   [FlashInfer](https://flashinfer.ai/2025/03/10/sampling.html): one kernel that draws a token,
#   accepts it if it lies in the top-p set, and otherwise draws again above a higher threshold: several
#   passes over the vocabulary, but no sort. Where FlashInfer cannot be used (on other hardware, or with
#   a seed), kernels of its own mostly search for the threshold, without a sort
#   ([Qrita](https://arxiv.org/abs/2602.01518)), and the draw is a form of the Gumbel trick. In its older
#   model runner a request with a seed has a generator of its own. The newer one, the
#   [default for dense models](https://github.com/vllm-project/vllm/pull/44443), hashes seed, position
#   and token into Gumbel noise.
# - **[SGLang](https://github.com/sgl-project/sglang)** calls FlashInfer as well. Its deterministic mode
#   [hashes seed and position](https://github.com/sgl-project/sglang/pull/10678) into Gumbel noise.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md)** runs a
#   chain of samplers whose order you can set, by default on the CPU. `--backend-sampling`
#   (experimental) moves it to the GPU: [one report](https://github.com/ggml-org/llama.cpp/issues/27050)
#   has 706 tokens per second without it and 1,046 with it, for 32 answers at once. One sampler, DRY,
#   penalizes a token if it would continue a repeated *sequence*, and leaves single words such as *the*
#   alone. **Ollama** has its own defaults (`top_k=40`, `top_p=0.9`, temperature 0.8), so the same
#   model sounds different there.
# - vLLM, SGLang, TensorRT-LLM and **MLC-LLM** ban tokens by a grammar with
#   [XGrammar](https://arxiv.org/abs/2411.15100), computed on the CPU while the GPU computes the step.
#
# ## Further reading
#
# - [The Curious Case of Neural Text Degeneration](https://arxiv.org/abs/1904.09751), Holtzman et al.
#   2019: loops, the tail, and top-p.
# - [Turning Up the Heat](https://arxiv.org/abs/2407.01082), Nguyen et al. 2024, introduces min-p, and
#   [a critical analysis](https://arxiv.org/abs/2506.13681), Schaeffer et al. 2025, doubts its gain.
#   Read both.
# - [CTRL](https://arxiv.org/abs/1909.05858), Keskar et al. 2019, section 4.1: the repetition penalty,
#   which there only divides.
# - [Defeating Nondeterminism in LLM Inference](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/),
#   Thinking Machines 2025: why equal requests give different answers.
# - [topk_topp_sampler.py](https://github.com/vllm-project/vllm/blob/main/vllm/v1/sample/ops/topk_topp_sampler.py)
#   of vLLM: the production version of this chapter.
#
# **Next:** [17 · Prefill, decode, and the memory wall](17_dense_cache.ipynb): a token costs a whole
# pass over the text so far, and most of that work need not be done twice.

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
# # Exercises of chapter 16
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/16_sampling.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/16_sampling.ipynb)
#
# The chapter: [Choosing the next token](../notebooks/16_sampling.ipynb). Its exercises take about 65 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `by_hand` | warm-up | 5 | 15 min |
# | `keep_top_p` | core | 10 | 15 min |
# | `apply_penalties` | core | 10 | 15 min |
# | `draw` | stretch | 15 | 20 min |
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
# ## by_hand
#
# *Warm-up, 5 points, about 15 minutes.*
#
# Work out ten numbers about four tokens, with pencil and paper, and return them by name. The docstring lists them. Numbers that are not whole count as right within one percent.

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
mine = check(16, by_hand=by_hand)

# %% [markdown]
# Try it:

# %%
from minigen.sampling.sampler import keep_top_p, apply_temperature
import torch

four = torch.tensor([[0.50, 0.30, 0.15, 0.05]]).log()
half = apply_temperature(four, torch.tensor([0.5]))
print("at temperature 1/2:", half.softmax(-1), "you said", mine()["A at temperature 1/2"])
print("kept by top_p 0.9:", keep_top_p(half, torch.tensor([0.9], dtype=torch.float64)))

# %% [markdown]
# **Harder.** Below which temperature does top_p = 0.9 keep only A? Find it with a program of four lines, and check it with `apply_temperature` and `keep_top_p` of `minigen.sampling.sampler`.

# %% [markdown]
# ## keep_top_p
#
# *Core, 10 points, about 15 minutes.*
#
# Write the filter of top-p (nucleus) sampling for a whole batch. Each row of `logits` keeps its most likely tokens: as few as are needed for the sum of their probabilities to reach the row's own `top_p`. Of equally likely tokens, those with lower ids come first. All other logits become minus infinity. Return new logits, and leave the given ones unchanged.

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
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(16, keep_top_p=mine):
    params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=24)
    print(llm.generate("The old lighthouse", params).text)

# %% [markdown]
# **Harder.** Do it without sorting all 49,152 tokens. Which tokens can be left out before sorting, and how do you know that none of them would be kept? `numbers_sorted` of `minigen_course.ch16_sampling.lesson` counts how many numbers your version sorts.

# %% [markdown]
# ## apply_penalties
#
# *Core, 10 points, about 15 minutes.*
#
# Write the three penalties for a whole batch. First, `repetition` divides a positive logit and multiplies a negative one, for tokens of the prompt or the output; a token that is in both is penalized once. Then, for tokens of the output only, subtract `presence` once, and `frequency` once per occurrence. Tokens of the prompt do not count for presence and frequency. Each row has its own three values. Return new logits, and leave the given ones unchanged.

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
mine = check(16, apply_penalties=apply_penalties)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(16, apply_penalties=mine):
    params = SamplingParams(temperature=0, frequency_penalty=0.8, max_tokens=40)
    print(llm.generate("I like tea. I like tea. I", params).text)

# %% [markdown]
# **Harder.** llama.cpp penalizes only what occurred among the last 64 tokens (`repeat_last_n`). Which of the arguments must change for that, and who computes it? Write the function that computes it from `output_ids` and a window.

# %% [markdown]
# ## draw
#
# *Stretch, 15 points, about 20 minutes.*
#
# Draw one token per row by inverse CDF. Row r gets the first token, in the order of the ids, at which the cumulative probability exceeds `uniform[r]`. A token whose logit is minus infinity must never be drawn, neither for `uniform` 0 nor for the largest float64 below 1, in any vocabulary: mind what rounding does to the last cumulative sum. Compute the cumulative sum in float64. Return token ids of dtype int64, and leave the logits unchanged.

# %%
# exercise: minigen.sampling.sampler.draw
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.sampling.sampler import Logits


def draw(logits: Logits, uniform: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """Return the token at which the cumulative probability exceeds `uniform`: no dropped one."""
    raise NotImplementedError  # your turn


# %%
mine = check(16, draw=draw)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(weights="float32")
with using(16, draw=mine):
    params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=24)
    print(llm.generate("The old lighthouse", params).text)

# %% [markdown]
# **Harder.** Draw by the Gumbel trick instead: the argmax of logits + g, where each token has its own g = -log(-log u). Show with 10,000 draws that both follow the same probabilities. What does the trick not need that your version needs, and what does it need that yours does not?

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
# # Exercises of chapter 36
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/36_speculative.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/36_speculative.ipynb)
#
# The chapter: [Speculative decoding: several tokens in a step](../notebooks/36_speculative.ipynb). Its exercises take about 110 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `ngram_drafts` | warm-up | 5 | 15 min |
# | `accepted_tokens` | warm-up | 5 | 5 min |
# | `accept_or_redraw` | core | 10 | 20 min |
# | `after_verifying` | core | 10 | 15 min |
# | `best_count` | core | 10 | 15 min |
# | `tree_mask` | stretch | 15 | 20 min |
# | bug hunt: `first_draft` | core | 10 | 20 min |
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
# ## ngram_drafts
#
# *Warm-up, 5 points, about 15 minutes.*
#
# Propose drafts by prompt lookup. Take the last `longest` tokens of the text and look for the same tokens earlier in it; if they never occurred, try one token less, and so on, down to `shortest`. Of several earlier occurrences the latest one counts, and it must have at least one token behind it, but it may overlap with the end. Return `count` tokens from behind it. If the text ends before that, go on from the same place again: after `[7, 8, 7, 8]`, five drafts are `[7, 8, 7, 8, 7]`. Return an empty list if there is no occurrence. `longest` may be more than the text has, and an empty text gives no drafts.

# %%
# exercise: minigen_course.ch36_speculative.reference.ngram_drafts
from collections.abc import Sequence


def ngram_drafts(token_ids: Sequence[int], count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` drafts: the tokens that followed when the last few tokens occurred before.

    The longest end of the text that occurs before decides, of `longest` down to `shortest` tokens,
    and its latest occurrence with a token behind it. Where the text ends before there are `count`
    tokens, the drafts go on from that place again. Without such an occurrence there are none.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, ngram_drafts=ngram_drafts)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams
from minigen_course.ch36_speculative.reference import TextProposer

llm = LLM.load(proposer=TextProposer(mine), speculative_config={"num_speculative_tokens": 6})
text = "Mon, Tue, Wed, Thu, Fri. " * 3 + "Mon,"
answer = llm.generate(text, SamplingParams(temperature=0, max_tokens=24))
counts = llm.engine.speculator.counts
print(f"{answer.text!r}: {counts.accepted} of {counts.drafted} drafts were right")

# %% [markdown]
# **Harder.** Your function looks through the whole text in every step. Keep a dict from every run of `shortest` to `longest` tokens to the latest place behind it, and extend it by the new tokens only. How many entries does a text of n tokens need at most?

# %% [markdown]
# ## accepted_tokens
#
# *Warm-up, 5 points, about 5 minutes.*
#
# Write the rule of sample and match. A step has verified some `drafts`, and the model's own token was sampled at each place: `sampled[i]` after the first i drafts, so `sampled` has one token more than `drafts`. A draft is right if it equals the model's own token at its place and all drafts before it are right. Return the tokens that the step gives: the right drafts, and the model's own token after the last right one.

# %%
# exercise: minigen_course.ch36_speculative.reference.accepted_tokens
from collections.abc import Sequence


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that a step with drafts gives: the right drafts, and one token more.

    `sampled` has the model's own token at each place: `sampled[i]` was drawn after the first i
    drafts, so there is one more than drafts. A draft is right if it equals the model's own token
    and all drafts before it are right.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, accepted_tokens=accepted_tokens)

# %% [markdown]
# Try it:

# %%
print(mine([5, 6, 7], [5, 6, 7, 8]), mine([5, 6, 7], [5, 9, 7, 8]), mine([5, 6, 7], [4, 6, 7, 8]))

# %% [markdown]
# **Harder.** An answer may end inside of the run: at a token of `stop_ids`, or after `max_tokens`. Cut your result accordingly. How many drafts did the step accept then: those that are right, or those that are in the answer?

# %% [markdown]
# ## accept_or_redraw
#
# *Core, 10 points, about 20 minutes.*
#
# Write the classical rule at one place. The token `drafted` was drawn from the drafter's probabilities q (`draft`), and the result must be distributed as the model's probabilities p (`target`). Accept the drafted token if `accept_draw` is below min(1, p / q) of that token. Otherwise draw a token from max(0, p - q), divided by its sum: the first one at which the cumulated probability exceeds `redraw`. Both draws are uniform in [0, 1), so that 1 - 2^-53 is the largest. q may be 0 where p is not, and p and q may be equal. Rounding may keep the sum below 1; the last token with a chance is returned even then.

# %%
# exercise: minigen_course.ch36_speculative.reference.accept_or_redraw
import numpy as np
from jaxtyping import Float64


def accept_or_redraw(
    target: Float64[np.ndarray, " vocab"],
    draft: Float64[np.ndarray, " vocab"],
    drafted: int,
    accept_draw: float,
    redraw: float,
) -> int:
    """Return a token that is distributed as `target` if `drafted` was drawn from `draft`.

    Both are probabilities p and q over the vocabulary. The drafted token is accepted if
    `accept_draw` is below min(1, p / q) of that token. Otherwise the token is drawn from
    max(0, p - q), divided by its sum: it is the first one at which the cumulated probability
    exceeds `redraw`. Both draws are uniform in [0, 1), so 1 - 2^-53 is the largest.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, accept_or_redraw=accept_or_redraw)

# %% [markdown]
# Try it:

# %%
import numpy as np

target, draft = np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.7, 0.1])
draws, found = np.random.default_rng(1), np.zeros(3)
for _ in range(20_000):
    found[mine(target, draft, int(draws.choice(3, p=draft)), draws.random(), draws.random())] += 1
print("wanted:", target, "found:", found / found.sum())

# %% [markdown]
# **Harder.** With the temperature 0, p is 1 for one token. And a drafter such as prompt lookup proposes one token with q = 1. What does the rule say in each of the two cases? Show that in the second case the chance of acceptance is the same as with sample and match, and find a pair p, q for which sample and match accepts less.

# %% [markdown]
# ## after_verifying
#
# *Core, 10 points, about 15 minutes.*
#
# Roll a block table back. Before a step, a sequence had `num_known` tokens, and keys and values of all but the last one. The step computed those of the last one and of `num_drafts` drafts, into the slots of the sequence's `num_blocks` blocks of `block_size` tokens. `num_right` drafts were right, and one token more was sampled after them. Return three numbers: how many tokens have valid keys and values now, how many blocks are full of them (only these may be published to the prefix cache), and how many blocks must be allocated for the next step, if it verifies `num_drafts` drafts again. Wrong drafts are not erased, because the next step writes over them. So the sequence keeps all its blocks.

# %%
# exercise: minigen_course.ch36_speculative.reference.after_verifying
from minigen.kv_cache.block_allocator import blocks_needed


def after_verifying(
    num_known: int, num_drafts: int, num_right: int, num_blocks: int, block_size: int
) -> tuple[int, int, int]:
    """Return what a sequence has after a step that verified drafts.

    Before the step it had `num_known` tokens, and keys and values of all but the last one. The step
    computed those of the last one and of `num_drafts` drafts, of which `num_right` are right, into
    the slots of its `num_blocks` blocks. The result: the number of tokens with valid keys and
    values, how many blocks are full of them (the prefix cache may have these), and how many blocks
    the next step lacks, if it verifies `num_drafts` drafts again.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, after_verifying=after_verifying)

# %% [markdown]
# Try it:

# %%
known, blocks = 14, 5  # 4 drafts need slots for 18 tokens
for right in (3, 0, 4, 1):
    computed, published, missing = mine(known, 4, right, blocks, 4)
    print(f"{right} of 4 right: {computed} valid, {published} blocks published, {missing} missing")
    known, blocks = computed + 1, blocks + missing

# %% [markdown]
# **Harder.** When memory is short, blocks that hold no valid token could be given back at once. How many are these? Find a case in which giving them back costs an allocation in the next step, and one in which it does not, because then fewer drafts are asked for.

# %% [markdown]
# ## best_count
#
# *Core, 10 points, about 15 minutes.*
#
# Choose the number of drafts per step. A draft is right with the probability `acceptance` = a if those before it are, so a step with k drafts gives 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a) tokens on average. `step_costs[k]` is the time of a step with k drafts, which has k + 1 rows, as a multiple of the time of a step without drafts. Return the k from 0 to `len(step_costs) - 1` with the most tokens per time, and the smallest of several that are equally good. a may be 0 and 1.

# %%
# exercise: minigen_course.ch36_speculative.reference.best_count
from collections.abc import Sequence


def best_count(acceptance: float, step_costs: Sequence[float]) -> int:
    """Return the number of drafts per step that gives the most tokens per second.

    `step_costs[k]` is the time of a step with k drafts (k + 1 rows), as a multiple of the time
    without drafts. A draft is right with the probability `acceptance` if those before it are, so k
    drafts give 1 + a + a^2 + ... + a^k tokens on average. Of equally good numbers, the smallest.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, best_count=best_count)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

costs = [1.0, 1.2, 1.21, 1.22, 1.26, 1.3, 1.35, 1.39]  # of a step with 0, 1, 2, ... drafts
for acceptance in (0.1, 0.5, 0.9):
    print(f"acceptance {acceptance}: {mine(acceptance, costs)} drafts")
most = max(mine(0.8, costs), 1)
config = {"method": "ngram", "num_speculative_tokens": most, "adaptive": False}
llm = LLM.load(speculative_config=config)
text = "Mon, Tue, Wed, Thu, Fri. " * 3 + "Mon,"
print(llm.generate(text, SamplingParams(temperature=0, max_tokens=24)).text)
counts = llm.engine.speculator.counts
print(f"with up to {most} drafts: {counts.accepted} of {counts.drafted} were right")

# %% [markdown]
# **Harder.** In a batch, the rows of all sequences share one step. Given the acceptance of each sequence and the cost of a step by its number of rows, choose the number of drafts of each, so that all together get the most tokens per time. Which draft should get the next row?

# %% [markdown]
# ## tree_mask
#
# *Stretch, 15 points, about 20 minutes.*
#
# Verify several continuations in one step. Drafts form a tree: node i continues the node `parents[i]`, or, if that is -1, the text itself, which every node sees anyway. Return an array of bool, nodes by nodes: True at [i, j] if node i attends to node j. A node attends to itself and to its ancestors: not to its siblings, not to their children, and not to its own children. A parent comes before its children; raise ValueError, with a sentence, for one that does not, and for a number below -1.

# %%
# exercise: minigen_course.ch36_speculative.reference.tree_mask
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool


def tree_mask(parents: Sequence[int]) -> Bool[np.ndarray, "nodes nodes"]:
    """Return which nodes of a tree of drafts each node attends to: its ancestors and itself.

    `parents[i]` is the node before node i, and -1 if node i follows the text itself. Raises
    `ValueError` for a parent that does not come before its child.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(36, tree_mask=tree_mask)

# %% [markdown]
# Try it:

# %%
parents = [-1, 0, 0, 1, 1, 2, 2]
for node, row in enumerate(mine(parents)):
    print(node, "".join("■" if each else "·" for each in row))

# %% [markdown]
# **Harder.** A node's position in the text is the length of the text plus its depth, so siblings share a position. Compute the positions, and verify a tree of two continuations with chapter 14's attention and your mask: its rows should be close to those of two steps, one for each continuation.

# %% [markdown]
# ## A bug hunt: first_draft
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *With speculation on, most answers are the same as without, and they come faster. But now and then there is a word in them that does not belong there, and it often stands where a sentence takes a turn. With a drafter that guesses badly, nearly every answer is nonsense.* Speculation must not change a text, so a faster answer that is another one is a bug. The engine lattice had this one with drafts by prompt lookup (issue 243): of its drafts of a single token, the model never rejected any.
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch36_speculative.hunt
from minigen_course.ch36_speculative.hunt import NextTokens, Propose, Speculate


def speculate(
    next_tokens: NextTokens, propose: Propose, prompt: list[int], num_tokens: int, count: int
) -> list[int]:
    """Return the `num_tokens` tokens that a model writes after a prompt, in fewer steps.

    `next_tokens(token_ids)` is one step of the model. It returns one token per place: number i is
    the model's own next token after `token_ids[: i + 1]`. `propose(token_ids, count)` returns at
    most `count` drafts, right or wrong. The result is the same as without drafts.
    """
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        drafts = propose(list(token_ids), count)
        own = next_tokens([*token_ids, *drafts])[-max(len(drafts), 1) :]
        run = drafts[:1]
        for draft, token_id in zip(drafts[1:], own, strict=False):
            if draft != token_id:
                break
            run.append(draft)
        token_ids += [*run, own[max(len(run), 1) - 1]]
    return token_ids[len(prompt) : len(prompt) + num_tokens]


def test_drafts(speculate: Speculate) -> None:
    """Assert what every correct `speculate` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(36, test=test_drafts, mended=speculate)

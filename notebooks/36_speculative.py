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
# # 36 · Speculative decoding: several tokens in a step
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/36_speculative.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/36_speculative.ipynb)
#
# An answer grows by one token per step, and each step reads all weights of the model. The reading takes
# most of the time, and the processor's arithmetic units wait meanwhile (chapter 17). Batching uses them for
# other requests (chapter 24). But what if there is only one request? Then the engine can guess. It guesses
# the next few tokens by some cheap means, and lets the model check all of them in a single step. Right
# guesses are tokens that cost almost nothing. This is
# **[speculative decoding](../docs/glossary.md#speculative-decoding)**. A guessed token is called a
# **[draft](../docs/glossary.md#draft)**, and the part that guesses is the
# **[proposer](../docs/glossary.md#proposer)** (in papers often the *drafter* or *draft model*).
#
# **Afterwards you can** measure what further rows of a step cost, propose drafts by prompt lookup, verify
# them so that no text changes at any temperature, prove and test the classical rule of acceptance, compute
# how many drafts pay, roll a block table back, and say when speculation helps and when it hurts.
#
# **You need** chapter 16 (drawing a token by a uniform number), chapter 17 (why a decode step waits for
# memory), chapter 22 (block tables), chapter 24 (the scheduler) and chapter 35 (what weights in 4 bits are).
# **Time:** about 60 minutes to read and try, about 110 for the [exercises](../exercises/36_speculative.ipynb).
#
# **Where we are:** prefill → **decode, several tokens per step** → text.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | decode | memory bandwidth | L3 engine | `--speculative-config` | tokens per step |
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
import numpy as np

from minigen import SamplingParams
from minigen.kernels.cpu.compile import compile_step
from minigen.speculative.ngram import NgramProposer
from minigen.speculative.suffix import SuffixProposer
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    hunt,
    load_model,
    mark,
    predict,
    reveal,
    task,
    verdicts,
    within,
)
from minigen_course.ch36_speculative import figures as draw
from minigen_course.ch36_speculative import lesson, reference
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.lab.cost_model import num_parameters

compile_step("bfloat16")  # once per machine; it takes a while
plain = load_model(weights="bfloat16")
in_4_bits = load_model(weights="int4")
chapter_map("scheduler", "runner", "sampler", "loop")

# %% [markdown]
# `plain` decodes as in the chapters before, with weights in bfloat16 and a compiled step. `in_4_bits` is the
# same model with 4-bit weights. Texts and numbers in ⟨⟩ depend on the machine.
#
# ## A number that hurts: one token per step
#
# A program holds a list, and asks for the same list with one field renamed. Nearly every token of the
# answer stands in the prompt already. Nevertheless, the engine takes one step for each of the 64 tokens, and
# each step reads all weights.
#
# How much of the machine does such a step use? Try it: give the step more rows. A **row** is a token whose
# logits the step computes. Here all rows belong to one sequence: its last token and some tokens after it,
# which are made up. One row is the usual decode step. Predict: how many times as long does a step over eight
# rows take?

# %%
guess_rows = predict("A step over 8 rows takes how many steps over one row?", None, within=1.3)

# %%
rows_seconds = lesson.row_seconds(plain, context=256, counts=range(1, 9))
here = lesson.relative(rows_seconds)
guess_rows.compare(here[8], "steps", measured=True)
print("rows:   ", "  ".join(f"{rows:>6}" for rows in here))
print("times:  ", "  ".join(mark(each, digits=3) for each in here.values()))
stored = {form: lesson.relative(each) for form, each in lesson.STORED_STEPS.items()}
few = {form: {rows: each[rows] for rows in (1, 2, 4, 8)} for form, each in stored.items()}
picture(
    draw.step_costs(
        {
            "bfloat16, here": here,
            "bfloat16, stored": few["bfloat16"],
            "4 bits, stored": few["int4"],
        }
    ),
    "The time of a step by its number of rows, in steps of one row. The stored values are from chapter "
    "34's benchmark, where each row is a sequence of its own.",
    number="36.1",
)
edit, greedy = lesson.editing(5), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
before = lesson.compared({"plain": plain}, [edit], greedy, repeats=1)["plain"]
megabytes = 2 * num_parameters(plain.config) / 1e6
print(f"each step reads {megabytes:.0f} MB of weights, two bytes for each")
print(f"{greedy.max_tokens} tokens: {before.steps} steps, ", end="")
print(mark(1000 * min(before.seconds) / 64, "ms per token"))

# %% [markdown]
# Eight rows cost far less than eight steps, since the weights are read once for all of them. (In bfloat16
# the kernel of chapter 34 takes rows in tiles of up to eight with AVX-512, of up to four with AVX2, and
# the rest in tiles of four, two and one. Each tile goes through the weights again, though from the
# processor's cache. So with AVX-512 seven rows, three tiles, may take longer than eight, one tile.) In 4
# bits the reading is shorter, so the arithmetic shows earlier: the weights' form decides how many rows are
# nearly free. Where the two meet is the ridge of chapter 17's roofline.
#
# If the next seven tokens were known, one step could check all of them: the logits after each token
# say what the model itself would have chosen there. That is all that verification needs.
#
# ## The smallest version that works, and why it is wrong
#
# Where do guesses come from? Take the last few tokens of the text and look for the same tokens earlier.
# What followed there may follow here. This is **[prompt lookup](../docs/glossary.md#prompt-lookup)**. (A run of
# n tokens is an **n-gram**, so engines call it `ngram`.)
#
# When is a guess good enough? A tempting rule: accept it if the model finds it *plausible*, say if it is
# among the model's five likeliest tokens. The first draft that is not, and all drafts after it, are dropped,
# and the model's likeliest token takes their place. `lenient_answer` does this in a loop around the engine's
# runner, with up to eight drafts per step. It continues a story at temperature 0 for 64 tokens, with the
# rank 1 (the draft must be the likeliest token), 5, and 50. Predict the steps with rank 50.

# %%
guess_lenient = predict("Steps for 64 tokens if drafts of rank 50 are accepted?", None, within=1.5)

# %%
story_ids = plain.tokenizer.encode(lesson.story(1))
its_own = plain.generate(story_ids, greedy).token_ids
same_start, lenient_steps = {}, {}
for rank in (1, 5, 50):
    found, lenient_steps[rank] = lesson.lenient_answer(plain, story_ids, rank, 8, 64)
    same_start[rank] = lesson.num_matching(found, its_own)
    print(f"rank {rank}: ⟨{lenient_steps[rank]}⟩ steps, ", end="")
    print(f"the first ⟨{same_start[rank]}⟩ of 64 tokens are the model's")
    print(f"   ⟨{plain.tokenizer.decode(found)!r}⟩")
guess_lenient.compare(lenient_steps[50], "steps", measured=True)
print(f"rank 1 gives the model's own text: {same_start[1] == 64}")

# %% [markdown]
# The lenient rules need fewer steps, and the text is no longer the model's. Worse, the error feeds itself:
# prompt lookup proposes what was said before, a lenient rule accepts it, and so it has been said twice.
# The story repeats itself. A benchmark of speed alone would report a success.
#
# With rank 1 the text is the model's, token for token, and some drafts are still right. So the rule must be:
# **keep what the model itself would have written, and nothing else.** At temperature 0 that is simple. At
# other temperatures the model draws at random, and it is less clear what *would have written* means. Two
# answers are below.
#
# ## The idea: draft, verify in one pass, keep what matches
#
# 1. **Draft.** A proposer guesses $k$ tokens $d_1 \dots d_k$ after the text.
# 2. **Verify.** One step computes the last token and the $k$ drafts, like a small prefill: $k + 1$ rows of
#    logits. Row $i$ says what the model would have after the first $i$ drafts. Draw from each row as usual:
#    $s_0 \dots s_k$.
# 3. **Keep what matches.** The drafts are right as long as $d_1 = s_0$, $d_2 = s_1$, and so on. With $j$ of
#    them right, the step gives $j + 1$ tokens: the $j$ drafts, and $s_j$, which the model drew itself after
#    the last right one. The rows behind it were computed after a wrong token, so they are dropped.
#
# So a step gives at least one token, however bad the drafts are, and at most $k + 1$.
#
# **By hand.** The text is *The old lamp*, and the drafts are *and the old stone was*. The picture has the
# tokens that the model draws at each place. How many tokens does the step give?
#
# ## Your turn: what a step gives

# %%
picture(
    draw.by_hand(
        ["The", " old", " lamp"],
        [" and", " the", " old", " stone", " was"],
        [" and", " the", " new", " lamp", " shone", " in"],
    ),
    "Drafts after a text, and below them the model's own token at each place. Two drafts are right, "
    "and the model's own token follows them. What comes after it was computed for another text.",
    number="36.2",
)
task(36, "accepted_tokens")


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
my_accepted = check(36, accepted_tokens=accepted_tokens)
print(my_accepted([5, 6, 7], [5, 6, 7, 8]), my_accepted([5, 6, 7], [5, 9, 7, 8]))

# %% [markdown]
# ## Your turn: prompt lookup
#
# Now the proposer. The task below says exactly what it finds; the package has the same rule with an
# index, so that it does not search the whole text at every step. Your function then drafts for the engine:
# `LLM.load(proposer=...)` takes any object with the methods `propose` and `end`, and `TextProposer` makes
# one of a function. (For a proposer of the package it is `speculative_config={"method": "ngram"}`.) A wrong
# draft costs time, but never changes a text, so the worst that your proposer can do is to be slow.

# %%
task(36, "ngram_drafts")

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
my_drafts = check(36, ngram_drafts=ngram_drafts)
eight = {"num_speculative_tokens": 8, "adaptive": False}  # always ask for 8 drafts
mine = load_model(
    weights="bfloat16", proposer=reference.TextProposer(my_drafts), speculative_config=eight
)
with mine.count_work() as work:
    assert mine.generate(edit, greedy).token_ids == before.answers[0]
print(f"steps for {greedy.max_tokens} tokens: {before.steps} without drafts, ", end="")
whose = "yours" if my_drafts is not reference.ngram_drafts else "the course's own"
print(f"⟨{work.steps}⟩ with {whose}; the same text (it is checked)")

# %% [markdown]
# ## Why no text changes
#
# At temperature 0, $s_i$ is the likeliest token, and nothing is random. At other temperatures the engine
# draws: it takes a uniform number $u \in [0, 1)$ and returns the first token at which the cumulated
# probability exceeds $u$ (chapter 16). And $u$ does not come from a generator with a state. It is a hash of
# the request's seed, the choice, and **the place in the answer**:
#
# $$s_i = F_{x\,d_1 \dots d_i}^{-1}\big(u_{n+i}\big), \qquad u_t = \text{hash}(\text{seed}, \text{choice}, t)$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x$ | the text so far, with $n$ tokens of answer | `sequence` |
# | $d_1 \dots d_i$ | the first drafts | `sequence.after(drafts[:i])` |
# | $F_y$ | the cumulated probabilities after the text $y$, with all filters and penalties | `Sampler` |
# | $u_t$ | the number of the place $t$ | `uniform_draws(seed, choice, t)` |
# | $s_i$ | the model's own token at that place | `SampledToken` |
#
# If the first $i$ drafts are right, then $x\,d_1 \dots d_i$ *is* the text that the engine would have written
# without drafts, and $u_{n+i}$ is the number that it would have used. So $s_i$ is the token that it would
# have drawn. By induction the whole text is the same, whatever the proposer does. This rule is called
# **[sample and match](../docs/glossary.md#sample-and-match)** here. It turns a statement about probabilities
# into one about equality, and equality can be tested, for several seeds and temperatures: texts written one
# by one without drafts are compared with texts written in a batch with drafts, by four proposers. One of
# them is always wrong, and one has its prompts cut into small chunks.

# %%
# The last 97 tokens of a text to copy: six full blocks of the cache and one token more.
copies = [plain.tokenizer.encode(lesson.copying(seed))[-97:] for seed in range(12)]
stories = [plain.tokenizer.encode(lesson.story(seed)) for seed in (1, 2)]
prompts = [copies[0], stories[0], copies[1], stories[1]]
drawn_params = [
    SamplingParams(temperature=(0, 0.7, 1.0)[place % 3], seed=place, max_tokens=10, top_p=0.95)
    for place in range(len(prompts))
]
alone = [plain.generate(*each).token_ids for each in zip(prompts, drawn_params, strict=True)]
drafts_in_4_bits = load_model(
    weights="bfloat16",
    speculative_config={
        "method": "draft_model",
        "weights": "int4",
        **eight,
        "num_speculative_tokens": 4,
    },
)
small_chunks = load_model(
    weights="bfloat16",
    speculative_config={"method": "suffix"},
    max_num_batched_tokens=48,
    max_num_seqs=3,
)
lookup = lesson.Drafted(plain, NgramProposer(2, 4), most=8)  # as by LLM.load, without a second copy
all_wrong = lesson.Drafted(plain, lesson.AlwaysWrong(), most=8)
ways = {
    "prompt lookup": lookup,
    "suffix index, chunks of 48 tokens": small_chunks,
    "the model in 4 bits": drafts_in_4_bits,
    "always wrong": all_wrong,
}
num_equal = 0
for name, each in ways.items():
    with each.count_work() as work:
        found = each.generate(prompts, drawn_params, progress=False)
    equal = [one.token_ids == other for one, other in zip(found, alone, strict=True)]
    num_equal += sum(equal)
    print(f"{name}: {sum(equal)} of {len(equal)} texts are equal; ", end="")
    print(f"⟨{work.tokens_accepted} of {work.tokens_drafted}⟩ drafts were right")
num_texts = len(ways) * len(prompts)
assert num_equal == num_texts

# %% [markdown]
# This needs one more thing, which chapters 25 and 34 prepared: a row's logits must be the same bits whether
# the row is computed alone, among others, or behind drafts. The compiled step keeps that promise. Where a
# library chooses another order of sums for another number of rows (as on most GPUs), a near tie can fall
# the other way, with or without speculation.
#
# ### Watch it
#
# An answer step by step, with prompt lookup. Each row is a step: accepted drafts are green, then comes the
# model's own token in blue, then the drafts that were dropped. Go through the steps and look for the places
# where the edited list differs from the texts before it. The curve below counts tokens.

# %%
recorded = lesson.Recorded(NgramProposer(2, 4))
edited = lesson.Drafted(plain, recorded, most=8).generate(edit, greedy)
steps_seen = recorded.rounds(edited.token_ids)


def spell(token_id):
    return plain.tokenizer.decode([token_id])


replay(
    lambda step: draw.rounds(steps_seen, spell, upto=step + 1),
    len(steps_seen),
    "An answer with drafts by prompt lookup, a row for each step: green drafts were accepted, blue is the "
    "model's own token, orange drafts were rejected. Below, the number of tokens after each step.",
    number="36.3",
)
tokens_a_step = lesson.mean(len(each.tokens) for each in steps_seen)
print(mark(tokens_a_step, "tokens per step"))
as_wanted = plain.tokenizer.decode(edited.token_ids) in lesson.renamed(lesson.records(5))
print(f"the text is that of the edited list: ⟨{as_wanted}⟩")

# %% [markdown]
# ## The classical rule
#
# Sample and match asks for equality with one drawn token. The rule of
# [Leviathan et al.](https://arxiv.org/abs/2211.17192) and [Chen et al.](https://arxiv.org/abs/2302.01318),
# which most engines know as **[rejection sampling](../docs/glossary.md#rejection-sampling)**, asks for less:
# the text need not be *the* text of this seed, but it must have **the right distribution**. Let $p(x)$ be the
# model's probability of token $x$ at a place, and $q(x)$ the proposer's, which drew its draft from $q$.
#
# - Accept the draft $x$ with the probability $\min\big(1, \frac{p(x)}{q(x)}\big)$.
# - Otherwise draw a token from the rest $r(x) = \frac{\max(0,\; p(x) - q(x))}{\sum_y \max(0,\; p(y) - q(y))}$,
#   and drop the drafts behind it.
#
# If $q$ finds a token too likely, some of its drafts are rejected, and the rejected ones are spread over the
# tokens that $q$ finds too unlikely, exactly by what each lacks. The rule is applied place by place, each with
# $p$ and $q$ after the drafts accepted so far. If all are accepted, one token more is drawn from $p$ of the
# last row.
#
# **Proof.** A token $x$ comes out in two ways. It is drafted and accepted with the probability
# $q(x) \min\big(1, \frac{p(x)}{q(x)}\big) = \min(p(x), q(x))$. Or some draft is rejected, and $x$ is drawn from
# the rest. A draft is rejected with the probability
#
# $$1 - \sum_y \min(p(y), q(y)) = \sum_y \big(p(y) - \min(p(y), q(y))\big) = \sum_y \max(0,\; p(y) - q(y)),$$
#
# which is just the divisor of $r$. So both together are
#
# $$P(x) = \min(p(x), q(x)) + \max(0,\; p(x) - q(x)) = p(x). \qquad \blacksquare$$
#
# The first sum is also the rule's **acceptance**, $\sum_x \min(p(x), q(x))$. At a single place, no rule
# that keeps $p$ accepts more drafts from $q$. (Its average over the places is the $a$ used below.)
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $p$ | the model's probabilities, after temperature and filters | `target` |
# | $q$ | the proposer's, as they were when it drew | `draft` |
# | $x$ | the draft | `drafted` |
# | $\min(1, p/q)$ | the chance to accept it | `accept_draw` is below it |
# | $r$ | the rest | the token at which its cumulated sum exceeds `redraw` |
#
# The picture has a real place: the story's next token, at temperature 1. $p$ is the model, and $q$ is what
# its first 26 of 30 layers would draw. Besides the classical rule it has two wrong ones: the lenient rule
# from above (accept what is among the three likeliest, else draw from $p$), and a mistake that looks
# harmless: accept by $p/q$, but draw the second choice from $p$ itself in place of the rest. All bars are
# exact sums, without a draw.

# %%
exact = load_model(weights="float32")  # runs layer by layer, so that one can look inside
by_depth = lesson.depth_probs(exact, story_ids)
target, draft = by_depth[-1], by_depth[26]
rules = {
    "p, the model": target,
    "q, the drafts": draft,
    "classical": reference.CLASSICAL.outcome(target, draft),
    "top 3": reference.among_likeliest(3).outcome(target, draft),
    "second choice from p": reference.REDRAWS_FROM_TARGET.outcome(target, draft),
}
shown = np.argsort(-target)[:8]
picture(
    draw.drift(
        {name: each[shown] for name, each in rules.items()}, [spell(int(each)) for each in shown]
    ),
    "The model's distribution, the drafts', and what comes out of three rules. Only the classical rule "
    "gives the model's distribution; the others lean towards the drafts: they give too much to tokens "
    "that the drafts find too likely (top 3: if it accepts them), and too little to most others.",
    number="36.4",
)
off = {name: 50 * float(np.abs(each - target).sum()) for name, each in rules.items()}
exact_off = off["classical"]
print(f"classical: off by less than 1e-9 % of the probability: {exact_off < 1e-9}")
for name in ("top 3", "second choice from p"):
    print(f"{name}: {mark(off[name], '% of the probability lies on other tokens', 2)}")

# %% [markdown]
# ## Your turn: the classical rule

# %%
task(36, "accept_or_redraw")

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


# %% [markdown]
# A formula can be right and the code wrong. So the code is tested as well, by its draws: 20,000 rounds with
# small distributions, and a **chi-square test** of the counts. Its p-value says how often a right rule would
# give counts that are at least as far off. A tiny p-value rejects the rule. A test that has never failed
# proves little, so a wrong rule is planted as a control: the one with the second choice from $p$.

# %%
my_rule = check(36, accept_or_redraw=accept_or_redraw)
p_small = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
q_small = np.array([0.20, 0.30, 0.05, 0.25, 0.10, 0.10])
for name, each in {
    "yours" if my_rule is not reference.accept_or_redraw else "the course's own": my_rule,
    "planted, second choice from p": reference.REDRAWS_FROM_TARGET,
    "planted, top 3": reference.among_likeliest(3),
}.items():
    tallies = reference.simulated(each, p_small, q_small, rounds=20_000, seed=1)
    p_value = reference.chi_square(tallies, p_small)
    said = "below 1e-12: wrong" if p_value < 1e-12 else f"{p_value:.2f}: not rejected"
    print(f"{name:<32}{tallies}  p-value {said}")

# %% [markdown]
# ### What equality costs
#
# The two rules accept equally often if the proposer names a single token, as prompt lookup does: then
# $q(x) = 1$, and both accept it with the probability $p(x)$. They differ if the proposer *draws* its drafts, as
# a draft model does. The classical rule accepts $\sum \min(p, q)$. Sample and match accepts if two draws
# agree. With independent random numbers they would agree with probability $\sum_x p(x)\,q(x)$ only. But
# minigen's draft model draws with *the place's own* number $u$, the same one as the model: a token is an
# interval of $[0, 1)$ in both, and they agree where the two intervals overlap. The cell computes all three
# for $p$ from the model in bfloat16 and $q$ from its 4-bit version, over the places of a drawn story.

# %%
warm = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
drawn_story = plain.generate(story_ids, warm).token_ids
pairs = [
    lesson.next_probs(lesson.answer_logits(each, story_ids, drawn_story))
    for each in (plain, in_4_bits)
]
accepting = {
    "classical rule": reference.overlap,
    "sample and match, one number for both": reference.same_number,
    "sample and match, independent numbers": reference.own_numbers,
}
acceptances = {name: lesson.mean(map(each, *pairs)) for name, each in accepting.items()}
for name, each in acceptances.items():
    print(f"{name}: {mark(100 * each, '% of the drafts', 3)}")

# %% [markdown]
# So equality has a price where drafts are drawn: a small shift of one token's probability shifts the
# intervals of all tokens after it. minigen pays this price, for then the promise of chapter 25 holds: the same
# seed gives the same text, whatever runs beside. (A **coupling** is a way of drawing from two distributions by
# shared random numbers. With $\delta = 1 - \sum\min(p, q)$, Gumbel noise, a random number for each token of the
# vocabulary, agrees at least $\frac{1 - \delta}{1 + \delta}$ of the time
# ([Daliri et al.](https://arxiv.org/abs/2408.07978)). It would keep that promise, too. minigen stays with
# chapter 16's one number per place, where Gumbel noise needs one for each of the 49,152 tokens.)
#
# ## How many drafts?
#
# Let a draft be right with the probability $a$ if those before it are, the **acceptance**. The first draft
# counts with probability $a$, the second with $a^2$, and so on, and one token comes in any case:
#
# $$E(k) = 1 + a + a^2 + \dots + a^k = \frac{1 - a^{k+1}}{1 - a}$$
#
# is the expected number of tokens of a step with $k$ drafts. By hand, for $a = 0.8$ and $k = 3$:
# $1 + 0.8 + 0.64 + 0.512 = 2.95$. However large $k$ is, $E$ stays below $\frac{1}{1-a}$, here 5. But the step
# becomes longer. With $t(n)$ for the time of a step with $n$ rows, and $c$ for the time that a draft takes to
# propose:
#
# $$\text{gain}(k) = \frac{E(k)}{\big(t(k+1) + k\,c\big) / t(1)}$$
#
# For prompt lookup $c$ is nearly 0. The numerator saturates and the denominator grows, so some $k$ is best.
# Predict it for $a = 0.8$ in bfloat16, with the stored times of steps.

# %%
guess_best = predict(
    "a = 0.8, bfloat16, stored times of steps: how many drafts, of 0 to 15, are best?",
    None,
    within=1.5,
)

# %% [markdown]
# The figure shows the gain that the stored times of steps predict, in bfloat16 and in 4 bits, for several $a$.
#
# ## Your turn: the best number of drafts

# %%
dots = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95]
in_form = {"bfloat16": stored["bfloat16"], "4 bits": stored["int4"]}
picture(
    draw.gain_curves(in_form, dots, most=15),
    "The predicted gain by the number of drafts per step, for several acceptances, with the stored times "
    "of steps. A dot marks the best number. Below the dashed line, speculation loses.",
    number="36.5",
)
best_here = lesson.best_drafts(0.8, stored["bfloat16"], 15)
guess_best.compare(best_here)
for name, costs in in_form.items():
    each = [lesson.best_drafts(a, costs, 15) for a in dots]
    print(f"{name}: for a = {dots}, best are {each} drafts")
task(36, "best_count")

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
my_best = check(36, best_count=best_count)
measured_costs = [here[rows] for rows in sorted(here)]
found = my_best(0.8, measured_costs)
print(f"by the steps measured here, of 0 to 7 drafts, ⟨{found}⟩ are best for a = 0.8")

# %% [markdown]
# In 4 bits, further rows cost more, so fewer drafts pay, and with an acceptance of 0.3 none at all. Move the
# sliders. Watch what the batch does: eight sequences with five drafts each are 48 rows, and those are far from
# free.

# %%
explore(
    lambda form, acceptance, drafts, batch: draw.explored_gain(
        stored[form], acceptance, drafts, batch
    ),
    "The predicted gain by the number of drafts, and by the batch, from the stored times of steps.",
    "36.6",
    form=["bfloat16", "int4"],
    acceptance=(0.0, 1.0, 0.05, 0.8),
    drafts=(0, 15, 1, 5),
    batch=(1, 32, 1, 4),
)
guess_layers = predict(
    "The likeliest token after 24 of 30 layers: in how many % of the places is it the model's?",
    None,
    within=1.5,
)

# %% [markdown]
# ## Who proposes?
#
# | proposer | where drafts come from | costs | pays where |
# |---|---|---|---|
# | prompt lookup (`ngram`) | the sequence's own text | nearly nothing | the answer copies: edits, summaries, code, JSON |
# | [suffix index](../docs/glossary.md#suffix-index) (`suffix`) | finished answers as well | memory | the same questions come again, agents in a loop |
# | forced by a grammar (`grammar`) | the form itself, chapter 53 | nearly nothing | keys of JSON |
# | predicted output | a text that the client sends | nearly nothing | the client knows most of the answer |
# | draft model (`draft_model`) | a smaller model, or the same one in fewer bits | its own steps | large models with small relatives |
# | fewer layers (`num_layers`) | the first layers of the model itself | a part of a step | models trained for it, or layers chosen by a search |
#
# The last row sounds best: no second model is needed, and the first layers are computed anyway. But do they
# know the token? As the logit lens of chapter 15 did, the cell asks for the likeliest token after a layer, here
# after every second one, and compares it with the model's. The dashed line is what drafts by that number of layers would need to break even.

# %%
agreement = lesson.shallow_agreement(exact, [*story_ids, *its_own[:32]], len(story_ids) - 1, 2)
picture(
    draw.shallow(agreement, count=4),
    "How often the likeliest token after n layers is that of all 30 layers, and the acceptance that four "
    "drafts per step by n layers would need, if further rows were free.",
    number="36.7",
)
guess_layers.compare(100 * agreement[24], "%", measured=True)
short = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
by_24_layers = {"method": "draft_model", "weights": "bfloat16", "num_layers": 24, **eight}
by_lookup_4 = lesson.Drafted(plain, NgramProposer(2, 4), most=4)
engines = {
    "plain": plain,
    "prompt lookup": by_lookup_4,
    "4-bit drafts": drafts_in_4_bits,
    "24 layers": load_model(
        weights="bfloat16", speculative_config=by_24_layers | {"num_speculative_tokens": 4}
    ),
}
runs = lesson.compared(engines, [lesson.story(1)], short, repeats=1)
times_faster = {name: lesson.times_as_fast(runs["plain"], each) for name, each in runs.items()}
print("a story, with 4 drafts per step:")
for name, each in list(runs.items())[1:]:
    print(f"{name:<14} {mark(100 * each.share, '% of drafts right', 2)}, ", end="")
    print(f"{mark(short.max_tokens / each.steps, 'tokens per step', 2)}, ", end="")
    print(f"{mark(times_faster[name], 'times as fast', 2)}")
draft_step = lesson.row_seconds(in_4_bits, 256, [1], 5)[1] / rows_seconds[1]
print(f"a step of the 4-bit model takes {mark(draft_step, 'steps', 2)}")

# %% [markdown]
# Drafts behind a wrong one count as wrong in these lines, so the share is at most the acceptance $a$. Take the
# 24 layers: with $a$ = 0.4, say (compare Figure 36.7), it would be $(a + a^2 + a^3 + a^4) / 4$ = 16 % for four drafts.
# (The line is of a few tokens of one text, so it differs.)
#
# SmolLM2 was not trained to leave early: the output head can read the last layer's state, and those before it
# badly. [LayerSkip](https://arxiv.org/abs/2404.16710) trains a model for it, and
# [Draft & Verify](https://arxiv.org/abs/2309.08168) searches which layers can be left out. The model in 4 bits
# guesses very well, but it costs a good part of a step for each draft (the last line), before anything is
# verified. A draft model should be ten times cheaper or more, and then a model of 135M is rather the draft than
# the target.
#
# ### Drafts from other clients' answers
#
# A suffix index over finished answers knows an answer that was given before. That is a leak if it is shared.
# A client who sends *My password is* and finds the answer unusually fast has learnt that someone else had that
# answer. So minigen keeps one index per `cache_salt`, as the prefix cache does (chapter 23): requests see only
# answers of their own salt. The number of steps shows it:

# %%
shared = lesson.Drafted(plain, SuffixProposer(2, 4), most=8)
suffix_steps = {
    name: lesson.num_steps(shared, story_ids, short, salt)
    for name, salt in {
        "a new question": "client A",
        "the same again": "client A",
        "from another client": "client B",
    }.items()
}
for name, each in suffix_steps.items():
    print(f"{name}: ⟨{each}⟩ steps for {short.max_tokens} tokens")
print("another client's steps are those of a new question:", end=" ")
print(suffix_steps["from another client"] == suffix_steps["a new question"])
_, predicted_steps = lesson.predicted_answer(plain, edit, greedy, edited.text)
_, other_steps = lesson.predicted_answer(plain, edit, greedy, lesson.records(5))
print(f"predicted by the client, word for word: ⟨{predicted_steps}⟩ steps for 64 tokens")
print(f"predicted by the unedited list: ⟨{other_steps}⟩ steps")

# %% [markdown]
# The last two lines are **predicted outputs**: a client of the OpenAI API sends
# `prediction={"type": "content", "content": "..."}` with what it expects, for example a file before a small
# edit. minigen drafts from it whenever the last tokens of the answer occur in it, needs no option for it, and
# reports `accepted_prediction_tokens` and `rejected_prediction_tokens` in the `usage`. The prediction is a
# hint, not a demand: the model's own token decides. Even a perfect one takes more than the $1 + 63/9 = 8$ steps
# of always eight drafts, because the number of drafts is adaptive: it begins with none, and a step may have at
# most twice the rows that were measured before.
#
# ## Rollback: what happens to the wrong keys and values?
#
# A step over drafts writes keys and values of all its tokens into the cache, also of the wrong ones. Nothing
# needs to be erased. A step reads only the slots below `num_computed` and those that it has written itself. So
# the engine sets that number to what is right, and the next step writes over the rest. Two things are less
# obvious:
#
# - **The model's own token** $s_j$ has no keys and values yet. The next step computes it, as in any decode.
# - **The prefix cache** offers full blocks to other requests. A block is full *of right tokens* only after the
#   verification. An engine that publishes it when the step has filled it shares a wrong text under the name of
#   a right one.
#
# Blocks that were allocated for wrong drafts stay with the sequence, as it needs them soon. And because drafts
# are never worth another request's place, the scheduler adds them last: after all decodes, all prompts that
# have started, and all waiting requests that can start. They take only blocks that none of these needs in this
# step (they may evict cached ones), and preempt no sequence. If there are no blocks, there are no drafts.
#
# ## Your turn: roll back
#
# The picture first, with blocks of four tokens: ten tokens are known, five drafts are verified, two are right.

# %%
computed, publishable, _ = reference.after_verifying(10, 5, 2, 4, 4)
picture(
    draw.rollback(4, 10, 5, 2, publishable),
    "The slots of one sequence before, during and after a step that verifies five drafts, in blocks of "
    "four. Two drafts are right. Hatched slots hold wrong keys and values until they are written over.",
    number="36.8",
)
print(f"{computed} tokens are computed, and {publishable} blocks may be shared")
task(36, "after_verifying")

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
my_rollback = check(36, after_verifying=after_verifying)
known, blocks = 14, 5  # 4 drafts need slots for 18 tokens
for num_right in (3, 0, 4):
    computed, published, missing = my_rollback(known, 4, num_right, blocks, 4)
    print(f"{num_right} of 4 right: {computed} computed, {published} published, {missing} missing")
    known, blocks = computed + 1, blocks + missing
guess_batch = predict(
    "Speed with up to 8 wrong drafts each, 12 at once, of that without?", None, within=1.5
)

# %% [markdown]
# ## When it hurts
#
# All of this rests on rows that are nearly free. In a batch they are not: its sequences fill the rows
# themselves, and each wrong draft is work that another request waits for. The cell decodes a copying load, one
# sequence alone and twelve at once, always with up to eight drafts, and with the engine's own choice (**adaptive**,
# its default). The one alone writes 24 tokens, and the twelve write 10 each, which leaves room for 4 drafts per step
# on average if all are wrong. The lines with *wrong* have the worst proposer, which is always wrong. Each prompt has
# 97 tokens: six full blocks and one token more. A first turn, which is not timed, puts the blocks into the prefix
# cache, so the times are those of decode steps.

# %%
adaptive = lesson.Drafted(plain, NgramProposer(2, 4), most=8, adaptive=True)
wrong_adaptive = lesson.Drafted(plain, lesson.AlwaysWrong(), most=8, adaptive=True)
brief, longer = (
    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (10, 24)
)
by_lookup = {"plain": plain, "up to 8": lookup, "adaptive": adaptive}
always = {"plain": plain, "up to 8": lookup, "wrong, up to 8": all_wrong}
by_choice = {"plain": plain, "adaptive": adaptive, "wrong, adaptive": wrong_adaptive}
speed = {}
for size, tried, params, repeats, warm_up in (
    (1, by_lookup, longer, 1, 12),
    (12, always, brief, 1, 1),
    (12, by_choice, brief, 2, 6),
):
    runs = lesson.compared(tried, copies[:size], params, repeats, warm_up)
    for name in list(tried)[1:]:
        speed[name, size] = lesson.times_as_fast(runs["plain"], runs[name])
        print(
            f"{size:>2} at once, {name:<15} {mark(speed[name, size], 'times as fast', 2)}; ", end=""
        )
        right = mark(100 * runs[name].share, "% right", 2) if runs[name].drafted else "⟨–⟩"
        print(f"⟨{runs[name].drafted}⟩ drafts, {right}")
guess_batch.compare(speed["wrong, up to 8", 12], measured=True)

# %% [markdown]
# Where the engine's own choice was no draft, a ratio other than 1 is noise. Where it drafted, these answers are too
# short to judge it: it has measured few steps by then, and the ratio changes from run to run.
#
# `MeasuredPace` makes this choice in every step. It measures the time of steps by their rows, and averages
# the measured times so that they rise with the rows. It estimates each sequence's acceptance $a$ (the share
# of right drafts among those that were tested, up to and with the first wrong one), considers drafts in the
# order of their chances, and takes the number that gives the most expected tokens per second: the rule of
# your `best_count`, for a whole batch. It asks for drafts only if the expected gain is at least 5 %. If it
# is less, it tries two drafts after 16 tokens, and each step without a right draft doubles this wait, up to
# 256 tokens. Drafts may lose what they gained, and 1.5 % of the time. While they have lost more, it asks
# for none. So a proposer that is always wrong costs little.
#
# ## Trees
#
# A single wrong draft spoils all drafts behind it. If two continuations are likely, why not verify both?
# [SpecInfer](https://arxiv.org/abs/2305.09781) sends a **tree** of drafts through one step. Each token has
# its depth as its position, and attends to the text and to its **ancestors** in the tree, not to its siblings:
# a [tree mask](../docs/glossary.md#tree-mask) in place of the causal triangle. Afterwards the engine walks from
# the root along matching tokens. More rows buy more chances for the first tokens; chapter 17's roofline says
# how many rows there are to spend.
#
# Trees come with proposers that have several ideas. **[Medusa](https://arxiv.org/abs/2401.10774)** trains a few
# small heads on the model's last hidden state: head $i$ guesses the token $i$ places after the model's own next
# one. They guess at once and independently of one another (which [Hydra](https://arxiv.org/abs/2402.05109)
# changes), and their best combinations form the tree. **[EAGLE](https://arxiv.org/abs/2401.15077)** trains one
# small layer that continues the model's *hidden states*, which are easier to predict than tokens. It feeds each
# drawn token back, since the state after it depends on the draw. [EAGLE-2](https://arxiv.org/abs/2406.16858)
# grows the tree where the drafts are confident. [EAGLE-3](https://arxiv.org/abs/2503.01840) reads several layers
# of the model.
# **Multi-token prediction** ([DeepSeek-V3](https://arxiv.org/abs/2412.19437)) trains such a layer together with the
# model. minigen verifies one line of drafts per sequence and no trees.
#
# ## Your turn: the mask of a tree

# %%
parents = [-1, -1, 0, 0, 1, 2, 2]
words = [" the", " a", " lamp", " old", " dark", " was", " stood"]
picture(
    draw.token_tree(parents, words, reference.tree_mask(parents)),
    "A tree of seven drafts, and its mask: a row for each token, dark where it attends. Every token also "
    "attends to the text before the tree.",
    number="36.9",
)
task(36, "tree_mask")

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
my_mask = check(36, tree_mask=tree_mask)
chain = my_mask([-1, 0, 1, 2])
print(f"a chain's mask is the causal one: {np.array_equal(chain, np.tri(4, dtype=bool))}")

# %% [markdown]
# ## The package's version
#
# Each opens after your own has passed. In the engine, the first two are
# [`num_matching`](../minigen/sequence.py) and [`NgramIndex`](../minigen/speculative/ngram.py). The
# scheduler's [`commit`](../minigen/engine/scheduler.py) keeps what matches, and
# [`Speculator`](../minigen/speculative/speculator.py) asks for drafts and learns from them. The whole of it
# is several hundred lines, because three promises were kept before: equal bits in any batch, a random
# number per place, and a block table that knows what is computed. On the command line it is the knob of
# this chapter's card: `minigen serve --speculative-config '{"method": "ngram"}'`.

# %%
reveal(
    36,
    accepted_tokens=my_accepted,
    ngram_drafts=my_drafts,
    accept_or_redraw=my_rule,
    best_count=my_best,
    after_verifying=my_rollback,
    tree_mask=my_mask,
)
package = NgramProposer(2, 4)
for length in range(20, 60):
    sequence = lesson.sequence_of((story_ids * 5)[:length])
    assert list(package.propose([sequence], [6])[0]) == list(my_drafts(sequence.token_ids, 6, 2, 4))
    package.end(sequence)
print("prompt lookup agrees with the package's index on 40 texts")

# %% [markdown]
# ## A bug hunt
#
# `speculate` below writes a text with drafts, one step at a time. **The report:** *With speculation on, most
# answers are the same as without, and they come faster. But now and then there is a word in them that does not
# belong there. With a proposer that guesses badly, nearly every answer is nonsense.*
#
# Write a test that fails on this function and on others with such a fault, and passes on every correct one. Then mend the
# function. It has happened: an engine accepted the first draft of each step unverified
# ([issue 243](https://github.com/ohdearquant/lattice/issues/243)).

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
mended = hunt(36, test=test_drafts, mended=speculate)

# %% [markdown]
# ## The measurement again
#
# The list with its renamed field, 64 tokens, as in the beginning: the time per token without drafts, and with
# prompt lookup (adaptive, up to twelve drafts). The cell also measures the alternative: the same with 4-bit
# weights, since fewer bytes are the other way to a shorter step.

# %%
raced = {
    "bfloat16": plain,
    "bfloat16, prompt lookup": lesson.Drafted(plain, NgramProposer(2, 4), 12, adaptive=True),
    "4 bits": in_4_bits,
    "4 bits, prompt lookup": lesson.Drafted(in_4_bits, NgramProposer(2, 4), 12, adaptive=True),
}
races = {}
for form in ("bfloat16", "4 bits"):
    pair = {name: each for name, each in raced.items() if name.startswith(form)}
    races |= lesson.compared(pair, [edit], greedy, repeats=1, warm_up=16)
for name, each in races.items():
    print(f"{name:<24} ⟨{each.steps}⟩ steps, {mark(1000 * min(each.seconds) / 64, 'ms per token')}")
after = races["bfloat16, prompt lookup"]
faster = lesson.times_as_fast(races["bfloat16"], after)
faster_4 = lesson.times_as_fast(races["4 bits"], races["4 bits, prompt lookup"])
print(f"bfloat16: {mark(faster, 'times as fast', 3)}; 4 bits: {mark(faster_4, 'times as fast', 3)}")
gains = lesson.stored_gains()
if gains is None:
    print("the stored benchmark is not here: python benchmarks/36_speculative.py")
else:
    picture(
        draw.stored_gains(gains),
        "The stored benchmark: how many times as fast decoding is with prompt lookup, by the batch: with "
        "always four drafts, and adaptive. A control does not repeat its prompt. Bands reach from the "
        "lowest turn to the highest.",
        number="36.10",
    )

# %% [markdown]
# The text is the same to the last token, and the steps are a fraction. The gain in time is smaller than that in
# steps, by what further rows cost. In 4 bits a step is shorter to begin with, and its rows are dearer.
#
# In the stored benchmark, copying gains less the larger the batch is. At 4 and 16, always four drafts gain more
# than the adaptive choice, which needs steps to find out. On the control, both lose in a batch of 16, in
# bfloat16 the adaptive choice less. (A few per cent mean nothing there: see the bands.)
#
# ## Claims
#
# What one often hears or reads about speculation, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
verdicts(
    "36",
    Claim(
        "Prompt lookup is 2 to 4 times as fast where the answer copies its input",
        f"{mark(faster, 'times', 3)} as fast in bfloat16, {mark(faster_4, 'times', 3)} in 4 bits, on an edited list",
        within(faster, 2, 4),
        "judged in bfloat16; it depends on what further rows of a step cost, and so on the weights' form",
        "[prompt lookup decoding](https://github.com/apoorvumang/prompt-lookup-decoding)",
        measured=True,
    ),
    Claim(
        "Speculation changes no text",
        f"{num_equal} of {num_texts} texts are equal, at three temperatures, in batches and chunks",
        holds(num_equal == num_texts),
        "with sample and match, and with rows whose bits do not depend on the batch",
        "[Leviathan et al.](https://arxiv.org/abs/2211.17192)",
    ),
    Claim(
        "Rejection sampling is lossless",
        f"the exact sum is the model's distribution: {exact_off < 1e-9}",
        holds(exact_off < 1e-9),
        "the distribution is right; the text of a seed is another one than without drafts",
        "[Chen et al.](https://arxiv.org/abs/2302.01318)",
    ),
    Claim(
        "A plausible draft is good enough",
        f"with rank 5, ⟨{same_start[5]} of 64⟩ tokens are the model's before the texts part",
        holds(min(same_start[5], same_start[50]) == 64),
        "a lenient rule changes the distribution, and with prompt lookup it makes texts repeat themselves; "
        "Medusa's 'typical acceptance' is such a rule, so a part of its gain is not lossless",
        "[Medusa](https://github.com/FasterDecoding/Medusa)",
        measured=True,
    ),
    Claim(
        "It helps at low load, and hurts at high concurrency",
        f"up to 8 drafts, a copying load: {mark(speed['up to 8', 1], 'times', 2)} as fast alone, "
        f"{mark(speed['up to 8', 12], 'times', 2)} with 12 at once",
        holds(speed["up to 8", 1] > 1 > speed["up to 8", 12]),
        f"judged for up to eight drafts ({mark(speed['wrong, up to 8', 12], 'times', 2)} with 12 at once if all are wrong); "
        "in the stored benchmark four still gain at batch 16 where the answer copies; "
        f"chosen by measurement, it is {mark(speed['adaptive', 12], 'times', 2)} with 12 at once",
        "[vLLM](https://blog.vllm.ai/2024/10/17/spec-decode.html)",
        measured=True,
    ),
    Claim(
        "More drafts per step are better",
        f"with a = 0.8, {best_here} are best of 15",
        holds(best_here == 15),
        "the expected tokens saturate at 1 / (1 - a), and each row costs time",
    ),
    Claim(
        "A model drafts for itself with a part of its layers, and is up to 1.99 times as fast",
        f"24 of 30 layers: {mark(times_faster['24 layers'], 'times', 2)} as fast",
        within(times_faster["24 layers"], 1, 1.99),
        "Draft & Verify trains nothing, but searches which layers to leave out, anywhere in the stack; "
        "here the last six of 30 are cut without a search",
        "[Draft & Verify](https://arxiv.org/abs/2309.08168)",
        measured=True,
    ),
    Claim(
        "Medusa's heads make decoding 2.2 to 3.6 times as fast",
        "no trained heads for this model",
        NOT_TESTED,
        "heads must be trained on the model's hidden states; up to 3.6 (Medusa-2) is with the model "
        "trained together with them",
        "[Medusa](https://arxiv.org/abs/2401.10774)",
    ),
)

# %% [markdown]
# ## Summary
#
# - A decode step waits for the weights, so a few further rows are nearly free. Speculation fills them with
#   guesses of the same sequence.
# - Draft, verify all drafts in one pass, keep those that match, and take one token more from the model.
# - A lenient rule of acceptance is fast and wrong, and with prompt lookup it makes the text repeat itself.
# - Sample and match draws the model's own token at each place, by the place's own random number. Then the
#   text is the same with any proposer, at any temperature: induction proves it, and a test of equality can
#   check it.
# - The classical rule accepts with the probability $p/q$ (at most 1), else it draws from the rest: the
#   distribution is right, which a sum proves, and a chi-square checks in code.
# - $k$ drafts give $(1 - a^{k+1})/(1 - a)$ tokens per step on average. Divided by the step's cost that is the
#   gain, and a small $k$ is best unless the drafts are very good.
# - Wrong keys and values are not erased. The number of computed tokens grows only by what is right, and only
#   blocks of accepted tokens may be shared.
# - In a full batch no row is free. An engine must measure, and stop where drafts lose.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A proposer is right in 90 % of the cases, and a step over 5 rows takes 1.2 steps. What is
# the gain with 4 drafts? And if each draft costs half a step?</summary>
# $E = 1 + 0.9 + 0.81 + 0.729 + 0.656 = 4.1$ tokens. For free drafts the gain is 4.1 / 1.2 = 3.4; with drafts
# that cost half a step each it is 4.1 / (1.2 + 2) = 1.3.</details>
#
# <details><summary>2. An engine compares the classical rule's p after top-p with a q that was taken before the
# proposer's own top-p. What happens?</summary>
# The drafts come from the filtered q, which is larger for the tokens that are kept. The ratio p / q is too
# large then, too many drafts are accepted, and the distribution leans towards the proposer. The rate of
# acceptance looks better than it should, and no single text looks wrong.</details>
#
# <details><summary>3. A step has 7 drafts, and the third right one is the end token. What must the engine do
# with the 4 drafts behind it, even if they match?</summary>
# Drop them. The answer ends there, as it would without drafts. The same holds for <code>max_tokens</code> and
# for a grammar whose form is complete. A stop string is seen only after the step: the tokens behind it are
# dropped from the answer. Their blocks may stay cached, which is harmless, since the model itself would have
# written them.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/latest/features/speculative_decoding/)** takes `--speculative-config` (the names
#   that minigen uses) with n-grams, suffix decoding, draft models, EAGLE, Medusa and multi-token prediction. It
#   verifies by rejection sampling on the GPU, and counts the acceptance of each place in its metrics.
# - **[SGLang](https://docs.sglang.ai/advanced_features/speculative_decoding.html)** runs EAGLE-2 and EAGLE-3 with
#   trees, and captures draft and verification in CUDA graphs.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/docs/speculative.md)** samples and matches as
#   here, with a draft model or without one, by several n-gram maps. One of these may be shared by all requests:
#   remember the salt.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/speculative-decoding.html)** has draft models,
#   EAGLE-3, Medusa, n-grams and multi-token prediction, and compares drafts with the model's tokens.
# - **[transformers](https://huggingface.co/docs/transformers/generation_strategies)** has `assistant_model`,
#   `prompt_lookup_num_tokens` and early exit; its assistant chooses the number of drafts by confidence.
# - **[OpenAI](https://platform.openai.com/docs/guides/predicted-outputs)** bills rejected predicted tokens, as
#   they were computed.
#
# ## Further reading
#
# - [Fast Inference from Transformers via Speculative Decoding](https://arxiv.org/abs/2211.17192), Leviathan, Kalman
#   and Matias 2022: the rule, its proof and the expected gain.
# - [Accelerating Large Language Model Decoding with Speculative Sampling](https://arxiv.org/abs/2302.01318), Chen et
#   al. 2023: the same rule, found independently, for a 70B model.
# - [Coupling without Communication and Drafter-Invariant Speculative Decoding](https://arxiv.org/abs/2408.07978),
#   Daliri, Musco and Suresh 2024: sample and match, and what it costs.
# - [SuffixDecoding](https://arxiv.org/abs/2411.04975), Oliaro et al. 2024: drafts from earlier answers.
# - [SpecInfer](https://arxiv.org/abs/2305.09781), Miao et al. 2023: trees and their verification.
# - [EAGLE-3](https://arxiv.org/abs/2503.01840), Li et al. 2025.
# - [MagicDec](https://arxiv.org/abs/2408.11049), Chen et al. 2024: with long contexts, speculation pays in large
#   batches, too, because the step waits for the KV cache again.
#
# **Next:** part 4, many devices: [chapter 41](41_tensor_parallel.ipynb) lets several memories read at once.

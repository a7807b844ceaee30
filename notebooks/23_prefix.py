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
# # 23 · Sharing prefixes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/23_prefix.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/23_prefix.ipynb)
#
# Keys and values are in blocks now, and several sequences may own one block. So far only the answers
# to one prompt used that. This chapter shares blocks between requests that know nothing of each other:
# a request whose beginning was computed before takes what is there. This is
# [**prefix caching**](../docs/glossary.md#prefix-caching).
#
# **Afterwards you can** build a prefix cache as a chain of hashes and as a tree, say what it saves and
# what it does not, evict from it, and name the traps that real engines fell into.
#
# **You need** chapter 17 (prefill and decode), chapter 21 (blocks and their owners) and chapter 22
# (block tables). **Time:** about 50 minutes to read and try, about 110 for the
# [exercises](../exercises/23_prefix.ipynb).
#
# **Where we are:** memory is in blocks, and attention reads them through block tables. Now equal
# beginnings are found, and kept, among all requests.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill | compute, memory capacity | L3 engine | `--enable-prefix-caching` | hit rate, TTFT |
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
import hashlib
import random
import time

import torch

from minigen import LLM, SamplingParams
from minigen.errors import RequestError
from minigen.kv_cache.radix_cache import RadixPrefixCache as PackageCache
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
from minigen_course.ch23_prefix import figures as draw
from minigen_course.ch23_prefix.lesson import WithoutEviction, enter, make_manager, visit
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.lab.inspect_model import recorded_heads, turned_back
from minigen_course.lab.toy_engine import serve_toy

BLOCK = 16
alone = load_model(weights="float32", enable_prefix_caching=False)
greedy = SamplingParams(temperature=0, max_tokens=8)

# %%
chapter_map("prefix cache")

# %% [markdown]
# ## A number that hurts
#
# A chat model has no memory. At every turn the program sends the whole conversation again, and the
# model reads all of it again. Here are four turns, with nothing kept from one to the next. The
# [**time to first token**](../docs/glossary.md#time-to-first-token-ttft) (TTFT) is how long the
# reader looks at an empty line. (Numbers in ⟨ ⟩ are measured, so yours differ.)

# %%
RULES = "You are the librarian of a small town by the sea. Answer in one or two short sentences."
QUESTIONS = (
    "Where are the maps?",
    "And the old ones, of the coast?",
    "May I take one home for a week, if the weather is good?",
    "Thank you. When do you close?",
)


def chat(llm: LLM):
    """Each turn's prompt, answer, tokens computed before its first token, and TTFT in seconds."""
    messages, turns = [{"role": "system", "content": RULES}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt_ids = llm.chat_prompt(messages)
        with llm.count_work() as work:
            started = time.perf_counter()
            deltas = llm.stream_deltas([prompt_ids], greedy)  # one per token, with its text
            answer = next(deltas).text
            seconds = time.perf_counter() - started
            answer += "".join(delta.text for delta in deltas)
        messages.append({"role": "assistant", "content": answer})
        turns.append((prompt_ids, answer, work.tokens_prefilled, seconds))
    return turns


alone.generate("warm up", SamplingParams(max_tokens=1))
turns_alone = chat(alone)
for number, (prompt_ids, _, computed, seconds) in enumerate(turns_alone, 1):
    ttft = mark(1e3 * seconds, "ms")
    print(f"turn {number}: a prompt of {len(prompt_ids)} tokens, {computed} computed, TTFT {ttft}")
print(f"all four: {sum(computed for _, _, computed, _ in turns_alone)} tokens computed")

# %% [markdown]
# ## Why it is wasteful
#
# How much of a turn's prompt was there, token for token, in the turn before?


# %%
def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common from their beginnings on."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


known_tokens = [0]
for number in range(1, len(turns_alone)):
    before = [*turns_alone[number - 1][0], *alone.tokenizer.encode(turns_alone[number - 1][1])]
    prompt_ids = turns_alone[number][0]
    known_tokens.append(common(before, prompt_ids))
    share = known_tokens[-1] / len(prompt_ids)
    print(f"turn {number + 1}: {known_tokens[-1]} of {len(prompt_ids)} tokens ({share:.0%})")

# %% [markdown]
# Their keys and values were in the cache when the answer before ended (all but those of its last token,
# which no step had read yet), and were thrown away.
#
# May they be used again? The words *the old maps* stand at the beginning of two texts, and in the
# middle of a third (where *the*, with a space before it, is another token). Predict: in the first
# layer, the keys of *old maps* in the third text are compared with those in the first. The rotation
# by their positions (chapter 13) is undone before. Are they equal? Write `"yes"` or `"no"`.

# %%
guess_keys = predict("First layer, positions undone: equal keys in another text?", None)

# %%
first, second, third = (
    alone.tokenizer.encode(text)
    for text in ("the old maps are here", "the old maps were sold", "Where do the old maps lie")
)
place, start = common(first, second), third.index(first[1])
heads = {number: recorded_heads(alone, ids) for number, ids in enumerate((first, second, third), 1)}
one, other = heads[1][-1].k[:place], heads[2][-1].k[:place]
torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
print(f"in the same beginning: {place} tokens with equal keys, up to the last layer")


def apart(layer: int, undone: bool) -> float:
    """How far the keys of "old maps" in the third text differ from those in the first, on average."""
    texts = (heads[number][layer] for number in (1, 3))
    k, other_k = (turned_back(alone, each).k if undone else each.k for each in texts)
    right, found = k[1:place], other_k[start : start + place - 1]
    return float((found - right).abs().mean() / right.abs().mean())


for layer, name in ((0, "first layer"), (-1, "last layer")):
    print(
        f"in the middle of another text, {name}: {apart(layer, False):.0%} apart as they are stored, "
        f"{apart(layer, True):.0%} with the rotation undone"
    )
guess_keys.compare("yes" if apart(0, True) < 1e-3 else "no")

# %% [markdown]
# Besides its own token, a key depends on two things. It depends on *where* its token stands, because it
# was rotated by its position: that could be undone. And from the second layer on it depends on *all
# tokens before it*, because attention has mixed them in: that cannot be undone. So only equal
# *beginnings* can be shared as they are, up to the first token that differs.
#
# ## The smallest version that works: a chain of hashes
#
# A block can be shared if its tokens are equal *and* all tokens before it are. Give each full block $i$
# a name $h_i$ that says both: a hash (a short fingerprint: equal input gives equal output, and no two
# inputs that give the same SHA-256 are known) of its tokens and of the name of the block before,
#
# $$h_i = \mathrm{hash}(h_{i-1},\; x_{iB}, \dots, x_{iB+B-1}), \qquad h_{-1} = \text{salt}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x_p$ | token at position $p$ | `token_ids[p]` |
# | $B$ | tokens per block | `BLOCK` |
# | $h_i$ | name of block $i$ and of everything before it | `name` |
# | salt | a start value; other salts give other names (see the traps) | `salt` |
#
# A dict from names to blocks is a prefix cache.
#
# The same can be kept as a **tree**, in which a path from the root spells a beginning. Where texts part,
# the tree branches. Here each node is one full block, found by its tokens in a dict; a node with none
# below it is a *leaf*. (A dict hashes these tokens too, but then it compares them, so two different
# blocks are never taken for each other.)
#
# A tree with one node per block is a *trie* of blocks. In a **radix tree**, a chain of nodes without
# branches is one node, which is split when a text parts from it in the middle.
# [SGLang](https://arxiv.org/abs/2312.07104) keeps a radix tree of tokens, and minigen's
# `RadixPrefixCache` has its name from there, although it keeps one node per block.


# %%
class HashChain:
    """Knows full blocks by a hash of their tokens and of the block before."""

    def __init__(self):
        self.block_of = {}

    def names(self, token_ids, salt=None):
        name = repr(salt).encode()
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            name = hashlib.sha256(name + repr(token_ids[start : start + BLOCK]).encode()).digest()
            yield name

    def match(self, token_ids, salt=None):
        """How many full blocks of the text are known, from its beginning on."""
        known = 0
        for name in self.names(token_ids, salt):
            if name not in self.block_of:
                break
            known += 1
        return known

    def insert(self, token_ids, salt=None):
        for name in self.names(token_ids, salt):
            self.block_of.setdefault(name, len(self.block_of))


# %%
class Tree:
    """Knows full blocks by the path that leads to them."""

    def __init__(self):
        self.roots = {}

    def blocks(self, token_ids):
        starts = range(0, len(token_ids) - BLOCK + 1, BLOCK)
        return [tuple(token_ids[start : start + BLOCK]) for start in starts]

    def match(self, token_ids, salt=None):
        node, known = self.roots.get(salt, {}), 0
        for block in self.blocks(token_ids):
            if block not in node:
                break
            node, known = node[block], known + 1
        return known

    def insert(self, token_ids, salt=None):
        node = self.roots.setdefault(salt, {})
        for block in self.blocks(token_ids):
            node = node.setdefault(block, {})


# %% [markdown]
# Do they find the same, and the same as the package? Here are 300 prompts made of few different blocks,
# so that they often begin alike. `make_manager(blocks, sequences)` creates the engine's block manager
# (the block tables of all requests, and the package's cache); `enter` starts a request in it, and counts
# its prompt as computed. (The last token is left out of what is looked for; the traps below say why.)

# %%
chance = random.Random(23)
chain, tree, manager, found = HashChain(), Tree(), make_manager(20_000, 1), []
for _ in range(300):
    kinds = [chance.choice((1, 1, 1, 2, 3)) for _ in range(chance.randrange(1, 7))]
    prompt = [kind for kind in kinds for _ in range(BLOCK)] + [9] * chance.choice((0, 1, 5))
    blocks_found = chain.match(prompt[:-1])
    assert tree.match(prompt[:-1]) == blocks_found
    sequence = enter(manager, prompt)
    assert sequence.num_cached == BLOCK * blocks_found
    manager.free(sequence)
    chain.insert(prompt)
    tree.insert(prompt)
    found.append(blocks_found)
print(f"{len(found)} prompts, {sum(found)} blocks found by each of the three")
print(f"{len(chain.block_of)} names in the chain, {manager.prefix_cache.num_blocks} blocks kept")

# %% [markdown]
# ## What it saves: time to first token
#
# The package's cache also knows which block of memory holds a node's keys and values, how many
# sequences use it now, and in which order blocks fell out of use. Here is the same chat with it.
# Predict: how many tokens does the fourth turn compute before its first token?

# %%
guess_turn = predict("Tokens computed in turn 4, with a prefix cache?", None, within=1.5)

# %%
llm = load_model(weights="float32")
fresh = iter(range(1_000, 40_000))  # tokens that no prompt has had
llm.generate("warm up", SamplingParams(max_tokens=1))
turns = chat(llm)
assert [answer for _, answer, _, _ in turns] == [answer for _, answer, _, _ in turns_alone]
computed_alone, computed = ([each[2] for each in run] for run in (turns_alone, turns))
print("the same four answers")
for number, (before, now) in enumerate(zip(turns_alone, turns, strict=True), 1):
    ratio = mark(now[3] / before[3], "of the time without", 2)
    print(f"turn {number}: {now[2]} tokens computed, TTFT {mark(1e3 * now[3], 'ms')}, {ratio}")
guess_turn.compare(computed[3])
picture(
    draw.by_turn({"nothing kept": computed_alone, "with the tree": computed}),
    "Tokens that each turn of the chat computes before its first token. Without a prefix cache they "
    "grow with the conversation; with it, a turn computes only its own end.",
    number="23.1",
)

# %% [markdown]
# From the second turn on, a turn computes what is new in it, and the earlier tokens that stood
# behind the last full block.
#
# By how much does TTFT fall? The prefill (chapter 17) of a prompt of $n$ tokens, $c$ of which are
# cached, takes in one step about
#
# $$\text{TTFT} \approx t_0 + (n - c)\, t_1$$
#
# where $t_0$ is what any step costs, $t_1$ what a token adds, and waiting in a queue comes on top. So the
# *share* that was found, $c/n$, is not all that matters: the shorter the prompt, the larger the part
# $t_0$ that no cache can save. (In long contexts, the new tokens' attention over the cached ones is a
# third part. It is not saved either. Chapter 17's formula is the larger of reading and arithmetic, plus
# an overhead. When so few tokens are left that reading the weights takes longer than the
# arithmetic, TTFT stops falling, and the straight line above no longer holds. In chapter 17's
# formula, $t_0$ was the overhead alone; here it is what the line gives at no tokens.)
#
# Predict: half of a prompt of 256 tokens is found. What part of TTFT remains (a number from 0 to 1)? Take
# $t_0$ and $t_1$ from the first and the last turn at the top.

# %%
guess_half = predict(
    "TTFT with half of 256 tokens found, as a part of TTFT with none?", None, within=1.15
)


# %%
def first_token_seconds(length: int, shares: tuple[float, ...]) -> dict[int, float]:
    """Return, by the number of tokens found, the better TTFT of two runs.

    `shares` are the known parts of a prompt of `length` tokens; the first is 0.
    """
    best = {}
    for _ in range(2):
        known = []  # the first prompt; the others begin as it does
        for num_known in (int(share * length) for share in shares):
            prompt = known[:num_known] + [next(fresh) for _ in range(length - num_known)]
            known = known or prompt
            with llm.count_work() as work:
                started = time.perf_counter()
                llm.generate(prompt, SamplingParams(max_tokens=1))
                seconds = time.perf_counter() - started
            best[work.tokens_cached] = min(seconds, best.get(work.tokens_cached, seconds))
    return best


lines = {}
for length, shares in ((256, (0, 0.5, 0.75, 0.9375)), (64, (0, 0.5, 0.75))):
    timed = first_token_seconds(length, shares)
    lines[f"{length} tokens"] = {each / length: timed[each] / timed[0] for each in timed}
    for cached, seconds in timed.items():
        print(f"{cached:>3} of {length:>3} found: TTFT {mark(1e3 * seconds, 'ms')}, ", end="")
        print(f"{mark(seconds / timed[0], '', 2)} of that with nothing found")
guess_half.compare(lines["256 tokens"][0.5], measured=True)
picture(
    draw.by_share(lines),
    "Time to first token against the share of the prompt that was found, relative to the same prompt "
    "with nothing found. The dashed line is the share that is left to compute.",
    number="23.2",
)

# %% [markdown]
# By the formula, TTFT falls along a straight line above the dashed one: extended to 100 %, it would end
# at $t_0$ as a part of the whole. (The last point of each line still computes 16 tokens. Each point
# is the better of two runs; run the cell again to see how far the points move. A point below the
# dashed line does not fit the formula: perhaps the runs with nothing found were slowed by something
# else on the machine.) For a short prompt, $t_0$ is a larger part of the whole. The chat's fourth
# turn shows it, too: its prompt is short, and its TTFT fell by less than the share that was found.
#
# ## What it saves: memory. What it does not: bandwidth
#
# One request has computed a system prompt of 500 tokens, and still runs. Then a hundred users come, each
# with 20 tokens of their own behind the same prompt:

# %%
shared, own = list(range(500)), 20
manager = make_manager(4_000, 101)
office = [enter(manager, shared)]
office += [enter(manager, [*shared, *[1_000 + user] * own]) for user in range(100)]
owners = [manager.allocator.num_owners(block) for block in office[0].block_ids]
in_use = len({block for each in office for block in each.block_ids})
separate = sum(len(each.block_ids) for each in office)
print(
    f"owners of the prompt's {len(owners)} blocks: {owners[0]} of each of {owners.count(102)}, ",
    end="",
)
print(f"{owners[-1]} of the last, which is not full")
print(f"blocks in use: {in_use}; if each had its own: {separate:,} ({separate / in_use:.1f} times)")

# %% [markdown]
# The 102 owners are 101 requests and the tree. So memory is saved. Now think of a
# [decode](../docs/glossary.md#decode) step of all these requests. What must attention read? This is
# arithmetic, not a measurement: an ordinary kernel works on each sequence alone, and reads the
# whole context of each. (At 2 bytes per number. In this notebook's float32, all numbers would be
# twice as large.)

# %%
per_token = alone.config.kv_bytes_per_token
full = BLOCK * owners.count(102)  # tokens in the blocks that all share
read = sum(len(each) for each in office)
once = full + sum(len(each) - full for each in office)
print(f"kept:                 {BLOCK * in_use * per_token / 1e6:>6,.0f} MB,", end=" ")
print(f"without sharing {BLOCK * separate * per_token / 1e6:,.0f} MB")
print(f"read in a decode step: {read * per_token / 1e6:>5,.0f} MB, with or without sharing")
print(f"read, if the shared blocks are read once for all: {once * per_token / 1e6:,.0f} MB")

# %% [markdown]
# One copy of the shared blocks is kept, and an ordinary kernel reads it 101 times in each step.
# Kernels that read a shared beginning once for all sequences that use it exist; the end of this
# chapter names them. On a GPU, some of the repeated reads may be answered by its cache; then the
# memory delivers an amount between those of the last two lines.
#
# ## The tree as it grows
#
# Here is a small engine with room for 14 blocks of 4 tokens. Six readers come one after another. Press
# play: a prompt is computed, its full blocks enter the tree, the answer grows behind it, and its blocks
# become grey when the reader has gone: no running sequence is their **user** any more. Then memory runs
# short, and blocks are **evicted** ([eviction](../docs/glossary.md#eviction)).

# %%
small = load_model(weights="float32", block_size=4, num_blocks=14)
KIND = "You are a kind librarian. Answer in one short sentence."
readers = [
    f"{KIND} Where are maps?",
    f"{KIND} Where are poems?",
    "Once upon a time there was a cat",
    f"{KIND} Where are maps of the sea?",
    "The sun is a star and the moon is not, they say, or so I heard",
    f"{KIND} Where are poems?",
]
prompts = [small.tokenizer.encode(text) for text in readers]
with small.record() as recorder:
    for prompt in prompts:
        small.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
states = draw.tree_states(recorder.events, prompts, block_size=4)


def after(step):
    return draw.radix_tree(states, step, 4, small.tokenizer.decode)


replay(
    after,
    len(states),
    "A tree of blocks, and the prompts so far, at the step with the most evictions. Shared beginnings "
    "are kept once. Special tokens are not shown. Grey blocks have no user; dashed ones were "
    "evicted to make room.",
    number="23.3",
    at=max(range(len(states)), key=lambda step: len(states[step].evicted)),
)

# %% [markdown]
# Cached blocks cost next to nothing while memory is plentiful. When it runs short, the **least
# recently used** go first. And of one sequence, the *last* block goes first: a sequence that uses a
# block uses all blocks before it, and when it ends, the cache counts one user less of its blocks
# from the last to the first. So a block falls out of use after all blocks that follow it, and
# eviction never cuts a path in two. If a prompt's first block were evicted first, the later ones
# would stay in memory, but could not be matched until it is computed again.
#
# ## The traps
#
# Predict two of them. First: a prompt of 48 tokens (three full blocks) is asked twice. How many of its
# tokens does the second request find? Then: the same rules stand behind a clock that has changed, *It is
# 9 o'clock. You are the librarian ...* How many tokens are found?

# %%
guess_exact = predict("Tokens found when the same 48 tokens are asked again?", None, within=1)
guess_clock = predict("Tokens found behind a clock that has changed?", None, within=1)


# %%
def found_by_second(one: list[int], other: list[int], salts=(None, None)) -> int:
    """Tokens that `other` finds after `one` has been answered."""
    llm.generate(one, SamplingParams(max_tokens=1), cache_salt=salts[0])
    with llm.count_work() as work:
        llm.generate(other, SamplingParams(max_tokens=1), cache_salt=salts[1])
    return work.tokens_cached


def words(text: str) -> list[int]:
    return llm.tokenizer.encode(text)


exact = [next(fresh) for _ in range(3 * BLOCK)]
found_exact = found_by_second(exact, exact)
print(f"1 the same {len(exact)} tokens again: {found_exact}")
both = [next(fresh) for _ in range(3 * BLOCK)]
with llm.count_work() as work:
    llm.generate([[*both, 1], [*both, 2]], SamplingParams(max_tokens=1), progress=False)
print(f"2 {len(both)} equal tokens, both at the same time: {work.tokens_cached}")
mine = [next(fresh) for _ in range(3 * BLOCK)]
apart_from = found_by_second(mine, [*mine, 1], ("ann", "bob"))
print(
    f"3 another salt: {apart_from}, the same: {found_by_second(mine, [*mine, 1], ('cid', 'cid'))}"
)
LONG = RULES + " Be kind to everyone who asks, and name the shelf."
dated = [words(f"It is {hour} o'clock. {LONG}") for hour in (9, 10)]
after_it = [words(f"{LONG} It is {hour} o'clock.") for hour in (9, 10)]
found_dated = found_by_second(*dated)
print(f"4 the hour in front: {found_dated}, at the end: {found_by_second(*after_it)}")
guess_exact.compare(found_exact)
guess_clock.compare(found_dated)

# %% [markdown]
# 1. **A full hit (all tokens are found) must still compute at least one token.** The cache keeps
#    keys and values, but no [logits](../docs/glossary.md#logits), and without logits there is no
#    next token. Since a block is shared whole or not at all, the last block is computed again. An
#    engine that forgets this runs the model on no tokens. That is this chapter's bug hunt.
# 2. **A block that is being written is not shared.** It is found once it is full and computed. Here both
#    requests computed the same; afterwards one copy is kept, and the other one's blocks are given back.
# 3. **Equal tokens are not always equal keys.** They differ if the weights do (some servers add a
#    small correction of a customer's own to some matrices, a **LoRA adapter**), or if another image
#    is meant by the same tokens (a prompt with an image has placeholder tokens in its place). And a
#    prompt whose beginning is found (a **hit**) is faster than one of which nothing is found, so a
#    stranger may find out by timing whether a question was asked before. A
#    [**salt**](../docs/glossary.md#cache-salt) at the root keeps such requests apart.
# 4. **What changes goes to the end.** With a clock in front of the rules, nothing is found once it has changed.
#
# ## How much memory is enough?
#
# The **hit rate** is the share of all prompt tokens that were found,
#
# $$\text{hit rate} = \frac{\sum_r c_r}{\sum_r n_r}$$
#
# over the requests $r$, with $c_r$ of $n_r$ tokens cached. It is a number to watch on a dashboard
# (chapter 52). Which hit rate is good depends on the traffic: it cannot exceed the share of tokens
# that repeat. A hit rate far below that share often means that memory is too small, or that
# something in front of the prompts changes.
#
# Drag it: users come back in random order, each with the shared prompt and a history of 128 tokens of
# their own. Find the pool below which histories are evicted before their user is back, and compare it
# with the blocks that all prompts together need. Whose histories are still found in the smallest pool?
# (With 20 users and 256 shared tokens, nothing is evicted from 177 blocks on (on the slider: 180): 176
# for all prompts, and one because 384 tokens are exactly 24 blocks, so a full hit computes the last one
# again, in a block of its own. In 50 blocks, the last four users still find all of theirs but the last
# block, which is always computed again.)


# %%
def traffic(users, shared_tokens, pool_blocks):
    return draw.visits_figure(visit(users, shared_tokens, 128, pool_blocks, num_requests=120))


explore(
    traffic,
    "Found and computed tokens of 120 requests, and the blocks that were evicted for each. With 120 "
    "blocks, the shared prompt is found by all but the first, and a history only if its user comes "
    "back soon.",
    "23.4",
    users=(1, 60, 1, 20),
    shared_tokens=(0, 512, 16, 256),
    pool_blocks=(50, 500, 10, 120),
)

# %% [markdown]
# ## Your turn
#
# Two steps. First a cache that finds and keeps blocks, and never evicts. It must count the owners of
# blocks right: `allocator.share(blocks)` adds an owner to each, `allocator.release(blocks)` removes one
# (chapter 21). Here is what the engine does around it:
#
# 1. A request arrives. `match` returns the blocks of its beginning. From now on the request owns them,
#    too: that is the share in `match`.
# 2. The engine allocates blocks for the rest, and computes it.
# 3. When blocks are full and computed, it calls `insert`. From now on the cache owns these blocks, too.
#    Where it has an equal block already, `insert` makes the request an owner of that one, gives the
#    request's own back, and returns a pair (index, kept block), which the engine writes into the
#    request's block table.
# 4. When the request ends, the engine releases all blocks of the request. Those in the cache stay,
#    because the cache still owns them.

# %%
task(23, "PrefixTree")

# %%
# exercise: minigen_course.ch23_prefix.lesson.PrefixTree
from collections.abc import Sequence as SequenceOf

from minigen.protocols import BlockAllocator


class PrefixTree:
    """A prefix cache that finds and keeps blocks, and never evicts one.

    It is one owner of each block that it keeps.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        raise NotImplementedError  # your turn

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest kept prefix of `token_ids`, each with one more owner.

        At least one token is left without a block. Only sequences with the same `salt` share.
        """
        raise NotImplementedError  # your turn

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Keep a sequence's full, computed blocks, from index `first` of its block table on.

        `block_ids` is the block table, and `token_ids` are the tokens in its full blocks. The
        blocks before `first` are kept already. If an equal block is kept, the sequence gets one
        more share of that one, and its own block is released. Returns a pair (index, kept block)
        for each of these.
        """
        raise NotImplementedError  # your turn


# %%
my_tree = check(23, PrefixTree=PrefixTree)

# %% [markdown]
# It runs in the engine: `WithoutEviction` adds the methods that it lacks, and they do nothing. That
# works as long as memory is plentiful. Every call is watched, so a mistake is reported where it was
# made. (As long as yours has not passed, `my_tree` is the course's.)

# %%
growing = load_model(
    weights="float32",
    prefix_cache=lambda allocator, size: WithoutEviction(my_tree(allocator, size)),
)
print("tokens computed in each turn of the chat:", [each[2] for each in chat(growing)])

# %% [markdown]
# The second step makes it a whole prefix cache. Blocks that are kept for ever fill the memory, so
# the engine asks for some of them back: `evict(count)`. A block may go if no sequence *uses* it.
# Users are counted apart from owners (the cache is an owner, and must know in which order blocks
# lost their last user): `match` and `insert` add a user to a block, and the engine calls `acquire`
# when a sequence that uses blocks is forked, and `release` when one ends, is preempted, or does not
# fit after `match`. `insert` counts no user for the blocks before `first`: this sequence is counted
# there already.

# %%
task(23, "RadixPrefixCache")

# %%
# exercise: minigen.kv_cache.radix_cache.RadixPrefixCache
from collections.abc import Sequence as SequenceOf

from minigen.protocols import BlockAllocator


class RadixPrefixCache:
    """A prefix cache as a radix tree; the cache is one owner of each block that it stores.

    A sequence that uses a node uses all nodes above it, so the unused nodes are at the bottom of
    the tree. A sequence releases its last block first, so in the order in which nodes fell out of
    use, a node always comes after all of its children. Therefore the first of the unused nodes is
    a leaf, and evicting it is O(1).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        raise NotImplementedError  # your turn

    @property
    def num_evictable(self) -> int:
        """The number of cached blocks that no sequence uses."""
        raise NotImplementedError  # your turn

    @property
    def num_blocks(self) -> int:
        """The number of cached blocks, used or not."""
        raise NotImplementedError  # your turn

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix of `token_ids`, each with one more owner.

        At least one token is left without a block, because a step must compute a token to have
        logits. Only sequences with the same `salt` share blocks.
        """
        raise NotImplementedError  # your turn

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Store a sequence's full, computed blocks, from index `first` of its block table on.

        `block_ids` is the block table, and `token_ids` are the tokens in its full blocks. The
        blocks before `first` are cached already. If an equal block is cached, the sequence uses
        that one, and its own block is released. Returns a pair (index, cached block) for each of
        these; their reference counts are already updated.
        """
        raise NotImplementedError  # your turn

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Count one more user of these blocks: the fork of a sequence that uses them."""
        raise NotImplementedError  # your turn

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Count one user less of these blocks, given in order, before the caller releases them."""
        raise NotImplementedError  # your turn

    def evict(self, count: int) -> list[int]:
        """Free up to `count` unused blocks, the least recently used first; return them."""
        raise NotImplementedError  # your turn


# %%
my_cache = check(23, RadixPrefixCache=RadixPrefixCache)

# %% [markdown]
# ## The package's version
#
# One argument puts it into the engine, with memory for 4 blocks only, so that it has to evict. (It never
# evicts the two blocks that all questions share. Behind them the questions differ, and each is asked once, so
# with more memory it would find no more.)

# %%
tight = load_model(weights="float32", prefix_cache=my_cache, num_blocks=4)
with tight.count_work() as work:
    for question in QUESTIONS:
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        tight.generate(f"{LONG} {question}", params)
print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed,", end=" ")
print(f"{work.blocks_evicted} blocks evicted")
reveal(23, PrefixTree=my_tree, RadixPrefixCache=my_cache)

# %% [markdown]
# ## A bug hunt
#
# The cache below looks right: it has a dict in the place of the tree, and it passes most checks. **The
# report:** *The server ran for weeks. Then a monitor was set up that sends the same question every
# minute, and the second request crashes the server. But this happens only with some questions: with one
# word more, everything works.*
#
# Find the mistake. First reproduce it with a test that fails on this cache and passes on every
# correct one. Then fix the cache, in the cell below. Your test is judged as well, on caches that
# are correct and on some with a mistake of the same family. (It needs the package's allocator:
# `from minigen.kv_cache.block_allocator import BlockAllocator`. The name imported above is only the
# interface.) `serve_toy` runs the real engine around a toy model, whose next token follows from all
# tokens that it reads. (There the crash says that `allocate`, the [block
# manager's](../docs/glossary.md#block-manager), was called twice: it returns how many tokens to
# compute, 0 also means "no room", and so the scheduler calls it again.)
#
# It has happened. nano-vllm crashed on prompts of exactly one block
# ([issue 114](https://github.com/GeeeekExplorer/nano-vllm/issues/114)). InfiniLM fixed a crash on
# full hits
# ([pull request 381](https://github.com/InfiniTensor/InfiniLM/pull/381)) and names SGLang's rule for it.
# vLLM computes the whole last block again
# ([pull request 11186](https://github.com/vllm-project/vllm/pull/11186)).

# %%
# hunt: minigen_course.ch23_prefix.hunt
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.protocols import BlockAllocator as Allocator
from minigen_course.ch23_prefix.hunt import Name


class ChainedPrefixCache:
    """A prefix cache without a tree: a block's name is its salt and all tokens up to its end."""

    def __init__(self, allocator: Allocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self.block_of: dict[Name, int] = {}
        self.name_of: dict[int, Name] = {}
        self.num_users: dict[int, int] = {}
        self.unused: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self.unused)

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        matched: list[int] = []
        for end in self.ends(token_ids):
            name = (salt, tuple(token_ids[:end]))
            if name not in self.block_of:
                break
            matched.append(self.block_of[name])
        self.allocator.share(matched)
        self.acquire(matched)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        exchanged = []
        for index, end in list(enumerate(self.ends(token_ids)))[first:]:
            name, own = (salt, tuple(token_ids[:end])), block_ids[index]
            if name not in self.block_of:
                self.block_of[name], self.name_of[own] = own, name
                self.num_users[own] = 0
                self.allocator.share([own])
            elif self.block_of[name] != own:
                self.allocator.share([self.block_of[name]])
                self.allocator.release([own])
                exchanged.append((index, self.block_of[name]))
            self.acquire([self.block_of[name]])
        return exchanged

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        for block_id in block_ids:
            self.unused.pop(block_id, None)
            self.num_users[block_id] += 1

    def release(self, block_ids: SequenceOf[int]) -> None:
        for block_id in reversed(block_ids):
            self.num_users[block_id] -= 1
            if self.num_users[block_id] == 0:
                self.unused[block_id] = None

    def evict(self, count: int) -> list[int]:
        evicted = list(self.unused)[:count]
        for block_id in evicted:
            del self.block_of[self.name_of.pop(block_id)]
            del self.unused[block_id], self.num_users[block_id]
        self.allocator.release(evicted)
        return evicted

    def ends(self, token_ids: SequenceOf[int]) -> range:
        """Return the positions where the full blocks of a text end."""
        return range(self.block_size, len(token_ids) + 1, self.block_size)


def test_prefix_cache(PrefixCache: Any) -> None:
    """Assert what every correct prefix cache does, and the one above does not.

    Create it as PrefixCache(BlockAllocator(num_blocks), block_size).
    """
    raise NotImplementedError  # your turn


# %%
hunt(23, test=test_prefix_cache, mended=ChainedPrefixCache)
for question in ([5, 3, 8, 1, 2], [5, 3, 8, 1]):  # blocks have 4 tokens here
    try:
        served = serve_toy([question] * 2, prefix_cache=ChainedPrefixCache, max_num_seqs=1)
        print(f"{len(question)} tokens, asked twice:", *served.answers[1])
    except RequestError as error:
        print(f"{len(question)} tokens, asked twice:", error)

# %% [markdown]
# ## The measurement again
#
# The chat from the top: tokens computed before the first tokens of its four turns, with nothing kept,
# with the package's cache, and with `my_cache`.

# %%
again = [each[2] for each in chat(load_model(weights="float32", prefix_cache=my_cache))]
whose = "the package's" if my_cache is PackageCache else "your"
print(f"nothing kept:         {computed_alone}, {sum(computed_alone)} in all")
print(f"the package's cache:  {computed}, {sum(computed)} in all")
print(f"my_cache ({whose}): {again}, {sum(again)} in all")
print(f"ratio: {sum(computed_alone) / sum(again):.1f}")

# %% [markdown]
# ## Claims
#
# What is often heard, beside what this notebook found. The outcomes are computed from the numbers,
# except for the claim that is not tested.

# %% jupyter={"source_hidden": true}
long, short = lines["256 tokens"], lines["64 tokens"]
off = {
    name: max(abs(ratio - (1 - share)) for share, ratio in line.items())
    for name, line in lines.items()
}
new_tokens = [len(turn[0]) - known for turn, known in zip(turns, known_tokens, strict=True)]
more = sum(computed) / sum(new_tokens)
verdicts(
    "23",
    Claim(
        "A repeated system prompt cuts the time to first token by the share that was cached",
        f"half of 256 tokens found: {mark(long[0.5], '', 2)} of the time; three quarters of 64 "
        f"found: {mark(short[0.75], '', 2)}",
        holds(max(off.values()) <= 0.1),
        "read as: at most 0.1 away from the share that is left, for both lengths. By the formula, "
        "what every step costs is never saved, and in a short prompt it is a large part. So to halve the time, "
        "more than half of the prompt must be found (a run may differ)",
        measured=True,
    ),
    Claim(
        "100 users of one 500-token prompt keep one copy of it",
        f"{in_use} blocks instead of {separate:,}; {owners.count(102)} of the prompt's {len(owners)} "
        "blocks are shared by all",
        holds(owners.count(102) == len(shared) // BLOCK),
        "all full blocks; the last block of the prompt is not full, so each user has its own",
    ),
    Claim(
        "Prefix caching saves memory, but no bandwidth",
        f"by arithmetic, a decode step reads {read:,} tokens' keys and values in either case, and "
        f"{once:,} if the shared blocks are read once for all",
        NOT_TESTED,
        "it is right of kernels that work on each sequence alone; a GPU's cache may answer some of the "
        "repeated reads, and a kernel that reads shared blocks once needs none of them",
    ),
    Claim(
        "With a prefix cache, a turn of a chat computes only what is new in it",
        f"{sum(new_tokens)} tokens are new in four turns, {sum(computed)} were computed",
        within(more, 1, 1.05),
        "blocks are shared whole: from the second turn on, the rest of the last block is computed again, and the last token of the answer before, which no step had read yet, is computed for the first time",
    ),
)

# %% [markdown]
# ## Summary
#
# - A key depends on its token, its position and, from the second layer on, all tokens before it. So
#   only equal beginnings can be shared as they are.
# - A block is identified by its tokens and everything before it: by a chain of hashes, or as a path in a
#   tree.
# - The cache is one owner of each block that it keeps. Users are counted apart: a block without users
#   may be evicted, the least recently used first, and of one sequence the last block first.
# - Time to first token falls with the share that was found, except for what every step costs.
# - Memory is saved. What a decode step reads is not, unless a kernel reads shared blocks once.
# - A full hit must still compute at least one token; a block that is being written is not shared;
#   salts keep apart what must not be shared; what changes goes to the end of the prompt.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. Blocks of 16. The prompts of two requests agree in their first 40 tokens, and the
# first request has been answered. How many tokens does the second one find?</summary>
# 32: two full blocks agree. The third block differs in its ninth token, and a block is shared
# whole or not at all.</details>
#
# <details><summary>2. A block is owned by the cache and used by no sequence. How many owners does it
# have, and what happens when it is evicted?</summary>
# One owner, the cache. Eviction releases it, so its reference count becomes 0 and the block is
# free.</details>
#
# <details><summary>3. A server's hit rate falls from 60 % to 0 % after a new version of the application
# is deployed. Where do you look first?</summary>
# At the beginning of the prompts: something that changes with every request, such as the time or the request's
# number, probably stands in front of the shared part now.</details>
#
# ## What the production engines do beyond this
#
# - **[SGLang](https://github.com/sgl-project/sglang)** keeps a radix tree of tokens
#   ([RadixAttention](https://arxiv.org/abs/2312.07104)), and can schedule those requests first that have
#   the longest hits. **[vLLM](https://docs.vllm.ai/en/latest/design/prefix_caching/)** chains hashes of
#   blocks, as the first class above does; **TensorRT-LLM** keeps a tree of blocks, as the second does.
#   vLLM hashed by Python's `hash` at first; collisions (different blocks with one hash) could be made on
#   purpose. Now SHA-256 is its default. It has a `cache_salt` per request, too.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)**'s server keeps the last prompt of each slot (a
#   place for one sequence there), and can pick the slot with the longest beginning in common with a
#   new prompt, token by token. Slots can be saved to disk.
# - *Tiers*: **[LMCache](https://github.com/LMCache/LMCache)** with vLLM, SGLang's HiCache and
#   TensorRT-LLM copy blocks to the host's memory or to other storage, at once or when they are
#   evicted, and fetch them back.
# - *Routing*: with many replicas, a request should go where its prefix is. SGLang's router and
#   **[NVIDIA Dynamo](https://github.com/ai-dynamo/dynamo)** keep track of what each replica holds,
#   or estimate it.
# - *Bandwidth*: cascade attention ([FlashInfer](https://flashinfer.ai/2024/02/02/cascade-inference.html),
#   and in vLLM, as an option, where all requests share a prefix) reads a shared beginning once for the
#   whole batch, and merges it with each request's own rest.
# - *Prices*: several providers of models bill cached input tokens at a fraction of the price.
#
# ## Further reading
#
# - [SGLang: Efficient Execution of Structured Language Model
#   Programs](https://arxiv.org/abs/2312.07104), Zheng et al. 2023: section 3 is RadixAttention.
# - [Automatic prefix caching](https://docs.vllm.ai/en/latest/design/prefix_caching/), vLLM's design
#   document: hashes, the queue of free blocks, and what else enters the hash.
# - [Prompt Cache](https://arxiv.org/abs/2311.04934), Gim et al. 2023: sharing parts that are not
#   beginnings, and what that costs in quality.
#
# **Next:** many requests want the same step, and the same memory. [Chapter 24](24_scheduler.ipynb)
# decides who runs.

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
# Keys and values lie in blocks now, and several sequences may own one block. So far only the
# answers to one prompt used that. This chapter shares blocks between requests that know nothing of
# each other: whoever begins alike takes what was computed before.
#
# **Afterwards you can** build a prefix cache as a chain of hashes and as a radix tree, say what it
# saves and what it does not, evict from it, and name the traps that real engines fell into.

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
from minigen_course import Claim, check, hunt, load_model, mark, measured, show, verdicts
from minigen_course.ch23_prefix.figures import (
    by_share,
    by_turn,
    radix_tree,
    tree_states,
    visits_figure,
)
from minigen_course.ch23_prefix.lesson import enter, make_manager, visit
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.lab.inspect_model import recorded_heads
from minigen_course.lab.toy_engine import serve_toy

BLOCK = 16
alone = load_model(weights="float32", enable_prefix_caching=False)
greedy = SamplingParams(temperature=0, max_tokens=12)

# %% [markdown]
# ## A number that hurts
#
# A chat has no memory. At every turn the program sends the whole conversation again, and the model
# reads all of it again. Here are four turns, with nothing kept from one to the next. The *time to
# first token* (TTFT) is how long the reader looks at an empty line.

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
            deltas = llm.stream_deltas([prompt_ids], greedy)
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


for number in range(1, len(turns_alone)):
    before = [*turns_alone[number - 1][0], *alone.tokenizer.encode(turns_alone[number - 1][1])]
    prompt_ids = turns_alone[number][0]
    known = common(before, prompt_ids)
    print(f"turn {number + 1}: {known} of {len(prompt_ids)} tokens ({known / len(prompt_ids):.0%})")

# %% [markdown]
# Their keys and values were in the cache when the answer before ended, and were thrown away.
#
# May they be used again? **Predict:** the words "the old maps" stand at the beginning of two texts,
# and in the middle of a third. Which of their keys are equal?

# %%
first, second, third = (
    alone.tokenizer.encode(text)
    for text in ("the old maps are here", "the old maps were sold", "Where do the old maps lie")
)
place = common(first, second)
keys = {ids: recorded_heads(alone, ids)[-1].k for ids in map(tuple, (first, second, third))}
same = keys[tuple(first)][:place], keys[tuple(second)][:place]
torch.testing.assert_close(*same, atol=1e-3, rtol=1e-3)
moved = keys[tuple(third)][third.index(first[1]) :][: place - 1]
print(f"last layer, behind the same beginning: {place} tokens with equal keys")
apart = float((moved - same[0][1:]).abs().mean() / same[0][1:].abs().mean())
print(f"in the middle of another text: {apart:.0%} apart in the mean")

# %% [markdown]
# A token's keys depend on all that stands before it, and on where it stands. So only equal
# *beginnings* can be shared, up to the first token that differs.
#
# ## The smallest version that works: a chain of hashes
#
# A block can be shared if its tokens are equal *and* all before it are. Give each full block a name
# that says both: a hash of its tokens and of the name of the block before. A dict from names to
# blocks is a prefix cache.
#
# The same as a *radix tree* keeps the tokens themselves: a path from the root spells a beginning,
# and where texts part, the tree branches. Nothing is hashed, so nothing can collide.


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
# Do they find the same, and the same as the package? Three hundred prompts of few different blocks,
# so that they begin alike often. (The last token is left out of what is looked for; the traps below
# say why.)

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
# ## The package's version
#
# Its tree also knows which block of memory holds a node's keys, how many sequences use it now, and
# in which order nodes fell out of use. `match` takes what is known and becomes one more owner of
# each block. `insert` keeps what was computed; where two sequences computed the same at once, the
# second gives its own block back. When memory is short, `evict` frees blocks that nobody uses, the
# *least recently used* first.

# %%
from minigen.kv_cache.radix_cache import RadixPrefixCache

show(
    RadixPrefixCache.match,
    RadixPrefixCache.insert,
    RadixPrefixCache.release,
    RadixPrefixCache.evict,
)

# %% [markdown]
# The same chat with it. **Predict** how many tokens the fourth turn computes.

# %%
llm = load_model(weights="float32")
llm.generate("warm up", SamplingParams(max_tokens=1))
turns = chat(llm)
assert [answer for _, answer, _, _ in turns] == [answer for _, answer, _, _ in turns_alone]
computed_alone, computed = ([each[2] for each in run] for run in (turns_alone, turns))
print("the same four answers")
for number, (before, now) in enumerate(zip(turns_alone, turns, strict=True), 1):
    ratio = mark(before[3] / now[3], "times as long without", 2)
    print(f"turn {number}: {now[2]} tokens computed, TTFT {mark(1e3 * now[3], 'ms')}, {ratio}")
picture(
    by_turn({"nothing kept": computed_alone, "with the tree": computed}),
    "Bars of the tokens computed in each turn: growing without the tree, small with it.",
)

# %% [markdown]
# A turn computes its new question, and what is left of the last block that was not full.
#
# ## What it saves: time to first token
#
# A well-known account has it that a repeated system prompt cuts TTFT from 753 to 367 ms. How much
# it cuts depends on one thing only. Here is a prompt of 256 tokens of which a growing share is
# known:

# %%
LENGTH = 256
fresh = iter(range(1_000, 40_000))


def first_token_seconds(num_known: int) -> tuple[int, float]:
    """Tokens found, and the better TTFT of two prompts of which so many tokens are known."""
    times, cached = [], 0
    for _ in range(2):
        prompt = [next(fresh) for _ in range(LENGTH)]
        if num_known:
            llm.generate(prompt[:num_known], SamplingParams(max_tokens=1))
        with llm.count_work() as work:
            started = time.perf_counter()
            llm.generate(prompt, SamplingParams(max_tokens=1))
            times.append(time.perf_counter() - started)
        cached = work.tokens_cached
    return cached, min(times)


timed = dict(first_token_seconds(known) for known in (0, 64, 128, 192, 240))
ratios = {cached / LENGTH: seconds / timed[0] for cached, seconds in timed.items()}
for cached, seconds in timed.items():
    print(f"{cached:>3} of {LENGTH} found: TTFT {mark(1e3 * seconds, 'ms')}, ", end="")
    print(f"{mark(seconds / timed[0], '', 2)} of that with nothing found")
picture(
    by_share(ratios),
    "TTFT falls with the share found, near the line from one to nothing.",
)

# %% [markdown]
# TTFT falls by the share that was found; what remains at the right end is the step itself.
#
# ## What it saves: memory. What it does not: bandwidth
#
# A hundred users ask at once, each behind the same system prompt of 500 tokens:

# %%
shared, own = list(range(500)), 20
manager = make_manager(4_000, 101)
office = [enter(manager, shared)]
office += [enter(manager, [*shared, *[1_000 + user] * own]) for user in range(100)]
owners = [manager.allocator.num_owners(block) for block in office[0].block_ids]
in_use = len({block for each in office for block in each.block_ids})
apart = sum(len(each.block_ids) for each in office)
print(f"owners of the prompt's {len(owners)} blocks: {owners[0]} of each of {owners.count(102)}, ")
print(f"  {owners[-1]} of the last, which is not full")
print(f"blocks in use: {in_use}; if each user had its own: {apart} ({apart / in_use:.1f} times)")

# %% [markdown]
# The owners are 101 requests and the tree. Now the decode steps, in the engine: four users of one
# prompt, and four users of four prompts, all of them known already. **Predict:** which reads
# less?


# %%
def decode_together(prompts: list[list[int]]):
    """Bytes of keys and values read, and seconds, where every prompt is known before."""
    decode = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate(prompts, SamplingParams(max_tokens=1), progress=False)
    with llm.count_work() as work:
        started = time.perf_counter()
        llm.generate(prompts, decode, progress=False)
        seconds = time.perf_counter() - started
    return work.kv_bytes_read, seconds


one_prompt = [next(fresh) for _ in range(96)]
bytes_one, seconds_one = decode_together([one_prompt] * 4)
bytes_four, seconds_four = decode_together([[next(fresh) for _ in range(96)] for _ in range(4)])
print(f"one prompt:    {bytes_one / 1e6:,.0f} MB of keys and values read")
print(f"four prompts: {bytes_four / 1e6:,.0f} MB")
measured("time, four prompts to one", seconds_four / seconds_one, "", 2)

# %% [markdown]
# Each sequence reads its whole context at each step, whoever owns the blocks. One copy is kept, and
# it is read four times. (Kernels that read a shared beginning once for all of its users exist; the
# end of this chapter names them.)
#
# ## The tree as it grows
#
# A small engine with room for 14 blocks of 4 tokens. Six readers come one after another. Press
# play: a prompt is computed, its full blocks enter the tree, the answer grows behind it, and its
# blocks become grey when the reader has gone. Then memory is short.

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
states = tree_states(recorder.events, prompts, block_size=4)


def after(step):
    return radix_tree(states, step, 4, small.tokenizer.decode)


replay(
    after,
    len(states),
    "A tree of blocks above six prompts: shared beginnings once, branches behind them, grey blocks "
    "that no sequence uses, dashed ones that were evicted.",
    at=max(range(len(states)), key=lambda step: len(states[step].evicted)),
)

# %% [markdown]
# What is kept costs nothing as long as memory is free. When it is short, what was used longest ago
# goes. Look at `leave` above once more: a sequence lets go of its **last** block first. So a block
# falls out of use after all of its children, the first in that order is a leaf, and eviction cuts
# no branch in two. Were the first block of a prompt evicted first, all behind it would be kept and
# never found.
#
# ## The traps
#
# **Predict** how many tokens the second request finds, in each of these:


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
print(f"1 the same {len(exact)} tokens again: {found_by_second(exact, exact)}")
both = [next(fresh) for _ in range(3 * BLOCK)]
with llm.count_work() as work:
    llm.generate([[*both, 1], [*both, 2]], SamplingParams(max_tokens=1), progress=False)
print(f"2 {len(both)} equal tokens, both at the same time: {work.tokens_cached}")
mine = [next(fresh) for _ in range(3 * BLOCK)]
apart_from = found_by_second(mine, [*mine, 1], ("ann", "bob"))
print(
    f"3 another salt: {apart_from}, the same: {found_by_second(mine, [*mine, 1], ('cid', 'cid'))}"
)
LONG = RULES + " Be kind to everybody who asks, and name the shelf."
dated = [words(f"It is {hour} o'clock. {LONG}") for hour in (9, 10)]
after_it = [words(f"{LONG} It is {hour} o'clock.") for hour in (9, 10)]
print(f"4 the hour in front: {found_by_second(*dated)}, at the end: {found_by_second(*after_it)}")

# %% [markdown]
# 1. **A full hit must still compute one token.** The cache keeps keys and values, no scores, and
#    without scores there is no next token. Since a block is shared whole or not at all, the last
#    block is computed again. An engine that forgets this runs the model on nothing. That is this
#    chapter's bug hunt.
# 2. **A block that is being written is not shared.** It is found once it is full and computed. Both
#    computed the same; afterwards one copy is kept, and the other given back.
# 3. **Equal tokens are not always equal keys.** With another adapter of the weights (LoRA) or
#    another image behind the same placeholder they differ; and a hit is faster than a miss, so a
#    stranger can time whether somebody has asked a thing before. A *salt* at the root keeps them
#    apart.
# 4. **What changes goes to the end.** A clock in front of the rules, and nothing is ever found.
#
# ## How much memory is enough?
#
# Users come back in random order, each with the shared prompt and a history of 128 tokens of their
# own. Find the pool below which histories are evicted before their user is back, and the one below
# which the shared prompt is all that is left.


# %%
def traffic(users, shared_tokens, pool_blocks):
    return visits_figure(visit(users, shared_tokens, 128, pool_blocks, num_requests=120))


explore(
    traffic,
    "Columns of found and computed tokens of 120 requests, and the blocks evicted for each.",
    users=(1, 60, 1, 20),
    shared_tokens=(0, 512, 16, 256),
    pool_blocks=(50, 500, 10, 120),
)

# %% [markdown]
# ## Your turn
#
# Write a prefix cache with eviction: a tree, a chain of hashes, or a third thing. `check` says what
# is wrong first; add `hint=1` for a hint.

# %%
# exercise: minigen.kv_cache.radix_cache.RadixPrefixCache
from collections.abc import Sequence as SequenceOf

from minigen.protocols import BlockAllocator


class RadixPrefixCache:
    """A prefix cache as a radix tree; the cache is one owner of each block that it stores.

    A sequence that uses a node uses all nodes above it, so the unused nodes are at the bottom of
    the tree. A sequence releases its last block first, so in `_unused` (least recently used first)
    a node always comes after all of its children. Therefore the first node of `_unused` is a leaf,
    and evicting it is O(1).
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
mine = check(23, RadixPrefixCache=RadixPrefixCache)

# %%
yours = load_model(weights="float32", prefix_cache=mine)
with yours.count_work() as work:
    answers = [
        yours.generate(f"{LONG} {question}", SamplingParams(temperature=0, max_tokens=8))
        for question in QUESTIONS[:3]
    ]
print(f"{work.tokens_cached} tokens found, {work.tokens_prefilled} computed")

# %% [markdown]
# ## A bug hunt
#
# The cache below looks right: it has a dict in the place of the tree, passes most checks, and
# served for weeks. **The report:** *a monitor was set up that sends one question every minute, and
# the second time it takes everything down; but only with some questions: a word more, and all is
# well.*
#
# Find the mistake. Pin it first: a test that fails on this cache, and passes on every right one.
# Then mend the cache, here in this cell. Your test is judged as well, on caches that are right and
# on some with a mistake of the same family. `serve_toy` runs the real engine around a toy model,
# whose next token follows from all that it reads.
#
# It happened. nano-vllm crashed on prompts of exactly one block (issue 114); InfiniLM mended the
# same (pull request 381) and names SGLang's rule for it; vLLM's way is in its pull request 11186.

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
        told = serve_toy([question] * 2, prefix_cache=ChainedPrefixCache, max_num_seqs=1)
        print(f"{len(question)} tokens, asked twice:", *told.answers[1])
    except RequestError as error:
        print(f"{len(question)} tokens, asked twice:", error)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **SGLang** keeps a radix tree of tokens (RadixAttention), and can let those requests go first
#   that have the longest hits. **vLLM** and **TensorRT-LLM** chain hashes of blocks, as the first
#   class above does. vLLM hashed by Python's `hash` at first; collisions could be made on purpose,
#   so it went over to SHA-256. It has a `cache_salt` per request, too.
# - **llama.cpp**'s server keeps the last prompt of each slot, and can pick the slot that
#   has most in common with a new one, token by token; slots can be saved to disk.
# - *Tiers*: **LMCache** with vLLM, **SGLang**'s HiCache and TensorRT-LLM move blocks that would be
#   evicted to the host's memory or to disks, and fetch them back.
# - *Routing*: with many replicas a request should go where its prefix is. SGLang's router and
#   **NVIDIA Dynamo**'s keep trees of what each replica holds, or should hold.
# - *Bandwidth*: cascade attention (**FlashInfer**, and in vLLM where all requests share a prefix)
#   reads a shared beginning once for the whole batch, and merges it with each one's own rest.
# - *Prices*: providers of models bill cached input tokens at a fraction. Put what changes last.

# %%
half = min(timed, key=lambda cached: abs(cached / LENGTH - 0.5))
verdicts(
    "23",
    Claim(
        "A repeated system prompt cuts the time to first token by the share that was cached (753 "
        "to 367 ms was reported once)",
        f"{half / LENGTH:.0%} found: {mark(ratios[half / LENGTH], '', 2)} of the time; "
        f"{max(timed) / LENGTH:.0%} found: {mark(ratios[max(timed) / LENGTH], '', 2)}",
        "held within bounds",
        "it follows the share as long as prefill is bound by arithmetic; one step is always left",
    ),
    Claim(
        "100 users of one 500-token prompt keep one copy",
        f"{in_use} blocks instead of {apart}; {owners.count(102)} of the prompt's {len(owners)} "
        "blocks are shared by all",
        "held",
        "to a block: the part of the prompt in the last one, which is not full, is everybody's own",
    ),
    Claim(
        "It saves memory, not bandwidth",
        f"four decoding users read {bytes_one / 1e6:,.0f} MB from one copy, and "
        f"{bytes_four / 1e6:,.0f} MB from four",
        "held within bounds",
        "with ordinary attention; cascade attention reads a shared beginning once",
    ),
    Claim(
        "A chat computes its whole history at every turn",
        f"{sum(computed_alone)} tokens in four turns without the tree, {sum(computed)} with it",
        "held",
        "without a cache the sum grows with the square of the turns, with it in proportion",
    ),
)

# %% [markdown]
# **Next:** many requests want the same step, and the same memory. Chapter 24 decides who runs.

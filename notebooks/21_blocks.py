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
# # 21 · Memory in blocks
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/21_blocks.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/21_blocks.ipynb)
#
# Chapter 17 ended with a [KV cache](../docs/glossary.md#kv-cache) that reserves, for each sequence,
# as much memory as the sequence may ever need. For one request that is fine. Now many requests share
# one memory. This chapter divides it among them: first in pieces of any size, then in
# [blocks](../docs/glossary.md#block) of one size.
#
# **Afterwards you can** say where the memory of a reserving engine goes, tell internal from external
# fragmentation, compute how many sequences fit on a card, and write the allocator that wastes almost
# nothing: a free list, a reference count for each block, and a copy before a shared block is written.
#
# **You need** chapter 17 (the KV cache, and how many bytes a token takes in it).
# **Time:** about 45 minutes to read and try, about 50 for the
# [exercises](../exercises/21_blocks.ipynb).
#
# **Where we are:** chapters 11 to 17 answered one request. From here on, many requests share the
# machine, and memory is the first thing that they compete for.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | decode | memory capacity | L3 engine | `--block-size` | KV cache use |
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
from minigen import SamplingParams
from minigen.kv_cache import block_allocator as package
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
from minigen_course.ch21_blocks import lesson
from minigen_course.ch21_blocks.figures import answer_bars, shares_bars, strip_map
from minigen_course.ch21_blocks.lesson import (
    AdjacentAllocator,
    RequestLengths,
    run_through,
    runs_per_table,
)
from minigen_course.figures.explore import picture, replay
from minigen_course.lab.texts import QUESTIONS

llm = load_model(num_blocks=1200)
ALLOWED = 384  # the most tokens that an answer may have

# %%
chapter_map("blocks")

# %% [markdown]
# ## A number that hurts
#
# Here are 24 questions of many kinds. The length of an answer is not known before it is written,
# so the caller sets a limit: 384 tokens here, which cuts off answers that would be longer. A cache
# in one piece must reserve room for all of them when the request begins; otherwise it may have to
# be copied when it grows (chapter 17). A place for the keys and values of one token is called a
# [**slot**](../docs/glossary.md#slot) (in chapter 00, a request's place).
#
# Predict: what share of the reserved slots will never hold a token? Replace `None` by a number of
# per cent. (Numbers in ⟨ ⟩ are measured or depend on sampled text, so yours may differ.)

# %%
guess_waste = predict("Per cent of the reserved slots that stay empty?", None)

# %%
asked = [
    llm.chat_prompt([{"role": "user", "content": f"Briefly: {question}"}]) for question in QUESTIONS
]
params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=ALLOWED)
answers = llm.generate(asked, params, progress=False)
prompts = [answer.num_prompt_tokens for answer in answers]
lengths = [len(answer.token_ids) for answer in answers]
picture(
    answer_bars(prompts, lengths, ALLOWED),
    "One bar per request, shortest first: a prompt, an answer, and the slots that were reserved.",
    number="21.1",
)
reserved = sum(prompts) + len(lengths) * ALLOWED
filled = sum(prompts) + sum(lengths)
final_waste = 1 - filled / reserved
measured("the median answer has", sorted(lengths)[len(lengths) // 2], "tokens")
measured("the longest has", max(lengths), "tokens")
guess_waste.compare(100 * final_waste, "%", measured=True)

# %% [markdown]
# That is the waste at the end of each answer. On the way there more of an answer's slots are empty.
# But a long answer, which wastes least, also stays longest and counts in more steps. Let the
# requests run: step by step, first come, first served, in a memory of 2,048 slots.
#
# ## The smallest version that works
#
# One strip of memory, and a list of its holes. A request gets one piece of a hole. The piece that
# it gives back becomes a hole again, joined with the holes beside it. Where several holes are
# large enough, **first fit** takes the first (in the code, `min`), **best fit** the smallest.
#
# `run_through` is a simulation: each running request gets one token per step, and waiting requests
# start in order, as soon as they fit. It calls `hold(request, tokens)` when a request starts, with
# the slots that it asks for, and then in each step with the number of its tokens plus one. False
# means that there is no room. `pieces` has (first slot, number of slots) for each request. Unless
# the text says otherwise, a share is of the whole memory, averaged over the steps in which at least
# one request waits. When no request waits, unused memory harms no one.


# %%
class Strip:
    """A memory in which each request has one piece; `choose` picks one of the holes that fit."""

    def __init__(self, num_slots, choose):
        self.holes, self.pieces, self.choose = [(0, num_slots)], {}, choose

    def hold(self, request_id, num_tokens):
        if request_id in self.pieces:
            return num_tokens <= self.pieces[request_id][0][1]
        fitting = [hole for hole in self.holes if hole[1] >= num_tokens]
        if not fitting:
            return False
        first, size = hole = self.choose(fitting)
        self.holes.remove(hole)
        if size > num_tokens:
            self.holes.append((first + num_tokens, size - num_tokens))
        self.pieces[request_id] = [(first, num_tokens)]
        return True

    def give_back(self, request_id):
        joined = []
        for first, size in sorted([*self.holes, *self.pieces.pop(request_id)]):
            if joined and sum(joined[-1]) == first:  # a neighbour
                first, size = joined[-1][0], joined.pop()[1] + size
            joined.append((first, size))
        self.holes = joined


def best(holes):
    return min(holes, key=lambda hole: hole[1])


NUM_SLOTS = 2048
wishes = [
    RequestLengths(*each) for each in zip(prompts, lengths, strict=True)
] * 2  # each question is asked twice
longest = [wish.prompt + ALLOWED for wish in wishes]
runs = {"longest, first fit": run_through(Strip(NUM_SLOTS, min), NUM_SLOTS, wishes, longest)}
reserving = runs["longest, first fit"].shares()
measured("slots that hold tokens", 100 * reserving.used, "%")
measured("slots that are reserved and empty", 100 * reserving.internal, "%")
measured("free slots, enough for the next request, but scattered", 100 * reserving.external, "%")
measured("free slots, too few for the next request", 100 * reserving.remainder, "%")
measured("requests that run at once", runs["longest, first fit"].together())

# %% [markdown]
# ## Why it is wasteful: two kinds of fragmentation
#
# - **Internal fragmentation**: slots that belong to a request and hold nothing. (The
#   [paper](https://arxiv.org/abs/2309.06180) on blocks calls only those internal that will never
#   be filled; those that will be filled later are *reserved* there.)
# - **External fragmentation**: free slots that are enough for the next request in total, but too
#   scattered for it, because it needs one piece. (A gap of 420 slots cannot take a piece of 425. And our
#   memory has room for only four of the longest pieces, so each gap costs much. In ten times the memory
#   the share of free slots is smaller.)
#
# There is also a *remainder*: free slots that are too few for the next request, wherever
# they lie. Any allocator can have some of those.
#
# Would it help to know the lengths? Let an oracle say each answer's length before it is written, and
# reserve exactly that.
#
# Predict: what share of the memory holds tokens then, while requests wait?

# %%
guess_oracle = predict("Per cent of the memory that holds tokens, with an oracle?", None)

# %%
exact = [wish.total for wish in wishes]
runs["exact, first fit"] = run_through(Strip(NUM_SLOTS, min), NUM_SLOTS, wishes, exact)
runs["exact, best fit"] = run_through(Strip(NUM_SLOTS, best), NUM_SLOTS, wishes, exact)
guess_oracle.compare(100 * runs["exact, best fit"].shares().used, "%", measured=True)
for way in ("exact, first fit", "exact, best fit"):
    run = runs[way]
    scattered = run.num_enough_but_scattered()
    print(f"{way}: ⟨{len(run.moments):,} steps⟩;", end=" ")
    print(f"in ⟨{scattered}⟩ of them, a request waits although enough slots are free in total")

# %% [markdown]
# Play it. Colours are requests (they repeat): full where there are tokens, pale where the slots are
# reserved only, white where they are free. A slope is an answer that grows into its reservation.


# %%
def strip_at(step, way):
    return strip_map(runs[way], step)


replay(
    strip_at,
    max(len(run.moments) for run in runs.values()),
    "A memory over time: 'exact' with an oracle that knows each answer's length, 'longest' without. "
    "Above: the memory at one step. Below: all steps. Pale triangles are reserved and still empty; "
    "white gaps are free.",
    number="21.2",
    at=150,
    stride=10,
    way=["exact, first fit", "exact, best fit", "longest, first fit"],
)

# %% [markdown]
# Best fit may leave fewer gaps, but hardly more of the memory holds tokens (Figure 21.4, below). So
# knowing the lengths does not end the waste. An answer of 300 tokens owns 300 slots from its first step to its last, and on average about half of them are
# empty. And because the pieces differ in size, the gaps between them are often too small for the
# next request, and the requests behind it wait, too.
#
# ## The idea: pieces of one size
#
# Both kinds come from handing out one piece for everything that is still to come. Hand out small
# **blocks** of one size instead, one after another, when the next token needs one:
#
# - any free block is as good as another, so no gap is too small, and a list of the free blocks (the
#   **free list**) is enough;
# - only the last block of a request has empty slots.
#
# The price: a request's blocks may lie anywhere, so the request needs a list of them, its
# [**block table**](../docs/glossary.md#block-table).
#
# There is a second price. Here, a request is admitted when its *prompt* and one token fit, and
# nothing is reserved for the rest of its answer. So a running request may need a block when none
# is free. Then the simulation takes all blocks of the request that started last, and puts it at
# the head of the queue ([**preemption**](../docs/glossary.md#preemption)). Its tokens are not
# lost, but their keys and values are: when it starts again, they must be computed again. A
# reservation never pays this price.


# %%
class Blocks:
    """The same memory in blocks; any free block fits any request."""

    def __init__(self, num_slots, block_size):
        self.free, self.block_size = list(range(num_slots // block_size)), block_size
        self.pieces = {}

    def hold(self, request_id, num_tokens):
        own = self.pieces.get(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(own)
        if missing > len(self.free):
            return False
        new = [(self.free.pop() * self.block_size, self.block_size) for _ in range(missing)]
        self.pieces[request_id] = own + new
        return True

    def give_back(self, request_id):
        self.free += [first // self.block_size for first, _ in self.pieces.pop(request_id)]


runs["blocks of 16"] = run_through(Blocks(NUM_SLOTS, 16), NUM_SLOTS, wishes)
replay(
    strip_at,
    max(len(run.moments) for run in runs.values()),
    "The same requests in blocks of 16 slots. While requests wait, the memory is nearly full of tokens; the "
    "pale tails are the "
    "last blocks of the requests. White on the right comes after the last request has started.",
    number="21.3",
    at=150,
    stride=10,
    way=list(reversed(runs)),
)

# %%
picture(
    shares_bars(runs),
    "Where the slots are, for each way to divide the memory, on average over the steps in which a "
    "request waits. Only with blocks does nearly all of the memory hold tokens.",
    number="21.4",
)

# %% [markdown]
# How much is computed again? It depends on how eagerly requests are admitted. An engine can keep
# some blocks free when it admits a request, so that the running ones can grow. In the table below,
# a new request must leave that many blocks free. "Computed again" is a share of the tokens of all
# prompts and answers.


# %%
class CautiousBlocks(Blocks):
    """Blocks of 16; a new request must leave `num_spare` blocks free, unless it is alone."""

    def __init__(self, num_slots, num_spare):
        super().__init__(num_slots, 16)
        self.num_spare = num_spare

    def hold(self, request_id, num_tokens):
        is_new = request_id not in self.pieces
        needed = -(-num_tokens // self.block_size) + self.num_spare
        if is_new and self.pieces and needed > len(self.free):
            return False
        return super().hold(request_id, num_tokens)


num_tokens, cautious = sum(exact), {}
print("kept free   computed again   requests at once   steps")
for num_spare in (0, 16, 48):
    run = run_through(CautiousBlocks(NUM_SLOTS, num_spare), NUM_SLOTS, wishes)
    cautious[num_spare] = run
    shown = (
        mark(100 * run.num_recomputed / num_tokens, "%"),
        mark(run.together()),
        f"⟨{len(run.moments):,}⟩",
    )
    print(f"{num_spare:>9}   {shown[0]:>14}   {shown[1]:>16}   {shown[2]:>5}")
held = runs["blocks of 16"].shares().used * NUM_SLOTS / runs["blocks of 16"].together()
measured("a running request holds, on average", held, "tokens")

# %% [markdown]
# So the number of requests at once flatters blocks as long as nothing is kept free: a large part of
# the work is done again. (The steps hardly show it: in the simulation a restarted request computes
# all its tokens in one step, however many. On a real machine that takes time, which chapter 24
# computes.) With 16 of the 128 blocks kept free, much of that is gone; with 48, nearly all. Even
# then, far more requests run than with one piece each. (Too few kept free repeat work; too many let
# requests wait.)
#
# ## How large a block?
#
# Let $B$ be the block size (in chapter 17, the bandwidth). If the last block of a request is as
# likely to hold 1 token as 2, 3, ... or $B$, then the number of its empty slots is 0 to $B-1$ with
# equal probability, so on average
#
# $$\text{empty slots per request} = \frac{B-1}{2}, \qquad
# \text{internal waste} = \frac{(B-1)/2}{t + (B-1)/2}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $B$ | slots per block | `block_size` |
# | $t$ | tokens that a running request holds, on average | `tokens` |
#
# In this formula the number of empty slots does not depend on how long the request is. The cell above printed
# how many tokens a running request holds on average. Predict the internal waste of blocks of 256
# slots, in per cent of the owned slots.

# %%
guess_large = predict("Per cent of the owned slots that are empty, in blocks of 256?", None)

# %%
print("block size   empty slots per request, (B-1)/2   waste, by the formula   longest table")
waste_of = {}
for block_size in (1, 4, 16, 64, 256):
    run = run_through(Blocks(NUM_SLOTS, block_size), NUM_SLOTS, wishes)
    shares = run.shares()
    empty, tokens = (part * NUM_SLOTS / run.together() for part in (shares.internal, shares.used))
    tail = (block_size - 1) / 2
    waste_of[block_size] = empty / (tokens + empty), tail / (tokens + tail)
    blocks = -(-max(wish.total for wish in wishes) // block_size)
    found, formula = (mark(100 * each, "%") for each in waste_of[block_size])
    print(
        f"{block_size:>10}   {mark(empty):>23}   {tail:>7}   {found:>6}   {formula:>12}", end="   "
    )
    print(f"⟨{blocks} blocks⟩")
guess_large.compare(100 * waste_of[256][0], "%", measured=True)
print(f"for 4 % in blocks of 16, requests must hold {7.5 / 0.04 - 7.5:.0f} tokens on average")

# %% [markdown]
# (The table takes $t$ from the run of each block size.) The formula fits small blocks, and is less
# exact for 256. It assumed that a running request stands anywhere in its last block. But most of
# these requests are shorter than 256 tokens, so their *only* block is their last one, and many end
# before it is half full. The number of empty slots then depends on the lengths, not on chance.
#
# Small blocks waste least, and cost the longest tables: for each block an entry to keep, to look
# up and to jump to. The default of vLLM and of this engine is 16. (vLLM's authors report a waste
# under 4 % with blocks: the last line says how many tokens requests must hold for that, on
# average.)
#
# ## How many sequences fit on a card?
#
# Memory limits how many sequences can run at once. With blocks, this limit is arithmetic:
#
# $$N = \left\lfloor \frac{\lfloor (M - W) \,/\, (B \cdot b) \rfloor}{\lceil L / B \rceil}
# \right\rfloor$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $N$ | sequences that fit at once (0 if $W > M$) | result of `sequences_that_fit` |
# | $M$, $W$ | bytes of memory for weights and cache (without the working memory of chapter 00), and of the weights | `memory_bytes`, `weight_bytes` |
# | $b$ | bytes that one token takes in the cache (chapter 14) | `kv_bytes_per_token` |
# | $L$ | tokens of a sequence, prompt and answer | `num_tokens` |
#
# The inner floor counts the blocks that the weights leave room for, the ceiling the blocks of one
# sequence, and the outer floor whole sequences. (In chapter 00, $W$ was the working memory, $N$ the
# number of weights, $L$ the layers and $b$ the bits per weight.)
#
# Predict: a card has 80 GB. Let all of it be for weights and cache.
# Llama-3-70B in 8 bits takes about 70 GB of it, and 327,680 bytes per token. How many sequences of
# 2,048 tokens fit? (Llama-3 ends at 8,192 tokens. The table's last column is for Llama-3.1, of the
# same shapes.)

# %%
guess_fit = predict(
    "Sequences of 2,048 tokens beside 70 GB of weights, on 80 GB?", None, within=1.5
)

# %%
GB = 10**9
models = {"Llama-3-8B in BF16": (16 * GB, 131_072), "Llama-3-70B in 8 bits": (70 * GB, 327_680)}
print("sequences at once on 80 GB, by the tokens of a sequence")
print(f"{'':<22}{2048:>8,}{8192:>8,}{32_768:>8,}")
for name, (weights, per_token) in models.items():
    fits = [
        lesson.sequences_that_fit(80 * GB, weights, per_token, tokens, 16)
        for tokens in (2048, 8192, 32_768)
    ]
    print(f"{name:<22}" + "".join(f"{each:>8,}" for each in fits))
guess_fit.compare(lesson.sequences_that_fit(80 * GB, 70 * GB, 327_680, 2048, 16))

# %% [markdown]
# A decode step of that many sequences still leaves most of the card's arithmetic unused, since
# reading the weights and all keys and values takes longer (chapter 17): the memory is full first,
# and wasted slots are sequences that wait. (Blocks save capacity, not bandwidth: each decode step
# still reads the keys and values of every token.)
#
# ## Several owners
#
# If you ask for three answers to one prompt
# ([parallel sampling](../docs/glossary.md#parallel-sampling)), the sequence **forks**: it becomes
# three with the same beginning. One copy of its blocks is enough; each block has three owners. The
# allocator keeps a [**reference count**](../docs/glossary.md#reference-count) for each block: a
# block is free again when its last owner has released it.

# %%
allocator = package.BlockAllocator(8)
first = allocator.allocate(3)
second = list(first)
allocator.share(second)
print("tables:", first, second, " owners:", [allocator.num_owners(each) for each in first])
print("the second releases", second, "and these become free:", allocator.release(second))
allocator.share(second)  # and comes back

# %% [markdown]
# But the last block may have room for the next token, and now the answers part. If one wrote into
# it, the other would read it. So before a sequence writes into a block that others own too, it
# gets its own copy: [**copy-on-write**](../docs/glossary.md#copy-on-write). The function below
# exchanges the block in the table, and the caller copies its contents.

# %%
print("the second writes into its last block:", package.copy_on_write(allocator, second, 2))
print("the first writes into its own:", package.copy_on_write(allocator, first, 2))
owners = {each: allocator.num_owners(each) for each in range(1, 5)}
print("tables:", first, second, " owners:", owners)

# %% [markdown]
# Here it is in the engine: three answers to one prompt, in blocks of 4 tokens. The prompt has 15
# tokens, so it ends inside block 4, and all three answers want to write there.
#
# Predict: how many copies of block 4 are made?

# %%
guess_copies = predict("Copies of the prompt's last block, for three answers?", None, within=1)

# %%
from minigen.trace.events import EventKind
from minigen_course.figures.block_map import block_map
from minigen_course.figures.trace_views import pool_states

small = load_model(num_blocks=48, block_size=4, enable_prefix_caching=False)
beginning = "Every evening the old keeper of the lighthouse climbed the stairs and lit the lamp"
three = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
with small.record() as recorder:
    small.generate(beginning, three, progress=False)
states = pool_states(recorder.events)
copies = {
    step: [event.counts for event in state.events if event.kind is EventKind.BLOCK_COPIED]
    for step, state in enumerate(states)
}
(step_of_copy,) = (step for step, made in copies.items() if made)
guess_copies.compare(len(copies[step_of_copy]))
kept = {made["source"] for made in copies[step_of_copy]}
last_owner = states[step_of_copy].tables[max(states[step_of_copy].tables)]
assert kept == {last_owner[-1]}, "the last of the three writes into the original block"
replay(
    lambda step: block_map(states, step, 48, 4, "answer {}".format),
    len(states),
    "Blocks by owner at the step in which the answers part. Hatched blocks have several owners, and the first one's colour. Two "
    "arrows lead from the shared block to its copies; the third answer keeps the original.",
    number="21.5",
    at=step_of_copy,
)

# %% [markdown]
# Three owners, two copies. When the others have theirs, the last owner is the only one, and it writes
# into the original block.
#
# ## Your turn
#
# Four exercises. Write them before you look at ours: they open below, once yours
# have passed. The first one is the arithmetic of the card.

# %%
task(21, "sequences_that_fit")


# %%
# exercise: minigen_course.ch21_blocks.lesson.sequences_that_fit
def sequences_that_fit(
    memory_bytes: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_tokens: int,
    block_size: int,
) -> int:
    """Return how many sequences of `num_tokens` tokens fit into a memory beside the weights.

    What the weights leave is cut into whole blocks of `block_size` tokens, and each sequence takes
    whole blocks. If the weights do not fit, no sequence does.

    >>> sequences_that_fit(1000, 200, kv_bytes_per_token=2, num_tokens=17, block_size=16)
    12
    """
    raise NotImplementedError  # your turn


# %%
my_capacity = check(21, sequences_that_fit=sequences_that_fit)

# %% [markdown]
# Now the allocator. Its blocks count from 1, as in the example above; block 0 is kept for padding
# (see the end). The two parts of its state are in the text above: which blocks are free, how many
# owners each block has. (Write `from minigen.errors import OutOfBlocksError` first.)

# %%
task(21, "BlockAllocator")

# %%
# exercise: minigen.kv_cache.block_allocator.BlockAllocator
from collections.abc import Iterable


class BlockAllocator:
    """Allocates block ids 1 to `num_blocks`; a block is free again when its last owner releases it.

    O(1) per block: an array of reference counts, and a free list used as a stack, so that recently
    used blocks, which may still be in the CPU's caches, are allocated first.
    """

    def __init__(self, num_blocks: int):
        raise NotImplementedError  # your turn

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""
        raise NotImplementedError  # your turn

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one owner now.

        Raises `OutOfBlocksError`, and allocates nothing, if fewer are free.
        """
        raise NotImplementedError  # your turn

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block."""
        raise NotImplementedError  # your turn

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one owner from each block; return the blocks that are free now."""
        raise NotImplementedError  # your turn

    def num_owners(self, block_id: int) -> int:
        """Return the block's number of owners; 0 if it is free."""
        raise NotImplementedError  # your turn


# %%
my_allocator = check(21, BlockAllocator=BlockAllocator)

# %% [markdown]
# The same requests, in blocks that this allocator hands out, must take as many steps and leave as many
# slots empty. And one argument puts it into the running engine, where each call is watched, so that a
# mistake is reported where it was made. (As long as yours has not passed, `my_allocator` is the
# package's.)


# %%
class AllocatedBlocks(Blocks):
    """The same memory over a block allocator."""

    def __init__(self, num_slots, block_size, allocator):
        super().__init__(num_slots, block_size)
        self.allocator = allocator(num_slots // block_size)

    def hold(self, request_id, num_tokens):
        own = self.pieces.get(request_id, [])
        missing = package.blocks_needed(num_tokens, self.block_size) - len(own)
        if missing > self.allocator.num_free:
            return False
        first_slots = [(each - 1) * self.block_size for each in self.allocator.allocate(missing)]
        self.pieces[request_id] = own + [(first, self.block_size) for first in first_slots]
        return True

    def give_back(self, request_id):
        pieces = self.pieces.pop(request_id)
        self.allocator.release([first // self.block_size + 1 for first, _ in pieces])


for block_size in (16, 64):
    simple = run_through(Blocks(NUM_SLOTS, block_size), NUM_SLOTS, wishes)
    allocated = run_through(AllocatedBlocks(NUM_SLOTS, block_size, my_allocator), NUM_SLOTS, wishes)
    assert allocated.shares() == simple.shares()
    assert len(allocated.moments) == len(simple.moments)
whose = "the package's" if my_allocator is package.BlockAllocator else "your"
print(f"with {whose} allocator: as many steps, and as many slots empty")

mine = load_model(weights="float32", num_blocks=64, allocator=my_allocator)
print(mine.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# Then copy-on-write.

# %%
task(21, "copy_on_write")

# %%
# exercise: minigen.kv_cache.block_allocator.copy_on_write
from minigen.protocols import BlockAllocator as Allocator


def copy_on_write(allocator: Allocator, table: list[int], index: int) -> tuple[int, int] | None:
    """Make the block at `index` of a sequence's block table writable: owned by that sequence only.

    If the block has other owners, a new block takes its place in the table, and the old block loses
    one owner. Returns the pair (source, target), so that the caller can copy the contents; None if
    the sequence was the only owner. Raises `OutOfBlocksError`, and changes nothing, if no block is
    free.
    """
    raise NotImplementedError  # your turn


# %%
my_copy = check(21, copy_on_write=copy_on_write)

# %% [markdown]
# In the engine: three answers to one prompt, whose last block is not full. (The engine calls it only for
# a block that has several owners: twice here.) Then the exercise's harder question, with a prompt of 16
# tokens, which fills four blocks of 4 exactly. (The texts are sampled, and differ from processor to
# processor, so they stand in ⟨ ⟩.)

# %%
guess_full = predict(
    "Copies for three answers, if the prompt's last block is full?", None, within=1
)

# %%
with using(21, copy_on_write=my_copy):
    answer = small.generate("The sea is", three, progress=False)
for choice in answer.choices:
    print(f"⟨{choice.text!r}⟩")
with small.count_work() as work:
    small.generate(
        small.tokenizer.encode(f"{beginning}, and then he sang")[:16], three, progress=False
    )
guess_full.compare(work.blocks_copied)

# %% [markdown]
# A full block of the prompt is not written again, so all its owners can keep sharing it.
#
# One more, for those who want it. Copies between memories, and some kernels, can be faster if a
# sequence's blocks lie side by side. Which free blocks should an allocation take?

# %%
task(21, "choose_adjacent")

# %%
# exercise: minigen_course.ch21_blocks.lesson.choose_adjacent
from collections.abc import Sequence


def choose_adjacent(free: Sequence[int], count: int) -> list[int]:
    """Return `count` of the free blocks, in increasing order, adjacent ones if possible.

    If a run of adjacent free blocks is long enough, all come from the beginning of one run: the
    shortest such run, and of equally short ones the first. Otherwise whole runs are taken, the
    longest first (of equally long ones the first), and of the last run its beginning.

    >>> choose_adjacent([9, 2, 3, 4, 7, 8, 12], 2), choose_adjacent([9, 2, 3, 4, 7, 8, 12], 4)
    ([2, 3], [2, 3, 4, 7])
    """
    raise NotImplementedError  # your turn


# %%
my_choice = check(21, choose_adjacent=choose_adjacent)
for name, allocator in {
    "the stack": package.BlockAllocator,
    "adjacent blocks": lambda num_blocks: AdjacentAllocator(num_blocks, my_choice),
}.items():
    run = run_through(AllocatedBlocks(NUM_SLOTS, 16, allocator), NUM_SLOTS, wishes)
    in_runs, in_blocks = runs_per_table(run)
    print(f"{name}: a table of {mark(in_blocks)} blocks falls into {mark(in_runs)} runs")

# %% [markdown]
# The gain is small. A prompt's blocks are allocated together, but an answer's come one at a time: by then
# the neighbour is often taken, and the function does not know which block it is. (vAttention, below, gets
# adjacent addresses in another way.)
#
# ## The package's version
#
# A stack of free blocks, and a count of owners for each. Block 0 is never handed out: on a GPU, a
# batch of decodes is filled up with empty rows (padding) to one of a few sizes, and those rows
# write there.

# %%
reveal(21, sequences_that_fit=my_capacity, BlockAllocator=my_allocator)
reveal(21, copy_on_write=my_copy, choose_adjacent=my_choice)

# %% [markdown]
# ## The measurement again
#
# The numbers from the top: what share of the memory holds tokens, and what that buys. (Read the steps
# with care: a long answer that starts late runs on nearly alone, as in Figure 21.2.)

# %%
runs["blocks of 16, 16 kept free"] = cautious[16]
for way, run in runs.items():
    print(f"{way}: {mark(100 * run.shares().used, '%')} of the memory holds tokens,", end=" ")
    print(f"{mark(run.together())} requests at once, ⟨{len(run.moments):,} steps⟩,", end=" ")
    print(f"{mark(100 * run.num_recomputed / num_tokens, '%')} computed again")
in_blocks = len(cautious[16].moments)
for way in ("longest, first fit", "exact, best fit"):
    ratio = mark(len(runs[way].moments) / in_blocks)
    print(f"{way}: {ratio} times as many steps as blocks of which 16 are kept free")

# %% [markdown]
# ## Claims
#
# What a paper and a blog post say, beside what this notebook found. The outcomes are computed from
# the numbers.

# %% jupyter={"source_hidden": true}
not_held = 100 * (1 - reserving.used)
empty_of_owned = 100 * reserving.internal / (reserving.used + reserving.internal)
empty_16 = 100 * waste_of[16][0]
scattered_in = {way: 100 * run.shares().external for way, run in runs.items()}
VLLM = "[vLLM 2023](https://blog.vllm.ai/2023/06/20/vllm.html)"
PAPER = "[Kwon et al. 2023](https://arxiv.org/abs/2309.06180)"
verdicts(
    "21",
    Claim(
        "Engines that reserve waste 60-80 % of the KV cache's memory",
        f"{mark(not_held, '%')} hold no token: {mark(100 * reserving.internal, '%')} reserved, "
        f"{mark(100 * reserving.external, '%')} scattered, "
        f"{mark(100 * reserving.remainder, '%')} too few for the next request",
        within(not_held, 60, 80),
        f"{mark(empty_of_owned, '%')} of the owned slots are empty; free slots add to them, a smaller "
        "share in a larger memory",
        VLLM,
        measured=True,
    ),
    Claim(
        "With blocks the waste is under 4 %",
        f"{mark(empty_16, '%')} of the owned slots in blocks of 16, "
        f"{mark(100 * waste_of[4][0], '%')} in blocks of 4, {mark(100 * waste_of[64][0], '%')} in "
        "blocks of 64",
        within(empty_16, 0, 4),
        "about (B - 1) / 2 slots per request are empty: in blocks of 16, requests must hold 180 "
        "tokens on average (other slots are free, but too few for the next request)",
        VLLM,
        measured=True,
    ),
    Claim(
        "Blocks of one size end external fragmentation",
        f"{mark(scattered_in['blocks of 16'], '%')} of the slots are free but scattered, with one "
        f"piece per request {mark(scattered_in['longest, first fit'], '%')}",
        holds(scattered_in["blocks of 16"] == 0 < scattered_in["longest, first fit"]),
        "any free block fits any request; what is left is internal, or too little for the next request",
        PAPER,
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - The length of an answer is not known before it is written. Reserving the longest one left
#   most of the memory empty here.
# - Internal fragmentation is memory that a request owns and does not fill. External fragmentation is
#   free memory that is too scattered to use.
# - Knowing all lengths helped, and still left more than half of the memory empty: an answer owns
#   at its first step what it fills at its last, and pieces of many sizes leave gaps.
# - Blocks of one size end external fragmentation, and leave about $(B-1)/2$ empty slots per request,
#   as long as requests are several blocks long.
# - Blocks save capacity, not bandwidth: more requests fit, and each decode step still reads the keys and
#   values of every token.
# - If no blocks are reserved, memory can run out in the middle of an answer. Then a request is
#   preempted, and its keys and values are computed again.
# - How many sequences fit is arithmetic: what the weights leave, divided by what a sequence takes,
#   in whole blocks.
# - A block may have several owners. It is free when the last one has released it, and it is copied
#   before one of several owners writes.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A request has 33 tokens, in blocks of 16. How many blocks does it own, how many
# of their slots are empty, and how many tokens can it write before it needs another block?</summary>
# Three blocks, 48 slots, 15 of them empty. It can write 15 more tokens; the 16th needs a fourth
# block.</details>
#
# <details><summary>2. Of 10,000 slots, 640 are free, in gaps of 64. The next request asks for 400
# slots. Can it start, with one piece per request? With blocks of 16?</summary>
# With one piece it cannot: the 640 free slots are external fragmentation. With blocks of 16 it
# can: it needs 25 blocks, and 640 free slots are 40 of them.</details>
#
# <details><summary>3. Four answers share a prompt of 40 tokens, in blocks of 16. How many blocks are
# owned when one token of each answer has been stored, and how many copies were made?</summary>
# The prompt has two full blocks, which stay shared, and a third with 8 tokens. Three of the four
# answers copy the third block, and the last keeps the original: 2 + 4 = 6 blocks, 3 copies.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** brought blocks and block tables
#   ([PagedAttention](https://arxiv.org/abs/2309.06180)). Its blocks have 16 tokens by default, and
#   more with some models and kernels. Its free blocks stand in a doubly linked queue, so that a
#   block that is found again by its content (prefix cache, chapter 23) can be taken out of the
#   middle. Its present engine (V1) first had no copy-on-write, because it shared only full blocks,
#   which are never written again; since 2026, models that mix attention with recurrent layers
#   (which keep a state of fixed size) can continue from a part of a shared block, which is copied.
# - **[SGLang](https://github.com/sgl-project/sglang)** hands out single tokens by default on most
#   GPUs (a page, its word for a block, has one token; on NVIDIA's B200 usually 64): with one token
#   no internal waste at all, and the longest tables.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** takes the number of tokens per block as an
#   option, and can keep blocks that had to leave the GPU (eviction, chapter 23) in the host's memory.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)** keeps (as its server does by default)
#   one array of cells, one per token, each with the set of sequences that own it: an owner is a
#   bit in that set.
# - **[vAttention](https://arxiv.org/abs/2405.04437)** keeps each sequence's cache contiguous in
#   *virtual* memory, and lets the GPU's driver put physical pages below it as it grows: blocks
#   without block tables, in pages of 2 MB, or smaller ones with a changed driver.
#
# ## Further reading
#
# - [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), Kwon et al. 2023: section 3 explains the
#   waste, section 4 introduces blocks.
# - [vLLM: Easy, Fast, and Cheap LLM Serving](https://blog.vllm.ai/2023/06/20/vllm.html): the post
#   that two of the claims above are from.
# - [Dynamic Storage Allocation: A Survey and Critical
#   Review](https://doi.org/10.1007/3-540-60368-9_19), Wilson et al. 1995: first fit, best fit and
#   fragmentation, long before language models.
#
# **Next:** a block table says where a sequence's keys and values are.
# [Chapter 22](22_paged.ipynb) makes attention read through it.

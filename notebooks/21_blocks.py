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
# Chapter 17 ended with a cache that reserves, for each sequence, as many places as it may ever
# need. For one request that is fine. Now many requests share one memory, and this chapter hands it
# out: first in pieces of any size, then in blocks of one size.
#
# **Afterwards you can** say where the memory of a reserving engine goes, tell internal from
# external fragmentation, and write the allocator that has next to none of either: a free list,
# a count of owners, and a copy before a shared block is written.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
from minigen import SamplingParams
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch21_blocks.figures import answer_bars, shares_bars, strip_map
from minigen_course.ch21_blocks.lesson import RequestLengths, run_through
from minigen_course.figures.explore import picture, replay
from minigen_course.lab.texts import QUESTIONS

llm = load_model(num_blocks=1200)
ALLOWED = 512  # tokens that each answer may have

# %% [markdown]
# ## A number that hurts
#
# Here are questions of many kinds. Nobody knows how long an answer will be before it is written,
# so a caller allows enough for the longest: 512 tokens here. A cache in one piece must reserve
# them all when the request begins.
#
# **Predict:** of the places that are reserved, what share will ever hold a token?

# %%
asked = [
    llm.chat_prompt([{"role": "user", "content": f"Briefly: {question}"}]) for question in QUESTIONS
]
params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=ALLOWED)
answers = llm.generate(asked, params, progress=False)
prompts = [answer.num_prompt_tokens for answer in answers]
lengths = [len(answer.token_ids) for answer in answers]

# %%
picture(
    answer_bars(prompts, lengths, ALLOWED),
    "A bar for each request: a small prompt, an answer of some length, a tall reservation.",
)
reserved = sum(prompts) + len(lengths) * ALLOWED
filled = sum(prompts) + sum(lengths)
final_waste = 1 - filled / reserved
measured("the middle answer has", sorted(lengths)[len(lengths) // 2], "tokens")
measured("the longest has", max(lengths), "tokens")
measured("of what is reserved, never used", 100 * final_waste, "%")

# %% [markdown]
# That is the waste at the end of each answer. On the way there it is worse, since an answer
# grows from nothing. So let the requests run: step by step, first come first served, in a memory of
# 2,048 *slots*, places for one token's keys and values.
#
# ## The smallest version that works
#
# One strip of memory, and a list of its holes. A request gets one piece of a hole; what it gives
# back becomes a hole again, joined with its neighbours. Where several holes are large enough,
# *first fit* takes the first, *best fit* the smallest.


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
] * 2  # everybody asks twice
longest = [wish.prompt + ALLOWED for wish in wishes]
runs = {"longest, first fit": run_through(Strip(NUM_SLOTS, min), NUM_SLOTS, wishes, longest)}
used, owned_empty, free = runs["longest, first fit"].shares()
measured("slots that hold tokens", 100 * used, "%")
measured("slots that are reserved and empty", 100 * owned_empty, "%")
measured("slots that are nobody's", 100 * free, "%")
measured("requests that run at once", runs["longest, first fit"].together())

# %% [markdown]
# (Counted in the steps in which somebody waits. When nobody does, idle memory hurts nobody.)
#
# ## Why it is wasteful: two kinds of fragmentation
#
# - **Internal** fragmentation: slots that are somebody's, and hold nothing.
# - **External** fragmentation: slots that are nobody's, but lie so that they fit nobody.
#
# Would it help to know the lengths? Let an oracle tell each answer's length before it is written,
# and reserve exactly that.
#
# **Predict:** does that end the internal waste? And which does better then, first fit or best fit?

# %%
exact = [wish.total for wish in wishes]
runs["exact, first fit"] = run_through(Strip(NUM_SLOTS, min), NUM_SLOTS, wishes, exact)
runs["exact, best fit"] = run_through(Strip(NUM_SLOTS, best), NUM_SLOTS, wishes, exact)
for way in ("exact, first fit", "exact, best fit"):
    run = runs[way]
    scattered = run.num_enough_but_scattered()
    print(f"{way}: of {mark(len(run.moments), 'steps')}, in {mark(scattered)}", end=" ")
    print("somebody waited although as many slots were free in all")

# %% [markdown]
# Play it. Colours are requests: full where there are tokens, pale where the slots are reserved
# only, white where they are nobody's. A triangle is an answer that grows into its reservation.


# %%
def strip_at(step, way):
    return strip_map(runs[way], step)


replay(
    strip_at,
    max(len(run.moments) for run in runs.values()),
    "A memory over time: pale triangles above full ones are reserved, white gaps have no owner.",
    at=150,
    stride=10,
    way=["exact, first fit", "exact, best fit", "longest, first fit"],
)

# %% [markdown]
# The oracle does not end it. An answer of 500 tokens owns 500 slots from its first step to its
# last, and on average half of them are empty. And the pieces have so many sizes that holes remain
# between them which fit nobody who waits.
#
# ## The idea: pieces of one size
#
# Both kinds come from handing out one piece for all that is to come. Hand out small **blocks** of
# one size, one after another, when the next token needs one:
#
# - any free block is as good as another, so no hole is too small: a list of free ones is enough;
# - only the last block of a request has empty slots.
#
# The price: a request's blocks lie anywhere, so it needs a list of them, its *block table*.


# %%
class Blocks:
    """The same memory in blocks, each of which fits everybody."""

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
    "The memory in blocks: full of colours, with small pale tails.",
    at=150,
    stride=10,
    way=list(reversed(runs)),
)

# %%
picture(
    shares_bars(runs),
    "Bars of the three kinds of slots: about a fifth holds tokens where the longest is reserved, "
    "nearly all where blocks are handed out.",
)

# %% [markdown]
# ## How large a block?
#
# The last block of a request is as likely to be filled to one slot as to another. So on average
# (block_size - 1) / 2 slots of each request lie empty, however long it is.
#
# **Predict:** the internal waste for blocks of 1, 16 and 256.

# %%
print("block size   owned and empty, measured   predicted   blocks of the longest request")
waste_of = {}
for block_size in (1, 4, 16, 64, 256):
    run = run_through(Blocks(NUM_SLOTS, block_size), NUM_SLOTS, wishes)
    used, empty, _ = run.shares()
    tail, tokens = (block_size - 1) / 2, used * NUM_SLOTS / run.together()
    waste_of[block_size] = empty / (used + empty), tail / (tokens + tail)
    blocks = -(-max(wish.total for wish in wishes) // block_size)
    found, predicted = (mark(100 * each, "%") for each in waste_of[block_size])
    print(f"{block_size:>10}   {found:>25}   {predicted:>9}   ⟨{blocks}⟩")
print(f"\nfor 4 % in blocks of 16, requests must have {7.5 / 0.04 - 7.5:.0f} tokens on average")

# %% [markdown]
# Small blocks waste least, and cost the longest tables: an entry to keep, to look up and to jump
# to for each block. 16 tokens is what most engines begin with.
#
# ## The package's version
#
# A stack of free blocks, and a count of owners for each. Block 0 is never handed out: batches that
# are padded write there. The counts are for what comes next.

# %%
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed, copy_on_write

show(BlockAllocator, blocks_needed)


# %%
class PackagedBlocks(Blocks):
    """The same over the package's allocator."""

    def __init__(self, num_slots, block_size):
        super().__init__(num_slots, block_size)
        self.allocator = BlockAllocator(num_slots // block_size)

    def hold(self, request_id, num_tokens):
        own = self.pieces.get(request_id, [])
        missing = blocks_needed(num_tokens, self.block_size) - len(own)
        if missing > self.allocator.num_free:
            return False
        new = self.allocator.allocate(missing)
        self.pieces[request_id] = own + [((each - 1) * 16, 16) for each in new]
        return True

    def give_back(self, request_id):
        self.allocator.release([first // 16 + 1 for first, _ in self.pieces.pop(request_id)])


packaged = run_through(PackagedBlocks(NUM_SLOTS, 16), NUM_SLOTS, wishes)
assert packaged.shares() == runs["blocks of 16"].shares()
assert len(packaged.moments) == len(runs["blocks of 16"].moments)
print("the same requests take the same steps and leave the same slots empty")

# %% [markdown]
# ## Several owners
#
# Ask for three answers to one prompt, and all three have the same beginning. Its blocks need to
# be there once, with three owners. A block is free when its last owner has let go.

# %%
allocator = BlockAllocator(8)
first = allocator.allocate(3)
second = list(first)
allocator.share(second)
print("tables:", first, second, " owners:", [allocator.num_owners(each) for each in first])
print("the second lets go of", second, "and these become free:", allocator.release(second))
allocator.share(second)  # and comes back

# %% [markdown]
# But the last block has room for the next token, and now the answers part. If one wrote into it,
# the other would read it. So before a sequence writes into a block that others own too, it gets
# its own copy: **copy-on-write**. The allocator exchanges the block; the caller copies its
# contents.

# %%
show(copy_on_write)
print("the second writes into its last block:", copy_on_write(allocator, second, 2))
print("the first writes into its own:", copy_on_write(allocator, first, 2))
owners = {each: allocator.num_owners(each) for each in range(1, 5)}
print("tables:", first, second, " owners:", owners)

# %% [markdown]
# Seen in the engine: three answers to one prompt, in blocks of 4 tokens. Play it from the
# beginning, and watch for the arrows.

# %%
from minigen.trace.events import EventKind
from minigen_course.figures.block_map import block_map
from minigen_course.figures.trace_views import pool_states

small = load_model(num_blocks=48, block_size=4, enable_prefix_caching=False)
with small.record() as recorder:
    params = SamplingParams(n=3, seed=5, max_tokens=24, ignore_eos=True)
    beginning = "Every evening the old keeper of the lighthouse climbed the stairs and lit the lamp"
    small.generate(beginning, params, progress=False)
states = pool_states(recorder.events)
copied = [
    step
    for step, state in enumerate(states)
    if any(event.kind is EventKind.BLOCK_COPIED for event in state.events)
]
print("steps with a copy:", copied)
replay(
    lambda step: block_map(states, step, 48, 4, "answer {}".format),
    len(states),
    "Blocks by owner, shared ones hatched; arrows from a shared block to its copies.",
    at=copied[0],
)

# %% [markdown]
# The last owner needs no copy: when the others have theirs, the block is its own.
#
# ## The measurement again

# %%
for way, run in runs.items():
    print(f"{way}: {mark(100 * run.shares()[0], '%')} of the memory holds tokens,", end=" ")
    print(f"{mark(run.together())} requests at once, {mark(len(run.moments), 'steps')}")
gain = runs["blocks of 16"].together() / runs["longest, first fit"].together()
over_oracle = runs["blocks of 16"].together() / runs["exact, best fit"].together()
measured("requests at once, blocks against the longest", gain)
measured("blocks against an oracle with best fit", over_oracle)

# %% [markdown]
# ## Your turn
#
# First the allocator. `check` says the first thing that is wrong; add `hint=1` for a hint.

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
mine = check(21, BlockAllocator=BlockAllocator)

# %% [markdown]
# This is the line that puts it into the running engine. (Until it passes, `mine` is the package's
# own.) A part that is yours is watched there, so a mistake is reported where it was made.

# %%
llm = load_model(weights="float32", num_blocks=64, allocator=mine)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# Then copy-on-write. Three answers to one prompt begin with the same block, and two of them need
# a copy of it. (What they say is drawn, and differs from processor to processor: so it is in ⟨⟩.)

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
mine = check(21, copy_on_write=copy_on_write)
with using(21, copy_on_write=mine):
    params = SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True)
    answer = small.generate("The sea is", params, progress=False)
for choice in answer.choices:
    print(f"⟨{choice.text!r}⟩")

# %% [markdown]
# ## What the production engines do beyond this
#
# - **vLLM** brought blocks and block tables (PagedAttention, 2023); its blocks have 16 tokens
#   unless told otherwise, and its free blocks stand in a doubly linked queue, so that one that is
#   found again by its content can be taken out of the middle. Its second engine (V1) has dropped
#   copy-on-write: only full blocks are shared, and those nobody writes again.
# - **SGLang** hands out single tokens by default (a page size of 1): no internal waste at all,
#   and the longest tables. Its kernels find each token by an index of its own.
# - **TensorRT-LLM** takes the number of tokens in a block as an option, and can keep blocks that
#   were pushed out of the GPU in the host's memory.
# - **llama.cpp** keeps one array of cells, one a token, each with the set of sequences that own
#   it: sharing is a bit in that set.
# - **vAttention** (Microsoft, 2024) leaves the cache in one piece of *virtual* memory for each
#   sequence, and lets the GPU's driver put physical pages below it as it grows: blocks without
#   block tables, in the sizes that the driver has.

# %%
verdicts(
    "21",
    Claim(
        "Reserving the longest answer wastes 60-80 % of the memory",
        f"{mark(100 * (1 - runs['longest, first fit'].shares()[0]), '%')} hold no token",
        "held within bounds",
        "it is the ratio of what is allowed to what is written: allow twice as much, and it is "
        "worse",
    ),
    Claim(
        "With blocks the waste is under 4 %",
        f"{mark(100 * waste_of[16][0], '%')} in blocks of 16, {mark(100 * waste_of[4][0], '%')} in "
        f"blocks of 4, {mark(100 * waste_of[64][0], '%')} in blocks of 64",
        "held within bounds",
        "it is (block_size - 1) / 2 slots a request: in blocks of 16 it takes 180 tokens and more",
    ),
    Claim(
        "Blocks let 2-4 times as many requests run",
        f"{mark(gain)} times as many as reserving the longest, {mark(over_oracle)} times as many "
        "as an oracle that knows every length",
        "held within bounds",
        "against reservation it follows the allowed length, against the oracle the growth of "
        "the answers",
    ),
    Claim(
        "Fragmentation comes from not knowing the lengths",
        f"with every length known, {mark(100 * runs['exact, best fit'].shares()[0], '%')} of the "
        "memory holds tokens",
        "did not hold",
        "answers own from the start what they fill at the end; pieces of many sizes leave holes",
    ),
)

# %% [markdown]
# **Next:** a block table says where a sequence's keys and values are. Chapter 22 makes attention
# read through it.

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
# # 22 · Paged attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/22_paged.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/22_paged.ipynb)
#
# Chapter 21 divided memory into [blocks](../docs/glossary.md#block) that lie anywhere. Attention,
# as chapter 14 wrote it, wants a sequence's keys and values one after another. (Operating systems
# divide memory in the same way, into *pages* found through a **page table**; hence *paged*, and
# some engines call a block a page.) This chapter puts keys and values into blocks, finds them again
# through the sequence's [block table](../docs/glossary.md#block-table), and runs this in the
# engine: [**paged attention**](../docs/glossary.md#paged-attention).
#
# **Afterwards you can** compute a token's slot, store and gather through a block table, read the
# picture of a running engine's memory, and say what paging gains and what it costs.
#
# **You need** chapter 14 (attention), chapter 17 (the KV cache) and chapter 21 (blocks, block tables,
# copy-on-write). **Time:** about 50 minutes to read and try, about 75 for the
# [exercises](../exercises/22_paged.ipynb).
#
# **Where we are:** blocks have been handed out (chapter 21). Now keys and values go into them, and
# attention reads them there.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill, decode | memory capacity | L3 engine | `--num-blocks` | sequences at once |
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
from statistics import mean

import torch

from minigen import SamplingParams
from minigen.kv_cache import paged as package
from minigen.model.attention import attention
from minigen.trace.events import EventKind
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    hunt,
    load_model,
    mark,
    measured,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch22_paged.figures import table_map
from minigen_course.ch22_paged.lesson import ReservingScheduler
from minigen_course.figures.block_map import block_map
from minigen_course.figures.explore import picture, replay, watch
from minigen_course.figures.show import best_seconds
from minigen_course.figures.trace_views import pool_states
from minigen_course.lab.texts import QUESTIONS
from minigen_course.lab.toy_engine import serve_toy

NUM_BLOCKS, BLOCK_SIZE = 40, 16  # a small memory, so that it is soon full
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=160)

# %%
chapter_map("KV cache", "attention")

# %% [markdown]
# ## A number that hurts
#
# Here is the real engine, forced to reserve each answer's maximum length up front: 12 questions, and
# each answer may have 160 tokens. The memory has 640 slots.
#
# Predict: what share of the slots holds a token, on average over the steps in which a request waits?
# (Chapter 21 found less. There, each request reserved its prompt and 384 slots in one piece. Here it
# reserves its prompt and 160, in blocks, so no slots are lost between the pieces. Numbers in ⟨ ⟩ are
# measured or depend on sampled text, so yours may differ.)

# %%
guess_use = predict("Per cent of the slots that hold a token, with reservations?", None)

# %%
reserving = load_model(
    num_blocks=NUM_BLOCKS,
    enable_prefix_caching=False,  # chapter 23's cache would keep blocks of ended requests
    scheduler=ReservingScheduler,
)
asked = [
    reserving.chat_prompt([{"role": "user", "content": f"Briefly: {question}"}])
    for question in QUESTIONS[:12]
]
with reserving.record() as recorder, reserving.count_work() as reserved_work:
    answers = reserving.generate(asked, params, progress=False)
reserved_states = pool_states(recorder.events)  # who owns which block, at the end of each step


def crowded(states):
    """The steps at whose end some request waits and has not finished."""
    unfinished, found = len(asked), []
    for state in states:
        unfinished -= sum(event.kind is EventKind.FINISHED for event in state.events)
        if len(state.tables) < unfinished:
            found.append(state)
    return found


def use(states):
    """The share of all slots that holds a token, and the requests at once, on average."""
    full = crowded(states)
    held = mean(sum(state.held.values()) / NUM_SLOTS for state in full)
    return held, mean(len(state.tables) for state in full)


use_reserved, together_reserved = use(reserved_states)
guess_use.compare(100 * use_reserved, "%", measured=True)
measured("requests at once", together_reserved)
print(f"steps until all are answered: ⟨{len(reserved_states):,}⟩")

# %% [markdown]
# ## The smallest version that works
#
# Store the keys and values of 50 tokens in blocks of 16 that lie anywhere: 7, 3, 9 and 5. (The memory of
# all blocks is the **pool**. Here it has 10 blocks, 1 to 10, and block 0, which no sequence owns. What it
# is for comes with batches, below.) That list is the block table. Entry 0 says where the tokens 0 to 15
# are, entry 1 where 16 to 31 are, and so on.

# %%
table = [7, 3, 9, 5]
picture(
    table_map(table, 50, num_blocks=10, block_size=16),
    "A sequence of 50 tokens, its block table, and the pool. Each entry of the table names the block "
    "that holds the next 16 tokens. The last block holds two tokens; the rest of it is empty.",
    number="22.1",
)


# %%
class ScatteredCache:
    """Keys and values in blocks, one token after another."""

    def __init__(self, num_blocks, kv_heads, block_size, head_dim):
        self.memory = torch.zeros(2, num_blocks + 1, block_size, kv_heads, head_dim)
        self.block_size = block_size

    def store(self, table, k, v):
        for position in range(len(k)):
            block, offset = table[position // self.block_size], position % self.block_size
            self.memory[0, block, offset] = k[position]
            self.memory[1, block, offset] = v[position]

    def gather(self, table, num_tokens):
        places = [divmod(position, self.block_size) for position in range(num_tokens)]
        keys, values = (
            torch.stack([half[table[index], offset] for index, offset in places])
            for half in self.memory
        )
        return keys, values


torch.manual_seed(22)
k, v, q = torch.randn(50, 3, 64), torch.randn(50, 3, 64), torch.randn(1, 9, 64)
cache = ScatteredCache(10, 3, 16, 64)
cache.store(table, k, v)
keys, values = cache.gather(table, 50)
assert torch.equal(attention(q, keys, values), attention(q, k, v))
print("gathered through", table, "they are in order again, and attention is the same")

# %% [markdown]
# Gathering restored the order. But did attention need it? Predict: shuffle the 50 keys and values, both
# in the same way, and compute attention for one new token. Is the result the same? Write `"yes"` or
# `"no"`.

# %%
guess_order = predict("Is attention the same when keys and values are shuffled alike?", None)

# %%
shuffled = torch.randperm(50)
out, out_shuffled = attention(q, k, v), attention(q, k[shuffled], v[shuffled])
same = torch.allclose(out, out_shuffled, atol=1e-5)
guess_order.compare("yes" if same else "no")
print(f"the largest difference between the two: ⟨{(out - out_shuffled).abs().max():.1e}⟩")
assert same

# %% [markdown]
# It is the same, but for rounding. For one query, attention is a weighted *sum* over the tokens (chapter
# 14), and a sum does not depend on the order of its terms (with floating-point numbers, its last
# digits do):
#
# $$o = \sum_{s} a_s v_s, \qquad a_s = \frac{\exp(q \cdot k_s / \sqrt d)}
# {\sum_{u} \exp(q \cdot k_u / \sqrt d)}$$
#
# And the position of a token is not lost when its key moves, because it was rotated into the key before
# the key was stored (chapter 13). So no code has to restore the order: a kernel may visit the blocks in
# any order. (A model without positions in its keys can be paged, too: the table still says which token
# is where.)
#
# What must be known is *which* slots hold tokens that the query may see. Here the last block has 14
# slots that hold nothing, and these must be cut off or masked. For a prompt, where each token sees
# itself and the tokens before it, and for a sliding window (chapter 14), the mask needs each slot's
# position, and the order of the table gives it.
#
# ## Why it is slow
#
# `ScatteredCache` loops over the tokens in Python. Name the place of a token by one number instead,
# its [**slot**](../docs/glossary.md#slot). With block size $B$ and block table $T$, the token at
# position $p$ has
#
# $$\text{slot}(p) = T\big[\lfloor p / B \rfloor\big] \cdot B + (p \bmod B)$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $p$ | position of the token in its sequence, from 0 | `positions` |
# | $B$ | slots per block | `block_size` |
# | $T$ | block table of the sequence | `block_ids` |
# | $T[i]$ | block that holds the tokens $iB$ to $iB + B - 1$ | entry $i$ |
#
# By hand: position 18 in the table above lies in entry $\lfloor 18/16 \rfloor = 1$, which is block 3,
# at offset 2. So its slot is $3 \cdot 16 + 2 = 50$. With slots, storing is one indexed copy for
# the keys and one for the values, whatever blocks the tokens go to, and blocks are gathered
# whole.

# %%
print("slots of the tokens 14 to 18:", package.slots_of(table, range(14, 19), 16))
pool = package.KVPool(
    layers=1, num_blocks=10, kv_heads=3, block_size=16, head_dim=64, dtype=k.dtype
)
slots = torch.tensor(package.slots_of(table, range(50), 16))
pool.store(0, k, v, slots)
for mine, theirs in zip(cache.gather(table, 50), pool.gather(0, torch.tensor(table)), strict=True):
    assert torch.equal(mine, theirs[:50])
print("the package's pool gives the same keys and values")
loop = best_seconds(lambda: cache.store(table, k, v))
indexed = best_seconds(lambda: pool.store(0, k, v, slots))
measured("storing 50 tokens, in a loop", 1e6 * loop, "µs")
measured("storing 50 tokens, by slots", 1e6 * indexed, "µs")

# %% [markdown]
# In a batch, the new tokens of all sequences are stored at once: their slots are in one list. Then
# each sequence attends through its own table. Those that [decode](../docs/glossary.md#decode) do it
# together: their tables are padded to the longest, and the padding is masked. Prompts attend one after
# another, because their lengths differ, and their queries would need padding, too. Here is such a batch,
# with blocks of 4: two sequences decode, and the third has a prompt of 4 tokens.

# %%
block_tables = [[7, 3], [5, 0], [2, 0]]  # 0 is padding
context_lens = [6, 3, 4]  # the sequences' lengths with their new tokens
# Where their new tokens begin in the packed batch; last, the number of all new tokens
query_starts = [0, 1, 2, 6]
for row, length in enumerate(context_lens):
    places = range(length - (query_starts[row + 1] - query_starts[row]), length)
    new = package.slots_of(block_tables[row], places, 4)
    print(f"sequence {row}: table {block_tables[row]}, new positions {[*places]} at slots {new}")
print("what the two that decode see of their gathered blocks, position by position:")
for row, length in enumerate(context_lens[:2]):
    seen = [" x " if position < length else " . " for position in range(2 * 4)]
    print(f"sequence {row}: {''.join(seen)}")

# %% [markdown]
# The second row of the mask cuts off the last slot of block 5 and the whole of block 0, which only fills
# up the table. (On a GPU, a [CUDA graph](../docs/glossary.md#cuda-graph) is recorded for a fixed batch
# size, and an engine records only some sizes, see chapter 15. So a smaller batch is filled up with
# padding rows, and in minigen these read and write block 0.)
#
# In the code below, the first `num_decodes` sequences decode (here 2), and `windows` has each layer's
# sliding window (chapter 14) or None. With a window, the mask also has a lower end: the sequence's length
# minus the window. Without one, the code subtracts `position.numel() + longest` instead, which is larger
# than any length, so the lower end is negative and cuts off nothing. `gather` with a table per sequence
# returns [sequences, slots, KV heads, head_dim]; below, its axes of slots and KV heads change places. A
# mask has a row per sequence and a column per gathered slot. Each `unsqueeze(1)` adds an axis of size 1,
# so that all heads share a row: one axis for the KV heads, the other for the query heads that share a KV
# head. (`to(device)` copies to the device of the pool. On a CPU the batch is there already, and nothing
# is copied.)

# %%
show(package.attend_paged)

# %% [markdown]
# To check it, compare it with something simpler: the dense cache of chapter 17. On a CPU with float32
# weights the engine runs the function above, not a compiled step. Several texts at once in the paged
# engine, each alone in the dense one:

# %%
from minigen_course.ch17_dense_cache.lesson import continue_dense

exact = load_model(weights="float32", num_blocks=64)
texts = ["The sea is", "Once upon a time there was a king who", "1, 2, 3, 4, 5, 6, 7, 8, 9,"]
greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
for text, answer in zip(texts, exact.generate(texts, greedy, progress=False), strict=True):
    assert answer.token_ids == continue_dense(exact, text, 5)
print("token by token the same, in blocks and in one piece")

# %% [markdown]
# ## The tables, as sequences come and go
#
# Now the same 12 questions, with blocks as they are needed. The picture below is drawn while the engine
# runs, from the events that it emits. When the run has ended, it shows the step in which the memory was
# fullest.
#
# Are the answers the same as before? In the compiled step they are, because there a request's numbers do
# not depend on its batch (chapter 16), nor on whether its tokens are computed one by one or together (as
# after a preemption, see below). In torch they do, in their last digits. Now and then a draw
# falls on the neighbouring token, and the rest of that answer differs. The cell prints which of the two
# ran here.


# %%
def live(events):
    """The current step; after the end, the step in which the most tokens were held."""
    states = pool_states(events)
    step = len(states) - 1
    if states and not states[-1].tables:
        step = max(range(len(states)), key=lambda each: sum(states[each].held.values()))
    return block_map(states, step, NUM_BLOCKS, BLOCK_SIZE)


paged = load_model(num_blocks=NUM_BLOCKS, enable_prefix_caching=False)
with (
    paged.count_work() as paged_work,
    watch(
        paged.trace, live, "The memory of a running engine, block by block.", number="22.2"
    ) as events,
):
    paged_answers = paged.generate(asked, params, progress=False)
same = sum(one.text == other.text for one, other in zip(paged_answers, answers, strict=True))
print(f"ran: ⟨{paged.describe()['runner']}⟩")
print(f"the same answers as with reservations: ⟨{same} of {len(asked)}⟩")

# %% [markdown]
# Figure 22.3, below, plays it again (the button in steps of four) with either engine: choose it above that picture. A
# colour is a request, which keeps its row on the right while it runs (an empty row waits for the next
# one); the number in a block is the block's id; the pale part of a block holds nothing (the legend calls
# it *waste*). As blocks are needed, a request whose last block is full gets one block more, any that is
# free. The blocks of requests that have ended go to others.
#
# Predict: in the engine that takes blocks as they are needed, what share of the slots in owned blocks is
# empty, while requests wait?

# %%
guess_empty = predict("Per cent of the owned slots that are empty, with blocks?", None)

# %%
states = {"the longest reserved": reserved_states, "blocks as they are needed": pool_states(events)}
empty = {way: mean(one.waste(BLOCK_SIZE) for one in crowded(run)) for way, run in states.items()}
for way, share in empty.items():
    print(f"{way}: {mark(100 * share, '%')} of the owned slots are empty")
guess_empty.compare(100 * empty["blocks as they are needed"], "%", measured=True)


def map_at(step, way):
    return block_map(states[way], min(step, len(states[way]) - 1), NUM_BLOCKS, BLOCK_SIZE)


replay(
    map_at,
    max(map(len, states.values())),
    "Blocks in the colours of their owners, and the block tables. With reservations (the other choice) "
    "many owned blocks are pale: they hold nothing yet.",
    number="22.3",
    at=60,
    stride=4,
    way=list(reversed(states)),
)

# %% [markdown]
# When a running request needs a block and none is free, one of the running requests has to give up
# its place: the engine takes all blocks of the running request that arrived last, and computes its tokens
# again later. That is [preemption](../docs/glossary.md#preemption), which chapter 24 measures. A
# preempted request waits in front of all requests that have not started yet, and needs blocks for all its
# tokens at once. So some blocks may be free, and still no request can start.
#
# ## Forks share blocks
#
# Ask for n answers to one prompt: the prompt is computed once, then the sequence splits (it **forks**)
# into n, and their tables begin with the same blocks.

# %%
story = (
    "Every evening the old keeper of the lighthouse climbed the stairs and lit the lamp. One night "
    "a small boat came out of the fog, without a light and without a sound. The keeper took his "
    "coat and went down to the rocks. In the boat sat a child with a letter, and on the letter "
    "there was his own name. He"
)
num_prompt = len(paged.tokenizer.encode(story))
print(f"the prompt has {num_prompt} tokens: {num_prompt // BLOCK_SIZE} full blocks of 16, ", end="")
print(f"and {num_prompt % BLOCK_SIZE} tokens in another")

# %% [markdown]
# Predict: 8 answers of 12 tokens each are written to this prompt. How many blocks do they own together
# at the end?

# %%
guess_blocks = predict("Blocks owned by 8 answers of 12 tokens to this prompt?", None, within=1.1)

# %%
forked_states, owned, shared = {}, {}, {}
for n in (1, 2, 4, 8):
    forked = SamplingParams(n=n, seed=3, max_tokens=12, ignore_eos=True)
    with paged.record() as recorder, paged.count_work() as work:
        paged.generate(story, forked, progress=False)
    forked_states[n] = pool_states(recorder.events)
    fullest = max(forked_states[n], key=lambda state: len(state.fills(BLOCK_SIZE)))
    entries, fills = sum(map(len, fullest.tables.values())), fullest.fills(BLOCK_SIZE)
    owned[n] = len(fills)
    shared[n] = sum(len(fullest.owners(block)) == n for block in fills)
    print(
        f"{n} answers: tables of {entries:>2} entries in all, {owned[n]:>2} blocks owned", end=", "
    )
    print(f"{work.blocks_copied} copied")
shared_ratio = entries / owned[8]
assert owned[8] == num_prompt // BLOCK_SIZE + 8
guess_blocks.compare(owned[8])

# %% [markdown]
# The prompt's four full blocks are there once. Its last block is copied before an answer writes into
# it: one copy for each answer but the last. Of 12 more tokens 11 are stored (nothing reads the last
# one's key and value), and they fit into that block, so each answer owns one block alone:
# $4 + 8 = 12$.

# %%
of_four = forked_states[4]
first = min(of_four[0].tables)
replay(
    lambda step: block_map(
        of_four, step, NUM_BLOCKS, BLOCK_SIZE, lambda each: f"answer {each - first + 1}"
    ),
    len(of_four),
    "Four answers to one prompt. Their tables begin with the same four hatched blocks, and each ends in "
    "a block of its own. The arrows are the copies.",
    number="22.4",
    at=1,
)

# %% [markdown]
# ## What it costs
#
# In plain torch, gathering copies what attention then reads. Here is the attention of one decode
# step over 1,024 tokens, in one layer of this model's size. Predict: how many times as long does
# attention take with the copy?

# %%
guess_cost = predict("Attention through a table, against one piece (times)?", None, within=1.5)

# %%
context, many = 1024, package.KVPool(1, 64, 3, 16, 64, torch.float32)
scattered = torch.randperm(64) + 1
for half in many.kv[0]:
    half.normal_()  # random keys, then values, of layer 0
dense_k, dense_v = many.gather(0, scattered)
in_one_piece = best_seconds(lambda: attention(q, dense_k, dense_v), repeats=30)
through_table = best_seconds(lambda: attention(q, *many.gather(0, scattered)), repeats=30)
assert torch.equal(attention(q, *many.gather(0, scattered)), attention(q, dense_k, dense_v))
measured("attention over one piece", 1e6 * in_one_piece, "µs")
measured("gathered through a table first", 1e6 * through_table, "µs")
guess_cost.compare(through_table / in_one_piece, "times", measured=True)

# %% [markdown]
# By bytes alone it would be three times: read, written, read again. But in torch, at this size,
# attention spends most of its time on other things than reading these 1.6 MB. The copy is not needed. A
# kernel can read each block where it lies, and add up the sum block by block. (It keeps a running
# numerator, denominator and largest score; chapter 32 shows how.) Chapter 33 writes such a kernel for a
# GPU, and the compiled step (chapter 34) has one for a CPU. Where the step is compiled, the engine that
# answered the 12 questions used that kernel.
#
# ## Your turn
#
# First the slot of a token: a short calculation that some engines got wrong (the bug hunt names
# two).

# %%
task(22, "slots_of")

# %%
# exercise: minigen.kv_cache.paged.slots_of
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


def slots_of(block_ids: SequenceOf[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Return the slots of the tokens at these positions of a sequence.

    `block_ids` is the sequence's block table; its first block holds position 0.

    >>> slots_of([7, 3], range(2, 6), block_size=4)
    [30, 31, 12, 13]
    """
    raise NotImplementedError  # your turn


# %%
my_slots = check(22, slots_of=slots_of)

# %% [markdown]
# In every step the engine calls it for each sequence of the batch. (As long as yours has not
# passed, the package's own runs, and the line below says so.)

# %%
with using(22, slots_of=my_slots):
    print(exact.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# Then the pool itself. Like the package's, it must hold block 0, which padded tables may name, have the
# attribute `block_size`, and begin with zeros (question 3 below says why). In the shapes, `*rows` stands
# for any number of axes, also none.

# %%
task(22, "KVPool")

# %%
# exercise: minigen.kv_cache.paged.KVPool
from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class KVPool:
    """The memory of all blocks, including block 0."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        slots: Int64[Tensor, " tokens"],
    ) -> None:
        """Write each token's key and value of one layer to its slot."""
        raise NotImplementedError  # your turn

    def gather(
        self, layer_id: int, block_table: Int64[Tensor, "*rows blocks"]
    ) -> tuple[
        Float[Tensor, "*rows slots kv_heads head_dim"],
        Float[Tensor, "*rows slots kv_heads head_dim"],
    ]:
        """Return copies of the keys and values in these blocks, contiguous and in table order."""
        raise NotImplementedError  # your turn

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""
        raise NotImplementedError  # your turn


# %%
my_pool = check(22, KVPool=KVPool)
with using(22, KVPool=my_pool):  # an engine that runs layer by layer keeps keys and values in it
    llm = load_model(weights="float32", num_blocks=64)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

# %% [markdown]
# The next two exercises go further: the slots of a whole batch at once, as engines with large batches
# compute them (minigen's own engine loops over its sequences), and attention that reads the blocks one
# after another, as kernels of part 3 do.

# %%
task(22, "decode_slots")

# %%
# exercise: minigen_course.ch22_paged.lesson.decode_slots
import numpy as np
from jaxtyping import Int64


def decode_slots(
    block_tables: Int64[np.ndarray, "sequences max_blocks"],
    context_lens: Int64[np.ndarray, " sequences"],
    block_size: int,
) -> Int64[np.ndarray, " sequences"]:
    """Return the slot of each sequence's last token, of all sequences at once.

    `context_lens` counts the last token. Rows of `block_tables` are padded with 0 at their ends.

    >>> decode_slots(np.array([[7, 3], [5, 0]]), np.array([6, 4]), block_size=4).tolist()
    [13, 23]
    """
    raise NotImplementedError  # your turn


# %%
my_batch = check(22, decode_slots=decode_slots)

# %%
task(22, "attend_by_block")

# %%
# exercise: minigen_course.ch22_paged.lesson.attend_by_block
from jaxtyping import Float
from torch import Tensor

from minigen.kv_cache.paged import KVPool as Pool


def attend_by_block(
    q: Float[Tensor, "q_heads head_dim"],
    pool: Pool,
    layer_id: int,
    block_ids: list[int],
    num_tokens: int,
) -> Float[Tensor, "q_heads head_dim"]:
    """Return the attention of one query over the first `num_tokens` tokens of a block table.

    The blocks are read one after another; no tensor holds the keys or values of two blocks.
    """
    raise NotImplementedError  # your turn


# %%
my_attend = check(22, attend_by_block=attend_by_block)
by_block = my_attend(q[0], many, 0, scattered.tolist(), context)
torch.testing.assert_close(by_block, attention(q, dense_k, dense_v)[0], atol=1e-5, rtol=1e-5)
whose = "your" if my_attend is attend_by_block else "the course's own"
print(f"{whose} attend_by_block: over 1,024 tokens the same as attention over one piece")

# %% [markdown]
# ## The package's version

# %%
reveal(22, slots_of=my_slots, KVPool=my_pool)
reveal(22, decode_slots=my_batch, attend_by_block=my_attend)

# %% [markdown]
# ## A bug hunt
#
# `next_slots` below says where a sequence's next tokens go. It looks right, and it is wrong. **The
# report:** *Answers begin well and become wrong after a while. How soon depends on the length of the
# prompt. When other requests run alongside, even answers that were correct on their own go wrong.
# Prompts are processed correctly, and no exception is raised.*
#
# Find the mistake. First reproduce it with a test that fails on this function and passes on every correct
# one. Then fix the function, in the cell below. Your test is judged as well, on functions that are
# correct and on some with a mistake of the same family. `serve_toy` runs the real engine, with blocks of
# 4, around a toy model, whose next token follows from all tokens that it reads. The cell below the
# function prints two answers. Until you fix the function, both are wrong. After that they are equal, and
# begin 92 25 42.
#
# It has happened. MinivLLM computed the slot of a decode step in the way that stands here
# ([issue 76](https://github.com/Wenyueh/MinivLLM/issues/76)). ONNX Runtime GenAI wrote every decoded
# token one position too far
# ([pull request 2354](https://github.com/microsoft/onnxruntime-genai/pull/2354)).

# %%
# hunt: minigen_course.ch22_paged.hunt
from minigen_course.lab.toy_engine import SlotsOf


def next_slots(block_ids: list[int], num_computed: int, num_new: int, block_size: int) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` tokens.

    A slot is `block_id * block_size + offset`. `block_ids` has blocks for all of these tokens.
    """
    num_tokens = num_computed + num_new
    if num_new == 1:  # a decode step: the last used slot of the last block
        num_in_last_block = num_tokens % block_size
        last_block = block_ids[(num_tokens - 1) // block_size]
        return [last_block * block_size + num_in_last_block - 1]
    slots = []
    for position in range(num_computed, num_tokens):
        block, offset = divmod(position, block_size)
        slots.append(block_ids[block] * block_size + offset)
    return slots


def test_slots(next_slots: SlotsOf) -> None:
    """Assert what every correct `next_slots` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
hunt(22, test=test_slots, mended=next_slots)
alone = serve_toy([[5, 3, 8]], slots_of=next_slots).answers[0]
beside = serve_toy([[5, 3, 8], [9, 9, 1, 4, 7]], slots_of=next_slots).answers[0]
print("alone: ", *alone)
print("beside:", *beside)

# %% [markdown]
# ## The measurement again
#
# The number from the top, with reservations and with blocks as they are needed.

# %%
use_paged, together_paged = use(states["blocks as they are needed"])
measured("slots that hold a token, the longest reserved", 100 * use_reserved, "%")
measured("slots that hold a token, in blocks", 100 * use_paged, "%")
measured("requests at once, the longest reserved", together_reserved)
measured("requests at once, in blocks", together_paged)
measured(
    "requests at once, in blocks over the longest reserved", together_paged / together_reserved
)
of_paged = crowded(states["blocks as they are needed"])
num_free = mean(NUM_BLOCKS - len(one.fills(BLOCK_SIZE)) for one in of_paged)
again = paged_work.tokens_recomputed / (paged_work.tokens_prefilled + paged_work.tokens_decoded)
measured("free blocks while requests wait, in blocks", 100 * num_free / NUM_BLOCKS, "%")
measured("computed again after a preemption, of all prompts' and answers' tokens", 100 * again, "%")
print(f"preemptions, in blocks: ⟨{paged_work.preemptions}⟩")
for way, work in zip(states, (reserved_work, paged_work), strict=True):
    print(f"{way}: ⟨{work.steps:,} steps⟩ that computed ⟨{work.tokens_computed:,} tokens⟩")
fewer = reserved_work.steps / paged_work.steps
fuller = fewer * paged_work.tokens_computed / reserved_work.tokens_computed
measured("steps, the longest reserved over in blocks", fewer)
measured("tokens per step, in blocks over the longest reserved", fuller)

# %% [markdown]
# The gain in tokens per step (the last line) counts more than useful work, because a preempted request
# is computed again as a whole prompt. Without the repeats both ways compute about the same tokens, so the
# gain in useful tokens per step is the ratio of the steps (the line before the last). It need not equal
# the gain in requests at once: those are counted only while one waits. So the first steps, in which all
# 12 run in blocks, are left out, and so are the last ones, when few run in either. Why are there repeats? A request starts as soon as its prompt finds blocks, then all
# running answers grow, and once they need more than 40 blocks, some request loses its blocks and is
# computed again from its first token. With long answers that can happen again and again (the engine
# **thrashes**), so the share above depends on the sampled text. Chapter 24 treats this: it compares
# such a scheduler with one that reserves, and shows how much of the repeated work a prefix cache
# saves.
#
# ## Claims
#
# What papers and guides say, beside what this notebook found. (The PagedAttention paper is known for 2-4
# times the throughput; these are other numbers. In it, vLLM runs OPT-13B with 4.3 times as many
# requests at once as an engine that reserves the longest sequence, and 2.2 times as many as one
# that knows each answer's length.) The outcomes are computed from the numbers.

# %% jupyter={"source_hidden": true}
PAPER = "[Kwon et al. 2023](https://arxiv.org/abs/2309.06180)"
verdicts(
    "22",
    Claim(
        "Blocks raise the share of KV memory that holds tokens from 20 % (the longest reserved) or "
        "38 % (each length known) to 96 %",
        f"from {mark(100 * use_reserved, '%')} to {mark(100 * use_paged, '%')}",
        within(100 * use_paged, 95, 100),
        "some blocks are free, but too few for the next request (the remainder of chapter 21); and "
        "the last block of each sequence is half empty on average, and our sequences have few "
        "blocks; the first figure depends on how much longer the longest answer is than the usual",
        PAPER,
        measured=True,
    ),
    Claim(
        "With blocks, 4.3 times as many sequences run at once as with the longest reserved",
        f"{mark(together_paged / together_reserved)} times",
        within(together_paged / together_reserved, 4.3, 4.4),
        "the longest decides: the engine they compare with reserves 2,048 tokens for every request, "
        "ours the prompt and the 160 that an answer may have",
        PAPER,
        measured=True,
    ),
    Claim(
        "Several answers to one prompt keep one copy of it",
        f"{shared[8]} of the prompt's {num_prompt // BLOCK_SIZE + 1} blocks are owned by all 8 "
        f"answers; the tables have {shared_ratio:.1f} times as many entries as blocks are owned",
        holds(shared[8] == num_prompt // BLOCK_SIZE),
        "all full blocks; the last one is copied, because each answer writes into it",
        PAPER,
    ),
    Claim(
        "Attention through a block table is 20-26 % slower",
        f"on this CPU, with the blocks copied together first, it takes "
        f"{mark(through_table / in_one_piece)} times as long",
        NOT_TESTED,
        "the claim is about the paper's GPU kernel, which reads blocks in place; a copy in torch is "
        "another thing, and chapter 33 counts the bytes of a kernel",
        PAPER,
    ),
)

# %% [markdown]
# ## Summary
#
# - A block table lists a sequence's blocks in the order of its tokens. The slot of a token is its
#   block times the block size, plus its offset in the block.
# - Storing needs the slots of the new tokens; reading needs the block table and the length.
# - Attention of one query is a sum over tokens, and here positions are inside the keys. So keys
#   and values may lie in any order; only the slots that hold no visible token must be masked.
# - With blocks as they are needed, far more of the memory holds tokens, and more requests run at once.
# - Answers to one prompt share its full blocks. A block that is not full is copied before it is
#   written as long as others own it too.
# - Paging saves capacity, not bandwidth: attention reads no fewer keys and values than from one
#   piece.
# - In plain torch, reading through a table costs a copy. A kernel that reads blocks in place needs
#   none.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. Blocks of 16, block table [4, 11, 2]. Which slot holds the token at position
# 37?</summary>
# 37 = 2 · 16 + 5, so it is in entry 2, block 2, at offset 5: slot 2 · 16 + 5 = 37. (It is a
# coincidence that the slot equals the position.)</details>
#
# <details><summary>2. How many blocks do 8 answers of 12 tokens own if the prompt has 70 tokens instead
# of 68?</summary>
# Four full blocks are shared. Each answer stores up to 70 + 11 = 81 tokens (not its last), which is
# beyond the fifth block (80), so each owns two blocks alone: 4 + 8 · 2 = 20.</details>
#
# <details><summary>3. A batch of decodes is padded to the longest table. Why must the slots in the
# padding hold numbers at all, and not NaN?</summary> A value that is masked has the weight 0, but 0 times
# NaN is NaN, and it enters the sum. A key that is NaN is worse: torch's attention adds the mask, as 0 or
# −∞, to the scores, and NaN - ∞ is NaN, so every weight is lost. So a new pool is filled with
# zeros.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://github.com/vllm-project/vllm)** carries the two things of this chapter by name
#   through its code: `block_table` for reading, and `slot_mapping` for writing. Its attention is one of
#   many backends, on NVIDIA GPUs often FlashAttention's or FlashInfer's; both read through block tables.
# - **[FlashInfer](https://github.com/flashinfer-ai/flashinfer)** can take the tables of a batch
#   packed: all entries in one list, where each sequence begins, and how full each last page is.
#   Then no table is padded.
# - **[SGLang](https://github.com/sgl-project/sglang)** keeps the slot of every token of a request in its
#   table (`req_to_token`), not the block.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** and
#   **[MLC-LLM](https://github.com/mlc-ai/mlc-llm)** read a paged cache in kernels of their own
#   (MLC-LLM on newer NVIDIA GPUs often in FlashInfer's), the latter for phones and browsers, too.
#   **llama.cpp**'s unified cache keeps the slots (it calls them cells) of all sequences in one
#   array, and masks those of other sequences; its other mode gives each sequence a part of its own.
# - **[vAttention](https://arxiv.org/abs/2405.04437)** keeps a sequence's virtual addresses
#   contiguous and pages physical memory below them, so attention kernels need not know of pages.
#
# ## Further reading
#
# - [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), Kwon et al. 2023: sections 4 and 7.1.
# - [FlashInfer](https://arxiv.org/abs/2501.01005), Ye et al. 2025: formats for block tables, and kernels
#   that read them.
# - [vAttention](https://arxiv.org/abs/2405.04437), Prabhu et al. 2024: the case against block tables.
#
# **Next:** forks share because they know of each other. [Chapter 23](23_prefix.ipynb) finds equal
# beginnings among requests that do not.

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
# # 33 · Paged attention on a GPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/33_paged_attention.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/33_paged_attention.ipynb)
#
# Chapter 22 put keys and values into [blocks](../docs/glossary.md#block), and copied them together
# again at every step. Chapter 32 attended tile by tile, for many queries at once. A
# [decode](../docs/glossary.md#decode) step has one query position for each sequence, and a context
# that is spread over blocks. This chapter writes the kernel for it, in three rungs:
#
# | rung | what it changes | what it saves |
# |---|---|---|
# | **grouped** | one program for each KV head, with all query heads that share it | loading each key once for every query head |
# | **tiled** | the program reads the block table, and goes through the context in tiles | the copy |
# | **split** | several programs share one context, and a second kernel joins their results | idle processors |
#
# **Afterwards you can** find a token's slot inside a kernel, count what a kernel loads against what
# it must load, say how many programs a GPU needs and why, split a context and merge the parts, and
# run the engine with your own kernel.
#
# No kernel of this chapter runs on a GPU. Besides quoted figures, three kinds of numbers about a
# GPU follow, and the chapter keeps them apart. Bytes that programs ask for are **counted**, in
# Triton's interpreter. Times on a GPU are **modelled**, from data sheets and from two assumed
# constants, which you can change. Registers, shared memory and instructions are read from
# **compiled** code. (The next section also measures times on this CPU.)
#
# **You need** chapters 22 (block tables), 31 (kernels in Triton) and 32 (online softmax).
# **Time:** about 55 minutes to read and try, about 110 for the
# [exercises](../exercises/33_paged_attention.ipynb).
#
# **Where we are:** chapter 31 counted the bytes of small kernels, chapter 32 those of
# [prefill](../docs/glossary.md#prefill). Each further token of an answer is a decode step, whose
# attention reads all keys and values of the sequence for a single new query position.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | decode | memory bandwidth | L1 kernels | number of splits | bytes read per second |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[gpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
import torch

from minigen import SamplingParams
from minigen.kv_cache.paged import KVPool
from minigen.model.attention import attention
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    load_model,
    measured,
    predict,
    reveal,
    show,
    task,
    verdicts,
    within,
)
from minigen_course.ch33_paged_attention.exercises import contexts
from minigen_course.ch33_paged_attention.figures import (
    best_split_curves,
    bytes_bars,
    fill_chip,
    group_products,
    pool_loads,
    split_merge,
    table_lookup,
)
from minigen_course.ch33_paged_attention.kernels import (
    decoding,
    gathering,
    joining,
    launch_gather,
    padded,
    scale_of,
)
from minigen_course.ch33_paged_attention.lesson import (
    CHIPS,
    LAUNCH_SECONDS,
    TILE,
    TILE_SECONDS,
    Assumed,
    Decoding,
    best_splits,
    decode_code,
    moved_by_tensor,
    record_decode,
    seconds,
)
from minigen_course.ch33_paged_attention.rungs import (
    grouping,
    launch_grouped,
    launch_tiled,
    tiling,
)
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import best_seconds
from minigen_course.grading.plug_in import attending
from minigen_course.lab.cost_model import MACHINES, config_of, num_parameters
from minigen_course.lab.triton_interpreter import need_triton

need_triton()  # says what to do where there is none; the page can be read all the same
from minigen.kernels.triton.attention import attend_triton
from minigen.kernels.triton.decode_attention import num_splits, paged_decode_triton
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import interpreted, launch, tl

greedy = SamplingParams(temperature=0, max_tokens=2)  # the second token takes a decode step
llm = load_model(weights="float32", num_blocks=2, enable_prefix_caching=False)  # room for 32 tokens
expected = llm.generate("The sea is", greedy).text
chapter_map("attention", "blocks", "GPU kernels")

# %% [markdown]
# ## A number that hurts
#
# Two numbers, in fact. The first is the copy. A decode step in plain torch gathers a sequence's
# blocks into one piece, and then reads the piece. Below, attention with the copy and without it is timed
# on this machine, for one layer of our model and 8,192 tokens. (Numbers in ⟨ ⟩ are measured, so yours differ.)
#
# The second is the idle chip. A GPU is made of many processors (**streaming multiprocessors**, SM,
# in chapter 31), and a program runs on one of them. Suppose that one user has a long chat with
# Llama-3.1-8B (Llama-3-8B's shapes, for longer texts), and that no other request is there. The model has
# 8 KV heads, and a program for each of them attends to the whole context.

# %%
guess_copy = predict("8,192 tokens: how many times as long with the copy?", None)
guess_busy = predict("One long chat: how many of an H100's 132 processors work?", None)

# %%
long = 8192
pool = KVPool(1, long // 16, 3, 16, 64, torch.float32)
for half in pool.kv[0]:
    half.normal_()
scattered = torch.randperm(long // 16) + 1  # the blocks of a sequence, in no order
dense, one_query = pool.gather(0, scattered), torch.randn(1, 9, 64)
in_one_piece = best_seconds(lambda: attention(one_query, *dense))
gathered_first = best_seconds(lambda: attention(one_query, *pool.gather(0, scattered)))
copy_ratio = gathered_first / in_one_piece
measured("attention over one piece", 1e6 * in_one_piece, "µs")
measured("gathered through a block table first", 1e6 * gathered_first, "µs")
guess_copy.compare(copy_ratio, "times", measured=True)

chip, one_long = CHIPS["H100 SXM"], Decoding(batch=1, context=32_768)  # Llama-3.1-8B: 8 KV heads
busy = one_long.num_programs(splits=1)
print(f"\none sequence of 32,768 tokens, a program for each KV head: {busy} programs")
print(f"an H100 has {chip.processors} processors: {busy / chip.processors:.0%} of it would work")
guess_busy.compare(busy)

# %% [markdown]
# The copy is paid again at every step and in every layer, and all that it changes is the order of
# the numbers in memory. And on the GPU, 124 of the 132 processors would idle beside the other
# eight. The tiled rung removes the copy, the split rung removes the idling.
#
# ## The way to a slot
#
# A sequence's tokens have **positions** 0, 1, 2 and so on. Their keys are not in one row: the pool
# (chapter 22) is cut into blocks of $B$ slots, and the [block
# table](../docs/glossary.md#block-table) of the sequence lists its blocks. A kernel sees the pool
# as one long row of numbers, so it needs an **offset**: how many numbers before the one that it
# wants.
#
# By hand: ten tokens, blocks of $B = 4$ slots, the block table $T = (2, 3, 1)$. Each slot holds one
# key of 16 numbers, so slots are 16 numbers apart and blocks 64. Where is the key of position 9?
#
# 1. Entry $\lfloor 9 / 4 \rfloor = 2$ of the table says block $T[2] = 1$.
# 2. The slot in that block is $9 \bmod 4 = 1$.
# 3. The key starts at $1 \cdot 64 + 1 \cdot 16 = 80$.
#
# As a formula, for position $p$ and KV head $h$:
#
# $$\mathrm{at}(p, h) = T\big[\lfloor p / B \rfloor\big] \cdot s_b \;+\; (p \bmod B) \cdot s_s \;+\; h \cdot s_h$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $p$ | a token's position in its sequence | `positions` |
# | $T$ | the sequence's block table | `table_ptr`, a row of `tables_ptr` |
# | $B$ | slots in a block | `BLOCK_SIZE` |
# | $s_b, s_s, s_h$ | numbers between two blocks, slots, KV heads (**strides**, chapter 31) | `block_stride`, `slot_stride`, `head_stride` |
# | $\mathrm{at}$ | offset of the token's key; in the pool's other half, of its value | `at` |
#
# The picture shows the three steps: positions above, the table in the middle, the pool's slots
# below. A colour stands for a block. Drag the position, and find the place where the next slot is
# not the neighbour of the one before.

# %%
tiny = contexts([10], block_size=4)
tiny_table = tiny.tables[0, :-1].tolist()


def way_of(position):
    return table_lookup(tiny_table, 10, 4, len(tiny.keys), position)


explore(
    way_of,
    "From a position to its slot. Above: the ten positions. Middle: the block table, an entry for four "
    "positions. Below: the pool, with the position that each slot holds.",
    "33.1",
    position=(0, 9, 1, 9),
)
print("strides of the pool's keys (block, slot, KV head):", *tiny.keys.stride()[:3])
at_9 = tiny_table[9 // 4] * tiny.keys.stride(0) + 9 % 4 * tiny.keys.stride(1)
print(f"position 9 starts at number {at_9} of the pool's keys")
assert torch.equal(tiny.keys.flatten()[at_9 : at_9 + 16], tiny.own[0][0][9, 0])

# %% [markdown]
# ## Your turn: gather, as a kernel
#
# The warm-up is the copy itself, because rungs two and three need its addresses. Each program copies
# a tile of `BLOCK_N` positions. All KV heads of a slot are neighbours here, so a slot has one row
# of `WIDTH` numbers, and $h$ is not needed. The equation, for each position $p < n$:
#
# $$\mathrm{gathered}[p] = \mathrm{half}[\,\mathrm{at}(p, 0)\; :\; \mathrm{at}(p, 0) + \mathrm{WIDTH}\,]$$
#
# | argument | what it says |
# |---|---|
# | `half_ptr` | where a layer's keys begin (in a second launch: its values) |
# | `table_ptr` | where the sequence's block table begins |
# | `gathered_ptr` | where the copy begins: a row of `WIDTH` numbers for each position |
# | `length` | $n$, the number of tokens |
# | `block_stride`, `slot_stride` | $s_b$ and $s_s$ |
# | `WIDTH` | numbers in the row of a slot: KV heads times head_dim |
# | `BLOCK_SIZE` | $B$ |
# | `BLOCK_N` | positions in a program's tile |
# | `BLOCK_W` | `WIDTH`, rounded up to a power of two, which `tl.arange` asks for |
#
# `check` runs your kernel in the interpreter, watches every load and store, and says the first
# thing that is wrong.

# %%
task(33, "gather_kernel")

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.gather_kernel
from minigen_course.lab.triton_interpreter import tl


def gather_kernel(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy the row of each of `BLOCK_N` positions from its slot: one program per tile of positions.

    `half_ptr` points to a layer's keys, or to its values. The row of a slot has `WIDTH` elements
    (`BLOCK_W` is the next power of two); the row of slot s in block b starts at `half_ptr` + b *
    `block_stride` + s * `slot_stride`. `table_ptr` lists the blocks of the sequence, whose first
    `length` slots are in use. The row of position p is stored to row p of `gathered_ptr`, which is
    contiguous. Each element of these rows is loaded once, and no other element is loaded.
    """
    raise NotImplementedError  # your turn


# %% [markdown]
# In the engine: while the `with` block runs, every decode step gathers keys and values by your
# kernel, in each of the 30 layers. An answer of two tokens takes one decode step, because the
# prompt's step gives the first token. (Until your kernel passes, `mine` is the course's own.)

# %%
mine = check(33, gather_kernel=gather_kernel)  # your own if it passed, else the course's
with attending(llm, gathering(mine)):
    answer = llm.generate("The sea is", greedy).text
assert answer == expected
print(answer)
reveal(33, gather_kernel=mine)

torch.manual_seed(33)
made = contexts([200], block_size=16, kv_heads=3, head_dim=64)  # one sequence, as in our model
((k, v),) = made.own
required, copy_of_keys = k.nbytes + v.nbytes, torch.empty_like(k)
copying = record_programs(
    lambda: launch_gather(mine, made.keys, made.tables[0], len(k), copy_of_keys),
    keys=made.keys,
    tables=made.tables,
    gathered=copy_of_keys,
)
assert torch.equal(copy_of_keys, k)
copied = {name: 2 * count for name, count in moved_by_tensor(copying).items()}  # values, too
print(f"counted, for 200 tokens: {copied['keys']:,} bytes loaded, {copied['gathered']:,} stored")

# %% [markdown]
# ## The smallest version that works
#
# The context is in one piece now. The smallest kernel that attends to it has a program for each
# query head. It loads its query, all keys and all values of its KV head, and takes one softmax over
# everything. (Chapter 14: `GROUP` query heads share a KV head. `launch`, from chapter 31, makes a
# kernel of the plain function, and runs it in the interpreter.)


# %%
def one_head_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)  # a program for each query head
    shared = head // GROUP  # the KV head that it shares with its neighbours
    tokens, columns = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)  # both axes of the tile
    inside = tokens < length  # the tile is a power of two, and longer than the context
    query = tl.load(q_ptr + head * HEAD_DIM + columns)  # this head's own row
    starts = tokens * KV_HEADS * HEAD_DIM + shared * HEAD_DIM  # where each token's row begins
    at = starts[:, None] + columns[None, :]  # offsets, a row for each token
    keys = tl.load(keys_ptr + at, mask=inside[:, None], other=0.0)
    values = tl.load(values_ptr + at, mask=inside[:, None], other=0.0)
    scores = tl.sum(keys * query[None, :], axis=1) * scale  # one dot product for each token
    scores = tl.where(inside, scores, float("-inf"))  # what is masked must have no weight
    weights = tl.exp2(scores - tl.max(scores, axis=0))  # powers of two; the largest is 1
    answer = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(mixed_ptr + head * HEAD_DIM + columns, answer)  # divided by their sum already


q, mixed = torch.randn(1, 9, 64), torch.empty(1, 9, 64)
in_memory = {"q": q, "keys": k, "values": v, "mixed": mixed}


def run_one_head():
    sizes = {"KV_HEADS": 3, "GROUP": 3, "HEAD_DIM": 64, "BLOCK_N": padded(len(k))}
    launch(one_head_kernel, (9,), *in_memory.values(), len(k), scale_of(64), **sizes)


by_one_head = moved_by_tensor(record_programs(run_one_head, **in_memory))
torch.testing.assert_close(mixed, attention(q, k, v))
print("nine programs, one for each query head: the attention is right")

# %% [markdown]
# Weights are powers of two, as in the package's kernel of chapter 32 (yours took `tl.exp`):
# $e^x = 2^{x \log_2 e}$, and a GPU has an instruction for $2^x$. The factor $\log_2 e = 1.44$ is in
# `scale` already, next to the $1/\sqrt d$ of attention.
#
# ## Why it is slow
#
# The recorder of chapter 31 wrote down what every program loaded. The keys and values of these 200
# tokens are 200 · 3 · 64 numbers of 4 bytes, twice: 307,200 bytes. Nine query heads share three KV
# heads.

# %%
guess_loaded = predict("How many bytes of keys and values did the nine programs load?", None)

# %%
loaded = by_one_head["keys"] + by_one_head["values"]
by_heads = loaded / required
print(f"required {required:,} bytes, asked for {loaded:,}: {by_heads:.2f} times")
guess_loaded.compare(loaded, "bytes")
in_flight = CHIPS["H100 SXM"].processors * 5 * 2 * TILE * 128 * 2  # 660 programs, a tile each
print(f"660 programs with a tile of keys and values each: {in_flight / 1e6:.1f} MB")

# %% [markdown]
# Three query heads look at the same keys, and each of them loads the keys for itself. Is that
# traffic to **memory** (HBM, at the bottom of figure 31.1 in [chapter 31](31_triton.ipynb))? Not all of
# it has to be. The L2 cache, which all processors share, keeps what was loaded lately. It answers a
# repeated load if the data are still there. So what decides is how much other data came through the cache
# *between* the two loads, and not the total size of all keys and values.
#
# Suppose that the three programs of a KV head run at the same time and stay in step. Between the
# first load of a tile and its repetitions, each other running program loads about one tile at
# most. A later section finds that 660 programs of the package's decode kernel fit on an H100 at
# once. Their tiles (64 tokens, keys and values of 128 numbers of 2 bytes: 32,768 bytes each) are
# 21.6 MB, and an H100's L2 has 50 MB. In that case two of three loads may well be answered by L2,
# even if the whole batch has gigabytes of keys.
#
# But no rule keeps the three programs in step. If one of them starts after the others have gone
# through the context, and the context is long, its data may no longer be there. And L2 takes time
# to answer, and has a bandwidth of its own. What we count are the bytes that programs ask for. How
# many of them reach memory is not tested here.
#
# ## Rung one: a group shares its loads
#
# The three query heads of a KV head are its **group** ([grouped-query
# attention](../docs/glossary.md#grouped-query-attention)). Give the program the KV head instead of
# the query head, with the whole group. The program loads the keys once, and multiplies them with
# all queries of the group while they are in its registers or its shared memory.
#
# By hand: two query heads $q_0 = (1, 0)$ and $q_1 = (0, 1)$ share a KV head with keys $k_0 = (2,
# 0)$ and $k_1 = (0, 1)$. Put the queries into a matrix, one row for each head, and the keys into
# another, one row for each token. One product computes all scores:
#
# $$\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} \begin{pmatrix} 2 & 0 \\ 0 & 1 \end{pmatrix}^{\!\top} =
# \begin{pmatrix} 2 & 0 \\ 0 & 1 \end{pmatrix}$$
#
# Row 0 has the scores of head 0, row 1 those of head 1. Two programs would have loaded the four
# numbers of the keys twice. In general, for KV head $h$ with a group of $G$ query heads and $n$
# tokens:
#
# $$S_h = c\, Q_h K_h^\top, \qquad m_h = \mathrm{rowmax}(S_h), \qquad P_h = 2^{S_h - m_h}, \qquad
# l_h = \mathrm{rowsum}(P_h), \qquad O_h = \frac{P_h V_h}{l_h}$$
#
# | symbol | meaning, and shape | in the code |
# |---|---|---|
# | $Q_h$ | the group's queries, $G \times d$ | `q` |
# | $K_h, V_h$ | keys and values of the KV head, $n \times d$ | `keys`, `values` |
# | $c$ | $\log_2 e / \sqrt d$ | `scale` |
# | $S_h, P_h$ | scores and weights before the division, $G \times n$ | `scores`, `weights` |
# | $m_h, l_h$ | the largest score and the sum of weights, one for each row | `tl.max(scores, axis=1)`, `tl.sum(weights, axis=1)` |
# | $O_h$ | the results of the group, $G \times d$ | `mixed` |
#
# (The letters are those of the [FlashAttention-2](https://arxiv.org/abs/2307.08691) paper, whose
# Algorithm 1 calls the undivided weights $\tilde P$. It uses $e^x$ where this chapter uses $2^x$;
# the result is the same.)
#
# Both products are matrix products, so in 16 bits they can run on the **tensor cores** by `tl.dot`
# (chapter 32). The tensor cores' instruction that we find in the PTX below (`mma.sync`) multiplies
# 16 rows at a time. Newer versions of Triton fill up missing rows by themselves, older ones refuse
# fewer than 16; our kernels pad in plain sight. Three rows are real, and 13 are padding. The
# padding wastes arithmetic, of which decode has plenty, and no loads. The picture shows the shapes
# for our 200 tokens. Read it from left to right: blue is real, pale is padding.

# %%
picture(
    group_products(group=3, length=200, head_dim=64, rows=16, columns=256),
    "What a program of the grouped kernel multiplies (not to scale). Blue: queries, keys and values that "
    "are loaded. Pale: padding, which is masked and never loaded.",
    number="33.2",
)

# %% [markdown]
# ## Your turn: the grouped kernel
#
# The context is still in one piece, and one tile holds it. The picture is your plan: load $Q_h$,
# load $K_h$ and $V_h$, multiply, mask, take weights, multiply, divide, store.
#
# | argument | what it says |
# |---|---|
# | `q_ptr` | queries, [query heads, head_dim]; the rows of a group are neighbours |
# | `keys_ptr`, `values_ptr` | the context in one piece, [tokens, KV heads, head_dim] |
# | `mixed_ptr` | where the results go, shaped as the queries |
# | `length` | $n$, the number of tokens |
# | `scale` | $c$ |
# | `KV_HEADS`, `GROUP`, `HEAD_DIM` | number of KV heads, $G$, $d$ |
# | `BLOCK_G`, `BLOCK_D`, `BLOCK_N` | $G$, $d$ and $n$, rounded up to a power of two of at least 16 |
#
# The check counts the loads: each key, each value and each query once.

# %%
task(33, "grouped_kernel")

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.grouped_kernel
from minigen_course.lab.triton_interpreter import tl


def grouped_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend with a whole group of query heads: one program per KV head (`tl.program_id(0)`).

    `q_ptr` and `mixed_ptr` are [q_heads, `HEAD_DIM`]; `keys_ptr` and `values_ptr` are [`length`,
    `KV_HEADS`, `HEAD_DIM`]; all are contiguous. Query head h uses KV head h // `GROUP`. A score is
    the dot product of query and key times `scale`. `scale` includes log2(e), so weights are powers
    of two. `BLOCK_G`, `BLOCK_D` and `BLOCK_N` are powers of two, at least 16, that hold `GROUP`,
    `HEAD_DIM` and `length`: the whole context is one tile. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, grouped_kernel=grouped_kernel)  # your own if it passed, else the course's
with attending(llm, grouping(mine)):
    assert llm.generate("The sea is", greedy).text == expected
reveal(33, grouped_kernel=mine)

by_group = moved_by_tensor(
    record_programs(lambda: launch_grouped(mine, q[0], k, v, mixed[0]), **in_memory)
)
torch.testing.assert_close(mixed, attention(q, k, v))
loaded = by_group["keys"] + by_group["values"]
print(f"counted, a program for each KV head: {loaded:,} bytes, {loaded / required:.2f} times")

# %% [markdown]
# The repeated loads are gone, whatever L2 does. Two things are left to remove: the copy that the
# context came from, and the tile that grows with the context. A tile of 8,192 tokens does not fit
# into a processor.
#
# ## Rung two: no copy, and tiles of one size
#
# The tiled kernel joins what you have with chapter 32's loop. A program takes the context in tiles
# of `BLOCK_N` tokens. For each tile it finds the slots in the block table, as `gather_kernel` does,
# and loads keys and values from where they are. It keeps the running maximum, sum and mix of the
# online softmax, one of each for every row of the group. For tile $j$, with the tile's scores
# $S^{(j)}$ and values $V^{(j)}$:
#
# $$m^{(j)} = \max\big(m^{(j-1)}, \mathrm{rowmax}\, S^{(j)}\big), \qquad
# P^{(j)} = 2^{S^{(j)} - m^{(j)}}, \qquad
# \alpha = 2^{\,m^{(j-1)} - m^{(j)}}$$
#
# $$l^{(j)} = \alpha\, l^{(j-1)} + \mathrm{rowsum}\, P^{(j)}, \qquad
# \tilde O^{(j)} = \alpha\, \tilde O^{(j-1)} + P^{(j)} V^{(j)}, \qquad
# O = \tilde O^{(\mathrm{last})} \,/\; l^{(\mathrm{last})}$$
#
# | symbol | meaning | in the code | in FlashAttention |
# |---|---|---|---|
# | $m^{(j)}$ | largest score up to tile $j$; before the first tile $-\infty$ | `maximum`; the new one is `higher` | $m$ |
# | $l^{(j)}$ | sum of weights so far, at that maximum; at first 0 | `total` | $\ell$ |
# | $\tilde O^{(j)}$ | sum of values times weights so far, not yet divided; at first 0 | `mixed` | $\tilde O$ (in the second paper) |
# | $\alpha$ | factor by which the older sums shrink | `shrink` | no letter |
# | `BLOCK_N` | tokens of a tile | `BLOCK_N` | $B_c$ |
#
# By hand, for one head, tiles of two tokens, and values of one number: the scores are $(3, 1)$ and
# $(5, 5)$, the values $(10, 20)$ and $(30, 40)$.
#
# - Tile 1: $m = 3$, the weights are $2^0 = 1$ and $2^{-2} = 0.25$, so $l = 1.25$ and $\tilde O = 10
#   + 5 = 15$.
# - Tile 2: $m = 5$, so $\alpha = 2^{3-5} = 0.25$, and both weights are $2^0 = 1$. The sums become
#   $l = 0.25 \cdot 1.25 + 2 = 2.3125$ and $\tilde O = 0.25 \cdot 15 + 70 = 73.75$.
# - The result is $O = 73.75 / 2.3125 = 31.89$.
#
# One thing is new against your kernels of chapter 32: the address of a tile is not known before the
# block's number has arrived. **A load waits for a load.** We come back to that when we speak of time.
#
# What does a program touch? Three sequences of 13, 30 and 22 tokens, blocks of four slots, two KV
# heads. On the left, each row is a block of the pool, each column a slot's key of one KV head.
# Orange is what the chosen program loads, grey is what the other programs load, and white slots
# hold no token: no program may touch them. On the right are the block tables. Choose another program, and
# check one slot by hand. (Split 0: until rung three, a context is a single split.)

# %%
small = contexts([13, 30, 22], block_size=4, kv_heads=2, head_dim=16)
small_q = torch.randn(3, 6, 16)
unsplit_loads = record_decode(small_q, *small[:4]).accesses


def program_at(kv_head, sequence):
    drawn = (small.keys, small.tables[:, :-1], small.lengths)
    return pool_loads(unsplit_loads, *drawn, (kv_head, sequence, 0))


explore(
    program_at,
    "The keys of a layer, one row per block: the slots that one program of the tiled kernel loads, in "
    "orange. Its blocks need not be in order, and the last one is not full.",
    "33.3",
    kv_head=(0, 1, 1, 0),
    sequence=(0, 2, 1, 2),
)

# %% [markdown]
# ## Your turn: the tiled kernel
#
# Start from your grouped kernel. The grid has two axes now: `tl.program_id(0)` is the KV head,
# `tl.program_id(1)` the sequence.
#
# | argument | what it says |
# |---|---|
# | `q_ptr`, `mixed_ptr` | queries and results, [sequences, query heads, head_dim] |
# | `keys_ptr`, `values_ptr` | where the two halves of a layer's pool begin |
# | `tables_ptr`, `table_stride` | the block tables, one row per sequence; entries from one row to the next |
# | `lengths_ptr` | the number of tokens of each sequence |
# | `block_stride`, `slot_stride`, `head_stride` | $s_b$, $s_s$, $s_h$ |
# | `scale` | $c$ |
# | `KV_HEADS`, `GROUP`, `HEAD_DIM`, `BLOCK_SIZE` | the model's sizes, and $B$ |
# | `BLOCK_G`, `BLOCK_D` | $G$ and $d$, rounded up as before |
# | `BLOCK_N` | tokens of a tile; no longer tied to the length |
#
# The check compares contexts that end within a tile and within a block, scores in the hundreds,
# and again counts the loads of queries, keys and values.

# %%
task(33, "tiled_kernel")

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.tiled_kernel
from minigen_course.lab.triton_interpreter import tl


def tiled_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    mixed_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend in place, tile by tile: one program per KV head and sequence (`program_id` 0 and 1).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` and `mixed_ptr` are [sequences, q_heads, `HEAD_DIM`]. Query head h uses
    KV head h // `GROUP`. A program loads tiles of `BLOCK_N` tokens, one after another. `scale`
    includes log2(e), so weights are powers of two. `BLOCK_G` and `BLOCK_D` are powers of two, at
    least 16, that hold `GROUP` and `HEAD_DIM`. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, tiled_kernel=tiled_kernel)  # your own if it passed, else the course's
with attending(llm, tiling(mine)):
    assert llm.generate("The sea is", greedy).text == expected
reveal(33, tiled_kernel=mine)

memory = dict(zip(made._fields[:4], made[:4], strict=True))  # keys, values, tables, lengths
by_tiles = moved_by_tensor(
    record_programs(lambda: launch_tiled(mine, q, *made[:4], mixed), q=q, mixed=mixed, **memory)
)
torch.testing.assert_close(mixed, attention(q, k, v))
table_share = by_tiles["tables"] / required
once_a_block = 8 * 3 * -(-len(k) // 16) / required
print(f"keys and values: {(by_tiles['keys'] + by_tiles['values']) / required:.2f} times")
print(f"table entries, looked up for each position: {table_share:.2%} of that")
print(f"if each block's entry were loaded once: {once_a_block:.2%}")

# %% [markdown]
# Each key and value is loaded once, from its own slot, and nothing is copied. The kernel looks up
# the table for each position, although 16 neighbours have the same entry. If threads of a warp ask
# for one address together, a GPU fetches one sector for them (chapter 31), and L1 or L2 may answer
# when it is asked for again.
#
# ## What the rungs have saved
#
# All in one picture, counted for the same 200 tokens. Each bar is a way to compute the same
# attention. Its length is what programs load and store, without queries, lengths and results, in
# multiples of the keys and values (the dashed line). The last bar already shows the third rung,
# with the context in four splits, whose partial results (**parts**) are written once, and read
# once.

# %%
four = record_decode(q, *made[:4], splits=4)
torch.testing.assert_close(four.mixed, attention(q, k, v))
by_splits = moved_by_tensor(four.accesses)
copy_first = {
    "from the pool": copied["keys"],
    "block tables": copied["tables"],
    "copy written": copied["gathered"],
}
ways = {
    "copied, program per query head": {
        **copy_first,
        "copy read": by_one_head["keys"] + by_one_head["values"],
    },
    "copied, program per KV head": {
        **copy_first,
        "copy read": by_group["keys"] + by_group["values"],
    },
    "in place, program per KV head": {
        "from the pool": by_tiles["keys"] + by_tiles["values"],
        "block tables": by_tiles["tables"],
    },
    "in place, four splits": {
        "from the pool": by_splits["keys"] + by_splits["values"],
        "block tables": by_splits["tables"],
        "parts written and read": 2 * sum(by_splits[name] for name in four.parts._fields),
    },
}
picture(
    bytes_bars(ways, required),
    "Counted: bytes that programs ask for, as multiples of the keys and values. Grouping removes two "
    "of three reads of the copy, tiling removes the copy, splitting adds a little for the parts.",
    number="33.4",
)
total_bytes = {name: sum(moved.values()) for name, moved in ways.items()}
for name, moved in total_bytes.items():
    print(f"{name:>31}: {moved:>9,} bytes, {moved / required:.2f} times")

# %% [markdown]
# From here on no bar gets shorter. What is left is time.
#
# ## How fast can it be?
#
# For each token and KV head, a program computes $G$ scores of $d$ multiplications and $d$
# additions, and a mix of the same size: $4 G d$ [operations](../docs/glossary.md#flop). It loads a
# key and a value of $d$ numbers of 2 bytes each: $4 d$ bytes. The quotient is the [arithmetic
# intensity](../docs/glossary.md#arithmetic-intensity):
#
# $$\frac{4\,G\,d \ \text{operations}}{4\,d \ \text{bytes}} = G \ \text{operations per byte}$$
#
# By hand: Llama-3-8B has $G = 4$ and $d = 128$. That is 2,048 operations for 512 bytes, 4 for each
# byte. An H100 can do 295 operations for each byte that it loads (its ridge, chapter 17). So
# memory bandwidth decides, and a batch does not change that: each sequence has keys of its own
# (unless sequences share a prompt, chapter 23). The least time of a step's attention is
#
# $$t_{\min} = \frac{\text{bytes of keys and values}}{\beta}, \qquad \beta = \text{bandwidth}$$

# %%
crowd = Decoding(batch=64, context=4096)  # Llama-3-8B: 8 KV heads, groups of 4, head_dim 128
h100 = MACHINES["H100 SXM"]
floor = crowd.kv_bytes / h100.bandwidth
print(f"operations per byte: {crowd.group}; an H100's ridge: {h100.ridge:.0f}")
print(f"64 sequences of 4,096 tokens: {crowd.kv_bytes / 1e9:.2f} GB of keys and values in a layer")
print(f"at least {1e3 * floor:.2f} ms per layer, {32e3 * floor:.1f} ms in 32 layers")
weights = 2 * num_parameters(config_of("Llama-3-8B"))
print(f"and the weights, {weights / 1e9:.0f} GB: {1e3 * weights / h100.bandwidth:.1f} ms")

# %% [markdown]
# By these floors, reading these 64 contexts takes longer than reading all the weights. A technique
# on the KV cache can save capacity, bandwidth or both. Blocks (chapters 21 and 22) saved capacity.
# This chapter is about bandwidth alone: no key takes less room than before.
#
# The time is a floor, from a data sheet. A kernel comes near it only if enough of the data is on
# its way at any time.
#
# ## Enough loads in flight
#
# Memory answers late. The first byte of a load that misses the caches comes after a **latency** of
# several hundred clock cycles. Round figures for an H100 differ: 400 cycles in [table
# 3](https://pmc.ncbi.nlm.nih.gov/articles/PMC10448217/table/t0015) of a paper of 2023 (and the
# same for a V100 and an A100), 400 to 800 in [these
# notes](https://the-dsvolk.github.io/ai-perf/ai-infra/memory_request_life.html). At a clock of
# 1,755 MHz that is 0.23 to 0.46 µs. On a busy chip requests also wait for each other, so a load
# can take longer. If a program asked for 32 KB, waited, and asked again, it would get at most 32
# KB for each latency, however wide the memory is.
#
# **[Little's law](https://doi.org/10.1287/opre.9.3.383)** says how much must be on its way. Take
# any queue that does not keep growing. On average, what is inside is the rate of arrivals times
# the time that each stays. Here:
#
# $$\text{bytes in flight} = \beta \cdot \tau$$
#
# | symbol | meaning | for an H100 |
# |---|---|---|
# | $\beta$ | bandwidth, the rate that we want | 3,350 GB/s |
# | $\tau$ | latency, from the request to the data | 0.23 to 0.46 µs; more under load |
#
# By hand: $3350 \cdot 10^9 \cdot 0.23 \cdot 10^{-6} = 0.77$ MB. How many programs is that? A
# program of the package's kernel loads tiles of 64 tokens: keys and values of 64 · 128 numbers of 2
# bytes are 32,768 bytes. Let each program have one tile on its way. The cell does the division, for
# both latencies and for a whole microsecond.

# %%
tile_bytes = 2 * TILE * 128 * 2  # keys and values
for latency in (0.23e-6, 0.46e-6, 1e-6):
    needed = h100.bandwidth * latency
    reached = busy * tile_bytes / latency
    print(
        f"{1e6 * latency:g} µs: {needed / 1e6:.2f} MB in flight, {needed / tile_bytes:.0f} tiles;",
        end=" ",
    )
    print(f"{busy} programs reach at most {reached / 1e9:,.0f} GB/s,", end=" ")
    print(f"{reached / h100.bandwidth:.0%} of the bandwidth")

# %% [markdown]
# That explains why the second number hurts. Eight programs with a tile each cannot use the whole
# bandwidth, even if no processor had anything to compute. The remedy is more programs, and up to a
# point more bytes in flight for each program. (One processor's own path to L2 carries some 64
# bytes per clock, and all together get fewer each, so eight of them cannot fill the memory in any
# case; the model below leaves this out.) The package's kernel has room for one tile of keys and
# values, and asks for the next when both products of this one are done. Other programs on its
# processor load meanwhile.
#
# (Of the two kernels below, `paged_decode_kernel` is the first pass of rung three, and
# `join_splits_kernel` the second.) How many programs fit onto one SM at the same time (and so its
# **occupancy**, chapter 31) follows from the machine code, because the programs share 65,536 registers
# and some shared memory. No GPU is needed to compile for one: here for an A100 (`sm_80`), for an RTX 4090
# or an L4 (`sm_89`), and for an H100 or an H200 (`sm_90`). A program has 128 threads.

# %%
codes = {(each.chip, each.kernel): each for each in decode_code(["sm_80", "sm_89", "sm_90"], [128])}
resident = {}
for name, each in CHIPS.items():
    code = codes[each.code, "paged_decode_kernel"]
    resident[name] = each.resident(code.registers, code.shared)
for (target, kernel), code in codes.items():
    sizes = f"{code.registers} registers per thread, {code.spilled} spilled"
    print(f"{target} {kernel:>20}: {sizes}, {code.shared:,} bytes shared")
of_sm_90 = codes["sm_90", "paged_decode_kernel"].instructions
print("\nin the PTX of the first pass, for sm_90:")
for kind in sorted(of_sm_90):
    print(f"{kind:>10}: {of_sm_90[kind]}")
for name, count in resident.items():
    print(f"{name:>15}: {count} programs fit onto one of {CHIPS[name].processors} processors")

# %% [markdown]
# By hand, for the H100: 96 registers times 128 threads are 12,288, and 65,536 / 12,288 = 5.3, so
# five programs fit. (Its 228 KB of shared memory hold five, too: each program takes 38 KB (of 1,024
# bytes): 32 for a tile of keys and values, 4 for queries (16 × 128), 2 for weights (16 × 64). With
# 1 KB for the system that is 39.) In the PTX, `cp.async` are **asynchronous** loads, from memory
# into shared memory: all of a tile is on its way at once, and takes no registers. A tile is 32,768
# bytes, and 128 threads load 16 bytes each at a time, so 16 of the 32 are for the first tile, and
# 16 in the loop. (In the order of the PTX, which the counts do not show, they come after the loop's
# 32 products, `mma.sync`.) The launch asks for them by `num_stages=2`: two stages of the loop,
# loading a tile and computing with it, for which Triton here makes room for one tile; other
# programs on the processor fill the wait. `ld.global` load into registers: the block table's
# entries, the query, and the length.
#
# ## Waves, and their tail
#
# What does not fit waits. The programs that run together are a **wave**, and a GPU with $M$
# processors that hold $r$ programs each runs $P$ programs in
#
# $$W = \Big\lceil \frac{P}{M\,r} \Big\rceil \ \text{waves}, \qquad \text{filled to } \frac{P}{W\,M\,r}$$
#
# The last wave is the **tail**: it takes as long as its programs take, even if there are few of
# them. The source of
# [FlashAttention](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp)
# gives an example with $r = 1$: 48 programs on the 108 processors of an A100. In two splits they
# are 96 programs, one wave, filled to 96/108 = 0.89. In three splits they are 144, two waves,
# filled to 144/216 = 0.67. More splits are not always better.
#
# (A real chip does not wait for a whole wave: a processor takes the next program when one of its
# own ends. If all programs take equally long, that is the same.)
#
# Now an H100, with five programs on each of 132 processors: 660 places. A batch of 84 sequences has
# 84 · 8 = 672 programs.

# %%
guess_tail = predict(
    "84 sequences, 672 programs, 660 places: processors at work in the tail?", None
)

# %% [markdown]
# The times of the next picture come from a **model** with two assumed constants. A program takes at
# least 1 µs for a tile of 64 tokens, however idle the chip is: it waits for the table's entry, then
# for the keys, and computes. The second pass, to which we come, costs 3 µs to start, and its parts
# are written and read at the memory's full rate, so it grows with the number of splits. All
# programs together read no faster than the memory gives. So a wave takes the longer of two times:
# that of a program's tiles, and that of the wave's bytes at the full bandwidth. Waves follow each
# other. No GPU has confirmed either constant here.
#
# On the left, each row is a processor, and blue means that it works. (Waves alternate between two blues;
# within each, darker is more programs at once.) At the right edge of that panel is the tail. On the right
# are the times for each number of splits, with the chosen one in orange. The dashed line is what the
# memory alone would take. Choose a batch of 82, and the tail is gone.

# %%
print(f"assumed: {1e6 * TILE_SECONDS:g} µs for a tile of {TILE} tokens", end=", ")
print(f"{1e6 * LAUNCH_SECONDS:g} µs to start the second pass")


def chip_at(batch, context, splits, chip):
    return fill_chip(Decoding(batch, context), CHIPS[chip], splits, resident[chip])


explore(
    chip_at,
    "Modelled, not measured. Left: which processors work, and how long; the second wave, the tail, is at "
    "its right edge. Right: the time for each number of splits.",
    "33.5",
    batch=[84, 1, 2, 4, 8, 16, 64, 82, 256],
    context=[4096, 16_384, 32_768, 131_072],
    splits=[1, 2, 4, 8, 16, 32, 64],
    chip=list(CHIPS),
)
places = chip.processors * resident["H100 SXM"]
in_tail = 84 * 8 - places
fit = resident["H100 SXM"]
full, fuller = Decoding(82, 4096), Decoding(84, 4096)
without, whole = (1e6 * seconds(each, chip, 1, fit) for each in (full, fuller))
print(f"modelled: 82 sequences take {without:.0f} µs, 84 take {whole:.0f} µs", end=", ")
print(f"{whole / without - 1:.0%} more")
finer = best_splits(fuller, chip, fit)
print(f"84 sequences in {finer} splits: {1e6 * seconds(fuller, chip, finer, fit):.0f} µs")
guess_tail.compare(min(in_tail, chip.processors))

# %% [markdown]
# By hand: the first 660 programs read 660 · 64 tiles of 32,768 bytes, 1.38 GB, which memory gives in 413
# µs. The other 12 have memory for themselves, but 64 tiles of 1 µs each: 64 µs. Together 477 µs. Two
# sequences more are 2.4 % more work, and 16 % more time, by the model. Splits help even here: the
# programs are shorter, so a last wave that is nearly empty is shorter, too. The opposite case is the lone
# chat: a single wave, and nearly all of it empty.
#
# ## Rung three: splits, and how they merge
#
# Cut the context into $N$ splits, with a program for each: eight KV heads in 32 splits are 256
# programs. But none of them has seen the whole context, so none can divide by the sum of all
# weights. Each one leaves three things for every row of its group: its maximum $m_s$, its sum
# $l_s$, and its undivided mix $\tilde O_s$. A second, small kernel brings them to one maximum and
# divides:
#
# $$m = \max_s m_s, \qquad
# O = \frac{\sum_s 2^{\,m_s - m}\; \tilde O_s}{\sum_s 2^{\,m_s - m}\; l_s}$$
#
# By hand, with the four tokens of above as two splits. Split A, scores $(3, 1)$: $m_A = 3$, $l_A =
# 1.25$, $\tilde O_A = 15$. Split B, scores $(5, 5)$: $m_B = 5$, $l_B = 2$, $\tilde O_B = 70$. The
# largest maximum is 5, so A shrinks by $2^{3-5} = 0.25$ and B by 1. The sums are $0.3125 + 2 =
# 2.3125$, the mixes $3.75 + 70 = 73.75$, and the result is 31.89, as before. Up to rounding, the
# order does not matter, so all splits can run at the same time.
#
# Left in the picture: the four scores, and each split's maximum (dashed). Middle: the parts as the
# splits leave them. Right: the same parts at the largest maximum, on top of each other. (The blue is 14 % of the
# sum, 5 % of the mix.)

# %%
scores, values = torch.tensor([3.0, 1.0, 5.0, 5.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
picture(
    split_merge(scores, values, [(0, 2), (2, 4)]),
    "Two splits of four tokens, merged. The blue split loses most of its weight, because its maximum is "
    "lower by 2, which is a factor of 4.",
    number="33.6",
)
powers = torch.exp2(scores)
print(f"softmax over all four at once: {float(powers @ values / powers.sum()):.2f}")

# %% [markdown]
# [Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html) keeps the same in two
# pieces instead of three: the divided result $O_s = \tilde O_s / l_s$, and the **log-sum-exp**
# $L_s = m_s + \log_2 l_s$. (Its logarithm is the natural one.) Because $2^{L_s} = 2^{m_s} l_s$,
# the merge becomes a softmax over splits:
#
# $$O = \sum_s 2^{\,L_s - L}\, O_s, \qquad L = \log_2 \sum_s 2^{L_s}$$
#
# With the numbers of above: $L_A = 3 + \log_2 1.25 = 3.32$, $L_B = 5 + 1 = 6$, $L = 6.21$; the
# divided results are 15 / 1.25 = 12 and 70 / 2 = 35, the weights of the splits 0.135 and 0.865,
# and $0.135 \cdot 12 + 0.865 \cdot 35 \approx 31.89$.
#
# | symbol | meaning | in the code | in Flash-Decoding |
# |---|---|---|---|
# | $N$ | number of splits | `SPLITS` | number of splits |
# | $m_s$ | largest score of split $s$ | `maxima_ptr[row, s]` | inside the log-sum-exp |
# | $l_s$ | its sum of weights, at $m_s$ | `sums_ptr[row, s]` | inside the log-sum-exp |
# | $\tilde O_s$ | its undivided mix | `parts_ptr[row, s]` | divided: the split's output |
#
# A split without tokens has $m_s = -\infty$ and zeros, and counts $2^{-\infty} = 0$.
#
# ## Your turn: the second pass
#
# First the merge, because the split kernel needs it. One program for each row, that is, for each
# query head of each sequence:
#
# | argument | what it says |
# |---|---|
# | `parts_ptr` | $\tilde O_s$ of each row and split, [rows, `SPLITS`, `HEAD_DIM`] |
# | `maxima_ptr`, `sums_ptr` | $m_s$ and $l_s$, [rows, `SPLITS`] |
# | `mixed_ptr` | where the results go, [rows, `HEAD_DIM`] |
# | `HEAD_DIM`, `SPLITS` | $d$ and $N$ |
# | `BLOCK_D`, `BLOCK_S` | both, rounded up to a power of two |

# %%
task(33, "join_kernel")

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.join_kernel
from minigen_course.lab.triton_interpreter import tl


def join_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one row: one program per row, that is, per query head of a sequence.

    Split s of row r has the largest score `maxima_ptr`[r, s]; weights are powers of two.
    `sums_ptr`[r, s] is the sum of its weights 2^(score - maximum), and `parts_ptr`[r, s]
    (`HEAD_DIM` elements) the sum of the values times these weights. A split without tokens has the
    maximum -inf, and zeros. The row's attention over all splits is stored to `mixed_ptr`[r].
    `BLOCK_S` and `BLOCK_D` are the next powers of two of `SPLITS` and `HEAD_DIM`. All tensors are
    contiguous. Each element is loaded once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, join_kernel=join_kernel)  # your own if it passed, else the course's
with attending(llm, joining(mine)):
    assert llm.generate("The sea is", greedy).text == expected
reveal(33, join_kernel=mine)

# %% [markdown]
# ## Your turn: the split kernel
#
# The first pass is your tiled kernel with two changes: where the loop begins and ends, and what is
# stored. A context of $n$ tokens has $\lceil n / \texttt{BLOCK\_N} \rceil$ tiles, and each split
# gets at most
#
# $$k = \left\lceil \frac{\lceil n / \texttt{BLOCK\_N} \rceil}{N} \right\rceil \text{ tiles, from tile } s
# \cdot k \text{ on.}$$
#
# By hand: 200 tokens in tiles of 16 are 13 tiles (the last has 8 tokens). In four splits each gets
# at most $\lceil 13/4 \rceil = 4$: tiles 0 to 3, 4 to 7, 8 to 11, and 12 alone. In eight splits
# each gets at most 2, so seven splits are enough and the eighth has none. Its loop runs zero
# times. In a kernel, `tl.cdiv(a, b)` is a / b rounded up. (Python's `-(-a // b)` is not: Triton's
# `//` cuts towards zero.)
#
# | argument | what it says |
# |---|---|
# | `q_ptr`, `keys_ptr`, `values_ptr`, `tables_ptr`, `lengths_ptr` | as in the tiled kernel |
# | `parts_ptr`, `maxima_ptr`, `sums_ptr` | where $\tilde O_s$, $m_s$ and $l_s$ go; shapes as in `join_kernel` |
# | `block_stride`, `slot_stride`, `head_stride`, `table_stride`, `scale` | as in the tiled kernel |
# | `KV_HEADS`, `GROUP`, `HEAD_DIM`, `BLOCK_SIZE` | as in the tiled kernel |
# | `SPLITS` | $N$; `tl.program_id(2)` is $s$ |
# | `BLOCK_G`, `BLOCK_D`, `BLOCK_N` | as in the tiled kernel |
#
# (Any other cut passes as well, as long as each tile is loaded by one split.)

# %%
task(33, "decode_kernel")

# %%
# exercise: minigen_course.ch33_paged_attention.kernels.decode_kernel
from minigen_course.lab.triton_interpreter import tl


def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head, sequence and split of its context (`tl.program_id` 0, 1 and 2).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` is [sequences, q_heads, `HEAD_DIM`]. Query head h uses KV head h //
    `GROUP`; the `GROUP` query heads of a KV head share its loads.

    A score is the dot product of query and key times `scale`. `scale` includes log2(e), so weights
    are powers of two. The `SPLITS` programs divide the context's tiles of `BLOCK_N` tokens; each
    tile is loaded by one of them. They store what `join_kernel` joins: `parts_ptr` [sequences,
    q_heads, `SPLITS`, `HEAD_DIM`], `maxima_ptr` and `sums_ptr` [sequences, q_heads, `SPLITS`]; -inf
    and zeros if a program has no tokens. `BLOCK_G` and `BLOCK_D` are powers of two, at least 16,
    that hold `GROUP` and `HEAD_DIM`.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(33, decode_kernel=decode_kernel)  # your own if it passed, else the course's
with attending(llm, decoding(mine, splits=2)):
    assert llm.generate("The sea is", greedy).text == expected
reveal(33, decode_kernel=mine)
with interpreted():
    in_place = paged_decode_triton(q, *made[:4], splits=4)  # the engine's kernels
torch.testing.assert_close(four.mixed, in_place, atol=1e-5, rtol=1e-4)

# %% [markdown]
# The engine's own kernels, `paged_decode_kernel` and `join_splits_kernel`, are in
# [decode_attention.py](../minigen/kernels/triton/decode_attention.py). They have sliding windows
# besides, and they skip the second pass where there is one split. (The exercise's kernels always make
# parts, so the next cell counts some for one split, too.)
#
# What does a split cost? The next cell counts, for contexts of 200, 70 and 1 tokens. Below it is
# the picture of rung two once more, with every context in two splits, in tiles of 16 tokens.
# Sequence 2 has 22 tokens: one tile of 16 for split 0, and one of 6 for split 1. Before you run the
# cell: which blocks does split 1 load? (Its table is in figure 33.3.)

# %%
several = contexts([200, 70, 1], block_size=16, kv_heads=3, head_dim=64)
several_q = torch.randn(3, 9, 64)
alone = [attention(one[None], *own) for one, own in zip(several_q, several.own, strict=True)]
kv_bytes = sum(half.nbytes for own in several.own for half in own)
for splits in (1, 2, 4, 8):
    found = record_decode(several_q, *several[:4], splits)
    torch.testing.assert_close(found.mixed, torch.cat(alone), atol=1e-5, rtol=1e-4)
    moved = moved_by_tensor(found.accesses)
    share = (moved["keys"] + moved["values"]) / kv_bytes
    empty = int((found.parts.sums == 0).sum()) // 3  # three query heads share a program
    written = sum(moved[name] for name in found.parts._fields)
    print(
        f"splits {splits}: keys and values {share:.2f} times, parts {written:>6,} bytes", end=", "
    )
    print(f"{empty:>2} of {9 * splits} programs have nothing to do")
split_loads = record_decode(small_q, *small[:4], splits=2).accesses


def split_at(kv_head, sequence, split):
    drawn = (small.keys, small.tables[:, :-1], small.lengths)
    return pool_loads(split_loads, *drawn, (kv_head, sequence, split))


explore(
    split_at,
    "The same pool as in figure 33.3, with each context in two splits: the slots of one program, in orange.",
    "33.7",
    kv_head=(0, 1, 1, 0),
    sequence=(0, 2, 1, 2),
    split=(0, 1, 1, 1),
)

# %% [markdown]
# The results are the same up to rounding, and no key is read twice. What grows are the parts (and
# the loads of queries and lengths, which are not counted here): in float32, $d + 2$ numbers for
# each query head of each sequence and for each split, written by the first pass and read by the
# second. Short sequences of a batch leave programs without work.
#
# ## How many splits?
#
# Little's law answers that, with $t$, a tile's whole time, as the latency. Let $P$ be the programs
# without splits. Each of the $P \cdot N$ programs gets a tile of $b$ bytes in every $t$ seconds.
# In the model, memory is busy all the time as soon as
#
# $$P \cdot N \cdot b \;\ge\; \beta \cdot t \qquad\Longrightarrow\qquad N \ge \frac{\beta\, t}{P\, b}$$
#
# By hand, for the lone chat: $P = 8$ programs, $b = 32{,}768$ bytes, $t = 1$ µs. $\beta t = 3.35$
# MB, so $N \ge 3{,}350{,}000 / 262{,}144 = 12.8$; the next power of two is 16. (We try powers of
# two only: `SPLITS` is a constant, so each number is compiled by itself.) The length of the
# context is not in the formula. The formula asks that all $P \cdot N$ programs fit on the chip at
# the same time, and that all splits have the same number of tiles. More splits than that buy
# nothing in the model, and their parts cost a little.
#
# But $t$ is assumed. If a tile took half as long, would the best number of splits grow or fall?

# %%
guess_best = predict(
    "A tile takes half as long: does the best number of splits grow or fall?", None
)

# %% [markdown]
# Drag the two constants. On the left, each bar is the modelled time for a number of splits, the
# best one in orange; the dashed line is the memory alone. On the right, the orange line is the
# best number of splits for every time of a tile, and the dot is where the sliders stand. The other
# lines assume another start of the second pass.


# %%
def best_at(tile_us, launch_us, batch, context):
    times = Assumed(1e-6 * tile_us, 1e-6 * launch_us)
    return best_split_curves(Decoding(batch, context), chip, fit, times)


explore(
    best_at,
    "Modelled for an H100, not measured. Left: the time by number of splits. Right: the best number of "
    "splits, by the assumed time of a tile.",
    "33.8",
    tile_us=(0.1, 4.0, 0.1, 1.0),
    launch_us=(1.0, 12.0, 1.0, 3.0),
    batch=[1, 2, 4, 16],
    context=[32_768, 4096, 131_072],
)
print("one sequence of 32,768 tokens, by assumption:")
split_gains, bests = [], {}
for tile_us in (0.25, 0.5, 1.0, 2.0):
    for launch_us in (1.0, 12.0):
        times = Assumed(1e-6 * tile_us, 1e-6 * launch_us)
        best = best_splits(one_long, chip, fit, times)
        whole, cut = (seconds(one_long, chip, each, fit, times) for each in (1, best))
        bests[tile_us, launch_us] = best
        split_gains.append(whole / cut)
        print(f"{tile_us:>5} µs for a tile, {launch_us:>4} µs to start: best {best:>2}", end=", ")
        print(f"{whole / cut:>4.1f} times as fast as unsplit")
change = bests[0.5, 1.0] - bests[1.0, 1.0]
guess_best.compare("grow" if change > 0 else "fall" if change < 0 else "stay")

# %% [markdown]
# With faster tiles each program brings more bytes per second, so fewer programs fill the memory.
# The time of a tile sets the best number, as the formula says. The start of the second pass is the
# same cost for every number above one, so it only decides whether to split at all. That splitting
# a lone long context helps holds for all constants printed above. (At 64 bytes per clock, a tile
# takes 32,768 / 64 = 512 clocks or 0.29 µs, so 0.25 µs is a little too fast.) It does not hold for
# these 32,768 tokens in the figure's corner of 0.1 and 12 µs, where one program per KV head
# reaches 78 % of the bandwidth; no processor of an H100 loads that fast. **How much** splitting
# helps depends on the constants: the gains above are 2.5 to 24.7 times. A measurement on the chip
# has to say it.
#
# The engine does not know $t$. It has a rule, `num_splits`: the largest power of two, up to 64,
# that gives at most four programs for each processor and, of the longest context, 128 tokens or
# more for each split on average (1 if there is none). (For a decode step that is captured as a
# [CUDA graph](../docs/glossary.md#cuda-graph), the engine takes the longest context that the block
# tables have room for.) Beside it, what the model finds best with 1 µs and 3 µs:

# %%
show(num_splits)
print("modelled: batch  context   rule  model's best   lost by the rule against the best")
for batch in (1, 4, 16, 64, 256):
    for context in (1024, 8192, 32_768):
        work = Decoding(batch, context)
        rule = num_splits(work.num_programs(1), context, chip.processors)
        best = best_splits(work, chip, fit)
        lost = seconds(work, chip, rule, fit) / seconds(work, chip, best, fit) - 1
        print(f"{batch:>15} {context:>8,} {rule:>6} {best:>13} {lost:>24.0%}")

# %% [markdown]
# The rule often asks for more splits than the model needs. Where contexts are long that costs
# little: parts and start are small beside the keys and values. Where contexts are short, the start
# of the second pass is a good part of the whole. For sixteen sequences of 1,024 tokens the model
# would not split at all, and the rule does. For one such sequence the model wants splits of a
# single tile, and the rule forbids them. But in these two cases attention is a small part of a
# step, which reads all weights as well.
#
# ## The measurement again
#
# The first number was a time. The interpreter's time says nothing about a GPU, so bytes are
# compared, **counted**: the copy is gone.

# %%
first, last = "copied, program per KV head", "in place, program per KV head"
saved = total_bytes[first] / total_bytes[last]
print(f"bytes, with the copy against in place: {saved:.1f} times as many")
by_rule = num_splits(busy, 32_768, chip.processors)  # what the engine chooses
at_once = one_long.num_programs(by_rule)
print(f"one sequence of 32,768 tokens: {busy} programs unsplit", end=", ")
print(f"{at_once} in {by_rule} splits", end=", ")
print(f"for {chip.processors} processors: {busy / chip.processors:.0%} and", end=" ")
print(f"{min(at_once, chip.processors) / chip.processors:.0%} of them work")
with interpreted(), attending(llm, attend_triton):
    assert llm.generate("The sea is", greedy).text == expected
print("\nthe engine with its own kernels, interpreted, gives the same text:", repr(expected))

# %% [markdown]
# **Counted**, the second number: the programs. How much faster that makes a chip is **modelled**,
# and depends on what was assumed; it stands among the claims, as not tested.
# (`LLM.load(device="cuda")` chooses the engine's kernels by itself. Where you have a GPU, `make
# bench-gpu` measures the copy bandwidth of the card and which share of it paged decode reaches.)
#
# ## Claims
#
# What papers say and what one often hears, beside what this notebook found. The outcomes are
# computed.

# %% jupyter={"source_hidden": true}
by_kv_head = (by_group["keys"] + by_group["values"]) / required
parts_share = one_long.part_bytes(by_rule) / one_long.kv_bytes
verdicts(
    "33",
    Claim(
        "Query heads that share a KV head divide the reads of the cache by the size of the group",
        f"asked for: {by_heads:.0f} times the keys and values by a program for each query head, "
        f"{by_kv_head:.0f} time by a program for each KV head, in groups of 3",
        within(by_heads / by_kv_head, 2.9, 3.1),
        "if the kernel gives a program the whole group; the layout alone shares nothing, except what a "
        "cache answers",
        "[Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)",
    ),
    Claim(
        "Reading through a block table costs a good part of the bandwidth",
        f"{table_share:.1%} of the bytes of keys and values in float32, looked up for each position; "
        f"{once_a_block:.1%}, if once for each block",
        holds(table_share >= 0.1),
        "a block's entry is 8 bytes beside thousands; what was slow was the copy. The wait for the entry "
        "costs time, which bytes do not show: Kwon et al. 2023 (section 7.1) measured 20 to 26 % "
        "more time for their whole paged kernel than for that of FasterTransformer, an older library without pages",
    ),
    Claim(
        "More splits cost much traffic, because their parts are written and read again",
        f"{parts_share:.1%} of the keys and values, for 32,768 tokens in {by_rule} splits",
        holds(parts_share >= 0.1),
        "a part is head_dim + 2 numbers for each query head, however long its split is; with short "
        "contexts in many splits the share grows, and FlashAttention's source avoids too many",
    ),
    Claim(
        "Splitting the context makes decoding up to 8 times as fast for very long sequences",
        f"modelled for 32,768 tokens alone on an H100: {min(split_gains):.1f} to "
        f"{max(split_gains):.1f} times for attention alone, by what is assumed",
        NOT_TESTED,
        "the 8 is for whole steps (the source has up to 50 for attention alone). Without splits, "
        "a lone sequence leaves most processors idle; how much that costs depends on "
        "the chip, and no GPU ran here",
        "[Dao et al. 2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)",
    ),
)

# %% [markdown]
# ## Summary
#
# - A kernel finds a token's key by itself: the table's entry gives the block, the remainder gives
#   the slot, and strides turn both into an offset. No copy is needed.
# - A program for each KV head loads each key once, and multiplies it with the queries of the whole
#   group. A program for each query head asks for it again and again, and hopes that the L2 cache
#   still has it.
# - Whether L2 still has it depends on what was loaded in between, not on the size of the whole
#   cache of keys.
# - With keys and values of 16 bits, decode attention does as many operations per byte as a group
#   has heads. Where these are few, memory bandwidth sets its floor.
# - Bandwidth is reached only if enough bytes are on their way: bandwidth times latency, by Little's
#   law.
# - Programs run in waves, and the last one, the tail, can leave most of the chip idle.
# - A long context is split among programs. Each split leaves maximum, sum and undivided mix, and a
#   second pass merges them, exactly up to rounding.
# - The best number of splits depends on the time of a tile. Here that time is assumed, so the
#   chapter claims no speed.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. Blocks of 16 slots, block table (7, 2, 9), slots 128 numbers apart. Which block
# and which slot hold position 37, and where does its key begin (KV head 0)?</summary> Entry 37 //
# 16 = 2, so block 9; slot 37 % 16 = 5. A block is 16 · 128 = 2,048 numbers, so the key
# begins at 9 · 2,048 + 5 · 128 = 19,072.</details>
#
# <details><summary>2. One split has maximum 4, sum 2 and mix 6; another has maximum 2, sum 4 and mix
# 20. What is the result?</summary> The largest maximum is 4. The second split shrinks by 2 to the
# power of -2, which is 0.25: sum 1 and
# mix 5. Together they have sum 3 and mix 11, so the result is 11 / 3 = 3.67.</details>
#
# <details><summary>3. A card has 1,000 GB/s and a latency of 0.5 µs. Each program keeps 16,000 bytes
# on their way. How many programs does it take to use the whole bandwidth, and what do 8 programs
# reach?</summary> 1,000 GB/s times 0.5 µs are 500,000 bytes. Divided by 16,000 that is 31.25, so it
# takes 32 programs.
# Eight programs have 128,000 bytes on their way, which is 256 GB/s.</details>
#
# ## What the production engines do beyond this
#
# At the time of writing:
#
# - **vLLM** began with [a CUDA
#   kernel](https://github.com/vllm-project/vllm/blob/0e60ae8f4d33113973e7db07ae0b9a74c2dd0c79/csrc/attention/paged_attention_v2.cu)
#   of this kind ([PagedAttention](https://arxiv.org/abs/2309.06180)). The linked second version has
#   a program for each *query* head, each sequence, and each partition of 512 tokens: it splits the
#   context, but does not group the heads. Today vLLM has [many attention
#   backends](https://docs.vllm.ai/en/latest/api/vllm/v1/attention/backends/), among them
#   FlashAttention, FlashInfer and one written [in Triton
#   alone](https://github.com/vllm-project/vllm/blob/main/vllm/v1/attention/ops/triton_unified_attention.py),
#   which has a form that splits long contexts into segments and a kernel that reduces them.
# - **[FlashAttention](https://github.com/Dao-AILab/flash-attention)** has the split, and takes a
#   block table. Unless the programs nearly fill the chip already, its second version computes how
#   well each number of splits fills the waves, and takes the smallest one that reaches 85 % of the
#   best.
# - **[FlashInfer](https://arxiv.org/abs/2501.01005)** plans ahead: before a step, the CPU cuts
#   long contexts of the batch into parts, so that one long sequence does not delay the short ones.
#   Where many requests begin with the same prompt, its
#   [cascade](https://docs.flashinfer.ai/api/cascade.html) attends to that part once for all of
#   them, and merges by log-sum-exp.
# - **SGLang** lists [its backends](https://docs.sglang.io/advanced_features/attention_backend.html)
#   in a table. Its Triton backend decodes in two stages, as this chapter does, with a form for
#   grouped heads.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/advanced/gpt-attention.html)** has
#   kernels for grouped heads in decoding (XQA), and a multi-block mode, which is the split.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/tree/master/ggml/src/ggml-cuda)** can run
#   several thread blocks over one context in its CUDA kernels, and combines their results
#   afterwards.
# - Keys and values of 8 bits about halve what must be read; most of these engines offer them.
#
# ## Further reading
#
# - [Flash-Decoding for long-context
#   inference](https://crfm.stanford.edu/2023/10/12/flashdecoding.html), Dao, Haziza, Massa and
#   Sizov 2023: the split, with an animation.
# - [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), Kwon et al. 2023: why blocks, and attention
#   that reads them in place.
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023: the letters of rungs one and
#   two.
# - [FlashInfer](https://arxiv.org/abs/2501.01005), Ye et al. 2025: block tables as sparse matrices,
#   and the scheduler of parts.
# - [Benchmarking and Dissecting the Nvidia Hopper GPU
#   Architecture](https://arxiv.org/abs/2402.13499), Luo et al. 2024: latency and throughput,
#   measured on three generations of GPUs.
# - [A Proof for the Queuing Formula: L = λW](https://doi.org/10.1287/opre.9.3.383), Little 1961.
# - [decode_attention.py](../minigen/kernels/triton/decode_attention.py): the engine's kernels.
#
# **Next:** [chapter 34](34_cpu_kernels.ipynb) runs the same race on your own processor, where
# threads share the work.

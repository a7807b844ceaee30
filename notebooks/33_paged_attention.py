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
# Chapter 22 put keys and values into blocks, and copied them together again for every step.
# Chapter 32 attended tile by tile, to many queries at once. A decode step has one query a sequence,
# and a context that lies in blocks. This chapter writes its kernel: it reads each block where it
# lies, each key once for all the query heads that share it, and cuts long contexts into parts when
# a chip would stand idle.
#
# **Afterwards you can** look slots up inside a kernel, count what it reads against what it must
# read, say how many programs a chip wants, split a context and join its parts, and put your own
# kernel into the running engine.
#
# No kernel of this chapter runs on a GPU. Two kinds of numbers follow, and they are kept apart: bytes
# that programs ask for are **counted**; times on a GPU are **modelled**, from data sheets and from two
# assumed constants, which you can change.
#
# **You need** chapters 22 (block tables), 31 (kernels in Triton) and 32 (online softmax).
# **Time:** about 50 minutes to read and try, about 60 for the exercises.
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
from minigen_course.ch33_paged_attention.figures import bytes_bars, fill_chip, pool_loads
from minigen_course.ch33_paged_attention.kernels import (
    decoding,
    gather_kernel,
    gathering,
    joining,
    launch_gather,
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
    kv_and_tables,
    moved_by_tensor,
    record_decode,
    seconds,
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

greedy = SamplingParams(temperature=0, max_tokens=4)
llm = load_model(weights="float32", num_blocks=2, enable_prefix_caching=False)  # room for 32 tokens
expected = llm.generate("The sea is", greedy).text
chapter_map("attention", "blocks", "GPU kernels")

# %% [markdown]
# ## A number that hurts
#
# Two, in fact. First the copy. A decode step in plain torch gathers a sequence's blocks, and then
# reads the copy. It is measured on this machine, for one layer of our model and 8,192 tokens.
#
# Second, the idle chip. A GPU is many processors (NVIDIA calls them *streaming multiprocessors*),
# and a program runs on one of them. Take a single long chat, with a program for each KV head.

# %%
guess_copy = predict("8,192 tokens: how many times as long with the copy?", None)
guess_busy = predict("One long chat: how many of an H100's 132 processors work?", None)

# %%
long = 8192
pool = KVPool(1, long // 16, 3, 16, 64, torch.float32)
for half in pool.kv[0]:
    half.normal_()
scattered = torch.randperm(long // 16) + 1
dense, one_query = pool.gather(0, scattered), torch.randn(1, 9, 64)
in_one_piece = best_seconds(lambda: attention(one_query, *dense))
gathered_first = best_seconds(lambda: attention(one_query, *pool.gather(0, scattered)))
copy_ratio = gathered_first / in_one_piece
measured("attention over one piece", 1e6 * in_one_piece, "µs")
measured("gathered through a block table first", 1e6 * gathered_first, "µs")
guess_copy.compare(copy_ratio, "times", measured=True)

chip, one_long = CHIPS["H100 SXM"], Decoding(batch=1, context=32_768)  # Llama-3-8B: 8 KV heads
busy = one_long.num_programs(splits=1)
print(f"\none sequence of 32,768 tokens, a program for each KV head: {busy} programs")
print(f"an H100 has {chip.processors} processors: {busy / chip.processors:.0%} of it would work")
guess_busy.compare(busy)

# %% [markdown]
# ## The smallest version that works
#
# First get rid of the copy. A kernel can look into the block table itself: it loads the number of a
# block, and goes there. One program for each query head takes a block of tokens after another, with
# the running maximum of chapter 32. (`GROUP` query heads share a KV head; `tl.cdiv` divides and
# rounds up. `launch` makes a kernel of the plain function, and runs it in the interpreter, as in
# chapter 31.)


# %%
def one_head_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    mixed_ptr,
    length,
    block_stride,
    slot_stride,
    head_stride,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    head = tl.program_id(0)
    dims, slots = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(q_ptr + head * HEAD_DIM + dims) * scale
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((HEAD_DIM,), tl.float32)
    for entry in range(0, tl.cdiv(length, BLOCK_SIZE)):
        block = tl.load(table_ptr + entry)  # where the next tokens are
        seen = entry * BLOCK_SIZE + slots < length
        at = block * block_stride + slots * slot_stride + head // GROUP * head_stride
        keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        values = tl.load(values_ptr + at[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        scores = tl.where(seen, tl.sum(keys * q[None, :], axis=1), float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=0))
        weights, shrink = tl.exp2(scores - higher), tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        mixed = mixed * shrink + tl.sum(values * weights[:, None], axis=0)
        maximum = higher
    tl.store(mixed_ptr + head * HEAD_DIM + dims, mixed / total)


torch.manual_seed(33)
made = contexts([200], block_size=16, kv_heads=3, head_dim=64)  # in blocks that lie in no order
((k, v),) = made.own
q, mixed = torch.randn(1, 9, 64), torch.empty(1, 9, 64)
memory = {"q": q, "keys": made.keys, "values": made.values, "tables": made.tables}


def run_one_head():
    strides, scale = made.keys.stride()[:3], 1.442695 / 8  # log2(e) / sqrt(64)
    sizes = {"GROUP": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16}
    launch(one_head_kernel, (9,), *memory.values(), mixed, len(k), *strides, scale, **sizes)


by_one_head = record_programs(run_one_head, **memory, mixed=mixed)
torch.testing.assert_close(mixed, attention(q, k, v))
print("block table:", *made.tables[0, :-1].tolist(), "- read in place, attention is the same")

# %% [markdown]
# One thing is new against chapter 32: the address of a tile is not known before the block's number
# is there. A load waits for a load. (And weights are powers of two, as in the package's kernel
# there: log2(e) is in the scale.)
#
# ## Why it is slow
#
# The recorder of chapter 31 wrote down what every program loaded. The keys and values of these 200
# tokens are 307,200 bytes. Nine query heads share three KV heads.

# %%
guess_loaded = predict("How many bytes of keys and values did the nine programs load?", None)

# %%
required = k.nbytes + v.nbytes
gathered = torch.empty_like(k)
copying = record_programs(
    lambda: launch_gather(gather_kernel, made.keys, made.tables[0], len(k), gathered),
    keys=made.keys,
    tables=made.tables,
    gathered=gathered,
)
copied = moved_by_tensor(copying)  # of the keys; the values' are as many
ways = {
    "gathered first": {
        "keys and values": 2 * copied["keys"],
        "block tables": 2 * copied["tables"],
        "a copy, written and read": 4 * copied["gathered"],
    },
    "a program for each query head": kv_and_tables(by_one_head),
}
for name, moved in ways.items():
    print(f"{name:>29}: {sum(moved.values()):>9,} bytes, {sum(moved.values()) / required:.2f}x")
print(f"{'required':>29}: {required:>9,} bytes")
by_heads = ways["a program for each query head"]["keys and values"] / required
guess_loaded.compare(ways["a program for each query head"]["keys and values"], "bytes")

# %% [markdown]
# Nothing is copied any more, and programs ask for just as much: three query heads look at the same
# keys, and each of them loads them for itself. Is that traffic to **memory**? Not all of it. The three
# programs of a KV head run at about the same time, so the cache that all processors share (L2) may
# answer two of the three. That the keys and values of a full batch are gigabytes, and an H100's L2 has
# 50 MB, does not prevent it, because the reuse is close in time. But L2 has a bandwidth of its own, and
# nothing says that the three stay in step. What we count are the bytes that programs ask for; how many
# of them reach memory is not tested here.
#
# ## The idea: a group shares its loads
#
# So give the program not a query head, but a *KV head*, with all query heads that share it: its
# *group*. Their queries are the rows of a small matrix. Then scores are a product of matrices, and
# so is the mix: `tl.dot`, on the tensor cores. They need at least 16 rows:
# three are real, the rest is padding. That is waste, but of arithmetic, which is idle here anyway.
#
# Here is what such a kernel loads. You write it at the end of this chapter, so its source stays
# closed for now. Think: which of its loads will be repeated?

# %%
with interpreted():
    in_place = paged_decode_triton(q, made.keys, made.values, made.tables, made.lengths)
torch.testing.assert_close(in_place, attention(q, k, v))

# %%
by_group = record_decode(q, *made[:4])  # the plain form, which you will write below
torch.testing.assert_close(by_group.mixed, attention(q, k, v))
ways["a program for each KV head"] = kv_and_tables(by_group.accesses)
picture(
    bytes_bars(ways, required),
    "Bytes that programs ask for. Gathering first, and a program for each query head, ask for three "
    "times what is required; a program for each KV head asks for hardly more than is required.",
    number="33.1",
)
table_share = ways["a program for each KV head"]["block tables"] / required
once_a_block = 8 * 3 * -(-len(k) // 16) / required
print(f"keys and values: {ways['a program for each KV head']['keys and values'] / required:.2f}x")
print(f"table entries, looked up for each position: {table_share:.2%}")
print(f"if each block's were loaded once: {once_a_block:.2%}")

# %% [markdown]
# Every key and value once. The table's entries are loaded for each position, although 16 neighbours
# have the same: 16 loads of one address in one instruction, which a GPU answers with one
# transaction.
#
# ## What a program loads
#
# Three sequences, blocks of four slots, two KV heads, and each context cut into two parts; why,
# comes below. Choose a program. Orange is what it loads, grey what the others load. White slots are
# free: no program may touch them.
#
# Before you choose: which blocks does split 1 of sequence 2 read?

# %%
small = contexts([13, 30, 22], block_size=4, kv_heads=2, head_dim=16)
loads = record_decode(torch.randn(3, 6, 16), *small[:4], splits=2).accesses


def program_at(kv_head, sequence, split):
    program = (kv_head, sequence, split)
    return pool_loads(loads, small.keys, small.tables[:, :-1], small.lengths, program)


explore(
    program_at,
    "The keys of a layer, a row for each block: the slots that one program loads, in orange.",
    "33.2",
    kv_head=(0, 1, 1, 0),
    sequence=(0, 2, 1, 1),
    split=(0, 1, 1, 0),
)

# %% [markdown]
# ## How fast can it be?
#
# A score and its share of the mix are 4 x head_dim operations for each query head of the group; the
# key and the value, of 16 bits, are 4 x head_dim bytes. So the kernel does as many operations a
# byte as a group has heads, and bandwidth decides:

# %%
crowd = Decoding(batch=64, context=4096)  # Llama-3-8B: 8 KV heads, groups of 4, head_dim 128
h100 = MACHINES["H100 SXM"]
floor = crowd.kv_bytes / h100.bandwidth
print(f"operations a byte: {crowd.group}; an H100's ridge: {h100.ridge:.0f}")
print(f"64 sequences of 4,096 tokens: {crowd.kv_bytes / 1e9:.2f} GB of keys and values in a layer")
print(f"at least {1e3 * floor:.2f} ms a layer, {32e3 * floor:.1f} ms in 32 layers")
weights = 2 * num_parameters(config_of("Llama-3-8B"))
print(f"and the weights, {weights / 1e9:.0f} GB: {1e3 * weights / h100.bandwidth:.1f} ms")
print(f"to be under way at a microsecond's delay: {h100.bandwidth * 1e-6 / 1e6:.1f} MB")

# %% [markdown]
# With long contexts, attention takes longer than all the weights. Whether the floor is reached
# depends above all on this: are enough loads under way at any time? Memory answers after most of a
# microsecond. To sustain 3,350 GB/s at a delay of 1 µs, about 3.4 MB must be in flight (Little's law:
# bytes in flight = rate x delay).
#
# How many programs fit onto a processor at the same time follows from the machine code: it has
# 65,536 registers, and some shared memory. No GPU is needed to compile for one (chapter 31): here
# for an A100 (`sm_80`), for an RTX 4090 or an L4 (`sm_89`), and for an H100 or an H200 (`sm_90`).

# %%
codes = {(each.chip, each.kernel): each for each in decode_code(["sm_80", "sm_89", "sm_90"], [128])}
resident = {}
for name, each in CHIPS.items():
    code = codes[each.code, "paged_decode_kernel"]
    resident[name] = each.resident(code.registers, code.shared)
for (target, kernel), code in codes.items():
    sizes = f"{code.registers} registers a thread, {code.spilled} spilled"
    print(f"{target} {kernel:>20}: {sizes}, {code.shared:,} bytes shared")
of_sm_90 = codes["sm_90", "paged_decode_kernel"].instructions
print("\nin the PTX of the first, for sm_90:")
for kind in sorted(of_sm_90):
    print(f"{kind:>10}: {of_sm_90[kind]}")
for name, count in resident.items():
    print(f"{name:>15}: {count} programs fit onto one of {CHIPS[name].processors} processors")

# %% [markdown]
# `cp.async` are **asynchronous** loads, which run on while the program works: while a tile is
# multiplied (`mma.sync`), the next one is under way. The package asks for that at the launch, with `num_stages=2`. `ld.global` are
# waited for: the block table's entries, and the query.
#
# ## How many programs fill a chip?
#
# A **model**, with two assumed constants: a program takes 1 µs for each tile of 64 tokens, however idle
# the chip is, and the second pass, to which we come, costs 3 µs to start. All programs together read no
# faster than memory gives. Programs that do not fit wait for the next **wave**. No GPU has confirmed
# either constant here, so both are controls of the figure. What follows from them is only as good as
# they are.
#
# On the left is the chip: a row for each processor, blue while it works. The picture shows the **tail**
# of a wave: the programs of the last one leave most of the chip idle. Take one sequence of 32,768
# tokens: into how many parts would you cut it? Then halve and double the assumptions: how far does the
# best number of parts move?

# %%
print(f"assumed: {1e6 * TILE_SECONDS:g} µs for a tile of {TILE} tokens", end=", ")
print(f"{1e6 * LAUNCH_SECONDS:g} µs to start the second pass")


def chip_at(batch, context, splits, chip, tile_us, launch_us):
    times = Assumed(1e-6 * tile_us, 1e-6 * launch_us)
    return fill_chip(Decoding(batch, context), CHIPS[chip], splits, resident[chip], times)


explore(
    chip_at,
    "Modelled, not measured. Left: which processors work, and how long; at the right of it the tail of "
    "the last wave. Right: the time for each number of splits.",
    "33.3",
    batch=[84, 1, 2, 4, 8, 16, 64, 256],
    context=[4096, 16_384, 32_768, 131_072],
    splits=[1, 2, 4, 8, 16, 32, 64],
    chip=list(CHIPS),
    tile_us=[1.0, 0.25, 0.5, 2.0, 4.0],
    launch_us=[3.0, 1.0, 6.0, 12.0],
)

# %% [markdown]
# ## Splitting, and the second pass
#
# Cut the context into parts, a program for each: eight KV heads and 32 parts are 256 programs. But
# none of them has seen the whole context, so none can divide. Each leaves what chapter 32 merged:
# its maximum, its sum, and its mix. A second, small kernel brings the parts of a query head to the
# largest maximum, adds them up, and divides. You write that one, too.

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
    print(f"{splits} splits: keys and values {share:.2f}x, parts {written:>7,} bytes", end=", ")
    print(f"{empty:>2} of {9 * splits} programs have nothing to do")

# %% [markdown]
# The same numbers, and no key is read twice. What grows is what the parts write: in float32, a row
# for each query head and split. Short sequences of the batch leave programs idle, whose maximum is
# -inf and counts 2^-inf = 0.
#
# ## How many splits?
#
# As few as fill the chip. The engine has a rule, `num_splits`: about four programs for each processor,
# no part shorter than 128 tokens. Beside it, what the model finds best with the constants assumed
# above:

# %%
guess_best = predict(
    "If a tile takes half as long: does the best number of splits grow or fall?", None
)

# %%
show(num_splits)
fit = resident["H100 SXM"]
print("modelled: batch  context   rule  model's best   lost by the rule against the best")
for batch in (1, 4, 16, 64, 256):
    for context in (1024, 8192, 32_768):
        work = Decoding(batch, context)
        rule = num_splits(work.num_programs(1), context, chip.processors)
        best = best_splits(work, chip, fit)
        lost = seconds(work, chip, rule, fit) / seconds(work, chip, best, fit) - 1
        print(f"{batch:>15} {context:>8,} {rule:>6} {best:>13} {lost:>24.0%}")
print("\none sequence of 32,768 tokens, by assumption:")
split_gains, bests = [], {}
for tile_us in (0.25, 0.5, 1.0, 2.0):
    for launch_us in (1.0, 3.0, 12.0):
        times = Assumed(1e-6 * tile_us, 1e-6 * launch_us)
        best = best_splits(one_long, chip, fit, times)
        whole, cut = (seconds(one_long, chip, each, fit, times) for each in (1, best))
        bests[tile_us, launch_us] = best
        split_gains.append(whole / cut)
        print(f"{tile_us:>5} µs for a tile, {launch_us:>4} µs to start: best {best:>2}", end=", ")
        print(f"{whole / cut:>4.1f} times as fast as unsplit")
moved = bests[0.5, 3.0] - bests[1.0, 3.0]
guess_best.compare("grow" if moved > 0 else "fall" if moved < 0 else "stay")

# %% [markdown]
# That splitting a lone long context helps does not depend on the constants. **How much** it helps
# does: over these assumptions the gain differs severalfold, and so does the best number of parts. A
# measurement on the chip has to say it.
#
# The rule asks for more parts than the model needs, which costs little where contexts are long. Where
# they are short, the second pass is a good part of the whole, and by the model the rule cuts too
# eagerly: with these constants it loses up to the share in the table. But short contexts are little
# beside the weights, and attention is a small part of that step.
#
# ## The measurement again
#
# **Counted**, of the first number: the copy is gone, and what programs ask for has shrunk.

# %%
total_bytes = {name: sum(moved.values()) for name, moved in ways.items()}
saved = total_bytes["gathered first"] / total_bytes["a program for each KV head"]
print(f"bytes, gathered first against in place and shared: {saved:.1f} times fewer")

# %% [markdown]
# **Counted**, of the second number: the programs. How much faster that makes the chip is modelled, and
# depends on what was assumed.

# %%
split = one_long.num_programs(best_splits(one_long, chip, fit))
print(f"one sequence of 32,768 tokens: {busy} programs unsplit, {split} split, for", end=" ")
print(f"{chip.processors} processors")
print(f"modelled gain: {min(split_gains):.1f} to {max(split_gains):.1f} times")
with interpreted(), attending(llm, attend_triton):
    assert llm.generate("The sea is", greedy).text == expected
print("\nthe engine with these kernels, interpreted, gives the same text:", repr(expected))

# %% [markdown]
# (`LLM.load(device="cuda")` chooses these kernels by itself. Where you have a GPU, `make bench-gpu`
# measures the copy bandwidth of the card and which share of it paged decode reaches.)
#
# ## Your turn
#
# Three kernels, each harder than the one before. `check` runs them in the interpreter, watches
# every load and store, and says the first thing that is wrong. First: gather through the block
# table.

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


# %%
mine = check(33, gather_kernel=gather_kernel)  # your own if it passed, else the package's

# %% [markdown]
# In the engine, one line: while the block runs, every decode step gathers keys and values by your
# kernel. (Until it passes, `mine` is the package's own. An engine that always does is made by
# `LLM.load(attention_backend=gathering(mine))`.)

# %%
with attending(llm, gathering(mine)):
    print(llm.generate("The sea is", greedy).text)
reveal(33, gather_kernel=mine)

# %% [markdown]
# Second: the pass that joins the splits.

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
mine = check(33, join_kernel=join_kernel)  # your own if it passed, else the package's
with attending(llm, joining(mine)):
    print(llm.generate("The sea is", greedy).text)
reveal(33, join_kernel=mine)

# %% [markdown]
# Third, the kernel of this chapter: paged decode, grouped and split. It has many parameters, so climb
# to it in three steps. The checks come in the same order, and name the first step that fails.
#
# 1. **One head, in tiles.** Begin with `SPLITS` and `GROUP` of 1. It is `one_head_kernel`, but a tile
#    has `BLOCK_N` tokens, whatever the block size. Look the slot of each position up in the table as
#    your `gather_kernel` does. Store maximum, sum and mix, undivided.
# 2. **A group.** Load the queries of the group as rows of one block, and let `tl.dot` make the scores.
#    Maximum and sum have an element for each row.
# 3. **Splits.** Compute where this program's tiles begin and end. Nothing else changes: a split
#    without tokens runs its loop zero times.
#
# | parameters | what they say |
# |---|---|
# | `q_ptr` | the queries; the rows of one group are neighbours |
# | `keys_ptr`, `values_ptr`, `block_stride`, `slot_stride`, `head_stride` | a layer's pool, and how far blocks, slots and KV heads are apart |
# | `tables_ptr`, `table_stride`, `lengths_ptr`, `BLOCK_SIZE` | which blocks a sequence has, and how many tokens |
# | `parts_ptr`, `maxima_ptr`, `sums_ptr` | where the parts go that your `join_kernel` joins |
# | `KV_HEADS`, `GROUP`, `HEAD_DIM`, `scale` | the model |
# | `SPLITS`, `BLOCK_N` | how a context is cut: into splits, and these into tiles |
# | `BLOCK_G`, `BLOCK_D` | `GROUP` and `HEAD_DIM`, rounded up to what `tl.dot` takes |

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
mine = check(33, decode_kernel=decode_kernel)  # your own if it passed, else the package's
with attending(llm, decoding(mine, splits=2)):
    answer = llm.generate("The sea is", greedy).text
assert answer == expected
print(answer)
reveal(33, decode_kernel=mine)

# %% [markdown]
# The engine's own kernels, `paged_decode_kernel` and `join_splits_kernel`, are in
# [decode_attention.py](../minigen/kernels/triton/decode_attention.py). They have windows besides.
#
# ## What the production engines do beyond this
#
# - **vLLM** began with a CUDA kernel of this kind, and added a second version that cuts contexts
#   into partitions of 512 tokens and reduces them. Today it mostly calls FlashAttention or
#   FlashInfer, and has a Triton kernel that splits long contexts into segments.
# - **FlashAttention** has the split as Flash-Decoding: the number of splits follows from the
#   number of processors, and it takes a block table.
# - **FlashInfer** plans ahead: before a step, the processor cuts all contexts of the batch into
#   parts of like size, so that one long sequence does not delay the short ones. Where many
#   requests begin with the same prompt, its cascade attends to that part once for all, and merges.
# - **SGLang**'s Triton backend decodes in two stages, with a form for grouped heads.
#   **TensorRT-LLM** has kernels for grouped heads in decoding (XQA), and a multi-block mode,
#   which is the split.
# - **llama.cpp**'s CUDA kernels run several blocks over one context, and combine them afterwards.
# - Keys and values of 8 bits halve what must be read; most of these engines have them.

# %% [markdown]
# ## Claims

# %%
by_kv_head = ways["a program for each KV head"]["keys and values"] / required
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
        "a block's entry is 8 bytes beside thousands; what was slow was the copy",
    ),
    Claim(
        "Splitting the context makes decoding up to 8 times as fast for very long sequences",
        f"modelled for 32,768 tokens alone on an H100: {min(split_gains):.1f} to "
        f"{max(split_gains):.1f} times for attention alone, by what is assumed",
        NOT_TESTED,
        "without splits, a lone sequence leaves most processors idle; how much that costs depends on "
        "the chip, and no GPU ran here",
        "[Dao et al. 2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)",
    ),
)

# %% [markdown]
# **Next:** chapter 34 runs the same race on your own processor, where the programs are threads.

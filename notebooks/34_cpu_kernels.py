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
# # 34 · The same race on a CPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/34_cpu_kernels.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/34_cpu_kernels.ipynb)
#
# Chapter 17 showed that generating one token at a time is limited by reading the weights: every
# weight comes out of memory once, for two operations. No part of that needs a GPU. The processor of
# a laptop can run the same race: read all weights as fast as its memory can deliver them, and have
# fewer bytes to read. This chapter runs it in Python that [Numba](https://numba.pydata.org)
# compiles, on the machine in front of you, be it a Mac, an older PC or a server.
#
# **Afterwards you can** say what your machine's memory allows in tokens per second, measure how
# near a step comes to that and split what is lost into measured parts, round numbers to bytes with
# a scale for each group, multiply such bytes, and say which speed-up a lower precision can give.
#
# **You need** chapter 11 (blocks of 8 and 4 bits), chapter 17 (the roofline), and chapter 25 (the
# engine). **Time:** about 110 minutes to read and try, about 75 for the
# [exercises](../exercises/34_cpu_kernels.ipynb).
#
# **Two paths:** the sections up to *Integers inside a group*, and those from *What bytes as inputs
# cost* on, are about quantisation and the whole step, for every reader. The four between them build
# a kernel lane by lane, and a first reading can skip their text (run their cells: *The measurement
# again* and *Your panels in the engine* use what they define). (Two of their terms come back; *What
# a processor has* explains lanes. A **word** is the four bytes that a lane takes at once, and a
# **panel** is sixteen rows, one for each lane, with the same word of all rows side by side.)
#
# **Where we are:** scheduler → runner → **the products of one step, on the CPU** → logits →
# sampler.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | decode | memory bandwidth | L1 kernels | `--weights`, `--threads` | inter-token latency |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
import os
import platform
import time
from functools import partial

import numpy as np
import torch
from numba import njit, prange

from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen.kernels.cpu.simd import compiled_features
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
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
from minigen_course.ch34_cpu_kernels import figures as draw
from minigen_course.ch34_cpu_kernels import lesson
from minigen_course.ch34_cpu_kernels.loops import best_in_turns, lanes_of, loop_costs
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.roofline import roofline
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import Machine, ModelShape, Step
from minigen_course.lab.inspect_model import (
    agreement,
    perplexity_of,
    read_along,
    read_at_once,
    recorded_heads,
)
from minigen_course.lab.texts import ALICE

llm = load_model(weights="float32")
num_threads = torch.get_num_threads()
shape = ModelShape.of(llm.config)
ids = llm.tokenizer.encode(ALICE)
pieces = [ids[:40], ids[40:80]]
chapter_map("CPU kernels", "weights", "KV cache")

# %% [markdown]
# ## A number that hurts
#
# This model multiplies each token by 134.5 million weights. With 4 bytes for each (float32), one
# token reads 538 MB. If memory delivers 30 GB/s, these take 538 MB / 30,000 MB/s = 17.9 ms. A
# program that reads all weights for each token cannot get more than 56 tokens per second from such
# a memory. As a formula:
#
# $$\text{tokens per second} \le \frac{B}{b}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $B$ | bytes per second that memory can deliver, the [bandwidth](../docs/glossary.md#memory-bandwidth) | `bandwidth` |
# | $b$ | bytes of weights that one token reads | `form_bytes[form]` |
#
# (A **form** is the format in which the weights are kept: float32, bfloat16, int8 or int4.)
#
# The bound holds for one sequence at a time and for weights that no cache holds. (A **cache** is a
# small, fast memory on the chip. The next section measures yours.) How near does chapter 25's
# engine come?

# %%
guess_share = predict("The engine in float32 reaches how many % of its bound?", None, within=1.5)

# %% [markdown]
# The next cell measures $B$ with a loop that hardly does anything but read: it adds up a quarter of a
# gigabyte. One loop shows only what *this* loop reads, and memory may deliver more to another. So take
# the result as a first value of $B$. Later sections compare it with other loops, and go on with the
# fastest. (Numbers in ⟨ ⟩ are measured, so yours differ. `read_along` feeds a text one token per step, as
# decoding does, and times the runner alone, without scheduler and sampler. The time of a step is the 10th
# percentile of the steps that ran: of 16 steps one was faster. Other programs disturb the
# slower ones.)
# `njit` compiles a function when it is first called. `prange` shares a loop among the processor's
# **cores**, its parts that compute at the same time. `fastmath` permits sums in another order. That
# changes float results a little, so a compiler needs permission: in float32, $(10^8 + 1) - 10^8$ is 0,
# while $(10^8 - 10^8) + 1$ is 1.


# %%
@njit(parallel=True, fastmath=True)
def add_up(numbers):
    total = np.float32(0)
    for place in prange(len(numbers)):
        total += numbers[place]
    return total


numbers = np.ones(2**26, np.float32)
bandwidth = numbers.nbytes / best_seconds(lambda: add_up(numbers), 25)
head = shape.vocab * shape.hidden  # weights of the output head; the rest is the layers'
form_bytes = {  # as minigen keeps them: a scale for each 32, in 4 bits a minimum too, head in 8
    "float32": 4 * shape.multiplied,
    "bfloat16": 2 * shape.multiplied,
    "int8": 8.5 / 8 * shape.multiplied,
    "int4": (5 * (shape.multiplied - head) + 8.5 * head) / 8,
}
measured("this machine reads", bandwidth / 1e9, "GB/s")
for form, num_bytes in form_bytes.items():
    ceiling = mark(bandwidth / num_bytes, "tokens/s")
    print(f"{form:>8}: {num_bytes / 1e6:3.0f} MB per token, so at most {ceiling}")

in_float32 = read_along(llm, ids[:16])
measured("\nchapter 25's engine in float32", 1 / in_float32.step_seconds, "tokens/s")
guess_share.compare(
    100 * form_bytes["float32"] / in_float32.step_seconds / bandwidth, "%", measured=True
)

# %% [markdown]
# Two things can be won: come nearer to the bound, and raise the bound by reading fewer bytes. (The
# 8.5 bits of int8 are 8 and a scale of 16 bits for each 32 weights, $8 + 16/32$. The 5 bits of int4
# are 4, a scale of 16 bits, and 16 bits for the minimum, $4 + 32/32$.)
#
# ## What a processor has
#
# The words for the rest of the chapter, from the outside to the inside:
#
# - A core runs one stream of instructions (on some machines two at once, its **hardware
#   threads**). A processor has several. A program uses them through **threads**: streams of instructions
#   that the operating system assigns to cores. The threads of a program share its memory.
# - The **clock** gives the beat: a core at 3 GHz has 3 billion cycles per second, and it can start
#   a few instructions in each.
# - Memory is far away, a hundred cycles and more. Data therefore comes through **caches** (figure
#   34.1), in whole **cache lines**, mostly of 64 bytes, on Apple's chips 128. A core that notices
#   neighbouring lines being read fetches the next ones ahead (**prefetching**), so memory likes to
#   be read in order.
# - A **register** is where a core computes. A **SIMD register** holds several numbers, its
#   **lanes**, and one **vector instruction** does the same to all lanes
#   ([SIMD](../docs/glossary.md#simd): single instruction, multiple data).
# - **FMA**, *fused multiply-add*, is a vector instruction that computes $a \times b + c$ in each
#   lane, rounded once.
# - **VNNI** is Intel's and AMD's name for a few vector instructions. This chapter uses the one on
#   signed and unsigned bytes, `vpdpbusd`: in each lane it multiplies four bytes by four bytes and
#   adds the four products to the lane's 32-bit sum. ARM's instruction of this kind is `sdot`;
#   below, each of them is a **byte instruction**. Some newer processors have one for two pairs of
#   bfloat16 numbers, too: minigen's bfloat16 form uses AMD's (on Intel's, see the second point of
#   *One processor, four sets of instructions*).
# - A **barrier** is a point that no thread passes until all have arrived.
#
# | processor | SIMD register | lanes of float32 | FMA | dot product of bytes |
# |---|---|---|---|---|
# | many of Intel's Celerons, Pentiums and Atoms until 2021 (SSE) | 128 bits | 4 | no: the package computes it in float64 | no |
# | Apple M1 and later, most ARM servers (NEON) | 128 bits | 4 | yes | `sdot` |
# | Intel Core since Haswell, AMD since Zen (AVX2) | 256 bits | 8 | yes | VNNI on some newer ones |
# | most Intel servers since 2017, AMD since Zen 4 (AVX-512) | 512 bits | 16 | yes | VNNI on most |
# | most Intel servers since 2023 (AVX-512 and AMX) | 512 bits | 16 | yes | VNNI, and products of tiles |
#
# (The names in brackets are those of sets of instructions. AMX has registers with two dimensions,
# **AMX tiles** of up to 16 rows of 64 bytes, and instructions that multiply two of them and add the
# result to a third.) The package's vector kernels, and those that we build lane by lane below, are
# always written for sixteen lanes. Where a register is shorter, the compiler takes two or four
# registers for them. The results are the same; how many instructions they need differs. (With AMX,
# the package also has kernels for tiles. Their sums of bfloat16 numbers have another order, so the
# last digits differ.)


# %%
@njit(fastmath=True)
def add_up_once(numbers):
    total = np.float32(0)
    for place in range(len(numbers)):  # no prange: one core
        total += numbers[place]
    return total


@njit(fastmath=True)
def add_up_again(numbers, times):
    total = np.float32(0)
    for _ in range(times):
        total += add_up_once(numbers)
    return total


picture(
    draw.machine(),
    "The stores between memory and a core, with usual sizes (yours may differ). Data moves between memory and caches in whole "
    "cache lines, and computing happens in registers only.",
    number="34.1",
)
parts = lesson.processor_parts(compiled_features().split(","), platform.machine())
for name, each in {"hardware threads that the system shows": str(os.cpu_count()), **parts}.items():
    print(f"{name}: ⟨{each}⟩")
rates = {}
for size in (2**power for power in range(14, 29, 2)):  # 16 KB to 256 MB
    times = max(1, 2**26 // size)  # 64 MB in all at least
    seconds_once = best_seconds(partial(add_up_again, numbers[: size // 4], times), 3)
    rates[size] = size * times / seconds_once
picture(
    draw.staircase(rates),
    "The same loop on one core over arrays of growing size. The smallest stay in the nearest cache; "
    "the largest come from memory each time.",
    number="34.2",
)

# %% [markdown]
# Read figure 34.2 from the left: each point is an array that is read again and again. As long as it fits
# a cache, it comes from there. Where the curve falls, a cache has become too small. A flat part is the
# rate of one store (at the right end, memory's), or the most that the loop can add. Where the curve
# rises, in short arrays, the cost of the start is the limit. The model's weights, 96 MB and more, lie at
# its right end on most machines. (A processor with a very large last cache (L3 in figure 34.1) is an
# exception: it keeps a part of this small model, and can beat the "bound".)
#
# ## Ten lines against a library
#
# A step is mostly matrices times vectors, so begin with one: 131,072 rows of 576 numbers, as wide
# as the model's and too large for most caches. (To make it quickly, the cell repeats 8,192 random
# rows sixteen times. Memory must still deliver every row, because each lies at a place of its own.)
# On one side torch's product for one row of inputs (one token); on the other the simplest loop,
# compiled.


# %%
@njit(parallel=True, fastmath=True)
def product(weight, x, out):
    for row in prange(len(weight)):  # the rows are shared among the threads
        total = np.float32(0)
        for column in range(len(x)):
            total += weight[row, column] * x[column]
        out[row] = total


rng = np.random.default_rng(34)
width = shape.hidden
num_rows = 2**17
once = rng.standard_normal((num_rows // 16, width), dtype=np.float32)
weight = np.tile(once, (16, 1))  # the same rows sixteen times, one after the other
x = rng.standard_normal(width, dtype=np.float32)
out = np.empty(num_rows, np.float32)
product(weight, x, out)
np.testing.assert_allclose(out, weight @ x, atol=1e-3)

of_torch = torch.from_numpy(weight), torch.from_numpy(x)[None]
seconds = {
    "torch": best_seconds(lambda: torch.nn.functional.linear(of_torch[1], of_torch[0])),
    "ours": best_seconds(lambda: product(weight, x, out)),
}
print(f"{num_rows:,} rows of {width} numbers: {weight.nbytes / 1e6:.0f} MB")
for name, each in seconds.items():
    speed = weight.nbytes / each
    print(f"{name:>5}: {mark(speed / 1e9, 'GB/s')}, {mark(100 * speed / bandwidth, '%')} of B")

# %% [markdown]
# The simple loop reads every weight once, in the order in which it lies in memory. For one row of
# inputs nothing more can be asked. (More than 100 % of $B$ has three possible causes: the first
# cell was disturbed, this loop's way of reading suits the memory better, or a large cache helps.)
# Why is torch slower, if it is? Its float32 product is often that of MKL, Intel's library, which
# read the weights slowly on the AMD processor that we tried (Zen 4), if there were only a few rows
# of inputs. ([minigen's layers](../benchmarks/results/34_tried.md) take another library on AMD's
# processors, oneDNN.) Which way a library takes for one row depends on its version and on the
# processor, so the two may be equally fast on your machine.
#
# The inner loop is a dot product, and the compiler lays it along the lanes. By hand, with four
# lanes, weights 1 to 8 and inputs that are all 1:
#
# | | lane 0 | lane 1 | lane 2 | lane 3 |
# |---|---|---|---|---|
# | FMA with weights 1, 2, 3, 4 | 1 | 2 | 3 | 4 |
# | FMA with weights 5, 6, 7, 8 | 1 + 5 = 6 | 2 + 6 = 8 | 3 + 7 = 10 | 4 + 8 = 12 |
# | add across the lanes, once | 36 | | | |
#
# Two FMAs do the work of eight. The last line is different: it adds *across* lanes, for which a
# register must be moved against itself, in halves: 4 lanes to 2, 2 to 1. Keep that in mind.
#
# ## Fewer bytes: groups and scales
#
# To **quantise** numbers is to round them to whole steps, so that each needs only a few bits. The
# numbers of a **group** share the size of a step, their **scale**:
#
# $$s = \frac{\max_i |w_i|}{127}, \qquad q_i = \operatorname{round}(w_i / s), \qquad w_i \approx s\,q_i$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $w_i$ | the numbers of one group | `rows` |
# | $q_i$ | their bytes, or **codes**, from -127 to 127 | the first result, `codes` |
# | $s$ | the group's scale | the second result, `scales` |
#
# By hand, a group of four: 0.5, -1.27, 0.022, 0.9. The largest magnitude is 1.27, so $s = 0.01$.
#
# | | | | | |
# |---|---|---|---|---|
# | $w_i$ | 0.5 | -1.27 | 0.022 | 0.9 |
# | $w_i / s$ | 50 | -127 | 2.2 | 90 |
# | $q_i$ | 50 | -127 | 2 | 90 |
# | $s\,q_i$ | 0.50 | -1.27 | 0.02 | 0.90 |
#
# No number moves by more than half a step, 0.005. (Papers call this *absmax* or *symmetric*
# quantisation.)
#
# ## Your turn: bytes with a scale
#
# Everything below uses your function as soon as it passes, and the course's until then.

# %%
task(34, "quantise_groups")

# %%
# exercise: minigen_course.ch34_cpu_kernels.lesson.quantise_groups
import numpy as np


def quantise_groups(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers to bytes, with a scale for every `size` of a row: number = byte x scale.

    `rows` is float32, [rows, width], and `size` divides the width. Returns the bytes (int8 from
    -127 to 127, [rows, groups, size]) and the scales (float32, [rows, groups]). The largest
    magnitude of a group is 127 steps, and each number goes to the nearest step. A group of zeros
    has the scale 0.
    """
    raise NotImplementedError  # your turn


# %%
to_bytes = check(34, quantise_groups=quantise_groups)
reveal(34, quantise_groups=to_bytes)

# %% [markdown]
# ### What one large number does
#
# An **outlier** is a number far larger than its neighbours. It widens the steps of its whole group.
# With one group for each row, every number of the row is rounded to these wide steps. With groups
# of 32, only 31 neighbours are. But each group has to pay for its scale. So the fair question is:
# at equal *total* bits for each number, are smaller groups or more bits the better way to spend
# them?
#
# Figure 34.3 answers it for numbers that were never rounded before, two tensors that this model
# computes in float32 while it reads Alice: the inputs of a product in layer 1, which have outliers,
# and the values of layer 20, which have hardly any. (The file's own weights would be no fair test.
# They are rounded to 4 or 8 bits already.) Groups here have a minimum besides the scale, as the
# 4-bit blocks of chapter 11: the steps reach from the smallest number of the group to the largest,
# and a group costs 32 bits. The error is the root mean square of what rounding changes, in % of the root
# mean square of the numbers.

# %%
matrices = {
    "inputs of layer 1's down: outliers": lesson.inputs_of_down(llm, ids[:64], 1).numpy(),
    "values of layer 20: hardly any": recorded_heads(llm, ids[:64])[20].v.flatten(1).numpy(),
}


def of_a_matrix(matrix, row, bits, group_size):
    return draw.rounding(matrices[matrix], row, bits, group_size)


explore(
    of_a_matrix,
    "Left: 128 numbers of one row (dots), the steps of their groups (light lines), and how far each "
    "number moves (orange). Right: the error of the whole matrix against total bits; each curve is "
    "a group size, each of its points a number of bits from 2 to 8.",
    "34.3",
    matrix=list(matrices),
    row=(0, 63, 1, 15),
    bits=(2, 8, 1, 4),
    group_size=(8, 128, 8, 32),
)
errors = {}
wild, calm = matrices
for name in (wild, calm):
    rows = matrices[name]
    for bits, size in ((4, 32), (5, 128), (5, rows.shape[1])):
        errors[name, size] = lesson.relative_error(rows, bits, size)
        total = lesson.bits_a_weight(rows.shape[1], bits, size)
        said = f"{bits} bits in groups of {size:>4}: {total:.2f} bits per number"
        print(f"{name:>34}, {said}, error {mark(100 * errors[name, size], '%', 2)}")
assert errors[wild, 32] < errors[wild, 128] < errors[wild, matrices[wild].shape[1]]
assert errors[calm, 128] < errors[calm, 32]

# %% [markdown]
# In the right picture, lower is better, and a curve further to the left is cheaper.
# For the tensor with outliers, of the sizes drawn, groups of 32 lie lowest (groups of 8 pay 4 bits
# per number for scale and minimum, too much): 4 bits in groups of 32 beat 5 bits in groups of 128,
# with fewer bits in all (5.00 against 5.25), and one group for each row is far behind. Choose the
# other tensor, and the order turns: where there are no outliers, a scale and a minimum for each 32
# buy less than one more bit does. (Its rows have 192 numbers, so a "group of 128" is one of 128 and
# one of 64: $5 + 2 \cdot 32 / 192 = 5.33$ bits.) Small groups are an insurance against outliers.
# File formats such as GGUF's Q4_1 take it for every matrix.
#
# ## Products of bytes
#
# Now use bytes in a product. The first loop has one scale for each row and multiplies by it once,
# at the end. The second has a scale for each 32 numbers, 18 in a row: it adds up a part for each group,
# and multiplies the part by its scale. Both read about a quarter of float32's bytes.

# %%
guess_groups = predict(
    "With a scale for each 32: how many times as fast as float32?", None, within=2
)


# %%
@njit(parallel=True, fastmath=True)
def product_of_bytes(codes, scales, x, out):
    for row in prange(len(codes)):
        total = np.float32(0)
        for column in range(len(x)):
            total += codes[row, column] * x[column]
        out[row] = total * scales[row]


@njit(parallel=True, fastmath=True)
def product_of_groups(codes, scales, x, out):
    for row in prange(len(codes)):
        total = np.float32(0)
        for group in range(len(x)):
            part = np.float32(0)
            for column in range(32):
                part += codes[row, group, column] * x[group, column]
            total += part * scales[row, group]  # one scale for each group
        out[row] = total


def quantised(size):  # the rows repeat, so rounding them once is enough
    codes, scales = to_bytes(once, size)
    return np.tile(codes, (16, 1, 1)), np.tile(scales, (16, 1))


codes, scales = quantised(width)
by_row = codes[:, 0], scales[:, 0]
seconds["bytes"] = best_seconds(lambda: product_of_bytes(*by_row, x, out))
off_by_row = float(np.abs(out - weight @ x).max())

codes, scales = quantised(32)
x_groups = x.reshape(-1, 32)
seconds["groups"] = best_seconds(lambda: product_of_groups(codes, scales, x_groups, out), 3)
off_by_group = float(np.abs(out - weight @ x).max())
measured("a scale for each row: times as fast as float32", seconds["ours"] / seconds["bytes"])
guess_groups.compare(seconds["ours"] / seconds["groups"], measured=True)
largest = np.abs(weight @ x).max()
print(f"errors, of results up to {largest:.0f}: {mark(off_by_row)} and {mark(off_by_group)}")

# %% [markdown]
# ### What a slow loop waits for
#
# The two loops read nearly the same bytes. So where the second number is far below the first, its loop
# does not wait for memory: it waits for its own instructions. There are two ways to see why.
#
# **Count what it needs**, for a row of 576 in registers of sixteen lanes. Both loops load sixteen
# bytes 36 times (and widen them to 32 bits: one instruction does both, `vpmovsxbd`), convert them
# to floats, and do 36 FMAs (each reads its inputs from memory by itself): 108 instructions. With
# one scale for each row, one sum across the lanes follows. It takes four halvings (16 → 8 → 4 → 2 →
# 1), and each halving moves one half and adds it: 8 instructions, and one more for the scale. With
# a part for each group there are 18 such sums, and 18 FMAs with a scale. That is
# $108 + 9 = 117$ against $108 + 18 \cdot 9 = 270$, 2.3 times as many.
#
# **Look at what the compiler made.** `inspect_asm` returns the machine code. A compiler prepares
# several copies of an inner loop (for whole registers, for the rest of a row, for one number at a
# time) and has the program choose among them when it runs. The next cell divides the instructions
# of one pass of a copy by the weights that the pass converts to floats. It gives the copy with the
# fewest instructions per weight and the one with the most. Our count is 117 / 576 = 0.20 per
# weight, and nearly twice that with registers of eight lanes. (LLVM, the compiler behind Numba,
# often takes eight even where there are sixteen. The cell looks for the registers' names, and
# compares with the count for as many lanes, from the table below.) Which copy ran, only its time
# can tell. So the cell also measures, with so few rows that they stay in a cache: there these loops
# wait for instructions.
#
# <details><summary>Why the copy with the fewest is not at our count</summary>
#
# - Our count leaves out how a loop counts its passes: an addition, a comparison and a jump. A pass over
#   four registers, for example, has $4 \cdot 3 + 3 = 15$ instructions for 64 weights, 0.23 per weight.
# - A pass of *a part for each group* needs 270 / 576 = 0.47 by our count. LLVM also makes a copy of it
#   that holds numbers of sixteen *groups* in the lanes, so it needs no sums across them, and an FMA has
#   the scales of sixteen groups: $(108 + 18/16) / 576 = 0.19$, and what counts the passes comes on top.
#   It works only if neighbouring groups begin one number apart; ours begin 32 apart, so it never runs.
#
# </details>
#
# And it adds two loops. The third is the second with one change: the compiler cannot know that a group
# has 32 numbers, because it reads the size from the array. The fourth makes use of
#
# $$s\,(v_0 + v_1 + \dots + v_{15}) = s\,v_0 + s\,v_1 + \dots + s\,v_{15}$$
#
# where $v_0$ to $v_{15}$ are what the lanes hold after a group, and $s$ is its scale. A scale may be
# multiplied *before* the lanes are added. So no group needs a sum across lanes. Each lane keeps its own
# total over all groups, and an FMA with the scale in every lane adds what a group has brought. One sum
# across the lanes at the row's end is enough. In Numba it is sufficient to leave `part` out and to
# write the scale into the sum; the compiler then lays one long sum along the lanes.
# (Sixteen neighbouring columns share `column // 32`. The count supposes that the compiler sees this, and
# spreads one scale.) By the count: 36
# loads, 36 conversions, 36 multiplications by the inputs, 36 FMAs with the scale, 18 scales to spread
# over the lanes, and 8 instructions for one sum, 170 in all, 1.5 times those of one scale for each row.
# In shorter registers the counts differ:
#
# | lanes | a scale for each row | a part for each group | lanes kept apart | the same, a group's registers added up first |
# |---|---|---|---|---|
# | 16 | 117 | 270 | 170 | 152 |
# | 8 | 223 | 342 | 312 | 258 |
# | 4 | 437 | 522 | 598 | 472 |
#
# With eight lanes, keeping them apart still needs fewer instructions than a part for each group.
# With four it needs more, because there loads, conversions and FMAs are most of the work, and a sum
# across four lanes is short. In the last column a group's registers are added up first, and only
# their sum is multiplied by the scale: that needs fewer at every length (with sixteen lanes 3 · 36
# + 18 scales to spread + 18 FMAs + 8 = 152). (These are the instructions of x86, the family of
# Intel and AMD: one widens bytes as it loads them, and an FMA may read its input from memory. NEON,
# ARM's instructions for four lanes, does neither, and its inputs need loads of their own, so on ARM
# each count of the last line is some 200 higher. The order stays, and the ratios are nearer to 1.)


# %%
@njit(parallel=True, fastmath=True)
def product_of_parts(codes, scales, x, out):
    for row in prange(len(codes)):
        total = np.float32(0)
        for group in range(x.shape[0]):
            part = np.float32(0)
            for column in range(x.shape[1]):  # 32, but only when it runs
                part += codes[row, group, column] * x[group, column]
            total += part * scales[row, group]
        out[row] = total


@njit(parallel=True, fastmath=True)
def product_of_lanes(codes, scales, x, out):
    for row in prange(len(codes)):
        total = np.float32(0)
        for column in range(len(x)):
            total += codes[row, column] * x[column] * scales[row, column // 32]
        out[row] = total


def products_of_bytes(num_rows):
    """The four loops, for the first rows."""
    some, their_scales, flat = codes[:num_rows], scales[:num_rows], codes.reshape(len(codes), -1)
    one_each = by_row[0][:num_rows], by_row[1][:num_rows]
    return {
        "a scale for each row": partial(product_of_bytes, *one_each, x, out),
        "a part for each group": partial(product_of_groups, some, their_scales, x_groups, out),
        "the same, size unknown": partial(product_of_parts, some, their_scales, x_groups, out),
        "lanes kept apart": partial(product_of_lanes, flat[:num_rows], their_scales, x, out),
    }


product_of_groups(codes, scales, x_groups, out)
of_groups = out.copy()
for run in list(products_of_bytes(num_rows).values())[2:]:
    run()
    np.testing.assert_allclose(out, of_groups, atol=1e-3)
few = 1024  # rows: few enough for a cache, so that no loop waits for memory
in_cache = best_in_turns(products_of_bytes(few), 50)
lanes = max(4, *map(lanes_of, product_of_bytes.inspect_asm().values()))
counts = {16: (117, 270, 270, 170), 8: (223, 342, 342, 312), 4: (437, 522, 522, 598)}[lanes]
counted = dict(zip(in_cache, counts, strict=True))
print(f"{few} rows, against a scale for each row:", end=" ")
print(f"instructions by our count for ⟨{lanes}⟩ lanes, and measured time")
for name, each in in_cache.items():
    slower = mark(each / in_cache["a scale for each row"], "times the time", 2)
    print(f"{name:>24}: ⟨{counted[name] / counts[0]:.1f}⟩ times the instructions, {slower}")
loops = {"a scale for each row": product_of_bytes, "a part for each group": product_of_groups}
costs = {name: loop_costs(*each.inspect_asm().values()) for name, each in loops.items()}
print("instructions per weight in the machine code, in the copies with the fewest and the most")
for name, each in costs.items():
    print(f"{name:>24}: ⟨{each.fewest:.2f}⟩ and ⟨{each.most:.2f}⟩")
quick, slow = costs.values()
ran = in_cache["a part for each group"] / in_cache["a scale for each row"]
of_fewest, of_most = slow.fewest / quick.fewest, slow.most / quick.fewest
nearest = "the most" if ran > np.sqrt(of_fewest * of_most) else "the fewest"  # by factors
nearest = "no loop that was found" if np.isnan(of_most) else f"{nearest} instructions"
print(f"a part for each group takes ⟨{ran:.1f}⟩ times the time; with the fewest it has", end=" ")
print(f"⟨{of_fewest:.1f}⟩ times the instructions, with the most ⟨{of_most:.1f}⟩ times:")
print(f"so the one that ran is nearest to the copy with ⟨{nearest}⟩")

# %% [markdown]
# First compare the loop of groups with the same loop of unknown size. Both ask for the same sums across
# lanes. So where the first is several times slower, the sums are not the reason, and neither is the
# scale. The last lines tell the reason: if the measured ratio is near that of the copy with the most
# instructions, 3 and more per weight, the loop takes one number at a time and uses no lanes at all. (A
# loop's slowest copy may do little of the work: only the time tells.) If the ratio is near that of the
# fewest, your compiler did better, and the first two loops differ by little.
#
# <details><summary>Why a compiler uses no lanes here</summary>
#
# LLVM does so on some processors with AVX-512, for example. Since the size is the constant 32, it writes
# the inner loop out as 32 steps, and no inner loop is left to lay along the lanes. It then tries to put
# one number of each of sixteen groups into the lanes. These numbers lie 32 apart in memory, which it
# cannot know, since the distance is read from the array. The copy that it made works only if they are
# neighbours. So the program takes the other copy.
#
# </details>
#
# Then compare the other two with a scale for each row. Their times need not differ as the
# instructions do, because a core starts several instructions in one cycle, and some find room beside
# others. So our count is no time. It says what must be done, and which of two loops has more to do.
# Whether that is seen when the weights come from memory, and all loops may wait for the same bytes, is
# what figure 34.6 measures, with all loops in turns.
#
# So a scale for each 32 can be cheap already. Where the count still matters (several tokens at
# once, a fast memory, short registers), two ideas make it smaller. The first is to multiply
# integers inside a group: no conversion of weights, and with VNNI 9 instructions in place of 36
# (each takes 4 bytes in each of 16 lanes, and 576 / 64 = 9). The second is to turn the matrix.
#
# ## Integers inside a group
#
# If the inputs are bytes, too, a group's dot product is made of whole numbers, and both scales wait
# outside:
#
# $$y_r \approx \sum_{g} s_{rg}\, t_g \sum_{i} q_{rgi}\, p_{gi}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $q_{rgi}, s_{rg}$ | bytes and scale of row $r$, group $g$ | `codes`, `scales` |
# | $p_{gi}, t_g$ | bytes and scale of the inputs' group $g$ | `inputs`, `input_scales` |
# | $y_r$ | the product of row $r$ | the result |
#
# By hand, one row with two groups of two: $q = (3, -2), (10, 1)$ with $s = 0.5, 0.1$, and
# $p = (5, 4), (2, -7)$ with $t = 2, 1$. The integer sums are $15 - 8 = 7$ and $20 - 7 = 13$, so
# $y = 0.5 \cdot 2 \cdot 7 + 0.1 \cdot 1 \cdot 13 = 8.3$. The inner sum needs no float at all, which
# is what VNNI and `sdot` are made for. It needs up to 20 bits, one of them the sign:
# $32 \cdot 127 \cdot 127 = 516{,}128$.

# %%
task(34, "multiply_bytes")

# %%
# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_bytes
import numpy as np


def multiply_bytes(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Compute a matrix times a vector, float32, [rows], from bytes and their scales.

    `codes` are int8, [rows, groups, size], with `scales` float32, [rows, groups]; `inputs` are
    int8, [groups, size], with `input_scales` float32, [groups]. A number is byte x scale.
    """
    raise NotImplementedError  # your turn


# %%
in_bytes = check(34, multiply_bytes=multiply_bytes)
reveal(34, multiply_bytes=in_bytes)
input_codes, input_scales = to_bytes(x[None], 32)
by_hand = in_bytes(codes[:512], scales[:512], input_codes[0], input_scales[0])
off = np.abs(by_hand - weight[:512] @ x).max()
most = np.abs(weight[:512] @ x).max()
print(f"512 rows: the largest error is {mark(off)}, of results up to {most:.0f}")

# %% [markdown]
# ## A row for each lane
#
# By rows, a register of 64 bytes holds two groups of one row. One byte instruction multiplies all of
# it, and then the group is over: what the lanes hold must become floats, must be multiplied by two
# scales, one in each half of the lanes, and be added to the total. So *each* byte instruction
# has its own conversion, multiplication and FMA. (The lanes stay apart as above; one sum across them
# ends the row.)
#
# Do not lay a row along the lanes. Lay sixteen rows *across* them: lane $l$ belongs to row $l$ from
# beginning to end. A group then takes eight byte instructions, one after the other into the same
# register, before its integers must become floats: one conversion for eight. The sixteen rows' scales of
# a group are a register as well, so one load fetches them and one instruction multiplies by all of
# them. And each lane adds up its own row, so even the sum at the row's end is gone.
#
# | per row of 576 | byte instructions | conversions, multiplications, FMAs | sums across lanes |
# |---|---|---|---|
# | by rows | 9 | 9 of each | 1 |
# | sixteen rows across the lanes | 144 / 16 = 9 | 18 / 16 = 1.1 of each | 0 |
#
# For that, weights must lie in memory in the order in which they are loaded. The four bytes that a
# lane takes at once are a **word**; a group of 32 bytes is 8 words. A **panel** is a block of
# sixteen rows, in which the same word of all sixteen rows lies side by side. (Panels are one kind
# of [packed weights](../docs/glossary.md#packed-weights).) In figure 34.4 each row is a row of our
# matrix, each column a word, and the number in a field is its place in memory. Coloured fields are
# one load of sixteen words, orange ones belong to the chosen row. The strips below show whose words
# the lanes hold. Move the load, and follow one row.

# %%
explore(
    draw.loads,
    "The first sixteen rows of our matrix, and what one load takes: two groups of one row if the matrix "
    "lies by rows, one word of every row in a panel.",
    "34.4",
    load=(0, 7, 1, 2),
    row=(0, 15, 1, 5),
)

# %% [markdown]
# For row $r = 16p + l$ (here $p$ is the panel, and $l$ the lane), group $g$ of $G$
# and word $w$ of $W$, the place is
#
# $$\text{place} = \big((p\,G + g)\,W + w\big) \cdot 16 + l$$
#
# By hand: row 21 of our matrix is lane 5 of panel 1, since $21 = 16 \cdot 1 + 5$. With $G = 18$ and
# $W = 8$, word 5 of its group 2 goes to place
# $((1 \cdot 18 + 2) \cdot 8 + 5) \cdot 16 + 5 = 2{,}645$. By rows, place $= (r\,G + g)\,W + w$, it would
# have been $(21 \cdot 18 + 2) \cdot 8 + 5 = 3{,}045$.

# %%
task(34, "by_panels")

# %%
# exercise: minigen.kernels.cpu.packed_weights.by_panels
import numpy as np


def by_panels(rows: np.ndarray) -> np.ndarray:
    """Pack [rows, groups, words] into panels, a flat array of [panels, groups, words, lanes]."""
    raise NotImplementedError  # your turn


# %%
pack = check(34, by_panels=by_panels)
reveal(34, by_panels=pack)

# %% [markdown]
# ## A register as a value
#
# Numba compiles code for one number at a time, and its compiler, LLVM, has to find the vectors by
# itself. The package adds one type, whose values are sixteen lanes: `load` fills them, `+` and `*`
# work on all of them, `store` writes them back. `fused(a, b, c)` is an FMA, $a \times b + c$.

# %%
from minigen.kernels.cpu.simd import fused, load, store


@njit
def lanes_at_work(a, b, c):
    sums, products = load(a, 0) + load(b, 0), load(a, 0) * load(b, 0)
    store(c, 0, sums)  # sixteen numbers from place 0 on
    store(c, 16, fused(products, load(b, 0), load(a, 0)))


a, b, c = np.arange(16, dtype=np.float32), np.full(16, 10, np.float32), np.empty(32, np.float32)
lanes_at_work(a, b, c)
print("a + b:         ", *(f"{each:.0f}" for each in c[:16]))
print("a * b * b + a: ", *(f"{each:.0f}" for each in c[16:]))

# %% [markdown]
# For bytes there is `add_byte_dots`. Figure 34.5 shows one call on our matrix: in
# each lane four weights of one row (blue; 128 was added to each, as explained below) meet the same
# four inputs (yellow), and the four products are added to the lane's sum (green). Lane 0 by hand:
# $124 \cdot 20 + 128 \cdot (-78) + 121 \cdot 22 + 192 \cdot (-6) = -5{,}994$. With
# AVX512-VNNI the call is one instruction, `vpdpbusd` (with AVX-VNNI, the same instruction
# without AVX-512, two of 256 bits); elsewhere the package asks for others, such as ARM's `sdot`,
# with the same whole numbers as result.
#
# `vpdpbusd` wants one side unsigned, so 128 is added to the codes of the weights. That is taken
# back by one number for each group of inputs, because
#
# $$\sum_i q_i\, p_i = \sum_i (q_i + 128)\, p_i - 128 \sum_i p_i$$
#
# By hand, with $q = (3, -2)$ and $p = (5, 4)$:
# $131 \cdot 5 + 126 \cdot 4 - 128 \cdot 9 = 1{,}159 - 1{,}152 = 7$, as before. (Below, `(0,)` stands for
# one row of inputs; the next section says why.)

# %%
from minigen.kernels.cpu.register_tiles import (
    add_byte_dots,
    add_scaled,
    spread_numbers,
    store_tile,
    zeros,
)

NOTHING = np.zeros(1, np.int32)


@njit
def one_load(tokens, words, inputs, out):
    sums = spread_numbers(tokens, NOTHING, 0, 0)  # the number NOTHING[0] in all lanes
    sums = add_byte_dots(sums, load(words, 0), inputs, 0, 0)  # inputs[0] is four bytes
    store_tile(out, 0, 16, sums)


unsigned = codes.view(np.uint8) ^ np.uint8(128)  # flips the sign bit: the same as adding 128
words = pack(unsigned.view(np.int32))
input_words = input_codes.reshape(-1).view(np.int32)
sums = np.empty(16, np.int32)
one_load((0,), words, input_words, sums)
first_four = unsigned[:16, 0, :4].astype(int), input_codes[0, 0, :4].astype(int)
assert sums.tolist() == (first_four[0] @ first_four[1]).tolist()
picture(
    draw.byte_dots(first_four[0], first_four[1].tolist(), sums.tolist()),
    "Sixteen rows of our matrix, a lane for each: four weights, the same four inputs in every lane, "
    "and the sums of their products.",
    number="34.5",
)
(code,) = one_load.inspect_asm().values()
measured("vpdpbusd in this function's machine code", code.count("vpdpbusd"))

# %% [markdown]
# A 0 in the last line means that your processor has no `vpdpbusd`; Apple's chips, for example, have
# none. The sums in the figure are the same.
#
# ## The product in panels
#
# Now the whole kernel, the inner loops of which are called a
# [microkernel](../docs/glossary.md#microkernel). Its outer loop shares panels among the threads.
# For each group it starts at $-128 \sum p$ (`start` in the code), adds up eight words of byte products,
# and multiplies the sixteen integers by sixteen scales and the input's one.
#
# `tokens` is a tuple; only its length counts, and the compiler knows it. It says how many rows of inputs
# are computed at once, each with sums of its own. Here it is 1; the next section uses more. A *tile* here
# and below is one register for each token, and a call such as
# `add_byte_dots(dots, weights, inputs, place, apart)` takes the four input bytes of token $t$ from
# `inputs[place + t * apart]`: tokens lie one after the other, `groups * 8` words and `groups` scales
# each. (`spread_numbers` and `add_scaled` take a token's numbers in the same way; the latter adds the
# dots times the lanes' scales times the token's.)
#
# To learn what the *layout* brings, compare it with a kernel that differs in nothing else. So
# `product_by_rows` does the same sums of integers, with the same byte instruction, with the matrix
# by rows and the lanes apart until the row's end. A register of it has two groups, so its inputs,
# its starting sums (`start`) and its scales differ from lane to lane. (`add_lane_dots` is the byte
# instruction with other inputs in each lane, `two_scales` puts one scale into lanes 0 to 7 and the
# next into 8 to 15, and `in_floats` converts.) (On ARM processors that cannot multiply unsigned
# bytes by signed ones, such as Apple's M1, the byte instruction is made of two. In panels the
# second one serves all lanes, by rows it does not. So there the comparison shows more than the
# layout.)


# %%
from minigen.kernels.cpu.simd import all_lanes, sum_of_lanes
from minigen_course.ch34_cpu_kernels.loops import add_lane_dots, in_floats, two_scales


@njit(parallel=True)
def product_of_panels(tokens, words, scales, inputs, input_scales, start, groups, out, width):
    for panel in prange(width // 16):
        for first in range(0, len(input_scales) // groups, len(tokens)):  # first token of the tile
            total = zeros(tokens)  # sixteen float sums for each token
            for group in range(groups):
                at, own = panel * groups + group, first * groups + group  # of weights, of inputs
                dots = spread_numbers(tokens, start, own, groups)  # -128 x the sum of the inputs
                for word in range(8):
                    weights = load(words, (at * 8 + word) * 16)  # place, as in the formula above
                    dots = add_byte_dots(dots, weights, inputs, own * 8 + word, groups * 8)
                total = add_scaled(total, dots, load(scales, at * 16), input_scales, own, groups)
            store_tile(out, first * width + panel * 16, width, total)


@njit(parallel=True)
def product_by_rows(words, scales, inputs, input_scales, start, groups, out, width):
    for row in prange(width):
        total = all_lanes(np.float32(0))  # sixteen parts of one row's sum
        for pair in range(groups // 2):  # two groups in a register
            at = pair * 16
            dots = add_lane_dots(
                load(start, at), load(words, row * groups * 8 + at), load(inputs, at)
            )
            both = two_scales(scales, row * groups + 2 * pair) * load(input_scales, at)
            total = fused(in_floats(dots), both, total)
        out[row] = sum_of_lanes(total)  # once for each row


def as_inputs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales and starting sums of some tokens' inputs."""
    numbers, input_scales = to_bytes(rows, 32)
    start = -128 * numbers.sum(axis=-1, dtype=np.int32)
    return numbers.reshape(-1).view(np.int32), input_scales.reshape(-1), start.reshape(-1)


panel_scales, groups = pack(scales[..., None]), width // 32
one = as_inputs(x[None])
of_lanes = np.repeat(one[1], 8), -128 * input_codes.reshape(-1, 4).sum(axis=-1, dtype=np.int32)
row_words = unsigned.reshape(-1).view(np.int32), scales.reshape(-1), one[0], *of_lanes


def products_of_integers(num_rows):
    """Both kernels of integers, for the first rows."""
    panels = partial(product_of_panels, (0,), words, panel_scales, *one, groups, out)
    return {
        "integers by rows": partial(product_by_rows, *row_words, groups, out, num_rows),
        "panels": partial(panels, num_rows),
    }


for run in products_of_integers(num_rows).values():
    run()
    np.testing.assert_allclose(out[:512], by_hand, atol=1e-3)
print("Both kernels' first 512 products are those of multiply_bytes, but for rounding.")

# %% [markdown]
# Now all products in turns: in each of five rounds each runs once (and once before it, which is not
# counted), and the fastest run of each counts. The sum of the first cell takes part as well. $B$ becomes
# the largest of these rates and the first cell's, so no bar can pass it. (*Ten lines against a library*
# was timed at another moment, and may have read faster.) If a loop over floats set it (268 MB in the sum,
# 302 MB in the products), memory itself delivers nearly as much: a cache can keep no more of it than its
# own size, which is little unless the cache is very large, as in some servers. If the 75 to 85 MB of
# bytes set it, a large cache may have kept a part of them, and memory itself may be slower.

# %%
panel_bytes = words.nbytes + panel_scales.nbytes
readers = {  # name: bytes, run
    "sum of the first cell": (numbers.nbytes, partial(add_up, numbers)),
    "torch, float32": (weight.nbytes, partial(torch.nn.functional.linear, *of_torch[::-1])),
    "our loop, float32": (weight.nbytes, partial(product, weight, x, out)),
}
for name, run in {**products_of_bytes(num_rows), **products_of_integers(num_rows)}.items():
    readers[name] = by_row[0].nbytes if "each row" in name else panel_bytes, run
seconds = best_in_turns({name: run for name, (_, run) in readers.items()}, 5)
rates = {name: readers[name][0] / each for name, each in seconds.items()}
print(f"B so far: {mark(bandwidth / 1e9, 'GB/s')}, from here on:", end=" ")
bandwidth = max(bandwidth, *rates.values())
print(mark(bandwidth / 1e9, "GB/s"))
picture(
    draw.bars(
        {name: each / 1e9 for name, each in rates.items()},
        bandwidth / 1e9,
        "GB per second",
        "How fast each loop reads, for one token",
    ),
    "A sum and eight products, each with the bytes per second that it reads. The line is B, the "
    "fastest of these loops and of the first cell. A bar near the line can belong to a loop that waits for memory.",
    number="34.6",
)
in_cache = best_in_turns({**products_of_bytes(few), **products_of_integers(few)}, 50)
for name, each in rates.items():
    print(f"{name:>24}: {mark(100 * each / bandwidth, '%')} of B", end=", ")
    print(f"from memory {mark(1e6 * seconds[name])} µs", end="")
    in_parts = f", in a cache {num_rows // few} x" if name in in_cache else ""
    print(f"{in_parts} {mark(1e6 * in_cache[name])} µs" if in_parts else "")
print(f"times as fast, from memory and ({few} rows) in a cache:")
for one_name, other in (
    ("lanes kept apart", "a part for each group"),
    ("lanes kept apart", "the same, size unknown"),
    ("integers by rows", "lanes kept apart"),
    ("panels", "integers by rows"),
):
    gains = [mark(each[other] / each[one_name]) for each in (seconds, in_cache)]
    print(f"{one_name:>18} against {other}: {gains[0]}, {gains[1]}")
measured("panels: times as fast as torch in float32", seconds["torch, float32"] / seconds["panels"])
measured("  of it by fewer bytes", weight.nbytes / panel_bytes)
measured("  and by reading them faster", rates["panels"] / rates["torch, float32"])

# %% [markdown]
# Each bar says how fast a loop *reads*, not how fast it is done: panels have 3.6
# times fewer bytes than float32 (our scales are float32, so 8 + 32/32 = 9 bits per weight), so at
# an equal bar they are done 3.6 times as fast. The last two lines split the gain over torch into
# these two factors. (They multiply to the line above them.)
#
# Which loops wait for memory? Those that are much faster in a cache: compare 128 times a loop's µs in a
# cache (1,024 rows are 1/128 of all) with its time from memory. A long bar alone does not say so. Do it
# for *panels*, and for *the same, size unknown*: in the latter the instructions can take nearly as long as the
# bytes. (The 128 also count the start of the threads 128 times, a few µs each. So a loop can wait for memory
# more than this shows.)
#
# The first two lines under *times as fast* compare *lanes kept apart* with two other loops (with four
# lanes it needs more instructions than they, so there it may be the slower one). Against *a part for each
# group* it saves the slow copy, if that ran, and the sums across lanes. Against *the same, size unknown*,
# which uses lanes too, it saves the sums and the costs of short loops, and pays for spreading and
# multiplying by the scales. In the third line floats become integers. That saves instructions, which
# counts in a cache; from memory it may gain nothing, or lose. The last line is what panels bring: the
# layout and nothing else. From memory that is next to nothing where the loop by rows reaches the line as
# well. In a cache it is a part of what the layout saves in instructions, and these become the limit when
# there are several tokens.
#
# <details><summary>Why loops that wait for memory differ, and why the gain in a cache is only a part</summary>
#
# - A core does not stop at a load. It looks several hundred instructions ahead, and starts the
#   loads among them. So a loop with fewer instructions per byte can have more loads under way at
#   once. This is one reason for a longer bar, and not the only one: how far ahead a core prefetches
#   depends on the order of a loop's loads, too, which the counts do not say. So a loop with fewer
#   instructions can have the shorter bar.
# - The loops over bytes read only 75 to 85 MB, and a large cache keeps a larger part of these than of the
#   sum's 268 MB. So the sum of the first cell need not be the longest bar.
# - Compare the bars with each other, and not with other cells' times, which were taken at other moments,
#   one loop at a time.
# - With AVX-512 panels need about 27 instructions per row (about 24 for each of 18 groups: 8 loads,
#   8 byte instructions, the rest for start, scales and the loop; shared by 16 rows), and the loop
#   by rows about 90 (about 9 for each of 9 registers, the rest for the row's end). In a cache
#   panels gain less than that, because calling the function from Python and starting its threads
#   take a few µs of each, and because they may come near what the L2 cache (figure 34.1) delivers.
# - Real programs report gains of this kind, though their kernels for prompts also multiply several tokens
#   by each load, as the next section does. With 6-bit weights in panels (it says
#   *repack*), llama.cpp on two ARM processors, by `sdot` alone,
#   [reads prompts](https://github.com/ggml-org/llama.cpp/pull/19360) 2.6 to 3.15 times
#   as fast, and generates 0.93 to 1.29 times as fast.
#
# </details>
#
# ## Tiles: one load for several tokens
#
# The tokens of a prompt come many at a time, and so do those of several requests. A register of
# weights that was loaded once can serve each of them, which is what `tokens` is for. The next cell
# takes up to eight tokens to a tile. Operations grow with the tokens. The bytes of the weights do
# not, only those of the results, 4 for each token and row (and those of the inputs, too few to
# matter). So the [arithmetic intensity](../docs/glossary.md#arithmetic-intensity) grows, until
# arithmetic is the limit.
#
# By hand, for 64 tokens: $2 \cdot 64 \cdot 131{,}072 \cdot 576 = 9.66$ billion operations, 84.9 MB of
# weights and scales, and $64 \cdot 131{,}072 \cdot 4$ bytes $= 33.6$ MB of results, so 82 operations per
# byte. (Without the results it would be 114. A row of 576 weights has one result for each token. The
# longer the rows, the less the results count.)

# %%
guess_tiles = predict("64 tokens at once take how many times the time of one?", None, within=2)

# %%
by_tokens, outs = {}, np.empty(64 * num_rows, np.float32)
for n in (1, 4, 8, 16, 64):
    rows = rng.standard_normal((n, width), dtype=np.float32)
    tile = (0,) * min(n, 8)
    run = partial(product_of_panels, tile, words, panel_scales, *as_inputs(rows), groups, outs)
    taken = best_seconds(partial(run, num_rows), 3)
    moved = panel_bytes + n * num_rows * 4  # weights are read, results written
    by_tokens[n] = Step(moved, 0, 2 * n * num_rows * width), taken
of_few = best_seconds(partial(run, few))  # still the run of 64 tokens; now on 1,024 rows
fastest = (step.flops / each for step, each in by_tokens.values())
peak = max(2 * 64 * few * width / of_few, *fastest)
bandwidth = max(bandwidth, *(step.num_bytes / each for step, each in by_tokens.values()))
placed = {f"{n} token{'s' * (n > 1)}": each for n, each in by_tokens.items()}
picture(
    roofline(Machine("this machine", bandwidth, peak), placed, "billion operations per second"),
    "A roofline for bytes. Each point is the same kernel with some tokens at once; the slope is B, "
    "the most that a loop has moved here or in figure 34.6, the flat part the fastest that this kernel "
    "ran here, with all rows or with 1,024 in a cache.",
    number="34.7",
)
for n, (_, taken) in by_tokens.items():
    print(f"{n:>2} at once: {mark(taken / by_tokens[1][1], 'times the time of one', 2)}")
guess_tiles.compare(by_tokens[64][1] / by_tokens[1][1], "times", measured=True)
print(f"B is now {mark(bandwidth / 1e9, 'GB/s')}")
print("\nan Intel Xeon; 10^9 bytes and operations per second, ridge in tokens:")
print(lesson.table_of_roofs())

# %% [markdown]
# Read the [roofline](../docs/glossary.md#roofline) as in chapter 17. Left of the ridge, a step that
# lies on the roof waits for memory, and another token costs little. Right of it each token costs
# its arithmetic, as those of a long prompt do. The shaded gap above a point is how far it stays
# below its limit: that step takes longer than the roof says. Near the ridge a gap is usual, because
# reading and computing overlap only in part. Tokens beyond eight take further tiles. So where 8
# tokens have reached the flat part, 16 take about twice their time. If 8 still wait for memory, it is less.
#
# <details><summary>What the figure does not show</summary>
#
# - A set of instructions also says how many SIMD registers there are: 16 with AVX2, 32 with AVX-512. What
#   does not fit into them is stored in the cache and loaded again, which takes instructions. A tile needs
#   sixteen lanes twice for each of its tokens, for a total and for the integer dots. With AVX2 these are
#   four registers for each token, so eight tokens need 32 of 16. With AVX-512 they need 16 of 32. In int8
#   and int4 the package's tiles stop at four tokens with both, because more were slower. (On Intel's
#   AVX-512 a tile has six tokens and two panels. Each number of the inputs is then loaded once for 32
#   rows of weights, and twelve sums, which do not wait for each other, fill the time between start and
#   result.)
# - The order of the instructions decides, too, what has to fit at the same time. A group of int4 has sixteen
#   registers of codes with AVX2. LLVM ordered the products by token, so every token needed all of them, and
#   they were loaded from the cache again and again. Now each register of codes is multiplied for all four
#   tokens before the next one is loaded. On a processor with AVX2 and no more, 32 sequences were 1.33
#   times as fast with it, the median of five runs ([measured there](../benchmarks/results/34_tried.md#processors-with-avx2-and-no-more)).
# - Both limits are the best of these cells, so a point can lie on them and none above. The flat part is
#   often that of 64 tokens with only 1,024 rows, whose weights and results a cache holds. So points far
#   right of the ridge can stay below it.
# - A point that set a limit lies on it by definition. If one token did so, and the B printed below the
#   figure is larger than that of figure 34.6, a cache may have kept a part of the 85 MB, and then the
#   slope is that of memory and cache together. Or other programs left more of the memory than before.
# - Results are counted once, as bytes that are written. Many processors read a line from memory before they
#   write to it. Then the points of many tokens have moved more than they are given here, and lie too far to
#   the right.
#
# </details>
#
# ### One processor, four sets of instructions
#
# A roofline shows what programs have reached on a machine. The table below the figure is about one
# processor, an Intel Xeon (two cores of a rented server, a thread on each). For each line, Numba was
# allowed other instructions, those of the last three lines of the table in *What a processor has*,
# with AVX2 twice. (BF16 is an instruction, `vdpbf16ps`: in each lane it multiplies two bfloat16 numbers
# by two others, and adds both products to the lane's float32 sum. Without it, bfloat16 numbers become
# float32 and are multiplied by FMAs, so VNNI, which is for bytes, changes nothing for them.) The slope comes from
# a sum over 268 MB, the flat part from the package's products of 256 tokens, with weights that a
# cache holds. Each number is the median of several runs. [The benchmark](../benchmarks/34_roofs.py) prints the
# first four numbers for your machine, and with `--pretend avx2` those for fewer instructions.
# (Compare the table's lines only with each other: figure 34.7 shows your machine and a simpler kernel, whose
# inputs have no zeros (*Zeros and minima* below explains them), and takes its fastest run. And compare
# numbers one below the other, not side by side: int4 and bfloat16 were measured with matrix rows of
# 1,536 weights, int8 with rows of 576, which have more results for each weight, and results take time,
# too. Five things are newer than the table: how minima are stored (int4); the twelve chains of the third
# point below, for which int4's codes are unpacked once for all tokens (third line); inputs that stay
# float32 where no instruction multiplies bfloat16 (bfloat16, first two lines); the order of the products
# that is explained under the figure above (int4, first line); and that BF16 is not used any more (bfloat16,
# third line).)
#
# The last column is the ridge in tokens, for weights in int8. Each token takes part in two operations
# with a weight, which has 8.5 bits, so $n$ tokens give $2n / (8.5/8) = 1.88\,n$ operations per byte
# (results, which are few bytes here, are left out). By hand, for the first line: its ridge is at
# $166 / 32.9 = 5.05$ operations per byte, and $5.05 / 1.88 = 2.7$ tokens.
#
# - Memory is the same in all lines. (The differences are probably chance, since others use the
#   server, too, and its last cache may keep a part of the sum. A computer with AVX2 has another
#   memory, and so another slope.) Every ridge is right of one token, so by the roofline one token
#   waits for memory in all four. (The flat part is that of 256 tokens, which share loads and
#   some sums over the weights (*Zeros and minima*). One token pays for them alone and computes more
#   slowly, so in the first line it may be near its limit in arithmetic, too.)
# - Better instructions raise the flat part, which makes prompts and batches faster. In int8, VNNI gives twice the
#   operations on registers of the same width, AVX-512 three tenths more, and AMX a tenth more
#   than that (perhaps nothing more since the change in the next point). In bfloat16 nearly all of the
#   gain is AMX's. AVX-512 and BF16 together brought 8 %. A likely reason was measured on the next series of
#   these processors (Emerald Rapids, with AMX hidden): a core starts `vdpbf16ps` only every other cycle, and
#   has the time for four FMAs in these two cycles. So FMAs do twice the multiplications, and unpacking
#   costs less than that. Without the instruction, a prompt of 512 in bfloat16 was 1.4 times as fast there
#   ([measured there](../benchmarks/results/34_tried.md#an-instruction-that-is-slower-than-what-it-replaces)),
#   so minigen no longer uses it on Intel's processors. AMD's Zen 4 starts it every cycle.
# - Why does AVX-512 bring only three tenths in int8, although its registers are twice as wide? Probably its
#   instructions wait. The result of a byte instruction is ready five to six cycles after its start, at either
#   width, and this core can start two in each cycle. So ten or more must be under way to keep it busy. Byte
#   instructions that add to the same register form a **chain**: each waits for the one before it. A tile of four
#   tokens has four chains with AVX-512. With AVX2 it has eight, of half the width, because sixteen lanes take two
#   registers. So while all chains wait, both compute equally much. (They do not always wait: a chain ends with its
#   group, and the core starts the next group's before that.) Since this table was measured, minigen gives
#   each token two chains on Intel's AVX-512, and adds them at the group's end. On another Xeon, whose AMX a
#   rented machine hides, one thread then did 355 billion operations per second instead of 315, on rows of 576
#   ([measured there](../benchmarks/results/34_tried.md#prompts-on-intels-avx-512-without-amx)). Two chains for four
#   tokens are eight, still fewer than ten. Six tokens with two panels have twelve, one for each token and panel, and
#   nothing to add up: 1.15 times as fast again. Both together explain
#   most of the missing factor: $1.3 \cdot 1.13 \cdot 1.15$ is 1.7 and not 2. (Of a group's operations
#   for a token four are no byte instructions, and take their places: three convert and scale, one adds what zeros and
#   offsets give. In the table, $458 / 2 = 229$ billion are a thread's. The table's processor is another one; why it is
#   slower was not measured. With AVX2, two chains were not tried.)
# - Why is AMX so good at bfloat16 alone? minigen uses its instruction for bfloat16 with weights in int4
#   and int8, too. (There is one for bytes, twice as fast, because it takes 64 weights of a matrix row
#   instead of 32. But a scale is of 32, so half of it would be idle, and its speed that of bfloat16's.
#   And bfloat16 holds whole numbers up to 256 exactly. It holds 256 times a code of int4, too, since a
#   code has only four bits, and 256 only moves them; why 256, see *Zeros and minima* below.) With
#   weights in bfloat16 a sum stays in its AMX tile for 512 columns of 1,536, or all of 576. In int8 and
#   int4 it leaves after each 32, to be multiplied by their scales with vector instructions, 48 times in
#   a row of 1,536. This, converting the codes, and more loads of AMX tiles cost over a third of the
#   speed in int4 (632 against 1,001, both on rows of 1,536). (int8's 506, on other rows, only hints
#   that it loses more.) (An AMX tile is a register, and not the tile of several tokens above.)
# - With AMX the ridge is only a calculation. minigen's AMX tiles always compute sixteen tokens, with
#   codes that are converted to bfloat16 first. In int8 they were found faster from 48 tokens on, when
#   vectors had one chain for each token. For fewer tokens minigen uses the instructions of the line
#   above. With these, as the table measured them, the ridge is at $458 / 34.0 / 1.88 = 7.2$ tokens (7.6
#   in the table, where reading was slower).
#
# ## What bytes as inputs cost
#
# Weights are rounded once. Inputs are rounded at every product, and they have outliers. Figure 34.8
# shows what the last product of layer 28 gets for the first token of our text: each dot is one of
# 1,536 inputs, by its magnitude. Below a line, a number is less than half a step and becomes 0.
# Below the figure the whole model runs with inputs that are rounded in three ways.

# %%
guess_scale = predict(
    "One scale for all inputs of a product: % of the same next tokens?", None, within=1.25
)

# %%
given = lesson.inputs_of_down(llm, pieces[0], 28)[0].numpy()
picture(
    draw.steps_of_scales(given),
    "Magnitudes of one token's inputs. The orange line is half a step if all of this token's share one "
    "scale, the blue line half a step with a scale for each 32.",
    number="34.8",
)
exact = [lesson.scores(llm, piece) for piece in pieces]
kinds = {"one scale": "text", "a scale per token": "token", "a scale for each 32": 32}
print(f"{'float32':>20}: perplexity {mark(perplexity_of(exact, pieces))}")
for name, share in kinds.items():
    found = [lesson.scores(llm, piece, lesson.rounded(share, to_bytes)) for piece in pieces]
    same = mark(100 * agreement(found, exact), "%")
    print(f"{name:>20}: perplexity {mark(perplexity_of(found, pieces))}, same next token {same}")
    if share == "text":
        guess_scale.compare(100 * agreement(found, exact), "%", measured=True)

# %% [markdown]
# One outlier sets the step of all numbers that share its scale. With one scale for all inputs of a
# product, these are the numbers of forty tokens; with a scale per token, those of this token; with
# a scale for each 32, its 31 neighbours. The token of the figure is the first one, the sink of
# chapter 14, with the largest outlier of the forty. So nearly all of its own inputs become 0 in the
# first two ways, and a scale per token helps the other tokens. In panels the scales of groups cost
# little, because they come once in eight words. (By the same next token, 80 tokens show the order
# of the three. By perplexity they show that one scale is far worse than the other two, whose
# difference they are too few to tell. The section on quality takes more tokens, and an interval.)
#
# ## Zeros and minima
#
# The package's inputs have a **zero** for each 32: an integer $z$ that is added to each byte, so
# that 254 steps reach from the smallest number to the largest. (With a scale alone, a group that
# lies on one side of 0 wastes the half of its codes that has the other sign.) (So $t$ is the range
# / 254, and $z$ the smallest number over $t$, rounded, plus 128: the smallest number gets the byte
# -128, and $z$ is at most 128. The byte of an input $x_i$ is $b_i = \operatorname{round}(x_i / t) -
# z$, so $-z$ stands for the number 0.) (The range always includes 0, so that a 0 stays a 0. A byte
# has 256 values, so 255 steps would fit. One is left free, because the rounding of floats can put
# an end one step further off.) And 4-bit weights have a **minimum** $m$ (chapter 11). An input is
# $(b_i + z)\,t$, and a weight $c_i\,s + m$. Neither addition may happen inside the sum: $b_i + z$
# is an integer, but from -254 to 254 and so no byte any more, which the byte instructions need, and
# with $m$ a weight is no longer an integer times $s$, so that $s$ could not wait outside the sum.
# Multiplied out over the 32 columns of a group:
#
# $$\sum_i (b_i + z)\,t\,(c_i\,s + m) = t \Big[ s \Big( \sum_i b_i c_i + z \sum_i c_i \Big) + m \Big( \sum_i b_i + 32\, z \Big) \Big]$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $b_i, t, z$ | byte, scale and zero of the inputs | `inputs.numbers`, [tokens, groups, 32], `.scales`, `.zeros`, [tokens, groups] |
# | $c_i, s, m$ | code (0 to 15; chapter 11 calls it a level), scale and minimum of the weights | `weights.codes`, [rows, groups, 32], `.scales`, `.minima`, [rows, groups] |
#
# By hand, with two columns instead of 32 (so $2z$ instead of $32z$), $b = (3, -1)$, $z = 2$,
# $c = (4, 10)$, $m = -5$, $s = t = 1$. Directly: $5 \cdot (-1) + 1 \cdot 5 = 0$. By the formula:
#
# | $\sum b_i c_i$ | $z \sum c_i$ | $m (\sum b_i + 2z)$ | together |
# |---|---|---|---|
# | $12 - 10 = 2$ | $2 \cdot 14 = 28$ | $-5 \cdot (2 + 4) = -30$ | $0$ |
#
# Per group, panel and token, there are eight byte instructions. (The low four bits of a word's bytes are
# one word of codes, the high four another.) Four more multiplications follow: $z$ with the sum of the
# codes, $s$ with $t$, their product with the integers' sum, and one for $m$. (Its factor, $t\,(\sum b_i +
# 32\,z)$, is computed once, with the inputs. And $\sum c_i$, which all tokens share, takes eight byte
# instructions for each group of a panel. With five tokens or more on Intel's AVX-512 it takes one, because
# the codes are added as bytes first.)
#
# The package stores $m$ as an **offset** $o$, a whole number of 256ths of a step. On Intel's and
# AMD's processors that saves one of the four multiplications. (A step, from one code to the next,
# is $s$.) So $m \approx o\,s/256$, and since $\sum b_i + 32\,z = \sum (b_i + z)$, the formula
# becomes
#
# $$t\,s \Big[ \sum_i b_i c_i + z \sum_i c_i + \frac{o}{256} \sum_i (b_i + z) \Big]$$
#
# In the brackets, 256 times each term is a whole number. Intel's and AMD's processors have an instruction,
# `vpmaddwd`, that multiplies two 16-bit numbers by two others in each lane, and adds both products.
# It makes the last two terms at once (elsewhere they take two multiplications, as before):
#
# $$256 \Big( z \sum_i c_i + \frac{o}{256} \sum_i (b_i + z) \Big) = 4\,z \cdot 64 \sum_i c_i \;+\; o \cdot \sum_i (b_i + z)$$
#
# A token's pair, $4\,z$ and $\sum (b_i + z)$, is the same in all lanes; $64 \sum c_i$ and $o$ are each row's own.
# Why 4 times 64? A signed 16-bit number is at most 32,767, and $256 \sum c_i$ could be 122,880. But
# $64 \sum c_i$ is at most 30,720; $4\,z$ is at most 512, $\sum (b_i + z)$ at most 8,128. The 64 costs nothing: the
# sum of the codes is their dot product with ones, and here they meet 64s instead. The 4 is multiplied in once, with the
# inputs. Then the kernel shifts $\sum b_i c_i$ left by 8 bits, which makes it 256 times as large, adds these two products, and
# multiplies by $s\,t$. At the end the row's total is divided by 256, once.
# By hand, with the numbers above: $o = -5 \cdot 256 = -1{,}280$ and $\sum (b_i + z) = 6$. The two
# products are $8 \cdot 896 = 7{,}168$ and $-7{,}680$, together $-512 = 256 \cdot (28 - 30)$, and
# $256 \cdot 2 - 512 = 0$.
#
# Rounding changes $m$ by at most 1/512 of a step. (A GGUF file keeps $m$ in float16, which has already
# rounded a minimum of eight steps by up to 1/256 of a step (8 / 2¹¹). An offset is at most 32,767, up or
# down, so a minimum of 128 steps or more has none. The numbers of such a group are nearly equal; the
# package gives it wider steps, and rounds its codes again.) (In int8, 128 is added to each code, because
# the byte instruction wants it unsigned. So the offset is −128 for every group, a whole number of steps,
# and nothing is taken 256 times.) The exercise asks for the first formula, with $m$; the cell after it
# gives it minima that were rounded as offsets are.

# %%
task(34, "multiply_codes")

# %%
# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_codes
import numpy as np

from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows


def multiply_codes(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Compute inputs x weights^T, float32, [tokens, rows], from integer dot products and sums.

    Over a group, (byte + zero) x scale times (code x scale + minimum) adds up to two terms: (bytes
    x codes + zero x the sum of codes) times both scales, and (the sum of bytes + 32 x zero) times
    the input's scale and the weight's minimum.
    """
    raise NotImplementedError  # your turn


# %%
from minigen.kernels.panel_linear import panel_linear
from minigen_course.ch34_cpu_kernels.reference import byte_rows

my_product = check(34, multiply_codes=multiply_codes)
reveal(34, multiply_codes=my_product)
stored = read_gguf(hub.resolve(hub.DEFAULT_MODEL)).tensors
matrix = stored["blk.28.ffn_down.weight"]
made = lesson.round_weights(matrix.dequantize().numpy(), 4, 32)  # the file's own codes again
offsets = np.rint(256 * made.minima / made.scales)  # as the package stores minima
of_rows = CodeRows(
    made.codes.reshape(*made.scales.shape, 32), made.scales, offsets / 256 * made.scales
)
plain = my_product(of_rows, byte_rows(given[None]))
# It packs the matrix into panels (the empty list: no bias); the result multiplies.
compiled = panel_linear("int4", num_threads)([matrix], [])(torch.from_numpy(given)[None])
torch.set_num_threads(num_threads)  # the package's kernel left torch one, to have the cores itself
np.testing.assert_allclose(plain, compiled.numpy(), atol=1e-4 * np.abs(plain).max())
print(f"the {plain.size} products of the compiled kernel are the same, but for rounding")

# %% [markdown]
# ## Attention as two products
#
# A query times all keys, and the attention weights times all values: these are products, too, with
# the KV cache in the place of the weights. So the package keeps the KV cache in panels as well:
#
# | | a lane is | one word holds | it is multiplied by |
# |---|---|---|---|
# | weights, int8 | an output row | 4 columns of it | 4 inputs |
# | keys, bfloat16 | a token | 2 numbers of its key | 2 numbers of a query |
# | values, bfloat16 | a number of the head | this number of 2 tokens | 2 attention weights |
#
# In each of the three, a lane sums its own result from beginning to end. (With AMX, an AMX tile holds the
# sums of up to sixteen queries (a query is one head of one token), in another order.) With
# `kv_cache_dtype="int8"` keys and values are bytes, four to a word, with a scale for each token and head.
# Keys have outliers, so keys and queries are transformed first (Hadamard: sums and differences that
# spread a large number over 32 numbers of its head, and keep all dot products;
# [QuaRot](https://arxiv.org/abs/2404.00456)). The section on quality measures the result. (By
# default, the first model that is loaded in bfloat16, int8 or int4, or with a KV cache in int8,
# compiles the step for this form, once, which takes a while. `minigen compile` does it ahead.)

# %%
in_int4 = load_model(weights="int4")
texts = ids[:12], ids[50:60], ids[120:125]
alone = [read_along(in_int4, text).logits[0] for text in texts]
together = read_along(in_int4, *texts).logits
same_bits = all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
print("three texts together and each alone, the same to the last bit:", same_bits)
five, some = torch.from_numpy(weight[:5]), of_torch[0][:4096]
differ = (five @ some.T)[:1] != five[:1] @ some.T
measured("torch, a row among five and alone: of 4,096 numbers differ", float(differ.sum()))

# %% [markdown]
# A lane adds its products in one order, whatever the other registers hold. So with the package's
# kernels your answer does not depend on the other requests of the step. A library may choose another order of sums for another
# number of rows, and rounds otherwise; where it does, the second line is not 0. ([He
# 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) calls the
# property *batch invariance*, and shows what is lost without it.)
#
# ## Threads, phases and barriers
#
# One product is not a step. A step of this model has 30 layers with four products each, and each
# needs the result of the one before. So all threads work on one **phase** (a product, a norm,
# attention), which is cut into **tasks** (some panels, some rows), wait at a barrier, and go on to the
# next.
#
# If each thread has a fixed share of a phase, the slowest decides. Say that another program takes
# thread 1's core for a while (grey in figure 34.9). In the left picture all others wait (dotted)
# until it has come back and done its whole share. In the right one a thread without tasks of its
# own takes over tasks of others (green): **work stealing** ([Blumofe and Leiserson
# 1999](https://doi.org/10.1145/324133.324234)). The others wait only for the task that thread 1 had
# started. The picture is computed for four threads with six equal tasks each; drag the time
# that the core is away.

# %%
explore(
    draw.phase,
    "One phase with a barrier at its end. Blue tasks run on their own thread, green ones were taken "
    "over, grey is the time that the core is away, dotted is waiting.",
    "34.9",
    away=(0, 12, 1, 6),
)

# %% [markdown]
# The package's step is one compiled function that every thread goes through, phase by phase. The threads
# live as long as the program; a step wakes each at most once. Between phases they read a counter until it
# says that all tasks are done (`barrier`; only after some 0.1 ms they let other programs run), and `take`
# gives a thread its next task. This barrier counts finished tasks, not threads: it opens when all tasks
# of the phase are done, even if a thread has not come. (`kernel` is the package's `njit` for functions
# that allocate nothing. Numba would otherwise count the uses of each array, with an instruction for which
# threads wait for each other.) The source of `run_layers` reads like chapter 15: norm, product, rotate,
# attend, round the result for the next product (`prepare`), product, norm, two products.
#
# How much do the phases cost? The next cell runs 1,000 empty ones, again and again for 0.3 seconds, and
# compares them with a `prange` loop for each, and with calling small operators from Python. (Such loops
# follow each other at once, so their threads may still be awake from the loop before. After a pause the
# system must wake them, which takes longer.) A thread that comes late leaves its tasks to the others, and
# a thread alone passes a phase more quickly, because it waits for no other. So a run begins when all
# threads have met, and only runs count in which every thread did at least half of its share of the tasks.
# The least of these is given. (If it is nan, there was no such run: measure again on a quiet machine. A
# step of one token has nine phases in each layer, two more in the last, which keep the row that gets
# logits, and three besides: the embedding, the last norm and the head.)

# %%
from minigen.kernels.cpu.step import run_layers
from minigen.kernels.cpu.team import LINE, team_of
from minigen.kernels.cpu.thread_pool import barrier, join_step, leave_step, next_phase, take

show(run_layers)


@njit
def meet(pool):  # a barrier before the first phase: each thread counts as one task that is done
    pool.progress[pool.worker * LINE + 1] = 1
    barrier(pool, pool.num_workers)


@njit(nogil=True)  # Python lets one thread run at a time, unless compiled code needs no Python
def empty_phases(pool, step, count, done):
    if join_step(pool, step):  # False for a thread that comes too late
        meet(pool)  # so that none passes phases alone before the others come
        for _ in range(count):
            next_phase(pool)
            while take(pool, pool.num_workers) < pool.num_workers:  # a task for each thread
                done[pool.worker, 0] += 1  # and nothing to do in it but to count it
            barrier(pool, pool.num_workers)
        leave_step(pool)


def of_a_phase(team, seconds=0.3):
    """The least seconds of an empty phase, of runs in which every thread did its part."""
    # a cache line each: writers of one would wait
    done = np.zeros((team.num_threads, 32), np.int32)
    team.run(1000, empty_phases, 1000, done)
    until, shared = time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        done[:] = 0
        started = time.perf_counter()
        team.run(1000, empty_phases, 1000, done)
        if done[:, 0].min() >= 500:  # of 1,000
            shared.append((time.perf_counter() - started) / 1000)
    return min(shared, default=np.nan)


@njit(parallel=True)
def hardly_anything(out):
    for place in prange(len(out)):
        out[place] += 1


@njit
def many_times(out, times):
    for _ in range(times):
        hardly_anything(out)


team, counters, tiny = team_of(num_threads), np.zeros(num_threads), torch.zeros(16)
phase = of_a_phase(team)
torch.set_num_threads(num_threads)
woken = best_seconds(lambda: many_times(counters, 1000)) / 1000
operator = best_seconds(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000
num_phases = 9 * llm.config.num_layers + 5  # of one token: those of `run_layers` above
measured("an empty phase", 1e6 * phase, "µs")
measured("a parallel loop of Numba that does nothing", 1e6 * woken, "µs")
measured("one small operator of torch, called from Python", 1e6 * operator, "µs")
measured(f"so the {num_phases} phases of a step cost at least", 1e3 * num_phases * phase, "ms")

# %% [markdown]
# **How many threads, and where?** More threads than hardware threads only wait for each other.
# Fewer can be as fast, since a few cores may already use up the memory's bandwidth; try
# `--threads`. Two hardware threads of one core share its arithmetic units and caches, so for these
# kernels count cores. The operating system may move a thread to another core, which costs what its
# caches held. **Pinning** a thread to a core prevents that: on Linux `taskset -c 0-7 minigen serve
# ...` restricts a program to eight hardware threads (on some machines four cores), among which its
# threads may still move. A server with two processors has two memories, each nearer to one of them
# (**NUMA**, *non-uniform memory access*). Reading the far one is slower, and all threads that read
# weights from one memory share its bandwidth. `numactl --cpunodebind=0 --membind=0` keeps a program
# and its memory at one processor; two processes, one for each processor, use both. minigen does
# neither by itself.
#
# ## The measurement again
#
# The number from the top, now for four forms of the same model. Predict what fewer bytes bring: the
# bytes of bfloat16 are 2.79 times those of int4.

# %%
guess_int4 = predict("int4 is how many times as fast as bfloat16?", None, within=1.25)

# %% [markdown]
# A step that is slower than its bytes allow either *reads more slowly* than memory can, or it *does
# something besides* that takes the same time in every form. A straight line through the three
# compiled forms tells the two apart:
#
# $$t = \frac{b}{R} + c$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $t$ | time of a step | `step_seconds[form]` |
# | $b$ | bytes that it reads | `form_bytes[form]` |
# | $R$ | the rate at which steps read, to be compared with $B$ | `rate` |
# | $c$ | the constant part | `constant` |
#
# By hand: steps of 100 MB and 200 MB that take 6 ms and 11 ms. Another 100 MB cost 5 ms, so
# $R$ = 20 GB/s, and $c = 6 - 5 = 1$ ms. If $B$ is 40 GB/s, the first step loses 2.5 ms by reading
# at half the speed, and 1 ms by the constant.
#
# Three points are few, other programs disturb them, and one form's kernel may be a little slower than
# another's for reasons of its own. So how sure is a fit?
#
# - The cell measures in six rounds. In each, every compiled form of the model reads the text, and the sum, our
#   loop in float32 and the panels read memory: the fastest of the three is the round's $B$. A round is
#   fitted by itself. The true middle of such rounds lies between the smallest and the largest of six
#   results, unless all six fall on the same side of it. If each falls on either side by chance, that
#   happens in $2 / 2^6 = 3$ % of cases.
# - Three points leave one number to see whether a line fits: the **misfit**. It can be tiny by chance,
#   so it says little about how far a form is off. The cell allows each form 2 % of its time (more if the
#   misfit is larger), and fits each round again with one form slower or faster by that much.
#
# The smallest and the largest result of all these fits are the bounds. The lines in the figure and
# the table are those of the middle times (medians) of the six rounds.

# %%
from minigen.kernels.cpu.compile import compile_step

compile_step("bfloat16")  # where loading may not compile, torch would run layer by layer
others = {form: load_model(weights=form) for form in ("bfloat16", "int8")}
others["int4"] = in_int4
some = {name: readers[name] for name in ("sum of the first cell", "our loop, float32", "panels")}
rounds, reached, fastest, sums = [], [], [], []
for _ in range(6):
    rounds.append([read_along(each, ids[:16]).step_seconds for each in others.values()])
    best = best_in_turns({name: run for name, (_, run) in some.items()}, 1, 3)
    fastest.append(max(best, key=lambda name: some[name][0] / best[name]))
    reached.append(some[fastest[-1]][0] / best[fastest[-1]])
    sums.append(some["sum of the first cell"][0] / best["sum of the first cell"])
bandwidth = float(np.median(reached))
of_form = dict(zip(others, zip(*rounds, strict=True), strict=True))
step_seconds = {"float32": in_float32.step_seconds}
step_seconds |= {form: float(np.median(each)) for form, each in of_form.items()}
amounts = [form_bytes[form] for form in others]
rate, constant = lesson.rate_and_constant(amounts, [step_seconds[form] for form in others])
picture(
    draw.forms({form: form_bytes[form] for form in others}, of_form, bandwidth, rate, constant),
    "The time of a step against the bytes that it reads. Bars reach from the fastest to the slowest of "
    "six rounds, dots are the middle. A steeper line than the grey one hints that bandwidth is not "
    "reached, its value at the left edge at a constant part. A value below zero is no time: then the "
    "forms do not share one rate, and the fits of the next cell tell whether the line says anything.",
    number="34.10",
)
often = max(some, key=fastest.count)
print(f"B in these rounds, the middle: {mark(bandwidth / 1e9, 'GB/s')}, most often of ⟨{often}⟩")
print(f"the sum alone, in these rounds: {mark(float(np.median(sums)) / 1e9, 'GB/s')}")
speeds = {form: 1 / each for form, each in step_seconds.items()}
for form, each in step_seconds.items():
    share = form_bytes[form] / bandwidth / each
    print(
        f"{form:>8}: {mark(1e3 * each, 'ms')}, {mark(speeds[form] / speeds['bfloat16'])} times as "
        f"fast as bfloat16, {mark(100 * share, '%')} of its bound"
    )
guess_int4.compare(speeds["int4"] / speeds["bfloat16"], "times", measured=True)
measured("int4 against the engine at the top: times as fast", speeds["int4"] / speeds["float32"])

# %%
print("ms of a step:   its bytes at B   more or less, by R   constant   not on the line")
shares = {
    form: lesson.parts_of_time(form_bytes[form], step_seconds[form], bandwidth, rate, constant)
    for form in others
}
for form, each in shares.items():
    print(f"{form:>8}        ", "   ".join(f"{mark(1e3 * part)}" for part in each))
misfit = max(abs(each.rest) / step_seconds[form] for form, each in shares.items())
doubt = max(0.02, misfit)
fits = [lesson.possible_fits(amounts, each, doubt) for each in rounds]  # first as measured
kinds = {"six rounds": [each[:1] for each in fits], f"and ± {mark(100 * doubt, '%', 2)}": fits}
for name, each in kinds.items():
    of_b = [100 * r / b for round_, b in zip(each, reached, strict=True) for r, _ in round_]
    of_sum = [100 * r / s for round_, s in zip(each, sums, strict=True) for r, _ in round_]
    of_c = [1e3 * c for round_ in each for _, c in round_]
    print(f"{name}: R {mark(min(of_b))} to {mark(max(of_b))} % of its round's B,", end=" ")
    print(f"{mark(min(of_sum))} to {mark(max(of_sum))} % of its sum,", end=" ")
    print(f"c {mark(min(of_c))} to {mark(max(of_c))} ms")
measured("beside c: passing from phase to phase, at least, in ms", 1e3 * num_phases * phase)
rising = min(of_b) > 0
fitting = rising and max(of_c) >= 0
verdict = "clear" if max(of_sum) < 100 else "clear against B alone"
verdict = verdict if fitting and max(of_b) < 100 else "not clear"
print(f"\nbandwidth is not reached: ⟨{verdict}⟩")
print(f"there is a constant part: ⟨{'clear' if rising and min(of_c) > 0 else 'not clear'}⟩")
print(
    f"more bytes took more time: ⟨{'yes' if rising else 'no, so measure again on a quiet machine'}⟩"
)

# %% [markdown]
# In the table, each row's four parts add up to the step's time. The last one is what a straight
# line does not explain, the misfit: above zero, a form takes longer than the line says, below zero it
# takes less. It is not zero, because the forms differ in more than bytes. Their kernels have different
# instructions, and a cache keeps more of the smaller ones. A negative second part
# says that $R$ came out above $B$ (see the end of this section). In the two lines below the table,
# the first has the fits of the six rounds as they were measured, the second all fits, also those
# with one form slower or faster.
#
# The last lines are this machine's verdict, by the second of the two. That bandwidth is not reached
# is clear if $R$ is below its round's $B$ in all fits, and $c$ is zero or more in at least one of
# them (a line with a $c$ below zero is no time of a step, so its $R$ proves nothing). If $B$ is
# that of the panels, 85 MB, a large cache may have kept more of them than of the 269 MB of
# bfloat16. (Figure 34.2 tells whether one core's speed still falls between 64 and 256 MB.) So $R$
# is compared with the sum, too, whose 268 MB are as many: if it reaches the sum's speed in some
# fit, it is clear against $B$ alone, and the reason may be the cache. A constant part is clear if
# $c$ is above zero in all fits. Otherwise it may exist, but it is too small to be told from a form
# that is a little off the line. If $c$ is below zero in all fits, one rate for all forms does not
# explain this machine's times, however near the points are to the line, and nothing is clear. Three
# examples:
#
# - "R 61 to 74 % of its round's B, c 0.4 to 1.1 ms": clearly bandwidth is not reached, and there is a
#   constant part.
# - "R 82 to 120 %, c -1.2 to 0.9 ms" says neither, because $R$ may be above $B$, and $c$ may be 0.
# - "R 57 to 68 %, c -1.2 to -0.2 ms": look at the shares of the bound, below the figure. If bfloat16, the
#   largest form, has the smallest share, the loss is not mainly a constant part, which would be the largest share of
#   int4's time. The kernel of bfloat16 may be slower per byte, or a cache helped the smaller forms, or a
#   measurement was disturbed. The line cannot say which.
#
# Where a verdict is "not clear", keep to those shares: they say how much a form loses, but not why.
# The time of the phases stands beside $c$ for comparison. It is one of the things that take the
# same time in every form, and it is the least of many runs, while a step also waits for threads
# that are late.
#
# Values beyond the limits ($R$ above $B$, a time below zero) have three usual causes: a large cache kept
# a part of the weights, the kernels read memory in a better way than the three loops that measured $B$,
# or another program disturbed one of the measurements. A time below zero also comes out if the largest
# form's kernel is slower per byte. float32 is not on the line, because it runs layer by layer in torch.
# (It was measured at the top; its share here is of the new bound.)
#
# ## What it costs in quality
#
# Fewer bits are a change of the model, so measure that as well, on 288 tokens of Alice. (Here
# the engine computes all of their tokens in one step, like prompts: that is quicker than a step per token.)
# **Agreement** is how often the likeliest next token is the same as in the reference. The **cost**
# is by how many per cent [perplexity](../docs/glossary.md#perplexity) rises (below zero: it falls).
# The ± is a 95 % interval from the differences at each token, as if tokens were independent, so it
# is rather too narrow.
#
# This checkpoint limits what can be asked. Its weights have 4 bits already, the embedding 8. Only the
# original in 16 bits could show what rounding to 4 bits cost it: that is **not tested here** ([chapter
# 35](35_quantization.ipynb) takes float weights for it, and compares methods). (The row of int4 below
# shows only what inputs in bytes, minima in 256ths of a step, and attention in bfloat16 add.) Rounding
# these weights to 8 bits is a test of 8 bits on *this* model; whether the original would lose as little
# is not tested either. Keys and values are computed, and no file has rounded them before, so
# `kv_cache_dtype="int8"` is tested fairly, in short contexts.

# %%
texts = [ids[start : start + 96] for start in range(0, 288, 96)]
engines = {**others, "int4, KV int8": load_model(weights="int4", kv_cache_dtype="int8")}
readings = {form: read_at_once(each, *texts) for form, each in engines.items()}
torch.set_num_threads(num_threads)  # the package's kernels left torch one thread
readings["float32"] = [lesson.scores(llm, text) for text in texts]
references = {"bfloat16": "float32", "int8": "float32", "int4": "float32", "int4, KV int8": "int4"}
likely = {form: lesson.log_probabilities_of(each, texts) for form, each in readings.items()}
costs = {}
for form, reference in references.items():
    costs[form] = lesson.perplexity_cost(likely[form], likely[reference])
    same = agreement(readings[form], readings[reference])
    cost = mark(costs[form][0], "%", 2), mark(costs[form][1], "%", 2)
    print(f"{form:>13} against {reference:>7}: agreement {mark(100 * same, '%')}, ", end="")
    print(f"cost {cost[0]} ± {cost[1]}")

# %% [markdown]
# A cost whose interval holds 0 is no cost that this text can show. One below 0 does
# not mean that rounding improves a model: of several intervals, one can miss 0 by chance. A small
# model and 288 tokens are a weak test: real ones read tens of thousands of tokens or more, and ask
# questions of several kinds besides.
#
# ## Your panels in the engine
#
# One line puts your `by_panels` into the running engine: it lays out all matrices when the model is
# loaded. As long as yours has not passed, the package's own runs, and the line below says so. (Then
# the model goes on with an alphabet. It is sure of each letter, so the text is the same on every
# processor, even where the last bits of sums are not.)

# %%
with using(34, by_panels=pack):
    laid_out = load_model(weights="int4")
print(laid_out.generate("a b c d e f g", SamplingParams(temperature=0, max_tokens=17)).text)

# %% [markdown]
# ## Claims
#
# Statements that one often reads about low precision, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
to_int4 = speeds["int4"] / speeds["bfloat16"]
fewer = {form: form_bytes["bfloat16"] / form_bytes[form] for form in form_bytes}
gains = {form: speeds[form] / speeds["bfloat16"] for form in ("int8", "int4")}
farthest = max(gains, key=lambda form: abs(gains[form] / fewer[form] - 1))
bits = 8 * form_bytes["int4"] / shape.multiplied
kv_cost, kv_margin = costs["int4, KV int8"]
between = 8 * shape.hidden * shape.layers  # float32, written once and read once per layer
saved = 1 + between / form_bytes["int4"]
verdicts(
    "34",
    Claim(
        "A lower precision makes decoding faster in proportion to its bytes",
        "from bfloat16, one token at a time: "
        + ", ".join(
            f"to {form} bytes allow {fewer[form]:.2f}x, measured {mark(gain)}x"
            for form, gain in gains.items()
        )
        + "; the one that is farther off is judged, with bounds of ± 10 %",
        within(gains[farthest] / fewer[farthest], 0.9, 1.1),
        "bytes give the bound; how near each form comes to its own bound decides the rest",
        measured=True,
    ),
    Claim(
        "INT4 makes decoding four times as fast as 16 bits",
        f"weights of 4 bits with their scales and minima, and a head of 8 bits, are {bits:.1f} bits per "
        f"weight: the bytes allow {fewer['int4']:.1f}x",
        within(fewer["int4"], 3.6, 4.4),
        "not even the bytes are a quarter",
    ),
    Claim(
        "INT4 makes tokens 20 to 40 % faster",
        f"{mark(100 * (to_int4 - 1), '% faster')} than bfloat16, one token at a time",
        within(100 * (to_int4 - 1), 20, 40),
        "here a step reads weights and little else; a long context or a large batch gains less",
        measured=True,
    ),
    Claim(
        "16 bits make decoding ten times as fast as 32 bits",
        f"the bytes allow {1 / fewer['float32']:.1f}x",
        within(1 / fewer["float32"], 9, 11),
        "a larger ratio, as float32 and bfloat16 above, compares two programs and not two precisions",
    ),
    Claim(
        "One kernel for 80 layers saves 80 times the traffic",
        f"a token reads {form_bytes['int4'] / 1e6:.0f} MB of weights in int4 either way; between the "
        f"{shape.layers} layers pass {between / 1e6:.2f} MB: at most {saved:.3f} times",
        within(saved, 0.9 * shape.layers, 1.1 * shape.layers),
        "weights are nearly all of the bytes; fewer starts and waits are what one function gains",
    ),
    Claim(
        "INT8 costs 1 to 3 % of quality",
        f"perplexity changes by {mark(costs['int8'][0], '%', 2)} ± {mark(costs['int8'][1], '%', 2)}, weights "
        "and inputs in 8 bits with a scale for each 32, on a model that was rounded to 4 bits before",
        NOT_TESTED,
        "the source starts from 16 bits, has a scale per row of weights and per token, and uses "
        "other tests than perplexity",
        "[Kurtic et al. 2024](https://arxiv.org/abs/2411.02355)",
    ),
    Claim(
        "INT4 costs 5 to 10 % of quality",
        "the checkpoint's weights have 4 bits already",
        NOT_TESTED,
        "only the original in 16 bits could tell what rounding it to 4 bits lost",
    ),
    Claim(
        "A KV cache in INT8 costs less than 1 % of quality",
        f"perplexity changes by {mark(kv_cost, '%', 2)} ± {mark(kv_margin, '%', 2)}, on 288 tokens in contexts "
        "of at most 96",
        holds(kv_cost + kv_margin < 1),
        "a scale for each token and head, and a transform that spreads the outliers of keys; long "
        "contexts are not tested",
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - One token at a time, tokens per second are at most bandwidth divided by bytes. Both sides can be
#   measured on any machine.
# - A processor computes in SIMD registers of 4, 8 or 16 floats. A loop that reads in order, on all
#   cores, can already wait for memory alone.
# - Quantising stores whole steps and a scale. Small groups pay where there are outliers; elsewhere
#   another bit pays more.
# - A scale for each 32 needs no sum across lanes for each group: the scale may be multiplied first, and
#   the lanes stay apart until the row's end. A loop that is far slower than its count has a reason in its
#   machine code, such as a compiler that takes one number at a time.
# - With byte dot products, integers inside a group need a quarter of the instructions that multiply
#   weights by inputs, and
#   no weight is converted. A row for each lane, panels, converts and
#   scales once for eight of them, where a loop by rows does so for each. That counts where instructions
#   are the limit; one token from memory may gain nothing by it.
# - A loaded register can serve several tokens, so a prompt or a batch moves from memory's limit to
#   arithmetic's.
# - Inputs have outliers: one scale for all of them ruins the model, a scale for each 32 does not.
# - What a step loses against its bound can be bandwidth not reached or a constant part. A line
#   through several forms separates them, as far as its ranges allow.
# - What rounding to the file's precision cost can be tested only against the original. What further steps
#   cost (bytes as inputs, rounded minima, a KV cache in int8) can be tested against the file.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A laptop reads 100 GB/s. A model of 8 billion weights is stored with 5 bits for each. At
# most how many tokens per second, one sequence at a time? What does a second sequence in the same
# step change?</summary> The weights are 8 billion × 5 / 8 = 5 GB, so at most 20 tokens per second.
# A second sequence shares the same read, so left of the ridge both together can get nearly
# 40.</details>
#
# <details><summary>2. Steps of 96 MB take 4 ms, steps of 269 MB take 8.3 ms. Memory reads 40 GB/s. Which
# part of the first step's loss is bandwidth, and which is constant?</summary> Another 173 MB cost
# 4.3 ms, so steps read 40 GB/s: the bandwidth is reached. 96 MB take 2.4 ms, and the constant part
# is 1.6 ms, all of the loss.</details>
#
# <details><summary>3. Along the lanes, why is one sum across them for each row enough, although each
# group has its own scale? What does a panel save besides?</summary> The scale is the same for all parts
# of its group, and $s (v_0 + v_1) = s v_0 + s v_1$. So each lane multiplies its part by the scale and
# adds it to its own total, over all groups, and the totals are added across once. In a panel a lane
# belongs to one row, so even that sum is gone. And eight byte instructions add to the same integers
# before these are converted and scaled once; by rows each byte instruction has its own conversion and
# scale.</details>
#
# ## What the production engines do beyond this
#
# - At the time of writing, **llama.cpp** (and **Ollama**, which builds on its kernels) has
#   hand-written kernels for most kinds of block and several families of processors. For several
#   formats it interleaves the blocks of several rows when a model is loaded, which are panels:
#   eight rows [for AVX2](https://github.com/ggml-org/llama.cpp/pull/12332); for most ARM processors
#   four of Q4_0 (Q4_1 without a minimum), and for several K-quants (GGUF's names of block formats)
#   [eight](https://github.com/ggml-org/llama.cpp/pull/19360). Formats and processors without such a
#   kernel take one [by
#   rows](https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-cpu/arch/x86/quants.c),
#   which keeps the lanes apart until the row's end. Threads are restricted with `--cpu-mask`,
#   pinned one by one with `--cpu-strict 1`, and `--numa` spreads or isolates them
#   ([manual](https://manpages.debian.org/unstable/llama.cpp-tools/llama-server.1.en.html)).
# - **vLLM** on a CPU binds its threads to cores with `VLLM_CPU_OMP_THREADS_BIND`; `auto` takes the
#   cores of one NUMA node (a processor with its own memory, or a part of one) for each process
#   ([tuning
#   guide](https://intel.github.io/optimization-zone/software/vllm/skill/references/tuning-matrix.html)).
#   **SGLang** is tuned [for Intel's servers with AMX, see
#   below](https://docs.sglang.io/platforms/cpu_server.html).
# - Intel's AMX, which minigen uses, too, and SME on newer ARM processors such as Apple's M4, which it does not
#   use, compute a small matrix of products in one instruction, AMX from two small matrices, SME from two vectors.
#   They raise the flat part of the roofline, so prompts and batches are faster. The slope stays, and with it the
#   bound of one token at a time.
# - Rounding to the nearest step is the simplest way. [GPTQ](https://arxiv.org/abs/2210.17323) and
#   [AWQ](https://arxiv.org/abs/2306.00978) run a text through the model first (**calibration**): GPTQ
#   corrects the weights still to be rounded for the errors of those before, and AWQ scales up the columns
#   whose inputs are large. [LLM.int8()](https://arxiv.org/abs/2208.07339) keeps outlier columns of the
#   inputs in 16 bits. vLLM, SGLang and TensorRT-LLM run files that GPTQ and AWQ made. llama.cpp's
#   [K-quants](https://github.com/ggml-org/llama.cpp/pull/1684) quantise the scales, too.
#   [EXL2](https://github.com/turboderp-org/exllamav2), ExLlamaV2's format, gives each matrix its own
#   mixture of bits, chosen by measured errors, so that a file reaches a wanted mean.
# - The KV cache can go below 8 bits: [KIVI](https://arxiv.org/abs/2402.02750) stores keys with
#   scales per channel (a number of the head, over many tokens) and values with scales per token, in 2 bits.
# - On GPUs, **ExLlamaV2**, [Marlin](https://github.com/IST-DASLab/marlin) (in vLLM) and
#   **TensorRT-LLM** also reorder weights when they are loaded or converted, into the order that
#   their kernels read.
#
# ## Further reading
#
# - [Algorithms for Modern Hardware](https://en.algorithmica.org/hpc/simd/), Slotin: SIMD and
#   caches, in short programs and measurements.
# - [What Every Programmer Should Know About
#   Memory](https://people.freebsd.org/~lstewart/articles/cpumemory.pdf), Drepper 2007: caches, NUMA
#   and prefetching, in depth.
# - [RAM and CPU caches](https://en.algorithmica.org/hpc/cpu-cache/), Slotin: caches measured by small programs, as in figure 34.2.
# - [Intel Intrinsics
#   Guide](https://www.intel.com/content/www/us/en/docs/intrinsics-guide/index.html): search it for
#   `vpdpbusd`.
# - [LLM.int8()](https://arxiv.org/abs/2208.07339), Dettmers et al. 2022: outliers of inputs, found
#   and counted.
#
# **Next:** [chapter 35](35_quantization.ipynb) makes the 8-bit and 4-bit weights that this chapter
# multiplies, and asks what they cost. [Chapter 36](36_speculative.ipynb) gives the idle arithmetic
# of a step some guesses to check. Then part 4, many devices: when one memory is too slow or too
# small, several read at once.

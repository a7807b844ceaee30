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
# # 31 · First kernels in Triton
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/31_triton.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/31_triton.ipynb)
#
# Between the matrix multiplications of a layer sit small operations: a norm, a rotation, a gate. They
# do almost no arithmetic, yet they take time. This chapter writes them as **kernels**: functions that
# a GPU runs many times at once, each time on another piece of the data. They are written in
# [Triton](https://triton-lang.org), a language inside Python.
#
# You need no GPU. The kernels run in an interpreter on your CPU, which shows what each of them touches,
# and they are compiled to real machine code for GPUs that are not here. Times on a GPU are modelled in
# this chapter, not measured, and the text says how.
#
# **Afterwards you can** draw a GPU with its four memories, say what a program instance, a block, a
# mask, a stride, a warp, coalescing and occupancy are, write a kernel, count the bytes that it moves
# against those that it must move, and read the compiler's output.
#
# **You need** chapters 13 (norm, rotation, gate), 14 (softmax), 17 (memory bandwidth) and 22 (the pool
# of keys and values). **Time:** about 75 minutes to read and try, about 130 for the
# [exercises](../exercises/31_triton.ipynb).
#
# **Where we are:** chapters 21 to 25 decided *what* is computed in a step. This part is about *how*:
# the code that runs on the processor itself.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | compute | prefill, decode | memory bandwidth | L1 kernels | block size of a kernel | bytes moved |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[gpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
from minigen_course.lab.triton_interpreter import need_triton

need_triton()  # it is for Linux: elsewhere, this line says what to do

import time

import torch
import triton
import triton.language as tl

from minigen import SamplingParams
from minigen.kernels.triton.elementwise import (
    rms_norm_kernel,
    rms_norm_torch,
    rms_norm_triton,
    rotary_store_triton,
    silu_multiply_kernel,
    silu_multiply_torch,
    silu_multiply_triton,
)
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
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch31_triton.figures import (
    draw_programs,
    fused_bytes,
    lanes_in_use,
    launch_gaps,
    machine_map,
    occupancy_map,
    sector_map,
    threads_of_block,
)
from minigen_course.ch31_triton.gpu_kernels import machine_code
from minigen_course.ch31_triton.lesson import (
    A100,
    apply_rotary_by,
    attention_by,
    memory_instructions,
    num_operations,
    num_sectors,
    operators_of_layer,
    programs_that_fit,
    rms_norm_by,
    rotary_inputs,
    swiglu_by,
    warp_loads,
)
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import best_seconds
from minigen_course.lab.inspect_model import next_logits, recorded_states, transformer_of
from minigen_course.lab.memory_watch import record_operators
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, bytes_required, interpreted, launch

torch.manual_seed(31)
llm = load_model(weights="float32", enable_prefix_caching=False)
model, config = transformer_of(llm), llm.config
PROMPT, TOKENS = "The old lighthouse", 8
one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
expected = llm.generate(PROMPT, one_token).text  # every kernel below must lead to the same token
chapter_map("norms", "positions", "feed-forward", "GPU kernels")

# %% [markdown]
# ## A number that hurts
#
# A layer adds what attention found to its input (the
# [residual stream](../docs/glossary.md#residual-stream)), and normalises the sum (chapter 13). In torch
# that is a line each. Torch starts several **operators** for them, one after the other. On a GPU, an
# operator is a kernel of its own (some are several): it reads its inputs from memory and writes its
# result there, and the next one reads it again.
#
# Take 4,096 rows of 4,096 numbers in float32. These tensors have 67 MB each, more than the cache of
# many processors. Two of them have to be read, the sum and the result have to be written, and a
# weight for each column has to be read. That is the least that must be moved.
#
# `record_operators` counts the bytes of each operator's inputs and results. These are **logical
# bytes**: what the operators ask for. A cache may answer a part of them, so memory itself may move
# less.

# %%
guess_bytes = predict("How many times the least do torch's operators move?", None)

# %%
rows, others, ones = torch.randn(4096, 4096), torch.randn(4096, 4096), torch.ones(4096)
large_steps = record_operators(lambda: rms_norm_torch(rows, ones, 1e-5, others))
for step in large_steps:
    print(f"{step.name:>6}: {step.bytes_read:>11,} bytes read, {step.bytes_written:>10,} written")
large_moved = sum(step.num_bytes for step in large_steps)
large_needed = (4 * rows.numel() + len(ones)) * rows.itemsize
print(f"moved {large_moved:,} bytes, needed {large_needed:,}")
guess_bytes.compare(large_moved / large_needed, "times")

source, target = torch.randn(4096, 4096), torch.randn(4096, 4096)
one_by_one = best_seconds(lambda: rms_norm_torch(rows, ones, 1e-5, others), 3)
moved_once = best_seconds(lambda: [target.copy_(source) for _ in range(2)], 3)  # two in, two out
measured("on this CPU: seconds against copying the needed bytes", one_by_one / moved_once, "times")

# %% [markdown]
# Each line is an operator: `add_` makes the sum, and the six others are the norm. Bytes and seconds
# are of the same tensors. They need not agree: the copy writes to a tensor that is there, but each
# new large tensor also has to be given memory by the system, page by page (chapter 11), and that
# takes time without moving any of the counted bytes.
#
# ## The second cost: launches
#
# Now take the tensors of a [decode](../docs/glossary.md#decode) step: eight tokens, 576 numbers each,
# in 16 bits. A whole tensor has 9 kB and fits in a cache, so bytes are not what hurts. What hurts is the
# number of operators. To start a kernel is a **launch**: the CPU hands it to the GPU. A launch takes
# microseconds, whatever the kernel computes
# ([NVIDIA measures it here](https://developer.nvidia.com/blog/cuda-graphs/)).

# %%
x, residual = torch.randn(2, TOKENS, config.hidden).half()
norm_weight = model.layers[0].ffn_norm.half()
norm_steps = record_operators(lambda: rms_norm_torch(x, norm_weight, 1e-5, residual))
print(f"{len(norm_steps)} operators for one sum and one norm:")
print("  ", ", ".join(step.name for step in norm_steps))
norm_moved = sum(step.num_bytes for step in norm_steps)
norm_needed = (4 * x.numel() + len(norm_weight)) * 2
print(f"moved {norm_moved:,} bytes, needed {norm_needed:,}: {norm_moved / norm_needed:.1f} times")
norms_a_step = 2 * config.num_layers + 1
print(
    f"in {config.num_layers} layers: {norms_a_step} norms, {norms_a_step * len(norm_steps)} launches"
)

# %% [markdown]
# (`_to_copy` goes from 16 bits to 32 and back, because the norm is computed in float32.) A step of this
# model would need about 550 launches for its sums and norms alone (the first norm has no sum before it).
# Fusion solves both problems. A function that keeps a row at hand from its first step to its last moves
# the row once, and is launched once. That is [kernel fusion](../docs/glossary.md#kernel-fusion), and the
# reason to write kernels. To write one, you must know the machine.
#
# ## The machine
#
# A **thread** is a sequence of instructions that has **registers** of its own, the places for the
# numbers that it computes with. A CPU has a few to a few hundred cores, each of which usually runs
# one or two threads at a time. A large NVIDIA GPU has a hundred or more **streaming
# multiprocessors** (**SM**). On the A100, which is drawn below, each of them holds up to 2,048
# threads at once. Threads do not run alone: 32 of them form a **warp**, and all 32 execute the same
# instruction together, each on numbers of its own (a branch can leave some of them out). An SM has
# four parts. In every **clock cycle** (there are up to 1.41 billion per second), each part picks a
# warp that is ready, if there is one, and starts its next instruction.
#
# Numbers lie in four places. From the bottom of the picture to its top, each place is faster than
# the one below. HBM and L2 are shared by the whole GPU. Each SM has the two others, which are much
# smaller:
#
# - **HBM** (high-bandwidth memory; many cards have another kind, GDDR) is *the* memory of the GPU:
#   weights, KV cache, all tensors.
# - The **L2 cache** keeps what was read or written lately, for all SMs. Code need not ask for it.
# - **Shared memory** lies inside an SM. Threads that work together exchange numbers through it. (The
#   same circuits also serve as the SM's own cache, L1.)
# - **Registers** hold the numbers that arithmetic works on. Each belongs to one thread.

# %%
picture(
    machine_map(),
    "An A100. The four boxes with a size are memories: HBM and L2 of the whole GPU, shared memory and "
    "registers of one SM. Arrows are the bytes per second of all SMs together, between two memories, and "
    "at the top between registers and arithmetic. All rates but HBM's are computed, see below.",
    number="31.1",
)
hbm = A100[0]
print("all SMs together:  size          bandwidth   67 MB at this rate")
for level in A100:
    size = f"{level.num_bytes / 1e6:,.0f} MB"
    speed = f"{level.gigabytes_a_second:,} GB/s"
    taken = 1e6 * rows.nbytes / level.bandwidth
    print(f"{level.name:>15} {size:>10} {speed:>18} {taken:>15.1f} µs")

# %% [markdown]
# Read the arrows upwards. HBM gives 2,039 GB/s ([data
# sheet](https://www.nvidia.com/en-us/data-center/a100/), for SXM, the version for server boards; the
# one for PCIe slots has less). L2 gives 5,120 bytes in each of 1.41 billion clock cycles per second,
# which is 7,219 GB/s (as in [this
# table](https://pmc.ncbi.nlm.nih.gov/articles/PMC10448217/table/t0015), whose A100 has all 128 SMs of
# the full chip, so 23,101 GB/s of shared memory, and an older HBM of 1,555 GB/s). Shared memory gives
# 128 bytes per cycle in each of 108 SMs; the [FlashAttention paper](https://arxiv.org/abs/2205.14135)
# rounds this to 19 TB/s. For registers there is no such figure. Here is what float32 arithmetic at full speed
# reads from them: 9.75 trillion multiplications with addition per second, each of which reads three
# numbers of 4 bytes. (The **tensor cores**, units for products of matrices alone, are 16 times as fast in 16
# bits. The peaks of NVIDIA's cards in chapter 17 are theirs.) (Sizes: [white
# paper](https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf).)
# An H100 SXM has 132 SMs ([NVIDIA's
# description](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/)), 80 GB at 3,350
# GB/s ([data sheet](https://www.nvidia.com/en-us/data-center/h100/)), 50 MB of L2, and in each SM up to
# 228 KB of shared memory and 256 KB of registers ([tuning
# guide](https://docs.nvidia.com/cuda/hopper-tuning-guide/); its KB are 1,024 bytes, also written KiB).
#
# All registers together hold only 28 MB, but they are 57 times as fast as HBM. So a number that has come
# up to a register should be used for everything before it goes down again: that is the idea of fusion.
#
# ## The smallest kernel
#
# A kernel is written from the point of view of one piece of work. The function below is run many
# times at once, always with the same arguments; each run is a **program instance**, a *program* for
# short. A program runs on one SM, with all its threads. (CUDA, NVIDIA's own language, calls it a
# *thread block*.) What differs is `tl.program_id(0)`, the program's number. From it, each program
# computes which **block** of neighbouring numbers is its own. (The blocks of chapter 21 are something
# else.)
#
# - `@triton.jit` turns the function into a kernel. For a GPU its body is compiled, and Python never
#   runs it.
# - `x_ptr` is a **pointer**: the address of the tensor's first number. A pointer does not know how many
#   numbers follow, so `num` is handed in, too.
# - `tl.arange(0, BLOCK)` is a block of whole numbers, 0 to BLOCK - 1. Its places are called **lanes**
#   here (NVIDIA's texts call the 32 threads of a warp lanes; a thread can have several of ours). `BLOCK`
#   is a power of two, and known when the kernel is compiled (`tl.constexpr`).
# - A pointer plus a block of numbers is a block of addresses. `tl.load` fetches what lies there,
#   `tl.store` puts a block there. Between them, arithmetic is on whole blocks.
# - A **mask** is a block of true and false. Lanes whose mask is false load and store nothing.
#
# `kernel[grid](...)` launches it; the **grid** says how many programs there are. Take ten numbers and
# blocks of four. Three programs are needed, and program 2 computes the places 2 × 4 + (0, 1, 2, 3) = (8,
# 9, 10, 11).
#
# `record_programs` launches a kernel in the interpreter, and writes down what each program loads
# and stores. `bytes_moved` adds that up, and `bytes_required` counts once each number that is
# loaded, and once each that is stored.

# %%
guess_last = predict("Ten numbers, blocks of four: how many does the last program load?", None)


# %%
@triton.jit
def square_kernel(x_ptr, square_ptr, num, BLOCK: tl.constexpr):
    program = tl.program_id(0)  # 0, 1 or 2
    own = program * BLOCK + tl.arange(0, BLOCK)  # the places of this program's numbers
    exists = own < num  # the mask: false for places 10 and 11
    numbers = tl.load(x_ptr + own, mask=exists)  # from HBM into registers
    tl.store(square_ptr + own, numbers * numbers, mask=exists)  # and back


numbers, squares = torch.arange(10.0), torch.zeros(10)
with interpreted():  # on a GPU, leave this line out, and have the tensors there
    square_kernel[(3,)](numbers, squares, 10, BLOCK=4)
assert torch.equal(squares, numbers**2)
print(squares.tolist())

seen = record_programs(
    lambda: square_kernel[(3,)](numbers, squares, 10, BLOCK=4), numbers=numbers, squares=squares
)
for each in seen:
    print(
        f"program {each.program[0]} {'stores' if each.is_store else 'loads '} {each.tensor}",
        each.offsets,
    )
print(f"moved {bytes_moved(seen)} bytes, needed {bytes_required(seen)}")
last = [each for each in seen if each.program[0] == 2 and not each.is_store]
guess_last.compare(sum(len(each.offsets) for each in last))

# %% [markdown]
# The interpreter runs one program after the other, in NumPy. On a GPU many of them run at the same
# time, in any order. So no program may count on what another one of the same launch has stored
# (unless special operations make it wait).
#
# ## Drag it: programs, blocks, and the mask
#
# What one program loads and stores is coloured, what the others do is pale. Take the mask away, and
# a last program whose block is not full reaches past the end of its tensors. The recorder refuses
# that. A GPU would do it anyway. If you are lucky it crashes; if not, it may overwrite another
# tensor.


# %%
def loads(num, block, program, mask):
    grid = triton.cdiv(num, block)  # num / block, rounded up
    if program >= grid:
        raise ValueError(f"{grid} programs are enough: there is no program {program}.")
    numbers, squares = torch.arange(float(num)), torch.zeros(num)
    limit = num if mask else grid * block
    accesses = record_programs(
        lambda: square_kernel[(grid,)](numbers, squares, limit, BLOCK=block),
        numbers=numbers,
        squares=squares,
    )
    return draw_programs(accesses, {"numbers": (1, num), "squares": (1, num)}, (program, 0, 0))


explore(
    loads,
    "Two rows of numbers; those that one program loads and stores are coloured. The titles count "
    "the bytes of all programs.",
    "31.2",
    num=(1, 24, 1, 10),
    block=[4, 1, 2, 8, 16],
    program=(0, 9, 1, 2),
    mask=True,
)

# %% [markdown]
# ## Your turn: two loads and a store
#
# Seven kernels are yours in this chapter (an eighth is in the
# [exercises](../exercises/31_triton.ipynb)), and, at the end, a tuner, which tries sizes of a
# kernel (its block, or its number of warps) and keeps the fastest. `check` runs yours in the
# interpreter with every load and store watched, and says the first thing that is wrong; `hint=1`
# helps. They are plain functions: `check` and `launch` turn them into kernels, and take one with
# `@triton.jit` as well. `launch(kernel, grid, ...)` runs a kernel where its tensors are: on a CPU
# in the interpreter, or on a GPU.
#
# The first adds two vectors, one of them scaled. With the places $p \cdot B$ to $p \cdot B + B - 1$ of
# program $p$:
#
# $$\text{sum}_i = x_i + f\, y_i, \qquad 0 \le i < \text{num}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $i$ | place in the vectors | `program * BLOCK + lane` |
# | $f$ | factor | `factor` |
# | $p, B$ | number of the program, lanes of a block | `tl.program_id(0)`, `BLOCK` |
#
# By hand: x = (1, 2), y = (10, 20) and f = 0.5 give (6, 12).

# %%
task(31, "add_scaled")

# %%
# exercise: minigen_course.ch31_triton.kernels.add_scaled
import triton.language as tl


def add_scaled(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Store sum = x + factor y: one program for `BLOCK` of the `num` elements.

    The grid is (programs,), as many as needed. Each element of x and y is loaded once, and each
    element of the sum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, add_scaled=add_scaled)  # your own if it passed, else the course's
states = recorded_states(llm, llm.tokenizer.encode(PROMPT))[:, -1]
before, added = states[-2], states[-1] - states[-2]
after = torch.empty_like(before)
launch(mine, (3,), before, added, after, len(before), 1.0, BLOCK=256)
torch.testing.assert_close(after, states[-1])
print(f"{len(after)} numbers of the residual stream as the model has them, by 3 programs")
reveal(31, add_scaled=mine)

# %% [markdown]
# ## Your turn: a row and its maximum
#
# A matrix lies in memory row after row. With rows of $n$ numbers, element $(r, c)$ has the place
# $r \cdot n + c$. Now a program has a whole row, and the grid has one program per row.
#
# A block can be reduced to one number: `tl.max(x, axis=0)`, `tl.sum(x, axis=0)`. Such a **reduction**
# takes *all* lanes, also those that the mask left out. What do these hold? `tl.load(..., other=v)` puts
# $v$ there. Without `other`, Triton promises nothing. Today its compiler puts 0 there for an NVIDIA GPU
# (a note under the machine code further below says how), and that hides the mistake: a sum comes out right by luck,
# while the maximum of negative numbers is wrong. So always say what you need. (The checks put something
# large or nan there, so that it shows.) A pointer plus one number is one address: `tl.load` and
# `tl.store` take it, too.
#
# $$m_r = \max_{0 \le c < n} x_{rc}$$
#
# For example, rows of three numbers in blocks of four lanes:
#
# | row | lanes 0 to 2 | lane 3, masked | right maximum | if lane 3 holds 0 |
# |---|---|---|---|---|
# | 0 | 3, 1, 4 | ? | 4 | 4 |
# | 1 | -3, -1, -4 | ? | -1 | 0: wrong |

# %%
task(31, "row_maximum")

# %%
# exercise: minigen_course.ch31_triton.kernels.row_maximum
import triton.language as tl


def row_maximum(x_ptr, maxima_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the largest number of each row of x.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous. Each element of x is loaded once, and each maximum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, row_maximum=row_maximum)  # your own if it passed, else the course's
texts = (PROMPT, "Two and two is", "Once upon a")
logits = torch.stack([next_logits(llm, text) for text in texts])
highest = torch.empty(len(texts))
launch(mine, (len(texts),), logits, highest, logits.shape[1], BLOCK=65_536)
for text, row, value in zip(texts, logits, highest, strict=True):
    (place,) = (row == value).nonzero()[:, 0].tolist()
    print(
        f"{text!r}: of {len(row):,} next tokens, {llm.tokenizer.decode([place])!r} is the likeliest"
    )
reveal(31, row_maximum=mine)

# %% [markdown]
# ## Coalescing: what one load fetches
#
# An SM does not ask memory for single numbers. It asks for **sectors** of 32 bytes: 8 numbers of
# float32, or 16 of 16 bits. When a warp loads, the hardware looks at its 32 addresses, and fetches each
# sector that at least one of them lies in
# ([guide](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#coalesced-access-to-global-memory)).
# Fetching neighbours together like this is **coalescing**.
#
# Here each thread of the warp has one lane. By hand: 32 lanes want 32 neighbouring numbers of float32.
# These are 128 bytes, 4 sectors, and each byte is wanted. Now lane $i$ wants number $2i$. The 32 numbers
# are spread over 256 bytes, 8 sectors, and half of what is fetched is thrown away. In general, for a
# **stride** of $s$ numbers between neighbouring lanes, and numbers of $b$ bytes, the first at the
# beginning of a sector:
#
# $$\text{sectors} = \begin{cases} 32\, s\, b / 32 = s\, b & \text{if } s\, b \le 32 \\
# 32 & \text{otherwise} \end{cases}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $s$ | numbers from one lane's address to the next lane's | `stride` |
# | $b$ | bytes per number | `itemsize`, 4 here |
#
# (The 32 threads of a warp and the 32 bytes of a sector cancel by chance.) A cache may keep the rest of
# a sector until another load wants it.
#
# In the figure below, choose the stride. A stride of 1 fills four sectors to the last byte. A stride of
# 3 touches 12 sectors, and a third of their bytes is wanted.

# %%
guess_sectors = predict("32 lanes want every 32nd number of float32: how many bytes come?", None)


# %%
@triton.jit
def strided_kernel(x_ptr, taken_ptr, stride, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)  # 0 to 31: one lane for each thread of a warp
    taken = tl.load(x_ptr + lanes * stride)  # lane i wants number i * stride
    tl.store(taken_ptr + lanes, taken)


def strided_load(stride):
    x, taken = torch.arange(1024.0), torch.empty(32)
    seen = record_programs(
        lambda: strided_kernel[(1,)](x, taken, stride, BLOCK=32), x=x, taken=taken
    )
    return seen[0]


explore(
    lambda stride: sector_map(strided_load(stride)),
    "Memory in lines of 64 numbers; white lines separate the sectors. One warp's load wants the dark "
    "numbers, and the light ones come with them. With a stride of 8, 1 byte in 8 is wanted.",
    "31.3",
    stride=[8, 1, 2, 3, 4, 16, 32],
)
fetched = {}
for stride in (1, 2, 4, 8, 32):
    load = strided_load(stride)
    fetched[stride] = 32 * num_sectors([load])
    wanted = load.num_bytes / fetched[stride]
    print(
        f"stride {stride:>2}: {fetched[stride]:>5,} bytes fetched for {load.num_bytes}, {wanted:.1%}"
    )
guess_sectors.compare(fetched[32], "bytes")

# %% [markdown]
# From a stride of 8 on, each number costs a whole sector: eight times the traffic, for the same
# result. Triton assigns lanes to threads itself. What you decide is which addresses a block has:
# **a block should be a row of neighbours**. (That alone is not enough: the machine code further
# below has a row of neighbours that is loaded with a stride of 8 all the same.)
#
# ## Your turn: columns, without going down a column
#
# Now the sum of each column. A column's numbers are not neighbours in memory: they lie a row apart.
#
# $$s_c = \sum_{r=0}^{n_r-1} x_{rc}$$
#
# Here $s_c$ is the sum of column $c$ (`sums`), and $n_r$ is the number of rows (`num_rows`).
#
# Take 3 rows of 8 columns and blocks of 2. Program 0, which has columns 0 and 1, could do it in two
# ways:
#
# | | the load in step 0 | in step 1 | in step 2 |
# |---|---|---|---|
# | down a column (a block of 4, one lane masked) | $x_{00}, x_{10}, x_{20}$: three sectors | $x_{01}, x_{11}, x_{21}$: the same three again | |
# | along a row | $x_{00}, x_{01}$: one sector | $x_{10}, x_{11}$: one sector | $x_{20}, x_{21}$: one sector |
#
# (A row of 8 numbers of float32 is a sector.) Both add the same numbers. The check counts sectors,
# so only one of them passes. A kernel may have a loop: `for row in range(num_rows)`, and a block of
# zeros to begin with: `tl.zeros((BLOCK,), tl.float32)`.

# %%
task(31, "column_sums")

# %%
# exercise: minigen_course.ch31_triton.kernels.column_sums
import triton.language as tl


def column_sums(x_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr):
    """Store the sum of each column of x, added up in float32: one program for `BLOCK` columns.

    The grid is (programs,), as many as needed. Rows are contiguous. Each element of x is loaded
    once, together with its neighbours in the row, and each sum is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, column_sums=column_sums)  # your own if it passed, else the course's
sizes = recorded_states(llm, llm.tokenizer.encode(PROMPT))[20].abs().contiguous()
sums = torch.empty(sizes.shape[1])
seen = record_programs(
    lambda: launch(mine, (5,), sizes, sums, *sizes.shape, BLOCK=128), sizes=sizes, sums=sums
)
torch.testing.assert_close(sums, sizes.sum(0))
column, share = int(sums.argmax()), float(sums.max() / sums.sum())
print(f"column {column} of {len(sums)} holds {share:.0%} of the residual stream's size in layer 20")
at_least = -(-sizes.nbytes // 32)
print(f"sectors loaded: {num_sectors([each for each in seen if not each.is_store])}", end=", ")
print(f"needed: {at_least}")
reveal(31, column_sums=mine)

# %% [markdown]
# ## Your turn: rows, a stride, two axes
#
# Rows need not follow each other closely. A layer multiplies once for gate and up (chapter 15), so they
# are the two halves of one row: from one row of gate to the next lies a whole row of both. The
# numbers between the beginnings of two rows are the **row stride**.
#
# A grid can have two axes: `tl.program_id(0)` is the row, `tl.program_id(1)` the block of columns. The
# kernel computes, with gate $g$, up $u$ and the sigmoid $\sigma$:
#
# $$\text{mixed}_{rc} = \text{SiLU}(g_{rc})\; u_{rc}, \qquad
# \text{SiLU}(z) = z\,\sigma(z) = \frac{z}{1 + e^{-z}}$$
#
# For example, with $g = 2$ and $u = 3$: σ(2) = 0.88, SiLU(2) = 1.76, the result is 5.28. And an example
# of the places: rows of 12 columns, a row stride of 24, blocks of 8. Program (2, 1), row 2 and block 1,
# has the columns 8 to 15, of which 8 to 11 exist. In gate, row 2 begins at 2 × 24 = 48, so it loads
# places 56 to 59. (In up, too: your `up_ptr` points at the first number of up, and places count from
# there.) In the result, row 2 begins at 2 × 12 = 24, so it stores places 32 to 35.
#
# Below are the loads and stores of the engine's kernel, for four rows of 12 columns. The kernel
# itself is yours to write. It computes in float32, also if its inputs have 16 bits.
# (`x.to(tl.float32)` widens a block; `tl.store` rounds back. `tl.sigmoid`, `tl.exp` and `tl.rsqrt`,
# one over the square root, act on each lane.)

# %%
gate_up = torch.randn(4, 24).half()
mixed_steps = record_operators(lambda: silu_multiply_torch(gate_up))
mixed = torch.zeros(4, 12).half()
seen = record_programs(
    lambda: silu_multiply_kernel[(4, 2)](gate_up, mixed, 12, BLOCK=8), gate_up=gate_up, mixed=mixed
)
torch.testing.assert_close(mixed, silu_multiply_torch(gate_up))
apart = sum(step.num_bytes for step in mixed_steps)
print(f"two operators move {apart} bytes, the kernel {bytes_moved(seen)}", end=", ")
print(f"needed are {bytes_required(seen)}")
picture(
    draw_programs(seen, {"gate_up": (4, 24), "mixed": (4, 12)}),
    "Eight programs, two for each row; a colour is a program. On the left, each has loaded a piece of "
    "gate (columns 0 to 11) and the same piece of up (12 to 23); on the right is what it stored.",
    number="31.4",
)
task(31, "silu_multiply")

# %%
# exercise: minigen_course.ch31_triton.kernels.silu_multiply
import triton.language as tl


def silu_multiply(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Store mixed = SiLU(gate) x up, in float32: one program for `BLOCK` columns of a row.

    The grid is (rows, programs per row). In gate and in up, rows start `row_stride` elements apart;
    in mixed, `num_columns`. Each element of gate and up is loaded once, and each element of mixed
    is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, silu_multiply=silu_multiply)  # your own if it passed, else the course's
with interpreted(), using(13, swiglu=swiglu_by(mine)):
    assert llm.generate(PROMPT, one_token).text == expected
reveal(31, silu_multiply=mine)

# %% [markdown]
# The engine's own, `silu_multiply_kernel` in
# [elementwise.py](../minigen/kernels/triton/elementwise.py), also rounds where torch would round
# between its two operators, to stay close to torch's result. It makes its row number an integer of
# 64 bits: the harder part of the exercise is about that.
#
# ## Your turn: a row that stays
#
# Here is the norm of the opening. RMSNorm divides each row by the root of its mean square:
#
# $$y_{rc} = \frac{x_{rc}}{\sqrt{\frac{1}{n} \sum_{j=0}^{n-1} x_{rj}^2 + \varepsilon}}\; w_c$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x_{rc}, y_{rc}$ | a number of the input, of the result | `x`, `normalised` |
# | $n$ | numbers in a row | `num_columns` |
# | $w_c$ | learned weight of column $c$ ($g$ in [the paper](https://arxiv.org/abs/1910.07467)) | `weight` |
# | $\varepsilon$ | a small number, so that a row of zeros divides by no zero | `eps` |
#
# By hand: the row (1, 1, 7, 7) has the squares 1, 1, 49, 49, the mean 25, the root 5, so the result is
# (0.2, 0.2, 1.4, 1.4) with weights of 1 and ε = 0.
#
# The row is needed twice: for its mean square, then to divide it. A program that has the whole row
# as one block loads it once; the block stays in registers between the two uses. Of torch's
# operators, each loads from memory what it uses, and stores its result there.
#
# `BLOCK` must be a power of two, but the lengths of many rows are not. The picture shows what this
# costs. The pale lanes are masked: they load nothing, but they compute, and take registers. Smaller
# blocks waste less, or as much. One program may well hold several of them in its registers: for
# example, 576 = 512 + 64 needs two loads, two sums and two stores, masks no lane, and loads nothing
# twice. (The engine's kernel for the rotation, further below, holds the two halves of a head like
# this.) But then the kernel has to name each block, so their number and sizes are fixed when it is
# compiled. A loop over any number of blocks has to load the row again for the second use.
#
# The cell after your kernel also compiles it for an H100, whose code is called `sm_90`, and prints how
# many registers a thread takes, and how many bytes of each thread were **spilled**: they did not fit into
# registers, and go to memory. The section on machine code, further below, says more.

# %%
norm_seen = record_programs(
    lambda: rms_norm_triton(x, norm_weight, 1e-5, residual),
    x=x,
    residual=residual,
    weight=norm_weight,
)
of_norm = bytes_moved(norm_seen)
print(f"sum and norm of {TOKENS} tokens: {norm_moved:,} bytes by operators", end=", ")
print(f"{of_norm:,} by the engine's kernel, needed are {bytes_required(norm_seen):,}")
explore(
    lambda width: lanes_in_use(width, (64, 256, 512, triton.next_power_of_2(width))),
    "Bars of lanes for blocks of four sizes: those that a row uses, and the masked ones.",
    "31.5",
    width=[576, 896, 1024, 1536, 2880, 5120],
)
task(31, "rms_norm_rows")

# %%
# exercise: minigen_course.ch31_triton.kernels.rms_norm_rows
import triton.language as tl


def rms_norm_rows(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Divide each row of x by its root mean square and multiply it by weight, in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous in x and in the result. `eps` is added to the mean square. A program loads each
    element of its row and of the weight once, and stores each element of its result once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, rms_norm_rows=rms_norm_rows)  # your own if it passed, else the course's
with interpreted(), using(13, rms_norm=rms_norm_by(mine)):
    assert llm.generate(PROMPT, one_token).text == expected

tokens = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")  # a shape without memory
(code,) = machine_code("sm_90", lambda: rms_norm_by(mine)(tokens, tokens[0], 1e-5))
print(f"compiled for an H100: {code.registers} registers per thread, {code.spilled} bytes spilled")
reveal(31, rms_norm_rows=mine)

# %% [markdown]
# The engine's kernel asks for 46,080 / 38,016 = 1.21 times what is needed, because every program
# loads the weight. After the first, most find it in a GPU's cache. (The line about an H100 is
# explained below, with the machine code.) The engine's own task is one step harder: the sum and the
# norm in one kernel. It is `add_rms_norm` (stretch) in the
# [exercises](../exercises/31_triton.ipynb).
#
# ## Your turn: softmax of a row
#
# Softmax (chapter 14) takes a maximum and a sum of the same row:
#
# $$m_r = \max_c x_{rc}, \qquad \ell_r = \sum_c e^{x_{rc} - m_r}, \qquad
# w_{rc} = \frac{e^{x_{rc} - m_r}}{\ell_r}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $x_{rc}$ | score of row $r$, column $c$ | `x` |
# | $m_r, \ell_r$ | maximum of the row, sum of its exponentials (so named in the FlashAttention paper) | reductions of a block |
# | $w_{rc}$ | weight | `weights` |
#
# By hand, for the row (2, 0, 1): $m$ = 2, the exponentials are 1, 0.14, 0.37, so $\ell$ = 1.50, and the
# weights are 0.67, 0.09, 0.24. Masked lanes must count neither in $m$ nor in $\ell$; one value of `other`
# serves both. Written step by step in torch, it takes five operators. (`torch.softmax` is one operator
# already. We compare with the steps written out, so do not expect this gain over it.) Count the numbers
# that each reads and writes, for rows long enough that one number per row is nothing, before you predict.


# %%
def softmax_by_operators(scores):
    shifted = scores - scores.amax(1, keepdim=True)  # two operators
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(1, keepdim=True)  # two more


guess_softmax = predict("How many times the bytes of one kernel do the five move?", None)
task(31, "softmax_rows")

# %%
# exercise: minigen_course.ch31_triton.kernels.softmax_rows
import triton.language as tl


def softmax_rows(x_ptr, weights_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the softmax of each row of x, computed in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous, and each has a finite number. Each element of x is loaded once, and each weight is
    stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, softmax_rows=softmax_rows)  # your own if it passed, else the course's
scores = torch.randn(64, 512)
weights = torch.empty_like(scores)
softmax_steps = record_operators(lambda: softmax_by_operators(scores))
seen = record_programs(
    lambda: launch(mine, (64,), scores, weights, 512, BLOCK=512), scores=scores, weights=weights
)
torch.testing.assert_close(weights, softmax_by_operators(scores))
for step in softmax_steps:
    print(f"{step.name:>6}: {step.bytes_read:>8,} bytes read, {step.bytes_written:>8,} written")
print(f"kernel: {bytes_moved(seen):>8,} bytes moved")
softmax_ratio = sum(step.num_bytes for step in softmax_steps) / bytes_moved(seen)
guess_softmax.compare(softmax_ratio, "times")
with interpreted(), using(14, attention=attention_by(mine)):
    assert llm.generate(PROMPT, one_token).text == expected
reveal(31, softmax_rows=mine)

# %% [markdown]
# The five read 5 numbers for each element and write 3; the kernel reads 1 and writes 1. In the last
# lines, the kernel has computed the attention weights of the model: scores as a matrix in memory, minus
# infinity where the causal mask says no.
#
# ## Your turn: rotary embedding, where addresses depend on data
#
# Rotary embedding (chapter 13) turns pairs of numbers of a head by an angle that grows with the token's
# position $p$. Here dimension $i$ and dimension $i + d/2$ are a pair:
#
# $$\begin{aligned} y_i &= x_i \cos\theta_{p,i} - x_{i + d/2} \sin\theta_{p,i} \\
# y_{i + d/2} &= x_{i + d/2} \cos\theta_{p,i} + x_i \sin\theta_{p,i} \end{aligned}
# \qquad 0 \le i < d/2$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $d/2$ | pairs in a head | `half` |
# | $p$ | position of the token, loaded from memory | `positions_ptr` |
# | $\theta_{p,i}$ | angle; only its cosine and sine are stored, in row $p$ of two tables | `cos_ptr`, `sin_ptr` |
#
# By hand: the pair (3, 1), turned by 90° (cosine 0, sine 1), becomes (-1, 3). The places, for three
# heads of $d$ = 8: head 1 of token 2 begins at (2 × 3 + 1) × 8 = 56, so its pairs are (56, 60), (57, 61),
# (58, 62), (59, 63).
#
# What is new is the position: the program loads one number, and uses it to compute further addresses.
# Serving cannot do without this, because tokens of many requests stand side by side in a batch, each at
# a position of its own.

# %%
task(31, "rotate_pairs")

# %%
# exercise: minigen_course.ch31_triton.kernels.rotate_pairs
import triton.language as tl


def rotate_pairs(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, rotated_ptr, num_heads, half, BLOCK: tl.constexpr
):
    """Rotate the pairs (i, i + half) of each head by the angles of its token's position.

    The grid is (tokens, heads), and `BLOCK` is at least `half`. x and the result are tokens x heads
    x 2 half, contiguous. Row p of cos and of sin has the `half` numbers of position p. Each element
    of x is loaded once, and each of the result is stored once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, rotate_pairs=rotate_pairs)  # your own if it passed, else the course's
with interpreted(), using(13, apply_rotary=apply_rotary_by(mine)):
    assert llm.generate(PROMPT, one_token).text == expected
reveal(31, rotate_pairs=mine)

given = rotary_inputs(slots=[5, 2], q_heads=1, kv_heads=1, head_dim=8)
seen = record_programs(lambda: rotary_store_triton(*given), **given.named())
picture(
    draw_programs(
        seen, {"qkv": (2, 24), "result": (2, 8), "keys": (8, 8), "values": (8, 8)}, width=11.0
    ),
    "The engine's kernel for rotation and store, with two tokens. Each row of qkv is divided among three "
    "programs, a colour each: query, key and value. Keys and values land in rows 5 and 2 of the pool.",
    number="31.6",
)

# %% [markdown]
# The engine goes one step further. After the product for queries, keys and values come the rotation
# and the store into the pool (chapter 22). One kernel does both, `rotary_store_kernel` in
# [elementwise.py](../minigen/kernels/triton/elementwise.py): a program has one head of one token. A
# query goes to attention (`result` in the figure); a key and a value go to the token's
# [slot](../docs/glossary.md#slot), whose number the program loads as yours loads the position. The two
# tokens of the figure have the slots 5 and 2, so that is where the third and fourth panel are coloured.
#
# ## What a layer moves
#
# Now with the model's sizes, for eight tokens in 16 bits: each part of a layer as torch's
# operators, and as one kernel. `operators_of_layer` runs the first layer of the model with plain
# torch, and returns all its operators but the four matrix products. Of attention, it runs only the
# store of keys and values into a pool. The cosines and sines of the positions are computed before
# the first layer (by the engine on a GPU once, for all positions), so computing them is not
# counted. Loading them is: each of a token's 12 rotated heads (9 query heads and 3 key heads;
# values are not rotated) asks for them again, 24,576 of the kernel's 56,448 bytes, which a cache
# answers after the first. Bytes are those that programs and operators ask for; launches are counted
# beside.

# %%
gate_up = torch.randn(TOKENS, 2 * config.ffn).half()
given = rotary_inputs(range(3, 3 + TOKENS), config.q_heads, config.kv_heads, config.head_dim)
layer_steps = operators_of_layer(model, config.kv_heads, TOKENS)
kernels = {
    "sum and norm": norm_seen,
    "rotation and store": record_programs(lambda: rotary_store_triton(*given), **given.named()),
    "SiLU x up": record_programs(lambda: silu_multiply_triton(gate_up), gate_up=gate_up),
}
twins = {name: layer_steps[name] for name in kernels}
for name, steps in twins.items():
    apart, moved = sum(step.num_bytes for step in steps), bytes_moved(kernels[name])
    print(f"{name:>18}: {len(steps):>2} operators move {apart:>7,} bytes", end=", ")
    print(f"the kernel {moved:>7,}, needed {bytes_required(kernels[name]):>7,}")
print("rotation and store:", ", ".join(step.name for step in layer_steps["rotation and store"]))
print("in a layer, in order:", ", ".join(f"{name} {len(s)}" for name, s in layer_steps.items()))
launches = sum(len(steps) for steps in layer_steps.values())
print(f"launches in a layer, without its products and attention: {launches}, fused: 4")
picture(
    fused_bytes(twins, {name: bytes_moved(each) for name, each in kernels.items()}),
    "For each part of a layer, its operators in a row (a piece is an operator; colours repeat, and two "
    "pieces of sum and norm have 64 bytes each, too thin to see), and below them the one kernel. The length "
    "is the bytes that they move.",
    number="31.7",
)

# %% [markdown]
# Each part has two bars. The upper one is cut into its operators, and the lower one is the kernel that
# replaces them. A layer begins with a norm and ends with a sum. The sum and the next layer's norm are one
# kernel again, so a layer's small operations take 4 launches (sum and norm twice) instead of 40.
#
# ## Machine code for a GPU that is not here
#
# `triton.jit` compiles a kernel when it is first launched, for the GPU that it finds, for the types
# of its arguments, for the values of the `tl.constexpr` ones, and for whether each whole number and
# each address among the others is a multiple of 16 (and a whole number 1 is compiled in). The
# course's `machine_code` does the same for a GPU of your choice, without starting anything; tensors
# on the device "meta" have a shape, a type and no memory. What comes out is **PTX**, NVIDIA's
# assembly for all its chips (instructions as text), and from it the chip's own code (SASS), in
# which the registers are counted. Read a line of PTX from the middle: what is loaded (`ld.global`)
# or stored (`st.global`), and before it `@%p1`: do it only where this **predicate** holds. That is
# our mask.
#
# Triton runs a program by 4 warps unless the launch asks for another number (`num_warps=8`, an
# option of Triton's). 4 warps are 128 threads, so a block of 1,024 numbers gives each thread 8 of
# them; in 16 bits, that is 16 bytes, the most that a thread of the H100 below can load at once. The
# figure opens the block twice: its first warp has lanes 0 to 255, and this warp's first thread has
# lanes 0 to 7. If each thread loads its 16 bytes at once, the warp's load is coalesced: it wants
# 512 neighbouring bytes, 16 sectors.
#
# The chip below is an H100. With 4,096 numbers the mask cuts off nothing, and with 4,097 it does. Here
# are three predictions. The first is about the load and the store of `square_kernel`. The second is about
# an A100, and a norm whose rows have 8,192 numbers: registers per thread with 4 warps, divided by those
# with 8. The third is about the end of this chapter: norms and gate of a layer move about a third of the
# bytes after fusion, so how much faster does a whole layer of Llama-3-8B become, with 512 tokens?

# %%
picture(
    threads_of_block(1024, 4),
    "Which thread has which number: a program's block (above), the 32 threads of its first warp (middle), and "
    "the lanes of that warp's first thread (below), for numbers of 16 bits.",
    number="31.8",
)
guess_loads = predict("4,097 numbers: how many loads and stores does a thread have?", None)
guess_registers = predict("4 warps instead of 8: how many times the registers?", None)
guess_layer = predict("How many times as fast does the layer become?", None)


# %%
def squares_on(chip, num):
    pair = [torch.empty(num, dtype=torch.float16, device="meta") for _ in range(2)]
    grid = (triton.cdiv(num, 1024),)
    return machine_code(chip, lambda: square_kernel[grid](*pair, num, BLOCK=1024))[0]


for num in (4096, 4097):
    code = squares_on("sm_90", num)
    ptx = code.texts["ptx"]
    # The second follows the addresses in the PTX: those that a whole warp asks for with each load.
    found, of_warp = memory_instructions(ptx), warp_loads(ptx, lanes_per_thread=8, itemsize=2)
    print(f"{num:,} numbers, {code.registers} registers per thread, {len(found)} loads and stores:")
    print(*(f"   {each}" for each in found[:3]), sep="\n")
    print("   operations:", dict(num_operations(ptx).most_common(6)))
    print(
        "   bytes from a thread's first number to each load:", [2 * a.offsets[0] for a in of_warp]
    )
    print("   sectors of a warp in each load:", [num_sectors([each]) for each in of_warp], end=", ")
    print(f"in all {num_sectors(of_warp)} for {sum(each.num_bytes for each in of_warp)} bytes")
guess_loads.compare(len(found))
picture(
    sector_map(of_warp[1]),
    "4,097 numbers of 16 bits: what the first warp wants with the second of its eight loads. Memory in "
    "lines of 64 numbers; white lines separate the sectors.",
    number="31.9",
)

# %% [markdown]
# (Printed are the first three loads and stores, and the six most frequent operations.) With 4,097, a
# thread needs eight loads instead of one, because each of its numbers has a mask of its own. With 4,096,
# `ld.global.v4.b32` loads four times 32 bits at once: all that a thread needs. The compiler could choose
# it because it knew that 4,096 is a multiple of 16, so that the mask is the same for neighbours.
#
# <details><summary>The other names in the PTX</summary>
# Names with <code>%r</code>, <code>%rs</code> and <code>%rd</code> are registers of 32, 16 and 64 bits;
# an address takes 64. With 4,097, eight comparisons (<code>setp</code>) set the predicates. Three more
# <code>ld</code> load the kernel's arguments: two pointers and <code>num</code>. Four and then eight
# <code>mov</code> put 0 into the registers of the masked loads; the two others read the program's number
# and the thread's. From these, <code>shl</code>, <code>and</code> and <code>or</code> make the number of
# the thread's first lane (with 4,097, of each lane). One <code>mul</code> turns it into bytes, and
# <code>add</code> adds these to the pointers. The other <code>mul</code> are the squares, two at a time
# with 4,096.</details>
#
# Worse, the threads still have the lanes of figure 31.8: the addresses in the PTX say that a thread's
# eight loads begin 2 bytes apart, which is one number. Take load $j$ of the eight, counted from 0. Thread
# $t$ wants lane $8t + j$ with it, and the next thread wants the lane 8 numbers further. That is a stride
# $s$ of 8 numbers of $b$ = 2 bytes. By the formula of coalescing these are $s\, b$ = 16 sectors: 512
# bytes for the 64 that are wanted. Figure 31.9 draws it for $j$ = 1. All eight loads ask for the same 16
# sectors, so a warp asks for 16 sectors eight times where once would do. The first load fetches them, and
# the L1 cache can keep them for the others, so memory need not move more: for 4,096 and for 4,097
# numbers, a warp gets the same 512 bytes from it. The two differ in the requests, because with 4,097 the
# SM has eight times as much to ask for. The eight stores have the same gaps.
#
# So a block that is a row of neighbours is not yet a coalesced load: the compiler must also know that
# neighbours share their mask. At each launch Triton checks which of the whole numbers and addresses
# among a kernel's arguments are multiples of 16. It compiles the kernel once for each such case, so
# 4,096 and 4,097 run different code. Keep rows at multiples of 16 numbers.
#
# ## Occupancy: how many programs fit on an SM
#
# A load from HBM takes hundreds of clock cycles (about 400 in [the
# table](https://pmc.ncbi.nlm.nih.gov/articles/PMC10448217/table/t0015) of the A100). An SM need not
# wait. While one warp waits for its numbers, the SM runs another one that has them. For that, other
# warps must be *there*: their registers and their shared memory must be on the SM already, and that
# limits their number. **Occupancy** is the share of an SM's places for warps that are taken:
#
# $$\text{programs} = \min\!\left(\left\lfloor \frac{4}{W} \left\lfloor \frac{16{,}384}{32\, R}
# \right\rfloor \right\rfloor,\; \left\lfloor \frac{S_{SM}}{S} \right\rfloor,\;
# \left\lfloor \frac{64}{W} \right\rfloor,\; 32\right),
# \qquad \text{occupancy} = \frac{W \cdot \text{programs}}{64}$$
#
# | symbol | meaning | here |
# |---|---|---|
# | $W$ | warps of a program | `num_warps` |
# | $R$ | registers per thread, rounded up to a multiple of 8: a warp gets them in units of 256, 8 for each of its 32 threads | `registers` |
# | $S, S_{SM}$ | bytes of shared memory of a program (and 1 KiB for the system; both together rounded up to a multiple of 128), of an SM | `shared`, 164 KiB |
# | 4, 16,384 | parts of an SM, registers of each (65,536 in all) | white paper, linked above |
# | 64, 32 | places for warps and for programs of an A100's SM | [table](https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities) |
#
# The inner bracket counts the warps that fit in one part. A warp takes all its registers from the part
# that runs it, so what is left over in two parts cannot be joined. By hand: with 54 registers per thread,
# a warp takes 56 × 32 = 1,792 registers. Nine warps (16,384 / 1,792 = 9.1) fit in a part, 36 in an SM. So
# four programs of 8 warps fit. They take 32 of the SM's 64 places for warps: an occupancy of 50 %.
#
# On an NVIDIA GPU, a thread has 255 registers at most. What spills can become the very traffic that
# we set out to avoid. Below, the norm's kernel with rows of 8,192 numbers is compiled for an A100
# (`sm_80`) with five numbers of warps. Then rows of 4,096 for several chips, among them the H100;
# `sm_120` is the GeForce RTX 50 series, and `gfx942` AMD's MI300, whose warps have 64 threads. (So
# there a row is spread over twice as many threads. Its registers here are **vector registers**,
# which have a number for each thread of a warp, as NVIDIA's do.) None of these chips is here: this
# is what the compiler says, and no time.
#
# ## Your turn: an auto-tuner
#
# Which number of warps is fastest? High occupancy hides waiting, but it is no aim in itself: with
# fewer warps for the same block, each thread has more loads under way, which hides waiting, too
# ([Volkov 2010](https://www.nvidia.com/content/gtc-2010/pdfs/2238_gtc2010.pdf)). So some engines
# try: an **auto-tuner** runs each size on the machine itself, and keeps the fastest for the shape
# at hand. That is the last exercise, in plain Python.


# %%
def norm_on(chip, hidden, num_warps):
    x, normalised = (torch.empty(8, hidden, dtype=torch.float16, device="meta") for _ in range(2))
    sizes = {"BLOCK": triton.next_power_of_2(hidden), "num_warps": num_warps}
    run = rms_norm_kernel[(8,)]
    arguments = (x, x, x[0], normalised, hidden, 1e-5)
    return machine_code(chip, lambda: run(*arguments, HAS_RESIDUAL=False, **sizes))[0]


codes = {num_warps: norm_on("sm_80", 8192, num_warps) for num_warps in (16, 8, 4, 2, 1)}
for num_warps, code in codes.items():
    fit = programs_that_fit(num_warps, code.registers, code.shared)
    print(
        f"rows of 8,192, warps: {num_warps:>2}, registers per thread: {code.registers:>3}", end=", "
    )
    print(f"{code.spilled:>3} bytes spilled, {code.shared:>2} bytes shared", end=": ")
    print(f"{fit.num_programs} programs, occupancy {fit.occupancy:.0%} ({fit.limit})")
guess_registers.compare(round(codes[4].registers / codes[8].registers, 2))
for chip in ("sm_80", "sm_90", "sm_120", "gfx942"):
    code = norm_on(chip, 4096, 8)
    print(f"rows of 4,096, 8 warps, {chip:>6}: {code.registers} registers, {code.spilled} spilled")
picture(
    occupancy_map(
        {f"{warps} per program": (warps, c.registers, c.shared) for warps, c in codes.items()}
    ),
    "The 65,536 registers of one SM, divided among programs (a light or dark piece each). The labels on "
    "the left are warps per program, and a program has a row of 8,192 numbers.",
    number="31.10",
)
task(31, "pick_fastest")

# %%
# exercise: minigen_course.ch31_triton.kernels.pick_fastest
from collections.abc import Callable, Hashable, Sequence
from typing import Any


def pick_fastest(
    key: Hashable,
    sizes: Sequence[Any],
    seconds: Callable[[Any], float],
    found: dict[Hashable, Any],
    repeats: int = 5,
) -> Any:
    """Return the fastest size for problems of this key, and keep it in `found`.

    `seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit
    the chip. A size's first run does not count, because it compiles. A size that fits is run
    `repeats` times more, and its median counts. If `found` has the key, nothing is run. Raises
    `ValueError` if no size fits.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(31, pick_fastest=pick_fastest)  # your own if it passed, else the course's
many_rows = torch.randn(1024, 4096)


def norm_seconds(num_rows):
    begin = time.process_time()  # of this process alone: what other programs do does not count
    for piece in many_rows.split(num_rows):
        rms_norm_torch(piece, ones, 1e-5)
    return time.process_time() - begin


sizes, num_threads = (1024, 64, 8, 1), torch.get_num_threads()
torch.set_num_threads(1)  # the time of a process is that of all its threads
best_size = mine(tuple(many_rows.shape), sizes, norm_seconds, {})
times = {size: min(norm_seconds(size) for _ in range(3)) for size in sizes}
torch.set_num_threads(num_threads)
for size, seconds in times.items():
    print(f"1,024 rows of 4,096 numbers, {size:>5,} at once: {mark(1e3 * seconds, 'ms')}")
print(f"the tuner's choice: ⟨{best_size:,} rows⟩ at once")
reveal(31, pick_fastest=mine)

# %% [markdown]
# There is no GPU to tune for, so the tuner has tuned torch's operators on your CPU: 1,024 rows are
# normalised all at once, or in pieces of 64, 8 or 1. Two things speak for small pieces. A piece stays in
# the processor's cache from operator to operator, so the cache does what fusion does. And the system
# must provide fresh pages of memory (chapter 11) for each large result, while small ones mostly use the
# same memory again. One thing speaks against them: each piece costs operators of its own, which are the
# CPU's launches. A tuner need not know any of this; it measures.
#
# Now read figure 31.10. A row of it is a kernel, and each light or dark piece is the registers of
# one program. Four programs fit for 2 to 16 warps, so an SM holds four rows of the tensor in its
# registers each time. With half as many warps a thread has twice as many numbers, and about twice
# the registers (here 1.7, 1.9 and 2.1 times, down to 2 warps). What changes is how many threads
# share these rows: 2,048 at the top, 256 for 2 warps. The grey rest lies in the four parts, and
# there it can be too small for one more warp: with 2 warps per program, a warp takes 216 × 32 =
# 6,912 registers. Two fit in a part, and 2,560 are left. (With 8, four more warps would fit, but a
# program needs eight.) With 1 warp, a row does not fit: in float32 it takes 8,192 / 32 = 256
# registers of each thread, and a thread has 255. Eight programs fit, but each spills: 32 threads
# times 304 bytes are 9.7 kB, beside a row of 16 kB in memory. Shared memory limits none of the
# five. A program takes at most 64 bytes of it, for the sums that its warps exchange, and the 1 KiB
# of the system. These 1,088 bytes are rounded up to 1,152, since shared memory is dealt out in
# units of 128 bytes, so 167,936 / 1,152 = 145 programs would fit. (For rows of 4,096 the course's
# kernel took 62 registers per thread above. Here it is 32, because 8 warps share a row, not 4, and
# because the kernel and the type of its numbers are others. With as many numbers per thread as
# there, the engine's kernel took 54 above, on an A100.)
#
# ## The measurement again
#
# First the number of the beginning: the bytes of a sum and a norm for 4,096 rows, by operators and by
# the engine's kernel. (All programs move the same bytes. The recorder watches 16 of them, and the rest
# is multiplication.)
#
# Then what fusion would buy on a GPU, **modelled, not measured**: a layer of Llama-3-8B with 512 tokens,
# on an H100 with 3,350 GB/s and a peak of 989 TFLOP/s (data sheet, half of its 1,979 "with sparsity",
# which count products that are skipped; FLOPs and peak: chapter 17).
#
# | quantity | formula | value |
# |---|---|---|
# | time of the parts: two sums with norms, and a gate | their bytes over 3,350 GB/s: those of operators counted on tensors without memory, those of kernels scaled from the counts above | printed below |
# | weights of the products | 2 · 4,096 · 4,096 (queries, output) + 2 · 4,096 · 1,024 (keys, values) + 3 · 4,096 · 14,336 (gate, up, down) | 218 million |
# | FLOPs of the products | 2 · 512 · weights | 223 billion |
# | FLOPs of attention | 4 · 4,096 · 512 · 513 / 2: for each token that a token sees, 4,096 multiplications and additions for the score, and as many for the value | 2.2 billion |
# | time of products and attention | both FLOPs over 989 TFLOP/s | printed below |
# | gain of the layer | products, attention and parts by operators, over the same with parts by kernels | printed below |
#
# The model errs both ways. It leaves out rotation and store, whose operators move many bytes, too
# (figure 31.7): with them the layer gains more. No kernel reaches the peak, so the products take
# longer, and the layer gains less: a second line assumes half of the peak. Most of the operators'
# tensors have 4 to 15 MB, so an H100's L2 can keep them for the next operator: it may fetch less
# from HBM than we count, and fusion gains less. But the kernels' bytes count the norm's weight once
# per row (8 of 86 MB), which a cache answers, and operators of a few microseconds do not reach
# 3,350 GB/s, and we charge nothing for their launches: in these respects fusion gains more. So the
# layer's two ratios below are a model's, and no limits.

# %%
few, few_others = torch.randn(2, 16, 4096)
watched = record_programs(
    lambda: rms_norm_triton(few, ones, 1e-5, few_others), few=few, few_others=few_others, ones=ones
)
large_fused = bytes_moved(watched) * len(rows) // len(few)
for name, moved, count in (
    ("operators", large_moved, len(large_steps)),
    ("one kernel", large_fused, 1),
):
    print(
        f"{name:>10}: {moved:,} bytes, {moved / large_needed:.2f} times the least, launches: {count}"
    )

many, hidden, ffn, kv_width = 512, 4096, 14336, 1024
wide = torch.empty(many, 2 * ffn, dtype=torch.bfloat16, device="meta")
norm = record_operators(lambda: rms_norm_torch(tokens, tokens[0], 1e-5, tokens))
gates = record_operators(lambda: silu_multiply_torch(wide))
apart = sum(each.num_bytes for each in (*norm, *norm, *gates))
fused = 2 * of_norm * tokens.numel() / x.numel()
fused += bytes_moved(kernels["SiLU x up"]) * wide.numel() / gate_up.numel()
products = hidden * (2 * hidden + 2 * kv_width) + 3 * hidden * ffn  # weights of a layer
flops = 2 * many * products + 4 * hidden * many * (many + 1) // 2  # and causal attention
by_operators, by_kernels = apart / 3350e9, fused / 3350e9
for name, moved in (("operators", apart), ("kernels", fused)):
    print(
        f"two sums with norms and a gate by {name}: {moved / 1e6:.0f} MB, {moved / 3.35e6:.0f} µs"
    )
parts_ratio, layer_ratios = by_operators / by_kernels, {}
for share in (1.0, 0.5):
    rest = flops / (share * 989e12)  # seconds
    layer_ratios[share] = (rest + by_operators) / (rest + by_kernels)
    print(f"products and attention at {share:.0%} of the peak: {1e6 * rest:.0f} µs", end="; ")
    print(f"the parts {parts_ratio:.1f} times as fast, the layer {layer_ratios[share]:.2f}")
guess_layer.compare(round(layer_ratios[1.0], 2), "times")
print(f"the parts of one token, by kernels: {1e6 * by_kernels / many:.2f} µs")
explore(
    launch_gaps,
    "24 kernels in time, modelled: the CPU launches them one by one, or as one graph (5 µs to "
    "launch it). Both ways, at least 1 µs lies between the end of a kernel and the next one.",
    "31.11",
    launch_us=(1.0, 12.0, 0.5, 8.0),
    kernel_us=(1.0, 20.0, 0.5, 2.0),
)

# %% [markdown]
# The kernel stays above the least only because each program asks for the weight, which a cache
# answers. For one token, the bytes of these parts are not what counts: they are moved in a fraction
# of a microsecond, while each launch takes longer. There, two things help: fewer kernels, and a
# recorded decode step that is launched as a whole (a [CUDA graph](../docs/glossary.md#cuda-graph)).
# minigen's engine on a GPU does both. The picture draws 24 kernels both ways. Its times are
# assumptions (from Python, a launch takes several microseconds): move them. Between two kernels, of
# which the second needs the first one's result, the GPU itself takes a moment, however they were
# launched. A kernel that takes longer than a launch hides the next launch: from there on, the GPU
# no longer waits for the CPU, and a graph gains next to nothing. So launches hurt most in decode
# with a small model and few sequences, and hardly in a long prefill.
#
# One could hope for more: one kernel for all 80 layers of a 70B model would need two accesses to
# memory instead of 160. That counts only the row that goes from layer to layer. By hand, for one
# token of Llama-3-70B: the row has 8,192 numbers of 16 bits, 16 kB. Each of 80 layers loads and
# stores it, 2.6 MB in all. The weights have 141 GB, and nearly all must be read however the layers
# are divided among kernels. So such a kernel saves 0.002 % of the bytes. What it can save is
# launches, and the gaps between kernels, which a graph keeps: one kernel can load the next layer's
# weights while this one computes. For Llama-3.2-1B and one sequence on an H100, decoding was over
# 1.5 times as fast as with the engines that its authors [compared it
# with](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles) (vLLM and SGLang).
#
# ## Claims

# %% jupyter={"source_hidden": true}
verdicts(
    "31",
    Claim(
        "A fused softmax moves a quarter of the bytes of its operators",
        f"64 rows of 512 numbers: {len(softmax_steps)} operators move {softmax_ratio:.2f} times the "
        "bytes of one kernel",
        within(softmax_ratio, 3.8, 4.2),
        "for each element the operators read 5 numbers and write 3, the kernel reads 1 and writes 1",
        "[Triton's tutorial on fused softmax]"
        "(https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html)",
    ),
    Claim(
        "A stride of 2 halves the efficiency of loads",
        f"{fetched[1]} bytes fetched with a stride of 1, {fetched[2]} with a stride of 2, for 128 "
        "wanted, counted",
        holds(fetched[2] == 2 * fetched[1]),
        "sectors of 32 bytes come whole; what a cache keeps for a later load is not counted here",
        "[CUDA C++ Best Practices Guide]"
        "(https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#strided-accesses)",
    ),
    Claim(
        "The model gains as much as its fused operators do",
        f"Llama-3-8B, 512 tokens, from bytes and FLOPs of an H100, not measured: the parts "
        f"{parts_ratio:.1f} times, the layer {layer_ratios[0.5]:.2f} to {layer_ratios[1.0]:.2f} times",
        within(layer_ratios[1.0] / parts_ratio, 0.9, 1.1),
        "matrix products take most of a layer's time, and fusing these parts leaves them as they are",
    ),
    Claim(
        "A Triton kernel is Python, and runs as it is on NVIDIA's and AMD's GPUs",
        "interpreted here, and compiled for sm_80, sm_90, sm_120 and gfx942 from the same lines; run "
        "on none of them",
        NOT_TESTED,
        "that it compiles is necessary, not sufficient: blocks and warps that fit one chip may spill "
        "on another, or leave it half idle",
        "[Triton](https://github.com/triton-lang/triton#compatibility)",
    ),
)

# %% [markdown]
# ## Summary
#
# - Small operations between matrix products are limited by the bytes that they move when tensors are
#   large, and by launches when tensors are small. Fusion cuts both.
# - A kernel deals with four memories: HBM, L2, shared memory, registers. Each is faster than the
#   one before, and all but the first are small. A kernel keeps a number in registers from its first
#   use to its last.
# - A kernel is written for one program. Its number says which block of addresses is its own; a mask
#   leaves out what does not exist; masked lanes still count in a maximum or a sum, with the value of
#   `other`.
# - Loads are coalesced: memory comes in sectors of 32 bytes. A block should be a row of neighbours,
#   also when a column is wanted, and a row should have a multiple of 16 numbers, so that the compiler
#   can let a thread load several at once.
# - Where a program loads and stores may depend on data: positions, slots.
# - The registers and the shared memory of a program decide how many programs fit on an SM
#   (occupancy). For the same block, more warps per program mean fewer registers per thread.
# - What the fused parts gain, a whole layer gains in part only, because the matrix products stay as
#   they are.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A kernel squares 1,000 numbers in blocks of 256. How many programs does it
# need, and how many lanes of the last one are masked?</summary>
# Four programs, since 1,000 / 256 is rounded up. The last one begins at place 768, so 232 of its lanes
# exist and 24 are masked.</details>
#
# <details><summary>2. One warp loads 32 numbers of float16. How many sectors does it fetch if they are
# neighbours, and how many if it takes every 16th number?</summary>
# Neighbours are 64 bytes, 2 sectors if they begin at one. Every 16th number lies 32 bytes after the
# one before, so each is in a sector of its own: 32 sectors, 1,024 bytes for 64 wanted.</details>
#
# <details><summary>3. A program of 8 warps takes 40 registers per thread and no shared memory. How many
# fit on an SM of an A100, and what is the occupancy?</summary>
# A warp takes 40 × 32 = 1,280 registers. Twelve warps fit into the 16,384 of a part, 48 into the four
# parts. So six programs of 8 warps fit, which take 48 of 64 places for warps: 75 %.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/stable/design/fusions/)** has kernels in CUDA for a norm with
#   the residual sum, SiLU x up, rotation, and the store into the cache. At compile time it looks
#   through the model's graph of operators (not a CUDA graph) for more to fuse, such as the norm
#   with the rounding to 8 bits that the next product wants. The linked page has a table of these
#   fusions, with a rough gain for most.
# - **[SGLang](https://github.com/sgl-project/sglang)** has such kernels in CUDA, too, and many in Triton.
# - **[torch.compile](https://docs.pytorch.org/docs/stable/torch.compiler.html)** fuses chains of
#   operators by itself, and writes Triton for GPUs.
# - **[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM)** can join the norm and the residual sum with
#   what comes before them on several GPUs: adding up what each has computed (chapter 41). vLLM can, too.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/pull/15631)** looks through its graph of operators
#   for chains that one kernel of it can do at once, such as a norm, the product with its weight and a sum. Ollama
#   builds on the same library, ggml.
# - **Auto-tuning** as in `pick_fastest` is `triton.autotune`. The engine here fixes its sizes by hand, so
#   a start tunes nothing.
#
# ## Further reading
#
# - [Triton's tutorials](https://triton-lang.org/main/getting-started/tutorials/index.html): vector
#   addition, softmax, matrix product, layer norm, attention and more.
# - [Triton-Puzzles](https://github.com/srush/Triton-Puzzles): twelve more kernels to write, in an
#   interpreter, too.
# - [Triton: an intermediate language and compiler for tiled neural network
#   computations](https://doi.org/10.1145/3315508.3329973), Tillet et al. 2019.
# - [Making Deep Learning Go Brrrr From First
#   Principles](https://horace.io/brrr_intro.html), He 2022: compute, bandwidth, overhead, and which of
#   them fusion helps.
# - [CUDA C++ Best Practices
#   Guide](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html): coalescing and occupancy
#   by the maker of the machine.
#
# **Next:** attention, as chapter 14 wrote it, keeps a matrix of scores that grows with the square
# of the text's length. [Chapter 32](32_flash_attention.ipynb) gets by without it.

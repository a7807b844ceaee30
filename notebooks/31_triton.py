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
# [Triton](https://triton-lang.org), a language inside Python. You need no GPU for it. The kernels run
# in an interpreter on your CPU, which shows what each of them touches, and they are compiled to real
# machine code for GPUs that are not here. No kernel of this chapter runs on a GPU: times on a GPU are
# computed from bytes, and say so.
#
# **Afterwards you can** say what a program instance, a block, a mask and a stride are, write a
# kernel, count the bytes that it moves against those that it must, and read what the compiler made
# of it.
#
# **You need** chapters 13 (norm, rotation, gate) and 22 (the pool of keys and values).
# **Time:** about 60 minutes to read and try, about 60 for the exercises.
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

import torch
import triton
import triton.language as tl

from minigen import SamplingParams
from minigen.kernels.triton.elementwise import (
    rms_norm_torch,
    rms_norm_triton,
    rotary_store_torch,
    rotary_store_triton,
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
    measured,
    predict,
    reveal,
    show,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch31_triton.figures import draw_programs, fused_bytes, lanes_in_use
from minigen_course.ch31_triton.gpu_kernels import machine_code
from minigen_course.ch31_triton.lesson import (
    memory_instructions,
    num_operations,
    rms_norm_by,
    rotary_inputs,
    swiglu_by,
)
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.show import best_seconds
from minigen_course.lab.inspect_model import recorded_states, transformer_of
from minigen_course.lab.memory_watch import record_operators
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, bytes_required, interpreted, launch

torch.manual_seed(31)
llm = load_model(weights="float32", enable_prefix_caching=False)
model, config = transformer_of(llm), llm.config
TOKENS = 8
chapter_map("norms", "positions", "feed-forward", "GPU kernels")

# %% [markdown]
# ## A number that hurts
#
# A layer adds what attention found to its input (the *residual*), and normalises the sum (chapter
# 13). In torch that is a line each. Torch starts several **operators** for them. Every operator is a
# kernel of its own: it reads its inputs from memory and writes its result there, and the next one
# reads it again.
#
# Take 4,096 rows of 4,096 numbers. These tensors have 67 MB each, more than the cache of most
# processors. Two of them have to be read, the sum and the result have to be written, and a weight for
# each column has to be read. That is the least that must be moved. `record_operators` counts the
# bytes of each operator's inputs and results. These are **logical bytes**: what the operators ask
# for. A cache may answer a part of them, so memory itself may move less.

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
# Bytes and seconds are of the same tensors, in float32. They need not agree: each new tensor also has
# to be given memory, and this part of the seconds is no traffic.
#
# Now take the tensors of a decode step: eight tokens, 576 numbers each, in 16 bits. The whole tensor
# has 9 kB. It stays in any cache, so traffic to memory is not what hurts. What hurts is the number of
# operators. Each of them is a **launch**, and on a GPU a launch takes some microseconds, whatever it
# computes. (`_to_copy` goes from 16 bits to 32 and back, because the norm is computed in float32.)

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
# The arithmetic is a few operations for each number. What takes the time is fetching the same rows
# again and again when tensors are large, and the launches when they are small. One function that keeps
# a row at hand from its first step to its last moves it once, and is launched once. That is
# [kernel fusion](../docs/glossary.md#kernel-fusion), and the reason to write kernels.
#
# ## The machine, in four lines
#
# The same number can lie in four places. Each place is faster and smaller than the one above it. Here
# they are for an H100 ([Hopper tuning guide](https://docs.nvidia.com/cuda/hopper-tuning-guide/)):
#
# | place | size | who shares it |
# |---|---|---|
# | memory (**HBM**) | 80 GB, 3,350 GB/s | all processors |
# | **L2 cache** | 50 MB | all processors |
# | **shared memory** | up to 228 KB for each processor | the threads of a program |
# | **registers** | 65,536 of 4 bytes for each processor, 256 KB | one thread each |
#
# Three words for what follows. A GPU fetches neighbouring addresses of neighbouring threads in one
# transaction: that is **coalescing**, and Triton arranges it when a block of addresses is a row of
# neighbours. **Occupancy** is how many programs run on a processor at the same time; while one waits
# for memory, another computes. And the registers and the shared memory that a program takes decide how
# many fit.
#
# ## The smallest kernel
#
# A large GPU has over a hundred processors (**streaming multiprocessors**, SM, in NVIDIA's words),
# and each wants several pieces of work at a time. So a kernel is written from the point of view of one
# piece. The function below is run many times at once, always with the same arguments; each run is a
# **program instance**, a *program* for short. What differs is `tl.program_id(0)`, the program's number.
# From it, each program finds out which **block** of neighbouring numbers is its own. (The blocks of
# chapter 21 are something else.)
#
# - `@triton.jit` makes a kernel of the function. For a GPU its body is compiled, and Python never
#   runs it.
# - `x_ptr` is an address: where the tensor's first number lies. Nothing tells how many there are,
#   so `num` is handed in, too.
# - `tl.arange(0, BLOCK)` is a block of whole numbers, 0 to BLOCK - 1; `BLOCK` is a power of two,
#   and known when the kernel is compiled (`tl.constexpr`).
# - An address plus a block of numbers is a block of addresses. `tl.load` fetches what lies there,
#   `tl.store` puts a block there. Between them, arithmetic is on whole blocks.
# - A **mask** says which of the addresses are ours. The others are left alone.
#
# `kernel[grid](...)` *launches* it, that is, starts it; the **grid** says how many programs there
# are. `record_programs` launches it in the interpreter, and writes down what each program loads and
# stores. `bytes_moved` adds that up, and `bytes_required` counts each number once.

# %%
guess_last = predict("Ten numbers, blocks of four: how many does the last program load?", None)


# %%
@triton.jit
def square_kernel(x_ptr, square_ptr, num, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    own = program * BLOCK + tl.arange(0, BLOCK)
    exists = own < num
    numbers = tl.load(x_ptr + own, mask=exists)
    tl.store(square_ptr + own, numbers * numbers, mask=exists)


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
# The interpreter runs one program after the other, in NumPy. On a GPU they run at the same time,
# in any order: no program may count on what another one has stored.
#
# ## Drag it: programs, blocks, and the mask
#
# What one program loads and stores is coloured, what the others do is pale. Take the mask away,
# and the last program reaches for memory of another tensor. The recorder refuses that. A GPU would do
# it anyway. If you are lucky it crashes; if not, it corrupts the other tensor.


# %%
def loads(num, block, program, mask):
    grid = triton.cdiv(num, block)
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
    "Two rows of numbers; those that one program loads and stores are coloured.",
    "31.1",
    num=(1, 24, 1, 10),
    block=[4, 1, 2, 8, 16],
    program=(0, 9, 1, 2),
    mask=True,
)

# %% [markdown]
# ## Your turn: two loads and a store
#
# Three kernels are yours in this chapter, each harder than the one before. `check` runs yours in the
# interpreter with every load and store watched, and says the first thing that is wrong; `hint=1`
# helps. They are plain functions: `check` and `launch` make kernels of them, and take one with
# `@triton.jit` as well. `launch(kernel, grid, ...)` runs it where its tensors are: on a CPU in the
# interpreter, or on a GPU.

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
mine = check(31, add_scaled=add_scaled)  # your own if it passed, else the package's
states = recorded_states(llm, llm.tokenizer.encode("The old lighthouse"))[:, -1]
before, added = states[-2], states[-1] - states[-2]
after = torch.empty_like(before)
launch(mine, (3,), before, added, after, len(before), 1.0, BLOCK=256)
torch.testing.assert_close(after, states[-1])
print(f"{len(after)} numbers as the model has them, by 3 programs")
reveal(31, add_scaled=mine)

# %% [markdown]
# ## Rows, and how far they are apart
#
# Memory has no rows. A matrix is one number after another, and its **stride** says how many numbers
# lie between the beginnings of two rows. Mostly that is the row's length; not always. A layer
# multiplies once for gate and up (chapter 15): they are the halves of one row.
#
# A grid can have two axes: `tl.program_id(0)` is the row, `tl.program_id(1)` the block of columns.
# The engine's kernel for SiLU(gate) x up is launched like that. Here are its loads and stores; you
# write it below. It computes in float32, whatever comes.

# %%
from minigen.kernels.triton.elementwise import silu_multiply_kernel

gate_up = torch.randn(4, 24).half()
gate, up = gate_up.chunk(2, dim=-1)
print("gate is", tuple(gate.shape), "and a row begins", gate.stride(0), "after the one before")
print("up begins", (up.data_ptr() - gate.data_ptr()) // 2, "numbers after gate")
mixed_steps = record_operators(lambda: silu_multiply_torch(gate_up))
with interpreted():
    fused = silu_multiply_triton(gate_up)
torch.testing.assert_close(fused, silu_multiply_torch(gate_up))
mixed = torch.zeros(4, 12).half()
seen = record_programs(
    lambda: silu_multiply_kernel[(4, 2)](gate_up, mixed, 12, BLOCK=8), gate_up=gate_up, mixed=mixed
)
apart = sum(step.num_bytes for step in mixed_steps)
print(f"two operators move {apart} bytes, the kernel {bytes_moved(seen)}", end=", ")
print(f"needed are {bytes_required(seen)}")
picture(
    draw_programs(seen, {"gate_up": (4, 24), "mixed": (4, 12)}),
    "Eight programs, two for each row: each has loaded a piece of gate and the same piece of up. A "
    "colour is a program.",
    number="31.2",
)

# %% [markdown]
# ## Your turn: rows, a stride, two axes
#
# The engine calls this one in every layer.

# %%
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
mine = check(31, silu_multiply=silu_multiply)  # your own if it passed, else the package's
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
expected = llm.generate("The old lighthouse", greedy).text
with interpreted(), using(13, swiglu=swiglu_by(mine)):
    assert llm.generate("The old lighthouse", greedy).text == expected
reveal(31, silu_multiply=mine)

# %% [markdown]
# The engine's own, `silu_multiply_kernel` in
# [elementwise.py](../minigen/kernels/triton/elementwise.py), also rounds where torch would round
# between its two operators, so that both give the same numbers. It makes its row number an integer of
# 64 bits: the harder part asks why.

# %% [markdown]
# ## A row that stays
#
# RMSNorm needs a row twice: for its mean square, then to divide it. A program that has the whole
# row as one block loads it once; the block stays in the processor's **registers**, the memory that
# its arithmetic works on. `tl.sum` adds up a block, with all of its places (**lanes**). Those that
# the mask left out would count in the sum, too; `other=0.0` says what stands in them. (Without
# `other`, a GPU promises nothing. The recorder puts NaN there, so that it is seen.) The engine's
# kernel can also add the residual before it normalises. Whether it does is known when the kernel is
# compiled: without a residual, those lines are not in the machine code.

# %%
from minigen.kernels.triton.elementwise import rms_norm_kernel

sums = [residual.clone(), residual.clone()]
with interpreted():
    ours = rms_norm_triton(x, norm_weight, 1e-5, sums[0])
torch.testing.assert_close(ours, rms_norm_torch(x, norm_weight, 1e-5, sums[1]))
assert torch.equal(*sums)

norm_seen = record_programs(
    lambda: rms_norm_triton(x, norm_weight, 1e-5, residual),
    x=x,
    residual=residual,
    weight=norm_weight,
)
print(f"torch moved {norm_moved:,} bytes, the kernel {bytes_moved(norm_seen):,}", end=", ")
print(f"needed are {bytes_required(norm_seen):,}")

# %% [markdown]
# What it asks for beyond the need is the weight, which every program loads: a GPU's cache has it after
# the first. `BLOCK` is a power of two, and most rows are not. Choose a model's width: the pale
# lanes load nothing, but they compute, and take registers. Smaller blocks waste less; but a row in
# several blocks has to be loaded again for the second pass, or shared among programs.

# %%
explore(
    lambda width: lanes_in_use(width, (64, 256, 512, triton.next_power_of_2(width))),
    "Bars of lanes for blocks of four sizes: those that a row uses, and the masked ones.",
    "31.3",
    width=[576, 896, 1024, 1536, 2880, 5120],
)

# %% [markdown]
# ## Your turn: a row that stays
#
# One line puts yours into the running engine, in the place of every norm. And at the end it is
# compiled for an H100 (more about that below).

# %%
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
mine = check(31, rms_norm_rows=rms_norm_rows)  # your own if it passed, else the package's
with interpreted(), using(13, rms_norm=rms_norm_by(mine)):
    print(llm.generate("The old lighthouse", greedy).text)

tokens = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")  # a shape without memory
(code,) = machine_code("sm_90", lambda: rms_norm_by(mine)(tokens, tokens[0], 1e-5))
print(f"on an H100: {code.registers} registers a thread, {code.spilled} spilled", end=", ")
print(f"{len(memory_instructions(code.texts['ptx']))} loads and stores a thread")
reveal(31, rms_norm_rows=mine)

# %% [markdown]
# The engine's own is `rms_norm_kernel` in
# [elementwise.py](../minigen/kernels/triton/elementwise.py). A softmax of rows is the same kernel with
# another sum: `softmax_kernel` in [gpu_kernels.py](../minigen_course/ch31_triton/gpu_kernels.py).

# %% [markdown]
# ## To three places
#
# After the product for queries, keys and values come the rotation (chapter 13) and the store into
# the pool (chapter 22). One kernel does both: a program has one head of one token. A query goes to
# attention (`result` below); a key and a value go to the token's slot, which the program loads like
# any number. So where a program stores can depend on data. Below, three tokens go to the slots 5, 4
# and 2.

# %%
from minigen.kernels.triton.elementwise import rotary_store_kernel

show(rotary_store_kernel.fn)
given = rotary_inputs(slots=[5, 4, 2], q_heads=2, kv_heads=1, head_dim=8)
seen = record_programs(lambda: rotary_store_triton(*given), **given.named())
picture(
    draw_programs(
        seen, {"qkv": (3, 32), "result": (3, 16), "keys": (8, 8), "values": (8, 8)}, width=11.0
    ),
    "A row of qkv is parted among programs; keys and values land in rows 5, 4 and 2 of the pool.",
    number="31.4",
)

# %% [markdown]
# ## Tiles
#
# A product of matrices has a second way to save bytes. Each number of c = a bᵀ needs a row of a
# and a row of b. A program that computes a **tile** of c, some rows by some columns, loads a
# row of a once for all columns of its tile. (How a kernel multiplies tiles, chapter 32 shows.)

# %%
guess_tiles = predict(
    "Tiles twice as wide and twice as high: what share of the bytes is loaded?", None
)

# %%
from minigen_course.ch31_triton.gpu_kernels import matmul_kernel

SIZE = 64
a, b = torch.randn(2, SIZE, SIZE).half()


def product(tile):
    c = torch.zeros(SIZE, SIZE).half()
    shape = {"BLOCK_M": tile, "BLOCK_N": tile, "BLOCK_K": 64, "TILES_A_GROUP": 8}
    grid = ((SIZE // tile) ** 2,)
    seen = record_programs(
        lambda: matmul_kernel[grid](a, b, c, SIZE, SIZE, SIZE, **shape), a=a, b=b, c=c
    )
    torch.testing.assert_close(c, a @ b.T, atol=0.02, rtol=0.02)
    return seen


def tiles(tile, program):
    if program >= (SIZE // tile) ** 2:
        raise ValueError(f"There are {(SIZE // tile) ** 2} tiles: no program {program}.")
    return draw_programs(product(tile), dict.fromkeys("abc", (SIZE, SIZE)), (program, 0, 0))


explore(
    tiles,
    "Three matrices: the rows of a and of b that one program loads, and the tile that it stores.",
    "31.5",
    tile=[16, 32, 64],
    program=(0, 15, 1, 6),
)
loaded = {}
for tile in (16, 32, 64):
    loaded[tile] = bytes_moved([each for each in product(tile) if not each.is_store])
    print(f"tiles of {tile} by {tile}: {loaded[tile]:,} bytes loaded")
guess_tiles.compare(loaded[32] / loaded[16])

# %% [markdown]
# ## What a layer moves
#
# Now with the model's sizes, for eight tokens in 16 bits: each part of a layer as torch's operators,
# and as one kernel. Bytes are those that programs and operators ask for; launches are counted beside.

# %%
gate_up = torch.randn(TOKENS, 2 * config.ffn).half()
given = rotary_inputs(range(3, 3 + TOKENS), config.q_heads, config.kv_heads, config.head_dim)
twins = {
    "sum and norm": norm_steps,
    "rotation and store": record_operators(lambda: rotary_store_torch(*given)),
    "SiLU x up": record_operators(lambda: silu_multiply_torch(gate_up)),
}
kernels = {
    "sum and norm": norm_seen,
    "rotation and store": record_programs(lambda: rotary_store_triton(*given), **given.named()),
    "SiLU x up": record_programs(lambda: silu_multiply_triton(gate_up), gate_up=gate_up),
}
for name, steps in twins.items():
    apart, moved = sum(step.num_bytes for step in steps), bytes_moved(kernels[name])
    print(f"{name:>18}: {len(steps):>2} operators move {apart:>7,} bytes", end=", ")
    print(f"the kernel {moved:>7,}, needed {bytes_required(kernels[name]):>7,}")
launches = sum(len(steps) for steps in twins.values()) + len(norm_steps)  # two norms in a layer
print(f"launches in a layer, without its products and attention: {launches}, fused: 4")
picture(
    fused_bytes(twins, {name: bytes_moved(each) for name, each in kernels.items()}),
    "For each part of a layer the bytes of its operators in a row (a colour is an operator), and below "
    "its kernel's.",
    number="31.6",
)

# %% [markdown]
# ## Machine code for a GPU that is not here
#
# `triton.jit` compiles a kernel when it is started, for the GPU that it finds, and for the types of
# its arguments. The package's `machine_code` does the same for a GPU of your choice, without
# starting anything; tensors on the device "meta" have a shape, a type and no memory. What comes out
# is *PTX*, NVIDIA's assembly (the machine's instructions as text), and from it the chip's own code.
# Read a line of it from the middle: what is loaded (`ld.global`) or stored (`st.global`), and
# before it `@%p1`: do it only where this **predicate** holds. That is our mask.
#
# A processor runs a program in **threads**, of which 32 at a time, a **warp**, go in step. Triton takes
# 4 warps unless it is told otherwise: a program of 1,024 numbers of 16 bits has 8 of them, 16
# bytes, for each thread. The chip below is an H100, whose code is called `sm_90`. With 4,096 numbers
# the mask cuts off nothing, and with 4,097 it does.

# %%
guess_loads = predict("4,097 numbers: how many loads and stores does a thread have?", None)


# %%
def squares_on(chip, num):
    pair = [torch.empty(num, dtype=torch.float16, device="meta") for _ in range(2)]
    grid = (triton.cdiv(num, 1024),)
    return machine_code(chip, lambda: square_kernel[grid](*pair, num, BLOCK=1024))[0]


for num in (4096, 4097):
    code = squares_on("sm_90", num)
    found = memory_instructions(code.texts["ptx"])
    print(f"{num:,} numbers, {code.registers} registers a thread, {len(found)} loads and stores:")
    print(*(f"   {each}" for each in found[:3]), sep="\n")
    print("   operations:", dict(num_operations(code.texts["ptx"]).most_common(6)))
guess_loads.compare(len(found))

# %% [markdown]
# The compiler knew that 4,096 is a multiple of 16, so that the mask is the same for neighbours: one
# load has all that a thread needs. With 4,097 each number has a predicate of its own, and a load of
# its own. Triton looks at every whole number and every address for this; so keep rows at multiples
# of 16 numbers.
#
# Registers are what a block costs. A thread has 255 at most, and a processor's 65,536 are shared by
# all threads on it. Whatever does not fit in registers is **spilled** to memory, the very traffic
# that we set out to avoid.
# (*Shared* are bytes of a small memory on the chip, through which warps exchange their sums.)
#
# First the norm with rows of 8,192 numbers, by the package's 8 warps and by fewer. Then rows of
# 4,096 for several chips: `sm_80` is an A100, `sm_120` a GeForce RTX 50, and `gfx942` AMD's MI300,
# whose warps have 64 threads. None of these chips is here: this is what the compiler says, and no
# time.

# %%
guess_registers = predict(
    "Rows of 8,192, 4 warps instead of 8: how many times the registers?", None
)


# %%
def norm_on(chip, hidden, num_warps):
    x, normalised = (torch.empty(8, hidden, dtype=torch.float16, device="meta") for _ in range(2))
    sizes = {"BLOCK": triton.next_power_of_2(hidden), "num_warps": num_warps}
    run = rms_norm_kernel[(8,)]
    arguments = (x, x, x[0], normalised, hidden, 1e-5)
    return machine_code(chip, lambda: run(*arguments, HAS_RESIDUAL=False, **sizes))[0]


wanted = [("sm_90", 8192, num_warps) for num_warps in (8, 4, 2, 1)]
wanted += [(chip, 4096, 8) for chip in ("sm_80", "sm_90", "sm_120", "gfx942")]
registers = {}
for each in wanted:
    code = norm_on(*each)
    registers[each] = code.registers
    print("{:>6}: rows of {}, {} warps:".format(*each), end=" ")
    print(f"{code.registers:>3} registers, {code.spilled:>4} spilled, {code.shared} bytes shared")
guess_registers.compare(round(registers["sm_90", 8192, 4] / registers["sm_90", 8192, 8], 2))

# %% [markdown]
# The interpreter is more lenient than the compiler, which refuses a plain global variable, or a
# `break`; and sums are added up in another order on a GPU. So minigen's tests do both: every kernel
# is interpreted, against the same thing in plain torch, and compiled for these four chips.
#
# ## The measurement again

# %%
guess_layer = predict("A layer's norms and gate become several times as fast: and the layer?", None)

# %% [markdown]
# First the number of the beginning: the bytes of a sum and a norm, by operators and by one kernel.
# Then what fusion would buy on a GPU, **modelled, not measured**. Count the two norms and the gate of a
# layer of Llama-3-8B for 512 tokens, on tensors that have no memory, and divide by an H100's 3,350
# GB/s. The layer's products and its attention take their FLOPs over 989 TFLOP/s, the data sheet's
# peak. No kernel reaches the peak, so the products take longer, and the layer gains less than that:
# the second line below assumes half of it.

# %%
of_norm = bytes_moved(norm_seen)
print(f"sum and norm: {norm_moved:,} bytes by {len(norm_steps)} operators, {of_norm:,} by a kernel")
many, hidden, ffn, kv_width = 512, 4096, 14336, 1024
wide = torch.empty(many, 2 * ffn, dtype=torch.bfloat16, device="meta")
norm = record_operators(lambda: rms_norm_torch(tokens, tokens[0], 1e-5, tokens))
gates = record_operators(lambda: silu_multiply_torch(wide))
apart = sum(each.num_bytes for each in (*norm, *norm, *gates))
fused = 2 * of_norm * tokens.numel() / x.numel()
fused += bytes_moved(kernels["SiLU x up"]) * wide.numel() / gate_up.numel()
weights = hidden * (2 * hidden + 2 * kv_width) + 3 * hidden * ffn
flops = 2 * many * weights + 4 * hidden * many * (many + 1) // 2  # products, and causal attention
by_operators, by_kernels = apart / 3350e9, fused / 3350e9
for name, moved in (("operators", apart), ("kernels", fused)):
    print(f"two norms and a gate by {name}: {moved / 1e6:.0f} MB, {moved / 3.35e6:.0f} µs")
parts_ratio, layer_ratios = by_operators / by_kernels, {}
for share in (1.0, 0.5):
    rest = flops / (share * 989e12)  # seconds
    layer_ratios[share] = (rest + by_operators) / (rest + by_kernels)
    print(f"products and attention at {share:.0%} of the peak: {1e6 * rest:.0f} µs", end="; ")
    print(f"the parts {parts_ratio:.1f} times as fast, the layer {layer_ratios[share]:.2f}")
guess_layer.compare(round(layer_ratios[1.0], 2), "times")
print(f"the parts of one token, by kernels: {1e6 * by_kernels / many:.2f} µs")

# %% [markdown]
# For one token, bytes are not what counts: they are moved in a fraction of a microsecond, while
# each launch takes some microseconds. There, fewer kernels are the gain, and recording a whole step
# to launch it at once (a [CUDA graph](../docs/glossary.md#cuda-graph)), which the engine on a GPU
# does.
#
# ## What the production engines do beyond this
#
# - **vLLM** and **SGLang** have these kernels in CUDA: a norm with the residual sum, SiLU x up, a
#   rotation, a store into the cache; and Triton for others, which must run on AMD's GPUs too.
# - **torch.compile** fuses such chains by itself, and writes Triton. vLLM uses it for what lies
#   between its own kernels, and looks through the compiled graph for more to fuse: a norm with the
#   rounding to 8 bits that the next product wants.
# - **TensorRT-LLM** joins the norm and the residual sum with what comes before them on several
#   GPUs: adding up what each of these has computed (chapter 41). vLLM can do that, too.
# - **llama.cpp** looks through its graph for chains that a kernel of it can do at once, such as a
#   norm and the product with its weight.
# - **Autotuning** tries several sizes of block and numbers of warps on the GPU itself, and keeps the
#   fastest. Here they are chosen by hand, so that a start costs nothing.

# %% [markdown]
# ## Claims

# %%
verdicts(
    "31",
    Claim(
        "Fusing elementwise operators saves most of their memory traffic",
        f"sum and norm of {TOKENS} tokens: {norm_moved:,} bytes by {len(norm_steps)} operators, "
        f"{of_norm:,} by one kernel, {norm_moved / of_norm:.1f} times fewer",
        holds(of_norm < norm_moved / 2),
        "every operator reads what the one before wrote; a kernel keeps it in registers",
        "[Triton's tutorial on fused softmax]"
        "(https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html)",
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
# **Next:** attention, as chapter 14 wrote it, keeps a matrix of scores that grows with the square
# of the text. Chapter 32 gets by without it.

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
# Chapter 17 found that writing a token is reading: every weight comes out of memory once, for two
# operations. This chapter runs that race on your own processor, in Python that Numba compiles:
# first to reach what memory gives, then to have fewer bytes to read.
#
# **Afterwards you can** say what your machine's memory allows in tokens a second, write a kernel
# that comes near it, lay weights out so that a vector register likes them, round a model to bytes
# without damage, and tell which speed-up a lower precision can give and which it cannot.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
from functools import partial

import numpy as np
import torch
from numba import njit, prange

from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch34_cpu_kernels import figures as draw
from minigen_course.ch34_cpu_kernels.figures import rounding
from minigen_course.ch34_cpu_kernels.lesson import (
    inputs_of_down,
    quantise_groups,
    rounded,
    scores,
)
from minigen_course.figures.explore import explore, picture
from minigen_course.figures.roofline import roofline
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import Machine, ModelShape, Step
from minigen_course.lab.inspect_model import agreement, perplexity_of, read_along
from minigen_course.lab.texts import ALICE

llm = load_model(weights="float32")
num_threads = torch.get_num_threads()
shape = ModelShape.of(llm.config)
ids = llm.tokenizer.encode(ALICE)
pieces = [ids[start : start + 40] for start in range(0, 160, 40)]

# %% [markdown]
# ## A number that hurts
#
# How fast can this machine read? Ask with a loop that does nothing else: it adds up a quarter of
# a gigabyte, which no cache holds. `njit` compiles the function when it is first called, `prange`
# shares the loop among the cores, and `fastmath` allows sums in another order, so that LLVM may
# add many numbers at once.


# %%
@njit(parallel=True, fastmath=True)
def add_up(numbers):
    total = np.float32(0)
    for place in prange(len(numbers)):
        total += numbers[place]
    return total


numbers = np.ones(2**26, np.float32)
bandwidth = numbers.nbytes / best_seconds(lambda: add_up(numbers), 25)
head = shape.vocab * shape.hidden  # of the products' weights; the rest is the layers'
form_bytes = {  # as minigen keeps them: a scale for each 32, in 4 bits a minimum too, head in 8
    "float32": 4 * shape.multiplied,
    "bfloat16": 2 * shape.multiplied,
    "int8": 8.5 / 8 * shape.multiplied,
    "int4": (5 * (shape.multiplied - head) + 8.5 * head) / 8,
}
measured("this machine reads", bandwidth / 1e9, "GB/s")
for form, num_bytes in form_bytes.items():
    ceiling = mark(bandwidth / num_bytes, "tokens/s")
    print(f"{form:>8}: {num_bytes / 1e6:3.0f} MB a token, so at most {ceiling}")

in_float32 = read_along(llm, ids[:24])
reached = form_bytes["float32"] / in_float32.step_seconds / bandwidth
measured("\nchapter 25's engine in float32", 1 / in_float32.step_seconds, "tokens/s")
measured("of its ceiling", 100 * reached, "%")

# %% [markdown]
# Two things to win, then: come nearer to the ceiling, and have a higher one. Both begin with the
# one thing that a step does most: a matrix times a vector.
#
# ## Ten lines against a library
#
# Take a matrix with rows of 576 numbers, as the model's have, and so many that no cache holds it.
# torch's product for one row of inputs, and the naive one, compiled:


# %%
@njit(parallel=True, fastmath=True)
def product(weight, x, out):
    for row in prange(len(weight)):
        total = np.float32(0)
        for column in range(len(x)):
            total += weight[row, column] * x[column]
        out[row] = total


rng = np.random.default_rng(34)
width = shape.hidden
num_rows = 2**17
weight = rng.standard_normal((num_rows, width), dtype=np.float32)
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
    print(f"{name:>5}: {mark(speed / 1e9, 'GB/s')}, {mark(100 * speed / bandwidth, '%')} of it")

# %% [markdown]
# A library's product is made for many rows of inputs: it cuts matrices into tiles that stay in a
# cache, and shares tiles among the cores. One row has no use for that. (Which way a library takes
# for one row depends on its version and on the processor; where torch is near the line on your
# machine, it took the naive way.) The naive loop reads every weight once, in the order in which it
# lies there. That is all that memory wants: it sees what comes next, and fetches ahead.
#
# ## Fewer bytes: one for each weight
#
# The loop waits for memory, so a quarter of the bytes should take a quarter of the time. Round
# each row to whole steps from -127 to 127, one scale for a row:


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
            total += part * scales[row, group]
        out[row] = total


codes, scales = quantise_groups(weight, width)
by_row = codes[:, 0], scales[:, 0]
seconds["bytes"] = best_seconds(lambda: product_of_bytes(*by_row, x, out))
off_by_row = float(np.abs(out - weight @ x).max())

codes, scales = quantise_groups(weight, 32)
x_groups = x.reshape(-1, 32)
seconds["groups"] = best_seconds(lambda: product_of_groups(codes, scales, x_groups, out), 3)
off_by_group = float(np.abs(out - weight @ x).max())
measured("a scale a row: times as fast as float32", seconds["ours"] / seconds["bytes"])
measured("a scale for each 32: times as fast", seconds["ours"] / seconds["groups"])
largest = np.abs(weight @ x).max()
print(f"errors, of results up to {largest:.0f}: {mark(off_by_row)} and {mark(off_by_group)}")

# %% [markdown]
# The first one pays. But files of 8 or 4 bits do not have a scale a row: they have one for each
# 32 weights (chapter 11), since in a real row a single large weight would cost all others their
# precision. And that product, with the same bytes and a few scales more, collapses.
#
# ## Drag it: bits and groups
#
# Why put up with groups at all? Below are 128 weights of a row, and the steps that they are rounded
# to: each group's reach from its smallest number to its largest, as those of the file's 4-bit
# blocks do. One large weight makes wide steps, for its group alone. Small groups lose least, but
# each pays for a scale and a minimum of 16 bits: on the right, what is paid and what is lost.
#
# The embedding lies in the file in 8 bits. All other matrices lie there in 4, with groups of 32:
# choose one, and find that setting. There is nothing left to round.

# %%
stored = read_gguf(hub.resolve(hub.DEFAULT_MODEL)).tensors


def of_a_matrix(matrix, row, bits, group_size):
    middle = stored[matrix].shape[0] // 2
    rows = stored[matrix].rows(middle, middle + 192).dequantize().numpy()
    return rounding(rows, row, bits, group_size)


explore(
    of_a_matrix,
    "128 weights of a row on the steps of their groups; error against bits, for sizes of groups.",
    matrix=["token_embd.weight", "blk.0.attn_q.weight", "blk.28.ffn_down.weight"],
    row=(0, 191, 1, 5),
    bits=(2, 8, 1, 4),
    group_size=(8, 128, 8, 32),
)

# %% [markdown]
# ## Why groups do not fit
#
# A register of 512 bits has sixteen *lanes*: sixteen numbers that one instruction adds or
# multiplies at once. Lay a row along the lanes, and each lane holds a part of that row's sum; the
# parts have to be added *across* the lanes, which registers do slowly. Once at the end of a row of
# 576 that is nothing. Once for every 32 weights it is most of the work.
#
# So do not lay a row along the lanes. Lay sixteen rows *across* them: lane i belongs to row i, all
# along. No sum ever crosses a lane, and sixteen rows' scales are a register as well. Only the
# weights must lie in that order, so that one load takes the same word (four bytes) of sixteen rows.
# Such a block of sixteen rows is a **panel**. Move the load, and follow one row.

# %%
explore(
    draw.loads,
    "Sixteen rows of a group, and what a load takes: two whole rows, or a word of every row.",
    load=(0, 7, 1, 2),
    row=(0, 15, 1, 5),
)

# %% [markdown]
# ## A register as a value
#
# Numba compiles for one number at a time, and LLVM has to find the vectors by itself. The package
# adds one type to it, whose values are registers: `load` fills sixteen lanes, `+` and `*` work on
# all of them, `store` writes them back. `fused(a, b, c)` is a * b + c, rounded once.

# %%
from minigen.kernels.cpu.simd import fused, load, store


@njit
def lanes_at_work(a, b, c):
    sums, products = load(a, 0) + load(b, 0), load(a, 0) * load(b, 0)
    store(c, 0, sums)
    store(c, 16, fused(products, load(b, 0), load(a, 0)))


a, b, c = np.arange(16, dtype=np.float32), np.full(16, 10, np.float32), np.empty(32, np.float32)
lanes_at_work(a, b, c)
print("a + b:         ", *(f"{each:.0f}" for each in c[:16]))
print("a * b * b + a: ", *(f"{each:.0f}" for each in c[16:]))

# %% [markdown]
# And for bytes there is an instruction that could have been made for this chapter, `vpdpbusd`: in
# each lane it multiplies four bytes by four bytes and adds the four products to the lane's sum. So
# inputs must be bytes, too. One side has to be unsigned: 128 is added to each code of the weights.
# Sixteen rows of our matrix, their first four columns:

# %%
from minigen.kernels.cpu.microkernels import (
    add_byte_dots,
    add_scaled,
    pair_products,
    spread_numbers,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.packed_weights import by_panels

NOTHING = np.zeros(1, np.int32)


@njit
def one_load(tokens, words, inputs, out):
    sums = spread_numbers(tokens, NOTHING, 0, 0)  # zeros in all lanes, for each token
    sums = add_byte_dots(sums, load(words, 0), inputs, 0, 0)
    store_tile(out, 0, 16, sums)


unsigned = codes.view(np.uint8) ^ np.uint8(128)  # the same as adding 128
words = by_panels(unsigned.view(np.int32))
input_codes, input_scales = quantise_groups(x[None], 32)
input_words = input_codes.reshape(-1).view(np.int32)
sums = np.empty(16, np.int32)
one_load((0,), words, input_words, sums)
first_four = unsigned[:16, 0, :4].astype(int), input_codes[0, 0, :4].astype(int)
assert sums.tolist() == (first_four[0] @ first_four[1]).tolist()
picture(
    draw.byte_dots(first_four[0], first_four[1].tolist(), sums.tolist()),
    "Sixteen lanes: four weights each, the same four inputs, and the sums of their products.",
)
(code,) = one_load.inspect_asm().values()
measured("vpdpbusd in this function's machine code", code.count("vpdpbusd"))

# %% [markdown]
# What stands in the machine code depends on the processor that compiled it. One without the
# instruction (a 0 above) gets the same whole numbers by several plainer ones.
#
# ## The product in panels
#
# Now the whole kernel. Its task is one panel. For each group it adds up whole numbers, and then
# multiplies with two scales: the weights' sixteen, and the input's. The sums begin at -128 times
# the sum of the input's group, which takes back the 128 of the weights. `tokens` is a tuple whose
# length the compiler knows: a register of sums for each token, for the next section; one for now.


# %%
MINUS_128 = np.full(16, -128 & 0xFFFF, np.int32)  # pairs of 16-bit numbers: -128, and 0


@njit(parallel=True)
def product_of_panels(tokens, words, scales, inputs, input_scales, sums, groups, out, width):
    for panel in prange(width // 16):
        for first in range(0, len(input_scales) // groups, len(tokens)):
            total = zeros(tokens)
            for group in range(groups):
                at, own = panel * groups + group, first * groups + group
                dots = pair_products(tokens, load(MINUS_128, 0), sums, own, groups)
                for word in range(8):
                    weights = load(words, (at * 8 + word) * 16)
                    dots = add_byte_dots(dots, weights, inputs, own * 8 + word, groups * 8)
                total = add_scaled(total, dots, load(scales, at * 16), input_scales, own, groups)
            store_tile(out, first * width + panel * 16, width, total)


def as_inputs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales and sums of some tokens' inputs."""
    numbers, input_scales = quantise_groups(rows, 32)
    sums = numbers.sum(axis=-1, dtype=np.int32)
    return numbers.reshape(-1).view(np.int32), input_scales.reshape(-1), sums.reshape(-1)


panel_scales, groups = by_panels(scales[..., None]), width // 32
one = as_inputs(x[None])
seconds["panels"] = best_seconds(
    lambda: product_of_panels((0,), words, panel_scales, *one, groups, out, num_rows)
)
rounded_weight = (codes[:512] * scales[:512, :, None]).reshape(512, -1)
rounded_x = (input_codes * input_scales[..., None]).reshape(-1)
np.testing.assert_allclose(out[:512], rounded_weight @ rounded_x, atol=1e-3)
panel_bytes = words.nbytes + panel_scales.nbytes
sizes = {"torch": weight.nbytes, "ours": weight.nbytes, "bytes": by_row[0].nbytes}
rates = {name: sizes.get(name, panel_bytes) / each / 1e9 for name, each in seconds.items()}
names = ("torch, float32", "our loop, float32", "a scale a row", "a scale for each 32", "panels")
picture(
    draw.bars(
        dict(zip(names, rates.values(), strict=True)),
        bandwidth / 1e9,
        "GB of weights a second",
        "How fast each product reads its weights, for one token",
    ),
    "Bars of the speed of five products against the line of what memory gives.",
)
measured("panels: times as fast as groups by rows", seconds["groups"] / seconds["panels"])
measured("panels: times as fast as torch in float32", seconds["torch"] / seconds["panels"])

# %% [markdown]
# ## Tiles: a load for eight tokens
#
# A prompt's tokens come many at a time, and so do those of several requests. A register of weights
# that was loaded once can serve each of them: that is what `tokens` is for. Eight rows of sixteen
# sums, a *tile*, stay in registers while the weights stream by. So with more tokens a step does
# more operations for each byte, until arithmetic is the limit. The same kernel with 1 to 64 tokens,
# and its peak from a few rows which a cache holds:

# %%
from minigen.kernels.cpu.linear import PanelLinear, multiply
from minigen.kernels.cpu.packed_weights import Codes8

few = 512  # rows of weights: small enough for a cache
in_bytes, outs = {}, np.empty(64 * num_rows, np.float32)
for n in (1, 2, 4, 8, 16, 64):
    rows = rng.standard_normal((n, width), dtype=np.float32)
    inputs = as_inputs(rows)
    tile = (0,) * min(n, 8)
    run = partial(product_of_panels, tile, words, panel_scales, *inputs, groups, outs)
    taken = best_seconds(partial(run, num_rows), 3)
    in_bytes[n] = Step(panel_bytes, 0, 2 * n * num_rows * width), taken
of_few = best_seconds(partial(run, few))
peak = max(2 * 64 * few * width / of_few, *(step.flops / each for step, each in in_bytes.values()))
placed = {f"{n} tokens" if n > 1 else "1": each for n, each in in_bytes.items()}
picture(
    roofline(Machine("this machine", bandwidth, peak), placed, "billion operations a second"),
    "A roofline for bytes: steps of 1 to 64 tokens climb along the slope to the flat part.",
)
for n, (_, taken) in in_bytes.items():
    print(f"{n:>2} at once: {mark(taken / in_bytes[1][1], 'times the time of one', 2)}")

halves = panel_scales.astype(np.float16).view(np.uint16)  # as the package keeps them
of_groups = words[: few * width // 4].reshape(-1, 128), halves[: few * groups].view(np.int32)
stream = np.concatenate([of_groups[0], of_groups[1].reshape(-1, 8)], axis=1)  # codes, then scales
few_panels = Codes8(stream.reshape(1, -1))
theirs = PanelLinear(few_panels, width, None, (few,), num_threads)(torch.from_numpy(rows))
torch.set_num_threads(num_threads)  # the package's kernel left torch one, lest they wait
run(few)
ours = torch.from_numpy(outs[: 64 * few]).unflatten(0, (64, few))
assert (theirs - ours).norm() < 0.02 * ours.norm()
print("\nthe package's product is ours, but for rounding: its scales have 16 bits, and its inputs'")
print("256 steps reach from the smallest number of a group to the largest")
show(multiply)

# %% [markdown]
# To the left of the ridge another token costs next to nothing. To its right each costs its
# arithmetic, which is what a prompt pays, eight tokens to a load.
#
# ## What bytes as inputs cost
#
# Inputs are rounded anew at every product, so it must be quick, and it must not harm. Weights are
# well-behaved; inputs have outliers. Here is what the last product of layer 28 is given for the
# first token of our text: every dot a number, with the two lines below which a byte becomes 0. The
# picture counts them.

# %%
given = inputs_of_down(llm, pieces[0], 28)[0].numpy()
picture(
    draw.steps_of_scales(given),
    "Magnitudes of one token's inputs: one scale loses most of them, a scale for each 32 few.",
)
exact = [scores(llm, piece) for piece in pieces]
kinds = {"one scale": "text", "a scale a token": "token", "a scale for each 32": 32}
print(f"{'float32':>20}: perplexity {mark(perplexity_of(exact, pieces))}")
for name, share in kinds.items():
    found = [scores(llm, piece, rounded(share)) for piece in pieces]
    same = mark(100 * agreement(found, exact), "%")
    print(f"{name:>20}: perplexity {mark(perplexity_of(found, pieces))}, same next token {same}")

# %% [markdown]
# One outlier sets the step for everybody who shares its scale. With a scale for all of a product's
# inputs that is forty tokens; with a scale a token, that token; with one for each 32, 31
# neighbours. And panels multiply by a scale for each 32 at hardly any cost.
#
# The package's inputs have a zero for each 32, too, in the place of our 128: where one number is
# large, its group's steps need not reach as far to the other side, and are half as wide. Weights of
# 4 bits have a minimum besides. Neither may come between the bytes and the codes, or these are no
# whole numbers any more. So multiply it out: (byte + zero) times (code x scale + minimum) is bytes
# times codes, and three corrections that need no more than sums of codes and of bytes. In plain
# NumPy, beside the compiled one:

# %%
from minigen.kernels.cpu.linear import panel_linear
from minigen_course.ch34_cpu_kernels.lesson import round_weights
from minigen_course.ch34_cpu_kernels.reference import CodeRows, byte_rows, multiply_codes

show(multiply_codes)
matrix = stored["blk.28.ffn_down.weight"]
made = round_weights(matrix.dequantize().numpy(), 4, 32)  # the file's own codes again
of_rows = CodeRows(made.codes.reshape(*made.scales.shape, 32), made.scales, made.minima)
plain = multiply_codes(of_rows, byte_rows(given[None]))
compiled = panel_linear("int4", num_threads)([matrix], [])(torch.from_numpy(given)[None])
torch.set_num_threads(num_threads)
np.testing.assert_allclose(plain, compiled.numpy(), atol=1e-4 * np.abs(plain).max())
print(f"of {plain.size} products the compiled ones are the same but for float32's last digits")

# %% [markdown]
# ## Attention as two products
#
# A query times all keys, then the shares times all values: these are products, too, with the
# cache in the weights' place. So the cache lies in panels as well. Keys have a lane for each token,
# values one for each number of the head; no sum crosses a lane. Both are bfloat16, two to a word.
# (`kv_cache_dtype="int8"` has them in bytes, four to a word, with a scale for each token and head.)
# (Loading a model in one of these forms compiles its step, if that was never done here: half a
# minute, once. `minigen compile` does it ahead.)

# %%
picture(
    draw.three_products(llm.config.head_dim),
    "A panel of weights, a block of keys, a block of values: what a lane is in each.",
)
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
# That is no accident. A lane adds its products in one order, whatever stands in the other
# registers, so your answer does not depend on who else is being served. A library chooses another
# way of adding for another number of rows, and rounds otherwise.
#
# ## The whole step as one function
#
# One product is not a step: a step of this model is 30 layers of several. Between Python calls
# there is Python; between parallel loops, threads are woken and waited for, and where another
# program has taken a core, all wait for the thread that it displaced. The package has neither. Its
# step is one function, and every thread goes through it, phase by phase: it takes tasks of the
# phase, its own ones first, until none is left, so that nobody is waited for with more than one.

# %%
from minigen.kernels.cpu.step import run_layers
from minigen.kernels.cpu.thread_pool import take

show(run_layers, take)


@njit(parallel=True)
def hardly_anything(out):
    for place in prange(len(out)):
        out[place] += 1


@njit
def many_times(out, times):
    for _ in range(times):
        hardly_anything(out)


counters = np.zeros(num_threads)
region = best_seconds(lambda: many_times(counters, 1000)) / 1000
tiny = torch.zeros(16)
operator = best_seconds(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000
regions = 5 * llm.config.num_layers + 2  # four products and attention; embedding, and the head
measured("to wake the threads and wait for them", 1e6 * region, "µs")
measured("one small operator of torch, called from Python", 1e6 * operator, "µs")
print(f"parallel loops that a step of one token would have: {regions}")
measured("so they would cost", 1e3 * region * regions, "ms a token")
chosen = in_int4.describe()
print(*(f"{part}: {chosen[part]}" for part in ("weights", "runner", "attention")), sep="\n")

# %% [markdown]
# ## The measurement again
#
# The same model in four forms: the time of a step of one token, and what it makes of 160 tokens of
# Alice. Agreement is how often the likeliest next token is that of float32, whose time is that of
# the first cell.

# %%
from minigen.kernels.cpu.compile import compile_step

compile_step("bfloat16")
others = {form: load_model(weights=form) for form in ("bfloat16", "int8")}
others["int4"] = in_int4
found = {form: read_along(each, *pieces).logits for form, each in others.items()}
found["float32"] = exact
step_seconds = {"float32": in_float32.step_seconds}
for form, each in others.items():
    step_seconds[form] = read_along(each, ids[:24]).step_seconds
speeds = {form: 1 / each for form, each in step_seconds.items()}
allowed = {form: 1 / each for form, each in form_bytes.items()}
picture(
    draw.forms(allowed, speeds, "bfloat16"),
    "For each form two bars: the speed that its bytes allow, and the one that it reaches.",
)
agreements = {form: agreement(found[form], exact) for form in speeds}
for form, speed in speeds.items():
    part = mark(100 * speed * form_bytes[form] / bandwidth, "%")
    print(
        f"{form:>8}: {mark(speed / speeds['bfloat16'], 'x bfloat16')}, {part} of its ceiling, "
        f"{mark(100 * agreements[form], '% agreement')}, perplexity "
        f"{mark(perplexity_of(found[form], pieces))}"
    )

# %% [markdown]
# float32 runs layer by layer in torch and stays far below its ceiling; the others are the compiled
# step. Among these, fewer bytes are faster, but not by as much as they are fewer: waking threads,
# rounding inputs, norms and attention take the same time in every form, and are a larger part of a
# shorter step. (More than 100 % is possible: a large cache still holds some of the weights
# from the step before, and other programs may have slowed the measuring of memory.)
#
# ## Your turn
#
# Write `by_panels`: [rows, groups, words] into panels. `check` says the first thing that is wrong;
# add `hint=1` for a hint. The exercises' own notebook (`minigen workspace`) has two more:
# `quantise_groups`, and `multiply_codes` as above.

# %%
# exercise: minigen.kernels.cpu.packed_weights.by_panels
import numpy as np


def by_panels(rows: np.ndarray) -> np.ndarray:
    """Pack [rows, groups, words] into panels, a flat array of [panels, groups, words, lanes]."""
    raise NotImplementedError  # your turn


# %%
mine = check(34, by_panels=by_panels)

# %% [markdown]
# One line puts yours into the running engine: it lays out all weights when the model is loaded.
# (Until it passes, `mine` is the package's own.)

# %%
with using(34, by_panels=mine):
    laid_out = load_model(weights="int4")
print(laid_out.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

# %% [markdown]
# ## What the production engines do beyond this
#
# - **llama.cpp** (and **Ollama** above it) has hand-written kernels for each kind of block and each
#   processor: AVX2, AVX-512, AMX, NEON, SVE. For some it repacks 4-bit weights into four or eight
#   interleaved rows at load, which are panels.
# - AMX and ARM's SME multiply tiles by tiles in one instruction. They raise the flat part of the
#   roofline, so prompts are faster; the slope, and so one token at a time, stays.
# - **vLLM** and **SGLang** run on CPUs through oneDNN and their own kernels, with one process for
#   each socket's memory, since another socket's memory is slower. minigen asks for nothing of the
#   kind.
# - **MLC-LLM** has TVM compile such kernels, and the order of their data, for each target.
# - On GPUs the same ideas have other names: **ExLlamaV2**, Marlin (in vLLM) and **TensorRT-LLM**
#   permute weights when they are loaded, so that a warp's load is what its tensor cores want.

# %%
activations = (
    shape.layers
    * 4
    * (4 * shape.hidden + 2 * (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim + 4 * shape.ffn)
)
to_int4, to_int8 = (speeds[form] / speeds["bfloat16"] for form in ("int4", "int8"))
verdicts(
    "34",
    Claim(
        "Lower precision means proportionally faster decode",
        f"bfloat16, int8, int4: bytes allow 1 : {form_bytes['bfloat16'] / form_bytes['int8']:.2f} "
        f": {form_bytes['bfloat16'] / form_bytes['int4']:.2f}, measured 1 : {mark(to_int8)} : "
        f"{mark(to_int4)}",
        "held within bounds",
        "bytes give the ceiling; what a step does besides reading takes its time in every form",
    ),
    Claim(
        "INT4 makes tokens four times faster",
        f"4-bit weights with their scales and minima, and a head of 8 bits, are "
        f"{8 * form_bytes['int4'] / shape.multiplied:.1f} bits a weight: at most "
        f"{form_bytes['bfloat16'] / form_bytes['int4']:.1f}x bfloat16",
        "did not hold",
        "not even their bytes are a quarter",
    ),
    Claim(
        "INT8 costs 1-3 % of quality, INT4 5-10 %",
        f"the same next token as float32: bfloat16 {mark(100 * agreements['bfloat16'], '%')}, int8 "
        f"{mark(100 * agreements['int8'], '%')}, int4 {mark(100 * agreements['int4'], '%')}",
        "held within bounds",
        "this checkpoint holds 4-bit weights already, so that int4 loses nothing of it here; what "
        "it lost of the original, only the original tells",
    ),
    Claim(
        "Fusing all layers into one kernel saves that many times the traffic",
        f"between its parts a step moves about {activations / 1e6:.1f} MB of activations, of "
        f"weights {form_bytes['int4'] / 1e6:.0f} MB",
        "did not hold",
        "weights must be read in any case; what goes is the overhead of calls",
    ),
)

# %% [markdown]
# **Next:** part 4, many devices: when one memory is too slow or too small, several read at once.

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
# Chapter 17 showed that generating a token is limited by reading the weights: every weight comes
# out of memory once, for two operations. This chapter runs that race on your own processor, in
# Python that Numba compiles: first to reach what memory gives, then to have fewer bytes to read.
#
# **Afterwards you can** say what your machine's memory allows in tokens per second, measure how
# near a kernel comes to it and where the rest goes, lay weights out so that a vector register likes
# them, round numbers to bytes and measure what that costs, and tell which speed-up a lower
# precision can give and which it cannot.
#
# **You need** chapter 11 (blocks of 8 and 4 bits), chapter 17 (the roofline), and chapter 25 (the
# engine). **Time:** about 60 minutes to read and try, about 60 for the exercises.
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
from functools import partial

import numpy as np
import torch
from numba import njit, prange

from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
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
pieces = [ids[:40], ids[40:80]]
chapter_map("CPU kernels", "weights", "KV cache")

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
    print(f"{form:>8}: {num_bytes / 1e6:3.0f} MB per token, so at most {ceiling}")

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
# The loop waits for memory, so a quarter of the bytes should take a quarter of the time. To
# **quantise** numbers is to round them to whole steps. The numbers of a **group** share the size of
# a step, which is their **scale**:
#
# $$s = \frac{\max_i |w_i|}{127}, \qquad q_i = \operatorname{round}(w_i / s), \qquad w_i \approx s\,q_i$$
#
# Here $w_i$ are the numbers of a group, $q_i$ are bytes from -127 to 127, and $s$ is the scale. The
# first exercise writes this function; everything below uses yours as soon as it passes.

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
# Two products of such bytes follow: one with a scale for each row, one with a scale for each 32
# numbers of a row. Both read about a quarter of float32's bytes.

# %%
guess_groups = predict(
    "How many times as fast as float32 with a scale for each 32?", None, within=2
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
            total += part * scales[row, group]
        out[row] = total


codes, scales = to_bytes(weight, width)
by_row = codes[:, 0], scales[:, 0]
seconds["bytes"] = best_seconds(lambda: product_of_bytes(*by_row, x, out))
off_by_row = float(np.abs(out - weight @ x).max())

codes, scales = to_bytes(weight, 32)
x_groups = x.reshape(-1, 32)
seconds["groups"] = best_seconds(lambda: product_of_groups(codes, scales, x_groups, out), 3)
off_by_group = float(np.abs(out - weight @ x).max())
measured("a scale for each row: times as fast as float32", seconds["ours"] / seconds["bytes"])
guess_groups.compare(seconds["ours"] / seconds["groups"], measured=True)
largest = np.abs(weight @ x).max()
print(f"errors, of results up to {largest:.0f}: {mark(off_by_row)} and {mark(off_by_group)}")

# %% [markdown]
# The first one pays. But files of 8 or 4 bits have no scale for a whole row: they have one for each
# 32 weights (chapter 11). And that product, with the same bytes and a few scales more, collapses.
#
# ## Drag it: bits and groups
#
# Why put up with groups at all? Below are 128 numbers of a row, and the steps that they are rounded
# to. In this picture a group's steps reach from its smallest number to its largest, as those of the
# file's 4-bit blocks do. One large number, an **outlier**, makes wide steps, for its group alone.
# Small groups lose least at equal bits per code, but each group pays for a scale and a minimum of
# 16 bits. So compare groups at equal *total* bits, which the right side has on its axis.
#
# There are two matrices to judge by. The inputs of a product exist in float32, and have outliers.
# The embedding is stored in 8 bits, which is enough to judge up to about 6, and has hardly any. The
# third matrix is stored in 4 bits with groups of 32: find that setting, where nothing is left to
# round. For any other purpose its curves are worthless, since it was rounded before.

# %%
stored = read_gguf(hub.resolve(hub.DEFAULT_MODEL)).tensors


def some_rows(name):
    middle = stored[name].shape[0] // 2
    return stored[name].rows(middle, middle + 64).dequantize().numpy()


matrices = {
    "inputs of layer 1's down, float32": lesson.inputs_of_down(llm, ids[:64], 1).numpy(),
    "token_embd.weight, 8 bits": some_rows("token_embd.weight"),
    "blk.0.attn_q.weight, 4 bits": some_rows("blk.0.attn_q.weight"),
}


def of_a_matrix(matrix, row, bits, group_size):
    return draw.rounding(matrices[matrix], row, bits, group_size)


explore(
    of_a_matrix,
    "128 numbers of a row on the steps of their groups; error against total bits, for sizes of groups.",
    "34.1",
    matrix=list(matrices),
    row=(0, 63, 1, 15),
    bits=(2, 8, 1, 4),
    group_size=(8, 128, 8, 32),
)
errors = {}
inputs, embedding, _ = matrices
for name in (inputs, embedding):
    rows = matrices[name]
    for bits, size in ((4, 32), (5, 128), (5, rows.shape[1])):
        errors[name, size] = lesson.relative_error(rows, bits, size)
        total = lesson.bits_a_weight(rows.shape[1], bits, size)
        said = f"{bits} bits in groups of {size:>4}: {total:.2f} bits per number"
        print(f"{name:>33}, {said}, error {mark(100 * errors[name, size], '%', 2)}")
assert errors[inputs, 32] < errors[inputs, 128]
assert errors[embedding, 128] < errors[embedding, 32]

# %% [markdown]
# The answer depends on outliers. For the inputs, 4 bits in groups of 32 beat 5 bits in groups of
# 128, although they need fewer bits in total, and one group for each row is far behind. For the
# embedding it is the other way round: without outliers a group's scale and minimum buy less than
# one more bit would. Small groups are an insurance. A file's format takes it for every matrix,
# because it cannot know which rows will need it.

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
    "34.2",
    load=(0, 7, 1, 2),
    row=(0, 15, 1, 5),
)

# %% [markdown]
# Laying out the words is the second exercise. The cells below use your panels, and so does the
# running engine at the end.

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

NOTHING = np.zeros(1, np.int32)


@njit
def one_load(tokens, words, inputs, out):
    sums = spread_numbers(tokens, NOTHING, 0, 0)  # zeros in all lanes, for each token
    sums = add_byte_dots(sums, load(words, 0), inputs, 0, 0)
    store_tile(out, 0, 16, sums)


unsigned = codes.view(np.uint8) ^ np.uint8(128)  # the same as adding 128
words = pack(unsigned.view(np.int32))
input_codes, input_scales = to_bytes(x[None], 32)
input_words = input_codes.reshape(-1).view(np.int32)
sums = np.empty(16, np.int32)
one_load((0,), words, input_words, sums)
first_four = unsigned[:16, 0, :4].astype(int), input_codes[0, 0, :4].astype(int)
assert sums.tolist() == (first_four[0] @ first_four[1]).tolist()
picture(
    draw.byte_dots(first_four[0], first_four[1].tolist(), sums.tolist()),
    "Sixteen lanes: four weights each, the same four inputs, and the sums of their products.",
    number="34.3",
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
    numbers, input_scales = to_bytes(rows, 32)
    sums = numbers.sum(axis=-1, dtype=np.int32)
    return numbers.reshape(-1).view(np.int32), input_scales.reshape(-1), sums.reshape(-1)


panel_scales, groups = pack(scales[..., None]), width // 32
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
names = (
    "torch, float32",
    "our loop, float32",
    "a scale for each row",
    "a scale for each 32",
    "panels",
)
picture(
    draw.bars(
        dict(zip(names, rates.values(), strict=True)),
        bandwidth / 1e9,
        "GB of weights per second",
        "How fast each product reads its weights, for one token",
    ),
    "Bars of the speed of five products against the line of what memory gives.",
    number="34.4",
)
for name, rate in zip(names, rates.values(), strict=True):
    print(f"{name:>20}: {mark(100 * rate * 1e9 / bandwidth, '%')} of what memory gives")
measured("panels: times as fast as groups by rows", seconds["groups"] / seconds["panels"])
measured("panels: times as fast as torch in float32", seconds["torch"] / seconds["panels"])
measured("  of it by fewer bytes", weight.nbytes / panel_bytes)
measured("  and by reading them faster", rates["panels"] / rates["torch"])

# %% [markdown]
# ## Tiles: a load for eight tokens
#
# A prompt's tokens come many at a time, and so do those of several requests. A register of weights
# that was loaded once can serve each of them: that is what `tokens` is for. Eight rows of sixteen
# sums, a *tile*, stay in registers while the weights stream by. So with more tokens a step does
# more operations for each byte, until arithmetic is the limit. The same kernel with 1 to 64 tokens,
# and its peak from a few rows which a cache holds:

# %%
guess_tiles = predict("64 tokens at once take how many times the time of one?", None, within=2)

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
placed = {f"{n} token{'s' * (n > 1)}": each for n, each in in_bytes.items()}
picture(
    roofline(Machine("this machine", bandwidth, peak), placed, "billion operations per second"),
    "A roofline for bytes: steps of 1 to 64 tokens climb along the slope to the flat part.",
    number="34.5",
)
for n, (_, taken) in in_bytes.items():
    print(f"{n:>2} at once: {mark(taken / in_bytes[1][1], 'times the time of one', 2)}")
guess_tiles.compare(in_bytes[64][1] / in_bytes[1][1], "times", measured=True)

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
# Inputs are rounded at every product, so it must be quick, and it must not harm. Weights have few
# outliers; inputs have large ones. Here is what the last product of layer 28 is given for the
# first token of our text: every dot is a number, with the two lines below which a byte becomes 0.
# The picture counts them. Below it the whole model runs with inputs that are rounded so.

# %%
guess_scale = predict("One scale for all inputs of a product: % of the same next tokens?", None)

# %%
given = lesson.inputs_of_down(llm, pieces[0], 28)[0].numpy()
picture(
    draw.steps_of_scales(given),
    "Magnitudes of one token's inputs: one scale loses most of them, a scale for each 32 few.",
    number="34.6",
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
# One outlier sets the step for all numbers that share its scale. With a scale for all of a
# product's inputs these are the numbers of forty tokens; with a scale per token, those of that
# token; with one for each 32, 31 neighbours. And panels multiply by a scale for each 32 at hardly
# any cost.
#
# The package's inputs have a zero for each 32, too, in the place of our 128: where one number is
# large, its group's steps need not reach as far to the other side, and are half as wide. Weights of
# 4 bits have a minimum besides. Neither may come between the bytes and the codes, or these are no
# whole numbers any more. How can a product of such numbers still be made of whole numbers only?
# That is the third exercise, in plain NumPy. Yours is compared with the compiled product below.

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
from minigen.kernels.cpu.linear import panel_linear
from minigen_course.ch34_cpu_kernels.reference import byte_rows

my_product = check(34, multiply_codes=multiply_codes)
reveal(34, multiply_codes=my_product)
matrix = stored["blk.28.ffn_down.weight"]
made = lesson.round_weights(matrix.dequantize().numpy(), 4, 32)  # the file's own codes again
of_rows = CodeRows(made.codes.reshape(*made.scales.shape, 32), made.scales, made.minima)
plain = my_product(of_rows, byte_rows(given[None]))
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
    number="34.7",
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
# registers, so your answer does not depend on the other requests of the step. A library chooses
# another way of adding for another number of rows, and rounds otherwise.
#
# ## The whole step as one function
#
# One product is not a step: a step of this model is 30 layers of several. Between Python calls
# there is Python. Between parallel loops threads are woken and waited for, and if another program
# takes a core, every thread waits for the displaced one. The package's step avoids most of both. It
# is one function, and every thread goes through it, phase by phase. Threads are woken at most once
# per step; between phases they only read a counter until all tasks are done. Each thread takes
# tasks, its own share first, then those of others, so a displaced thread delays a phase by one task
# at most.

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
measured("so they would cost", 1e3 * region * regions, "ms per token")
chosen = in_int4.describe()
print(*(f"{part}: {chosen[part]}" for part in ("weights", "runner", "attention")), sep="\n")

# %% [markdown]
# ## The measurement again
#
# The same model in four forms: the time of a step of one token, and the ceiling of the first cell.
# Then the question where the rest goes. A step that is slower than its bytes allow either does
# something besides, which takes the same time in every form, or it reads more slowly than memory
# can. The two can be told apart by a line through the three compiled forms:
#
# $$t = \frac{b}{B} + c$$
#
# Here $t$ is the time of a step (`step_seconds`), $b$ are its bytes (`form_bytes`), $B$ is the rate
# at which the step reads, and $c$ is what it does besides. If $c$ were all of the loss, every form
# would lose the same time. If $B$ were all, the loss would grow with the bytes.

# %%
from minigen.kernels.cpu.compile import compile_step

compile_step("bfloat16")
others = {form: load_model(weights=form) for form in ("bfloat16", "int8")}
others["int4"] = in_int4
step_seconds = {"float32": in_float32.step_seconds}
for form, each in others.items():
    step_seconds[form] = read_along(each, ids[:24]).step_seconds
speeds = {form: 1 / each for form, each in step_seconds.items()}
allowed = {form: 1 / each for form, each in form_bytes.items()}
picture(
    draw.forms(allowed, speeds, "bfloat16"),
    "For each form two bars: the speed that its bytes allow, and the one that it reaches.",
    number="34.8",
)
lost = {form: each - form_bytes[form] / bandwidth for form, each in step_seconds.items()}
for form, speed in speeds.items():
    part = mark(100 * speed * form_bytes[form] / bandwidth, "%")
    print(
        f"{form:>8}: {mark(speed / speeds['bfloat16'], 'x bfloat16')}, {part} of its ceiling, "
        f"{mark(1e3 * lost[form], 'ms more than its bytes')}"
    )
reached, constant = lesson.rate_and_constant(
    [form_bytes[form] for form in others], [step_seconds[form] for form in others]
)
measured("\nthe line: read at", reached / 1e9, "GB/s")
measured("  of what the first cell read", 100 * reached / bandwidth, "%")
measured("  and the same in every form", 1e3 * constant, "ms")

# %% [markdown]
# float32 runs layer by layer in torch and stays far below its ceiling; the others are the compiled
# step. Read the last column first. Where it falls from bfloat16 to int8 to int4, the loss is mostly
# bandwidth that is not reached, and the speed-up is nearly that of the bytes. Where it is about the
# same in the three rows, the step has a constant part, and that part is a larger share of a shorter
# step, so that fewer bytes gain less. The line says how much there is of each here. Its two numbers
# are as uncertain as the times: three points and one machine, which other programs may use. (More
# than 100 % is possible, and with it a loss or a constant below zero: a large cache still holds
# some of the weights from the step before, and another program may have slowed the measuring of
# memory.)
#
# ## What it costs in quality
#
# Fewer bits are a change of the model, so measure that as well, on 384 tokens of Alice.
# **Agreement** is how often the likeliest next token is the same as in the reference. The **cost**
# is by how many per cent perplexity rises (below zero: it falls); the ± is a 95 % interval, from
# the differences at each token.
#
# One thing cannot be measured here. This checkpoint holds 4-bit weights already, and its embedding
# in 8. So int4 loses nothing of it (the rest is inputs in bytes), and what 4 bits cost the
# original, only the original in 16 bits could tell. Rounding these weights to 8 bits is a fair test
# of 8 bits, and so are keys and values in 8 bits (`kv_cache_dtype="int8"`), which no file has
# rounded before.

# %%
texts = [ids[start : start + 96] for start in range(0, 384, 96)]
readings = {form: read_along(each, *texts).logits for form, each in others.items()}
readings["float32"] = [lesson.scores(llm, text) for text in texts]
in_bytes_too = load_model(weights="int4", kv_cache_dtype="int8")
readings["int4, KV int8"] = read_along(in_bytes_too, *texts).logits
references = {"bfloat16": "float32", "int8": "float32", "int4": "float32", "int4, KV int8": "int4"}
costs = {}
for form, reference in references.items():
    costs[form] = lesson.perplexity_cost(readings[form], readings[reference], texts)
    same = agreement(readings[form], readings[reference])
    cost = mark(costs[form][0], "%", 2), mark(costs[form][1], "%", 2)
    print(f"{form:>13} against {reference:>7}: agreement {mark(100 * same, '%')}, ", end="")
    print(f"cost {cost[0]} ± {cost[1]}")

# %% [markdown]
# The perplexity of one text moves by chance, and the interval says by how much. A cost whose
# interval holds 0 is no cost that this text can show. A small model and 384 tokens are a weak test:
# real ones read tens of thousands of tokens, and ask questions of several kinds besides.
#
# ## Your panels in the engine
#
# One line puts your `by_panels` into the running engine: it lays out all weights when the model is
# loaded. As long as yours has not passed, the package's own runs, and the line below says so.

# %%
with using(34, by_panels=pack):
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
# - Rounding to the nearest step, as here, is the simplest way. [GPTQ](https://arxiv.org/abs/2210.17323)
#   and [AWQ](https://arxiv.org/abs/2306.00978) run a text through the model first (**calibration**):
#   GPTQ corrects the weights still to be rounded for the errors of those before, and AWQ scales up the
#   columns whose inputs are large. [LLM.int8()](https://arxiv.org/abs/2208.07339) keeps outliers of
#   the inputs in 16 bits. vLLM, SGLang and TensorRT-LLM run files of these kinds.
# - On GPUs the same ideas have other names: **ExLlamaV2**, Marlin (in vLLM) and **TensorRT-LLM**
#   permute weights when they are loaded, so that a warp's load is what its tensor cores want.

# %%
activations = (
    shape.layers
    * 4
    * (4 * shape.hidden + 2 * (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim + 4 * shape.ffn)
)
to_int4, to_int8 = (speeds[form] / speeds["bfloat16"] for form in ("int4", "int8"))
fewer = {form: form_bytes["bfloat16"] / form_bytes[form] for form in ("int8", "int4")}
bits = 8 * form_bytes["int4"] / shape.multiplied
traffic = (form_bytes["int4"] + activations) / form_bytes["int4"]
kv_cost, kv_margin = costs["int4, KV int8"]
verdicts(
    "34",
    Claim(
        "A lower precision makes decoding faster in proportion to its bytes",
        f"bfloat16, int8, int4: bytes allow 1 : {fewer['int8']:.2f} : {fewer['int4']:.2f}, measured "
        f"1 : {mark(to_int8)} : {mark(to_int4)}; the claim's bounds are ± 10 % for int4",
        within(to_int4 / fewer["int4"], 0.9, 1.1),
        "bytes give the ceiling; a step's constant part and bandwidth not reached decide the rest",
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
        f"{mark(100 * (to_int4 - 1), '% faster')} than bfloat16",
        within(100 * (to_int4 - 1), 20, 40),
        "one token at a time reads weights and little else; large batches gain less",
        measured=True,
    ),
    Claim(
        "INT8 costs 1 to 3 % of quality",
        f"perplexity changes by {mark(costs['int8'][0], '%', 2)} ± {mark(costs['int8'][1], '%', 2)}, weights "
        "and inputs in 8 bits with a scale for each 32",
        within(costs["int8"][0], 1, 3),
        "scales for each 32 keep outliers apart; the source has a scale per channel or token, and "
        "other tests than perplexity",
        "[Kurtic et al. 2024](https://arxiv.org/abs/2411.02355)",
        measured=True,
    ),
    Claim(
        "INT4 costs 5 to 10 % of quality",
        "the checkpoint's weights have 4 bits already",
        NOT_TESTED,
        "only the original in 16 bits could tell what rounding it to 4 bits lost",
    ),
    Claim(
        "A KV cache in INT8 costs less than 1 % of quality",
        f"perplexity changes by {mark(kv_cost, '%', 2)} ± {mark(kv_margin, '%', 2)}, on 384 tokens in contexts "
        "of up to 128",
        holds(kv_cost + kv_margin < 1),
        "each head's keys and values of a token have a scale of their own; long contexts are not tested",
        measured=True,
    ),
    Claim(
        "Fusing all layers into one kernel divides the memory traffic by the number of kernels",
        f"{regions} kernels become one; without any traffic of the {activations / 1e6:.1f} MB of "
        f"activations beside the {form_bytes['int4'] / 1e6:.0f} MB of weights: {traffic:.2f}x less",
        within(traffic, regions / 2, regions),
        "weights must be read in any case; what goes is the overhead of calls",
    ),
)

# %% [markdown]
# **Next:** part 4, many devices: when one memory is too slow or too small, several read at once.

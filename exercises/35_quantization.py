# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 35
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/35_quantization.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/35_quantization.ipynb)
#
# The chapter: [Quantization: fewer bits per weight](../notebooks/35_quantization.ipynb). Its exercises take about 170 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `scale_and_zero` | warm-up | 5 | 10 min |
# | `pack_nibbles` | warm-up | 5 | 10 min |
# | `round_by_groups` | core | 10 | 15 min |
# | `search_factors` | core | 10 | 20 min |
# | `round_columns` | core | 10 | 25 min |
# | `choose_bits` | core | 10 | 25 min |
# | `residual_window` | stretch | 15 | 10 min |
# | bug hunt: `minus_one` | core | 10 | 15 min |
# | bug hunt: `nibble_order` | core | 10 | 20 min |
# | bug hunt: `seen_text` | core | 10 | 20 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using

# %% [markdown]
# ## scale_and_zero
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Choose the grid of a group of weights. A code is a whole number from 0 to 2^bits - 1, and it stands for (code - zero) * scale. The codes must reach from the smallest weight to the largest, and 0 must be among their values: a group of positive weights has the zero point 0. Return the scale, a float, and the zero point, a whole number (rounded, half to even). If all weights are 0, return 1.0 and 0.

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
mine = check(35, scale_and_zero=scale_and_zero)

# %% [markdown]
# Try it:

# %%
import torch
from minigen.quantization.grid import Grid, round_to_nearest

weights = torch.randn(1, 32)
mine_scale, mine_zero = mine(weights[0], 4)
its = round_to_nearest(weights, Grid(4, -1, symmetric=False))
print(f"yours {mine_scale:.5f}, {mine_zero}; minigen's {its.scales.item():.5f}, {its.zeros.item():.0f}")

# %% [markdown]
# **Harder.** With two weights far from the others, the best range does not reach them: they are clipped, and all others are rounded more finely. Try smaller ranges, and return the one with the least squared error. How much smaller may it be, in a group of 32 normally distributed weights?

# %% [markdown]
# ## pack_nibbles
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Pack codes of 4 bits (0 to 15, one in each byte) two to a byte. The first code of a pair has the low four bits, the second one the high four. If the number of codes is odd, the last byte has 0 in its high half. Return a tensor of uint8; the codes that are given must not change.

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
mine = check(35, pack_nibbles=pack_nibbles)

# %% [markdown]
# Try it:

# %%
import torch
from minigen.kv_cache.quantized import unpack

packed = mine(torch.arange(16, dtype=torch.uint8))
print([f"{each:02x}" for each in packed.tolist()])
print("as minigen's KV cache reads them:", unpack(packed, 4).tolist())

# %% [markdown]
# **Harder.** Write the way back: `unpack_nibbles(packed, count)`. Then pack codes of 3 bits without gaps: which of them lie in two bytes, and after how many bytes does the pattern repeat?

# %% [markdown]
# ## round_by_groups
#
# *Core, 10 points, about 15 minutes.*
#
# Round a matrix, [rows, columns], on symmetric grids. In each row, `size` neighbours are a group with one scale: the group's largest magnitude divided by 2^(bits-1) - 1, the largest code. A weight becomes the nearest multiple of its scale. The last group of a row has fewer weights if `size` does not divide the columns. A group of zeros stays as it is. Return the rounded weights, not the codes.

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
mine = check(35, round_by_groups=round_by_groups)

# %% [markdown]
# Try it:

# %%
import torch

weight = torch.randn(64, 128)
weight[:, 5] *= 20
for size in (128, 64, 32, 16):
    wrong = float((mine(weight, 4, size) - weight).norm() / weight.norm())
    print(f"groups of {size}: {100 * wrong:.1f} % wrong, {4 + 16 / size:.2f} bits per weight")

# %% [markdown]
# **Harder.** Scales of 16 bits cost 16 / size bits per weight. Q4_K gives a scale of 6 bits to each 32 weights, and two scales of 16 bits to 8 groups. Round the scales of 8 neighbouring groups to 6 bits, too. What does it cost in error, and what does it save?

# %% [markdown]
# ## search_factors
#
# *Core, 10 points, about 20 minutes.*
#
# Write AWQ's search. The columns of a matrix are multiplied by factors, the result is rounded, and the factors are divided out again: `rounded(weight * factors) / factors`. The factors are the mean magnitude of each input channel to the power of an exponent. Try the exponents 0.00, 0.05, ... 0.95 and return the one with the smallest error: the sum of the squared changes of the outputs `x @ weight.T` over all tokens. `weight` is [rows, columns], `x` are the inputs, [tokens, columns], and `rounded` takes a matrix and returns it on its grid. Of equal errors the smallest exponent wins.

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
mine = check(35, search_factors=search_factors)

# %% [markdown]
# Try it:

# %%
import torch
from minigen_course.ch35_quantization.reference import round_by_groups

weight, x = torch.randn(64, 128), torch.randn(256, 128)
x[:, [3, 77]] *= 50
print(f"two large inputs: exponent {mine(weight, x, lambda w: round_by_groups(w, 3, 64)):.2f}")
print(f"none: {mine(weight, torch.randn(256, 128), lambda w: round_by_groups(w, 3, 64)):.2f}")

# %% [markdown]
# **Harder.** The error of the outputs needs X^T X only: it is the trace of D (X^T X) D^T for a change D. Use it instead of `x`. From how many tokens on is that cheaper? And why must Q, K and V have the same factors, if these are to be folded into the norm before them?

# %% [markdown]
# ## round_columns
#
# *Core, 10 points, about 25 minutes.*
#
# Write GPTQ's loop. `weight` is [rows, columns], `factor` is U, the upper Cholesky factor of the inverse of X^T X, and `rounded(column, i)` returns the values of column i's grid that are nearest to `column`, [rows]. Go through the columns from left to right. Column i takes its nearest values q. Its error (w_i - q) / U[i, i] is then repaid: each later column j loses error * U[i, j]. Return the matrix with all columns rounded; the one that is given must not change.

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
mine = check(35, round_columns=round_columns)

# %% [markdown]
# Try it:

# %%
import torch
from minigen.quantization.gptq import gptq, inverse_factor
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen_course.ch35_quantization.lesson import column_rounder

x = torch.randn(512, 64) @ torch.randn(64, 64)
weight, grid = torch.randn(16, 64), Grid(3, 32, symmetric=False)
found = {
    "yours": mine(weight, inverse_factor(x.T @ x, 0.01), column_rounder(weight, grid)),
    "minigen's": gptq(weight, x.T @ x, grid, static_groups=True).dequantize(),
    "to nearest": round_to_nearest(weight, grid).dequantize(),
}
for name, each in found.items():
    wrong = [relative_error(weight, each), relative_error(x @ weight.T, x @ each.T)]
    print(f"{name}: the weights are {100 * wrong[0]:.1f} % wrong, the outputs {100 * wrong[1]:.1f} %")

# %% [markdown]
# **Harder.** Take the columns in the order of their inputs, the largest first (`act_order`): permute the matrix and X^T X, and put the result back. Which matrices gain from it? Then apply the errors of 128 columns at a time to the columns after them, in one product: the same result, and faster.

# %% [markdown]
# ## choose_bits
#
# *Core, 10 points, about 25 minutes.*
#
# Choose the bits of each matrix within `max_bytes`. `options` has for each matrix its choices (bits, bytes, loss), from few bits to many. All matrices begin with their first choice. Then look at the step of each matrix from its choice to its next one, and of the steps that still fit make the one with the largest loss saved per byte; go on until no step fits that saves loss. Return the bits by matrix. If the first choices do not fit, raise `ValueError` with a sentence.

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
mine = check(35, choose_bits=choose_bits)

# %% [markdown]
# Try it:

# %%
from minigen.quantization.mixed import Choice, choose_exhaustively, choose_greedily

options = {
    "attention": [(2, 100, 6.0), (3, 150, 2.0), (4, 200, 1.0)],
    "mlp": [(2, 400, 9.0), (3, 600, 3.0), (4, 800, 1.0)],
}
choices = {name: [Choice(str(own[0]), *own[1:]) for own in each] for name, each in options.items()}
for max_bytes in (500, 600, 700, 800, 1000):
    found = [choose(choices, max_bytes) for choose in (choose_greedily, choose_exhaustively)]
    its, best = ({name: int(each.form) for name, each in one.choices.items()} for one in found)
    print(f"{max_bytes} bytes: yours {mine(options, max_bytes)}, minigen's {its}, the best {best}")


# %% [markdown]
# **Harder.** Build options in which the greedy choice loses against the best one. (A large step that does not fit any more is a good start.) Then add one thing: at the end, try to exchange one step made for another.

# %% [markdown]
# ## residual_window
#
# *Stretch, 15 points, about 10 minutes.*
#
# Write KIVI's bookkeeping. The newest tokens of a KV cache stay in full precision. A channel's scale is shared by `residual` tokens, so keys get codes only in whole groups: as soon as `residual` keys wait, all of them get codes. A value has scales of its own, so values get codes one by one: the newest `residual` values stay in full. Return how many of the oldest `num_tokens` tokens have codes, for keys and for values.

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
mine = check(35, residual_window=residual_window)

# %% [markdown]
# Try it:

# %%
for num_tokens in (31, 32, 33, 64):
    keys, values = mine(num_tokens, 32)
    print(f"{num_tokens} tokens: {keys} keys and {values} values have codes")

# %% [markdown]
# **Harder.** minigen's cache has pages. A group of keys lies within one block, and the block that a sequence is filling stays in full precision, keys and values. How many tokens have codes with blocks of 32? Why does that make sharing a prefix safe?

# %% [markdown]
# ## A bug hunt: minus_one
#
# *Core, 10 points, about 15 minutes.*
#
# **The report.** *A GPTQ checkpoint of version 2 works. The same model in version 1 writes fluent nonsense. I compared the dequantised matrices: of every eight outputs, one is right to the last bit. The other seven are all shifted by one step of their scale.* The values of a 4-bit matrix are (code - zero) * scale, so a zero point that is wrong by one shifts a whole group, and the errors of a row all have the same sign: they do not cancel in a sum.
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

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
from minigen_course.grading.hunt import hunt

mine = hunt(35, name="minus_one", test=test_zeros, mended=read_zeros)

# %% [markdown]
# ## A bug hunt: nibble_order
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *An AWQ checkpoint whose zero points are all 8 works. The same model with zero points of its own, which should be better, writes nonsense. I compared the dequantised matrices: of every eight adjacent outputs, the first and the last are right. Each of the other six is shifted by a constant within a group: whole steps of its scale.* AWQ's files and GPTQ's both have eight numbers of 4 bits in a word. GPTQ's are in plain order, and AWQ's are not, for the sake of the kernel that unpacks them.
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch35_quantization.hunts.nibble_order
from minigen_course.ch35_quantization.hunts.nibble_order import Matrix, ReadAWQ, Words


def read_awq(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    """Return the weight that AWQ stores with 4 bits: rows are inputs, columns outputs.

    A word is an int32, maybe negative, and has eight numbers of 4 bits of adjacent columns. From
    the lowest bits upwards they belong to columns 0, 2, 4, 6, 1, 3, 5 and 7, in `qweight` and
    in `qzeros`. `qzeros` and `scales` have one row for every `size` rows of `qweight`. `scales` has
    one value per column, in plain order. A value is (code - zero) * scale.
    """
    weight = []
    for row, words in enumerate(qweight):
        group, values = row // size, []
        for column, scale in enumerate(scales[group]):
            place = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
            code = (words[column // 8] >> (4 * place)) & 15
            zero = (qzeros[group][column // 8] >> (4 * (column % 8))) & 15
            values.append((code - zero) * scale)
        weight.append(values)
    return weight


def test_awq(read_awq: ReadAWQ) -> None:
    """Assert what every correct `read_awq` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(35, name="nibble_order", test=test_awq, mended=read_awq)

# %% [markdown]
# ## A bug hunt: seen_text
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *With more calibration windows the quantised model comes closer and closer to the float one. With very many, its perplexity is the best that I have seen at 3 bits. On another text of the same kind, more windows hardly help beyond some number. I have made sure that no test window is used for calibration.* A method that adapts a weight to its calibration text must be judged on text that it has not seen. Otherwise the test measures how well it remembers.
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch35_quantization.hunts.seen_text
import random

from minigen_course.ch35_quantization.hunts.seen_text import SplitText


def split_text(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Return the windows of a text to calibrate on and those to test on, by their first tokens.

    Each window has `length` adjacent tokens. No start occurs twice, no token is in two test
    windows, and none is in a calibration window and in a test window. `seed` draws the calibration
    windows alone: results can be compared only if the test is always the same. The text has at
    least four times as many tokens as all windows together.
    """
    step = num_tokens // num_test
    test = [number * step for number in range(num_test)]
    free = [start for start in range(num_tokens - length + 1) if start not in test]
    return random.Random(seed).sample(free, num_calibration), test


def test_split(split_text: SplitText) -> None:
    """Assert what every correct `split_text` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(35, name="seen_text", test=test_split, mended=split_text)

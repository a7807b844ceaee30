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
# # Exercises of chapter 11
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/11_weights.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/11_weights.ipynb)
#
# The chapter: [Weights on disk: safetensors and GGUF, byte by byte](../notebooks/11_weights.ipynb). Its exercises take about 75 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `read_safetensors_header` | warm-up | 5 | 15 min |
# | `float_of_bits` | core | 10 | 20 min |
# | `unpack_q4_1` | core | 10 | 15 min |
# | `pack_q4_1` | stretch | 15 | 25 min |
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
# ## read_safetensors_header
#
# *Warm-up, 5 points, about 15 minutes.*
#
# Read the header of a safetensors file, and return a `TensorEntry` for each tensor, by name. `begin` and `end` must count from the first byte of the *file*; in the header they count from the end of the header. Leave out `__metadata__`, which is no tensor. Raise `ValueError` for a file that is cut short. Raise it also if the tensors do not cover the data exactly: in the order of their offsets, the first one begins right after the header, each one begins where the one before it ends, and the last one ends with the file. A file without tensors ends with its header.

# %%
# exercise: minigen_course.ch11_weights.reference.read_safetensors_header
from pathlib import Path

from minigen_course.ch11_weights.reference import TensorEntry


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of a safetensors file, by name.

    The offsets of an entry count from the first byte of the file. Raises `ValueError` for a file
    that is cut short, and for tensors that do not cover the bytes after the header exactly once.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(11, read_safetensors_header=read_safetensors_header)

# %% [markdown]
# Try it:

# %%
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

from minigen_course.ch11_weights.reference import map_shards

with TemporaryDirectory(ignore_cleanup_errors=True) as name, using(11, read_safetensors_header=mine):
    save_file({"norm": torch.ones(3)}, Path(name) / "model-1.safetensors")
    save_file({"key": torch.ones(2, 5)}, Path(name) / "model-2.safetensors")
    shards = {"norm": "model-1.safetensors", "key": "model-2.safetensors"}
    index = json.dumps({"weight_map": shards})
    (Path(name) / "model.safetensors.index.json").write_text(index)
    print(sorted(map_shards(Path(name))))


# %% [markdown]
# **Harder.** Refuse an entry whose dtype and shape do not take `end` - `begin` bytes, and a header with the same name twice (`json.loads` has an option for it). What could an attacker gain from each?

# %% [markdown]
# ## float_of_bits
#
# *Core, 10 points, about 20 minutes.*
#
# Return the value of a floating-point number from its bits, which come as a text of "0" and "1": the sign, then `exponent_bits` bits of exponent, then the mantissa. A stored exponent of zeros only is a subnormal number (or zero, which keeps its sign). A stored exponent of ones only is infinity if the mantissa is zero, otherwise nan.

# %%
# exercise: minigen_course.ch11_weights.number_formats.float_of_bits
def float_of_bits(bits: str, exponent_bits: int) -> float:
    """Return the number that bits stand for: the sign first, then exponent and mantissa.

    A stored exponent of zeros means a subnormal number, one of ones means infinity (if the mantissa
    is zero) or nan.

    >>> float_of_bits("1" + "01111100" + "01000000000000000000000", exponent_bits=8)
    -0.15625
    """
    raise NotImplementedError  # your turn


# %%
mine = check(11, float_of_bits=float_of_bits)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch11_weights import figures
from minigen_course.figures.explore import picture

with using(11, float_of_bits=mine):
    drawn = figures.number_bits("-0.15625", "1")
picture(drawn, "A number in seven formats; four of the values were read by your function.")

# %% [markdown]
# **Harder.** FP8 E4M3 has no infinity: a stored exponent of ones is one like others, and only the last pattern, all ones, is nan. Which is its largest number? Write the other direction, too: the nearest number of a format, and its bits.

# %% [markdown]
# ## unpack_q4_1
#
# *Core, 10 points, about 15 minutes.*
#
# Decode blocks of the format Q4_1. A block is 20 bytes: a scale and a minimum (float16), then 16 bytes with 32 levels of 4 bits, first all low halves, then all high halves. A number is level × scale + minimum. `blocks` has the shape (rows, blocks, 20); return float32 of the shape (rows, blocks, 32).

# %%
# exercise: minigen.checkpoint.quant_formats.unpack_q4_1
from minigen.checkpoint.quant_formats import Blocks, Numbers


def unpack_q4_1(blocks: Blocks) -> Numbers:
    """Dequantize Q4_1: 32 numbers of 4 bits, each times the block's scale, plus its minimum.

    A block is 20 bytes: scale and minimum as float16, then 16 bytes of two numbers each.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(11, unpack_q4_1=unpack_q4_1)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch11_weights.lesson import refreshed_formats

params = SamplingParams(temperature=0, max_tokens=8)
with using(11, unpack_q4_1=mine), refreshed_formats():
    llm = load_model(weights="float32")
print(llm.generate("The capital of France is", params).text)

# %% [markdown]
# **Harder.** Write the other direction: the stretch exercise `pack_q4_1` checks it.

# %% [markdown]
# ## pack_q4_1
#
# *Stretch, 15 points, about 25 minutes.*
#
# Quantise rows of numbers to Q4_1, the direction that `unpack_q4_1` reverses. `numbers` is float32 of the shape (rows, columns), and columns is a multiple of 32; return uint8 of the shape (rows, blocks, 20). The stored minimum is the least number of a block, the stored scale is a fifteenth of the distance from the least to the greatest, both rounded to float16. Each number gets the level from 0 to 15 that is *read back* as the nearest value: with the scale and the minimum as they are stored, after rounding. A constant block has a scale of zero, and must be read back as well.

# %%
# exercise: minigen_course.ch11_weights.reference.pack_q4_1
from jaxtyping import Float, UInt8
from torch import Tensor


def pack_q4_1(numbers: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "rows blocks 20"]:
    """Quantize each row's blocks of 32 numbers to Q4_1.

    The stored minimum is the block's least number, and the stored scale a fifteenth of the distance
    to its greatest one, both as float16. Each number gets the level from 0 to 15 that is read back
    as the nearest value.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(11, pack_q4_1=pack_q4_1)

# %% [markdown]
# Try it:

# %%
from minigen import hub
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.quant_formats import unpack_q4_1

file = read_gguf(hub.resolve(hub.DEFAULT_MODEL))
weights = file.tensors["blk.0.attn_q.weight"].dequantize()
again = unpack_q4_1(mine(weights)).flatten(-2)
print("largest change:", float((again - weights).abs().max()))

# %% [markdown]
# **Harder.** Other pairs of scale and minimum may lose less. Try scales a few per cent smaller, which cut off the extreme numbers, and keep the pair with the least squared error for each block. How much does the error of normally distributed numbers fall?

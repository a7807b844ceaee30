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
# # 11 · Weights on disk
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/11_weights.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/11_weights.ipynb)
#
# Before a model says anything, its weights must come from a disk. How they are stored there
# decides how long a server takes to start, how much memory it needs, and whether a file that you
# downloaded may run a program on your machine. This chapter opens two formats of weights byte by
# byte, with nothing but Python's `struct` and `json`. Then it stops reading them at all, and maps
# them into memory instead. At the end you decode numbers of four bits into ordinary floats, and run
# the model on these.
#
# **Afterwards you can** say what every byte of a safetensors or GGUF file means, and refuse a broken
# one; say what memory-mapping saves and what it only moves to later; read a number in FP32, FP16,
# BF16, FP8 or four bits from its bits; and explain why a pickle is no place for weights.
#
# **You need** Python and a little PyTorch: tensors, shapes, dtypes. Of chapter 00 you need *How to read
# this course*.
# **Time:** about 70 minutes to read and try, about 75 for the
# [exercises](../exercises/11_weights.ipynb). On a first reading you can skip
# *Algorithm, number format, container*, *Shards* and *Why not a pickle*.
#
# **Where we are:** **files on disk → tensors in memory** → token ids → embedding → 30 layers →
# output head → next token.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | loading | before the first step | disk bandwidth, memory capacity | L2 runtime | `--weights` | time to load, bytes per weight |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import json
import pickle
import pickletools
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from minigen import hub
from minigen.checkpoint import safetensors
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.gguf_mapping import config_dict
from minigen_course import (
    NOT_TESTED,
    Claim,
    chapter_map,
    check,
    holds,
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
from minigen_course.ch11_weights import figures as draw_files
from minigen_course.ch11_weights import lesson, number_formats, reference
from minigen_course.figures.explore import explore, picture

path = hub.resolve(hub.DEFAULT_MODEL)
scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(scratch.name)
torch.set_num_threads(1)  # so that times depend little on what the other cores do
chapter_map("weights")

# %% [markdown]
# ## A number that hurts
#
# You want one vector out of the model's file: the 576 numbers of its first normalisation (a small step
# inside a layer; here only a name), 2,304 bytes in all. The obvious way is to read the file, and to
# take them from it. `lesson.read_bytes` does that by Python's `Path.read_bytes`, and returns a tensor
# of bytes. The file is a copy of our own, so that no other program uses it, and the system has it in
# memory already, so that the disk plays no part yet.
#
# Predict first: how many megabytes of memory does the process take for these 2,304 bytes? Replace
# `None` by a number, and run the cell. (Values in ⟨ ⟩ were measured on the machine that ran this
# notebook. Yours will differ.)

# %%
guess_memory = predict("Megabytes of memory for a vector of 2,304 bytes?", None, within=1.5)

# %%
own = lesson.copy_to_disk(path, folder / "own.gguf")
wanted = 576 * 4
raw, eager_seconds, eager_memory = lesson.median_cost(lambda: lesson.read_bytes(own))
print(f"bytes in the file: {len(raw):,}; bytes wanted: {wanted:,}, one in {len(raw) // wanted:,}")
measured("time to read it (median of five)", eager_seconds * 1e3, "ms")
guess_memory.compare(eager_memory, "MB", measured=True)
del raw

# %% [markdown]
# Time and memory both grow with the file, and not with what is wanted. This file is small. A model
# of 70 billion weights in two bytes each has 140 GB, and most machines do not have that much memory.
#
# To do better, we must know where in the file the vector is. That is what a file format is for.
#
# ## What a model's folder holds
#
# On the Hugging Face hub, a model is a folder of files. Only one or a few of them hold weights:
#
# | file | what it says | who reads it |
# |---|---|---|
# | `config.json` | the architecture: number of layers, heads, sizes, the kind of positions | the code that builds the model |
# | `generation_config.json` | how answers are meant to be sampled ([temperature](../docs/glossary.md#temperature), [top-p](../docs/glossary.md#top-k-top-p-min-p)) and where they end (ids of end tokens) | the engine, as defaults |
# | `model.safetensors`, or `model-00001-of-00030.safetensors` ... | the weights | this chapter |
# | `model.safetensors.index.json` | which of several files holds which tensor | this chapter |
# | `tokenizer.json` | the vocabulary, and the **merges**: rules that join pieces of text into tokens | chapter 12 |
# | `tokenizer_config.json`, `special_tokens_map.json` | which tokens are special, how they are treated | chapter 12 |
# | `chat_template.jinja` (or a field of `tokenizer_config.json`) | the [chat template](../docs/glossary.md#chat-template): how messages become one text | chapter 12 |
# | `README.md`, `LICENSE` | what the model was trained for, and what you may do with it | you |
#
# From `config.json` alone you can compute how many weights there are, what the
# [KV cache](../docs/glossary.md#kv-cache) takes for each token (chapter 00), and which features an
# engine must support: a [sliding window](../docs/glossary.md#sliding-window) (a token looks back only a
# fixed distance), positions stretched for longer texts (chapter 13),
# [tied embeddings](../docs/glossary.md#tied-embeddings). A wrong number there is an error of shapes if
# you are lucky. A wrong `rope_theta` (it sets how positions are encoded, chapter 13) or a missing end
# token changes answers without any error.
#
# The model of this course came as one file in the format **GGUF**, which holds nearly all of this
# together. minigen translates its metadata into the keys of `config.json`. This is what the file says,
# and where the rest of the folder is found in it:

# %%
file = read_gguf(path)
config = config_dict(file)
print(json.dumps(config, indent=1))
print()
for name, key in {
    "generation_config.json": "tokenizer.ggml.eos_token_id",
    "tokenizer.json, vocabulary": "tokenizer.ggml.tokens",
    "tokenizer.json, merges": "tokenizer.ggml.merges",
    "chat_template.jinja": "tokenizer.chat_template",
}.items():
    value = file.metadata[key]
    unit = "characters" if isinstance(value, str) else "entries"
    print(f"{name:<28}{key:<30}{value if isinstance(value, int) else f'{len(value):,} {unit}'}")

# %% [markdown]
# Thirty layers of width 576, nine query heads that share three KV heads (chapter 14), and a
# vocabulary of 49,152 tokens. `tie_word_embeddings` says that one matrix serves as embedding and as
# output head. Settings of sampling are not in the file, except the token that ends an answer. Now to
# the weights themselves.
#
# ## safetensors by hand
#
# **safetensors** is the simplest format that does the job. A file has three parts:
#
# 1. eight bytes: the length of the header,
# 2. the header, in JSON,
# 3. the bytes of all tensors, one after the other.
#
# Take three tensors of the model, give them three different dtypes, and let the safetensors library
# write them, so that there is something to read by hand. (The figure shows each byte in **hexadecimal**: two
# digits to base 16, where a to f stand for 10 to 15. So 7b is 7 × 16 + 11 = 123. The file stores its
# matrices as 4-bit and 8-bit numbers; `dequantize()` turns them into ordinary floats. You will write that
# step yourself below.) Like nearly every file on the hub, this one gets a small note, its **metadata**.
# (On the hub it is mostly `{"format": "pt"}`, which says that PyTorch wrote the file.)

# %%
tensors = {
    "norm": file.tensors["blk.0.attn_norm.weight"].dequantize(),
    "key": file.tensors["blk.0.attn_k.weight"].dequantize().to(torch.bfloat16),
    "embedding": file.tensors["token_embd.weight"].dequantize().half(),
}
small = folder / "small.safetensors"
save_file(tensors, small, metadata={"model": "SmolLM2-135M-Instruct"})
first = small.read_bytes()[:64]
(header_bytes,) = struct.unpack_from("<Q", first)
picture(
    draw_files.byte_grid(
        first,
        [(f"the header's length: {header_bytes}", 8), ("the header, in JSON", 56)],
        "A safetensors file begins with eight bytes of length, then text",
        letters=True,
    ),
    "The first 64 bytes of a safetensors file in hexadecimal, and below each its character, where "
    "it has one.",
    number="11.1",
)
print(f"{first[0]} + 256 × {first[1]} + 256² × {first[2]} + ... = {header_bytes}")
print(f"the same eight bytes in the wrong order: {int.from_bytes(first[:8], 'big'):,}\n")
text = small.read_bytes()[8 : 8 + header_bytes].decode()
print(text.rstrip().replace("},", "},\n "))
print(f"spaces at the end: {len(text) - len(text.rstrip())}")
print(f"the data begin at byte {8 + header_bytes}, which is 8 × {(8 + header_bytes) // 8}")

# %% [markdown]
# Two questions come up whenever numbers lie in a file.
#
# **In which order are the bytes of one number?** The number 258 is 256 + 2, so it has a byte 1 and a
# byte 2. A **little-endian** file stores the small part first: 2, 1. A **big-endian** file stores 1,
# 2. Nearly all processors of today are little-endian, and so are both formats of this chapter (GGUF also
# exists in big-endian, for the others). The order is a convention: the bytes themselves do not tell it.
# Read in the wrong order, the length is astronomically wrong, as the second line above shows.
#
# **How many bytes does the number have, and is it an integer?** Python's `struct` has a
# [letter for each kind](https://docs.python.org/3/library/struct.html#format-characters). This
# chapter uses
#
# | format | meaning |
# |---|---|
# | `<` at the beginning | little-endian, nothing skipped between the numbers |
# | `B`, `H`, `I`, `Q` | an integer without a sign, of 1, 2, 4, 8 bytes (small letters: with a sign) |
# | `e`, `f`, `d` | a floating-point number of 2, 4 or 8 bytes |
# | `4s`, `?` | four bytes as they are; one byte that is true or false |
#
# So `struct.unpack_from("<Q", data)` reads one integer of eight bytes, and `"<4sIQQQ"` reads four
# bytes, an integer of four bytes, and three integers of eight. The result is always a tuple.

# %% [markdown]
# Now to the header itself, which is printed above. Each tensor has its dtype, its shape, and two
# **offsets**, where its bytes begin and end. The offsets count from the end of the header, because a
# program that writes a file does not know the header's length before it has written the header. In the
# file, with $H$ bytes of header,
#
# $$\text{begin}_{\text{file}} = 8 + H + \text{begin}_{\text{header}}, \qquad
# \text{end}_{\text{file}} = 8 + H + \text{end}_{\text{header}}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $H$ | the length of the header in bytes | `header_bytes` |
# | $\text{begin}_{\text{header}}, \text{end}_{\text{header}}$ | the two offsets, counted from the header's end | `data_offsets` |
# | $\text{begin}_{\text{file}}, \text{end}_{\text{file}}$ | the same places, counted from the first byte of the file | `begin`, `end` |
#
# Three details make the difference between a reader that works here and one that works on the hub:
#
# - **`__metadata__`** stands beside the tensors but is not a tensor: it has no offsets. A loop over all keys
#   fails on it with a `KeyError`, and nearly every file of the hub has it.
# - **Spaces** fill the header up, so that the data begin at a multiple of 8. `json` ignores them.
# - **Nothing may overlap, and nothing may be left over.** A reader that does not check this can be
#   made to hand out the same bytes twice, or to read beyond the end of the file.
#
# ## Your turn: the header
#
# Write the reader before you see ours. A `TensorEntry` is a record of four fields: `TensorEntry("F32",
# (576,), begin, end)`. The next cells of this chapter then use *your* header, or the course's as long
# as yours does not pass.

# %%
task(11, "read_safetensors_header")

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
my_header = check(11, read_safetensors_header=read_safetensors_header)

# %% [markdown]
# ## The smallest version that works
#
# With the header it is easy to read everything. `torch.frombuffer` takes bytes as numbers of a dtype,
# without changing them.


# %%
def read_naive(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    found = {}
    for name, entry in my_header(path).items():
        data = bytearray(memoryview(raw)[entry.begin : entry.end])  # a copy
        numbers = torch.frombuffer(data, dtype=reference.DTYPES[entry.dtype])
        found[name] = numbers.reshape(entry.shape)
    return found


naive, theirs, ours = read_naive(small), load_file(small), safetensors.read_safetensors(small)
for name, tensor in naive.items():
    assert torch.equal(tensor, theirs[name])
    assert torch.equal(tensor.float(), ours[name].dequantize())
print("by hand, the safetensors library and minigen:", len(naive), "equal tensors")
sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in naive.items()}
for name, size in sizes.items():
    print(f"{name:<10}{size:>12,} bytes")
print(f"moved to get the norm: {2 * sum(sizes.values()):,} bytes")
del naive, theirs, ours

# %% [markdown]
# It is right, and it is wasteful. `read_naive` brings all bytes into the process, and then copies
# each of them once more. To get the 2,304 bytes of the norm, it has moved the embedding twice.
#
# ## The idea: map the file
#
# A program never sees the memory chips. It uses **virtual addresses**, and the processor translates
# each of them to a place in physical memory. The operating system hands out memory in **pages**,
# usually of 4,096 bytes (16,384 on Apple's processors), and keeps a **page table** for every process,
# which says where each of its pages is. (Reading itself goes by smaller pieces, **cache lines** of 64
# or 128 bytes. Pages are the unit of *translation*.)
#
# The system also keeps pages of files that were read lately, in the **page cache**. A normal read
# copies bytes from there into the process's own memory.
#
# **Memory-mapping** leaves out the copy. The system notes that a range of addresses *is* this file, and
# reads nothing. When the program uses an address whose page is not in its page table, the processor
# stops it. This is a **page fault**. The system fetches the page from the disk into the page cache, if
# it is not there yet, enters it into the page table, and the program goes on without noticing anything.
#
# In Python, `torch.from_file` asks the system for such a mapping. `size` is the number of elements;
# `shared=False` says that changes to the tensor must never reach the file (the
# [mmap](https://man7.org/linux/man-pages/man2/mmap.2.html) call underneath gets `MAP_PRIVATE`). The
# result is an ordinary tensor. Slicing it and viewing the slice as another dtype are free, since both
# only compute an address. One warning: the file must stay as it is. If another program shortens it, the
# next access to a missing page ends your process. So to replace such a file, write a new one beside it
# and rename that.
#
# **Step through the drawing's six stages.** What differs between process B, which maps the file, and
# process C, which reads it?
#
# **Then predict.** The cell after the drawing maps the small file, uses its norm, and then its
# embedding of 56.6 MB. How many megabytes become **resident**, that is, really are in physical memory,
# when the file is mapped? And how many more when the embedding is used? Your two numbers go into the
# last lines of the drawing's cell.

# %%
explore(
    draw_files.virtual_memory,
    "Three processes and one file of five pages. A and B map the file and share the page cache; C "
    "reads it and pays with a second copy. Dotted pages are not in that page table, or not in the "
    "cache (yet).",
    "11.2",
    stage=(1, len(draw_files.MEMORY_STAGES), 1, 5),
)
guess_mapped = predict("Megabytes after mapping: 0, 28 or 57?", None)
guess_used = predict("Megabytes more after using the embedding?", None, within=1.5)


# %%
def map_naive(path: Path) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, entry in my_header(path).items():
        numbers = raw[entry.begin : entry.end].view(reference.DTYPES[entry.dtype])
        found[name] = numbers.reshape(entry.shape)
    return found


lesson.settle(small)  # as a file that was not written a moment ago
torch.ones(576).sum()  # torch's own code is in memory from here on, and does not count below
mapped, seconds, after_mapping = lesson.cost(lambda: map_naive(small))
measured("time to map", seconds * 1e3, "ms")
_, _, after_norm = lesson.cost(lambda: mapped["norm"].sum())
measured("more megabytes after using the norm", after_norm, "MB")
_, _, after_embedding = lesson.cost(lambda: mapped["embedding"].sum(dtype=torch.float32))
guess_mapped.compare(round(after_mapping), "MB", measured=True)
guess_used.compare(after_embedding, "MB", measured=True)
assert torch.equal(mapped["norm"], tensors["norm"])
del mapped

# %% [markdown]
# Memory follows use. The norm is smaller than one page, and yet brings in more, because the system
# enters neighbours of a page into the page table at once (**fault-around**: on Linux 64 KB, or more
# where the page cache holds larger pieces). It also fetches neighbours when it reads from the disk
# (**readahead**).
#
# ## What is saved, and what is only moved
#
# Now the whole model's file, in both ways: read **eagerly**, which means all of it at once, or mapped.
# After opening, one byte of every page is used, which is enough to bring the page in. We measure it
# **warm**, when the file is in the page cache already, and **cold**, when its pages were dropped before
# and must come from the disk.
#
# A single cold measurement says little. Others use the same disk, and a cache below a virtual machine
# may keep what the machine has dropped. So the two ways take turns, three times after a first round
# that does not count. A cold bar is drawn only if the three openings of its way agree within a factor
# of 1.5, and the system says that the bytes really came from a disk.

# %%
ways = {"eager": (own, lesson.read_bytes), "mapped": (own, lesson.map_bytes)}
openings = lesson.measure_openings(ways)
costs = {name: lesson.middle(each) for name, each in openings.items()}
drawn = {}
for name, each in openings.items():
    print(f"{name:<13} {', '.join(mark(one.seconds * 1e3, 'ms') for one in each)}")
    if name.endswith("warm") or lesson.is_sound(each):
        drawn[name] = costs[name]
measured("warm, read once more into the same memory", lesson.reread_seconds(own) * 1e3, "ms")
picture(
    draw_files.opening_costs(drawn, own.stat().st_size),
    "Medians of three openings of the model's file. Left: the time to open it, and to use one byte of "
    "each page. Right: the physical memory that holds its bytes then, in the process and in the "
    "system's page cache. Below each name is the rate at which the file came.",
    number="11.3",
)

# %% [markdown]
# Four things to see:
#
# - **Opening.** Mapping takes almost no time, whatever the size of the file. Reading pays for
#   everything at once.
# - **First use.** After mapping, first use is not free: the system must enter each page into the page
#   table. **That cost has moved from opening to first use**, and with a cold file, so has the wait for
#   the disk. That wait does not become shorter, and on a fast disk it may become longer, because page
#   faults ask for only a little at a time.
# - **The copy is what is truly saved**, in memory and in time. Reading keeps the file twice, in the
#   page cache and in the process. Its time has two parts: the last printed line is the copy alone, and
#   the rest is page faults again, since *new* memory must be cleared and entered page by page. A second
#   process that maps the file shares the pages of the first. And when memory gets short, the system can
#   drop them without writing anything, because the file still has them.
# - **The disk.** Cold, both ways wait for the same bytes. Reading copies some of them while readahead
#   fetches the next ones, so the slower the disk is, the less the copy matters. Where no cold bar is
#   drawn, the printed cold times prove nothing, and what is said of cold files here is reasoning only.
#
# ## GGUF by hand
#
# GGUF, llama.cpp's format, holds everything in one file: settings, vocabulary, chat template and
# tensors. It begins with a **magic word**, by which programs recognise it, then a version and two
# counts. A header is often imagined as a few lines in front of the weights. This one has 1.8 MB. How
# many per cent of it are vocabulary, that is, tokens and merges?

# %%
guess_vocabulary = predict("Per cent of the header that is vocabulary?", None)
with path.open("rb") as opened:
    begin = opened.read(52)
magic, version, num_tensors, num_keys, length = struct.unpack_from("<4sIQQQ", begin)
picture(
    draw_files.byte_grid(
        begin,
        [
            (f"magic word: {magic.decode()}", 4),
            (f"version: {version}", 4),
            (f"tensors: {num_tensors}", 8),
            (f"keys: {num_keys}", 8),
            (f"length of the first key: {length}", 8),
            (f"the key: {begin[32:52].decode()}", 20),
        ],
        "A GGUF file begins with fixed fields, then keys of any length",
        letters=True,
    ),
    "The first 52 bytes of the model's file: magic word, version, two counts, and the first key.",
    number="11.4",
)

# %% [markdown]
# The count of tensors shows the byte order again: 272 is 256 + 16, in hexadecimal 0x0110, and the file
# has 10 before 01.
#
# What follows has no fixed places. A string is its length and then its bytes. A value is the number
# of its kind, and then the value. An array is the kind of its elements, their number, and then the
# elements. So you cannot jump to a key: the header must be walked through from the front.
#
# One small class walks through it. A length in a file is only a claim, and the file may be broken or
# malicious. `struct` refuses to read beyond the end, but a slice is silently shorter, so `string`
# compares the length with the bytes that are left. Such checks are easily forgotten: without one on
# the places of tensors, a prepared GGUF file could make Ollama, a program that serves GGUF models, give
# away its own memory (in the public list of security holes it is
# [CVE-2026-7482](https://www.cyera.com/research/bleeding-llama-critical-unauthenticated-memory-leak-in-ollama)).

# %%
LAYOUTS = dict(enumerate("BbHhIif?..Qqd"))  # GGUF's numbers of kinds; 8 and 9 have no fixed length
STRING, ARRAY = 8, 9


class Walk:
    def __init__(self, data: bytes, position: int):
        self.data, self.position = data, position

    def numbers(self, layout: str) -> tuple[float, ...]:
        found = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return found

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.position)
        begin = self.position + 8
        if length > len(self.data) - begin:
            raise ValueError(f"it claims {length:,} bytes, but {len(self.data) - begin} are left")
        self.position = begin + length
        return self.data[begin : self.position].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.numbers("IQ")
            if inner == STRING:
                return [self.string() for _ in range(count)]
            return list(self.numbers(f"{count}{LAYOUTS[inner]}"))
        return self.numbers(LAYOUTS[kind])[0]


with path.open("rb") as opened:
    walk = Walk(opened.read(4 * 2**20), position=24)  # the header is within 4 MiB here
metadata = {walk.string(): walk.value(*walk.numbers("I")) for _ in range(num_keys)}
for key, value in metadata.items():
    if key.startswith("llama."):
        print(f"{key:<40} {value}")
try:
    Walk(struct.pack("<Q", 2**60) + b"llama.block_count", position=0).string()
except ValueError as error:
    print("a lying string is refused:", error)

# %% [markdown]
# All but the last (here the width of a head, 576 / 9) stood in `config.json` above, under other names.
# After them, each tensor is described: name, number of dimensions, sizes, number of the stored kind, and
# offset. The sizes stand in the opposite order to torch's: the length of a row comes first.
#
# The tensors begin at a multiple of the **alignment** $a$, mostly 32 bytes. The position $p$ where the
# header ends is rounded up to it:
#
# $$\text{begin} = \Big\lceil \frac{p}{a} \Big\rceil \cdot a$$
#
# Python's `//` rounds down, also for negative numbers, so `-(-p // a)` rounds up. By hand, for p = 45
# and a = 32: −45 // 32 is −2 (since −45/32 = −1.4, rounded *down*), so the result is 2 × 32 = 64.
# Every tensor's offset is a multiple of $a$, too. Vector instructions
# ([SIMD](../docs/glossary.md#simd)) read 16, 32 or 64 bytes at once, and are fastest when these bytes do
# not straddle two cache lines. Only a tensor's *start* is aligned, not each block
# inside it. That is enough for a view of the bytes as other numbers (FP32 needs a multiple of 4), and
# today's processors read from any address, though some do it more slowly.

# %%
print("45 rounded up to a multiple of 32:", -(-45 // 32) * 32)
descriptions = {}
for _ in range(num_tensors):
    name, (dimensions,) = walk.string(), walk.numbers("I")
    shape = walk.numbers(f"{dimensions}Q")[::-1]
    kind, offset = walk.numbers("IQ")
    descriptions[name] = (shape, kind, offset)
alignment = metadata.get("general.alignment", 32)
data_begins = -(-walk.position // alignment) * alignment

assert data_begins == file.data_offset
for name, (shape, _, offset) in descriptions.items():
    assert file.tensors[name].shape == shape
    assert file.offsets[name] == data_begins + offset
print(f"header ends at {walk.position:,}, data begin at {data_begins:,}")
print(f"{len(descriptions)} tensors lie where minigen's reader finds them")
words = [*metadata["tokenizer.ggml.tokens"], *metadata["tokenizer.ggml.merges"]]
vocabulary = sum(len(each.encode()) + 8 for each in words)
guess_vocabulary.compare(round(100 * vocabulary / data_begins), "per cent")
for key, value in file.metadata.items():
    if metadata[key] != (value.tolist() if isinstance(value, np.ndarray) else value):
        print(f"{key}: {metadata[key]!r} by hand, {value!r} by minigen")

# %% [markdown]
# (Here the header happens to end at a multiple of 32, so nothing is skipped.)
#
# Every value equals minigen's but one, and that one is the same four bytes. The author meant 1e-5,
# which float32 cannot hold exactly, so minigen reads the shortest decimal that rounds to the same
# float32.
#
# **The same tensors, in another order.** GGUF is not only another container. llama.cpp's converter
# gives tensors other names, and for models of the Llama architecture it also reorders the rows of two
# matrices in each layer. No field of the file says so, and both orders have the same shape: a reader
# must know it from the architecture's name. Chapter 13 shows what happens, and undoes it.
#
# ## Drag it
#
# The file as a map, from its first byte (top left) to its last. Move over the bytes, or choose a
# tensor; colour by part of the model or by stored kind. Below it, the same map once more: rest the
# pointer on a bar, and it says what it is.

# %%
pieces = draw_files.pieces_of(file)
BY_BYTE = "(the one at the byte)"


def file_map(byte, tensor, colour_by):
    at_byte = tensor == BY_BYTE
    chosen = draw_files.piece_at(pieces, byte) if at_byte else draw_files.named(pieces, tensor)
    return draw_files.file_map(pieces, chosen, by=colour_by)


explore(
    file_map,
    "The model's file in rows of equal length. Each tensor is a bar in the colour of its part; the "
    "framed one is described above.",
    "11.5",
    byte=(0, path.stat().st_size - 1, 100_000, 50_000_000),
    tensor=[BY_BYTE, *(each.name for each in pieces)],
    colour_by=["part", "kind"],
)
draw_files.hover_map(pieces)

# %% [markdown]
# Nearly a third of the file is one tensor, the embedding. Nearly all the rest is thirty times
# the same seven matrices.
#
# ## Numbers as bits
#
# The header gives each tensor a number format. A **floating-point** number has three fields, like
# scientific notation in base 2: a **sign**, an **exponent** that says how large the number is, and a
# **mantissa** with its digits. With $E$ exponent bits and $M$ mantissa bits,
#
# $$x = (-1)^s \cdot 2^{\,e-b} \cdot \Big(1 + \frac{m}{2^M}\Big), \qquad b = 2^{E-1} - 1$$
#
# | symbol | meaning | in FP32 |
# |---|---|---|
# | $s$ | the sign bit: 0 is plus, 1 is minus | 1 bit |
# | $e$ | the stored exponent, an integer without a sign | $E$ = 8 bits |
# | $b$ | the **bias**, which lets small exponents be negative | 127 |
# | $m$ | the mantissa, an integer without a sign | $M$ = 23 bits |
#
# **By hand:** −0.15625 is −1.25 · 2⁻³. The sign is 1. The exponent is −3, stored as −3 + 127 = 124, in
# bits 01111100. What is left beyond 1 is a quarter, so $m = 2^{23}/4 = 2^{21}$: its first two bits are
# 01, and the rest are zeros.
#
# A stored exponent of 0 means a **subnormal** number: there the leading 1 is left out, $x = (-1)^s
# \cdot 2^{1-b} \cdot m/2^M$, so that numbers can shrink to zero evenly. The largest stored exponent
# means infinity or nan (not a number).
#
# The formats of today's models differ in how they spend their bits:
#
# - **FP32** (float32): 8 exponent bits and 23 mantissa bits.
# - **FP16** (float16): 5 and 10. Precise, but it ends at 65,504.
# - **BF16** ([bfloat16](https://cloud.google.com/blog/products/ai-machine-learning/bfloat16-the-secret-to-high-performance-on-cloud-tpus)):
#   8 and 7. It is the upper half of an FP32, rounded: the same range with fewer digits. Most models
#   are published in it.
# - **FP8** ([Micikevicius et al. 2022](https://arxiv.org/abs/2209.05433)): E4M3 has 4 and 3, E5M2 has 5
#   and 2. E4M3 gives up infinity to reach 448 instead of 240.
# - **INT8** and **INT4** are not floating-point at all: an integer from −127 to 127, or from −7 to 7
#   (some formats also use −128 and −8), times a **scale** that many numbers share. That is
#   **quantisation**. A negative integer is stored as 2⁸ (or 2⁴) plus itself, its **two's complement**:
#   −1 in INT4 is 16 − 1 = 15, in bits 1111.
#
# Type a number, such as 3.14159, 448, 65520 or 1e-8. For the integer formats, also type the largest
# number that shares its scale. What happens to a small number beside a large one?

# %%
bits = "".join(f"{byte:08b}" for byte in struct.pack(">f", -0.15625))  # big-endian: sign first
print("-0.15625 in FP32:", bits[0], bits[1:9], bits[9:])
print(f"\n{'':<10}{'bits':>5}{'largest':>12}{'smallest normal':>18}{'step after 1':>14}")
for form in number_formats.FLOATS:
    step = 2.0**-form.mantissa_bits
    print(
        f"{form.name:<10}{form.num_bits:>5}{form.largest:>12.6g}{form.smallest_normal:>18.3g}"
        f"{step:>14.3g}"
    )
explore(
    draw_files.number_bits,
    "One number in seven formats: its bits, the value that is read back, and how far it is off. FP16 "
    "and BF16 have the same size; FP16 is nearer, BF16 reaches further. The integers share a scale "
    "with a largest number, here 1.",
    "11.6",
    number="0.1",
    largest="1",
)

# %% [markdown]
# The integer formats show the price of sharing. With a largest number of 1, INT4 has steps of 1/7, and
# 0.1 becomes 0.143. Type 100 as the largest number, and 0.1 becomes 0 in both. So the numbers that
# share a scale should be few, and of similar size.
#
# ## Your turn: a number from its bits

# %%
task(11, "float_of_bits")


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
my_float = check(11, float_of_bits=float_of_bits)
with using(11, float_of_bits=my_float):
    drawn = draw_files.number_bits("-0.15625", "1")
picture(
    drawn,
    "The number that was computed by hand. Your function, once it passes, reads the values of FP32, "
    "FP16, BF16 and E5M2 from their bits.",
    number="11.7",
)

# %% [markdown]
# ## A block of four bits
#
# Most tensors of our file have the kind `Q4_1`. A row is cut into **blocks** of 32 numbers. A block
# stores a scale $d$ and a **minimum** $m$ in FP16, and for each number a **level** $q$ from 0 to 15, in
# four bits. Each number is read back as
#
# $$w_i = d \cdot q_i + m, \qquad q_i \in \{0, 1, \dots, 15\}$$
#
# | symbol | meaning | bits for a block |
# |---|---|---|
# | $d$ | scale: the distance from one level to the next | 16 |
# | $m$ | minimum: the value of level 0 (not the mantissa from above) | 16 |
# | $q_i$ | level of number $i$ | 32 × 4 |
# | $w_i$ | weight $i$ of the block | |
#
# Two levels share a byte. The **low halves** of the 16 bytes are the levels of numbers 0 to 15, and
# the **high halves** are those of numbers 16 to 31. (In ggml, llama.cpp's library of
# computations: `d`, `m` and `qs`.)
#
# How many bits does a number take in this 4-bit format, everything counted?

# %%
guess_bits = predict("Bits per weight in Q4_1?", None)

# %%
tensor = file.tensors["blk.0.attn_q.weight"]
block = bytes(tensor.data[0, :20].tolist())
scale, minimum = struct.unpack_from("<ee", block)
picture(
    draw_files.byte_grid(
        block,
        [(f"scale d: {scale:.5f}", 2), (f"minimum m: {minimum:.5f}", 2), ("32 levels q", 16)],
        "20 bytes hold 32 weights",
    ),
    "The first block of blk.0.attn_q.weight: two bytes of scale, two of minimum, and sixteen bytes "
    "that hold two levels each.",
    number="11.8",
)
packed = block[4]
low, high = packed % 16, packed // 16
row = tensor.dequantize()[0]
print(f"the first byte of levels is {packed:#04x}: low half {low}, high half {high}")
print(f"number 0:  {scale:.5f} × {low} + ({minimum:.5f}) = {scale * low + minimum:.5f}")
print(f"number 16: {scale:.5f} × {high} + ({minimum:.5f}) = {scale * high + minimum:.5f}")
print(f"minigen:   number 0 is {row[0]:.5f}, number 16 is {row[16]:.5f}")
guess_bits.compare(8 * len(block) // 32)

# %% [markdown]
# Four bits cost five. In general, with blocks of $n$ numbers, $k$ bits for each level and $o$ bits of
# scale and minimum,
#
# $$\text{bits per weight} = k + \frac{o}{n} = 4 + \frac{32}{32} = 5$$
#
# Larger blocks would be cheaper, but then more numbers share one scale.
#
# ## Your turn: four bits, in both directions
#
# The first exercise reads blocks, the second, harder one writes them. `Float[Tensor, "rows columns"]` in
# a signature is [jaxtyping](https://docs.kidger.site/jaxtyping/): a dtype, and a name for each axis.
# `Blocks` and `Numbers` are short for the shapes (rows, blocks, 20 bytes) and (rows, blocks, 32 numbers).

# %%
task(11, "unpack_q4_1")

# %%
# exercise: minigen.checkpoint.quant_formats.unpack_q4_1
from minigen.checkpoint.quant_formats import Blocks, Numbers


def unpack_q4_1(blocks: Blocks) -> Numbers:
    """Dequantize Q4_1: 32 numbers of 4 bits, each times the block's scale, plus its minimum.

    A block is 20 bytes: scale and minimum as float16, then 16 bytes of two numbers each.
    """
    raise NotImplementedError  # your turn


# %%
my_unpack = check(11, unpack_q4_1=unpack_q4_1)

# %% [markdown]
# One line puts your function into the engine. The model below is loaded through it: 210 of its 272
# tensors are Q4_1. Then the same with a reader that takes the high halves first. (`>> 4` moves a byte's
# high half down, `<< 4` moves the low half up, and `|` joins the two.)

# %%
count = "1, 2, 3, 4, 5, 6,"


def high_halves_first(blocks):
    return my_unpack(torch.cat([blocks[..., :4], blocks[..., 4:] >> 4 | blocks[..., 4:] << 4], -1))


with using(11, unpack_q4_1=my_unpack):
    right = lesson.answer(own, count)
with using(11, unpack_q4_1=high_halves_first):
    wrong = lesson.answer(own, count)
print(f"{count!r} continued as the format says: {right!r}")
print(f"and with the high halves first: ⟨{wrong!r}⟩")
assert wrong != right

# %% [markdown]
# Every shape is right, no error is raised, each number is even a weight of the model. But the two
# halves of every block have changed places, and the model can no longer count. (The calls are more
# than 210, since a large tensor is converted a thousand rows at a time.)
#
# This is how a wrong reader fails: silently. That is why readers of weights are tested against another
# library, number by number.

# %%
task(11, "pack_q4_1")

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


# %% [markdown]
# After the check, the cell reads a matrix of the model, packs it again, and compares with the bytes in
# the file. (They were made by llama.cpp, from the original weights.)

# %%
my_pack = check(11, pack_q4_1=pack_q4_1)
blocks = tensor.data.unflatten(-1, (-1, 20))
again = my_pack(my_unpack(blocks).flatten(-2))
print(f"blocks that come back byte for byte: {(again == blocks).all(-1).float().mean():.0%}")

# %% [markdown]
# For ordinary weights, packing loses something only once. After that, each number lies exactly on a
# level, and the largest and the smallest number of a block give the same scale and minimum again.
#
# ## The package's version
#
# The course's and the package's versions of the four exercises open below, once yours have passed. In the
# engine, a `StoredTensor` is a view of mapped bytes together with a format. Opening a file makes 272 of
# them and reads no weight. `rows()` and `columns()` cut such a view without reading it, which is how
# several GPUs each get their part (chapter 41). `dequantize()`, below the exercises, then converts it in
# chunks of a thousand rows, so that the conversion needs little memory besides its result.

# %%
reveal(11, read_safetensors_header=my_header, float_of_bits=my_float)
reveal(11, unpack_q4_1=my_unpack, pack_q4_1=my_pack)
torch.testing.assert_close(my_unpack(blocks).flatten(-2), tensor.dequantize())
assert my_header(small) == reference.read_safetensors_header(small)
show(safetensors.StoredTensor.dequantize)

# %% [markdown]
# ### How large is a model, and what does rounding cost?
#
# The next table is computed: bits per weight with their share of scales, the size of models in
# gigabytes (10⁹ bytes), and the **rounding error** of each format on random numbers of a normal
# distribution, as a share of their size (root mean square: square, take the mean, then the root).
# llama.cpp's Python library, gguf, packs; minigen unpacks.

# %%
normal = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
print(f"{'':<6}{'bits':>6}{'135M':>8}{'8B':>7}{'70B':>7}   rounding error")
for kind in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
    bits = number_formats.bits_per_weight(kind)
    small_gb, middle_gb, large_gb = (bits / 8 * each for each in (0.135, 8, 70))
    error = "-" if kind == "Q6_K" else f"{number_formats.rounding_error(kind, normal):.2%}"
    print(f"{kind:<6}{bits:>6.4g}{small_gb:>8.3f}{middle_gb:>7.1f}{large_gb:>7.1f}{error:>17}")
mine = my_unpack(my_pack(normal)).flatten(-2)
print(f"Q4_1 by the two functions above: {float((mine - normal).norm() / normal.norm()):.2%}")

# %% [markdown]
# From BF16 to Q8_0 the size nearly halves, and the error becomes three times as large. Q4_1 takes less
# than a third of BF16, with an error nearly fifty times as large. (Q6_K has no error here, because the
# gguf library only reads it.) Our file has 0.098 GB instead of 0.084, since its embedding is stored as
# Q8_0 and its header takes 1.8 MB. What a rounding error does to the *answers* is another question,
# because weights are not random, and errors partly cancel in a sum of 576 products. Chapter 34 measures
# it.
#
# ### Algorithm, number format, container
#
# Three things are easily mixed up when one says "format":
#
# | question | answers |
# |---|---|
# | **Algorithm:** by which method were the levels and scales chosen? | round to nearest (your `pack_q4_1`); [GPTQ](https://arxiv.org/abs/2210.17323), which corrects the errors of earlier columns in later ones; [AWQ](https://arxiv.org/abs/2306.00978), which protects the columns that matter most; llama.cpp's searches over scales, with or without an importance matrix (it says how much each column matters) |
# | **Number format:** how do levels and scales lie in memory? | Q4_1; [K-quants](https://github.com/ggml-org/llama.cpp/pull/1684) such as Q4_K, with 256 numbers in a block and 6-bit scales inside it; GPTQ's and AWQ's packed INT32; FP8 with one scale for a row or a tensor |
# | **Container:** which file holds them, and how are they found? | safetensors, GGUF, `.pt` |
#
# The three are largely independent. A GPTQ model on the hub is a safetensors file whose tensors are
# integers, beside a `quantization_config` in `config.json` that says how to read them. And a Q4_K in a
# GGUF may come from plain rounding or from a careful search: the blocks do not tell, and a reader need
# not know.
#
# A safetensors file holds four-bit blocks as well as anything else:

# %%
save_file({"attn_q": my_pack(tensor.dequantize())}, folder / "packed.safetensors")
(entry,) = my_header(folder / "packed.safetensors").values()
inside = load_file(folder / "packed.safetensors")["attn_q"]
print(f"{entry.dtype} {entry.shape}: {entry.end - entry.begin:,} bytes")
print("the same blocks as in the GGUF:", torch.equal(inside, blocks))

# %% [markdown]
# ### Shards
#
# Large models come in several safetensors files, the **shards**, and an index that says which tensor
# is in which. Reading them is a loop over files, with your header, and a careful reader refuses an index
# that names a tensor which its shard does not have:

# %%
shards = folder / "sharded"
shards.mkdir(exist_ok=True)
save_file({"norm": tensors["norm"]}, shards / "model-1.safetensors", {"format": "pt"})
save_file({"key": tensors["key"]}, shards / "model-2.safetensors", {"format": "pt"})
index = {"weight_map": {"norm": "model-1.safetensors", "key": "model-2.safetensors"}}
(shards / "model.safetensors.index.json").write_text(json.dumps(index))

with using(11, read_safetensors_header=my_header):
    both = reference.map_shards(shards)
assert all(torch.equal(both[name], tensors[name]) for name in both)
print("from two shards:", ", ".join(both))
del both

# %% [markdown]
# ## Why not a pickle
#
# Before these formats, weights were **pickled** (`.bin`, `.pt`). A pickle is not data: it is a program
# for a small stack machine that builds objects. Two of its instructions are dangerous together.
# `STACK_GLOBAL` (once `GLOBAL`) fetches any function of any module by its name, and `REDUCE` calls it.
#
# Here is a "file of weights" whose function only prints. It could as well have sent your files away.
# The list shows its instructions, with these two in brackets. When does the function run?

# %%
guess_pickle = predict("When does the function run: at 'load' or at 'use'?", None)


# %%
class Payload:
    def __reduce__(self):
        return print, ("This line was printed by a file of weights, while it was loaded.",)


program = pickle.dumps({"norm": Payload()}, protocol=4)
for op, _, _ in pickletools.genops(program):
    print(f"[{op.name}]" if op.name in ("STACK_GLOBAL", "REDUCE") else op.name, end=" ")
print()
loaded = pickle.loads(program)
guess_pickle.compare("load")
print("and the weights are:", loaded)

torch.save({"payload": Payload()}, folder / "payload.pt")
refused = False
try:
    torch.load(folder / "payload.pt")
except pickle.UnpicklingError:
    refused = True
print("torch.load refused it:", refused)

# %% [markdown]
# `torch.load` today unpickles with a list of allowed functions (`weights_only=True`, the default since
# torch 2.6), and refuses such a file. A program that switches this off is back at the line above. And
# the list itself has had holes, through which a file could run code after all
# ([CVE-2025-32434](https://github.com/pytorch/pytorch/security/advisories/GHSA-53q9-r3pm-6pq6) before
# torch 2.6, [CVE-2026-24747](https://github.com/pytorch/pytorch/security/advisories/GHSA-63cw-57p8-fm3p)
# before 2.10), so keep torch current. A header of safetensors or GGUF has no instruction that calls
# anything. It can lie about lengths, which is why you checked them.
#
# Two other files of a model's folder *are* programs, however. A chat template is a small one, which an
# engine must run in a **sandbox**, an interpreter that allows only harmless operations (chapter 12). And
# a folder may hold Python files, which some loaders run if you tell them to trust remote code.
#
# And mapping? In a plain pickle, the bytes of a tensor lie in the middle of the program, at any
# address, so there is nothing to map. But `torch.save` writes a zip archive, in which each tensor is
# an entry of its own, not compressed and aligned. Such a file can be mapped. It is often said that it
# cannot, so measure it, warm and in turns as for Figure 11.3:

# %%
pt, st = folder / "sound.pt", folder / "sound.safetensors"
torch.save({"embedding": tensors["embedding"]}, pt)
save_file({"embedding": tensors["embedding"]}, st)
lesson.settle(pt), lesson.settle(st)
with zipfile.ZipFile(pt) as archive:
    largest = max(archive.infolist(), key=lambda each: each.file_size)
print(f"entry {largest.filename.partition('/')[2]}: {largest.file_size:,} bytes, ", end="")
print("stored as it is" if largest.compress_type == zipfile.ZIP_STORED else "compressed")
del tensors

loaders = {
    "torch.load": (pt, lambda path: torch.load(path)["embedding"]),
    "torch.load(mmap=True)": (pt, lambda path: torch.load(path, mmap=True)["embedding"]),
    "safetensors load_file": (st, lambda path: load_file(path)["embedding"]),
}
loading = lesson.measure_openings(loaders, ["warm"])
loading = {name.removesuffix(", warm"): lesson.middle(each) for name, each in loading.items()}
for name, each in loading.items():
    to_load, to_use = mark(each.open_seconds * 1e3, "ms"), mark(each.use_seconds * 1e3, "ms")
    print(f"{name:<23}{to_load} to load, {to_use} first use, ", end="")
    print(f"{mark(each.opened_mb, 'MB')} resident after loading")

# %% [markdown]
# So "not mappable" is true of a plain pickle and false of a `.pt` file. "Not safe" is true of both,
# unless the loader refuses functions: what *describes* the tensors is still a program.
#
# ## The measurement again
#
# The same vector as at the beginning, out of the same file, with the page cache warm as before. First
# through minigen's reader, which walks through the whole header; then straight to the bytes, at the
# offset that we know by now.

# %%
norm, lazy_seconds, lazy_memory = lesson.median_cost(
    lambda: read_gguf(own).tensors["blk.0.attn_norm.weight"].dequantize()
)
place = file.offsets["blk.0.attn_norm.weight"]
known, known_seconds, known_memory = lesson.median_cost(
    lambda: lesson.map_bytes(own)[place : place + wanted].view(torch.float32).clone()
)
assert torch.equal(norm, known)
for name, seconds, memory in (
    ("read the whole file", eager_seconds, eager_memory),
    ("map, walk the header", lazy_seconds, lazy_memory),
    ("map, offset known", known_seconds, known_memory),
):
    print(f"{name:<22}{mark(seconds * 1e3, 'ms')}, {mark(memory, 'MB')}")
measured("mapping with the header, times less memory", eager_memory / max(lazy_memory, 0.1))
measured("mapping with the header, times less time", eager_seconds / lazy_seconds)
measured("mapping with the offset, times less time", eager_seconds / known_seconds)

# %% [markdown]
# Memory falls by a large factor. Time falls little, or even grows, as long as the header is walked:
# nearly all of it goes into 1.6 MB of vocabulary, which becomes a hundred thousand Python strings. The
# tensor itself costs next to nothing. For a large model the balance is different: its file is a thousand
# times as large, and its header is not.
#
# And then the thing that mapping does not buy. A **dense** model uses all its weights for each token.
# Before the first token, all pages must be fetched, and here all blocks become float32 as well, since
# minigen was asked for that form; llama.cpp multiplies blocks without converting them to floats first.
# Here is the time from opening the file to the first token, in both ways, twice each and in turns:

# %%
starts = lesson.measure_starts(ways, count)
for name, each in starts.items():
    print(f"{name:<8}{', '.join(mark(seconds, 's') for seconds in each)} to the first token")

# %% [markdown]
# By Figure 11.3 the ways should differ by a fraction of a second. That is easily lost in what differs
# from run to run, since most of the time is conversion and the first **forward pass** (the prompt's way
# through all layers, which gives one new token), and these are the same in both ways. The memory
# afterwards is the same, too: the model consists of float32 numbers, and the bytes of the file are no
# longer needed.
#
# ## Claims
#
# Statements that one often reads about loading weights, beside what this notebook measured. A claim
# with a factor counts as held within a factor of two (half the memory: within 10 %); the others are
# yes or no. The two factors of time are measured alike: both files warm, opened and used once.

# %% jupyter={"source_hidden": true}
read, mapped = costs["eager, warm"], costs["mapped, warm"]
file_mb = own.stat().st_size / 1e6
memory_times = (read.private_mb + file_mb) / (mapped.private_mb + file_mb)
pickled, lazy, sound = loading.values()
pickled_mb, lazy_mb = mark(pickled.opened_mb, "MB"), mark(lazy.opened_mb, "MB")
share = sum(each.num_bytes for each in file.tensors.values()) / path.stat().st_size
start = min(starts["mapped"])


def times(slow, fast):
    opened, used = slow.open_seconds / fast.open_seconds, slow.seconds / fast.seconds
    return used, f"{mark(used)} times with first use, {mark(opened)} times to open alone"


mapping_times, said_of_mapping = times(read, mapped)
sound_times, said_of_sound = times(pickled, sound)
tunney = "[Tunney 2023](https://justine.lol/mmap/)"
readme = "[safetensors, README](https://github.com/huggingface/safetensors)"
verdicts(
    "11",
    Claim(
        "Mapping loads weights 100 times faster",
        said_of_mapping,
        within(mapping_times, 50, 200),
        "opening only reserves addresses, so its factor grows with the file; the first token "
        "needs every page, and then only the copy into new memory is saved",
        tunney,
        measured=True,
    ),
    Claim(
        "safetensors loads 76.6 times faster than torch.load on a CPU",
        said_of_sound,
        within(sound_times, 76.6 / 2, 76.6 * 2),
        "the same effect: load_file maps, and torch.load copies into new memory; the comparison "
        "that gave 76.6 times stops its clock before the first use",
        "[safetensors, speed comparison](https://huggingface.co/docs/safetensors/speed)",
        measured=True,
    ),
    Claim(
        "Mapping needs half as much memory",
        f"reading needs {mark(memory_times)} times as much: its own copy beside the page cache",
        within(memory_times, 1.8, 2.2),
        "the page cache holds the file in both cases, though the system can drop it when it must",
        tunney,
        measured=True,
    ),
    Claim(
        "A mapped model needs much less memory than its file",
        f"one token needs {share:.1%} of the file",
        holds(share < 0.5),
        "a dense model uses every weight for each token; a mixture of experts uses only some of its "
        "experts, and an embedding that is not tied only a few rows. So a dense model that is "
        "larger than memory is fetched again for each token",
    ),
    Claim(
        "safetensors is zero-copy (a tensor is the file's own bytes)",
        f"{mark(sound.opened_mb, 'MB')} resident after loading {sizes['embedding'] / 1e6:.1f} MB",
        holds(sound.opened_mb < 0.1 * sizes["embedding"] / 1e6),
        "on a CPU a tensor is a view of mapped pages; to a GPU with memory of its own, loading "
        "always copies",
        readme,
        measured=True,
    ),
    Claim(
        "A .pt file cannot be loaded lazily",
        f"{pickled_mb} resident after torch.load, {lazy_mb} with mmap=True",
        holds(lazy.opened_mb > pickled.opened_mb / 2),
        "torch maps the tensors of its zip archive; that of a plain pickle cannot be mapped",
        readme,
        measured=True,
    ),
    Claim(
        "torch.load runs whatever code is in a file",
        f"refused with the default settings: {refused}",
        holds(not refused),
        "by design, weights_only=True allows only listed functions (and two holes in it are closed); "
        "pickle.load and weights_only=False run all",
    ),
    Claim(
        "An engine takes minutes to start",
        f"{mark(start, 's')} to the first token, but with one small model on a CPU",
        NOT_TESTED,
        "140 GB (70B weights in BF16) take 70 s from a disk of 2 GB/s; engines for GPUs also compile "
        "kernels at their start and record the order in which to start them",
    ),
)
del file, tensor, blocks, again, inside  # mapped files cannot be deleted on Windows
scratch.cleanup()

# %% [markdown]
# How long several engines take to start on one machine stands in [the results](../docs/results.md).
#
# ## Summary
#
# - A safetensors file is a length, a JSON header, and bytes. The header gives name, dtype, shape and
#   two offsets of each tensor; `__metadata__` is no tensor. A careful reader checks that the tensors
#   cover the data exactly once.
# - A GGUF file also holds settings, vocabulary and chat template, and its header must be walked through
#   from the front, with a check of each length.
# - Mapping a file reads nothing. First use pays by page faults. What is saved is the copy into new
#   memory, and the pages are shared by all processes that map the file.
# - A cold measurement needs repetition, turns, and a check that the disk was really read.
# - A floating-point number is a sign, an exponent (range) and a mantissa (precision). BF16 has the range
#   of FP32, FP16 has more digits. Integer formats share a scale, and a large neighbour costs the small
#   ones their digits.
# - Q4_1 stores $w = d\,q + m$ with blocks of 32, and takes 5 bits per weight, not 4.
# - Algorithm (GPTQ, AWQ, rounding), number format (Q4_1, Q4_K) and container (safetensors, GGUF) are
#   three choices.
# - A pickle is a program. Loading it can run code, unless the loader refuses functions.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A safetensors file begins with the bytes 10 01 00 00 00 00 00 00 (hexadecimal). A
# tensor has the data_offsets [64, 192]. Where does it begin in the file?</summary>
# The length is 0x10 + 256 × 0x01 = 16 + 256 = 272. The tensor begins at 8 + 272 + 64 = byte 344, and
# ends before byte 472.</details>
#
# <details><summary>2. Two servers on one machine map the same file of 20 GB, and a third one reads it.
# How much memory do the weights take?</summary>
# 40 GB once everything has been used: one copy in the page cache, which the first two share and from
# which the third one read, and the third one's own copy. Only the second copy must stay; pages of the
# first can be dropped.</details>
#
# <details><summary>3. Which number has the FP32 bits 1 10000000 10000000000000000000000?</summary>
# The sign is minus. The stored exponent is 128, so the exponent is 128 − 127 = 1. The first mantissa
# bit stands for a half, so the number is −1.5 · 2¹ = −3.</details>
#
# <details><summary>4. A format stores blocks of 64 numbers with 3 bits each and one FP16 scale. How many
# bits per weight is that, and how large is a model of 8 billion weights?</summary>
# 3 + 16/64 = 3.25 bits. 8 × 10⁹ × 3.25 / 8 = 3.25 GB.</details>
#
# ## What the production engines do beyond this
#
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp)** maps the GGUF where its devices can use mapped
#   memory, and multiplies blocks as they are stored, so the file's pages *are* the weights. (On a CPU it
#   first reorders the blocks of some formats, such as Q4_0 and Q4_K, into
#   [a copy](https://github.com/ggml-org/llama.cpp/issues/16761), unless you switch that off by
#   `--no-repack`.) With `--load-mode none` (formerly `--no-mmap`) it reads them, and with `mmap+mlock`
#   no page may be dropped. **[Ollama](https://docs.ollama.com/faq)**, which is built on it, loads a model
#   at the first request that names it, and unloads it after five idle minutes.
# - **[vLLM](https://github.com/vllm-project/vllm)**, **[SGLang](https://github.com/sgl-project/sglang)**
#   and **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html)**
#   (which built engine files of its own before) load everything at the start, shard by shard, into GPU
#   memory. **Onto a GPU with memory of its own, loading always copies**: mostly from the page cache into a
#   buffer whose pages cannot move (**pinned memory**), and from there by the GPU's own copy engine.
# - The page faults of a thread come one at a time, so a mapping alone does not keep a fast disk busy.
#   llama.cpp therefore asks the system for all pages in advance (on Linux by `MAP_POPULATE`). vLLM can use the
#   [Run:ai Model Streamer](https://docs.vllm.ai/en/stable/models/extensions/runai_model_streamer/), which
#   reads with many threads, also from an object store (files behind web addresses), or
#   [fastsafetensors](https://github.com/foundation-model-stack/fastsafetensors), which can let the disk
#   write into GPU memory ([GPUDirect Storage](https://docs.nvidia.com/gpudirect-storage/)).
#
# ## Further reading
#
# - [The safetensors format](https://github.com/huggingface/safetensors#format): half a page, and the
#   whole specification. Its [security audit](https://huggingface.co/blog/safetensors-security-audit).
# - [The GGUF specification](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and
#   [ggml-common.h](https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h), where every
#   block is a struct of C.
# - [Edge AI Just Got Faster](https://justine.lol/mmap/), Tunney 2023: how llama.cpp came to map its files.
# - [ServerlessLLM](https://arxiv.org/abs/2401.14351), Fu et al. 2024: loading as the bottleneck of a
#   service with many models, and what to do about it.
# - [What Every Programmer Should Know About Memory](https://people.freebsd.org/~lstewart/articles/cpumemory.pdf),
#   Drepper 2007: caches, pages and page tables in depth.
#
# **Next:** [12 · Text to tokens and back](12_tokenizer.ipynb), where that vocabulary is put to use.

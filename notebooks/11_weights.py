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
# A model is a file. This chapter opens two kinds of it byte by byte, with nothing but Python's
# `struct` and `json`, and then does not read them at all: it maps them.
#
# **Afterwards you can** say what every byte of a safetensors or GGUF file means, turn a 4-bit block
# into numbers, say what memory-mapping saves and what it only puts off, and why a pickle is no
# place for weights.

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
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from minigen import SamplingParams, hub
from minigen.checkpoint import quant_formats, safetensors
from minigen.checkpoint.gguf import read_gguf
from minigen_course import Claim, check, load_model, mark, measured, show, using, verdicts
from minigen_course.ch11_weights import figures as draw_files
from minigen_course.ch11_weights.figures import hover_map
from minigen_course.figures.explore import explore, picture
from minigen_course.lab.memory_watch import cost_of, forget_pages

path = hub.resolve(hub.DEFAULT_MODEL)
scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(scratch.name)

# %% [markdown]
# ## A number that hurts
#
# You want one vector out of the model's file: the 576 numbers of a normalisation. The obvious way
# is to read the file and take them. First *cold*, with the file's pages dropped from the system's
# own memory (as far as this system lets us), then *warm*, right after.

# %%
wanted = 576 * 4
forget_pages(path)
raw, eager_cold, eager_memory = cost_of(path.read_bytes)
del raw
raw, eager_warm, _ = cost_of(path.read_bytes)
print(f"bytes in the file: {len(raw):,}; bytes wanted: {wanted:,}, one in {len(raw) // wanted:,}")
measured("reading it cold", eager_cold * 1e3, "ms")
measured("reading it warm", eager_warm * 1e3, "ms")
measured("memory that it takes", eager_memory, "MB")
del raw

# %% [markdown]
# Both the time and the memory grow with the file, not with what is wanted. This one is small. At
# 140 GB (a 70B model in two bytes a weight) the same line of Python does not come back on most
# machines.
#
# ## The smallest version that works
#
# safetensors is the simplest format there is: eight bytes that say how long a header is, the header
# in JSON, and then bytes of tensors. Take three tensors of the model, in three types, and have the
# safetensors library write them, so that there is something to read by hand.

# %%
stored = read_gguf(path).tensors
tensors = {
    "norm": stored["blk.0.attn_norm.weight"].dequantize(),
    "key": stored["blk.0.attn_k.weight"].dequantize().to(torch.bfloat16),
    "embedding": stored["token_embd.weight"].dequantize().half(),
}
del stored  # a mapped file keeps its pages
small = folder / "small.safetensors"
save_file(tensors, small)
first = small.read_bytes()[:64]
(header_bytes,) = struct.unpack_from("<Q", first)
picture(
    draw_files.byte_grid(
        first,
        [(f"header's length: {header_bytes}", 8), ("the header, in JSON", 56)],
        "The first 64 bytes of a safetensors file",
        letters=True,
    ),
    "A grid of 64 bytes in hexadecimal: eight of a length, then the beginning of the header.",
)

# %% [markdown]
# `<Q` is struct's name for eight bytes of a whole number, the smallest part first (little-endian).
# What the header says of each tensor is its type, its shape, and where its bytes begin and end,
# counted from the header's end.

# %%
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_naive(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + header_bytes])
    found = {}
    for name, entry in header.items():
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        data = bytearray(raw[begin:end])  # a copy
        found[name] = torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


for name, entry in json.loads(small.read_bytes()[8 : 8 + header_bytes]).items():
    print(f"{name:<10}", entry)
naive, theirs, ours = read_naive(small), load_file(small), safetensors.read_safetensors(small)
for name, tensor in naive.items():
    assert torch.equal(tensor, theirs[name])
    assert torch.equal(tensor.float(), ours[name].dequantize())
print("by hand, the safetensors library and minigen:", len(naive), "equal tensors")

# %% [markdown]
# ## Why it is wasteful
#
# `read_naive` brings all bytes into the process, and then copies each of them once more. To get at
# the norm it has moved the embedding twice.

# %%
sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in naive.items()}
for name, size in sizes.items():
    print(f"{name:<10}{size:>12,} bytes")
print(f"moved to get the norm: {2 * sum(sizes.values()):,} bytes")
del naive, theirs, ours

# %% [markdown]
# ## The idea: map the file
#
# A processor reads memory through pages (mostly of 4,096 bytes). The system can say that a run of
# pages *is* a file. Nothing is read then. When a program touches a page that is not in memory yet,
# the processor stops it (a *page fault*), the system fetches that page, and the program goes on
# without noticing. `torch.from_file` asks for that:


# %%
def map_naive(path: Path) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    (header_bytes,) = struct.unpack("<Q", bytes(raw[:8].tolist()))
    header = json.loads(bytes(raw[8 : 8 + header_bytes].tolist()))
    found = {}
    for name, entry in header.items():
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        found[name] = raw[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


forget_pages(small)
mapped, seconds, memory = cost_of(lambda: map_naive(small))
measured("mapping", seconds * 1e3, "ms")
measured("memory after mapping", memory, "MB")
_, _, memory = cost_of(lambda: mapped["norm"].sum())
measured("more after using the norm", memory, "MB")
_, _, memory = cost_of(lambda: mapped["embedding"].sum(dtype=torch.float32))
measured("more after using the embedding", memory, "MB")
assert torch.equal(mapped["norm"], tensors["norm"])
del mapped

# %% [markdown]
# Memory follows use. Now the whole model's file, opened and then used, one byte of each page being
# enough to fetch it:


# %%
def map_file() -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def read_file() -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def opened_and_used(open_file: Callable[[], torch.Tensor]) -> tuple[float, ...]:
    data, opening, held = cost_of(open_file)
    _, first_use, more = cost_of(lambda: data[::4096].sum())
    return opening, first_use, held, held + more


costs = {}
for way, open_file in (("eager", read_file), ("mapped", map_file)):
    forget_pages(path)
    for state in ("cold", "warm"):
        costs[f"{way}, {state}"] = opened_and_used(open_file)
picture(
    draw_files.opening_costs(costs),
    "Bars of the time and memory of eager and mapped opening, cold and warm, and of first use.",
)

# %% [markdown]
# Blue is what opening costs, orange what first use adds. Mapping has no blue, and orange instead:
# **the cost has moved, it is not gone.** What is truly saved is the copy. The mapped pages are the
# system's own: a second process that maps the same file shares them, and when memory gets short
# the system may drop them, since the disk still has them.
#
# ## GGUF by hand
#
# GGUF (llama.cpp's format) puts everything into one file: settings, the vocabulary, the chat
# template and the tensors. It begins with a magic word, a version and two counts.

# %%
with path.open("rb") as file:
    begin = file.read(52)
magic, version, num_tensors, num_keys, length = struct.unpack_from("<4sIQQQ", begin)
picture(
    draw_files.byte_grid(
        begin,
        [
            (f"magic: {magic.decode()}", 4),
            (f"version: {version}", 4),
            (f"tensors: {num_tensors}", 8),
            (f"keys: {num_keys}", 8),
            (f"length of the first key: {length}", 8),
            (f"the key: {begin[32:52].decode()}", 20),
        ],
        "The first bytes of a GGUF file",
        letters=True,
    ),
    "A grid of 52 bytes in hexadecimal, coloured by field: magic, version, counts, first key.",
)

# %% [markdown]
# What follows has no fixed places. A string is its length and its bytes; a value is the number of
# its type and then the value; so it must be walked through from the front. One small class does it.

# %%
LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
STRING, ARRAY = 8, 9


class Walk:
    def __init__(self, data: bytes, position: int):
        self.data, self.position = data, position

    def number(self, layout: str) -> float:
        (value,) = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(LAYOUTS[kind])


with path.open("rb") as file:
    walk = Walk(file.read(4 * 2**20), position=24)  # the header is within 4 MiB here
metadata = {walk.string(): walk.value(walk.number("I")) for _ in range(num_keys)}
for key, value in metadata.items():
    if key.startswith("llama.") or key == "tokenizer.ggml.model":
        print(f"{key:<40} {value}")

# %% [markdown]
# Then each tensor's description: name, number of dimensions, sizes (the row's length first, the
# other way round than torch says it), number of the stored kind, and offset. The data begin at the
# next multiple of the *alignment*, so that every tensor starts where processors like to read.

# %%
descriptions = {}
for _ in range(num_tensors):
    name, dimensions = walk.string(), walk.number("I")
    shape = tuple(walk.number("Q") for _ in range(dimensions))[::-1]
    kind, offset = walk.number("I"), walk.number("Q")
    descriptions[name] = (shape, kind, offset)
alignment = metadata.get("general.alignment", 32)
data_begins = -(-walk.position // alignment) * alignment

file = read_gguf(path)
assert data_begins == file.data_offset
for name, (shape, _, offset) in descriptions.items():
    assert file.tensors[name].shape == shape
    assert file.offsets[name] == data_begins + offset
print(f"header ends at {walk.position:,}, data begin at {data_begins:,}")
print(f"{len(descriptions)} tensors lie where minigen's reader finds them")
for key, value in file.metadata.items():
    if metadata[key] != (value.tolist() if isinstance(value, np.ndarray) else value):
        print(f"{key}: {metadata[key]!r} by hand, {value!r} by minigen")

# %% [markdown]
# Every key's value is equal but one, and that one is the same four bytes: a float32 has no
# 0.00001. The file's writer meant that, so minigen takes the shortest decimal with these bytes.
#
# ## Drag it
#
# The file as a map, from its first byte (top left) to its last. Move over the bytes, or name a
# tensor; colour by part of the model or by stored kind. The norms are there too, as lines too
# thin to see. Below it the same map once more: rest the pointer on a bar, and it says what it is.

# %%
pieces = draw_files.pieces_of(file)
BY_BYTE = "(the one at the byte)"


def file_map(byte, tensor, colour_by):
    at_byte = tensor == BY_BYTE
    chosen = draw_files.piece_at(pieces, byte) if at_byte else draw_files.named(pieces, tensor)
    return draw_files.file_map(pieces, chosen, by=colour_by)


explore(
    file_map,
    "The file in rows, each tensor a bar in the colour of its part; one is framed and described.",
    byte=(0, path.stat().st_size - 1, 100_000, 50_000_000),
    tensor=[BY_BYTE, *(each.name for each in pieces)],
    colour_by=["part", "kind"],
)
hover_map(pieces)

# %% [markdown]
# ## A block of four bits
#
# Most tensors here are `Q4_1`. A row is cut into blocks of 32 numbers; a block has a scale and a
# minimum, two bytes each, and a *step* from 0 to 15 for each number, two steps to a byte. The low
# halves of the 16 bytes are numbers 0 to 15, the high halves numbers 16 to 31.

# %%
tensor = file.tensors["blk.0.attn_q.weight"]
block = bytes(tensor.data[0, :20].tolist())
scale, minimum = struct.unpack_from("<ee", block)
steps = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
by_hand = torch.tensor([step * scale + minimum for step in steps])
assert torch.allclose(by_hand, tensor.dequantize()[0, :32], atol=1e-7)
picture(
    draw_files.byte_grid(
        block,
        [(f"scale: {scale:.5f}", 2), (f"minimum: {minimum:.5f}", 2), ("32 steps of 4 bits", 16)],
        "The first block of blk.0.attn_q.weight",
    ),
    "A grid of 20 bytes: two of the scale, two of the minimum, sixteen that hold 32 steps.",
)
print("steps  ", *steps[:6], "...")
print("numbers", *(f"{number:.3f}" for number in by_hand[:6].tolist()), "...")
print(f"bits a number: {8 * len(block) / 32:g}")

# %% [markdown]
# Four bits cost five: scale and minimum are shared by only 32 numbers.
#
# ## The package's version
#
# A `StoredTensor` is a window on mapped bytes. It pays for the rows that are asked for, a thousand
# at a time, and only then makes numbers of bytes. A table, `FORMATS`, says how for each kind.

# %%
show(safetensors.StoredTensor.dequantize, quant_formats.unpack_q4_1)

# %% [markdown]
# **Shards.** Large models come in several safetensors files, with an index that says which tensor
# is in which. Reading them is a loop over files; the care is in refusing what does not fit.

# %%
shards = folder / "sharded"
shards.mkdir()
save_file({"norm": tensors["norm"]}, shards / "model-1.safetensors")
save_file({"key": tensors["key"]}, shards / "model-2.safetensors")
index = {"weight_map": {"norm": "model-1.safetensors", "key": "model-2.safetensors"}}
(shards / "model.safetensors.index.json").write_text(json.dumps(index))

both = {}
for shard in sorted(set(index["weight_map"].values())):
    both |= map_naive(shards / shard)
package = safetensors.read_safetensors(shards)
assert all(torch.equal(both[name].float(), package[name].dequantize()) for name in package)
print("from two shards:", ", ".join(package))

index["weight_map"]["value"] = "model-2.safetensors"
(shards / "model.safetensors.index.json").write_text(json.dumps(index))
try:
    safetensors.read_safetensors(shards)
except safetensors.FileFormatError as error:
    print(str(error).replace(str(shards), "..."))

# %% [markdown]
# ## Why not a pickle
#
# Before these formats, weights were pickled (`.pt`, `.bin`). A pickle is not data: it is a program
# for a small machine that builds objects, and one of its instructions calls any function. This
# one only prints. It could as well have sent your files away.
#
# `torch.load` today unpickles with a list of allowed functions (`weights_only=True`, the default
# since 2.6), and refuses such a file. Whoever switches that off is back here. It is often said that
# a `.pt` cannot be mapped either; the last two lines show that it can.


# %%
class Payload:
    def __reduce__(self):
        return print, ("This line was printed by a file of weights, while it was loaded.",)


(folder / "weights.pkl").write_bytes(pickle.dumps({"norm": Payload()}))
loaded = pickle.loads((folder / "weights.pkl").read_bytes())
print("and the weights are:", loaded)

torch.save({"payload": Payload()}, folder / "payload.pt")
try:
    torch.load(folder / "payload.pt")
except pickle.UnpicklingError as error:
    print("refused:", type(error).__name__)
torch.save({"embedding": tensors["embedding"]}, folder / "sound.pt")
eagerly, _, copied = cost_of(lambda: torch.load(folder / "sound.pt"))
lazily, _, touched = cost_of(lambda: torch.load(folder / "sound.pt", mmap=True))
assert torch.equal(eagerly["embedding"], lazily["embedding"])
measured("memory after torch.load", copied, "MB")
measured("memory after torch.load with mmap=True", touched, "MB")
del eagerly, lazily
scratch.cleanup()

# %% [markdown]
# ## The measurement again
#
# The same vector as at the beginning, out of the cold file, with the whole header read on the way
# (most of the time goes there: it holds the vocabulary). And then what mapping does not buy: a
# token needs every weight. To the first token all pages are fetched, and all blocks made into
# float32. minigen keeps that form; llama.cpp multiplies blocks as they are.

# %%
forget_pages(path)
norm, lazy_cold, lazy_memory = cost_of(
    lambda: read_gguf(path).tensors["blk.0.attn_norm.weight"].dequantize()
)
measured("to the norm, mapped and cold", lazy_cold * 1e3, "ms")
measured("memory that it takes", lazy_memory, "MB")
measured("reading took so many times the memory", eager_memory / max(lazy_memory, 1e-3))

forget_pages(path)
llm, loading, memory = cost_of(lambda: load_model(weights="float32"))
count = "1, 2, 3, 4, 5, 6,"
answer, first_token, _ = cost_of(
    lambda: llm.generate(count, SamplingParams(temperature=0, max_tokens=1))
)
measured("loading the model", loading, "s")
measured("its first token", first_token, "s")
measured("memory that the model takes, cache and all", memory, "MB")
print("first token:", repr(answer.text))

# %% [markdown]
# ## Your turn
#
# llama.cpp stores the rows of Q and K in another order than the model was trained in: the two rows
# of each rotated pair (chapter 13) are made neighbours, so 0, 32, 1, 33, ... in a head of 64. The
# bytes cannot tell you; the shapes fit either way. Write the order that undoes it. `hint=1` gives
# a hint. (Until yours passes, `mine` is the package's own.) Then the model is loaded anew with
# yours in its place, and once more with the rows as they lie.

# %%
# exercise: minigen.checkpoint.gguf_mapping.unpermuted_rows
from jaxtyping import Int64
from torch import Tensor


def unpermuted_rows(num_rows: int, heads: int) -> Int64[Tensor, " rows"]:
    """Return the stored row for each row 0, 1, 2, ...: within a head first the even, then the odd.

    >>> unpermuted_rows(8, heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(11, unpermuted_rows=unpermuted_rows)

# %%
greedy = SamplingParams(temperature=0, max_tokens=20)
with using(11, unpermuted_rows=mine):
    right = load_model(weights="float32").generate(count, greedy).text
with using(11, unpermuted_rows=lambda num_rows, heads: torch.arange(num_rows)):
    wrong = load_model(weights="float32").generate(count, greedy).text
print("your order:  ", repr(right))
print("as they lie: ", repr(wrong))

# %% [markdown]
# Nothing crashes, no shape is wrong, and the answer still looks like a list of numbers. But the
# model has lost where things stand: that is what the rotation tells it. A second exercise, reading
# `Q4_1` blocks, is in the exercise notebook of this chapter (`minigen workspace`).
#
# ## What the production engines do beyond this
#
# - **llama.cpp**, and **Ollama** above it, map the GGUF and multiply blocks as they are stored, so
#   the file's pages are the weights. `--no-mmap` reads eagerly, `--mlock` keeps pages from being
#   dropped. Ollama loads a model when it is first asked for, and lets it go after some minutes.
# - **vLLM**, **SGLang** and **TGI** read safetensors eagerly at start, shard by shard, into GPU
#   memory. A mapping is only the way there: a GPU load always copies. With several GPUs each
#   keeps its own slices of rows or columns (chapter 41).
# - **TensorRT-LLM** can convert a checkpoint and build an engine file before it is served;
#   **MLC-LLM** compiles the model and stores weights in shards of its own; **ExLlamaV2** has its
#   EXL2 format, with a mix of bits inside one model, in safetensors files.
# - **DeepSpeed** (ZeRO-Inference) keeps weights in RAM or on NVMe and streams them layer by layer
#   through the GPU.

# %%
tensor_bytes = sum(each.num_bytes for each in file.tensors.values())
vocabulary = sum(len(each.encode()) + 8 for each in metadata["tokenizer.ggml.tokens"])
vocabulary += sum(len(each.encode()) + 8 for each in metadata["tokenizer.ggml.merges"])
open_eager, use_eager, held_eager, _ = costs["eager, cold"]
open_mapped, use_mapped, held_mapped, full_mapped = costs["mapped, cold"]
disk = path.stat().st_size / use_mapped
verdicts(
    "11",
    Claim(
        "Mapping a file is near-instant and copies nothing",
        f"{mark(open_mapped * 1e3, 'ms')} and {mark(held_mapped, 'MB')} to open, "
        f"eagerly {mark(open_eager * 1e3, 'ms')} and {mark(held_eager, 'MB')}",
        "held",
        "opening sets up page tables; no byte of a tensor is read",
    ),
    Claim(
        "A mapped model reads only what is needed",
        f"after every page was used once {mark(full_mapped, 'MB')} are resident, and it took "
        f"{mark(use_mapped * 1e3, 'ms')}; a token needs {tensor_bytes / path.stat().st_size:.1%} "
        "of the file",
        "held within bounds",
        "page faults move the cost to first use; a dense model reads every weight for every token",
    ),
    Claim(
        "A model larger than memory runs all the same, when it is mapped",
        f"39 GB at the rate of first use here: {mark(39e9 / disk, 's')} a token",
        "held within bounds",
        "it runs at the disk's speed, since each token fetches again what was dropped; a load onto "
        "a GPU always copies",
    ),
    Claim(
        "A file of weights carries no shapes; the code must know them",
        f"{len(descriptions)} shapes stand in this GGUF's header, {len(tensors)} in our "
        "safetensors file's",
        "did not hold",
        "both headers say name, type, shape and place of every tensor",
    ),
    Claim(
        "A .pt file cannot be memory-mapped",
        f"{mark(copied, 'MB')} resident after loading, {mark(touched, 'MB')} with mmap=True",
        "did not hold",
        "torch maps the tensors inside; but what describes them is a pickle, which runs code",
    ),
    Claim(
        "A header is a few lines before the weights",
        f"{data_begins:,} bytes here, {vocabulary / data_begins:.0%} of them tokens and merges",
        "did not hold",
        "a GGUF's header holds the whole vocabulary",
    ),
)

# %% [markdown]
# **Next:** [12 · Text to tokens and back](12_tokenizer.ipynb), where that vocabulary is put to use.

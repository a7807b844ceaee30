"""The answers of chapter 11 that are not in the engine: a safetensors header, and packing Q4_1.

The engine reads safetensors through the `safetensors` library, which checks the same rules.
Sources: the safetensors format; ggml's `quantize_row_q4_1_ref`, which takes the same scale.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor; its bytes are `begin` to `end` - 1 of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of a safetensors file, by name.

    The offsets of an entry count from the first byte of the file. Raises `ValueError` for a file
    that is cut short, and for tensors that do not cover the bytes after the header exactly once.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        data_begin = 8 + int.from_bytes(file.read(8), "little")
        if data_begin > size:
            raise ValueError(f"the header should end at byte {data_begin} of {size}")
        header = json.loads(file.read(data_begin - 8))
    header.pop("__metadata__", None)
    entries = {}
    for name, each in header.items():
        begin, end = each["data_offsets"]
        shape = tuple(each["shape"])
        entries[name] = TensorEntry(each["dtype"], shape, data_begin + begin, data_begin + end)
    covered = data_begin
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != covered:
            raise ValueError(f"{name} begins at byte {entry.begin}, but should at {covered}")
        covered = entry.end
    if covered != size:
        raise ValueError(f"the tensors end at byte {covered}, but the file at {size}")
    return entries


def map_shards(folder: Path) -> dict[str, Tensor]:
    """Map all shards that a folder's index lists, and return a view for each of its tensors.

    The headers are read by `read_safetensors_header`. Raises `ValueError` if a tensor is not in the
    shard where the index says that it is.
    """
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found = {}
    for shard in sorted(set(index["weight_map"].values())):
        path = folder / shard
        size = path.stat().st_size
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        for name, entry in read_safetensors_header(path).items():
            if index["weight_map"].get(name) != shard:
                continue  # the index does not mean this one
            view = raw[entry.begin : entry.end].view(DTYPES[entry.dtype])
            found[name] = view.reshape(entry.shape)
    lost = sorted(set(index["weight_map"]) - set(found))
    if lost:
        raise ValueError(f"the index lists {lost[0]}, but {index['weight_map'][lost[0]]} has none")
    return found


def pack_q4_1(numbers: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "rows blocks 20"]:
    """Quantize each row's blocks of 32 numbers to Q4_1.

    The stored minimum is the block's least number, and the stored scale a fifteenth of the distance
    to its greatest one, both as float16. Each number gets the level from 0 to 15 that is read back
    as the nearest value.
    """
    blocks = numbers.unflatten(-1, (-1, 32))
    least, greatest = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    stored = torch.cat([(greatest - least) / 15, least], dim=-1).half()
    scale, minimum = stored.float().split(1, dim=-1)
    steps = (blocks - minimum) / scale.clamp(min=1e-9)  # a constant block has a scale of 0
    levels = steps.round().clamp(0, 15).to(torch.uint8)
    first, second = levels.chunk(2, dim=-1)
    return torch.cat([stored.view(torch.uint8), first | (second << 4)], dim=-1)

"""Writes a safetensors file tensor by tensor, so that the memory holds one tensor at a time.

Source: the safetensors format: eight bytes with the length of the header, the header as JSON, then
the tensors' bytes without gaps.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ALIGNMENT = 8  # of the first tensor, by spaces after the header


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor's type and shape, and how to get it; `load` is called once, when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Shaped[Tensor, "..."]]

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def ready(tensor: Shaped[Tensor, "..."]) -> TensorToWrite:
    """Return a tensor that is in memory already, or mapped, as one to write."""
    return TensorToWrite(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str] = {"format": "pt"},
) -> None:
    """Write a safetensors file; the largest elements come first, as the library aligns them."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, each in ordered:
        start, end = end, end + each.num_bytes
        header[name] = {
            "dtype": _DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, each in ordered:
            tensor = each.load().contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == (each.dtype, each.shape), name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

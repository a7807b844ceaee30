"""GGUF: one file with a model's metadata, its vocabulary and its tensors.

Source: the GGUF specification, versions 2 and 3: a header, key/values, tensor descriptions, then
the tensors at aligned offsets. The `gguf` library reads the same format, and the tests compare this
module with it. That library creates a Python object for every array element, which takes 50 times
as long for a vocabulary (`benchmarks/11_weights.py`), it trusts every count in the file, and it is
slow to import. This module checks each count against the number of bytes left before it reads or
allocates anything.
"""

import math
import reprlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from minigen.checkpoint.quant_formats import FORMATS
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import FileFormatError, UnsupportedError

_MAX_NAME = 65_535
_LENGTH = struct.Struct("<Q")

ValueType = IntEnum(
    "ValueType",
    "UINT8 INT8 UINT16 INT16 UINT32 INT32 FLOAT32 BOOL STRING ARRAY UINT64 INT64 FLOAT64",
    start=0,
)

# The names of tensor types by their number, also of those that minigen does not read.
TENSOR_TYPES = dict(enumerate("F32 F16 Q4_0 Q4_1".split()))
TENSOR_TYPES |= enumerate("Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K".split(), start=6)
TENSOR_TYPES |= enumerate("IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS".split(), 16)
TENSOR_TYPES |= enumerate("I8 I16 I32 I64 F64 IQ1_M BF16".split(), start=24)
TENSOR_TYPES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}

_SCALARS = {
    ValueType.UINT8: "<u1",
    ValueType.INT8: "<i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT32: "<f4",
    ValueType.FLOAT64: "<f8",
    ValueType.BOOL: "?",
}


class ValueReader:
    """Reads the values of a header in order. Raises `FileFormatError` for invalid bytes."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.position = path, data, 0

    def type(self, key: str) -> ValueType:
        """Read the type of the value that follows."""
        (type_id,) = self.unpack("<I")
        try:
            return ValueType(type_id)
        except ValueError:
            raise FileFormatError(f"{self.path}: {key} has the unknown type {type_id}.") from None

    def value(self, kind: ValueType, key: str) -> Any:
        """Read a value of this type: bool, int, float, str, or an array."""
        if kind == ValueType.STRING:
            return self.string(key)
        if kind == ValueType.ARRAY:
            return self.array(key)
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(self.take(dtype.itemsize, key), dtype)[0]
        # The shortest decimal of a float32 is the intended value: 1e-05, not 9.99999974e-06.
        return float(str(value)) if kind == ValueType.FLOAT32 else value.item()

    def array(self, key: str) -> Any:
        """Read an array: `list[str]`, or a numpy array of numbers."""
        kind = self.type(key)
        (count,) = self.unpack("<Q")
        if kind == ValueType.STRING:
            self.check_count(count, 8, f"strings in {key}")
            return self.strings(count, key)
        if kind == ValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {key} is an array of arrays.")
        dtype = np.dtype(_SCALARS[kind])
        self.check_count(count, dtype.itemsize, f"numbers in {key}")
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).copy()

    def name(self, what: str) -> str:
        """Read a key or a tensor's name; it must be printable, because errors may show it."""
        name = self.string(what, _MAX_NAME)
        if not name or not name.isprintable():
            raise FileFormatError(
                f"{self.path}: {reprlib.repr(name)} is not a printable name for {what}."
            )
        return name

    def string(self, what: str, most: int = 2**63) -> str:
        """Read a string of at most `most` bytes."""
        return self.strings(1, what, most)[0]

    def strings(self, count: int, what: str, most: int = 2**63) -> list[str]:
        """Read `count` strings in one loop; a vocabulary has about a hundred thousand."""
        data, size, position = self.data, len(self.data), self.position
        strings = []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > size:
                raise FileFormatError(f"{self.path} is cut short: it ends before {what}.")
            (length,) = _LENGTH.unpack_from(data, position)
            if length > most or start + length > size:
                raise FileFormatError(
                    f"{self.path}: {what} claims {length} bytes at byte {start}, where "
                    f"{min(most, size - start)} are possible."
                )
            position = start + length
            try:
                strings.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError:
                raise FileFormatError(
                    f"{self.path}: {what} at byte {start} is not UTF-8."
                ) from None
        self.position = position
        return strings

    def take(self, count: int, what: str) -> memoryview:
        """Return the next `count` bytes."""
        if self.position + count > len(self.data):
            raise FileFormatError(f"{self.path} is cut short: it ends inside {what}.")
        taken = self.data[self.position : self.position + count]
        self.position += count
        return taken

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Read numbers in a format of the `struct` module."""
        try:
            values = struct.unpack_from(layout, self.data, self.position)
        except struct.error:
            raise FileFormatError(f"{self.path} is cut short: it ends in its header.") from None
        self.position += struct.calcsize(layout)
        return values

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Raise `FileFormatError` if the rest of the file is too short for `count` items."""
        left = len(self.data) - self.position
        if count * smallest > left:
            raise FileFormatError(
                f"{self.path} claims {count} {what}, but has only {left} bytes left."
            )


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SMALLEST_PAIR = 8 + 1 + 4 + 1  # key length, a key, a type, a value
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # name length, a name, rank, a size, type, offset


@dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file.

    `metadata` maps keys to bool, int, float, str, `list[str]` or (other arrays) numpy arrays.
    `tensors` have the names and the row order of the file; their bytes begin at `data_offset`.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    offsets: dict[str, int]
    data_offset: int


@dataclass(frozen=True)
class _Description:
    """A tensor as the header describes it; `offset` counts from the start of the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_gguf(path: Path, num_bytes: int | None = None) -> GGUFFile:
    """Read a GGUF file's header and map its tensors, without copying weights.

    If only the beginning of a file is at `path`, `num_bytes` is the size of the whole file; the
    tensors then have a shape and no bytes (torch's meta device). Raises `FileFormatError` for a
    file that is not valid GGUF, `UnsupportedError` for a version, a byte order or a tensor type
    that minigen does not read.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise FileFormatError(f"{path} is not a regular file, so it is not a GGUF file.")
    if size < 24:
        raise FileFormatError(
            f"{path} is not a GGUF file: it has {size} bytes, but a header alone has 24."
        )
    mapped = _map(path, size)
    values = ValueReader(path, mapped.numpy().data)
    version, num_tensors, num_pairs = _header(values)
    metadata = _pairs(values, num_pairs)
    descriptions = _descriptions(values, num_tensors)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment % 8:
        raise FileFormatError(
            f"{path}: general.alignment must be a multiple of 8, not {reprlib.repr(alignment)}."
        )
    data_offset = math.ceil(values.position / alignment) * alignment
    if num_bytes is not None:
        mapped, size = torch.empty(num_bytes, dtype=torch.uint8, device="meta"), num_bytes
    _check_extents(path, descriptions, alignment, size - data_offset)
    tensors = {
        each.name: StoredTensor(
            each.name,
            each.kind,
            each.shape,
            _rows(mapped, data_offset, each),
            is_mapped_file=num_bytes is None,
        )
        for each in descriptions
    }
    offsets = {each.name: data_offset + each.offset for each in descriptions}
    return GGUFFile(path, version, metadata, tensors, offsets, data_offset)


def _map(path: Path, size: int) -> UInt8[Tensor, " bytes"]:
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise FileFormatError(f"{path} cannot be mapped: {reason}.") from None


def _rows(
    mapped: UInt8[Tensor, " bytes"], data_offset: int, each: _Description
) -> UInt8[Tensor, "rows row_bytes"]:
    start = data_offset + each.offset
    num_rows = each.shape[0] if len(each.shape) == 2 else 1
    return mapped[start : start + each.num_bytes].unflatten(0, (num_rows, -1))


def _check_extents(
    path: Path, descriptions: list[_Description], alignment: int, data_bytes: int
) -> None:
    """Check that every tensor is aligned, lies inside the file, and overlaps no other one."""
    end, before = 0, ""
    for each in sorted(descriptions, key=lambda each: each.offset):
        if each.offset % alignment:
            raise FileFormatError(
                f"{path}: {each.name} starts at {each.offset}, which is not a multiple of the "
                f"alignment {alignment}."
            )
        if each.offset < end:
            raise FileFormatError(f"{path}: {each.name} overlaps {before}.")
        end, before = each.offset + each.num_bytes, each.name
        if end > data_bytes:
            raise FileFormatError(
                f"{path} is cut short or its header is wrong: {each.name} should end at byte "
                f"{end} of the data, but there are only {max(data_bytes, 0)}."
            )


def _header(values: ValueReader) -> tuple[int, int, int]:
    """Read the version, the number of tensors and the number of key/values."""
    if bytes(values.data[:4]) != _MAGIC:
        raise FileFormatError(
            f"{values.path} is not a GGUF file: it begins with {bytes(values.data[:4])!r}, "
            f"not {_MAGIC!r}."
        )
    values.position = 4
    (version,) = values.unpack("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        order = " (a big-endian file)" if swapped in _VERSIONS else ""
        raise UnsupportedError(
            f"{values.path} is GGUF version {version}{order}; "
            "minigen reads versions 2 and 3, little-endian."
        )
    num_tensors, num_pairs = values.unpack("<QQ")
    values.check_count(num_tensors, _SMALLEST_TENSOR, "tensors")
    values.check_count(num_pairs, _SMALLEST_PAIR, "key/values")
    return version, num_tensors, num_pairs


def _pairs(values: ValueReader, count: int) -> dict[str, Any]:
    """Read the key/values."""
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = values.name("a key")
        if key in metadata:
            raise FileFormatError(f"{values.path} has the key {key} twice.")
        metadata[key] = values.value(values.type(key), key)
    return metadata


def _descriptions(values: ValueReader, count: int) -> list[_Description]:
    """Read the tensors' names, types, shapes and offsets."""
    found: dict[str, _Description] = {}
    for _ in range(count):
        each = _description(values)
        if each.name in found:
            raise FileFormatError(f"{values.path} has the tensor {each.name} twice.")
        found[each.name] = each
    return list(found.values())


def _description(values: ValueReader) -> _Description:
    name = values.name("a tensor's name")
    (rank,) = values.unpack("<I")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise FileFormatError(f"{values.path}: {name} has {rank} dimensions, not 1 to 4.")
    sizes = values.unpack(f"<{rank}Q")
    kind_id, offset = values.unpack("<IQ")
    kind = TENSOR_TYPES.get(kind_id, f"type {kind_id}")
    if kind not in FORMATS:
        raise UnsupportedError(
            f"{values.path}: {name} is stored as {kind}; minigen reads {', '.join(FORMATS)}."
        )
    shape = tuple(reversed(sizes))
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if min(shape) == 0 or len(shape) > 2:
        raise FileFormatError(f"{values.path}: {name} has the shape {shape}.")
    form = FORMATS[kind]
    if shape[-1] % form.block_size:
        raise FileFormatError(
            f"{values.path}: {name} has rows of {shape[-1]} numbers, but {kind} stores blocks "
            f"of {form.block_size}."
        )
    num_bytes = math.prod(shape[:-1]) * form.row_bytes(shape[-1])
    return _Description(name, kind, shape, offset, num_bytes)

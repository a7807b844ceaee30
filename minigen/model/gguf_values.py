"""The values that a GGUF's header is made of, read one after another.

Source: the GGUF specification. Nothing is read, or allocated, beyond the bytes that are there.
"""

import reprlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from minigen.errors import FileFormatError, UnsupportedError

_MAX_NAME = 65_535
_LENGTH = struct.Struct("<Q")

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


class ValueReader:
    """Walks through a header; raises `FileFormatError` where the bytes are no such value."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.position = path, data, 0

    def type(self, key: str) -> GGUFValueType:
        """The type that a value is said to have."""
        (type_id,) = self.unpack("<I")
        try:
            return GGUFValueType(type_id)
        except ValueError:
            raise FileFormatError(f"{self.path}: {key} has the unknown type {type_id}.") from None

    def value(self, kind: GGUFValueType, key: str) -> Any:
        """A value of this type: bool, int, float, str, or an array."""
        if kind == GGUFValueType.STRING:
            return self.string(key)
        if kind == GGUFValueType.ARRAY:
            return self.array(key)
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(self.take(dtype.itemsize, key), dtype)[0]
        # A float32's shortest decimal is what its writer meant: 1e-05, not 9.99999974e-06.
        return float(str(value)) if kind == GGUFValueType.FLOAT32 else value.item()

    def array(self, key: str) -> Any:
        """An array: `list[str]`, or numbers in numpy."""
        kind = self.type(key)
        (count,) = self.unpack("<Q")
        if kind == GGUFValueType.STRING:
            self.afford(count, 8, f"strings in {key}")
            return self.strings(count, key)
        if kind == GGUFValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {key} is an array of arrays.")
        dtype = np.dtype(_SCALARS[kind])
        self.afford(count, dtype.itemsize, f"numbers in {key}")
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).copy()

    def name(self, what: str) -> str:
        """A key or a tensor's name, which errors may show: nothing that moves a cursor."""
        name = self.string(what, _MAX_NAME)
        if not name or not name.isprintable():
            raise FileFormatError(f"{self.path}: {reprlib.repr(name)} is no name for {what}.")
        return name

    def string(self, what: str, most: int = 2**63) -> str:
        """A text, of at most `most` bytes."""
        return self.strings(1, what, most)[0]

    def strings(self, count: int, what: str, most: int = 2**63) -> list[str]:
        """Lengths and texts, in one loop: a vocabulary has a hundred thousand."""
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
        """The next `count` bytes."""
        if self.position + count > len(self.data):
            raise FileFormatError(f"{self.path} is cut short: it ends inside {what}.")
        taken = self.data[self.position : self.position + count]
        self.position += count
        return taken

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Numbers in `struct`'s notation."""
        try:
            values = struct.unpack_from(layout, self.data, self.position)
        except struct.error:
            raise FileFormatError(f"{self.path} is cut short: it ends in its header.") from None
        self.position += struct.calcsize(layout)
        return values

    def afford(self, count: int, smallest: int, what: str) -> None:
        """A count is believed only if the rest of the file could hold that many."""
        left = len(self.data) - self.position
        if count * smallest > left:
            raise FileFormatError(
                f"{self.path} claims {count} {what}, but has only {left} bytes left."
            )

"""A matrix that a checkpoint keeps as several tensors: codes, scales, and perhaps zero points.

Each scheme is one class with the interface `StoredMatrix`. It is built from mapped tensors whose
dtypes and shapes were checked, it cuts itself without reading them, and it dequantizes itself.
`QuantizedTensor` is the stored tensor that the loader hands out for such a matrix.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int32, Int64, Shaped, UInt8
from torch import Tensor

from minigen.checkpoint.safetensors import IntegerCodes, RawTensor, StoredTensor
from minigen.errors import FileFormatError, WeightsError
from minigen.hardware import page_out

_CHUNK_ROWS = 1024  # bounds the memory that dequantizing needs in addition to its result
_WORD_BITS = 32


@runtime_checkable
class StoredMatrix(Protocol):
    """A quantised matrix of [output rows, input columns], whatever the order in its file is."""

    @property
    def where(self) -> str:
        """The file and the module, for messages."""

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""

    def cut(self, rows: range, columns: range) -> "StoredMatrix":
        """Return a part; a range may also end at the matrix's own end."""

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a scale or code that is impossible."""

    def integers(self) -> IntegerCodes | None:
        """Return the codes, if neighbouring columns share scales and zero points; else None."""


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A stored tensor of several parts; `data` are the bytes of its codes, in the file's order."""

    matrix: StoredMatrix = field(kw_only=True)

    @property
    def num_bytes(self) -> int:
        """Size of all parts in the file, in bytes."""
        return sum(each.nbytes for each in self.matrix.tensors)

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""
        return self.matrix.row_unit

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return self.matrix.column_unit

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Return the rows `start` to `stop` as a stored tensor, without reading them."""
        num_rows, num_columns = self.matrix.shape
        self._check_cut(start, stop, num_rows, self.row_unit, "rows")
        return quantized_tensor(self.name, self.matrix.cut(range(start, stop), range(num_columns)))

    def columns(self, start: int, stop: int) -> StoredTensor:
        """Return the columns `start` to `stop`; both must lie on the bounds of groups."""
        num_rows, num_columns = self.matrix.shape
        self._check_cut(start, stop, num_columns, self.column_unit, "columns")
        return quantized_tensor(self.name, self.matrix.cut(range(num_rows), range(start, stop)))

    def _check_cut(self, start: int, stop: int, size: int, unit: int, what: str) -> None:
        if not 0 <= start < stop <= size:
            raise IndexError(f"{self.name} has {what} 0 to {size}, not {start} to {stop}")
        if start % unit or (stop % unit and stop != size):
            raise IndexError(
                f"{self.name}: {self.kind} can be cut into {what} at multiples of {unit} only"
            )

    def dequantize(
        self, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Float[Tensor, "..."]:
        """Return the tensor in `dtype`, in new memory (or in `out`, which must have its shape).

        Raises `FileFormatError` for a scale or code that is impossible, and if a number is infinite
        or not a number.
        """
        num_rows, num_columns = self.matrix.shape
        if out is None:
            out = torch.empty(num_rows, num_columns, dtype=dtype)
        step = math.lcm(_CHUNK_ROWS, self.row_unit)
        for start in range(0, num_rows, step):
            chunk = range(start, min(start + step, num_rows))
            numbers = self.matrix.cut(chunk, range(num_columns)).dequantize()
            assert numbers.shape == (len(chunk), num_columns)
            if not numbers.isfinite().all():
                raise FileFormatError(
                    f"{self.matrix.where} has a weight that is infinite or not a number."
                )
            out[chunk.start : chunk.stop] = numbers
        return out

    def integers(self) -> IntegerCodes | None:
        """Return the integer codes, if neighbouring columns share scales and zero points."""
        return self.matrix.integers()

    def release_pages(self) -> None:
        """Return the memory of the files' pages to the system; the bytes stay readable."""
        for each in self.matrix.tensors:
            if each.is_contiguous():
                page_out(_bytes_of(each))


def quantized_tensor(name: str, matrix: StoredMatrix) -> QuantizedTensor:
    """Return the stored tensor of a quantised matrix."""
    codes = _bytes_of(matrix.tensors[0])
    return QuantizedTensor(name, matrix.kind, matrix.shape, codes, matrix=matrix)


def _bytes_of(tensor: Tensor) -> UInt8[Tensor, "rows row_bytes"]:
    rows = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    return rows.view(torch.uint8)


@dataclass(frozen=True)
class Groups:
    """The groups of columns that share a scale: neighbours, or, with `g_idx`, any columns.

    There are `count` groups of `size` columns; the last may be narrower. `g_idx` is the group of
    each column if GPTQ quantised the columns in the order of their activations (`desc_act`).
    """

    size: int
    count: int
    g_idx: Int64[Tensor, " columns"] | None = None

    @property
    def unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return 1 if self.count == 1 or self.g_idx is not None else self.size

    def cut(self, columns: range) -> tuple["Groups", slice]:
        """Return the groups of some columns, and where they are among all groups."""
        if self.g_idx is not None:
            return replace(self, g_idx=self.g_idx[columns.start : columns.stop]), slice(None)
        if self.count == 1:
            return self, slice(None)
        kept = slice(columns.start // self.size, -(-columns.stop // self.size))
        return replace(self, count=kept.stop - kept.start), kept

    def of_columns(self, num_columns: int) -> Int64[Tensor, " columns"]:
        """Return the group of each column."""
        return torch.arange(num_columns) // self.size if self.g_idx is None else self.g_idx


def word_unit(bits: int) -> int:
    """Return how many codes of `bits` bits fill whole 32-bit words, at least one.

    >>> word_unit(4), word_unit(3)
    (8, 32)
    """
    return _WORD_BITS // math.gcd(bits, _WORD_BITS)


def num_words(count: int, bits: int) -> int:
    """Return the 32-bit words that hold `count` codes of `bits` bits without gaps."""
    return -(-count * bits // _WORD_BITS)


def words_of(codes: range, bits: int) -> slice:
    """Return the 32-bit words that hold these codes; the first must begin a word."""
    return slice(codes.start * bits // _WORD_BITS, num_words(codes.stop, bits))


def unpack_bits(
    words: Shaped[Tensor, "rows words"], bits: int, count: int
) -> UInt8[Tensor, "rows count"]:
    """Unpack `count` codes of 1 to 8 bits from each row, which holds them without gaps.

    The lowest bits come first, as in the bytes of a little-endian word.

    >>> unpack_bits(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 3).tolist()
    [[0, 1, 2]]
    """
    rows = words.clone(memory_format=torch.contiguous_format)  # a lone column keeps odd strides
    raw, mask = rows.view(torch.uint8), 2**bits - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((raw.unsqueeze(-1) >> shifts) & mask).flatten(-2)[:, :count]
    first_bit = torch.arange(count) * bits
    low = first_bit // 8
    high = (low + 1).clamp(max=raw.shape[1] - 1)  # the last code may end with its byte
    pairs = raw[:, low].int() | (raw[:, high].int() << 8)
    return ((pairs >> (first_bit % 8)) & mask).to(torch.uint8)


def scaled(
    codes: UInt8[Tensor, "rows columns"],
    scales: Float32[Tensor, "rows groups"],
    zeros: Shaped[Tensor, "rows groups"],
    groups: Groups,
) -> Float32[Tensor, "rows columns"]:
    """Return (code - zero) x scale, each with the zero point and the scale of its group."""
    places = groups.of_columns(codes.shape[1])
    return codes.float().sub_(zeros.float()[:, places]).mul_(scales[:, places])


def integer_codes(
    bits: int,
    groups: Groups,
    num_columns: int,
    scales: Float32[Tensor, "rows groups"],
    zeros: Int32[Tensor, "rows groups"],
    read: Callable[[], UInt8[Tensor, "rows columns"]],
) -> IntegerCodes | None:
    """Return integer codes for kernels; None if `g_idx` gives neighbours other scales."""
    if groups.g_idx is not None:
        return None
    return IntegerCodes(bits, min(groups.size, num_columns), scales, zeros, read)


def finite(scales: Float[Tensor, "*shape"], where: str) -> Float32[Tensor, "*shape"]:
    """Return scales in float32. Raises `FileFormatError` if one is infinite or not a number."""
    wide = scales.float()
    if not wide.isfinite().all():
        raise FileFormatError(f"{where} has a scale that is infinite or not a number.")
    return wide


@dataclass(frozen=True)
class Parts:
    """The tensors of one module by the rest of their names, such as "qweight" and "scales"."""

    module: str
    raw: Mapping[str, RawTensor]

    @property
    def where(self) -> str:
        """The file and the module, for messages."""
        return f"{next(iter(self.raw.values())).path}: {self.module}"

    def need(
        self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype, why: str = ""
    ) -> Tensor:
        """Return a part of this shape and one of these dtypes. Raises `WeightsError`."""
        found = self.find(name, shape, *dtypes, why=why)
        if found is None:
            raise WeightsError(f"{self.where} has {', '.join(self.raw)}, but no {name}.")
        return found

    def find(
        self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype, why: str = ""
    ) -> Tensor | None:
        """Return a part as `need` does, or None if there is none."""
        if name not in self.raw:
            return None
        found = self.raw[name].tensor
        if tuple(found.shape) != shape or found.dtype not in dtypes:
            names = " or ".join(_name_of(each) for each in dtypes)
            raise WeightsError(
                f"{self.where}.{name} is {_name_of(found.dtype)} of shape {tuple(found.shape)}, "
                f"but should be {names} of shape {shape}{why and f' for {why}'}."
            )
        return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

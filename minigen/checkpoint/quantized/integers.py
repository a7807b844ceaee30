"""Integer schemes: weight = (code - zero) x scale, a scale and a zero point per group of columns.

Sources: AutoGPTQ's and GPTQModel's linear layers for GPTQ, AutoAWQ's `WQLinear_GEMM` for AWQ, and
the compressors of compressed-tensors for the other two. They differ in the axis and the order in
which codes are packed into 32-bit words, and in what is stored of a zero point.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Int8, Int32, Shaped, UInt8
from torch import Tensor

from minigen.checkpoint.quantized.matrix import (
    Groups,
    finite,
    integer_codes,
    num_words,
    scaled,
    unpack_bits,
    word_unit,
    words_of,
)
from minigen.checkpoint.safetensors import IntegerCodes
from minigen.errors import FileFormatError

# AutoAWQ packs eight outputs into a word in the order 0, 2, 4, 6, 1, 3, 5, 7; this undoes it.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_BITS = 4


@dataclass(frozen=True)
class GptqMatrix:
    """GPTQ: inputs packed along the words of a column, zero points along those of a row.

    `one_less` is GPTQ's version 1, which stores each zero point minus one. GPTQModel subtracts and
    adds the ones in whole words, so that a zero point of 0 borrows from its neighbour; codes of 3
    bits, which cross words, wrap one by one. Older readers differ for a zero point of 0.
    """

    where: str
    bits: int
    symmetric: bool
    one_less: bool
    num_columns: int
    groups: Groups
    qweight: Int32[Tensor, "words rows"]
    qzeros: Int32[Tensor, "groups zero_words"]
    scales: Shaped[Tensor, "groups rows"]

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        order = " by g_idx" if self.groups.g_idx is not None else ""
        return f"GPTQ {self.bits}-bit{_grouped(self.groups)}{order}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.scales.shape[1], self.num_columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        order = () if self.groups.g_idx is None else (self.groups.g_idx,)
        return (self.qweight, self.qzeros, self.scales, *order)

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""
        return word_unit(self.bits)

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return math.lcm(word_unit(self.bits), self.groups.unit)

    def cut(self, rows: range, columns: range) -> "GptqMatrix":
        """Return a part; a range may also end at the matrix's own end."""
        groups, kept = self.groups.cut(columns)
        return replace(
            self,
            num_columns=len(columns),
            groups=groups,
            qweight=self.qweight[words_of(columns, self.bits), rows.start : rows.stop],
            qzeros=self.qzeros[kept, words_of(rows, self.bits)],
            scales=self.scales[kept, rows.start : rows.stop],
        )

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a wrong scale or zero point."""
        return scaled(self._codes(), self._scales(), self._zeros(), self.groups)

    def integers(self) -> IntegerCodes | None:
        """Return the codes, if neighbouring columns share scales and zero points; else None."""
        parts = self._scales(), self._zeros(), self._codes
        return integer_codes(self.bits, self.groups, self.num_columns, *parts)

    def _codes(self) -> UInt8[Tensor, "rows columns"]:
        return unpack_bits(self.qweight.t(), self.bits, self.num_columns)

    def _scales(self) -> Float32[Tensor, "rows groups"]:
        return finite(self.scales, self.where).t().contiguous()

    def _zeros(self) -> Int32[Tensor, "rows groups"]:
        words, whole = self.qzeros, 8 % self.bits == 0
        if self.one_less and whole:
            words = words + sum(1 << place for place in range(0, 32, self.bits))
        zeros = unpack_bits(words, self.bits, self.scales.shape[1]).int()
        if self.one_less and not whole:
            zeros = (zeros + 1) & (2**self.bits - 1)
        middle = 2 ** (self.bits - 1)
        if self.symmetric and not (zeros == middle).all():
            raise FileFormatError(
                f"{self.where} has zero points other than {middle} although sym is true; "
                "checkpoint_format 'gptq' stores them minus one, and 'gptq_v2' does not."
            )
        return zeros.t().contiguous()


@dataclass(frozen=True)
class AwqMatrix:
    """AWQ's gemm version: eight outputs in one word, in an order of their own."""

    where: str
    groups: Groups
    qweight: Int32[Tensor, "columns words"]
    qzeros: Int32[Tensor, "groups words"] | None
    scales: Shaped[Tensor, "groups rows"]

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        return f"AWQ {_AWQ_BITS}-bit{_grouped(self.groups)}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.scales.shape[1], self.qweight.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.qweight, *_present(self.qzeros), self.scales)

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""
        return word_unit(_AWQ_BITS)

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return self.groups.unit

    def cut(self, rows: range, columns: range) -> "AwqMatrix":
        """Return a part; a range may also end at the matrix's own end."""
        groups, kept = self.groups.cut(columns)
        words = words_of(rows, _AWQ_BITS)
        return replace(
            self,
            groups=groups,
            qweight=self.qweight[columns.start : columns.stop, words],
            qzeros=None if self.qzeros is None else self.qzeros[kept, words],
            scales=self.scales[kept, rows.start : rows.stop],
        )

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a wrong scale."""
        return scaled(self._codes(), self._scales(), self._zeros(), self.groups)

    def integers(self) -> IntegerCodes | None:
        """Return the codes; neighbouring columns share scales and zero points."""
        parts = self._scales(), self._zeros(), self._codes
        return integer_codes(_AWQ_BITS, self.groups, self.qweight.shape[0], *parts)

    def _codes(self) -> UInt8[Tensor, "rows columns"]:
        return self._outputs(self.qweight)

    def _scales(self) -> Float32[Tensor, "rows groups"]:
        return finite(self.scales, self.where).t().contiguous()

    def _zeros(self) -> Int32[Tensor, "rows groups"]:
        if self.qzeros is None:
            return torch.full_like(self.scales.t(), 2 ** (_AWQ_BITS - 1), dtype=torch.int32)
        return self._outputs(self.qzeros).int()

    def _outputs(self, packed: Int32[Tensor, "inputs words"]) -> UInt8[Tensor, "rows inputs"]:
        codes = unpack_bits(packed, _AWQ_BITS, self.scales.shape[1])
        return codes.unflatten(-1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(-2).t().contiguous()


@dataclass(frozen=True)
class PackedMatrix:
    """compressed-tensors' pack-quantized: codes along a row's words, zero points along a column's.

    Codes and zero points are stored plus half their range, so that they are unsigned.
    """

    where: str
    bits: int
    num_columns: int
    groups: Groups
    packed: Int32[Tensor, "rows words"]
    packed_zeros: Int32[Tensor, "zero_words groups"] | None
    scales: Shaped[Tensor, "rows groups"]

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        return f"packed {self.bits}-bit{_grouped(self.groups)}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.packed.shape[0], self.num_columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.packed, *_present(self.packed_zeros), self.scales)

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""
        return 1 if self.packed_zeros is None else word_unit(self.bits)

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return math.lcm(word_unit(self.bits), self.groups.unit)

    def cut(self, rows: range, columns: range) -> "PackedMatrix":
        """Return a part; a range may also end at the matrix's own end."""
        groups, kept = self.groups.cut(columns)
        zeros = self.packed_zeros
        return replace(
            self,
            num_columns=len(columns),
            groups=groups,
            packed=self.packed[rows.start : rows.stop, words_of(columns, self.bits)],
            packed_zeros=None if zeros is None else zeros[words_of(rows, self.bits), kept],
            scales=self.scales[rows.start : rows.stop, kept],
        )

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a wrong scale."""
        scales = finite(self.scales, self.where)
        return scaled(self._codes(), scales, self._zeros(), self.groups)

    def integers(self) -> IntegerCodes | None:
        """Return the codes, if neighbouring columns share scales and zero points; else None."""
        parts = finite(self.scales, self.where), self._zeros(), self._codes
        return integer_codes(self.bits, self.groups, self.num_columns, *parts)

    def _codes(self) -> UInt8[Tensor, "rows columns"]:
        return unpack_bits(self.packed, self.bits, self.num_columns)

    def _zeros(self) -> Int32[Tensor, "rows groups"]:
        if self.packed_zeros is None:
            return torch.full_like(self.scales, 2 ** (self.bits - 1), dtype=torch.int32)
        return unpack_bits(self.packed_zeros.t(), self.bits, len(self.packed)).t().int()


@dataclass(frozen=True)
class Int8Matrix:
    """compressed-tensors' int-quantized and naive-quantized: a signed byte per code."""

    where: str
    bits: int
    groups: Groups
    codes: Int8[Tensor, "rows columns"]
    zeros: Int8[Tensor, "rows groups"] | None
    scales: Shaped[Tensor, "rows groups"]

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        stored = f"int{self.bits}{' in bytes' if self.bits < 8 else ''}"
        return f"{stored}{_grouped(self.groups)}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.codes, *_present(self.zeros), self.scales)

    @property
    def row_unit(self) -> int:
        """Rows can be cut everywhere."""
        return 1

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return self.groups.unit

    def cut(self, rows: range, columns: range) -> "Int8Matrix":
        """Return a part; a range may also end at the matrix's own end."""
        groups, kept = self.groups.cut(columns)
        zeros, part = self.zeros, slice(rows.start, rows.stop)
        return replace(
            self,
            groups=groups,
            codes=self.codes[part, columns.start : columns.stop],
            zeros=None if zeros is None else zeros[part, kept],
            scales=self.scales[part, kept],
        )

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a wrong scale, code or zero point."""
        scales = finite(self.scales, self.where)
        return scaled(self._codes(), scales, self._zeros(), self.groups)

    def integers(self) -> IntegerCodes | None:
        """Return the codes; neighbouring columns share scales and zero points."""
        parts = finite(self.scales, self.where), self._zeros(), self._codes
        return integer_codes(self.bits, self.groups, self.codes.shape[1], *parts)

    def _codes(self) -> UInt8[Tensor, "rows columns"]:
        return self._unsigned(self.codes, "code").to(torch.uint8)

    def _zeros(self) -> Int32[Tensor, "rows groups"]:
        if self.zeros is None:
            return torch.full_like(self.scales, 2 ** (self.bits - 1), dtype=torch.int32)
        return self._unsigned(self.zeros, "zero point").int()

    def _unsigned(self, signed: Int8[Tensor, "rows _"], what: str) -> Shaped[Tensor, "rows _"]:
        middle = 2 ** (self.bits - 1)
        unsigned = signed.short() + middle
        if not ((unsigned >= 0) & (unsigned < 2 * middle)).all():
            raise FileFormatError(
                f"{self.where} has a {what} outside {-middle} to {middle - 1}, the range of "
                f"{self.bits} bits."
            )
        return unsigned


def gptq_shapes(rows: int, columns: int, bits: int, num_groups: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPTQ matrix's parts."""
    return {
        "qweight": (num_words(columns, bits), rows),
        "qzeros": (num_groups, num_words(rows, bits)),
        "scales": (num_groups, rows),
        "g_idx": (columns,),
    }


def _grouped(groups: Groups) -> str:
    return " per row" if groups.count == 1 else f" g{groups.size}"


def _present(part: Tensor | None) -> tuple[Tensor, ...]:
    return () if part is None else (part,)

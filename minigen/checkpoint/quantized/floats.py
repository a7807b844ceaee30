"""Floating-point schemes: a code is a number of few bits, looked up or decoded, times a scale.

Sources: the OCP formats FP8 (E4M3, E5M2) and Microscaling (E2M1 with a power of two per 32, E8M0);
compressed-tensors for NVFP4; Dettmers et al. 2023 (QLoRA) and bitsandbytes' `QuantState` for NF4.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Shaped, UInt8
from torch import Tensor

from minigen.checkpoint.quantized.matrix import finite, unpack_bits
from minigen.checkpoint.safetensors import IntegerCodes
from minigen.errors import FileFormatError

# E2M1: one sign bit, two of exponent, one of mantissa.
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_MOST_E2M1, _E2M1_BITS = 12, 5  # twice the largest number; bits of twice any number, plus 12
# The levels of NF4: quantiles of a normal distribution, scaled to -1 and 1.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def powers_of_two(exponents: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Decode E8M0: code e is 2^(e - 127), and 255 is no number."""
    bits = exponents.int() << 23
    bits = torch.where(exponents == 0, 0x00400000, bits)  # 2^-127 is subnormal in float32
    return bits.view(torch.float32).masked_fill(exponents == 255, math.nan)


def numbers_of(scales: Shaped[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Return scales of any stored dtype in float32; a byte, or E8M0, is a power of two."""
    if scales.element_size() == 1 and scales.dtype != torch.float8_e4m3fn:
        return powers_of_two(scales.view(torch.uint8))
    return scales.float()


@dataclass(frozen=True)
class Fp8Matrix:
    """FP8 numbers with one scale per block of `block` rows and columns.

    The last block of an axis may be smaller. A part may begin inside a block, at `first`. `per`
    says in words what a scale is for.
    """

    where: str
    per: str
    codes: Shaped[Tensor, "rows columns"]
    scales: Shaped[Tensor, "row_blocks column_blocks"]
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        name = str(self.codes.dtype).removeprefix("torch.float8_").removesuffix("fn")
        return f"FP8 {name.upper()} {self.per}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.codes, self.scales)

    @property
    def row_unit(self) -> int:
        """Rows can be cut everywhere."""
        return 1

    @property
    def column_unit(self) -> int:
        """Columns can be cut everywhere."""
        return 1

    def cut(self, rows: range, columns: range) -> "Fp8Matrix":
        """Return a part."""
        first_row, row_blocks = _blocks_of(rows, self.first[0], self.block[0])
        first_column, column_blocks = _blocks_of(columns, self.first[1], self.block[1])
        return replace(
            self,
            codes=self.codes[rows.start : rows.stop, columns.start : columns.stop],
            scales=self.scales[row_blocks, column_blocks],
            first=(first_row, first_column),
        )

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a scale that is no number."""
        scales = finite(numbers_of(self.scales), self.where)
        rows, columns = (
            (torch.arange(size) + first) // block
            for size, first, block in zip(self.shape, self.first, self.block, strict=True)
        )
        return self.codes.float() * scales[rows][:, columns]

    def integers(self) -> IntegerCodes | None:
        """Return None: the codes are no integers."""
        return None


def _blocks_of(part: range, first: int, block: int) -> tuple[int, slice]:
    """Return where a part begins in its first block, and the blocks that it needs."""
    start, stop = part.start + first, part.stop + first
    return start % block, slice(start // block, -(-stop // block))


@dataclass(frozen=True)
class Fp4Matrix:
    """E2M1 numbers, two per byte, the first in the low half, and a scale per `group` columns.

    NVFP4 has E4M3 scales, which are divided by one number per matrix; MXFP4 has powers of two.
    """

    where: str
    name: str
    packed: UInt8[Tensor, "rows bytes"]
    scales: Shaped[Tensor, "rows groups"]
    group: int
    divisor: Float32[Tensor, ""] | None

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        return self.name

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.packed, self.scales, *(() if self.divisor is None else (self.divisor,)))

    @property
    def row_unit(self) -> int:
        """Rows can be cut everywhere."""
        return 1

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return self.group

    def cut(self, rows: range, columns: range) -> "Fp4Matrix":
        """Return a part."""
        part, groups = slice(rows.start, rows.stop), slice(*_over(columns, self.group))
        packed = self.packed[part, slice(*_over(columns, 2))]
        return replace(self, packed=packed, scales=self.scales[part, groups])

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a scale that is no number."""
        codes = unpack_bits(self.packed, 4, self.shape[1])
        return _by_groups(E2M1[codes.int()], self._scales())

    def integers(self) -> IntegerCodes:
        """Return twice the numbers, which are whole, with half the scales."""

        def read() -> UInt8[Tensor, "rows columns"]:
            codes = unpack_bits(self.packed, 4, self.shape[1])
            return (2 * E2M1 + _MOST_E2M1).to(torch.uint8)[codes.int()]

        scales = self._scales() / 2
        zeros = torch.full_like(scales, _MOST_E2M1, dtype=torch.int32)
        return IntegerCodes(_E2M1_BITS, self.group, scales, zeros, read)

    def _scales(self) -> Float32[Tensor, "rows groups"]:
        scales = numbers_of(self.scales)
        return finite(scales if self.divisor is None else scales / self.divisor, self.where)


@dataclass(frozen=True)
class Nested:
    """What bitsandbytes needs to decode scales that are quantised again (double quantisation).

    The scales of `block` successive groups share an entry of `scales`. A part begins at `first`
    (row, group) of a matrix with `row_groups` groups per row.
    """

    levels: Float32[Tensor, " levels"]
    scales: Float32[Tensor, " blocks"]
    offset: float
    block: int
    row_groups: int
    first: tuple[int, int] = (0, 0)

    def decode(self, codes: UInt8[Tensor, "rows groups"]) -> Float32[Tensor, "rows groups"]:
        """Return the scales of a part."""
        rows = (torch.arange(codes.shape[0]) + self.first[0]).unsqueeze(-1)
        places = rows * self.row_groups + torch.arange(codes.shape[1]) + self.first[1]
        return self.levels[codes.int()] * self.scales[places // self.block] + self.offset


@dataclass(frozen=True)
class Nf4Matrix:
    """bitsandbytes' NF4: two codes per byte, the first in the high half, and a scale per group."""

    where: str
    packed: UInt8[Tensor, "rows bytes"]
    scales: Shaped[Tensor, "rows groups"]
    group: int
    nested: Nested | None

    @property
    def kind(self) -> str:
        """The scheme, in the words that a user reads."""
        return f"NF4 g{self.group}{' double' if self.nested is not None else ''}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that the file stores, the codes first."""
        return (self.packed, self.scales, *(() if self.nested is None else (self.nested.scales,)))

    @property
    def row_unit(self) -> int:
        """Rows can be cut everywhere."""
        return 1

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return math.lcm(self.group, 2)

    def cut(self, rows: range, columns: range) -> "Nf4Matrix":
        """Return a part."""
        part, nested = slice(rows.start, rows.stop), self.nested
        groups = slice(*_over(columns, self.group))
        if nested is not None:
            first = (nested.first[0] + rows.start, nested.first[1] + groups.start)
            nested = replace(nested, first=first)
        packed = self.packed[part, slice(*_over(columns, 2))]
        return replace(self, packed=packed, scales=self.scales[part, groups], nested=nested)

    def dequantize(self) -> Float32[Tensor, "rows columns"]:
        """Return the numbers. Raises `FileFormatError` for a scale that is no number."""
        scales = self.scales if self.nested is None else self.nested.decode(self.scales)
        codes = torch.stack([self.packed >> 4, self.packed & 15], dim=-1).flatten(-2)
        return _by_groups(NF4[codes.int()], finite(scales, self.where))

    def integers(self) -> IntegerCodes | None:
        """Return None: the codes are no integers."""
        return None


def check_levels(levels: Float32[Tensor, "16"], where: str) -> None:
    """Raise `FileFormatError` if a file's table of levels is not that of NF4."""
    if not torch.allclose(levels, NF4, rtol=0, atol=1e-6):
        raise FileFormatError(f"{where}.weight.quant_map does not hold the sixteen levels of NF4.")


def _over(columns: range, size: int) -> tuple[int, int]:
    """Return the first and the last place of columns that lie `size` to a place."""
    return columns.start // size, -(-columns.stop // size)


def _by_groups(
    numbers: Float32[Tensor, "rows columns"], scales: Float32[Tensor, "rows groups"]
) -> Float32[Tensor, "rows columns"]:
    parts = numbers.unflatten(-1, (scales.shape[1], -1))
    return (parts * scales.unsqueeze(-1)).flatten(-2)

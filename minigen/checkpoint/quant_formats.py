"""The number formats of stored weights, and how to dequantize a block of bytes in each format.

A row of a matrix is a sequence of blocks; a block of `block_size` numbers takes `block_bytes`
bytes. Sources: the GGUF specification and ggml's `ggml-common.h` for the layouts. The `gguf`
library implements the same formats, and the tests compare each function here with it. This version
exists because it is three times faster on one thread (`benchmarks/11_weights.py`), and because
readers should be able to see how the formats work.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

Blocks = UInt8[Tensor, "rows blocks block_bytes"]
Numbers = Float[Tensor, "rows blocks block_size"]


@dataclass(frozen=True)
class Format:
    """The layout of one number format, and the function that dequantizes it."""

    block_size: int
    block_bytes: int
    unpack: Callable[[Tensor], Tensor]

    def row_bytes(self, columns: int) -> int:
        """Return the size of a row in bytes; `columns` must be a multiple of `block_size`."""
        return columns // self.block_size * self.block_bytes


def _float(blocks: Blocks, dtype: torch.dtype = torch.float16) -> Numbers:
    return blocks.contiguous().view(dtype).float()


def _nibbles(packed: UInt8[Tensor, "*blocks bytes"]) -> UInt8[Tensor, "*blocks numbers"]:
    """Unpack two 4-bit numbers per byte: all the low halves, then all the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: UInt8[Tensor, "rows blocks 4"]) -> UInt8[Tensor, "rows blocks 32"]:
    """Return bit i of the 32 bits as the fifth bit of number i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q8_0(blocks: Blocks) -> Numbers:
    return blocks[..., 2:].view(torch.int8).float() * _float(blocks[..., :2])


def _q4_0(blocks: Blocks) -> Numbers:
    return (_nibbles(blocks[..., 2:]).float() - 8) * _float(blocks[..., :2])


def unpack_q4_1(blocks: Blocks) -> Numbers:
    """Dequantize Q4_1: 32 numbers of 4 bits, each times the block's scale, plus its minimum.

    A block is 20 bytes: scale and minimum as float16, then 16 bytes of two numbers each.
    """
    scale, minimum = _float(blocks[..., :4]).split(1, dim=-1)
    return (_nibbles(blocks[..., 4:]).float() * scale).add_(minimum)


def _q5_0(blocks: Blocks) -> Numbers:
    fives = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return (fives.float() - 16) * _float(blocks[..., :2])


def _q5_1(blocks: Blocks) -> Numbers:
    scale, minimum = _float(blocks[..., :4]).split(1, dim=-1)
    fives = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return (fives.float() * scale).add_(minimum)


def _k_scales(
    blocks: Blocks,
) -> tuple[Float[Tensor, "rows blocks 8 1"], Float[Tensor, "rows blocks 8 1"]]:
    """Return a K-quant's eight scales and minima: 6 bits each, times the block's two factors."""
    scale, minimum = _float(blocks[..., :4]).split(1, dim=-1)
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return (scale * scales.float()).unsqueeze(-1), (minimum * minima.float()).unsqueeze(-1)


def _groups_of_32(packed: Blocks) -> UInt8[Tensor, "rows blocks 8 32"]:
    """Unpack 128 bytes into 8 groups: 32 bytes hold one group low, and the next one high."""
    chunks = packed.unflatten(-1, (4, 1, 32))
    return torch.cat([chunks & 15, chunks >> 4], dim=-2).flatten(-3, -2)


def _two_bits(packed: Blocks) -> UInt8[Tensor, "rows blocks numbers"]:
    """Unpack chunks of 32 bytes into 128 numbers: the lowest two bits of all, then the next two."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    return ((packed.unflatten(-1, (-1, 1, 32)) >> shifts) & 3).flatten(-3)


def _q2_k(blocks: Blocks) -> Numbers:
    twos = _two_bits(blocks[..., 16:80]).unflatten(-1, (16, 16)).float()
    scale, minimum = _float(blocks[..., 80:]).split(1, dim=-1)
    scales = (scale * (blocks[..., :16] & 15).float()).unsqueeze(-1)
    minima = (minimum * (blocks[..., :16] >> 4).float()).unsqueeze(-1)
    return (twos * scales).sub_(minima).flatten(-2)


def _q3_k(blocks: Blocks) -> Numbers:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    third = ((blocks[..., :32].unsqueeze(-2) >> shifts) & 1).flatten(-2) << 2
    threes = (_two_bits(blocks[..., 32:96]) | third).view(torch.int8) - 4
    high = torch.cat([(blocks[..., 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    sixes = (_nibbles(blocks[..., 96:104]) | high << 4).view(torch.int8) - 32
    scales = _float(blocks[..., 108:]) * sixes.float()
    return (threes.unflatten(-1, (16, 16)).float() * scales.unsqueeze(-1)).flatten(-2)


def _q4_k(blocks: Blocks) -> Numbers:
    scales, minima = _k_scales(blocks)
    return (_groups_of_32(blocks[..., 16:]).float() * scales).sub_(minima).flatten(-2)


def _q5_k(blocks: Blocks) -> Numbers:
    scales, minima = _k_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    fives = _groups_of_32(blocks[..., 48:]) | fifth
    return (fives.float() * scales).sub_(minima).flatten(-2)


def _q6_k(blocks: Blocks) -> Numbers:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    sixes = (low | high).flatten(-3).view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float() * _float(blocks[..., 208:])
    return (sixes.unflatten(-1, (16, 16)).float() * scales.unsqueeze(-1)).flatten(-2)


# IQ4_NL and IQ4_XS: sixteen levels that lie closer together near zero.
IQ4_LEVELS = torch.tensor(
    [-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
# MXFP4 and NVFP4: E2M1 numbers, doubled so that they are whole; the scales are halved.
_E2M1_DOUBLED = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def _levels(table: Float[Tensor, " levels"], codes: UInt8[Tensor, "*shape"]) -> Tensor:
    return table[codes.int()]


def _iq4_nl(blocks: Blocks) -> Numbers:
    return _levels(IQ4_LEVELS, _nibbles(blocks[..., 2:])) * _float(blocks[..., :2])


def _iq4_xs(blocks: Blocks) -> Numbers:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2) << 4
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1).flatten(-2)
    scales = _float(blocks[..., :2]) * ((low | high).view(torch.int8) - 32).float()
    fours = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return (_levels(IQ4_LEVELS, fours) * scales.unsqueeze(-1)).flatten(-2)


def _tq1_0(blocks: Blocks) -> Numbers:
    """Dequantize ternary numbers, five per byte: the byte is their fraction in base 3, times 256.

    Multiplying by 3 moves the next digit in front of the point, and a byte drops it by overflow.
    """

    def digits(packed: UInt8[Tensor, "rows blocks bytes"], count: int) -> UInt8[Tensor, "..."]:
        powers = torch.tensor([3**power for power in range(count)], dtype=torch.uint8)
        return (packed.unsqueeze(-2) * powers.unsqueeze(-1)).flatten(-2)

    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # the last four bytes hold four numbers each
    fractions = [digits(blocks[..., start:stop], count) for start, stop, count in parts]
    threes = (torch.cat(fractions, dim=-1).short() * 3) >> 8
    return (threes - 1).float() * _float(blocks[..., 52:])


def _tq2_0(blocks: Blocks) -> Numbers:
    return (_two_bits(blocks[..., :64]).float() - 1) * _float(blocks[..., 64:])


def _mxfp4(blocks: Blocks) -> Numbers:
    exponents = blocks[..., :1].int()  # E8M0: a power of two, here halved
    subnormal = torch.full_like(exponents, 0x00200000) << exponents.clamp(max=1)
    bits = torch.where(exponents < 2, subnormal, (exponents - 1) << 23)
    return _levels(_E2M1_DOUBLED, _nibbles(blocks[..., 1:])) * bits.view(torch.float32)


def _nvfp4(blocks: Blocks) -> Numbers:
    codes = blocks[..., :4]  # UE4M3: E4M3 without a sign; its NaN counts as zero, as in ggml
    exponents, mantissas = (codes >> 3 & 15).int(), (codes & 7).float()
    normal = torch.ldexp(1 + mantissas / 8, exponents - 8)
    scales = torch.where(exponents == 0, mantissas * 2.0**-10, normal)
    scales = scales.masked_fill(codes == 0x7F, 0).unsqueeze(-1)
    fours = _nibbles(blocks[..., 4:].unflatten(-1, (4, 8)))
    return (_levels(_E2M1_DOUBLED, fours) * scales).flatten(-2)


FORMATS: dict[str, Format] = {
    "F32": Format(1, 4, lambda blocks: _float(blocks, torch.float32)),
    "F16": Format(1, 2, lambda blocks: _float(blocks, torch.float16)),
    "BF16": Format(1, 2, lambda blocks: _float(blocks, torch.bfloat16)),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, unpack_q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q2_K": Format(256, 84, _q2_k),
    "Q3_K": Format(256, 110, _q3_k),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
    "IQ4_NL": Format(32, 18, _iq4_nl),
    "IQ4_XS": Format(256, 136, _iq4_xs),
    "TQ1_0": Format(256, 54, _tq1_0),
    "TQ2_0": Format(256, 66, _tq2_0),
    "MXFP4": Format(32, 17, _mxfp4),
    "NVFP4": Format(64, 36, _nvfp4),
}

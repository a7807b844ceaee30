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


def _nibbles(packed: Blocks) -> UInt8[Tensor, "rows blocks numbers"]:
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


FORMATS: dict[str, Format] = {
    "F32": Format(1, 4, lambda blocks: _float(blocks, torch.float32)),
    "F16": Format(1, 2, lambda blocks: _float(blocks, torch.float16)),
    "BF16": Format(1, 2, lambda blocks: _float(blocks, torch.bfloat16)),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, unpack_q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
}

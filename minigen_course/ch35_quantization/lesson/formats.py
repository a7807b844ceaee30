"""One matrix in many formats, and its codes as the words of GPTQ's and AWQ's checkpoints.

Sources: the layouts that `minigen.checkpoint.quantized` names; bitsandbytes for the bytes of NF4.
"""

import struct
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from minigen.checkpoint.quantized.integers import AwqMatrix, GptqMatrix
from minigen.checkpoint.quantized.matrix import Groups
from minigen.export.gguf_blocks import block_size, dequantize_rows, quantize_rows
from minigen.quantization.float_codes import round_to_fp8, round_to_nf4
from minigen.quantization.grid import Grid, QuantizedMatrix, relative_error, round_to_nearest
from minigen_course.ch35_quantization.figures import FORMATS

E5M2_MAX = 57344.0
ONES = 0x11111111  # a one in each of a word's eight zero points
IN_ORDER, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)
Matrix = Float[Tensor, "rows columns"]


def in_form(weight: Matrix, name: str) -> Matrix:
    """Return a matrix rounded to a format of `FORMATS`, or to another kind of GGUF's.

    FP8 has one scale per row here.
    """
    if name == "NF4":
        return round_to_nf4(weight).dequantize()
    if name == "FP8 e4m3":
        return round_to_fp8(weight).dequantize()
    if name == "FP8 e5m2":
        scales = weight.abs().amax(-1, keepdim=True) / E5M2_MAX
        return (weight / scales).to(torch.float8_e5m2).float() * scales
    return dequantize_rows(quantize_rows(weight, name), name)


def first_block(weight: Matrix, name: str) -> bytes:
    """Return the first block of a matrix as a format stores it, for `block_bits`."""
    row = weight[:1]
    if name == "NF4":  # absmax, then two codes per byte, the first one high (bitsandbytes)
        made = round_to_nf4(row[:, :64])
        pairs = made.codes.unflatten(-1, (-1, 2))[0]
        return made.absmax.numpy().tobytes() + (pairs[:, 0] << 4 | pairs[:, 1]).numpy().tobytes()
    if name.startswith("FP8"):
        dtype, most = {
            "FP8 e4m3": (torch.float8_e4m3fn, 448.0),
            "FP8 e5m2": (torch.float8_e5m2, E5M2_MAX),
        }[name]
        block = weight[:128, :128]
        scale = float(block.abs().amax()) / most
        codes = (block[0, :28] / scale).to(dtype).view(torch.uint8)
        return struct.pack("<f", scale) + codes.numpy().tobytes()
    return quantize_rows(row[:, : block_size(name)], name).numpy().tobytes()


def bits_and_error(weight: Matrix, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return each format's bits per weight and its relative error on a matrix."""
    by_row = 8 + 32 / weight.shape[1]  # FP8 with one scale per row, as in `in_form`
    return {
        name: (
            by_row if name.startswith("FP8") else FORMATS[name].bits_per_weight,
            relative_error(weight, in_form(weight, name)),
        )
        for name in names
    }


def errors_by_form(weight: Matrix) -> dict[str, float]:
    """Return the relative error of a matrix in the forms of the benchmark, by its names."""
    grids = {
        "int8 per row": Grid(8, -1, symmetric=True),
        "int4 per row": Grid(4, -1, symmetric=True),
        "4 bits, groups of 64": Grid(4, 64, symmetric=False),
        "4 bits, groups of 32": Grid(4, 32, symmetric=False),
        "3 bits, groups of 64": Grid(3, 64, symmetric=False),
        "2 bits, groups of 64": Grid(2, 64, symmetric=False),
    }
    rounded = {name: round_to_nearest(weight, grid) for name, grid in grids.items()}
    free = round_to_nearest(weight, grids["4 bits, groups of 32"], whole_zeros=False)
    made = {name: each.dequantize() for name, each in rounded.items()}
    made["4 bits, groups of 32, any minimum"] = free.dequantize()
    made |= {name: in_form(weight, name) for name in ("NF4", "MXFP4", "FP8 e4m3")}
    whole = round_to_nearest(weight.reshape(1, -1), grids["int8 per row"]).dequantize()
    return {
        "int8 per tensor": relative_error(weight, whole.view_as(weight)),
        **{name: relative_error(weight, each) for name, each in made.items()},
    }


def group_table(
    weight: Matrix, bits: int, sizes: Sequence[int], symmetric: bool = False
) -> dict[int, tuple[float, float]]:
    """Return bits per weight, scales and zero points included, and the error, by group size."""
    found = {}
    for size in sizes:
        grid = Grid(bits, size, symmetric)
        stored = 8 * grid.num_bytes(*weight.shape) / weight.numel()
        found[size] = stored, relative_error(weight, round_to_nearest(weight, grid).dequantize())
    return found


# Codes as words


def words_of(
    codes: UInt8[Tensor, "rows columns"], order: Sequence[int] = IN_ORDER, less: int = 0
) -> Int32[Tensor, "rows words"]:
    """Pack eight 4-bit codes of a row into each word; `order[i]` is the code at bits 4 i and up.

    `less` is subtracted from each word as a whole, as GPTQ's version 1 does.
    """
    eights = codes.unflatten(-1, (-1, 8))[..., list(order)].long()
    words = ((eights << torch.arange(0, 32, 4)).sum(-1) - less) & 0xFFFFFFFF
    return torch.where(words < 2**31, words, words - 2**32).int()


def as_gptq(matrix: QuantizedMatrix, version: int = 1, read_as: int | None = None) -> GptqMatrix:
    """Return a 4-bit matrix as the tensors of a GPTQ checkpoint; version 1 stores zeros - 1.

    It is read as its own version, or as `read_as`.
    """
    zeros = matrix.zeros.T.to(torch.uint8).contiguous()
    return GptqMatrix(
        where="the example",
        bits=4,
        symmetric=False,
        one_less=(read_as or version) == 1,
        num_columns=matrix.shape[1],
        groups=_groups(matrix),
        qweight=words_of(matrix.codes).T.contiguous(),
        qzeros=words_of(zeros, less=ONES if version == 1 else 0),
        scales=matrix.scales.T.contiguous(),
    )


def as_awq(matrix: QuantizedMatrix, order: Sequence[int] = AWQ_ORDER) -> AwqMatrix:
    """Return a 4-bit matrix as the tensors of an AWQ checkpoint (gemm)."""
    return AwqMatrix(
        where="the example",
        groups=_groups(matrix),
        qweight=words_of(matrix.codes.T.contiguous(), order),
        qzeros=words_of(matrix.zeros.T.to(torch.uint8).contiguous(), order),
        scales=matrix.scales.T.contiguous(),
    )


def _groups(matrix: QuantizedMatrix) -> Groups:
    count = matrix.scales.shape[1]
    return Groups(matrix.shape[1] // count, count)

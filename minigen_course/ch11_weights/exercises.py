"""Checks of chapter 11: a safetensors header, and Q4_1 blocks in both directions."""

import json
import math
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch11_weights.reference import TensorEntry
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal

ReadHeader = Callable[[Path], Mapping[str, TensorEntry]]
FloatOfBits = Callable[[str, int], float]
Unpack = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor], Tensor]

HUGE = 2**60  # bytes that a broken header may claim


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _file(header: Mapping[str, Any], num_bytes: int, padding: int = 0) -> tuple[bytes, int]:
    """Return a file with this header and `num_bytes` bytes of data, and where its data begin."""
    text = json.dumps(header).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes), 8 + len(text)


def _read(part: ReadHeader, raw: bytes) -> Mapping[str, TensorEntry]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        return part(path)


def _expect_entries(found: object, right: Mapping[str, tuple[str, list[int], int, int]]) -> None:
    expect(isinstance(found, dict), f"returned {type(found).__name__}; return a dict.")
    assert isinstance(found, dict)
    expect_equal(sorted(found), sorted(right), "the names of the tensors")
    for name, (dtype, shape, begin, end) in right.items():
        entry = found[name]
        message = f"{name} is {type(entry).__name__}; the values must be TensorEntry objects."
        expect(isinstance(entry, TensorEntry), message)
        expect_equal(entry.dtype, dtype, f"the dtype of {name}")
        expect_equal(list(entry.shape), shape, f"the shape of {name}")
        expect_equal([entry.begin, entry.end], [begin, end], f"[begin, end] of {name} in the file")


def _expect_refused(part: ReadHeader, raw: bytes, what: str) -> None:
    try:
        _read(part, raw)
    except ValueError:
        return
    raise Wrong(f"{what} was accepted; it should raise ValueError.")


TWO = {"norm": _entry("F32", [3], 0, 12), "key": _entry("BF16", [2, 5], 12, 32)}


def bytes_are_counted_from_the_files_beginning(part: ReadHeader) -> None:
    """two tensors, one after the other:"""
    raw, data = _file(TWO, 32)
    right = {"norm": ("F32", [3], data, data + 12), "key": ("BF16", [2, 5], data + 12, data + 32)}
    _expect_entries(_read(part, raw), right)


def metadata_is_no_tensor(part: ReadHeader) -> None:
    """a file with __metadata__, as most files of the hub have it:"""
    raw, data = _file({"__metadata__": {"format": "pt"}} | TWO, 32)
    right = {"norm": ("F32", [3], data, data + 12), "key": ("BF16", [2, 5], data + 12, data + 32)}
    _expect_entries(_read(part, raw), right)
    _expect_entries(_read(part, _file({"__metadata__": {"format": "pt"}}, 0)[0]), {})


def a_header_may_be_padded_and_in_another_order(part: ReadHeader) -> None:
    """a header that ends with spaces, and lists the last tensor first:"""
    header = {"late": _entry("F16", [4], 8, 16), "early": _entry("I8", [2, 2, 2], 0, 8)}
    raw, data = _file(header, 16, padding=5)
    right = {"late": ("F16", [4], data + 8, data + 16), "early": ("I8", [2, 2, 2], data, data + 8)}
    _expect_entries(_read(part, raw), right)


def a_file_that_is_cut_short_is_refused(part: ReadHeader) -> None:
    """files that end too early:"""
    raw, data = _file(TWO, 32)
    _expect_refused(part, raw[:5], "a file of 5 bytes")
    _expect_refused(part, raw[: data // 2], "a file that ends inside its header")
    _expect_refused(part, raw[:-1], "a file whose last byte is missing")
    _expect_refused(part, raw[:data], "a file that ends after its header")
    text = raw[8:data]
    _expect_refused(part, struct.pack("<Q", HUGE) + text, "a header that claims 2^60 bytes")


def tensors_that_overlap_are_refused(part: ReadHeader) -> None:
    """two tensors that share four bytes, and two that share all of them:"""
    header = {"norm": _entry("F32", [3], 0, 12), "key": _entry("F32", [3], 8, 20)}
    _expect_refused(part, _file(header, 20)[0], "a file with overlapping tensors")
    header = {"key": _entry("F32", [3], 8, 20), "norm": _entry("F32", [3], 0, 12)}
    _expect_refused(part, _file(header, 20)[0], "a file with overlapping tensors, the last first")
    header = {"norm": _entry("F32", [3], 0, 12), "key": _entry("F32", [3], 0, 12)}
    _expect_refused(part, _file(header, 12)[0], "a file whose tensors are the same bytes")


def bytes_that_belong_to_no_tensor_are_refused(part: ReadHeader) -> None:
    """bytes before, between and after the tensors:"""
    header = {"norm": _entry("F32", [3], 4, 16)}
    _expect_refused(part, _file(header, 16)[0], "a file with bytes before its first tensor")
    header = {"norm": _entry("F32", [3], 0, 12), "key": _entry("F32", [2], 16, 24)}
    _expect_refused(part, _file(header, 24)[0], "a file with bytes between two tensors")
    _expect_refused(part, _file(TWO, 40)[0], "a file with bytes after its last tensor")


def _expect_number(part: FloatOfBits, fields: str, right: float) -> None:
    """Expect the value of "sign exponent mantissa", three groups of bits."""
    exponent_bits = len(fields.split()[1])
    found = part(fields.replace(" ", ""), exponent_bits)
    expect(isinstance(found, int | float), f"returned {type(found).__name__}; return a number.")
    is_same = math.isnan(found) if math.isnan(right) else found == right
    expect(is_same, f"{fields} is {found!r}; it should be {right!r}.")
    signs = math.copysign(1, found), math.copysign(1, right)
    expect(
        math.isnan(right) or signs[0] == signs[1], f"the sign of {fields} should be {right!r}'s."
    )


def numbers_of_fp32_are_read(part: FloatOfBits) -> None:
    """numbers in FP32, with 8 exponent bits:"""
    zeros = "0" * 20
    _expect_number(part, f"0 01111111 000{zeros}", 1.0)
    _expect_number(part, f"1 01111100 010{zeros}", -0.15625)
    _expect_number(part, f"0 10000001 101{zeros}", 6.5)
    _expect_number(part, f"0 11111110 {'1' * 23}", 3.4028234663852886e38)


def other_formats_have_another_bias(part: FloatOfBits) -> None:
    """numbers in FP16, BF16 and FP8 E5M2:"""
    _expect_number(part, "0 01111 0000000000", 1.0)
    _expect_number(part, "0 11110 1111111111", 65504.0)
    _expect_number(part, "1 00001 0000000001", -(2.0**-14) * (1 + 2.0**-10))
    _expect_number(part, "0 01111011 1001101", 0.10009765625)
    _expect_number(part, "0 01011 10", 0.09375)
    _expect_number(part, "1 11110 11", -57344.0)


def small_numbers_lose_the_leading_one(part: FloatOfBits) -> None:
    """subnormal numbers, whose stored exponent is zero, and both zeros:"""
    _expect_number(part, "0 00000 1000000000", 2.0**-15)
    _expect_number(part, "1 00000 0000000001", -(2.0**-24))
    _expect_number(part, "0 00000 11", 0.75 * 2.0**-14)
    _expect_number(part, "0 00000000 0000000", 0.0)
    _expect_number(part, "1 00000 00", -0.0)


def the_largest_exponent_is_infinity_or_nan(part: FloatOfBits) -> None:
    """stored exponents of ones only:"""
    _expect_number(part, "0 11111 0000000000", math.inf)
    _expect_number(part, "1 11111111 0000000", -math.inf)
    _expect_number(part, "0 11111 0000000001", math.nan)
    _expect_number(part, "1 11111111 1000000", math.nan)


def _block(scale: float, minimum: float, levels: Sequence[int]) -> list[int]:
    """Return the bytes of a block, by the format's definition."""
    packed = [low | high << 4 for low, high in zip(levels[:16], levels[16:], strict=True)]
    return [*struct.pack("<ee", scale, minimum), *packed]


def _unpacked(part: Unpack, blocks: list[list[list[int]]]) -> Tensor:
    given = torch.tensor(blocks, dtype=torch.uint8)
    before = given.clone()
    found = part(given)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect(torch.equal(given, before), "changed its input; return a new tensor.")
    return found


AXES = ("row", "block", "number")
UP = list(range(16))


def levels_are_halves_of_bytes(part: Unpack) -> None:
    """scale 1 and minimum 0, so that the numbers are the levels themselves:"""
    levels = UP + UP[::-1]
    right = torch.tensor([[levels]], dtype=torch.float32)
    expect_close(_unpacked(part, [[_block(1, 0, levels)]]), right, "the numbers", AXES)


def scale_multiplies_and_minimum_is_added(part: Unpack) -> None:
    """scale 0.5 and minimum -3:"""
    levels = UP + [7] * 16
    right = torch.tensor([[[0.5 * level - 3 for level in levels]]])
    expect_close(_unpacked(part, [[_block(0.5, -3, levels)]]), right, "the numbers", AXES)


def each_block_has_its_own_scale_and_minimum(part: Unpack) -> None:
    """two rows of three different blocks:"""
    scales = [[0.25, 1.0, -2.0], [0.125, 4.0, 0.0625]]
    minima = [[-1.0, 0.5, 0.0], [10.0, -0.125, 2.0]]
    generator = torch.Generator().manual_seed(11)
    levels = torch.randint(0, 16, (2, 3, 32), generator=generator)
    blocks = [
        [_block(scales[r][b], minima[r][b], levels[r, b].tolist()) for b in range(3)]
        for r in range(2)
    ]
    scale, minimum = torch.tensor(scales).unsqueeze(-1), torch.tensor(minima).unsqueeze(-1)
    expect_close(_unpacked(part, blocks), levels * scale + minimum, "the numbers", AXES)


def numbers_are_float32_and_exact(part: Unpack) -> None:
    """a scale of 0.0999756 (a float16) and levels of 15:"""
    found = _unpacked(part, [[_block(0.1, 0.7, [15] * 32)]])
    expect_equal(str(found.dtype), "torch.float32", "the dtype of the numbers")
    scale, minimum = struct.unpack("<ee", struct.pack("<ee", 0.1, 0.7))
    right = torch.full((1, 1, 32), 15 * scale + minimum)
    expect_close(found, right, "the numbers", AXES, tolerance=1e-6)


def _rows(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _packed(part: Pack, numbers: Tensor) -> Tensor:
    """Return the packed blocks; expect bytes of the right shape, and an unchanged argument."""
    before = numbers.clone()
    found = part(numbers)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect(torch.equal(numbers, before), "changed its input; return a new tensor.")
    expect_equal(str(found.dtype), "torch.uint8", "the dtype of the blocks")
    shape = [len(numbers), numbers.shape[1] // 32, 20]
    expect_equal(list(found.shape), shape, "the shape (rows, blocks, 20)")
    return found


def _read_back(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, minimum and levels of packed blocks."""
    header = blocks[..., :4].contiguous().view(torch.float16).float()
    levels = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1).float()
    return header[..., :1], header[..., 1:], levels


def _expect_best(part: Pack, numbers: Tensor) -> None:
    """Expect the stored range of each block, and the nearest level of each number."""
    scale, minimum, levels = _read_back(_packed(part, numbers))
    blocks = numbers.unflatten(-1, (-1, 32))
    least, greatest = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    axes = ("row", "block", "place")
    expect_close(minimum, least.half().float(), "the stored minimum", axes, tolerance=1e-6)
    right = ((greatest - least) / 15).half().float()
    expect_close(scale, right, "the stored scale", axes, tolerance=1e-3)
    errors = (levels * scale + minimum - blocks).abs()
    possible = (torch.arange(16.0) * scale + minimum).unsqueeze(-2) - blocks.unsqueeze(-1)
    least_errors = possible.abs().amin(-1)
    far = errors > least_errors * 1.001 + 1e-6 * scale
    if far.any():
        row, block, place = far.nonzero()[0].tolist()
        raise Wrong(
            f"number {place} of block {block} in row {row} is read back "
            f"{float(errors[row, block, place]):.6g} away; with this scale and minimum it should "
            f"be {float(least_errors[row, block, place]):.6g}."
        )


def _random_rows(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(41))


def levels_return_as_they_were(part: Pack) -> None:
    """numbers that Q4_1 can store exactly:"""
    levels = UP + UP[::-1]
    numbers = _rows([0.5 * level - 3 for level in levels])
    scale, minimum, found = _read_back(_packed(part, numbers))
    expect_equal([float(scale), float(minimum)], [0.5, -3.0], "[scale, minimum]")
    expect_equal([int(each) for each in found.flatten()], levels, "the levels")


def each_block_has_its_own_range(part: Pack) -> None:
    """two rows of three blocks, with different ranges:"""
    sizes = torch.tensor([[1.0, 30.0, 0.01], [5.0, 0.2, 100.0]]).repeat_interleave(32, dim=1)
    _expect_best(part, _random_rows(2, 96) * sizes)


def levels_are_nearest_to_what_is_stored(part: Pack) -> None:
    """numbers far from zero, whose minimum float16 must round:"""
    _expect_best(part, 1000.2 + 2 * _random_rows(4, 64).abs())
    _expect_best(part, -1000.3 + 2 * _random_rows(4, 64).abs())


def small_ranges_stay_within_the_levels(part: Pack) -> None:
    """a range so small that float16 rounds its scale by much:"""
    _expect_best(part, 1e-6 * torch.linspace(0, 1, 32).unsqueeze(0))


def a_constant_block_has_a_scale_of_zero(part: Pack) -> None:
    """a block of zeros, and one of 0.25, beside a block with a range:"""
    numbers = _rows([0.0] * 32 + [0.25] * 32 + [float(each) for each in range(32)])
    scale, minimum, levels = _read_back(_packed(part, numbers))
    expect_equal(scale.flatten().tolist()[:2], [0.0, 0.0], "the scales of the constant blocks")
    found = (levels * scale + minimum)[0, :2]
    right = torch.tensor([[0.0] * 32, [0.25] * 32])
    expect_close(found, right, "the constant blocks, read back", ("block", "number"))
    _expect_best(part, numbers)


CHECKS = {
    "read_safetensors_header": (
        bytes_are_counted_from_the_files_beginning,
        metadata_is_no_tensor,
        a_header_may_be_padded_and_in_another_order,
        a_file_that_is_cut_short_is_refused,
        tensors_that_overlap_are_refused,
        bytes_that_belong_to_no_tensor_are_refused,
    ),
    "float_of_bits": (
        numbers_of_fp32_are_read,
        other_formats_have_another_bias,
        small_numbers_lose_the_leading_one,
        the_largest_exponent_is_infinity_or_nan,
    ),
    "unpack_q4_1": (
        levels_are_halves_of_bytes,
        scale_multiplies_and_minimum_is_added,
        each_block_has_its_own_scale_and_minimum,
        numbers_are_float32_and_exact,
    ),
    "pack_q4_1": (
        levels_return_as_they_were,
        each_block_has_its_own_range,
        levels_are_nearest_to_what_is_stored,
        small_ranges_stay_within_the_levels,
        a_constant_block_has_a_scale_of_zero,
    ),
}

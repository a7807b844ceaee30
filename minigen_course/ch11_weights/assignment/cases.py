"""Cases of chapter 11's exercises, drawn by a seed."""

import json
import math
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.quant_formats import unpack_q4_1
from minigen_course.grading.varied import Varied, outcome

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}  # bytes of a number

DAMAGES = ("gap", "overlap", "both", "cut short", "bytes left over")


def _header(random: Random) -> dict[str, Any]:
    """Return the header of a sound file with three tensors, and how a broken one differs."""
    entries: dict[str, Any] = {}
    end = 0
    for name in random.sample(("norm", "key", "value", "query", "head"), 3):
        dtype, shape = random.choice(sorted(SIZES)), [random.randint(2, 6), random.randint(2, 4)]
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    damage, by = random.choice(DAMAGES), random.randint(1, 4)
    _, middle, last = entries
    moved = middle if damage == "both" else last
    shift = {"gap": by, "overlap": -by, "both": random.choice((by, -by))}.get(damage, 0)
    more = {"gap": by, "overlap": -by, "cut short": -by, "bytes left over": by}.get(damage, 0)
    names = random.sample(sorted(entries), 3)
    return {
        "header": {"__metadata__": {"format": "pt"}} | {name: entries[name] for name in names},
        "spaces": random.randint(0, 7),
        "data_bytes": end,
        "moved": {moved: [offset + shift for offset in entries[moved]["data_offsets"]]},
        "broken_data_bytes": end + more,
    }


def _entries(part: Any, header: dict[str, Any], spaces: int, data_bytes: int) -> Any:
    text = json.dumps(header).encode() + b" " * spaces
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
        return {
            name: (each.dtype, list(each.shape), each.begin, each.end)
            for name, each in part(path).items()
        }


def _two_headers(
    part: Any,
    header: dict[str, Any],
    spaces: int,
    data_bytes: int,
    moved: dict[str, list[int]],
    broken_data_bytes: int,
) -> Any:
    """Read a file with this header, then spaces and data; then read a broken file.

    In the second file one tensor has other offsets, or the data have another number of bytes. The
    result shows dtype, shape, begin and end of each tensor, then the same of the second file, or
    the error.
    """
    broken = dict(header)
    for name, offsets in moved.items():
        broken[name] = {**header[name], "data_offsets": offsets}
    return [
        outcome(lambda: _entries(part, header, spaces, data_bytes)),
        outcome(lambda: _entries(part, broken, spaces, broken_data_bytes)),
    ]


FORMATS = ((5, 10), (8, 7), (5, 2))  # bits of exponent and mantissa


def _patterns(random: Random) -> dict[str, Any]:
    exponent_bits, mantissa_bits = random.choice(FORMATS)

    def bits(count: int) -> str:
        """Return bits that are neither all 0 nor all 1."""
        return f"{random.randint(1, 2**count - 2):0{count}b}"

    sign, zeros, ones = random.choice("01"), "0" * exponent_bits, "1" * exponent_bits
    small = random.choice((bits(mantissa_bits), "0" * mantissa_bits))
    return {
        "patterns": [
            f"1 {bits(exponent_bits)} {bits(mantissa_bits)}",
            f"{sign} {bits(exponent_bits)} {bits(mantissa_bits)}",
            f"{sign} {zeros} {bits(mantissa_bits)}",
            f"1 {ones} {small}",
        ]
    }


def _values(part: Any, patterns: list[str]) -> Any:
    """Read each pattern, which is shown here as sign, exponent, and mantissa."""
    return [part(each.replace(" ", ""), len(each.split()[1])) for each in patterns]


def _packed_blocks(random: Random) -> dict[str, Any]:
    scales = [random.sample((0.125, 0.25, 0.5, 1.5, 2.0, 3.0), 2) for _ in range(2)]
    minima = [random.sample((-4.0, -3.0, -1.5, -0.5, 0.75, 6.0), 2) for _ in range(2)]
    return {
        "scales": scales,
        "minima": minima,
        "levels": [random.randrange(256) for _ in range(16)],
    }


def _unpacked(
    part: Any, scales: list[list[float]], minima: list[list[float]], levels: list[int]
) -> Any:
    """Decode two rows of two blocks each; all four blocks have the same 16 bytes of levels."""
    rows = zip(scales, minima, strict=True)
    blocks = [
        [[*struct.pack("<ee", *each), *levels] for each in zip(*row, strict=True)] for row in rows
    ]
    return part(torch.tensor(blocks, dtype=torch.uint8))


def _ordinary_block(random: Random, least: float, scale: float) -> list[float]:
    """Return 32 numbers with this minimum and scale, none halfway between two levels."""
    (minimum,) = struct.unpack("<e", struct.pack("<e", least))
    first, last = (math.ceil((each - minimum) / scale) for each in (least, least + 14 * scale))
    levels = [random.randint(first + 1, min(last, 14)) for _ in range(30)]
    inner = [minimum + scale * (level + random.uniform(-0.3, 0.3)) for level in levels]
    block = [least, *inner, least + 15 * scale]
    random.shuffle(block)
    return block


def _numbers(random: Random) -> dict[str, Any]:
    blocks = [
        _ordinary_block(random, random.choice((-4.0, -2.5, 1.0)), random.choice((0.25, 0.5))),
        [random.choice((-3.0, 0.25, 0.0, 7.0))] * 32,
        _ordinary_block(random, random.choice((1000.2, -1000.3, 700.2)), 0.3125),
        _ordinary_block(random, random.choice((-0.5, 0.125)), random.choice((0.0625, 0.125))),
    ]
    random.shuffle(blocks)
    return {"numbers": torch.tensor(blocks, dtype=torch.float32).reshape(2, 64)}


def _read_back(part: Any, numbers: Tensor) -> Any:
    """Pack the numbers, and read them back as `unpack_q4_1` of the package does.

    The result shows scale and minimum of each block, and the numbers that are read.
    """
    blocks = part(numbers)
    header = blocks[..., :4].contiguous().view(torch.float16).float()
    return {"headers": header, "read back": unpack_q4_1(blocks)}


VARIED = {
    "read_safetensors_header": Varied(
        "names, dtypes, shapes, order and padding of a header; how a broken file differs",
        _header,
        _two_headers,
        num_cases=8,
    ),
    "float_of_bits": Varied(
        "format and bits of two ordinary numbers, a subnormal one, and infinity or nan",
        _patterns,
        _values,
        tolerance=0.0,
    ),
    "unpack_q4_1": Varied("scales and minima of four blocks, levels", _packed_blocks, _unpacked),
    "pack_q4_1": Varied(
        "four blocks: two ordinary, a constant one, one far from zero", _numbers, _read_back
    ),
}

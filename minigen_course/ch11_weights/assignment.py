"""What may be assigned of chapter 11: cases by seed for its exercises, and questions."""

import json
import math
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minigen.checkpoint.quant_formats import unpack_q4_1
from minigen_course.ch11_weights.figures import byte_grid
from minigen_course.grading.question import Question, Written
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


def _format(random: Random) -> dict[str, Any]:
    return {
        "billions": random.choice((3, 7, 8, 13, 32, 70)),
        "bits": random.choice((2, 3, 4, 5, 6)),
        "block": random.choice((16, 32, 64)),
        "scale_bits": random.choice((8, 16)),
        "minimum_bits": random.choice((8, 16)),
    }


def _gigabytes(billions: int, bits: int, block: int, scale_bits: int, minimum_bits: int) -> float:
    return billions * (bits + (scale_bits + minimum_bits) / block) / 8


HEADER = b'{"__metadata__":{"format":"pt"},'


def _place(random: Random) -> dict[str, Any]:
    begin = 64 * random.randint(20, 900)
    return {
        "header_bytes": 8 * random.randint(40, 500),
        "begin": begin,
        "end": begin + 64 * random.randint(5, 60),
    }


def _place_in_file(header_bytes: int, begin: int, end: int) -> float:
    return 8 + header_bytes + begin


def _first_bytes(header_bytes: int, begin: int, end: int) -> Figure:
    raw = struct.pack("<Q", header_bytes) + HEADER[:24]
    fields = [("length of the header", 8), ("the header, in JSON", 24)]
    return byte_grid(raw, fields, "The first 32 bytes of a safetensors file", letters=True)


def _servers(random: Random) -> dict[str, Any]:
    reading = random.randint(1, 4)
    others = [each for each in range(2, 7) if each not in (reading, reading + 1)]
    return {
        "size": random.choice((5, 8, 14, 16, 26)),
        "mapping": random.choice(others),
        "reading": reading,
    }


def _physical(size: int, mapping: int, reading: int) -> float:
    return size * (1 + reading)


MISTAKES = ("halves swapped", "minimum left out", "scale and minimum swapped", "nothing")


def _read_by(mistake: str, scale: float, minimum: float, low: int, high: int) -> list[float]:
    """Return numbers 0 and 16 of a block, as a reader with this mistake computes them."""
    if mistake == "halves swapped":
        low, high = high, low
    if mistake == "scale and minimum swapped":
        scale, minimum = minimum, scale
    if mistake == "minimum left out":
        minimum = 0
    return [scale * level + minimum for level in (low, high)]


def _block(random: Random) -> dict[str, Any]:
    low, high = random.sample(range(1, 16), 2)
    header = {"scale": random.choice((0.25, 0.5, 1.5)), "minimum": random.choice((-4, -3, -2))}
    found = _read_by(random.choice(MISTAKES), **header, low=low, high=high)
    return header | {"byte": low + 16 * high, "found": found}


def _mistake(scale: float, minimum: float, byte: int, found: list[float]) -> float | str:
    halves = {"low": byte % 16, "high": byte // 16}
    (name,) = (each for each in MISTAKES if _read_by(each, scale, minimum, **halves) == found)
    return name


def _printed_block(scale: float, minimum: float, byte: int, found: list[float]) -> str:
    return (
        f"bytes 0 and 1   scale d          {scale}\n"
        f"bytes 2 and 3   minimum m        {minimum}\n"
        f"byte 4          first two levels 0x{byte:02x}\n\n"
        f"number 0        {found[0]:g}\n"
        f"number 16       {found[1]:g}"
    )


QUESTIONS = {
    "size_of_a_format": Question(
        "estimate",
        "A format stores weights in blocks of {block}. A weight has {bits} bits, and a block has a "
        "scale of {scale_bits} bits and a minimum of {minimum_bits} bits. How many GB (10^9 bytes) "
        "do {billions} billion weights take?",
        "number of weights, bits, size of a block, bits of scale and minimum",
        _format,
        _gigabytes,
        "A weight takes {bits} + ({scale_bits} + {minimum_bits}) / {block} bits with its share of "
        "scale and minimum, and 8 bits are a byte.",
        within=1.01,
    ),
    "place_in_the_file": Question(
        "reading",
        "The figure shows the first bytes of a safetensors file in hexadecimal. The header says "
        "that a tensor has the data_offsets [{begin}, {end}]. At which byte of the file does this "
        "tensor begin, if the first byte is byte 0?",
        "length of the header, offsets of the tensor",
        _place,
        _place_in_file,
        "The first eight bytes hold the length of the header, {header_bytes}, with the small part "
        "first; the tensor begins 8 + {header_bytes} + {begin} bytes after the file's beginning.",
        within=1.0,
        figure=_first_bytes,
    ),
    "memory_of_servers": Question(
        "estimate",
        "Servers on one machine use the same file of {size} GB: {mapping} of them map it, and "
        "{reading} of them read it as a whole into memory of their own. All of them have used "
        "every weight as it lies in the file, and the system has dropped no page. How many GB of "
        "physical memory hold bytes of this file, page cache included?",
        "size of the file, servers that map it, servers that read it",
        _servers,
        _physical,
        "The page cache holds the file once, and all that map it share these {size} GB; each of "
        "the others, {reading} in number, has a copy of its own in addition.",
        within=1.01,
    ),
    "what_the_reader_does": Question(
        "diagnosis",
        "A reader of the format Q4_1 prints the first five bytes of a block, and two numbers that "
        "it computes from them. Scale and minimum are printed as they are stored. What is wrong "
        "with the two numbers?",
        "scale, minimum, two levels, the mistake of the reader",
        _block,
        _mistake,
        "The low half of the byte {byte} (in decimal) is {byte} modulo 16, and belongs to number "
        "0; the high half is {byte} // 16, and belongs to number 16; each number is {scale} x "
        "level + ({minimum}).",
        choices=MISTAKES,
        figure=_printed_block,
    ),
}
WRITTEN = {
    "what_mapping_saves": Written(
        "A colleague maps the file of a dense model instead of reading it. Opening it now takes 1 "
        "ms instead of 8 s, and she says that loading is 8,000 times as fast. Say what mapping "
        "really saves, what it only moves to a later time, and why the first token of the model "
        "does not come 8,000 times as early.",
        "Mapping only notes that a range of addresses is this file, so opening costs almost "
        "nothing. The cost moves to first use: a page fault enters each page into the page table, "
        "and a page that is not in the page cache must be fetched from the disk, which is no "
        "faster than before. A dense model uses all weights for its first token, so the whole file "
        "must come before it. What is saved is the copy: reading keeps the bytes a second time in "
        "the process, while mapped pages are shared with the page cache and with other processes.",
        {
            "opening a mapping reads nothing; it only reserves addresses": 2,
            "the cost moves to first use: page faults, and the disk if the file is cold": 3,
            "a dense model needs all of its weights for the first token": 2,
            "the copy into the process's own memory is saved, in memory and in time": 3,
        },
    ),
}

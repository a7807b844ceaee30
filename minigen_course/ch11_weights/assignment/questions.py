"""Questions on chapter 11 that need no code."""

import struct
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch11_weights.figures import byte_grid
from minigen_course.grading.question import Question, Written


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

"""Answers to the exercises of chapter 11."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from minigen_course.ch11_weights.reference import TensorEntry
from tests.answers import Answers


def header_by_bytes(path: Path) -> dict[str, TensorEntry]:
    """Right: the whole file in memory, and every byte counted."""
    raw = path.read_bytes()
    if len(raw) < 8 or 8 + struct.unpack_from("<Q", raw)[0] > len(raw):
        raise ValueError("cut short")
    begin = 8 + struct.unpack_from("<Q", raw)[0]
    owners = [0] * (len(raw) - begin)
    found = {}
    for name, each in json.loads(raw[8:begin].decode()).items():
        if name == "__metadata__":
            continue
        first, last = each["data_offsets"]
        if last > len(owners):
            raise ValueError("cut short")
        for place in range(first, last):
            owners[place] += 1
        found[name] = TensorEntry(each["dtype"], tuple(each["shape"]), begin + first, begin + last)
    if set(owners) - {1}:
        raise ValueError("not covered exactly once")
    return found


def header_by_sums(path: Path) -> dict[str, TensorEntry]:
    """Right: neighbours in the sorted list of all offsets are compared."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError("cut short")
        header: Mapping[str, dict[str, list[int]]] = json.loads(file.read(length))
    tensors = {name: each for name, each in header.items() if "data_offsets" in each}
    spans = sorted(each["data_offsets"] for each in tensors.values())
    ends = [0, *(end for _, end in spans)]
    begins = [*(begin for begin, _ in spans), path.stat().st_size - 8 - length]
    if begins != ends:
        raise ValueError("gaps or overlaps")
    return {
        name: TensorEntry(
            str(each["dtype"]),
            tuple(each["shape"]),
            *(8 + length + offset for offset in each["data_offsets"]),
        )
        for name, each in tensors.items()
    }


def wrong_header(name: str) -> Callable[[Path], object]:
    def part(path: Path) -> object:
        raw = path.read_bytes()
        order = ">" if name == "big-endian" else "<"
        (length,) = struct.unpack_from(f"{order}Q", raw.ljust(8, b"\0"))
        begin = 8 + length
        if name == "trusts the length":
            with path.open("rb") as file:
                file.read(length)
        if begin > len(raw):
            raise ValueError("cut short")
        header = json.loads(raw[8:begin])
        if name == "first key dropped":
            header.pop(next(iter(header)))
        if name != "metadata kept":
            header.pop("__metadata__", None)
        start = {"from the header's end": 0, "length forgotten": 8, "eight forgotten": length}.get(
            name, begin
        )
        found: dict[str, object] = {}
        for key, each in header.items():
            first, last = (start + offset for offset in each["data_offsets"])
            if name == "end is inclusive":
                last -= 1
            if name == "size instead of end":
                last -= first
            found[key] = TensorEntry(each["dtype"], tuple(each["shape"]), first, last)
        spans = [each["data_offsets"] for each in header.values()]
        if name != "order of the header":
            spans.sort()
        covered = 0
        for first, last in spans:
            is_bad = first != covered
            if name == "only overlaps":
                is_bad = first < covered
            if name == "only gaps":
                is_bad = first > covered
            if name == "no look at neighbours":
                is_bad = False
            if is_bad:
                raise KeyError("tensors") if name == "another error" else ValueError("tensors")
            covered = last
        end = len(raw) - begin
        if name == "only the total" and sum(last - first for first, last in spans) != end:
            raise ValueError("size")
        is_short = {
            "end unchecked": False,
            "may end early": covered < end,
            "may end late": end < covered,
        }
        if is_short.get(name, covered != end) and name != "only the total":
            raise ValueError("end")
        return (
            list(found.values())
            if name == "a list"
            else ({key: header[key] for key in found} if name == "raw entries" else found)
        )

    return part


WRONG_HEADERS = [
    *("big-endian", "trusts the length", "first key dropped", "metadata kept"),
    *("from the header's end", "length forgotten", "eight forgotten", "end is inclusive"),
    *("size instead of end", "order of the header", "only overlaps", "only gaps"),
    *("no look at neighbours", "another error", "end unchecked", "may end early"),
    *("may end late", "a list", "raw entries"),
]


FORMATS_OF_TORCH = {
    (32, 8): (torch.int32, torch.float32),
    (16, 5): (torch.int16, torch.float16),
    (16, 8): (torch.int16, torch.bfloat16),
    (8, 5): (torch.int8, torch.float8_e5m2),
}


def float_by_torch(bits: str, exponent_bits: int) -> float:
    """Right: torch views the integer with these bits as a float."""
    integer, dtype = FORMATS_OF_TORCH[len(bits), exponent_bits]
    value = int(bits[1:], 2) - (2 ** (len(bits) - 1) if bits[0] == "1" else 0)
    return torch.tensor(value, dtype=integer).view(dtype).item()


def float_by_sums(bits: str, exponent_bits: int) -> float:
    """Right: a power of two for each mantissa bit."""
    stored = int(bits[1 : 1 + exponent_bits], 2)
    power = max(stored, 1) - (2 ** (exponent_bits - 1) - 1)
    total = 2.0**power if stored else 0.0
    for place, bit in enumerate(bits[1 + exponent_bits :], 1):
        total += int(bit) * 2.0 ** (power - place)
    if stored == 2**exponent_bits - 1:
        total = math.nan if "1" in bits[1 + exponent_bits :] else math.inf
    return -total if bits[0] == "1" else total


def wrong_float(name: str) -> Callable[[str, int], object]:
    def part(bits: str, exponent_bits: int) -> object:
        if name == "always as FP32":
            exponent_bits = 8
        stored, digits = bits[1 : 1 + exponent_bits], bits[1 + exponent_bits :]
        if name == "mantissa first":
            stored, digits = bits[-exponent_bits:], bits[1:-exponent_bits]
        if name == "mantissa backwards":
            digits = digits[::-1]
        exponent, fraction = int(stored, 2), int(digits, 2) / 2 ** len(digits)
        bias = {"bias of 128": 2 ** (exponent_bits - 1), "always 127": 127}.get(
            name, 2 ** (exponent_bits - 1) - 1
        )
        sign = -1.0 if bits[0] == "1" else 1.0
        if name == "no sign":
            sign = 1.0
        if name == "sign turned":
            sign = -sign
        if exponent == 2**exponent_bits - 1 and name != "no infinity":
            if name == "nan for all":
                return math.nan
            if name == "infinity for all" or fraction == 0:
                return math.inf if name == "one infinity" else sign * math.inf
            return math.nan
        if exponent == 0 and name != "no subnormals":
            if name == "zero for all":
                return sign * 0.0
            if name == "zero without a sign" and fraction == 0:
                return 0.0
            return sign * 2.0 ** (name != "one power too small") * 2.0**-bias * fraction
        if name == "no leading one":
            return sign * 2.0 ** (exponent - bias) * fraction
        value = sign * 2.0 ** (exponent - bias) * (1 + fraction)
        return str(value) if name == "a text" else value

    return part


WRONG_FLOATS = [
    *("always as FP32", "mantissa first", "mantissa backwards", "bias of 128", "always 127"),
    *("no sign", "sign turned", "no infinity", "nan for all", "infinity for all"),
    *("one infinity", "no subnormals", "zero for all", "zero without a sign"),
    *("one power too small", "no leading one", "a text"),
]


def q4_1_by_numpy(blocks: torch.Tensor) -> torch.Tensor:
    """Right, in numpy."""
    raw = blocks.numpy()
    header = np.ascontiguousarray(raw[..., :4]).view(np.float16).astype(np.float32)
    low, high = raw[..., 4:] % 16, raw[..., 4:] // 16
    levels = np.concatenate([low, high], axis=-1).astype(np.float32)
    return torch.from_numpy(levels * header[..., :1] + header[..., 1:])


def wrong_q4_1(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def part(blocks: torch.Tensor) -> torch.Tensor:
        rows, count, _ = blocks.shape
        kind = torch.bfloat16 if name == "bfloat16" else torch.float16
        header = blocks[..., :4].contiguous().view(kind).float()
        scale, minimum = header[..., :1], header[..., 1:]
        if name == "minimum first":
            scale, minimum = minimum, scale
        if name == "first block's scale":
            scale, minimum = scale[:, :1], minimum[:, :1]
        if name == "first row's scale":
            scale, minimum = scale[:1], minimum[:1]
        packed = blocks[..., 4:]
        low, high = packed & 15, packed >> 4
        levels = torch.cat([high, low] if name == "high first" else [low, high], dim=-1).float()
        if name == "interleaved":
            levels = torch.stack([low, high], dim=-1).flatten(-2).float()
        if name == "high not shifted":
            levels = torch.cat([low, packed & 240], dim=-1).float()
        if name == "low not masked":
            levels = torch.cat([packed, high], dim=-1).float()
        if name == "centred":
            levels = levels - 8
        if name == "signed":
            levels = torch.where(levels > 7, levels - 16, levels)
        if name == "no minimum":
            return levels * scale
        if name == "minimum taken off":
            return levels * scale - minimum
        if name == "minimum scaled":
            return (levels + minimum) * scale
        if name == "half":
            return (levels * scale + minimum).half()
        if name == "flat":
            return (levels * scale + minimum).reshape(rows, count * 32)
        return levels * scale + minimum

    return part


WRONG_Q4_1 = [
    *("bfloat16", "minimum first", "first block's scale", "first row's scale", "high first"),
    *("interleaved", "high not shifted", "low not masked", "centred", "signed", "no minimum"),
    *("minimum taken off", "minimum scaled", "half", "flat"),
]


def nearest_level(number: float, scale: float, minimum: float) -> int:
    return min(range(16), key=lambda level: abs(level * scale + minimum - number))


def pack_by_loops(numbers: torch.Tensor) -> torch.Tensor:
    """Right, block by block in Python, with the nearest of all 16 values."""
    rows = []
    for row in numbers:
        blocks = []
        for block in row.split(32):
            least, greatest = float(block.min()), float(block.max())
            header = struct.pack("<ee", (greatest - least) / 15, least)
            scale, minimum = struct.unpack("<ee", header)
            levels = [nearest_level(each, scale, minimum) for each in block.tolist()]
            pairs = zip(levels[:16], levels[16:], strict=True)
            blocks.append([*header, *(low + 16 * high for low, high in pairs)])
        rows.append(blocks)
    return torch.tensor(rows, dtype=torch.uint8)


def pack_by_numpy(numbers: torch.Tensor) -> torch.Tensor:
    """Right, in numpy, with a scale of 1 in place of 0."""
    blocks = numbers.numpy().reshape(len(numbers), -1, 32)
    least, greatest = blocks.min(-1), blocks.max(-1)
    header = np.stack([(greatest - least) / 15, least], axis=-1).astype(np.float16)
    scale, minimum = header.astype(np.float32)[..., :1], header.astype(np.float32)[..., 1:]
    levels = np.rint((blocks - minimum) / np.where(scale == 0, 1, scale)).clip(0, 15)
    levels = levels.astype(np.uint8)
    packed = levels[..., :16] + 16 * levels[..., 16:]
    return torch.from_numpy(np.concatenate([header.view(np.uint8), packed], axis=-1))


def wrong_pack(name: str) -> Callable[[torch.Tensor], object]:
    def part(numbers: torch.Tensor) -> object:
        if name == "the library's own, by the scale before rounding":
            packed = torch.from_numpy(quantize(numbers.numpy(), GGMLQuantizationType.Q4_1))
            return packed.unflatten(-1, (-1, 20))
        blocks = numbers.unflatten(-1, (-1, 32))
        least, greatest = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        if name == "one range per row":
            least, greatest = (
                each.expand_as(least)
                for each in (least.amin(1, keepdim=True), greatest.amax(1, keepdim=True))
            )
        if name == "symmetric":
            greatest = torch.maximum(least.abs(), greatest.abs())
            least = -greatest
        parts = 16 if name == "sixteen parts" else 15
        scale = (greatest - least) / parts
        pair = [least, scale] if name == "minimum first" else [scale, least]
        header = torch.cat(pair, dim=-1)
        header = header.bfloat16() if name == "bfloat16" else header.half()
        if name != "by the numbers before rounding":
            scale, least = (each.float() for each in header.split(1, dim=-1))
        if name == "minimum first":
            scale, least = least, scale
        if name != "divides by zero":
            scale = scale.clamp(min=1e-9)
        levels = (blocks - least) / scale
        levels = levels.floor() if name == "rounded down" else levels.round()
        if name != "not clamped":
            levels = levels.nan_to_num(7).clamp(0, 15)
        levels = levels.to(torch.uint8)
        if name == "divides by zero":
            header = torch.where((greatest == least), torch.nan, header.float()).half()
        first, second = levels.chunk(2, dim=-1)
        if name == "neighbours in a byte":
            first, second = levels[..., ::2], levels[..., 1::2]
        if name == "high first":
            first, second = second, first
        found = torch.cat([header.view(torch.uint8), first | (second << 4)], dim=-1)
        if name == "levels not packed":
            return torch.cat([header.view(torch.uint8), levels], dim=-1)
        return found.flatten(-2) if name == "flat" else found

    return part


WRONG_PACKS = [
    *("the library's own, by the scale before rounding", "one range per row", "symmetric"),
    *("sixteen parts", "minimum first", "bfloat16", "by the numbers before rounding"),
    *("divides by zero", "rounded down", "not clamped", "neighbours in a byte", "high first"),
    *("levels not packed", "flat"),
]


ANSWERS = {
    "read_safetensors_header": Answers(
        right=(header_by_bytes, header_by_sums, wrong_header("nothing")),
        wrong={name: wrong_header(name) for name in WRONG_HEADERS},
        equivalent={},
    ),
    "float_of_bits": Answers(
        right=(float_by_torch, float_by_sums, wrong_float("nothing")),
        wrong={name: wrong_float(name) for name in WRONG_FLOATS},
        equivalent={},
    ),
    "unpack_q4_1": Answers(
        right=(q4_1_by_numpy, wrong_q4_1("nothing")),
        wrong={name: wrong_q4_1(name) for name in WRONG_Q4_1},
        equivalent={},
    ),
    "pack_q4_1": Answers(
        right=(pack_by_loops, pack_by_numpy, wrong_pack("nothing")),
        wrong={name: wrong_pack(name) for name in WRONG_PACKS},
        equivalent={},
    ),
}

"""Formats bit by bit: what a block stores, and which of its bits make one weight.

Layouts as in ggml's `ggml-common.h` (Q8_0, Q4_1, Q4_K, MXFP4, NVFP4), bitsandbytes (NF4, with a
float32 absmax) and by block as DeepSeek's FP8 (a float32 scale per 128 x 128 weights). The floats
are those of the OCP specifications: FP8, and Microscaling (E2M1, E8M0).
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.checkpoint.quantized.floats import NF4
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    QUIET,
    SKY,
    draw_labels,
    figure,
    title,
)

BYTES_IN_A_ROW = 8
MOST_WRITTEN = 340  # bits that are also written as digits
COLOURS = {
    "code": SKY,
    "sign": PINK,
    "exponent": GREEN,
    "mantissa": SKY,
    "scale": ORANGE,
    "scales": ORANGE,
    "minimum": AMBER,
    "minima": AMBER,
    "scale of scales": BLUE,
    "scale of minima": "#7f7f7f",
    "absmax": ORANGE,
}
Raws = Mapping[str, int]  # what the bits of each field say, as a whole number
Decoded = tuple[float, str]  # the weight, and how it comes about


@dataclass(frozen=True)
class Field:
    """A part of a block: one number of `bits` bits per `per` weights.

    `places(index)` are the bits of number `index`, the lowest first; bit k of byte b is 8 b + k.
    """

    name: str
    bits: int
    per: int
    places: Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Format:
    """A format: the weights of a block, its fields in the order of its bytes, and how to decode."""

    num_weights: int
    fields: tuple[Field, ...]
    decode: Callable[[Raws], Decoded]

    @property
    def bits_per_weight(self) -> float:
        """Codes, scales and minima, in bits per weight."""
        return sum(each.bits / each.per for each in self.fields)

    def places(self, weight: int) -> dict[str, Sequence[int]]:
        """Return the bits that make a weight, by field."""
        return {each.name: each.places(weight // each.per) for each in self.fields}

    def read(self, block: bytes, weight: int) -> Decoded:
        """Return a weight of a block as stored, and its equation."""
        bits = _bits(block)
        raws = {
            name: sum(int(bits[place]) << k for k, place in enumerate(places))
            for name, places in self.places(weight).items()
        }
        return self.decode(raws)

    def num_stored(self, block: bytes) -> int:
        """Return how many weights of the block these bytes hold; a long block may be cut."""
        code = self.fields[-1]
        return next(
            (
                weight
                for weight in range(self.num_weights)
                if max(code.places(weight)) >= 8 * len(block)
            ),
            self.num_weights,
        )


def _bits(block: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(block, np.uint8), bitorder="little")


def _number(name: str, byte: int, bits: int, per: int) -> Field:
    """Return a field of whole bytes that begins at `byte`, one number after another."""
    return Field(name, bits, per, lambda i: range(8 * byte + i * bits, 8 * byte + (i + 1) * bits))


def _halves(byte: int, group: int, cuts: Mapping[str, int] | None = None) -> tuple[Field, ...]:
    """Return codes of 4 bits from `byte` on: of each `group` the first half low, the rest high.

    `cuts` gives the bits of each part of a code, from its highest bit down.
    """
    half = group // 2

    def first(i: int) -> int:
        whole, rest = divmod(i, group)
        return 8 * (byte + whole * half + rest % half) + 4 * (rest // half)

    return _parts(first, 4, cuts)


def _parts(
    first: Callable[[int], int], bits: int, cuts: Mapping[str, int] | None
) -> tuple[Field, ...]:
    """Return the fields of a code whose lowest bit is `first(weight)`."""
    fields, top = [], bits
    for name, size in (cuts or {"code": bits}).items():
        low = top - size

        def places(i: int, low: int = low, top: int = top) -> range:
            return range(first(i) + low, first(i) + top)

        fields.append(Field(name, size, 1, places))
        top = low
    return tuple(fields)


def _sixes(name: str, low_bytes: int, shift: int) -> Field:
    """Return the 6-bit scales or minima of a K-quant's eight groups.

    The first four are the low six bits of four bytes. The others have four bits in the last four
    bytes of the twelve, and two in the high bits of those first bytes.
    """

    def places(i: int) -> list[int]:
        if i < 4:
            return [8 * (low_bytes + i) + k for k in range(6)]
        low = [8 * (12 + i - 4) + shift + k for k in range(4)]
        return [*low, *(8 * (low_bytes + i - 4) + k for k in (6, 7))]

    return Field(name, 6, 32, places)


def _half(raw: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", raw))[0])


def _single(raw: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", raw))[0])


def _float(sign: int, exponent: int, mantissa: int, bits: int, bias: int) -> Decoded:
    """Return a number of few bits, and its formula."""
    signed = "−" if sign else ""
    steps = 2**bits
    if exponent:
        value = (1 + mantissa / steps) * 2.0 ** (exponent - bias)
        text = f"{signed}(1 + {mantissa}/{steps}) × 2^({exponent} − {bias})"
    else:
        value = mantissa / steps * 2.0 ** (1 - bias)
        text = f"{signed}{mantissa}/{steps} × 2^(1 − {bias})"
    return (-value if sign else value), text


def _q8_0(raws: Raws) -> Decoded:
    code, scale = raws["code"] - 256 * (raws["code"] > 127), _half(raws["scale"])
    return code * scale, f"{code} × {scale:.6f}"


def _q4_1(raws: Raws) -> Decoded:
    scale, minimum = _half(raws["scale"]), _half(raws["minimum"])
    return raws["code"] * scale + minimum, f"{raws['code']} × {scale:.6f} + ({minimum:.6f})"


def _q4_k(raws: Raws) -> Decoded:
    scale, minimum = _half(raws["scale of scales"]), _half(raws["scale of minima"])
    code, first, second = raws["code"], raws["scales"], raws["minima"]
    value = code * first * scale - second * minimum
    return value, f"{code} × ({first} × {scale:.5g}) − {second} × {minimum:.5g}"


def _nf4(raws: Raws) -> Decoded:
    level, absmax = float(NF4[raws["code"]]), _single(raws["absmax"])
    return level * absmax, f"NF4[{raws['code']}] × absmax = {level:.4f} × {absmax:.6f}"


def _fp8(bits: int, bias: int) -> Callable[[Raws], Decoded]:
    def decode(raws: Raws) -> Decoded:
        number, text = _float(raws["sign"], raws["exponent"], raws["mantissa"], bits, bias)
        scale = _single(raws["scale"])
        return number * scale, f"{text} × {scale:.3g}"

    return decode


def _mxfp4(raws: Raws) -> Decoded:
    number, text = _float(raws["sign"], raws["exponent"], raws["mantissa"], 1, 1)
    power = raws["scale"] - 127
    return number * 2.0**power, f"{text} × 2^({raws['scale']} − 127)"


def _nvfp4(raws: Raws) -> Decoded:
    number, text = _float(raws["sign"], raws["exponent"], raws["mantissa"], 1, 1)
    scale, _ = _float(0, raws["scales"] >> 3, raws["scales"] & 7, 3, 7)
    return number * scale, f"{text} × {scale:g}"


def _fp8_format(exponent: int, mantissa: int, bias: int) -> Format:
    cuts = {"sign": 1, "exponent": exponent, "mantissa": mantissa}
    codes = _parts(lambda i: 8 * (4 + i), 8, cuts)
    size = 128 * 128
    return Format(size, (_number("scale", 0, 32, size), *codes), _fp8(mantissa, bias))


E2M1_CUTS = {"sign": 1, "exponent": 2, "mantissa": 1}
FORMATS: Mapping[str, Format] = {
    "Q8_0": Format(32, (_number("scale", 0, 16, 32), _number("code", 2, 8, 1)), _q8_0),
    "Q4_1": Format(
        32,
        (_number("scale", 0, 16, 32), _number("minimum", 2, 16, 32), *_halves(4, 32)),
        _q4_1,
    ),
    "Q4_K": Format(
        256,
        (
            _number("scale of scales", 0, 16, 256),
            _number("scale of minima", 2, 16, 256),
            _sixes("scales", 4, 0),
            _sixes("minima", 8, 4),
            *_halves(16, 64),
        ),
        _q4_k,
    ),
    "NF4": Format(
        64,
        # the first of two codes is in the high half of its byte
        (
            _number("absmax", 0, 32, 64),
            *_parts(lambda i: 32 + 8 * (i // 2) + 4 * (1 - i % 2), 4, None),
        ),
        _nf4,
    ),
    "FP8 e4m3": _fp8_format(4, 3, 7),
    "FP8 e5m2": _fp8_format(5, 2, 15),
    "MXFP4": Format(32, (_number("scale", 0, 8, 32), *_halves(1, 32, E2M1_CUTS)), _mxfp4),
    "NVFP4": Format(64, (_number("scales", 0, 8, 16), *_halves(4, 16, E2M1_CUTS)), _nvfp4),
}


def format_strips(names: Sequence[str] = tuple(FORMATS)) -> Figure:
    """Draw a block of each format as a strip, as long as its bits per weight, and one code."""
    made, (strips, codes) = figure(
        11, 0.9 + 0.48 * len(names), ncols=2, width_ratios=(3.4, 1), sharey=True
    )
    seen: dict[str, None] = {}
    for line, name in enumerate(names):
        made_of = FORMATS[name]
        x = 0.0
        for each, width in _pieces(made_of):
            strips.add_patch(
                Rectangle((x, line - 0.34), width, 0.68, facecolor=COLOURS[each], linewidth=0)
            )
            seen[each] = None
            x += width
        _ticks(strips, made_of, x, line)
        strips.text(
            x + 0.12,
            line,
            f"{made_of.bits_per_weight:.5g}",
            va="center",
            fontsize=10,
            color=INK,
        )
        _one_code(codes, made_of, line)
        seen.update(dict.fromkeys(each.name for each in made_of.fields if each.per == 1))
    strips.set_yticks(range(len(names)), [_label(each) for each in names], fontsize=9, color=INK)
    strips.set(xlim=(0, 9.6), ylim=(len(names) - 0.45, -0.55), xlabel="bits per weight")
    strips.tick_params(axis="y", length=0)
    codes.set(xlim=(0, 8.2))
    codes.axis("off")
    title(strips, "a block, as long as it costs per weight")
    title(codes, "one code, highest bit first")
    handles = _handles(seen)
    made.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.2,
    )
    return made


def _label(name: str) -> str:
    """Return a format\'s name and the weights of a block, in groups if they share no number."""
    made_of = FORMATS[name]
    shared = max(each.per for each in made_of.fields)
    groups = made_of.num_weights // shared
    times = f"{groups} × " if groups > 1 else ""
    return f"{name}\n{times}{shared:,} weights"


def _handles(names: Iterable[str]) -> list[Patch]:
    """Return a legend's entries: one per colour, with all of the names that have it."""
    shown = set(names)
    by_colour: dict[str, list[str]] = {}
    for name, colour in COLOURS.items():
        if name in shown:
            by_colour.setdefault(colour, []).append(name)
    return [Patch(facecolor=colour, label=", ".join(own)) for colour, own in by_colour.items()]


def _pieces(made_of: Format) -> Iterator[tuple[str, float]]:
    """Yield the fields' names and widths in bits per weight; a code's parts are one piece."""
    for each in made_of.fields:
        if each.per > 1:
            yield each.name, each.bits / each.per
    yield "code", float(sum(each.bits for each in made_of.fields if each.per == 1))


def _ticks(axes: Axes, made_of: Format, end: float, line: int) -> None:
    """Draw where one code ends and the next begins, or one group of 32 in a long block."""
    bits = sum(each.bits for each in made_of.fields if each.per == 1)
    count = made_of.num_weights if made_of.num_weights <= 64 else made_of.num_weights // 32
    if count <= 64:
        marks = [end - bits + bits * each / count for each in range(count)]
        axes.vlines(marks, line - 0.34, line + 0.34, color="white", linewidth=0.7)


def _one_code(axes: Axes, made_of: Format, line: int) -> None:
    x = 0.0
    for each in made_of.fields:
        if each.per > 1:
            continue
        for _ in range(each.bits):
            axes.add_patch(
                Rectangle(
                    (x, line - 0.34),
                    1,
                    0.68,
                    facecolor=COLOURS[each.name],
                    edgecolor="white",
                    linewidth=1.5,
                )
            )
            x += 1


def block_bits(name: str, block: bytes, weight: int = 0) -> Figure:
    """Draw a stored block as bits, coloured by field, and the bits that make one weight framed.

    `block` is one block as stored; of FP8, whose blocks are long, it may be the beginning. Raises
    `ValueError` for a weight that is not in it.
    """
    made_of = FORMATS[name]
    stored = made_of.num_stored(block)
    if not 0 <= weight < stored:
        raise ValueError(f"This block has the weights 0 to {stored - 1}, so there is no {weight}.")
    rows = -(-len(block) // BYTES_IN_A_ROW)
    made, (grid, values) = figure(11, max(2.6, 1.5 + 0.21 * rows), ncols=2, width_ratios=(2.3, 1))
    _cells(grid, made_of, block, stored)
    for field, places in made_of.places(weight).items():
        _frame(grid, places, field)
    read = [made_of.read(block, each)[0] for each in range(stored)]
    values.vlines(range(stored), 0, read, color=SKY, linewidth=1.6 if stored <= 64 else 0.8)
    values.axhline(0, color=QUIET, linewidth=0.8)
    values.plot(weight, read[weight], "o", color=ORANGE, markersize=7)
    values.set(xlabel="weight of the block", ylabel="value")
    value, text = made_of.read(block, weight)
    size = sum(each.bits / each.per for each in made_of.fields)
    title(grid, f"{name}, {size:.5g} bits per weight.  w[{weight}] = {text} = {value:.6f}")
    handles = _handles(each.name for each in made_of.fields)
    grid.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / rows if rows < 8 else -0.04),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return made


def _column(bit: int) -> tuple[int, int]:
    """Return the row and the column of a bit: eight bytes per row, each with its highest first."""
    byte, low = divmod(bit, 8)
    row, at = divmod(byte, BYTES_IN_A_ROW)
    return row, 8 * at + 7 - low


def _cells(axes: Axes, made_of: Format, block: bytes, stored: int) -> None:
    bits = _bits(block)
    rows = -(-len(block) // BYTES_IN_A_ROW)
    image = np.ones((rows, 8 * BYTES_IN_A_ROW, 3))
    for field in made_of.fields:
        dark = np.array(to_rgb(COLOURS[field.name]))
        for index in range(-(-stored // field.per)):
            for bit in field.places(index):
                image[_column(bit)] = dark if bits[bit] else 1 - 0.3 * (1 - dark)
    axes.imshow(image, aspect="auto", interpolation="none")
    if len(bits) <= MOST_WRITTEN:
        places = [(*_column(bit)[::-1], str(digit), INK) for bit, digit in enumerate(bits)]
        draw_labels(axes, places)
    for byte in range(BYTES_IN_A_ROW + 1):
        axes.axvline(8 * byte - 0.5, color="white", linewidth=2)
    axes.hlines(np.arange(rows + 1) - 0.5, -0.5, 8 * BYTES_IN_A_ROW - 0.5, "white", linewidth=1.5)
    axes.set_xticks([8 * byte + 3.5 for byte in range(BYTES_IN_A_ROW)], list("01234567"))
    stride = max(1, rows // 9)
    marks = range(0, rows, stride)
    axes.set_yticks(marks, [f"byte {BYTES_IN_A_ROW * row}" for row in marks])
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _frame(axes: Axes, places: Sequence[int], field: str) -> None:
    """Draw a frame around each run of neighbouring bits."""
    cells = sorted(_column(bit) for bit in places)
    runs: list[list[tuple[int, int]]] = []
    for cell in cells:
        if runs and cell == (runs[-1][-1][0], runs[-1][-1][1] + 1):
            runs[-1].append(cell)
        else:
            runs.append([cell])
    for run in runs:
        row, first = run[0]
        axes.add_patch(
            Rectangle(
                (first - 0.5, row - 0.5),
                len(run),
                1,
                fill=False,
                edgecolor=INK,
                linewidth=2.2,
                zorder=3,
            )
        )

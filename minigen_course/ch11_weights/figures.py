"""Figures of weight files: bytes by field, maps of tensors and memory, costs, bits of numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.checkpoint.gguf import GGUFFile
from minigen_course.ch11_weights.lesson import Opening
from minigen_course.ch11_weights.number_formats import (
    FLOATS,
    FloatFormat,
    StoredNumber,
    encode_float,
    encode_integer,
    float_of_bits,
)
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    QUIET,
    SKY,
    YELLOW,
    arrow,
    figure,
    title,
)

_PARTS = {  # what a tensor's name holds -> the part of the model that it belongs to
    "embd": "embedding",
    "attn_norm": "norms",
    "ffn_norm": "norms",
    "output_norm": "norms",
    "attn": "attention",
    "ffn": "feed-forward",
}
PART_COLOURS = {
    "header": QUIET,
    "embedding": BLUE,
    "attention": ORANGE,
    "feed-forward": GREEN,
    "norms": PINK,
    "other": FAINT,
}
_KIND_COLOURS = (BLUE, AMBER, PINK, GREEN, ORANGE, SKY, YELLOW)
_FIELDS = (SKY, AMBER, PINK, GREEN, YELLOW, ORANGE, BLUE)
_ACROSS = 16  # bytes in a row of a grid


@dataclass(frozen=True)
class Piece:
    """A run of a file's bytes: the header, or one tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def part(self) -> str:
        """The part of the model to which it belongs."""
        if self.kind == "header":
            return "header"
        return next((part for mark, part in _PARTS.items() if mark in self.name), "other")


def pieces_of(file: GGUFFile) -> list[Piece]:
    """Return the header and the tensors of a GGUF file, in file order."""
    header = Piece("(header)", "header", (), 0, file.data_offset)
    tensors = [
        Piece(name, each.kind, each.shape, file.offsets[name], each.num_bytes)
        for name, each in file.tensors.items()
    ]
    return [header, *sorted(tensors, key=lambda each: each.offset)]


def piece_at(pieces: Sequence[Piece], byte: int) -> Piece:
    """Return a byte's piece (padding belongs to the piece before it); `ValueError` outside."""
    if not 0 <= byte < end_of(pieces):
        raise ValueError(f"The file has the bytes 0 to {end_of(pieces) - 1:,}, not {byte:,}.")
    return max((each for each in pieces if each.offset <= byte), key=lambda each: each.offset)


def named(pieces: Sequence[Piece], name: str) -> Piece:
    """Return the piece with a name; raise `ValueError` if there is none."""
    for each in pieces:
        if each.name == name:
            return each
    raise ValueError(f"The file has no tensor {name!r}.")


def file_map(pieces: Sequence[Piece], chosen: Piece, by: str = "part", rows: int = 16) -> Figure:
    """Draw a file in rows of equal length, from its first byte to its last; frame one piece.

    The colours are `by` "part" of the model or `by` stored "kind".
    """
    kinds = list(dict.fromkeys(each.kind for each in pieces if each.kind != "header"))
    colours = {"header": QUIET, **dict(zip(kinds, _KIND_COLOURS, strict=False))}
    if by == "part":
        colours = PART_COLOURS
    group_of = (lambda each: each.part) if by == "part" else (lambda each: each.kind)
    across = -(-end_of(pieces) // rows)
    made, axes = figure(9.5, 4.6)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for each in pieces:
        for row, start, length in cut(each, across):
            bars.setdefault((row, group_of(each)), []).append((start / 1e6, length / 1e6))
    for (row, group), spans in bars.items():
        axes.broken_barh(
            spans, (row - 0.38, 0.76), color=colours[group], edgecolor="white", linewidth=0.4
        )
    for row, start, length in cut(chosen, across):
        frame = (start / 1e6, row - 0.44), max(length, across / 300) / 1e6, 0.88
        axes.add_patch(Rectangle(*frame, fill=False, edgecolor=INK, linewidth=2.5, zorder=5))
    widest = dict.fromkeys(colours, 0)
    for each in pieces:
        widest[group_of(each)] = max(widest[group_of(each)], each.num_bytes)
    labels = {
        group: group if size > across / 1000 else f"{group} (too thin to see)"
        for group, size in widest.items()
        if size
    }
    axes.legend(
        handles=[Patch(color=colours[group], label=label) for group, label in labels.items()],
        ncols=len(labels),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
        labelcolor=INK,
    )
    axes.set(xlim=(0, across / 1e6), ylim=(rows - 0.5, -0.5), xlabel="megabytes into the row")
    axes.set_yticks(range(rows), [f"{row * across / 1e6:.0f} MB" for row in range(rows)])
    title(axes, described(chosen))
    return made


def described(piece: Piece) -> str:
    """Return a piece's name, shape, kind and place, in two lines."""
    place = f"bytes {piece.offset:,} to {piece.offset + piece.num_bytes - 1:,}"
    if not piece.shape:
        return f"{piece.name}: settings, vocabulary and the list of tensors\n{place}"
    shape = " × ".join(f"{size:,}" for size in piece.shape)
    bits = 8 * piece.num_bytes / math.prod(piece.shape)
    return (
        f"{piece.name}: {shape} numbers as {piece.kind}\n"
        f"{place}: {piece.num_bytes:,} bytes, {bits:g} bits per number"
    )


def end_of(pieces: Sequence[Piece]) -> int:
    """Return the number of bytes of the file."""
    return max(each.offset + each.num_bytes for each in pieces)


def cut(piece: Piece, across: int) -> list[tuple[int, int, int]]:
    """Cut a piece into rows of `across` bytes, as (row, start in the row, length)."""
    cut, start, left = [], piece.offset, piece.num_bytes
    while left > 0:
        row, place = divmod(start, across)
        length = min(left, across - place)
        cut.append((row, place, length))
        start, left = start + length, left - length
    return cut


def byte_grid(
    data: bytes, fields: Sequence[tuple[str, int]], heading: str, letters: bool = False
) -> Figure:
    """Draw bytes in rows of 16, coloured by field; `fields` are (label, bytes), in order.

    With `letters`, visible ASCII characters are drawn, too. Raises `ValueError` if there are fewer
    bytes than the fields take.
    """
    total = sum(length for _, length in fields)
    if total > len(data):
        raise ValueError(f"The fields take {total} bytes, but there are {len(data)}.")
    rows = -(-total // _ACROSS)
    made, axes = figure(9.5, 0.9 + 0.36 * max(rows, 0.62 * len(fields)))
    owners = [number for number, (_, length) in enumerate(fields) for _ in range(length)]
    for place, (byte, owner) in enumerate(zip(data, owners, strict=False)):
        row, column = divmod(place, _ACROSS)
        cell = Rectangle((column, row), 1, 1, edgecolor="white", linewidth=1.5)
        cell.set_facecolor((*_rgb(_FIELDS[owner % len(_FIELDS)]), 0.45))
        axes.add_patch(cell)
        middle: dict[str, Any] = {"ha": "center", "va": "center", "color": INK}
        seen = letters and 32 < byte < 127
        height = row + (0.34 if seen else 0.5)
        axes.text(column + 0.5, height, f"{byte:02x}", family="monospace", size=9, **middle)
        if seen:
            letter = chr(byte).replace("$", r"\$")
            axes.text(column + 0.5, row + 0.74, letter, size=8.5, **middle)
    axes.set(xlim=(0, _ACROSS), ylim=(max(rows, 1), 0))
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(rows)], [f"{row * 16}" for row in range(rows)])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    handles = [
        Patch(facecolor=(*_rgb(_FIELDS[number % len(_FIELDS)]), 0.45), label=label)
        for number, (label, _) in enumerate(fields)
    ]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    title(axes, heading)
    return made


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def opening_costs(rows: Mapping[str, Opening], num_bytes: int) -> Figure:
    """Draw what opening a file of `num_bytes` and using each of its pages took, by way and state.

    The label of a row has the rate at which the file came, in GB/s. The page cache holds the whole
    file after each of them, whether a process has mapped it or not.
    """
    made, (left, right) = figure(9.5, 1.3 + 0.5 * len(rows), ncols=2, sharey=True)
    places, found = range(len(rows)), list(rows.values())
    opened = [1e3 * each.open_seconds for each in found]
    used = [1e3 * each.use_seconds for each in found]
    _bars(left, places, {BLUE: opened, ORANGE: used})
    private = [min(each.private_mb, each.resident_mb) for each in found]
    mapped = [max(0, each.resident_mb - each.private_mb) for each in found]
    unmapped = [max(0, num_bytes / 1e6 - each) for each in mapped]
    _bars(right, places, {PINK: private, SKY: mapped, FAINT: unmapped})
    labels = [f"{name}\n{num_bytes / each.seconds / 1e9:.2g} GB/s" for name, each in rows.items()]
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.set_xlabel("milliseconds")
    right.set_xlabel("megabytes of physical memory")
    colours = {
        "open": BLUE,
        "first use of each page": ORANGE,
        "the process's own copy": PINK,
        "page cache, mapped": SKY,
        "page cache, not mapped": FAINT,
    }
    made.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        ncols=len(colours),
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    title(left, "Time: mapping opens at once, first use pays")
    title(right, "Memory: reading keeps the file twice")
    return made


def _bars(axes: Axes, places: Sequence[int], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw lengths behind one another in each place; `parts` holds them by colour."""
    begin = [0.0] * len(places)
    for colour, lengths in parts.items():
        axes.barh(places, lengths, left=begin, color=colour, height=0.6)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]


MEMORY_STAGES = (
    "A maps the file: addresses are reserved, no byte is read",
    "A uses page 2: a page fault, the system fetches it from disk",
    "A has used all pages: each is in the page cache once",
    "B maps the file, too, and finds its pages: no disk, no copy",
    "C reads the file and gets a copy of its own; A and B share one",
    "Memory gets short: mapped pages can be dropped, C's copy cannot",
)
_PAGES = 5
_CACHE_Y, _COPY_Y = 4.2, 0.2


def virtual_memory(stage: int) -> Figure:
    """Draw processes, physical memory and disk at one of `MEMORY_STAGES`, counted from 1.

    Raises `ValueError` for any other stage.
    """
    if not 1 <= stage <= len(MEMORY_STAGES):
        raise ValueError(f"The stages are 1 to {len(MEMORY_STAGES)}: there is no {stage}.")
    now = stage - 1
    cached, tables = _memory_at(now)
    made, axes = figure(10, 4.8)
    axes.set(xlim=(-0.2, 16.2), ylim=(-0.1, 8.4))
    axes.axis("off")
    title(axes, f"{stage}. {MEMORY_STAGES[now]}")
    heads = {1.85: "virtual addresses\nof each process", 8.0: "physical memory", 14.4: "disk"}
    for x, text in heads.items():
        axes.text(x, 7.9, text, ha="center", va="center", color=QUIET, fontsize=10)
    for process, (y, pages) in tables.items():
        _process(axes, process, y, pages)
    axes.text(10.7, _CACHE_Y + 1.1, "page cache,\nthe system's", va="bottom", color=QUIET)
    _row_of_pages(axes, 5.5, _CACHE_Y, cached, GREEN)
    if "C" in tables:
        axes.text(10.7, _COPY_Y + 0.5, "a copy, memory of C alone", va="center", color=QUIET)
        _row_of_pages(axes, 5.5, _COPY_Y, set(range(_PAGES)), PINK)
        axes.plot([3.15, 5.45], [_COPY_Y + 0.5] * 2, color=PINK, linewidth=1.1, zorder=0)
        _arrow(axes, (9.6, _CACHE_Y - 0.1), (9.6, _COPY_Y + 1.1), PINK, "copy")
    axes.text(14.4, _CACHE_Y + 1.1, "the file", ha="center", va="bottom", color=QUIET)
    _row_of_pages(axes, 13.15, _CACHE_Y, set(range(_PAGES)), FAINT, width=0.5)
    fetched = {1: "page 2", 2: "the rest", 5: "when used again"}.get(now)
    if fetched:
        _arrow(axes, (13.0, _CACHE_Y + 0.5), (10.7, _CACHE_Y + 0.5), INK, fetched)
    return made


def _memory_at(stage: int) -> tuple[set[int], dict[str, tuple[float, set[int]]]]:
    """Return the pages in the cache, and of each process its height and the pages it can reach."""
    everything = set(range(_PAGES))
    cached = (set(), {2}, everything, everything, everything, {3, 4})[stage]
    tables = {"A": (6.2, cached)}
    if stage >= 3:
        tables["B"] = (2.2, {1, 2, 3} & cached)
    if stage >= 4:
        tables["C"] = (_COPY_Y, everything)
    return cached, tables


def _process(axes: Axes, name: str, y: float, reached: set[int]) -> None:
    """Draw a process's pages, and lines to the cache from those that its page table holds."""
    axes.text(-0.1, y + 0.5, name, ha="left", va="center", fontsize=12, weight="bold", color=INK)
    _row_of_pages(axes, 0.6, y, reached, PINK if name == "C" else BLUE, width=0.5)
    if name == "C":
        return
    is_above = y > _CACHE_Y
    from_y, to_y = (y, _CACHE_Y + 1) if is_above else (y + 1, _CACHE_Y)
    for page in sorted(reached):
        ends = [0.85 + 0.5 * page, 6.0 + page], [from_y, to_y]
        axes.plot(*ends, color=BLUE, linewidth=1.1, alpha=0.7, zorder=0)
    place = y + 0.5 if is_above else y + 0.3
    axes.text(3.4, place, f"page table of {name}", va="center", color=BLUE, fontsize=9)


def _row_of_pages(
    axes: Axes, x: float, y: float, present: set[int], colour: str, width: float = 1.0
) -> None:
    """Draw pages side by side: filled where they are present, dashed where they are not."""
    for page in range(_PAGES):
        is_here = page in present
        axes.add_patch(
            Rectangle(
                (x + width * page + 0.03, y),
                width - 0.06,
                1,
                facecolor=(*_rgb(colour), 0.55) if is_here else "white",
                edgecolor=QUIET,
                linewidth=0.8,
                linestyle="-" if is_here else ":",
                zorder=2,
            )
        )
        axes.text(
            x + width * (page + 0.5),
            y + 0.5,
            str(page),
            ha="center",
            va="center",
            fontsize=9,
            color=INK if is_here else QUIET,
            zorder=3,
        )


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, text: str
) -> None:
    arrow(axes, start, end, color=colour, linewidth=1.6)
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    is_flat = start[1] == end[1]
    axes.text(
        middle[0] + (0 if is_flat else 0.2),
        middle[1] + (0.2 if is_flat else 0),
        text,
        ha="center" if is_flat else "left",
        va="bottom" if is_flat else "center",
        fontsize=9,
        color=colour,
    )


_BIT_COLOURS = {"sign": PINK, "exponent": SKY, "mantissa": YELLOW, "integer": GREEN}
_MOST_BITS = 32


def number_bits(number: str, largest: str) -> Figure:
    """Draw how seven formats store a number: each bit, the value that is read back, the error.

    `largest` is the largest number that shares a scale with it; only the integer formats need it.
    Raises `ValueError` for texts that are no numbers.
    """
    value, top = _parsed(number), abs(_parsed(largest))
    stored = {form.name: _read_back(encode_float(value, form), form) for form in FLOATS}
    stored["INT8, shared scale"] = encode_integer(value, max(top, abs(value)), 8)
    stored["INT4, shared scale"] = encode_integer(value, max(top, abs(value)), 4)
    made, axes = figure(10, 3.9)
    for row, (name, each) in enumerate(stored.items()):
        axes.text(-0.6, row + 0.5, name, ha="right", va="center", fontsize=10, color=INK)
        bits = [(field, bit) for field, text in each.fields for bit in text]
        for column, (field, bit) in enumerate(bits):
            colour = (*_rgb(_BIT_COLOURS[field]), 0.6)
            axes.add_patch(
                Rectangle((column, row + 0.1), 1, 0.8, facecolor=colour, edgecolor="white")
            )
            axes.text(column + 0.5, row + 0.5, bit, ha="center", va="center", fontsize=9, color=INK)
        said = f"{each.value:.9g}   {_error_of(each.value, value)}"
        place = len(bits) if len(bits) < _MOST_BITS else _MOST_BITS
        axes.text(place + 0.6, row + 0.5, said, ha="left", va="center", fontsize=10, color=INK)
    axes.set(xlim=(-9.5, _MOST_BITS + 13), ylim=(len(stored), -0.1))
    axes.axis("off")
    handles = [Patch(color=colour, alpha=0.6, label=n) for n, colour in _BIT_COLOURS.items()]
    axes.legend(
        handles=handles, ncols=4, loc="lower right", frameon=False, fontsize=9, labelcolor=INK
    )
    found = {name: _error_of(stored[name].value, value) for name in ("BF16", "FP8 E4M3")}
    found["INT4"] = _error_of(stored["INT4, shared scale"].value, value)
    title(axes, f"{value:g}: " + ", ".join(f"{name} {said}" for name, said in found.items()))
    return made


def _read_back(stored: StoredNumber, form: FloatFormat) -> StoredNumber:
    """Return the number with the value that `float_of_bits` reads from its bits."""
    if not form.has_infinity:  # there the largest exponent is one like others
        return stored
    bits = "".join(text for _, text in stored.fields)
    return StoredNumber(stored.fields, float_of_bits(bits, form.exponent_bits))


def _parsed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; type one, such as 0.1.") from None


def _error_of(stored: float, value: float) -> str:
    if stored == value:
        return "exact"
    if math.isinf(stored):
        return "overflow"
    if stored == 0:
        return "underflow to zero"
    error = abs(stored / value - 1)
    return f"{100 * error:.2g} % off"


ROW = "display:flex;height:14px;margin:2px 0"


def hover_map(pieces: Sequence[Piece], rows: int = 24) -> None:
    """Show the file in rows of equal length; a browser shows a piece's description on hovering."""
    html = f'<div style="max-width:60rem">{"".join(_rows(pieces, rows))}</div>'
    text = f"A map of {len(pieces)} pieces, to be hovered over in a browser."
    display({"text/plain": text, "text/html": html}, raw=True)


def _rows(pieces: Sequence[Piece], rows: int) -> list[str]:
    across = -(-end_of(pieces) // rows)
    drawn: list[list[str]] = [[] for _ in range(rows)]
    for piece in pieces:
        for row, _, length in cut(piece, across):
            drawn[row].append(_bar(piece, length / across))
    return [f'<div style="{ROW}">{"".join(bars)}</div>' for bars in drawn]


def _bar(piece: Piece, share: float) -> str:
    style = f"width:{share:.4%};background:{PART_COLOURS[piece.part]};border-right:1px solid #fff"
    return f'<div title="{escape(described(piece))}" style="{style}"></div>'

"""Figures of weight files: bytes by field, a map of the tensors, and the cost of opening."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.checkpoint.gguf import GGUFFile
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
    used = [group for group in colours if any(group == group_of(each) for each in pieces)]
    axes.legend(
        handles=[Patch(color=colours[group], label=group) for group in used],
        ncols=len(used),
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
        f"{place}: {piece.num_bytes:,} bytes, {bits:g} bits a number"
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


def opening_costs(rows: Mapping[str, tuple[float, float, float, float]]) -> Figure:
    """Draw ways to open a file: (seconds to open, to use, megabytes after opening, after use)."""
    made, (left, right) = figure(9.5, 0.9 + 0.55 * len(rows), ncols=2, sharey=True)
    places = range(len(rows))
    opened, used, held, full = zip(*rows.values(), strict=True)
    left.barh(places, [1e3 * each for each in opened], color=BLUE, label="open", height=0.6)
    left.barh(
        places,
        [1e3 * each for each in used],
        left=[1e3 * each for each in opened],
        color=ORANGE,
        label="first use of every page",
        height=0.6,
    )
    right.barh(places, held, color=BLUE, height=0.6)
    more = [after - before for before, after in zip(held, full, strict=True)]
    right.barh(places, more, left=held, color=ORANGE, height=0.6)
    left.set_yticks(places, list(rows))
    left.invert_yaxis()
    left.set_xlabel("milliseconds")
    right.set_xlabel("megabytes resident")
    right.set_xlim(0, 1.08 * max(1.0, *full))
    made.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    title(left, "Time")
    title(right, "Memory")
    return made


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

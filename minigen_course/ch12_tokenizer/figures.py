"""Figures of tokens: coloured boxes with ids and bytes, merges step by step, compression."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import FancyBboxPatch

from minigen_course.figures.style import CYCLE, INK, QUIET, figure, printable, title

Pair = tuple[bytes, bytes]

_ACROSS = 96  # characters in a row of boxes
_MOST = 220  # boxes that one figure can show


@dataclass(frozen=True)
class Stage:
    """Pieces of a text after a number of merges; `joined` is the result of the last one."""

    pieces: tuple[bytes, ...]
    joined: bytes | None


def merge_stages(words: Sequence[bytes], ranks: Mapping[Pair, int]) -> list[Stage]:
    """Return a text's pieces before any merge and after each one, lowest rank first.

    Pairs are joined within a word only, all equal pairs at once.
    """
    parts = [[bytes([byte]) for byte in word] for word in words]
    stages = [Stage(_flat(parts), None)]
    while True:
        pairs = {pair for each in parts for pair in pairwise(each)}
        known = [pair for pair in pairs if pair in ranks]
        if not known:
            return stages
        best = min(known, key=lambda pair: ranks[pair])
        parts = [_joined(each, best) for each in parts]
        stages.append(Stage(_flat(parts), b"".join(best)))


def _flat(parts: Sequence[Sequence[bytes]]) -> tuple[bytes, ...]:
    return tuple(piece for each in parts for piece in each)


def _joined(parts: list[bytes], pair: Pair) -> list[bytes]:
    made, place = [], 0
    while place < len(parts):
        size = 2 if tuple(parts[place : place + 2]) == pair else 1
        made.append(b"".join(parts[place : place + size]))
        place += size
    return made


def label(piece: bytes) -> str:
    """Return a token as text; in hexadecimal if it is no whole text or has no glyph here."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return _hex(piece)
    (seen,) = printable([text])
    if all(each in "\n\t" or each.isprintable() for each in text) and all(map(_has_glyph, seen)):
        return seen
    return " ".join(f"U+{ord(letter):04X}" for letter in text)


def _hex(piece: bytes) -> str:
    return piece.hex(" ").upper()


@cache
def _has_glyph(letter: str) -> bool:
    return get_font(findfont("DejaVu Sans Mono")).get_char_index(ord(letter)) != 0


def strip(
    pieces: Sequence[bytes],
    ids: Sequence[int] = (),
    heading: str = "",
    special: Collection[int] = (),
    show_bytes: bool = False,
) -> Figure:
    """Draw tokens as boxes in order, wrapped into rows, with ids and bytes beneath.

    Ids in `special` are dark. Raises `ValueError` for no token, or for more than can be read.
    """
    if not pieces:
        raise ValueError("There is no token to show; write a text.")
    if len(pieces) > _MOST:
        raise ValueError(f"{len(pieces)} tokens are more than can be read; give at most {_MOST}.")
    notes = [[str(each)] for each in ids] or [[] for _ in pieces]
    if show_bytes:
        notes = [[*note, _hex(piece)] for note, piece in zip(notes, pieces, strict=True)]
    labels = [label(piece) for piece in pieces]
    widths = [
        max(len(text), *(0.78 * len(each) for each in note), 1) + 1
        for text, note in zip(labels, notes, strict=True)
    ]
    places, rows = _places(widths)
    lines = 1 + len(notes[0])
    made, axes = _canvas(rows, 0.24 + 0.17 * lines, heading)
    for number, (row, left) in enumerate(places):
        dark = bool(ids) and ids[number] in special
        _box(axes, left, row, widths[number], 1 / (0.45 + 0.55 * lines), number, dark)
        height = 1 / (0.45 + 0.55 * lines)
        middle = left + widths[number] / 2
        colour = "white" if dark else INK
        _write(axes, middle, row + 0.5 * height, labels[number], colour, 9)
        for line, note in enumerate(notes[number]):
            gap = (1 - height) / (len(notes[number]) + 0.4)
            _write(axes, middle, row + height + (line + 0.5) * gap, note, QUIET, 7)
    return made


def _places(widths: Sequence[float]) -> tuple[list[tuple[int, float]], int]:
    """Return (row, left end) of boxes of these widths, and the number of rows."""
    places, row, left = [], 0, 0.0
    for width in widths:
        if left and left + width > _ACROSS:
            row, left = row + 1, 0.0
        places.append((row, left))
        left += width
    return places, row + 1


def _canvas(rows: float, row_height: float, heading: str) -> tuple[Figure, Axes]:
    made, axes = figure(9.5, 0.45 + rows * row_height)
    axes.set(xlim=(-0.3, _ACROSS + 0.3), ylim=(rows, -0.1))
    axes.axis("off")
    title(axes, heading)
    return made, axes


def _box(
    axes: Axes, left: float, top: float, width: float, height: float, number: int, dark: bool
) -> None:
    shape = FancyBboxPatch(
        (left + 0.1, top + 0.04),
        width - 0.2,
        height - 0.08,
        boxstyle="round,pad=0,rounding_size=0.12",
        mutation_aspect=0.2,
        linewidth=0,
    )
    shape.set_facecolor(INK if dark else CYCLE[number % len(CYCLE)])
    shape.set_alpha(1 if dark else 0.38)
    axes.add_patch(shape)


def _write(axes: Axes, x: float, y: float, text: str, colour: str, size: float) -> None:
    style: dict[str, Any] = {"ha": "center", "va": "center", "family": "monospace"}
    axes.text(x, y, text, color=colour, size=size, **style)


def merging(stages: Sequence[Stage], step: int, shown: int = 12) -> Figure:
    """Draw the pieces of a short text after each merge up to `step`, at most `shown` rows.

    The result of a row's merge is dark. Raises `ValueError` for a text too long for one row.
    """
    widths = [len(label(piece)) + 0.4 for piece in stages[0].pieces]
    if not widths or sum(widths) > _ACROSS:
        raise ValueError("Write one short line: it is drawn in one row, a box for every byte.")
    widths = [width * min(3.2, _ACROSS / sum(widths)) for width in widths]
    last = min(step, len(stages) - 1)
    first = max(0, last - shown + 1)
    said = f"after {last} of {len(stages) - 1} merges: {len(stages[last].pieces)} pieces"
    if last:
        said += f"; the last made {label(stages[last].joined or b'')!r}"
    made, axes = _canvas(shown, 0.27, said)
    for row, stage in enumerate(stages[first : last + 1]):
        axes.text(-0.6, row + 0.5, str(first + row), ha="right", va="center", color=QUIET, size=8)
        place, left = 0, 0.0
        for piece in stage.pieces:
            width = sum(widths[place : place + len(piece)])
            fresh = piece == stage.joined
            _box(axes, left, row, width, 1, place, dark=fresh)
            _write(axes, left + width / 2, row + 0.5, label(piece), "white" if fresh else INK, 9)
            place, left = place + len(piece), left + width
    return made


def compression(curves: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw the bytes per token over the number of merges, one line per text."""
    made, axes = figure(8, 3)
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), label=name, linewidth=2, marker="o")
    axes.set(xlabel="merges learned", ylabel="bytes a token", ylim=(0, None), xlim=(0, None))
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "Each merge makes texts shorter, the first ones most")
    return made

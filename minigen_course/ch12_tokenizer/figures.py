"""Figures of tokens: the way of a text, training by hand, merges, ids and bytes, vocabularies."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import FancyBboxPatch

from minigen_course.ch12_tokenizer.reference import Pair, merge_pair
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    INK,
    ORANGE,
    QUIET,
    SKY,
    figure,
    printable,
    title,
)

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
        parts = [merge_pair(each, best) for each in parts]
        stages.append(Stage(_flat(parts), b"".join(best)))


def _flat(parts: Sequence[Sequence[bytes]]) -> tuple[bytes, ...]:
    return tuple(piece for each in parts for piece in each)


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
    labels = [label(piece) for piece in pieces]
    if show_bytes:  # unless they are the label itself
        notes = [
            [*note, "" if _hex(piece) == text else _hex(piece)]
            for note, piece, text in zip(notes, pieces, labels, strict=True)
        ]
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
    axes: Axes,
    left: float,
    top: float,
    width: float,
    height: float,
    number: int | None,
    dark: bool,
    gap: float = 0.1,
) -> None:
    shape = FancyBboxPatch(
        (left + gap, top + 0.04),
        width - 2 * gap,
        height - 0.08,
        boxstyle="round,pad=0,rounding_size=0.12",
        mutation_aspect=0.2,
        linewidth=0,
    )
    colour = FAINT if number is None else CYCLE[number % len(CYCLE)]
    shape.set_facecolor(INK if dark else colour)
    shape.set_alpha(1 if dark else 0.38)
    axes.add_patch(shape)


def _write(axes: Axes, x: float, y: float, text: str, colour: str, size: float) -> None:
    style: dict[str, Any] = {"ha": "center", "va": "center", "family": "monospace"}
    axes.text(x, y, text, color=colour, size=size, **style)


def merging(stages: Sequence[Stage], step: int, shown: int = 18) -> Figure:
    """Draw the pieces of a short text after each merge up to `step`, at most `shown` rows.

    A box has the colour of the token that it ends in, and the result of a row's merge is dark.
    Raises `ValueError` for a text too long for one row.
    """
    widths = [len(label(piece)) + 0.4 for piece in stages[0].pieces]
    if not widths or sum(widths) > _ACROSS:
        raise ValueError("Write one short line: it is drawn in one row, a box for every byte.")
    widths = [width * min(3.2, _ACROSS / sum(widths)) for width in widths]
    token_of = [number for number, token in enumerate(stages[-1].pieces) for _ in token]
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
            _box(axes, left, row, width, 1, token_of[place], dark=fresh)
            _write(axes, left + width / 2, row + 0.5, label(piece), "white" if fresh else INK, 9)
            place, left = place + len(piece), left + width
    return made


@dataclass(frozen=True)
class Row:
    """A stage on a text's way to ids: what it is called, and its boxes with their bytes."""

    name: str
    boxes: tuple[tuple[str, int], ...]  # a label, and how many of the text's bytes it covers


_NAMES_WIDTH = 22


def way(rows: Sequence[Row]) -> Figure:
    """Draw the stages of a text's way to ids below each other, aligned by the text's bytes.

    A box has the colour of the last row's box in which it lies, and is grey if it covers several.
    """
    num_bytes = sum(size for _, size in rows[0].boxes)
    token_of = [number for number, (_, size) in enumerate(rows[-1].boxes) for _ in range(size)]
    unit = _ACROSS / num_bytes
    made, axes = figure(9.5, 0.2 + 0.42 * len(rows))
    axes.set(xlim=(-_NAMES_WIDTH, _ACROSS + 0.3), ylim=(len(rows), -0.1))
    axes.axis("off")
    for row, stage in enumerate(rows):
        axes.text(-0.8, row + 0.5, stage.name, ha="right", va="center", color=INK, size=9)
        place = 0
        for text, size in stage.boxes:
            covered = set(token_of[place : place + size])
            number = covered.pop() if len(covered) == 1 else None
            _box(axes, place * unit, row + 0.1, size * unit, 0.8, number, dark=False)
            (shown,) = printable([text])
            fits = min(9.0, 6.8 * unit * size / 3.1 / max(1, len(shown)) * 3)
            _write(axes, (place + size / 2) * unit, row + 0.5, shown, INK, fits)
            place += size
    return made


@dataclass(frozen=True)
class Round:
    """Words in training: their parts and times, the pairs' counts, and the pair to be joined."""

    words: tuple[tuple[tuple[bytes, ...], int], ...]
    counts: tuple[tuple[Pair, int], ...]
    chosen: Pair | None


def training_rounds(counts: Mapping[bytes, int], merges: Sequence[Pair]) -> list[Round]:
    """Return the words and the counts of all pairs before each merge, and after the last one."""
    words = [(tuple(bytes([byte]) for byte in word), times) for word, times in counts.items()]
    rounds = []
    for chosen in [*merges, None]:
        found: dict[Pair, int] = {}
        for parts, times in words:
            for pair in pairwise(parts):
                found[pair] = found.get(pair, 0) + times
        ordered = sorted(found.items(), key=lambda each: (each[1], each[0]), reverse=True)
        rounds.append(Round(tuple(words), tuple(ordered), chosen))
        if chosen is not None:
            words = [(tuple(merge_pair(parts, chosen)), times) for parts, times in words]
    return rounds


def _decided(number: int, each: Round) -> str:
    """Return what the counts of a round decide."""
    if each.chosen is None:
        return "counts now"
    most = [count for _, count in each.counts]
    joined = " + ".join(label(part) for part in each.chosen)
    return f"merge {number}: {joined}" + (" (a tie)" if most.count(most[0]) > 1 else "")


def training(rounds: Sequence[Round]) -> Figure:
    """Draw each round: its words in parts above, the counts of their pairs below."""
    made, grid = figure(2.5 * len(rounds), 4.4, nrows=2, ncols=len(rounds), height_ratios=[1, 1.15])
    most = max(count for each in rounds for _, count in each.counts)
    rows = max(len(each.counts) for each in rounds)
    width = max(len(b"".join(parts)) for parts, _ in rounds[0].words)
    for number, (each, top, bottom) in enumerate(zip(rounds, *grid, strict=True)):
        top.set(xlim=(-1.2, width + 0.1), ylim=(len(each.words), -0.1))
        top.axis("off")
        title(top, "single bytes" if number == 0 else f"after merge {number}")
        for row, (parts, times) in enumerate(each.words):
            top.text(-0.15, row + 0.5, f"{times} ×", ha="right", va="center", color=QUIET, size=9)
            left = 0
            for part in parts:
                colour = 0 if len(part) == 1 else 1
                _box(top, left, row + 0.1, len(part), 0.8, colour, dark=False, gap=0.03)
                _write(top, left + len(part) / 2, row + 0.5, label(part), INK, 10)
                left += len(part)
        colours = [ORANGE if pair == each.chosen else SKY for pair, _ in each.counts]
        places = range(len(each.counts))
        bottom.barh(places, [count for _, count in each.counts], color=colours, height=0.7)
        for place, (_, count) in enumerate(each.counts):
            bottom.text(count + 0.15, place, str(count), va="center", color=INK, size=9)
        names = [" + ".join(label(part) for part in pair) for pair, _ in each.counts]
        bottom.set_yticks(places, names, family="monospace")
        bottom.set(ylim=(rows - 0.4, -0.6), xlim=(0, most * 1.2), xticks=[], xlabel="")
        bottom.spines["bottom"].set_visible(False)
        title(bottom, _decided(number + 1, each))
    return made


def vocabulary(
    curves: Mapping[str, Mapping[int, float]], hidden: int, other_parameters: int
) -> Figure:
    """Draw the tokens that a text takes, and the embedding's parameters, by size of vocabulary.

    `curves` maps the name of a text and of its merges to tokens per 1,000 bytes, by number of
    tokens in the vocabulary.
    """
    made, (left, right) = figure(9.6, 3.6, ncols=2)
    for order, ((name, curve), marker) in enumerate(zip(curves.items(), "osD^", strict=False)):
        style = {"linewidth": 2, "marker": marker, "ms": 8 - 2 * order, "zorder": 3 + order}
        left.plot(list(curve), list(curve.values()), label=name, **style)
    left.set(xscale="log", ylim=(0, None))
    ticks = [256, 1000, 4000, 16000, 49000]
    left.set_xticks(ticks, [f"{each:,}" for each in ticks])
    left.minorticks_off()
    left.set(xlabel="tokens in the vocabulary", ylabel="tokens per 1,000 bytes of text")
    left.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper right")
    title(left, "Texts get shorter, ever more slowly ...")
    largest = max(size for curve in curves.values() for size in curve)
    sizes = np.linspace(0, 2.7 * largest, 50)
    right.axhline(other_parameters / 1e6, color=QUIET, linewidth=1.5, linestyle="--")
    right.text(2, other_parameters / 1e6 * 1.03, "all other parameters", color=QUIET, size=9)
    right.plot(sizes / 1e3, sizes * hidden / 1e6, color=ORANGE, linewidth=2)
    right.plot([largest / 1e3], [largest * hidden / 1e6], "o", color=ORANGE)
    right.annotate(
        f"this model: {largest * hidden / 1e6:.1f} million",
        (largest / 1e3, largest * hidden / 1e6),
        xytext=(8, -12),
        textcoords="offset points",
        color=INK,
        size=9,
    )
    right.set(xlabel="tokens in the vocabulary, in thousands", ylabel="parameters, in millions")
    right.set(xlim=(0, None), ylim=(0, other_parameters / 1e6 * 1.2))
    title(right, "... and the embedding grows in proportion")
    return made


def languages(num_tokens: Mapping[str, int], num_characters: Mapping[str, int]) -> Figure:
    """Draw the characters of one sentence in several languages, and beside them its tokens."""
    made, (left, right) = figure(9.2, 0.9 + 0.34 * len(num_tokens), ncols=2, sharey=True)
    places = range(len(num_tokens))
    least = next(iter(num_tokens.values()))
    said = [f"{tokens}, {tokens / least:.1f} times" for tokens in num_tokens.values()]
    shown = [str(each) for each in num_characters.values()]
    for axes, numbers, labels, colour in (
        (left, num_characters, shown, QUIET),
        (right, num_tokens, said, BLUE),
    ):
        axes.barh(places, list(numbers.values()), color=colour, height=0.62)
        for place, (number, text) in enumerate(zip(numbers.values(), labels, strict=True)):
            axes.text(number + 0.6, place, text, va="center", color=INK, size=9)
        axes.set(xlim=(0, 1.35 * max(numbers.values())))
    left.set_yticks(places, list(num_tokens))
    left.invert_yaxis()
    left.set(xlabel="characters of the sentence")
    right.set(xlabel="tokens of the sentence")
    fewest, largest = min(num_tokens.values()), max(num_tokens.values())
    title(left, "The same sentence ...")
    title(right, f"... takes from {fewest} to {largest} tokens")
    return made

"""The order of packed weights, what one register load reads of them, and quantisation of weights.

The numbers of rows, words and lanes are those of `minigen.kernels.cpu.packed_weights`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.ch34_cpu_kernels.lesson import bits_a_weight, relative_error, round_weights
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    SKY,
    figure,
    title,
)

LANES = 16
WORDS = 8  # per group: 32 columns, four bytes per word


def row_of_lanes(load: int, by_panels: bool) -> list[tuple[int, int]]:
    """Return the (row, word) of each lane after load number `load` of a group of sixteen rows."""
    if by_panels:
        return [(lane, load) for lane in range(LANES)]
    return [divmod(load * LANES + lane, WORDS) for lane in range(LANES)]


def loads(load: int, row: int) -> Figure:
    """Draw sixteen rows of one group, and what a register load reads: by rows, and in a panel.

    The words of one row are orange. Raises `ValueError` for a load that is not 0 to 7, or a row
    that is not 0 to 15.
    """
    if not 0 <= load < WORDS or not 0 <= row < LANES:
        raise ValueError(
            f"Load {load} or row {row} does not exist: loads are 0 to {WORDS - 1}, and rows 0 to "
            f"{LANES - 1}."
        )
    made, axes = figure(11, 5.2, nrows=2, ncols=2, height_ratios=(4.2, 1))
    for column, by_panels in enumerate((False, True)):
        matrix, register = axes[0][column], axes[1][column]
        taken = row_of_lanes(load, by_panels)
        _matrix(matrix, set(taken), row, by_panels)
        _register(register, taken, row)
        rows = len({each for each, _ in taken})
        said = "a row's are to be summed" if rows < LANES else "each keeps to its row"
        title(register, f"the register: {rows} rows in {LANES} lanes; {said}")
    title(axes[0][0], f"By rows: load {load} takes words {load * LANES} to {load * LANES + 15}")
    title(axes[0][1], f"In a panel: load {load} takes word {load} of every row")
    return made


def _matrix(axes: Axes, taken: set[tuple[int, int]], row: int, by_panels: bool) -> None:
    for each in range(LANES):
        for word in range(WORDS):
            place = word * LANES + each if by_panels else each * WORDS + word
            colour = "white"
            if (each, word) in taken:
                colour = ORANGE if each == row else SKY
            axes.add_patch(Rectangle((word, each), 1, 1, facecolor=colour, edgecolor=FAINT))
            ink = "white" if colour == ORANGE else INK
            axes.text(
                word + 0.5, each + 0.54, f"{place}", ha="center", va="center", size=7.5, color=ink
            )
    axes.add_patch(Rectangle((0, row), WORDS, 1, fill=False, edgecolor=ORANGE, linewidth=2))
    axes.set(xlim=(0, WORDS), ylim=(LANES, 0))
    axes.set_xticks(np.arange(WORDS) + 0.5, _counted(WORDS))
    axes.set_yticks(np.arange(LANES) + 0.5, _counted(LANES), fontsize=8)
    axes.set_xlabel("word of the group; numbers are places in memory")
    axes.set_ylabel("row")
    axes.tick_params(length=0)


def _register(axes: Axes, taken: Sequence[tuple[int, int]], row: int) -> None:
    for lane, (each, _) in enumerate(taken):
        colour = ORANGE if each == row else SKY
        axes.add_patch(Rectangle((lane, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
        ink = "white" if each == row else INK
        axes.text(lane + 0.5, 0.5, f"r{each}", ha="center", va="center", size=8, color=ink)
    axes.set(xlim=(0, LANES), ylim=(0, 1))
    axes.set_xticks(np.arange(LANES) + 0.5, _counted(LANES), fontsize=8)
    axes.set_xlabel("lane")
    axes.set_yticks([])
    axes.tick_params(length=0)


def byte_dots(codes: np.ndarray, inputs: Sequence[int], sums: Sequence[int]) -> Figure:
    """Draw one instruction: in each lane, four bytes of a row times the same four inputs, added up.

    `codes` are the lanes' bytes, [lanes, 4]; `sums` is the register afterwards.
    """
    made, axes = figure(11, 3.5)
    height = 0.0
    for name, rows, colour in (
        ("weights,\na row a lane", codes.T.tolist(), SKY),
        ("inputs,\nthe same in all", [[number] * LANES for number in inputs], AMBER),
        ("added to\nthe sums", [list(sums)], GREEN),
    ):
        axes.text(-0.3, height + len(rows) / 2, name, ha="right", va="center", color=INK, size=10)
        for numbers in rows:
            for lane, number in enumerate(numbers):
                axes.add_patch(
                    Rectangle((lane, height), 1, 1, facecolor=colour, edgecolor="white", alpha=0.6)
                )
                axes.text(
                    lane + 0.5,
                    height + 0.53,
                    f"{number}",
                    ha="center",
                    va="center",
                    size=8,
                    color=INK,
                )
            height += 1
        height += 0.5
    axes.set(xlim=(-2.6, LANES), ylim=(height - 0.5, -0.1))
    axes.set_xticks(np.arange(LANES) + 0.5, _counted(LANES))
    axes.set_xlabel("lane")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    title(axes, "One vpdpbusd: 64 products and 64 additions")
    return made


def three_products(head_dim: int = 64) -> Figure:
    """Draw a panel of weights, a block's keys and its values: each is words of sixteen lanes."""
    made, axes = figure(11, 3.4, ncols=3)
    kinds = (
        ("Weights", "an output column", "inputs, four bytes to a word", WORDS, "32 inputs", SKY),
        ("Keys", "a token", "numbers of the head, two to a word", head_dim // 2, "a query", AMBER),
        ("Values", "a number of the head", "tokens, two to a word", LANES // 2, "16 shares", GREEN),
    )
    for panel, (name, lane, word, words, given, colour) in zip(axes, kinds, strict=True):
        for each in range(words):
            panel.add_patch(
                Rectangle((0, each), LANES, 1, facecolor=colour, alpha=0.35, edgecolor="white")
            )
        panel.add_patch(Rectangle((0, 0), LANES, 1, facecolor=colour, edgecolor=INK))
        panel.set(xlim=(-0.1, LANES + 0.1), ylim=(words, 0 - words * 0.02))
        panel.set_xticks([0.5, LANES - 0.5], ["0", f"{LANES - 1}"])
        panel.set_yticks([0.5, words - 0.5], ["0", f"{words - 1}"])
        panel.tick_params(length=0)
        panel.set_xlabel(f"lane: {lane}")
        panel.set_ylabel(word)
        title(panel, f"{name}, times {given}")
    return made


def _counted(number: int) -> list[str]:
    return [str(each) for each in range(number)]


def bars(rates: Mapping[str, float], limit: float, unit: str, text: str) -> Figure:
    """Draw a bar for each rate, and the limit as a line."""
    made, axes = figure(9, 0.9 + 0.42 * len(rates))
    axes.barh(list(rates), list(rates.values()), color=BLUE, height=0.6)
    axes.axvline(limit, color=ORANGE, linewidth=2)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(limit, *rates.values()))
    axes.set_xlabel(f"{unit}; the line is what memory gives")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    title(axes, text)
    return made


def steps_of_scales(numbers: np.ndarray, size: int = 32) -> Figure:
    """Draw the magnitudes of one token's inputs, and the levels below which a byte becomes 0.

    One level is for a single scale for all, the other for a scale for every `size` numbers.
    """
    magnitudes = np.abs(numbers)
    of_all = np.full(len(numbers), magnitudes.max() / 127 / 2)
    of_groups = np.repeat(magnitudes.reshape(-1, size).max(-1) / 127 / 2, size)
    made, axes = figure(11, 3.6)
    places = np.arange(len(numbers))
    axes.plot(places, np.maximum(magnitudes, 1e-9), ".", color=QUIET, markersize=3)
    lost = {}
    for name, halves, colour in (
        ("one scale", of_all, ORANGE),
        (f"a scale for each {size}", of_groups, BLUE),
    ):
        lost[name] = int((magnitudes < halves).sum())
        axes.step(places, halves, where="post", color=colour, linewidth=2, label=name)
    axes.set(yscale="log", xlim=(0, len(numbers)), ylabel="magnitude (log scale)")
    axes.set_ylim(bottom=max(of_groups.min() / 5, 1e-9))
    axes.set_xlabel("number of the input; below a line it becomes 0")
    axes.legend(frameon=False, labelcolor=INK, loc="upper right", ncols=2)
    title(axes, "Become 0: " + ", ".join(f"{n:,} with {name}" for name, n in lost.items()))
    return made


def forms(allowed: Mapping[str, float], measured: Mapping[str, float], base: str) -> Figure:
    """Draw the speed of each weight format relative to `base`: by its bytes, and as measured."""
    made, axes = figure(9, 3)
    places = np.arange(len(allowed))
    for shift, values, colour, label in (
        (-0.2, allowed, SKY, "its bytes allow"),
        (0.2, measured, BLUE, "measured here"),
    ):
        heights = [values[name] / values[base] for name in allowed]
        axes.bar(places + shift, heights, width=0.4, color=colour, label=label)
    axes.axhline(1, color=QUIET, linewidth=1, zorder=0)
    axes.set_xticks(places, list(allowed))
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    axes.set_ylabel(f"times as fast as {base}")
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(axes, "One token a step: what the bytes allow, and what it gets")
    return made


SHOWN = 128  # numbers per row
BITS = range(2, 9)
COMPARED = {8: ":", 32: "--", 128: "-."}  # other group sizes, and their line styles
WHOLE_ROWS = (0, (5, 1, 1, 1, 1, 1))  # the line style of one group per row
LEAST = 0.01  # per cent


def rounding(rows: np.ndarray, row: int, bits: int, size: int) -> Figure:
    """Draw one row's first numbers on the steps of their groups, and the error of all rows.

    `rows` is float32, [rows, width]. On the right is a line over 2 to 8 bits for each group size:
    the bits per number, including scales and minima, and the error; another line is for one group
    per row. Raises `ValueError` for a row that does not exist.
    """
    if not 0 <= row < len(rows):
        raise ValueError(f"There is no row {row}; choose one of the rows 0 to {len(rows) - 1}.")
    made, (left, right) = figure(11, 4.2, ncols=2, width_ratios=(1.5, 1))
    _steps(left, rows[row], bits, size)
    _trade(right, rows, bits, size)
    return made


def _steps(axes: Axes, numbers: np.ndarray, bits: int, size: int) -> None:
    rounded = round_weights(numbers[None], bits, size)
    num_steps = 2**bits
    lines = []
    for group, begin in enumerate(range(0, min(SHOWN, len(numbers)), size)):
        ends = begin - 0.5, min(begin + size, SHOWN, len(numbers)) - 0.5
        heights = rounded.minima[0, group] + rounded.scales[0, group] * np.arange(num_steps)
        lines += [((ends[0], height), (ends[1], height)) for height in heights]
        if begin:
            axes.axvline(begin - 0.5, color=QUIET, linewidth=1, linestyle=":")
    axes.add_collection(LineCollection(lines, color=SKY, linewidth=min(1.2, 24 / num_steps)))
    shown, places = numbers[:SHOWN], np.arange(len(numbers[:SHOWN]))
    nearest = rounded.numbers()[0, :SHOWN]
    axes.vlines(places, shown, nearest, color=ORANGE, linewidth=1.5)
    axes.plot(places, shown, ".", color=INK, markersize=5)
    margin = 0.04 * float(np.ptp(shown)) or 1.0
    axes.set(xlim=(-1, len(shown)), ylim=(shown.min() - margin, shown.max() + margin))
    axes.set_xlabel("number of the row; dotted: groups, orange: how far it is moved")
    axes.set_ylabel("value of the number")
    widest = float(rounded.scales[0, : -(-len(shown) // size)].max())
    title(axes, f"{num_steps} steps for each {size} numbers, the widest {widest:.3g} apart")


def _trade(axes: Axes, rows: np.ndarray, bits: int, size: int) -> None:
    width = rows.shape[1]
    for each, style in COMPARED.items():
        if each != size:
            axes.plot(
                *_line(rows, each), style, color=QUIET, linewidth=1, label=f"groups of {each}"
            )
    axes.plot(
        *_line(rows, width), linestyle=WHOLE_ROWS, color=AMBER, linewidth=1.5, label="whole rows"
    )
    axes.plot(*_line(rows, size), ".-", color=BLUE, label=f"groups of {size}")
    taken, error = bits_a_weight(width, bits, size), 100 * relative_error(rows, bits, size)
    axes.plot(taken, max(error, LEAST), "o", color=ORANGE, markersize=10, zorder=3)
    axes.set(yscale="log", xlim=(2, 12.5), ylim=(0.7 * LEAST, 200))
    axes.set_xlabel("bits per number, with scales and minima")
    axes.set_ylabel("error, % of a typical number (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="upper right", fontsize=9)
    title(axes, f"{taken:.2f} bits per number, error {error:.2g} %")


def _line(rows: np.ndarray, size: int) -> tuple[list[float], list[float]]:
    """Return bits per weight and errors in per cent, at least `LEAST`, for all `BITS`."""
    taken = [bits_a_weight(rows.shape[1], bits, size) for bits in BITS]
    return taken, [max(100 * relative_error(rows, bits, size), LEAST) for bits in BITS]

"""How weights are rounded: a row's numbers, the steps of its groups, and what bits buy."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from minigen.teach.codes import bits_a_weight, relative_error, round_weights
from minigen.viz.style import BLUE, INK, ORANGE, QUIET, SKY, figure, title

SHOWN = 128  # numbers of a row
BITS = range(2, 9)
COMPARED = {8: ":", 32: "--", 128: "-."}  # groups beside the chosen ones, and how they are drawn
LEAST = 0.01  # per cent


def rounding(rows: np.ndarray, row: int, bits: int, size: int) -> Figure:
    """One row's first numbers on the steps of their groups, and the error of all rows.

    `rows` is float32, [rows, width]. On the right is a line of 2 to 8 bits for each size of a
    group: the bits that a weight takes, scales and minima counted, and the error that is left.
    Raises `ValueError` for a row that there is not.
    """
    if not 0 <= row < len(rows):
        raise ValueError(f"There are the rows 0 to {len(rows) - 1}.")
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
    room = 0.04 * float(np.ptp(shown)) or 1.0
    axes.set(xlim=(-1, len(shown)), ylim=(shown.min() - room, shown.max() + room))
    axes.set_xlabel("number of the row; dotted: groups, orange: how far it is moved")
    axes.set_ylabel("weight")
    widest = float(rounded.scales[0, : -(-len(shown) // size)].max())
    title(axes, f"{num_steps} steps for each {size} weights, the widest {widest:.3g} apart")


def _trade(axes: Axes, rows: np.ndarray, bits: int, size: int) -> None:
    width = rows.shape[1]
    for each, style in COMPARED.items():
        if each != size:
            axes.plot(
                *_line(rows, each), style, color=QUIET, linewidth=1, label=f"groups of {each}"
            )
    axes.plot(*_line(rows, size), ".-", color=BLUE, label=f"groups of {size}")
    taken, error = bits_a_weight(width, bits, size), 100 * relative_error(rows, bits, size)
    axes.plot(taken, max(error, LEAST), "o", color=ORANGE, markersize=10, zorder=3)
    axes.set(yscale="log", xlim=(2, 12.5), ylim=(0.7 * LEAST, 200))
    axes.set_xlabel("bits a weight, with scales and minima")
    axes.set_ylabel("error, % of a typical weight (log scale)")
    axes.legend(frameon=False, labelcolor=INK, loc="upper right", fontsize=9)
    title(axes, f"{taken:.2f} bits a weight, error {error:.2g} %")


def _line(rows: np.ndarray, size: int) -> tuple[list[float], list[float]]:
    """Bits a weight, and the errors in per cent, for all `BITS`; none is less than `LEAST`."""
    taken = [bits_a_weight(rows.shape[1], bits, size) for bits in BITS]
    return taken, [max(100 * relative_error(rows, bits, size), LEAST) for bits in BITS]

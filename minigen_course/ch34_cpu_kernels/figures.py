"""Figures of chapter 34: the machine, panels of weights, rounding, and a step's time.

The numbers of rows, words and lanes are those of `minigen.kernels.cpu.packed_weights`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
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
    YELLOW,
    arrow,
    figure,
    title,
)

LANES = 16
WORDS = 8  # per group: 32 columns, four bytes per word
GROUPS = 18  # per row: the chapter's matrix has 576 columns

Word = tuple[int, int, int]  # row, group, word of the group


def words_of_load(load: int, row: int, by_panels: bool) -> list[Word]:
    """Return what each lane holds after one load: by rows of `row`, in a panel of sixteen rows.

    Load `load` of a row takes its words from 16 x `load` on, and load `load` of a panel takes that
    word of the first group.
    """
    if by_panels:
        return [(lane, 0, load) for lane in range(LANES)]
    return [(row, *divmod(load * LANES + lane, WORDS)) for lane in range(LANES)]


def place_of(word: Word, by_panels: bool) -> int:
    """Return the place in memory of a word of the first sixteen rows, counted in words."""
    row, group, at = word
    by_rows = (row * GROUPS + group) * WORDS + at
    return (group * WORDS + at) * LANES + row if by_panels else by_rows


def loads(load: int, row: int) -> Figure:
    """Draw sixteen rows of the matrix, and what a register load reads: by rows, and in a panel.

    The words of one row are orange. Raises `ValueError` for a load that is not 0 to 7, or a row
    that is not 0 to 15.
    """
    if not 0 <= load < WORDS or not 0 <= row < LANES:
        raise ValueError(
            f"Load {load} or row {row} does not exist: loads are 0 to {WORDS - 1}, and rows 0 to "
            f"{LANES - 1}."
        )
    made, axes = figure(11, 5.6, nrows=2, ncols=2, height_ratios=(4.2, 1), width_ratios=(1.5, 1))
    for column, by_panels in enumerate((False, True)):
        taken = words_of_load(load, row, by_panels)
        groups = sorted({group for _, group, _ in taken})
        _matrix(axes[0][column], groups, taken, row, by_panels)
        _register(axes[1][column], taken, row, by_panels)
    first = load * LANES // WORDS
    title(axes[0][0], f"By rows: load {load} of row {row} takes its groups {first} and {first + 1}")
    title(axes[0][1], f"In a panel: word {load} of all rows")
    title(axes[1][0], "the register: 1 row, 2 groups, so 2 scales in its lanes")
    title(axes[1][1], "the register: 16 rows, 1 group")
    return made


def _matrix(
    axes: Axes, groups: Sequence[int], taken: Sequence[Word], row: int, by_panels: bool
) -> None:
    columns = [(group, word) for group in groups for word in range(WORDS)]
    fields = []
    for each in range(LANES):
        for x, (group, word) in enumerate(columns):
            colour = "white"
            if (each, group, word) in taken:
                colour = ORANGE if each == row else SKY
            fields.append(Rectangle((x, each), 1, 1, facecolor=colour, edgecolor=FAINT))
            ink = "white" if colour == ORANGE else INK
            place = place_of((each, group, word), by_panels)
            _number_in_field(axes, x + 0.5, each + 0.54, place, ink, size=7)
    axes.add_collection(PatchCollection(fields, match_original=True))
    width = len(columns)
    axes.add_patch(Rectangle((0, row), width, 1, fill=False, edgecolor=ORANGE, linewidth=2))
    for border in range(WORDS, width, WORDS):
        axes.axvline(border, color=INK, linewidth=1.5)
    axes.set(xlim=(0, width), ylim=(LANES, 0))
    axes.set_xticks(np.arange(width) + 0.5, [str(word) for _, word in columns])
    axes.set_yticks(np.arange(LANES) + 0.5, _counted(LANES), fontsize=8)
    named = "group" if len(groups) == 1 else "groups"
    axes.set_xlabel(
        f"word of {named} {' and '.join(map(str, groups))}; numbers are places in memory"
    )
    axes.set_ylabel("row")
    axes.tick_params(length=0)


def _register(axes: Axes, taken: Sequence[Word], row: int, by_panels: bool) -> None:
    for lane, (each, group, _) in enumerate(taken):
        colour = ORANGE if each == row else SKY
        axes.add_patch(Rectangle((lane, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
        ink = "white" if each == row else INK
        held = f"r{each}" if by_panels else f"r{each}\ng{group}"
        axes.text(lane + 0.5, 0.5, held, ha="center", va="center", size=8, color=ink)
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
                _number_in_field(axes, lane + 0.5, height + 0.53, number, INK, size=8)
            height += 1
        height += 0.5
    axes.set(xlim=(-2.6, LANES), ylim=(height - 0.5, -0.1))
    axes.set_xticks(np.arange(LANES) + 0.5, _counted(LANES))
    axes.set_xlabel("lane")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    title(axes, "64 products of bytes, added up in 16 lanes: one instruction with AVX512-VNNI")
    return made


def _number_in_field(axes: Axes, x: float, y: float, number: int, ink: str, size: float) -> None:
    """Write a number into a field. It lies within the axes, so the layout need not measure it."""
    axes.text(x, y, f"{number}", ha="center", va="center", size=size, color=ink, in_layout=False)


def _counted(number: int) -> list[str]:
    return [str(each) for each in range(number)]


def bars(rates: Mapping[str, float], limit: float, unit: str, text: str) -> Figure:
    """Draw a bar for each rate, and the limit as a line."""
    made, axes = figure(9, 0.9 + 0.42 * len(rates))
    axes.barh(list(rates), list(rates.values()), color=BLUE, height=0.6)
    axes.axvline(limit, color=ORANGE, linewidth=2)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(limit, *rates.values()))
    axes.set_xlabel(f"{unit}; the line is B as measured")
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
        ("one scale for this token", of_all, ORANGE),
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


def forms(
    num_bytes: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    bandwidth: float,
    rate: float,
    constant: float,
) -> Figure:
    """Draw the step times of several forms of weights over their bytes, and two lines.

    `seconds` has several measured times per form; the bar of a form reaches from the least to the
    most, and its dot is the median. One line is the time of the bytes at `bandwidth`, the other the
    fit: bytes / `rate` + `constant`.
    """
    made, axes = figure(9, 3.8)
    ends = np.array([0.0, 1.08 * max(num_bytes.values())])
    for heights, colour, label in (
        (ends / bandwidth, QUIET, "at B, the middle of the rounds"),
        (ends / rate + constant, BLUE, "the fitted line"),
    ):
        axes.plot(ends / 1e6, 1e3 * heights, color=colour, linewidth=1.5, label=label)
    for name, times in seconds.items():
        x, middle = num_bytes[name] / 1e6, 1e3 * float(np.median(times))
        axes.vlines(x, 1e3 * min(times), 1e3 * max(times), color=ORANGE, linewidth=2.5)
        axes.plot(x, middle, "o", color=ORANGE, markersize=6)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(  # left of and above its point, where no line passes
            name,
            (x, middle),
            (-8, 8),
            textcoords="offset points",
            ha="right",
            color=INK,
            bbox=ground,
        )
    x = ends[1] / 1e6
    top = 1.15 * 1e3 * max(*(max(each) for each in seconds.values()), ends[1] / rate + constant)
    axes.set(xlim=(0, 1.12 * x), ylim=(min(0.0, 1.3e3 * constant), top))
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    axes.axhline(0, color=FAINT, linewidth=1, zorder=0)
    axes.set_xlabel("MB of weights that a step reads")
    axes.set_ylabel("ms per step of one token")
    title(axes, f"The fitted line meets 0 MB at {1e3 * constant:.2f} ms, its constant part")
    return made


LEVELS = (  # name, who has it, size, look
    ("registers", "each core", "16 or 32 of 16 to 64 bytes", ORANGE),
    ("L1 cache", "each core", "32 to 128 KB", AMBER),
    ("L2 cache", "one core or a few", "0.25 to 32 MB", YELLOW),
    ("L3 cache", "many cores", "none to 100s of MB", GREEN),
    ("memory", "all cores", "8 to 1,000s of GB", SKY),
)


def machine() -> Figure:
    """Draw the way of a number from memory to a core's registers, with usual sizes."""
    made, axes = figure(10, 2.6)
    x = 0.0
    for place, (name, owner, size, colour) in enumerate(reversed(LEVELS)):
        height = 1.0 - 0.16 * place
        axes.add_patch(
            Rectangle((x, -height / 2), 2.2, height, facecolor=colour, alpha=0.5, edgecolor=INK)
        )
        axes.text(x + 1.1, 0, name, ha="center", va="center", size=10.5, color=INK)
        axes.text(x + 1.1, -0.6, f"{size}\n{owner}", ha="center", va="top", size=9, color=INK)
        if place:
            arrow(axes, (x - 0.78, 0), (x - 0.02, 0))
        x += 3.0
    for at, text in ((2.6, "one cache\nline at a time"), (11.6, "one register\nat a time")):
        axes.text(at, 0.52, text, ha="center", va="bottom", size=9, color=QUIET)
    axes.set(xlim=(-0.2, x - 0.6), ylim=(-1.05, 0.95))
    axes.set_axis_off()
    title(axes, "To the right each store is smaller, and faster")
    return made


def staircase(rates: Mapping[int, float]) -> Figure:
    """Draw the speed at which one core reads arrays of several sizes, in bytes and bytes/s."""
    made, axes = figure(9, 3.2)
    sizes, speeds = list(rates), [each / 1e9 for each in rates.values()]
    axes.plot(sizes, speeds, "o-", color=BLUE)
    axes.set(xscale="log", yscale="log", xlabel="size of the array (log scale)")
    axes.set_ylabel("GB/s that one core reads (log scale)")
    axes.set_xticks(sizes, [_bytes(each) for each in sizes], fontsize=9)
    axes.minorticks_off()
    low, high = min(speeds), max(speeds)
    ticks = [each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500) if 0.5 * low < each < 2 * high]
    axes.set_yticks(ticks, [str(each) for each in ticks])
    axes.set_ylim(0.6 * low, 1.6 * high)
    fall = speeds[0] / speeds[-1]
    title(axes, f"{_bytes(sizes[0])} are read {fall:.1f} times as fast as {_bytes(sizes[-1])}")
    return made


def _bytes(number: int) -> str:
    return f"{number // 2**20} MB" if number >= 2**20 else f"{number // 2**10} KB"


NUM_THREADS, OWN_TASKS = 4, 6  # in the picture of a phase
DISPLACED, AT = 1, 2.5  # which thread loses its core, and when

Task = tuple[int, int, float, float]  # thread that ran it, its owner, begin, end


def tasks_of_phase(away: float, steals: bool) -> list[Task]:
    """Return the tasks of a phase in which one thread loses its core for `away` tasks' time.

    Each thread owns six tasks of one unit of time. If it `steals`, a thread without tasks of its
    own takes those of others.
    """
    left = [OWN_TASKS] * NUM_THREADS
    free, done = [0.0] * NUM_THREADS, []
    waiting = set(range(NUM_THREADS))
    while waiting:
        thread = min(waiting, key=lambda each: (free[each], each))
        owners = [thread, *range(NUM_THREADS)] if steals else [thread]
        owner = next((each for each in owners if left[each]), None)
        if owner is None:
            waiting.remove(thread)
            continue
        left[owner] -= 1
        begin, end = free[thread], free[thread] + 1
        if thread == DISPLACED and begin <= AT < end:
            end += away
        free[thread] = end
        done.append((thread, owner, begin, end))
    return done


def phase(away: float) -> Figure:
    """Draw a phase of four threads twice, without and with stealing, one thread losing its core.

    Raises `ValueError` if `away` is not 0 to 12.
    """
    if not 0 <= away <= 12:
        raise ValueError(f"A core cannot be away for {away} tasks here; choose 0 to 12.")
    made, axes = figure(11, 2.9, ncols=2, sharey=True)
    ends = []
    for panel, steals in zip(axes, (False, True), strict=True):
        done = tasks_of_phase(away, steals)
        end = max(each[3] for each in done)
        ends.append(end)
        for thread, owner, begin, stop in done:
            colour = SKY if owner == thread else GREEN
            place, width = (begin, thread - 0.4), stop - begin
            panel.add_patch(Rectangle(place, width, 0.8, facecolor=colour, edgecolor="white"))
            if thread == DISPLACED and begin <= AT < stop and away:
                panel.add_patch(
                    Rectangle((AT, thread - 0.4), away, 0.8, facecolor=FAINT, hatch="//")
                )
        for thread in range(NUM_THREADS):
            last = max(each[3] for each in done if each[0] == thread)
            if last < end:
                panel.hlines(thread, last, end, color=ORANGE, linestyle=":", linewidth=2)
        panel.axvline(end, color=INK, linewidth=2)
        panel.set_xlabel("time, in tasks; the black line is the barrier")
        panel.tick_params(length=0)
        title(
            panel, f"{'Free threads take over' if steals else 'Fixed shares'}: {end:g} tasks long"
        )
    for panel in axes:
        panel.set(xlim=(-0.2, max(ends) + 0.3), ylim=(NUM_THREADS - 0.4, -0.6))
    axes[0].set_yticks(range(NUM_THREADS), [f"thread {each}" for each in range(NUM_THREADS)])
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
    axes.set_xlabel("place in the row; dotted: groups, orange: how far it is moved")
    axes.set_ylabel("value of the number")
    widest = float(rounded.scales[0, : -(-len(shown) // size)].max())
    title(axes, f"{num_steps} values for each {size} numbers, the widest {widest:.3g} apart")


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

"""A GPU and its memories, the elements that programs touch, and bytes with and without fusion."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minigen_course.ch31_triton.lesson import (
    A100,
    NUM_SMS,
    REGISTERS,
    SECTOR,
    WARP,
    WARPS,
    Level,
    programs_that_fit,
    sectors_of,
)
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    PALE,
    QUIET,
    SKY,
    arrow,
    figure,
    title,
)
from minigen_course.lab.memory_watch import Operator
from minigen_course.lab.triton_interpreter import Access, bytes_moved


def fused_bytes(
    apart: Mapping[str, Sequence[Operator]], fused: Mapping[str, int], unit: int = 1000
) -> Figure:
    """Draw the bytes that each part of a layer moves: by its operators, and below by its kernel.

    `apart` has the separate operators of each part by name, `fused` the bytes of the kernel that
    fuses them. The x axis counts in units of `unit` bytes (1000 for kB).
    """
    made, axes = figure(9, 0.9 + 0.95 * len(apart))
    most = max(sum(each.num_bytes for each in operators) for operators in apart.values()) / unit
    for row, (name, operators) in enumerate(apart.items()):
        end = 0.0
        for index, operator in enumerate(operators):
            width = operator.num_bytes / unit
            colour = CYCLE[1 + index % (len(CYCLE) - 1)]  # without the first, the kernel's colour
            axes.barh(row - 0.2, width, left=end, height=0.36, color=colour, edgecolor="white")
            end += width
        label = f"{len(operators)} operators"
        axes.text(end + 0.01 * most, row - 0.2, label, va="center", color=INK)
        axes.barh(row + 0.2, fused[name] / unit, height=0.36, color=BLUE)
        axes.text(fused[name] / unit + 0.01 * most, row + 0.2, "1 kernel", va="center", color=INK)
    axes.set_yticks(range(len(apart)), list(apart))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * most)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel({1000: "kB", 1_000_000: "MB"}.get(unit, f"{unit:,} bytes") + " moved")
    gains = [sum(each.num_bytes for each in apart[name]) / fused[name] for name in apart]
    title(
        axes, f"Operators move {min(gains):.1f} to {max(gains):.1f} times the bytes of one kernel"
    )
    return made


def lanes_in_use(width: int, blocks: Sequence[int]) -> Figure:
    """Draw how many lanes a row of `width` numbers uses and masks, for several values of BLOCK.

    The row is loaded in as many Triton blocks as it needs; `blocks` are their sizes in lanes, one
    lane per number.
    """
    made, axes = figure(9, 0.9 + 0.4 * len(blocks))
    blocks_per_row = [-(-width // block) for block in blocks]  # rounded up
    lanes_per_row = [count * block for count, block in zip(blocks_per_row, blocks, strict=True)]
    for row, (block, num_blocks, num_lanes) in enumerate(
        zip(blocks, blocks_per_row, lanes_per_row, strict=True)
    ):
        axes.barh(row, width, color=BLUE, height=0.6)
        axes.barh(row, num_lanes - width, left=width, color=FAINT, height=0.6)
        text = f"{num_blocks} x {block:,}, {width / num_lanes:.0%} in use"
        axes.text(num_lanes, row, f" {text}", va="center", color=QUIET)
    axes.set_yticks(range(len(blocks)), [f"{block:,}" for block in blocks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(lanes_per_row))
    axes.set(xlabel="lanes (pale: masked)", ylabel="BLOCK")
    use = sorted(width / num_lanes for num_lanes in lanes_per_row)
    title(axes, f"A row of {width:,} numbers uses {use[0]:.0%} to {use[-1]:.0%} of its lanes")
    return made


Program = tuple[int, int, int]  # its tl.program_id on the three axes of the grid
_MAX_COUNTED = 400  # elements; a larger tensor is drawn without the counts of its accesses
_MAX_HEIGHT = 3.0  # inches
_MAX_LINED = 40  # rows or columns; a larger tensor is drawn without lines between elements
_DARKEN = 0.6  # factor on the brightness each time that the palette starts again


def draw_programs(
    accesses: Sequence[Access],
    shapes: Mapping[str, tuple[int, int]],
    program: Program | None = None,
    width: float = 9.0,
) -> Figure:
    """Draw each tensor, with each element in the colour of the last program that touched it.

    `shapes` are the rows and columns of each tensor by name. An element that was loaded or stored
    more than once shows how often, if the tensor is small. With `program`, only the elements of
    that program are coloured; those of the others are pale. `width` is in inches.
    """
    programs = sorted({access.program for access in accesses})
    rows = max(num_rows for num_rows, _ in shapes.values())
    made, axes = figure(
        width, 1.4 + min(0.22 * max(rows, 4), _MAX_HEIGHT), ncols=len(shapes), squeeze=False
    )
    for each, (name, shape) in zip(axes.flat, shapes.items(), strict=True):
        own = [access for access in accesses if access.tensor == name]
        _draw_tensor(each, own, shape, programs, program)
        verbs = [
            verb
            for verb, is_store in (("loaded", False), ("stored", True))
            if any(access.is_store == is_store for access in own)
        ]
        title(each, f"{name}: {' and '.join(verbs) or 'not touched'}, {bytes_moved(own):,} bytes")
    return made


def _draw_tensor(
    axes: Axes,
    accesses: Sequence[Access],
    shape: tuple[int, int],
    programs: Sequence[Program],
    chosen: Program | None,
) -> None:
    colours = np.full((shape[0] * shape[1], 3), to_rgb("white"))
    num_accesses: Counter[int] = Counter()  # by offset
    for access in sorted(accesses, key=lambda each: each.program == chosen):  # chosen one on top
        pale = chosen is not None and access.program != chosen
        colour = to_rgb(FAINT) if pale else _colour_of(programs.index(access.program))
        colours[list(access.offsets)] = colour
        num_accesses.update(access.offsets)
    axes.imshow(colours.reshape(*shape, 3), aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
    if max(shape) <= _MAX_LINED:
        axes.grid(which="minor", color="white", linewidth=0.8 if max(shape) <= 24 else 0.4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="column", ylabel="row")
    if shape[0] == 1:
        axes.set(ylabel="", yticks=[])
    if shape[0] * shape[1] <= _MAX_COUNTED:
        for offset, count in num_accesses.items():
            if count > 1:
                axes.text(
                    offset % shape[1],
                    offset // shape[1],
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black",
                    bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "linewidth": 0},
                )


def _colour_of(index: int) -> tuple[float, ...]:
    """Return the RGB colour of a program: the palette in turn, darker in each further round."""
    num_rounds, colour_id = divmod(index, len(CYCLE))
    return tuple(channel * _DARKEN**num_rounds for channel in to_rgb(CYCLE[colour_id]))


def machine_map() -> Figure:
    """Draw an A100: memory, L2, one streaming multiprocessor, and the bandwidth between them."""
    made, axes = figure(9.6, 5.0)
    memory, cache, shared, registers = A100
    _place(axes, (0.0, 0.0, 10.0, 0.85), FAINT, f"{memory.name}: {memory.num_bytes / 1e9:.0f} GB")
    _place(axes, (1.2, 1.55, 7.6, 0.75), AMBER, f"{cache.name}: {cache.num_bytes / 1e6:.0f} MB")
    axes.add_patch(Rectangle((0.0, 3.0), 5.6, 4.0, facecolor=PALE, edgecolor=QUIET))
    axes.text(0.15, 6.75, "one streaming multiprocessor (SM)", color=INK, fontsize=9.5, va="center")
    each = shared.num_bytes / NUM_SMS / 1024
    _place(axes, (0.25, 3.2, 5.1, 0.65), SKY, f"{shared.name}: up to {each:.0f} KB")
    each = registers.num_bytes / NUM_SMS / 1024
    _place(axes, (0.25, 4.5, 5.1, 0.65), GREEN, f"{registers.name}: {each:.0f} KB", "white")
    for place in range(4):
        corner = (0.25 + 1.29 * place, 5.8, 1.23, 0.65)
        _place(axes, corner, "white", "runs a warp", size=8.5)
    for place in range(3):
        x = 6.0 + 1.0 * place
        axes.add_patch(Rectangle((x, 3.0), 0.85, 4.0, facecolor=PALE, edgecolor=QUIET))
        axes.text(x + 0.42, 5.0, "SM", color=QUIET, ha="center", va="center")
    axes.text(9.15, 5.0, f"... {NUM_SMS}\nin all", color=QUIET, va="center", fontsize=9.5)
    for x, low, high, level in (
        (3.0, 0.85, 1.55, memory),
        (3.0, 2.3, 3.0, cache),
        (3.0, 3.85, 4.5, shared),
        (3.0, 5.15, 5.8, registers),
    ):
        arrow(axes, (x, low), (x, high), arrowstyle="<|-|>")
        axes.text(x + 0.15, (low + high) / 2, _rate(level), color=INK, va="center", fontsize=9.5)
    axes.set(xlim=(-0.05, 10.15), ylim=(-0.1, 7.1))
    axes.axis("off")
    ratio = shared.bandwidth / memory.bandwidth
    title(
        axes, f"A100 with 80 GB: shared memory gives {ratio:.0f} times the bytes per second of HBM"
    )
    return made


def _rate(level: Level) -> str:
    return f"{level.gigabytes_a_second:,} GB/s"


def _place(
    axes: Axes,
    box: tuple[float, float, float, float],
    colour: str,
    text: str,
    ink: str = INK,
    size: float = 10,
) -> None:
    x, y, width, height = box
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=QUIET, linewidth=1))
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=size
    )


def threads_of_block(block: int, num_warps: int) -> Figure:
    """Draw how Triton parts a block of neighbours among warps, and a warp's part among threads.

    For loads of up to 16 bytes per thread, such as 8 numbers of 16 bits.
    """
    own = block // (num_warps * WARP)
    made, axes = figure(9.6, 3.0)
    share = block // num_warps
    rows = (
        (
            num_warps,
            [f"warp {w}\n{w * share:,} to {(w + 1) * share - 1:,}" for w in range(num_warps)],
        ),
        (WARP, [str(each) for each in range(WARP)]),
        (own, [f"lane {each}" for each in range(own)]),
    )
    colours, height = (PALE, SKY, AMBER), 0.62
    for row, (count, texts) in enumerate(rows):
        y = 2.4 - 1.15 * row
        for place, text in enumerate(texts):
            box = (10 * place / count, y, 10 / count, height)
            size = 9.5 if count <= 8 else 7.5
            _place(axes, box, colours[row], text, size=size)
        if row:
            end = 10 / rows[row - 1][0]  # the first box of the row above is the one that is opened
            for x, edge in ((0.0, 0.0), (end, 10.0)):
                axes.plot([x, edge], [y + 1.15, y + height], color=QUIET, linewidth=0.8)
    for y, text in ((2.71, "program"), (1.56, "warp 0,\nits threads"), (0.41, "thread 0")):
        axes.text(-0.15, y, text, ha="right", va="center", color=QUIET, fontsize=9)
    axes.set(xlim=(-1.3, 10.05), ylim=(0.0, 3.1))
    axes.axis("off")
    title(axes, f"A block of {block:,} lanes on {num_warps} warps: {own} lanes for each thread")
    return made


NUMBERS_A_LINE = 64


def sector_map(access: Access) -> Figure:
    """Draw the memory around one load: numbers that it wants, and those that come with them.

    Lines of 64 numbers; a sector of 32 bytes is as many numbers as fit into it.
    """
    per_sector = SECTOR // access.itemsize
    sectors = sectors_of(access)
    num_lines = -(-(max(sectors) + 1) * per_sector // NUMBERS_A_LINE)
    colours = np.full((num_lines * NUMBERS_A_LINE, 3), to_rgb("#f4f4f4"))
    for sector in sectors:
        colours[sector * per_sector : (sector + 1) * per_sector] = to_rgb(AMBER)
    colours[list(access.offsets)] = to_rgb(BLUE)
    made, axes = figure(9.4, 1.9 + 0.16 * max(num_lines, 2))
    axes.imshow(colours.reshape(num_lines, NUMBERS_A_LINE, 3), aspect="auto")
    axes.set_xticks(np.arange(-0.5, NUMBERS_A_LINE, per_sector), minor=True)
    axes.set_yticks(np.arange(-0.5, num_lines), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xticks(range(0, NUMBERS_A_LINE, per_sector))
    axes.set_yticks([0] if num_lines < 3 else [0, num_lines - 1])
    axes.set(xlabel=f"number in the line (a sector has {per_sector})", ylabel="line")
    made.legend(
        handles=[
            Patch(color=BLUE, label="wanted"),
            Patch(color=AMBER, label="fetched with it, not wanted"),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    fetched, share = len(sectors) * SECTOR, access.num_bytes / (len(sectors) * SECTOR)
    text = f"{len(sectors)} sectors, {fetched:,} bytes fetched, {share:.1%} of them wanted"
    title(axes, text)
    return made


def occupancy_map(programs: Mapping[str, tuple[int, int, int]]) -> Figure:
    """Draw how the registers of one SM are parted among programs, for several kernels by name.

    Each is (number of warps, registers per thread, bytes of shared memory) of one program.
    """
    made, axes = figure(9.4, 1.2 + 0.62 * len(programs))
    fits = [programs_that_fit(*each) for each in programs.values()]
    for row, (fit, (num_warps, registers, _)) in enumerate(
        zip(fits, programs.values(), strict=True)
    ):
        width = -(-registers // 8) * 8 * WARP * num_warps / 1024
        axes.barh(row, REGISTERS / 1024, color=FAINT, height=0.62)
        for place in range(fit.num_programs):
            colour = (BLUE, SKY)[place % 2]
            axes.barh(row, width, left=place * width, color=colour, height=0.62, edgecolor="white")
        text = f" {fit.num_programs} programs, {fit.num_warps} of {WARPS} warps"
        axes.text(REGISTERS / 1024, row, text, va="center", color=INK, fontsize=9.5)
    axes.set_yticks(range(len(programs)), list(programs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * REGISTERS / 1024)
    axes.set_xticks(range(0, 65, 16), [f"{each} K" for each in range(0, 65, 16)])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel("registers of one SM (grey: no program uses them)")
    counts, warps = ([getattr(fit, name) for fit in fits] for name in ("num_programs", "num_warps"))
    title(
        axes,
        f"{min(counts)} to {max(counts)} programs fit on an SM, "
        f"with {min(warps)} to {max(warps)} warps",
    )
    return made


GRAPH_US, BETWEEN_US = 5.0, 1.0  # to launch a whole graph, and between two kernels in any case


def launch_gaps(launch_us: float, kernel_us: float, num_kernels: int = 24) -> Figure:
    """Draw the CPU's launches above the GPU's kernels over time, one by one and as a CUDA graph.

    A kernel starts when it has been launched, and `BETWEEN_US` after the end of the kernel before
    it, however the two were launched. `GRAPH_US` and `BETWEEN_US`, like the arguments, are
    assumptions in microseconds.
    """
    launches = {
        "launched one by one": [(launch_us * each, launch_us) for each in range(num_kernels)],
        "launched as one graph": [(0.0, GRAPH_US)],
    }
    made, grid = figure(9.4, 3.6, nrows=2, sharex=True)
    for axes, (name, of_cpu) in zip(grid, launches.items(), strict=True):
        of_gpu = list[tuple[float, float]]()
        for number in range(num_kernels):
            launched = sum(of_cpu[min(number, len(of_cpu) - 1)])
            free = sum(of_gpu[-1]) + BETWEEN_US if of_gpu else 0.0
            of_gpu.append((max(launched, free), kernel_us))
        for row, (spans, colour) in enumerate(((of_cpu, AMBER), (of_gpu, BLUE))):
            axes.broken_barh(spans, (row - 0.35, 0.7), color=colour, edgecolor="white")
        axes.set_yticks([0, 1], ["CPU launches", "GPU computes"])
        axes.invert_yaxis()
        end = sum(of_gpu[-1])
        idle = 1 - num_kernels * kernel_us / end
        title(axes, f"{name}: {end:.0f} µs, the GPU idles for {idle:.0%} of that")
    grid[-1].set(xlabel="microseconds, modelled", xlim=(0, None))
    return made

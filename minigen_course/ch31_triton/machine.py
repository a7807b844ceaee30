"""A GPU's memories with their sizes and bandwidths, coalescing as sectors, and occupancy; drawn.

Sources: NVIDIA A100 Tensor Core GPU Architecture (white paper) and data sheet; NVIDIA, CUDA C++
Programming Guide, table of compute capabilities; Dao et al. 2022, "FlashAttention", section 2.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen_course.figures.style import (
    AMBER,
    BLUE,
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
from minigen_course.lab.triton_interpreter import Access


@dataclass(frozen=True)
class Level:
    """One kind of memory of a GPU: its bytes in total, and the bytes per second of all together."""

    name: str
    num_bytes: float
    bandwidth: float
    shared_by: str

    @property
    def gigabytes_a_second(self) -> int:
        """The bandwidth in GB/s, rounded."""
        return round(self.bandwidth / 1e9)


WARP = 32  # threads
NUM_SMS = 108
CLOCK = 1.41e9  # Hz
FLOPS = 19.5e12  # of float32, outside the tensor cores
# The memory of an A100 SXM 80 GB, from the data sheet; the others from the bytes for each clock: L2
# 5,120, shared memory 32 banks of 4 bytes in each SM. Registers: a multiplication with addition, 2
# FLOPs, reads three of 4 bytes, so this is what arithmetic at full speed reads.
A100 = (
    Level("HBM", 80e9, 2039e9, "the whole GPU"),
    Level("L2 cache", 40e6, 5120 * CLOCK, "the whole GPU"),
    Level("shared memory", NUM_SMS * 164 * 1024, NUM_SMS * 32 * 4 * CLOCK, "a program"),
    Level("registers", NUM_SMS * 65_536 * 4, FLOPS / 2 * 3 * 4, "one thread"),
)
REGISTERS, SHARED, WARPS, PROGRAMS = 65_536, 164 * 1024, 64, 32  # of one SM of an A100


@dataclass(frozen=True)
class Fit:
    """How many programs fit on one SM at the same time, and what limits their number."""

    num_programs: int
    num_warps: int  # of all these programs
    limit: str

    @property
    def occupancy(self) -> float:
        """The share of the SM's places for warps that are taken."""
        return self.num_warps / WARPS


def programs_that_fit(num_warps: int, registers: int, shared: int) -> Fit:
    """Return how many programs of `num_warps` warps fit on one SM of an A100.

    A program takes `registers` per thread, which are dealt out in units of 8, and `shared` bytes of
    shared memory plus 1 KiB that the system reserves.

    >>> programs_that_fit(num_warps=4, registers=32, shared=0)
    Fit(num_programs=16, num_warps=64, limit='places for warps')
    """
    dealt = -(-registers // 8) * 8
    room = {
        "registers": REGISTERS // (dealt * WARP * num_warps),
        "shared memory": SHARED // (shared + 1024),
        "places for warps": WARPS // num_warps,
        "places for programs": PROGRAMS,
    }
    fewest = min(room.values())
    limit = [name for name, each in room.items() if each == fewest][-1]
    return Fit(fewest, fewest * num_warps, limit)


SECTOR = 32  # bytes that a GPU fetches at least


def num_sectors(accesses: Sequence[Access]) -> int:
    """Return how many sectors of 32 bytes the loads and stores ask for, each on its own.

    Tensors start at a sector. An access that wants several numbers of a sector asks for it once.

    >>> row = Access((0, 0, 0), False, "x", tuple(range(32)), 4)
    >>> column = Access((0, 0, 0), False, "x", tuple(range(0, 1024, 32)), 4)
    >>> num_sectors([row]), num_sectors([column])
    (4, 32)
    """
    return sum(len(_sectors(access)) for access in accesses)


def _sectors(access: Access) -> set[int]:
    return {offset * access.itemsize // SECTOR for offset in access.offsets}


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
        axes, f"A100 SXM 80 GB: shared memory gives {ratio:.0f} times the bytes per second of HBM"
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
    sectors = _sectors(access)
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

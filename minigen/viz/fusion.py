"""Bytes that steps move one by one, against what a kernel moves that does them all."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minigen.teach.operators import Operator
from minigen.viz.style import BLUE, CYCLE, FAINT, INK, QUIET, figure, title


def fused_bytes(
    apart: Mapping[str, Sequence[Operator]], fused: Mapping[str, int], unit: int = 1000
) -> Figure:
    """For each part of a layer, its operators' bytes side by side; below them, its kernel's.

    Bytes are in `unit` (1000: kB). A number says how many operators there are.
    """
    made, axes = figure(9, 0.9 + 0.95 * len(apart))
    most = max(sum(each.num_bytes for each in parts) for parts in apart.values()) / unit
    for place, (name, parts) in enumerate(apart.items()):
        begun = 0.0
        for number, part in enumerate(parts):
            width = part.num_bytes / unit
            colour = CYCLE[1 + number % (len(CYCLE) - 1)]
            axes.barh(place - 0.2, width, left=begun, height=0.36, color=colour, edgecolor="white")
            begun += width
        axes.text(
            begun + 0.01 * most, place - 0.2, f"{len(parts)} operators", va="center", color=INK
        )
        axes.barh(place + 0.2, fused[name] / unit, height=0.36, color=BLUE)
        axes.text(fused[name] / unit + 0.01 * most, place + 0.2, "1 kernel", va="center", color=INK)
    axes.set_yticks(range(len(apart)), list(apart))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * most)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel({1000: "kB", 1_000_000: "MB"}.get(unit, f"{unit:,} bytes") + " moved")
    title(axes, "Each operator reads what the one before has just written")
    return made


def lanes_in_use(width: int, blocks: Sequence[int]) -> Figure:
    """Of blocks that are powers of two, the lanes that rows of `width` numbers use."""
    made, axes = figure(9, 0.9 + 0.4 * len(blocks))
    for place, block in enumerate(blocks):
        lanes = -(-width // block) * block
        axes.barh(place, width, color=BLUE, height=0.6)
        axes.barh(place, lanes - width, left=width, color=FAINT, height=0.6)
        text = f"{-(-width // block)} x {block:,}, {width / lanes:.0%} in use"
        axes.text(lanes, place, f" {text}", va="center", color=QUIET)
    axes.set_yticks(range(len(blocks)), [f"{block:,}" for block in blocks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(-(-width // block) * block for block in blocks))
    axes.set(xlabel="lanes; the pale ones are masked", ylabel="BLOCK")
    title(axes, f"A row of {width:,} numbers in blocks")
    return made

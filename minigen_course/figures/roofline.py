"""The roofline of a machine with measured steps below it, and the predicted time of a step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from minigen_course.figures.show import significant
from minigen_course.figures.style import AMBER, BLUE, FAINT, INK, ORANGE, QUIET, SKY, figure, title
from minigen_course.lab.cost_model import GB, Machine, ModelShape, Step, decode_step

GIGA = 1e9


def roofline(
    machine: Machine, placed: Mapping[str, tuple[Step, float]], unit: str = "GFLOP/s"
) -> Figure:
    """Draw a machine's two limits, and measured steps (with their seconds) as points below them.

    Left of the ridge memory limits a step, right of it arithmetic. The names of `placed` are
    written beside the points, and what each point loses to the limits is shaded. `unit` is the name
    of 10^9 operations per second.
    """
    made, axes = figure(9, 4.4)
    points = {
        name: (step.intensity, step.flops / seconds / GIGA)
        for name, (step, seconds) in placed.items()
    }
    peak, ridge = machine.flops / GIGA, machine.ridge
    everywhere = [*(x for x, _ in points.values()), ridge]
    low, high = min(everywhere) / 3, max(everywhere) * 4
    slope = machine.bandwidth / GIGA
    heights = [*(y for _, y in points.values()), low * slope]
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min(heights) / 2, 3.5 * max(peak, *heights))
    axes.plot([low, ridge], [low * slope, peak], color=BLUE, linewidth=2.5)
    axes.plot([ridge, high], [peak, peak], color=ORANGE, linewidth=2.5)
    axes.axvline(ridge, color=FAINT, linewidth=1.5, zorder=0)
    _shade_loss(axes, sorted(points.values()), slope, peak)
    axes.text(low * 1.15, 1.7 * peak, "memory-bound", color=BLUE)
    axes.text(high / 1.15, 1.7 * peak, "compute-bound", color=ORANGE, ha="right")
    axes.text(ridge, axes.get_ylim()[0] * 1.15, " ridge", color=QUIET)
    for name, (x, y) in points.items():
        axes.plot(x, y, "o", color=INK, markersize=6)
        label = axes.annotate(
            name, (x, y), (7, -11), textcoords="offset points", color=INK, fontsize=9
        )
        label.set_path_effects([withStroke(linewidth=3, foreground="white")])  # over the roof
    operations = "FLOP" if "FLOP" in unit else "operations"
    axes.set_xlabel(f"arithmetic intensity ({operations}/byte, log scale)")
    axes.set_ylabel(f"{unit} (log scale)")
    axes.yaxis.set_major_formatter(_plain)
    axes.xaxis.set_major_formatter(_plain)
    title(axes, f"What {machine.name} can give, and what each step gets")
    return made


def _shade_loss(
    axes: Axes, points: Sequence[tuple[float, float]], slope: float, peak: float
) -> None:
    """Shade what lies between points, from left to right, and the limits above them."""
    if len(points) < 2:
        return
    xs, ys = np.array(points).T
    between = np.geomspace(xs[0], xs[-1], 100)
    got = np.exp(np.interp(np.log(between), np.log(xs), np.log(ys)))
    limit = np.minimum(between * slope, peak)
    axes.fill_between(between, got, limit, where=limit > got, color=FAINT, alpha=0.6, zorder=0)
    middle = len(between) // 2
    if limit[middle] > 2 * got[middle]:
        place = (between[middle], np.sqrt(limit[middle] * got[middle]))
        axes.text(*place, "what is lost", color=QUIET, ha="center", va="center", fontsize=9)


def step_time(
    shape: ModelShape,
    machine: Machine,
    *,
    weight_bits: float,
    context: int,
    batch: int,
    overhead_ms: float = 0.0,
) -> Figure:
    """Draw the predicted time of one decode step, and how it grows with the batch.

    Left, the time to read memory beside that of the arithmetic: the longer bar decides. Right, both
    for all batches, with the batch at which they are equal and the batch that fills the memory.
    Raises `ValueError` for a batch or context below 1.
    """
    if batch < 1 or context < 1:
        raise ValueError("A step has at least one sequence, and a context of at least one token.")
    step = decode_step(shape, batch, context, weight_bits)
    made, (bars, curves) = figure(10.4, 3.1, ncols=2, width_ratios=[3, 2])
    _draw_bars(bars, step, machine, overhead_ms)
    title(bars, _said(shape, machine, step, weight_bits, context, batch, overhead_ms / 1e3))
    _draw_batches(curves, shape, machine, weight_bits, context, batch)
    return made


def _draw_bars(axes: Axes, step: Step, machine: Machine, overhead_ms: float) -> None:
    weights, cache, arithmetic = (
        1e3 * step.weight_bytes / machine.bandwidth,
        1e3 * step.kv_bytes / machine.bandwidth,
        1e3 * step.flops / machine.flops,
    )
    axes.barh(0, weights, color=BLUE, height=0.6, label="weights")
    axes.barh(0, cache, left=weights, color=SKY, height=0.6, label="KV cache")
    axes.barh(1, arithmetic, color=ORANGE, height=0.6, label="arithmetic")
    total = 1e3 * step.seconds(machine, overhead_ms / 1e3)
    if overhead_ms:
        axes.barh([0, 1], overhead_ms, left=total - overhead_ms, color=AMBER, height=0.15)
    axes.set_yticks([0, 1], ["to read", "to compute"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, 1.02 * total)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("time of one step (ms)")
    axes.legend(frameon=False, labelcolor=INK, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.24))


def _draw_batches(
    axes: Axes,
    shape: ModelShape,
    machine: Machine,
    weight_bits: float,
    context: int,
    batch: int,
) -> None:
    most = max(1024, 2 * batch)
    batches = np.geomspace(1, most, 60)
    one = decode_step(shape, 1, context, weight_bits)
    read = (one.weight_bytes + batches * one.kv_bytes) / machine.bandwidth
    compute = batches * one.flops / machine.flops
    axes.plot(batches, 1e3 * read, color=BLUE, linewidth=2)
    axes.plot(batches, 1e3 * compute, color=ORANGE, linewidth=2)
    longer = decode_step(shape, batch, context, weight_bits).seconds(machine)
    axes.plot(batch, 1e3 * longer, "o", color=INK, markersize=7)
    axes.set(xscale="log", yscale="log", xlim=(0.9, most * 1.1))
    axes.set_xlabel("batch (sequences, log scale)")
    axes.set_ylabel("ms (log scale)")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_formatter(_plain)
    same = crossing(shape, machine, weight_bits, context)
    if same is not None and same <= most:
        axes.axvline(same, color=QUIET, linestyle="--", linewidth=1)
    room = _room(shape, machine, weight_bits, context)
    grey = ""
    if room is not None and room < most:
        axes.axvspan(max(room, 0.9), most * 1.1, color=FAINT, alpha=0.5, zorder=0)
        grey = "\n(grey: more than the memory holds)"
    if same is None:
        title(axes, f"No batch is compute-bound{grey}")
    else:
        title(axes, f"Compute-bound from batch {math.ceil(same):,} on{grey}")


def crossing(shape: ModelShape, machine: Machine, weight_bits: float, context: int) -> float | None:
    """Return the batch at which reading and arithmetic take equal time, None if there is none."""
    one = decode_step(shape, 1, context, weight_bits)
    gained = one.flops / machine.flops - one.kv_bytes / machine.bandwidth
    return one.weight_bytes / machine.bandwidth / gained if gained > 0 else None


def _room(shape: ModelShape, machine: Machine, weight_bits: float, context: int) -> int | None:
    """Return how many sequences fit beside the weights, None if the memory's size is unknown.

    As in `most_sequences`, a GB is kept for what a step works in.
    """
    if machine.memory is None:
        return None
    free = machine.memory - GB - shape.parameters * weight_bits / 8
    return max(0, int(free // decode_step(shape, 1, context, weight_bits).kv_bytes))


def _said(
    shape: ModelShape,
    machine: Machine,
    step: Step,
    weight_bits: float,
    context: int,
    batch: int,
    overhead: float,
) -> str:
    seconds = step.seconds(machine, overhead)
    used = step.flops / machine.flops / seconds
    share = f"{used:.2%}" if used < 0.01 else f"{used:.0%}"
    said = f"{significant(seconds * 1e3)} ms a step, {significant(batch / seconds)} tokens/s"
    said += f", {share} of the compute"
    room = _room(shape, machine, weight_bits, context)
    if room is None:
        return said
    if room == 0:
        return f"{said}\ndoes not fit: weights and one such context exceed the memory"
    if room < batch:
        return f"{said}\ndoes not fit: there is room for {room:,} such sequences"
    return f"{said}\nroom for {room:,} such sequences"


def _plain(value: float, _: Any) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"

"""The roofline of a machine with measured steps below it, and the predicted time of a step."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures.show import significant
from minigen_course.figures.style import AMBER, BLUE, FAINT, INK, ORANGE, QUIET, SKY, figure, title
from minigen_course.lab.cost_model import Machine, ModelShape, Step, decode_step

GIGA = 1e9


def roofline(
    machine: Machine, placed: Mapping[str, tuple[Step, float]], unit: str = "GFLOP/s"
) -> Figure:
    """Draw a machine's two limits, and measured steps (with their seconds) as points below them.

    Left of the ridge memory limits a step, right of it arithmetic. The names of `placed` are
    written beside the points; `unit` is the name of 10^9 operations per second.
    """
    made, axes = figure(9, 4.2)
    points = {
        name: (step.intensity, step.flops / seconds / GIGA)
        for name, (step, seconds) in placed.items()
    }
    everywhere = [*(x for x, _ in points.values()), machine.ridge]
    low, high = min(everywhere) / 3, max(everywhere) * 4
    peak = machine.flops / GIGA
    ridge = machine.ridge
    axes.plot([low, ridge], [low * machine.bandwidth / GIGA, peak], color=BLUE, linewidth=2.5)
    axes.plot([ridge, high], [peak, peak], color=ORANGE, linewidth=2.5)
    axes.axvline(ridge, color=FAINT, linewidth=1.5, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, 3 * peak))
    axes.text(low * 1.15, 1.7 * peak, "memory is the limit", color=BLUE)
    axes.text(high / 1.15, 1.7 * peak, "arithmetic is the limit", color=ORANGE, ha="right")
    axes.text(ridge, axes.get_ylim()[0] * 1.15, " ridge", color=QUIET)
    for name, (x, y) in points.items():
        axes.plot(x, y, "o", color=INK, markersize=6)
        axes.annotate(name, (x, y), (6, -12), textcoords="offset points", color=INK, fontsize=9)
    axes.set_xlabel("operations for each byte read (log scale)")
    axes.set_ylabel(f"{unit} (log scale)")
    axes.yaxis.set_major_formatter(_plain)
    axes.xaxis.set_major_formatter(_plain)
    title(axes, f"What {machine.name} can give, and what each step gets")
    return made


def step_time(
    shape: ModelShape,
    machine: Machine,
    *,
    weight_bits: float,
    context: int,
    batch: int,
    overhead_ms: float = 0.0,
) -> Figure:
    """Draw the predicted time of one decode step: reading memory beside the arithmetic.

    The longer bar decides. Raises `ValueError` for a batch or context below 1.
    """
    if batch < 1 or context < 1:
        raise ValueError("A step has at least one sequence, and a context of at least one token.")
    step = decode_step(shape, batch, context, weight_bits)
    milliseconds = {
        "weights": 1e3 * step.weight_bytes / machine.bandwidth,
        "keys and values": 1e3 * step.kv_bytes / machine.bandwidth,
        "arithmetic": 1e3 * step.flops / machine.flops,
    }
    made, axes = figure(9, 2.6)
    weights, cache, arithmetic = milliseconds.values()
    axes.barh(0, weights, color=BLUE, height=0.6, label="weights")
    axes.barh(0, cache, left=weights, color=SKY, height=0.6, label="keys and values")
    axes.barh(1, arithmetic, color=ORANGE, height=0.6, label="arithmetic")
    seconds = step.seconds(machine, overhead_ms / 1e3)
    if overhead_ms:
        axes.barh([0, 1], overhead_ms, left=seconds * 1e3 - overhead_ms, color=AMBER, height=0.15)
    axes.set_yticks([0, 1], ["to be read", "to be computed"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, 1.02 * seconds * 1e3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("milliseconds")
    axes.legend(
        frameon=False, labelcolor=INK, ncols=3, loc="upper right", bbox_to_anchor=(1, -0.22)
    )
    title(axes, _said(shape, machine, step, seconds, weight_bits, context, batch))
    return made


def _said(
    shape: ModelShape,
    machine: Machine,
    step: Step,
    seconds: float,
    weight_bits: float,
    context: int,
    batch: int,
) -> str:
    used = step.flops / machine.flops / seconds
    said = f"{significant(seconds * 1e3)} ms a step, {significant(batch / seconds)} tokens/s in all"
    said += f"; {used:.2g} of the arithmetic" if used < 0.001 else f"; {used:.1%} of the arithmetic"
    if machine.memory is not None:
        free = machine.memory - shape.parameters * weight_bits / 8
        room = max(0, int(free // decode_step(shape, 1, context, weight_bits).kv_bytes))
        if room == 0:
            said += "\ndoes not fit: the weights and one such context are more than its memory"
        elif room < batch:
            said += f"\ndoes not fit: there is room for {room:,} such sequences"
        else:
            said += f"\nroom for {room:,} such sequences"
    return said


def _plain(value: float, _: Any) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"

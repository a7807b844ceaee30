"""A model's memory budget against the memory of a machine, and a timeline of requests."""

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.figure import Figure

from minigen.checkpoint.model_config import ModelConfig
from minigen.trace.events import Event
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    figure,
    title,
)
from minigen_course.figures.trace_views import story
from minigen_course.lab.cost_model import GB, memory_needed, most_sequences, num_parameters

CONTEXTS = [2**power for power in range(8, 18)]


def memory_budget(
    config: ModelConfig, bits: float, memory_gb: float, sequences: int, context: int
) -> Figure:
    """Draw the memory needed beside the memory there is, and how many sequences fit."""
    if memory_gb <= 0:
        raise ValueError(f"memory_gb is {memory_gb:g}; give more than 0 GB.")
    needed = memory_needed(config, bits, sequences, context)
    made, (bars, curve) = figure(10, 2.9, ncols=2, width_ratios=(3, 2))
    begin = 0.0
    for name, size, colour in (
        ("weights", needed.weights, BLUE),
        ("KV cache", needed.kv, AMBER),
        ("working", needed.working, GREEN),
    ):
        bars.barh(0, size / GB, left=begin, color=colour, label=f"{name} {_gb(size)}", height=0.5)
        begin += size / GB
    bars.axvline(memory_gb, color=ORANGE, linewidth=2, label=f"there is {memory_gb:g} GB")
    bars.set(yticks=[], ylim=(-0.4, 0.4), xlabel="GB", xlim=(0, 1.08 * max(begin, memory_gb)))
    bars.legend(
        frameon=False, labelcolor=INK, ncols=2, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1)
    )
    fits = needed.total <= memory_gb * GB
    left = memory_gb * GB - needed.total
    bars.text(
        *(0.01, 0.06, f"fits, {_gb(left)} left" if fits else f"does not fit, {_gb(-left)} missing"),
        transform=bars.transAxes,
        color=INK if fits else ORANGE,
        weight="bold",
    )
    counts = [most_sequences(config, bits, memory_gb * GB, each) for each in CONTEXTS]
    fitting = [(length, count) for length, count in zip(CONTEXTS, counts, strict=True) if count]
    curve.plot(*zip(*fitting, strict=True) if fitting else ((), ()), color=AMBER, linewidth=2)
    curve.axhline(1, color=FAINT, zorder=0)
    curve.plot(context, sequences, "o", color=BLUE if fits else ORANGE, label="asked for")
    curve.set(xscale="log", yscale="log", xlim=(CONTEXTS[0], CONTEXTS[-1]), ylim=(0.7, 2000))
    curve.set(xlabel="tokens of each", ylabel="sequences that fit")
    for axis in (curve.xaxis, curve.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    curve.tick_params(which="minor", colors=QUIET)
    curve.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(curve, f"{num_parameters(config) / 1e9:.2f} billion weights")
    return made


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Lane:
    """One request: the steps of its arrival and its end, and the tokens computed per step."""

    arrived: int
    ended: int | None
    computed: dict[int, int]  # step -> tokens


def lanes(events: Iterable[Event]) -> dict[int, Lane]:
    """Return a lane for each request in the events, by its id; steps count from 0."""
    history = story(events)
    computed: dict[int, dict[int, int]] = {request: {} for request in history.requests}
    for step, seen in enumerate(history.steps):
        for part in seen.parts:
            computed[part.request][step] = part.end - part.first
    return {
        request: Lane(history.arrived[request][0], history.ended.get(request, (None,))[0], steps)
        for request, steps in computed.items()
    }


def timeline(events: Iterable[Event], names: list[str] | None = None) -> Figure:
    """Draw lanes of waiting (pale), prefill (amber) and decode (blue), one column per step."""
    drawn = lanes(events)
    if not drawn:
        raise ValueError("There are no requests in these events.")
    last = max(max(lane.computed, default=0) for lane in drawn.values()) + 1
    made, axes = figure(10, 0.32 * len(drawn) + 1.4)
    for row, lane in enumerate(drawn.values()):
        started = min(lane.computed, default=last)
        axes.barh(row, started - lane.arrived, left=lane.arrived, color=FAINT, height=0.5)
        for many, colour in ((True, AMBER), (False, BLUE)):
            steps = [step for step, tokens in lane.computed.items() if (tokens > 1) == many]
            axes.barh([row] * len(steps), 0.85, left=steps, color=colour, height=0.7)
    for label, colour in (("waits", FAINT), ("prefill", AMBER), ("decode", BLUE)):
        axes.barh(0, 0, color=colour, label=label)
    names = names or [f"request {number}" for number in drawn]
    axes.set_yticks(range(len(drawn)), names)
    axes.set(xlabel="step of the engine", xlim=(0, last))
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=3, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    together = sum(len(lane.computed) for lane in drawn.values()) / last
    title(axes, f"{last} steps, {together:.1f} requests in each on average")
    return made

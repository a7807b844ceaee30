"""A model's memory budget against a machine's memory, and timelines of requests.

What an exercise's part counts is drawn with the word whether the part is the learner's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
    printable,
    title,
)
from minigen_course.figures.trace_views import PREFILL, Story, story
from minigen_course.lab import cost_model
from minigen_course.lab.cost_model import (
    GB,
    first_that_fit,
    kv_bytes_per_token,
    memory_needed,
    most_sequences,
    num_parameters,
)

MostSequences = Callable[..., int]
CONTEXTS = [*range(256, 2**15, 256), *range(2**15, 2**17 + 1, 2**13)]  # as fine as the slider
GIB = 2**30


def memory_budget(
    config: ModelConfig,
    bits: float,
    memory_gb: float,
    sequences: int,
    context: int,
    working_gb: float = 1.0,
    most: MostSequences | None = None,
) -> Figure:
    """Draw the memory needed against the memory there is, and how many sequences would fit.

    The curve of what fits is drawn by `most`, or by the part in use.
    """
    counting = most or most_sequences
    made, (bars, curve) = figure(10.5, 3.2, ncols=2, width_ratios=(3, 2))
    fits = _draw_budget(made, bars, config, bits, memory_gb, sequences, context, working_gb)
    memory, working = memory_gb * GB, working_gb * GB
    counts = [counting(config, bits, memory, each, working) for each in CONTEXTS]
    fitting = [(length, count) for length, count in zip(CONTEXTS, counts, strict=True) if count]
    if fitting:
        lengths, highest = zip(*fitting, strict=True)
        curve.plot(lengths, highest, color=AMBER, linewidth=2)
        curve.fill_between(lengths, highest, 0.7, color=AMBER, alpha=0.2, linewidth=0)
        curve.text(*(0.06, 0.08, "fits"), transform=curve.transAxes, color=INK)
    title(curve, f"How many fit, {_by(counting, cost_model.most_sequences)}")
    curve.plot(context, sequences, "o", color=BLUE if fits else ORANGE)
    curve.annotate(
        f"{sequences:,} × {context:,} tokens",
        (context, sequences),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right" if context > 2048 else "left",
        color=INK,
        fontsize=9,
    )
    curve.set(xscale="log", yscale="log", xlim=(CONTEXTS[0], CONTEXTS[-1]), ylim=(0.7, 2000))
    curve.set(xlabel="tokens of each sequence", ylabel="sequences")
    for axis in (curve.xaxis, curve.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    return made


def _draw_budget(
    made: Figure,
    axes: Axes,
    config: ModelConfig,
    bits: float,
    memory_gb: float,
    sequences: int,
    context: int,
    working_gb: float,
) -> bool:
    """Draw weights, KV cache and working memory end to end; return whether they fit."""
    if memory_gb <= 0:
        raise ValueError(f"memory_gb is {memory_gb:g}; give more than 0 GB.")
    needed = memory_needed(config, bits, sequences, context, working_gb * GB)
    begin = 0.0
    for name, size, colour in (
        ("weights", needed.weights, BLUE),
        ("KV cache", needed.kv, AMBER),
        ("working memory (assumed)", needed.working, GREEN),
    ):
        label = f"{name} {in_gb(size)}"
        axes.barh(0, size / GB, left=begin, color=colour, label=label, height=0.5)
        begin += size / GB
    axes.axvline(memory_gb, color=ORANGE, linewidth=2, label=f"there is {memory_gb:g} GB")
    axes.set(yticks=[], ylim=(-0.4, 0.4), xlabel="GB (10⁹ bytes)")
    axes.set_xlim(0, 1.08 * max(begin, memory_gb))
    above = axes.secondary_xaxis("top", functions=(_gib_of_gb, _gb_of_gib))
    above.set_xlabel("GiB (2³⁰ bytes)", color=INK)
    above.tick_params(colors=QUIET, labelsize=9)
    made.legend(frameon=False, labelcolor=INK, ncols=4, fontsize=9, loc="outside upper left")
    fits = needed.total <= memory_gb * GB
    left = memory_gb * GB - needed.total
    axes.text(
        *(
            0.01,
            0.06,
            f"fits, {in_gb(left)} left" if fits else f"does not fit: {in_gb(-left)} too much",
        ),
        transform=axes.transAxes,
        color=INK if fits else ORANGE,
        weight="bold",
    )
    return fits


def _gib_of_gb(gigabytes: Any) -> Any:
    return gigabytes * GB / GIB


def _gb_of_gib(gibibytes: Any) -> Any:
    return gibibytes * GIB / GB


def in_gb(size: float) -> str:
    """Return bytes as text, in GB or, if they are fewer, in MB."""
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / 1e6:,.0f} MB"


def _by(part: Callable[..., Any], own: Callable[..., Any]) -> str:
    """Return in words whether `part`, perhaps counted by `using`, is the learner's."""
    return "by the course's function" if unwrap(part) is own else "by your function"


def queue(
    config: ModelConfig,
    bits: float,
    memory_gb: float,
    lengths: Sequence[int],
    working_gb: float = 1.0,
) -> Figure:
    """Draw the KV caches of requests in the order of arrival against the memory there is.

    The requests that the `first_that_fit` in use admits are filled.
    """
    if not lengths:
        raise ValueError("There are no requests; give the tokens of each.")
    memory, working = memory_gb * GB, working_gb * GB
    fit = first_that_fit(config, bits, memory, lengths, working)
    made, axes = figure(10, 1.9)
    begin = (num_parameters(config) * bits / 8 + working) / GB
    axes.barh(0, begin, color=BLUE, height=0.5)
    axes.text(
        begin / 2, 0, "weights,\nworking", color="white", ha="center", va="center", fontsize=8
    )
    for number, length in enumerate(lengths):
        size = kv_bytes_per_token(config) * length / GB
        colour = AMBER if number < fit else "white"
        axes.barh(0, size, left=begin, color=colour, edgecolor=QUIET, height=0.5)
        label = f"{length / 1000:.0f}k"
        axes.text(begin + size / 2, 0, label, ha="center", va="center", color=INK, fontsize=8)
        begin += size
    axes.plot([memory_gb] * 2, [-0.32, 0.3], color=ORANGE, linewidth=2)
    axes.text(memory_gb, 0.31, f"{memory_gb:g} GB", color=ORANGE, ha="center", va="bottom")
    axes.set(
        yticks=[], ylim=(-0.32, 0.45), xlabel="GB; tokens of each request, in the order of arrival"
    )
    axes.set_xlim(0, 1.04 * max(begin, memory_gb))
    by = _by(first_that_fit, cost_model.first_that_fit)
    title(axes, f"{fit} of {len(lengths)} requests run (filled), {by}; the others wait")
    return made


@dataclass(frozen=True)
class Lane:
    """One request: the steps of its arrival and its end, and the tokens computed per step.

    `prefills` are the steps that compute tokens of its prompt.
    """

    arrived: int
    ended: int | None
    computed: dict[int, int]  # step -> tokens
    prefills: frozenset[int]


def lanes(events: Iterable[Event]) -> dict[int, Lane]:
    """Return a lane for each request in the events, by its id; steps count from 0."""
    return _lanes(story(events))


def _lanes(history: Story) -> dict[int, Lane]:
    computed: dict[int, dict[int, int]] = {request: {} for request in history.requests}
    prefills: dict[int, set[int]] = {request: set() for request in history.requests}
    for step, seen in enumerate(history.steps):
        for part in seen.parts:
            computed[part.request][step] = part.end - part.first
            if part.kind == PREFILL:
                prefills[part.request].add(step)
    return {
        request: Lane(
            history.arrived[request][0],
            history.ended.get(request, (None,))[0],
            steps,
            frozenset(prefills[request]),
        )
        for request, steps in computed.items()
    }


def timeline(
    events: Iterable[Event], names: Sequence[str] | None = None, *, in_seconds: bool = False
) -> Figure:
    """Draw lanes of waiting (grey), prefill (amber) and decode (blue), over steps or seconds."""
    history = story(events)
    drawn = _lanes(history)
    if not drawn:
        raise ValueError("There are no requests in these events.")
    origin = min(nanoseconds for _, nanoseconds in history.arrived.values())
    made, axes = figure(10, 0.32 * len(drawn) + 1.4)

    def begins(step: int) -> float:
        return (history.steps[step].started_ns - origin) / 1e9 if in_seconds else step - 0.5

    def lasts(step: int) -> float:
        seen = history.steps[step]
        return 0.96 * (seen.ended_ns - seen.started_ns) / 1e9 if in_seconds else 0.86

    any_waits = False
    for row, (request, lane) in enumerate(drawn.items()):
        step, nanoseconds = history.arrived[request]
        arrived = (nanoseconds - origin) / 1e9 if in_seconds else step - 0.5
        if lane.computed:
            waited = begins(min(lane.computed)) - arrived
            axes.barh(row, waited, left=arrived, color=FAINT, height=0.5)
            any_waits = any_waits or waited > 0
        for is_prefill, colour in ((True, AMBER), (False, BLUE)):
            steps = [each for each in lane.computed if (each in lane.prefills) is is_prefill]
            axes.barh(
                [row] * len(steps),
                [lasts(each) for each in steps],
                left=[begins(each) + (0 if in_seconds else 0.07) for each in steps],
                color=colour,
                height=0.7,
            )
    waits = [("waits", FAINT)] if any_waits else []
    for label, colour in (*waits, ("prefill", AMBER), ("decode", BLUE)):
        axes.barh(0, 0, color=colour, label=label)
    names = names or [f"request {number}" for number in range(1, len(drawn) + 1)]
    axes.set_yticks(range(len(drawn)), names)
    num_steps = max(max(lane.computed, default=0) for lane in drawn.values()) + 1
    seconds = (history.steps[num_steps - 1].ended_ns - origin) / 1e9
    if in_seconds:
        axes.set(xlabel="seconds since the first request arrived", xlim=(0, seconds))
    else:
        axes.set(xlabel="step of the engine", xlim=(-0.5, num_steps - 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=3, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    together = sum(len(lane.computed) for lane in drawn.values()) / num_steps
    took = f" in {seconds:.2f} s" if in_seconds else ""
    title(
        axes,
        f"{num_steps} steps{took}: each reads the weights for {together:.1f} requests on average",
    )
    return made


def num_steps(events: Iterable[Event]) -> int:
    """Return the number of steps: how many times the engine read the weights."""
    return len(story(events))


def step_seconds(events: Iterable[Event]) -> list[float]:
    """Return the seconds that each step took."""
    return [(step.ended_ns - step.started_ns) / 1e9 for step in story(events).steps]


def one_request(events: Iterable[Event], tokens: Sequence[str]) -> Figure:
    """Draw the steps of a single request as long as they took, with the token that each gave."""
    history = story(events)
    if len(history.requests) != 1 or len(history) < 2:
        raise ValueError("Record one request with at least two new tokens.")
    origin = history.arrived[history.requests[0]][1]
    begins = [(step.started_ns - origin) / 1e6 for step in history.steps]
    ends = [(step.ended_ns - origin) / 1e6 for step in history.steps]
    shown = printable(tokens)
    made, axes = figure(10, 2.3)
    for number, (step, begin, end) in enumerate(zip(history.steps, begins, ends, strict=True)):
        is_prefill = bool(step.num_prefill)
        axes.barh(
            0, 0.97 * (end - begin), left=begin, color=AMBER if is_prefill else BLUE, height=1
        )
        said = f"prefill: {step.num_prefill} tokens at once" if is_prefill else ""
        axes.text((begin + end) / 2, 0, said, ha="center", va="center", color=INK)
        axes.text(end, 0.6, shown[number], ha="center", va="bottom", fontsize=8, color=INK)
        axes.plot([end, end], [0.5, 0.6], color=QUIET, linewidth=0.8)
    for first, last, said in (
        (0.0, ends[0], "time to first token (TTFT)"),
        (ends[-2], ends[-1], "inter-token latency (ITL)"),
    ):
        arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (first, -0.75), (last, -0.75), arrowprops=arrow)
        near = {"ha": "center"} if first == 0 else {"ha": "right"}
        middle = (first + last) / 2 if first == 0 else last
        axes.text(middle, -0.92, said, va="top", color=INK, fontsize=9, **near)
    axes.set(xlim=(0, ends[-1] * 1.01), ylim=(-1.3, 1.15), yticks=[], xlabel="milliseconds")
    axes.spines["left"].set_visible(False)
    several = median(last - first for first, last in zip(begins[1:], ends[1:], strict=True))
    title(
        axes,
        f"The first token took {ends[0] / several:.1f} times as long as a later one (median)",
    )
    return made

"""Figures of a memory of slots over time: slots with tokens, empty owned slots, free slots."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minigen_course.ch21_blocks.lesson import Moment, Run
from minigen_course.figures.style import BLUE, CYCLE, FAINT, INK, ORANGE, figure, title

PALE = 0.72  # how pale the colour of an owned, empty slot is: 0 is the full colour, 1 is white
MOST_SLOTS, MOST_STEPS = 520, 900  # more pixels than this are not visible in a figure


def strip_map(run: Run, step: int) -> Figure:
    """Draw the memory in one step as a strip; below it, all steps, with slots upwards.

    Each request has a colour; its pale part is reserved and holds no tokens; white slots are free.
    A `step` after the last step of the run shows the last step.
    """
    step = min(step, len(run.moments) - 1)
    moment = run.moments[step]
    made, (strip, history) = figure(10, 4.0, nrows=2, height_ratios=(1, 5.5))
    for first, size, used, request_id in moment.pieces:
        colour = CYCLE[request_id % len(CYCLE)]
        strip.broken_barh([(first, used)], (0, 1), facecolor=colour)
        strip.broken_barh([(first + used, size - used)], (0, 1), facecolor=_paler(colour))
    history.imshow(
        pixels_of(run),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, len(run.moments), 0, run.num_slots),
    )
    for axes in (strip, history):
        for side in axes.spines.values():
            side.set(visible=True, color=FAINT)
    history.axvline(step + 0.5, color=INK, linewidth=1)
    strip.set(yticks=[], xlabel="slot", xlim=(0, run.num_slots), ylim=(0, 1))
    strip.tick_params(labelsize=8)
    history.set(xlabel="step", ylabel="slot")
    title(strip, _caption(run, step, moment))
    return made


def shares_bars(runs: Mapping[str, Run]) -> Figure:
    """Draw a bar per run with its `Shares`: used, internal, external, remainder."""
    made, axes = figure(10, 0.5 * len(runs) + 1.3)
    looks = {
        "hold tokens": BLUE,
        "owned, empty (internal)": _paler(BLUE),
        "free, scattered (external)": ORANGE,
        "free, too few": FAINT,
    }
    starts = np.zeros(len(runs))
    parts = np.array([run.shares() for run in runs.values()]).T
    for (label, colour), part in zip(looks.items(), parts, strict=True):
        axes.barh(range(len(runs)), part, left=starts, color=colour, label=label, height=0.6)
        _write_shares(axes, starts, part, "white" if colour in (BLUE, ORANGE) else INK)
        starts = starts + part
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the memory's slots, while requests wait")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(
        frameon=False, ncols=4, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1)
    )
    return made


def answer_bars(prompts: list[int], answers: list[int], reserved: int) -> Figure:
    """Draw a bar per request, shortest first: its prompt, its answer, and the slots it reserved."""
    made, axes = figure(10, 3.2)
    order = sorted(range(len(answers)), key=lambda each: prompts[each] + answers[each])
    prompt = np.array([prompts[each] for each in order])
    answer = np.array([answers[each] for each in order])
    places = range(len(order))
    axes.bar(places, reserved + prompt, color=_paler(BLUE), label="reserved")
    axes.bar(places, prompt + answer, color=BLUE, label="answer")
    axes.bar(places, prompt, color=ORANGE, label="prompt")
    axes.set(xticks=[], xlabel="requests, from the shortest to the longest", ylabel="slots")
    axes.legend(
        frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3
    )
    return made


@lru_cache(maxsize=16)
def pixels_of(run: Run) -> np.ndarray:
    """Return a colour for each slot in each step, [slots, steps, 3].

    If there are more than a figure can show, it takes slots and steps at regular intervals.
    """
    every_slot, every_step = -(-run.num_slots // MOST_SLOTS), -(-len(run.moments) // MOST_STEPS)
    moments = run.moments[::every_step]
    pixels = np.full((-(-run.num_slots // every_slot), len(moments), 3), 255, np.uint8)
    colours = [[_bytes(each), _bytes(_paler(each))] for each in CYCLE]
    for step, moment in enumerate(moments):
        for first, size, used, request_id in moment.pieces:
            full, pale = colours[request_id % len(colours)]
            ends = [-(-slot // every_slot) for slot in (first, first + used, first + size)]
            pixels[ends[0] : ends[1], step] = full
            pixels[ends[1] : ends[2], step] = pale
    return pixels


def _caption(run: Run, step: int, moment: Moment) -> str:
    used, owned = moment.num_used, moment.num_owned
    shares = [each / run.num_slots for each in (used, owned - used, run.num_slots - owned)]
    text = (
        f"step {step}: {shares[0]:.0%} of the slots hold tokens, {shares[1]:.0%} are owned and "
        f"empty, {shares[2]:.0%} are free"
    )
    if moment.refused is not None:
        text += f"; the next request asks for {moment.refused} slots"
    return text


def _write_shares(axes: Axes, starts: np.ndarray, part: np.ndarray, colour: str) -> None:
    for row, (start, share) in enumerate(zip(starts, part, strict=True)):
        if share > 0.04:
            axes.text(
                start + share / 2, row, f"{share:.0%}", ha="center", va="center", color=colour
            )


def _bytes(colour: str | tuple[float, float, float]) -> np.ndarray:
    return np.array([round(255 * part) for part in to_rgb(colour)], np.uint8)


def _paler(colour: str) -> tuple[float, float, float]:
    red, green, blue = (part + (1 - part) * PALE for part in to_rgb(colour))
    return red, green, blue

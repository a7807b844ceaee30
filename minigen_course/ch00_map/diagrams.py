"""Diagrams of the map: the journey of a token with its shapes, and the five problems."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PINK,
    QUIET,
    arrow,
    figure,
    printable,
)
from minigen_course.handout.course_files import notebooks_folder


@dataclass(frozen=True)
class Stop:
    """A part of the engine on a token's way: what it does, the chapter, and what leaves it."""

    x: float
    text: str
    chapter: str
    leaves: str
    colour: str = PALE


def journey(config: ModelConfig, text: str, ids: Sequence[int], next_id: int, piece: str) -> Figure:
    """Draw the way from a text to its next token, with the shape of what passes between parts."""
    tokens, hidden = len(ids), config.hidden
    said = f"[{tokens}] integers\n{ids[0]}, {ids[1]}, …"
    stops = (
        Stop(0.0, "text\n" + fill(f"“{text}”", 14), "", "", FAINT),
        Stop(2.35, "tokenizer", "12", said),
        Stop(4.25, "embedding\ntable", "15", f"x [{tokens}, {hidden}]"),
        Stop(7.1, "", "13, 14", f"x [{tokens}, {hidden}]"),
        Stop(
            9.95,
            "norm and\noutput head",
            "15",
            f"logits\n[{config.vocab_size}]\nof the last token",
        ),
        Stop(11.9, "sampler", "16", f"1 integer\n{next_id}"),
        Stop(13.8, "detokenizer", "12", ""),
        Stop(15.5, f"text\n“{printable([piece])[0]}”", "", "", FAINT),
    )
    made, axes = figure(10.6, 3.2)
    axes.set(xlim=(-1.15, 16.25), ylim=(-2.25, 1.75))
    axes.axis("off")
    for stop, after in pairwise(stops):
        start, end = stop.x + _half(stop), after.x - _half(after)
        arrow(axes, (start, 0), (end, 0))
    for stop in stops:
        if not stop.text:
            _layers(axes, stop.x, config)
        else:
            width = 2 * _half(stop)
            _box(axes, stop.x - width / 2, -0.5, width, 1.0, stop.text, stop.colour)
        bottom = -1.05 if not stop.text else -0.5
        if stop.chapter:
            axes.text(
                stop.x,
                bottom - 0.12,
                f"ch. {stop.chapter}",
                ha="center",
                va="top",
                fontsize=8,
                color=QUIET,
            )
        if stop.leaves:
            top = 1.2 if not stop.text else 0.6
            axes.text(
                stop.x + 0.1, top, stop.leaves, ha="center", va="bottom", fontsize=8, color=INK
            )
    axes.plot([11.9, 11.9, 4.25], [-0.95, -1.75, -1.75], color=BLUE, linewidth=1.3)
    arrow(axes, (4.25, -1.78), (4.25, -0.95), color=BLUE)
    axes.text(
        *(8.1, -1.85, "the new token is the next input, until the answer ends"),
        ha="center",
        va="top",
        color=BLUE,
        fontsize=9,
    )
    return made


def _half(stop: Stop) -> float:
    """Return half the width of a stop's box."""
    if not stop.text:
        return 1.55
    return 1.1 if stop.x == 0 else 0.75


def _layers(axes: Axes, x: float, config: ModelConfig) -> None:
    """Draw the layers as a pile, and in the first of them attention and feed-forward."""
    for behind in (2, 1, 0):
        corner = (x - 1.5 + 0.1 * behind, -0.95 + 0.1 * behind)
        axes.add_patch(
            Rectangle(corner, 2.8, 1.9, facecolor=PALE, edgecolor="white", linewidth=1.5)
        )
    axes.text(
        x - 0.1, 0.86, f"{config.num_layers} layers", ha="center", va="top", fontsize=9, color=INK
    )
    _box(axes, x - 1.4, -0.12, 2.6, 0.56, "attention: fetch from\nearlier tokens", "white", 7.5)
    _box(axes, x - 1.4, -0.82, 2.6, 0.56, "feed-forward:\neach token alone", "white", 7.5)


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    colour: str,
    size: float = 8.5,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=colour,
            edgecolor="none",
        )
    )
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK
    )


PROBLEMS = {  # what each of the five asks, and what happens without an answer
    "loading": (
        "How do gigabytes of\nweights get from a file\ninto memory?",
        "minutes\npass before the first word",
    ),
    "compute": (
        "How does a step use\nall that the processor\ncan do?",
        "the model runs\nat a fraction of the speed",
    ),
    "memory": (
        "What must be kept of\neach token, and where?",
        "few users fit,\nor the engine stops",
    ),
    "concurrency": (
        "Which requests share\na step, and which wait?",
        "one user is\nserved at a time",
    ),
    "serving": (
        "How do programs ask,\nand how well are\nthey served?",
        "programs cannot\nuse it, or wait long",
    ),
}
COLOURS = (BLUE, GREEN, AMBER, ORANGE, PINK)
PER_ROW = 4


@cache
def chapters_by_problem() -> Mapping[str, tuple[str, ...]]:
    """Return the numbers of the chapters that solve each problem, as in chapters.toml."""
    listed = tomllib.loads((notebooks_folder() / "chapters.toml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {problem: [] for problem in PROBLEMS}
    for chapter in listed["chapter"]:
        if chapter["card"]["problem"] in found:
            found[chapter["card"]["problem"]].append(chapter["number"])
    return {problem: tuple(numbers) for problem, numbers in found.items()}


def five_problems() -> Figure:
    """Draw the five problems of an engine: what each asks, what it costs, and its chapters."""
    made, axes = figure(10.4, 3.1)
    axes.set(xlim=(-0.02, 10.02), ylim=(0, 3.4))
    axes.axis("off")
    for column, (name, (asks, otherwise)) in enumerate(PROBLEMS.items()):
        left, middle = 2.01 * column, 2.01 * column + 0.96
        axes.add_patch(Rectangle((left, 2.85), 1.92, 0.5, color=COLOURS[column]))
        axes.text(
            middle,
            3.1,
            f"{column + 1} {name}",
            ha="center",
            va="center",
            color=INK if COLOURS[column] in (AMBER, PINK) else "white",
            weight="bold",
        )
        axes.add_patch(Rectangle((left, 1.75), 1.92, 1.05, color=PALE))
        axes.text(middle, 2.28, asks, ha="center", va="center", fontsize=8.5, color=INK)
        axes.add_patch(Rectangle((left, 1.0), 1.92, 0.7, color=FAINT))
        axes.text(
            middle,
            1.35,
            f"otherwise {otherwise}",
            ha="center",
            va="center",
            fontsize=8.5,
            color=INK,
        )
        for place, number in enumerate(chapters_by_problem()[name]):
            x, y = left + 0.48 * (place % PER_ROW), 0.56 - 0.44 * (place // PER_ROW)
            axes.add_patch(Rectangle((x + 0.02, y), 0.44, 0.37, color=COLOURS[column], alpha=0.25))
            axes.text(x + 0.24, y + 0.18, number, ha="center", va="center", fontsize=9, color=INK)
    return made

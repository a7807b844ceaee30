"""Gantt charts of runs, over steps or time: the requests' states, and the steps' tokens."""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minigen.trace.events import Event
from minigen_course.figures.style import AMBER, BLUE, FAINT, INK, PINK, QUIET, SKY, figure, title
from minigen_course.figures.trace_views import (
    DECODE,
    PAUSED,
    PREEMPTED,
    PREFILL,
    QUEUED,
    Story,
    story,
)

COLOURS = {QUEUED: FAINT, PREFILL: AMBER, DECODE: BLUE, PREEMPTED: PINK, PAUSED: SKY}
WORDS = {
    QUEUED: "queued",
    PREFILL: "prefill",
    DECODE: "decode",
    PREEMPTED: "preempted",
    PAUSED: "left out",
}
MOST_TICKS = 700  # of tokens; if there are more, only the bars are drawn

Span = tuple[float, float]  # start and length


def gantt(
    runs: Mapping[str, Iterable[Event] | Story],
    step: int | None = None,
    *,
    by: str = "steps",
    names: list[str] | None = None,
    budget: int | None = None,
    num_blocks: int | None = None,
) -> Figure:
    """Draw a row for each request, and below them the tokens of each step and the blocks in use.

    Each run has a column under its name, all on the same scale; `by` is "steps" or "seconds". Runs
    are drawn up to `step` (in seconds: up to the moment at which the first run ends that step), or
    to the end. Ticks are output tokens, dots are ends of requests. `budget` and `num_blocks` are
    drawn as limits. Raises `ValueError` if `by` is something else.
    """
    if by not in ("steps", "seconds"):
        raise ValueError(f"by must be steps or seconds, not {by!r}.")
    stories = {name: run if isinstance(run, Story) else story(run) for name, run in runs.items()}
    num_rows = max(1, *(len(each.requests) for each in stories.values()))  # 1 if none arrived
    shown = names or [f"request {number + 1}" for number in range(num_rows)]
    made, grid = _axes(len(stories), 0.22 * num_rows + 0.3, 0.3 + 0.075 * max(map(len, shown)))
    scales = [_Scale(each, by) for each in stories.values()]
    end = max(scale.end for scale in scales)
    now = end if step is None else scales[0].after(step)
    for (name, each), column, scale in zip(stories.items(), grid.T, scales, strict=True):
        _draw_run(column, name, each, scale, scale.count(now))
    top = grid[0, 0]
    top.set_yticks(range(num_rows), shown[:num_rows])
    top.set_ylim(num_rows - 0.4, -0.6)
    top.set_xlim(0, end)
    _label(grid, by, budget, num_blocks)
    found = {kind for each in stories.values() for kind in _kinds(each)}
    kinds = sorted(found, key=list(WORDS).index)
    made.legend(
        handles=[Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds],
        loc="lower center",
        ncols=len(kinds),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return made


def _axes(num_columns: int, rows_height: float, left: float) -> tuple[Figure, Any]:
    """Return columns of three axes, placed in inches, because a layout engine takes too long."""
    above, below, between, low = 0.35, 0.85, 0.16, 0.7
    width = left + 4.6 * num_columns
    height = above + rows_height + 2 * (between + low) + below
    made, grid = figure(
        *(width, height),
        nrows=3,
        ncols=num_columns,
        squeeze=False,
        sharex=True,
        sharey="row",
        height_ratios=(rows_height, low, low),
    )
    made.set_layout_engine(None)
    made.subplots_adjust(
        left=left / width,
        right=1 - 0.15 / width,
        top=1 - above / height,
        bottom=below / height,
        hspace=3 * between / (rows_height + 2 * low),
        wspace=0.05,
    )
    return made, grid


class _Scale:
    """The positions of steps and moments on the axis."""

    def __init__(self, run: Story, by: str):
        self.steps, self.by = run.steps, by
        moments = [ns for _, ns in run.arrived.values()]
        self.origin = min(moments, default=0)

    def span(self, number: int) -> Span:
        """Return the span of a step."""
        if self.by == "steps":
            return number, 1.0
        started, ended = self.steps[number].started_ns, self.steps[number].ended_ns
        return (started - self.origin) / 1e9, (ended - started) / 1e9

    def at(self, moment: tuple[int, int]) -> float:
        """Return the position of a moment: (number of steps that had ended, time in ns)."""
        return moment[0] if self.by == "steps" else (moment[1] - self.origin) / 1e9

    def after(self, number: int) -> float:
        """Return the position of a step's end, or of the last step's if there are fewer."""
        return sum(self.span(min(number, len(self.steps) - 1))) if self.steps else 1.0

    @property
    def end(self) -> float:
        """The position of the last step's end; 1 if there is no step."""
        return self.after(len(self.steps))

    def count(self, now: float) -> int:
        """Return how many steps have ended by a position."""
        return sum(self.after(number) <= now + 1e-9 for number in range(len(self.steps)))


def _draw_run(column: Any, name: str, run: Story, scale: _Scale, count: int) -> None:
    now = scale.after(count - 1) if count else 0.0
    _draw_rows(column[0], run, scale, count)
    spans, seen = [scale.span(number) for number in range(count)], run.steps[:count]
    decodes = [each.num_decode for each in seen]
    tokens = [each.num_decode + each.num_prefill for each in seen]
    _fill(column[1], spans, tokens, AMBER)
    _fill(column[1], spans, decodes, BLUE)
    _fill(column[2], spans, [each.num_blocks for each in seen], QUIET)
    running = sum(len(each.parts) for each in seen)
    mean = running / count if count else 0.0
    until = f", {now:.2f} s" if scale.by == "seconds" else ""
    title(column[0], f"{name}: {count} steps{until}, {mean:.1f} run in each")


def _draw_rows(axes: Axes, run: Story, scale: _Scale, count: int) -> None:
    rows = {request: row for row, request in enumerate(run.requests)}
    spans: dict[tuple[int, str], list[Span]] = {}
    ticks: list[tuple[float, int]] = []
    for number, seen in enumerate(run.steps[:count]):
        begin, length = scale.span(number)
        for part in seen.parts:
            spans.setdefault((rows[part.request], part.kind), []).append((begin, length))
            if part.gives:
                ticks.append((begin + length, rows[part.request]))
        for request, kind in seen.others.items():
            came = scale.at(run.arrived[request])
            previous = sum(scale.span(number - 1)) if number else 0.0
            since = max(came, previous)
            spans.setdefault((rows[request], kind), []).append((since, begin + length - since))
    for kind, colour in COLOURS.items():
        bars = [
            _bar(row, 0.36 if kind in (PREFILL, DECODE) else 0.17, span)
            for (row, each), found in spans.items()
            for span in (found if kind == PREFILL else _joined(found))
            if each == kind
        ]
        edge = "white" if kind == PREFILL else "none"  # so that its chunks can be distinguished
        axes.add_collection(
            PolyCollection(bars, facecolors=colour, edgecolors=edge, linewidths=0.6), autolim=False
        )
    if 0 < len(ticks) <= MOST_TICKS:
        x, y = zip(*ticks, strict=True)
        axes.plot(x, y, "|", color="white", markersize=4.5, markeredgewidth=0.7)
    ends = [
        (scale.at((run.ended[request][0] + 1, run.ended[request][1])), rows[request])
        for request in run.ended
        if run.ended[request][0] < count
    ]
    if ends:
        x, y = zip(*ends, strict=True)
        axes.plot(x, y, "o", color=INK, markersize=3.5, clip_on=False)


def _bar(row: int, half: float, span: Span) -> list[tuple[float, float]]:
    begin, end = span[0], sum(span)
    top, bottom = row - half, row + half
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _joined(spans: list[Span]) -> list[Span]:
    """Join spans that touch."""
    joined: list[Span] = []
    for begin, length in spans:
        if joined and abs(sum(joined[-1]) - begin) < 1e-9:
            joined[-1] = (joined[-1][0], begin + length - joined[-1][0])
        else:
            joined.append((begin, length))
    return joined


def _fill(axes: Axes, spans: list[Span], heights: list[int], colour: str) -> None:
    """Draw a bar for each span, all as one shape."""
    xs, tops = [0.0], [0]
    for (begin, length), height in zip(spans, heights, strict=True):
        if begin > xs[-1]:  # nothing runs in between
            xs += [xs[-1], begin]
            tops += [0, 0]
        xs += [begin, begin + length]
        tops += [height, height]
    axes.fill_between(xs, tops, color=colour, linewidth=0)


def _label(grid: Any, by: str, budget: int | None, num_blocks: int | None) -> None:
    for axes_row, label, limit in ((grid[1], "tokens", budget), (grid[2], "blocks", num_blocks)):
        axes_row[0].set_ylabel(label)
        if limit is not None:
            for axes in axes_row:
                axes.axhline(limit, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
            axes_row[0].set_ylim(0, 1.08 * limit)
    for axes in grid[2]:
        axes.set_xlabel("step of the engine" if by == "steps" else "seconds")


def _kinds(run: Story) -> set[str]:
    parts = {part.kind for seen in run.steps for part in seen.parts}
    return parts | {kind for seen in run.steps for kind in seen.others.values()}

"""Every message of a step of a split model, as rank 0 sends it, over time."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from minigen.parallel.comm import MESSAGES
from minigen.trace import Event, EventKind
from minigen.viz.style import BLUE, FAINT, GREEN, INK, ORANGE, QUIET, figure, title

_COLOURS = {
    EventKind.BROADCAST: GREEN,
    EventKind.ALL_REDUCED: ORANGE,
    EventKind.ALL_GATHERED: BLUE,
}
_NAMES = {
    EventKind.BROADCAST: "broadcast: what to do",
    EventKind.ALL_REDUCED: "all-reduce: sums",
    EventKind.ALL_GATHERED: "all-gather: logits",
}


def messages_of_steps(events: Sequence[Event]) -> list[list[Event]]:
    """The messages of each step, in order: a step begins with rank 0's first broadcast."""
    steps: list[list[Event]] = []
    before = None
    for event in (each for each in events if each.kind in MESSAGES):
        if event.kind is EventKind.BROADCAST and before is not EventKind.BROADCAST:
            steps.append([])
        if steps:
            steps[-1].append(event)
        before = event.kind
    return steps


def messages_in_time(messages: Sequence[Event]) -> Figure:
    """A lane for each kind of message; a bar is as long as rank 0 was in it, waiting included.

    `messages` are those of one step. Between the bars the rank computes.
    """
    begun = [each.time_ns - each.counts["duration_ns"] for each in messages]
    first = min(begun)
    made, axes = figure(9, 2.4)
    for lane, (kind, name) in enumerate(_NAMES.items()):
        pairs = zip(begun, messages, strict=True)
        own = [(start, each) for start, each in pairs if each.kind is kind]
        bars = [((start - first) / 1e6, each.counts["duration_ns"] / 1e6) for start, each in own]
        axes.axhline(lane, color=FAINT, linewidth=1, zorder=0)
        axes.broken_barh(bars, (lane - 0.3, 0.6), color=_COLOURS[kind], linewidth=0.3)
        num_bytes = sum(each.counts["bytes"] for _, each in own)
        text = f"{name}\n{len(own)} sent, {_bytes(num_bytes)}"
        left = axes.get_yaxis_transform()
        axes.text(-0.01, lane, text, color=INK, size=9, ha="right", va="center", transform=left)
    axes.set(yticks=[], ylim=(len(_NAMES) - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms since the step's first message", color=QUIET)
    title(axes, f"Rank 0's {len(messages)} messages of one step")
    return made


def _bytes(count: int) -> str:
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"

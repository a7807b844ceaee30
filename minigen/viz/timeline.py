"""Who was computed when: a lane for each request, from an engine's own events."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from minigen.trace import Event, EventKind
from minigen.viz.style import AMBER, BLUE, FAINT, INK, figure, title


@dataclass
class Lane:
    """One request by steps: when it came, when it ended, and tokens computed in each step."""

    arrived: int
    ended: int | None = None
    computed: dict[int, int] = field(default_factory=dict)  # step -> tokens


def lanes(events: Iterable[Event]) -> dict[int, Lane]:
    """A lane for each request that the events name, by its id; steps count from 0."""
    found: dict[int, Lane] = {}
    step = 0
    for event in events:
        if event.kind is EventKind.STEP:
            step += 1
        if event.sequence_id is None:
            continue
        if event.kind is EventKind.QUEUED:
            found[event.sequence_id] = Lane(step)
        lane = found.get(event.sequence_id)
        if lane is None:
            continue
        if event.kind is EventKind.SCHEDULED:
            lane.computed[step] = event.counts["tokens"]
        elif event.kind in (EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED):
            lane.ended = step
    return found


def timeline(events: Iterable[Event], names: list[str] | None = None) -> Figure:
    """Lanes of waiting (pale), prefill (amber) and decode (blue), one column for each step."""
    drawn = lanes(events)
    if not drawn:
        raise ValueError("There are no requests in these events.")
    last = max(max(lane.computed, default=0) for lane in drawn.values()) + 1
    made, axes = figure(10, 0.32 * len(drawn) + 1.4)
    for row, lane in enumerate(drawn.values()):
        begun = min(lane.computed, default=last)
        axes.barh(row, begun - lane.arrived, left=lane.arrived, color=FAINT, height=0.5)
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

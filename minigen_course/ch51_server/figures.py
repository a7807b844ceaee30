"""A request's path, answers to health checks, events on the wire, tokens that no client read."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    PALE,
    QUIET,
    arrow,
    figure,
    title,
)

Look = tuple[float, float]  # when a look at /health was sent and when it was answered, in seconds
HEIGHT, WIDTH = 0.74, 1.9
LANES = ("client", "event loop\n(one thread)", "queue", "engine thread")
PATH = (  # x of its left edge, lane, what happens, what waits here
    (0.0, 0, "POST, JSON body", "waits for the first byte"),
    (2.1, 1, "check the JSON,\nencode the text", "a coroutine waits\nfor the whole body"),
    (4.2, 2, "commands:\nadd, abort", "wait for the current\nstep to end"),
    (
        6.3,
        3,
        "scheduler: waiting\nor running",
        "waits for a place in\nthe batch, for blocks",
    ),
    (8.4, 3, "step of the batch,\ntokens to text", "the thread waits only\nif there is no work"),
    (10.5, 2, "outbox: all tokens\nof the step", "waits for the loop,\nwhich is woken once"),
    (12.6, 1, "token to event,\nsend", "a coroutine waits\nfor the next token"),
    (14.7, 0, "data: {...}", "reads while the\nrest is written"),
)


def request_path() -> Figure:
    """Draw the path of one request, from the client to the engine and back, and where it waits."""
    made, axes = figure(11.5, 4.6)
    for lane, name in enumerate(LANES):
        axes.axhline(-1.6 * lane - 1.05, color=FAINT, linewidth=1)
        axes.text(-0.25, -1.6 * lane, name, ha="right", va="center", color=INK, fontsize=9)
    for x, lane, what, waits in PATH:
        y = -1.6 * lane
        colour = PALE if lane != 3 else "#d5efe6"
        axes.add_patch(Rectangle((x, y - HEIGHT / 2), WIDTH, HEIGHT, facecolor=colour))
        axes.text(x + WIDTH / 2, y, what, ha="center", va="center", color=INK, fontsize=8)
        axes.text(
            *(x + WIDTH / 2, y - HEIGHT / 2 - 0.06, waits),
            **{"ha": "center", "va": "top", "color": "#8a5a00", "fontsize": 7, "style": "italic"},
        )
    for (x, lane, *_), (to_x, to_lane, *_) in pairwise(PATH):
        arrow(axes, (x + WIDTH, -1.6 * lane), (to_x, -1.6 * to_lane), color=BLUE)
    back, there = PATH[4][0] + WIDTH / 2, PATH[3][0] + WIDTH / 2
    top = -1.6 * 3 + HEIGHT / 2
    loop = {"arrowstyle": "-|>", "color": GREEN, "connectionstyle": "arc3,rad=0.35"}
    axes.annotate("", (there, top), (back, top), arrowprops=loop)
    axes.text(
        *((back + there) / 2, top + 0.34, "next step"),
        **{"ha": "center", "va": "bottom", "color": GREEN, "fontsize": 8},
    )
    axes.set(xlim=(-2.2, 16.8), ylim=(-1.6 * 3 - 1.0, 0.6))
    axes.set_axis_off()
    title(axes, "One request: the event loop passes it on, one thread computes for all")
    return made


def health_checks(servers: Mapping[str, Sequence[Look]]) -> Figure:
    """Draw a row per server, with a bar per look at /health from its request to its answer.

    Raises `ValueError` for a server without any.
    """
    if not all(servers.values()):
        raise ValueError("A server has no look at /health; give each at least one.")
    made, axes = figure(10, 0.75 * len(servers) + 1.3)
    end = max(after for looks in servers.values() for _, after in looks)
    for row, looks in enumerate(servers.values()):
        longest = max(after - before for before, after in looks)
        for before, after in looks:
            slow = after - before == longest
            colour = AMBER if slow else BLUE
            axes.barh(row, after - before, left=before, height=0.5, color=colour)
        axes.text(
            *(1.01 * end, row, f"answers: {len(looks)},\nlongest {1e3 * longest:.0f} ms"),
            **{"va": "center", "color": QUIET, "fontsize": 9},
        )
    axes.set_yticks(range(len(servers)), list(servers))
    axes.set(xlabel="seconds after the first look", xlim=(0, 1.2 * end))
    axes.invert_yaxis()
    slowest = max(after - before for looks in servers.values() for before, after in looks)
    title(axes, f"Looks at /health during one answer: the slowest took {1e3 * slowest:.0f} ms")
    return made


def arrivals(streams: Sequence[Sequence[float]]) -> Figure:
    """Draw a row per stream, with a tick per event with text, in seconds after the request.

    Raises `ValueError` if a stream has no such event.
    """
    if not streams or not all(streams):
        raise ValueError("A stream has no events with text; give each stream at least one time.")
    made, axes = figure(10, 0.3 * len(streams) + 1.5)
    for row, times in enumerate(streams):
        axes.barh(row, times[0], color=FAINT, height=0.5, label="" if row else "nothing yet")
        axes.eventplot(
            times,
            lineoffsets=row,
            linelengths=0.75,
            colors=BLUE,
            linewidths=1.3,
            label="" if row else "an event with text",
        )
    axes.set_yticks(range(len(streams)), [f"client {row + 1}" for row in range(len(streams))])
    axes.set(xlabel="seconds after all had asked", xlim=(0, None))
    axes.set_ylim(len(streams) - 0.3, -0.7)
    axes.legend(
        frameon=False, ncols=2, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    events = sum(map(len, streams)) / max(times[-1] for times in streams)
    title(axes, f"{len(streams)} streams, {events:.0f} events per second")
    return made


def tokens_after_disconnect(tokens: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw a bar per way to serve: tokens that the client read, and tokens computed in vain."""
    made, axes = figure(9, 0.6 * len(tokens) + 1.4)
    for row, (sent, computed) in enumerate(tokens.values()):
        axes.barh(row, sent, color=BLUE, height=0.55, label="" if row else "read by the client")
        axes.barh(
            row,
            computed - sent,
            left=sent,
            color=AMBER,
            height=0.55,
            label="" if row else "computed, but not read",
        )
    axes.set_yticks(range(len(tokens)), list(tokens))
    axes.set(xlabel="tokens")
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=2, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    most = max(computed - sent for sent, computed in tokens.values())
    title(axes, f"Up to {most} tokens were computed for no one")
    return made

"""Streams on the wire: when each event reached its client, and tokens that no client read."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minigen_course.figures.style import AMBER, BLUE, FAINT, INK, figure, title


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
            label="" if row else "computed after it went away",
        )
    axes.set_yticks(range(len(tokens)), list(tokens))
    axes.set(xlabel="tokens")
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=2, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    title(axes, "The client went away")
    return made

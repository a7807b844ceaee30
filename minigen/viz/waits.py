"""Where each request's time went: waiting, reading its prompt, writing; from an engine's events."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from minigen.summaries import RequestSummary
from minigen.viz.style import AMBER, BLUE, FAINT, INK, figure, title

PARTS = (
    ("queued", "queued_ms", FAINT),
    ("prefill", "prefill_ms", AMBER),
    ("decode", "decode_ms", BLUE),
)


def waits(summaries: Sequence[RequestSummary], names: Sequence[str]) -> Figure:
    """A bar for each request: milliseconds queued, in prefill, in decode.

    Raises `ValueError` for a request that has not come to its end.
    """
    made, axes = figure(10, 0.26 * len(summaries) + 1.3)
    for row, each in enumerate(summaries):
        begun = 0.0
        for label, key, colour in PARTS:
            took = getattr(each, key)
            if took is None:
                raise ValueError(f"Request {each.sequence_id} has not come to its end.")
            axes.barh(row, took, left=begun, color=colour, height=0.7, label="" if row else label)
            begun += took
    axes.set_yticks(range(len(summaries)), names)
    axes.set(xlabel="milliseconds after it came")
    axes.invert_yaxis()
    axes.legend(
        frameon=False, ncols=3, labelcolor=INK, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
    )
    title(axes, f"Where the time of {len(summaries)} requests went")
    return made

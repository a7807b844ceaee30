"""The batches of ranks that each schedule for themselves, step by step, one below the other."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.teach.rank_schedulers import Batch, Parted, message_size
from minigen.viz.style import BLUE, INK, ORANGE, QUIET, SKY, figure, title

MOST_STEPS = 24


def rank_batches(parted: Parted) -> Figure:
    """A row for each request on each rank, a column for each step, with the tokens computed.

    Blue is a decode step, sky a prompt, or what is computed anew. Framed in orange are the places
    where ranks differ; the window ends a few steps after the first of them.
    """
    step = parted.first_difference
    end = len(parted.batches) if step is None else min(len(parted.batches), step + 6)
    steps = range(max(0, end - MOST_STEPS), end)
    num_ranks, num_requests = len(parted.answers), len(parted.answers[0])
    made, every = figure(
        9, 0.6 + 0.3 * num_ranks * (num_requests + 1.6), nrows=num_ranks, sharex=True, squeeze=False
    )
    for rank, axes in enumerate(every.flat):
        _rows(axes, parted.batches, rank, steps, num_requests)
        axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", weight="bold")
    every.flat[-1].set_xlabel("step")
    title(every.flat[0], _told(parted))
    return made


def _told(parted: Parted) -> str:
    step = parted.first_difference
    if step is None:
        return "All ranks run the same batches"
    return f"The ranks run different batches from step {step} on" + (
        ", and then wait for ever" if parted.stuck else ""
    )


def _rows(
    axes: Axes, batches: Sequence[Sequence[Batch]], rank: int, steps: range, num_requests: int
) -> None:
    for step in steps:
        batch = batches[step][rank]
        for request in range(num_requests):
            tokens = batch.get(request, 0)
            alike = all(each.get(request, 0) == tokens for each in batches[step])
            if tokens:
                color, ink = (BLUE, "white") if tokens == 1 else (SKY, INK)
                axes.add_patch(Rectangle((step - 0.46, request - 0.4), 0.92, 0.8, color=color))
                axes.text(step, request, str(tokens), color=ink, ha="center", va="center", size=8)
            if not alike:
                frame = Rectangle((step - 0.46, request - 0.4), 0.92, 0.8, fill=False)
                frame.set(edgecolor=ORANGE, linewidth=2)
                axes.add_patch(frame)
        axes.text(step, num_requests, str(message_size(batch)), color=QUIET, ha="center", size=8)
    axes.set(xlim=(steps[0] - 0.6, steps[-1] + 0.6), ylim=(num_requests + 0.5, -0.6))
    axes.set_yticks(range(num_requests + 1))
    axes.set_yticklabels([*(f"request {each}" for each in range(num_requests)), "sent: tokens"])
    axes.set_xticks(list(steps))

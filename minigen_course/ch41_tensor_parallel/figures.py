"""The shards of a split model, each rank's batches step by step, every message, and the cost."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.checkpoint.model_config import ModelConfig
from minigen.parallel.sharding import PLAN, Split, span
from minigen.trace.events import Event
from minigen.trace.timeline import Timeline
from minigen_course.ch41_tensor_parallel.lesson import (
    Batch,
    Link,
    RankRuns,
    message_size,
    split_step_seconds,
)
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    SKY,
    figure,
    title,
)
from minigen_course.lab.cost_model import Machine, ModelShape

# Rows of the drawing, from the tokens to the logits: a module with its name and how many matrices
# it stands for, or a message with its text.
_ROWS: tuple[tuple[str, str, int], ...] = (
    ("embed_tokens", "embedding", 1),
    ("all-reduce", "all-reduce of [tokens, {hidden}]: one rank's vector, zeros of all others", 0),
    ("self_attn.q_proj", "queries", 1),
    ("self_attn.k_proj", "keys, values", 2),
    ("self_attn.o_proj", "out", 1),
    ("all-reduce", "all-reduce of [tokens, {hidden}]: sums over all heads", 0),
    ("mlp.up_proj", "gate, up", 2),
    ("mlp.down_proj", "down", 1),
    ("all-reduce", "all-reduce of [tokens, {hidden}]: sums over the whole ffn", 0),
    ("lm_head", "head", 1),
    ("all-gather", "all-gather of [rows, {share}] each: logits side by side", 0),
)
_IN_LAYER = range(2, 9)


def who_holds_what(config: ModelConfig, num_ranks: int) -> Figure:
    """Draw a column per rank, a row per module, and a bar across for each message.

    Column splits are blue, row splits sky. A box says which outputs or inputs the rank has; the
    shape at the left is that of rank 0's share as it is stored, [outputs, inputs].
    """
    made, axes = figure(max(8.4, 0.98 * (num_ranks + 2.5)), 5.8)
    share = len(span(config, "vocab", 0, num_ranks))
    for row, (module, template, num_matrices) in enumerate(_ROWS):
        words = template.format(hidden=config.hidden, share=share)
        if module not in PLAN:
            axes.add_patch(Rectangle((0, row + 0.2), num_ranks, 0.5, color=ORANGE, alpha=0.85))
            axes.text(
                num_ranks / 2, row + 0.45, words, ha="center", va="center", color="white", size=9
            )
            continue
        axes.text(-0.08, row + 0.27, words, ha="right", va="center", color=INK)
        shape = f"{num_matrices} × " * (num_matrices > 1) + _shape(config, module, num_ranks)
        axes.text(-0.08, row + 0.65, shape, ha="right", va="center", color=QUIET, size=8)
        for rank in range(num_ranks):
            _box(axes, config, module, rank, num_ranks, row)
    first, last = _IN_LAYER[0], _IN_LAYER[-1]
    axes.plot([num_ranks + 0.12] * 2, [first + 0.1, last + 0.8], color=QUIET)
    middle = (first + last + 1) / 2
    text = f"in each of\n{config.num_layers} layers"
    axes.text(num_ranks + 0.2, middle, text, color=QUIET, va="center", fontsize=9)
    left = -0.6 - 0.12 * num_ranks  # room for the shapes, which are as wide on any figure
    axes.set(xlim=(left, num_ranks + 0.9), ylim=(len(_ROWS), -0.9), xticks=[], yticks=[])
    for rank in range(num_ranks):
        axes.text(rank + 0.5, -0.3, f"rank {rank}", ha="center", color=INK, weight="bold")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    title(axes, f"Who holds what on {num_ranks} ranks, and when they talk")
    return made


def _shape(config: ModelConfig, module: str, num_ranks: int) -> str:
    """Return the shape of rank 0's share of a stored matrix, [outputs, inputs]."""
    split, axis = PLAN[module]
    part = len(span(config, axis, 0, num_ranks))
    sides = (part, config.hidden) if split is Split.COLUMN else (config.hidden, part)
    return f"[{sides[0]}, {sides[1]}]"


def _box(axes: Axes, config: ModelConfig, module: str, rank: int, num_ranks: int, row: int) -> None:
    split, axis = PLAN[module]
    part = span(config, axis, rank, num_ranks)
    column = split is Split.COLUMN
    color, ink = (BLUE, "white") if column else (SKY, INK)
    axes.add_patch(Rectangle((rank + 0.04, row + 0.08), 0.92, 0.74, color=color))
    unit = config.head_dim if axis.endswith("heads") else 1
    what = {"vocab": "tokens", "ffn": "units"}.get(axis, "heads")
    first, last = part.start // unit, part.stop // unit - 1
    numbers = f"{what}\n{first:,}-{last:,}" if last > first else f"{what[:-1]}\n{first:,}"
    size = 8 if num_ranks < 6 else 7
    axes.text(rank + 0.5, row + 0.45, numbers, ha="center", va="center", color=ink, size=size)


def speed_ups(
    shape: ModelShape,
    machine: Machine,
    links: Sequence[Link],
    batch: int = 1,
    context: int = 1024,
    ranks: Sequence[int] = (1, 2, 4, 8),
) -> Figure:
    """Draw the speed-up of a decode step by number of machines, a line for each kind of link."""
    made, axes = figure(8, 4)
    axes.plot(ranks, ranks, color=FAINT, linewidth=2)
    axes.text(ranks[-1], ranks[-1], " no messages", color=QUIET, va="center", fontsize=9)
    for number, (link, color) in enumerate(zip(links, CYCLE, strict=False)):
        found = allowed(shape, machine, link, ranks, batch, context)
        style = {"color": color, "marker": "o", "markersize": 8 - 2 * number, "label": link.name}
        axes.plot(ranks, list(found.values()), linestyle=("-", "-", "--", "-")[number % 4], **style)
    axes.axhline(1, color=FAINT, linewidth=1)
    axes.set(xscale="log", xticks=list(ranks), xticklabels=[str(each) for each in ranks])
    axes.set(xlim=(ranks[0] * 0.9, ranks[-1] * 1.5), ylim=(0, ranks[-1] * 1.05))
    axes.minorticks_off()
    axes.set_xlabel("ranks (log scale)")
    axes.set_ylabel("times as fast as one")
    axes.legend(frameon=False, loc="upper left")
    title(
        axes,
        f"Decode steps of {batch} sequence{'s' * (batch > 1)} on several {machine.name}: "
        "what messages leave of the gain",
    )
    return made


def allowed(
    shape: ModelShape,
    machine: Machine,
    link: Link,
    ranks: Sequence[int],
    batch: int,
    context: int,
) -> Mapping[int, float]:
    """Return the speed-up for each number of ranks, one machine per rank."""
    alone = sum(split_step_seconds(shape, machine, link, 1, batch, context))
    return {
        each: alone / sum(split_step_seconds(shape, machine, link, each, batch, context))
        for each in ranks
    }


def message_times(
    measured: Mapping[int, Mapping[int, float]], fitted: Mapping[int, Link]
) -> Figure:
    """Draw the seconds of an all-reduce by its bytes: as measured, and as a line with two terms.

    Both arguments are by number of ranks. The first number of ranks has filled points, and each of
    the others larger open circles, so that equal times hide none of them.
    """
    made, axes = figure(8, 4)
    for number, (num_ranks, times) in enumerate(measured.items()):
        sizes, color = list(times), CYCLE[number]
        style = {"color": color, "markersize": 6 + 4 * number, "markeredgewidth": 1.5}
        style |= {"fillstyle": "none" if number else "full", "marker": "o", "linestyle": ""}
        axes.plot(sizes, [1e6 * each for each in times.values()], **style)
        between = np.geomspace(min(sizes), max(sizes), 60)
        line = [1e6 * fitted[num_ranks].ring_seconds(each, num_ranks) for each in between]
        axes.plot(between, line, color=color, label=f"{num_ranks} ranks")
    axes.set(xscale="log", yscale="log")
    axes.tick_params(which="both", colors=QUIET, labelsize=9)
    axes.set_xlabel("bytes of the tensor (log scale)")
    axes.set_ylabel("µs (log scale)")
    axes.legend(frameon=False, loc="upper left")
    title(axes, "An all-reduce: small ones cost their turns, large ones their bytes")
    return made


MOST_STEPS = 24


def rank_batches(runs: RankRuns) -> Figure:
    """Draw a row for each request on each rank, a column for each step, with the tokens computed.

    Blue is a decode step, sky a prefill or a recomputation. Orange frames mark the places where
    ranks differ; the window ends a few steps after the first of them.
    """
    step = runs.first_difference
    end = len(runs.batches) if step is None else min(len(runs.batches), step + 6)
    steps = range(max(0, end - MOST_STEPS), end)
    num_ranks, num_requests = len(runs.answers), len(runs.answers[0])
    made, every = figure(
        9, 0.6 + 0.3 * num_ranks * (num_requests + 1.6), nrows=num_ranks, sharex=True, squeeze=False
    )
    for rank, axes in enumerate(every.flat):
        _rows(axes, runs.batches, rank, steps, num_requests)
        axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", weight="bold")
    every.flat[-1].set_xlabel("step")
    title(every.flat[0], _outcome(runs))
    return made


def _outcome(runs: RankRuns) -> str:
    step = runs.first_difference
    if step is None:
        return "All ranks run the same batches"
    return f"The ranks run different batches from step {step} on" + (
        ", and then wait for ever" if runs.stuck else ""
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


_LANES = {  # by the kind of message
    "broadcast": ("broadcast: what to do", GREEN),
    "all_reduced": ("all-reduce: sums", ORANGE),
    "all_gathered": ("all-gather: logits", BLUE),
}


def messages_of_steps(events: Sequence[Event]) -> list[list[Event]]:
    """Return the messages of each step, in order; a step starts with rank 0's first broadcast."""
    steps, before = list[list[Event]](), ""

    def add(message: Event) -> None:
        nonlocal before
        kind = message.kind.value
        if kind == "broadcast" != before:
            steps.append([])
        if steps:
            steps[-1].append(message)
        before = kind

    Timeline(on_message=add).replay(events)
    return steps


def messages_in_time(messages: Sequence[Event]) -> Figure:
    """Draw a lane for each kind of message; a bar is rank 0's time: waiting, then moving.

    `messages` are those of one step. Between the bars the rank computes. The shortest message of a
    kind is taken as what moving needs at most; the rest of a bar is waiting, and is drawn pale.
    """
    started = [each.time_ns - each.counts["duration_ns"] for each in messages]
    first = min(started)
    made, axes = figure(9, 2.4)
    for lane, (kind, (name, colour)) in enumerate(_LANES.items()):
        pairs = zip(started, messages, strict=True)
        own = [(start, each) for start, each in pairs if each.kind.value == kind]
        bars = [((start - first) / 1e6, each.counts["duration_ns"] / 1e6) for start, each in own]
        axes.axhline(lane, color=FAINT, linewidth=1, zorder=0)
        moving = min((width for _, width in bars), default=0.0)
        ends = [(start + width - moving, moving) for start, width in bars]
        axes.broken_barh(bars, (lane - 0.3, 0.6), color=colour, alpha=0.35, linewidth=0)
        axes.broken_barh(ends, (lane - 0.3, 0.6), color=colour, linewidth=0.5)
        num_bytes = sum(each.counts["bytes"] for _, each in own)
        text = f"{name}\n{len(own)} sent, {_bytes(num_bytes)}"
        left = axes.get_yaxis_transform()
        axes.text(-0.01, lane, text, color=INK, size=9, ha="right", va="center", transform=left)
    axes.set(yticks=[], ylim=(len(_LANES) - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms since the step's first message", color=QUIET)
    title(axes, f"Rank 0's {len(messages)} messages of one step; pale: waiting for other ranks")
    return made


def _bytes(count: int) -> str:
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"

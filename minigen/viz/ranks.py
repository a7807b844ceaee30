"""Who holds what of a model that is split over ranks, every message, and what they cost."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.config import ModelConfig
from minigen.parallel.shard import PLAN, Split, span
from minigen.teach.budget import ModelShape
from minigen.teach.message_cost import Link, split_step_seconds
from minigen.teach.roofline import Machine
from minigen.viz.style import BLUE, CYCLE, FAINT, INK, ORANGE, QUIET, SKY, figure, title

# Rows of the drawing, from the tokens to the logits: a module, or what is sent.
_ROWS: tuple[tuple[str, str], ...] = (
    ("embed_tokens", "embedding"),
    ("all-reduce", "all-reduce: the vector of one, zeros of all others"),
    ("self_attn.q_proj", "queries"),
    ("self_attn.k_proj", "keys, values"),
    ("self_attn.o_proj", "out"),
    ("all-reduce", "all-reduce: sums of all heads"),
    ("mlp.up_proj", "gate, up"),
    ("mlp.down_proj", "down"),
    ("all-reduce", "all-reduce: sums of the whole ffn"),
    ("lm_head", "head"),
    ("all-gather", "all-gather: logits side by side"),
)
_IN_LAYER = range(2, 9)


def who_holds_what(config: ModelConfig, num_ranks: int) -> Figure:
    """A column for each rank, a row for each module, a bar across where the ranks must talk.

    Column splits are blue, row splits sky; what is in the box is which outputs or inputs it has.
    """
    made, axes = figure(max(7.0, 1.02 * (num_ranks + 1.9)), 5.6)
    for row, (module, words) in enumerate(_ROWS):
        if module not in PLAN:
            axes.add_patch(Rectangle((0, row + 0.2), num_ranks, 0.5, color=ORANGE, alpha=0.85))
            axes.text(
                num_ranks / 2, row + 0.45, words, ha="center", va="center", color="white", size=9
            )
            continue
        axes.text(-0.08, row + 0.45, words, ha="right", va="center", color=INK)
        for rank in range(num_ranks):
            _box(axes, config, module, rank, num_ranks, row)
    first, last = _IN_LAYER[0], _IN_LAYER[-1]
    axes.plot([num_ranks + 0.12] * 2, [first + 0.1, last + 0.8], color=QUIET)
    middle = (first + last + 1) / 2
    text = f"in each of\n{config.num_layers} layers"
    axes.text(num_ranks + 0.2, middle, text, color=QUIET, va="center", fontsize=9)
    axes.set(xlim=(-1.0, num_ranks + 0.9), ylim=(len(_ROWS), -0.9), xticks=[], yticks=[])
    for rank in range(num_ranks):
        axes.text(rank + 0.5, -0.3, f"rank {rank}", ha="center", color=INK, weight="bold")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    title(axes, f"Who holds what on {num_ranks} ranks, and when they talk")
    return made


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
    """How many times as fast a decode step can be on so many machines, by what connects them."""
    made, axes = figure(8, 4)
    axes.plot(ranks, ranks, color=FAINT, linewidth=2)
    axes.text(ranks[-1], ranks[-1], " no messages", color=QUIET, va="center", fontsize=9)
    for link, color in zip(links, CYCLE, strict=False):
        found = allowed(shape, machine, link, ranks, batch, context)
        axes.plot(ranks, list(found.values()), "o-", color=color, label=link.name)
    axes.axhline(1, color=FAINT, linewidth=1)
    axes.set(xscale="log", xticks=list(ranks), xticklabels=[str(each) for each in ranks])
    axes.set(xlim=(ranks[0] * 0.9, ranks[-1] * 1.5), ylim=(0, ranks[-1] * 1.05))
    axes.minorticks_off()
    axes.set_xlabel("ranks (log scale)")
    axes.set_ylabel("times as fast as one")
    axes.legend(frameon=False, loc="upper left")
    title(
        axes, f"Steps of {batch} at once on several {machine.name}: what messages leave of the gain"
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
    """The speed-up on each number of ranks, one machine each."""
    alone = sum(split_step_seconds(shape, machine, link, 1, batch, context))
    return {
        each: alone / sum(split_step_seconds(shape, machine, link, each, batch, context))
        for each in ranks
    }


def message_times(
    measured: Mapping[int, Mapping[int, float]], fitted: Mapping[int, Link]
) -> Figure:
    """Seconds of an all-reduce against its bytes, as measured, and the line of its two terms.

    Both are by number of ranks.
    """
    made, axes = figure(8, 4)
    for (num_ranks, times), color in zip(measured.items(), CYCLE, strict=False):
        sizes = list(times)
        axes.plot(sizes, [1e6 * each for each in times.values()], "o", color=color)
        link, turns = fitted[num_ranks], 2 * (num_ranks - 1)
        line = [1e6 * turns * (link.latency + size / num_ranks / link.bandwidth) for size in sizes]
        axes.plot(sizes, line, color=color, label=f"{num_ranks} ranks")
    axes.set(xscale="log", yscale="log")
    axes.tick_params(which="both", colors=QUIET, labelsize=9)
    axes.set_xlabel("bytes of the tensor (log scale)")
    axes.set_ylabel("µs (log scale)")
    axes.legend(frameon=False, loc="upper left")
    title(axes, "An all-reduce: small ones cost a turn, large ones their bytes")
    return made

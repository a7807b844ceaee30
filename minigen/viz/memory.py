"""The memory budget of a model, against the memory that there is."""

from matplotlib.figure import Figure

from minigen.config import ModelConfig
from minigen.teach.capacity import GB, budget, most_sequences, num_parameters
from minigen.viz.style import AMBER, BLUE, FAINT, GREEN, INK, ORANGE, QUIET, figure, title

CONTEXTS = [2**power for power in range(8, 18)]


def memory_budget(
    config: ModelConfig, bits: float, memory_gb: float, sequences: int, context: int
) -> Figure:
    """Left: weights, KV cache and working memory beside what there is. Right: how many fit."""
    if memory_gb <= 0:
        raise ValueError("A machine has some memory: give more than 0 GB.")
    needed = budget(config, bits, sequences, context)
    made, (bars, curve) = figure(10, 2.9, ncols=2, width_ratios=(3, 2))
    begin = 0.0
    for name, size, colour in (
        ("weights", needed.weights, BLUE),
        ("KV cache", needed.kv, AMBER),
        ("working", needed.working, GREEN),
    ):
        bars.barh(0, size / GB, left=begin, color=colour, label=f"{name} {_gb(size)}", height=0.5)
        begin += size / GB
    bars.axvline(memory_gb, color=ORANGE, linewidth=2, label=f"there is {memory_gb:g} GB")
    bars.set(yticks=[], ylim=(-0.4, 0.4), xlabel="GB", xlim=(0, 1.08 * max(begin, memory_gb)))
    bars.legend(
        frameon=False, labelcolor=INK, ncols=2, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1)
    )
    fits = needed.total <= memory_gb * GB
    left = memory_gb * GB - needed.total
    bars.text(
        *(0.01, 0.06, f"fits, {_gb(left)} left" if fits else f"does not fit, {_gb(-left)} missing"),
        transform=bars.transAxes,
        color=INK if fits else ORANGE,
        weight="bold",
    )
    counts = [most_sequences(config, bits, memory_gb * GB, each) for each in CONTEXTS]
    fitting = [(length, count) for length, count in zip(CONTEXTS, counts, strict=True) if count]
    curve.plot(*zip(*fitting, strict=True) if fitting else ((), ()), color=AMBER, linewidth=2)
    curve.axhline(1, color=FAINT, zorder=0)
    curve.plot(context, sequences, "o", color=BLUE if fits else ORANGE, label="asked for")
    curve.set(xscale="log", yscale="log", xlim=(CONTEXTS[0], CONTEXTS[-1]), ylim=(0.7, 2000))
    curve.set(xlabel="tokens of each", ylabel="sequences that fit")
    for axis in (curve.xaxis, curve.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    curve.tick_params(which="minor", colors=QUIET)
    curve.legend(frameon=False, labelcolor=INK, fontsize=9)
    title(curve, f"{num_parameters(config) / 1e9:.2f} billion weights")
    return made


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / 1e6:,.0f} MB"

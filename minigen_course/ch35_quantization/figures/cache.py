"""The KV cache in few bits: its large channels, the tokens that stay in full, and the error."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from minigen_course.ch35_quantization.figures.quality import plain_log
from minigen_course.figures.style import (
    BLUE,
    CYCLE,
    FAINT,
    HEAT,
    INK,
    ORANGE,
    PALE,
    QUIET,
    figure,
    title,
)

MARKED = 3  # channels whose numbers are given
FULL_BITS = 16
AMBER_LINE = "#b07a00"  # amber, darker, so that a thin line is seen


def cache_channels(
    keys: Float[Tensor, "tokens channels"], values: Float[Tensor, "tokens channels"]
) -> Figure:
    """Draw the magnitudes of keys and values, by token and channel, and the mean of each channel.

    The largest channels are named by their numbers.
    """
    made, panels = figure(
        11, 4.6, nrows=2, ncols=2, height_ratios=(1, 1.7), sharex="col", sharey="row"
    )
    most = float(torch.stack([keys.float().abs().amax(), values.float().abs().amax()]).max())
    for column, (name, each) in enumerate((("keys", keys), ("values", values))):
        magnitudes = each.float().abs()
        means = magnitudes.mean(0)
        line, grid = panels[:, column]
        line.bar(range(len(means)), means.numpy(), width=1.0, color=BLUE if column else ORANGE)
        if not column:
            for channel in means.topk(min(MARKED, len(means))).indices.tolist():
                line.annotate(
                    f"{channel}",
                    (channel, float(means[channel])),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=INK,
                )
        image = grid.imshow(
            magnitudes.sqrt().numpy(),
            cmap=HEAT,
            vmin=0,
            vmax=most**0.5,
            aspect="auto",
            interpolation="none",
        )
        grid.set_xlabel("channel of the head" if each.shape[1] <= 128 else "channel")
        ratio = float(means.max() / means.median())
        title(line, f"{name}: the largest channel is {ratio:.1f} times the median one")
    panels[0, 0].set_ylabel("mean magnitude")
    panels[0, 0].set_ylim(
        0, 1.15 * max(float(x.float().abs().mean(0).max()) for x in (keys, values))
    )
    panels[1, 0].set_ylabel("token")
    bar = made.colorbar(image, ax=list(panels[1]), pad=0.01)
    marks = np.array([0, 0.05, 0.25, 0.5, 1.0]) * most
    bar.set_ticks(np.sqrt(marks).tolist(), labels=[f"{each:.2g}" for each in marks])
    bar.set_label("magnitude", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    return made


def kept_tokens(
    num_tokens: int, residual: int, block_size: int, bits: int = 2, most: int = 160
) -> Figure:
    """Draw which tokens are codes after a step, and which are in full: KIVI's, and in blocks.

    KIVI quantizes keys in chunks of `residual` tokens when a chunk is full, and keeps the newest
    `residual` values; minigen's cache keeps the block that the sequence is filling. Below is the
    mean of the bits per number, without grids. The axis reaches to `most` tokens.

    Raises `ValueError` for a number of tokens that is not 1 to `most`.
    """
    if not 1 <= num_tokens <= most:
        raise ValueError(f"A number of tokens is 1 to {most}, not {num_tokens}.")
    rows = {
        f"KIVI, keys\n(R = {residual})": (num_tokens % residual, residual),
        f"KIVI, values\n(R = {residual})": (min(num_tokens, residual), None),
        f"minigen, both\n(blocks of {block_size})": (num_tokens % block_size, block_size),
    }
    made, (strip, curve) = figure(10.5, 4.4, nrows=2, height_ratios=(1.2, 1), sharex=True)
    for line, (full, chunks) in enumerate(rows.values()):
        _tokens(strip, num_tokens, full, line, chunks)
        strip.text(
            num_tokens + 1.2,
            line,
            f"{num_tokens - full} codes, {full} in full",
            va="center",
            fontsize=9,
            color=INK,
        )
    strip.set_yticks(range(len(rows)), list(rows), color=INK)
    strip.set(ylim=(len(rows) - 0.5, -0.6))
    strip.tick_params(axis="y", length=0)
    handles = [
        Patch(facecolor=PALE, edgecolor=BLUE, label=f"codes of {bits} bits"),
        Patch(facecolor=ORANGE, label="in full"),
    ]
    strip.legend(
        handles=handles,
        loc="lower right",
        frameon=False,
        labelcolor=INK,
        ncols=2,
        bbox_to_anchor=(1.0, 0.98),
    )
    title(strip, f"tokens in the cache: {num_tokens}")
    counts = np.arange(1, most + 1)
    for name, full_counts, colour in (
        ("KIVI, keys", counts % residual, ORANGE),
        ("KIVI, values", np.minimum(counts, residual), AMBER_LINE),
        ("minigen, both", counts % block_size, BLUE),
    ):
        means = bits + (FULL_BITS - bits) * full_counts / counts
        curve.plot(
            counts, means, color=colour, linewidth=1.4 if colour == BLUE else 2.8, label=name
        )
        curve.plot(num_tokens, means[num_tokens - 1], "o", color=colour)
    curve.axhline(bits, color=QUIET, linestyle="--", linewidth=1)
    curve.set(xlim=(0, most + 26), ylim=(0, FULL_BITS + 1), xlabel="tokens in the cache")
    curve.set(ylabel="bits per number,\nmean, without grids")
    curve.legend(frameon=False, labelcolor=INK, loc="upper right", fontsize=9)
    return made


def _tokens(axes: Axes, count: int, full: int, line: int, chunks: int | None) -> None:
    coded = count - full
    axes.add_patch(Rectangle((0, line - 0.3), coded, 0.6, facecolor=PALE, edgecolor=BLUE))
    axes.add_patch(Rectangle((coded, line - 0.3), full, 0.6, facecolor=ORANGE, linewidth=0))
    axes.vlines(range(1, count), line - 0.3, line + 0.3, color="white", linewidth=0.5)
    if chunks is not None:
        axes.vlines(
            range(chunks, count, chunks), line - 0.38, line + 0.38, color=INK, linewidth=1.2
        )


def cache_errors(errors: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw the relative error over the bits, a line per way, such as "keys per channel".

    Ways "... per channel" are solid and "... per token" dashed; keys and values have their colour.
    """
    made, axes = figure(7.6, 3.4)
    _errors(axes, errors)
    return made


def _errors(axes: Axes, errors: Mapping[str, Mapping[int, float]]) -> None:
    colours: dict[str, str] = {}
    all_bits = sorted({bits for each in errors.values() for bits in each})
    for name, by_bits in errors.items():
        kind = name.split()[0]
        colour = colours.setdefault(kind, (ORANGE, BLUE, *CYCLE[2:])[len(colours) % len(CYCLE)])
        token = "token" in name
        bits = sorted(by_bits)
        axes.plot(
            [all_bits.index(each) for each in bits],
            [100 * by_bits[each] for each in bits],
            "s--" if token else "o-",
            color=colour,
            markerfacecolor="white" if token else colour,
            label=name,
        )
    axes.set_yscale("log")
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_xticks(range(len(all_bits)), [str(each) for each in all_bits])
    plain_log(axes)
    axes.set(xlabel="bits per code", ylabel="relative error, % (log scale)")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "The same bits, shared along channels or along tokens")


def stored_cache(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the stored results of the KV cache: errors by axis, and KL divergence over bytes.

    `found` has "axes" and "caches" as `benchmarks/35_kv_cache.py` writes them. The divergence is
    that from the model whose cache is in float32, with its 95 % interval.
    """
    made, (left, right) = figure(11, 3.7, ncols=2)
    _errors(
        left,
        {
            f"{kind} {way}": {bits: each[f"{bits} bits"][way] for bits in (8, 4, 2)}
            for kind, each in found["axes"].items()
            for way in ("per channel", "per token")
        },
    )
    full = found["caches"]["float32"]["bytes per token"]
    for name, each in found["caches"].items():
        if each.get("comparison") is None:
            continue
        kilobytes, divergence = each["bytes per token"] / 1e3, each["comparison"]["kl"]
        low, high = divergence["interval"] or [divergence["value"]] * 2
        right.plot([kilobytes] * 2, [low, high], color=BLUE, linewidth=1.6)
        right.plot(kilobytes, divergence["value"], "o", color=BLUE)
        right.annotate(
            f"{name}: {full / each['bytes per token']:.1f} times smaller",
            (kilobytes, divergence["value"]),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    right.set_yscale("log")
    plain_log(right)
    right.grid(axis="y", color=FAINT, linewidth=0.6)
    right.set_xlim(0, 1.6 * right.get_xlim()[1])
    right.set(xlabel="kilobytes per token", ylabel="KL divergence per token, nats\n(log scale)")
    title(right, f"float32: {full / 1e3:,.0f} kB per token")
    return made

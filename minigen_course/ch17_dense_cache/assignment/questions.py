"""Questions on chapter 17 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _server(random: Random) -> dict[str, Any]:
    """Return a decode step whose keys and values are a third of the weights at least."""
    while True:
        drawn = {
            "billions": random.choice((3, 7, 8, 14)),
            "bits": random.choice((8, 16)),
            "layers": random.choice((24, 32, 40)),
            "kv_heads": random.choice((4, 8)),
            "head_dim": random.choice((64, 128)),
            "batch": random.choice((8, 16, 32, 64)),
            "context": random.choice((1000, 2000, 4000, 6000)),
            "bandwidth": random.choice((300, 900, 2000, 3000)),
        }
        weights, kv = _gigabytes(**drawn)
        if weights / 3 < kv < 2 * weights:
            return drawn


def _gigabytes(
    billions: int,
    bits: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: int,
) -> tuple[float, float]:
    """Return how many GB of weights, and of keys and values, the step reads."""
    return billions * bits / 8, 2 * layers * kv_heads * head_dim * 2 * batch * context / 1e9


def _throughput(**given: int) -> float:
    return given["batch"] / (sum(_gigabytes(**given)) / given["bandwidth"])


def _card(random: Random) -> dict[str, Any]:
    return {
        "ridge": random.choice((20, 30, 40, 60, 80, 100, 200, 300, 400)),
        "peak": random.choice((50, 100, 200, 400, 1000)),
        "bits": random.choice((8, 32)),
    }


def _tokens_at_ridge(ridge: int, peak: int, bits: int) -> float:
    return ridge * bits / 8 / 2


def _roofline(ridge: int, peak: int, bits: int) -> Figure:
    """Draw both limits on logarithmic axes."""
    made, axes = style.figure(8, 4)
    intensities = [1, ridge, 1000]
    axes.loglog(intensities, [min(each / ridge, 1) * peak for each in intensities], linewidth=2)
    axes.set_yticks([], minor=True)
    axes.grid(which="both", color=style.FAINT, linewidth=0.7)
    axes.set_xlim(1, 1000)
    axes.set_ylim(peak / 1000, 2 * peak)
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xticks([each * power for power in (1, 10, 100) for each in range(2, 10)], minor=True)
    axes.tick_params(which="minor", labelbottom=False)
    levels = [peak / 1000, peak / 100, peak / 10, peak]
    axes.set_yticks(levels, [f"{each:g}" for each in levels])
    axes.set_xlabel("arithmetic intensity (FLOP per byte); lines at 1, 2, 3, ... 10, 20, 30, ...")
    axes.set_ylabel("TFLOP/s")
    style.title(axes, "Roofline of a card")
    return made


CHANGES = WEIGHTS, KV, FLOPS, OVERHEAD = (
    "weights of half the bits",
    "keys and values of half the bits",
    "twice the flop/s",
    "half the overhead",
)

MOST_GIGABYTES = 75  # of a card


def _step_of(
    batch: int,
    weights: int,
    kv: int,
    tflop: float,
    bandwidth: int,
    peak: int,
    overhead: int,
    change: str = "",
) -> float:
    """Return the milliseconds of a step, or of the step after one of the changes."""
    read = weights / (1 + (change == WEIGHTS)) + kv / (1 + (change == KV))
    compute = tflop / (1 + (change == FLOPS))
    longer = max(read / bandwidth, compute / peak)
    return 1e3 * longer + overhead / (1 + (change == OVERHEAD))


def _slow_step(random: Random) -> dict[str, Any]:
    """Return a step that one of the changes shortens clearly more than the others."""
    wanted = random.choice(CHANGES)
    while True:
        batch, weights = random.choice((32, 64, 128, 256, 512)), random.randint(3, 16)
        drawn: dict[str, Any] = {
            "batch": batch,
            "weights": weights,
            "kv": max(1, round(batch * random.choice((0.01, 0.03, 0.1, 0.3)))),
            "tflop": max(0.1, round(weights * batch / 1000, 1)),  # 2 FLOPs for each 2 bytes
            "bandwidth": random.choice((300, 600, 900, 2000)),
            "peak": random.choice((100, 200, 400)),
            "overhead": random.randint(2, 30),
        }
        gained = {each: _step_of(**drawn) - _step_of(**drawn, change=each) for each in CHANGES}
        second, first = sorted(gained.values())[-2:]
        fits = weights + drawn["kv"] <= MOST_GIGABYTES
        if fits and gained[wanted] == first > max(2, 1.5 * second):
            return drawn


def _best_change(**drawn: Any) -> str:
    return min(CHANGES, key=lambda change: _step_of(**drawn, change=change))


def _profile(**drawn: Any) -> str:
    rows = {
        "sequences in the batch": f"{drawn['batch']}",
        "one decode step, measured": f"{_step_of(**drawn):.1f} ms",
        "weights that it reads": f"{drawn['weights']} GB",
        "keys and values that it reads": f"{drawn['kv']} GB",
        "its arithmetic": f"{drawn['tflop']} TFLOP",
        "the card reads": f"{drawn['bandwidth']} GB/s",
        "the card computes": f"{drawn['peak']} TFLOP/s",
    }
    return "\n".join(f"{name:<30}{value:>12}" for name, value in rows.items())


QUESTIONS = {
    "tokens_per_second": Question(
        "estimate",
        "A model has {billions} billion weights of {bits} bits, {layers} layers, and {kv_heads} KV "
        "heads of {head_dim} numbers each; keys and values have 16 bits per number. A server "
        "decodes {batch} sequences together, each with a context of {context} tokens, on a card "
        "that reads {bandwidth} GB/s (GB = 10^9 bytes). Nothing but reading takes time, and each "
        "step reads all weights once. How many tokens per second do all sequences get together?",
        "model, bits, batch, context, bandwidth",
        _server,
        _throughput,
        "A step reads {billions} x {bits} / 8 GB of weights once, and 2 x {layers} x {kv_heads} x "
        "{head_dim} x 2 bytes for each of {batch} x {context} tokens; it takes these bytes / "
        "{bandwidth} GB/s and gives {batch} tokens.",
        within=1.03,
        points=8,
        minutes=8,
    ),
    "tokens_at_the_ridge": Question(
        "reading",
        "The figure shows the roofline of a card. A pass multiplies each weight, which has {bits} "
        "bits, with some tokens; leave out everything else that it reads and computes. From how "
        "many tokens on is the pass compute-bound?",
        "ridge and peak of the card, bits of a weight",
        _card,
        _tokens_at_ridge,
        "The ridge is at {ridge} FLOP per byte, and m tokens give 2 x m FLOPs for the {bits} / 8 "
        "bytes of each weight, so it is reached at m = {ridge} x {bits} / 16.",
        within=1.12,
        figure=_roofline,
    ),
    "best_change": Question(
        "diagnosis",
        "A decode step was measured. By the chapter's model, a step takes max(bytes / bandwidth, "
        "FLOP / peak) + overhead. Which one of these changes shortens the step most, if all else "
        "stays: `weights of half the bits`, `keys and values of half the bits`, `twice the "
        "flop/s`, or `half the overhead`?",
        "batch, bytes, arithmetic, overhead, card",
        _slow_step,
        _best_change,
        "Reading takes ({weights} + {kv}) GB / {bandwidth} GB/s, the arithmetic {tflop} TFLOP / "
        "{peak} TFLOP/s; only the longer of the two counts, and what is missing from the measured "
        "time is the overhead of {overhead} ms.",
        choices=CHANGES,
        figure=_profile,
        points=8,
        minutes=8,
    ),
}

WRITTEN = {
    "what_is_kept": Written(
        "A KV cache keeps the keys and values of earlier tokens, and nothing else of them. Why may "
        "they be kept, although the text grows? Why are they enough, and what does the cache cost "
        "in memory and in time?",
        "The causal mask lets a token look only at itself and at earlier tokens, so a later token "
        "changes nothing in the earlier ones, in any layer: their keys and values stay valid. A "
        "new token compares its own query with all keys and mixes all values; the earlier tokens' "
        "queries, residual streams and logits are not read again. In return, the cache takes "
        "memory in every layer for every token of the context, and each decode step must read all "
        "of it.",
        {
            "causal mask: later tokens change nothing in earlier ones": 4,
            "a new token's query needs only the keys and values of the others": 3,
            "memory for each layer and each token of the context": 2,
            "each decode step reads the whole cache": 1,
        },
    ),
    "limits_of_a_batch": Written(
        "Someone says: decode is memory-bound, but a large enough batch always makes it "
        "compute-bound. Say what is right about this, what is wrong, and on what it depends.",
        "The weights are read once per step, whatever the batch is, so each further sequence adds "
        "arithmetic without reading more weights: with short contexts a large batch can reach the "
        "ridge. But each sequence also has keys and values of its own, which are read for its one "
        "token only, and they grow with the context. From some context on, a sequence adds more "
        "time of reading than of arithmetic, and the step is memory-bound at every batch. The "
        "card's memory may also be full before.",
        {
            "the weights are read once for the whole batch": 3,
            "each sequence reads keys and values of its own": 3,
            "with long contexts, no batch is compute-bound": 3,
            "the memory of the card limits the batch, too": 1,
        },
    ),
}

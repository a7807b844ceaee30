"""Questions on chapter 33 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch33_paged_attention.lesson import TILE as TOKENS_OF_TILE
from minigen_course.ch33_paged_attention.lesson import TILE_SECONDS, Decoding
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.lab.cost_model import MACHINES


def _lone_chat(random: Random) -> dict[str, Any]:
    return {
        "bandwidth": random.choice((2000, 3350, 4800)),
        "tile_ns": random.choice((800, 1000, 1500, 2000)),
        "kv_heads": random.choice((4, 8)),
        "head_dim": random.choice((64, 128)),
        "tokens": random.choice((32, 64)),
    }


def _splits_needed(
    bandwidth: int, tile_ns: int, kv_heads: int, head_dim: int, tokens: int
) -> float:
    in_flight = bandwidth * tile_ns  # GB/s times ns are bytes
    return -(-in_flight // (kv_heads * 2 * tokens * head_dim * 2))


def _two_splits(random: Random) -> dict[str, Any]:
    highest, less = random.randint(3, 9), random.randint(1, 3)
    sums = random.sample((1.5, 2, 2.5), 2)
    means = (2 * random.randint(2, 6), 2 * random.randint(15, 25))
    return {
        "a_max": highest - less,
        "a_sum": sums[0],
        "a_mix": int(sums[0] * means[0]),
        "b_max": highest,
        "b_sum": sums[1],
        "b_mix": int(sums[1] * means[1]),
    }


def _merged(a_max: int, a_sum: float, a_mix: int, b_max: int, b_sum: float, b_mix: int) -> float:
    shrink = 2.0 ** (a_max - b_max)
    return (shrink * a_mix + b_mix) / (shrink * a_sum + b_sum)


def _batch(random: Random) -> dict[str, Any]:
    lens = [random.randint(70, 900) for _ in range(5)]
    lens.insert(random.randrange(6), random.randint(20, 60))
    return {"lens": lens, "splits": random.choice((4, 8)), "kv_heads": random.choice((2, 4, 8))}


def _programs_without_tokens(lens: list[int], splits: int, kv_heads: int) -> float:
    idle = 0
    for length in lens:
        tiles = -(-length // TOKENS_OF_TILE)
        idle += splits - -(-tiles // -(-tiles // splits))
    return kv_heads * idle


def _contexts(lens: list[int], splits: int, kv_heads: int) -> Figure:
    """Draw the tokens of each sequence over the edges of tiles."""
    made, axes = style.figure(8, 3)
    names = [f"sequence {number}" for number in range(len(lens))]
    bars = axes.barh(names, lens, color=style.BLUE)
    axes.bar_label(bars, padding=3, fontsize=9)
    for edge in range(0, max(lens) + 2 * TOKENS_OF_TILE, TOKENS_OF_TILE):
        axes.axvline(edge, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens (a line every {TOKENS_OF_TILE}: the edges of tiles)")
    style.title(axes, "Tokens in the context of each sequence")
    return made


COPY, REPEATED, FEW = "a copy", "repeated loads", "too few programs"

BANDWIDTH = "memory bandwidth"

CARD, PROCESSORS = MACHINES["H100 SXM"], 132


def _slow_decode(random: Random) -> dict[str, Any]:
    cause = random.choice((COPY, REPEATED, FEW, BANDWIDTH))
    batch, context = random.choice((32, 48, 64)), random.choice((4096, 8192, 16_384))
    if cause == FEW:
        batch, context = 1, random.choice((32_768, 65_536, 131_072))
    work = Decoding(batch, context, group=random.choice((4, 8)))
    times = {COPY: 3.2, REPEATED: 0.6 * work.group}.get(cause, 1.08)
    seconds = times * work.kv_bytes / CARD.bandwidth
    if cause == FEW:
        seconds = work.tiles(1) * TILE_SECONDS
    return {
        "batch": batch,
        "context": context,
        "group": work.group,
        "loaded": work.kv_bytes * {COPY: 2, REPEATED: work.group}.get(cause, 1),
        "stored": work.kv_bytes if cause == COPY else 0,
        "programs": work.num_programs(1) * (work.group if cause == REPEATED else 1),
        "seconds": seconds,
    }


def _what_costs(
    batch: int, context: int, group: int, loaded: int, stored: int, programs: int, seconds: float
) -> str:
    needed = Decoding(batch, context, group=group).kv_bytes
    if stored >= needed:
        return COPY
    if loaded > needed:
        return REPEATED
    return FEW if programs < PROCESSORS else BANDWIDTH


def _counters(
    batch: int, context: int, group: int, loaded: int, stored: int, programs: int, seconds: float
) -> str:
    work = Decoding(batch, context, group=group)
    lines = {
        "sequences": f"{batch}",
        "tokens in each context": f"{context:,}",
        "query heads, KV heads": f"{work.kv_heads * group}, {work.kv_heads}",
        "head_dim, bits of a number": f"{work.head_dim}, 16",
        "keys and values loaded": f"{loaded / 1e6:,.0f} MB",
        "keys and values stored": f"{stored / 1e6:,.0f} MB",
        "programs that attend": f"{programs:,}",
        "processors of the GPU": f"{PROCESSORS}",
        "memory bandwidth": f"{CARD.bandwidth / 1e9:,.0f} GB/s",
        "time of the layer's attention": f"{1e6 * seconds:,.0f} µs",
    }
    return "\n".join(f"{name:<30} {value:>12}" for name, value in lines.items())


QUESTIONS = {
    "splits_needed": Question(
        "estimate",
        "A single long chat decodes on a GPU with {bandwidth} GB/s (1 GB is 10^9 bytes). The model "
        "has {kv_heads} KV heads of {head_dim} numbers, keys and values have 16 bits, and there is "
        "one program for each KV head and split. Each program has the keys and values of one tile "
        "of {tokens} tokens on their way at any time, and gets a tile every {tile_ns} ns. The chip "
        "has room for all programs, and each split has many tiles. By Little's law, what is the "
        "smallest whole number of splits that keeps the memory busy all the time?",
        "bandwidth, time of a tile, KV heads, head dimension, tokens of a tile",
        _lone_chat,
        _splits_needed,
        "{bandwidth} GB/s x {tile_ns} ns must be on the way, and a split brings {kv_heads} tiles "
        "of 2 x {tokens} x {head_dim} x 2 bytes: keys and values.",
        within=1.0,
    ),
    "two_splits_merged": Question(
        "estimate",
        "Two splits of a context have left these parts of one query head, with values of one "
        "number and weights that are powers of two. Split A: maximum {a_max}, sum of weights "
        "{a_sum}, undivided mix {a_mix}. Split B: maximum {b_max}, sum of weights {b_sum}, "
        "undivided mix {b_mix}. What is the attention over the whole context?",
        "maximum, sum and mix of both splits",
        _two_splits,
        _merged,
        "Sum and mix of split A are multiplied by 2^({a_max} - {b_max}) and added to those of "
        "split B; then the mix is divided by the sum.",
        within=1.02,
        points=3,
    ),
    "programs_without_tokens": Question(
        "reading",
        "The figure shows the contexts of a batch. The model has {kv_heads} KV heads. The first "
        "pass cuts each context into {splits} splits, in tiles of 64 tokens: a split gets the "
        "number of tiles divided by {splits}, rounded up, and the splits take their tiles in "
        "order. How many programs of the first pass have no token to attend to?",
        "the lengths, KV heads, number of splits",
        _batch,
        _programs_without_tokens,
        "A context of t tiles has k = t / {splits} tiles in each split, rounded up, so t / k "
        "splits, rounded up, have tokens; the others are idle, for each of {kv_heads} KV heads.",
        within=1.0,
        figure=_contexts,
        minutes=8,
    ),
    "slow_decode": Question(
        "diagnosis",
        "The table has counters of one layer's attention in one decode step. Loads and stores are "
        "what all of its kernels ask for together; 1 MB is 10^6 bytes. What is the main reason for "
        "the time? Compare with the bytes of the keys and values. If the time is near what the "
        "memory takes for these bytes in any case, answer 'memory bandwidth'.",
        "the cause, sequences, context, heads, and the counters that follow from them",
        _slow_decode,
        _what_costs,
        "The keys and values have {batch} x {context} x 8 x 128 x 2 x 2 bytes: a copy stores them, "
        "repeated loads ask for them several times, and too few programs leave processors idle.",
        choices=(COPY, REPEATED, FEW, BANDWIDTH),
        figure=_counters,
        minutes=8,
    ),
}

WRITTEN = {
    "when_splits_help": Written(
        "Splitting the context adds bytes and a second kernel. Explain why it still makes the "
        "decode attention of one long chat faster, why it gains little for a large batch of long "
        "contexts, and what each split must leave for the second pass, instead of its finished "
        "result alone.",
        "Without splits a lone sequence has one program for each KV head. Most processors are "
        "idle, and by Little's law so few programs do not have enough bytes on their way to use "
        "the memory's bandwidth. Splits add programs, and so bytes in flight. A large batch has "
        "enough programs already, so the memory is busy, and splits only add their parts and the "
        "second pass. No split knows the sum of all weights. So each leaves, for every query head, "
        "its maximum, its sum of weights and its undivided mix, and the second pass rescales them "
        "to the largest maximum, adds them up and divides. (A divided result with its log-sum-exp "
        "would do, too.)",
        {
            "one sequence has few programs, so processors idle": 2,
            "few programs have too few bytes in flight for the bandwidth": 3,
            "a large batch has enough programs; there splits only add cost": 2,
            "each split leaves maximum, sum and undivided mix, or an equivalent pair": 2,
            "the reason: the weights need one maximum and one sum over all splits": 1,
        },
    ),
    "grouped_heads_and_cache": Written(
        "A colleague says: 'With grouped-query attention we need no special kernel. A program for "
        "each query head loads the same keys as its neighbours, so the L2 cache answers.' When "
        "is this right, when is it wrong, and what does a program for each KV head change?",
        "The L2 cache answers a repeated load only if the data are still there, and this depends "
        "on how much else was loaded in between. If the programs of a group run at the same time "
        "and stay in step, little comes between, and L2 answers. No rule keeps them in step: if "
        "one starts after the others have gone through a long context, the keys must come from "
        "memory again. A program for each KV head loads each key and value once, and multiplies it "
        "with the queries of the whole group, so it does not depend on the cache.",
        {
            "what decides is how much was loaded between two loads of the same data": 3,
            "right if the programs of a group run together, in step": 2,
            "wrong if they are apart in time and the context is long": 2,
            "a program for each KV head loads once for the whole group, whatever L2 does": 3,
        },
    ),
}

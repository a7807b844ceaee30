"""What may be assigned of chapter 33: cases by seed for its exercises, and questions."""

from collections.abc import Iterable
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minigen_course.ch33_paged_attention.exercises import contexts, joined
from minigen_course.ch33_paged_attention.kernels import (
    Parts,
    launch_decode,
    launch_gather,
    launch_join,
    no_parts,
)
from minigen_course.ch33_paged_attention.lesson import TILE as TOKENS_OF_TILE
from minigen_course.ch33_paged_attention.lesson import TILE_SECONDS, Decoding
from minigen_course.ch33_paged_attention.rungs import launch_grouped, launch_tiled
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied, normal
from minigen_course.lab.cost_model import MACHINES
from minigen_course.lab.triton_interpreter import Access, watched

BLOCKS, WIDTH, GATHERED_TILE = 8, 3, 4
TILE, SPARE = 8, 3
LARGE = 150.0  # queries of this size give scores in the hundreds
TOLERANCE = 1e-3


def _loaded(accesses: Iterable[Access], *names: str) -> int:
    return sum(len(each.offsets) for each in accesses if each.tensor in names and not each.is_store)


def _gather_kernel(random: Random) -> dict[str, Any]:
    size = random.choice((1, 2, 4))
    length = random.randint(GATHERED_TILE + 1, 2 * GATHERED_TILE)
    return {
        "table": random.sample(range(BLOCKS), -(-length // size)),
        "length": length,
        "block_size": size,
        "gap": random.randint(1, 4),
    }


def _gathered(part: Any, table: list[int], length: int, block_size: int, gap: int) -> Any:
    """Gather a sequence from a pool whose elements are 0, 1, 2 and so on, in tiles of 4 positions.

    A slot has 3 elements, and `gap` unused ones follow. The elements loaded from the pool are
    counted.
    """
    row = WIDTH + gap
    pool = torch.arange(BLOCKS * block_size * row, dtype=torch.float32)
    half = pool.view(BLOCKS, block_size, row)[..., :WIDTH]
    entries, gathered = torch.tensor(table), torch.full((length, WIDTH), torch.nan)
    accesses = watched(
        lambda: launch_gather(part, half, entries, length, gathered, GATHERED_TILE),
        half=half,
        table=entries,
        gathered=gathered,
    )
    return {"gathered": gathered, "loaded": _loaded(accesses, "half")}


def _queries(random: Random, *shape: int) -> Tensor:
    """Return queries of [..., heads, head_dim]; some heads have small scores, some large ones."""
    sizes = random.choices((1.0, LARGE), k=shape[-2])
    return torch.tensor(sizes).unsqueeze(-1) * normal(random, *shape)


def _grouped_kernel(random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice(((2, 2), (2, 3), (3, 2)))
    length, head_dim = random.randint(3, 14), random.choice((5, 6, 10, 12))
    return {
        "q": _queries(random, kv_heads * group, head_dim),
        "keys": normal(random, length, kv_heads, head_dim),
        "values": normal(random, length, kv_heads, head_dim),
    }


def _grouped(part: Any, q: Tensor, keys: Tensor, values: Tensor) -> Any:
    """Attend to a context in one piece, and count the elements of keys and values loaded."""
    mixed = torch.full(q.shape, torch.nan)
    accesses = watched(
        lambda: launch_grouped(part, q, keys, values, mixed),
        q=q,
        keys=keys,
        values=values,
        mixed=mixed,
    )
    return {"mixed": mixed, "loaded": _loaded(accesses, "keys", "values")}


def _paged(random: Random) -> dict[str, Any]:
    lengths = [random.randint(1, 2), random.randint(TILE + 1, 3 * TILE)]
    random.shuffle(lengths)
    kv_heads, group = random.choice(((1, 3), (2, 2), (2, 3)))
    head_dim = random.choice((5, 6, 10, 12))
    return {
        "q": _queries(random, len(lengths), kv_heads * group, head_dim),
        "lengths": lengths,
        "block_size": random.choice((2, 4, 8)),
        "kv_heads": kv_heads,
    }


def _tiled(part: Any, q: Tensor, lengths: list[int], block_size: int, kv_heads: int) -> Any:
    """Attend to `contexts(lengths, block_size, kv_heads, q.shape[-1], 3)` in tiles of 8 tokens.

    `contexts` is in `minigen_course.ch33_paged_attention.exercises`. The elements of keys and
    values loaded are counted.
    """
    made = contexts(lengths, block_size, kv_heads, q.shape[-1], SPARE)
    mixed = torch.full(q.shape, torch.nan)
    accesses = watched(
        lambda: launch_tiled(part, q, *made[:4], mixed, TILE),
        q=q,
        keys=made.keys,
        values=made.values,
        tables=made.tables,
        lengths=made.lengths,
        mixed=mixed,
    )
    return {"mixed": mixed, "loaded": _loaded(accesses, "keys", "values")}


def _join_kernel(random: Random) -> dict[str, Any]:
    rows, splits, head_dim = 2, random.choice((3, 5)), random.choice((2, 3))
    empty = random.choice((0, 1))
    maxima, sums, parts = list[list[float]](), list[list[float]](), list[list[list[int]]]()
    for _ in range(rows):
        base, used = random.choice((0, 200, -200)), splits - empty
        maxima.append([*(base + float(random.randint(-3, 3)) for _ in range(used))])
        maxima[-1] += [-torch.inf] * empty
        sums.append([random.choice((1.0, 1.25, 1.5, 2.0)) for _ in range(used)] + [0.0] * empty)
        numbers = [[random.randint(-9, 9) for _ in range(head_dim)] for _ in range(used)]
        parts.append(numbers + [[0] * head_dim] * empty)
    return {"parts": parts, "maxima": maxima, "sums": sums}


def _joined(
    part: Any, parts: list[list[list[int]]], maxima: list[list[float]], sums: list[list[float]]
) -> Any:
    """Join the splits of two rows, given as float32 tensors, and count the elements loaded."""
    given = Parts(*(torch.tensor(each, dtype=torch.float32) for each in (parts, maxima, sums)))
    mixed = torch.full((len(parts), given.mixed.shape[-1]), torch.nan)
    accesses = watched(lambda: launch_join(part, given, mixed), **given._asdict(), joined=mixed)
    return {"joined": mixed, "loaded": _loaded(accesses, *given._fields)}


def _decode_kernel(random: Random) -> dict[str, Any]:
    return {**_paged(random), "splits": random.choice((2, 3, 4))}


def _decoded(
    part: Any, q: Tensor, lengths: list[int], block_size: int, kv_heads: int, splits: int
) -> Any:
    """Store the parts of `contexts(lengths, block_size, kv_heads, q.shape[-1], 3)`, and join them.

    `contexts` is in `minigen_course.ch33_paged_attention.exercises`; tiles have 8 tokens. The
    elements of keys and values loaded are counted.
    """
    made = contexts(lengths, block_size, kv_heads, q.shape[-1], SPARE)
    parts = no_parts(q.shape[0] * q.shape[1], splits, q.shape[-1])
    accesses = watched(
        lambda: launch_decode(part, q, *made[:4], parts, TILE),
        q=q,
        keys=made.keys,
        values=made.values,
        tables=made.tables,
        lengths=made.lengths,
        **parts._asdict(),
    )
    return {"mixed": joined(parts).view(q.shape), "loaded": _loaded(accesses, "keys", "values")}


VARIED = {
    "gather_kernel": Varied(
        "block table, length, block size, gap after a slot", _gather_kernel, _gathered, num_cases=4
    ),
    "grouped_kernel": Varied(
        "KV heads, group, tokens, head_dim, size of the scores",
        _grouped_kernel,
        _grouped,
        TOLERANCE,
        num_cases=3,
    ),
    "tiled_kernel": Varied(
        "lengths, block size, heads, head_dim, size of the scores",
        _paged,
        _tiled,
        TOLERANCE,
        num_cases=3,
    ),
    "join_kernel": Varied(
        "splits, head_dim, maxima, sums, parts, splits without tokens",
        _join_kernel,
        _joined,
        num_cases=4,
    ),
    "decode_kernel": Varied(
        "lengths, splits, block size, heads, head_dim, size of the scores",
        _decode_kernel,
        _decoded,
        TOLERANCE,
        num_cases=3,
    ),
}


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

"""Questions on chapter 22 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _pool_of(random: Random) -> dict[str, Any]:
    return {
        "gigabytes": random.choice((4, 6, 12, 20)),
        "layers": random.choice((16, 24, 32, 40)),
        "kv_heads": random.choice((4, 8)),
        "head_dim": random.choice((64, 128)),
        "block_size": random.choice((16, 32)),
    }


def _num_blocks(
    gigabytes: int, layers: int, kv_heads: int, head_dim: int, block_size: int
) -> float:
    block_bytes = 2 * layers * kv_heads * head_dim * 2 * block_size
    return gigabytes * 10**9 // block_bytes


def _lengths(random: Random) -> dict[str, Any]:
    return {
        "lens": [random.randint(20, 400) for _ in range(7)],
        "block_size": random.choice((16, 32, 64)),
    }


def _last_block_waste(lens: list[int], block_size: int) -> float:
    return sum(-each % block_size for each in lens)


def _bars(lens: list[int], block_size: int) -> Figure:
    """Draw the tokens of each sequence over a grid of block edges."""
    made, axes = style.figure(8, 3)
    names = [f"sequence {number}" for number in range(len(lens))]
    bars = axes.barh(names, lens, color=style.BLUE)
    axes.bar_label(bars, padding=3, fontsize=9)
    for edge in range(0, max(lens) + 2 * block_size, block_size):
        axes.axvline(edge, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens (a line every {block_size}: the edges of blocks)")
    style.title(axes, "Tokens of each sequence")
    return made


QUESTIONS = {
    "num_blocks": Question(
        "estimate",
        "A pool may take {gigabytes} GB (10^9 bytes). The model has {layers} layers, {kv_heads} KV "
        "heads of {head_dim} numbers each, in bfloat16, and a block holds {block_size} tokens. How "
        "many blocks does the pool have?",
        "memory, layers, KV heads, head dimension, block size",
        _pool_of,
        _num_blocks,
        "A block takes 2 x {layers} x {kv_heads} x {head_dim} x 2 bytes x {block_size} tokens: a "
        "key and a value for each token and layer.",
        within=1.02,
    ),
    "unused_slots": Question(
        "reading",
        "The figure shows seven sequences, with their numbers of tokens, in blocks of {block_size} "
        "slots. How many slots are allocated and hold no token?",
        "the lengths, and the block size",
        _lengths,
        _last_block_waste,
        "Only the last block of each sequence has empty slots; each sequence loses -length modulo "
        "{block_size} slots.",
        within=1.0,
        figure=_bars,
    ),
}

WRITTEN = {
    "why_blocks": Written(
        "A system gives each request one contiguous piece of the KV cache, as long as its longest "
        "possible answer. Name the two kinds of memory that it loses, and say what paging does to "
        "each of them, and what paging costs instead.",
        "It loses memory inside each piece, for tokens that never come (internal fragmentation), "
        "and between pieces, where the gaps are too short for a new request (external "
        "fragmentation). With blocks, any free block serves any sequence, so nothing is lost "
        "between them, and inside a sequence only the end of its last block is unused. In return, "
        "attention reads a block table to find each token, and the slots of new tokens are "
        "computed for every step.",
        {
            "internal fragmentation is named, with its cause: answers end earlier": 3,
            "external fragmentation is named, with its cause: gaps between pieces": 3,
            "paging leaves only the last block of a sequence partly unused": 2,
            "the cost: attention and storing go through the block table": 2,
        },
    ),
}

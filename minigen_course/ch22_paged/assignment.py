"""What may be assigned of chapter 22: cases by seed for its exercises, and questions."""

from random import Random
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from minigen.kv_cache.paged import KVPool, slots_of
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied, normal

LAYERS, BLOCKS, HEADS, DIM = 2, 8, 2, 4


def _table(random: Random, num_tokens: int, size: int) -> list[int]:
    """Return a block table for a sequence, in no order; block 0 is for padding."""
    return random.sample(range(1, BLOCKS + 1), -(-num_tokens // size))


def _slots_of(random: Random) -> dict[str, Any]:
    size = random.choice((3, 4, 5, 6, 8))
    num_tokens = random.randint(size + 1, 3 * size)
    first = random.randrange(num_tokens)
    positions = range(first, min(num_tokens, first + 2 * size))
    return {
        "block_ids": _table(random, num_tokens, size),
        "positions": positions,
        "block_size": size,
    }


def _decode_slots(random: Random) -> dict[str, Any]:
    size = random.choice((2, 3, 4, 8))
    lens = [random.randint(1, 3 * size) for _ in range(random.randint(2, 5))]
    tables = [_table(random, each, size) for each in lens]
    longest = max(map(len, tables))
    return {
        "block_tables": np.array([each + [0] * (longest - len(each)) for each in tables]),
        "context_lens": np.array(lens),
        "block_size": size,
    }


def _kv_pool(random: Random) -> dict[str, Any]:
    size = random.choice((2, 3, 4))
    num_tokens = random.randint(size + 1, 2 * size)
    table = _table(random, num_tokens, size)
    source, target = table[0], random.choice(sorted({*range(1, BLOCKS + 1)} - {*table}))
    return {
        "block_size": size,
        "block_ids": table,
        "layer_id": random.randrange(LAYERS),
        "keys": normal(random, num_tokens, HEADS, DIM),
        "values": normal(random, num_tokens, HEADS, DIM),
        "copied": (source, target),
    }


def _stored(
    part: Any,
    block_size: int,
    block_ids: list[int],
    layer_id: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    copied: tuple[int, int],
) -> Any:
    """Store a sequence in one layer of a pool of 2 layers and 8 blocks, copy a block, gather both.

    Block `copied[0]` is copied to `copied[1]`; what is gathered is the table, then the copy.
    """
    pool = part(LAYERS, BLOCKS, HEADS, block_size, DIM, torch.float32)
    slots = slots_of(block_ids, range(len(keys)), block_size)
    pool.store(layer_id, keys, values, torch.tensor(slots))
    pool.copy_blocks([copied])
    found = []
    for table in (block_ids, [copied[1]]):
        found += list(pool.gather(layer_id, torch.tensor(table)))
    return found


def _attend_by_block(random: Random) -> dict[str, Any]:
    size = random.choice((2, 3, 4))
    kv_heads, group = random.choice(((1, 2), (2, 1), (2, 3)))
    num_tokens = random.randint(1, 3 * size)
    pool = KVPool(LAYERS, BLOCKS, kv_heads, size, DIM, torch.float32)
    table, layer_id = _table(random, num_tokens, size), random.randrange(LAYERS)
    keys, values = (normal(random, num_tokens, kv_heads, DIM) for _ in range(2))
    slots = torch.tensor(slots_of(table, range(num_tokens), size))
    pool.store(layer_id, random.choice((1, 50)) * keys, values, slots)
    return {
        "q": normal(random, kv_heads * group, DIM),
        "pool": pool,
        "layer_id": layer_id,
        "block_ids": table,
        "num_tokens": num_tokens,
    }


VARIED = {
    "slots_of": Varied("block size, block table, and range of positions", _slots_of),
    "decode_slots": Varied("block size, number of sequences, tables, lengths", _decode_slots),
    "KVPool": Varied("block size, table, layer, keys and values, copied block", _kv_pool, _stored),
    "attend_by_block": Varied(
        "block size, heads, tokens, table, layer, size of the scores", _attend_by_block
    ),
}


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

"""Cases of chapter 22's exercises, drawn by a seed."""

from random import Random
from typing import Any

import numpy as np
import torch

from minigen.kv_cache.paged import KVPool, slots_of
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

"""Cases of chapter 33's exercises, drawn by a seed."""

from collections.abc import Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch33_paged_attention.exercises import contexts, joined
from minigen_course.ch33_paged_attention.kernels import (
    Parts,
    launch_decode,
    launch_gather,
    launch_join,
    no_parts,
)
from minigen_course.ch33_paged_attention.rungs import launch_grouped, launch_tiled
from minigen_course.grading.varied import Varied, normal
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

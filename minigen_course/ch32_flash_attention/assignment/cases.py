"""Cases of chapter 32's exercises, drawn by a seed."""

import math
from collections.abc import Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch32_flash_attention.flash import Partial
from minigen_course.ch32_flash_attention.lesson import (
    start_flash,
    start_unmasked,
)
from minigen_course.grading.varied import Varied, normal
from minigen_course.lab.triton_interpreter import Access, watched

WIDTH = 16  # head_dim of the kernels: the smallest that tl.dot accepts

DIM = 4  # head_dim of the loop in torch

LARGE = 40  # makes scores whose exp overflows float32


def _partial(random: Random, num_queries: int, base: int) -> dict[str, Any]:
    """Draw a part in which some queries may have seen no key."""
    seen = [random.random() < 0.7 for _ in range(num_queries)]
    return {
        "maximum": [float(base + random.randint(-2, 2)) if each else -math.inf for each in seen],
        "total": [random.choice((1.0, 1.5, 2.0, 3.0)) if each else 0.0 for each in seen],
        "mixed": [[float(random.randint(-9, 9) if each else 0) for _ in range(2)] for each in seen],
    }


def _merge(random: Random) -> dict[str, Any]:
    num_queries, base = random.choice((2, 3)), random.choice((0, 1000, -1000))
    return {name: _partial(random, num_queries, base) for name in ("one", "other")}


def _merged(part: Any, one: dict[str, Any], other: dict[str, Any]) -> Any:
    """Merge two parts, then the same two in the other order; a number or a row for each query."""
    parts = [
        Partial(*(torch.tensor(each[name]) for name in ("maximum", "total", "mixed")))
        for each in (one, other)
    ]
    found = [part(*parts), part(*parts[::-1])]
    return [
        {name: getattr(each, name).tolist() for name in ("maximum", "total", "mixed")}
        for each in found
    ]


def _flash_attention(random: Random) -> dict[str, Any]:
    tile, window = random.choice((2, 3, 4)), random.choice((None, 1, 2, 3, 5))
    num_new, before = 3 * tile + random.randint(1, tile), random.randint(0, 2 * tile)
    q_heads, kv_heads = random.choice(((2, 1), (4, 2), (3, 3), (6, 2)))
    return {
        "q": normal(random, num_new, q_heads, DIM),
        "k": normal(random, before + num_new, kv_heads, DIM),
        "v": normal(random, before + num_new, kv_heads, DIM),
        "window": window,
        "tile": tile,
    }


def _attended(
    part: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, tile: int
) -> list[Tensor]:
    """Compute attention, and again with nan in keys and values that a tile does not see.

    The result has three tensors: all rows, the rows of the first tile when later keys are nan, and
    the rows of the last tile when keys long before its window are nan.
    """
    before, last = len(k) - len(q), (len(q) - 1) // tile * tile
    after = before + 2 * tile  # a tile more than the first tile of queries sees
    found = part(q, _spoilt(k, after, len(k)), _spoilt(v, after, len(v)), window, tile)
    gone = 0 if window is None else max(0, before + last + 1 - window - tile)
    late = part(q, _spoilt(k, 0, gone), _spoilt(v, 0, gone), window, tile)
    return [part(q, k, v, window, tile), found[:tile], late[last:]]


def _spoilt(rows: Tensor, begin: int, end: int) -> Tensor:
    changed = rows.clone()
    changed[begin:end] = math.nan
    return changed


def _num(accesses: Iterable[Access], tensors: str, is_store: bool = False) -> int:
    """Return how many elements of these tensors are loaded, or stored."""
    return sum(
        len(each.offsets)
        for each in accesses
        if each.tensor in tensors.split() and each.is_store == is_store
    )


def _unmasked_kernel(random: Random) -> dict[str, Any]:
    num_rows, size = random.choice((32, 48)), random.choice((1, LARGE))
    q, k, v = (normal(random, num_rows, WIDTH) for _ in range(3))
    return {"q": size * q, "k": k, "v": v, "block": 16}


def _unmasked(part: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Any:
    """Launch the kernel for one head; the result holds nan before.

    The result is returned, how many elements of q and of k and v all programs load, and how many of
    the result they store.
    """
    mixed = torch.full_like(q, math.nan)
    accesses = watched(
        lambda: start_unmasked(part, q, k, v, mixed, block), q=q, k=k, v=v, mixed=mixed
    )
    loaded = {"from q": _num(accesses, "q"), "from k and v": _num(accesses, "k v")}
    return {"mixed": mixed, **loaded, "stored": _num(accesses, "mixed", True)}


def _flash_kernel(random: Random) -> dict[str, Any]:
    block_m, block_n = random.choice(((16, 16), (16, 32), (32, 16)))
    num_new = 32 + random.randint(1, 7)
    context = num_new + random.choice((0, random.randint(1, 20)))
    q_heads, kv_heads = random.choice(((2, 1), (4, 2)))
    return {
        "q": random.choice((1, LARGE)) * normal(random, num_new, q_heads, WIDTH),
        "k": normal(random, context, kv_heads, WIDTH),
        "v": normal(random, context, kv_heads, WIDTH),
        "block_m": block_m,
        "block_n": block_n,
    }


def _flashed(part: Any, q: Tensor, k: Tensor, v: Tensor, block_m: int, block_n: int) -> Any:
    """Launch the kernel; the result holds nan before.

    The result is returned, how many elements of q all programs load, how many of the result they
    store, and whether a program loads a whole tile of keys or values that it does not see.
    """
    mixed = torch.full_like(q, math.nan)
    accesses = watched(
        lambda: start_flash(part, q, k, v, mixed, block_m, block_n), q=q, k=k, v=v, mixed=mixed
    )
    before, row = len(k) - len(q), k[0].numel()
    beyond = [
        max(each.offsets, default=0) // row
        >= before + min(len(q), (each.program[0] + 1) * block_m) + block_n
        for each in accesses
        if each.tensor in ("k", "v")
    ]
    counts = {"loaded": _num(accesses, "q"), "stored": _num(accesses, "mixed", True)}
    return {"mixed": mixed, **counts, "loads unseen tiles": any(beyond)}


VARIED = {
    "merge": Varied("queries, maxima, which queries have seen a key", _merge, _merged),
    "flash_attention": Varied(
        "tokens, tokens before, heads, window, tile", _flash_attention, _attended
    ),
    "unmasked_kernel": Varied(
        "rows, size of the scores", _unmasked_kernel, _unmasked, 1e-3, num_cases=3
    ),
    "flash_kernel": Varied(
        "tokens, tokens before, heads, tile sizes, size of the scores",
        _flash_kernel,
        _flashed,
        1e-3,
        num_cases=2,
    ),
}

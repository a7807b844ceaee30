"""Online softmax tile by tile, the tiles that FlashAttention computes, and its kernel's launchers.

The tile bounds are those of `minigen.kernels.triton.prefill_attention`. Sources: Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
from torch import Tensor

from minigen_course.lab.triton_interpreter import Access, launch, record, triton_part

Kernel = Callable[..., object]
Attention = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
BLOCK = 16  # the smallest size that tl.dot accepts
NUM_WARPS = 4  # Triton's default


def flash_by(
    kernel: Kernel, block_m: int = BLOCK, block_n: int = BLOCK, num_warps: int = NUM_WARPS
) -> Attention:
    """Return attention as in chapter 14, by a kernel with `flash_kernel`'s signature.

    The interpreter ignores `num_warps`. Raises `ValueError` for a layer with a sliding window.
    """

    def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        if window is not None:
            raise ValueError(
                "This kernel does not support sliding windows, but this layer has a window of "
                f"{window}; choose a model without windows."
            )
        mixed = torch.empty_like(q)
        start_flash(kernel, q, k, v, mixed, block_m, block_n, num_warps)
        return mixed

    return flash


def compiling(kernel: Kernel) -> Kernel:
    """Return a kernel with `flash_kernel`'s signature, or the course's if it does not compile.

    The interpreter accepts more than Triton's compiler, whose reason is printed. Raises
    `OptionError` if Triton is not installed.
    """
    gpu = triton_part("minigen_course.ch31_triton.gpu_kernels")
    heads = torch.empty(BLOCK, 1, 16, dtype=torch.bfloat16, device="meta")
    try:
        gpu.machine_code("sm_80", lambda: flash_by(kernel)(heads, heads, heads, None))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        print(f"Your kernel does not compile, so the course's is taken: {reason}")
        return cast(Kernel, triton_part("minigen_course.ch32_flash_attention.kernels").flash_kernel)
    return kernel


def record_flash(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    block_m: int = BLOCK,
    block_n: int = BLOCK,
) -> list[Access]:
    """Run the kernel in the interpreter, write `mixed`, and return its loads and stores.

    Raises `IndexError` for an access outside the four tensors, before it happens, and
    `OptionError` if Triton is not installed.
    """
    return record(
        lambda: start_flash(kernel, q, k, v, mixed, block_m, block_n), q=q, k=k, v=v, mixed=mixed
    )


def start_flash(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    block_m: int,
    block_n: int,
    num_warps: int = NUM_WARPS,
) -> None:
    """Launch one program for every `block_m` queries and every head."""
    (num_new, q_heads, head_dim), (context, kv_heads, _) = q.shape, k.shape
    launch(
        kernel,
        (-(-num_new // block_m), q_heads),
        *(q.contiguous(), k.contiguous(), v.contiguous(), mixed),
        num_new,
        context,
        1 / math.sqrt(head_dim),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )


def start_unmasked(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, block: int = BLOCK
) -> None:
    """Launch a kernel with `unmasked_kernel`'s signature: one program for every `block` queries.

    All tensors are those of one head, [rows, head_dim], and rows is a multiple of `block`.
    """
    num_rows, head_dim = q.shape
    launch(
        kernel,
        (num_rows // block,),
        *(q, k, v, mixed),
        num_rows,
        1 / math.sqrt(head_dim),
        HEAD_DIM=head_dim,
        BLOCK=block,
    )


@dataclass(frozen=True)
class Fold:
    """The state of online softmax for one query after one tile; `scores` are the tile's.

    `shrink` is the factor by which this tile rescaled everything before: exp(old maximum - new
    maximum). `mixed / total` is the attention output so far.
    """

    scores: Tensor
    maximum: float
    shrink: float
    total: float
    mixed: Tensor


def fold_tiles(scores: Tensor, values: Tensor, tile: int) -> list[Fold]:
    """Compute softmax(scores) values for one query, `tile` keys at a time: a `Fold` per tile.

    `scores` has one score for each row of `values`. The last fold is over all keys.

    >>> folds = fold_tiles(torch.tensor([0.0, 0.0, 0.0]), torch.eye(3), tile=2)
    >>> [fold.total for fold in folds]
    [2.0, 3.0]
    """
    maximum, total, mixed = -torch.inf, 0.0, torch.zeros(values.shape[1])
    folds = []
    for own, rows in zip(scores.split(tile), values.split(tile), strict=True):
        higher = max(maximum, float(own.max()))
        shrink = float(torch.tensor(maximum - higher).exp())
        weights = (own - higher).exp()
        total = total * shrink + float(weights.sum())
        mixed = mixed * shrink + weights @ rows
        maximum = higher
        folds.append(Fold(own, maximum, shrink, total, mixed))
    return folds


class Sight(Enum):
    """How much of a tile the causal mask and the window leave visible."""

    WHOLE = "seen whole"
    PARTLY = "masked"
    NOTHING = "left out"


@dataclass(frozen=True)
class Tile:
    """Ranges of queries and of keys, counted from 0, and how much of the tile is seen."""

    queries: range
    keys: range
    sight: Sight

    @property
    def pairs(self) -> int:
        """Number of scores in the tile."""
        return len(self.queries) * len(self.keys)


def score_tiles(
    num_new: int, context: int, block_m: int, block_n: int, window: int | None = None
) -> list[Tile]:
    """Return all tiles of the scores of `num_new` queries, the last of `context` positions.

    A tile has `block_m` queries and `block_n` keys; the last ones may have fewer.

    >>> [tile.sight.value for tile in score_tiles(4, 4, 2, 2)]
    ['masked', 'left out', 'seen whole', 'masked']
    """
    return [
        Tile(queries, keys, _sight(queries, keys, context - num_new, window))
        for queries in _cut(num_new, block_m)
        for keys in _cut(context, block_n)
    ]


def _cut(length: int, block: int) -> Iterator[range]:
    return (range(begin, min(begin + block, length)) for begin in range(0, length, block))


def _sight(queries: range, keys: range, before: int, window: int | None) -> Sight:
    first, last = before + queries[0], before + queries[-1]
    forgotten = keys[-1] <= first - window if window is not None else False
    if keys[0] > last or forgotten:
        return Sight.NOTHING
    within = window is None or keys[0] > last - window
    return Sight.WHOLE if keys[-1] <= first and within else Sight.PARTLY


def pairs_wanted(num_new: int, context: int, window: int | None = None) -> int:
    """Count the pairs of a query and a key that it sees.

    >>> pairs_wanted(3, 3), pairs_wanted(1, 5), pairs_wanted(3, 5, window=2)
    (6, 5, 6)
    """
    positions = range(context - num_new + 1, context + 1)
    return sum(each if window is None else min(each, window) for each in positions)


def numbers_moved(num_new: int, context: int, head_dim: int, block_m: int) -> int:
    """Count the elements that all programs of one head load and store, without a window.

    Queries and results are moved once; keys and values once for each tile of queries, up to the
    position of its last query, for any size of the tiles of keys.

    >>> numbers_moved(4, 4, head_dim=1, block_m=2)  # 4 and 4, then 2 of 2, then 2 of 4
    20
    """
    keys = sum(context - num_new + queries.stop for queries in _cut(num_new, block_m))
    return 2 * num_new * head_dim + 2 * keys * head_dim

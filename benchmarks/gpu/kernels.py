"""Paged decode and products against the memory's bandwidth, prefill against torch's attention."""

import math
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.engines import Shape
from benchmarks.gpu.timing import replayed, seconds
from minigen.kernels.triton.attention import num_processors
from minigen.kernels.triton.decode_attention import (
    num_splits,
    paged_decode_torch,
    paged_decode_triton,
)
from minigen.kernels.triton.prefill_attention import flash_prefill_triton

CUDA = torch.device("cuda")
BLOCK_SIZE, HEAD_DIM, Q_HEADS, KV_HEADS = 16, 128, 32, 8
MOST_ERROR = 0.02  # relative to the result's norm; rounding to bfloat16 gives a tenth of it


def decode(batch: int, context: int, bandwidth: float | None) -> dict[str, Any]:
    """Time one decode step's attention in one layer: bytes of keys and values over its time.

    Several pools take turns, so that none is in the cache. Raises `AssertionError` for a wrong
    result.
    """
    num_blocks = batch * context // BLOCK_SIZE
    one_pool = 2 * num_blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2
    count = max(1, math.ceil(2**30 / one_pool))
    shape = (2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pools = [torch.randn(shape, device=CUDA).bfloat16() for _ in range(count)]
    tables = torch.randperm(num_blocks, device=CUDA).view(batch, -1)
    lengths = torch.full((batch,), context, device=CUDA)
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device=CUDA).bfloat16()
    splits = num_splits(batch * KV_HEADS, context, num_processors(CUDA))

    def all_pools() -> list[torch.Tensor]:
        return [paged_decode_triton(q, *pool, tables, lengths, splits=splits) for pool in pools]

    ours = all_pools()[0].float()
    expected = paged_decode_torch(q.float(), *pools[0].float(), tables, lengths)
    error = small_error(ours, expected)
    spent = seconds(replayed(all_pools)) / count
    result = {"batch": batch, "context": context, "splits": splits, "error": error}
    return result | _rate(one_pool, spent, bandwidth)


def prefill(length: int) -> dict[str, Any]:
    """Time one prompt's attention in one layer, and torch's own over contiguous keys and values.

    torch's is timed with grouped heads and with repeated ones; the faster counts. Raises
    `AssertionError` for a wrong result.
    """
    q = torch.randn(length, Q_HEADS, HEAD_DIM, device=CUDA).bfloat16()
    pool = torch.randn(2, length // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=CUDA)
    keys, values = pool.bfloat16()
    table = torch.randperm(length // BLOCK_SIZE, device=CUDA).view(1, -1)
    starts = torch.tensor([0, length], device=CUDA)
    lengths = starts[1:]
    queries = q.transpose(0, 1).unsqueeze(0).contiguous()
    gathered = [half[table[0]].flatten(0, 1).transpose(0, 1)[None] for half in (keys, values)]
    grouped = [each.contiguous() for each in gathered]
    repeated = [each.repeat_interleave(Q_HEADS // KV_HEADS, dim=1) for each in grouped]

    def ours() -> torch.Tensor:
        return flash_prefill_triton(q, keys, values, table, starts, lengths, length)

    def torchs(halves: list[torch.Tensor], enable_gqa: bool) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            queries, *halves, is_causal=True, enable_gqa=enable_gqa
        )

    expected = torchs(repeated, False)[0].transpose(0, 1).float()
    error = small_error(ours().float(), expected)
    spent = seconds(ours)
    of_torch = min(seconds(lambda: torchs(grouped, True)), seconds(lambda: torchs(repeated, False)))
    flops = 2 * Q_HEADS * HEAD_DIM * length * (length + 1)
    return {
        "length": length,
        "error": error,
        "seconds": spent,
        "flops_a_second": flops / spent,
        "torch_seconds": of_torch,
        "of_torch": of_torch / spent,
    }


def small_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error relative to the norm; raises `AssertionError` if it exceeds rounding."""
    error = float((ours - expected).norm() / expected.norm())
    if not error < MOST_ERROR:  # also refuses NaN
        raise AssertionError(f"the result is off by {error:.3g} of its norm")
    return error


def products_of_one_row(shape: Shape, bandwidth: float | None) -> dict[str, Any]:
    """Time a model's products for one token, by torch: bytes of weights over the time of each.

    `all` stands for the products of a whole decode step, which are most of it: an engine that
    multiplies like this cannot come closer to the bandwidth.
    """
    found: dict[str, Any] = {}
    all_bytes, all_spent = 0, 0.0
    for name, times, rows, columns in shape.products():
        num_bytes = rows * columns * 2
        count = max(2, math.ceil(2**30 / num_bytes))
        weights = [torch.randn(rows, columns, device=CUDA).bfloat16() for _ in range(count)]
        x = torch.randn(1, columns, device=CUDA).bfloat16()
        replay = replayed(lambda x=x, weights=weights: [functional.linear(x, w) for w in weights])
        spent = seconds(replay) / count
        all_bytes, all_spent = all_bytes + times * num_bytes, all_spent + times * spent
        found[name] = _rate(num_bytes, spent, bandwidth)
    return {**found, "all": _rate(all_bytes, all_spent, bandwidth)}


def _rate(num_bytes: int, spent: float, bandwidth: float | None) -> dict[str, Any]:
    rate = num_bytes / spent
    known = rate / bandwidth if bandwidth else None
    return {"seconds": spent, "bytes_a_second": rate, "of_copy_bandwidth": known}

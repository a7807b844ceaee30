"""Attention's products in AMX tiles: the order of their sums, and nothing read beyond a context."""

import numpy as np
import pytest

pytest.importorskip("numba")

from jaxtyping import Float32, UInt16
from numba import njit

from minigen.kernels.cpu.amx import kv_tiles
from minigen.kernels.cpu.amx.scratch import USE_TILES
from minigen.kernels.cpu.attention import Rows, score
from minigen.kernels.cpu.kv import bf16
from minigen.kernels.cpu.kv.layout import (
    CHUNK,
    TILE,
    Cache,
    PackedKVPool,
    Scratch,
    Shape,
    make_scratch,
    words_of_tile,
)
from minigen.kernels.cpu.kv.tile_index import tile_start
from minigen.kernels.cpu.register_tiles import ONE

pytestmark = pytest.mark.skipif(not USE_TILES, reason="this processor or system has no AMX tiles")

LAYER, HEAD, KV_HEADS = 1, 1, 2
Halves = UInt16[np.ndarray, "*axes"]
Floats = Float32[np.ndarray, "*axes"]


_acquire, _release = njit(kv_tiles.acquire), njit(kv_tiles.release)
_accumulate = njit(kv_tiles.accumulate_values)
_write_key, _write_value = njit(bf16.write_key), njit(bf16.write_value)


@njit
def _score(tokens, shape, end, rows, cache, scratch):  # type: ignore[no-untyped-def]
    _acquire(cache)
    score(cache, tokens, shape, 0, end, end - 1, rows, LAYER, scratch, 0, 0)
    _release(cache)


@njit
def _add_values(tokens, shape, end, num_keys, rows, cache, scratch, acc):  # type: ignore[no-untyped-def]
    _acquire(cache)
    _accumulate(cache, tokens, shape, 0, end, num_keys, rows, LAYER, scratch, 0, acc)
    _release(cache)


def bfloat16(numbers: Floats) -> Floats:
    """Round to bfloat16 by cutting off, and keep the numbers as float32."""
    return (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)


def in_order_of_tiles(left: Floats, right: Floats, width: int) -> Floats:
    """Return left @ right.T, `width` columns at a time: even and odd ones apart, then their sum."""
    total = np.zeros((len(left), len(right)), np.float32)
    for first in range(0, left.shape[1], width):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for column in range(first, first + width, 2):
            even += left[:, None, column] * right[None, :, column]
            odd += left[:, None, column + 1] * right[None, :, column + 1]
        total += even + odd
    return total


class Context:
    """A context of random keys and values in scattered blocks, and random queries of a head."""

    def __init__(self, head_dim: int, num_keys: int):
        rng = np.random.default_rng(head_dim + num_keys)
        num_tiles = -(-num_keys // TILE)
        sizes = (2, 64, 4, KV_HEADS, head_dim, 64, 32, TILE, num_tiles + 1)
        self.shape = Shape(*sizes, words_of_tile(head_dim, "bfloat16"), np.float32(1e-5))
        cache, scratch = (
            PackedKVPool(self.shape, "bfloat16").cache,
            make_scratch(self.shape, 16, 1, "bfloat16"),
        )
        assert isinstance(cache, Cache)
        assert isinstance(scratch, Scratch)
        self.cache, self.scratch = cache, scratch
        self.cache.halves[:] = 0x7FC0  # NaN: what former owners left
        table = rng.permutation(num_tiles) + 1
        self.rows = Rows(0, TILE, HEAD, 0, 8, num_keys, table)
        self.num_keys, self.num_tiles = num_keys, num_tiles
        self.queries, self.probs = (
            bfloat16(rng.standard_normal(size, dtype=np.float32))
            for size in ((TILE, head_dim), (TILE, num_tiles * TILE))
        )
        self.probs[:, num_keys:] = 0
        self.keys, self.values = (
            bfloat16(rng.standard_normal((num_keys, head_dim), dtype=np.float32)) for _ in range(2)
        )
        buffer = np.empty(head_dim, np.uint16)
        for key in range(num_keys):
            tile, lane = divmod(key, TILE)
            keys, values = (
                tile_start(self.shape, LAYER, half, table, HEAD, tile) for half in (0, 1)
            )
            at = key * head_dim
            _write_key(cache, keys, lane, self.keys.reshape(-1), at, head_dim, buffer)
            alone, numbers = key == num_keys - 1, self.values.reshape(-1)
            _write_value(cache, values, lane, numbers, at, head_dim, buffer, alone)


def upper_halves(numbers: Floats) -> Halves:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("head_dim", "num_keys"), [(32, 5), (64, 16), (64, 83), (96, 40)])
def test_scores_and_values_are_summed_in_the_order_of_the_tiles(
    head_dim: int, num_keys: int
) -> None:
    context = Context(head_dim, num_keys)
    scratch, shape, end = context.scratch, context.shape, context.num_tiles
    scratch.query_numbers[: TILE * head_dim] = upper_halves(context.queries).reshape(-1)
    _score(ONE, shape, end, context.rows, context.cache, scratch)
    found = scratch.scores[: TILE * CHUNK].reshape(TILE, CHUNK)[:, :num_keys]
    assert np.array_equal(found, in_order_of_tiles(context.queries, context.keys, 32))

    halves = scratch.prob_numbers[: TILE * CHUNK].reshape(TILE, CHUNK)
    halves[:, : end * TILE] = upper_halves(context.probs)
    acc = np.zeros(TILE * head_dim, np.float32)
    _add_values(ONE, shape, end, num_keys, context.rows, context.cache, scratch, acc)
    whole = np.zeros((end * TILE, head_dim), np.float32)
    whole[:num_keys] = context.values
    expected = in_order_of_tiles(context.probs, np.ascontiguousarray(whole.T), TILE)
    assert np.array_equal(acc.reshape(TILE, head_dim), expected)

"""Elementwise kernels, token by token: RMSNorm, SiLU, and the inputs of a matrix product.

The form of a product's inputs depends on its weights: bytes with one scale per 32 numbers
(`Quantized`), or bfloat16 pairs (`Rounded`). The kernel before the product writes that form.
"""

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from minigen.kernels.cpu.amx.scratch import ROWS, USE_TILES
from minigen.kernels.cpu.arrays.inputs import Quantized
from minigen.kernels.cpu.simd import (
    OutsideKernelError,
    all_lanes,
    fused,
    kernel,
    larger,
    largest_lane,
    load,
    middle_swapped,
    nearest,
    overload,
    power_of_two,
    smaller,
    store_bfloat16,
    store_bytes,
    sum_of_lanes,
)
from minigen.kernels.cpu.thread_pool import barrier, next_phase, take, task_size

LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOG2_E = np.float32(1.4426950408889634)
ZERO_FACTOR = 4  # the zeros of `Quantized.pairs4` are this many times as large
TINY = np.float32(1e-30)  # smaller scales count as 0: 1 / scale could overflow


@kernel
def tiled_group(row, group, groups):
    """Return the index of a token's group in the order of tiles."""
    return (row // ROWS * groups + group) * ROWS + row % ROWS


def write_group(inputs: Any, row: int, group: int, groups: int, low: Any, high: Any) -> None:
    """Write 32 numbers, given as two vectors, as one of the `groups` groups of a row."""
    raise OutsideKernelError


@overload(write_group)
def _write_group(inputs, row, group, groups, low, high):
    if inputs.instance_class is Quantized:
        return _write_bytes
    return _write_halves


def _write_bytes(inputs, row, group, groups, low, high):
    at = row * groups + group
    nothing = all_lanes(np.float32(0.0))
    largest = largest_lane(larger(nothing, larger(low, high)))
    smallest = -largest_lane(larger(nothing, larger(nothing - low, nothing - high)))
    scale, steps = (largest - smallest) / np.float32(254.0), np.float32(0.0)
    if scale > TINY:
        steps = np.float32(1.0) / scale
    low, high = nearest(low * all_lanes(steps)), nearest(high * all_lanes(steps))
    total = sum_of_lanes(low + high)
    zero = np.rint(smallest * steps) + np.float32(128.0)
    store_bytes(inputs.numbers, at * 32, low - all_lanes(zero))
    store_bytes(inputs.numbers, at * 32 + 16, high - all_lanes(zero))
    scale += total - total  # + 0, or + NaN
    upper, lower = np.int32(total) << 16, np.int32(zero)
    inputs.pairs8[at] = upper | (lower & 0xFFFF)
    inputs.pairs4[at] = upper | (ZERO_FACTOR * lower & 0xFFFF)
    inputs.scales[at] = scale
    if USE_TILES:
        tiled, at = inputs.tiled, tiled_group(row, group, groups)
        store_bfloat16(tiled.halves, at * 32, middle_swapped(low))
        store_bfloat16(tiled.halves, at * 32 + 16, middle_swapped(high))
        tiled.scales[at], tiled.sums[at] = scale, total


def _write_halves(inputs, row, group, groups, low, high):
    at = tiled_group(row, group, groups) if USE_TILES else row * groups + group
    store_bfloat16(inputs.numbers, at * 32, low)
    store_bfloat16(inputs.numbers, at * 32 + 16, high)


@njit(inline="always")
def exponential(x):
    """Return e^x in float32 precision: 2^n e^r with |r| < 0.35, e^r by a polynomial (Cephes).

    x is clamped to [-87, 88], because float32 can just represent e^-87 and e^88.
    """
    x = smaller(all_lanes(np.float32(88.0)), larger(all_lanes(np.float32(-87.0)), x))
    n = nearest(x * all_lanes(LOG2_E))
    r = fused(n, all_lanes(-LN2_HIGH), x)
    r = fused(n, all_lanes(-LN2_LOW), r)
    p = all_lanes(np.float32(1.9875691500e-4))
    p = fused(p, r, all_lanes(np.float32(1.3981999507e-3)))
    p = fused(p, r, all_lanes(np.float32(8.3334519073e-3)))
    p = fused(p, r, all_lanes(np.float32(4.1665795894e-2)))
    p = fused(p, r, all_lanes(np.float32(1.6666665459e-1)))
    p = fused(p, r, all_lanes(np.float32(5.0000001201e-1)))
    one = all_lanes(np.float32(1.0))
    return fused(p, r * r, r + one) * power_of_two(n)


@njit(inline="always")
def silu(x):
    """Return SiLU(x) = x / (1 + e^-x)."""
    one = all_lanes(np.float32(1.0))
    return x / (one + exponential(all_lanes(np.float32(0.0)) - x))


@kernel
def root_mean_square_factor(x, start, width, eps):
    """Return 1 / sqrt(mean square + eps), RMSNorm's factor for `width` numbers from `start` on."""
    total = all_lanes(np.float32(0.0))
    for column in range(0, width, 16):
        numbers = load(x, start + column)
        total = fused(numbers, numbers, total)
    return np.float32(1.0) / np.sqrt(sum_of_lanes(total) / np.float32(width) + eps)


@partial(kernel, forceinline=True)
def _normalize_row(x, row, width, weight, eps, inputs):
    factor = all_lanes(root_mean_square_factor(x, row * width, width, eps))
    for group in range(width // 32):
        at = group * 32
        low = load(x, row * width + at) * factor * load(weight, at)
        high = load(x, row * width + at + 16) * factor * load(weight, at + 16)
        write_group(inputs, row, group, width // 32, low, high)


@kernel
def normalize(pool, x, num_rows, width, weight, eps, inputs):
    """Apply RMSNorm to the first rows of `x`, and write them as inputs of a product."""
    size = task_size(pool, num_rows)
    num_tasks = -(-num_rows // size)
    next_phase(pool)
    taken = take(pool, num_tasks)
    while taken < num_tasks:
        for row in range(taken * size, min(num_rows, taken * size + size)):
            _normalize_row(x, row, width, weight, eps, inputs)
        taken = take(pool, num_tasks)
    barrier(pool, num_tasks)


@partial(kernel, forceinline=True)
def _prepare_row(x, row, width, inputs):
    groups = width // 32
    for group in range(groups):
        at = (row * groups + group) * 32
        write_group(inputs, row, group, groups, load(x, at), load(x, at + 16))


@kernel
def prepare(pool, x, num_rows, width, inputs):
    """Write the first rows of `x` as inputs of a product."""
    size = task_size(pool, num_rows)
    num_tasks = -(-num_rows // size)
    next_phase(pool)
    taken = take(pool, num_tasks)
    while taken < num_tasks:
        for row in range(taken * size, min(num_rows, taken * size + size)):
            _prepare_row(x, row, width, inputs)
        taken = take(pool, num_tasks)
    barrier(pool, num_tasks)

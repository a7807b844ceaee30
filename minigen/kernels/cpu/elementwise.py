"""What is done to each token by itself: normalising, rotating, and getting ready for a product.

A product wants its inputs in the form that its weights call for: bytes with a scale for every 32
(`Quantised`), or bfloat16 pairs (`Rounded`). They are written in that form by whoever makes them.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from minigen.kernels.cpu.simd import (
    OutsideKernelError,
    all_lanes,
    fused,
    larger,
    largest_lane,
    load,
    nearest,
    power_of_two,
    smaller,
    store_bfloat16,
    store_bytes,
    sum_of_lanes,
    zeros,
)
from minigen.kernels.cpu.thread_pool import begin, finish, portion, take

LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOG2_E = np.float32(1.4426950408889634)
TINY = np.float32(1e-30)  # a group of smaller numbers is zeros: one over its steps is infinite


class Quantised(NamedTuple):
    """Inputs in bytes: number = (byte + zero) x scale, scale and zero being those of 32 numbers.

    With a zero of their own, the 256 steps of a group reach from its smallest number to its
    largest: where one number is large they are half as wide as steps to both sides.
    `words` and `numbers` are the same memory, by four bytes and by one. What a group of weights is
    multiplied with is in `pairs`, 16 bits each: the zero, and the sum of byte + zero; `sums` has
    that sum times the scale. A NaN or infinity makes its group's scale NaN: bytes cannot tell.
    """

    words: np.ndarray
    numbers: np.ndarray
    scales: np.ndarray
    pairs: np.ndarray
    sums: np.ndarray


class Rounded(NamedTuple):
    """Inputs in bfloat16; `words` and `halves` are the same memory, by pairs and one by one."""

    words: np.ndarray
    halves: np.ndarray


def quantised(num_numbers: int) -> Quantised:
    """SamplingScratch for so many numbers, in bytes."""
    words = zeros(num_numbers // 4, np.int32)
    scales, sums = (zeros(num_numbers // 32, np.float32) for _ in range(2))
    pairs = zeros(num_numbers // 32, np.int32)
    return Quantised(words, words.view(np.int8), scales, pairs, sums)


def rounded(num_numbers: int) -> Rounded:
    """SamplingScratch for so many numbers, in bfloat16."""
    words = zeros(num_numbers // 2, np.int32)
    return Rounded(words, words.view(np.uint16))


def write_group(inputs: Any, group: int, low: Any, high: Any) -> None:
    """Write 32 numbers, in two vectors, as the inputs' group of that number."""
    raise OutsideKernelError


@overload(write_group)
def _write_group(inputs, group, low, high):
    if inputs.instance_class is Quantised:
        return _write_bytes
    return _write_halves


def _write_bytes(inputs, group, low, high):
    nothing = all_lanes(np.float32(0.0))
    largest = largest_lane(larger(nothing, larger(low, high)))
    smallest = -largest_lane(larger(nothing, larger(nothing - low, nothing - high)))
    scale, steps = (largest - smallest) / np.float32(254.0), np.float32(0.0)
    if scale > TINY:
        steps = np.float32(1.0) / scale
    low, high = nearest(low * all_lanes(steps)), nearest(high * all_lanes(steps))
    total = sum_of_lanes(low + high)
    zero = np.rint(smallest * steps) + np.float32(128.0)
    store_bytes(inputs.numbers, group * 32, low - all_lanes(zero))
    store_bytes(inputs.numbers, group * 32 + 16, high - all_lanes(zero))
    inputs.scales[group] = scale + (total - total)  # 0, or NaN
    inputs.pairs[group] = (np.int32(total) << 16) | (np.int32(zero) & 0xFFFF)
    inputs.sums[group] = scale * total


def _write_halves(inputs, group, low, high):
    store_bfloat16(inputs.halves, group * 32, low)
    store_bfloat16(inputs.halves, group * 32 + 16, high)


@njit(inline="always")
def exponential(x):
    """e^x, to a float32's precision: 2^n e^r with |r| < 0.35, e^r by a polynomial (Cephes).

    Beyond -87 and 88 it stays at e^-87 and e^88, which float32 just holds.
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
    """x / (1 + e^-x)."""
    one = all_lanes(np.float32(1.0))
    return x / (one + exponential(all_lanes(np.float32(0.0)) - x))


@njit
def root_mean_square_factor(x, start, width, eps):
    """1 / sqrt(mean square + eps), for RMSNorm of `width` numbers from `start` on."""
    total = all_lanes(np.float32(0.0))
    for column in range(0, width, 16):
        numbers = load(x, start + column)
        total = fused(numbers, numbers, total)
    return np.float32(1.0) / np.sqrt(sum_of_lanes(total) / np.float32(width) + eps)


@njit
def _normalise_row(x, row, width, weight, eps, inputs):
    factor = all_lanes(root_mean_square_factor(x, row * width, width, eps))
    for group in range(width // 32):
        at = group * 32
        low = load(x, row * width + at) * factor * load(weight, at)
        high = load(x, row * width + at + 16) * factor * load(weight, at + 16)
        write_group(inputs, row * (width // 32) + group, low, high)


@njit
def normalise(crew, x, num_rows, width, weight, eps, inputs):
    """RMSNorm of the first rows of `x`, written as inputs of a product."""
    size = portion(crew, num_rows)
    num_tasks = -(-num_rows // size)
    begin(crew)
    taken = take(crew, num_tasks)
    while taken < num_tasks:
        for row in range(taken * size, min(num_rows, taken * size + size)):
            _normalise_row(x, row, width, weight, eps, inputs)
        taken = take(crew, num_tasks)
    finish(crew, num_tasks)


@njit
def _prepare_row(x, row, width, inputs):
    for group in range(row * (width // 32), (row + 1) * (width // 32)):
        write_group(inputs, group, load(x, group * 32), load(x, group * 32 + 16))


@njit
def prepare(crew, x, num_rows, width, inputs):
    """The first rows of `x` as inputs of a product."""
    size = portion(crew, num_rows)
    num_tasks = -(-num_rows // size)
    begin(crew)
    taken = take(crew, num_tasks)
    while taken < num_tasks:
        for row in range(taken * size, min(num_rows, taken * size + size)):
            _prepare_row(x, row, width, inputs)
        taken = take(crew, num_tasks)
    finish(crew, num_tasks)

"""Products of bytes and codes in plain NumPy, as readable versions of the kernels.

Only readers and tests run it. The kernels compute the same sums, a register at a time.
"""

from typing import NamedTuple

import numpy as np


class CodeRows(NamedTuple):
    """Quantised weights: weight = code x scale + minimum, with both per group of 32 weights.

    `codes` are uint8, 0 to 15, [rows, groups, 32]; `scales` and `minima` are float32, [rows,
    groups]. (8-bit codes are int8, and their minima are 0.)
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray


class ByteRows(NamedTuple):
    """Quantised inputs: number = (byte + zero) x scale, with both per group of 32 numbers.

    `numbers` are the bytes, int8, [tokens, groups, 32]; `scales` are float32 and `zeros` int32,
    both [tokens, groups].
    """

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


def multiply_bytes(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Compute a matrix times a vector, float32, [rows], from bytes and their scales.

    `codes` are int8, [rows, groups, size], with `scales` float32, [rows, groups]; `inputs` are
    int8, [groups, size], with `input_scales` float32, [groups]. A number is byte x scale.
    """
    dots = (codes.astype(np.int32) * inputs.astype(np.int32)).sum(axis=-1)
    return (dots * scales * input_scales).sum(axis=-1).astype(np.float32)


def byte_rows(x: np.ndarray) -> ByteRows:
    """Quantise inputs to bytes: 254 steps from each group's smallest number to its largest.

    The range always includes 0. `x` is float32, [tokens, width], and 32 divides the width. A group
    of zeros has the scale 0.
    """
    groups = x.reshape(len(x), -1, 32)
    largest, smallest = groups.max(axis=-1, initial=0), groups.min(axis=-1, initial=0)
    scales = (largest - smallest) / np.float32(254)
    steps = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    zeros = np.rint(smallest * steps) + 128
    numbers = np.rint(groups * steps[..., None]) - zeros[..., None]
    return ByteRows(numbers.astype(np.int8), scales, zeros.astype(np.int32))


def multiply_codes(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Compute inputs x weights^T, float32, [tokens, rows], from integer dot products and sums.

    Over a group, (byte + zero) x scale times (code x scale + minimum) adds up to two terms: (bytes
    x codes + zero x the sum of codes) times both scales, and (the sum of bytes + 32 x zero) times
    the input's scale and the weight's minimum.
    """
    codes, numbers = weights.codes.astype(np.int32), inputs.numbers.astype(np.int32)
    dots = np.einsum("tgc,rgc->trg", numbers, codes)
    dots = dots + inputs.zeros[:, None] * codes.sum(axis=-1)
    sums = numbers.sum(axis=-1) + codes.shape[-1] * inputs.zeros
    found = dots * weights.scales + sums[:, None] * weights.minima
    return (found * inputs.scales[:, None]).sum(axis=-1).astype(np.float32)

"""The product of bytes with 4-bit codes in plain NumPy: what the kernels compute, to be read.

Nothing runs it but readers and tests. The kernels make the same sums, a register at a time.
"""

from typing import NamedTuple

import numpy as np


class CodeRows(NamedTuple):
    """Weights: weight = code x scale + minimum, scale and minimum being those of 32 weights.

    `codes` are uint8, 0 to 15, [rows, groups, 32]; `scales` and `minima` float32, [rows, groups].
    (Codes of 8 bits are int8, and have minima of 0.)
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray


class ByteRows(NamedTuple):
    """Inputs: number = (byte + zero) x scale, scale and zero being those of 32 numbers.

    `numbers` are int8, [tokens, groups, 32]; `scales` float32 and `zeros` int32, [tokens, groups].
    """

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


def byte_rows(x: np.ndarray) -> ByteRows:
    """Inputs in bytes, 254 steps from each group's smallest number (or 0) to its largest (or 0).

    `x` is float32, [tokens, width], and 32 divides the width. A group of zeros has the scale 0.
    """
    groups = x.reshape(len(x), -1, 32)
    largest, smallest = groups.max(axis=-1, initial=0), groups.min(axis=-1, initial=0)
    scales = (largest - smallest) / np.float32(254)
    steps = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    zeros = np.rint(smallest * steps) + 128
    numbers = np.rint(groups * steps[..., None]) - zeros[..., None]
    return ByteRows(numbers.astype(np.int8), scales, zeros.astype(np.int32))


def multiply_codes(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """inputs x weights^T, float32, [tokens, rows], of whole-number dot products and three sums.

    Over a group, (byte + zero) x scale times code x scale + minimum adds up to: bytes x codes, and
    zero x the codes' sum, times both scales; and the bytes' sum, and 32 x zero, times the inputs'
    scale and the weights' minimum.
    """
    codes, numbers = weights.codes.astype(np.int32), inputs.numbers.astype(np.int32)
    dots = np.einsum("tgc,rgc->trg", numbers, codes)
    dots = dots + inputs.zeros[:, None] * codes.sum(axis=-1)
    sums = numbers.sum(axis=-1) + codes.shape[-1] * inputs.zeros
    found = dots * weights.scales + sums[:, None] * weights.minima
    return (found * inputs.scales[:, None]).sum(axis=-1).astype(np.float32)

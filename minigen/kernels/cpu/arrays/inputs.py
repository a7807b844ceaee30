"""The inputs of matrix products: bytes with a scale per 32 numbers, or bfloat16 pairs.

`minigen.kernels.cpu.elementwise` writes them.
"""

from typing import NamedTuple

import numpy as np

from minigen.kernels.cpu.amx.scratch import ROWS, USE_TILES
from minigen.kernels.cpu.arrays.aligned import NUM_LANES, zeros
from minigen.kernels.processor import cpu_name, fastest_of, names_of, target_features

_FEATURES = names_of(target_features())  # this module loads without the compiler
_IS_ZEN = cpu_name().startswith("znver")
# Intel's processors with AVX-512 start two operations on 64 bytes per cycle, and a product takes
# five cycles. So unpacking costs as much as multiplying, and products must not wait for each other.
# Zen 4 starts one product per cycle, and other operations beside it.
UNPACKS_CODES = fastest_of(_FEATURES) == "AVX-512 VNNI" and not _IS_ZEN
# Whether an instruction multiplies pairs of bfloat16, and is the fastest way to do it. Zen 4 starts
# `vdpbf16ps` every cycle, Intel every other cycle (Emerald Rapids), in which it could start four
# products of float32.
IN_PAIRS = USE_TILES or ("avx512bf16" in _FEATURES and _IS_ZEN)
UNPACKED = (9 if UNPACKS_CODES else 1) * NUM_LANES  # words of a panel's group
# Tokens whose SiLU(gate) x up is computed at once, after all of a task's panels: whole tiles.
GATED = 24 if UNPACKS_CODES else 16


class Tiled(NamedTuple):
    """Quantised inputs once more, for AMX tiles; without them the arrays are empty.

    `halves` are byte + zero, a whole number of at most eight bits, as bfloat16. Of every four the
    middle ones change places, as in `minigen.kernels.cpu.amx.products.unpack`. `sums` are those of
    a group's byte + zero.
    """

    halves: np.ndarray  # [tokens / 16, groups, 16 tokens, 32]
    scales: np.ndarray  # [tokens / 16, groups, 16 tokens]
    sums: np.ndarray


class Quantized(NamedTuple):
    """Inputs as bytes: number = (byte + zero) x scale, scale and zero point per 32 numbers.

    Because of the zero point, the 254 steps of a group span from its smallest number to its
    largest. With one large number they are half as wide as steps of a symmetric range.
    `words` and `numbers` are the same memory, as words of four bytes and as bytes. `pairs8` holds
    two 16-bit numbers per group, which are multiplied with the pair of 8-bit weights: the zero
    point, and the sum of byte + zero. In `pairs4`, for 4-bit weights, the zero point is multiplied
    by `ZERO_FACTOR`. A byte cannot represent NaN or infinity, so either makes the scale of its
    group NaN.
    """

    words: np.ndarray
    numbers: np.ndarray
    scales: np.ndarray
    pairs8: np.ndarray
    pairs4: np.ndarray
    tiled: Tiled


class Rounded(NamedTuple):
    """Inputs that are rounded to bfloat16.

    `words` and `numbers` are the same memory, as pairs and as numbers of 16 bits. Without
    `IN_PAIRS` both are the same array of float32, so that nothing is unpacked.
    The order of inputs is [tokens, groups, 32], and with AMX tiles [tokens / 16, groups, 16 tokens,
    32].
    """

    words: np.ndarray
    numbers: np.ndarray


def _whole_tiles(num_tokens: int) -> int:
    return -(-num_tokens // ROWS) * ROWS


def quantized(num_tokens: int, width: int) -> Quantized:
    """Allocate inputs as bytes, with their scales and sums."""
    groups = num_tokens * width // 32
    words, pairs8, pairs4 = (zeros(size, np.int32) for size in (groups * 8, groups, groups))
    scales = zeros(groups, np.float32)
    in_tiles = _whole_tiles(num_tokens) * width // 32 if USE_TILES else 0
    halves = zeros(in_tiles * 32, np.uint16)
    tiled = Tiled(halves, *(zeros(in_tiles, np.float32) for _ in range(2)))
    return Quantized(words, words.view(np.int8), scales, pairs8, pairs4, tiled)


def rounded(num_tokens: int, width: int) -> Rounded:
    """Allocate inputs in bfloat16."""
    rows = _whole_tiles(num_tokens) if USE_TILES else num_tokens
    return rounded_numbers(rows * width)


def rounded_numbers(count: int) -> Rounded:
    """Allocate numbers that kernels round to bfloat16 and multiply with pairs of bfloat16."""
    if not IN_PAIRS:
        numbers = zeros(count, np.float32)
        return Rounded(numbers, numbers)
    words = zeros(count // 2, np.int32)
    return Rounded(words, words.view(np.uint16))

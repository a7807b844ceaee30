"""Products of a few or of many tokens with weights in panels.

A task is a panel of sixteen output columns. Its weights come from memory once, and stay in the
cache while all tokens, eight at a time, are multiplied with them: a step of one token is bound by
the bytes of the weights, one of hundreds by the dot products. Every token's sum is made in the same
order whatever its neighbours are, so that batching changes no bit of it.
"""

from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import overload

from minigen.kernels.lanes import (
    high_nibbles,
    load,
    load_float16,
    low_nibbles,
)
from minigen.kernels.llvm import OutsideKernelError
from minigen.kernels.panels import Codes4, Codes8
from minigen.kernels.rows import silu, write_group
from minigen.kernels.tiles import (
    EIGHT,
    FOUR,
    ONE,
    TWO,
    add_bfloat_dots,
    add_byte_dots,
    add_products,
    add_scaled,
    add_stored,
    spread_numbers,
    spread_products,
    store_tile,
    zeros,
)

_NO_DOTS, _ONES = np.zeros(1, np.int32), np.full(1, 0x01010101, np.int32)


def product_tile(
    tokens: Any,
    weights: Any,
    layer: int,
    panel: int,
    inputs: Any,
    first: int,
    groups: int,
    code_sums: Any,
) -> Any:
    """The products of tokens `first`, `first` + 1, ... with a panel: a tile, a row a token.

    Bytes have a zero of their own, and it meets every code of a group: (byte + zero) x code. The
    first token's tile leaves the sums of the codes in `code_sums`, for those that follow.
    """
    raise OutsideKernelError


@overload(product_tile)
def _product_tile(tokens, weights, layer, panel, inputs, first, groups, code_sums):
    if weights.instance_class is Codes4:
        return _product_of_codes4
    if weights.instance_class is Codes8:
        return _product_of_codes8
    return _product_of_pairs


@njit(inline="always")
def _sum_of_codes4(codes, at):
    """The sum of each lane's 32 codes of a group."""
    total = spread_numbers(ONE, _NO_DOTS, 0, 0)
    for word in range(4):
        both = load(codes, at * 64 + word * 16)
        total = add_byte_dots(total, low_nibbles(both), _ONES, 0, 0)
        total = add_byte_dots(total, high_nibbles(both), _ONES, 0, 0)
    return total


@njit(inline="always")
def _sum_of_codes8(codes, at):
    total = spread_numbers(ONE, _NO_DOTS, 0, 0)
    for word in range(8):
        total = add_byte_dots(total, load(codes, at * 128 + word * 16), _ONES, 0, 0)
    return total


def _product_of_codes4(tokens, weights, layer, panel, inputs, first, groups, code_sums):
    codes, scales, minima = weights.codes[layer], weights.scales[layer], weights.minima[layer]
    total = zeros(tokens)
    for group in range(groups):
        at = panel * groups + group
        own = first * groups + group
        if first == 0:
            store_tile(code_sums, group * 16, 16, _sum_of_codes4(codes, at))
        dots = spread_products(tokens, load(code_sums, group * 16), inputs.zeros, own, groups)
        for word in range(4):
            both = load(codes, at * 64 + word * 16)
            dots = add_byte_dots(dots, low_nibbles(both), inputs.words, own * 8 + word, groups * 8)
            dots = add_byte_dots(
                dots, high_nibbles(both), inputs.words, own * 8 + 4 + word, groups * 8
            )
        scale = load_float16(scales, at * 16)
        total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        total = add_products(total, load_float16(minima, at * 16), inputs.sums, own, groups)
    return total


def _product_of_codes8(tokens, weights, layer, panel, inputs, first, groups, code_sums):
    codes, scales = weights.codes[layer], weights.scales[layer]
    total = zeros(tokens)
    for group in range(groups):
        at = panel * groups + group
        own = first * groups + group
        if first == 0:
            store_tile(code_sums, group * 16, 16, _sum_of_codes8(codes, at))
        dots = spread_products(tokens, load(code_sums, group * 16), inputs.zeros, own, groups)
        for word in range(8):
            dots = add_byte_dots(
                dots, load(codes, at * 128 + word * 16), inputs.words, own * 8 + word, groups * 8
            )
        scale = load_float16(scales, at * 16)
        total = add_scaled(total, dots, scale, inputs.scales, own, groups)
    return total


def _product_of_pairs(tokens, weights, layer, panel, inputs, first, groups, code_sums):
    words = weights.words[layer]
    num_words = groups * 16
    total = zeros(tokens)
    for word in range(num_words):
        pairs = load(words, (panel * num_words + word) * 16)
        total = add_bfloat_dots(total, pairs, inputs.words, first * num_words + word, num_words)
    return total


@njit
def _multiply_tile(tokens, weights, layer, panel, inputs, first, groups, sums, out, width, add):
    total = product_tile(tokens, weights, layer, panel, inputs, first, groups, sums)
    at = first * width + panel * 16
    if add:
        total = add_stored(total, out, at, width)
    store_tile(out, at, width, total)


@njit(parallel=True)
def multiply(weights, layer, inputs, num_tokens, groups, out, width, add):
    """out[tokens, width] = inputs x weights[layer]^T, or, where `add`, out += it."""
    for panel in prange(width // 16):
        sums = np.empty(groups * 16, np.int32)
        first = 0
        while first + 8 <= num_tokens:
            _multiply_tile(
                EIGHT, weights, layer, panel, inputs, first, groups, sums, out, width, add
            )
            first += 8
        if first + 4 <= num_tokens:
            _multiply_tile(
                FOUR, weights, layer, panel, inputs, first, groups, sums, out, width, add
            )
            first += 4
        if first + 2 <= num_tokens:
            _multiply_tile(TWO, weights, layer, panel, inputs, first, groups, sums, out, width, add)
            first += 2
        if first < num_tokens:
            _multiply_tile(ONE, weights, layer, panel, inputs, first, groups, sums, out, width, add)


@njit
def _gate_tile(tokens, weights, layer, pair, inputs, first, groups, ffn, hidden, scratch, sums):
    up = ffn // 16
    for half in range(2):
        panel = 2 * pair + half
        of_gate = sums[2 * half * groups * 16 :]
        gates = product_tile(tokens, weights, layer, panel, inputs, first, groups, of_gate)
        store_tile(scratch, half * 16, 64, gates)
        of_up = sums[(2 * half + 1) * groups * 16 :]
        ups = product_tile(tokens, weights, layer, up + panel, inputs, first, groups, of_up)
        store_tile(scratch, 32 + half * 16, 64, ups)
    for token in range(len(tokens)):
        low = silu(load(scratch, token * 64)) * load(scratch, token * 64 + 32)
        high = silu(load(scratch, token * 64 + 16)) * load(scratch, token * 64 + 48)
        write_group(hidden, (first + token) * (ffn // 32) + pair, low, high)


@njit(parallel=True)
def multiply_and_gate(weights, layer, inputs, num_tokens, groups, ffn, hidden):
    """hidden[tokens, ffn] = SiLU(inputs x gate^T) x (inputs x up^T), ready for the next product.

    The weights are gate's `ffn` rows, then up's.
    """
    for pair in prange(ffn // 32):
        scratch = np.empty(8 * 64, np.float32)
        sums = np.empty(4 * groups * 16, np.int32)
        first = 0
        while first + 8 <= num_tokens:
            _gate_tile(
                EIGHT, weights, layer, pair, inputs, first, groups, ffn, hidden, scratch, sums
            )
            first += 8
        if first + 4 <= num_tokens:
            _gate_tile(
                FOUR, weights, layer, pair, inputs, first, groups, ffn, hidden, scratch, sums
            )
            first += 4
        if first + 2 <= num_tokens:
            _gate_tile(TWO, weights, layer, pair, inputs, first, groups, ffn, hidden, scratch, sums)
            first += 2
        if first < num_tokens:
            _gate_tile(ONE, weights, layer, pair, inputs, first, groups, ffn, hidden, scratch, sums)

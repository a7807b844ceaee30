"""Products of a few or of many tokens with weights in panels.

A task is a panel of sixteen output columns. Its weights come from memory once, and stay in the
cache while all tokens, a tile of them at a time, are multiplied with them: a step of one token is
bound by the bytes of the weights, one of hundreds by the dot products. Every token's sum is made in
the same order whatever its neighbours are, so that batching changes no bit of it.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange
from numba.extending import overload

from minigen.kernels.lanes import high_nibbles, load, load_float16, low_nibbles, store
from minigen.kernels.llvm import OutsideKernelError
from minigen.kernels.panels import Codes4, Codes8, Pairs
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
    pair_products,
    spread_numbers,
    store_tile,
    zeros,
)

# Bytes of inputs have a zero of their own, and it meets every code of a group:
#   sum of (byte + zero) x (code - offset)
#     = sum of byte x code + zero x (sum of codes) - offset x (sum of byte + zero)
# The last two are the dot product of a pair that the inputs bring with a pair of the weights: the
# sum of codes below, minus the offset above. A sum of codes starts with that upper half.
_ONES = np.full(1, 0x01010101, np.int32)
_NO_OFFSET, _OFFSET_128 = np.zeros(1, np.int32), np.full(1, -128 << 16, np.int32)


@njit(inline="always")
def _pair_of_codes4(codes, at):
    """A group's pair of each lane: the sum of its 32 codes, and 0."""
    pair = spread_numbers(ONE, _NO_OFFSET, 0, 0)
    for word in range(4):
        both = load(codes, at * 64 + word * 16)
        pair = add_byte_dots(pair, low_nibbles(both), _ONES, 0, 0)
        pair = add_byte_dots(pair, high_nibbles(both), _ONES, 0, 0)
    return pair[0]


@njit(inline="always")
def _pair_of_codes8(codes, at):
    """A group's pair of each lane: the sum of its 32 codes, and -128."""
    pair = spread_numbers(ONE, _OFFSET_128, 0, 0)
    for word in range(8):
        pair = add_byte_dots(pair, load(codes, at * 128 + word * 16), _ONES, 0, 0)
    return pair[0]


def write_pairs(weights: Any, layer: int, panel: int, groups: int, pairs: Any, first: int) -> None:
    """Write a panel's pairs, sixteen words a group, from `first` on: what all its tiles need."""
    raise OutsideKernelError


@overload(write_pairs)
def _write_pairs(weights, layer, panel, groups, pairs, first):
    if weights.instance_class is Pairs:
        return lambda weights, layer, panel, groups, pairs, first: None
    pair_of = _pair_of_codes4 if weights.instance_class is Codes4 else _pair_of_codes8

    def write(weights, layer, panel, groups, pairs, first):
        codes = weights.codes[layer]
        for group in range(groups):
            store(pairs, first + group * 16, pair_of(codes, panel * groups + group))

    return write


def _source_of_pairs(tokens, make):
    """A group's pair of each lane: as written or, for a token alone, made as the codes come by."""
    if tokens.count == 1:
        return njit(inline="always")(lambda codes, at, pairs, written: make(codes, at))
    return njit(inline="always")(lambda codes, at, pairs, written: load(pairs, written))


def product_tile(
    tokens: Any,
    weights: Any,
    layer: int,
    panel: int,
    inputs: Any,
    first: int,
    groups: int,
    pairs: Any,
    own_pairs: int,
) -> Any:
    """The products of tokens `first`, `first` + 1, ... with a panel: a tile, a row a token.

    `write_pairs` has written the panel's pairs to `pairs` from `own_pairs` on, if more than one
    token asks for them.
    """
    raise OutsideKernelError


@overload(product_tile)
def _product_tile(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs):
    if weights.instance_class is Codes4:
        return _product_of_codes4(_source_of_pairs(tokens, _pair_of_codes4))
    if weights.instance_class is Codes8:
        return _product_of_codes8(_source_of_pairs(tokens, _pair_of_codes8))
    return _product_of_pairs


def _product_of_codes4(pair_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs):
        codes, scales, minima = weights.codes[layer], weights.scales[layer], weights.minima[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            pair = pair_of(codes, at, pairs, own_pairs + group * 16)
            dots = pair_products(tokens, pair, inputs.pairs, own, groups)
            for word in range(4):
                both = load(codes, at * 64 + word * 16)
                low, high = own * 8 + word, own * 8 + 4 + word
                dots = add_byte_dots(dots, low_nibbles(both), inputs.words, low, groups * 8)
                dots = add_byte_dots(dots, high_nibbles(both), inputs.words, high, groups * 8)
            scale = load_float16(scales, at * 16)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
            minimum = load_float16(minima, at * 16)
            total = add_products(total, minimum, inputs.sums, own, groups)
        return total

    return product


def _product_of_codes8(pair_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs):
        codes, scales = weights.codes[layer], weights.scales[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            pair = pair_of(codes, at, pairs, own_pairs + group * 16)
            dots = pair_products(tokens, pair, inputs.pairs, own, groups)
            for word in range(8):
                eight_bit = load(codes, at * 128 + word * 16)
                dots = add_byte_dots(dots, eight_bit, inputs.words, own * 8 + word, groups * 8)
            scale = load_float16(scales, at * 16)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        return total

    return product


def _product_of_pairs(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs):
    words = weights.words[layer]
    num_words = groups * 16
    total = zeros(tokens)
    for word in range(num_words):
        two = load(words, (panel * num_words + word) * 16)
        total = add_bfloat_dots(total, two, inputs.words, first * num_words + word, num_words)
    return total


class Product(NamedTuple):
    """A task whose panel's products are written to `out` [tokens, width], or added to it."""

    panel: int
    out: Any
    width: int
    add: bool


class Gate(NamedTuple):
    """A task whose four panels are two of the gate's and two of up's: inputs of what follows."""

    pair: int
    hidden: Any
    ffn: int
    products: Any


def _run_tile(tokens, task, weights, layer, inputs, first, groups, pairs):
    raise OutsideKernelError


@overload(_run_tile)
def _tile_of_task(tokens, task, weights, layer, inputs, first, groups, pairs):
    return _product if task.instance_class is Product else _gate


def _product(tokens, task, weights, layer, inputs, first, groups, pairs):
    total = product_tile(tokens, weights, layer, task.panel, inputs, first, groups, pairs, 0)
    at = first * task.width + task.panel * 16
    if task.add:
        total = add_stored(total, task.out, at, task.width)
    store_tile(task.out, at, task.width, total)


def _gate(tokens, task, weights, layer, inputs, first, groups, pairs):
    products = task.products
    for part in range(4):
        panel, own_pairs = 4 * task.pair + part, part * groups * 16
        tile = product_tile(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs)
        store_tile(products, part * 16, 64, tile)
    for token in range(len(tokens)):
        low = silu(load(products, token * 64)) * load(products, token * 64 + 32)
        high = silu(load(products, token * 64 + 16)) * load(products, token * 64 + 48)
        write_group(task.hidden, (first + token) * (task.ffn // 32) + task.pair, low, high)


def _widest_tile(weights):
    raise OutsideKernelError


@overload(_widest_tile)
def _widest_tile_of(weights):
    """Bytes keep two vectors a token, words and their total: eight tokens would be a fifth slower,
    since LLVM then runs out of registers."""
    widest = EIGHT if weights.instance_class is Pairs else FOUR
    return lambda weights: widest


@njit
def _run_task(task, weights, layer, inputs, num_tokens, groups, pairs):
    """All tokens, by the widest tiles, and by those of four, two and one for what remains."""
    first, widest = 0, _widest_tile(weights)
    while first + len(widest) <= num_tokens:
        _run_tile(widest, task, weights, layer, inputs, first, groups, pairs)
        first += len(widest)
    if first + 4 <= num_tokens:
        _run_tile(FOUR, task, weights, layer, inputs, first, groups, pairs)
        first += 4
    if first + 2 <= num_tokens:
        _run_tile(TWO, task, weights, layer, inputs, first, groups, pairs)
        first += 2
    if first < num_tokens:
        _run_tile(ONE, task, weights, layer, inputs, first, groups, pairs)


@njit(parallel=True)
def multiply(weights, layer, inputs, num_tokens, groups, out, width, add):
    """out[tokens, width] = inputs x weights[layer]^T, or, where `add`, out += it."""
    for panel in prange(width // 16):
        pairs = np.empty(groups * 16, np.int32)
        if num_tokens > 1:
            write_pairs(weights, layer, panel, groups, pairs, 0)
        task = Product(panel, out, width, add)
        _run_task(task, weights, layer, inputs, num_tokens, groups, pairs)


@njit(parallel=True)
def multiply_and_gate(weights, layer, inputs, num_tokens, groups, ffn, hidden):
    """hidden[tokens, ffn] = SiLU(inputs x gate^T) x (inputs x up^T), ready for the next product.

    The weights are two panels of gate's rows, two of up's, and so on.
    """
    for pair in prange(ffn // 32):
        pairs = np.empty(4 * groups * 16, np.int32)
        if num_tokens > 1:
            for part in range(4):
                write_pairs(weights, layer, 4 * pair + part, groups, pairs, part * groups * 16)
        task = Gate(pair, hidden, ffn, np.empty(8 * 64, np.float32))
        _run_task(task, weights, layer, inputs, num_tokens, groups, pairs)

"""Tiles of products: a few tokens with a panel of sixteen rows of weights, in each form.

Every token's sum is made in the same order whatever its neighbours are, so that batching changes no
bit of it.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from minigen.kernels.lanes import (
    high_nibbles,
    load,
    load_float16,
    low_nibbles,
    prefetch,
    store,
)
from minigen.kernels.llvm import OutsideKernelError
from minigen.kernels.panels import Codes4, Codes8, Pairs
from minigen.kernels.tiles import (
    EIGHT,
    FOUR,
    ONE,
    add_bfloat_dots,
    add_byte_dots,
    add_products,
    add_scaled,
    pair_products,
    spread_numbers,
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
def _pair_of_codes4(words, at):
    """A group's pair of each lane: the sum of its 32 codes, and 0."""
    pair = spread_numbers(ONE, _NO_OFFSET, 0, 0)
    for word in range(4):
        both = load(words, at * 80 + word * 16)
        pair = add_byte_dots(pair, low_nibbles(both), _ONES, 0, 0)
        pair = add_byte_dots(pair, high_nibbles(both), _ONES, 0, 0)
    return pair[0]


@njit(inline="always")
def _pair_of_codes8(words, at):
    """A group's pair of each lane: the sum of its 32 codes, and -128."""
    pair = spread_numbers(ONE, _OFFSET_128, 0, 0)
    for word in range(8):
        pair = add_byte_dots(pair, load(words, at * 136 + word * 16), _ONES, 0, 0)
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
        words = weights.words[layer]
        for group in range(groups):
            store(pairs, first + group * 16, pair_of(words, panel * groups + group))

    return write


def _source_of_pairs(tokens, make):
    """A group's pair of each lane: as written or, in a tile for all, made as the codes come by."""
    if tokens.dtype is types.float64:
        return njit(inline="always")(lambda words, at, pairs, written: make(words, at))
    return njit(inline="always")(lambda words, at, pairs, written: load(pairs, written))


def ask_for(tokens: Any, words: Any, index: int) -> None:
    """Ask memory for the line of sixteen words at `index`, if there are several tokens.

    While they are multiplied with a panel, the next one comes. A token alone is done as soon as
    its weights are there, and memory's own guess, straight on, is right.
    """
    raise OutsideKernelError


@overload(ask_for)
def _ask_for(tokens, words, index):
    if tokens.count == 1:
        return lambda tokens, words, index: None
    return lambda tokens, words, index: prefetch(words, index)


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
    ahead: int,
) -> Any:
    """The products of tokens `first`, `first` + 1, ... with a panel: a tile, a row a token.

    `write_pairs` has written the panel's pairs to `pairs` from `own_pairs` on, unless the tile is
    for all of a step's tokens (`ONLY_TWO`). Meanwhile memory is asked for the panel that is `ahead`
    panels on: for 8-bit codes two lines a group and tile, since more at once would only wait. Tiles
    of 4-bit codes do not ask: they have no instructions to spare, a long prompt's would take a
    tenth longer.
    """
    raise OutsideKernelError


@overload(product_tile)
def _product_tile(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs, ahead):
    if weights.instance_class is Codes4:
        return _product_of_codes4(_source_of_pairs(tokens, _pair_of_codes4))
    if weights.instance_class is Codes8:
        return _product_of_codes8(_source_of_pairs(tokens, _pair_of_codes8))
    return _product_of_pairs


def _product_of_codes4(pair_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs, ahead):
        words = weights.words[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            pair = pair_of(words, at, pairs, own_pairs + group * 16)
            dots = pair_products(tokens, pair, inputs.pairs, own, groups)
            for word in range(4):
                both = load(words, at * 80 + word * 16)
                low, high = own * 8 + word, own * 8 + 4 + word
                dots = add_byte_dots(dots, low_nibbles(both), inputs.words, low, groups * 8)
                dots = add_byte_dots(dots, high_nibbles(both), inputs.words, high, groups * 8)
            scale = load_float16(words, at * 80 + 64)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
            minimum = load_float16(words, at * 80 + 72)
            total = add_products(total, minimum, inputs.sums, own, groups)
        return total

    return product


def _product_of_codes8(pair_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs, ahead):
        words = weights.words[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            pair = pair_of(words, at, pairs, own_pairs + group * 16)
            dots = pair_products(tokens, pair, inputs.pairs, own, groups)
            soon = (at + ahead * groups) * 136 + first // 4 % 4 * 32
            ask_for(tokens, words, soon)
            ask_for(tokens, words, soon + 16)
            for word in range(8):
                eight_bit = load(words, at * 136 + word * 16)
                dots = add_byte_dots(dots, eight_bit, inputs.words, own * 8 + word, groups * 8)
            scale = load_float16(words, at * 136 + 128)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        return total

    return product


def _product_of_pairs(
    tokens, weights, layer, panel, inputs, first, groups, pairs, own_pairs, ahead
):
    words = weights.words[layer]
    num_words = groups * 16
    total = zeros(tokens)
    for word in range(num_words):
        ask_for(tokens, words, ((panel + ahead) * num_words + word) * 16)
        two = load(words, (panel * num_words + word) * 16)
        total = add_bfloat_dots(total, two, inputs.words, first * num_words + word, num_words)
    return total


def widest_tile(weights: Any) -> Any:
    """The tuple `tokens` of the tiles that most tokens are multiplied by."""
    raise OutsideKernelError


@overload(widest_tile)
def _widest_tile(weights):
    """Bytes keep two vectors a token, words and their total: eight tokens would be a fifth slower,
    since LLVM then runs out of registers."""
    widest = EIGHT if weights.instance_class is Pairs else FOUR
    return lambda weights: widest

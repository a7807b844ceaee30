"""Microkernels: a tile of tokens times a panel of sixteen rows of weights, for each stored form.

One product of many rows is cheaper than many products of one row, because a vector of weights is
loaded once for all tokens of a tile. Each token's sum is computed in the same order whatever the
other tokens are, so batching does not change a single bit of it.
"""

from typing import Any

import numpy as np
from numba import njit, types

from minigen.kernels.cpu.arrays.inputs import IN_PAIRS, UNPACKED, UNPACKS_CODES
from minigen.kernels.cpu.elementwise import ZERO_FACTOR
from minigen.kernels.cpu.packed_weights import PARTS_OF_STEP, Codes4, Codes8, Pairs
from minigen.kernels.cpu.register_tiles import (
    EIGHT,
    FOUR,
    ONE,
    add_bfloat_dots,
    add_byte_dots,
    add_code_dots,
    add_dots_of_two,
    add_in_parts,
    add_in_parts_at_once,
    add_scaled,
    add_tiles,
    from_parts,
    pair_products,
    split_codes,
    spread_numbers,
    store_tile,
    sum_of_rows,
    with_offsets,
    zero_words,
    zeros,
)
from minigen.kernels.cpu.simd import (
    FEATURES,
    OutsideKernelError,
    load,
    load_float16,
    overload,
    prefetch,
    store,
)

SIX = (0,) * 6
ONLY_ONE, ONLY_TWO, ONLY_FOUR = (0.0,), (0.0,) * 2, (0.0,) * 4  # one tile holds all tokens
# A tile that also prefetches the next panel.
AHEAD_FOUR, AHEAD_SIX, AHEAD_EIGHT = (False,) * 4, (False,) * 6, (False,) * 8

# Input bytes have a zero point, which is multiplied with every code of a group, and weights have an
# offset, which is added to each code: weight = (code + offset) x scale.
#   sum of (byte + zero) x (code + offset)
#     = sum of byte x code + zero x (sum of codes) + (sum of byte + zero) x offset
# The last two terms are one dot product of two pairs: (zero, sum of byte + zero) of the inputs and
# (sum of codes, offset) of the weights. In the weights' pair the sum is the lower 16 bits and the
# offset the upper 16. The offset of 8-bit codes is -128. `Codes4` stores 256 times this offset
# (`PARTS_OF_STEP`), so the other terms are taken 256 times, too: the sum of codes 64 times,
# as a dot product with 64s instead of 1s, and the zero four times (`Quantized.pairs4`).
_ONES = np.full(8, 0x01010101, np.int32)
_SIXTY_FOURS = 64 * _ONES
_OFFSET_128 = np.full(1, -128 << 16, np.int32)
assert PARTS_OF_STEP == 64 * ZERO_FACTOR


@njit(inline="always")
def _pair_of_codes4(words, at):
    """Return a group's pair for each lane: 64 x the sum of its 32 codes, and 256 x the offset.

    Memory is read in order, the offsets last: else a step of one token would take a tenth longer.
    """
    sums = add_code_dots(zero_words(ONE), words, at * 80, _SIXTY_FOURS, 0, 0)
    return with_offsets(sums[0], words, at * 80 + 72)


@njit(inline="always")
def _pair_of_codes8(words, at):
    """Return a group's pair for each lane: the sum of its 32 codes, and -128."""
    pair = spread_numbers(ONE, _OFFSET_128, 0, 0)
    for word in range(8):
        pair = add_byte_dots(pair, load(words, at * 136 + word * 16), _ONES, 0, 0)
    return pair[0]


def unpack_panel(
    weights: Any, layer: int, panel: int, groups: int, unpacked: Any, first: int
) -> None:
    """Write what all tiles of a panel read, `UNPACKED` words per group, from group `first` on.

    These are the pairs, and with `UNPACKS_CODES` behind them four-bit codes as bytes.
    """
    raise OutsideKernelError


@overload(unpack_panel)
def _unpack_panel(weights, layer, panel, groups, unpacked, first):
    if weights.instance_class is Pairs:
        return lambda weights, layer, panel, groups, unpacked, first: None
    if weights.instance_class is Codes4:
        return _unpack_codes4
    return _unpack_codes8


def _unpack_codes4(weights, layer, panel, groups, unpacked, first):
    words = weights.words[layer]
    for group in range(groups):
        at, to = panel * groups + group, (first + group) * UNPACKED
        if UNPACKS_CODES:
            codes = split_codes(words, at * 80)
            sums = add_byte_dots(zero_words(ONE), sum_of_rows(codes), _SIXTY_FOURS, 0, 0)
            store(unpacked, to, with_offsets(sums[0], words, at * 80 + 72))
            store_tile(unpacked, to + 16, 16, codes)
        else:
            store(unpacked, to, _pair_of_codes4(words, at))


def _unpack_codes8(weights, layer, panel, groups, unpacked, first):
    words = weights.words[layer]
    for group in range(groups):
        pair = _pair_of_codes8(words, panel * groups + group)
        store(unpacked, (first + group) * UNPACKED, pair)


def _source_of_pairs(tokens, make):
    """Return the function for a group's pairs: it loads them, or computes them from the codes.

    A tile that holds all tokens (`ONLY_TWO`) computes them, because each panel is read only once.
    """
    if _holds_all(tokens):
        return njit(inline="always")(lambda words, at, unpacked, to: make(words, at))
    return njit(inline="always")(lambda words, at, unpacked, to: load(unpacked, to))


def _holds_all(tokens: Any) -> bool:
    return tokens.dtype is types.float64


def prefetch_line(tokens: Any, words: Any, index: int) -> None:
    """Prefetch the cache line of sixteen words at `index`, if the type of `tokens` asks for it.

    The next panel is loaded while the first tiles of many tokens are multiplied with this one
    (`AHEAD_FOUR`). A step of few tokens is done as soon as its weights have arrived, and for it
    the hardware prefetcher is sufficient.
    """
    raise OutsideKernelError


@overload(prefetch_line)
def _prefetch_line(tokens, words, index):
    if tokens.dtype is types.boolean:
        return lambda tokens, words, index: prefetch(words, index)
    return lambda tokens, words, index: None


def product_tile(
    tokens: Any,
    weights: Any,
    layer: int,
    panel: int,
    inputs: Any,
    first: int,
    groups: int,
    unpacked: Any,
    own_group: int,
    ahead: int,
) -> Any:
    """Return the tile of products of tokens `first`, `first` + 1, ... with a panel.

    `unpack_panel` has written the panel's groups to `unpacked` from `own_group` on, unless one tile
    holds all tokens of the step (`ONLY_TWO`). A tile of `AHEAD_FOUR` or `AHEAD_EIGHT` also
    prefetches the panel that is `ahead` panels further: of codes two cache lines per group, because
    more loads at once would only queue, and the next tile the next two. Later tiles of a panel do
    not: with 4-bit codes a long prompt would take a tenth longer.
    """
    raise OutsideKernelError


@overload(product_tile)
def _product_tile(tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead):
    if weights.instance_class is Codes4:
        pair_of = _source_of_pairs(tokens, _pair_of_codes4)
        unpacked = UNPACKS_CODES and not _holds_all(tokens)
        return _product_of_codes4(pair_of, _dots_of_unpacked if unpacked else _dots_of_codes4)
    if weights.instance_class is Codes8:
        return _product_of_codes8(_source_of_pairs(tokens, _pair_of_codes8))
    return _product_of_pairs


@njit(inline="always")
def _add_group(dots, tokens, codes, at, inputs, own, groups):
    """Add the dot products of a group's eight vectors of bytes, which lie in `codes` from `at` on.

    The next product in a chain waits for the last one, so with `UNPACKS_CODES` there are two.
    """
    if not UNPACKS_CODES:
        for word in range(8):
            vector = load(codes, at + word * 16)
            dots = add_byte_dots(dots, vector, inputs.words, own * 8 + word, groups * 8)
        return dots
    others = zero_words(tokens)
    for word in range(0, 8, 2):
        vector, other = load(codes, at + word * 16), load(codes, at + word * 16 + 16)
        dots = add_byte_dots(dots, vector, inputs.words, own * 8 + word, groups * 8)
        others = add_byte_dots(others, other, inputs.words, own * 8 + word + 1, groups * 8)
    return add_tiles(dots, others)


@njit(inline="always")
def _dots_of_codes4(tokens, words, at, unpacked, to, inputs, own, groups):
    """Return the dot products of a group's four-bit codes, which are unpacked here."""
    return add_code_dots(zero_words(tokens), words, at * 80, inputs.words, own * 8, groups * 8)


@njit(inline="always")
def _dots_of_unpacked(tokens, words, at, unpacked, to, inputs, own, groups):
    """Return the same of the codes that `unpack_panel` has written behind the pair."""
    return _add_group(zero_words(tokens), tokens, unpacked, to + 16, inputs, own, groups)


def _product_of_codes4(pair_of, dots_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead):
        words = weights.words[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            soon = (at + ahead * groups) * 80 + first // 4 * 32
            prefetch_line(tokens, words, soon)
            prefetch_line(tokens, words, soon + 16)
            to = (own_group + group) * UNPACKED
            pair = pair_of(words, at, unpacked, to)
            dots = dots_of(tokens, words, at, unpacked, to, inputs, own, groups)
            dots = add_in_parts(dots, pair, inputs.pairs4, own, groups)
            scale = load_float16(words, at * 80 + 64)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        return from_parts(total)

    return product


def _product_of_codes8(pair_of):
    def product(tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead):
        words = weights.words[layer]
        total = zeros(tokens)
        for group in range(groups):
            at = panel * groups + group
            own = first * groups + group
            pair = pair_of(words, at, unpacked, (own_group + group) * UNPACKED)
            dots = pair_products(tokens, pair, inputs.pairs8, own, groups)
            soon = (at + ahead * groups) * 136 + first // 4 * 32
            prefetch_line(tokens, words, soon)
            prefetch_line(tokens, words, soon + 16)
            dots = _add_group(dots, tokens, words, at * 136, inputs, own, groups)
            scale = load_float16(words, at * 136 + 128)
            total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        return total

    return product


def _product_of_pairs(
    tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead
):
    words = weights.words[layer]
    num_words = groups * 16
    total = zeros(tokens)
    for word in range(num_words):
        prefetch_line(tokens, words, ((panel + ahead) * num_words + word) * 16)
        two = load(words, (panel * num_words + word) * 16)
        total = add_bfloat_dots(total, two, inputs.words, first * num_words + word, num_words)
    return total


def product_of_two(
    tokens: Any,
    weights: Any,
    layer: int,
    panel: int,
    inputs: Any,
    first: int,
    groups: int,
    unpacked: Any,
    own_group: int,
    ahead: int,
) -> Any:
    """Return two tiles: the products of tokens `first`, `first` + 1, ... with two panels.

    They are `panel` and the next one, whose groups are behind each other in `unpacked`. See
    `takes_two_panels`.
    """
    raise OutsideKernelError


@overload(product_of_two)
def _product_of_two(
    tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead
):
    if weights.instance_class is Codes4:
        return _two_of_codes4
    return _two_of_codes8 if weights.instance_class is Codes8 else _two_of_pairs


@njit(inline="always")
def _prefetch_part(tokens, words, at, size, first):
    """Prefetch a third of a group of `size` words, if the type of `tokens` asks for it.

    Which third the number of the first token says: tiles of tokens 0, 6 and 12 prefetch all.
    """
    for line in range(-(-size // 48)):
        prefetch_line(tokens, words, at + (line * 3 + first // 6) * 16)


def _two_of_codes4(
    tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead
):
    words = weights.words[layer]
    total, other_total = zeros(tokens), zeros(tokens)
    for group in range(groups):
        at, own = panel * groups + group, first * groups + group
        to, step = (own_group + group) * UNPACKED, groups * UNPACKED
        for next_panel in (0, groups):
            _prefetch_part(tokens, words, (at + ahead * groups + next_panel) * 80, 80, first)
        both = (zero_words(tokens), zero_words(tokens))
        both = add_dots_of_two(both, unpacked, to + 16, step, inputs.words, own * 8, groups * 8)
        pair, scale = load(unpacked, to), load_float16(words, at * 80 + 64)
        dots = add_in_parts_at_once(both[0], pair, inputs.pairs4, own, groups)
        total = add_scaled(total, dots, scale, inputs.scales, own, groups)
        pair, other_scale = load(unpacked, to + step), load_float16(words, (at + groups) * 80 + 64)
        others = add_in_parts_at_once(both[1], pair, inputs.pairs4, own, groups)
        other_total = add_scaled(other_total, others, other_scale, inputs.scales, own, groups)
    return from_parts(total), from_parts(other_total)


def _two_of_codes8(
    tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead
):
    words = weights.words[layer]
    total, other_total = zeros(tokens), zeros(tokens)
    for group in range(groups):
        at, own = panel * groups + group, first * groups + group
        to, step = (own_group + group) * UNPACKED, groups * UNPACKED
        for next_panel in (0, groups):
            _prefetch_part(tokens, words, (at + ahead * groups + next_panel) * 136, 136, first)
        both = (
            pair_products(tokens, load(unpacked, to), inputs.pairs8, own, groups),
            pair_products(tokens, load(unpacked, to + step), inputs.pairs8, own, groups),
        )
        both = add_dots_of_two(
            both, words, at * 136, groups * 136, inputs.words, own * 8, groups * 8
        )
        scale = load_float16(words, at * 136 + 128)
        other_scale = load_float16(words, (at + groups) * 136 + 128)
        total = add_scaled(total, both[0], scale, inputs.scales, own, groups)
        other_total = add_scaled(other_total, both[1], other_scale, inputs.scales, own, groups)
    return total, other_total


def _two_of_pairs(tokens, weights, layer, panel, inputs, first, groups, unpacked, own_group, ahead):
    words = weights.words[layer]
    num_words = groups * 16
    total, other_total = zeros(tokens), zeros(tokens)
    for word in range(num_words):
        one = (panel * num_words + word) * 16
        other = one + num_words * 16
        for start in (one, other):
            prefetch_line(tokens, words, start + ahead * num_words * 16)
        two, other_two = load(words, one), load(words, other)
        own = first * num_words + word
        total = add_bfloat_dots(total, two, inputs.words, own, num_words)
        other_total = add_bfloat_dots(other_total, other_two, inputs.words, own, num_words)
    return total, other_total


def takes_two_panels(kind: type) -> bool:
    """Return whether `product_of_two` is the fastest way to multiply many tokens with weights.

    It is where loads, and operations beside the products, bound the speed: two panels share what is
    loaded of the inputs, and with twelve chains of products no token needs a second one. With
    bfloat16 it is for few tokens, too: one has one chain with a panel, whose FMAs wait for each
    other.
    """
    return UNPACKS_CODES and not (kind is Pairs and IN_PAIRS)


def _holds_eight(weights: Any) -> bool:
    """Return whether a tile of these weights has eight tokens rather than four.

    It has eight for bfloat16 with the 32 wide registers of AVX-512. Codes need two vectors per
    token, the integer dots and the total, and with eight tokens LLVM orders the instructions badly:
    on Intel it was a fifth slower. With AVX2 sixteen lanes take two of sixteen registers, so eight
    tokens of bfloat16 would take twice as long as twice four.
    """
    return weights.instance_class is Pairs and "avx512f" in FEATURES


def widest_tile(weights: Any) -> Any:
    """Return the tuple `tokens` of the widest tile, which most tokens use."""
    raise OutsideKernelError


@overload(widest_tile)
def _widest_tile(weights):
    widest = EIGHT if _holds_eight(weights) else FOUR
    if UNPACKS_CODES and weights.instance_class is Codes4:
        widest = SIX
    return lambda weights: widest


def first_tile(weights: Any) -> Any:
    """Return the tuple `tokens` of the widest tile that also prefetches the next panel."""
    raise OutsideKernelError


@overload(first_tile)
def _first_tile(weights):
    first = AHEAD_EIGHT if _holds_eight(weights) else AHEAD_FOUR
    return lambda weights: first

"""Products of up to 128 tokens with up to four panels of weights, by AMX tiles.

A tile's dot product takes 32 columns, one group, in bfloat16. Codes (4-bit ones taken 256 times)
and input bytes are whole numbers with at most eight significant bits. bfloat16 holds these exactly,
and float32 holds every sum of their 32 products exactly. So the dots are those of the vector
instructions for bytes, in whatever order the processor adds. Adding an offset x the inputs' sum is
rounded once, as the whole number that vectors have is on its way to float32. What follows (scales,
the sum over groups) is the same arithmetic in the same order. Therefore a token's products are
bit-equal by tiles and by vectors.

Products of bfloat16 weights (`Pairs`) are added up within the tile, in another order than that of
vectors: even and odd columns apart. So a processor with AMX uses tiles for any number of tokens. A
group of a panel is one tile, as it lies in memory.

Tiles always compute sixteen tokens; the rows of tokens that do not exist are never used.

Source for the order: Intel's Software Developer's Manual, volume 2, TDPBF16PS.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from minigen.kernels.cpu.amx.scratch import ROW, ROW_BYTES, ROWS, TILE, USE_TILES, TileScratch
from minigen.kernels.cpu.amx.tiles import (
    NUM_TILES,
    configuration,
    configure,
    release,
    tile_bfloat_dots,
    tile_load,
    tile_store,
    tile_zero,
)
from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.cpu.packed_weights import PARTS_OF_STEP, Codes4, Pairs
from minigen.kernels.cpu.register_tiles import (
    add_products,
    add_scaled,
    from_parts,
    load_offsets,
    load_tile,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.simd import (
    FLOATS,
    WORD_LANES,
    WORDS,
    OutsideKernelError,
    call,
    kernel,
    load,
    load_float16,
    overload,
    same,
    store,
)

MOST_GROUPS = 18  # of two panels: 36 KiB as tiles, of the 48 KiB of an L1 cache
SIXTEEN = (0,) * ROWS
_SHAPES = configuration(dict.fromkeys(range(NUM_TILES), (ROWS, ROW_BYTES)))


def by_tiles(weights: Any, num_tokens: int) -> bool:
    """Return whether tiles multiply this number of tokens with these weights."""
    raise OutsideKernelError


# Tokens from which on tiles are faster: they compute sixteen at a time, from unpacked codes.
FEWEST_OF_CODES4, FEWEST_OF_CODES8 = 28, 48


@overload(by_tiles)
def _by_tiles(weights, num_tokens):
    if not USE_TILES:
        return lambda weights, num_tokens: False
    if weights.instance_class is Pairs:
        return lambda weights, num_tokens: True
    fewest = FEWEST_OF_CODES4 if weights.instance_class is Codes4 else FEWEST_OF_CODES8
    return lambda weights, num_tokens: num_tokens >= fewest


@njit(inline="always")
def tiles_of_worker(scratch, worker):
    """Return a worker's part of the scratch."""
    return TileScratch(
        scratch.codes[worker], scratch.steps[worker], scratch.dots[worker], scratch.products[worker]
    )


def begin_tiles(weights: Any, num_tokens: int) -> None:
    """Set up the thread's tiles if they are to be used."""
    raise OutsideKernelError


@overload(begin_tiles)
def _begin_tiles(weights, num_tokens):
    if not USE_TILES:
        return lambda weights, num_tokens: None

    def begin(weights, num_tokens):
        if by_tiles(weights, num_tokens):
            configure(_SHAPES, 0)

    return begin


def end_tiles(weights: Any, num_tokens: int) -> None:
    """Give up the thread's tiles if they were set up."""
    raise OutsideKernelError


@overload(end_tiles)
def _end_tiles(weights, num_tokens):
    if not USE_TILES:
        return lambda weights, num_tokens: None

    def end(weights, num_tokens):
        if by_tiles(weights, num_tokens):
            release()

    return end


_CODES = PARTS_OF_STEP * np.arange(16, dtype=np.float32)  # as offsets are: 256 x code
_BFLOATS = [int(bits) for bits in _CODES.view(np.uint32) >> 16]


@intrinsic
def _nibble_pairs(typingctx: Any, words: Any, shift: Any) -> Any:
    """Return, as pairs of bfloat16, the 4 bits from `shift` on of each half of the words.

    `vpermw` looks up each half in a table; it ignores all but the lowest five bits.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * NUM_LANES)
        shift = builder.trunc(args[1], ir.IntType(32))
        count = ir.Constant(WORDS, ir.Undefined)
        for lane in range(NUM_LANES):
            count = builder.insert_element(count, shift, ir.IntType(32)(lane))
        index = builder.bitcast(builder.lshr(args[0], count), halves)
        table = ir.Constant(halves, 2 * _BFLOATS)
        found = call(builder, "llvm.x86.avx512.permvar.hi.512", halves, [table, index])
        return builder.bitcast(found, WORDS)

    return WORD_LANES(words, types.intp), codegen


@intrinsic(prefer_literal=True)
def _byte_pairs(typingctx: Any, words: Any, byte: Any) -> Any:
    """Return, as pairs of bfloat16, codes `byte` and `byte` + 2 of each word, less 128."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        signed = builder.xor(args[0], same(-0x7F7F7F80))
        bits = []
        for each in (byte.literal_value, byte.literal_value + 2):
            whole = builder.ashr(builder.shl(signed, same(24 - 8 * each)), same(24))
            bits.append(builder.bitcast(builder.sitofp(whole, FLOATS), WORDS))
        return builder.or_(builder.lshr(bits[0], same(16)), builder.and_(bits[1], same(-65536)))

    return WORD_LANES(words, byte), codegen


def unpack(weights: Any, layer: int, panel: int, groups: int, scratch: Any, part: int) -> None:
    """Write a panel's codes as tiles of bfloat16, and its scales and offsets as float32.

    4-bit codes are written 256 times as large, as their offsets are stored (`PARTS_OF_STEP`).
    Within every four columns the middle ones change places, as they do in the inputs.
    """
    raise OutsideKernelError


@overload(unpack)
def _unpack(weights, layer, panel, groups, scratch, part):
    if weights.instance_class is Pairs:
        return lambda weights, layer, panel, groups, scratch, part: None
    return _unpack_codes4 if weights.instance_class is Codes4 else _unpack_codes8


def _unpack_codes4(weights, layer, panel, groups, scratch, part):
    words = weights.words[layer]
    for group in range(groups):
        at, to = (panel * groups + group) * 80, part * groups + group
        for word in range(4):
            both, row = load(words, at + word * 16), to * TILE + word * 32
            store(scratch.codes, row, _nibble_pairs(both, 0))
            store(scratch.codes, row + 16, _nibble_pairs(both, 8))
            store(scratch.codes, row + 128, _nibble_pairs(both, 4))
            store(scratch.codes, row + 144, _nibble_pairs(both, 12))
        store(scratch.steps, to * 32, load_float16(words, at + 64))
        store(scratch.steps, to * 32 + 16, load_offsets(words, at + 72))


def _unpack_codes8(weights, layer, panel, groups, scratch, part):
    words = weights.words[layer]
    for group in range(groups):
        at, to = (panel * groups + group) * 136, part * groups + group
        for word in range(8):
            eight_bit, row = load(words, at + word * 16), to * TILE + word * 32
            store(scratch.codes, row, _byte_pairs(eight_bit, 0))
            store(scratch.codes, row + 16, _byte_pairs(eight_bit, 1))
        store(scratch.steps, to * 32, load_float16(words, at + 128))


def products_of_block(
    weights: Any, layer: int, panel: int, count: int, inputs: Any, first: int, num_tokens: int,
    groups: int, scratch: Any,
) -> None:  # fmt: skip
    """Write the products of up to BLOCK tokens, from `first` on, with `count` panels.

    They go to `scratch.products`. `unpack` has unpacked the panels.
    """
    raise OutsideKernelError


@overload(products_of_block)
def _products_of_block(weights, layer, panel, count, inputs, first, num_tokens, groups, scratch):
    if weights.instance_class is Pairs:
        return _products_of_pairs
    if weights.instance_class is Codes4:
        return _products_of_codes(_add_four_bits, from_parts)
    return _products_of_codes(_add_bytes, _unchanged)


@kernel
def _groups_at_once(groups, most):
    """Split `groups` into equal parts of at most `most`, whose weights stay in the L1 cache."""
    return -(-groups // -(-groups // most))


@kernel
def _one_by_four(words, panel, count, inputs, first, begin, end, groups, products, to):
    """Add groups `begin` to `end` of sixteen tokens and four panels to their products."""
    last = count - 1
    one, two, three = min(1, last) * groups, min(2, last) * groups, last * groups
    if begin == 0:
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
    else:
        tile_load(0, products, to, ROW)
        tile_load(1, products, to + 16, ROW)
        tile_load(2, products, to + 32, ROW)
        tile_load(3, products, to + 48, ROW)
    for group in range(begin, end):
        at = panel * groups + group
        tile_load(4, inputs.words, (first * groups + group * ROWS) * NUM_LANES, NUM_LANES)
        tile_load(5, words, at * TILE, NUM_LANES)
        tile_bfloat_dots(0, 4, 5)
        tile_load(6, words, (at + one) * TILE, NUM_LANES)
        tile_bfloat_dots(1, 4, 6)
        tile_load(5, words, (at + two) * TILE, NUM_LANES)
        tile_bfloat_dots(2, 4, 5)
        tile_load(6, words, (at + three) * TILE, NUM_LANES)
        tile_bfloat_dots(3, 4, 6)
    tile_store(0, products, to, ROW)
    tile_store(1, products, to + 16, ROW)
    tile_store(2, products, to + 32, ROW)
    tile_store(3, products, to + 48, ROW)


@kernel
def _two_by_two(words, panel, other, inputs, first, begin, end, groups, products, to):
    """Add groups `begin` to `end` of 32 tokens and two panels to their products."""
    if begin == 0:
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
    else:
        tile_load(0, products, to, ROW)
        tile_load(1, products, to + 16, ROW)
        tile_load(2, products, to + ROWS * ROW, ROW)
        tile_load(3, products, to + ROWS * ROW + 16, ROW)
    for group in range(begin, end):
        own = (first * groups + group * ROWS) * NUM_LANES
        tile_load(4, inputs.words, own, NUM_LANES)
        tile_load(5, words, (panel * groups + group) * TILE, NUM_LANES)
        tile_bfloat_dots(0, 4, 5)
        tile_load(6, words, (other * groups + group) * TILE, NUM_LANES)
        tile_bfloat_dots(1, 4, 6)
        tile_load(7, inputs.words, own + ROWS * groups * NUM_LANES, NUM_LANES)
        tile_bfloat_dots(2, 7, 5)
        tile_bfloat_dots(3, 7, 6)
    tile_store(0, products, to, ROW)
    tile_store(1, products, to + 16, ROW)
    tile_store(2, products, to + ROWS * ROW, ROW)
    tile_store(3, products, to + ROWS * ROW + 16, ROW)


def _products_of_pairs(weights, layer, panel, count, inputs, first, num_tokens, groups, scratch):
    words, size = weights.words[layer], _groups_at_once(groups, MOST_GROUPS)
    in_twos = (num_tokens + ROWS - 1) // (2 * ROWS) * 2 * ROWS
    for begin in range(0, groups, size):
        end = min(groups, begin + size)
        for part in range(0, count, 2):
            other = panel + min(part + 1, count - 1)
            for token in range(0, in_twos, 2 * ROWS):
                to = token * ROW + part * NUM_LANES
                _two_by_two(
                    words, panel + part, other, inputs, first + token, begin, end, groups,
                    scratch.products, to,
                )  # fmt: skip
        if in_twos < num_tokens:
            _one_by_four(
                words, panel, count, inputs, first + in_twos, begin, end, groups,
                scratch.products, in_twos * ROW,
            )  # fmt: skip


def _dots_into(total: int, left: int, right: int) -> Any:
    """Make a function that computes the dots of a group in tile `total`, from two other tiles."""

    @njit(inline="always")
    def dots(tiled, first, group, groups, codes, part):
        tile_load(
            left, tiled.halves, (first * groups + group * ROWS) * 2 * NUM_LANES, 2 * NUM_LANES
        )
        tile_load(right, codes, (part * groups + group) * TILE, NUM_LANES)
        tile_zero(total)
        tile_bfloat_dots(total, left, right)

    return dots


_even_dots, _odd_dots = _dots_into(0, 4, 6), _dots_into(1, 5, 7)


@njit(inline="always")
def _add_bytes(total, tiled, scratch, own, at, group, dots_at):
    """Add a group: its dots x scales x the scales of the inputs."""
    dots = load_tile(SIXTEEN, scratch.dots, dots_at, NUM_LANES)
    scale = load(scratch.steps, at + group * 32)
    return add_scaled(total, dots, scale, tiled.scales, own + group * ROWS, 1)


@njit(inline="always")
def _add_four_bits(total, tiled, scratch, own, at, group, dots_at):
    """Add a group of 4-bit codes: its dots, and its offsets x the sums of the inputs, scaled."""
    dots = load_tile(SIXTEEN, scratch.dots, dots_at, NUM_LANES)
    offset = load(scratch.steps, at + group * 32 + 16)
    dots = add_products(dots, offset, tiled.sums, own + group * ROWS, 1)
    scale = load(scratch.steps, at + group * 32)
    return add_scaled(total, dots, scale, tiled.scales, own + group * ROWS, 1)


@njit(inline="always")
def _unchanged(total):
    return total


def _products_of_codes(add_group, finish):
    """Return the function for codes: dots leave the tiles through memory, group by group.

    While the dots of one group are added, those of the next are stored, and those of the one after
    it computed. In a tighter order the processor would wait for each. The last groups are computed
    once more at the end and not used.
    """

    @njit(inline="always")
    def add_groups(total, tiled, scratch, first, part, begin, end, groups):
        codes, last, at, own = scratch.codes, end - 1, part * groups * 32, first * groups
        _even_dots(tiled, first, begin, groups, codes, part)
        _odd_dots(tiled, first, min(begin + 1, last), groups, codes, part)
        tile_store(0, scratch.dots, 0, NUM_LANES)
        for group in range(begin, last, 2):
            _even_dots(tiled, first, min(group + 2, last), groups, codes, part)
            tile_store(1, scratch.dots, TILE, NUM_LANES)
            total = add_group(total, tiled, scratch, own, at, group, 0)
            _odd_dots(tiled, first, min(group + 3, last), groups, codes, part)
            tile_store(0, scratch.dots, 0, NUM_LANES)
            total = add_group(total, tiled, scratch, own, at, group + 1, TILE)
        if (end - begin) % 2 == 1:
            total = add_group(total, tiled, scratch, own, at, last, 0)
        return total

    def products(weights, layer, panel, count, inputs, first, num_tokens, groups, scratch):
        size = _groups_at_once(groups, 2 * MOST_GROUPS)
        for part in range(count):
            for begin in range(0, groups, size):
                end = min(groups, begin + size)
                for token in range(0, num_tokens, ROWS):
                    to, total = token * ROW + part * NUM_LANES, zeros(SIXTEEN)
                    if begin > 0:
                        total = load_tile(SIXTEEN, scratch.products, to, ROW)
                    total = add_groups(
                        total, inputs.tiled, scratch, first + token, part, begin, end, groups
                    )
                    store_tile(scratch.products, to, ROW, finish(total) if end == groups else total)

    return products

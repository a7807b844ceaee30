"""Tiles of vectors that stay in registers, and the operations on them, for every processor.

A tile is a tuple of SIMD vectors, row t for token t. The number of rows is the length of the tuple
`tokens`, which is known at compile time, so that a whole tile stays in registers (register
blocking). A vector of weights is loaded once and multiplied with every token's number.

`dots` has the dot products of single lanes, by the instructions that the processor has.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.cpu.dots import (
    Emit,
    add_pair_product,
    bfloat_dot,
    byte_dot,
    code_dots,
    float_dot,
    in_order,
    pair_product,
)
from minigen.kernels.cpu.packed_weights import PARTS_OF_STEP
from minigen.kernels.cpu.simd import (
    FEATURES,
    FLOAT_LANES,
    FLOATS,
    WORD_LANES,
    WORDS,
    OutsideKernelError,
    address,
    broadcast,
    multiply_add,
    overload,
    same,
)

ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8  # the tuples that `tokens` can be
HOLDS_EIGHT_ROWS = "avx512f" in FEATURES  # 32 registers of sixteen lanes: two tiles of eight rows


def in_registers(tokens: Any) -> Any:
    """Return the tuple of the rows whose sums lie in registers at once, without AVX-512.

    Four rows take eight of AVX2's sixteen registers, or sixteen of Arm's 32. The 16 of processors
    without AVX are too few for them, but two rows at a time are no faster.
    """
    raise OutsideKernelError


@overload(in_registers)
def _in_registers(tokens):
    few = (0,) * min(tokens.count, len(FOUR))
    return lambda tokens: few


def _tile(context: Any, builder: Any, tile: Any, rows: list[Any]) -> Any:
    return context.make_tuple(builder, tile, rows)


def _rows(builder: Any, tile: Any, tile_type: Any) -> list[Any]:
    return [builder.extract_value(tile, row) for row in range(tile_type.count)]


def _numbers(context: Any, builder: Any, sig: Any, args: Any, position: int, count: int) -> Any:
    """Yield array[index + t * stride] in all lanes, per row t; the three are args[position:]."""
    array, index, stride = args[position : position + 3]
    data = context.make_array(sig.args[position])(context, builder, array).data
    pointer = builder.gep(data, [index])
    for _ in range(count):
        yield broadcast(builder, builder.load(pointer))
        pointer = builder.gep(pointer, [stride])


@intrinsic
def zeros(typingctx: Any, tokens: Any) -> Any:
    """Return a tile of float32 zeros, one row per element of the tuple `tokens`."""
    tile = types.UniTuple(FLOAT_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tile(context, builder, tile, [same(0.0)] * tile.count)

    return tile(tokens), codegen


@intrinsic
def spread_numbers(typingctx: Any, tokens: Any, array: Any, index: Any, stride: Any) -> Any:
    """Return a tile whose row t holds `array[index + t * stride]` in all lanes (a broadcast)."""
    lanes = FLOAT_LANES if array.dtype == types.float32 else WORD_LANES
    tile = types.UniTuple(lanes, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows = list(_numbers(context, builder, sig, args, 1, tile.count))
        return _tile(context, builder, tile, rows)

    return tile(tokens, array, types.intp, types.intp), codegen


@intrinsic
def pair_products(
    typingctx: Any, tokens: Any, pairs: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Return a tile whose row t is, lane by lane, the dot product of two pairs of 16-bit numbers.

    One pair comes from the lane of `pairs`, the other is the int32 `array[index + t * stride]`.
    """
    tile = types.UniTuple(WORD_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 2, tile.count)
        rows = [pair_product(builder, args[1], number) for number in numbers]
        return _tile(context, builder, tile, rows)

    return tile(tokens, pairs, array, types.intp, types.intp), codegen


@intrinsic
def zero_words(typingctx: Any, tokens: Any) -> Any:
    """Return a tile of int32 zeros, one row per element of the tuple `tokens`."""
    tile = types.UniTuple(WORD_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tile(context, builder, tile, [same(0)] * tile.count)

    return tile(tokens), codegen


def _adds(emit: Emit) -> Any:
    """Make what adds to row t of a tile, from the lanes and `array[index + t * stride]`.

    `emit(builder, row, lanes, number)` returns the new row.
    """

    @intrinsic
    def add(typingctx: Any, tile: Any, lanes: Any, array: Any, index: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            numbers = _numbers(context, builder, sig, args, 2, tile.count)
            rows = [
                emit(builder, row, args[1], number)
                for row, number in zip(_rows(builder, args[0], tile), numbers, strict=True)
            ]
            return _tile(context, builder, tile, rows)

        return tile(tile, lanes, array, types.intp, types.intp), codegen

    return add


def _in_parts(builder: Any, row: Any, pairs: Any, number: Any) -> Any:
    return builder.add(_parts_of(builder, row), pair_product(builder, pairs, number))


def _in_parts_at_once(builder: Any, row: Any, pairs: Any, number: Any) -> Any:
    return add_pair_product(builder, _parts_of(builder, row), pairs, number)


def _parts_of(builder: Any, row: Any) -> Any:
    return builder.shl(row, same(PARTS_OF_STEP.bit_length() - 1))


# add_byte_dots(tile, codes, array, index, stride): the dot product of four unsigned bytes, in the
# lane of `codes`, and the four signed bytes of an int32 of the array.
add_byte_dots = _adds(byte_dot)
# add_products(tile, lanes, ...): the product of two float32 numbers.
add_products = _adds(lambda builder, row, lanes, one: multiply_add(builder, lanes, one, row))
# add_in_parts(tile, pairs, ...): PARTS_OF_STEP x the row + the product of two pairs of 16 bits.
add_in_parts = _adds(_in_parts)
# add_in_parts_at_once(tile, pairs, ...): the same by one instruction for products and sum.
add_in_parts_at_once = _adds(_in_parts_at_once)


@intrinsic
def add_bfloat_dots(
    typingctx: Any, tile: Any, pairs: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t, lane by lane, the dot product of two pairs of bfloat16 numbers.

    One pair comes from the lane of `pairs`, the other is pair `index + t * stride` of the array: an
    int32, or two float32 numbers, which processors without such an instruction need not unpack.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows = _rows(builder, args[0], tile)
        if array.dtype != types.float32:
            others = _numbers(context, builder, sig, args, 2, tile.count)
            both = zip(rows, others, strict=True)
            added = [bfloat_dot(builder, row, args[1], other) for row, other in both]
            return _tile(context, builder, tile, added)
        two = args[3].type(2)
        index, stride = (builder.mul(each, two) for each in args[3:])
        first, second = (
            _numbers(context, builder, sig, [*args[:3], each, stride], 2, tile.count)
            for each in (index, builder.add(index, index.type(1)))
        )
        added = [
            float_dot(builder, row, args[1], *both)
            for row, *both in zip(rows, first, second, strict=True)
        ]
        return _tile(context, builder, tile, added)

    return tile(tile, pairs, array, types.intp, types.intp), codegen


@intrinsic
def from_parts(typingctx: Any, tile: Any) -> Any:
    """Return a tile of floats, divided by `PARTS_OF_STEP`, which rounds nothing."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        factor = same(1 / PARTS_OF_STEP)
        rows = [builder.fmul(row, factor) for row in _rows(builder, args[0], tile)]
        return _tile(context, builder, tile, rows)

    return tile(tile), codegen


@intrinsic
def with_offsets(typingctx: Any, sums: Any, words: Any, index: Any) -> Any:
    """Return pairs: the lower halves of `sums`, and above them the offsets from `index` on.

    `sums` are below 2^15, and sixteen 16-bit offsets lie in eight of the `words`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        offsets = builder.shl(_halves(context, builder, sig, args), same(16))
        return builder.or_(args[0], offsets)

    return WORD_LANES(sums, words, types.intp), codegen


@intrinsic
def load_offsets(typingctx: Any, words: Any, index: Any) -> Any:
    """Load the sixteen 16-bit offsets from `index` on as float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(_halves(context, builder, sig, args), FLOATS)

    return FLOAT_LANES(words, types.intp), codegen


def _halves(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Load sixteen 16-bit numbers; the array and the index are the last two arguments."""
    to = ir.VectorType(ir.IntType(16), NUM_LANES)
    pointer = address(context, builder, sig, args, len(args) - 2, to)
    return builder.sext(builder.load(pointer, align=4), WORDS)


@intrinsic
def add_code_dots(
    typingctx: Any, tile: Any, words: Any, at: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t, lane by lane, the dot product of a group's 32 four-bit codes with its bytes.

    The codes lie in four vectors of `words` from `at` on. The signed bytes of row t are eight
    int32 from `array[index + t * stride]` on: first those of the lower codes, then of the upper.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[3]).data

        @cache
        def word(which: int) -> Any:
            return _vector(context, builder, sig, args, 1, 16 * which)

        def codes(which: int) -> Any:
            shifted = builder.lshr(word(which - 4), same(4)) if which >= 4 else word(which)
            return builder.and_(shifted, same(0x0F0F0F0F))

        def signed(which: int, token: int) -> Any:
            at = builder.add(args[4], args[4].type(which))
            at = builder.add(at, builder.mul(args[5], args[5].type(token)))
            return broadcast(builder, builder.load(builder.gep(data, [at])))

        order = [lower + half for lower in range(4) for half in (0, 4)]  # as they are read
        rows = code_dots(builder, _rows(builder, args[0], tile), order, codes, signed)
        return _tile(context, builder, tile, rows)

    return tile(tile, words, types.intp, array, types.intp, types.intp), codegen


@intrinsic
def split_codes(typingctx: Any, words: Any, at: Any) -> Any:
    """Return a tile of a group's 32 four-bit codes as bytes, four in each lane of eight rows."""
    tile = types.UniTuple(WORD_LANES, 8)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tile(context, builder, tile, _codes(context, builder, sig, args, 0))

    return tile(words, types.intp), codegen


def _codes(context: Any, builder: Any, sig: Any, args: Any, position: int) -> list[Any]:
    """Load a group's codes: first the lower ones of four vectors, then the upper ones."""
    both = [_vector(context, builder, sig, args, position, 16 * word) for word in range(4)]
    upper = [builder.lshr(each, same(4)) for each in both]
    return [builder.and_(each, same(0x0F0F0F0F)) for each in (*both, *upper)]


@intrinsic
def add_dots_of_two(
    typingctx: Any, two: Any, codes: Any, at: Any, step: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t of two tiles, lane by lane, the dot products of 32 codes with its bytes.

    The codes of the first tile are bytes in eight vectors of `codes` from `at` on, those of the
    second from `at + step` on. The signed bytes of row t are eight int32 of `array` from `index + t
    * stride` on. Each of them is loaded once for both tiles.
    """
    tile = two.types[0]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        tiles = [_rows(builder, builder.extract_value(args[0], which), tile) for which in (0, 1)]
        second = [*args[:2], builder.add(args[2], args[3])]
        for word in range(8):
            vectors = [
                _vector(context, builder, sig, each, 1, 16 * word) for each in (args[:3], second)
            ]
            index = builder.add(args[5], args[5].type(word))
            numbers = _numbers(context, builder, sig, [*args[:5], index, args[6]], 4, tile.count)
            for token, number in enumerate(numbers):
                for rows, vector in zip(tiles, vectors, strict=True):
                    rows[token] = in_order(builder, byte_dot(builder, rows[token], vector, number))
        found = [_tile(context, builder, tile, rows) for rows in tiles]
        return context.make_tuple(builder, two, found)

    return two(two, codes, types.intp, types.intp, array, types.intp, types.intp), codegen


@intrinsic
def sum_of_rows(typingctx: Any, tile: Any) -> Any:
    """Return the sum of a tile's rows of int32, which are bytes if no sum of bytes overflows."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows = _rows(builder, args[0], tile)
        while len(rows) > 1:
            rows = [builder.add(*both) for both in zip(rows[::2], rows[1::2], strict=True)]
        return rows[0]

    return WORD_LANES(tile), codegen


@intrinsic
def add_tiles(typingctx: Any, tile: Any, other: Any) -> Any:
    """Return the sum of two tiles of int32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        both = zip(*(_rows(builder, each, tile) for each in args), strict=True)
        return _tile(context, builder, tile, [builder.add(*rows) for rows in both])

    return tile(tile, other), codegen


def _vector(context: Any, builder: Any, sig: Any, args: Any, position: int, beyond: int) -> Any:
    """Load sixteen words of an array, from `beyond` after an index on: `args[position:]`."""
    array, index = args[position : position + 2]
    data = context.make_array(sig.args[position])(context, builder, array).data
    pointer = builder.gep(data, [builder.add(index, index.type(beyond))])
    return builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=4)


@intrinsic
def add_scaled(
    typingctx: Any, total: Any, dots: Any, scales: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t of `total`: the dots x the lanes of `scales` x `array[index + t * stride]`.

    The dots are integers, or float32 numbers that are whole.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 3, total.count)
        sums = _rows(builder, args[0], total)
        rows = [
            multiply_add(builder, _float(builder, dot), builder.fmul(args[2], number), row)
            for row, dot, number in zip(sums, _rows(builder, args[1], total), numbers, strict=True)
        ]
        return _tile(context, builder, total, rows)

    return total(total, dots, scales, array, types.intp, types.intp), codegen


def _float(builder: Any, lanes: Any) -> Any:
    return lanes if lanes.type == FLOATS else builder.sitofp(lanes, FLOATS)


@intrinsic
def add_stored(typingctx: Any, tile: Any, array: Any, index: Any, stride: Any) -> Any:
    """Add the sixteen numbers of `array` from `index + t * stride` on to row t."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[1])(context, builder, args[1]).data
        pointer = builder.gep(data, [args[2]])
        rows = []
        for row in _rows(builder, args[0], tile):
            stored = builder.load(builder.bitcast(pointer, row.type.as_pointer()), align=4)
            rows.append(builder.fadd(row, stored))
            pointer = builder.gep(pointer, [args[3]])
        return _tile(context, builder, tile, rows)

    return tile(tile, array, types.intp, types.intp), codegen


@intrinsic
def load_tile(typingctx: Any, tokens: Any, array: Any, index: Any, stride: Any) -> Any:
    """Return a tile whose row t holds sixteen floats of `array`, from `index + t * stride` on."""
    tile = types.UniTuple(FLOAT_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[1])(context, builder, args[1]).data
        pointer = builder.gep(data, [args[2]])
        rows = []
        for _ in range(tile.count):
            rows.append(builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4))
            pointer = builder.gep(pointer, [args[3]])
        return _tile(context, builder, tile, rows)

    return tile(tokens, array, types.intp, types.intp), codegen


@intrinsic
def store_tile(typingctx: Any, array: Any, index: Any, stride: Any, tile: Any) -> Any:
    """Store row t of the tile to `array`, from `index + t * stride` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.gep(data, [args[1]])
        for row in _rows(builder, args[3], tile):
            builder.store(row, builder.bitcast(pointer, row.type.as_pointer()), align=4)
            pointer = builder.gep(pointer, [args[2]])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, tile), codegen

"""Tiles: a vector of sixteen lanes for each of several tokens, and what is added to them.

A tile is a tuple of `lanes` vectors, row t for token t; the number of rows is the length of the
tuple `tokens`, known when a kernel is compiled, so that a whole tile stays in registers. A number
loaded into the lanes once is multiplied with every token's: that is what makes a product of many
rows cheaper than as many products of one row.

Sources: Intel's Intrinsics Guide for `vpdpbusd` (AVX512-VNNI), `vpmaddwd` (AVX512-BW) and
`vdpbf16ps` (AVX512-BF16); a processor that lacks them does the same sums by plainer instructions.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.llvm import (
    FLOAT_LANES,
    FLOATS,
    NUM_LANES,
    WORD_LANES,
    WORDS,
    BFloat,
    call,
    multiply_add,
    same,
    spread,
    target_features,
)

ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8  # the tuples `tokens` that are used
ONLY_ONE, ONLY_TWO, ONLY_FOUR = (0.0,), (0.0,) * 2, (0.0,) * 4  # of another type: a tile for all

_FEATURES = target_features().split(",")
HAS_BYTE_DOTS = "+avx512vnni" in _FEATURES
HAS_PAIR_PRODUCTS = "+avx512bw" in _FEATURES
HAS_BFLOAT_DOTS = "+avx512bf16" in _FEATURES


def _tile(context: Any, builder: Any, tile: Any, rows: list[Any]) -> Any:
    return context.make_tuple(builder, tile, rows)


def _rows(builder: Any, tile: Any, tile_type: Any) -> list[Any]:
    return [builder.extract_value(tile, row) for row in range(tile_type.count)]


def _numbers(context: Any, builder: Any, sig: Any, args: Any, position: int, count: int) -> Any:
    """array[index + t * stride], in all lanes, for each row t; the three are args[position:]."""
    array, index, stride = args[position : position + 3]
    data = context.make_array(sig.args[position])(context, builder, array).data
    pointer = builder.gep(data, [index])
    for _ in range(count):
        yield spread(builder, builder.load(pointer))
        pointer = builder.gep(pointer, [stride])


@intrinsic
def zeros(typingctx: Any, tokens: Any) -> Any:
    """A tile of float32 zeros, a row for each member of the tuple `tokens`."""
    tile = types.UniTuple(FLOAT_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tile(context, builder, tile, [same(0.0)] * tile.count)

    return tile(tokens), codegen


@intrinsic
def spread_numbers(typingctx: Any, tokens: Any, array: Any, index: Any, stride: Any) -> Any:
    """A tile whose row t holds `array[index + t * stride]` in all lanes."""
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
    """A tile whose row t is, lane by lane, the dot product of two pairs of 16-bit numbers.

    One pair is the lane's of `pairs`, the other the int32 `array[index + t * stride]`.
    """
    tile = types.UniTuple(WORD_LANES, tokens.count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 2, tile.count)
        rows = [_pair_product(builder, args[1], number) for number in numbers]
        return _tile(context, builder, tile, rows)

    return tile(tokens, pairs, array, types.intp, types.intp), codegen


def _pair_product(builder: Any, a: Any, b: Any) -> Any:
    if HAS_PAIR_PRODUCTS:
        halves = ir.VectorType(ir.IntType(16), 2 * NUM_LANES)
        a, b = builder.bitcast(a, halves), builder.bitcast(b, halves)
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, [a, b])
    low = [builder.ashr(builder.shl(each, same(16)), same(16)) for each in (a, b)]
    high = [builder.ashr(each, same(16)) for each in (a, b)]
    return builder.add(builder.mul(*low), builder.mul(*high))


@intrinsic
def add_byte_dots(
    typingctx: Any, tile: Any, codes: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t, lane by lane, the dot product of four unsigned bytes and four signed ones.

    The unsigned bytes are the lane's of `codes`, the signed ones those of the int32
    `array[index + t * stride]`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 2, tile.count)
        rows = [
            _byte_dot(builder, row, args[1], number)
            for row, number in zip(_rows(builder, args[0], tile), numbers, strict=True)
        ]
        return _tile(context, builder, tile, rows)

    return tile(tile, codes, array, types.intp, types.intp), codegen


def _byte_dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    if HAS_BYTE_DOTS:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, unsigned, signed])
    for byte in range(4):
        code = builder.and_(builder.lshr(unsigned, same(8 * byte)), same(0xFF))
        number = builder.ashr(builder.shl(signed, same(24 - 8 * byte)), same(24))
        total = builder.add(total, builder.mul(code, number))
    return total


@intrinsic
def add_bfloat_dots(
    typingctx: Any, tile: Any, pairs: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t, lane by lane, the dot product of two bfloat16 numbers and two others.

    One pair is the lane's of `pairs`, the other the int32 `array[index + t * stride]`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 2, tile.count)
        rows = [
            _bfloat_dot(builder, row, args[1], number)
            for row, number in zip(_rows(builder, args[0], tile), numbers, strict=True)
        ]
        return _tile(context, builder, tile, rows)

    return tile(tile, pairs, array, types.intp, types.intp), codegen


def _bfloat_dot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    if HAS_BFLOAT_DOTS:
        pairs = ir.VectorType(BFloat(), 2 * NUM_LANES)
        a, b = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, a, b])
    for halves in (  # the upper ones first, as the instruction does: the same to the last bit
        [builder.and_(each, same(-65536)) for each in (a, b)],
        [builder.shl(each, same(16)) for each in (a, b)],
    ):
        first, second = (builder.bitcast(each, FLOATS) for each in halves)
        total = multiply_add(builder, first, second, total)
    return total


@intrinsic
def add_scaled(
    typingctx: Any, total: Any, dots: Any, scales: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t of `total` the whole numbers of `dots`, times the lanes of `scales`, times
    `array[index + t * stride]`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 3, total.count)
        sums, wholes = _rows(builder, args[0], total), _rows(builder, args[1], total)
        rows = [
            multiply_add(builder, builder.sitofp(whole, FLOATS), builder.fmul(args[2], number), row)
            for row, whole, number in zip(sums, wholes, numbers, strict=True)
        ]
        return _tile(context, builder, total, rows)

    return total(total, dots, scales, array, types.intp, types.intp), codegen


@intrinsic
def add_products(
    typingctx: Any, total: Any, lanes: Any, array: Any, index: Any, stride: Any
) -> Any:
    """Add to row t of `total` the lanes times `array[index + t * stride]`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, sig, args, 2, total.count)
        rows = [
            multiply_add(builder, args[1], number, row)
            for row, number in zip(_rows(builder, args[0], total), numbers, strict=True)
        ]
        return _tile(context, builder, total, rows)

    return total(total, lanes, array, types.intp, types.intp), codegen


@intrinsic
def add_stored(typingctx: Any, tile: Any, array: Any, index: Any, stride: Any) -> Any:
    """Add to row t the sixteen numbers of `array` from `index + t * stride` on."""

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
def store_tile(typingctx: Any, array: Any, index: Any, stride: Any, tile: Any) -> Any:
    """Write row t of the tile to `array`, from `index + t * stride` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.gep(data, [args[1]])
        for row in _rows(builder, args[3], tile):
            builder.store(row, builder.bitcast(pointer, row.type.as_pointer()), align=4)
            pointer = builder.gep(pointer, [args[2]])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, tile), codegen

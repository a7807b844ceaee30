"""AMX tiles in plain code, so that a processor without them computes what one with them would.

`install` must run before the modules that use tiles are imported. All tiles are full (16 rows of 64
bytes), and one thread at a time may use them. Source: Intel's Software Developer's Manual, volume
2, TDPBF16PS.
"""

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from minigen.kernels.cpu.amx import scratch, tiles
from minigen.kernels.cpu.simd import address

WORDS_OF_TILE = scratch.ROWS * 16
_MEMORY = (ctypes.c_int32 * (tiles.NUM_TILES * WORDS_OF_TILE))()
_I64 = ir.IntType(64)


def _word(builder: Any, index: Any, to: Any) -> Any:
    start = _I64(ctypes.addressof(_MEMORY))
    return builder.inttoptr(builder.add(start, builder.shl(index, _I64(2))), to.as_pointer())


@intrinsic
def _half(typingctx: Any, index: Any, upper: Any) -> Any:
    """Return the lower or upper bfloat16 number of a word of the tiles, as float64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = builder.load(_word(builder, args[0], ir.IntType(32)))
        low = builder.shl(word, ir.IntType(32)(16))
        high = builder.and_(word, ir.IntType(32)(0xFFFF0000))
        bits = builder.select(builder.icmp_signed("!=", args[1], _I64(0)), high, low)
        return builder.fpext(builder.bitcast(bits, ir.FloatType()), ir.DoubleType())

    return types.float64(types.intp, types.intp), codegen


@intrinsic
def _add(typingctx: Any, index: Any, number: Any) -> Any:
    """Add a float32 number to a word of the tiles."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _word(builder, args[0], ir.FloatType())
        builder.store(builder.fadd(builder.load(at), args[1]), at)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), codegen


@intrinsic
def _set(typingctx: Any, index: Any, number: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], _word(builder, args[0], ir.IntType(32)))
        return context.get_dummy_value()

    return types.void(types.intp, types.int32), codegen


def _moves(loads: bool) -> Any:
    @intrinsic
    def move(typingctx: Any, array: Any, index: Any, word: Any) -> Any:
        """Copy a word between the array's memory, from `index` on, and the tiles."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            outside = address(context, builder, sig, args, 0, ir.IntType(32))
            inside = _word(builder, args[2], ir.IntType(32))
            source, target = (outside, inside) if loads else (inside, outside)
            builder.store(builder.load(source, align=1), target, align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.intp), codegen

    @njit
    def all_words(tile, array, index, stride):  # type: ignore[no-untyped-def]
        per_word = 4 // array.itemsize
        for row in range(scratch.ROWS):
            for word in range(16):
                at = tile * WORDS_OF_TILE + row * 16 + word
                move(array, index + row * stride + word * per_word, at)

    return all_words


@njit
def _zero(tile):  # type: ignore[no-untyped-def]
    for word in range(WORDS_OF_TILE):
        _set(tile * WORDS_OF_TILE + word, 0)


@njit
def _bfloat_dots(total, left, right):  # type: ignore[no-untyped-def]
    """Even and odd columns are added up apart, each product and sum rounded once."""
    for row in range(scratch.ROWS):
        for column in range(16):
            even = odd = np.float32(0.0)
            for word in range(16):
                a = left * WORDS_OF_TILE + row * 16 + word
                b = right * WORDS_OF_TILE + word * 16 + column
                even = np.float32(even + _half(a, 0) * _half(b, 0))
                odd = np.float32(odd + _half(a, 1) * _half(b, 1))
            _add(total * WORDS_OF_TILE + row * 16 + column, even + odd)


@njit
def _configure(configurations, index):  # type: ignore[no-untyped-def]
    return


@njit
def _release():  # type: ignore[no-untyped-def]
    return


def install() -> None:
    """Let kernels that are imported from now on use these tiles."""
    scratch.USE_TILES = True
    changed = tiles.__dict__
    changed |= {"configure": _configure, "release": _release}
    changed |= {"tile_zero": _zero, "tile_load": _moves(True), "tile_store": _moves(False)}
    changed |= {"tile_bfloat_dots": _bfloat_dots}

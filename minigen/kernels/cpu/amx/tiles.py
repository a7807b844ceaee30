"""AMX: the matrix instructions of Intel processors, on eight tiles of up to 16 rows x 64 bytes.

A dot product instruction multiplies two tiles and adds to a third one, C[m, n] += A[m, k] B[k, n]:

    A: rows are tokens; 64 bytes are 64 numbers of a byte, or 32 of bfloat16
    B: row k holds, for 16 outputs, word k of 4 bytes: numbers 4k..4k+3, or 2k and 2k+1
    C: rows are tokens, 16 columns of int32 or float32 are outputs

Tile registers have shapes, which a thread sets before its first tile instruction (`configure`) and
gives up afterwards (`release`), so that the system has nothing to save when threads change. Linux
lets a process use tiles only after it has asked for them (`permitted`).

Sources: Intel's Software Developer's Manual, volume 1, on programming with AMX, and volume 2
(LDTILECFG, TILELOADD, TDPBSUD, TDPBF16PS); Linux, Documentation/arch/x86/xstate.rst.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.simd import address, call

NUM_TILES = 8
_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()


def configuration(shapes: dict[int, tuple[int, int]]) -> np.ndarray:
    """Return the 64 bytes that `configure` reads: the (rows, bytes per row) of each tile used."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # the palette: the only kind of tiles so far
    for tile, (rows, row_bytes) in shapes.items():
        found[16 + 2 * tile] = row_bytes
        found[48 + tile] = rows
    return found


def _void(codegen: Any) -> Any:
    """Return a code generator whose function returns nothing."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codegen(context, builder, sig, args)
        return context.get_dummy_value()

    return generate


@intrinsic
def configure(typingctx: Any, configurations: Any, index: Any) -> Any:
    """Set the shapes of this thread's tiles to the 64 bytes at `configurations[index]`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, _I8)
        call(builder, "llvm.x86.ldtilecfg", _VOID, [pointer])

    return types.void(configurations, types.intp), _void(codegen)


@intrinsic
def release(typingctx: Any) -> Any:
    """Give up this thread's tiles."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID, [])

    return types.void(), _void(codegen)


@intrinsic(prefer_literal=True)
def tile_zero(typingctx: Any, tile: Any) -> Any:
    """Set all numbers of a tile to 0. Here and below, the number of a tile is a constant."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilezero", _VOID, [_I8(tile.literal_value)])

    return types.void(tile), _void(codegen)


def _moves(name: str) -> Any:
    """Make the instruction that loads or stores a tile."""

    @intrinsic(prefer_literal=True)
    def move(typingctx: Any, tile: Any, array: Any, index: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = address(context, builder, sig, args, 1, _I8)
            size = context.get_abi_sizeof(context.get_data_type(array.dtype))
            row_bytes = builder.mul(args[3], _I64(size))
            call(builder, name, _VOID, [_I8(tile.literal_value), pointer, row_bytes])

        return types.void(tile, array, types.intp, types.intp), _void(codegen)

    return move


# tile_load(tile, array, index, stride): row r of the tile is what `array` holds from
# `index + r * stride` on; `tile_store` is the reverse.
tile_load, tile_store = _moves("llvm.x86.tileloadd64"), _moves("llvm.x86.tilestored64")


def _dots(name: str) -> Any:
    """Make the instruction that adds the products of two tiles to a third one."""

    @intrinsic(prefer_literal=True)
    def dots(typingctx: Any, total: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            tiles = [_I8(each.literal_value) for each in (total, left, right)]
            call(builder, name, _VOID, tiles)

        return types.void(total, left, right), _void(codegen)

    return dots


# tile_byte_dots(c, a, b): int32 C += signed bytes of A x unsigned bytes of B.
tile_byte_dots = _dots("llvm.x86.tdpbsud")
# tile_bfloat_dots(c, a, b): float32 C += bfloat16 A x bfloat16 B, in the order of `TDPBF16PS`.
tile_bfloat_dots = _dots("llvm.x86.tdpbf16ps")

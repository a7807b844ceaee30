"""Vectors of sixteen numbers for Numba: what a kernel may say to one vector register.

Numba compiles Python for one number at a time, and hopes that LLVM finds the vectors. Here a vector
is a value of its own: `load` fills sixteen lanes, `+ - *` and the functions below work on all of
them at once, and `store` writes them back. Each is one or a few instructions in LLVM's language.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from minigen.kernels.llvm import (
    FLOAT_LANES,
    FLOATS,
    I32,
    NUM_LANES,
    WORD_LANES,
    WORDS,
    address,
    call,
    from_float16,
    multiply_add,
    same,
    spread,
    to_bfloat16,
)


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Sixteen numbers of a flat float32 or int32 array, from `index` on."""
    lanes = FLOAT_LANES if array.dtype == types.float32 else WORD_LANES

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to = context.get_value_type(lanes)
        return builder.load(address(context, builder, sig, args, 0, to), align=4)

    return lanes(array, types.intp), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the 64 bytes around `array[index]` into L2; L1 lets few be on their way at a time."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, ir.IntType(8))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def load_float16(typingctx: Any, array: Any, index: Any) -> Any:
    """Sixteen float16 numbers, kept in a flat uint16 array, as float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to = ir.VectorType(ir.IntType(16), NUM_LANES)
        bits = builder.load(address(context, builder, sig, args, 0, to), align=2)
        return from_float16(builder, bits)

    return FLOAT_LANES(array, types.intp), codegen


@intrinsic
def float16_at(typingctx: Any, array: Any, index: Any) -> Any:
    """One float16 number of a flat uint16 array, as float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, ir.IntType(16))
        bits = spread(builder, builder.load(pointer, align=2))
        return builder.extract_element(from_float16(builder, bits), I32(0))

    return types.float32(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Write sixteen numbers to a flat array, from `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, args[2].type)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def store_bytes(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Write sixteen float32 numbers, rounded, to a flat array of bytes, signed or unsigned."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rounded = call(builder, "llvm.rint.v16f32", FLOATS, [args[2]])
        to = ir.VectorType(ir.IntType(8), NUM_LANES)
        numbers = builder.trunc(builder.fptosi(rounded, WORDS), to)
        builder.store(numbers, address(context, builder, sig, args, 0, to), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def store_two_bytes(typingctx: Any, array: Any, upper: Any, lower: Any, lanes: Any) -> Any:
    """Write sixteen whole numbers as 256 times a signed byte, from `upper` on, and one to add."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to = ir.VectorType(ir.IntType(8), NUM_LANES)
        whole = builder.fptosi(args[3], WORDS)
        rest = builder.ashr(builder.add(whole, same(128)), same(8))
        for index, numbers in ((1, rest), (2, whole)):
            pointer = address(context, builder, sig, [args[0], args[index]], 0, to)
            builder.store(builder.trunc(numbers, to), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), codegen


@intrinsic
def store_bfloat16(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Write sixteen float32 numbers, rounded to bfloat16, to a flat uint16 array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rounded = to_bfloat16(builder, args[2])
        builder.store(rounded, address(context, builder, sig, args, 0, rounded.type), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def all_lanes(typingctx: Any, number: Any) -> Any:
    """The number, as float32, in every lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return spread(builder, args[0])

    return FLOAT_LANES(types.float32), codegen


@intrinsic
def keep_between(
    typingctx: Any, lanes: Any, first: Any, low: Any, high: Any, otherwise: Any
) -> Any:
    """Lane i stays where low <= first + i < high, and becomes `otherwise` elsewhere."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = ir.Constant(WORDS, list(range(NUM_LANES)))
        index, low, high = (
            spread(builder, builder.trunc(each, I32)) for each in (args[1], args[2], args[3])
        )
        index = builder.add(index, count)
        above = builder.icmp_signed(">=", index, low)
        inside = builder.and_(above, builder.icmp_signed("<", index, high))
        return builder.select(inside, args[0], spread(builder, args[4]))

    integer = types.intp
    return FLOAT_LANES(lanes, integer, integer, integer, types.float32), codegen


def _word_operation(operate: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, words: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return operate(builder, args[0])

        return WORD_LANES(words), codegen

    return operation


def _low_nibbles(builder: Any, words: Any) -> Any:
    return builder.and_(words, same(0x0F0F0F0F))


# The low, or the high, four bits of each of the 64 bytes.
low_nibbles = _word_operation(_low_nibbles)
high_nibbles = _word_operation(
    lambda builder, words: _low_nibbles(builder, builder.lshr(words, same(4)))
)


def _float_operation(operate: Callable[[Any, Any], Any], num_args: int = 2) -> Any:
    if num_args == 1:

        @intrinsic
        def operation(typingctx: Any, a: Any) -> Any:
            return a(a), lambda context, builder, sig, args: operate(builder, args)

    elif num_args == 2:

        @intrinsic
        def operation(typingctx: Any, a: Any, b: Any) -> Any:
            return a(a, b), lambda context, builder, sig, args: operate(builder, args)

    else:

        @intrinsic
        def operation(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
            return a(a, b, c), lambda context, builder, sig, args: operate(builder, args)

    return operation


# The second where they cannot be compared, as `vmaxps` and `vminps` have it: a NaN there stays one.
larger = _float_operation(
    lambda builder, args: builder.select(builder.fcmp_ordered(">", *args), *args)
)
smaller = _float_operation(
    lambda builder, args: builder.select(builder.fcmp_ordered("<", *args), *args)
)
# The first where the second is above the third, and 0 elsewhere.
keep_above = _float_operation(
    lambda builder, args: builder.select(
        builder.fcmp_ordered(">", args[1], args[2]), args[0], same(0.0)
    ),
    3,
)
fused = _float_operation(lambda builder, args: multiply_add(builder, *args), 3)
nearest = _float_operation(
    lambda builder, args: call(builder, "llvm.rint.v16f32", FLOATS, list(args)), 1
)


def _means(python_operator: Any, operation: Any) -> None:
    """Let Python's own sign, between lanes, mean the operation."""

    @overload(python_operator)
    def chosen(a, b):
        return (lambda a, b: operation(a, b)) if a == b == FLOAT_LANES else None


_means(operator.add, _float_operation(lambda builder, args: builder.fadd(*args)))
_means(operator.sub, _float_operation(lambda builder, args: builder.fsub(*args)))
_means(operator.mul, _float_operation(lambda builder, args: builder.fmul(*args)))
_means(operator.truediv, _float_operation(lambda builder, args: builder.fdiv(*args)))


def _power_of_two(builder: Any, args: Any) -> Any:
    """2^n for whole n from -126 to 127, by writing the exponent's bits."""
    whole = builder.fptosi(args[0], WORDS)
    return builder.bitcast(builder.shl(builder.add(whole, same(127)), same(23)), FLOATS)


power_of_two = _float_operation(_power_of_two, 1)


def _across(name: str) -> Any:
    """One number of sixteen, halving again and again: the order never changes."""

    @intrinsic
    def operation(typingctx: Any, lanes: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            vector, width = args[0], NUM_LANES
            while width > 1:
                width //= 2
                half = ir.VectorType(I32, width)
                low, high = (
                    builder.shuffle_vector(
                        vector, vector, ir.Constant(half, list(range(start, start + width)))
                    )
                    for start in (0, width)
                )
                if name == "add":
                    vector = builder.fadd(low, high)
                else:
                    vector = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            return builder.extract_element(vector, I32(0))

        return types.float32(lanes), codegen

    return operation


sum_of_lanes, largest_lane = _across("add"), _across("larger")

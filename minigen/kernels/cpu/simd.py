"""SIMD vectors of sixteen numbers for Numba: what a kernel may say to one vector register.

Numba compiles Python for one number at a time, and hopes that LLVM finds the vectors. Here a vector
is a value of its own: `load` fills sixteen lanes, `+ - *` and the functions below work on all of
them at once, and `store` writes them back. Each is one or a few instructions of LLVM. `zeros` makes
arrays whose first number begins a cache line, so that no register is filled from two.

`spread_out` is the Walsh-Hadamard transform: it spreads one large number over all of its group, so
that the group's scale need not grow. It is orthogonal: products of two vectors that were both
transformed are those of the vectors.

Sources: LLVM's Language Reference; QuaRot, Ashkboos et al. 2024, for the transform.
"""

import math
import operator
from collections.abc import Callable
from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, overload, register_model

CACHE_LINE = 64


def zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """As `np.zeros`, whose numbers begin anywhere: mostly 16 bytes behind a line's begin."""
    num_bytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    first = -room.ctypes.data % CACHE_LINE
    return room[first : first + num_bytes].view(dtype).reshape(shape)


NUM_LANES = 16
I32, F32 = ir.IntType(32), ir.FloatType()
FLOATS, WORDS = ir.VectorType(F32, NUM_LANES), ir.VectorType(I32, NUM_LANES)


def target_features() -> str:
    """Return the instruction sets that Numba compiles for, as LLVM writes them: "+avx2,-sse4a".

    They are this processor's, unless NUMBA_CPU_FEATURES, NUMBA_CPU_NAME=generic or
    NUMBA_ENABLE_AVX=0 asks Numba for others: LLVM ends the process at an instruction beyond them.
    """
    asked: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    return str(get_host_cpu_features()) if asked is None else asked


HAS_FLOAT16 = "x86" not in machine() or "+f16c" in target_features().split(",")
HAS_BFLOAT16 = "+avx512bf16" in target_features().split(",")


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class OutsideKernelError(TypeError):
    """What only compiled kernels may call was called from Python."""

    def __init__(self) -> None:
        super().__init__("this works on vectors, which only functions under numba.njit have")


class Lanes(types.Type):
    """Sixteen float32 numbers, or sixteen words of 32 bits, in a register."""

    def __init__(self, kind: str):
        self.kind = kind
        super().__init__(name=f"Lanes({kind})")


FLOAT_LANES, WORD_LANES = Lanes("float32"), Lanes("int32")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes):
        super().__init__(dmm, fe_type, FLOATS if fe_type.kind == "float32" else WORDS)


def address(context: Any, builder: Any, sig: Any, args: Any, position: int, to: Any) -> Any:
    """A pointer to `args[position][args[position + 1]]`, as a pointer to type `to`."""
    data = context.make_array(sig.args[position])(context, builder, args[position]).data
    return builder.bitcast(builder.gep(data, [args[position + 1]]), to.as_pointer())


def spread(builder: Any, scalar: Any) -> Any:
    """The number in all lanes."""
    vector = ir.VectorType(scalar.type, NUM_LANES)
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(WORDS, [0] * NUM_LANES))


def same(value: float) -> Any:
    """The constant in all lanes; a float makes float32 lanes, an int words."""
    return ir.Constant(FLOATS if isinstance(value, float) else WORDS, [value] * NUM_LANES)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, [a, b, c])


def from_float16(builder: Any, bits: Any) -> Any:
    """Sixteen float16 numbers, given as 16-bit words, as float32.

    Without the instruction LLVM would call a function that no library of the process has.
    """
    if HAS_FLOAT16:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), NUM_LANES)), FLOATS)
    words = builder.zext(bits, WORDS)
    size = builder.shl(builder.and_(words, same(0x7FFF)), same(13))
    scaled = builder.bitcast(builder.fmul(builder.bitcast(size, FLOATS), same(2.0**112)), WORDS)
    finite = builder.icmp_unsigned("<", size, same(0x7C00 << 13))
    number = builder.select(finite, scaled, builder.or_(size, same(0x7F800000)))
    sign = builder.shl(builder.and_(words, same(0x8000)), same(16))
    return builder.bitcast(builder.or_(number, sign), FLOATS)


def to_bfloat16(builder: Any, lanes: Any) -> Any:
    """Sixteen float32 numbers rounded to bfloat16, to even where two are as near, as 16-bit words.

    Numbers below 2^-126 become 0, and all is as the instruction `vcvtneps2bf16` has it.

    Without the instruction LLVM would call a function that no library of the process has.
    """
    halves = ir.VectorType(ir.IntType(16), NUM_LANES)
    if HAS_BFLOAT16:
        return builder.bitcast(builder.fptrunc(lanes, ir.VectorType(BFloat(), NUM_LANES)), halves)
    bits = builder.bitcast(lanes, WORDS)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    rounded = builder.add(bits, builder.add(odd, same(0x7FFF)))
    quiet, zero = builder.or_(bits, same(0x00400000)), builder.and_(bits, same(-(2**31)))
    exponent = builder.and_(bits, same(0x7F800000))
    rounded = builder.select(builder.icmp_signed("==", exponent, same(0)), zero, rounded)
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), same(16)), halves)


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


_ONE_OVER_ROOT_32 = np.float32(1.0 / np.sqrt(32.0))


@intrinsic
def hadamard(typingctx: Any, lanes: Any) -> Any:
    """Four rounds of sums and differences: of neighbours first, of lanes i and i + 8 last."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = args[0]
        for distance in (1, 2, 4, 8):
            partners = [lane ^ distance for lane in range(NUM_LANES)]
            signs = [-1.0 if lane & distance else 1.0 for lane in range(NUM_LANES)]
            others = builder.shuffle_vector(found, found, ir.Constant(WORDS, partners))
            found = multiply_add(builder, found, ir.Constant(FLOATS, signs), others)
        return found

    return lanes(lanes), codegen


@njit
def spread_out(x, at, width):
    """Replace each 32 numbers of x[at : at + width] by their Walsh-Hadamard transform."""
    factor = all_lanes(_ONE_OVER_ROOT_32)
    for column in range(at, at + width, 32):
        low, high = load(x, column), load(x, column + 16)
        store(x, column, hadamard(low + high) * factor)
        store(x, column + 16, hadamard(low - high) * factor)

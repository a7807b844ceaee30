"""SIMD vectors of sixteen lanes for Numba: the operations of one vector register.

Numba compiles Python code for one number at a time, and relies on LLVM to vectorise it. Here a
vector is a type of its own: `load` fills sixteen lanes, `+ - *` and the functions below work on all
lanes at once, and `store` writes them back. Each operation is one or a few LLVM instructions.

Source: LLVM's Language Reference.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from minigen.hardware import arm_features
from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.processor import IS_X86, names_of, target_features


def _complete_features() -> None:
    """Let Numba compile for what the system knows of an ARM processor and LLVM does not report.

    The features stay as they are if Numba has compiled a function before.
    """
    is_late = "_toplevel_target_context" in vars(cpu_target)
    if arm_features() and not is_late:
        config.CPU_FEATURES = target_features()  # type: ignore[attr-defined]


_complete_features()


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Apply `numba.njit` to a function that allocates nothing, without reference counts.

    Numba counts the references to every array that a function reads from a named tuple, with an
    atomic instruction, on which all workers wait for each other. The caller keeps the arrays alive.
    Such a function must not return an array, because a caller with counts would free it.
    """
    compiler: Any = njit  # its type hints lack this option
    return compiler(_nrt=False, **options)(function)


def overload(function: Callable[..., Any], **options: Any) -> Any:
    """Apply `numba.extending.overload`; what is compiled counts no references, as in a `kernel`.

    Otherwise its first caller in the process decides, and later callers get the same machine code.
    """
    jit_options: Any = {"_nrt": False}  # its type hints lack this option
    return extending.overload(function, jit_options=jit_options, **options)


I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
FLOATS, WORDS = ir.VectorType(F32, NUM_LANES), ir.VectorType(I32, NUM_LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), NUM_LANES)
LONGS = ir.VectorType(ir.IntType(64), NUM_LANES)


def compiled_features() -> str:
    """Return the instruction sets that Numba compiles for in this process, as LLVM writes them.

    LLVM aborts the process at any other instruction. They are `target_features`, unless the
    process compiled something on an ARM processor before.
    """
    requested: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    return str(get_host_cpu_features()) if requested is None else requested


FEATURES = names_of(compiled_features())
HAS_FLOAT16 = not IS_X86 or "f16c" in FEATURES
HAS_FMA = not IS_X86 or "fma" in FEATURES
HAS_BFLOAT16 = "avx512bf16" in FEATURES


class BFloat(ir.Type):
    """LLVM's `bfloat` type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class OutsideKernelError(TypeError):
    """A function that only compiled kernels can call was called from Python."""

    def __init__(self) -> None:
        super().__init__(
            "This function works on SIMD vectors; call it from a function that numba.njit compiles."
        )


class SimdVector(types.Type):
    """The Numba type of a vector register: sixteen float32 numbers or sixteen 32-bit words."""

    def __init__(self, kind: str):
        self.kind = kind
        super().__init__(name=f"SimdVector({kind})")


FLOAT_LANES, WORD_LANES = SimdVector("float32"), SimdVector("int32")


@register_model(SimdVector)
class _SimdVectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: SimdVector):
        super().__init__(dmm, fe_type, FLOATS if fe_type.kind == "float32" else WORDS)


def address(context: Any, builder: Any, sig: Any, args: Any, position: int, to: Any) -> Any:
    """Return the address of `args[position][args[position + 1]]` as a pointer to type `to`."""
    data = context.make_array(sig.args[position])(context, builder, args[position]).data
    return builder.bitcast(builder.gep(data, [args[position + 1]]), to.as_pointer())


def broadcast(builder: Any, scalar: Any) -> Any:
    """Return a vector with the scalar in all lanes."""
    vector = ir.VectorType(scalar.type, NUM_LANES)
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(WORDS, [0] * NUM_LANES))


def same(value: float) -> Any:
    """Return a vector constant: float32 lanes for a float, 32-bit words for an int."""
    return ir.Constant(FLOATS if isinstance(value, float) else WORDS, [value] * NUM_LANES)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Emit a call of an LLVM intrinsic or of another function by its name."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a fused multiply-add: a * b + c, rounded once.

    Without the instruction, LLVM would call a library function per lane, so it is written out in
    float64, where the product is exact and the sum is rounded. Rounding that sum again, to float32,
    is right unless the sum lies in the middle between two float32 numbers, because it may have been
    rounded to there. In every such middle the last 28 bits are 0 (in those of the smallest numbers
    also more); then `_rounded_to_odd` computes all lanes again.
    """
    if HAS_FMA:
        return call(builder, "llvm.fma.v16f32", FLOATS, [a, b, c])
    wide = [builder.fpext(each, DOUBLES) for each in (a, b, c)]
    total = builder.fadd(builder.fmul(*wide[:2]), wide[2])
    found, quick = builder.fptrunc(total, FLOATS), builder.block
    halves = builder.bitcast(total, ir.VectorType(I32, 2 * NUM_LANES))
    lower = builder.shuffle_vector(
        halves, halves, ir.Constant(WORDS, list(range(0, 2 * NUM_LANES, 2)))
    )
    in_doubt = builder.icmp_signed("==", builder.and_(lower, same(0x0FFFFFFF)), same(0))
    any_in_doubt = builder.icmp_signed("!=", builder.bitcast(in_doubt, I16), I16(0))
    with builder.if_then(any_in_doubt, likely=False):
        careful, after = _rounded_to_odd(builder, *wide), builder.block
    chosen = builder.phi(FLOATS)
    chosen.add_incoming(found, quick)
    chosen.add_incoming(careful, after)
    return chosen


def add_exact_product(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c where float32 holds the product exactly, so that only the sum is rounded."""
    if HAS_FMA:
        return multiply_add(builder, a, b, c)
    return builder.fadd(builder.fmul(a, b), c)


def _rounded_to_odd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c of float64 vectors that hold float32 numbers, rounded once to float32.

    The sum in float64 is rounded to odd (towards the even neighbour's other side), so that rounding
    it again gives the same bits. Source: Boldo and Melquiond 2008, "Emulation of FMA and Correctly
    Rounded Sums".
    """
    product = builder.fmul(a, b)
    total = builder.fadd(product, c)
    virtual = builder.fsub(total, product)  # Knuth's TwoSum: the exact error of the sum
    own = builder.fsub(product, builder.fsub(total, virtual))
    error = builder.fadd(own, builder.fsub(c, virtual))
    bits, errors = (builder.bitcast(each, LONGS) for each in (total, error))
    one, last = ir.Constant(LONGS, [1] * NUM_LANES), ir.Constant(LONGS, [63] * NUM_LANES)
    towards = builder.or_(builder.ashr(builder.xor(bits, errors), last), one)  # 1 or -1
    is_even = builder.icmp_signed("==", builder.and_(bits, one), ir.Constant(LONGS, None))
    inexact = builder.fcmp_ordered("!=", error, ir.Constant(DOUBLES, None))
    odd = builder.select(builder.and_(is_even, inexact), builder.add(bits, towards), bits)
    return builder.fptrunc(builder.bitcast(odd, DOUBLES), FLOATS)


def from_float16(builder: Any, bits: Any) -> Any:
    """Convert sixteen float16 numbers, given as 16-bit words, to float32.

    Without the instruction, LLVM would call a library function that the process does not have, so
    the conversion is written out here.
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
    """Round sixteen float32 numbers to bfloat16, ties to even; return them as 16-bit words.

    Numbers below 2^-126 become 0, as with the instruction `vcvtneps2bf16`. Without it, LLVM would
    call a library function that the process does not have, so the rounding is written out here.
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
    """Load sixteen numbers of a flat float32 or int32 array, from `index` on."""
    lanes = FLOAT_LANES if array.dtype == types.float32 else WORD_LANES

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to = context.get_value_type(lanes)
        return builder.load(address(context, builder, sig, args, 0, to), align=4)

    return lanes(array, types.intp), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of `array[index]` into L2; L1 allows only a few loads in flight."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, ir.IntType(8))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def load_float16(typingctx: Any, array: Any, index: Any) -> Any:
    """Load sixteen float16 numbers, stored in a flat uint16 array, as float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to = ir.VectorType(ir.IntType(16), NUM_LANES)
        bits = builder.load(address(context, builder, sig, args, 0, to), align=2)
        return from_float16(builder, bits)

    return FLOAT_LANES(array, types.intp), codegen


@intrinsic
def float16_of(typingctx: Any, bits: Any) -> Any:
    """Return the float16 number in the low 16 bits of an integer as float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = broadcast(builder, builder.trunc(args[0], ir.IntType(16)))
        return builder.extract_element(from_float16(builder, half), I32(0))

    return types.float32(types.int64), codegen


@intrinsic
def float32_of(typingctx: Any, bits: Any) -> Any:
    """Return the float32 number in the low 32 bits of an integer."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Store sixteen numbers to a flat array, from `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig, args, 0, args[2].type)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def store_bytes(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Round sixteen float32 numbers and store them to a flat array of signed or unsigned bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rounded = call(builder, "llvm.rint.v16f32", FLOATS, [args[2]])
        to = ir.VectorType(ir.IntType(8), NUM_LANES)
        numbers = builder.trunc(builder.fptosi(rounded, WORDS), to)
        builder.store(numbers, address(context, builder, sig, args, 0, to), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def store_two_bytes(typingctx: Any, array: Any, upper: Any, lower: Any, lanes: Any) -> Any:
    """Store sixteen integers as 256 x a signed byte (at `upper`) + a signed byte (at `lower`)."""

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
    """Round sixteen float32 numbers to bfloat16 and store them to a flat array.

    Its type is uint16, or float32 for numbers that are float32 again after their rounding.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rounded = to_bfloat16(builder, args[2])
        if array.dtype == types.float32:
            rounded = builder.bitcast(builder.shl(builder.zext(rounded, WORDS), same(16)), FLOATS)
        builder.store(rounded, address(context, builder, sig, args, 0, rounded.type), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def all_lanes(typingctx: Any, number: Any) -> Any:
    """Return a vector with the float32 number in every lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return broadcast(builder, args[0])

    return FLOAT_LANES(types.float32), codegen


@intrinsic
def keep_between(
    typingctx: Any, lanes: Any, first: Any, low: Any, high: Any, otherwise: Any
) -> Any:
    """Keep lane i if low <= first + i < high; set the other lanes to `otherwise`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = ir.Constant(WORDS, list(range(NUM_LANES)))
        index, low, high = (
            broadcast(builder, builder.trunc(each, I32)) for each in (args[1], args[2], args[3])
        )
        index = builder.add(index, count)
        above = builder.icmp_signed(">=", index, low)
        inside = builder.and_(above, builder.icmp_signed("<", index, high))
        return builder.select(inside, args[0], broadcast(builder, args[4]))

    integer = types.intp
    return FLOAT_LANES(lanes, integer, integer, integer, types.float32), codegen


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


# With a NaN in either argument the result is the second one, as with `vmaxps` and `vminps`: a NaN
# in the second argument stays.
larger = _float_operation(
    lambda builder, args: builder.select(builder.fcmp_ordered(">", *args), *args)
)
smaller = _float_operation(
    lambda builder, args: builder.select(builder.fcmp_ordered("<", *args), *args)
)
# The first argument where the second is greater than the third, and 0 elsewhere.
keep_above = _float_operation(
    lambda builder, args: builder.select(
        builder.fcmp_ordered(">", args[1], args[2]), args[0], same(0.0)
    ),
    3,
)
fused = _float_operation(lambda builder, args: multiply_add(builder, *args), 3)
# Of every four lanes the second and the third change places.
middle_swapped = _float_operation(
    lambda builder, args: builder.shuffle_vector(
        *(2 * list(args)),
        ir.Constant(WORDS, [lane // 4 * 4 + (0, 2, 1, 3)[lane % 4] for lane in range(NUM_LANES)]),
    ),
    1,
)
nearest = _float_operation(
    lambda builder, args: call(builder, "llvm.rint.v16f32", FLOATS, list(args)), 1
)


def _means(python_operator: Any, operation: Any) -> None:
    """Overload a Python operator for vectors of float32 lanes."""

    @overload(python_operator)
    def chosen(a, b):
        return (lambda a, b: operation(a, b)) if a == b == FLOAT_LANES else None


_means(operator.add, _float_operation(lambda builder, args: builder.fadd(*args)))
_means(operator.sub, _float_operation(lambda builder, args: builder.fsub(*args)))
_means(operator.mul, _float_operation(lambda builder, args: builder.fmul(*args)))
_means(operator.truediv, _float_operation(lambda builder, args: builder.fdiv(*args)))


def _power_of_two(builder: Any, args: Any) -> Any:
    """Return 2^n for integers n from -126 to 127, by setting the exponent bits."""
    whole = builder.fptosi(args[0], WORDS)
    return builder.bitcast(builder.shl(builder.add(whole, same(127)), same(23)), FLOATS)


power_of_two = _float_operation(_power_of_two, 1)


def _across(name: str) -> Any:
    """Make a reduction over the sixteen lanes, by halves, in an order that never changes."""

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

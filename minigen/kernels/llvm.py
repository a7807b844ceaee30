"""Vectors of sixteen numbers as Numba types, and words for LLVM's own language.

What is here only makes `lanes` and `tiles` short to write: each of their operations is a few lines
that say which LLVM instructions it stands for. Source: LLVM's Language Reference.
"""

from platform import machine
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import models, register_model

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

"""Vectors of sixteen numbers as Numba types, and words for LLVM's own language.

What is here only makes `lanes` and `tiles` short to write: each of their operations is a few lines
that say which LLVM instructions it stands for. Source: LLVM's Language Reference.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

NUM_LANES = 16
I32, F32 = ir.IntType(32), ir.FloatType()
FLOATS, WORDS = ir.VectorType(F32, NUM_LANES), ir.VectorType(I32, NUM_LANES)


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

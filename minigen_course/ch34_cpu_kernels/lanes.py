"""Lane operations for a product by rows, which the package's panels have no use for.

A register of sixteen words holds two groups of one row, so its inputs differ from lane to lane, and
its lanes have two scales. The byte instruction is the one that panels use.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.microkernels import _byte_dot  # the same instruction, for a fair race
from minigen.kernels.cpu.simd import FLOAT_LANES, FLOATS, WORD_LANES, WORDS, address


@intrinsic
def add_lane_dots(typingctx: Any, sums: Any, codes: Any, inputs: Any) -> Any:
    """Add to each lane of `sums` the dot product of its four unsigned and its four signed bytes.

    The unsigned bytes are the lane's of `codes`, the signed ones the lane's of `inputs`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _byte_dot(builder, *args)

    return WORD_LANES(WORD_LANES, WORD_LANES, WORD_LANES), codegen


@intrinsic
def in_floats(typingctx: Any, words: Any) -> Any:
    """Convert sixteen integers to float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], FLOATS)

    return FLOAT_LANES(WORD_LANES), codegen


@intrinsic
def two_scales(typingctx: Any, scales: Any, index: Any) -> Any:
    """Return `scales[index]` in lanes 0 to 7, and `scales[index + 1]` in lanes 8 to 15."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        two = ir.VectorType(ir.FloatType(), 2)
        pair = builder.load(address(context, builder, sig, args, 0, two), align=4)
        return builder.shuffle_vector(pair, pair, ir.Constant(WORDS, [0] * 8 + [1] * 8))

    return FLOAT_LANES(scales, types.intp), codegen

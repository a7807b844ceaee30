"""The Walsh-Hadamard transform of groups of 32 numbers, in the registers of a processor.

It spreads one large number over its whole group, so that the group's quantisation scale need not
grow. It is orthogonal: the dot product of two transformed vectors equals that of the original
vectors.

Source: QuaRot, Ashkboos et al. 2024.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.cpu.simd import (
    FLOATS,
    WORDS,
    add_exact_product,
    all_lanes,
    kernel,
    load,
    store,
)

_ONE_OVER_ROOT_32 = np.float32(1.0 / np.sqrt(32.0))


@intrinsic
def hadamard_lanes(typingctx: Any, lanes: Any) -> Any:
    """Return four butterfly rounds: sums and differences of lanes 1, 2, 4 and then 8 apart."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = args[0]
        for distance in (1, 2, 4, 8):
            partners = [lane ^ distance for lane in range(NUM_LANES)]
            signs = [-1.0 if lane & distance else 1.0 for lane in range(NUM_LANES)]
            others = builder.shuffle_vector(found, found, ir.Constant(WORDS, partners))
            found = add_exact_product(builder, found, ir.Constant(FLOATS, signs), others)
        return found

    return lanes(lanes), codegen


@kernel
def hadamard(x, at, width):
    """Replace each group of 32 numbers in x[at : at + width] by its Walsh-Hadamard transform."""
    factor = all_lanes(_ONE_OVER_ROOT_32)
    for column in range(at, at + width, 32):
        low, high = load(x, column), load(x, column + 16)
        store(x, column, hadamard_lanes(low + high) * factor)
        store(x, column + 16, hadamard_lanes(low - high) * factor)

"""One large number spread over all of its group, so that a scale for the group need not grow.

The Walsh-Hadamard transform is orthogonal: products of two vectors that were both transformed are
those of the vectors. Source: QuaRot, Ashkboos et al. 2024.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from minigen.kernels.lanes import all_lanes, load, store
from minigen.kernels.llvm import FLOATS, NUM_LANES, WORDS, multiply_add

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

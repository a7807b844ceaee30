"""Compiled loops: their times, taken in turns, their instructions per weight, and lane operations.

The lane operations are those of a product by rows, which the package's panels have no use for: a
register of sixteen words holds two groups of one row, so its inputs differ from lane to lane, and
its lanes have two scales. The byte instruction is the one that panels use.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from math import nan
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minigen.kernels.cpu.dots import byte_dot  # the same instruction, for a fair race
from minigen.kernels.cpu.simd import FLOAT_LANES, FLOATS, WORD_LANES, WORDS, address


def best_in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int = 7, repeats: int = 1
) -> dict[str, float]:
    """Return the least seconds of each function; all run in every round, one after the other.

    So what disturbs the machine for a while disturbs all of them. A function's first call in a
    round is not counted, because it finds the caches, and perhaps busy threads, of the one before.
    """
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            for _ in range(repeats):
                started = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - started)
    return best


class LoopCosts(NamedTuple):
    """Instructions per weight in the copy of an inner loop that needs fewest, and in the slowest.

    Both are nan if the machine code has no such loop.
    """

    fewest: float
    most: float


_LABEL = re.compile(r"^\.?(L\w+):")
_INSTRUCTION = re.compile(r"^\s+([a-z][\w.]*)\s*(.*)")
_LANES = {"zmm": 16, "ymm": 8, "xmm": 4}


def loop_costs(assembly: str) -> LoopCosts:
    """Return the instructions per weight of the inner loops that convert integers to float32.

    A product of bytes converts each weight once, so the numbers that a pass of a loop converts are
    the weights that it multiplies. A loop is a block of instructions that ends with a jump to its
    own beginning. `assembly` is as LLVM writes it, for x86 or ARM.
    """
    costs = [instructions / weights for instructions, weights in _inner_loops(assembly) if weights]
    return LoopCosts(min(costs, default=nan), max(costs, default=nan))


def lanes_of(assembly: str) -> int:
    """Return how many integers one instruction converts to float32, at most; at least 1."""
    found = filter(None, map(_INSTRUCTION.match, assembly.splitlines()))
    return max((_num_converted(each[1], each[2]) for each in found), default=1) or 1


def _inner_loops(assembly: str) -> Iterator[tuple[int, int]]:
    """Yield the number of instructions, and of numbers converted, of each inner loop."""
    label, instructions, converted = "", 0, 0
    for line in assembly.splitlines():
        if begins := _LABEL.match(line):
            label, instructions, converted = begins[1], 0, 0
        elif found := _INSTRUCTION.match(line):
            name, operands = found[1], found[2]
            instructions += 1
            converted += _num_converted(name, operands)
            target = re.findall(r"\w+", operands)[-1:]
            if label and target == [label] and name[0] in "jbct":  # jne, b.ne, cbnz, tbnz
                yield instructions, converted
                label = ""


def _num_converted(name: str, operands: str) -> int:
    """Return how many integers an instruction converts to float32."""
    if name.lstrip("v") == "cvtdq2ps":
        return _LANES[operands.rsplit("%", 1)[1][:3]]
    if name.lstrip("v").startswith("cvtsi2ss"):
        return 1
    if name.startswith("scvtf"):
        lanes = re.search(r"\.(\d)s", f"{name} {operands}")
        return int(lanes[1]) if lanes else 1
    return 0


@intrinsic
def add_lane_dots(typingctx: Any, sums: Any, codes: Any, inputs: Any) -> Any:
    """Add to each lane of `sums` the dot product of its four unsigned and its four signed bytes.

    The unsigned bytes are the lane's of `codes`, the signed ones the lane's of `inputs`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return byte_dot(builder, *args)

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

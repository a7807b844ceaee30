"""Roofs of several kinds of processor: what two cores read and compute with minigen's kernels.

The figures are those of benchmarks/results/34_roofs.json and, for the EPYC, of 34_step_cost.json.
"""

from collections.abc import Iterable
from typing import NamedTuple

BYTES = 8.5 / 8  # of a weight in int8, with its share of a scale


class Roof(NamedTuple):
    """Bytes that memory delivers per second, and operations per second in two forms."""

    processor: str
    instructions: str
    bandwidth: float
    int8: float
    bfloat16: float

    @property
    def tokens(self) -> float:
        """The number of tokens whose operations on an int8 weight take as long as reading it."""
        return self.int8 * BYTES / (2 * self.bandwidth)


ROOFS = (
    Roof("Intel Xeon, pretending", "AVX2", 31e9, 81.09e9, 88.52e9),
    Roof("AMD EPYC", "AVX-512", 27.9e9, 290e9, 332e9),
    Roof("Intel Xeon", "AMX", 29.5e9, 531.8e9, 1006e9),
)


def table(roofs: Iterable[Roof] = ROOFS) -> str:
    """Return the roofs as lines: billions of bytes and of operations per second, tokens."""
    head = f"{'':32} {'GB/s':>5} {'int8':>6} {'bfloat16':>9} {'tokens':>7}"
    lines = [
        f"{each.processor + ', ' + each.instructions:32} {each.bandwidth / 1e9:5.0f} "
        f"{each.int8 / 1e9:6,.0f} {each.bfloat16 / 1e9:9,.0f} {each.tokens:7.1f}"
        for each in roofs
    ]
    return "\n".join([head, *lines])

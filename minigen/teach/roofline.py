"""How fast memory and arithmetic are, here and elsewhere, and what a step of a model needs of both.

Source: Williams, Waterman and Patterson 2009, "Roofline".
"""

from dataclasses import dataclass

import torch

from minigen.teach.budget import ModelShape
from minigen.teach.measuring import best_seconds

REPEATS = 20  # so many that other programs leave at least one alone


@dataclass(frozen=True)
class Machine:
    """A processor's ceilings: bytes a second out of its memory, operations a second.

    `memory` is in bytes, where it is known.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float | None = None

    @property
    def ridge(self) -> float:
        """Operations for each byte at which memory and arithmetic take the same time."""
        return self.flops / self.bandwidth


MACHINES: dict[str, Machine] = {  # dense bfloat16, as the makers' data sheets say
    each.name: each
    for each in (
        Machine("H100 SXM", 3350e9, 989e12, 80e9),
        Machine("H200", 4800e9, 989e12, 141e9),
        Machine("A100 SXM 80 GB", 2039e9, 312e12, 80e9),
        Machine("RTX 4090", 1008e9, 165e12, 24e9),
        Machine("L4", 300e9, 121e12, 24e9),
    )
}


@dataclass(frozen=True)
class Step:
    """What one pass through a model reads, in bytes, and computes, in operations."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def num_bytes(self) -> float:
        """All that must come out of memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read."""
        return self.flops / self.num_bytes

    def seconds(self, machine: Machine, overhead: float = 0.0) -> float:
        """max(bytes / bandwidth, operations / peak) + overhead: the step-time model."""
        return max(self.num_bytes / machine.bandwidth, self.flops / machine.flops) + overhead

    def share_of_compute(self, machine: Machine) -> float:
        """How much of the machine's arithmetic the step uses, from 0 to 1."""
        return self.flops / machine.flops / self.seconds(machine)


def decode_step(
    shape: ModelShape, batch: int, context: int, weight_bits: float, kv_bits: float = 16
) -> Step:
    """One new token for each of `batch` sequences, each of which has `context` tokens."""
    return Step(
        weight_bytes=shape.multiplied * weight_bits / 8,
        kv_bytes=batch * shape.kv_numbers(context) * kv_bits / 8,
        flops=batch * shape.flops(context),
    )


def prefill_step(
    shape: ModelShape, num_tokens: int, weight_bits: float, kv_bits: float = 16
) -> Step:
    """A whole prompt at once, of which only the last token is given scores."""
    head = 2 * shape.vocab * shape.hidden
    attention = sum(shape.flops(seen) - shape.flops(0) for seen in range(1, num_tokens + 1))
    return Step(
        weight_bytes=shape.multiplied * weight_bits / 8,
        kv_bytes=shape.kv_numbers(num_tokens) * kv_bits / 8,
        flops=num_tokens * (shape.flops(0) - head) + head + attention,
    )


def measure_machine(
    dtype: torch.dtype = torch.float32, megabytes: int = 256, size: int = 1024
) -> Machine:
    """This machine's ceilings, as torch reaches them: the best of twenty tries each.

    Bandwidth is that of summing so many megabytes, which no cache holds; arithmetic that of a
    product of two square matrices of `size`.
    """
    numbers = torch.ones(megabytes * 2**20 // 4)
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    bandwidth = numbers.numel() * 4 / best_seconds(numbers.sum, REPEATS)
    flops = 2 * size**3 / best_seconds(lambda: left @ right, REPEATS)
    return Machine("this machine", bandwidth, flops)

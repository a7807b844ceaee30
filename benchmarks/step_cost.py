"""What a decode step should cost, from its bytes and operations, beside what it does cost.

The model: every part of a step takes as long as memory or arithmetic needs for it, whichever is
longer; parts come one after another; and every step costs a constant more. Nothing in it is fitted
but that constant, which is what the smallest step takes beyond its parts.

Source: Williams, Waterman and Patterson 2009, "Roofline".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigen_course.lab.cost_model import ModelShape

BFLOAT16 = "bfloat16"  # what keys and values are, whatever the weights are


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second that can be read, and operations a second of products of each kind."""

    bandwidth: float
    peaks: Mapping[str, float]


@dataclass(frozen=True)
class Weights:
    """Matrices that each token is multiplied with: bytes, numbers, and the kind of product."""

    name: str
    kind: str
    num_bytes: int
    numbers: int


@dataclass(frozen=True)
class Work:
    """A part of a step: bytes that it reads, operations that it does, and of which kind."""

    name: str
    kind: str
    num_bytes: float
    operations: float

    def seconds(self, ceilings: Ceilings) -> float:
        """max(bytes / bandwidth, operations / peak); raises `KeyError` for an unknown kind."""
        return max(self.num_bytes / ceilings.bandwidth, self.operations / ceilings.peaks[self.kind])


def decode_work(
    weights: Sequence[Weights], shape: ModelShape, sequences: int, context: int
) -> tuple[Work, ...]:
    """One new token for each of `sequences`, each of which then has `context` tokens.

    Weights are read once for all of them, keys and values for each. Left out, as too little to
    matter: norms, rotations, softmax, rows of the embedding, and all that is written.
    """
    products = tuple(
        Work(each.name, each.kind, each.num_bytes, 2.0 * each.numbers * sequences)
        for each in weights
    )
    kv_bytes = 2.0 * shape.kv_numbers(context) * sequences
    operations = float(shape.flops(context) - shape.flops(0)) * sequences
    return *products, Work("attention", BFLOAT16, kv_bytes, operations)


@dataclass(frozen=True)
class Point:
    """A step's seconds: measured, and predicted without the constant."""

    sequences: int
    context: int
    measured: float
    predicted: float


@dataclass(frozen=True)
class StepCost:
    """Points of one form of weights, and the seconds that every step costs beyond prediction."""

    points: tuple[Point, ...]
    overhead: float

    def ratio(self, point: Point) -> float:
        """How many times its prediction a step takes, the constant taken off before."""
        return (point.measured - self.overhead) / point.predicted

    def worst(self) -> Point:
        """The point with the greatest ratio; raises `ValueError` if there are no points."""
        return max(self.points, key=self.ratio)

    def beyond(self, limit: float, products: Mapping[int, float]) -> list[dict[str, float]]:
        """Where the time of the points over a ratio goes, in ms beyond prediction.

        `products` are the seconds beyond prediction of a step's products alone, by the number of
        sequences. What a longer context adds to a step is attention's; that of the shortest is in
        the rest, with norms, rotations and packing.
        """
        return [
            self._parted(point, products[point.sequences])
            for point in self.points
            if self.ratio(point) > limit
        ]

    def _told(self, point: Point) -> dict[str, float]:
        return {
            "sequences": point.sequences,
            "context": point.context,
            "measured_ms": 1e3 * point.measured,
            "predicted_ms": 1e3 * point.predicted,
            "ratio": self.ratio(point),
        }

    def _parted(self, point: Point, products: float) -> dict[str, float]:
        alike = [each for each in self.points if each.sequences == point.sequences]
        least = min(alike, key=lambda each: each.context)
        attention = _lost(point) - _lost(least)
        return {
            **self._told(point),
            "beyond_ms": 1e3 * (_lost(point) - self.overhead),
            "products_ms": 1e3 * products,
            "attention_ms": 1e3 * attention,
            "rest_ms": 1e3 * (_lost(point) - self.overhead - products - attention),
        }

    def as_json(self) -> dict[str, Any]:
        """All points in milliseconds, with their ratios."""
        return {
            "overhead_ms": 1e3 * self.overhead,
            "worst": self._told(self.worst()),
            "points": [self._told(point) for point in self.points],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "StepCost":
        """What `as_json` wrote."""
        points = tuple(
            Point(
                each["sequences"],
                each["context"],
                each["measured_ms"] / 1e3,
                each["predicted_ms"] / 1e3,
            )
            for each in found["points"]
        )
        return cls(points, found["overhead_ms"] / 1e3)


def _lost(point: Point) -> float:
    return point.measured - point.predicted


def predicted_seconds(work: Sequence[Work], ceilings: Ceilings) -> float:
    """What the parts of a step take one after another, without the constant."""
    return sum(each.seconds(ceilings) for each in work)

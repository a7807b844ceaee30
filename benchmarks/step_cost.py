"""What a decode step should cost, from its bytes and operations, and what it does cost.

The model: every part of a step takes as long as memory or arithmetic needs for it, whichever is
longer; parts run one after another; and every step has a constant cost more. Only that constant is
fitted: it is what the smallest step takes beyond its parts.

Source: Williams, Waterman and Patterson 2009, "Roofline".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigen_course.lab.cost_model import ModelShape

BFLOAT16 = "bfloat16"  # the format of keys and values, for all formats of weights


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second that can be read, and operations per second of each kind of product."""

    bandwidth: float
    peaks: Mapping[str, float]


@dataclass(frozen=True)
class Weights:
    """Matrices that each token is multiplied by: bytes, numbers, and the kind of product."""

    name: str
    kind: str
    num_bytes: int
    numbers: int


@dataclass(frozen=True)
class Work:
    """A part of a step: the bytes that it reads, its operations, and their kind."""

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
    """Return the work of one new token for each of `sequences`, at `context` tokens each.

    Weights are read once for all sequences, keys and values once per sequence. Norms, rotations,
    softmax, rows of the embedding and all writes are left out, because they are too small to
    matter.
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
    """The points of one weight format, and the constant seconds that every step costs."""

    points: tuple[Point, ...]
    overhead: float

    def ratio(self, point: Point) -> float:
        """Return the measured time without the constant, divided by the prediction."""
        return (point.measured - self.overhead) / point.predicted

    def worst(self) -> Point:
        """Return the point with the greatest ratio; raises `ValueError` if there are no points."""
        return max(self.points, key=self.ratio)

    def beyond(self, limit: float, products: Mapping[int, float]) -> list[dict[str, float]]:
        """Return the milliseconds beyond prediction of the points over a ratio, by their cause.

        `products` are the seconds beyond prediction of a step's products alone, by the number of
        sequences. What a longer context adds to a step is counted as attention; the attention of
        the shortest context is in the rest, with norms, rotations and packing.
        """
        return [
            self._parted(point, products[point.sequences])
            for point in self.points
            if self.ratio(point) > limit
        ]

    def _figures(self, point: Point) -> dict[str, float]:
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
            **self._figures(point),
            "beyond_ms": 1e3 * (_lost(point) - self.overhead),
            "products_ms": 1e3 * products,
            "attention_ms": 1e3 * attention,
            "rest_ms": 1e3 * (_lost(point) - self.overhead - products - attention),
        }

    def as_json(self) -> dict[str, Any]:
        """Return all points in milliseconds, with their ratios."""
        return {
            "overhead_ms": 1e3 * self.overhead,
            "worst": self._figures(self.worst()),
            "points": [self._figures(point) for point in self.points],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "StepCost":
        """Read what `as_json` wrote."""
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
    """Return the sum of the times of a step's parts, without the constant."""
    return sum(each.seconds(ceilings) for each in work)

"""Cases of chapter 35's exercises, drawn by a seed.

A case is drawn again if a number lies about halfway between two codes, or if two exponents are
about equally good: what is right would then depend on a processor, or on the order of a division.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch35_quantization.reference import round_by_groups, round_columns
from minigen_course.grading.varied import Varied

QUARTER = 4  # weights are multiples of 1 / 4
NEAR = 1e-3  # of a step: a number is halfway between two codes


def _numbers(random: Random, count: int, most: int = 20) -> list[float]:
    return [random.randint(-most, most) / QUARTER for _ in range(count)]


def _is_halfway(steps: float) -> bool:
    return abs(steps % 1 - 0.5) < NEAR


def _scale_and_zero(random: Random) -> dict[str, Any]:
    while True:
        bits = random.choice((2, 3, 4, 8))
        weights = _numbers(random, random.randint(3, 8))
        if random.random() < 0.4:
            weights = [abs(each) + 1 for each in weights]
        low, high = min(*weights, 0), max(*weights, 0)
        if low < high and not _is_halfway(-low * (2**bits - 1) / (high - low)):
            return {"weights": weights, "bits": bits}


def _grid(part: Any, weights: list[float], bits: int) -> list[float]:
    """Give it the weights and the bits; compare the scale and the zero point."""
    scale, zero = part(torch.tensor(weights), bits)
    return [round(float(scale), 4), float(zero)]


def _pack_nibbles(random: Random) -> dict[str, Any]:
    return {"codes": [random.randrange(16) for _ in range(random.randint(3, 9))]}


def _packed(part: Any, codes: list[int]) -> list[int]:
    """Give it the codes; compare the bytes."""
    return part(torch.tensor(codes, dtype=torch.uint8)).tolist()


def _round_by_groups(random: Random) -> dict[str, Any]:
    columns, bits, size = random.randint(5, 9), random.choice((3, 4)), random.randint(2, 4)
    starts = range(0, columns, size)
    weight = [
        [each for start in starts for each in _group(random, min(size, columns - start), bits)]
        for _ in range(2)
    ]
    return {"weight": weight, "bits": bits, "size": size}


def _group(random: Random, count: int, bits: int) -> list[float]:
    while True:
        weights = _numbers(random, count)
        largest = max(map(abs, weights)) or 1.0
        if not any(_is_halfway(each * (2 ** (bits - 1) - 1) / largest) for each in weights):
            return weights


def _grouped(part: Any, weight: list[list[float]], bits: int, size: int) -> list[list[float]]:
    """Give it the matrix, the bits and the group; compare the rounded weights."""
    found = part(torch.tensor(weight), bits, size)
    return [[round(float(each), 3) + 0.0 for each in row] for row in found]


def _search_factors(random: Random) -> dict[str, Any]:
    while True:
        bits, spread = random.choice((2, 3)), [random.choice((1, 1, 1, 8, 30)) for _ in range(8)]
        rows = [_numbers(random, 8) for _ in range(6)]
        case: dict[str, Any] = {
            "weight": [_group(random, 8, bits) for _ in range(3)],
            "x": [[a * b for a, b in zip(row, spread, strict=True)] for row in rows],
            "bits": bits,
        }
        least, next_best = sorted(_errors(**case))[:2]
        if next_best > 1.01 * least:
            return case


def _errors(weight: list[list[float]], x: list[list[float]], bits: int) -> list[float]:
    """Return the error of the outputs by exponent."""
    w, inputs = torch.tensor(weight).double(), torch.tensor(x).double()
    found = []
    for step in range(20):
        factors = inputs.abs().mean(0).clamp(min=NEAR) ** (step / 20)
        change = _by_rows(w * factors, bits) / factors - w
        found.append(float((inputs @ change.T).square().sum()))
    return found


def _by_rows(weight: Tensor, bits: int) -> Tensor:
    """Return the matrix on a symmetric grid per row."""
    return round_by_groups(weight, bits, weight.shape[1])


def _searched(part: Any, weight: Any, x: Any, bits: int) -> float:
    """Let it search with a symmetric grid of these bits per row; compare the exponent."""
    found = part(torch.tensor(weight), torch.tensor(x), lambda each: _by_rows(each, bits))
    return round(float(found), 2)


def _round_columns(random: Random) -> dict[str, Any]:
    while True:
        size = random.randint(3, 5)
        factor = [[0.0] * i + _numbers(random, size - i, 6) for i in range(size)]
        for i, row in enumerate(factor):
            row[i] = float(random.choice((1, 2)))
        weight = [[each + 0.11 for each in _numbers(random, size, 12)] for _ in range(2)]
        before: list[float] = []
        round_columns(torch.tensor(weight), torch.tensor(factor), _whole(before))
        if not any(map(_is_halfway, before)):
            return {"weight": weight, "factor": factor}


def _whole(before: list[float]) -> Callable[[Tensor, int], Tensor]:
    """Return a rounding to whole numbers that notes what it is given."""

    def rounded(column: Tensor, _: int) -> Tensor:
        before.extend(column.tolist())
        return column.round()

    return rounded


def _columns(part: Any, weight: Any, factor: Any) -> list[list[float]]:
    """Let it round the columns to whole numbers; compare the matrix."""
    found = part(torch.tensor(weight), torch.tensor(factor), _whole([]))
    return [[round(float(each), 3) + 0.0 for each in row] for row in found]


def _choose_bits(random: Random) -> dict[str, Any]:
    options: dict[str, list[tuple[int, int, float]]] = {}
    for name in ("q", "o", "up", "down"):
        unit, loss = random.choice((7, 11, 13, 17)), random.randint(30, 99)
        options[name] = [
            (bits, unit * bits, loss / (bits - 1) ** 2 + random.random() / 100)
            for bits in (2, 3, 4)
        ]
    least = sum(own[0][1] for own in options.values())
    most = sum(own[-1][1] for own in options.values())
    max_bytes = random.randint(least + (most - least) // 4, most - (most - least) // 8)
    return {"options": options, "max_bytes": max_bytes}


def _residual_window(random: Random) -> dict[str, Any]:
    residual = random.choice((8, 16, 32, 64))
    return {"num_tokens": random.randint(0, 5 * residual), "residual": residual}


VARIED = {
    "scale_and_zero": Varied("the weights and the bits", _scale_and_zero, _grid),
    "pack_nibbles": Varied("the codes", _pack_nibbles, _packed),
    "round_by_groups": Varied("the matrix, the bits and the group", _round_by_groups, _grouped),
    "search_factors": Varied("the matrix, the inputs and the bits", _search_factors, _searched),
    "round_columns": Varied("the matrix and the factor", _round_columns, _columns),
    "choose_bits": Varied("the matrices and the bytes", _choose_bits),
    "residual_window": Varied("the tokens and the residual", _residual_window),
}

"""Cases of chapter 35's exercises, drawn by a seed."""

from random import Random
from typing import Any

import torch

from minigen_course.grading.varied import Varied

QUARTER = 4  # weights are multiples of 1 / 4, so that no rounding depends on a processor


def _numbers(random: Random, count: int, most: int = 20) -> list[float]:
    return [random.randint(-most, most) / QUARTER for _ in range(count)]


def _scale_and_zero(random: Random) -> dict[str, Any]:
    bits = random.choice((2, 3, 4, 8))
    weights = _numbers(random, random.randint(3, 8))
    if random.random() < 0.4:
        weights = [abs(each) + 1 for each in weights]
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
    columns = random.randint(5, 9)
    return {
        "weight": [_numbers(random, columns) for _ in range(2)],
        "bits": random.choice((3, 4)),
        "size": random.randint(2, 4),
    }


def _grouped(part: Any, weight: list[list[float]], bits: int, size: int) -> list[list[float]]:
    """Give it the matrix, the bits and the group; compare the rounded weights."""
    found = part(torch.tensor(weight), bits, size)
    return [[round(float(each), 3) + 0.0 for each in row] for row in found]


def _search_factors(random: Random) -> dict[str, Any]:
    spread = [random.choice((1, 1, 1, 8, 30)) for _ in range(8)]
    return {
        "weight": [_numbers(random, 8) for _ in range(3)],
        "x": [[a * b for a, b in zip(_numbers(random, 8), spread, strict=True)] for _ in range(6)],
        "step": random.choice((1.0, 2.0)),
    }


def _searched(part: Any, weight: Any, x: Any, step: float) -> float:
    """Let it search with a rounding to multiples of `step`; compare the exponent."""
    rounded = lambda each: (each / step).round() * step  # noqa: E731
    return round(float(part(torch.tensor(weight), torch.tensor(x), rounded)), 2)


def _round_columns(random: Random) -> dict[str, Any]:
    size = random.randint(3, 5)
    factor = [[0.0] * i + _numbers(random, size - i, 6) for i in range(size)]
    for i, row in enumerate(factor):
        row[i] = float(random.choice((1, 2)))
    weight = [[each + 0.11 for each in _numbers(random, size, 12)] for _ in range(2)]
    return {"weight": weight, "factor": factor}


def _columns(part: Any, weight: Any, factor: Any) -> list[list[float]]:
    """Let it round the columns to whole numbers; compare the matrix."""
    nearest = lambda column, _: column.round()  # noqa: E731
    found = part(torch.tensor(weight), torch.tensor(factor), nearest)
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
    return {"options": options, "max_bytes": random.randint(least, most)}


def _residual_window(random: Random) -> dict[str, Any]:
    residual = random.choice((8, 16, 32, 64))
    return {"num_tokens": random.randint(0, 5 * residual), "residual": residual}


VARIED = {
    "scale_and_zero": Varied("the weights and the bits", _scale_and_zero, _grid),
    "pack_nibbles": Varied("the codes", _pack_nibbles, _packed),
    "round_by_groups": Varied("the matrix, the bits and the group", _round_by_groups, _grouped),
    "search_factors": Varied("the matrix, the inputs and the grid", _search_factors, _searched),
    "round_columns": Varied("the matrix and the factor", _round_columns, _columns),
    "choose_bits": Varied("the matrices and the bytes", _choose_bits),
    "residual_window": Varied("the tokens and the residual", _residual_window),
}

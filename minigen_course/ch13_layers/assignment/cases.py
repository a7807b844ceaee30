"""Cases of chapter 13's exercises, drawn by a seed."""

import math
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen.model.layers import apply_rotary, rotary_frequencies, rotary_tables
from minigen_course.grading.varied import Varied


@lru_cache(maxsize=1024)
def _rotation(head_dim: int, position: int, base: float) -> Tensor:
    """Return the matrix that rotates a vector to a position."""
    tables = rotary_tables(rotary_frequencies(head_dim, base), torch.tensor([position]))
    return apply_rotary(torch.eye(head_dim)[None], *tables)[0].T


def _turned(vector: Tensor, position: int, base: float) -> Tensor:
    return _rotation(len(vector), position, base) @ vector


def _wave(vector: Tensor, position: int, base: float) -> Tensor:
    """Return a sinusoidal position vector: a vector of ones and zeros, rotated."""
    start = torch.arange(len(vector)) < len(vector) // 2
    return _turned(start.float(), position, base)


ENCODINGS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "turns": _turned,
    "turns back": lambda vector, position, base: _turned(vector, -position, base),
    "shifts in a circle": lambda vector, position, base: vector.roll(position),
    "turns by the square": lambda vector, position, base: _turned(vector, position**2, base),
    "turns up to 40": lambda vector, position, base: _turned(vector, min(position, 40), base),
    "turns at even positions": lambda vector, position, base: _turned(
        vector, position - position % 2, base
    ),
    "turns and grows": lambda vector, position, base: (
        _turned(vector, position, base) * (1 + position / 20)
    ),
    "turns and adds a wave": lambda vector, position, base: (
        _turned(vector, position, base) + 0.3 * _wave(vector, position % 16, base)
    ),
    "adds a wave": lambda vector, position, base: vector + 0.3 * _wave(vector, position, base),
}

SOUND = ("turns", "turns back", "shifts in a circle")


def _encodings(random: Random) -> dict[str, Any]:
    others = [each for each in ENCODINGS if each not in SOUND]
    names = [random.choice(SOUND), *random.sample(others, 2)]
    random.shuffle(names)
    return {
        "head_dim": random.choice((8, 16, 32)),
        "base": random.choice((100.0, 1000.0, 10_000.0)),
        "encodings": names,
    }


def _verdicts(part: Any, head_dim: int, base: float, encodings: list[str]) -> Any:
    """Test these encodings; rotations and waves have the speeds of the chapter, with this base.

    "turns by the square" rotates by the square of the position, "turns up to 40" as at position 40
    from there on, and "turns at even positions" turns an odd position like the one before it. A
    wave is a sinusoidal vector times 0.3; after "turns and", it comes again after 16 positions.
    """
    found = []
    for name in encodings:
        encode = ENCODINGS[name]
        tested = part(lambda vector, position, e=encode: e(vector, position, base), head_dim)
        found.append(bool(tested))
    return found


def _whole(random: Random, *shape: int) -> Tensor:
    """Return a tensor of small whole numbers, none of them 0."""
    numbers = [random.choice((-1, 1)) * random.randint(1, 9) for _ in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.float32).reshape(shape)


def _degrees(random: Random, tokens: int, pairs: int) -> list[list[int]]:
    return [random.sample(range(10, 360, 10), pairs) for _ in range(tokens)]


def _heads(random: Random) -> dict[str, Any]:
    tokens, heads, pairs = random.choice(((2, 1, 2), (2, 1, 3), (3, 2, 2), (2, 3, 2), (2, 2, 3)))
    return {
        "x": _whole(random, tokens, heads, 2 * pairs),
        "degrees": _degrees(random, tokens, pairs),
    }


def _rotated(part: Any, x: Tensor, degrees: list[list[int]]) -> Any:
    """Rotate by the cosines and sines of these angles: a row for a token, a column for a pair."""
    angles = torch.tensor(degrees).deg2rad()
    return part(x, angles.cos(), angles.sin())


def _longer_heads(random: Random) -> dict[str, Any]:
    tokens, heads, pairs, others = random.choice(
        ((2, 1, 2, 2), (2, 2, 2, 2), (2, 1, 2, 6), (3, 1, 2, 4), (2, 2, 3, 4))
    )
    return {
        "x": _whole(random, tokens, heads, 2 * pairs + others),
        "degrees": _degrees(random, tokens, pairs),
    }


def _rows(random: Random) -> dict[str, Any]:
    heads = random.randint(2, 4)
    return {"num_rows": heads * random.choice((4, 6, 8, 10)), "heads": heads}


def _norm(random: Random) -> dict[str, Any]:
    rows, hidden = random.choice(((2, 4), (3, 4), (2, 5), (3, 6)))
    return {
        "x": _whole(random, rows, hidden),
        "weight": _whole(random, hidden) / 2,
        "eps": random.choice((0.5, 1.0, 2.0, 4.0)),
    }


def _normed(part: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
    """Call it with these numbers, and with numbers that are 1,000 times as large, in float16.

    The weight is in float16 as well for the second call.
    """
    return {"float32": part(x, weight, eps), "float16": part((1000 * x).half(), weight.half(), eps)}


def _gates(random: Random) -> dict[str, Any]:
    tokens, units = random.choice(((1, 5), (2, 3), (2, 4)))
    gate = _whole(random, tokens, units) / 2
    gate[random.randrange(tokens), random.randrange(units)] = random.choice((-200, 100, 150))
    return {"gate": gate, "up": _whole(random, tokens, units)}


VARIED = {
    "depends_on_distance_only": Varied(
        "head dimension, base, and three encodings, one of them sound",
        _encodings,
        _verdicts,
        num_cases=4,
    ),
    "apply_rotary": Varied("tokens, heads, pairs, numbers, angles", _heads, _rotated),
    "rotate_first": Varied(
        "tokens, heads, pairs, numbers that stay, angles", _longer_heads, _rotated
    ),
    "unpermuted_rows": Varied("number of rows, heads", _rows),
    "rms_norm": Varied("numbers, weights, eps", _norm, _normed, tolerance=5e-3),
    "swiglu": Varied("gates, one of them large; contents", _gates),
}

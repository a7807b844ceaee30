"""Cases of chapter 31's exercises, drawn by a seed."""

from collections import Counter
from collections.abc import Iterable
from math import inf
from random import Random
from typing import Any

import torch

from minigen_course.ch31_triton.exercises import UNTOUCHED
from minigen_course.ch31_triton.lesson import num_sectors
from minigen_course.grading.varied import Varied, outcome
from minigen_course.lab.triton_interpreter import Access, launch, watched

Rows = list[list[Any]]

SIXTEEN_BITS = 2e-3  # tolerance of results that are rounded to float16


def _whole(random: Random, num: int, low: int = -9, high: int = 9) -> list[int]:
    return [random.randint(low, high) for _ in range(num)]


def _block_for(random: Random, columns: int) -> int:
    """Return a power of two that is at least `columns`."""
    return int((1 << (columns - 1).bit_length()) * random.choice((1, 2)))


def _num(accesses: Iterable[Access], tensors: str, is_store: bool = False) -> int:
    """Return how many elements of these tensors are loaded, or stored."""
    return sum(
        len(each.offsets)
        for each in accesses
        if each.tensor in tensors.split() and each.is_store == is_store
    )


def _add_scaled(random: Random) -> dict[str, Any]:
    block = random.choice((2, 4, 8))
    num = random.randint(1, 2) * block + random.randint(1, block - 1)
    behind = random.randint(1, 3)
    return {
        "x": _whole(random, num + behind),
        "y": _whole(random, num + behind),
        "num": num,
        "factor": random.choice((0.5, 2.0, 3.0, -1.0)),
        "block": block,
    }


def _added(part: Any, x: list[int], y: list[int], num: int, factor: float, block: int) -> Any:
    """Add x and factor y in float32; the sum has the length of x and holds 99 before the launch.

    All elements of the sum are returned, and how many elements of x and y are loaded and how many
    of the sum are stored.
    """
    xs, ys = torch.tensor(x).float(), torch.tensor(y).float()
    total = torch.full_like(xs, UNTOUCHED)
    given = (xs, ys, total, num, factor)
    accesses = watched(
        lambda: launch(part, (-(-num // block),), *given, BLOCK=block), x=xs, y=ys, sum=total
    )
    counts = {"loaded": _num(accesses, "x y"), "stored": _num(accesses, "sum", True)}
    return {"sum": total.tolist(), **counts}


def _row_maximum(random: Random) -> dict[str, Any]:
    columns = random.choice((3, 5, 6, 7))
    base = random.choice((-5000, -3000, -2000))
    rows = [[base + each for each in _whole(random, columns)] for _ in range(2)]
    rows.insert(random.randrange(3), _whole(random, columns, 1, 9))
    return {"x": rows, "block": _block_for(random, columns)}


def _largest(part: Any, x: Rows, block: int) -> Any:
    """Find the largest number of each row of x, in float32, with one program for each row.

    The maxima are returned, and how many elements of x are loaded.
    """
    numbers, maxima = torch.tensor(x).float(), torch.full((len(x),), UNTOUCHED)
    accesses = watched(
        lambda: launch(part, (len(x),), numbers, maxima, len(x[0]), BLOCK=block),
        x=numbers,
        maxima=maxima,
    )
    return {"maxima": maxima.tolist(), "loaded": _num(accesses, "x")}


def _column_sums(random: Random) -> dict[str, Any]:
    columns = random.choice((5, 6, 9))
    large = random.randrange(columns)
    return {
        "x": [
            [
                20_000 * random.randint(1, 3) if column == large else random.randint(-9, 9)
                for column in range(columns)
            ]
            for _ in range(random.choice((4, 5)))
        ],
        "block": random.choice((2, 4)),
    }


def _summed(part: Any, x: Rows, block: int) -> Any:
    """Add up each column of x, which is in float16; the sums are in float32.

    The sums are returned, how many elements of x are loaded, and whether the loads ask for more
    sectors than loads of neighbours in a row do.
    """
    numbers, num_rows, num_columns = torch.tensor(x).half(), len(x), len(x[0])
    sums, grid = torch.full((num_columns,), UNTOUCHED), (-(-num_columns // block),)
    given = (numbers, sums, num_rows, num_columns)
    accesses = watched(lambda: launch(part, grid, *given, BLOCK=block), x=numbers, sums=sums)
    fewest = [
        Access((0, 0, 0), False, "x", tuple(range(row + first, row + last)), numbers.itemsize)
        for row in range(0, num_rows * num_columns, num_columns)
        for first in range(0, num_columns, block)
        for last in [min(first + block, num_columns)]
    ]
    asked = num_sectors([each for each in accesses if each.tensor == "x"])
    more = asked > num_sectors(fewest)
    return {"sums": sums.tolist(), "loaded": _num(accesses, "x"), "more sectors": more}


def _silu_multiply(random: Random) -> dict[str, Any]:
    block = random.choice((2, 4))
    columns = block + random.randint(1, block - 1)
    rows = random.choice((2, 3))
    gate, up = ([_whole(random, columns, -4, 4) for _ in range(rows)] for _ in range(2))
    gate[random.randrange(rows)][random.randrange(columns)] = random.choice((100, 150, 200))
    return {"gate": gate, "up": up, "block": block}


def _mixed(part: Any, gate: Rows, up: Rows, block: int) -> Any:
    """Mix gate and up, which are the two halves of the rows of one tensor in float16.

    The result, in float16, is returned, and how many elements of both halves are loaded.
    """
    both, columns = torch.tensor([[*g, *u] for g, u in zip(gate, up, strict=True)]), len(gate[0])
    both = both.half()
    mixed = torch.full((len(gate), columns), UNTOUCHED).half()
    grid, (gates, ups) = (len(gate), -(-columns // block)), both.chunk(2, dim=-1)
    accesses = watched(
        lambda: launch(part, grid, gates, ups, mixed, columns, 2 * columns, BLOCK=block),
        both=both,
        mixed=mixed,
    )
    return {"mixed": mixed.tolist(), "loaded": _num(accesses, "both")}


def _rms_norm_rows(random: Random) -> dict[str, Any]:
    columns = random.choice((3, 5, 6))
    rows: Rows = [
        [1000 * each for each in _whole(random, columns, 1, 9)],
        [random.choice((-1, 1)) * each / 10 for each in _whole(random, columns, 1, 9)],
    ]
    rows[0][0] += 1000
    random.shuffle(rows)
    return {
        "x": rows,
        "weight": [random.choice((-2, -1, 0.5, 1, 2, 3)) for _ in range(columns - 1)] + [4],
        "eps": random.choice((0.2, 0.3, 0.5)),
        "block": _block_for(random, columns),
    }


def _normalised(part: Any, x: Rows, weight: list[float], eps: float, block: int) -> Any:
    """Normalise the rows of x; x, the weight, and the result are in float16.

    The result is returned, and how many elements of x and of the weight all programs load.
    """
    numbers, weights = torch.tensor(x).half(), torch.tensor(weight).half()
    made = torch.full_like(numbers, UNTOUCHED)
    given = (numbers, weights, made, len(weight), eps)
    accesses = watched(
        lambda: launch(part, (len(x),), *given, BLOCK=block), x=numbers, weight=weights, made=made
    )
    return {"normalised": made.tolist(), "loaded": _num(accesses, "x weight")}


def _softmax_rows(random: Random) -> dict[str, Any]:
    columns = random.choice((3, 5, 6))
    rows: Rows = [
        [base + each for each in _whole(random, columns, -3, 3)]
        for base in (0, random.choice((-1000, 1000)))
    ]
    rows[random.randrange(2)][random.randrange(columns)] = -inf
    return {"x": rows, "block": _block_for(random, columns)}


def _weighed(part: Any, x: Rows, block: int) -> Any:
    """Compute the softmax of the rows of x, which is in float16; the weights are in float32.

    The weights are returned, and how many elements of x are loaded.
    """
    scores, weights = torch.tensor(x).half(), torch.full((len(x), len(x[0])), UNTOUCHED)
    accesses = watched(
        lambda: launch(part, (len(x),), scores, weights, len(x[0]), BLOCK=block),
        x=scores,
        weights=weights,
    )
    return {"weights": weights.tolist(), "loaded": _num(accesses, "x")}


def _rotate_pairs(random: Random) -> dict[str, Any]:
    half = random.choice((2, 3))
    num_tokens, num_heads = random.choice(((1, 2), (2, 1), (2, 3)))
    heads = range(num_heads)
    return {
        "x": [[_whole(random, 2 * half, 1, 9) for _ in heads] for _ in range(num_tokens)],
        "positions": random.sample(range(2, 7), num_tokens),
        "angles": [round(random.uniform(0.1, 1.5), 1) for _ in range(half)],
        "block": 2 ** (half - 1) * random.choice((1, 2)),
    }


def _rotated(
    part: Any, x: list[Rows], positions: list[int], angles: list[float], block: int
) -> Any:
    """Rotate the heads of some tokens; pair i of position p has the angle p x angles[i].

    The heads are in float16, the tables and the result in float32. The result is returned, and how
    many elements of x are loaded.
    """
    heads = torch.tensor(x).half()
    table = torch.arange(max(positions) + 1).unsqueeze(1) * torch.tensor(angles)
    cos, sin, at = table.cos(), table.sin(), torch.tensor(positions)
    rotated = torch.full(heads.shape, UNTOUCHED)
    grid, sizes = (len(x), len(x[0])), (len(x[0]), len(angles))
    accesses = watched(
        lambda: launch(part, grid, heads, cos, sin, at, rotated, *sizes, BLOCK=block),
        x=heads,
        cos=cos,
        sin=sin,
        positions=at,
        rotated=rotated,
    )
    return {"rotated": rotated.tolist(), "loaded": _num(accesses, "x")}


def _add_rms_norm(random: Random) -> dict[str, Any]:
    drawn = _rms_norm_rows(random)
    sizes = [max(abs(each) for each in row) for row in drawn["x"]]
    residual = [
        [random.randint(1, 4) * (1000 if size > 9 else 0.25) for _ in row]
        for size, row in zip(sizes, drawn["x"], strict=True)
    ]
    return {"x": drawn.pop("x"), "residual": residual, **drawn}


def _added_and_normalised(
    part: Any, x: Rows, residual: Rows, weight: list[float], eps: float, block: int
) -> Any:
    """Add x to the residual and normalise the sum; all tensors are in float16.

    The residual after the launch and the result are returned, and how many elements of x, of the
    residual, and of the weight all programs load.
    """
    numbers, total, weights = (torch.tensor(each).half() for each in (x, residual, weight))
    made = torch.full_like(numbers, UNTOUCHED)
    given = (numbers, total, weights, made, len(weight), eps)
    accesses = watched(
        lambda: launch(part, (len(x),), *given, BLOCK=block),
        x=numbers,
        residual=total,
        weight=weights,
        made=made,
    )
    return {
        "residual": total.tolist(),
        "normalised": made.tolist(),
        "loaded": _num(accesses, "x residual weight"),
    }


def _pick_fastest(random: Random) -> dict[str, Any]:
    sizes, repeats = random.sample((16, 32, 64, 128, 256), 3), random.choice((3, 5))
    middles = random.sample((2.0, 3.0, 4.0, 5.0), len(sizes))
    if random.random() < 0.25:
        times = {size: [inf] for size in sizes}
    else:
        times = {
            size: [9.0, *_around(random, middle, repeats)]
            for size, middle in zip(sizes, middles, strict=True)
        }
        times[random.choice(sizes)] = [inf]
    return {
        "key": (random.choice((8, 16)), random.choice((576, 4096))),
        "times": times,
        "found": {(1, 576): random.choice((8, 512))},
        "repeats": repeats,
    }


def _around(random: Random, middle: float, num: int) -> list[float]:
    """Return `num` times with this median: some far below it, some far above, one of them last."""
    many = num // 2
    times = [middle, *[0.5] * many, *[random.choice((20.0, 90.0))] * many]
    random.shuffle(times)
    return times


def _picked(
    part: Any,
    key: tuple[int, int],
    times: dict[int, list[float]],
    found: dict[tuple[int, int], int],
    repeats: int,
) -> Any:
    """Pick the fastest size twice for the same key; `times` has the seconds of each size by run.

    Both choices are returned, `found` after them, and how often each size ran (if one fits).
    """
    runs = Counter[int]()

    def seconds(size: int) -> float:
        runs[size] += 1
        return times[size][min(runs[size], len(times[size])) - 1]

    choices = []
    for _ in range(2):
        choices.append(outcome(lambda: part(key, list(times), seconds, found, repeats)))
    counted = {size: runs[size] for size in times if choices[0] != "raises ValueError"}
    return {"choices": choices, "found": found, "runs": counted}


VARIED = {
    "add_scaled": Varied(
        "block size, number of elements, vectors, factor", _add_scaled, _added, num_cases=3
    ),
    "row_maximum": Varied("numbers, columns, block size", _row_maximum, _largest, num_cases=3),
    "column_sums": Varied(
        "rows, columns, block size, the column of large numbers", _column_sums, _summed, num_cases=3
    ),
    "silu_multiply": Varied(
        "rows, columns, block size, gates and ups",
        _silu_multiply,
        _mixed,
        SIXTEEN_BITS,
        num_cases=3,
    ),
    "rms_norm_rows": Varied(
        "rows, weight, eps, block size", _rms_norm_rows, _normalised, SIXTEEN_BITS, num_cases=3
    ),
    "softmax_rows": Varied("scores, columns, block size", _softmax_rows, _weighed, num_cases=3),
    "rotate_pairs": Varied(
        "tokens, heads, positions, angles, block size", _rotate_pairs, _rotated, num_cases=3
    ),
    "add_rms_norm": Varied(
        "rows, residual, weight, eps, block size",
        _add_rms_norm,
        _added_and_normalised,
        2 * SIXTEEN_BITS,
        num_cases=3,
    ),
    "pick_fastest": Varied("sizes, their times by run, repeats, key", _pick_fastest, _picked),
}

"""Cases of chapter 34's exercises, drawn by a seed."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows
from minigen_course.grading.varied import Varied

SIZE, LANES, COLUMNS, REPEATED = 4, 16, 32, 8

EXACT = (0.25, 0.5, 1.0, 2.0)  # scales whose products float32 holds without rounding


def _quantise(random: Random) -> dict[str, Any]:
    """Return groups whose scale is a power of two, with no number halfway between two steps."""
    groups = []
    for _ in range(4):
        steps = [random.randint(-100, 100) + random.choice((-0.4, -0.2, 0.2, 0.4)) for _ in "123"]
        steps.insert(random.randrange(SIZE), random.choice((-127, 127)))
        scale = random.choice((0.0, 0.125, *EXACT))
        groups.append([scale * each + 0.0 for each in steps])  # no -0
    return {"rows": np.array(groups, np.float32).reshape(2, -1), "size": SIZE}


def _quantised(part: Any, rows: np.ndarray, size: int) -> list[Any]:
    """Quantise; the result has the bytes, the scales, and the dtypes of both."""
    with np.errstate(all="raise", under="ignore"):
        codes, scales = part(rows, size)
    return [codes, scales, str(codes.dtype), str(scales.dtype)]


def _bytes(random: Random, *shape: int) -> np.ndarray:
    """Return bytes; each group has small ones of both signs, or large ones of one sign."""
    low, high = random.choice(((-9, 9), (-127, 127), (110, 127), (-127, -110)))
    if len(shape) > 1:
        return np.stack([_bytes(random, *shape[1:]) for _ in range(shape[0])])
    return np.array([random.randint(low, high) for _ in range(shape[0])], np.int8)


def _scales(random: Random, *shape: int) -> np.ndarray:
    drawn = [random.choice(EXACT) for _ in range(int(np.prod(shape)))]
    return np.array(drawn, np.float32).reshape(shape)


def _multiply_bytes(random: Random) -> dict[str, Any]:
    rows, groups = random.choice(((2, 2), (1, 3), (2, 3), (3, 2)))
    return {
        "codes": _bytes(random, rows, groups, SIZE),
        "scales": _scales(random, rows, groups),
        "inputs": _bytes(random, groups, SIZE),
        "input_scales": _scales(random, groups),
    }


def _products(part: Any, given: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[Any]:
    """Return the part's products, their dtype, and whether the arrays are as they were."""
    before = [each.copy() for each in arrays]
    found = part(*given)
    same = all(np.array_equal(one, other) for one, other in zip(arrays, before, strict=True))
    return [found, str(found.dtype), same]


def _of_bytes(part: Any, **given: np.ndarray) -> list[Any]:
    """Multiply; the result has the products, their dtype, and whether the arrays are unchanged."""
    arrays = list(given.values())
    return _products(part, arrays, arrays)


def _panels(random: Random) -> dict[str, Any]:
    rows, groups, words = LANES * random.randint(1, 3), random.randint(2, 5), random.randint(2, 6)
    return {
        "rows": rows,
        "groups": groups,
        "words": words,
        "dtype": random.choice(("int16", "int32")),
        "places": sorted(random.sample(range(rows * groups * words), 6)),
    }


def _in_panels(
    part: Any, rows: int, groups: int, words: int, dtype: str, places: list[int]
) -> list[Any]:
    """Pack an array of [rows, groups, words], and look at some places of the flat result.

    A word says where it was: it is 100 x row + 10 x group + word. The result has the words at these
    places, then the length and the dtype of the flat array.
    """
    row, group, word = np.indices((rows, groups, words))
    found = part((100 * row + 10 * group + word).astype(dtype))
    return [[int(found[place]) for place in places], len(found), str(found.dtype)]


def _codes(random: Random) -> dict[str, Any]:
    tokens, rows, groups = random.choice(((1, 2, 2), (2, 1, 2), (1, 1, 3), (2, 2, 1), (1, 3, 1)))

    def lists(low: int, high: int, *shape: int) -> Any:
        if shape:
            return [lists(low, high, *shape[1:]) for _ in range(shape[0])]
        return random.randint(low, high)

    return {
        "codes": lists(*random.choice(((0, 15), (12, 15))), rows, groups, SIZE),
        "scales": _scales(random, rows, groups).tolist(),
        "minima": lists(-8, -1, rows, groups),
        "numbers": lists(*random.choice(((-128, 126), (100, 126))), tokens, groups, SIZE),
        "input_scales": _scales(random, tokens, groups).tolist(),
        "zeros": lists(-126, 128, tokens, groups),
    }


def _of_codes(
    part: Any,
    codes: list[Any],
    scales: list[Any],
    minima: list[Any],
    numbers: list[Any],
    input_scales: list[Any],
    zeros: list[Any],
) -> list[Any]:
    """Multiply; a group of 32 columns has its four codes, or its four numbers, eight times.

    The result has the products, their dtype, and whether the arrays are unchanged.
    """
    weights = CodeRows(
        np.tile(np.array(codes, np.uint8), REPEATED),
        np.array(scales, np.float32),
        np.array(minima, np.float32),
    )
    inputs = ByteRows(
        np.tile(np.array(numbers, np.int8), REPEATED),
        np.array(input_scales, np.float32),
        np.array(zeros, np.int32),
    )
    return _products(part, (weights, inputs), (*weights, *inputs))


VARIED = {
    "quantise_groups": Varied("numbers, scales, groups of zeros", _quantise, _quantised),
    "multiply_bytes": Varied("rows, groups, bytes, scales", _multiply_bytes, _of_bytes),
    "by_panels": Varied("rows, groups, words, dtype, places", _panels, _in_panels),
    "multiply_codes": Varied("tokens, rows, groups, codes, bytes", _codes, _of_codes),
}

"""Checks of chapter 34's product of bytes with codes of 4 bits."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minigen.kernels.reference import ByteRows, CodeRows
from minigen.teach.messages import Wrong, expect, expect_equal

MultiplyCodes = Callable[[CodeRows, ByteRows], np.ndarray]


class Whole(np.ndarray):
    """Whole numbers that raise `Wrong` where floats meet them before their columns are summed.

    Columns are told by their number: no other axis of the checks has a multiple of 32.
    """

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """As NumPy's, but that columns stay whole."""
        if np.issubdtype(dtype, np.inexact):
            _expect_no_columns([self])
        return super().astype(dtype, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(map(_is_float, inputs)):
            _expect_no_columns(inputs)
        plain = [_plain(each) for each in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        found = getattr(ufunc, method)(*plain, **kwargs)
        return found.view(Whole) if isinstance(found, np.ndarray) else found

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(_is_float, args)):
            _expect_no_columns(args)
        return super().__array_function__(function, types, args, kwargs)


def _plain(each: Any) -> Any:
    return each.view(np.ndarray) if isinstance(each, Whole) else each


def _is_float(each: Any) -> bool:
    return isinstance(each, float) or np.issubdtype(getattr(each, "dtype", np.int32), np.inexact)


def _expect_no_columns(arrays: Iterable[Any]) -> None:
    for each in arrays:
        if isinstance(each, Whole) and any(size % 32 == 0 for size in each.shape):
            raise Wrong(
                f"whole numbers of the shape {list(each.shape)} met floats while they still had "
                "their columns; the sum over the columns should be of whole numbers."
            )


def _products(part: MultiplyCodes, weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    given = [*weights, *inputs]
    before = [each.copy() for each in given]
    found: Any = part(weights, inputs)
    expect(isinstance(found, np.ndarray), "it should return a NumPy array.")
    shape = [len(inputs.numbers), len(weights.codes)]
    expect_equal(list(found.shape), shape, "the shape of what is returned, [tokens, rows]")
    expect(found.dtype == np.float32, f"products are {found.dtype}; they should be float32.")
    same = all(np.array_equal(one, other) for one, other in zip(given, before, strict=True))
    expect(same, "what was given was changed; it should be left as it was.")
    return found


def _expect_products(part: MultiplyCodes, weights: CodeRows, inputs: ByteRows) -> None:
    """What comes out must be the product of what codes and bytes stand for."""
    numbers = inputs.numbers.astype(np.float64) + inputs.zeros[..., None]
    numbers = (numbers * inputs.scales[..., None]).reshape(len(numbers), -1)
    exact = weights.codes * weights.scales[..., None].astype(np.float64)
    exact = (exact + weights.minima[..., None]).reshape(len(exact), -1)
    expected = numbers @ exact.T
    allowed = 1e-5 * (np.abs(numbers) @ np.abs(exact).T).max()
    found = _products(part, weights, inputs)
    for token, row in np.ndindex(*expected.shape):
        mine, right = float(found[token, row]), float(expected[token, row])
        if not abs(mine - right) <= allowed:
            raise Wrong(
                f"the product of token {token} and row {row} is {mine:.6g}; it should be "
                f"{right:.6g}."
            )


def _case(
    tokens: int, rows: int, groups: int, zero: int = 0, minimum: float = 0.0
) -> tuple[CodeRows, ByteRows]:
    """Random bytes and codes; scales of 1, and the same zero and minimum for all."""
    rng = np.random.default_rng(tokens + 10 * rows + 100 * groups)
    codes = rng.integers(0, 16, (rows, groups, 32), np.uint8)
    numbers = rng.integers(-128, 127, (tokens, groups, 32), np.int8)
    ones, minima = np.ones((rows, groups), np.float32), np.full((rows, groups), minimum, np.float32)
    zeros = np.full((tokens, groups), zero, np.int32)
    return (
        CodeRows(codes, ones, minima),
        ByteRows(numbers, np.ones((tokens, groups), np.float32), zeros),
    )


def bytes_times_codes_is_the_whole_of_it(part: MultiplyCodes) -> None:
    """scales of 1, nothing to correct, one group:"""
    _expect_products(part, *_case(1, 1, 1))


def sums_do_not_overflow(part: MultiplyCodes) -> None:
    """bytes of -128 and codes of 15, whose sum takes 17 bits:"""
    weights, inputs = _case(1, 1, 1)
    largest = weights._replace(codes=np.full_like(weights.codes, 15))
    _expect_products(part, largest, inputs._replace(numbers=np.full_like(inputs.numbers, -128)))


def scales_are_those_of_row_token_and_group(part: MultiplyCodes) -> None:
    """two tokens, three rows, three groups, each with a scale of its own:"""
    weights, inputs = _case(2, 3, 3)
    _expect_products(
        part,
        weights._replace(scales=np.arange(1, 10, dtype=np.float32).reshape(3, 3) / 8),
        inputs._replace(scales=np.array([[1, 10, 100], [7, 0.5, 3]], np.float32)),
    )


def a_zero_meets_every_code(part: MultiplyCodes) -> None:
    """inputs whose zero is -100, weights without a minimum:"""
    _expect_products(part, *_case(1, 2, 1, zero=-100))


def a_minimum_meets_every_byte(part: MultiplyCodes) -> None:
    """weights whose minimum is -7.5, inputs whose zero is 0:"""
    _expect_products(part, *_case(1, 2, 1, minimum=-7.5))


def zero_and_minimum_meet_in_every_column(part: MultiplyCodes) -> None:
    """bytes of 0 with a zero of -3, codes of 0 with a minimum of 0.5:"""
    weights, inputs = _case(1, 1, 1, zero=-3, minimum=0.5)
    nothing = weights._replace(codes=np.zeros_like(weights.codes))
    _expect_products(part, nothing, inputs._replace(numbers=np.zeros_like(inputs.numbers)))


def everything_together(part: MultiplyCodes) -> None:
    """five tokens, seven rows, three groups, everything random:"""
    _expect_products(part, *_random())


def only_whole_numbers_meet_along_the_columns(part: MultiplyCodes) -> None:
    """the same once more, told what codes and bytes meet:"""
    weights, inputs = _random()
    codes, numbers = weights.codes.view(Whole), inputs.numbers.view(Whole)
    _products(part, weights._replace(codes=codes), inputs._replace(numbers=numbers))


def _random() -> tuple[CodeRows, ByteRows]:
    weights, inputs = _case(5, 7, 3)
    rng = np.random.default_rng(34)
    scales, minima = rng.random((2, 7, 3), np.float32)
    zeros = rng.integers(-126, 129, (5, 3), np.int32)
    return (
        weights._replace(scales=scales, minima=-8 * minima),
        inputs._replace(scales=rng.random((5, 3), np.float32), zeros=zeros),
    )


CHECKS = (
    bytes_times_codes_is_the_whole_of_it,
    sums_do_not_overflow,
    scales_are_those_of_row_token_and_group,
    a_zero_meets_every_code,
    a_minimum_meets_every_byte,
    zero_and_minimum_meet_in_every_column,
    everything_together,
    only_whole_numbers_meet_along_the_columns,
)

"""Chapter 34's exercises: quantise to bytes, pack panels, multiply bytes and 4-bit codes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from minigen_course.ch34_cpu_kernels.lesson import MultiplyBytes, Quantise
from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows
from minigen_course.grading.exercise import Wrong, expect, expect_equal

MultiplyCodes = Callable[[CodeRows, ByteRows], np.ndarray]


class Whole(np.ndarray):
    """Integers that raise `Wrong` if they meet floats before their columns are summed.

    Columns are recognised by the size of their axis: no other size in the checks is a multiple of
    32.
    """

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert as NumPy does, but raise `Wrong` if columns become floats."""
        if np.issubdtype(dtype, np.inexact):
            _expect_no_columns([self])
        return super().astype(dtype, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(map(_is_float, inputs)) or _asks_for_floats(kwargs):
            _expect_no_columns(inputs)
        plain = [_plain(each) for each in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        found = getattr(ufunc, method)(*plain, **kwargs)
        return found.view(Whole) if isinstance(found, np.ndarray) else found

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(_is_float, args)) or _asks_for_floats(kwargs):
            _expect_no_columns(args)
        return super().__array_function__(function, types, args, kwargs)


def _plain(each: Any) -> Any:
    return each.view(np.ndarray) if isinstance(each, Whole) else each


def _is_float(each: Any) -> bool:
    return isinstance(each, float) or np.issubdtype(getattr(each, "dtype", np.int32), np.inexact)


def _asks_for_floats(options: Mapping[str, Any]) -> bool:
    dtype = options.get("dtype")
    return dtype is not None and np.issubdtype(dtype, np.inexact)


def _expect_no_columns(arrays: Iterable[Any]) -> None:
    for each in arrays:
        if isinstance(each, Whole) and any(size % 32 == 0 for size in each.shape):
            raise Wrong(
                f"integers of shape {list(each.shape)} were combined with floats before their "
                "columns were summed; the sum over the columns should be a sum of integers."
            )


def _products(part: MultiplyCodes, weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    given = [*weights, *inputs]
    before = [each.copy() for each in given]
    found: Any = part(weights, inputs)
    expect(isinstance(found, np.ndarray), "it should return a NumPy array.")
    shape = [len(inputs.numbers), len(weights.codes)]
    expect_equal(list(found.shape), shape, "the shape of the result, [tokens, rows]")
    expect(found.dtype == np.float32, f"products are {found.dtype}; they should be float32.")
    same = all(np.array_equal(one, other) for one, other in zip(given, before, strict=True))
    expect(same, "the arguments were changed; they should stay as they were.")
    return found


def _expect_products(part: MultiplyCodes, weights: CodeRows, inputs: ByteRows) -> None:
    """Check that the result is the product of the numbers that codes and bytes stand for."""
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
    """Make random bytes and codes, with scales of 1, and one zero and one minimum for all."""
    rng = np.random.default_rng(tokens + 10 * rows + 100 * groups)
    codes = rng.integers(0, 16, (rows, groups, 32), np.uint8)
    numbers = rng.integers(-128, 127, (tokens, groups, 32), np.int8)
    ones, minima = np.ones((rows, groups), np.float32), np.full((rows, groups), minimum, np.float32)
    zeros = np.full((tokens, groups), zero, np.int32)
    return (
        CodeRows(codes, ones, minima),
        ByteRows(numbers, np.ones((tokens, groups), np.float32), zeros),
    )


def without_zeros_and_minima_it_is_bytes_times_codes(part: MultiplyCodes) -> None:
    """one group, with a scale of 1, a zero of 0 and a minimum of 0:"""
    _expect_products(part, *_case(1, 1, 1))


def sums_do_not_overflow(part: MultiplyCodes) -> None:
    """bytes of -128 and codes of 15, so the sum needs 17 bits:"""
    weights, inputs = _case(1, 1, 1)
    largest = weights._replace(codes=np.full_like(weights.codes, 15))
    _expect_products(part, largest, inputs._replace(numbers=np.full_like(inputs.numbers, -128)))


def scales_belong_to_row_token_and_group(part: MultiplyCodes) -> None:
    """two tokens, three rows, three groups, each with a scale of its own:"""
    weights, inputs = _case(2, 3, 3)
    _expect_products(
        part,
        weights._replace(scales=np.arange(1, 10, dtype=np.float32).reshape(3, 3) / 8),
        inputs._replace(scales=np.array([[1, 10, 100], [7, 0.5, 3]], np.float32)),
    )


def a_zero_is_multiplied_by_every_code(part: MultiplyCodes) -> None:
    """inputs whose zero is -100, weights without a minimum:"""
    _expect_products(part, *_case(1, 2, 1, zero=-100))


def a_minimum_is_multiplied_by_every_byte(part: MultiplyCodes) -> None:
    """weights whose minimum is -7.5, inputs whose zero is 0:"""
    _expect_products(part, *_case(1, 2, 1, minimum=-7.5))


def zero_times_minimum_counts_in_every_column(part: MultiplyCodes) -> None:
    """bytes of 0 with a zero of -3, codes of 0 with a minimum of 0.5:"""
    weights, inputs = _case(1, 1, 1, zero=-3, minimum=0.5)
    nothing = weights._replace(codes=np.zeros_like(weights.codes))
    _expect_products(part, nothing, inputs._replace(numbers=np.zeros_like(inputs.numbers)))


def everything_together(part: MultiplyCodes) -> None:
    """five tokens, seven rows, three groups, everything random:"""
    _expect_products(part, *_random())


def only_integers_are_summed_over_the_columns(part: MultiplyCodes) -> None:
    """the same inputs, and every operation on codes and bytes is watched:"""
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


PRODUCT_CHECKS = (
    without_zeros_and_minima_it_is_bytes_times_codes,
    sums_do_not_overflow,
    scales_belong_to_row_token_and_group,
    a_zero_is_multiplied_by_every_code,
    a_minimum_is_multiplied_by_every_byte,
    zero_times_minimum_counts_in_every_column,
    everything_together,
    only_integers_are_summed_over_the_columns,
)


Bytes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _bytes_case(rows: int, groups: int, size: int = 32) -> Bytes:
    """Make random bytes from -127 to 127, with scales of 1."""
    rng = np.random.default_rng(rows + 10 * groups)
    codes = rng.integers(-127, 128, (rows, groups, size)).astype(np.int8)
    inputs = rng.integers(-127, 128, (groups, size)).astype(np.int8)
    return codes, np.ones((rows, groups), np.float32), inputs, np.ones(groups, np.float32)


def _sums(part: MultiplyBytes, given: Bytes) -> np.ndarray:
    before = [each.copy() for each in given]
    found: Any = part(*given)
    expect(isinstance(found, np.ndarray), "it should return a NumPy array.")
    expect_equal(list(found.shape), [len(given[0])], "the shape of the result, [rows]")
    expect(found.dtype == np.float32, f"products are {found.dtype}; they should be float32.")
    same = all(np.array_equal(one, other) for one, other in zip(given, before, strict=True))
    expect(same, "the arguments were changed; they should stay as they were.")
    return found


def _expect_sums(part: MultiplyBytes, given: Bytes) -> None:
    codes, scales, inputs, input_scales = (each.astype(np.float64) for each in given)
    weights = (codes * scales[..., None]).reshape(len(codes), -1)
    x = (inputs * input_scales[..., None]).reshape(-1)
    expected, allowed = weights @ x, 1e-5 * (np.abs(weights) @ np.abs(x)).max()
    for row, (mine, right) in enumerate(zip(_sums(part, given).tolist(), expected, strict=True)):
        if not abs(mine - right) <= allowed:
            raise Wrong(f"the product of row {row} is {mine:.6g}; it should be {right:.6g}.")


def one_group_is_a_dot_product_of_bytes(part: MultiplyBytes) -> None:
    """one row of one group of four bytes, with scales of 1:"""
    codes, inputs = np.array([[[3, -2, 0, 1]]], np.int8), np.array([[5, 4, 9, -6]], np.int8)
    _expect_sums(part, (codes, np.ones((1, 1), np.float32), inputs, np.ones(1, np.float32)))


def products_do_not_overflow(part: MultiplyBytes) -> None:
    """bytes of 127 only, so the sum needs 20 bits:"""
    codes, scales, inputs, input_scales = _bytes_case(1, 1)
    _expect_sums(part, (np.full_like(codes, 127), scales, np.full_like(inputs, 127), input_scales))


def scales_belong_to_row_and_group(part: MultiplyBytes) -> None:
    """three rows of three groups, each with a scale of its own:"""
    codes, _, inputs, _ = _bytes_case(3, 3)
    scales = np.arange(1, 10, dtype=np.float32).reshape(3, 3) / 8
    _expect_sums(part, (codes, scales, inputs, np.array([1, 10, 100], np.float32)))


def bytes_of_any_group_size(part: MultiplyBytes) -> None:
    """seven rows of five groups of 64 bytes:"""
    rng = np.random.default_rng(34)
    codes, _, inputs, _ = _bytes_case(7, 5, 64)
    scales, input_scales = rng.random((7, 5), np.float32), rng.random(5, np.float32)
    _expect_sums(part, (codes, scales, inputs, input_scales))


def only_integers_are_summed_in_a_group(part: MultiplyBytes) -> None:
    """five rows of three groups, and every operation on bytes is watched:"""
    codes, scales, inputs, input_scales = _bytes_case(5, 3)
    _sums(part, (codes.view(Whole), scales, inputs.view(Whole), input_scales))


ByPanels = Callable[[np.ndarray], np.ndarray]


def _quantised(part: Quantise, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `part`, with shapes and dtypes checked; a non-finite number raises."""
    before = rows.copy()
    try:
        with np.errstate(all="raise", under="ignore"):
            found = part(rows, size)
    except FloatingPointError as error:
        divides = "divide only where the largest magnitude is above 0"
        better = divides if "divide" in str(error) else "cause none"
        raise Wrong(f"NumPy warns of {error}; it should {better}.") from None
    pair = isinstance(found, tuple) and len(found) == 2
    expect(pair, "it should return a tuple of two arrays, the bytes and the scales.")
    codes, scales = found
    groups = (len(rows), rows.shape[1] // size)
    for array, name, kind, shape in (
        (codes, "bytes", np.int8, (*groups, size)),
        (scales, "scales", np.float32, groups),
    ):
        expect(isinstance(array, np.ndarray), f"the {name} should be a NumPy array.")
        expect_equal(list(array.shape), list(shape), f"the shape of the {name}")
        expect(array.dtype == kind, f"{name} are {array.dtype}; they should be {kind.__name__}.")
    expect(np.array_equal(rows, before), "the argument was changed; return a new array instead.")
    return codes, scales


def _expect_codes(found: np.ndarray, expected: list[int], what: str) -> None:
    expect_equal(found.reshape(-1).tolist(), expected, what)


def _expect_scales(found: np.ndarray, expected: list[float]) -> None:
    for place, (mine, right) in enumerate(zip(found.reshape(-1).tolist(), expected, strict=True)):
        if abs(mine - right) > 1e-6 * right:
            raise Wrong(f"scale {place} is {mine:.7g}; it should be {right:.7g}.")


def numbers_on_the_steps_come_back(part: Quantise) -> None:
    """four numbers that are multiples of a step of 0.5:"""
    codes, scales = _quantised(part, np.array([[63.5, 1.0, -0.5, 0.0]], np.float32), 4)
    _expect_scales(scales, [0.5])
    _expect_codes(codes, [127, 2, -1, 0], "bytes")


def other_numbers_go_to_the_nearest_step(part: Quantise) -> None:
    """numbers between multiples of a step of 1:"""
    rows = np.array([[127.0, 1.4, 1.6, -1.4, -1.6, 0.3, -0.3, 99.9]], np.float32)
    codes, scales = _quantised(part, rows, 8)
    _expect_scales(scales, [1.0])
    _expect_codes(codes, [127, 1, 2, -1, -2, 0, 0, 100], "bytes")


def the_largest_may_be_negative(part: Quantise) -> None:
    """a group whose largest magnitude is that of a negative number:"""
    codes, scales = _quantised(part, np.array([[-254.0, 4.0, 100.0, -2.0]], np.float32), 4)
    _expect_scales(scales, [2.0])
    _expect_codes(codes, [-127, 2, 50, -1], "bytes")


def an_outlier_affects_only_its_group(part: Quantise) -> None:
    """a number of 12,700 in one group, and smaller ones in the other three:"""
    rows = np.array([[12700.0, 100.0, 1.27, -0.5], [0.01, -1.27, 127.0, 3.0]], np.float32)
    codes, scales = _quantised(part, rows, 2)
    _expect_scales(scales, [100.0, 0.01, 0.01, 1.0])
    _expect_codes(codes, [127, 1, 127, -50, 1, -127, 127, 3], "bytes")


def zeros_stay_zeros(part: Quantise) -> None:
    """a group of zeros, next to another group:"""
    codes, scales = _quantised(part, np.array([[0.0, 0.0, 0.0, 0.127]], np.float32), 2)
    _expect_scales(scales, [0.0, 0.001])
    _expect_codes(codes, [0, 0, 0, 127], "bytes")


def errors_are_at_most_half_a_step(part: Quantise) -> None:
    """three rows of 96 random numbers of very different sizes, in groups of 32:"""
    rng = np.random.default_rng(34)
    rows = rng.standard_normal((3, 96)) * 10.0 ** rng.integers(-3, 4, (3, 96))
    rows = rows.astype(np.float32)
    codes, scales = _quantised(part, rows, 32)
    expect(codes.min() >= -127, "a byte is -128; bytes should be from -127 to 127.")
    groups = rows.reshape(3, 3, 32).astype(np.float64)
    _expect_scales(scales, (np.abs(groups).max(-1) / 127).reshape(-1).tolist())
    off = np.abs(groups - codes.astype(np.float64) * scales[..., None]) / scales[..., None]
    row, group, place = np.unravel_index(int(off.argmax()), off.shape)
    expect(
        off.max() < 0.5001,
        f"row {row}, group {group}, number {place} is {off.max():.3g} steps off; the error should "
        "be at most half a step.",
    )


def _panels(part: ByPanels, rows: np.ndarray) -> np.ndarray:
    before = rows.copy()
    found: Any = part(rows)
    expect(isinstance(found, np.ndarray), "it should return a NumPy array.")
    expect(
        found.dtype == rows.dtype,
        f"the words are {found.dtype}; they should stay {rows.dtype}.",
    )
    expect_equal(list(found.shape), [rows.size], "the shape of the result, which is flat")
    expect(found.flags.c_contiguous, "the result should be contiguous in memory.")
    expect(np.array_equal(rows, before), "the argument was changed; return a new array instead.")
    return found


def _expect_order(part: ByPanels, num_rows: int, groups: int, words: int, kind: Any) -> None:
    """Check the order of words by their numbers: by panel, then group, word and lane."""
    rows = np.arange(num_rows * groups * words, dtype=kind).reshape(num_rows, groups, words)
    expected = [
        int(rows[16 * panel + lane, group, word])
        for panel in range(num_rows // 16)
        for group in range(groups)
        for word in range(words)
        for lane in range(16)
    ]
    found = _panels(part, rows).tolist()
    for place, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if mine != right:
            row, group, word = np.unravel_index(right, rows.shape)
            raise Wrong(
                f"place {place} of the result holds word number {mine}; it should hold {right}: "
                f"word {word} of group {group} of row {row}."
            )


def one_word_of_sixteen_rows(part: ByPanels) -> None:
    """sixteen rows of one word, a row for each lane:"""
    _expect_order(part, 16, 1, 1, np.int32)


def the_words_of_a_row_are_sixteen_apart(part: ByPanels) -> None:
    """sixteen rows of two words:"""
    _expect_order(part, 16, 1, 2, np.int32)


def groups_come_before_their_words(part: ByPanels) -> None:
    """sixteen rows of three groups of two words:"""
    _expect_order(part, 16, 3, 2, np.int32)


def panels_follow_each_other(part: ByPanels) -> None:
    """forty-eight rows, so three panels:"""
    _expect_order(part, 48, 2, 4, np.int32)


def scales_are_words_of_sixteen_bits(part: ByPanels) -> None:
    """one scale per group, stored as uint16:"""
    _expect_order(part, 32, 5, 1, np.uint16)


CHECKS = {
    "quantise_groups": (
        numbers_on_the_steps_come_back,
        other_numbers_go_to_the_nearest_step,
        the_largest_may_be_negative,
        an_outlier_affects_only_its_group,
        zeros_stay_zeros,
        errors_are_at_most_half_a_step,
    ),
    "multiply_bytes": (
        one_group_is_a_dot_product_of_bytes,
        products_do_not_overflow,
        scales_belong_to_row_and_group,
        bytes_of_any_group_size,
        only_integers_are_summed_in_a_group,
    ),
    "by_panels": (
        one_word_of_sixteen_rows,
        the_words_of_a_row_are_sixteen_apart,
        groups_come_before_their_words,
        panels_follow_each_other,
        scales_are_words_of_sixteen_bits,
    ),
    "multiply_codes": PRODUCT_CHECKS,
}

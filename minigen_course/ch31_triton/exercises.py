"""Chapter 31's exercises: kernels run program by program, and every load and store is recorded.

A tuner of sizes is checked with a clock whose times are given.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil, inf
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from minigen_course.ch31_triton.lesson import num_sectors
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal
from minigen_course.lab.triton_interpreter import (
    Access,
    expect_each,
    expect_only,
    launch,
    launched,
    watched,
)

Kernel = Callable[..., None]
UNTOUCHED = 99.0  # in the output before the kernel runs


def _random(*shape: int, seed: int = 31) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _summed(part: Kernel, num: int, block: int, behind: int = 0) -> None:
    """Check x + 2.5 y for the first `num` elements of tensors with `behind` more."""
    x, y = _random(num + behind), _random(num + behind, seed=32)
    total = torch.full_like(x, UNTOUCHED)
    given = (x, y, total, num, 2.5)
    grid = (ceil(num / block),)
    accesses = watched(lambda: launch(part, grid, *given, BLOCK=block), x=x, y=y, sum=total)
    for name, is_store in (("x", False), ("y", False), ("sum", True)):
        expect_only(accesses, name, is_store, range(num))
        expect_only(accesses, name, not is_store, ())
    expect_each(accesses, "sum", True, range(num))
    expect_close(total[:num], (x + 2.5 * y)[:num], "sum", ("element",))
    for name in ("x", "y"):
        expect_each(accesses, name, False, range(num))


def one_program_adds_a_whole_block(part: Kernel) -> None:
    """eight elements, one program with a block of eight:"""
    _summed(part, 8, 8)


def each_program_adds_its_own_block(part: Kernel) -> None:
    """twelve elements, three programs with blocks of four:"""
    _summed(part, 12, 4)


def the_last_block_is_not_full(part: Kernel) -> None:
    """ten elements, three programs with blocks of four:"""
    _summed(part, 10, 4)


def elements_past_the_end_are_left_alone(part: Kernel) -> None:
    """the first seven of twelve elements, two programs with blocks of four:"""
    _summed(part, 7, 4, behind=5)


def a_block_may_be_larger_than_the_tensor(part: Kernel) -> None:
    """five elements, one program with a block of sixteen:"""
    _summed(part, 5, 16)


def _largest(part: Kernel, x: Tensor, block: int) -> None:
    """Check the maximum of each row; a maximum skips nan, so masked lanes hold a large number."""
    rows, columns = x.shape
    maxima = torch.full((rows,), UNTOUCHED, dtype=x.dtype)

    def run() -> None:
        with patch("minigen_course.lab.programs._with_anything", _with_a_large_number):
            launch(part, (rows,), x, maxima, columns, BLOCK=block)

    accesses = watched(run, x=x, maxima=maxima)
    expect_only(accesses, "x", True, ())
    expect_only(accesses, "maxima", False, ())
    expect_each(accesses, "maxima", True, range(rows))
    expect(
        not (maxima == LARGE).any(),
        "a masked lane counts. It holds an arbitrary value, here a large one, unless other= sets "
        "it; it should not count.",
    )
    expect_close(maxima, x.amax(1), "maxima", ("row",))
    expect_each(accesses, "x", False, range(x.numel()))


LARGE = 1e30


def _with_a_large_number(data: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask.astype(bool), data, np.array(LARGE, dtype=data.dtype))


def the_largest_of_one_row(part: Kernel) -> None:
    """one row 3, 1, 4, 1 in a block of four, whose maximum is 4:"""
    _largest(part, torch.tensor([[3.0, 1.0, 4.0, 1.0]]), 4)


def a_row_shorter_than_its_block(part: Kernel) -> None:
    """three rows of five positive numbers, in blocks of eight:"""
    _largest(part, _random(3, 5).abs() + 1, 8)


def all_numbers_may_be_negative(part: Kernel) -> None:
    """rows of five negative numbers, in blocks of eight:"""
    _largest(part, -_random(3, 5).abs() - 1e6, 8)


def _columns(part: Kernel, x: Tensor, block: int) -> None:
    """Check the sum of each column, and that a program loads numbers of a row together."""
    rows, columns = x.shape
    sums = torch.full((columns,), UNTOUCHED)
    grid, given = (ceil(columns / block),), (x, sums, rows, columns)
    accesses = launched(part, grid, given, block, ("sums",), x=x, sums=sums)
    expect_only(accesses, "sums", False, ())
    expect_close(sums, x.double().sum(0), "sums", ("column",))
    expect_each(accesses, "x", False, range(x.numel()))
    loads = [each for each in accesses if each.tensor == "x"]
    pieces = [  # the columns of a program in a row
        tuple(range(row * columns + first, row * columns + min(first + block, columns)))
        for row in range(rows)
        for first in range(0, columns, block)
    ]
    fewest = num_sectors([Access((0, 0, 0), False, "x", each, x.itemsize) for each in pieces])
    asked = num_sectors(loads)
    expect(
        asked <= fewest,
        f"the loads of x ask for {asked} sectors of 32 bytes; they should ask for {fewest} at "
        "most. The numbers of one load should be neighbours in a row.",
    )


def one_row_is_its_own_sum(part: Kernel) -> None:
    """one row of eight columns, one program with a block of eight:"""
    _columns(part, _random(1, 8), 8)


def the_last_columns_do_not_fill_a_block(part: Kernel) -> None:
    """four rows of thirteen columns, two programs with blocks of eight:"""
    _columns(part, _random(4, 13), 8)


def neighbours_are_loaded_together(part: Kernel) -> None:
    """thirty-two rows of 64 columns, two programs with blocks of 32, sectors counted:"""
    _columns(part, _random(32, 64), 32)


def sums_in_float32(part: Kernel) -> None:
    """inputs in float16 whose partial sums overflow in float16:"""
    x = torch.tensor([[40_000.0, 1.0], [40_000.0, 2.0], [-50_000.0, 3.0]]).half()
    _columns(part, x, 2)


def _mixed(part: Kernel, gate_up: Tensor, block: int, tolerance: float = 1e-4) -> None:
    """Check SiLU(gate) x up of the two halves of each row."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    gate, up = gate_up.chunk(2, dim=-1)
    mixed = torch.full((rows, columns), UNTOUCHED, dtype=gate_up.dtype)
    given = (gate, up, mixed, columns, gate_up.stride(0))
    grid = (rows, ceil(columns / block))
    tensors = {"gate_and_up": gate_up, "mixed": mixed}
    accesses = launched(part, grid, given, block, ("mixed",), **tensors)
    expect_only(accesses, "mixed", False, ())
    right = gate.double().sigmoid() * gate.double() * up.double()
    expect_close(mixed, right, "mixed", ("row", "column"), tolerance)
    expect_each(accesses, "gate_and_up", False, range(gate_up.numel()))


def one_row_is_mixed(part: Kernel) -> None:
    """one row of eight columns, one program with a block of eight:"""
    _mixed(part, _random(1, 16), 8)


def rows_start_a_stride_apart(part: Kernel) -> None:
    """three rows of eight columns, gate and up side by side, so their row stride is 16:"""
    _mixed(part, _random(3, 16), 8)


def programs_share_a_row(part: Kernel) -> None:
    """two rows of twelve columns, three programs per row with blocks of four:"""
    _mixed(part, _random(2, 24), 4)


def the_end_of_a_row_is_not_the_next(part: Kernel) -> None:
    """three rows of ten columns, three programs per row with blocks of four:"""
    _mixed(part, _random(3, 20), 4)


def gates_may_be_of_any_size(part: Kernel) -> None:
    """gates far above 0, where the sigmoid is 1, and far below, where it is 0:"""
    _mixed(part, torch.tensor([[20.0, 200.0, -200.0, -20.0, 3.0, -2.0, 5.0, 7.0]]), 4)


def sixteen_bits_are_mixed_in_float32(part: Kernel) -> None:
    """inputs in float16, as in the engine:"""
    _mixed(part, 3 * _random(2, 16).half(), 8, tolerance=2e-3)


def _normalised(
    part: Kernel,
    x: Tensor,
    weight: Tensor,
    eps: float,
    block: int,
    tolerance: float = 1e-4,
    residual: Tensor | None = None,
) -> None:
    """Check that each row of x, or of x + residual, is divided by its root mean square.

    The sum should be stored in the residual's place.
    """
    (rows, columns), wide = x.shape, x.double()
    made, inputs, stored = torch.full_like(x, UNTOUCHED), {"x": x}, {"normalised"}
    if residual is not None:
        wide = wide + residual.double()
        inputs["residual"] = total = residual.clone()
        stored.add("residual")
    named = {**inputs, "weight": weight, "normalised": made}
    given = (*named.values(), columns, eps)
    accesses = launched(part, (rows,), given, block, stored, **named)
    expect_only(accesses, "normalised", False, ())
    expect(
        not made.isnan().any(),
        "the result has nan. A masked lane holds an arbitrary value unless other= sets it; it "
        "must not count in a sum.",
    )
    if residual is not None:
        expect_close(total, wide, "residual", ("row", "column"), tolerance)
        expect_each(accesses, "residual", False, range(x.numel()))
    right = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    expect_close(made, right, "normalised", ("row", "column"), tolerance)
    expect_each(accesses, "x", False, range(x.numel()))
    expect_each(accesses, "weight", False, range(columns), times=rows)


def a_row_is_divided_by_its_root_mean_square(part: Kernel) -> None:
    """the row 1, 1, 7, 7, whose root mean square is 5, in a block of four:"""
    _normalised(part, torch.tensor([[1.0, 1.0, 7.0, 7.0]]), torch.ones(4), 0.0, 4)


def each_program_has_its_row(part: Kernel) -> None:
    """three rows of eight columns, of different sizes:"""
    sizes = torch.tensor([[1.0], [10.0], [0.1]])
    _normalised(part, sizes * _random(3, 8), torch.ones(8), 0.0, 8)


def each_column_has_its_weight(part: Kernel) -> None:
    """two rows of four columns, whose weights are 1, 2, 3 and -1:"""
    _normalised(part, _random(2, 4), torch.tensor([1.0, 2.0, 3.0, -1.0]), 0.0, 4)


def a_row_may_be_shorter_than_its_block(part: Kernel) -> None:
    """three rows of five columns, in blocks of eight:"""
    _normalised(part, _random(3, 5), _random(5, seed=33), 0.0, 8)


def eps_is_added_to_the_mean_square(part: Kernel) -> None:
    """eps = 0.16, and a row of zeros:"""
    x = torch.tensor([[0.3, -0.3, 0.3], [0.0, 0.0, 0.0]])
    _normalised(part, x, torch.ones(3), 0.16, 4)


def squares_do_not_overflow_in_sixteen_bits(part: Kernel) -> None:
    """inputs in float16 whose squares overflow in float16:"""
    x = torch.tensor([[1000.0, 1000.0, 7000.0, -7000.0]]).half()
    _normalised(part, x, torch.ones(4).half(), 1e-5, 4, tolerance=2e-3)


def _weighed(part: Kernel, x: Tensor, block: int) -> None:
    """Check the softmax of each row; the weights are stored in float32."""
    rows, columns = x.shape
    weights = torch.full((rows, columns), UNTOUCHED)
    given = (x, weights, columns)
    accesses = launched(part, (rows,), given, block, ("weights",), x=x, weights=weights)
    expect_only(accesses, "weights", False, ())
    expect_close(weights, x.double().softmax(-1), "weights", ("row", "column"), 1e-5)
    expect_each(accesses, "x", False, range(x.numel()))


def equal_scores_get_equal_weights(part: Kernel) -> None:
    """one row of four zeros in a block of four, whose weights are 1/4:"""
    _weighed(part, torch.zeros(1, 4), 4)


def masked_lanes_do_not_count(part: Kernel) -> None:
    """three rows of five scores, in blocks of eight:"""
    _weighed(part, 3 * _random(3, 5), 8)


def scores_may_be_large_or_far_below_zero(part: Kernel) -> None:
    """rows of scores near 1,000 and near -1,000, in blocks of eight:"""
    _weighed(part, torch.tensor([[1000.0], [-1000.0]]) + _random(2, 6), 8)


def a_score_of_minus_infinity_gets_no_weight(part: Kernel) -> None:
    """scores of which a mask has set two to minus infinity:"""
    _weighed(part, torch.tensor([[1.0, -inf, 2.0, -inf]]), 4)


def sixteen_bits_are_weighed_in_float32(part: Kernel) -> None:
    """scores in float16, weights in float32:"""
    _weighed(part, (4 * _random(2, 16)).half(), 16)


def _rotated(part: Kernel, heads: Tensor, positions: list[int], block: int) -> None:
    """Check the rotation of every head of every token by tables of random angles."""
    num_tokens, num_heads, head_dim = heads.shape
    half = head_dim // 2
    angles = 3 * _random(max(positions) + 2, half, seed=34)
    cos, sin, at = angles.cos(), angles.sin(), torch.tensor(positions)
    rotated = torch.full(heads.shape, UNTOUCHED)
    given = (heads, cos, sin, at, rotated, num_heads, half)
    named = {"x": heads, "cos": cos, "sin": sin, "positions": at, "rotated": rotated}
    accesses = launched(part, (num_tokens, num_heads), given, block, ("rotated",), **named)
    expect_only(accesses, "rotated", False, ())
    x, y = heads.double().chunk(2, -1)
    cos, sin = (table[at].double().unsqueeze(1) for table in (cos, sin))
    right = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
    expect_close(rotated, right, "rotated", ("token", "head", "dimension"), 1e-5)
    expect_each(accesses, "x", False, range(heads.numel()))


def one_head_at_position_one(part: Kernel) -> None:
    """one token at position 1, one head of two pairs:"""
    _rotated(part, _random(1, 1, 4), [1], 2)


def each_head_is_rotated(part: Kernel) -> None:
    """two tokens at the positions 3 and 1, three heads of four pairs:"""
    _rotated(part, _random(2, 3, 8), [3, 1], 4)


def pairs_need_not_fill_a_block(part: Kernel) -> None:
    """two tokens, two heads of three pairs, in blocks of four:"""
    _rotated(part, _random(2, 2, 6), [2, 5], 4)


def sixteen_bits_are_rotated_in_float32(part: Kernel) -> None:
    """heads in float16, tables and result in float32:"""
    _rotated(part, _random(2, 2, 8).half(), [7, 6], 4)


def each_row_is_added_and_normalised(part: Kernel) -> None:
    """three rows of five columns, in blocks of eight, eps = 0.16:"""
    residual = _random(3, 5, seed=35)
    _normalised(part, _random(3, 5), _random(5, seed=33), 0.16, 8, residual=residual)


def sums_do_not_overflow_in_sixteen_bits(part: Kernel) -> None:
    """inputs in float16 whose squares overflow in float16:"""
    x = torch.tensor([[1000.0, 1000.0, 7000.0, -7000.0]]).half()
    _normalised(part, x, torch.ones(4).half(), 1e-5, 4, tolerance=4e-3, residual=0.5 * x)


class _Clock:
    """Seconds of each size as given, run by run; the last value stays."""

    def __init__(self, times: dict[Any, list[float]]) -> None:
        self.times, self.runs = times, Counter[Any]()

    def __call__(self, size: Any) -> float:
        taken = self.times[size]
        self.runs[size] += 1
        return taken[min(self.runs[size], len(taken)) - 1]


def _picked(part: Any, fastest: int, times: dict[Any, list[float]], **more: int) -> Counter[Any]:
    """Check the choice among sizes that take these times; return how often each ran."""
    clock = _Clock(times)
    expect_equal(part("rows", list(times), clock, {}, **more), fastest, "the fastest size")
    return clock.runs


def the_smallest_median_wins(part: Any) -> None:
    """three sizes that take 3, 1 and 2 seconds in every run:"""
    _picked(part, 32, {16: [3.0], 32: [1.0], 64: [2.0]})


def the_first_run_does_not_count(part: Any) -> None:
    """a size whose first run compiles for 9 seconds, and which then takes 1; the other takes 2:"""
    _picked(part, 16, {16: [9.0, 1.0], 32: [2.0]}, repeats=1)


def one_outlier_does_not_decide(part: Any) -> None:
    """sizes with single runs far above or below their medians, 2 against 3, then 5 against 3:"""
    _picked(part, 16, {32: [9.0, 3.0], 16: [9.0, 4.0, 1.0, 2.0, 40.0, 1.0]})
    _picked(part, 32, {16: [9.0, 5.0, 1.0, 5.0, 5.0, 5.0], 32: [9.0, 3.0]})


def each_size_runs_as_often_as_asked(part: Any) -> None:
    """three repeats, then five, so a size that fits should run four times, then six times:"""
    for repeats, more in ((3, {"repeats": 3}), (5, {})):
        for size, runs in _picked(part, 16, {16: [1.0], 32: [2.0]}, **more).items():
            expect_equal(runs, repeats + 1, f"runs of size {size}")


def a_size_that_does_not_fit_is_left_out(part: Any) -> None:
    """the second of three sizes does not fit:"""
    runs = _picked(part, 64, {16: [3.0], 32: [inf], 64: [2.0]})
    expect_equal(runs[32], 1, "runs of the size that does not fit")


def a_known_key_runs_nothing(part: Any) -> None:
    """the same key again, and another key:"""
    found: dict[Any, Any] = {}
    clock = _Clock({16: [3.0], 32: [1.0]})
    part((8, 576), [16, 32], clock, found)
    expect_equal(found, {(8, 576): 32}, "found")
    before = sum(clock.runs.values())
    expect_equal(part((8, 576), [16, 32], clock, found), 32, "the size for a known key")
    expect_equal(sum(clock.runs.values()), before, "runs after a known key")
    other = _Clock({16: [1.0], 32: [2.0]})
    expect_equal(part((8, 4096), [16, 32], other, found), 16, "the size for another key")


def no_size_fits(part: Any) -> None:
    """no size fits, so it should raise ValueError:"""
    found: dict[Any, Any] = {}
    try:
        part("rows", [16, 32], _Clock({16: [inf], 32: [inf]}), found)
    except ValueError:
        expect_equal(found, {}, "found")
        return
    raise Wrong("it returned; it should raise ValueError when no size fits.")


CHECKS = {
    "add_scaled": (
        one_program_adds_a_whole_block,
        each_program_adds_its_own_block,
        the_last_block_is_not_full,
        elements_past_the_end_are_left_alone,
        a_block_may_be_larger_than_the_tensor,
    ),
    "row_maximum": (
        the_largest_of_one_row,
        a_row_shorter_than_its_block,
        all_numbers_may_be_negative,
    ),
    "column_sums": (
        one_row_is_its_own_sum,
        the_last_columns_do_not_fill_a_block,
        neighbours_are_loaded_together,
        sums_in_float32,
    ),
    "silu_multiply": (
        one_row_is_mixed,
        rows_start_a_stride_apart,
        programs_share_a_row,
        the_end_of_a_row_is_not_the_next,
        gates_may_be_of_any_size,
        sixteen_bits_are_mixed_in_float32,
    ),
    "rms_norm_rows": (
        a_row_is_divided_by_its_root_mean_square,
        each_program_has_its_row,
        each_column_has_its_weight,
        a_row_may_be_shorter_than_its_block,
        eps_is_added_to_the_mean_square,
        squares_do_not_overflow_in_sixteen_bits,
    ),
    "softmax_rows": (
        equal_scores_get_equal_weights,
        masked_lanes_do_not_count,
        scores_may_be_large_or_far_below_zero,
        a_score_of_minus_infinity_gets_no_weight,
        sixteen_bits_are_weighed_in_float32,
    ),
    "rotate_pairs": (
        one_head_at_position_one,
        each_head_is_rotated,
        pairs_need_not_fill_a_block,
        sixteen_bits_are_rotated_in_float32,
    ),
    "add_rms_norm": (
        each_row_is_added_and_normalised,
        sums_do_not_overflow_in_sixteen_bits,
    ),
    "pick_fastest": (
        the_smallest_median_wins,
        the_first_run_does_not_count,
        one_outlier_does_not_decide,
        each_size_runs_as_often_as_asked,
        a_size_that_does_not_fit_is_left_out,
        a_known_key_runs_nothing,
        no_size_fits,
    ),
}

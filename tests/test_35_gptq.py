"""GPTQ equals its closed form, and rounding to nearest where inputs are not correlated."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen.errors import WeightsError
from minigen.quantization.gptq import gptq, inverse_factor
from minigen.quantization.grid import Grid, choose_scales, round_to_nearest


def correlated(seed: int, tokens: int = 200, columns: int = 48) -> torch.Tensor:
    """Return inputs whose channels are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixture = torch.randn(columns, columns, generator=generator)
    sizes = torch.randn(columns, generator=generator).exp()
    return torch.randn(tokens, columns, generator=generator) @ mixture * sizes


def problem(seed: int, rows: int = 6, columns: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 1))
    x = correlated(seed, columns=columns)
    return weight, x.T @ x


def error(change: torch.Tensor, hessian: torch.Tensor) -> float:
    return float((change.double() @ hessian.double() * change.double()).sum())


def gptq_by_least_squares(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, damping: float
) -> torch.Tensor:
    """Round column by column; solve for the best free weights each time, in float64."""
    h = hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    rounded, free = weight.double().clone(), weight.double().clone()
    size = grid.size_of_group(weight.shape[1])
    for column in range(weight.shape[1]):
        if column % size == 0:
            group = free[:, column : column + size].float()
            scales, zeros = choose_scales(group, grid)
        code = torch.round(free[:, column] / scales + zeros).clamp(0, grid.max_code)
        rounded[:, column] = (code - zeros) * scales
        done, rest = slice(0, column + 1), slice(column + 1, None)
        change = rounded[:, done] - weight[:, done].double()
        repaid = torch.linalg.solve(h[rest, rest], h[rest, done] @ change.T).T
        free[:, rest] = weight[:, rest].double() - repaid
    return rounded.float()


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 4),
    st.sampled_from([-1, 8, 24]),
)
def test_gptq_leaves_the_free_weights_at_their_least_squares_solution(
    seed, bits, group_size
) -> None:
    """Not on symmetric grids: there each group's absmax lies between two codes, a tie."""
    weight, hessian = problem(seed)
    grid = Grid(bits, group_size, symmetric=False)
    expected = gptq_by_least_squares(weight, hessian, grid, damping=0.01)
    found = gptq(weight, hessian, grid).dequantize()
    equal = torch.isclose(found, expected, atol=1e-4, rtol=1e-3)
    assert equal.all(1).sum() >= 5  # of 6 rows; a near-tie may round the other way


def test_blocks_of_columns_change_nothing() -> None:
    """Groups longer than a block, and a last block that is shorter, as in a row of 1,536."""
    weight, hessian = problem(3, rows=3, columns=300)
    grid = Grid(3, -1, False)
    expected = gptq_by_least_squares(weight, hessian, grid, damping=0.05)
    found = gptq(weight, hessian, grid, damping=0.05).dequantize()
    assert torch.isclose(found, expected, atol=1e-4, rtol=1e-3).float().mean() > 0.97


def test_the_first_update_has_the_closed_form() -> None:
    """With the inverse and by least squares: -(w - q) / [H^-1]_00 * [H^-1]_0 = -H_RR^-1 H_R0 d."""
    x = torch.randn(200, 24, generator=torch.Generator().manual_seed(5))
    hessian = (x.T @ x + 50).double()
    factor = inverse_factor(hessian.float(), damping=0.0).double()
    inverse = torch.linalg.inv(hessian)
    by_inverse = inverse[0, 1:] / inverse[0, 0]
    by_solution = -torch.linalg.solve(hessian[1:, 1:], hessian[1:, 0])
    torch.testing.assert_close(factor[0, 1:] / factor[0, 0], by_inverse, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_solution, by_inverse)
    torch.testing.assert_close(factor.T @ factor, inverse, rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.booleans(), st.booleans(), st.booleans())
def test_uncorrelated_inputs_make_gptq_round_to_nearest(
    seed, bits, symmetric, act_order, clips
) -> None:
    weight, hessian = problem(seed)
    grid = Grid(bits, 16, symmetric)
    nearest = round_to_nearest(weight, grid, clip_search=clips)
    options = {"act_order": act_order, "clip_search": clips}
    for diagonal in (hessian.diagonal().diag(), torch.zeros(48, 48)):
        found = gptq(weight, diagonal, grid, **options)
        assert torch.equal(found.codes, nearest.codes)
        assert torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_has_less_error_than_rounding_on_correlated_inputs(bits, act_order) -> None:
    """On average: the choice is greedy, so a single small matrix may get worse."""
    grid = Grid(bits, 16, symmetric=False)
    ratios = []
    for seed in range(8):
        weight, hessian = problem(seed)
        found = gptq(weight, hessian, grid, act_order=act_order).dequantize()
        nearest = round_to_nearest(weight, grid).dequantize()
        ratios.append(error(found - weight, hessian) / error(nearest - weight, hessian))
    assert statistics.geometric_mean(ratios) < 0.75
    assert sum(ratio < 1 for ratio in ratios) >= 7


def test_act_order_keeps_the_scales_of_rounding() -> None:
    weight, hessian = problem(1)
    grid = Grid(4, 16, symmetric=True)
    found = gptq(weight, hessian, grid, act_order=True)
    assert torch.equal(found.scales, round_to_nearest(weight, grid).scales)


def test_the_order_of_rows_does_not_matter() -> None:
    weight, hessian = problem(2)
    together = gptq(weight, hessian, Grid(4, 16, True))
    alone = gptq(weight[3:4], hessian, Grid(4, 16, True))
    torch.testing.assert_close(together.dequantize()[3:4], alone.dequantize())


def test_weights_and_statistics_stay_as_they_were() -> None:
    weight, hessian = problem(2)
    copies = weight.clone(), hessian.clone()
    gptq(weight, hessian, Grid(4, 16, True))
    assert torch.equal(weight, copies[0])
    assert torch.equal(hessian, copies[1])


def test_a_singular_hessian_is_damped_and_one_that_is_not_finite_refused() -> None:
    weight, _ = problem(0)
    x = correlated(0, tokens=3)  # fewer tokens than channels
    assert torch.isfinite(gptq(weight, x.T @ x, Grid(4, 16, True)).dequantize()).all()
    with pytest.raises(WeightsError, match="calibration inputs of a matrix are not finite"):
        gptq(weight, torch.full((48, 48), torch.inf), Grid(4, 16, True))

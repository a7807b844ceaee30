"""Grids: every weight goes to the nearest value of its group, and codes survive packing."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen.errors import OptionError, WeightsError
from minigen.quantization.grid import (
    Grid,
    pack_codes,
    relative_error,
    round_to_nearest,
    unpack_codes,
)
from tests.golden import make_grids

grids = st.builds(
    Grid,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([-1, 1, 8, 24]),
    symmetric=st.booleans(),
)


def random_matrix(seed: int, rows: int = 5, columns: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) ** 3


def values_of_group(quantized, row: int, group: int) -> torch.Tensor:
    codes = torch.arange(quantized.grid.max_code + 1)
    return (codes - quantized.zeros[row, group]) * quantized.scales[row, group]


@settings(max_examples=25, deadline=None)
@given(grids, st.integers(0, 10**6), st.booleans(), st.booleans())
def test_every_weight_goes_to_the_nearest_value_of_its_group(grid, seed, clips, whole) -> None:
    weight = random_matrix(seed)
    quantized = round_to_nearest(weight, grid, clip_search=clips, whole_zeros=whole)
    rounded = quantized.dequantize()
    size = grid.size_of_group(48)
    for row, column in ((0, 0), (2, 31), (4, 47)):
        values = values_of_group(quantized, row, column // size)
        nearest = (values - weight[row, column]).abs().min()
        torch.testing.assert_close((rounded - weight)[row, column].abs(), nearest)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10**6))
def test_rounding_asymmetrically_what_was_rounded_changes_nothing(bits, seed) -> None:
    once = round_to_nearest(random_matrix(seed), Grid(bits, 8, symmetric=False)).dequantize()
    again = round_to_nearest(once, Grid(bits, 8, symmetric=False)).dequantize()
    torch.testing.assert_close(again, once, atol=1e-5, rtol=1e-5)


def test_rounding_symmetrically_what_was_rounded_may_drift() -> None:
    """The negative end has one code more, so the range of the rounded weights can be wider."""
    grid = Grid(2, -1, symmetric=True)
    once = round_to_nearest(torch.tensor([[-3.0, 1.0]]), grid).dequantize()
    assert once.tolist() == [[-4.0, 0.0]]
    assert round_to_nearest(once, grid).dequantize()[0, 0] < -4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 3), st.data())
def test_codes_survive_packing(bits, columns, rows, data) -> None:
    codes = torch.tensor(
        [[data.draw(st.integers(0, 2**bits - 1)) for _ in range(columns)] for _ in range(rows)],
        dtype=torch.uint8,
    ).reshape(rows, columns)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack_codes(packed, bits, columns), codes)


def test_the_first_code_has_the_lowest_bits_and_a_code_may_cross_words() -> None:
    assert pack_codes(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4).tolist() == [[0xF21]]
    codes = torch.tensor([[0] * 10 + [7]], dtype=torch.uint8)  # bits 30 to 32
    assert pack_codes(codes, 3).tolist() == [[-(2**30), 1]]


def test_the_ranges_are_those_of_the_field() -> None:
    weight = torch.tensor([[-1.0, 0.5, 3.0, 2.0]])
    symmetric = round_to_nearest(weight, Grid(4, -1, True))
    assert symmetric.scales.item() == pytest.approx(3 / 7.5)
    assert symmetric.zeros.item() == 8
    assert symmetric.codes.tolist() == [[6, 9, 15, 13]]  # 15.5 is clipped to 15
    asymmetric = round_to_nearest(weight, Grid(4, -1, False))
    assert asymmetric.scales.item() == pytest.approx(4 / 15)
    assert asymmetric.zeros.item() == 4
    assert asymmetric.codes.tolist() == [[0, 6, 15, 12]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_zeros_and_packed_codes_are_those_of_compressed_tensors(bits, symmetric) -> None:
    stored = json.loads(make_grids.STORED.read_text(encoding="utf-8"))
    theirs = stored[f"{bits} bits, {'symmetric' if symmetric else 'asymmetric'}"]
    found = round_to_nearest(make_grids.weight(), Grid(bits, make_grids.GROUP, symmetric))
    torch.testing.assert_close(found.scales, torch.tensor(theirs["scales"]))
    signed = found.zeros - 2 ** (bits - 1)  # they count codes from -2^(bits - 1)
    assert signed.tolist() == theirs["zeros"]
    assert pack_codes(found.codes, bits).tolist() == theirs["packed"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_groups_stay_finite(symmetric, scale_dtype) -> None:
    most = 3e38 if scale_dtype != torch.float16 else 3e5
    rows = [[0.0] * 4, [1e-45] * 4, [1e-45, 0, 0, 3.0], [most, -most, 0, 1.0], [-2.0] * 4]
    quantized = round_to_nearest(torch.tensor(rows), Grid(4, 2, symmetric), scale_dtype=scale_dtype)
    assert torch.isfinite(quantized.dequantize()).all()
    assert torch.equal(quantized.scales.to(scale_dtype).float(), quantized.scales)
    assert quantized.dequantize()[0].tolist() == [0.0] * 4
    assert quantized.dequantize()[3, 0] == pytest.approx(most, rel=0.1)


def test_minima_that_need_not_be_whole_represent_a_q4_1_block_exactly() -> None:
    codes = torch.arange(16).repeat(2).unsqueeze(0)
    weight = codes * 0.25 + 0.6  # no value is 0
    grid = Grid(4, 32, symmetric=False)
    assert relative_error(weight, round_to_nearest(weight, grid).dequantize()) > 1e-2
    exact = round_to_nearest(weight, grid, whole_zeros=False)
    assert relative_error(weight, exact.dequantize()) < 1e-6


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.booleans(), st.integers(0, 10**6))
def test_the_clip_search_never_adds_error(bits, symmetric, seed) -> None:
    weight, importance = random_matrix(seed), torch.rand(48) + 0.01
    grid = Grid(bits, 24, symmetric)
    for weigh in (None, importance):
        factor = torch.ones(48) if weigh is None else weigh
        plain = (round_to_nearest(weight, grid).dequantize() - weight).square() * factor
        searched = round_to_nearest(weight, grid, clip_search=True, importance=weigh)
        found = (searched.dequantize() - weight).square() * factor
        assert found.sum() <= plain.sum() * (1 + 1e-6)


def test_the_stored_size_counts_codes_scales_and_zero_points() -> None:
    assert Grid(4, 32, True).num_bytes(10, 64) == 10 * 32 + 20 * 2
    assert Grid(4, 32, False).num_bytes(10, 64) == 10 * 32 + 20 * 2 + 10
    assert Grid(3, -1, True).num_bytes(1, 9) == 4 + 2


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(OptionError, match="2 to 8 bits per weight, not 9"):
        Grid(9, 32, True)
    with pytest.raises(OptionError, match="-1 for a whole row, not 0"):
        Grid(4, 0, True)
    with pytest.raises(OptionError, match=r"row of 576 weights .* groups of 128; .* divides 576"):
        round_to_nearest(torch.zeros(1, 576), Grid(4, 128, True))
    with pytest.raises(WeightsError, match="not finite"):
        round_to_nearest(torch.tensor([[torch.nan]]), Grid(4, -1, True))

"""Checks of chapter 35's grids: a scale and a zero point, packing, and groups.

No weight lies halfway between two codes: which one is nearer would depend on the order in which a
solution multiplies and divides.
"""

# ruff: noqa: D400, D401, D403 - a check's docstring names the case, as part of a message

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minigen.kv_cache.quantized import pack
from minigen_course.grading.exercise import expect, expect_equal

ScaleAndZero = Callable[[Tensor, int], tuple[float, int]]
PackNibbles = Callable[[Tensor], Tensor]
RoundByGroups = Callable[[Tensor, int, int], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _place(row: int, column: int) -> str:
    return f"row {row}, column {column}"


def expect_tensor(
    found: Any, right: Tensor, what: str, where: Callable[[int, int], str] = _place
) -> None:
    """Expect a matrix of this shape, close to `right`; name the first number that is not.

    `where` says in words where a row and a column are.
    """
    expect(isinstance(found, Tensor), f"{what}: got {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), list(right.shape), f"{what}: the shape")
    close = torch.isclose(found.double(), right.double(), rtol=1e-4, atol=1e-5)
    if not close.all():
        place = tuple((~close).nonzero()[0].tolist())
        mine, its = float(found[place]), float(right[place])
        expect(False, f"{what}: {where(*place)} is {mine:.5g}; it should be {its:.5g}.")


# A scale and a zero point


def _expect_grid(part: ScaleAndZero, weights: list[float], bits: int, right: tuple) -> None:
    given = torch.tensor(weights)
    what = f"the weights {weights} in {bits} bits"
    found = part(given, bits)
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    expect(is_pair, f"{what}: got {found!r}; return the scale and the zero point.")
    scale, zero = float(found[0]), found[1]
    near = abs(scale - right[0]) <= 1e-5 * right[0]
    expect(near, f"{what}: the scale is {scale:.6g}; it should be {right[0]:.6g}.")
    expect_equal(float(zero), float(right[1]), f"{what}: the zero point")
    expect_equal(given.tolist(), torch.tensor(weights).tolist(), f"{what}: they must not change")


def both_signs(part: ScaleAndZero) -> None:
    """weights of both signs:"""
    _expect_grid(part, [-1.0, 0.5, 2.0], 2, (1.0, 1))
    _expect_grid(part, [-2.0, 0.0, 13.0], 4, (1.0, 2))
    _expect_grid(part, [0.25, -0.5, 0.1], 4, (0.05, 10))


def one_sign(part: ScaleAndZero) -> None:
    """weights that are all positive, or all negative:"""
    _expect_grid(part, [3.0, 6.0, 15.0], 4, (1.0, 0))
    _expect_grid(part, [-3.0, -6.0, -15.0], 4, (1.0, 15))
    _expect_grid(part, [1.5], 2, (0.5, 0))
    _expect_grid(part, [-1.5, -1.5], 2, (0.5, 3))


def zero_points_are_rounded(part: ScaleAndZero) -> None:
    """a zero point that is no whole number at first:"""
    _expect_grid(part, [-1.25, 1.0], 2, (0.75, 2))
    _expect_grid(part, [-1.0, 4.0], 3, (5 / 7, 1))
    _expect_grid(part, [-4.0, 1.0], 3, (5 / 7, 6))
    _expect_grid(part, [-0.7, 1.0], 8, (1.7 / 255, 105))


def equal_weights(part: ScaleAndZero) -> None:
    """a group of zeros:"""
    _expect_grid(part, [0.0, 0.0], 4, (1.0, 0))
    _expect_grid(part, [0.0], 8, (1.0, 0))


def codes_reach_all_weights(part: ScaleAndZero) -> None:
    """random groups: the codes reach every weight:"""
    for seed, bits in product(range(20), (2, 3, 4, 8)):
        weights = drawn(32, seed=seed) + seed / 10 - 1
        scale, zero = part(weights.clone(), bits)
        codes = (weights / scale).round() + zero
        most = 2**bits - 1
        error = float(((codes.clamp(0, most) - zero) * scale - weights).abs().max())
        what = f"a group of 32 in {bits} bits: the largest error is {error / scale:.3f} steps"
        expect(error <= 1.001 * scale, f"{what}; a rounded zero point costs at most one.")
        span = max(float(weights.max()), 0) - min(float(weights.min()), 0)
        expect(
            abs(scale * most - span) <= 1e-4 * span,
            f"{what}: the grid spans {scale * most:.5g}, and the weights (with 0) {span:.5g}.",
        )


# Packing


def _expect_packed(part: PackNibbles, codes: list[int], right: list[int]) -> None:
    given = torch.tensor(codes, dtype=torch.uint8)
    found = part(given)
    what = f"the codes {codes}"
    is_bytes = isinstance(found, Tensor) and found.dtype == torch.uint8
    expect(is_bytes, f"{what}: got {found!r}; return a tensor of uint8.")
    expect_equal(len(found), len(right), f"{what}: the number of bytes")
    for place, (mine, its) in enumerate(zip(found.tolist(), right, strict=True)):
        own = " and ".join(map(str, codes[2 * place : 2 * place + 2]))
        expect(
            mine == its,
            f"{what}: byte {place}, of {own}, is 0x{mine:02x}; it should be 0x{its:02x}.",
        )
    expect_equal(given.tolist(), codes, f"{what}: the codes, which must not change")


def two_codes(part: PackNibbles) -> None:
    """two codes are one byte, the first one low:"""
    _expect_packed(part, [1, 2], [0x21])
    _expect_packed(part, [15, 0], [0x0F])
    _expect_packed(part, [0, 15], [0xF0])


def many_codes(part: PackNibbles) -> None:
    """many codes, in their order:"""
    _expect_packed(part, [1, 2, 3, 4, 5, 6], [0x21, 0x43, 0x65])
    _expect_packed(part, list(range(16)), [16 * (2 * i + 1) + 2 * i for i in range(8)])


def an_odd_number(part: PackNibbles) -> None:
    """an odd number of codes, and none:"""
    _expect_packed(part, [7], [0x07])
    _expect_packed(part, [1, 2, 9], [0x21, 0x09])
    _expect_packed(part, [], [])


def as_the_cache_packs(part: PackNibbles) -> None:
    """random codes, as the KV cache packs them:"""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (2 * seed + 2,), generator=generator).to(torch.uint8)
        _expect_packed(part, codes.tolist(), pack(codes, 4).tolist())


# Groups


def grouped(weight: Tensor, bits: int, size: int) -> Tensor:
    """Return what is right: group by group, row by row."""
    most, right = 2 ** (bits - 1) - 1, torch.zeros_like(weight)
    for row, start in product(range(len(weight)), range(0, weight.shape[1], size)):
        group = weight[row, start : start + size]
        scale = float(group.abs().max()) / most
        if scale:
            codes = (group / scale).round().clamp(-most - 1, most)
            right[row, start : start + size] = codes * scale
    return right


def _expect_groups(part: RoundByGroups, weight: Tensor, bits: int, size: int) -> None:
    given = weight.clone()
    found = part(given, bits, size)
    shape = " x ".join(map(str, weight.shape))
    what = f"a matrix of {shape} in {bits} bits and groups of {size}"

    def where(row: int, column: int) -> str:
        group = column // size
        last = min(group * size + size, weight.shape[1]) - 1
        return f"{_place(row, column)} (group {group}: columns {group * size} to {last})"

    expect_tensor(found, grouped(weight, bits, size), what, where)
    expect(torch.equal(given, weight), f"{what}: the matrix that is given must not change.")


def one_group(part: RoundByGroups) -> None:
    """one row that is one group:"""
    _expect_groups(part, torch.tensor([[-7.0, 2.2, 3.6, 0.4]]), 4, 4)
    _expect_groups(part, torch.tensor([[-3.0, 1.4, 0.2, 2.9]]), 3, 4)


def each_row_has_scales_of_its_own(part: RoundByGroups) -> None:
    """rows of different sizes:"""
    _expect_groups(part, torch.tensor([[0.01, -0.02, 0.07], [100.0, -40.0, 13.0]]), 4, 3)


def each_group_has_a_scale_of_its_own(part: RoundByGroups) -> None:
    """groups of different sizes beside each other:"""
    _expect_groups(part, torch.tensor([[0.012, -0.02, 50.0, 20.0, 3.0, -1.0]]), 4, 2)
    _expect_groups(part, drawn(3, 64) * torch.tensor([1.0, 30.0]).repeat_interleave(32), 4, 32)


def a_last_group_that_is_smaller(part: RoundByGroups) -> None:
    """a row that is no multiple of the group:"""
    _expect_groups(part, torch.tensor([[1.0, 2.0, 3.0, 40.0, 9.0]]), 4, 4)
    _expect_groups(part, drawn(2, 11), 3, 4)
    _expect_groups(part, drawn(2, 5), 4, 8)


def groups_of_zeros(part: RoundByGroups) -> None:
    """a group of zeros beside others:"""
    _expect_groups(part, torch.tensor([[0.0, 0.0, 1.0, 2.2], [3.0, 1.0, 0.0, 0.0]]), 4, 2)


def random_matrices(part: RoundByGroups) -> None:
    """random matrices in 2, 3, 4 and 8 bits:"""
    for bits, size in product((2, 3, 4, 8), (1, 8, 16)):
        _expect_groups(part, drawn(4, 32, seed=bits + size), bits, size)


CHECKS = {
    "scale_and_zero": (
        both_signs,
        one_sign,
        zero_points_are_rounded,
        equal_weights,
        codes_reach_all_weights,
    ),
    "pack_nibbles": (two_codes, many_codes, an_odd_number, as_the_cache_packs),
    "round_by_groups": (
        one_group,
        each_row_has_scales_of_its_own,
        each_group_has_a_scale_of_its_own,
        a_last_group_that_is_smaller,
        groups_of_zeros,
        random_matrices,
    ),
}

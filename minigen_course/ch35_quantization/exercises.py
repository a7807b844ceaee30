"""Checks of chapter 35: a grid, packing, groups, AWQ's search, GPTQ's columns, bits, the window."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minigen.kv_cache.quantized import pack
from minigen.quantization.gptq import inverse_factor
from minigen.quantization.mixed import Choice, choose_exhaustively
from minigen_course.grading.exercise import expect, expect_equal

ScaleAndZero = Callable[[Tensor, int], tuple[float, int]]
PackNibbles = Callable[[Tensor], Tensor]
RoundByGroups = Callable[[Tensor, int, int], Tensor]
SearchFactors = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], float]
RoundColumns = Callable[[Tensor, Tensor, Callable[[Tensor, int], Tensor]], Tensor]
Options = Mapping[str, Sequence[tuple[int, int, float]]]
ChooseBits = Callable[[Options, int], dict[str, int]]
ResidualWindow = Callable[[int, int], tuple[int, int]]


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _expect_tensor(found: Any, right: Tensor, what: str) -> None:
    """Expect a tensor of this shape, close to `right`; name the first number that is not."""
    expect(isinstance(found, Tensor), f"{what}: got {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), list(right.shape), f"{what}: the shape")
    close = torch.isclose(found.double(), right.double(), rtol=1e-4, atol=1e-5)
    if not close.all():
        place = tuple((~close).nonzero()[0].tolist())
        mine, its = float(found[place]), float(right[place])
        where = ", ".join(map(str, place))
        expect(False, f"{what}: number [{where}] is {mine:.5g}; it should be {its:.5g}.")


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
    _expect_grid(part, [-1.0, 1.0], 2, (2 / 3, 2))  # 1.5 and an even number beside it
    _expect_grid(part, [-1.0, 4.0], 3, (5 / 7, 1))
    _expect_grid(part, [-4.0, 1.0], 3, (5 / 7, 6))
    _expect_grid(part, [-0.7, 1.0], 8, (1.7 / 255, 105))


def equal_weights(part: ScaleAndZero) -> None:
    """a group of zeros:"""
    _expect_grid(part, [0.0, 0.0], 4, (1.0, 0))
    _expect_grid(part, [0.0], 8, (1.0, 0))


def codes_reach_all_weights(part: ScaleAndZero) -> None:
    """random groups: the nearest code is within half a step of each weight:"""
    for seed, bits in product(range(20), (2, 3, 4, 8)):
        weights = _drawn(32, seed=seed) + seed / 10 - 1
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
    expect_equal(found.tolist(), right, f"{what}: the bytes")
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
        drawn = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (2 * seed + 2,), generator=drawn).to(torch.uint8)
        _expect_packed(part, codes.tolist(), pack(codes, 4).tolist())


# Groups


def _grouped(weight: Tensor, bits: int, size: int) -> Tensor:
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
    _expect_tensor(found, _grouped(weight, bits, size), what)
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
    _expect_groups(part, torch.tensor([[0.01, -0.02, 50.0, 20.0, 3.0, -1.0]]), 4, 2)
    _expect_groups(part, _drawn(3, 64) * torch.tensor([1.0, 30.0]).repeat_interleave(32), 4, 32)


def a_last_group_that_is_smaller(part: RoundByGroups) -> None:
    """a row that is no multiple of the group:"""
    _expect_groups(part, torch.tensor([[1.0, 2.0, 3.0, 40.0, 9.0]]), 4, 4)
    _expect_groups(part, _drawn(2, 11), 3, 4)
    _expect_groups(part, _drawn(2, 5), 4, 8)


def groups_of_zeros(part: RoundByGroups) -> None:
    """a group of zeros beside others:"""
    _expect_groups(part, torch.tensor([[0.0, 0.0, 1.0, 2.0], [3.0, 1.0, 0.0, 0.0]]), 4, 2)


def random_matrices(part: RoundByGroups) -> None:
    """random matrices in 2, 3, 4 and 8 bits:"""
    for bits, size in product((2, 3, 4, 8), (1, 8, 16)):
        _expect_groups(part, _drawn(4, 32, seed=bits + size), bits, size)


# AWQ's search


def _plain(bits: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: _grouped(weight, bits, weight.shape[1])


def _errors(weight: Tensor, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> list[float]:
    found = []
    for step in range(20):
        factors = x.abs().mean(0) ** (step / 20)
        change = rounded(weight * factors) / factors - weight
        found.append(float((x @ change.T).square().sum()))
    return found


def _inputs(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    """Return a matrix, and inputs of which few channels are large."""
    weight = _drawn(6, 16, seed=seed)
    large = torch.ones(16)
    large[seed % 16], large[(seed + 5) % 16] = spread, spread / 2
    return weight, _drawn(24, 16, seed=seed + 100) * large


def _expect_exponent(part: SearchFactors, weight: Tensor, x: Tensor, bits: int, name: str) -> float:
    errors = _errors(weight, x, _plain(bits))
    given = weight.clone(), x.clone()
    found = part(*given, _plain(bits))
    what = f"{name} in {bits} bits"
    is_number = isinstance(found, float | int) or (isinstance(found, Tensor) and found.numel() == 1)
    expect(is_number, f"{what}: got {found!r}; return the exponent, a number.")
    step = round(20 * float(found))
    known = 0 <= step < 20 and abs(20 * float(found) - step) < 1e-6
    expect(known, f"{what}: got {float(found):.4g}; it should be one of 0.00, 0.05, ... 0.95.")
    best = min(errors)
    expect(
        errors[step] <= best * (1 + 1e-5),
        f"{what}: the exponent {step / 20:.2f} leaves an error of {errors[step]:.4g}; it should be "
        f"{errors.index(best) / 20:.2f}, which leaves {best:.4g}.",
    )
    unchanged = torch.equal(given[0], weight) and torch.equal(given[1], x)
    expect(unchanged, f"{what}: the matrix and the inputs must not change.")
    return float(found)


def few_large_inputs(part: SearchFactors) -> None:
    """inputs of which two channels are large:"""
    for seed in range(6):
        _expect_exponent(part, *_inputs(seed, 40.0), 3, f"inputs with two large channels ({seed})")
    _expect_exponent(part, *_inputs(2, 200.0), 3, "inputs with two very large channels")


def equal_inputs(part: SearchFactors) -> None:
    """inputs whose channels are all alike: every exponent rounds the same, so 0 wins:"""
    signs = torch.tensor([[1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, -1.0]])
    found = _expect_exponent(part, _drawn(3, 4), signs, 3, "inputs of +1 and -1")
    expect_equal(found, 0.0, "inputs of +1 and -1, where all exponents are equal: the exponent")


def the_rounding_is_the_given_one(part: SearchFactors) -> None:
    """roundings that differ: 2 bits, and one that changes nothing:"""
    for seed in range(4):
        _expect_exponent(part, *_inputs(seed, 12.0), 2, f"random inputs ({seed})")
    weight, x = _inputs(1, 20.0)
    found = part(weight.clone(), x.clone(), lambda each: each.clone())
    good = isinstance(found, float | int) and 0 <= found < 1
    expect(good, f"a rounding that changes nothing: got {found!r}; return an exponent.")


def outputs_decide(part: SearchFactors) -> None:
    """inputs that are correlated, so that errors of weights and of outputs differ:"""
    for seed in range(6):
        weight, x = _inputs(seed, 6.0)
        x = x @ (torch.eye(16) + 0.9 * torch.roll(torch.eye(16), 1, 0))
        _expect_exponent(part, weight, x, 3, f"correlated inputs ({seed})")


# GPTQ's columns


def _steps_of(size: float) -> Callable[[Tensor, int], Tensor]:
    return lambda column, _: (column / size).round() * size


def _by_columns(weight: Tensor, factor: Tensor, rounded: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return what is right, weight by weight in float64."""
    right = weight.double().tolist()
    for row in right:
        for i in range(len(row)):
            nearest = float(rounded(torch.tensor([row[i]]), i)[0])
            error = (row[i] - nearest) / float(factor[i, i])
            row[i] = nearest
            for j in range(i + 1, len(row)):
                row[j] -= error * float(factor[i, j])
    return torch.tensor(right)


def _expect_columns(
    part: RoundColumns,
    weight: Tensor,
    factor: Tensor,
    rounded: Callable[[Tensor, int], Tensor],
    what: str,
) -> None:
    given = weight.clone()
    found = part(given, factor.clone(), rounded)
    _expect_tensor(found, _by_columns(weight, factor, rounded), what)
    expect(torch.equal(given, weight), f"{what}: the matrix that is given must not change.")


def inputs_that_have_nothing_in_common(part: RoundColumns) -> None:
    """a diagonal factor: this is rounding to nearest:"""
    weight = torch.tensor([[0.3, 1.2, -0.7], [0.6, -0.4, 2.6]])
    factor = torch.diag(torch.tensor([2.0, 0.5, 1.0]))
    _expect_columns(part, weight, factor, _steps_of(1.0), "a diagonal factor")


def the_next_column_repays(part: RoundColumns) -> None:
    """two columns:"""
    weight = torch.tensor([[0.4, 0.4], [1.3, -0.2]])
    factor = torch.tensor([[2.0, -1.0], [0.0, 1.0]])
    _expect_columns(part, weight, factor, _steps_of(1.0), "two columns")


def errors_go_on(part: RoundColumns) -> None:
    """four columns, whose later errors contain the earlier ones:"""
    factor = torch.tensor(
        [[1.0, 0.5, -0.5, 0.25], [0, 2.0, 1.0, -1.0], [0, 0, 0.5, 0.25], [0, 0, 0, 1.0]]
    )
    weight = torch.tensor([[0.3, 0.8, 1.4, -0.6], [-1.2, 0.1, 0.7, 2.2]])
    _expect_columns(part, weight, factor, _steps_of(1.0), "four columns")


def each_column_has_its_grid(part: RoundColumns) -> None:
    """columns with grids of their own:"""
    sizes = (0.25, 1.0, 0.5)
    factor = torch.tensor([[1.0, 0.4, -0.3], [0, 1.5, 0.6], [0, 0, 0.7]])

    def rounded(column: Tensor, i: int) -> Tensor:
        return (column / sizes[i]).round() * sizes[i]

    _expect_columns(part, torch.tensor([[0.3, 0.7, 1.4]]), factor, rounded, "three grids")


def real_factors(part: RoundColumns) -> None:
    """factors of random inputs, and smaller errors of the outputs than by rounding:"""
    for seed in range(5):
        x = _drawn(64, 12, seed=seed) @ (torch.eye(12) + 0.3 * _drawn(12, 12, seed=seed + 50))
        weight, hessian = _drawn(5, 12, seed=seed + 9), x.T @ x
        factor, nearest = inverse_factor(hessian, 0.01), _steps_of(0.5)
        found = part(weight.clone(), factor, nearest)
        _expect_tensor(found, _by_columns(weight, factor, nearest), f"random inputs ({seed})")
        plain = torch.stack([nearest(weight[:, i], i) for i in range(12)], 1)
        errors = [float((x @ (each - weight).T).square().sum()) for each in (found, plain)]
        expect(
            errors[0] < errors[1],
            f"random inputs ({seed}): the outputs' error is {errors[0]:.4g}, and rounding to "
            f"nearest has {errors[1]:.4g}; it should be less.",
        )


# Bits


def _told(options: Options) -> str:
    return "; ".join(f"{name}: {list(own)}" for name, own in options.items())


def _expect_bits(part: ChooseBits, options: Options, max_bytes: int, right: dict) -> None:
    found = part({name: list(own) for name, own in options.items()}, max_bytes)
    what = f"{_told(options)} within {max_bytes} bytes"
    expect(isinstance(found, dict), f"{what}: got {found!r}; return a dict.")
    expect_equal(dict(sorted(found.items())), dict(sorted(right.items())), f"{what}: the bits")


def one_matrix(part: ChooseBits) -> None:
    """one matrix:"""
    options = {"a": [(2, 20, 9.0), (3, 30, 4.0), (4, 40, 1.0)]}
    for max_bytes, bits in ((20, 2), (29, 2), (30, 3), (39, 3), (40, 4), (99, 4)):
        _expect_bits(part, options, max_bytes, {"a": bits})


def the_gain_per_byte_decides(part: ChooseBits) -> None:
    """a small matrix that gains less than a large one, but more per byte:"""
    options = {
        "large": [(2, 100, 50.0), (3, 150, 20.0)],
        "small": [(2, 10, 12.0), (3, 15, 4.0)],
    }
    _expect_bits(part, options, 115, {"large": 2, "small": 3})
    _expect_bits(part, options, 160, {"large": 2, "small": 3})
    _expect_bits(part, options, 165, {"large": 3, "small": 3})
    _expect_bits(part, options, 114, {"large": 2, "small": 2})
    options = {"a": [(2, 100, 50.0), (3, 110, 40.0)], "b": [(2, 10, 12.0), (3, 20, 7.0)]}
    _expect_bits(part, options, 120, {"a": 3, "b": 2})


def what_does_not_fit_is_left_out(part: ChooseBits) -> None:
    """the best step does not fit, and a worse one does:"""
    options = {
        "a": [(2, 100, 90.0), (4, 200, 0.0)],
        "b": [(2, 10, 5.0), (4, 20, 4.0), (8, 40, 3.9)],
    }
    _expect_bits(part, options, 130, {"a": 2, "b": 4})
    _expect_bits(part, options, 140, {"a": 2, "b": 8})
    _expect_bits(part, options, 220, {"a": 4, "b": 4})


def steps_that_save_nothing(part: ChooseBits) -> None:
    """more bits that do not help:"""
    options = {"a": [(2, 10, 1.0), (3, 15, 1.0)], "b": [(2, 10, 1.0), (3, 15, 1.5)]}
    _expect_bits(part, options, 99, {"a": 2, "b": 2})


def several_steps_of_one_matrix(part: ChooseBits) -> None:
    """a matrix that takes several steps before another takes one:"""
    options = {
        "a": [(2, 10, 40.0), (3, 15, 20.0), (4, 20, 10.0), (5, 25, 9.0)],
        "b": [(2, 10, 8.0), (3, 15, 2.0), (4, 20, 0.5)],
    }
    for max_bytes, bits in ((25, (3, 2)), (30, (4, 2)), (35, (4, 3)), (40, (4, 4)), (45, (5, 4))):
        _expect_bits(part, options, max_bytes, dict(zip("ab", bits, strict=True)))


def the_fewest_must_fit(part: ChooseBits) -> None:
    """fewer bytes than the fewest bits need:"""
    options = {"a": [(2, 10, 1.0), (3, 15, 0.5)], "b": [(2, 10, 1.0)]}
    _expect_bits(part, options, 20, {"a": 2, "b": 2})
    try:
        found = part(options, 19)
    except ValueError as error:
        expect(bool(str(error)), "the ValueError should say what is wrong.")
        return
    expect(False, f"20 bytes at least and 19 allowed: got {found!r}; it should raise ValueError.")


def never_better_than_the_optimum(part: ChooseBits) -> None:
    """random matrices, beside the best of all combinations:"""
    for seed in range(12):
        loss = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        options = {
            f"m{i}": [(bits, 10 * (i + 1) * bits, each / 4**bits) for bits in (2, 3, 4)]
            for i, each in enumerate(loss)
        }
        choices = {
            name: [Choice(str(bits), size, loss) for bits, size, loss in own]
            for name, own in options.items()
        }
        for max_bytes in (200, 260, 330, 400):
            found = part(options, max_bytes)
            what = f"{_told(options)} within {max_bytes} bytes"
            picked = [
                next(each for each in own if each[0] == found[name])
                for name, own in options.items()
            ]
            used = sum(size for _, size, _ in picked)
            expect(used <= max_bytes, f"{what}: the choice has {used} bytes.")
            least = choose_exhaustively(choices, max_bytes).loss
            total = sum(each for _, _, each in picked)
            expect(
                total <= 3 * least + 1e-12,
                f"{what}: a loss of {total:.3g}, and the best choice has {least:.3g}.",
            )


# The residual window


def _expect_window(part: ResidualWindow, tokens: int, residual: int, right: tuple) -> None:
    found = part(tokens, residual)
    what = f"{tokens} tokens and a residual of {residual}"
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    expect(is_pair, f"{what}: got {found!r}; return two numbers, for keys and for values.")
    expect_equal(found[0], right[0], f"{what}: keys with codes")
    expect_equal(found[1], right[1], f"{what}: values with codes")


def fewer_than_the_residual(part: ResidualWindow) -> None:
    """fewer tokens than the residual:"""
    for tokens in (0, 1, 31):
        _expect_window(part, tokens, 32, (0, 0))


def a_full_residual(part: ResidualWindow) -> None:
    """as many tokens as the residual, and one more:"""
    _expect_window(part, 32, 32, (32, 0))
    _expect_window(part, 33, 32, (32, 1))
    _expect_window(part, 1, 1, (1, 0))


def many_tokens(part: ResidualWindow) -> None:
    """several residuals:"""
    _expect_window(part, 63, 32, (32, 31))
    _expect_window(part, 64, 32, (64, 32))
    _expect_window(part, 100, 16, (96, 84))


def token_by_token(part: ResidualWindow) -> None:
    """a cache that grows token by token:"""
    for residual in (1, 4, 7):
        keys = values = waiting = 0
        newest: list[int] = []
        for token in range(40):
            _expect_window(part, token, residual, (keys, values))
            waiting += 1
            newest.append(token)
            if waiting == residual:
                keys, waiting = keys + residual, 0
            if len(newest) > residual:
                values += 1
                newest.pop(0)


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
    "search_factors": (
        few_large_inputs,
        equal_inputs,
        the_rounding_is_the_given_one,
        outputs_decide,
    ),
    "round_columns": (
        inputs_that_have_nothing_in_common,
        the_next_column_repays,
        errors_go_on,
        each_column_has_its_grid,
        real_factors,
    ),
    "choose_bits": (
        one_matrix,
        the_gain_per_byte_decides,
        what_does_not_fit_is_left_out,
        steps_that_save_nothing,
        several_steps_of_one_matrix,
        the_fewest_must_fit,
        never_better_than_the_optimum,
    ),
    "residual_window": (fewer_than_the_residual, a_full_residual, many_tokens, token_by_token),
}

"""Checks of chapter 35: its grids, AWQ's search, GPTQ's columns, bits, the residual window."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minigen.quantization.gptq import inverse_factor
from minigen.quantization.mixed import Choice, choose_exhaustively
from minigen_course.ch35_quantization import grid_checks
from minigen_course.ch35_quantization.grid_checks import drawn, expect_tensor, grouped
from minigen_course.grading.exercise import expect, expect_equal, of_pure_part

SearchFactors = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], float]
RoundColumns = Callable[[Tensor, Tensor, Callable[[Tensor, int], Tensor]], Tensor]
Options = Mapping[str, Sequence[tuple[int, int, float]]]
ChooseBits = Callable[[Options, int], dict[str, int]]
ResidualWindow = Callable[[int, int], tuple[int, int]]


# AWQ's search


def _plain(bits: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: grouped(weight, bits, weight.shape[1])


def _errors(weight: Tensor, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> list[float]:
    found = []
    for step in range(20):
        factors = x.abs().mean(0) ** (step / 20)
        change = rounded(weight * factors) / factors - weight
        found.append(float((x @ change.T).square().sum()))
    return found


def _inputs(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    """Return a matrix, and inputs of which few channels are large."""
    weight = drawn(6, 16, seed=seed)
    large = torch.ones(16)
    large[seed % 16], large[(seed + 5) % 16] = spread, spread / 2
    return weight, drawn(24, 16, seed=seed + 100) * large


def _expect_exponent(part: SearchFactors, weight: Tensor, x: Tensor, bits: int, name: str) -> float:
    errors = _errors(weight, x, _plain(bits))
    given = weight.clone(), x.clone()
    found: Any = part(*given, _plain(bits))
    what = f"{name} in {bits} bits"
    is_number = isinstance(found, float | int) or (isinstance(found, Tensor) and found.numel() == 1)
    expect(is_number, f"{what}: got a {type(found).__name__}; return the exponent, a number.")
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
    found = _expect_exponent(part, drawn(3, 4), signs, 3, "inputs of +1 and -1")
    expect_equal(found, 0.0, "inputs of +1 and -1, where all exponents are equal: the exponent")


def the_rounding_is_the_given_one(part: SearchFactors) -> None:
    """roundings that differ: 2 bits, and one that changes nothing:"""
    for seed in range(4):
        _expect_exponent(part, *_inputs(seed, 12.0), 2, f"random inputs ({seed})")
    weight, x = _inputs(1, 20.0)
    found = float(part(weight.clone(), x.clone(), lambda each: each.clone()))
    expect(0 <= found < 1, f"a rounding that changes nothing: got {found}; return an exponent.")


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
    expect_tensor(found, _by_columns(weight, factor, rounded), what)
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
    what = "the weights [[0.4, 0.4], [1.3, -0.2]], U [[2, -1], [0, 1]] and a grid of whole numbers"
    _expect_columns(part, weight, factor, _steps_of(1.0), what)


def errors_go_on(part: RoundColumns) -> None:
    """four columns, whose later errors contain the earlier ones:"""
    factor = torch.tensor(
        [[1.0, 0.5, -0.5, 0.25], [0, 2.0, 1.0, -1.0], [0, 0, 0.5, 0.25], [0, 0, 0, 1.0]]
    )
    weight = torch.tensor([[0.3, 0.8, 1.4, -0.6], [-1.2, 0.1, 0.8, 2.2]])
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
        x = drawn(64, 12, seed=seed) @ (torch.eye(12) + 0.3 * drawn(12, 12, seed=seed + 50))
        weight, hessian = drawn(5, 12, seed=seed + 9), x.T @ x
        factor, nearest = inverse_factor(hessian, 0.01), _steps_of(0.5)
        found = part(weight.clone(), factor, nearest)
        expect_tensor(found, _by_columns(weight, factor, nearest), f"random inputs ({seed})")
        plain = torch.stack([nearest(weight[:, i], i) for i in range(12)], 1)
        errors = [float((x @ (each - weight).T).square().sum()) for each in (found, plain)]
        expect(
            errors[0] < errors[1],
            f"random inputs ({seed}): the outputs' error is {errors[0]:.4g}, and rounding to "
            f"nearest has {errors[1]:.4g}; it should be less.",
        )


# Bits


def _listed(options: Options) -> str:
    return "; ".join(f"{name}: {list(own)}" for name, own in options.items())


def _expect_bits(part: ChooseBits, options: Options, max_bytes: int, right: dict) -> None:
    found = part({name: list(own) for name, own in options.items()}, max_bytes)
    what = f"{_listed(options)} within {max_bytes} bytes"
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


def a_step_that_opens_a_better_one(part: ChooseBits) -> None:
    """a matrix whose second step gains more than its first:"""
    options = {
        "a": [(2, 10, 10.0), (3, 20, 9.0), (4, 30, 2.0)],
        "b": [(2, 10, 5.0), (3, 20, 2.0)],
    }
    for max_bytes, bits in ((29, (2, 2)), (30, (2, 3)), (40, (3, 3)), (50, (4, 3))):
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
            what = f"{_listed(options)} within {max_bytes} bytes"
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
    what = f"{tokens} token{'' if tokens == 1 else 's'} and a residual of {residual}"
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
    **grid_checks.CHECKS,
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
    "choose_bits": of_pure_part(
        one_matrix,
        the_gain_per_byte_decides,
        what_does_not_fit_is_left_out,
        steps_that_save_nothing,
        several_steps_of_one_matrix,
        a_step_that_opens_a_better_one,
        the_fewest_must_fit,
        never_better_than_the_optimum,
    ),
    "residual_window": (fewer_than_the_residual, a_full_residual, many_tokens, token_by_token),
}

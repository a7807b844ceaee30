"""Mixed bits: the greedy mixture fits, and is close to the optimum that trying all finds."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen.errors import OptionError
from minigen.quantization.grid import Grid, round_to_nearest
from minigen.quantization.importance import (
    round_by_importance,
    weight_importance,
    weighted_error,
)
from minigen.quantization.mixed import (
    Choice,
    choose_exhaustively,
    choose_greedily,
    least_loss_bound,
    lower_hull,
    measure_sensitivity,
)

choices = st.lists(
    st.builds(
        Choice,
        form=st.just("form"),
        num_bytes=st.integers(1, 40),
        loss=st.integers(0, 50).map(float),
    ),
    min_size=1,
    max_size=4,
)
options = st.lists(choices, min_size=1, max_size=6).map(
    lambda each: {f"m{i}": tuple(one) for i, one in enumerate(each)}
)


def falling(options: dict[str, tuple[Choice, ...]]) -> int:
    return sum(min(each.num_bytes for each in choices) for choices in options.values())


@settings(max_examples=150, deadline=None)
@given(options, st.integers(0, 80))
def test_the_greedy_mixture_fits_and_the_bound_holds(options, more) -> None:
    max_bytes = falling(options) + more
    greedy, best = (choose(options, max_bytes) for choose in (choose_greedily, choose_exhaustively))
    bound = least_loss_bound(options, max_bytes)
    assert greedy.num_bytes <= max_bytes
    assert bound - 1e-6 <= best.loss <= greedy.loss + 1e-9
    largest_step = max(
        (
            before.loss - after.loss
            for hull in map(lower_hull, options.values())
            for before, after in pairwise(hull)
        ),
        default=0.0,
    )
    assert greedy.loss <= bound + largest_step + 1e-6


@settings(max_examples=100, deadline=None)
@given(choices)
def test_the_hull_falls_and_lies_below_every_choice(choices) -> None:
    hull = lower_hull(choices)
    sizes, losses = [each.num_bytes for each in hull], [each.loss for each in hull]
    assert sizes == sorted(set(sizes))
    assert losses == sorted(set(losses), reverse=True)
    assert losses[-1] == min(each.loss for each in choices)
    assert sizes[0] == min(each.num_bytes for each in choices)
    for price in (0.01, 0.3, 1, 7, 100):
        best = min(each.loss + price * each.num_bytes for each in choices)
        assert best == pytest.approx(min(each.loss + price * each.num_bytes for each in hull))


def test_a_sensitive_matrix_gets_the_bits() -> None:
    forms = {"2": 2, "4": 4}
    asked: list[tuple[str, int]] = []
    ticks: list[tuple[int, int]] = []

    def loss(name: str, bits: int) -> float:
        asked.append((name, bits))
        return {"dull": 1.0, "sharp": 10.0}[name] * 4.0**-bits

    found = measure_sensitivity(
        ["dull", "sharp"],
        forms,
        lambda name, bits: 100 * bits,
        loss,
        lambda done, total: ticks.append((done, total)),
    )
    assert asked == [("dull", 2), ("dull", 4), ("sharp", 2), ("sharp", 4)]
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]
    mixture = choose_greedily(found, 600)
    assert {name: each.form for name, each in mixture.choices.items()} == {
        "dull": "2",
        "sharp": "4",
    }
    assert mixture.num_bytes == 600
    assert mixture.loss == pytest.approx(1 / 16 + 10 / 256)


def test_impossible_sizes_are_refused() -> None:
    few = {"m": (Choice("2", 10, 1.0),)}
    for choose in (choose_greedily, choose_exhaustively, least_loss_bound):
        with pytest.raises(OptionError, match="1 matrices need 10 bytes, more than the 9"):
            choose(few, 9)
    many = {f"m{i}": (Choice("2", 1, 1.0), Choice("4", 2, 0.0)) for i in range(21)}
    with pytest.raises(OptionError, match="2097152 mixtures"):
        choose_exhaustively(many, 100)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.booleans())
def test_rounding_by_importance_never_adds_weighted_error(seed, bits, symmetric) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 48, generator=generator)
    mean_square = torch.randn(48, generator=generator).exp()
    grid = Grid(bits, 16, symmetric)
    importance = weight_importance(weight, mean_square)
    assert importance.shape == weight.shape
    for weigh in (importance, mean_square):
        errors = [
            weighted_error(weight, matrix, weigh)
            for matrix in (
                round_by_importance(weight, weigh, grid),
                round_to_nearest(weight, grid, clip_search=True, importance=weigh),
                round_to_nearest(weight, grid),
            )
        ]
        assert errors == sorted(errors)


def test_channels_without_inputs_do_no_harm() -> None:
    weight = torch.randn(4, 48)
    for importance in (torch.zeros(48), torch.ones(48) * (torch.arange(48) < 20)):
        matrix = round_by_importance(weight, importance.float(), Grid(3, 16, True))
        assert torch.isfinite(matrix.dequantize()).all()

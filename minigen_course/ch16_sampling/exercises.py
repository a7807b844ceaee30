"""Checks of chapter 16: numbers by hand, top-p, penalties, and the draw of a token."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen_course.ch16_sampling.lesson import by_hand
from minigen_course.grading.exercise import expect, expect_close, expect_equal

ByHand = Callable[[], dict[str, float]]
KeepTopP = Callable[[Tensor, Tensor], Tensor]
ApplyPenalties = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

Draw = Callable[[Tensor, Tensor], Tensor]

AXES = ("row", "token")
ALMOST_ONE = 1 - 2.0**-53  # the largest float64 below 1


def _judge_numbers(part: ByHand, names: list[str]) -> None:
    """Expect these of the ten numbers; the message says only in which direction one is wrong."""
    found, right = part(), by_hand()
    expect(isinstance(found, dict), f"returned {type(found).__name__}; return a dict.")
    expect_equal(sorted(found), sorted(right), "the names of the numbers")
    for name in names:
        value = found[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number, f"{name!r} is {value!r}; it should be a number.")
        if not math.isclose(value, right[name], rel_tol=0.01, abs_tol=1e-9):
            way = "smaller" if value > right[name] else "larger"
            expect(False, f"{name!r} is {value:g}; it should be {way}.")


def settings_without_effect(part: ByHand) -> None:
    """the value at which a setting does nothing, or makes another one irrelevant:"""
    none = ["top_p without effect", "min_p without effect", "repetition_penalty without effect"]
    _judge_numbers(part, ["top_k for greedy", *none])


def temperatures_by_hand(part: ByHand) -> None:
    """what temperature does to the probability of A:"""
    _judge_numbers(part, ["A at temperature 1/2", "A at endless temperature"])


def cuts_by_hand(part: ByHand) -> None:
    """how many of A, B, C and D are kept:"""
    kept = ["kept by top_p 0.9", "kept by top_p 0.9 at temperature 1/2", "kept by min_p 0.2"]
    _judge_numbers(part, kept)


def a_penalty_by_hand(part: ByHand) -> None:
    """a penalty on B, which has occurred twice:"""
    _judge_numbers(part, ["B after frequency_penalty"])


def _logits(probabilities: list[list[float]]) -> Tensor:
    """Return logits whose softmax is the given probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def _kept(part: KeepTopP, probabilities: list[list[float]], top_p: list[float]) -> list[list[int]]:
    """Return the token ids that the part keeps in each row; expect their logits unchanged."""
    logits = _logits(probabilities)
    before = logits.clone()
    found = part(logits, torch.tensor(top_p, dtype=torch.float64))  # the dtype in the engine
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), list(logits.shape), "the shape of the result")
    expect(torch.equal(logits, before), "changed the logits in place; return new ones.")
    kept = found > -math.inf
    expect_close(
        torch.where(kept, found, before),
        before,
        "the logits of the kept tokens, which should not change",
        AXES,
    )
    return [row.nonzero().flatten().tolist() for row in kept]


def the_fewest_tokens_that_reach_top_p_are_kept(part: KeepTopP) -> None:
    """tokens of 50, 30, 15 and 5 percent:"""
    row = [0.5, 0.3, 0.15, 0.05]
    for top_p, expected in ((0.4, [0]), (0.6, [0, 1]), (0.9, [0, 1, 2]), (0.97, [0, 1, 2, 3])):
        expect_equal(
            _kept(part, [row], [top_p])[0], expected, f"the tokens kept at top_p = {top_p}"
        )


def the_order_of_the_tokens_does_not_matter(part: KeepTopP) -> None:
    """a row in which the likeliest tokens do not come first:"""
    found = _kept(part, [[0.05, 0.5, 0.15, 0.3]], [0.6])[0]
    expect_equal(found, [1, 3], "the tokens kept at top_p = 0.6, of 5, 50, 15 and 30 percent")


def the_token_that_reaches_top_p_is_kept(part: KeepTopP) -> None:
    """top_p is reached, with no more tokens than necessary:"""
    expect_equal(_kept(part, [[0.9, 0.1]], [0.01])[0], [0], "the tokens kept at a very small top_p")
    row = [0.5, 0.25, 0.125, 0.125]
    found = _kept(part, [row], [0.75])[0]
    expect_equal(found, [0, 1], "the tokens kept at top_p = 0.75, which two tokens reach exactly")


def every_row_has_its_own_top_p(part: KeepTopP) -> None:
    """each row has its own top_p:"""
    rows = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.35, 0.25]]
    expected = [[0], [0, 1, 2], [0, 1]]
    for row, (found, right) in enumerate(
        zip(_kept(part, rows, [0.4, 0.9, 0.7]), expected, strict=True)
    ):
        expect_equal(found, right, f"the tokens kept in row {row}")


def of_equally_likely_tokens_the_lower_ids_are_kept(part: KeepTopP) -> None:
    """ties are broken by id, so that the same seed draws the same text:"""
    found = _kept(part, [[0.125] * 8], [0.3])[0]
    expect_equal(found, [0, 1, 2], "the tokens kept at top_p = 0.3, of eight of 12.5 percent")


def a_large_vocabulary_is_filtered_like_a_small_one(part: KeepTopP) -> None:
    """a vocabulary of 5,000 tokens:"""
    generator = torch.Generator().manual_seed(16)
    logits = torch.randn(3, 5000, generator=generator) * 3
    probabilities = logits.double().softmax(dim=-1)
    found = part(logits, torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)) > -math.inf
    for row, top_p in enumerate((0.5, 0.9, 0.99)):
        mass = probabilities[row].sort(descending=True).values.cumsum(0)
        expected = int((mass < top_p).sum()) + 1
        what = f"the number of tokens kept in row {row}, top_p = {top_p}"
        expect_equal(int(found[row].sum()), expected, what)


def _penalized(part: ApplyPenalties, rows: list[list[float]], **given: list[float]) -> Tensor:
    """Return the result for rows of logits; `given` has one value per row, or is neutral.

    Token 0 is in the prompt; token 1 is once, and token 2 three times in the output.
    """
    logits = torch.tensor(rows)
    in_prompt = torch.zeros(logits.shape, dtype=torch.bool)
    in_prompt[:, 0] = True
    output_counts = torch.zeros(logits.shape)
    output_counts[:, 1], output_counts[:, 2] = 1, 3
    before = logits.clone()
    neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    penalties = [
        torch.tensor(given.get(name, [value] * len(rows))) for name, value in neutral.items()
    ]
    found = part(logits, in_prompt, output_counts, *penalties)
    expect(torch.equal(logits, before), "changed the logits in place; return new ones.")
    return found


def neutral_values_change_nothing(part: ApplyPenalties) -> None:
    """repetition 1, presence 0 and frequency 0:"""
    logits = [[2.0, -1.0, 0.5, -3.0]]
    expect_close(_penalized(part, logits), torch.tensor(logits), "the logits", AXES)


def repetition_makes_earlier_tokens_less_likely(part: ApplyPenalties) -> None:
    """repetition, which divides positive logits and multiplies negative ones:"""
    logits = [[2.0, -1.0, 0.5, -3.0], [-2.0, 4.0, -0.5, 3.0]]
    found = _penalized(part, logits, repetition=[2.0, 2.0])
    right = torch.tensor([[1.0, -2.0, 0.25, -3.0], [-4.0, 2.0, -1.0, 3.0]])
    expect_close(found, right, "the logits (tokens 0 to 2 occurred before, 3 did not)", AXES)


def presence_is_subtracted_once(part: ApplyPenalties) -> None:
    """presence, subtracted once from tokens of the output, and not from those of the prompt:"""
    found = _penalized(part, [[1.0, 1.0, 1.0, 1.0]], presence=[0.5])
    expect_close(found, torch.tensor([[1.0, 0.5, 0.5, 1.0]]), "the logits", AXES)


def a_token_of_prompt_and_output_is_penalized_once(part: ApplyPenalties) -> None:
    """repetition of a token that is in the prompt and in the output:"""
    logits, one, none = torch.tensor([[4.0, -4.0, 4.0]]), torch.ones(1), torch.zeros(1)
    in_prompt, counts = torch.tensor([[True, True, False]]), torch.tensor([[2.0, 1.0, 0.0]])
    found = part(logits, in_prompt, counts, 2 * one, none, none)
    expect_close(found, torch.tensor([[2.0, -8.0, 4.0]]), "the logits", AXES)


def frequency_is_subtracted_per_occurrence(part: ApplyPenalties) -> None:
    """frequency, subtracted once per occurrence of a token in the output:"""
    found = _penalized(part, [[1.0, 1.0, 1.0, 1.0]], frequency=[0.5])
    expect_close(found, torch.tensor([[1.0, 0.5, -0.5, 1.0]]), "the logits", AXES)


def each_row_has_its_own_penalties_and_repetition_comes_first(part: ApplyPenalties) -> None:
    """all three penalties at once, with different values in each row:"""
    found = _penalized(
        part,
        [[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]],
        repetition=[2.0, 4.0],
        presence=[1.0, 0.25],
        frequency=[0.5, 1.0],
    )
    right = torch.tensor([[0.5, -1.0, -2.0, 1.0], [-4.0, -5.25, -7.25, -1.0]])
    expect_close(found, right, "the logits", AXES)


def _drawn(part: Draw, rows: list[list[float]], uniform: list[float]) -> list[int]:
    """Return the tokens that the part draws from rows of probabilities (0 is a dropped token)."""
    logits = _logits(rows)
    before = logits.clone()
    found = part(logits, torch.tensor(uniform, dtype=torch.float64))
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), [len(rows)], "the shape of the result")
    expect(found.dtype == torch.int64, f"the dtype is {found.dtype}; it should be torch.int64.")
    expect(torch.equal(logits, before), "changed the logits in place, but must not.")
    ids: list[int] = found.tolist()
    return ids


def the_uniform_number_decides(part: Draw) -> None:
    """tokens of 50, 30, 15 and 5 percent:"""
    row = [0.5, 0.3, 0.15, 0.05]
    for uniform, token in ((0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.96, 3)):
        expect_equal(_drawn(part, [row], [uniform])[0], token, f"the token at uniform = {uniform}")


def tokens_lie_in_the_order_of_their_ids(part: Draw) -> None:
    """the likeliest token does not come first:"""
    row = [0.05, 0.5, 0.15, 0.3]
    for uniform, token in ((0.04, 0), (0.06, 1), (0.6, 2), (0.71, 3)):
        expect_equal(_drawn(part, [row], [uniform])[0], token, f"the token at uniform = {uniform}")


def every_row_has_its_own_number(part: Draw) -> None:
    """three rows with three numbers:"""
    rows = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1]]
    found = _drawn(part, rows, [0.1, 0.9, 0.5])
    expect_equal(found, [0, 2, 1], "the tokens of the three rows")


def dropped_tokens_are_never_drawn(part: Draw) -> None:
    """tokens that were dropped, at both ends of [0, 1):"""
    for row, uniform, token in (
        ([0.0, 0.0, 0.6, 0.4], 0.0, 2),
        ([0.6, 0.4, 0.0, 0.0], ALMOST_ONE, 1),
        ([0.5, 0.0, 0.5], 0.5 + 1e-6, 2),
        ([0.0, 1.0, 0.0], 0.5, 1),
    ):
        what = f"the token at uniform = {uniform}, of the probabilities {row}"
        expect_equal(_drawn(part, [row], [uniform])[0], token, what)


def rounding_draws_no_dropped_token(part: Draw) -> None:
    """a large vocabulary whose last half was dropped, at the largest number below 1:"""
    for size in (10, 3_000, 50_000):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 2
        kept = size // 2
        logits[:, kept:] = -math.inf
        found = part(logits, torch.tensor([ALMOST_ONE], dtype=torch.float64)).tolist()
        expect(
            0 <= found[0] < kept,
            f"of {size:,} tokens the first {kept:,} were kept, and token {found[0]:,} was drawn; "
            "it should be one of those that were kept.",
        )


def tokens_come_as_often_as_they_are_likely(part: Draw) -> None:
    """1,000 evenly spaced numbers:"""
    shares = [0.125, 0.5, 0.25, 0.125]
    rows = _logits([shares]).expand(1000, -1)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = part(rows, uniform).bincount(minlength=4).tolist()
    for token, (count, share) in enumerate(zip(counts, shares, strict=True)):
        close = abs(count - 1000 * share) <= 1
        expect(close, f"token {token} came {count} times; it should be {1000 * share:.0f}.")


CHECKS = {
    "by_hand": (
        settings_without_effect,
        temperatures_by_hand,
        cuts_by_hand,
        a_penalty_by_hand,
    ),
    "keep_top_p": (
        the_fewest_tokens_that_reach_top_p_are_kept,
        the_order_of_the_tokens_does_not_matter,
        the_token_that_reaches_top_p_is_kept,
        every_row_has_its_own_top_p,
        of_equally_likely_tokens_the_lower_ids_are_kept,
        a_large_vocabulary_is_filtered_like_a_small_one,
    ),
    "apply_penalties": (
        neutral_values_change_nothing,
        repetition_makes_earlier_tokens_less_likely,
        a_token_of_prompt_and_output_is_penalized_once,
        presence_is_subtracted_once,
        frequency_is_subtracted_per_occurrence,
        each_row_has_its_own_penalties_and_repetition_comes_first,
    ),
    "draw": (
        the_uniform_number_decides,
        tokens_lie_in_the_order_of_their_ids,
        every_row_has_its_own_number,
        dropped_tokens_are_never_drawn,
        rounding_draws_no_dropped_token,
        tokens_come_as_often_as_they_are_likely,
    ),
}

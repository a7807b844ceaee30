"""Checks of chapter 16: top-p sampling, and penalties on tokens that occurred before."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen_course.grading.exercise import expect, expect_close, expect_equal

KeepTopP = Callable[[Tensor, Tensor], Tensor]
ApplyPenalties = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

AXES = ("row", "token")


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


CHECKS = {
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
        presence_is_subtracted_once,
        frequency_is_subtracted_per_occurrence,
        each_row_has_its_own_penalties_and_repetition_comes_first,
    ),
}

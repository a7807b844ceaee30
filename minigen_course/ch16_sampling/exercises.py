"""Checks of chapter 16: which tokens may be drawn, and how what was said counts against them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen.sampling.sampler import apply_penalties, keep_top_p
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_close, expect_equal

KeepTopP = Callable[[Tensor, Tensor], Tensor]
ApplyPenalties = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _logits(rows: list[list[float]]) -> Tensor:
    """Logits of which softmax makes the given probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log().float()


def _kept(part: KeepTopP, probabilities: list[list[float]], top_p: list[float]) -> list[list[int]]:
    logits = _logits(probabilities)
    before = logits.clone()
    found = part(logits, torch.tensor(top_p, dtype=torch.float64))
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), list(logits.shape), "the shape of what you return")
    expect(torch.equal(logits, before), "changed the logits that it was given; return new ones.")
    kept = found > -math.inf
    expect_close(
        torch.where(kept, found, before),
        before,
        "a token that is kept has its own logit; the one that you return",
        ("row", "token"),
    )
    return [row.nonzero().flatten().tolist() for row in kept]


def the_fewest_tokens_that_reach_the_mass_are_kept(part: KeepTopP) -> None:
    """tokens of 50, 30, 15 and 5 per cent:"""
    row = [0.5, 0.3, 0.15, 0.05]
    for top_p, expected in ((0.4, [0]), (0.6, [0, 1]), (0.9, [0, 1, 2]), (0.97, [0, 1, 2, 3])):
        expect_equal(
            _kept(part, [row], [top_p])[0], expected, f"at top_p = {top_p} the tokens that are kept"
        )


def the_order_of_the_tokens_does_not_matter(part: KeepTopP) -> None:
    """the likeliest tokens need not come first:"""
    found = _kept(part, [[0.05, 0.5, 0.15, 0.3]], [0.6])[0]
    expect_equal(found, [1, 3], "with 5, 50, 15 and 30 per cent at top_p = 0.6, what is kept")


def the_token_that_crosses_the_mass_is_kept(part: KeepTopP) -> None:
    """the mass must be reached, and no more:"""
    expect_equal(_kept(part, [[0.9, 0.1]], [0.01])[0], [0], "however small top_p, what is kept")
    row = [0.5, 0.25, 0.125, 0.125]
    expect_equal(
        _kept(part, [row], [0.75])[0], [0, 1], "where two tokens reach 0.75 exactly, what is kept"
    )


def every_row_has_its_own_mass(part: KeepTopP) -> None:
    """rows are cut by their own top_p:"""
    rows = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.35, 0.25]]
    expected = [[0], [0, 1, 2], [0, 1]]
    for row, (found, right) in enumerate(
        zip(_kept(part, rows, [0.4, 0.9, 0.7]), expected, strict=True)
    ):
        expect_equal(found, right, f"row {row}: what is kept")


def of_equally_likely_tokens_the_lower_ids_are_kept(part: KeepTopP) -> None:
    """ties are broken by id, so that the same seed draws the same text:"""
    found = _kept(part, [[0.125] * 8], [0.3])[0]
    expect_equal(found, [0, 1, 2], "of eight tokens of 12.5 per cent at top_p = 0.3, what is kept")


def a_large_vocabulary_is_cut_as_a_small_one(part: KeepTopP) -> None:
    """a vocabulary of 5,000 tokens:"""
    generator = torch.Generator().manual_seed(16)
    logits = torch.randn(3, 5000, generator=generator) * 3
    probabilities = logits.double().softmax(dim=-1)
    found = part(logits, torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)) > -math.inf
    for row, top_p in enumerate((0.5, 0.9, 0.99)):
        mass = probabilities[row].sort(descending=True).values.cumsum(0)
        expected = int((mass < top_p).sum()) + 1
        expect_equal(int(found[row].sum()), expected, f"row {row}, top_p = {top_p}: tokens kept")


def _penalised(part: ApplyPenalties, logits: list[list[float]], **given: list[float]) -> Tensor:
    """Token 0 was in the prompt; of the output, token 1 was once and token 2 three times."""
    rows = torch.tensor(logits)
    in_prompt = torch.zeros(rows.shape, dtype=torch.bool)
    in_prompt[:, 0] = True
    counts = torch.zeros(rows.shape)
    counts[:, 1], counts[:, 2] = 1, 3
    before = rows.clone()
    neutral = {"repetition": [1.0], "presence": [0.0], "frequency": [0.0]}
    chosen = {
        name: torch.tensor((given.get(name) or value) * len(rows))[: len(rows)]
        for name, value in neutral.items()
    }
    found = part(rows, in_prompt, counts, *chosen.values())
    expect(torch.equal(rows, before), "changed the logits that it was given; return new ones.")
    return found


AXES = ("row", "token")


def neutral_values_change_nothing(part: ApplyPenalties) -> None:
    """repetition 1, presence 0 and frequency 0:"""
    logits = [[2.0, -1.0, 0.5, -3.0]]
    expect_close(_penalised(part, logits), torch.tensor(logits), "the logits", AXES)


def repetition_makes_what_was_there_less_likely(part: ApplyPenalties) -> None:
    """repetition divides what is positive and multiplies what is negative:"""
    found = _penalised(part, [[2.0, -1.0, 0.5, -3.0], [-2.0, 4.0, -0.5, 3.0]], repetition=[2.0])
    right = torch.tensor([[1.0, -2.0, 0.25, -3.0], [-4.0, 2.0, -1.0, 3.0]])
    expect_close(found, right, "the logits (tokens 0 to 2 were there, 3 was not)", AXES)


def presence_is_taken_off_once(part: ApplyPenalties) -> None:
    """presence counts whether a token is in the output, not how often, and not the prompt:"""
    found = _penalised(part, [[1.0, 1.0, 1.0, 1.0]], presence=[0.5])
    expect_close(found, torch.tensor([[1.0, 0.5, 0.5, 1.0]]), "the logits", AXES)


def frequency_is_taken_off_for_each_occurrence(part: ApplyPenalties) -> None:
    """frequency counts how often a token is in the output:"""
    found = _penalised(part, [[1.0, 1.0, 1.0, 1.0]], frequency=[0.5])
    expect_close(found, torch.tensor([[1.0, 0.5, -0.5, 1.0]]), "the logits", AXES)


def each_row_has_its_own_penalties_and_repetition_goes_first(part: ApplyPenalties) -> None:
    """all three at once, and different ones in each row:"""
    found = _penalised(
        part,
        [[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]],
        repetition=[2.0, 4.0],
        presence=[1.0, 0.25],
        frequency=[0.5, 1.0],
    )
    right = torch.tensor([[0.5, -1.0, -2.0, 1.0], [-4.0, -5.25, -7.25, -1.0]])
    expect_close(found, right, "the logits", AXES)


EXERCISES = (
    Exercise(
        "keep_top_p",
        keep_top_p,
        (
            the_fewest_tokens_that_reach_the_mass_are_kept,
            the_order_of_the_tokens_does_not_matter,
            the_token_that_crosses_the_mass_is_kept,
            every_row_has_its_own_mass,
            of_equally_likely_tokens_the_lower_ids_are_kept,
            a_large_vocabulary_is_cut_as_a_small_one,
        ),
        (
            "Sort each row's probabilities from the largest, and add them up as you go.",
            "A token is kept if the sum of those before it is still below top_p; the first always.",
            "sort(descending=True, stable=True) keeps equal ones in order; scatter brings the "
            "answer back to the tokens' own places.",
        ),
        "Write top-p (nucleus) sampling's cut for a whole batch: each row of `logits` keeps its "
        "fewest likeliest tokens whose probabilities together reach the row's own `top_p`; all "
        "others become minus infinity. The logits that you are given stay as they are.",
        """from minigen import SamplingParams
from minigen_course import load_model

llm = load_model()
with using(16, keep_top_p=mine):
    params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=24)
    print(llm.generate("The old lighthouse", params).text)""",
        "Do it without sorting all 49,152 tokens. Which tokens can be left out before sorting, "
        "and how do you know that none of them would have been kept?",
    ),
    Exercise(
        "apply_penalties",
        apply_penalties,
        (
            neutral_values_change_nothing,
            repetition_makes_what_was_there_less_likely,
            presence_is_taken_off_once,
            frequency_is_taken_off_for_each_occurrence,
            each_row_has_its_own_penalties_and_repetition_goes_first,
        ),
        (
            "Dividing a negative logit by 2 makes the token likelier, not less likely.",
            "torch.where(logits > 0, logits / factor, logits * factor), with a factor of 1 for "
            "tokens that were in neither prompt nor output.",
        ),
        "Write the three penalties. *Repetition* divides a positive logit and multiplies a "
        "negative one, for tokens of prompt or output; *presence* is taken off once for a token "
        "of the output, *frequency* as often as it is there. Each row has its own three numbers.",
        """from minigen import SamplingParams
from minigen_course import load_model

llm = load_model()
with using(16, apply_penalties=mine):
    params = SamplingParams(temperature=0, frequency_penalty=0.8, max_tokens=40)
    print(llm.generate("I like tea. I like tea. I", params).text)""",
        "A penalty that forgets: let a token's count fall by half every 32 tokens of output.",
    ),
)

"""Checks of chapter 32's first exercise: two parts of a softmax become one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minigen.kernels.flash import Partial, merge
from minigen.teach.exercises import Exercise
from minigen.teach.messages import expect, expect_close, expect_equal

Merge = Callable[[Partial, Partial], Partial]
FIELDS = {"maximum": ("query",), "total": ("query",), "mixed": ("query", "number")}


def _partial(maximum: list[float], total: list[float], mixed: list[list[float]]) -> Partial:
    return Partial(torch.tensor(maximum), torch.tensor(total), torch.tensor(mixed))


def _merged(part: Merge, one: Partial, other: Partial) -> Partial:
    before = [getattr(each, name).clone() for each in (one, other) for name in FIELDS]
    found: Any = part(one, other)
    missing = [name for name in FIELDS if not isinstance(getattr(found, name, None), Tensor)]
    expect(not missing, "returned no Partial; return Partial(maximum, total, mixed), of tensors.")
    now = [getattr(each, name) for each in (one, other) for name in FIELDS]
    same = all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    expect(same, "changed what it was given; return a new Partial.")
    merged: Partial = found
    return merged


def _expect_partial(found: Partial, right: Partial, tolerance: float = 1e-5) -> None:
    for name, axes in FIELDS.items():
        expect_close(getattr(found, name), getattr(right, name), name, axes, tolerance)


def equal_maxima_only_add_up(part: Merge) -> None:
    """one query, both of whose parts have the maximum 3:"""
    one, other = _partial([3.0], [2.0], [[4.0, 0.0]]), _partial([3.0], [1.5], [[1.0, 2.0]])
    _expect_partial(_merged(part, one, other), _partial([3.0], [3.5], [[5.0, 2.0]]))


def the_part_of_the_lower_maximum_shrinks(part: Merge) -> None:
    """maxima of ln 4 and 0, so that the second part counts a quarter; and the other way round:"""
    one, other = _partial([math.log(4)], [2.0], [[4.0]]), _partial([0.0], [1.0], [[8.0]])
    right = _partial([math.log(4)], [2.25], [[6.0]])
    _expect_partial(_merged(part, one, other), right)
    _expect_partial(_merged(part, other, one), right)


def every_query_has_its_own_maximum(part: Merge) -> None:
    """two queries, of which each has its larger score in another part:"""
    one = _partial([0.0, math.log(4)], [1.0, 3.0], [[1.0, 2.0], [3.0, 4.0]])
    other = _partial([math.log(2), 0.0], [2.0, 4.0], [[2.0, 2.0], [2.0, 6.0]])
    right = _partial([math.log(2), math.log(4)], [2.5, 4.0], [[2.5, 3.0], [3.5, 5.5]])
    _expect_partial(_merged(part, one, other), right)


def large_scores_do_not_overflow(part: Merge) -> None:
    """maxima of 1,000 and 999, and of -1,000 and -999, of which exp is infinite or 0:"""
    shrunk = math.exp(-1)
    for high, low in ((1000.0, 999.0), (-999.0, -1000.0)):
        one, other = _partial([high], [1.0], [[3.0]]), _partial([low], [1.0], [[1.0]])
        right = _partial([high], [1 + shrunk], [[3 + shrunk]])
        for given in ((one, other), (other, one)):
            found = _merged(part, *given)
            message = "has nan or infinity: only differences of maxima should be raised by exp."
            expect(bool(found.mixed.isfinite().all() and found.total.isfinite().all()), message)
            _expect_partial(found, right)


def who_saw_nothing_adds_nothing(part: Merge) -> None:
    """a part whose keys were all hidden, so that its maximum is -infinity, and two such parts:"""
    nothing, some = _partial([-math.inf], [0.0], [[0.0]]), _partial([5.0], [2.0], [[4.0]])
    _expect_partial(_merged(part, nothing, some), some)
    _expect_partial(_merged(part, some, nothing), some)
    _expect_partial(_merged(part, nothing, nothing), nothing)


def parts_give_softmax_over_all_keys(part: Merge) -> None:
    """13 keys in parts of 1, 3 and 5, three query heads of five queries:"""
    generator = torch.Generator().manual_seed(32)
    scores = 6 * torch.randn(5, 3, 13, generator=generator)
    values = torch.randn(13, 4, generator=generator)
    for size in (1, 3, 5):
        whole = Partial(torch.full((5, 3), -math.inf), torch.zeros(5, 3), torch.zeros(5, 3, 4))
        for own, rows in zip(scores.split(size, dim=-1), values.split(size), strict=True):
            maximum = own.amax(-1)
            weights = (own - maximum.unsqueeze(-1)).exp()
            whole = _merged(part, whole, Partial(maximum, weights.sum(-1), weights @ rows))
        expect_equal(list(whole.total.shape), [5, 3], "the shape of total")
        right, what = scores.softmax(-1) @ values, f"mixed / total of keys in parts of {size}"
        axes = ("query", "head", "number")
        expect_close(whole.mixed / whole.total.unsqueeze(-1), right, what, axes)


MERGE = Exercise(
    "merge",
    merge,
    (
        equal_maxima_only_add_up,
        the_part_of_the_lower_maximum_shrinks,
        every_query_has_its_own_maximum,
        large_scores_do_not_overflow,
        who_saw_nothing_adds_nothing,
        parts_give_softmax_over_all_keys,
    ),
    (
        "The new maximum is the larger of the two, query by query: torch.maximum.",
        "Each part was computed with its own maximum. To bring it to the new one, multiply its "
        "total and its mixed by exp(its maximum - the new maximum).",
        "Where both maxima are -inf their difference is nan: subtract 0 there instead, as in "
        "maximum.where(maximum.isfinite(), 0).",
    ),
    "Write `merge`: two parts of the keys, each with its maximum, its sum and its mixed values, "
    "become one, as if the keys had been in one part. A part that saw nothing adds nothing.",
    """from minigen import SamplingParams
from minigen.kernels.flash import flash_attention
from minigen.teach import load_model
from minigen.teach.attending import attend_by

llm = load_model(weights="float32", attend=attend_by(flash_attention))
with using(32, merge=mine):  # flash_attention calls it once for every tile
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)""",
    "Chapter 33 cuts a long context into parts that are computed at the same time, and merges "
    "them all at once. Write it for a list of parts, with one exp for each part.",
)

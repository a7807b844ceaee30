"""Checks of chapter 36: drafts, the two rules, the block table, the number of drafts, a tree."""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import isclose
from typing import Any

import numpy as np

from minigen.kv_cache.block_allocator import blocks_needed
from minigen.sequence import num_matching
from minigen.speculative.ngram import NgramIndex
from minigen_course.grading.exercise import expect, expect_equal, of_pure_part

NgramDrafts = Callable[[Sequence[int], int, int, int], list[int]]
AcceptedTokens = Callable[[Sequence[int], Sequence[int]], list[int]]
AcceptOrRedraw = Callable[[np.ndarray, np.ndarray, int, float, float], int]
AfterVerifying = Callable[[int, int, int, int, int], tuple[int, int, int]]
BestCount = Callable[[float, Sequence[float]], int]
TreeMask = Callable[[Sequence[int]], np.ndarray]


# Drafts from the text itself


def _expect_drafts(
    part: NgramDrafts, token_ids: list[int], limits: tuple[int, int, int], right: list[int]
) -> None:
    count, shortest, longest = limits
    given = list(token_ids)
    found = part(given, *limits)
    what = f"the drafts for {token_ids}, count {count}, shortest {shortest}, longest {longest}"
    expect(isinstance(found, list | tuple), f"{what}: got {found!r}; return a list of tokens.")
    expect_equal(found, right, what)
    expect_equal(given, token_ids, f"{what}: the text, which must not change")


def what_followed_before(part: NgramDrafts) -> None:
    """a text whose last tokens occurred once before:"""
    _expect_drafts(part, [1, 2, 3, 4, 5, 1, 2], (3, 2, 2), [3, 4, 5])
    _expect_drafts(part, [9, 1, 2, 3, 4, 5, 1, 2], (2, 1, 4), [3, 4])
    _expect_drafts(part, [8, 3, 8], (1, 1, 1), [3])


def nothing_without_an_occurrence(part: NgramDrafts) -> None:
    """a text whose last tokens never occurred before:"""
    for token_ids in ([1, 2, 3, 4], [7], [], [4, 1, 2, 3]):
        _expect_drafts(part, token_ids, (3, 1, 3), [])
    _expect_drafts(part, [1, 2, 3, 9, 2], (3, 2, 4), [])


def the_latest_occurrence_decides(part: NgramDrafts) -> None:
    """a text whose last tokens occurred several times:"""
    _expect_drafts(part, [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2], (2, 2, 2), [7, 1])
    _expect_drafts(part, [3, 4, 3, 5, 3], (1, 1, 3), [5])


def longer_ends_come_first(part: NgramDrafts) -> None:
    """a long end that occurred early, and a short one that occurred later:"""
    text = [5, 1, 2, 8, 0, 2, 9, 5, 1, 2]
    _expect_drafts(part, text, (1, 1, 3), [8])
    _expect_drafts(part, text, (1, 1, 9), [8])
    _expect_drafts(part, text, (1, 1, 1), [9])
    _expect_drafts(part, [5, 1, 2, 8, 1, 2, 9, 5, 1, 2], (1, 2, 2), [9])


def a_text_that_repeats_itself_goes_on(part: NgramDrafts) -> None:
    """fewer tokens behind the occurrence than drafts are wanted:"""
    _expect_drafts(part, [7, 8, 7, 8], (5, 1, 2), [7, 8, 7, 8, 7])
    _expect_drafts(part, [5, 5], (3, 1, 4), [5, 5, 5])
    _expect_drafts(part, [1, 2, 3, 1], (4, 1, 1), [2, 3, 1, 2])
    _expect_drafts(part, [1, 2, 3, 1], (0, 1, 1), [])


def random_texts(part: NgramDrafts) -> None:
    """random texts, with what the engine's own proposer returns:"""
    drawn = random.Random(1)
    for _ in range(150):
        token_ids = [drawn.randrange(3) for _ in range(drawn.randint(1, 12))]
        shortest = drawn.randint(1, 3)
        limits = (drawn.randint(1, 5), shortest, shortest + drawn.randint(0, 2))
        index = NgramIndex(*limits[1:])
        index.extend(token_ids)
        place = index.find(token_ids)
        right = [] if place is None else index.following(place, limits[0])
        _expect_drafts(part, token_ids, limits, right)


# Sample and match


def _expect_accepted(part: AcceptedTokens, drafts: Any, sampled: Any, right: list[int]) -> None:
    found = part(drafts, sampled)
    what = f"the tokens of a step with the drafts {list(drafts)} and the samples {list(sampled)}"
    expect(isinstance(found, list | tuple), f"{what}: got {found!r}; return a list of tokens.")
    expect_equal(found, right, what)


def no_drafts(part: AcceptedTokens) -> None:
    """a step without drafts:"""
    _expect_accepted(part, [], [4], [4])


def all_drafts_are_right(part: AcceptedTokens) -> None:
    """all drafts are right, so the sample after the last one counts as well:"""
    _expect_accepted(part, [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4])
    _expect_accepted(part, [9], [9, 9], [9, 9])


def the_first_draft_is_wrong(part: AcceptedTokens) -> None:
    """the first draft is wrong:"""
    _expect_accepted(part, [1, 2, 3], [5, 2, 3, 4], [5])
    _expect_accepted(part, [0], [5, 0], [5])


def a_later_draft_is_wrong(part: AcceptedTokens) -> None:
    """a draft in the middle is wrong, and what follows it looks right:"""
    _expect_accepted(part, [1, 2, 3], [1, 9, 3, 4], [1, 9])
    _expect_accepted(part, [1, 2, 3], [1, 2, 9, 4], [1, 2, 9])
    _expect_accepted(part, [0, 0, 0], [0, 7, 0, 0], [0, 7])


def every_pattern_of_right_and_wrong(part: AcceptedTokens) -> None:
    """every pattern of right and wrong drafts, with up to four of them:"""
    for count in range(5):
        for wrong in product((0, 1), repeat=count):
            drafts = list(range(10, 10 + count))
            sampled = [each + 50 * is_wrong for each, is_wrong in zip(drafts, wrong, strict=True)]
            sampled.append(99)
            right = sampled[: 1 + num_matching(drafts, sampled)]
            _expect_accepted(part, list(drafts), list(sampled), right)


def what_is_given_stays(part: AcceptedTokens) -> None:
    """the lists that are given, and tuples in their place:"""
    drafts, sampled = [1, 2], [1, 3, 4]
    part(drafts, sampled)
    expect_equal(drafts, [1, 2], "the drafts, which must not change")
    expect_equal(sampled, [1, 3, 4], "the samples, which must not change")
    _expect_accepted(part, (1, 2), (1, 2, 3), [1, 2, 3])


# Accept or redraw

GRID = 12  # midpoints of equal parts of [0, 1): exact for shares that are multiples of 1 / 12
PIECES = 24  # probabilities are multiples of 1 / 24


def _vector(pieces: Sequence[int]) -> np.ndarray:
    return np.array(pieces, np.float64) / PIECES


def _pair(p: Sequence[int], q: Sequence[int]) -> str:
    """Return both as a text of fractions."""
    one, other = (", ".join(str(Fraction(each, PIECES)) for each in both) for both in (p, q))
    return f"p = ({one}), q = ({other})"


def _token(
    part: AcceptOrRedraw, p: Sequence[int], q: Sequence[int], drafted: int, *draws: float
) -> int:
    """Call the part with vectors of its own; expect a token of the vocabulary."""
    target, draft = _vector(p), _vector(q)
    found = part(target, draft, drafted, *draws)
    what = f"{_pair(p, q)}, drafted {drafted}, accept_draw {draws[0]}, redraw {draws[1]}"
    token = _token_of(found, len(p), what)
    unchanged = (target == _vector(p)).all() and (draft == _vector(q)).all()
    expect(unchanged, f"{what}: p and q must not change.")
    return token


def _token_of(found: Any, size: int, what: str) -> int:
    is_token = isinstance(found, int | np.integer) and not isinstance(found, bool)
    expect(is_token, f"{what}: got {found!r}; return a token, a whole number.")
    in_range = f"it should be one of the {size} tokens from 0 to {size - 1}"
    expect(0 <= found < size, f"{what}: got the token {found}; {in_range}.")
    return int(found)


def _parts(drawn: random.Random, size: int) -> list[int]:
    """Draw a vector of whole pieces with the sum `PIECES`; some are 0."""
    cuts = sorted(drawn.choices(range(PIECES + 1), k=size - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, PIECES], strict=True)]


def _pairs() -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs p, q whose chances of acceptance and of a redraw are multiples of 1 / `GRID`."""
    drawn = random.Random(7)
    num_found = 0
    while num_found < 25:
        size = drawn.randint(2, 4)
        p, q = _parts(drawn, size), _parts(drawn, size)
        left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        exact = all(b == 0 or GRID * a % b == 0 for a, b in zip(p, q, strict=True) if a < b)
        if sum(left) and exact and all(GRID * each % sum(left) == 0 for each in left):
            num_found += 1
            yield p, q


def _midpoints() -> list[float]:
    return [(index + 0.5) / GRID for index in range(GRID)]


def a_likely_draft_is_accepted(part: AcceptOrRedraw) -> None:
    """a drafted token that the model finds at least as likely as the drafter does:"""
    for p, q in (([12, 12], [6, 18]), ([12, 12], [12, 12]), ([24, 0], [1, 23])):
        for draw, redraw in product((0.0, 0.5, 1 - 2**-53), repeat=2):
            found = _token(part, p, q, 0, draw, redraw)
            what = f"{_pair(p, q)}, drafted 0, accept_draw {draw}"
            expect_equal(found, 0, f"{what}: the token")


def an_unlikely_draft_is_accepted_sometimes(part: AcceptOrRedraw) -> None:
    """a drafted token with p < q is accepted with the probability p / q:"""
    for p, q, share in (([6, 18], [12, 12], 0.5), ([6, 18], [24, 0], 0.25), ([0, 24], [12, 12], 0)):
        for draw in (0.0, share - 2**-40, share, share + 2**-40, 1 - 2**-53):
            if draw >= 0:
                found = _token(part, p, q, 0, draw, 0.5)
                what = f"{_pair(p, q)}, drafted 0, accept_draw {draw}"
                expect_equal(found, 0 if draw < share else 1, f"{what}: the token")


def a_redraw_takes_what_is_missing(part: AcceptOrRedraw) -> None:
    """a rejected token: max(0, p - q), divided by its sum, decides:"""
    p, q = [0, 6, 3, 15], [12, 0, 6, 6]  # left: 0, 6, 0, 9
    for redraw, right in ((0.0, 1), (0.39, 1), (0.41, 3), (0.99, 3)):
        found = _token(part, p, q, 0, 0.5, redraw)
        what = f"{_pair(p, q)}, drafted 0, redraw {redraw}"
        expect_equal(found, right, f"{what}: the token")
    found = _token(part, [12, 0, 12, 0], [0, 24, 0, 0], 1, 0.0, 0.5)
    expect_equal(found, 2, "two tokens of the chance 1/2 each, redraw 0.5: the token")


def the_largest_draw_gives_a_token(part: AcceptOrRedraw) -> None:
    """the largest draw, 1 - 2^-53, where cumulated probabilities do not quite reach 1:"""
    target = np.array([0.1] * 10 + [0.0])
    draft = np.array([0.0] * 10 + [1.0])
    found = part(target, draft, 10, 0.5, 1 - 2**-53)
    what = "ten tokens of 0.1 each and one of 0, drafted 10, redraw 1 - 2^-53"
    token = _token_of(found, 11, what)
    expect_equal(token, 9, f"{what}: the last token with a chance")


def the_chance_of_every_token_is_the_models(part: AcceptOrRedraw) -> None:
    """all draws together: over drafts from q, every token comes with its probability p:"""
    for p, q in _pairs():
        chances = [Fraction(0)] * len(p)
        for drafted, pieces in enumerate(q):
            if not pieces:
                continue
            for draw in _midpoints():
                found = [_token(part, p, q, drafted, draw, each) for each in _midpoints()]
                for each in found:
                    chances[each] += Fraction(pieces, PIECES * GRID * GRID)
        for token, chance in enumerate(chances):
            right = Fraction(p[token], PIECES)
            what = f"{_pair(p, q)}: the chance of token {token}"
            expect(chance == right, f"{what} is {chance}; it should be {right}.")


# The block table


def _expect_after(part: AfterVerifying, given: tuple[int, ...], right: tuple[int, ...]) -> None:
    names = "num_known", "num_drafts", "num_right", "num_blocks", "block_size"
    what = ", ".join(f"{name} = {each}" for name, each in zip(names, given, strict=True))
    found = part(*given)
    is_triple = isinstance(found, list | tuple) and len(found) == 3
    expect(is_triple, f"{what}: got {found!r}; return three numbers.")
    results = "tokens with valid keys and values", "blocks to publish", "blocks that are missing"
    for name, mine, its in zip(results, found, right, strict=True):
        expect_equal(mine, its, f"{what}: {name}")


def without_drafts(part: AfterVerifying) -> None:
    """a step without drafts:"""
    _expect_after(part, (6, 0, 0, 2, 4), (6, 1, 0))
    _expect_after(part, (8, 0, 0, 2, 4), (8, 2, 1))
    _expect_after(part, (1, 0, 0, 1, 4), (1, 0, 0))


def wrong_drafts_are_not_computed(part: AfterVerifying) -> None:
    """drafts that were wrong:"""
    _expect_after(part, (6, 5, 0, 3, 4), (6, 1, 0))
    _expect_after(part, (6, 5, 1, 3, 4), (7, 1, 1))
    _expect_after(part, (5, 3, 2, 2, 4), (7, 1, 1))


def the_last_token_is_not_computed(part: AfterVerifying) -> None:
    """all drafts are right; the token after them was only sampled:"""
    _expect_after(part, (5, 2, 2, 2, 4), (7, 1, 1))
    _expect_after(part, (5, 3, 3, 2, 4), (8, 2, 1))


def half_wrong_blocks_are_not_published(part: AfterVerifying) -> None:
    """a block that is full, but with wrong drafts at its end:"""
    _expect_after(part, (5, 3, 0, 2, 4), (5, 1, 1))
    _expect_after(part, (1, 7, 2, 2, 4), (3, 0, 1))
    _expect_after(part, (1, 7, 3, 2, 4), (4, 1, 1))


def spare_blocks_are_used_again(part: AfterVerifying) -> None:
    """a table with more blocks than the next step needs:"""
    _expect_after(part, (5, 3, 0, 4, 4), (5, 1, 0))
    _expect_after(part, (5, 1, 0, 9, 4), (5, 1, 0))
    _expect_after(part, (3, 9, 9, 3, 4), (12, 3, 3))


def all_small_cases(part: AfterVerifying) -> None:
    """all small sequences, numbers of drafts and block sizes:"""
    for known, drafts, size in product(range(1, 9), range(4), range(1, 5)):
        for right, spare in product(range(drafts + 1), range(3)):
            num_blocks = blocks_needed(known + drafts, size) + spare
            computed = known + right
            missing = blocks_needed(computed + 1 + drafts, size) - num_blocks
            given = known, drafts, right, num_blocks, size
            _expect_after(part, given, (computed, computed // size, max(missing, 0)))


# The number of drafts


def _expect_best(part: BestCount, acceptance: float, costs: list[float], right: int) -> None:
    found = part(acceptance, costs)
    what = f"acceptance {acceptance:.4g} and the costs {[round(each, 3) for each in costs]}"
    is_count = isinstance(found, int | np.integer) and not isinstance(found, bool)
    expect(is_count, f"{what}: got {found!r}; return the number of drafts, a whole number.")
    expect_equal(int(found), right, f"{what}: the number of drafts")


def drafts_that_are_never_right(part: BestCount) -> None:
    """an acceptance of 0:"""
    _expect_best(part, 0.0, [1.0, 1.1, 1.2], 0)
    _expect_best(part, 0.0, [1.0, 1.0, 1.0], 0)


def drafts_that_are_always_right(part: BestCount) -> None:
    """an acceptance of 1:"""
    _expect_best(part, 1.0, [1.0, 1.2, 1.4, 1.6], 3)
    _expect_best(part, 1.0, [1.0, 1.5, 2.0, 4.5], 2)
    _expect_best(part, 1.0, [1.0, 2.5, 4.0], 0)


def the_fewest_among_equals(part: BestCount) -> None:
    """several numbers of drafts that are equally good:"""
    _expect_best(part, 1.0, [1.0, 2.0, 3.0], 0)
    _expect_best(part, 1.0, [1.0, 1.0, 1.5, 2.0], 1)
    _expect_best(part, 0.5, [1.0, 1.5, 1.75], 0)


def some_are_right(part: BestCount) -> None:
    """an acceptance between 0 and 1:"""
    costs = [1.0, 1.2, 1.21, 1.22, 1.26, 1.3, 1.35, 1.39]
    for acceptance, right in ((0.1, 0), (0.3, 3), (0.5, 4), (0.8, 7), (0.95, 7)):
        _expect_best(part, acceptance, costs, right)
    _expect_best(part, 0.8, [1.0], 0)
    _expect_best(part, 0.9, [1.0, 1.4, 1.6, 2.1, 2.8], 2)


def costs_with_a_step(part: BestCount) -> None:
    """costs that jump and then stay, so that the best number lies behind a worse one:"""
    _expect_best(part, 0.9, [1.0, 2.0, 2.0, 2.0], 3)
    _expect_best(part, 0.7, [1.0, 1.1, 2.4, 2.4, 2.4, 2.4], 1)
    _expect_best(part, 0.95, [1.0, 1.1, 2.4, 2.4, 2.4, 2.4], 5)


def random_costs(part: BestCount) -> None:
    """random acceptances and costs:"""
    drawn = random.Random(3)
    for _ in range(100):
        acceptance, size = drawn.random(), drawn.randint(2, 9)
        costs = [1.0, *(1 + drawn.random() * count / 4 for count in range(1, size))]
        speeds = [
            (1 - acceptance ** (count + 1)) / (1 - acceptance) / cost
            for count, cost in enumerate(costs)
        ]
        first, second = sorted(speeds)[-2:]
        if not isclose(first, second, rel_tol=1e-6):
            _expect_best(part, acceptance, costs, speeds.index(max(speeds)))


# A tree of drafts


def _expect_mask(part: TreeMask, parents: list[int], right: list[set[int]]) -> None:
    found = part(list(parents))
    what = f"parents {parents}"
    is_mask = isinstance(found, np.ndarray) and found.dtype == bool
    expect(is_mask, f"{what}: got {type(found).__name__}; return an array of bool.")
    size = len(parents)
    expect_equal(list(found.shape), [size, size], f"{what}: the mask's shape")
    for node, seen in enumerate(right):
        mine = np.flatnonzero(found[node]).tolist()
        expect_equal(mine, sorted(seen), f"{what}: what node {node} sees")


def _ancestors(parents: list[int], node: int) -> set[int]:
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


def a_chain(part: TreeMask) -> None:
    """a chain, where every node sees all before it:"""
    for length in (1, 2, 5):
        parents = list(range(-1, length - 1))
        _expect_mask(part, parents, [set(range(node + 1)) for node in range(length)])


def seven_nodes(part: TreeMask) -> None:
    """a tree of seven nodes:"""
    right = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 2, 6}]
    _expect_mask(part, [-1, 0, 0, 1, 1, 2, 2], right)
    right = [{0}, {0, 1}, {0, 1, 2}, {0, 3}, {0, 1, 4}, {0, 1, 2, 5}, {0, 3, 6}]
    _expect_mask(part, [-1, 0, 1, 0, 1, 2, 3], right)


def several_first_drafts(part: TreeMask) -> None:
    """several nodes that follow the text itself, and no node at all:"""
    _expect_mask(part, [-1, -1, -1], [{0}, {1}, {2}])
    _expect_mask(part, [-1, -1, 0, 1, 3], [{0}, {1}, {0, 2}, {1, 3}, {1, 3, 4}])
    _expect_mask(part, [], [])


def random_trees(part: TreeMask) -> None:
    """random trees:"""
    drawn = random.Random(5)
    for _ in range(40):
        parents = [drawn.randint(-1, node - 1) for node in range(drawn.randint(1, 12))]
        right = [_ancestors(parents, node) for node in range(len(parents))]
        _expect_mask(part, parents, right)


def parents_come_first(part: TreeMask) -> None:
    """a parent that comes after its child, or does not exist:"""
    for parents in ([-1, 2, 0], [0], [-1, 1], [-1, 0, 3], [-1, -2], [1, -1]):
        try:
            found = part(list(parents))
        except ValueError as error:
            expect(str(error), f"parents {parents}: the ValueError should say what is wrong.")
            continue
        expect(False, f"parents {parents}: got {found!r}; it should raise ValueError.")


CHECKS = {
    "ngram_drafts": (
        what_followed_before,
        nothing_without_an_occurrence,
        the_latest_occurrence_decides,
        longer_ends_come_first,
        a_text_that_repeats_itself_goes_on,
        random_texts,
    ),
    "accepted_tokens": (
        no_drafts,
        all_drafts_are_right,
        the_first_draft_is_wrong,
        a_later_draft_is_wrong,
        every_pattern_of_right_and_wrong,
        what_is_given_stays,
    ),
    "accept_or_redraw": (
        a_likely_draft_is_accepted,
        an_unlikely_draft_is_accepted_sometimes,
        a_redraw_takes_what_is_missing,
        the_chance_of_every_token_is_the_models,
        the_largest_draw_gives_a_token,
    ),
    "after_verifying": (
        without_drafts,
        wrong_drafts_are_not_computed,
        the_last_token_is_not_computed,
        half_wrong_blocks_are_not_published,
        spare_blocks_are_used_again,
        all_small_cases,
    ),
    "best_count": (
        drafts_that_are_never_right,
        drafts_that_are_always_right,
        the_fewest_among_equals,
        some_are_right,
        costs_with_a_step,
        random_costs,
    ),
    "tree_mask": of_pure_part(
        a_chain,
        seven_nodes,
        several_first_drafts,
        random_trees,
        parents_come_first,
    ),
}

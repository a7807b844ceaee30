"""The classical rule draws from the model's distribution; the tests that say so can also fail."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minigen_course.ch36_speculative import reference as rule
from minigen_course.ch36_speculative.reference import RuleShares, accept_or_redraw

P = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
Q = np.array([0.20, 0.30, 0.05, 0.25, 0.10, 0.10])
ROUNDS, SUSPECT, CERTAIN = 20_000, 1e-3, 1e-9
SEEDS = range(8)


def of_p_and_q(shares: RuleShares) -> RuleShares:
    """Return the rule with its shares for P and Q: thousands of rounds would compute the same."""

    def known(share: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        values = share(P, Q)

        def of_a_round(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
            assert target is P
            assert draft is Q
            return values

        return of_a_round

    return RuleShares(known(shares.accept), known(shares.redraw))


def normal(weights: list[int]) -> np.ndarray:
    found = np.array(weights, float)
    return found / found.sum()


distributions = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any).map(normal)


@given(distributions, distributions)
def test_the_classical_rule_gives_exactly_the_target(target: np.ndarray, draft: np.ndarray) -> None:
    assert rule.CLASSICAL.outcome(target, draft) == pytest.approx(target, abs=1e-12)


@given(distributions, distributions)
def test_its_acceptance_is_the_largest(target: np.ndarray, draft: np.ndarray) -> None:
    largest = rule.overlap(target, draft)
    assert rule.own_numbers(target, draft) <= rule.same_number(target, draft) + 1
    assert rule.same_number(target, draft) <= largest + 1e-12
    assert rule.own_numbers(target, draft) <= largest + 1e-12
    accepted = float((draft * rule.least_ratio(target, draft)).sum())
    assert accepted == pytest.approx(largest)


def test_equal_distributions_always_agree_by_one_number() -> None:
    assert rule.same_number(P, P) == rule.overlap(P, P) == pytest.approx(1)
    assert rule.own_numbers(P, P) == pytest.approx(float((P * P).sum()))


def test_shared_intervals_are_counted_by_drawing() -> None:
    draws = np.random.default_rng(0).random(4000)
    equal = [rule.drawn(P, float(each)) == rule.drawn(Q, float(each)) for each in draws]
    assert np.mean(equal) == pytest.approx(rule.same_number(P, Q), abs=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_right_rule_is_not_convicted(seed: int) -> None:
    for right in (accept_or_redraw, of_p_and_q(rule.CLASSICAL)):
        assert rule.chi_square(rule.simulated(right, P, Q, ROUNDS, seed), P) > SUSPECT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong", [rule.REDRAWS_FROM_TARGET, rule.among_likeliest(3)])
def test_a_planted_wrong_rule_is_convicted(wrong: RuleShares, seed: int) -> None:
    found = rule.simulated(of_p_and_q(wrong), P, Q, ROUNDS, seed)
    assert rule.chi_square(found, P) < CERTAIN


def test_the_draws_of_a_rule_are_as_its_sum_says() -> None:
    for each in (rule.REDRAWS_FROM_TARGET, rule.among_likeliest(2)):
        counts = rule.simulated(of_p_and_q(each), P, Q, ROUNDS, 1)
        assert rule.chi_square(counts, each.outcome(P, Q)) > SUSPECT


def test_the_p_value_is_scipys() -> None:
    counts = np.array([8100, 4900, 3050, 1950, 1150, 850])
    assert rule.chi_square(counts, P) == pytest.approx(stats.chisquare(counts, 20_000 * P).pvalue)


def test_rare_tokens_are_counted_together() -> None:
    target = np.array([0.5, 0.4998, 0.0001, 0.0001])
    counts = np.array([5000, 4997, 2, 1])
    joined = np.array([5000, 4997, 3]), 10_000 * np.array([0.5, 0.4998, 0.0002])
    assert rule.chi_square(counts, target) == pytest.approx(stats.chisquare(*joined).pvalue)


def test_a_token_that_cannot_come_is_certain_proof() -> None:
    assert rule.chi_square(np.array([60, 39, 1]), np.array([0.6, 0.4, 0.0])) == 0
    assert rule.chi_square(np.array([60, 40, 0]), np.array([0.6, 0.4, 0.0])) > SUSPECT


def test_the_likeliest_are_counted_among_equals_by_their_number() -> None:
    assert rule.likeliest(np.array([0.2, 0.3, 0.3, 0.2]), 3).tolist() == [True, True, True, False]

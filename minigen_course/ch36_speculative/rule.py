"""The classical rule, two wrong relatives, and the two tests that tell them apart.

A rule turns a draft that was drawn from q into a token that should be distributed as p. Sources:
Leviathan et al. 2022; Chen et al. 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

Probs = Float64[np.ndarray, " vocab"]
# (target p, draft q, drafted token, draw for the acceptance, draw for the second choice) -> token
Rule = Callable[[Probs, Probs, int, float, float], int]

LEAST_EXPECTED = 5.0  # a chi-square joins tokens that are expected less often


@dataclass(frozen=True)
class RuleShares:
    """A rule as two functions of (p, q): the chance to accept each token, and the second choice."""

    accept: Callable[[Probs, Probs], Probs]
    redraw: Callable[[Probs, Probs], Probs]

    def outcome(self, target: Probs, draft: Probs) -> Probs:
        """Return the exact probability of each token after the rule: no draws, a sum."""
        accepted = draft * self.accept(target, draft)
        return accepted + (1 - accepted.sum()) * self.redraw(target, draft)

    def __call__(
        self, target: Probs, draft: Probs, drafted: int, accept_draw: float, redraw: float
    ) -> int:
        """Apply the rule to one draft, by two uniform draws in [0, 1)."""
        if accept_draw < self.accept(target, draft)[drafted]:
            return drafted
        return drawn(self.redraw(target, draft), redraw)


def drawn(probs: Probs, uniform: float) -> int:
    """Return the first token at which the cumulated probability exceeds a uniform draw."""
    reached = probs.cumsum()
    return int(np.searchsorted(reached, uniform * reached[-1], side="right"))


def least_ratio(target: Probs, draft: Probs) -> Probs:
    """Return min(1, p / q) of each token; 1 where q is 0, because it is never drafted."""
    ratio = np.divide(target, draft, out=np.ones_like(target), where=draft > 0)
    return np.minimum(1.0, ratio)


def lacking(target: Probs, draft: Probs) -> Probs:
    """Return max(0, p - q) divided by its sum; p itself where p equals q."""
    rest = np.maximum(target - draft, 0)
    return rest / rest.sum() if rest.any() else target


def likeliest(target: Probs, count: int) -> Bool[np.ndarray, " vocab"]:
    """Return which tokens are among the `count` most likely ones."""
    ranks = np.argsort(np.argsort(-target, kind="stable"), kind="stable")
    return ranks < count


def among_likeliest(count: int) -> RuleShares:
    """Return the naive rule: accept a draft if it is among the target's `count` likeliest tokens.

    Otherwise draw from the target.
    """
    return RuleShares(lambda p, q: likeliest(p, count).astype(float), lambda p, q: p)


CLASSICAL = RuleShares(least_ratio, lacking)
REDRAWS_FROM_TARGET = RuleShares(least_ratio, lambda p, q: p)  # wrong


def simulated(
    rule: Rule, target: Probs, draft: Probs, rounds: int, seed: int
) -> Int64[np.ndarray, " vocab"]:
    """Return how often each token came out, in rounds that draft from `draft` and apply a rule."""
    random = np.random.default_rng(seed)
    drafts = random.choice(len(draft), size=rounds, p=draft / draft.sum())
    draws = random.random((rounds, 2))
    found = [
        rule(target, draft, int(drafted), *map(float, pair))
        for drafted, pair in zip(drafts, draws, strict=True)
    ]
    return np.bincount(found, minlength=len(target))


def chi_square(counts: Int64[np.ndarray, " vocab"], target: Probs) -> float:
    """Return the p-value of the counts if the target is right: tiny if they do not fit it.

    Tokens that are expected fewer than 5 times are counted together.
    """
    expected = counts.sum() * target / target.sum()
    rare = expected < LEAST_EXPECTED
    observed, wanted = counts[~rare], expected[~rare]
    if rare.any():
        observed = np.append(observed, counts[rare].sum())
        wanted = np.append(wanted, expected[rare].sum())
    if (observed[wanted == 0] > 0).any():
        return 0.0  # a token that the target never draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    tail = torch.special.gammaincc(*torch.tensor([freedom, statistic]).double() / 2)
    return float(tail)


# How often a draft is right


def overlap(target: Probs, draft: Probs) -> float:
    """Return the share of drafts that the classical rule accepts: the sum of min(p, q)."""
    return float(np.minimum(target, draft).sum())


def same_number(target: Probs, draft: Probs) -> float:
    """Return how often both draw the same token if they draw by one random number.

    Each token is an interval of [0, 1) in both; the common part of its two intervals counts.
    """
    ends, other_ends = target.cumsum(), draft.cumsum()
    starts, other_starts = ends - target, other_ends - draft
    common = np.minimum(ends, other_ends) - np.maximum(starts, other_starts)
    return float(np.maximum(common, 0).sum())


def own_numbers(target: Probs, draft: Probs) -> float:
    """Return how often both draw the same token if each has a random number of its own."""
    return float((target * draft).sum())

"""The rules of speculation, each as a small function: the solutions of chapter 36.

The engine has its own versions of the first two and of the fourth, which are faster or do more at
once; the tests compare them. Sources: Saxena 2023 (prompt lookup); Daliri et al. 2024 (comparing
drafts with samples); Leviathan et al. 2022 and Chen et al. 2023 (accept or redraw, and the expected
number of tokens); Miao et al. 2023 (SpecInfer, the mask of a tree).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from minigen.kv_cache.block_allocator import blocks_needed
from minigen.sequence import Sequence as EngineSequence

Drafts = Callable[[Sequence[int], int, int, int], list[int]]


def ngram_drafts(token_ids: Sequence[int], count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` drafts: the tokens that followed when the last few tokens occurred before.

    The longest end of the text that occurs before decides, of `longest` down to `shortest` tokens,
    and its latest occurrence with a token behind it. Where the text ends before there are `count`
    tokens, the drafts go on from that place again. Without such an occurrence there are none.
    """
    for length in range(min(longest, len(token_ids)), shortest - 1, -1):
        end = token_ids[len(token_ids) - length :]
        for place in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[place - length : place] == end:
                known = token_ids[place : place + count]
                return [known[index % len(known)] for index in range(count)]
    return []


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that a step with drafts gives: the right drafts, and one token more.

    `sampled` has the model's own token at each place: `sampled[i]` was drawn after the first i
    drafts, so there is one more than drafts. A draft is right if it equals the model's own token
    and all drafts before it are right.
    """
    num_right = 0
    while num_right < len(drafts) and drafts[num_right] == sampled[num_right]:
        num_right += 1
    return list(sampled[: num_right + 1])


def accept_or_redraw(
    target: Float64[np.ndarray, " vocab"],
    draft: Float64[np.ndarray, " vocab"],
    drafted: int,
    accept_draw: float,
    redraw: float,
) -> int:
    """Return a token that is distributed as `target` if `drafted` was drawn from `draft`.

    Both are probabilities p and q over the vocabulary. The drafted token is accepted if
    `accept_draw` is below min(1, p / q) of that token. Otherwise the token is drawn from
    max(0, p - q), divided by its sum: it is the first one at which the cumulated probability
    exceeds `redraw`. Both draws are uniform in [0, 1), so 1 - 2^-53 is the largest.
    """
    if accept_draw * draft[drafted] < target[drafted]:
        return drafted
    reached = np.maximum(target - draft, 0).cumsum()
    # Less than the total even for the largest draw, despite rounding.
    return int(np.searchsorted(reached, redraw * reached[-1], side="right"))


def after_verifying(
    num_known: int, num_drafts: int, num_right: int, num_blocks: int, block_size: int
) -> tuple[int, int, int]:
    """Return what a sequence has after a step that verified drafts.

    Before the step it had `num_known` tokens, and keys and values of all but the last one. The step
    computed those of the last one and of `num_drafts` drafts, of which `num_right` are right, into
    the slots of its `num_blocks` blocks. The result: the number of tokens with valid keys and
    values, how many blocks are full of them (the prefix cache may have these), and how many blocks
    the next step lacks, if it verifies `num_drafts` drafts again.
    """
    num_computed = num_known + num_right
    num_slots = num_computed + 1 + num_drafts
    num_missing = max(blocks_needed(num_slots, block_size) - num_blocks, 0)
    return num_computed, num_computed // block_size, num_missing


def best_count(acceptance: float, step_costs: Sequence[float]) -> int:
    """Return the number of drafts per step that gives the most tokens per second.

    `step_costs[k]` is the time of a step with k drafts (k + 1 rows), as a multiple of the time
    without drafts. A draft is right with the probability `acceptance` if those before it are, so k
    drafts give 1 + a + a^2 + ... + a^k tokens on average. Of equally good numbers, the smallest.
    """
    speeds = [
        sum(acceptance**place for place in range(count + 1)) / cost
        for count, cost in enumerate(step_costs)
    ]
    return speeds.index(max(speeds))


def tree_mask(parents: Sequence[int]) -> Bool[np.ndarray, "nodes nodes"]:
    """Return which nodes of a tree of drafts each node attends to: its ancestors and itself.

    `parents[i]` is the node before node i, and -1 if node i follows the text itself. Raises
    `ValueError` for a parent that does not come before its child.
    """
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"Node {node} has the parent {parent}; a parent must come before its children, and "
                "-1 stands for the text."
            )
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@dataclass
class TextProposer:
    """A proposer for `LLM.load(proposer=...)` that asks a function such as `ngram_drafts`."""

    drafts: Drafts
    shortest: int = 2
    longest: int = 4

    def propose(
        self, sequences: Sequence[EngineSequence], counts: Sequence[int]
    ) -> list[list[int]]:
        """Return the function's drafts for each sequence."""
        return [
            self.drafts(each.token_ids, count, self.shortest, self.longest)
            for each, count in zip(sequences, counts, strict=True)
        ]

    def end(self, sequence: EngineSequence) -> None:
        """Do nothing: the function remembers nothing."""


# The rule as two functions of p and q, wrong relatives of it, and the tests that tell them apart

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

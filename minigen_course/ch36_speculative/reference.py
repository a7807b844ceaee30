"""The rules of speculation, each as a small function: the solutions of chapter 36.

The engine has its own versions of the first two and of the fourth, which are faster or do more at
once; the tests compare them. Sources: Saxena 2023 (prompt lookup); Daliri et al. 2024 (comparing
drafts with samples); Leviathan et al. 2022 and Chen et al. 2023 (accept or redraw, and the expected
number of tokens); Miao et al. 2023 (SpecInfer, the mask of a tree).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

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

"""Cases of chapter 36's exercises, drawn by a seed."""

from math import isclose
from random import Random
from typing import Any

import numpy as np

from minigen.kv_cache.block_allocator import blocks_needed
from minigen_course.grading.varied import Varied, outcome

PARTS = 997  # a prime, so that no draw falls on a limit of percents


def _ngram_drafts(random: Random) -> dict[str, Any]:
    shortest = random.randint(1, 2)
    return {
        "token_ids": [random.randrange(1, 5) for _ in range(random.randint(6, 14))],
        "count": random.randint(2, 6),
        "shortest": shortest,
        "longest": shortest + random.randint(0, 2),
    }


def _accepted_tokens(random: Random) -> dict[str, Any]:
    drafts = [random.randrange(10, 20) for _ in range(random.randint(2, 6))]
    own = [each if random.random() < 0.7 else random.randrange(10, 20) for each in drafts]
    return {"drafts": drafts, "sampled": [*own, random.randrange(10, 20)]}


def _percents(random: Random) -> list[int]:
    cuts = sorted(random.choices(range(0, 101, 5), k=3))
    return [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]


def _accept_or_redraw(random: Random) -> dict[str, Any]:
    draws = [(random.randrange(1, PARTS), random.randrange(1, PARTS)) for _ in range(6)]
    return {
        "target": _percents(random),
        "draft": _percents(random),
        "draws": [(first / PARTS, second / PARTS) for first, second in draws],
    }


def _redrawn(
    part: Any, target: list[int], draft: list[int], draws: list[tuple[float, float]]
) -> dict[int, list[int]]:
    """Ask for the token of every draft that has a chance, with each pair of draws.

    `target` and `draft` are probabilities in percent. The result has the tokens by draft.
    """
    p, q = np.array(target) / 100, np.array(draft) / 100
    return {
        drafted: [int(part(p.copy(), q.copy(), drafted, *each)) for each in draws]
        for drafted in range(len(q))
        if q[drafted]
    }


def _after_verifying(random: Random) -> dict[str, Any]:
    known, drafts, size = random.randint(5, 40), random.randint(2, 9), random.choice((4, 8, 16))
    return {
        "num_known": known,
        "num_drafts": drafts,
        "num_right": random.randint(0, drafts),
        "num_blocks": blocks_needed(known + drafts, size) + random.choice((0, 0, 1)),
        "block_size": size,
    }


def _best_count(random: Random) -> dict[str, Any]:
    while True:
        acceptance, costs = random.randint(20, 97) / 100, [1.0]
        for _ in range(random.randint(3, 8)):
            costs.append(round(costs[-1] + random.choice((0.02, 0.05, 0.1, 0.4, 0.9)), 2))
        speeds = [
            sum(acceptance**place for place in range(count + 1)) / cost
            for count, cost in enumerate(costs)
        ]
        first, second = sorted(speeds)[-2:]
        if not isclose(first, second, rel_tol=1e-4):
            return {"acceptance": acceptance, "step_costs": costs}


def _tree_mask(random: Random) -> dict[str, Any]:
    parents = [random.randint(-1, node - 1) for node in range(random.randint(4, 9))]
    if random.random() < 0.2:
        place = random.randrange(len(parents) - 1)
        parents[place] = random.randint(place, len(parents) - 1)
    return {"parents": parents}


def _seen(part: Any, parents: list[int]) -> Any:
    """Return for each node the nodes that it attends to, or the name of the error."""
    mask = outcome(lambda: part(list(parents)))
    return mask if isinstance(mask, str) else [np.flatnonzero(row).tolist() for row in mask]


VARIED = {
    "ngram_drafts": Varied("the text, how many drafts, and both lengths", _ngram_drafts),
    "accepted_tokens": Varied("the drafts and the samples", _accepted_tokens),
    "accept_or_redraw": Varied("both probabilities, and the draws", _accept_or_redraw, _redrawn),
    "after_verifying": Varied("tokens, drafts, blocks and the block size", _after_verifying),
    "best_count": Varied("the acceptance and the costs", _best_count),
    "tree_mask": Varied("the tree, which is sometimes out of order", _tree_mask, _seen),
}

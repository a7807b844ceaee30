"""Answers to the exercises of chapter 36."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from tests.answers import Answers


def drafts_by_index(token_ids: Any, count: int, shortest: int, longest: int) -> list[int]:
    """Right, with a dict from each run to the latest place behind it."""
    after: dict[tuple[int, ...], int] = {}
    for place in range(len(token_ids)):
        for length in range(shortest, longest + 1):
            if length <= place:
                after[tuple(token_ids[place - length : place])] = place
    for length in range(longest, shortest - 1, -1):
        end = tuple(token_ids[-length:])
        if len(end) == length and end in after:
            place = after[end]
            text = list(token_ids)
            while len(text) < place + count:
                text += token_ids[place:]
            return text[place : place + count]
    return []


def drafts_by_growing(token_ids: Any, count: int, shortest: int, longest: int) -> list[int]:
    """Right: measures how long each place's run is equal to the end, and writes token by token."""
    best = (0, 0)
    for place in range(1, len(token_ids)):
        equal = 0
        while equal < min(place, longest) and token_ids[place - 1 - equal] == token_ids[~equal]:
            equal += 1
        if equal >= shortest:
            best = max(best, (equal, place))
    if best[0] == 0:
        return []
    text = list(token_ids)
    for _ in range(count):
        text.append(text[best[1] + len(text) - len(token_ids)])
    return text[len(token_ids) :]


def wrong_drafts(name: str) -> Callable[[Any, int, int, int], Any]:
    def part(token_ids: Any, count: int, shortest: int, longest: int) -> Any:
        size = len(token_ids)
        lengths = range(min(longest, size), shortest - 1, -1)
        if name == "the shortest end first":
            lengths = range(shortest, min(longest, size) + 1)
        if name == "the longest length only":
            lengths = range(longest, longest - 1, -1)
        if name == "ignores the shortest length":
            lengths = range(min(longest, size), 0, -1)
        if name == "one length too few":
            lengths = range(min(longest, size), shortest, -1)
        if name == "ignores the longest length":
            lengths = range(size, shortest - 1, -1)
        for length in lengths:
            end = token_ids[size - length :]
            places = range(size - 1, length - 1, -1)
            if name == "the first occurrence":
                places = range(length, size)
            if name == "no overlap with the end":
                places = range(size - length, length - 1, -1)
            for place in places:
                if token_ids[place - length : place] != end:
                    continue
                if name == "the occurrence itself":
                    place -= length
                if name == "one token too late":
                    place += 1
                known = token_ids[place : place + count]
                if name == "stops at the end of the text":
                    return known
                if name == "repeats the last token":
                    return [*known, *known[-1:] * (count - len(known))]
                if name == "repeats the whole text":
                    return [*token_ids, *token_ids, *token_ids][place : place + count]
                if name == "nothing if there are too few":
                    return known if len(known) == count else []
                if name == "all that follows":
                    return token_ids[place:]
                found = [known[index % len(known)] for index in range(count)] if known else []
                if name == "with the end in front":
                    return [*end, *found]
                return found
        if name == "None for nothing":
            return None
        return token_ids[-1:] * count if name == "repeats where there is nothing" else []

    return part


WRONG_DRAFTS = [
    *("the shortest end first", "the longest length only", "ignores the shortest length"),
    *("one length too few", "ignores the longest length", "the first occurrence"),
    *("no overlap with the end", "the occurrence itself", "one token too late"),
    *("stops at the end of the text", "repeats the last token", "repeats the whole text"),
    *("nothing if there are too few", "all that follows", "with the end in front"),
    *("None for nothing", "repeats where there is nothing"),
]


def accepted_by_loop(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Right: takes the model's tokens until one differs from its draft."""
    found = []
    for place, token_id in enumerate(sampled):
        found.append(token_id)
        if place == len(drafts) or drafts[place] != token_id:
            break
    return found


def accepted_by_iterators(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Right, with iterators."""
    pairs = zip(drafts, sampled, strict=False)
    right = [draft for draft, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return [*right, sampled[len(right)]]


def wrong_accepted(name: str) -> Callable[[Any, Any], Any]:
    def part(drafts: Any, sampled: Any) -> Any:
        own = list(sampled)
        if name == "the first draft is not verified":
            count = min(1, len(drafts))
        else:
            count = 0
        if name == "each draft against the row behind it":
            own = own[1:]
        while count < len(drafts) and count < len(own) and drafts[count] == own[count]:
            count += 1
        if name == "the first draft is not verified":
            return [*drafts[:count], sampled[count]]
        if name == "each draft against the row behind it":
            return [*drafts[:count], sampled[count]]
        if name == "the wrong draft is kept":
            return list(drafts[: count + 1]) if count < len(drafts) else list(sampled)
        if name == "no token more":
            return list(drafts[:count])
        if name == "no token after right drafts":
            return list(sampled[: max(count, 1)])
        if name == "no token after all drafts":
            return list(sampled[: count + 1])[: max(len(drafts), 1)]
        if name == "the last sample is added":
            return [*drafts[:count], sampled[-1]]
        if name == "the sample after the wrong draft":
            return [*drafts[:count], sampled[min(count + 1, len(drafts))]]
        if name == "all that match":
            kept = [a for a, b in zip(drafts, sampled, strict=False) if a == b]
            return [*kept, sampled[len(kept)]]
        if name == "all or nothing":
            return list(sampled) if count == len(drafts) else [sampled[0]]
        if name == "all samples":
            return list(sampled)
        if name == "how many":
            return count + 1
        if name == "changes the samples":
            del sampled[count + 1 :]
        if name == "equal tokens anywhere":
            count = 0
            while count < len(drafts) and drafts[count] in sampled:
                count += 1
        return list(sampled[: count + 1])

    return part


WRONG_ACCEPTED = [
    *("the first draft is not verified", "each draft against the row behind it"),
    *("the wrong draft is kept", "no token more", "no token after right drafts"),
    *("no token after all drafts", "the last sample is added", "the sample after the wrong draft"),
    *("all that match", "all or nothing", "all samples", "how many", "changes the samples"),
    "equal tokens anywhere",
]


def redraw_by_division(
    target: Any, draft: Any, drafted: int, accept_draw: float, redraw: float
) -> Any:
    """Right: divides, and looks for the place among the tokens that have a chance."""
    if accept_draw < min(1.0, target[drafted] / draft[drafted]):
        return drafted
    tokens = np.flatnonzero(target > draft)
    left = (target - draft)[tokens]
    place = int(np.searchsorted(np.cumsum(left / left.sum()), redraw, side="right"))
    return tokens[min(place, len(tokens) - 1)]


def redraw_in_python(
    target: Any, draft: Any, drafted: int, accept_draw: float, redraw: float
) -> Any:
    """Right, without numpy."""
    if target[drafted] >= draft[drafted] or accept_draw < target[drafted] / draft[drafted]:
        return drafted
    left = [max(float(p) - float(q), 0.0) for p, q in zip(target, draft, strict=True)]
    reached = list(accumulate(left))
    return bisect_right(reached, redraw * reached[-1])


def wrong_redraw(name: str) -> Callable[..., Any]:
    def part(target: Any, draft: Any, drafted: int, accept_draw: float, redraw: float) -> Any:
        p, q = target[drafted], draft[drafted]
        if name == "accepts by p alone":
            accepted = accept_draw < p
        elif name == "accepts where p is at least q":
            accepted = p >= q
        elif name == "accepts by q / p":
            accepted = p > 0 and accept_draw < min(1, q / p)
        elif name == "accepts all":
            accepted = True
        elif name == "accepts nothing":
            accepted = False
        elif name == "accepts at the limit":
            accepted = accept_draw * q <= p
        elif name == "accepts the likeliest tokens":
            accepted = p >= sorted(target)[-2]
        elif name == "accepts by the redraw":
            accepted = redraw * q < p
        elif name == "accepts by the overlap":
            accepted = accept_draw < np.minimum(target, draft).sum()
        else:
            accepted = accept_draw * q < p
        if accepted:
            return drafted
        left = np.maximum(target - draft, 0)
        if name == "draws from p":
            left = target.copy()
        if name == "draws from q":
            left = draft.copy()
        if name == "draws from q - p":
            left = np.maximum(draft - target, 0)
        if name == "draws from the distance":
            left = np.abs(target - draft)
        if name == "draws from p without the draft":
            left = target.copy()
            left[drafted] = 0
        if name == "draws by softmax":
            left = np.exp(left)
        if name == "the likeliest of the rest":
            return int(left.argmax())
        if name == "not divided by the sum":
            return min(int(np.searchsorted(left.cumsum(), redraw, "right")), len(target) - 1)
        if name == "draws with the first draw":
            redraw = accept_draw
        if name == "writes into p":
            target -= draft
        if name == "the draw as a limit that counts":
            reached = left.cumsum()
            return int(np.searchsorted(reached, redraw * reached[-1]))
        if name in ("behind the last token", "the last token of all"):
            place = int(np.searchsorted((left / left.sum()).cumsum(), redraw, "right"))
            return min(place, len(target) - 1) if name == "the last token of all" else place
        if name == "a vector":
            return left
        reached = left.cumsum()
        return int(np.searchsorted(reached, redraw * reached[-1], side="right"))

    return part


WRONG_REDRAWS = [
    *("accepts by p alone", "accepts where p is at least q", "accepts by q / p", "accepts all"),
    *("accepts nothing", "accepts at the limit", "accepts the likeliest tokens"),
    *("accepts by the redraw", "accepts by the overlap", "draws from p", "draws from q"),
    *("draws from q - p", "draws from the distance", "draws from p without the draft"),
    *("draws by softmax", "the likeliest of the rest", "not divided by the sum"),
    *("draws with the first draw", "writes into p", "the draw as a limit that counts"),
    *("behind the last token", "the last token of all", "a vector"),
]


def after_by_slots(
    num_known: int, num_drafts: int, num_right: int, num_blocks: int, block_size: int
) -> Any:
    """Right: looks at every slot."""
    valid = [place < num_known + num_right for place in range(num_blocks * block_size)]
    full = 0
    while all(valid[full * block_size : (full + 1) * block_size]) and full < num_blocks:
        full += 1
    missing = 0
    while (num_blocks + missing) * block_size < sum(valid) + 1 + num_drafts:
        missing += 1
    return sum(valid), full, missing


def after_by_formula(
    num_known: int, num_drafts: int, num_right: int, num_blocks: int, block_size: int
) -> Any:
    """Right, in a list; the tokens after the step are counted first."""
    length = num_known + num_right + 1
    wanted = -(-(length + num_drafts) // block_size)
    return [length - 1, (length - 1) // block_size, wanted - min(num_blocks, wanted)]


def wrong_after(name: str) -> Callable[..., Any]:
    def part(known: int, drafts: int, right: int, blocks: int, size: int) -> Any:
        computed = known + right
        if name == "all drafts count":
            computed = known + drafts
        if name == "the sampled token counts":
            computed = known + right + 1
        if name == "the last token does not count":
            computed = known - 1 + right
        if name == "right drafts are computed again":
            computed = known
        published, wanted = computed // size, -(-(computed + 1 + drafts) // size)
        if name == "publishes half blocks":
            published = -(-computed // size)
        if name == "publishes all blocks":
            published = blocks
        if name == "publishes blocks of wrong drafts":
            published = (known + drafts) // size
        if name == "publishes with the sampled token":
            published = (computed + 1) // size
        if name == "publishes only what was known":
            published = known // size
        if name == "no slot for the last token":
            wanted = -(-(computed + drafts) // size)
        if name == "a step without drafts":
            wanted = -(-(computed + 1) // size)
        if name == "a slot for the next sample":
            wanted = -(-(computed + 2 + drafts) // size)
        if name == "rounded down":
            wanted = (computed + 1 + drafts) // size
        missing = max(wanted - blocks, 0)
        if name == "fewer than none":
            missing = wanted - blocks
        if name == "all that are needed":
            missing = wanted
        if name == "blocks are given back first":
            missing = max(wanted - -(-computed // size), 0)
        if name == "tokens that are missing":
            missing = max(computed + 1 + drafts - blocks * size, 0)
        return (computed, published) if name == "two numbers" else (computed, published, missing)

    return part


WRONG_AFTER = [
    *("all drafts count", "the sampled token counts", "the last token does not count"),
    *("right drafts are computed again", "publishes half blocks", "publishes all blocks"),
    *("publishes blocks of wrong drafts", "publishes with the sampled token"),
    *("publishes only what was known", "no slot for the last token", "a step without drafts"),
    *("a slot for the next sample", "rounded down", "fewer than none", "all that are needed"),
    *("blocks are given back first", "tokens that are missing", "two numbers"),
]


def best_by_loop(acceptance: float, step_costs: Sequence[float]) -> int:
    """Right: adds one power after another."""
    best, fastest, tokens, power = 0, 0.0, 0.0, 1.0
    for count, cost in enumerate(step_costs):
        tokens += power
        power *= acceptance
        if tokens / cost > fastest:
            best, fastest = count, tokens / cost
    return best


def best_by_formula(acceptance: float, step_costs: Sequence[float]) -> int:
    """Right, by the closed form, with the case of 1 apart."""

    def speed(count: int) -> float:
        if acceptance == 1:
            return (count + 1) / step_costs[count]
        return (1 - acceptance ** (count + 1)) / (1 - acceptance) / step_costs[count]

    return max(range(len(step_costs)), key=lambda count: (speed(count), -count))


def wrong_best(name: str) -> Callable[[float, Any], Any]:
    def part(acceptance: float, step_costs: Any) -> Any:
        def tokens(count: int) -> float:
            if name == "no token of the model":
                return sum(acceptance**place for place in range(1, count + 1))
            if name == "one power too many":
                return sum(acceptance**place for place in range(count + 2))
            if name == "every draft by itself":
                return 1 + count * acceptance
            if name == "all or nothing":
                return 1 + count * acceptance**count
            if name == "the last power only":
                return acceptance**count
            if name == "the formula alone":
                return (1 - acceptance ** (count + 1)) / (1 - acceptance)
            return sum(acceptance**place for place in range(count + 1))

        def cost(count: int) -> float:
            if name == "costs of one row less":
                return float(step_costs[max(count - 1, 0)])
            if name == "costs of each row":
                return float(step_costs[count] / (count + 1))
            if name == "no costs":
                return 1.0
            return float(step_costs[count])

        counts = range(len(step_costs))
        if name == "at least one draft":
            counts = range(min(1, len(step_costs) - 1), len(step_costs))
        if name == "never the most":
            counts = range(max(len(step_costs) - 1, 1))
        speeds = {count: tokens(count) / cost(count) for count in counts}
        if name == "tokens minus costs":
            speeds = {count: tokens(count) - cost(count) for count in counts}
        best = max(speeds, key=lambda count: (speeds[count], -count))
        if name == "the most among equals":
            best = max(speeds, key=lambda count: (speeds[count], count))
        if name == "stops at the first worse one":
            best = 0
            while best + 1 < len(step_costs) and speeds[best + 1] > speeds[best]:
                best += 1
        if name == "how many rows":
            return best + 1
        if name == "the speed":
            return speeds[best]
        return best

    return part


WRONG_BEST = [
    *("no token of the model", "one power too many", "every draft by itself", "all or nothing"),
    *("the last power only", "the formula alone", "costs of one row less", "costs of each row"),
    *("no costs", "at least one draft", "never the most", "tokens minus costs"),
    *("the most among equals", "stops at the first worse one", "how many rows", "the speed"),
]


def mask_by_walking(parents: Sequence[int]) -> Any:
    """Right: walks from each node to the text."""
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError("A parent must come before its children.")
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        seen = node
        while seen != -1:
            mask[node, seen] = True
            seen = parents[seen]
    return mask


def mask_by_products(parents: Sequence[int]) -> Any:
    """Right: follows all edges at once, as often as there are nodes."""
    size = len(parents)
    step = np.eye(size, dtype=bool)
    for node, parent in enumerate(parents):
        if parent < -1 or parent >= node:
            raise ValueError(f"{parent} cannot be the parent of {node}.")
        if parent != -1:
            step[node, parent] = True
    mask = np.eye(size, dtype=bool)
    for _ in parents:
        mask = mask @ step
    return mask


def wrong_mask(name: str) -> Callable[[Any], Any]:
    def part(parents: Any) -> Any:
        size = len(parents)
        if name == "every node is causal":
            mask_by_walking(parents)
            return np.tri(size, dtype=bool)
        if name == "a single root" and [*parents].count(-1) != 1:
            raise ValueError("There must be one root.")
        for node, parent in enumerate(parents):
            if name == "no order is asked for":
                break
            if name == "later parents only" and parent == node:
                continue
            if name == "below -1 passes" and parent < -1:
                continue
            if name == "refuses late ones only if they do not exist" and parent < size:
                continue
            if not -1 <= parent < node:
                if name == "an IndexError":
                    raise IndexError("no such node")
                if name == "no sentence":
                    raise ValueError
                if name == "None for a bad tree":
                    return None
                raise ValueError("A parent must come before its children.")
        mask = np.eye(size, dtype=bool)
        for node, parent in enumerate(parents):
            if parent >= size or parent < -1:
                continue
            if name == "the last row for a root" or parent >= 0:
                if name == "parents only":
                    mask[node, parent] = True
                elif name == "two generations":
                    mask[node, parent] = True
                    if parents[parent] >= 0:
                        mask[node, parents[parent]] = True
                elif name == "without the parent":
                    mask[node] |= mask[parent] & (np.arange(size) != parent)
                else:
                    mask[node] |= mask[parent]
        if name == "not itself":
            mask &= ~np.eye(size, dtype=bool)
        if name == "siblings see each other":
            for one in range(size):
                for other in range(one):
                    mask[one, other] |= parents[one] == parents[other]
        if name == "nodes see their children":
            mask |= mask.T
        if name == "the other way round":
            mask = mask.T
        if name == "everyone sees the first node" and size:
            mask[:, 0] = True
        if name == "True where it must not look":
            mask = ~mask
        if name == "whole numbers":
            return mask.astype(int)
        return mask.tolist() if name == "a list" else mask

    return part


WRONG_MASKS = [
    *("every node is causal", "a single root", "no order is asked for", "later parents only"),
    *("below -1 passes", "refuses late ones only if they do not exist", "an IndexError"),
    *("no sentence", "None for a bad tree", "the last row for a root", "parents only"),
    *("two generations", "without the parent", "not itself", "siblings see each other"),
    *("nodes see their children", "the other way round", "everyone sees the first node"),
    *("True where it must not look", "whole numbers", "a list"),
]


ANSWERS = {
    "ngram_drafts": Answers(
        right=(drafts_by_index, drafts_by_growing, wrong_drafts("nothing")),
        wrong={name: wrong_drafts(name) for name in WRONG_DRAFTS},
        equivalent={
            "1 -> 2 #4": "the run before that place is shorter, so it never equals the end"
        },
    ),
    "accepted_tokens": Answers(
        right=(accepted_by_loop, accepted_by_iterators, wrong_accepted("nothing")),
        wrong={name: wrong_accepted(name) for name in WRONG_ACCEPTED},
        equivalent={},
    ),
    "accept_or_redraw": Answers(
        right=(redraw_by_division, redraw_in_python, wrong_redraw("nothing")),
        wrong={name: wrong_redraw(name) for name in WRONG_REDRAWS},
        equivalent={},
    ),
    "after_verifying": Answers(
        right=(after_by_slots, after_by_formula, wrong_after("nothing")),
        wrong={name: wrong_after(name) for name in WRONG_AFTER},
        equivalent={},
    ),
    "best_count": Answers(
        right=(best_by_loop, best_by_formula, wrong_best("nothing")),
        wrong={name: wrong_best(name) for name in WRONG_BEST},
        equivalent={},
    ),
    "tree_mask": Answers(
        right=(mask_by_walking, mask_by_products, wrong_mask("nothing")),
        wrong={name: wrong_mask(name) for name in WRONG_MASKS},
        equivalent={},
    ),
}

"""Questions on chapter 32 that need no code."""

import math
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch32_flash_attention.lesson import (
    numbers_moved,
)
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _steps(random: Random) -> dict[str, Any]:
    maximum, rise = random.randint(1, 3), random.choice((1, 2))
    return {
        "maximum": maximum,
        "total": random.choice((1.5, 2.0, 2.5)),
        "mixed": random.choice((80, 90, 100, 120)),
        "scores": [maximum + rise, maximum + rise - random.choice((1, 2))],
        "values": random.sample((4, 6, 10, 12, 16), 2),
    }


def _answer_after(
    maximum: int, total: float, mixed: float, scores: list[int], values: list[int]
) -> float:
    higher = max(maximum, *scores)
    shrink, weights = math.exp(maximum - higher), [math.exp(each - higher) for each in scores]
    added = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return (mixed * shrink + added) / (total * shrink + sum(weights))


def _matrix(random: Random) -> dict[str, Any]:
    return {
        "heads": random.choice((16, 24, 32, 40)),
        "tokens": random.choice((3000, 6000, 9000, 12000)),
    }


def _gigabytes(heads: int, tokens: int) -> float:
    return 4 * heads * tokens * tokens / 1e9


def _prompt(random: Random) -> dict[str, Any]:
    return {
        "tokens": random.choice((1024, 2048, 4096)),
        "heads": random.choice((16, 24, 32)),
        "head_dim": random.choice((64, 128)),
        "tile": random.choice((64, 128)),
    }


def _megabytes(tokens: int, heads: int, head_dim: int, tile: int) -> float:
    return 2 * heads * numbers_moved(tokens, tokens, head_dim, tile) / 1e6


def _row_of_scores(random: Random) -> dict[str, Any]:
    """Draw scores whose maximum is 0.7 to 2.5 above that of the first tile."""
    while True:
        tile = random.choice((3, 4))
        scores = [round(random.uniform(-2, 3), 1) for _ in range(12)]
        first, second, most = max(scores[:tile]), max(scores[tile : 2 * tile]), max(scores)
        if 0.7 <= most - first <= 2.5 and scores[0] < first and second < most:
            return {"scores": scores, "tile": tile}


def _factor(scores: list[float], tile: int) -> float:
    return math.exp(max(scores[:tile]) - max(scores))


def _scores_by_key(scores: list[float], tile: int) -> Figure:
    """Draw the scores as bars with their numbers; dashed lines part the tiles."""
    made, axes = style.figure(8.5, 3.2)
    bars = axes.bar(range(len(scores)), scores, color=style.BLUE)
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
    for edge in range(tile, len(scores), tile):
        axes.axvline(edge - 0.5, color=style.QUIET, linewidth=0.8, linestyle="--")
    axes.axhline(0, color=style.QUIET, linewidth=0.8)
    axes.margins(y=0.15)
    axes.set(xlabel="key (dashed: the edges of tiles)", ylabel="score", xticks=range(len(scores)))
    style.title(axes, "Scores of one query")
    return made


MISTAKES = (
    "the sum is not rescaled",
    "the values are not rescaled",
    "the factor is upside down",
    "nothing is wrong",
)


def _log(random: Random) -> dict[str, Any]:
    """Draw four scores, of which the second or the third raises the maximum."""
    first, rise = random.randint(-1, 2), random.choice((1, 2))
    scores = [first, first - 1, first - 2]
    scores.insert(random.choice((1, 2)), first + rise)
    return {
        "scores": scores,
        "values": random.sample((10, 20, 30, 40, 50), 4),
        "mistake": random.choice(MISTAKES),
    }


def _mistake(scores: list[int], values: list[int], mistake: str) -> str:
    return mistake


def _printed(scores: list[int], values: list[int], mistake: str) -> str:
    """Return what the loop prints, a line for each key."""
    lines = ["score  value    m        l        O"]
    maximum, total, mixed = -math.inf, 0.0, 0.0
    for score, value in zip(scores, values, strict=True):
        higher = max(maximum, score)
        shrink = math.exp(maximum - higher)
        if mistake == "the factor is upside down" and total:
            shrink = math.exp(higher - maximum)
        weight = math.exp(score - higher)
        total = weight + total * (1 if mistake == "the sum is not rescaled" else shrink)
        mixed = weight * value + mixed * (1 if mistake == "the values are not rescaled" else shrink)
        maximum = higher
        lines.append(f"{score:>5}  {value:>5} {maximum:>4.0f} {total:>8.3f} {mixed:>8.3f}")
    return "\n".join([*lines, f"O / l = {mixed / total:.3f}"])


QUESTIONS = {
    "answer_after_a_tile": Question(
        "estimate",
        "Online softmax, one query, values of one number each. So far the maximum is m = "
        "{maximum}, the sum of weights l = {total}, and the weighted sum of values O = {mixed} "
        "(not yet divided). The next tile is the last; it has two keys with the scores {scores} "
        "and the values {values}. What is the answer O / l after it?",
        "maximum, sum, values so far, scores and values of the tile",
        _steps,
        _answer_after,
        "The new maximum is the largest of {maximum} and {scores}; l = {total} and O = {mixed} are "
        "multiplied by exp({maximum} - new maximum), then the tile's weights and weighted values "
        "are added.",
        within=1.01,
        minutes=8,
    ),
    "score_gigabytes": Question(
        "estimate",
        "Attention is written out for a prompt of {tokens} tokens: the scores of all pairs of a "
        "query and a key, also the masked ones, are stored in float32. A layer has {heads} query "
        "heads. How many GB (10^9 bytes) do the scores of one layer take?",
        "tokens, query heads",
        _matrix,
        _gigabytes,
        "There are {heads} matrices of {tokens} x {tokens} scores of 4 bytes.",
        within=1.03,
        points=3,
        minutes=3,
    ),
    "megabytes_in_tiles": Question(
        "estimate",
        "A causal FlashAttention kernel has one program for every {tile} queries of each of "
        "{heads} query heads. It gets a prompt of {tokens} tokens, with no cached ones, and heads "
        "of {head_dim} numbers in bfloat16. A program loads its queries once and stores its "
        "results once. It loads keys and values, each once, up to the position of its last query. "
        "How many MB (10^6 bytes) do all programs of a layer load and store?",
        "tokens, query heads, head dimension, queries in a tile",
        _prompt,
        _megabytes,
        "With N tokens, B queries in a tile and heads of d numbers, a head moves N x N x d / B + 3 "
        "x N x d numbers; here N = {tokens}, B = {tile}, d = {head_dim}, for {heads} heads and 2 "
        "bytes a number.",
        within=1.005,
        points=8,
        minutes=10,
    ),
    "what_is_left": Question(
        "reading",
        "The figure shows the scores of one query. Online softmax goes over the keys from left to "
        "right, {tile} at a time. By which factor, below 1, have the weights of the first tile "
        "been multiplied in all, once the last tile has been added? Give three decimals.",
        "scores, keys in a tile",
        _row_of_scores,
        _factor,
        "The factors of all tiles multiply to exp(maximum of the first tile - maximum of all "
        "scores).",
        within=1.03,
        figure=_scores_by_key,
    ),
    "the_broken_loop": Question(
        "diagnosis",
        "A loop takes one key after the other and prints the largest score so far (m), the sum of "
        "weights (l) and the weighted sum of values (O, not yet divided). Recompute it by hand. Is "
        "one of its three updates wrong? 'the sum is not rescaled': l is never multiplied by "
        "exp(old m - new m). 'the values are not rescaled': O is never multiplied by it. 'the "
        "factor is upside down': both are multiplied by exp(new m - old m).",
        "scores, values, the mistake",
        _log,
        _mistake,
        "Where m rises, l and O must both shrink by exp(old m - new m) before the new weight and "
        "value are added.",
        choices=MISTAKES,
        figure=_printed,
        minutes=8,
    ),
}

WRITTEN = {
    "one_pass": Written(
        "Softmax needs the maximum and the sum of a whole row of scores, yet FlashAttention sees "
        "each key and its value once and keeps no row. Explain what it remembers from tile to "
        "tile, what it does when a larger score comes, why the result is the same, and why the "
        "order of the tiles does not matter.",
        "For each query it keeps the largest score so far, the sum of the weights relative to "
        "this maximum, and the sum of the values times these weights. When a larger score comes, "
        "all older weights are too large by the same factor, exp(new maximum - old maximum), so "
        "both sums are multiplied by exp(old maximum - new maximum). It divides at the end. Up to "
        "rounding, the sums are then those of softmax with the maximum of all scores. The order "
        "does not matter, because each sum has been rescaled to the common maximum in the end.",
        {
            "the three things: maximum, sum of weights, weighted sum of values": 3,
            "both sums are multiplied by exp(old maximum - new maximum)": 3,
            "all older weights share this factor, so the result is exact up to rounding": 2,
            "the division at the end, or any order: sums relative to one maximum can be added": 2,
        },
    ),
    "what_it_saves": Written(
        "A colleague says: 'FlashAttention computes fewer scores by an approximation, so it is "
        "faster, and it will speed up writing answers for a single user, too.' Correct what is "
        "wrong.",
        "FlashAttention computes the same result up to rounding; nothing is approximated. It "
        "computes a score for every pair that the mask leaves, and leaves out only tiles that the "
        "mask hides whole. It is faster because scores and weights stay on the chip and are not "
        "written to memory and read again; its memory grows with the tokens, not with their "
        "square. A new token is a single query, so there is a row of scores and no matrix. Most "
        "bytes are those of keys and values, which must be read in any case, so decoding gains "
        "little.",
        {
            "the result is exact up to rounding": 2,
            "all scores that count are computed; only tiles that are masked whole are left out": 2,
            "the gain: scores and weights are not written to memory and read again": 3,
            "decode: one row of scores, small beside the keys and values that must be read": 3,
        },
    ),
}

"""Questions on chapter 13 that need no code."""

import math
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _probabilities(random: Random) -> dict[str, Any]:
    while True:
        counts = [2 ** random.randint(1, 6) for _ in range(random.choice((4, 5)))]
        right = _perplexity(counts)
        means = (sum(counts) / len(counts), len(counts) / sum(1 / each for each in counts))
        if all(max(each / right, right / each) > 1.1 for each in (*means, math.log2(right))):
            return {"counts": counts}


def _perplexity(counts: list[int]) -> float:
    return math.prod(counts) ** (1 / len(counts))


PAIRS = 16


def _lengths(base: int) -> list[float]:
    """Return how many positions each of 16 pairs needs for a full turn."""
    return [2 * math.pi * base ** (pair / PAIRS) for pair in range(PAIRS)]


def _trained(random: Random) -> dict[str, Any]:
    base = random.choice((10_000, 100_000, 500_000))
    last = random.randint(5, 12)
    below, above = _lengths(base)[last : last + 2]
    digits = 1 if below < 1000 else 2
    return {"base": base, "length": int(round(math.sqrt(below * above), -digits))}


def _num_turning(base: int, length: int) -> float:
    return sum(each <= length for each in _lengths(base))


def _wavelengths(base: int, length: int) -> Figure:
    """Draw the positions that a full turn takes, by pair, and the trained length."""
    made, axes = style.figure(8, 3.8)
    axes.plot(_lengths(base), "o", color=style.BLUE, markersize=5)
    axes.axhline(length, color=style.ORANGE, linewidth=1.2, linestyle=":")
    said = axes.text(-0.4, length * 1.25, f"trained length: {length:,}", fontsize=9)
    said.set(color=style.ORANGE, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.set(yscale="log", xlabel="pair", ylabel="positions per turn (log scale)")
    axes.set_xticks(range(PAIRS))
    axes.grid(axis="x", color=style.FAINT, linewidth=0.6)
    style.title(axes, f"A full turn of each pair, with the base {base:,}")
    return made


def _network(random: Random) -> dict[str, Any]:
    hidden, units = random.choice(
        ((576, 1536), (1024, 3072), (2048, 8192), (4096, 11_008), (4096, 14_336), (8192, 28_672))
    )
    return {"layers": random.choice((24, 28, 30, 32, 40)), "hidden": hidden, "units": units}


def _millions(layers: int, hidden: int, units: int) -> float:
    return 3 * layers * hidden * units / 1e6


PAIRINGS = ("halves", "neighbours", "halves, backwards", "neighbours, backwards")


def _first_pair_turned(head: list[int], pairing: str) -> list[int]:
    """Return the head with its first pair rotated by a quarter turn."""
    other = len(head) // 2 if pairing.startswith("halves") else 1
    turned, sign = list(head), 1 if pairing.endswith("backwards") else -1
    turned[0], turned[other] = sign * head[other], -sign * head[0]
    return turned


def _quarter_turn(random: Random) -> dict[str, Any]:
    before = random.sample(range(1, 10), 6)
    return {"before": before, "after": _first_pair_turned(before, random.choice(PAIRINGS))}


def _pairing(before: list[int], after: list[int]) -> float | str:
    (name,) = (each for each in PAIRINGS if _first_pair_turned(before, each) == after)
    return name


def _two_rows(before: list[int], after: list[int]) -> str:
    rows = {"number": range(len(before)), "before": before, "after": after}
    return "\n".join(f"{name:<8}" + "".join(f"{n:>4}" for n in row) for name, row in rows.items())


QUESTIONS = {
    "perplexity_by_hand": Question(
        "estimate",
        "A model reads a text. To the tokens that are judged, it gave the probabilities 1/n, with "
        "n = {counts}, a number for each token. What is its perplexity on this text?",
        "probabilities of four or five tokens",
        _probabilities,
        _perplexity,
        "The perplexity is the exponential of the mean negative logarithm of the probabilities, so "
        "it is the geometric mean of {counts}: a root of their product.",
        within=1.03,
    ),
    "full_turns": Question(
        "reading",
        "The figure shows a rotary embedding of heads of 32 numbers, with the base {base}: how "
        "many positions each of its 16 pairs needs for a full turn. The model was trained on texts "
        "of {length} positions. How many pairs complete at least one full turn within this length?",
        "base of the rotation, trained length",
        _trained,
        _num_turning,
        "Count the points on or below the dotted line, from pair 0 on: a pair i needs 2 pi x "
        "{base}^(2i/32) positions for a turn, and {length} must be at least that.",
        within=1.0,
        figure=_wavelengths,
    ),
    "feed_forward_parameters": Question(
        "estimate",
        "A model has {layers} layers, vectors of {hidden} numbers in its residual stream, and "
        "{units} hidden units in each SwiGLU network. How many million parameters do the networks "
        "of all layers have? (There are no biases.)",
        "layers, width, hidden units",
        _network,
        _millions,
        "SwiGLU has three matrices of {hidden} x {units} numbers in each of {layers} layers: gate, "
        "up, and down.",
        within=1.02,
        points=3,
        minutes=3,
    ),
    "which_pairs": Question(
        "diagnosis",
        "A program rotates a head of six numbers. The angle of pair 0 is +90 degrees, and all "
        "other angles are 0. Below is the head before and after. Does the program form its pairs "
        "by halves or by neighbours, and does it rotate backwards, that is, by -90 degrees?",
        "the numbers of the head, the pairing, the direction",
        _quarter_turn,
        _pairing,
        "By +90 degrees, the point (a, b) becomes (-b, a), and pair 0 consists of numbers 0 and 3 "
        "by halves, and of 0 and 1 by neighbours: compare {before} with {after}.",
        choices=PAIRINGS,
        figure=_two_rows,
        points=3,
    ),
}

WRITTEN = {
    "rows_and_pairs": Written(
        "An engine loads a Llama model from a GGUF file, in which llama.cpp's converter has "
        "reordered the rows of W_q and W_k. The engine leaves them in this order, and rotates by "
        "halves. Say why no error is raised, what the model still does well and what it does not, "
        "which test shows the mistake, and two ways to repair it.",
        "Both orders of the rows have the same shape, so nothing can raise an error. But the "
        "rotation now joins numbers that were no pair in training, and turns them at other speeds, "
        "so the scores show the distance of two tokens in a way that the model has not learned. "
        "Well-known facts survive, since they need little of the order. Copying needs exact "
        "distances and fails: the perplexity of a text that is read a second time becomes far "
        "higher. Either the loader puts the rows back, or the engine rotates by neighbours.",
        {
            "the shapes are equal, so nothing fails": 2,
            "the rotation joins numbers that were trained as members of other pairs": 3,
            "easy facts survive; copying, which needs exact distances, does not": 2,
            "a test that shows it: perplexity of a second reading, or any task of copying": 1,
            "two repairs: put the rows back when loading, or form the pairs by neighbours": 2,
        },
    ),
}

"""Questions on chapter 16 that need no code."""

import math
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _tail(random: Random) -> dict[str, Any]:
    return {
        "percent": random.choice((0.5, 0.8, 1, 1.2, 1.5)),
        "tokens": random.choice((80, 100, 120, 150, 180)),
        "answers": random.choice((2_000, 5_000, 10_000)),
    }


def _untouched(percent: float, tokens: int, answers: int) -> float:
    return answers * (1 - percent / 100) ** tokens


def _comma(random: Random) -> dict[str, Any]:
    percent = random.choice((40, 50, 60, 70, 80, 90))
    return {
        "percent": percent,
        "others": 100 - percent,
        "times": random.randint(3, 8),
        "frequency": random.choice((0.2, 0.3, 0.4, 0.5)),
    }


def _percent_after(percent: int, others: int, times: int, frequency: float) -> float:
    odds = percent / others * math.exp(-frequency * times)
    return 100 * odds / (1 + odds)


FRUITS = ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "plum")


def _cuts(random: Random) -> dict[str, Any]:
    while True:
        percents = dict(zip(FRUITS, random.sample(range(2, 34), 8), strict=True))
        top_k, percent_kept = random.randint(4, 6), random.choice((70, 75, 80, 85))
        token = random.choice(FRUITS)
        is_whole = sum(percents.values()) == 100
        if is_whole and _is_a_good_cut(percents, top_k, percent_kept, token):
            return {
                "percents": percents,
                "top_k": top_k,
                "percent_kept": percent_kept,
                "token": token,
            }


def _is_a_good_cut(percents: dict[str, int], top_k: int, percent_kept: int, token: str) -> bool:
    """Return whether the token is kept, and other orders of the filters give other answers."""
    ordered = sorted(percents.values(), reverse=True)
    right, other = (_num_kept(row, percent_kept) for row in (ordered[:top_k], ordered))
    kept = sum(ordered[:right])
    return (
        percents[token] in ordered[:right]
        and right < min(top_k, other)
        and ordered[right] > 0.05 * kept
        and kept < 95
        and all(_is_clear(row, percent_kept) for row in (ordered[:top_k], ordered))
    )


def _num_kept(ordered: list[int], percent_kept: int) -> int:
    """Return how many of these likeliest tokens top-p keeps, of their own sum."""
    reached = [100 * sum(ordered[:size]) for size in range(1, len(ordered) + 1)]
    return 1 + sum(each < percent_kept * sum(ordered) for each in reached)


def _is_clear(ordered: list[int], percent_kept: int) -> bool:
    """Return whether no sum of the likeliest is nearly the limit."""
    sums = [100 * sum(ordered[:size]) / sum(ordered) for size in range(1, len(ordered))]
    return all(abs(each - percent_kept) > 1 for each in sums)


def _percent_drawn(percents: dict[str, int], top_k: int, percent_kept: int, token: str) -> float:
    ordered = sorted(percents.values(), reverse=True)[:top_k]
    kept = ordered[: _num_kept(ordered, percent_kept)]
    return 100 * percents[token] / sum(kept)


def _fruit_bars(percents: dict[str, int], top_k: int, percent_kept: int, token: str) -> Figure:
    """Draw the probabilities of the tokens in the order of their ids."""
    made, axes = style.figure(8, 3)
    bars = axes.bar(list(percents), list(percents.values()), color=style.BLUE)
    axes.bar_label(bars, padding=2, fontsize=9)
    axes.margins(y=0.12)
    axes.set(xlabel="next token, in the order of the ids", ylabel="probability, %")
    style.title(axes, "Probabilities of the next token at temperature 1")
    return made


SETTINGS = {
    "low temperature": "All tokens stay, the likely ones gain and the others lose.",
    "high temperature": "All tokens stay and keep their order, but their probabilities are "
    "closer together.",
    "cut of the tail": "The least likely tokens have 0, and the others keep their ratios.",
    "presence penalty": "Tokens that have occurred lose against the others, and how often they "
    "have occurred makes no difference.",
    "frequency penalty": "Tokens that have occurred lose against the others, and those that "
    "have occurred more often lose more.",
}


def _changed(random: Random) -> dict[str, Any]:
    percents = random.choice(
        ((24, 20, 17, 14, 11, 8, 6), (27, 21, 16, 13, 10, 8, 5), (22, 19, 17, 15, 12, 9, 6))
    )
    tokens = random.sample(FRUITS, len(percents))
    times = [0] * len(percents)
    for count, place in zip((3, 1, 1), random.sample(range(5), 3), strict=True):
        times[place] = count
    setting = random.choice(list(SETTINGS))
    return {
        "percents": dict(zip(tokens, percents, strict=True)),
        "times": times,
        "setting": setting,
        "sign": SETTINGS[setting],
    }


def _percents_after(percents: list[int], times: list[int], setting: str) -> list[float]:
    weights = [each / 100 for each in percents]
    if setting == "low temperature":
        weights = [each**2 for each in weights]
    elif setting == "high temperature":
        weights = [each**0.5 for each in weights]
    elif setting == "cut of the tail":
        weights = [*weights[:4], *(0.0 for _ in weights[4:])]
    elif setting == "presence penalty":
        lost = [1.0 * (count > 0) for count in times]
        weights = [each * math.exp(-less) for each, less in zip(weights, lost, strict=True)]
    else:
        lost = [0.7 * count for count in times]
        weights = [each * math.exp(-less) for each, less in zip(weights, lost, strict=True)]
    return [100 * each / sum(weights) for each in weights]


def _before_and_after(
    percents: dict[str, int], times: list[int], setting: str, sign: str
) -> Figure:
    """Draw each token's probability before and after a setting, and how often it has occurred."""
    made, axes = style.figure(8.6, 3.4)
    after = _percents_after(list(percents.values()), times, setting)
    kinds = (
        ("before", list(percents.values()), -0.2, style.FAINT),
        ("after", after, 0.2, style.BLUE),
    )
    for name, heights, shift, colour in kinds:
        places = [place + shift for place in range(len(heights))]
        bars = axes.bar(places, heights, 0.38, color=colour, label=name)
        axes.bar_label(bars, [f"{each:.0f}" for each in heights], padding=2, fontsize=8)
    labels = [f"{token}\n{count} ×" for token, count in zip(percents, times, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(y=0.12)
    axes.set(xlabel="next token, and how often the answer has it", ylabel="probability, %")
    axes.legend(frameon=False, loc="upper right", labelcolor=style.INK)
    style.title(axes, "Probabilities of the next token before and after one setting")
    return made


def _setting(percents: dict[str, int], times: list[int], setting: str, sign: str) -> str:
    return setting


QUESTIONS = {
    "untouched_answers": Question(
        "estimate",
        "At every step, the tokens beyond the likeliest 1,000 hold {percent} % of the probability "
        "together. {answers:,} answers of {tokens} tokens each are drawn from the model's "
        "probabilities at temperature 1, without a cut. How many of these answers are expected to "
        "have *no* token from beyond the likeliest 1,000?",
        "share of the tail, tokens in an answer, number of answers",
        _tail,
        _untouched,
        "A token lies outside the tail with the probability 1 - {percent} / 100, and this must "
        "happen {tokens} times.",
        within=1.03,
    ),
    "comma_after_penalty": Question(
        "estimate",
        "A comma has a probability of {percent} % as the next token. It has occurred {times} times "
        "in the answer so far. All other tokens that have occurred have a probability of "
        "practically 0 at this step. What is the comma's probability, in per cent, with "
        "`frequency_penalty={frequency}` at temperature 1, without any other setting?",
        "probability of the token, its occurrences, the penalty",
        _comma,
        _percent_after,
        "The penalty divides the odds of the comma, {percent} to {others}, by e to the "
        "power of {frequency} x {times}; the probability is odds / (1 + odds).",
        within=1.04,
        points=8,
        minutes=7,
    ),
    "drawn_after_cuts": Question(
        "reading",
        "The figure shows the probabilities of all tokens of a small vocabulary. A request has "
        "temperature 1, `top_k={top_k}` and `top_p=0.{percent_kept}`. The engine applies top-k "
        "first, and top-p to what top-k has left. With which probability, in per cent, is "
        "*{token}* drawn?",
        "probabilities, top_k, top_p, token",
        _cuts,
        _percent_drawn,
        "Top-k leaves {top_k} tokens, top-p keeps the fewest of them that reach {percent_kept} % "
        "of *their* sum, and the probability of *{token}* is divided by the sum of those kept.",
        within=1.02,
        figure=_fruit_bars,
        points=8,
        minutes=8,
    ),
    "one_setting": Question(
        "diagnosis",
        "A request changes one setting of the sampler. The figure shows the probabilities of all "
        "tokens of a small vocabulary before and after (rounded), and how often each has occurred "
        "in the answer so far. Which setting was changed?",
        "probabilities, occurrences, the setting",
        _changed,
        _setting,
        "{sign}",
        choices=tuple(SETTINGS),
        figure=_before_and_after,
        minutes=4,
    ),
}

WRITTEN = {
    "loops_and_tails": Written(
        "Greedy decoding and drawing from all tokens are the two simplest ways to choose a token. "
        "Say what goes wrong with each of them in a long answer, and why. Which of the two faults "
        "does top-p cure, which does a frequency penalty cure, and why not the other one?",
        "Greedy decoding falls into loops, because every repetition makes the next one more "
        "likely. Drawing brings tokens from the tail: each is unlikely, but together they hold "
        "some per cent at a step, so a long answer almost surely contains one, and what follows "
        "must make sense of it. Top-p drops the tail before the draw; it does not end a loop, "
        "because a loop consists of likely tokens. A frequency penalty lowers the logits of tokens "
        "that have occurred, more with each occurrence, until the loop breaks. The tail's "
        "tokens have mostly not occurred, so it stays.",
        {
            "greedy loops, and repetition makes itself more likely": 3,
            "drawing meets the tail: small at a step, nearly certain over many steps": 3,
            "top-p cures the tail and not the loop, which consists of likely tokens": 2,
            "the penalty cures the loop and not the tail, whose tokens have not occurred": 2,
        },
    ),
    "seed_in_a_batch": Written(
        "A server computes several requests in one batch. Why does one random generator for the "
        "whole batch not make a request with a seed reproducible? How does minigen find the "
        "random number of a draw instead? What can still change the answer when the neighbours "
        "change?",
        "A generator has a state, and every draw takes the next number of its series. Which "
        "numbers a request gets then depends on how many draws its neighbours take in between. "
        "minigen has no state: it hashes the request's seed, the number of the answer, and the "
        "number of the token into a uniform number, which is the same in every batch. But the "
        "logits may depend on the batch in their last digits, because sums are split "
        "differently for another number of rows. Then the same uniform number can fall on a "
        "neighbouring token.",
        {
            "neighbours take numbers from the generator's series": 3,
            "a hash of seed, answer and step, without a state": 4,
            "the logits can differ in their last digits with the batch": 2,
            "so the same number may fall on another token": 1,
        },
    ),
}

"""Cases of chapter 16's exercises, drawn by a seed."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch16_sampling.lesson import by_hand
from minigen_course.grading.exercise import expect
from minigen_course.grading.varied import Varied

SMALL = {  # numbers below 1, and weights that make them as large as the others
    "A at temperature 1/2": (4, 9),
    "A at endless temperature": (10, 20),
    "B after frequency_penalty": (40, 80),
}


def _by_hand(random: Random) -> dict[str, Any]:
    others = [name for name in by_hand() if name not in SMALL]
    weights = {name: random.randint(*SMALL[name]) for name in random.sample(list(SMALL), 2)}
    weights |= {name: random.randint(1, 3) for name in random.sample(others, 3)}
    return {"weights": weights}


def _weighted(part: Any, weights: dict[str, int]) -> Any:
    """Multiply each of these weights by the number of the same name, and add the products."""
    found = part()
    return float(sum(weight * found[name] for name, weight in weights.items()))


def _shares(random: Random, size: int) -> list[int]:
    """Return percentages, multiples of 5, that add up to 100."""
    places = sorted(random.sample(range(1, 20), size - 1))
    return [5 * (end - start) for start, end in zip([0, *places], [*places, 20], strict=True)]


def _logits(percent: list[list[int]]) -> Tensor:
    return torch.tensor(percent, dtype=torch.float64).div(100).log().float()


def _with(part: Any, logits: Tensor, *settings: Tensor) -> Any:
    """Return what the part returns, and expect that the logits are as they were."""
    before = logits.clone()
    found = part(logits, *settings)
    expect(torch.equal(logits, before), "changed the logits in place; return new ones.")
    return found


def _keep_top_p(random: Random) -> dict[str, Any]:
    size = random.randint(4, 7)
    rows = range(random.choice((2, 2, 3)))
    return {
        "percent": [_shares(random, size) for _ in rows],
        "top_p": [(5 * random.randint(2, 19) + random.choice((2, 3))) / 100 for _ in rows],
    }


def _kept(part: Any, percent: list[list[int]], top_p: list[float]) -> Any:
    """Filter a batch of logits, a row for each list of the tokens' probabilities in per cent.

    The logits are the natural logarithms of the probabilities.
    """
    return _with(part, _logits(percent), torch.tensor(top_p, dtype=torch.float64))


def _apply_penalties(random: Random) -> dict[str, Any]:
    rows, size = range(2), random.randint(4, 6)
    halves = [each / 2 for each in range(-8, 9) if each]
    return {
        "logits": [[random.choice(halves) for _ in range(size)] for _ in rows],
        "prompt": [random.sample(range(size), 2) for _ in rows],
        "answer": [random.choices(range(size), k=4) for _ in rows],
        "repetition": random.sample((1.25, 1.5, 2.0, 4.0), 2),
        "presence": random.sample((0.25, 0.5, 1.0, 1.5), 2),
        "frequency": random.sample((0.25, 0.5, 0.75, 1.0), 2),
    }


def _penalized(
    part: Any,
    logits: list[list[float]],
    prompt: list[list[int]],
    answer: list[list[int]],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
) -> Any:
    """Apply the penalties to two rows; `prompt` and `answer` list the token ids of each row.

    From these lists come `in_prompt` and `output_counts`.
    """
    size = len(logits[0])
    in_prompt = torch.tensor([[token in row for token in range(size)] for row in prompt])
    counts = torch.tensor([[float(row.count(token)) for token in range(size)] for row in answer])
    settings = [torch.tensor(each) for each in (repetition, presence, frequency)]
    return _with(part, torch.tensor(logits), in_prompt, counts, *settings)


def _draw(random: Random) -> dict[str, Any]:
    size, num_dropped = random.randint(3, 4), random.randint(1, 2)
    percent, uniform = [], []
    for _ in range(3):
        row = _shares(random, size)
        for _ in range(num_dropped):
            row.insert(random.choice((0, len(row), random.randint(0, len(row)))), 0)
        percent.append(row)
        inside = (5 * random.randrange(20) + random.choice((2, 3))) / 100
        uniform.append(random.choice((0.0, 0.995, inside, inside)))
    return {"percent": percent, "uniform": uniform}


def _drawn(part: Any, percent: list[list[int]], uniform: list[float]) -> Any:
    """Draw from rows of logits whose softmax is these percentages; 0 is a dropped token."""
    found = _with(part, _logits(percent), torch.tensor(uniform, dtype=torch.float64))
    expect(getattr(found, "dtype", None) == torch.int64, "return a tensor of dtype int64.")
    return found


VARIED = {
    "by_hand": Varied(
        "which of the ten numbers are added up, and their weights",
        _by_hand,
        _weighted,
        tolerance=0.011,
        num_cases=8,
    ),
    "keep_top_p": Varied("probabilities of two or three rows, top_p", _keep_top_p, _kept),
    "apply_penalties": Varied(
        "logits, tokens of prompt and answer, three penalties", _apply_penalties, _penalized
    ),
    "draw": Varied("probabilities, dropped tokens, uniform numbers", _draw, _drawn, num_cases=8),
}

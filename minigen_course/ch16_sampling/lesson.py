"""What chapter 16 counts and measures: repetition, surprise, the time of a choice, numbers by hand.

Source of the bootstrap interval: Efron 1979, "Bootstrap Methods: Another Look at the Jackknife".
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minigen.llm import LLM
from minigen.outputs import RequestOutput
from minigen.sampling.params import SamplingParams
from minigen.sequence import Logprob


def repeated_runs(text: str, words: int = 4) -> float:
    """Return the share of a text's runs of `words` words that occurred before in the text.

    It is 0 for a text of fewer words.

    >>> repeated_runs("go on go on go on", words=2)  # 3 of 5
    0.6
    """
    all_words = text.split()
    runs = [tuple(all_words[i : i + words]) for i in range(len(all_words) - words + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def perplexity_by_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]
) -> float:
    """Return exp of the negative mean log probability that each token had at its place."""
    found = [at[token].logprob for token, at in zip(token_ids, logprobs, strict=True)]
    return math.exp(-sum(found) / len(found))


def tail_tokens(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], beyond: int = 1000
) -> float:
    """Return the share of tokens that were not among the `beyond` likeliest at their place."""
    found = [at[token].rank > beyond for token, at in zip(token_ids, logprobs, strict=True)]
    return sum(found) / len(found)


@dataclass(frozen=True)
class Mean:
    """A mean, and the ends of its 95 % interval, which is shown unless all values are equal."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" ({self.low:.1f} to {self.high:.1f})" if self.low < self.high else ""
        return f"{self.value:.1f}{interval}"


def mean_of(values: Sequence[float], times: int = 2000) -> Mean:
    """Return the mean of some values with its 95 % bootstrap interval.

    The values are drawn again with replacement `times` times; the interval holds the middle 95 % of
    the means.
    """
    numbers = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(16)
    drawn = torch.randint(len(numbers), (times, len(numbers)), generator=generator)
    low, high = numbers[drawn].mean(-1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return Mean(float(numbers.mean()), low, high)


def is_json(text: str, keys: Sequence[str]) -> bool:
    """Return whether a text is one JSON object with exactly these keys."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and sorted(found) == sorted(keys)


@dataclass(frozen=True)
class StepTime:
    """The median seconds of a decode step, and of its choice of tokens."""

    step: float
    choice: float

    @property
    def share(self) -> float:
        """The share of the step that the choice takes."""
        return self.choice / self.step


def step_time(
    llm: LLM, prompt: str, params: SamplingParams, choose: Callable[..., list[int]] | None = None
) -> StepTime:
    """Generate one answer, and return how long its decode steps and their choices took.

    A step lasts from one choice to the next. `choose` replaces the sampler's own choice, by
    `minigen.sampling.sampler.choose_tokens` or a compiled one.
    """
    starts: list[float] = []
    seconds: list[float] = []
    with _timed_choices(llm, choose, starts, seconds):
        llm.generate(prompt, params)
    steps = [later - earlier for earlier, later in pairwise(starts)]
    return StepTime(statistics.median(steps), statistics.median(seconds[1:]))


@contextmanager
def _timed_choices(
    llm: LLM, choose: Callable[..., list[int]] | None, starts: list[float], seconds: list[float]
) -> Iterator[None]:
    """Append when each choice of tokens starts, and its seconds, while the block runs."""
    sampler: Any = llm.engine.sampler
    own = sampler.choose

    def timed(*args: Any) -> list[int]:
        starts.append(time.perf_counter())
        found: list[int] = (choose or own)(*args)
        seconds.append(time.perf_counter() - starts[-1])
        return found

    sampler.choose = timed
    try:
        yield
    finally:
        sampler.choose = own


class _CountsSorting(TorchDispatchMode):
    """Counts the numbers that torch's sort and topk put in order."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten.sort,
            torch.ops.aten.topk,
            torch.ops.aten.argsort,
        ):
            first = found[0] if isinstance(found, tuple) else found
            self.count += first.numel()
        return found


def numbers_sorted(part: Callable[..., Tensor], *args: Tensor) -> int:
    """Return how many numbers a part has torch sort, by `sort`, `argsort` or `topk`."""
    with _CountsSorting() as counter:
        part(*args)
    return counter.count


def odds(logits: Tensor, token: int) -> float:
    """Return p / (1 - p) of a token, from one row of logits."""
    others = torch.cat([logits[:token], logits[token + 1 :]])
    return math.exp(float(logits[token].double() - others.double().logsumexp(-1)))


@dataclass(frozen=True)
class Agreement:
    """How many answers, and how many of their logprobs, are equal alone and in a batch."""

    same_answers: int
    answers: int
    same_logprobs: int
    logprobs: int

    def __str__(self) -> str:
        return (
            f"{self.same_answers} of {self.answers} answers and {self.same_logprobs} of "
            f"{self.logprobs} logprobs are equal"
        )


def alone_and_among(
    llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]
) -> Agreement:
    """Generate each request alone, and all in one batch; logprobs count as equal in every bit.

    Raises `ValueError` if the parameters do not ask for logprobs.
    """
    alone = [llm.generate(*each, progress=False) for each in zip(prompts, params, strict=True)]
    among = llm.generate(list(prompts), list(params), progress=False)
    pairs = [(_chosen(one), _chosen(other)) for one, other in zip(alone, among, strict=True)]
    return Agreement(
        sum([token for token, _ in one] == [token for token, _ in other] for one, other in pairs),
        len(pairs),
        sum(left == right for pair in pairs for left, right in zip(*pair, strict=False)),
        sum(len(one) for one, _ in pairs),
    )


def _chosen(answer: RequestOutput) -> list[tuple[int, float]]:
    """Return the tokens of an answer, each with its logprob."""
    if answer.logprobs is None:
        raise ValueError("The parameters must ask for logprobs.")
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, at[token].logprob) for token, at in pairs]


def by_hand() -> dict[str, float]:
    """Return ten numbers about four tokens A, B, C, D, with probabilities 50, 30, 15, 5 percent.

    Their logits are the natural logarithms of these probabilities. Each setting stands alone, the
    others have no effect; a temperature applies before a cut.

    - "top_k for greedy": the top_k with which every temperature chooses as greedy does
    - "top_p without effect": the top_p that drops no token of any distribution
    - "min_p without effect": the min_p that drops no token of any distribution
    - "repetition_penalty without effect": the repetition_penalty that changes no logit
    - "A at temperature 1/2": the probability of A at this temperature
    - "A at endless temperature": what the probability of A tends to as the temperature grows
    - "kept by top_p 0.9": how many tokens are kept
    - "kept by top_p 0.9 at temperature 1/2": how many tokens are kept
    - "kept by min_p 0.2": how many tokens are kept
    - "B after frequency_penalty": the probability of B if B has occurred twice in the answer, the
      other tokens have not occurred, and frequency_penalty is ln 2 = 0.693
    """
    squared = (0.25, 0.09, 0.0225, 0.0025)
    return {
        "top_k for greedy": 1,
        "top_p without effect": 1,
        "min_p without effect": 0,
        "repetition_penalty without effect": 1,
        "A at temperature 1/2": squared[0] / sum(squared),
        "A at endless temperature": 0.25,
        "kept by top_p 0.9": 3,
        "kept by top_p 0.9 at temperature 1/2": 2,
        "kept by min_p 0.2": 3,
        "B after frequency_penalty": 0.075 / (0.5 + 0.075 + 0.15 + 0.05),
    }

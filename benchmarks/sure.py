"""Answers that float32 is sure of, and how much of them another weight format also gives.

Near ties say nothing about a format, because they can go either way. So a candidate counts only if
its likeliest token leads the second by one logit or more at each of the answer's first five tokens,
in float32.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigen import LLM, SamplingParams
from minigen.sequence import Logprob

NUM_TOKENS, MARGIN = 5, 1.0


@dataclass(frozen=True)
class Sure:
    """A candidate that float32 is sure of, and the tokens of its answer."""

    family: str
    prompt: str
    token_ids: tuple[int, ...]


def least_margin(logprobs: Iterable[Mapping[int, Logprob]]) -> float:
    """Return the smallest lead of the likeliest token over the second, in logits."""
    margins = []
    for likeliest in logprobs:
        first, second = sorted((each.logprob for each in likeliest.values()), reverse=True)[:2]
        margins.append(first - second)
    return min(margins)


def sure_ones(llm: LLM, candidates: Sequence[tuple[str, str]]) -> list[Sure]:
    """Return the candidates (family, prompt) that the engine is sure of, all run together."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    prompts = [prompt for _, prompt in candidates]
    outputs = llm.generate(prompts, params)
    return [
        Sure(family, prompt, tuple(output.token_ids))
        for (family, prompt), output in zip(candidates, outputs, strict=True)
        if least_margin(output.logprobs or []) >= MARGIN
    ]


def num_kept(found: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the number of tokens before the first difference; all tokens after it count as lost.

    >>> num_kept([1, 2, 9, 4, 5], [1, 2, 3, 4, 5])
    2
    """
    kept = 0
    while kept < min(len(found), len(wanted)) and found[kept] == wanted[kept]:
        kept += 1
    return kept


def keeping(llm: LLM, sure: Sequence[Sure]) -> dict[str, Any]:
    """Return how many tokens of the sure answers the engine also gives, answering greedily."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([each.prompt for each in sure], params)
    kept = [
        num_kept(output.token_ids, each.token_ids)
        for each, output in zip(sure, outputs, strict=True)
    ]
    lost: Counter[str] = Counter()
    for each, number in zip(sure, kept, strict=True):
        lost[each.family] += NUM_TOKENS - number
    return {
        "kept": sum(kept),
        "of": NUM_TOKENS * len(sure),
        "share": sum(kept) / (NUM_TOKENS * len(sure)),
        "whole answers kept": kept.count(NUM_TOKENS),
        "lost by family": {family: number for family, number in lost.items() if number},
    }


def by_family(sure: Sequence[Sure]) -> dict[str, int]:
    """Return the number of sure candidates per family, most first."""
    return dict(Counter(each.family for each in sure).most_common())

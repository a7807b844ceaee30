"""What chapter 16 counts: repetition, surprise, intervals, sorted numbers, the time of a choice."""

import math
from pathlib import Path

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.sampling.sampler import choose_tokens, keep_top_p
from minigen.sequence import Logprob
from minigen_course.ch16_sampling.lesson import (
    Agreement,
    alone_and_among,
    is_json,
    mean_of,
    numbers_sorted,
    odds,
    perplexity_by_logprobs,
    repeated_runs,
    step_time,
    tail_tokens,
)


def test_a_run_of_words_counts_when_it_comes_again() -> None:
    assert repeated_runs("a b c d e f") == 0
    assert repeated_runs("a b c d a b c d") == pytest.approx(1 / 5)
    assert repeated_runs("a a a a a a", words=2) == pytest.approx(4 / 5)


def test_perplexity_is_the_number_of_equally_likely_tokens() -> None:
    logprobs = [{5: Logprob(-math.log(8), 3)}, {6: Logprob(-math.log(2), 1)}]
    assert perplexity_by_logprobs([5, 6], logprobs) == pytest.approx(4)


def test_tail_tokens_are_those_beyond_a_rank() -> None:
    logprobs = [{1: Logprob(-1.0, 1000)}, {2: Logprob(-9.0, 1001)}]
    assert tail_tokens([1, 2], logprobs) == 0.5
    assert tail_tokens([1, 2], logprobs, beyond=5000) == 0


def test_an_interval_holds_the_mean_and_shrinks_with_more_values() -> None:
    few, many = mean_of([0.0, 10.0] * 3), mean_of([0.0, 10.0] * 50)
    assert few.value == many.value == 5
    assert few.low < many.low < 5 < many.high < few.high
    assert mean_of([3.0] * 4).low == mean_of([3.0] * 4).high == 3
    assert str(mean_of([3.0] * 4)) == "3.0"
    assert str(few).startswith("5.0 (")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ('{"a": 1, "b": 2}', True),
        ('{"b": 2, "a": {}}', True),
        ('{"a": 1}', False),
        ('{"a": 1, "b": 2, "c": 3}', False),
        ('{"a": 1, "b": 2} and more', False),
        ('["a", "b"]', False),
        ("{", False),
    ],
)
def test_json_is_one_object_with_the_wanted_keys(text: str, is_one: bool) -> None:
    assert is_json(text, ("a", "b")) is is_one


def test_sorted_numbers_are_counted() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)) * 3
    half = torch.full((2,), 0.5, dtype=torch.float64)
    assert numbers_sorted(lambda row, _: row.sort().values, logits, half) == 2000
    assert numbers_sorted(lambda row, _: row.argsort(), logits, half) == 2000
    assert numbers_sorted(lambda row, _: row.topk(10).values, logits, half) == 20
    assert numbers_sorted(lambda row, _: row + 1, logits, half) == 0
    assert 0 < numbers_sorted(keep_top_p, logits, half) < 1000


def test_odds_are_a_probability_against_all_others() -> None:
    logits = torch.tensor([0.8, 0.15, 0.05]).log() + 3
    assert odds(logits, 0) == pytest.approx(4)
    assert odds(logits, 2) == pytest.approx(0.05 / 0.95)


def test_requests_alone_and_in_a_batch_are_compared(default_model_path: Path) -> None:
    llm = LLM.load(default_model_path, weights="float32", num_blocks=8)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=2, logprobs=0) for seed in (1, 2)]
    found = alone_and_among(llm, ["Once", "Tea is"], params)
    assert (found.answers, found.same_answers, found.logprobs) == (2, 2, 4)
    shown = str(Agreement(2, 2, 3, 4))
    assert shown == "2 of 2 answers and 3 of 4 logprobs are equal"


def test_a_choice_is_a_part_of_its_step(default_model_path: Path) -> None:
    llm = LLM.load(default_model_path, weights="float32", num_blocks=8)
    params = SamplingParams(temperature=1, seed=1, max_tokens=4, ignore_eos=True)
    own = llm.engine.sampler.choose  # type: ignore[attr-defined]
    found = step_time(llm, "Once", params, choose_tokens)
    assert 0 < found.choice < found.step
    assert found.share == found.choice / found.step
    assert llm.engine.sampler.choose is own  # type: ignore[attr-defined]

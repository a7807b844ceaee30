"""Questions to compare weight formats on: varied candidates, and which of them are sure."""

import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from benchmarks.questions import candidates
from benchmarks.sure import Sure, by_family, keeping, least_margin, num_kept, sure_ones
from minigen.outputs import CompletionOutput, RequestOutput
from minigen.sequence import Logprob
from tools import results

LEADS = {"sure": 1.0, "unsure": 0.99}


class Answering:
    """An engine that leads by `LEADS` at one of five places, and by more at the others."""

    def __init__(self, answers: dict[str, list[int]]):
        self.answers = answers

    def generate(self, prompts: list[str], params: Any) -> list[RequestOutput]:
        assert (params.temperature, params.max_tokens) == (0, 5)
        return [self._output(prompt, params.logprobs) for prompt in prompts]

    def _output(self, prompt: str, wanted: int | None) -> RequestOutput:
        leads = [5.0, 4.0, LEADS.get(prompt, 2.0), 3.0, 9.0]
        logprobs = [
            {3: Logprob(-0.5 - lead, 2), token_id: Logprob(-0.5, 1)}
            for lead, token_id in zip(leads, self.answers[prompt], strict=True)
        ]
        choice = CompletionOutput(
            0, token_ids=self.answers[prompt], logprobs=logprobs if wanted else None
        )
        return RequestOutput((), [choice])


def words(prompt: str) -> set[tuple[str, ...]]:
    """Return a prompt's words in groups of three."""
    found = re.findall(r"\w+", prompt.lower())
    return set(zip(found, found[1:], found[2:], strict=False))


def test_candidates_are_the_same_every_time_and_no_family_is_the_majority() -> None:
    asked = candidates()
    assert asked == candidates()
    families = Counter(each.family for each in asked)
    assert len(families) > 15
    assert max(families.values()) < 0.2 * len(asked)


def test_no_two_candidates_share_more_than_half_of_their_words() -> None:
    said = [(each.prompt, words(each.prompt)) for each in candidates()]
    assert all(found for _, found in said)
    alike = [
        (one, other)
        for (one, of_one), (other, of_other) in combinations(said, 2)
        if 2 * len(of_one & of_other) > len(of_one | of_other)
    ]
    assert not alike


def test_a_question_is_as_sure_as_its_least_sure_token() -> None:
    places = [{7: Logprob(-0.5, 1), 8: Logprob(-3.5, 2)}, {9: Logprob(-2.0, 2), 4: Logprob(-1, 1)}]
    assert least_margin(places) == pytest.approx(1.0)


def test_only_questions_with_a_lead_of_a_logit_everywhere_count() -> None:
    exact: Any = Answering({"sure": [1, 2, 4, 5, 6], "unsure": [1, 2, 4, 5, 6]})
    asked = [("first", "unsure"), ("second", "sure")]
    assert sure_ones(exact, asked) == [Sure("second", "sure", (1, 2, 4, 5, 6))]


def test_what_follows_a_difference_is_lost() -> None:
    assert num_kept([1, 2, 3], [1, 2, 3]) == 3
    assert num_kept([1, 9, 3], [1, 2, 3]) == 1
    assert num_kept([9, 2, 3], [1, 2, 3]) == 0
    assert num_kept([1], [1, 2, 3]) == 1


def test_tokens_kept_are_counted_with_the_families_that_lost_some() -> None:
    sure = [
        Sure("count", "a", (1, 2, 4, 5, 6)),
        Sure("copy", "b", (1, 2, 4, 5, 6)),
        Sure("copy", "c", (1, 2, 4, 5, 6)),
    ]
    other: Any = Answering({"a": [1, 2, 4, 5, 6], "b": [1, 2, 9, 5, 6], "c": [1, 2, 4, 5, 9]})
    assert keeping(other, sure) == {
        "kept": 11,
        "of": 15,
        "share": 11 / 15,
        "whole answers kept": 1,
        "lost by family": {"copy": 4},
    }
    assert by_family(sure) == {"copy": 2, "count": 1}


def test_readmes_line_gives_the_share_of_each_format() -> None:
    kept = {"bfloat16": 1.0, "int8": 0.998, "int4": 0.981}
    quality = {name: {"sure tokens": {"share": share}} for name, share in kept.items()}
    said = results.forms_lines({"quality": {"sure questions": 120, **quality}})
    assert "to 120 questions" in said[0]
    assert said[0].endswith("bfloat16 100.0%, int8 99.8%, int4 98.1%")

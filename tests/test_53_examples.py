"""The example processors: a ban, a watermark that can be found, a hook that ends answers."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.sampling.example_processors import Ban, Moderation, Watermark, banned_texts
from tests.ranks import save_eight_heads, split
from tests.serving import load_tiny, save_tiny

SAMPLED = SamplingParams(max_tokens=120, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_banned_sequence_never_comes_and_its_tokens_alone_may() -> None:
    ban = Ban(((7, 8), (9,)))
    for output, banned in (((), {9}), ((7,), {8, 9}), ((8, 7), {8, 9}), ((7, 5), {9})):
        logits = ban.apply(torch.zeros(12), output)
        assert {i for i, logit in enumerate(logits) if logit == -torch.inf} == banned


def test_texts_are_banned_in_both_spellings() -> None:
    ban = banned_texts(["no"], lambda text: [ord(letter) for letter in text])
    assert ban.sequences == ((110, 111), (32, 110, 111))


def test_an_answer_under_a_ban_is_without_it(directory: Path) -> None:
    pairs = tuple((a, b) for a in range(3, 259) for b in range(3, 100))
    llm = load_tiny(directory, logits_processor=Ban(pairs))
    output = llm.generate("ab", SamplingParams(max_tokens=30, seed=1, ignore_eos=True)).token_ids
    assert not set(itertools.pairwise(output)) & set(pairs)
    free = load_tiny(directory).generate("ab", SAMPLED).token_ids
    assert set(itertools.pairwise(free)) & set(pairs)


def test_a_watermark_is_found_with_its_key_alone(directory: Path) -> None:
    mark = Watermark(key=1234, bias=4.0)
    marked = load_tiny(directory, logits_processor=mark).generate("ab", SAMPLED).token_ids
    plain = load_tiny(directory).generate("ab", SAMPLED).token_ids
    assert mark.z_score(marked) > 5
    assert abs(mark.z_score(plain)) < 3.5
    assert abs(Watermark(key=1235).z_score(marked)) < 3.5
    assert mark.z_score([5]) == 0


def test_the_green_share_of_the_vocabulary_is_as_given() -> None:
    for share in (0.25, 0.5, 0.75):
        mark = Watermark(key=3, share=share)
        found = [mark.green(before, np.arange(49_152)).mean() for before in range(5)]
        assert np.allclose(found, share, atol=0.02)


def test_a_text_without_watermark_scores_like_chance() -> None:
    mark, numbers = Watermark(key=9), np.random.default_rng(0)
    scores = [mark.z_score(numbers.integers(0, 49_152, 200).tolist()) for _ in range(200)]
    assert abs(np.mean(scores)) < 0.3
    assert 0.8 < np.std(scores) < 1.2


def test_a_judge_ends_an_answer(directory: Path) -> None:
    seen = []

    def judge(output: object) -> bool:
        seen.append(tuple(output))  # type: ignore[arg-type, var-annotated]
        return len(seen) == 3

    llm = load_tiny(directory, logits_processor=Moderation(judge, end_id=2, interval=4))
    output = llm.generate("ab", SamplingParams(max_tokens=60, seed=7, logit_bias={2: -100}))
    assert output.finish_reason == "stop"
    assert [len(each) for each in seen] == [4, 8, 12]
    assert output.token_ids[-1] == 2
    assert len(output.token_ids) == 13


def test_over_ranks_and_with_a_form_the_answers_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    directory = save_eight_heads(tmp_path)
    params = SamplingParams(max_tokens=30, seed=2, n=2, structured_outputs={"regex": "[ab]{8,20}"})
    mark = Watermark(key=5)
    alone = LLM.load(directory, weights="float32", logits_processor=mark)
    expected = [choice.token_ids for choice in alone.generate("hi", params).choices]
    with split(directory, 2, logits_processor=mark) as llm:
        found = llm.generate("hi", params)
    assert [choice.token_ids for choice in found.choices] == expected
    assert all(set(choice.text) <= {"a", "b"} for choice in found.choices)

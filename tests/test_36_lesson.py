"""Chapter 36's own code: steps by rows, recorded drafts, the naive way, gains, stored results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.protocols import Proposer
from minigen.sequence import Sequence
from minigen.speculative.ngram import NgramProposer
from minigen_course.ch36_speculative import lesson, reference
from minigen_course.lab.inspect_model import manager_of, read_along
from tools.chapters import ROOT

PROMPT = [5, 6, 7, 8, 9] * 3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 2.0}


@pytest.fixture(scope="module")
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", block_size=4, num_blocks=64)


def owned(llm: LLM) -> int:
    return len(manager_of(llm).rows)


def test_loads_are_the_same_every_time_and_differ_by_seed() -> None:
    for make in (lesson.editing, lesson.copying, lesson.story):
        assert make(1) == make(1) != make(2)
    assert lesson.editing(1).count('"number"') > lesson.records(1).count('"id"') == 5
    assert lesson.renamed(lesson.records(1)).startswith(lesson.editing(1).splitlines()[-1])
    assert lesson.copying(1).count(lesson.records(1, 3)) == 2


def test_rows_are_timed_and_leave_no_blocks(llm: LLM) -> None:
    found = lesson.row_seconds(llm, 12, (1, 2, 5), repeats=2)
    assert set(found) == {1, 2, 5}
    assert all(each > 0 for each in found.values())
    assert owned(llm) == 0


def test_stored_steps_are_those_of_the_benchmark() -> None:
    path = ROOT / "benchmarks" / "results" / "34_step_cost.json"
    forms = json.loads(path.read_text(encoding="utf-8"))["forms"]
    for form, stored in lesson.STORED_STEPS.items():
        points = [each for each in forms[form]["points"] if each["context"] == 256]
        measured = {each["sequences"]: each["measured_ms"] for each in points}
        assert stored == pytest.approx(measured, rel=1e-3)


def test_costs_lie_between_measured_ones_and_grow_in_line_beyond() -> None:
    assert lesson.relative({1: 2.0, 4: 3.0}) == {1: 1.0, 4: 1.5}
    assert lesson.cost_of(COSTS, 3) == pytest.approx(1.15)
    assert lesson.cost_of(COSTS, 32) == pytest.approx(4.0)


def test_expected_tokens_are_those_of_the_formula_and_of_draws() -> None:
    assert lesson.expected_tokens(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert lesson.expected_tokens(1.0, 5) == 6
    assert lesson.expected_tokens(0.0, 5) == 1
    right = np.random.default_rng(0).random((20_000, 4)) < 0.7
    given = 1 + np.cumprod(right, axis=1).sum(axis=1).mean()
    assert lesson.expected_tokens(0.7, 4) == pytest.approx(given, abs=0.03)


def test_the_gain_is_tokens_over_time() -> None:
    assert lesson.gain(0.8, 0, COSTS) == 1
    assert lesson.gain(0.8, 3, COSTS) == pytest.approx(2.952 / 1.2)
    assert lesson.gain(0.8, 3, COSTS, draft_cost=0.5) == pytest.approx(2.952 / 2.7)
    assert lesson.gain(0.8, 3, COSTS, batch=4) == pytest.approx(2.952 / (2.0 / 1.2))


def test_the_best_number_agrees_with_the_exercise() -> None:
    relative = [lesson.cost_of(COSTS, count + 1) for count in range(16)]
    for acceptance in (0.0, 0.2, 0.5, 0.8, 0.95, 1.0):
        best = lesson.best_drafts(acceptance, COSTS, 15)
        assert best == reference.best_count(acceptance, relative)
    assert lesson.best_drafts(0.0, COSTS, 15) == 0


def test_the_naive_way_with_rank_1_is_greedy_decoding(llm: LLM) -> None:
    right = llm.generate(PROMPT, GREEDY).token_ids
    assert lesson.lenient_answer(llm, PROMPT, 1, 4, 24)[0] == right
    found, steps = lesson.lenient_answer(llm, PROMPT, llm.config.vocab_size, 4, 24)
    assert len(found) == 24
    assert steps < 24  # every draft is accepted
    assert owned(llm) == 0


def test_recorded_rounds_make_up_the_answer(llm: LLM) -> None:
    recorded = lesson.Recorded(NgramProposer(1, 3))
    assert isinstance(recorded, Proposer)
    drafted = lesson.Drafted(llm, recorded, most=4)
    with drafted.count_work() as work:
        answer = drafted.generate(PROMPT, GREEDY).token_ids
    rounds = recorded.rounds(answer)
    assert [token for each in rounds for token in each.tokens] == answer
    assert len(rounds) == work.steps
    assert sum(each.right for each in rounds) == work.tokens_accepted
    assert sum(len(each.drafts) for each in rounds) == work.tokens_drafted > 0
    assert recorded.drafts == []


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_engine_with_drafts_gives_the_same_texts_as_by_load(
    llm: LLM, tiny_directory: Path, adaptive: bool
) -> None:
    usual = llm.engine.speculator
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": adaptive}
    by_load = LLM.load(
        tiny_directory, weights="float32", block_size=4, num_blocks=64, speculative_config=config
    )
    engines: dict[str, lesson.Generates] = {
        "plain": llm,
        "drafts": lesson.Drafted(llm, NgramProposer(2, 4), 4, adaptive),
        "by load": by_load,
        "wrong": lesson.Drafted(llm, lesson.AlwaysWrong(), 4, adaptive),
    }
    runs = lesson.compared(engines, [PROMPT, [9, 9, 9]], GREEDY, repeats=1)
    assert llm.engine.speculator is usual
    assert runs["plain"].drafted == 0
    assert runs["plain"].share == 0
    alone = [llm.generate(each, GREEDY).token_ids for each in (PROMPT, [9, 9, 9])]
    assert runs["plain"].answers == runs["wrong"].answers == alone
    if not adaptive:
        assert runs["drafts"].drafted == runs["by load"].drafted > 0
        assert runs["drafts"].accepted == runs["by load"].accepted > 0
        assert runs["drafts"].steps == runs["by load"].steps <= runs["plain"].steps
    assert lesson.times_as_fast(runs["plain"], runs["plain"]) == 1


def test_a_changed_text_is_noticed(llm: LLM) -> None:
    class Other:
        def generate(self, *asked: Any, **more: Any) -> Any:
            found = llm.generate([PROMPT], GREEDY, progress=False)
            found[0].choices[0].token_ids[-1] += 1
            return found

        def count_work(self) -> Any:
            return llm.count_work()

    engines: dict[str, lesson.Generates] = {"plain": llm, "other": Other()}
    with pytest.raises(AssertionError, match="changed a text"):
        lesson.compared(engines, [PROMPT], GREEDY, repeats=1)


def test_a_prediction_saves_steps_and_changes_nothing(llm: LLM) -> None:
    (letter,) = llm.tokenizer.encode("a", add_special_tokens=False)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logit_bias={letter: 100.0}
    )
    text = "b c d"
    right = llm.generate(text, params).token_ids
    assert right == [letter] * 24
    found, steps = lesson.predicted_answer(llm, text, params, "a" * 24)
    assert found == right
    assert steps < lesson.num_steps(llm, text, params, "another salt") == 24


def test_one_step_gives_the_logits_of_a_whole_answer(llm: LLM) -> None:
    answer = llm.generate(PROMPT, GREEDY).token_ids
    found = lesson.answer_logits(llm, PROMPT, answer)
    assert found.argmax(-1).tolist() == answer
    one_by_one = read_along(llm, [*PROMPT, *answer]).logits[0][len(PROMPT) - 1 : -1]
    torch.testing.assert_close(found, one_by_one)
    assert owned(llm) == 0


def test_all_layers_agree_with_themselves(llm: LLM) -> None:
    agreement = lesson.shallow_agreement(llm, PROMPT, 3)
    assert list(agreement) == list(range(llm.config.num_layers + 1))
    assert agreement[llm.config.num_layers] == 1
    some = lesson.shallow_agreement(llm, PROMPT, 3, every=2)
    assert some == {
        each: agreement[each] for each in range(llm.config.num_layers % 2, len(agreement), 2)
    }
    by_depth = lesson.depth_probs(llm, PROMPT)
    assert len(by_depth) == len(agreement)
    assert [each.sum() for each in by_depth] == pytest.approx([1] * len(by_depth))
    (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1)).token_ids
    assert by_depth[-1].argmax() == greedy


def test_a_sequence_to_look_at_has_the_tokens() -> None:
    found = lesson.sequence_of(PROMPT)
    assert isinstance(found, Sequence)
    assert found.token_ids == PROMPT


def test_stored_gains_are_read_by_form_load_way_and_batch(tmp_path: Path) -> None:
    way = {"ratio": 2.5, "ratios": [2.4, 2.6], "right of tested": 0.7}
    results = {
        "environment": {"cpu": "any"},
        "tokens": 128,
        "turns": 5,
        "load average": [0.1, 0.2],
        "bfloat16": {
            "gains": {"copying": {"ngram": way}},
            "batches": {
                "copying, batch 1": {"tokens a second without": 90.0, "always four": way},
                "copying, batch 16": {
                    "tokens a second without": 500.0,
                    "always four": way | {"ratio": 1.1},
                    "adaptive": way | {"ratio": 1.2},
                },
                "copying, first batch that loses": None,
            },
        },
        "auto": {"batches": {}},
    }
    path = tmp_path / "36_speculative.json"
    assert lesson.stored_gains(path) is None
    path.write_text(json.dumps(results), encoding="utf-8")
    found = lesson.stored_gains(path)
    assert found is not None
    assert found.ratios == {
        ("bfloat16", "copying"): {"always four": {1: 2.5, 16: 1.1}, "adaptive": {16: 1.2}}
    }
    assert found.at("bfloat16", "copying", "always four", 16) == 1.1
    assert found.at("bfloat16", "copying", "adaptive", 1) is None
    assert found.at("auto", "copying", "always four", 1) is None

"""A learner's loop serves as the engine's does; figures show the given numbers."""

from pathlib import Path
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.errors import RequestError
from minigen_course.ch25_engine.figures import ladder, loop, step_parts
from minigen_course.ch25_engine.lesson import StepLoop, answers_by_loop
from tests.foreign_parts import LowestFirst, QueueScheduler, likeliest

TEXTS = ["a", "some longer text, which goes on for a while", "b c", "another"]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
SIZES: dict[str, Any] = {"weights": "float32", "max_num_seqs": 3, "block_size": 4}


def test_a_small_loop_gives_the_engines_answers(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, **SIZES, max_num_batched_tokens=8, num_blocks=24)
    expected = [each.text for each in llm.generate(TEXTS, GREEDY, progress=False)]
    assert answers_by_loop(llm, StepLoop, TEXTS, GREEDY) == expected
    several = SamplingParams(temperature=1.0, seed=4, max_tokens=5, ignore_eos=True, n=3)
    (output,) = llm.generate(TEXTS[:1], several, progress=False)
    by_loop = answers_by_loop(llm, StepLoop, TEXTS[:1], several)
    assert by_loop == [choice.text for choice in output.choices]


def test_a_loop_serves_with_a_learners_parts_all_at_once(tiny_directory: Path) -> None:
    own = LLM.load(tiny_directory, **SIZES)
    parts = {"allocator": LowestFirst, "scheduler": QueueScheduler, "sampler": likeliest}
    foreign = LLM.load(tiny_directory, **SIZES, **parts)
    expected = [each.text for each in own.generate(TEXTS, GREEDY, progress=False)]
    assert answers_by_loop(foreign, StepLoop, TEXTS, GREEDY) == expected


def test_a_loop_without_progress_is_an_error_and_the_engine_is_free_again(
    tiny_directory: Path,
) -> None:
    class Still(StepLoop):
        def step(self) -> int:
            return 0

    llm = LLM.load(tiny_directory, **SIZES)
    with pytest.raises(RequestError, match="computed nothing"):
        answers_by_loop(llm, Still, TEXTS, GREEDY)
    assert not llm.engine.has_work()
    assert llm.kv_usage == 0
    assert answers_by_loop(llm, StepLoop, TEXTS, GREEDY)


def test_an_engine_with_another_owner_is_not_stepped(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, **SIZES)
    assert llm.engine.claim()
    with pytest.raises(RequestError, match="Another caller steps"):
        answers_by_loop(llm, StepLoop, TEXTS, GREEDY)


def test_a_ladder_shows_each_rung_as_a_multiple_of_the_baseline() -> None:
    (axes,) = ladder({"none": 2.5, "slow": 10.0, "fast": 140.0}, "slow").axes
    assert [bar.get_width() for bar in axes.patches] == [2.5, 10, 140]
    assert [text.get_text().strip() for text in axes.texts] == [
        *("2 (0.25 times the baseline)", "10 (the baseline)", "140 (14 times the baseline)"),
    ]


def test_a_steps_parts_follow_each_other_and_are_closer_without_the_model() -> None:
    spent = {"1 at once": {"schedule": 1e-5, "run": 4e-3, "commit": 3e-5}}
    left, right = step_parts(spent, "run").axes
    assert [(bar.get_x(), bar.get_width()) for bar in left.patches] == [
        *(pytest.approx((0, 0.01)), pytest.approx((0.01, 4)), pytest.approx((4.01, 0.03))),
    ]
    assert [bar.get_width() for bar in right.patches] == pytest.approx([10, 30])
    assert [bar.get_facecolor() for bar in right.patches] == [
        *(left.patches[0].get_facecolor(), left.patches[2].get_facecolor()),
    ]


def test_the_loop_shows_the_four_calls_in_order() -> None:
    (axes,) = loop().axes
    calls = sorted(each.get_text()[:2] for each in axes.texts if each.get_text()[:1].isdigit())
    assert calls == ["1.", "2.", "3.", "4."]

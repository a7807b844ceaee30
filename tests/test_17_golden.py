"""The default model's answers in float32 are the stored golden answers."""

import json
from pathlib import Path

import pytest

from minigen import LLM, SamplingParams
from tests.golden.make import ANSWERS, answer_all

pytestmark = pytest.mark.model


def test_ten_answers_are_the_stored_ones(default_llm: LLM) -> None:
    kept = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert len(kept) == 10
    assert answer_all(default_llm) == kept


def test_bfloat16_gives_a_likely_answer_too(default_model_path: Path) -> None:
    llm = LLM.load(default_model_path, weights="bfloat16")
    answer = llm.chat(
        [{"role": "user", "content": "How many days are in a week?"}],
        SamplingParams(temperature=0, max_tokens=24),
    )
    assert "7" in answer.text or "seven" in answer.text
    assert answer.finish_reason == "stop"

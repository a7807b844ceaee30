"""Predictions are compared, tasks are shown, and a solution opens after its check has passed."""

import math

import pytest

from minigen.model.attention import attention
from minigen_course import predict, reveal, task, using
from minigen_course.ch17_dense_cache.reference import DenseCache
from minigen_course.figures import show as show_module
from minigen_course.grading import task as task_module
from minigen_course.grading.predict import OPEN


@pytest.mark.parametrize(
    ("value", "found", "words"),
    [
        (None, 20, "How many? 20 blocks. (You made no prediction.)"),
        (20, 20, "How many? You predicted 20 blocks; it is 20 blocks: right."),
        (24, 20, "You predicted 24 blocks; it is 20 blocks: near enough."),
        (60, 20, "3.0 times too high."),
        (0.5, 20, "40 times too low."),
        (0, 20, "too low."),
        (3, -3, "too high."),
        (-8, -2, "4.0 times too low."),
        (3, math.inf, "far too low."),
        (3, math.nan, "not comparable."),
        (1e-320, 7, "far too low."),
        (-7, -1e-320, "far too low."),
        (1e-200, 2e-200, "2.0 times too low."),
    ],
)
def test_a_number_is_compared_as_a_factor(
    value: float | None, found: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    guess = predict("How many?", value)
    assert capsys.readouterr().out.startswith(OPEN if value is None else "Your prediction: ")
    guess.compare(found, "blocks")
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("value", "words"), [(" the FIRST ", "right."), ("last", "not this time")])
def test_a_word_is_compared_without_case_and_spaces(
    value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    predict("Which?", value).compare("the first")
    assert words in capsys.readouterr().out


def test_a_measured_value_keeps_its_mark(capsys: pytest.CaptureFixture[str]) -> None:
    predict("How long?", None).compare(0.5, "s", measured=True)
    assert "⟨0.500 s⟩" in capsys.readouterr().out


def test_a_wrong_prediction_is_refused_with_a_sentence() -> None:
    with pytest.raises(TypeError, match="a number, a word, or None, not True"):
        predict("Which?", True)
    for value in (math.inf, -math.inf, math.nan, 10**5000):
        with pytest.raises(ValueError, match="a number of at most 1e308, a word, or None"):
            predict("Which?", value)
    with pytest.raises(ValueError, match=r"at least 1, not 0\.5"):
        predict("Which?", 3, within=0.5)
    with pytest.raises(TypeError, match="The answer is a word, but the prediction is 3"):
        predict("Which?", 3).compare("left")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The objects that a notebook would display."""
    found: list[dict[str, str]] = []
    for module in (task_module, show_module):
        monkeypatch.setattr(module, "display", lambda data, raw: found.append(data))
    return found


def test_a_task_has_its_level_its_hints_and_its_harder_part(shown: list[dict[str, str]]) -> None:
    task(14, "attention")
    text = shown[0]["text/markdown"]
    assert text.startswith("**Core exercise: `attention`.** Write causal attention")
    assert "the first of 3 hints" in text
    assert "**Harder, if you like:** Write it without repeating K and V" in text


def test_a_solution_stays_folded_until_the_learners_part_has_passed(
    shown: list[dict[str, str]],
) -> None:
    reveal(14, attention=attention)
    assert "return" not in shown[0]["text/plain"]
    assert "blob/main/minigen/model/attention.py" in shown[0]["text/html"]
    reveal(14, "attention")
    reveal(14, attention=lambda q: q)
    assert len(shown) == 3
    assert all("def attention(" in each["text/plain"] for each in shown[1:])
    with pytest.raises(ValueError, match="Chapter 14 has no attend; it has causal_mask"):
        reveal(14, "attend")


def test_a_part_is_called_yours_only_if_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with using(14, attention=attention):
        pass
    assert capsys.readouterr().out == "the package's own attention was called 0 times\n"
    with using(17, DenseCache=DenseCache):
        pass
    assert capsys.readouterr().out == "the course's own DenseCache was created 0 times\n"


def test_created_objects_are_counted_and_the_class_is_left_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class DenseCache:
        def __init__(self, size: int):
            self.size = size

    own = DenseCache.__init__
    with using(17, DenseCache=DenseCache):
        assert DenseCache(3).size == 3
    assert capsys.readouterr().out == "your DenseCache was created 1 time\n"
    assert DenseCache.__init__ is own

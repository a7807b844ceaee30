"""Messages of checks name the first difference; measured values are marked."""

from typing import Any

import pytest
import torch

from minigen_course.figures.show import measured, significant
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        ([1, 2, 3], [1, 5, 3], "ids: element 1 is 2; it should be 5."),
        ([1, 2], [1, 2, 3], r"ids: got \[1, 2\]; it should be \[1, 2, 3\]."),
        (None, 3, "ids: got None; it should be 3."),
        (True, 1, "ids: got True; it should be 1."),
        ("a" * 200, "b", r"ids: got 'a{76}\.\.\.; it should be 'b'."),
    ],
)
def test_unequal_values_are_named(found: Any, expected: Any, words: str) -> None:
    with pytest.raises(Wrong, match=words):
        expect_equal(found, expected, "ids")


def test_equal_values_pass() -> None:
    expect_equal([1, 2], (1, 2), "ids")
    expect_equal(1.0, 1, "ids")
    expect(True, "nothing")
    expect_close(torch.ones(2, 3), torch.ones(2, 3) + 1e-6, "x", ("row", "column"))


def test_the_first_number_that_differs_is_named_by_its_axes() -> None:
    wrong = torch.zeros(2, 3)
    wrong[1, 2] = 0.5
    with pytest.raises(Wrong, match=r"1 of 6 numbers differ, first at token 1, dimension 2: 0.5"):
        expect_close(wrong, torch.zeros(2, 3), "the output", ("token", "dimension"))
    with pytest.raises(Wrong, match=r"got the shape \[3, 2\]; it should be \[2, 3\] \(token, dim"):
        expect_close(wrong.T, torch.zeros(2, 3), "the output", ("token", "dimension"))
    with pytest.raises(Wrong, match="should be a tensor"):
        expect_close([0.0], torch.zeros(1), "the output", ("token",))


def test_measured_values_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    measured("decode", 28.1234, "tokens/s")
    measured("ratio", 8.0)
    assert capsys.readouterr().out == "decode: ⟨28.1 tokens/s⟩\nratio: ⟨8.00⟩\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.500"), (99.96, "100"), (-3.14159, "-3.14"), (12345.0, "12,300")],
)
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text

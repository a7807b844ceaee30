"""The checks of chapter 36's exercises, one test each.

    pytest exercises/36_speculative                   all of them
    pytest exercises/36_speculative -k NAME           those of one exercise
    minigen check exercises/36_speculative --hint 1   each part in a process of its own, with hints
"""

from pathlib import Path

import pytest

from minigen_course.grading.exercise import Wrong
from minigen_course.handout.starter import Case, cases_of


@pytest.mark.parametrize("case", cases_of("36", Path(__file__).parent), ids=str)
def test_exercise(case: Case) -> None:
    try:
        case.run()
    except Wrong as wrong:
        pytest.fail(str(wrong), pytrace=False)

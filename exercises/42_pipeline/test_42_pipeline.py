"""The checks of chapter 42's exercises, one test each.

    pytest exercises/42_pipeline                   all of them
    pytest exercises/42_pipeline -k NAME           those of one exercise
    minigen check exercises/42_pipeline --hint 1   each part in a process of its own, with hints
"""

from pathlib import Path

import pytest

from minigen_course.grading.exercise import Wrong
from minigen_course.handout.starter import Case, cases_of


@pytest.mark.parametrize("case", cases_of("42", Path(__file__).parent), ids=str)
def test_exercise(case: Case) -> None:
    try:
        case.run()
    except Wrong as wrong:
        pytest.fail(str(wrong), pytrace=False)

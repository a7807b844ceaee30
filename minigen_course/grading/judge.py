"""Run checks on a part that is pickled on stdin: `python -m minigen_course.grading.judge`.

Arguments: the chapter, the exercise or hunt, the file for the verdict, the secret word that the
verdict must contain, and which checks to run: `first` (up to the first that fails), `each`, or the
seed of a course, for the cases that it draws.
"""

import json
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minigen_course.grading.check import end_with_parent
from minigen_course.grading.exercise import Check, Wrong, exercises
from minigen_course.grading.hunt import hunts_of
from minigen_course.grading.stub import STILL_EMPTY
from minigen_course.grading.varied import own_check


def verdict_on(checks: Sequence[Check], part: Any) -> tuple[bool, str]:
    """Return whether the part passes all checks, and a sentence that says so or what is wrong."""
    failed = next(filter(None, verdicts_on(checks, part)), None)
    return (False, failed) if failed else (True, _praise(checks))


def _praise(checks: Sequence[Check]) -> str:
    return f"all {len(checks)} checks passed." if len(checks) > 1 else "the check passed."


def verdicts_on(checks: Sequence[Check], part: Any) -> Iterator[str]:
    """Yield an empty text for each check that the part passes, otherwise what is wrong."""
    for number, each in enumerate(checks, 1):
        aim = (each.__doc__ or each.__name__).strip().splitlines()[0].rstrip(":.")
        said = ""
        try:
            each(part)
        except Wrong as error:
            said = f"check {number} of {len(checks)} ({aim}): {error}"
        except NotImplementedError:
            said = STILL_EMPTY
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = (
                f"check {number} of {len(checks)} ({aim}) raised "
                f"{type(error).__name__}: {error} (line {where.lineno} of {where.name})"
            )
        yield said


def _checks_of(chapter: str, name: str, which: str) -> Sequence[Check]:
    for hunt in hunts_of(chapter):
        if hunt.name == name:
            return hunt.all_checks()
    exercise = exercises(chapter)[name]
    return exercise.checks if which in ("first", "each") else (own_check(exercise, int(which)),)


def main() -> None:
    """Judge the part on stdin."""
    end_with_parent()
    chapter, name, file, word, which = sys.argv[1:]
    torch.set_num_threads(1)
    part = pickle.load(sys.stdin.buffer)
    checks = _checks_of(chapter, name, which)
    if which == "each":
        said = list(verdicts_on(checks, part))
        failed = [each for each in said if each]
        passed, message = not failed, next(iter(failed), _praise(checks))
        each_passed = [not each for each in said]
    else:
        passed, message = verdict_on(checks, part)
        each_passed = [passed]
    found = {"word": word, "passed": passed, "message": message, "each": each_passed}
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

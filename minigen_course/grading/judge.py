"""Run checks on a part that is pickled on stdin: `python -m minigen_course.grading.judge`.

Arguments: the chapter, the exercise or hunt, the file for the verdict, and the secret word that
the verdict must contain.
"""

import json
import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minigen_course.grading.exercise import Check, Wrong, exercises
from minigen_course.grading.hunt import HUNTS, hunt_of
from minigen_course.grading.stub import STILL_EMPTY


def verdict_on(checks: Sequence[Check], part: Any) -> tuple[bool, str]:
    """Return whether the part passes all checks, and a sentence that says so or what is wrong."""
    for number, each in enumerate(checks, 1):
        aim = (each.__doc__ or each.__name__).strip().splitlines()[0].rstrip(":.")
        try:
            each(part)
        except Wrong as error:
            return False, f"check {number} of {len(checks)} ({aim}): {error}"
        except NotImplementedError:
            return False, STILL_EMPTY
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return False, (
                f"check {number} of {len(checks)} ({aim}) raised "
                f"{type(error).__name__}: {error} (line {where.lineno} of {where.name})"
            )
    return True, f"all {len(checks)} checks passed."


def _checks_of(chapter: str, name: str) -> Sequence[Check]:
    if chapter in HUNTS and hunt_of(chapter).name == name:
        return hunt_of(chapter).all_checks()
    return exercises(chapter)[name].checks


def main() -> None:
    """Judge the part on stdin."""
    chapter, name, file, word = sys.argv[1:]
    torch.set_num_threads(1)
    part = pickle.load(sys.stdin.buffer)
    passed, message = verdict_on(_checks_of(chapter, name), part)
    found = {"word": word, "passed": passed, "message": message}
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

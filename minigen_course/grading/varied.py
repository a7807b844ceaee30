"""Cases of an exercise drawn by a seed: a part must do with them what the package's own does.

A course has its own seed, so the examples in its assignments and the cases that are kept back
differ from one cohort to the next.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigen_course.grading.exercise import FOLDERS, Check, Exercise, Wrong, expect_equal

TOLERANCE = 1e-4
MOST_SHOWN = 24  # numbers of a tensor; a larger one is shown by its shape
LONGEST = 400  # characters of a shown value


def called(part: Any, **inputs: Any) -> Any:
    """Call the part with these inputs, in this order."""
    return part(*inputs.values())


@dataclass(frozen=True)
class Varied:
    """What a seed changes in an exercise.

    `what` names it, for the instructor. `draw` returns the inputs of one case by name, new ones at
    each call; `run` gives them to a part and returns what is compared: plain values, tensors,
    arrays, or sequences and dicts of these. The docstring of `run` says to a learner what is done
    with the part. `tolerance` is relative and absolute.
    """

    what: str
    draw: Callable[[Random], dict[str, Any]]
    run: Callable[..., Any] = called
    tolerance: float = TOLERANCE
    num_cases: int = 5

    def inputs(self, seed: int, name: str, number: int) -> dict[str, Any]:
        """Return the inputs of a case; case 0 is the example that learners see."""
        return self.draw(Random(f"{seed} {name} {number}"))

    def result(self, part: Any, seed: int, name: str, number: int) -> Any:
        """Return what `part` does with a case."""
        return self.run(part, **self.inputs(seed, name, number))


def varied_of(chapter: str) -> Mapping[str, Varied]:
    """Return what varies in each exercise of a chapter, by the exercise's name."""
    found: Mapping[str, Varied] = assigned(chapter, "cases").VARIED
    return found


def assigned(chapter: str, name: str) -> Any:
    """Return a module of what may be assigned of a chapter: `cases` or `questions`."""
    (folder,) = (each for each in FOLDERS if each.name[2:4] == chapter)
    return importlib.import_module(f"minigen_course.{folder.name}.assignment.{name}")


def own_check(exercise: Exercise, seed: int) -> Check:
    """Return a check of the cases that `seed` draws; it compares with the package's own part."""
    varied = varied_of(exercise.chapter)[exercise.name]
    solution = exercise.solution  # as it is now: a grader closes the package's own part later

    @cache  # for the next part that is checked
    def right_result(number: int) -> Any:
        return varied.result(solution, seed, exercise.name, number)

    def on_other_inputs(part: Any) -> None:
        for number in range(1, varied.num_cases + 1):
            right = right_result(number)
            found = varied.result(part, seed, exercise.name, number)
            inputs = shown_inputs(varied, exercise, seed, number)
            what = f"case {number} of {varied.num_cases}, with {inputs}"
            expect_same(found, right, what, varied.tolerance)

    on_other_inputs.__doc__ = "other inputs, drawn for this course:"
    return on_other_inputs


def example(exercise: Exercise, seed: int) -> str:
    """Return the example of a course, for its assignment: inputs and the result, as Markdown."""
    varied = varied_of(exercise.chapter)[exercise.name]
    result = varied.result(exercise.solution, seed, exercise.name, 0)
    inputs = shown_inputs(varied, exercise, seed, 0)
    if varied.run is called:
        return f"**Example.** With {inputs}, it returns `{shown(result)}`."
    done = " ".join((varied.run.__doc__ or "").split())
    return f"**Example.** {done} With {inputs}, the result is `{shown(result)}`."


def shown_inputs(varied: Varied, exercise: Exercise, seed: int, number: int) -> str:
    """Return the inputs of a case as Markdown."""
    inputs = varied.inputs(seed, exercise.name, number)
    return ", ".join(f"`{name} = {shown(value)}`" for name, value in inputs.items())


def expect_same(found: Any, right: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise `Wrong` unless two results are the same, numbers within the tolerance.

    Arrays and tensors must have the same shape; a list may equal a tuple. nan equals nan.
    """
    if isinstance(right, Tensor | np.ndarray):
        _expect_same_numbers(found, right, what, tolerance)
    elif isinstance(right, Mapping):
        if not isinstance(found, Mapping) or found.keys() != right.keys():
            raise Wrong(f"{what}: got {shown(found)}; it should be {shown(right)}.")
        for key, value in right.items():
            expect_same(found[key], value, f"{what}: {key!r}", tolerance)
    elif isinstance(right, Sequence) and not isinstance(right, str | bytes | range):
        if not isinstance(found, Sequence) or len(found) != len(right):
            raise Wrong(f"{what}: got {shown(found)}; it should be {shown(right)}.")
        for index, (mine, its) in enumerate(zip(found, right, strict=True)):
            expect_same(mine, its, f"{what}: element {index}", tolerance)
    elif isinstance(right, float) and isinstance(found, int | float) and found is not True:
        if not _is_close(found, right, tolerance):
            raise Wrong(f"{what}: got {found!r}; it should be {right!r}.")
    else:
        expect_equal(found, right, what)


def _is_close(found: float, right: float, tolerance: float) -> bool:
    if not (math.isfinite(found) and math.isfinite(right)):  # no tolerance reaches infinity
        return found == right or (math.isnan(found) and math.isnan(right))
    return abs(found - right) <= tolerance * (1 + abs(right))


def _expect_same_numbers(found: Any, right: Any, what: str, tolerance: float) -> None:
    if type(found) is not type(right):
        kind = "a tensor" if isinstance(right, Tensor) else "an array"
        raise Wrong(f"{what}: got {shown(found)}; it should be {kind}.")
    mine, its = torch.as_tensor(found), torch.as_tensor(right)
    if mine.shape != its.shape:
        raise Wrong(f"{what}: got the shape {list(mine.shape)}; it should be {list(its.shape)}.")
    close = partial(torch.isclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    wrong = ~close(mine.double(), its.double())
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise Wrong(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} numbers differ, first at "
            f"{list(place)}: {mine[place].item():.6g}; it should be {its[place].item():.6g}."
        )


def shown(value: Any) -> str:
    """Return a value as it is shown in an example or a message; a large tensor by its shape.

    >>> shown(torch.ones(9, 9))
    'a tensor of the shape [9, 9] with the sum 81'
    >>> shown([0.1234567, "a", torch.zeros(2)])
    "[0.1235, 'a', tensor([0., 0.])]"
    """
    text = _shown(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        if torch.as_tensor(value).numel() > MOST_SHOWN:
            article = "a" if kind == "tensor" else "an"
            total = float(torch.as_tensor(value).double().sum())
            return f"{article} {kind} of the shape {list(value.shape)} with the sum {total:.4g}"
        return " ".join(repr(value).split())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(each)}" for key, each in value.items()) + "}"
    text = repr(value)
    return f"a {type(value).__name__}" if " at 0x" in text else text


def normal(random: Random, *shape: int) -> Tensor:
    """Return a tensor of normally distributed float32 numbers that a case's `random` decides."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.getrandbits(31)))


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the name of the error that it raises: `"raises ValueError"`.

    `Wrong` and `NotImplementedError` are passed on.
    """
    try:
        return call()
    except (Wrong, NotImplementedError):
        raise
    except Exception as error:
        return f"raises {type(error).__name__}"

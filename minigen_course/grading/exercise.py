"""Exercises: a part of the package that the learner builds, its checks, and their comparisons.

A failed comparison says where two values differ and what was expected.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Any], None]

CHAPTERS = {  # chapter number -> the module of its checks
    "00": "minigen_course.ch00_map.exercises",
    "11": "minigen_course.ch11_weights.exercises",
    "12": "minigen_course.ch12_tokenizer.exercises",
    "13": "minigen_course.ch13_layers.exercises",
    "14": "minigen_course.ch14_attention.exercises",
    "15": "minigen_course.ch15_transformer.exercises",
    "16": "minigen_course.ch16_sampling.exercises",
    "17": "minigen_course.ch17_dense_cache.exercises",
    "21": "minigen_course.ch21_blocks.exercises",
    "22": "minigen_course.ch22_paged.exercises",
    "23": "minigen_course.ch23_prefix.exercises",
    "24": "minigen_course.ch24_scheduler.exercises",
    "25": "minigen_course.ch25_engine.exercises",
    "31": "minigen_course.ch31_triton.exercises",
    "32": "minigen_course.ch32_flash_attention.exercises",
    "33": "minigen_course.ch33_paged_attention.exercises",
    "34": "minigen_course.ch34_cpu_kernels.exercises",
    "41": "minigen_course.ch41_tensor_parallel.exercises",
    "51": "minigen_course.ch51_server.exercises",
    "52": "minigen_course.ch52_slo.exercises",
}


@dataclass(frozen=True)
class Exercise:
    """A part that the learner writes, with its solution, checks in order, and hints in levels.

    `solution` is the package's own object. Each check takes the learner's object, and raises
    `Wrong` (with a sentence) or any error of the learner's code. `statement` (Markdown) says what
    to build. `use` is a cell that runs the part, named `mine`, in the engine. `harder` is a harder
    task.
    """

    name: str
    solution: Any
    checks: tuple[Check, ...]
    hints: tuple[str, ...]
    statement: str
    use: str
    harder: str


def exercises(chapter: str) -> dict[str, Exercise]:
    """Return a chapter's exercises by name. Raises `ValueError` for a chapter that has none."""
    if chapter not in CHAPTERS:
        known = ", ".join(sorted(CHAPTERS))
        raise ValueError(f"Chapter {chapter} has no exercises; choose one of {known}.")
    found: tuple[Exercise, ...] = importlib.import_module(CHAPTERS[chapter]).EXERCISES
    return {each.name: each for each in found}


class Wrong(AssertionError):
    """A learner's part is wrong; the message says where, and what would be right."""


def expect(condition: object, message: str) -> None:
    """Raise `Wrong` with the message unless the condition holds."""
    if not condition:
        raise Wrong(message)


def expect_equal(found: Any, expected: Any, what: str) -> None:
    """Raise `Wrong` unless two plain values or sequences are equal; name the first difference.

    `what` describes the value in the message. A list may equal a tuple and an int a float, but True
    does not equal 1 (except as elements of sequences).
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(expected):
            raise Wrong(f"{what}: got {_shown(found)}; it should be {_shown(expected)}.")
        for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
            if mine != right:
                raise Wrong(f"{what}: element {index} is {mine!r}; it should be {right!r}.")
        return
    comparable = type(found) is type(expected) or _both_numbers(found, expected)
    if not comparable or found != expected:
        raise Wrong(f"{what}: got {_shown(found)}; it should be {_shown(expected)}.")


def expect_close(
    found: Any, expected: Tensor, what: str, axes: Sequence[str], tolerance: float = 1e-4
) -> None:
    """Raise `Wrong` unless two tensors have equal shapes and close numbers.

    The message names the first difference; `axes` are its words for the axes, as in `("token",
    "head", "dimension")`. `tolerance` is relative and absolute. nan equals nan, and dtypes are not
    compared.
    """
    if not isinstance(found, Tensor):
        raise Wrong(f"{what}: got {_shown(found)}; it should be a tensor.")
    if found.shape != expected.shape:
        raise Wrong(
            f"{what}: got the shape {list(found.shape)}; it should be {list(expected.shape)} "
            f"({', '.join(axes)})."
        )
    mine, right = found.double(), expected.double()
    close = torch.isclose(mine, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    if close.all():
        return
    place = (~close).nonzero()[0].tolist()
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
    raise Wrong(
        f"{what}: {int((~close).sum())} of {close.numel()} numbers differ, first at {where}: "
        f"{mine[tuple(place)]:.6g}; it should be {right[tuple(place)]:.6g}."
    )


def _both_numbers(found: object, expected: object) -> bool:
    numbers = int | float
    return (
        isinstance(found, numbers)
        and isinstance(expected, numbers)
        and isinstance(found, bool) == isinstance(expected, bool)
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

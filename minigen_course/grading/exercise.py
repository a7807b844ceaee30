"""Exercises: a part of the package that the learner builds, and how it is checked."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    task. `level` says how much the exercise asks for.
    """

    name: str
    solution: Any
    checks: tuple[Check, ...]
    hints: tuple[str, ...]
    statement: str
    use: str
    harder: str
    level: Literal["warm-up", "core", "stretch"] = "core"


def exercises(chapter: str) -> dict[str, Exercise]:
    """Return a chapter's exercises by name. Raises `ValueError` for a chapter that has none."""
    if chapter not in CHAPTERS:
        known = ", ".join(sorted(CHAPTERS))
        raise ValueError(f"Chapter {chapter} has no exercises; choose one of {known}.")
    found: tuple[Exercise, ...] = importlib.import_module(CHAPTERS[chapter]).EXERCISES
    return {each.name: each for each in found}

"""What an exercise is: a part of the package to build oneself, and how it is checked."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], None]

CHAPTERS = {  # chapter number -> the module of its checks
    "00": "minigen.teach.checks.map",
    "11": "minigen.teach.checks.weights",
    "12": "minigen.teach.checks.tokenizer",
    "13": "minigen.teach.checks.layers",
    "14": "minigen.teach.checks.attention",
    "15": "minigen.teach.checks.transformer",
    "16": "minigen.teach.checks.sampling",
    "17": "minigen.teach.checks.dense_cache",
    "21": "minigen.teach.checks.blocks",
    "22": "minigen.teach.checks.paged",
    "23": "minigen.teach.checks.prefix",
    "24": "minigen.teach.checks.scheduler",
    "25": "minigen.teach.checks.engine",
    "31": "minigen.teach.checks.first_kernels",
    "32": "minigen.teach.checks.flash_attention",
    "33": "minigen.teach.checks.paged_attention",
    "34": "minigen.teach.checks.cpu_kernels",
    "41": "minigen.teach.checks.tensor_parallel",
    "51": "minigen.teach.checks.server",
    "52": "minigen.teach.checks.slo",
}


@dataclass(frozen=True)
class Exercise:
    """A part that a learner writes: the package's own, its checks in order, hints in levels.

    `solution` is the package's object. Each check takes the learner's, and raises `Wrong` (with a
    sentence) or whatever the learner's code raises. `statement` (Markdown) says what to build,
    `use` is a cell that runs the part, called `mine`, in the engine; `harder` asks for more.
    """

    name: str
    solution: Any
    checks: tuple[Check, ...]
    hints: tuple[str, ...]
    statement: str
    use: str
    harder: str


def exercises(chapter: str) -> dict[str, Exercise]:
    """A chapter's exercises by name. Raises `ValueError` for a chapter that has none."""
    if chapter not in CHAPTERS:
        known = ", ".join(sorted(CHAPTERS))
        raise ValueError(f"Chapter {chapter} has no exercises; these have some: {known}.")
    found: tuple[Exercise, ...] = importlib.import_module(CHAPTERS[chapter]).EXERCISES
    return {each.name: each for each in found}

"""A chapter's exercises as one notebook: statement, stub, check, use in the engine, harder part.

`exercises/NN_stem.ipynb` is this notebook, and `python -m tools.exercise_sheets` writes it.
"""

import re
from collections.abc import Iterator
from typing import Any

from minigen_course.grading.exercise import Exercise, exercises
from minigen_course.grading.hunt import Hunt, cell_of, hunt_call, hunts_of
from minigen_course.handout.course_files import REPOSITORY, headings

HUNT_RULES = (
    "Find the mistake in the part below. Catch it with a test that fails on this part and passes "
    "on every correct one. Then mend the part in the same cell."
)
INSTALL = """\
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )"""
SETUP = """\
%load_ext minigen_course
import torch

from minigen_course import check, using"""

LISTED = """\
# Exercises

Every exercise of the course, chapter by chapter. Each is a part of the engine, or a small program
beside it, whose body you write. There are two ways to work:

- **In a notebook**: open `NN_stem.ipynb`, here or on Colab or Binder. It has the statement, a stub,
  the check with its hints, and the lines that run your part in the engine. (The chapters in
  [notebooks/](../notebooks) have the same exercises at the place where they belong.)
- **In your editor**: `NN_stem/` has one Python file for each exercise. `minigen check` judges your
  parts, each in a process of its own, and `pytest` runs each check as one test.

```bash
minigen workspace my-course           # all of this in a folder of your own
minigen check exercises/24_scheduler  # which parts pass; --hint 1 helps with the others
pytest exercises/24_scheduler -k SlotScheduler
```

Levels: a **warm-up** is a few lines, a **core** exercise is the heart of its chapter, a **stretch**
is for those who want more. The times are estimates, for someone who has just read the chapter.
"""


def exercise_notebook(chapter: str) -> dict[str, Any]:
    """Return a chapter's exercises as a notebook without outputs."""
    cells = [_markdown(head(chapter)), _code(INSTALL), _code(SETUP)]
    for each in exercises(chapter).values():
        cells += _exercise_cells(chapter, each)
    for hunt in hunts_of(chapter):
        cells += _hunt_cells(chapter, hunt)
    for number, cell in enumerate(cells):
        cell["id"] = f"exercise-{chapter}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def head(chapter: str) -> str:
    """Return the head of the notebook: title, badges, the exercises with their levels and times."""
    found = headings()[chapter]
    colab, binder = _addresses(found.name)
    rows = "\n".join(
        f"| {name} | {level} | {points} | {minutes} min |"
        for name, level, points, minutes in table_rows(chapter)
    )
    return f"""\
# Exercises of chapter {chapter}

[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})
[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})

The chapter: [{found.title}](../notebooks/{found.name}.ipynb). Its exercises take about \
{found.minutes} minutes in all.

| exercise | level | points | time |
|---|---|--:|--:|
{rows}

Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your \
part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a \
clearer one."""


def listing() -> str:
    """Return exercises/README.md: how to work there, and every exercise."""
    rows, number, minutes = [], 0, 0
    for chapter, heading in headings().items():
        colab, binder = _addresses(heading.name)
        first = f"[{chapter} {heading.stem.replace('_', ' ')}]({heading.name}.ipynb)"
        cloud = f"[Colab]({colab}) [Binder]({binder})"
        for name, level, points, its_minutes in table_rows(chapter):
            word = name.rpartition("`")[0].rpartition("`")[2]
            file = f"hunt_{word}.py" if name.startswith("bug hunt") else file_name(word)
            rows.append(
                f"| {first} | {cloud} | [{name}]({heading.name}/{file}) | {level} | {points} "
                f"| {its_minutes} min |"
            )
            first, cloud = "", ""
            number, minutes = number + 1, minutes + its_minutes
    head = "| chapter | open in | exercise | level | points | time |\n|---|---|---|---|--:|--:|"
    total = f"In all: {number} exercises, about {minutes / 60:.0f} hours."
    return "\n".join([LISTED, head, *rows, "", total, ""])


def table_rows(chapter: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, level, points and minutes of each exercise of a chapter, the bug hunts last."""
    for each in exercises(chapter).values():
        yield f"`{each.name}`", each.level, each.points, each.minutes
    for hunt in hunts_of(chapter):
        yield f"bug hunt: `{hunt.name}`", "core", hunt.points, hunt.minutes


def _addresses(name: str) -> tuple[str, str]:
    """Return where Colab and Binder open a chapter's exercises."""
    path, repository = f"exercises/{name}.ipynb", REPOSITORY.partition("com/")[2]
    return (
        f"https://colab.research.google.com/github/{repository}/blob/main/{path}",
        f"https://mybinder.org/v2/gh/{repository}/main?labpath={path}",
    )


def file_name(name: str) -> str:
    """Return the Python file of an exercise.

    >>> file_name("KVPool"), file_name("StopWatcher"), file_name("keep_top_p")
    ('kv_pool.py', 'stop_watcher.py', 'keep_top_p.py')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return f"{words.lower()}.py"


def measures(level: str, points: int, minutes: int) -> str:
    """Return level, points and time as they stand behind an exercise's name."""
    return f"{level}, {points} points, about {minutes} minutes"


def runs_engine(exercise: Exercise) -> bool:
    """Return whether an exercise's use runs the engine: chapter 17 runs a model without it.

    >>> [runs_engine(exercises(chapter)[name]) for chapter, name in
    ...  (("53", "derivative"), ("53", "forced_text"), ("17", "DenseCache"))]
    [True, False, False]
    """
    loads = re.search(r"\b(LLM|llm|load_model)\b", exercise.use) is not None
    return loads and "continue_dense" not in exercise.use


def _exercise_cells(chapter: str, each: Exercise) -> list[dict[str, Any]]:
    what = measures(each.level.capitalize(), each.points, each.minutes)
    return [
        _markdown(f"## {each.name}\n\n*{what}.*\n\n{each.statement}"),
        _code(each.stub),
        _code(f"mine = check({int(chapter)}, {each.name}={each.name})"),
        _markdown("In the running engine:" if runs_engine(each) else "Try it:"),
        _code(each.use),
        _markdown(f"**Harder.** {each.harder}"),
    ]


def _hunt_cells(chapter: str, hunt: Hunt) -> list[dict[str, Any]]:
    call = hunt_call(chapter, hunt, "hunt")
    what = measures("Core", hunt.points, hunt.minutes)
    return [
        _markdown(
            f"## A bug hunt: {hunt.name}\n\n*{what}.*\n\n{hunt.story}\n\n{HUNT_RULES}",
        ),
        _code(cell_of(hunt.module)),
        _code(f"from minigen_course.grading.hunt import hunt\n\nmine = {call}"),
    ]


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": text,
    }

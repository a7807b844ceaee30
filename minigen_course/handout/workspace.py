"""The learner's workspace: notebooks and exercises in a folder, and which of them pass."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minigen.errors import OptionError
from minigen_course.grading.check import judge
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import HUNTS, Caught, Hunt, hunts_of
from minigen_course.grading.stub import STILL_EMPTY
from minigen_course.handout.answers import (
    HUNT_MARK,
    MARK,
    answers_in,
    cells_of,
    explained,
    marks_in,
)
from minigen_course.handout.course_files import REPOSITORY, headings, notebooks_folder
from minigen_course.handout.sheet import exercise_notebook, listing
from minigen_course.handout.starter import files_of

EXERCISES = Path("exercises")
LINK = f"]({REPOSITORY}/blob/main/"
MOVED = {"unpermuted_rows": "11"}  # the chapter in which an exercise once stood: answers are there


def make_workspace(folder: Path) -> list[Path]:
    """Copy notebooks and exercises to `folder` unless they exist there; return the new paths.

    It can be repeated after an upgrade: it adds new chapters and never changes the learner's files.
    """
    wanted = {
        Path(each.name): each.read_text(encoding="utf-8")
        for each in sorted(notebooks_folder().glob("[0-9]*.ipynb"))
    }
    wanted |= {EXERCISES / name: text for name, text in exercise_files().items()}
    new = []
    for name, text in wanted.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_relinked(text, name), encoding="utf-8")
            new.append(path)
    return new


def exercise_files() -> dict[str, str]:
    """Return the files of exercises/ by their path in it: a listing, notebooks, Python files."""
    found = {"README.md": listing()}
    for chapter, heading in headings().items():
        notebook = json.dumps(exercise_notebook(chapter), indent=1, ensure_ascii=False)
        found[f"{heading.name}.ipynb"] = f"{notebook}\n"
        for name, text in files_of(chapter, heading.name).items():
            found[f"{heading.name}/{name}"] = text
    return found


def _relinked(text: str, name: Path) -> str:
    """Return a file's text with its links to other files of the repository as a workspace needs."""
    if name.suffix == ".py":
        return text
    here = "../" * (len(name.parts) - 1)
    text = text.replace("](../notebooks/", f"]({here}").replace("](../exercises/", "](exercises/")
    return re.sub(r"\]\(\.\./(?=(?:docs|minigen|minigen_course|tests|benchmarks)/)", LINK, text)


@dataclass(frozen=True)
class Standing:
    """The state of an exercise in a workspace; `message` is the result of its check."""

    chapter: str
    name: str
    passed: bool
    message: str


def progress(folder: Path) -> Iterator[Standing]:
    """Check every exercise of a workspace, in order.

    An answer in the chapter's own notebook counts as well. Raises `OptionError` for a folder that
    is not a workspace.
    """
    if not (folder / EXERCISES).is_dir():
        raise OptionError(f"{folder} is not a workspace; `minigen workspace {folder}` creates one.")
    for chapter in sorted(CHAPTERS):
        paths = _notebooks(folder, chapter)
        for name, exercise in exercises(chapter).items():
            places = [*paths, *_notebooks(folder, MOVED[name])] if name in MOVED else paths
            yield _standing(chapter, name, MARK + exercise.dotted, partial(_one, name), places)
        for hunt in hunts_of(chapter):
            mark = HUNT_MARK + hunt.module
            yield _standing(chapter, hunt.name, mark, partial(_caught, hunt), paths)


def check_paths(
    paths: Sequence[Path], seed: int | None = None
) -> Iterator[tuple[Standing, Sequence[str]]]:
    """Check every answer in these files and folders; yield its standing and its exercise's hints.

    With a course's seed, a part must pass the cases that the seed draws as well. Raises
    `OptionError` for a path without an answer, before anything is checked.
    """
    found = [(path, mark) for each in paths for path, mark in _marked(each)]
    by_mark = {
        each.dotted: (chapter, name)
        for chapter in CHAPTERS
        for name, each in exercises(chapter).items()
    }
    hunts = {each.module: (chapter, each) for chapter in HUNTS for each in hunts_of(chapter)}
    for path, dotted in found:
        if dotted not in by_mark and dotted not in hunts:
            raise OptionError(f"{path} answers {dotted}, which is no exercise of this minigen.")
    for path, dotted in found:
        if dotted in by_mark:
            chapter, name = by_mark[dotted]
            take, hints = partial(_one, name), exercises(chapter)[name].hints
            yield _standing(chapter, name, MARK + dotted, take, [path], seed), hints
        else:
            chapter, hunt = hunts[dotted]
            take = partial(_caught, hunt)
            yield _standing(chapter, hunt.name, HUNT_MARK + dotted, take, [path]), hunt.hints


def _marked(path: Path) -> list[tuple[Path, str]]:
    """Return the files of a path that have answers, each with the full names of their parts."""
    files = [path]
    if path.is_dir():
        notebooks = sorted(path.glob("*.ipynb"))
        sources = {each.with_suffix(".py") for each in notebooks}  # one of a pair is enough
        files = notebooks + [each for each in sorted(path.glob("*.py")) if each not in sources]
    try:
        found = [(each, dotted) for each in files for dotted in marks_in(each)]
    except ValueError as error:
        raise OptionError(f"{path} {error}.") from error
    if not found:
        raise OptionError(
            f"{path} has no answer: a cell or a file with the line {MARK!r}, as its stub has."
        )
    return found


def _notebooks(folder: Path, chapter: str) -> list[Path]:
    """Return the files of a workspace that may hold answers to a chapter's exercises."""
    exercises_here, chapters_here = folder / EXERCISES, folder
    return [
        *sorted(exercises_here.glob(f"{chapter}*.ipynb")),
        *sorted(exercises_here.glob(f"{chapter}_*/*.py")),
        *sorted(chapters_here.glob(f"{chapter}*.ipynb")),
    ]


def _one(name: str, names: Mapping[str, Any]) -> Any:
    return names.get(name)


def _caught(hunt: Hunt, names: Mapping[str, Any]) -> Caught:
    return Caught(names.get(hunt.test.__name__), names.get(hunt.handed.__name__))


def _standing(
    chapter: str,
    name: str,
    mark: str,
    take: Callable[[Mapping[str, Any]], Any],
    paths: list[Path],
    seed: int | None = None,
) -> Standing:
    messages = []
    for path in paths:
        names = answers_in(path, mark)
        if names is None:
            continue
        if isinstance(names, str):
            messages.append(f"{path.name}: {names}")
            continue
        result = judge(chapter, name, take(names))
        if result.passed and seed is not None:
            result = judge(chapter, name, take(names), which=str(seed))
        if result.passed:
            return Standing(chapter, name, True, result.message)
        messages.append(explained(result.message, cells_of(path)))
    started = [each for each in messages if each != STILL_EMPTY]
    message = next(iter(started or messages), "has no cell in this workspace")
    return Standing(chapter, name, False, message)

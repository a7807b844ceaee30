"""The course's notebooks: their folder, the learner's workspace, and what passes in it."""

import ast
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from minigen.errors import OptionError
from minigen_course.grading.check import judge
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import HUNTS, Caught, Hunt, cell_of, hunt_of
from minigen_course.grading.stub import STILL_EMPTY, stub

EXERCISES = "exercises"
HUNT_RULES = (
    "Find the mistake in the part below. Catch it with a test that fails on this part and passes "
    "on every correct one. Then mend the part in the same cell."
)
MARK, HUNT_MARK = "# exercise: ", "# hunt: "
MOVED = {"unpermuted_rows": "11"}  # the chapter in which an exercise once stood: answers are there


def notebooks_folder() -> Path:
    """Return the folder of minigen's notebooks, in a clone or in an installed wheel."""
    clone = Path(__file__).resolve().parents[2] / "notebooks"
    if (clone / "chapters.toml").exists():
        return clone
    for file in importlib.metadata.files("minigen") or ():
        if file.name == "chapters.toml":
            return Path(str(file.locate())).resolve().parent
    raise OptionError("This installation of minigen has no notebooks; install it from its wheel.")


def make_workspace(folder: Path) -> list[Path]:
    """Copy notebooks and exercises to `folder` unless they exist there; return the new paths.

    It can be repeated after an upgrade: it adds new chapters and never changes the learner's files.
    """
    wanted = {Path(each.name): each for each in sorted(notebooks_folder().glob("[0-9]*.ipynb"))}
    new = [folder / name for name in wanted if not (folder / name).exists()]
    (folder / EXERCISES).mkdir(parents=True, exist_ok=True)
    for name, source in wanted.items():
        if folder / name in new:
            shutil.copyfile(source, folder / name)
    for chapter in CHAPTERS:
        stem = next((name.stem for name in wanted if name.name.startswith(f"{chapter}_")), chapter)
        path = folder / EXERCISES / f"{stem}.ipynb"
        if not path.exists():
            path.write_text(json.dumps(exercise_notebook(chapter), indent=1), encoding="utf-8")
            new.append(path)
    return new


def exercise_notebook(chapter: str) -> dict[str, Any]:
    """Return a chapter's exercises as a notebook: statement, stub, check, and use in the engine."""
    cells = [_markdown(f"# Exercises of chapter {chapter}")]
    cells.append(
        _code("%load_ext minigen_course\nimport torch\n\nfrom minigen_course import check, using")
    )
    for each in exercises(chapter).values():
        cells += [
            _markdown(f"## {each.name}\n\n{each.statement}"),
            _code(stub(each.dotted)),
            _code(f"mine = check({int(chapter)}, {each.name}={each.name})"),
            _markdown("In the running engine:"),
            _code(each.use),
            _markdown(f"**Harder.** {each.harder}"),
        ]
    if chapter in HUNTS:
        cells += _hunt_cells(chapter, hunt_of(chapter))
    for number, cell in enumerate(cells):
        cell["id"] = f"exercise-{chapter}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _hunt_cells(chapter: str, hunt: Hunt) -> list[dict[str, Any]]:
    test, handed = hunt.test.__name__, hunt.handed.__name__
    call = f"hunt({int(chapter)}, test={test}, mended={handed})"
    return [
        _markdown(f"## A bug hunt: {hunt.name}\n\n{hunt.story}\n\n{HUNT_RULES}"),
        _code(cell_of(HUNTS[chapter])),
        _code(f"from minigen_course.grading.hunt import hunt\n\nmine = {call}"),
    ]


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
        if chapter in HUNTS:
            hunt, mark = hunt_of(chapter), HUNT_MARK + HUNTS[chapter]
            yield _standing(chapter, hunt.name, mark, partial(_caught, hunt), paths)


def _notebooks(folder: Path, chapter: str) -> list[Path]:
    """Return the notebooks of a workspace that may hold answers to a chapter's exercises."""
    return [*folder.glob(f"{EXERCISES}/{chapter}*.ipynb"), *folder.glob(f"{chapter}*.ipynb")]


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
) -> Standing:
    messages = []
    for path in paths:
        names = _answers(path, mark)
        if names is None:
            continue
        if isinstance(names, str):
            messages.append(f"{path.name}: {names}")
            continue
        result = judge(chapter, name, take(names))
        if result.passed:
            return Standing(chapter, name, True, result.message)
        messages.append(result.message)
    started = [each for each in messages if each != STILL_EMPTY]
    message = next(iter(started or messages), "has no cell in this workspace")
    return Standing(chapter, name, False, message)


def _answers(path: Path, mark: str) -> Mapping[str, Any] | str | None:
    """Return what a notebook defines; None if no cell starts with `mark`.

    A str says why the notebook cannot be read or the marked cell cannot be run. Only imports,
    functions, classes and assignments of plain values are run: no loops, no prints.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be read as a notebook ({error})"
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if not any(source.startswith(mark) for source in sources):
        return None
    module = ModuleType("__main__")  # pickled by value, like a notebook's own objects
    for source in sources:
        try:
            statements = _definitions(source)
            exec(compile(ast.Module(statements, []), path.name, "exec"), vars(module))
        except Exception as error:
            if source.startswith(mark):
                return f"raised {type(error).__name__}: {error}"
    return vars(module)


def _definitions(source: str) -> list[ast.stmt]:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    body = ast.parse("\n".join(lines)).body
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return [
        each
        for each in body
        if isinstance(each, kept)
        or (isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant))
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

"""An assignment as a notebook for nbgrader, and the configuration that it needs.

Source: nbgrader's documentation, "Creating and grading assignments"; cell metadata of version 3.
"""

import base64
from collections.abc import Iterator
from typing import Any

from minigen_course.handout.sheet import INSTALL
from minigen_course.kit.assignment import (
    Assignment,
    Item,
    code_cell,
    introduction,
    markdown_cell,
    notebook_of,
)

SECONDS = 300  # for one cell: it may wait for a process of its own that judges a part
GOES_ON = "raises-exception"  # JupyterLab's tag: after an error here the next cells still run
RULES = (
    "When all is done, restart the kernel, run all cells, save, and hand in this file under its "
    "name. Other cells may be added; the cells with points are replaced when it is graded."
)
SETUP = """\
%load_ext minigen_course
import torch

from minigen_course import check, using"""
KEPT = {
    "part": "# Other inputs are tried here when it is graded.",
    "question": "# The answer is judged here when it is graded.",
}
CONFIG = '''\
"""The configuration of this course for nbgrader; `nbgrader` finds it in this folder."""

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "minigen"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__"]
c.ClearSolutions.code_stub = {{"python": "# (the end of your part)"}}
c.ClearSolutions.text_stub = "*Your answer, in a few sentences.*"
c.ExecutePreprocessor.timeout = {seconds}
c.IncludeHeaderFooter.header = ""
c.GenerateFeedback.preprocessors = [  # learners see no hidden test, which has the course's seed
    "nbgrader.preprocessors.GetGrades",
    "nbgrader.preprocessors.ClearHiddenTests",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]
'''


def config() -> str:
    """Return the text of nbgrader_config.py."""
    return CONFIG.format(seconds=SECONDS)


def source_notebook(assignment: Assignment) -> dict[str, Any]:
    """Return the notebook with all solutions and kept tests; nbgrader makes the learners' of it."""
    cells = [
        _read_only(markdown_cell(introduction(assignment, RULES)), "introduction"),
        _read_only(code_cell(INSTALL), "install"),
        _read_only(code_cell(SETUP), "setup"),
    ]
    for item in assignment.items:
        cells += _cells(item)
    return notebook_of(cells, assignment.name)


def _cells(item: Item) -> Iterator[dict[str, Any]]:
    yield _read_only(text_cell(item), f"{item.id}_text")
    if item.kind == "written":
        answer = (
            f"### BEGIN SOLUTION\n{item.solution}\n\nRubric:\n\n{item.rubric}\n### END SOLUTION"
        )
        yield _marked(markdown_cell(answer), item.id, solution=True, points=item.points)
        return
    part = f"{item.stub}\n\n\n### BEGIN SOLUTION\n{item.solution}\n### END SOLUTION"
    yield _marked(code_cell(part), item.id, solution=True)
    seen = code_cell(item.seen, tags=[GOES_ON])
    if item.seen_points:
        yield _marked(seen, f"{item.id}_seen", points=item.seen_points)
    else:
        yield _read_only(seen, f"{item.id}_form")
    if item.kept:
        kept = f"{KEPT[item.kind]}\n### BEGIN HIDDEN TESTS\n{item.kept}\n### END HIDDEN TESTS"
        yield _marked(code_cell(kept), f"{item.id}_kept", points=item.kept_points)
    if item.harder:
        yield after_cell(item)


def after_cell(item: Item) -> dict[str, Any]:
    """Return what a learner may do after an exercise: run the part in the engine, go further."""
    use = f"In the running engine, with `mine = {item.name}`:\n\n```python\n{item.use}\n```\n\n"
    return markdown_cell(f"{use if item.use else ''}**Harder** (no points). {item.harder}")


def text_cell(item: Item) -> dict[str, Any]:
    """Return what is asked, with its picture as an attachment."""
    if not item.picture:
        return markdown_cell(item.text)
    name = f"{item.name}.png"
    cell = markdown_cell(f"{item.text}\n\n![the figure](attachment:{name})")
    picture = base64.b64encode(item.picture).decode("ascii")
    return cell | {"attachments": {name: {"image/png": picture}}}


def _read_only(cell: dict[str, Any], name: str) -> dict[str, Any]:
    return _marked(cell, name, locked=True)


def _marked(
    cell: dict[str, Any],
    name: str,
    *,
    solution: bool = False,
    locked: bool = False,
    points: float | None = None,
) -> dict[str, Any]:
    """Return a cell with nbgrader's metadata; tests are locked, answers are not."""
    is_graded = points is not None
    found = {
        "schema_version": 3,
        "grade_id": name,
        "grade": is_graded,
        "solution": solution,
        "locked": locked or (is_graded and not solution),
        "task": False,
    }
    if is_graded:
        found["points"] = points
    return cell | {"metadata": {**cell["metadata"], "nbgrader": found}}

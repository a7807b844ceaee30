"""An assignment as a notebook for `otter assign`, which makes Gradescope's autograder of it.

Otter counts passed tests, so each check of a part is a test with its share of the points. Source:
Otter-Grader's documentation, "Otter Assign notebook format", version 6.
"""

from collections.abc import Iterator
from typing import Any

from minigen_course.kit.assignment import (
    AWARD,
    Assignment,
    Item,
    code_cell,
    introduction,
    markdown_cell,
    notebook_of,
)
from minigen_course.kit.for_nbgrader import SETUP, after_cell, text_cell

RULES = (
    "When all is done, restart the kernel, run all cells, save, and hand in this file. The last "
    "cell writes a zip file with it, for systems that ask for one."
)
REQUIREMENTS = "minigen[notebooks] @ git+https://github.com/minigen/minigen"
ASSIGNMENT = """\
# ASSIGNMENT CONFIG
name: {name}
init_cell: true
check_all_cell: false
export_cell:
  pdf: false
  run_tests: false
generate:
  pdf: false
  show_stdout: true
  seed_required: false
  show_hidden: false
requirements:
  - {requirements}
run_tests: false
tests:
  ok_format: true"""
TEST = '''\
""" # BEGIN TEST CONFIG
points: {points:g}
hidden: {hidden}
""" # END TEST CONFIG
{code}'''


def master_notebook(assignment: Assignment) -> dict[str, Any]:
    """Return the notebook with all solutions and hidden tests; `otter assign` reads it."""
    cells = [
        _raw(ASSIGNMENT.format(name=assignment.name, requirements=f'"{REQUIREMENTS}"')),
        markdown_cell(introduction(assignment, RULES)),
        code_cell(SETUP),
    ]
    for item in assignment.items:
        cells += _cells(item)
    return notebook_of(cells, assignment.name)


def _cells(item: Item) -> Iterator[dict[str, Any]]:
    is_manual = item.kind == "written"
    head = f"# BEGIN QUESTION\nname: {item.id}"
    yield _raw(f"{head}\npoints: {item.points:g}\nmanual: true" if is_manual else head)
    yield text_cell(item)
    yield _raw("# BEGIN SOLUTION")
    if is_manual:
        yield markdown_cell(f"{item.solution}\n\nRubric:\n\n{item.rubric}")
    else:
        yield code_cell(
            f"{item.stub}\n\n\n# BEGIN SOLUTION NO PROMPT\n{item.solution}\n# END SOLUTION"
        )
    yield _raw("# END SOLUTION")
    if not is_manual:
        yield _raw("# BEGIN TESTS")
        for points, hidden, code in _tests(item):
            test = TEST.format(points=points, hidden=str(hidden).lower(), code=code)
            yield code_cell(test)
        yield _raw("# END TESTS")
    yield _raw("# END QUESTION")
    if item.harder:
        yield after_cell(item)


def _tests(item: Item) -> Iterator[tuple[float, bool, str]]:
    """Yield points, whether it is hidden, and code of each test; a test prints nothing."""
    chapter, named = int(item.chapter), f"{item.name}={item.handed}"
    for number in range(1, item.num_checks + 1):
        share = _share(item.seen_points, item.num_checks, number)
        yield share, False, _test("passes_check", f"passes_check({chapter}, {number}, {named})")
    if item.kind == "part":
        call = f"passes_check({chapter}, 1, seed={item.seed}, {named})"
        yield item.kept_points, True, _test("passes_check", call)
    if item.kind == "question":
        call = f"passes_answer({chapter}, seed={item.seed}, {named})"
        yield item.kept_points, True, _test("passes_answer", call)


def _test(name: str, call: str) -> str:
    return f"from {AWARD} import {name}\n\n{call}"


def _share(points: float, count: int, number: int) -> float:
    """Return the points of one of `count` checks; rounded so that all of them make `points`."""
    return round(round(points * number / count, 2) - round(points * (number - 1) / count, 2), 2)


def _raw(text: str) -> dict[str, Any]:
    return {"cell_type": "raw", "metadata": {}, "source": text}

"""Find a learner's answers in a notebook or in a Python file, and run their definitions.

An answer is a cell that begins with `# exercise: ` (or `# hunt: `) and the full name of a part, or
a Python file with such a line.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

MARK, HUNT_MARK = "# exercise: ", "# hunt: "
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MARKED = re.compile(rf"(?m)^(?:{MARK}|{HUNT_MARK})([\w.]+)$")


def cells_of(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells; of a Python file, its text as one cell.

    Raises `ValueError` for what is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".ipynb":
            return [text]
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = "a notebook" if path.suffix == ".ipynb" else "Python code"
        raise ValueError(f"cannot be read as {kind} ({error})") from error


def marks_in(path: Path) -> list[str]:
    """Return the full names of the parts that a file has answers to, in order.

    Raises `ValueError` for a file that cannot be read.
    """
    return [found[1] for source in cells_of(path) for found in MARKED.finditer(source)]


def answers_in(path: Path, mark: str) -> Mapping[str, Any] | str | None:
    """Return what a file defines; None if no cell has `mark` as a line.

    A str says why the file cannot be read or the marked cell cannot be run. Only imports,
    functions, classes and assignments of plain values are run: no loops, no prints. What the marked
    cell defines stays, even if a later cell imports something of that name.
    """
    try:
        sources = cells_of(path)
    except ValueError as error:
        return str(error)
    if not any(_has(source, mark) for source in sources):
        return None
    module = ModuleType("__main__")  # pickled by value, like a notebook's own objects
    answer: dict[str, Any] = {}
    for source in sources:
        try:
            statements = definitions_in(source)
            exec(compile(ast.Module(statements, []), path.name, "exec"), vars(module))
        except Exception as error:
            if _has(source, mark):
                return f"raised {type(error).__name__}: {error}"
        else:
            if _has(source, mark):
                answer |= {name: vars(module)[name] for name in defined_by(statements)}
    return vars(module) | answer


def defined_by(statements: Iterable[ast.stmt]) -> list[str]:
    """Return the names of the functions and classes among these statements, also second names."""
    found = []
    for each in statements:
        if isinstance(each, DEFINED):
            found.append(each.name)
        elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Name):
            found += [target.id for target in each.targets if isinstance(target, ast.Name)]
    return found


def _has(source: str, mark: str) -> bool:
    return mark in source.splitlines()


def definitions_in(source: str) -> list[ast.stmt]:
    """Return a cell's imports, functions, classes and assignments of plain values.

    `second = first` is kept if the cell defines a function or class `first` above. Raises
    `SyntaxError` for a cell that is no Python, apart from IPython's own commands.

    >>> cell = "async def one(): ...\\ntwo = one\\nthree = two\\none = print()\\nfour = 4"
    >>> [ast.unparse(each) for each in definitions_in(cell)][1:]
    ['two = one', 'three = two', 'four = 4']
    """
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines()]
    try:
        body = ast.parse("\n".join(lines)).body
    except ValueError as error:  # null bytes, before Python 3.12
        raise SyntaxError(str(error)) from None
    kept: list[ast.stmt] = []
    for each in body:
        if isinstance(each, (ast.Import, ast.ImportFrom, *DEFINED)):
            kept.append(each)
        elif isinstance(each, ast.Assign):
            is_second_name = isinstance(each.value, ast.Name) and each.value.id in defined_by(kept)
            if is_second_name or isinstance(each.value, ast.Constant):
                kept.append(each)
    return kept
